"""The processes of one run: which get threads and write files, and what each knows of the others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import instrument
from instrument import chrome
from instrument.cli import run_verb
from instrument.instrumentors.verdict import Verdict, drop_recorded_elsewhere
from instrument.profile.keys import loads
from instrument.recording import board
from instrument.runtime import environment

ENGINE = "def step(x): return x + 1\n"
API = "def handle(x): return x\n"

PROFILE = """
service: shop
device: {host: 100ms}
functions:
  - match: "api:handle"
  - match: "engine:step"
  - match: "nobody:has_it"
export:
  chrome: {path: "traces/{pid}.json"}
  otlp: {endpoint: "http://127.0.0.1:9", timeout: 100ms}
  summary: {to: "summaries/{pid}.txt"}
"""

THREADS = "[t.name for t in __import__('threading').enumerate() if t.name.startswith('instrument')]"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    for name in ("INSTRUMENT_PROFILE", "INSTRUMENT_RUN_PID", board.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    Path("engine.py").write_text(ENGINE)
    Path("api.py").write_text(API)
    Path("profile.yaml").write_text(PROFILE)
    yield tmp_path
    instrument.stop()


def run(source: str) -> subprocess.CompletedProcess[str]:
    Path("main.py").write_text(textwrap.dedent(source))
    command = [sys.executable, "-m", "instrument", "run", "--profile", "profile.yaml", "--", "main.py"]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240, env={**os.environ, "PYTHONPATH": "."}
    )


def written(folder: str) -> set[int]:
    return {int(path.stem) for path in Path(folder).glob("*.*")}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_parent_of_eight_workers_and_their_helpers_get_no_threads_and_write_no_files(method: str) -> None:
    done = run(f"""
        import multiprocessing, os, pathlib
        from multiprocessing import shared_memory

        def threads_of(pid):
            names = [path.read_text().strip() for path in pathlib.Path(f"/proc/{{pid}}/task").glob("*/comm")]
            return len(names)

        def work(x):
            from engine import step
            import time
            step(x)
            until = time.monotonic() + 240
            while "instrument-control" not in {THREADS} and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(0.1)  # in which no other thread begins
            return os.getpid(), {THREADS}

        if __name__ == "__main__":
            context = multiprocessing.get_context("{method}")
            shared = shared_memory.SharedMemory(create=True, size=8)  # which starts the resource tracker
            children = pathlib.Path(f"/proc/self/task/{{os.getpid()}}/children")
            with context.Pool(8) as pool:
                print("tracker", [threads_of(pid) for pid in children.read_text().split()][0])
                found = dict(pool.map(work, range(16), chunksize=1))
                print("workers", *sorted(found))
                print("names", *sorted(set(sum(found.values(), []))))
                pool.close()
                pool.join()
            shared.close()
            shared.unlink()
            print("parent", os.getpid(), {THREADS})
    """)
    assert done.returncode == 0, done.stderr
    told = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    workers = set(map(int, told["workers"].split()))
    assert told["tracker"] == "1"
    assert told["parent"].endswith(" []")
    assert told["names"].split() == ["instrument-control"]  # the agent reads, gauges too, and exports
    assert workers == written("traces") == written("summaries")
    for pid in workers:
        spans = chrome.load(f"traces/{pid}.json")[0].spans
        assert {span.site.name for span in spans} == {"step"}


@pytest.mark.slow
def test_a_forked_child_begins_its_threads_at_its_own_first_span() -> None:
    done = run(f"""
        import os, time
        import engine

        def told(*words):
            os.write(1, (" ".join(map(str, words)) + "\\n").encode())

        def child():
            pid = os.fork()
            if pid:
                os.waitpid(pid, 0)
            return pid == 0

        if child():
            time.sleep(0.4)  # longer than threads wait after a first span
            told("idle", *{THREADS})
            os._exit(0)
        if child():
            engine.step(1)
            until = time.monotonic() + 240
            while "instrument-control" not in {THREADS} and time.monotonic() < until:
                time.sleep(0.01)
            told("busy", *sorted({THREADS}))
            os._exit(0)
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "idle"
    assert "instrument-control" in done.stdout.splitlines()[1]


