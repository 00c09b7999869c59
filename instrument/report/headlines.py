"""The headlines of a report: up to three sentences on the largest times, the likely reason, and the view to read next.

They name the largest part of the busiest endpoint's time, the part that makes its p99 slow, and one more large cause,
such as blocked event loops. Without requests, the first headline is about steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from instrument.recording.spans import is_collection
from instrument.report.benchmark_view import Loops
from instrument.report.device_view import DeviceView
from instrument.report.endpoint_statistics import BlockedLoops, EndpointTimes
from instrument.report.phases_view import PhasesView
from instrument.report.request_groups import mask_requests_by_name
from instrument.report.requests_view import RequestTimes, request_table
from instrument.report.table import LINE, format_percent, format_time, printable, shorten
from instrument.report.view import Options, Recording
from instrument.trace.intervals import make_union
from instrument.trace.ledger import COPIES, LOCK, QUEUE, SHARE, STALL, SUB_REQUESTS, TRANSPORT, UNKNOWN, WAITING

if TYPE_CHECKING:
    from instrument.report.batches_view import NamedBatches

MOST = 3

ENOUGH = 10
"""The minimum number of requests, steps or device intervals that a headline is based on."""

ENOUGH_FOR_P99 = 100
"""The minimum number of requests that a headline on their p99 is based on."""

SLOWEST = 5
"""The minimum number of slowest requests, over whose mean the headline on the p99 is made."""

NOTABLE = 0.2
"""The minimum share of the time for which a part gets a headline."""

NOTABLE_STOP = 0.05
"""The minimum share of the window for which blocked event loops or garbage collections get a headline."""

SLOW = 1.2
"""The minimum ratio of p99 to p50 for a headline on the p99."""

FULL = 0.8
"""Batches count as full if their mean size is at least this share of the largest size."""


@dataclass(frozen=True, slots=True)
class Headline:
    """A sentence on one `part` of the time. `ratio` is the share of the part, and `view` has more details. `evidence`
    is the number of requests, steps, stops or device intervals from which the sentence follows."""

    text: str
    part: str
    ratio: float
    evidence: int
    view: str


class PartMeaning(NamedTuple):
    """The words for one part of a request's time. `advice` is for a part that takes much time."""

    place: str
    advice: str
    view: str


MEANINGS: Mapping[str, PartMeaning] = {
    QUEUE: PartMeaning("in the queue", "its requests wait for a first batch", "requests"),
    "queue (executor)": PartMeaning(
        "in the queue of a thread pool", "give the pool more threads, or less work", "requests"
    ),
    LOCK: PartMeaning("waiting for locks", "find who has them: `instrument explain`", "requests"),
    SHARE: PartMeaning("in its own share of batches", "this is its own work; find the slowest functions", "ops"),
    WAITING: PartMeaning("on others in its batches", "smaller batches shorten it", "batches"),
    STALL: PartMeaning("between two batches", "the engine serves others, or does other work", "requests,ops"),
    TRANSPORT: PartMeaning("between threads and processes", "its requests wait to be sent or received", "requests"),
    SUB_REQUESTS: PartMeaning("in requests within it", "see their own endpoint", "requests"),
    UNKNOWN: PartMeaning(
        "outside of phases", "find its largest functions; `instrument init` proposes rules for more", "ops"
    ),
    COPIES["h2d"]: PartMeaning(
        "in copies to the device", "pinned memory and fewer, larger copies shorten it", "copies"
    ),
    COPIES["d2h"]: PartMeaning("in copies from the device", "copy less, or later", "copies"),
    "copy": PartMeaning("in copies", "fewer, larger copies shorten it", "copies"),
    "comm": PartMeaning("in communication", "let it run while others compute", "distribution"),
    "load": PartMeaning("in the wait for input", "load it earlier, or with more workers", "benchmark"),
    "compute": PartMeaning("in layers of the model", "shorten the slowest layers", "ops"),
}
"""The words with which headlines describe each part of a request's time."""


def find_headlines(
    recording: Recording,
    options: Options,
    times: RequestTimes,
    steps: Loops | None,
    phases: PhasesView | None,
    devices: DeviceView,
) -> tuple[Headline, ...]:
    parts, of_p99 = list[Headline](), list[Headline]()
    endpoints = [endpoint for endpoint in times.endpoints if not endpoint.remaining]
    if endpoint := max(endpoints, key=lambda endpoint: endpoint.wall_ns, default=None):
        parts, of_p99 = _describe_parts(recording, options, endpoint), _describe_p99(recording, options, endpoint)
    elif steps is not None:
        parts = [*_describe_steps(steps, phases, options)]
    window_ns = recording.window_ns or 0
    other_causes = [
        *parts[1:],
        *_describe_blocked_loops(times.blocked, window_ns, options),
        *_describe_collections(recording, window_ns, options),
        *_describe_devices(devices),
    ]
    other_causes.sort(key=lambda headline: -headline.ratio)
    return (*_explain_slowest_request(recording, options, times), *parts[:1], *of_p99, *other_causes)[:MOST]


