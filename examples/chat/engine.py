"""Continuous batching: requests join and leave the batch between two steps, on one thread of its own.

An answer depends on the request alone, never on its company: a prompt is computed by itself, rounding never decides
between two tokens (see `chat.model`), and a request that samples draws from a random generator of its own.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from chat.debug_log import logged
from chat.model import Cache, ChatModel, make_cache
from chat.text import END

logger = logging.getLogger(__name__)

Finish = Literal["end", "length", "cancelled", "stopped", "failed"]


class EngineBusyError(Exception):
    """The queue is full or the engine is not running: nothing was accepted."""


@dataclass(eq=False)
class Generation:
    """One accepted request: its tokens arrive on `tokens` of its own event loop, None is the last.

    `random` draws the samples; without it the most likely token is taken. `taken_up` is set once the engine works on
    it, `finish` before the None is sent.
    """

    id: str
    prompt: list[int]
    max_tokens: int
    random: torch.Generator | None = None
    loop: asyncio.AbstractEventLoop | None = None
    tokens: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)
    taken_up: asyncio.Event = field(default_factory=asyncio.Event)
    slot: int = -1
    last: int = -1
    made: int = 0
    cancelled: bool = False
    finish: Finish | None = None

    async def wait_for_turn(self) -> None:
        """Wait until the engine begins with the prompt, or has ended the request before."""
        with logged("wait_for_turn", self.id):
            await self.taken_up.wait()

    async def first_token(self) -> int | None:
        """Return the first token, None if the request has ended without one."""
        with logged("first_token", self.id):
            return await self.tokens.get()

    # The rest is called by the engine, on its thread.

    def begin(self) -> None:
        """Report that the engine works on it."""
        self._tell(self.taken_up.set)

    def give(self, token: int) -> None:
        """Send a token."""
        self._tell(self.tokens.put_nowait, token)

    def end(self, finish: Finish) -> None:
        """Report the reason of its end, after its last token or without one."""
        self.finish = finish
        self.begin()
        self._tell(self.tokens.put_nowait, None)

    def _tell(self, what: Callable[..., None], *values: int | None) -> None:
        try:
            if self.loop is not None:
                self.loop.call_soon_threadsafe(what, *values)
        except RuntimeError:  # the loop has closed: nobody is left to read
            self.cancelled = True


class Engine:
    """Owns the model, its cache and the thread that runs them."""

    def __init__(self, model: ChatModel, *, slots: int = 16, waiting: int = 256) -> None:
        """Compute up to `slots` requests at a time; up to `waiting` more may queue."""
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device).eval()
        self.length = model.size.length
        self.slots = slots
        self._limit = waiting
        self._cache = make_cache(model.size, slots, self.device)
        self._free = list(reversed(range(slots)))
        self._active: list[Generation] = []
        self._waiting: deque[Generation] = deque()
        self._work = threading.Condition()
        self._running = False
        self._thread = threading.Thread(target=self.run, name="engine")

    def start(self) -> None:
        """Start the thread; an engine starts once."""
        self._running = True
        self._thread.start()

    def stop(self) -> None:
        """End every open request as stopped and join the thread."""
        with self._work:
            self._running = False
            self._work.notify()
        self._thread.join()

    def load(self) -> dict[str, int]:
        """Requests being computed and requests in the queue."""
        return {"active": len(self._active), "waiting": len(self._waiting)}

    def submit(self, request_id: str, prompt: list[int], max_tokens: int, seed: int | None = None) -> Generation:
        """Queue a request of the running event loop. Prompt and answer must fit the length of the model."""
        generation = Generation(request_id, prompt, max_tokens, random_of(seed), asyncio.get_running_loop())
        with logged("accept", request_id):
            self.accept(generation)
        return generation

    @logged("accept")
    def accept(self, generation: Generation) -> None:
        """Queue a request; EngineBusyError if there is no room for it."""
        with self._work:
            if not self._running or len(self._waiting) >= self._limit:
                raise EngineBusyError(f"{len(self._waiting)} requests are waiting")
            self._waiting.append(generation)
            self._work.notify()

    def cancel(self, generation: Generation) -> None:
        """Drop a request before the next step; one that has finished stays as it is."""
        generation.cancelled = True

    def step(self) -> None:
        """Let requests in, compute the prompts of the new ones and one more token for all."""
        for generation in self.admit():
            with logged("prefill", generation.id):
                self.prefill(generation)
        if self._active:
            with logged("decode", *(generation.id for generation in self._active)):
                self.decode()

    def admit(self) -> list[Generation]:
        """Free the slots of cancelled requests and give the free slots to those who wait longest."""
        for generation in [active for active in self._active if active.cancelled]:
            self._end(generation, "cancelled")
        admitted = []
        with self._work:
            while self._free and self._waiting:
                generation = self._waiting.popleft()
                generation.slot = self._free.pop()
                admitted.append(generation)
        self._active += admitted
        return admitted

    @logged("prefill")
    def prefill(self, generation: Generation) -> None:
        """Compute the prompt of one request, which gives its first token."""
        generation.begin()
        tokens, positions = self.prepare_batch([generation.prompt], [0])
        scores = self.forward(tokens, positions, [layer.slot(generation.slot) for layer in self._cache])
        self._deliver([generation], self.sample([generation], [0], scores))

    @logged("decode")
    def decode(self) -> None:
        """Compute the next token of every active request; free slots compute one that nobody reads."""
        rows, starts = [[END]] * self.slots, [0] * self.slots
        for generation in self._active:
            rows[generation.slot] = [generation.last]
            starts[generation.slot] = len(generation.prompt) + generation.made - 1
        tokens, positions = self.prepare_batch(rows, starts)
        scores = self.forward(tokens, positions, self._cache)
        active = list(self._active)
        self._deliver(active, self.sample(active, [generation.slot for generation in active], scores))

    def prepare_batch(self, rows: list[list[int]], starts: list[int]) -> tuple[Tensor, Tensor]:
        """Tokens and positions [row, token] on the device; a row begins at its position in `starts`."""
        positions = [list(range(start, start + len(row))) for row, start in zip(rows, starts, strict=True)]
        host = torch.tensor([rows, positions], pin_memory=self.device.type == "cuda")
        tokens, places = host.to(self.device, non_blocking=True)
        return tokens, places

    def forward(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Scores [row, vocabulary] of the next token of every row."""
        with torch.inference_mode():
            scores: Tensor = self.model(tokens, positions, cache)[:, -1]
        return scores

    def sample(self, generations: list[Generation], rows: list[int], scores: Tensor) -> list[int]:
        """Return the next token of every request, by the scores in its row: the most likely one, or a draw."""
        host = scores.to("cpu")
        tokens = []
        for generation, row in zip(generations, rows, strict=True):
            wanted = host[row]
            if generation.random is not None:  # the largest of scores plus Gumbel noise is a draw from their softmax
                wanted = wanted - torch.empty_like(wanted).exponential_(generator=generation.random).log()
            tokens.append(int(wanted.argmax()))
        return tokens

    def _deliver(self, generations: list[Generation], tokens: list[int]) -> None:
        for generation, token in zip(generations, tokens, strict=True):
            if token == END:
                self._end(generation, "end")
                continue
            generation.last = token
            generation.made += 1
            generation.give(token)
            if generation.made == generation.max_tokens:
                self._end(generation, "length")

    def _end(self, generation: Generation, finish: Finish) -> None:
        self._active.remove(generation)
        self._free.append(generation.slot)
        generation.end(finish)

    def run(self) -> None:
        """Work until the engine stops, on its own thread."""
        while self.wait_for_work():
            self._step_or_fail()
        for generation in [*self._active, *self._waiting]:
            generation.end("stopped")

    def wait_for_work(self) -> bool:
        """Wait until there is something to compute; False once the engine is to stop."""
        with self._work:
            self._work.wait_for(lambda: self._active or self._waiting or not self._running)
            return self._running

    def _step_or_fail(self) -> None:
        try:
            self.step()
        except Exception:
            logger.exception("a step failed, its requests end here")
            for generation in list(self._active):
                self._end(generation, "failed")


def random_of(seed: int | None) -> torch.Generator | None:
    """Return the random generator of a request, None if it does not sample."""
    return None if seed is None else torch.Generator().manual_seed(seed)
