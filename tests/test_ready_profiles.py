"""The presets of servers, each against the real package: one request, one life, all its processes.

`.ci/servers FOLDER [NAME ...]` installs the servers and runs these; see there what each takes.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
from otlp_collectors import Collector, collecting, take
from otlp_receiver import free_port
from real_servers import (
    PRESETS,
    START_LIMIT_S,
    Answer,
    Served,
    ask,
    await_agent,
    environment_of,
    serve_twice,
    with_report,
)
from sent_spans import converted, sent_to, trees
from server_programs import answers as health
from server_programs import serving

pytestmark = pytest.mark.servers

AT_ONCE = 8
BATCHES_OF_VLLM = ("schedule", "execute_model", "sample", "update")


def texts(answer: Answer) -> list[str]:
    """Return the texts of a completion, of a stream in its parts."""
    if not answer.body.startswith(b"data:"):
        (choice,) = json.loads(answer.body)["choices"]
        return [choice["text"] if "text" in choice else choice["message"]["content"]]
    parts = [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith(b"data: {")]
    found = [one for part in parts for one in part["choices"]]
    return ["".join(one["text"] if "text" in one else one["delta"].get("content") or "" for one in found)]


def complete(port: int, number: int, more: Mapping[str, object]) -> Answer:
    """Ask for a completion, every fifth time of a conversation; every fourth is streamed."""
    text = "the quick brown fox " * 4 * (1 + number % 7)
    body = {"model": "tiny", "max_tokens": 4 + number % 13, "temperature": 0, "ignore_eos": True, **more}
    body |= {"stream": True, "stream_options": {"include_usage": True}} if number % 4 == 0 else {}
    headers = {"x-request-id": f"case-{number}"}
    if number % 5 == 0:
        chat = {**body, "messages": [{"role": "user", "content": text}]}
        return ask(port, "/v1/chat/completions", chat, headers)
    return ask(port, "/v1/completions", {**body, "prompt": text}, headers)


def usage_of(answer: Answer) -> dict[str, object]:
    """The facts of a completion by OpenTelemetry's names, as its answer has them."""
    lines = answer.body.splitlines() if answer.body.startswith(b"data:") else [b"data: " + answer.body]
    parts = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    usage = next(part["usage"] for part in reversed(parts) if part.get("usage"))
    choices = [choice for part in parts for choice in part["choices"]]
    return {
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        "gen_ai.response.finish_reasons": tuple(one["finish_reason"] for one in choices if one["finish_reason"]),
    }


def facts_of(served: Served, key: str) -> dict[str, object]:
    """The facts of the request of a key that a collector has, too."""
    (place,) = (place for place, keys in served.joined.keys.items() if key in keys)
    attributes = served.trace.attributes[int(served.joined.rows[place])]
    return {name: attributes[name] for name in attributes if name.startswith("gen_ai.")}


def to(collector: Collector) -> dict[str, str]:
    """Return the variables that make a profile send to a collector."""
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}"}


