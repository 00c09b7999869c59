"""The HTTP endpoint for Prometheus, which answers a scrape with the metrics of all processes of a run.

The totals of ended processes are saved in a file, so that counters never fall, not even after a restart of the
exporter.
"""

from __future__ import annotations

import gzip
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from instrument.otlp import exposition
from instrument.otlp.exposition import MetricAndOrigin, make_registry, metrics_of_run, require_prometheus
from instrument.otlp.metrics_queue import Metered
from instrument.recording.distributions import Distribution, Labels, Metric, sum_metrics
from instrument.recording.metric_definitions import COUNTER, HISTOGRAM
from instrument.runtime import file_writing
from instrument.runtime.threads import Thread
from instrument.runtime.unpatched import Empty, SimpleQueue

SCRAPE_TIMEOUT_S = 10.0
"""The maximum seconds to wait for the HTTP request of a scrape. The wait for the metrics has the same limit."""

MOST_SEPARATE, MOST_SUMS = 16, 64
"""The maximum number of ended processes with separate totals, and of totals that older processes share."""

ENDED_METRICS_FILE = "metrics.ended"

Scope = tuple[str, str]
"""The processes that a scrape covers: ("run", name of the run) or ("listen", host and port)."""

_Part = tuple[str, list[Scope], str, list[tuple[str, str, str, str, list[tuple[Labels, float | Distribution]]]]]
"""A stored entry: key, scopes, service and metrics. The key is empty for a sum over processes."""


class EndedMetrics:
    """The metrics of ended processes, stored in a file for the next exporter."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / ENDED_METRICS_FILE
        self._apart: dict[str, tuple[list[Scope], str, list[Metric]]] = {}
        self._together: dict[tuple[Scope, str], list[Metric]] = {}
        with suppress(OSError, TypeError, ValueError):
            if self._path is not None:
                for key, scopes, service, stored in msgspec.json.decode(self._path.read_bytes(), type=list[_Part]):
                    metrics = [Metric(name, unit, kind, about, dict(of)) for name, unit, kind, about, of in stored]
                    if key:
                        self._apart[key] = scopes, service, metrics
                    else:
                        self._together[scopes[0], service] = metrics

    def add_metrics(self, key: str, scopes: Sequence[Scope], metered: Metered) -> None:
        if metered.snapshot is None or not scopes:
            return
        metrics = [metric for metric in metered.snapshot.metrics if metric.kind in (COUNTER, HISTOGRAM)]
        self._apart[key] = list(scopes), metered.origin.service, metrics
        while len(self._apart) > MOST_SEPARATE:
            its_scopes, service, metrics = self._apart.pop(next(iter(self._apart)))
            for scope in its_scopes:
                self._together[scope, service] = sum_metrics([*self._together.pop((scope, service), ()), *metrics])
        while len(self._together) > MOST_SUMS:
            del self._together[next(iter(self._together))]
        self._write_file()

    def sum_by_service(self, scope: Scope, living: Iterable[str]) -> dict[str, list[Metric]]:
        lives, metrics_by_service = set(living), dict[str, list[Metric]]()
        parts = [part for key, part in self._apart.items() if key not in lives]
        together = [([part_scope], service, metrics) for (part_scope, service), metrics in self._together.items()]
        for scopes, service, metrics in (*together, *parts):
            if scope in scopes:
                metrics_by_service.setdefault(service, []).extend(metrics)
        return {service: sum_metrics(metrics) for service, metrics in metrics_by_service.items()}

    def _write_file(self) -> None:
        if self._path is None:
            return
        parts = [(key, *part) for key, part in self._apart.items()]
        parts += [("", [scope], service, metrics) for (scope, service), metrics in self._together.items()]
        stored = [
            (*place, [(of.name, of.unit, of.kind, of.description, [*of.series.items()]) for of in metrics])
            for *place, metrics in parts
        ]
        with suppress(OSError), file_writing.open_replacement(self._path) as file:
            file.write(msgspec.json.encode(stored, enc_hook=int))


class Scrapes:
    """A server for Prometheus, which answers each scrape on a separate thread.

    `wake` wakes the thread that calls `answer_waiting`. Raises `ExportError` if `prometheus_client` is not installed.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        require_prometheus()
        self._wake = wake
        self._asked: SimpleQueue[tuple[Scope, SimpleQueue[list[MetricAndOrigin]]]] = SimpleQueue()

    def answer_waiting(self, look: Callable[[Scope], tuple[list[Metered], dict[str, list[Metric]]]]) -> None:
        """Answer the waiting scrapes. `look` returns the metrics of each living process in a scope, and sums over ended
        processes."""
        with suppress(Empty):
            while True:
                scope, reply = self._asked.get_nowait()
                reply.put(list(metrics_of_run(*look(scope))))

    def _await_metrics(self, scope: Scope) -> list[MetricAndOrigin]:
        reply: SimpleQueue[list[MetricAndOrigin]] = SimpleQueue()
        self._asked.put((scope, reply))
        self._wake()
        return reply.get(timeout=SCRAPE_TIMEOUT_S)

    def listen(self, descriptor: int, address: str) -> None:
        """Answer scrapes at a listening socket, with the metrics of the processes whose profile has this address."""
        server = self._make_server(("listen", address))
        server.socket = socket.socket(fileno=descriptor)
        Thread(server.serve_forever, "instrument-scrapes").start()

    def answer_scrape(self, descriptor: int, run: str) -> None:
        self._make_server(("run", run)).process_request(socket.socket(fileno=descriptor), ("", 0))

    def _make_server(self, scope: Scope) -> Any:
        from socketserver import ThreadingMixIn
        from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

        from prometheus_client import make_wsgi_app

        class Handler(WSGIRequestHandler):
            timeout = SCRAPE_TIMEOUT_S

            def log_message(self, format: str, *args: object) -> None: ...

        class Server(ThreadingMixIn, WSGIServer):
            daemon_threads = True
            block_on_close = False
            server_name, server_port = "", 0

            def handle_error(self, request: object, client_address: object) -> None: ...

        server = Server(("", 0), Handler, bind_and_activate=False)
        server.socket.close()
        server.setup_environ()
        answer_in_text: Any = make_wsgi_app(make_registry(lambda: self._await_metrics(scope)))

        def answer(environ: dict[str, Any], start_response: Callable[..., object]) -> Any:
            accept = environ.get("HTTP_ACCEPT", "")
            if not exposition.prefers_protobuf(accept):
                # The client library labels its text as 2.0.0 if asked, but its histograms are those of 1.0.0.
                accept = accept.replace("version=2.0.0", "version=1.0.0")
                return answer_in_text({**environ, "HTTP_ACCEPT": accept}, start_response)
            headers = [("Content-Type", exposition.CONTENT_TYPE)]
            body = exposition.pack_families(self._await_metrics(scope))
            if "gzip" in environ.get("HTTP_ACCEPT_ENCODING", ""):
                headers.append(("Content-Encoding", "gzip"))
                body = gzip.compress(body, 6)
            start_response("200 OK", headers)
            return [body]

        server.set_app(answer)
        return server
