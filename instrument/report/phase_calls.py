"""Calls of phases beside units: which of them is under way at each instant, and what they put on streams.

Of the calls on the track of a unit it is the one that began first, an optimizer after the rest. What is known of the
others, of another track that works for it or below a generator, is that they were open and not when they ran: they have
what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.recording.spans import Interval
from instrument.report.units import OPTIMIZER, Units, phase_of
from instrument.trace.columns import Bools, Int64s, Trace
from instrument.trace.forest import NONE, nearest_above
from instrument.trace.groups import Groups, distinct, numbered
from instrument.trace.intervals import Unions, lengths_by_group, union_by_group
from instrument.trace.self_times import stood_aside
from instrument.trace.turns import turns

OWN, OWN_OPTIMIZER, OTHER = range(3)
"""Which calls are asked first who is under way."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of phases that were under way in a unit: of each the number of its phase in `names`, and how long.

    `whole_ns` are the times in whole units by phase. `pieces` are the stretches in which a call is under way, by line,
    and `of_piece` the call of each. `beside_ns` are the lengths of the calls that ran where there is no unit.
    """

    names: Sequence[str]
    phase: Int64s
    own_ns: Int64s
    whole_ns: Mapping[str, int]
    pieces: Unions
    of_piece: Int64s
    beside_ns: Sequence[int]

    def by_phase(self) -> dict[str, list[int]]:
        """How long each call of a phase was under way."""
        return _by_phase(self.names, self.phase, self.own_ns)


def _by_phase(names: Sequence[str], phase: Int64s, times_ns: NDArray[Any]) -> dict[str, list[int]]:
    """The times of each phase that has any."""
    order = np.argsort(phase, kind="stable")
    numbers = phase[order]
    firsts = np.flatnonzero(np.diff(numbers, prepend=NONE))
    parts = np.split(times_ns[order], firsts[1:])
    return {names[number]: part.tolist() for number, part in zip(numbers[firsts].tolist(), parts, strict=False)}


def calls_of(trace: Trace, units: Units, held: Interval) -> Calls:
    """The calls beside units. What a communication or a copy consists of is no phase of the step."""
    of_sites = list(map(phase_of, trace.sites))
    numbers: dict[str, int] = {}
    number_of = np.array(
        [*(NONE if name is None else numbers.setdefault(name, len(numbers)) for name in of_sites), NONE]
    )
    names = list(numbers)
    is_call = trace.of_sites([name is not None for name in of_sites])
    is_work = trace.of_sites(
        [site.kind in ("comm", "copy") and name is None for site, name in zip(trace.sites, of_sites, strict=True)]
    )
    rows = np.flatnonzero(is_call & ~np.append(is_work, np.False_)[trace.parent])
    stood_still = is_call & stood_aside(trace)
    is_below = nearest_above(trace.parent, stood_still) != NONE if stood_still.any() else stood_still
    rank = np.where((units.is_aside | is_below | stood_still)[rows], OTHER, OWN)
    rank[(rank == OWN) & (np.array([*(name == OPTIMIZER for name in of_sites), False])[trace.site[rows]])] = (
        OWN_OPTIMIZER
    )
    line, ends = _beside_steps(trace, units, rows, stood_still[rows])
    is_beside = (line == NONE) & (trace.start_ns[rows] < held[1]) & (trace.end_ns[rows] > held[0])
    beside = rows[is_beside]
    beside_ns = np.minimum(trace.end_ns[beside], held[1]) - np.maximum(trace.start_ns[beside], held[0])
    order = np.lexsort((trace.span_id[rows], -trace.end_ns[rows], trace.start_ns[rows], rank, line))
    order = order[np.searchsorted(line[order], 0) :]
    rows, line, ends, rank = rows[order], line[order], ends[order], rank[order]
    call, pieces, unit = _under_way(units, line, trace.start_ns[rows], ends, rank)
    lengths_ns = pieces.ends - pieces.starts
    known = distinct(call)
    own_ns = Groups(np.searchsorted(known, call), len(known)).sums(lengths_ns)
    phase = number_of[trace.site[rows]]
    is_whole = units.is_whole[unit]
    in_whole = phase[call[is_whole]]
    whole_ns = Groups(in_whole, len(names)).sums(lengths_ns[is_whole]).tolist()
    filled = lengths_ns > 0
    return Calls(
        names=names,
        phase=phase[known],
        own_ns=own_ns,
        whole_ns={names[number]: whole_ns[number] for number in distinct(in_whole).tolist()},
        pieces=Unions(*(one[filled] for one in pieces)),
        of_piece=np.searchsorted(known, call[filled]),
        beside_ns=beside_ns.tolist(),
    )


def _beside_steps(trace: Trace, units: Units, rows: Int64s, stood_still: Bools) -> tuple[Int64s, Int64s]:
    """The line of each call, `NONE` of one between steps, also ones that are skipped, and where it ends.

    Of a generator that stood still no more counts than lies in the step in which it began.
    """
    line, starts, ends = units.line_of[rows], trace.start_ns[rows], trace.end_ns[rows].copy()
    if units.steps is None:
        return line, ends
    known = np.flatnonzero(line != NONE)
    at, starts, until, is_still = line[known], starts[known], ends[known], stood_still[known]
    step = units.steps.begun(at, starts)
    step_end = np.append(units.steps.ends, 0)[step]
    is_in_step = (step != NONE) & (starts < step_end)
    is_around = ~is_still & (units.steps.begun(at, until - 1) > step)
    line[known[~is_in_step & ~is_around]] = NONE
    ends[known] = np.where(is_in_step & is_still, np.minimum(until, step_end), until)
    return line, ends


def _under_way(
    units: Units, line: Int64s, starts: Int64s, ends: Int64s, rank: Int64s
) -> tuple[Int64s, Unions, Int64s]:  # fmt: skip
    """The stretches of units in which a call is under way, by line: of each the call, and the unit.

    Calls are in the order in which they are asked. One without length has a stretch where none of its rank goes on.
    """
    call, since, until = turns(line, starts, ends, np.arange(len(line))[::-1])
    empty = np.flatnonzero(starts == ends)
    if len(empty):
        going_on = union_by_group(3 * line + rank, starts, ends)
        empty = empty[going_on.at(3 * line[empty] + rank[empty], starts[empty]) == NONE]
        call, since, until = (
            np.concatenate(both) for both in ((call, empty), (since, starts[empty]), (until, ends[empty]))
        )
    which, unit = units.its.overlapping(line[call], since, until)
    call = call[which]
    pieces = Unions(
        line[call], np.maximum(since[which], units.its.starts[unit]), np.minimum(until[which], units.its.ends[unit])
    )
    return call, pieces, unit


@dataclass(frozen=True, slots=True)
class StreamUses:
    """What spans that began in a unit put on streams: sums over streams, of each the union.

    `units` and `calls` are those of each unit and of each call, by phase, that put anything there; `phases` those of
    all calls of a phase, `base_ns` of all units, `covered_ns` of all calls.
    """

    units: Sequence[int]
    calls: Mapping[str, Sequence[int]]
    phases: Mapping[str, int]
    base_ns: int
    covered_ns: int


def streams_of(trace: Trace, units: Units, calls: Calls) -> StreamUses:
    """The device time of the spans that began in a unit, and in a call of it."""
    its = trace.device
    rows = distinct(its.row)
    rows = rows[units.line_of[rows] != NONE]
    unit = units.its.at(units.line_of[rows], trace.start_ns[rows])
    piece = calls.pieces.at(units.line_of[rows], trace.start_ns[rows])
    of_row = np.full((2, len(trace)), NONE, dtype=np.int64)
    of_row[:, rows] = unit, np.append(calls.of_piece, NONE)[piece]
    kept = np.flatnonzero(its.timed & (of_row[0][its.row] != NONE))
    unit, call = of_row[:, its.row[kept]]
    stream = numbered(its.device[kept], its.stream[kept])[0]
    parts = stream, its.start_ns[kept], its.end_ns[kept]
    in_call = call != NONE
    call, parts_of_calls = call[in_call], tuple(one[in_call] for one in parts)
    of_units, (of_calls, known) = _summed(unit, *parts)[0], _summed(call, *parts_of_calls)
    of_phases, phases = _summed(calls.phase[call], *parts_of_calls)
    return StreamUses(
        units=of_units.tolist(),
        calls=_by_phase(calls.names, calls.phase[known], of_calls),
        phases={
            calls.names[number]: total_ns for number, total_ns in zip(phases.tolist(), of_phases.tolist(), strict=True)
        },
        base_ns=sum(_summed(np.zeros_like(unit), *parts)[0].tolist()),
        covered_ns=sum(_summed(np.zeros_like(call), *parts_of_calls)[0].tolist()),
    )


def _summed(keys: Int64s, streams: Int64s, starts: Int64s, ends: Int64s) -> tuple[NDArray[Any], Int64s]:
    """By key the sum over streams, of each the union; and the keys."""
    parts, some = numbered(keys, streams)
    lengths_ns = lengths_by_group(parts, starts, ends, len(some))
    known = distinct(keys)
    return Groups(np.searchsorted(known, keys[some]), len(known)).sums(lengths_ns), known
