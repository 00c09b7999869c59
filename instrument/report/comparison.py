"""The comparison of recordings before and after a change: the effect of the code, separated from that of the load.

Each call path is compared by its self time without waits, and by its device time. Only calls with similar work and load
are compared (see `effects`). Work is the size of the batch and of the input. Load is the number of requests in flight.
Queue times, waits and stalls get no verdict, because they depend on the load.

If nothing has changed, the probability of any wrong verdict is at most `FAMILY`.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np

from instrument.recording.distributions import percentiles_of_times
from instrument.report.effects import LEAST_CALLS, CallSample, Floats, estimate_p99_limits, measure_effect
from instrument.report.endpoint_statistics import EndpointTimes
from instrument.report.request_groups import find_size_attributes, read_sizes, request_groups
from instrument.report.requests_view import request_table
from instrument.report.section import Section, View
from instrument.report.table import format_time, limit_rows, name_of_site, printable, sum_omitted_rows, wrap_text
from instrument.report.view import Options, Recording
from instrument.runtime import file_writing
from instrument.trace.call_tree import paths_of_rows
from instrument.trace.columns import Columns, Int64s
from instrument.trace.indices import NONE, Groups, Members, find_distinct, find_nearest_row
from instrument.trace.joined import THOUSANDTHS, Joined
from instrument.trace.ledger import QUEUE, STALL, TRANSPORT, WAITING
from instrument.trace.self_times import waiting_times

FAMILY = 0.01
"""The maximum probability that any verdict of a comparison is wrong if nothing has changed."""

LEAST_SHARE = 0.005
"""The share of the time below which a call path is not compared."""

MAJOR_SHARE = 0.05
"""An unclear call path makes the gate inconclusive if it has at least this share of the time."""

LEAST_CHANGE = 1e-4
"""The largest relative change that counts as no change."""

SLOWER, FASTER, SAME, INCONCLUSIVE, NEW, GONE = "slower", "faster", "no change", "inconclusive", "new", "gone"
DEVICE = " (device)"

NOTEWORTHY = 0.05
"""The minimum relative change of an endpoint's mean time for which the report names a cause."""

MOSTLY = 0.5
"""The share of work that must be alike on both sides for a judgement on the effect of the load."""

CLEAR = 1.0
"""The largest `detectable_ratio` with which a call path counts as unchanged."""


@dataclass(frozen=True, slots=True)
class Change:
    """The change of a call path.

    - `path`: the names of the calls, the outermost call first
    - `ratio`, `low_ratio`, `high_ratio`: the change for similar work, and its confidence limits
    - `cost_ns`: the time added to a request, or to a call if there are no requests
    - `detectable_ratio`: the smallest detectable change
    - `matched_ratio`: the share of similar work
    """

    path: tuple[str, ...]
    verdict: str
    calls_before: int
    calls_after: int
    mean_before_ns: float | None
    mean_after_ns: float | None
    ratio: float | None = None
    low_ratio: float | None = None
    high_ratio: float | None = None
    detectable_ratio: float | None = None
    cost_ns: float | None = None
    matched_ratio: float | None = None
    share_ratio: float = 0.0
    remaining: int = 0

    @property
    def name(self) -> str:
        """The last call of the path and its caller, such as `decode in step`."""
        return " in ".join(reversed(self.path[-2:]))

    def summed_ns(self) -> float:
        return self.calls_before * (self.mean_before_ns or 0) + self.calls_after * (self.mean_after_ns or 0)

    def change_text(self) -> str:
        return "-" if self.ratio is None else f"{self.ratio:+.1%}"

    def limits_text(self) -> str:
        if self.low_ratio is None or self.high_ratio is None:
            return "-"
        return f"{self.low_ratio:+.1%} to {self.high_ratio:+.1%}"


@dataclass(frozen=True, slots=True)
class LoadChange:
    """The rate, mean and p99 of an endpoint's requests, or of one part of their time, before and after the change.
    Percentiles are None if several runs were recorded."""

    name: str
    requests_before: int
    requests_after: int
    a_second_before: float
    a_second_after: float
    mean_before_ns: float
    mean_after_ns: float
    p99_before_ns: int | None
    p99_after_ns: int | None


