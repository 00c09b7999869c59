"""The `kernels` view: GPU work by the name of the kernel, and by the span in which the host launched the work.

Kernels and their times come from torch.profiler's record. Without that record the view lists the device intervals of
spans.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.recording.spans import Interval
from instrument.report.section import Coverage, Section, View
from instrument.report.table import (
    MISSING,
    Ratio,
    compute_share,
    format_time,
    limit_rows,
    measure_width,
    name_of_site,
    number_text,
    printable,
    shorten,
    sum_omitted_rows,
)
from instrument.report.view import Options, Recording, SortKey
from instrument.trace.call_tree import NodeTimes
from instrument.trace.columns import Bools, Int64s
from instrument.trace.indices import NONE, Groups, number_combinations
from instrument.trace.intervals import are_in_window, are_innermost, clip_intervals, lengths_by_group
from instrument.trace.layout import KernelColumns
from instrument.trace.self_times import find_innermost_spans

UNKNOWN = "(not known)"
"""The text in place of an unknown span."""

NOWHERE = "(no span was open)"
"""The text in place of a span if no span of the thread was open."""

SHARED = "(several tasks were open)"
"""The text in place of a span if several tasks of the thread had open spans."""

UNKNOWN_NUMBER = 0
"""The index of the name `UNKNOWN` in `NumberedPlaces.names`."""


class NumberedPlaces(NamedTuple):
    """The innermost span that was open at each event, on the event's thread. `number` has indices into `names`. `names`
    has pairs of a site's name and kind."""

    number: Int64s
    names: tuple[tuple[str, str], ...]


def find_open_spans(recording: Recording, thread_ids: Int64s, times_ns: Int64s, mask: Bools | None = None) -> Int64s:
    """Return the row of the innermost open span for each thread and time. A row of -1 means no open span. A row of -2
    means open spans of several tasks. Only spans in `mask` are searched."""
    trace = recording.columns
    mask = np.ones(len(trace), dtype=np.bool_) if mask is None else mask.copy()
    if recording.trace.origin.recorder == "other":
        mask[trace.attributes.rows_with_attribute("correlation")] = False
    return find_innermost_spans(trace, mask, thread_ids, times_ns)


def find_places_of_events(
    recording: Recording, thread_ids: Int64s, times_ns: Int64s, mask: Bools | None = None
) -> NumberedPlaces:
    trace = recording.columns
    names = {(UNKNOWN, ""): UNKNOWN_NUMBER, (NOWHERE, ""): 1, (SHARED, ""): 2}
    of_site = [names.setdefault((name_of_site(site), site.kind), len(names)) for site in trace.sites]
    rows = find_open_spans(recording, thread_ids, times_ns, mask)
    place_of_row = np.array([*of_site, NONE])[trace.site[rows]] if len(trace) else rows
    number = np.where(rows < 0, -rows, place_of_row)
    number[times_ns < recording.trace.coverage[0]] = UNKNOWN_NUMBER
    return NumberedPlaces(number, tuple(names))


KERNELS = "torch.profiler"
STRETCHES = "pairs of events"

LABEL_ROOM = 50
"""The maximum width of a kernel's shortened name, in columns."""

HEAVIEST_ROOM = 40

NO_KERNEL = [
    "torch.profiler saw no kernel: torch finds no GPU here, nothing ran on one, or torch.profiler was not",
    "asked for ProfilerActivity.CUDA.",
]
NO_STRETCH = [
    "No device time was recorded, and torch.profiler did not run. Ask for device time (`device:",
    "true` in a rule), or save a trace of torch.profiler and give both files:",
    "instrument report ours.json --with theirs.json",
]

SEVERAL = {"copy": "copies", "fill": "fills"}

COLUMNS = {"calls": "calls", "max": "max_ns", "min": "min_ns", "ave": "mean_ns"}
_QUALIFIERS = re.compile(r"(?:(?:\w+|\(anonymous namespace\))::)+")

ORDER = {"calls": "number of calls", "max": "maximum time", "min": "minimum time", "ave": "average time"}
NO_HOST_TIME = "total time, for a kernel has no host time"


@dataclass(frozen=True, slots=True)
class KernelUse:
    """The calls of one kernel, or of one span if no kernels were recorded. `busy_ns` is the time in which at least one
    call ran, None in a sum of several kernels. `ratio` is the share of the time of all kernels."""

    name: str
    calls: int
    total_ns: int
    max_ns: int
    min_ns: int
    busy_ns: int | None
    ratio: float | None
    remaining: int = 0

    mean_ns = Ratio("total_ns", of="calls")


