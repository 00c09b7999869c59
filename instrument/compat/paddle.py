"""A substitute for `paddle.profiler`: `Profiler`, `make_scheduler`, `RecordEvent`, `SortedKeys`, `SummaryView` etc.

Differences from Paddle:
- `on_trace_ready` runs before the next window begins. If it is not given, no file is written.
- Ranges of `RecordEvent` may overlap.
- `make_scheduler` is `instrument.schedule`, and `ProfilerState` is `instrument.sessions.window.State`.
- `summary` prints the text and returns it.
- torch.profiler records operators and kernels if torch is imported and no session with a profile runs.
- The log and the session's notes list options that have no effect.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from instrument import chrome
from instrument.errors import ProfileError
from instrument.instrumentors.profiled_functions import profiled
from instrument.native import OFF
from instrument.profile.model import VIEWS
from instrument.recorder.recorder import RECORDER, Scope
from instrument.recording.tally import Tally
from instrument.report.benchmark_view import Benchmark, make_view
from instrument.report.section import format_summary
from instrument.report.view import Options, Recording
from instrument.runtime.faults import logger
from instrument.sessions import torch_profiler
from instrument.sessions.handlers import InBackground, Window, export_chrome, is_asynchronous, make_chrome_handler
from instrument.sessions.profiler import Profiler as _Profiler
from instrument.sessions.window import State as ProfilerState
from instrument.sessions.window import States
from instrument.sessions.window import schedule as make_scheduler

if TYPE_CHECKING:
    from instrument.trace.trace import Trace

__all__ = [
    "Profiler",
    "ProfilerResult",
    "ProfilerState",
    "ProfilerTarget",
    "RecordEvent",
    "SortedKeys",
    "SummaryView",
    "TracerEventType",
    "export_chrome_tracing",
    "export_protobuf",
    "load_profiler_result",
    "make_scheduler",
]

Function = TypeVar("Function", bound=Callable[..., Any])


class ProfilerTarget(Enum):
    """The devices that Paddle can profile. Here only `CPU` and `GPU` are timed."""

    CPU = 0
    GPU = 1
    XPU = 2
    CUSTOM_DEVICE = 3


_TIMED = (ProfilerTarget.CPU, ProfilerTarget.GPU)

_DEVICE_NOTE = "host and GPU are timed"
_REPLACEMENTS: Mapping[str, str] = {
    "record_shapes": "torch.profiler notes shapes where torch is imported and no session of a profile runs",
    "profile_memory": "torch.profiler records allocations where torch is imported and no session of a profile runs",
    "emit_nvtx": "under Nsight every span is an NVTX range without it",
    "with_flops": "torch.profiler records operations where torch is imported and no session of a profile runs",
}
_TORCH_OPTIONS = ("record_shapes", "profile_memory", "with_flops")
"""The options of `Profiler` that are passed to torch.profiler."""

_logged_notes: set[str] = set()


class SortedKeys(Enum):
    """Paddle's sort keys. The value is the name of the key in `instrument report`."""

    CPUTotal = "cpu_total"
    CPUAvg = "cpu_ave"
    CPUMax = "cpu_max"
    CPUMin = "cpu_min"
    GPUTotal = "gpu_total"
    GPUAvg = "gpu_ave"
    GPUMax = "gpu_max"
    GPUMin = "gpu_min"


class SummaryView(Enum):
    """Paddle's views. The value is the name of the view in `instrument report`."""

    DeviceView = "device"
    OverView = "overview"
    ModelView = "phases"
    DistributedView = "distribution"
    KernelView = "kernels"
    OperatorView = "operators"
    MemoryView = "memory"
    MemoryManipulationView = "copies"
    UDFView = "user"


class TracerEventType(Enum):
    """Paddle's types of ranges. Forward, Backward and Optimization are phases of spans. The other types are kinds of
    spans."""

    Operator = "op"
    Dataloader = "loader"
    ProfileStep = "step"
    UserDefined = "user"
    Forward = "forward"
    Backward = "backward"
    Optimization = "optimizer"
    Communication = "comm"
    PythonOp = "python op"
    PythonUserDefined = "python user"


_SCOPE_ARGUMENTS: Mapping[TracerEventType, Mapping[str, str]] = {
    TracerEventType.Forward: {"phase": "forward"},
    TracerEventType.Backward: {"phase": "backward"},
    TracerEventType.Optimization: {"phase": "optimizer"},
    TracerEventType.PythonOp: {"kind": "op"},
    TracerEventType.PythonUserDefined: {"kind": "user"},
}


