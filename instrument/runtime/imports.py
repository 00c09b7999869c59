"""The import hook, which calls our code right after a module's own code has run, before the importer continues.

Python's own finders and loaders still do all the work. Modules that we do not instrument are imported as usual.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from instrument.runtime.faults import FAULTS

if TYPE_CHECKING:
    from instrument.runtime.main_module import Watch

Undo = Callable[[], None]

STACK_WORDS = 40_000
"""The stack size that a loader's frame declares, in words. Because of this size, CPython maps 512 KiB at once for a
whole import.

Otherwise the import of pydantic maps and unmaps 16 KiB 1,200 times.
"""


class _Loader:
    """A loader that wraps a module's own loader. It restores that loader before the module's code runs."""

    def __init__(self, spec: Any, loader: Any, finder: Finder, is_wanted: bool) -> None:
        self._spec = spec
        self._loader = loader
        self._finder = finder
        self._is_wanted = is_wanted

    def __getattr__(self, name: str) -> Any:
        if name == "get_code":
            # The caller runs the code without us, and the spec may become that of `__main__`.
            if self._spec.loader is self:
                self._spec.loader = self._loader
            asker, finder = sys._getframe(1), self._finder  # `runpy` asks, as for `python -m`
            if self._is_wanted and finder.listens and asker.f_globals.get("__name__") == "runpy":
                finder.asked_for_code()
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        create = getattr(self._loader, "create_module", None)
        return create(spec) if create is not None else None

    def exec_module(self, module: ModuleType) -> None:
        # The module's own code may look at its loader (pkgutil.get_data, importlib.resources).
        spec: Any = module.__spec__
        if spec is not None and spec.loader is self:
            spec.loader = self._loader
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self._loader
        finder = self._finder
        if self._is_wanted and finder.listens:
            FAULTS.attempt("import hook", lambda: finder.begins(module.__name__))
        resume = bool if finder.watch is None else finder.watch.pause_tracing()
        try:
            self._loader.exec_module(module)
        finally:
            resume()
        if not (self._is_wanted and finder.listens):
            return
        try:
            # A module's code may have put another module into its place.
            now = sys.modules.get(spec.name if spec is not None else module.__name__)
            finder.imported(now if issubclass(type(now), ModuleType) else module)  # type: ignore[arg-type]
        except Exception as fault:
            FAULTS.note("import hook", fault)

    # Python leaves the import system's own frames out of tracebacks, by this name of their file.
    exec_module.__code__ = exec_module.__code__.replace(co_filename="<frozen importlib._bootstrap>")
    if sys.version_info >= (3, 11):
        exec_module.__code__ = exec_module.__code__.replace(co_stacksize=STACK_WORDS)


class Finder:
    """A finder at the front of `sys.meta_path`. It asks the other finders, and wraps the loaders of wanted modules."""

    def __init__(
        self,
        wants: Callable[[str], bool],
        imported: Callable[[ModuleType], object],
        asked_for_code: Callable[[], object],
        begins: Callable[[str], object],
        watch: Watch | None,
    ) -> None:
        self._wants, self.imported, self.asked_for_code, self.begins = wants, imported, asked_for_code, begins
        self.watch = watch
        self._busy = threading.local()
        self.listens = True
        """False once the hook was undone. Then nothing is reported."""

    def wrap_loader(self, spec: Any, is_wanted: bool = True) -> None:
        """Replace a spec's loader, so that the module is reported after its code has run."""
        lazy = getattr(sys.modules.get("importlib.util"), "LazyLoader", None)
        if lazy is not None and isinstance(spec.loader, lazy):
            spec.loader.loader = _Loader(spec.loader, spec.loader.loader, self, is_wanted)
        elif hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec, spec.loader, self, is_wanted)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not sys.meta_path or sys.meta_path[0] is not self:
            order = [finder for finder in sys.meta_path if finder is not self]
            if len(order) < len(sys.meta_path):  # before a finder such as pytest's, and at once: others may be reading
                sys.meta_path[:] = [self, *order]
        # Another finder may ask the whole path again, but must not meet us twice for one name.
        before = getattr(self._busy, "name", None)
        try:
            is_wanted = before != fullname and self._wants(fullname)
            is_traced = self.watch is not None and self.watch.is_trace_set()
            if before == fullname or not (is_wanted or is_traced):
                return None
        except Exception as fault:  # such as a module of ours that cannot be loaded any more
            FAULTS.note("import hook", fault)
            return None
        self._busy.name = fullname
        try:
            for finder in list(sys.meta_path):
                find = getattr(finder, "find_spec", None)
                spec = None if finder is self or find is None else find(fullname, path, target)
                if spec is not None:
                    self.wrap_loader(spec, is_wanted)
                    return spec  # type: ignore[no-any-return]
            return None
        finally:
            self._busy.name = before


def install_import_hook(
    wants: Callable[[str], bool],
    imported: Callable[[ModuleType], object],
    asked_for_code: Callable[[], object] = lambda: None,
    begins: Callable[[str], object] = lambda _: None,
    watch: Watch | None = None,
) -> Undo:
    """Install an import hook. Return the function that removes it.

    A module is wanted if `wants(name)` is true. `begins(name)` is called before the import of a wanted module, and
    `imported(module)` after the import. Both run on the importing thread, under the module's import lock.
    `asked_for_code()` is called before `runpy` runs a wanted module. The trace function of `watch` is removed during
    imports.
    """
    finder = Finder(wants, imported, asked_for_code, begins, watch)
    sys.meta_path.insert(0, finder)
    for name, module in sys.modules.copy().items():
        if is_unloaded_lazy_module(module) and wants(name):
            finder.wrap_loader(object.__getattribute__(module, "__spec__"))

    def remove_hook() -> None:
        finder.listens = False
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)

    return remove_hook


def is_unloaded_lazy_module(module: object) -> bool:
    """Return True for a module of `importlib.util.LazyLoader` that is not loaded yet. Does not load it."""
    lazy = getattr(sys.modules.get("importlib.util"), "_LazyModule", None)
    return lazy is not None and type(module) is lazy
