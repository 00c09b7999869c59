"""The `distribution` view: communication beside computation, on the host and on each device.

It is the Distribution Summary of `paddle.profiler`. All times are unions, clipped to the steps, or to the window where
no step was recorded, and ratios are of these. Communication of the host is the time in spans of kind `comm`, and from
the call of an asynchronous one to the end of the wait for it; that of a device is what such spans and those below them
put there, and kernels of NCCL and XCCL in traces of other profilers. Computation of a device is all else but copies;
that of the host is the time in operators, layers and phases, less what the same thread spent in communication, copies
and loading.

`together` is communication on the host or on a device, beside computation of the devices (of the host where no device
computed). What a device computes while another one communicates is no overlap, and what a communication puts on a
device is no computation; that profiler counts both.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import not_

from instrument.recording.spans import UNTIMED, Interval, Site, Span, Trace
from instrument.report.device_view import Coverage, none_held
from instrument.report.stretches import (
    FARTHEST_NS,
    common,
    device_time,
    host_time,
    length_ns,
    owners,
    packed,
    shared_ns,
    sites,
    united,
    without,
)
from instrument.report.table import in_unit, named_table, number, section_title, share, tenths, title
from instrument.report.view import Options, Recording

COMPUTES = frozenset({"op", "layer", "phase"})
"""Kinds of span in which the host computes."""

PAUSES = frozenset({"comm", "copy", "loader"})
"""Kinds of span in which the thread that computes around them does not."""

KERNELS = ("nccl", "xccl")
"""What the names of kernels that communicate hold, in traces of other profilers."""

HOST, TOGETHER = "host", "together"

MOST_BYTES = 1 << 63
"""No call moves as many; a damaged file may say so."""

NO_COMMUNICATION = (
    "No communication was recorded: `comm: auto` in the profile records that of torch.distributed; `kind: comm` in a "
    "function rule or a scope declares any other."
)


@dataclass(frozen=True, slots=True)
class Distribution:
    """The view. `of` is `step` or `window`, of whose time, `base_ns`, ratios are."""

    coverage: Coverage
    of: str
    base_ns: int
    places: tuple[PlaceUse, ...]
    operations: tuple[OperationUse, ...]
    _options: Options = field(repr=False)

    def lines(self) -> list[str]:
        """The text."""
        lines = [*title("Distribution Report"), *self.coverage.lines()]
        if not self.places:
            return [
                *lines,
                "",
                *none_held("communication", NO_COMMUNICATION, complete=self.coverage.complete),
            ]
        unit = self._options.unit
        steps = "the time in steps" if self.of == "step" else "the window"
        lines += [
            f"Time unit: {unit}; unions; ratios are of {steps}, {in_unit(self.base_ns, unit)}",
            "Exposed: communication beside which nothing computes.",
            "",
        ]
        cells = [
            [
                place.name,
                *_share_cells(place.communication_ns, place.communication_ratio, unit),
                *_share_cells(place.computation_ns, place.computation_ratio, unit),
                *_share_cells(place.overlap_ns, place.overlap_ratio, unit),
                *_share_cells(place.exposed_ns, place.exposed_ratio, unit),
            ]
            for place in self.places
        ]
        header = ["Place", "Communication", "", "Computation", "", "Overlap", "", "Exposed", ""]
        lines += [*named_table(header, cells, 0), ""]
        if self.operations:
            cells = [
                [
                    one.name,
                    str(one.calls),
                    number(one.moved_bytes / 1e6),
                    in_unit(one.host_ns, unit),
                    in_unit(one.waited_ns, unit),
                    in_unit(one.device_ns, unit),
                ]
                for one in self.operations
            ]
            lines += section_title("Operations")
            lines += [*named_table(["Operation", "Calls", "MB", "Calls took", "Waits took", "Device"], cells, 10), ""]
            lines += ["MB: 10^6 bytes, the larger of what a rank hands over and gets. Times are sums over calls."]
        return lines


@dataclass(frozen=True, slots=True)
class PlaceUse:
    """Communication and computation of the `host`, of a device, or `together`; ratios are of `base_ns`."""

    name: str
    base_ns: int
    communication_ns: int
    computation_ns: int
    overlap_ns: int

    @property
    def exposed_ns(self) -> int:
        """Communication beside which nothing computed."""
        return self.communication_ns - self.overlap_ns

    @property
    def communication_ratio(self) -> float | None:
        """None where the base is no time at all, and so below."""
        return share(self.communication_ns, self.base_ns)

    @property
    def computation_ratio(self) -> float | None:
        """Computation."""
        return share(self.computation_ns, self.base_ns)

    @property
    def overlap_ratio(self) -> float | None:
        """Communication beside which something computed."""
        return share(self.overlap_ns, self.base_ns)

    @property
    def exposed_ratio(self) -> float | None:
        """Communication beside which nothing computed."""
        return share(self.exposed_ns, self.base_ns)


@dataclass(frozen=True, slots=True)
class OperationUse:
    """Calls of one operation in one group: sums over calls, and over the waits for asynchronous ones.

    `device_ns` is None where none has device time.
    """

    name: str
    calls: int
    moved_bytes: int
    host_ns: int
    waited_ns: int
    device_ns: int | None


def distribution(recording: Recording, options: Options) -> Distribution:
    """The view of the spans that are held. `state`, `rows`, `least_ns` and `unit` mean something to it.

    `rows` and `least_ns` are of the operations, by the time of their calls and waits.
    """
    found = _Found(recording.trace)
    base_ns = length_ns(found.base)
    told = Coverage.of(recording.trace)
    if not found.communicates:
        return Distribution(told, found.of, base_ns, (), (), options)
    communicates = {place: common(own, found.base) for place, own in found.communicates.items()}
    computes = {place: common(own, found.base) for place, own in found.computes.items()}
    on_host = communicates.pop(HOST, b"")
    by_host = computes.pop(HOST, b"")
    devices = sorted({*communicates, *computes}, key=lambda device: (len(device), device))
    places: list[PlaceUse] = []
    if options.state != "GPU":
        places.append(_place(HOST, base_ns, on_host, by_host))
    if options.state != "CPU":
        places += [
            _place(device, base_ns, communicates.get(device, b""), computes.get(device, b"")) for device in devices
        ]
    if devices and options.state == "All":
        beside = [
            common(united([on_host, communicates.get(device, b"")]), computes.get(device, b"")) for device in devices
        ]
        everywhere = united([on_host, *communicates.values()])
        computing = united(computes.get(device, b"") for device in devices)
        if not computing:
            computing, beside = by_host, [common(everywhere, by_host)]
        overlap_ns = length_ns(united(beside))
        places.append(PlaceUse(TOGETHER, base_ns, length_ns(everywhere), length_ns(computing), overlap_ns))
    return Distribution(told, found.of, base_ns, tuple(places), tuple(_operations(found.calls, options)), options)


def _share_cells(part_ns: int, ratio: float | None, unit: str) -> list[str]:
    return [in_unit(part_ns, unit), tenths(ratio, 1)]


def _place(name: str, base_ns: int, communicates: bytes, computes: bytes) -> PlaceUse:
    shared = shared_ns(communicates, computes)
    return PlaceUse(name, base_ns, length_ns(communicates), length_ns(computes), shared)


class _Found:
    """The time in which each place communicates and computes, as unions, the spans of communication, and the base: the
    time in steps, or the part of the window that is held."""

    def __init__(self, trace: Trace) -> None:
        hosts = host_time(trace.spans, trace.held)
        steps = united(stretches for site, _, _, stretches in hosts if site.kind == "step")
        self.of, self.base = ("step", steps) if steps else ("window", packed([trace.held]))
        below, self.calls, _ = owners(trace.spans, "comm")
        named = {site for site in sites(trace.spans) if site.kind == "comm" or _is_named(site)}
        communicates: dict[str, list[bytes]] = {}
        computes: dict[str, list[bytes]] = {}
        if not named:
            self.communicates = self.computes = dict[str, bytes]()
            return  # nothing to set beside anything
        if self.calls:
            communicates[HOST] = [packed(map(_in_flight, self.calls))]
        # What calls of communication put on a device, and all else.
        ids = array("q", below)
        for is_comm, wanted in ((True, ids), (False, map(not_, ids))):
            spans = list(compress(trace.spans, wanted))
            for group in device_time(spans, bytes(8 * len(spans)), trace.held).groups:
                places = communicates if is_comm or group.site in named else computes
                if group.timed and (places is communicates or group.site.kind != "copy"):
                    places.setdefault(f"device {group.device}", []).append(group.stretches)
        if communicates:
            computes[HOST] = list(_computing(hosts))
        self.communicates = {place: united(parts) for place, parts in communicates.items()}
        self.computes = {place: united(parts) for place, parts in computes.items()}


def _computing(hosts: Sequence[tuple[Site, int, int, bytes]]) -> Iterator[bytes]:
    """Where each thread computes and does not communicate, copy or load."""
    by_thread: dict[int, tuple[list[bytes], list[bytes]]] = {}
    for site, thread_id, _, stretches in hosts:
        computing, pausing = by_thread.setdefault(thread_id, ([], []))
        if site.kind in COMPUTES:
            computing.append(stretches)
        elif site.kind in PAUSES:
            pausing.append(stretches)
    for computing, pausing in by_thread.values():
        yield without(united(computing), united(pausing))


def _is_named(site: Site) -> bool:
    """Whether the name is that of a kernel of communication."""
    return any(kernel in site.name.lower() for kernel in KERNELS)


def _in_flight(span: Span) -> Interval:
    """The time from the call of a communication to the end of the span, as far as the span tells it."""
    flight_ns = span.attributes.get("in_flight_ns")
    if isinstance(flight_ns, int) and not isinstance(flight_ns, bool):
        return max(min(span.start_ns, span.end_ns - flight_ns), -FARTHEST_NS), span.end_ns
    return span.start_ns, span.end_ns


def _operations(calls: Iterable[Span], options: Options) -> list[OperationUse]:
    """The operations by the time of their calls and waits, the rest as one row more."""
    found: dict[str, list[int]] = {}
    names: dict[Site, tuple[str, bool]] = {}
    for span in calls:
        if span.site not in names:
            names[span.site] = _operation(span.site)
        name, waits = names[span.site]
        sums = found.setdefault(name, [0] * 6)
        moved = span.attributes.get("bytes")
        sums[0] += not waits
        sums[1] += moved if isinstance(moved, int) and not isinstance(moved, bool) and 0 < moved < MOST_BYTES else 0
        sums[3 if waits else 2] += span.total_ns
        sums[4] += span.device_ns
        sums[5] += any(interval.label not in UNTIMED for interval in span.device)
    ordered = sorted(found.items(), key=lambda item: (-item[1][2] - item[1][3], item[0]))
    large = [item for item in ordered if item[1][2] + item[1][3] >= options.least_ns][: options.rows]
    uses = [_operation_use(name, sums) for name, sums in large]
    rest = [sums for _, sums in ordered[len(large) :]]
    if rest:
        uses.append(_operation_use(f"(remaining {len(rest)})", [sum(column) for column in zip(*rest, strict=True)]))
    return uses


def _operation_use(name: str, sums: Sequence[int]) -> OperationUse:
    calls, moved_bytes, host_ns, waited_ns, device_ns, timed = sums
    return OperationUse(name, calls, moved_bytes, host_ns, waited_ns, device_ns if timed else None)


def _operation(site: Site) -> tuple[str, bool]:
    """What an operation is called, with its group, and whether the span is of the wait for one."""
    operation = dict(site.attributes).get("op")
    if not isinstance(operation, str):
        return site.name, False
    return f"{operation} ({site.instance})" if site.instance else operation, site.name == f"{operation}.wait"
