"""The outbox: which trees wait for their device times, how long, and by which clock they are sent."""

from __future__ import annotations

import time
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from instrument.recording.spans import DeviceInterval, Origin, Site, Span
from instrument.sessions import outbox
from instrument.sessions.outbox import Outbox

ON_DEVICE, ON_HOST = Site("decode", device=True), Site("tokenize")


class Exporter:
    """Stands for the one that sends: it keeps what it is offered."""

    def __init__(self) -> None:
        self.origin = Origin(1, "shop", 0, 0)
        self.offered: list[str] = []

    def offer(self, spans: list[Span]) -> None:
        self.offered.append(spans[0].site.name)


class Timing:
    """Stands for a device whose intervals up to `settled` are known."""

    def __init__(self) -> None:
        self.timer = object()
        self.intervals = SimpleNamespace(count=0, of=self.of)
        self.settled = 0
        self.joined: list[tuple[int, int]] = []

    def settled_ns(self) -> int:
        return self.settled

    def of(self, span_ids: Collection[int], since: int = 0) -> dict[int, tuple[DeviceInterval, ...]]:
        self.joined.append((len(span_ids), since))
        return {}


def tree(site: Site, end_ns: int) -> list[Span]:
    return [Span(site, 1, 0, 1, 1, 0, end_ns - 1_000, end_ns, 1_000, 1_000)]


@pytest.fixture
def parts() -> Any:
    exporter, timing = Exporter(), Timing()
    return Outbox(exporter, timing), exporter, timing  # type: ignore[arg-type]


def test_a_tree_waits_only_where_one_of_its_sites_is_timed_on_the_device(parts: Any) -> None:
    box, exporter, timing = parts
    end_ns = time.monotonic_ns()
    box.put(tree(ON_HOST, end_ns))
    box.put(tree(ON_DEVICE, end_ns))
    box.send_settled(is_last=False)
    assert (exporter.offered, timing.joined) == (["tokenize"], [])
    timing.settled = end_ns
    box.send_settled(is_last=False)
    assert (exporter.offered, timing.joined) == (["tokenize", "decode"], [(1, 0)])


@pytest.mark.parametrize("why", ["the last time", "long enough", "too many"])
def test_it_is_sent_without_its_device_times_where_it_cannot_wait(
    why: str, parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    box, exporter, _ = parts
    if why == "too many":
        monkeypatch.setattr(outbox, "SETTLE_NS", 10**15)  # or the first would have waited long enough on a busy machine
    now = time.monotonic_ns()
    trees = outbox.WAITING_SPANS + 1 if why == "too many" else 1
    for _ in range(trees):
        box.put(tree(ON_DEVICE, now - 2 * outbox.SETTLE_NS if why == "long enough" else now))
    box.send_settled(is_last=why == "the last time")
    assert exporter.offered == ["decode"]
    assert box.untimed == 1


def test_only_intervals_that_came_since_the_first_span_began_are_gone_through(parts: Any) -> None:
    box, _, timing = parts
    timing.intervals.count = 7
    box.send_settled(is_last=False)  # at this look there were seven
    timing.intervals.count = 9
    box.put(tree(ON_DEVICE, time.monotonic_ns() + 2_000))
    box.send_settled(is_last=True)
    assert timing.joined == [(1, 7)]


def test_a_forked_child_sends_nothing_that_waited_in_its_parent(parts: Any) -> None:
    box, exporter, _ = parts
    box.put(tree(ON_DEVICE, time.monotonic_ns()))
    box.after_fork_in_child()
    box.send_settled(is_last=True)
    assert exporter.offered == []
