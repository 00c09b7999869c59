"""The `brief` view: one screen on requests, the largest parts of their time, devices, the cost and the losses.

Jobs that have steps instead of requests get the numbers of the views `benchmark` and `phases`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from instrument.recording.spans import NO_DEVICE_TIME, Cost
from instrument.report.benchmark_view import Loops, benchmark
from instrument.report.device_view import DeviceView, device
from instrument.report.headlines import Headline, find_headlines
from instrument.report.phases_view import PhasesView, phases
from instrument.report.requests_view import RequestTimes, list_parts_with_unknown, requests
from instrument.report.section import BLANK, Section, View
from instrument.report.self_times_view import NO_CALL, FunctionTimes, ops
from instrument.report.table import (
    LINE,
    compute_share,
    format_percent,
    format_rough_percent,
    format_time,
    make_title_lines,
    measure_width,
    number_text,
    printable,
    row_name,
    shorten,
    wrap_text,
)
from instrument.report.view import Options, Recording

MOST_LINES = 57
"""The maximum number of lines of the view, so that it fits a screen of 60 lines."""

PLACES = 7
"""The maximum number of rows in the table of self times."""

PARTS = 6
"""The maximum number of endpoints, and of the parts of a request or step. A last row sums up the rest."""

DEVICES = 3
LAUNCH_BOUND_FROM = 0.1
"""The smallest launch-bound share of a device's busy time that is reported."""

LOSSES = 3
NOTE_LINES, NOTE_LINES_BELOW_HEADLINES = 6, 4
"""The maximum numbers of lines for notes on what was not observed. The second number applies if there are headlines."""

NO_REQUEST = "No request was recorded: see `Not observed` below."
MORE = "More: `instrument report FILE --view {}`; `instrument help reports` explains all."


