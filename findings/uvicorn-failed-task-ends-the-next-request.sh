#!/usr/bin/env bash
# uvicorn closes a connection when a background task of an answered request fails, in the middle of the next request.
#
# Versions: uvicorn 0.54.0 with h11 0.16.0 and httptools 0.9.0, starlette 1.10.0, Python 3.11.
# Seen: the answer 200 of the first request is complete, without `connection: close`, and its background task still runs.
#   The client sends a second request on the same connection. When the task raises, uvicorn closes the connection: the
#   client has no answer to the second request, whose handler runs to its end. A handler that raises closes the
#   connection in the same way after the complete answer 500 of Starlette.
# Expected: a connection that is announced as kept stays open (RFC 9112, 9.3 and 9.6), as without the task.
# A user sees "server disconnected" in clients and proxies for requests that did not fail, and the more often the more
# other requests fail. The access log and traces of the service have these requests with status 200.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uvicorn==0.54.0 h11==0.16.0 httptools==0.9.0 starlette==1.10.0
"$folder/venv/bin/python" - <<'PYTHON'
import asyncio

import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.responses import PlainTextResponse
from starlette.routing import Route

ended = []
arrived = None


def first(fails):
    async def task():
        await arrived.wait()
        if fails:
            raise RuntimeError("the task of the first request")

    return lambda request: PlainTextResponse("first", background=BackgroundTask(task))


async def second(request):
    arrived.set()
    await asyncio.sleep(0.5)
    ended.append("second")
    return PlainTextResponse("second")


async def failing(request):
    raise RuntimeError("the handler")


app = Starlette(
    routes=[
        Route("/fails", first(True)), Route("/works", first(False)), Route("/second", second), Route("/failing", failing)
    ]
)


async def answer(reader):
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.split("content-length: ")[1].split("\r\n")[0])
    return head.split()[1], "connection: close" in head, (await reader.readexactly(length)).decode()


async def ask(kind, *paths):
    global arrived
    arrived = asyncio.Event()
    ended.clear()
    server = uvicorn.Server(uvicorn.Config(app, port=0, http=kind, log_level="critical", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.servers[0].sockets[0].getsockname()[1])
    answers = []
    for path in paths:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        try:
            answers.append(await answer(reader))
        except asyncio.IncompleteReadError:
            answers.append("connection closed")
    is_closed = "connection closed" in answers
    if not is_closed:
        try:
            is_closed = await asyncio.wait_for(reader.read(), 1) == b""
        except TimeoutError:
            pass
    await asyncio.sleep(1)
    writer.close()
    server.should_exit = True
    await serving
    return answers, is_closed, list(ended)


for kind in ("h11", "httptools"):
    works = asyncio.run(ask(kind, "/works", "/second"))
    fails = asyncio.run(ask(kind, "/fails", "/second"))
    error = asyncio.run(ask(kind, "/failing"))
    print(kind, works, fails, error, sep="\n  ")
    assert works == ([("200", False, "first"), ("200", False, "second")], False, ["second"])
    assert fails == ([("200", False, "first"), "connection closed"], True, ["second"])
    assert error == ([("500", False, "Internal Server Error")], True, [])
PYTHON
