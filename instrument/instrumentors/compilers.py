"""Keep torch's compilers away from probes, and record each replay of a CUDA graph as one span.

If torch.compile cannot compile a part of a function, it compiles each Python function called there separately. Probes
must not be compiled, so they are excluded one by one. While a CUDA graph is captured, probes record nothing. While it
is replayed, no probe runs, so only the whole replay is timed.
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
    """Make torch.compile run functions as plain Python from now on, even where it compiles their callers."""
    evaluation = _get_eval_frame(torch)
    codes = [code for code in (getattr(call, "__code__", None) for call in functions) if isinstance(code, CodeType)]
    if hasattr(evaluation, "set_code_exec_strategy"):
        action = evaluation._FrameAction
        strategy = evaluation._FrameExecStrategy(action.SKIP, action.DEFAULT)
        for code in codes:
            evaluation.set_code_exec_strategy(code, strategy)
    elif hasattr(evaluation, "skip_code"):  # before torch 2.8
        for code in codes:
            evaluation.skip_code(code)


def get_compiling_test(torch: Any) -> Callable[[], bool]:
    """Return a function that is True while torch compiles the calling code. Probes must not run then."""
    is_compiling: Callable[[], bool] | None = getattr(getattr(torch, "compiler", None), "is_compiling", None)
    return is_compiling or (lambda: False)


def get_evaluator_setter(torch: Any) -> Callable[[Any], Any]:
    """Return torch's function that sets this thread's frame evaluator. None is Python's own; it returns the earlier."""
    set_evaluator: Callable[[Any], Any] | None = getattr(_get_eval_frame(torch), "set_eval_frame", None)
    return set_evaluator or (lambda evaluate: None)


def _get_eval_frame(torch: Any) -> Any:
    return getattr(getattr(getattr(torch, "_C", None), "_dynamo", None), "eval_frame", None)


SITE = Site("CUDA graph replay", "op", "torch.cuda", "CUDAGraph.replay", device=True)


def watch_graphs(recorder: Recorder = RECORDER) -> Undo:
    """Record each replay of a CUDA graph, also if torch is imported later. Return the function that stops it."""
    undos: list[Undo] = []

    def attach_to(torch: ModuleType) -> None:
        version = getattr(torch, "version", None)
        graph: Any = getattr(getattr(torch, "cuda", None), "CUDAGraph", None)
        has_device = getattr(version, "cuda", None) or getattr(version, "hip", None)
        if has_device and isinstance(graph, type) and "replay" in vars(graph):
            undos.append(replace(graph, "replay", recorder.wrap(vars(graph)["replay"], SITE)))

    undos.append(imports.install("torch".__eq__, attach_to))
    torch = sys.modules.get("torch")
    if torch is not None and not imports.is_lazy(torch):
        attach_to(torch)

    return lambda: undo_all(undos)