@pytest.mark.slow
def test_not_observed_lists_no_rule_that_is_at_work_in_another_process() -> None:
    done = run("""
        import subprocess, sys
        from api import handle
        handle(1)
        worker = "import engine, sys; engine.step(1); print('ready', flush=True); sys.stdin.readline()"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        child = subprocess.Popen([sys.executable, "-c", worker], **pipes, text=True)
        print(child.pid, child.stdout.readline())
        import time, os
        from instrument.recording import board
        end = time.monotonic() + 240
        while board.attached_mark("engine:step") not in board.read_marks() and time.monotonic() < end:
            time.sleep(0.01)
        child.communicate("\\n")
    """)
    assert done.returncode == 0, done.stderr
    assert len(written("summaries")) == 2
    for path in Path("summaries").iterdir():
        text = path.read_text()
        assert "nobody:has_it" in text, "what nobody has is named by all"
        missed = text.partition("Not observed")[2]
        assert "engine:step" not in missed
        assert "api:handle" not in missed


def test_a_parent_reports_what_was_not_observed_where_nobody_recorded() -> None:
    done = run("""
        import os
        child = os.fork()
        if child == 0:
            raise SystemExit
        os.waitpid(child, 0)
        print(os.getpid())
    """)
    assert done.returncode == 0, done.stderr
    assert written("summaries") == {int(done.stdout)}
    assert "engine:step" in next(Path("summaries").iterdir()).read_text()


