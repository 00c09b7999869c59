"""The `device` view: what each device did with the window, by stream, by name and within requests.

The figures are those of `utilisation`. Shares of time are unions and name what they are a
share of, work by name is a sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from instrument.recording.spans import UNTIMED
from instrument.report.coverage import Coverage, none_held
from instrument.report.device_summary import DeviceSummary, device_summary
from instrument.report.section import Section
from instrument.report.table import (
    bounded,
    in_unit,
    number,
    safe,
    section_title,
    table,
    tenths,
    title,
)
from instrument.report.utilisation import DeviceUse, EndpointUse, NameUse, Unanswered, utilisation
from instrument.report.view import Options, Recording

SHORT_NS = 10_000
"""Mean device time of a call below which a pair of events reads too long: published figures say six times."""

LABEL_WIDTH = 44
COLUMN_WIDTH = 10


@dataclass(frozen=True, slots=True)
class DeviceView:
    """What each device did; fields of `Utilisation`, without the single requests, and what the gauges read.

    `reasons` counts the unanswered spans by reason. `is_ours` tells a trace of ours from one of another profiler.
    """

    coverage: Coverage
    gauges: DeviceSummary | None
    devices: tuple[DeviceUse, ...]
    asked: int
    unanswered: tuple[Unanswered, ...]
    reasons: Mapping[str, int]
    in_flight_ns: int
    requests_cut: int
    requests_without: int
    is_ours: bool
    _options: Options

    def sections(self) -> list[Section]:
        devices = Section(
            "Devices", self.devices,
            "device=Device|busy_ns=Busy|busy_ratio=Of window|compute_ns=Compute|copy_ns=Copies|starved_ns=Starved|"
            "starved_ratio=Starved|unasked_ns=Unasked|launch_bound_ns=Launch-bound|overlap_ns=Two streams|"
            "most_streams=Streams",
            (
                "Starved: idle while a request was in flight. Unasked: idle while none was. Launch-bound: of busy,",
                "what launch-bound stretches alone tell of.",
            ),
        )  # fmt: skip
        of_each = [section for one in self.devices for section in _of_device(one)]
        return [devices, *of_each, self.without(), *([] if self.gauges is None else [self.gauges.section()])]

    def without(self) -> Section:
        """Spans without device time, by name."""
        columns = "name=Without device time|kind=Kind|spans=Spans|why=Why"
        return Section("Without device time", self.unanswered, columns, widths=COLUMN_WIDTH)

    def lines(self) -> list[str]:
        lines = [*title("Device Report"), *self.coverage.lines(), f"Time unit: {self._options.unit}", ""]
        if self.gauges is not None:
            lines += self.gauges.lines()
        if not self.devices:
            complete = self.coverage.complete or self.asked > 0 or not self.is_ours
            lines += [*none_held("span with device time", self.why_none(), complete=complete), ""]
        for one in self.devices:
            lines += _device_lines(one, self)
        lines += _unanswered_lines(self)
        notes = _notes(self)
        return [*lines, *notes, *([""] if notes else [])]

    def why_none(self) -> str:
        """Why there is no device time at all, a sentence."""
        why = "no span asked for it; give its rule `device: true` in the profile"
        if self.asked:
            parts = ", ".join(f"{spans} {safe(reason)}" for reason, spans in self.reasons.items())
            why = f"{self.asked} span{'s' * (self.asked > 1)} asked for it and got none ({parts})"
        elif not self.is_ours:
            why = "kernels in a trace of another profiler are spans of their own, as in the events view"
        return f"No device time was recorded: {why}."


def device(recording: Recording, options: Options) -> DeviceView:
    """The view, from the spans that are held.

    `rows` bounds each table of names to its largest rows and `least_ns` the table of device times to names with so
    much of it; the rest is one row more.
    """
    facts = recording.facts
    use = recording.once(utilisation)
    reasons = Counter[str]()
    for one in use.unanswered:
        reasons[one.reason] += one.spans
    return DeviceView(
        coverage=Coverage.of_recording(recording),
        gauges=device_summary(facts.samples, facts.gpus, options) if facts.samples else None,
        devices=tuple(
            replace(
                each,
                names=bounded(each.names, options, lambda name: name.summed_ns, _other_names),
                endpoints=bounded(each.endpoints, options, lambda endpoint: endpoint.wall_ns, other_endpoints),
            )
            for each in use.devices
        ),
        asked=use.asked,
        unanswered=bounded(use.unanswered, replace(options, least_ns=0), lambda _: 0, _other_unanswered),
        reasons=dict(reasons.most_common()),
        in_flight_ns=use.in_flight_ns,
        requests_cut=use.requests_cut,
        requests_without=use.requests_without,
        is_ours=facts.origin.recorder != "other",
        _options=options,
    )


def _other_names(rest: Sequence[NameUse]) -> NameUse:
    calls, summed_ns = sum(name.calls for name in rest), sum(name.summed_ns for name in rest)
    return NameUse("", "", calls, summed_ns, None, None, None, None, remaining=len(rest))


def other_endpoints(rest: Sequence[EndpointUse]) -> EndpointUse:
    parts = [(one.requests, one.wall_ns, one.own_ns, one.others_ns, one.starved_ns) for one in rest]
    return replace(EndpointUse("", *map(sum, zip(*parts, strict=True))), remaining=len(rest))


def _other_unanswered(rest: Sequence[Unanswered]) -> Unanswered:
    return Unanswered("", "", "", sum(one.spans for one in rest), remaining=len(rest))


def _device_lines(one: DeviceUse, view: DeviceView) -> list[str]:
    unit = view._options.unit
    lines = section_title(f"Device {one.device}")
    parts = [
        ("Busy with compute", one.compute_ns, one.compute_ratio),
        ("Busy with copies alone", one.copy_ns, one.copy_ratio),
        ("Idle while a request was in flight (starved)", one.starved_ns, one.starved_ratio),
        ("Idle while none was", one.unasked_ns, one.unasked_ratio),
        ("Window", one.window_ns, 1.0 if one.window_ns else None),
    ]
    cells = [[label, in_unit(part_ns, unit), tenths(ratio, 1)] for label, part_ns, ratio in parts]
    lines += table(["Time of the device", "Time", "Of window"], cells, [LABEL_WIDTH, COLUMN_WIDTH, 0])
    more = [
        ("Busy", one.busy_ns, one.busy_ratio, "window"),
        ("Two or more streams busy", one.overlap_ns, one.overlap_ratio, "busy"),
        ("Busy by launch-bound stretches alone", one.launch_bound_ns, one.launch_bound_ratio, "busy"),
        ("Copies beside compute", one.hidden_copy_ns, one.hidden_copy_ratio, "copies"),
        ("Starved, of the time with requests in flight", one.starved_ns, one.starved_in_flight_ratio, "in flight"),
    ]
    cells = [[label, in_unit(part_ns, unit), tenths(ratio, 1), base] for label, part_ns, ratio, base in more]
    widths = [LABEL_WIDTH, COLUMN_WIDTH, COLUMN_WIDTH, 0]
    lines += ["", *table(["Unions of time", "Time", "Ratio", "Of"], cells, widths), ""]
    for section in _of_device(one)[:3]:
        lines += [*section.table(unit), *section.notes, ""]
    lines += [*_request_lines(one, view), ""]
    if one.outside:
        are = "stretch lies outside of the window and is" if one.outside == 1 else "stretches lie outside of it and are"
        lines += [f"{one.outside} {are} not counted.", ""]
    return lines


def _of_device(one: DeviceUse) -> tuple[Section, Section, Section, Section]:
    """What a device did by stream, label, name, and request."""
    kinds = Counter(use.name for use in one.names)
    mean = number(one.mean_streams)
    clock: tuple[str, ...] = ()
    if one.uncertainty_ns is not None:
        least, greatest = (number(value_ns / 1e3) for value_ns in one.uncertainty_ns)
        spread = least if least == greatest else f"{least} to {greatest}"
        clock = (f"Place on the host's clock: known within {spread} us",)
    return (
        Section(
            f"Streams of GPU {one.device}", one.streams,
            "stream=Stream|intervals=Stretches|busy_ns=Busy|window_ratio=Of window|summed_ns=Sum",
            (f"Streams busy at once, in the busy time: {mean} in the mean, {one.most_streams} at most",),
            widths=(20, *[COLUMN_WIDTH] * 3, 0),
        ),
        Section(
            f"Labels on GPU {one.device}", one.labels, "label=Label|intervals=Stretches|summed_ns=Sum", clock,
            widths=COLUMN_WIDTH,
        ),
        Section(
            f"By name on GPU {one.device}", one.names,
            "name=By name|+kind=Kind|calls=Calls|summed_ns=Sum|mean_ns=Mean|p50_ns=p50|p99_ns=p99|busy_ns=Busy|"
            "busy_ratio=Of busy",
            texts={
                "name": lambda use, unit: f"{use.name} ({use.kind})" if kinds[use.name] > 1 else use.name,
            },
            widths=COLUMN_WIDTH,
        ),
        by_endpoint(f"By request on GPU {one.device}", one.endpoints),
    )  # fmt: skip


def by_endpoint(title: str, endpoints: Sequence[EndpointUse]) -> Section:
    """What a device did within requests, by their name: means, and shares of the wall."""
    return Section(
        title, endpoints,
        "name=By request|requests=Requests|wall_mean_ns=Wall|own_mean_ns=Own|own_ratio=|others_mean_ns=Others|"
        "others_ratio=|starved_mean_ns=Starved|starved_ratio=",
        (
            "Within the wall of those that used it the device was busy with their own work, with that of",
            "others alone, or idle (starved): means, and shares of the wall.",
        ),
    )  # fmt: skip


def _request_lines(one: DeviceUse, view: DeviceView) -> list[str]:
    lines = _of_device(one)[3].table(view._options.unit) if one.endpoints else []
    left_out = [(view.requests_cut, "at an edge of the window"), (view.requests_without, "without any device time")]
    told = ", ".join(f"{count} {why}" for count, why in left_out if count)
    lines += [f"Requests left out: {told}"] if told else []
    return lines or ["No request was in flight."]


def _unanswered_lines(view: DeviceView) -> list[str]:
    """The spans without device time, by name, where there is more to say of them than how many they are."""
    if not view.devices and not any(one.reason in UNTIMED for one in view.unanswered):
        return []
    missing = sum(one.spans for one in view.unanswered)
    lines = section_title("Device time asked for")
    lines.append(f"Spans that asked for device time: {view.asked}; that got none: {missing}")
    if missing:
        lines += ["", *view.without().table(view._options.unit)]
    return [*lines, ""]


def _notes(view: DeviceView) -> list[str]:
    """What a reader has to know to read the figures right, where it applies."""
    if not view.devices:
        return []
    names = [name for one in view.devices for name in one.names]
    lines = [
        "A stretch is the time of a stream between two events, not a kernel: gaps between kernels, and what",
        "the device put in between, are part of it.",
        "Idle: no instrumented device work. What no instrumented span timed is not seen.",
        "Sum: over calls, so that work side by side counts for each. Busy: the union of the same calls. An",
        "outer call's stretch holds those of the calls below it: shares of busy may exceed 100% together.",
    ]
    if any(one.endpoints for one in view.devices):
        lines += [
            "Wall, own, others, starved: means. Within a request's host time the device was busy with its own",
            "spans, with others alone, or idle; ratios are of wall.",
        ]
    if any(one.launch_bound_ns for one in view.devices):
        lines += [
            "Launch-bound stretches end as soon as the host asks for it, for the stream has run dry: within them",
            "the device may have waited for the host to launch, and the gauges tell how much it really did.",
        ]
    if any(label.label == "stale" for one in view.devices for label in one.labels):
        lines.append("Stale stretches have the right length and an uncertain place: sums hold, unions may not.")
    if any(name.summed_ns < SHORT_NS * name.calls for name in names):
        lines.append("Stretches below 0.01 ms may read several times too long: events take time themselves.")
    return lines
