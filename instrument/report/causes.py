"""The causes that delay requests: how long each cause took in a request, and the spans that prove it.

`CAUSES` lists all causes. Each moment of a request belongs to one cause, to expected work, or to the unknown rest.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.recording.spans import BLOCKED_BY, EXECUTOR_QUEUE, HOST, Sample, Site, is_blocked_loop, is_collection
from instrument.report.request_groups import find_size_attributes, read_sizes
from instrument.report.table import name_of_site
from instrument.report.view import Recording
from instrument.trace.blame import Floats, compute_step_costs, name_request, split_loads
from instrument.trace.columns import Int64s
from instrument.trace.indices import NONE, Members, find_nearest_row, make_mask, number_combinations
from instrument.trace.intervals import make_union, union_by_group
from instrument.trace.joined import THOUSANDTHS
from instrument.trace.ledger import QUEUE, STALL, SUB_REQUESTS, TRANSPORT, Turns, find_phase, is_lock_wait
from instrument.trace.request_trees import CACHED_TOKENS, INPUT_TOKENS, PREEMPTIONS
from instrument.trace.trace import Trace

BURST, SLOW, PREFILL, FILL = "arrival burst", "slow service", "another request's prefill", "waiting to fill a batch"
PREEMPTED, PADDING, BLOCKED, COLLECTED = "preemption", "padding", "blocked event loop", "garbage collection"
LOCK, EXECUTOR, COPY, DEVICE, FIRST = "wait for a lock", "full executor", "copy", "busy device", "first call"
CONTENTION, MEMORY, INSTRUMENT = "processor contention", "memory pressure", "instrumentation"
TRANSPORTED, OWN = "transport", "own work"

CAUSES: Mapping[str, str] = {
    BURST: "more requests arrived than usual, and the engine's steps were as fast as usual for their load",
    SLOW: "steps of the engine took longer than usual for their members and weight",
    PREFILL: "an unusually heavy member of a step, such as a long prompt, took its time",
    FILL: "the engine was idle while the request was in the queue",
    PREEMPTED: "the engine served other requests between two batches of this one",
    PADDING: "items were padded to the largest of their batch",
    BLOCKED: "a callback blocked the event loop of the request",
    COLLECTED: "a garbage collection stopped all threads of the process",
    LOCK: "a call waited for a lock, a semaphore or a place in a pool",
    EXECUTOR: "all threads of an executor were busy",
    COPY: "copies to or from a device took longer",
    DEVICE: "the device worked for others meanwhile",
    FIRST: "functions were called for the first time in their process",
    CONTENTION: "threads waited for a processor, the quota of their control group, or the hypervisor",
    MEMORY: "threads waited for memory",
    INSTRUMENT: "the calls of probes took time",
    TRANSPORTED: "the request was on its way between threads or processes",
    OWN: "calls of the request itself took longer",
}
"""The meaning of each cause that an explanation can name."""

LOAD, UNKNOWN_REST = "expected load", "unknown"
IN_QUEUE, IN_BATCH = "in the queue", "in batches"

SPREAD = "all call paths alike"
"""The text that replaces a call path if a cause slowed all call paths."""

Key = tuple[str, str]
"""A cause, and the call path or part of the request in which it took time."""

STEP_CAUSES = (SLOW, PREFILL, PADDING, FIRST, DEVICE, BURST, COPY, LOCK)
"""The causes whose evidence is in the steps of the engine."""

MOST_PROOFS = 3

INPUT = re.compile("input|request|prompt")
"""A pattern for the names of attributes that give the size of a request's input."""

PRESSURES = {CONTENTION: "cpu_wait", MEMORY: "memory_pressure"}
"""The gauge that proves each cause: the percentage of time in which threads waited for a processor or for memory."""


class Proof(NamedTuple):
    """A span that proves a cause. `begin_ns` counts from the start of the trace. `time_ns` is the time within the
    request."""

    name: str
    span_id: int
    begin_ns: int
    time_ns: int
    note: str = ""


