"""Functions, coroutines and generators with a span around them, each still of its own kind.

A coroutine's span stays current while it is suspended, for its task has a context of its own: its wrapper steps it and
tells what of its time it was suspended. A generator runs in the context of whoever resumes it, so its span is current
only while its body runs.

The recorder has no frame of its own: its wrapper, and what that gives, stand for the function and the coroutine or
generator.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

from instrument.recording.spans import Site

Function = TypeVar("Function", bound=Callable[..., Any])


Attributes = Callable[[tuple[Any, ...], dict[str, Any]], "dict[Any, Any] | None"]
"""Gives the attributes of a call's span from its arguments, None for none; never raises."""


Results = Callable[[Any], "dict[Any, Any] | None"]
"""Gives attributes of a call's span from what the call gives, None for none; never raises."""

FORMS = ("call", "scope", "coroutine", "generator", "awaitable", "async generator", "submit", "start")
"""The forms of calls, in the order in which the recorder numbers them. The last two hand work to other threads."""

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
    first, takes a plain function off the fast path. `works` gives, as an attribute that no reader sees, what a
    call works on whose device time is asked for.
    """
    given = attributes or works
    if attributes is not None and works is not None:
        given = functools.partial(_both, attributes, works)
    told_of_call = attributes is not None or results is not None
    made: Any
    if inspect.isasyncgenfunction(function):
        form, shape = "async generator", "generator"
    elif inspect.iscoroutinefunction(function) and not _is_marked(function):
        form = shape = "coroutine"
    elif inspect.isgeneratorfunction(function):
        form, shape = "awaitable" if _is_awaitable(function) else "generator", "generator"
    elif site.kind == "request" or passes is not None:
        form, shape = "scope", "wrapper"
    else:
        form, shape = "call", "wrapper" if told_of_call else "call"  # which costs about as much
    if form == "call":
        made = recorder.make_function(function, site, works, attributes, results)
    else:
        made = recorder.make_function(function, site, None, given, results, passes, FORMS.index(form))
    if site.kind == "step":  # a schedule that counts them would stop
        recorder.note_shape(site, shape)
    else:
        recorder.may_mute(site, made, shape)
    return made  # type: ignore[no-any-return]


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


def _is_awaitable(function: Any) -> bool:
    """Return True where `types.coroutine` has made the generators of a function awaitable."""
    code = getattr(_innermost(function), "__code__", None)
    return isinstance(code, CodeType) and bool(code.co_flags & inspect.CO_ITERABLE_COROUTINE)


def turn(made: Any, switch: Any) -> None:
    """Let what `wrap` has made ask `switch` whether it is on, in place of its recorder, or that again.

    One that is a muted site's `Pass` lets each call pass and counts it. To those calls it costs one branch and the
    counting, to others nothing. Calls that are under way end as they began.
    """
    made.__instrument_pass__ = None if hasattr(switch, "passes") else switch


def retire(made: Any) -> None:
    """Let what `wrap` has made pass every call to the bare function from now on, at the cost of one branch.

    For one that has been taken off and that somebody still holds. Calls that are under way end as they began.
    """
    turn(made, False)
