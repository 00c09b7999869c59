"""What each device did in a window: busy, starved or idle, to the nanosecond, and the same within each request.

All figures come from the device intervals of instrumented spans, so idle means: no instrumented device work. An
interval is the stretch of a stream between two events. It may hold gaps between kernels, and where it encloses the
interval of a call below it, the outer one counts whole. Times that devices or streams share are unions, work by name
is a sum, and everything is clipped at the window.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from instrument.report.table import share
from instrument.spans import DeviceInterval, Interval, Site, Span, Trace, clip, intersect, length, subtract, union

UNTIMED: frozenset[str] = frozenset({"captured", "dropped"})
"""Labels of intervals that say when something was submitted and not how long it took."""

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
    holds those below it; p50 and p99 are exact, by nearest rank. One with `remaining` stands for so many names
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
    time in which at least one request was. `requests` are those within the window, once for each device on which they
    had device time, `requests_cut` those that reach over an edge of it, and `requests_without` those within it that had
    no device time on any device.
    """

    window: Interval
    devices: tuple[DeviceUse, ...]
    asked: int
    unanswered: tuple[Unanswered, ...]
    in_flight_ns: int
    requests: tuple[RequestUse, ...]
    requests_cut: int
    requests_without: int


def utilisation(trace: Trace, window: Interval | None = None) -> Utilisation:
    """What each device did in the window: `trace.held` where none is given.

    Takes time in proportion to n log n for n intervals.
    """
    first, last = trace.held if window is None else window
    last = max(first, last)
    requests = Requests(trace.spans)
    found: dict[int, _Found] = {}
    asked = 0
    unanswered: Counter[tuple[str, str, str]] = Counter()
    for span in trace.spans:
        site = span.site
        if not span.device:
            if site.device:
                asked += 1
                unanswered[NO_EVENTS, site.name, site.kind] += 1
            continue
        asked += 1
        timed = False
        for interval in span.device:
            on_device = found.get(interval.device)
            if on_device is None:
                on_device = found[interval.device] = _Found()
            timed |= on_device.add(site, interval, first, last)
        if not timed:
            unanswered[span.device[0].label, site.name, site.kind] += 1
            continue
        owner = requests.owner(span)
        for on_device in found.values() if len(span.device) > 1 else (found[span.device[0].device],):
            on_device.take(site, owner)
    in_flight = union(clip(((span.start_ns, span.end_ns) for span in requests.all), (first, last)))
    whole, cut = list[Span](), 0
    for span in requests.topmost:
        if first <= span.start_ns and span.end_ns <= last and not span.clipped:
            whole.append(span)
        else:
            cut += span.start_ns < last and span.end_ns > first
    with_device = {owner for on_device in found.values() for owner in on_device.own}
    devices, request_uses = list[DeviceUse](), list[RequestUse]()
    for device in sorted(found):
        if found[device].streams or found[device].outside:
            device_use, uses = _device_use(device, found[device], (first, last), in_flight, whole)
            devices.append(device_use)
            request_uses += uses
    return Utilisation(
        window=(first, last),
        devices=tuple(devices),
        asked=asked,
        unanswered=tuple(
            Unanswered(*key, spans) for key, spans in sorted(unanswered.items(), key=lambda item: (-item[1], item[0]))
        ),
        in_flight_ns=length(in_flight),
        requests=tuple(request_uses),
        requests_cut=cut,
        requests_without=sum(span.span_id not in with_device for span in whole),
    )


