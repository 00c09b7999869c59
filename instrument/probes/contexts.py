"""Copied contexts: the recorder is told when one is copied, so that what runs in the copy finds its parent.

Under a running event loop the recorder knows the current span of each context at any time. Elsewhere it would have to
write a context variable at every call to know it, which costs more than the rest of the call; contexts are copied
there by `contextvars.copy_context` alone, so that tells it instead.
"""

from __future__ import annotations

import contextvars
import functools
from contextvars import Context

from instrument.probes.functions import Undo
from instrument.probes.holders import rebind
from instrument.recorder import RECORDER, Recorder


def watch(recorder: Recorder = RECORDER) -> Undo:
    """Tell the recorder of copies from now on; returns the way back."""
    original = contextvars.copy_context
    if recorder.native:
        publish = recorder.publish

        @functools.wraps(original)
        def copy_context() -> Context:
            publish()
            return original()

    else:
        publish_to = recorder.publish_to

        @functools.wraps(original)
        def copy_context() -> Context:
            context = original()
            publish_to(context)
            return context

    rebind([(original, copy_context)])
    return lambda: rebind([(copy_context, original)])