class CauseTimes:
    """The time that each cause took in requests of a recording. `places` are the indices of the requests."""

    def __init__(self, recording: Recording, places: Int64s) -> None:
        self.trace, self.joined = trace, joined = recording.columns, recording.joined
        self.facts = recording.trace
        served = replace(joined.served, weight=recording.compute_once(find_member_weights))
        self.costs = compute_step_costs(trace, served, len(joined.rows))
        part_names, *columns = recording.turns
        self.names = (*part_names, UNKNOWN_REST)
        self._turns = {place: self._fill_gaps(columns, place) for place in places.tolist()}
        self._process_of = {
            thread: number for number, process in enumerate(self.facts.processes) for thread in process.threads
        }
        rows = self.collections = np.flatnonzero(trace.are_of_sites([is_collection(site) for site in trace.sites]))
        self._collected = union_by_group(
            self._find_process_numbers(trace.thread_id[rows]), trace.start_ns[rows], trace.end_ns[rows]
        )
        rows = self.blocks = self._find_blocked_loops()
        self._blocked = union_by_group(trace.thread_id[rows], trace.start_ns[rows], trace.end_ns[rows])
        self._names_of_sites = [name_of_site(site) for site in trace.sites]
        self._suspends = trace.are_of_sites([site.suspends for site in trace.sites])
        self._is_lock = trace.are_of_sites(list(map(is_lock_wait, trace.sites)))
        self.locks = np.flatnonzero(self._is_lock & ~np.append(self._is_lock, [False])[trace.parent])
        self._paths = [
            (SLOW, "") if site == NONE else (self._choose_cause(trace.sites[site], SLOW), self._names_of_sites[site])
            for site in self.costs.sites.tolist()
        ]
        self._reach = np.maximum.accumulate(self.costs.end_ns) if len(self.costs.rows) else self.costs.end_ns
        self._rows_of_requests = np.bincount(joined.of[joined.of != NONE], minlength=len(joined.rows))
        self._is_first_call = np.zeros(len(trace), dtype=np.bool_)
        if self.knows_first_calls:
            order = np.argsort(trace.start_ns, kind="stable")
            self._is_first_call[order[number_combinations(trace.site[order])[1]]] = True
        self._subtract_separate_causes()
        # A request's own work is its calls outside of phases and steps.
        is_phase = trace.are_of_sites([find_phase(site) is not None for site in trace.sites])
        is_phase[joined.rows] = False
        is_own = (self.costs.step_of[:-1] == NONE) & ~trace.are_of_kind("request")
        is_own &= find_nearest_row(trace.parent, is_phase) == NONE
        self._own_rows = Members(np.where(is_own, joined.of, NONE), len(joined.rows))

    def _find_process_numbers(self, threads: Int64s) -> Int64s:
        if not self._process_of:
            return np.zeros(len(threads), dtype=np.int64)
        return np.array([self._process_of.get(thread, 0) for thread in threads.tolist()], dtype=np.int64)

    def _fill_gaps(self, all_turns: Sequence[Int64s], place: int) -> Turns:
        """Return the turns of a request (see `Turns`). Each gap between two turns becomes a turn of unknown time."""
        first, last = np.searchsorted(all_turns[0], [place, place + 1])
        columns, root = np.array([column[first:last] for column in all_turns]), self.joined.rows[place]
        since = np.append(self.trace.start_ns[root], columns[4] + columns[5])
        until = np.append(columns[4], self.trace.end_ns[root])
        gaps = np.full((len(columns), int((since < until).sum())), NONE)
        gaps[0], gaps[1], gaps[4] = place, len(self.names) - 1, since[since < until]
        gaps[5] = (until - since)[since < until]
        columns = np.concatenate([columns, gaps], axis=1)
        return Turns(self.names, *columns[:, np.argsort(columns[4], kind="stable")])

    def _find_blocked_loops(self) -> Int64s:
        """Return the rows of blocked event loops. Loops that an engine step blocked are left out."""
        trace, costs = self.trace, self.costs
        rows = np.flatnonzero(trace.are_of_sites([is_blocked_loop(site) for site in trace.sites]))
        steps = union_by_group(trace.thread_id[costs.rows], costs.start_ns, costs.end_ns)
        if not len(rows) or not len(costs.rows):
            return rows
        served_ns = steps.length_within(trace.thread_id[rows], trace.start_ns[rows], trace.end_ns[rows])
        return rows[2 * served_ns <= trace.total_ns[rows]]

    def _subtract_separate_causes(self) -> None:
        """Reduce the excess time of engine steps by garbage collections, first calls, and device work outside of
        steps."""
        trace, costs = self.trace, self.costs
        excess_ns = costs.excess_ns.copy()
        processes = self._find_process_numbers(trace.thread_id[costs.rows])
        collected = self._collected.length_within(processes, costs.start_ns, costs.end_ns)
        excess_ns = _subtract_from_largest_excess(excess_ns, collected.astype(np.float64))[0]
        self.first_ns = np.zeros(len(costs.rows))
        if self.knows_first_calls:
            is_moved = costs.is_first & (excess_ns > 0)
            self.first_ns = np.where(is_moved, excess_ns, 0).sum(axis=1)
            excess_ns = np.where(is_moved, 0.0, excess_ns)
        self.device_ns = np.zeros(len(costs.rows))
        timed = np.flatnonzero(trace.device.is_measured)
        if len(timed) and len(costs.rows):
            # The device worked for spans outside of steps while a step used it.
            step = costs.step_of[trace.device.row[timed]]
            outside, uses_device = timed[step == NONE], make_mask(step[step != NONE], len(costs.rows))
            foreign = make_union(trace.device.start_ns[outside], trace.device.end_ns[outside])
            foreign_ns = np.where(uses_device, foreign.length_within(costs.start_ns, costs.end_ns), 0)
            excess_ns, self.device_ns = _subtract_from_largest_excess(excess_ns, foreign_ns.astype(np.float64))
        self.excess_ns = excess_ns

    @property
    def knows_first_calls(self) -> bool:
        """True if the recording begins with the process and lost no row."""
        return self.facts.startup is not None and not self.facts.held_from_ns

    def find_engine_thread(self, place: int) -> int | None:
        pairs = self._turns[place].pair
        pairs = pairs[pairs != NONE]
        if not len(pairs):
            return None
        step = self.costs.step_of[self.joined.served.batch[pairs[0]]]
        return int(self.trace.thread_id[self.costs.rows[step]])

    def find_threads(self, places: Int64s) -> set[int]:
        engines = map(self.find_engine_thread, places.tolist())
        request_threads: list[int] = self.trace.thread_id[self.joined.rows[places]].tolist()
        return {*request_threads, *(thread for thread in engines if thread is not None)}

    def times_by_part(self, place: int) -> dict[str, int]:
        """Return the time of each part of a request. All batches together are one part."""
        turns, sums = self._turns[place], Counter[str]()
        for part, length in zip(turns.part.tolist(), turns.length_ns.tolist(), strict=True):
            sums[self.names[part]] += length
        return dict(sums)

    def find_overlapping_steps(self, place: int, part: str) -> tuple[Int64s, Floats]:
        turns, thread = self._turns[place], self.find_engine_thread(place)
        chosen = np.flatnonzero(turns.part == self.names.index(part)) if part in self.names else np.zeros(0, np.int64)
        if thread is None or not len(chosen):
            return np.zeros(0, dtype=np.int64), np.zeros(0)
        costs, starts = self.costs, turns.start_ns[chosen]
        ends = starts + turns.length_ns[chosen]
        steps = np.arange(np.searchsorted(self._reach, starts[0], "right"), np.searchsorted(costs.start_ns, ends[-1]))
        steps = steps[self.trace.thread_id[costs.rows[steps]] == thread]
        spent_ns = make_union(starts, ends).length_within(costs.start_ns[steps], costs.end_ns[steps])
        return steps[spent_ns > 0], spent_ns[spent_ns > 0].astype(np.float64)

    def find_serving_steps(self, place: int) -> tuple[Int64s, Floats]:
        turns = self._turns[place]
        chosen = np.flatnonzero(turns.pair != NONE)
        steps = self.costs.step_of[self.joined.served.batch[turns.pair[chosen]]]
        return steps, turns.length_ns[chosen].astype(np.float64)

    def times_by_cause(self, place: int) -> dict[Key, float]:
        """Return the time that each cause took in a request. The times add up to its wall time."""
        trace, turns, times = self.trace, self._turns[place], defaultdict[Key, float](float)
        root = int(self.joined.rows[place])
        ends = turns.start_ns + turns.length_ns
        waits_for_engine = np.isin(turns.part, [self.names.index(QUEUE), self.names.index(STALL)]) & (turns.row == NONE)
        threads = np.where(turns.row == NONE, trace.thread_id[root], trace.thread_id[turns.row])
        if (engine := self.find_engine_thread(place)) is not None:
            threads[waits_for_engine] = engine
        collected = self._collected.length_within(self._find_process_numbers(threads), turns.start_ns, ends)
        # A blocked event loop delays what waits on its thread.
        blocked = self._blocked.length_within(np.full(len(ends), trace.thread_id[root]), turns.start_ns, ends)
        waits = (turns.pair == NONE) & ((turns.row == NONE) | self._suspends[turns.row]) & ~waits_for_engine
        blocked = np.where(waits, np.minimum(blocked, turns.length_ns - collected), 0)
        times[COLLECTED, ""] = int(collected.sum())
        times[BLOCKED, ""] = int(blocked.sum())
        remaining = (turns.length_ns - collected - blocked).astype(np.float64)
        for number, name in enumerate(self.names):
            is_part = (turns.part == number) & (turns.pair == NONE)
            spent_ns = float(remaining[is_part].sum())
            if not spent_ns:
                continue
            if name in (QUEUE, STALL):
                spent_ns -= self._add_step_times(times, place, *self.find_overlapping_steps(place, name), name)
                key = (FILL, "") if name == QUEUE else (UNKNOWN_REST, "between batches")
                times[key] += max(spent_ns, 0.0)
            elif name in (TRANSPORT, EXECUTOR_QUEUE):
                times[TRANSPORTED if name == TRANSPORT else EXECUTOR, ""] += spent_ns
            elif name == UNKNOWN_REST:
                rows = self._own_rows[place]
                waited_ns = trace.total_ns[rows] - trace.active_ns[rows]
                ran_ns = np.maximum(trace.self_ns[rows] - waited_ns, 0).astype(np.float64)
                ran_ns *= min(1.0, spent_ns / max(float(ran_ns.sum()), 1.0))
                self._add_call_times(times, rows, ran_ns, is_sub=False)
            else:
                self._add_call_times(times, turns.row[is_part], remaining[is_part], is_sub=name == SUB_REQUESTS)
        self._add_step_times(times, place, *self.find_serving_steps(place), IN_BATCH)
        if self.facts.cost is not None:
            times[INSTRUMENT, ""] = float(self._rows_of_requests[place]) * self.facts.cost.per_call_ns
        times[UNKNOWN_REST, ""] += int(trace.total_ns[root]) - sum(times.values())
        return times

    def _add_step_times(self, times: dict[Key, float], place: int, steps: Int64s, spent_ns: Floats, part: str) -> float:
        """Add a request's time in engine steps, or in waits for engine steps, to `times` by cause. Return the sum in
        ns."""
        if not len(steps):
            return 0.0
        costs = self.costs
        shares = spent_ns / np.maximum(costs.end_ns[steps] - costs.start_ns[steps], 1)
        load_ns, heavy_ns = split_loads(costs, steps, place)
        if part == STALL:
            times[PREEMPTED, ""] += float(shares @ (load_ns + heavy_ns + costs.padding_ns[steps]))
        else:
            times[LOAD, IN_QUEUE if part == QUEUE else IN_BATCH] += float(shares @ load_ns)
            times[PREFILL, ""] += float(shares @ heavy_ns)
            times[PADDING, ""] += float(shares @ costs.padding_ns[steps])
        times[FIRST, ""] += float(shares @ self.first_ns[steps])
        times[DEVICE, ""] += float(shares @ self.device_ns[steps])
        for path, excess_ns in zip(self._paths, (shares @ self.excess_ns[steps]).tolist(), strict=True):
            times[path] += excess_ns
        return float(spent_ns.sum())

    def _add_call_times(self, times: dict[Key, float], rows: Int64s, spent_ns: Floats, *, is_sub: bool) -> None:
        trace = self.trace
        for row, ns in zip(rows.tolist(), spent_ns.tolist(), strict=True):
            site = trace.sites[trace.site[row]]
            cause = self._choose_cause(site, OWN)
            row = self._find_outermost_lock(row) if cause == LOCK else row
            if cause == OWN and not is_sub and self._is_first_call[row]:
                times[FIRST, ""] += ns
            else:
                times[cause, self._names_of_sites[trace.site[row]]] += ns

    def _find_outermost_lock(self, row: int) -> int:
        parents = self.trace.parent
        while parents[row] != NONE and self._is_lock[parents[row]]:
            row = int(parents[row])
        return row

    @staticmethod
    def _choose_cause(site: Site, usual: str) -> str:
        return COPY if site.kind == "copy" else LOCK if is_lock_wait(site) else usual

    def find_proofs(self, place: int, cause: str, path: str) -> list[Proof]:
        trace, turns, root, note = self.trace, self._turns[place], int(self.joined.rows[place]), ""
        own_rows = turns.row[(turns.row != NONE) & (turns.pair == NONE)]
        waits = np.unique(
            [self._find_outermost_lock(row) for row in own_rows[self._is_lock[own_rows]].tolist()]
        ).astype(int)
        parts = {TRANSPORTED: TRANSPORT, EXECUTOR: EXECUTOR_QUEUE, FILL: QUEUE}
        rows = np.zeros(0, dtype=np.int64)
        spent_ns: NDArray[Any] = rows
        if cause in (COLLECTED, BLOCKED):
            rows = self.collections if cause == COLLECTED else self.blocks
            begins, ends = np.clip((trace.start_ns[rows], trace.end_ns[rows]), trace.start_ns[root], trace.end_ns[root])
            spent_ns = ends - begins
        elif cause == LOCK and len(waits):
            rows, spent_ns = waits, trace.total_ns[waits]
            note = self._describe_lock_owner(place, int(rows[np.argmax(spent_ns)]))
        elif cause in STEP_CAUSES:
            rows, spent_ns = self._measure_cause_in_steps(place, cause, path)
        elif cause == PREEMPTED:
            steps, spent_ns = self.find_overlapping_steps(place, STALL)
            rows, note = self.costs.rows[steps], self.describe_engine_facts(place)
        elif cause in parts and parts[cause] in self.names:
            at = np.flatnonzero(turns.part == self.names.index(parts[cause]))
            rows, spent_ns = np.where(turns.row[at] == NONE, root, turns.row[at]), turns.length_ns[at]
        elif cause == OWN:
            rows = np.concatenate([own_rows, self._own_rows[place]])
            rows = rows[np.array([self._names_of_sites[site] == path for site in trace.site[rows].tolist()], np.bool_)]
            spent_ns = trace.total_ns[rows]
        order = np.argsort(-spent_ns, kind="stable")[:MOST_PROOFS]
        rows, spent_ns = rows[order], spent_ns[order]
        notes = [f"by {blocker}" if blocker else "" for blocker in trace.attributes.values(BLOCKED_BY, rows)]
        if cause == PREFILL:
            heaviest = self.costs.heavy[self.costs.step_of[rows]].tolist()
            names = [f"for {name_request(trace, self.joined, request)}" for request in heaviest]
            pairs = zip(names, map(self.describe_engine_facts, heaviest), strict=True)
            notes = [", ".join(filter(None, texts)) for texts in pairs]
        return [
            Proof(
                self._names_of_sites[trace.site[row]], int(trace.span_id[row]),
                int(trace.start_ns[row]) - self.facts.start_ns, round(ns), note if at == 0 and note else notes[at],
            )
            for at, (row, ns) in enumerate(zip(rows.tolist(), spent_ns.tolist(), strict=True))
            if ns > 0
        ]  # fmt: skip

    def describe_engine_facts(self, place: int) -> str:
        facts = self.trace.attributes[int(self.joined.rows[place])] if place != NONE else {}
        texts = []
        if isinstance(preemptions := facts.get(PREEMPTIONS), int):
            texts.append(f"the engine counted {preemptions} preemptions")
        if isinstance(cached := facts.get(CACHED_TOKENS), int):
            texts.append(f"{cached} of {facts.get(INPUT_TOKENS, 'its')} prompt tokens were cached")
        return ", ".join(texts)

    def _measure_cause_in_steps(self, place: int, cause: str, path: str) -> tuple[Int64s, NDArray[Any]]:
        costs = self.costs
        queued, queued_ns = self.find_overlapping_steps(place, QUEUE)
        served, served_ns = self.find_serving_steps(place)
        steps, spent_ns = np.concatenate([queued, served]), np.concatenate([queued_ns, served_ns])
        lengths_ns = costs.end_ns - costs.start_ns
        paths = [number for number, (_, name) in enumerate(self._paths) if path in (name, SPREAD)]
        of_steps = {
            BURST: lengths_ns, PADDING: costs.padding_ns, PREFILL: costs.heavy_ns, FIRST: self.first_ns,
            DEVICE: self.device_ns,
        }.get(cause, self.excess_ns[:, paths].sum(axis=1))  # fmt: skip
        return costs.rows[steps], spent_ns / np.maximum(lengths_ns[steps], 1) * of_steps[steps]

    def _describe_lock_owner(self, place: int, wait: int) -> str:
        trace, joined = self.trace, self.joined
        site = trace.sites[trace.site[wait]]
        is_named = trace.are_of_sites([another.name == site.name for another in trace.sites])
        rows = self.locks[is_named[self.locks]]
        process = self._find_process_numbers(trace.thread_id[[wait]])
        rows = rows[self._find_process_numbers(trace.thread_id[rows]) == process]
        rows = rows[np.argsort(trace.end_ns[rows], kind="stable")]
        begins, ends = trace.end_ns[rows], trace.end_ns[trace.parent[rows]]
        if site.qualname.endswith("Lock.acquire"):
            ends = np.minimum(ends, np.append(begins[1:], ends[-1:]))
        had_ns = np.minimum(ends, trace.end_ns[wait]) - np.maximum(begins, trace.start_ns[wait])
        had_ns[(trace.parent[rows] == NONE) | (joined.of[rows] == place)] = 0
        longest = int(np.argmax(had_ns))
        if had_ns[longest] <= 0:
            return ""
        row = int(rows[longest])
        holder = name_request(trace, joined, int(joined.of[row])) or self._names_of_sites[trace.site[trace.parent[row]]]
        span = int(trace.span_id[joined.rows[joined.of[row]]]) if joined.of[row] != NONE else int(trace.span_id[row])
        return f"{holder} (span {span}) had one of this name for {had_ns[longest] / 1e6:.4g} ms of it"


