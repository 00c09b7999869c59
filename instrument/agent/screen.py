"""What a run is doing now: requests in flight, rates by endpoint, where the time goes, what was lost.

Numbers are of the time since the look before, or since each session's begin at the first; they are taken from the
recordings of the processes, which go on and know nothing of it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from instrument.agent.client import Member
from instrument.agent.crash_capture import bearing
from instrument.errors import TraceError
from instrument.recording.histogram import percentiles
from instrument.recording.mapped import Mapped
from instrument.recording.mapped_facts import OpenSpan
from instrument.recording.spans import Site, is_interruption
from instrument.recording.tally import Totals
from instrument.report.table import named_table, number, safe, share, tenths

EVEN = 0.9
"""Times of processes that differ by less are told as one."""

ROWS = 12
"""Of each table, at most; what is left out is counted."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A request that has begun and not ended: its age, and the innermost span that is open in it, with its age.

    `bears` are the first of its attributes.
    """

    pid: int
    name: str
    bears: str
    span_id: int
    age_ns: int
    now: str
    now_ns: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Requests of one name that ended in the time; `cancelled` are those that were broken off and have not failed."""

    name: str
    requests: int
    errors: int
    cancelled: int
    rate: float | None
    p50_ns: int | None
    p99_ns: int | None


@dataclass(frozen=True, slots=True)
class Place:
    """A site, and what its calls spent themselves in the time, and devices for them."""

    name: str
    calls: int
    self_ns: int
    device_ns: int
    ratio: float | None


@dataclass(frozen=True, slots=True)
class ProcessNow:
    """A process: its profile's generation, its calls since its begin, about what share of time they cost, losses.

    Calls, cost and losses of one that has ended are in its report, and nobody knows them of one whose recording cannot
    be read: None here. So is the time that one was up whose begin and end its agent has not seen.
    """

    pid: int
    service: str
    state: str
    generation: int
    digest: str
    up_ns: int | None
    calls: int | None
    cost_ratio: float | None
    lost: int | None


@dataclass(frozen=True, slots=True)
class Screen:
    """One look. `window_ns` is the time that rates and shares are of, at most: of a process that is younger, its own.

    They are of processes that live; so many have `ended` as far as is known, and are in no number of this look. Where
    some processes are much younger than others, it `is_uneven`.
    """

    run: str
    window_ns: int
    processes: tuple[ProcessNow, ...]
    in_flight: tuple[InFlight, ...]
    endpoints: tuple[Endpoint, ...]
    places: tuple[Place, ...]
    losses: Mapping[str, int]
    problems: tuple[str, ...]
    ended: int = 0
    is_uneven: bool = False

    def document(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    def lines(self) -> list[str]:
        """As text, each table bounded to `ROWS`."""
        living = [one for one in self.processes if one.state in ("running", "off")]
        off = sum(one.state == "off" for one in living)
        lines = [
            f"Run {safe(self.run)}: {_count(len(living), 'process', 'es')}, {f'{off} switched off, ' if off else ''}"
            f"{_count(len(self.in_flight), 'request')} in flight; "
            f"rates and shares of {'up to ' * self.is_uneven}{number(self.window_ns / 1e9)} s",
        ]
        if self.ended:
            lines.append(f"{_count(self.ended, 'process', 'es')} of it ended, whose numbers the report at its end has")
        lines.append("")
        lines += _table(
            ["Request in flight", "Age, s", "Now in", "For, s", "Process"],
            [
                [
                    f"{one.name}{safe(one.bears)}"[:60],
                    _seconds(one.age_ns),
                    safe(one.now)[:30],
                    _seconds(one.now_ns),
                    str(one.pid),
                ]
                for one in self.in_flight
            ],
        )
        cancels = any(one.cancelled for one in self.endpoints)
        lines += _table(
            ["Endpoint", "Ended", "Errors", *(["Cancelled"] if cancels else []), "A second", "p50, ms", "p99, ms"],
            [
                [
                    one.name, str(one.requests), str(one.errors), *([str(one.cancelled)] if cancels else []),
                    number(one.rate), *_ms(one.p50_ns, one.p99_ns),
                ]
                for one in self.endpoints
            ],
        )  # fmt: skip
        on_devices = any(one.device_ns for one in self.places)
        lines += _table(
            ["Where the time goes", "Calls", "Self, ms", "Of all", *(["Device, ms"] if on_devices else [])],
            [
                [
                    one.name, str(one.calls), *_ms(one.self_ns), "" if one.ratio is None else tenths(one.ratio, 1),
                    *(_ms(one.device_ns) if on_devices else []),
                ]
                for one in self.places
            ],
        )  # fmt: skip
        lines += [f"Not kept: {count} ({safe(reason)})" for reason, count in [*self.losses.items()][:3]]
        lines += [safe(problem) for problem in self.problems]
        return lines


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    more = len(rows) - ROWS
    blanks = [""] * (len(header) - 1)
    shown = [*rows[:ROWS], *([[f"({more} more)", *blanks]] if more > 0 else [])]
    return [*named_table(header, shown, 0), ""] if rows else []


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural * (number != 1)}"


