"""The use of each device in a window, as busy, starved or idle time, for the window and for each request.

All numbers come from the device intervals of recorded spans. So a device counts as idle if no recorded work runs on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from instrument.recording.distributions import percentiles_of_times
from instrument.recording.spans import UNTIMED, Interval
from instrument.report.section import NO_EVENTS
from instrument.report.table import Ratio, compute_share
from instrument.report.view import Recording
from instrument.trace.columns import Columns, DeviceIntervals, Int32s, Int64s
from instrument.trace.indices import NONE, Groups, find_distinct, index_rows, number_combinations
from instrument.trace.intervals import (
    Union,
    are_in_window,
    clip_intervals,
    lengths_by_group,
    make_union,
    measure_intersection,
    measure_overlap,
    union_by_group,
)

REASONS = {
    "captured": "captured into a graph, so nothing ran",
    "dropped": "no event was free",
    NO_EVENTS: "no pair of events came back",
}


@dataclass(frozen=True, slots=True)
class StreamUse:
    """The timed intervals of one stream. `summed_ns` is the sum of their lengths. `busy_ns` is the time in which at
    least one of them was open."""

    stream: int
    intervals: int
    summed_ns: int
    busy_ns: int
    window_ratio: float | None


@dataclass(frozen=True, slots=True)
class LabelUse:
    """The device intervals with one label. `summed_ns` is the sum of their lengths, None if they have no times."""

    label: str
    intervals: int
    summed_ns: int | None


@dataclass(frozen=True, slots=True)
class NameUse:
    """The device time of spans with one name and kind, and of calls below them, on one device. `calls` counts the calls
    with device time. `summed_ns` adds up the time of each call. `busy_ns` is the time with at least one call.
    `busy_ratio` is the share of the device's busy time."""

    name: str
    kind: str
    calls: int
    summed_ns: int
    busy_ns: int | None
    p50_ns: int | None
    p99_ns: int | None
    busy_ratio: float | None
    remaining: int = 0

    mean_ns = Ratio("summed_ns", of="calls")


