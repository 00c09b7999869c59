"""The overhead governor: within the budget, without losing count, and back when there is room."""

from __future__ import annotations

import contextlib
import sys
import time
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from trees import tree

from instrument.instrumentors.loaders import _NextItem
from instrument.recorder.core import calls_by_site
from instrument.recorder.governor import Budget, Governor
from instrument.recording.spans import Site

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
        self.governor.enforce_budget(self.now_ns)
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
    budget.enforce_budget()
    assert (recorder.passes, budget.notes(), asked) == ({}, [], [])
    budget.change(1e-9)
    budget.enforce_budget()
    assert {site.name for site in recorder.passes} == {"short"}
    called(function, 3)
    assert "3 calls were not recorded" in budget.notes()[0]
    budget.unmute_all_sites()
    budget.enforce_budget()  # too soon to look again
    assert recorder.passes == {}
    monkeypatch.setattr("instrument.recorder.governor.STEP_NS", 0)
    called(function, 1_000)
    budget.enforce_budget()
    assert len(recorder.passes) == 1
    budget.change(None)
    assert (recorder.passes, budget.notes()) == ({}, [])


def test_within_the_budget_nothing_is_muted(recorder: Any) -> None:
    function = recorder.wrap(lambda: None, Site("short"))
    clock = Clock(recorder, BUDGET)
    called(function, 9_000)
    assert clock.second() == []
    assert recorder.tally().calls == 9_000


def test_the_site_that_costs_most_and_reports_least_is_muted_counted_and_named(recorder: Any) -> None:
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
        "short (m.short): 7 calls were not recorded, to stay within the budget of 0.1 % of each thread's time"
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


def test_release_and_reset_bring_everything_back(recorder: Any) -> None:
    short = recorder.wrap(lambda: None, Site("short"))
    clock = Clock(recorder, BUDGET)
    called(short, 20_000)
    assert clock.second() == ["short"]
    clock.governor.unmute_all_sites()
    short()
    assert recorder.tally().calls == 20_001
    recorder.reset()
    assert recorder.muted_calls() == {}
    assert recorder.tally().calls == 0


def test_a_layer_can_be_muted(recorder: Any, torch: Any) -> None:
    from instrument.instrumentors.layers import Layers
    from instrument.profile.model import LayerRule

    layers = Layers([LayerRule(types=("Identity",))], recorder)
    undo = layers.attach(torch)
    try:
        identity = torch.nn.Identity()
        clock = Clock(recorder, BUDGET)
        called(lambda: identity(1), 12_000)
        assert clock.second() == ["Identity"]
        assert identity(5) == 5
        assert list(recorder.muted_calls().values()) == [1]
        (site,) = recorder.passes
        attach = layers.detach(site)
        assert attach is not None
        assert layers.detach(site) is None
        assert identity(5) == 5
        assert list(recorder.muted_calls().values()) == [1]
        attach()
        identity(5)
        assert list(recorder.muted_calls().values()) == [2]
    finally:
        undo()


