"""The agent in containers: `instrument run` as the first process, a separate agent, and an agent that takes over."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_agent import ASK, INSTRUMENT, PROFILE, agents, asked, begin, done_by, folder, processes, until

from instrument.cli import main
from instrument.recording import memory, memory_layout
from instrument.runtime import agent_socket
from instrument.trace import file

__all__ = ["folder"]

ALONE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
"""The words that give a command a namespace of processes, in which it is the first."""


def has_namespaces() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode == 0


needs_namespaces = pytest.mark.skipif(not has_namespaces(), reason="needs namespaces of processes")


def first(source: str) -> subprocess.CompletedProcess[str]:
    """A service under `instrument run`, which is the first process of a container."""
    Path("main.py").write_text(textwrap.dedent(source))
    words = [*ALONE, *INSTRUMENT, "run", "--profile", "profile.yaml", "--", "main.py"]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=240)


@needs_namespaces
def test_the_first_process_of_a_container_outlives_a_killed_service_and_reports_its_end() -> None:
    done = first("""
        import engine, os, signal
        from instrument import scope
        with scope("POST /generate", kind="request"):
            engine.step(1)
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert done.returncode == 128 + signal.SIGKILL
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("instrument: ")]
    assert "ended without a goodbye (SIGKILL): it died in request `POST /generate`, " in line
    saved = file.load(line.rpartition("; saved as ")[2])
    assert {span.site.name for span in saved.trace.spans} == {"step", "POST /generate"}
    assert "(without a goodbye (SIGKILL))" in done.stderr  # in the report of the run


@pytest.mark.slow
@needs_namespaces
def test_the_first_process_of_a_container_keeps_exit_code_and_output_and_reaps_orphans() -> None:
    done = first("""
        import engine, os, sys, time
        def state(pid):
            try:
                return open(f"/proc/{pid}/stat").read()
            except OSError:
                return ""  # it has been reaped meanwhile
        engine.step(1)
        if os.fork() == 0:
            if os.fork() == 0:
                os._exit(0)  # its parent is gone, or will be soon
            os._exit(0)
        os.wait()
        until = time.monotonic() + 240
        def dead():
            pids = [pid for pid in os.listdir("/proc") if pid.isdecimal()]
            return [pid for pid in pids if " Z " in state(pid)]
        while dead() and time.monotonic() < until: time.sleep(0.01)
        print(os.getppid(), dead())
        sys.exit(7)
    """)
    assert (done.returncode, done.stdout) == (7, "1 []\n"), done.stderr
    assert done.stderr.count("Summary of shop") == 1


@needs_namespaces
@pytest.mark.slow
def test_the_first_process_of_a_container_forwards_signals() -> None:
    done = first("""
        import engine, os, signal, sys, time
        engine.step(1)
        forwarded = []
        signal.signal(signal.SIGUSR1, lambda *_: forwarded.append(print("usr1", flush=True)))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        os.kill(1, signal.SIGUSR1)
        while not forwarded: time.sleep(0.01)
        os.kill(1, signal.SIGTERM)
        for _ in range(6000):  # Python sees a signal that comes just before a sleep only after it
            time.sleep(0.1)
    """)
    assert (done.returncode, done.stdout) == (3, "usr1\n"), done.stderr


def beside(*words: str) -> subprocess.Popen[str]:
    agent = subprocess.Popen([*INSTRUMENT, "agent", *words], stderr=subprocess.PIPE, text=True)
    assert agent.stderr is not None
    assert "the agent listens at " in agent.stderr.readline()
    return agent