def test_a_sub_interpreter_runs_as_without_us_and_the_summary_says_that_it_is_not_recorded() -> None:
    Path("profile.yaml").write_text("functions: [{match: 'api:handle'}]\nexport: {summary: {to: stderr}}\n")
    done = run(
        """
        import sys
        known = set(sys.modules)
        try: import _interpreters as interpreters
        except ImportError: import _xxsubinterpreters as interpreters
        assert interpreters.__name__ not in known
        inner = interpreters.create()
        begin = getattr(interpreters, "exec", None) or interpreters.run_string
        begin(inner, "import sys, json, threading; print('instrument.sessions' in sys.modules, flush=True)")
        interpreters.destroy(inner)
        """
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    assert done.stderr.count("Not observed: sub-interpreters: ") == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_a_process_whose_imports_are_timed_and_that_records_nothing_has_no_threads_and_says_so() -> None:
    Path("profile.yaml").write_text(
        "startup: auto\ndevice: {host: 100ms}\nexport: {summary: {to: 'summaries/{pid}.txt'}}"
    )
    done = run(f"""
        import os, colorsys, instrument.sessions.process
        print(os.getpid(), {THREADS})
    """)
    assert done.returncode == 0, done.stderr
    pid, _, threads = done.stdout.strip().partition(" ")
    assert threads == "[]"
    assert written("summaries") == {int(pid)}


def test_a_forking_program_of_its_own_session_writes_nothing_where_only_its_children_recorded() -> None:
    Path("main.py").write_text(
        textwrap.dedent("""
            import os
            import instrument
            instrument.start("profile.yaml")
            child = os.fork()
            if child == 0:
                import engine
                engine.step(1)
                raise SystemExit
            os.waitpid(child, 0)
            instrument.stop()
            print(child, sorted(name for name in os.environ if name.startswith("INSTRUMENT") and os.environ[name]))
        """)
    )
    done = subprocess.run([sys.executable, "main.py"], capture_output=True, text=True, check=True)
    child, names = done.stdout.split(" ", 1)
    assert written("traces") == {int(child)}
    assert names == "[]\n"


@pytest.mark.slow
def test_a_process_that_records_and_ends_at_once_has_its_threads_for_the_last_delivery() -> None:
    done = run("import engine; engine.step(1)")
    assert done.returncode == 0, done.stderr
    (summary,) = Path("summaries").iterdir()
    told = " ".join(summary.read_text().split())
    assert re.search(r"spans (failed|dropped) by the OTLP export|spans on their way by the agent of the run", told), (
        told
    )


@pytest.mark.slow
def test_a_profile_without_an_export_says_so_at_start_and_in_check_and_once(caplog: pytest.LogCaptureFixture) -> None:
    Path("profile.yaml").write_text("functions: [{match: 'engine:step'}]")
    says = "has no `export:` (recording, chrome, otlp, prometheus, parquet or summary), so nothing will be written or"
    done = run("""
        import engine, os
        engine.step(1)
        if os.fork() == 0:
            os.execl(__import__("sys").executable, "python", "-c", "import engine; engine.step(1)")
        os.wait()
    """)
    assert done.stderr.count(says) == 1
    checked = subprocess.run(
        [sys.executable, "-m", "instrument", "check", "profile.yaml"], capture_output=True, text=True, check=False
    )
    assert says in checked.stdout
    instrument.start("profile.yaml")
    instrument.stop()
    assert caplog.text.count(says) == 1
    caplog.clear()
    Path("profile.yaml").write_text(PROFILE)
    instrument.start("profile.yaml")
    instrument.stop()
    instrument.start(loads("", environ={}))
    instrument.stop()
    assert says not in caplog.text


def test_a_session_in_code_logs_once_which_variables_it_does_not_follow(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    Path("profile.yaml").write_text("export: {otlp: {endpoint: 'http://127.0.0.1:9', timeout: 1ms}}")
    instrument.start("profile.yaml")
    assert caplog.text.count("set without an effect: OTEL_BSP_SCHEDULE_DELAY") == 1


def test_a_board_is_found_by_children_and_gone_with_its_process() -> None:
    remove = board.make_board()
    try:
        board.add_marks(["one", "two"])
        board.add_marks(["two"])
        program = (
            "from instrument.recording import board; print(sorted(board.read_marks())); board.add_marks(['three'])"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout == "['one', 'two']\n"
        assert board.read_marks() == {"one", "two", "three"}
        path = os.environ[board.VARIABLE]
    finally:
        remove()
    assert board.VARIABLE not in os.environ
    os.environ[board.VARIABLE] = path
    try:
        assert board.read_marks() == set()
        board.add_marks(["lost"])
    finally:
        del os.environ[board.VARIABLE]


def test_a_descriptor_that_the_service_uses_for_something_else_is_never_written_to(tmp_path: Path) -> None:
    with (tmp_path / "precious").open("w+") as file:
        os.environ[board.VARIABLE] = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        try:
            board.add_marks(["mark"])
            assert board.read_marks() == set()
        finally:
            del os.environ[board.VARIABLE]
    assert (tmp_path / "precious").read_text() == ""


def test_only_what_another_process_has_at_work_is_left_out() -> None:
    attached = Verdict("here", "attached", "a:b", calls=1)
    idle, waiting = Verdict("here", "uncalled", "a:c", calls=0), Verdict("there", "waiting", why="not imported")
    nobody, compiled = Verdict("nobody", "waiting"), Verdict("there", "compiled", "x")
    verdicts = [attached, idle, waiting, nobody, compiled]
    marks = {board.attached_mark("there"), board.called_mark("there"), board.called_mark("here")}
    assert drop_recorded_elsewhere(verdicts, marks) == [attached, idle, nobody, compiled]
    assert drop_recorded_elsewhere(verdicts, set()) == verdicts


@pytest.mark.parametrize("text", ["", "schedule: {record: 1}"])
def test_a_session_in_code_has_its_threads_at_once(text: str) -> None:
    session = instrument.start(loads(text, environ={}))
    assert session is not None
    assert (session.threads.own is not None) == bool(text)


def test_a_run_within_another_of_the_same_process_is_called_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = environment.make_run_name()
    monkeypatch.setenv(environment.RUN_VARIABLE, outer)
    assert run_verb._name_run() != outer
