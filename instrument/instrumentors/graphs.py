"""CUDA graphs: one span for each replay, because nothing inside of one can be timed.

While a graph is captured, the probes inside of it run once and record no events; when it is replayed they do not run.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from instrument.instrumentors.functions import Undo, replace, undo_all
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.spans import Site
from instrument.runtime import imports

SITE = Site("CUDA graph replay", "op", "torch.cuda", "CUDAGraph.replay", device=True)


def watch(recorder: Recorder = RECORDER) -> Undo:
    """Record the replays of torch's CUDA graphs, also where torch is imported later; returns the way back."""
    undos: list[Undo] = []

    def imported(torch: ModuleType) -> None:
        version = getattr(torch, "version", None)
        graph: Any = getattr(getattr(torch, "cuda", None), "CUDAGraph", None)
        has_device = getattr(version, "cuda", None) or getattr(version, "hip", None)
        if has_device and isinstance(graph, type) and "replay" in vars(graph):
            undos.append(replace(graph, "replay", recorder.wrap(vars(graph)["replay"], SITE)))

    undos.append(imports.install("torch".__eq__, imported))
    torch = sys.modules.get("torch")
    if torch is not None and not imports.is_asleep(torch):
        imported(torch)

    return lambda: undo_all(undos)