class Requests:
    """The requests of a trace, and to which of them a span belongs: the topmost at or above it."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.all = [span for span in spans if span.site.kind == "request"]
        self._ids = {span.span_id for span in self.all}
        self._spans = spans
        self._above: dict[int, int] | None = None
        self._owners: dict[int, int] = {}
        self.topmost = [span for span in self.all if self.owner(span) == span.span_id]

    def owner(self, span: Span) -> int:
        """The id of the topmost request at or above a span, 0 where there is none."""
        if span.root_id in self._ids:
            return span.root_id
        if not self._ids:
            return 0
        if self._above is None:
            self._above = {each.span_id: each.parent_id for each in self._spans}
        # Walk up to the root, or to a span whose owner is known. Ids of a damaged file may run in a circle.
        chain_up: dict[int, None] = {}
        at = span.span_id
        while at in self._above and at not in self._owners and at not in chain_up:
            chain_up[at] = None
            at = self._above[at]
        owner = self._owners.get(at, 0)
        for span_id in reversed(chain_up):
            owner = self._owners[span_id] = owner or (span_id if span_id in self._ids else 0)
        return owner


class _Found:
    """The timed intervals of one device, as they come. `_call` are those of the span that is being looked at."""

    def __init__(self) -> None:
        self.streams: dict[tuple[int, bool], list[Interval]] = {}
        self.labels: dict[str, list[int]] = {}
        self.names: dict[tuple[str, str], tuple[list[Interval], list[int]]] = {}
        self.own: dict[int, list[Interval]] = {}
        self.least_uncertain: int | None = None
        self.most_uncertain = 0
        self.outside = 0
        self._call: list[Interval] = []

    def add(self, site: Site, interval: DeviceInterval, first: int, last: int) -> bool:
        """Count an interval; whether it was timed, inside of the window or not."""
        start, end, label = interval.start_ns, interval.end_ns, interval.label
        timed = label not in UNTIMED
        if start < first or end > last:
            if start >= last or end <= first:
                self.outside += timed
                return timed
            start, end = max(start, first), min(end, last)
        counted = self.labels.get(label)
        if counted is None:
            counted = self.labels[label] = [0, 0]
        counted[0] += 1
        if not timed:
            return False
        counted[1] += end - start
        key = interval.stream, site.kind == "copy"
        of_stream = self.streams.get(key)
        if of_stream is None:
            of_stream = self.streams[key] = []
        part = (start, end)
        of_stream.append(part)
        self._call.append(part)
        uncertain = interval.uncertainty_ns
        if self.least_uncertain is None or uncertain < self.least_uncertain:
            self.least_uncertain = uncertain
        if uncertain > self.most_uncertain:
            self.most_uncertain = uncertain
        return True

    def take(self, site: Site, owner: int) -> None:
        """Give what `add` has found of one span to its name and its request."""
        call = self._call
        if not call:
            return
        self._call = []
        name = site.name, site.kind
        of_name = self.names.get(name)
        if of_name is None:
            of_name = self.names[name] = ([], [])
        of_name[0].extend(call)
        of_name[1].append(call[0][1] - call[0][0] if len(call) == 1 else length(union(call)))
        if owner:
            own = self.own.get(owner)
            if own is None:
                self.own[owner] = call
            else:
                own.extend(call)


class Timeline:
    """Disjoint sorted intervals, and how much of a stretch they cover, in logarithmic time."""

    def __init__(self, disjoint: Sequence[Interval]) -> None:
        self._starts = [start for start, _ in disjoint]
        self._ends = [end for _, end in disjoint]
        self._before = [0, *accumulate(end - start for start, end in disjoint)]

    def _until(self, at_ns: int) -> int:
        index = bisect_right(self._starts, at_ns)
        return self._before[index] - max(self._ends[index - 1] - at_ns, 0) if index else 0

    def within(self, start_ns: int, end_ns: int) -> int:
        return self._until(end_ns) - self._until(start_ns)


def _device_use(
    device: int, found: _Found, window: Interval, in_flight: Sequence[Interval], requests: Iterable[Span]
) -> tuple[DeviceUse, list[RequestUse]]:
    merged = {key: union(intervals) for key, intervals in found.streams.items()}
    compute = _together(part for (_, is_copy), part in merged.items() if not is_copy)
    copies = _together(part for (_, is_copy), part in merged.items() if is_copy)
    copies_alone = subtract(copies, compute)
    busy = _together([compute, copies_alone])
    idle = subtract([window], busy)
    starved_ns = length(intersect(idle, in_flight))
    by_stream: dict[int, list[list[Interval]]] = {}
    for (stream, _), part in merged.items():
        by_stream.setdefault(stream, []).append(part)
    streams = {stream: _together(parts) for stream, parts in by_stream.items()}
    overlap_ns, most_streams = _overlap(list(streams.values()))
    least = found.least_uncertain
    uses = _request_uses(device, found.own, Timeline(busy), requests)
    use = DeviceUse(
        device=device,
        window_ns=window[1] - window[0],
        compute_ns=length(compute),
        copy_ns=length(copies_alone),
        starved_ns=starved_ns,
        unasked_ns=length(idle) - starved_ns,
        starved_in_flight_ratio=share(starved_ns, length(in_flight)),
        hidden_copy_ns=length(copies) - length(copies_alone),
        overlap_ns=overlap_ns,
        most_streams=most_streams,
        uncertainty_ns=None if least is None else (least, found.most_uncertain),
        outside=found.outside,
        streams=tuple(_stream_use(stream, found, streams[stream], window) for stream in sorted(streams)),
        labels=tuple(
            LabelUse(label, count, None if label in UNTIMED else summed_ns)
            for label, (count, summed_ns) in sorted(found.labels.items(), key=lambda item: (-item[1][0], item[0]))
        ),
        names=tuple(
            sorted(
                (_name_use(*name, *parts, length(busy)) for name, parts in found.names.items()),
                key=lambda use: (-use.summed_ns, use.name, use.kind),
            )
        ),
        endpoints=_endpoints(uses),
    )
    return use, uses


def _together(parts: Iterable[list[Interval]]) -> list[Interval]:
    """The union of disjoint sorted lists."""
    filled = [part for part in parts if part]
    return filled[0] if len(filled) == 1 else union(chain.from_iterable(filled))


def _stream_use(stream: int, found: _Found, busy: Sequence[Interval], window: Interval) -> StreamUse:
    intervals = [interval for is_copy in (False, True) for interval in found.streams.get((stream, is_copy), ())]
    busy_ns = length(busy)
    return StreamUse(stream, len(intervals), length(intervals), busy_ns, share(busy_ns, window[1] - window[0]))


def _name_use(name: str, kind: str, intervals: Sequence[Interval], calls: list[int], device_busy_ns: int) -> NameUse:
    calls.sort()
    ranks = [-(-percent * len(calls) // 100) - 1 for percent in (50, 99)]
    p50_ns, p99_ns = (calls[rank] for rank in ranks)
    busy_ns = length(union(intervals))
    return NameUse(name, kind, len(calls), sum(calls), busy_ns, p50_ns, p99_ns, share(busy_ns, device_busy_ns))


def _request_uses(
    device: int, own: Mapping[int, Sequence[Interval]], busy: Timeline, requests: Iterable[Span]
) -> list[RequestUse]:
    uses = []
    for span in requests:
        if span.span_id not in own:
            continue
        inside = span.start_ns, span.end_ns
        busy_ns, own_ns = busy.within(*inside), length(union(clip(own[span.span_id], inside)))
        parts = own_ns, busy_ns - own_ns, span.total_ns - busy_ns
        uses.append(RequestUse(device, span.span_id, span.site.name, span.total_ns, *parts))
    return uses


def _endpoints(uses: Iterable[RequestUse]) -> tuple[EndpointUse, ...]:
    """The requests by name, those that took longest in all first."""
    sums: dict[str, list[int]] = {}
    for one in uses:
        parts = 1, one.wall_ns, one.own_ns, one.others_ns, one.starved_ns
        sums[one.name] = [*map(sum, zip(sums.get(one.name, (0,) * 5), parts, strict=True))]
    endpoints = [EndpointUse(name, *parts) for name, parts in sums.items()]
    return tuple(sorted(endpoints, key=lambda use: -use.wall_ns))


def _overlap(streams: Sequence[Sequence[Interval]]) -> tuple[int, int]:
    """How long at least two of the streams were busy, and how many were at most. Each is disjoint and sorted."""
    parts = [[part for part in stream if part[0] < part[1]] for stream in streams]
    starts = sorted(start for part in parts for start, _ in part)
    ends = sorted(end for part in parts for _, end in part)
    overlap_ns = most = busy = done = 0
    since = 0
    for start in starts:
        while ends[done] <= start:
            busy -= 1
            if busy == 1:
                overlap_ns += ends[done] - since
            done += 1
        busy += 1
        if busy == 2:
            since = start
        most = max(most, busy)
    for end in ends[done:]:
        busy -= 1
        if busy == 1:
            overlap_ns += end - since
    return overlap_ns, most
