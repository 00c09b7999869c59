"""The `cost` view: the cost of recording, by recorded function and by thread of the SDK, and notes on losses.

The cost of a recorded function is its number of calls times the measured time that recording adds to a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from instrument.recording.spans import Cost, Site
from instrument.report.device_use import count_missing_time_reasons, find_spans_without_device_time
from instrument.report.section import NO_EVENTS, Coverage, Section, View, describe_uncached_cost
from instrument.report.table import (
    MISSING,
    Ratio,
    code_location_of,
    compute_share,
    format_percent,
    limit_rows,
    number_text,
    printable,
    sum_omitted_rows,
    wrap_text,
)
from instrument.report.view import InstrumentationStats, Options, Recording

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class CostPart:
    name: str
    time_ns: int
    ratio: float | None


@dataclass(frozen=True, slots=True)
class SiteCost:
    """The cost of one site's probe. `ratio` is its share of the cost of all sites. `burden` is the cost as a share of
    the calls' time on the host. It is above 1 if calls are shorter than the probe."""

    name: str
    kind: str
    place: str
    calls: int
    each_ns: float
    cost_ns: int
    host_ns: int
    ratio: float | None
    remaining: int = 0

    burden = Ratio("cost_ns", of="host_ns")


@dataclass(frozen=True, slots=True)
class MutedSite:
    """A site whose calls were counted but not recorded, to save cost. `now` is True if the site is still muted."""

    name: str
    kind: str
    place: str
    calls: int
    now: bool


@dataclass(frozen=True, slots=True)
class RingUse:
    """The use of the rings, which keep the newest spans of each thread."""

    held_rows: int
    rows: int
    memory_bytes: int

    ratio = Ratio("held_rows", of="rows")


@dataclass(frozen=True, slots=True)
class InstrumentationCost(View):
    """The `cost` view. Its parts add up to `cost.total_ns`.

    - `muted`, `rings`: None for a saved trace
    - `device_asked`: the number of kept spans that requested device time
    - `device_missing`: the number of spans that got no device time, by reason
    """

    recorder: str
    clock: str
    cost: Cost | None
    window_ns: int
    parts: tuple[CostPart, ...]
    sites: tuple[SiteCost, ...]
    is_each_known: bool
    losses: Mapping[str, int]
    notes: tuple[str, ...]
    muted: tuple[MutedSite, ...] | None
    rings: RingUse | None
    coverage: Coverage
    device_asked: int
    device_missing: Mapping[str, int]
    _options: Options

    TITLE = "Instrumentation"

    @property
    def ratio(self) -> float | None:
        return None if self.cost is None else compute_share(self.cost.total_ns, self.window_ns)

    @property
    def most_ratio(self) -> float | None:
        """The cost as a share of the window, if the probes' data were never in the processor's caches."""
        return None if self.cost is None else compute_share(self.cost.most_ns, self.window_ns)

    def header_lines(self) -> list[str]:
        by = f"Recorder: {printable(self.recorder) or 'not known'}" + (f"; clock: {self.clock}" if self.clock else "")
        return [*wrap_text(by), f"Time unit: {self._options.unit}"]

    def sections(self) -> list[Section]:
        note_on_each = "" if self.is_each_known else ". Each: the mean of all sites, as a saved trace has no other"
        whole = [] if self.cost is None else [CostPart("in all", self.cost.total_ns, self.ratio)]
        missed = [part for note in self.notes for part in wrap_text(f"- {printable(note)}")]
        per_call = list[str]()
        if self.cost is not None:
            calls = f"{self.cost.calls} calls x {number_text(self.cost.per_call_ns)} ns"
            text = f"{calls} in the mean; the window is {number_text(self.window_ns / 1e9)} s of wall time"
            per_call = wrap_text(text + describe_uncached_cost(self.cost, self.window_ns))
        return [
            Section(
                "Cost", [*self.parts, *whole], "name=Part|time_ns=Time|ratio=Of window", per_call,
                {"ratio": lambda part, unit: MISSING if part.ratio is None else f"{number_text(100 * part.ratio)}%"},
                empty=["What it cost is not known: the trace does not say it."],
            ),
            Section(
                "Probes", self.sites,
                "name=Site|kind=Kind|calls=Calls|each_ns=Each, ns|cost_ns=Cost|ratio=Of cost|burden=Of calls",
                wrap_text(f"Of cost: of the cost of all sites. Of calls: cost / host time of the calls{note_on_each}."),
                {"each_ns": lambda row, unit: number_text(row.each_ns), "name": _name_with_place},
            ),
            Section("Kept spans", (), "", empty=[*self.coverage.lines(), *_describe_kept_spans(self)]),
            Section("Not kept", list(self.losses.items()), "0=Reason|1=Count", empty=["Nothing was lost."]),
            Section(
                "Not observed", self.muted or (),
                "name=Muted, to stay within the budget|kind=Kind|calls=Calls passed|now=Now",
                ["", *missed] if missed else [], {"name": _name_with_place},
                empty=missed or ["Nothing that was asked for was missed."],
            ),
        ]  # fmt: skip


