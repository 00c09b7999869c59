"""The `distribution` view: how much communication runs at the same time as computation, on the host and on each device.

It is the Distribution Summary of `paddle.profiler`. In all times parallel work counts once. Only time within steps
counts, or the whole window if there are no steps, and ratios are shares of that time. On the host, communication is the
time in spans of kind `comm`. An asynchronous communication lasts from its call to the end of its wait. On a device,
communication is the work of such spans and of the spans below them, or kernels of NCCL and XCCL. Computation on a
device is all other work except copies. Computation on the host is the time in operators, layers and phases, without
communication, copies and loading on the same thread.

The row `together` compares all communication with computation on the devices (on the host if no device computed).
Unlike in `paddle.profiler`, work of a communication is no computation, and computation on one device during the
communication of another device is no overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from instrument.recording.spans import Interval, Site
from instrument.report.copies_view import sizes_of_copies
from instrument.report.section import Coverage, Section, View
from instrument.report.table import Ratio, bounded, in_unit
from instrument.report.view import Options, Recording
from instrument.trace.columns import FARTHEST_NS, Bools, Columns, Int64s
from instrument.trace.forest import NONE
from instrument.trace.groups import Groups, distinct
from instrument.trace.intervals import NOTHING, Union, clipped, intersect, overlap, shared_ns, subtract, union, unite

COMPUTES = frozenset({"op", "layer", "phase"})
"""The kinds of span that are computation on the host."""

PAUSES = frozenset({"comm", "copy", "loader"})
"""The kinds of span during which their thread does not compute."""

KERNELS = ("nccl", "xccl")
"""The communication libraries by whose names kernels are recognised in traces of other profilers."""

HOST, TOGETHER = "host", "together"

NO_COMMUNICATION = (
    "No communication was recorded: `comm: auto` in the profile records that of torch.distributed; `kind: comm` in a "
    "function rule or a scope declares any other."
)


@dataclass(frozen=True, slots=True)
class DistributionView(View):
    """The `distribution` view. `of` is `step` or `window`. Ratios are shares of its time, `base_ns`."""

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

    def head(self) -> list[str]:
        unit, base = self._options.unit, "the time in steps" if self.of == "step" else "the window"
        ratios = f"ratios are of {base}, {in_unit(self.base_ns, unit)}"
        return [*self.coverage.lines(), f"Time unit: {unit}; unions; {ratios}"]

    def nothing(self) -> list[str]:
        return [] if self.places else self.coverage.none_held("communication", NO_COMMUNICATION)


@dataclass(frozen=True, slots=True)
class DistributionUse:
    """Communication and computation of the `host`, of one device, or `together`. Ratios are shares of `base_ns`."""

    name: str
    base_ns: int
    communication_ns: int
    computation_ns: int
    overlap_ns: int

    @property
    def exposed_ns(self) -> int:
        """The time of communication during which nothing computes."""
        return self.communication_ns - self.overlap_ns

    communication_ratio = Ratio("communication_ns", of="base_ns")
    """The share of the base time with communication, None if the base time is zero."""
    computation_ratio = Ratio("computation_ns", of="base_ns")
    overlap_ratio = Ratio("overlap_ns", of="base_ns")
    """The share of the base time with communication and computation at the same time."""
    exposed_ratio = Ratio("exposed_ns", of="base_ns")
    """The share of the base time with communication alone."""


@dataclass(frozen=True, slots=True)
class OperationUse:
    """The calls of one operation in one process group: sums over the calls, and over the waits for asynchronous calls.

    `device_ns` is None if no call has device time.
    """

    name: str
    calls: int
    moved_bytes: int
    host_ns: int
    waited_ns: int
    device_ns: int | None

    def moved_mb(self) -> float:
        return self.moved_bytes / 1e6


def distribution(recording: Recording, options: Options) -> DistributionView:
    """Return the view of the kept spans. It uses `state`, `rows`, `least_ns` and `unit`.

    `rows` and `least_ns` limit the operations by the time of their calls and waits.
    """
    trace = recording.columns
    work = _PlaceTimes(trace, recording.trace.coverage)
    base_ns = work.base.length_ns()
    coverage = Coverage.of_recording(recording)
    if not work.communicates:
        return DistributionView(coverage, work.of, base_ns, (), (), options)
    communicates = {place: intersect(union_of_place, work.base) for place, union_of_place in work.communicates.items()}
    computes = {place: intersect(union_of_place, work.base) for place, union_of_place in work.computes.items()}
    on_host, by_host = communicates.pop(HOST, NOTHING), computes.pop(HOST, NOTHING)
    devices = sorted({*communicates, *computes}, key=lambda device: (len(device), device))
    places: list[DistributionUse] = []
    if options.state != "GPU":
        places.append(_make_use(HOST, base_ns, on_host, by_host))
    if options.state != "CPU":
        places += [
            _make_use(device, base_ns, communicates.get(device, NOTHING), computes.get(device, NOTHING))
            for device in devices
        ]
    if devices and options.state == "All":
        overlaps = [
            intersect(unite([on_host, communicates.get(device, NOTHING)]), computes.get(device, NOTHING))
            for device in devices
        ]
        everywhere = unite([on_host, *communicates.values()])
        computing = unite([computes.get(device, NOTHING) for device in devices])
        if not len(computing.starts):
            computing, overlaps = by_host, [intersect(everywhere, by_host)]
        overlap_ns = unite(overlaps).length_ns()
        places.append(DistributionUse(TOGETHER, base_ns, everywhere.length_ns(), computing.length_ns(), overlap_ns))
    operations = tuple(_operation_uses(trace, work.calls, options))
    return DistributionView(coverage, work.of, base_ns, tuple(places), operations, options)


def _make_use(name: str, base_ns: int, communicates: Union, computes: Union) -> DistributionUse:
    shared = shared_ns(communicates, computes)
    return DistributionUse(name, base_ns, communicates.length_ns(), computes.length_ns(), shared)


class _PlaceTimes:
    """The communication and the computation of the host and of each device, and the spans of communication. `base` is
    the time in steps or, without steps, the part of the window without missing spans."""

    def __init__(self, trace: Columns, window: Interval) -> None:
        self.communicates: dict[str, Union] = {}
        self.computes: dict[str, Union] = {}
        self.calls = np.flatnonzero(trace.of_kind("comm"))
        inside = overlap(trace.start_ns, trace.end_ns, window)
        starts, ends = clipped(trace.start_ns, trace.end_ns, window)
        in_steps = inside & trace.of_kind("step")
        steps = union(starts[in_steps], ends[in_steps])
        of_window = union(np.array(window[:1]), np.array(window[1:]))
        self.of, self.base = ("step", steps) if len(steps.starts) else ("window", of_window)
        present = set(distinct(trace.site).tolist())
        is_named = [
            place in present and (site.kind == "comm" or any(kernel in site.name.lower() for kernel in KERNELS))
            for place, site in enumerate(trace.sites)
        ]  # fmt: skip
        if not any(is_named):
            return  # there is nothing to compare
        if len(self.calls):
            self.communicates[HOST] = union(*_flight_times(trace, self.calls))
        self._add_devices(trace, window, trace.of_sites(is_named))
        if self.communicates:
            self.computes[HOST] = _computation_of_host(trace, inside, starts, ends)

    def _add_devices(self, trace: Columns, window: Interval, is_named: Bools) -> None:
        """Add the communication and the computation of each device."""
        intervals = trace.device.only(trace.device.timed).within(window)
        is_comm = (trace.owners(trace.of_kind("comm"))[intervals.row] != NONE) | is_named[intervals.row]
        computes = ~is_comm & ~trace.of_kind("copy")[intervals.row]
        for device in distinct(intervals.device).tolist():
            for places, of_place in ((self.communicates, is_comm), (self.computes, computes)):
                chosen = intervals.only(of_place & (intervals.device == device))
                if len(chosen):
                    places[f"device {device}"] = chosen.union()


def _computation_of_host(trace: Columns, inside: Bools, starts: Int64s, ends: Int64s) -> Union:
    """Return the time in which any thread computes while it neither communicates nor copies nor loads."""
    computing, pausing = inside & trace.of_kind(*COMPUTES), inside & trace.of_kind(*PAUSES)
    rows = np.flatnonzero(computing | pausing)
    rows = rows[np.argsort(trace.thread_id[rows], kind="stable")]
    unions = [NOTHING]
    for of_thread in np.split(rows, np.flatnonzero(np.diff(trace.thread_id[rows])) + 1):
        works, pauses = of_thread[computing[of_thread]], of_thread[pausing[of_thread]]
        unions.append(subtract(union(starts[works], ends[works]), union(starts[pauses], ends[pauses])))
    return unite(unions)


def _flight_times(trace: Columns, calls: Int64s) -> tuple[Int64s, Int64s]:
    """Return the begin and end of each communication. A wait with the attribute `in_flight_ns` begins with its call."""
    starts, ends = trace.start_ns[calls].copy(), trace.end_ns[calls]
    for place, flight_ns in enumerate(trace.attributes.values("in_flight_ns", calls)):
        if isinstance(flight_ns, int) and not isinstance(flight_ns, bool):
            starts[place] = max(min(int(starts[place]), int(ends[place]) - flight_ns), -FARTHEST_NS)
    return starts, ends


def _operation_uses(trace: Columns, calls: Int64s, options: Options) -> list[OperationUse]:
    """Return the operations, the longest sum of calls and waits first, and one row that sums up the others."""
    sums_by_name: dict[str, list[int]] = {}
    of_sites = distinct(trace.site[calls])
    device_ns, timed = trace.device_times(calls)
    moved = sizes_of_copies(trace, calls)
    groups = Groups(np.searchsorted(of_sites, trace.site[calls]), len(of_sites))
    columns = (np.ones_like(calls), moved, trace.total_ns[calls], device_ns, timed)
    totals = [groups.sums(column).tolist() for column in columns]
    for place, count, moved_bytes, total_ns, on_device_ns, is_timed in zip(of_sites.tolist(), *totals, strict=True):
        name, waits = _describe_operation(trace.sites[place])
        sums = sums_by_name.setdefault(name, [0] * 6)
        counts = (0 if waits else count, moved_bytes, 0 if waits else total_ns, total_ns if waits else 0, on_device_ns)
        sums[:] = map(int.__add__, sums, (*counts, is_timed))
    ordered = sorted(sums_by_name.items(), key=lambda item: (-item[1][2] - item[1][3], item[0]))
    shown = bounded(ordered, options, lambda item: item[1][2] + item[1][3], _sum_operations)
    return [_operation_use(name, sums) for name, sums in shown]


def _sum_operations(rows: Sequence[tuple[str, list[int]]]) -> tuple[str, list[int]]:
    return f"(remaining {len(rows)})", [sum(column) for column in zip(*(sums for _, sums in rows), strict=True)]


def _operation_use(name: str, sums: Sequence[int]) -> OperationUse:
    calls, moved_bytes, host_ns, waited_ns, device_ns, timed = sums
    return OperationUse(name, calls, moved_bytes, host_ns, waited_ns, device_ns if timed else None)


def _describe_operation(site: Site) -> tuple[str, bool]:
    """Return the operation of a site with its process group, and True if the site is the wait for that operation."""
    operation = dict(site.attributes).get("op")
    if not isinstance(operation, str):
        return site.name, False
    return f"{operation} ({site.instance})" if site.instance else operation, site.name == f"{operation}.wait"
