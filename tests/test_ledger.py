"""Keys, batches and the ledger: who is served by what, and every nanosecond of a request given out exactly once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import queue_times

from instrument.recording.spans import BATCH_KEYS, BATCH_WEIGHTS, KEY, DeviceInterval, Site, Span
from instrument.trace.columns import Columns
from instrument.trace.joined import Joined, join_requests
from instrument.trace.ledger import compute_device_ledger, compute_ledger, list_turns
from instrument.trace.stages import find_stages
from instrument.trace.trace import columns_of_spans

CHAT = Site("POST /chat", "request")
WORKER = Site("worker.handle", "request")
TOKENISE, DETOKENISE, WAIT = Site("tokenise", "phase"), Site("detokenise", "phase"), Site("generate", "phase")
ACCEPT, SUBMIT = Site("accept", "phase"), Site("submit", "user")
STEP, COMPUTE = Site("engine.step", "step"), Site("compute", "phase")
API, ENGINE = 1, 2

Instant = TypeVar("Instant")


def made(
    span_id: int,
    site: Site,
    start: int,
    end: int,
    parent: int = 0,
    thread: int = API,
    key: str = "",
    batch: list[str] | None = None,
    weights: list[float] | None = None,
) -> Span:
    attributes: dict[str, object] = {}
    if key:
        attributes[KEY] = key
    if batch is not None:
        attributes[BATCH_KEYS] = batch
    if weights is not None:
        attributes[BATCH_WEIGHTS] = weights
    span = Span(site, span_id, parent, parent or span_id, thread, 0, start, end, end - start, 0)
    span.attributes = attributes  # type: ignore[assignment]
    return span


def engine() -> list[Span]:
    """Two requests in an API process, served by the steps of an engine in another one."""
    return [
        made(1, CHAT, 0, 1000, key="a"),
        made(2, TOKENISE, 10, 60, 1),
        made(3, WAIT, 60, 950, 1, key="a"),
        made(4, DETOKENISE, 900, 950, 3),
        made(5, CHAT, 100, 700, key="b"),
        made(6, TOKENISE, 110, 130, 5),
        made(10, ACCEPT, 80, 90, thread=ENGINE, key="a"),
        made(11, STEP, 100, 200, thread=ENGINE, batch=["a"]),
        made(12, STEP, 210, 310, thread=ENGINE, batch=["a", "b"], weights=[3, 1]),
        made(13, STEP, 320, 420, thread=ENGINE, batch=["b"]),
        made(14, STEP, 430, 531, thread=ENGINE, batch=["a", "b"]),
        made(15, STEP, 600, 800, thread=ENGINE, batch=["nobody", "a"]),
    ]


def times_of(spans: list[Span]) -> dict[int, dict[str, int]]:
    """By the id of each request its ledger."""
    trace = columns_of_spans(spans)
    joined = join_requests(trace)
    found, ids = compute_ledger(trace, joined), trace.span_id[joined.rows].tolist()
    return {span_id: found.times_of_request(place) for place, span_id in enumerate(ids)}


def test_the_ledger_of_two_requests_that_an_engine_serves_in_batches() -> None:
    # Accepted 20 ns after it was handed over. Between its steps the engine ran those of others, or rested.
    assert times_of(engine()) == {
        1: {
            "unknown": 10 + 50,
            "tokenise": 50,
            "transport": 20 + 100,
            "accept": 10,
            "queue": 10,
            "share of batches": 100 + 75 + 50 + 100,
            "waiting in batches": 25 + 51 + 100,
            "stall": 10 + 120 + 69,
            "detokenise": 50,
        },
        5: {
            "unknown": 10 + 169,
            "tokenise": 20,
            "queue": 80,
            "share of batches": 25 + 100 + 51,
            "waiting in batches": 75 + 50,
            "stall": 10 + 10,
        },
    }


def test_the_queue_time_starts_at_the_handover_despite_other_calls_in_the_meantime() -> None:
    spans = [
        made(1, CHAT, 0, 400),
        made(2, SUBMIT, 5, 6, 1, key="a"),
        made(3, ACCEPT, 20, 30, thread=ENGINE, key="a"),
        *(made(10 + at, Site("Linear", "layer"), at, at + 10, 1, thread=7) for at in range(10, 330, 20)),
        made(4, STEP, 330, 350, thread=ENGINE, batch=["a"]),
    ]
    its = {"unknown": 10 + 50, "compute": 160, "accept": 10, "queue": 150, "share of batches": 20}
    assert times_of(spans)[1] == its
    trace = columns_of_spans(spans)
    assert queue_times(trace, join_requests(trace)) == {0: 300}


@pytest.mark.parametrize("is_open", [False, True], ids=["submitted", "awaited"])
def test_a_request_that_is_given_up_in_the_queue_was_in_the_queue_until_then(is_open: bool) -> None:
    spans = [
        made(1, CHAT, 0, 500, key="a"),
        made(2, CHAT, 0, 260),
        made(3, SUBMIT, 10, 260 if is_open else 11, 2, key="b"),
        made(4, CHAT, 0, 260),  # that has failed for another reason
        made(5, STEP, 20, 320, thread=ENGINE, batch=["a"]),
    ]
    for span in spans[1:4]:
        span.error = "TimeoutError"
    spans[2].error = "TimeoutError" if is_open else None
    queue_ns = 250 if is_open else 249
    assert times_of(spans)[2] == {"queue": queue_ns, "unknown": 260 - queue_ns}
    assert times_of(spans)[4] == {"unknown": 260}
    trace = columns_of_spans(spans)
    joined = join_requests(trace)
    assert queue_times(trace, joined) == {0: 20, 1: queue_ns}
    assert [list(one.list_named_intervals()) for one in find_stages(trace, joined) if one.place == 1] == [
        [("queue", 260 - queue_ns, 260)]
    ]


def test_a_further_key_of_a_request_has_a_queue_of_its_own() -> None:
    spans = [
        made(1, CHAT, 0, 300),
        made(2, WAIT, 10, 100, 1, key="a"),
        made(3, STEP, 50, 100, thread=ENGINE, batch=["a"]),
        made(4, WAIT, 120, 290, 1, key="b"),
        made(5, STEP, 200, 290, thread=ENGINE, batch=["b"]),
    ]
    assert times_of(spans) == {1: {"queue": 40 + 80, "share of batches": 140, "transport": 20, "unknown": 20}}


def test_a_request_within_another_one_has_its_own_ledger_by_a_key_of_its_own() -> None:
    spans = [
        made(1, CHAT, 0, 100, key="a"),
        made(2, TOKENISE, 10, 90, 1),
        made(3, WORKER, 20, 60, 2, key="b"),
        made(4, WORKER, 70, 80, 1, key="a"),  # a part
        made(5, ACCEPT, 22, 30, 3),
        made(10, STEP, 40, 50, thread=ENGINE, batch=["b"]),
    ]
    for span in spans[2:5]:
        span.root_id = span.span_id if span.site is WORKER else 3
    assert times_of(spans) == {
        1: {"unknown": 20, "tokenise": 40, "sub-requests": 40},
        3: {"unknown": 2 + 10, "accept": 8, "queue": 10, "share of batches": 10},
    }


@pytest.mark.parametrize("key", ["a", ""])
def test_requests_in_the_tree_of_another_one_have_their_own_ledgers_by_their_keys(key: str) -> None:
    spans = [
        made(1, CHAT, 0, 100, key=key),
        made(2, TOKENISE, 0, 10, 1),
        made(3, WORKER, 20, 40, 1, key="b"),
        made(4, WORKER, 50, 90, 1),
        made(5, WAIT, 50, 60, 4, key="c"),
        made(6, TOKENISE, 52, 56, 5),
        made(7, WORKER, 62, 64, 4, key="c"),  # a part of that
        made(10, STEP, 25, 35, thread=ENGINE, batch=["b"]),
        made(11, STEP, 70, 80, thread=ENGINE, batch=["c", "b"]),
    ]
    for span in spans[1:7]:
        span.root_id = 1
    assert times_of(spans) == {
        1: {"unknown": 30, "tokenise": 10, "sub-requests": 60},
        3: {"queue": 5, "share of batches": 10, "unknown": 5},
        4: {"generate": 6, "tokenise": 4, "queue": 6, "share of batches": 5, "waiting in batches": 5, "unknown": 14},
    }


def test_a_request_in_the_tree_of_another_one_without_a_key_is_a_part_of_it() -> None:
    spans = [
        made(1, CHAT, 0, 100),
        made(3, WORKER, 20, 90, 1, key="b"),
        made(10, STEP, 25, 35, thread=ENGINE, batch=["b"]),
    ]
    assert times_of(spans) == {1: {"queue": 5, "share of batches": 10, "unknown": 85}}


def requests_of_one_loop(ends_ns: int) -> list[Span]:
    """The engine's loop began in the context of the request that came first, and serves another one as well."""
    spans = [
        made(1, CHAT, 0, 100, key="a"),
        made(2, CHAT, 5, ends_ns, thread=3),
        made(3, WAIT, 10, 60, 2, thread=3, key="b"),
        made(4, TOKENISE, 20, 40, 1, key="b"),
        made(5, ACCEPT, 25, 30, 4),
        made(6, WAIT, 70, 80, 1, key="second name"),
        made(10, STEP, 50, 60, thread=ENGINE, batch=["a", "b"]),
        made(11, ACCEPT, 45, 46, thread=ENGINE, key="b"),
    ]
    for span in spans:
        span.root_id = {2: 2, 3: 2, 4: 1, 5: 1, 6: 1}.get(span.span_id, span.root_id)
    return spans


