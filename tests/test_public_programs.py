"""Unmodified public programs under `instrument run` with nothing but a profile: the same program, and its trace.

Each program runs twice, without `instrument` and with it. The answers, standard output, standard error, exit code and
handling of signals must be the same. Process ids, times and the order in which several processes write may differ. The
second run must also have the summary, and a trace with the functions of the profile.

Programs that are not installed are skipped. The `test` extra installs gunicorn, litserve and transformers; `pip install
magika sentence-transformers` adds the rest, some 110 MB to download.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from otlp_collectors import collecting, take
from otlp_receiver import free_port
from trees import outline, tree_of

from instrument import chrome
from instrument.profile.presets import read_preset
from instrument.recording.spans import Span
from instrument.trace.trace import Trace

ROOT = Path(__file__).parent.parent
LAST_LINES = r"(?:(?:(?:Recording|Chrome trace): [^\n]+\n)+|Processes: \d+\n(?:  \d+ [^\n]+\n)+)"
REPORT = re.compile(rf"\n-{{20,}}> *Summary of \S+ *<-{{20,}}\n.*?\n{LAST_LINES}", re.DOTALL)
EXPORT = """
export:
  chrome: {path: "traces/{service}-{pid}-{window}.json"}
  summary: {to: stderr}
"""


SIGNALS = [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skip where a module cannot be found. It is not imported: some take seconds, and the program imports it itself."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"could not find {' and '.join(missing)}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and an environment that says nothing about us and reaches no network."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("INSTRUMENT", "OTEL_", "PYTEST_", "GUNICORN_"))]:
        if name != "PYTEST_CURRENT_TEST":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))  # where gunicorn keeps a socket, and Hugging Face a cache
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # a tiny model computes longest where threads wait for each other
    return tmp_path


def write(name: str, text: str) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


def write_profile(text: str) -> None:
    write("profile.yaml", textwrap.dedent(text) + EXPORT)


@dataclass
class Ended:
    """The results of a program. `err` is without our reports, and `answers` are those of a server."""

    code: int
    out: str
    err: str
    reports: list[str]
    answers: list[Any] = field(default_factory=list)
    asked: int = 0


RACES = ("Error while closing socket", "was sent SIGTERM!")
"""Lines of gunicorn about a worker that depend on whether it ends before or after its master looks."""

START_LINES = (
    "instrument: trace files are written as each process ends",
    "instrument: `instrument live` shows ",
    "instrument: no metrics are sent to a collector: OTEL_METRICS_EXPORTER=none",
    "instrument: no traces are sent to a collector: OTEL_TRACES_EXPORTER=none",
)
"""The lines of `instrument run` with which a service may begin."""


RACING_MONITOR = re.compile(r"(?ms)^[^\n]*Monitoring worker crashed$.*?^\w+Error: [^\n]*\n")
"""The traceback of LitServe's monitor thread where the server's manager ends before it."""


def but_for_numbers(text: str) -> list[str]:
    """Lines without what differs from run to run, in an order that does not depend on who wrote first."""
    text = RACING_MONITOR.sub("", text)
    lines = [line.rpartition("\r")[2] for line in text.splitlines() if not any(words in line for words in RACES)]
    lines = [line for line in lines if not line.startswith(START_LINES)]
    return sorted(re.sub(r"\d+(\.\d+)?", "N", re.sub(r"[0-9a-f-]{36}", "UUID", line)) for line in lines)


def _ended(code: int, out: str, err: str) -> Ended:
    return Ended(code, out, REPORT.sub("", err), REPORT.findall(err))


def command(host: Sequence[str], *, instrumented: bool) -> list[str]:
    ours = ["-m", "instrument", "run", "--profile", "profile.yaml", "--"] if instrumented else []
    return [sys.executable, *ours, *host]


def run(*host: str, instrumented: bool, stdin: str = "") -> Ended:
    done = subprocess.run(
        command(host, instrumented=instrumented), input=stdin, capture_output=True, text=True, timeout=240, check=False
    )
    return _ended(done.returncode, done.stdout, done.stderr)


def run_both(*host: str, stdin: str = "", output: Callable[[str], Any] = str) -> Ended:
    """Run a program without us and with us; the second, which must have given the same (of its output, `output`)."""
    plain = run(*host, instrumented=False, stdin=stdin)
    ours = run(*host, instrumented=True, stdin=stdin)
    assert (ours.code, output(ours.out)) == (plain.code, output(plain.out))
    assert but_for_numbers(ours.err) == but_for_numbers(plain.err)
    assert (plain.reports, len(ours.reports)) == ([], 1)
    return ours


def traces() -> list[Trace]:
    """The traces that processes with spans have written."""
    loaded = [chrome.load(path)[0] for path in sorted(Path("traces").glob("*.json*"))]
    return [trace for trace in loaded if trace.spans]


def only_tree() -> str:
    (trace,) = traces()
    return tree_of(trace.spans)


# ---------------------------------------------------------------- commands


@pytest.mark.slow
def test_a_module_of_the_standard_library_reads_and_refuses_json(folder: Path) -> None:
    write_profile('service: json\nfunctions: [{match: ["json:load", "json.decoder:*.decode"]}]')
    run_both("-m", "json.tool", "--compact", stdin='{"a": [1, 2.5, null]}')
    assert only_tree() == outline(
        """
        load
          JSONDecoder.decode
        """
    )
    for path in Path("traces").iterdir():
        path.unlink()
    refused = run_both("-m", "json.tool", stdin="{]")
    assert (refused.code, "Expecting property name" in refused.err) == (1, True)
    assert only_tree() == outline(
        """
        load !JSONDecodeError
          JSONDecoder.decode !JSONDecodeError
        """
    )


@pytest.mark.slow
def test_the_path_of_the_host_is_as_without_us_and_its_environment_has_eight_names_more(folder: Path) -> None:
    write_profile("")
    run_both("-m", "site")
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    plain, ours = (json.loads(run("-c", show, instrumented=instrumented).out) for instrumented in (False, True))
    changed = {name for name in {*plain, *ours} if plain.get(name) != ours.get(name)}
    assert changed == {
        "INSTRUMENT_AGENT", "INSTRUMENT_AWAITED", "INSTRUMENT_PROFILE", "INSTRUMENT_RUN", "INSTRUMENT_RUN_BOARD",
        "INSTRUMENT_RUN_PID", "INSTRUMENT_SERVICE", "PYTHONPATH",
    }  # fmt: skip
    assert ours["PYTHONPATH"].split(os.pathsep)[1:] == list(filter(None, [plain.get("PYTHONPATH")]))


@pytest.mark.slow
@needs("pip")
def test_pip_reports_its_version(folder: Path) -> None:
    write_profile(
        """
        service: pip
        functions:
          # `cli` since pip 26.3.
          - {match: ["pip._internal.cli.main:main", "pip._internal.cli.main:cli"], kind: request, name: main}
          - {match: "pip._internal.cli.main_parser:parse_command"}
        """
    )
    assert run_both("-m", "pip", "--version").out.startswith("pip ")
    assert only_tree() == outline(
        """
        main
          parse_command
        """
    )


@pytest.mark.slow
def test_pytest_runs_tests_that_a_rule_names(folder: Path) -> None:
    write_profile(
        """
        service: pytest
        functions:
          - {match: "_pytest.runner:runtestprotocol", kind: request, name: test}
          - {match: "_pytest.python:pytest_pyfunc_call", name: body}
          - {match: ["shop:*", "test_shop:**"]}
        """
    )
    write("shop.py", "def price(item):\n    return 3 * len(item)\n")
    write(
        "test_shop.py",
        """
        import asyncio
        import pytest
        from shop import price

        @pytest.fixture
        def item():
            yield "apple"

        def test_price(item):
            assert price(item) == 15

        @pytest.mark.parametrize("word", ["", "ab"])
        def test_six(word):
            assert price(word) == 6

        class TestBasket:
            def test_async(self, item):
                async def ask():
                    return price(item)
                assert asyncio.run(ask()) == 15
        """,
    )
    ours = run_both("-m", "pytest", "-p", "no:cacheprovider", output=but_for_numbers)
    assert (ours.code, "assert 0 == 6" in ours.out, "1 failed, 3 passed" in ours.out) == (1, True, True)
    assert only_tree() == outline(
        """
        test
          body
            test_price
              price
        test
          body !AssertionError
            test_six !AssertionError
              price
        test
          body
            test_six
              price
        test
          body
            TestBasket.test_async
              price
        """
    )


# ---------------------------------------------------------------- models


@needs("magika", "onnxruntime")
@pytest.mark.slow
def test_magika_names_the_types_of_files_by_the_model_in_its_wheel(folder: Path) -> None:
    write_profile(
        """
        service: magika
        functions:
          - {match: "magika.magika:Magika.identify_*", kind: request}
          - {match: ["magika.magika:Magika._init_onnx_session", "magika.magika:Magika._get_raw_predictions"]}
          - {match: "onnxruntime:InferenceSession.run", name: onnx.run}
        """
    )
    write("files/a.py", "import os\n\n\ndef main():\n    print(os.environ)\n\n\nmain()\n" * 3)
    write("files/b.json", json.dumps({"numbers": list(range(50)), "text": "abc"}, indent=2))
    write("files/empty", "")
    program = ["-m", "magika.cli.magika_client"]
    ours = run_both(*program, "--recursive", "--json", "files")
    labels = [found["prediction"]["output"]["label"] for found in json.loads(ours.out)]
    assert labels == ["python", "json", "empty"]
    assert only_tree() == outline(
        """
        Magika._init_onnx_session
        Magika.identify_paths
          Magika._get_raw_predictions
            onnx.run
        """
    )
    assert run_both(*program, "missing").code == 1


MAKE_MODEL = """
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

