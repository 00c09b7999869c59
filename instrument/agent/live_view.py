"""The screens of `instrument live`: open requests, rates by endpoint, times by span name, and losses.

The first screen covers the whole session of each process. Each further screen covers the time since the screen before.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from instrument.agent.causes_of_end import attributes_text
from instrument.agent.client import Member
from instrument.agent.processes import GOODBYE
from instrument.errors import TraceError
from instrument.recording.distributions import percentiles
from instrument.recording.mapped import Mapped
from instrument.recording.mapped_facts import OpenSpan
from instrument.recording.spans import is_interruption, is_request
from instrument.recording.tally import Tally
from instrument.report.event_rows import mask_topmost_nodes, sum_topmost_by_name
from instrument.report.headlines import describe_requests_in_flight
from instrument.report.section import Section, Text
from instrument.report.table import compute_share, format_rough_percent, number_text, printable

EVEN_RATIO = 0.9
"""The minimum ratio of the processes' shortest to longest measured time. If the ratio is smaller, the screen says "up
to N s"."""

MOST_TABLE_ROWS = 12
"""The maximum number of rows per table of the screen. Further rows are only counted."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """An open request of the live view.

    - `bears`: the first attributes of the request as text
    - `now`: the name of the innermost open span, or empty
    - `now_ns`: the age of the innermost open span
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
    """A table row of the live view for all ended requests with the same name."""

    name: str
    requests: int
    errors: int
    cancelled: int
    rate: float | None
    p50_ns: int | None
    p99_ns: int | None


@dataclass(frozen=True, slots=True)
class Place:
    """A table row of the live view for one site. `ratio` is the site's share of the self time of all sites."""

    name: str
    calls: int
    self_ns: int
    device_ns: int
    ratio: float | None


