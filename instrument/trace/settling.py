"""Settling: the requests that have come due are joined, decided about, and released, with all that served them.

A request comes due a decision wait after its end. By then all processes of its run have been read to that end. Its
rows, the rows that bear its keys and the batches that served it are one columnar trace. The functions that join files
join it: `join`, `grafted` and `stages`. Each row is settled once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from instrument.recording.remote_parents import LINK, LINK_TRACE_ID, LinkedRequest, RemoteParent, link_of
from instrument.recording.rows import REQUEST_BIT
from instrument.recording.spans import BATCH_KEYS, KEY, AttributeValue, Span
from instrument.trace.columns import AttributesOfRows, Bools, Columns, DeviceIntervals, Int64s
from instrument.trace.forest import NONE, and_above, nearest, nearest_above
from instrument.trace.gathered import OPEN, OPEN_NS, Gathered
from instrument.trace.grafted import grafted, trace_id_of
from instrument.trace.joined import join
from instrument.trace.request_steps import StepKinds
from instrument.trace.stages import Stages, spans_of_stages, stages
from instrument.trace.tail_sampling import EndedRequest, are_sampled
from instrument.trace.trace import spans_of
from instrument.trace.unsettled import ADOPTED, PASSED, SETTLED, WAITING, Decided, UnsettledRows

DECISION_WAIT_NS = 2 * 10**9
"""Nanoseconds after its end at which a request comes due."""

PATIENCE_NS = 10**9
"""Nanoseconds for which spans wait, when they have come due, for a request that nobody has heard of."""

CONTEXT_NS = 3 * 10**9
MOST_CONTEXT = 4_000
"""Rows with keys stay after their request was settled, for what comes late: for so many nanoseconds, and the newest
ones of a process longer."""

UNKNOWN_NS = 8 * 10**9
"""Nanoseconds for which spans wait for a request of their process that nobody has seen."""

BEYOND_LIMIT = "requests beyond the capture limit"

MOST_AT_ONCE = 10_000
"""Rows that are settled in one round at most, which bounds its memory. The oldest come first."""

MOST_TRACES = 50_000
"""Traces and keys that are remembered; the oldest are forgotten."""

DERIVED = 3 << 62
STAGES_BITS = 5
"""Spans of stages have numbers that no recorder gives and no device interval has: those of their requests and of their
places among the stages of these, as 64 bits with a sign."""


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request that batches served: its own span, its time in the queue, the mean size of its batches, its trace and
    span at a collector where it is kept, and True where its batches stream a generated answer."""

    own: Span
    queue_ns: int
    batch_size: float
    kept: tuple[int, int] | None
    is_generation: bool


@dataclass(slots=True)
class Settled:
    """The outcome for one process: rows and spans of stages to send, and the requests that batches served.

    The rows of `trace` have the ids of the process, tree after tree, the root of each first. `links` has the requests
    that each row serves as a batch.
    """

    trace: Columns | None = None
    links: Mapping[int, Sequence[LinkedRequest]] = field(default_factory=dict)
    derived: list[Span] = field(default_factory=list)
    served: list[ServedRequest] = field(default_factory=list)


