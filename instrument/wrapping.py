"""Functions, coroutines and generators with a span around them, each still of its own kind.

A coroutine's span stays current while it is suspended, for its task has a context of its own. A generator runs in the
context of whoever resumes it, so its span is current only while its body runs.

A wrapper takes the very parameters of its function: the body of a coroutine or generator begins after the call, and a
call with wrong arguments must fail at once (servers find out by such a call what kind of application they have).
"""

from __future__ import annotations

import functools
import inspect
import keyword
from collections.abc import Callable
from types import CodeType, FunctionType
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
        made = _make(_ASYNC_GENERATOR, recorder, function, site)
        recorder.note_shape(site, "generator")
    elif inspect.iscoroutinefunction(function):
        made = _make(_COROUTINE, recorder, function, site)
        recorder.note_shape(site, "coroutine")
    elif inspect.isgeneratorfunction(function):
        made = _make(_GENERATOR, recorder, function, site)
        recorder.note_shape(site, "generator")
    elif site.kind == "request":
        made = _make(_REQUEST, recorder, function, site)
        recorder.note_shape(site, "wrapper")
    else:
        made = recorder.make_function(function, site)
        recorder.may_mute(site, made)
    functools.update_wrapper(made, function)
    made.__instrument__ = site
    return made  # type: ignore[no-any-return]


# What wrappers are made of. `{i}` begins the names that are ours, so that a parameter may have any name. A wrapper lets
# go of the arguments before it waits: the host's function may drop a large one early. It has the globals of the host's
# function, which resolve the names in its annotations; the bodies need none.

_REQUEST = """
def {i}make({i}function, {i}recorder, {i}site, {i}idle):
    {i}span = {i}recorder.span_of({i}site)

    def wrapper({parameters}):
        # Not `open` and `close`: a signal handler may raise between a call and the `try` after it.
        with {i}span():
            return {i}function({arguments})

    return wrapper
"""

_COROUTINE = """
def {i}make({i}function, {i}recorder, {i}site, {i}idle):
    {i}span = {i}recorder.span_of({i}site)

    async def wrapper({parameters}):
        with {i}span():
            {i}coroutine = {i}function({arguments})
            {forget}
            return await {i}coroutine

    return wrapper
"""

_GENERATOR = """
def {i}make({i}function, {i}recorder, {i}site, {i}idle):
    def wrapper({parameters}):
        {i}generator = {i}function({arguments})
        {forget}
        if not {i}recorder.on:
            return (yield from {i}generator)
        {i}stretch = {i}recorder.stretch({i}site)
        {i}resume, {i}suspend, {i}send = {i}stretch.resume, {i}stretch.suspend, {i}generator.send
        {i}value = {i}thrown = None
        try:
            while True:
                {i}resume()
                try:
                    {i}item = {i}send({i}value) if {i}thrown is None else {i}generator.throw({i}thrown)
                except StopIteration as {i}done:
                    return {i}done.value
                finally:
                    {i}suspend()
                try:
                    {i}value, {i}thrown = (yield {i}item), None
                except GeneratorExit:
                    {i}resume()
                    try:
                        {i}generator.close()
                    finally:
                        {i}suspend()
                    raise
                except BaseException as {i}error:
                    {i}value, {i}thrown = None, {i}error
        except GeneratorExit:
            raise
        except BaseException as {i}error:
            {i}stretch.finish({i}error)
            raise
        finally:
            {i}stretch.finish(None)

    return wrapper
"""

_ASYNC_GENERATOR = """
def {i}make({i}function, {i}recorder, {i}site, {i}idle):
    async def wrapper({parameters}):
        {i}generator = {i}function({arguments})
        {forget}
        {i}stretch = {i}recorder.stretch({i}site) if {i}recorder.on else {i}idle
        {i}value = {i}thrown = None
        try:
            while True:
                {i}stretch.resume()
                try:
                    {i}item = await (
                        {i}generator.asend({i}value) if {i}thrown is None else {i}generator.athrow({i}thrown)
                    )
                except StopAsyncIteration:
                    return
                finally:
                    {i}stretch.suspend()
                try:
                    {i}value, {i}thrown = (yield {i}item), None
                except GeneratorExit:
                    {i}stretch.resume()
                    try:
                        await {i}generator.aclose()
                    finally:
                        {i}stretch.suspend()
                    raise
                except BaseException as {i}error:
                    {i}value, {i}thrown = None, {i}error
        except GeneratorExit:
            raise
        except BaseException as {i}error:
            {i}stretch.finish({i}error)
            raise
        finally:
            {i}stretch.finish(None)

    return wrapper
"""


class _NoStretch:
    """Stands for the span of an async generator that began while recording was off."""

    def resume(self) -> None: ...

    def suspend(self) -> None: ...

    def finish(self, error: BaseException | None) -> None: ...


_NO_STRETCH = _NoStretch()


def _make(template: str, recorder: Any, function: Callable[..., Any], site: Site) -> Any:
    """A wrapper after a template, with the parameters, the defaults and the globals of the function."""
    code = getattr(function, "__code__", None)
    is_plain = isinstance(function, FunctionType) and isinstance(code, CodeType)
    parameters, arguments, names = _parameters(code) if is_plain else _ANY  # type: ignore[arg-type]
    made = _template(template, parameters, arguments, names)(function, recorder, site, _NO_STRETCH)
    if not is_plain:
        return made
    wrapper = FunctionType(
        made.__code__, function.__globals__, function.__name__, function.__defaults__, made.__closure__
    )
    wrapper.__kwdefaults__ = function.__kwdefaults__
    return wrapper


_ANY = ("*args, **kwargs", "*args, **kwargs", ("args", "kwargs"))


def _parameters(code: CodeType) -> tuple[str, str, tuple[str, ...]]:
    """The parameters of a function's code, the arguments that hand them on, and their names."""
    positional, total = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    only_by_keyword = code.co_varnames[positional:total]
    taken = list(code.co_varnames[:positional])
    given = list(taken)
    if code.co_posonlyargcount:
        taken.insert(code.co_posonlyargcount, "/")
    last = total
    if code.co_flags & inspect.CO_VARARGS:
        taken.append("*" + code.co_varnames[last])
        given.append("*" + code.co_varnames[last])
        last += 1
    elif only_by_keyword:
        taken.append("*")
    taken += only_by_keyword
    given += [f"{name}={name}" for name in only_by_keyword]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        taken.append("**" + code.co_varnames[last])
        given.append("**" + code.co_varnames[last])
        last += 1
    names = code.co_varnames[:last]
    if any(not name.isidentifier() or keyword.iskeyword(name) for name in names):
        return _ANY  # no compiler made these
    return ", ".join(taken), ", ".join(given), names


@functools.lru_cache(maxsize=1024)
def _template(template: str, parameters: str, arguments: str, names: tuple[str, ...]) -> Callable[..., Any]:
    """The function that makes wrappers with these parameters."""
    ours = "instrument_"
    while any(name.startswith(ours) for name in names):
        ours += "_"
    forget = "del " + ", ".join(names) if names else "pass"
    source = template.format(i=ours, parameters=parameters, arguments=arguments, forget=forget)
    made: dict[str, Any] = {}
    exec(compile(source, "<instrument>", "exec", dont_inherit=True), made)  # noqa: S102 - names alone are filled in
    return made[f"{ours}make"]  # type: ignore[no-any-return]
