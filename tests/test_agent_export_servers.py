"""The agent exports every request of servers once, with the process that served it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from otlp_collectors import Collector, collecting, take
from otlp_receiver import free_port
from test_agent import INSTRUMENT, agents, children_of, folder, processes, until
from test_agent_containers import ALONE, has_namespaces
from test_agent_servers import of_this_run

from instrument.runtime import agent_socket

__all__ = ["folder"]

SERVED = Path(__file__).parent / "served"

PROFILE = """
service: shop
functions:
  - {match: "engine:serve", kind: request}
  - match: "engine:step"
requests: auto
export:
  otlp: {endpoint: "http://127.0.0.1:%d"}
  summary: {to: stderr}
"""

ENGINE = """
import os

def step(x):
    return os.getpid()

def serve(x):
    return step(x)
"""

SHOP = """
import engine

def wsgi(environ, start_response):
    body = b"%d" % engine.step(1)
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]

async def asgi(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    body = b"%d" % engine.step(1)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})
"""

POOL = """
import multiprocessing, sys
import engine

def work(number):
    return engine.serve(number)

if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(3, maxtasksperchild=20) as pool:
        print(*pool.map(work, range(160), chunksize=1))
        pool.close()
        pool.join()
"""

WORK = """
import engine

def predict(name):
    return str(engine.step(name))
"""

GUNICORN = ["-m", "gunicorn", "-w", "2", "-b", "127.0.0.1:{port}", "--graceful-timeout", "100"]
UVICORN = ["-m", "uvicorn", "--port", "{port}", "--log-level", "warning", "--timeout-worker-healthcheck", "60"]
GRPC = ["grpc_app.py", "{port}"]


def asked_by_http(port: int) -> int:
    """The number of the process that answered, 0 for none."""
    answer = b""
    try:
        with socket.create_connection(("127.0.0.1", port), 60) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: shop\r\nConnection: close\r\n\r\n")
            while more := client.recv(4096):
                answer += more
    except OSError:
        pass
    found = re.match(rb"HTTP/1.1 200 .*\r\n\r\n(\d+)$", answer, re.DOTALL)
    return int(found[1]) if found else 0


def asked_by_grpc(port: int) -> int:
    import grpc

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            return int(channel.unary_unary("/shop.Orders/Echo")(b"x", timeout=240))
        except grpc.RpcError:
            return 0


def hung_up(server: int) -> None:
    """Have gunicorn begin new workers and end the old ones."""
    os.kill(server, signal.SIGHUP)


def changed(_: int) -> None:
    """Have uvicorn find that the service's source is another one."""
    with Path("shop.py").open("a") as file:
        file.write("\n")


@dataclass(frozen=True)
class Case:
    """A server, and the function that asks it.

    `reload` makes the server use new processes. A pool asks itself. `workers` is the number of processes that answer.
    The agent is that of the run, or a separate agent if `beside` is true. The service runs in its own container if
    `container` is true. The agent runs in another container if `apart` is true.
    """

    words: list[str]
    needs: tuple[str, ...] = ()
    ask: Callable[[int], int] = asked_by_http
    reload: Callable[[int], object] | None = None
    workers: int = 1
    beside: bool = False
    container: bool = False
    apart: bool = False
    name: str = "GET"


CASES = {
    "gevent": Case([*GUNICORN, "-k", "gevent", "shop:wsgi"], ("gunicorn", "gevent"), workers=2),
    "gunicorn-hup": Case([*GUNICORN, "shop:wsgi"], ("gunicorn",), reload=hung_up, workers=2),
    "uvicorn-worker": Case(
        [*GUNICORN, "-k", "uvicorn_worker.UvicornWorker", "shop:asgi"], ("gunicorn", "uvicorn_worker"), workers=2
    ),
    "uvicorn-reload": Case([*UVICORN, "--reload", "shop:asgi"], ("uvicorn",), reload=changed),
    "grpc": Case([*GRPC, "sync"], ("grpc",), asked_by_grpc, name="shop.Orders/Echo"),
    "sidecar-apart": Case([*GUNICORN, "shop:wsgi"], ("gunicorn",), workers=2, beside=True, container=True, apart=True),
    "container": Case([*GUNICORN, "--preload", "-k", "gthread", "shop:wsgi"], ("gunicorn",), workers=2, container=True),
    "uvicorn-in-container": Case([*UVICORN, "--workers", "2", "shop:asgi"], ("uvicorn",), workers=2, container=True),
}


POOLS = {
    "forkserver": Case(["pool.py", "forkserver"], name="serve"),
    "spawn-beside": Case(["pool.py", "spawn"], beside=True, name="serve"),
    "fork-apart": Case(["pool.py", "fork"], beside=True, container=True, apart=True, name="serve"),
    "fork-in-container": Case(["pool.py", "fork"], container=True, name="serve"),
}


