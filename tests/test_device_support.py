"""`check` and the notes of a session say in one sentence why a machine takes no device times, with the cure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driver import environment, why_not

import instrument
from instrument.device.cuda import explain_version_conflict

ROOT = Path(instrument.__file__).parent.parent
HERE = Path(__file__).parent

PROFILE = 'functions: [{match: "json:dumps", device: true}]\n'


def bindings(version: str) -> dict[str, str]:
    """A distribution of cuda-bindings of some version, as far as it can be without the code of it."""
    name = f"cuda_bindings-{version}.dist-info/METADATA"
    return {
        name: f"Metadata-Version: 2.1\nName: cuda-bindings\nVersion: {version}\n",
        "cuda/__init__.py": "",
        "cuda/bindings/__init__.py": f"__version__ = {version!r}\n",
        "cuda/bindings/driver.py": "",
    }


NO_BINDINGS = {
    "cuda.py": "raise ModuleNotFoundError(\"No module named 'cuda'\", name='cuda')\n",
    "sitecustomize.py": (
        "import importlib.metadata as metadata\n"
        "real = metadata.version\n"
        "def version(name):\n"
        "    if name == 'cuda-bindings':\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "metadata.version = version\n"
    ),
}
"""Files that hide the cuda-bindings of the machine from an interpreter."""

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def in_process(*arguments: str, files: dict[str, str] | None = None, profile: str = PROFILE, **environ: str) -> str:
        (tmp_path / "p.yaml").write_text(profile)
        for name, text in (files or {}).items():
            path = tmp_path / "packages" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        paths = [str(tmp_path / "packages"), str(ROOT), str(HERE)]
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, **environ, "PYTHONPATH": os.pathsep.join(paths)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return in_process


CHECK = ("-m", "instrument", "check", "p.yaml")


def device_line(output: str) -> str:
    (line,) = [line for line in output.splitlines() if line.startswith("device: ")]
    return line.removeprefix("device: ")


needs_fake = pytest.mark.skipif(bool(why_not()), reason=why_not() or "the fake driver is there")


@needs_fake
@pytest.mark.parametrize(
    ("version", "files", "says"),
    [
        (13010, bindings("13.0.3"), "driver for CUDA 13.1, cuda-bindings 13.0.3"),
        (13000, bindings("12.9.4"), "driver for CUDA 13.0, cuda-bindings 12.9.4"),
        (
            12080,
            bindings("13.0.3"),
            "driver for CUDA 12.8, cuda-bindings 13.0.3; the driver is for CUDA 12.8 and older than cuda-bindings "
            "13.0.3; install 'cuda-bindings<13'",
        ),
        (
            13000,
            bindings("14.1.0"),
            "driver for CUDA 13.0, cuda-bindings 14.1.0; found cuda-bindings 14.1.0, which is not known; install "
            "'cuda-bindings>=12.9.1,<14'",
        ),
        (
            13000,
            NO_BINDINGS,
            "driver for CUDA 13.0; cuda-bindings is not installed; install instrument-sdk[cuda]",
        ),
    ],
    ids=["fits", "newer driver", "older driver", "unknown bindings", "no bindings"],
)
def test_check_says_what_device_times_are_taken_by(run: Run, version: int, files: dict[str, str], says: str) -> None:
    assert device_line(run(*CHECK, files=files, **environment(version=version))) == says


@needs_fake
def test_the_document_of_check_has_the_same_content(run: Run) -> None:
    found = json.loads(run(*CHECK, "--json", files=bindings("13.0.3"), **environment()))["device"]
    assert found == {"driver": "13.0", "bindings": "13.0.3", "rocm": "", "problem": ""}


def test_without_a_driver_check_says_so(run: Run, tmp_path: Path) -> None:
    """A library that is no driver replaces the machine's own, if it has one."""
    (tmp_path / "libcuda.so.1").write_text("")
    line = device_line(run(*CHECK, LD_LIBRARY_PATH=str(tmp_path)))
    assert line.startswith("no CUDA driver: ")


def test_a_torch_for_rocm_needs_no_cuda(run: Run) -> None:
    files = {"torch-2.13.0+rocm6.4.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+rocm6.4\n"}
    assert device_line(run(*CHECK, files=files)) == "torch 2.13.0+rocm6.4, timed by its own events"


@pytest.mark.parametrize(
    "profile",
    ['functions: [{match: "json:dumps"}]\n', PROFILE + "device: {cuda: off}\n", PROFILE + "state: CPU\n"],
    ids=["no rule asks", "off", "CPU alone"],
)
def test_check_omits_device_time_if_no_rule_asks_for_it(run: Run, profile: str) -> None:
    assert "device: " not in run(*CHECK, profile=profile).partition("rules: ")[0]
    assert json.loads(run(*CHECK, "--json", profile=profile))["device"] is None


