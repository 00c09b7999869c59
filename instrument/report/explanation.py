"""The explanation of a slow request: the causes of its excess over the time of similar requests.

Similar requests have the same endpoint and similar work. Their typical time is the mean of the middle half. A cause
accounts for the time that it took in this request, minus the time that it typically takes. For a window of time, the
average of the requests in it is explained.

The verdict is `explained` if the evidence shows one cause that accounts for at least `MOSTLY` of the excess. It is
`typical` for an excess within the usual spread, and otherwise `inconclusive`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from instrument.errors import TraceError
from instrument.recording.spans import EXECUTOR_QUEUE
from instrument.report import causes as listed
from instrument.report.causes import CAUSES, CauseTimes, Proof, measure_resource_wait, read_host_gauges
from instrument.report.request_groups import (
    ENOUGH,
    NEAREST,
    POOL,
    attribute_values,
    choose_median_requests,
    choose_places_evenly,
    estimate_slow_threshold_ns,
    find_similar_requests,
    mask_known_endpoint,
)
from instrument.report.request_life import find_requests_by_key
from instrument.report.requests_view import A_REQUEST
from instrument.report.section import Section, View
from instrument.report.table import (
    compute_share,
    format_percent,
    format_time,
    printable,
    shorten,
    wrap_text,
)
from instrument.report.view import Options, Recording
from instrument.trace.columns import Int64s

LEAST_BLOCKS, DEVIATIONS = 8, 4.0
"""The minimum number of blocks of requests for an estimate of the usual spread. A mean time is usual if it is at
most `DEVIATIONS` standard deviations above the median."""

MOSTLY = 0.5
"""The minimum share of the excess for which a cause counts as the explanation."""

LEAST_SHARE = 0.05
"""The excess up to which a request counts as typical, as a share of the typical time."""

MORE_STEPS = "more steps"
"""The text that replaces a call path if the request had more engine steps than usual."""

NEARLY = 0.75
"""A lack of processors or memory counts as the whole cause of a slowdown if it explains at least this share."""

NOTABLE = 0.01
"""The minimum share of the excess that a cause needs for a row in the table of causes."""

TENANT = "tenant"
"""The default attribute by which the requests of an arrival burst are counted."""

TYPICAL, EXPLAINED, INCONCLUSIVE = "typical", "explained", "inconclusive"

SLOWED = (listed.SLOW, listed.OWN, listed.COPY, listed.FILL, listed.TRANSPORTED)
"""The causes that look the same as a lack of processors or memory. Only a gauge can distinguish them."""

STOPPED = (listed.SLOW, listed.OWN, listed.COPY)
"""The causes that cannot be distinguished from a long stop of a thread, such as a garbage collection."""

KEY_LENGTH = 40


class RequestChoice(NamedTuple):
    """The requests to explain.

    - `request`: the key of the only request
    - `slowest`: the number of slowest requests
    - `since_ns`, `until_ns`: the interval in which the requests began, in ns after the start of the trace

    With an interval but without `slowest`, the mean of all requests in the interval is explained.
    """

    request: str | None = None
    slowest: int | None = None
    endpoint: str = ""
    since_ns: int | None = None
    until_ns: int | None = None


@dataclass(frozen=True, slots=True)
class CauseShare:
    """A cause with its time in the request, and its typical time.

    - `accounted_ns`: the part of the excess that the cause accounts for
    - `proofs`: the spans that show the cause
    - `note`: a description of the proofs, or the reason against the cause
    """

    name: str
    path: str
    time_ns: int
    typical_ns: int
    accounted_ns: int
    ratio: float | None
    note: str = ""
    proofs: tuple[Proof, ...] = ()

    def title(self) -> str:
        return f"{self.name}: {self.path}" if self.path else self.name


@dataclass(frozen=True, slots=True)
class PartExcess:
    name: str
    time_ns: int
    typical_ns: int

    @property
    def excess_ns(self) -> int:
        return self.time_ns - self.typical_ns


@dataclass(frozen=True, slots=True)
class Explanation(View):
    """The explanation of one request, or of the mean of all `requests` in a window.

    - `doubt`: the reason for the verdict `inconclusive`
    - `alike`: the number of requests for comparison
    - `is_like`: True if the compared requests have similar work
    - `rivals`: examined causes that account for nothing
    """

    name: str
    keys: tuple[str, ...]
    requests: int
    span_id: int
    begin_ns: int
    wall_ns: int
    typical_ns: int
    usual_most_ns: int
    alike: int = 0
    is_like: bool = True
    verdict: str = INCONCLUSIVE
    doubt: str = ""
    causes: tuple[CauseShare, ...] = ()
    unexplained_ns: int = 0
    rivals: tuple[CauseShare, ...] = ()
    parts: tuple[PartExcess, ...] = ()
    not_assessed: tuple[str, ...] = ()
    _options: Options = field(default_factory=Options)

    TITLE = "Explanation"

    @property
    def excess_ns(self) -> int:
        return self.wall_ns - self.typical_ns

    def label(self) -> str:
        name = shorten(printable(self.name) or "(no name)", KEY_LENGTH)
        if self.requests != 1:
            return f"{name} in this time (mean of {self.requests} requests)"
        return (
            f"{name} {shorten(printable(self.keys[0]), KEY_LENGTH)}" if self.keys else f"{name} (span {self.span_id})"
        )

    def sentence(self) -> str:
        unit = self._options.unit
        took = f"{self.label()} took {format_time(self.wall_ns, unit)} {unit}"
        if not self.alike:
            return f"{took}. Inconclusive: {self.doubt}."
        kind = "like it" if self.is_like else "of its endpoint"
        typical = f"{took} where {format_time(self.typical_ns, unit)} is typical of {self.alike} {kind}"
        lead = self.causes[0] if self.causes else None
        if self.verdict == TYPICAL:
            work = f", for its work ({lead.path})" if lead is not None and lead.path.startswith(MORE_STEPS) else ""
            most = format_time(self.usual_most_ns, unit)
            usual = f"{typical}: within the usual spread, which reaches {most} {unit}{work}."
            is_near = self.excess_ns <= LEAST_SHARE * self.typical_ns
            if work or is_near or lead is None or (lead.ratio or 0.0) < MOSTLY:
                return usual
            return f"{usual} Most of its excess is {printable(lead.title())} ({format_percent(lead.ratio, 1)})."
        part = max(self.parts, key=lambda part: part.excess_ns, default=None)
        more = f": {format_time(part.excess_ns, unit)} {unit} more in {printable(part.name)}" if part else ""
        doubt, because = f" Inconclusive: {self.doubt}." * (self.verdict == INCONCLUSIVE), ""
        if lead is not None:
            path = f" ({printable(lead.path)})" if lead.path else ""
            accounted = f"{format_time(lead.accounted_ns, unit)} {unit}, {format_percent(lead.ratio, 1)}"
            because = f" {lead.name.capitalize()}{path} accounts for {accounted}: {lead.note}."
        return f"{typical}{more}.{doubt}{because}"

    def headline(self) -> str:
        """Return the explanation in one sentence. The verdict must be `explained`."""
        unit, lead = self._options.unit, self.causes[0]
        took, typical, accounted = (format_time(ns, unit) for ns in (self.wall_ns, self.typical_ns, lead.accounted_ns))
        return (
            f"{self.label()} took {took} {unit} where {typical} is typical: {printable(lead.title())} accounts for "
            f"{accounted} of it; see `instrument explain`."
        )

    def header_lines(self) -> list[str]:
        unit = self._options.unit
        lines = wrap_text(self.sentence())
        if self.rivals and self.verdict != TYPICAL:
            rivals = "; ".join(f"{rival.title()} ({rival.note})" for rival in self.rivals)
            lines += wrap_text(f"Rivals: {rivals}.")
        if self.not_assessed:
            lines += wrap_text(f"Not assessed: {'; '.join(self.not_assessed)}.")
        return [*lines, f"Time unit: {unit}"]

    def sections(self) -> list[Section]:
        ratio = compute_share(self.unexplained_ns, self.excess_ns)
        unexplained = CauseShare("unexplained", "", 0, 0, self.unexplained_ns, ratio)
        proofs = [(cause.title(), proof) for cause in self.causes for proof in cause.proofs]
        return [
            Section(
                "Causes", (*self.causes, unexplained) if self.excess_ns > 0 else (),
                "title=Cause|time_ns=In it|typical_ns=Typical|accounted_ns=Accounts for|ratio=Of excess",
                ("Of excess: share of the time beyond the typical time. Causes and unexplained add up to it.",),
            ),
            Section(
                "Parts of its time", self.parts, "name=Part|time_ns=In it|typical_ns=Typical|excess_ns=Excess",
            ),
            Section(
                "Evidence", proofs,
                "0=Cause|1.name=Span|1.span_id=Number|1.begin_ns=Begin|1.time_ns=In it|1.note=Note",
                ("Begin: after the start of the trace. In it: within the request.",),
            ),
        ]  # fmt: skip


def explain(recording: Recording, choice: RequestChoice, options: Options) -> list[Explanation]:
    """Return an explanation for each chosen request, or one for the mean of requests. Raises `TraceError` if no request
    matches."""
    trace, joined = recording.columns, recording.joined
    if choice.request is not None:
        return [explain_request(recording, find_requests_by_key(trace, joined, choice.request)[0], options)]
    begins_ns = trace.start_ns[joined.rows] - recording.trace.start_ns
    since_ns, until_ns = choice.since_ns or 0, math.inf if choice.until_ns is None else choice.until_ns
    is_within = ~trace.clipped[joined.rows] & (begins_ns >= since_ns) & (begins_ns < until_ns)
    if choice.endpoint:
        is_within &= mask_known_endpoint(recording, choice.endpoint)
    places = np.flatnonzero(is_within)
    if not len(joined.rows):
        raise TraceError(f"found no request. {A_REQUEST}")
    if not len(places):
        raise TraceError(
            f"found no whole request in the time and of the endpoint that are given, of {len(joined.rows)}"
        )
    if choice.slowest is None and (choice.since_ns is not None or choice.until_ns is not None):
        return [explain_mean(recording, places, options)]
    order = np.argsort(-trace.total_ns[joined.rows[places]], kind="stable")[: choice.slowest or 1]
    return [explain_request(recording, place, options) for place in places[order].tolist()]


def explain_request(recording: Recording, place: int, options: Options) -> Explanation:
    trace, joined = recording.columns, recording.joined
    places, is_like = find_similar_requests(recording, place)
    begin_ns, wall_ns = int(trace.start_ns[joined.rows[place]]), int(trace.total_ns[joined.rows[place]])
    walls = trace.total_ns[joined.rows[places]]
    by_wall = places[np.argsort(walls, kind="stable")]
    middle = by_wall[len(by_wall) // 4 : len(by_wall) - len(by_wall) // 4]
    arrivals = begin_ns - wall_ns, begin_ns
    evidence = _Evidence(recording, np.array([place]), middle, arrivals, options, is_like=is_like)
    if len(places) < ENOUGH:
        doubt = f"the recording has {len(places)} other requests of the endpoint, {ENOUGH} are needed"
        return evidence.explain_excess(1, doubt=doubt)
    return evidence.explain_excess(1, len(places), estimate_slow_threshold_ns(walls, len(joined.rows)))


def explain_mean(recording: Recording, places: Int64s, options: Options) -> Explanation:
    """Return the explanation of the mean of requests. Only requests of the endpoint with the most time are
    explained."""
    trace, joined = recording.columns, recording.joined
    walls = trace.total_ns[joined.rows]
    names, of_site = trace.describe_sites(lambda site: site.name)
    name_of = of_site[trace.site[joined.rows]]
    sums = np.bincount(name_of[places], walls[places] + 1, minlength=len(names))  # above 0 for each name that is there
    is_same = name_of == int(np.argmax(sums))
    places = places[is_same[places]]
    outside = np.setdiff1d(np.flatnonzero(is_same & ~trace.clipped[joined.rows]), places)
    targets = choose_places_evenly(places, NEAREST)
    typical = choose_median_requests(recording, targets, choose_places_evenly(outside, POOL))
    begins, ends = trace.start_ns[joined.rows[places]], trace.end_ns[joined.rows[places]]
    window = int(begins.min()), int(ends.max())
    evidence = _Evidence(recording, targets, typical, window, options, is_like=True)
    if len(outside) < ENOUGH:
        doubt = f"the recording has {len(outside)} requests of the endpoint outside of the time, {ENOUGH} are needed"
        return evidence.explain_excess(len(places), doubt=doubt)
    blocks = len(outside) // len(places)
    if blocks < LEAST_BLOCKS:
        doubt = "the recording is too short to know the usual spread of as many requests"
        return evidence.explain_excess(len(places), len(outside), doubt=doubt)
    means = walls[outside[: blocks * len(places)]].reshape(blocks, -1).mean(axis=1)
    median = float(np.median(means))
    deviation = 1.4826 * float(np.median(np.abs(means - median)))  # the standard one if they are normal
    return evidence.explain_excess(len(places), len(outside), median + DEVIATIONS * deviation)


class _Evidence:
    """The mean time of each cause, in the explained requests and in typical requests. Requests that arrived in the
    interval `arrivals` may have delayed the explained requests."""

    def __init__(
        self, recording: Recording, places: Int64s, typical: Int64s, arrivals: tuple[int, int], options: Options, *,
        is_like: bool,
    ) -> None:  # fmt: skip
        self._recording, self._places, self._typical, self._options = recording, places, typical, options
        self._by, self._is_like = options.requests_by or TENANT, is_like
        self._times = times = CauseTimes(recording, np.append(typical, places))
        self._of_requests, self._usual = (
            _mean_times([times.times_by_cause(place) for place in side.tolist()]) for side in (places, typical)
        )
        trace, joined = recording.columns, recording.joined
        rows, walls = joined.rows, trace.total_ns[joined.rows]
        self._slowest = int(places[np.argmax(walls[places])])
        begin_ns, end_ns = int(trace.start_ns[rows[places]].min()), int(trace.end_ns[rows[places]].max())
        open_share = float(walls[places].mean()) / max(end_ns - begin_ns, 1)  # a pressure meets all
        gauges, self._pressure_ns = read_host_gauges(recording.trace, times.find_threads(places)), dict[str, float]()
        for cause in listed.PRESSURES:
            wait_ns = measure_resource_wait(gauges, cause, recording.trace, begin_ns, end_ns)
            if wait_ns is not None:
                self._pressure_ns[cause] = wait_ns * open_share
        begins = trace.start_ns[rows]
        first, last = np.searchsorted(begins, arrivals, side="right").tolist()
        self._arrival_ns, self._arrived_rows = arrivals[1] - arrivals[0], rows[first:last]
        whole_ns = max(int(begins[-1] - begins[0]), 1)
        self._arrived, self._usually_arrive = last - first, len(begins) * self._arrival_ns / whole_ns

    def explain_excess(self, requests: int, alike: int = 0, most_ns: float = 0.0, doubt: str = "") -> Explanation:
        """Return the explanation with its causes and its verdict. Wall times up to `most_ns` are usual. A `doubt` makes
        the verdict inconclusive. If no requests can be compared (`alike` is 0), there are no causes."""
        trace, joined = self._recording.columns, self._recording.joined
        row, walls_ns = int(joined.rows[self._places[0]]), trace.total_ns[joined.rows]
        wall_ns = round(float(walls_ns[self._places].mean()))
        explanation = Explanation(
            name=trace.sites[trace.site[row]].name,
            keys=joined.keys.get(int(self._places[0]), ()) if requests == 1 else (),
            requests=requests,
            span_id=int(trace.span_id[row]),
            begin_ns=int(trace.start_ns[row]) - self._recording.trace.start_ns,
            wall_ns=wall_ns,
            typical_ns=wall_ns,
            usual_most_ns=wall_ns,
            doubt=doubt,
            not_assessed=tuple(_list_unassessed_causes(self._recording, self._times)),
            _options=self._options,
        )
        if not alike:
            return explanation
        typical_ns = float(walls_ns[self._typical].mean())
        excess_ns = wall_ns - typical_ns
        claims, more_work_ns, doubts = self._examine_causes()
        shares, rivals, remaining_ns = _divide_excess(claims, excess_ns)
        parts, usual = (
            _mean_times([self._times.times_by_part(place) for place in side.tolist()])
            for side in (self._places, self._typical)
        )
        rows = [PartExcess(name, round(parts[name]), round(usual[name])) for name in {**parts, **usual}]
        verdict = INCONCLUSIVE
        if doubt:
            pass
        elif wall_ns - more_work_ns <= max(most_ns, typical_ns * (1 + LEAST_SHARE)):
            verdict = TYPICAL
        elif not shares or shares[0].accounted_ns < MOSTLY * excess_ns:
            doubt = "no cause accounts for most of the excess"
        else:
            doubt = doubts.get(shares[0].name, "")
            verdict = INCONCLUSIVE if doubt else EXPLAINED
        return replace(
            explanation,
            typical_ns=round(typical_ns),
            usual_most_ns=round(most_ns),
            alike=alike,
            is_like=self._is_like,
            verdict=verdict,
            doubt=doubt,
            causes=tuple(map(self._add_proofs, shares)),
            unexplained_ns=round(max(remaining_ns, 0.0)),
            rivals=rivals,
            parts=tuple(sorted(rows, key=lambda row: -row.excess_ns)),
        )

    def _times_by_path(self, cause: str) -> dict[str, tuple[float, float]]:
        keys = [key for key in {**self._of_requests, **self._usual} if key[0] == cause]
        return {path: (self._of_requests[cause, path], self._usual[cause, path]) for _, path in keys}

    def _examine_causes(self) -> tuple[list[CauseShare], float, dict[str, str]]:
        """Return all causes with their times, the time of additional engine steps, and reasons to doubt some causes."""
        claims = [self._examine_cause(cause) for cause in CAUSES if cause != listed.BURST]
        load = self._times_by_path(listed.LOAD)
        queued_ns, usually_queued_ns = load.pop(listed.IN_QUEUE, (0.0, 0.0))
        served_ns, usually_served_ns = load.pop(listed.IN_BATCH, (0.0, 0.0))
        steps, usual_steps = (
            sum(len(self._times.find_serving_steps(place)[0]) for place in side.tolist()) / len(side)
            for side in (self._places, self._typical)
        )
        more_work_ns = 0.0
        if not self._is_like and steps > usual_steps:
            more_work_ns = served_ns * (1 - usual_steps / steps)
            path = f"{MORE_STEPS}, {steps:.4g} where {usual_steps:.4g} are typical"
            claims.append(_make_cause_share(listed.OWN, path, more_work_ns, 0.0))
            served_ns -= more_work_ns
        if self._arrived > self._usually_arrive + 3 * math.sqrt(self._usually_arrive) + 1:
            spent_ns, usual_ns = queued_ns + served_ns, usually_queued_ns + usually_served_ns
            claims.append(_make_cause_share(listed.BURST, "", spent_ns, usual_ns))
        elif queued_ns > usually_queued_ns:
            causes = (listed.SLOW, listed.PREFILL, listed.PADDING, listed.FIRST, listed.DEVICE, listed.COPY)
            lead = max((claim for claim in claims if claim.name in causes), key=_compute_excess)
            if _compute_excess(lead) > (queued_ns - usually_queued_ns) / 4:  # the queue grew meanwhile
                claims.remove(lead)
                time_ns, typical_ns = lead.time_ns + round(queued_ns), lead.typical_ns + round(usually_queued_ns)
                claims.append(replace(lead, time_ns=time_ns, typical_ns=typical_ns))
        claims, doubts = self._move_time_to_pressure(claims)
        if listed.CONTENTION not in self._pressure_ns:
            not_assessed = "and processor contention is not assessed"
            if any(claim.name == listed.SLOW and claim.path == listed.SPREAD for claim in claims):
                doubts.setdefault(listed.SLOW, f"all call paths were slower alike, {not_assessed}")
            doubts.setdefault(listed.FILL, f"the engine waited for a batch to fill, or did not run, {not_assessed}")
        return [claim for claim in claims if claim.time_ns or claim.typical_ns], more_work_ns, doubts

    def _examine_cause(self, cause: str) -> CauseShare:
        by_path = self._times_by_path(cause)
        spent_ns, usual_ns = (sum(times[side] for times in by_path.values()) for side in (0, 1))
        more_ns = {path: times[0] - times[1] for path, times in by_path.items()}
        path = max(more_ns, key=lambda path: more_ns[path], default="")
        if len(more_ns) > 1 and more_ns[path] < MOSTLY * (spent_ns - usual_ns):
            path = listed.SPREAD
        return _make_cause_share(cause, path, spent_ns, usual_ns)

    def _move_time_to_pressure(self, claims: Sequence[CauseShare]) -> tuple[list[CauseShare], dict[str, str]]:
        """Move time from slow calls to processor contention or memory pressure, if gauges prove it. Also return reasons
        to doubt some causes."""
        extra_ns = self._pressure_ns
        slowed = [claim for claim in claims if claim.name in SLOWED and _compute_excess(claim) > 0]
        slowed_ns = sum(map(_compute_excess, slowed))
        likely = [name for name, ns in sorted(extra_ns.items(), key=lambda item: -item[1]) if ns >= MOSTLY * slowed_ns]
        if not likely or not slowed:
            return list(claims), {}
        lead = max(slowed, key=_compute_excess)
        if lead.path != listed.SPREAD and _compute_excess(lead) >= slowed_ns / 4:
            return list(claims), {lead.name: f"{likely[0]} is as likely: the gauges show it in the same time"}
        doubts = {likely[0]: f"{likely[1]} is as likely: the gauges show both"} if len(likely) > 1 else {}
        moved_ns = slowed_ns if extra_ns[likely[0]] >= NEARLY * slowed_ns else extra_ns[likely[0]]
        remaining = [
            replace(claim, time_ns=round(claim.time_ns - moved_ns * _compute_excess(claim) / slowed_ns))
            if claim in slowed
            else claim
            for claim in claims
        ]
        return [*remaining, _make_cause_share(likely[0], "", moved_ns, 0.0)], doubts

    def _add_proofs(self, share: CauseShare) -> CauseShare:
        proofs = tuple(self._times.find_proofs(self._slowest, share.name, share.path))
        note = CAUSES[share.name]
        if share.name == listed.BURST:
            values = filter(None, attribute_values(self._recording.columns, self._arrived_rows, self._by))
            largest, count = next(iter(Counter(values).most_common(1)), ("", 0))
            group = f" ({count} of them of {self._by} {shorten(printable(largest), KEY_LENGTH)})" if count else ""
            note = (
                f"{self._arrived} requests arrived in {self._arrival_ns / 1e6:.4g} ms{group}, where "
                f"{self._usually_arrive:.3g} are usual"
            )
        elif share.path.startswith(MORE_STEPS) and (facts := self._times.describe_engine_facts(self._slowest)):
            note = f"{note} ({facts})"
        elif (
            share.name in (listed.BLOCKED, listed.PREFILL, listed.PREEMPTED, listed.LOCK) and proofs and proofs[0].note
        ):
            note = f"{note} ({proofs[0].note})"
        elif share.name in STOPPED and proofs and proofs[0].time_ns >= MOSTLY * share.accounted_ns:
            unseen = [] if listed.CONTENTION in self._pressure_ns else [listed.CONTENTION]
            unseen += [] if len(self._times.collections) else [listed.COLLECTED]
            if unseen:
                note = f"{note}; one call has most of it, and {' or '.join(unseen)}, not assessed, would look alike"
        return replace(share, proofs=proofs, note=note)


def _mean_times(sides: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    means = defaultdict[Any, float](float)
    for times in sides:
        for key, spent_ns in times.items():
            means[key] += spent_ns / len(sides)
    return means


def _compute_excess(claim: CauseShare) -> float:
    return claim.time_ns - claim.typical_ns


def _make_cause_share(cause: str, path: str, spent_ns: float, usual_ns: float) -> CauseShare:
    """Return a cause that accounts for no excess yet. If the typical time is negative, both times are raised by the
    same amount."""
    faster_ns = max(-usual_ns, 0.0)
    return CauseShare(cause, path, round(spent_ns + faster_ns), round(usual_ns + faster_ns), 0, None)


def _divide_excess(
    claims: Sequence[CauseShare], excess_ns: float
) -> tuple[list[CauseShare], tuple[CauseShare, ...], float]:
    """Divide the excess among the causes, the largest first. Return the causes that account for a part, the other
    causes, and the unexplained ns."""
    shares, rivals, remaining_ns = [], [], excess_ns
    for claim in sorted(claims, key=lambda claim: (-_compute_excess(claim), claim.name)):
        accounted_ns = min(_compute_excess(claim), remaining_ns)
        if accounted_ns > NOTABLE * max(excess_ns, 0.0) and accounted_ns > 0:
            remaining_ns -= accounted_ns
            shares.append(replace(claim, accounted_ns=round(accounted_ns), ratio=accounted_ns / excess_ns))
        else:
            rivals.append(replace(claim, note=f"{claim.time_ns / 1e6:.4g} ms, typical {claim.typical_ns / 1e6:.4g}"))
    return shares, tuple(rivals), remaining_ns


def _list_unassessed_causes(recording: Recording, times: CauseTimes) -> list[str]:
    trace, facts = recording.columns, recording.trace
    gauges = {sample.name for samples in read_host_gauges(facts) for sample in samples}
    steps = (listed.BURST, listed.SLOW, listed.PREFILL, listed.FILL, listed.PREEMPTED, listed.PADDING)
    batches = ", ".join(steps), False, "no rule has `batch:`"
    if len(times.costs.rows):
        has_sizes = np.ptp(recording.compute_once(listed.find_member_weights)) > 0
        unknown = (listed.PADDING,) if has_sizes else (listed.PREFILL, listed.PADDING)
        has_weights = bool(np.ptp(times.joined.served.weight))
        batches = ", ".join(unknown), has_weights, "no weights of `batch:` say how large the members are"
    lock = "no rule has a function that acquires one, such as `asyncio.locks:Lock.acquire`"
    known_causes: list[tuple[str, object, str]] = [
        (listed.LOCK, len(times.locks), lock),
        batches,
        (listed.COLLECTED, len(times.collections), "none was recorded"),
        (listed.BLOCKED, len(times.blocks), "none was recorded"),
        (listed.EXECUTOR, any(site.name == EXECUTOR_QUEUE for site in trace.sites), "no wait for one was recorded"),
        (listed.COPY, any(site.kind == "copy" for site in trace.sites), "none was recorded"),
        (listed.DEVICE, len(trace.device), "no device time"),
        (listed.FIRST, times.knows_first_calls, "the start of the process is not in the recording"),
        *((cause, gauge in gauges, "no gauge") for cause, gauge in listed.PRESSURES.items()),
        (listed.INSTRUMENT, facts.cost is not None, "its cost is not known"),
    ]
    return [f"{cause} ({reason})" for cause, is_known, reason in known_causes if not is_known]
