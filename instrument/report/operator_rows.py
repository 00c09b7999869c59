"""The tables of the views `operators` and `user`: a row for each name of calls, with host and device times.

A track is one thread, or one task on it. The time of a call on another track than its caller's is not part of the
caller's time. The device time of a call is the union of the device intervals at or below it on its track.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from instrument.recording.spans import Interval, Site
from instrument.report.section import Section
from instrument.report.table import LINE, bounded, in_unit, safe, share, shorten
from instrument.report.view import Options, SortKey
from instrument.trace.call_tree import call_tree
from instrument.trace.columns import FARTHEST_NS, Bools, Columns


@dataclass(frozen=True, slots=True)
class CallTimes:
    """The sum, maximum and minimum of the times of some calls. `ave_ns` is the sum divided by all calls of the row."""

    total_ns: int
    ave_ns: float | None
    max_ns: int
    min_ns: int


class PlaceTimes(NamedTuple):
    """The number, sum, maximum and minimum of the times of some calls."""

    calls: int
    total_ns: int
    most_ns: int
    least_ns: int


@dataclass(slots=True, eq=False)
class PlaceCalls:
    """The calls of one site below the same callers on one track. `parent` is the same for their caller.

    `inside` is True if a caller has one of the chosen kinds, `again` if one has the same name and kind. `elsewhere` has
    the calls that these calls started on other tracks.
    """

    site: Site
    thread_id: int
    parent: PlaceCalls | None
    inside: bool
    first_ns: int
    host: PlaceTimes
    device: PlaceTimes
    again: bool = False
    children: dict[Site, PlaceCalls] = field(default_factory=dict)
    elsewhere: dict[tuple[Site, int], PlaceCalls] = field(default_factory=dict)
    streams: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        return self.host.calls


def sum_times(places: Sequence[PlaceCalls], on: str) -> CallTimes | None:
    """Return the times of all calls on `host` or `device`, None without any. A missing time counts as 0."""
    times: list[PlaceTimes] = [getattr(place, on) for place in places]
    calls, timed = (sum(part.calls for part in parts) for parts in (places, times))
    if not timed:
        return None
    total_ns, least_ns = sum(part.total_ns for part in times), min(part.least_ns for part in times)
    most_ns = max(part.most_ns for part in times)
    return CallTimes(total_ns, share(total_ns, calls), most_ns, least_ns if timed == calls else 0)


def build_call_tree(
    trace: Columns, kinds: Collection[str], window: Interval | None = None, among: Bools | None = None
) -> PlaceCalls:  # fmt: skip
    """Return the root of the call tree of all spans, or of the spans that `among` selects.

    Calls of `kinds` and their direct children have device times. With a `window`, only the time within it counts.
    """
    tree, no_calls = call_tree(trace, kinds, window, among), PlaceTimes(0, 0, 0, FARTHEST_NS)
    root = PlaceCalls(Site("(root)"), 0, None, False, FARTHEST_NS, no_calls, no_calls)
    places: list[PlaceCalls] = []
    times = [(of.calls, of.total_ns, of.most_ns, of.least_ns) for of in (tree.host, tree.device)]
    columns = (tree.parent, tree.site, tree.thread_id, tree.is_elsewhere, tree.first_ns, *times[0], *times[1])
    for around, number, thread_id, is_elsewhere, first_ns, *of_place in zip(
        *(part.tolist() for part in columns), strict=True
    ):
        above, site = root if around < 0 else places[around], trace.sites[number]
        inside = not is_elsewhere and (above.inside or (above is not root and above.site.kind in kinds))
        parent, host, device = None if is_elsewhere else above, PlaceTimes(*of_place[:4]), PlaceTimes(*of_place[4:])
        place = PlaceCalls(site, thread_id, parent, inside, first_ns, host, device)
        if is_elsewhere:
            above.elsewhere[site, thread_id] = place
        else:
            above.children[site] = place
        places.append(place)
    for number, on_device, stream, *sums in tree.streams:
        places[number].streams[on_device, stream] = tuple(sums)
    for place in places:
        if place.parent is None:
            _mark_recursive_calls(place)
    return root


def _mark_recursive_calls(first: PlaceCalls) -> None:
    """Set `again` for the calls of a track that have a caller of the same name and kind."""
    around = Counter[tuple[str, str]]()
    pending = [(first, False)]
    while pending:
        place, is_left = pending.pop()
        key = place.site.name, place.site.kind
        if is_left:
            around[key] -= 1
            continue
        place.again = place.inside and around[key] > 0
        around[key] += 1
        pending.append((place, True))
        pending += [(child, False) for child in place.children.values()]


def iterate_places(root: PlaceCalls) -> Iterator[PlaceCalls]:
    """Yield all places with calls below the root, parents first."""
    pending = [*reversed([*root.children.values(), *root.elsewhere.values()])]
    while pending:
        place = pending.pop()
        if place.calls:
            yield place
        pending += [*place.children.values(), *place.elsewhere.values()]


@dataclass(frozen=True, slots=True)
class CallRow:
    """The calls of one name. `gpu` is None if no call had device time. Each view says what its ratios are shares of.

    A row with `remaining` replaces that many rows of its level. Its ratios count only outermost calls.
    """

    name: str
    kind: str
    depth: int
    calls: int
    cpu: CallTimes | None
    gpu: CallTimes | None
    cpu_ratio: float | None
    gpu_ratio: float | None
    remaining: int = 0


@dataclass(frozen=True, slots=True)
class CallBlock:
    """The rows of one thread, or of all threads if `thread` is None, and the bases of their ratios in ns."""

    thread: int | None
    name: str
    cpu_base_ns: int
    gpu_base_ns: int
    rows: tuple[CallRow, ...]


def make_blocks(
    places: Sequence[PlaceCalls],
    names: Mapping[int, str],
    options: Options,
    block: Callable[[int | None, str, Sequence[PlaceCalls], Options], CallBlock],
) -> tuple[CallBlock, ...]:
    """Return a block of all threads, if the options ask for it and there are several, and a block for each thread."""
    by_thread: dict[int, list[PlaceCalls]] = {}
    for place in places:
        by_thread.setdefault(place.thread_id, []).append(place)
    blocks = []
    if by_thread and (options.threads == "merged" or (options.threads == "both" and len(by_thread) > 1)):
        blocks.append(block(None, "", places, options))
    if options.threads != "merged":
        blocks += [
            block(thread, names.get(thread, f"thread {thread}"), by_thread[thread], options)
            for thread in sorted(by_thread)
        ]
    return tuple(blocks)


def group_by_name(places: Iterable[PlaceCalls]) -> dict[tuple[str, str], list[PlaceCalls]]:
    places_by_name: dict[tuple[str, str], list[PlaceCalls]] = {}
    for place in places:
        places_by_name.setdefault((place.site.name, place.site.kind), []).append(place)
    return places_by_name


def call_rows(
    groups: Mapping[tuple[str, str], Sequence[PlaceCalls]],
    depth: int,
    cpu_base_ns: int,
    gpu_base_ns: int,
    options: Options,
) -> tuple[CallRow, ...]:
    """Return a row for each name and kind of a level, as the options sort and limit them, and one row that sums up the
    others. In the topmost level, nested calls of a row count once in its ratio."""

    def row(name: str, kind: str, places: Sequence[PlaceCalls], once: Sequence[PlaceCalls]) -> CallRow:
        gpu = sum_times(places, "device")
        return CallRow(
            name,
            kind,
            depth,
            sum(place.calls for place in places),
            sum_times(places, "host"),
            gpu,
            share(sum(place.host.total_ns for place in once), cpu_base_ns),
            None if gpu is None else share(sum(place.device.total_ns for place in once), gpu_base_ns),
        )

    def rest(omitted: Sequence[CallRow]) -> CallRow:
        names = {(row.name, row.kind) for row in omitted}
        places = [place for name in names for place in groups[name]]
        total = row(f"(remaining {len(omitted)})", "", places, [row for row in places if not _has_caller(row, names)])
        if depth:
            total = replace(
                total,
                cpu_ratio=_sum_ratios(r.cpu_ratio for r in omitted),
                gpu_ratio=_sum_ratios(r.gpu_ratio for r in omitted),
            )
        return replace(total, remaining=len(omitted))

    key = SortKey.of(options)
    sign = 1 if key.ascending else -1

    def weight(row: CallRow) -> float:
        if key.column == "calls":
            return row.calls
        times = row.gpu if key.part == "gpu" else row.cpu
        column = "total" if key.column == "default" else key.column
        return (getattr(times, f"{column}_ns") if times else 0) or 0

    def heaviest_ns(row: CallRow) -> int:
        cpu_ns, gpu_ns = row.cpu.total_ns if row.cpu else 0, row.gpu.total_ns if row.gpu else 0
        return {"CPU": cpu_ns, "GPU": gpu_ns}.get(options.state, max(cpu_ns, gpu_ns))

    rows = [
        row(name, kind, places, places if depth else [place for place in places if not place.again])
        for (name, kind), places in groups.items()
    ]
    rows.sort(key=lambda row: (sign * weight(row), -heaviest_ns(row), row.name, row.kind))
    return bounded(rows, options, heaviest_ns, rest)


def _sum_ratios(ratios: Iterable[float | None]) -> float | None:
    known_ratios = [ratio for ratio in ratios if ratio is not None]
    return sum(known_ratios) if known_ratios else None


def _has_caller(place: PlaceCalls, names: Collection[tuple[str, str]]) -> bool:
    """Return True if a caller on the same track has one of the names."""
    above = place.parent
    while above is not None and (above.site.name, above.site.kind) not in names:
        above = above.parent
    return above is not None


REMAINING = "Ratio of the remaining rows: without calls that are inside each other."


def remaining_note(blocks: Iterable[CallBlock]) -> list[str]:
    """Return the note on the ratio of a row that replaces others, [] if no topmost row does."""
    return [REMAINING] if any(row.remaining and row.depth == 0 for block in blocks for row in block.rows) else []


def describe_order(options: Options) -> str:
    """Return the order of the rows in words."""
    key = SortKey.of(options)
    column = {"default": "total", "calls": "number of calls"}.get(key.column, key.column)
    column_text = column if key.column == "calls" else f"{key.part.upper()} {column}"
    return f"sorted by {column_text}, {'least' if key.ascending else 'greatest'} first"


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the table: host times (`CPU`) or device times (`GPU`) of a row. Only the `first` has the row's name."""

    row: CallRow
    on: str
    times: CallTimes | None
    ratio: float | None
    name: str
    first: bool

    @property
    def depth(self) -> int:
        return self.row.depth


