"""The published wheel and source distribution, each installed into an empty environment."""

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
    print("recorder", native.WHY_MISSING or "native")
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


def install(package: Path, folder: Path, *, compiler: bool) -> subprocess.CompletedProcess[str]:
    """Install the package into a new environment that holds nothing else."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    environ = {**os.environ, "PATH": os.environ["PATH"] if compiler else str(python.parent)}
    environ |= {} if compiler else {"CC": "/nonexistent/cc"}
    return subprocess.run(
        [str(python), "-m", "pip", "install", "-q", str(package)],
        capture_output=True, text=True, check=False, timeout=280, env=environ,
    )  # fmt: skip


def installed(package: Path, folder: Path, *, compiler: bool) -> Path:
    """Return the Python of a new environment that holds the package alone."""
    done = install(package, folder, compiler=compiler)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "venv" / "bin" / "python"


def serve(python: Path, folder: Path) -> str:
    """Run a service under the installed command; the recorder that it used."""
    (folder / "work.py").write_text("def step(x): return x + 1\n")
    (folder / "service.py").write_text(textwrap.dedent(SERVICE))
    (folder / "profile.yaml").write_text(PROFILE)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("INSTRUMENT", "PYTHON"))}
    command = [str(python.parent / "instrument"), "run", "--profile", "profile.yaml", "--", "service.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=240, env=environ)
    assert done.returncode == 0, done.stderr
    report = [str(python.parent / "instrument"), "report", "trace.json", "--view", "operators"]
    told = subprocess.run(report, cwd=folder, capture_output=True, text=True, check=False, timeout=240, env=environ)
    assert "step" in told.stdout, told.stderr
    return done.stdout.split()[-1]


def test_the_wheel_records_natively_where_no_compiler_is(distributions: Distributions, tmp_path: Path) -> None:
    python = installed(distributions.wheel, tmp_path, compiler=False)
    assert serve(python, tmp_path) == "native"
    done = subprocess.run([python.parent / "instrument", "help", "files"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("# Files\n")


def test_the_source_records_where_a_compiler_is(distributions: Distributions, tmp_path: Path) -> None:
    assert serve(installed(distributions.source, tmp_path, compiler=True), tmp_path) == "native"


def test_an_install_of_the_source_without_a_compiler_fails_and_says_what_to_do(
    distributions: Distributions, tmp_path: Path
) -> None:
    done = install(distributions.source, tmp_path, compiler=False)
    assert done.returncode != 0
    assert "without it nothing is recorded; install a C compiler" in done.stdout + done.stderr


WITHOUT_LOCK = "import sys; sys._is_gil_enabled = lambda: False"
WITHOUT_EXTENSION = "import sys; sys.modules['instrument.native._recorder'] = None"
USE = """
    import logging
    logging.basicConfig(format="%(message)s")
    import instrument
    def work(): return 3
    assert instrument.profiled("work")(work) is work
    with instrument.scope("block", attributes={"x": 1}) as block:
        block.annotate(y=2), instrument.annotate(z=3), instrument.bind("r1"), instrument.rename_span("b")
        instrument.scope_end(instrument.scope_start("manual")), instrument.scope_end(), instrument.set_status("ok")
    assert instrument.start() is None
    instrument.flush(), instrument.enable(), instrument.disable(), instrument.stop()
    assert not any(name.startswith("instrument.native._") and module for name, module in sys.modules.items())
    print(instrument.summary().strip())
"""


@pytest.mark.parametrize(
    ("missing", "why"), [(WITHOUT_LOCK, "free-threaded"), (WITHOUT_EXTENSION, "from a wheel, or from source")]
)
def test_a_python_without_the_recorder_runs_the_service_and_says_that_nothing_is_recorded(
    missing: str, why: str, tmp_path: Path
) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("INSTRUMENT")}
    done = subprocess.run(
        [sys.executable, "-c", f"{missing}\n{textwrap.dedent(USE)}"],
        capture_output=True, text=True, check=False, timeout=240, env=environ,
    )  # fmt: skip
    assert (done.returncode, done.stdout.count("the recorder in C is missing")) == (0, 1), done.stderr
    assert why in done.stdout
    assert done.stderr.startswith("instrument is off (the recorder in C is missing: ")

    (tmp_path / "service.py").write_text("print('served')\n")
    (tmp_path / "sitecustomize.py").write_text(missing)
    environ["PYTHONPATH"] = str(tmp_path)
    for verb, code, out in ("run", 0, "served\n"), ("check", 2, ""):
        done = subprocess.run(
            [sys.executable, "-m", "instrument", verb, "--", "service.py"],
            capture_output=True, text=True, check=False, timeout=240, env=environ, cwd=tmp_path,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (code, out), done.stderr
        first_line = done.stderr.splitlines()[0]
        assert "recorded" in first_line
        assert why in first_line
