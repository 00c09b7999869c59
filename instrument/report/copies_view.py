"""The `copies` view: copies between host and devices by direction and by call, their rates, and avoidable waits.

A rate is the copied bytes divided by the device time of the copies, in 10^9 bytes per second. Without device time, the
host times of calls that wait for their copy are used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from instrument.profile.model import DEVICE_DIRECTIONS, DIRECTIONS
from instrument.recording.spans import Site
from instrument.recording.tally import LARGEST_COPY_BYTES
from instrument.report.request_groups import read_integer_attribute
from instrument.report.section import Coverage, Section, Text, View
from instrument.report.table import MISSING, format_time, limit_rows, make_row_summer, sum_omitted_rows
from instrument.report.view import Options, Recording
from instrument.trace.columns import Columns, Int64s
from instrument.trace.indices import Groups, number_by_first_occurrence

ACROSS = ("h2d", "d2h")
"""The directions of copies between host and device."""

ENDS = {
    "h2d": "h2d (host to device)",
    "d2h": "d2h (device to host)",
    "d2d": "d2d (within a device)",
    "p2p": "p2p (between devices)",
    "h2h": "h2h (host to host)",
    "": "not said",
}

COLUMN_WIDTH = 9

NO_COPY = (
    "No copy was recorded. `copies:` in the profile records those of torch and other frameworks; "
    "the lines `Not observed:` below name what its rules did not record, and why."
)


@dataclass(frozen=True, slots=True)
class CopyUse:
    """The copies by one API call in one direction, or all copies in a direction.

    - `sync`, `pinned`: None if unknown or mixed
    - `device_ns`, `timed_bytes`: sums over the `timed` calls
    - `waited_ns`, `waited_bytes`: sums over the calls that waited for their copy
    - `staged`: the number of asynchronous copies that waited because the host's memory is pageable
    """

    direction: str
    call: str
    sync: bool | None
    pinned: bool | None
    calls: int
    moved_bytes: int
    host_ns: int
    timed: int
    device_ns: int
    timed_bytes: int
    waited_ns: int
    waited_bytes: int
    staged: int
    remaining: int = 0

    @property
    def base(self) -> str:
        """The kind of time that the rate is based on: `device`, `host`, or "" without a rate."""
        return "device" if self.device_ns else "host" if self.waited_ns else ""

    @property
    def rate_gb_s(self) -> float | None:
        if self.device_ns:
            return self.timed_bytes / self.device_ns
        return self.waited_bytes / self.waited_ns if self.waited_ns else None

    def moved_mb(self) -> float:
        return self.moved_bytes / 1e6

    def memory(self) -> str:
        """Return the kind of the host's memory: `pinned`, `pageable`, or "" if unknown."""
        return {True: "pinned", False: "pageable", None: ""}[self.pinned]

    def mode(self) -> str:
        """Return `sync`, `async` or a dash. A star marks copies that had to wait for pageable memory."""
        return {True: "sync", False: "async", None: MISSING}[self.sync] + "*" * bool(self.staged and not self.remaining)


def sum_copies(trace: Columns) -> list[CopyUse]:
    """Return a row for each direction, call, mode and kind of memory. In a direction, the row with the most bytes comes
    first."""
    rows = np.flatnonzero(trace.are_of_kind("copy"))
    keys_of_sites, number_of = trace.describe_sites(_group_key_of_copy)
    group_of_row, firsts = number_by_first_occurrence(number_of[trace.site[rows]])
    keys = [keys_of_sites[number] for number in number_of[trace.site[rows[firsts]]].tolist()]
    moved = sizes_of_copies(trace, rows)
    host_ns = trace.total_ns[rows]
    device_ns, timed = trace.device_times(rows)
    # An asynchronous copy has to wait if the host's memory is not page-locked.
    are_staged = [way in ACROSS and sync is False and pinned is False for way, _, sync, pinned in keys]
    are_waited = [
        way not in DEVICE_DIRECTIONS or (way in ACROSS and (sync is not False or is_staged))
        for (way, _, sync, _), is_staged in zip(keys, are_staged, strict=True)
    ]
    staged, waited = (np.array(mask, dtype=np.bool_)[group_of_row] for mask in (are_staged, are_waited))
    columns = (
        np.ones_like(rows), moved, host_ns, timed, device_ns * timed, moved * timed, host_ns * waited, moved * waited,
        staged,
    )  # fmt: skip
    groups = Groups(group_of_row, len(keys))
    sums_of_keys = zip(keys, *(groups.sum_by_group(column).tolist() for column in columns), strict=True)
    return sorted((CopyUse(*key, *sums) for key, *sums in sums_of_keys), key=_rank_of_copy)


