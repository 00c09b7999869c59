"""Parentage against a reference: random programs of threads, tasks, executors, generators and exceptions.

Every step of a program opens a span with the recorder and, beside it, one with a tracker that is plainly right: a
context variable set and reset at every step, a list of what happened. The trees must be equal. `PROGRAMS` in the
environment says how many programs (10,000 take some minutes).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import itertools
import os
import random
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from instrument.spans import Site

PROGRAMS = int(os.environ.get("PROGRAMS", "300"))

SYNC = ("call", "scope", "fails", "generator", "partial", "thread", "copied thread", "run in copy", "pool")
ASYNC = (
    "await",
    "gather",
    "task",
    "late task",
    "async scope",
    "async generator",
    "async partial",
    "to_thread",
    "cancel",
)


@dataclass
class Step:
    """One step of a program: what it does and what it does inside."""

    name: str
    kind: str
    inside: list[Step] = field(default_factory=list)
    repeats: int = 1


def make_steps(chance: random.Random, names: Iterator[int], depth: int, *, in_loop: bool) -> list[Step]:
    steps = []
    for _ in range(chance.randint(0 if depth < 4 else 1, 3)):
        kinds = SYNC + ASYNC if in_loop else SYNC
        kind = chance.choice(kinds)
        step = Step(f"{kind} {next(names)}", kind, repeats=chance.choice((1, 1, 2)))
        if depth:
            runs_async = kind in ASYNC and kind != "to_thread"
            step.inside = make_steps(chance, names, depth - 1, in_loop=runs_async)
        steps.append(step)
    return steps


class Expected(Exception):
    pass


class Machine:
    """Runs programs on a recorder and on the reference at once."""

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.current: contextvars.ContextVar[int] = contextvars.ContextVar("reference", default=0)
        self.ids = itertools.count(1)
        self.edges: list[tuple[int, int, str]] = []
        self.background: list[asyncio.Task[None]] = []

    def track(self, name: str) -> contextvars.Token[int]:
        own = next(self.ids)
        self.edges.append((own, self.current.get(), name))
        return self.current.set(own)

    # ------------------------------------------------ bodies

    def body(self, steps: list[Step]) -> None:
        for step in steps:
            for _ in range(step.repeats):
                self.run(step)

    async def async_body(self, steps: list[Step]) -> None:
        for step in steps:
            for _ in range(step.repeats):
                if step.kind in ASYNC:
                    await self.run_async(step)
                else:
                    self.run(step)

    def wrapped(self, function: Any, step: Step) -> Any:
        return self.recorder.wrap(function, Site(step.name))

    # ------------------------------------------------ steps without a loop

    def function_of(self, step: Step, *, fails: bool = False) -> Any:
        def function() -> None:
            token = self.track(step.name)
            try:
                self.body(step.inside)
                if fails:
                    raise Expected
            finally:
                self.current.reset(token)

        return self.wrapped(function, step)

    def run(self, step: Step) -> None:
        function = self.function_of(step, fails=step.kind == "fails")
        if step.kind == "call":
            function()
        elif step.kind == "fails":
            with pytest.raises(Expected):
                function()
        elif step.kind == "scope":
            with self.recorder.make_scope(step.name):
                token = self.track(step.name)
                self.body(step.inside)
                self.current.reset(token)
        elif step.kind in ("generator", "partial"):
            self.consume(step)
        elif step.kind in ("thread", "copied thread"):
            context = contextvars.Context() if step.kind == "thread" else contextvars.copy_context()
            thread = threading.Thread(target=context.run, args=(function,))
            thread.start()
            thread.join()
        elif step.kind == "run in copy":
            contextvars.copy_context().run(function)
        elif step.kind == "pool":
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                pool.submit(contextvars.copy_context().run, function).result()
                pool.submit(function).result()

    def consume(self, step: Step) -> None:
        own = 0

        def numbers() -> Iterator[int]:
            nonlocal own
            own = next(self.ids)
            self.edges.append((own, self.current.get(), step.name))
            for number in range(3):
                token = self.current.set(own)
                self.body(step.inside if number == 1 else [])
                self.current.reset(token)
                yield number

        generator = self.wrapped(numbers, step)()
        for number in generator:
            self.run(Step(step.name + " consumer", "call"))
            if step.kind == "partial" and number == 1:
                break
        generator.close()

    # ------------------------------------------------ steps under a loop

    def coroutine_of(self, step: Step) -> Any:
        async def coroutine() -> None:
            token = self.track(step.name)
            try:
                await asyncio.sleep(0)
                await self.async_body(step.inside)
            finally:
                self.current.reset(token)

        return self.wrapped(coroutine, step)

    async def run_async(self, step: Step) -> None:
        coroutine = self.coroutine_of(step)
        if step.kind == "await":
            await coroutine()
        elif step.kind == "gather":
            await asyncio.gather(coroutine(), coroutine())
        elif step.kind == "task":
            await asyncio.create_task(coroutine())
        elif step.kind == "late task":
            # Made inside a plain function; runs when that has returned, often when its parent has, too.
            maker = Step(step.name + " maker", "call")

            def make() -> None:
                token = self.track(maker.name)
                self.background.append(asyncio.get_running_loop().create_task(coroutine()))
                self.current.reset(token)

            self.wrapped(make, maker)()
        elif step.kind == "cancel":
            task = asyncio.create_task(coroutine())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        elif step.kind == "async scope":
            async with self.recorder.make_scope(step.name):
                token = self.track(step.name)
                await asyncio.sleep(0)
                await self.async_body(step.inside)
                self.current.reset(token)
        elif step.kind in ("async generator", "async partial"):
            await self.consume_async(step)
        elif step.kind == "to_thread":
            await asyncio.to_thread(self.function_of(step))

    async def consume_async(self, step: Step) -> None:
        async def numbers() -> AsyncIterator[int]:
            own = next(self.ids)
            self.edges.append((own, self.current.get(), step.name))
            for number in range(3):
                token = self.current.set(own)
                await asyncio.sleep(0)
                await self.async_body(step.inside if number == 1 else [])
                self.current.reset(token)
                yield number

        generator = self.wrapped(numbers, step)()
        async for number in generator:
            self.run(Step(step.name + " consumer", "call"))
            if step.kind == "async partial" and number == 1:
                break
        await generator.aclose()

    async def main(self, steps: list[Step]) -> None:
        await self.async_body(steps)
        while self.background:
            waiting, self.background[:] = list(self.background), []
            await asyncio.gather(*waiting, return_exceptions=True)


Shape = tuple[Any, ...]


def shape_of(edges: list[tuple[int, int, str]]) -> Shape:
    """The forest in a form that does not depend on identities or on the order of siblings."""
    children: dict[int, list[tuple[int, str]]] = {}
    for own, parent, name in edges:
        children.setdefault(parent, []).append((own, name))

    def below(parent: int) -> Shape:
        return tuple(sorted((name, below(own)) for own, name in children.get(parent, ())))

    return below(0)


@pytest.mark.parametrize("in_loop", [False, True], ids=["threads", "asyncio"])
def test_the_trees_of_random_programs_equal_those_of_the_reference(make_recorder: Any, in_loop: bool) -> None:
    recorder = make_recorder(ring_bytes=1 << 26)
    recorder.node_limit = 1 << 24
    for seed in range(PROGRAMS):
        chance = random.Random(seed)
        steps = make_steps(chance, itertools.count(), 3, in_loop=in_loop)
        machine = Machine(recorder)
        cursor = recorder.cursor()
        if in_loop:
            asyncio.run(machine.main(steps))
        else:
            machine.body(steps)
        spans = [recorder.span(row, thread_id) for thread_id, rows in cursor.read() for row in rows]
        assert cursor.lost == 0
        found = shape_of([(span.span_id, span.parent_id, span.site.name) for span in spans])
        assert found == shape_of(machine.edges), f"program {seed}: {steps}"
        assert recorder.current_id() == 0
        assert recorder.open_rows() == []
        for span in spans:
            assert 0 <= span.self_ns <= span.active_ns <= span.total_ns
        recorder.reset()
    assert recorder.counts() == {}