@dataclass(frozen=True, slots=True)
class EndpointUse:
    """The requests of one endpoint that used one device. The sum of their wall times has three parts. In `own_ns` the
    device worked for the request. In `others_ns` it worked only for other spans. In `starved_ns` it was idle."""

    name: str
    requests: int
    wall_ns: int
    own_ns: int
    others_ns: int
    starved_ns: int
    remaining: int = 0

    wall_mean_ns = Ratio("wall_ns", of="requests")
    own_mean_ns = Ratio("own_ns", of="requests")
    others_mean_ns = Ratio("others_ns", of="requests")
    starved_mean_ns = Ratio("starved_ns", of="requests")
    own_ratio = Ratio("own_ns", of="wall_ns")
    others_ratio = Ratio("others_ns", of="wall_ns")
    starved_ratio = Ratio("starved_ns", of="wall_ns")


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """The use of one device in the window.

    `compute_ns`, `copy_ns`, `starved_ns` and `unasked_ns` add up to the window. `copy_ns` is the time with copies
    alone. The device is idle in `starved_ns` with a request in flight, and in `unasked_ns` without one.

    `overlap_ns` is the time with at least two busy streams. `launch_bound_ns` is the busy time in which the device may
    have waited for the host. `uncertainty_ns` has the least and the greatest error of device times on the host's clock.
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
    launch_bound_ns: int
    uncertainty_ns: Interval | None
    outside: int
    streams: tuple[StreamUse, ...]
    labels: tuple[LabelUse, ...]
    names: tuple[NameUse, ...]
    endpoints: tuple[EndpointUse, ...]

    @property
    def busy_ns(self) -> int:
        """The time in which at least one stream was busy."""
        return self.compute_ns + self.copy_ns

    busy_ratio = Ratio("busy_ns", of="window_ns")
    compute_ratio = Ratio("compute_ns", of="window_ns")
    copy_ratio = Ratio("copy_ns", of="window_ns")
    starved_ratio = Ratio("starved_ns", of="window_ns")
    unasked_ratio = Ratio("unasked_ns", of="window_ns")
    overlap_ratio = Ratio("overlap_ns", of="busy_ns")
    launch_bound_ratio = Ratio("launch_bound_ns", of="busy_ns")

    @property
    def hidden_copy_ratio(self) -> float | None:
        """The share of the time with copies during which the device also computed."""
        return compute_share(self.hidden_copy_ns, self.copy_ns + self.hidden_copy_ns)

    @property
    def mean_streams(self) -> float | None:
        """The mean number of busy streams during the busy time, None without busy time."""
        return sum(stream.busy_ns for stream in self.streams) / self.busy_ns if self.busy_ns else None


@dataclass(frozen=True, slots=True)
class Unanswered:
    """The spans of one name that asked for device time and got none. `reason` is a label, or `NO_EVENTS`."""

    reason: str
    name: str
    kind: str
    spans: int
    remaining: int = 0

    def why(self) -> str:
        return REASONS.get(self.reason, self.reason)


@dataclass(frozen=True, slots=True)
class Utilisation:
    """The use of all devices in one window. `asking` counts the spans that asked for device time. `unanswered` has the
    spans that got none. `in_flight_ns` is the time with a request in flight. `requests_cut` counts the requests that
    cross an edge of the window. `requests_without` counts the requests without device time."""

    window: Interval
    devices: tuple[DeviceUse, ...]
    asking: int
    unanswered: tuple[Unanswered, ...]
    in_flight_ns: int
    requests_cut: int
    requests_without: int


def measure_utilisation(recording: Recording) -> Utilisation:
    """Return the use of each device. Only the part of the window without missing spans counts."""
    trace, (first, last) = recording.columns, recording.trace.coverage
    window = first, max(first, last)
    owner = recording.topmost_requests
    whole, cut = recording.find_requests_within(owner)
    is_request = trace.are_of_kind("request")
    in_flight = make_union(*clip_intervals(trace.start_ns[is_request], trace.end_ns[is_request], window))
    intervals = trace.device
    is_timed = intervals.is_measured
    is_inside = are_in_window(intervals.start_ns, intervals.end_ns, window)
    devices = []
    for device in find_distinct(intervals.device).tolist():
        of_device = intervals.device == device
        outside, inside = int((of_device & is_timed & ~is_inside).sum()), intervals.select(of_device).clip_to(window)
        if outside or inside.is_measured.any():
            endpoints = _sum_by_endpoint(trace, inside.select(inside.is_measured), owner, whole)
            devices.append(_device_use(trace, device, inside, window, in_flight, outside, endpoints))
    asking_count, untimed = find_spans_without_device_time(trace)
    return Utilisation(
        window=window,
        devices=tuple(devices),
        asking=asking_count,
        unanswered=untimed,
        in_flight_ns=in_flight.length_ns(),
        requests_cut=cut,
        requests_without=len(np.setdiff1d(whole, owner[intervals.row[is_timed & is_inside]])),
    )


def find_spans_without_device_time(trace: Columns) -> tuple[int, tuple[Unanswered, ...]]:
    intervals = trace.device
    first_of = np.full(len(trace), NONE, dtype=np.int64)
    first_of[intervals.row[::-1]] = np.arange(len(intervals))[::-1]
    has_asked = trace.are_of_sites([site.device for site in trace.sites]) | (first_of != NONE)
    is_untimed = has_asked.copy()
    is_untimed[intervals.row[intervals.is_measured]] = False
    rows = np.flatnonzero(is_untimed)
    label = np.concatenate([intervals.label, np.array([NONE], dtype=np.int32)])[first_of[rows]]
    labels, counts = (*intervals.labels, NO_EVENTS), Counter[tuple[str, str, str]]()  # `NONE` has the last label
    groups, firsts = number_combinations(trace.site[rows], label)
    pairs = zip(trace.site[rows][firsts].tolist(), label[firsts].tolist(), np.bincount(groups).tolist(), strict=True)
    for place, number, spans in pairs:
        counts[labels[number], trace.sites[place].name, trace.sites[place].kind] += spans
    by_count = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return int(has_asked.sum()), tuple(Unanswered(*key, spans) for key, spans in by_count)


def count_missing_time_reasons(unanswered: Iterable[Unanswered]) -> Counter[str]:
    reasons = Counter[str]()
    for row in unanswered:
        reasons[row.reason] += row.spans
    return reasons


def _device_use(
    trace: Columns, device: int, inside: DeviceIntervals, window: Interval, in_flight: Union, outside: int,
    endpoints: tuple[EndpointUse, ...],
) -> DeviceUse:  # fmt: skip
    work = inside.select(inside.is_measured)
    busy = work.union()
    is_copy = trace.are_of_kind("copy")[work.row]
    compute, copies = (make_union(work.start_ns[mask], work.end_ns[mask]) for mask in (~is_copy, is_copy))
    hidden_ns, window_ns, busy_ns = measure_intersection(compute, copies), window[1] - window[0], busy.length_ns()
    in_flight_ns = in_flight.length_ns()
    starved_ns = in_flight_ns - measure_intersection(busy, in_flight)
    streams, unions = list[StreamUse](), list[Union]()
    for stream in find_distinct(work.stream).tolist():
        starts, ends = (times[work.stream == stream] for times in (work.start_ns, work.end_ns))
        unions.append(make_union(starts, ends))
        summed_ns, stream_ns = sum((ends - starts).tolist()), unions[-1].length_ns()
        streams.append(StreamUse(stream, len(starts), summed_ns, stream_ns, compute_share(stream_ns, window_ns)))
    overlap_ns, most_streams = measure_overlap(unions)
    groups = Groups(inside.label, len(inside.labels))
    counts, sums_ns = groups.count_members().tolist(), groups.sum_by_group(inside.total_ns).tolist()
    labels = [
        LabelUse(label, count, None if label in UNTIMED else summed_ns)
        for label, count, summed_ns in zip(inside.labels, counts, sums_ns, strict=True)
        if count
    ]
    is_launching = np.array([label == "launch-bound" for label in work.labels], dtype=np.bool_)[work.label]
    surely_busy = work.select(~is_launching).union() if is_launching.any() else busy
    uncertain_ns = work.uncertainty_ns
    return DeviceUse(
        device=device,
        window_ns=window_ns,
        compute_ns=compute.length_ns(),
        copy_ns=copies.length_ns() - hidden_ns,
        starved_ns=starved_ns,
        unasked_ns=window_ns - busy_ns - starved_ns,
        starved_in_flight_ratio=compute_share(starved_ns, in_flight_ns),
        hidden_copy_ns=hidden_ns,
        overlap_ns=overlap_ns,
        most_streams=most_streams,
        launch_bound_ns=busy_ns - surely_busy.length_ns(),
        uncertainty_ns=(int(uncertain_ns.min()), int(uncertain_ns.max())) if len(uncertain_ns) else None,
        outside=outside,
        streams=tuple(streams),
        labels=tuple(sorted(labels, key=lambda use: (-use.intervals, use.label))),
        names=_sum_by_name(trace, work, busy_ns),
        endpoints=endpoints,
    )


def _sum_by_name(trace: Columns, work: DeviceIntervals, device_busy_ns: int) -> tuple[NameUse, ...]:
    """Return the device time of spans by name and kind. Overlapping intervals of one call count once."""
    keys, of_site = trace.describe_sites(lambda site: (site.name, site.kind))
    begins = np.flatnonzero(np.diff(work.row, prepend=NONE))  # the intervals of a call are adjacent
    call = np.repeat(np.arange(len(begins)), np.diff(begins, append=len(work.row)))
    took_ns = lengths_by_group(call, work.start_ns, work.end_ns, len(begins))
    name_of_call = of_site[trace.site[work.row[begins]]]
    sums_ns = Groups(name_of_call, len(keys)).sum_by_group(took_ns).tolist()
    names, starts, ends = union_by_group(of_site[trace.site[work.row]], work.start_ns, work.end_ns)
    all_busy_ns = Groups(names, len(keys)).sum_by_group(ends - starts).tolist()
    uses = []
    for number, (name, kind) in enumerate(keys):
        lengths = np.sort(took_ns[name_of_call == number]).tolist()
        if lengths:
            p50_ns, p99_ns = percentiles_of_times(lengths, (0.5, 0.99))
            busy_ns = all_busy_ns[number]
            ratio = compute_share(busy_ns, device_busy_ns)
            uses.append(NameUse(name, kind, len(lengths), sums_ns[number], busy_ns, p50_ns, p99_ns, ratio))
    return tuple(sorted(uses, key=lambda use: (-use.summed_ns, use.name, use.kind)))


def _sum_by_endpoint(trace: Columns, work: DeviceIntervals, owner: Int32s, whole: Int64s) -> tuple[EndpointUse, ...]:
    places = index_rows(whole, len(trace))[owner[work.row]]  # a span without an owner has the last one, `NONE`
    has = places != NONE
    starts = np.maximum(work.start_ns[has], trace.start_ns[whole[places[has]]])
    ends = np.minimum(work.end_ns[has], trace.end_ns[whole[places[has]]])
    own_ns = lengths_by_group(places[has], starts, ends, len(whole))
    used = find_distinct(places[has])
    busy_ns = work.union().length_within(trace.start_ns[whole[used]], trace.end_ns[whole[used]])
    names, of_site = trace.describe_sites(attrgetter("name"))
    endpoints = []
    for members in Groups(of_site[trace.site[whole[used]]], len(names)).list_rows():
        columns = trace.total_ns[whole[used[members]]], own_ns[used[members]], busy_ns[members]
        wall_ns, own, busy = (sum(column.tolist()) for column in columns)
        name = trace.sites[trace.site[whole[used[members[0]]]]].name
        use = EndpointUse(name, len(members), wall_ns, own, busy - own, wall_ns - busy)
        endpoints.append((-wall_ns, int(members[0]), use))
    return tuple(use for *_, use in sorted(endpoints))
