"""The `batches` view: the sizes of batches, their times, and how unevenly the work is spread over their requests.

A batch is a span that names the requests that it serves (`batch:` in a rule, or `scope(name, batch=...)`). A request's
weight is its amount of work in the batch, such as its tokens. A batch is uneven if the weights differ. Uneven batches
waste time only if the engine pads all items to the heaviest. Engines with continuous batching do not pad.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from instrument.recording.distributions import percentiles_of
from instrument.recording.spans import BATCH_KEYS, BATCH_WEIGHTS
from instrument.report.request_groups import (
    GroupShare,
    group_shares,
    joined_requests,
    request_device_ledger,
    shares_section,
)
from instrument.report.section import Coverage, Section, View
from instrument.report.table import bounded, share
from instrument.report.view import Options, Recording
from instrument.trace.columns import Columns, Int64s
from instrument.trace.groups import Groups
from instrument.trace.joined import THOUSANDTHS, Served

NO_BATCH = "No batch was recorded: a rule with `batch:` says which requests a call serves."


@dataclass(frozen=True, slots=True)
class NamedBatches:
    """The batches of one name. An item is a request in a batch. So a request in two batches counts as two `items`.

    `fill` is the mean size divided by the largest size. `per_item_ns` is the time of all batches divided by `items`.
    `weight` is the sum of the known weights. `uneven` is the share of padding if the engine pads all items to the
    heaviest one. `unbound` counts the items whose key belongs to no request. `device_ns` is the device time and
    `uneven_ns` the padding within it, both None without device time. A row with `remaining` replaces that many names.
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

    def a_second(self) -> float | None:
        """Return the items for each second of batches, or their weight if it is known."""
        return share((self.weight or self.items) * 1e9, self.summed_ns)

    def device_ratio(self) -> float | None:
        """Return the device time as a share of the host time of the batches."""
        return share(self.device_ns or 0, self.summed_ns)

    def device_per_item_ns(self) -> float | None:
        return share(self.device_ns or 0, self.items)

    def uneven_ratio(self) -> float | None:
        """Return the share of padding in the device time."""
        return None if self.uneven_ns is None else share(self.uneven_ns, self.device_ns or 0)


@dataclass(frozen=True, slots=True)
class BatchTimes(View):
    """The `batches` view: sizes and times of all kept batches, by name."""

    coverage: Coverage
    rows: tuple[NamedBatches, ...]
    shares: tuple[GroupShare, ...]
    _options: Options

    TITLE = "Batches"

    def sections(self) -> list[Section]:
        return [
            Section(
                "Sizes", self.rows,
                "name=Batch|batches=Count|items=Items|mean_size=Mean|p50_size=p50|max_size=Max|fill=Fill|weight=Weight|"
                "uneven=Uneven|unbound=Unbound",
                (
                    "Fill: mean size / largest size. Uneven: the share of padding, if the engine pads the items of a",
                    "batch to the heaviest one. If it does not pad, nothing is wasted.",
                    "Unbound: items whose key belongs to no recorded request.",
                ),
            ),
            Section(
                "Times", self.rows,
                "name=Batch|summed_ns=Sum|p50_ns=p50|p99_ns=p99|per_item_ns=An item|a_second=A second",
                ("A second: items, or their weight if it is known, per second of batches.",),
            ),
            Section(
                "Device time", [row for row in self.rows if row.device_ns is not None],
                "name=Batch|device_ns=Sum|device_ratio=Of time|device_per_item_ns=An item|uneven_ns=Uneven|"
                "uneven_ratio=Of sum",
                (
                    "Of time: of the batches' own, beyond 100% where several devices work, or go on after it. Uneven:",
                    "of each batch's device time what was padding, if the engine pads to the heaviest item.",
                ),
            ),
            shares_section(self.shares, self._options),
        ]  # fmt: skip

    def head(self) -> list[str]:
        return [*self.coverage.lines(), f"Time unit: {self._options.unit}"]

    def nothing(self) -> list[str]:
        return [] if self.rows else self.coverage.none_held("batch", NO_BATCH)


def batches(recording: Recording, options: Options) -> BatchTimes:
    """Return the view of the kept spans, sorted by time. `rows` and `least_ns` limit the tables."""
    trace, served = recording.columns, recording.once(joined_requests).served
    device_ns = recording.once(request_device_ledger).batch_ns if len(trace.device) else np.zeros(len(trace), np.int64)
    rows = trace.attributes.having(BATCH_KEYS)
    has_weights = np.isin(rows, trace.attributes.having(BATCH_WEIGHTS))
    names = [trace.sites[site].name for site in trace.site[rows].tolist()]
    by_name: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        by_name.setdefault(name, []).append(place)
    rows_by_time = [
        _sum_batches(name, trace, served, rows[places], bool(has_weights[places].all()), device_ns)
        for name, places in by_name.items()
    ]
    rows_by_time.sort(key=lambda row: (-row.summed_ns, row.name))

    def rest(omitted: Sequence[NamedBatches]) -> NamedBatches:
        places = [place for row in omitted for place in by_name[row.name]]
        return _sum_batches(
            "", trace, served, np.sort(rows[places]), all(has_weights[places]), device_ns, remaining=len(omitted)
        )

    shown = bounded(rows_by_time, options, lambda row: row.summed_ns, rest)
    return BatchTimes(Coverage.of_recording(recording), shown, group_shares(recording, options), options)


def _sum_batches(
    name: str,
    trace: Columns,
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
