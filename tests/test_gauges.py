"""Gauges of GPUs and host: what is read, what is not there, and what reading leaves alone.

NVIDIA's own bindings read a library that has no card behind it, in processes of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from kept_gauges import KeptGauges

import instrument
from instrument import chrome
from instrument.device import gauge_thread as host_room
from instrument.device import gauge_thread as room
from instrument.device import gpu_gauges
from instrument.device.gauge_thread import Gone, Host
from instrument.device.gpu_gauges import NvmlDevice, select_visible_gpus
from instrument.profile.keys import loads
from instrument.profile.model import AUTO_NS, Device
from instrument.recorder.recorder import RECORDER
from instrument.recording.mapped import Mapped
from instrument.recording.memory import GaugePlace, add_samples
from instrument.recording.metric_definitions import GAUGES
from instrument.recording.spans import HOST, Gpu, Sample
from instrument.report.device_view import device
from instrument.report.view import Options, Recording
from instrument.runtime import environment
from instrument.runtime.faults import FAULTS

MS = 10**6
HERE = Path(__file__).parent

Run = Callable[..., "Ran"]

PRELUDE = """
import os, sys, threading, time
import instrument
from instrument.profile.model import AUTO_NS, Device
from instrument.recording.spans import HOST
from kept_gauges import KeptGauges

MS = 10**6

def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("instrument")]

def until(reached, what="what was waited for"):
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)

def read(readings=3, nvml_ns=120 * MS, host_ns=None):
    '''The gauges after so many readings of the first GPU's memory.'''
    gauges = KeptGauges(Device(nvml_ns=nvml_ns, host_ns=host_ns))
    gauges.find_gauges()
    gauges.begin()
    until(lambda: len(values(gauges, "memory_used", 0)) >= readings, gauges.notes())
    gauges.stop()
    return gauges

def values(gauges, name, device=0):
    return [s.value for s in gauges.samples(0, 1 << 62) if (s.name, s.device) == (name, device)]
"""


class Ran:
    """The output of a program, and the calls of NVML by name in each of its processes, the first one first."""

    def __init__(self, output: str, log: Path) -> None:
        self.output = output
        lines = [line.split(" ", 1) for line in log.read_text().splitlines()] if log.exists() else []
        self.pids = list(dict.fromkeys(pid for pid, _ in lines))
        self.calls = [Counter(name for pid, name in lines if pid == one) for one in self.pids]
        self.names = [name for _, name in lines]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the library that has no card behind it."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the library with")
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    folder = tmp_path_factory.mktemp("nvml")
    command = [compiler, "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(HERE / "fake_nvml.c")]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture
def run(library: Path, tmp_path: Path) -> Run:
    """Runs a program where NVML has the devices of a script, and returns what came of it."""

    def start(script: str, program: str, *, arguments: Sequence[str] = ("-c",), **environ: str) -> Ran:
        log = tmp_path / "calls"
        log.unlink(missing_ok=True)
        (tmp_path / "script").write_text(textwrap.dedent(script))
        text = PRELUDE + textwrap.dedent(program) if arguments == ("-c",) else program
        done = subprocess.run(
            [sys.executable, *arguments, *([text] if text else [])],
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
            cwd=tmp_path,
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "OTEL_"))},
                "LD_LIBRARY_PATH": str(library),
                "FAKE_NVML": str(tmp_path / "script"),
                "FAKE_NVML_LOG": str(log),
                "PYTEST_CURRENT_TEST": "inside",
                "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
                **environ,
            },
        )
        assert done.returncode == 0, done.stderr
        return Ran(done.stdout, log)

    return start


TWO = """
    gpu GPU-bbbb 20 NVIDIA H200
    gpu GPU-aaaa 10 NVIDIA H200
"""
FULL = """
    gpu GPU-aaaa 10 NVIDIA H200
    0.util 35
    0.memutil 12
    0.used 5e9
    0.total 140e9
    0.power 500000
    0.energy 1000
    0.energy 3000 @1
    0.energy 9000 @2
    0.temp 55
    0.smclock 1980
    0.memclock 3201
    0.gpm 1
    0.pid 0
    0.pidmem 123456