def test_vllm_shows_each_request_in_its_api_server_its_engine_and_its_worker(tmp_path: Path) -> None:
    times = 200

    def ask_all(port: int) -> list[Answer]:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(lambda number: complete(port, number, {}), range(times)))

    python = environment_of("vllm") / "bin" / "python"
    subprocess.run([python, Path(__file__).parent / "served" / "tiny_llama.py", tmp_path / "model"], check=True)
    words = ["bin/vllm", "serve", str(tmp_path / "model"), "--served-model-name", "tiny", "--max-model-len", "256"]
    words += ["--max-num-seqs", str(AT_ONCE), "--enforce-eager", "--dtype", "float32", "--port", "{port}"]
    words += ["--enable-prompt-tokens-details", "--block-size", "32"]
    environ = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with collecting(take) as collector:
        environ |= to(collector)
        expected, answers, served = serve_twice("vllm", words, tmp_path, ask_all, ready="/health", environ=environ)
        sent = sent_to(collector)
    assert {answer.status for answer in answers} == {200}
    assert list(map(texts, answers)) == list(map(texts, expected))

    # One life for each, by the id of its answer. vLLM kills its engine and its workers, and theirs are there too.
    keys = [f"chatcmpl-case-{number}" if number % 5 == 0 else f"cmpl-case-{number}-0" for number in range(times)]
    lives = served.lives()
    assert sorted(lives) == sorted(keys)
    assert (len(served.joined.rows), served.joined.unbound) == (times, 0)
    assert -1 not in served.joined.served.request
    tokens = [4 + number % 13 for number in range(times)]
    for number, key in enumerate(keys):
        names = served.names_of(key)
        assert names["submit"] == names["enqueue"] == 1
        assert {names[name] for name in ("detokenise", *BATCHES_OF_VLLM)} == {tokens[number]}
        assert {"queue", "share of batches", "tokenise", "transport", "detokenise"} <= set(lives[key])
    walls = served.trace.total_ns[served.joined.rows].tolist()
    assert sorted(its.total() for its in lives.values()) == sorted(walls)
    facts = [facts_of(served, key) for key in keys]
    assert all(0 <= its.pop("gen_ai.latency.time_in_queue") < 600 for its in facts)  # type: ignore[operator]
    assert facts == list(map(usage_of, answers))
    assert any(its["gen_ai.usage.cache_read.input_tokens"] for its in facts)

    for spans in (sent, converted(tmp_path / "traces")):
        its_trees = trees(spans, "POST /v1/")
        assert len(its_trees) == times
        assert {len({one.process for one in tree}) for tree in its_trees} == {2}  # the server's and the engine core's
        counts = [Counter(one.name for one in tree) for tree in its_trees]
        assert {(count["submit"], count["enqueue"]) for count in counts} == {(1, 1)}
        assert Counter(count["detokenise"] for count in counts) == Counter(tokens)
        links = Counter({name: sum(one.links for one in spans if one.name == name) for name in BATCHES_OF_VLLM})
        assert links == dict.fromkeys(BATCHES_OF_VLLM, sum(tokens))
    assert served.document("--view", "requests")["merged"]["processes"] == 3
    assert served.output.count("without a goodbye (SIGKILL)") >= 2
    assert "share of batches" in served.output
    batches = {one["name"]: one for one in served.document("--view", "batches")["views"]["batches"]["rows"]}
    assert batches["execute_model"]["items"] == sum(tokens)
    life = served.report("--request", "cmpl-case-8-0")
    assert "execute_model x" in life
    assert "its own of" in life


def test_vllm_shows_how_often_each_request_was_preempted(tmp_path: Path) -> None:
    """A cache of 12 blocks cannot have eight requests of up to seven blocks at once."""
    python = environment_of("vllm") / "bin" / "python"
    subprocess.run([python, Path(__file__).parent / "served" / "tiny_llama.py", tmp_path / "model"], check=True)
    shutil.copy(PRESETS / "vllm.yaml", tmp_path / "profile.yaml")
    words = [str(python.with_name("vllm")), "serve", str(tmp_path / "model"), "--served-model-name", "tiny"]
    words += ["--max-model-len", "256", "--max-num-seqs", str(AT_ONCE), "--enforce-eager", "--dtype", "float32"]
    words += ["--port", "{port}", "--block-size", "32", "--num-gpu-blocks-override", "12"]
    environ = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with serving(
        words, tmp_path, environ, ours=True, is_ready=health("/health"), python=str(python), start_limit_s=START_LIMIT_S
    ) as (port, _):
        with ThreadPoolExecutor(AT_ONCE) as pool:
            asked_for = [pool.submit(complete, port, number, {"max_tokens": 120}) for number in range(1, 25)]
        assert {answer.result().status for answer in asked_for} == {200}
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=240) as metrics:
            lines = metrics.read().decode().splitlines()
    (count,) = (line.split()[-1] for line in lines if line.startswith("vllm:num_preemptions_total{"))
    with_report(tmp_path / "log")
    await_agent(tmp_path / "traces")
    served = Served(tmp_path, "")
    preemptions = served.trace.attributes.values("engine.preemptions", served.joined.rows)
    assert len(preemptions) == 24
    assert sum(map(int, preemptions)) == int(float(count)) > 8  # type: ignore[call-overload]


def asked(path: str, bodies: Sequence[object]) -> Callable[[int], list[Answer]]:
    """Return a function that asks with all bodies, `AT_ONCE` at a time."""

    def ask_all(port: int) -> list[Answer]:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(lambda body: ask(port, path, body), bodies))

    return ask_all


