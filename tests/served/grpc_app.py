"""A gRPC service with one method of each kind, written by hand: `python grpc_app.py PORT sync|aio`."""

import asyncio
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import grpc.aio
import work

ITEMS = (b"a", b"b", b"c")


def echo(request, context):
    return work.predict(request.decode()).encode()


def fail(request, context):
    raise ValueError("as asked")


def refuse(request, context):
    context.abort(grpc.StatusCode.NOT_FOUND, "as asked")


def count(request, context):
    yield from ITEMS


def join(requests, context):
    return b"".join(requests)


def talk(requests, context):
    for request in requests:
        yield request * 2


async def async_echo(request, context):
    await asyncio.sleep(0)
    return work.predict(request.decode()).encode()


async def async_fail(request, context):
    raise ValueError("as asked")


async def async_refuse(request, context):
    await context.abort(grpc.StatusCode.NOT_FOUND, "as asked")


async def async_count(request, context):
    for item in ITEMS:
        await asyncio.sleep(0)
        yield item


async def async_join(requests, context):
    return b"".join([request async for request in requests])


async def async_talk(requests, context):
    while (request := await context.read()) is not grpc.aio.EOF:
        await context.write(request * 2)


SYNC = {"Echo": echo, "Fail": fail, "Refuse": refuse, "Count": count, "Join": join, "Talk": talk}
ASYNC = {
    "Echo": async_echo,
    "Fail": async_fail,
    "Refuse": async_refuse,
    "Count": async_count,
    "Join": async_join,
    "Talk": async_talk,
}
KINDS = {"Count": "unary_stream", "Join": "stream_unary", "Talk": "stream_stream"}


def handlers(functions):
    made = {
        name: getattr(grpc, f"{KINDS.get(name, 'unary_unary')}_rpc_method_handler")(function)
        for name, function in functions.items()
    }
    return (grpc.method_handlers_generic_handler("shop.Orders", made),)


def serve(port):
    server = grpc.server(ThreadPoolExecutor(4), handlers(SYNC))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ended.wait()
    server.stop(5).wait()


async def serve_async(port):
    server = grpc.aio.server(handlers=handlers(ASYNC))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    await server.stop(5)


if __name__ == "__main__":
    if sys.argv[2] == "sync":
        serve(sys.argv[1])
    else:
        asyncio.run(serve_async(sys.argv[1]))