@dataclass(frozen=True, slots=True)
class SlowestRequests:
    """The 99th percentiles of an endpoint's wall times before and after, with confidence limits."""

    name: str
    requests_before: int
    requests_after: int
    p99_before_ns: int | None
    p99_after_ns: int | None
    limits_before_ns: tuple[int | None, int | None]
    limits_after_ns: tuple[int | None, int | None]

    @property
    def differs(self) -> bool:
        """True if the confidence limits before and after do not overlap."""
        (low, high), (low_after, high_after) = self.limits_before_ns, self.limits_after_ns
        is_above = high is not None and low_after is not None and high < low_after
        return is_above or (low is not None and high_after is not None and high_after < low)


@dataclass(frozen=True, slots=True)
class Comparison(View):
    """The changes of call paths, the largest cost first, and the load before and after. `limit` is the largest slowdown
    that a gate allows, None without a gate."""

    changes: tuple[Change, ...]
    loads: tuple[LoadChange, ...]
    slowest: tuple[SlowestRequests, ...]
    members_before: float | None
    members_after: float | None
    has_requests: bool
    limit: float | None = None
    _options: Options = field(default_factory=Options)

    TITLE = "Comparison"

    @property
    def changed(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.verdict in (SLOWER, FASTER))

    @property
    def detectable_ratio(self) -> float | None:
        """The mean of the smallest detectable changes, weighted by the time of the call paths. None without call
        paths."""
        weighed = [(change.detectable_ratio, change.share_ratio) for change in self.changes if change.detectable_ratio]
        whole = sum(share for _, share in weighed)
        return sum(ratio * share for ratio, share in weighed) / whole if whole else None

    def find_slowdowns(self, limit: float) -> list[Change]:
        return [change for change in self.changes if change.verdict == SLOWER and (change.ratio or 0) > limit]

    def find_unclear_changes(self, limit: float) -> list[Change]:
        """Return the call paths with at least `MAJOR_SHARE` of the time, for which a slowdown beyond `limit` is not
        ruled out."""
        return [
            change
            for change in self.changes
            if change.share_ratio >= MAJOR_SHARE
            and (change.verdict in (INCONCLUSIVE, NEW) or (change.verdict == SAME and (change.high_ratio or 0) > limit))
        ]

    def sentences(self) -> list[str]:
        if not self.changes:
            return ["Nothing to compare: no call path took a noteworthy time on either side.", *self._explain_load()]
        lines = [
            f"{change.name} is {abs(change.ratio or 0):.1%} {change.verdict} on like work ({change.limits_text()}), "
            f"{abs(change.cost_ns or 0) / 1e6:.4g} ms a {'request' if self.has_requests else 'call'}."
            for change in self.changed[:3]
        ]
        if len(self.changed) > 3:
            lines.append(f"Call paths that changed besides: {len(self.changed) - 3}.")
        looked_at = [change for change in self.changes if change.verdict == SAME]
        if not lines and looked_at:
            lines.append(
                f"No call path of {len(looked_at)} changed on like work. On average a change of "
                f"{self.detectable_ratio or 0:.1%} would have been detected."
            )
        unsure = [change for change in self.changes if change.verdict == INCONCLUSIVE]
        for why, count in (
            (f"fewer than {LEAST_CALLS} calls on each side that are alike", sum(row.ratio is None for row in unsure)),
            ("times that vary too much to compare them", sum(row.ratio is not None for row in unsure)),
        ):
            if count:
                paths = "1 call path has" if count == 1 else f"{count} call paths have"
                lines.append(f"Inconclusive: {paths} {why}.")
        if self.limit is not None and (unsure := self.find_unclear_changes(self.limit)):
            first = max(unsure, key=lambda row: row.share_ratio)
            lines.append(
                f"A change beyond {self.limit:.1%} is not ruled out for {len(unsure)} of {len(self.changes)} call "
                f"paths, most of all {first.name} ({first.limits_text()})."
            )
        for verdict in (NEW, GONE):
            rows = sorted((row for row in self.changes if row.verdict == verdict), key=Change.summed_ns)
            lines += [
                f"{verdict.capitalize()}: {len(rows)} of {len(self.changes)} call paths, most of all {row.name} "
                f"({row.summed_ns() / 1e6:.4g} ms). They cannot be compared."
                for row in rows[-1:]
            ]
        return [*lines, *self._explain_load()]

    def _explain_load(self) -> list[str]:
        load = next(iter(self.loads), None)
        more = load.mean_after_ns / load.mean_before_ns - 1 if load is not None and load.mean_before_ns else 0.0
        if load is None or abs(more) < NOTEWORTHY:
            return []
        assessed = sum(change.share_ratio for change in self.changes if change.ratio is not None)
        if any(change.verdict == SLOWER for change in self.changes):
            cause = "this follows from the slower work, from the load, or from both: not separated"
        elif assessed < MOSTLY:
            cause = f"only {assessed:.0%} of the work is alike, so whether the load did it is not known"
        elif (self.detectable_ratio or math.inf) > abs(more) / 2:
            cause = "the recordings are too short or too noisy to say whether the load did it"
        elif more > 0:
            cause = "like work did not get slower, so the load did it"
        else:
            cause = "the load, or faster work, did it"
        return [
            f"{load.name} took {load.mean_after_ns / 1e6:.4g} ms in the mean where it took "
            f"{load.mean_before_ns / 1e6:.4g}, at {load.a_second_after:.4g} requests a second where there were "
            f"{load.a_second_before:.4g}: {cause}."
        ]

    def header_lines(self) -> list[str]:
        return [*(line for words in self.sentences() for line in wrap_text(words)), f"Time unit: {self._options.unit}"]

    def _limit_rows(self, changes: Sequence[Change]) -> tuple[Change, ...]:
        sums = ("calls_before", "calls_after", "share_ratio")
        return limit_rows(
            changes, self._options, lambda change: 1, lambda rows: sum_omitted_rows(rows, sums, path=(), verdict="-")
        )

    def sections(self) -> list[Section]:
        return [
            Section(
                "Like work", self._limit_rows([change for change in self.changes if change.ratio is not None]),
                "name=Call path|verdict=Verdict|change_text=Change|limits_text=Between|cost_ns=Cost|"
                "detectable_ratio=Seen from|matched_ratio=Alike|share_ratio=Of all|"
                "+calls_before=Calls before|+calls_after=Calls after",
                (
                    "Change: of the time of similar calls. Cost: the change for each request, or for each call if",
                    "there are no requests. Seen from: the smallest change that would be detected. Alike: the share",
                    "of the time after that has similar calls before. Of all: the share of the time after. All limits",
                    "hold together with a probability of 99%.",
                ),
            ),
            Section(
                "Other call paths", self._limit_rows([change for change in self.changes if change.ratio is None]),
                "name=Call path|verdict=Verdict|calls_before=Calls before|calls_after=Calls after|"
                "mean_before_ns=Mean before|mean_after_ns=Mean after",
                (
                    f"Inconclusive: fewer than {LEAST_CALLS} calls on each side are alike. New, gone: on one side",
                    "only, as after a change of the profile, or where a function was renamed.",
                ),
            ),
            Section(
                "Load", self.loads,
                "name=Request, and its parts|requests_before=Before|requests_after=After|a_second_before=A second|"
                "a_second_after=After|mean_before_ns=Mean before|mean_after_ns=After|p99_before_ns=p99 before|"
                "p99_after_ns=After",
                ("These times are not matched by work: they change with the load and with the code.",),
            ),
            Section(
                "Slowest requests", self.slowest,
                "name=Request|requests_before=Before|p99_before_ns=p99|limits_before_ns=Between|requests_after=After|"
                "p99_after_ns=p99|limits_after_ns=Between|differs=Differs",
                (
                    "Between: the limits of the p99 with a probability of 95 %, for independent requests. Below some",
                    "370 requests there is no upper limit. Not matched by work: the load may be the cause.",
                ),
                {
                    "limits_before_ns": lambda row, unit: _format_limits_ns(row.limits_before_ns, unit),
                    "limits_after_ns": lambda row, unit: _format_limits_ns(row.limits_after_ns, unit),
                },
            ),
        ]  # fmt: skip


