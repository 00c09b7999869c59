#!/usr/bin/env bash
# OpenTelemetry's Python exporter for OTLP over HTTP reports spans as delivered that a redirect turned away.
#
# Versions: opentelemetry-exporter-otlp-proto-http 1.45.2, opentelemetry-sdk 1.45.2, Python 3.11.
# Seen: a collector behind a gateway answers 308 with a Location, as gateways do that move from HTTP to HTTPS.
#   The exporter neither follows the redirect nor retries. It returns SpanExportResult.SUCCESS and logs nothing.
#   force_flush() returns True. The spans are lost.
# Expected: the redirect is followed, or the export fails and is logged, as it is for 400.
# A user sees an empty backend and no error on the service's side.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q opentelemetry-exporter-otlp-proto-http==1.45.2 opentelemetry-sdk==1.45.2
"$folder/venv/bin/python" - <<'PYTHON'
import http.server
import logging
import threading

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

requests, results, records = [], [], []


class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        requests.append(self.path)
        moved, refused = self.path.startswith("/moved"), self.path.startswith("/refused")
        self.send_response(308 if moved else 400 if refused else 200)
        if moved:
            self.send_header("Location", "/new/v1/traces")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class Exporter(OTLPSpanExporter):
    def export(self, spans):
        results.append(super().export(spans).name)
        return results[-1]


class Records(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        records.append(record.getMessage())


logging.getLogger("opentelemetry").addHandler(Records(logging.WARNING))
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
threading.Thread(target=server.serve_forever, daemon=True).start()
for path in "/moved", "/refused":
    provider = TracerProvider()
    exporter = Exporter(endpoint=f"http://127.0.0.1:{server.server_port}{path}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    with provider.get_tracer("example").start_as_current_span("request"):
        pass
    flushed = provider.force_flush()
    print(path, "->", results[-1], "force_flush", flushed, "log", records)
    if path == "/moved":
        assert (results, flushed, records) == (["SUCCESS"], True, []), "the redirect is no longer a success"
    provider.shutdown()
assert requests == ["/moved/v1/traces", "/refused/v1/traces"], f"the redirect was followed: {requests}"
assert results[-1] == "FAILURE" and records, "a refused export is reported"
PYTHON
