"""An exception by which a web framework answers a request is a status, and an error of the service from 500 on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from kept import Kept
from otlp_spans import messages_of
from otlp_spans import span as span_of
from readback import spans_in

from instrument.profile.model import Capture
from instrument.recorder.wrapping import ANSWERS, STATUS, wrap
from instrument.recording.spans import OUTCOME, Site, Span

REQUEST, WORK = Site("handle", "request"), Site("authorise", "op")


def attributes_of(span: Span) -> dict[str, Any]:
    (message,) = messages_of([span])
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in message.attributes}


def made_up(module: str, name: str, answer: str | int, status: int) -> BaseException:
    """An exception of a framework that need not be installed, one class below the framework's own."""
    base = type(name, (Exception,), {"__module__": module, "__qualname__": name})
    error: BaseException = type("Own", (base,), {"__module__": "service"})()
    if isinstance(answer, str):
        setattr(error, answer, status)
    return error


def raised_in_request(recorder: Any, error: BaseException) -> tuple[Any, Any, list[str]]:
    """The spans of a request and of a function in it that raised this, and what was kept for its error."""
    trees = Kept(recorder, Capture(sample=0.0, errors=True), 10)

    def authorise() -> None:
        raise error

    inner = wrap(recorder, authorise, WORK)

    def handle() -> None:
        inner()

    with pytest.raises(type(error)) as caught:
        wrap(recorder, handle, REQUEST)()
    assert caught.value is error
    kept = [spans[0].site.name for spans in trees.read()]
    found = {span.site: span for span in spans_in(recorder)}
    return found[REQUEST], found[WORK], kept


def errors_counted(recorder: Any) -> int:
    return sum(row.totals.errors for row in recorder.tally().iterate_totals())


@pytest.mark.parametrize(
    ("module", "name", "answer"),
    [(module, name, answer) for module, known in ANSWERS.items() for name, answer in known.items()],
)
def test_an_answer_below_500_is_no_error_and_keeps_no_request(
    recorder: Any, module: str, name: str, answer: str | int
) -> None:
    error = made_up(module, name, answer, 404)
    status = 404 if isinstance(answer, str) else answer
    request, work, kept = raised_in_request(recorder, error)
    assert (request.error, work.error, kept) == (None, None, [])
    assert request.attributes == {STATUS: status}
    assert work.attributes == {}  # it is the request that is answered
    assert errors_counted(recorder) == 0


@pytest.mark.parametrize("status", [500, 503, 599])
def test_an_answer_from_500_on_is_an_error_that_bears_its_status(recorder: Any, status: int) -> None:
    request, work, kept = raised_in_request(
        recorder, made_up("starlette.exceptions", "HTTPException", "status_code", status)
    )
    assert (request.error, work.error, kept) == ("Own", "Own", ["handle"])
    assert request.attributes == {STATUS: status}
    assert errors_counted(recorder) == 2
    assert attributes_of(request)[STATUS] == status


@pytest.mark.parametrize(
    ("module", "held", "status"),
    [
        ("falcon.http_error", "404 Not Found", 404),
        ("falcon.http_error", "nothing", None),
        ("starlette.exceptions", None, None),
        ("starlette.exceptions", -1, None),
        ("starlette.exceptions", 2**80, None),
        ("starlette.exceptions", b"404", None),
    ],
)
def test_a_status_that_is_none_leaves_the_error_what_it_is(
    recorder: Any, module: str, held: Any, status: int | None
) -> None:
    ((name, answer),) = ANSWERS[module].items()
    error = made_up(module, name, answer, held)
    request, _, _ = raised_in_request(recorder, error)
    assert request.attributes.get(STATUS) == status
    assert request.error == (None if status else "Own")


def test_a_class_of_the_service_that_only_looks_like_it_is_an_error(recorder: Any) -> None:
    class HTTPException(Exception):
        status_code = code = 404

    request, _, kept = raised_in_request(recorder, HTTPException())
    assert (request.error, request.attributes, kept) == ("HTTPException", {}, ["handle"])


def test_an_answer_whose_status_raises_reaches_the_caller_as_it_is(recorder: Any) -> None:
    base = type(made_up("starlette.exceptions", "HTTPException", "status_code", 404)).__mro__[1]

    class Odd(base):  # type: ignore[misc, valid-type]
        @property
        def status_code(self) -> int:
            raise RuntimeError("not yet")

    request, _, _ = raised_in_request(recorder, Odd())
    assert request.error == "Odd"


def test_every_kind_of_function_and_scope_distinguishes_an_answer_from_an_error(recorder: Any) -> None:
    error = made_up("werkzeug.exceptions", "HTTPException", "code", 404)

    async def coroutine() -> None:
        raise error

    def generator() -> Any:
        yield 1
        raise error

    async def async_generator() -> AsyncIterator[int]:
        yield 1
        raise error

    async def main() -> None:
        for kind in ("request", "op"):
            with contextlib.suppress(type(error)):
                await wrap(recorder, coroutine, Site("coroutine", kind))()
            with contextlib.suppress(type(error)):
                async for _ in wrap(recorder, async_generator, Site("async generator", kind))():
                    pass
            with contextlib.suppress(type(error)):
                list(wrap(recorder, generator, Site("generator", kind))())
            with contextlib.suppress(type(error)), recorder.make_span_factory(Site("scope", kind))():
                raise error

    asyncio.run(main())
    spans = spans_in(recorder)
    assert len(spans) == 8
    assert {span.error for span in spans} == {None}
    assert {(span.site.kind, span.attributes.get(STATUS)) for span in spans} == {("request", 404), ("op", None)}


