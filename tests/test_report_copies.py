"""The `copies` view: rates over the right time, what was asked for in vain, and that no span breaks it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from golden_views import is_golden, text_of
from hypothesis import given
from hypothesis import strategies as st
from raw_spans import changed, points, traces

from instrument.profile.model import DIRECTIONS
from instrument.recording.spans import UNTIMED, DeviceInterval, Origin, Site, Span
from instrument.report import copies_view as view
from instrument.report.copies_view import CopyUse, sum_by_direction
from instrument.report.copies_view import sum_copies as copy_uses_of_columns
from instrument.report.table import LINE, measure_width
from instrument.report.view import Options, Recording
from instrument.trace.trace import Trace

MS = 1_000_000
MB = 1_000_000


def site(direction: str, call: str = "Tensor.to", sync: bool | None = True, pinned: bool | None = None) -> Site:
    facts: dict[str, Any] = {"direction": direction, "sync": sync, "pinned": pinned}
    given = tuple((name, value) for name, value in facts.items() if value is not None)
    return Site(f"memcpy {direction}", "copy", "torch", call, device=direction != "h2h", attributes=given)


def copied(where: Site, size: Any, host_ms: float, device_ms: float | None = None, label: str = "exclusive") -> Span:
    on = () if device_ms is None else (DeviceInterval(0, 7, 5 * MS, 5 * MS + round(device_ms * MS), label),)
    return Span(where, 1, 0, 1, 1, 0, 0, round(host_ms * MS), 0, 0, attributes={"bytes": size}, device=on)


def copies(trace: Trace, **options: Any) -> str:
    return text_of(view.copies(Recording.from_trace(changed(trace)), Options(**options)))


def trace_of(*spans: Span, **facts: Any) -> Trace:
    for span_id, span in enumerate(spans, start=1):
        span.span_id = span.root_id = span_id
    return Trace(Origin(1, "shop", 0, 0), 0, 100 * MS, list(spans), **facts)


def every_direction() -> Trace:
    return trace_of(
        copied(site("h2d", sync=False, pinned=False), 24 * MB, 4, 6),
        copied(site("h2d", sync=False, pinned=False), 24 * MB, 4, 0, "dropped"),
        copied(site("h2d", sync=False, pinned=True), 60 * MB, 0.01, 3),
        copied(site("d2h", "Tensor.item", pinned=False), 4, 0.02),
        copied(site("d2d", "Tensor.copy_", sync=False), MB, 0.01),
        copied(site("p2p", "Tensor.copy_"), 5 * MB, 0.01, 0.5),
        copied(site("h2h", "Tensor.pin_memory", pinned=True), 2 * MB, 1),
        copied(Site("save\nall", "copy"), 3 * MB, 2),
        copied(Site("step", "step"), 9 * MB, 2),
    )


def copy_uses(trace: Trace) -> list[CopyUse]:
    """Return the uses of the spans' columns."""
    return copy_uses_of_columns(Recording.from_trace(changed(trace)).columns)


def test_the_layout_to_the_column() -> None:
    assert is_golden("copies", copies(every_direction()))


def test_no_copy_is_said_in_one_line() -> None:
    empty = copies(trace_of(copied(Site("step", "step"), 1, 1)))
    assert "No copy was recorded. `copies:` in the profile records those of torch" in empty


@pytest.mark.parametrize(
    ("direction", "sync", "pinned", "device_ms", "label", "base"),
    [
        ("h2d", True, None, None, "", "host"),
        ("h2d", None, None, None, "", "host"),
        ("h2d", False, True, None, "", ""),
        ("h2d", False, None, None, "", ""),
        ("h2d", False, False, None, "", "host"),
        ("d2h", False, True, 2, "exclusive", "device"),
        ("d2h", True, False, 2, "stale", "device"),
        ("d2h", True, False, 2, "captured", "host"),
        ("d2h", True, False, 0, "exclusive", "host"),
        ("d2d", True, None, None, "", ""),
        ("p2p", True, None, 2, "exclusive", "device"),
        ("h2h", False, False, None, "", "host"),
    ],
)
def test_a_rate_is_over_device_time_or_over_host_time_that_waits_or_there_is_none(
    direction: str, sync: bool | None, pinned: bool | None, device_ms: float | None, label: str, base: str
) -> None:
    span = copied(site(direction, sync=sync, pinned=pinned), 8 * MB, 4, device_ms, label)
    (use,) = copy_uses(trace_of(span))
    assert use.base == base
    assert use.rate_gb_s == {"device": 4.0, "host": 2.0, "": None}[base]