@dataclass(frozen=True, slots=True)
class KernelPlace:
    """The kernels that the spans of one site launched. Kernels that inner spans launched are not included. `ratio` is
    the share of the time of all kernels. `heaviest` is the name of the kernel with the most time."""

    name: str
    kind: str
    kernels: int
    total_ns: int
    busy_ns: int | None
    ratio: float | None
    heaviest: str
    remaining: int = 0


@dataclass(frozen=True, slots=True)
class DeviceKernels:
    """The kernels of one device. `total_ns` is the sum of their times. `busy_ns` is the time in which at least one
    kernel ran."""

    device: int
    calls: int
    total_ns: int
    busy_ns: int
    busy_ratio: float | None


@dataclass(frozen=True, slots=True)
class OtherWork:
    """The copies or the fills on all devices, depending on `kind`. `busy_ns` is the time in which at least one of them
    ran."""

    kind: str
    calls: int
    total_ns: int
    busy_ns: int


@dataclass(frozen=True, slots=True)
class Kernels(View):
    """The `kernels` view. `window` is the profiled time, and `total_ns` the sum of the times of all kernels. `outside`
    counts the device work outside of the window."""

    source: str
    window: Interval
    calls: int
    total_ns: int
    devices: tuple[DeviceKernels, ...]
    kernels: tuple[KernelUse, ...]
    places: tuple[KernelPlace, ...]
    others: tuple[OtherWork, ...]
    outside: int
    coverage: tuple[str, ...]
    _options: Options = field(repr=False)

    TITLE = "Kernels"

    @property
    def window_ns(self) -> int:
        return self.window[1] - self.window[0]

    def header_lines(self) -> list[str]:
        source = "From: a profiler that saw every kernel"
        if self.source != KERNELS:
            source = "From: CUDA events around recorded calls; a row is a call's stretch of its stream, not a kernel"
        key, order = SortKey.parse_sort_key(self._options), NO_HOST_TIME
        if not self._options.sorted_by.startswith("cpu_"):
            order = ORDER.get(key.column, "total time") + (", least first" if key.ascending else "")
        return [*self.coverage, source, f"Time unit: {self._options.unit}; sorted by {order}"]

    def reasons_if_empty(self) -> list[str]:
        return [] if self.calls else NO_KERNEL if self.source == KERNELS else NO_STRETCH

    def sections(self) -> list[Section]:
        is_seen = self.source == KERNELS
        heaviest = [use.heaviest for use in self.places if not use.remaining]
        names = [use.name for use in self.kernels if not use.remaining]
        labels = _shorten_kernel_names(dict.fromkeys([*names, *heaviest])) if is_seen else {}
        unit = self._options.unit
        other_work = ", ".join(
            f"{work.calls} {SEVERAL[work.kind] if work.calls > 1 else work.kind} "
            f"({format_time(work.total_ns, unit)} {unit}, busy {format_time(work.busy_ns, unit)})"
            for work in self.others
        )
        window = [f"Window: {format_time(self.window_ns, unit)} {unit}"]
        window += [f"Not in it: {other_work}"] if other_work else []
        return [
            Section(
                "Devices", self.devices, "device=Device|calls=Calls|total_ns=Sum|busy_ns=Busy|busy_ratio=Of window",
                window, widths=(12, 10, 12, 12, 0),
            ),
            Section(
                f"{'Kernels' if is_seen else 'Intervals'} by name", self.kernels,
                f"name={'Kernel' if is_seen else 'Interval of'}|calls=Calls|total_ns=Total|mean_ns=Avg|max_ns=Max|"
                "min_ns=Min|busy_ns=Busy|ratio=Of sum",
                texts={"name": lambda use, unit: labels.get(use.name, use.name)},
            ),
            Section(
                "Kernels by place", self.places,
                "name=Launched in|+kind=Kind|kernels=Kernels|total_ns=Total|busy_ns=Busy|ratio=Of sum|"
                "heaviest=Heaviest kernel",
                texts={"heaviest": lambda use, unit: MISSING if use.remaining else _cut_label(labels[use.heaviest])},
            ),
        ]  # fmt: skip

    def footnotes(self) -> list[str]:
        lines = ["Total, Avg, Max, Min: of calls; a sum counts each of what ran side by side. Busy: their union."]
        if self.source == STRETCHES:
            lines.append("Only the innermost intervals of a stream count. Gaps between kernels are part of it.")
        if self.places:
            lines.append("Launched in: the innermost span open on the launching thread at the launch.")
        if any(use.name == SHARED for use in self.places):
            lines.append(f"{SHARED}: on that thread, so it is not known which of them it was.")
        if any(use.name == UNKNOWN for use in self.places):
            lines.append(f"{UNKNOWN}: the launch is not in the file (a graph's kernels), or before its spans begin.")
        if self.outside:
            lines.append(f"Outside of the window, and not counted: {self.outside}")
        return lines


