"""The CUDA driver of `fake_driver.c` for tests: built, loaded beneath the real bindings, scripted and read.

A test that needs a CUDA driver is marked, mostly a whole module at once, and asks for the fixture of the same name:

    from driver import value

    cuda = pytest.importorskip("cuda.bindings.driver")
    pytestmark = pytest.mark.fake_driver

    def test_an_event_is_done_when_its_stream_reaches_it(fake_driver: FakeDriver) -> None:
        value(cuda.cuInit(0))
        ...

Marked tests run in a process of their own, one for all of a module, because libcuda.so.1 cannot be unloaded and the
other tests must go on finding no driver. There, the fake is loaded before anything looks for the driver; glibc gives
every later `dlopen("libcuda.so.1")` the library of that soname, also on a machine with a real driver. The process sends
back a report of each test as it ends, so that they are selected, counted and shown as if they had run in this one. The
module is imported here as well, to be collected: it must not call the driver while it is imported.

The fixture gives the driver as a fresh process finds it: virtual time, two devices, nothing initialised. Function
pointers stay where the bindings found them, so what is decided when they look (an old driver, missing functions) needs
a process of its own: `environment`.

To run marked tests in this process, with a debugger say: FAKE_DRIVER=here python -m pytest --pdb tests/test_x.py
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import pytest

SOURCE = Path(__file__).with_name("fake_driver.c")
HERE = "here"


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fake_driver."))
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    return folder


def _compiler() -> str | None:
    return shutil.which("gcc") or shutil.which("cc")


@functools.cache
def why_not() -> str:
    """Return the reason why the fake driver cannot be used on this machine, empty if it can."""
    if sys.platform != "linux":
        return "the fake CUDA driver is for Linux"
    if _compiler() is None:
        return "no gcc to build the fake CUDA driver with"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed"
    return ""


@functools.cache
def library(*missing: str) -> Path:
    """The fake driver's file, built once a process; without the functions named as missing."""
    folder = _folder() / (".".join(missing) or "all")
    folder.mkdir()
    target = folder / "libcuda.so.1"
    command = [_compiler(), "-O2", "-g", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread"]
    if missing:
        script = folder / "symbols"
        script.write_text("{ local: " + " ".join(f"{name};" for name in missing) + " };")
        command.append(f"-Wl,--version-script={script}")
    subprocess.run([*command, "-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1", "-o", target, SOURCE, "-ldl"], check=True)
    return target


def environment(*, missing: tuple[str, ...] = (), version: int = 13000, devices: int = 2) -> dict[str, str]:
    """Return the variables that make a program find the fake driver, in real time, as its CUDA driver."""
    return {
        "LD_LIBRARY_PATH": str(library(*missing).parent),
        "CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING": "1",
        "FAKE_DRIVER_VERSION": str(version),
        "FAKE_DRIVER_DEVICES": str(devices),
    }


def value(result: tuple[Any, ...]) -> Any:
    """Return the value of a call of cuda.bindings after checking its status."""
    assert int(result[0]) == 0, result
    return result[1] if len(result) == 2 else result[1:]


class Counts(NamedTuple):
    """The counts of the driver since it was reset. Built-in streams are not counted."""

    live_events: int
    events_created: int
    live_streams: int
    live_contexts: int
    contexts_created: int
    captured_records: int
    """Events recorded in a stream that was capturing."""
    captures_killed: int
    forked_calls: int
    """Calls that processes forked from an initialised one have made, here and in the children."""
    threads: int
    """Threads that have called, ever."""


class FakeDriver:
    """The script of the fake driver, and what it has seen. Times are of the host, in ns, where no device is named."""

    def __init__(self, path: Path) -> None:
        self.path = path
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self.library = library
        number, text = ctypes.c_int64, ctypes.c_char_p
        for name, result, *arguments in [
            ("reset", None, ctypes.c_bool, ctypes.c_int, ctypes.c_int),
            ("now_ns", number),
            ("advance", None, number),
            ("device_now_ns", number, ctypes.c_int),
            ("set_offset", None, ctypes.c_int, number),
            ("set_drift", None, ctypes.c_int, number),
            ("set_device", None, ctypes.c_int, number, number, number, ctypes.c_int),
            ("launch", ctypes.c_int, ctypes.c_void_p, number, ctypes.POINTER(number)),
            ("event_host_ns", ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(number)),
            ("fail", ctypes.c_int, text, ctypes.c_int, number, number),
            ("cost", ctypes.c_int, text, number),
            ("close", ctypes.c_int, text, ctypes.c_int),
            ("reuse_streams", None, ctypes.c_int),
            ("break_device", None, ctypes.c_int, ctypes.c_int, number),
            ("destroy_context", None, ctypes.c_void_p),
            ("limit_events", None, number),
            ("limit_queue", None, number),
            ("symbol", text, ctypes.c_int),
            ("calls", number, ctypes.c_int, ctypes.c_int),
            ("forget_calls", None),
            ("counts", None, ctypes.POINTER(number)),
        ]:
            function = getattr(library, f"fake_{name}")
            function.restype, function.argtypes = result, arguments
        self.symbols: dict[str, int] = {}
        while found := library.fake_symbol(len(self.symbols)):
            self.symbols[found.decode()] = len(self.symbols)

    def reset(self, *, virtual: bool = True, devices: int = 2, version: int = 13000) -> None:
        """Forgets everything: handles are void, no thread has a context, nothing is initialised or scripted."""
        self.library.fake_reset(virtual, devices, version)

    # Time

    def now_ns(self) -> int:
        """The host's clock: the virtual one, or `time.monotonic_ns()`. May stand for a clock of the code under test."""
        return int(self.library.fake_now_ns())

    def advance(self, ns: int) -> None:
        """Lets virtual time pass."""
        self.library.fake_advance(ns)

    def device_now_ns(self, device: int = 0) -> int:
        return int(self.library.fake_device_now_ns(device))

    def set_clock(self, device: int = 0, *, offset_ns: int | None = None, drift_ppm: float | None = None) -> None:
        """Set the device clock's lead over the host's, and the rate at which it grows from now on."""
        if offset_ns is not None:
            self.library.fake_set_offset(device, offset_ns)
        if drift_ppm is not None:
            self.library.fake_set_drift(device, round(drift_ppm * 1000))

    def set_device(
        self,
        device: int = 0,
        *,
        event_ns: int = -1,
        latency_ns: int = -1,
        tick_ns: int = -1,
        shared: bool | None = None,
        one_queue: bool | None = None,
    ) -> None:
        """Change the given settings of a device, and keep the other settings.

        event_ns: the time of a record on its stream, and so the least difference between two consecutive records (0).
        latency_ns: the time from a call to its arrival at the device (0).
        tick_ns: the resolution of the device's time stamps (500).
        shared: kernels of all streams run one at a time in the order of their launch, instead of in parallel (False).
            A kernel whose stream still waits delays the kernels after it, too.
        one_queue: the same, and events also wait in that queue, as with CUDA_DEVICE_MAX_CONNECTIONS=1 (False).
        """
        one_at_a_time = -1 if shared is None and one_queue is None else 2 if one_queue else int(bool(shared))
        self.library.fake_set_device(device, event_ns, latency_ns, tick_ns, one_at_a_time)

    # Work

    def launch(self, stream: Any, work_ns: int) -> int:
        """Enqueues a kernel that takes `work_ns` of the device: when it will be done, or 0 if it was captured."""
        until = ctypes.c_int64()
        result = self.library.fake_launch(int(stream), work_ns, ctypes.byref(until))
        assert result == 0, f"the launch failed with {result}"
        return until.value

    def done_ns(self, event: Any) -> int:
        """Return the time at which a recorded event is done, past or to come."""
        at = ctypes.c_int64()
        result = self.library.fake_event_host_ns(int(event), ctypes.byref(at))
        assert result == 0, f"{event!r} was not recorded"
        return at.value

    # Trouble

    def fail(self, symbol: str, code: int, times: int = 1, skip: int = 0) -> None:
        """After `skip` more calls, the next `times` of a function do nothing and answer `code`; -1: all."""
        self.symbols[symbol]
        self.library.fake_fail(symbol.encode(), code, times, skip)

    def cost(self, symbol: str, ns: int) -> None:
        """Let each call of a function take that time of the host first: virtual time passes, or the thread sleeps."""
        self.symbols[symbol]
        self.library.fake_cost(symbol.encode(), ns)

    @contextmanager
    def closed(self, symbol: str) -> Iterator[None]:
        """Calls of a function wait meanwhile, as one that finds its launch queue full does."""
        self.symbols[symbol]
        self.library.fake_close(symbol.encode(), 1)
        try:
            yield
        finally:
            self.library.fake_close(symbol.encode(), 0)

    def reuse_streams(self) -> None:
        """From now on a new stream gets the handle of one that was destroyed, and a number of its own."""
        self.library.fake_reuse_streams(1)

    def break_device(self, code: int = 700, device: int = 0, after_ns: int = 0) -> None:
        """A sticky error: from now, or some time later, all calls about the device answer `code` for ever."""
        self.library.fake_break_device(device, code, after_ns)

    def destroy_context(self, context: Any) -> None:
        """Some other part of the process destroys a context, or resets the device whose primary one it is."""
        self.library.fake_destroy_context(int(context))

    def limit_queue(self, limit: int) -> None:
        """Bound the work of a stream that waits for the device: a launch or record waits for room then.

        To be said before any stream has work. In virtual time the wait is a jump.
        """
        self.library.fake_limit_queue(limit)

    def limit_events(self, limit: int) -> None:
        """Bound the number of live events: beyond it cuEventCreate is out of memory."""
        self.library.fake_limit_events(limit)

    # What was seen

    def calls(self, symbol: str, thread: int | None = None) -> int:
        """Return the calls of a function, of one thread by its native id if one is given.

        The names are those of cuda.h, without `_v2`. Kernels of `launch` count as cuLaunchKernel, and copies of every
        direction as cuMemcpy or cuMemcpyAsync.
        """
        return int(self.library.fake_calls(self.symbols[symbol], thread or 0))

    def called(self, thread: int | None = None) -> dict[str, int]:
        """All functions that were called, and how often."""
        counted = {symbol: self.calls(symbol, thread) for symbol in self.symbols}
        return {symbol: calls for symbol, calls in counted.items() if calls}

    def synchronised(self, thread: int | None = None) -> int:
        """Calls that wait for a device, the service's own among them."""
        return sum(calls for symbol, calls in self.called(thread).items() if symbol.endswith("Synchronize"))

    def forget_calls(self) -> None:
        self.library.fake_forget_calls()

    def counts(self) -> Counts:
        counts = (ctypes.c_int64 * len(Counts._fields))()
        self.library.fake_counts(counts)
        return Counts(*counts)


# The part that pytest runs, as a plugin of tests/conftest.py.

_REPORTS = "FAKE_DRIVER_REPORTS"
_SELECTED = "FAKE_DRIVER_SELECTED"
_loaded: FakeDriver | None = None
_children: dict[Path, _Child] = {}


@pytest.fixture
def fake_driver() -> Iterator[FakeDriver]:
    """The fake driver, in virtual time, with two devices and nothing initialised."""
    if _loaded is None:
        pytest.fail("a test with a fake driver needs pytest.mark.fake_driver", pytrace=False)
    _loaded.reset()
    yield _loaded
    _loaded.reset()


class _Reporter:
    """In the process of its own: runs what was selected and nothing else, and reports each phase of it by a pipe."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.pipe = os.fdopen(int(os.environ.pop(_REPORTS)), "w")
        os.set_inheritable(self.pipe.fileno(), False)
        self.selected: list[str] = json.loads(Path(os.environ.pop(_SELECTED)).read_text())

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {item.nodeid: item for item in items}
        items[:] = [found[nodeid] for nodeid in self.selected if nodeid in found]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.pipe.write(json.dumps(data, default=str) + "\n")
        self.pipe.flush()


class _Child:
    """A process that runs the marked tests of one module, and what it has reported."""

    def __init__(self, config: pytest.Config, path: Path, items: list[pytest.Item]) -> None:
        self.config = config
        self.path = path
        self.left = {item.nodeid: item for item in items}
        self.reports: dict[str, list[pytest.TestReport]] = {nodeid: [] for nodeid in self.left}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 read when the process has ended
        selected = _folder() / "selected.json"
        selected.write_text(json.dumps(list(self.left)))
        here, there = os.pipe()
        command = [sys.executable, "-m", "pytest", "-pno:cacheprovider", "--color=no"]
        command += [f"--rootdir={self.config.rootpath}", *[f"-c{path}" for path in [self.config.inipath] if path]]
        ours = {"FAKE_DRIVER": str(library()), _REPORTS: str(there), _SELECTED: str(selected), "PYTEST_ADDOPTS": ""}
        ours["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # our own come with conftest.py; to load the others takes a second
        self.process = subprocess.Popen(
            [*command, self.path],
            env={**os.environ, **ours},
            cwd=self.config.rootpath,
            pass_fds=[there],
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )
        os.close(there)
        self.pipe: IO[str] = os.fdopen(here)
        self.came_up = False

    def run(self, item: pytest.Item) -> list[pytest.TestReport]:
        """The reports of one test, which may be the failure that the process ended in it."""
        while item.nodeid in self.left:
            if self.process is None:
                self.start()
            line = self.pipe.readline()
            if not line:
                self.ended()
                continue
            data = json.loads(line)
            if isinstance(data["longrepr"], list):  # of a skip: file, line and reason, which JSON knows no tuple for
                data["longrepr"] = tuple(data["longrepr"])
            report = self.config.hook.pytest_report_from_serializable(config=self.config, data=data)
            self.reports[report.nodeid].append(report)
            self.came_up = True
            if report.when == "teardown":
                del self.left[report.nodeid]
        if not self.left and self.process is not None:
            self.finish(item)
        return self.reports.pop(item.nodeid)

    def ended(self) -> None:
        """Fails the test that was running. Without a single report the others would do no better."""
        for item in list(self.left.values())[: 1 if self.came_up else None]:
            self.fail(item, "call", "before it had finished this test")
            del self.left[item.nodeid]
        self.close()

    def finish(self, last: pytest.Item) -> None:
        """Lets the process end as it will: what goes wrong then is reported with the last test."""
        assert self.process is not None
        try:
            good = self.process.wait(240) in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        except subprocess.TimeoutExpired:
            good = False
            self.process.kill()
        if not good:
            self.fail(last, "teardown", "after its last test")
        self.close()

    def fail(self, item: pytest.Item, when: Literal["call", "teardown"], moment: str) -> None:
        assert self.process is not None
        status = self.process.wait()
        self.output.seek(0)
        text = f"The process of the fake driver ended with {status} {moment}:\n"
        text += self.output.read().decode(errors="replace")
        self.reports[item.nodeid].append(pytest.TestReport(item.nodeid, item.location, {}, "failed", text, when))

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.pipe.close()
            self.output.close()
            self.process = None


def pytest_configure(config: pytest.Config) -> None:
    global _loaded
    path = os.environ.get("FAKE_DRIVER")
    if path is not None and _loaded is None:
        if path != HERE:
            del os.environ["FAKE_DRIVER"]  # not for the programs that tests start
        os.environ["CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING"] = "1"
        _loaded = FakeDriver(library() if path == HERE else Path(path))
        _loaded.reset()
    if _REPORTS in os.environ:
        config.pluginmanager.register(_Reporter(config))


def pytest_unconfigure() -> None:
    for child in _children.values():
        child.close()
    _children.clear()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if reason := why_not():
        for item in items:
            if item.get_closest_marker("fake_driver"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Has a marked test run by the process of its module, unless this is it."""
    if _loaded is not None or not item.get_closest_marker("fake_driver") or why_not():
        return None
    if item.path not in _children:
        mates = [
            mate for mate in item.session.items if mate.path == item.path and mate.get_closest_marker("fake_driver")
        ]
        _children[item.path] = _Child(item.config, item.path, mates)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _children[item.path].run(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # What tests of the same module have set up that ran here, and the next one does not need.
    item.session._setupstate.teardown_exact(nextitem)
    return True
