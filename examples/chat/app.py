"""The HTTP side: `POST /generate` answers whole or as server-sent events, `GET /health` says that the service is up.

A request is a JSON object: `prompt`, and if wanted `max_tokens`, `seed` (draw instead of taking the most likely token)
and `stream`. Whatever is wrong with it is answered with status 400 and the reason.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from chat.engine import Engine, EngineBusyError, Generation
from chat.text import END, decode, decode_next, encode

MAX_BODY_BYTES = 64 * 1024
MAX_TOKENS = 64


class BadRequestError(Exception):
    """The request cannot be answered; the message says why."""


@dataclass(frozen=True)
class Ask:
    """A request that is in order."""

    prompt: list[int]
    max_tokens: int
    seed: int | None
    stream: bool


def build_app(engine: Engine) -> Starlette:
    """The application; the engine runs from its start-up to its shutdown."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            engine.stop()

    routes = [Route("/generate", generate, methods=["POST"]), Route("/health", health)]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.state.engine = engine
    return app


async def generate(request: Request) -> Response:
    """Answer a prompt."""
    engine: Engine = request.app.state.engine
    try:
        ask = read_ask(await read_body(request), engine.model.size.length)
        generation = engine.submit(ask.prompt, ask.max_tokens, ask.seed)
    except BadRequestError as error:
        return JSONResponse({"error": str(error)}, 400)
    except EngineBusyError as error:
        return JSONResponse({"error": str(error)}, 503, {"Retry-After": "1"})
    if ask.stream:
        return StreamingResponse(stream_events(engine, generation), media_type="text/event-stream")
    tokens = [token async for token in stream_tokens(engine, generation)]
    status = 200 if generation.finish in ("end", "length") else 500
    return JSONResponse({"text": decode(tokens), "tokens": len(tokens), "finish": generation.finish}, status)


async def health(request: Request) -> Response:
    """Say that the service is up, and how busy it is."""
    engine: Engine = request.app.state.engine
    return JSONResponse({"status": "ok", "device": str(engine.device), **engine.load()})


async def stream_tokens(engine: Engine, generation: Generation) -> AsyncIterator[int]:
    """Tokens as the engine makes them. A reader that leaves early cancels the request."""
    try:
        await generation.wait_for_turn()
        token = await generation.first_token()
        while token is not None:
            yield token
            token = await generation.tokens.get()
    finally:
        engine.cancel(generation)


async def stream_events(engine: Engine, generation: Generation) -> AsyncIterator[str]:
    """Server-sent events: one for every token, one that says how it ended."""
    pending, made = b"", 0
    async for token in stream_tokens(engine, generation):
        text, pending = decode_next(pending, token)
        made += 1
        yield _event({"text": text})
    text, _ = decode_next(pending, END)
    yield _event({"text": text, "tokens": made, "finish": generation.finish})


async def read_body(request: Request) -> bytes:
    """Body of a request, at most MAX_BODY_BYTES of it."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise BadRequestError(f"the body is longer than {MAX_BODY_BYTES} bytes")
    return body


def read_ask(body: bytes, length: int) -> Ask:
    """Check a request; prompt and answer must fit into `length` tokens."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequestError("the body is not JSON") from None
    if not isinstance(fields, dict):
        raise BadRequestError("the body is not a JSON object")
    if unknown := sorted(fields.keys() - {"prompt", "max_tokens", "seed", "stream"}):
        raise BadRequestError(f"unknown field {unknown[0]!r}")
    text, stream = fields.get("prompt"), fields.get("stream", False)
    max_tokens, seed = fields.get("max_tokens", 16), fields.get("seed")
    if not isinstance(text, str) or not text:
        raise BadRequestError("prompt must be a text that is not empty")
    if type(max_tokens) is not int or not 1 <= max_tokens <= MAX_TOKENS:
        raise BadRequestError(f"max_tokens must be a whole number from 1 to {MAX_TOKENS}")
    if seed is not None and (type(seed) is not int or not 0 <= seed < 2**63):
        raise BadRequestError("seed must be a whole number from 0 to 2**63 - 1")
    if not isinstance(stream, bool):
        raise BadRequestError("stream must be true or false")
    try:
        prompt = encode(text)
    except UnicodeEncodeError:
        raise BadRequestError("prompt is not Unicode text") from None
    if len(prompt) + max_tokens > length:
        raise BadRequestError(f"prompt has {len(prompt)} tokens; with max_tokens at most {length} are possible")
    return Ask(prompt, max_tokens, seed, stream)


def _event(fields: dict[str, object]) -> str:
    return f"data: {json.dumps(fields)}\n\n"
