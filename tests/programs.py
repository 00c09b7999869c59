"""Random programs of threads, tasks, executors, generators and exceptions, for recorders and a reference at once.

Every step of a program opens a span with each recorder. It also opens a span with a simple tracker. The tracker is a
context variable that each step sets and resets, a list of events, and marked ends. The parent of a span is the nearest
open span above it. A span without such a parent is a root, with a link to the span of its context.

The wait of a coroutine is also measured twice without the recorders. Around its call, a suspension begins later and
ends earlier than in the recorders. Inside its body, a suspension begins earlier and ends later.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import itertools
import random
import sys
import threading
import time
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from instrument.recording.spans import Site

SYNC = (
    "call",
    "scope",
    "handle",
    "fails",
    "generator",
    "partial",
    "handed on",
    "thread",
    "copied thread",
    "idle thread",
    "run in copy",
    "copy run twice",
    "late copy",
    "late thread",
    "catch up",
    "pool",
    "rename",
)
ASYNC = (
    "await",
    "gather",
    "task",
    "late task",
    "idle owner",
    "async scope",
    "async generator",
    "async partial",
    "async handed on",
    "to_thread",
    "executor",
    "call soon",
    "worker",
    "cancel",
    *(("task group",) if sys.version_info >= (3, 11) else ()),
)
RUN_SYNC = ("to_thread", "executor", "call soon")
"""The ways whose body is a plain function."""


@dataclass
class Step:
    """One step of a program: what it does and what it does inside. With `sites`, those of one name are one place."""

    name: str
    kind: str
    inside: list[Step] = field(default_factory=list)
    repeats: int = 1
    is_request: bool = False
    sites: dict[tuple[str, str], Site] | None = None

    def named(self, suffix: str) -> Step:
        """A step of its own that does nothing inside."""
        return Step(f"{self.name} {suffix}", "call", sites=self.sites)

    @property
    def site(self) -> Site:
        made = Site(self.name, "request" if self.is_request else "user")
        return made if self.sites is None else self.sites.setdefault((made.name, made.kind), made)


def make_steps(chance: random.Random, names: Iterator[int], depth: int, *, in_loop: bool) -> list[Step]:
    steps = []
    for _ in range(chance.randint(0 if depth < 4 else 1, 3)):
        kinds = SYNC + ASYNC if in_loop else SYNC
        kind = chance.choice(kinds)
        step = Step(f"{kind} {next(names)}", kind, repeats=chance.choice((1, 1, 2)), is_request=chance.random() < 0.2)
        if depth:
            runs_async = kind in ASYNC and kind not in RUN_SYNC
            step.inside = make_steps(chance, names, depth - 1, in_loop=runs_async)
        steps.append(step)
    return steps


class Expected(Exception):
    pass


@dataclass(eq=False)
class Suspensions:
    """The time for which awaited objects of a task were suspended, in all."""

    task: object = None
    sum_ns: int = 0

    @types.coroutine
    def of(self, awaitable: Awaitable[Any]) -> Generator[Any, Any, Any]:
        """Await an object and measure its suspensions."""
        self.task = asyncio.current_task()
        steps: Any = awaitable.__await__()
        value = thrown = None
        while True:
            try:
                item = steps.send(value) if thrown is None else steps.throw(thrown)
            except StopIteration as done:
                return done.value
            since_ns = time.monotonic_ns()
            try:
                value, thrown = (yield item), None
            except BaseException as error:
                value, thrown = None, error
            self.sum_ns += time.monotonic_ns() - since_ns


@dataclass(eq=False)
class Tracked:
    """A span as the reference knows it: `parent` is what it hangs below, `came_from` what a root is linked to."""

    name: str
    is_request: bool
    parent: Tracked | None
    came_from: Tracked | None
    is_open: bool = True
    waits_from_ns: int | None = None
    """It was suspended for so long at the least, where that is known."""
    waits_to_ns: int = 0
    root: Tracked = field(init=False)
    path: tuple[str, ...] = field(init=False)
    """By the names that all on it have when the span ends."""

    def __post_init__(self) -> None:
        above = self.parent
        if above is None or (self.is_request and not (above.root.is_request and above.root.is_open)):
            self.root = self
        else:
            self.root = above.root

    def end(self) -> None:
        names = []
        above: Tracked | None = self
        while above is not None:
            names.append(above.name)
            above = above.parent
        self.path = tuple(reversed(names))
        self.is_open = False


class Machine:
    """Runs programs on recorders and on the reference at once. `look` is called now and then.

    Where `folds`, spans are renamed to what others are called, too, so that paths become recursions: the reference does
    not know how those count.
    """

    def __init__(
        self, recorders: Sequence[Any], look: Callable[[], None] = lambda: None, *, folds: bool = False
    ) -> None:
        self.recorders = recorders
        self.look = look
        self.folds = folds
        self.chance = random.Random(0)
        self.frames: dict[Tracked, list[Any]] = {}
        self.names = itertools.count()
        self.current: contextvars.ContextVar[Tracked | None] = contextvars.ContextVar("reference", default=None)
        self.spans: list[Tracked] = []
        self.later: list[Callable[[], None]] = []
        self.background: list[asyncio.Future[Any]] = []
        self.jobs: asyncio.Queue[Any] | None = None
        self.busy = False
        self.around: contextvars.ContextVar[Suspensions | None] = contextvars.ContextVar("around", default=None)

    def begin(self, step: Step) -> Tracked:
        place = above = self.current.get()
        while above is not None and not above.is_open:
            above = above.parent
        made = Tracked(step.name, step.is_request, above, place if above is None else None)
        self.spans.append(made)
        return made

    @contextmanager
    def inside(self, tracked: Tracked) -> Iterator[None]:
        token = self.current.set(tracked)
        try:
            yield
        finally:
            self.current.reset(token)

    @contextmanager
    def track(self, step: Step, scopes: Sequence[Any] = ()) -> Iterator[Tracked]:
        tracked = self.begin(step)
        if scopes:
            self.frames[tracked] = [scope._frame for scope in scopes]
        try:
            with self.inside(tracked):
                yield tracked
        finally:
            self.frames.pop(tracked, None)
            tracked.end()

    def rename(self) -> None:
        """Rename one of the scopes that are open, wherever that is."""
        if not self.frames:
            return
        tracked = self.chance.choice(list(self.frames))
        tracked.name = f"renamed {next(self.names)}"
        if self.folds and self.chance.random() < 0.7:
            others = [other.name for other in self.frames]
            tracked.name = self.chance.choice([*others, "renamed 0", "renamed 1"])
        kind = "request" if tracked.is_request else "user"
        for recorder, frame in zip(self.recorders, self.frames[tracked], strict=True):
            recorder.rename(frame, recorder.find_or_make_scope_site(tracked.name, kind))

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
        for recorder in self.recorders:
            function = recorder.wrap(function, step.site)
        return function

    def scopes(self, step: Step) -> list[Any]:
        return [recorder.make_scope(step.name, kind=step.site.kind) for recorder in self.recorders]

    def catch_up(self) -> None:
        """Do what was put off, now that what it came from may have ended."""
        later, self.later[:] = list(self.later), []
        for each in later:
            each()
        self.look()

    # ------------------------------------------------ steps without a loop

    def function_of(self, step: Step) -> Any:
        def function() -> None:
            with self.track(step):
                self.body(step.inside)
                if step.kind == "fails":
                    raise Expected

        return self.wrapped(function, step)

    def run(self, step: Step) -> None:
        function = self.function_of(step)
        if step.kind == "call":
            function()
        elif step.kind == "fails":
            with pytest.raises(Expected):
                function()
        elif step.kind == "scope":
            scopes = self.scopes(step)
            with ExitStack() as stack:
                for scope in scopes:
                    stack.enter_context(scope)
                with self.track(step, scopes):
                    self.body(step.inside)
        elif step.kind == "handle":
            scopes = [scope.start() for scope in self.scopes(step)]
            with self.track(step, scopes):
                self.body(step.inside)
            for scope in reversed(scopes):
                scope.end()
        elif step.kind in ("generator", "partial", "handed on"):
            self.consume(step)
        elif step.kind in ("thread", "copied thread"):
            _run_in_thread(contextvars.Context() if step.kind == "thread" else contextvars.copy_context(), function)
        elif step.kind == "idle thread":
            before = self.function_of(step.named("before"))

            def owner() -> None:
                before()
                _run_in_thread(contextvars.copy_context(), function)

            _run_in_thread(contextvars.copy_context(), owner)
        elif step.kind == "run in copy":
            contextvars.copy_context().run(function)
        elif step.kind == "copy run twice":
            context = contextvars.copy_context()
            context.run(self.function_of(step.named("at once")))
            self.later.append(lambda: context.run(function))
        elif step.kind == "late copy":
            context = contextvars.copy_context()
            self.later.append(lambda: context.run(function))
        elif step.kind == "late thread":
            context = contextvars.copy_context()
            self.later.append(lambda: _run_in_thread(context, function))
        elif step.kind == "catch up":
            self.catch_up()
            function()
        elif step.kind == "rename":
            self.body(step.inside)
            self.rename()
            function()
        elif step.kind == "pool":
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                pool.submit(contextvars.copy_context().run, function).result()
                pool.submit(function).result()

    def consume(self, step: Step) -> None:
        def numbers() -> Iterator[int]:
            own = self.begin(step)
            try:
                for number in range(3):
                    with self.inside(own):
                        self.body(step.inside if number == 1 else [])
                    yield number
            finally:
                own.end()

        generator = self.wrapped(numbers, step)()
        if step.kind == "handed on":

            def first() -> None:
                with self.track(step.named("first")):
                    next(generator)

            self.wrapped(first, step.named("first"))()

        def rest() -> None:
            with self.track(step.named("rest")):
                for number in generator:
                    self.run(step.named("consumer"))
                    if step.kind == "partial" and number == 1:
                        break
                generator.close()

        self.wrapped(rest, step.named("rest"))()

    # ------------------------------------------------ steps under a loop

    def coroutine_of(self, step: Step) -> Any:
        async def coroutine() -> None:
            with self.track(step) as tracked:
                await self.suspended_body(tracked, step)

        wrapped = self.wrapped(coroutine, step)

        async def outside() -> None:
            around = Suspensions()
            token = self.around.set(around)
            try:
                await around.of(wrapped())
            finally:
                self.around.reset(token)

        return outside

    async def suspended_body(self, tracked: Tracked, step: Step) -> None:
        async def body() -> None:
            await asyncio.sleep(0)
            await self.async_body(step.inside)

        inside, around = Suspensions(), self.around.get()
        before_ns = 0 if around is None else around.sum_ns
        try:
            await inside.of(body())
        finally:
            tracked.waits_to_ns = inside.sum_ns
            if around is not None and around.task is inside.task:
                tracked.waits_from_ns = around.sum_ns - before_ns

    async def run_async(self, step: Step) -> None:
        coroutine = self.coroutine_of(step)
        loop = asyncio.get_running_loop()
        if step.kind == "await":
            await coroutine()
        elif step.kind == "gather":
            await asyncio.gather(coroutine(), coroutine())
        elif step.kind == "task":
            await asyncio.create_task(coroutine())
        elif step.kind == "task group":
            async with asyncio.TaskGroup() as group:  # type: ignore[attr-defined, unused-ignore]
                group.create_task(coroutine())
                group.create_task(coroutine())
        elif step.kind == "late task":
            # Made inside a plain function; runs when that has returned, often when its parent has, too.
            maker = step.named("maker")

            def make() -> None:
                with self.track(maker):
                    self.background.append(loop.create_task(coroutine()))

            self.wrapped(make, maker)()
        elif step.kind == "idle owner":
            before, function = self.coroutine_of(step.named("before")), self.function_of(step.named("in a thread"))

            async def owner() -> None:
                await before()
                await asyncio.gather(coroutine(), asyncio.to_thread(function))

            await asyncio.create_task(owner())
        elif step.kind == "cancel":
            task = asyncio.create_task(coroutine())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        elif step.kind == "async scope":
            scopes = self.scopes(step)
            async with AsyncExitStack() as stack:
                for scope in scopes:
                    await stack.enter_async_context(scope)
                with self.track(step, scopes) as tracked:
                    await self.suspended_body(tracked, step)
        elif step.kind in ("async generator", "async partial", "async handed on"):
            await self.consume_async(step)
        elif step.kind == "to_thread":
            await asyncio.to_thread(self.function_of(step))
        elif step.kind == "executor":
            await loop.run_in_executor(None, self.function_of(step))
        elif step.kind == "call soon":
            done = loop.create_future()
            function = self.function_of(step)
            loop.call_soon(lambda: done.set_result(function()))
            await done
        elif step.kind == "worker":
            await self.give_to_worker(coroutine)

    async def give_to_worker(self, coroutine: Any) -> None:
        """Give work away as a batcher does: the first that has a job starts the task that does the jobs of all."""
        if self.jobs is None:
            self.jobs = asyncio.Queue()
            self.background.append(asyncio.create_task(self.work(self.jobs)))
        done = asyncio.get_running_loop().create_future()
        self.jobs.put_nowait((coroutine, done))
        if self.busy:
            self.background.append(done)  # perhaps it is the worker itself that asks
        else:
            await done

    async def work(self, jobs: asyncio.Queue[Any]) -> None:
        while True:
            job, done = await jobs.get()
            if job is None:
                return
            self.busy = True
            await job()
            self.busy = False
            done.set_result(None)

    async def consume_async(self, step: Step) -> None:
        async def numbers() -> AsyncIterator[int]:
            own = self.begin(step)
            try:
                for number in range(3):
                    with self.inside(own):
                        await asyncio.sleep(0)
                        await self.async_body(step.inside if number == 1 else [])
                    yield number
            finally:
                own.end()

        generator = self.wrapped(numbers, step)()
        if step.kind == "async handed on":

            async def first() -> None:
                with self.track(step.named("first")):
                    await generator.__anext__()

            await self.wrapped(first, step.named("first"))()
        async for number in generator:
            self.run(step.named("consumer"))
            await asyncio.sleep(0)  # while it stands still, what it has started runs
            if step.kind == "async partial" and number == 1:
                break
        await generator.aclose()

    async def main(self, steps: list[Step]) -> None:
        await self.async_body(steps)
        while self.background or self.later:
            self.catch_up()
            waiting, self.background[:] = list(self.background), []
            if self.jobs is not None:
                self.jobs.put_nowait((None, None))
                self.jobs = None
            await asyncio.gather(*waiting, return_exceptions=True)

    def run_program(self, steps: list[Step], *, in_loop: bool) -> None:
        if in_loop:
            asyncio.run(self.main(steps))
            return
        self.body(steps)
        while self.later:
            self.catch_up()


def _run_in_thread(context: contextvars.Context, function: Callable[[], None]) -> None:
    thread = threading.Thread(target=context.run, args=(function,))
    thread.start()
    thread.join()


def program(seed: int, *, in_loop: bool) -> list[Step]:
    """The random program of a seed."""
    return make_steps(random.Random(seed), itertools.count(), 3, in_loop=in_loop)


def recursive(steps: list[Step], names: int, sites: dict[tuple[str, str], Site]) -> list[Step]:
    """The same with so few names that steps recur in one another. Generators and renames become calls."""
    instead = dict.fromkeys(("generator", "partial", "handed on", "rename"), "call")
    instead |= dict.fromkeys(("async generator", "async partial", "async handed on"), "await")
    return [
        Step(
            f"name {int(step.name.split()[-1]) % names}",
            instead.get(step.kind, step.kind),
            recursive(step.inside, names, sites),
            step.repeats,
            step.is_request,
            sites,
        )
        for step in steps
    ]
