"""The `batches` view: the sizes of batches, their times, and how unevenly the work is spread over their requests.

A batch is a span that names the requests that it serves. A request's weight is its amount of work in the batch, such as
its tokens.

The `neighbours` view, also in this module, shows how long requests of one group (such as a tenant) waited because of
another group. The rules that attribute a wait to a group are in `instrument.trace.bill`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from instrument.recording.distributions import percentiles_of_times
from instrument.recording.spans import BATCH_KEYS, BATCH_WEIGHTS
from instrument.report.request_groups import ENDPOINT, GroupShare, group_shares, make_shares_table, request_groups
from instrument.report.section import Coverage, Section, View
from instrument.report.table import (
    compute_share,
    format_time,
    limit_rows,
    make_row_summer,
    printable,
    shorten,
    wrap_text,
)
from instrument.report.view import Options, Recording
from instrument.trace.bill import BEHIND, BETWEEN, BLOCKED, SHARED, Account, Engine, Replay
from instrument.trace.columns import Int64s
from instrument.trace.indices import Groups, Members
from instrument.trace.joined import THOUSANDTHS

NO_BATCH = "No batch was recorded: a rule with `batch:` says which requests a call serves."


@dataclass(frozen=True, slots=True)
class NamedBatches:
    """The batches of one name. A request in two batches counts as two `items`.

    - `unbound`: the number of items whose key belongs to no request
    - `fill`: the mean size divided by the largest size
    - `uneven`: the share of padding if the engine pads all items to the heaviest item
    - `device_ns`, `uneven_ns`: None without device time
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
        """Return the items per second of batch time, or the weight per second if weights are known."""
        return compute_share((self.weight or self.items) * 1e9, self.summed_ns)

    def device_ratio(self) -> float | None:
        return compute_share(self.device_ns or 0, self.summed_ns)

    def device_per_item_ns(self) -> float | None:
        return compute_share(self.device_ns or 0, self.items)

    def uneven_ratio(self) -> float | None:
        return None if self.uneven_ns is None else compute_share(self.uneven_ns, self.device_ns or 0)


@dataclass(frozen=True, slots=True)
class BatchTimes(View):
    """The `batches` view: the sizes and times of batches, by name."""

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
            make_shares_table(self.shares, self._options),
        ]  # fmt: skip

    def header_lines(self) -> list[str]:
        return [*self.coverage.lines(), f"Time unit: {self._options.unit}"]

    def reasons_if_empty(self) -> list[str]:
        return [] if self.rows else self.coverage.explain_no_spans("batch", NO_BATCH)


def batches(recording: Recording, options: Options) -> BatchTimes:
    """Return the `batches` view of the kept spans. Batches are grouped by name, and the name with the most time comes
    first."""
    trace = recording.columns
    rows, (names, of_site) = trace.attributes.rows_with_attribute(BATCH_KEYS), trace.describe_sites(attrgetter("name"))
    members = Members(of_site[trace.site[rows]], len(names), rows)
    of_name = {name: members[number] for number, name in enumerate(names) if len(members[number])}
    rows_by_time = [_sum_batches(recording, name, of_name[name]) for name in of_name]
    rows_by_time.sort(key=lambda row: (-row.summed_ns, row.name))

    def sum_omitted(omitted: Sequence[NamedBatches]) -> NamedBatches:
        return _sum_batches(
            recording, "", np.sort(np.concatenate([of_name[row.name] for row in omitted])), len(omitted)
        )

    shown = limit_rows(rows_by_time, options, lambda row: row.summed_ns, sum_omitted)
    return BatchTimes(Coverage.measure_coverage(recording), shown, group_shares(recording, options), options)


def _sum_batches(recording: Recording, name: str, rows: Int64s, remaining: int = 0) -> NamedBatches:
    trace, served = recording.columns, recording.joined.served
    has_weights = bool(np.isin(rows, trace.attributes.rows_with_attribute(BATCH_WEIGHTS)).all())
    places = np.searchsorted(rows, served.batch).clip(max=len(rows) - 1)
    pairs = np.flatnonzero(rows[places] == served.batch)
    groups, weights = Groups(places[pairs], len(rows)), served.weight[pairs]
    sizes, sums, heaviest = groups.count_members(), groups.sum_by_group(weights), groups.max_by_group(weights, 0)
    times = sorted(trace.total_ns[rows].tolist())
    summed_ns, items = sum(times), len(pairs)
    room, on_device_ns = heaviest * sizes, np.zeros(len(rows), dtype=np.int64)
    padded = int(room.sum())
    if len(trace.device):
        on_device_ns = recording.device_ledger.batch_ns[rows]
    uneven_ns = on_device_ns * ((room - sums) / np.maximum(room, 1))
    p50_ns, p99_ns = percentiles_of_times(times, (0.5, 0.99))
    largest = int(sizes.max())
    return NamedBatches(
        name=name,
        batches=len(rows),
        items=items,
        mean_size=items / len(rows),
        p50_size=percentiles_of_times(sorted(sizes.tolist()), (0.5,))[0],
        max_size=largest,
        fill=compute_share(items, largest * len(rows)),
        summed_ns=summed_ns,
        p50_ns=p50_ns,
        p99_ns=p99_ns,
        per_item_ns=summed_ns / items if items else None,
        weight=int(sums.sum()) / THOUSANDTHS if has_weights else None,
        uneven=compute_share(padded - int(sums.sum()), padded) if has_weights else None,
        unbound=int((served.request[pairs] < 0).sum()),
        device_ns=int(on_device_ns.sum()) or None,
        uneven_ns=round(float(uneven_ns.sum())) if has_weights and on_device_ns.any() else None,
        remaining=remaining,
    )


