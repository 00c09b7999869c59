"""Sites that are muted and unmuted at any moment: parents, totals and counts stay right."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from readback import spans_in

from instrument.recorder import wrapping
from instrument.recorder.core import calls_by_site
from instrument.recording.spans import Site

CALLS = ("call", "fails", "scope", "kept scope", "attributes", "generator", "holding generator", "recursive")
TASKS = ("await", "gather", "async scope", "async generator")
OF_EACH = 2


@dataclass(eq=False)
class Tracked:
    """A span that is expected."""

    name: str
    parent: Tracked | None
    is_open: bool = True

    @property
    def path(self) -> tuple[str, ...]:
        return (*(self.parent.path if self.parent is not None else ()), self.name)


class Machine:
    """Makes random calls inside one another with a recorder, and keeps book of the spans that there must be.

    `switch` mutes and unmutes sites; it is called between any two steps.
    """

    def __init__(self, recorder: Any, chance: random.Random, switch: Callable[[Machine], None]) -> None:
        self.recorder = recorder
        self.chance = chance
        self.switch = switch
        self.made: Counter[str] = Counter()
        self.expected: list[Tracked] = []
        self.current: ContextVar[Tracked | None] = ContextVar("expected", default=None)
        self.sites: dict[str, Site] = {}
        self.functions: dict[str, Any] = {}
        for kind in (*CALLS, *TASKS):
            for number in range(OF_EACH):
                self._prepare(kind, f"{kind} {number}")
        self.left = 60

    def _prepare(self, kind: str, name: str) -> None:
        if "scope" in kind:
            self.sites[name] = self.recorder.find_or_make_scope_site(name, "user")
            return
        site = self.sites[name] = Site(name)
        bodies: dict[str, Any] = {
            "generator": self._numbers,
            "holding generator": self._numbers,
            "await": self._coroutine,
            "gather": self._coroutine,
            "async generator": self._async_numbers,
        }
        body = bodies.get(kind, self._function)

        # The wrapper of each kind is that of a function of this kind.
        if body == self._numbers:

            def generator() -> Iterator[int]:
                yield from self._numbers(name)

            made: Any = generator
        elif body == self._coroutine:

            async def coroutine(is_muted: bool) -> None:
                await self._coroutine(name, is_muted)

            made = coroutine
        elif body == self._async_numbers:

            async def async_generator() -> AsyncIterator[int]:
                async for number in self._async_numbers(name):
                    yield number

            made = async_generator
        else:

            def function() -> None:
                self._function(name)

            made = function
        attributes = (lambda args, kwargs: {"a": 1}) if kind == "attributes" else None
        self.functions[name] = self.recorder.wrap(made, site, attributes)

    # ---------------------------------------------------------------- what is expected

    def is_muted(self, name: str) -> bool:
        return self.sites[name] in self.recorder.passes

    def begin(self, name: str, *, is_muted: bool = False) -> Tracked | None:
        self.made[name] += 1
        if is_muted or self.is_muted(name):
            return None
        above = self.current.get()
        while above is not None and not above.is_open:
            above = above.parent
        tracked = Tracked(name, above)
        self.expected.append(tracked)
        return tracked

    @contextmanager
    def inside(self, tracked: Tracked | None) -> Iterator[None]:
        if tracked is None:
            yield
            return
        token = self.current.set(tracked)
        try:
            yield
        finally:
            self.current.reset(token)

    @contextmanager
    def track(self, name: str, *, is_muted: bool = False) -> Iterator[None]:
        tracked = self.begin(name, is_muted=is_muted)
        try:
            with self.inside(tracked):
                yield
        finally:
            if tracked is not None:
                tracked.is_open = False

    def goes_on(self, name: str, own: Tracked | None) -> Tracked | None:
        """Return the span of a generator at the begin of its next step."""
        if own is not None and self.is_muted(name):
            own.is_open = False
            return None
        return own

    # ---------------------------------------------------------------- bodies

    def _function(self, name: str) -> None:
        with self.track(name):
            self.body()
            if name.startswith("recursive") and self.left > 0:
                self.left -= 1
                self.functions[name]()
            if name.startswith("fails"):
                raise ValueError(name)

    def _numbers(self, name: str) -> Iterator[int]:
        own = self.begin(name)
        resumed = False
        for number in range(4):
            if resumed:
                own = self.goes_on(name, own)
            resumed = True
            with self.inside(own):
                self.body()
            if name.startswith("holding") and number == 1 and own is not None:
                # A scope that is open while the generator stands still keeps its span open, too.
                scope = self.recorder.scope("scope 0")
                with self.inside(own):
                    scope.__enter__()
                    held = self.begin("scope 0")
                    with self.inside(held):
                        self.body()
                self.switch(self)
                yield number
                if held is None:
                    own = self.goes_on(name, own)
                with self.inside(own), self.inside(held):
                    self.body()
                scope.__exit__(None, None, None)
                if held is not None:
                    held.is_open = False
                resumed = False  # what follows is still the same step
            else:
                yield number
        if own is not None:
            own.is_open = False

    async def _coroutine(self, name: str, is_muted: bool) -> None:
        with self.track(name, is_muted=is_muted):
            await asyncio.sleep(0)
            await self.async_body()

    async def _async_numbers(self, name: str) -> AsyncIterator[int]:
        own = self.begin(name)
        for number in range(3):
            if number:
                own = self.goes_on(name, own)
            with self.inside(own):
                await asyncio.sleep(0)
                await self.async_body()
            yield number
        if own is not None:
            own.is_open = False

    # ---------------------------------------------------------------- steps

    def body(self) -> None:
        for _ in range(self.chance.choice((0, 1, 1, 2))):
            self.run(self.chance.choice(CALLS))

    def run(self, kind: str) -> None:
        self.switch(self)
        if self.left <= 0:
            return
        self.left -= 1
        name = f"{kind} {self.chance.randrange(OF_EACH)}"
        if kind == "scope":
            with self.recorder.scope(name), self.track(name):
                self.body()
        elif kind == "kept scope":
            scope = self.recorder.scope(name)
            self.switch(self)
            for _ in range(2):
                with scope, self.track(name):
                    self.body()
        elif kind.endswith("generator"):
            for _ in self.functions[name]():
                self.switch(self)
                self.body()
        else:
            with suppress(ValueError):
                self.functions[name]()

    async def async_body(self) -> None:
        for _ in range(self.chance.choice((0, 1, 1, 2))):
            if self.chance.random() < 0.4:
                self.run(self.chance.choice(CALLS))
                continue
            self.switch(self)
            if self.left <= 0:
                return
            self.left -= 1
            kind = self.chance.choice(TASKS)
            name = f"{kind} {self.chance.randrange(OF_EACH)}"
            if kind == "await":
                await self.functions[name](self.is_muted(name))
            elif kind == "gather":  # a site that is muted at the call or at the first step has no span
                await asyncio.gather(*(self.functions[name](self.is_muted(name)) for _ in range(2)))
            elif kind == "async scope":
                async with self.recorder.scope(name):
                    with self.track(name):
                        await asyncio.sleep(0)
                        await self.async_body()
            else:
                async for _ in self.functions[name]():
                    self.switch(self)
                    await asyncio.sleep(0)

    def run_all(self, *, in_loop: bool) -> None:
        while self.left > 0:
            if in_loop:
                asyncio.run(self.async_body())
            else:
                self.run(self.chance.choice(CALLS))

    # ---------------------------------------------------------------- what came of it

    def check_counts(self) -> None:
        """Calls that were recorded and calls that passed are the calls that were made; nothing else happened."""
        recorded = Counter({site.name: calls for site, calls in calls_by_site(self.recorder).items()})
        passed = Counter({site.name: calls for site, calls in self.recorder.muted_calls().items()})
        assert recorded + passed == self.made
        assert (self.recorder.count_unusual_events(), self.recorder.losses()) == ({}, {})
        assert (self.recorder.open_rows(), self.recorder.current_span_id()) == ([], 0)

    def recorded_paths(self) -> list[tuple[str, ...]]:
        spans = {span.span_id: span for span in spans_in(self.recorder)}

        def path(span: Any) -> tuple[str, ...]:
            above = spans.get(span.parent_id)
            return (*(path(above) if above is not None else ()), span.site.name)

        return sorted(map(path, spans.values()))


def at_random(machine: Machine) -> None:
    """Mute or unmute a site from another thread, now and then."""
    if machine.chance.random() > 0.35:
        return
    site = machine.chance.choice(list(machine.sites.values()))
    act = machine.recorder.unmute if site in machine.recorder.passes else machine.recorder.mute
    thread = threading.Thread(target=act, args=(site,))
    thread.start()
    thread.join()


def fails(*args: object, **named: object) -> None:
    raise ValueError(args, named)


@pytest.mark.parametrize("wrapped", [lambda *args, **named: (args, named), fails, partial(dict, c=3), max])
def test_a_call_that_passes_takes_and_gives_what_the_bare_one_does(recorder: Any, wrapped: Any) -> None:
    site, layer = Site("muted"), (7, 8)
    passing = [recorder.wrap(wrapped, site)]
    if isinstance(wrapped, FunctionType):
        instances: tuple[dict[int, Site | None], ...] = ({id(layer): site}, {id(layer): None})
        passing += [wrapping.wrap_method(recorder, wrapped, sites, lambda _: None) for sites in instances]
    recorder.mute(site)
    for made in passing:
        for args, named in (((), {}), ((2,), {}), ((3, 1), {}), ((), {"key": str})):
            assert outcome(made, layer, *args, **named) == outcome(wrapped, layer, *args, **named)
    assert (recorder.muted_calls(), recorder.tally().calls) == ({site: 4 * len(passing[:2])}, 0)


def outcome(function: Callable[..., Any], *args: Any, **named: Any) -> object:
    try:
        return function(*args, **named)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.slow
@pytest.mark.parametrize("in_loop", [False, True], ids=["plain", "in a loop"])
@example(seed=724041)  # a coroutine is called while its site is muted, and begins afterwards
@given(seed=st.integers(0, 1 << 32))
def test_muting_at_any_point_keeps_the_parents_of_other_spans_right(
    make_recorder: Any, seed: int, in_loop: bool
) -> None:
    machine = Machine(make_recorder(), random.Random(seed), at_random)
    machine.run_all(in_loop=in_loop)
    machine.check_counts()
    assert machine.recorded_paths() == sorted(tracked.path for tracked in machine.expected)


@pytest.mark.parametrize("in_loop", [False, True], ids=["plain", "in a loop"])
def test_calls_recorded_and_calls_muted_are_the_calls_made_whenever_another_thread_mutes(
    make_recorder: Any, in_loop: bool
) -> None:
    recorder = make_recorder()
    machine = Machine(recorder, random.Random(1), lambda machine: None)
    is_over = threading.Event()
    switches = 0

    def switch() -> None:
        nonlocal switches
        chance = random.Random(2)
        while not is_over.is_set():
            site = chance.choice(list(machine.sites.values()))
            (recorder.unmute if site in recorder.passes else recorder.mute)(site)
            switches += 1

    thread = threading.Thread(target=switch)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        end = time.monotonic() + 60
        rounds = 0
        while rounds < 30 or (switches < 300 and time.monotonic() < end):
            machine.left = 60
            machine.run_all(in_loop=in_loop)
            rounds += 1
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval)
    machine.check_counts()
