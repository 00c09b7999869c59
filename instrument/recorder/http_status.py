"""Which exceptions are a web framework's way to answer a request: a status of HTTP, and no error where it is below 500.

A handler that raises `HTTPException(404)` has served its request. The classes are known by where they are defined, so
that no framework is imported; what is derived from them counts as well.
"""

from __future__ import annotations

from collections.abc import Mapping

STATUS = "http.response.status_code"
REQUEST_BYTES, ANSWER_BYTES = "http.request.body.size", "http.response.body.size"
"""Attributes of a request's span, by OpenTelemetry's conventions for HTTP."""

FIRST_OF_SERVER = 500
"""Statuses from here on are errors of the server."""

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
"""By module and class the status, or the attribute that holds it: a number, or text that begins with three digits.

The attributes are plain ones, so that to ask for them runs no code of the service's.
"""

_classes, _module, _name = (vars(type)[name].__get__ for name in ("__mro__", "__module__", "__qualname__"))


def status_of(error: BaseException) -> int | None:
    """The status by which an exception answers a request, None where it is not of a web framework. Never raises.

    Its twin is `status_of` in `_recorder_span.h`.
    """
    for kind in _classes(type(error)):
        answer = ANSWERS.get(_module(kind), {}).get(_name(kind))
        if answer is not None:
            try:
                found = getattr(error, answer) if isinstance(answer, str) else answer
                status = int(found[:3]) if isinstance(found, str) else found
                return int(status) if isinstance(status, int) and 100 <= status < 1000 else None
            except Exception:  # a class of the service's that makes something else of it
                return None
    return None
