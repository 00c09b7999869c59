"""The engine in a process of its own, as in large services: `python -m chat.server --engine-process`.

Requests go there and tokens come back over a pipe. There, one thread takes requests, computes, and sends.
"""

import asyncio
import multiprocessing
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from chat import debug_log
from chat.engine import Engine, EngineBusyError, Finish, Generation, random_of
from chat.model import ChatModel, Size
from chat.weights import build_model


class EngineProcess:
    """The face of an `Engine` for the application, with the engine in another process."""

    def __init__(self, weights: Path | None = None, *, slots: int = 16, threads: int = 1, waiting: int = 256) -> None:
        """Compute up to `slots` requests at a time on `threads` CPU threads; up to `waiting` more may queue."""
        self.length = Size().length
        self.device = "not known yet"
        self._limit = slots + waiting
        self._open: dict[str, Generation] = {}
        context = multiprocessing.get_context("spawn")
        self._connection, self._far_end = context.Pipe()
        self._process = context.Process(target=compute, args=(self._far_end, weights, slots, threads), daemon=True)
        self._reader = threading.Thread(target=self._read, name="tokens")

    def start(self) -> None:
        """Start the process and wait until it can compute; it starts once."""
        self._process.start()
        self._far_end.close()
        self.device = self._connection.recv()
        self._reader.start()

    def stop(self) -> None:
        """End every open request as stopped and join the process."""
        with suppress(OSError):
            self._connection.send(None)
        self._reader.join()
        self._process.join()

    def load(self) -> dict[str, int]:
        """Requests that have not ended."""
        return {"open": len(self._open)}

    def submit(self, request_id: str, prompt: list[int], max_tokens: int, seed: int | None = None) -> Generation:
        """Send a request of the running event loop. Prompt and answer must fit the length of the model."""
        if not self._reader.is_alive() or len(self._open) >= self._limit:
            raise EngineBusyError(f"{len(self._open)} requests are open")
        generation = Generation(request_id, prompt, max_tokens, loop=asyncio.get_running_loop())
        self._open[request_id] = generation
        with suppress(OSError):  # the process has ended, as will the request
            self._connection.send((request_id, prompt, max_tokens, seed))
        return generation

    def cancel(self, generation: Generation) -> None:
        """Drop a request before the next step; one that has finished stays as it is."""
        if generation.finish is None:
            with suppress(OSError):
                self._connection.send((generation.id,))

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                request_id, message = self._connection.recv()
                generation = self._open[request_id]
                if message is None:
                    generation.begin()
                elif isinstance(message, int):
                    generation.give(message)
                else:
                    del self._open[request_id]
                    generation.end(message)
        for generation in self._open.values():  # the process has ended, and not as it should
            generation.end("failed")


def compute(connection: Connection, weights: Path | None, slots: int, threads: int) -> None:
    """Run the engine: the work of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a terminal sends to both: the server says when to end
    torch.set_num_threads(threads)
    engine = RemoteEngine(build_model(weights), connection, slots)
    connection.send(str(engine.device))
    engine.run()
    debug_log.save()


class RemoteEngine(Engine):
    """Takes its requests from a connection, between two steps, on the thread that computes."""

    def __init__(self, model: ChatModel, connection: Connection, slots: int) -> None:
        """Read requests from `connection`. The other end bounds their number."""
        super().__init__(model, slots=slots, waiting=sys.maxsize)
        self._connection = connection
        self._running = True

    def wait_for_work(self) -> bool:
        """Read the messages that have come. Wait for one if there is nothing to compute. Return False at the end."""
        while self._connection.poll(0 if self._active or self._waiting else None):
            try:
                message = self._connection.recv()
            except EOFError:  # the server is no more
                return False
            if message is None:
                return False
            if len(message) == 1:
                self._cancel_of(*message)
            else:
                request_id, prompt, max_tokens, seed = message
                random = random_of(seed)
                generation = RemoteGeneration(request_id, prompt, max_tokens, random, connection=self._connection)
                with debug_log.logged("accept", request_id):
                    self.accept(generation)
        return True

    def _cancel_of(self, request_id: str) -> None:
        for generation in [*self._active, *self._waiting]:
            if generation.id == request_id:
                self.cancel(generation)


@dataclass(eq=False)
class RemoteGeneration(Generation):
    """A request that sends its tokens over a connection, with its id: None at the begin, and the reason at its end."""

    connection: Connection | None = None

    def begin(self) -> None:
        """Report that the engine works on it."""
        self._send(None)

    def give(self, token: int) -> None:
        """Send a token."""
        self._send(token)

    def end(self, finish: Finish) -> None:
        """Report the reason of its end."""
        self._send(finish)

    def _send(self, message: int | str | None) -> None:
        if self.connection is not None:
            with suppress(OSError):  # the server is no more, which the next step finds
                self.connection.send((self.id, message))
