"""Real servers under the presets that are made for them, and what their recordings say.

Each server is installed in a virtual environment of its own, `TEST_SERVERS`/NAME, which `.ci/servers` makes. It is run
twice, by itself and under `instrument run`, with the same requests; it is stopped as its own documentation says.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import server_programs
from server_programs import answers

from instrument.runtime import agent_socket
from instrument.trace import file
from instrument.trace.columns import Columns
from instrument.trace.joined import Joined, join_requests
from instrument.trace.ledger import list_turns

PRESETS = Path(__file__).parent.parent / "instrument" / "profile" / "presets"
VARIABLE = "TEST_SERVERS"
START_LIMIT_S = 400.0
REPORT_LIMIT_S = 240.0


def environment_of(server: str) -> Path:
    """The virtual environment that has a server; skips the test where there is none."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"{VARIABLE} names no folder of servers; `.ci/servers FOLDER {server}` makes one and tests it")
    found = Path(folder).absolute() / server
    if not (found / "bin" / "python").exists():
        pytest.skip(f"no {server} in {folder}; `.ci/servers {folder} {server}` installs it")
    return found


@dataclass(frozen=True)
class Answer:
    """A status and a body; of a stream its lines."""

    status: int
    body: bytes


def ask(port: int, path: str, body: object, headers: Mapping[str, str] = MappingProxyType({})) -> Answer:
    """Ask one, and read its answer up to the end."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **headers})
        answer = connection.getresponse()
        return Answer(answer.status, answer.read())


@dataclass(frozen=True)
class Served:
    """The output of a server under a profile, and the recordings of its processes as one."""

    folder: Path
    output: str

    @cached_property
    def trace(self) -> Columns:
        """The recordings of all processes, as `instrument merge` puts them together."""
        merged = self.folder / "merged.npz"
        command = [sys.executable, "-m", "instrument", "merge", str(self.folder / "traces"), "-o", str(merged)]
        subprocess.run(command, capture_output=True, timeout=240, check=True)
        return file.load(merged).trace.columns

    @cached_property
    def joined(self) -> Joined:
        return join_requests(self.trace)

    def lives(self) -> dict[str, Counter[str]]:
        """By its key what the time of each request went to; no key is that of two requests."""
        keys = [key for its in self.joined.keys.values() for key in its]
        assert len(keys) == len(set(keys))
        lives = {}
        for place, its in self.joined.keys.items():
            times = Counter[str]()
            for moment in list_turns(self.trace, self.joined, place):
                times[moment.part] += moment.end_ns - moment.start_ns
            lives |= dict.fromkeys(its, times)
        return lives

    def names_of(self, key: str) -> Counter[str]:
        """Return the spans of the request of a key by name, with the batches that served it."""
        (place,) = (place for place, its in self.joined.keys.items() if key in its)
        batches = np.unique(self.joined.served.batch[self.joined.served.request == place])
        own = np.setdiff1d(np.flatnonzero(self.joined.of == place), self.joined.served.batch)
        rows = [*batches.tolist(), *own.tolist()]
        return Counter(self.trace.sites[self.trace.site[row]].name for row in rows)

    def names(self) -> Counter[str]:
        """Return the spans by name."""
        return Counter(self.trace.sites[number].name for number in self.trace.site.tolist())

    def report(self, *words: str) -> str:
        """Return the report that `instrument report` prints of the recordings."""
        command = [sys.executable, "-m", "instrument", "report", str(self.folder / "traces"), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout

    def document(self, *words: str) -> dict[str, Any]:
        """The same as a document."""
        found: dict[str, Any] = json.loads(self.report(*words, "--json"))
        return found


def serve_twice(
    server: str,
    words: Sequence[str],
    folder: Path,
    ask_all: Callable[[int], list[Answer]],
    *,
    ready: str,
    stop: int = signal.SIGTERM,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> tuple[list[Answer], list[Answer], Served]:
    """The answers of a server by itself, those under its profile, and what came of it there.

    Words are those of `server_programs.serving`; a first word `bin/NAME` is a program of the server's environment.
    """
    environment = environment_of(server)
    words = [str(environment / words[0]) if words[0].startswith("bin/") else words[0], *words[1:]]
    shutil.copy(PRESETS / f"{server}.yaml", folder / "profile.yaml")
    found = []
    for ours in (False, True):
        with server_programs.serving(
            words,
            folder,
            environ,
            ours=ours,
            is_ready=answers(ready),
            stop=stop,
            python=str(environment / "bin" / "python"),
            start_limit_s=START_LIMIT_S,
        ) as (port, _):
            found.append(ask_all(port))
    output = with_report(folder / "log")
    await_agent(folder / "traces")
    return found[0], found[1], Served(folder, output)


def await_agent(traces: Path) -> None:
    """Wait until the agent is gone of the run that has saved these, with the run's folder: it has sent all by then."""
    until = time.monotonic() + REPORT_LIMIT_S
    while any(run.name in path.name for run in agent_socket.list_runs() for path in traces.iterdir()):
        assert time.monotonic() < until, "the agent goes on"
        time.sleep(0.1)


def with_report(log: Path) -> str:
    """The output of a server, once the run's agent has put its report there."""
    until = time.monotonic() + REPORT_LIMIT_S
    while not re.search(r"^Process(es)?:", output := log.read_text(), re.MULTILINE):
        assert time.monotonic() < until, output
        time.sleep(0.1)
    return output
