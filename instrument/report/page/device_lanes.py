"""The devices of a page: what each stream of each device did when, and what the gauges of devices and process read.

A lane is a stream: of spans the stretches between their events, and apart from these the kernels and copies that
torch.profiler saw. Where there are more than a page holds, it has the longest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from instrument.recording.spans import GAUGES, HOST
from instrument.report.page.varints import column_text, steps_text
from instrument.report.table import safe, shorten
from instrument.report.view import Recording
from instrument.trace.columns import Int64s
from instrument.trace.forest import NONE

MOST_STRETCHES = 100_000
"""Stretches and kernels in a page, at most: some 0.7 MB."""

MOST_READINGS = 200
"""Of one gauge of one device, at most."""

NAME = 160
"""Columns of a name, at most."""


class DeviceLanes:
    """What the devices of a recording did. `number_of` has the place of each row's span in the page."""

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
        """Of spans, but for what was captured or dropped, which has no time."""
        trace, its = self._recording.columns, self._recording.columns.device
        rows = np.flatnonzero(its.timed)
        row = its.row[rows].astype(np.int64)
        streams = zip(its.device[rows].tolist(), its.stream[rows].tolist(), strict=True)
        lanes = [self._lane(device, stream, "") for device, stream in streams]
        site_names = [self._name(site.name) for site in trace.sites]
        return {
            "start": its.start_ns[rows] - self._recording.facts.start_ns,
            "length": its.end_ns[rows] - its.start_ns[rows],
            "lane": np.array(lanes, dtype=np.int64),
            "name": np.array([*site_names, NONE], dtype=np.int64)[trace.site[row]],
            "span": self._number_of[row],
            "label": its.label[rows].astype(np.int64),
        }

    def _kernels(self) -> dict[str, Int64s]:
        """What torch.profiler saw."""
        base_ns, kernels = self._recording.facts.start_ns, self._recording.facts.kernels
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
        for one in self._recording.facts.samples:
            if one.value is not None and np.isfinite(one.value):
                found.setdefault((one.device, one.name), []).append((one.at_ns, float(one.value)))
        self._readings = {key: len(readings) for key, readings in found.items()}
        known = {name: place for place, name in enumerate(GAUGES)}
        models = {gpu.device: gpu.model for gpu in self._recording.facts.gpus}
        base_ns = self._recording.facts.start_ns
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
