"""The `device` view: all gauges, and the use of each GPU in the window, by stream, by name and within requests.

In shares of time, parallel work counts once. The times of each name count parallel work once per call.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from instrument.recording.metric_definitions import GAUGES
from instrument.recording.spans import HOST, UNTIMED, Gpu, Sample
from instrument.report.device_use import (
    DeviceUse,
    EndpointUse,
    Unanswered,
    count_missing_time_reasons,
    measure_utilisation,
)
from instrument.report.request_groups import GroupShare, group_shares, make_shares_table
from instrument.report.section import Coverage, Section, View
from instrument.report.table import (
    GAP,
    LINE,
    compute_share,
    format_time,
    limit_rows,
    make_row_summer,
    number_text,
    printable,
    shorten,
    wrap_text,
)
from instrument.report.view import Options, Recording

NOT_REPORTED = "n/a"

NAME_WIDTH = 20
WIDTHS = (14, NAME_WIDTH + GAP, 7, 9, 12, 12, 12, 12)

UNITS = {"bytes": ("MiB", 2**20), "bytes/s": ("GB/s", 10**9)}
"""The printed unit for each unit of a gauge, with the factor between the two. Other units are not converted."""

_LABELS = dict.fromkeys(
    ("cores", "process_cpu", "process_memory", "process_memory_peak", "cpu_wait", "memory_pressure"), "CPU(Process)"
)


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """The readings of one gauge of one device. A counter has only a `total`, its growth from the first to the last
    reading."""

    device: int
    label: str
    gauge: str
    samples: int
    mean: float | None = None
    least: float | None = None
    most: float | None = None
    total: float | None = None

    def unit(self) -> str:
        return printed_unit(self.gauge)[0]

    def convert_to_printed_unit(self) -> DeviceRow:
        scale, numbers = printed_unit(self.gauge)[1], (self.mean, self.least, self.most, self.total)
        mean, least, most, total = (None if value is None else value / scale for value in numbers)
        return replace(self, mean=mean, least=least, most=most, total=total)


def make_gauge_rows(samples: Iterable[Sample]) -> list[DeviceRow]:
    values_by_gauge: dict[tuple[int, str], list[float]] = {}
    for sample in samples:
        values = values_by_gauge.setdefault((sample.device, sample.name), [])
        if sample.value is not None:
            values.append(sample.value)
    places = {name: place for place, name in enumerate(GAUGES)}
    rows = []
    for device, name in sorted(values_by_gauge, key=lambda key: (key[0], places.get(key[1], len(places)), key[1])):
        values = values_by_gauge[device, name]
        label = f"GPU {device}" if device != HOST else _LABELS.get(name, "CPU(System)")
        if not values:
            rows.append(DeviceRow(device, label, name, 0))
        elif name in GAUGES and GAUGES[name].grows:
            rows.append(DeviceRow(device, label, name, len(values), total=values[-1] - values[0]))
        else:
            mean = sum(values) / len(values)
            rows.append(DeviceRow(device, label, name, len(values), mean, min(values), max(values)))
    return rows


@dataclass(frozen=True, slots=True)
class DeviceSummary:
    """The readings of all gauges. `interval_ns` is the median time between two readings, None without a second
    reading."""

    read_ns: int
    interval_ns: int | None
    gpus: tuple[Gpu, ...]
    rows: tuple[DeviceRow, ...]
    _options: Options

    def section(self) -> Section:
        unit = self._options.unit
        every = "" if self.interval_ns is None else f", every {format_time(self.interval_ns, unit)} {unit}"
        names = [name for name in dict.fromkeys(row.gauge for row in self.rows) if name in GAUGES]

        def format_field(name: str, row: DeviceRow, unit: str) -> str:
            return number_text(getattr(row, name)) if row.samples else NOT_REPORTED

        return Section(
            "Device Summary", [row.convert_to_printed_unit() for row in self.rows],
            "label=Device|gauge=Gauge|unit=Unit|samples=Samples|mean=Mean|least=Min.|most=Max.|total=Sum",
            [line for name in names for line in wrap_text(f"{name}: {printed_unit(name)[0]} {GAUGES[name].about}")],
            {
                "gauge": lambda row, unit: shorten(printable(row.gauge), NAME_WIDTH),
                "unit": lambda row, unit: row.unit(),
                **{name: partial(format_field, name) for name in ("mean", "least", "most")},
                "total": lambda row, unit: number_text(row.total),
            },
            widths=WIDTHS,
            lead=[
                f"Read from first to last: {format_time(self.read_ns, unit)} {unit}{every}",
                f"Mean, Min., Max.: of the samples; Sum: growth; {NOT_REPORTED}: the device does not report it",
                *(
                    shorten(f"GPU {gpu.device}: {printable(gpu.model)}, {printable(gpu.uuid)}", LINE)
                    for gpu in self.gpus
                ),
                "",
            ],
            empty=["No gauges were read."],
        )  # fmt: skip


def summarise_gauges(samples: Sequence[Sample], gpus: Sequence[Gpu], options: Options) -> DeviceSummary:
    """Return the summary of gauge readings, which must be sorted by time."""
    times_by_gauge = defaultdict[tuple[str, int], list[int]](list)
    for sample in samples:
        times_by_gauge[sample.name, sample.device].append(sample.at_ns)
    gaps = [after - before for times_ns in times_by_gauge.values() for before, after in pairwise(times_ns)]
    read_ns = samples[-1].at_ns - samples[0].at_ns if samples else 0
    interval_ns = sorted(gaps)[len(gaps) // 2] if gaps else None
    return DeviceSummary(read_ns, interval_ns, tuple(gpus), tuple(make_gauge_rows(samples)), options)


def printed_unit(name: str) -> tuple[str, float]:
    """Return the unit in which a gauge is printed, and the factor between this unit and the gauge's own unit."""
    unit = GAUGES[name].unit if name in GAUGES else ""
    return UNITS.get(unit, (unit, 1))


