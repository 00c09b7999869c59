"""The wrapper of each kind of code behaves as the bare function."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from readback import spans_in

from instrument.instrumentors.selection import Selection
from instrument.recording.spans import Site

FLAGS = {name: value for name, value in vars(inspect).items() if name.startswith("CO_")}


def _awaited(thing: Any) -> Any:
    async def wait() -> Any:
        return await thing

    return asyncio.run(wait())


async def _listed(items: Any) -> list[Any]:
    return [item async for item in items]


def _variable(*args: int, **kwargs: int) -> Any:
    return args, kwargs


def _make_nested() -> Callable[..., Any]:
    kept = 5

    def nested(*args: int, **kwargs: int) -> Any:
        return kept, args, kwargs

    return nested


def _generator(*args: int, **kwargs: int) -> Any:
    got = yield args
    yield got, kwargs
    return "returned"


async def _coroutine(*args: int, **kwargs: int) -> Any:
    await asyncio.sleep(0)
    return args, kwargs


@types.coroutine
def _iterable_coroutine(*args: int, **kwargs: int) -> Any:
    yield
    yield from asyncio.sleep(0).__await__()
    return args, kwargs


async def _async_generator(*args: int, **kwargs: int) -> Any:
    await asyncio.sleep(0)
    yield args
    yield kwargs


# Of each flag that a compiler or `types.coroutine` gives to a function's code: one that has it, and a use of what it
# returns.
BY_FLAG: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "CO_OPTIMIZED": (_variable, list),
    "CO_NEWLOCALS": (_variable, list),
    "CO_VARARGS": (_variable, list),
    "CO_VARKEYWORDS": (_variable, list),
    "CO_NESTED": (_make_nested(), list),
    "CO_GENERATOR": (_generator, list),
    "CO_COROUTINE": (_coroutine, _awaited),
    "CO_ITERABLE_COROUTINE": (_iterable_coroutine, _awaited),
    "CO_ASYNC_GENERATOR": (_async_generator, lambda items: asyncio.run(_listed(items))),
}
NOT_OF_OUR_CONCERN = {"CO_NOFREE", "CO_HAS_DOCSTRING", "CO_METHOD", "CO_NO_MONITORING_EVENTS"}


def test_every_flag_that_code_can_have_is_tried() -> None:
    assert set(BY_FLAG) | NOT_OF_OUR_CONCERN >= set(FLAGS)
    assert all(function.__code__.co_flags & FLAGS[flag] for flag, (function, _) in BY_FLAG.items())


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("flag", BY_FLAG)
def test_a_function_of_any_flag_does_and_looks_as_without_us(recorder: Any, flag: str, on: bool) -> None:
    function, use = BY_FLAG[flag]
    recorder.on = on
    made = recorder.wrap(function, Site("x"))
    assert use(made(1, 2, a=3)) == use(function(1, 2, a=3))
    kinds = FLAGS["CO_GENERATOR"] | FLAGS["CO_COROUTINE"] | FLAGS["CO_ITERABLE_COROUTINE"] | FLAGS["CO_ASYNC_GENERATOR"]
    assert made.__code__.co_flags & kinds == function.__code__.co_flags & kinds
    for looks in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
        assert looks(made) == looks(function)
    ours, bare = made(), function()
    for looks in (inspect.isawaitable, inspect.iscoroutine, inspect.isgenerator, inspect.isasyncgen):
        assert looks(ours) == looks(bare)
    for thing in (ours, bare):
        if hasattr(thing, "close"):
            thing.close()
    assert {span.site.name for span in spans_in(recorder)} == ({"x"} if on else set())
    assert recorder.current_span_id() == 0


@pytest.mark.skipif(sys.version_info < (3, 12), reason="no such mark before Python 3.12")
def test_marked_coroutine_functions_return_their_own_awaitable(recorder: Any) -> None:
    begun = []

    def function() -> Any:
        begun.append(True)
        return asyncio.get_running_loop().create_future()

    inspect.markcoroutinefunction(function)  # type: ignore[attr-defined]
    made = recorder.wrap(function, Site("x"))
    assert inspect.iscoroutinefunction(made)

    async def call() -> Any:
        future = made()
        assert begun == [True]
        assert isinstance(future, asyncio.Future)
        future.set_result(5)
        return await future

    assert asyncio.run(call()) == 5


def test_a_rule_on_asyncios_own_tasks_leaves_sleeping_and_waiting_alone(
    select: Callable[[str], Selection], recorder: Any
) -> None:
    select('functions: [{match: "asyncio.tasks:*"}, {match: "asyncio.tasks:__sleep0"}]')

    async def work() -> list[int]:
        await asyncio.sleep(0)
        return list(await asyncio.gather(*(asyncio.sleep(0.001, number) for number in range(3))))

    assert asyncio.run(work()) == [0, 1, 2]
    assert {"sleep", "gather", "__sleep0"} <= {span.site.name for span in spans_in(recorder)}


# -------------------------------------------------------------------- the end of a generator


def _lets_go() -> Any:
    yield 1
    yield 2


def _returns() -> Any:
    try:
        yield 1
    except GeneratorExit:
        return "left"


def _goes_on() -> Any:
    with contextlib.suppress(GeneratorExit):
        yield 1
    got = yield "once more"
    return got


def _raises_another() -> Any:
    try:
        yield 1
    except GeneratorExit as error:
        raise KeyError("another") from error


def _delegates() -> Any:
    try:
        got = yield from _returns()
    except GeneratorExit:
        got = "inner"
    yield got
    return "outer"


def _delegates_to_one_that_goes_on() -> Any:
    return (yield from _goes_on())


def _thrown(generator: Any) -> list[Any]:
    seen: list[Any] = [next(generator)]
    error = GeneratorExit("ours")
    for step in (lambda: generator.throw(error), lambda: generator.send("sent"), lambda: next(generator)):
        try:
            seen.append(step())
        except BaseException as raised:
            seen.append((type(raised), raised.args, raised is error, type(raised.__cause__)))
    return seen


def _closed(generator: Any) -> list[Any]:
    seen: list[Any] = [next(generator)]
    for step in (generator.close, generator.close, lambda: next(generator)):
        try:
            seen.append(step())
        except BaseException as raised:
            seen.append((type(raised), raised.args))
    return seen


def _thrown_before_it_began(generator: Any) -> list[Any]:
    try:
        return [generator.throw(GeneratorExit("early"))]
    except BaseException as raised:
        return [type(raised), raised.args, *generator]


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("drive", [_thrown, _closed, _thrown_before_it_began], ids=lambda one: one.__name__.strip("_"))
@pytest.mark.parametrize(
    "body",
    [_lets_go, _returns, _goes_on, _raises_another, _delegates, _delegates_to_one_that_goes_on],
    ids=lambda one: one.__name__.strip("_"),
)
def test_a_generator_takes_its_exit_as_without_us(recorder: Any, body: Any, drive: Any, on: bool) -> None:
    recorder.on = on
    assert drive(recorder.wrap(body, Site("g"))()) == drive(body())
    recorder.on = True
    assert recorder.current_span_id() == 0
    assert recorder.open_rows() == []
    if on and drive is not _thrown_before_it_began:
        (span,) = spans_in(recorder)
        errors = {_raises_another: "KeyError", _delegates_to_one_that_goes_on: "RuntimeError"}
        if drive is _closed:  # which raises for a body that goes on
            errors |= {_goes_on: "RuntimeError", _delegates: "RuntimeError"}
        assert span.error == errors.get(body)


def test_a_context_manager_may_swallow_the_exit_of_its_block(recorder: Any) -> None:
    def swallow() -> Iterator[None]:
        with contextlib.suppress(GeneratorExit):
            yield

    for body in (swallow, recorder.wrap(swallow, Site("g"))):
        with contextlib.contextmanager(body)():
            raise GeneratorExit


async def _lets_go_async() -> Any:
    yield 1
    yield 2


async def _returns_async() -> Any:
    try:
        yield 1
    except GeneratorExit:
        await asyncio.sleep(0)
        return


async def _goes_on_async() -> Any:
    with contextlib.suppress(GeneratorExit):
        yield 1
    await asyncio.sleep(0)
    yield "once more"


async def _raises_another_async() -> Any:
    try:
        yield 1
    except GeneratorExit as error:
        raise KeyError("another") from error


async def _drive_async(steps: list[Any]) -> list[Any]:
    seen: list[Any] = []
    for step in steps:
        try:
            seen.append(await step())
        except BaseException as raised:
            seen.append((type(raised), raised.args))
    return seen


def _thrown_async(items: Any) -> list[Any]:
    return [items.__anext__, lambda: items.athrow(GeneratorExit("ours")), items.__anext__, items.__anext__]


def _closed_async(items: Any) -> list[Any]:
    return [items.__anext__, items.aclose, items.aclose, items.__anext__]


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("steps", [_thrown_async, _closed_async], ids=lambda one: one.__name__.strip("_"))
@pytest.mark.parametrize(
    "body",
    [_lets_go_async, _returns_async, _goes_on_async, _raises_another_async],
    ids=lambda one: one.__name__.strip("_"),
)
def test_an_async_generator_takes_its_exit_as_without_us(recorder: Any, body: Any, steps: Any, on: bool) -> None:
    async def drive(make: Any) -> list[Any]:
        return await _drive_async(steps(make()))

    recorder.on = on
    assert asyncio.run(drive(recorder.wrap(body, Site("g")))) == asyncio.run(drive(body))
    recorder.on = True
    assert recorder.current_span_id() == 0
    assert recorder.open_rows() == []
    if on:
        (span,) = spans_in(recorder)
        errors = {_raises_another_async: "KeyError"}
        if steps is _closed_async:  # which raises for a body that goes on
            errors[_goes_on_async] = "RuntimeError"
        assert span.error == errors.get(body)
