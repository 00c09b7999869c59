"""Import times: what each package took, and that imports are otherwise what they would be."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from instrument.instrumentors.startup import LIMIT, OTHERS, ImportTimes
from instrument.recording.spans import ImportTime

BOOTSTRAP = sys.modules["_frozen_importlib"]
MS = 10**6


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Writes modules that can be imported; they are forgotten after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def made(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        importlib.invalidate_caches()

    yield made
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def times() -> Iterator[ImportTimes]:
    original = BOOTSTRAP._find_and_load
    made = ImportTimes(lambda: 0)
    undo = made.install()
    try:
        yield made
    finally:
        undo()
        assert BOOTSTRAP._find_and_load is original


def of(times: ImportTimes) -> dict[str, ImportTime]:
    return {one.package: one for one in times.times_by_package()}


def test_a_package_has_its_own_modules_and_in_total_those_that_they_import(
    times: ImportTimes, write: Callable[[str, str], None]
) -> None:
    nap = "import time; time.sleep({:g})\n"
    write("outer/__init__.py", nap.format(0.02) + "import outer.part\nimport inner\nfrom outer import late")
    write("outer/part.py", nap.format(0.02))
    write("outer/late.py", nap.format(0.02) + "import inner.more")
    write("inner/__init__.py", nap.format(0.04))
    write("inner/more.py", nap.format(0.04) + "import outer.last")
    write("outer/last.py", nap.format(0.02))
    others = set(of(times))
    import outer
    import outer.part  # noqa: F401 - is there already

    found = {package: one for package, one in of(times).items() if package not in others}
    assert (found["outer"].entries, found["inner"].entries) == (2, 2)
    assert found["outer"].self_ns >= 80 * MS
    assert found["inner"].self_ns >= 80 * MS
    # What a package takes below another one is part of its own total already.
    assert found["outer"].total_ns >= found["outer"].self_ns + found["inner"].self_ns
    assert found["inner"].total_ns >= 80 * MS + 20 * MS
    assert found["outer"].total_ns == sum(one.self_ns for one in found.values())


def test_imports_on_threads_are_counted_apart_and_those_within_spans_reported(
    write: Callable[[str, str], None],
) -> None:
    inside = threading.local()
    times = ImportTimes(lambda: getattr(inside, "open", 0))
    for name in ("left", "right"):
        write(f"{name}.py", "import time; time.sleep(0.03)")

    def work() -> None:
        inside.open = 7
        import left  # noqa: F401

    undo = times.install()
    try:
        thread = threading.Thread(target=work)
        thread.start()
        import right  # noqa: F401

        thread.join()
    finally:
        undo()
    found = of(times)
    assert found["left"].in_spans_ns == found["left"].self_ns >= 30 * MS
    assert found["right"].in_spans_ns == 0
    assert found["right"].total_ns == found["right"].self_ns >= 30 * MS


@pytest.mark.parametrize("statement", ["import bindings.driver", "__import__('importlib').import_module('bindings')"])
def test_our_own_imports_have_our_name_with_their_nested_imports(
    statement: str, times: ImportTimes, write: Callable[[str, str], None]
) -> None:
    write("bindings/__init__.py", "import bindings.driver")
    write("bindings/driver.py", "import driven")
    write("driven.py", "")
    write("service.py", f"exec({statement!r}, {{'__name__': 'instrument.device.door'}})\nimport of_its_own")
    write("of_its_own.py", "")
    before = set(of(times))
    import service  # noqa: F401

    found = of(times)
    ours = {"instrument (bindings)", "instrument (driven)"}
    assert {package for package in found if package not in before} == {"service", "of_its_own", *ours}
    assert found["service"].total_ns == sum(found[name].self_ns for name in ("service", "of_its_own", *ours))


def test_spans_after_the_first_request_are_separate(times: ImportTimes, write: Callable[[str, str], None]) -> None:
    write("early.py", "")
    write("both/__init__.py", "")
    write("both/more.py", "import late")
    write("late.py", "")
    import both
    import early  # noqa: F401

    at_ns = time.monotonic_ns()
    import both.more  # noqa: F401

    found = {one.package: one for one in times.times_by_package(at_ns)}
    assert found["early"].late_ns == 0
    assert 0 < found["both"].late_ns < found["both"].self_ns
    assert found["late"].late_ns == found["late"].self_ns
    assert not any(one.late_ns for one in times.times_by_package())


def test_an_import_that_fails_fails_as_it_would_and_leaves_nothing_open(write: Callable[[str, str], None]) -> None:
    write("broken/__init__.py", "import broken.part")
    write("broken/part.py", "import nothing_of_that_name")

    def told() -> tuple[list[str], str]:
        try:
            import broken  # noqa: F401
        except ImportError as error:
            return [frame.filename for frame in traceback.extract_tb(error.__traceback__)], str(error)
        raise AssertionError("it imports")

    bare = told()
    times = ImportTimes(lambda: 0)
    undo = times.install()
    try:
        assert told() == bare
        assert times._local.stack == []
        with pytest.raises(ModuleNotFoundError, match="No module named 'neither'"):
            importlib.import_module("neither.this")
    finally:
        undo()
    assert of(times)["broken"].entries == 1


def test_modules_specs_and_loaders_are_as_they_would_be(times: ImportTimes, write: Callable[[str, str], None]) -> None:
    write("plain.py", "import sys; seen = __spec__.loader")
    import plain  # type: ignore[import-not-found]

    assert type(plain.seen).__name__ == type(plain.__loader__).__name__ == "SourceFileLoader"
    assert plain.seen is plain.__spec__.loader


def test_after_the_undo_a_wrapper_that_somebody_holds_counts_nothing(write: Callable[[str, str], None]) -> None:
    times = ImportTimes(lambda: 0)
    undo = times.install()
    held = BOOTSTRAP._find_and_load
    BOOTSTRAP._find_and_load = lambda *args: held(*args)
    theirs = BOOTSTRAP._find_and_load
    undo()
    try:
        assert BOOTSTRAP._find_and_load is theirs
        write("later.py", "")
        import later  # type: ignore[import-not-found]  # noqa: F401

        assert times.times_by_package() == ()
    finally:
        BOOTSTRAP._find_and_load = held.__wrapped__


def test_packages_are_bounded(times: ImportTimes) -> None:
    for number in range(LIMIT + 20):
        with pytest.raises(ImportError):
            importlib.import_module(f"missing_{number}")
    found = of(times)
    assert len(found) == LIMIT + 1
    assert found[OTHERS].entries >= 20


def test_a_forked_child_begins_anew() -> None:
    times = ImportTimes(lambda: 0)
    undo = times.install()
    try:
        with pytest.raises(ImportError):
            importlib.import_module("missing_here")
        times.after_fork_in_child()
        assert times.times_by_package() == ()
        with pytest.raises(ImportError):
            importlib.import_module("missing_there")
        assert set(of(times)) == {"missing_there"}
    finally:
        undo()


def test_another_import_system_of_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "_frozen_importlib", object())
    times = ImportTimes(lambda: 0)
    times.install()()
    assert "imports are not timed" in times.why_not


def test_a_whole_program_imports_as_before() -> None:
    """A service imports the same modules with the same loaders and exit while the watch is in place."""
    program = """
