"""Server programs of tests, in processes of their own: without us and under `instrument run`."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from otlp_receiver import free_port

from instrument import chrome
from instrument.recording.spans import Span

SERVED = Path(__file__).parent / "served"
"""The folder of the apps."""

START_LIMIT_S, END_LIMIT_S = 240.0, 120.0


@dataclass
class Program:
    """The exit code and the output of a server program, once it has ended."""

    code: int | None = None
    output: str = ""


def answers(path: str) -> Callable[[int], bool]:
    """Return a function that returns True if the server at a port answers a path over HTTP with status 200."""

    def is_ready(port: int) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", path)
            return connection.getresponse().status == 200
        return False

    return is_ready


is_healthy = answers("/health")


@contextlib.contextmanager
def serving(
    command: Sequence[str],
    folder: Path,
    environ: Mapping[str, str],
    *,
    ours: bool,
    is_ready: Callable[[int], bool] = is_healthy,
    stop: int = signal.SIGTERM,
    python: str = sys.executable,
    start_limit_s: float = START_LIMIT_S,
) -> Iterator[tuple[int, Program]]:
    """Start a server program, yield its port and its outcome, and stop it. The processes that remain are killed.

    `{port}` is replaced by the port in the words of the command and of its environment. A first word that ends in `.py`
    is the name of an app. If `ours` is true, the folder has the profile.
    """
    port, program = free_port(), Program()
    words = [word.replace("{port}", str(port)) for word in command]
    if words[0].endswith(".py"):
        words[0] = str(SERVED / words[0])
    prefix = ["-m", "instrument", "run", "--profile", str(folder / "profile.yaml"), "--"] if ours else []
    own = {key: value for key, value in os.environ.items() if not key.startswith(("INSTRUMENT", "OTEL_"))}
    own |= {"PYTHONPATH": str(SERVED), "HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    own |= {name: value.replace("{port}", str(port)) for name, value in environ.items()}
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [python, *prefix, *words],
            cwd=folder,
            env=own,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + start_limit_s
        while not is_ready(port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        yield port, program
        process.send_signal(stop)
        program.code = process.wait(END_LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    program.output = log.read_text()


def requests_in(folder: Path) -> list[Span]:
    """The requests in the trace files of a folder, which have lost nothing."""
    found = []
    for path in sorted((folder / "traces").glob("*.json")):
        trace, _ = chrome.load(path)
        assert dict(trace.losses) == {}
        found += [span for span in trace.spans if span.site.kind == "request"]
    return found