def sum_by_direction(uses: Iterable[CopyUse]) -> list[CopyUse]:
    groups: dict[str, list[CopyUse]] = {}
    for use in uses:
        groups.setdefault(use.direction, []).append(use)
    return [sum_omitted_rows(of_it, SUMS, direction=direction, remaining=0) for direction, of_it in groups.items()]


@dataclass(frozen=True, slots=True)
class CopiesView(View):
    """The `copies` view: the copies by direction and by call."""

    coverage: Coverage
    directions: tuple[CopyUse, ...]
    calls: tuple[CopyUse, ...]
    is_ours: bool
    _options: Options

    TITLE = "Copies"

    def sections(self) -> list[Section]:
        sums = "calls=Calls|moved_mb=MB|device_ns=Device|host_ns=Host|rate_gb_s=GB/s|base=Over|"
        texts: dict[str, Text] = {
            "device_ns": lambda use, unit: format_time(use.device_ns, unit) if use.timed else MISSING,
            "base": lambda use, unit: "part" if use.device_ns and use.timed < use.calls else use.base or MISSING,
        }
        return [
            Section(
                "Directions", self.directions, f"direction=Direction|{sums}timed=Timed",
                texts={**texts, "direction": lambda use, unit: ENDS[use.direction]}, widths=COLUMN_WIDTH,
            ),
            Section(
                "Calls", self.calls, f"call=Call|direction=Direction|{sums}memory=Memory|mode=Mode|+staged=Staged",
                texts=texts,
            ),
        ]  # fmt: skip

    def header_lines(self) -> list[str]:
        rate = "GB/s: 10^9 bytes a second, over the time that the column Over names"
        return [*self.coverage.lines(), f"Time unit: {self._options.unit}; MB: 10^6 bytes; {rate}"]

    def reasons_if_empty(self) -> list[str]:
        return [] if self.calls else self.coverage.explain_no_spans("copy", NO_COPY)

    def footnotes(self) -> list[str]:
        lines = ["Device, Host: sums over calls. Timed: calls that have device time."]
        if any(use.device_ns and use.timed < use.calls for use in self.directions):
            lines.append("Over part: the rate is that of the calls with device time, over that time.")
        if any(not use.base for use in self.calls):
            lines.append("GB/s -: the call does not wait for the copy, so its host time says nothing of it.")
        staged = sum(use.staged for use in self.directions)
        if staged:
            lines += [
                f"* {staged} call{'s' * (staged > 1)} asked for an asynchronous copy with pageable memory, which is "
                "none: it goes",
                "  through a buffer while the host waits. Pin the host's memory, or do without non_blocking.",
            ]
        if not self.is_ours:
            lines.append("A trace of another profiler: Host is the length of its slices, wherever they ran.")
        return lines


def copies(recording: Recording, options: Options) -> CopiesView:
    """Return the `copies` view of the kept spans. The options `rows` and `least_ns` limit the table of calls."""
    uses = sum_copies(recording.columns)
    heaviest = sorted(uses, key=lambda use: -use.moved_bytes)
    shown = limit_rows(heaviest, options, lambda use: use.device_ns or use.host_ns, make_row_summer(*SUMS))
    return CopiesView(
        coverage=Coverage.measure_coverage(recording),
        directions=tuple(sum_by_direction(uses)),
        calls=tuple(sorted(shown, key=lambda use: (bool(use.remaining), *_rank_of_copy(use)))),
        is_ours=recording.trace.origin.recorder != "other",
        _options=options,
    )


def _group_key_of_copy(site: Site) -> tuple[str, str, bool | None, bool | None]:
    facts = dict(site.attributes)
    direction, sync, pinned = facts.get("direction"), facts.get("sync"), facts.get("pinned")
    is_known = isinstance(direction, str) and direction in DIRECTIONS
    return (
        str(direction) if is_known else "",
        # A probe's span has the name of its direction, so its function says more. Other spans have a name of their own.
        (is_known and site.function) or site.name,
        sync if isinstance(sync, bool) else None,
        pinned if isinstance(pinned, bool) else None,
    )


def sizes_of_copies(trace: Columns, rows: Int64s) -> Int64s:
    return read_integer_attribute(trace.attributes, "bytes", rows, LARGEST_COPY_BYTES + 1).clip(0)


def _rank_of_copy(use: CopyUse) -> tuple[int, int, int, str]:
    order = DIRECTIONS.index(use.direction) if use.direction else len(DIRECTIONS)
    return order, -use.moved_bytes, -use.calls, use.call


SUMS = (
    "calls", "moved_bytes", "host_ns", "timed", "device_ns", "timed_bytes", "waited_ns", "waited_bytes", "staged",
)  # fmt: skip
