"""A real OpenTelemetry receiver for tests: `ddapm-test-agent` on free ports, asked what it has received.

It speaks OTLP by HTTP and by gRPC, keeps ids, parents and nanoseconds exactly, and refuses bodies above 1 MiB.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import pytest

START_LIMIT_S = 120.0
PROGRAM = "ddapm-test-agent"

T = TypeVar("T")


@dataclass(frozen=True)
class Received:
    """One span as the receiver holds it. `kind` and `status` are OTLP's words without their prefix."""

    trace_id: int
    span_id: int
    parent_id: int
    name: str
    kind: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    status: str
    message: str
    flags: int
    resource: Mapping[str, Any]
    scope: str
    schema_url: str
    trace_state: str
    link_states: tuple[str, ...]
    links: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Point:
    """One value of a metric as the receiver holds it. `kind` is gauge, updown, counter or histogram.

    The value of a histogram is its count; `data` is the point as it came.
    """

    name: str
    unit: str
    kind: str
    attributes: Mapping[str, Any]
    start_ns: int
    at_ns: int
    value: float
    resource: Mapping[str, Any]
    scope: str
    schema_url: str
    temporality: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Receiver:
    """A running receiver: where to send, and what has come. `endpoint` is the final URL for http/protobuf."""

    http_port: int
    grpc_port: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.http_port}/v1/traces"

    @property
    def grpc_endpoint(self) -> str:
        return f"http://127.0.0.1:{self.grpc_port}"

    def spans(self) -> list[Received]:
        """Every span received since the start or the last `clear`, in the order of arrival."""
        requests = json.loads(self._get("/test/session/traces"))
        return [span for request in requests for span in _spans_of(request)]

    def points(self) -> list[Point]:
        """Every point of every metric received since then, in any order."""
        requests = json.loads(self._get("/test/session/metrics"))
        return [point for request in requests for point in _points_of(request)]

    def clear(self) -> None:
        """Forget what has come."""
        self._get("/test/session/clear")

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", timeout=240) as answer:
            return bytes(answer.read())


@contextmanager
def receiver() -> Iterator[Receiver]:
    """Start a receiver, wait until it answers, end it afterwards.

    Skips the test where the program is not installed, except in CI: there it fails.
    """
    program = _program()
    if program is None:
        if "CI" in os.environ:
            pytest.fail(f"{PROGRAM} is not installed; CI needs it (pip install {PROGRAM})")
        pytest.skip(f"{PROGRAM} is not installed (pip install {PROGRAM})")
    port, http_port, grpc_port = free_port(), free_port(), free_port()
    found = Receiver(http_port, grpc_port)
    command = [program, "--host", "127.0.0.1", "-p", str(port), "--web-ui-port", "0"]
    command += ["--otlp-http-port", str(found.http_port), "--otlp-grpc-port", str(found.grpc_port)]
    command += ["--disable-llmobs-data-forwarding", "--log-level", "ERROR"]
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "PYTHON", "INSTRUMENT"))
    }
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environ)
    try:
        _wait(process, found)
        yield found
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def read_until(read: Callable[[], T], is_whole: Callable[[T], bool]) -> T:
    """Return what is read once it is whole, or what is there in the end: the agent of a run may outlive its service."""
    end = time.monotonic() + START_LIMIT_S
    while not is_whole(found := read()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


_FIRST_PORT = 21_000 + 600 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = cycle(range(_FIRST_PORT, _FIRST_PORT + 600))
"""Ports that the system gives to nobody who asks for any port, 600 for each process of the tests."""


def free_port() -> int:
    """Return a port that nobody listens on now."""
    while True:
        port = next(_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _program() -> str | None:
    beside = Path(sys.executable).with_name(PROGRAM)
    return str(beside) if beside.exists() else shutil.which(PROGRAM)


def _wait(process: subprocess.Popen[bytes], found: Receiver) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not _answers(found):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            said = process.communicate()[0].decode(errors="replace")
            raise RuntimeError(f"{PROGRAM} did not start:\n{said[-2000:]}")
        time.sleep(0.05)


def _answers(found: Receiver) -> bool:
    try:
        socket.create_connection(("127.0.0.1", found.grpc_port), timeout=240).close()
        found.spans()
    except OSError:
        return False
    return True


def _spans_of(request: Mapping[str, Any]) -> Iterator[Received]:
    for of_resource in request.get("resource_spans", ()):
        resource = _attributes(of_resource.get("resource", {}))
        for of_scope in of_resource.get("scope_spans", ()):
            scope = of_scope.get("scope", {}).get("name", "")
            for span in of_scope.get("spans", ()):
                yield Received(
                    trace_id=_id(span["trace_id"]),
                    span_id=_id(span["span_id"]),
                    parent_id=_id(span.get("parent_span_id", "")),
                    name=span.get("name", ""),
                    kind=span.get("kind", "").removeprefix("SPAN_KIND_"),
                    start_ns=int(span["start_time_unix_nano"]),
                    end_ns=int(span["end_time_unix_nano"]),
                    attributes=_attributes(span),
                    status=span.get("status", {}).get("code", "STATUS_CODE_UNSET").removeprefix("STATUS_CODE_"),
                    message=span.get("status", {}).get("message", ""),
                    flags=int(span.get("flags", 0)),
                    resource=resource,
                    scope=scope,
                    schema_url=of_scope.get("schema_url", ""),
                    trace_state=span.get("trace_state", ""),
                    link_states=tuple(link.get("trace_state", "") for link in span.get("links", ())),
                    links=tuple((_id(link["trace_id"]), _id(link["span_id"])) for link in span.get("links", ())),
                )


def _points_of(request: Mapping[str, Any]) -> Iterator[Point]:
    for of_resource in request.get("resource_metrics", ()):
        resource = _attributes(of_resource.get("resource", {}))
        for of_scope in of_resource.get("scope_metrics", ()):
            for metric in of_scope.get("metrics", ()):
                data = metric.get("gauge") or metric.get("exponential_histogram") or metric["sum"]
                kind = "gauge" if "gauge" in metric else "counter" if data.get("is_monotonic") else "updown"
                kind = "histogram" if "exponential_histogram" in metric else kind
                for point in data["data_points"]:
                    yield Point(
                        name=metric["name"],
                        unit=metric["unit"],
                        kind=kind,
                        attributes=_attributes(point),
                        start_ns=int(point.get("start_time_unix_nano", 0)),
                        at_ns=int(point["time_unix_nano"]),
                        value=_number_of(point),
                        resource=resource,
                        scope=of_scope.get("scope", {}).get("name", ""),
                        schema_url=of_scope.get("schema_url", ""),
                        temporality=data.get("aggregation_temporality", "").removeprefix("AGGREGATION_TEMPORALITY_"),
                        data=point,
                    )


def _number_of(point: Mapping[str, Any]) -> float:
    whole = point.get("as_int", point.get("count"))
    return int(whole) if whole is not None else float(point.get("as_double", 0))


def _id(text: str) -> int:
    return int.from_bytes(base64.b64decode(text), "big")


def _attributes(message: Mapping[str, Any]) -> dict[str, Any]:
    return {pair["key"]: _value(pair.get("value", {})) for pair in message.get("attributes", ())}


def _value(value: Mapping[str, Any]) -> Any:
    """A value of OTLP's JSON, where an int is written as a string."""
    if "int_value" in value:
        return int(value["int_value"])
    if "double_value" in value:
        return float(value["double_value"])
    if "array_value" in value:
        return [_value(item) for item in value["array_value"].get("values", ())]
    return next(iter(value.values()), None)