def test_only_asynchronous_copies_with_pageable_memory_are_flagged() -> None:
    kinds = [(sync, pinned) for sync in (True, False) for pinned in (True, False, None)]
    spans = [copied(site(way, sync=s, pinned=p), 1, 1) for way in DIRECTIONS for s, p in kinds]
    flagged = [(use.direction, use.sync, use.pinned) for use in copy_uses(trace_of(*spans)) if use.staged]
    assert flagged == [("h2d", False, False), ("d2h", False, False)]


def test_rows_keep_the_calls_that_moved_most_and_sum_up_the_rest() -> None:
    spans = [copied(site(way, call), size * MB, 1) for way, call, size in
             [("h2d", "a", 1), ("h2d", "b", 5), ("d2h", "c", 3), ("d2h", "d", 2)]]  # fmt: skip
    lines = copies(trace_of(*spans), rows=2).splitlines()
    shown = [line.split()[:5] for line in lines if line.startswith(("torch.", "(rem"))]
    assert shown == [
        ["torch.b", "h2d", "1", "5", "-"],
        ["torch.c", "d2h", "1", "3", "-"],
        ["(remaining", "2)", "-", "2", "3"],
    ]


def test_least_leaves_the_short_ones_to_the_rest_and_the_unit_is_that_of_every_time() -> None:
    spans = [copied(site("h2d", call), MB, host_ms, device_ms) for call, host_ms, device_ms in
             [("a", 9, None), ("b", 1, 4), ("c", 9, 1)]]  # fmt: skip
    text = copies(trace_of(*spans), least_ns=2 * MS, unit="us")
    assert "Time unit: us;" in text
    assert [line.split()[:6] for line in text.splitlines() if line.startswith(("torch.", "(rem"))] == [
        ["torch.a", "h2d", "1", "1", "-", "9000"],
        ["torch.b", "h2d", "1", "1", "4000", "1000"],
        ["(remaining", "1)", "-", "1", "1", "1000"],
    ]


@pytest.mark.parametrize("size", [True, -1, 1.5, "many", None, 1 << 60])
def test_a_value_that_is_no_size_counts_as_zero(size: Any) -> None:
    (use,) = copy_uses(trace_of(copied(site("h2d"), size, 1)))
    assert (use.calls, use.moved_bytes, use.rate_gb_s) == (1, 0, 0.0)


def test_attributes_of_a_wrong_type_are_not_believed() -> None:
    odd = Site("x", "copy", attributes=(("direction", 7), ("sync", "yes"), ("pinned", 1)))
    (use,) = copy_uses(trace_of(copied(odd, 1, 1)))
    assert (use.direction, use.call, use.sync, use.pinned) == ("", "x", None, None)


def test_copies_in_the_trace_of_another_profiler_say_what_their_times_are() -> None:
    trace = replace(trace_of(copied(Site("Memcpy HtoD", "copy"), MB, 1)), origin=Origin(1, "", 0, 0, "other"))
    assert "Host is the length of its slices" in copies(trace)