words = ["[PAD]", "[UNK]", *"the quick brown fox jumps over the lazy dog".split()]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(dict.fromkeys(words))}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(".")
torch.manual_seed(7)
BertModel(
    BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
).save_pretrained(".")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny encoder of random weights and its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    done = subprocess.run([sys.executable, "-c", MAKE_MODEL], cwd=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return str(path)


@pytest.mark.slow
@needs("torch", "transformers")
def test_transformers_computes_the_same_bits_and_our_profile_records_it(folder: Path, model: str) -> None:
    write("profile.yaml", read_preset("transformers"))
    write(
        "compute.py",
        """
        import sys
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM, pipeline

        encode = pipeline("feature-extraction", model=sys.argv[1], device="cpu", return_tensors=True)
        for answer in encode(["the quick brown fox", "dog"]):
            print(answer.shape, answer.numpy().tobytes().hex())
        torch.manual_seed(7)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
        writer = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)).eval()
        print(writer.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=2, do_sample=False, pad_token_id=0).tolist())
        """,
    )
    lines = run_both("compute.py", model).out.splitlines()
    assert [line.partition(")")[0] for line in lines[:2]] == ["torch.Size([1, 4, 32]", "torch.Size([1, 1, 32]"]
    (trace,) = traces()
    encoded = """
      FeatureExtractionPipeline.preprocess phase
      FeatureExtractionPipeline._forward phase
        BertEmbeddings layer embeddings
        BertLayer layer encoder.layer.0
        BertLayer layer encoder.layer.1
        BertPooler layer pooler
      FeatureExtractionPipeline.postprocess phase
    """
    written = """
      prepare_inputs phase
      Embedding layer model.embed_tokens
      LlamaDecoderLayer layer model.layers.0
      LlamaDecoderLayer layer model.layers.1
      Linear layer lm_head
    """
    twice_each = [textwrap.indent(outline(part + part), "  ") for part in (encoded, written)]
    wanted = f"pipeline request\n{twice_each[0]}\ngenerate request\n{twice_each[1]}"
    assert tree_of(trace.spans, _with_instance) == wanted


def _with_instance(span: Span) -> str:
    return f"{span.site.name} {span.site.kind} {span.site.instance}".rstrip()


@pytest.mark.slow
@needs("torch", "sentence_transformers")
def test_a_sentence_encoder_gives_the_same_embeddings_bit_for_bit(folder: Path, model: str) -> None:
    write_profile(
        """
        service: encoder
        functions:
          - {match: "sentence_transformers:SentenceTransformer.encode", kind: request}
        layers:
          - {match: "**.encoder.layer.*"}
          - {type: [BertEmbeddings, Pooling]}
        """
    )
    write(
        "encode.py",
        """
        import sys
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(sys.argv[1], device="cpu")  # of a bare encoder it makes one that takes the mean
        found = model.encode(["the quick brown fox", "jumps over", "dog"], batch_size=2)
        print(found.dtype, found.shape, found.tobytes().hex())
        """,
    )
    assert run_both("encode.py", model).out.startswith("float32 (3, 32) ")
    assert only_tree() == outline(
        """
        SentenceTransformer.encode
          BertEmbeddings
          BertLayer
          BertLayer
          Pooling
          BertEmbeddings
          BertLayer
          BertLayer
          Pooling
        """
    )


# ---------------------------------------------------------------- servers


class Server:
    """A server program that has been started: what a client can do with it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port
        self.asked = 0

    def ask(self, method: str, path: str, body: str | None = None) -> tuple[int, str, str]:
        """Status, text and the header that says which process has answered."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=240)
        headers = {"Connection": "close"} | ({"Content-Type": "application/json"} if body else {})
        connection.connect()
        with contextlib.closing(connection), connection.sock.dup() as same:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            found = answer.status, answer.read().decode(), answer.headers.get("worker", "")
            same.recv(1)  # the server closes when it is done, and not before: a signal meets none at work
            return found

    def wait_until_it_listens(self) -> None:
        end = time.monotonic() + 240
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", self.port), 5):
                return
            time.sleep(0.02)
        raise AssertionError(f"the server does not listen: {Path('err').read_text()}")


def serve(
    host: Sequence[str], use: Callable[[Server], list[Any]], stop: signal.Signals, *, instrumented: bool
) -> Ended:
    """Start a server, use it, stop it by a signal to its first process."""
    return serve_words(command(host, instrumented=instrumented), use, stop)


def serve_words(words: Sequence[str], use: Callable[[Server], list[Any]], stop: signal.Signals) -> Ended:
    """The same of a whole command line."""
    port = free_port()
    words = [word.format(port=port) for word in words]
    with Path("out").open("wb") as out, Path("err").open("wb") as err:
        process = subprocess.Popen(words, stdout=out, stderr=err, start_new_session=True)
    server = Server(process, port)
    try:
        server.wait_until_it_listens()
        answers = use(server)
        process.send_signal(stop)
        code = process.wait(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    ended = _ended(code, Path("out").read_text(), Path("err").read_text())
    ended.answers, ended.asked = answers, server.asked
    return ended


def serve_both(host: Sequence[str], use: Callable[[Server], list[Any]], stop: signal.Signals = signal.SIGTERM) -> Ended:
    """A server without us and with us; the second, which must have been the same."""
    plain = serve(host, use, stop, instrumented=False)
    ours = serve(host, use, stop, instrumented=True)
    assert (ours.code, ours.answers) == (plain.code, plain.answers)
    assert but_for_numbers(ours.out) == but_for_numbers(plain.out)
    assert but_for_numbers(ours.err) == but_for_numbers(plain.err)
    return ours


SHOP = """
import os, time

def price(item):
    time.sleep(0.02)  # long enough for the other worker to take the next one
    return 3 * len(item)

def app(environ, start_response):
    item = environ["PATH_INFO"].strip("/")
    body = b"%d" % price(item)
    start_response("200 OK", [("Content-Length", str(len(body))), ("worker", str(os.getpid()))])
    return [body]

async def quote(item):
    return b"%d" % price(item)

async def asgi(scope, receive, send):
    if scope["type"] != "http":
        raise NotImplementedError(scope["type"])
    body = await quote(scope["path"].strip("/"))
    headers = [(b"content-length", b"%d" % len(body)), (b"worker", b"%d" % os.getpid())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
"""


def ask_until_both_workers_have_answered(server: Server) -> list[Any]:
    workers: set[str] = set()
    answers: set[tuple[int, str]] = set()
    end = time.monotonic() + 240
    with ThreadPoolExecutor(8) as clients:
        while len(workers) < 2 and time.monotonic() < end:
            for status, text, worker in clients.map(lambda _: server.ask("GET", "/apple"), range(8)):
                answers.add((status, text))
                workers.add(worker)
                server.asked += 1
    return [sorted(answers), len(workers)]


def trees_by_worker(shape: str) -> Counter[int]:
    """Return the number of requests in each process's trace. All must have the given tree."""
    found: Counter[int] = Counter()
    for trace in traces():
        roots: dict[int, list[Span]] = {}
        for span in trace.spans:
            roots.setdefault(span.root_id, []).append(span)
        assert {tree_of(spans) for spans in roots.values()} == {outline(shape)}
        found[trace.origin.pid] = len(roots)
    return found


@pytest.mark.slow
@needs("gunicorn")
@pytest.mark.parametrize("stop", SIGNALS, ids=lambda stop: stop.name)
def test_each_worker_that_gunicorn_forks_writes_a_trace(folder: Path, stop: signal.Signals) -> None:
    write("shop.py", SHOP)
    write_profile(
        """
        service: shop
        functions:
          - {match: "gunicorn.workers.sync:SyncWorker.handle_request", kind: request, name: http.request}
          - {match: "shop:*"}
        """
    )
    host = ["-m", "gunicorn", "--workers", "2", "--bind", "127.0.0.1:{port}", "shop:app"]
    ours = serve_both(host, ask_until_both_workers_have_answered, stop)
    assert (ours.code, ours.answers) == (0, [[(200, "15")], 2])
    found = trees_by_worker(
        """
        http.request
          app
            price
        """
    )
    assert (len(found), sum(found.values())) == (2, ours.asked)
    assert len(ours.reports) == 1  # by the master, which has recorded nothing, of both workers


@needs("uvicorn")
@pytest.mark.slow
def test_each_worker_that_uvicorn_spawns_writes_a_trace(folder: Path) -> None:
    write("shop.py", SHOP)
    write_profile(
        """
        service: shop
        functions:
          - {match: "uvicorn.middleware.proxy_headers:ProxyHeadersMiddleware.__call__", kind: request, name: http}
          - {match: "shop:*"}
        """
    )
    host = ["-m", "uvicorn", "--workers", "2", "--port", "{port}", "--lifespan", "off", "--no-access-log", "shop:asgi"]
    ours = serve_both(host, ask_until_both_workers_have_answered)
    assert (ours.code, ours.answers) == (0, [[(200, "15")], 2])
    found = trees_by_worker(
        """
        http
          asgi
            quote
              price
        """
    )
    assert (len(found), sum(found.values())) == (2, ours.asked)


GEVENT_MAIN = """
from gevent import monkey; monkey.patch_all()
import sys
from gevent.pywsgi import WSGIServer
from shop import app

WSGIServer(("127.0.0.1", int(sys.argv[1])), app, log=None).serve_forever()
"""
GUNICORN = ("-m", "gunicorn", "--workers", "2", "--bind", "127.0.0.1:{port}")
LEAVERS = {
    "gevent": (["main.py", "{port}"], "gevent", 1),
    "gunicorn -k gthread": ([*GUNICORN, "-k", "gthread", "shop:app"], "gunicorn", 2),
    "uvicorn --workers": (
        # A worker that takes long to begin on a loaded machine is not to be taken for dead.
        ["-m", "uvicorn", "--workers", "2", "--timeout-worker-healthcheck", "60", "--port", "{port}",
         "--no-access-log", "shop:asgi"], "uvicorn", 2
    ),
}  # fmt: skip


@pytest.mark.slow
@needs("gunicorn")
@pytest.mark.parametrize(("host", "package", "workers"), LEAVERS.values(), ids=LEAVERS.keys())
def test_a_worker_that_is_terminated_has_sent_its_spans_and_leaves_its_trace_and_summary(
    folder: Path, host: list[str], package: str, workers: int
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"could not find {package}")
    write("shop.py", SHOP)
    write("main.py", GEVENT_MAIN)

    def use(server: Server) -> list[Any]:
        if workers > 1:
            return ask_until_both_workers_have_answered(server)
        with ThreadPoolExecutor(8) as clients:
            answers = set(clients.map(lambda _: server.ask("GET", "/apple")[:2], range(40)))
        server.asked = 40
        return [sorted(answers), 1]

    with collecting(take) as collector:
        write(
            "profile.yaml",
            f"""
            service: shop
            functions: [{{match: "shop:price", kind: request}}]
            export:
              chrome: {{path: "traces/{{service}}-{{pid}}-{{window}}.json"}}
              summary: {{to: stderr}}
              otlp: {{endpoint: "http://127.0.0.1:{collector.server_port}"}}
            """,
        )
        ours = serve_both(host, use)
        until = time.monotonic() + 100
        while collector.taken.count("price") < ours.asked and time.monotonic() < until:
            time.sleep(0.05)  # the agent of the run outlives the service by some seconds
    assert ours.answers == [[(200, "15")], workers]
    assert collector.taken.count("price") == ours.asked
    assert sum(len(trace.spans) for trace in traces()) == ours.asked
    assert sum(re.search(r"\nprice +\d", report) is not None for report in ours.reports) == 1


WSGI_MAIN = """
import sys
from wsgiref.simple_server import WSGIRequestHandler, make_server
from opentelemetry import trace
from shop import app

class Handler(WSGIRequestHandler):
    def log_message(self, *arguments):
        pass

print(type(trace.get_tracer_provider()).__module__, flush=True)
make_server("127.0.0.1", int(sys.argv[1]), app, handler_class=Handler).serve_forever()
"""
OPENTELEMETRY = Path(sys.executable).with_name("opentelemetry-instrument")
OURS = [sys.executable, "-m", "instrument", "run", "--profile", "profile.yaml", "--"]
ORDERS = {
    "ours starts opentelemetry-instrument": [*OURS, str(OPENTELEMETRY), sys.executable, "main.py", "{port}"],
    "opentelemetry-instrument starts ours": [str(OPENTELEMETRY), *OURS, "main.py", "{port}"],
}


@pytest.mark.slow
@pytest.mark.skipif(not OPENTELEMETRY.exists(), reason="opentelemetry-distro is not installed")
@pytest.mark.parametrize("words", ORDERS.values(), ids=ORDERS.keys())
def test_opentelemetry_and_we_start_one_service_in_either_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    write("shop.py", SHOP)
    write("main.py", WSGI_MAIN)
    for name in ("TRACES", "METRICS", "LOGS"):
        monkeypatch.setenv(f"OTEL_{name}_EXPORTER", "none")

    def use(server: Server) -> list[Any]:
        return [server.ask("GET", path)[:2] for path in ("/fig", "/apple")]

    with collecting(take) as collector:
        write(
            "profile.yaml",
            f"""
            service: shop
            functions: [{{match: "shop:price", kind: request}}]
            export:
              chrome: {{path: "traces/{{service}}-{{pid}}-{{window}}.json"}}
              summary: {{to: stderr}}
              otlp: {{endpoint: "http://127.0.0.1:{collector.server_port}"}}
            """,
        )
        plain = serve_words([str(OPENTELEMETRY), sys.executable, "main.py", "{port}"], use, signal.SIGTERM)
        ours = serve_words(words, use, signal.SIGTERM)
    assert plain.out == "opentelemetry.sdk.trace\n"
    assert (ours.code, ours.out, ours.answers) == (plain.code, plain.out, plain.answers)
    assert ours.answers == [(200, "9"), (200, "15")]
    assert but_for_numbers(ours.err) == but_for_numbers(plain.err)
    assert collector.taken == []  # the standard switch holds for what the profile exports, too
    assert only_tree() == "price\nprice"
    assert len(ours.reports) == 1


LAUNCHER = """
import os, sys
os.environ["PYTHONPATH"] = os.pathsep.join([os.path.abspath("shadow"), os.environ["PYTHONPATH"]])
os.execv(sys.executable, [sys.executable, "service.py"])
"""


@pytest.mark.slow
def test_instrument_run_says_that_another_sitecustomize_keeps_ours_away(folder: Path) -> None:
    write("shadow/sitecustomize.py", "")
    write("launcher.py", LAUNCHER)
    write("service.py", "import os, sys, time\nos.write(1, b'serving')\ntime.sleep(20)\nsys.exit(3)\n")
    write_profile("")
    ours = run("launcher.py", instrumented=True)
    assert (ours.code, ours.out) == (3, "serving")
    lines = [line for line in ours.err.splitlines() if not line.startswith(START_LINES)]
    (line,) = [line for line in lines if line.startswith("instrument: ")]
    assert line.startswith("instrument: 10 s after its start no process of this run records anything: ")
    assert f"{folder / 'shadow' / 'sitecustomize.py'} runs in place of ours" in line
    assert len([line for line in lines if line.strip()]) == 1


@needs("uvicorn")
@pytest.mark.parametrize("stop", SIGNALS, ids=lambda stop: stop.name)
def test_uvicorn_alone_takes_signals_as_without_us(folder: Path, stop: signal.Signals) -> None:
    write("shop.py", SHOP)
    write_profile('functions: [{match: "shop:asgi", kind: request}]')

    def use(server: Server) -> list[Any]:
        return [server.ask("GET", path)[:2] for path in ("/fig", "/apple")]

    host = ["-m", "uvicorn", "--port", "{port}", "--lifespan", "off", "shop:asgi"]
    ours = serve_both(host, use, stop)
    assert (ours.answers, len(ours.reports)) == ([(200, "9"), (200, "15")], 1)
    assert only_tree() == "asgi\nasgi"


@pytest.mark.parametrize("stop", SIGNALS, ids=lambda stop: stop.name)
def test_the_server_of_the_standard_library_is_main_and_its_threads_are_seen(
    folder: Path, stop: signal.Signals
) -> None:
    write("files/a.txt", "text\n")
    write_profile(
        """
        service: files
        functions:
          - {match: "socketserver:ThreadingMixIn.process_request_thread", kind: request, name: connection}
          - {match: "http.server:SimpleHTTPRequestHandler.do_GET"}
          - {match: "shutil:copyfileobj"}
        """
    )

    def use(server: Server) -> list[Any]:
        return [server.ask("GET", path)[:2] for path in ("/a.txt", "/b.txt")]

    host = ["-m", "http.server", "--bind", "127.0.0.1", "--directory", "files", "{port}"]
    ours = serve_both(host, use, stop)
    assert [status for status, _ in ours.answers] == [200, 404]
    tree = ["connection", "  SimpleHTTPRequestHandler.do_GET", "    copyfileobj"]
    assert Counter(only_tree().splitlines()) == dict(zip(tree, (3, 2, 1), strict=True))  # one only looked who listens


FASTAPI_SHOP = """
from fastapi import APIRouter, Depends, FastAPI, HTTPException
from pydantic import BaseModel

class Price(BaseModel):
    price: int

def factor() -> int:
    return 3

async def price(item: str, by: int = Depends(factor)) -> Price:
    if item == "stone":
        raise HTTPException(404, "no price")
    return Price(price=by * len(item))

def on_a_thread(item: str, by: int = Depends(factor)) -> Price:
    return Price(price=by * len(item))

app, included = FastAPI(), APIRouter()
for router in (app, included):
    router.get("/price/{item}")(price)
    router.get("/thread/{item}")(on_a_thread)
app.include_router(included, prefix="/included")
"""


BY_CHANCE = ("loop blocked", "garbage collection")
"""Spans that a slow machine has more of."""


@pytest.mark.slow
@needs("fastapi", "uvicorn")
def test_every_route_of_fastapi_is_a_request_with_its_parts_by_our_profile_for_it(folder: Path) -> None:
    write("shop.py", FASTAPI_SHOP)
    write("profile.yaml", read_preset("fastapi"))

    def use(server: Server) -> list[Any]:
        paths = [f"{prefix}/{way}/fig" for prefix in ("", "/included") for way in ("price", "thread")]
        return [server.ask("GET", path)[:2] for path in [*paths, "/price/stone", "/nothing"]]

    host = ["-m", "uvicorn", "--port", "{port}", "--lifespan", "off", "shop:app"]
    ours = serve_both(host, use, signal.SIGINT)
    assert [status for status, _ in ours.answers] == [200, 200, 200, 200, 404, 404]
    (trace,) = traces()
    # On a busy machine a loop is blocked now and then.
    kinds = {span.site.name: span.site.kind for span in trace.spans if span.site.name not in BY_CHANCE}
    routes = [f"GET {prefix}/{way}/{{item}}" for prefix in ("", "/included") for way in ("price", "thread")]
    parts = dict.fromkeys(("prepare", "endpoint", "post", "queue (executor)"), "phase")
    assert kinds == {**dict.fromkeys([*routes, "GET"], "request"), **parts}
    requests = [span for span in trace.spans if span.site.kind == "request"]
    served = [span for span in requests if span.site.name != "GET"]
    assert (len(served), len(requests)) == (5, 6)  # what no route matches has its method alone
    for request, parts in ((one, {s.site.name for s in trace.spans if s.parent_id == one.span_id}) for one in served):
        assert parts == {"prepare", "endpoint", *(() if request is served[-1] else ("post",))}


LITSERVE_API = """
import litserve
from fastapi import HTTPException

class Shop(litserve.LitAPI):
    def setup(self, device):
        self.factor = 3

    def decode_request(self, request):
        return request["item"]

    def predict(self, item):
        if item == "stone":
            raise HTTPException(422, "no price")
        return self.factor * len(item)

    def encode_response(self, price):
        return {"price": price}
"""
LITSERVE_MAIN = """
import sys
from litserve import LitServer
from shop_api import Shop

if __name__ == "__main__":
    LitServer(Shop(), accelerator="cpu").run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False)
"""


@pytest.mark.slow
@needs("litserve")
def test_litserve_is_seen_in_the_process_that_talks_and_in_the_one_that_computes(folder: Path) -> None:
    write("shop_api.py", LITSERVE_API)
    write("main.py", LITSERVE_MAIN)
    write_profile(
        """
        service: shop
        functions:
          - {match: "litserve.server:RegularRequestHandler.handle_request", kind: request, name: http.request}
          - {match: "litserve.server:BaseRequestHandler._*_request"}
          - {match: "litserve.loops.base:_inject_context", kind: step}
          - {match: "shop_api:Shop"}
        """
    )

    def use(server: Server) -> list[Any]:
        return [server.ask("POST", "/predict", json.dumps({"item": item}))[:2] for item in ("apple", "stone", "fig")]

    ours = serve_both(["main.py", "{port}"], use, signal.SIGINT)
    assert ours.code == 0
    assert ours.answers == [(200, '{"price":15}'), (422, '{"detail":"no price"}'), (200, '{"price":9}')]
    talks, computes = sorted((tree_of(trace.spans) for trace in traces()), reverse=True)
    assert talks == outline(
        """
        http.request
          BaseRequestHandler._prepare_request
          BaseRequestHandler._submit_request
        http.request
          BaseRequestHandler._prepare_request
          BaseRequestHandler._submit_request
        http.request
          BaseRequestHandler._prepare_request
          BaseRequestHandler._submit_request
        """
    )
    assert computes == outline(
        """
        Shop.setup
        _inject_context
          Shop.decode_request
        _inject_context
          Shop.predict
        _inject_context
          Shop.encode_response
        _inject_context
          Shop.decode_request
        _inject_context
          Shop.predict
        _inject_context
          Shop.decode_request
        _inject_context
          Shop.predict
        _inject_context
          Shop.encode_response
        """
    )