@pytest.mark.parametrize("ends_ns", [80, 150])
def test_a_span_with_a_key_in_another_requests_tree_belongs_to_the_keys_request(ends_ns: int) -> None:
    found = times_of(requests_of_one_loop(ends_ns))
    parts = {
        "queue": 50,
        "share of batches": 5,
        "waiting in batches": 5,
        "transport": 10,
        "generate": 10,
        "unknown": 20,
    }
    assert found[1] == parts
    assert {"tokenise": 15, "share of batches": 5, "waiting in batches": 5}.items() <= found[2].items()
    assert [sum(found[request].values()) for request in (1, 2)] == [100, ends_ns - 5]


def test_a_batch_is_given_out_once_by_the_weights_of_its_requests() -> None:
    trace = columns_of_spans(engine())
    joined = join_requests(trace)
    given_out = Counter[int]()
    for row, time_ns in zip(joined.served.batch.tolist(), compute_ledger(trace, joined).given_ns.tolist(), strict=True):
        given_out[row] += time_ns
    assert given_out == {
        row: int(trace.total_ns[row]) for row in trace.attributes.rows_with_attribute(BATCH_KEYS).tolist()
    }


@pytest.mark.parametrize("parent", [4, 0], ids=["below", "in a pool"])
def test_a_batch_within_another_one_gives_out_its_time_and_the_outer_one_the_rest(parent: int) -> None:
    spans = [
        made(1, CHAT, 0, 130, key="a"),
        made(2, CHAT, 0, 130, key="b"),
        made(3, CHAT, 0, 130, key="c"),
        made(4, STEP, 10, 114, thread=ENGINE, batch=["a", "b", "c"], weights=[1, 1, 0]),
        made(5, COMPUTE, 35, 85, parent, thread=ENGINE if parent else 4, batch=["a", "b"]),
    ]
    for span, on_device in zip(spans[3:], [(20, 120), (40, 90)], strict=True):
        span.device = (DeviceInterval(0, 7, *on_device),)
    served = {"queue": 10, "share of batches": 52, "waiting in batches": 52, "unknown": 16}
    times = times_of(spans)
    assert times[1] == times[2] == served
    assert times[3] == {"queue": 10, "waiting in batches": 104, "unknown": 16}
    trace = columns_of_spans(spans)
    joined = join_requests(trace)
    assert [(one.row, one.end_ns - one.start_ns) for one in list_turns(trace, joined, 0) if one.row != -1] == [
        (3, 25),
        (4, 50),
        (3, 29),
    ]
    devices = compute_device_ledger(trace, joined)
    assert devices.shared_ns.tolist() == [50, 50, 0]
    assert devices.batch_ns.tolist() == [0, 0, 0, 100, 50]


