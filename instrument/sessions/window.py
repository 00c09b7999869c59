"""The windows, and the schedules that choose them. A window is a range of steps, and has its own trace.

In the schedule of a profile, a step is a request. In a `Profiler`, a step is an iteration. Steps count from 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from instrument.errors import ProfileError
from instrument.profile.model import Profile, Schedule
from instrument.recording.memory_layout import REQUEST_BIT
from instrument.recording.spans import Origin, Site
from instrument.runtime.lazy_imports import NamedTuple

if TYPE_CHECKING:
    from instrument.instrumentors.selection import Selection
    from instrument.recorder.recorder import Recorder
    from instrument.trace.of_recording import RowSnapshot

STEP = Site("step", "step", "instrument", "Profiler.step")
"""The site of all step spans. The attribute `step` is the number of the step, and `samples` is the number of
samples."""

MOST_STEPS = 100_000
"""The maximum number of steps kept in memory. Older steps are dropped."""


class Step(NamedTuple):
    """A step of a loop, which ends just before the next one begins. A step cut at the edge of a window is `clipped`."""

    number: int
    start_ns: int
    end_ns: int
    thread_id: int
    samples: float | None = None
    clipped: bool = False


def clip_steps(steps: Sequence[Step], start_ns: int, end_ns: int) -> list[Step]:
    """Return the steps that overlap an interval, cut to the interval. `steps` are in order of their ends.

    Cut steps are `clipped`. If steps of nested loops overlap on a thread, only the step that ends last is returned.
    """
    kept_steps: list[Step] = []
    starts: dict[int, int] = {}
    for step in reversed(steps):
        start, end = max(step.start_ns, start_ns), min(step.end_ns, end_ns)
        if start < end and step.end_ns <= starts.get(step.thread_id, step.end_ns):
            starts[step.thread_id] = step.start_ns
            is_whole = (start, end) == (step.start_ns, step.end_ns)
            kept_steps.append(step if is_whole else step._replace(start_ns=start, end_ns=end, clipped=True))
    return kept_steps[::-1]


class State(str, Enum):
    """The state of a step: not recorded, to be recorded soon, recorded, or recorded as the last step of a window."""

    CLOSED = "CLOSED"
    READY = "READY"
    RECORD = "RECORD"
    RECORD_AND_RETURN = "RECORD_AND_RETURN"


RECORDING_STATES = (State.RECORD, State.RECORD_AND_RETURN)

States = Callable[[int], "State | str"]


def find_state(schedule: Schedule, step: int) -> State:
    cycle = schedule.closed + schedule.ready + schedule.record
    count, position = divmod(step - schedule.skip_first, cycle)
    if step < schedule.skip_first or (schedule.repeat and count >= schedule.repeat):
        return State.CLOSED
    if position < schedule.closed:
        return State.CLOSED
    if position < schedule.closed + schedule.ready:
        return State.READY
    return State.RECORD_AND_RETURN if position == cycle - 1 else State.RECORD


def schedule(
    *, record: int, closed: int = 0, ready: int = 0, repeat: int = 0, skip_first: int = 0
) -> Callable[[int], State]:
    """Return a schedule of repeated windows. It is a function from the number of a step to its `State`.

    The first `skip_first` steps are CLOSED. Then `closed`, `ready` and `record` steps follow in turn. They repeat
    `repeat` times, or without end if `repeat` is 0. The last step of a window is RECORD_AND_RETURN.

    Raises `ProfileError` for a number out of range.
    """
    numbers = {"closed": closed, "ready": ready, "record": record, "repeat": repeat, "skip_first": skip_first}
    problems = []
    for name, count in numbers.items():
        least = 1 if name == "record" else 0
        if not isinstance(count, int) or isinstance(count, bool) or count < least:
            problems.append(f"schedule: {name}: found {count!r}; allowed: a whole number from {least}")
    if problems:
        raise ProfileError(problems)
    settings = Schedule(record=record, closed=closed, ready=ready, repeat=repeat, skip_first=skip_first)
    return partial(find_state, settings)


class Windows:
    """Counts steps, and begins and ends windows by a schedule. Without a schedule, all steps are one window.

    Without `start_ns`, the first window begins with a call of `begin_window`. `steps` is the number of the current
    step, and `state` is the step's `State`. `count` is the number of ended windows. `first_step` is the first step of
    the newest window.
    """

    def __init__(self, schedule: Schedule | States | None, start_ns: int | None = None, count: int = 0) -> None:
        self.count = count
        self._opened_ns: int | None = None
        self.first_step = self.steps = 0
        if schedule is None:
            self._states: States = lambda step: State.RECORD
        else:
            self._states = partial(find_state, schedule) if isinstance(schedule, Schedule) else schedule
        self.state = State(self._states(0))
        if start_ns is not None:
            self.begin_window(start_ns)

    @property
    def is_due(self) -> bool:
        """True if a window includes the current step, but has not begun yet."""
        return self._opened_ns is None and self.state in RECORDING_STATES

    @property
    def is_open(self) -> bool:
        return self._opened_ns is not None

    def advance_step(self, end_ns: int) -> tuple[int, int, int] | None:
        """End the current step, and begin the next window if it is due. Return the window that ended, or None."""
        window = self.end_step(end_ns)
        self.begin_window(end_ns)
        return window

    def end_step(self, end_ns: int) -> tuple[int, int, int] | None:
        """End the current step, but begin no window. Return the window that ended, or None."""
        before, self.steps = self.state, self.steps + 1
        self.state = State(self._states(self.steps))
        if before is State.RECORD_AND_RETURN or self.state not in RECORDING_STATES:
            return self.stop(end_ns)
        return None

    def begin_window(self, now_ns: int) -> None:
        if self.is_due:
            self._opened_ns, self.first_step = now_ns, self.steps

    def stop(self, end_ns: int) -> tuple[int, int, int] | None:
        """End and return the open window. Return None if no window is open, or if it is empty."""
        begin_ns, self._opened_ns = self._opened_ns, None
        if begin_ns is None or end_ns <= begin_ns:
            return None
        self.count += 1
        return self.count - 1, begin_ns, end_ns


Cut = tuple[int, int, int]
"""The index of a window, and its start and end in ns."""


WINDOWS_THREAD = "instrument-windows"
"""The name of the threads that write and send windows. Their own spans are in no window."""


class Stretch(NamedTuple):
    """A copy of an interval's rows, to make a trace later. `threads` has the names of threads."""

    snapshot: RowSnapshot
    threads: Mapping[int, str]
    start_ns: int
    end_ns: int
    window: int
    origin: Origin

    @property
    def held_from_ns(self) -> int:
        """The time from which the interval is complete. It is 0 if the whole interval is complete."""
        return self.snapshot.find_complete_from(self.start_ns, self.end_ns)

    def has_span_since(self, at_ns: int) -> bool:
        return self.snapshot.has_span_begun(at_ns, self.end_ns)


