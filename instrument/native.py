"""The native parts of the package: one file of C beside each twin in Python, and which of the two are in use.

They are built together, if there is a compiler, and behave as their twins do; without them the service is slower and
the answers are the same. `INSTRUMENT_PURE=1` says that they are not wanted.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

PARTS = (
    "_recorder", "_spans", "_lines", "chrome._foreign", "chrome._reading", "chrome._slices", "report._allocations",
    "report._calls", "report._places", "report._stretches",
)  # fmt: skip
"""The native modules of the package."""


def refused() -> str:
    """The setting of the environment that native parts are not wanted by, "" where they are."""
    wish = os.environ.get("INSTRUMENT_PURE", "")
    return f"INSTRUMENT_PURE={wish}" if wish.strip().lower() in {"1", "true", "yes", "on"} else ""


def find(name: str) -> Any:
    """A native module of the package by its name below it, or None: not built, of another build, or not wanted."""
    if refused():
        return None
    try:
        return importlib.import_module(f"instrument.{name}")
    except ImportError:
        return None


def why_missing() -> dict[str, str]:
    """Which native parts are not in use, and why not."""
    missing = {}
    for name in PARTS:
        reason = refused()
        if not reason:
            try:
                importlib.import_module(f"instrument.{name}")
            except ImportError as error:
                reason = str(error)
        if reason:
            missing[name] = reason
    return missing
