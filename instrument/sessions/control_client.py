"""Requests to running processes by their control sockets.

A connection carries one line of JSON each way, as `control` serves it.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from instrument.runtime.cheap_start import dataclass, late_pattern
from instrument.runtime.unpatched import Socket, poll

ANSWER_S = 0.2
"""Seconds that a process has to answer before it is reported as slow."""

WAIT_S = 5.0
"""Seconds that a caller waits for all answers."""

AGAIN_S = 0.05
"""Seconds before a process is asked again that hung up or had no room for another caller."""

Answer = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a caller: to read the profile at `path`, or the process's own file again (None).

    `service` limits it to processes of that service; `switch` allows another file than the process's own. With
    `records` it asks instead to record, or to stop recording until asked again.
    """

    path: str | None = None
    service: str | None = None
    switch: bool = False
    records: bool | None = None

    def line(self) -> bytes:
        """Return the request as a line of JSON for the socket."""
        return json.dumps(self.asked()).encode() + b"\n"

    def asked(self) -> dict[str, Any]:
        """Return the request as a JSON object."""
        if self.records is not None:
            return {"record": self.records}
        more = {name: value for name, value in (("service", self.service), ("switch", self.switch)) if value}
        return {"reload": self.path, **more}

    @classmethod
    def parsed(cls, line: bytes) -> Request | None:
        """Parse the request on a line; None where it is none."""
        try:
            call = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if isinstance(call, dict) and isinstance(call.get("record"), bool) and len(call) == 1:
            return cls(records=call["record"])
        if not isinstance(call, dict) or "reload" not in call or call.keys() - {"reload", "service", "switch"}:
            return None
        path, service, switch = call["reload"], call.get("service"), call.get("switch", False)
        if not isinstance(path, str | None) or not isinstance(service, str | None) or not isinstance(switch, bool):
            return None
        return cls(path, service, switch)


_SOCKET_NAME = late_pattern(r"[0-9]+\.sock")


def folder_of(setting: str, base: Path) -> Path:
    """Return the folder that `control.socket` names: `auto` is the user's own, other paths start at `base`."""
    return Path(f"/tmp/instrument-{os.geteuid()}") if setting == "auto" else base / setting  # noqa: S108 - 0700, checked


def poll_selector() -> selectors.BaseSelector:
    """Return a selector that uses poll(2). A forked child would share the registrations of epoll with its parent."""

    class Selector(selectors.PollSelector):
        _selector_cls = staticmethod(poll)

    return Selector()


def sockets(folder: Path) -> list[Path]:
    """Return the sockets in a folder by process id, of processes that run or have gone; [] where there is no folder."""
    try:
        paths = [path for path in folder.iterdir() if _SOCKET_NAME.fullmatch(path.name)]
    except OSError:
        return []
    return sorted(paths, key=lambda path: int(path.stem))


def remove_stale(paths: Iterable[Path]) -> list[Path]:
    """Remove the sockets that nobody listens on any more; returns the others."""
    alive = []
    for path in paths:
        with Socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.setblocking(False)
            try:
                caller.connect(os.fspath(path))
            except BlockingIOError:
                pass  # its queue is full
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
                continue
            except OSError:
                continue
        alive.append(path)
    return alive


def tell(
    paths: Iterable[Path],
    request: Request,
    timeout_s: float = WAIT_S,
    slow: Callable[[Sequence[Path]], object] = lambda paths: None,
) -> dict[Path, Answer | None]:
    """Send a request to every process behind these sockets at once. An answer is None where none comes in time.

    A process that hangs up without an answer is asked again within the time. `slow(paths)` is called once, after
    `ANSWER_S`, with the sockets that have not answered. A socket without a listener is removed, and is not in the
    result.
    """
    line = request.line()
    answers: dict[Path, Answer | None] = dict.fromkeys(paths)
    start = time.monotonic()
    to_ask = dict.fromkeys(answers, start)
    waiting: dict[Path, tuple[Socket, bytearray]] = {}
    is_reported = False
    with poll_selector() as selector:
        while (to_ask or waiting) and (now := time.monotonic()) < start + timeout_s:
            if not is_reported and now >= start + ANSWER_S:
                is_reported = True
                slow([*to_ask, *waiting])
            for path in [path for path, at in to_ask.items() if at <= now]:
                del to_ask[path]
                try:
                    connection = _call(path, line)
                except (ConnectionRefusedError, FileNotFoundError):
                    path.unlink(missing_ok=True)
                    del answers[path]
                except OSError:  # such as a queue that is full
                    to_ask[path] = now + AGAIN_S
                else:
                    waiting[path] = connection, bytearray()
                    selector.register(connection, selectors.EVENT_READ, path)
            until = min([start + timeout_s, *to_ask.values(), *([] if is_reported else [start + ANSWER_S])])
            for key, _ in selector.select(max(until - time.monotonic(), 0.0)):
                path, (connection, received) = key.data, waiting[key.data]
                try:
                    data = connection.recv(65_536)
                except OSError:
                    data = b""
                received += data
                if not data:
                    answers[path] = _parsed(received)
                    selector.unregister(connection)
                    connection.close()
                    del waiting[path]
                    if answers[path] is None:
                        to_ask[path] = time.monotonic() + AGAIN_S
        for connection, _ in waiting.values():
            connection.close()
    return answers


def _call(path: Path, request: bytes) -> Socket:
    connection = Socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.connect(os.fspath(path))
        connection.send(request)
    except BaseException:
        connection.close()
        raise
    return connection


def _parsed(text: bytes | bytearray) -> Answer | None:
    try:
        answer = json.loads(text)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None
