"""The devices and the calls of a page: the work of each stream, the readings of gauges, and the call tree.

A lane is a stream with the device intervals of spans. Kernels and copies of torch.profiler's record have a lane of
their own. If there are too many, the page has the longest.

The call tree has the rows of the view `events`, of all threads together. A row is as wide as the self times at and
below it. So it is at least as wide as the rows below it, even with parallel work. The user may exclude the waits of
coroutines, or select device time as the width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from instrument.recording.spans import GAUGES, HOST
from instrument.report.event_rows import EventRow
from instrument.report.events_view import events
from instrument.report.page.kept_spans import steps
from instrument.report.table import safe, shorten
from instrument.report.view import Options, Recording
from instrument.trace.columns import Int64s
from instrument.trace.forest import NONE

MOST_ROWS = 4000
"""The most rows of the tree. One more row sums up the rest of a level."""

DETAIL = "OpDetail"
"""The tracer option of the page's call tree: phases have rows, and all instances of a layer share one row."""

NEVER = -1
"""The number of a missing parent or row. Real numbers are 0 or more."""

GREATEST = (1 << 63) - 1


class CallsTree:
    """The rows of the call tree, parents first, and their widths."""

    def __init__(self, recording: Recording, options: Options) -> None:
        asking = replace(options, tracer_option=DETAIL, threads="merged", state="All", rows=MOST_ROWS, corrected=False)
        blocks = events(recording, asking).blocks
        self.rows: tuple[EventRow, ...] = blocks[0].rows if blocks else ()
        self._parents = _parents(self.rows)
        self.names: list[str] = []
        for row, parent in zip(self.rows, self._parents, strict=True):
            # A phase has the name of its parent in its label, which here is above it.
            is_below = row.kind == "phase" and parent != NEVER
            self.names.append(row.name.removeprefix(f"{self.names[parent]}/") if is_below else row.name)

    def widths(self) -> list[int]:
        """Return each row's width: the sum of the self times at and below it."""
        return self._with_below([max(row.self_ns, 0) for row in self.rows])

    def device_widths(self) -> list[int]:
        """Return each row's width in device time. It is never below the sum of its children."""
        widths, below = [max(row.device_ns, 0) for row in self.rows], [0] * len(self.rows)
        for place in range(len(widths) - 1, -1, -1):
            widths[place] = max(widths[place], below[place])
            if self._parents[place] != NEVER:
                below[self._parents[place]] += widths[place]
        return widths

    def _with_below(self, widths_ns: list[int]) -> list[int]:
        for place in range(len(widths_ns) - 1, -1, -1):
            if self._parents[place] != NEVER:
                widths_ns[self._parents[place]] += widths_ns[place]
        return widths_ns

    def document(self) -> dict[str, Any]:
        """Return the rows as columns for the page's JSON."""
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
            "running": _column(self._with_below([max(row.self_ns - row.waiting_ns, 0) for row in self.rows])),
            "on_device": _column(self.device_widths()),
            **{field: _column(getattr(row, field) for row in self.rows) for field in fields},
        }

    def left_out(self) -> list[str]:
        """Return a sentence on the omitted rows, [] if there are none."""
        together = sum(row.remaining for row in self.rows)
        if not together:
            return []
        return [
            f"The call tree has its {len(self.rows):,} heaviest rows; {together:,} more stand as what remains of their "
            "level, by their own self times, and what is below these is left out."
        ]


def _column(numbers: Iterable[int | None]) -> list[int]:
    return [NEVER if number is None else min(number, GREATEST) for number in numbers]


def _parents(rows: Sequence[EventRow]) -> list[int]:
    above: list[int] = []
    parents = []
    for place, row in enumerate(rows):
        del above[row.depth :]
        parents.append(above[-1] if above else NEVER)
        above.append(place)
    return parents


MOST_STRETCHES = 100_000
"""The most device intervals and kernels in a page: some 0.7 MB."""

MOST_READINGS = 200
"""The most readings of one gauge of one device."""

NAME = 160
"""The greatest width of a name, in columns."""


