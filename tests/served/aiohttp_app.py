import asyncio
import sys

import work
from aiohttp import web

routes = web.RouteTableDef()


@routes.get("/items/{name}")
async def item(request):
    return web.json_response({"item": work.predict(request.match_info["name"])})


@routes.post("/echo")
async def echo(request):
    return web.Response(body=await request.read())


@routes.get("/fail")
async def fail(request):
    raise ValueError("as asked")


@routes.get("/refuse")
async def refuse(request):
    raise web.HTTPForbidden


@routes.get("/stream")
async def stream(request):
    response = web.StreamResponse()
    await response.prepare(request)
    for part in (b"a", b"b", b"c"):
        await asyncio.sleep(0.01)
        await response.write(part)
    return response


@routes.get("/health")
async def health(request):
    return web.Response(text="ok")


@web.middleware
async def passed_on(request, handler):
    return await handler(request)


app, sub = (web.Application(middlewares=[passed_on]) for _ in range(2))
for one in (app, sub):
    one.add_routes(routes)
app.add_subapp("/sub", sub)

if __name__ == "__main__":
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
