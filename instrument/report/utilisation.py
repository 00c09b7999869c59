"""What each device did in a window: busy, starved or idle, to the nanosecond, and the same within each request.

All figures come from the device intervals of instrumented spans, so idle means: no instrumented device work. An
interval is the stretch of a stream between two events. It may hold gaps between kernels, and where it encloses the
interval of a call below it, the outer one counts whole. Times that devices or streams share are unions, work by name
is a sum, and everything is clipped at the window.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from instrument.recording.spans import UNTIMED, Interval, Span, Trace, clip
from instrument.recording.tally import percentiles_of
from instrument.report.stretches import (
    Group,
    Owners,
    at_once,
    device_time,
    length_ns,
    owners,
    packed,
    shared_ns,
    united,
    within,
)
from instrument.report.table import share

NO_EVENTS = "no events"
"""Why a span that asked for device time has none, where no interval says it."""


@dataclass(frozen=True, slots=True)
class StreamUse:
    """One stream: its timed intervals, the sum of their lengths, their union, and its share of the window."""

    stream: int
    intervals: int
    summed_ns: int
    busy_ns: int
    window_ratio: float | None


@dataclass(frozen=True, slots=True)
class LabelUse:
    """One label: how many intervals carry it, and the sum of their lengths, None where they time nothing."""

    label: str
    intervals: int
    summed_ns: int | None


@dataclass(frozen=True, slots=True)
class NameUse:
    """Device time of the spans of one name and kind on one device.

    `calls` are those with device time. `summed_ns` is the sum over calls of the union of a call's intervals, `busy_ns`
    the union over all calls, and `busy_ratio` its share of the time in which the device was busy, where an outer call
    holds those below it; p50 and p99 are those of `tally.percentiles`. One with `remaining` stands for so many names
    that were left out; it has sums alone.
    """

    name: str
    kind: str
    calls: int
    summed_ns: int
    busy_ns: int | None
    p50_ns: int | None
    p99_ns: int | None
    busy_ratio: float | None
    remaining: int = 0

    @property
    def mean_ns(self) -> float | None:
        """Device time of a call."""
        return self.summed_ns / self.calls if self.calls else None


@dataclass(frozen=True, slots=True)
class RequestUse:
    """One device within the host interval of a request: busy with its own spans, with others alone, or idle.

    The three add up to `wall_ns`. Own work that ran beside that of others counts as own.
    """

    device: int
    span_id: int
    name: str
    wall_ns: int
    own_ns: int
    others_ns: int
    starved_ns: int


@dataclass(frozen=True, slots=True)
class EndpointUse:
    """Sums over the requests of one name that had device time on a device; the parts add up to `wall_ns`.

    One with `remaining` stands for so many names that were left out.
    """

    name: str
    requests: int
    wall_ns: int
    own_ns: int
    others_ns: int
    starved_ns: int
    remaining: int = 0

    @property
    def wall_mean_ns(self) -> float:
        """Of a request."""
        return self.wall_ns / self.requests

    @property
    def own_mean_ns(self) -> float:
        """Of a request."""
        return self.own_ns / self.requests

    @property
    def others_mean_ns(self) -> float:
        """Of a request."""
        return self.others_ns / self.requests

    @property
    def starved_mean_ns(self) -> float:
        """Of a request."""
        return self.starved_ns / self.requests

    @property
    def own_ratio(self) -> float | None:
        """Of the wall."""
        return share(self.own_ns, self.wall_ns)

    @property
    def others_ratio(self) -> float | None:
        """Of the wall."""
        return share(self.others_ns, self.wall_ns)

    @property
    def starved_ratio(self) -> float | None:
        """Of the wall."""
        return share(self.starved_ns, self.wall_ns)


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """One device: `compute_ns`, `copy_ns`, `starved_ns` and `unasked_ns` add up to the window.

    `compute_ns` is the union of the intervals of all spans that are no copies, `copy_ns` that of copies outside of it,
    `starved_ns` is idle while at least one request was in flight, `unasked_ns` idle while none was. Their ratios are of
    the window; `starved_in_flight_ratio` is of the time in which a request was in flight.
    `hidden_copy_ns` is the time of copies beside compute, and its ratio is of all time with copies. `overlap_ns` is the
    time in which at least two streams were busy, its ratio is of the busy time, `most_streams` how many were at once.
    `uncertainty_ns` is the least and the greatest of the intervals' places on the host clock. `outside` counts timed
    intervals that lie outside of the window.
    """

    device: int
    window_ns: int
    compute_ns: int
    copy_ns: int
    starved_ns: int
    unasked_ns: int
    starved_in_flight_ratio: float | None
    hidden_copy_ns: int
    overlap_ns: int
    most_streams: int
    uncertainty_ns: Interval | None
    outside: int
    streams: tuple[StreamUse, ...]
    labels: tuple[LabelUse, ...]
    names: tuple[NameUse, ...]
    endpoints: tuple[EndpointUse, ...]

    @property
    def busy_ns(self) -> int:
        """Time in which any stream was busy."""
        return self.compute_ns + self.copy_ns

    @property
    def busy_ratio(self) -> float | None:
        """Of the window."""
        return share(self.busy_ns, self.window_ns)

    @property
    def compute_ratio(self) -> float | None:
        """Of the window."""
        return share(self.compute_ns, self.window_ns)

    @property
    def copy_ratio(self) -> float | None:
        """Of the window."""
        return share(self.copy_ns, self.window_ns)

    @property
    def starved_ratio(self) -> float | None:
        """Of the window."""
        return share(self.starved_ns, self.window_ns)

    @property
    def unasked_ratio(self) -> float | None:
        """Of the window."""
        return share(self.unasked_ns, self.window_ns)

    @property
    def overlap_ratio(self) -> float | None:
        """Of the busy time."""
        return share(self.overlap_ns, self.busy_ns)

    @property
    def hidden_copy_ratio(self) -> float | None:
        """Of all time in which copies ran."""
        return share(self.hidden_copy_ns, self.copy_ns + self.hidden_copy_ns)

    @property
    def mean_streams(self) -> float | None:
        """How many streams were busy on the average of the busy time; None without any."""
        return sum(stream.busy_ns for stream in self.streams) / self.busy_ns if self.busy_ns else None


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Spans of one name that asked for device time and got none: how many, and why (a label, or `NO_EVENTS`).

    One with `remaining` stands for so many names that were left out.
    """

    reason: str
    name: str
    kind: str
    spans: int
    remaining: int = 0


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Every device of a trace in one window.

    `asked` counts spans that asked for device time, `unanswered` those of them that got none. `in_flight_ns` is the
    time in which at least one request was. `requests_cut` are those that reach over an edge of the window, and
    `requests_without` those within it that had no device time on any device.
    """

    window: Interval
    devices: tuple[DeviceUse, ...]
    asked: int
    unanswered: tuple[Unanswered, ...]
    in_flight_ns: int
    requests_cut: int
    requests_without: int
    _whole: Sequence[Span] = field(default=(), repr=False, compare=False)
    _uses: Mapping[int, Sequence[tuple[int, int, int]]] = field(default_factory=dict, repr=False)

    @property
    def requests(self) -> tuple[RequestUse, ...]:
        """Those within the window, once for each device on which they had device time."""
        return tuple(
            RequestUse(device, span.span_id, span.site.name, *_parts(span, own_ns, busy_ns))
            for device, uses in self._uses.items()
            for place, own_ns, busy_ns in uses
            for span in [self._whole[place]]
        )


def utilisation(trace: Trace, window: Interval | None = None) -> Utilisation:
    """What each device did in the window: `trace.held` where none is given.

    Takes time in proportion to n log n for n intervals: 0.3 us each.
    """
    first, last = trace.held if window is None else window
    last = max(first, last)
    known = owners(trace.spans)
    found = device_time(trace.spans, known.ids, (first, last))
    in_flight = united([packed(clip(((span.start_ns, span.end_ns) for span in known.requests), (first, last)))])
    whole, cut = requests_within(known, (first, last))
    devices = list[DeviceUse]()
    uses: dict[int, list[tuple[int, int, int]]] = {}
    for device, outside, owned in sorted(found.devices):
        groups = [group for group in found.groups if group.device == device]
        if not outside and not any(group.timed for group in groups):
            continue
        calls: dict[tuple[str, str], list[bytes]] = {}
        for site, on_device, lengths in found.calls:
            if on_device == device:
                calls.setdefault((site.name, site.kind), []).append(lengths)
        busy = united([group.stretches for group in groups])
        uses[device] = within(owned, whole, busy)
        endpoints = _endpoints(whole, uses[device])
        devices.append(_device_use(device, groups, calls, busy, (first, last), in_flight, outside, endpoints))
    with_device = {place for of_device in uses.values() for place, *_ in of_device}
    unanswered: Counter[tuple[str, str, str]] = Counter()
    for site, label, spans in found.unanswered:
        unanswered[NO_EVENTS if label is None else label, site.name, site.kind] += spans
    return Utilisation(
        window=(first, last),
        devices=tuple(devices),
        asked=found.asked,
        unanswered=tuple(
            Unanswered(*key, spans) for key, spans in sorted(unanswered.items(), key=lambda item: (-item[1], item[0]))
        ),
        in_flight_ns=length_ns(in_flight),
        requests_cut=cut,
        requests_without=len(whole) - len(with_device),
        _whole=whole,
        _uses=uses,
    )


def requests_within(known: Owners, window: Interval) -> tuple[list[Span], int]:
    """The topmost requests that lie within the window, and how many reach over an edge of it."""
    first, last = window
    whole, cut = list[Span](), 0
    for span in known.topmost:
        start_ns, end_ns = span.start_ns, span.end_ns
        if first <= start_ns and end_ns <= last and not span.clipped:
            whole.append(span)
        else:
            cut += start_ns < last and end_ns > first
    return whole, cut


def _device_use(
    device: int,
    groups: Sequence[Group],
    calls: Mapping[tuple[str, str], Sequence[bytes]],
    busy: bytes,
    window: Interval,
    in_flight: bytes,
    outside: int,
    endpoints: tuple[EndpointUse, ...],
) -> DeviceUse:
    timed = [group for group in groups if group.timed]
    compute = united([group.stretches for group in timed if group.site.kind != "copy"])
    copies = united([group.stretches for group in timed if group.site.kind == "copy"])
    hidden_ns, window_ns, busy_ns = shared_ns(compute, copies), window[1] - window[0], length_ns(busy)
    in_flight_ns = length_ns(in_flight)
    starved_ns = in_flight_ns - shared_ns(busy, in_flight)
    streams = {
        stream: [group for group in timed if group.stream == stream]
        for stream in sorted({group.stream for group in timed})
    }
    unions = {stream: united([group.stretches for group in its]) for stream, its in streams.items()}
    overlap_ns, most_streams = at_once(list(unions.values()))
    names: dict[tuple[str, str], list[bytes]] = {}
    for group in timed:
        names.setdefault((group.site.name, group.site.kind), []).append(group.stretches)
    return DeviceUse(
        device=device,
        window_ns=window_ns,
        compute_ns=length_ns(compute),
        copy_ns=length_ns(copies) - hidden_ns,
        starved_ns=starved_ns,
        unasked_ns=window_ns - busy_ns - starved_ns,
        starved_in_flight_ratio=share(starved_ns, in_flight_ns),
        hidden_copy_ns=hidden_ns,
        overlap_ns=overlap_ns,
        most_streams=most_streams,
        uncertainty_ns=(min(group.least_ns for group in timed), max(group.most_ns for group in timed))
        if timed
        else None,
        outside=outside,
        streams=tuple(
            _stream_use(stream, its, length_ns(unions[stream]), window_ns) for stream, its in streams.items()
        ),
        labels=_label_uses(groups),
        names=tuple(
            sorted(
                (_name_use(*name, stretches, calls[name], busy_ns) for name, stretches in names.items()),
                key=lambda use: (-use.summed_ns, use.name, use.kind),
            )
        ),
        endpoints=endpoints,
    )


def _stream_use(stream: int, groups: Sequence[Group], busy_ns: int, window_ns: int) -> StreamUse:
    count, summed_ns = sum(group.intervals for group in groups), sum(group.summed_ns for group in groups)
    return StreamUse(stream, count, summed_ns, busy_ns, share(busy_ns, window_ns))


def _label_uses(groups: Iterable[Group]) -> tuple[LabelUse, ...]:
    sums: dict[str, list[int]] = {}
    for group in groups:
        of_label = sums.setdefault(group.label, [0, 0])
        of_label[0] += group.intervals
        of_label[1] += group.summed_ns
    return tuple(
        LabelUse(label, count, None if label in UNTIMED else summed_ns)
        for label, (count, summed_ns) in sorted(sums.items(), key=lambda item: (-item[1][0], item[0]))
    )


def _name_use(name: str, kind: str, stretches: Iterable[bytes], calls: Iterable[bytes], device_busy_ns: int) -> NameUse:
    lengths = sorted(array("q", b"".join(calls)))
    p50_ns, p99_ns = percentiles_of(lengths, (0.5, 0.99))
    busy_ns = length_ns(united(stretches))
    return NameUse(name, kind, len(lengths), sum(lengths), busy_ns, p50_ns, p99_ns, share(busy_ns, device_busy_ns))


def _parts(span: Span, own_ns: int, busy_ns: int) -> tuple[int, int, int, int]:
    """The wall of a request, and how long the device was busy with its own work, with that of others, or idle."""
    wall_ns = span.total_ns
    return wall_ns, own_ns, busy_ns - own_ns, wall_ns - busy_ns


def _endpoints(whole: Sequence[Span], uses: Iterable[tuple[int, int, int]]) -> tuple[EndpointUse, ...]:
    """The requests by name, those that took longest in all first."""
    sums: dict[str, list[int]] = {}
    for place, own_ns, busy_ns in uses:
        span = whole[place]
        of_name = sums.get(span.site.name)
        if of_name is None:
            of_name = sums[span.site.name] = [0, 0, 0, 0]
        of_name[0] += 1
        of_name[1] += span.total_ns
        of_name[2] += own_ns
        of_name[3] += busy_ns
    endpoints = [
        EndpointUse(name, requests, wall_ns, own_ns, busy_ns - own_ns, wall_ns - busy_ns)
        for name, (requests, wall_ns, own_ns, busy_ns) in sums.items()
    ]
    return tuple(sorted(endpoints, key=lambda use: -use.wall_ns))
