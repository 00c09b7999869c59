"""The `requests` view: the times of each endpoint's requests, the parts of their times, and the slowest of them.

An endpoint is all requests with the same name. Each moment of a request belongs to the open phase that began last, on
any thread or task. So the parts, with `unknown` for moments without a phase, add up to the wall time.

A span is a phase if its rule or scope declares a phase (`phase:`). By default, phases are the spans of
the kinds `phase`, `copy`, `layer`, `loader` and `comm`, the spans named `queue`, and the waits for a lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from instrument.recording.spans import Origin, is_late_failure, is_request
from instrument.report.device_use import EndpointUse, measure_utilisation
from instrument.report.device_view import endpoint_section, limit_endpoints
from instrument.report.endpoint_statistics import (
    CLASSES,
    BlockedLoops,
    CompleteRequests,
    EndpointTimes,
    PhaseTime,
    TokenTimes,
    describe_failure,
    measure_blocked_loops,
    phase_times,
    times_by_tokens,
)
from instrument.report.event_rows import sum_topmost_by_name
from instrument.report.request_groups import GroupShare, group_shares, make_shares_table
from instrument.report.section import Coverage, Section, View
from instrument.report.table import (
    LINE,
    compute_share,
    format_percent,
    format_time,
    limit_rows,
    make_row_summer,
    number_text,
    printable,
    row_name,
    shorten,
    wrap_text,
)
from instrument.report.view import Options, Recording, SortKey
from instrument.trace.blame import Blame, find_blame, typical_times
from instrument.trace.columns import Int64s
from instrument.trace.indices import Groups, find_distinct
from instrument.trace.ledger import UNKNOWN
from instrument.trace.request_trees import CACHED_TOKENS, INPUT_TOKENS, OUTPUT_TOKENS
from instrument.trace.stages import find_stages

TIMES = "mean_ns=Mean|p50_ns=p50|p90_ns=p90|p99_ns=p99|max_ns=Max|+wall_ns=Sum|ratio=Of all"
COLUMNS = {"calls": "requests", "max": "max_ns", "min": "min_ns", "ave": "mean_ns"}

A_REQUEST = (
    "A request is what a server takes, with `requests: auto` in the profile, what a rule with `kind: request` names "
    'there, or a scope around the handling of one: with scope(name, kind="request").'
)

ENOUGH = 3
"""The minimum number of requests of an endpoint for the computation of typical times."""

NOTABLE = 20
"""The list names the cause of a slow request if the cause adds at least 1/`NOTABLE` of the request's wall time."""

SLOWEST = 5
"""The default number of slowest requests in the list."""

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
YEARS_NS = 200 * 366 * 86_400 * 10**9
"""The largest accepted time since 1970. A later time means a damaged file or a wrong clock."""


@dataclass(frozen=True, slots=True)
class DeviceWithin:
    """The use of one device by the requests of each endpoint."""

    device: int
    endpoints: tuple[EndpointUse, ...]


DEVICE_SHARES = (
    "Device time of the requests' own work, and their shares of that of batches, each given out once, by",
    "weight. Of several devices it is the sum. Of all: of that of all requests.",
)


@dataclass(frozen=True, slots=True)
class EndpointShare:
    """The device time of one endpoint's requests. `own_ns` is the time of work outside of batches. `shared_ns` is the
    requests' share of the time of batches."""

    name: str
    requests: int
    own_ns: int
    shared_ns: int
    ratio: float | None
    remaining: int = 0

    @property
    def device_ns(self) -> int:
        return self.own_ns + self.shared_ns

    def mean_ns(self) -> float:
        return self.device_ns / self.requests


@dataclass(frozen=True, slots=True)
class SlowRequest:
    """A slow request. `began` is its date in UTC. `span_id` is its id in the Chrome trace. `trace_id` and
    `collector_span_id` are its ids at the collector. An unknown text is "". `outcome` is the reason why the request
    ended early. `blame` is the cause of its excess over typical requests."""

    name: str
    begin_ns: int
    began: str
    wall_ns: int
    error: str
    outcome: str
    span_id: int
    trace_id: str
    collector_span_id: str
    phases: tuple[PhaseTime, ...]
    unknown_ns: int
    unknown_ratio: float | None
    keys: tuple[str, ...] = ()
    blame: Blame | None = None


