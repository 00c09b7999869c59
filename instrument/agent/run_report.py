"""The report of a run: what all of its processes have recorded, as one, and one line on each of them.

It imports what reads recordings when it makes one: in a child of the agent, which itself does without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

LONGEST_BYTES = 100_000
"""Bytes of a report, at most: it goes over a socket in one piece."""

CUT = "\n\n(The rest is left out here; `instrument report FILE...` has all of what processes have saved.)\n"

PROCESSES_TOLD = 12


class ReportedProcess(NamedTuple):
    """A process of the run, or so many: what is said of it, and the recording that it has left ("": none).

    One that `is_notable` ended as none should; one that `has_told` of itself had ended before the others came.
    """

    name: str
    path: str
    is_notable: bool = False
    processes: int = 1
    has_told: bool = False


def made(parts: Sequence[ReportedProcess], views: Sequence[str], options: Mapping[str, Any]) -> dict[str, str]:
    """The report as text. Raises `InstrumentError` where there is none to be made."""
    from instrument.errors import TraceError
    from instrument.report.summary import summary
    from instrument.report.view import Options, Recording
    from instrument.trace import file
    from instrument.trace.merge import merge

    read, lines = [], []
    for part in parts:
        what = part.name if part.processes == 1 else f"{part.processes} {part.name}"
        try:
            if part.path:
                read.append(file.load(part.path))
            else:
                what += ", which printed a report of its own" if part.has_told else ", which left no recording"
        except TraceError as problem:
            what += f", whose recording cannot be read: {problem!s:.200}"
        lines.append(what)
    if not read:
        raise TraceError("no process of the run has left a recording")
    text = summary(views, Recording.of_saved(merge(read).saved), Options.of(options))
    if len(text.encode()) > LONGEST_BYTES:
        text = text.encode()[:LONGEST_BYTES].decode(errors="ignore").rpartition("\n")[0] + CUT
    told = sorted(sorted(range(len(parts)), key=lambda place: not parts[place].is_notable)[:PROCESSES_TOLD])
    more = len(parts) - len(told)
    text += f"\nProcesses: {sum(part.processes for part in parts)}\n"
    text += "".join(f"  {lines[place]}\n" for place in told)
    return {"report": text + (f"  and {more} more\n" if more else "")}


def fold(paths: Sequence[str], into: str) -> dict[str, Any]:
    """Put several recordings into one that grows no further, and remove those beside it: where, and how many of them
    could not be read.
    """
    from instrument.errors import TraceError
    from instrument.trace import file
    from instrument.trace.merge import folded

    read, unread = [], 0
    for path in paths:
        try:
            read.append(file.load(path))
        except TraceError:
            unread += 1
    if not read:
        raise TraceError(f"none of {len(paths)} recordings can be read")
    saved = folded(read)
    file.dump(into, saved.trace, saved.counted())
    for read_path in map(Path, paths):
        if read_path.parent == Path(into).parent:
            read_path.unlink()
    return {"path": into, "unread": unread}
