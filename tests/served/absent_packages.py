"""Placeholders for packages of SGLang that are built for devices only, so that their importers run on a processor.

The script `.ci/servers` copies the module into SGLang's environment, where each interpreter imports it. Calls of the
placeholders return nothing useful: a server that needs one of their kernels fails.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from unittest.mock import MagicMock

PACKAGES = ("sgl_kernel", "torchvision")


class Absent(types.ModuleType):
    __path__: Sequence[str] = ()
    __version__ = "0.28.0"

    def __getattr__(self, name: str) -> MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


sys.meta_path.insert(0, AbsentFinder())