@dataclass(frozen=True, slots=True)
class ProcessNow:
    """A process in the live view.

    - `up_ns`: the age of the process, or None if the agent has missed the begin or end of the process
    - `calls`: the number of recorded calls
    - `cost_ratio`: the estimated share of time that recording has cost

    `calls`, `cost_ratio` and `lost` are None for an ended process or an unreadable recording.
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
    """A screen of the live view of a run.

    Rates and shares cover the last `window_ns` nanoseconds, or the whole life of a younger process. Only `ended` counts
    ended processes. `is_uneven` is True if some processes are much younger than others.
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

    def make_document(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        living = [row for row in self.processes if row.state in ("running", "off")]
        off = sum(row.state == "off" for row in living)
        lines = [
            f"Run {printable(self.run)}: {format_count(len(living), 'process', 'es')}, "
            f"{f'{off} switched off, ' if off else ''}"
            f"{format_count(len(self.in_flight), 'request')} in flight; "
            f"rates and shares of {'up to ' * self.is_uneven}{number_text(self.window_ns / 1e9)} s",
        ]
        if self.ended:
            lines.append(
                f"{format_count(self.ended, 'process', 'es')} of it ended: see the report at the end of the run"
            )
        if sentence := describe_requests_in_flight([(request.now, request.now_ns) for request in self.in_flight]):
            lines.append(sentence)
        cancelled = "cancelled=Cancelled|" if any(row.cancelled for row in self.endpoints) else ""
        device = "|device_ns=Device, ms" if any(row.device_ns for row in self.places) else ""
        texts = {
            "name": lambda row, unit: f"{row.name}{row.bears}"[:60],
            "now": lambda row, unit: printable(row.now)[:30],
        }
        columns = "name=Request in flight|age_ns=Age, s|now=Now in|now_ns=For, s|pid=Process"
        lines += ["", *_table_lines("s", Section("", self.in_flight, columns, texts=texts))]
        columns = f"name=Endpoint|requests=Ended|errors=Errors|{cancelled}rate=A second|p50_ns=p50, ms|p99_ns=p99, ms"
        lines += _table_lines("ms", Section("", self.endpoints, columns))
        columns = f"name=Where the time goes|calls=Calls|self_ns=Self, ms|ratio=Of all{device}"
        lines += _table_lines("ms", Section("", self.places, columns))
        lines += [f"Not kept: {count} ({printable(reason)})" for reason, count in [*self.losses.items()][:3]]
        return [*lines, *map(printable, self.problems)]

    def process_lines(self) -> list[str]:
        columns = (
            "service=Service|pid=Process|state=State|up_ns=For, s|generation=Profile|calls=Calls|cost_ratio=Cost|"
            "lost=Lost"
        )
        texts: dict[str, Text] = {
            "generation": lambda row, unit: f"{row.generation} ({row.digest})",
            "state": lambda row, unit: "ended" if row.state == GOODBYE else row.state,
            "cost_ratio": lambda row, unit: format_rough_percent(row.cost_ratio),
        }
        return Section("", self.processes, columns, texts=texts).table("s") if self.processes else []


def _table_lines(unit: str, section: Section) -> list[str]:
    more = len(section.rows) - MOST_TABLE_ROWS
    lines = replace(section, rows=section.rows[:MOST_TABLE_ROWS]).table(unit)
    return [*lines, *([f"({more} more)"] if more > 0 else []), ""] if section.rows else []


def format_count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"


class LiveSampler:
    """Makes the screens of a run. Each screen has the calls and times since the previous screen."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._before: dict[tuple[int, int], tuple[int, Tally]] = {}

    def shows_run(self, run: str) -> bool:
        return self._run == run

    def make_screen(self, members: Sequence[Member], folded: int = 0) -> Screen:
        """Return a screen of the present state. `folded` counts the ended processes that are not in `members`."""
        windows_ns, grown = list[int](), list[Tally]()
        processes, in_flight, problems = list[ProcessNow](), list[InFlight](), list[str]()
        losses: Counter[str] = Counter()
        for member in members:
            try:
                contents = None if member.memory < 0 or not member.lives else _Contents(member.memory)
            except TraceError as problem:
                problems.append(f"process {member.pid}: {problem}")
                processes.append(
                    replace(_process_row(member, None), state="unread", calls=None, cost_ratio=None, lost=None)
                )
                continue
            processes.append(_process_row(member, contents))
            if contents is None:
                continue
            key = member.pid, contents.generation
            since_ns, before = self._before.get(key, (contents.begun_ns, Tally()))
            self._before[key] = contents.at_ns, contents.tally
            windows_ns.append(contents.at_ns - since_ns)
            grown.append(contents.tally.subtract_earlier(before))
            losses.update(contents.losses)
            in_flight += _request_rows(member.pid, contents.open_spans, contents.at_ns)
        window_ns, together = max(windows_ns, default=0), Tally.sum_tallies(grown)
        return Screen(
            run=self._run,
            window_ns=window_ns,
            processes=tuple(processes),
            in_flight=tuple(sorted(in_flight, key=lambda request: -request.age_ns)),
            endpoints=_endpoint_rows(together, grown, windows_ns),
            places=_site_rows(together),
            losses=dict(losses),
            problems=tuple(problems),
            ended=folded + sum(not member.lives for member in members),
            is_uneven=min(windows_ns, default=0) < EVEN_RATIO * window_ns,
        )


class _Contents:
    """The contents of a recording, read at the time `at_ns`. Raises `TraceError` for an invalid recording."""

    def __init__(self, memory: int) -> None:
        with closing(Mapped(memory)) as mapped:
            header = mapped.header
            self.state, self.generation, self.begun_ns = header.state, header.generation, header.begun_ns
            self.origin = header.origin
            self.losses, self.open_spans = mapped.losses(), mapped.open_spans()
            self.at_ns = time.monotonic_ns()
            self.tally = mapped.tally().merge_threads()
            self.calls = self.tally.calls
            kinds = np.array([site.kind == "request" for site in self.tally.tree.sites] or [False])
            self.requests = int(self.tally.lines["calls"][kinds[self.tally.site_of[self.tally.lines["node"]]]].sum())


def _process_row(member: Member, contents: _Contents | None) -> ProcessNow:
    facts, now_ns = member.facts, time.monotonic_ns() if contents is None else contents.at_ns
    origin = (
        facts if contents is None else {**facts, **contents.origin}
    )  # what it says now, and what it said as it joined
    state = facts["how"] or ("idle" if contents is None else contents.state)
    up_ns = None
    if not facts.get("is_missed"):
        up_ns = (facts["ended_ns"] or now_ns) - (facts["joined_ns"] if contents is None else contents.begun_ns)
    calls, lost, spent_ns = None, None, 0.0
    if not facts["how"]:
        calls, lost = (0, 0) if contents is None else (contents.calls, sum(contents.losses.values()))
    if contents is not None:
        call_ns, request_ns = (float(facts.get(name) or 0.0) for name in ("call_ns", "request_ns"))
        spent_ns = (contents.calls - contents.requests) * call_ns + contents.requests * max(call_ns, request_ns)
    return ProcessNow(
        pid=member.pid,
        service=str(facts["service"]),
        state=state,
        generation=origin["generation"] if isinstance(origin["generation"], int) else 0,
        digest=str(origin["digest"])[:64],
        up_ns=up_ns,
        calls=calls,
        cost_ratio=None if calls is None or up_ns is None else compute_share(spent_ns, up_ns),
        lost=lost,
    )


def _request_rows(pid: int, open_spans: Sequence[OpenSpan], now_ns: int) -> list[InFlight]:
    by_root: dict[int, list[OpenSpan]] = {}
    for span in open_spans:
        by_root.setdefault(span.root_id, []).append(span)
    requests = []
    for spans in by_root.values():
        request = next((span for span in spans if span.site.kind == "request"), None)
        if request is not None:
            last = max(spans, key=lambda span: span.start_ns)
            ages = [max(now_ns - span.start_ns, 0) for span in (request, last)]
            now = "" if last is request else last.site.name
            name, bears = request.site.name, attributes_text(request)
            requests.append(InFlight(pid, name, bears, request.span_id, ages[0], now, ages[1]))
    return requests


def _endpoint_rows(tally: Tally, grown: Sequence[Tally], windows_ns: Sequence[int]) -> tuple[Endpoint, ...]:
    """Sum the ended requests by name. Rates cover the time since the previous screen."""
    rates = defaultdict[str, float](float)
    for part, window_ns in zip(grown, windows_ns, strict=True):
        for name, totals in sum_topmost_by_name(part, is_request).items():
            rates[name] += compute_share(totals.calls, window_ns / 1e9) or 0.0
    nodes, is_topmost = defaultdict[str, list[int]](list), mask_topmost_nodes(tally, is_request)
    for node in np.flatnonzero(is_topmost).tolist():
        nodes[tally.paths[node][-1].name].append(node)
    endpoints = []
    for name, ended in sum_topmost_by_name(tally, is_request).items():
        p50_ns, p99_ns = percentiles(tally.histogram(nodes[name]), (0.5, 0.99), ended.calls, ended.min_ns, ended.max_ns)
        endpoints.append(Endpoint(name, ended.calls, ended.errors, ended.cancelled, rates[name], p50_ns, p99_ns))
    return tuple(sorted(endpoints, key=lambda part: (-part.requests, part.name)))


def _site_rows(tally: Tally) -> tuple[Place, ...]:
    """Sum the calls by site, the largest self time first. Garbage collections and blocked event loops are left out."""
    keys = [None if is_interruption(site) else (site.name, site.key) for site in tally.tree.sites]
    sums = [(name, tally.total_of_lines(places)) for (name, _), places in tally.lines_by_key(keys).items()]
    whole_ns = sum(totals.self_ns for _, totals in sums)
    sites_found = [
        Place(name, totals.calls, totals.self_ns, totals.device_ns, compute_share(totals.self_ns, whole_ns))
        for name, totals in sums
        if totals.calls
    ]
    return tuple(sorted(sites_found, key=lambda place: -place.self_ns))