def test_attributes_of_a_span_stay_next_to_its_status(recorder: Any) -> None:
    error = made_up("aiohttp.web_exceptions", "HTTPException", "status_code", 302)
    given = {"route": "/a"}
    with contextlib.suppress(type(error)), recorder.make_span_factory(REQUEST, given)():
        raise error
    (request,) = spans_in(recorder)
    assert (request.attributes, given) == ({"route": "/a", STATUS: 302}, {"route": "/a"})


def _starlette() -> BaseException:
    return importlib.import_module("starlette.exceptions").HTTPException(404)  # type: ignore[no-any-return]


def _fastapi() -> BaseException:
    return importlib.import_module("fastapi").HTTPException(status_code=404)  # type: ignore[no-any-return]


def _abort_of_flask() -> BaseException:
    try:
        importlib.import_module("flask").abort(404)
    except Exception as error:
        return error
    raise AssertionError


def _falcon() -> BaseException:
    return importlib.import_module("falcon").HTTPNotFound()  # type: ignore[no-any-return]


MADE_BY: dict[str, Callable[[], BaseException]] = {
    "starlette": _starlette,
    "fastapi": _fastapi,
    "flask": _abort_of_flask,
    "falcon": _falcon,
    **{
        name: lambda module=module, args=args, cls=cls: getattr(importlib.import_module(module), cls)(*args)
        for name, module, cls, args in (
            ("aiohttp", "aiohttp.web", "HTTPNotFound", ()),
            ("bottle", "bottle", "HTTPError", (404,)),
            ("django", "django.http", "Http404", ()),
            ("litestar", "litestar.exceptions", "NotFoundException", ()),
            ("sanic", "sanic.exceptions", "NotFound", ()),
            ("tornado", "tornado.web", "HTTPError", (404,)),
            ("werkzeug", "werkzeug.exceptions", "NotFound", ()),
        )
    },
}


@pytest.mark.parametrize("framework", MADE_BY)
def test_the_exceptions_of_installed_frameworks_are_known(recorder: Any, framework: str) -> None:
    pytest.importorskip(framework)
    if framework == "aiohttp":  # whose exceptions are responses, and want a loop

        async def make() -> BaseException:
            return MADE_BY[framework]()

        error = asyncio.run(make())
    else:
        error = MADE_BY[framework]()
    request, _, _ = raised_in_request(recorder, error)
    assert (request.error, request.attributes) == (None, {STATUS: 404})


class Cancelled(BaseException):
    """The exception of trio."""


class Stopped(SystemExit):
    """A service's own."""


BROKEN_OFF = [
    (asyncio.CancelledError(), "cancelled"), (Cancelled(), "cancelled"), (GeneratorExit(), "closed early"),
    (KeyboardInterrupt(), "stopped"), (SystemExit(), "stopped"), (SystemExit(0), "stopped"), (Stopped(0), "stopped"),
]  # fmt: skip

FAILED = [
    SystemExit(1), SystemExit("no model"), Stopped(3), TimeoutError(), concurrent.futures.CancelledError(),
    BaseException(), ValueError(),
]  # fmt: skip


@pytest.mark.parametrize(("given", "error"), [((), None), ((0,), None), ((3,), "SystemExit"), (("why",), "SystemExit")])
def test_a_function_that_exits_has_failed_where_it_says_so(recorder: Any, given: tuple[Any, ...], error: str) -> None:
    def leave() -> None:
        sys.exit(*given)  # raised by its class, in C

    with pytest.raises(SystemExit) as caught:
        wrap(recorder, leave, WORK)()
    assert caught.value.code == (given[0] if given else None)
    (span,) = spans_in(recorder)
    assert (span.error, span.attributes) == (error, {} if error else {OUTCOME: "stopped"})


@pytest.mark.parametrize("kind", ["request", "op"])
@pytest.mark.parametrize("way", ["scope", "call", "coroutine"])
@pytest.mark.parametrize(("error", "outcome"), [*BROKEN_OFF, *((error, None) for error in FAILED)], ids=repr)
def test_an_interrupted_span_has_not_failed_and_has_an_outcome(
    recorder: Any, error: BaseException, outcome: str | None, way: str, kind: str
) -> None:
    site = Site("served", kind=kind)

    def fail() -> None:
        raise error

    async def wait() -> None:
        raise error

    def scoped() -> None:
        with recorder.make_scope("served", kind=kind, attributes={"tenant": "x"}):
            raise error

    async def awaited() -> None:
        # In a task of its own a loop would tell of it.
        with contextlib.suppress(type(error)):
            await wrap(recorder, wait, site)()

    if way == "coroutine":
        asyncio.run(awaited())
    else:
        with pytest.raises(type(error)):
            scoped() if way == "scope" else wrap(recorder, fail, site)()
    (span,) = spans_in(recorder)
    assert span.error == (None if outcome else type(error).__name__)
    assert span.attributes == ({"tenant": "x"} if way == "scope" else {}) | ({OUTCOME: outcome} if outcome else {})
    (row,) = [row for row in recorder.tally().iterate_totals() if row.path]
    assert (row.totals.errors, row.totals.cancelled) == (not outcome, kind == "request" and bool(outcome))


def test_the_status_goes_to_the_collector_by_opentelemetrys_name() -> None:
    assert attributes_of(span_of(REQUEST, attributes={STATUS: 404}))["http.response.status_code"] == 404