class _Side(NamedTuple):
    """The runs before or after the change. `work` has the calls of each path."""

    work: Mapping[tuple[str, ...], CallSample]
    requests: int
    summed_ns: float


def compare(before: Sequence[Recording], after: Sequence[Recording], options: Options) -> Comparison:
    """Return the comparison of recordings before and after a change. With three or more runs on each side, runs are
    compared, otherwise blocks of calls. Raises `InstrumentError` without scipy."""
    names = sorted({name for recording in (*before, *after) for name in find_size_attributes(recording.columns)})
    sides = _collect_calls(before, names), _collect_calls(after, names)
    paths = [
        path
        for path in {**sides[0].work, **sides[1].work}
        if any(path in side.work and side.work[path].values_ns.sum() >= LEAST_SHARE * side.summed_ns for side in sides)
    ]
    level = FAMILY / max(len(paths), 1)
    changes = [_compare_path(path, sides, level) for path in paths]
    changes.sort(key=lambda change: (-change.share_ratio, change.path))
    changed = [change for change in changes if change.verdict in (SLOWER, FASTER)]
    unchanged = [change for change in changes if change.verdict not in (SLOWER, FASTER)]
    return Comparison(
        (*sorted(changed, key=lambda change: -abs(change.cost_ns or 0)), *unchanged),
        tuple(_compare_loads(before, after, options)),
        tuple(_compare_slowest_requests(before, after, options)),
        _mean_batch_size(before),
        _mean_batch_size(after),
        sides[1].requests > 0,
        _options=options,
    )


