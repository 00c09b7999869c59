"""The present of a run: requests in flight, rates by endpoint, where the time goes, what was lost.

Numbers are of the time since the look before, or since each session's begin at the first; they are taken from the
recordings of the processes, which go on and know nothing of it.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from instrument.agent.client import Member
from instrument.agent.crash_capture import bearing
from instrument.agent.processes import GOODBYE
from instrument.errors import TraceError
from instrument.recording.mapped import Mapped
from instrument.recording.mapped_facts import OpenSpan
from instrument.recording.spans import is_interruption
from instrument.recording.tally import Key, Row, Totals
from instrument.report.section import Section, Text
from instrument.report.table import number, rough_percent, safe, share

EVEN = 0.9
"""Times of processes that differ by less are told as one."""

ROWS = 12
"""Rows of each table, at most; the others are counted."""


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
        """Return it as JSON takes it."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return it as text, each table bounded to `ROWS`."""
        living = [one for one in self.processes if one.state in ("running", "off")]
        off = sum(one.state == "off" for one in living)
        lines = [
            f"Run {safe(self.run)}: {_count(len(living), 'process', 'es')}, {f'{off} switched off, ' if off else ''}"
            f"{_count(len(self.in_flight), 'request')} in flight; "
            f"rates and shares of {'up to ' * self.is_uneven}{number(self.window_ns / 1e9)} s",
        ]
        if self.ended:
            lines.append(f"{_count(self.ended, 'process', 'es')} of it ended, whose numbers the report at its end has")
        cancelled = "cancelled=Cancelled|" if any(one.cancelled for one in self.endpoints) else ""
        device = "|device_ns=Device, ms" if any(one.device_ns for one in self.places) else ""
        texts = {"name": lambda one, unit: f"{one.name}{one.bears}"[:60], "now": lambda one, unit: safe(one.now)[:30]}
        columns = "name=Request in flight|age_ns=Age, s|now=Now in|now_ns=For, s|pid=Process"
        lines += ["", *_table("s", Section("", self.in_flight, columns, texts=texts))]
        columns = f"name=Endpoint|requests=Ended|errors=Errors|{cancelled}rate=A second|p50_ns=p50, ms|p99_ns=p99, ms"
        lines += _table("ms", Section("", self.endpoints, columns))
        columns = f"name=Where the time goes|calls=Calls|self_ns=Self, ms|ratio=Of all{device}"
        lines += _table("ms", Section("", self.places, columns))
        lines += [f"Not kept: {count} ({safe(reason)})" for reason, count in [*self.losses.items()][:3]]
        return [*lines, *map(safe, self.problems)]

    def process_lines(self) -> list[str]:
        """Return the table of all processes."""
        columns = (
            "service=Service|pid=Process|state=State|up_ns=For, s|generation=Profile|calls=Calls|cost_ratio=Cost|"
            "lost=Lost"
        )
        texts: dict[str, Text] = {
            "generation": lambda one, unit: f"{one.generation} ({one.digest})",
            "state": lambda one, unit: "ended" if one.state == GOODBYE else one.state,
            "cost_ratio": lambda one, unit: rough_percent(one.cost_ratio),
        }
        return Section("", self.processes, columns, texts=texts).table("s") if self.processes else []


def _table(unit: str, section: Section) -> list[str]:
    more = len(section.rows) - ROWS
    lines = replace(section, rows=section.rows[:ROWS]).table(unit)
    return [*lines, *([f"({more} more)"] if more > 0 else []), ""] if section.rows else []


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural * (number != 1)}"


class CallGroup(NamedTuple):
    """The calls that count together: those of a site, and as `request` those that lie in no other request."""

    key: tuple[object, ...]
    name: str
    request: bool
    interruption: bool

    @classmethod
    def of(cls, row: Row) -> CallGroup:
        """Return it for a line of a tally."""
        *above, site = row.path
        is_request = site.kind == "request" and not any(around.kind == "request" for around in above)
        return cls(site.key, site.name, is_request, is_interruption(site))


Counted = Mapping[CallGroup, Totals]


class Looker:
    """Looks at the processes of a run, again and again."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._before: dict[tuple[int, int], tuple[int, Counted]] = {}

    def is_of(self, run: str) -> bool:
        """Return True if it looks at that run."""
        return self._run == run

    def look(self, members: Sequence[Member], folded: int = 0) -> Screen:
        """Return one look. `folded` are processes that ended before those of `members` that did."""
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
            grown.append({place: now.since(before.get(place)) for place, now in seen.counted.items()})
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
    """The contents of one recording at `at_ns`: all that was open then has begun. Raises `TraceError`."""

    def __init__(self, memory: int) -> None:
        mapped = Mapped(memory)
        try:
            header = mapped.header
            self.state, self.generation, self.begun_ns = header.state, header.generation, header.begun_ns
            self.origin = header.origin
            self.losses, self.open_spans = mapped.losses(), mapped.open_spans()
            self.at_ns = time.monotonic_ns()
            self.counted: Counted = mapped.tally().by(CallGroup.of)
            self.calls = sum(totals.calls for totals in self.counted.values())
            self.requests = sum(totals.calls for its, totals in self.counted.items() if its.key[1] == "request")
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
    """Return the requests that ended, by name; rates are those of each process in its own time."""
    rates = defaultdict[str, float](float)
    for counted, window_ns in zip(grown, windows_ns, strict=True):
        for its, totals in counted.items():
            if its.request:
                rates[its.name] += share(totals.calls, window_ns / 1e9) or 0.0
    found = [
        Endpoint(
            name, totals.calls, totals.errors, totals.cancelled, rates[name], totals.percentile(0.5),
            totals.percentile(0.99),
        )
        for name, totals in _together(grown, lambda its: its.name if its.request else None).items()
    ]  # fmt: skip
    return tuple(sorted(found, key=lambda one: (-one.requests, one.name)))


def _places(grown: Sequence[Counted]) -> tuple[Place, ...]:
    """Return the sites that were called, heaviest first, without interruptions, which are parts of other calls."""
    sums = _together(grown, lambda its: None if its.interruption else (its.name, its.key))
    whole_ns = sum(totals.self_ns for totals in sums.values())
    found = [
        Place(name, totals.calls, totals.self_ns, totals.device_ns, share(totals.self_ns, whole_ns))
        for (name, _), totals in sums.items()
        if totals.calls
    ]
    return tuple(sorted(found, key=lambda one: -one.self_ns))


def _together(grown: Sequence[Counted], key_of: Callable[[CallGroup], Key | None]) -> dict[Key, Totals]:
    """Add up the calls of all processes by a key, without those that have none."""
    found: dict[Key, Totals] = {}
    for counted in grown:
        for its, totals in counted.items():
            key = key_of(its)
            if key is not None:
                found.setdefault(key, Totals()).merge(totals)
    return found
