"""The cost of the probe at a framework's entry point: `python tests/bench/frameworks.py`.

Calls of ONNX Runtime's `run` in rounds: as it is, recorded, and attached with recording switched off at run time, once
with a tiny real model and once with a `run` that does nothing, which shows the probe alone. Each figure is the median
of the rounds; the order within a round changes, so that a drift of the machine's speed falls on all alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper

import instrument
from instrument.profile.model import FrameworkRule, Profile

STATES = ("as it is", "recorded", "switched off")
INPUT = {"x": np.ones((1, 64), np.float32)}


def tiny() -> Any:
    """A session of one small matrix product, on one thread."""
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 64]) for name in "xy")
    weights = helper.make_tensor("w", onnx.TensorProto.FLOAT, [64, 64], np.ones(4096, np.float32))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "tiny", [x], [y], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


class Nothing(onnxruntime.InferenceSession):  # type: ignore[misc]
    """A session whose run does nothing."""

    def __init__(self) -> None:
        self._model_path = "nothing.onnx"

    def get_providers(self) -> list[str]:
        return ["CPUExecutionProvider"]


def call_ns(call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - start) / calls


def measured(session: Any, state: str, calls: int) -> float:
    if state != "as it is":
        instrument.start(Profile(frameworks=(FrameworkRule("onnxruntime"),)))
    if state == "switched off":
        instrument.disable()
    try:
        return call_ns(lambda: session.run(None, INPUT), calls)
    finally:
        instrument.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--calls", type=int, default=20_000)
    options = parser.parse_args()
    base = onnxruntime.InferenceSession.__mro__[1]
    real = base.run
    for title, session, run in (("tiny model", tiny(), real), ("empty run", Nothing(), lambda *_: None)):
        base.run = run
        times: dict[str, list[float]] = {state: [] for state in STATES}
        for turn in range(options.rounds):
            for state in (*STATES[turn % 3 :], *STATES[: turn % 3]):
                times[state].append(measured(session, state, options.calls))
        base.run = real
        medians = {state: statistics.median(values) for state, values in times.items()}
        for state, median in medians.items():
            print(f"{title:>10}  {state:>12}  {median:7.0f} ns  {median - medians['as it is']:+6.0f}")


if __name__ == "__main__":
    main()