class DeviceLanes:
    """The device work of a recording. `number_of` maps a row of the trace to the number of its span in the page."""

    def __init__(self, recording: Recording, number_of: Int64s, most_stretches: int = MOST_STRETCHES) -> None:
        self._recording, self._number_of = recording, number_of
        self._lanes: dict[tuple[int, int, str], int] = {}
        self._names: dict[str, int] = {}
        stretches, kernels = self._stretches(), self._kernels()
        every = {name: np.concatenate([stretches[name], kernels[name]]) for name in stretches}
        self._all_ns = int(every["length"].sum(dtype=np.float64)) if len(every["length"]) else 0
        self.count = len(every["start"])
        longest = np.sort(np.argsort(-every["length"], kind="stable")[:most_stretches])
        longest = longest[np.argsort(every["start"][longest], kind="stable")]
        self._kept: Mapping[str, Int64s] = {name: numbers[longest] for name, numbers in every.items()}

    def _stretches(self) -> dict[str, Int64s]:
        """Return the timed device intervals of spans as columns."""
        trace, intervals = self._recording.columns, self._recording.columns.device
        rows = np.flatnonzero(intervals.timed)
        row = intervals.row[rows].astype(np.int64)
        streams = zip(intervals.device[rows].tolist(), intervals.stream[rows].tolist(), strict=True)
        lanes = [self._lane(device, stream, "") for device, stream in streams]
        site_names = [self._name(site.name) for site in trace.sites]
        return {
            "start": intervals.start_ns[rows] - self._recording.trace.start_ns,
            "length": intervals.end_ns[rows] - intervals.start_ns[rows],
            "lane": np.array(lanes, dtype=np.int64),
            "name": np.array([*site_names, NONE], dtype=np.int64)[trace.site[row]],
            "span": self._number_of[row],
            "label": intervals.label[rows].astype(np.int64),
        }

    def _kernels(self) -> dict[str, Int64s]:
        """Return the device work in torch.profiler's record as columns."""
        base_ns, kernels = self._recording.trace.start_ns, self._recording.trace.kernels
        rows = [
            (row.start_ns - base_ns, row.end_ns - row.start_ns, self._lane(row.device, row.stream, "kernels"),
             self._name(row.name), NONE, NONE)
            for row in kernels
        ]  # fmt: skip
        table = np.array(rows, dtype=np.int64).reshape(-1, 6)
        return dict(zip(("start", "length", "lane", "name", "span", "label"), table.T, strict=True))

    def _lane(self, device: int, stream: int, kind: str) -> int:
        return self._lanes.setdefault((device, stream, kind), len(self._lanes))

    def _name(self, name: str) -> int:
        return self._names.setdefault(shorten(safe(name), NAME) or "(no name)", len(self._names))

    def document(self) -> dict[str, Any]:
        """Return lanes, device intervals as columns, and gauges for the page's JSON."""
        stretches = self._kept
        order = sorted(self._lanes)
        place_of = {lane: place for place, lane in enumerate(order)}
        place = np.array([*map(place_of.__getitem__, self._lanes), NONE], dtype=np.int64)
        used, number = np.unique(stretches["name"], return_inverse=True)
        names = list(self._names)
        return {
            "lanes": [f"GPU {device}, stream {stream}{f', {kind}' if kind else ''}" for device, stream, kind in order],
            "names": [names[number] for number in used.tolist()],
            "labels": list(map(safe, self._recording.columns.device.labels)),
            "start": steps(stretches["start"]),
            "length": stretches["length"].tolist(),
            "lane": place[stretches["lane"]].tolist(),
            "name": number.reshape(-1).tolist(),
            "span": steps(stretches["span"]),
            "label": stretches["label"].tolist(),
            "gauges": self._gauges(),
        }

    def left_out(self) -> list[str]:
        """Return sentences on the device work and readings that the page leaves out."""
        sentences = []
        short = self.count - len(self._kept["start"])
        if short:
            ratio = 1 - float(self._kept["length"].sum(dtype=np.float64)) / max(self._all_ns, 1)
            sentences.append(
                f"{short:,} of {self.count:,} stretches on devices are not drawn: the shortest, {100 * ratio:.2g}% of "
                "the sum of all. Tables count all."
            )
        if any(count > MOST_READINGS for count in self._readings.values()):
            sentences.append(f"Of gauges with more than {MOST_READINGS} readings every few are drawn. Tables have all.")
        return sentences

    def _gauges(self) -> list[dict[str, Any]]:
        """Return the readings of each gauge of each device. Known gauges come first."""
        trace = self._recording.trace
        readings_of: dict[tuple[int, str, int], list[tuple[int, float]]] = {}
        for pid, sample in trace.readings():
            if sample.value is not None and np.isfinite(sample.value):
                key = (sample.device, sample.name, pid if trace.processes else 0)
                readings_of.setdefault(key, []).append((sample.at_ns, float(sample.value)))
        self._readings = {key: len(readings) for key, readings in readings_of.items()}
        places = {name: place for place, name in enumerate(GAUGES)}
        models = {gpu.device: gpu.model for gpu in trace.gpus}
        gauges = []
        for key in sorted(readings_of, key=lambda key: (key[0], places.get(key[1], len(places)), *key[1:])):
            (device, name, pid), readings = key, readings_of[key]
            some = readings[:: -(-len(readings) // MOST_READINGS)]
            model = shorten(safe(models.get(device, "")), NAME // 2)
            host = f"process {pid}" if pid else "process and host"
            gauges.append({
                "of": host if device == HOST else f"GPU {device}, {model}".removesuffix(", "),
                "name": shorten(safe(name), NAME),
                "unit": GAUGES[name].unit if name in GAUGES else "",
                "about": GAUGES[name].about if name in GAUGES else "",
                "at": steps(np.array([at_ns - trace.start_ns for at_ns, _ in some], dtype=np.int64)),
                "values": [float(f"{value:.4g}") for _, value in some],
            })  # fmt: skip
        return gauges

    _readings: Mapping[tuple[int, str, int], int] = {}
