"""The devices and the calls of a page: the work of each stream, the readings of gauges, and the call tree.

A lane is a stream: of spans the stretches between their events, and apart from these the kernels and copies that
torch.profiler saw. Where there are more than a page holds, it has the longest.

The call tree is the rows of the view `events` of all threads together. A row is as wide as the self times at and below
it, so that what is below a row never is wider than it, whatever ran side by side. What coroutines waited may be left
out of it; of devices the width is device time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from instrument.recording.spans import GAUGES, HOST
from instrument.report.event_rows import EventRow
from instrument.report.events_view import events
from instrument.report.page.kept_spans import column_text, steps_text
from instrument.report.table import safe, shorten
from instrument.report.view import Options, Recording
from instrument.trace.columns import Int64s
from instrument.trace.forest import NONE

MOST_ROWS = 4000
"""Rows of the tree, at most: the heaviest, and what was left out of a level as one row more."""

DETAIL = "OpDetail"
"""Phases are rows, instances of a layer are one."""

NEVER = -1
"""A number that does not exist, and the row above a topmost one: no other is below 0."""

GREATEST = (1 << 63) - 1


class CallsTree:
    """The rows in the order of the tree, each after what it is below, and their widths."""

    def __init__(self, recording: Recording, options: Options) -> None:
        asked = replace(options, tracer_option=DETAIL, threads="merged", state="All", rows=MOST_ROWS, corrected=False)
        blocks = events(recording, asked).blocks
        self.rows: tuple[EventRow, ...] = blocks[0].rows if blocks else ()
        self._parents = _parents(self.rows)
        self.names: list[str] = []
        for row, parent in zip(self.rows, self._parents, strict=True):
            # A phase is labelled with what it is a phase of, which here is above it.
            is_below = row.kind == "phase" and parent != NEVER
            self.names.append(row.name.removeprefix(f"{self.names[parent]}/") if is_below else row.name)

    def widths(self) -> list[int]:
        """Self times at and below each row."""
        return self._with_below([max(row.self_ns, 0) for row in self.rows])

    def running_widths(self) -> list[int]:
        """The same without what coroutines waited."""
        return self._with_below([max(row.self_ns - row.waiting_ns, 0) for row in self.rows])

    def device_widths(self) -> list[int]:
        """Device time of each row, or that of the rows right below where it is more."""
        found, below = [max(row.device_ns, 0) for row in self.rows], [0] * len(self.rows)
        for place in range(len(found) - 1, -1, -1):
            found[place] = max(found[place], below[place])
            if self._parents[place] != NEVER:
                below[self._parents[place]] += found[place]
        return found

    def _with_below(self, own: list[int]) -> list[int]:
        for place in range(len(own) - 1, -1, -1):
            if self._parents[place] != NEVER:
                own[self._parents[place]] += own[place]
        return own

    def document(self) -> dict[str, Any]:
        """The rows as columns."""
        numbers: dict[tuple[str, str], int] = {}
        for name, row in zip(self.names, self.rows, strict=True):
            numbers.setdefault((name, row.kind), len(numbers))
        of_rows = (numbers[name, row.kind] for name, row in zip(self.names, self.rows, strict=True))
        fields = (
            "depth", "calls", "errors", "total_ns", "self_ns", "waiting_ns", "device_ns", "min_ns", "max_ns", "p50_ns",
            "p99_ns", "remaining",
        )  # fmt: skip
        return {
            "names": [[safe(name) or "(no name)", kind] for name, kind in numbers],
            "name": _column(of_rows),
            "width": _column(self.widths()),
            "running": _column(self.running_widths()),
            "on_device": _column(self.device_widths()),
            **{field: _column(getattr(row, field) for row in self.rows) for field in fields},
        }

    def left_out(self) -> list[str]:
        """A sentence on the rows that are no more than a number."""
        together = sum(row.remaining for row in self.rows)
        if not together:
            return []
        return [
            f"The call tree has its {len(self.rows):,} heaviest rows; {together:,} more stand as what remains of their "
            "level, by their own self times, and what is below these is left out."
        ]


def _column(numbers: Iterable[int | None]) -> str:
    found = [NEVER if one is None else min(one, GREATEST) for one in numbers]
    return column_text(np.array(found, dtype=np.int64))


def _parents(rows: Sequence[EventRow]) -> list[int]:
    above: list[int] = []
    found = []
    for place, row in enumerate(rows):
        del above[row.depth :]
        found.append(above[-1] if above else NEVER)
        above.append(place)
    return found


MOST_STRETCHES = 100_000
"""Stretches and kernels in a page, at most: some 0.7 MB."""

MOST_READINGS = 200
"""Readings of one gauge of one device, at most."""

NAME = 160
"""Columns of a name, at most."""


class DeviceLanes:
    """The work of the devices of a recording. `number_of` has the place of each row's span in the page."""

    def __init__(self, recording: Recording, number_of: Int64s, most_stretches: int = MOST_STRETCHES) -> None:
        self._recording, self._number_of = recording, number_of
        self._lanes: dict[tuple[int, int, str], int] = {}
        self._names: dict[str, int] = {}
        stretches, kernels = self._stretches(), self._kernels()
        every = {name: np.concatenate([stretches[name], kernels[name]]) for name in stretches}
        self._all_ns = int(every["length"].sum(dtype=np.float64)) if len(every["length"]) else 0
        self.count = len(every["start"])
        kept = np.sort(np.argsort(-every["length"], kind="stable")[:most_stretches])
        kept = kept[np.argsort(every["start"][kept], kind="stable")]
        self._kept: Mapping[str, Int64s] = {name: numbers[kept] for name, numbers in every.items()}

    def _stretches(self) -> dict[str, Int64s]:
        """Return the stretches of spans; what was captured or dropped has no time."""
        trace, its = self._recording.columns, self._recording.columns.device
        rows = np.flatnonzero(its.timed)
        row = its.row[rows].astype(np.int64)
        streams = zip(its.device[rows].tolist(), its.stream[rows].tolist(), strict=True)
        lanes = [self._lane(device, stream, "") for device, stream in streams]
        site_names = [self._name(site.name) for site in trace.sites]
        return {
            "start": its.start_ns[rows] - self._recording.trace.start_ns,
            "length": its.end_ns[rows] - its.start_ns[rows],
            "lane": np.array(lanes, dtype=np.int64),
            "name": np.array([*site_names, NONE], dtype=np.int64)[trace.site[row]],
            "span": self._number_of[row],
            "label": its.label[rows].astype(np.int64),
        }

    def _kernels(self) -> dict[str, Int64s]:
        """Return the work that torch.profiler saw."""
        base_ns, kernels = self._recording.trace.start_ns, self._recording.trace.kernels
        found = [
            (one.start_ns - base_ns, one.end_ns - one.start_ns, self._lane(one.device, one.stream, "kernels"),
             self._name(one.name), NONE, NONE)
            for one in kernels
        ]  # fmt: skip
        table = np.array(found, dtype=np.int64).reshape(-1, 6)
        return dict(zip(("start", "length", "lane", "name", "span", "label"), table.T, strict=True))

    def _lane(self, device: int, stream: int, what: str) -> int:
        return self._lanes.setdefault((device, stream, what), len(self._lanes))

    def _name(self, name: str) -> int:
        return self._names.setdefault(shorten(safe(name), NAME) or "(no name)", len(self._names))

    def document(self) -> dict[str, Any]:
        """Lanes, stretches as columns, and gauges."""
        kept = self._kept
        order = sorted(self._lanes)
        place_of = {lane: place for place, lane in enumerate(order)}
        place = np.array([*map(place_of.__getitem__, self._lanes), NONE], dtype=np.int64)
        named, number = np.unique(kept["name"], return_inverse=True)
        names = list(self._names)
        return {
            "lanes": [f"GPU {device}, stream {stream}{f', {what}' if what else ''}" for device, stream, what in order],
            "names": [names[one] for one in named.tolist()],
            "labels": list(map(safe, self._recording.columns.device.labels)),
            "start": steps_text(kept["start"]),
            "length": column_text(kept["length"]),
            "lane": column_text(place[kept["lane"]]),
            "name": column_text(number.reshape(-1).astype(np.int64)),
            "span": steps_text(kept["span"]),
            "label": column_text(kept["label"]),
            "gauges": self._gauges(),
        }

    def left_out(self) -> list[str]:
        """Sentences on what of the devices the page does not have."""
        said = []
        left = self.count - len(self._kept["start"])
        if left:
            ratio = 1 - float(self._kept["length"].sum(dtype=np.float64)) / max(self._all_ns, 1)
            said.append(
                f"{left:,} of {self.count:,} stretches on devices are not drawn: the shortest, {100 * ratio:.2g}% of "
                "the sum of all. Tables count all."
            )
        if any(count > MOST_READINGS for count in self._readings.values()):
            said.append(f"Of gauges with more than {MOST_READINGS} readings every few are drawn. Tables have all.")
        return said

    def _gauges(self) -> list[dict[str, Any]]:
        """The readings of each gauge of each device, in the order of the known gauges."""
        found: dict[tuple[int, str], list[tuple[int, float]]] = {}
        for one in self._recording.trace.samples:
            if one.value is not None and np.isfinite(one.value):
                found.setdefault((one.device, one.name), []).append((one.at_ns, float(one.value)))
        self._readings = {key: len(readings) for key, readings in found.items()}
        known = {name: place for place, name in enumerate(GAUGES)}
        models = {gpu.device: gpu.model for gpu in self._recording.trace.gpus}
        base_ns = self._recording.trace.start_ns
        gauges = []
        for device, name in sorted(found, key=lambda key: (key[0], known.get(key[1], len(known)), key[1])):
            readings = found[device, name]
            some = readings[:: -(-len(readings) // MOST_READINGS)]
            model = shorten(safe(models.get(device, "")), NAME // 2)
            gauges.append({
                "of": "process and host" if device == HOST else f"GPU {device}, {model}".removesuffix(", "),
                "name": shorten(safe(name), NAME),
                "unit": GAUGES[name].unit if name in GAUGES else "",
                "about": GAUGES[name].about if name in GAUGES else "",
                "at": steps_text(np.array([at_ns - base_ns for at_ns, _ in some], dtype=np.int64)),
                "values": [float(f"{value:.4g}") for _, value in some],
            })  # fmt: skip
        return gauges

    _readings: Mapping[tuple[int, str], int] = {}
