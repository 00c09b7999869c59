"""`requests: auto` over model servers: each request is one, whichever of their processes it passes through.

The servers are started as their documentation says, without us and with us; who is not installed is skipped.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import importlib.util
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import server_programs
from otlp_receiver import Received, free_port, receiver
from server_programs import SERVED, answers, requests_in

from instrument import chrome
from instrument.instrumentors.requests import model_servers
from instrument.recording.spans import Span
from instrument.runtime import agent_socket

START_LIMIT_S = 120.0
TIMES = 200
PROFILE = """
service: served
requests: {ignore: [/health, /v2/health/*]}
functions: [{match: "work:*"}]
export:
  chrome: {path: "traces/{service}-{pid}-{window}.json"}
"""


MLSERVER = """
import json, pathlib, sys
from mlserver.cli.main import main
settings = json.loads(sys.argv[1])
settings["http_port"] = int(settings["http_port"])
pathlib.Path("settings.json").write_text(json.dumps(settings))
sys.argv[1:] = ["start", "."]
main()
"""


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"could not find {' and '.join(missing)}")


@dataclass(frozen=True)
class Ask:
    path: str
    body: Any = None

    def of(self, port: int, trace_id: int) -> tuple[int, bytes]:
        """Ask as the caller of a trace: status and body of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
        headers = {"traceparent": f"00-{trace_id:032x}-{trace_id & 0xFFFF:016x}-01", "content-type": "application/json"}
        body = None if self.body is None else json.dumps(self.body)
        connection.request("GET" if body is None else "POST", self.path, body, headers)
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return found


@contextlib.contextmanager
def serving(
    command: Sequence[str],
    folder: Path,
    *,
    ours: bool,
    ready: str = "/health",
    stop: int = signal.SIGTERM,
    environ: Mapping[str, str] | None = None,
) -> Iterator[int]:
    """A server program that is ready once it answers a path: its port."""
    (folder / "profile.yaml").write_text(PROFILE + ("  otlp:\n" if environ else ""))
    is_ready = answers(ready)
    with server_programs.serving(command, folder, environ or {}, ours=ours, is_ready=is_ready, stop=stop) as (port, _):
        yield port


def ask_all(port: int, asks: Sequence[Ask], times: int = TIMES) -> tuple[list[tuple[int, bytes]], set[int]]:
    """Ask each in turn, `times` times in all, each with a trace of its own."""
    traces = [(number + 1) << 64 | 0x5EED for number in range(times)]
    return [asks[number % len(asks)].of(port, trace) for number, trace in enumerate(traces)], set(traces)


def check_all(spans: Sequence[Span], wanted: Counter[tuple[str, Any]], traces: set[int]) -> None:
    """Each request is there once, by endpoint and status, in the trace of its caller."""
    statuses = ("http.response.status_code", "rpc.status_code")
    found = Counter(
        (span.site.name, next(map(span.attributes.get, filter(span.attributes.get, statuses)))) for span in spans
    )
    assert found == wanted
    assert Counter(span.remote.trace_id for span in spans if span.remote) == dict.fromkeys(traces, 1)


@pytest.mark.slow
@needs("litserve")
def test_litserve_has_one_request_a_request_in_its_api_servers(tmp_path: Path) -> None:
    command = [str(SERVED / "litserve_app.py"), "{port}"]
    asks = [Ask("/predict", {"item": "one"}), Ask("/stream", {"item": "abc"}), Ask("/predict", {})]
    with serving(command, tmp_path, ours=False, stop=signal.SIGINT) as port:
        expected, _ = ask_all(port, asks)
    with serving(command, tmp_path, ours=True, stop=signal.SIGINT) as port:
        answers, traces = ask_all(port, asks)
    assert answers == expected
    names = ("POST /predict", "POST /stream", "POST /predict")
    wanted = Counter((names[number % 3], status) for number, (status, _) in enumerate(answers))
    assert {status for _, status in wanted} == {200, 500}
    check_all(requests_in(tmp_path), wanted, traces)


@pytest.mark.slow
@needs("mlserver")
def test_mlserver_has_one_request_a_request_over_rest_and_over_grpc(tmp_path: Path) -> None:
    import grpc
    from mlserver.grpc import dataplane_pb2, dataplane_pb2_grpc

    def asked(item: str) -> Ask:
        tensor = {"name": "item", "shape": [1], "datatype": "BYTES", "data": [item]}
        return Ask("/v2/models/shop/infer", {"id": "1", "inputs": [tensor]})

    def ask_over_grpc(port: int) -> tuple[list[bytes], set[int]]:
        tensor = dataplane_pb2.ModelInferRequest.InferInputTensor(
            name="item", datatype="BYTES", shape=[1], contents=dataplane_pb2.InferTensorContents(bytes_contents=[b"x"])
        )
        request = dataplane_pb2.ModelInferRequest(model_name="shop", id="1", inputs=[tensor])
        traces = [(number + 1) << 64 | 0x69C for number in range(TIMES)]
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            infer = dataplane_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
            answers = [
                infer(request, metadata=(("traceparent", f"00-{trace:032x}-{number + 1:016x}-01"),), timeout=240)
                for number, trace in enumerate(traces)
            ]
        return [answer.SerializeToString(deterministic=True) for answer in answers], set(traces)

    model = {"name": "shop", "implementation": "mlserver_runtime.Shop"}
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "model-settings.json").write_text(json.dumps(model))
    asks, found = [asked("one"), asked("stone"), Ask("/v2/models/shop"), Ask("/nowhere")], []
    for ours in (False, True):
        ports = {"grpc_port": free_port(), "metrics_port": free_port()}
        settings = {"host": "127.0.0.1", "http_port": "{port}", "parallel_workers": 2, **ports}
        command = ["-c", MLSERVER, json.dumps(settings)]
        with serving(command, tmp_path, ours=ours, ready="/v2/health/ready") as port:
            found.append((*ask_all(port, asks), *ask_over_grpc(ports["grpc_port"])))
    (expected, _, expected_grpc, _), (answers, traces, answers_grpc, traces_grpc) = found
    assert (answers, answers_grpc) == (expected, expected_grpc)
    infer = "POST /v2/models/{model_name}/infer"
    names = (infer, infer, "GET /v2/models/{model_name}", "GET")
    wanted = Counter((names[number % 4], status) for number, (status, _) in enumerate(answers))
    wanted["inference.GRPCInferenceService/ModelInfer", "OK"] = TIMES
    check_all(requests_in(tmp_path), wanted, traces | traces_grpc)


@pytest.mark.slow
@needs("ray")
def test_ray_serve_has_one_request_for_each_that_a_replica_takes_and_none_for_those_it_rejects(tmp_path: Path) -> None:
    command = [str(SERVED / "ray_app.py"), "{port}"]
    asks = [Ask(f"/shop/items/{name}") for name in ("one", "stone", "nothing")]
    asks += [Ask("/shop/parts/abc"), Ask("/plain"), Ask("/shop/nowhere")]
    names = [*["GET /shop/items/{item}"] * 3, "GET /shop/parts/{item}", "GET /plain", "GET /shop/{path}"]
    statuses = [200, 500, 404, 200, 200, 404]

    def ask_at_once(port: int) -> list[tuple[int, bytes]]:
        """All of them, more at a time than the replicas take."""
        with ThreadPoolExecutor(12) as pool:
            traces = [(number + 1) << 64 | 0x5EED for number in range(TIMES)]
            return list(pool.map(lambda it: asks[it[0] % len(asks)].of(port, it[1]), enumerate(traces)))

    with serving(command, tmp_path, ours=False, ready="/plain") as port:
        expected = ask_at_once(port)
    with receiver() as collector:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.http_port}"}
        with serving(command, tmp_path, ours=True, ready="/plain", environ=environ) as port:
            answers = ask_at_once(port)
            calls = Counter(number % 6 for number in range(TIMES))
            wanted = Counter((names[number % 6], str(statuses[number % 6])) for number in range(TIMES))
            wanted += {("Prices/of", "None"): calls[0] + calls[1], ("Prices/parts", "None"): calls[3]}
            wanted["GET /plain", "200"] += 1  # by which the server was ready

            def found() -> list[Received]:
                return [span for span in collector.spans() if span.kind == "SERVER" and span.trace_id != 1]

            until = time.monotonic() + START_LIMIT_S
            while (
                len(found()) < sum(wanted.values()) and time.monotonic() < until
            ):  # replicas are killed without a word
                time.sleep(0.2)
        spans = found()
    assert [status for status, _ in answers] == [statuses[number % 6] for number in range(TIMES)]
    assert answers == expected
    status = "http.response.status_code"
    assert Counter((span.name, str(span.attributes.get(status))) for span in spans) == wanted
    asked = Counter(span.trace_id for span in spans if span.name.startswith("GET"))
    traces = [(number + 1) << 64 | 0x5EED for number in range(TIMES)]
    assert [asked[trace] for trace in traces] == [1] * TIMES


@pytest.mark.slow
@needs("mosec")
def test_mosecs_workers_report_their_batches_and_requests(tmp_path: Path) -> None:
    command = [str(SERVED / "mosec_app.py"), "{port}"]
    asks = [Ask("/inference", {"item": "one"}), Ask("/inference", {}), Ask("/inference", {"item": "stone"})]

    def ask_at_once(port: int) -> list[tuple[int, bytes]]:
        ones = [asks[0]] * TIMES
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda ask: ask.of(port, 1), ones))
        return [*answers, *ask_all(port, asks, 30)[0]]

    with serving(command, tmp_path, ours=False, ready="/metrics") as port:
        expected = ask_at_once(port)
    with serving(command, tmp_path, ours=True, ready="/metrics") as port:
        answers = ask_at_once(port)
    assert answers == expected
    assert Counter(status for status, _ in answers) == {200: TIMES + 10, 422: 10, 500: 10}
    of_requests = Counter((span.attributes["http.response.status_code"], span.error) for span in requests_in(tmp_path))
    assert of_requests == {(200, None): TIMES + 10, (422, None): 10, (500, "500"): 10}
    traces = [chrome.load(path)[0] for path in (tmp_path / "traces").glob("*.json")]
    batches = [span for trace in traces for span in trace.spans if span.site.kind == "step"]
    served: Counter[tuple[str, Any, Any]] = Counter()
    for span in batches:
        told = span.attributes
        served[span.site.name, told["http.response.status_code"], span.error] += told["requests"]
    assert served == {
        ("mosec Prepare_1", 200, None): TIMES + 20,
        ("mosec Prepare_1", 422, None): 10,
        ("mosec Predict_2", 200, None): TIMES + 10,
        ("mosec Predict_2", 500, "500"): 10,
    }
    ids = {span.span_id for span in batches if span.site.name == "mosec Predict_2"}
    work = [span for trace in traces for span in trace.spans if span.site.name == "predict"]
    assert len(work) == TIMES + 10
    assert {span.parent_id for span in work} <= ids


def test_begins_of_requests_are_shared_in_memory_with_room_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(agent_socket.VARIABLE, str(tmp_path / "socket"))
    monkeypatch.setenv("INSTRUMENT_RUN", tmp_path.name)
    first, second = model_servers._MosecBegins("/mosec"), model_servers._MosecBegins("/mosec")
    first.note_begin(5, 100)
    assert (second.begin_ns(5, 200), second.begin_ns(6, 200)) == (100, 200)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_blocks * 512 >= path.stat().st_size > 0

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    alone = model_servers._MosecBegins("/mosec")
    assert alone.begin_ns(5, 200) == 200
    alone.note_begin(5, 150)
    assert alone.begin_ns(5, 200) == 150