def _subtract_from_largest_excess(excess_ns: Floats, amounts_ns: Floats) -> tuple[Floats, Floats]:
    """Subtract an amount from the largest excess in each row, down to 0. Return the remaining excesses and the
    subtracted amounts. `excess_ns` has a row for each engine step."""
    if not len(excess_ns):
        return excess_ns, amounts_ns
    largest = np.argmax(excess_ns, axis=1)
    steps = np.arange(len(excess_ns))
    taken_ns = np.minimum(np.maximum(excess_ns[steps, largest], 0), amounts_ns)
    remaining_ns = excess_ns.copy()
    remaining_ns[steps, largest] -= taken_ns
    return remaining_ns, taken_ns


def find_member_weights(recording: Recording) -> Int64s:
    """Return the weight of each request in each batch. Without recorded weights, the size of the input is the weight in
    batches of one request."""
    trace, joined = recording.columns, recording.joined
    served = joined.served
    names = sorted(filter(INPUT.search, find_size_attributes(trace)))
    if not len(served.batch) or np.ptp(served.weight) or not names:
        return served.weight
    site, members = trace.site[served.batch], np.bincount(served.batch, minlength=len(trace))
    most_members = np.zeros(len(trace.sites), dtype=np.int64)
    np.maximum.at(most_members, site, members[served.batch])
    sizes = np.append(read_sizes(trace, names[0])[joined.rows], 0.0)[served.request]
    is_sized = (most_members[site] == 1) & (sizes > 0)
    return np.where(is_sized, (np.minimum(sizes, 1e9) * THOUSANDTHS).astype(np.int64), served.weight)