def test_litserve_shows_each_request_in_the_batch_that_its_worker_served_it_in(tmp_path: Path) -> None:
    items = [f"item {number}" for number in range(80)]

    def ask_all(port: int) -> list[Answer]:
        bodies = [{"item": item} for item in items]
        return asked("/predict", bodies)(port) + asked("/stream", bodies[:16])(port)

    words = ["litserve_batches.py", "{port}"]
    with collecting(take) as collector:
        expected, answers, served = serve_twice(
            "litserve", words, tmp_path, ask_all, ready="/health", stop=signal.SIGINT, environ=to(collector)
        )
        assert len(trees(sent_to(collector), "POST /")) == 96
    assert {answer.status for answer in answers} == {200}
    assert answers == expected
    lives = served.lives()
    assert (len(lives), len(served.joined.rows), served.joined.unbound) == (96, 96, 0)
    assert -1 not in served.joined.served.request
    for key, life in lives.items():
        assert {"queue", "share of batches"} <= set(life)
        assert {"litserve decode_request", "litserve predict", "litserve encode_response"} <= set(served.names_of(key))
    rows = served.document("--view", "batches")["views"]["batches"]["rows"]
    (predict,) = (row for row in rows if row["name"] == "litserve predict")
    assert (predict["items"], predict["max_size"]) == (96, 4)
    assert predict["batches"] < 60


def test_ray_serve_shows_each_request_in_the_batch_of_the_replica_that_took_it(tmp_path: Path) -> None:
    items = [f"item {number}" for number in range(80)]

    def ask_all(port: int) -> list[Answer]:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(lambda item: ask(port, "/shop", {"item": item}, {"x-request-id": item}), items))

    words = ["ray_batches.py", "{port}"]
    with collecting(take) as collector:
        expected, answers, served = serve_twice(
            "ray-serve", words, tmp_path, ask_all, ready="/ready", environ=to(collector)
        )
        sent = sent_to(collector)
    assert len(trees(sent, "POST /shop")) == 80
    assert [one.name for one in sent if "healthz" in one.name] == []  # of Ray's own dashboard
    assert {answer.status for answer in answers} == {200}
    assert answers == expected
    lives = {key: life for key, life in served.lives().items() if key.startswith("item")}
    assert sorted(lives) == sorted(items)
    assert served.joined.unbound == 0
    assert -1 not in served.joined.served.request
    for key, life in lives.items():
        assert {"queue", "share of batches"} <= set(life)
        assert served.names_of(key)["batch"] == 1
    assert len({served.trace.thread_id[row] for row in served.joined.served.batch}) == 2  # of two replicas
    trace = served.trace
    replicas = np.flatnonzero(trace.are_of_sites([site.name == "replica" for site in trace.sites]))
    assert (trace.end_ns[replicas] <= trace.end_ns[trace.parent[replicas]]).all()
    assert "share of batches" in served.output


def test_mlserver_shows_each_request_in_the_worker_that_ran_its_model(tmp_path: Path) -> None:
    settings = {"host": "127.0.0.1", "parallel_workers": 2, "grpc_port": free_port(), "metrics_port": free_port()}
    (tmp_path / "shop").mkdir()
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    model = {"name": "shop", "implementation": "mlserver_runtime.Shop"}
    (tmp_path / "shop" / "model-settings.json").write_text(json.dumps(model))
    tensor = {"name": "item", "shape": [1], "datatype": "BYTES"}
    bodies = [{"id": f"id {number}", "inputs": [{**tensor, "data": [f"item {number}"]}]} for number in range(80)]
    with collecting(take) as collector:
        expected, answers, served = serve_twice(
            "mlserver",
            ["bin/mlserver", "start", "."],
            tmp_path,
            asked("/v2/models/shop/infer", bodies),
            ready="/v2/health/ready",
            environ={"MLSERVER_HTTP_PORT": "{port}", **to(collector)},
        )
        assert len(trees(sent_to(collector), "POST /v2/")) == 80
    assert {answer.status for answer in answers} == {200}
    assert answers == expected
    lives = served.lives()
    assert (len(lives), len(served.joined.rows)) == (80, 80)
    assert served.joined.unbound == 2  # what said that the model was loaded, of each worker
    for key, life in lives.items():
        assert {"queue", "share of batches", "transport"} <= set(life)
        assert served.names_of(key)["worker"] == served.names_of(key)["dispatch"] == 1
    workers = {served.trace.thread_id[row] for row in served.joined.served.batch}
    assert len(workers) == 2
    assert served.document("--view", "requests")["merged"]["processes"] >= 3


