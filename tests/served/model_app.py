"""A model behind a queue of its own. How long a request takes, and in what, is up to what it asks for."""

import asyncio

import numpy
import torch
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

WIDTH = 64
SIDE = 4096
HOLD_S = 0.2
LOOK_UP_S = 0.003

torch.set_num_threads(1)
torch.manual_seed(0)


class Attention(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x @ x.T, dim=-1) @ x


model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), Attention(), torch.nn.Linear(WIDTH, 1)).eval()
image = numpy.ones((SIDE, SIDE), dtype=numpy.float32)
staging = numpy.empty_like(image)
turn = asyncio.Lock()


async def wait_for_turn():
    await turn.acquire()


def tokenize(text):
    tokens = 0
    for letter in text:
        tokens = (tokens * 31 + ord(letter)) % 50_021
    return tokens


def stage(side):
    """Columns first, which no machine copies as fast as rows."""
    numpy.copyto(staging[:side, :side], image[:side, :side].T)


def infer(rows):
    with torch.inference_mode():
        return float(model(torch.ones(rows, WIDTH)).sum())


async def predict(request):
    asked = await request.json()
    tokenize(asked["text"])
    await asyncio.sleep(LOOK_UP_S)  # in a store elsewhere; a request of nothing but us would be as long as noise is
    await wait_for_turn()
    try:
        if asked["rows"] < 1:
            raise ValueError("no rows")
        stage(asked["side"])
        return JSONResponse({"sum": infer(asked["rows"])})
    finally:
        turn.release()


async def hold(request):
    """Something else has the model for a while."""
    await turn.acquire()
    asyncio.get_running_loop().call_later(HOLD_S, turn.release)
    return PlainTextResponse("held")


async def health(request):
    return PlainTextResponse("ok")


app = Starlette(
    routes=[
        Route("/predict", predict, methods=["POST"]),
        Route("/hold", hold, methods=["POST"]),
        Route("/health", health),
    ]
)