def test_a_batch_of_others_below_a_batch_is_no_time_of_that() -> None:
    spans = [
        made(1, CHAT, 0, 100, key="a"),
        made(2, CHAT, 0, 100, key="b"),
        made(3, STEP, 0, 100, thread=ENGINE, batch=["a"]),
        made(4, COMPUTE, 20, 60, 3, thread=ENGINE, batch=["b"]),
        made(5, COMPUTE, 60, 90, 3, thread=4, batch=["b"]),  # by another worker, at the same time
    ]
    assert times_of(spans) == {
        1: {"share of batches": 60, "waiting in batches": 40},
        2: {"queue": 20, "share of batches": 70, "unknown": 10},
    }


def test_a_request_that_is_in_a_batch_several_times_has_the_weight_of_all() -> None:
    spans = [
        made(1, CHAT, 0, 100, key="a"),
        made(2, TOKENISE, 0, 1, 1, key="a2"),
        made(3, CHAT, 0, 100, key="b"),
        made(4, STEP, 10, 20, thread=ENGINE, batch=["a", "b", "a", "nobody", "a2", "nobody"]),
        made(5, STEP, 30, 40, thread=ENGINE, batch=["b", "a2", "b"], weights=[2, 1, 3]),
    ]
    served = join_requests(columns_of_spans(spans)).served
    found = list(zip(served.batch.tolist(), served.request.tolist(), served.weight.tolist(), served.key, strict=True))
    assert found == [
        (3, 0, 3000, "a"),
        (3, 1, 1000, "b"),
        (3, -1, 1000, "nobody"),
        (3, -1, 1000, "nobody"),
        (4, 1, 5000, "b"),
        (4, 0, 1000, "a2"),
    ]


