"""Prepares the spans of decided requests for a collector. Adds ids, callers, links, and spans for requests' stages.

A request is due when the decision wait has passed since its end. The spans of due requests form a trace, which is
processed like a trace from a file. Each span is processed once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np

from instrument.recording.memory_layout import REQUEST_BIT
from instrument.recording.spans import BATCH_KEYS, KEY, AttributeValue, Span
from instrument.recording.trace_context import (
    LINK,
    LINK_TRACE_ID,
    OWN_TRACE_FLAGS,
    LinkedSpan,
    RemoteParent,
    make_link_attributes,
)
from instrument.trace.columns import Attributes, Bools, Columns, Int64s
from instrument.trace.decisions import OPEN, OPEN_NS, Decisions, Gathered, RememberedTraces
from instrument.trace.indices import NONE, are_at_or_above, find_ancestor, find_nearest_row, index_rows
from instrument.trace.request_trees import find_outer_spans, make_trace_id_of_key
from instrument.trace.stages import Stages, StepKinds, find_stages, make_stage_spans
from instrument.trace.trace import make_spans
from instrument.trace.unsettled import PASSED, SETTLED, WAITING, Decided, UnsettledRows

Value = TypeVar("Value")

DERIVED = 3 << 62
STAGES_BITS = 5
"""The number of low bits that are reserved for the stage in a stage span's id."""


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request that batches served, with its time in the queue and the mean size of the batches. `sampled_ids` are the
    exported trace id and span id, or None for a dropped request."""

    span: Span
    queue_ns: int
    batch_size: float
    sampled_ids: tuple[int, int] | None


@dataclass(slots=True)
class Settled:
    """The result of a round of tail sampling for one process: the rows and stages to send, and the requests that
    batches served.

    The rows of `trace` have the process's own ids. They are ordered by tree, with the root first. `links` has the
    requests that each batch serves.
    """

    trace: Columns | None = None
    links: Mapping[int, Sequence[LinkedSpan]] = field(default_factory=dict)
    derived: list[Span] = field(default_factory=list)
    served: list[ServedRequest] = field(default_factory=list)


class SentRows:
    """Computes the rows and stages to send. `outcome` has them by the index of their process.

    `root_id` has the id of each sent row's root. `caller_of` is the index of the row's caller in `callers`, or `NONE`.
    """

    def __init__(self, decisions: Decisions, kinds: StepKinds, *, asks_queues: bool) -> None:
        self._decisions, self._kinds = decisions, kinds
        self._gathered, self._members, self._joined = decisions.gathered, decisions.members, decisions.joined
        self._found, self._unit, self._out = decisions.found, decisions.unit, decisions.out
        self.root_id: Int64s = np.zeros(len(self._unit), np.int64)
        self.callers: list[RemoteParent] = []
        self.caller_of: Int64s = np.full(len(self._unit), NONE)
        self.outcome = defaultdict[int, Settled](Settled)
        self._remotes = dict(self._found.remote)
        for unit, state in decisions.states.items():
            if state:  # the sampling ratio of a randomly sampled request
                trace = RemoteParent(decisions.sent_trace_id(unit), 0, OWN_TRACE_FLAGS)
                self._remotes[unit] = replace(self._remotes.get(unit, trace), state=state)
        roots, passed = decisions.kept, decisions.passed
        decided = roots | passed if asks_queues else roots
        its_stages: list[Stages] = []
        self._stage_view = self._joined
        if decided:  # the stages of the requests in these trees
            served = self._joined.served
            theirs = np.append(decisions.find_rows_of_trees(decided)[self._joined.rows], False)
            request = np.where(theirs[served.request], served.request, NONE)
            self._stage_view = replace(self._joined, served=replace(served, request=request))
            all_stages = find_stages(self._found, self._stage_view, self._kinds)
            its_stages = [entry for entry in all_stages if theirs[entry.place]]
        self._add_rows_to_outcomes()
        self._add_stages_to_outcomes(its_stages)
        if asks_queues:
            self._add_served_requests(its_stages, roots)

    def _add_rows_to_outcomes(self) -> None:
        gathered, trace = self._gathered, self._found
        parent, count = trace.parent, len(self._unit)
        crosses = parent != NONE
        crosses[crosses] = gathered.member[parent[crosses]] != gathered.member[crosses]
        crosses &= gathered.trace.parent != parent  # only what was moved
        top = find_nearest_row(parent, crosses & (trace.root_id != trace.span_id))
        is_apart = self._out & ~self._decisions.are_sampled() & (gathered.own_root & REQUEST_BIT == 0)
        for number in np.unique(gathered.member[is_apart]).tolist():
            apart_ids = gathered.own[is_apart & (gathered.member == number)].tolist()
            self._members[number].sent_apart.update(dict.fromkeys(apart_ids))
        rows = np.flatnonzero(self._out)
        own_ids, unit, piece, above = gathered.own[rows], self._unit[rows], top[rows], parent[rows]
        stays = (above != NONE) & ~crosses[rows]
        parent_id = np.where(stays, gathered.own[above], gathered.own_parent[rows])
        of_unit = np.where(unit != NONE, gathered.own[unit], gathered.own_root[rows])
        root_id = np.where(piece != NONE, gathered.own[piece], of_unit)
        callers, number_of = list(self._remotes.values()), np.full(count + 1, NONE)
        number_of[np.fromiter(self._remotes, np.int64, len(callers))] = np.arange(len(callers))
        caller = number_of[unit]
        pieces = np.unique(piece[piece != NONE])
        number_of[pieces] = len(callers) + np.arange(len(pieces))
        for row in pieces.tolist():  # its parent is in another process
            unit_of_row = int(self._unit[row])
            remote = self._remotes.get(unit_of_row)
            flags, state = (OWN_TRACE_FLAGS, "") if remote is None else (remote.flags, remote.state)
            trace_id = self._decisions.sent_trace_id(unit_of_row)
            callers.append(RemoteParent(trace_id, self._decisions.sent_span_id(int(parent[row])), flags, state=state))
        caller = np.where(piece != NONE, number_of[piece], caller)
        for at in np.flatnonzero((piece == NONE) & (unit == NONE)).tolist():
            decided = self._decisions.find_recording_of_row(int(rows[at])).decided.get(int(root_id[at]))
            if decided is not None:
                root_id[at], caller[at] = decided.root_id, NONE
            remote = self._decisions.find_remembered_caller(int(rows[at]))
            if remote is not None:
                caller[at] = len(callers)
                callers.append(remote)
        alone = is_apart[rows] & (piece == NONE) & ~((above != NONE) & self._out[above])
        for row, (root, remote) in self._derive_traces_of_unknown_keys().items():
            if piece[at := int(np.searchsorted(rows, row))] == NONE:
                root_id[at], caller[at], alone[at] = root, len(callers), False
                callers.append(remote)
        parent_id[alone], root_id[alone] = 0, own_ids[alone]  # what is above them stays where it is
        self.root_id[rows], self.caller_of[rows] = root_id, caller
        self.callers = callers
        attributes, links = self._collect_attributes(rows), self._link_batches()
        order = np.lexsort((rows, trace.end_ns[rows], own_ids != root_id, root_id, gathered.member[rows]))
        bounds = np.searchsorted(gathered.member[rows][order], np.arange(len(self._members) + 1)).tolist()
        for number, (begin, end) in enumerate(pairwise(bounds)):
            places = order[begin:end]
            if not len(places):
                continue
            picked = rows[places]
            first = np.flatnonzero(np.diff(root_id[places], prepend=NONE))
            remote_by_row = {
                at: callers[caller_place]
                for at, caller_place in zip(first.tolist(), caller[places[first]].tolist(), strict=True)
                if caller_place != NONE
            }
            for at, remote in remote_by_row.items():
                self._members[number].traces[int(root_id[places[at]])] = remote.trace_id
            settled = self.outcome[number]
            settled.trace = trace.take_rows(
                picked, span_id=own_ids[places], own_id=own_ids[places], parent_id=parent_id[places],
                root_id=root_id[places], thread_id=gathered.own_thread[picked],
                attributes=Attributes.from_dicts(len(picked), _by_place(attributes, picked, count)),
                remote=remote_by_row,
            )  # fmt: skip
            settled.links = _by_place(links, picked, count)

    def _collect_attributes(self, rows: Int64s) -> Mapping[int, Mapping[str, AttributeValue]]:
        trace = self._found
        having = np.asarray(trace.attributes.rows(), np.int64)
        attributes = {row: trace.attributes[row] for row in having[self._out[having]].tolist()}
        own_ids = self._gathered.own
        for row, (above_id, around_id) in find_outer_spans(trace, self._joined).items():
            above, around = above_id - 1, around_id - 1
            if self._out[row] and around < len(own_ids):  # else the row of that root is missing
                remote = RemoteParent(self._decisions.sent_trace_id(around), 1)
                attributes[row] = {
                    **attributes.get(row, {}),
                    **make_link_attributes(int(own_ids[above]), int(own_ids[around]), remote),
                }
        for row in [
            row
            for row, row_attributes in attributes.items()
            if LINK in row_attributes and LINK_TRACE_ID not in row_attributes
        ]:
            cause = attributes[row][LINK]
            if isinstance(cause, tuple | list) and len(cause) == 2:
                trace_id = self._decisions.find_recording_of_row(row).traces.get(int(cause[1]))
                if trace_id is not None:  # the trace that the tree of the cause was sent with
                    attributes[row] = {**attributes[row], LINK_TRACE_ID: f"{trace_id:032x}"}
        return attributes

    def _derive_traces_of_unknown_keys(self) -> Mapping[int, tuple[int, RemoteParent]]:
        run = self._decisions.run
        trace = self._found
        keyed = np.zeros(len(self._unit), np.bool_)
        keyed[trace.attributes.rows_with_attribute(KEY)] = bool(run)
        keyed &= (self._joined.of == NONE) & ~np.append(self._decisions.is_root, False)[self._unit]
        if not keyed.any():
            return {}
        keyed &= find_ancestor(trace.parent, keyed) == NONE
        rows = np.flatnonzero(self._out)
        tops = find_nearest_row(trace.parent, keyed)[rows]
        parent_by_row: dict[int, tuple[int, RemoteParent]] = {}
        for row, top in zip(rows.tolist(), tops.tolist(), strict=True):
            key = None if top == NONE or top in self._gathered.trace.remote else trace.attributes[top].get(KEY)
            if isinstance(key, str) and key:
                parent_by_row[row] = int(self._gathered.own[top]), RemoteParent(make_trace_id_of_key(run, key), 0)
        return parent_by_row

    def _link_batches(self) -> Mapping[int, tuple[LinkedSpan, ...]]:
        served, links_by_batch = self._joined.served, dict[int, dict[LinkedSpan, None]]()
        pairs = np.flatnonzero((served.request != NONE) & self._out[served.batch])
        linked: dict[int, LinkedSpan | None] = {}
        for batch, place in zip(served.batch[pairs].tolist(), served.request[pairs].tolist(), strict=True):
            if place not in linked:
                row = int(self._joined.rows[place])
                root = int(self._unit[row])
                is_dropped = root == NONE or self._decisions.find_decision(root) is False
                linked[place] = None if is_dropped else LinkedSpan(
                    self._decisions.sent_trace_id(root), self._decisions.sent_span_id(row)
                )  # fmt: skip
            link = linked[place]
            if link is not None:
                links_by_batch.setdefault(batch, {})[link] = None
        return {batch: tuple(row_links) for batch, row_links in links_by_batch.items()}

    # ---------------------------------------------------------------- stages

    def _add_stages_to_outcomes(self, its_stages: Sequence[Stages]) -> None:
        gathered = self._gathered
        sent_stages = [entry for entry in its_stages if self._out[self._joined.rows[entry.place]]]
        if not sent_stages:
            return
        for row, spans in sorted(make_stage_spans(self._found, self._stage_view, sent_stages).items()):
            span_id, number = int(gathered.own[row]), self.caller_of[row]
            for place, span in enumerate(spans):
                span.span_id = (DERIVED | (span_id << STAGES_BITS | place) & (1 << 62) - 1) - (1 << 64)
                span.parent_id, span.root_id = span_id, int(self.root_id[row])
                span.thread_id, span.task_id = int(gathered.own_thread[row]), int(self._found.task_id[row])
                span.remote = None if number == NONE else self.callers[number]
            self.outcome[int(gathered.member[row])].derived += spans

    def _add_served_requests(self, its_stages: Sequence[Stages], roots: set[int]) -> None:
        """Add the requests with batches to the outcomes of their processes, including dropped requests."""
        served = self._joined.served
        sizes = np.bincount(served.batch, minlength=len(self._unit))
        starts, ends = self._found.start_ns, self._found.end_ns
        for entry in its_stages:
            row = int(self._joined.rows[entry.place])
            unit = int(self._unit[row])
            if self._gathered.state[unit] == PASSED or entry.place not in self._joined.keys:
                continue
            batches = served.batch[served.request == entry.place]
            batches = batches[starts[batches] < np.minimum(ends[batches], ends[row])]
            queue_ns = 0 if entry.queue is None else entry.queue[1] - entry.queue[0]
            (span,) = make_spans(self._found, np.array([row]))
            span.span_id, span.thread_id = int(self._gathered.own[row]), int(self._gathered.own_thread[row])
            trace = (self._decisions.sent_trace_id(unit), self._decisions.sent_span_id(row)) if unit in roots else None
            size = float(sizes[batches].mean()) if len(batches) else 0.0
            self.outcome[int(self._gathered.member[row])].served.append(ServedRequest(span, queue_ns, size, trace))


def _by_place(values_by_row: Mapping[int, Value], picked: Int64s, count: int) -> dict[int, Value]:
    if len(picked) < len(values_by_row):
        return {at: values_by_row[row] for at, row in enumerate(picked.tolist()) if row in values_by_row}
    places = index_rows(picked, count)[np.fromiter(values_by_row, np.int64, len(values_by_row))].tolist()
    pairs = sorted(zip(places, values_by_row, strict=True))
    return {place: values_by_row[row] for place, row in pairs if place != NONE}


DECISION_WAIT_NS = 2 * 10**9
"""The time in ns from a request's end to the decision on it. By then, late rows of all processes have been read."""