class Settling:
    """Settles the requests of all processes of a run together. Used by one thread."""

    def __init__(self) -> None:
        self.members: list[UnsettledRows] = []
        self._kinds = StepKinds()
        self._kept_traces: OrderedDict[int, None] = OrderedDict()
        self._trace_of_key: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self.settled_ns = 0
        """Requests that had ended by then have been settled, but those that waited for others."""
        self.has_more = False
        """True where more had come due than was settled in the last round."""

    def settle(
        self, now_ns: int, *, at_once: bool = False, is_last: bool = False, asks_queues: bool = False
    ) -> dict[int, Settled]:
        """Settle what has come due by `now_ns`; `at_once` what has ended; the last time, everything.

        Returns the outcome by the place of the process, for those that have any.
        """
        living = [member.read_ns for member in self.members if not member.is_over]
        read_ns = min([now_ns, *living])
        horizon_ns = OPEN_NS if is_last else read_ns - (0 if at_once else DECISION_WAIT_NS)
        most_ns = self._most_ns(horizon_ns)
        self.has_more = most_ns < horizon_ns
        if self.has_more:
            horizon_ns, at_once, is_last = most_ns, at_once or is_last, False
        self.settled_ns = max(self.settled_ns, min(horizon_ns, read_ns))
        if not any(_has_due(member, horizon_ns) for member in self.members):
            return {}
        tick = _Tick(self, Gathered(self.members, horizon_ns), horizon_ns, is_last=is_last, at_once=at_once)
        return tick.outcome(asks_queues=asks_queues)

    def _most_ns(self, horizon_ns: int) -> int:
        """Return the time up to which rows are settled in one round."""
        ends = [member.rows["end_ns"][member.state != SETTLED] for member in self.members]
        due = np.concatenate([np.zeros(0, np.int64), *ends])
        due = due[due <= horizon_ns]
        return horizon_ns if len(due) <= MOST_AT_ONCE else int(np.partition(due, MOST_AT_ONCE)[MOST_AT_ONCE])

    # ---------------------------------------------------------------- what is remembered

    def is_kept(self, trace_id: int) -> bool:
        """Return True where a part of this trace was kept."""
        return trace_id in self._kept_traces

    def keep_trace(self, trace_id: int) -> None:
        """Remember that a part of this trace was kept."""
        self._kept_traces[trace_id] = None
        if len(self._kept_traces) > MOST_TRACES:
            self._kept_traces.popitem(last=False)

    def has_trace_of_key(self, key: str, request: tuple[int, int]) -> bool:
        """Return True for the first request, by its process and span, that asks for the trace of a key."""
        found = self._trace_of_key.setdefault(key, request)
        if len(self._trace_of_key) > MOST_TRACES:
            self._trace_of_key.popitem(last=False)
        return found == request

    @property
    def kinds(self) -> StepKinds:
        """The kinds of steps that requests have had."""
        return self._kinds


def _has_due(member: UnsettledRows, horizon_ns: int) -> bool:
    return bool(((member.state != SETTLED) & (member.rows["end_ns"] <= horizon_ns)).any())


