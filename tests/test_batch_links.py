"""Batches on their way to a collector: which requests they are linked to, and how long they wait for that."""

from __future__ import annotations

import threading

import pytest
from otlp_receiver import receiver
from test_ledger import CHAT, ENGINE, STEP, TOKENISE, made

import instrument
from instrument.profile.keys import loads
from instrument.recording.remote_parents import LinkedRequest, RemoteParent
from instrument.recording.spans import Span
from instrument.sessions import batch_links
from instrument.sessions.batch_links import BatchLinks


class Sent(list[list[Span]]):
    """What has been handed on."""

    def links(self) -> dict[int, list[int]]:
        return {tree[0].span_id: [link.span_id for link in tree[0].links] for tree in self}


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def links(sent: Sent) -> BatchLinks:
    return BatchLinks(sent.append)


def test_a_batch_goes_on_with_its_links_when_the_last_of_its_requests_is_kept(links: BatchLinks, sent: Sent) -> None:
    links.put([made(10, STEP, 20, 30, thread=ENGINE, batch=["a", "b", "a"])])
    links.put([made(11, TOKENISE, 20, 30)])
    assert sent.links() == {11: []}
    request = made(1, CHAT, 0, 100, key="a")
    request.remote = RemoteParent(7, 8)
    links.put([request, made(2, TOKENISE, 1, 2, 1)])
    assert 10 not in sent.links()
    links.put([made(3, CHAT, 5, 50), made(4, TOKENISE, 6, 7, 3, key="b")])  # whose key lies below it
    assert sent.links() == {11: [], 1: [], 10: [1, 3], 3: []}
    [batch] = next(tree for tree in sent if tree[0].span_id == 10)
    assert batch.links == (LinkedRequest(1, 1, RemoteParent(7, 8)), LinkedRequest(3, 3, None))
    links.put([made(12, STEP, 40, 45, thread=ENGINE, batch=["b"])])
    assert sent.links()[12] == [3]


def test_who_had_the_key_before_is_not_who_has_it_now(links: BatchLinks, sent: Sent) -> None:
    links.put([made(1, CHAT, 0, 100, key="a")])
    links.put([made(10, STEP, 220, 230, thread=ENGINE, batch=["a"])])
    assert 10 not in sent.links()
    links.put([made(2, CHAT, 200, 300, key="a")])
    assert sent.links()[10] == [2]


def test_it_does_not_wait_for_ever_nor_do_many(links: BatchLinks, sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    links.put([made(10, STEP, 20, 30, thread=ENGINE, batch=["a", "nobody"])])
    links.put([made(1, CHAT, 0, 100, key="a")])
    links.send_due(is_last=False)
    assert 10 not in sent.links()
    monkeypatch.setattr(batch_links, "WAIT_NS", 0)
    links.send_due(is_last=False)
    assert sent.links()[10] == [1]
    monkeypatch.setattr(batch_links, "WAIT_NS", 10**18)
    monkeypatch.setattr(batch_links, "MOST_SPANS", 2)
    for number in range(20, 24):
        links.put([made(number, STEP, 20, 30, thread=ENGINE, batch=["nobody"])])
    assert [number in sent.links() for number in range(20, 24)] == [True, True, False, False]
    links.send_due(is_last=True)
    assert set(sent.links()) == {1, 10, 20, 21, 22, 23}


def test_only_the_newest_keys_are_remembered(links: BatchLinks, sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_links, "KEYS_KNOWN", 2)
    for number, key in enumerate("abc", 1):
        links.put([made(number, CHAT, 0, 100, key=key)])
    links.put([made(10, STEP, 20, 30, thread=ENGINE, batch=["a", "b", "c"])])
    links.send_due(is_last=True)
    assert sent.links()[10] == [2, 3]


def test_a_collector_gets_the_links_of_a_process_that_serves_batches_itself() -> None:
    with receiver() as found:
        text = f"capture: {{sample: 1}}\nexport: {{otlp: {{endpoint: 'http://127.0.0.1:{found.http_port}'}}}}"
        instrument.start(loads(text, environ={}))

        def serve_batch() -> None:
            with instrument.scope("step", batch=["r1", "r2"]):
                pass

        with instrument.scope("first", kind="request", key="r1"):
            step = threading.Thread(target=serve_batch)
            step.start()
            step.join()
        instrument.stop()
        spans = {span.name: span for span in found.spans()}
        assert spans["step"].parent_id == 0
        assert spans["step"].links == ((spans["first"].trace_id, spans["first"].span_id),)
