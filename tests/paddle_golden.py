"""The event tree of which `tests/golden/paddle_synthetic_summary*.txt` are the tables of `paddle.profiler`, as a trace.

Two threads, two steps of 90 ms, one GPU with three streams. Kernels, copies and memsets on the device are the device
intervals of the span that launched them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interval_lists import assign_self_times

from instrument.recording.spans import DeviceInterval, Origin, Site, Span
from instrument.trace.trace import Trace

GOLDEN = Path(__file__).parent / "golden"

KIND_OF_TYPE: Mapping[str, str] = {
    "ProfileStep": "step",
    "Dataloader": "loader",
    "Forward": "phase",
    "Backward": "phase",
    "Optimization": "phase",
    "Operator": "op",
    "OperatorInner": "phase",
    "UserDefined": "copy",
    "PythonUserDefined": "user",
    "Kernel": "op",
    "Memset": "op",
    "Memcpy": "copy",
}
"""Our kind of each type of event in the file; its only `UserDefined` is a copy."""

COMM = {"c_allreduce_sum": "comm"}
"""The kinds that follow from the name alone."""

DECLARED = {"infer_meta": "infer_shape", "compute": "compute"}
"""The declared kind of a phase whose name ends so."""


def golden_trace(kinds: Mapping[str, str] = COMM, *, launches: bool = False) -> Trace:
    """The tree as spans, times in ns from 0, the threads 100 and 200.

    `kinds` gives names another kind than that of their type. With `launches`, each call of the CUDA runtime is a span
    of its own, named for what it launched, and has the device interval in place of its caller.
    """
    return _Reader(kinds, launches).trace(json.loads((GOLDEN / "paddle_synthetic_input.json").read_text()))


class _Reader:
    def __init__(self, kinds: Mapping[str, str], launches: bool) -> None:
        self._kinds = kinds
        self._launches = launches
        self._sites: dict[tuple[str, str], Site] = {}
        self._spans: list[Span] = []

    def trace(self, threads: dict[str, Any]) -> Trace:
        for events in threads.values():
            for event in events:
                self._add(event, None, event["tid"])
        self._spans.sort(key=lambda span: (span.start_ns, -span.end_ns, span.span_id))
        assign_self_times(self._spans)
        names = {int(thread): f"thread {thread}" for thread in threads}
        end_ns = max(span.end_ns for span in self._spans)
        return Trace(Origin(1, "paddle", 0, 0), 0, end_ns, self._spans, names)

    def _add(self, event: dict[str, Any], parent: Span | None, thread: int) -> None:
        name = event["name"].partition("#")[0]
        kind = self._kinds.get(name, KIND_OF_TYPE[event["type"]])
        span = self._span(self._site(name, kind), event, parent, thread)
        for call in event.get("runtime", ()):
            for work in call["device"]:
                where = span
                if self._launches:
                    kind = KIND_OF_TYPE[work["type"]] if span.site.kind != "copy" else "copy"
                    where = self._span(self._site(work["name"], kind), call, span, thread)
                start_ns, end_ns = _interval(work)
                where.device += (DeviceInterval(work["device"], work["stream"], start_ns, end_ns),)
        for child in event.get("children", ()):
            self._add(child, span, thread)

    def _span(self, site: Site, event: dict[str, Any], parent: Span | None, thread: int) -> Span:
        start_ns, end_ns = _interval(event)
        span_id = len(self._spans) + 1
        above, root = (parent.span_id, parent.root_id) if parent else (0, span_id)
        span = Span(site, span_id, above, root, thread, 0, start_ns, end_ns, end_ns - start_ns, 0)
        self._spans.append(span)
        return span

    def _site(self, name: str, kind: str) -> Site:
        facts: dict[str, str | bool] = {}
        if kind == "copy":
            facts = {"direction": "d2h", "sync": True}
        elif kind == "phase" and name.rpartition(" ")[2] in DECLARED:
            facts = {"phase": DECLARED[name.rpartition(" ")[2]]}
        return self._sites.setdefault((name, kind), Site(name, kind, attributes=tuple(facts.items())))


def _interval(event: dict[str, Any]) -> tuple[int, int]:
    return round(event["start_ms"] * 1e6), round(event["end_ms"] * 1e6)