def _compare_path(path: tuple[str, ...], sides: tuple[_Side, _Side], level: float) -> Change:
    samples = [side.work.get(path) for side in sides]
    calls = [0 if sample is None else len(sample.values_ns) for sample in samples]
    means = [None if sample is None else float(sample.values_ns.mean()) for sample in samples]
    change = Change(path, INCONCLUSIVE, calls[0], calls[1], means[0], means[1])
    if samples[1] is not None:
        change = replace(change, share_ratio=float(samples[1].values_ns.sum()) / max(sides[1].summed_ns, 1.0))
    if samples[0] is None or samples[1] is None:
        return replace(change, verdict=NEW if samples[0] is None else GONE)
    work = measure_effect(samples[0], samples[1])
    if work is None:
        return change
    low, high = work.confidence_limits(level)
    detectable = work.smallest_detectable_change(level)
    unchanged = SAME if detectable <= CLEAR else INCONCLUSIVE
    each_ns = float(samples[1].values_ns.sum()) / (sides[1].requests or calls[1])
    return replace(
        change,
        verdict=SLOWER if low > LEAST_CHANGE else FASTER if high < -LEAST_CHANGE else unchanged,
        ratio=work.ratio,
        low_ratio=low,
        high_ratio=high,
        detectable_ratio=detectable,
        cost_ns=round(each_ns * work.ratio / (1 + work.ratio), 3) if work.ratio > -1 else None,
        matched_ratio=work.matched_ratio,
    )


def _collect_calls(runs: Sequence[Recording], names: Sequence[str]) -> _Side:
    parts: dict[tuple[str, ...], list[CallSample]] = defaultdict(list)
    request_count = 0
    for run, recording in enumerate(runs):
        trace, joined = recording.columns, recording.joined
        request_count += len(joined.rows)
        if not len(trace):
            continue
        covariates = _measure_covariates(trace, joined, names)
        order = np.argsort(trace.start_ns, kind="stable")
        order = order[~trace.clipped[order]]
        node_of, paths = paths_of_rows(trace)
        ran_ns = (trace.self_ns - waiting_times(trace)).astype(np.float64)
        device_ns, is_timed = trace.device_times(np.arange(len(trace), dtype=np.int64))
        by_node = Members(node_of[order], len(paths), order)
        for node, path in enumerate(paths):
            rows, name = by_node[node], tuple(map(name_of_site, path))
            numbers = np.full(len(rows), run, dtype=np.int64)
            if len(rows):
                parts[name].append(CallSample(ran_ns[rows], covariates[:, rows], numbers))
            timed = rows[is_timed[rows]]
            if len(timed):
                label = (*name[:-1], name[-1] + DEVICE)
                parts[label].append(
                    CallSample(device_ns[timed].astype(np.float64), covariates[:, timed], numbers[: len(timed)])
                )
    work = {
        name: CallSample(*(np.concatenate(columns, axis=-1) for columns in zip(*samples, strict=True)))
        for name, samples in parts.items()
    }
    summed_ns = sum(float(sample.values_ns.sum()) for sample in work.values())
    return _Side(work, request_count, summed_ns)


