"""Slow and failed requests are kept in full, and everything else is counted."""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from kept import Kept
from readback import spans_in
from trees import outline, tree_of

from instrument.profile.keys import loads
from instrument.profile.model import Capture, PercentileThreshold, Rate, Where
from instrument.recorder.recorder import Recorder
from instrument.recording.mapped import Mapped
from instrument.recording.memory_layout import FRAME, ROW
from instrument.recording.spans import Site
from instrument.recording.trace_context import RemoteParent, encode_parent, is_sampled, make_tracestate
from instrument.trace import unsettled
from instrument.trace.settling import DECISION_WAIT_NS
from instrument.trace.tail_sampler import LEAST_CALLS
from instrument.trace.unsettled import LEAST_PACKED

REQUEST, LEAF, STEP = Site("request", "request"), Site("leaf"), Site("step", "step")


def serve(recorder: Any, leaves: int = 1, *, error: bool = False, sleep_s: float = 0.0) -> int:
    """One request; returns its span id."""
    frame = recorder.open(REQUEST)
    span_id = recorder.current_span_id()
    for _ in range(leaves):
        recorder.close(recorder.open(LEAF))
    time.sleep(sleep_s)
    recorder.close(frame, ValueError() if error else None)
    return int(span_id)


NOTHING = {"sample": 0.0, "errors": False}


def test_a_kept_request_comes_whole_and_root_first(recorder: Any) -> None:
    kept = Kept(recorder, Capture(sample=1.0))
    serve(recorder, 2)
    (spans,) = kept.read()
    assert [span.site.name for span in spans] == ["request", "leaf", "leaf"]
    assert tree_of(spans) == outline(
        """
        request
          leaf
          leaf
        """
    )


@pytest.mark.parametrize(
    ("capture", "how", "is_kept"),
    [
        (Capture(**NOTHING), {}, False),
        (Capture(sample=0.0, errors=True), {"error": True}, True),
        (Capture(sample=0.0, errors=True), {}, False),
        (Capture(**NOTHING), {"error": True}, False),
        (Capture(**NOTHING, slow_ns=5_000_000), {"sleep_s": 0.006}, True),
        (Capture(**NOTHING, slow_ns=500_000_000), {"sleep_s": 0.001}, False),
    ],
)
def test_a_request_is_kept_when_it_is_slow_or_failed(
    recorder: Any, capture: Capture, how: dict[str, Any], is_kept: bool
) -> None:
    kept = Kept(recorder, capture)
    serve(recorder, **how)
    assert len(kept.read()) == is_kept
    assert recorder.tally().calls == 2


def test_the_sample_is_a_share_of_all_trees_and_the_same_for_all_their_spans(recorder: Any) -> None:
    kept = Kept(recorder, Capture(sample=0.25, errors=False))
    trees = []
    for _ in range(20):
        for _ in range(100):
            serve(recorder)
        trees += kept.read()
    assert 400 < len(trees) < 600
    assert all(len(spans) == 2 for spans in trees)


def test_a_trace_of_the_random_share_says_the_threshold_that_its_id_has_passed(recorder: Any) -> None:
    kept = Kept(recorder, Capture(sample=0.25, errors=True))
    for number in range(200):
        serve(recorder, error=number % 2 == 0)
    ids = kept.rows.ids
    trees = kept.read()
    states = set()
    for spans in trees:
        (remote,) = {span.remote for span in spans}
        trace_id, state = (ids.trace_id(spans[0].root_id), "") if remote is None else (remote.trace_id, remote.state)
        states.add(state)
        assert trace_id == ids.trace_id(spans[0].root_id)
        # Failed requests outside of the share stand for nobody but themselves: they say no threshold.
        assert (state == "ot=th:c") == (trace_id & (1 << 56) - 1 >= 0xC0 << 48)
        assert state or spans[0].error
        assert remote is None or (remote.flags, remote.span_id) == (3, 0)
    assert states == {"", "ot=th:c"}


