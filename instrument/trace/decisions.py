"""Decides by tail sampling which requests of a run are kept. Their spans are sent, the spans of other requests are
dropped, and undecided spans wait.

A decision covers a request's spans in all processes. So the undecided rows of all processes become one trace. A batch
is sent with the first kept request that it served.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.recording.memory_layout import REQUEST_BIT
from instrument.recording.spans import BATCH_KEYS, KEY, AttributeValue, Site
from instrument.recording.trace_context import RemoteParent, is_sampled, make_tracestate
from instrument.trace.columns import Attributes, Bools, Columns, DeviceIntervals, Int32s, Int64s
from instrument.trace.indices import (
    NONE,
    find_distinct,
    find_nearest_row,
    find_rows,
    make_mask,
    number_combinations,
    rank_distinct,
)
from instrument.trace.joined import join_requests
from instrument.trace.of_recording import RowDetail, RowDetails, columns_of_rows, have_details, split_remote_parent
from instrument.trace.request_trees import build_request_trees
from instrument.trace.tail_sampler import EndedRequest
from instrument.trace.unsettled import ADOPTED, PASSED, SETTLED, WAITING, Newest, UnsettledRows

OPEN_NS = 1 << 61
"""The time in ns that replaces the end of an open span."""

OPEN = 255
"""The state of an open span."""


class Gathered:
    """The undecided rows of several processes' recordings, as one trace. `member` is the index of each row's recording.
    `place` is the index of the row in that recording, or `NONE` for an open span. `own` and `own_root` are the
    recording's ids for the span and its root."""

    def __init__(self, members: Sequence[UnsettledRows], horizon_ns: int) -> None:
        self.members = members
        sites: dict[Site, int] = {}
        parts = [_gather_rows_of_recording(member, sites, horizon_ns) for member in members]
        starts = np.cumsum([0, *(len(part["span_id"]) for part in parts)])
        self.member: Int32s = np.repeat(np.arange(len(members), dtype=np.int32), np.diff(starts))
        none = np.zeros(0, np.int64)
        columns = {name: np.concatenate([part[name] for part in parts]) if parts else none for name in _GATHERED}
        self.own: Int64s = columns["span_id"]
        self.own_root: Int64s = columns["root_id"]
        self.own_parent: Int64s = columns["parent_id"]
        self.own_thread: Int64s = columns["thread_id"]
        self.place: Int64s = columns["place"]
        self.state: NDArray[np.uint8] = columns["state"].astype(np.uint8)
        attributes: dict[int, Mapping[str, AttributeValue]] = {}
        details = RowDetails(columns, attributes.__setitem__)
        for member, part, first in zip(members, parts, starts.tolist(), strict=False):
            place, own_ids = part["place"], part["span_id"]
            for at in np.flatnonzero(np.append(have_details(member.rows), False)[place]).tolist():
                details.add(first + at, member.details.get(int(own_ids[at])) or RowDetail())
            for at in np.flatnonzero(place == NONE).tolist():
                details.add(
                    first + at, RowDetail(-1, None, *split_remote_parent(member.opened[int(own_ids[at])].attributes))
                )
            if member.caller is not None:
                is_early_root = (own_ids == part["root_id"]) & (own_ids & REQUEST_BIT == 0)
                is_early_root &= part["start_ns"] < member.served_from_ns
                for at in np.flatnonzero(is_early_root).tolist():
                    details.remote.setdefault(first + at, member.caller)
        parent_id, root_id = self._number_parents_and_roots(parts, starts)
        thread, _ = number_combinations(self.member.astype(np.int64), self.own_thread)
        self.trace = Columns(
            sites=tuple(sites),
            errors=tuple(details.errors),
            span_id=np.arange(1, len(self.own) + 1),
            parent_id=parent_id,
            root_id=root_id,
            thread_id=thread.astype(np.int64) + 1,
            task_id=columns["task_id"],
            start_ns=columns["start_ns"],
            end_ns=columns["end_ns"],
            active_ns=details.active_ns,
            self_ns=details.self_ns,
            site=columns["site"].astype(np.int32),
            error=details.error,
            clipped=self.state == OPEN,
            device=DeviceIntervals.make_empty(),
            attributes=Attributes.from_dicts(len(self.own), attributes),
            remote=details.remote,
        )

    def _number_parents_and_roots(
        self, parts: Sequence[dict[str, NDArray[Any]]], starts: Int64s
    ) -> tuple[Int64s, Int64s]:
        above = int(starts[-1]) + 1
        columns = [np.zeros((2, 0), np.int64)]
        for part, first in zip(parts, starts.tolist(), strict=False):
            above_ids = np.concatenate([part["parent_id"], part["root_id"]])
            rows = find_rows(part["span_id"], above_ids).astype(np.int64)
            ids = np.where(rows == NONE, 0, rows + first + 1)
            absent = np.flatnonzero((rows == NONE) & (above_ids != 0))
            if len(absent):
                _, numbers = np.unique(above_ids[absent], return_inverse=True)
                ids[absent] = above + numbers.reshape(-1)
                above += int(numbers.max()) + 1
            columns.append(ids.reshape(2, -1))
        parent_id, root_id = np.concatenate(columns, axis=1)
        return parent_id, root_id