NAMES = st.text(min_size=1, max_size=200) | st.sampled_from(["a\nb", "\x1b[2J", "漢字" * 60, "\u202eabc", "x" * 500])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(DIRECTIONS), NAMES, st.booleans(), st.none() | st.booleans(), st.integers(0, 1 << 50)
        ),
        min_size=1,
        max_size=8,
    ),
    st.none() | st.integers(1, 3),
)
def test_directions_add_up_and_no_name_breaks_a_line(
    made: list[tuple[str, str, bool, bool | None, int]], rows: int | None
) -> None:
    spans = [
        copied(site(way, call, sync, pinned), size, 1 + size / 1e6, 1 + size / 1e9 if sync else None)
        for way, call, sync, pinned, size in made
    ]
    trace = trace_of(*spans)
    uses = copy_uses(trace)
    for name in ("calls", "moved_bytes", "host_ns", "timed", "device_ns", "timed_bytes", "staged"):
        assert sum(getattr(use, name) for use in uses) == sum(getattr(use, name) for use in sum_by_direction(uses))
    assert sum(use.calls for use in uses) == len(made)
    assert sum(use.moved_bytes for use in uses) == sum(size for *_, size in made)
    assert {use.direction for use in uses} == {way for way, *_ in made}
    text = copies(trace, rows=rows)
    assert all(measure_width(line) <= LINE for line in text.splitlines())
    assert text.replace("\n", "").isprintable()


def test_the_numbers_are_plain_objects() -> None:
    assert copy_uses(trace_of(copied(site("h2d", pinned=True), 8, 1, 2))) == [
        CopyUse(
            direction="h2d", call="torch.Tensor.to", sync=True, pinned=True, calls=1, moved_bytes=8, host_ns=MS,
            timed=1, device_ns=2 * MS, timed_bytes=8, waited_ns=MS, waited_bytes=8, staged=0,
        )
    ]  # fmt: skip


RAW_SITES = [
    *(site(way, call, sync, pinned) for way in DIRECTIONS for call in ("Tensor.to", "Tensor.copy_")
      for sync, pinned in ((True, None), (False, True), (False, False), (None, None))),
    Site("by hand", "copy"), Site("by hand", "copy", attributes=(("direction", "up"), ("sync", "no"))), Site("f", "op"),
]  # fmt: skip


@given(traces(RAW_SITES), st.lists(st.sampled_from([None, 0, 7, 1 << 40, -1, True, "8"]), min_size=14, max_size=14))
def test_every_number_is_that_of_the_raw_spans(trace: Trace, sizes: list[Any]) -> None:
    for span, size in zip(trace.spans, sizes, strict=False):
        span.attributes = {} if size is None else {"bytes": size}
    expected: dict[tuple[Any, ...], list[list[int]]] = {}
    for span in trace.spans:
        facts = dict(span.site.attributes)
        way, sync, pinned = facts.get("direction"), facts.get("sync"), facts.get("pinned")
        if span.site.kind != "copy":
            continue
        if way not in DIRECTIONS:
            way, sync, call = "", None, "by hand"
        else:
            call = f"torch.{span.site.qualname}"
        size = span.attributes.get("bytes")
        moved = size if type(size) is int and size >= 0 else 0
        device = points((one.start_ns, one.end_ns) for one in span.device)
        is_timed = any(one.label not in UNTIMED for one in span.device)
        crosses = way in ("h2d", "d2h")
        # Pageable memory is copied by way of pinned memory, for which the call waits whatever was asked for.
        staged = crosses and sync is False and pinned is False
        waits = way in ("h2h", "") or (crosses and sync is not False) or staged
        expected.setdefault((way, call, sync, pinned), []).append(
            [1, moved, span.end_ns - span.start_ns, is_timed, len(device) * is_timed, moved * is_timed,
             (span.end_ns - span.start_ns) * waits, moved * waits, staged]
        )  # fmt: skip
    sums = {key: [sum(column) for column in zip(*rows, strict=True)] for key, rows in expected.items()}
    uses = copy_uses(trace)
    assert sorted(uses, key=repr) == sorted((CopyUse(*key, *numbers) for key, numbers in sums.items()), key=repr)
    for use in (*uses, *sum_by_direction(uses)):
        over = {"device": (use.timed_bytes, use.device_ns), "host": (use.waited_bytes, use.waited_ns)}.get(use.base)
        assert use.rate_gb_s == (None if over is None else over[0] / over[1])
        assert use.base == ("device" if use.device_ns else "host" if use.waited_ns else "")
    for one in sum_by_direction(uses):
        of_it = [numbers for (way, *_), numbers in sums.items() if way == one.direction]
        assert one == CopyUse(one.direction, "", None, None, *(sum(column) for column in zip(*of_it, strict=True)))
