"""The exceptions by which web frameworks answer requests: a status of HTTP, and no error below 500.

A handler that raises `HTTPException(404)` has served its request. The classes are known by their modules, so that no
framework is imported; derived classes count as well.
"""

from __future__ import annotations

from collections.abc import Mapping

STATUS = "http.response.status_code"
"""The attribute of a request's span, by OpenTelemetry's conventions for HTTP."""

FIRST_OF_SERVER = 500
"""The first status that is an error of the server."""

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
"""The statuses by module and class, or the attributes that have them: numbers, or texts that begin with three digits.

The attributes are plain ones, so that reading them runs no code of the service.
"""

_classes, _module, _name = (vars(type)[name].__get__ for name in ("__mro__", "__module__", "__qualname__"))


def status_of(error: BaseException) -> int | None:
    """Return the status by which an exception answers a request, None without one. Never raises.

    Its twin is `status_of` in `_recorder_span.h`.
    """
    for kind in _classes(type(error)):
        answer = ANSWERS.get(_module(kind), {}).get(_name(kind))
        if answer is not None:
            try:
                value = getattr(error, answer) if isinstance(answer, str) else answer
                status = int(value[:3]) if isinstance(value, str) else value
                return int(status) if isinstance(status, int) and 100 <= status < 1000 else None
            except Exception:  # of a class of the service's own
                return None
    return None
