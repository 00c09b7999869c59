"""Files: where a process puts its traces and reports, within the disk that the profile allows, and standard streams.

Workers of one service share its profile and so its paths: none writes over what another has written.
"""

from __future__ import annotations

import glob
import os
import re
import select
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from instrument import chrome
from instrument.unpatched import poll

_NUMBERED = re.compile(r"\{(?:pid|window)\}")


def own(template: str, *, is_first: bool) -> str:
    """The template of a path; with the process's number in it, but for the first process of the service."""
    if "{pid}" in template or is_first:
        return template
    folder, name = os.path.split(template)
    stem, dot, suffix = name.partition(".")
    return os.path.join(folder, f"{stem}-{{pid}}{dot}{suffix}")  # noqa: PTH118 - keeps an empty folder empty


def path_of(template: str, folder: Path, service: str, window: int) -> Path:
    """The file that a template means, below the folder in which the session began."""
    name = chrome.file_name(template, service=service, pid=os.getpid(), window=window)
    return Path(name) if folder == working_folder() else folder / name


def make_room(template: str, folder: Path, service: str, newest: Path, disk_bytes: int) -> int:
    """Remove the oldest files of a template, of whichever process, until all keep within `disk_bytes`: how many."""
    parts = [chrome.file_name(part, service=service, pid=0, window=0) for part in _NUMBERED.split(template)]
    parts[0] = os.path.join(folder, parts[0])  # noqa: PTH118 - keeps the slash where nothing follows it
    numbered = re.compile(r"\d+".join(map(re.escape, parts)))
    newest = folder / newest
    files = []
    for name in glob.glob("*".join(map(glob.escape, parts))):  # noqa: PTH207 - absolute
        try:
            facts = os.stat(name)  # noqa: PTH116
        except OSError:
            continue  # another process has just removed it
        if numbered.fullmatch(name) and Path(name) != newest:
            files.append((facts.st_mtime_ns, name, facts.st_size))
    room = disk_bytes - newest.stat().st_size - sum(size for _, _, size in files)
    removed = 0
    for _, name, size in sorted(files):
        if room >= 0:
            break
        Path(name).unlink(missing_ok=True)
        room += size
        removed += 1
    return removed


def write(stream: TextIO, text: str, limit_ns: int) -> None:
    """Write to a standard stream, but do not wait for ever for a reader who has stopped reading (a full pipe).

    Raises `TimeoutError` after `limit_ns`.
    """
    if stream not in (sys.__stdout__, sys.__stderr__):
        stream.write(text)  # the host's own
        stream.flush()
        return
    stream.flush()
    writable = poll()
    writable.register(stream.fileno(), select.POLLOUT)
    end_ns = time.monotonic_ns() + limit_ns
    data = text.encode(stream.encoding, "backslashreplace")
    while data:
        if not writable.poll(max(end_ns - time.monotonic_ns(), 0) / 1e6):
            raise TimeoutError("nobody reads it")
        try:
            data = data[os.write(stream.fileno(), data[: select.PIPE_BUF]) :]
        except BlockingIOError:
            pass  # shared with somebody who was faster


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process of a service puts what it leaves behind: below the folder in which its session began.

    Files of the first process need no number of the process in their names.
    """

    folder: Path
    service: str
    is_first: bool

    def path(self, template: str, window: int = 0) -> Path:
        """The file that a template means here."""
        return path_of(own(template, is_first=self.is_first), self.folder, self.service, window)

    def make_room(self, template: str, newest: Path, disk_bytes: int) -> int:
        """Remove the oldest files of a template until all keep within `disk_bytes`: how many."""
        return make_room(own(template, is_first=self.is_first), self.folder, self.service, newest, disk_bytes)

    def tell(self, to: str, text: str, limit_ns: int) -> None:
        """Write a text to `stderr`, `stdout` or a file. Raises `OSError` and `ValueError`; waits `limit_ns` at most."""
        if to in ("stderr", "stdout"):
            stream = sys.stderr if to == "stderr" else sys.stdout
            if stream is not None:
                write(stream, text, limit_ns)
            return
        path = self.path(to)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def working_folder() -> Path:
    """The working directory, "/" where it has been removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path("/")
