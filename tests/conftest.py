"""Fixtures of all tests. Each test finds the process clean, and must leave it clean."""

from __future__ import annotations

import compileall
import functools
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.dont_write_bytecode = False  # else each process of the tests would rewrite all asserts, those of hypothesis, too

import pytest
from hypothesis import HealthCheck, settings

import instrument
from instrument.instrumentors import loaders, probe_cost, tasks_and_threads
from instrument.instrumentors.selection import Selection
from instrument.profile.keys import loads
from instrument.recorder.recorder import RECORDER, RING_BYTES, Recorder
from instrument.recording.metric_definitions import GAUGES
from instrument.runtime.faults import FAULTS
from instrument.runtime.imports import Finder

pytest_plugins = ["driver"]

# Also for what tests start. Threads of torch spin while they wait for one another, and the tests themselves keep all
# cores busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Sessions that tests start in code have no agent, unless a test says so: most look at what the process does by itself.
os.environ.setdefault("INSTRUMENT_AGENT", "")

# How long an example takes, and how long it takes to make one, says how busy the machine is. `clean_process` holds
# between tests; between the examples of one test, each test sees to that itself.
settings.register_profile(
    "instrument",
    settings(),
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("fast", settings.get_profile("instrument"), max_examples=20)
settings.register_profile("quick", settings.get_profile("instrument"), max_examples=10)
settings.load_profile("fast")  # or what --hypothesis-profile says; .ci/run says `instrument` beside the slow tests


def rewrite_asserts(name: str) -> None:
    """Have pytest rewrite the asserts of a file of tests into its cache. None of the file's code runs."""
    spec = find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    vars(module)["__builtins__"] = {}
    with suppress(ImportError):  # by the first import of the file, because there is no function that imports
        spec.loader.exec_module(module)


def pytest_configure(config: pytest.Config) -> None:
    # Hundreds of tests start a Python of their own. Where PYTHONDONTWRITEBYTECODE is set, each would compile all of
    # ours anew, which takes longer than what most of them do.
    compileall.compile_dir(Path(instrument.__file__).parent, quiet=2)
    if getattr(config.option, "numprocesses", None):
        # Else each process of pytest-xdist would rewrite the asserts of all files, and at the same time.
        with multiprocessing.get_context("fork").Pool() as processes:
            processes.map(rewrite_asserts, sorted(path.stem for path in Path(__file__).parent.glob("test_*.py")), 1)
    # In the order below: pytest-xdist would begin with the files that have most tests.
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that import large packages come last, for what looks through all that a process holds takes longer then."""
    lateness: Counter[Path] = Counter()
    for item in items:
        asked_for = getattr(item, "fixturenames", ())
        late = 3 if "frameworks" in item.path.name else 2 if "late_imports" in asked_for else int("torch" in asked_for)
        lateness[item.path] = max(lateness[item.path], late)
    items.sort(key=lambda item: lateness[item.path])


@pytest.fixture
def torch() -> Any:
    """torch, for single tests of files that do without it otherwise."""
    return pytest.importorskip("torch")


FRAMEWORK_ENTRIES = [
    ("onnxruntime", "InferenceSession", "run"),
    ("transformers.generation.utils", "GenerationMixin", "generate"),
    ("sklearn.base", "BaseEstimator", "__init_subclass__"),
    ("keras.src.layers.layer", "Layer", "__call__"),
]


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("instrument")]


def left_behind() -> list[str]:
    """Everything of ours that changes this process right now."""
    found = [f"finder {finder!r}" for finder in sys.meta_path if isinstance(finder, Finder)]
    found += [f"thread {thread.name}" for thread in own_threads()]
    if RECORDER.on:
        found.append("the recorder is on")
    if RECORDER.current_span_id():
        found.append("a span is current")
    process = sys.modules.get("instrument.sessions.process")
    if process is not None and process._session is not None:
        found.append("a session runs")
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        found.append("a SIGTERM handler")
    if "instrument" in f"{signal.signal.__code__.co_filename} {signal.getsignal.__code__.co_filename}":
        found.append("functions of signal")
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "nn"):
        registered = torch.nn.modules.module._global_module_registration_hooks
        found += [f"registration hook {hook!r}" for hook in registered.values()]
        if "__init_subclass__" in vars(torch.nn.Module):
            found.append("Module.__init_subclass__")
        if hasattr(torch.nn.Linear.forward, "__instrument_layers__"):
            found.append("Linear.forward")
        if hasattr(torch.nn.Module.__call__, "__instrument_phase__"):
            found.append("Module.__call__")
        distributed = sys.modules.get("torch.distributed.distributed_c10d")
        wait = getattr(getattr(distributed, "Work", None), "wait", None)
        if "instrument" in getattr(getattr(wait, "__code__", None), "co_filename", ""):
            found.append("Work.wait")
        if "to" in vars(torch.Tensor):
            found.append("Tensor.to")
        if "__call__" in vars(torch.jit.RecursiveScriptModule):
            found.append("RecursiveScriptModule.__call__")
        if hasattr(torch.nn.Module.compile, "__wrapped__"):
            found.append("Module.compile")
    for module, cls, name in FRAMEWORK_ENTRIES:
        method = getattr(getattr(sys.modules.get(module), cls, None), name, None)
        if "instrument" in getattr(getattr(method, "__code__", None), "co_filename", ""):
            found.append(f"{cls}.{name}")
    if loaders._listeners:
        found.append("a listener of loaders")
    found += [f"fault in the {place}" for place in FAULTS.count_by_place()]
    return found


def end_what_was_left() -> None:
    """End the session, the import hook and the handler that a failed test left, so that the next test starts clean."""
    process = sys.modules.get("instrument.sessions.process")
    if process is not None and process._session is not None:
        process.stop()
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    FAULTS.clear()
    RECORDER.on = False
    RECORDER.forget_current()


@pytest.fixture(autouse=True)
def clean_process() -> Iterator[None]:
    """Fail the test that leaves a session, patch, finder or thread of ours, and no test after it."""
    before, threads, gauges = left_behind(), own_threads(), dict(GAUGES)
    RECORDER.reset()
    yield
    for name in GAUGES.keys() - gauges:  # of a recording that the test has read
        del GAUGES[name]
    for thread in own_threads():
        if thread not in threads:
            thread.join(60)  # one that nobody needs any more ends by itself
    left = [change for change in left_behind() if change not in before]
    end_what_was_left()
    assert left == []


@pytest.fixture(autouse=True, scope="session")
def folder_of_runs() -> Iterator[None]:
    """Keep the runs of this process's tests in a folder of its own: commands ask all runs that they find."""
    folder = TemporaryDirectory(prefix="runs-", dir="/tmp", ignore_cleanup_errors=True)  # short: a socket's path
    with folder as path, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", path)
        yield


@pytest.fixture(autouse=True, scope="session")
def measured_costs() -> Iterator[None]:
    """Measure the costs of probes once per process of the tests, instead of at the start of each session."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("measure_costs", "measure_muted_call_ns", "measure_cold_cache_ns"):
            patch.setattr(probe_cost, name, functools.cache(getattr(probe_cost, name)))
        yield


@pytest.fixture(autouse=True, scope="module")
def heap_of_the_file() -> None:
    """Hide what was there before this file's tests from the garbage collector, and from searches of the heap."""
    gc.freeze()


@pytest.fixture
def small_heap() -> None:
    """Hide what was there before this test from the garbage collector, such as models of other tests."""
    gc.freeze()


@pytest.fixture
def make_recorder() -> Iterator[Any]:
    """Makes recorders of the test's own, switched on."""
    undos = []

    def make(ring_bytes: int = 1 << 22) -> Any:
        own = Recorder(ring_bytes)
        own.begin_recording(ring_bytes, {})  # as a session does: into memory that others can read
        undos.append(tasks_and_threads.report_context_copies(own))
        own.on = True
        return own

    yield make
    for undo in reversed(undos):
        undo()


@pytest.fixture
def recorder(make_recorder: Any) -> Any:
    """A recorder of the test's own, switched on."""
    return make_recorder()


@pytest.fixture
def recording() -> Iterator[Any]:
    """The process's recorder, switched on: what decorators and scopes record into."""
    if RECORDER.memory is None:
        RECORDER.begin_recording(RING_BYTES, {})
    RECORDER.on = True
    yield RECORDER
    RECORDER.on = False


@pytest.fixture
def select(recorder: Recorder) -> Iterator[Callable[[str], Selection]]:
    """A selection of a profile's text, attached; undone after the test."""
    made: list[Selection] = []

    def attach(text: str) -> Selection:
        made.append(Selection(loads(text, environ={}), recorder))
        made[-1].attach()
        return made[-1]

    yield attach
    for selection in made:
        selection.detach_all()
