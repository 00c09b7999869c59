"""The cost of observed layers in a model: `python tests/bench/layers.py`.

A model of 100 modules runs in blocks. Its forward takes about 10 ms on one CPU thread. A block runs without a session
(A) or with a session whose profile selects all 100 modules (B). The blocks come as A B B A in one process, so a steady
drift of the machine's speed has the same effect on both. Each quad gives one shift, the medians of B against the
medians of A. The figure is the median of the shifts. Its 95 % confidence interval comes from drawing the quads anew
(bootstrap). A second row keeps the session and switches recording off at run time.

On two shared cores all 100 recorded layers made the forward of 10 ms 0.5 % longer.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import instrument
from instrument.profile.model import LayerRule, Profile
from instrument.recorder.recorder import RECORDER

MODULES = 100
WIDTH = 256
FORWARD_NS = 10_000_000
TARGET = 0.02
WARM_UP = 3
DRAWS = 10_000


def timed_forward(model: nn.Module, rows: Tensor) -> int:
    """Nanoseconds of one forward."""
    start = time.perf_counter_ns()
    model(rows)
    return time.perf_counter_ns() - start


def fitting_rows(model: nn.Module) -> Tensor:
    """An input so large that a forward takes at least as long as wanted."""
    count = 8
    while True:
        rows = torch.randn(count, WIDTH)
        if statistics.median(timed_forward(model, rows) for _ in range(9)) >= FORWARD_NS:
            return rows
        count += max(count // 8, 1)


def block(model: nn.Module, rows: Tensor, forwards: int) -> list[int]:
    """Times of some forwards, after a few that are not counted."""
    for _ in range(WARM_UP):
        model(rows)
    return [timed_forward(model, rows) for _ in range(forwards)]


def observed() -> None:
    """Begin a session that selects every module of the model; nothing is exported."""
    instrument.start(Profile(layers=(LayerRule(types=("Linear", "GELU")),)))


def muted() -> None:
    """The same session, recording switched off."""
    observed()
    instrument.disable()


def shifts(begin: Callable[[], None], model: nn.Module, rows: Tensor, quads: int, forwards: int) -> list[float]:
    """Return for each quad the ratio by which the session that `begin` starts lengthens the forward."""
    found = []
    for _ in range(quads):
        times: dict[bool, list[int]] = {False: [], True: []}
        for on in (False, True, True, False):
            if on:
                begin()
            before = RECORDER.calls
            times[on] += block(model, rows, forwards)
            recorded = RECORDER.calls - before
            if on:
                expected = MODULES * (WARM_UP + forwards) if RECORDER.on else 0
                instrument.stop()
                if recorded != expected:
                    raise RuntimeError(f"{recorded} layers were recorded, {expected} were called")
        found.append(statistics.median(times[True]) / statistics.median(times[False]) - 1)
    return found


def interval(values: list[float]) -> tuple[float, float]:
    """95 % confidence interval of the median, from samples drawn with replacement; the same for the same values."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(DRAWS))
    return medians[int(0.025 * DRAWS)], medians[int(0.975 * DRAWS)]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="what observed layers cost a model")
    parser.add_argument("--quads", type=int, default=60, help="how many times A B B A (default: 60)")
    parser.add_argument("--forwards", type=int, default=10, help="forwards in a block (default: 10)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pairs = [module for _ in range(MODULES // 2) for module in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*pairs).eval()
    with torch.inference_mode():
        rows = fitting_rows(model)
        base = statistics.median(block(model, rows, 30))
        print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
        print("recorder native")
        print(f"{MODULES} modules, {rows.shape[0]} rows of {WIDTH}, one thread, forward {base / 1e6:.2f} ms")
        print(f"{options.quads} quads A B B A, blocks of {options.forwards} forwards\n")
        print(f"{'session':<30}{'shift':>9}{'95 % interval':>22}{'us a forward':>14}{'ns a layer':>12}  target")
        for name, begin in (("layers recorded", observed), ("layers, off at run time", muted)):
            found = shifts(begin, model, rows, options.quads, options.forwards)
            middle, (low, high) = statistics.median(found), interval(found)
            print(
                f"{name:<30}{middle:>+9.2%}{f'{low:+.2%} to {high:+.2%}':>22}{middle * base / 1e3:>14.1f}"
                f"{middle * base / MODULES:>12.0f}  <= {TARGET:.0%} {verdict(low, high)}"
            )


def verdict(low: float, high: float) -> str:
    """Return the verdict on the target. An interval that contains the target decides nothing."""
    if high <= TARGET:
        return "met"
    return "MISSED" if low > TARGET else "not decided, the interval holds the target"


if __name__ == "__main__":
    main()
