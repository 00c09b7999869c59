"""The `memory` view: the growth of memory, the time and place of its peak, and the spans that kept memory.

torch.profiler's record lists torch's allocations. Each allocation counts for the span that was open on its thread.
Without that record the view has only gauges, such as the memory of the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import neg
from typing import NamedTuple

import numpy as np

from instrument.recording.spans import HOST, Sample, is_operator
from instrument.report.kernels_view import NOWHERE, SHARED, UNKNOWN, find_places_of_events
from instrument.report.section import Section, View, device_name, format_mebibytes
from instrument.report.table import MISSING, limit_rows, number_text, printable, shorten, sum_omitted_rows, wrap_text
from instrument.report.view import Options, Recording
from instrument.trace.columns import Bools, Int64s
from instrument.trace.indices import Groups, number_combinations
from instrument.trace.trace import Allocations


@dataclass(frozen=True, slots=True)
class PlaceMemory:
    """The memory that the spans of one site allocated and freed. Allocations in inner spans are not included.
    `held_bytes` is the allocated memory that was still in use at the end. `thread` is "" for all threads together.
    `device` is None for several devices."""

    device: int | None
    name: str
    kind: str
    thread: str
    allocations: int
    frees: int
    allocated_bytes: int
    freed_bytes: int
    held_bytes: int
    remaining: int = 0

    @property
    def increase_bytes(self) -> int:
        return self.allocated_bytes - self.freed_bytes


BEFORE = "(before it began)"
"""The text in place of a span if the peak was reached before the record began."""

PEAK_OF: Mapping[str, str] = {
    "process_memory": "process_memory_peak",
    "memory_used": "",
    "memory_of_process": "",
    "torch_allocated": "torch_allocated_peak",
    "torch_reserved": "torch_reserved_peak",
}
"""The peak gauge of each gauge of used memory, or "" for none."""

NAME_ROOM, THREAD_ROOM = 27, 14
NAMED_THREADS = 4

NO_ALLOCATIONS = (
    "Which place takes memory is not known: torch.profiler did not run. Save a trace of torch.profiler with "
    "profile_memory=True, from the thread that does the work, and give both files: instrument report ours.json "
    "--with theirs.json"
)
NOT_PROFILED = (
    "torch.profiler saw no allocation: it was not asked for profile_memory=True, or it was started on another thread "
    "than the work runs on; it records only its own thread."
)
NO_GAUGES = (
    "No gauge of memory was read in this time. Ask for the host's with `device: {host: 1s}` in the profile; a window "
    "that is shorter than that may have none."
)


@dataclass(frozen=True, slots=True)
class Peak:
    """The maximum memory of one allocator, and the span in which it was reached. `device` is `HOST` for the host.
    `what` is `allocated` or `reserved`."""

    device: int
    what: str
    peak_bytes: int
    since_ns: int
    place: str
    thread: str
    begin_bytes: int
    end_bytes: int

    def label(self) -> str:
        return f"{device_name(self.device)} {self.what}"


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The sums of one device's allocator. `earlier_bytes` is the freed memory that was allocated before torch.profiler
    ran."""

    device: int
    allocations: int
    frees: int
    allocated_bytes: int
    freed_bytes: int
    held_bytes: int
    earlier_bytes: int

    @property
    def increase_bytes(self) -> int:
        return self.allocated_bytes - self.freed_bytes


class CountedAllocations(NamedTuple):
    """The sums of all allocations: `uses` by span and thread, and `devices` by device. `outside` counts the allocations
    outside of the time when torch.profiler ran."""

    uses: list[PlaceMemory]
    peaks: list[Peak]
    devices: list[DeviceMemory]
    threads: list[str]
    outside: int