def test_a_repeated_key_is_another_request() -> None:
    spans = [
        made(1, CHAT, 0, 100, key="a"),
        made(2, CHAT, 200, 300, key="a"),
        made(3, STEP, 50, 60, thread=ENGINE, batch=["a"]),
        made(4, STEP, 150, 160, thread=ENGINE, batch=["a"]),
        made(5, STEP, 250, 270, thread=ENGINE, batch=["a"]),
        made(6, ACCEPT, 190, 195, thread=ENGINE, key="a"),
        made(7, ACCEPT, 205, 206, thread=ENGINE, key="a"),
        made(8, STEP, 206, 207, 7, thread=ENGINE),
        made(9, ACCEPT, 10, 11, thread=ENGINE, key="nobody"),
    ]
    joined = join_requests(columns_of_spans(spans))
    assert joined.served.request.tolist() == [0, 0, 1]  # the second step came when the first request had gone
    assert joined.of.tolist() == [0, 1, -1, -1, -1, 0, 1, 1, -1]
    assert (joined.keys, joined.unbound) == ({0: ("a",), 1: ("a",)}, 1)


def test_a_request_of_another_process_within_that_of_its_key_is_a_part_of_it() -> None:
    spans = [
        made(1, CHAT, 0, 100, key="a"),
        made(2, WORKER, 20, 80, thread=ENGINE, key="a"),
        made(3, TOKENISE, 30, 40, 2, thread=ENGINE),
        made(4, WORKER, 90, 120, thread=ENGINE, key="a"),
    ]
    joined = join_requests(columns_of_spans(spans))
    assert joined.rows.tolist() == [0, 3]
    assert joined.of.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(
    "attributes",
    [
        {KEY: 5},
        {KEY: ""},
        {BATCH_KEYS: "abc"},
        {BATCH_KEYS: [1, None, "a"], BATCH_WEIGHTS: ["x"]},
        {BATCH_KEYS: ["a"], BATCH_WEIGHTS: [float("inf")]},
        {BATCH_KEYS: ["a", "b"], BATCH_WEIGHTS: [float("nan"), -1]},
        {BATCH_KEYS: ["a"] * 5000},
        {BATCH_KEYS: []},
    ],
)
def test_values_that_are_no_keys_and_no_batch_do_no_harm(attributes: dict[str, object]) -> None:
    spans = [made(1, CHAT, 0, 100, key="a"), made(2, STEP, 10, 50)]
    spans[1].attributes = attributes  # type: ignore[assignment]
    trace = columns_of_spans(spans)
    joined = join_requests(trace)
    found = compute_ledger(trace, joined)
    assert sum(found.times_of_request(0).values()) == 100
    assert int(found.given_ns.sum()) in (0, 40)


