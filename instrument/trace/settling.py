"""Settling: due requests are joined with the batches that served them, kept or dropped, and removed from memory.

A request comes due when a decision wait has passed after its end. By then the rows of all processes up to its end have
been read. Its rows, the rows with its keys and the batches that served it become one columnar trace, which `join`,
`grafted` and `stages` process as they process files. Each row is settled once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from instrument.recording.rows import REQUEST_BIT
from instrument.recording.spans import BATCH_KEYS, KEY
from instrument.trace.columns import Bools
from instrument.trace.decisions import OPEN, OPEN_NS, Decisions, Gathered, RememberedTraces
from instrument.trace.forest import NONE, are_at_or_above
from instrument.trace.request_steps import StepKinds
from instrument.trace.sent_rows import SentRows, Settled
from instrument.trace.unsettled import PASSED, SETTLED, WAITING, Decided, UnsettledRows

DECISION_WAIT_NS = 2 * 10**9
"""The time from a request's end until it comes due, in ns."""

CONTEXT_NS = 3 * 10**9
MOST_CONTEXT = 4_000
"""The ns for which settled requests and rows with keys remain, for rows that come late. Of rows with keys, the newest
`MOST_CONTEXT` per process remain longer."""

MOST_AT_ONCE = 6_000
"""The most rows that one round settles, the oldest first. It bounds the memory of a round."""


class Settling:
    """Settles the requests of all processes of a run together. Only one thread may use it."""

    def __init__(self) -> None:
        self.members: list[UnsettledRows] = []
        self._kinds = StepKinds()
        self._remembered = RememberedTraces()
        self.taken: Sequence[Callable[[Decisions, int], object]] = ()
        """Functions that are called with the decisions and the time of each round, before rows are released."""
        self.settled_ns = 0
        """The time up to which ended requests are settled, except those that wait for others."""
        self.has_more = False
        """True if the last round left due requests unsettled."""

    def settle(
        self, now_ns: int, *, at_once: bool = False, is_last: bool = False, asks_queues: bool = False
    ) -> dict[int, Settled]:
        """Settle what is due at `now_ns`; with `at_once` everything that has ended, with `is_last` everything.

        Return the outcome of each process that has one, by its index.
        """
        living = [member.read_ns for member in self.members if not member.is_over]
        read_ns = min([now_ns, *living])
        horizon_ns = OPEN_NS if is_last else read_ns - (0 if at_once else DECISION_WAIT_NS)
        most_ns = min([horizon_ns, *(member.unpack(horizon_ns, MOST_AT_ONCE) for member in self.members)])
        most_ns = self._most_ns(most_ns)
        self.has_more = most_ns < horizon_ns
        if self.has_more:
            horizon_ns, at_once, is_last = most_ns, at_once or is_last, False
        self.settled_ns = max(self.settled_ns, min(horizon_ns, read_ns))
        if not any(_has_due(member, horizon_ns) for member in self.members):
            return {}
        gathered = Gathered(self.members, horizon_ns)
        decisions = Decisions(self._remembered, gathered, horizon_ns, is_last=is_last, at_once=at_once)
        sent_rows = SentRows(decisions, self._kinds, asks_queues=asks_queues)
        for take in self.taken:
            take(decisions, now_ns)
        _release(decisions, sent_rows, horizon_ns, is_last=is_last)
        return sent_rows.outcome

    def _most_ns(self, horizon_ns: int) -> int:
        """Return the time up to which this round settles rows."""
        ends = [member.rows["end_ns"][member.state != SETTLED] for member in self.members]
        due = np.concatenate([np.zeros(0, np.int64), *ends])
        due = due[due <= horizon_ns]
        return horizon_ns if len(due) <= MOST_AT_ONCE else int(np.partition(due, MOST_AT_ONCE)[MOST_AT_ONCE])


def _has_due(member: UnsettledRows, horizon_ns: int) -> bool:
    return bool(((member.state != SETTLED) & (member.rows["end_ns"] <= horizon_ns)).any())


def _release(decisions: Decisions, sent_rows: SentRows, horizon_ns: int, *, is_last: bool) -> None:
    """Drop settled rows, except those that later decide which request other rows belong to."""
    gathered, trace, joined = decisions.gathered, decisions.found, decisions.joined
    out, dropped, is_root = decisions.out, decisions.gone, decisions.is_root
    for row in np.flatnonzero(is_root & (out | dropped)).tolist():
        member, root_id = decisions.member(row), int(gathered.own[row])
        decided = Decided(False, root_id, None)
        if out[row]:
            number = sent_rows.caller_of[row]
            decided = Decided(True, int(sent_rows.root_id[row]), None if number == NONE else sent_rows.callers[number])
        member.decide(root_id, decided)
        member.early.discard(root_id)
    says_keys = is_root | trace.of_kind("request")
    for name in (KEY, BATCH_KEYS):
        says_keys[trace.attributes.having(name)] = True
    says_keys = are_at_or_above(gathered.trace.parent, np.flatnonzero(says_keys))  # a key counts for all below it
    needed = np.zeros(len(says_keys), np.bool_)
    waiting = [row for place in joined.keys if decisions.fate_of(row := int(joined.rows[place])) is None]
    since_ns = int(trace.start_ns[waiting].min()) if waiting else OPEN_NS
    batches = np.fromiter(decisions.served, np.int64, len(decisions.served))
    needed[batches[trace.end_ns[batches] >= since_ns]] = True  # they serve such a request, or keep it waiting
    settled = out | dropped
    recent = dropped & _may_be_needed(decisions, set() if is_last else decisions.passed)
    passed_before = (gathered.state == PASSED) & ~settled
    roots_before = set() if is_last else set(np.flatnonzero(is_root & passed_before).tolist())
    expired = passed_before & ~_may_be_needed(decisions, roots_before)
    for number, member in enumerate(decisions.members):
        rows = np.flatnonzero((gathered.member == number) & (gathered.place != NONE))
        member.passed += int(np.count_nonzero(dropped[rows] & (gathered.state[rows] != PASSED)))
        member.lingers = member.packed > 0 or _has_undecided_rows(decisions, number)
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
        member.keep(is_kept)


def _may_be_needed(decisions: Decisions, units: set[int]) -> Bools:
    """Return an array over the rows, True for rows of dropped requests that a later notable request may need."""
    member, end_ns = decisions.gathered.member, decisions.found.end_ns
    newest: dict[int, int] = {}
    for unit in units:
        newest[int(member[unit])] = max(newest.get(int(member[unit]), 0), int(end_ns[unit]))
    return decisions.rows_of_trees(
        {
            unit
            for unit in units
            if (before_ns := decisions.member(unit).sampler.capture.before_ns)
            and end_ns[unit] >= newest[int(member[unit])] - before_ns
        }
    )


def _has_undecided_rows(decisions: Decisions, number: int) -> bool:
    """Return True if a process has waiting rows that can still be decided."""
    gathered, unit = decisions.gathered, decisions.unit
    waits = (gathered.member == number) & decisions.is_undecided & (gathered.state == WAITING)
    is_open = np.append(gathered.state == OPEN, True)[unit]
    unknown = (unit == NONE) & (gathered.own_root & REQUEST_BIT != 0)
    return bool((waits & ~(is_open & decisions.members[number].is_over) & ~unknown).any())
