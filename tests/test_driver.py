"""Tests marked `fake_driver` run in a process of their own, and look as if they had not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from driver import why_not

CONFTEST = 'pytest_plugins = ["driver"]\n'
PRELUDE = """
import os
from pathlib import Path

import pytest

MAPS = Path("/proc/self/maps").read_text()


def note(name, text):
    with open(name, "a") as file:
        file.write(text)

"""
INI = "[pytest]\nmarkers =\n    fake_driver: x\nfilterwarnings = error\n"


def outcomes(folder: Path, program: str, *options: str, **environ: str) -> tuple[list[str], str]:
    """Return the outcome of each test of a module, in order, and everything that pytest wrote."""
    folder.joinpath("conftest.py").write_text(CONFTEST)
    folder.joinpath("pytest.ini").write_text(INI)
    folder.joinpath("test_it.py").write_text(PRELUDE + textwrap.dedent(program))
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    inherited = {name: text for name, text in os.environ.items() if name != "FAKE_DRIVER"}
    inherited["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # a process starts in half the time
    command = [sys.executable, "-m", "pytest", "-v", "--color=no", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**inherited, "PYTHONPATH": path, **environ},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    found = re.findall(r"^test_it\.py::(.+) (PASSED|FAILED|SKIPPED|ERROR|XFAIL) ", done.stdout, re.MULTILINE)
    return [f"{name} {outcome.lower()}" for name, outcome in found], done.stdout


@pytest.fixture(autouse=True)
def possible() -> None:
    if reason := why_not():
        pytest.skip(reason)


def test_this_process_never_gets_a_cuda_driver() -> None:
    assert os.environ.get("FAKE_DRIVER") == "here" or "libcuda.so" not in Path("/proc/self/maps").read_text()


@pytest.mark.slow
def test_each_test_is_reported_with_its_own_outcome(tmp_path: Path) -> None:
    program = """
        def test_unmarked():
            assert "libcuda.so" not in MAPS

        @pytest.mark.fake_driver
        class TestMarked:
            def test_fake(self, fake_driver):
                assert "fake_driver" in MAPS
                assert fake_driver.called() == {}

            @pytest.mark.parametrize("text", ["a::b[c]", "ä ö"])
            def test_odd(self, text):
                assert text != "a::b[c]", f"not {text}"

            def test_skipped(self):
                pytest.skip("no reason")

            @pytest.mark.xfail
            def test_xfail(self):
                assert False

            @pytest.fixture
            def broken(self):
                raise ValueError("the fixture is broken")

            def test_broken(self, broken):
                pass

        def test_without_a_mark(fake_driver):
            pass
    """
    found, text = outcomes(tmp_path, program)
    assert found == [
        "test_unmarked passed",
        "TestMarked::test_fake passed",
        "TestMarked::test_odd[a::b[c]] failed",
        r"TestMarked::test_odd[\xe4 \xf6] passed",
        "TestMarked::test_skipped skipped",
        "TestMarked::test_xfail xfail",
        "TestMarked::test_broken error",
        "test_without_a_mark error",
    ]
    assert "AssertionError: not a::b[c]" in text
    assert "ValueError: the fixture is broken" in text
    assert "needs pytest.mark.fake_driver" in text


@pytest.mark.slow
def test_a_module_has_one_process_and_each_module_its_own(tmp_path: Path) -> None:
    program = """
        pytestmark = pytest.mark.fake_driver
        pids = []

        @pytest.mark.parametrize("number", range(3))
        def test_pid(number):
            pids.append(os.getpid())
            assert len(pids) == number + 1 and len(set(pids)) == 1 and os.getpid() != int(os.environ["PARENT"])
            note("pid", f"{os.getpid()}\\n")
    """
    tmp_path.joinpath("test_other.py").write_text(PRELUDE + textwrap.dedent(program))
    found, text = outcomes(tmp_path, program, PARENT=str(os.getpid()))
    assert "6 passed" in text, text
    assert len(found) == 3
    assert len(set(tmp_path.joinpath("pid").read_text().split())) == 2


@pytest.mark.slow
def test_a_test_that_ends_the_process_fails_alone(tmp_path: Path) -> None:
    program = """
        pytestmark = pytest.mark.fake_driver

        def test_before():
            pass

        def test_deadly(capfd):
            os.write(2, b"last words")
            with capfd.disabled():
                print("the end", flush=True)
            os._exit(7)

        def test_after():
            pass
    """
    found, text = outcomes(tmp_path, program)
    assert found == ["test_before passed", "test_deadly failed", "test_after passed"]
    assert "ended with 7 before it had finished this test" in text
    assert "the end" in text


@pytest.mark.slow
def test_a_process_that_ends_badly_fails_its_last_test(tmp_path: Path) -> None:
    program = """
        import atexit
        pytestmark = pytest.mark.fake_driver

        def test_first():
            pass

        def test_last():
            atexit.register(os._exit, 5)
    """
    found, text = outcomes(tmp_path, program)
    assert found == ["test_first passed", "test_last passed", "test_last error"]
    assert "ended with 5 after its last test" in text


@pytest.mark.slow
def test_a_process_that_does_not_come_up_fails_every_test_and_is_not_tried_again(tmp_path: Path) -> None:
    program = """
        if "fake_driver" in MAPS:
            note("tries", "x")
            raise ValueError("only there")
        pytestmark = pytest.mark.fake_driver

        @pytest.mark.parametrize("number", range(3))
        def test_it(number):
            pass
    """
    found, text = outcomes(tmp_path, program)
    assert found == [f"test_it[{number}] failed" for number in range(3)]
    assert "ValueError: only there" in text
    assert tmp_path.joinpath("tries").read_text() == "x"


@pytest.mark.slow
def test_only_what_was_selected_runs(tmp_path: Path) -> None:
    program = """
        pytestmark = pytest.mark.fake_driver

        @pytest.mark.parametrize("number", range(4))
        def test_it(number):
            note("ran", str(number))
            assert number != 2
    """
    found, _ = outcomes(tmp_path, program, "-k", "1 or 2 or 3", "-x")
    assert found == ["test_it[1] passed", "test_it[2] failed"]
    assert tmp_path.joinpath("ran").read_text().startswith("12")


def test_marked_tests_can_run_here_for_a_debugger(tmp_path: Path) -> None:
    program = """
        pytestmark = pytest.mark.fake_driver

        def test_here(fake_driver):
            assert os.getppid() == int(os.environ["PARENT"])
    """
    assert outcomes(tmp_path, program, FAKE_DRIVER="here", PARENT=str(os.getpid()))[0] == ["test_here passed"]


@pytest.mark.parametrize(
    ("hidden", "reason"),
    [("gcc", "no gcc to build"), ("cuda", "cuda-bindings is not installed")],
)
def test_a_machine_that_cannot_skips_with_the_reason(tmp_path: Path, hidden: str, reason: str) -> None:
    program = """
        pytestmark = pytest.mark.fake_driver

        def test_it(fake_driver):
            assert False
    """
    environ = {"PATH": "/nowhere"}
    if hidden == "cuda":
        environ = {}
        tmp_path.joinpath("cuda").mkdir()  # a package without bindings, found first
        tmp_path.joinpath("cuda", "__init__.py").touch()
    found, text = outcomes(tmp_path, program, "-rs", **environ)
    assert found == ["test_it skipped"]
    assert reason in text
