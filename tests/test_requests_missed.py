"""Requests and jobs that come to a process and are not recorded: each report says so, with what is known of them."""

from __future__ import annotations

import gc
import http.client
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from server_programs import serving

from instrument.agent.processes import Process, Run
from instrument.agent.unseen import ConnectionWatch
from instrument.instrumentors.requests.servers_and_routers import SEAMS, Requests
from instrument.instrumentors.verdict import Verdict, drop_recorded_elsewhere, merge_verdicts
from instrument.profile.model import RequestsRule
from instrument.recording import board
from instrument.runtime import environment
from instrument.trace import file

SELF = Path("/proc/self")


@pytest.fixture
def family(recorder: Any) -> Iterator[Requests]:
    """The rule of requests, at work where nothing has been imported for it."""
    made = Requests((RequestsRule(),), recorder)
    yield made
    made.undo()


def met(family: Requests) -> Any:
    """A server of ASGI that is met; returns the way to have it serve a request at a port."""
    name = "granian.asgi"
    module: Any = ModuleType(name)
    module._callback_wrapper = lambda callback, *_: callback
    family.attach_to(module)
    assert name in SEAMS["asgi"]

    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    served = module._callback_wrapper(app)

    def serve(port: int = 80) -> None:
        scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "server": ("127.0.0.1", port)}
        with pytest.raises(StopIteration):
            served(scope, None, None).send(None)

    return serve


def states(family: Requests) -> Mapping[str, tuple[str, int | None]]:
    return {verdict.target: (verdict.state, verdict.calls) for verdict in family.verdicts()}


def test_a_server_that_is_imported_and_serves_nothing_is_uncalled(family: Requests) -> None:
    assert states(family) == {"": ("waiting", None)}
    serve = met(family)
    assert states(family) == {"requests": ("uncalled", None)}
    serve()
    serve()
    assert states(family) == {"requests": ("attached", 2), "routes": ("unreachable", None)}


