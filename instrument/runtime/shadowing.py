"""Protects our imports from service modules with names of the standard library, such as a file `token.py`.

Our imports get the standard modules, and the service gets its own. A session imports this module before all others.
"""

from __future__ import annotations

import os
import sys
from _frozen_importlib_external import PathFinder

TYPE_CHECKING = False  # `typing` may be shadowed
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import FrameType, ModuleType

_STANDARD = os.path.dirname(os.__file__)  # noqa: PTH120 - pathlib, too
_OURS = __name__.partition(".")[0]
_LIBRARIES = frozenset({"isal", "msgspec", "numpy", "opentelemetry", "yaml"})
"""The third-party packages that we import, whose own imports count as ours."""


def guard_imports(folders: Iterable[str] = ()) -> None:
    """Make our imports ignore modules that shadow standard modules. The ignored modules are in `folders`, or in folders
    before the standard library on `sys.path`."""
    before = []
    for entry in sys.path:
        if entry.startswith(_STANDARD) or entry.endswith(".zip"):
            break
        before.append(entry)
    names = {name.partition(".")[0] for folder in {*folders, *before} for name in _list_folder(folder)}
    shadowed = (names & sys.stdlib_module_names).difference(sys.builtin_module_names)
    if shadowed := {name for name in shadowed if not _is_standard_module(sys.modules.get(name))}:
        sys.meta_path.insert(0, _Guard(shadowed))


def _is_standard_module(module: ModuleType | None) -> bool:
    file = getattr(module, "__file__", None)
    return module is not None and (file is None or file.startswith(_STANDARD))


def _list_folder(folder: str) -> list[str]:
    try:
        return os.listdir(folder or ".")  # noqa: PTH208
    except OSError:
        return []


def folder_of_main() -> str:
    """Return the folder that Python puts first on `sys.path` for the program."""
    words = iter(sys.orig_argv[1:])
    for word in words:
        if word in ("-X", "-W"):
            next(words, None)
        elif not word.startswith("-"):
            return word if os.path.isdir(word) else os.path.dirname(os.path.realpath(word))  # noqa: PTH112, PTH120
        elif "m" in word or "c" in word:
            break
    return ""


class Loaded:
    """A loader that returns an already loaded module, and does not run its code again."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _Guard:
    """A finder at the front of `sys.meta_path`. It finds the standard modules for our imports, even if modules of the
    service have their names."""

    def __init__(self, shadowed: set[str]) -> None:
        self._shadowed = shadowed
        self._standard: dict[str, ModuleType] = {}
        self._loaded: set[str] = set()
        self.of_service = {name: sys.modules.pop(name) for name in shadowed if name in sys.modules}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None:
            return None
        if not _is_own_import(sys._getframe(1)):
            self.unload_modules()
            if fullname in self.of_service:
                spec = PathFinder.find_spec(fullname)
                if spec is not None:
                    spec.loader = Loaded(self.of_service.pop(fullname))  # type: ignore[assignment]
                return spec
            return None
        if fullname not in self._shadowed:
            return None
        self._loaded.add(fullname)
        spec = PathFinder.find_spec(fullname, [p for p in sys.path if p.startswith(_STANDARD)])
        if spec is None:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)  # of another system
        if module := self._standard.get(fullname):
            spec.loader = Loaded(module)  # type: ignore[assignment]
        return spec

    def unload_modules(self) -> None:
        """Unload the standard modules that we imported, so that the service loads its own."""
        while self._loaded:
            name = self._loaded.pop()
            if module := sys.modules.pop(name, None):
                self._standard[name] = module  # ours are not loaded again


def restore_service_modules() -> None:
    for finder in sys.meta_path:
        if isinstance(finder, _Guard):
            finder.unload_modules()
            sys.modules.update(finder.of_service)
            finder.of_service.clear()


def _is_own_import(frame: FrameType | None) -> bool:
    """Return True if our code makes the import, directly or through a library of `_LIBRARIES`."""
    while frame is not None:
        file, package = frame.f_code.co_filename, str(frame.f_globals.get("__name__")).partition(".")[0]
        is_machinery = file.startswith("<frozen ")  # and our hook, which calls itself so
        if package == _OURS and not is_machinery:
            return True
        if not is_machinery and package not in _LIBRARIES and not file.startswith(_STANDARD):
            return False
        frame = frame.f_back
    return False
