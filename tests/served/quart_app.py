import asyncio

import work
from quart import Blueprint, Quart, abort, request

routes = Blueprint("routes", __name__)


@routes.get("/items/<name>")
async def item(name, tenant=None):
    return {"item": work.predict(name)}


@routes.post("/echo")
async def echo(tenant=None):
    return await request.get_data()


@routes.get("/fail")
async def fail(tenant=None):
    raise ValueError("as asked")


@routes.get("/refuse")
async def refuse(tenant=None):
    abort(403)


@routes.get("/stream")
async def stream(tenant=None):
    async def parts():
        for part in ("a", "b", "c"):
            await asyncio.sleep(0.01)
            yield part.encode()

    return parts()


@routes.get("/health")
async def health(tenant=None):
    return "ok"


app = Quart(__name__)
app.register_blueprint(routes)
app.register_blueprint(routes, name="sub", url_prefix="/sub/<tenant>")