def _measure_covariates(trace: Columns, joined: Joined, names: Sequence[str]) -> Floats:
    """Return the amounts of work and load by which calls are matched. A row is an amount, and a column is a span."""
    requests, served = joined.rows, joined.served
    begins, ends = np.sort(trace.start_ns[requests]), np.sort(trace.end_ns[requests])
    sizes = np.bincount(served.batch, minlength=len(trace))
    weights = np.bincount(served.batch, served.weight / THOUSANDTHS, minlength=len(trace))
    batch = find_nearest_row(trace.parent, sizes > 0)
    outside = np.flatnonzero(batch == NONE)  # load acts on a batch by what is in it
    starts = trace.start_ns[outside]
    in_flight = np.zeros(len(trace))
    in_flight[outside] = np.log1p(np.searchsorted(begins, starts, "right") - np.searchsorted(ends, starts, "right"))
    columns = [in_flight, *(np.append(np.log1p(column), 0)[batch] for column in (sizes, weights))]
    for name in names:
        numbers = np.log1p(np.maximum(read_sizes(trace, name), 0))
        columns.append(np.where(numbers > 0, numbers, np.append(numbers, 0)[joined.owner]))
    return np.array(columns)


def _mean_batch_size(runs: Sequence[Recording]) -> float | None:
    served = [recording.joined.served for recording in runs]
    batches = sum(len(find_distinct(pairs.batch)) for pairs in served)
    return sum(len(pairs.batch) for pairs in served) / batches if batches else None


PARTS_OF_LOAD = (QUEUE, WAITING, STALL, TRANSPORT)


def _compare_loads(before: Sequence[Recording], after: Sequence[Recording], options: Options) -> list[LoadChange]:
    sides = _times_by_group(before, options), _times_by_group(after, options)
    seconds = [sum((run.trace.end_ns - run.trace.start_ns) / 1e9 for run in side) for side in (before, after)]
    runs_of = {name: [side.get(name, []) for side in sides] for name in {**sides[0], **sides[1]}}
    rows = []
    for name in sorted(runs_of, key=lambda name: -sum(times.wall_ns for runs in runs_of[name] for times in runs)):
        counts = [sum(times.requests for times in runs) for runs in runs_of[name]]
        rates = [count / max(length, 1e-9) for count, length in zip(counts, seconds, strict=True)]
        for part in ("", *PARTS_OF_LOAD):
            times = []
            for runs in runs_of[name]:
                phases = [(phase.summed_ns, phase.p99_ns) for run in runs for phase in run.phases if phase.name == part]
                sums = phases if part else [(run.wall_ns, run.p99_ns) for run in runs]
                # Percentiles of several runs cannot be added up.
                times.append((sum(ns for ns, _ in sums), sums[0][1] if len(sums) == 1 == len(runs) else None))
            if not any(summed_ns for summed_ns, _ in times):
                continue
            means = [summed_ns / max(count, 1) for (summed_ns, _), count in zip(times, counts, strict=True)]
            label = f"  {part}" if part else name
            rows.append(LoadChange(label, *counts, *rates, *means, *(p99_ns for _, p99_ns in times)))
    return rows


def _format_limits_ns(limits_ns: tuple[int | None, int | None], unit: str) -> str:
    return " to ".join(format_time(limit_ns, unit) for limit_ns in limits_ns)