class WindowReader:
    """Counts steps in the recorded rows, to end windows by the profile's schedule. Only one thread may use it at a
    time.

    A step is a request, or a call of the function that the schedule names. `cut` is a queue of ended windows. Each has
    the process's identity at the end of the window.
    """

    def __init__(self, recorder: Recorder, selection: Selection, make_origin: Callable[[], Origin]) -> None:
        self._recorder = recorder
        self._selection = selection
        self._make_origin = make_origin
        self.begin_schedule(Profile(), 0)

    def begin_schedule(self, profile: Profile, start_ns: int) -> None:
        self.cut: deque[tuple[Cut, Origin]] = deque()
        self._lost_before = 0
        self._follow_schedule(profile.schedule, start_ns)

    def _follow_schedule(self, schedule: Schedule | None, start_ns: int, count: int = 0) -> None:
        self._schedule = schedule
        self._windows = Windows(schedule, start_ns, count)
        self._cursor = None if schedule is None else self._recorder.make_row_cursor()

    def read_new_rows(self) -> None:
        for end_ns in sorted(self._read_step_ends()):
            self._queue_window(self._windows.advance_step(end_ns))

    def _read_step_ends(self) -> Iterator[int]:
        schedule, cursor = self._schedule, self._cursor
        if schedule is None or cursor is None:
            return
        rings = cursor.read_new_rows()
        nodes = set[int]()
        if schedule.step is not None:
            nodes = self._recorder.paths().find_nodes_of_sites(self._selection.find_sites(schedule.step))
        for rows in (ring.rows for ring in rings):
            if schedule.step is None:
                is_step = (rows["span_id"] == rows["root_id"]) & (rows["root_id"] & REQUEST_BIT != 0)
                yield from rows["end_ns"][is_step].tolist()
            else:
                ends = zip(rows["node"].tolist(), rows["end_ns"].tolist(), strict=True)
                yield from (end_ns for node, end_ns in ends if node in nodes)

    def _queue_window(self, window: Cut | None) -> None:
        if window is not None:
            self.cut.append((window, self._make_origin()))

    def change_schedule(self, profile: Profile, now_ns: int) -> None:
        """Change to the schedule of another profile. If the schedules differ, end the open window."""
        if profile.schedule != self._schedule:
            self.read_new_rows()
            self._queue_window(self._windows.stop(now_ns))
            self._lost_before = self.lost_rows
            self._follow_schedule(profile.schedule, now_ns, self._windows.count)

    def stop(self, end_ns: int) -> Cut | None:
        return self._windows.stop(end_ns)

    @property
    def lost_rows(self) -> int:
        """The number of rows that the rings overwrote before this reader could count their steps."""
        return self._lost_before + (0 if self._cursor is None else self._cursor.lost_rows)