SHORT_NS = 10_000
"""The mean device time in ns below which CUDA events may measure up to six times too much."""

COLUMN_WIDTH = 10


@dataclass(frozen=True, slots=True)
class DeviceView(View):
    """The `device` view: the gauges, and the use of each device. `reasons` counts the spans without device time, by
    reason. `is_ours` is False for a trace of another profiler."""

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
    shares: tuple[GroupShare, ...]
    _options: Options

    TITLE = "Device"

    def header_lines(self) -> list[str]:
        why = self._explain_empty_view() if not self.devices and self.sections() else []
        return [*self.coverage.lines(), f"Time unit: {self._options.unit}", *why]

    def reasons_if_empty(self) -> list[str]:
        return [] if self.sections() else self._explain_empty_view()

    def sections(self) -> list[Section]:
        gauges = [] if self.gauges is None else [self.gauges.section()]
        of_each = [section for device in self.devices for section in _device_sections(device, self)]
        shares = [make_shares_table(self.shares, self._options)] if self.shares else []
        untimed = list[Section]()
        if self.devices or any(row.reason in UNTIMED for row in self.unanswered):
            missing = sum(row.spans for row in self.unanswered)
            lead = [f"Spans that asked for device time: {self.asked}; that got none: {missing}", ""]
            columns = "name=Without device time|kind=Kind|spans=Spans|why=Why"
            heading = "Device time asked for"
            untimed.append(Section(heading, self.unanswered, columns, widths=COLUMN_WIDTH, lead=lead, empty=lead[:1]))
        return [*gauges, *of_each, *shares, *untimed]

    def footnotes(self) -> list[str]:
        return _explain_terms(self) if self.devices else []

    def _explain_empty_view(self) -> list[str]:
        if self.asked or not self.is_ours:
            return wrap_text(self.explain_no_device_time())
        return self.coverage.explain_no_spans("span with device time", self.explain_no_device_time())

    def explain_no_device_time(self) -> str:
        why = "no span asked for it; give its rule `device: true` in the profile"
        if self.asked:
            parts = ", ".join(f"{spans} {printable(reason)}" for reason, spans in self.reasons.items())
            why = f"{self.asked} span{'s' * (self.asked > 1)} asked for it and got none ({parts})"
        elif not self.is_ours:
            why = "kernels in a trace of another profiler are spans of their own, as in the events view"
        return f"No device time was recorded: {why}."


def device(recording: Recording, options: Options) -> DeviceView:
    """Return the `device` view of the kept spans. The option `rows` limits each table. The option `least_ns` limits the
    table of device times by name."""
    facts = recording.trace
    use = recording.compute_once(measure_utilisation)
    return DeviceView(
        coverage=Coverage.measure_coverage(recording),
        gauges=summarise_gauges(facts.samples, facts.gpus, options) if facts.samples else None,
        devices=tuple(
            replace(
                row,
                names=limit_rows(row.names, options, attrgetter("summed_ns"), make_row_summer("calls", "summed_ns")),
                endpoints=limit_endpoints(row.endpoints, options),
            )
            for row in use.devices
        ),
        asked=use.asking,
        unanswered=limit_rows(use.unanswered, replace(options, least_ns=0), lambda _: 0, make_row_summer("spans")),
        reasons=dict(count_missing_time_reasons(use.unanswered).most_common()),
        in_flight_ns=use.in_flight_ns,
        requests_cut=use.requests_cut,
        requests_without=use.requests_without,
        is_ours=facts.origin.recorder != "other",
        shares=group_shares(recording, options) if use.devices else (),
        _options=options,
    )


def limit_endpoints(uses: Sequence[EndpointUse], options: Options) -> tuple[EndpointUse, ...]:
    make_rest = make_row_summer("requests", "wall_ns", "own_ns", "others_ns", "starved_ns")
    return limit_rows(uses, options, attrgetter("wall_ns"), make_rest)


class DevicePart(NamedTuple):
    """A part of a device's time, in ns and as a share of a base. `of` is the name of the base."""

    name: str
    time_ns: int
    ratio: float | None
    of: str


