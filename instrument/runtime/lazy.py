"""Modules that most processes of a service never need, and that are imported as one of their names is used."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class LazyModule:
    """Replaces a module by its name. Not for hot paths: each access looks the module up."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)