def test_a_phase_by_the_name_of_no_phase_adds_up_to_the_wall() -> None:
    assert times_of([made(1, CHAT, 0, 100), made(2, Site("unknown", "phase"), 10, 50, 1)]) == {1: {"unknown": 100}}


def test_requests_of_years_are_added_up_exactly() -> None:
    years_ns = 1 << 61
    spans = [made(number, CHAT, 0, years_ns) for number in (1, 2, 3)]
    spans += [made(number + 3, TOKENISE, 0, years_ns - number, number) for number in (1, 2, 3)]
    assert times_of(spans)[3] == {"tokenise": years_ns - 3, "unknown": 3}


# Random engines against a reference, ns by ns.


def schedule(seed: int) -> list[Span]:
    """Requests whose keys may come again, and an engine that serves them in batches: late, never, or for too long."""
    rng = random.Random(seed)
    spans: list[Span] = []

    def add(site: Site, start: int, end: int, **more: object) -> Span:
        spans.append(made(len(spans) + 1, site, start, end, **more))  # type: ignore[arg-type]
        return spans[-1]

    keys = [f"r{number}" for number in range(rng.randint(1, 4))]
    for _ in range(rng.randint(1, 5)):
        start, key = rng.randrange(100), rng.choice(keys)
        request = add(CHAT, start, start + rng.randrange(120), key=key, thread=rng.choice([API, 3]))
        for _ in range(rng.randrange(4)):
            begin = rng.randrange(start, request.end_ns + 1)
            add(
                rng.choice([TOKENISE, WAIT, DETOKENISE]),
                begin,
                begin + rng.randrange(60),
                parent=request.span_id,
                thread=rng.choice([request.thread_id, ENGINE]),
            )
        if rng.random() < 0.4:
            request.error = "TimeoutError"
        if rng.random() < 0.4:
            further = rng.choice([key, f"{key} again"])
            begin = rng.randrange(start, request.end_ns + 1)
            span = add(SUBMIT, begin, begin + rng.randrange(40), parent=request.span_id, key=further)
            span.error = rng.choice([None, "ValueError"])
    for _ in range(rng.randrange(4)):
        begin = rng.randrange(150)
        add(ACCEPT, begin, begin + rng.randrange(20), thread=rng.choice([ENGINE, 4]), key=rng.choice([*keys, "x"]))
    keys += [f"{key} again" for key in keys if rng.random() < 0.5]
    at = rng.randrange(60)
    for _ in range(rng.randrange(8)):
        length = rng.randrange(30)
        batch = rng.sample([*keys, "nobody", "nobody"], rng.randint(1, len(keys)))
        weights = [rng.choice([0, 1, 2.5, 7]) for _ in batch] if rng.random() < 0.5 else None
        outer = add(STEP, at, at + length, thread=ENGINE, batch=batch, weights=weights)
        if rng.random() < 0.4:
            inner = rng.sample([*keys, "nobody"], rng.randint(1, len(keys)))
            begin, end = at + rng.randrange(10), at + length - rng.randrange(10)
            where = rng.choice([{"parent": outer.span_id, "thread": ENGINE}, {"thread": 5}])
            if begin <= end:
                add(COMPUTE, begin, end, batch=inner, **where)
        at += length + rng.choice([-5, 0, 0, 3, 10])
        at = max(at, 0)
    rng.shuffle(spans)
    return spans


