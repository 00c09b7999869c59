"""The verb `run` starts a service under a profile.

`run` replaces its own process by the service. As the first process of a container, `run` instead starts the service as
a child, forwards signals to it, and exits with the service's exit code.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from instrument import native
from instrument.cli import flush_stream, print_remark
from instrument.cli.interpreter import choose_service_name, find_command
from instrument.cli.option_values import DEFAULT, WITHOUT_PROFILE, Verbs, choice_arguments, choose_profile_file
from instrument.instrumentors.known_packages import packages_to_await
from instrument.native import OFF
from instrument.profile import shared_profile
from instrument.profile.document import without_secrets
from instrument.profile.keys import load
from instrument.profile.model import Profile
from instrument.profile.presets import PRESETS
from instrument.profile.values import SERVICE
from instrument.recording import board
from instrument.runtime import agent_socket, environment
from instrument.runtime.environment import CHECK_FOLDER
from instrument.runtime.lazy_imports import late_patterns, replace
from instrument.sessions import autostart


def add_verbs(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "run",
        allow_abbrev=False,
        help="run a Python service under a profile",
        usage="instrument run [--profile P | --preset NAME] -- command [argument ...]",
        description="The command is a shell command, such as `uvicorn app:app`, `python server.py` or `./start.sh`, or "
        "arguments of python, such as `server.py` or `-m module`. It runs as without instrument, with its own exit "
        "code and signals. Child processes that inherit the environment are recorded too. Without a profile the "
        f"preset {PRESETS[0]} applies.",
    )
    parser.add_argument("--profile", metavar="P", help=f"path of the profile.yaml ({DEFAULT})")
    parser.add_argument("--preset", **choice_arguments(PRESETS), help="a profile that comes with the package")
    parser.set_defaults(verb=run)


def run(options: argparse.Namespace, host: list[str]) -> int:
    """Replace this process by the service. In the first process of a container, run the service as a child instead."""
    if native.WHY_MISSING:
        print_remark("no call is recorded", native.WHY_MISSING)
    path, is_unnamed = choose_profile_file(options)
    environ = _original_environment()
    environ["INSTRUMENT_PROFILE"] = os.path.abspath(path)  # noqa: PTH100 - resolve() would follow links
    environ["INSTRUMENT_RUN_PID"] = str(os.getpid())
    environ.pop(SERVICE, None)
    if host and "service.name=" not in environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        environ[SERVICE] = choose_service_name(host)
    consulted = shared_profile.Consulted(environ)
    profile = None
    if not OFF and host:
        with late_patterns():  # the service waits for this
            import yaml  # noqa: F401
        profile = load(path, environ=consulted)
        if profile.export.otlp is not None and profile.export.otlp.protocol == "grpc":
            from instrument.otlp.senders import require_grpc

            require_grpc()  # a broken profile ends here, not in the service
    command = find_command("run", host)
    environ[environment.RUN_VARIABLE] = name = _name_run()
    environ.pop(board.VARIABLE, None)
    paths = [str(Path(autostart.__file__).parent), *filter(None, [environ.get("PYTHONPATH")])]
    environ["PYTHONPATH"] = os.pathsep.join(paths)
    environ.pop(autostart.VARIABLE, None)
    asks_all = CHECK_FOLDER in environ or environment.INIT_FOLDER in environ
    if profile is not None and not asks_all and (packages := packages_to_await(profile)) is not None:
        environ[autostart.VARIABLE] = autostart.format_awaited_packages(environ["INSTRUMENT_PROFILE"], packages)
    listener = None
    if profile is None or profile.agent == "off":
        environ.pop(agent_socket.VARIABLE, None)
    # A run within another has its own agent.
    elif "INSTRUMENT_RUN_PID" in os.environ or not environ.get(agent_socket.VARIABLE):
        listener = _open_socket_for_agent(environ, name)
        if (place := agent_socket.find_shared_file(shared_profile.NAME, environ)) is not None:
            shared_profile.write_shared_profile(
                place, replace(profile, source=environ["INSTRUMENT_PROFILE"]), consulted
            )
    notes = [] if OFF else [*filter(None, [WITHOUT_PROFILE * is_unnamed, command.note])]
    if profile is not None:
        notes += [*_describe_variables(profile), *([] if asks_all or listener is None else _describe_files(profile))]
    for line in notes:
        print_remark(line)
    flush_stream(sys.stdout)
    flush_stream(sys.stderr)
    if listener is not None and os.getpid() == 1:
        return run_under_agent(listener, name, command.words, environ)
    if listener is not None:
        _start_agent(listener, name, environ)
    return os.execve(command.words[0], command.words, environ)  # noqa: S606 - no shell wanted


def _name_run() -> str:
    """Return a name for a new run, from the time. Wait if an outer run has the same name."""
    while (name := environment.make_run_name()) == os.environ.get(environment.RUN_VARIABLE):
        time.sleep(0.05)
    return name


def _open_socket_for_agent(environ: dict[str, str], run: str) -> socket.socket | None:
    environ.pop(agent_socket.VARIABLE, None)
    try:
        listener = agent_socket.create_run_socket(run)
    except OSError as error:
        print_remark("this run has no agent", error)
        return None
    environ[agent_socket.VARIABLE] = os.fsdecode(listener.getsockname())
    return listener


def _start_agent(listener: socket.socket, run: str, environ: dict[str, str]) -> None:
    try:
        agent_socket.start_agent(listener, run, os.getpid())
    except OSError as error:
        del environ[agent_socket.VARIABLE]
        print_remark("this run has no agent", error)
    listener.close()


def _original_environment() -> dict[str, str]:
    """Return the service's environment, including the entry that `opentelemetry-instrument` removes from PYTHONPATH.

    OpenTelemetry thus also instruments the service.
    """
    file = getattr(sys.modules.get("sitecustomize"), "__file__", None)
    folder = os.path.dirname(os.path.abspath(file)) if file else ""  # noqa: PTH100, PTH120 - as on the path
    before = environment.initial_environment()
    had, has = (folder in environ.get("PYTHONPATH", "").split(os.pathsep) for environ in (before, os.environ))
    return before if folder and had and not has else dict(os.environ)


def _describe_variables(profile: Profile) -> list[str]:
    remarks, otlp, switch = [*profile.remarks], profile.export.otlp, os.environ.get("INSTRUMENT", "").strip().lower()
    if otlp is not None and profile.shown.get("export.otlp") == "auto":
        variable = profile.origins["export.otlp.endpoint"]
        remarks.insert(0, f"exports to the collector at {without_secrets(otlp.endpoint)} (from {variable})")
    if switch not in ("", "on", "1", "true", "yes"):
        remarks.append(f"INSTRUMENT: found {switch!r}; allowed: on, off; this run is recorded")
    return remarks


def _describe_files(profile: Profile) -> Iterator[str]:
    writes_traces = profile.export.chrome is not None or profile.export.recording is not None
    if writes_traces:
        yield "trace files are written as each process ends"
    if profile.capture.to is not None:
        yield f"kept requests are written into {profile.capture.to} some seconds after they ended"
    if writes_traces or profile.capture.to is not None:
        shown = "requests in flight" if profile.requests else "where the time goes"
        yield f"`instrument live` shows {shown}, `instrument dump` saves the newest spans"


AGENT_WAIT_S = 5.0
"""Seconds to wait, after the service's end, for the agent's last output."""

AGENTS = 10
"""The maximum number of agents that a run starts, each after the end of the previous agent."""

_TERMINAL = (signal.SIGTTIN, signal.SIGTTOU)


def run_under_agent(listener: socket.socket, run: str, words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the service as a child process, with an agent at a socket. Returns the exit code."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    service = os.fork()
    if service == 0:
        _become_service(words, {**environ, "INSTRUMENT_RUN_PID": str(os.getpid())}, before)
    agent = agent_socket.spawn_agent(sys.executable, listener, run, service, says=True)
    path = Path(os.fsdecode(listener.getsockname()))
    listener.close()
    status, agent = _supervise_service(service, agent, path, run)
    _kill_all_but_agent(agent)
    if agent:
        _await_agent_end(agent, time.monotonic() + AGENT_WAIT_S)
    agent_socket.remove_run_folder(path.parent)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _restart_agent(path: Path, run: str, service: int) -> int:
    with suppress(OSError), agent_socket.listen_on_socket(path) as listener:
        return agent_socket.spawn_agent(sys.executable, listener, run, service, says=True)
    return 0


def _become_service(words: Sequence[str], environ: Mapping[str, str], mask: set[signal.Signals | int]) -> None:
    try:
        os.setpgid(0, 0)
        with suppress(OSError):  # no terminal
            os.tcsetpgrp(0, os.getpgrp())
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execve(words[0], list(words), dict(environ))  # noqa: S606 - no shell wanted
    finally:
        os._exit(127)


def _supervise_service(service: int, agent: int, path: Path, run: str) -> tuple[int, int]:
    starts = 1
    while True:
        number = signal.sigwaitinfo(signal.valid_signals()).si_signo
        if number == signal.SIGCHLD:
            reaped = _reap_children()
            ended = [status for pid, status in reaped if pid == service]
            if agent in dict(reaped):
                agent, starts = 0 if ended or starts == AGENTS else _restart_agent(path, run, service), starts + 1
            for pid, status in reaped:  # the system reports it only to the parent
                with suppress(OSError), agent_socket.connect_to_agent(path, 0.1) as caller:
                    agent_socket.send(caller, {"ended": pid, "status": status})
            if ended:
                return ended[0], agent
        elif number not in _TERMINAL:
            with suppress(ProcessLookupError):
                os.kill(service, number)


def _reap_children() -> list[tuple[int, int]]:
    ended = []
    with suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(child)
    return ended


def _kill_all_but_agent(agent: int) -> None:
    """Kill all processes except the agent and its children, as the kernel does when a container's first process
    ends."""
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and int(path.name) not in (os.getpid(), agent):
            with suppress(OSError):
                if (path / "stat").read_text().rpartition(")")[2].split()[1] != str(agent):  # its children
                    os.kill(int(path.name), signal.SIGKILL)


def _await_agent_end(agent: int, until: float) -> None:
    while (left_s := until - time.monotonic()) > 0:
        if agent in [pid for pid, _ in _reap_children()]:
            return
        signal.sigtimedwait({signal.SIGCHLD}, min(left_s, 0.1))