_GATHERED = (
    "span_id", "parent_id", "root_id", "thread_id", "task_id", "start_ns", "end_ns", "children_ns", "active_ns", "site",
    "place", "state",
)  # fmt: skip


def _gather_rows_of_recording(
    member: UnsettledRows, sites: dict[Site, int], horizon_ns: int
) -> dict[str, NDArray[Any]]:
    place = np.flatnonzero(_are_relevant(member, horizon_ns))
    rows = {name: member.rows[name][place] for name in member.rows.dtype.names or ()}
    opened_ids = np.fromiter(member.opened, np.int64, len(member.opened))
    ended = find_rows(rows["span_id"].astype(np.int64), opened_ids) != NONE
    opened = [span for span, has_ended in zip(member.opened.values(), ended.tolist(), strict=True) if not has_ended]
    columns = columns_of_rows(rows, member.thread_id[place], opened, OPEN_NS)
    nodes, node_places = rank_distinct(columns["node"])
    numbers = [sites.setdefault(member.site_of(number), len(sites)) for number in nodes.tolist()]
    return {
        **columns,
        "site": np.array(numbers, np.int64)[node_places],
        "place": np.concatenate([place, np.full(len(opened), NONE)]),
        "state": np.concatenate([member.state[place], np.full(len(opened), OPEN, np.uint8)]),
    }


def _are_relevant(member: UnsettledRows, horizon_ns: int) -> Bools:
    """Return True for rows with a due decision, and for rows that another decision needs."""
    rows = member.rows
    span_id, parent_id, root_id = (rows[name].astype(np.int64) for name in ("span_id", "parent_id", "root_id"))
    is_request = root_id & REQUEST_BIT != 0
    is_root = is_request & (span_id == root_id)
    undue = root_id[is_root & (rows["end_ns"] > horizon_ns)]
    opened = np.fromiter((span_id for span_id in member.opened if span_id & REQUEST_BIT), np.int64)
    is_undue = is_request & (find_rows(np.union1d(undue, opened), root_id) != NONE)
    matter = ~is_undue | is_root | have_details(rows)
    asking = matter
    while True:
        wanted = parent_id[asking]
        missing = find_distinct(wanted[find_rows(span_id[matter], wanted) == NONE])
        asking = ~matter & (find_rows(missing, span_id) != NONE)
        if not asking.any():
            return np.asarray(matter)
        matter |= asking


PATIENCE_NS = 10**9
"""The maximum time in ns for which a due span waits for a request that no process has recorded yet."""

UNKNOWN_NS = 8 * 10**9
"""The time in ns after which a span is dropped if its process never recorded the span's request."""

BEYOND_LIMIT = "requests beyond the capture limit"

MOST_TRACES = 20_000
"""The maximum number of remembered traces, and of remembered keys. The oldest are forgotten first."""


class RememberedTraces:
    """Remembers kept traces, and the first request with each key, over the rounds of tail sampling."""

    def __init__(self) -> None:
        self.kept = Newest[int, None](MOST_TRACES)
        self.first_of_key = Newest[str, tuple[int, int]](MOST_TRACES)

    def is_first_of_key(self, key: str, request: tuple[int, int]) -> bool:
        """Return True if a request is the first with this key. Only the first request gets the trace id of the key."""
        return self.first_of_key.setdefault(key, request) == request


