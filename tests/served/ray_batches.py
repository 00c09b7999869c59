"""A Ray Serve app of two replicas, which serve several requests at a time."""

import asyncio
import signal
import sys
import threading

from ray import serve


@serve.deployment(num_replicas=2, max_ongoing_requests=8, ray_actor_options={"num_cpus": 0.1})
class Shop:
    @serve.batch(max_batch_size=4, batch_wait_timeout_s=0.02)
    async def prices(self, items):
        await asyncio.sleep(0.02)
        return [item.upper() for item in items]

    async def __call__(self, request):
        return {"item": await self.prices((await request.json())["item"])}


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
def ready(request):
    return "ready"


if __name__ == "__main__":
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    serve.run(Shop.bind(), name="shop", route_prefix="/shop")
    serve.run(ready.bind(), name="ready", route_prefix="/ready")  # once all replicas of the other are
    ended.wait()
    serve.shutdown()