@pytest.mark.parametrize(
    ("sample", "state"),
    [(1.0, ""), (0.0, ""), (0.5, "ot=th:8"), (0.25, "ot=th:c"), (0.01, "ot=th:fd70a"), (1e-3, "ot=th:ffbe77"),
     (1e-30, "ot=th:ffffffffffffff")],
)  # fmt: skip
def test_a_threshold_has_four_digits_behind_those_of_all_bits(sample: float, state: str) -> None:
    assert make_tracestate(sample) == state
    threshold = int(state.removeprefix("ot=th:").ljust(14, "0"), 16) if state else 0
    for random_value in (max(threshold - 1, 0), threshold, (1 << 56) - 1):
        assert is_sampled(7 << 64 | random_value, sample) == (sample > 0 and random_value >= threshold)


@pytest.mark.parametrize(("flags", "is_kept"), [(1, True), (0, False)])
def test_a_caller_that_traces_has_decided_already(recorder: Any, flags: int, is_kept: bool) -> None:
    recorder.remote_parent = lambda: encode_parent(RemoteParent(5, 6, flags))
    kept = Kept(recorder, Capture(sample=0.0 if flags else 1.0, errors=False))
    serve(recorder)
    assert len(kept.read()) == is_kept


def test_no_trace_is_kept_if_a_variable_switches_traces_off_and_a_caller_asks_for_them(recorder: Any) -> None:
    recorder.remote_parent = lambda: encode_parent(RemoteParent(5, 6, 1))
    kept = Kept(recorder, loads("export: otlp", environ={"OTEL_TRACES_SAMPLER": "always_off"}).capture)
    serve(recorder, error=True)
    assert kept.read() == []


def test_spans_that_end_after_their_request_follow_it(recorder: Any) -> None:
    remote = RemoteParent(5, 6)
    recorder.remote_parent = lambda: encode_parent(remote)
    kept = Kept(recorder, Capture(sample=1.0))
    request = recorder.open(REQUEST)
    request_id = recorder.current_span_id()
    late = recorder.open(LEAF)
    recorder.close(request)
    assert [span.site.name for spans in kept.read() for span in spans] == ["request"]
    recorder.close(late)
    ((span,),) = kept.read()
    assert (span.site.name, span.root_id, span.remote) == ("leaf", request_id, remote)


def test_spans_that_end_after_a_request_that_was_not_kept_are_let_go(recorder: Any) -> None:
    kept = Kept(recorder, Capture(**NOTHING))
    request = recorder.open(REQUEST)
    late = recorder.open(LEAF)
    recorder.close(request)
    kept.read()
    recorder.close(late)
    assert kept.read() == []
    assert kept.rows.undecided_count == 0


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_rows_that_wait_for_their_time_are_packed_and_come_out_as_they_were_recorded(
    recorder: Any, is_asked_for: bool
) -> None:
    kept = Kept(recorder, Capture(sample=1.0), spans_per_request=2_000)
    requests = {serve(recorder, LEAST_PACKED), serve(recorder, 2 * LEAST_PACKED)}
    reader = kept.readers[0]
    reader.read_new_rows()
    assert (reader.rows.packed_count, reader.rows.undecided_count) == (
        3 * LEAST_PACKED,
        3 * LEAST_PACKED + len(requests),
    )
    assert {int(span_id) for span_id in reader.rows.rows["span_id"]} == requests
    spans = {span.span_id: (span.root_id, span.parent_id, span.start_ns, span.end_ns) for span in spans_in(recorder)}
    if is_asked_for:
        assert reader.rows.is_row_waiting(next(iter(spans.keys() - requests)))
        assert (reader.rows.packed_count, reader.rows.undecided_count) == (0, len(spans))
    trees = kept.read()
    assert spans == {
        span.span_id: (span.root_id, span.parent_id, span.start_ns, span.end_ns) for tree in trees for span in tree
    }
    assert (reader.rows.packed_count, reader.rows.undecided_count) == (0, 0)