class RecordEvent:
    """A named range. It is used as a context manager, as a decorator, or by `begin` and `end`."""

    def __init__(self, name: str, event_type: TracerEventType = TracerEventType.PythonUserDefined) -> None:
        self.name = name
        self.event_type = event_type
        self._scope_arguments = _SCOPE_ARGUMENTS.get(event_type) or {"kind": event_type.value}
        self._scope: Scope | None = None

    def begin(self) -> None:
        """Begin the range. Nothing happens if the range is open."""
        if self._scope is None:
            self._scope = RECORDER.make_scope(self.name, **self._scope_arguments).start()  # type: ignore[arg-type]

    def end(self) -> None:
        """End the range, on any thread or task. Nothing happens if the range is not open."""
        opened, self._scope = self._scope, None
        if opened is not None:
            opened.end()

    def __enter__(self) -> RecordEvent:
        self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        opened, self._scope = self._scope, None
        if opened is not None:
            opened.end(error)

    def __call__(self, function: Function) -> Function:
        return profiled(self.name, **self._scope_arguments)(function)  # type: ignore[call-overload, no-any-return]


class _Exporter(InBackground):
    """A handler that writes windows in the background. If the user calls it with a profiler, it writes at once."""

    def __call__(self, ready: Profiler | Window) -> object:
        window = ready.window if isinstance(ready, Profiler) else ready
        return None if window is None else super().__call__(window)


def export_chrome_tracing(dir_name: str | os.PathLike[str], worker_name: str | None = None) -> Handler:
    """Return a handler that writes a Chrome trace of each window into a folder.

    The file name is `worker_name` or the name of the service, with the process id and the number of the window.
    """
    return _Exporter(make_chrome_handler(dir_name, worker_name))


def export_protobuf(dir_name: str | os.PathLike[str], worker_name: str | None = None) -> Handler:
    """Raise `ProfileError`, because no protobuf can be written. The message names `export_chrome_tracing` as the
    replacement."""
    raise ProfileError(
        ["export_protobuf: no protobuf is written; use export_chrome_tracing, load_profiler_result reads it"]
    )


class _Summary:
    """The base class of `Profiler` and `ProfilerResult`, with their method `summary`."""

    def _spans_and_step_times(self) -> tuple[Recording | None, Benchmark | None]:
        raise NotImplementedError

    def summary(
        self,
        sorted_by: SortedKeys = SortedKeys.CPUTotal,
        op_detail: bool = True,
        thread_sep: bool = False,
        time_unit: str = "ms",
        views: SummaryView | Iterable[SummaryView] | None = None,
    ) -> str:
        """Print views of the newest window and the times of the steps. Return the printed text.

        - `sorted_by`: the column by which rows are sorted
        - `op_detail`: True to show the parts of operators
        - `thread_sep`: True for a table per thread
        - `time_unit`: the unit of times: "s", "ms", "us" or "ns"
        - `views`: a view or several views, by default all. The view of memory is left out if memory was not profiled
        """
        recording, steps = self._spans_and_step_times()
        texts = []
        if recording is not None:
            if views is None:
                hidden = () if recording.trace.allocations else (SummaryView.MemoryView,)
                views = [view for view in SummaryView if view.value in VIEWS and view not in hidden]
            elif isinstance(views, SummaryView):
                views = [views]
            options = Options(
                tracer_option="OpDetail" if op_detail else "Default",
                sorted_by=sorted_by.value,
                threads="apart" if thread_sep else "merged",
                unit=time_unit,
            )
            texts.append(format_summary([view.value for view in views], recording, options))
        if steps is not None:
            texts.append("\n".join(make_view(steps, Options(unit=time_unit)).lines()))
        text = "\n".join(texts)
        print(text, flush=True)
        return text