class _Tick:
    """One round of settling over the gathered rows."""

    def __init__(
        self, settling: Settling, gathered: Gathered, horizon_ns: int, *, is_last: bool, at_once: bool
    ) -> None:
        self._settling, self._gathered, self._horizon_ns = settling, gathered, horizon_ns
        self._is_last, self._at_once = is_last, at_once
        self._members = gathered.members
        trace = gathered.trace
        self._joined = join(trace)
        run = self._members[0].ids.run if self._members else ""
        self._found = self._with_traces(grafted(trace, self._joined, run)) if run else grafted(trace, self._joined)
        count = len(trace)
        self._unit = np.where(self._found.root_id <= count, self._found.root_id - 1, NONE)
        """The row of the root of each row's tree, `NONE` where it is not here."""
        self._is_root = gathered.is_request_root
        self._out = np.zeros(count, np.bool_)
        """Rows that are sent."""
        self._gone = np.zeros(count, np.bool_)
        """Rows that are dropped."""
        self._root_id: Int64s = np.zeros(count, np.int64)
        self._callers: list[RemoteParent] = []
        self._caller_of: Int64s = np.full(count, NONE)
        """The ids of the roots of rows that are sent, and the number of each one's caller, `NONE` for none."""
        self._outcome: dict[int, Settled] = {}

    def _with_traces(self, found: Columns) -> Columns:
        """Leave the trace of a key to the first request that had it, over all rounds."""
        named = {int(self._joined.rows[place]): keys[0] for place, keys in self._joined.keys.items()}
        remote = dict(found.remote)
        for row, key in named.items():
            own = (int(self._gathered.member[row]), int(self._gathered.own[row]))
            is_of_key = row in remote and row not in self._gathered.trace.remote
            if is_of_key and not self._settling.has_trace_of_key(key, own):
                del remote[row]
        return replace(found, remote=remote)

    def outcome(self, *, asks_queues: bool) -> dict[int, Settled]:
        """Decide, and return what each process's part comes to."""
        self._place_adopted()
        kept, passed = self._decided()
        self._settle_trees(kept, passed)
        served = self._requests_of_batches()
        self._settle_batches(served)
        self._settle_others()
        decided = kept | passed if asks_queues else kept
        its_stages = self._stages(decided) if decided else []
        self._send()
        self._send_stages(its_stages)
        if asks_queues:
            self._count_served(its_stages, kept, passed)
        self._release(passed, served)
        return self._outcome

    def _of(self, member: int) -> Settled:
        return self._outcome.setdefault(member, Settled())

    # ---------------------------------------------------------------- requests

    def _member(self, row: int) -> UnsettledRows:
        return self._members[int(self._gathered.member[row])]

    def _request(self, row: int) -> EndedRequest:
        member = self._member(row)
        return member.ended_request(member.rows[self._gathered.place[row]])

    def _trace_id(self, root: int) -> int:
        """Return the trace of a tree at a collector."""
        remote = self._found.remote.get(root)
        if remote is not None:
            return remote.trace_id
        return self._member(root).ids.trace_id(int(self._gathered.own[root]))

    def _span_id(self, row: int) -> int:
        return self._member(row).ids.span_id(int(self._gathered.own[row]))

    def _decided(self) -> tuple[set[int], set[int]]:
        """Decide about the requests that have come due: the rows of the roots that are kept, and that are dropped."""
        gathered, state = self._gathered, self._gathered.state
        parts: dict[int, list[int]] = {}
        for row in np.flatnonzero(self._is_root & (state != SETTLED) & (self._unit != NONE)).tolist():
            parts.setdefault(int(self._unit[row]), []).append(row)
        undue_traces: set[int] = set()
        due: list[int] = []
        for unit in parts:
            if not self._is_root[unit] or state[unit] in (SETTLED, PASSED):
                continue
            if state[unit] == OPEN or gathered.trace.end_ns[unit] > self._horizon_ns:
                if not self._member(unit).is_over:
                    undue_traces.add(self._trace_id(unit))
            else:
                due.append(unit)
        due.sort(key=lambda row: int(gathered.trace.end_ns[row]))
        ended: dict[int, list[EndedRequest]] = {}
        for unit in due:
            ended.setdefault(int(gathered.member[unit]), []).append(self._request(unit))
        for member, its in ended.items():
            self._members[member].sampler.look(its)
        kept: set[int] = set()
        passed: set[int] = set()
        standing_out: list[tuple[int, int, int]] = []
        for unit in due:
            self._judge(unit, parts[unit], kept, passed, undue_traces, standing_out)
        for unit in list(passed):  # a part of its trace may have been kept after it was looked at
            if self._settling.is_kept(self._trace_id(unit)):
                passed.discard(unit)
                self._keep(unit, kept)
        self._keep_before(standing_out, kept, passed)
        return kept, passed

    def _place_adopted(self) -> None:
        """Find the rows of an earlier reader that it had settled, and have the others wait as any do."""
        gathered, state = self._gathered, self._gathered.state
        adopted = np.flatnonzero(state == ADOPTED)
        if not len(adopted):
            return
        served, sampled = self._requests_of_batches(), self._are_sampled()
        for row in adopted.tolist():
            member, unit = self._member(row), int(self._unit[row])
            is_late = gathered.trace.end_ns[row] > member.adopted_until_ns
            if row in served:
                states = {int(state[root]) for root in served[row] if root != NONE}
                waits = SETTLED not in states and (is_late or (bool(states) and not sampled[row]))
            elif unit != NONE and self._is_root[unit]:
                waits = state[unit] != SETTLED
            else:
                waits = bool(is_late)
            state[row] = member.state[gathered.place[row]] = WAITING if waits else SETTLED
            member.adopted += waits

    def _judge(
        self,
        unit: int,
        parts: Sequence[int],
        kept: set[int],
        passed: set[int],
        undue_traces: set[int],
        standing_out: list[tuple[int, int, int]],
    ) -> None:
        ended = [
            (self._member(row).sampler, self._request(row), row) for row in parts if self._gathered.state[row] != OPEN
        ]
        is_kept = self._settling.is_kept(self._trace_id(unit))
        if is_kept or any(sampler.is_asked_for(its, is_part=row != unit) for sampler, its, row in ended):
            self._keep(unit, kept)
            return
        for sampler, its, row in ended:
            if sampler.stands_out(its):
                if sampler.is_allowed(its.end_ns):
                    if its.root_id not in self._member(row).early:  # what came before those is long gone
                        standing_out.append((int(self._gathered.member[row]), its.start_ns, its.end_ns))
                    self._keep(unit, kept)
                else:
                    self._member(row).counts[BEYOND_LIMIT] += 1
                    passed.add(unit)
                return
        for sampler, its, row in ended:
            if sampler.is_early(its) and not (self._member(row).is_over or self._is_last):
                self._member(row).early.add(its.root_id)
                return
        if self._is_last or self._trace_id(unit) not in undue_traces:
            passed.add(unit)

    def _keep(self, unit: int, kept: set[int]) -> None:
        kept.add(unit)
        self._settling.keep_trace(self._trace_id(unit))

    def _keep_before(self, standing_out: Iterable[tuple[int, int, int]], kept: set[int], passed: set[int]) -> None:
        """Keep what came before requests that stand out, as `capture.before` says."""
        gathered = self._gathered
        recent = np.flatnonzero(self._is_root & (gathered.state == PASSED)).tolist()
        for member, start_ns, end_ns in standing_out:
            before_ns = self._members[member].sampler.capture.before_ns
            for unit in [*recent, *passed] if before_ns else ():
                if gathered.member[unit] == member and start_ns - before_ns <= gathered.trace.end_ns[unit] <= end_ns:
                    passed.discard(unit)
                    if unit not in kept:
                        self._keep(unit, kept)

    # ---------------------------------------------------------------- rows

    @property
    def _is_undecided(self) -> Bools:
        state = self._gathered.state
        return np.asarray(((state == WAITING) | (state == PASSED)) & ~self._out & ~self._gone)

    def _marked(self, units: set[int]) -> Bools:
        """Mark the rows of some trees."""
        wanted = np.zeros(len(self._unit) + 1, np.bool_)
        wanted[np.fromiter(units, np.int64, len(units))] = True
        wanted[NONE] = False
        return wanted[self._unit]

    def _settle_trees(self, kept: set[int], passed: set[int]) -> None:
        """Settle the rows of requests that were decided about, now or before."""
        gathered, undecided = self._gathered, self._is_undecided
        late: dict[bool, set[int]] = {True: set(), False: set()}
        units = np.unique(self._unit[undecided & (self._unit != NONE)])
        for unit in units[self._is_root[units] & (gathered.state[units] == SETTLED)].tolist():
            decided = self._member(unit).decided.get(int(gathered.own[unit]))
            late[decided is not None and decided.is_kept].add(unit)
        self._out |= undecided & self._marked(kept | late[True])
        self._gone |= undecided & self._marked(passed | late[False])
        # Late rows of requests that are not here any more.
        rootless = undecided & (self._unit == NONE) & (gathered.own_root & REQUEST_BIT != 0)
        for row in np.flatnonzero(rootless).tolist():
            member = self._member(row)
            decided = member.decided.get(int(gathered.own_root[row]))
            if decided is not None:
                (self._out if decided.is_kept else self._gone)[row] = True
            elif not member.is_over and gathered.trace.end_ns[row] <= self._horizon_ns - UNKNOWN_NS:
                self._gone[row] = True

    @property
    def _is_of_others(self) -> Bools:
        """Mark undecided rows that have come due in trees that are no request's."""
        is_request = np.append(self._is_root, False)[self._unit]
        is_unknown = (self._unit == NONE) & (self._gathered.own_root & REQUEST_BIT != 0)
        return np.asarray(
            self._is_undecided & ~is_request & ~is_unknown & (self._gathered.trace.end_ns <= self._horizon_ns)
        )

    def _settle_others(self) -> None:
        """Settle the rows of trees that are no request's: the sample decides."""
        gathered = self._gathered
        due = self._is_of_others
        batches = self._found.attributes.having(BATCH_KEYS)
        due[batches] = False
        if not due.any():
            return
        keyed = np.zeros(len(due), np.bool_)
        keyed[self._found.attributes.having(KEY)] = True
        waits = (nearest(self._found.parent, keyed) != NONE) & (
            gathered.trace.end_ns > self._horizon_ns - (0 if self._at_once or self._is_last else PATIENCE_NS)
        )
        due &= ~waits
        sampled = self._are_sampled()
        self._out |= due & sampled
        self._gone |= due & ~sampled

    def _are_sampled(self) -> Bools:
        found = np.zeros(len(self._unit), np.bool_)
        for number, member in enumerate(self._members):
            its = self._gathered.member == number
            found[its] = are_sampled(self._gathered.own_root[its], member.sampler.capture.sample)
        return found

    def _requests_of_batches(self) -> Mapping[int, list[int]]:
        """Return the roots of the requests that each batch serves, and `NONE` for those that nobody knows."""
        served, found = self._joined.served, dict[int, list[int]]()
        roots = np.append(self._unit[self._joined.rows], NONE)[served.request]
        for batch, root in zip(served.batch.tolist(), roots.tolist(), strict=True):
            found.setdefault(batch, []).append(root)
        return found

    def _fate_of(self, root: int) -> bool | None:
        """Return True for a request that is kept, False for one that is dropped, None for one that is undecided."""
        if self._gathered.state[root] == SETTLED:
            decided = self._member(root).decided.get(int(self._gathered.own[root]))
            return decided is not None and decided.is_kept
        if self._out[root]:
            return True
        return False if self._gone[root] or self._gathered.state[root] == PASSED else None

    def _settle_batches(self, served: Mapping[int, Sequence[int]]) -> None:
        """Settle batches in trees that are no request's: with the first request that is kept, or by the sample."""
        due, sampled = self._is_of_others, self._are_sampled()
        state, end_ns = self._gathered.state, self._gathered.trace.end_ns
        hurries = self._is_last or self._at_once
        for batch in self._found.attributes.having(BATCH_KEYS).tolist():
            if not due[batch]:
                continue
            fates = [None if root == NONE else self._fate_of(root) for root in served.get(batch, ())]
            is_open = [root != NONE and state[root] == OPEN for root in served.get(batch, ())]
            is_patient = not hurries and end_ns[batch] > self._horizon_ns - PATIENCE_NS
            if is_patient and any(fate is None and not opened for fate, opened in zip(fates, is_open, strict=True)):
                continue
            if sampled[batch] or True in fates:
                self._out[batch] = True
            elif self._is_last or not any(
                root != NONE and fate is None for root, fate in zip(served.get(batch, ()), fates, strict=True)
            ):
                self._gone[batch] = True

    # ---------------------------------------------------------------- sending

    def _send(self) -> None:
        """Find the ids with which the rows that are sent go, and put these rows into the outcome of their process."""
        gathered, found = self._gathered, self._found
        parent, count = found.parent, len(self._unit)
        crosses = parent != NONE
        crosses[crosses] = gathered.member[parent[crosses]] != gathered.member[crosses]
        crosses &= gathered.trace.parent != parent  # only what was moved
        top = nearest(parent, crosses & (found.root_id != found.span_id))
        apart = self._out & ~self._are_sampled() & (gathered.own_root & REQUEST_BIT == 0)
        for number in np.unique(gathered.member[apart]).tolist():
            self._members[number].note_sent_apart(gathered.own[apart & (gathered.member == number)].tolist())
        rows = np.flatnonzero(self._out)
        own, unit, piece, above = gathered.own[rows], self._unit[rows], top[rows], parent[rows]
        stays = (above != NONE) & ~crosses[rows]
        parent_id = np.where(stays, gathered.own[above], gathered.own_parent[rows])
        of_unit = np.where(unit != NONE, gathered.own[unit], gathered.own_root[rows])
        root_id = np.where(piece != NONE, gathered.own[piece], of_unit)
        callers, number_of = list(found.remote.values()), np.full(count + 1, NONE)
        number_of[np.fromiter(found.remote, np.int64, len(callers))] = np.arange(len(callers))
        caller = number_of[unit]
        pieces = np.unique(piece[piece != NONE])
        number_of[pieces] = len(callers) + np.arange(len(pieces))
        callers += [self._caller(one) for one in pieces.tolist()]
        caller = np.where(piece != NONE, number_of[piece], caller)
        for at in np.flatnonzero((piece == NONE) & (unit == NONE)).tolist():
            decided = self._member(int(rows[at])).decided.get(int(root_id[at]))
            if decided is not None:
                root_id[at], caller[at] = decided.root_id, NONE
                if decided.remote is not None:
                    caller[at], callers = len(callers), [*callers, decided.remote]
        alone = apart[rows] & (piece == NONE) & ~((above != NONE) & self._out[above])
        for row, (root, remote) in self._of_unknown().items():
            if piece[at := int(np.searchsorted(rows, row))] == NONE:
                root_id[at], caller[at], alone[at] = root, len(callers), False
                callers.append(remote)
        parent_id[alone], root_id[alone] = 0, own[alone]  # what is above them stays where it is
        self._root_id[rows], self._caller_of[rows] = root_id, caller
        self._callers = callers
        attributes, links = self._sent_attributes(rows), self._links()
        order = np.lexsort((rows, found.end_ns[rows], own != root_id, root_id, gathered.member[rows]))
        bounds = np.searchsorted(gathered.member[rows][order], np.arange(len(self._members) + 1)).tolist()
        for number, (begin, end) in enumerate(pairwise(bounds)):
            its = order[begin:end]
            if not len(its):
                continue
            picked = rows[its]
            first = np.flatnonzero(np.diff(root_id[its], prepend=NONE))
            remotes = {
                at: callers[one]
                for at, one in zip(first.tolist(), caller[its[first]].tolist(), strict=True)
                if one != NONE
            }
            for at, remote in remotes.items():
                self._members[number].note_trace(int(root_id[its[at]]), remote.trace_id)
            settled = self._of(number)
            settled.trace = Columns(
                sites=found.sites, errors=found.errors, span_id=own[its], parent_id=parent_id[its],
                root_id=root_id[its], thread_id=gathered.own_thread[picked], task_id=found.task_id[picked],
                start_ns=found.start_ns[picked], end_ns=found.end_ns[picked], active_ns=found.active_ns[picked],
                self_ns=found.self_ns[picked], site=found.site[picked], error=found.error[picked],
                clipped=found.clipped[picked], device=DeviceIntervals.none(),
                attributes=AttributesOfRows({
                    at: attributes[row] for at, row in enumerate(picked.tolist()) if row in attributes
                }),
                remote=remotes,
            )  # fmt: skip
            settled.links = {at: links[row] for at, row in enumerate(picked.tolist()) if row in links} if links else {}

    def _sent_attributes(self, rows: Int64s) -> Mapping[int, Mapping[str, AttributeValue]]:
        """Return the attributes of the rows that are sent and have any, with links to what they came from."""
        found = self._found
        having = np.asarray(found.attributes.rows(), np.int64)
        attributes = {row: found.attributes[row] for row in having[self._out[having]].tolist()}
        for row, link in self._where_began().items():
            if self._out[row] and LINK not in attributes.get(row, {}):
                attributes[row] = {**attributes.get(row, {}), **link}
        for row in [row for row, its in attributes.items() if LINK in its and LINK_TRACE_ID not in its]:
            cause = attributes[row][LINK]
            if isinstance(cause, tuple | list) and len(cause) == 2:
                trace_id = self._member(row).traces.get(int(cause[1]))
                if trace_id is not None:  # the trace that the tree of the cause was sent with
                    attributes[row] = {**attributes[row], LINK_TRACE_ID: f"{trace_id:032x}"}
        return attributes

    def _of_unknown(self) -> Mapping[int, tuple[int, RemoteParent]]:
        """Return the root and the trace of rows below a key that no request here is known by, where a run has such."""
        run = self._members[0].ids.run if self._members else ""
        found = self._found
        keyed = np.zeros(len(self._unit), np.bool_)
        keyed[found.attributes.having(KEY)] = bool(run)
        keyed &= (self._joined.of == NONE) & ~np.append(self._is_root, False)[self._unit]
        if not keyed.any():
            return {}
        keyed &= nearest_above(found.parent, keyed) == NONE
        rows = np.flatnonzero(self._out)
        tops = nearest(found.parent, keyed)[rows]
        its: dict[int, tuple[int, RemoteParent]] = {}
        for row, top in zip(rows.tolist(), tops.tolist(), strict=True):
            key = None if top == NONE or top in self._gathered.trace.remote else found.attributes[top].get(KEY)
            if isinstance(key, str) and key:
                its[row] = int(self._gathered.own[top]), RemoteParent(trace_id_of(run, key), 0)
        return its

    def _caller(self, piece: int) -> RemoteParent:
        """Return what the topmost span of a piece of a request lies below, in another process."""
        unit = int(self._unit[piece])
        given = self._found.remote.get(unit)
        flags, state = (1, "") if given is None else (given.flags, given.state)
        above = int(self._found.parent[piece])
        return RemoteParent(self._trace_id(unit), self._span_id(above), flags, state=state)

    def _links(self) -> Mapping[int, tuple[LinkedRequest, ...]]:
        """Return the requests that each batch serves and that are not dropped, as a collector knows them."""
        served, found = self._joined.served, dict[int, dict[LinkedRequest, None]]()
        known = np.flatnonzero((served.request != NONE) & self._out[served.batch])
        linked: dict[int, LinkedRequest | None] = {}
        for batch, place in zip(served.batch[known].tolist(), served.request[known].tolist(), strict=True):
            if place not in linked:
                row = int(self._joined.rows[place])
                root = int(self._unit[row])
                is_dropped = root == NONE or self._fate_of(root) is False
                linked[place] = None if is_dropped else LinkedRequest(
                    0, 0, RemoteParent(self._trace_id(root), self._span_id(row))
                )  # fmt: skip
            one = linked[place]
            if one is not None:
                found.setdefault(batch, {})[one] = None
        return {batch: tuple(its) for batch, its in found.items()}

    def _where_began(self) -> Mapping[int, Mapping[str, AttributeValue]]:
        """Return the links of requests with keys that began within others to the spans in which they did."""
        found: dict[int, Mapping[str, AttributeValue]] = {}
        for place in self._joined.keys:
            row = int(self._joined.rows[place])
            above = int(self._found.parent[row])
            if above == NONE or self._joined.of[above] == NONE or self._unit[row] != row:
                continue
            around = int(self._unit[above])
            if around not in (NONE, row):
                trace = RemoteParent(self._trace_id(around), 1)
                found[row] = link_of(int(self._gathered.own[above]), int(self._gathered.own[around]), trace)
        return found

    # ---------------------------------------------------------------- stages

    def _stages(self, units: set[int]) -> list[Stages]:
        """Return the stages of the requests of these trees."""
        served = self._joined.served
        theirs = np.append(self._marked(units)[self._joined.rows], False)
        request = np.where(theirs[served.request], served.request, NONE)
        joined = replace(self._joined, served=replace(served, request=request))
        self._stage_view = joined
        found = stages(self._found, joined, self._settling.kinds)
        return [one for one in found if theirs[one.place]]

    def _send_stages(self, its_stages: Sequence[Stages]) -> None:
        """Make spans of the stages of requests that are sent."""
        gathered = self._gathered
        wanted = [one for one in its_stages if self._out[self._joined.rows[one.place]]]
        if not wanted:
            return
        for row, spans in sorted(spans_of_stages(self._found, self._stage_view, wanted).items()):
            own, number = int(gathered.own[row]), self._caller_of[row]
            for place, span in enumerate(spans):
                span.span_id = (DERIVED | (own << STAGES_BITS | place) & (1 << 62) - 1) - (1 << 64)
                span.parent_id, span.root_id = own, int(self._root_id[row])
                span.thread_id, span.task_id = int(gathered.own_thread[row]), int(self._found.task_id[row])
                span.remote = None if number == NONE else self._callers[number]
            self._of(int(gathered.member[row])).derived += spans

    def _count_served(self, its_stages: Sequence[Stages], kept: set[int], passed: set[int]) -> None:
        """Note the time in the queue of each request that batches served, kept or not."""
        served = self._joined.served
        sizes = np.bincount(served.batch, minlength=len(self._unit)) if len(served.batch) else np.zeros(0, np.int64)
        starts, ends = self._found.start_ns, self._found.end_ns
        for one in its_stages:
            row = int(self._joined.rows[one.place])
            unit = int(self._unit[row])
            if self._gathered.state[unit] == PASSED or one.place not in self._joined.keys:
                continue
            batches = served.batch[served.request == one.place]
            batches = batches[starts[batches] < np.minimum(ends[batches], ends[row])]
            queue_ns = 0 if one.queue is None else one.queue[1] - one.queue[0]
            (own,) = spans_of(self._found, np.array([row]))
            own.span_id, own.thread_id = int(self._gathered.own[row]), int(self._gathered.own_thread[row])
            trace = (self._trace_id(unit), self._span_id(row)) if unit in kept else None
            size = float(sizes[batches].mean()) if len(batches) else 0.0
            self._of(int(self._gathered.member[row])).served.append(
                ServedRequest(own, queue_ns, size, trace, one.is_generation)
            )

    # ---------------------------------------------------------------- releasing

    def _release(self, passed: set[int], served: Mapping[int, Sequence[int]]) -> None:
        """Drop settled rows, but those that say whose other rows are."""
        gathered, found = self._gathered, self._found
        for row in np.flatnonzero(self._is_root & (self._out | self._gone)).tolist():
            member, own = self._member(row), int(gathered.own[row])
            decided = Decided(False, own, None)
            if self._out[row]:
                number = self._caller_of[row]
                decided = Decided(True, int(self._root_id[row]), None if number == NONE else self._callers[number])
            member.decide(own, decided)
            member.early.discard(own)
        says_keys = self._is_root.copy()
        says_keys |= found.of_kind("request")
        for name in (KEY, BATCH_KEYS):
            says_keys[found.attributes.having(name)] = True
        says_keys = and_above(gathered.trace.parent, np.flatnonzero(says_keys))  # a key counts for all below it
        needed = np.zeros(len(says_keys), np.bool_)
        waiting = [row for place in self._joined.keys if self._fate_of(row := int(self._joined.rows[place])) is None]
        since_ns = int(found.start_ns[waiting].min()) if waiting else OPEN_NS
        batches = np.fromiter(served, np.int64, len(served))
        needed[batches[found.end_ns[batches] >= since_ns]] = True  # they serve such a request, or keep it waiting
        settled = self._out | self._gone
        recent = self._gone & self._stay_recent(passed)
        held = (gathered.state == PASSED) & ~settled
        held_roots = set(np.flatnonzero(self._is_root & held).tolist())
        expired = held & ~self._stay_recent(held_roots)
        for number, member in enumerate(self._members):
            its = np.flatnonzero((gathered.member == number) & (gathered.place != NONE))
            member.passed += int(np.count_nonzero(self._gone[its] & (gathered.state[its] != PASSED)))
            member.lingers = self._lingers(number)
            is_context = (settled[its] & ~recent[its]) | (gathered.state[its] == SETTLED)
            stays = is_context & says_keys[its] & (not self._is_last)
            old = np.flatnonzero(stays & ~needed[its] & (found.end_ns[its] <= self._horizon_ns - CONTEXT_NS))
            excess = int(np.count_nonzero(stays)) - MOST_CONTEXT
            if excess > 0:
                stays[old[np.argsort(found.end_ns[its[old]], kind="stable")[:excess]]] = False
            place = gathered.place[its]
            member.state[place[is_context]] = SETTLED
            member.state[place[recent[its]]] = PASSED
            wanted = np.ones(len(member.rows), np.bool_)
            wanted[place[(is_context & ~stays) | expired[its]]] = False
            member.keep(wanted)

    def _stay_recent(self, units: set[int]) -> Bools:
        """Mark the rows of dropped requests that one which stands out later may ask for."""
        member, end_ns = self._gathered.member, self._found.end_ns
        newest: dict[int, int] = {}
        for unit in units:
            newest[int(member[unit])] = max(newest.get(int(member[unit]), 0), int(end_ns[unit]))
        stay = {
            unit
            for unit in units
            if (before_ns := self._member(unit).sampler.capture.before_ns)
            and end_ns[unit] >= newest[int(member[unit])] - before_ns
        }
        return self._marked(set() if self._is_last else stay)

    def _lingers(self, number: int) -> bool:
        """Return True where rows of a process wait that will still be decided about."""
        gathered = self._gathered
        waits = (gathered.member == number) & self._is_undecided & (gathered.state == WAITING)
        is_open = np.append(gathered.state == OPEN, True)[self._unit]
        unknown = (self._unit == NONE) & (gathered.own_root & REQUEST_BIT != 0)
        return bool((waits & ~(is_open & self._members[number].is_over) & ~unknown).any())
