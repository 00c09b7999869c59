"""Libraries of the field, all of their functions recorded: programs print what they print without us.

Each program runs in one process with the others of its group, without us and under `instrument run`. The rules name
each function of each library of the group (`lib:*` and `lib.**:*`): 87 libraries, 32 programs.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

WEB = {
    "anyio": """
        import anyio
        async def main():
            found = []
            async def work(number):
                await anyio.sleep(0)
                found.append(number)
            async with anyio.create_task_group() as group:
                for number in range(3):
                    group.start_soon(work, number)
            send, receive = anyio.create_memory_object_stream(1)
            async with send, receive:
                await send.send(1)
                found.append(await receive.receive())
            return sorted(found), await anyio.to_thread.run_sync(lambda: 7)
        print(anyio.run(main))
        """,
    "starlette httpx httpcore h11 sniffio": """
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.base import BaseHTTPMiddleware
        from starlette.responses import JSONResponse, StreamingResponse
        from starlette.routing import Route
        from starlette.testclient import TestClient
        async def items(request):
            return JSONResponse({"id": request.path_params["id"], "q": request.query_params.get("q")})
        async def stream(request):
            async def parts():
                for part in "abc":
                    yield part
            return StreamingResponse(parts())
        async def tag(request, call_next):
            answer = await call_next(request)
            answer.headers["x-tag"] = "1"
            return answer
        app = Starlette(
            routes=[Route("/items/{id:int}", items), Route("/stream", stream)],
            middleware=[Middleware(BaseHTTPMiddleware, dispatch=tag)],
        )
        client = TestClient(app)
        for path in ("/items/5?q=x", "/stream", "/nowhere"):
            answer = client.get(path)
            print(answer.status_code, answer.text, answer.headers.get("x-tag"))
        """,
    "fastapi pydantic annotated_types": """
        from fastapi import Depends, FastAPI, HTTPException
        from fastapi.testclient import TestClient
        from pydantic import BaseModel, Field, field_validator
        class Item(BaseModel):
            name: str = Field(min_length=2)
            price: float = 1
            @field_validator("price")
            def positive(cls, value):
                if value < 0:
                    raise ValueError("below 0")
                return value
        app = FastAPI()
        def user(token: str = "none"):
            yield {"token": token}
        @app.post("/items")
        async def make(item: Item, user=Depends(user)) -> Item:
            if item.name == "bad":
                raise HTTPException(418, "no")
            return item
        client = TestClient(app)
        for body in ({"name": "ab"}, {"name": "a"}, {"name": "bad"}, {"name": "ab", "price": -1}):
            answer = client.post("/items?token=t", json=body)
            print(answer.status_code, answer.json())
        print(sorted(app.openapi()["paths"]))
        """,
    "flask werkzeug jinja2 markupsafe itsdangerous blinker click": """
        import flask
        app = flask.Flask("app")
        app.secret_key = "k"
        @app.route("/<int:number>")
        def page(number):
            flask.session["n"] = number
            return flask.render_template_string("{% for i in range(n) %}{{ i }},{% endfor %}<{{ '<b>' }}", n=number)
        client = app.test_client()
        print(client.get("/3").text, client.get("/x").status_code)
        with app.test_request_context():
            print(flask.url_for("page", number=4))
        """,
    "quart hypercorn": """
        import asyncio, quart
        app = quart.Quart("app")
        @app.get("/<name>")
        async def hello(name):
            return {"name": name}
        async def main():
            answer = await app.test_client().get("/you")
            print(answer.status_code, await answer.get_json())
        asyncio.run(main())
        """,
    "litestar msgspec polyfactory multidict": """
        from litestar import Litestar, get, post
        from litestar.testing import TestClient
        from dataclasses import dataclass
        @dataclass
        class Point:
            x: int
            y: int = 0
        @get("/{a:int}")
        async def double(a: int) -> dict[str, int]:
            return {"a": a * 2}
        @post("/")
        async def make(data: Point) -> Point:
            return data
        with TestClient(Litestar([double, make])) as client:
            print(client.get("/4").json(), client.post("/", json={"x": 1}).json())
            print(client.post("/", json={}).status_code)
        """,
    "django asgiref sqlparse": """
        import django
        from django.conf import settings
        settings.configure(DEBUG=False, ROOT_URLCONF="__main__", SECRET_KEY="k", ALLOWED_HOSTS=["*"])
        django.setup()
        from django.http import JsonResponse
        from django.template import Context, Engine
        from django.test import RequestFactory
        print(Engine().from_string("{{ a|upper }}").render(Context({"a": "x"})))
        print(RequestFactory().get("/p?q=1").GET)
        import sqlparse
        print(sqlparse.format("select a,b from t where c=1", reindent=True, keyword_case="upper"))
        """,
    "aiohttp yarl frozenlist aiosignal": """
        import asyncio
        from aiohttp import ClientSession, web
        async def main():
            async def handle(request):
                return web.json_response({"path": request.path})
            app = web.Application()
            app.router.add_get("/{name}", handle)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = site._server.sockets[0].getsockname()[1]
            async with ClientSession() as session, session.get(f"http://127.0.0.1:{port}/abc") as answer:
                print(answer.status, await answer.json())
            await runner.cleanup()
        asyncio.run(main())
        """,
    "requests urllib3 idna charset_normalizer certifi": """
        import requests, urllib3
        class Adapter(requests.adapters.BaseAdapter):
            def send(self, request, **kwargs):
                answer = requests.Response()
                answer.status_code, answer._content, answer.url = 200, b'{"a": 1}', request.url
                return answer
            def close(self): ...
        session = requests.Session()
        session.mount("http://", Adapter())
        print(session.get("http://host/a b", params={"q": "ü"}).json(), urllib3.util.parse_url("http://u@h:8/p"))
        """,
    "h2 hpack hyperframe wsproto": """
        import h2.connection, h2.config, hpack, wsproto
        client = h2.connection.H2Connection()
        client.initiate_connection()
        client.send_headers(1, [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":authority", "h")])
        server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        print([type(event).__name__ for event in server.receive_data(client.data_to_send())])
        print(hpack.Decoder().decode(hpack.Encoder().encode([("a", "b")])))
        """,
    "uvicorn websockets": """
        import asyncio, socket, uvicorn, websockets
        from websockets.asyncio.client import connect
        async def app(scope, receive, send):
            if scope["type"] != "websocket":
                return
            await receive()
            await send({"type": "websocket.accept"})
            message = await receive()
            await send({"type": "websocket.send", "text": message["text"][::-1]})
        async def main():
            listener = socket.create_server(("127.0.0.1", 0))
            server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
            serving = asyncio.create_task(server.serve([listener]))
            async with connect(f"ws://127.0.0.1:{listener.getsockname()[1]}") as client:
                await client.send("abc")
                print(await client.recv())
            server.should_exit = True
            await serving
        asyncio.run(main())
        """,
}
WORDS = {
    "pygments rich markdown_it mdurl": """
        import io, pygments, pygments.lexers, pygments.formatters
        from rich.console import Console
        from rich.table import Table
        from markdown_it import MarkdownIt
        print(pygments.highlight("def f(): pass", pygments.lexers.PythonLexer(), pygments.formatters.NullFormatter()))
        table = Table("a", "b")
        table.add_row("1", "[b]2[/b]")
        out = io.StringIO()
        Console(file=out, width=40).print(table)
        print(out.getvalue(), MarkdownIt().render("# a\\n* b"))
        """,
    "typer shellingham click": """
        import typer
        from typer.testing import CliRunner
        app = typer.Typer()
        @app.command()
        def greet(name: str, loud: bool = False):
            typer.echo(name.upper() if loud else name)
        print(CliRunner().invoke(app, ["x", "--loud"]).output, CliRunner().invoke(app, ["--help"]).exit_code)
        """,
    "yaml jinja2": """
        import yaml, jinja2
        print(yaml.safe_dump(yaml.safe_load("a: [1, {b: 2}]\\nc: &x 1\\nd: *x")))
        environment = jinja2.Environment()
        environment.filters["twice"] = lambda value: value * 2
        print(environment.from_string("{% macro m(a) %}{{ a|twice }}{% endmacro %}{{ m('x') }}").render())
        """,
    "pydantic typing_extensions": """
        import typing, pydantic
        @pydantic.validate_call
        def add(a: int, b: int = 2) -> int:
            return a + b
        class Tree(pydantic.BaseModel):
            model_config = pydantic.ConfigDict(frozen=True)
            value: int
            below: "list[Tree]" = []
            @pydantic.computed_field
            @property
            def total(self) -> int:
                return self.value + sum(tree.total for tree in self.below)
        tree = Tree.model_validate({"value": "1", "below": [{"value": 2}]})
        print(add("3"), tree.model_dump_json(), sorted(Tree.model_json_schema()["$defs"]))
        try:
            add("x")
        except pydantic.ValidationError as error:
            print(error.error_count(), error.errors()[0]["type"])
        """,
    "attr attrs": """
        import attr, attrs
        @attrs.define(order=True)
        class Part:
            a: int = attrs.field(validator=attrs.validators.instance_of(int))
            b: list = attrs.Factory(list)
        print(Part(1), Part(1) < Part(2), attrs.evolve(Part(1), a=3), attr.asdict(Part(4)))
        """,
    "jsonschema referencing jsonschema_specifications": """
        import jsonschema
        schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
        print([error.message for error in jsonschema.Draft202012Validator(schema).iter_errors({"a": "x"})])
        """,
    "google.protobuf opentelemetry.proto": """
        from opentelemetry.proto.trace.v1.trace_pb2 import Span
        from google.protobuf.json_format import MessageToDict
        span = Span(name="n")
        print(MessageToDict(Span.FromString(span.SerializeToString())))
        """,
    "opentelemetry.sdk opentelemetry.trace opentelemetry.context": """
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        tracer = provider.get_tracer("t")
        with tracer.start_as_current_span("a"):
            with tracer.start_as_current_span("b"):
                pass
        print([span.name for span in exporter.get_finished_spans()])
        """,
    "msgpack msgspec multidict propcache": """
        import msgpack, msgspec, multidict
        print(msgpack.unpackb(msgpack.packb({"a": [1, 2.5, None]})), msgspec.json.decode(b'[1]', type=list[int]))
        print(multidict.CIMultiDict(A=1)["a"])
        """,
    "sortedcontainers packaging six": """
        import six
        from sortedcontainers import SortedDict, SortedList
        from packaging.specifiers import SpecifierSet
        from packaging.version import Version
        print(SortedList([3, 1, 2]), SortedDict(b=1, a=2), SpecifierSet(">=1,<2").contains("1.5"), Version("1.0rc1"))
        """,
    "filelock fsspec aiofiles tqdm": """
        import asyncio, aiofiles, filelock, fsspec, io, tqdm
        with filelock.FileLock("lock"), open("file", "w") as file:
            file.write("text")
        async def read():
            async with aiofiles.open("file") as file:
                return await file.read()
        print(asyncio.run(read()), fsspec.filesystem("file").cat("file"), list(tqdm.tqdm([1, 2], file=io.StringIO())))
        """,
    "cloudpickle dill wrapt": """
        import cloudpickle, dill, textwrap, wrapt
        @wrapt.decorator
        def noted(wrapped, instance, args, kwargs):
            return wrapped(*args, **kwargs) + 1
        @noted
        def f(x):
            return x * 2
        print(f(2), cloudpickle.loads(cloudpickle.dumps(lambda x: x + 1))(1))
        print(dill.loads(dill.dumps(textwrap.dedent)) is textwrap.dedent)
        """,
    "prometheus_client": """
        import prometheus_client as client
        registry = client.CollectorRegistry()
        client.Counter("c", "d", ["a"], registry=registry).labels("x").inc()
        print([line for line in client.generate_latest(registry).decode().splitlines() if "created" not in line])
        """,
    "hypothesis": """
        from hypothesis import given, settings, strategies
        found = []
        @settings(max_examples=20, database=None, derandomize=True)
        @given(strategies.lists(strategies.integers()))
        def check(values):
            found.append(sorted(sorted(values)) == sorted(values))
        check()
        print(len(found) > 5, all(found))
        """,
}
MODELS = {
    "torch.nn torch.optim torch.utils.data torch.distributions": """
        import torch
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            print(round(model(torch.ones(1, 4)).item(), 4), torch.einsum("ij,j->i", torch.eye(2), torch.ones(2)))
        scripted = torch.jit.script(model)
        print(round(scripted(torch.ones(1, 4)).item(), 4), torch.fx.symbolic_trace(model).code.count("="))
        loader = torch.utils.data.DataLoader(torch.arange(6), batch_size=4)
        print([batch.tolist() for batch in loader], torch.distributions.Normal(0.0, 1.0).cdf(torch.tensor(0.0)))
        """,
    "transformers safetensors": """
        import torch, transformers
        torch.manual_seed(0)
        config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, bos_token_id=0, eos_token_id=31)
        model = transformers.GPT2LMHeadModel(config).eval()
        made = model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=4, do_sample=False, pad_token_id=0)
        print(made.tolist(), config.to_diff_dict()["n_embd"])
        """,
}
NUMBERS = {
    "numpy": """
        import numpy
        print(numpy.linalg.solve([[2, 0], [0, 4]], [1, 2]), numpy.fft.fft([1, 0]), numpy.einsum("ii", numpy.eye(3)))
        print(numpy.ma.masked_equal([1, 2], 2), numpy.polyfit([0, 1], [1, 3], 1).round(3))
        print(numpy.random.default_rng(1).integers(9))
        """,
    "networkx": """
        import networkx
        graph = networkx.path_graph(4)
        print(networkx.shortest_path(graph, 0, 3), list(graph.edges), networkx.pagerank(graph)[0] > 0)
        print(sorted(networkx.algorithms.community.greedy_modularity_communities(graph), key=min))
        """,
    "sympy mpmath": """
        import sympy
        x = sympy.Symbol("x")
        print(sympy.integrate(sympy.sin(x) ** 2, x), sympy.solve(x**2 - 4), sympy.N(sympy.pi, 20), sympy.latex(x / 2))
        """,
    "scipy sklearn joblib threadpoolctl": """
        import numpy, joblib
        from scipy import optimize, sparse, stats
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
        print(optimize.brentq(lambda x: x - 1, 0, 3), stats.norm.cdf(0), sparse.eye(2).sum())
        rows = numpy.arange(20.0).reshape(10, 2)
        model = make_pipeline(StandardScaler(), LogisticRegression()).fit(rows, [0] * 5 + [1] * 5)
        print(model.predict(rows), joblib.hash([1, 2]), joblib.Parallel(1)(joblib.delayed(abs)(i) for i in (-1, 2)))
        """,
    "jax": """
        import jax, jax.numpy as jnp
        f = jax.jit(lambda x: jnp.sum(jnp.sin(x) ** 2))
        print(float(f(jnp.arange(3.0)).round(4)), jax.grad(f)(jnp.ones(2)).round(4))
        print(jax.vmap(lambda x: x * 2)(jnp.ones(2)))
        """,
}
# The larger the heap, the longer each import takes that replaces what others have: the largest are by themselves.
GROUPS = {"web": WEB, "words": WORDS, "models": MODELS} | {name: {name: text} for name, text in NUMBERS.items()}
RUN = """
import json, os, sys, textwrap, traceback, warnings
warnings.simplefilter("ignore")
for libraries, program in json.load(open("programs.json")).items():
    print("#", libraries)
    try:
        exec(compile(textwrap.dedent(program), libraries, "exec"), {"__name__": "__main__"})
    except BaseException as error:
        print("failed:", "".join(traceback.format_exception(error))[-2000:])
