"""Finds what made a request or an engine step slower than usual.

A request's time is divided into parts (see `ledger`). Each part is compared with its median over the endpoint's
requests, and the part with the largest excess is blamed. The cause is the span that took
most of that time, or a garbage collection that took at least half of the excess.

A step is an outermost batch. Its expected time is a linear function of its members and their weight, fitted to all
steps of the same name. The excess over the expected time is divided by call path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from instrument.recording.distributions import percentiles_of_times
from instrument.recording.spans import BLOCKED_BY, is_blocked_loop, is_collection, is_interruption
from instrument.trace.columns import Bools, Columns, Int64s
from instrument.trace.indices import (
    NONE,
    Groups,
    find_ancestor,
    find_distinct,
    find_last_number,
    find_nearest_row,
    find_rows,
    index_rows,
    make_mask,
    number_combinations,
)
from instrument.trace.intervals import Union, make_union, measure_intersection
from instrument.trace.joined import THOUSANDTHS, Joined, Served
from instrument.trace.ledger import QUEUE, SHARE, STALL, TRANSPORT, WAITING, Ledger, Moment, list_turns

BETWEEN = (QUEUE, STALL)
"""The parts in which a request waits for the threads of its batches."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause of a delay. `name` is the name of a span, and `request` the key or endpoint of its request. `request`
    is empty if the span belongs to the slow request or to no request."""

    name: str
    request: str
    ran_ns: int


@dataclass(frozen=True, slots=True)
class Blame:
    """The part of a slow request with the largest excess over the part's typical time. `cause` is None if it is
    unknown."""

    part: str
    part_ns: int
    typical_ns: int
    cause: Cause | None

    @property
    def excess_ns(self) -> int:
        return self.part_ns - self.typical_ns


def typical_times(ledger: Ledger, places: Int64s) -> dict[str, int]:
    """Return the median time of each part over the given requests. A request without the part counts as 0 ns."""
    is_chosen = make_mask(places, int(max(ledger.request.max(initial=-1), places.max(initial=-1))) + 1)
    rows = np.flatnonzero(is_chosen[ledger.request])
    typical = {}
    for members in Groups(ledger.part[rows], len(ledger.names)).list_rows():
        times = np.zeros(len(places), dtype=np.int64)
        times[len(places) - len(members) :] = np.sort(ledger.time_ns[rows[members]])
        name = ledger.names[ledger.part[rows[members[0]]]]
        typical[name] = percentiles_of_times(times.tolist(), (0.5,))[0]
    return typical


def find_blame(trace: Columns, joined: Joined, ledger: Ledger, place: int, typical: Mapping[str, int]) -> Blame | None:
    """Return the part that made a request slow, and the cause. Returns None if no part took longer than typical."""
    times = ledger.times_of_request(place)
    part = max(times, key=lambda name: (times[name] - typical.get(name, 0), name), default=None)
    if part is None or times[part] <= typical.get(part, 0):
        return None
    moments = list_turns(trace, joined, place)
    parts = (SHARE, WAITING) if part in (SHARE, WAITING) else (part,)
    turns = [(index, moment) for index, moment in enumerate(moments) if moment.part in parts]
    blamed = make_union(*(np.array([moment[edge] for _, moment in turns], dtype=np.int64) for edge in (1, 2)))
    blame = Blame(part, times[part], typical.get(part, 0), None)
    is_collected = trace.are_of_sites([is_collection(site) for site in trace.sites])
    cause = _find_longest_cause(trace, joined, place, blamed, is_collected) if turns else None
    if cause is None or 2 * cause.ran_ns < blame.excess_ns:
        if len(parts) > 1:
            cause = _find_batch_cause(trace, joined, ledger, place, part, [moment for _, moment in turns])
        else:
            cause = _find_cause(trace, joined, place, part, turns, blamed, moments)
    return replace(blame, cause=cause)


def _find_cause(
    trace: Columns, joined: Joined, place: int, part: str, turns: Sequence[tuple[int, Moment]], times: Union,
    moments: Sequence[Moment],
) -> Cause | None:  # fmt: skip
    # Requests and coroutines are no candidates: they may only wait for the span below that takes the time.
    works = trace.are_of_sites([site.kind != "request" and not site.suspends for site in trace.sites])
    on_threads = np.isin(trace.thread_id, list(_find_awaited_threads(trace, joined, place, part, turns, moments)))
    other_cause = _find_longest_cause(trace, joined, place, times, works & on_threads & (joined.of != place))
    rows = np.array(sorted({moment.row for _, moment in turns if moment.row != NONE}), dtype=np.int64)
    if not len(rows):
        return other_cause
    # The request's spans below the given rows.
    family = np.flatnonzero(joined.of == place)
    is_given = np.isin(family, rows)
    is_below = find_nearest_row(find_rows(family, trace.parent[family].astype(np.int64)), is_given) != NONE
    own_cause = _find_longest_cause(trace, joined, place, times, make_mask(family[is_below & ~is_given], len(trace)))
    if own_cause is None or (other_cause is not None and other_cause.ran_ns >= own_cause.ran_ns):
        return other_cause
    return own_cause


def _find_awaited_threads(
    trace: Columns, joined: Joined, place: int, part: str, work: Iterable[tuple[int, Moment]], moments: Sequence[Moment]
) -> set[int]:
    served = joined.served.batch[joined.served.request == place]
    if part in BETWEEN and len(served):
        return set(trace.thread_id[served].tolist())
    rows = [moment.row for _, moment in work]
    if part == TRANSPORT:  # the next span receives the request
        rows = [next((moment.row for moment in moments[index + 1 :] if moment.row != NONE), NONE) for index, _ in work]
    root = int(joined.rows[place])
    return {int(trace.thread_id[root if row == NONE else row]) for row in rows or [root]}


def _find_longest_cause(trace: Columns, joined: Joined, place: int, times: Union, is_wanted: Bools) -> Cause | None:
    low, high = int(times.starts[0]), int(times.ends[-1])
    rows = np.flatnonzero(is_wanted & (trace.start_ns < high) & (trace.end_ns > low))
    is_candidate = make_mask(rows, len(trace) + 1)  # the last place is that of a missing parent
    rows = rows[~is_candidate[trace.parent[rows]]]
    if not len(rows):
        return None
    rows = rows[times.length_within(trace.start_ns[rows], trace.end_ns[rows]) > 0]
    groups: dict[tuple[str, str], list[int]] = {}
    # A blocked loop has the name and the row of the span that blocked it.
    labels = [(trace.sites[site].name, row) for site, row in zip(trace.site[rows].tolist(), rows.tolist(), strict=True)]
    places = np.flatnonzero(trace.are_of_sites([is_blocked_loop(site) for site in trace.sites])[rows])
    names, blocking = trace.attributes.values(BLOCKED_BY, rows[places]), find_blocking_rows(trace, rows[places])
    for index, blocking_name, row in zip(places.tolist(), names, blocking.tolist(), strict=True):
        if blocking_name:
            labels[index] = str(blocking_name), row
    for row, (name, shown) in zip(rows.tolist(), labels, strict=True):
        served = int(joined.of[shown])
        first, last = np.searchsorted(joined.served.batch, [shown, shown + 1])
        if served == NONE and first < last:  # a batch counts for the request with the largest weight
            served = int(joined.served.request[first + int(np.argmax(joined.served.weight[first:last]))])
        groups.setdefault((name, name_request(trace, joined, NONE if served == place else served)), []).append(row)
    if not groups:
        return None
    sums = {
        key: measure_intersection(
            times, make_union(trace.start_ns[named_rows], trace.end_ns[named_rows])
        )  # overlaps count once
        for key, named_rows in groups.items()
    }
    (name, request), ran_ns = max(sums.items(), key=lambda item: (item[1], item[0]))
    return Cause(name, request, ran_ns)


def find_blocking_rows(trace: Columns, blocked_rows: Int64s) -> Int64s:
    """Return the row of the span that blocked each event loop. If the span is unknown, the result has the row from
    `blocked_rows`."""
    names = [str(name or "") for name in trace.attributes.values(BLOCKED_BY, blocked_rows)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(filter(None, names)))}
    of_site = np.array([numbers.get(site.name, NONE) for site in trace.sites] or [NONE], dtype=np.int64)
    candidates = np.flatnonzero(of_site[trace.site] != NONE)
    candidates = candidates[np.isin(trace.thread_id[candidates], trace.thread_id[blocked_rows])]
    number_of_row = np.array([numbers.get(name, NONE) for name in names], dtype=np.int64)
    threads = np.concatenate([trace.thread_id[candidates], trace.thread_id[blocked_rows]])
    groups, _ = number_combinations(
        threads - threads.min(initial=0), np.concatenate([of_site[trace.site[candidates]], number_of_row]) + 1
    )
    order = np.lexsort((trace.start_ns[candidates], groups[: len(candidates)]))
    candidates = candidates[order]
    middles = trace.start_ns[blocked_rows] + trace.total_ns[blocked_rows] // 2
    last = find_last_number(
        groups[: len(candidates)][order], trace.start_ns[candidates], groups[len(candidates) :], middles
    )
    blocking = np.append(candidates, NONE)[last]
    return np.where(
        (last != NONE) & (number_of_row != NONE) & (trace.end_ns[blocking] > middles), blocking, blocked_rows
    )


def _find_batch_cause(
    trace: Columns, joined: Joined, ledger: Ledger, place: int, part: str, moments: Sequence[Moment]
) -> Cause | None:
    if not moments:
        return None
    served, spent, by_name = joined.served, Counter[int](), Counter[tuple[str, str]]()
    for moment in moments:
        spent[moment.pair] += moment.end_ns - moment.start_ns
    for pair, spent_ns in spent.items():
        own_ns, row = min(spent_ns, int(ledger.given_ns[pair])), int(served.batch[pair])
        name, request = trace.sites[trace.site[row]].name, ""
        if part == WAITING:
            first, last = np.searchsorted(served.batch, [row, row + 1])
            other_pairs = [at for at in range(int(first), int(last)) if served.request[at] != place]
            main = max(other_pairs, key=lambda at: int(ledger.given_ns[at]), default=None)
            request = "" if main is None else name_request(trace, joined, int(served.request[main])) or served.key[main]
        by_name[name, request] += own_ns if part == SHARE else spent_ns - own_ns
    (name, request), ran_ns = max(by_name.items(), key=lambda item: (item[1], item[0]))
    return Cause(name, request, ran_ns)


def name_request(trace: Columns, joined: Joined, place: int) -> str:
    if place == NONE:
        return ""
    keys = joined.keys.get(place)
    return keys[0] if keys else trace.sites[trace.site[joined.rows[place]]].name


Floats = NDArray[np.float64]

REFERENCES = 10_000
"""The maximum number of steps per name that a fit uses."""

LEAST_STEPS = 20
"""The minimum number of steps for a fit."""

ROUNDS = 3
"""The number of successive fits. Each fit leaves out the steps far from the previous one."""

FAR = 4.0
"""The deviation from a fit above which the next fit leaves a step out, as a multiple of the median deviation."""

PATHS = 64
"""The maximum number of sites with an excess time of their own. Further sites share one."""

CELLS = 8_000_000
"""The maximum number of cells in the table of steps and sites, to bound the memory."""

UNEVEN = 1.2
"""The ratio of padded to real weight above which a step is uneven."""

PADS = 0.7
"""An engine is assumed to pad its batches if padding reduces the error of the fit to less than this ratio."""

HEAVY = 4.0
"""The multiple of the median weight above which a member of a step is heavy."""


@dataclass(frozen=True)
class StepCosts:
    """The steps of a trace by start time. Each step's length in ns is divided into parts that add up to the length.

    - `load_ns` is the expected time without a heavy member and without padding.
    - `heavy_ns` is the time for the request `heavy`, a member of over `HEAVY` times the usual weight.
    - `padding_ns` is the time to pad members to the heaviest one.
    - `excess_ns` is the remaining time by step and site. The last column combines all sites that are not in `sites`.

    `is_first` is True for a step and site if the step contains the first call of the site.
    """

    rows: Int64s
    start_ns: Int64s
    end_ns: Int64s
    load_ns: Floats
    heavy_ns: Floats
    padding_ns: Floats
    heavy: Int64s
    excess_ns: Floats
    is_first: Bools
    sites: Int64s
    step_of: Int64s
    """The step of each row, or `NONE`. An additional `NONE` is at the end."""


def compute_step_costs(trace: Columns, served: Served, requests: int) -> StepCosts:
    is_batch = make_mask(served.batch, len(trace))
    rows = np.flatnonzero(is_batch & (find_ancestor(trace.parent, is_batch) == NONE))
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    is_step = make_mask(rows, len(trace))
    place = index_rows(rows, len(trace))
    step_of = np.append(place[find_nearest_row(trace.parent, is_step)], NONE).astype(np.int64)
    spent_ns, first_cells, sites = _measure_site_times(trace, rows, step_of)
    members, weight, largest, heaviest, heavy = _measure_loads(served, place, len(rows), requests)
    length_ns = (trace.end_ns - trace.start_ns)[rows].astype(np.float64)
    names = {name: number for number, name in enumerate(dict.fromkeys(site.name for site in trace.sites))}
    of_site = np.array([names[site.name] for site in trace.sites] or [0], dtype=np.int64)
    load_ns, heavy_ns, padding_ns = length_ns.copy(), np.zeros(len(rows)), np.zeros(len(rows))
    excess_ns = np.zeros(spent_ns.shape)
    of_name = of_site[trace.site[rows]]
    for name in find_distinct(of_name).tolist():
        steps = np.flatnonzero(of_name == name)
        loads = np.stack([np.ones(len(steps)), members[steps], weight[steps]])
        expected = _fit_expected_times(loads, spent_ns[steps], length_ns[steps])
        if expected is None:
            continue
        padded = np.maximum(members * largest, weight)[steps]
        of_padded = _fit_expected_times(np.stack([*loads[:2], padded]), spent_ns[steps], length_ns[steps])
        is_uneven = padded > UNEVEN * weight[steps]
        pads = of_padded is not None and int(is_uneven.sum()) >= LEAST_STEPS
        if of_padded is not None and pads:
            errors = [
                np.median(np.abs(by_path[is_uneven].sum(axis=1) / length_ns[steps][is_uneven] - 1))
                for by_path, _ in (of_padded, expected)
            ]
            pads = bool(errors[0] < PADS * errors[1])
        per_path_ns, slope = of_padded if of_padded is not None and pads else expected
        summed = per_path_ns.sum(axis=1)
        heavy_ns[steps] = np.clip(slope * heaviest[steps], 0, summed)
        if pads:
            padding_ns[steps] = np.clip(slope * (padded - weight[steps]), 0, summed - heavy_ns[steps])
        load_ns[steps] = summed - heavy_ns[steps] - padding_ns[steps]
        excess_ns[steps] = spent_ns[steps] - per_path_ns
    return StepCosts(
        rows, trace.start_ns[rows], trace.end_ns[rows], load_ns, heavy_ns, padding_ns, heavy, excess_ns,
        first_cells, sites, step_of,
    )  # fmt: skip


def _measure_site_times(trace: Columns, rows: Int64s, step_of: Int64s) -> tuple[Floats, Bools, Int64s]:
    inner = np.flatnonzero(step_of[:-1] != NONE)
    step_row = rows[step_of[inner]]
    on_line = (trace.thread_id[inner] == trace.thread_id[step_row]) & (trace.task_id[inner] == trace.task_id[step_row])
    is_work = trace.are_of_sites([not is_interruption(site) for site in trace.sites])
    inner = inner[on_line & is_work[inner]]
    sums = np.bincount(trace.site[inner], trace.self_ns[inner], minlength=len(trace.sites))
    sites = np.argsort(-sums, kind="stable")[: min(PATHS, CELLS // max(len(rows), 1))]
    sites = sites[sums[sites] > 0]
    path_of = index_rows(sites, len(trace.sites))[trace.site[inner]]
    path_of = np.where(path_of == NONE, len(sites), path_of)
    shape = len(rows), len(sites) + 1
    cells = step_of[inner] * shape[1] + path_of
    spent_ns: Floats = np.bincount(cells, trace.self_ns[inner], minlength=shape[0] * shape[1]).astype(np.float64)
    spent_ns = spent_ns.reshape(shape)
    remaining_ns = (trace.end_ns - trace.start_ns)[rows] - spent_ns.sum(axis=1)
    spent_ns[:, -1] += remaining_ns
    is_first: Bools = np.zeros(shape[0] * shape[1], dtype=np.bool_)
    order = np.argsort(trace.start_ns[inner], kind="stable")
    _, firsts = np.unique(trace.site[inner][order], return_index=True)
    is_first[cells[order[firsts]]] = True
    return spent_ns, is_first.reshape(shape), np.append(sites, NONE).astype(np.int64)


def _measure_loads(
    served: Served, place: Int64s, count: int, requests: int
) -> tuple[Floats, Floats, Floats, Floats, Int64s]:
    pairs = np.flatnonzero(place[served.batch] != NONE)
    steps, request, weights = place[served.batch[pairs]], served.request[pairs], served.weight[pairs] / THOUSANDTHS
    members = np.bincount(steps, minlength=count).astype(np.float64)
    weight = np.bincount(steps, weights, minlength=count).astype(np.float64)
    heaviest_of_request = np.zeros(requests)
    with_request = request != NONE
    np.maximum.at(heaviest_of_request, request[with_request], weights[with_request])
    positive = heaviest_of_request[heaviest_of_request > 0]
    usual = float(np.median(positive)) if len(positive) else 0.0
    order = np.lexsort((weights, steps))
    last = order[np.flatnonzero(np.append(steps[order][1:] != steps[order][:-1], [True]))] if len(order) else order
    largest, heaviest, heavy = np.zeros(count), np.zeros(count), np.full(count, NONE, dtype=np.int64)
    largest[steps[last]] = weights[last]
    unusual = last[weights[last] > HEAVY * max(usual, 1.0)]
    heaviest[steps[unusual]], heavy[steps[unusual]] = weights[unusual], request[unusual]
    return members, weight, largest, heaviest, heavy


def _fit_expected_times(all_loads: Floats, spent_ns: Floats, length_ns: Floats) -> tuple[Floats, float] | None:
    count = len(length_ns)
    if count < LEAST_STEPS or not length_ns.all():
        return None
    some = np.unique(np.linspace(0, count - 1, min(count, REFERENCES)).astype(np.int64))
    loads, lengths = all_loads[:, some], length_ns[some]
    scale = np.maximum(loads.mean(axis=1), 1e-9)
    loads = loads / scale[:, None]
    used = np.arange(len(some))
    coefficients = np.zeros(3)
    for _ in range(ROUNDS):
        coefficients = np.linalg.lstsq((loads[:, used] / lengths[used]).T, np.ones(len(used)), rcond=1e-6)[0]
        ratios = lengths / np.maximum(coefficients @ loads, 1.0)
        middle = float(np.median(ratios[used]))
        spread = float(np.median(np.abs(ratios[used] - middle)))
        used = np.flatnonzero(np.abs(ratios - middle) <= max(FAR * spread, 0.01 * middle))
        if len(used) < LEAST_STEPS:
            return None
    predicted = np.maximum(coefficients @ loads[:, used], 1.0)
    by_path = np.linalg.lstsq((loads[:, used] / predicted).T, spent_ns[some][used] / predicted[:, None], rcond=1e-6)[0]
    expected = np.maximum((all_loads / scale[:, None]).T @ by_path, 0.0)
    return expected, max(float(by_path[2].sum()) / float(scale[2]), 0.0)


def split_loads(costs: StepCosts, steps: Int64s, request: int) -> tuple[Floats, Floats]:
    is_own = costs.heavy[steps] == request
    load_ns = costs.load_ns[steps] + np.where(is_own, costs.heavy_ns[steps], 0.0)
    return load_ns, np.where(is_own, 0.0, costs.heavy_ns[steps])
