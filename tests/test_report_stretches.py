"""Loops over all spans say the same in C as in Python."""

from __future__ import annotations

import itertools
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_report_utilisation import made, traces

from instrument.recording.spans import UNTIMED, DeviceInterval, Interval, Site, Span, Trace
from instrument.report import stretches
from instrument.report.stretches import grouped, packed


@pytest.fixture(params=["native", "twin"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs against both."""
    if request.param == "twin":
        monkeypatch.setattr(stretches, "_native", None)
    elif stretches._native is None:
        pytest.skip("the spans in C are not in use")


def points(parts: list[Interval]) -> set[int]:
    return {at for start, end in parts for at in range(start, end)}


@given(traces(), st.data())
def test_spans_are_parted_by_the_labels_of_their_sites(trace: Trace, data: st.DataObject) -> None:
    labels = {site: data.draw(st.integers(0, 3)) for site in {span.site for span in trace.spans}}
    assert grouped(trace.spans, labels, 3) == tuple(
        [span for span in trace.spans if labels[span.site] == label] for label in (1, 2, 3)
    )


def test_a_site_without_a_label_and_one_beyond_the_last_are_refused() -> None:
    if stretches._native is not None:
        span = Span(Site("f"), 1, 0, 1, 1, 0, 0, 1, 1, 1)
        with pytest.raises(RuntimeError, match="of which nothing could be told"):
            grouped([span], {}, 1)
        with pytest.raises(ValueError, match="greater than there are lists"):
            grouped([span], {span.site: 2}, 1)


@given(
    traces(),
    st.lists(
        st.tuples(st.lists(st.integers(-1, 3), min_size=9, max_size=9), st.permutations([0, 1, 1, 6])), max_size=3
    ),
)
def test_device_time_of_keys_is_that_of_each_instant(trace: Trace, wanted: list[tuple[list[int], list[int]]]) -> None:
    expected = []
    for numbers, keys in wanted:
        parts: dict[int, dict[tuple[int, int], list[Interval]]] = {}
        for span, number in zip(trace.spans, numbers, strict=False):
            for one in span.device if number >= 0 else ():
                if one.label not in UNTIMED:
                    of_it = parts.setdefault(keys[number], {}).setdefault((one.device, one.stream), [])
                    of_it.append((one.start_ns, one.end_ns))
        sums = {key: sum(len(points(its)) for its in streams.values()) for key, streams in parts.items()}
        expected.append([sums.get(key) for key in range(7)])
    of_spans = [(array("q", numbers[: len(trace.spans)]).tobytes(), array("q", keys)) for numbers, keys in wanted]
    assert stretches.summed(trace.spans, of_spans) == expected


def test_a_number_without_a_key_is_refused() -> None:
    spans: list[Span] = [made(1, Site("f"), 0, 10, DeviceInterval(0, 0, 2, 4))]
    with pytest.raises(IndexError):
        stretches.summed(spans, [(array("q", [3]).tobytes(), array("q", [0]))])
    with pytest.raises(ValueError):
        stretches.summed(spans, [(b"", array("q", [0]))])


@given(traces(), st.booleans())
def test_spans_with_device_time_are_in_the_unit_and_piece_in_which_they_begin(trace: Trace, by_root: bool) -> None:
    """On three lines, of which one has a name, one is asked for, and one has no units."""
    units, pieces = [(0, 10), (10, 20), (40, 50)], [(2, 4, 7), (4, 9, 5), (45, 60, 6)]
    line = stretches.Line(100, packed(units), array("q", itertools.chain.from_iterable(pieces)).tobytes())
    lines = [line._replace(first_unit=0), line, stretches.Line(200, b"", b"")]
    names = {(1, 0): 0, (2, 0): 2}
    asked = list[Span]()

    def line_of(span: Span) -> int | None:
        asked.append(span)
        return 1 if span.span_id % 2 else None

    placed = stretches.placed(trace.spans, names, by_root, line_of, lines)
    expected, unnamed = [], []
    for span in trace.spans:
        if not span.device:
            continue
        name = (span.root_id, 0) if by_root else (span.thread_id, span.task_id)
        number = names.get(name)
        if number is None:
            unnamed.append(span)
            number = 1 if span.span_id % 2 else None
        at = span.start_ns
        for place, (start, end) in enumerate(units if number in (0, 1) else ()):
            if start <= at < end:
                piece = next((its for first, last, its in pieces if first <= at < last), stretches.NO_PIECE)
                expected.append((span, 100 * (number or 0) + place, piece))
    assert asked == unnamed
    found = zip(placed.spans, array("q", placed.units), array("q", placed.pieces), strict=True)
    assert list(found) == expected


@given(traces())
def test_sites_are_told_once_by_first_sight(trace: Trace) -> None:
    assert stretches.sites(trace.spans) == list(dict.fromkeys(span.site for span in trace.spans))


def test_a_line_that_there_is_not_is_refused() -> None:
    spans: list[Span] = [made(1, Site("f"), 0, 10, DeviceInterval(0, 0, 2, 4))]
    with pytest.raises(IndexError):
        stretches.placed(spans, {}, False, lambda _: 3, [stretches.Line(0, b"", b"")])