def test_requests_without_a_route_are_reported_where_no_router_is_known(
    family: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    met(family)()
    assert "no router is known" in family.verdicts()[1].why
    monkeypatch.setitem(sys.modules, "cherrypy", ModuleType("cherrypy"))
    assert "1 request has none: cherrypy is imported, whose router is not known" in family.verdicts()[1].why
    monkeypatch.delitem(sys.modules, "cherrypy")
    flask = pytest.importorskip("flask.app")
    family.attach_to(flask)
    assert "routes" not in states(family), "a request to a path that has no route has none"


def test_connections_to_a_process_that_records_no_request_are_reported(
    family: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    family.ports = frozenset({8000, 9000})
    assert states(family)["connections"] == ("unmet", None)
    assert "they came to ports 8000, 9000" in family.verdicts()[1].why
    met(family)(port=9000)
    assert "connections" not in states(family), "what else listens may be no server of requests at all"
    monkeypatch.setitem(sys.modules, "robyn", ModuleType("robyn"))
    (told,) = (verdict for verdict in family.verdicts() if verdict.target == "connections")
    assert told.why.startswith("they came to port 8000, and no request was recorded there; requests of ")
    assert "robyn" in told.why


def test_a_worker_of_a_queue_that_records_no_request_is_reported(
    family: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huey.bin.huey_consumer", ModuleType("huey_consumer"))
    assert states(family)["jobs"] == ("unmet", None)
    assert family.verdicts()[1].why.startswith("huey takes jobs from a queue; none was recorded")


def test_requests_recorded_in_another_process_are_not_reported_as_missed() -> None:
    """The parent of workers has such a verdict, and an engine's process behind the server."""
    unmet = Verdict("requests", "unmet", "connections", "they came to port 80")
    served = Verdict("requests", "attached", "requests", calls=3)
    assert merge_verdicts([unmet, served]) == [served]
    assert merge_verdicts([unmet]) == [unmet]
    assert drop_recorded_elsewhere([unmet], {board.called_mark("requests")}) == []
    assert drop_recorded_elsewhere([unmet], {board.attached_mark("requests")}) == [unmet]


def test_ports_are_known_that_connections_came_to_and_are_open_or_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        gc.collect()  # what earlier tests have left open is closed by now
        before = len(list(Path("/proc/self/fd").iterdir()))
        assert environment.has_listening_socket()
        assert port in environment.list_connections(SELF).listens
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        assert port not in environment.list_connections(SELF).open
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = listener.accept()
            assert port in environment.list_connections(SELF).open
            client.shutdown(socket.SHUT_WR)  # the client's end closes first
            accepted.recv(1)
            accepted.close()
            client.recv(1)
        found = environment.list_connections(SELF)
    assert (port in found.open, port in found.closed) == (False, True)
    assert port in environment.list_connections(SELF, frozenset({port})).closed
    assert environment.list_connections(Path("/proc/0")) == (frozenset(),) * 4


def test_a_server_that_is_started_again_has_not_the_connections_of_the_one_before() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = listener.accept()
            accepted.shutdown(socket.SHUT_WR)  # the server's end closes first, and is what the system keeps
            client.recv(1)
            client.close()
            accepted.recv(1)
            accepted.close()
        assert port in environment.list_connections(SELF).closed
    time.sleep(0.1)  # the system counts starts in hundredths of a second
    program = LISTENING.replace('("127.0.0.1", 0)', f'("127.0.0.1", {port})')
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True) as child:
        try:
            assert child.stdout is not None
            assert int(child.stdout.readline()) == port
            found = environment.list_connections(Path(f"/proc/{child.pid}"))
            assert (port in found.listens, port in found.closed) == (True, False)
        finally:
            child.kill()


LISTENING = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
accepted = listener.accept()
print("accepted", flush=True)
input()
"""


def test_the_agent_sees_a_connection_to_a_process_that_was_killed() -> None:
    child = subprocess.Popen([sys.executable, "-c", LISTENING], stdin=-1, stdout=-1, text=True)
    assert child.stdout is not None
    port = int(child.stdout.readline())
    told: list[Any] = []
    later: list[Any] = []
    process = Process(run=Run("run"), pid=child.pid, started=0, facts={}, joined_ns=0)
    loop: Any = SimpleNamespace(call_later=lambda _, look: later.append(look))
    watch = ConnectionWatch(loop, lambda _, message: told.append(message), lambda: [process])
    watch.watch_process(process)
    later.pop()()
    assert (told, process.listened) == ([], {port})
    with socket.create_connection(("127.0.0.1", port)):
        assert child.stdout.readline() == "accepted\n"
        later.pop()()
        assert told == [{"connections": [port]}]
        process.ports = frozenset()
        child.kill()
        child.communicate()
    watch.update_ports(process)
    assert process.ports in ({port}, set()), "an end by a reset leaves nothing that waits"
    process.has_requests = True
    later.pop()()
    assert later == [], "who records requests is looked at no more"


def test_a_service_on_a_server_that_nobody_knows_says_so_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        textwrap.dedent("""
        import socketserver, sys

        class Handler(socketserver.StreamRequestHandler):
            def handle(self):
                self.rfile.readline()
                self.wfile.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")

        socketserver.TCPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
        """)
    )
    (tmp_path / "profile.yaml").write_text("requests: auto\nexport: {summary: {to: stderr}}")
    with serving([str(tmp_path / "app.py"), "{port}"], tmp_path, {}, ours=True) as (port, program):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        connection.close()
    text = " ".join(program.output.split())
    assert program.code == -signal.SIGTERM
    assert "No request was recorded: see `Not observed` below." in text
    assert f"requests: connections: unmet (they came to port {port}, and no request was recorded there" in text


@pytest.mark.slow
@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_verdicts_outlive_a_process_that_ends_without_a_goodbye(tmp_path: Path, end: str) -> None:
    (tmp_path / "main.py").write_text(
        textwrap.dedent(f"""
        import os
        from instrument.recorder.recorder import RECORDER

        def called(): ...
        def idle(): ...

        while not RECORDER.facts.get("notes"):
            called()
        {end}
        """)
    )
    (tmp_path / "profile.yaml").write_text('functions: [{match: "__main__:*"}, {match: "lacking:x"}]')
    own = {key: value for key, value in os.environ.items() if not key.startswith(("INSTRUMENT", "OTEL_"))}
    command = [sys.executable, "-m", "instrument", "check", "profile.yaml", "--", "main.py"]
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=240, check=False)
    assert "__main__:idle: uncalled" in done.stdout, (done.stdout, done.stderr)
    assert "__main__:called: attached" in done.stdout
    until = time.monotonic() + 240
    while not (saved := list(tmp_path.glob("**/*-died.npz"))):  # the agent saves it, after the command
        assert time.monotonic() < until
        time.sleep(0.02)
    trace = file.load(saved[0]).trace
    assert "1 target was never called: __main__:idle" in trace.notes
    assert any(note.startswith("lacking:x: waiting") for note in trace.notes)
    assert trace.own_notes.uncalled == ("__main__:idle",), "in a report of all it is no note where another calls it"


@pytest.mark.slow
def test_requests_of_children_that_a_server_forks_for_each_are_not_reported_as_missed(
    tmp_path: Path,
) -> None:
    (tmp_path / "main.py").write_text(
        textwrap.dedent("""
        import http.server, socketserver, subprocess, sys, threading

        class Server(socketserver.ForkingMixIn, http.server.HTTPServer): pass

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(204)
                self.end_headers()
            def log_message(self, *_): pass

        server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ask = f"import urllib.request as r\\nfor _ in range(4): r.urlopen('http://127.0.0.1:{server.server_port}/')"
        subprocess.run([sys.executable, "-I", "-S", "-c", ask], check=True)
        server.shutdown()
        server.server_close()
        """)
    )
    command = [sys.executable, "-m", "instrument", "run", "--", "main.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=True)
    assert "requests: 4;" in done.stderr
    assert "unmet" not in done.stderr
    assert "uncalled (at http.server)" not in done.stderr