"""


def _programs() -> dict[str, dict[str, str]]:
    """The programs of each group whose libraries are installed."""

    def is_there(library: str) -> bool:
        return importlib.util.find_spec(library.partition(".")[0]) is not None

    return {
        group: {libraries: text for libraries, text in programs.items() if all(map(is_there, libraries.split()))}
        for group, programs in GROUPS.items()
    }


def _libraries(programs: dict[str, str]) -> set[str]:
    return {library for libraries in programs for library in libraries.split()}


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_programs_print_what_they_print_where_all_functions_of_their_libraries_are_recorded(
    group: str, tmp_path: Path
) -> None:
    programs = _programs()[group]
    patterns = [f'"{library}{form}"' for library in sorted(_libraries(programs)) for form in (":*", ".**:*")]
    (tmp_path / "p.yaml").write_text(
        f"service: n\nfunctions: [{{match: [{', '.join(patterns)}]}}]\nexport: {{summary: {{to: summary.txt}}}}\n"
    )
    (tmp_path / "programs.json").write_text(json.dumps(programs))
    (tmp_path / "run.py").write_text(RUN)
    printed = []
    for command in (["run.py"], ["-m", "instrument", "run", "--profile", "p.yaml", "--", "run.py"]):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        printed.append(done.stdout.split("# "))
    assert "failed" not in "".join(printed[0])
    for bare, ours in zip(*printed, strict=True):
        assert ours == bare
    assert "Summary of n" in (tmp_path / "summary.txt").read_text()