CONTEXT_NS = 3 * 10**9
MOST_CONTEXT = 4_000
"""The maximum number of settled rows kept per process for later rows. Above it, rows older than `CONTEXT_NS` are
dropped."""

MOST_AT_ONCE = 16_000
"""The maximum number of new rows in a round of decisions, to bound its memory. The oldest come first."""


class Settling:
    """Decides which requests of all processes of a run are kept. Only one thread may use it."""

    def __init__(self) -> None:
        self.members: list[UnsettledRows] = []
        self._kinds = StepKinds()
        self._remembered = RememberedTraces()
        self.taken: Sequence[Callable[[Decisions, int], object]] = ()
        """The functions that each round calls with its decisions and its time, before rows are released."""
        self.settled_ns = 0
        """The time in ns up to which ended requests are settled, except requests that wait for others."""
        self.has_more = False
        """True if the last round left due requests unsettled."""

    def settle(
        self, now_ns: int, *, at_once: bool = False, is_last: bool = False, asks_queues: bool = False
    ) -> dict[int, Settled]:
        """Decide about the rows that are due at `now_ns`. Return the results by the index of the process.

        With `at_once`, all rows that have ended are due. With `is_last`, all rows are due.
        """
        living = [member.read_ns for member in self.members if not member.is_over]
        read_ns = min([now_ns, *living])
        horizon_ns = OPEN_NS if is_last else read_ns - (0 if at_once else DECISION_WAIT_NS)
        most_ns = min([horizon_ns, *(member.unpack(horizon_ns, MOST_AT_ONCE) for member in self.members)])
        ends = [member.rows["end_ns"][member.state != SETTLED] for member in self.members]
        due_ns = np.concatenate([np.zeros(0, np.int64), *ends])
        due_ns = due_ns[due_ns <= most_ns]
        new_ns = due_ns[due_ns > self.settled_ns]  # without rows that wait since an earlier round
        if len(new_ns) > MOST_AT_ONCE:
            most_ns = int(np.partition(new_ns, MOST_AT_ONCE)[MOST_AT_ONCE])
        self.has_more = most_ns < horizon_ns
        if self.has_more:
            horizon_ns, at_once, is_last = most_ns, at_once or is_last, False
        self.settled_ns = max(self.settled_ns, min(horizon_ns, read_ns))
        if not (due_ns <= horizon_ns).any():
            return {}
        gathered = Gathered(self.members, horizon_ns)
        decisions = Decisions(self._remembered, gathered, horizon_ns, is_last=is_last, at_once=at_once)
        sent_rows = SentRows(decisions, self._kinds, asks_queues=asks_queues)
        for take in self.taken:
            take(decisions, now_ns)
        _release_rows(decisions, sent_rows, horizon_ns, is_last=is_last)
        return sent_rows.outcome


