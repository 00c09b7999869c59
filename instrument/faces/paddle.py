"""The names of `paddle.profiler`: `Profiler`, `make_scheduler`, `RecordEvent`, `SortedKeys`, `SummaryView` and so on.

Differences: on_trace_ready gets the `Window`, not the profiler, runs before the next window is armed, and nothing is
written where none is given. A window that the schedule leaves without RECORD_AND_RETURN is delivered too. Ranges may
overlap, cross steps and tasks; profilers may be nested. `make_scheduler` is `instrument.schedule`, `ProfilerState` is
`instrument.window.State`. `summary` prints and returns the text; nothing is printed by `stop`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from types import TracebackType
from typing import Any, TypeVar

from instrument import chrome
from instrument.errors import ProfileError
from instrument.handlers import Handler, export_chrome
from instrument.probes.functions import profiled
from instrument.profile import VIEWS
from instrument.recorder import RECORDER, Scope
from instrument.report.benchmark import counted
from instrument.report.summary import summary
from instrument.report.view import Options, Recording
from instrument.spans import Trace
from instrument.steps import Profiler as _Profiler
from instrument.tally import Tally
from instrument.window import State as ProfilerState
from instrument.window import States
from instrument.window import schedule as make_scheduler

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
    "load_profiler_result",
    "make_scheduler",
]

Function = TypeVar("Function", bound=Callable[..., Any])


class ProfilerTarget(Enum):
    """What is timed: the host, or what goes to a GPU too."""

    CPU = 0
    GPU = 1


class SortedKeys(Enum):
    """What rows are sorted by, in our words."""

    CPUTotal = "cpu_total"
    CPUAvg = "cpu_ave"
    CPUMax = "cpu_max"
    CPUMin = "cpu_min"
    GPUTotal = "gpu_total"
    GPUAvg = "gpu_ave"
    GPUMax = "gpu_max"
    GPUMin = "gpu_min"


class SummaryView(Enum):
    """The views, in our words."""

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
    """What a range is: the kind of its span, or the phase."""

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


_SCOPE_OF: Mapping[TracerEventType, Mapping[str, str]] = {
    TracerEventType.Forward: {"phase": "forward"},
    TracerEventType.Backward: {"phase": "backward"},
    TracerEventType.Optimization: {"phase": "optimizer"},
    TracerEventType.PythonOp: {"kind": "op"},
    TracerEventType.PythonUserDefined: {"kind": "user"},
}


class RecordEvent:
    """A range by name: a context manager, a decorator, or `begin` and `end`. `end` without `begin` is nothing."""

    def __init__(self, name: str, event_type: TracerEventType = TracerEventType.PythonUserDefined) -> None:
        self.name = name
        self.event_type = event_type
        self._how = _SCOPE_OF.get(event_type) or {"kind": event_type.value}
        self._scope: Scope | None = None

    def begin(self) -> None:
        """Begin the range, unless it is open."""
        if self._scope is None:
            self._scope = RECORDER.make_scope(self.name, **self._how).start()  # type: ignore[arg-type]

    def end(self) -> None:
        """End the range, on whatever thread or task."""
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
        return profiled(self.name, **self._how)(function)  # type: ignore[call-overload, no-any-return]


def export_chrome_tracing(dir_name: str | os.PathLike[str]) -> Handler:
    """As `instrument.export_chrome`: one file a window, named by service, process and window."""
    return export_chrome(dir_name)


class Profiler(_Profiler):
    """`paddle.profiler.Profiler`: its arguments, in our words those of `instrument.Profiler`.

    `targets` with a GPU time the device too; left out, both. In a `scheduler` ``(start, end)`` a start below 0 is 0.
    """

    def __init__(
        self,
        *,
        targets: Iterable[ProfilerTarget] | None = None,
        scheduler: tuple[int, int] | States | None = None,
        on_trace_ready: Handler | Sequence[Handler] | None = None,
        timer_only: bool = False,
    ) -> None:
        wanted = set(ProfilerTarget if targets is None else targets)
        unknown = [target for target in wanted if not isinstance(target, ProfilerTarget)]
        if unknown or not wanted:
            raise ProfileError([f"Profiler: targets: found {targets!r}; allowed: a list of ProfilerTarget.CPU and GPU"])
        if isinstance(scheduler, (tuple, list)) and len(scheduler) == 2 and isinstance(scheduler[0], int):
            scheduler = (max(scheduler[0], 0), scheduler[1])
        state = None if len(wanted) > 1 else wanted.pop().name
        super().__init__(state=state, schedule=scheduler, on_trace_ready=on_trace_ready, timer_only=timer_only)

    def summary(  # type: ignore[override]
        self,
        sorted_by: SortedKeys = SortedKeys.CPUTotal,
        op_detail: bool = True,
        thread_sep: bool = False,
        time_unit: str = "ms",
        views: SummaryView | Iterable[SummaryView] | None = None,
    ) -> str:
        """Print the newest window's views and the cost of the steps, and return the text."""
        text = "\n".join(counted(self._benchmark, Options(unit=time_unit)).lines())
        if self.window is not None:
            recording = Recording.of_trace(self.window.trace)
            text = f"{_text(recording, sorted_by, op_detail, thread_sep, time_unit, views)}\n{text}"
        print(text, flush=True)
        return text


class ProfilerResult:
    """A saved window: its `trace`, its `tally`, and its `summary` as that of `Profiler`."""

    def __init__(self, trace: Trace, tally: Tally) -> None:
        self.trace = trace
        self.tally = tally

    def summary(
        self,
        sorted_by: SortedKeys = SortedKeys.CPUTotal,
        op_detail: bool = True,
        thread_sep: bool = False,
        time_unit: str = "ms",
        views: SummaryView | Iterable[SummaryView] | None = None,
    ) -> str:
        """Print the views, and return the text."""
        text = _text(Recording.of_trace(self.trace, self.tally), sorted_by, op_detail, thread_sep, time_unit, views)
        print(text, flush=True)
        return text


def load_profiler_result(file_name: str | os.PathLike[str]) -> ProfilerResult:
    """Read a file that `export_chrome_tracing` or `export` has written. Raises `TraceError`."""
    return ProfilerResult(*chrome.load(file_name))


def _text(
    recording: Recording,
    sorted_by: SortedKeys,
    op_detail: bool,
    thread_sep: bool,
    time_unit: str,
    views: SummaryView | Iterable[SummaryView] | None,
) -> str:
    """The views in Paddle's order; all of them that there are where none is named."""
    if views is None:
        views = [view for view in SummaryView if view.value in VIEWS]
    elif isinstance(views, SummaryView):
        views = [views]
    options = Options(
        tracer_option="OpDetail" if op_detail else "Default",
        sorted_by=sorted_by.value,
        threads="apart" if thread_sep else "merged",
        unit=time_unit,
    )
    return summary([view.value for view in views], recording, options)
