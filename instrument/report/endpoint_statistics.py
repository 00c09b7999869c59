"""The requests of each endpoint: their wall times, errors, phases, streamed answers and blocked event loops.

A streamed answer has several items: server-sent events, messages, or chunks. The time per item is the time from the
first to the last item, divided by the number of later items.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from instrument.recorder.wrapping import STATUS
from instrument.recording.distributions import percentiles_of_times
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
from instrument.report.request_groups import ENDPOINT, attribute_values, group_attribute_values, read_integer_attribute
from instrument.report.table import compute_share, limit_rows, make_row_summer, row_name, sum_omitted_rows
from instrument.report.view import Options
from instrument.trace.columns import Attributes, Bools, Columns, Int64s
from instrument.trace.indices import NONE, Members, index_rows
from instrument.trace.joined import Joined
from instrument.trace.ledger import QUEUE, SHARE, STALL, TRANSPORT, UNKNOWN, WAITING, Ledger
from instrument.trace.request_trees import CACHED_TOKENS, INPUT_TOKENS, OUTPUT_TOKENS
from instrument.trace.stages import Stages


@dataclass(frozen=True, slots=True)
class Blocker:
    """The times in which one span or function blocked an event loop, in ns. `at` is the line of the service's code that
    took the most time, "" if no line was recorded."""

    name: str
    stretches: int
    summed_ns: int
    longest_ns: int
    remaining: int = 0
    at: str = ""


@dataclass(frozen=True, slots=True)
class BlockedLoops:
    """The times in which event loops were blocked: their sum, and one row for each blocker."""

    stretches: int
    summed_ns: int
    longest_ns: int
    by: tuple[Blocker, ...]

    def table_rows(self) -> list[Blocker]:
        total = Blocker("loop blocked", self.stretches, self.summed_ns, self.longest_ns)
        return [total, *(replace(row, name=f"  {row_name(row)}", remaining=0) for row in self.by)]


def measure_blocked_loops(trace: Columns, options: Options) -> BlockedLoops | None:
    durations, places = defaultdict[str, list[int]](list), defaultdict[str, Counter[str]](Counter)
    spans = np.flatnonzero(trace.are_of_sites([is_blocked_loop(site) for site in trace.sites]))
    columns = (trace.attributes.values(name, spans) for name in (BLOCKED_BY, BLOCKED_AT))
    for by, at, took_ns in zip(*columns, trace.total_ns[spans].tolist(), strict=True):
        name = "" if by is None else str(by)
        durations[name].append(took_ns)
        places[name].update({} if at is None else {str(at): took_ns})
    if not durations:
        return None
    rows = []
    for name, times_ns in durations.items():
        at = max(places[name], key=places[name].__getitem__, default="")
        rows.append(Blocker(name, len(times_ns), sum(times_ns), max(times_ns), at=at))
    rows.sort(key=lambda row: (-row.summed_ns, row.name))

    def sum_blockers(rows: Sequence[Blocker]) -> Blocker:
        return sum_omitted_rows(rows, ("stretches", "summed_ns"), longest_ns=max(row.longest_ns for row in rows))

    every, shown = sum_blockers(rows), limit_rows(rows, options, lambda blocker: blocker.summed_ns, sum_blockers)
    return BlockedLoops(every.stretches, every.summed_ns, every.longest_ns, shown)


CLASSES = ("1xx", "2xx", "3xx", "4xx", "5xx")

ANSWER_FACTS = (STATUS, FIRST_ITEM, ITEMS, LAST_ITEM, LONGEST_GAP)


@dataclass(frozen=True, slots=True)
class StreamedAnswers:
    """The streamed answers of an endpoint: percentiles of the time to the first item, and of the time per item. A time
    is None if no stream has it."""

    count: int
    items: int
    first_p50_ns: int
    first_p99_ns: int
    item_p50_ns: int | None
    item_p99_ns: int | None
    longest_gap_ns: int | None


class Answers(NamedTuple):
    """The answers of requests as columns. Unknown values are `NONE`."""

    status: Int64s
    first_ns: Int64s
    items: Int64s
    last_ns: Int64s
    longest_gap_ns: Int64s

    @classmethod
    def read_answers(cls, attributes: Attributes, rows: Int64s) -> Answers:
        return cls(*(read_integer_attribute(attributes, name, rows) for name in ANSWER_FACTS))

    def select_answers(self, places: Int64s) -> Answers:
        return Answers(*(column[places] for column in self))

    def count_statuses(self) -> dict[str, int]:
        counts = np.bincount(self.status.clip(0, 600) // 100, minlength=7)[1:6].tolist()
        return {name: count for name, count in zip(CLASSES, counts, strict=True) if count}

    def summarise_streamed_answers(self) -> StreamedAnswers | None:
        streamed = self.select_answers(np.flatnonzero((self.first_ns != NONE) & (self.items > 0)))
        if not len(streamed.items):
            return None
        has_more = (streamed.last_ns != NONE) & (streamed.items > 1)
        per_item_ns = np.maximum(streamed.last_ns - streamed.first_ns, 0)[has_more] // (streamed.items[has_more] - 1)
        first_p50_ns, first_p99_ns = percentiles_of_times(np.sort(streamed.first_ns).tolist(), (0.5, 0.99))
        longest_ns = int(streamed.longest_gap_ns.max())
        return StreamedAnswers(
            len(streamed.items),
            sum(streamed.items.tolist()),
            first_p50_ns,
            first_p99_ns,
            *_compute_percentiles(per_item_ns),
            None if longest_ns == NONE else longest_ns,
        )


def _compute_percentiles(times: Int64s) -> tuple[int | None, int | None]:
    sorted_ns = np.sort(times[times != NONE]).tolist()
    if not sorted_ns:
        return None, None
    p50_ns, p99_ns = percentiles_of_times(sorted_ns, (0.5, 0.99))
    return p50_ns, p99_ns


IN_ORDER = (
    QUEUE, "load", "prepare", "copy in", "infer_shape", "prefill", "compute", "comm", "generate", SHARE, WAITING, STALL,
    "copy", "copy out", TRANSPORT, "post",
)  # fmt: skip
"""The order in which tables list phases. All other phases follow."""


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """The time of one phase in all requests. The mean and the percentiles are over the requests with the phase. `ratio`
    is the share of the requests' wall time."""

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
    """The requests of one endpoint. `phases` and `unknown_ns`, the time without a phase, add up to `wall_ns`.

    - `cancelled`: the number of requests that ended early without an error, such as by a client's disconnect
    - `counted`: the number of all ended requests, including requests whose spans are no longer kept
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
    """The requests of a report as columns. The last three columns have a row for each part of each request's time.

    - `place`: the index of a request among all requests of the trace
    - `endpoint`: an index into `names`
    - `request`, `part`: an index into the columns of requests, and an index into `parts`
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
    def collect_requests(cls, trace: Columns, joined: Joined, ledger: Ledger, rows: Int64s) -> CompleteRequests:
        names, of_site = trace.describe_sites(attrgetter("name"))
        places = joined.of[rows]
        request = index_rows(places, len(joined.rows))[ledger.request]
        is_chosen = request != NONE
        request, part, time_ns = request[is_chosen], ledger.part[is_chosen], ledger.time_ns[is_chosen]
        unknown_ns, is_unknown = np.zeros(len(rows), dtype=np.int64), part == ledger.names.index(UNKNOWN)
        unknown_ns[request[is_unknown]] = time_ns[is_unknown]
        return cls(
            names=tuple(names),
            rows=rows,
            place=places,
            endpoint=of_site[trace.site[rows]],
            wall_ns=trace.total_ns[rows],
            failed=trace.error[rows] != NONE,
            broken_off=np.isin(rows, trace.attributes.rows_with_attribute(OUTCOME)) & (trace.error[rows] == NONE),
            unknown_ns=unknown_ns,
            answers=Answers.read_answers(trace.attributes, rows),
            parts=ledger.names,
            request=request,
            part=part,
            time_ns=time_ns,
        )

    def times_of_endpoints(self, options: Options, counted: Mapping[str, int]) -> list[EndpointTimes]:
        rows = self._times_of_groups(self.endpoint, self.names, options)
        return [replace(row, counted=max(counted.get(row.name, 0), row.requests)) for row in rows]

    def times_by_attribute(self, trace: Columns, options: Options) -> tuple[EndpointTimes, ...]:
        if options.requests_by in ("", ENDPOINT):
            return ()
        names, groups = group_attribute_values(attribute_values(trace, self.rows, options.requests_by), options.at_most)
        return tuple(self._times_of_groups(groups, names, options))

    def sum_endpoints(self, rows: Sequence[EndpointTimes], options: Options) -> EndpointTimes:
        left_out = {row.name for row in rows}
        is_other = np.array([name in left_out for name in self.names], dtype=np.bool_)
        groups = np.where(is_other[self.endpoint], 0, NONE)
        (total,) = self._times_of_groups(groups, ("",), options, remaining=len(rows))
        return replace(total, counted=sum(row.counted for row in rows))

    def _times_of_groups(
        self, groups: Int64s, names: Sequence[str], options: Options, remaining: int = 0
    ) -> list[EndpointTimes]:  # fmt: skip
        all_ns, count = sum(self.wall_ns.tolist()), len(names)
        members, parts = Members(groups, count), Members(groups[self.request], count)
        rows = []
        for number, name in enumerate(names):
            places = members[number]
            if not (requests := len(places)):
                continue
            walls_ns, unknowns_ns = (np.sort(times[places]).tolist() for times in (self.wall_ns, self.unknown_ns))
            wall_ns, unknown_ns, answers = sum(walls_ns), sum(unknowns_ns), self.answers.select_answers(places)
            p50_ns, p90_ns, p99_ns = percentiles_of_times(walls_ns, (0.5, 0.9, 0.99))
            unknown_p50_ns, unknown_p99_ns = percentiles_of_times(unknowns_ns, (0.5, 0.99))
            times = Members(self.part[parts[number]], len(self.parts), self.time_ns[parts[number]])
            times_of_parts = {
                name: np.sort(times[part]).tolist() for part, name in enumerate(self.parts) if name != UNKNOWN
            }
            rows.append(
                EndpointTimes(
                    name=name,
                    requests=requests,
                    errors=int(self.failed[places].sum()),
                    wall_ns=wall_ns,
                    mean_ns=wall_ns / requests,
                    p50_ns=p50_ns,
                    p90_ns=p90_ns,
                    p99_ns=p99_ns,
                    min_ns=walls_ns[0],
                    max_ns=walls_ns[-1],
                    ratio=compute_share(wall_ns, all_ns),
                    phases=phase_times(times_of_parts, wall_ns, options),
                    unknown_ns=unknown_ns,
                    unknown_mean_ns=unknown_ns / requests,
                    unknown_p50_ns=unknown_p50_ns,
                    unknown_p99_ns=unknown_p99_ns,
                    unknown_ratio=compute_share(unknown_ns, wall_ns),
                    statuses=answers.count_statuses(),
                    streams=answers.summarise_streamed_answers(),
                    remaining=remaining,
                    cancelled=int(self.broken_off[places].sum()),
                )
            )
        return rows