class Detaching:
    """Takes probes off, as a selection does: what is off is called bare."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.off: set[str] = set()

    def __call__(self, site: Site) -> Callable[[], None] | None:
        if site.name not in self.names:
            return None
        self.off.add(site.name)
        return lambda: self.off.discard(site.name)


def test_sites_over_the_budget_when_only_counted_are_detached_named_and_tried_again(
    recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = recorder.wrap(lambda: None, Site("hot", module="m", qualname="hot"))
    detaching = Detaching("hot")
    clock = Clock(recorder, BUDGET)
    clock.governor = Governor(recorder, BUDGET, COSTS_NS, 0, {"call": 50.0}, detaching)
    called(hot, 100_000)
    assert clock.second() == ["hot"]
    assert (detaching.off, clock.governor.is_busy) == (set(), True)
    called(hot, 30_000)  # 1.5 ms of counting, of 1 ms
    clock.second()
    assert detaching.off == {"hot"}
    (note,) = clock.governor.notes()
    assert note.startswith("hot (m.hot): its probe is off since 2")
    assert "the budget of 0.1 % of each thread's time; 30000 calls were counted" in note
    load = 1_000

    def sleep(seconds: float) -> None:
        assert detaching.off == set()  # while it is looked at
        called(hot, load)

    monkeypatch.setattr("instrument.recorder.governor.time.sleep", sleep)
    tried = []
    for second in range(100):
        before = recorder.muted_calls()
        clock.second()
        if recorder.muted_calls() != before:
            tried.append(second)
            assert detaching.off == {"hot"}
    assert tried == [29, 89]  # twice as late each time
    load = 0
    for _ in range(120):
        clock.second()
    assert (detaching.off, clock.governor.muted) == (set(), {})
    assert "it is recorded again" in clock.governor.notes()[0]
    hot()
    assert recorder.tally().calls == 100_001


def test_the_earlier_cost_of_counting_is_not_reported_for_a_detached_probe(recorder: Any) -> None:
    hot = recorder.wrap(lambda: None, Site("hot"))
    clock = Clock(recorder, BUDGET)
    clock.governor = Governor(recorder, BUDGET, COSTS_NS, 0, {"call": 50.0}, Detaching("hot"))
    for calls in (100_000, 15_000):  # 0.75 ms of counting, of 1 ms
        called(hot, calls)
        clock.second()
    assert "to count its calls alone cost 0.075 %" in clock.governor.notes()[1]
    called(hot, 30_000)
    clock.second()
    (note,) = clock.governor.notes()
    assert "its probe is off since" in note
    for _ in range(2):  # by whoever still holds it
        called(hot, 30_000)
        clock.second()
    assert "its probe is off, but some references still call it" in clock.governor.notes()[1]


def test_a_probe_that_was_tried_in_a_pause_of_the_load_is_tried_later_the_next_time(
    recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = recorder.wrap(lambda: None, Site("hot"))
    detaching = Detaching("hot")
    clock = Clock(recorder, BUDGET)
    clock.governor = Governor(recorder, BUDGET, COSTS_NS, 0, {"call": 50.0}, detaching)
    monkeypatch.setattr("instrument.recorder.governor.time.sleep", lambda seconds: None)  # nothing is called meanwhile
    tried = []
    for second in range(100):
        if not detaching.off:
            called(hot, 50_000)
        clock.second()
        if not detaching.off:
            tried.append(second)
    assert tried == [0, 31, 92]  # in second 0 it is muted


def test_probes_that_cannot_be_detached_stay_muted_and_detached_ones_return_at_the_end(recorder: Any) -> None:
    hot, other = (recorder.wrap(lambda: None, Site(name)) for name in ("hot", "other"))
    detaching = Detaching("other")
    governor = Governor(recorder, BUDGET, COSTS_NS, 0, {"call": 50.0}, detaching)
    for second in (1, 2):
        called(hot, 100_000)
        called(other, 90_000)
        governor.enforce_budget(second * SECOND_NS)
    assert {site.name for site in governor.muted} == {"hot", "other"}
    assert detaching.off == {"other"}
    governor.unmute_all_sites()
    assert (detaching.off, recorder.passes) == (set(), {})


def test_more_calls_than_there_can_be_room_for_are_looked_at_soon(recorder: Any) -> None:
    function = recorder.wrap(lambda: None, Site("short"))
    governor = Governor(recorder, BUDGET, COSTS_NS, 0)
    governor.enforce_budget(SECOND_NS)
    assert not governor.is_busy
    assert not governor.may_exceed_budget(SECOND_NS + SECOND_NS // 20)
    called(function, 1_000)
    assert governor.may_exceed_budget(SECOND_NS + SECOND_NS // 20)


def test_a_functions_probe_is_detached_and_attached_again_under_all_its_names(
    select: Callable[[str], Any], recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, other = types.ModuleType("hot_module"), types.ModuleType("other_module")
    exec("def hot():\n    return 5\n\nclass Engine:\n    def step(self):\n        return hot()\n", vars(module))
    for made in (module, other):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    bare, bare_step = vars(module)["hot"], vars(module)["Engine"].step
    vars(other)["copied"] = bare
    selection = select('functions: [{match: ["hot_module:hot", "hot_module:Engine.step"]}]')
    (site,) = selection.find_sites("hot_module:hot")
    (step,) = selection.find_sites("hot_module:Engine.step")
    recording = vars(module)["hot"]
    assert recording is not bare
    assert vars(other)["copied"] is recording
    attach, attach_step = selection.detach(site), selection.detach(step)
    assert vars(module)["hot"] is vars(other)["copied"] is bare
    assert vars(vars(module)["Engine"])["step"] is bare_step
    assert selection.detach(site) is None
    attach()
    assert vars(module)["hot"] is vars(other)["copied"] is recording
    attach_step()
    assert vars(module)["Engine"]().step() == 5
    assert {row.path[-1].name for row in recorder.tally().iterate_totals()} == {"hot", "Engine.step"}
    attach = selection.detach(site)
    selection.detach_all()
    attach()  # too late: it is nobody's any more
    assert vars(module)["hot"] is vars(other)["copied"] is bare
    assert selection.detach(Site("never seen")) is None


SHAPES = ("call", "wrapper", "coroutine", "generator", "async generator", "scope", "kept scope", "loader")


def user_of(recorder: Any, shape: str) -> tuple[Callable[[], object], str]:
    """Return a function that uses a probe of a shape once, and the name of its site."""
    site = Site("used")
    if shape == "call":
        return recorder.wrap(lambda: None, site), "used"
    if shape == "wrapper":
        return recorder.wrap(lambda: None, site, lambda args, kwargs: {}), "used"
    if shape == "scope":

        def with_scope() -> None:
            with recorder.scope("used"):
                pass

        return with_scope, "used"
    if shape == "kept scope":
        kept = recorder.scope("used", attributes={"a": 1})

        def with_kept() -> None:
            with kept:
                pass

        return with_kept, "used"
    if shape == "loader":

        def wait() -> None:
            with _NextItem(recorder, site):
                pass

        return wait, "used"

    async def coroutine() -> None: ...

    def generator() -> Iterator[int]:
        yield 1

    async def async_generator() -> AsyncIterator[int]:
        yield 1

    made = recorder.wrap({"coroutine": coroutine, "generator": generator}.get(shape, async_generator), site)

    def drive() -> None:
        thing = made()
        if shape == "generator":
            list(thing)
            return
        for step in [thing] if shape == "coroutine" else [thing.__anext__(), thing.__anext__()]:
            with contextlib.suppress(StopIteration, StopAsyncIteration):
                step.send(None)

    return drive, "used"


@pytest.mark.parametrize("shape", SHAPES)
def test_every_probe_is_muted_where_its_thread_is_over_the_budget_counted_and_comes_back(
    recorder: Any, shape: str
) -> None:
    use, name = user_of(recorder, shape)
    if shape == "loader":
        use()
        recorder.allow_muting(next(iter(calls_by_site(recorder))), shape="wrapper")
        recorder.reset()
    clock = Clock(recorder, BUDGET)
    called(use, 1_000)
    assert clock.second() == []
    called(use, 10_500)
    assert clock.second() == [name]
    called(use, 300)
    assert (recorder.tally().calls, list(recorder.muted_calls().values())) == (11_500, [300])
    assert clock.governor.notes()[0].startswith("used (")
    assert clock.second() == []
    use()
    assert recorder.tally().calls == 11_501
    assert recorder.count_unusual_events() == {}


def test_requests_and_steps_are_recorded_over_the_budget_and_named(recorder: Any) -> None:
    request = recorder.wrap(lambda: None, Site("request", "request"))
    step = recorder.wrap(lambda: None, Site("step", "step"))
    inside = recorder.wrap(request, Site("inside"))
    clock = Clock(recorder, BUDGET)
    called(inside, 20_000)
    called(step, 20_000)
    assert clock.second() == ["inside"]
    assert recorder.tally().calls == 60_000
    notes = clock.governor.describe_unrecorded()
    assert [note.partition(":")[0] for note in notes] == ["request (request)", "step (step)"]
    assert (
        "its spans cost 0.2 % of a thread's time, of the budget of 0.1 % of each thread's time; requests are"
        in notes[0]
    )


def test_a_scope_opened_by_hand_is_never_muted(recorder: Any) -> None:
    clock = Clock(recorder, BUDGET)
    for _ in range(20_000):
        outer = recorder.scope("outer").start()
        inner = recorder.scope("inner").start()
        inner.end()
        outer.end()
    assert clock.second() == []
    assert sorted(note.partition(" (")[0] for note in clock.governor.notes()) == ["inner", "outer"]
    assert all("it cannot be muted" in note for note in clock.governor.notes())


def test_a_scope_whose_counting_costs_too_much_is_named_with_what_it_costs(recorder: Any) -> None:
    clock = Clock(recorder, BUDGET)
    clock.governor = Governor(recorder, BUDGET, COSTS_NS, 0, {"scope": 50.0}, lambda site: None)

    def use() -> None:
        with recorder.scope("hot"):
            pass

    for _ in range(3):
        called(use, 40_000)
        assert clock.second() == ["hot"]
    named, costs = clock.governor.notes()
    assert "80000 calls were not recorded" in named
    assert "to count its calls alone cost 0.2 % of a thread's time, of the budget of 0.1 %" in costs
    assert "a scope cannot be removed at run time" in costs


def test_the_cost_of_counting_reduces_the_budget_of_other_sites_down_to_half(recorder: Any) -> None:
    clock = Clock(recorder, BUDGET)
    clock.governor = Governor(recorder, BUDGET, COSTS_NS, 0, {"scope": 50.0}, lambda site: None)
    first, second = (recorder.wrap(lambda: None, Site(name)) for name in ("first", "second"))

    def use() -> None:
        with recorder.scope("hot"):
            pass

    called(use, 40_000)
    assert clock.second() == ["hot"]
    called(use, 40_000)  # 2 ms of counting, of 1 ms
    called(first, 4_000)
    assert clock.second() == ["hot"]
    called(use, 40_000)
    called(first, 4_000)
    called(second, 3_000)
    assert len(clock.second()) == 2  # either will do


def test_a_generator_that_goes_on_for_ever_is_seen_by_its_steps_and_goes_on_without_a_span(recorder: Any) -> None:
    def numbers() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    clock = Clock(recorder, BUDGET)
    clock.governor = Governor(recorder, BUDGET, {**COSTS_NS, "step": 50.0}, 0)
    inside = recorder.wrap(lambda: None, Site("inside"))
    endless = recorder.wrap(numbers, Site("endless"))()
    with recorder.scope("around"):
        assert [next(endless) for _ in range(10)] == list(range(10))
        assert clock.second() == []
        for _ in range(30_000):
            next(endless)
        assert clock.second() == ["endless"]
        assert next(endless) == 30_010
        inside()
    assert tree(recorder) == "around\n  endless\n  inside"
    assert recorder.muted_calls() == {}  # it was begun, and has a row
    (note,) = clock.governor.notes()
    assert note.startswith("endless (user): 1 generators went on without their span, to stay within the budget")
    endless.close()
    assert recorder.count_unusual_events() == {}


def test_a_site_that_has_to_be_muted_again_soon_waits_longer_each_time(recorder: Any) -> None:
    short = recorder.wrap(lambda: None, Site("short"))
    clock = Clock(recorder, BUDGET)
    states = []
    for _ in range(16):
        if not recorder.passes:
            called(short, 20_000)  # a burst
        states.append(len(clock.second()))
    assert states == [1, 0, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1]
