"""Imports the recorder, which is written in C. If this Python cannot use it, `WHY_MISSING` is the reason.

The recorder relies on the GIL, so it is not imported in a free-threaded Python.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any


def _load_extension() -> tuple[Any, str]:
    has_lock = getattr(sys, "_is_gil_enabled", None)
    if has_lock is not None and not has_lock():
        return None, "this Python runs free-threaded; start the service with a Python that has the lock"
    try:
        return import_module("instrument.native._recorder"), ""
    except ModuleNotFoundError as error:
        return None, f"{error}; install instrument-sdk from a wheel, or from source on CPython with a C compiler"
    except ImportError as error:  # in a sub-interpreter, or of another build
        return None, str(error)


MODULE, reason = _load_extension()
"""The extension module `_recorder`, or None and the reason why it is missing."""

WHY_MISSING = f"the recorder in C is missing: {reason}" if reason else ""
"""The reason why nothing can be recorded, with a remedy. "" if the recorder works."""

_IS_SWITCHED_OFF = os.environ.get("INSTRUMENT", "").strip().lower() in {"off", "0", "false", "no"}

OFF = "INSTRUMENT=off" if _IS_SWITCHED_OFF else WHY_MISSING
"""The reason why decorators and hooks do nothing in this process. "" if they record."""
