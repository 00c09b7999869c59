"""Functions, coroutines and generators with a span around them, each still of its own kind.

A coroutine's span stays current while it is suspended, for its task has a context of its own: its wrapper steps it and
tells what of its time it was suspended. A generator runs in the context of whoever resumes it, so its span is current
only while its body runs.

The native recorder has no frame of its own: its wrapper, and what that gives, stand for the function and the coroutine
or generator. Those of the recorder in Python take the very parameters of the function: a call with wrong arguments must
fail at once (servers find out by such a call what kind of application they have).
"""

from __future__ import annotations

import functools
import inspect
import keyword
import types
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, NamedTuple, TypeVar

from instrument.recording.spans import Site

Function = TypeVar("Function", bound=Callable[..., Any])


Attributes = Callable[[tuple[Any, ...], dict[str, Any]], "dict[Any, Any] | None"]
"""Gives the attributes of a call's span from its arguments, None for none; never raises."""


Results = Callable[[Any], "dict[Any, Any] | None"]
"""Gives attributes of a call's span from what the call gives, None for none; never raises."""

FORMS = ("call", "scope", "coroutine", "generator", "awaitable", "async generator")
"""What calls are that become spans, in the order in which the native recorder numbers them."""

Passes = Callable[[tuple[Any, ...]], bool]
"""Says of a call, by its positional arguments, whether it goes to the bare function; never raises."""


def wrap(
    recorder: Any,
    function: Function,
    site: Site,
    attributes: Attributes | None = None,
    passes: Passes | None = None,
    works: Attributes | None = None,
    results: Results | None = None,
) -> Function:
    """The function with a span of the recorder around each call.

    The result looks as the function from outside: its kind, signature, names, code and attributes are those, and so is
    its `__wrapped__` where it has one. It has its site as `__instrument__`. `attributes` is asked before each call,
    whose span then carries them, and `results` of what it gives, which generators have not. `passes`, which is asked
    first, takes a plain function off the fast path. `works` tells, as an attribute that no reader sees, what a call
    works on whose device time is asked for.
    """
    told = attributes or works
    if attributes is not None and works is not None:
        told = functools.partial(_both, attributes, works)
    told_of_call = attributes is not None or results is not None
    made: Any
    if inspect.isasyncgenfunction(function):
        form, shape = "async generator", "generator"
    elif inspect.iscoroutinefunction(function) and not _is_marked(function):
        form = shape = "coroutine"
    elif inspect.isgeneratorfunction(function):
        form, shape = "awaitable" if _is_awaitable(function) else "generator", "generator"
    elif site.kind == "request" or passes is not None or (told_of_call and not recorder.native):
        form, shape = "scope", "wrapper"
    else:
        form, shape = "call", "wrapper" if told_of_call else "call"  # which costs about as much
    if form == "call":
        made = recorder.make_function(function, site, works, *((attributes, results) if recorder.native else ()))
    elif recorder.native:
        made = recorder.make_function(function, site, None, told, results, passes, FORMS.index(form))
    else:
        template = _ANSWERED_OPENING if form == "scope" and results is not None else _TEMPLATES[form]
        made = _make(template, recorder, function, site, told, passes, results)
    if site.kind == "step":  # a schedule that counts them would stand still
        recorder.note_shape(site, shape)
    else:
        recorder.may_mute(site, made, shape)
    if not recorder.native:
        _show_as(made, function, site)
    return made  # type: ignore[no-any-return]


def _show_as(made: Any, function: Any, site: Site) -> None:
    """Let a wrapper made in Python look as its function, but for its code."""
    functools.update_wrapper(made, function)
    for name in ("cache_info", "cache_clear"):  # of functools.lru_cache: methods of its type, which are not copied
        if hasattr(function, name) and not hasattr(made, name):
            setattr(made, name, getattr(function, name))
    made.__wrapped__ = getattr(function, "__wrapped__", function)
    made.__instrument__ = site
    made.__instrument_function__ = function


def bare_of(made: Any) -> Any:
    """The function that `wrap` has made a wrapper of."""
    return made.__instrument_function__


