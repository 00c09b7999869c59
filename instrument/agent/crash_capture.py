"""Saves the recording of an ended process as a file (a capture), with its open spans and the cause of the end.

Only commands and child processes of the agent save captures. The agent itself never imports the code that reads
recordings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from instrument.recording.metrics import GAUGES
from instrument.recording.spans import HOST
from instrument.recording.trace_context import REMOTE

if TYPE_CHECKING:
    from instrument.recording.mapped_facts import OpenSpan
    from instrument.recording.spans import Sample
    from instrument.recording.tally import Tally
    from instrument.trace.trace import Trace

RECORDING = ".npz"

LAST_GAUGES = " Its last gauges, "

MOST_OPEN_REQUESTS = 5
"""The maximum number of open requests in the message on a dead process. The capture has all open requests."""
MOST_ATTRIBUTES, VALUE_LENGTH = 4, 60
"""The maximum number of attributes per span, and of characters per value, in the message on a dead process."""
TRANSPORT_PREFIXES = ("http.", "url.", "server.", "client.", "network.", "user_agent.", "rpc.")
"""The prefixes of attributes that the message on a dead process omits. The capture has all attributes."""
NAMED_GAUGES = ("process_cpu", "process_memory", "system_cpu", "utilization", "memory_used", "memory_total")
"""The gauges with a last reading in the message on a dead process. The capture has all gauges."""


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
        facts = _with_goodbye(facts, goodbye or {})
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


def _with_goodbye(facts: Trace, goodbye: Mapping[str, Any]) -> Trace:
    from dataclasses import replace

    from instrument.errors import TraceError
    from instrument.recording.spans import Cost
    from instrument.trace.metadata import own_notes_of

    if not goodbye:
        return facts
    try:
        cost = Cost(**goodbye["cost"])
        notes, own_notes = tuple(map(str, goodbye["notes"])), own_notes_of(goodbye.get("own_notes", {}))
        return replace(facts, cost=cost, losses=dict(goodbye["losses"]), notes=notes, own_notes=own_notes)
    except (KeyError, TypeError, ValueError) as problem:
        raise TraceError(f"a process ended with a message of another version: {problem}") from problem


def describe_last_gauges(samples: Sequence[Sample], end_ns: int) -> str:
    newest = {(sample.device, sample.name): sample for sample in samples if sample.value is not None}
    texts: dict[int, list[str]] = {}
    for (device, name), sample in newest.items():
        if name in NAMED_GAUGES and sample.value is not None:
            unit = GAUGES[name].unit
            value = f"{sample.value / 1e9:.3g} GB" if unit == "bytes" else f"{sample.value:.3g} {unit}"
            texts.setdefault(device, []).append(f"{name} {value}")
    if not texts:
        return ""
    age_ns = end_ns - max(sample.at_ns for sample in newest.values())
    names = {device: "" if device == HOST else f"device {device}: " for device in texts}
    text = "; ".join(f"{names[device]}{', '.join(sorted(texts[device]))}" for device in sorted(texts))
    return f"{LAST_GAUGES}{_format_duration(age_ns)} before: {text}."


def describe_death(open_spans: Sequence[OpenSpan], end_ns: int, end_kind: str, least: str = "") -> str:
    """Return a sentence that says how a process died, and which requests and spans were open, the newest first.

    `least` is a prefix for the ages of the spans. It is "at least " if the process may have ended long after `end_ns`.
    """
    by_root: dict[int, list[OpenSpan]] = {}
    for span in open_spans:
        by_root.setdefault(span.root_id, []).append(span)
    if not by_root:
        return f"{end_kind}; no span was open"
    first, *requests = sorted(by_root.values(), key=lambda spans: -spans[-1].start_ns)
    names = [_describe_shortly(spans, end_ns, least) for spans in requests[:MOST_OPEN_REQUESTS]]
    more = len(requests) - MOST_OPEN_REQUESTS
    names += [f"{more} more"] if more > 0 else []
    also = f"; {len(requests)} more {'was' if len(requests) == 1 else 'were'} open: {', '.join(names)}" if names else ""
    return f"{end_kind}: it died in {_describe_tree(first, end_ns, least)}{also}"


def _find_outermost_and_innermost(spans: Sequence[OpenSpan]) -> tuple[OpenSpan, OpenSpan]:
    return min(spans, key=lambda span: span.start_ns), max(spans, key=lambda span: span.start_ns)


def _describe_tree(spans: Sequence[OpenSpan], end_ns: int, least: str) -> str:
    first, last = _find_outermost_and_innermost(spans)
    kind = "request " if first.site.kind == "request" else ""
    inner = "" if last is first else f"`{last.site.name}`{attributes_text(last)} of "
    age = f"{least}{_format_duration(end_ns - first.start_ns)}"
    return f"{inner}{kind}`{first.site.name}`{attributes_text(first)}, {age} after it began"


def attributes_text(span: OpenSpan) -> str:
    """Return the first attributes of a span in brackets, without attributes of the transport, such as `http.method`."""
    names = [name for name in span.attributes if name != REMOTE and not name.startswith(TRANSPORT_PREFIXES)]
    texts = [f"{name}={span.attributes[name]!s:.{VALUE_LENGTH}}" for name in names]
    more = [f"{len(texts) - MOST_ATTRIBUTES} more"] if len(texts) > MOST_ATTRIBUTES else []
    return f" ({', '.join([*texts[:MOST_ATTRIBUTES], *more])})" if texts else ""


def _describe_shortly(spans: Sequence[OpenSpan], end_ns: int, least: str) -> str:
    first, last = _find_outermost_and_innermost(spans)
    inner = "" if last is first else f", in `{last.site.name}`"
    return f"`{first.site.name}` ({least}{_format_duration(end_ns - first.start_ns)}{inner})"


def _format_duration(time_ns: int) -> str:
    for unit, ns in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if time_ns >= ns:
            return f"{time_ns / ns:.3g} {unit}"
    return f"{max(time_ns, 0)} ns"