"""


def begin(settings: Device, keep: Any = None) -> KeptGauges:
    gauges = KeptGauges(settings, keep)
    gauges.find_gauges()
    gauges.begin()
    return gauges


def until(reached: Any) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# -------------------------------------------------------------------- what is read


def test_each_gauge_of_a_gpu_is_read_in_its_unit(run: Run) -> None:
    done = run(
        FULL,
        """
        gauges = read()
        for name in sorted({s.name for s in gauges.samples(0, 1 << 62)}):
            print(name, *sorted({f"{value:g}" if value is not None else "n/a" for value in values(gauges, name)}))
        print(gauges.gpus(), gauges.notes(), gauges.losses())
        """,
    )
    lines = dict(line.split(" ", 1) for line in done.output.splitlines())
    assert lines.keys() - {"(Gpu(device=0,"} <= GAUGES.keys()
    expected = {
        "utilization": "35",
        "memory_active": "12",
        "energy": "0 6",
        "memory_used": "5e+09",
        "memory_total": "1.4e+11",
        "memory_of_process": "123456",
        "temperature": "55",
        "sm_clock": "1980",
        "memory_clock": "3201",
        "sm_active": "2",
        "sm_occupancy": "3",
        "tensor_active": "5",
        "dram_active": "10",
        "pcie_sent": "2.09715e+07",
        "pcie_received": "2.20201e+07",
        "nvlink_sent": "n/a",
        "nvlink_received": "n/a",
        "power": "500",
    }
    assert {name: lines[name] for name in expected} == expected
    assert done.output.endswith("(Gpu(device=0, model='NVIDIA H200', uuid='GPU-aaaa'),) [] {}\n")
    assert done.calls[0]["init"] == done.calls[0]["shutdown"] == 1
    assert done.calls[0]["gpm_alloc"] == done.calls[0]["gpm_free"] == 2


def test_power_is_the_energy_between_two_readings_where_the_device_counts_it(run: Run) -> None:
    done = run(
        FULL.replace("9000 @2", "503000 @2"),
        """
        gauges = read(3, nvml_ns=500 * MS)
        samples = [s for s in gauges.samples(0, 1 << 62) if s.name in ("energy", "power")]
        told = {(s.name, s.at_ns): s.value for s in samples}
        times = sorted({s.at_ns for s in samples})
        assert told["power", times[0]] == 500, "nothing was counted yet"
        for before, now in zip(times, times[1:]):
            joules = told["energy", now] - told["energy", before]
            if now - before > 450 * MS:
                assert abs(told["power", now] - joules / ((now - before) / 1e9)) < 1e-6
        print(told["energy", times[2]])
        """,
    )
    assert done.output == "500.0\n"


def test_an_unsupported_gauge_is_reported_once_as_none_and_not_read_again(run: Run) -> None:
    done = run(
        """
        gpu GPU-aaaa 10 NVIDIA T4
        0.utilization 3
        0.energy_counter 4
        0.temperature 13
        0.processes 3
        0.power 70000
        0.power_usage 999 @2
        """,
        """
        gauges = read(5)
        for name in ("utilization", "memory_active", "energy", "temperature", "sm_active", "memory_of_process"):
            print(name, values(gauges, name))
        assert values(gauges, "power")[:2] == [70, None] and len(values(gauges, "power")) >= 5
        assert not [s for s in gauges.samples(0, 1 << 62) if s.value == 0 and s.name == "utilization"]
        print(gauges.notes())
        """,
    )
    *absent, notes = done.output.splitlines()
    assert [line.partition(" ")[2] for line in absent] == ["[None]"] * 6
    calls = done.calls[0]
    assert [calls[name] for name in ("utilization", "energy_counter", "temperature", "processes", "gpm_support")] == [
        *[1] * 5
    ]
    assert calls["power_usage"] >= 5
    assert "calls failed for a reason that may pass" in notes


def test_memory_of_the_process_is_known_only_where_nvml_knows_its_number(run: Run) -> None:
    program = "print(values(read(1), 'memory_of_process')[0])"
    assert run(FULL, program).output == "123456\n"
    assert run(FULL.replace("0.pid 0", "0.pid 4194305"), program).output == "None\n"


def test_a_gpu_that_falls_off_its_bus_is_named_once_and_the_others_are_read_on(run: Run) -> None:
    done = run(
        TWO + "1.util 40\n1.all 15 @2\n",
        """
        gauges = KeptGauges(Device(nvml_ns=20 * MS, host_ns=None))
        gauges.find_gauges()
        gauges.begin()
        until(lambda: gauges.notes() and len(values(gauges, "memory_used", 1)) > 6)
        gauges.stop()
        first = values(gauges, "utilization", 0)
        assert first == [40, 40], "and no 0 afterwards"
        assert [values(gauges, name, 0)[-1] for name in ("power", "temperature")] == [None, None]
        print(*gauges.notes(), sep="\\n")
        """,
    )
    assert done.output == "device.nvml: GPU 0 (NVIDIA H200, GPU-aaaa) is no longer read: GPU is lost\n"


def test_a_mig_instance_is_read_by_its_own_handle_and_the_samples_of_its_gpu(run: Run) -> None:
    script = """
        gpu GPU-aaaa 10 NVIDIA H200
        mig 0 MIG-1111 7
        mig 0 MIG-2222 9
        0.gpm 1
        0.used 1
        m0.used 100
        m1.used 200
        m0.utilization 3
        m1.utilization 2
        m1.power_usage 3
        m1.energy_counter 3
    """
    program = """
        gauges = read(3)
        print(gauges.gpus()[0].uuid, values(gauges, "memory_used")[0], values(gauges, "utilization"),
              values(gauges, "sm_active")[0], values(gauges, "power")[:3])
    """
    assert run(script, program).output == "MIG-1111 100 [None] 9.0 [0.0, 0.0, 0.0]\n"
    second = run(script, program, CUDA_VISIBLE_DEVICES="MIG-2222")
    assert second.output == "MIG-2222 200 [None] 11.0 [None]\n"
    assert second.calls[0]["gpm_mig_sample"] >= 2
    assert second.calls[0]["gpm_sample"] == 0


def test_memory_stays_bounded_and_the_newest_samples_are_kept(run: Run) -> None:
    done = run(
        FULL,
        """
        gauges = KeptGauges(Device(nvml_ns=10 * MS, host_ns=None), slots=40)
        gauges.find_gauges()
        gauges.begin()
        until(lambda: gauges.losses())
        gauges.stop()
        times = [s.at_ns for s in gauges.samples(0, 1 << 62)]
        lost = gauges.losses()["samples of gauges overwritten by newer ones"]
        last = max(times)
        print(len(times), lost >= 1, {s.at_ns for s in gauges.samples(last, last + 1)} == {last}, gauges.samples(0, 1))
        """,
    )
    assert done.output == "40 True True []\n"


# -------------------------------------------------------------------- which devices

A, B, C = NvmlDevice("a", "GPU-aaaa-1"), NvmlDevice("b", "GPU-aabb-2"), NvmlDevice("c", "GPU-cccc-3")
ONE, OTHER = NvmlDevice("i", "MIG-iiii"), NvmlDevice("j", "MIG-jjjj")
SPLIT = NvmlDevice("s", "GPU-ssss", instances=[ONE, OTHER])


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, [A, B, C]),
        ("", []),
        ("0", [A]),
        ("2,0", [C, A]),
        (" 1 , 2", [B, C]),
        ("1gpu,2x", [B, C]),
        ("0,-1,2", [A]),
        ("0,9,2", [A]),
        ("0,nothing,2", [A]),
        ("1,1", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("GPU-cccc-3", [C]),
        ("GPU-c,GPU-aaaa", [C, A]),
        ("GPU-aa", []),
        ("GPU-cccc,0", [C]),
        ("GPU-c,GPU-cc", []),
        ("GPU-zzzz", []),
        ("MIG-iiii", []),
    ],
)
def test_the_devices_are_those_that_cuda_would_show(variable: str | None, expected: list[NvmlDevice]) -> None:
    assert select_visible_gpus(variable, [A, B, C]) == expected


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, [ONE]),  # one instance, and no whole GPU beside it
        ("0", [A]),
        ("1", [ONE]),
        ("0,1", [ONE]),
        ("GPU-ssss", [ONE]),
        ("MIG-jjjj", [OTHER]),
        ("MIG-j,MIG-i", [OTHER]),
        ("MIG-", []),
    ],
)
def test_cuda_shows_the_first_mig_instance(variable: str | None, expected: list[NvmlDevice]) -> None:
    assert select_visible_gpus(variable, [A, SPLIT]) == expected


def test_numbers_follow_the_pci_bus_and_a_variable_that_is_set_late(run: Run) -> None:
    done = run(
        TWO,
        """
        gauges = KeptGauges(Device(nvml_ns=20 * MS, host_ns=None))
        gauges.find_gauges()
        gauges.begin()
        until(gauges.gpus)
        print([(gpu.device, gpu.uuid) for gpu in gauges.gpus()])
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"
        until(lambda: len(gauges.gpus()) == 1)
        print([(gpu.device, gpu.uuid) for gpu in gauges.gpus()])
        os.environ["CUDA_VISIBLE_DEVICES"] = "GPU-none"
        until(lambda: not gauges.gpus())
        gauges.stop()
        print(*gauges.notes())
        """,
    )
    assert done.output.splitlines() == [
        "[(0, 'GPU-aaaa'), (1, 'GPU-bbbb')]",
        "[(0, 'GPU-bbbb')]",
        "device.nvml: CUDA_VISIBLE_DEVICES='GPU-none' shows none of 2 GPUs; no GPU is read",
    ]


def test_gpus_of_several_models_may_be_numbered_otherwise_by_cuda_and_that_is_said(run: Run) -> None:
    script = "gpu GPU-aaaa 10 NVIDIA T4\ngpu GPU-bbbb 20 NVIDIA H200\n"
    program = "print(*read(1).notes())"
    assert "fastest first by CUDA; CUDA_DEVICE_ORDER=PCI_BUS_ID makes both the same" in run(script, program).output
    assert run(script, program, CUDA_DEVICE_ORDER="PCI_BUS_ID").output == "\n"


# -------------------------------------------------------------------- without


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (12, "NVML: NVML Shared Library Not Found (libnvidia-ml.so.1 is not found)"),
        (9, "NVML: Driver Not Loaded (the NVIDIA kernel driver is not loaded, or the container has no access)"),
        (18, "NVML: RM has detected an NVML/RM version mismatch. (the driver was upgraded while"),
        (4, "NVML: Insufficient Permissions (this user may not open the NVIDIA devices; see /dev/nvidia*)"),
        (15, "NVML: GPU is lost (a GPU has fallen off its bus; reset it or restart the machine)"),
        (999, "NVML: Unknown Error"),
    ],
)
def test_one_line_names_the_reason_if_nvml_does_not_start(run: Run, code: int, reason: str) -> None:
    done = run(
        f"init {code}\n",
        """
        gauges = KeptGauges(Device())
        gauges.find_gauges()
        gauges.begin()
        until(lambda: not threads())
        print(*gauges.notes(), gauges.samples(0, 1 << 62), sep="\\n")
        gauges.stop()
        """,
    )
    note, samples = done.output.splitlines()
    assert note.startswith(f"device.nvml: {reason}")
    assert samples == "[]"
    assert done.calls[0] == {"init": 1}
    checked = run(f"init {code}\n", "", arguments=("-m", "instrument", "check", profile_beside(run)))
    assert f"gauges of GPUs: not read ({reason}" in checked.output


def profile_beside(_: Run) -> str:
    return os.devnull


def test_a_driver_without_a_gpu_says_so(run: Run) -> None:
    program = """
        gauges = KeptGauges(Device(nvml_ns=20 * MS))
        gauges.find_gauges()
        gauges.begin()
        until(lambda: not threads())
        gauges.stop()
        print(*gauges.notes())
    """
    assert run("", program).output == "device.nvml: NVML: there is a driver, and no GPU\n"


def test_a_driver_that_is_exchanged_while_it_runs_ends_the_reading(run: Run) -> None:
    done = run(
        FULL + "\n0.all 18 @3\n",
        """
        gauges = KeptGauges(Device(nvml_ns=20 * MS))
        gauges.find_gauges()
        gauges.begin()
        until(lambda: not threads())
        print(len(values(gauges, "memory_used")), *gauges.notes())
        gauges.stop()
        """,
    )
    assert done.output.startswith("2 device.nvml: NVML: RM has detected an NVML/RM version mismatch.")
    assert done.output.endswith("the GPUs are not read any more\n")


def test_other_code_that_shuts_nvml_down_is_outlived(run: Run) -> None:
    done = run(
        FULL,
        """
        import pynvml
        gauges = KeptGauges(Device(nvml_ns=20 * MS))
        gauges.find_gauges()
        gauges.begin()
        until(lambda: values(gauges, "memory_used"))
        pynvml.nvmlShutdown()
        before = len(values(gauges, "memory_used"))
        until(lambda: len(values(gauges, "memory_used")) > before + 2)
        gauges.stop()
        print(gauges.notes())
        """,
    )
    assert done.output == "[]\n"
    assert done.calls[0]["init"] == 2


def test_without_nvidias_bindings_a_driver_is_named_with_what_to_install(run: Run) -> None:
    done = run(
        FULL,
        """
        sys.modules["pynvml"] = None
        gauges = KeptGauges(Device())
        gauges.find_gauges()
        gauges.begin()
        print(threads(), *gauges.notes())
        """,
    )
    assert done.output.startswith("[] device.nvml: there is an NVIDIA driver, but not its Python bindings (")
    assert done.output.endswith("; install instrument-sdk[cuda]\n")


def test_bindings_that_are_too_old_are_named_with_what_to_install(run: Run, tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("def nvmlInit(): pass\n")
    program = """
        gauges = KeptGauges(Device())
        gauges.find_gauges()
        gauges.begin()
        print(threads(), *gauges.notes())
    """
    done = run(FULL, program)
    expected = f"[] device.nvml: the bindings {tmp_path}/pynvml.py are too old; install nvidia-ml-py>=12.550\n"
    assert done.output == expected


def no_driver(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Take the NVIDIA driver away, if there is one. Return the libraries that were asked for."""
    asked: list[str] = []

    def refuse(name: str, _: int) -> None:
        asked.append(name)
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(gpu_gauges, "dlopen", refuse)
    return asked


