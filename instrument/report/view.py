"""The options of views, the recording that views read, and the JSON form of their numbers.

The view `NAME` is the function ``NAME(recording, options)`` in ``report/NAME_view.py``. It returns a frozen dataclass
with the numbers. The method `lines` of that class prints the numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from instrument.profile.model import SORT_KEYS, STATES, TIME_UNITS, TRACER_OPTIONS
from instrument.recording.spans import Cost, Site, Span, Startup

if TYPE_CHECKING:
    from instrument.recording.tally import Tally
    from instrument.trace.columns import Columns, Int32s, Int64s
    from instrument.trace.file import Saved
    from instrument.trace.joined import Joined
    from instrument.trace.ledger import DeviceLedger, Ledger, Turns
    from instrument.trace.trace import Trace

Made = TypeVar("Made")

THREADS: tuple[str, ...] = ("both", "merged", "apart")
UNITS = TIME_UNITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of all views. Each view documents the options that it uses.

    `rows` is the maximum number of rows in each table. If it is None, the maximum is `most`. A last row sums up the
    other rows, and those below `least_ns`. `corrected` subtracts the cost of probes from self times. `skip_first` is
    the number of first iterations to leave out. `requests_by` is the attribute that groups requests, and `at_most` the
    maximum number of groups.

    Raises `ValueError` for an invalid value.
    """

    tracer_option: str = "Default"
    state: str = "All"
    sorted_by: str = "default"
    rows: int | None = None
    threads: str = "both"
    corrected: bool = False
    least_ns: int = 0
    skip_first: int = 0
    unit: str = "ms"
    requests_by: str = ""
    at_most: int = 50
    most: int | None = None

    @property
    def row_limit(self) -> int | None:
        return self.most if self.rows is None else self.rows

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Options:
        """Return options from a mapping. A value of None means the default. Raises `TypeError` for an unknown name."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                raise TypeError(f"there is no option {name!r}; allowed: {', '.join(names)}")
        settings = [*(defaults or {}).items(), *values.items()]
        return cls(**{name: value for name, value in settings if value is not None})

    def __post_init__(self) -> None:
        choices: Mapping[str, Sequence[str]] = {
            "tracer_option": TRACER_OPTIONS, "state": STATES, "sorted_by": SORT_KEYS, "threads": THREADS,
            "unit": tuple(UNITS),
        }  # fmt: skip
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}")
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"rows is {self.rows!r}; allowed: 1 or more, or None for every row")
        for name in ("least_ns", "skip_first"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: 0 or more")


@dataclass(frozen=True, slots=True)
class SortKey:
    """The order of rows. `column` is `default`, `calls`, `total`, `max`, `min` or `ave`. `part` selects host times
    (`cpu`) or device times (`gpu`). The largest value comes first. Only `cpu_min` and `gpu_min` ascend, as in
    `paddle.profiler`."""

    part: str
    column: str
    ascending: bool

    @classmethod
    def parse_sort_key(cls, options: Options) -> SortKey:
        part, _, column = options.sorted_by.rpartition("_")
        return cls(part or ("gpu" if options.state == "GPU" else "cpu"), column, bool(part) and column == "min")


@dataclass(frozen=True, slots=True)
class InstrumentationStats:
    """Numbers on the instrumentation that only the running process has.

    `added_ns` returns the cost per call of each site's probe. `pairs_ns` is the cost of recording device events.
    `threads_ns` is the processor time of the SDK's own threads. `passed` counts the calls that were left out to stay
    within the budget, by site. The `muted` sites are not recorded now.
    """

    clock: str
    added_ns: Callable[[Sequence[Site]], Sequence[float]]
    pairs_ns: float
    threads_ns: Mapping[str, int]
    passed: Mapping[Site, int]
    muted: Collection[Site]
    held_rows: int
    ring_rows: int
    ring_bytes: int
    notes: Sequence[str] = ()


@dataclass(eq=False)
class Recording:
    """A recording as views read it: the tally of all calls, and the trace of the kept spans.

    Each function `make_...` is called once, when its result is first read. `make_totals` returns the tally at a lower
    cost, summed over all threads if its argument is True. `window_ns` is the time that the tally covers.
    `collector_ids` returns a request's trace id and span id at the collector.
    """

    make_tally: Callable[[], Tally]
    make_trace: Callable[[], Trace]
    _: KW_ONLY
    losses: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    window_ns: int | None = None
    recorder: str = ""
    collector_ids: Callable[[Span, str], tuple[int, int]] | None = None
    make_stats: Callable[[], InstrumentationStats | None] = lambda: None
    make_startup: Callable[[], Startup | None] = lambda: None
    make_totals: Callable[[bool], Tally] | None = None
    make_cost: Callable[[], Cost | None] = lambda: None
    died: str = ""

    @cached_property
    def _results(self) -> dict[object, Any]:
        return {}

    @cached_property
    def tally(self) -> Tally:
        return self.make_tally()

    def totals(self, *, merged: bool = False) -> Tally:
        if merged not in self._results:
            make = self.make_totals
            self._results[merged] = (
                make(merged) if make is not None else self.tally.merge_threads() if merged else self.tally
            )
        tally: Tally = self._results[merged]
        return tally

    @cached_property
    def cost(self) -> Cost | None:
        return self.make_cost()

    @cached_property
    def trace(self) -> Trace:
        from instrument.trace.request_trees import move_facts_to_requests

        return move_facts_to_requests(self.make_trace())

    @property
    def columns(self) -> Columns:
        return self.trace.columns

    @cached_property
    def topmost_requests(self) -> Int32s:
        """The row of the topmost request at or above each span."""
        return self.columns.find_topmost_wanted_rows(self.columns.are_of_kind("request"))

    @cached_property
    def joined(self) -> Joined:
        """The requests of all processes. Spans with the same key belong to one request."""
        from instrument.trace.joined import join_requests

        return join_requests(self.columns, self.trace.apart_ns, self.topmost_requests)

    @cached_property
    def complete_requests(self) -> tuple[Int64s, int]:
        """The rows of requests that are entirely within the window, and the number of requests that cross the window's
        edges."""
        return self.find_requests_within(self.joined.owner)

    def find_requests_within(self, owner: Int32s) -> tuple[Int64s, int]:
        """Return the rows of requests that are entirely within the window, and the number of requests that cross the
        window's edges. `owner` has the row of each span's request."""
        import numpy as np

        trace, (first, last) = self.columns, self.trace.coverage
        topmost = np.flatnonzero(owner == np.arange(len(trace)))
        starts, ends = trace.start_ns[topmost], trace.end_ns[topmost]
        is_whole = (first <= starts) & (ends <= last) & ~trace.clipped[topmost]
        return topmost[is_whole], int((~is_whole & (starts < last) & (ends > first)).sum())

    @cached_property
    def turns(self) -> Turns:
        from instrument.trace.ledger import find_turns

        return find_turns(self.columns, self.joined)

    @cached_property
    def ledger(self) -> Ledger:
        from instrument.trace.ledger import compute_ledger

        return compute_ledger(self.columns, self.joined, self.turns)

    @cached_property
    def device_ledger(self) -> DeviceLedger:
        from instrument.trace.ledger import compute_device_ledger

        return compute_device_ledger(self.columns, self.joined)

    def compute_once(self, make: Callable[[Recording], Made]) -> Made:
        """Return the result of `make` for this recording. It is computed once and shared by all views."""
        if make not in self._results:
            self._results[make] = make(self)
        result: Made = self._results[make]
        return result

    def store_result(self, make: Callable[[Recording], Made | None], result: Made) -> None:
        self._results[make] = result

    @cached_property
    def startup(self) -> Startup | None:
        return self.make_startup()

    @cached_property
    def stats(self) -> InstrumentationStats | None:
        """The numbers that only the running process knows, None for a saved trace."""
        return self.make_stats()

    @classmethod
    def from_trace(cls, trace: Trace, make_tally: Callable[[], Tally] | None = None) -> Recording:
        """Return the recording of a trace. Without `make_tally`, the tally counts the trace's spans."""

        def count_spans(recording: Recording) -> Tally:
            from instrument.trace.call_tree import tally_spans

            return tally_spans(recording.columns, trace.threads)

        recording_of_trace = cls(
            make_tally or (lambda: count_spans(recording_of_trace)),
            lambda: trace,
            make_cost=lambda: trace.cost,
            losses=trace.losses,
            notes=tuple(trace.notes),
            window_ns=trace.end_ns - trace.start_ns,
            recorder=trace.origin.recorder,
            make_startup=lambda: trace.startup,
            died=trace.died,
        )
        return recording_of_trace

    @classmethod
    def from_file(cls, saved: Saved) -> Recording:
        """Return the recording of a file. Spans are made only if a view needs them."""
        return cls.from_trace(saved.trace, saved.read_or_count_totals)


def make_json_values(value: Any) -> Any:
    if isinstance(value, Site):
        facts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        facts["attributes"] = dict(value.attributes)
        return {name: make_json_values(fact) for name, fact in facts.items() if fact or name == "name"}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        names += [name for name, member in vars(type(value)).items() if isinstance(member, property)]
        return {name: make_json_values(getattr(value, name)) for name in names if not name.startswith("_")}
    if isinstance(value, Mapping):
        return {str(key): make_json_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [make_json_values(item) for item in value]
    return value