def read_host_gauges(facts: Trace, threads: Collection[int] | None = None) -> list[list[Sample]]:
    """Return the gauge readings of the host and of each process, on the clock of the trace. `threads` limits the result
    to processes with these threads."""
    of_processes = [
        [replace(sample, at_ns=sample.at_ns + process.moved_ns) for sample in process.facts.samples]
        for process in facts.processes
        if threads is None or not process.threads.keys().isdisjoint(threads)
    ]
    of_host = [sample for sample in facts.samples if sample.device == HOST]
    return [samples for samples in (of_host, *of_processes) if samples]


def measure_resource_wait(
    gauges: Sequence[Sequence[Sample]], cause: str, facts: Trace, begin_ns: int, end_ns: int
) -> float | None:
    """Return the time in ns for which threads waited longer than usual in an interval.

    A reading is the mean since the reading before. Its excess over the median reading may lie in any part of that time.
    Therefore, the interval gets all of an excess, up to its own length, but only its share of a negative one. The
    result is that of the host or the process, whichever waited longest. Return None without readings of the gauge.
    """
    waits_ns = []
    for samples in gauges:
        readings = [sample for sample in samples if sample.name == PRESSURES[cause] and sample.value is not None]
        if len(readings) < 2:
            continue
        at_ns = np.array([sample.at_ns for sample in readings])
        ratios = np.array([sample.value for sample in readings], dtype=np.float64) / 100
        firsts = np.append([facts.start_ns], at_ns[:-1])
        meets = (firsts < end_ns) & (at_ns > begin_ns)
        if meets.any():
            excess = ratios - np.median(ratios)
            shared_ns = np.minimum(at_ns, end_ns) - np.maximum(firsts, begin_ns)
            excess_ns = (excess * np.where(excess > 0, at_ns - firsts, shared_ns))[meets].sum()
            waits_ns.append(float(np.clip(excess_ns, 0, end_ns - begin_ns)))
    return max(waits_ns, default=None)
