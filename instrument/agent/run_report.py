"""The report of a run: what all of its processes have recorded, as one, and one line on each of them.

It imports what reads recordings when it makes one: in a child of the agent, which itself does without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

LONGEST_BYTES = 100_000
"""Of a longer report the rest is left out: it goes over a socket in one piece."""

PROCESSES_TOLD = 12

NOTES_KEPT = 100
"""Of what processes that ended long ago could not observe and the like."""

LEFT_OUT = "spans of processes that ended long before the run"


class ReportedProcess(NamedTuple):
    """A process of the run, or several: what is said of it, and the recording that it has left ("": none)."""

    name: str
    path: str


def made(parts: Sequence[ReportedProcess], views: Sequence[str], options: Mapping[str, Any]) -> dict[str, str]:
    """The report as text. Raises `InstrumentError` where there is none to be made."""
    from instrument.errors import TraceError
    from instrument.report.summary import summary
    from instrument.report.view import Options, Recording
    from instrument.trace import file
    from instrument.trace.merge import merge

    read, lines = [], []
    for part in parts:
        what = part.name
        try:
            if part.path:
                read.append(file.load(part.path))
            else:
                what += ", which left no recording"
        except TraceError as problem:
            what += f", whose recording cannot be read: {problem!s:.200}"
        lines.append(what)
    if not read:
        raise TraceError("no process of the run has left a recording")
    text = summary(views, Recording.of_saved(merge(read).saved), Options.of(options))
    more = len(lines) - PROCESSES_TOLD
    told = [*lines[:PROCESSES_TOLD], *([f"and {more} more"] if more > 0 else [])]
    text += "\nProcesses:\n" + "".join(f"  {line}\n" for line in told)
    return {"report": text.encode()[:LONGEST_BYTES].decode(errors="ignore")}


def fold(paths: Sequence[str], into: str) -> dict[str, Any]:
    """Put several recordings into one that has their totals and none of their spans, and remove those beside it."""
    from dataclasses import replace

    import numpy as np

    from instrument.trace import file
    from instrument.trace.merge import merge

    read = [file.load(path) for path in paths]
    saved = merge(read).saved
    # As they were said: named by process they would be more with each fold, and the names before them too.
    notes = list(dict.fromkeys(note for one in read for note in one.facts.notes))[:NOTES_KEPT]
    left_out = len(saved.columns)
    losses = dict(saved.facts.losses)
    losses[LEFT_OUT] = losses.get(LEFT_OUT, 0) + left_out
    none = saved.columns.only(np.zeros(left_out, dtype=np.bool_))
    file.write(into, none, replace(saved.facts, losses=losses, notes=notes), saved.counted())
    for path in map(Path, paths):
        if path.parent == Path(into).parent:
            path.unlink()
    return {"path": into}
