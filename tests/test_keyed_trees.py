"""Requests by their keys over several processes, as rows of these come: who waits for whom, and who is let go."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from test_ledger import ACCEPT, CHAT, ENGINE, STEP, TOKENISE, made

from instrument.otlp.packing import Ids, identify, links_of
from instrument.otlp.processor import handed_over, keyed_requests, keyed_trees, waiting_spans
from instrument.otlp.processor.handed_over import SpansWithKeys
from instrument.otlp.processor.key_facts import BorneKey, KeyedRoot, KeyedSpan, KeyFacts, KeyFactsReader
from instrument.otlp.processor.keyed_requests import KeyedRequests
from instrument.otlp.processor.keyed_trees import KeyedTrees
from instrument.recording import export_place
from instrument.recording.mapped import ROWS
from instrument.recording.rows import REQUEST_BIT
from instrument.recording.spans import KEY, Span

REQUEST = 1000 | REQUEST_BIT


class Serving:
    """A process, with the keys of its open requests."""

    is_over = is_behind = False
    lag_ns = 0

    def __init__(self, requests: KeyedRequests, number: int) -> None:
        self.ids = Ids([number, number, number], str(number))
        requests.members[number] = self
        self.requests = requests
        self.trees = KeyedTrees(requests, self.ids)

    def open(self, key: str, root_id: int = REQUEST, *, sample: float = 1.0) -> None:
        """A request begins."""
        self.requests.learn(
            self.ids, KeyFacts([KeyedRoot(root_id, 0, None, None)], [BorneKey(root_id, key, 0)]), sample
        )

    def close(self) -> None:
        """All requests end."""
        self.requests.leave(self.ids)

    @property
    def undecided(self) -> int:
        return self.trees.undecided

    def take(
        self, *trees: list[Span], sample: float = 1.0, is_last: bool = False, at_once: bool = False
    ) -> list[list[int]]:
        """The spans that can be sent, by their ids."""
        self.sent = self.trees.take(trees, {}, sample, is_last=is_last, at_once=at_once)
        return [[span.span_id for span in tree] for tree in self.sent]


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> tuple[Serving, Serving]:
    """A front and an engine, of which nobody waits for what is not open."""
    for name in ("LOOKED_NS", "PATIENCE_NS"):
        monkeypatch.setattr(keyed_trees, name, 0)
    requests = KeyedRequests()
    return Serving(requests, 1), Serving(requests, 2)


def request(key: str, start_ns: int = 0, end_ns: int = 100) -> list[Span]:
    return [
        made(REQUEST, CHAT, start_ns, end_ns),
        made(2, TOKENISE, start_ns + 5, end_ns - 5, REQUEST, key=key),
    ]


def parents(sent: Sequence[Sequence[Span]], ids: Ids) -> dict[int, tuple[int, int]]:
    return {one[5].span_id: (one[0], one[2]) for tree in sent for one in identify(tree, ids)}


def test_a_span_with_a_key_waits_while_its_request_is_open_and_goes_below_it(both: tuple[Serving, Serving]) -> None:
    front, engine = both
    front.open("a")
    assert engine.take([made(10, STEP, 20, 30, thread=ENGINE, key="a"), made(20, TOKENISE, 21, 22, 10)]) == []
    assert engine.take() == []
    assert engine.trees.waiting == 2
    front.close()
    assert front.take(request("a")) == [[REQUEST, 2]]
    assert engine.take() == [[10, 20]]
    assert engine.trees.waiting == 0
    trace = front.ids.trace_id(REQUEST)
    assert parents(engine.sent, engine.ids) == {
        10: (trace, front.ids.span_id(2)),
        20: (trace, engine.ids.span_id(10)),
    }


def test_what_bears_the_key_of_another_request_within_what_is_done_for_one_goes_to_that(
    both: tuple[Serving, Serving],
) -> None:
    front, engine = both
    other = REQUEST + 2
    front.open("a")
    front.open("b", other)
    tree = [
        made(10, STEP, 20, 40, thread=ENGINE, key="a"),
        made(12, STEP, 25, 35, 10, thread=ENGINE, key="b"),
        made(14, TOKENISE, 26, 27, 12, thread=ENGINE),
        made(16, STEP, 36, 38, 10, thread=ENGINE, key="nobody's"),
    ]
    for span in tree:
        span.root_id = 10
    assert engine.take(tree) == []
    assert front.take(request("a"), [made(other, CHAT, 0, 100, key="b")]) == [[REQUEST, 2], [other]]
    assert engine.take() == [[10, 16], [12, 14]]
    assert parents(engine.sent, engine.ids) == {
        10: (front.ids.trace_id(REQUEST), front.ids.span_id(2)),
        16: (front.ids.trace_id(REQUEST), engine.ids.span_id(10)),
        12: (front.ids.trace_id(other), front.ids.span_id(other)),
        14: (front.ids.trace_id(other), engine.ids.span_id(12)),
    }


def test_a_request_whose_key_a_span_in_the_tree_of_another_one_bears_is_no_part_of_that(
    both: tuple[Serving, Serving],
) -> None:
    front, engine = both
    other = REQUEST + 2
    begun = [KeyedRoot(REQUEST, 0, None, None), KeyedRoot(other, 5, None, None)]
    keys = [BorneKey(REQUEST, "a", 0), BorneKey(other, "b", 5), BorneKey(REQUEST, "b", 20)]
    front.requests.learn(front.ids, KeyFacts(begun, keys), 1.0)
    assert engine.take([made(10, STEP, 45, 46, thread=ENGINE, key="b")]) == []
    ended = [KeyedRoot(REQUEST, 0, 100, None), KeyedRoot(other, 5, 80, None)]
    front.requests.learn(front.ids, KeyFacts(ended), 1.0)
    first = [made(REQUEST, CHAT, 0, 100, key="a"), made(4, TOKENISE, 20, 40, REQUEST, key="b")]
    assert front.take(first, [made(other, CHAT, 5, 80, key="b")]) == [[REQUEST], [other], [4]]
    assert parents(front.sent, front.ids) == {
        REQUEST: (front.ids.trace_id(REQUEST), 0),
        other: (front.ids.trace_id(other), 0),
        4: (front.ids.trace_id(other), front.ids.span_id(other)),
    }
    assert engine.take() == [[10]]
    assert parents(engine.sent, engine.ids)[10][0] == front.ids.trace_id(other)


OTHER = REQUEST + 2


def with_stray() -> list[Span]:
    """A request in whose tree a span bears the key of another one, and has one below it."""
    tree = [
        made(REQUEST, CHAT, 0, 100, key="a"),
        made(4, TOKENISE, 20, 40, REQUEST, key="b"),
        made(6, ACCEPT, 21, 22, 4),
        made(8, ACCEPT, 50, 60, REQUEST),
    ]
    for span in tree:
        span.root_id = REQUEST
    return tree


def begin(serving: Serving, root_id: int, start_ns: int, *keys: tuple[str, int], end_ns: int | None = None) -> None:
    borne = [BorneKey(root_id, key, at_ns) for key, at_ns in keys]
    serving.requests.learn(serving.ids, KeyFacts([KeyedRoot(root_id, start_ns, end_ns, None)], borne), 0.0)


def test_spans_of_a_request_that_is_known_too_late_stay_in_the_tree_that_they_lie_in_and_are_counted(
    both: tuple[Serving, Serving],
) -> None:
    front, engine = both
    begin(engine, REQUEST, 0, ("a", 0), ("b", 20), end_ns=100)
    assert engine.take(with_stray()) == [[REQUEST, 4, 6, 8]]
    assert front.requests.misplaced() == 0
    begin(front, OTHER, 10, ("b", 12))
    assert front.requests.misplaced() == 2
    assert front.requests.misplaced() == 0
    found = front.requests.of("b", 30)
    assert found is not None
    assert (found.instance, found.start_ns) == (front.ids.instance, 10)
    assert export_place.told({export_place.MISPLACED: 2}) == {
        "spans in the tree of another request that the OTLP export did not send with their own": 2
    }


@pytest.mark.parametrize("is_kept", [True, False])
def test_spans_in_the_tree_of_another_request_that_are_too_many_to_wait_are_counted(
    is_kept: bool, both: tuple[Serving, Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    front, engine = both
    begin(front, OTHER, 10, ("b", 12))
    begin(engine, REQUEST, 0, ("a", 0), ("b", 20), end_ns=100)
    trees = ([with_stray()], []) if is_kept else ([], [with_stray()])
    assert [len(its) for its in engine.trees.take(trees[0], {}, 1.0, let_go=trees[1])] == [2] * is_kept
    assert engine.trees.waiting == 2
    monkeypatch.setattr(keyed_trees, "MOST_WAITING", 0)
    assert engine.take() == [[4, 6]] * is_kept
    assert front.requests.misplaced() == 2
    assert engine.trees.waiting == 0
    if is_kept:
        assert parents(engine.sent, engine.ids)[4] == (engine.ids.trace_id(REQUEST), engine.ids.span_id(REQUEST))


def test_what_was_taken_from_a_request_that_was_let_go_is_not_sent_again_where_that_is_kept_later(
    both: tuple[Serving, Serving],
) -> None:
    front, engine = both
    begin(front, OTHER, 10, ("b", 12), end_ns=90)
    begin(engine, REQUEST, 0, ("a", 0), ("b", 20), end_ns=100)
    assert front.take([made(OTHER, CHAT, 10, 90, key="b")]) == [[OTHER]]
    sent = engine.trees.take([], {}, 1.0, let_go=[with_stray()])
    assert [[span.span_id for span in tree] for tree in sent] == [[4, 6]]
    assert parents(sent, engine.ids)[4] == (front.ids.trace_id(OTHER), front.ids.span_id(OTHER))
    late = made(12, ACCEPT, 30, 120, 4)
    late.root_id = REQUEST
    sent = engine.trees.take([], {}, 1.0, let_go=[[late]])
    assert parents(sent, engine.ids) == {12: (front.ids.trace_id(OTHER), engine.ids.span_id(4))}
    assert engine.take(with_stray()) == [[REQUEST, 8]]
    assert front.requests.misplaced() == 0


def test_keys_are_told_in_the_order_in_which_the_spans_that_bear_them_began() -> None:
    reader = KeyFactsReader(lambda _: CHAT)
    rows = np.zeros(3, ROWS)
    rows["span_id"], rows["start_ns"], rows["root_id"] = [2, 3, 4], [30, 10, 20], REQUEST
    details = {span_id: (-1, json.dumps({"attributes": {KEY: f"of {span_id}"}}).encode()) for span_id in (2, 3, 4)}
    reader.read_rows([(rows[:1], 1), (rows[1:], 2)], details)
    assert [one.key for one in reader.taken().keys] == ["of 3", "of 4", "of 2"]


def test_what_was_done_for_a_request_that_is_not_kept_is_let_go(both: tuple[Serving, Serving]) -> None:
    front, engine = both
    front.open("a")
    assert engine.take([made(10, STEP, 20, 30, thread=ENGINE, key="a")]) == []
    front.close()
    assert engine.take() == []
    assert engine.trees.waiting == 0


def test_a_key_that_nobody_knows_leaves_a_span_where_it_lies(both: tuple[Serving, Serving]) -> None:
    _, engine = both
    assert engine.take([made(10, STEP, 20, 30, thread=ENGINE, key="a")]) == [[10]]
    assert parents(engine.sent, engine.ids) == {10: (engine.ids.trace_id(10), 0)}
    assert engine.take([made(20, STEP, 20, 30, thread=ENGINE, key="a")], sample=0.0) == []


def test_a_batch_is_linked_to_requests_of_another_process(both: tuple[Serving, Serving]) -> None:
    front, engine = both
    assert front.take(request("a")) == [[REQUEST, 2]]
    assert engine.take([made(10, STEP, 20, 30, thread=ENGINE, batch=["a", "nobody"])]) == [[10]]
    [link] = links_of(engine.sent[0][0], engine.ids)
    assert (link.trace_id, link.span_id) == (front.ids.trace_id(REQUEST), front.ids.span_id(REQUEST))


def test_a_batch_is_linked_at_once_to_requests_that_go_on_and_are_kept_whatever_comes(
    both: tuple[Serving, Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOOKED_NS", "PATIENCE_NS"):
        monkeypatch.setattr(keyed_trees, name, 10**12)
    front, engine = both
    front.open("a")
    front.open("b", 2001, sample=0.0)
    assert engine.take([made(10, STEP, 20, 30, thread=ENGINE, batch=["a"])]) == [[10]]
    [link] = links_of(engine.sent[0][0], engine.ids)
    assert (link.trace_id, link.span_id) == (front.ids.trace_id(REQUEST), front.ids.span_id(REQUEST))
    assert engine.take([made(12, STEP, 20, 30, thread=ENGINE, batch=["b"])]) == []
    monkeypatch.setattr(keyed_trees, "PATIENCE_NS", 0)
    assert engine.take() == [[12]]
    [link] = links_of(engine.sent[0][0], engine.ids)
    assert link.span_id == front.ids.span_id(2001)


def test_a_batch_outside_of_the_sample_is_sent_once_all_of_its_requests_have_ended_and_one_is_kept(
    both: tuple[Serving, Serving],
) -> None:
    front, engine = both
    front.open("a", sample=0.0)
    front.open("b", 2001 | REQUEST_BIT, sample=0.0)
    loop = made(8, STEP, 1, 40, thread=ENGINE)
    batches = [made(10, STEP, 20, 30, 8, thread=ENGINE, batch=["a", "b", "nobody"])]
    batches.append(made(12, STEP, 30, 35, 8, thread=ENGINE, batch=["b"]))
    for batch in batches:
        batch.root_id = loop.span_id
    assert engine.take([*batches, loop], sample=0.0) == []
    assert front.take(request("a")) == [[REQUEST, 2]]
    assert engine.take(sample=0.0) == []
    assert engine.trees.waiting == 2
    assert engine.trees.is_sent_elsewhere(batches[1])
    front.close()
    assert engine.take(sample=0.0) == [[10]]
    assert parents(engine.sent, engine.ids) == {10: (engine.ids.trace_id(10), 0)}
    [link] = links_of(engine.sent[0][0], engine.ids)
    assert (link.trace_id, link.span_id) == (front.ids.trace_id(REQUEST), front.ids.span_id(REQUEST))
    assert engine.trees.waiting == 0
    assert not engine.trees.is_sent_elsewhere(batches[1])


def test_batches_outside_of_the_sample_that_are_too_many_to_wait_are_sent_where_a_request_is_kept_or_counted(
    both: tuple[Serving, Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting_spans, "MOST_KEYS", waiting_spans.OF_A_BATCH + 1)
    front, engine = both
    front.open("a", sample=0.0)
    front.open("b", 2001 | REQUEST_BIT, sample=0.0)
    assert front.take(request("a")) == [[REQUEST, 2]]
    first = [made(number, STEP, 20, 30, thread=ENGINE, batch=["a", "b"]) for number in (10, 12)]
    assert engine.take(*([one] for one in first), sample=0.0) == [[10], [12]]
    others = [made(number, STEP, 20, 30, thread=ENGINE, batch=["b"]) for number in (14, 16, 18)]
    assert engine.take(*([one] for one in others), sample=0.0) == []
    assert engine.trees.waiting == 1
    assert engine.requests.left_out() == 2
    assert engine.take(sample=0.0, is_last=True) == []
    assert (engine.trees.waiting, engine.requests.left_out()) == (0, 0)


def test_a_batch_is_linked_by_the_key_that_an_engine_has_of_its_own_for_a_request(
    both: tuple[Serving, Serving],
) -> None:
    front, engine = both
    front.open("a")
    taken_in = [made(10, STEP, 2, 9, thread=ENGINE, key="a"), made(12, TOKENISE, 3, 8, 10, key="a-own")]
    assert engine.take(taken_in) == []
    assert engine.take([made(14, STEP, 20, 30, thread=ENGINE, batch=["a-own"])]) == [[14]]
    assert [link.span_id for link in links_of(engine.sent[0][0], engine.ids)] == [front.ids.span_id(REQUEST)]


def test_a_request_of_an_engine_is_a_part_of_that_around_it(both: tuple[Serving, Serving]) -> None:
    front, engine = both
    front.open("a")
    assert engine.take(request("a", 20, 40)) == []
    assert front.take(request("a")) == [[REQUEST, 2]]
    assert engine.take() == [[REQUEST, 2]]
    trace = front.ids.trace_id(REQUEST)
    assert parents(engine.sent, engine.ids)[REQUEST] == (trace, front.ids.span_id(2))
    late = made(3, TOKENISE, 30, 60, REQUEST)
    assert engine.take([late]) == [[3]]
    assert parents(engine.sent, engine.ids)[3] == (trace, engine.ids.span_id(REQUEST))


def test_who_waits_for_a_request_waits_longer_where_its_process_is_read_later(both: tuple[Serving, Serving]) -> None:
    front, engine = both
    front.lag_ns = 10**12
    assert engine.take([made(10, STEP, 20, 30, thread=ENGINE, key="a")]) == []
    front.lag_ns = 0
    assert front.take(request("a")) == [[REQUEST, 2]]
    assert engine.take() == [[10]]
    assert parents(engine.sent, engine.ids)[10] == (front.ids.trace_id(REQUEST), front.ids.span_id(2))


def test_what_is_asked_for_at_once_waits_for_open_requests_alone(
    both: tuple[Serving, Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOOKED_NS", "PATIENCE_NS"):
        monkeypatch.setattr(keyed_trees, name, 10**12)
    front, engine = both
    front.open("b", 2001)
    waiting = [[made(10, STEP, 20, 30, thread=ENGINE, key="a")], [made(12, STEP, 20, 30, thread=ENGINE, key="b")]]
    assert engine.take(*waiting, [made(14, STEP, 20, 30, thread=ENGINE, batch=["a"])]) == []
    assert front.take(request("a")) == []
    assert engine.take(at_once=True) == []
    assert front.take(at_once=True) == [[REQUEST, 2]]
    assert engine.take(at_once=True) == [[10], [14]]
    assert engine.trees.waiting == 1


def test_of_spans_that_wait_the_oldest_go_on_without_their_requests(
    both: tuple[Serving, Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed_trees, "MOST_WAITING", 2)
    front, engine = both
    front.open("a")
    assert engine.take(*([made(number, STEP, 20, 30, thread=ENGINE, key="a")] for number in (10, 20, 30))) == [[10]]
    assert engine.take(is_last=True) == [[20], [30]]


def test_of_keys_that_are_too_many_those_of_requests_that_have_ended_go_first(
    both: tuple[Serving, Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed_requests, "KEYS_KNOWN", 3)
    front, engine = both
    front.open("old", 2001)
    for number in range(10):
        assert front.take([made(3001 + 2 * number, CHAT, 0, 100, key=f"r{number}")]) == [[3001 + 2 * number]]
    assert engine.take([made(10, STEP, 20, 30, thread=ENGINE, batch=["old", "r9", "r0"])]) == [[10]]
    spans = [front.ids.span_id(number) for number in (2001, 3019)]
    assert [link.span_id for link in links_of(engine.sent[0][0], engine.ids)] == spans
    assert front.requests.forgotten() == 0
    for number in range(4):
        front.open(f"open {number}", 4001 + 2 * number)
    assert front.requests.forgotten() == 2
    assert front.requests.forgotten() == 0


def test_spans_with_keys_are_bounded_and_forgotten_but_for_those_of_open_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, ids = SpansWithKeys(), Ids([1, 1, 1], "1")
    monkeypatch.setattr(handed_over, "UNDER_ONE_KEY", 64)
    for number in range(200):
        found.note(ids, [KeyedSpan(number, 2, "long", number, None)], {}, number, 3)
    assert [one.start_ns for one in found.of("long")] == list(range(136, 200)), "the newest of a key"
    found.note(ids, [KeyedSpan(199, 2, "long", 199, 900)], {}, 900, 3)
    assert [one.end_ns for one in found.of("long")][-1] == 900
    for number in range(10):
        found.note(ids, [KeyedSpan(300, 2, f"r{number}", 5, 6)], {}, 1000, 3)
    assert [key for key in ("long", "r0", "r7", "r8", "r9") if found.of(key)] == ["r7", "r8", "r9"]
    found.forget_old(1001 + handed_over.FORGOTTEN_NS, lambda key: key == "r8")
    assert [key for key in ("r7", "r8", "r9") if found.of(key)] == ["r8"]