def reference(trace: Columns, joined: Joined, place: int) -> Counter[str]:
    """Return the parts of the request's time, found by looking at each ns of it."""
    row = int(joined.rows[place])
    begin, end = int(trace.start_ns[row]), int(trace.end_ns[row])

    def clipped(at: int) -> tuple[int, int]:
        return min(max(int(trace.start_ns[at]), begin), end), max(begin, min(int(trace.end_ns[at]), end))

    served = joined.served
    batches = sorted(
        (*clipped(int(served.batch[pair])), pair) for pair in np.flatnonzero(served.request == place).tolist()
    )
    batches = [one for one in batches if one[0] < one[1]]
    work = [
        (*clipped(at), at)
        for at in np.flatnonzero(joined.of == place).tolist()
        if trace.sites[trace.site[at]].kind == "phase" and at not in served.batch
    ]
    # (begin, -end, whether it is a span, id, what it is, and where it is within the request)
    going: list[tuple[int, int, bool, int, str, int, int]] = []
    for start, finish, at, name in [(*one, trace.sites[trace.site[one[2]]].name) for one in work] + [
        (start, finish, int(served.batch[pair]), f"batch {pair}") for start, finish, pair in batches
    ]:
        began, ended = int(trace.start_ns[at]), int(trace.end_ns[at])
        going.append((began, -ended, True, int(trace.span_id[at]), name, start, finish))

    def between(start: int, finish: int, number: int, name: str) -> None:
        going.append((start, -finish, False, number, name, start, finish))

    handing = [
        (int(trace.start_ns[at]), int(trace.end_ns[at]), at)
        for at in np.flatnonzero(joined.of == place).tolist()
        if isinstance(key_of(trace, at), str) and at != row and at not in served.batch
    ]

    def handed(upto: int, *keys: str) -> int | None:
        its = [
            (start, -finish, int(trace.span_id[at]), finish, at)
            for start, finish, at in handing
            if start <= upto and (not keys or key_of(trace, at) in keys)
        ]
        if not its:
            return None
        start, _, _, finish, at = max(its)
        return max(finish if finish <= upto and trace.error[at] == -1 else start, begin)

    if not batches and trace.error[row] != -1 and len(served.batch) and handed(end) is not None:
        between(handed(end) or 0, end, 0, "queue")
    if batches:
        first = batches[0][0]
        edges = [edge for start, finish, _ in work for edge in (start, finish) if edge <= first]
        handed_ns = handed(first)
        between(max(edges, default=begin) if handed_ns is None else handed_ns, first, 0, "queue")
        by_key: dict[str, int] = {}
        for start, _, pair in batches:
            by_key.setdefault(served.key[pair], start)
        for key, start in list(by_key.items())[1:]:
            handed_ns = handed(start, key)
            if handed_ns is not None:
                between(handed_ns, start, 0, "queue")
        reach = list(accumulate((finish for _, finish, _ in batches), max))
        threads = set(trace.thread_id[served.batch].tolist())
        elsewhere = [one for one in work if int(trace.thread_id[one[2]]) not in threads]
        beside = [one for one in work if int(trace.thread_id[one[2]]) in threads]
        for number, ((_, _, _), (start, _, _)) in enumerate(pairwise(batches)):
            between(reach[number], start, 1, "stall")
        for number, until in enumerate(reach):
            after = min((start for start, _, _ in elsewhere if start >= until), default=None)
            is_last = number == len(batches) - 1
            if after is not None and (is_last or after <= batches[number + 1][0]):
                between(until, after, 2, "transport")
        arrived = min((start for start, _, _ in beside), default=None)
        if arrived is not None and arrived < first:
            sent = max((finish for _, finish, _ in elsewhere if finish <= arrived), default=None)
            if sent is not None:
                between(sent, arrived, 2, "transport")
    times: Counter[str] = Counter()
    in_batch: Counter[int] = Counter()
    for at in range(begin, end):
        last = max((one for one in going if one[5] <= at < one[6]), default=None)
        name = "unknown" if last is None else last[4]
        if name.startswith("batch "):
            in_batch[int(name[6:])] += 1
        else:
            times[name] += 1
    for pair, spent in in_batch.items():
        share = min(spent, shares(trace, joined)[pair])
        times["share of batches"] += share
        times["waiting in batches"] += spent - share
    return +times