def test_a_request_has_its_share_of_spans_and_the_rest_is_counted(recorder: Any) -> None:
    kept = Kept(recorder, Capture(sample=1.0), spans_per_request=3)
    serve(recorder, 10)
    (spans,) = kept.read()
    assert len(spans) == 4
    assert kept.counts["spans beyond spans_per_request"] == 7


def test_a_task_that_a_kept_request_has_left_behind_does_not_add_to_it_for_ever(recorder: Any) -> None:
    kept = Kept(recorder, Capture(sample=1.0), spans_per_request=5)
    request = recorder.open(REQUEST)
    background = recorder.open(STEP)
    recorder.close(request)
    for _ in range(20):
        recorder.close(recorder.open(LEAF))
    assert sum(map(len, kept.read())) == 6
    for _ in range(20):
        recorder.close(recorder.open(LEAF))
    recorder.close(background)
    assert kept.read() == []
    assert kept.counts["spans beyond spans_per_request"] == 36


def test_requests_that_never_end_do_not_grow_without_bound(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsettled, "MOST_ROWS", 20)
    kept = Kept(recorder, Capture(sample=1.0))
    open_requests = []
    for _ in range(10):
        open_requests.append(recorder.open(REQUEST))
        for _ in range(5):
            recorder.close(recorder.open(LEAF))
        recorder.forget_current()
    kept.read()
    assert kept.rows.undecided_count == 15
    assert kept.counts["spans of requests that stayed open too long"] == 35


def test_trees_without_a_request_come_at_once_though_their_root_stays_open(recorder: Any) -> None:
    kept = Kept(recorder, Capture(sample=1.0))
    serving = recorder.open(Site("serve"))
    serving_id = recorder.current_span_id()
    recorder.close(recorder.open(STEP))
    ((step,),) = kept.read()
    assert (step.site.name, step.root_id) == ("step", serving_id)
    recorder.close(serving)
    assert [span.site.name for spans in kept.read() for span in spans] == ["serve"]


def test_the_limit_bounds_notable_requests_and_refills_with_time(recorder: Any) -> None:
    kept = Kept(recorder, Capture(sample=0.0, errors=True, limit=Rate(2, 60 * 10**9)))
    for _ in range(5):
        serve(recorder, error=True)
    assert len(kept.read()) == 2
    assert kept.counts["requests beyond the capture limit"] == 3
    allowance = kept.rows.sampler.allowance
    now_ns = time.monotonic_ns()
    taken = [allowance.take_token(now_ns + later_s * 10**9) for later_s in (1, 29, 31, 32, 61, 62)]
    assert taken == [False, False, True, False, True, False]


def test_spans_shortly_before_a_failure_are_kept_with_it(recorder: Any) -> None:
    kept = Kept(recorder, Capture(sample=0.0, errors=True))
    long_ago = serve(recorder)
    just_before = serve(recorder)
    failed = serve(recorder, error=True)
    times = {span.span_id: (span.start_ns, span.end_ns) for span in spans_in(recorder)}
    between_ns = (times[long_ago][1] + times[just_before][1]) // 2
    kept.change(Capture(sample=0.0, errors=True, before_ns=times[failed][0] - between_ns), 100)
    roots = [spans[0].span_id for spans in kept.read()]
    assert roots == [just_before, failed]
    assert long_ago not in roots


# -------------------------------------------------------------------- by attributes


@pytest.mark.parametrize(
    ("any_of", "given", "is_kept"),
    [
        ([("=", "x")], "x", True),
        ([("=", "x")], "y", False),
        ([("=", "x")], None, False),
        ([("=", "a"), ("=", "b")], "b", True),
        ([(">=", 500)], 503, True),
        ([(">=", 500)], 404, False),
        ([(">=", 500)], "503", False),
        ([(">=", 1)], True, False),
        ([("<", 0.5), (">", 2)], 2.5, True),
        ([("=", True)], True, True),
        ([("=", 1)], True, False),
        ([("=", 1)], 1.0, True),
        ([("=", "x")], ["w", "x"], True),
    ],
)
def test_a_request_is_kept_that_bears_an_attribute(recorder: Any, any_of: Any, given: Any, is_kept: bool) -> None:
    kept = Kept(recorder, Capture(**NOTHING, where=(Where("a.b", tuple(any_of)),)))
    with recorder.make_scope("request", kind="request") as request:
        if given is not None:
            request.annotate({"a.b": given})
    assert len(kept.read()) == is_kept


