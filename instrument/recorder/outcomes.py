"""The exceptions that end spans and are no failures.

Web frameworks answer requests by raising: a handler that raises `HTTPException(404)` has served its request, because
HTTP statuses below 500 are no errors of the server. The classes are found by their module's name, so that no framework
is imported; derived classes count as well. A client that goes away, a stream that is closed early and a process that is
stopped end running code with an exception that is no `Exception`. OpenTelemetry does not treat these as errors either,
nor gRPC's status CANCELLED of a server. So such a span has no error, but an attribute with its outcome.
"""

from __future__ import annotations

from collections.abc import Mapping

from instrument import native

STATUS, RPC_STATUS = "http.response.status_code", "rpc.status_code"
"""The attributes of a request's span with its status, by OpenTelemetry's conventions for HTTP and for RPC."""

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
"""The HTTP status of an exception by module and class, or the name of the attribute with the status. The attribute is a
number, or a text that begins with three digits. Reading it runs no code of the service."""


CANCELLED = "cancelled"
"""The outcome of a span whose task was cancelled."""


def outcome_of(error: BaseException) -> str | None:
    """Return the outcome of a span that an exception ended, None for a failure. Runs no code of the exception."""
    outcome: str | None = native.MODULE.outcome_of(error)
    return outcome