@needs_fake
def test_looking_imports_nothing_and_initialises_nothing(run: Run) -> None:
    program = """
import ctypes, sys
before = set(sys.modules)  # bindings 12.9 have Python import their package's namespace as it starts
from instrument.device.cuda import find_versions
assert not find_versions()["problem"], find_versions()
driver = ctypes.CDLL("libcuda.so.1")
names = iter(range(1000))
driver.fake_symbol.restype = ctypes.c_char_p
driver.fake_calls.restype = ctypes.c_int64
symbols = list(iter(lambda: driver.fake_symbol(next(names)), None))
print(*[symbol.decode() for number, symbol in enumerate(symbols) if driver.fake_calls(number, 0)])
print([name for name in sys.modules if name not in before and (name == "cuda" or name.startswith("cuda."))])
"""
    assert run("-c", program, files=bindings("13.0.3"), **environment()) == "cuDriverGetVersion\n[]\n"


NOTES = """
import os
import sys
import time
from driver import FakeDriver
from fake_torch_cuda import fake_torch
from instrument.sessions.process import start
import instrument

fake = FakeDriver(os.path.join(os.environ["LD_LIBRARY_PATH"], "libcuda.so.1"))
sys.modules["torch"] = torch = fake_torch(fake)
torch.version.cuda, torch.version.hip = {cuda}, {hip}
session = start("p.yaml")
with instrument.scope("forward", device=True):
    pass
if {cuda}:
    torch.work(1000)
    for _ in range(3):
        with instrument.scope("forward", device=True):
            torch.work(1000)
    now_ns, end = time.monotonic_ns(), time.monotonic() + 60
    while not session.recorded.timing.has_device_times_until(now_ns):
        assert time.monotonic() < end
        time.sleep(0.001)
    driver = session.recorded.timing.timer.driver
    print(sum(row.totals.device_ns > 0 for row in session.tally().iterate_totals()), type(driver).__name__)
print(*[note for note in session.notes() if "device" in note], sep="\\n")
instrument.stop()
assert fake.synchronised() == 0
"""


@needs_fake
@pytest.mark.parametrize(
    ("version", "files", "driver", "says"),
    [
        (13000, {}, "CudaDriver", []),
        (
            13000,
            NO_BINDINGS,
            "TorchDriver",
            [
                "device times are taken by torch's own events, at a higher cost: cuda-bindings is not installed; "
                "install instrument-sdk[cuda]"
            ],
        ),
        (
            13000,
            bindings("14.1.0"),
            "TorchDriver",
            [
                "device times are taken by torch's own events, at a higher cost: found cuda-bindings 14.1.0, which is "
                "not known; install 'cuda-bindings>=12.9.1,<14'"
            ],
        ),
    ],
    ids=["bindings", "no bindings", "unknown bindings"],
)
def test_a_session_falls_back_on_torchs_events_and_says_so(
    run: Run, version: int, files: dict[str, str], driver: str, says: list[str]
) -> None:
    program = NOTES.format(cuda="'13.0'", hip=None)
    lines = run("-c", program, files=files, profile="", **environment(version=version)).splitlines()
    assert lines == [f"1 {driver}", *(says or [""])]


@needs_fake
def test_an_older_driver_is_named_with_the_bindings_that_fit_it(run: Run) -> None:
    installed: Any = pytest.importorskip("cuda.bindings").__version__
    program = NOTES.format(cuda="'13.0'", hip=None)
    lines = run("-c", program, profile="", **environment(version=12080)).splitlines()
    fits = installed.startswith("12.")
    assert lines[1:] == [f"device time: {explain_version_conflict(installed, 12080)}" if not fits else ""]


@needs_fake
def test_rocm_is_not_asked_for_cudas_driver(run: Run) -> None:
    program = NOTES.format(cuda=None, hip="'6.4'")
    (line,) = run("-c", program, profile="", **environment()).splitlines()
    assert line == "no device time: torch was built for ROCm, but has not loaded libamdhip64.so"


FORK = """
import gc, os, sys
from driver import FakeDriver
from fake_torch_cuda import fake_torch
from instrument.sessions.process import start
import instrument

fake = FakeDriver(os.path.join(os.environ["LD_LIBRARY_PATH"], "libcuda.so.1"))
sys.modules["torch"] = torch = fake_torch(fake)
session = start("p.yaml")
torch.work(1000)
with instrument.scope("forward", device=True):
    torch.work(1000)
print(type(session.recorded.timing.timer.driver).__name__, fake.counts().live_events >= 2)
sys.stdout.flush()
pid = os.fork()
if pid == 0:
    with instrument.scope("forward", device=True):
        pass
    session.notes()
    instrument.stop()
    session = None
    gc.collect()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
print(fake.counts().forked_calls)
"""


@needs_fake
@pytest.mark.parametrize("files", [{}, NO_BINDINGS], ids=["CudaDriver", "TorchDriver"])
def test_a_forked_child_asks_nothing_of_the_driver_to_its_very_end(
    run: Run, request: pytest.FixtureRequest, files: dict[str, str]
) -> None:
    lines = run("-c", FORK, files=files, profile="", **environment()).splitlines()
    assert lines == [f"{request.node.callspec.id} True", "0"]


def test_a_driver_that_is_older_than_all_bindings_needs_to_be_newer() -> None:
    assert explain_version_conflict("12.9.1", 11080).endswith("install a newer driver")