def test_mosec_shows_the_batches_of_its_workers_by_the_numbers_of_its_front(tmp_path: Path) -> None:
    bodies = [{"item": f"item {number}"} for number in range(80)]
    words = ["mosec_app.py", "{port}"]
    expected, answers, served = serve_twice("mosec", words, tmp_path, asked("/inference", bodies), ready="/metrics")
    assert {answer.status for answer in answers} == {200}
    assert answers == expected
    assert sorted(served.joined.keys) == list(range(80))
    whole = served.document("--view", "requests")["views"]["requests"]["endpoints"]
    assert [(one["name"], one["requests"], one["errors"]) for one in whole] == [("mosec", 80, 0)]
    assert "share of batches" in {phase["name"] for phase in whole[0]["phases"]}
    rows = {one["name"]: one for one in served.document("--view", "batches")["views"]["batches"]["rows"]}
    assert {name: row["items"] for name, row in rows.items()} == {"mosec Prepare_1": 80, "mosec Predict_2": 80}
    assert rows["mosec Prepare_1"]["max_size"] == 1
    assert 1 < rows["mosec Predict_2"]["max_size"] <= 4
    keys = [served.joined.served.key[at] for at in range(160)]
    assert all(count == 2 for count in Counter(keys).values())  # once in each stage
    assert served.names()["decode"] == served.names()["encode"] == 160


def test_sglang_shows_each_request_in_its_api_server_its_scheduler_and_its_detokenizer(tmp_path: Path) -> None:
    times = 200

    def ask_all(port: int) -> list[Answer]:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(lambda number: complete(port, number, {"rid": f"case-{number}"}), range(times)))

    python = environment_of("sglang") / "bin" / "python"
    subprocess.run([python, Path(__file__).parent / "served" / "tiny_llama.py", tmp_path / "model"], check=True)
    words = ["-m", "sglang.launch_server", "--model-path", str(tmp_path / "model"), "--served-model-name", "tiny"]
    words += ["--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--port", "{port}"]
    words += ["--disable-radix-cache", "--mem-fraction-static", "0.1", "--max-total-tokens", "8192"]
    environ = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    with collecting(take) as collector:
        environ |= to(collector)
        expected, answers, served = serve_twice(
            "sglang", words, tmp_path, ask_all, ready="/health_generate", environ=environ
        )
        its_trees = trees(sent_to(collector), "POST /v1/")
        assert len([tree for tree in its_trees if any(one.name == "enqueue" for one in tree)]) == times
    assert {answer.status for answer in answers} == {200}
    assert list(map(texts, answers)) == list(map(texts, expected))
    lives = {key: life for key, life in served.lives().items() if key.startswith("case-")}
    assert sorted(lives) == sorted(f"case-{number}" for number in range(times))
    tokens = [4 + number % 13 for number in range(times)]
    for number in range(times):
        key = f"case-{number}"
        names = served.names_of(key)
        assert names["tokenise"] == names["submit"] == names["enqueue"] == 1
        assert names["run_batch"] == names["process_batch_result"] == tokens[number]
        assert names["detokenise"] >= 1
        assert {"tokenise", "submit", "transport", "enqueue", "queue", "share of batches"} <= set(lives[key])
        facts = facts_of(served, key)
        assert 0 <= facts.pop("gen_ai.latency.time_in_queue") < 600  # type: ignore[operator]
        assert facts == usage_of(answers[number])
    assert served.document("--view", "requests")["merged"]["processes"] == 3
    batches = {one["name"]: one for one in served.document("--view", "batches")["views"]["batches"]["rows"]}
    assert 4 < batches["run_batch"]["max_size"] <= AT_ONCE
    # Its own first requests, by which it warms up and says that it is ready, are there, too.
    assert sum(tokens) < batches["run_batch"]["items"] < sum(tokens) + 50
    assert "run_batch x" in served.report("--request", f"case-{tokens.index(max(tokens))}")
