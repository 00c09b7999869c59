"""Wrappers that record a span per call of a function, coroutine or generator. They are in C and add no Python frame.

A coroutine's span stays current while the coroutine is suspended. A generator's span is current only while its body
runs.

A web handler that raises `HTTPException(404)` has served its request, so statuses below 500 are no errors. A cancelled
call has an attribute with its outcome, and no error.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, TypeVar

from instrument import native
from instrument.recording.spans import Site

STATUS, RPC_STATUS = "http.response.status_code", "rpc.status_code"
"""The attributes with a request's status, by OpenTelemetry's conventions for HTTP and RPC."""

FIRST_OF_SERVER = 500
"""The lowest HTTP status that is an error of the server."""

ANSWERS: Mapping[str, Mapping[str, str | int]] = {
    "aiohttp.web_exceptions": {"HTTPException": "status_code"},
    "bottle": {"HTTPResponse": "_status_code"},
    "django.core.exceptions": {"BadRequest": 400, "PermissionDenied": 403, "SuspiciousOperation": 400},
    "django.http.multipartparser": {"MultiPartParserError": 400},
    "django.http.response": {"Http404": 404},
    "falcon.http_error": {"HTTPError": "status"},
    "falcon.http_status": {"HTTPStatus": "status"},
    "fastapi.exceptions": {"RequestValidationError": 422},
    "litestar.exceptions.http_exceptions": {"HTTPException": "status_code"},
    "rest_framework.exceptions": {"APIException": "status_code"},
    "sanic.exceptions": {"SanicException": "status_code"},
    "starlette.exceptions": {"HTTPException": "status_code"},
    "tornado.web": {"HTTPError": "status_code"},
    "werkzeug.exceptions": {"HTTPException": "code"},
}
"""The HTTP status of an exception class, or the name of the attribute with the status, by module and class."""


CANCELLED = "cancelled"


def find_outcome(error: BaseException) -> str | None:
    """Return the outcome of a span that an exception ended, such as `cancelled`. Return None for a failure. The
    exception's own methods never run."""
    outcome: str | None = native.MODULE.outcome_of(error)
    return outcome


Function = TypeVar("Function", bound=Callable[..., Any])


Attributes = Callable[[tuple[Any, ...], dict[str, Any]], "dict[Any, Any] | None"]
"""A function of a call's arguments that returns the span's attributes or None. It never raises."""


Results = Callable[[Any], "dict[Any, Any] | None"]
"""A function of a call's result that returns the span's attributes or None. It never raises."""

FORMS = ("call", "scope", "coroutine", "generator", "awaitable", "async generator", "submit", "start")
"""The forms of wrapped functions. C code uses the index of a form."""

Passes = Callable[[tuple[Any, ...]], bool]
"""A function of a call's positional arguments that returns True for a call without a span. It never raises."""


def wrap(
    recorder: Any,
    function: Function,
    site: Site,
    attributes: Attributes | None = None,
    passes: Passes | None = None,
    works: Attributes | None = None,
    results: Results | None = None,
) -> Function:
    """Return a function that records each call as a span. Its attribute `__instrument__` is the site.

    The result has the function's kind, signature, names, code, attributes and `__wrapped__`. These functions get a
    call's arguments or result:

    - `attributes`: returns attributes of the span before the call
    - `results`: returns attributes of the span after the call, but not for a generator
    - `passes`: runs first, and returns True if the call gets no span; prevents the fast path
    - `works`: returns the objects on which a call with device time works
    """
    evaluate = attributes or works
    if attributes is not None and works is not None:
        evaluate = functools.partial(_read_attributes_and_work, attributes, works)
    has_attributes = attributes is not None or results is not None
    # A plain function that is marked as a coroutine function (`inspect.markcoroutinefunction`) runs when it is called,
    # and returns an awaitable of its own: its span is the call.
    flags = _code_flags(function)
    wrapper: Any
    if inspect.isasyncgenfunction(function):
        form, shape = "async generator", "generator"
    elif inspect.iscoroutinefunction(function) and (flags is None or flags & inspect.CO_COROUTINE):
        form = shape = "coroutine"
    elif inspect.isgeneratorfunction(function):
        is_awaitable = (flags or 0) & inspect.CO_ITERABLE_COROUTINE  # by `types.coroutine`
        form, shape = "awaitable" if is_awaitable else "generator", "generator"
    elif site.kind == "request" or passes is not None:
        form, shape = "scope", "wrapper"
    else:
        form, shape = "call", "wrapper" if has_attributes else "call"  # which costs about as much
    if form == "call":
        wrapper = make_wrapper(recorder, function, site, works, attributes, results)
    else:
        wrapper = make_wrapper(recorder, function, site, None, evaluate, results, passes, FORMS.index(form))
    if site.kind == "step":  # a schedule that counts them would stop
        recorder.note_shape(site, shape)
    else:
        recorder.allow_muting(site, wrapper, shape)
    return wrapper  # type: ignore[no-any-return]


def bare_function(wrapper: Any) -> Any:
    return wrapper.__instrument_function__


def _read_attributes_and_work(
    attributes: Attributes, works: Attributes, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[Any, Any]:
    return {**(attributes(args, kwargs) or {}), **(works(args, kwargs) or {})}


def _code_flags(function: Any) -> int | None:
    """Return the flags of a function's code, None without code. A `functools.partial` has the flags of its function."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    return code.co_flags if isinstance(code, CodeType) else None


def set_call_switch(wrapper: Any, switch: Any) -> None:
    """Choose between recording and counting the calls of a wrapper. Running calls end as they began. `switch` is the
    recorder, or the `Pass` that counts the calls of a muted site. False runs only the bare function."""
    wrapper.__instrument_pass__ = None if hasattr(switch, "passes") else switch


def make_wrapper(
    recorder: Any,
    function: Callable[..., Any],
    site: Site,
    works: Attributes | None = None,
    attributes: Attributes | None = None,
    results: Results | None = None,
    passes: Passes | None = None,
    form: int = 0,
) -> Any:
    """Return a function that records each call as a span. `form` is an index of `FORMS`."""
    return native.MODULE.Function(
        recorder, function, site, works=works, attributes=attributes, results=results, passes=passes, form=form
    )


def wrap_method(
    recorder: Any,
    function: Function,
    sites: dict[int, Site | None],
    decide: Callable[[Any], Site | None],
    evaluate: Callable[[Any], Any] | None = None,
) -> Function:
    """Return a method that records the calls of instances with a site. Any other call takes up to 60 ns more.

    - `sites`: the site of each instance by its identity, None for no spans
    - `decide`: returns the site of a new instance, and never raises; it stores a final site in `sites` until the
      instance is deleted
    - `evaluate`: sets the evaluator of Python's frames (None: Python's own) and returns the previous evaluator

    While `decide` runs, Python's own evaluator is set, so that nothing is compiled.
    """
    # A compiler of models takes the code of the wrapped function, and never meets the probe.
    method: Function = native.MODULE.Function(recorder, function, None, sites, decide, evaluate)
    return method
