"""The agent of a run: its processes join, leave and vanish, and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from instrument import chrome, clock
from instrument.agent import end_reports
from instrument.agent.processes import Process, Run, add_missed_processes, exit_fd_of, write_note
from instrument.agent.runs import MOST_ENDED, RUN_END_S
from instrument.runtime import agent_socket
from instrument.trace import file

PROFILE = """
service: shop
functions:
  - match: "engine:step"
export:
  summary: {to: stderr}
"""

PATIENT = """
import os, sys

if "IMPATIENT" not in os.environ:
    from pathlib import Path

    from instrument.runtime import agent_socket

    agent_socket.AGENT_SCRIPT, agent_socket.ANSWER_S = Path(%r), 60
if os.environ.get("IMPATIENT") != "all" and "instrument.sessions.membership" in sys.modules:
    from instrument.sessions import exporting, handover, leaving, membership

    membership.ANSWER_LIMIT_S = membership.SCRAPE_LIMIT_S = exporting.SCRAPE_WAIT_S = 60
    handover.LAST_READING_S = handover.LAST_READ_S = 60
    leaving.EXIT_LIMIT_NS = 60 * 10**9
elif "IMPATIENT" not in os.environ and sys.orig_argv[1:3] == ["-m", "instrument"]:
    from instrument.agent import agent
    from instrument.cli import option_values, run_verb

    option_values.WAIT_S = run_verb.AGENT_WAIT_S = 60
    agent.STOP_LIMIT_S = agent.STOP_WAIT_S = agent.LAST_SEND_S = 60
"""
"""The first lines of all processes of a test's runs: other work on the machine makes no process slow or gone.

`IMPATIENT` in the environment is `agents` for the limits of agents and commands that users have, `all` for all limits.
"""

PATIENT_AGENT = f"""
import sys

sys.path.append({str(Path(chrome.__file__).parents[2])!r})
from instrument.agent import agent, entry, exporter_process

serve_exports = exporter_process._serve

def serve_patiently(connection):
    from instrument.agent.exporter_child import ExporterChild

    def begin_patiently(*arguments, begin=ExporterChild._begin_export):
        from instrument.otlp import delivery, recording_export

        recording_export.LAST_METRICS_S = 60
        delivery.PATIENCE_NS = 60 * 10**9
        return begin(*arguments)

    ExporterChild._begin_export = begin_patiently
    serve_exports(connection)

exporter_process._serve = serve_patiently
agent.STOP_LIMIT_S = agent.STOP_WAIT_S = agent.LAST_SEND_S = 60
entry._main()
"""
"""The program of an agent that waits for a collector, and after SIGTERM for processes, as long as tests wait."""

ENGINE = """
import threading, time

hangs = threading.Event()

def step(x):
    return x + 1

def hang(x):
    hangs.set()
    time.sleep(x)

def say_and_hang():
    print("in the middle", flush=True)
    hang(600)
"""

INSTRUMENT = [sys.executable, "-m", "instrument"]
COMMAND = Path(sys.executable).with_name("instrument")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a service, in which runs of this test alone have their homes; none may be left there."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("INSTRUMENT")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("INSTRUMENT_AGENT", "")
    runs = Path("/tmp") / f"instrument-test-{os.getpid()}"  # short: a socket's path has an end
    runs.mkdir(mode=0o700, exist_ok=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runs))
    monkeypatch.setattr(agent_socket, "list_parent_folders", lambda: [runs / f"instrument-{os.geteuid()}"])
    monkeypatch.setenv("PYTHONPATH", ".")
    agent_program = tmp_path / "patient_agent.py"
    agent_program.write_text(PATIENT_AGENT)
    Path("sitecustomize.py").write_text(PATIENT % str(agent_program))
    Path("engine.py").write_text(ENGINE)
    Path("profile.yaml").write_text(PROFILE)
    yield tmp_path
    homes = [home for user in runs.iterdir() for home in agent_socket.list_matching_paths(user, "by-hand-*")]
    for home in homes:  # of an agent that the test has killed; others remove their folders meanwhile
        if not is_agent(agent_socket.parse_first_pid(home.name)):
            agent_socket.remove_run_folder(home)
    try:
        until(lambda: not list(runs.iterdir()))
    finally:
        shutil.rmtree(runs)


def is_agent(pid: int | None) -> bool:
    """Return True where a process of ours has this number, which in another container is that of another process."""
    try:
        return b"instrument" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def until(found: Callable[[], Any], wait_s: float = 240) -> Any:
    """Return the answer of a function once it is true."""
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        answer = found()
        if answer:
            return answer
        time.sleep(0.01)
    raise AssertionError("it did not come true")


def begin(source: str, *more: str) -> subprocess.Popen[str]:
    Path("main.py").write_text(textwrap.dedent(source))
    command = [*INSTRUMENT, "run", "--profile", "profile.yaml", "--", "main.py", *more]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def run(source: str, *more: str) -> subprocess.CompletedProcess[str]:
    service = begin(source, *more)
    out, errors = service.communicate(timeout=240)
    return subprocess.CompletedProcess(service.args, service.returncode, out, errors)


def agents() -> list[int]:
    """The agents of this test's runs."""
    found = []
    for path in agent_socket.list_runs():
        try:
            found.append(asked(path, {"ask": "processes"})[-1]["end"]["agent"])
        except OSError:
            pass
    return found


def kill(pid: int) -> None:
    """Kill a process, and wait for its death: until then its sockets accept what nobody will read."""
    os.kill(pid, signal.SIGKILL)
    until(lambda: not clock.read_process_start_ticks(Path(f"/proc/{pid}/stat")))


def files_of(pid: int) -> list[str]:
    """Return the targets of the descriptors of a process. It may close some meanwhile."""
    targets = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            targets.append(str(path.readlink()))
    return targets


def children_of(pid: int, name: str = "") -> list[int]:
    """The children of a process, or those of that name."""
    children = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in children if not name or command_name(child) == name]


def command_name(pid: int) -> str:
    """Return the name of a process; nothing where it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def asked(folder: Path, message: dict[str, Any]) -> list[Any]:
    answers = []
    with agent_socket.connect_to_agent(folder / agent_socket.SOCKET, 60) as caller:
        agent_socket.send(caller, message)
        while True:
            answer, _ = agent_socket.receive(caller)
            if answer is None:
                raise ConnectionError("the agent has gone")
            answers.append(answer)
            if "end" in answer:
                return answers


def processes() -> list[dict[str, Any]]:
    """Return the processes of the only run, as its agent reports them."""
    (folder,) = agent_socket.list_runs()
    return [one["process"] for one in asked(folder, {"ask": "processes"}) if "process" in one]


ASK = """
import os, pathlib, time
from instrument import chrome
from instrument.runtime import agent_socket

def ask():
    with agent_socket.connect_to_agent(pathlib.Path(os.environ["INSTRUMENT_AGENT"]), 60) as caller:
        agent_socket.send(caller, {"ask": "processes"})
        found = []
        while True:
            answer = agent_socket.receive(caller)[0]
            if "end" in answer:
                return found, answer["end"]["agent"]
            found.append(answer["process"])
