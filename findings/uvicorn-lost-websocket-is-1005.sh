#!/usr/bin/env bash
# uvicorn tells an application that a websocket whose connection was lost has ended with code 1005, like an orderly end.
#
# Versions: uvicorn 0.54.0 with websockets 17.4 and wsproto 1.3.2, Python 3.11.
# Seen: a client that closes the connection without a close frame gives code 1005 with `--ws wsproto`,
#   `websockets-sansio` and `auto`, the default. A close frame without a code gives 1005, too. The deprecated
#   `--ws websockets` gives 1006 for a lost connection.
# Expected: 1006 for a lost connection. RFC 6455 (7.1.5) has 1005 for a close frame without a code, and 1006 for none.
# An error rate by close codes falls to 0 with the default of this version. By code alone nobody can count lost clients.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q uvicorn==0.54.0 websockets==17.4 wsproto==1.3.2 h11
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import asyncio
import base64

import uvicorn

EMPTY_CLOSE_FRAME = b"\x88\x80\x00\x00\x00\x00"
codes = []


async def app(scope, receive, send):
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] != "websocket.disconnect":
        pass
    codes.append(int(message["code"]))


async def end_code(kind, last_bytes):
    server = uvicorn.Server(uvicorn.Config(app, port=0, ws=kind, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    key = base64.b64encode(bytes(16)).decode()
    writer.write(
        f"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    await reader.readuntil(b"\r\n\r\n")
    writer.write(last_bytes)
    if last_bytes:
        await reader.read()  # the server answers with its own close frame
    writer.close()
    while not codes:
        await asyncio.sleep(0.01)
    server.should_exit = True
    await serving
    return codes.pop()


seen = {
    kind: (asyncio.run(end_code(kind, b"")), asyncio.run(end_code(kind, EMPTY_CLOSE_FRAME)))
    for kind in ("auto", "websockets-sansio", "wsproto", "websockets")
}
print("kind: (lost connection, close frame without a code)", seen)
assert seen == {
    "auto": (1005, 1005), "websockets-sansio": (1005, 1005), "wsproto": (1005, 1005), "websockets": (1006, 1005)
}
PYTHON