NOBODY = "(nobody)"
"""The label of waits that neither a recorded batch nor a known request caused."""

REPLAYED = 3
"""The maximum number of groups whose absence is simulated."""


@dataclass(frozen=True, slots=True)
class GroupWaits:
    """The waits of one group's requests, by cause: other groups, the group itself, or nobody. `inflicted_ns` is the
    time for which requests of all groups waited because of the group `name`."""

    name: str
    requests: int
    suffered_ns: int
    by_others_ns: int
    by_itself_ns: int
    by_nobody_ns: int
    inflicted_ns: int
    remaining: int = 0

    @property
    def mean_ns(self) -> float:
        return self.suffered_ns / self.requests


@dataclass(frozen=True, slots=True)
class Delay:
    """The time for which the group `name` waited because of the group `cause`. `ratio` is its share of all waits of
    `name`."""

    name: str
    cause: str
    mean_ns: float | None
    summed_ns: int
    ratio: float | None
    queued_ns: int
    shared_ns: int
    between_ns: int
    blocked_ns: int
    remaining: int = 0


GROUP_SUMS = ("requests", "suffered_ns", "by_others_ns", "by_itself_ns", "by_nobody_ns", "inflicted_ns")
DELAY_SUMS = ("summed_ns", "queued_ns", "shared_ns", "between_ns", "blocked_ns")
"""The fields that are added up in the row of omitted delays."""


@dataclass(frozen=True, slots=True)
class Without:
    """The queue times of all requests outside of one group, as recorded, and as predicted without that group."""

    name: str
    requests: int
    mean_ns: float
    mean_without_ns: float
    p99_ns: int
    p99_without_ns: int


@dataclass(frozen=True, slots=True)
class NeighbourBill(View):
    """The `neighbours` view: the waits that each group of requests caused. `replayed_ns` is the mean queue time in a
    replay of all requests, None without a replay."""

    coverage: Coverage
    groups: tuple[GroupWaits, ...]
    delays: tuple[Delay, ...]
    predictions: tuple[Without, ...]
    suffered_ns: int
    inflicted_ns: int
    nobody_ns: int
    queue_ns: float | None
    replayed_ns: float | None
    _options: Options

    TITLE = "Neighbours"

    def sections(self) -> list[Section]:
        by = self._options.requests_by or ENDPOINT
        return [
            Section(
                f"Waits by {by}", self.groups,
                "name=Value|requests=Requests|mean_ns=Each|suffered_ns=Suffered|by_others_ns=By others|"
                "by_itself_ns=By itself|by_nobody_ns=By nobody|inflicted_ns=Inflicted",
                (
                    "Each: how long a request waited for others: in queues, in batches, between batches, for blocked",
                    "loops. Suffered: the sum. By nobody: no recorded batch ran. Inflicted: on all groups, itself too.",
                ),
            ),
            Section(
                "Who delayed whom", self.delays,
                "name=Waited|cause=For|mean_ns=Each|summed_ns=Sum|ratio=Of waits|queued_ns=Queue|shared_ns=In a step|"
                "between_ns=Between|blocked_ns=Loop",
                (
                    "Queue: before the first batch, while batches of For ran. In a step: the part of For in a common",
                    "batch. Between: later, while other batches of For ran. Loop: For blocked the event loop.",
                ),
            ),
            Section(
                "Queues of the others", self.predictions,
                "name=Without|requests=Others|mean_ns=Mean|mean_without_ns=Without|p99_ns=p99|p99_without_ns=Without",
                ("Mean and p99 of the queue time of the other requests, and predicted without these: by a replay.",),
            ),
        ]  # fmt: skip

    def sentence(self) -> str:
        delay = next((row for row in self.delays if row.cause not in (row.name, NOBODY) and row.mean_ns), None)
        if delay is None:
            return ""
        name, cause = (shorten(printable(text) or "(no name)", 40) for text in (delay.name, delay.cause))
        unit = self._options.unit
        return f"Requests of {name} waited {format_time(delay.mean_ns, unit)} {unit} each for requests of {cause}."

    def header_lines(self) -> list[str]:
        return [*self.coverage.lines(), f"Time unit: {self._options.unit}", *wrap_text(self.sentence())]

    def reasons_if_empty(self) -> list[str]:
        return [] if self.suffered_ns else self.coverage.explain_no_spans("wait in a queue or a batch", NO_BATCH)

    def footnotes(self) -> list[str]:
        unit = self._options.unit
        suffered, inflicted, nobody = (
            f"{format_time(time_ns, unit)} {unit}" for time_ns in (self.suffered_ns, self.inflicted_ns, self.nobody_ns)
        )
        lines = [f"Suffered {suffered} = inflicted {inflicted} + by nobody {nobody}"]
        if self.replayed_ns is not None and not self.predictions:
            replayed, recorded = (
                f"{format_time(time_ns, unit)} {unit}" for time_ns in (self.replayed_ns, self.queue_ns)
            )
            lines += wrap_text(
                f"Not predicted: a replay of all requests has a mean queue time of {replayed}, and recorded were "
                f"{recorded}. The engine works otherwise than the replay."
            )
        return lines


