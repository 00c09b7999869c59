"""The `overview` view: how much of the window each kind of work filled, on the host and on each device.

It is the Overview Summary of `paddle.profiler`. Every time is a union, over threads and over streams, so that what ran
side by side counts once, and a row may lie inside another one: rows do not add up. The first row is what the ratios
are of. Where steps were recorded there is a second ratio, of the part of the row that is in steps to the time in
steps; that profiler sets time between steps against it too.

A pair of events times a stretch of a stream and does not tell what ran there: compute is all that no copy asked for,
memsets too. Communication is part of it: the stretches of spans of kind `comm` and of those below them.
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
from instrument.trace.intervals import Union, clipped, lie_in, shared_ns, together, union

ALL_DEVICES = -1
"""The device of rows that are of all devices."""

NO_SPAN = "No span was recorded in it: name functions or layers in the profile, or open a scope."

WORK = {
    "busy": ("compute", "copies"),
    "compute": ("compute",),
    "communication": ("communication",),
    "copies": ("copies",),
}
"""Rows of a device, and the work whose stretches each is the union of."""


@dataclass(frozen=True, slots=True)
class KindUse:
    """Spans of one kind in the window: how many, the union of their time, and how much of that is in steps.

    `ratio` is of the window, `step_ratio` is `in_steps_ns` of the time in steps, None where no step was recorded.
    """

    kind: str
    calls: int
    time_ns: int
    in_steps_ns: int
    ratio: float | None
    step_ratio: float | None


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """Timed stretches of one device, or of all where `device` is `ALL_DEVICES`: how many, and the union of them."""

    device: int
    work: str
    stretches: int
    time_ns: int
    in_steps_ns: int
    ratio: float | None
    step_ratio: float | None


@dataclass(frozen=True, slots=True)
class Overview(View):
    """The view. `window_ns` is the length of the part of the window of which every span is held, `steps_ns` of the
    time in which a step was under way, None where none was recorded."""

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
                ("Unions of time: what ran side by side counts once, and rows may lie in one another.",),
                {
                    "kind": lambda use, unit: use.kind if use is window else f"  {use.kind}",
                    "calls": lambda use, unit: "" if use is window else str(use.calls),
                },
                widths=12,
            ),
            *(
                Section(
                    "All devices" if device == ALL_DEVICES else f"Device {device}", uses,
                    f"work=Work|stretches=Stretches|time_ns=Time|ratio=Of window{steps}",
                    texts={"work": lambda use, unit: "  " * (use.work == "communication") + use.work}, widths=12,
                )
                for device, uses in of_devices.items()
            ),
        ]  # fmt: skip

    def head(self) -> list[str]:
        steps = ["Of steps: the part of the row that lies in steps, of the time in steps"] * (self.steps_ns is not None)
        return [*self.coverage.lines(), f"Time unit: {self._options.unit}", *steps]

    def nothing(self) -> list[str]:
        return [] if self.sections() else self.coverage.none_held("span of that time", NO_SPAN)

    def foot(self) -> list[str]:
        has_none = not self.devices and self._options.state != "CPU"
        return ["No device time was recorded in it."] if has_none else []


def overview(recording: Recording, options: Options) -> Overview:
    """The view of the spans that are held. `state` leaves out host or device rows.

    Kinds come by their time, whatever `sorted_by` says but `calls`; there are too few for the other options.
    """
    window = recording.trace.held
    window_ns = window[1] - window[0]
    kinds_of_work = _kinds(recording.columns, window)
    steps = kinds_of_work.get("step")
    steps_ns = steps.union.length_ns() if steps is not None else None

    def facts(stretches: _Stretches) -> tuple[int, int, float | None, float | None]:
        time_ns = stretches.union.length_ns()
        in_steps_ns = shared_ns(stretches.union, steps.union) if steps is not None else 0
        step_ratio = None if steps_ns is None else share(in_steps_ns, steps_ns)
        return time_ns, in_steps_ns, share(time_ns, window_ns), step_ratio

    kinds = [KindUse(kind, stretches.count, *facts(stretches)) for kind, stretches in kinds_of_work.items()]
    by_calls = SortKey.of(options).column == "calls"
    kinds.sort(key=lambda use: (-use.calls if by_calls else 0, -use.time_ns, _place(use.kind)))
    devices = [
        DeviceWork(device, work, stretches.count, *facts(stretches))
        for device, work, stretches in _by_work(_work(recording.columns, window))
    ]
    return Overview(
        Coverage.of_recording(recording),
        window_ns,
        steps_ns,
        tuple(kinds) if options.state != "GPU" else (),
        tuple(devices) if options.state != "CPU" else (),
        options,
    )


def _place(kind: str) -> int:
    """The place of a kind among the others; a file may name one that there is not."""
    return KINDS.index(kind) if kind in KINDS else len(KINDS)


@dataclass(frozen=True, slots=True)
class _Stretches:
    """The spans in the window: their number and their union."""

    count: int
    union: Union


def _kinds(trace: Columns, window: Interval) -> dict[str, _Stretches]:
    """Return the stretches of spans by kind. Interruptions are left out, as parts of the spans that they interrupt."""
    inside = lie_in(trace.start_ns, trace.end_ns, window)
    inside &= ~trace.of_sites(list(map(is_interruption, trace.sites)))
    starts, ends = clipped(trace.start_ns, trace.end_ns, window)
    of_kinds = {kind: inside & trace.of_kind(kind) for kind in dict.fromkeys(site.kind for site in trace.sites)}
    return {
        kind: _Stretches(int(rows.sum()), union(starts[rows], ends[rows]))
        for kind, rows in of_kinds.items()
        if rows.any()
    }


def _work(trace: Columns, window: Interval) -> dict[tuple[int, str], _Stretches]:
    """Return the stretches of each device by its work."""
    its = trace.device.only(trace.device.timed).within(window)
    is_copy = trace.of_kind("copy")[its.row]
    communicates = trace.owners(trace.of_kind("comm"))[its.row] != NONE
    found = {}
    for number in distinct(its.device).tolist():
        works = {"compute": ~is_copy, "copies": is_copy, "communication": communicates & ~is_copy}
        for work, of_work in works.items():
            chosen = its.only(of_work & (its.device == number))
            if len(chosen):
                found[number, work] = _Stretches(len(chosen), chosen.union())
    return found


def _by_work(found: Mapping[tuple[int, str], _Stretches]) -> Iterator[tuple[int, str, _Stretches]]:
    """Devices in their order after all of them together, if there are several, and of each what it did."""
    numbers = sorted({device for device, _ in found})
    for device in [ALL_DEVICES, *numbers] if len(numbers) > 1 else numbers:
        its = numbers if device == ALL_DEVICES else [device]
        for work, parts in WORK.items():
            these = [found[one, part] for one in its for part in parts if (one, part) in found]
            if these:
                where = together([one.union for one in these])
                yield device, work, _Stretches(sum(one.count for one in these), where)