def kernels(recording: Recording, options: Options) -> Kernels:
    """Return the `kernels` view of the time when torch.profiler ran. Without torch.profiler, the view has the device
    intervals of spans. The options `sorted_by`, `rows`, `least_ns` and `unit` apply."""
    facts = recording.trace
    # torch.profiler may have watched memory alone.
    has_profiler = facts.watched is not None and (facts.kernels or not len(recording.columns.device))
    device_work = _read_torch_work(recording) if has_profiler else _read_span_work(recording)
    work, window_ns = device_work.by_kind["kernel"], device_work.window[1] - device_work.window[0]
    total_ns, key = sum(work.took_ns.tolist()), SortKey.parse_sort_key(options)
    column, sign = COLUMNS.get(key.column, "total_ns"), 1 if key.ascending else -1
    if options.sorted_by.startswith("cpu_"):
        column, sign = "total_ns", -1
    uses = [
        KernelUse(name, *sums, compute_share(sums[1], total_ns))
        for name, sums in zip(
            device_work.names, _sum_calls_by_group(work, work.name, len(device_work.names)), strict=True
        )
        if sums[0]
    ]
    uses.sort(key=lambda use: (sign * getattr(use, column), -use.total_ns, use.name))
    numbers, firsts = number_combinations(work.device)
    sums_by_device = zip(work.device[firsts].tolist(), _sum_calls_by_group(work, numbers, len(firsts)), strict=True)

    def sum_kernels(rows: Sequence[KernelUse]) -> KernelUse:
        return sum_omitted_rows(
            rows, ("calls", "total_ns"), name=f"(remaining {len(rows)})", max_ns=max(use.max_ns for use in rows),
            min_ns=min(use.min_ns for use in rows), ratio=compute_share(sum(use.total_ns for use in rows), total_ns),
        )  # fmt: skip

    def sum_places(rows: Sequence[KernelPlace]) -> KernelPlace:
        ratio = compute_share(sum(use.total_ns for use in rows), total_ns)
        return sum_omitted_rows(rows, ("kernels", "total_ns"), name=f"(remaining {len(rows)})", ratio=ratio)

    return Kernels(
        source=device_work.source,
        window=device_work.window,
        calls=len(work.name),
        total_ns=total_ns,
        devices=tuple(
            DeviceKernels(device, calls, took_ns, busy_ns, compute_share(busy_ns, window_ns))
            for device, (calls, took_ns, _, _, busy_ns) in sorted(sums_by_device)
        ),
        kernels=limit_rows(uses, options, attrgetter("total_ns"), sum_kernels),
        places=limit_rows(_sum_kernels_by_place(device_work, total_ns), options, attrgetter("total_ns"), sum_places),
        others=tuple(
            OtherWork(kind, calls, took_ns, busy_ns)
            for kind, of_kind in sorted(device_work.by_kind.items())
            if kind != "kernel" and len(of_kind.device)
            for calls, took_ns, _, _, busy_ns in _sum_calls_by_group(of_kind, np.zeros_like(of_kind.device), 1)
        ),
        outside=device_work.outside,
        coverage=tuple(_coverage_lines(recording, device_work)),
        _options=options,
    )


class _Work(NamedTuple):
    """Device work as columns. `name` is an index into a list of names. Times are clipped to the window."""

    name: NDArray[Any]
    device: Int64s
    start_ns: Int64s
    end_ns: Int64s

    @property
    def took_ns(self) -> Int64s:
        return self.end_ns - self.start_ns

    def select_work(self, mask: NDArray[Any]) -> _Work:
        return _Work(*(column[mask] for column in self))


