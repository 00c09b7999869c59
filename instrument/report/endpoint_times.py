"""The requests of each endpoint: their walls, errors, phases and answers, from columns.

Answers are in the attributes of request spans, which `requests:` in the profile sets. A stream is an answer in parts:
its items are server-sent events, messages, or chunks. The time of an item is that from the first item to the last one,
shared evenly by those after the first. Blocked loops are spans of callbacks longer than `limits.blocked`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import attrgetter

import numpy as np

from instrument.recorder.outcomes import STATUS
from instrument.recording.distributions import OTHER, group_of
from instrument.recording.histogram import percentiles_of
from instrument.recording.spans import (
    BLOCKED_AT,
    BLOCKED_BY,
    FIRST_ITEM,
    ITEMS,
    LAST_ITEM,
    LONGEST_GAP,
    OUTCOME,
    is_blocked_loop,
)
from instrument.report.table import bounded, row_name, share
from instrument.report.view import Options
from instrument.trace.columns import Attributes, Bools, Columns, Int64s
from instrument.trace.forest import NONE
from instrument.trace.groups import Groups, numbered, places_of
from instrument.trace.joined import Joined
from instrument.trace.ledger import QUEUE, SHARE, STALL, TRANSPORT, UNKNOWN, WAITING, Ledger


@dataclass(frozen=True, slots=True)
class Blocker:
    """The stretches by one span or function: their number, their sum and the longest, both in nanoseconds.

    `remaining` is the number of spans and functions in the row of the others. `at` is the place in the service's code
    that took most of the time, "" where no place was recorded.
    """

    name: str
    stretches: int
    summed_ns: int
    longest_ns: int
    remaining: int = 0
    at: str = ""

    def indented(self) -> Blocker:
        """The same with a name that is below that of the whole."""
        return replace(self, name=f"  {row_name(self)}", remaining=0)


@dataclass(frozen=True, slots=True)
class BlockedLoops:
    """All stretches, of all event loops: how many, their sum and the longest, and by whom, most time first."""

    stretches: int
    summed_ns: int
    longest_ns: int
    by: tuple[Blocker, ...]

    def whole(self) -> Blocker:
        """All of them as a row."""
        return Blocker("loop blocked", self.stretches, self.summed_ns, self.longest_ns)


def blocked_loops(trace: Columns, options: Options) -> BlockedLoops | None:
    """Return the blocked loops of a trace, None where no loop was blocked. `rows` and `least_ns` bound `by`."""
    found: dict[str, list[int]] = {}
    places: dict[str, Counter[str]] = {}
    rows = np.flatnonzero(trace.of_sites([is_blocked_loop(site) for site in trace.sites]))
    columns = (trace.attributes.values(name, rows) for name in (BLOCKED_BY, BLOCKED_AT))
    for by, at, took_ns in zip(*columns, trace.total_ns[rows].tolist(), strict=True):
        name = "" if by is None else str(by)
        found.setdefault(name, []).append(took_ns)
        if at is not None:
            places.setdefault(name, Counter())[str(at)] += took_ns
    if not found:
        return None
    each = [_blocker(name, times) for name, times in found.items()]
    each = [replace(one, at=places[one.name].most_common(1)[0][0]) if one.name in places else one for one in each]
    each.sort(key=lambda one: (-one.summed_ns, one.name))

    def rest(others: Sequence[Blocker]) -> Blocker:
        return _blocker("", (ns for one in others for ns in found[one.name]), remaining=len(others))

    all_of_it = _blocker("", (ns for times in found.values() for ns in times))
    shown = bounded(each, options, lambda one: one.summed_ns, rest)
    return BlockedLoops(all_of_it.stretches, all_of_it.summed_ns, all_of_it.longest_ns, shown)


def _blocker(name: str, times: Iterable[int], remaining: int = 0) -> Blocker:
    known = list(times)
    return Blocker(name, len(known), sum(known), max(known), remaining)


CLASSES = ("1xx", "2xx", "3xx", "4xx", "5xx")

TOLD = (STATUS, FIRST_ITEM, ITEMS, LAST_ITEM, LONGEST_GAP)


@dataclass(frozen=True, slots=True)
class StreamedAnswers:
    """The streamed answers of an endpoint: how many, their items in all, percentiles of the time to the first item, and
    of the time of an item over the streams that had more than one. None where no stream had."""

    count: int
    items: int
    first_p50_ns: int
    first_p99_ns: int
    item_p50_ns: int | None
    item_p99_ns: int | None
    longest_gap_ns: int | None


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of requests by their spans, a row for each request, `NONE` where one does not say it."""

    status: Int64s
    first_ns: Int64s
    items: Int64s
    last_ns: Int64s
    longest_gap_ns: Int64s

    @classmethod
    def of(cls, attributes: Attributes, rows: Int64s) -> Answers:
        """Return the answers of the requests in some rows, which are in order."""
        return cls(*(_numbers(attributes, name, rows) for name in TOLD))

    def only(self, places: Int64s) -> Answers:
        """Return the answers of some of the requests."""
        columns = self.status, self.first_ns, self.items, self.last_ns, self.longest_gap_ns
        return Answers(*(column[places] for column in columns))

    def told(self) -> Int64s:
        """The places of requests of which anything is known."""
        return np.flatnonzero((self.status != NONE) | (self.first_ns != NONE))

    def statuses(self) -> dict[str, int]:
        """Count the answers of each class, in their order."""
        counts = np.bincount(self.status.clip(0, 600) // 100, minlength=7)[1:6].tolist()
        return {name: count for name, count in zip(CLASSES, counts, strict=True) if count}

    def streams(self) -> StreamedAnswers | None:
        """Return the streamed answers, None without any."""
        its = self.only(np.flatnonzero((self.first_ns != NONE) & (self.items > 0)))
        if not len(its.items):
            return None
        has_more = (its.last_ns != NONE) & (its.items > 1)
        per_item_ns = np.maximum(its.last_ns - its.first_ns, 0)[has_more] // (its.items[has_more] - 1)
        first_p50_ns, first_p99_ns = percentiles_of(np.sort(its.first_ns).tolist(), (0.5, 0.99))
        longest_ns = int(its.longest_gap_ns.max())
        return StreamedAnswers(
            len(its.items),
            sum(its.items.tolist()),
            first_p50_ns,
            first_p99_ns,
            *_both(np.sort(per_item_ns).tolist()),
            None if longest_ns == NONE else longest_ns,
        )


def _both(times: Sequence[int]) -> tuple[int | None, int | None]:
    if not times:
        return None, None
    p50_ns, p99_ns = percentiles_of(times, (0.5, 0.99))
    return p50_ns, p99_ns


def _numbers(attributes: Attributes, name: str, rows: Int64s) -> Int64s:
    """An attribute that is a number, as no file need have it."""
    found = np.full(len(rows), NONE, dtype=np.int64)
    places = np.flatnonzero(np.isin(rows, attributes.having(name)))
    for place, value in zip(places.tolist(), attributes.values(name, rows[places]), strict=True):
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63:
            found[place] = value
    return found


IN_ORDER = (
    QUEUE, "load", "prepare", "copy in", "infer_shape", "prefill", "compute", "comm", "generate", SHARE, WAITING, STALL,
    "copy", "copy out", TRANSPORT, "post",
)  # fmt: skip
"""Phases as they mostly follow each other; others come after them, by their time."""


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """One phase: how many requests had time in it, the sum of that time, and its share of the wall of all requests.

    The mean and the percentiles, by `percentiles_of`, are over the requests that had it. One with `remaining` replaces
    that many phases that were left out; how many requests had any of them is not told, nor what follows from that.
    """

    name: str
    requests: int | None
    summed_ns: int
    mean_ns: float | None
    p50_ns: int | None
    p99_ns: int | None
    ratio: float | None
    remaining: int = 0


@dataclass(frozen=True, slots=True)
class EndpointTimes:
    """The requests of one name: `phases` and `unknown_ns`, of which no phase ran, add up to `wall_ns`. Of the latter
    every request has some, perhaps 0.

    `errors` failed: with an exception, or by the server's own fault. `cancelled` were broken off, as by clients that
    went away, and have not failed. `statuses` are answers by class, such as `2xx`,
    and `streams` those that came in parts, where spans tell of them. Percentiles are those of `histogram.percentiles`.
    `ratio` is of the wall of all requests of the view. `counted` are all requests of the name that ever ended, also
    those of which no span is held any more. One with `remaining` replaces that many endpoints that were left
    out.
    """

    name: str
    requests: int
    errors: int
    wall_ns: int
    mean_ns: float
    p50_ns: int
    p90_ns: int
    p99_ns: int
    min_ns: int
    max_ns: int
    ratio: float | None
    phases: tuple[PhaseTime, ...]
    unknown_ns: int
    unknown_mean_ns: float
    unknown_p50_ns: int
    unknown_p99_ns: int
    unknown_ratio: float | None
    statuses: Mapping[str, int] = field(default_factory=dict)
    streams: StreamedAnswers | None = None
    remaining: int = 0
    counted: int = 0
    cancelled: int = 0


@dataclass(frozen=True)
class WholeRequests:
    """The requests that a report is of, a row for each, and a row for each part that one of them had any time of.

    `place` is that among all requests of the trace, `endpoint` one in `names` and `part` one in `parts`. The parts of a
    request lie together; `unknown_ns`, in which no phase ran, is none of them.
    """

    names: tuple[str, ...]
    rows: Int64s
    place: Int64s
    endpoint: Int64s
    wall_ns: Int64s
    failed: Bools
    broken_off: Bools
    unknown_ns: Int64s
    answers: Answers
    parts: tuple[str, ...]
    request: Int64s
    part: Int64s
    time_ns: Int64s

    @classmethod
    def of(cls, trace: Columns, joined: Joined, found: Ledger, rows: Int64s) -> WholeRequests:
        """Return the requests in some rows."""
        names, of_site = trace.numbered_sites(attrgetter("name"))
        places = joined.of[rows]
        request = places_of(places, len(joined.rows))[found.request]
        is_known = np.array([name != UNKNOWN for name in found.names], dtype=np.bool_)[found.part]
        unknown_ns, without = np.zeros(len(rows), dtype=np.int64), (request != NONE) & ~is_known
        unknown_ns[request[without]] = found.time_ns[without]
        kept = np.flatnonzero((request != NONE) & is_known)
        kept = kept[np.argsort(request[kept], kind="stable")]
        return cls(
            names=tuple(names),
            rows=rows,
            place=places,
            endpoint=of_site[trace.site[rows]],
            wall_ns=trace.total_ns[rows],
            failed=trace.error[rows] != NONE,
            broken_off=np.isin(rows, trace.attributes.having(OUTCOME)) & (trace.error[rows] == NONE),
            unknown_ns=unknown_ns,
            answers=Answers.of(trace.attributes, rows),
            parts=found.names,
            request=request[kept],
            part=found.part[kept],
            time_ns=found.time_ns[kept],
        )

    def endpoints(self, options: Options, counted: Mapping[str, int]) -> list[EndpointTimes]:
        """Return the endpoints in any order. `counted` are all requests that ended, by name, where that is more."""
        found = self._come_to(self.endpoint, self.names, options)
        return [replace(one, counted=max(counted.get(one.name, 0), one.requests)) for one in found]

    def groups(self, trace: Columns, options: Options) -> tuple[EndpointTimes, ...]:
        """Return the requests by the value of the attribute that groups them. All small groups are one."""
        if not options.requests_by:
            return ()
        values = list(map(group_of, trace.attributes.values(options.requests_by, self.rows)))
        counts = Counter(value for value in values if value is not None)
        largest = [value for value, _ in counts.most_common(options.at_most)]
        number = {value: place for place, value in enumerate(largest)}
        last = len(largest)
        groups = [NONE if value is None else number.get(value, last) for value in values]
        return tuple(self._come_to(np.array(groups, dtype=np.int64), [*largest, OTHER], options))

    def rest(self, others: Sequence[EndpointTimes], options: Options) -> EndpointTimes:
        """The requests of several endpoints together."""
        left_out = {one.name for one in others}
        is_other = np.array([name in left_out for name in self.names], dtype=np.bool_)
        groups = np.where(is_other[self.endpoint], 0, NONE)
        (rest,) = self._come_to(groups, ("",), options, remaining=len(others))
        return replace(rest, counted=sum(one.counted for one in others))

    def _come_to(
        self, groups: Int64s, names: Sequence[str], options: Options, remaining: int = 0
    ) -> list[EndpointTimes]:  # fmt: skip
        """Return the times of each group that has any request."""
        count, all_ns = len(names), sum(self.wall_ns.tolist())
        walls, unknown = (_in_order(groups, count, times) for times in (self.wall_ns, self.unknown_ns))
        failed = Groups(groups, count).sums(self.failed.astype(np.int64)).tolist()
        cancelled = Groups(groups, count).sums(self.broken_off.astype(np.int64)).tolist()
        phases, answers = self._times_of_phases(groups), self._answers(groups, count)
        found = []
        for number, name in enumerate(names):
            its, nothing_ran = walls[number], unknown[number]
            if not its:
                continue
            requests, wall_ns, unknown_ns = len(its), sum(its), sum(nothing_ran)
            p50_ns, p90_ns, p99_ns = percentiles_of(its, (0.5, 0.9, 0.99))
            unknown_p50_ns, unknown_p99_ns = percentiles_of(nothing_ran, (0.5, 0.99))
            answered = answers.get(number)
            found.append(
                EndpointTimes(
                    name=name,
                    requests=requests,
                    errors=failed[number],
                    wall_ns=wall_ns,
                    mean_ns=wall_ns / requests,
                    p50_ns=p50_ns,
                    p90_ns=p90_ns,
                    p99_ns=p99_ns,
                    min_ns=its[0],
                    max_ns=its[-1],
                    ratio=share(wall_ns, all_ns),
                    phases=phase_times(phases.get(number, {}), wall_ns, options),
                    unknown_ns=unknown_ns,
                    unknown_mean_ns=unknown_ns / requests,
                    unknown_p50_ns=unknown_p50_ns,
                    unknown_p99_ns=unknown_p99_ns,
                    unknown_ratio=share(unknown_ns, wall_ns),
                    statuses=answered.statuses() if answered else {},
                    streams=answered.streams() if answered else None,
                    remaining=remaining,
                    cancelled=cancelled[number],
                )
            )
        return found

    def _times_of_phases(self, groups: Int64s) -> dict[int, dict[str, list[int]]]:
        """By group and phase the times of the requests that had it, in order."""
        its = groups[self.request]
        kept = its != NONE
        numbers, firsts = numbered(its[kept], self.part[kept])
        times = _in_order(numbers, len(firsts), self.time_ns[kept])
        found: dict[int, dict[str, list[int]]] = {}
        for group, part, of_phase in zip(
            its[kept][firsts].tolist(), self.part[kept][firsts].tolist(), times, strict=True
        ):
            found.setdefault(group, {})[self.parts[part]] = of_phase
        return found

    def _answers(self, groups: Int64s, count: int) -> dict[int, Answers]:
        """By group what its requests say of their answers, of those that say anything."""
        told = self.answers.told()
        members = Groups(groups[told], count).members()
        return {int(groups[told[its[0]]]): self.answers.only(told[its]) for its in members}

    def phases_of(self, number: int) -> dict[str, list[int]]:
        """The phases of one request, each with its one time."""
        first, last = np.searchsorted(self.request, [number, number + 1])
        its = zip(self.part[first:last].tolist(), self.time_ns[first:last].tolist(), strict=True)
        return {self.parts[part]: [time_ns] for part, time_ns in its}


def outcome_told(trace: Columns, row: int) -> str:
    """By what a request was broken off, "" where it was not."""
    told = trace.attributes[row].get(OUTCOME)
    return told if isinstance(told, str) else ""


def _in_order(groups: Int64s, count: int, times: Int64s) -> list[list[int]]:
    """The times of each group, the shortest first."""
    order = np.lexsort((times, groups))
    edges = np.searchsorted(groups[order], np.arange(count + 1)).tolist()
    in_order = times[order].tolist()
    return [in_order[first:last] for first, last in pairwise(edges)]


def phase_times(times: Mapping[str, Sequence[int]], wall_ns: int, options: Options) -> tuple[PhaseTime, ...]:
    """Phases by the times of each, in the order of `IN_ORDER`; where there are more than the options leave, those with
    the most time."""

    def phase(name: str, its: Sequence[int]) -> PhaseTime:
        summed_ns, (p50_ns, p99_ns) = sum(its), percentiles_of(its, (0.5, 0.99))
        mean_ns, ratio = summed_ns / len(its), share(summed_ns, wall_ns)
        return PhaseTime(name, len(its), summed_ns, mean_ns, p50_ns, p99_ns, ratio)

    def rest(others: Sequence[PhaseTime]) -> PhaseTime:
        summed_ns = sum(one.summed_ns for one in others)
        return PhaseTime("", None, summed_ns, None, None, None, share(summed_ns, wall_ns), len(others))

    all_of_it = [phase(name, its) for name, its in times.items()]
    all_of_it.sort(key=lambda one: (-one.summed_ns, one.name))
    shown = bounded(all_of_it, options, lambda one: one.summed_ns, rest)
    return tuple(sorted(shown, key=_place))


def _place(phase: PhaseTime) -> tuple[bool, int]:
    place = IN_ORDER.index(phase.name) if phase.name in IN_ORDER else len(IN_ORDER)
    return bool(phase.remaining), place