@dataclass(frozen=True, slots=True)
class RequestTimes(View):
    """The `requests` view, by endpoint. Tables have only requests that are within the window and have all their spans.
    `counted` and `errors` cover all ended requests. `requests_cut` counts the requests that cross an edge of the
    window. `late_failures` counts the requests that failed after their answer."""

    coverage: Coverage
    requests: int
    requests_cut: int
    counted: int
    errors: int
    late_failures: int
    wall_ns: int
    endpoints: tuple[EndpointTimes, ...]
    groups: tuple[EndpointTimes, ...]
    devices: tuple[DeviceWithin, ...]
    slowest: tuple[SlowRequest, ...]
    blocked: BlockedLoops | None
    device_shares: tuple[EndpointShare, ...]
    shares: tuple[GroupShare, ...]
    tokens: tuple[TokenTimes, ...]
    _served_ns: int
    """The time from the start of the first request to the end of the last one, in ns."""
    _options: Options

    def sections(self) -> list[Section]:
        cancelled = "|cancelled=Cancelled" if any(endpoint.cancelled for endpoint in self.endpoints) else ""
        blocked = [] if self.blocked is None else self.blocked.table_rows()
        return [
            Section(
                "Endpoints", self.endpoints,
                f"name=Request|{'counted=Ended|requests=Kept' if self.is_part else 'requests=Count'}|"
                f"errors=Errors{cancelled}|{TIMES}",
                ("Of all: the endpoint's share of the time of all requests.",),
            ),
            Section(
                f"By {self._options.requests_by}", self.groups, f"name=Value|requests=Count|errors=Errors|{TIMES}",
            ),
            self._answers_section(),
            *self._token_sections(),
            Section(
                "Streamed answers", [endpoint for endpoint in self.endpoints if endpoint.streams],
                "name=Request|streams.count=Streams|streams.items=Items|streams.first_p50_ns=First p50|"
                "streams.first_p99_ns=First p99|streams.item_p50_ns=Item p50|streams.item_p99_ns=Item p99|"
                "streams.longest_gap_ns=Longest",
                (
                    "First: from the begin of the request to its first item. Item: the time from the first to the last",
                    "item / the items after the first. Longest: the longest time between two items.",
                ),
            ),
            Section(
                "Where the time went", [row for endpoint in self.endpoints for row in _part_rows(endpoint)],
                "name=Request, and its phases|+endpoint=Endpoint|time.requests=Requests|time.mean_ns=Mean|"
                "time.p50_ns=p50|time.p99_ns=p99|+time.summed_ns=Sum|time.ratio=Of wall", PARTS_NOTE,
                widths=10,
            ),
            Section(
                "Loop blocked", blocked,
                "name=Event loops, and by what|stretches=Count|summed_ns=Sum|longest_ns=Longest"
                + "|at=Mostly at" * any(blocker.at for blocker in blocked),
                (
                    "Count: callbacks, or steps of tasks, that ran so long that the other requests of their loop had",
                    "to wait. They have the name of the innermost span that took most of the time, or of the function.",
                    "Mostly at: the innermost line of the service's own code, from the second time on.",
                ),
            ),
            *(endpoint_section(f"Device {device.device}", device.endpoints) for device in self.devices),
            Section(
                "Device time by requests", self.device_shares,
                "name=By request|requests=Requests|own_ns=Own|shared_ns=Of batches|mean_ns=Mean|ratio=Of all",
                DEVICE_SHARES,
            ),
            make_shares_table(self.shares, self._options),
            Section(
                "Slowest requests", self.slowest,
                "name=Request|wall_ns=Wall|error=Error|outcome=Outcome|begin_ns=Begin|began=Began|span_id=Span|"
                "trace_id=Trace", texts={"span_id": lambda row, unit: str(row.span_id)},
                paragraph=_describe_slow_request,
            ),
        ]  # fmt: skip

    def _answers_section(self) -> Section:
        shown = [name for name in CLASSES if any(name in row.statuses for row in self.endpoints)]
        rates = [compute_share(row.requests * 1e9, self._served_ns) for row in self.endpoints]
        return Section(
            "Answers",
            [
                (row_name(row), rate, *(row.statuses.get(name, 0 if row.statuses else None) for name in shown))
                for row, rate in zip(self.endpoints, rates, strict=True)
            ]
            if shown
            else (),
            "|".join(f"{place}={heading}" for place, heading in enumerate(["Request", "A second", *shown])),
            ("A second: requests per second, from the first begin to the last end. 4xx is no error.",),
        )

    def _token_sections(self) -> list[Section]:
        notes = (
            "A token: the time after the first output token / the output tokens after it. The first one is the first",
            "item of a stream, else the end of the prefill. Prefill: from the first batch to the first token.",
        )
        whole = "name=Request|range={}|requests=Requests|p50_ns=p50|p99_ns=p99|"
        prompt = "input_tokens=Tokens in|cached_ratio=Cached|prefill_p50_ns=Prefill p50|prefill_p99_ns=Prefill p99"
        columns = {
            OUTPUT_TOKENS: ("By output tokens", "Tokens", "output_tokens=Tokens out|"
                            "token_p50_ns=A token p50|token_p99_ns=A token p99"),
            INPUT_TOKENS: ("By input tokens", "Tokens", prompt),
            CACHED_TOKENS: ("By cached prompt", "Cached part", prompt),
        }  # fmt: skip
        return [
            Section(
                title,
                [row for row in self.tokens if row.by == by],
                whole.format(heading) + of_tokens,
                notes * (by == OUTPUT_TOKENS),
            )
            for by, (title, heading, of_tokens) in columns.items()
        ]

    def describe_late_failures(self) -> str:
        count = self.late_failures
        return f", {count} failed after {'its' if count == 1 else 'their'} answer" if count else ""

    @property
    def is_part(self) -> bool:
        """True if more requests have ended than the tables contain."""
        return self.counted > self.requests

    TITLE = "Requests"

    def header_lines(self) -> list[str]:
        cut = f"; {self.requests_cut} at an edge of the window, not counted below" if self.requests_cut else ""
        part = f", of which {self.requests} are kept and shown below" if self.is_part else ""
        counted = f"Requests: {self.counted}{part}{self.describe_late_failures()}{cut}"
        return [*self.coverage.lines(), f"Time unit: {self._options.unit}", counted]

    def reasons_if_empty(self) -> list[str]:
        if self.requests:
            return []
        if self.requests_cut:
            return wrap_text(f"No request ended within the window. {A_REQUEST}")
        return self.coverage.explain_no_spans("request", f"No request was recorded. {A_REQUEST}")


