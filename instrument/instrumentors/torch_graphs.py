"""Keep our recording functions (probes) out of torch.compile, and record each replay of a CUDA graph.

torch.compile runs probes as plain Python and does not compile them. While a CUDA graph is captured or replayed, calls
inside are not recorded, only the replay as a whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import CodeType, ModuleType
from typing import Any

from instrument.instrumentors.profiled_functions import Undo, replace_attribute, undo_all
from instrument.recorder.recorder import RECORDER
from instrument.recording.spans import Site
from instrument.runtime import imports


def exclude_from_compiler(torch: Any, functions: Iterable[Any]) -> None:
    """Exclude functions from torch.compile, even if the callers are compiled."""
    evaluation = _get_eval_frame(torch)
    if hasattr(evaluation, "set_code_exec_strategy"):  # from torch 2.8 on
        action = evaluation._FrameAction
        strategy = evaluation._FrameExecStrategy(action.SKIP, action.DEFAULT)
        for code in (getattr(call, "__code__", None) for call in functions):
            if isinstance(code, CodeType):
                evaluation.set_code_exec_strategy(code, strategy)


def get_is_compiling(torch: Any) -> Callable[[], bool]:
    is_compiling: Callable[[], bool] | None = getattr(getattr(torch, "compiler", None), "is_compiling", None)
    return is_compiling or (lambda: False)


def get_evaluator_setter(torch: Any) -> Callable[[Any], Any]:
    """Return torch's function that replaces the thread's frame evaluator. The evaluator None is Python's own."""
    set_evaluator: Callable[[Any], Any] | None = getattr(_get_eval_frame(torch), "set_eval_frame", None)
    return set_evaluator or (lambda evaluate: None)


def _get_eval_frame(torch: Any) -> Any:
    return getattr(getattr(getattr(torch, "_C", None), "_dynamo", None), "eval_frame", None)


REPLAY = Site("CUDA graph replay", "op", "torch.cuda", "CUDAGraph.replay", device=True)


def watch_graph_replays() -> Undo:
    """Record each replay of a CUDA graph, even if torch is imported later. Return the function that stops this."""
    undos: list[Undo] = []

    def attach_to(torch: ModuleType) -> None:
        version = getattr(torch, "version", None)
        graph: Any = getattr(getattr(torch, "cuda", None), "CUDAGraph", None)
        has_device = getattr(version, "cuda", None) or getattr(version, "hip", None)
        if has_device and isinstance(graph, type) and "replay" in vars(graph):
            undos.append(replace_attribute(graph, "replay", RECORDER.wrap(vars(graph)["replay"], REPLAY)))

    undos.append(imports.install_import_hook("torch".__eq__, attach_to))
    torch = sys.modules.get("torch")
    if torch is not None and not imports.is_unloaded_lazy_module(torch):
        attach_to(torch)

    return lambda: undo_all(undos)
