import asyncio

import work
from litestar import Litestar, Request, Response, Router, get, post
from litestar.exceptions import HTTPException
from litestar.response import Stream


@get("/items/{name:str}")
async def item(name: str) -> dict:
    return {"item": work.predict(name)}


@post("/echo")
async def echo(request: Request) -> Response:
    return Response(await request.body())


@get("/fail")
async def fail() -> None:
    raise ValueError("as asked")


@get("/refuse")
async def refuse() -> None:
    raise HTTPException(status_code=403)


@get("/stream")
async def stream() -> Stream:
    async def parts():
        for part in ("a", "b", "c"):
            await asyncio.sleep(0.01)
            yield part

    return Stream(parts())


@get("/health")
async def health() -> str:
    return "ok"


HANDLERS = [item, echo, fail, refuse, stream, health]
app = Litestar(route_handlers=[*HANDLERS, Router("/sub/{tenant:str}", route_handlers=HANDLERS)])
