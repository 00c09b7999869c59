#!/usr/bin/env bash
# Starlette, FastAPI and Litestar answer 500 to a client that leaves in the middle of its upload, and log an error.
#
# Versions: starlette 1.10.0, fastapi 0.165.0, litestar 2.25.0, quart 0.22.0, Python 3.11.
# Seen: the server reports `http.disconnect` before the whole body. `await request.body()` raises, and nothing handles
#   that: the application sends 500. Starlette and FastAPI also raise ClientDisconnect to the server, which logs a
#   traceback; Litestar raises InternalServerException. A parameter of FastAPI that reads the body as JSON gives 400,
#   and Quart sends nothing.
# Expected: no answer, or one below 500, as the client is at fault and gets no answer.
# A user sees error rates by status, alerts and "5xx" panels that count each broken upload as a failure of the service,
# whatever middleware measures them. Exception handlers for ClientDisconnect (Starlette, FastAPI) avoid it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q starlette==1.10.0 fastapi==0.165.0 litestar==2.25.0 quart==0.22.0
"$folder/venv/bin/python" - <<'PYTHON' 2> "$folder/log" || { cat "$folder/log"; exit 1; }
import asyncio

import fastapi
import litestar
import quart
import starlette.applications
import starlette.responses
import starlette.routing


async def upload(request):
    return starlette.responses.PlainTextResponse(str(len(await request.body())))


of_starlette = starlette.applications.Starlette(routes=[starlette.routing.Route("/", upload, methods=["POST"])])
of_fastapi, of_quart = fastapi.FastAPI(), quart.Quart("app")


@of_fastapi.post("/")
async def upload_to_fastapi(request: fastapi.Request) -> int:
    return len(await request.body())


@of_fastapi.post("/json")
async def upload_json(content: dict) -> int:
    return len(content)


@litestar.post("/")
async def upload_to_litestar(request: litestar.Request) -> int:
    return len(await request.body())


@of_quart.post("/")
async def upload_to_quart() -> str:
    return str(len(await quart.request.get_data()))


async def statuses(app, path="/"):
    messages = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    sent = []

    async def receive():
        return messages.pop(0) if messages else await asyncio.Event().wait()

    async def send(message):
        if message["type"] == "http.response.start":
            sent.append(message["status"])

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(b"host", b"x"), (b"content-length", b"100"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }
    try:
        await asyncio.wait_for(app(scope, receive, send), 60)
    except Exception as error:
        sent.append(type(error).__name__)
    return sent


seen = {
    "starlette": asyncio.run(statuses(of_starlette)),
    "fastapi": asyncio.run(statuses(of_fastapi)),
    "fastapi, a parameter": asyncio.run(statuses(of_fastapi, "/json")),
    "litestar": asyncio.run(statuses(litestar.Litestar([upload_to_litestar]))),
    "quart": asyncio.run(statuses(of_quart)),
}
print(seen)
assert seen == {
    "starlette": [500, "ClientDisconnect"],
    "fastapi": [500, "ClientDisconnect"],
    "fastapi, a parameter": [400],
    "litestar": [500],
    "quart": [],
}
PYTHON
