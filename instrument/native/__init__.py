"""The native recorder, whose sources lie here, and whether it is in use instead of its twin in Python.

It is built if there is a compiler, and behaves as its twin does; without it the service is slower and the answers are
the same. `INSTRUMENT_PURE=1` says that it is not wanted.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

PARTS = ("_recorder",)
"""The native modules of the package."""


def refused() -> str:
    """Why native parts are not to be loaded: the setting that does not want them, or a Python without its lock.

    Native parts rely on the interpreter's lock. A free-threaded Python would switch it on for the whole service as one
    of them is imported. "" where they may be loaded.
    """
    wish = os.environ.get("INSTRUMENT_PURE", "")
    if wish.strip().lower() in {"1", "true", "yes", "on"}:
        return f"INSTRUMENT_PURE={wish}"
    has_lock = getattr(sys, "_is_gil_enabled", None)
    return "" if has_lock is None or has_lock() else "this Python runs free-threaded, without its lock"


def find(name: str) -> Any:
    """A native module of the package by its name below it, or None: not built, of another build, or not wanted."""
    if refused():
        return None
    try:
        return importlib.import_module(f"instrument.native.{name}")
    except ImportError:
        return None


def why_missing() -> dict[str, str]:
    """Which native parts are not in use, and why not."""
    missing = {}
    for name in PARTS:
        reason = refused()
        if not reason:
            try:
                importlib.import_module(f"instrument.native.{name}")
            except ImportError as error:
                reason = str(error)
        if reason:
            missing[name] = reason
    return missing
