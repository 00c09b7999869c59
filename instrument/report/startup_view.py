"""The `startup` view: the time of a process until it has served its first request, divided into parts.

Imports, loading and compiling are parts. Loading and compiling are spans of the phases `load` and `compile`. Spans that
began after the first request are not part of the start-up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from instrument.profile.model import PREPARING
from instrument.recording.distributions import bucket_of, percentiles
from instrument.recording.spans import FIRSTS, FirstCall, Site, Startup
from instrument.recording.tally import Row, Tally
from instrument.report.section import Section, View
from instrument.report.table import (
    LINE,
    Ratio,
    compute_share,
    format_time,
    limit_rows,
    name_of_site,
    printable,
    shorten,
    sum_omitted_rows,
    wrap_text,
)
from instrument.report.view import Options, Recording
from instrument.trace.indices import NONE, find_ancestor

IMPORTS = "Imports, outside of spans"
WORDS = {"load": "Loading", "compile": "Compiling"}

UNKNOWN = (
    "How this process came to serve is not in this trace: only a session's own trace has it, and a window before "
    "which nothing had run."
)
NOT_WATCHED = [
    "Imports were not timed: `startup: auto` in the profile times them, and records what loads and",
    "compiles.",
]


@dataclass(frozen=True, slots=True)
class Preparation:
    """The calls of one site that load or compile (see `phase`). `total_ns` leaves out nested calls of the same site.
    `in_requests_ns` is the part of `total_ns` in which a request waited. Both are None in a sum of several sites."""

    phase: str
    name: str
    calls: int
    total_ns: int | None
    self_ns: int
    max_ns: int
    in_requests_ns: int | None
    remaining: int = 0


@dataclass(frozen=True, slots=True)
class Imports:
    """The imports of one package. `self_ns` is the time of the package's own modules. `ratio` is the share of `self_ns`
    in the time of all imports. `total_ns` is None in a sum of several packages."""

    package: str
    entries: int
    total_ns: int | None
    self_ns: int
    in_spans_ns: int
    late_ns: int
    ratio: float | None
    remaining: int = 0


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The first call of one site, and the later calls. `median_ns` is the median time of the later calls. `extra_ns` is
    the time of the first call minus that median, and at least 0."""

    name: str
    kind: str
    calls: int
    start_ns: int | None
    first_ns: int | None
    median_ns: int | None
    extra_ns: int
    remaining: int = 0

    times = Ratio("first_ns", of="median_ns")
    """The first call's time as a multiple of the later calls' median."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the time from the session's start to the first request. `ratio` is the share of the part in that time.
    A part after the first request has no ratio. `total_ns` and `ratio` are None if the part was not recorded."""

    name: str
    total_ns: int | None
    ratio: float | None


@dataclass(frozen=True, slots=True)
class FirstRequestTimes:
    """The first request, and the median time of later requests. `after_ns` is the time from the process's start to the
    request. If that start is unknown, the session's start is used. `first_ns` is None if only calls below the request
    are known. `why` is a key of `FIRSTS`."""

    name: str
    after_ns: int
    first_ns: int | None
    median_ns: int | None
    why: str = ""

    @property
    def ended_ns(self) -> int | None:
        """The time from the start of the process to the end of the first request, None if it is unknown."""
        return None if self.first_ns is None else self.after_ns + self.first_ns


