"""The overhead governor: within the budget, without losing count, and back when there is room."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from instrument.governor import Budget, Governor
from instrument.spans import Site

COSTS_NS = dict.fromkeys(("call", "method", "wrapper", "coroutine", "generator", "scope"), 100.0)
SECOND_NS = 10**9


class Clock:
    """Moves the governor from second to second."""

    def __init__(self, recorder: Any, budget: float) -> None:
        self.now_ns = 0
        self.governor = Governor(recorder, budget, COSTS_NS, 0)

    def second(self) -> list[str]:
        """Let a second pass; names of what is muted then."""
        self.now_ns += SECOND_NS
        self.governor.step(self.now_ns)
        return [site.name for site in self.governor.muted]


def called(function: Callable[[], object], times: int) -> None:
    for _ in range(times):
        function()


# A tenth of 1 % of a second at 100 ns a call is 10,000 calls.
BUDGET = 0.001


def test_a_budget_may_be_changed_and_taken_back_and_is_looked_at_once_in_a_while(
    recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = recorder.wrap(lambda: None, Site("short"))
    asked: list[None] = []
    budget = Budget(recorder, lambda: asked.append(None) or COSTS_NS)
    budget.change(None)
    called(function, 1_000)
    budget.step()
    assert (recorder.muted, budget.notes(), asked) == (set(), [], [])
    budget.change(1e-9)
    budget.step()
    assert {site.name for site in recorder.muted} == {"short"}
    called(function, 3)
    assert "3 calls were not recorded" in budget.notes()[0]
    budget.release()
    budget.step()  # too soon to look again
    assert recorder.muted == set()
    monkeypatch.setattr("instrument.governor.STEP_NS", 0)
    called(function, 1_000)
    budget.step()
    assert len(recorder.muted) == 1
    budget.change(None)
    assert (recorder.muted, budget.notes()) == (set(), [])


def test_within_the_budget_nothing_is_muted(recorder: Any) -> None:
    function = recorder.wrap(lambda: None, Site("short"))
    clock = Clock(recorder, BUDGET)
    called(function, 9_000)
    assert clock.second() == []
    assert recorder.tally().calls == 9_000


def test_the_site_that_costs_most_and_tells_least_is_muted_counted_and_named(recorder: Any) -> None:
    short = recorder.wrap(lambda: None, Site("short", module="m", qualname="short"))
    long = recorder.wrap(lambda: time.sleep(0.001), Site("long"))
    clock = Clock(recorder, BUDGET)
    called(short, 15_000)
    called(long, 20)
    assert clock.second() == ["short"]
    called(short, 7)
    called(long, 3)
    assert recorder.tally().calls == 15_000 + 23
    (note,) = clock.governor.notes()
    assert note == (
        "short (m.short): 7 calls were not recorded, to stay within the budget of 0.001 of each thread's time"
    )


def test_a_muted_site_comes_back_when_load_falls_and_does_not_flap(recorder: Any) -> None:
    short = recorder.wrap(lambda: None, Site("short"))
    clock = Clock(recorder, BUDGET)
    called(short, 20_000)
    states = [clock.second()]
    for calls in (20_000, 9_500, 20_000, 7_000):
        called(short, calls)
        states.append(clock.second())
    assert states == [["short"], ["short"], ["short"], ["short"], []]
    called(short, 5)
    assert recorder.tally().calls == 20_005
    assert "it is recorded again" in clock.governor.notes()[0]


def test_each_thread_has_the_budget_for_itself(recorder: Any) -> None:
    import threading

    short = recorder.wrap(lambda: None, Site("short"))
    clock = Clock(recorder, BUDGET)
    threads = [threading.Thread(target=called, args=(short, 6_000)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clock.second() == []


def test_requests_coroutines_and_scopes_are_never_muted(recorder: Any) -> None:
    request = recorder.wrap(lambda: None, Site("request", "request"))
    clock = Clock(recorder, BUDGET)
    called(request, 20_000)
    for _ in range(20_000):
        with recorder.make_scope("scope"):
            pass
    assert clock.second() == []


def test_release_and_reset_bring_everything_back(recorder: Any) -> None:
    short = recorder.wrap(lambda: None, Site("short"))
    clock = Clock(recorder, BUDGET)
    called(short, 20_000)
    assert clock.second() == ["short"]
    clock.governor.release()
    short()
    assert recorder.tally().calls == 20_001
    recorder.reset()
    assert recorder.muted_calls() == {}
    assert recorder.tally().calls == 0


def test_a_layer_can_be_muted(recorder: Any) -> None:
    torch = pytest.importorskip("torch")
    from instrument.probes.layers import Layers
    from instrument.profile import LayerRule

    layers = Layers([LayerRule(types=("Identity",))], recorder)
    undo = layers.attach(torch)
    try:
        identity = torch.nn.Identity()
        clock = Clock(recorder, BUDGET)
        called(lambda: identity(1), 12_000)
        assert clock.second() == ["Identity"]
        assert identity(5) == 5
        assert list(recorder.muted_calls().values()) == [1]
    finally:
        undo()