@pytest.mark.slow
def test_an_agent_next_to_services_serves_one_after_the_other_until_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = Path("/tmp") / f"instrument-test-{os.getpid()}" / "beside" / "agent.sock"
    agent = beside("--socket", str(path), "--captures", "captures")
    idle = f"no process has joined; those do that are started with INSTRUMENT_AGENT={path}\n"
    for words, code in ((["ps"], 0), (["live", "--once"], 0), (["off"], 1), (["dump"], 2)):
        done = subprocess.run([*INSTRUMENT, *words, str(path)], capture_output=True, text=True, check=False)
        assert (done.returncode, (done.stdout + done.stderr).endswith(idle)) == (code, True), done
    monkeypatch.setenv(agent_socket.VARIABLE, str(path))
    service = begin("import engine; engine.step(1); print('ready', flush=True); engine.hang(600)")
    assert service.stdout is not None
    assert service.stdout.readline() == "ready\n"
    assert oct(path.stat().st_mode & 0o777) == "0o600"
    assert oct(path.parent.stat().st_mode & 0o777) == "0o700"
    service.kill()
    service.communicate()
    assert agent.stderr is not None
    line = agent.stderr.readline()
    assert f"process {service.pid} of shop ended without a goodbye" in line
    assert Path(line.rpartition("; saved as ")[2].strip()).parent == Path("captures").absolute()
    second = begin(f"{ASK}\nimport engine; engine.step(1); print(ask()[0][-1]['pid'])")
    out, errors = second.communicate(timeout=240)
    assert (out, errors.count("Summary of shop")) == (f"{second.pid}\n", 1)
    agent.terminate()
    agent.communicate(timeout=240)
    assert not path.exists()
    path.parent.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_an_agent_next_to_services_that_begins_again_reports_those_that_ended_before(
    how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path("/tmp") / f"instrument-test-{os.getpid()}" / "beside" / "agent.sock"
    with monkeypatch.context() as patch:
        patch.setenv("IMPATIENT", "agents")  # else it would wait a minute for the service to end
        first = beside("--socket", str(path))
    monkeypatch.setenv(agent_socket.VARIABLE, str(path))
    service = begin("""
        import engine, subprocess, sys
        engine.step(1)
        subprocess.run([sys.executable, "-c", "import engine; engine.step(1)"])
        print("worker has ended", flush=True)
        sys.stdin.readline()
    """)
    assert service.stdout is not None
    assert service.stdout.readline() == "worker has ended\n"
    until(lambda: list(path.parent.glob("*-left.npz")) and len(list(path.parent.glob("*.process"))) == 1)
    first.send_signal(how)
    first.communicate(timeout=240)
    second = beside("--socket", str(path))

    def known() -> list[dict[str, Any]]:
        return [one["process"] for one in asked(path.parent, {"ask": "processes"})[:-1]]

    until(lambda: any(one["pid"] == service.pid for one in known()))
    _, errors = service.communicate("\n", timeout=240)
    second.terminate()
    second.communicate(timeout=240)
    (row,) = [line for line in errors.splitlines() if line.startswith("step ")]
    assert row.split()[3] == "2"
    assert "(ended under an agent before this one)" in errors.partition("Processes: 2\n")[2]
    path.parent.rmdir()  # nothing is left


@pytest.mark.slow
@pytest.mark.parametrize("kept", [False, True], ids=["memory", "files"])
def test_ps_names_the_remedy_for_a_run_that_was_killed_with_its_agent(kept: bool) -> None:
    if kept:
        Path("rings").mkdir(mode=0o700)
        Path("profile.yaml").write_text(f"{PROFILE}\nlimits: {{ring_dir: {Path('rings').absolute()}}}\n")
    service = begin("import engine; engine.step(1); print('ready', flush=True); engine.hang(600)")
    assert service.stdout is not None
    assert service.stdout.readline() == "ready\n"
    (run,) = agent_socket.list_runs()
    until(lambda: list(run.glob(f"*{agent_socket.NOTE_SUFFIX}")))
    pids = [*agents(), service.pid]
    os.kill(service.pid, signal.SIGSTOP)  # it begins no other agent
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    service.communicate()
    (run / agent_socket.UNSENT).write_text("7")
    (said,) = until(lambda: [line for line in [done_by("ps", run.name).stdout] if "have gone" in line])
    assert "its agent and its processes have gone; 1 ended without a goodbye" in said
    assert "; up to 7 spans of others are perhaps not exported" in said
    assert "takes over" not in said
    for verb in ("live", "dump"):
        assert said.partition(", ")[2] in f"{done_by(verb, run.name).stderr}"
    if kept:
        words = said.partition("`instrument recover ")[2].partition("`")[0]
        done = subprocess.run([*INSTRUMENT, "recover", words], capture_output=True, text=True, check=True)
        assert "; saved as " in done.stdout
    else:
        assert "what they recorded is lost" in said
    subprocess.run([*INSTRUMENT, "run", "--profile", "profile.yaml", "--", "-c", ""], check=True)
    assert not run.exists()


@pytest.mark.slow
def test_an_agent_that_takes_over_hears_of_the_processes_and_of_their_end() -> None:
    service = begin("""
        import engine, sys
        engine.step(1)
        print("ready", flush=True)
        sys.stdin.readline()
    """)
    assert service.stdout is not None
    assert service.stdout.readline() == "ready\n"
    until(lambda: [one for one in processes() if one["hears"]])
    (before,) = agents()
    os.kill(before, signal.SIGKILL)
    until(lambda: [one for one in agents() if one != before])
    (process,) = until(lambda: [one for one in processes() if one["hears"]])
    assert (process["pid"], process["has_recorded"]) == (service.pid, True)
    _, errors = service.communicate("\n", timeout=240)
    assert errors.count("Summary of shop") == 1
    until(lambda: not agent_socket.list_runs())


@pytest.mark.slow
def test_commands_report_the_pid_of_a_stopped_agent_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    service = begin("import engine; engine.step(1); print('ready', flush=True); input()")
    assert service.stdout is not None
    assert service.stdout.readline() == "ready\n"
    (agent,) = agents()
    (run,) = agent_socket.list_runs()
    refused = subprocess.run([*INSTRUMENT, "agent", "--run", run.name], capture_output=True, text=True, check=False)
    assert f"an agent (process {agent}) already listens there; choose another --socket\n" in refused.stderr
    monkeypatch.setenv("IMPATIENT", "agents")
    os.kill(agent, signal.SIGSTOP)
    try:
        shown = done_by("ps", run.name).stdout
        refused = subprocess.run([*INSTRUMENT, "agent", "--run", run.name], capture_output=True, text=True, check=False)
    finally:
        os.kill(agent, signal.SIGCONT)
    way_out = f", and does not answer; `kill -9 {agent}` ends it, so that another one can take over\n"
    assert shown.endswith(f", an agent (process {agent}) listens{way_out}")
    assert f": an agent (process {agent}) already listens there{way_out[:-1]}; choose" in refused.stderr
    service.communicate("\n", timeout=240)


@pytest.mark.slow
def test_an_agent_that_goes_on_after_another_has_taken_its_place_prints_and_removes_nothing() -> None:
    service = begin("""
        import engine, os, sys
        engine.step(1)
        worker = os.fork()
        if not worker:
            engine.step(2)
            sys.stdin.readline()
            sys.exit()
        print("ready", flush=True)
        os.wait()
        sys.stdin.readline()
    """)
    assert service.stdout is not None
    assert service.stdin is not None
    assert service.stdout.readline() == "ready\n"
    (run,) = agent_socket.list_runs()
    until(lambda: len([one for one in processes() if one["hears"]]) == 2)
    (before,) = agents()
    stopped = os.pidfd_open(before)
    os.kill(before, signal.SIGSTOP)
    (run / agent_socket.SOCKET).unlink()
    after = beside("--run", run.name)
    os.kill(before, signal.SIGCONT)
    assert select.select([stopped], [], [], 240)[0]  # it ends
    os.close(stopped)
    assert agent_socket.has_listener(run / agent_socket.SOCKET)
    until(lambda: len([one for one in processes() if one["hears"]]) == 2)  # they have joined the other one
    _, errors = service.communicate("\n\n", timeout=240)
    _, said = after.communicate(timeout=240)
    assert (errors + said).count("Summary of shop") == 1
    assert not run.exists()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["", "limits: {ring: 1MiB, ring_dir: ./rings}\n"], ids=["memory", "files"])
