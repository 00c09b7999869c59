"""The server process: `python -m chat.server --port 8000`.

It prints `listening on http://127.0.0.1:PORT` once it answers, and ends as uvicorn does: on SIGINT or SIGTERM it takes
no new connection, finishes the open requests, stops the engine and leaves the signal to its default.
"""

import argparse
import socket
from contextlib import suppress
from pathlib import Path

import torch
import uvicorn

from chat.app import build_app
from chat.engine import Engine
from chat.engine_process import EngineProcess
from chat.weights import build_model

_SHUTDOWN_S = 10


class Server(uvicorn.Server):
    """Announces its address on standard output, which is how a port of the system's choice becomes known."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then announce."""
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()
            print(f"listening on http://{host}:{port}", flush=True)


def build_engine(options: argparse.Namespace) -> Engine | EngineProcess:
    """The engine that the command line asks for."""
    if options.engine_process:
        return EngineProcess(options.weights, slots=options.slots, threads=options.threads)
    torch.set_num_threads(options.threads)
    return Engine(build_model(options.weights), slots=options.slots)


def _listen(port: int) -> socket.socket:
    # named as TCP, or asyncio leaves Nagle's algorithm on and a first token waits 40 ms for an acknowledgement
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(1024)
    return listener


def main() -> None:
    """Command line of the module."""
    parser = argparse.ArgumentParser(prog="python -m chat.server", description="serve the chat model on loopback")
    parser.add_argument("--port", type=int, default=8000, help="0 lets the system choose (default: 8000)")
    parser.add_argument("--weights", type=Path, help="file of chat.weights; without it they are made in memory")
    parser.add_argument("--slots", type=int, default=16, help="requests computed at a time (default: 16)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the model (default: 1)")
    parser.add_argument("--engine-process", action="store_true", help="run the engine in a process of its own")
    options = parser.parse_args()
    app = build_app(build_engine(options))
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_SHUTDOWN_S)
    # uvicorn repeats a SIGINT once it has shut down
    with _listen(options.port) as listener, suppress(KeyboardInterrupt):
        Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
