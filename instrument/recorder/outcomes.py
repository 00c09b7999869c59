"""The exceptions that end spans and are no failures.

Web frameworks answer requests by some: a handler that raises `HTTPException(404)` has served its request, by a status
of HTTP that is no error below 500. The classes are known by their modules, so that no framework is imported; derived
classes count as well.

A client that goes away, a stream that is closed early and a process that is stopped end running code with an exception
that is no `Exception`. For OpenTelemetry's API these are no errors either, nor is gRPC's status CANCELLED one of the
server in its conventions. So such a span has no error, and an attribute with how it ended.
"""

from __future__ import annotations

from collections.abc import Mapping

from instrument import native

STATUS, RPC_STATUS = "http.response.status_code", "rpc.status_code"
"""The attributes of a request's span with its status, by OpenTelemetry's conventions for HTTP and for RPC."""

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
"""The HTTP status of an exception by module and class, or the attribute that has the status. Its value is a number, or
a text that begins with three digits. Reading these attributes runs no code of the service."""


CANCELLED = "cancelled"
"""The outcome of a span whose task was cancelled."""


def outcome_of(error: BaseException) -> str | None:
    """Return the outcome of a span that an exception broke off, None for a failure. It runs no code of the class."""
    outcome: str | None = native.MODULE.outcome_of(error)
    return outcome