def count_allocations(recording: Recording, state: str, by_thread: bool, is_wanted: Bools) -> CountedAllocations:
    """Sum up the allocations that torch.profiler recorded. Each allocation counts for the innermost open span in the
    mask `is_wanted`. `state` is `CPU` (the host), `GPU` (devices) or `All`."""
    facts = recording.trace
    first, last = facts.watched or facts.coverage
    allocations = Allocations.from_objects(facts.allocations)
    is_inside = (first <= allocations.times_ns) & (allocations.times_ns <= last)
    is_of_state = state == "All" or (allocations.rows["device"] == HOST) == (state == "CPU")
    is_counted = is_inside & is_of_state
    rows, at_ns = allocations.rows[is_counted], allocations.times_ns[is_counted]
    device, thread_id, size_bytes, address = (rows[name] for name in ("device", "thread_id", "size_bytes", "address"))
    at_place = find_places_of_events(recording, thread_id, at_ns, is_wanted)
    thread, of_thread = number_combinations(thread_id)
    threads = [facts.threads.get(ident) or f"thread {ident}" for ident in thread_id[of_thread].tolist()]
    names = {name: number for number, name in enumerate(dict.fromkeys(threads))}
    called = np.array([names[name] for name in threads], dtype=np.int64)[thread] if by_thread else np.zeros_like(thread)
    follows, is_followed = _match_events_by_address(device, address, size_bytes)
    held_bytes = np.where(is_followed, 0, np.maximum(size_bytes, 0))
    columns = (size_bytes >= 0, size_bytes < 0, size_bytes.clip(min=0), size_bytes.clip(max=0), held_bytes)

    def sum_by_group(groups: Groups) -> list[tuple[int, int, int, int, int]]:
        allocations, frees, allocated, freed, in_use = (groups.sum_by_group(column).tolist() for column in columns)
        return list(zip(allocations, frees, allocated, map(neg, freed), in_use, strict=True))

    number, of_device = number_combinations(device)
    use, of_use = number_combinations(number, at_place.number, called)
    sums_by_use, uses = sum_by_group(Groups(use, len(of_use))), []
    for row in np.sort(of_use).tolist():
        name, kind = at_place.names[at_place.number[row]]
        on_thread = threads[thread[row]] if by_thread else ""
        uses.append(PlaceMemory(int(device[row]), name, kind, on_thread, *sums_by_use[use[row]]))
    groups = Groups(number, len(of_device))
    earlier_bytes = groups.sum_by_group(np.where(follows, 0, size_bytes.clip(max=0))).tolist()

    def find_peak(kind: str, members: Int64s, begin_bytes: int) -> Peak:
        levels = rows[f"{kind}_bytes"][members]
        at, on_device = int(levels.argmax()), int(device[members[0]])
        if int(levels[at]) <= begin_bytes:
            since_ns = (first if facts.watched else facts.start_ns) - facts.start_ns
            return Peak(on_device, kind, begin_bytes, since_ns, BEFORE, "", begin_bytes, int(levels[-1]))
        row = int(members[at])
        place, since_ns = at_place.names[at_place.number[row]][0], int(at_ns[row]) - facts.start_ns
        name = threads[thread[row]]
        return Peak(on_device, kind, int(levels[at]), since_ns, place, name, begin_bytes, int(levels[-1]))

    peaks, devices = list[Peak](), list[DeviceMemory]()
    for members, sums_of_it, earlier in zip(groups.list_rows(), sum_by_group(groups), earlier_bytes, strict=True):
        allocated, reserved = (int(rows[name][members[0]]) for name in ("allocated_bytes", "reserved_bytes"))
        reserved_peak = find_peak("reserved", members, reserved)
        peaks.append(find_peak("allocated", members, allocated - int(size_bytes[members[0]])))
        peaks += [reserved_peak] if reserved_peak.peak_bytes else []
        devices.append(DeviceMemory(int(device[members[0]]), *sums_of_it, -earlier))
    peaks.sort(key=lambda row: row.device)
    devices.sort(key=lambda row: row.device)
    thread_names = [threads[number] for number in np.argsort(of_thread).tolist()]
    return CountedAllocations(uses, peaks, devices, thread_names, int((~is_inside).sum()))


def _match_events_by_address(device: Int64s, address: Int64s, size_bytes: Int64s) -> tuple[Bools, Bools]:
    """Return two masks of events. The first selects events that follow an allocation at the same address. The second
    selects events that precede another event at the same address."""
    order = np.lexsort((address, device))
    address, device = address[order], device[order]
    is_next = np.zeros(len(order) + 1, dtype=np.bool_)
    is_next[1:-1] = (address[1:] == address[:-1]) & (device[1:] == device[:-1])
    was_taken = np.concatenate([[False], size_bytes[order[:-1]] >= 0])[: len(order)]
    follows, is_followed = np.empty(len(order), dtype=np.bool_), np.empty(len(order), dtype=np.bool_)
    follows[order], is_followed[order] = is_next[:-1] & was_taken, is_next[1:]
    return follows, is_followed