TOKEN_EDGES, CACHED_EDGES = (16, 64, 256, 1_024, 4_096, 16_384, 65_536), (1, 50, 90)
"""The lower bounds of the ranges in tables: numbers of tokens, and percentages of cached prompt tokens."""


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """The requests of an endpoint in one `range` of the attribute `by`, such as the number of output tokens.

    A time per token is the time after the first output token, divided by the number of later tokens. A time is None if
    it is unknown.
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


def times_by_tokens(
    attributes: Attributes, table: CompleteRequests, all_stages: Iterable[Stages], names: Sequence[str]
) -> tuple[TokenTimes, ...]:
    inputs, outputs, cached = (
        read_integer_attribute(attributes, name, table.rows) for name in (INPUT_TOKENS, OUTPUT_TOKENS, CACHED_TOKENS)
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
        members = Members(groups, len(table.names) * len(ranges))
        for name in names:
            first = table.names.index(name) * len(ranges)
            for label, places in zip(ranges, map(members.__getitem__, range(first, first + len(ranges))), strict=True):
                if not len(places):
                    continue
                of_cached = places[has_both[places]]
                p50_ns, p99_ns = percentiles_of_times(np.sort(table.wall_ns[places]).tolist(), (0.5, 0.99))
                rows.append(
                    TokenTimes(
                        by,
                        name,
                        label,
                        len(places),
                        sum(inputs[places].clip(0).tolist()),
                        sum(outputs[places].clip(0).tolist()),
                        compute_share(sum(cached[of_cached].tolist()), sum(inputs[of_cached].tolist())),
                        p50_ns,
                        p99_ns,
                        *_compute_percentiles(prefill_ns[places]),
                        *_compute_percentiles(token_ns[places]),
                    )
                )
    return tuple(rows)


def describe_failure(trace: Columns, row: int) -> tuple[str, str]:
    error, outcome = int(trace.error[row]), trace.attributes[row].get(OUTCOME)
    return "" if error == NONE else trace.errors[error], outcome if isinstance(outcome, str) else ""


def phase_times(times: Mapping[str, Sequence[int]], wall_ns: int, options: Options) -> tuple[PhaseTime, ...]:
    """Return a row for each phase that has times, sorted by `IN_ORDER`. The options may limit the rows."""
    phases = []
    for name, times_ns in times.items():
        if times_ns:
            count, summed_ns = len(times_ns), sum(times_ns)
            p50_ns, p99_ns = percentiles_of_times(times_ns, (0.5, 0.99))
            phases.append(PhaseTime(name, count, summed_ns, summed_ns / count, p50_ns, p99_ns, None))
    phases.sort(key=lambda phase: (-phase.summed_ns, phase.name))
    shown = limit_rows(phases, options, attrgetter("summed_ns"), make_row_summer("summed_ns"))
    with_ratios = [replace(phase, ratio=compute_share(phase.summed_ns, wall_ns)) for phase in shown]
    rank = {name: place for place, name in enumerate(IN_ORDER)}
    return tuple(sorted(with_ratios, key=lambda row: (bool(row.remaining), rank.get(row.name, len(rank)))))