def _compare_slowest_requests(
    before: Sequence[Recording], after: Sequence[Recording], options: Options
) -> list[SlowestRequests]:
    sides: list[dict[str, list[Int64s]]] = [defaultdict(list), defaultdict(list)]
    for side, recording in ((side, run) for side, runs in zip(sides, (before, after), strict=True) for run in runs):
        (rows, _), grouped = recording.complete_requests, request_groups(recording, options)
        of_rows, walls = (grouped.group[recording.joined.of[rows]], recording.columns.total_ns[rows])
        for members in Groups(of_rows, len(grouped.names)).list_rows():
            side[grouped.names[of_rows[members[0]]]].append(walls[members])
    rows_by_count = []
    for name in sides[0].keys() & sides[1].keys():
        times = [np.sort(np.concatenate(side[name])) for side in sides]
        p99s_ns = [percentiles_of_times(values.tolist(), (0.99,))[0] for values in times]
        limits = [estimate_p99_limits(values) for values in times]
        rows_by_count.append(SlowestRequests(name, len(times[0]), len(times[1]), p99s_ns[0], p99s_ns[1], *limits))
    return sorted(rows_by_count, key=lambda row: (-row.requests_after, row.name))


def _times_by_group(runs: Sequence[Recording], options: Options) -> dict[str, list[EndpointTimes]]:
    by_name: dict[str, list[EndpointTimes]] = defaultdict(list)
    all_rows = replace(options, rows=None, most=None)
    for recording in runs:
        table = recording.compute_once(request_table)
        for times in table.times_by_attribute(recording.columns, all_rows) or table.times_of_endpoints(all_rows, {}):
            by_name[times.name].append(times)
    return by_name


COLOURS = {SLOWER: "#e5776b", FASTER: "#6fa3d8", NEW: "#e5b567", GONE: "#b5bdc8"}
OTHER_COLOUR = "#dfe3e8"

MOST_LEVELS = 200

STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem; color: #1b1f24; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .15rem .6rem; text-align: right; }
caption { color: #59626e; } .row { display: flex; } .box { overflow: hidden; white-space: nowrap; min-width: 0; }
.label { border: 1px solid #fff; padding: 0 .3rem; overflow: hidden; text-overflow: ellipsis; color: #14181d; }
"""


def write_page(path: str | os.PathLike[str], comparison: Comparison) -> Path:
    """Write a comparison to an HTML file. An earlier file remains until the new one is complete."""
    whole = sum(change.share_ratio for change in comparison.changes)
    target, icicle = Path(path), "".join(_chart_html(comparison.changes, 0, whole))
    with file_writing.open_replacement(target) as file:
        file.write(
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Comparison</title><style>{STYLE}</style>'
            f"{comparison._repr_html_()}<h4>Call paths after, by their time</h4>{icicle}".encode("utf-8", "replace")
        )
    return target


def _chart_html(changes: Sequence[Change], level: int, whole: float) -> Iterator[str]:
    boxes: dict[str, list[Change]] = defaultdict(list)
    for change in changes:
        if level < min(len(change.path), MOST_LEVELS):
            boxes[change.path[level]].append(change)
    widths = {name: sum(change.share_ratio for change in inside) for name, inside in boxes.items()}
    yield '<div class="row">'
    for name in sorted(boxes, key=lambda name: (-widths[name], name)):
        own = [change for change in boxes[name] if level + 1 == min(len(change.path), MOST_LEVELS)]
        colour = COLOURS.get(own[-1].verdict, OTHER_COLOUR) if own else OTHER_COLOUR
        text = f": {own[-1].verdict}, {own[-1].change_text()} ({own[-1].limits_text()})" if own else ""
        label = escape(printable(f"{name}{text}"))
        yield f'<div class="box" style="width:{100 * widths[name] / max(whole, 1e-9):.3f}%">'
        yield f'<div class="label" style="background:{colour}" title="{label}">{label}</div>'
        yield from _chart_html(boxes[name], level + 1, widths[name]) if len(boxes[name]) > len(own) else ()
        yield "</div>"
    yield "</div>"