@dataclass(frozen=True, slots=True)
class GaugedMemory:
    """The first, the last and the largest reading of a gauge. `most_ns` is the time of the largest reading.
    `peak_bytes` is the largest value since the process or torch began, None if no gauge reports it."""

    device: int
    gauge: str
    samples: int
    first_bytes: float
    last_bytes: float
    most_bytes: float
    most_ns: int
    peak_bytes: float | None

    def label(self) -> str:
        return f"{'Process' if self.device == HOST else device_name(self.device)}: {self.gauge}"

    @property
    def growth_bytes(self) -> float:
        return self.last_bytes - self.first_bytes


@dataclass(frozen=True, slots=True)
class MemoryView(View):
    """The `memory` view. `since_ns` and `until_ns` limit the time when torch.profiler ran, in ns after the start of the
    trace. Both are None without torch.profiler. Allocations before `places_since_ns` may have unknown spans."""

    since_ns: int | None
    until_ns: int | None
    spans: int
    places_since_ns: int
    threads: tuple[str, ...]
    peaks: tuple[Peak, ...]
    devices: tuple[DeviceMemory, ...]
    places: tuple[PlaceMemory, ...]
    gauged: tuple[GaugedMemory, ...]
    outside: int
    is_ours: bool
    _options: Options = field(repr=False)

    TITLE = "Memory"

    def header_lines(self) -> list[str]:
        sizes = f"Sizes in MiB (2^20 bytes); time unit: {self._options.unit}"
        return [*_coverage_lines(self), sizes] if self.devices else []

    def sections(self) -> list[Section]:
        of_all = [
            PlaceMemory(
                row.device, "(all)", "", "", row.allocations, row.frees, row.allocated_bytes, row.freed_bytes,
                row.held_bytes,
            )
            for row in self.devices
        ]  # fmt: skip
        at, thread = f"At, {self._options.unit}", "thread=Thread|" if self._options.threads == "apart" else ""
        cut = {"thread": lambda row, unit: shorten(printable(row.thread), THREAD_ROOM) or MISSING}
        return [
            Section(
                "Peaks", self.peaks,
                f"label=Memory|peak_bytes=Peak|since_ns={at}|place=Reached in|thread=Thread|begin_bytes=Begin|"
                "end_bytes=End",
                texts={**cut, "place": lambda peak, unit: shorten(printable(peak.place), NAME_ROOM) or "(no name)"},
            ),
            Section(
                "Memory by place", [*self.places, *of_all],
                f"name=Place|+kind=Kind|device=On|{thread}allocations=Allocs|frees=Frees|allocated_bytes=Allocated|"
                "freed_bytes=Freed|increase_bytes=Increase|held_bytes=In use",
                texts=cut,
            ),
            Section(
                "Read by gauges", self.gauged,
                "label=Gauge, MiB|samples=Samples|first_bytes=First|last_bytes=Last|growth_bytes=Growth|"
                f"most_bytes=Most|most_ns={at}|peak_bytes=Peak",
            ),
        ]  # fmt: skip

    def footnotes(self) -> list[str]:
        lines = [] if self.devices else [NO_ALLOCATIONS if self.since_ns is None else NOT_PROFILED]
        lines += [] if self.gauged else [NO_GAUGES]
        if self.devices:
            lines += [
                "Place: the innermost span open on the same thread at the time; a free counts where it was made.",
                "Increase: allocated minus freed. In use: the part of Allocated that was not freed by the end.",
            ]
            names = {use.name for use in self.places}
            if UNKNOWN in names:
                since = number_text(self.places_since_ns / 1e9)
                lines.append(f"{UNKNOWN}: before {since} s, of which some spans were overwritten.")
            if SHARED in names:
                lines.append(f"{SHARED}: on that thread, so it is not known which of them it was.")
            if NOWHERE in names and not self.spans:
                lines.append(f"{NOWHERE}: nothing was instrumented, or its spans are gone.")
            if any(allocator.device == HOST for allocator in self.devices):
                owner = "torch" if self.is_ours else "the framework"
                lines.append(
                    f"CPU: what {owner}'s own allocator gave since it first was watched, not all of a process."
                )
            for allocator in self.devices:
                if allocator.earlier_bytes:
                    about = f"{format_mebibytes(allocator.earlier_bytes)} MiB of {device_name(allocator.device)}"
                    lines.append(f"Freed of what had been allocated before: {about}")
        if self.gauged:
            lines.append("Most: the largest reading. Peak: the largest value since the process or torch began.")
        if self.outside:
            lines.append(f"Outside of the time that was watched, and not counted: {self.outside}")
        return [part for line in lines for part in wrap_text(line)]


