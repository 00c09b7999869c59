"""Spans opened by name in the service's own code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from instrument.recorder import RECORDER, Scope
from instrument.spans import AttributeValue

OFF = os.environ.get("INSTRUMENT", "").strip().lower() in {"off", "0", "false", "no"}
"""Switched off by the environment before the service started: decorators and hooks do nothing at all."""


def scope(
    name: str,
    *,
    kind: str | None = None,
    device: bool = False,
    attributes: Mapping[str, AttributeValue] | None = None,
    phase: str | None = None,
    stream: Any = None,
) -> Scope:
    """A span around a block: ``with scope("tokenise"):`` or ``async with scope("tokenise"):``.

    `name` groups the spans in reports and should come from a small set; data belongs into `attributes`. `kind` is one
    of `instrument.spans.KINDS`, else `user`; `phase`, one of `instrument.spans.PHASES` or a name of your own, says what
    part of the work it is and makes the kind `phase`. `device` asks for device time too, on the current stream of
    torch, cupy or numba; `stream` names another one: an object with `__cuda_stream__`, or its address. Exceptions pass
    untouched and mark the span. Safe around ``await``. Costs one branch while recording is off. Raises `TargetError`
    for a name, kind, phase or stream that cannot be one.
    """
    return RECORDER.make_scope(name, kind=kind, device=device, attributes=attributes, phase=phase, stream=stream)


def scope_start(
    name: str,
    *,
    kind: str | None = None,
    device: bool = False,
    attributes: Mapping[str, AttributeValue] | None = None,
    phase: str | None = None,
    stream: Any = None,
) -> Scope:
    """Begin a span in a handler that cannot use ``with``; `scope_end` closes it, possibly in another callback."""
    return scope(name, kind=kind, device=device, attributes=attributes, phase=phase, stream=stream).start()


def scope_end(opened: Scope | str | None = None, *, error: BaseException | None = None) -> None:
    """Close what `scope_start` returned, or by name, or the innermost one that `scope_start` opened here.

    Closing an outer scope before an inner one, or nothing, is counted in the summary and never raised.
    """
    if isinstance(opened, Scope):
        opened.end(error)
    elif RECORDER.on or opened is None or RECORDER.innermost_manual(opened) is not None:
        RECORDER.end_manual(RECORDER.innermost_manual(opened), error)


if not TYPE_CHECKING and RECORDER.native:
    scope = RECORDER.scope  # the same in C: a Python call less, a third of the cost