def _sum_calls_by_group(work: _Work, groups: NDArray[Any], count: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield calls, total, maximum, minimum and busy time per group. Parallel calls on one device count once in the busy
    time."""
    on_device, firsts = number_combinations(groups, number_combinations(work.device)[0])
    unions_ns = lengths_by_group(on_device, work.start_ns, work.end_ns, len(firsts))
    times = NodeTimes.sum_calls(Groups(groups, count), work.took_ns)
    busy_ns = Groups(groups[firsts], count).sum_by_group(unions_ns)
    columns = (times.calls, times.total_ns, times.most_ns, times.least_ns, busy_ns)
    return zip(*(column.tolist() for column in columns), strict=True)


class _DeviceWork(NamedTuple):
    """The device work of a window by kind: kernels, copies and fills. `places` are the spans that launched the kernels,
    None if unknown."""

    source: str
    window: Interval
    names: tuple[str, ...]
    by_kind: Mapping[str, _Work]
    places: NumberedPlaces | None
    outside: int


def _sum_kernels_by_place(device_work: _DeviceWork, total_ns: int) -> list[KernelPlace]:
    if device_work.places is None:
        return []
    work, (number, names_of_places) = device_work.by_kind["kernel"], device_work.places
    sums, heaviest = _sum_calls_by_group(work, number, len(names_of_places)), dict[int, tuple[int, str]]()
    pairs, firsts = number_combinations(number, work.name)
    of_pairs = Groups(pairs, len(firsts)).sum_by_group(work.took_ns).tolist()
    columns = (number[firsts].tolist(), work.name[firsts].tolist(), of_pairs)
    for place, name, took_ns in zip(*columns, strict=True):
        heaviest[place] = max(heaviest.get(place, (took_ns, "")), (took_ns, device_work.names[name]))
    uses = [
        KernelPlace(
            *names_of_places[place], calls, took_ns, busy_ns, compute_share(took_ns, total_ns), heaviest[place][1]
        )
        for place, (calls, took_ns, _, _, busy_ns) in enumerate(sums)
        if calls
    ]
    return sorted(uses, key=lambda use: (-use.total_ns, use.name, use.kind))


def _read_torch_work(recording: Recording) -> _DeviceWork:
    window = recording.trace.watched or (0, 0)
    events = KernelColumns.from_objects(recording.trace.kernels)
    is_inside = are_in_window(events.start_ns, events.end_ns, window)
    work = _Work(events.name, events.device, *clip_intervals(events.start_ns, events.end_ns, window))
    masks = {"kernel": np.zeros(len(events), dtype=np.bool_)}
    masks |= {kind: is_inside & (events.kind == number) for number, kind in enumerate(events.kinds)}
    thread_id, places = events.thread_id[masks["kernel"]], None
    if thread_id.any():
        places = find_places_of_events(recording, thread_id, events.launched_ns[masks["kernel"]])
        places.number[thread_id == 0] = UNKNOWN_NUMBER
    by_kind = {kind: work.select_work(mask) for kind, mask in masks.items()}
    return _DeviceWork(KERNELS, window, events.names, by_kind, places, int((~is_inside).sum()))


def _read_span_work(recording: Recording) -> _DeviceWork:
    """Return the innermost device intervals of spans as device work. Outer intervals would count time twice."""
    trace, window = recording.columns, recording.trace.coverage
    timed = trace.device.select(trace.device.is_measured)
    inner = timed.select(
        are_innermost(number_combinations(timed.device, timed.stream)[0], timed.start_ns, timed.end_ns)
    )
    inside = inner.clip_to(window)
    names, of_site = trace.describe_sites(name_of_site)
    work = _Work(of_site[trace.site[inside.row]], inside.device, inside.start_ns, inside.end_ns)
    is_copy = trace.are_of_kind("copy")[inside.row]
    by_kind = {"kernel": work.select_work(~is_copy), "copy": work.select_work(is_copy)}
    return _DeviceWork(STRETCHES, window, tuple(names), by_kind, None, len(inner) - len(inside))


def _coverage_lines(recording: Recording, work: _DeviceWork) -> list[str]:
    if work.source == STRETCHES:
        return Coverage.measure_coverage(recording).lines()
    facts = recording.trace
    since, until = (number_text((at_ns - facts.start_ns) / 1e9) for at_ns in work.window)
    is_ours = facts.origin.recorder != "other"
    spans = f", with {len(recording.columns)} spans" if is_ours else ""
    return [
        f"Kernels: all that {'torch.profiler' if is_ours else 'its profiler'} saw from {since} s to {until} s{spans}"
    ]


def _shorten_kernel_names(names: Iterable[str], room: int = LABEL_ROOM) -> Mapping[str, str]:
    """Return a short, distinct label for each kernel name."""
    labels: dict[str, str] = {}
    uses: Counter[str] = Counter()
    for name in names:
        label = _strip_parameters(name)
        if len(label) > room:
            label = _QUALIFIERS.sub("", label).replace("> >", ">>").replace("> >", ">>")
        if len(label) > room:
            # In a C++ template's name the function and its first arguments are most useful.
            label = f"{label[: room - 12]}...{label[-9:]}"
        uses[label] += 1
        labels[name] = label if uses[label] == 1 else f"{label} ({uses[label]})"
    return labels


def _cut_label(label: str) -> str:
    text = printable(label)
    return (
        text if measure_width(text) <= HEAVIEST_ROOM else shorten(text[: HEAVIEST_ROOM - 3], HEAVIEST_ROOM - 3) + "..."
    )


def _strip_parameters(name: str) -> str:
    """Return the name of a C++ function without parameters and without the return type `void`."""
    if name.endswith(")"):
        depth = 0
        for at in range(len(name) - 1, 0, -1):
            depth += (name[at] == ")") - (name[at] == "(")
            if depth == 0:
                if name[at - 1].isalnum() or name[at - 1] in "_>":
                    name = name[:at]
                break
    return name.removeprefix("void ")
