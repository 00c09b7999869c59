"""Builds the C recorder at installation. Without a compiler, the build fails, and a message says what to install."""

from __future__ import annotations

import sys
from typing import Any

from setuptools.command.build_ext import build_ext


class BuildRecorder(build_ext):  # type: ignore[misc]  # setuptools has no types
    """A setuptools command that builds the extension for CPython with the GIL."""

    def run(self) -> None:
        """Build the extension in C, unless this Python cannot use it. Raises `SystemExit` if the compiler fails."""
        has_lock = getattr(sys, "_is_gil_enabled", None)
        if sys.implementation.name != "cpython" or (has_lock is not None and not has_lock()):
            return
        super().run()

    def build_extension(self, ext: Any) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:
            raise SystemExit(
                f"instrument-sdk: the recorder in C did not compile ({error}), and without it nothing is recorded; "
                "install a C compiler and Python's headers (Debian: gcc python3-dev), or install from a wheel"
            ) from error
