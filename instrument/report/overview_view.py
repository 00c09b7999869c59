"""The `overview` view: the share of the window in which each kind of work ran, on the host and on each device.

It is the Overview Summary of `paddle.profiler`. A moment counts once, also if several threads or streams work. Rows may
overlap, so they do not add up. Ratios are shares of the first row, the window. If there are steps, a second ratio is
the row's time within steps as a share of the time of steps. (`paddle.profiler` also counts time between steps.)

Device times are intervals between pairs of events on a stream. Compute is all work except copies, so it includes
memsets and communication. Communication is the intervals of spans of kind `comm` and of the spans below them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from instrument.profile.model import KINDS
from instrument.recording.spans import Interval, is_interruption
from instrument.report.section import Coverage, Section, View
from instrument.report.table import share
from instrument.report.view import Options, Recording, SortKey
from instrument.trace.columns import Columns
from instrument.trace.forest import NONE
from instrument.trace.groups import distinct
from instrument.trace.intervals import Union, clipped, overlap, shared_ns, union, unite

ALL_DEVICES = -1
"""The device number of rows that combine all devices."""

NO_SPAN = "No span was recorded in it: name functions or layers in the profile, or open a scope."

WORK = {
    "busy": ("compute", "copies"),
    "compute": ("compute",),
    "communication": ("communication",),
    "copies": ("copies",),
}
"""The rows of a device, each with the kinds of work that it combines."""


@dataclass(frozen=True, slots=True)
class KindUse:
    """The spans of one kind in the window: their number, the time with any of them, and the part of it in steps.

    `ratio` is the share of the window. `step_ratio` is the share of the time of steps, None without steps.
    """

    kind: str
    calls: int
    time_ns: int
    in_steps_ns: int
    ratio: float | None
    step_ratio: float | None


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """The device intervals of one kind of work: their number, and the time in which at least one ran."""

    device: int
    work: str
    stretches: int
    time_ns: int
    in_steps_ns: int
    ratio: float | None
    step_ratio: float | None


@dataclass(frozen=True, slots=True)
class Overview(View):
    """The `overview` view. `window_ns` is the time without missing spans, `steps_ns` the time of steps or None."""

    coverage: Coverage
    window_ns: int
    steps_ns: int | None
    kinds: tuple[KindUse, ...]
    devices: tuple[DeviceWork, ...]
    _options: Options = field(repr=False)

    TITLE = "Overview"

    def sections(self) -> list[Section]:
        if not self.kinds and not self.devices and self._options.state != "GPU":
            return []
        steps = "|step_ratio=Of steps" if self.steps_ns is not None else ""
        window = KindUse(
            "window", 0, self.window_ns, self.steps_ns or 0, share(self.window_ns, self.window_ns),
            share(self.steps_ns or 0, self.steps_ns or 0),
        )  # fmt: skip
        of_devices = {
            device: [use for use in self.devices if use.device == device]
            for device in dict.fromkeys(use.device for use in self.devices)
        }
        return [
            Section(
                "By kind", [window, *self.kinds], f"kind=Kind|calls=Calls|time_ns=Time|ratio=Of window{steps}",
                ("Time in which at least one span of the kind ran. Rows overlap, so they do not add up.",),
                {
                    "kind": lambda use, unit: use.kind if use is window else f"  {use.kind}",
                    "calls": lambda use, unit: "" if use is window else str(use.calls),
                },
                widths=12,
            ),
            *(
                Section(
                    "All devices" if device == ALL_DEVICES else f"Device {device}", uses,
                    f"work=Work|stretches=Intervals|time_ns=Time|ratio=Of window{steps}",
                    texts={"work": lambda use, unit: "  " * (use.work == "communication") + use.work}, widths=12,
                )
                for device, uses in of_devices.items()
            ),
        ]  # fmt: skip

    def head(self) -> list[str]:
        steps = ["Of steps: the part of the row within steps / the time of all steps"] * (self.steps_ns is not None)
        return [*self.coverage.lines(), f"Time unit: {self._options.unit}", *steps]

    def nothing(self) -> list[str]:
        return [] if self.sections() else self.coverage.none_held("span of that time", NO_SPAN)

    def foot(self) -> list[str]:
        has_none = not self.devices and self._options.state != "CPU"
        return ["No device time was recorded in it."] if has_none else []


def overview(recording: Recording, options: Options) -> Overview:
    """Return the view of the kept spans. The option `state` selects host or device rows.

    Kinds are sorted by time, or by calls if `sorted_by` is `calls`. The view uses no other option.
    """
    window = recording.trace.coverage
    window_ns = window[1] - window[0]
    kinds_of_work = _intervals_of_kinds(recording.columns, window)
    steps = kinds_of_work.get("step")
    steps_ns = steps.union.length_ns() if steps is not None else None

    def facts(stretches: _Stretches) -> tuple[int, int, float | None, float | None]:
        time_ns = stretches.union.length_ns()
        in_steps_ns = shared_ns(stretches.union, steps.union) if steps is not None else 0
        step_ratio = None if steps_ns is None else share(in_steps_ns, steps_ns)
        return time_ns, in_steps_ns, share(time_ns, window_ns), step_ratio

    kinds = [KindUse(kind, stretches.count, *facts(stretches)) for kind, stretches in kinds_of_work.items()]
    by_calls = SortKey.of(options).column == "calls"
    kinds.sort(key=lambda use: (-use.calls if by_calls else 0, -use.time_ns, _rank_of_kind(use.kind)))
    devices = [
        DeviceWork(device, work, stretches.count, *facts(stretches))
        for device, work, stretches in _combine_intervals(_intervals_of_devices(recording.columns, window))
    ]
    return Overview(
        Coverage.of_recording(recording),
        window_ns,
        steps_ns,
        tuple(kinds) if options.state != "GPU" else (),
        tuple(devices) if options.state != "CPU" else (),
        options,
    )


def _rank_of_kind(kind: str) -> int:
    """Return the index of a kind in the usual order. Kinds that only a foreign file has come last."""
    return KINDS.index(kind) if kind in KINDS else len(KINDS)


@dataclass(frozen=True, slots=True)
class _Stretches:
    """Intervals of work: their number, and their union."""

    count: int
    union: Union


def _intervals_of_kinds(trace: Columns, window: Interval) -> dict[str, _Stretches]:
    """Return the intervals of each kind of span. Interruptions are left out: interrupted spans include them."""
    inside = overlap(trace.start_ns, trace.end_ns, window)
    inside &= ~trace.of_sites(list(map(is_interruption, trace.sites)))
    starts, ends = clipped(trace.start_ns, trace.end_ns, window)
    of_kinds = {kind: inside & trace.of_kind(kind) for kind in dict.fromkeys(site.kind for site in trace.sites)}
    return {
        kind: _Stretches(int(rows.sum()), union(starts[rows], ends[rows]))
        for kind, rows in of_kinds.items()
        if rows.any()
    }


def _intervals_of_devices(trace: Columns, window: Interval) -> dict[tuple[int, str], _Stretches]:
    """Return the device intervals of each device and kind of work."""
    intervals = trace.device.only(trace.device.timed).within(window)
    is_copy = trace.of_kind("copy")[intervals.row]
    communicates = trace.owners(trace.of_kind("comm"))[intervals.row] != NONE
    stretches = {}
    for number in distinct(intervals.device).tolist():
        works = {"compute": ~is_copy, "copies": is_copy, "communication": communicates & ~is_copy}
        for work, of_work in works.items():
            chosen = intervals.only(of_work & (intervals.device == number))
            if len(chosen):
                stretches[number, work] = _Stretches(len(chosen), chosen.union())
    return stretches


def _combine_intervals(stretches: Mapping[tuple[int, str], _Stretches]) -> Iterator[tuple[int, str, _Stretches]]:
    """Yield the intervals of each row: of all devices together if there are several, then of each device."""
    numbers = sorted({device for device, _ in stretches})
    for device in [ALL_DEVICES, *numbers] if len(numbers) > 1 else numbers:
        chosen = numbers if device == ALL_DEVICES else [device]
        for work, parts in WORK.items():
            pieces = [stretches[key, part] for key in chosen for part in parts if (key, part) in stretches]
            if pieces:
                merged = unite([piece.union for piece in pieces])
                yield device, work, _Stretches(sum(piece.count for piece in pieces), merged)