def _seconds(time_ns: int) -> str:
    return number(time_ns / 1e9)


def _ms(*times_ns: int | None) -> list[str]:
    return [number(None if time_ns is None else time_ns / 1e6) for time_ns in times_ns]


Counted = dict[tuple[tuple[object, ...], bool], tuple[Site, Totals]]
"""Totals by site, and by whether its spans are requests that lie in no other."""


class Looker:
    """Looks at the processes of a run, again and again."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._before: dict[tuple[int, int], tuple[int, Counted]] = {}

    def is_of(self, run: str) -> bool:
        """Whether it looks at that run."""
        return self._run == run

    def look(self, members: Sequence[Member], folded: int = 0) -> Screen:
        """What there is to see now. `folded` are processes that ended before those of `members` that did."""
        windows_ns, grown = list[int](), list[Counted]()
        processes, in_flight, problems = list[ProcessNow](), list[InFlight](), list[str]()
        losses: Counter[str] = Counter()
        for member in members:
            try:
                seen = None if member.memory < 0 or not member.lives else _Seen(member.memory)
            except TraceError as problem:
                problems.append(f"process {member.pid}: {problem}")
                processes.append(
                    replace(_process(member, None), state="unread", calls=None, cost_ratio=None, lost=None)
                )
                continue
            processes.append(_process(member, seen))
            if seen is None:
                continue
            key = member.pid, seen.generation
            since_ns, before = self._before.get(key, (seen.begun_ns, {}))
            self._before[key] = seen.at_ns, seen.counted
            windows_ns.append(seen.at_ns - since_ns)
            grown.append({place: (site, _grown(now, before.get(place))) for place, (site, now) in seen.counted.items()})
            losses.update(seen.losses)
            in_flight += _in_flight(member.pid, seen.open_spans, seen.at_ns)
        window_ns = max(windows_ns, default=0)
        return Screen(
            run=self._run,
            window_ns=window_ns,
            processes=tuple(processes),
            in_flight=tuple(sorted(in_flight, key=lambda one: -one.age_ns)),
            endpoints=_endpoints(grown, windows_ns),
            places=_places(grown),
            losses=dict(losses),
            problems=tuple(problems),
            ended=folded + sum(not member.lives for member in members),
            is_uneven=min(windows_ns, default=0) < EVEN * window_ns,
        )


class _Seen:
    """What one recording says now, at `at_ns`: all that was open then has begun. Raises `TraceError`."""

    def __init__(self, memory: int) -> None:
        mapped = Mapped(memory)
        try:
            header = mapped.header
            self.state, self.generation, self.begun_ns = header.state, header.generation, header.begun_ns
            self.origin = header.origin
            self.losses, self.open_spans = mapped.losses(), mapped.open_spans()
            self.at_ns = time.monotonic_ns()
            self.counted: Counted = {}
            self.calls = self.requests = 0
            for row in mapped.tally().rows():
                if not row.path:
                    continue
                site = row.path[-1]
                is_request = site.kind == "request" and not any(around.kind == "request" for around in row.path[:-1])
                _, totals = self.counted.setdefault((site.key, is_request), (site, Totals()))
                totals.merge(row.totals)
                self.calls += row.totals.calls
                self.requests += row.totals.calls * (site.kind == "request")
        finally:
            mapped.close()


def _process(member: Member, seen: _Seen | None) -> ProcessNow:
    facts, now_ns = member.facts, time.monotonic_ns() if seen is None else seen.at_ns
    origin = facts if seen is None else {**facts, **seen.origin}  # what it says now, and what it said as it joined
    state = facts["how"] or ("idle" if seen is None else seen.state)
    up_ns = None
    if not facts.get("is_missed"):
        up_ns = (facts["ended_ns"] or now_ns) - (facts["joined_ns"] if seen is None else seen.begun_ns)
    calls, lost, spent_ns = None, None, 0.0
    if not facts["how"]:
        calls, lost = (0, 0) if seen is None else (seen.calls, sum(seen.losses.values()))
    if seen is not None:
        call_ns, request_ns = (float(facts.get(name) or 0.0) for name in ("call_ns", "request_ns"))
        spent_ns = (seen.calls - seen.requests) * call_ns + seen.requests * max(call_ns, request_ns)
    return ProcessNow(
        pid=member.pid,
        service=str(facts["service"]),
        state=state,
        generation=origin["generation"] if isinstance(origin["generation"], int) else 0,
        digest=str(origin["digest"])[:64],
        up_ns=up_ns,
        calls=calls,
        cost_ratio=None if calls is None or up_ns is None else share(spent_ns, up_ns),
        lost=lost,
    )


def _grown(now: Totals, before: tuple[Site, Totals] | None) -> Totals:
    """What has come since: counts, self and device time, errors and the histogram. Extremes are those of all calls."""
    if before is None:
        return now
    was = before[1]
    grown = now.copy()
    grown.calls -= was.calls
    grown.errors -= was.errors
    grown.cancelled -= was.cancelled
    grown.self_ns -= was.self_ns
    grown.device_ns -= was.device_ns
    grown.histogram = dict(Counter(now.histogram) - Counter(was.histogram))
    return grown


def _in_flight(pid: int, open_spans: Sequence[OpenSpan], now_ns: int) -> list[InFlight]:
    by_root: dict[int, list[OpenSpan]] = {}
    for span in open_spans:
        by_root.setdefault(span.root_id, []).append(span)
    found = []
    for its in by_root.values():
        request = next((span for span in its if span.site.kind == "request"), None)
        if request is not None:
            last = max(its, key=lambda span: span.start_ns)
            ages = [max(now_ns - span.start_ns, 0) for span in (request, last)]
            now = "" if last is request else last.site.name
            name, bears = request.site.name, bearing(request)
            found.append(InFlight(pid, name, bears, request.span_id, ages[0], now, ages[1]))
    return found


def _endpoints(grown: Sequence[Counted], windows_ns: Sequence[int]) -> tuple[Endpoint, ...]:
    """The requests that ended, by name, those of all processes together: rates are those of each in its own time."""
    by_name: dict[str, Totals] = {}
    rates: dict[str, float] = {}
    for counted, window_ns in zip(grown, windows_ns, strict=True):
        for (_, is_request), (site, totals) in counted.items():
            if is_request:
                by_name.setdefault(site.name, Totals()).merge(totals)
                rates[site.name] = rates.get(site.name, 0.0) + (share(totals.calls, window_ns / 1e9) or 0.0)
    found = []
    for name, totals in by_name.items():
        p50_ns, p99_ns = percentiles(totals.histogram, (0.5, 0.99), totals.calls, totals.min_ns, totals.max_ns)
        found.append(Endpoint(name, totals.calls, totals.errors, totals.cancelled, rates[name], p50_ns, p99_ns))
    return tuple(sorted(found, key=lambda one: (-one.requests, one.name)))


def _places(grown: Sequence[Counted]) -> tuple[Place, ...]:
    """The sites that were called, heaviest first; but for those whose time is that of whatever ran meanwhile."""
    by_key: dict[tuple[object, ...], tuple[str, Totals]] = {}
    for counted in grown:
        for (key, _), (site, totals) in counted.items():
            if is_interruption(site):
                continue
            by_key.setdefault(key, (site.name, Totals()))[1].merge(totals)
    whole_ns = sum(totals.self_ns for _, totals in by_key.values())
    found = [
        Place(name, totals.calls, totals.self_ns, totals.device_ns, share(totals.self_ns, whole_ns))
        for name, totals in by_key.values()
        if totals.calls
    ]
    return tuple(sorted(found, key=lambda one: -one.self_ns))