@pytest.mark.parametrize(
    ("text", "notes"),
    [
        ("device: {cuda: off}", []),
        ("device: {cuda: off, nvml: auto}", []),
        ("device: {cuda: off, nvml: off}", []),
        ("device: {cuda: off, nvml: 1s}", [f"device.nvml: {gpu_gauges.NO_DRIVER}"]),
    ],
)
def test_a_machine_without_a_driver_starts_no_thread_and_says_why_where_it_was_asked(
    monkeypatch: pytest.MonkeyPatch, text: str, notes: list[str]
) -> None:
    asked = no_driver(monkeypatch)
    before = {*threading.enumerate()}
    session = instrument.start(loads(text, environ={}))
    assert session is not None
    try:
        assert {*threading.enumerate()} <= before
        assert session.notes() == notes
        assert session.trace().samples == []
        assert asked == ([] if "nvml: off" in text else ["libnvidia-ml.so.1"])
    finally:
        instrument.stop()
    assert session.notes() == notes


def test_a_machine_without_a_driver_does_not_import_nvidias_bindings() -> None:
    program = "import sys, instrument; instrument.start(); instrument.stop(); print('pynvml' in sys.modules)"
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has a driver")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# -------------------------------------------------------------------- the host


def test_the_host_is_read_without_any_gpu_where_the_profile_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    no_driver(monkeypatch)
    session = instrument.start(loads("device: {host: 50ms}", environ={}))
    assert session is not None
    try:
        assert [t.name for t in threading.enumerate() if t.name.startswith("instrument")] == ["instrument-nvml"]
        until(lambda: len(session.trace().samples) > 6)
    finally:
        instrument.stop()
    samples = session.trace().samples
    assert {(s.name, s.device) for s in samples} == {(name, HOST) for name in [*GAUGES][:7]}
    assert samples == sorted(samples, key=lambda s: (s.at_ns, s.device, s.name))
    told = [s for s in samples if s.value is not None]
    assert all(s.value is not None and s.value >= 0 for s in told)
    # The machine's clock ticks every 10 ms, so that between two readings it may not have moved.
    assert {s.name for s in samples if s.value is None} <= {"system_cpu"}
    assert session.cost().thread_ns > 0
    first = session.recorded.start_ns
    assert session.trace(first, first + 1).samples == []


