"""Garbage collections of Python that took longer than `limits.blocked`: no thread of the process goes on meanwhile.

The interpreter tells of the begin and the end of each, on the thread that it interrupts: 0.8 us for both.
"""

from __future__ import annotations

from contextlib import suppress
from contextvars import Context
from types import ModuleType
from typing import Any

from instrument.instrumentors.functions import Undo
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.spans import COLLECTION
from instrument.runtime.faults import FAULTS

MODULE = "gc"
"""Where the interpreter says whom it tells."""


def attach(module: ModuleType, limit_ns: int, recorder: Recorder = RECORDER) -> list[Undo]:
    """From now on record the collections that take longer than this."""
    callbacks: Any = module.callbacks
    now = recorder.now_ns
    begun_ns = 0

    def note(phase: str, told: dict[str, int]) -> None:
        nonlocal begun_ns
        if phase == "start":
            begun_ns = now()
        elif begun_ns and now() - begun_ns > limit_ns and recorder.on:
            try:
                facts: dict[Any, Any] = {
                    "cpython.gc.generation": told["generation"],
                    "instrument.gc.collected": told["collected"],
                }
                # Below no span: it takes no time from what it interrupts, a part of which it is.
                Context().run(recorder.record, COLLECTION, begun_ns, facts, None, True)
            except Exception as fault:
                FAULTS.note("garbage collection", fault)

    def undo() -> None:
        with suppress(ValueError):  # others may have cleared the list
            callbacks.remove(note)

    callbacks.append(note)
    return [undo]