def _explain_slowest_request(recording: Recording, options: Options, times: RequestTimes) -> list[Headline]:
    if times.requests <= ENOUGH:
        return []
    from instrument.report.explanation import EXPLAINED, explain_request

    trace, joined = recording.columns, recording.joined
    place = int(np.flatnonzero(trace.span_id[joined.rows] == times.slowest[0].span_id)[0])
    explanation = explain_request(recording, place, options)
    if explanation.verdict != EXPLAINED:
        return []
    lead = explanation.causes[0]
    return [Headline(explanation.headline(), lead.name, lead.ratio or 0.0, explanation.alike, "requests")]


def _describe_parts(recording: Recording, options: Options, endpoint: EndpointTimes) -> list[Headline]:
    if endpoint.requests < ENOUGH:
        return []
    parts = {phase.name: phase.summed_ns for phase in endpoint.phases if not phase.remaining}
    parts[UNKNOWN] = endpoint.unknown_ns
    batch, lines = _find_main_batches(recording, endpoint), list[Headline]()
    for part, summed_ns in sorted(parts.items(), key=lambda item: -item[1]):
        ratio = summed_ns / endpoint.wall_ns if endpoint.wall_ns else 0.0
        if ratio < NOTABLE:
            break
        place, advice, view = _meaning_of_part(part)
        if batch is not None and part in (QUEUE, WAITING):
            advice, view = _advise_on_batches(batch, part), "batches"
        mean, whole = (format_time(ns, options.unit) for ns in (summed_ns / endpoint.requests, endpoint.mean_ns))
        took = f"{format_percent(ratio, 1)} of its time {place} ({mean} of {whole} {options.unit})"
        text = f"{_shorten_span_name(endpoint.name)} spends {took}: {advice}; see --view {view}."
        lines.append(Headline(text, part, ratio, endpoint.requests, view))
    return lines


def _meaning_of_part(part: str) -> PartMeaning:
    return MEANINGS.get(part) or PartMeaning(f"in the phase {_shorten_span_name(part)}", "shorten its functions", "ops")


def _advise_on_batches(batch: NamedBatches, part: str) -> str:
    members = (
        f"batches of {_shorten_span_name(batch.name)} have {batch.mean_size:.1f} requests, at most {batch.max_size}"
    )
    if part == WAITING:
        return f"{members}; smaller ones shorten it"
    if (batch.fill or 0.0) >= FULL:
        return f"{members}: shorten its steps, or add an engine"
    return f"{members}: find out what they wait for"


def _find_main_batches(recording: Recording, endpoint: EndpointTimes) -> NamedBatches | None:
    joined, trace = recording.joined, recording.columns
    served = joined.served
    is_served = np.append(mask_requests_by_name(recording, endpoint.name), False)[served.request]
    counts = Counter(trace.sites[site].name for site in trace.site[served.batch[is_served]].tolist())
    if not counts:
        return None
    from instrument.report.batches_view import batches  # few recordings have batches

    name = counts.most_common(1)[0][0]
    return next((row for row in batches(recording, Options()).rows if row.name == name), None)