def test_processor_time_of_the_process_is_counted_by_its_own_clock() -> None:
    host = Host()
    spent_ns, began_ns = time.process_time_ns(), time.monotonic_ns()
    while time.process_time_ns() - spent_ns < 30 * MS:
        pass
    now_ns = time.monotonic_ns()
    values = host.read(now_ns, rarely=True)
    spent_ns, elapsed_ns = time.process_time_ns() - spent_ns, now_ns - began_ns
    share = values["process_cpu"]
    assert share is not None
    assert 0 < share <= 100 * spent_ns / (elapsed_ns - 30 * MS) if elapsed_ns > 60 * MS else share > 0
    again = host.read(time.monotonic_ns() + 10**9, rarely=False)
    assert again["process_cpu"] is not None
    assert again["process_cpu"] < share, "only what was spent since the reading before"
    assert "cores" not in again


def test_the_host_agrees_with_psutil() -> None:
    psutil = pytest.importorskip("psutil")
    values = Host().read(time.monotonic_ns() + 1, rarely=True)
    resident = psutil.Process().memory_info().rss
    assert values["process_memory"] is not None
    assert abs(values["process_memory"] - resident) < 64 << 20
    assert values["cores"] is not None
    assert 0 < values["cores"] <= len(psutil.Process().cpu_affinity())


