"""The `kernels` view: what ran on the devices, by name, and from where in the host's code it was asked for.

Kernels have names and times of their own in what torch.profiler saw. Where it saw nothing, the view is made of the
device intervals of our spans: stretches of a stream between two events, of which those count that enclose no other.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import sub

from instrument.recording.spans import Interval, Kernel, Site, Trace
from instrument.report.coverage import Coverage
from instrument.report.places import SHARED, UNKNOWN, name_of, name_of_site, places
from instrument.report.stretches import innermost, length_ns, united
from instrument.report.table import (
    MISSING,
    bounded,
    columns,
    in_unit,
    named_table,
    number,
    safe,
    section_title,
    share,
    shorten,
    table,
    tenths,
    title,
)
from instrument.report.view import Options, Recording, SortKey

KERNELS = "torch.profiler"
STRETCHES = "pairs of events"

LABEL_ROOM = 50
"""Characters in which a kernel is told."""

HEAVIEST_ROOM = 40

SEVERAL = {"copy": "copies", "fill": "fills"}

COLUMNS = {"calls": "calls", "max": "max_ns", "min": "min_ns", "ave": "mean_ns"}
_QUALIFIERS = re.compile(r"(?:(?:\w+|\(anonymous namespace\))::)+")

ORDER = {"calls": "number of calls", "max": "maximum time", "min": "minimum time", "ave": "average time"}
NO_HOST_TIME = "total time, for a kernel has no host time"


@dataclass(frozen=True, slots=True)
class KernelUse:
    """The calls of one kernel: `total_ns` is their sum, `busy_ns` the union, `ratio` the sum's share of all kernels'.

    `name` is complete. Where `source` of the view is `STRETCHES`, it is that of the span whose device time this is.
    One with `remaining` stands for so many that were left out; the union of their times is not told.
    """

    name: str
    calls: int
    total_ns: int
    max_ns: int
    min_ns: int
    busy_ns: int | None
    ratio: float | None
    remaining: int = 0

    @property
    def mean_ns(self) -> float | None:
        """Of a call."""
        return share(self.total_ns, self.calls)


@dataclass(frozen=True, slots=True)
class PlaceUse:
    """The kernels that were asked for directly within the spans of one place, outside of their children.

    `ratio` is of the sum of all kernels, `heaviest` the kernel with the greatest sum among them. One with `remaining`
    stands for so many places that were left out, without what only a look at all their kernels could tell.
    """

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
    """The kernels of one device: how many, the sum of their times, the union, and its share of the window."""

    device: int
    calls: int
    total_ns: int
    busy_ns: int
    busy_ratio: float | None


@dataclass(frozen=True, slots=True)
class OtherWork:
    """Copies or fills (`kind`) that the devices did beside the kernels: sum and union."""

    kind: str
    calls: int
    total_ns: int
    busy_ns: int


@dataclass(frozen=True, slots=True)
class Kernels:
    """The view. `source` is `KERNELS` or `STRETCHES`; `window` is the time that was looked at, its length the base of
    shares of time. `total_ns` is the sum over all kernels. `places` are empty where no kernel is known to have been
    asked for from a thread that the trace knows. `outside` counts what lies outside of the window.
    """

    source: str
    window: Interval
    calls: int
    total_ns: int
    devices: tuple[DeviceKernels, ...]
    kernels: tuple[KernelUse, ...]
    places: tuple[PlaceUse, ...]
    others: tuple[OtherWork, ...]
    outside: int
    coverage: tuple[str, ...]
    _options: Options = field(repr=False)

    @property
    def window_ns(self) -> int:
        """The time that was looked at."""
        return self.window[1] - self.window[0]

    def lines(self) -> list[str]:
        """The view as text."""
        lines = [*title("Kernels Report"), *self.coverage]
        if not self.calls:
            return [*lines, "", *_nothing(self)]
        options = self._options
        lines += [
            "From: a profiler that saw every kernel"
            if self.source == KERNELS
            else "From: pairs of events around instrumented calls; a row is a call's stretch of its stream, no kernel",
            f"Time unit: {options.unit}; sorted by {_sorting(options)}",
            "",
            *_device_lines(self),
            "",
            *_kernel_lines(self),
            "",
        ]
        if self.places:
            lines += [*_place_lines(self), ""]
        return [*lines, *_notes(self)]


def kernels(recording: Recording, options: Options) -> Kernels:
    """The view, of the part of the window that was watched.

    `sorted_by` takes every key, as `SortKey` says; those of host time alone mean the total. `rows` and `least_ns`
    (of a row's total) bound the tables; `unit` is that of times. The other options mean nothing here.
    """
    trace = recording.trace
    # torch.profiler may have been beside for memory alone.
    beside = trace.watched is not None and (trace.kernels or not any(span.device for span in trace.spans))
    found = _of_torch(trace) if beside else _of_events(trace)
    total_ns = sum(used.total_ns for used in found.by_name.values())
    uses = [used.use(name, total_ns) for name, used in found.by_name.items()]
    key = _key(options)
    column, sign = COLUMNS.get(key.column, "total_ns"), 1 if key.ascending else -1
    uses.sort(key=lambda use: (sign * getattr(use, column), -use.total_ns, use.name))
    by_place = sorted(found.places(total_ns), key=lambda use: (-use.total_ns, use.name, use.kind))
    window_ns = found.window[1] - found.window[0]
    return Kernels(
        source=found.source,
        window=found.window,
        calls=sum(use.calls for use in uses),
        total_ns=total_ns,
        devices=tuple(
            DeviceKernels(device, used.count, used.total_ns, used.busy_ns, share(used.busy_ns, window_ns))
            for device, used in sorted(found.by_device.items())
        ),
        kernels=bounded(uses, options, lambda use: use.total_ns, lambda rest: _other_kernels(rest, total_ns)),
        places=bounded(by_place, options, lambda use: use.total_ns, lambda rest: _other_places(rest, total_ns)),
        others=tuple(
            OtherWork(kind, used.count, used.total_ns, used.busy_ns) for kind, used in sorted(found.others.items())
        ),
        outside=found.outside,
        coverage=tuple(_seen(trace, found)),
        _options=options,
    )


def _other_kernels(rest: Sequence[KernelUse], all_ns: int) -> KernelUse:
    total_ns = sum(use.total_ns for use in rest)
    return KernelUse(
        name=f"(remaining {len(rest)})",
        calls=sum(use.calls for use in rest),
        total_ns=total_ns,
        max_ns=max(use.max_ns for use in rest),
        min_ns=min(use.min_ns for use in rest),
        busy_ns=None,
        ratio=share(total_ns, all_ns),
        remaining=len(rest),
    )


def _other_places(rest: Sequence[PlaceUse], all_ns: int) -> PlaceUse:
    count, total_ns = sum(use.kernels for use in rest), sum(use.total_ns for use in rest)
    return PlaceUse(f"(remaining {len(rest)})", "", count, total_ns, None, share(total_ns, all_ns), "", len(rest))


def _key(options: Options) -> SortKey:
    key = SortKey.of(options)
    return SortKey("gpu", "total", ascending=False) if _means_host(options) else key


def _means_host(options: Options) -> bool:
    return options.sorted_by.startswith("cpu_")


def _sorting(options: Options) -> str:
    if _means_host(options):
        return NO_HOST_TIME
    key = _key(options)
    return ORDER.get(key.column, "total time") + (", least first" if key.ascending else "")


class _Used:
    """Calls of one name, device or place, as they come."""

    def __init__(self) -> None:
        self.count = self.total_ns = self.max_ns = 0
        self.min_ns: int | None = None
        self._parts: dict[int, array[int]] = {}

    def add(self, device: int, parts: array[int]) -> None:
        """Stretches on a device: start and end as numbers by turns."""
        took_ns = list(map(sub, parts[1::2], parts[::2]))
        self.count += len(took_ns)
        self.total_ns += sum(took_ns)
        self.max_ns = max(self.max_ns, max(took_ns))
        least_ns = min(took_ns)
        self.min_ns = least_ns if self.min_ns is None else min(self.min_ns, least_ns)
        self._on(device).extend(parts)

    def _on(self, device: int) -> array[int]:
        on_device = self._parts.get(device)
        if on_device is None:
            on_device = self._parts[device] = array("q")
        return on_device

    @property
    def busy_ns(self) -> int:
        """The union on each device."""
        return sum(length_ns(united([parts.tobytes()])) for parts in self._parts.values())

    def use(self, name: str, all_ns: int) -> KernelUse:
        ratio = share(self.total_ns, all_ns)
        return KernelUse(name, self.count, self.total_ns, self.max_ns, self.min_ns or 0, self.busy_ns, ratio)


class _Found:
    """What is known of the kernels of a trace in a window."""

    def __init__(self, source: str, window: Interval) -> None:
        self.source = source
        self.window = window
        self.by_name: dict[str, _Used] = {}
        self.by_device: dict[int, _Used] = {}
        self.by_place: dict[tuple[str, str], tuple[_Used, Counter[str]]] = {}
        self.others: dict[str, _Used] = {}
        self.outside = 0

    def clipped(self, start_ns: int, end_ns: int) -> Interval | None:
        """As much as lies in the window; None, and counted, where nothing does."""
        first, last = self.window
        if start_ns >= first and end_ns <= last:
            return start_ns, end_ns
        if start_ns >= last or end_ns <= first:
            self.outside += 1
            return None
        return max(start_ns, first), min(end_ns, last)

    def used(self, name: str, device: int) -> tuple[_Used, _Used]:
        """Where a kernel counts: by its name and by its device."""
        if name not in self.by_name:
            self.by_name[name] = _Used()
        if device not in self.by_device:
            self.by_device[device] = _Used()
        return self.by_name[name], self.by_device[device]

    def place(self, name: str, kind: str, kernel: str, device: int, parts: array[int]) -> None:
        """Count stretches of a kernel for the place that asked for it."""
        used, by_kernel = self.by_place.setdefault((name, kind), (_Used(), Counter()))
        used.add(device, parts)
        by_kernel[kernel] += sum(parts[1::2]) - sum(parts[::2])

    def places(self, all_ns: int) -> Iterable[PlaceUse]:
        for (name, kind), (used, by_kernel) in self.by_place.items():
            heaviest = max(by_kernel, key=lambda kernel: (by_kernel[kernel], kernel))
            total_ns = used.total_ns
            yield PlaceUse(name, kind, used.count, total_ns, used.busy_ns, share(total_ns, all_ns), heaviest)


def _of_torch(trace: Trace) -> _Found:
    found = _Found(KERNELS, trace.watched or (0, 0))
    work: dict[tuple[str, str, int], array[int]] = {}
    counted, stretches = list[Kernel](), array("q")
    for kernel in trace.kernels:
        name, kind, device, _, start_ns, end_ns, *_ = kernel
        part = found.clipped(start_ns, end_ns)
        if part is None:
            continue
        if kind == "kernel":
            counted.append(kernel)
            stretches.extend(part)
        key = kind, name if kind == "kernel" else "", device
        if key not in work:
            work[key] = array("q")
        work[key].extend(part)
    for (kind, name, device), parts in work.items():
        users = found.used(name, device) if kind == "kernel" else [found.others.setdefault(kind, _Used())]
        for used in users:
            used.add(device, parts)
    if not any(kernel.thread_id for kernel in counted):
        return found
    for (place, name, device), parts in _asked_for(trace, counted, stretches).items():
        if isinstance(place, str):
            found.place(place, "", name, device, parts)
        else:
            found.place(name_of_site(place), place.kind, name, device, parts)
    return found


def _asked_for(
    trace: Trace, counted: Sequence[Kernel], stretches: array[int]
) -> Mapping[tuple[Site | str, str, int], array[int]]:
    """Where kernels lie, by the place that asked for them, their name and device; `stretches` are start and end of each
    in the window."""
    asked = places(trace, [one.thread_id for one in counted], [one.launched_ns for one in counted])
    known_since_ns = trace.held[0]
    found: dict[tuple[Site | str, str, int], array[int]] = {}
    parts = zip(stretches[::2], stretches[1::2], strict=True)
    for (name, _, device, _, _, _, thread_id, launched_ns), part, place in zip(counted, parts, asked, strict=True):
        if not thread_id or launched_ns < known_since_ns:
            key: tuple[Site | str, str, int] = UNKNOWN, name, device
        else:
            key = place if isinstance(place, str) else place.site, name, device
        if key not in found:
            found[key] = array("q")
        found[key].extend(part)
    return found


def _of_events(trace: Trace) -> _Found:
    found = _Found(STRETCHES, trace.held)
    found.outside, kept = innermost(trace.spans, trace.held)
    for span, device, stretches in kept:
        if span.site.kind == "copy":
            found.others.setdefault("copy", _Used()).add(device, array("q", stretches))
        else:
            for used in found.used(name_of(span), device):
                used.add(device, array("q", stretches))
    return found


def _seen(trace: Trace, found: _Found) -> list[str]:
    if found.source == STRETCHES:
        return Coverage.of(trace).lines()
    since, until = (number((at_ns - trace.start_ns) / 1e9) for at_ns in found.window)
    is_ours = trace.origin.recorder != "other"
    spans = f", beside {len(trace.spans)} spans" if is_ours else ""
    return [
        f"Kernels: all that {'torch.profiler' if is_ours else 'its profiler'} saw from {since} s to {until} s{spans}"
    ]


def _nothing(view: Kernels) -> list[str]:
    if view.source == KERNELS:
        return [
            "torch.profiler saw no kernel: torch finds no GPU here, nothing ran on one, or torch.profiler was not",
            "asked for ProfilerActivity.CUDA.",
        ]
    return [
        "No device time was recorded, and torch.profiler was not beside. Ask for device time (`device:",
        "true` in a rule), or save a trace of torch.profiler and give both files:",
        "instrument report ours.json --with theirs.json",
    ]


def _device_lines(view: Kernels) -> list[str]:
    unit = view._options.unit
    cells = [
        [f"GPU {one.device}", str(one.calls), in_unit(one.total_ns, unit), in_unit(one.busy_ns, unit),
         tenths(one.busy_ns, view.window_ns)]
        for one in view.devices
    ]  # fmt: skip
    lines = table(["Device", "Calls", "Sum", "Busy", "Of window"], cells, [12, 10, 12, 12, 0])
    beside = ", ".join(
        f"{one.calls} {SEVERAL[one.kind] if one.calls > 1 else one.kind} "
        f"({in_unit(one.total_ns, unit)} {unit}, busy {in_unit(one.busy_ns, unit)})"
        for one in view.others
    )
    return [*lines, f"Window: {in_unit(view.window_ns, unit)} {unit}", *([f"Not in it: {beside}"] if beside else [])]


def _kernel_lines(view: Kernels) -> list[str]:
    unit = view._options.unit
    labels = _labels(_names(view.kernels)) if view.source == KERNELS else {}
    cells = [
        [labels.get(use.name, use.name), str(use.calls), *(in_unit(value, unit) for value in (
            use.total_ns, use.mean_ns, use.max_ns, use.min_ns, use.busy_ns)), tenths(use.ratio, 1)]
        for use in view.kernels
    ]  # fmt: skip
    what, several = ("Kernel", "Kernels") if view.source == KERNELS else ("Stretch of", "Stretches")
    return [
        *section_title(f"{several} by name"),
        *named_table([what, "Calls", "Total", "Avg", "Max", "Min", "Busy", "Of sum"], cells, 0),
    ]


def _place_lines(view: Kernels) -> list[str]:
    unit = view._options.unit
    heaviest = [use.heaviest for use in view.places if not use.remaining]
    labels = _labels(dict.fromkeys([*_names(view.kernels), *heaviest]))
    cells = [
        [use.name, str(use.kernels), in_unit(use.total_ns, unit), in_unit(use.busy_ns, unit),
         tenths(use.ratio, 1), MISSING if use.remaining else _begin_of(labels[use.heaviest])]
        for use in view.places
    ]  # fmt: skip
    header = ["Asked for in", "Kernels", "Total", "Busy", "Of sum", "Heaviest kernel"]
    return [*section_title("Kernels by place"), *named_table(header, cells, 0)]


def _names(uses: Iterable[KernelUse]) -> list[str]:
    return [use.name for use in uses if not use.remaining]


def _labels(names: Iterable[str], room: int = LABEL_ROOM) -> Mapping[str, str]:
    """How kernels are called in a table: without parameters and, where that is too long, namespaces, then shortened.

    Two that would be called the same are numbered.
    """
    labels: dict[str, str] = {}
    uses: Counter[str] = Counter()
    for name in names:
        label = _without_parameters(name)
        if len(label) > room:
            label = _QUALIFIERS.sub("", label).replace("> >", ">>").replace("> >", ">>")
        if len(label) > room:
            # Of what C++ makes of a template the function and its first arguments say most.
            label = f"{label[: room - 12]}...{label[-9:]}"
        uses[label] += 1
        labels[name] = label if uses[label] == 1 else f"{label} ({uses[label]})"
    return labels


def _begin_of(label: str) -> str:
    text = safe(label)
    return text if columns(text) <= HEAVIEST_ROOM else shorten(text[: HEAVIEST_ROOM - 3], HEAVIEST_ROOM - 3) + "..."


def _without_parameters(name: str) -> str:
    """A C++ function without its parameters and the `void` before it."""
    if name.endswith(")"):
        depth = 0
        for at in range(len(name) - 1, 0, -1):
            depth += (name[at] == ")") - (name[at] == "(")
            if depth == 0:
                if name[at - 1].isalnum() or name[at - 1] in "_>":
                    name = name[:at]
                break
    return name.removeprefix("void ")


def _notes(view: Kernels) -> list[str]:
    lines = [
        "Total, Avg, Max, Min: of calls; a sum counts each of what ran side by side. Busy: their union.",
    ]
    if view.source == STRETCHES:
        lines.append("Only the innermost stretches of a stream count. Gaps between kernels are part of a stretch.")
    if view.places:
        lines.append("Asked for in: the innermost span open on the launching thread when the host asked for it.")
    if any(use.name == SHARED for use in view.places):
        lines.append(f"{SHARED}: on that thread, so that nobody can tell which of them it was.")
    if any(use.name == UNKNOWN for use in view.places):
        lines.append(f"{UNKNOWN}: the launch is not in the file (a graph's kernels), or before its spans begin.")
    if view.outside:
        lines.append(f"Outside of the window, and not counted: {view.outside}")
    return lines