def cost(recording: Recording, options: Options) -> InstrumentationCost:
    """Return the `cost` view of the tally and the kept spans. The options `rows` and `least_ns` limit the table of
    sites."""
    spent, stats = recording.cost, recording.stats
    window_ns = (spent.window_ns if spent is not None else 0) or recording.window_ns or 0
    device_asked, untimed = find_spans_without_device_time(recording.columns)
    reasons = count_missing_time_reasons(untimed)
    muted = None
    if stats is not None:
        sites = sorted({*stats.passed, *stats.muted}, key=lambda site: -stats.passed.get(site, 0))
        muted = tuple(
            MutedSite(site.name, site.kind, _place_of_site(site), stats.passed.get(site, 0), site in stats.muted)
            for site in sites
            if stats.passed.get(site) or site in stats.muted
        )
    return InstrumentationCost(
        recorder=recording.recorder,
        clock="" if stats is None else stats.clock,
        cost=spent,
        window_ns=window_ns,
        parts=() if spent is None else _split_cost(spent, stats, window_ns),
        sites=() if spent is None else _site_costs(recording, spent, options),
        is_each_known=stats is not None,
        losses={reason: count for reason, count in recording.losses.items() if count},
        notes=recording.notes if stats is None else tuple(stats.notes),
        muted=muted,
        rings=None if stats is None else RingUse(stats.held_rows, stats.ring_rows, stats.ring_bytes),
        coverage=Coverage.measure_coverage(recording),
        device_asked=device_asked,
        device_missing=dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0] != NO_EVENTS, item[0]))),
        _options=options,
    )


def _split_cost(spent: Cost, stats: InstrumentationStats | None, window_ns: int) -> tuple[CostPart, ...]:
    pairs_ns = 0 if stats is None else round(stats.pairs_ns)
    parts, left_ns = {"pairs of events on devices": pairs_ns}, spent.thread_ns
    # The threads ran on between the two readings. The first one, which is of the whole, counts.
    for name, thread_ns in {"threads of its own": left_ns}.items() if stats is None else stats.threads_ns.items():
        part = name if stats is None else f"thread {name}"
        parts[part] = min(thread_ns, left_ns)
        left_ns -= parts[part]
    parts = {"probes": spent.total_ns - sum(parts.values()), **parts}
    return tuple(
        CostPart(name, part_ns, compute_share(part_ns, window_ns)) for name, part_ns in parts.items() if part_ns
    )


def _site_costs(recording: Recording, spent: Cost, options: Options) -> tuple[SiteCost, ...]:
    tally, stats = recording.totals(merged=True), recording.stats
    tree = tally.tree
    keys = tree.number_sites_by_key()
    sums = tally.sum_by_group(np.asarray(keys)[tally.site_of], len(keys))
    each_ns = [spent.per_call_ns] * len(keys) if stats is None else stats.added_ns(tree.sites[: len(keys)])
    numbers = zip(tree.sites, sums["calls"].tolist(), each_ns, sums["total_ns"].tolist(), strict=False)
    rows = [
        SiteCost(site.name, site.kind, _place_of_site(site), calls, added_ns, round(calls * added_ns), host_ns, None)
        for site, calls, added_ns, host_ns in numbers
        if calls
    ]
    rows.sort(key=lambda row: (-row.cost_ns, row.name, row.place))

    def sum_omitted(omitted: Sequence[SiteCost]) -> SiteCost:
        row = sum_omitted_rows(omitted, ("calls", "cost_ns", "host_ns"))
        return replace(row, each_ns=row.cost_ns / row.calls)

    whole_ns = sum(row.cost_ns for row in rows)
    shown = limit_rows(rows, options, lambda row: row.cost_ns, sum_omitted)
    return tuple(replace(row, ratio=compute_share(row.cost_ns, whole_ns)) for row in shown)


def _name_with_place(row: SiteCost | MutedSite, unit: str) -> str:
    return f"{row.name} [{row.place}]" if row.place and row.place != row.name else row.name


def _place_of_site(site: Site) -> str:
    return site.instance or code_location_of(site)


def _describe_kept_spans(view: InstrumentationCost) -> list[str]:
    lines = []
    if view.rings is not None:
        rings = view.rings
        lines.append(
            f"Rings: {rings.held_rows} of {rings.rows} rows are taken ({format_percent(rings.ratio, 1)}), "
            f"of {number_text(rings.memory_bytes / MEBIBYTE)} MiB at most"
        )
    if view.device_asked:
        missing = ", ".join(f"{count} {printable(reason)}" for reason, count in view.device_missing.items())
        got = view.device_asked - sum(view.device_missing.values())
        lines += wrap_text(
            f"Device times: {got} of {view.device_asked} spans that asked for one have it"
            + (f"; without: {missing}" if missing else "")
        )
    return lines
