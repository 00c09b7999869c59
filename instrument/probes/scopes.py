"""Spans opened by name in the service's own code."""

from __future__ import annotations

import os
from collections.abc import Mapping

from instrument.errors import TargetError
from instrument.recorder import RECORDER, Scope, attributes_of
from instrument.spans import KINDS, AttributeValue

OFF = os.environ.get("INSTRUMENT", "").strip().lower() in {"off", "0", "false", "no"}
"""Switched off by the environment before the service started: decorators and hooks do nothing at all."""


def scope(
    name: str, *, kind: str = "user", device: bool = False, attributes: Mapping[str, AttributeValue] | None = None
) -> Scope:
    """A span around a block: ``with scope("tokenise"):`` or ``async with scope("tokenise"):``.

    `name` groups the spans in reports and should come from a small set; data belongs into `attributes`. `kind` is one
    of `instrument.spans.KINDS`. Exceptions pass untouched and mark the span. Safe around ``await``. Costs one branch
    while recording is off. Raises `TargetError` for a name or kind that cannot be one.
    """
    if not isinstance(name, str) or not name:
        raise TargetError(f"a scope needs a name that says what it times; found {name!r}")
    if kind not in KINDS:
        raise TargetError(f"scope {name!r}: found kind {kind!r}; allowed: {', '.join(KINDS)}")
    return Scope(RECORDER, RECORDER.scope_site(name, kind, device), attributes_of(attributes))


def scope_start(
    name: str, *, kind: str = "user", device: bool = False, attributes: Mapping[str, AttributeValue] | None = None
) -> Scope:
    """Begin a span in a handler that cannot use ``with``; `scope_end` closes it, possibly in another callback."""
    return scope(name, kind=kind, device=device, attributes=attributes).start()


def scope_end(opened: Scope | str | None = None, *, error: BaseException | None = None) -> None:
    """Close what `scope_start` returned, or by name, or the innermost one that `scope_start` opened here.

    Closing an outer scope before an inner one, or nothing, is counted in the summary and never raised.
    """
    if isinstance(opened, Scope):
        opened.end(error)
    elif RECORDER.on or opened is None or RECORDER.innermost_manual(opened) is not None:
        RECORDER.end_manual(RECORDER.innermost_manual(opened), error)