def key_of(trace: Columns, row: int) -> object:
    """The key that a span bears."""
    return trace.attributes[row].get(KEY)


def going_on(trace: Columns, row: int) -> set[int]:
    """All instants of a span."""
    return set(range(int(trace.start_ns[row]), int(trace.end_ns[row])))


def left_to(trace: Columns, joined: Joined, row: int, instants: Callable[[int], set[Instant]]) -> set[Instant]:
    """The instants of a batch in which no batch goes on that began later and is below it or has a request of it."""
    served = joined.served

    def whom(batch: int) -> set[object]:
        pairs = np.flatnonzero(served.batch == batch).tolist()
        return {served.request[pair] if served.request[pair] != -1 else served.key[pair] for pair in pairs}

    def order(batch: int) -> tuple[int, int, int]:
        return int(trace.start_ns[batch]), -int(trace.end_ns[batch]), int(trace.span_id[batch])

    left = set(instants(row))
    for other in dict.fromkeys(served.batch.tolist()):
        is_below = trace.parent[other] == row and trace.thread_id[other] == trace.thread_id[row]
        if order(other) > order(row) and (is_below or whom(other) & whom(row)):
            left -= instants(other)
    return left


def shares(trace: Columns, joined: Joined) -> list[int]:
    """Return the share of each pair of a batch and a request, by fractions."""
    served = joined.served
    found: list[int] = []
    for row in dict.fromkeys(served.batch.tolist()):
        weights = served.weight[served.batch == row].tolist()
        length = len(left_to(trace, joined, row, partial(going_on, trace)))
        upto = [int(length * Fraction(sum(weights[:count]), sum(weights))) for count in range(len(weights) + 1)]
        found += [after - before for before, after in pairwise(upto)]
    return found


@given(st.integers(0, 2**32))
def test_the_parts_of_each_request_are_those_of_a_look_at_every_nanosecond(seed: int) -> None:
    trace = columns_of_spans(schedule(seed))
    joined = join_requests(trace)
    found = compute_ledger(trace, joined)
    assert found.given_ns.tolist() == shares(trace, joined)
    for place, row in enumerate(joined.rows.tolist()):
        assert found.times_of_request(place) == reference(trace, joined, place)
        assert sum(found.times_of_request(place).values()) == int(trace.total_ns[row])
        moments = list_turns(trace, joined, place)
        edges = [int(trace.start_ns[row]), *(edge for one in moments for edge in one[1:3]), int(trace.end_ns[row])]
        assert edges[::2] == edges[1::2]  # from its begin to its end, without a gap
        spent = Counter[str]()
        for one in moments:
            spent[one.part] += one.end_ns - one.start_ns
        in_batches = found.times_of_request(place).get("share of batches", 0) + found.times_of_request(place).get(
            "waiting in batches", 0
        )
        assert spent == Counter(
            {**found.times_of_request(place), "share of batches": in_batches, "waiting in batches": 0}
        ), "but for zeros"