def test_waits_for_a_processor_and_for_memory_are_read_as_shares_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_proc(tmp_path, monkeypatch, "", cgroup="0::/box\n")
    threads, group = tmp_path / "proc/self/task", tmp_path / "cgroup/box"
    group.mkdir(parents=True)

    def waited(memory_us: int, **wait_ns: int) -> None:
        (group / "memory.pressure").write_text(f"some avg10=0.00 total={memory_us}\nfull avg10=0.00 total=7\n")
        for name, ns in wait_ns.items():
            (threads / name).mkdir(parents=True, exist_ok=True)
            (threads / name / "schedstat").write_text(f"5 {ns} 1\n")

    waited(0, main=5 * MS)
    host = Host()
    waited(100_000, main=255 * MS, worker=250 * MS)
    for name in map(str, range(40)):  # threads that end while they are read
        (threads / name).mkdir()
    values = host.read(host._at_ns + 1000 * MS, rarely=False)
    assert (values["cpu_wait"], values["memory_pressure"]) == (50.0, 10.0)
    values = host.read(host._at_ns + 1000 * MS, rarely=False)
    assert (values["cpu_wait"], values["memory_pressure"]) == (0.0, 0.0)
    (tmp_path / "proc/stat").write_text("cpu  0 0 0 0 0 0 0 0\n")
    host = Host()
    (tmp_path / "proc/stat").write_text("cpu  30 0 0 50 0 0 0 20\n")  # the hypervisor took 20 of 50 busy ticks
    monkeypatch.setattr(host, "_read_processor_ns", lambda: host._process_ns + 300 * MS)
    assert host.read(host._at_ns + 1000 * MS, rarely=False)["cpu_wait"] == pytest.approx(20.0)