@contextmanager
def begun(case: Case, words: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """The service under `instrument run`; it has ended at the end, and so have agents."""
    for needed in case.needs:
        pytest.importorskip(needed)
    if case.container and not has_namespaces():
        pytest.skip("needs namespaces of processes")
    path, agent = Path(os.environ["XDG_RUNTIME_DIR"]) / "beside" / "agent.sock", None
    if case.beside:
        path.parent.mkdir(mode=0o700)
        agent = subprocess.Popen(
            [*(ALONE if case.apart else []), *INSTRUMENT, "agent", "--socket", str(path)],
            stderr=subprocess.PIPE,
            text=True,
        )
        until(lambda: agent_socket.has_listener(path))
        monkeypatch.setenv(agent_socket.VARIABLE, str(path))
    command = [*INSTRUMENT, "run", "--profile", "profile.yaml", "--", *words]
    with Path("errors").open("w") as errors, Path("out").open("w") as out:
        service = subprocess.Popen([*(ALONE if case.container else []), *command], stderr=errors, stdout=out)
    try:
        yield service
        code = service.wait(240)
    finally:
        service.kill()
        service.wait()
        if agent is not None:
            os.kill(children_of(agent.pid)[0] if case.apart else agent.pid, signal.SIGTERM)
            _, said = agent.communicate(timeout=240)
            left = [*path.parent.iterdir()]
            shutil.rmtree(path.parent)
            assert not left, left
            with Path("errors").open("a") as errors:
                errors.write(said)
    assert code in (0, -signal.SIGTERM, 128 + signal.SIGTERM), told()
    until(lambda: not of_this_run())


def memories(agent: int) -> int:
    """The number of recordings that an agent keeps."""
    inodes = set()
    for path in Path(f"/proc/{agent}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if str(path.readlink()).startswith("/memfd:instrument"):
                inodes.add(path.stat().st_ino)
    return len(inodes)


def told() -> str:
    return Path("errors").read_text() + Path("out").read_text()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting(take) as server:
        Path("engine.py").write_text(ENGINE)
        Path("shop.py").write_text(SHOP)
        Path("work.py").write_text(WORK)
        shutil.copy(SERVED / "grpc_app.py", "grpc_app.py")
        Path("profile.yaml").write_text(PROFILE % server.server_port)
        yield server


def asked_by_many(ask: Callable[[], int], times: int) -> Counter[int]:
    """Return the number of requests that each process answered, of `times` asked eight at a time."""
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.extend([ask() for _ in range(times // 8)])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Counter(answers)


def is_sent_once(collector: Collector, case: Case, answered: Counter[int]) -> None:
    """Check that each request is at the collector once, with the process that answered it, and in the one report."""
    spans = [(instance, span) for instance, of in collector.spans.items() for span in of]
    assert len({span.span_id for _, span in spans}) == len(spans)
    requests = [(instance, span) for instance, span in spans if span.name.startswith(case.name)]
    by_process = Counter(collector.resources[instance]["process.pid"] for instance, _ in requests)
    assert by_process == answered, told()
    assert Counter(span.name for _, span in spans)["step"] == answered.total()
    assert {resource["service.name"] for resource in collector.resources.values()} == {"shop"}
    assert told().count("Summary of shop") == 1, told()
    assert re.search(r"requests: (\d+)", told())[1] == str(answered.total()), told()  # type: ignore[index]
    assert "without a goodbye" not in told()
    assert collector.connections == 1


FAST = ("grpc", "forkserver")


def table(cases: Mapping[str, Case]) -> pytest.MarkDecorator:
    names = [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in cases]
    return pytest.mark.parametrize("name", names)


@pytest.mark.slow
@table(CASES)
def test_every_request_of_a_server_is_sent_once_as_of_the_process_that_served_it(
    name: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, port = CASES[name], free_port()
    answered: Counter[int] = Counter()

    def ask() -> int:
        return case.ask(port)

    def ask_all(others: set[int]) -> None:
        """Ask until every worker but the `others` has answered and those have gone, then some more."""
        while len(answered.keys() - others - {0}) < case.workers or any(
            Path(f"/proc/{pid}").exists() for pid in others
        ):
            answered[ask()] += 1
        answered.pop(0, 0)  # nobody listened yet
        answered.update(asked_by_many(ask, 200))

    with begun(case, [word.format(port=port) for word in case.words], monkeypatch) as service:
        ask_all(set())
        if case.reload is not None:
            before = answered.keys() - {0}
            case.reload(service.pid)
            ask_all(before)
        if not (case.beside or case.container):
            (agent,) = agents()
            until(lambda: memories(agent) == len([one for one in processes() if not one["ended_ns"]]))
        os.kill(children_of(service.pid)[0] if case.container else service.pid, signal.SIGTERM)
    assert 0 not in answered
    is_sent_once(collector, case, answered)


@pytest.mark.slow
@table(POOLS)
def test_every_request_of_a_pool_is_sent_once_as_of_the_process_that_worked_on_it(
    name: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = POOLS[name]
    Path("pool.py").write_text(POOL)
    with begun(case, case.words, monkeypatch):
        pass
    answered = Counter(map(int, Path("out").read_text().split()))
    assert answered.total() == 160
    is_sent_once(collector, case, answered)
