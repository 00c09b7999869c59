"""The agent's search for processes and requests of a run that are not recorded.

Python processes without a session are searched for among the descendants of the run's first process. A port with
connections is reported if its process has recorded no request.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from instrument.agent.loop import EventLoop
from instrument.agent.processes import Process
from instrument.runtime import agent_socket, environment
from instrument.runtime.environment import PROC
from instrument.runtime.lazy_imports import dataclass

LOOK_S = 1.0
"""Seconds between two searches for processes without a session. A process that ends earlier may be missed."""

_INTERPRETER = re.compile(r"(?:python|pypy)[\d.]*t?")
_OPTIONS = re.compile(rb"-([A-Za-z]*?)([WXmc]|$)(.*)")
_AUTOSTART = b"/instrument/sessions/autostart"
"""The end of the PYTHONPATH entry with our `sitecustomize`. The beginning depends on the installation."""
_ENTRY = os.fsencode(Path(__file__).with_name("entry.py"))
_OFF = (b"off", b"0", b"false", b"no")


@dataclass(eq=False)
class Unseen:
    """A search for the Python processes of a run that record nothing, because they have no session.

    - `_first`: the process id of the run's first process. If it is 0, there is no search
    - `_joined`: returns the ids of the processes that have joined
    """

    _loop: EventLoop
    _socket: Path
    _first: int
    _joined: Callable[[], Collection[int]]

    def __post_init__(self) -> None:
        self._notes = Path(f"{self._socket}{agent_socket.UNSEEN_SUFFIX}")
        self._is_reported = not self._first
        self._known: set[int] = set()
        self._family: dict[int, tuple[bytes, str]] = {self._first: (b"", "")}
        """The last known command of each living process of the run, and the reason why it has no session."""
        self._gone: Counter[str] = Counter()
        if self._first:
            with suppress(OSError):
                self._notes.touch(0o600)
            self._search_repeatedly()

    def _search_repeatedly(self) -> None:
        if not self._is_reported:
            self._loop.call_later(LOOK_S, self._search_repeatedly)
            self._search_processes()

    def _search_processes(self) -> None:
        """Update the list of processes. Store the reason if a new process or a new command has no session."""
        with suppress(OSError):
            living = {int(name) for name in os.listdir(PROC) if name.isdecimal()}  # noqa: PTH208 - only the names
            for pid in self._family.keys() - living:
                self._gone[self._family.pop(pid)[1]] += 1
            parent_by_pid = {
                pid: parent for pid in living - self._known if (parent := environment.read_parent_pid(pid))
            }
            self._known = living
            while below := [pid for pid, parent in parent_by_pid.items() if parent in self._family]:
                self._family.update(dict.fromkeys(below, (b"", "")))
                for pid in below:
                    del parent_by_pid[pid]
        joined = self._joined()
        for pid, (command, _) in list(self._family.items()):
            with suppress(OSError):
                now = (PROC / str(pid) / "cmdline").read_bytes()
                if now and now != command:
                    why = "" if pid in joined else self._explain_missing_session(PROC / str(pid), now.split(b"\0"))
                    self._family[pid] = now, why

    def _explain_missing_session(self, process: Path, words: list[bytes]) -> str:
        if not _INTERPRETER.fullmatch((process / "exe").readlink().name) or _ENTRY in words:
            return ""
        options = iter(words[1:])
        for word in options:
            option = _OPTIONS.fullmatch(word)
            if option is None:
                break
            letters, last, value = option.groups()
            if isolating := set(letters) & set(b"IES"):
                return f"-{chr(min(isolating))}"
            if last in (b"m", b"c"):
                break
            if last and not value:
                next(options, None)  # the value of -W or -X
        environ = dict(line.partition(b"=")[::2] for line in (process / "environ").read_bytes().split(b"\0"))
        agent, paths = environ.get(os.fsencode(agent_socket.VARIABLE)), environ.get(b"PYTHONPATH", b"").split(b":")
        is_off = environ.get(b"INSTRUMENT", b"").strip().lower() in _OFF
        has_ours = agent is not None and any(path.endswith(_AUTOSTART) for path in paths)
        return "" if has_ours or is_off else "its own environment"

    def describe_unseen(self, *, for_report: bool = False) -> str:
        """Return a sentence that counts the processes without a session by reason, or an empty string.

        After a call with `for_report`, the sentence is in the report, and further calls return an empty string.
        """
        if self._is_reported:
            return ""
        self._is_reported = for_report
        self._search_processes()
        counts = self._gone + Counter(why for _, why in self._family.values())
        with suppress(OSError, UnicodeDecodeError):
            noted = dict(line.split(" ", 1) for line in self._notes.read_text("utf-8").splitlines() if " " in line)
            counts.update(noted.values())
        del counts[""]
        if not counts:
            return ""
        reasons = "; ".join(f"{why} ({count})" if count > 1 else why for why, count in sorted(counts.items()))
        many = f"{counts.total()} Python processes of this run were" if counts.total() > 1 else "1 Python process was"
        return f"{many} not seen: {reasons}"


FIRST_CHECK_S, LONGEST_PAUSE_S = 0.5, 60.0
"""Seconds before the first check of a process's connections, and the longest pause between two checks."""

AGE_DIVISOR, COST_FACTOR = 4, 100
"""The pause between two checks of a process is a fourth of the process's age plus 100 times the duration of the last
check."""


@dataclass(eq=False)
class ConnectionWatch:
    """A repeated check for processes that get connections but record no requests.

    - `_send`: sends a message to a process
    - `_living`: returns the living processes
    """

    _loop: EventLoop
    _send: Callable[[Process, Mapping[str, Any]], None]
    _living: Callable[[], Iterable[Process]]

    def watch_process(self, process: Process) -> None:
        if not process.is_elsewhere and process.facts.get("asks_for_requests", True):
            self._loop.call_later(FIRST_CHECK_S, lambda: self._check_ports(process))

    def _check_ports(self, process: Process) -> None:
        if not process.lives or process.has_requests:
            return
        began = time.thread_time()
        before = process.ports
        self.update_ports(process)
        if process.ports != before:
            self._send(process, {"connections": sorted(process.ports)})
        age_s = (time.monotonic_ns() - process.joined_ns) / 1e9
        wait_s = min(max(age_s / AGE_DIVISOR, FIRST_CHECK_S), LONGEST_PAUSE_S) + COST_FACTOR * (
            time.thread_time() - began
        )
        self._loop.call_later(wait_s, lambda: self._check_ports(process))

    def update_ports(self, process: Process) -> None:
        """Store the ports at which a process has had connections, including ports that it has closed."""
        folder = PROC / str(process.pid)
        process.shares_network = process.shares_network or environment.is_in_same_network(folder)
        table = environment.read_tcp_rows(PROC / "self") if process.shares_network else None
        connections = environment.list_connections(folder, process.listened, table, process.started)
        process.listened |= connections.listens
        process.ports |= connections.open
        if not connections.closed <= process.ports and self._owns_sockets_alone(process, connections):
            process.ports |= connections.closed

    def _owns_sockets_alone(self, process: Process, connections: environment.Connections) -> bool:
        """Return True if no other process of the run listens at the same sockets. Workers of a server share sockets."""
        other_processes = (other_process for other_process in self._living() if other_process.pid != process.pid)
        return not any(
            connections.sockets & environment.list_socket_inodes(PROC / str(other_process.pid))
            for other_process in other_processes
            if other_process.run is process.run
        )