def test_the_peak_of_resident_memory_outlives_what_no_reading_saw() -> None:
    program = """if True:
        import time
        from instrument.device.gauge_thread import Gone, Host
        host = Host()
        block = bytearray(b"x") * (96 << 20)
        del block
        print(*(host.read(time.monotonic_ns(), False)[name] for name in ("process_memory", "process_memory_peak")))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    now, peak = map(float, done.stdout.split())
    assert peak > 96 << 20 > now


def made_proc(folder: Path, monkeypatch: pytest.MonkeyPatch, stat: str, **files: str) -> None:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/stat").write_text(stat)
    for name, text in files.items():
        (folder / "proc/self" / name).write_text(text)
    monkeypatch.setattr(host_room, "PROC", folder / "proc")
    monkeypatch.setattr(environment, "PROC", folder / "proc")
    monkeypatch.setattr(environment, "CONTROL_GROUPS", folder / "cgroup")


def test_processor_time_of_the_machine_counts_guests_once_and_waiting_for_disks_as_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_proc(tmp_path, monkeypatch, "cpu  100 10 50 1000 40 5 5 10 60 6\ncpu0 1 1 1 1\n", statm="9 3 1 1 0 5 0\n")
    host = Host()
    (tmp_path / "proc/stat").write_text("cpu  130 20 60 1040 50 5 5 10 90 6\ncpu0 1 1 1 1\n")
    values = host.read(time.monotonic_ns() + 1, rarely=False)
    assert values["system_cpu"] == 50.0  # 30 + 10 + 10 busy of 100
    assert values["process_memory"] == 3 * os.sysconf("SC_PAGE_SIZE")
    assert host.read(time.monotonic_ns() + 2, rarely=False)["system_cpu"] is None, "no time has passed"


@pytest.mark.parametrize("stat", ["", "cpu  x y", "intr 1 2 3"])
def test_facts_missing_in_proc_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stat: str) -> None:
    made_proc(tmp_path, monkeypatch, stat, statm="torn")
    values = Host().read(time.monotonic_ns() + 1, rarely=True)
    assert [values[name] for name in ("system_cpu", "process_memory", "process_memory_peak")] == [None] * 3
    (tmp_path / "proc/self/status").write_text("VmHWM: 3 kB\nName:\tx\nVmHWM:\t     123 kB\nVmRSS:\t 9 kB\n")
    assert Host().read(time.monotonic_ns() + 1, rarely=True)["process_memory_peak"] == 123 * 1024


def test_without_proc_only_the_time_of_the_process_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_room, "PROC", tmp_path)
    values = Host().read(time.monotonic_ns() + 1, rarely=True)
    assert (values["system_cpu"], values["process_memory"]) == (None, None)
    assert values["process_cpu"] is not None


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/pod/one\n", {"pod/one/cpu.max": "max 100000", "pod/cpu.max": "25000 100000"}, 0.25),
        ("0::/pod/one\n", {}, None),
        (
            "4:cpu,cpuacct:/docker/x\n0::/\n",
            {"cpu/docker/x/cpu.cfs_quota_us": "75000", "cpu/docker/x/cpu.cfs_period_us": "100000"},
            0.75,
        ),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("4:memory:/\n", {"cpu/cpu.cfs_quota_us": "1", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_cores_are_what_affinity_and_control_groups_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: dict[str, str], expected: float | None
) -> None:
    made_proc(tmp_path, monkeypatch, "", cgroup=groups)
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text)
    assert environment.count_usable_cores() == (len(os.sched_getaffinity(0)) if expected is None else expected)


# -------------------------------------------------------------------- from outside


def test_the_host_reports_the_same_of_a_process_from_outside_as_that_process_of_itself() -> None:
    inside, outside = Host(), Host(os.getpid())
    worked = time.process_time() + 0.5  # the system counts in steps of 10 ms
    while time.process_time() < worked:
        pass
    now_ns = time.monotonic_ns()
    own, told = inside.read(now_ns, rarely=True), outside.read(now_ns, rarely=True)
    assert list(told) == list(own)
    assert told["cores"] == own["cores"]
    assert told["process_memory_peak"] == pytest.approx(own["process_memory_peak"], rel=0.01)  # the first read counts
    assert told["process_cpu"] == pytest.approx(own["process_cpu"], rel=0.2)
    assert told["process_memory"] == pytest.approx(own["process_memory"], rel=0.01)


def test_an_ended_process_that_is_not_reaped_has_no_facts() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    host = Host(child.pid)
    assert host.read(time.monotonic_ns(), rarely=False)["process_memory"]
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(Gone):
        host.read(time.monotonic_ns(), rarely=False)
    child.communicate()
    with pytest.raises(Gone):
        Host(child.pid)


def test_readings_that_another_process_writes_are_those_of_the_process() -> None:
    RECORDER.begin_recording(1 << 20, {})
    add_samples(RECORDER.find_part_memory("samples"), [Sample("process_memory", HOST, 1, 5)])
    with closing(GaugePlace(RECORDER.memory_fd)) as place:
        assert place.acquire()
        assert place.add_readings([Sample("memory_used", 0, 3, 7), Sample("power", 0, 3, None)])
        with closing(GaugePlace(RECORDER.memory_fd)) as other:
            assert not other.acquire()
            assert other.is_taken()
        add_samples(RECORDER.find_part_memory("samples"), [Sample("process_cpu", HOST, 2, 50.5)])
        with closing(Mapped(RECORDER.memory_fd)) as mapped:
            for reader in (mapped, RECORDER.make_reader()):
                assert reader.read_samples() == [
                    Sample("process_memory", HOST, 1, 5),
                    Sample("process_cpu", HOST, 2, 50.5),
                    Sample("memory_used", 0, 3, 7),
                    Sample("power", 0, 3, None),
                ]
                assert [one.at_ns for one in reader.read_samples(2)] == [2, 3, 3]
        RECORDER.begin_recording(1 << 20, {})
        assert not place.add_readings([Sample("memory_used", 0, 4, 7)]), "another session records there"


# -------------------------------------------------------------------- the thread


def test_the_thread_ends_with_a_last_reading_and_a_second_stop_does_nothing() -> None:
    gauges = begin(Device(nvml_ns=None, host_ns=3600 * 10**9))
    gauges.stop()
    assert {s.name for s in gauges.samples(0, 1 << 62)} == set([*GAUGES][:7])
    gauges.stop()
    assert gauges.thread_ns > 0


def test_a_fault_in_the_thread_is_counted_and_reading_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    reads: list[int] = []
    right = Host.read

    def fail_twice(host: Host, now_ns: int, rarely: bool) -> dict[str, float | None]:
        reads.append(now_ns)
        if len(reads) <= 2:
            raise OSError("the machine is odd")
        return right(host, now_ns, rarely)

    monkeypatch.setattr(Host, "read", fail_twice)
    gauges = begin(Device(nvml_ns=None, host_ns=10 * MS))
    until(lambda: gauges.samples(0, 1 << 62))
    gauges.stop()
    assert FAULTS.count_by_place() == {"reading of gauges": 2}
    FAULTS.clear()


def test_a_driver_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "STOP_S", 0.05)
    inside, hangs = threading.Event(), threading.Event()

    def read(*_: object) -> dict[str, float | None]:
        inside.set()
        hangs.wait(60)
        return {}

    monkeypatch.setattr(Host, "read", read)
    gauges = begin(Device(nvml_ns=None, host_ns=10 * MS))
    assert inside.wait(60)
    thread = gauges._thread
    gauges.stop()
    assert thread is not None
    assert thread.is_alive()
    assert ["still inside of the driver" in note for note in gauges.notes()] == [True]
    hangs.set()
    thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_opens_nvml_for_itself_and_the_parent_reads_on(run: Run) -> None:
    done = run(
        FULL,
        """
        from instrument.profile.keys import loads
        session = instrument.start(loads("device: {cuda: off, nvml: 20ms}", environ={}))
        def used():
            return [s.at_ns for s in session.trace().samples if s.name == "memory_used"]
        until(used)
        forked_ns = time.monotonic_ns()
        child = os.fork()
        until(lambda: len([at for at in used() if at > forked_ns]) > 2)
        if not child:
            assert min(used()) > forked_ns, "what the parent read is not the child's"
            assert threads() == ["instrument-nvml"]
        instrument.stop()
        assert not threads() and not session.notes(), session.notes()
        if not child:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """,
    )
    parent, child = done.calls
    assert parent["init"] == parent["shutdown"] == 1
    assert child["init"] == 1, "its own"
    assert child["gpm_alloc"] == 2
    assert child["shutdown with samples"] == 1, "and what the parent opened is left to the parent"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_of_a_process_that_hangs_in_the_driver_leaves_nvml_alone(run: Run) -> None:
    done = run(
        FULL,
        """
        from instrument.device import gauge_thread as room
        from instrument.device.gpu_gauges import Nvml
        room.FORK_WAIT_S = room.STOP_S = 0.05
        inside, hangs = threading.Event(), threading.Event()
        def hang(*_):
            inside.set()
            hangs.wait(60)
            return []
        Nvml.read = hang
        gauges = KeptGauges(Device(nvml_ns=10 * MS, host_ns=10 * MS))
        gauges.find_gauges()
        gauges.begin()
        until(inside.is_set)
        child = os.fork()
        if not child:
            gauges.after_fork_in_child()
            until(lambda: values(gauges, "process_cpu", HOST))
            if not os.fork():
                gauges.after_fork_in_child()
                until(lambda: values(gauges, "process_cpu", HOST))
                gauges.stop()
                print(*gauges.notes(), flush=True)
                os._exit(0)
            assert os.wait()[1] == 0
            gauges.stop()
            print(*gauges.notes(), flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        hangs.set()
        gauges.stop()
        """,
    )
    assert done.output == "device.nvml: a fork came while it was in use; this child does not read GPUs\n" * 2
    assert len(done.calls) == 1


def test_a_session_leaves_the_gauges_of_its_gpus_in_its_trace_file(run: Run, tmp_path: Path) -> None:
    profile = tmp_path / "p.yaml"
    profile.write_text("device: {cuda: off, nvml: 20ms}\nexport: {chrome: {path: '{pid}.json'}}\n")
    script = tmp_path / "service.py"
    # GPM's first value is the difference of two samples; when the second value comes, the first is kept.
    script.write_text(
        "import os, pathlib, time, instrument\n"
        "calls = pathlib.Path(os.environ['FAKE_NVML_LOG'])\n"
        "deadline = time.monotonic() + 60\n"
        "with instrument.scope('work'):\n"
        "    while not calls.exists() or calls.read_text().count('gpm_metrics') < 2:\n"
        "        assert time.monotonic() < deadline\n"
        "        time.sleep(0.01)\n"
    )
    run(FULL, "", arguments=("-m", "instrument", "run", "--profile", str(profile), "--", str(script)))
    (path,) = tmp_path.glob("*.json")
    trace, _ = chrome.load(path)
    assert trace.gpus == (Gpu(0, "NVIDIA H200", "GPU-aaaa"),)
    read = {(sample.name, sample.device) for sample in trace.samples}
    assert {("utilization", 0), ("sm_active", 0), ("energy", 0), ("process_cpu", HOST), ("cores", HOST)} <= read
    assert (trace.notes, dict(trace.losses)) == ((), {})
    lines = device(Recording.from_trace(trace), Options()).lines()
    assert any(line.startswith("GPU 0         utilization           %") for line in lines)
    assert "GPU 0: NVIDIA H200, GPU-aaaa" in lines


# -------------------------------------------------------------------- a real card


@pytest.mark.gpu
def test_a_real_gpu_reads_as_nvidia_smi_does() -> None:
    program = shutil.which("nvidia-smi")
    if program is None:
        pytest.skip("no NVIDIA GPU")
    pytest.importorskip("pynvml")
    keys = "uuid,name,memory.total,memory.used,temperature.gpu,clocks.sm,power.draw"
    asked = [program, f"--query-gpu={keys}", "--format=csv,noheader,nounits"]
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    told = subprocess.run(asked, capture_output=True, text=True, check=True, env=environ).stdout
    cards = {line.split(", ")[0]: line.split(", ")[1:] for line in told.splitlines()}
    gauges = begin(Device(nvml_ns=200 * MS, host_ns=AUTO_NS))
    until(lambda: len([s for s in gauges.samples(0, 1 << 62) if s.name == "memory_used"]) >= 5 * len(gauges.gpus()) > 0)
    gauges.stop()
    assert gauges.notes() == []
    samples = gauges.samples(0, 1 << 62)
    newest = {(s.name, s.device): s.value for s in samples}
    print(json.dumps({f"{name} {device}": value for (name, device), value in newest.items()}, indent=1))
    print("thread ms for", len({s.at_ns for s in samples}), "readings:", gauges.thread_ns / 1e6)
    for gpu in gauges.gpus():
        if gpu.uuid.startswith("MIG-"):
            continue
        model, total, used, temperature, _, power = cards[gpu.uuid]
        assert gpu.model == model
        assert newest["memory_total", gpu.device] == pytest.approx(float(total) * 2**20, rel=0.001)
        assert newest["memory_used", gpu.device] == pytest.approx(float(used) * 2**20, abs=2 * 2**30)
        assert newest["temperature", gpu.device] == pytest.approx(float(temperature), abs=25)
        assert newest["power", gpu.device] == pytest.approx(float(power), rel=1, abs=100)
        assert 0 <= (newest["utilization", gpu.device] or 0) <= 100


@pytest.mark.parametrize(
    ("group", "files", "limit"),
    [
        ("0::/a/b", {"a/memory.max": "4096000\n", "a/b/memory.max": "max\n"}, 4096000),
        ("4:memory:/a\n7:cpu:/a", {"memory/a/memory.limit_in_bytes": "8192000\n"}, 8192000),
        ("0::/a", {"a/memory.max": f"{1 << 62}\n"}, None),
        ("", {}, None),
    ],
)
def test_memory_is_what_the_machine_or_the_control_groups_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, files: dict[str, str], limit: int | None
) -> None:
    made_proc(tmp_path, monkeypatch, "", cgroup=group)
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert environment.measure_usable_memory_bytes() == (limit or machine)
