"""Saves the recording of an ended process as a file (a capture), with its open spans and the cause of the end.

Only commands and child processes of the agent save captures. The agent itself never imports the code that reads
recordings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from instrument.agent.causes_of_end import LAST_GAUGES, describe_death, describe_last_gauges

if TYPE_CHECKING:
    from instrument.recording.tally import Tally
    from instrument.trace.trace import Trace

RECORDING = ".npz"


def save_recording(
    fd: int,
    path: str,
    *,
    end_kind: str = "",
    end_ns: int | None = None,
    goodbye: Mapping[str, Any] | None = None,
    copies: Sequence[str] = (),
) -> Mapping[str, Any]:
    """Save a recording as a file, and return a summary. Raises `TraceError` for an invalid recording.

    - `fd`: a descriptor of the recording
    - `end_kind`: a phrase that says how the process died. If it is given, the file and the summary name the open spans
    - `end_ns`: the time at which the process ended, or None if it is unknown
    - `goodbye`: the last message of the process, with its losses and the cost of recording
    - `copies`: paths to which copies are written. The summary has the paths of the written copies
    """
    from dataclasses import replace

    from instrument.recording.mapped import Mapped
    from instrument.trace import file
    from instrument.trace.of_recording import read_spans_and_tally

    with closing(Mapped(fd)) as mapped:
        saved = read_spans_and_tally(mapped, end_ns=end_ns)
        facts, died, least = saved.trace, "", "at least " if end_ns is None else ""
        if end_kind:
            died = describe_death(mapped.open_spans(), saved.trace.end_ns, end_kind, least)
            gauges = describe_last_gauges(facts.samples, facts.end_ns)
            facts = replace(facts, died=f"Process {facts.origin.pid} {died}.{gauges}")
        facts = _add_goodbye(facts, goodbye or {})
        file.dump(path, facts, saved.tally)
        written = [copy for copy in copies if _write_copy(copy, facts, saved.tally)]
    return {"path": path, "died": died, "spans": len(saved.trace.columns), "copies": written}


def _write_copy(path: str, trace: Trace, tally: Tally | None) -> bool:
    from instrument.chrome import writing
    from instrument.errors import TraceError
    from instrument.trace import file

    try:
        (file if path.endswith(RECORDING) else writing).dump(path, trace, tally)
    except TraceError:
        return False
    return True


def load_capture(path: str, run: str) -> Mapping[str, Any] | None:
    """Read a capture, and return the summary that `save_recording` returned for it. Return None if the file is no
    capture of the run."""
    from instrument.errors import TraceError
    from instrument.trace import file

    try:
        saved = file.load(path)
    except TraceError:
        return None
    if not saved.trace.died or saved.trace.origin.run not in ("", run):
        return None
    died = saved.trace.died.removeprefix(f"Process {saved.trace.origin.pid} ").rpartition(LAST_GAUGES)
    return {"path": path, "died": (died[0] or died[2]).removesuffix("."), "spans": len(saved.trace.columns)}


def _add_goodbye(facts: Trace, goodbye: Mapping[str, Any]) -> Trace:
    from dataclasses import replace

    from instrument.errors import TraceError
    from instrument.recording.spans import Cost
    from instrument.trace.metadata import read_own_notes

    if not goodbye:
        return facts
    try:
        cost = Cost(**goodbye["cost"])
        notes, own_notes = tuple(map(str, goodbye["notes"])), read_own_notes(goodbye.get("own_notes", {}))
        return replace(facts, cost=cost, losses=dict(goodbye["losses"]), notes=notes, own_notes=own_notes)
    except (KeyError, TypeError, ValueError) as problem:
        raise TraceError(f"a process ended with a message of another version: {problem}") from problem