"""


@pytest.mark.slow
def test_the_agent_of_a_service_is_no_child_of_it_holds_none_of_its_files_and_goes_with_it() -> None:
    done = run(f"""{ASK}
path = pathlib.Path(os.environ["INSTRUMENT_AGENT"])
assert oct(path.stat().st_mode & 0o777) == "0o600" and oct(path.parent.stat().st_mode & 0o777) == "0o700"
(own,), agent = ask()
assert (own["pid"], own["is_first"], own["service"]) == (os.getpid(), True, "shop"), own
assert os.getsid(agent) == os.getpgid(agent) != os.getsid(0)
held = [os.readlink(f"/proc/{{agent}}/fd/{{fd}}") for fd in (0, 1, 2)]
assert held == ["/dev/null"] * 3, held
status = pathlib.Path(f"/proc/{{agent}}/status").read_text()
assert int(status.partition("VmRSS:")[2].split()[0]) < 60_000
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print(agent)
""")
    assert (done.returncode, done.stderr.count("Summary of shop")) == (0, 1), done.stderr
    until(lambda: not Path(f"/proc/{done.stdout.strip()}").exists())


MULTIPROCESSING = """
import multiprocessing, os, sys
import engine

def work(x):
    return engine.step(x), os.getpid()

if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        done = pool.map(work, range(16), chunksize=1)
        pool.close()
        pool.join()
    print(*sorted({pid for _, pid in done}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["fork", pytest.param("spawn", marks=pytest.mark.slow), pytest.param("forkserver", marks=pytest.mark.slow)],
)
def test_the_last_of_several_processes_prints_one_report_of_all(method: str) -> None:
    done = run(MULTIPROCESSING, method)
    assert (done.returncode, done.stderr.count("Summary of shop")) == (0, 1), done.stderr
    (row,) = [line for line in done.stderr.splitlines() if line.startswith("step ")]
    assert row.split()[3] == "16"
    told = done.stderr.partition("Processes:")[2].split()
    assert set(done.stdout.split()) <= set(told)


@pytest.mark.slow
def test_totals_of_many_spans_are_read_from_the_memory_of_ended_processes() -> None:
    done = run("""
        import multiprocessing
        import engine

        def work(count):
            for x in range(count): engine.step(x)

        if __name__ == "__main__":
            with multiprocessing.get_context("fork").Pool(2) as pool:
                pool.map(work, [20_000] * 8, chunksize=1)
                pool.close()
                pool.join()
    """)
    assert (done.returncode, done.stderr.count("Summary of shop")) == (0, 1), done.stderr
    (row,) = [line for line in done.stderr.splitlines() if line.startswith("step ")]
    assert row.split()[3] == "160000"
    assert "Cost: not known" not in done.stderr


RECYCLED_WITH_MANY_SPANS = """
import engine, os, sys
for _ in range(20):
    if not os.fork():
        for x in range(11_000): engine.step(x)
        sys.exit(0)
    os.wait()
sys.stdin.readline()
"""


@pytest.mark.slow
def test_ended_workers_with_many_spans_leave_few_files_while_the_run_goes_on() -> None:
    service = begin(RECYCLED_WITH_MANY_SPANS)
    left = until(
        lambda: [
            path for path in agent_socket.list_runs() if agent_socket.list_matching_paths(path, "before-*-left.npz")
        ]
    )
    until(lambda: len([*left[0].glob("*-left.npz")]) <= MOST_ENDED)
    _, errors = service.communicate("\n", timeout=240)
    (row,) = [line for line in errors.splitlines() if line.startswith("step ")]
    assert row.split()[3] == "220000"
    assert "that ended before the others: " in errors


@pytest.mark.slow
def test_a_worker_that_ends_before_others_prints_nothing() -> None:
    service = begin("""
        import engine, os, subprocess, sys
        engine.step(1)
        subprocess.run([sys.executable, "-c", "import engine; engine.step(1)"])
        print("worker has ended", flush=True)
        sys.stdin.readline()
    """)
    assert service.stdout is not None
    assert service.stdout.readline() == "worker has ended\n"
    ended = until(lambda: [one for one in processes() if one["how"] == "goodbye"])
    assert len(ended) == 1
    found = {one["pid"]: one["calls"] for one in json.loads(command("ps", "--json"))["runs"][0]["processes"]}
    assert found == {service.pid: 1, ended[0]["pid"]: None}  # they are in its report, not none
    _, errors = service.communicate("\n", timeout=240)
    assert errors.count("Summary of shop") == 1
    assert errors.partition("Processes:")[2].count("in order") == 2


@pytest.mark.slow
def test_a_report_names_the_process_that_printed_its_own_report_before_others_joined() -> None:
    done = run("""
        import engine, instrument
        engine.step(1)
        instrument.stop()
        instrument.start("profile.yaml")
        engine.step(2)
    """)
    first, _, second = done.stderr.rpartition("Summary of shop")
    assert first.count("Summary of shop") == 1
    assert "left no recording" not in done.stderr
    told, last = second.partition("Processes: 2\n")[2].splitlines()
    assert told == f"{last}, which printed a report of its own"


@pytest.mark.slow
@pytest.mark.parametrize("goes_on", ["", "os.fork() and os.wait() or engine.step(1)"], ids=["alone", "with others"])
def test_a_report_names_processes_that_ended_under_a_killed_agent(goes_on: str) -> None:
    service = begin(f"""
        import engine, os, sys
        for x in range(20):
            if not os.fork(): engine.step(x); sys.exit(0)
            os.wait()
        engine.step(1)
        print("ready", flush=True)
        sys.stdin.readline()
        {goes_on}
    """)
    assert service.stdout is not None
    assert service.stdout.readline() == "ready\n"
    (run,) = agent_socket.list_runs()
    until(lambda: any(run.glob("before-*")) and len([*run.glob("*-left.npz")]) == 20 - MOST_ENDED // 2 + 1)
    (agent,) = until(agents)
    kill(agent)
    until(lambda: [one for one in agents() if one != agent])
    until(lambda: any(one["pid"] == service.pid for one in processes()))
    _, errors = service.communicate("\n", timeout=240)
    assert errors.count("Summary of shop") == 1
    (row,) = [line for line in errors.splitlines() if line.startswith("step ")]
    assert row.split()[3] == str(21 + bool(goes_on))
    head, *told = errors.partition("Processes: ")[2].splitlines()
    assert head == row.split()[3]
    assert "  8 that ended under an agent before this one" in told
    assert sum(line.endswith(" (ended under an agent before this one)") for line in told) > 1


@pytest.mark.slow
def test_processes_whose_summaries_are_files_of_their_own_write_these() -> None:
    Path("profile.yaml").write_text(PROFILE.replace("stderr", "'summaries/{pid}.txt'"))
    done = run(MULTIPROCESSING, "fork")
    assert "Summary" not in done.stderr
    assert {path.stem for path in Path("summaries").iterdir()} == set(done.stdout.split())


@pytest.mark.slow
def test_a_program_that_becomes_another_one_ends_without_a_word_and_the_other_joins() -> None:
    done = run(f"""{ASK}
import engine, sys
if len(sys.argv) == 1:
    engine.step(1)
    while not ask()[0][0]["has_recorded"]: time.sleep(0.01)
    os.execv(sys.executable, [sys.executable, "main.py", "again"])
engine.step(1)
print(*(one["how"] or "lives" for one in ask()[0]))
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["replaced", "lives"]
    assert "without a goodbye" not in done.stderr


@pytest.mark.slow
def test_a_program_that_closes_all_that_it_finds_open_and_then_becomes_another_one_lives_no_more() -> None:
    done = run(f"""{ASK}
import engine
engine.step(1)
child = os.fork()
if child == 0:
    engine.step(2)
    while os.getpid() not in [one["pid"] for one in ask()[0]]: time.sleep(0.01)
    os.closerange(3, 1 << 16)
    time.sleep(1)
    os.execv("/bin/sleep", ["sleep", "600"])
while [one["how"] for one in ask()[0] if one["pid"] == child] != ["replaced"]: time.sleep(0.1)
os.kill(child, 9)
os.waitpid(child, 0)
""")
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stderr.splitlines() if line.startswith("step ")]
    assert row.split()[3] == "2"


@pytest.mark.slow
@pytest.mark.parametrize("words", [["-B", "-X", "dev", "-m", "instrument"], [str(COMMAND)]], ids=["module", "script"])
def test_our_own_command_is_no_process_of_the_run_that_it_is_called_in(words: list[str], folder: Path) -> None:
    if words == [str(COMMAND)] and not COMMAND.exists():
        pytest.skip("the command is not installed")
    with socket.socket(agent_socket.FAMILY, agent_socket.KIND) as agent:
        agent.bind(str(folder / "s"))
        agent.listen()
        agent.setblocking(False)
        autostart = Path(end_reports.__file__).parents[1] / "sessions/autostart"
        environ = {**os.environ, "INSTRUMENT_AGENT": str(folder / "s"), "INSTRUMENT_RUN_PID": "1"}
        environ.update(INSTRUMENT_PROFILE="profile.yaml", PYTHONPATH=str(autostart))
        for more, joins in ((words, False), (["-c", "pass"], True)):
            done = subprocess.run([sys.executable, *more, "--help"], capture_output=True, env=environ, check=False)
            assert done.returncode == 0
            try:
                agent.accept()[0].close()
                assert joins
            except BlockingIOError:
                assert not joins


@pytest.mark.slow
def test_a_service_that_may_have_few_descriptors_joins_all_the_same() -> None:
    Path("main.py").write_text(f"{ASK}\nimport engine; engine.step(1); print(len(ask()[0]))")
    words = [*INSTRUMENT, "run", "--profile", "profile.yaml", "--", "main.py"]
    limited = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", *words]
    done = subprocess.run(limited, capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@pytest.mark.slow
def test_a_daemon_that_closes_all_that_it_finds_open_stays_a_process_of_its_run() -> None:
    done = run(f"""{ASK}
import engine
engine.step(1)
os.closerange(3, 1 << 16)
read, write = os.pipe()
files = [os.open("/dev/null", os.O_RDWR) for _ in range(300)]  # also where our connection was
(own,), _ = ask()
assert (own["how"], own["pid"]) == ("", os.getpid()), own
for file in files: os.fstat(file)
import instrument
instrument.stop()
for file in files: os.fstat(file)
until = time.monotonic() + 240
while time.monotonic() < until and not [one for one in ask()[0] if one["how"] == "goodbye"]: time.sleep(0.01)
print(*(one["how"] for one in ask()[0]))
""")
    assert (done.returncode, done.stdout) == (0, "goodbye\n"), done.stderr


@pytest.mark.slow
def test_an_agent_ends_with_the_last_process_also_where_the_first_one_was_killed() -> None:
    service = begin(f"""{ASK}
import engine, sys
engine.step(1)
if os.fork() == 0:
    engine.step(1)
    sys.stdin.readline()
    sys.exit()
while len([one for one in ask()[0] if one["has_recorded"]]) < 2: time.sleep(0.01)
os.kill(os.getpid(), 9)
""")
    service.wait(240)
    (agent,) = agents()
    _, errors = service.communicate("\n", timeout=240)
    assert "(in order)" in errors
    until(lambda: not Path(f"/proc/{agent}").exists())


@pytest.mark.slow
def test_a_daemon_that_joins_long_after_its_parent_has_ended_finds_the_agent_which_outlives_it() -> None:
    Path("late.py").write_text("import os, engine\nprint(engine.step(1))\nos.kill(os.getpid(), 9)\n")
    python = "until [ -e go ]; do sleep 0.05; done; exec $0 late.py"
    service = begin(f"""
import engine, os, subprocess, sys
engine.step(1)
if os.fork() == 0:
    silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    subprocess.Popen(["/bin/sh", "-c", {python!r}, sys.executable], start_new_session=True, **silent)
    os._exit(0)
os.wait()
""")
    _, errors = service.communicate(timeout=240)
    assert "Summary of shop" in errors
    (agent,) = until(agents)
    time.sleep(3 * RUN_END_S)
    assert until(agents) == [agent]
    Path("go").touch()
    (capture,) = until(lambda: [*Path("traces").glob("*-died.npz")])
    assert [span.site.name for span in file.load(capture).trace.spans] == ["step"]
    until(lambda: not Path(f"/proc/{agent}").exists())


ENDS = {
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    "leaves without cleaning up": ("os._exit(3)", "exit code 3"),
    "reads memory that it has not": ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "how"),
    [pytest.param(*end, id=name, marks=[pytest.mark.slow] * (name != "is killed")) for name, end in ENDS.items()],
)
def test_a_worker_that_vanishes_is_named_where_the_service_writes_its_errors(source: str, how: str) -> None:
    service = begin(f"""{ASK}
import engine, signal, sys
engine.step(1)
if os.fork() == 0:
    engine.step(1)
    while len([one for one in ask()[0] if one["has_recorded"]]) < 2: time.sleep(0.01)
    {source}
os.wait()
sys.stdin.readline()
""")
    assert service.stderr is not None
    line = service.stderr.readline()
    # Who is not its parent is told how it ended as long as it waits for its parent, and by newer systems.
    line = line.replace(f" ({how})", "")
    assert " of shop ended without a goodbye; " in line
    gone = int(line.split()[2])
    path = line.rpartition("; saved as ")[2].strip()
    saved = file.load(path)
    assert [span.site.name for span in saved.trace.spans] == ["step"]
    assert saved.read_or_count_totals().calls == 1
    assert saved.trace.died.replace(f" ({how})", "") == f"Process {gone} ended without a goodbye; no span was open."
    assert oct(Path(path).stat().st_mode & 0o777) == "0o600"
    assert gone != service.pid
    _, errors = service.communicate("\n", timeout=240)
    assert errors.count("Summary of shop") == 1
    assert f"{gone} (without a goodbye" in errors


SLOW_TO_SAVE = """
import sys
from instrument.agent import runs
from instrument.cli import main

runs.EXIT_STATUS_WAIT_S = 600
sys.exit(main(["agent", "--socket", sys.argv[1]]))
"""


def test_a_process_is_named_whose_agent_was_killed_before_it_had_saved_what_that_one_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "beside" / "agent.sock"
    first = subprocess.Popen([sys.executable, "-c", SLOW_TO_SAVE, path], stderr=subprocess.PIPE, text=True)
    until(lambda: agent_socket.has_listener(path))
    monkeypatch.setenv(agent_socket.VARIABLE, str(path))
    Path("main.py").write_text("import engine; engine.step(1); engine.say_and_hang()")
    command = [*INSTRUMENT, "run", "--profile", "profile.yaml", "--", "main.py"]
    with (
        Path("errors").open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as service,
    ):
        assert service.stdout is not None
        service.stdout.readline()
        service.kill()
    until(lambda: [one["process"]["how"] for one in asked(path.parent, {"ask": "processes"})[:-1]] == ["vanished"])
    first.kill()
    first.communicate(timeout=240)
    with subprocess.Popen([*INSTRUMENT, "agent", "--socket", path], stderr=subprocess.PIPE, text=True) as other:
        until(lambda: "\n" in Path("errors").read_text())
        other.terminate()
    line = Path("errors").read_text()
    assert line.startswith(f"instrument: process {service.pid} of shop ended without a goodbye; nothing of it is saved")
    assert "the agent of its run had gone" in line
    assert list(path.parent.iterdir()) == []


SAVES_WHEN_TOLD = """
import sys, time
from pathlib import Path
from instrument.agent import crash_capture
from instrument.cli import main

def wait_and_capture(*args, capture=crash_capture.save_recording, **more):
    while not Path("go").exists():
        time.sleep(0.01)
    return capture(*args, **more)

crash_capture.save_recording = wait_and_capture
sys.exit(main(["agent", "--socket", sys.argv[1]]))
"""


@pytest.mark.slow
def test_the_next_agent_awaits_and_reports_a_capture_that_a_killed_one_had_begun(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "beside" / "agent.sock"
    first = subprocess.Popen([sys.executable, "-c", SAVES_WHEN_TOLD, path], stderr=subprocess.PIPE, text=True)
    until(lambda: agent_socket.has_listener(path))
    monkeypatch.setenv(agent_socket.VARIABLE, str(path))
    service = begin("""
        import engine
        from instrument import scope
        engine.step(1)
        with scope("POST /generate", kind="request"):
            engine.say_and_hang()
    """)
    assert service.stdout is not None
    service.stdout.readline()
    service.kill()
    service.communicate()
    (saves,) = until(lambda: children_of(first.pid))
    until(lambda: str(saves) in Path("/proc/locks").read_text().split())
    first.kill()
    first.wait(240)
    with subprocess.Popen([*INSTRUMENT, "agent", "--socket", path], stderr=subprocess.PIPE, text=True) as other:
        assert other.stderr is not None
        other.stderr.readline()
        until(lambda: children_of(other.pid))
        Path("go").touch()
        line = other.stderr.readline()
        assert line.startswith(f"instrument: process {service.pid} of shop ended without a goodbye")
        assert ": it died in request `POST /generate`, " in line
        saved = line.rpartition("; saved as ")[2].strip()
        assert {span.site.name for span in file.load(saved).trace.spans} == {"step", "POST /generate"}
        until(lambda: saved in other.stderr.readline())  # in the report of the run
        other.terminate()
    first.communicate()


@pytest.mark.slow
def test_a_report_has_what_was_saved_of_a_process_that_vanished_under_an_agent_before() -> None:
    service = begin("""
        import engine, os, signal, sys
        engine.step(1)
        worker = os.fork()
        if not worker:
            engine.step(2)
            os.kill(os.getpid(), signal.SIGKILL)
        os.wait()
        sys.stdin.readline()
    """)
    assert service.stderr is not None
    saved = service.stderr.readline().rpartition("; saved as ")[2].strip()
    (run,) = agent_socket.list_runs()
    until(lambda: len(list(run.glob("*.process"))) == 1)
    (agent,) = agents()
    kill(agent)
    until(lambda: [one for one in agents() if one != agent])
    until(lambda: any(one["pid"] == service.pid for one in processes()))
    _, errors = service.communicate("\n", timeout=240)
    (row,) = [line for line in errors.splitlines() if line.startswith("step ")]
    assert row.split()[3] == "2"
    head, *told = errors.partition("Processes: ")[2].splitlines()
    assert head == "2"
    (line,) = [line for line in told if saved in line]
    assert "(without a goodbye; ended under an agent before this one)" in line
    assert Path(saved).exists()


def test_captures_keep_within_the_disk_that_the_profile_gives_and_the_newest_stays() -> None:
    folder = Path("traces")
    folder.mkdir()
    for number in range(4):
        path = folder / f"shop-{number}-died.npz"
        path.write_bytes(bytes(1000))
        os.utime(path, (number, number))
    (folder / "shop-0-died.txt").write_text("process 0 ended")
    (folder / "shop-9.npz").write_bytes(bytes(5000))  # no capture
    newest = folder / "shop-3-died.npz"
    assert end_reports.remove_oldest_files(newest, "shop", (), 4000) == 0
    assert end_reports.remove_oldest_files(newest, "shop", (), 2500) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["shop-2-died.npz", "shop-3-died.npz", "shop-9.npz"]
    assert end_reports.remove_oldest_files(newest, "shop", (), 0) == 1
    assert newest.exists()


def test_captures_of_other_services_and_those_that_a_report_is_still_to_be_made_of_stay() -> None:
    folder = Path("traces")
    folder.mkdir()
    names = [
        "chat-8-20261123T120000-70-0-died.npz",  # of another service
        "chat-7-20261123T120000-71-0-died.npz",
        "chat-7-20261123T120001-72-0-died.npz",
        "chat-7-20261123T120001-72-0-75-died.npz",
        "chat-7-20261123T120001-72-0-76-died.npz",
    ]
    for number, name in enumerate(names):
        (folder / name).write_bytes(bytes(1000))
        os.utime(folder / name, (number, number))
    kept = {str(folder / names[2])}
    assert end_reports.remove_oldest_files(folder / names[4], "chat-7", kept, 1000) == 2
    assert sorted(path.name for path in folder.iterdir()) == sorted([names[0], names[2], names[4]])


def test_an_agents_note_on_a_process_has_no_secret_of_the_collector(folder: Path) -> None:
    other = subprocess.Popen(["sleep", "60"])
    started = clock.read_process_start_ticks(Path(f"/proc/{other.pid}/stat"))
    export = {"endpoint": "https://ada:opensesame@collector", "headers": [["authorization", "Bearer opensesame"]]}
    process = Process(
        run=Run("one"), pid=other.pid, started=started, facts={"service": "shop", "export": {"otlp": export}},
        joined_ns=0, exit_fd=exit_fd_of(other.pid, started),
    )  # fmt: skip
    write_note(folder, process)
    process.release()
    other.kill()
    other.wait()
    (note,) = folder.glob("*.process")
    assert "shop" in note.read_text()
    assert "opensesame" not in note.read_text()
    (missed,) = add_missed_processes(folder, Run)
    assert (missed.pid, missed.facts["service"]) == (other.pid, "shop")


def test_a_service_that_was_killed_leaves_what_it_was_about() -> None:
    Path("profile.yaml").write_text(PROFILE.replace("engine:step", "engine:*"))
    service = begin("""
        import engine, threading
        from instrument import scope
        engine.step(1)
        threading.Thread(target=engine.hang, args=(600,), daemon=True).start()
        engine.hangs.wait()
        with scope("POST /generate", kind="request", attributes={"request_id": "r-7"}):
            try:
                with scope("prefill"):
                    raise MemoryError
            except MemoryError:
                pass
            with scope("decode", attributes={"step": 3}):
                engine.say_and_hang()
    """)
    assert service.stdout is not None
    assert service.stdout.readline() == "in the middle\n"
    service.kill()
    service.communicate(timeout=240)
    (path,) = until(lambda: [*Path("traces").glob("*.npz")])
    assert path.name.endswith(f"-{service.pid}-0-died.npz")  # the run has its number
    report = subprocess.run([*INSTRUMENT, "report", path], capture_output=True, text=True, check=True).stdout
    words = " ".join(report.split()).replace(" (SIGKILL)", "")
    age = r"[\d.]+ (s|ms|us) after it began"
    died = (
        f"Process {service.pid} ended without a goodbye: it died in `(hang|say_and_hang)` of request `POST /generate` "
        r"\(request_id=r-7\), "
    )
    assert re.search(rf"{died}{age}; 1 more was open: `hang` \([\d.]+ (s|ms|us)\)\.", words)
    spans = file.load(path).trace.spans
    assert {span.site.name for span in spans if span.clipped} == {"hang", "say_and_hang", "decode", "POST /generate"}
    if not Path("/dev/log").exists():  # nobody has the pipe any more that its errors went to
        (line,) = until(lambda: [text for path in Path("traces").glob("*-died.txt") if (text := path.read_text())])
        assert line.startswith(f"instrument: process {service.pid} of shop ended without a goodbye")
        assert line.endswith(f"; saved as {path.resolve()}\n")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit()"])
def test_the_report_of_a_run_is_where_the_service_wrote_its_errors_also_where_a_helper_outlived_it(
    folder: Path, end: str
) -> None:
    Path("helper.py").write_text(
        "import os, signal, sys, time, engine\n"
        "print(engine.step(1), flush=True)\n"
        "while os.getppid() == int(os.environ['SERVICE']): time.sleep(0.01)\n"
        "time.sleep(1)\n"  # the agent has forgotten the service, which recorded nothing
        f"{end}\n"
    )
    Path("main.py").write_text(
        "import os, subprocess, sys\n"
        "environ = {**os.environ, 'SERVICE': str(os.getpid())}\n"
        "helper = subprocess.Popen([sys.executable, 'helper.py'], env=environ, stdout=subprocess.PIPE,\n"
        "    stderr=open('helper.err', 'w'))\n"
        "helper.stdout.readline()\n"
        "os._exit(0)\n"
    )
    command = [*INSTRUMENT, "run", "--profile", "profile.yaml", "--", "main.py"]
    with Path("service.err").open("w") as errors:
        subprocess.run(command, stderr=errors, timeout=240, check=True)
    until(lambda: "Summary of shop" in Path("service.err").read_text() + Path("helper.err").read_text())
    assert "Summary of shop" in Path("service.err").read_text()


@pytest.mark.slow
def test_the_report_of_a_run_is_printed_even_if_the_waiting_process_has_gone() -> None:
    Path("main.py").write_text(
        "import subprocess, sys, engine\n"
        "from instrument import clock\nfrom instrument.sessions import leaving\n"
        "clock.LEAST_S = leaving.EXIT_LIMIT_NS = 0\n"
        "engine.step(1)\n"
        "helper = 'import engine; print(engine.step(1), flush=True); engine.hang(600)'\n"
        "worker = subprocess.Popen([sys.executable, '-c', helper], stdout=subprocess.PIPE)\n"
        "worker.stdout.readline()\n"
        "worker.kill()\n"  # what it has recorded is still to be saved as this process leaves
        "worker.wait()\n"
    )
    with Path("service.err").open("w") as errors:
        subprocess.run([*INSTRUMENT, "run", "--profile", "profile.yaml", "--", "main.py"], stderr=errors, check=True)
    until(lambda: "\nProcesses:" in Path("service.err").read_text())
    assert Path("service.err").read_text().count("\nProcesses:") == 1


def test_a_process_that_vanishes_and_had_recorded_nothing_is_not_worth_a_word() -> None:
    service = begin(f"""{ASK}
import engine, sys
engine.step(1)
with __import__("instrument").scope("open", kind="request"):
    pids = [os.fork() for _ in range(3)]
    if 0 in pids: os._exit(0)
    for _ in pids: os.wait()
while len(ask()[0]) > 1: time.sleep(0.01)
print("ready", flush=True)
""")
    out, errors = service.communicate(timeout=240)
    assert (out, errors.count("without a goodbye")) == ("ready\n", 0), errors


def test_the_end_of_a_service_s_output_is_its_own_end_also_where_it_was_killed() -> None:
    service = begin("import engine, os, signal; engine.step(1); os.kill(os.getpid(), signal.SIGKILL)")
    out, _ = service.communicate(timeout=240)  # waits for the end of both pipes
    assert (service.returncode, out) == (-signal.SIGKILL, "")


def test_an_agent_that_is_stopped_costs_a_service_nothing_but_a_moment_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("IMPATIENT", "all")
    service = begin("""
        import engine, sys
        engine.step(1)
        print("ready", flush=True)
        sys.stdin.readline()
        engine.step(2)
        print("done", flush=True)
    """)
    assert service.stdout is not None
    assert service.stdout.readline() == "ready\n"
    (agent,) = agents()
    os.kill(agent, signal.SIGSTOP)
    try:
        out, errors = service.communicate("\n", timeout=240)
    finally:
        os.kill(agent, signal.SIGCONT)
    assert (service.returncode, out, errors.count("Summary of shop")) == (0, "done\n", 1)


def test_a_service_whose_agent_was_killed_begins_another_one_and_leaves_nothing() -> None:
    service = begin("""
        import engine, sys
        engine.step(1)
        print("ready", flush=True)
        sys.stdin.readline()
        engine.step(2)
    """)
    assert service.stdout is not None
    assert service.stdout.readline() == "ready\n"
    (agent,) = agents()
    kill(agent)
    _, errors = service.communicate("\n", timeout=240)
    assert (service.returncode, errors.count("Summary of shop")) == (0, 1)
    assert "agent" not in errors
    until(lambda: not agent_socket.list_runs())


def test_a_worker_that_was_killed_after_the_agent_was_is_named_by_the_next_one() -> None:
    service = begin("""
        import engine, os, signal, sys
        engine.step(1)
        worker = os.fork()
        if not worker:
            engine.step(1)
            engine.hang(600)
        print(worker, flush=True)
        sys.stdin.readline()
        os.kill(worker, signal.SIGKILL)
        os.wait()
    """)
    assert service.stdout is not None
    worker = service.stdout.readline().strip()
    (home,) = agent_socket.list_runs()
    until(lambda: len(list(home.glob("*.process"))) == 2)
    (agent,) = agents()
    kill(agent)
    _, errors = service.communicate("\n", timeout=240)
    assert f"process {worker} of shop ended without a goodbye" in errors, errors
    assert (errors.count("Summary of shop"), errors.partition("Processes: ")[2][:1]) == (1, "2")


def test_a_process_that_finds_no_agent_records_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(agent_socket.VARIABLE, str(Path("nobody.sock").absolute()))
    done = run("import engine; engine.step(1)")
    assert done.returncode == 0
    assert "Summary of shop" in done.stderr
    assert "nobody.sock: nobody listens there" in done.stderr.replace("\n  ", " ")


def test_a_run_whose_profile_wants_no_agent_has_none() -> None:
    Path("profile.yaml").write_text(f"{PROFILE}agent: off\n")
    done = run("import os; print(os.environ.get('INSTRUMENT_AGENT'))")
    assert (done.returncode, done.stdout) == (0, "None\n")


HOSTILE = [
    b"",
    b"\xff" * 100,
    b"[]",
    b"{",
    b"[" * 60_000,
    b'{"join": 1}',
    b'{"join": {}}',
    b'{"join": {"pid": "x", "started": []}}',
    b'{"join": {"pid": 1e999, "started": 1e999}}',
    b'{"goodbye": {}}',
    b'{"answer": {}, "number": 1}',
    b'{"ended": 1, "status": 9}',
    b'{"ask": "nothing"}',
    b'{"ask": "do", "do": {}, "pids": "x"}',
    b"x" * (agent_socket.PACKET_BYTES + 1),
]


def test_malformed_packets_are_refused_and_the_agent_goes_on() -> None:
    service = begin("import sys; print('ready', flush=True); sys.stdin.readline()")
    assert service.stdout is not None
    assert service.stdout.readline() == "ready\n"
    (folder,) = agent_socket.list_runs()
    for data in HOSTILE:
        with socket.socket(agent_socket.FAMILY, agent_socket.KIND) as caller:
            caller.settimeout(60)
            caller.connect(str(folder / agent_socket.SOCKET))
            socket.send_fds(caller, [data or b" "], [0] * 5)
            assert caller.recv(100) == b""
    (own,) = processes()
    (agent,) = agents()
    assert own["pid"] == service.pid
    assert files_of(agent).count("/dev/null") == 3
    service.communicate("\n", timeout=240)


def test_nobody_who_records_is_said_with_what_keeps_us_away(monkeypatch: pytest.MonkeyPatch) -> None:
    from instrument.agent import end_reports

    own = Path(end_reports.__file__).parents[1] / "sessions/autostart"
    other = Path("sitecustomize.py").absolute()
    other.touch()
    for path, obstacle in (
        (f"{other.parent}:{own}", f"{other} runs in place of ours"),
        (f"/none:{own}:{other.parent}", "something on the way keeps our sitecustomize from being loaded"),
        ("/none", "something on the way has taken our folder off PYTHONPATH"),
    ):
        monkeypatch.setenv("PYTHONPATH", path)
        process = subprocess.Popen(["sh", "-c", "echo; read line"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        assert end_reports.describe_empty_run(process.pid, 10).startswith(
            f"instrument: 10 s after its start no process of this run records anything: {obstacle}. Give "
        )
        process.communicate(b"\n")


def test_folders_of_runs_that_nobody_looks_after_are_removed() -> None:
    folder = agent_socket.create_run_folder("20260101T000000-999999999")
    (folder / "left.npz").touch()
    mine = agent_socket.create_run_folder(f"20260101T000000-{os.getppid()}")
    agent_socket.remove_abandoned_runs()
    assert agent_socket.list_runs() == [mine]
    agent_socket.remove_run_folder(mine)


def test_a_home_that_others_may_enter_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = agent_socket.list_parent_folders()
    first.mkdir()
    first.chmod(0o755)
    with pytest.raises(PermissionError, match="belong to this user"):
        agent_socket.create_run_folder("20260101T000000-1")
    first.rmdir()


# -------------------------------------------------------------------- who asks

SERVICE = """
import engine, sys, threading
from instrument import scope

def serve():
    with scope("GET /slow", kind="request", attributes={"request_id": "r-9", "http.request.method": "GET"}):
        engine.hang(600)

for x in range(100):
    with scope("GET /fast", kind="request"):
        engine.step(x)
threading.Thread(target=serve, daemon=True).start()
engine.hangs.wait()
print("ready", flush=True)
for line in sys.stdin:
    with scope("GET /fast", kind="request"):
        engine.step(1)
    print("served", flush=True)
"""


@pytest.fixture
def service() -> Iterator[subprocess.Popen[str]]:
    """A service that has served 100 requests, is in the middle of one, and serves one more for each line."""
    Path("profile.yaml").write_text(PROFILE.replace("engine:step", "engine:*"))
    begun = begin(SERVICE)
    assert begun.stdout is not None
    assert begun.stdout.readline() == "ready\n"
    until(lambda: [one for one in processes() if one["hears"]])
    yield begun
    begun.communicate(timeout=240)


def serve_one(service: subprocess.Popen[str]) -> None:
    assert service.stdin is not None
    assert service.stdout is not None
    service.stdin.write("\n")
    service.stdin.flush()
    assert service.stdout.readline() == "served\n"


def done_by(*words: str) -> subprocess.CompletedProcess[str]:
    """A command that knows of this test's run alone."""
    (folder,) = agent_socket.list_runs()
    environ = {**os.environ, agent_socket.VARIABLE: str(folder / agent_socket.SOCKET)}
    return subprocess.run([*INSTRUMENT, *words], capture_output=True, text=True, check=False, timeout=240, env=environ)


def command(*words: str) -> str:
    done = done_by(*words)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


def test_ps_reports_runs_and_processes(service: subprocess.Popen[str]) -> None:
    (agent,) = agents()
    head, titles, row, *_ = command("ps").splitlines()
    assert head.endswith(f", agent {agent}")
    told = dict(zip(titles.split(), row.split(), strict=False))
    assert (told["Service"], told["Process"], told["State"]) == ("shop", str(service.pid), "running")
    (found,) = json.loads(command("ps", "--json", str(service.pid)))["runs"]
    (process,) = found["processes"]
    assert (process["pid"], process["generation"], process["lost"]) == (service.pid, 1, 0)
    assert process["calls"] >= 200
    assert 0 < process["cost_ratio"] < 0.1


def test_live_shows_requests_in_flight_with_where_they_are(service: subprocess.Popen[str]) -> None:
    text = command("live", "--once")
    assert re.search(r"^GET /slow \(request_id=r-9\) +[\d.e-]+ +hang +", text, re.MULTILINE)
    assert re.search(r"^GET /fast +100 +0 ", text, re.MULTILINE)
    seen = json.loads(command("live", "--once", "--json"))
    (request,) = seen["in_flight"]
    assert (request["name"], request["now"], request["pid"]) == ("GET /slow", "hang", service.pid)
    assert request["bears"] == " (request_id=r-9)"
    (endpoint,) = seen["endpoints"]
    assert (endpoint["name"], endpoint["requests"], endpoint["errors"]) == ("GET /fast", 100, 0)
    assert endpoint["p50_ns"] <= endpoint["p99_ns"]
    assert {place["name"] for place in seen["places"]} == {"GET /fast", "step"}


def test_live_redraws_its_screen_until_it_is_interrupted(service: subprocess.Popen[str]) -> None:
    pytest.importorskip("rich")
    ours, theirs = pty.openpty()
    words = [*INSTRUMENT, "live", str(service.pid), "--every", "0.1"]
    looking = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while shown.count(b"GET /slow") < 2:
        shown += os.read(ours, 1 << 16)
    serve_one(service)
    while b"GET /fast" not in shown.rpartition(b"Endpoint")[2]:
        shown += os.read(ours, 1 << 16)
    looking.send_signal(signal.SIGINT)
    with suppress(OSError):  # a command whose screen is full and that nobody reads does not end
        while os.read(ours, 1 << 16):
            pass
    assert looking.wait(120) == 0
    os.close(ours)


def test_each_look_reports_what_came_since_the_one_before(service: subprocess.Popen[str]) -> None:
    (folder,) = agent_socket.list_runs()
    looking = subprocess.Popen(
        [*INSTRUMENT, "live", folder.name, "--json", "--every", "0.2"], stdout=subprocess.PIPE, text=True
    )
    assert looking.stdout is not None
    assert json.loads(looking.stdout.readline())["endpoints"][0]["requests"] == 100
    serve_one(service)
    assert until(lambda: json.loads(looking.stdout.readline())["endpoints"])[0]["requests"] == 1
    looking.terminate()
    looking.communicate()


@pytest.mark.slow
def test_dump_saves_what_a_process_has_in_memory_while_it_goes_on(service: subprocess.Popen[str]) -> None:
    assert "dump.npz: " in command("dump", "--output", "dump.npz")
    saved = file.load("dump.npz")
    names = Counter(span.site.name for span in saved.trace.spans)
    assert names == {"GET /fast": 100, "step": 100, "GET /slow": 1, "hang": 1}
    serve_one(service)
    for last, ended in (("1ns", 0), ("1000s", 101)):
        command("dump", "--last", last, "--output", "last.json.gz")
        spans = chrome.load("last.json.gz")[0].spans
        assert sum(span.site.name == "step" for span in spans) == ended
        assert {span.site.name for span in spans if span.clipped} == {"GET /slow", "hang"}
    command("dump", "--last", "1ns", "--output", "last.npz")
    assert {row.path[-1].name for row in file.load("last.npz").read_or_count_totals().iterate_totals()} == {
        "GET /slow",
        "hang",
    }


@pytest.mark.slow
def test_a_run_that_is_still_going_is_reported_on_by_its_name_its_service_or_none(
    service: subprocess.Popen[str],
) -> None:
    (folder,) = agent_socket.list_runs()
    for words in ([], ["shop"], [str(service.pid)], ["--run", folder.name], [folder.name]):
        shown = command("report", *words)
        assert shown.startswith(f"Run {folder.name} is still going: 1 process\n")
        assert "GET /fast" in shown
    serve_one(service)
    told = json.loads(command("report", "--json", "--view", "requests", "shop"))
    assert (told["run"], told["is_going"]) == (folder.name, True)
    assert {one["name"]: one["requests"] for one in told["views"]["requests"]["endpoints"]} == {"GET /fast": 101}
    command("report", "--html", "page.html")
    missing = done_by("report", "shap")
    assert missing.returncode == 2
    assert missing.stderr.startswith("instrument: report: there is no file shap, and there is not a run, ")
    assert folder.name in missing.stderr


@pytest.mark.slow
def test_a_run_is_switched_off_and_on_and_every_process_answers(service: subprocess.Popen[str]) -> None:
    assert command("off") == f"{service.pid}: does not record\n"
    serve_one(service)
    assert command("ps").split().count("off") == 1
    assert ": 1 process, 1 switched off, " in command("live", "--once")
    assert json.loads(command("live", "--once", "--json"))["endpoints"][0]["requests"] == 100
    assert command("on") == f"{service.pid}: records\n"
    assert ": 1 process, 1 request in flight" in command("live", "--once")
    serve_one(service)
    assert json.loads(command("live", "--once", "--json"))["endpoints"][0]["requests"] == 101


def test_reload_goes_by_the_agent_and_every_process_answers(service: subprocess.Popen[str]) -> None:
    Path("profile.yaml").write_text(PROFILE)
    told = command("reload")
    assert told.startswith(f"{service.pid}: generation 2 (")
    assert "undone engine:hang" in told
    assert f"  {told.split('generation ')[1].partition(';')[0]}  " in command("ps")
    Path("profile.yaml").write_text("functions: nonsense")
    done = done_by("reload")
    assert done.returncode == 2
    assert "generation 2" in done.stdout
    assert "stays in force" in done.stdout


@pytest.mark.slow
def test_a_process_that_has_recorded_nothing_hears_later_and_its_children_are_switched_as_it_is() -> None:
    waiting = begin(
        "import engine, os, sys\nprint('ready', flush=True); sys.stdin.readline()\nif os.fork() == 0: engine.step(1)\n"
        "sys.stdin.readline()"
    )
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == "ready\n"
    assert "it has recorded nothing yet" in command("off")
    assert "`instrument ps` lists their processes" in done_by("ps", "no-such").stderr
    assert waiting.stdin is not None
    waiting.stdin.write("\n")
    waiting.stdin.flush()
    while "off" not in command("ps").split():  # the child, as its parent
        time.sleep(0.05)
    waiting.communicate("\n\n", timeout=240)


def test_a_request_for_an_unknown_run_gets_the_list_of_runs() -> None:
    done = subprocess.run([*INSTRUMENT, "live", "no-such", "--once"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is not a run, a service or a process named no-such; the runs are: " in done.stderr


# -------------------------------------------------------------------- many processes

STORM = """
import engine, os, signal, sys, threading, time

def storm(n):
    for x in range(25):
        pid = os.fork()
        if not pid:
            engine.step(x)
            os._exit(1) if x % 5 == 0 else sys.exit(0)
        os.waitpid(pid, 0)

engine.step(1)
threads = [threading.Thread(target=storm, args=(n,)) for n in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


@pytest.mark.slow
def test_two_hundred_forks_of_a_storm_of_threads_are_one_report_and_leave_nothing() -> None:
    done = run(STORM)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Summary of shop") == 1
    (row,) = [line for line in done.stderr.splitlines() if line.startswith("step ")]
    assert row.split()[3] == "201"
    assert done.stderr.count(" of shop ended without a goodbye") == 40
    assert done.stderr.count("; saved as ") == 20


def test_a_child_that_a_thread_forks_ends_with_that_thread_although_its_end_loads_numpy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The threads of OpenBLAS never end. Where it may begin some, the parent would wait for ever."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    done = run(STORM.replace("range(25)", "(1,)").replace("range(8)", "range(2)"))
    assert done.returncode == 0
    assert "fault" not in done.stderr
    (row,) = [line for line in done.stderr.splitlines() if line.startswith("step ")]
    assert row.split()[3] == "3"


RECYCLED = """
import os, sys, time
from instrument import scope

def serve(seconds):
    time.sleep(seconds)
    with scope("GET /", kind="request"):
        pass

serve(2)
for x in range(20):
    pid = os.fork()
    if not pid:
        serve(0)
        sys.exit(0)
    os.waitpid(pid, 0)
if not os.fork():
    serve(0.2)
    time.sleep(600)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_ended_processes_are_counted_and_rates_are_over_the_time_that_each_lived() -> None:
    service = begin(RECYCLED)
    assert service.stdout is not None
    assert service.stdout.readline() == "ready\n"
    until(lambda: len(children_of(service.pid)) == 1)
    until(lambda: sum(one["has_recorded"] and not one["ended_ns"] for one in processes()) == 2)
    until(lambda: sum(one["calls"] or 0 for one in json.loads(command("ps", "--json"))["runs"][0]["processes"]) == 2)
    shown = json.loads(command("live", "--once", "--json"))
    assert shown["ended"] == 20
    assert shown["endpoints"][0]["rate"] > 1.9 / (shown["window_ns"] / 1e9)
    ups_ns = [one["up_ns"] for one in shown["processes"] if one["calls"]]
    assert shown["endpoints"][0]["rate"] == pytest.approx(sum(1e9 / up_ns for up_ns in ups_ns))
    assert shown["is_uneven"] == (min(ups_ns) < 0.9 * max(ups_ns))  # so unless all of this took half a minute
    assert "\n20 processes of it ended: " in command("live", "--once")
    listed = command("ps")
    assert listed.count("  ended  ") + int(listed.partition("\nand ")[2].partition(" more that ended")[0]) == 20
    done = done_by("dump", "--output", "dump.npz")
    assert (done.stdout, done.stderr) == ("dump.npz: 2 spans of 2 processes, without 20 that ended before\n", "")
    os.kill(
        next(one["pid"] for one in shown["processes"] if one["calls"] and one["pid"] != service.pid), signal.SIGKILL
    )
    service.communicate(timeout=240)


GUNICORN = """
import os, time

def app(environ, start_response):
    import engine
    engine.step(1)
    start_response("200 OK", [("Content-Length", "1")])
    return [b"x"]
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--preload",)], ids=["", "preload"])
def test_gunicorn_s_workers_come_and_go_within_one_run(more: tuple[str, ...]) -> None:
    pytest.importorskip("gunicorn")
    Path("shop.py").write_text(GUNICORN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["-m", "gunicorn", "-w", "2", "-b", f"127.0.0.1:{port}", "--graceful-timeout", "60", *more, "shop:app"]
    command = [*INSTRUMENT, "run", "--profile", "profile.yaml", "--", *words]
    with Path("errors").open("w") as errors:
        server = subprocess.Popen(command, stderr=errors)

    def answers() -> bool:
        try:
            with socket.create_connection(("127.0.0.1", port), 5) as client:
                client.sendall(b"GET / HTTP/1.0\r\n\r\n")
                return client.recv(12).endswith(b"200")
        except OSError:
            return False

    def workers() -> set[int]:
        return {one["pid"] for one in processes() if one["has_recorded"] and not one["ended_ns"]}

    until(answers)
    until(lambda: answers() and len(workers()) == 2)
    gone = workers().pop()
    os.kill(gone, signal.SIGKILL)
    until(lambda: f"process {gone} of shop ended without a goodbye" in Path("errors").read_text())
    before = workers()
    server.send_signal(signal.SIGHUP)
    until(lambda: answers() and not workers() & before and workers())
    server.terminate()
    assert server.wait(240) == 0
    told = Path("errors").read_text()
    assert told.count("Summary of shop") == 1, told
    assert re.search(rf"{gone} \(without a goodbye.*\), .*-died.npz\n", told.partition("Processes:")[2])
    assert told.partition("Processes:")[2].count("in order") >= 2


def test_a_process_killed_for_want_of_memory_is_reported_as_such(tmp_path: Path) -> None:
    from instrument.agent import end_reports
    from instrument.agent.causes_of_end import read_oom_kills
    from instrument.agent.processes import Process, Run

    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 1\noom_kill 2\n")
    process = Process(run=Run("r"), pid=1, started=1, facts={}, joined_ns=0, memory_events=events)
    process.oom_kills = read_oom_kills(events)
    process.status = signal.SIGKILL
    assert end_reports.format_vanished_message(process, {"path": "x"}).endswith(
        "1 ended without a goodbye (SIGKILL); saved as x"
    )
    events.write_text("low 0\noom 2\noom_kill 3\n")
    assert "(killed by the OOM killer, as its control group reports)" in end_reports.format_vanished_message(
        process, {"path": "x"}
    )
    process.status = signal.SIGSEGV
    assert "(SIGSEGV)" in end_reports.format_vanished_message(process, {"path": "x"})
    assert read_oom_kills(None) == read_oom_kills(tmp_path / "none") == 0


HORSES = """
import os, sys
import engine

for number in range(12):
    if os.fork() == 0:
        engine.step(number)
        os._exit(3 if number == 11 else 0)
    os.wait()
"""


@pytest.mark.slow
def test_workers_that_leave_past_pythons_end_with_code_0_have_not_died_and_their_spans_are_in_files(
    folder: Path,
) -> None:
    with Path("profile.yaml").open("a") as profile:
        profile.write("  recording:\n  chrome: {path: 'traces/{service}-{run}-{window}.json'}\n")
    done = run(HORSES)
    assert done.returncode == 0, done.stderr
    until(lambda: not agent_socket.list_runs())
    died = set(re.findall("ended without a goodbye.*; no span was open", done.stderr))
    assert died == {"ended without a goodbye (exit code 3); no span was open"}
    assert re.search(r"\bstep .* 12 ", done.stderr), done.stderr
    for pattern, load in (
        ("*.npz", lambda path: file.load(path).trace.columns),
        ("*.json", lambda path: chrome.read(path).trace.spans),
    ):
        paths = [path for path in Path("traces").glob(pattern) if not path.name.endswith("-died.npz")]
        assert sum(len(load(path)) for path in paths) == 11


@pytest.mark.slow
def test_a_worker_that_exits_inside_a_span_is_reported_dead_with_any_exit_code(folder: Path) -> None:
    Path("engine.py").write_text("import os\n\ndef step(x):\n    os._exit(x)\n")
    done = run("import os, engine\nif os.fork() == 0:\n    engine.step(0)\nos.wait()\n")
    assert "ended without a goodbye (exit code 0): it died in `step`" in done.stderr