class Decisions:
    """Decides in one round of tail sampling which requests to keep. `kept` has the roots of kept requests, and `passed`
    the roots of dropped ones."""

    def __init__(
        self, remembered: RememberedTraces, gathered: Gathered, horizon_ns: int, *, is_last: bool, at_once: bool
    ) -> None:
        self._remembered, self.gathered, self._horizon_ns = remembered, gathered, horizon_ns
        self._is_last, self._at_once = is_last, at_once
        self.members = gathered.members
        trace = gathered.trace
        self.joined = join_requests(trace)
        self.run = self.members[0].ids.run if self.members else ""
        grafted_trace = build_request_trees(trace, self.joined, self.run)
        self.found = self._remove_repeated_key_traces(grafted_trace) if self.run else grafted_trace
        count = len(trace)
        self.unit = np.where(self.found.root_id <= count, self.found.root_id - 1, NONE)
        """The row of the tree's root, for each row. `NONE` if the root's row is missing."""
        self.is_root: Bools = (gathered.own == gathered.own_root) & (gathered.own & REQUEST_BIT != 0)
        self.out = np.zeros(count, np.bool_)
        """True for rows that are sent."""
        self.gone = np.zeros(count, np.bool_)
        """True for rows that are dropped."""
        self._set_states_of_adopted_rows()
        self.states: dict[int, str] = {}
        """The `tracestate` of each randomly sampled request, by its root."""
        self.kept: set[int] = set()
        self.passed: set[int] = set()
        self._decide_requests()
        self._settle_trees()
        self._settle_batches()
        self._settle_trees_without_request()

    def _remove_repeated_key_traces(self, trace: Columns) -> Columns:
        key_by_row = {int(self.joined.rows[place]): keys[0] for place, keys in self.joined.keys.items()}
        remote = dict(trace.remote)
        for row, key in key_by_row.items():
            request = (int(self.gathered.member[row]), int(self.gathered.own[row]))
            is_of_key = row in remote and row not in self.gathered.trace.remote
            if is_of_key and not self._remembered.is_first_of_key(key, request):
                del remote[row]
        return trace.with_remote(remote)

    # ---------------------------------------------------------------- requests

    def find_recording_of_row(self, row: int) -> UnsettledRows:
        return self.members[int(self.gathered.member[row])]

    def _ended_request(self, row: int) -> EndedRequest:
        trace = self.gathered.trace
        return EndedRequest(
            int(self.gathered.own[row]), trace.sites[trace.site[row]], int(trace.start_ns[row]), int(trace.end_ns[row]),
            bool(trace.error[row] != NONE), trace.attributes[row], trace.remote.get(row),
        )  # fmt: skip

    def sent_trace_id(self, root: int) -> int:
        remote = self.found.remote.get(root)
        if remote is not None:
            return remote.trace_id
        return self.find_recording_of_row(root).ids.trace_id(int(self.gathered.own[root]))

    def find_remembered_caller(self, row: int) -> RemoteParent | None:
        """Return the remote caller of a tree whose root is no longer in memory."""
        member, root_id = self.find_recording_of_row(row), int(self.gathered.own_root[row])
        decided = member.decided.get(root_id)
        if decided is not None:
            return decided.remote
        is_early = not root_id & REQUEST_BIT and int(self.found.start_ns[row]) < member.served_from_ns
        return member.caller if is_early else None

    def sent_span_id(self, row: int) -> int:
        return self.find_recording_of_row(row).ids.span_id(int(self.gathered.own[row]))

    def _decide_requests(self) -> None:
        gathered, state = self.gathered, self.gathered.state
        parts: dict[int, list[int]] = {}
        for row in np.flatnonzero(self.is_root & (state != SETTLED) & (self.unit != NONE)).tolist():
            parts.setdefault(int(self.unit[row]), []).append(row)
        undue_traces: set[int] = set()
        due: list[int] = []
        for unit in parts:
            if not self.is_root[unit] or state[unit] in (SETTLED, PASSED):
                continue
            if state[unit] == OPEN or gathered.trace.end_ns[unit] > self._horizon_ns:
                if not self.find_recording_of_row(unit).is_over:
                    undue_traces.add(self.sent_trace_id(unit))
            else:
                due.append(unit)
        due.sort(key=lambda row: int(gathered.trace.end_ns[row]))
        ended: dict[int, list[EndedRequest]] = {}
        for unit in due:
            ended.setdefault(int(gathered.member[unit]), []).append(self._ended_request(unit))
        for member, requests in ended.items():
            self.members[member].sampler.update_usual_times(requests)
        standing_out: list[tuple[int, int, int]] = []
        for unit in due:
            self._decide_tree(unit, parts[unit], undue_traces, standing_out)
        for unit in list(self.passed):  # a part of its trace may have been kept after it was looked at
            if self.sent_trace_id(unit) in self._remembered.kept:
                self._keep_tree(unit)
        self._keep_preceding_requests(standing_out)

    def _set_states_of_adopted_rows(self) -> None:
        gathered, state = self.gathered, self.gathered.state
        adopted = np.flatnonzero(state == ADOPTED)
        if not len(adopted):
            return
        served, sampled = self.served_roots_by_batch, self.are_sampled()
        for row in adopted.tolist():
            member, unit = self.find_recording_of_row(row), int(self.unit[row])
            is_late = gathered.trace.end_ns[row] > member.adopted_until_ns
            if row in served:
                states = {int(state[root]) for root in served[row] if root != NONE}
                waits = SETTLED not in states and (is_late or (bool(states) and not sampled[row]))
            elif unit != NONE and self.is_root[unit]:
                waits = state[unit] != SETTLED
            else:
                waits = bool(is_late)
            state[row] = member.state[gathered.place[row]] = WAITING if waits else SETTLED
            member.adopted += waits

    def _decide_tree(
        self, unit: int, parts: Sequence[int], undue_traces: set[int], standing_out: list[tuple[int, int, int]]
    ) -> None:
        ended = [
            (self.find_recording_of_row(row).sampler, self._ended_request(row), row)
            for row in parts
            if self.gathered.state[row] != OPEN
        ]
        trace_id, sample = self.sent_trace_id(unit), self.find_recording_of_row(unit).sampler.capture.sample
        # If a request has a caller's trace, the caller has decided about the random sample.
        is_of_sample = self._ended_request(unit).remote is None and is_sampled(trace_id, sample)
        if is_of_sample:
            self.states[unit] = make_tracestate(sample)
        is_kept = is_of_sample or trace_id in self._remembered.kept
        if is_kept or any(sampler.is_wanted(request) for sampler, request, _ in ended):
            self._keep_tree(unit)
            return
        for sampler, request, row in ended:
            if sampler.is_notable(request):
                if sampler.allowance.take_token(request.end_ns):
                    if (
                        request.root_id not in self.find_recording_of_row(row).early
                    ):  # what came before those is long gone
                        standing_out.append((int(self.gathered.member[row]), request.start_ns, request.end_ns))
                    self._keep_tree(unit)
                else:
                    self.find_recording_of_row(row).counts[BEYOND_LIMIT] += 1
                    self.passed.add(unit)
                return
        for sampler, request, row in ended:
            if sampler.lacks_usual_time(request) and not (self.find_recording_of_row(row).is_over or self._is_last):
                self.find_recording_of_row(row).early.add(request.root_id)
                return
        if self._is_last or trace_id not in undue_traces:
            self.passed.add(unit)

    def _keep_tree(self, unit: int) -> None:
        self.passed.discard(unit)
        self.kept.add(unit)
        self._remembered.kept[self.sent_trace_id(unit)] = None

    def _keep_preceding_requests(self, standing_out: Iterable[tuple[int, int, int]]) -> None:
        gathered = self.gathered
        recent = np.flatnonzero(self.is_root & (gathered.state == PASSED)).tolist()
        for member, start_ns, end_ns in standing_out:
            before_ns = self.members[member].sampler.capture.before_ns
            for unit in [*recent, *self.passed] if before_ns else ():
                if gathered.member[unit] == member and start_ns - before_ns <= gathered.trace.end_ns[unit] <= end_ns:
                    self._keep_tree(unit)

    # ---------------------------------------------------------------- rows

    @property
    def is_undecided(self) -> Bools:
        state = self.gathered.state
        return np.asarray(((state == WAITING) | (state == PASSED)) & ~self.out & ~self.gone)

    def find_rows_of_trees(self, units: set[int]) -> Bools:
        return np.isin(self.unit, np.fromiter(units, np.int64, len(units)))

    def _settle_trees(self) -> None:
        gathered, undecided = self.gathered, self.is_undecided
        late: dict[bool, set[int]] = {True: set(), False: set()}
        units = np.unique(self.unit[undecided & (self.unit != NONE)])
        for unit in units[self.is_root[units] & (gathered.state[units] == SETTLED)].tolist():
            decided = self.find_recording_of_row(unit).decided.get(int(gathered.own[unit]))
            late[decided is not None and decided.is_kept].add(unit)
        self.out |= undecided & self.find_rows_of_trees(self.kept | late[True])
        self.gone |= undecided & self.find_rows_of_trees(self.passed | late[False])
        # Late rows of requests that are not here any more.
        rootless = undecided & (self.unit == NONE) & (gathered.own_root & REQUEST_BIT != 0)
        for row in np.flatnonzero(rootless).tolist():
            member = self.find_recording_of_row(row)
            decided = member.decided.get(int(gathered.own_root[row]))
            if decided is not None:
                (self.out if decided.is_kept else self.gone)[row] = True
            elif not member.is_over and gathered.trace.end_ns[row] <= self._horizon_ns - UNKNOWN_NS:
                self.gone[row] = True

    @property
    def _is_due_without_request(self) -> Bools:
        is_request = np.append(self.is_root, False)[self.unit]
        is_unknown = (self.unit == NONE) & (self.gathered.own_root & REQUEST_BIT != 0)
        return np.asarray(
            self.is_undecided & ~is_request & ~is_unknown & (self.gathered.trace.end_ns <= self._horizon_ns)
        )

    def _settle_trees_without_request(self) -> None:
        """Settle the rows of trees without a request. Only the random sample is kept."""
        gathered = self.gathered
        due = self._is_due_without_request
        batches = self.found.attributes.rows_with_attribute(BATCH_KEYS)
        due[batches] = False
        if not due.any():
            return
        keyed = make_mask(self.found.attributes.rows_with_attribute(KEY), len(due))
        waits = (find_nearest_row(self.found.parent, keyed) != NONE) & (
            gathered.trace.end_ns > self._horizon_ns - (0 if self._at_once or self._is_last else PATIENCE_NS)
        )
        due &= ~waits
        sampled = self.are_sampled()
        self.out |= due & sampled
        self.gone |= due & ~sampled

    def are_sampled(self) -> Bools:
        are_of_share = np.zeros(len(self.unit), np.bool_)
        for number, member in enumerate(self.members):
            rows = self.gathered.member == number
            roots = self.gathered.own_root[rows].astype(np.uint64)
            are_of_share[rows] = member.are_sampled(roots, self.gathered.trace.start_ns[rows])
        return are_of_share

    @cached_property
    def served_roots_by_batch(self) -> Mapping[int, list[int]]:
        served, roots_by_batch = self.joined.served, dict[int, list[int]]()
        roots = np.append(self.unit[self.joined.rows], NONE)[served.request]
        for batch, root in zip(served.batch.tolist(), roots.tolist(), strict=True):
            roots_by_batch.setdefault(batch, []).append(root)
        return roots_by_batch

    def find_decision(self, root: int) -> bool | None:
        """Return True if a request is kept, False if it is dropped, and None if it is undecided."""
        if self.gathered.state[root] == SETTLED:
            decided = self.find_recording_of_row(root).decided.get(int(self.gathered.own[root]))
            return decided is not None and decided.is_kept
        if self.out[root]:
            return True
        return False if self.gone[root] or self.gathered.state[root] == PASSED else None

    def _settle_batches(self) -> None:
        """Settle batches outside of requests. A batch is kept if it serves a kept request, or if it is in the random
        sample."""
        due, sampled = self._is_due_without_request, self.are_sampled()
        state, end_ns = self.gathered.state, self.gathered.trace.end_ns
        served, hurries = self.served_roots_by_batch, self._is_last or self._at_once
        for batch in self.found.attributes.rows_with_attribute(BATCH_KEYS).tolist():
            if not due[batch]:
                continue
            fates = [None if root == NONE else self.find_decision(root) for root in served.get(batch, ())]
            is_open = [root != NONE and state[root] == OPEN for root in served.get(batch, ())]
            is_patient = not hurries and end_ns[batch] > self._horizon_ns - PATIENCE_NS
            if is_patient and any(fate is None and not opened for fate, opened in zip(fates, is_open, strict=True)):
                continue
            if sampled[batch] or True in fates:
                self.out[batch] = True
            elif self._is_last or not any(
                root != NONE and fate is None for root, fate in zip(served.get(batch, ()), fates, strict=True)
            ):
                self.gone[batch] = True