def requests(recording: Recording, options: Options) -> RequestTimes:
    """Return the `requests` view. By default, endpoints are sorted by the sum of their wall times. The options `rows`
    and `least_ns` limit the endpoints and their phases. `rows` also limits the slowest requests, which are five by
    default."""
    trace, (whole, cut) = recording.columns, recording.complete_requests
    table = recording.compute_once(request_table)
    coverage = Coverage.measure_coverage(recording)
    # The tally counts all requests, also those without kept spans.
    of_all, failed = (Counter[str](), Counter[str]()) if coverage.complete else _count_requests(recording)
    endpoints = table.times_of_endpoints(options, of_all)
    of_all |= Counter({endpoint.name: endpoint.counted for endpoint in endpoints})
    failed |= Counter({endpoint.name: endpoint.errors for endpoint in endpoints})
    key = SortKey.parse_sort_key(options)
    column, sign = COLUMNS.get(key.column, "wall_ns"), 1 if key.ascending else -1
    endpoints.sort(key=lambda endpoint: (sign * getattr(endpoint, column), endpoint.name))
    shown_rows = limit_rows(
        endpoints, options, lambda row: row.wall_ns, lambda rows: table.sum_endpoints(rows, options)
    )
    tokens: tuple[TokenTimes, ...] = ()
    if any(len(trace.attributes.rows_with_attribute(name)) for name in (INPUT_TOKENS, OUTPUT_TOKENS)):
        names = [row.name for row in shown_rows if not row.remaining]
        tokens = times_by_tokens(trace.attributes, table, find_stages(trace, recording.joined), names)
    devices = recording.compute_once(measure_utilisation).devices if len(trace.device) else ()
    return RequestTimes(
        coverage=coverage,
        requests=len(whole),
        requests_cut=cut,
        counted=of_all.total(),
        errors=failed.total(),
        late_failures=int(trace.are_of_sites([is_late_failure(site) for site in trace.sites]).sum()),
        wall_ns=sum(table.wall_ns.tolist()),
        endpoints=shown_rows,
        groups=table.times_by_attribute(trace, options),
        devices=tuple(
            DeviceWithin(use.device, limit_endpoints(use.endpoints, options)) for use in devices if use.endpoints
        ),
        slowest=_slowest_requests(table, recording, options),
        blocked=measure_blocked_loops(trace, options),
        device_shares=_device_shares(recording, whole, options),
        shares=group_shares(recording, options),
        tokens=tokens,
        _served_ns=int(trace.end_ns[whole].max() - trace.start_ns[whole].min()) if len(whole) else 0,
        _options=options,
    )