def test_all_conditions_must_hold_for_the_requests_own_span(recorder: Any) -> None:
    where = (Where("a", (("=", 1),)), Where("declared", (("=", "x"),)))
    kept = Kept(recorder, Capture(**NOTHING, where=where))
    site = Site("request", "request", attributes=(("declared", "x"), ("a", 2)))
    for attributes in ({"a": 1}, {"a": 2}, None, {"a": 1, "declared": "y"}):
        frame = recorder.open(site)
        recorder.close(recorder.open(LEAF, {"a": 1}))
        if attributes:
            recorder.annotate(frame, attributes)
        recorder.close(frame)
    ((root, _),) = kept.read()
    assert root.attributes == {"a": 1}


def test_requests_kept_for_their_attributes_count_against_the_limit(recorder: Any) -> None:
    kept = Kept(recorder, Capture(**NOTHING, where=(Where("a", (("=", 1),)),), limit=Rate(2, 3600 * 10**9)))
    for _ in range(5):
        frame = recorder.open(REQUEST, {"a": 1})
        recorder.close(frame)
    assert len(kept.read()) == 2
    assert kept.counts["requests beyond the capture limit"] == 3


# -------------------------------------------------------------------- by what is usual


class Timed:
    """A recorder whose spans take as long as the test says: their times are written anew in its memory.

    The begin of an open span makes the length that is counted. The times of the row make the moment at which it ended.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.now_ns = 10**9
        self._first_row = self._frames = self._frame_bytes = 0

    def ask(self, site: Site, took_ns: int) -> int:
        """Record a request of this length with one span in it. Returns its id."""
        root = self.recorder.open(site)
        leaf = self.recorder.open(LEAF)
        self._find_memory()
        begun_ns = time.monotonic_ns() - took_ns
        frames = os.pread(self.recorder.memory_fd, self._frame_bytes, self._frames)
        ids = {root.span_id, leaf.span_id}
        for slot in range(0, len(frames), FRAME.size):
            (span_id,) = struct.unpack_from("<Q", frames, slot + FRAME.fields["span_id"][0])
            if span_id in ids and frames[slot + FRAME.fields["state"][0]]:
                at = self._frames + slot + FRAME.fields["start_ns"][0]
                os.pwrite(self.recorder.memory_fd, struct.pack("<q", begun_ns), at)
        self.recorder.close(leaf)
        self.recorder.close(root)
        self._write_rows(2, took_ns)
        return int(root.span_id)

    def fail(self) -> None:
        """Record a request that fails."""
        serve(self.recorder, error=True)
        self._find_memory()
        self._write_rows(2, 1000)

    def _find_memory(self) -> None:
        if not self._first_row:
            mapped = Mapped(os.dup(self.recorder.memory_fd))
            frames = mapped._parts["frames"]
            self._frames, self._frame_bytes = frames.offset, 64 * frames.stride
            ring = next(one for one in mapped._read_rings() if one.rows >= 0)
            self._first_row = mapped._parts["rows"].offset + ring.rows * ROW.size
            mapped.close()

    def _write_rows(self, count: int, took_ns: int) -> None:
        (ring,) = self.recorder.rings()
        start_ns, self.now_ns = self.now_ns, self.now_ns + took_ns
        for number in range(ring.head - count, ring.head):
            at = self._first_row + number % ring.capacity * ROW.size + ROW.fields["start_ns"][0]
            os.pwrite(self.recorder.memory_fd, struct.pack("<qq", start_ns, self.now_ns), at)
        self.now_ns += 1000


@pytest.fixture
def timed(make_recorder: Callable[..., Recorder]) -> Timed:
    recorder = make_recorder(1 << 25)
    if recorder.memory_fd < 0:
        pytest.skip(recorder.no_memory)
    return Timed(recorder)


SECOND_NS = 10**9
"""Long against what a busy machine adds to a span."""

HALF_AS_LONG_AGAIN = Capture(sample=0.0, slow_over=PercentileThreshold(0.99, 1.5))


@pytest.mark.parametrize("look_every", [pytest.param(1, marks=pytest.mark.slow), 7, 500, 10_000])
def test_requests_that_are_slow_for_their_endpoint_are_kept_and_hardly_any_other_of_5000(
    timed: Timed, look_every: int
) -> None:
    chance = random.Random(5)
    kept = Kept(timed.recorder, HALF_AS_LONG_AGAIN)
    quick, slow = Site("GET /quick", "request"), Site("GET /slow", "request")
    planted = set(chance.sample(range(5000), 25))
    wanted, found = set(), set()
    for number in range(5000):
        # The one takes longer as a rule than the other when it is slow.
        site, usual_ns = (quick, SECOND_NS) if number % 3 else (slow, 5 * SECOND_NS)
        took_ns = round(usual_ns * chance.lognormvariate(0, 0.1)) * (3 if number in planted else 1)
        span_id = timed.ask(site, took_ns)
        if number in planted:
            wanted.add(span_id)
        if number % look_every == 0:
            found |= {tree[0].span_id for tree in kept.read()}
    trees = kept.read()
    assert all([span.site.key for span in tree] == [tree[0].site.key, LEAF.key] for tree in trees)
    found |= {tree[0].span_id for tree in trees}
    assert wanted <= found
    assert len(found - wanted) <= 3


def test_an_endpoint_with_few_requests_keeps_none_as_slow(timed: Timed) -> None:
    kept = Kept(timed.recorder, HALF_AS_LONG_AGAIN)
    for number in range(LEAST_CALLS - 1):
        timed.ask(REQUEST, 10 * SECOND_NS if number == 5 else SECOND_NS)
        assert kept.read() == []
    timed.ask(REQUEST, SECOND_NS)
    # The slowest of a hundred is the one beyond the percentile; now that there are so many, it is known to be slow.
    ((root, leaf),) = kept.read()
    assert root.total_ns == leaf.total_ns == 10 * SECOND_NS


def test_early_requests_are_kept_once_and_not_beyond_the_limit(timed: Timed) -> None:
    capture = replace(HALF_AS_LONG_AGAIN, before_ns=10**12, limit=Rate(1, 10**15))
    kept = Kept(timed.recorder, replace(capture, errors=True))
    slow = {timed.ask(REQUEST, 10 * SECOND_NS) for _ in range(2)}
    for _ in range(LEAST_CALLS * 3):
        timed.ask(REQUEST, SECOND_NS)
    trees = kept.read()
    ids = [tree[0].span_id for tree in trees]
    assert len(ids) == len(set(ids)) == 1
    assert set(ids) < slow
    assert kept.counts["requests beyond the capture limit"] == 1


def test_early_requests_that_are_judged_late_refill_no_time_twice(timed: Timed) -> None:
    kept = Kept(timed.recorder, replace(HALF_AS_LONG_AGAIN, errors=True, limit=Rate(1, 60_000 * SECOND_NS)))
    timed.ask(REQUEST, 10 * SECOND_NS)
    assert kept.read() == []
    timed.now_ns += 600_000 * SECOND_NS
    timed.fail()
    assert len(kept.read()) == 1
    for _ in range(LEAST_CALLS * 3):
        timed.ask(REQUEST, SECOND_NS)
    assert kept.read() == []
    timed.fail()
    assert kept.read() == []
    assert kept.counts["requests beyond the capture limit"] == 2


def test_early_requests_wait_in_bounded_memory(timed: Timed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsettled, "MOST_ROWS", 100)
    kept = Kept(timed.recorder, HALF_AS_LONG_AGAIN)
    for number in range(200):
        timed.ask(Site(f"GET /{number}", "request"), SECOND_NS)
    assert kept.read() == []
    assert kept.rows.undecided_count <= 100


@pytest.mark.slow
def test_all_slow_requests_of_5000_are_kept_and_only_others_as_slow(
    make_recorder: Any,
) -> None:
    recorder = make_recorder(1 << 26)
    chance = random.Random(6)
    kept = Kept(recorder, HALF_AS_LONG_AGAIN)
    planted = set(chance.sample(range(5000), 25))
    wanted, took_ns = set(), {}
    for number in range(5000):
        span_id = serve(recorder, 3, sleep_s=0.03 if number in planted else 0.0)
        if number in planted:
            wanted.add(span_id)
    for span in spans_in(recorder):
        if span.site is REQUEST:
            took_ns[span.span_id] = span.total_ns
    p99_ns = sorted(took_ns.values())[round(len(took_ns) * 0.99) - 1]
    trees = kept.read()
    found = {tree[0].span_id for tree in trees}
    assert all(len(tree) == 4 for tree in trees)
    slow = {span_id for span_id, total_ns in took_ns.items() if total_ns > 1.5 * 1.01 * p99_ns}
    not_slow = {span_id for span_id, total_ns in took_ns.items() if total_ns < 1.5 * 0.99 * p99_ns}
    assert slow <= found
    assert not found & not_slow
    assert wanted <= found or p99_ns > 20_000_000  # a machine on which one of a hundred waits so long


def test_a_profile_that_asks_otherwise_forgets_what_waits(timed: Timed) -> None:
    kept = Kept(timed.recorder, HALF_AS_LONG_AGAIN)
    timed.ask(REQUEST, 10 * SECOND_NS)
    kept.read()
    kept.change(Capture(**NOTHING), 100)
    for _ in range(LEAST_CALLS):
        timed.ask(REQUEST, SECOND_NS)
    assert kept.read() == []
    assert kept.rows.undecided_count == 0


def test_a_request_of_several_processes_is_kept_where_one_of_them_keeps_it(make_recorder: Any) -> None:
    caller, server = make_recorder(), make_recorder()
    kept = Kept(caller, Capture(sample=0.0, errors=True), 100, server)
    trace_id, asked = 0, []
    for fails in (False, True, False):
        request = caller.open(REQUEST)
        trace_id = kept.readers[0].rows.ids.trace_id(request.span_id)
        server.remote_parent = lambda trace_id=trace_id: encode_parent(RemoteParent(trace_id, 5, 0))
        asked.append((request.span_id, serve(server, error=fails)))
        found = [*kept.settle()]  # the caller's part is open
        caller.close(request)
        assert [*found, *kept.settle()] == ([1, 0] if fails else [])


@pytest.mark.parametrize("fails_first", [True, False])
def test_requests_of_one_trace_are_kept_with_one_that_fails(recorder: Any, fails_first: bool) -> None:
    recorder.remote_parent = lambda: encode_parent(RemoteParent(5, 6, 0))
    kept = Kept(recorder, Capture(sample=0.0, errors=True))
    asked = [serve(recorder, error=fails_first), serve(recorder, error=not fails_first)]
    assert {tree[0].span_id for tree in kept.read()} == set(asked)


def test_a_request_that_nobody_keeps_is_dropped_a_decision_wait_after_its_end(recorder: Any) -> None:
    kept = Kept(recorder, Capture(sample=0.0))
    serve(recorder)
    ended_ns = spans_in(recorder)[0].end_ns
    kept.settle(at_once=False)
    assert kept.rows.undecided_count == 2
    assert kept.settling.settle(ended_ns + DECISION_WAIT_NS - 1) == {}
    kept.rows.read_ns = ended_ns + DECISION_WAIT_NS + 10**9
    assert kept.settling.settle(kept.rows.read_ns) == {}
    assert kept.rows.undecided_count == 0