def block_section(block: CallBlock, options: Options, noun: str) -> Section:
    """Return the table of a block. Each row has a line of host times, and one of device times if it has any."""
    bases = [] if options.state == "GPU" else [f"CPU {in_unit(block.cpu_base_ns, options.unit)}"]
    if options.state != "CPU" and any(row.gpu for row in block.rows):
        bases.append(f"GPU {in_unit(block.gpu_base_ns, options.unit)}")
    thread = [] if block.thread is None else [f"{shorten(safe(block.name), LINE // 2)} (id {block.thread})"]
    kinds: dict[tuple[str, int], set[str]] = {}
    for row in block.rows:
        kinds.setdefault((row.name, row.depth), set()).add(row.kind)
    return Section(
        "All threads" if block.thread is None else "Thread",
        [
            line
            for row in block.rows
            for line in _make_lines(row, options, with_kind=len(kinds[row.name, row.depth]) > 1)
        ],
        f"name={noun}|row.calls=Calls|on=On|times.total_ns=Total|times.ave_ns=Ave|times.max_ns=Max|times.min_ns=Min|"
        "ratio=Ratio",
        texts={
            "name": lambda line, unit: line.name if line.first else " ",
            "row.calls": lambda line, unit: str(line.row.calls) if line.first else "",
        },
        widths=7,
        lead=[*thread, *([f"Ratio of: {', '.join(bases)}"] if bases else [])],
    )


def _make_lines(row: CallRow, options: Options, *, with_kind: bool) -> list[_Line]:
    name = f"{row.name} ({row.kind})" if with_kind and row.kind else row.name
    parts: list[tuple[str, CallTimes | None, float | None]] = [
        (on, times, ratio)
        for on, times, ratio in (("CPU", row.cpu, row.cpu_ratio), ("GPU", row.gpu, row.gpu_ratio))
        if times is not None and options.state in (on, "All")
    ] or [("", None, None)]
    return [_Line(row, *part, name, place == 0) for place, part in enumerate(parts)]