def memory(recording: Recording, options: Options) -> MemoryView:
    """Return the `memory` view: allocations while torch.profiler ran, and readings of all gauges. Rows are sorted by
    the increase of memory. The option `sorted_by` may also be `calls` or `total` (the allocated bytes). With `threads:
    apart`, each thread has its own rows. `state` is `CPU` (the host), `GPU` (devices) or `All`."""
    trace, facts = recording.columns, recording.trace
    # Torch takes all memory in one or two operators, for any caller.
    is_wanted = trace.are_of_sites([not is_operator(site) for site in trace.sites])
    totals = count_allocations(recording, options.state, options.threads == "apart", is_wanted)
    column = {"calls": "allocations", "total": "allocated_bytes"}.get(options.sorted_by, "increase_bytes")
    totals.uses.sort(key=lambda use: (-getattr(use, column), -use.allocated_bytes, use.name, use.kind, use.thread))

    def sum_places(uses: Sequence[PlaceMemory]) -> PlaceMemory:
        devices = {use.device for use in uses}
        sums = ("allocations", "frees", "allocated_bytes", "freed_bytes", "held_bytes")
        return sum_omitted_rows(uses, sums, device=devices.pop() if len(devices) == 1 else None)

    shown = limit_rows(totals.uses, replace(options, least_ns=0), lambda use: 0, sum_places)
    since_ns, until_ns = (at_ns - facts.start_ns for at_ns in facts.watched) if facts.watched else (None, None)
    return MemoryView(
        since_ns=since_ns,
        until_ns=until_ns,
        spans=int(is_wanted.sum()),
        places_since_ns=facts.coverage[0] - facts.start_ns,
        threads=tuple(totals.threads),
        peaks=tuple(totals.peaks),
        devices=tuple(totals.devices),
        places=shown,
        gauged=tuple(_summarise_gauges(facts.samples, facts.start_ns, options.state)),
        outside=totals.outside,
        is_ours=facts.origin.recorder != "other",
        _options=options,
    )


def _summarise_gauges(samples: Iterable[Sample], start_ns: int, state: str) -> Iterator[GaugedMemory]:
    readings: dict[tuple[int, str], list[tuple[float, int]]] = {}
    for sample in samples:
        if sample.value is not None and (state == "All" or (sample.device == HOST) == (state == "CPU")):
            readings.setdefault((sample.device, sample.name), []).append((sample.value, sample.at_ns))
    for device in sorted({device for device, _ in readings}):
        for gauge, keeper in PEAK_OF.items():
            values = readings.get((device, gauge))
            if values:
                peaks = readings.get((device, keeper))
                most, most_ns = max(values, key=lambda value: (value[0], -value[1]))
                # The service may have reset torch's peaks, so the newest need not be the largest.
                peak = None if peaks is None else max(most, max(peaks)[0])
                ends = values[0][0], values[-1][0]
                yield GaugedMemory(device, gauge, len(values), *ends, most, most_ns - start_ns, peak)


# Text


def _coverage_lines(view: MemoryView) -> list[str]:
    since, until = (number_text((at_ns or 0) / 1e9) for at_ns in (view.since_ns, view.until_ns))
    spans = f", with {view.spans} spans" if view.is_ours else ""
    names = [shorten(printable(name), NAME_ROOM) for name in view.threads[:NAMED_THREADS]]
    names += ["..."] if len(view.threads) > NAMED_THREADS else []
    profiler = "torch.profiler" if view.is_ours else "its profiler"
    return [
        f"Allocations: all that {profiler} saw from {since} s to {until} s{spans}",
        *wrap_text(f"On: {', '.join(names)} (it sees the thread that it was started on, and autograd's)"),
    ]
