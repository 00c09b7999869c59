"""Functions, coroutines and generators with a span around them, each still of its own kind.

A coroutine's span stays current while it is suspended, for its task has a context of its own. A generator runs in the
context of whoever resumes it, so its span is current only while its body runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from types import FunctionType
from typing import Any, TypeVar

from instrument.spans import Site

Function = TypeVar("Function", bound=Callable[..., Any])


Attributes = Callable[[tuple[Any, ...], dict[str, Any]], dict[Any, Any]]
"""Gives the attributes of a call's span from its arguments; never raises."""


def wrap(recorder: Any, function: Function, site: Site, attributes: Attributes | None = None) -> Function:
    """The function with a span of the recorder around each call.

    The result is of the same kind (`inspect.iscoroutinefunction` and the like agree), has the same signature, name,
    doc and attributes, and carries its site as `__instrument__`. `attributes` is asked before each call of a function
    or coroutine, whose span then carries them, and takes a plain function off the fast path.
    """
    made: Any
    if inspect.isasyncgenfunction(function):
        made = _async_generator(recorder, function, site)
        recorder.note_shape(site, "generator")
    elif inspect.iscoroutinefunction(function):
        made = _coroutine(recorder, function, site, attributes)
        recorder.note_shape(site, "coroutine")
    elif inspect.isgeneratorfunction(function):
        made = _generator(recorder, function, site)
        recorder.note_shape(site, "generator")
    elif site.kind == "request" or attributes is not None:
        made = _opening(recorder, function, site, attributes)
        recorder.note_shape(site, "wrapper")
    else:
        made = recorder.make_function(function, site)
        recorder.may_mute(site, made)
    functools.update_wrapper(made, function)
    for name in ("cache_info", "cache_clear"):  # of functools.lru_cache: methods of its type, which are not copied
        if hasattr(function, name) and not hasattr(made, name):
            setattr(made, name, getattr(function, name))
    made.__instrument__ = site
    return made  # type: ignore[no-any-return]


def retire(made: Any) -> None:
    """Let what `wrap` has made pass every call to the bare function from now on, at the cost of one branch.

    For one that has been taken off and that somebody still holds. Calls that are under way end as they began.
    """
    vars(made).pop("__instrument__", None)
    if type(made) is not FunctionType:
        made.__instrument_muted__ = True
        return
    for name, cell in zip(made.__code__.co_freevars, made.__closure__ or (), strict=True):
        if name in ("recorder", "core"):
            cell.cell_contents = _Retired(cell.cell_contents)


class _Retired:
    """A recorder that is off for ever to what asks it; spans that are open end in the real one."""

    on = False

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorder, name)


def _opening(recorder: Any, function: Callable[..., Any], site: Site, attributes: Attributes | None) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not recorder.on:
            return function(*args, **kwargs)
        frame = recorder.open(site) if attributes is None else recorder.open(site, attributes(args, kwargs))
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            recorder.close(frame, error)
            raise
        recorder.close(frame)
        return result

    return wrapper


def _coroutine(recorder: Any, function: Callable[..., Any], site: Site, attributes: Attributes | None) -> Any:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not recorder.on:
            return await function(*args, **kwargs)
        frame = recorder.open(site) if attributes is None else recorder.open(site, attributes(args, kwargs))
        try:
            result = await function(*args, **kwargs)
        except BaseException as error:
            recorder.close(frame, error)
            raise
        recorder.close(frame)
        return result

    return wrapper


def _generator(recorder: Any, function: Callable[..., Any], site: Site) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        generator = function(*args, **kwargs)
        if not recorder.on:
            return (yield from generator)
        stretch = recorder.stretch(site)
        resume, suspend, send = stretch.resume, stretch.suspend, generator.send
        value: Any = None
        thrown: BaseException | None = None
        try:
            while True:
                resume()
                try:
                    item = send(value) if thrown is None else generator.throw(thrown)
                except StopIteration as done:
                    return done.value
                finally:
                    suspend()
                try:
                    value, thrown = (yield item), None
                except GeneratorExit:
                    resume()
                    try:
                        generator.close()
                    finally:
                        suspend()
                    raise
                except BaseException as error:
                    value, thrown = None, error
        except GeneratorExit:
            raise
        except BaseException as error:
            stretch.finish(error)
            raise
        finally:
            stretch.finish(None)

    return wrapper


def _async_generator(recorder: Any, function: Callable[..., Any], site: Site) -> Any:
    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        generator = function(*args, **kwargs)
        stretch = recorder.stretch(site) if recorder.on else _NO_STRETCH
        value: Any = None
        thrown: BaseException | None = None
        try:
            while True:
                stretch.resume()
                try:
                    item = await (generator.asend(value) if thrown is None else generator.athrow(thrown))
                except StopAsyncIteration:
                    return
                finally:
                    stretch.suspend()
                try:
                    value, thrown = (yield item), None
                except GeneratorExit:
                    stretch.resume()
                    try:
                        await generator.aclose()
                    finally:
                        stretch.suspend()
                    raise
                except BaseException as error:
                    value, thrown = None, error
        except GeneratorExit:
            raise
        except BaseException as error:
            stretch.finish(error)
            raise
        finally:
            stretch.finish(None)

    return wrapper


class _NoStretch:
    """Stands for the span of an async generator that began while recording was off."""

    def resume(self) -> None: ...

    def suspend(self) -> None: ...

    def finish(self, error: BaseException | None) -> None: ...


_NO_STRETCH = _NoStretch()
