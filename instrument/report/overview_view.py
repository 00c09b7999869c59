"""The `overview` view: the share of the window in which each kind of work ran, on the host and on each device.

A moment counts once, even if several threads or streams work. Rows may overlap, so they do not add up. Compute is all
device work except copies. Communication is the work of spans of kind `comm` and of the spans below them.

The `distribution` view, also in this module, shows how much communication runs at the same time as computation. Only
the time within steps counts, if there are steps. Kernels of NCCL and XCCL are communication.

Both are views of `paddle.profiler`: its Overview Summary and its Distribution Summary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from instrument.profile.model import KINDS
from instrument.recording.spans import Interval, Site, is_interruption
from instrument.report.copies_view import sizes_of_copies
from instrument.report.request_groups import read_integer_attribute
from instrument.report.section import Coverage, Section, View
from instrument.report.table import Ratio, compute_share, format_time, limit_rows
from instrument.report.view import Options, Recording, SortKey
from instrument.trace.columns import FARTHEST_NS, Bools, Columns, DeviceIntervals, Int64s
from instrument.trace.indices import NONE, Groups, find_distinct, rank_distinct
from instrument.trace.intervals import (
    NOTHING,
    Union,
    are_in_window,
    clip_intervals,
    intersect,
    make_union,
    measure_intersection,
    subtract,
    unite,
)

ALL_DEVICES = -1
"""The device number of rows that combine all devices."""

NO_SPAN = "No span was recorded in it: name functions or layers in the profile, or open a scope."


@dataclass(frozen=True, slots=True)
class KindUse:
    """The spans of one kind in the window. `time_ns` is the time in which at least one of them was open. `ratio` is the
    share of the window. `step_ratio` is the share of the time of steps, None without steps."""

    kind: str
    calls: int
    time_ns: int
    in_steps_ns: int
    ratio: float | None
    step_ratio: float | None


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """The device intervals of one kind of work. `time_ns` is the time in which at least one of them ran."""

    device: int
    work: str
    stretches: int
    time_ns: int
    in_steps_ns: int
    ratio: float | None
    step_ratio: float | None


@dataclass(frozen=True, slots=True)
class Overview(View):
    """The `overview` view. `window_ns` is the time without missing spans. `steps_ns` is the time of steps, None without
    steps."""

    coverage: Coverage
    window_ns: int
    steps_ns: int | None
    kinds: tuple[KindUse, ...]
    devices: tuple[DeviceWork, ...]
    _options: Options = field(repr=False)

    TITLE = "Overview"

    def sections(self) -> list[Section]:
        if not self.kinds and not self.devices and self._options.state != "GPU":
            return []
        steps = "|step_ratio=Of steps" if self.steps_ns is not None else ""
        window = KindUse(
            "window", 0, self.window_ns, self.steps_ns or 0, compute_share(self.window_ns, self.window_ns),
            compute_share(self.steps_ns or 0, self.steps_ns or 0),
        )  # fmt: skip
        of_devices = groupby(self.devices, attrgetter("device"))
        return [
            Section(
                "By kind", [window, *self.kinds], f"kind=Kind|calls=Calls|time_ns=Time|ratio=Of window{steps}",
                ("Time in which at least one span of the kind ran. Rows overlap, so they do not add up.",),
                {
                    "kind": lambda use, unit: use.kind if use is window else f"  {use.kind}",
                    "calls": lambda use, unit: "" if use is window else str(use.calls),
                },
                widths=12,
            ),
            *(
                Section(
                    "All devices" if device == ALL_DEVICES else f"Device {device}", list(uses),
                    f"work=Work|stretches=Intervals|time_ns=Time|ratio=Of window{steps}",
                    texts={"work": lambda use, unit: "  " * (use.work == "communication") + use.work}, widths=12,
                )
                for device, uses in of_devices
            ),
        ]  # fmt: skip

    def header_lines(self) -> list[str]:
        steps = ["Of steps: the part of the row within steps / the time of all steps"] * (self.steps_ns is not None)
        return [*self.coverage.lines(), f"Time unit: {self._options.unit}", *steps]

    def reasons_if_empty(self) -> list[str]:
        return [] if self.sections() else self.coverage.explain_no_spans("span of that time", NO_SPAN)

    def footnotes(self) -> list[str]:
        has_none = not self.devices and self._options.state != "CPU"
        return ["No device time was recorded in it."] if has_none else []


def overview(recording: Recording, options: Options) -> Overview:
    """Return the `overview` view. The option `state` selects the host or the devices. Kinds are sorted by time, or by
    calls if `sorted_by` is `calls`. Of the other options, only `unit` applies."""
    window = recording.trace.coverage
    window_ns = window[1] - window[0]
    kinds_of_work = _intervals_of_kinds(recording.columns, window)
    steps = kinds_of_work.get("step")
    steps_ns = steps.union.length_ns() if steps is not None else None

    def measure_row(stretches: _Stretches) -> tuple[int, int, int, float | None, float | None]:
        time_ns = stretches.union.length_ns()
        in_steps_ns = measure_intersection(stretches.union, steps.union) if steps is not None else 0
        step_ratio = None if steps_ns is None else compute_share(in_steps_ns, steps_ns)
        return stretches.number, time_ns, in_steps_ns, compute_share(time_ns, window_ns), step_ratio

    order = [kind for kind in KINDS if kind in kinds_of_work]  # unknown kinds, of other profilers, come last
    order += [kind for kind in kinds_of_work if kind not in KINDS]
    kinds = [KindUse(kind, *measure_row(kinds_of_work[kind])) for kind in order]
    by_calls = SortKey.parse_sort_key(options).column == "calls"
    kinds.sort(key=lambda use: (-use.calls if by_calls else 0, -use.time_ns))
    devices = [
        DeviceWork(device, work, *measure_row(stretches))
        for device, work, stretches in _union_device_intervals_by_work(recording.columns, window)
    ]
    shown_kinds = tuple(kinds) if options.state != "GPU" else ()
    shown_devices = tuple(devices) if options.state != "CPU" else ()
    coverage = Coverage.measure_coverage(recording)
    return Overview(coverage, window_ns, steps_ns, shown_kinds, shown_devices, options)


class _Stretches(NamedTuple):
    number: int
    union: Union


def _intervals_of_kinds(trace: Columns, window: Interval) -> dict[str, _Stretches]:
    """Unite the intervals of each kind of span. Blocked event loops and garbage collections are omitted, because the
    interrupted spans contain them."""
    inside = are_in_window(trace.start_ns, trace.end_ns, window)
    inside &= ~trace.are_of_sites(list(map(is_interruption, trace.sites)))
    starts, ends = clip_intervals(trace.start_ns, trace.end_ns, window)
    of_kinds = {kind: inside & trace.are_of_kind(kind) for kind in dict.fromkeys(site.kind for site in trace.sites)}
    return {
        kind: _Stretches(int(rows.sum()), make_union(starts[rows], ends[rows]))
        for kind, rows in of_kinds.items()
        if rows.any()
    }


def _union_device_intervals_by_work(trace: Columns, window: Interval) -> Iterator[tuple[int, str, _Stretches]]:
    intervals = trace.device.select(trace.device.is_measured).clip_to(window)
    is_copy, is_comm = trace.are_of_kind("copy")[intervals.row], mask_communication(trace, intervals)
    every = np.ones(len(intervals), dtype=np.bool_)
    works = {"busy": every, "compute": ~is_copy, "communication": is_comm & ~is_copy, "copies": is_copy}
    stretches = divide_intervals_by_device(intervals, works)
    numbers = sorted({device for device, _ in stretches})
    for work in works if len(numbers) > 1 else ():
        if pieces := [piece for (_, part), piece in stretches.items() if part == work]:
            merged = unite([piece.union for piece in pieces])
            yield ALL_DEVICES, work, _Stretches(sum(piece.number for piece in pieces), merged)
    yield from ((device, work, piece) for (device, work), piece in stretches.items())


def mask_communication(trace: Columns, intervals: DeviceIntervals) -> Bools:
    return np.asarray(trace.find_topmost_wanted_rows(trace.are_of_kind("comm"))[intervals.row] != NONE)


def divide_intervals_by_device(
    intervals: DeviceIntervals, works: Mapping[str, Bools]
) -> dict[tuple[int, str], _Stretches]:
    return {
        (device, work): _Stretches(len(chosen), chosen.union())
        for device in find_distinct(intervals.device).tolist()
        for work, of_work in works.items()
        if len(chosen := intervals.select(of_work & (intervals.device == device)))
    }


COMPUTES = frozenset({"op", "layer", "phase"})
"""The kinds of span that are computation on the host."""

PAUSES = frozenset({"comm", "copy", "loader"})
"""The kinds of span in which a thread does not compute."""

KERNELS = ("nccl", "xccl")
"""The communication libraries whose kernels are recognised by name in traces of other profilers."""

HOST, TOGETHER = "host", "together"

NO_COMMUNICATION = (
    "No communication was recorded: `comm: auto` in the profile records that of torch.distributed; `kind: comm` in a "
    "function rule or a scope declares any other."
)


@dataclass(frozen=True, slots=True)
class DistributionView(View):
    """The `distribution` view of communication and computation. All ratios are shares of `base_ns`, the time of the
    steps. Without steps, it is the time of the window."""

    coverage: Coverage
    of: str
    base_ns: int
    places: tuple[DistributionUse, ...]
    operations: tuple[OperationUse, ...]
    _options: Options = field(repr=False)

    TITLE = "Distribution"

    def sections(self) -> list[Section]:
        return [
            Section(
                "Communication", self.places,
                "name=Place|communication_ns=Communication|communication_ratio=|computation_ns=Computation|"
                "computation_ratio=|overlap_ns=Overlap|overlap_ratio=|exposed_ns=Exposed|exposed_ratio=",
                ("Exposed: communication while nothing computes.",),
            ),
            Section(
                "Operations", self.operations,
                "name=Operation|calls=Calls|moved_mb=MB|host_ns=In calls|waited_ns=In waits|device_ns=Device",
                ("MB: 10^6 bytes, the larger of the bytes that a rank sends and receives. Times are sums over calls.",),
                widths=10,
            ),
        ]  # fmt: skip

    def header_lines(self) -> list[str]:
        unit, base = self._options.unit, "the time in steps" if self.of == "step" else "the window"
        ratios = f"ratios are of {base}, {format_time(self.base_ns, unit)}"
        return [*self.coverage.lines(), f"Time unit: {unit}; unions; {ratios}"]

    def reasons_if_empty(self) -> list[str]:
        return [] if self.places else self.coverage.explain_no_spans("communication", NO_COMMUNICATION)


@dataclass(frozen=True, slots=True)
class DistributionUse:
    """The times of communication and computation in one place. `name` is `host`, a device, or `together`. All ratios
    are shares of `base_ns`."""

    name: str
    base_ns: int
    communication_ns: int
    computation_ns: int
    overlap_ns: int

    @property
    def exposed_ns(self) -> int:
        """The time of communication without simultaneous computation."""
        return self.communication_ns - self.overlap_ns

    communication_ratio = Ratio("communication_ns", of="base_ns")
    computation_ratio = Ratio("computation_ns", of="base_ns")
    overlap_ratio = Ratio("overlap_ns", of="base_ns")
    """The share of the base time with simultaneous communication and computation."""
    exposed_ratio = Ratio("exposed_ns", of="base_ns")
    """The share of the base time with communication alone."""


@dataclass(frozen=True, slots=True)
class OperationUse:
    """The calls of one operation in one process group. Waits for asynchronous calls are included. `device_ns` is None
    if no call has device time."""

    name: str
    calls: int
    moved_bytes: int
    host_ns: int
    waited_ns: int
    device_ns: int | None

    def moved_mb(self) -> float:
        return self.moved_bytes / 1e6


def distribution(recording: Recording, options: Options) -> DistributionView:
    """Return the `distribution` view. The options `state`, `rows`, `least_ns` and `unit` apply. `rows` and `least_ns`
    limit the list of operations."""
    trace, window = recording.columns, recording.trace.coverage
    coverage, calls = Coverage.measure_coverage(recording), np.flatnonzero(trace.are_of_kind("comm"))
    steps = _intervals_of_kinds(trace, window).get("step")
    of, base = "window", make_union(np.array(window[:1]), np.array(window[1:]))
    if steps is not None and len(steps.union.starts):
        of, base = "step", steps.union
    base_ns, works = base.length_ns(), _separate_communication_from_computation(trace, window, calls, base)
    if not works:
        return DistributionView(coverage, of, base_ns, (), (), options)
    on_host, by_host = works.pop(HOST)
    devices = sorted(works, key=lambda device: (len(device), device))

    def make_use(name: str, communicating: Union, computing: Union, overlaps: Union | None = None) -> DistributionUse:
        overlap_ns = measure_intersection(communicating, computing) if overlaps is None else overlaps.length_ns()
        return DistributionUse(name, base_ns, communicating.length_ns(), computing.length_ns(), overlap_ns)

    places = [make_use(HOST, on_host, by_host)] if options.state != "GPU" else []
    if options.state != "CPU":
        places += [make_use(device, *works[device]) for device in devices]
    if devices and options.state == "All":
        communicating, computing = map(list, zip(*works.values(), strict=True))
        pairs = zip(communicating, computing, strict=True)
        overlaps = unite([intersect(unite([on_host, communicates]), computes) for communicates, computes in pairs])
        everywhere, by_devices = unite([on_host, *communicating]), unite(computing)
        has_work = len(by_devices.starts) > 0
        places.append(make_use(TOGETHER, everywhere, *((by_devices, overlaps) if has_work else (by_host,))))
    operations = tuple(_sum_operations(trace, calls, options))
    return DistributionView(coverage, of, base_ns, tuple(places), operations, options)


def _separate_communication_from_computation(
    trace: Columns, window: Interval, calls: Int64s, base: Union
) -> dict[str, list[Union]]:
    is_named = trace.are_of_sites(
        [site.kind == "comm" or any(kernel in site.name.lower() for kernel in KERNELS) for site in trace.sites]
    )
    if not is_named.any():
        return {}  # there is nothing to compare
    intervals = trace.device.select(trace.device.is_measured).clip_to(window)
    is_comm = mask_communication(trace, intervals) | is_named[intervals.row]
    computes = ~is_comm & ~trace.are_of_kind("copy")[intervals.row]
    if not len(calls) and not is_comm.any():
        return {}
    works: dict[str, list[Union]] = defaultdict(lambda: [NOTHING, NOTHING])
    works[HOST] = [make_union(*_measure_communication_intervals(trace, calls)), _computation_of_host(trace, window)]
    for (device, work), stretches in divide_intervals_by_device(
        intervals, {"communication": is_comm, "": computes}
    ).items():
        works[f"device {device}"][not work] = stretches.union
    return {place: [intersect(work, base) for work in pair] for place, pair in works.items()}


def _computation_of_host(trace: Columns, window: Interval) -> Union:
    """Return the time in which at least one thread computes. A thread does not compute while it communicates, copies or
    loads."""
    inside = are_in_window(trace.start_ns, trace.end_ns, window)
    starts, ends = clip_intervals(trace.start_ns, trace.end_ns, window)
    computing, pausing = inside & trace.are_of_kind(*COMPUTES), inside & trace.are_of_kind(*PAUSES)
    rows = np.flatnonzero(computing | pausing)
    threads, thread = rank_distinct(trace.thread_id[rows])
    unions = [NOTHING]
    for of_thread in Groups(thread, len(threads)).list_rows():
        works, pauses = rows[of_thread][computing[rows[of_thread]]], rows[of_thread][pausing[rows[of_thread]]]
        unions.append(subtract(make_union(starts[works], ends[works]), make_union(starts[pauses], ends[pauses])))
    return unite(unions)


def _measure_communication_intervals(trace: Columns, calls: Int64s) -> tuple[Int64s, Int64s]:
    """Return the start and end times of each communication. An asynchronous communication ends when the wait for it
    ends."""
    starts, ends = trace.start_ns[calls], trace.end_ns[calls]
    flight_ns = read_integer_attribute(trace.attributes, "in_flight_ns", calls, FARTHEST_NS)
    return np.where(flight_ns == NONE, starts, np.minimum(starts, ends - flight_ns).clip(-FARTHEST_NS)), ends


def _sum_operations(trace: Columns, calls: Int64s, options: Options) -> list[OperationUse]:
    names, of_site = trace.describe_sites(lambda site: _describe_operation(site)[0])
    is_wait = trace.are_of_sites([_describe_operation(site)[1] for site in trace.sites])[calls]
    total_ns = trace.total_ns[calls]
    groups = Groups(of_site[trace.site[calls]], len(names))
    columns = (
        ~is_wait, sizes_of_copies(trace, calls), total_ns * ~is_wait, total_ns * is_wait, *trace.device_times(calls),
        np.ones_like(calls),
    )  # fmt: skip
    sums = zip(names, *(groups.sum_by_group(column.astype(np.int64)).tolist() for column in columns), strict=True)
    ordered = sorted((row for row in sums if row[-1]), key=lambda row: (-row[3] - row[4], row[0]))

    def sum_omitted(rows: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        _, *added = zip(*rows, strict=True)
        return f"(remaining {len(rows)})", *map(sum, added)

    return [
        OperationUse(name, count, moved_bytes, host_ns, waited_ns, device_ns if timed else None)
        for name, count, moved_bytes, host_ns, waited_ns, device_ns, timed, _ in limit_rows(
            ordered, options, lambda row: row[3] + row[4], sum_omitted
        )
    ]


def _describe_operation(site: Site) -> tuple[str, bool]:
    operation = dict(site.attributes).get("op")
    if not isinstance(operation, str):
        return site.name, False
    return f"{operation} ({site.instance})" if site.instance else operation, site.name == f"{operation}.wait"
