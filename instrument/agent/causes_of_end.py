"""Describes how a process ended, in the words of the agent's messages, reports and captures.

A description has the exit status, or says that the system killed the process for lack of memory. It also has the open
spans and the last gauges.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from instrument.agent.processes import EXITED, GOODBYE, REPLACED, VANISHED, Process
from instrument.recording.metric_definitions import GAUGES
from instrument.recording.spans import HOST
from instrument.recording.trace_context import REMOTE
from instrument.runtime import environment

if TYPE_CHECKING:
    from instrument.recording.mapped_facts import OpenSpan
    from instrument.recording.spans import Sample

LAST_GAUGES = " Its last gauges, "

MOST_OPEN_REQUESTS = 5
"""The maximum number of open requests in the message on a dead process. The capture has all open requests."""
MOST_ATTRIBUTES, VALUE_LENGTH = 4, 60
"""The maximum number of attributes per span, and of characters per value, in the message on a dead process."""
TRANSPORT_PREFIXES = ("http.", "url.", "server.", "client.", "network.", "user_agent.", "rpc.")
"""The prefixes of attributes that the message on a dead process omits. The capture has all attributes."""
NAMED_GAUGES = ("process_cpu", "process_memory", "system_cpu", "utilization", "memory_used", "memory_total")
"""The gauges whose last readings are in the message on a dead process."""


def find_memory_events(pid: int) -> Path | None:
    """Return the path of `memory.events` of a process's control group. This file counts kills for lack of memory."""
    groups = [group for controller, group in environment.control_groups(pid) if not controller] if pid else []
    return next((path for group in groups[:1] if (path := group / "memory.events").is_file()), None)


def read_oom_kills(events: Path | None) -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in events.read_text().splitlines() if events is not None else ():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def describe_vanishing(process: Process) -> str:
    if read_oom_kills(process.memory_events) > process.oom_kills and process.status in (None, signal.SIGKILL):
        return "ended without a goodbye (killed by the OOM killer, as its control group reports)"
    return f"ended without a goodbye{_describe_status(process.status)}"


def describe_end(process: Process) -> str:
    words = {GOODBYE: "in order", EXITED: "in order", REPLACED: "became another program", VANISHED: "without a goodbye"}
    return f"{words.get(process.end_kind, 'runs')}{_describe_status(process.status)}"


def _describe_status(status: int | None) -> str:
    if status is None:
        return ""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f" (exit code {code})"
    with suppress(ValueError):
        return f" ({signal.Signals(-code).name})"
    return f" (signal {-code})"


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
    """Return a sentence on the death of a process and on the open requests and spans. The newest are first.

    `least` is a prefix for the ages of the spans. The prefix is "at least " if the process may have ended long after
    `end_ns`.
    """
    by_root: dict[int, list[OpenSpan]] = {}
    for span in open_spans:
        by_root.setdefault(span.root_id, []).append(span)
    if not by_root:
        return f"{end_kind}; no span was open"
    first, *requests = sorted(by_root.values(), key=lambda spans: -spans[-1].start_ns)
    names = [_summarize_open_spans(spans, end_ns, least) for spans in requests[:MOST_OPEN_REQUESTS]]
    more = len(requests) - MOST_OPEN_REQUESTS
    names += [f"{more} more"] if more > 0 else []
    also = f"; {len(requests)} more {'was' if len(requests) == 1 else 'were'} open: {', '.join(names)}" if names else ""
    return f"{end_kind}: it died in {_describe_open_spans(first, end_ns, least)}{also}"


def _find_outermost_and_innermost(spans: Sequence[OpenSpan]) -> tuple[OpenSpan, OpenSpan]:
    return min(spans, key=lambda span: span.start_ns), max(spans, key=lambda span: span.start_ns)


def _describe_open_spans(spans: Sequence[OpenSpan], end_ns: int, least: str) -> str:
    first, last = _find_outermost_and_innermost(spans)
    kind = "request " if first.site.kind == "request" else ""
    inner = "" if last is first else f"`{last.site.name}`{attributes_text(last)} of "
    age = f"{least}{_format_duration(end_ns - first.start_ns)}"
    return f"{inner}{kind}`{first.site.name}`{attributes_text(first)}, {age} after it began"


def attributes_text(span: OpenSpan) -> str:
    """Return the first attributes of a span as text in brackets. Attributes of the transport, such as `http.method`,
    are left out."""
    names = [name for name in span.attributes if name != REMOTE and not name.startswith(TRANSPORT_PREFIXES)]
    texts = [f"{name}={span.attributes[name]!s:.{VALUE_LENGTH}}" for name in names]
    more = [f"{len(texts) - MOST_ATTRIBUTES} more"] if len(texts) > MOST_ATTRIBUTES else []
    return f" ({', '.join([*texts[:MOST_ATTRIBUTES], *more])})" if texts else ""


def _summarize_open_spans(spans: Sequence[OpenSpan], end_ns: int, least: str) -> str:
    first, last = _find_outermost_and_innermost(spans)
    inner = "" if last is first else f", in `{last.site.name}`"
    return f"`{first.site.name}` ({least}{_format_duration(end_ns - first.start_ns)}{inner})"


def _format_duration(time_ns: int) -> str:
    for unit, ns in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if time_ns >= ns:
            return f"{time_ns / ns:.3g} {unit}"
    return f"{max(time_ns, 0)} ns"
