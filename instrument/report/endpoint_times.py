"""The requests of each endpoint: their wall times, errors, phases and answers.

Answers are attributes of request spans, which `requests:` in the profile sets. A stream is an answer in several items:
server-sent events, messages, or chunks. The time per item is the time from the first item to the last one, divided by
the items after the first. Blocked loops are spans of callbacks longer than `limits.blocked`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import attrgetter

import numpy as np

from instrument.recorder.wrapping import STATUS
from instrument.recording.distributions import percentiles_of
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
from instrument.report.request_groups import ENDPOINT, group_values, values_of
from instrument.report.table import bounded, row_name, share
from instrument.report.view import Options
from instrument.trace.columns import Attributes, Bools, Columns, Int64s
from instrument.trace.forest import NONE
from instrument.trace.groups import Groups, numbered, places_of
from instrument.trace.joined import Joined
from instrument.trace.ledger import QUEUE, SHARE, STALL, TRANSPORT, UNKNOWN, WAITING, Ledger
from instrument.trace.request_facts import CACHED_TOKENS, INPUT_TOKENS, OUTPUT_TOKENS
from instrument.trace.stages import Stages


@dataclass(frozen=True, slots=True)
class Blocker:
    """The times in which one span or function blocked an event loop: their number, sum and longest, in ns.

    `at` is the place in the service's code that took most of this time, "" if none was recorded. `remaining` is the
    number of spans and functions that a row of the rest replaces.
    """

    name: str
    stretches: int
    summed_ns: int
    longest_ns: int
    remaining: int = 0
    at: str = ""

    def indented(self) -> Blocker:
        """Return the row with an indented name, for a table with the row of all blockers above it."""
        return replace(self, name=f"  {row_name(self)}", remaining=0)


@dataclass(frozen=True, slots=True)
class BlockedLoops:
    """The times in which event loops were blocked: number, sum and longest, and `by` cause, the largest sum first."""

    stretches: int
    summed_ns: int
    longest_ns: int
    by: tuple[Blocker, ...]

    def whole(self) -> Blocker:
        """Return the row of all blockers together."""
        return Blocker("loop blocked", self.stretches, self.summed_ns, self.longest_ns)


def blocked_loops(trace: Columns, options: Options) -> BlockedLoops | None:
    """Return the blocked loops of a trace, None if no loop was blocked. `rows` and `least_ns` bound `by`."""
    durations: dict[str, list[int]] = {}
    places: dict[str, Counter[str]] = {}
    spans = np.flatnonzero(trace.of_sites([is_blocked_loop(site) for site in trace.sites]))
    columns = (trace.attributes.values(name, spans) for name in (BLOCKED_BY, BLOCKED_AT))
    for by, at, took_ns in zip(*columns, trace.total_ns[spans].tolist(), strict=True):
        name = "" if by is None else str(by)
        durations.setdefault(name, []).append(took_ns)
        if at is not None:
            places.setdefault(name, Counter())[str(at)] += took_ns
    if not durations:
        return None
    blockers = [_blocker(name, times) for name, times in durations.items()]
    rows = [replace(row, at=places[row.name].most_common(1)[0][0]) if row.name in places else row for row in blockers]
    rows.sort(key=lambda row: (-row.summed_ns, row.name))

    def rest(omitted: Sequence[Blocker]) -> Blocker:
        return _blocker("", (ns for row in omitted for ns in durations[row.name]), remaining=len(omitted))

    all_of_it = _blocker("", (ns for times in durations.values() for ns in times))
    shown = bounded(rows, options, lambda blocker: blocker.summed_ns, rest)
    return BlockedLoops(all_of_it.stretches, all_of_it.summed_ns, all_of_it.longest_ns, shown)


def _blocker(name: str, times: Iterable[int], remaining: int = 0) -> Blocker:
    times_ns = list(times)
    return Blocker(name, len(times_ns), sum(times_ns), max(times_ns), remaining)


CLASSES = ("1xx", "2xx", "3xx", "4xx", "5xx")

ANSWER_FACTS = (STATUS, FIRST_ITEM, ITEMS, LAST_ITEM, LONGEST_GAP)


@dataclass(frozen=True, slots=True)
class StreamedAnswers:
    """The streamed answers of an endpoint: their number, their items, and percentiles of the time to the first item and
    of the time per item. A time is None if no stream has it."""

    count: int
    items: int
    first_p50_ns: int
    first_p99_ns: int
    item_p50_ns: int | None
    item_p99_ns: int | None
    longest_gap_ns: int | None


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of requests as columns, with a row per request. An unknown value is `NONE`."""

    status: Int64s
    first_ns: Int64s
    items: Int64s
    last_ns: Int64s
    longest_gap_ns: Int64s

    @classmethod
    def of(cls, attributes: Attributes, rows: Int64s) -> Answers:
        """Return the answers of the requests in some rows of the trace."""
        return cls(*(_numbers(attributes, name, rows) for name in ANSWER_FACTS))

    def only(self, places: Int64s) -> Answers:
        """Return the answers at some indices."""
        columns = self.status, self.first_ns, self.items, self.last_ns, self.longest_gap_ns
        return Answers(*(column[places] for column in columns))

    def known_places(self) -> Int64s:
        """Return the indices of the requests with a known answer."""
        return np.flatnonzero((self.status != NONE) | (self.first_ns != NONE))

    def statuses(self) -> dict[str, int]:
        """Return the number of answers in each class of status, such as `2xx`."""
        counts = np.bincount(self.status.clip(0, 600) // 100, minlength=7)[1:6].tolist()
        return {name: count for name, count in zip(CLASSES, counts, strict=True) if count}

    def streams(self) -> StreamedAnswers | None:
        """Return the figures of the streamed answers, None if no answer was streamed."""
        streamed = self.only(np.flatnonzero((self.first_ns != NONE) & (self.items > 0)))
        if not len(streamed.items):
            return None
        has_more = (streamed.last_ns != NONE) & (streamed.items > 1)
        per_item_ns = np.maximum(streamed.last_ns - streamed.first_ns, 0)[has_more] // (streamed.items[has_more] - 1)
        first_p50_ns, first_p99_ns = percentiles_of(np.sort(streamed.first_ns).tolist(), (0.5, 0.99))
        longest_ns = int(streamed.longest_gap_ns.max())
        return StreamedAnswers(
            len(streamed.items),
            sum(streamed.items.tolist()),
            first_p50_ns,
            first_p99_ns,
            *_percentiles_of_known(per_item_ns),
            None if longest_ns == NONE else longest_ns,
        )


def _percentiles_of_known(times: Int64s) -> tuple[int | None, int | None]:
    sorted_ns = np.sort(times[times != NONE]).tolist()
    if not sorted_ns:
        return None, None
    p50_ns, p99_ns = percentiles_of(sorted_ns, (0.5, 0.99))
    return p50_ns, p99_ns


def _numbers(attributes: Attributes, name: str, rows: Int64s) -> Int64s:
    """Return an attribute of each row as a number, `NONE` for any other value."""
    numbers = np.full(len(rows), NONE, dtype=np.int64)
    places = np.flatnonzero(np.isin(rows, attributes.having(name)))
    for place, value in zip(places.tolist(), attributes.values(name, rows[places]), strict=True):
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63:
            numbers[place] = value
    return numbers


IN_ORDER = (
    QUEUE, "load", "prepare", "copy in", "infer_shape", "prefill", "compute", "comm", "generate", SHARE, WAITING, STALL,
    "copy", "copy out", TRANSPORT, "post",
)  # fmt: skip
"""The order of phases in a table. Other phases follow by their time."""


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """The time of one phase: the number of requests with it, its sum, and its share of all requests' wall time.

    The mean and the percentiles are over the requests that had the phase. A row with `remaining` replaces that many
    phases. Its number of requests, mean and percentiles are unknown.
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
    """The requests of one name. Their `phases` and `unknown_ns`, the time without a phase, add up to `wall_ns`.

    Every request has an unknown time, perhaps 0. `errors` counts requests that failed with an exception or by the
    server's own fault. `cancelled` counts requests that ended early, for example when the client disconnected. They are
    no errors. `statuses` are answers by class, such as `2xx`, and `streams` the streamed answers, None without any.
    `ratio` is the share of the wall time of all requests in the view. `counted` is the number of all requests of the
    name that have ended, also without kept spans. A row with `remaining` replaces that many endpoints.
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
class CompleteRequests:
    """The requests of a report as columns: a row per request, and a row per part of a request's time.

    `place` is the request's index among all requests of the trace. `endpoint` is an index into `names`, `part` into
    `parts`. The parts of a request are adjacent. The parts leave out `unknown_ns`, the time without a phase.
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
    def of(cls, trace: Columns, joined: Joined, ledger: Ledger, rows: Int64s) -> CompleteRequests:
        """Return the requests in some rows of a trace."""
        names, of_site = trace.numbered_sites(attrgetter("name"))
        places = joined.of[rows]
        request = places_of(places, len(joined.rows))[ledger.request]
        is_known = np.array([name != UNKNOWN for name in ledger.names], dtype=np.bool_)[ledger.part]
        unknown_ns, is_unknown = np.zeros(len(rows), dtype=np.int64), (request != NONE) & ~is_known
        unknown_ns[request[is_unknown]] = ledger.time_ns[is_unknown]
        of_known = np.flatnonzero((request != NONE) & is_known)
        of_known = of_known[np.argsort(request[of_known], kind="stable")]
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
            parts=ledger.names,
            request=request[of_known],
            part=ledger.part[of_known],
            time_ns=ledger.time_ns[of_known],
        )

    def endpoints(self, options: Options, counted: Mapping[str, int]) -> list[EndpointTimes]:
        """Return a row per endpoint, in any order. `counted` is the number of ended requests by name."""
        rows = self._times_of_groups(self.endpoint, self.names, options)
        return [replace(row, counted=max(counted.get(row.name, 0), row.requests)) for row in rows]

    def groups(self, trace: Columns, options: Options) -> tuple[EndpointTimes, ...]:
        """Return a row per value of the grouping attribute. One row has all small groups."""
        if options.requests_by in ("", ENDPOINT):
            return ()
        names, groups = group_values(values_of(trace, self.rows, options.requests_by), options.at_most)
        return tuple(self._times_of_groups(groups, names, options))

    def rest(self, rows: Sequence[EndpointTimes], options: Options) -> EndpointTimes:
        """Return the row that sums up the requests of some endpoints."""
        left_out = {row.name for row in rows}
        is_other = np.array([name in left_out for name in self.names], dtype=np.bool_)
        groups = np.where(is_other[self.endpoint], 0, NONE)
        (total,) = self._times_of_groups(groups, ("",), options, remaining=len(rows))
        return replace(total, counted=sum(row.counted for row in rows))

    def _times_of_groups(
        self, groups: Int64s, names: Sequence[str], options: Options, remaining: int = 0
    ) -> list[EndpointTimes]:  # fmt: skip
        """Return a row per group, except for groups without requests."""
        count, all_ns = len(names), sum(self.wall_ns.tolist())
        walls, unknown = (_sorted_by_group(groups, count, times) for times in (self.wall_ns, self.unknown_ns))
        failed = Groups(groups, count).sums(self.failed.astype(np.int64)).tolist()
        cancelled = Groups(groups, count).sums(self.broken_off.astype(np.int64)).tolist()
        phases, answers = self._times_of_phases(groups), self._answers(groups, count)
        rows = []
        for number, name in enumerate(names):
            walls_ns, unknown_times = walls[number], unknown[number]
            if not walls_ns:
                continue
            requests, wall_ns, unknown_ns = len(walls_ns), sum(walls_ns), sum(unknown_times)
            p50_ns, p90_ns, p99_ns = percentiles_of(walls_ns, (0.5, 0.9, 0.99))
            unknown_p50_ns, unknown_p99_ns = percentiles_of(unknown_times, (0.5, 0.99))
            answered = answers.get(number)
            rows.append(
                EndpointTimes(
                    name=name,
                    requests=requests,
                    errors=failed[number],
                    wall_ns=wall_ns,
                    mean_ns=wall_ns / requests,
                    p50_ns=p50_ns,
                    p90_ns=p90_ns,
                    p99_ns=p99_ns,
                    min_ns=walls_ns[0],
                    max_ns=walls_ns[-1],
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
        return rows

    def _times_of_phases(self, groups: Int64s) -> dict[int, dict[str, list[int]]]:
        """Return the sorted times of requests in a phase, by group and phase."""
        group_of_part = groups[self.request]
        in_group = group_of_part != NONE
        numbers, firsts = numbered(group_of_part[in_group], self.part[in_group])
        times = _sorted_by_group(numbers, len(firsts), self.time_ns[in_group])
        times_by_group: dict[int, dict[str, list[int]]] = {}
        for group, part, of_phase in zip(
            group_of_part[in_group][firsts].tolist(), self.part[in_group][firsts].tolist(), times, strict=True
        ):
            times_by_group.setdefault(group, {})[self.parts[part]] = of_phase
        return times_by_group

    def _answers(self, groups: Int64s, count: int) -> dict[int, Answers]:
        """Return the known answers of each group's requests. Groups without answers are left out."""
        places = self.answers.known_places()
        members = Groups(groups[places], count).members()
        return {int(groups[places[indexes[0]]]): self.answers.only(places[indexes]) for indexes in members}

    def phases_of(self, number: int) -> dict[str, list[int]]:
        """Return the time of each phase of one request, each as a list with one time."""
        first, last = np.searchsorted(self.request, [number, number + 1])
        times = zip(self.part[first:last].tolist(), self.time_ns[first:last].tolist(), strict=True)
        return {self.parts[part]: [time_ns] for part, time_ns in times}


TOKEN_EDGES, CACHED_EDGES = (16, 64, 256, 1_024, 4_096, 16_384, 65_536), (1, 50, 90)
"""The lower bounds of ranges: of tokens, and of the cached part of a prompt in percent."""


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """The requests of an endpoint whose fact `by` is in a `range`: a number of tokens, or the cached part of a prompt.

    Prefill is over the requests with such a stage, and a token is the time per output token after the first one. The
    first one is the first item of a streamed answer, else the end of the prefill. None is an unknown time.
    """

    by: str
    name: str
    range: str
    requests: int
    input_tokens: int
    output_tokens: int
    cached_ratio: float | None
    p50_ns: int
    p99_ns: int
    prefill_p50_ns: int | None
    prefill_p99_ns: int | None
    token_p50_ns: int | None
    token_p99_ns: int | None


def token_times(
    attributes: Attributes, table: CompleteRequests, all_stages: Iterable[Stages], names: Sequence[str]
) -> tuple[TokenTimes, ...]:
    """Return the times of the requests of some endpoints, by their output tokens, input tokens and cached tokens."""
    inputs, outputs, cached = (
        _numbers(attributes, name, table.rows) for name in (INPUT_TOKENS, OUTPUT_TOKENS, CACHED_TOKENS)
    )
    prefill_ns, after_ns = np.full((2, len(table.rows)), NONE, dtype=np.int64)
    at_place = {place: at for at, place in enumerate(table.place.tolist())}
    for stages in all_stages:
        at = at_place.get(stages.place, NONE)
        if at != NONE and stages.prefill is not None and stages.decode is not None:
            prefill_ns[at], after_ns[at] = (end - begin for begin, end in (stages.prefill, stages.decode))
    answers = table.answers
    is_streamed = (answers.first_ns != NONE) & (answers.last_ns != NONE) & (answers.items > 1)
    after_ns = np.where(is_streamed, answers.last_ns - answers.first_ns, after_ns)
    token_ns = np.where((after_ns >= 0) & (outputs > 1), after_ns // np.maximum(outputs - 1, 1), NONE)
    has_both = (cached != NONE) & (inputs > 0)
    percent = np.where(has_both, cached * 100 // np.maximum(inputs, 1), NONE)
    rows = []
    for by, values, edges, unit in (
        (OUTPUT_TOKENS, outputs, TOKEN_EDGES, ""),
        (INPUT_TOKENS, inputs, TOKEN_EDGES, ""),
        (CACHED_TOKENS, percent, CACHED_EDGES, "%"),
    ):
        ranges = [f"below {edges[0]}{unit}", *(f"{a}{unit} to {b - 1}{unit}" for a, b in pairwise(edges))]
        ranges.append(f"from {edges[-1]}{unit}")
        number = np.searchsorted(edges, values, side="right")
        groups = np.where(values != NONE, table.endpoint * len(ranges) + number, NONE)
        members = Groups(groups, len(table.names) * len(ranges)).members()
        by_endpoint = [(table.names[table.endpoint[places[0]]], places) for places in members]
        for name in names:
            for places in (places for endpoint, places in by_endpoint if endpoint == name):
                of_cached = places[has_both[places]]
                p50_ns, p99_ns = percentiles_of(np.sort(table.wall_ns[places]).tolist(), (0.5, 0.99))
                rows.append(
                    TokenTimes(
                        by,
                        name,
                        ranges[number[places[0]]],
                        len(places),
                        sum(inputs[places].clip(0).tolist()),
                        sum(outputs[places].clip(0).tolist()),
                        share(sum(cached[of_cached].tolist()), sum(inputs[of_cached].tolist())),
                        p50_ns,
                        p99_ns,
                        *_percentiles_of_known(prefill_ns[places]),
                        *_percentiles_of_known(token_ns[places]),
                    )
                )
    return tuple(rows)


def request_outcome(trace: Columns, row: int) -> str:
    """Return the reason why a request ended early, "" if it did not."""
    outcome = trace.attributes[row].get(OUTCOME)
    return outcome if isinstance(outcome, str) else ""


def _sorted_by_group(groups: Int64s, count: int, times: Int64s) -> list[list[int]]:
    """Return a list of times per group, the shortest time first."""
    order = np.lexsort((times, groups))
    edges = np.searchsorted(groups[order], np.arange(count + 1)).tolist()
    in_order = times[order].tolist()
    return [in_order[first:last] for first, last in pairwise(edges)]


def phase_times(times: Mapping[str, Sequence[int]], wall_ns: int, options: Options) -> tuple[PhaseTime, ...]:
    """Return a row per phase, in the order of `IN_ORDER`. The options bound them to the phases with the most time."""

    def phase(name: str, times_ns: Sequence[int]) -> PhaseTime:
        summed_ns, (p50_ns, p99_ns) = sum(times_ns), percentiles_of(times_ns, (0.5, 0.99))
        mean_ns, ratio = summed_ns / len(times_ns), share(summed_ns, wall_ns)
        return PhaseTime(name, len(times_ns), summed_ns, mean_ns, p50_ns, p99_ns, ratio)

    def rest(phases: Sequence[PhaseTime]) -> PhaseTime:
        summed_ns = sum(phase.summed_ns for phase in phases)
        return PhaseTime("", None, summed_ns, None, None, None, share(summed_ns, wall_ns), len(phases))

    all_of_it = [phase(name, times_ns) for name, times_ns in times.items()]
    all_of_it.sort(key=lambda phase: (-phase.summed_ns, phase.name))
    shown = bounded(all_of_it, options, lambda phase: phase.summed_ns, rest)
    return tuple(sorted(shown, key=_place))


def _place(phase: PhaseTime) -> tuple[bool, int]:
    place = IN_ORDER.index(phase.name) if phase.name in IN_ORDER else len(IN_ORDER)
    return bool(phase.remaining), place