def _count_requests(recording: Recording) -> tuple[Counter[str], Counter[str]]:
    """Count topmost requests and errors by name, from the tally. Names that occur only in parts of other requests are
    omitted."""
    trace, rows = recording.columns, np.arange(len(recording.columns))
    names, of_site = trace.describe_sites(attrgetter("name"))
    topmost, unjoined = (
        set(find_distinct(of_site[trace.site[owner == rows]]).tolist())
        for owner in (recording.topmost_requests, recording.joined.owner)
    )
    parts = {names[number] for number in topmost - unjoined}
    totals = sum_topmost_by_name(recording.totals(merged=True), is_request)
    calls, errors = (
        Counter({name: getattr(of_name, field) for name, of_name in totals.items() if name not in parts})
        for field in ("calls", "errors")
    )
    return calls, errors


def request_table(recording: Recording) -> CompleteRequests:
    whole, _ = recording.complete_requests
    joined, ledger = recording.joined, recording.ledger
    return CompleteRequests.collect_requests(recording.columns, joined, ledger, whole)


def _device_shares(recording: Recording, whole: Int64s, options: Options) -> tuple[EndpointShare, ...]:
    trace, joined = recording.columns, recording.joined
    if not (len(trace.device) and len(joined.served.batch)):
        return ()
    times = recording.device_ledger
    if not times.given_ns.any():
        return ()
    names, of_site = trace.describe_sites(attrgetter("name"))
    groups, places = Groups(of_site[trace.site[whole]], len(names)), joined.of[whole]
    times_of_places = times.own_ns[places], times.shared_ns[places]
    columns = groups.count_members(), *map(groups.sum_by_group, times_of_places)
    numbers = zip(names, *(column.tolist() for column in columns), strict=True)
    rows = [EndpointShare(name, size, own_ns, shared_ns, None) for name, size, own_ns, shared_ns in numbers if size]
    rows.sort(key=lambda row: (-row.device_ns, row.name))
    whole_ns = sum(row.device_ns for row in rows)
    shown = limit_rows(rows, options, attrgetter("device_ns"), make_row_summer("requests", "own_ns", "shared_ns"))
    return tuple(replace(row, ratio=compute_share(row.device_ns, whole_ns)) for row in shown)


def _slowest_requests(table: CompleteRequests, recording: Recording, options: Options) -> tuple[SlowRequest, ...]:
    trace, joined, parts = (recording.columns, recording.joined, recording.ledger)
    typical, slowest = dict[int, Mapping[str, int]](), []
    longest = np.lexsort((trace.start_ns[table.rows], -table.wall_ns))[: options.rows or SLOWEST]
    for index in longest.tolist():
        endpoint, place = int(table.endpoint[index]), int(table.place[index])
        if endpoint not in typical:
            alike = table.place[table.endpoint == endpoint]
            typical[endpoint] = typical_times(parts, alike) if len(alike) >= ENOUGH else {}
        cause = find_blame(trace, joined, parts, place, typical[endpoint]) if typical[endpoint] else None
        if cause is not None and cause.excess_ns * NOTABLE < int(table.wall_ns[index]):
            cause = None
        slowest.append(_make_slow_request(recording, place, cause, options))
    return tuple(slowest)


