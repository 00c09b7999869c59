"""The HTTP side: `POST /generate` answers whole or as server-sent events, `GET /health` reports that it is up.

A request is a JSON object with `prompt`, and optionally `max_tokens`, `seed` (to draw tokens) and `stream`. A request
with a mistake gets status 400 and the reason.
"""

import itertools
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chat import debug_log
from chat.debug_log import logged, task_logged
from chat.engine import Engine, EngineBusyError, Generation
from chat.engine_process import EngineProcess
from chat.text import END, decode, decode_next, encode

MAX_BODY_BYTES = 64 * 1024
MAX_TOKENS = 64


class BadRequestError(Exception):
    """The request cannot be answered; the message has the reason."""


@dataclass(frozen=True)
class Ask:
    """A request that is in order."""

    prompt: list[int]
    max_tokens: int
    seed: int | None
    stream: bool


class RequestIds:
    """Gives each request an id, which the engine uses, too."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._numbers = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer a request with its id."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = scope.setdefault("state", {})["request_id"] = f"chat-{next(self._numbers)}"
        with ExitStack() as around, ExitStack() as inside:
            around.enter_context(task_logged(scope["path"], request_id))
            inside.enter_context(logged(scope["path"], request_id))

            async def send_on(message: Message) -> None:
                is_last = message["type"] == "http.response.body" and not message.get("more_body")
                if is_last:
                    inside.close()
                await send(message)
                if is_last:
                    around.close()

            await self.app(scope, receive, send_on)


def build_app(engine: Engine | EngineProcess) -> Starlette:
    """The application; the engine runs from its start-up to its shutdown."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        debug_log.watch_tasks()
        engine.start()
        try:
            yield
        finally:
            engine.stop()
            debug_log.save()

    routes = [Route("/generate", generate, methods=["POST"]), Route("/health", health)]
    app = Starlette(routes=routes, middleware=[Middleware(RequestIds)], lifespan=lifespan)
    app.state.engine = engine
    return app


async def generate(request: Request) -> Response:
    """Answer a prompt."""
    engine: Engine | EngineProcess = request.app.state.engine
    request_id: str = request.state.request_id
    try:
        with logged("read_body", request_id):
            body = await read_body(request)
        with logged("read_ask", request_id):
            ask = read_ask(body, engine.length)
        generation = engine.submit(request_id, ask.prompt, ask.max_tokens, ask.seed)
    except BadRequestError as error:
        return JSONResponse({"error": str(error)}, 400)
    except EngineBusyError as error:
        return JSONResponse({"error": str(error)}, 503, {"Retry-After": "1"})
    if ask.stream:
        return StreamingResponse(stream_events(engine, generation), media_type="text/event-stream")
    with logged("stream_tokens", request_id):
        tokens = [token async for token in stream_tokens(engine, generation)]
    status = 200 if generation.finish in ("end", "length") else 500
    with logged("decode_text", request_id):
        text = decode(tokens)
    return JSONResponse({"text": text, "tokens": len(tokens), "finish": generation.finish}, status)


async def health(request: Request) -> Response:
    """Report that the service is up, and its load."""
    engine: Engine | EngineProcess = request.app.state.engine
    return JSONResponse({"status": "ok", "device": str(engine.device), **engine.load()})


async def stream_tokens(engine: Engine | EngineProcess, generation: Generation) -> AsyncIterator[int]:
    """Tokens as the engine makes them. A reader that leaves early cancels the request."""
    with logged("stream_tokens", generation.id):
        try:
            with logged("wait_for_turn", generation.id):
                await generation.wait_for_turn()
            with logged("first_token", generation.id):
                token = await generation.first_token()
            while token is not None:
                yield token
                token = await generation.tokens.get()
        finally:
            engine.cancel(generation)


async def stream_events(engine: Engine | EngineProcess, generation: Generation) -> AsyncIterator[str]:
    """Server-sent events: one for every token, and one with the reason of the end."""
    pending, made = b"", 0
    with logged("stream_tokens", generation.id):
        async for token in stream_tokens(engine, generation):
            with logged("decode_text", generation.id):
                text, pending = decode_next(pending, token)
            made += 1
            yield _event({"text": text})
    with logged("decode_text", generation.id):
        text, _ = decode_next(pending, END)
    yield _event({"text": text, "tokens": made, "finish": generation.finish})


async def read_body(request: Request) -> bytes:
    """Body of a request, at most MAX_BODY_BYTES of it."""
    body = b""
    with logged("read_body", request.state.request_id):
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise BadRequestError(f"the body is longer than {MAX_BODY_BYTES} bytes")
    return body


@logged("read_ask")
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
