"""The functions of `import instrument` that open, annotate, rename and end spans in a service's own code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ParamSpec

from instrument import native
from instrument.recorder import attribute_checks
from instrument.recorder.recorder import RECORDER, Scope

Arguments = ParamSpec("Arguments")


scope = RECORDER.make_scope


def _begin_at_once(make: Callable[Arguments, Scope]) -> Callable[Arguments, Scope]:
    """Return a function with the arguments of `make` that makes a scope and begins it."""

    @functools.wraps(make, assigned=())
    def scope_start(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Scope:
        """Begin a span in a handler that cannot use ``with``. `scope_end` closes it, possibly in another callback."""
        return scope(*args, **kwargs).start()  # type: ignore[arg-type] # in C, if there is one

    return scope_start


scope_start = _begin_at_once(RECORDER.make_scope)


def scope_end(opened: Scope | str | None = None, *, error: BaseException | None = None) -> None:
    """Close a scope: the one that `scope_start` returned, one by its name, or the innermost one that was opened here.

    Reports count calls without an open scope, and outer scopes that are closed before inner ones. Never raises.
    """
    if isinstance(opened, Scope):
        opened.end(error)
    elif RECORDER.on or opened is None or RECORDER.innermost_manual(opened) is not None:
        RECORDER.end_manual(RECORDER.innermost_manual(opened), error)


def annotate(attributes: Mapping[str, object] | None = None, /, **more: object) -> None:
    """Add facts to the innermost open span: ``annotate(tokens=3)`` or ``annotate({"usage.tokens": 3})``.

    The span may be of a function, a layer, a scope or a request, opened here or where this task or thread was started.
    Values are text (cut after 256 characters), bools, 64-bit numbers, or lists of one type; a span has at most 128.
    Any other value is left out and counted. A name that is set again has the new value. Does nothing without an open
    span or a recording. Never raises.
    """
    RECORDER.annotate_innermost(attributes, **more)


def annotate_request(attributes: Mapping[str, object] | None = None, /, **more: object) -> None:
    """Add facts to the request that is open around the innermost span: ``annotate_request(tier="gold")``.

    Otherwise as `annotate`.
    """
    RECORDER.annotate_request(attributes, **more)


def bind(key: str | int) -> None:
    """Set the key of the request that the innermost open span serves: an id that other processes use, too.

        bind(request_id)  # in the handler, and again where an engine works for it

    Reports join the spans with one key: text of at most 128 characters, or a whole number. Never raises.
    """
    RECORDER.bind_innermost(key)


def rename_span(name: str) -> None:
    """Rename the innermost open span. `name` should be one of few.

    Spans below it that are open or begin later move with it. Ended spans remain below the old name. A site has up to
    256 names, and further ones count as its own name. Without an open span nothing happens. Never raises.
    """
    attribute_checks.rename_span_of_frame(RECORDER, None, name)


def set_status(code: str, description: str | None = None, *, error_type: str | None = None) -> None:
    """Set the outcome of the innermost open span: `code` is ``"ok"`` or ``"error"``. The last call counts. Never
    raises.

    A span with ``"error"`` has failed, even without an exception. A span with ``"ok"`` has not, even if it raises.
    Reports group failures by `error_type`, one of few; the default is the exception's class, or ``_OTHER``.
    `description` is text for a reader of the span.
    """
    attribute_checks.set_status(RECORDER, None, code, description, error_type)


if not TYPE_CHECKING and not native.WHY_MISSING:
    scope, bind = RECORDER.scope, RECORDER.bind  # the same in C: a Python call less, a third of the cost
    annotate, annotate_request = RECORDER.annotate_innermost, RECORDER.annotate_request
