"""Functions, coroutines and generators with a span around them, each still of its own kind.

A coroutine's span stays current while it is suspended, for its task has a context of its own. A generator runs in the
context of whoever resumes it, so its span is current only while its body runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, TypeVar

from instrument.spans import Site

Function = TypeVar("Function", bound=Callable[..., Any])


def wrap(recorder: Any, function: Function, site: Site) -> Function:
    """The function with a span of the recorder around each call.

    The result is of the same kind (`inspect.iscoroutinefunction` and the like agree), has the same signature, name,
    doc and attributes, and carries its site as `__instrument__`.
    """
    made: Any
    if inspect.isasyncgenfunction(function):
        made = _async_generator(recorder, function, site)
        recorder.note_shape(site, "generator")
    elif inspect.iscoroutinefunction(function):
        made = _coroutine(recorder, function, site)
        recorder.note_shape(site, "coroutine")
    elif inspect.isgeneratorfunction(function):
        made = _generator(recorder, function, site)
        recorder.note_shape(site, "generator")
    elif site.kind == "request":
        made = _request(recorder, function, site)
        recorder.note_shape(site, "wrapper")
    else:
        made = recorder.make_function(function, site)
        recorder.may_mute(site, made)
    functools.update_wrapper(made, function)
    made.__instrument__ = site
    return made  # type: ignore[no-any-return]


def _request(recorder: Any, function: Callable[..., Any], site: Site) -> Any:
    span = recorder.span_of(site)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # Not `open` and `close`: a signal handler may raise between a call and the `try` after it.
        with span():
            return function(*args, **kwargs)

    return wrapper


def _coroutine(recorder: Any, function: Callable[..., Any], site: Site) -> Any:
    span = recorder.span_of(site)

    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        with span():
            return await function(*args, **kwargs)

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
