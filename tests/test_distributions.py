"""What is published: a wheel and a source distribution, each installed where nothing else is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
SERVICE = """
    import work
    from instrument import native
    for number in range(3):
        work.step(number)
    print("recorder", "pure" if "_recorder" in native.why_missing() else "native")
"""
PROFILE = """
functions: [{match: "work:step"}]
export: {chrome: {path: "trace.json"}}
"""


@dataclass(frozen=True)
class Distributions:
    wheel: Path
    source: Path


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """Both, built from what git would check out: the wheel from the source distribution."""
    pytest.importorskip("build")
    checkout, made = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    for name in filter(None, map(os.fsdecode, listed)):
        if (ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, checkout / name)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(made), str(checkout)],
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return Distributions(next(made.glob("*.whl")), next(made.glob("*.tar.gz")))


def installed(package: Path, folder: Path, *, compiler: bool) -> Path:
    """The Python of a new environment that holds the package alone."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    environ = {**os.environ, "PATH": os.environ["PATH"] if compiler else str(python.parent)}
    environ |= {} if compiler else {"CC": "/nonexistent/cc"}
    done = subprocess.run(
        [str(python), "-m", "pip", "install", "-q", str(package)],
        capture_output=True, text=True, check=False, timeout=280, env=environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return python


def serve(python: Path, folder: Path) -> str:
    """Run a service under the installed command; the recorder that it used."""
    (folder / "work.py").write_text("def step(x): return x + 1\n")
    (folder / "service.py").write_text(textwrap.dedent(SERVICE))
    (folder / "profile.yaml").write_text(PROFILE)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("INSTRUMENT", "PYTHON"))}
    command = [str(python.parent / "instrument"), "run", "--profile", "profile.yaml", "--", "service.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=100, env=environ)
    assert done.returncode == 0, done.stderr
    report = [str(python.parent / "instrument"), "report", "trace.json", "--view", "operators"]
    told = subprocess.run(report, cwd=folder, capture_output=True, text=True, check=False, timeout=100, env=environ)
    assert "step" in told.stdout, told.stderr
    return done.stdout.split()[-1]


def test_the_wheel_records_natively_where_no_compiler_is(distributions: Distributions, tmp_path: Path) -> None:
    assert serve(installed(distributions.wheel, tmp_path, compiler=False), tmp_path) == "native"


@pytest.mark.parametrize("recorder", ["native", "pure"])
def test_the_source_records_natively_where_a_compiler_is(
    recorder: str, distributions: Distributions, tmp_path: Path
) -> None:
    python = installed(distributions.source, tmp_path, compiler=recorder == "native")
    assert serve(python, tmp_path) == recorder


def test_a_python_without_its_lock_is_left_without_it() -> None:
    source = """
        import sys
        sys._is_gil_enabled = lambda: False
        from instrument import native
        from instrument.recorder import recorder
        assert not any(name.startswith("instrument.native._") for name in sys.modules)
        print(recorder.RECORDER.__class__.__name__, native.why_missing()["_recorder"])
    """
    command = [sys.executable, "-c", textwrap.dedent(source)]
    environ = {name: value for name, value in os.environ.items() if name != "INSTRUMENT_PURE"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environ)
    assert done.stdout.split()[:1] == ["PureRecorder"], done.stderr
    assert "free-threaded" in done.stdout