def format_utc_date(origin: Origin, at_ns: int, precision: str) -> str:
    realtime_ns = origin.realtime_of(at_ns) if origin.realtime_ns else 0
    if not 0 < realtime_ns < YEARS_NS:
        return ""
    date = EPOCH + timedelta(microseconds=realtime_ns // 1_000)
    return date.isoformat(timespec=precision).replace("+00:00", "Z")


def _make_slow_request(recording: Recording, place: int, cause: Blame | None, options: Options) -> SlowRequest:
    trace, facts, joined = recording.columns, recording.trace, recording.joined
    row, keys = int(joined.rows[place]), joined.keys.get(place, ())
    start_ns, wall_ns = int(trace.start_ns[row]), int(trace.total_ns[row])
    trace_id, span_id = "", ""
    if recording.collector_ids is not None:  # of a session, which has the spans
        trace_number, span_number = recording.collector_ids(facts.spans[row], keys[0] if keys else "")
        trace_id, span_id = f"{trace_number:032x}", f"{span_number:016x}"
    elif row in trace.remote:
        trace_id = f"{trace.remote[row].trace_id:032x}"
    parts = recording.ledger.times_of_request(place)
    unknown_ns = parts.pop(UNKNOWN, 0)
    error, outcome = describe_failure(trace, row)
    return SlowRequest(
        name=trace.sites[trace.site[row]].name,
        begin_ns=start_ns - facts.start_ns,
        began=format_utc_date(facts.origin, start_ns, "microseconds"),
        wall_ns=wall_ns,
        error=error,
        outcome=outcome,
        span_id=int(trace.span_id[row]),
        trace_id=trace_id,
        collector_span_id=span_id,
        keys=keys,
        phases=phase_times({part: [part_ns] for part, part_ns in parts.items()}, wall_ns, options),
        unknown_ns=unknown_ns,
        unknown_ratio=compute_share(unknown_ns, wall_ns),
        blame=cause,
    )


PARTS_NOTE = (
    "A moment of a request belongs to the part that began last among the open ones, on any thread or",
    "task. So the parts add up to the time of the requests, which is 100 % of Of wall. Mean, p50 and p99",
    "of a part are over the requests that had it: the column Requests counts them.",
)


def list_parts_with_unknown(row: EndpointTimes) -> list[PhaseTime]:
    unknown = PhaseTime(
        UNKNOWN, row.requests, row.unknown_ns, row.unknown_mean_ns, row.unknown_p50_ns,
        row.unknown_p99_ns, row.unknown_ratio,
    )  # fmt: skip
    return [*row.phases, unknown]


class RequestPart(NamedTuple):
    """A row of the table of an endpoint's time. `depth` is 0 for the whole time, and 1 for a part of it."""

    endpoint: str
    name: str
    depth: int
    time: PhaseTime


def _part_rows(row: EndpointTimes) -> list[RequestPart]:
    whole = PhaseTime(
        "", row.requests, row.wall_ns, row.mean_ns, row.p50_ns, row.p99_ns, compute_share(row.wall_ns, row.wall_ns)
    )
    name, *parts = row_name(row), *list_parts_with_unknown(row)
    names = [*map(row_name, parts[:-1]), "unknown (no phase ran)"]
    return [
        RequestPart(name, name, 0, whole),
        *(RequestPart(name, part, 1, time) for part, time in zip(names, parts, strict=True)),
    ]


def _describe_slow_request(place: int, request: SlowRequest, unit: str) -> list[str]:
    error = f", {printable(request.error or request.outcome)}" if request.error or request.outcome else ""
    name = shorten(printable(request.name) or "(no name)", LINE // 2)
    key = f", key {shorten(printable(request.keys[0]), LINE // 2)}" if request.keys else ""
    lines = wrap_text(f"{place}. {name}: {format_time(request.wall_ns, unit)} {unit}{error}{key}")
    at = f"{number_text(request.begin_ns / 1e9)} s after the start of the trace, span {request.span_id}"
    lines += wrap_text(f"   began {f'{request.began}, ' if request.began else ''}{at}")
    if request.trace_id:
        collector_span = f", span {request.collector_span_id}" if request.collector_span_id else ""
        lines += wrap_text(f"   in the collector, if it was kept: trace {request.trace_id}{collector_span}")
    largest = sorted(request.phases, key=lambda phase: -phase.summed_ns)
    parts = [f"{shorten(row_name(phase), LINE // 2)} {format_percent(phase.ratio, 1)}" for phase in largest]
    lines += wrap_text("   " + ", ".join([*parts, f"unknown {format_percent(request.unknown_ratio, 1)}"]))
    return lines if request.blame is None else [*lines, *wrap_text(f"   {blame_text(request.blame, unit)}")]


def blame_text(slow_by: Blame, unit: str) -> str:
    cause = ""
    if slow_by.cause is not None:
        of_request = f" of {shorten(printable(slow_by.cause.request), LINE // 3)}" if slow_by.cause.request else ""
        name = shorten(printable(slow_by.cause.name), LINE // 3)
        cause = f"; {format_time(slow_by.cause.ran_ns, unit)} {unit} of it were {name}{of_request}"
    part = shorten(printable(slow_by.part), LINE // 3)
    typical = f"{format_time(slow_by.part_ns, unit)} {unit}, typical {format_time(slow_by.typical_ns, unit)}"
    return f"slower by {part}: {typical}{cause}"