def _release_rows(decisions: Decisions, sent_rows: SentRows, horizon_ns: int, *, is_last: bool) -> None:
    """Drop rows after a decision, unless a later row may need them to find its request."""
    gathered, trace, joined = decisions.gathered, decisions.found, decisions.joined
    out, dropped, is_root = decisions.out, decisions.gone, decisions.is_root
    for row in np.flatnonzero(is_root & (out | dropped)).tolist():
        member, root_id = decisions.find_recording_of_row(row), int(gathered.own[row])
        decided = Decided(False, root_id, None)
        if out[row]:
            number = sent_rows.caller_of[row]
            decided = Decided(True, int(sent_rows.root_id[row]), None if number == NONE else sent_rows.callers[number])
        member.decided[root_id] = decided
        member.early.discard(root_id)
        member.sampler.wanted.discard(root_id)
    says_keys = is_root | trace.are_of_kind("request")
    for name in (KEY, BATCH_KEYS):
        says_keys[trace.attributes.rows_with_attribute(name)] = True
    says_keys = are_at_or_above(gathered.trace.parent, np.flatnonzero(says_keys))  # a key counts for all below it
    needed = np.zeros(len(says_keys), np.bool_)
    waiting = [row for place in joined.keys if decisions.find_decision(row := int(joined.rows[place])) is None]
    since_ns = int(trace.start_ns[waiting].min()) if waiting else OPEN_NS
    batches = np.fromiter(decisions.served_roots_by_batch, np.int64, len(decisions.served_roots_by_batch))
    needed[batches[trace.end_ns[batches] >= since_ns]] = True  # they serve such a request, or keep it waiting
    settled = out | dropped
    recent = dropped & _may_precede_notable_request(decisions, set() if is_last else decisions.passed)
    passed_before = (gathered.state == PASSED) & ~settled
    roots_before = set() if is_last else set(np.flatnonzero(is_root & passed_before).tolist())
    expired = passed_before & ~_may_precede_notable_request(decisions, roots_before)
    # Waiting rows that can still be decided, and those of them that wait for an open span.
    waits = decisions.is_undecided & (gathered.state == WAITING)
    waits &= (decisions.unit != NONE) | (gathered.own_root & REQUEST_BIT == 0)
    is_open = np.append(gathered.state == OPEN, True)[decisions.unit]
    for number, member in enumerate(decisions.members):
        rows = np.flatnonzero((gathered.member == number) & (gathered.place != NONE))
        member.passed += int(np.count_nonzero(dropped[rows] & (gathered.state[rows] != PASSED)))
        undecided = waits & (gathered.member == number) & ~(is_open & member.is_over)
        member.lingers = member.packed_count > 0 or bool(undecided.any())
        is_context = (settled[rows] & ~recent[rows]) | (gathered.state[rows] == SETTLED)
        stays = is_context & says_keys[rows] & (not is_last)
        old = np.flatnonzero(stays & ~needed[rows] & (trace.end_ns[rows] <= horizon_ns - CONTEXT_NS))
        excess = int(np.count_nonzero(stays)) - (MOST_CONTEXT if member.has_keys else 0)
        if excess > 0:
            stays[old[np.argsort(trace.end_ns[rows[old]], kind="stable")[:excess]]] = False
        place = gathered.place[rows]
        member.state[place[is_context]] = SETTLED
        member.state[place[recent[rows]]] = PASSED
        is_kept = np.ones(len(member.rows), np.bool_)
        is_kept[place[(is_context & ~stays) | expired[rows]]] = False
        member.keep_rows(is_kept)


def _may_precede_notable_request(decisions: Decisions, units: set[int]) -> Bools:
    member, end_ns = decisions.gathered.member, decisions.found.end_ns
    newest: dict[int, int] = {}
    for unit in units:
        newest[int(member[unit])] = max(newest.get(int(member[unit]), 0), int(end_ns[unit]))
    return decisions.find_rows_of_trees(
        {
            unit
            for unit in units
            if (before_ns := decisions.find_recording_of_row(unit).sampler.capture.before_ns)
            and end_ns[unit] >= newest[int(member[unit])] - before_ns
        }
    )