class Profiler(_Summary, _Profiler):  # type: ignore[misc]
    """A substitute for `paddle.profiler.Profiler`, based on `instrument.Profiler`.

    - `targets`: the devices to time, by default host and GPU
    - `scheduler`: a pair `(start, end)` of step numbers, or a function of `make_scheduler`. A start below 0 counts as 0
    - `on_trace_ready`: called with this profiler after each window. `window` is then the recorded window
    """

    def __init__(
        self,
        *,
        targets: Iterable[ProfilerTarget] | None = None,
        scheduler: tuple[int, int] | States | None = None,
        on_trace_ready: Handler | Sequence[Handler] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        timer_only: bool = False,
        emit_nvtx: bool = False,
        custom_device_types: Sequence[str] = (),
        with_flops: bool = False,
    ) -> None:
        devices = set(_TIMED if targets is None else targets)
        unknown = [target for target in devices if not isinstance(target, ProfilerTarget)]
        if unknown or not devices.intersection(_TIMED):
            raise ProfileError([f"Profiler: targets: found {targets!r}; allowed: a list of ProfilerTarget.CPU and GPU"])
        if isinstance(scheduler, (tuple, list)) and len(scheduler) == 2 and isinstance(scheduler[0], int):
            scheduler = (max(scheduler[0], 0), scheduler[1])
        options = {
            "record_shapes": record_shapes, "profile_memory": profile_memory, "emit_nvtx": emit_nvtx,
            "custom_device_types": custom_device_types, "with_flops": with_flops,
            **{f"targets: {target.name}": True for target in devices.difference(_TIMED)},
        }  # fmt: skip
        self._not_recorded = sorted(name for name, value in options.items() if value)
        devices.intersection_update(_TIMED)
        handlers = on_trace_ready if isinstance(on_trace_ready, (list, tuple)) else [on_trace_ready]
        super().__init__(
            state=None if len(devices) > 1 else devices.pop().name,
            schedule=scheduler,
            on_trace_ready=[self._as_window_handler(handler) for handler in handlers if handler is not None],
            timer_only=timer_only,
        )
        shapes, memory = bool(record_shapes or with_flops), bool(profile_memory)
        self._torch_options = replace(self._torch_options, record_shapes=shapes, profile_memory=memory)

    def _as_window_handler(self, handler: Any) -> Any:
        if (
            not callable(handler)
            or is_asynchronous(handler)
            or isinstance(handler, InBackground)
            or getattr(handler, "__module__", "") == export_chrome.__module__
        ):
            return handler
        return lambda window: handler(self)

    def start(self) -> None:
        """Start recording or the schedule. Each option without an effect is logged."""
        super().start()
        torch_options = _TORCH_OPTIONS if self._torch is not None and torch_profiler.is_torch_imported() else ()
        for name in self._not_recorded:
            if name in torch_options:
                continue
            note = f"paddle.Profiler: {name}: accepted, but not recorded; {_REPLACEMENTS.get(name, _DEVICE_NOTE)}"
            if note not in _logged_notes:
                _logged_notes.add(note)
                logger.warning("%s", note)
            if self._session is not None and note not in self._session.account.notes():
                self._session.account.complain(note, log=False)

    def _stop(self) -> None:
        """Stop recording, and print the times of the steps."""
        was_running = self._is_running
        super()._stop()
        if was_running and not OFF and self._benchmark.measure_loop_times().steps:
            print("\n".join(make_view(self._benchmark, Options()).lines()), flush=True)

    def export(self, path: str | os.PathLike[str], format: str = "json") -> Path:
        """Write the newest window as a Chrome trace. Raises `ProfileError` if `format` is not "json"."""
        if format != "json":
            raise ProfileError(
                [f"Profiler.export: format: found {format!r}; allowed: json, which load_profiler_result reads"]
            )
        return super().export(path)

    def _spans_and_step_times(self) -> tuple[Recording | None, Benchmark | None]:
        return None if self.window is None else Recording.from_trace(self.window.trace), self._benchmark


Handler = Callable[[Profiler], object] | InBackground
"""A handler for `on_trace_ready`: a function that gets the profiler, or a writer of windows."""


class ProfilerResult(_Summary):
    """A window that was read from a file, with its spans in `trace` and its totals in `tally`."""

    def __init__(self, trace: Trace, tally: Tally) -> None:
        self.trace = trace
        self.tally = tally

    def _spans_and_step_times(self) -> tuple[Recording | None, Benchmark | None]:
        return Recording.from_trace(self.trace, lambda: self.tally), None


def load_profiler_result(file_name: str | os.PathLike[str]) -> ProfilerResult:
    """Read a file that `export_chrome_tracing` or `Profiler.export` has written. Raises `TraceError` if it cannot be
    read."""
    return ProfilerResult(*chrome.load(file_name))