def neighbours(recording: Recording, options: Options) -> NeighbourBill:
    """Return the `neighbours` view of the kept spans. Requests are grouped by the option `requests_by`, by default by
    endpoint."""
    trace, joined = recording.columns, recording.joined
    grouped = request_groups(recording, options)
    names, group = grouped.names, grouped.group
    is_charged = np.zeros(len(joined.rows), dtype=np.bool_)
    is_charged[joined.of[recording.complete_requests[0]]] = True
    account = Account(trace, joined, recording.turns, group, len(names), is_charged)
    bill = account.compute_bill(recording.ledger)
    sums = bill.charged_ns.sum(axis=0)
    requests = Groups(group[is_charged], len(names)).count_members().tolist()
    inflicted = sums.sum(axis=0).tolist()
    groups = [
        GroupWaits(name, requests[place], suffered, suffered - row[place] - row[-1], row[place], row[-1], ran)
        for place, (name, suffered, row, ran) in enumerate(
            zip(names, bill.suffered_ns.tolist(), sums.tolist(), inflicted[:-1], strict=True)
        )
    ]
    groups.sort(key=lambda row: (-row.inflicted_ns, row.name))
    delays = [
        Delay(
            name, cause, compute_share(sum(ways), requests[place]), sum(ways),
            compute_share(sum(ways), int(bill.suffered_ns[place])),
            ways[BEHIND], ways[SHARED], ways[BETWEEN], ways[BLOCKED],
        )
        for place, name in enumerate(names)
        for column, cause in enumerate((*names, NOBODY))
        if any(ways := bill.charged_ns[:, place, column].tolist())
    ]  # fmt: skip
    delays.sort(key=lambda row: (-row.summed_ns, row.name, row.cause))
    on_others = np.array(inflicted[:-1], dtype=np.int64) - np.diagonal(sums)
    every, predictions = _predict_queues_without_groups(recording, account, group, on_others, names)
    return NeighbourBill(
        coverage=Coverage.measure_coverage(recording),
        groups=limit_rows(
            [row for row in groups if row.requests], options, attrgetter("suffered_ns"), make_row_summer(*GROUP_SUMS)
        ),
        delays=limit_rows(delays, options, attrgetter("summed_ns"), make_row_summer(*DELAY_SUMS)),
        predictions=predictions,
        suffered_ns=sum(bill.suffered_ns.tolist()),
        inflicted_ns=sum(inflicted[:-1]),
        nobody_ns=inflicted[-1],
        queue_ns=None if every is None else float(every.queue_ns.mean()),
        replayed_ns=None if every is None else float(every.replayed_ns.mean()),
        _options=options,
    )


def _predict_queues_without_groups(
    recording: Recording, account: Account, group: Int64s, on_others: Int64s, names: Sequence[str]
) -> tuple[Replay | None, tuple[Without, ...]]:
    joined = recording.joined
    causes = [place for place in np.argsort(-on_others, kind="stable").tolist() if on_others[place]][:REPLAYED]
    if not causes:
        return None, ()
    engine = Engine(recording.columns, joined, recording.turns, account.lanes)
    every = engine.replay(np.ones(len(joined.rows), dtype=np.bool_))
    if not every.is_sound:
        return every if len(every.place) else None, ()
    rows = []
    for cause in causes:
        is_other = group[every.place] != cause
        if not is_other.any():
            continue
        alone = engine.replay(group != cause)
        recorded_ns, replayed_ns = np.sort(every.queue_ns[is_other]), np.sort(every.replayed_ns[is_other])
        falls = float(replayed_ns.mean() - alone.replayed_ns.mean())
        p99_ns, with_ns, rest_ns = (
            percentiles_of_times(np.sort(times).tolist(), (0.99,))[0]
            for times in (recorded_ns, replayed_ns, alone.replayed_ns)
        )
        mean_ns = float(recorded_ns.mean())
        rows.append(
            Without(
                names[cause], len(recorded_ns), mean_ns, max(mean_ns - falls, 0.0), p99_ns,
                max(p99_ns - (with_ns - rest_ns), 0),
            )
        )  # fmt: skip
    return every, tuple(rows)