def _both(attributes: Attributes, works: Attributes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
    return {**(attributes(args, kwargs) or {}), **(works(args, kwargs) or {})}


def _is_marked(function: Any) -> bool:
    """Whether a function is none of coroutines, but marked as one (`inspect.markcoroutinefunction`).

    It runs when it is called and gives an awaitable of its own, which its callers are to get: the call is its span.
    """
    code = getattr(_innermost(function), "__code__", None)
    return isinstance(code, CodeType) and not code.co_flags & inspect.CO_COROUTINE


def _innermost(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def turn(made: Any, switch: Any) -> None:
    """Let what `wrap` has made ask `switch` whether it is on, in place of its recorder, or that again.

    One that is a muted site's `Pass` lets each call pass and counts it. To those calls it costs one branch and the
    counting, to others nothing. Calls that are under way end as they began.
    """
    if type(made) is not FunctionType:
        made.__instrument_pass__ = None if hasattr(switch, "passes") else switch
        return
    for name, cell in zip(made.__code__.co_freevars, made.__closure__ or (), strict=True):
        if name == "switch" or (made.__code__.co_filename == "<instrument>" and name.endswith("switch")):
            cell.cell_contents = switch


class _Off:
    on = False


_OFF = _Off()


def retire(made: Any) -> None:
    """Let what `wrap` has made pass every call to the bare function from now on, at the cost of one branch.

    For one that has been taken off and that somebody still holds. Calls that are under way end as they began.
    """
    if type(made) is FunctionType:
        vars(made).pop("__instrument__", None)
    turn(made, _OFF if type(made) is FunctionType else False)


# What the wrappers of the recorder in Python are made of. `{i}` begins the names that are ours, so that a parameter may
# have any name. A wrapper lets go of the arguments before it waits: the host's function may drop a large one early. It
# has the globals of the host's function, which resolve the names in its annotations; the bodies need none.

_OPENING = """
def {i}make({i}function, {i}recorder, {i}switch, {i}site, {i}attributes, {i}idle, {i}passes, {i}results):
    {i}span = {i}recorder.span_of({i}site)

    def wrapper({parameters}):
        if {is_off}:
            return {i}function({arguments})
        # Not `open` and `close`: a signal handler may raise between a call and the `try` after it.
        with {i}span() if {i}attributes is None else {i}recorder.span_of(
            {i}site, {i}attributes(({positional}), {{{named}}})
        )():
            return {i}function({arguments})

    return wrapper
"""

_COROUTINE = """
def {i}make({i}function, {i}recorder, {i}switch, {i}site, {i}attributes, {i}idle, {i}passes, {i}results):
    {i}stepped = {i}recorder.stepped

    async def wrapper({parameters}):
        {i}passed = {is_off}
        {i}told = None if {i}passed or {i}attributes is None else {i}attributes(({positional}), {{{named}}})
        {i}coroutine = {i}function({arguments})
        {forget}
        if {i}passed:
            return await {i}coroutine
        return await {i}stepped({i}site, {i}coroutine, {i}told, {i}results)

    return wrapper
"""

_GENERATOR = """
def {i}make({i}function, {i}recorder, {i}switch, {i}site, {i}attributes, {i}idle, {i}passes, {i}results):
    def wrapper({parameters}):
        {i}passed = {is_off}
        {i}generator = {i}function({arguments})
        {i}told = None if {i}passed or {i}attributes is None else {i}attributes(({positional}), {{{named}}})
        {forget}
        {i}send = {i}generator.send
        {i}value = {i}thrown = None
        if not {i}passed:
            {i}stretch = {i}recorder.stretch({i}site, {i}told)
            {i}resume, {i}suspend, {i}yielded = {i}stretch.resume, {i}stretch.suspend, {i}stretch.yielded
            try:
                while not {i}resume():
                    try:
                        {i}item = {i}send({i}value) if {i}thrown is None else {i}generator.throw({i}thrown)
                    except StopIteration as {i}done:
                        {i}suspend()
                        return {i}done.value
                    except BaseException:
                        {i}suspend()
                        raise
                    {i}yielded()
                    # What is thrown in, GeneratorExit too, is the body's to answer: by a value, by one item more.
                    try:
                        {i}value, {i}thrown = (yield {i}item), None
                    except BaseException as {i}error:
                        {i}value, {i}thrown = None, {i}error
            except GeneratorExit:
                raise
            except BaseException as {i}error:
                {i}stretch.finish({i}error)
                raise
            finally:
                {i}stretch.finish(None)
        # Not `yield from`, which would close the generator where GeneratorExit is thrown into it.
        while True:
            try:
                {i}item = {i}send({i}value) if {i}thrown is None else {i}generator.throw({i}thrown)
            except StopIteration as {i}done:
                return {i}done.value
            try:
                {i}value, {i}thrown = (yield {i}item), None
            except BaseException as {i}error:
                {i}value, {i}thrown = None, {i}error

    return wrapper
"""

_ANSWERED_OPENING = (
    _OPENING.removesuffix("            return {i}function({arguments})\n\n    return wrapper\n")
    + """            {i}result = {i}function({arguments})
            if {i}told := {i}results({i}result):
                {i}recorder.annotate_innermost({i}told)
            return {i}result

    return wrapper
"""
)
"""With the result of each call told before the span ends."""

_AWAITABLE = _GENERATOR.replace("{i}stretch.yielded", "{i}stretch.suspend")
"""What a generator yields that is awaited is for the event loop: no item."""

_ASYNC_GENERATOR = """
def {i}make({i}function, {i}recorder, {i}switch, {i}site, {i}attributes, {i}idle, {i}passes, {i}results):
    async def wrapper({parameters}):
        {i}passed = {is_off}
        {i}generator = {i}function({arguments})
        {i}told = None if {i}passed or {i}attributes is None else {i}attributes(({positional}), {{{named}}})
        {forget}
        {i}stretch = {i}idle if {i}passed else {i}recorder.stretch({i}site, {i}told)
        {i}value = {i}thrown = None
        try:
            while True:
                if {i}stretch.resume():
                    {i}stretch = {i}idle  # muted meanwhile
                try:
                    {i}item = await {i}stretch.stepped(
                        {i}generator.asend({i}value) if {i}thrown is None else {i}generator.athrow({i}thrown)
                    )
                except StopAsyncIteration:
                    {i}stretch.suspend()
                    return
                except BaseException:
                    {i}stretch.suspend()
                    raise
                {i}stretch.yielded()
                try:
                    {i}value, {i}thrown = (yield {i}item), None
                except BaseException as {i}error:
                    if {i}idle.has_ended({i}generator):
                        raise
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


_TEMPLATES = {
    "scope": _OPENING,
    "coroutine": _COROUTINE,
    "generator": _GENERATOR,
    "awaitable": _AWAITABLE,
    "async generator": _ASYNC_GENERATOR,
}


class _NoStretch:
    """Stands for the span of an async generator that began while recording was off."""

    def resume(self) -> None: ...

    def suspend(self) -> None: ...

    def yielded(self) -> None: ...

    def stepped(self, awaitable: Any) -> Any:
        return awaitable

    def finish(self, error: BaseException | None) -> None: ...

    def has_ended(self, generator: Any) -> bool:
        """Whether an async generator was closed by somebody else, as its loop closes all: it ignores a throw then."""
        return getattr(generator, "ag_frame", generator) is None


_NO_STRETCH = _NoStretch()


def _make(
    template: str,
    recorder: Any,
    function: Callable[..., Any],
    site: Site,
    attributes: Attributes | None,
    passes: Passes | None = None,
    results: Results | None = None,
) -> Any:
    """A wrapper after a template, with the parameters, the defaults and the globals of the function."""
    code = getattr(function, "__code__", None)
    is_plain = isinstance(function, FunctionType) and isinstance(code, CodeType)
    shape = _parameters(code) if is_plain else _ANY  # type: ignore[arg-type]
    made = _template(template, shape, may_pass=passes is not None)(
        function, recorder, recorder, site, attributes, _NO_STRETCH, passes, results
    )
    if template is _AWAITABLE:
        made = types.coroutine(made)
    if not is_plain:
        return made
    wrapper = FunctionType(
        made.__code__, function.__globals__, function.__name__, function.__defaults__, made.__closure__
    )
    wrapper.__kwdefaults__ = function.__kwdefaults__
    return wrapper


def _is_awaitable(function: Any) -> bool:
    """Whether `types.coroutine` has made a generator function one whose generators can be awaited."""
    code = getattr(_innermost(function), "__code__", None)
    return isinstance(code, CodeType) and bool(code.co_flags & inspect.CO_ITERABLE_COROUTINE)


class _Shape(NamedTuple):
    """What a function takes, as text: its parameters, the same handed on, in two parts and all their names."""

    parameters: str
    positional: str
    named: str
    arguments: str
    names: tuple[str, ...]


_ANY = _Shape("*args, **kwargs", "*args,", "**kwargs", "*args, **kwargs", ("args", "kwargs"))


def _parameters(code: CodeType) -> _Shape:
    count, total = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    only_by_keyword = code.co_varnames[count:total]
    taken = list(code.co_varnames[:count])
    positional = list(taken)
    if code.co_posonlyargcount:
        taken.insert(code.co_posonlyargcount, "/")
    last = total
    if code.co_flags & inspect.CO_VARARGS:
        taken.append("*" + code.co_varnames[last])
        positional.append("*" + code.co_varnames[last])
        last += 1
    elif only_by_keyword:
        taken.append("*")
    taken += only_by_keyword
    by_name = [f"{name}={name}" for name in only_by_keyword]
    named = [f"{name!r}: {name}" for name in only_by_keyword]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        rest = "**" + code.co_varnames[last]
        taken.append(rest)
        by_name.append(rest)
        named.append(rest)
        last += 1
    names = code.co_varnames[:last]
    if any(not name.isidentifier() or keyword.iskeyword(name) for name in names):
        return _ANY  # no compiler made these
    first = "".join(f"{word}, " for word in positional).rstrip()
    return _Shape(", ".join(taken), first, ", ".join(named), ", ".join(positional + by_name), names)


@functools.lru_cache(maxsize=1024)
def _template(template: str, shape: _Shape, *, may_pass: bool) -> Callable[..., Any]:
    """The function that makes wrappers of this shape, which ask whether a call passes if it `may_pass`."""
    ours = "instrument_"
    while any(name.startswith(ours) for name in shape.names):
        ours += "_"
    forget = "del " + ", ".join(shape.names) if shape.names else "pass"
    is_off = f"not {ours}switch.on"
    if may_pass:  # what passes is no call of the site, and is not to be counted as one while that is muted
        is_off = f"not {ours}recorder.on or {ours}passes(({shape.positional})) or {is_off}"
    source = template.format(i=ours, forget=forget, is_off=is_off, **shape._asdict())
    made: dict[str, Any] = {}
    exec(compile(source, "<instrument>", "exec", dont_inherit=True), made)  # noqa: S102 - names alone are filled in
    return made[f"{ours}make"]  # type: ignore[no-any-return]