@dataclass(frozen=True, slots=True)
class StartupView(View):
    """The `startup` view.

    `before_ns` is the time from the process's start to the session's start, None if unknown. `way_ns` is the time from
    the session's start to the first request, None without a request. `way` divides that time into parts. `late` has the
    same parts after the first request. `ran_ns` is the time until each called site had run once.
    """

    is_known: bool
    before_ns: int | None
    way_ns: int | None
    way: tuple[Phase, ...]
    late: tuple[Phase, ...]
    is_late_partial: bool
    request: FirstRequestTimes | None
    ran_ns: int | None
    ran_last: str
    imports: tuple[Imports, ...] | None
    imports_ns: int
    imports_in_spans_ns: int
    preparations: tuple[Preparation, ...]
    warm_ups: tuple[WarmUp, ...]
    _options: Options = field(repr=False)

    TITLE = "Startup"

    def header_lines(self) -> list[str]:
        return [f"Time unit: {self._options.unit}"]

    def reasons_if_empty(self) -> list[str]:
        return [] if self.is_known else wrap_text(UNKNOWN)

    def sections(self) -> list[Section]:
        if not self.is_known:
            return []
        of_it, unit = "", self._options.unit
        if self.imports_in_spans_ns:
            of_it = f", {format_time(self.imports_in_spans_ns, unit)} of it within spans"
        return [
            Section(
                "From the start to the first request", self._startup_rows(), "name=Part|total_ns=Time|ratio=Of start",
                self._startup_notes(),
            ),
            Section(
                "Later, outside of requests", self.late, "name=Part|total_ns=Time",
            ),
            Section(
                "Imports", self.imports or (),
                "package=Package|entries=Imported|total_ns=Total|self_ns=Self|ratio=Of imports|+late_ns=Late",
                (f"All imports: {format_time(self.imports_ns, unit)} {unit}{of_it}",), widths=12,
                empty=NOT_WATCHED if self.imports is None else ["Nothing was imported since the session began."],
            ),
            Section(
                "Load and compile", self.preparations,
                "name=Name|phase=Phase|calls=Calls|total_ns=Total|self_ns=Self|max_ns=Longest|"
                "in_requests_ns=In requests", empty=["Nothing was seen to load or compile a model."],
            ),
            Section(
                "First calls", self.warm_ups,
                "name=Name|kind=Kind|calls=Calls|first_ns=First|median_ns=Median after|times=Ratio|extra_ns=Extra",
                empty=["No first call took longer than those after it."],
            ),
        ]  # fmt: skip

    def _startup_rows(self) -> list[Phase]:
        rows = [
            Phase("Process began, until the session did", self.before_ns, None),
            Phase(
                "Session began, until the first request", self.way_ns, compute_share(self.way_ns or 0, self.way_ns or 0)
            ),
            *(replace(part, name=f"  {part.name}") for part in self.way),
        ]
        if self.request is not None:
            rows += [
                Phase(f"First request: {self.request.name}", self.request.first_ns, None),
                Phase("  Median of later ones", self.request.median_ns, None),
                Phase("All until the first request had ended", self.request.ended_ns, None),
            ]
        return rows

    def _startup_notes(self) -> list[str]:
        if self.request is None:
            return ["No request has ended."]
        unit, ran = self._options.unit, shorten(printable(self.ran_last), LINE // 4)
        why = wrap_text(f"First request: {FIRSTS[self.request.why]}") if self.request.why else []
        older = "Older calls than the rings still hold may have begun after it too, and are on the way here."
        return [
            *why,
            *([older] if self.is_late_partial else []),
            f"Each function that was called had run once after {format_time(self.ran_ns, unit)} {unit}; the last: "
            f"{ran}",
        ]

    def footnotes(self) -> list[str]:
        lines = []
        if self.way:
            lines.append("The parts are sums over threads. Time within requests is not included.")
        if self.imports:
            lines.append("Self: without the imports inside. Total: with them. Imported: how often others imported it.")
            if any(package.package.startswith("instrument (") for package in self.imports):
                lines.append("instrument (package): imports of the instrumentation itself, not of the service.")
        if self.preparations:
            lines.append("Total: with the calls inside. In requests: the time in which a request waited for it.")
        if self.warm_ups:
            lines.append("Extra: the first call minus the median of the others, with the calls inside.")
        return lines


def startup(recording: Recording, options: Options) -> StartupView:
    """Return the `startup` view. The options `rows`, `least_ns` and `unit` apply."""
    facts = recording.startup or Startup(0)
    tally = recording.tally if recording.startup is not None else Tally()
    rows = list(tally.iterate_totals())
    firsts: dict[tuple[object, ...], FirstCall] = {}  # several sites may be the same place
    for call in sorted(facts.firsts, key=attrgetter("start_ns")):
        firsts.setdefault(call.site.key, call)
    began_ns = facts.session_ns if facts.process_ns is None else facts.process_ns
    warm_ups = _find_warm_ups(firsts, tally)
    last = max(firsts.values(), key=lambda call: call.start_ns + call.total_ns, default=None)
    imports = facts.imports or ()
    imports_ns, in_spans_ns = (sum(getattr(row, name) for row in imports) for name in ("self_ns", "in_spans_ns"))
    way_ns: int | None = None
    way, late, is_late_partial = list[Phase](), dict[str, int](), False
    request: FirstRequestTimes | None = None
    if (first := facts.first_request) is not None:
        request = FirstRequestTimes(
            name_of_site(first.site),
            first.start_ns - began_ns,
            first.total_ns or None if facts.why else first.total_ns,
            warm_ups[first.site.key].median_ns if first.site.key in warm_ups else None,
            facts.why,
        )
        way_ns = first.start_ns - facts.session_ns
        before, after, is_late_partial = _divide_preparation_times(rows, first.start_ns, recording)
        late = {IMPORTS: sum(package.late_ns for package in imports), **after}
        sums = {IMPORTS: imports_ns - in_spans_ns - late[IMPORTS], **before}
        rest_ns = way_ns - sum(sums.values())
        sums |= {"Anything else": rest_ns} if rest_ns >= 0 else {}
        phases = {_preparation_phase_of(row.path[-1]) for row in rows}
        unwatched = {IMPORTS, *(WORDS[phase] for phase in PREPARING if phase not in phases)}
        unwatched = unwatched if facts.imports is None else set()
        way = [
            Phase(name, *((None, None) if name in unwatched else (total_ns, compute_share(total_ns, way_ns))))
            for name, total_ns in sums.items()
        ]
    import_rows = [
        Imports(row.package, row.entries, row.total_ns, row.self_ns, row.in_spans_ns, row.late_ns, None)
        for row in sorted(imports, key=lambda row: (-row.self_ns, row.package))
    ]
    shown_imports = [
        replace(row, ratio=compute_share(row.self_ns, imports_ns))
        for row in limit_rows(
            import_rows, options, attrgetter("self_ns"),
            lambda rows: sum_omitted_rows(
                rows, ("entries", "self_ns", "in_spans_ns", "late_ns"), package=f"(remaining {len(rows)})"
            ),
        )
    ]  # fmt: skip
    longest = sorted((use for use in warm_ups.values() if use.extra_ns), key=lambda use: (-use.extra_ns, use.name))
    preparations = _find_preparations(rows)
    return StartupView(
        is_known=recording.startup is not None,
        before_ns=None if facts.process_ns is None else facts.session_ns - facts.process_ns,
        way_ns=way_ns,
        way=tuple(way),
        late=tuple(Phase(name, total_ns, None) for name, total_ns in late.items() if total_ns),
        is_late_partial=is_late_partial,
        request=request,
        ran_ns=None if last is None else last.start_ns + last.total_ns - began_ns,
        ran_last="" if last is None else name_of_site(last.site),
        imports=None if facts.imports is None else tuple(shown_imports),
        imports_ns=imports_ns,
        imports_in_spans_ns=in_spans_ns,
        preparations=limit_rows(
            preparations, options, lambda row: row.total_ns or 0,
            lambda rows: _sum_preparations(rows, ("calls", "self_ns"), name=f"(remaining {len(rows)})"),
        ),
        warm_ups=limit_rows(
            longest, options, attrgetter("extra_ns"),
            lambda rows: sum_omitted_rows(rows, ("calls", "extra_ns"), name=f"(remaining {len(rows)})"),
        ),
        _options=options,
    )  # fmt: skip


def _find_warm_ups(firsts: Mapping[tuple[object, ...], FirstCall], tally: Tally) -> dict[tuple[object, ...], WarmUp]:
    places = tally.lines_by_key([site.key for site in tally.tree.sites])
    warm_ups = {}
    for key, first in firsts.items():
        of_all = tally.total_of_lines(places.get(key, ()))
        if of_all.calls < 2 or _preparation_phase_of(first.site) is not None:
            continue
        histogram = tally.histogram(tally.nodes_of_lines(places[key]))
        # A first call with device time beyond its host time is in another bucket: then one call too many counts.
        index = bucket_of(first.total_ns)
        if index in histogram:
            histogram[index] -= 1
        median_ns = percentiles(histogram, (0.5,), of_all.calls - 1, of_all.min_ns, of_all.max_ns)[0] or 0
        name, kind = name_of_site(first.site), first.site.kind
        extra_ns = max(first.total_ns - median_ns, 0)
        warm_ups[key] = WarmUp(name, kind, of_all.calls, first.start_ns, first.total_ns, median_ns, extra_ns)
    return warm_ups


def _preparation_phase_of(site: Site) -> str | None:
    phase = dict(site.attributes).get("phase")
    return str(phase) if phase in PREPARING else None


def _find_preparations(rows: Iterable[Row]) -> list[Preparation]:
    calls: dict[tuple[str, tuple[object, ...]], list[Preparation]] = defaultdict(list)
    for row in rows:
        *above, site = row.path
        if phase := _preparation_phase_of(site):
            totals = row.totals
            outermost_ns = 0 if any(caller.key == site.key for caller in above) else totals.total_ns
            in_request_ns = outermost_ns if any(caller.kind == "request" for caller in above) else 0
            numbers = totals.calls, outermost_ns, totals.self_ns, totals.max_ns, in_request_ns
            calls[phase, site.key].append(Preparation(phase, name_of_site(site), *numbers))
    sums = ("calls", "total_ns", "self_ns", "in_requests_ns")
    uses = [
        _sum_preparations(of_site, sums, name=of_site[0].name, phase=of_site[0].phase, remaining=0)
        for of_site in calls.values()
    ]
    return sorted(uses, key=lambda use: (-(use.total_ns or 0), use.name, use.phase))


def _sum_preparations(rows: Sequence[Preparation], sums: Sequence[str], **facts: Any) -> Preparation:
    return sum_omitted_rows(rows, sums, max_ns=max(row.max_ns for row in rows), **facts)


def _divide_preparation_times(
    rows: Iterable[Row], request_ns: int, recording: Recording
) -> tuple[dict[str, int], dict[str, int], bool]:
    """Sum up loading and compiling before and after the first request. Time within requests does not count. The flag is
    True if overwritten spans make the sums uncertain."""
    before, after = dict.fromkeys(WORDS.values(), 0), dict.fromkeys(WORDS.values(), 0)
    on_both_sides = False
    for row in rows:
        phase = _preparation_phase_of(row.path[-1])
        if phase is None or any(site.kind == "request" or _preparation_phase_of(site) for site in row.path[:-1]):
            continue
        begins_before = row.totals.first_ns < request_ns
        (before if begins_before else after)[WORDS[phase]] += row.totals.total_ns
        on_both_sides |= begins_before and row.totals.calls > 1
    if not on_both_sides:
        return before, after, False
    trace = recording.columns
    phases = [_preparation_phase_of(site) for site in trace.sites]
    # Spans in a request, or in a loading or compiling span that counts itself.
    around = trace.are_of_sites(
        [site.kind == "request" or bool(phase) for site, phase in zip(trace.sites, phases, strict=True)]
    )
    is_within = find_ancestor(trace.parent, around) != NONE
    is_late = (trace.start_ns >= request_ns) & ~trace.clipped & ~is_within
    for name, word in WORDS.items():
        rows_of_phase = is_late & trace.are_of_sites([phase == name for phase in phases])
        late_ns, whole_ns = sum(trace.total_ns[rows_of_phase].tolist()), before[word] + after[word]
        after[word] = min(max(after[word], late_ns), whole_ns)
        before[word] = whole_ns - after[word]
    return before, after, recording.trace.coverage[0] > request_ns