import sys
if sys.argv[1] == "watched":
    from instrument.instrumentors.startup import ImportTimes
    times = ImportTimes(lambda: 0)
    times.install()
import asyncio, concurrent.futures, decimal, email.message, http.client, json, logging.config, sqlite3, unittest.mock
names = {n: type(getattr(m, "__loader__", None)).__name__ for n, m in sys.modules.items() if "instrument" not in n}
print(sorted((n, l) for n, l in names.items() if n.split(".")[0] in
      {"asyncio", "concurrent", "decimal", "email", "http", "json", "logging", "sqlite3", "unittest", "_decimal"}))
"""
    texts = [
        subprocess.run([sys.executable, "-c", program, how], capture_output=True, text=True, check=True).stdout
        for how in ("bare", "watched")
    ]
    assert texts[0] == texts[1]
    assert texts[0].count("asyncio") > 10


def test_imports_of_the_interpreter_have_no_frame_and_are_not_ours(tmp_path: Path) -> None:
    begin = "from instrument.instrumentors.startup import ImportTimes\n"
    (tmp_path / "sitecustomize.py").write_text(f"{begin}times = ImportTimes(lambda: 0)\ntimes.install()\n")
    (tmp_path / "service.py").write_text(
        "from sitecustomize import times\n"
        "print(*(one.package for one in times.times_by_package() if 'runpy' in one.package))"
    )
    environ = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "PATH": os.environ["PATH"]}
    words = [sys.executable, "-m", "service"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environ, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["runpy"]), done.stderr


def test_the_clock_of_imports_is_the_clock_of_spans(times: ImportTimes, write: Callable[[str, str], None]) -> None:
    write("short.py", "")
    before = time.monotonic_ns()
    import short  # type: ignore[import-not-found]  # noqa: F401

    assert 0 < of(times)["short"].total_ns <= time.monotonic_ns() - before