def _describe_p99(recording: Recording, options: Options, endpoint: EndpointTimes) -> list[Headline]:
    if endpoint.requests < ENOUGH_FOR_P99 or endpoint.p99_ns < SLOW * endpoint.p50_ns:
        return []
    table = recording.compute_once(request_table)
    of_endpoint = np.flatnonzero(table.endpoint == table.names.index(endpoint.name))
    count = max(SLOWEST, len(of_endpoint) // 100)
    slowest = of_endpoint[np.argsort(-table.wall_ns[of_endpoint], kind="stable")[:count]]
    means: list[dict[str, float]] = []
    for requests in (slowest, of_endpoint):
        is_counted = np.isin(table.request, requests)
        sums = np.bincount(table.part[is_counted], table.time_ns[is_counted], len(table.parts)) / len(requests)
        means.append(dict(zip(table.parts, sums.tolist(), strict=True)))
    of_slowest, of_all = means
    part = max(of_slowest, key=lambda name: of_slowest[name] - of_all[name])
    excess_ns = float(table.wall_ns[slowest].mean()) - endpoint.mean_ns
    if of_slowest[part] - of_all[part] < NOTABLE * excess_ns:
        return []
    unit, ratio = options.unit, of_slowest[part] / float(table.wall_ns[slowest].mean())
    p99, p50, slow, usual = (
        format_time(ns, unit) for ns in (endpoint.p99_ns, endpoint.p50_ns, of_slowest[part], of_all[part])
    )
    text = (
        f"p99 of {_shorten_span_name(endpoint.name)} is {p99} {unit}, and p50 is {p50}: "
        f"the slowest {count} of {endpoint.requests} spend {slow} {unit} "
        f"{_meaning_of_part(part).place}; the mean of all requests is {usual}."
    )
    return [Headline(text, part, ratio, count, "requests")]


def _describe_steps(steps: Loops, phases: PhasesView | None, options: Options) -> Iterator[Headline]:
    loop = max(steps.loops, key=lambda loop: loop.steps, default=None)
    if loop is None or loop.steps < ENOUGH:
        return
    if loop.reader is not None and (loop.reader_ratio or 0.0) >= NOTABLE:
        waited = f"{format_time(loop.reader.mean, options.unit)} {options.unit} a step"
        text = (
            f"Steps of {_shorten_span_name(loop.name)} wait for their input for "
            f"{format_percent(loop.reader_ratio, 1)} of their time ({waited}): "
            "load it earlier, or with more workers; see --view benchmark."
        )
        yield Headline(text, "load", loop.reader_ratio or 0.0, loop.steps, "benchmark")
    rows = [] if phases is None or phases.of != "step" else [row for row in phases.rows[1:] if row.name != "others"]
    row = max(rows, key=lambda row: row.host.total_ns, default=None)
    if row is not None and (ratio := row.host.ratio or 0.0) >= NOTABLE:
        name = _shorten_span_name(row.name)
        text = f"Steps spend {format_percent(ratio, 1)} of their time in the phase {name}; see --view phases,ops."
        yield Headline(text, row.name, ratio, loop.steps, "phases,ops")


def _describe_blocked_loops(blocked: BlockedLoops | None, window_ns: int, options: Options) -> Iterator[Headline]:
    if blocked is None or not window_ns or (ratio := blocked.summed_ns / window_ns) < NOTABLE_STOP:
        return
    most = max(blocked.by, key=lambda row: (not row.remaining, row.summed_ns))
    by = "" if most.remaining else f", mostly by {_shorten_span_name(most.name)}"
    text = (
        f"An event loop is blocked for {format_percent(ratio, 1)} of the window ({blocked.stretches} times, "
        f"{format_time(blocked.longest_ns, options.unit)} {options.unit} at most{by}), and its requests wait: run this "
        "on a thread; see --view requests."
    )
    yield Headline(text, "loop blocked", ratio, blocked.stretches, "requests")


def _describe_collections(recording: Recording, window_ns: int, options: Options) -> Iterator[Headline]:
    trace = recording.columns
    rows = np.flatnonzero(trace.are_of_sites([is_collection(site) for site in trace.sites]))
    if not len(rows) or not window_ns:
        return
    ratio = make_union(trace.start_ns[rows], trace.end_ns[rows]).length_ns() / window_ns
    if ratio < NOTABLE_STOP:
        return
    longest = f"{format_time(int(trace.total_ns[rows].max()), options.unit)} {options.unit}"
    text = (
        f"Garbage collection stops a process for {format_percent(ratio, 1)} of the window ({len(rows)} times, "
        f"{longest} at most): make fewer objects, or call gc.freeze() after the start; see --view overview."
    )
    yield Headline(text, "garbage collection", ratio, len(rows), "overview")


def _describe_devices(view: DeviceView) -> Iterator[Headline]:
    uses = [(use, sum(stream.intervals for stream in use.streams)) for use in view.devices]
    for state, name, base, advice in (
        ("idle while requests are in flight", "starved_in_flight_ratio", "of that time", "feed it sooner"),
        ("perhaps waiting for the host to launch work", "launch_bound_ratio", "of its busy time", "CUDA graphs help"),
        ("copying without computing", "copy_ratio", "of the window", "copy while it computes"),
    ):  # fmt: skip
        shares = [(getattr(use, name) or 0.0, count, use.device) for use, count in uses if count >= ENOUGH]
        ratio, intervals, device = max(shares, default=(0.0, 0, 0))
        if ratio >= NOTABLE:
            text = f"GPU {device} is {state} for {format_percent(ratio, 1)} {base}: {advice}; see --view device."
            yield Headline(text, state, ratio, intervals, "device")


def describe_requests_in_flight(places: Sequence[tuple[str, int]]) -> str:
    """Return a sentence that names the span with at least half of the requests in flight. Return "" without such a
    span, or with few requests. `places` has the name and the age in ns of each request's current span."""
    counts = Counter(name for name, _ in places if name)
    if len(places) < SLOWEST - 2 or not counts:
        return ""
    name, count = counts.most_common(1)[0]
    if 2 * count < len(places):
        return ""
    oldest_ns = max(age_ns for place, age_ns in places if place == name)
    longest = f"the longest for {format_time(oldest_ns, 's')} s"
    return f"{count} of {len(places)} requests in flight are in {_shorten_span_name(name)}, {longest}."


def _shorten_span_name(text: str) -> str:
    return shorten(printable(text) or "(no name)", LINE // 4)
