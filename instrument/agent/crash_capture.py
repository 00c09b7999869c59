"""Captures: what the recording of a process holds, saved as a file, with how and within what the process ended.

It imports what reads recordings when it is asked: in a child of the agent, which itself does without, or in a command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instrument.recording.mapped_facts import OpenSpan
    from instrument.recording.spans import Trace

REQUESTS_TOLD = 5
"""The most requests that were open which the sentence names; the file has all of them."""


def capture(
    fd: int,
    path: str,
    *,
    how: str = "",
    since_ns: int = 0,
    end_ns: int | None = None,
    said: Mapping[str, Any] | None = None,
) -> Mapping[str, Any]:
    """Save what a recording in memory holds, that which ended before `since_ns` left out.

    Where `how` is given its process has gone, in that way, at `end_ns` as far as is known; what was open then is told
    in the file and in the answer, under `died`. What it `said` of costs and losses as it left is told, too.
    Raises `TraceError` for what is no sound recording.
    """
    from dataclasses import replace

    from instrument.recording.mapped import Mapped
    from instrument.trace import file
    from instrument.trace.of_memory import saved_of

    mapped = Mapped(fd)
    try:
        saved = saved_of(mapped, since_ns, end_ns)
        facts, died = saved.facts, ""
        if how:
            died = death_of(mapped.open_spans(), saved.facts.end_ns, how)
            facts = replace(facts, died=f"Process {facts.origin.pid} {died}.")
        file.write(path, saved.columns, _with(facts, said or {}), saved.tally)
    finally:
        mapped.close()
    return {"path": path, "died": died, "spans": len(saved.columns)}


def _with(facts: Trace, said: Mapping[str, Any]) -> Trace:
    """What a trace knows, with what its process said of it. Raises `TraceError` for what is not as it should be."""
    from dataclasses import replace

    from instrument.errors import TraceError
    from instrument.recording.spans import Cost

    if not said:
        return facts
    try:
        cost = Cost(**said["cost"])
        return replace(facts, cost=cost, losses=dict(said["losses"]), notes=tuple(map(str, said["notes"])))
    except (KeyError, TypeError, ValueError) as problem:
        raise TraceError(f"a process said goodbye in words of another version: {problem}") from problem


def death_of(open_spans: Sequence[OpenSpan], end_ns: int, how: str) -> str:
    """How a process ended and in the middle of what: the spans that had not ended, by request, the newest first."""
    by_root: dict[int, list[OpenSpan]] = {}
    for span in open_spans:
        by_root.setdefault(span.root_id, []).append(span)
    if not by_root:
        return f"{how}; no span was open"
    first, *others = sorted(by_root.values(), key=lambda its: -its[-1].start_ns)
    told = [_in_short(its, end_ns) for its in others[:REQUESTS_TOLD]]
    more = len(others) - REQUESTS_TOLD
    told += [f"{more} more"] if more > 0 else []
    also = f"; {len(others)} more {'was' if len(others) == 1 else 'were'} open: {', '.join(told)}" if told else ""
    return f"{how}: it died in {_within(first, end_ns)}{also}"


def _ends(spans: Sequence[OpenSpan]) -> tuple[OpenSpan, OpenSpan]:
    """The outermost and the innermost span of those of a tree that are open."""
    return min(spans, key=lambda span: span.start_ns), max(spans, key=lambda span: span.start_ns)


def _within(spans: Sequence[OpenSpan], end_ns: int) -> str:
    first, last = _ends(spans)
    kind = "request " if first.site.kind == "request" else ""
    inner = "" if last is first else f"`{last.site.name}` of "
    return f"{inner}{kind}`{first.site.name}`, {_length(end_ns - first.start_ns)} after it began"


def _in_short(spans: Sequence[OpenSpan], end_ns: int) -> str:
    first, last = _ends(spans)
    inner = "" if last is first else f", in `{last.site.name}`"
    return f"`{first.site.name}` ({_length(end_ns - first.start_ns)}{inner})"


def _length(time_ns: int) -> str:
    for unit, ns in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if time_ns >= ns:
            return f"{time_ns / ns:.3g} {unit}"
    return f"{max(time_ns, 0)} ns"
