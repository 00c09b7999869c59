"""The `neighbours` view: how long requests of one group (such as a tenant) waited because of requests of another.

Each nanosecond of waiting is attributed to one group or to nobody, by the rules of `instrument.trace.bill`. A replay of
the queues (`instrument.trace.replay`) predicts the queue times without a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from instrument.recording.distributions import percentiles_of
from instrument.report.batches_view import NO_BATCH
from instrument.report.request_groups import (
    ENDPOINT,
    complete_requests,
    joined_requests,
    request_groups,
    request_ledger,
    request_turns,
)
from instrument.report.section import Coverage, Section, View
from instrument.report.table import adding, bounded, in_unit, safe, share, shorten, wrapped
from instrument.report.view import Options, Recording
from instrument.trace.bill import BEHIND, BETWEEN, BLOCKED, SHARED, Account
from instrument.trace.columns import Int64s
from instrument.trace.groups import Groups
from instrument.trace.replay import Engine, Replay

NOBODY = "(nobody)"
"""The cause of waits during which no recorded batch ran and no known request blocked the event loop."""

REPLAYED = 3
"""The number of groups whose absence is simulated: the groups that delayed other groups most."""


@dataclass(frozen=True, slots=True)
class GroupWaits:
    """The waits of a group's requests by cause, and the waits of all requests that the group caused
    (`inflicted_ns`)."""

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
        """The mean wait of a request of the group."""
        return self.suffered_ns / self.requests


@dataclass(frozen=True, slots=True)
class Delay:
    """The waits of one group's requests that another group caused. `ratio` is their share of all its waits."""

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


@dataclass(frozen=True, slots=True)
class Without:
    """The queue times of all other requests: as recorded, and as predicted if the requests of one group were absent."""

    name: str
    requests: int
    mean_ns: float
    mean_without_ns: float
    p99_ns: int
    p99_without_ns: int


@dataclass(frozen=True, slots=True)
class NeighbourBill(View):
    """The `neighbours` view: groups by the waits that they caused, delays of one group by another, and predictions.

    `queue_ns` is the recorded mean queue time, and `replayed_ns` the mean of a replay of all requests, None without
    one.
    """

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
        """Return a sentence on the largest delay of one group by another, "" without any."""
        delay = next((row for row in self.delays if row.cause not in (row.name, NOBODY) and row.mean_ns), None)
        if delay is None:
            return ""
        name, cause = (shorten(safe(text) or "(no name)", 40) for text in (delay.name, delay.cause))
        unit = self._options.unit
        return f"Requests of {name} waited {in_unit(delay.mean_ns, unit)} {unit} each for requests of {cause}."

    def head(self) -> list[str]:
        return [*self.coverage.lines(), f"Time unit: {self._options.unit}", *wrapped(self.sentence())]

    def nothing(self) -> list[str]:
        return [] if self.suffered_ns else self.coverage.none_held("wait in a queue or a batch", NO_BATCH)

    def foot(self) -> list[str]:
        unit = self._options.unit
        suffered, inflicted, nobody = (
            f"{in_unit(time_ns, unit)} {unit}" for time_ns in (self.suffered_ns, self.inflicted_ns, self.nobody_ns)
        )
        lines = [f"Suffered {suffered} = inflicted {inflicted} + by nobody {nobody}"]
        if self.replayed_ns is not None and not self.predictions:
            replayed, recorded = (f"{in_unit(time_ns, unit)} {unit}" for time_ns in (self.replayed_ns, self.queue_ns))
            lines += wrapped(
                f"Not predicted: a replay of all requests has a mean queue time of {replayed}, and recorded were "
                f"{recorded}. The engine works otherwise than the replay."
            )
        return lines


def neighbours(recording: Recording, options: Options) -> NeighbourBill:
    """Return the view of the kept spans. `requests_by` groups the requests, by endpoint if it is not set.

    `rows` and `least_ns` limit the tables of groups and of delays.
    """
    trace, joined = recording.columns, recording.once(joined_requests)
    grouped = request_groups(recording, options)
    names, group = grouped.names, grouped.group
    is_charged = np.zeros(len(joined.rows), dtype=np.bool_)
    is_charged[joined.of[recording.once(complete_requests)[0]]] = True
    account = Account(trace, joined, recording.once(request_turns), group, len(names), is_charged)
    bill = account.bill(recording.once(request_ledger))
    sums = bill.charged_ns.sum(axis=0)
    requests = Groups(group[is_charged], len(names)).sizes().tolist()
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
            name, cause, share(sum(ways), requests[place]), sum(ways), share(sum(ways), int(bill.suffered_ns[place])),
            ways[BEHIND], ways[SHARED], ways[BETWEEN], ways[BLOCKED],
        )
        for place, name in enumerate(names)
        for column, cause in enumerate((*names, NOBODY))
        if any(ways := bill.charged_ns[:, place, column].tolist())
    ]  # fmt: skip
    delays.sort(key=lambda row: (-row.summed_ns, row.name, row.cause))
    on_others = np.array(inflicted[:-1], dtype=np.int64) - np.diagonal(sums)
    every, predictions = _predict_absence(recording, account, group, on_others, names)
    return NeighbourBill(
        coverage=Coverage.of_recording(recording),
        groups=bounded(
            [row for row in groups if row.requests],
            options,
            lambda row: row.suffered_ns,
            adding("requests", "suffered_ns", "by_others_ns", "by_itself_ns", "by_nobody_ns", "inflicted_ns"),
        ),
        delays=bounded(
            delays,
            options,
            lambda row: row.summed_ns,
            adding("summed_ns", "queued_ns", "shared_ns", "between_ns", "blocked_ns"),
        ),
        predictions=predictions,
        suffered_ns=sum(bill.suffered_ns.tolist()),
        inflicted_ns=sum(inflicted[:-1]),
        nobody_ns=inflicted[-1],
        queue_ns=None if every is None else float(every.queue_ns.mean()),
        replayed_ns=None if every is None else float(every.replayed_ns.mean()),
        _options=options,
    )


def _predict_absence(
    recording: Recording, account: Account, group: Int64s, on_others: Int64s, names: Sequence[str]
) -> tuple[Replay | None, tuple[Without, ...]]:
    """Return the replay of all requests, and the predictions without each of the groups that delayed others most."""
    joined = recording.once(joined_requests)
    causes = [place for place in np.argsort(-on_others, kind="stable").tolist() if on_others[place]][:REPLAYED]
    if not causes:
        return None, ()
    engine = Engine(recording.columns, joined, recording.once(request_turns), account.lanes)
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
            percentiles_of(np.sort(times).tolist(), (0.99,))[0]
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