def with_devices(spans: list[Span], seed: int) -> list[Span]:
    """Some of them with times on two devices, which overlap, and one that times nothing."""
    rng = random.Random(seed)
    for span in spans:
        for _ in range(rng.randrange(3)):
            start = span.start_ns + rng.randrange(20)
            end = start + rng.randrange(40)
            label = rng.choice(["exclusive", "overlapped", "captured"])
            span.device += (DeviceInterval(rng.randrange(2), 7, start, end, label),)
    return spans


@given(st.integers(0, 2**32))
def test_device_time_is_given_out_exactly_once(seed: int) -> None:
    spans = with_devices(schedule(seed), seed)
    batches = [span for span in spans if span.site in (STEP, COMPUTE)]
    for at, span in enumerate(batches):  # a layer below each batch has device time, too
        spans += with_devices([made(1000 + at, TOKENISE, span.start_ns, span.end_ns, span.span_id, ENGINE)], at)
    trace = columns_of_spans(spans)
    joined = join_requests(trace)
    found = compute_device_ledger(trace, joined)
    batch_of = {span.span_id: row for row, span in enumerate(spans) if span.site in (STEP, COMPUTE)}
    instants: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for row, span in enumerate(spans):
        batch = batch_of.get(span.span_id, batch_of.get(span.parent_id))
        owner = ("batch", batch) if batch is not None else ("request", int(joined.of[row]))
        for one in span.device:
            if one.label != "captured":
                instants.setdefault(owner, set()).update((one.device, at) for at in range(one.start_ns, one.end_ns))
    sums = Counter[int]()
    for pair, (batch, request) in enumerate(zip(joined.served.batch, joined.served.request, strict=True)):
        sums[int(batch)] += int(found.given_ns[pair])
        sums[-1 - int(request)] += int(found.given_ns[pair]) if request >= 0 else 0
    for row in batch_of.values():
        assert int(found.batch_ns[row]) == len(instants.get(("batch", row), ()))
        assert sums[row] == len(left_to(trace, joined, row, lambda at: instants.get(("batch", at), set())))
    for place in range(len(joined.rows)):
        assert int(found.own_ns[place]) == len(instants.get(("request", place), ()))
        assert int(found.shared_ns[place]) == sums[-1 - place]


@pytest.mark.slow
def test_a_hundred_thousand_batches_are_given_out_exactly_once() -> None:
    rng = np.random.default_rng(7)
    keys = [f"r{number}" for number in range(2000)]
    spans = [
        made(number + 1, CHAT, int(start), int(start) + int(rng.integers(1, 10**12)), key=key)
        for number, (key, start) in enumerate(zip(keys, rng.integers(0, 10**12, len(keys)), strict=True))
    ]
    at = 0
    for number in range(100_000):
        length, size = int(rng.integers(1, 10**9)), int(rng.integers(1, 17))
        batch = [keys[one] for one in rng.integers(0, len(keys), size)]
        weights = rng.integers(0, 10**6, size).tolist() if number % 2 else None
        spans.append(made(10_000 + number, STEP, at, at + length, thread=ENGINE, batch=batch, weights=weights))
        at += length
    trace = columns_of_spans(spans)
    joined = join_requests(trace)
    found = compute_ledger(trace, joined)
    sums = np.bincount(joined.served.batch, found.given_ns.astype(np.float64), len(trace)).astype(np.int64)
    assert (sums[len(keys) :] == trace.total_ns[len(keys) :]).all()
    for place, row in enumerate(joined.rows.tolist()):
        assert sum(found.times_of_request(place).values()) == int(trace.total_ns[row])
