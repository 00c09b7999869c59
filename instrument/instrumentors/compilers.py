"""Compilers and CUDA graphs of torch: no compiler compiles a probe, and each replay of a graph is one span.

If a compiled function falls back to Python in its middle, each call there is compiled in turn, frame by frame. torch
skips its own frames by file name. Frames of probes must be excluded by name. During the capture of a graph the probes
inside run once and record no events. At a replay they do not run, so only the whole replay is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import CodeType, ModuleType
from typing import Any

from instrument.instrumentors.functions import Undo, replace, undo_all
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.spans import Site
from instrument.runtime import imports


def exclude_from_compiler(torch: Any, functions: Iterable[Any]) -> None:
    """Exclude functions from torch's compiler from now on, even if their callers are compiled."""
    evaluation = _eval_frame(torch)
    codes = [code for code in (getattr(call, "__code__", None) for call in functions) if isinstance(code, CodeType)]
    if hasattr(evaluation, "set_code_exec_strategy"):
        action = evaluation._FrameAction
        strategy = evaluation._FrameExecStrategy(action.SKIP, action.DEFAULT)
        for code in codes:
            evaluation.set_code_exec_strategy(code, strategy)
    elif hasattr(evaluation, "skip_code"):  # before torch 2.8
        for code in codes:
            evaluation.skip_code(code)


def compiling_test(torch: Any) -> Callable[[], bool]:
    """Return a test for code that torch is compiling. Probes must not run in it."""
    is_compiling: Callable[[], bool] | None = getattr(getattr(torch, "compiler", None), "is_compiling", None)
    return is_compiling or (lambda: False)


def evaluator_setter(torch: Any) -> Callable[[Any], Any]:
    """Return a function that sets this thread's frame evaluator (None is Python's) and returns the earlier one."""
    set_evaluator: Callable[[Any], Any] | None = getattr(_eval_frame(torch), "set_eval_frame", None)
    return set_evaluator or (lambda evaluate: None)


def _eval_frame(torch: Any) -> Any:
    return getattr(getattr(getattr(torch, "_C", None), "_dynamo", None), "eval_frame", None)


SITE = Site("CUDA graph replay", "op", "torch.cuda", "CUDAGraph.replay", device=True)


def watch_graphs(recorder: Recorder = RECORDER) -> Undo:
    """Record the replays of torch's CUDA graphs, even if torch is imported later. Return the undo."""
    undos: list[Undo] = []

    def imported(torch: ModuleType) -> None:
        version = getattr(torch, "version", None)
        graph: Any = getattr(getattr(torch, "cuda", None), "CUDAGraph", None)
        has_device = getattr(version, "cuda", None) or getattr(version, "hip", None)
        if has_device and isinstance(graph, type) and "replay" in vars(graph):
            undos.append(replace(graph, "replay", recorder.wrap(vars(graph)["replay"], SITE)))

    undos.append(imports.install("torch".__eq__, imported))
    torch = sys.modules.get("torch")
    if torch is not None and not imports.is_lazy(torch):
        imported(torch)

    return lambda: undo_all(undos)