def test_an_agent_that_takes_over_reports_those_that_ended_in_between(where: str) -> None:
    Path("profile.yaml").write_text(PROFILE + where)
    service = begin("""
        import engine, os, sys
        from instrument import scope
        children = []
        for records in (True, False):
            child = os.fork()
            if not child:
                if records:
                    engine.step(1)
                os.write(1, b"%d\\n" % os.getpid())  # at once, as others write too
                with scope("left open", kind="request") if records else open(os.devnull):
                    engine.time.sleep(600)
            children.append(child)
        engine.step(1)
        os.write(1, b"%d\\n" % os.getpid())
        sys.stdin.readline()
        for child in children:
            os.waitpid(child, 0)
    """)
    assert service.stdout is not None
    assert service.stdin is not None
    pids = sorted(int(service.stdout.readline()) for _ in range(3))
    recording = until(lambda: sorted(one["pid"] for one in processes() if one["hears"])[1:] and processes())
    child = next(one["pid"] for one in recording if one["hears"] and one["pid"] != service.pid)
    (before,) = agents()
    os.kill(service.pid, signal.SIGSTOP)  # it begins no agent
    os.kill(before, signal.SIGKILL)
    for pid in pids:
        if pid != service.pid:
            os.kill(pid, signal.SIGKILL)
    until(lambda: Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    os.kill(service.pid, signal.SIGCONT)
    until(lambda: [one for one in agents() if one != before])
    _, errors = service.communicate("\n", timeout=240)
    told = [line for line in errors.splitlines() if "without a goodbye" in line and "process" in line]
    assert [str(child) in line for line in told] == [True]
    assert ("what it recorded went with it" if not where else "it died in request `left open`") in told[0]
    until(lambda: not agent_socket.list_runs())


@pytest.mark.slow
def test_recover_saves_what_killed_processes_have_left_in_files(tmp_path: Path) -> None:
    Path("profile.yaml").write_text(f"{PROFILE}limits: {{ring: 64KiB, ring_dir: ./rings}}\nagent: off\n")
    killed = begin("""
        import engine, os, signal
        from instrument import scope
        with scope("POST /generate", kind="request"):
            engine.step(1)
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    killed.communicate(timeout=240)
    ended = begin("import engine; engine.step(1)")
    ended.communicate(timeout=240)
    lives = begin("import engine; engine.step(1); print('ready', flush=True); input()")
    assert lives.stdout is not None
    assert lives.stdout.readline() == "ready\n"
    words = [*INSTRUMENT, "recover", "rings", "--remove"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lives.communicate("\n", timeout=240)
    assert done.returncode == 0, done.stderr
    told = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    by_pid = {int(Path(path).name.partition("-")[0]): said for path, said in told.items()}
    assert ended.pid not in by_pid  # it has taken its own away
    assert by_pid[lives.pid] == f"process {lives.pid} runs"
    told_of = by_pid[killed.pid]
    assert re.search(r"it died in request `POST /generate`, at least [\d.]+ [mun]?s after it began; saved", told_of)
    left = sorted(path.name.partition("-")[0] + path.suffix for path in Path("rings").iterdir())
    assert f"{killed.pid}.npz" in left
    assert f"{killed.pid}.recording" not in left
    empty = subprocess.run([*INSTRUMENT, "recover", str(tmp_path)], capture_output=True, text=True, check=False)
    assert (empty.returncode, "has no file" in empty.stderr) == (2, True)


def test_recover_saves_what_a_killed_process_has_left_whose_parent_has_not_taken_notice_yet() -> None:
    Path("profile.yaml").write_text(f"{PROFILE}limits: {{ring: 64KiB, ring_dir: ./rings}}\nagent: off\n")
    killed = begin("""
        import engine, os, signal
        engine.step(1)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)  # it stays what its parent has not waited for
    done = subprocess.run([*INSTRUMENT, "recover", "rings"], capture_output=True, text=True, check=True)
    killed.communicate(timeout=240)
    assert f": process {killed.pid} ended without a goodbye; no span was open; saved as " in done.stdout


def test_recover_leaves_what_processes_of_other_containers_record_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = memory.make_memory(1 << 16, str(tmp_path))
    try:
        other = Path(made.path).rename(tmp_path / "1-77.recording")  # the number and begin that it has in there
        os.pwrite(made.fd, (1).to_bytes(4, "little"), memory_layout.HEADER.fields["pid"][0])
        assert main(["recover", str(tmp_path), "--remove"]) == 0
    finally:
        os.close(made.fd)
    assert capsys.readouterr().out == f"{other}: process 1 runs\n"
    assert other.exists()


def test_the_manifest_has_both_forms_and_names_what_there_is() -> None:
    text = (Path(__file__).parent.parent / "examples/kubernetes/service.yaml").read_text()
    manifests = [one for one in yaml.safe_load_all(text) if one]
    assert [one["kind"] for one in manifests] == ["Deployment", "Deployment"]
    assert agent_socket.VARIABLE in text
    done = subprocess.run([*INSTRUMENT, "agent", "--help"], capture_output=True, text=True, check=True)
    for option in ("--socket", "--captures"):
        assert option in text
        assert option in done.stdout


@needs_namespaces
@pytest.mark.slow
def test_the_first_process_of_a_container_begins_its_agent_anew_which_reports_how_the_service_ended() -> None:
    done = first(f"""{ASK}
import engine, signal
engine.step(1)
before = ask()[1]
os.kill(before, signal.SIGKILL)
members, agent = [], before
while agent == before or not members:
    try:
        members, agent = ask()
    except (OSError, TypeError):
        pass
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
""")
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert "of shop ended without a goodbye (SIGKILL)" in done.stderr


@pytest.mark.slow
def test_verbs_find_an_agent_next_to_the_service_and_take_a_service_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = Path("/tmp") / f"instrument-test-{os.getpid()}" / "beside" / "agent.sock"
    agent = beside("--socket", str(path))
    serves = "import engine; engine.step(1); print('ready', flush=True); engine.hang(600)"
    monkeypatch.setenv(agent_socket.VARIABLE, str(path))
    services = []
    for name in ("shop", "bank"):
        Path("profile.yaml").write_text(PROFILE.replace("shop", name))
        services.append(begin(serves))
        assert services[-1].stdout is not None
        assert services[-1].stdout.readline() == "ready\n"
    monkeypatch.delenv(agent_socket.VARIABLE)
    shop, bank = (service.pid for service in services)
    assert {f"  {shop} ", f"  {bank} "} <= set(re.findall(r"  \d+ ", done_by("ps").stdout))
    refused = done_by("off")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert re.search(
        r"there are several runs: .*\(shop: 1 process, for .* s\); .*\(bank: 1 process, for .*--all", refused.stderr
    )
    assert done_by("off", "shop").stdout == f"{shop}: does not record\n"
    assert ": 1 process, 1 switched off" in done_by("live", "--once", "shop").stdout
    assert "there are several runs" in done_by("live", "--once").stderr
    assert set(done_by("on", "--all").stdout.splitlines()) == {f"{shop}: records", f"{bank}: records"}
    assert done_by("reload", "--run", "bank").stdout.startswith(f"{bank}: generation")
    assert "1 process" in done_by("dump", "bank", "--output", "bank.npz").stdout
    monkeypatch.setenv(agent_socket.VARIABLE, str(path))
    assert done_by("off", "bank").stdout == f"{bank}: does not record\n"
    for service in services:
        service.terminate()
        service.communicate(timeout=240)
    agent.terminate()
    agent.communicate(timeout=240)
    path.parent.rmdir()
