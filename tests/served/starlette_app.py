import asyncio

import work
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route, WebSocketRoute


async def item(request):
    return JSONResponse({"item": work.predict(request.path_params["name"])})


async def echo(request):
    return Response(await request.body())


async def fail(request):
    raise ValueError("as asked")


async def refuse(request):
    raise HTTPException(403)


async def stream(request):
    async def parts():
        for part in ("a", "b", "c"):
            await asyncio.sleep(0.01)
            yield part

    return StreamingResponse(parts())


async def later(request):
    return PlainTextResponse("now", background=BackgroundTask(work.after))


async def health(request):
    return PlainTextResponse("ok")


async def talk(websocket):
    await websocket.accept()
    while (text := await websocket.receive_text()) != "end":
        await websocket.send_text(text)
    await websocket.close()


class Gate(BaseHTTPMiddleware):
    async def dispatch(self, request, call_next):
        if request.query_params.get("key") == "bad":
            return PlainTextResponse("early", status_code=401)
        return await call_next(request)


ROUTES = [
    Route("/items/{name}", item),
    Route("/echo", echo, methods=["POST"]),
    Route("/fail", fail),
    Route("/refuse", refuse),
    Route("/stream", stream),
    Route("/later", later),
    Route("/health", health),
    WebSocketRoute("/talk/{room}", talk),
]
app = Starlette(routes=[*ROUTES, Mount("/sub/{tenant}", routes=ROUTES)], middleware=[Middleware(Gate)])
