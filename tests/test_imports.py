"""Import hooks: heard once, after the module's code and before its importer, without a trace in the module."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
import threading
import traceback
import zipfile
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from instrument.runtime import imports
from instrument.runtime.faults import FAULTS


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Write a module below a folder on the path; every module so made is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)

    def make(name: str, source: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        importlib.invalidate_caches()

    yield make
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """Yield the names of the modules that the hook reports, of all whose names begin with `made`."""
    names: list[str] = []
    undo = imports.install_import_hook(
        lambda name: name.startswith("made"), lambda module: names.append(module.__name__)
    )
    yield names
    undo()


def test_the_importer_sees_what_the_hook_has_replaced(write: Callable[[str, str], None]) -> None:
    write("made_one.py", "def f(): return 'original'")
    write("made_two.py", "from made_one import f")

    def replace(module: ModuleType) -> None:
        if module.__name__ == "made_one":
            module.f = lambda: "replaced"  # type: ignore[attr-defined]

    undo = imports.install_import_hook(lambda name: name == "made_one", replace)
    try:
        assert importlib.import_module("made_two").f() == "replaced"
    finally:
        undo()


def test_the_module_is_as_without_the_hook(write: Callable[[str, str], None], heard: list[str]) -> None:
    source = "import pkgutil\nloader_inside = __loader__\ndata = pkgutil.get_data(__name__, 'made_data.txt')"
    write("made_data.txt", "text")
    write("made_module.py", source)
    write("other_module.py", source)
    made, other = importlib.import_module("made_module"), importlib.import_module("other_module")
    assert heard == ["made_module"]
    assert made.__spec__ is not None
    assert type(made.__spec__.loader) is type(other.__spec__.loader)  # type: ignore[union-attr]
    assert type(made.__loader__) is type(made.loader_inside) is type(other.__loader__)
    assert made.data == b"text"
    assert made.__spec__.loader.get_source("made_module") == source  # type: ignore[attr-defined]
    assert pkgutil.get_data("made_module", "made_data.txt") == b"text"
    assert sorted(vars(made)) == sorted(vars(other))


def test_packages_reloads_and_zipped_modules_are_heard(
    write: Callable[[str, str], None], heard: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("made_package/__init__.py", "from . import part")
    write("made_package/part.py", "")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("made_zipped.py", "x = 1")
    monkeypatch.syspath_prepend(str(tmp_path / "archive.zip"))
    package = importlib.import_module("made_package")
    importlib.import_module("made_zipped")
    importlib.reload(package)
    assert heard == ["made_package.part", "made_package", "made_zipped", "made_package"]


def test_a_module_that_fails_to_import_fails_as_before(write: Callable[[str, str], None], heard: list[str]) -> None:
    write("made_broken.py", "raise ValueError('from the module')")
    with pytest.raises(ValueError, match="from the module"):
        importlib.import_module("made_broken")
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("made_missing")
    assert caught.value.name == "made_missing"
    assert heard == []
    assert "made_broken" not in sys.modules


def test_the_traceback_of_a_failing_import_is_as_without_the_hook(
    write: Callable[[str, str], None], heard: list[str]
) -> None:
    source = "raise ValueError('from the module')"
    write("made_broken.py", source)
    write("other_broken.py", source)

    def files(statement: str) -> list[str]:
        with pytest.raises(ValueError, match="from the module") as caught:
            exec(statement)
        return [frame.filename.replace("other", "made") for frame in traceback.extract_tb(caught.value.__traceback__)]

    found = files("import made_broken")
    assert found == files("import other_broken")
    assert found[-1].endswith("made_broken.py")


def test_a_module_that_puts_another_in_its_place_is_heard_as_that_one(write: Callable[[str, str], None]) -> None:
    write("made_other.py", "import sys, types\nsys.modules[__name__] = types.ModuleType('made_instead')")
    write("made_object.py", "import sys\nsys.modules[__name__] = object()")
    modules: list[ModuleType] = []
    undo = imports.install_import_hook(lambda name: name.startswith("made"), modules.append)
    try:
        assert importlib.import_module("made_other") is modules[0]
        importlib.import_module("made_object")
        assert [module.__name__ for module in modules] == ["made_instead", "made_object"]
    finally:
        undo()


def test_a_lazy_module_stays_lazy_and_is_heard_when_it_wakes(
    write: Callable[[str, str], None], heard: list[str]
) -> None:
    class Lazily:
        """A finder as lazy-import packages install it."""

        def find_spec(self, name: str, path: object = None, target: object = None) -> object:
            if not name.endswith("_by_finder"):
                return None
            spec = PathFinder.find_spec(name)
            assert spec is not None
            assert spec.loader is not None
            spec.loader = importlib.util.LazyLoader(spec.loader)
            return spec

    lazily = Lazily()
    sys.meta_path.insert(1, lazily)  # type: ignore[arg-type]
    write("made_by_finder.py", "x = 1")
    write("made_by_hand.py", "x = 2")
    by_finder = importlib.import_module("made_by_finder")
    sys.meta_path.remove(lazily)  # type: ignore[arg-type]
    spec = importlib.util.find_spec("made_by_hand")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    by_hand = sys.modules["made_by_hand"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(by_hand)
    assert heard == []
    assert (by_finder.x, by_hand.x) == (1, 2)
    assert heard == ["made_by_finder", "made_by_hand"]


def test_a_lazy_module_that_sleeps_when_the_hook_comes_is_heard_when_it_wakes(
    write: Callable[[str, str], None],
) -> None:
    def asleep(name: str) -> ModuleType:
        write(f"{name}.py", "x = 2")
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        spec.loader = importlib.util.LazyLoader(spec.loader)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    heard: list[str] = []
    wakes, wakes_after = asleep("made_wakes"), asleep("made_wakes_after")
    undo = imports.install_import_hook(
        lambda name: name.startswith("made"), lambda module: heard.append(module.__name__)
    )
    assert imports.is_unloaded_lazy_module(wakes)
    assert (wakes.x, heard) == (2, ["made_wakes"])
    undo()
    assert (wakes_after.x, heard) == (2, ["made_wakes"])
    assert type(wakes.__spec__.loader) is type(wakes_after.__spec__.loader) is SourceFileLoader  # type: ignore[union-attr]


def test_a_fault_of_ours_does_not_reach_the_import(
    write: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write("made_module.py", "x = 1")

    def fail(module: ModuleType) -> None:
        raise RuntimeError("ours")

    def fail_to_choose(name: str) -> bool:
        raise RuntimeError("ours")

    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    undos = [
        imports.install_import_hook(fail_to_choose, fail),
        imports.install_import_hook(lambda name: name == "made_module", fail),
    ]
    try:
        assert importlib.import_module("made_module").x == 1
    finally:
        for undo in undos:
            undo()
    assert FAULTS.count_by_place() == {"import hook": 2}
    FAULTS.clear()


def test_another_hook_that_asks_the_whole_path_again_hears_the_module_once(
    write: Callable[[str, str], None], heard: list[str]
) -> None:
    """wrapt and the hooks built on it look for the spec with find_spec while they are being asked themselves."""

    class Asking:
        busy = False

        def find_spec(self, name: str, path: object = None, target: object = None) -> object:
            if self.busy or not name.startswith("made"):
                return None
            self.busy = True
            try:
                return importlib.util.find_spec(name)
            finally:
                self.busy = False

    write("made_first.py", "")
    write("made_last.py", "")
    first, last = Asking(), Asking()
    sys.meta_path.insert(0, first)  # type: ignore[arg-type]
    importlib.import_module("made_first")
    sys.meta_path.remove(first)  # type: ignore[arg-type]
    sys.meta_path.insert(1, last)  # type: ignore[arg-type]
    importlib.import_module("made_last")
    sys.meta_path.remove(last)  # type: ignore[arg-type]
    assert heard == ["made_first", "made_last"]


def test_a_finder_put_in_front_of_ours_keeps_its_modules_and_they_are_heard(
    write: Callable[[str, str], None], heard: list[str]
) -> None:
    """pytest does so: its finder answers alone for the test modules that it rewrites."""

    class Rewriting:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            spec = PathFinder.find_spec(name, path, target) if name.startswith("made") else None
            if spec is not None:
                spec.loader = RewritingLoader(name, str(spec.origin))
            return spec

    class RewritingLoader(SourceFileLoader):
        def get_data(self, path: str) -> bytes:
            return super().get_data(path).replace(b"plain", b"rewritten")

    write("other.py", "")
    write("made_one.py", "text = 'plain'")
    before = list(sys.meta_path)
    sys.meta_path.insert(0, Rewriting)
    try:
        for name in ("other", "made_one"):
            importlib.import_module(name)
        assert sys.meta_path == [before[0], Rewriting, *before[1:]]
    finally:
        sys.meta_path.remove(Rewriting)
    made = sys.modules["made_one"]
    assert (made.text, type(made.__loader__), heard) == ("rewritten", RewritingLoader, ["made_one"])


def test_imports_in_several_threads_are_heard_once_each(write: Callable[[str, str], None], heard: list[str]) -> None:
    for index in range(8):
        write(f"made_{index}.py", "import time; time.sleep(0.01)")
    threads = [threading.Thread(target=importlib.import_module, args=(f"made_{index % 8}",)) for index in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(heard) == [f"made_{index}" for index in range(8)]


def test_undo_removes_the_finder() -> None:
    before = list(sys.meta_path)
    undo = imports.install_import_hook(lambda name: True, lambda module: None)
    assert len(sys.meta_path) == len(before) + 1
    undo()
    undo()
    assert sys.meta_path == before
