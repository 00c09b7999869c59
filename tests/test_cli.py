"""The command, as a user types it: exit codes, signals, children, and no traceback for what is wrong outside."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from instrument import chrome

INSTRUMENT = [sys.executable, "-m", "instrument"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a service of two modules and a profile, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("INSTRUMENT_PROFILE", "INSTRUMENT", "INSTRUMENT_RUN_PID", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    write(tmp_path / "work.py", "def step(x):\n    return x + 1\n")
    write(
        tmp_path / "profile.yaml",
        """
        service: shop
        functions:
          - match: "work:step"
        export:
          chrome: {path: "traces/{service}-{pid}-{window}.json"}
          summary: {to: stderr}
        """,
    )
    return tmp_path


def write(path: Path, text: str) -> None:
    path.write_text(textwrap.dedent(text))


def run(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*INSTRUMENT, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False, **options
    )


def traces() -> list[Path]:
    return sorted(Path("traces").glob("*")) if Path("traces").exists() else []


MAIN = """
import sys
from work import step
print(step(1), sys.argv[1:], __name__, sys.path[0] or "cwd")
"""


def test_run_is_the_host_with_a_summary_and_a_trace_beside_it(folder: Path) -> None:
    write(folder / "main.py", MAIN)
    plain = subprocess.run([sys.executable, "main.py", "a", "--b"], capture_output=True, text=True, check=True)
    done = run("run", "--profile", "profile.yaml", "--", "main.py", "a", "--b")
    assert (done.returncode, done.stdout) == (0, plain.stdout)
    assert "step" in done.stderr
    (path,) = traces()
    trace, _ = chrome.load(path)
    assert [span.site.name for span in trace.spans] == ["step"]
    assert f"Chrome trace: {path}" in done.stderr


def test_run_with_a_module_and_with_the_profile_from_the_environment(folder: Path) -> None:
    write(folder / "main.py", MAIN)
    plain = subprocess.run([sys.executable, "-m", "main", "x"], capture_output=True, text=True, check=True)
    done = run("run", "-m", "main", "x", env={**os.environ, "INSTRUMENT_PROFILE": "profile.yaml"})
    assert (done.returncode, done.stdout) == (0, plain.stdout)
    assert len(traces()) == 1


@pytest.mark.parametrize(
    ("source", "code", "stderr"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("import sys; sys.exit('text')", 1, "text"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os; os._exit(9)", 9, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, "Profiling Report"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -2, "KeyboardInterrupt"),
    ],
)
def test_exit_codes_and_signals_of_the_host_pass_through(folder: Path, source: str, code: int, stderr: str) -> None:
    write(folder / "main.py", f"from work import step\nstep(1)\n{source}\n")
    done = run("run", "--profile", "profile.yaml", "--", "main.py")
    assert (done.returncode, stderr in done.stderr) == (code, True)
    plain = subprocess.run([sys.executable, "main.py"], capture_output=True, text=True, check=False)
    assert plain.returncode == code
    tracebacks = [line for line in done.stderr.splitlines() if line.startswith("  File")]
    assert tracebacks == [line for line in plain.stderr.splitlines() if line.startswith("  File")]


def test_a_host_that_is_terminated_flushes_first_and_its_own_handler_wins(folder: Path) -> None:
    write(
        folder / "main.py",
        """
        import signal, sys, time
        from work import step
        step(1)
        if "own" in sys.argv:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        print("ready", flush=True)
        time.sleep(30)
        """,
    )
    for arguments, code in (([], -15), (["own"], 3)):
        host = subprocess.Popen(
            [*INSTRUMENT, "run", "--profile", "profile.yaml", "--", "main.py", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert host.stdout is not None
        assert host.stdout.readline() == "ready\n"
        host.send_signal(signal.SIGTERM)
        _, stderr = host.communicate(timeout=20)
        assert (host.returncode, "step" in stderr) == (code, True)
    assert len(traces()) == 2


def test_children_that_inherit_the_environment_are_instrumented_too(folder: Path) -> None:
    write(
        folder / "main.py",
        """
        import multiprocessing, subprocess, sys
        from work import step

        def child(x):
            return step(x)

        if __name__ == "__main__":
            subprocess.run([sys.executable, "-c", "from work import step; step(1)"], check=True)
            for method in ("spawn", "fork"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(pool.map(child, [1, 2]))
                    pool.close()
                    pool.join()
            subprocess.run([sys.executable, "-c", "pass"], check=True)
        """,
    )
    done = run("run", "--profile", "profile.yaml", "--", "main.py")
    assert (done.returncode, done.stdout) == (0, "[2, 3]\n[2, 3]\n"), done.stderr
    loaded = [chrome.load(path)[0] for path in traces()]
    assert sorted(len(trace.spans) for trace in loaded) == [0, 1, 2, 2]


def test_the_service_is_the_same_with_and_without_us_for_what_it_can_ask(folder: Path) -> None:
    write(
        folder / "main.py",
        """
        import inspect, pickle, signal, sys, threading, work
        print(inspect.signature(work.step), work.step.__name__, work.step.__module__, work.step.__doc__)
        print(pickle.loads(pickle.dumps(work.step)) is work.step)
        print([entry for entry in sys.path], sys.argv, sys.flags.optimize)
        print([thread.name for thread in threading.enumerate()])
        print("sitecustomize" in sys.modules, type(work.__loader__).__name__, work.__spec__.loader is work.__loader__)
        print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        """,
    )
    plain = subprocess.run([sys.executable, "main.py"], capture_output=True, text=True, check=True)
    done = run("run", "--profile", "profile.yaml", "--", "main.py")
    wanted, found = plain.stdout.splitlines(), done.stdout.splitlines()
    assert found[:4] == wanted[:4]
    assert found[5:] == wanted[5:]
    assert found[4].endswith("SourceFileLoader True")


def test_the_sitecustomize_of_the_host_still_runs(folder: Path) -> None:
    write(folder / "hostsite" / "x", "") if (folder / "hostsite").mkdir() else None
    write(folder / "hostsite" / "sitecustomize.py", "import os; os.environ['HOST_SITE'] = 'ran'")
    write(folder / "main.py", "import os; from work import step; step(1); print(os.environ.get('HOST_SITE'))")
    done = run(
        "run", "--profile", "profile.yaml", "--", "main.py", env={**os.environ, "PYTHONPATH": str(folder / "hostsite")}
    )
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert len(traces()) == 1


def test_off_by_environment_runs_the_host_and_writes_nothing(folder: Path) -> None:
    write(folder / "main.py", MAIN)
    done = run("run", "--profile", "profile.yaml", "--", "main.py", env={**os.environ, "INSTRUMENT": "off"})
    assert (done.returncode, done.stderr) == (0, "")
    assert traces() == []


THREE_MISTAKES = """\
servce: shop
functions:
  - match: "work:step"
    kind: requst
limits: {ring: 64}
"""


def test_check_prints_three_mistakes_with_their_places(folder: Path) -> None:
    (folder / "bad.yaml").write_text(THREE_MISTAKES)
    for verb in (["check", "bad.yaml"], ["run", "--profile", "bad.yaml", "--", "main.py"]):
        done = run(*verb)
        lines = done.stderr.splitlines()
        assert done.returncode == 2
        assert [line.split(":")[:3] for line in lines] == [
            ["bad.yaml", "1", "1"],
            ["bad.yaml", "4", "11"],
            ["bad.yaml", "5", "16"],
        ]
        assert "'service'" in lines[0]
        assert "'request'" in lines[1]


def test_check_shows_what_each_rule_matches_and_fails_on_one_that_matches_nothing(folder: Path) -> None:
    done = run("check", "profile.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert "work:step: attached" in done.stdout
    write(folder / "miss.yaml", 'functions: [{match: "work:stp"}, {match: "work:step"}]')
    done = run("check", "miss.yaml")
    assert done.returncode == 2
    assert "nearest is work:step" in done.stderr
    assert "attached" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["check", "missing.yaml"], "missing.yaml"),
        (["check", "broken.yaml"], "broken.yaml:1:"),
        (["check", "import.yaml"], "broken_module fails to import: RuntimeError: boom"),
        (["run", "--", "main.py"], "give --profile P or set INSTRUMENT_PROFILE"),
        (["run", "--profile", "profile.yaml"], "nothing to run"),
        (["run", "--profile", "profile.yaml", "--", "absent.py"], "found no such file"),
        (["report", "missing.json"], "missing.json"),
        (["report", "empty.json"], "empty.json"),
        (["report", "text.json"], "text.json"),
        (["report", "cut.json"], "cut.json"),
        (["report", "cut.json.gz"], "cut.json.gz"),
        (["report", "brackets.json"], "brackets.json"),
        (["report", "."], "not a regular file"),
    ],
)
def test_bad_input_is_one_clear_error_exit_code_2_and_no_traceback(
    folder: Path, arguments: list[str], says: str
) -> None:
    (folder / "broken.yaml").write_text("functions: [")
    (folder / "import.yaml").write_text('functions: [{match: "broken_module:f"}]')
    (folder / "broken_module.py").write_text("raise RuntimeError('boom')")
    (folder / "empty.json").write_text("")
    (folder / "text.json").write_text("hello")
    whole = json.dumps({"traceEvents": [{"name": "x", "ph": "X", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]})
    (folder / "cut.json").write_text(whole[:-20])
    (folder / "cut.json.gz").write_bytes(gzip.compress(whole.encode())[:-9])
    with (folder / "brackets.json").open("wb") as file:  # 10 GB of it, sparse beyond the first 64 MiB
        file.write(b"[" * (64 << 20))
        file.truncate(10 << 30)
    before = sorted(path.name for path in folder.iterdir())
    started = time.monotonic()
    done = run(*arguments)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - started < 30
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == before


def test_report_prints_the_table_of_a_saved_trace(folder: Path) -> None:
    write(folder / "main.py", "from work import step\nfor i in range(5): step(i)\n")
    run("run", "--profile", "profile.yaml", "--", "main.py")
    (path,) = traces()
    done = run("report", path, "--tracer-option", "AllOpDetail", "--sorted-by", "total")
    assert (done.returncode, done.stderr) == (0, "")
    row = next(line for line in done.stdout.splitlines() if line.startswith("thread0::step"))
    assert row.split()[1] == "5"
    assert "step0" in done.stdout
    assert "Sorted by total time" in done.stdout


def test_report_into_a_closed_pipe_is_quiet(folder: Path) -> None:
    write(folder / "main.py", "from work import step\nstep(1)\n")
    run("run", "--profile", "profile.yaml", "--", "main.py")
    (path,) = traces()
    piped = subprocess.run(
        f"{sys.executable} -m instrument report {path} | true", shell=True, capture_output=True, text=True, check=False
    )
    assert piped.stderr == ""


def test_help_names_the_verbs() -> None:
    done = run("--help")
    assert done.returncode == 0
    for verb in ("run", "check", "report"):
        assert verb in done.stdout
