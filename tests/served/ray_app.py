import signal
import sys
import threading

import work
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from ray import serve

app = FastAPI()


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Prices:
    def of(self, item):
        if item == "stone":
            raise ValueError("no price")
        return work.predict(item)

    def parts(self, item):
        yield from item


@serve.deployment(num_replicas=2, max_ongoing_requests=2, ray_actor_options={"num_cpus": 0.1})
@serve.ingress(app)
class Shop:
    def __init__(self, prices):
        self.prices = prices

    @app.get("/items/{item}")
    async def item(self, item: str):
        if item == "nothing":
            raise HTTPException(404)
        return await self.prices.of.remote(item)

    @app.get("/parts/{item}")
    async def parts(self, item: str):
        async def found():
            async for part in self.prices.options(stream=True).parts.remote(item):
                yield part

        return StreamingResponse(found())


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
def plain(request):
    return "plain"


if __name__ == "__main__":
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    serve.run(Shop.bind(Prices.bind()), name="shop", route_prefix="/shop")
    serve.run(plain.bind(), name="plain", route_prefix="/plain")
    ended.wait()
    serve.shutdown()