DEVICE_PARTS = (
    ("Busy with compute", "compute", "window"), ("Busy with copies alone", "copy", "window"),
    ("Idle while a request was in flight (starved)", "starved", "window"), ("Idle while none was", "unasked", "window"),
    ("Busy", "busy", "window"), ("Two or more streams busy", "overlap", "busy"),
    ("Busy by launch-bound stretches alone", "launch_bound", "busy"),
    ("Copies during compute", "hidden_copy", "copies"),
)  # fmt: skip
"""The rows of a device's time: a label, the prefix of fields in `DeviceUse`, and the base of the ratio."""


def _device_sections(use: DeviceUse, view: DeviceView) -> list[Section]:
    kinds = Counter(name.name for name in use.names)
    parts = [
        DevicePart(name, getattr(use, f"{part}_ns"), getattr(use, f"{part}_ratio"), of)
        for name, part, of in DEVICE_PARTS
    ]
    parts.insert(4, DevicePart("Window", use.window_ns, compute_share(use.window_ns, use.window_ns), "window"))
    in_flight = "Starved, of the time with requests in flight"
    parts.append(DevicePart(in_flight, use.starved_ns, use.starved_in_flight_ratio, "in flight"))
    mean = number_text(use.mean_streams)
    clock: tuple[str, ...] = ()
    if use.uncertainty_ns is not None:
        least, greatest = (number_text(value_ns / 1e3) for value_ns in use.uncertainty_ns)
        spread = least if least == greatest else f"{least} to {greatest}"
        clock = (f"Place on the host's clock: known within {spread} us",)
    outside = tuple[str, ...]()
    if use.outside:
        are = "interval is outside of the window and is" if use.outside == 1 else "intervals are outside of it and are"
        outside = (f"{use.outside} {are} not counted.",)
    left_out = [(view.requests_cut, "at an edge of the window"), (view.requests_without, "without any device time")]
    counted = ", ".join(f"{count} {why}" for count, why in left_out if count)
    requests = endpoint_section(f"By request on GPU {use.device}", use.endpoints)
    return [
        Section(
            f"Device {use.device}", parts, "name=Time of the device|time_ns=Time|ratio=Ratio|of=Of",
            outside, widths=COLUMN_WIDTH,
        ),
        Section(
            f"Streams of GPU {use.device}", use.streams,
            "stream=Stream|intervals=Intervals|busy_ns=Busy|window_ratio=Of window|summed_ns=Sum",
            (f"Streams busy at once, in the busy time: {mean} in the mean, {use.most_streams} at most",),
            widths=(20, *[COLUMN_WIDTH] * 3, 0),
        ),
        Section(
            f"Labels on GPU {use.device}", use.labels, "label=Label|intervals=Intervals|summed_ns=Sum", clock,
            widths=COLUMN_WIDTH,
        ),
        Section(
            f"By name on GPU {use.device}", use.names,
            "name=By name|+kind=Kind|calls=Calls|summed_ns=Sum|mean_ns=Mean|p50_ns=p50|p99_ns=p99|busy_ns=Busy|"
            "busy_ratio=Of busy",
            texts={
                "name": lambda use, unit: f"{use.name} ({use.kind})" if kinds[use.name] > 1 else use.name,
            },
            widths=COLUMN_WIDTH,
        ),
        replace(
            requests, notes=[*requests.notes, *([f"Requests left out: {counted}"] if counted else [])],
            empty=["No request was in flight."],
        ),
    ]  # fmt: skip


def endpoint_section(title: str, endpoints: Sequence[EndpointUse]) -> Section:
    return Section(
        title, endpoints,
        "name=By request|requests=Requests|wall_mean_ns=Wall|own_mean_ns=Own|own_ratio=|others_mean_ns=Others|"
        "others_ratio=|starved_mean_ns=Starved|starved_ratio=",
        (
            "Within the wall of requests that used it, the device was busy with their own work, with that of",
            "others alone, or idle (starved): means, and shares of the wall.",
        ),
    )  # fmt: skip


def _explain_terms(view: DeviceView) -> list[str]:
    names = [name for use in view.devices for name in use.names]
    lines = [
        "A stretch is the time of a stream between two events, not a kernel: gaps between kernels, and what",
        "the device put in between, are part of it.",
        "Idle: no instrumented device work. What no instrumented span timed is not seen.",
        "Sum: over calls, so that work side by side counts for each. Busy: the union of the same calls. An",
        "outer call's stretch holds those of the calls below it: shares of busy may exceed 100% together.",
    ]
    if any(use.endpoints for use in view.devices):
        lines += [
            "Wall, own, others, starved: means. Within a request's host time the device was busy with its own",
            "spans, with others alone, or idle; ratios are of wall.",
        ]
    if any(use.launch_bound_ns for use in view.devices):
        lines += [
            "Launch-bound stretches end as soon as the host asks for it, for the stream has run dry: within them",
            "the device may have waited for the host to launch; the gauges have its real load.",
        ]
    if any(label.label == "stale" for use in view.devices for label in use.labels):
        lines.append("Stale stretches have the right length and an uncertain place: sums hold, unions may not.")
    if any(name.summed_ns < SHORT_NS * name.calls for name in names):
        lines.append("Intervals below 0.01 ms may be measured several times too long: events take time themselves.")
    return lines
