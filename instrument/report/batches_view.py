"""The `batches` view: how large batches were, how long they took, and how uneven their items were.

A batch is a span that says which requests it serves (`batch:` in a rule, or `scope(name, batch=...)`). Weights say how
much each request takes of it, such as tokens. Where they differ the batch is uneven, which is waste only where the
engine pads all to the heaviest: one that batches continuously, and schedules tokens, pads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from instrument.recording.histogram import percentiles_of
from instrument.recording.spans import BATCH_KEYS, BATCH_WEIGHTS
from instrument.report.coverage import Coverage, none_held
from instrument.report.requests_view import joined_requests, request_device_ledger
from instrument.report.table import MISSING, bounded, compact, in_unit, named_table, section_title, share, tenths, title
from instrument.report.view import UNITS, Options, Recording
from instrument.trace.columns import Int64s, Trace
from instrument.trace.groups import Groups
from instrument.trace.joined import THOUSANDTHS, Served


@dataclass(frozen=True, slots=True)
class NamedBatches:
    """The batches of one name. `items` are the requests in them, one for each batch that it was in.

    `fill` is the mean size over the largest one seen. `per_item_ns` is the time of all batches by their items.
    `weight` is the sum of the weights where they are told, and `uneven` the share of the heaviest item's weight times
    the size that no item had. `unbound` items have keys that no request is known by. `device_ns` is what they had of
    devices, `uneven_ns` what of that was padding, batch by batch, if all were padded; None where there is none. One
    with `remaining` stands for so many names that were left out.
    """

    name: str
    batches: int
    items: int
    mean_size: float
    p50_size: int
    max_size: int
    fill: float | None
    summed_ns: int
    p50_ns: int
    p99_ns: int
    per_item_ns: float | None
    weight: float | None
    uneven: float | None
    unbound: int
    device_ns: int | None = None
    uneven_ns: int | None = None
    remaining: int = 0


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """The view: all batches that are held, by name."""

    coverage: Coverage
    rows: tuple[NamedBatches, ...]
    _options: Options

    def lines(self) -> list[str]:
        """A table of sizes and one of times."""
        unit = self._options.unit
        lines = [*title("Batches Report"), *self.coverage.lines(), f"Time unit: {unit}", ""]
        if not self.rows:
            otherwise = "No batch was recorded: a rule with `batch:` says which requests a call serves."
            return [*lines, *none_held("batch", otherwise, complete=self.coverage.complete), ""]
        lines += section_title("Sizes")
        header = ["Batch", "Count", "Items", "Mean", "p50", "Max", "Fill", "Weight", "Uneven", "Unbound"]
        cells = [
            [
                _name(one),
                str(one.batches),
                str(one.items),
                compact(one.mean_size),
                str(one.p50_size),
                str(one.max_size),
                tenths(one.fill, 1),
                MISSING if one.weight is None else compact(one.weight),
                tenths(one.uneven, 1),
                str(one.unbound),
            ]
            for one in self.rows
        ]
        lines += named_table(header, cells, 0)
        lines += [
            "Fill: the mean size over the largest one. Uneven: of the heaviest item's weight times the size,",
            "what no item had: padding where the engine pads to the heaviest item, no waste where it does not.",
            "Unbound: items with keys that no request is known by.",
            "",
            *section_title("Times"),
        ]
        cells = []
        for one in self.rows:
            times = (one.summed_ns, one.p50_ns, one.p99_ns, one.per_item_ns)
            shown = [MISSING if time_ns is None else compact(time_ns / UNITS[unit]) for time_ns in times]
            rate = MISSING if not one.summed_ns else compact((one.weight or one.items) * 1e9 / one.summed_ns)
            cells.append([_name(one), *shown, rate])
        lines += named_table(["Batch", "Sum", "p50", "p99", "An item", "A second"], cells, 0)
        lines += ["A second: items, or the weight of items where it is told, in a second of batches.", ""]
        return [*lines, *self._device_lines(unit)]

    def _device_lines(self, unit: str) -> list[str]:
        cells = []
        for one in self.rows:
            if one.device_ns is not None:
                times = (one.device_ns, one.device_ns / one.items if one.items else None, one.uneven_ns)
                sum_ns, item_ns, uneven_ns = (in_unit(time_ns, unit) for time_ns in times)
                ratios = (share(one.device_ns, one.summed_ns), share(one.uneven_ns or 0, one.device_ns))
                of_wall, uneven = (tenths(ratio, 1) for ratio in ratios)
                uneven = MISSING if one.uneven_ns is None else uneven
                cells.append([_name(one), sum_ns, of_wall, item_ns, uneven_ns, uneven])
        if not cells:
            return []
        return [
            *section_title("Device time"),
            *named_table(["Batch", "Sum", "Of time", "An item", "Uneven", "Of sum"], cells, 0),
            "Of time: of the batches' own, beyond 100% where several devices work, or go on after it. Uneven:",
            "of each batch's device time what was padding, if the engine pads to the heaviest item.",
            "",
        ]


def batches(recording: Recording, options: Options) -> BatchTimes:
    """The view of the spans that are held. `rows` and `least_ns` bound the tables, whose order is by time."""
    trace, served = recording.columns, recording.once(joined_requests).served
    device_ns = recording.once(request_device_ledger).batch_ns if len(trace.device) else np.zeros(len(trace), np.int64)
    rows = trace.attributes.having(BATCH_KEYS)
    has_weights = np.isin(rows, trace.attributes.having(BATCH_WEIGHTS))
    names = [trace.sites[site].name for site in trace.site[rows].tolist()]
    by_name: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        by_name.setdefault(name, []).append(place)
    found = [
        _batches(name, trace, served, rows[places], bool(has_weights[places].all()), device_ns)
        for name, places in by_name.items()
    ]
    found.sort(key=lambda one: (-one.summed_ns, one.name))

    def rest(others: Sequence[NamedBatches]) -> NamedBatches:
        places = [place for one in others for place in by_name[one.name]]
        return _batches(
            "", trace, served, np.sort(rows[places]), all(has_weights[places]), device_ns, remaining=len(others)
        )

    shown = bounded(found, options, lambda one: one.summed_ns, rest)
    return BatchTimes(Coverage.of_recording(recording), shown, options)


def _batches(
    name: str,
    trace: Trace,
    served: Served,
    rows: Int64s,
    has_weights: bool,
    device_ns: Int64s,
    remaining: int = 0,
) -> NamedBatches:
    places = np.searchsorted(rows, served.batch).clip(max=len(rows) - 1)
    pairs = np.flatnonzero(rows[places] == served.batch)
    groups, weights = Groups(places[pairs], len(rows)), served.weight[pairs]
    sizes, sums, heaviest = groups.sizes(), groups.sums(weights), groups.most(weights, 0)
    times = sorted(trace.total_ns[rows].tolist())
    summed_ns, items = sum(times), len(pairs)
    room = heaviest * sizes
    padded, on_device_ns = int(room.sum()), device_ns[rows]
    uneven_ns = on_device_ns * ((room - sums) / np.maximum(room, 1))
    p50_ns, p99_ns = percentiles_of(times, (0.5, 0.99))
    largest = int(sizes.max())
    return NamedBatches(
        name=name,
        batches=len(rows),
        items=items,
        mean_size=items / len(rows),
        p50_size=percentiles_of(sorted(sizes.tolist()), (0.5,))[0],
        max_size=largest,
        fill=share(items, largest * len(rows)),
        summed_ns=summed_ns,
        p50_ns=p50_ns,
        p99_ns=p99_ns,
        per_item_ns=summed_ns / items if items else None,
        weight=int(sums.sum()) / THOUSANDTHS if has_weights else None,
        uneven=share(padded - int(sums.sum()), padded) if has_weights else None,
        unbound=int((served.request[pairs] < 0).sum()),
        device_ns=int(on_device_ns.sum()) or None,
        uneven_ns=round(float(uneven_ns.sum())) if has_weights and on_device_ns.any() else None,
        remaining=remaining,
    )


def _name(one: NamedBatches) -> str:
    return f"(remaining {one.remaining})" if one.remaining else one.name