@dataclass(frozen=True, slots=True)
class Brief(View):
    """The `brief` view. It shows the requests, or the steps and their phases if there are no requests. `places` are the
    largest self times, None if no call was counted."""

    headlines: tuple[Headline, ...]
    service: str
    window_ns: int
    recorder: str
    requests: RequestTimes
    steps: Loops | None
    phases: PhasesView | None
    places: FunctionTimes | None
    device: DeviceView
    cost: Cost | None
    losses: Mapping[str, int]
    notes: tuple[str, ...]
    _options: Options = field(repr=False)

    def sections(self) -> list[Section]:
        unit, times = self._options.unit, f"mean_ns=Mean, {self._options.unit}|p50_ns=p50|p99_ns=p99|max_ns=Max"
        served = []
        if self.requests.requests:
            columns = f"name=Request, and its parts|count=Count|errors=Errors|{times}|ratio=Of wall"
            served.append(Section("", _request_rows(self.requests), columns))
            if self.requests.groups:
                columns = f"name=By {printable(self._options.requests_by or '')}|requests=Count|errors=Errors|{times}"
                served.append(Section("", self.requests.groups, columns))
        elif self.steps is not None and self.steps.loops:
            columns = f"name=Step, and its phases|count=Count|{times}|rate=A second|ratio=Of steps"
            served.append(Section("", _step_rows(self.steps, self.phases), columns))
        columns = (
            f"path=Where the time went|time_ns=Self, {unit}|ratio=Of all|calls=Calls|p50_ns=Call p50|p99_ns=p99|"
            "max_ns=Max|where=On"
        )
        places = list[Any]() if self.places is None else [*self.places.rows]
        if self.places is not None and (omitted := self.places.remaining) is not None:
            numbers = {"time_ns": omitted.time_ns, "ratio": omitted.ratio, "calls": omitted.calls, "p50_ns": None}
            blanks = dict.fromkeys(("max_ns", "p99_ns", "where"), BLANK)
            places.append(SimpleNamespace(path="", remaining=omitted.rows, **numbers, **blanks))
        return [*served, Section("", places, columns)]

    def lines(self) -> list[str]:
        unit = self._options.unit
        why = next((note for note in self.notes if note.startswith(NO_DEVICE_TIME)), "")
        other_notes = [note for note in self.notes if note != why]
        service = shorten(printable(self.service), LINE // 2)
        lines = make_title_lines(f"Summary of {service}" if service else "Summary")
        lines += [line for headline in self.headlines for line in _limit_to_two_lines(headline.text)]
        lines += [*[""] * bool(self.headlines), *self._window_lines(), ""]
        *served, places = self.sections()
        lines += [line for section in served for line in section.table(unit)]
        if self.requests.requests:
            lines += [*_describe_slowest_request(self.requests, unit), *_describe_blocked_loops(self.requests, unit)]
        elif served and self.steps is not None:
            lines += _describe_omitted_rows(len(self.steps.loops), "loops: --view benchmark")
        lines += [""] * bool(served)
        lines += [*(places.table(unit) if places.rows else [NO_CALL]), ""]
        lines += [*_device_lines(self.device, why), *_describe_process(self.device)]
        losses = [
            shorten(f"Not kept: {count} ({printable(reason)})", LINE)
            for reason, count in sorted(self.losses.items(), key=lambda loss: -loss[1])
        ]
        lines += _cost_lines(self)
        lines += [
            *_limit_lines("Not kept", losses or ["Not kept: nothing was lost."], LOSSES),
            *_note_lines(other_notes, NOTE_LINES_BELOW_HEADLINES if self.headlines else NOTE_LINES),
        ]
        views = "requests,events,cost" if self.requests.counted else "ops,events,cost"
        lines.append(MORE.format("benchmark,phases" if self.steps is not None else views))
        return [*lines, ""]

    def _window_lines(self) -> list[str]:
        window = f"{number_text(self.window_ns / 1e9)} s"
        has_more = self.requests.requests_cut and not self.requests.is_part  # which counts them where they have ended
        cut = f", {self.requests.requests_cut} more open at an edge of the window" if has_more else ""
        if self.requests.counted:
            errors = self.requests.errors
            ended = f"{errors} of them ended with an error" if errors else "none ended with an error"
            cancelled = sum(endpoint.cancelled for endpoint in self.requests.endpoints)
            broken_off = f", {cancelled} {'was' if cancelled == 1 else 'were'} cancelled" if cancelled else ""
            if self.requests.is_part:
                ended += f"; shown below: the newest {self.requests.requests}"
            ended += broken_off + self.requests.describe_late_failures()
            lines = wrap_text(f"Window: {window}; requests: {self.requests.counted}{cut}; {ended}")
        elif self.steps is not None and not cut:
            lines = [f"Window: {window}; steps: {sum(loop.steps for loop in self.steps.loops)}"]
        else:
            has_why = any(note.startswith("requests: ") for note in self.notes)
            why = f"No whole request is kept{cut}." if cut else NO_REQUEST if has_why else ""
            lines = wrap_text(f"Window: {window}. {why}" if why else f"Window: {window}")
        if self.requests.coverage.complete:
            return lines
        return [*lines, *self.requests.coverage.lines()]

    @property
    def cost_ratio(self) -> float | None:
        return None if self.cost is None else compute_share(self.cost.total_ns, self.window_ns)

    @property
    def most_cost_ratio(self) -> float | None:
        """The cost as a share of the window, if the probes' data were never in the processor's caches."""
        return None if self.cost is None else compute_share(self.cost.most_ns, self.window_ns)


def brief(recording: Recording, options: Options) -> Brief:
    """Return the `brief` view. The option `rows` can only reduce the rows of the tables. The options `tracer_option`,
    `state` and `threads` have no effect."""
    places = ops(recording, _set_row_limit(PLACES, options)).functions
    few = replace(_set_row_limit(PARTS, options), at_most=min(options.at_most, PARTS))
    served = requests(recording, few)
    steps = None if served.requests else benchmark(recording, few)
    loops = steps if steps is not None and steps.loops else None
    of_steps = phases(recording, few) if loops is not None else None
    devices, cost = device(recording, few), recording.cost
    return Brief(
        headlines=find_headlines(recording, options, served, loops, of_steps, devices),
        service=recording.trace.origin.service,
        window_ns=(cost.window_ns if cost is not None else 0) or recording.window_ns or 0,
        recorder=recording.recorder,
        requests=served,
        steps=loops,
        phases=of_steps,
        places=places[0] if places else None,
        device=devices,
        cost=cost,
        losses={reason: count for reason, count in recording.losses.items() if count},
        notes=recording.notes,
        _options=options,
    )


def _set_row_limit(rows: int, options: Options) -> Options:
    return replace(options, rows=min(options.rows or rows, rows))


class WorkRow(NamedTuple):
    """A row of the table: at `depth` 0 an endpoint or a loop, at `depth` 1 one of its parts."""

    name: str
    count: Any = BLANK
    errors: Any = BLANK
    mean_ns: Any = BLANK
    p50_ns: Any = BLANK
    p99_ns: Any = BLANK
    max_ns: Any = BLANK
    rate: Any = BLANK
    ratio: Any = BLANK
    depth: int = 0


def _request_rows(times: RequestTimes) -> list[WorkRow]:
    room = 2 * PARTS + 3 - len(times.endpoints) - len(times.groups)
    rows = []
    for endpoint in times.endpoints:
        of = f" of {endpoint.counted}" * (endpoint.counted > endpoint.requests)
        whole = endpoint.mean_ns, endpoint.p50_ns, endpoint.p99_ns, endpoint.max_ns
        rows.append(WorkRow(row_name(endpoint), f"{endpoint.requests}{of}", endpoint.errors, *whole))
        if not endpoint.phases:
            continue  # all of it would be unknown
        room -= len(endpoint.phases) + 1
        if room < 0:
            room = 0
            continue
        *phases, unknown = list_parts_with_unknown(endpoint)
        parts = [(row_name(phase), phase.requests, phase) for phase in phases]
        rows += [
            WorkRow(name, count, mean_ns=part.mean_ns, ratio=part.ratio, depth=1)
            for name, count, part in (*parts, ("unknown (no phase ran)", BLANK, unknown))
        ]
    return rows


def _describe_slowest_request(times: RequestTimes, unit: str) -> list[str]:
    request = times.slowest[0]
    name = shorten(printable(request.name) or "(no name)", LINE // 4)
    at = f"began {request.began}" if request.began else f"began {number_text(request.begin_ns / 1e9)} s after the start"
    identity = f", trace {request.trace_id}" if request.trace_id else f", span {request.span_id}"
    return wrap_text(f"Slowest: {name}, {format_time(request.wall_ns, unit)} {unit}, {at}{identity}")[:2]


def _describe_blocked_loops(times: RequestTimes, unit: str) -> list[str]:
    blocked = times.blocked
    if blocked is None:
        return []
    summed, longest = (f"{format_time(ns, unit)} {unit}" for ns in (blocked.summed_ns, blocked.longest_ns))
    counted = f"Loop blocked: {blocked.stretches} times, {summed} in all, at most {longest}"
    most = max(blocked.by, key=lambda row: (not row.remaining, row.summed_ns))
    if most.remaining:
        return [counted]
    at = f", at {printable(most.at)}" if most.at else ""
    return wrap_text(f"{counted}, mostly by {printable(most.name)}{at}")[:2]


def _step_rows(steps: Loops, of_steps: PhasesView | None) -> list[WorkRow]:
    rows = []
    for loop in steps.loops[:DEVICES]:
        batch, rate = loop.batch, None if loop.rate is None else f"{number_text(loop.rate.mean)} {loop.rate_of}"
        mean, p50, p99, most = (None,) * 4 if batch is None else (batch.mean, batch.p50, batch.p99, batch.most)
        rows.append(WorkRow(loop.name or "(no name)", loop.steps, BLANK, mean, p50, p99, most, rate))
    if of_steps is not None and of_steps.of == "step":
        heaviest = sorted(of_steps.rows[1:], key=lambda row: -row.host.total_ns)[:PARTS]
        rows += [
            WorkRow(row.name, row.calls, mean_ns=row.host.mean_ns, ratio=row.host.ratio, depth=1) for row in heaviest
        ]
    return rows


def _describe_omitted_rows(count: int, noun: str) -> list[str]:
    return [f"... ({count - DEVICES} more {noun})"] if count > DEVICES else []


def _device_lines(view: DeviceView, why: str) -> list[str]:
    """Return a line on each device, or the reason for missing device times. Return no line if nothing uses a GPU."""
    if not view.devices:
        if not why and not view.asked and not (view.gauges is not None and view.gauges.gpus):
            return []
        return wrap_text(f"Device: {printable(why) or view.explain_no_device_time()}")[:2]
    lines = []
    for use in view.devices[:DEVICES]:
        lines.append(
            f"Device {use.device}: busy {format_percent(use.busy_ratio, 1)} of the window, idle while a request was in "
            f"flight {format_percent(use.starved_ratio, 1)}, idle without {format_percent(use.unasked_ratio, 1)}"
        )
        if (use.launch_bound_ratio or 0.0) >= LAUNCH_BOUND_FROM:
            launching = format_percent(use.launch_bound_ratio, 1)
            lines.append(f"  Of its busy time {launching} is launch-bound: it may have waited for the host to launch")
    return [*lines, *_describe_omitted_rows(len(view.devices), "devices: --view device")]


def _describe_process(view: DeviceView) -> list[str]:
    rows = {row.gauge: row for row in view.gauges.rows if row.samples} if view.gauges is not None else {}
    cpu, memory = rows.get("process_cpu"), rows.get("process_memory_peak")
    parts = []
    if cpu is not None and cpu.mean is not None and cpu.most is not None:
        parts.append(f"{number_text(cpu.mean)}% of one core in the mean, {number_text(cpu.most)}% at most")
    if memory is not None and memory.most is not None:
        parts.append(f"{number_text(memory.most / 2**20)} MiB at most")
    return [f"Process: {'; '.join(parts)}"] if parts else []


def _cost_lines(view: Brief) -> list[str]:
    cost = view.cost
    if cost is None:
        return ["Cost: not known, the trace does not say it."]
    most, calls = "", f"{cost.calls} calls x {number_text(float(f'{cost.per_call_ns:.3g}'))} ns"
    if cost.most_ns > cost.total_ns:
        most = f", up to {format_rough_percent(view.most_cost_ratio)} with cold caches"
    threads = f", {number_text(float(f'{cost.thread_ns / 1e9:.3g}'))} s on threads of its own" if cost.thread_ns else ""
    by = f", {printable(view.recorder)} recorder" if view.recorder else ""
    return wrap_text(f"Cost: {format_rough_percent(view.cost_ratio)} of the window{most} ({calls}{by}{threads})")[:2]


def _note_lines(notes: Sequence[str], most_lines: int) -> Sequence[str]:
    blocks = [wrap_text(f"Not observed: {printable(note)}") for note in notes]
    if sum(map(len, blocks)) <= most_lines:
        return [line for block in blocks for line in block]
    lines = [block[0] if len(block) == 1 else _cut_line(block[0]) for block in blocks]
    return _limit_lines("Not observed", lines, most_lines)


def _limit_lines(heading: str, lines: Sequence[str], most: int) -> Sequence[str]:
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], f"{heading}: ... ({len(lines) - most + 1} more: --view cost)"]


def _limit_to_two_lines(text: str) -> list[str]:
    first, *more = wrap_text(text)
    return [first, *more] if len(more) < 2 else [first, _cut_line(more[0])]


def _cut_line(line: str) -> str:
    while measure_width(line) > LINE - 4:
        line = line.rpartition(" ")[0]
    return f"{line} ..."
