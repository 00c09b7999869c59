"""Computes the expected time of each engine step from its load, and the excess over that time by call path.

A step is an outermost batch. Its expected time is linear in the number of its members and in their weight, fitted to
the steps of its name. The fit minimises relative errors, so long steps count no more than short ones. Steps far from
the fit are left out of it.

An engine may pad all members of a step to the heaviest weight. Padding is assumed if the times of uneven steps fit this
padded weight better than the real weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from instrument.recording.spans import is_interruption
from instrument.trace.columns import Bools, Columns, Int64s
from instrument.trace.forest import NONE, nearest, nearest_above
from instrument.trace.groups import distinct, places_of
from instrument.trace.joined import THOUSANDTHS, Served

Floats = NDArray[np.float64]

REFERENCES = 10_000
"""The maximum number of steps per name that are used for a fit. They are spread evenly over the recording."""

LEAST_STEPS = 20
"""The minimum number of steps for a fit. If a name has fewer steps, they have no expected time."""

ROUNDS = 3
"""The number of fits in succession. Each fit leaves out the steps that are far from the previous fit."""

FAR = 4.0
"""The distance above which a step is far from a fit, in multiples of the median distance."""

PATHS = 64
"""The maximum number of call paths with a separate excess. The other, shorter paths have one common excess."""

CELLS = 8_000_000
"""The maximum number of steps times call paths, to bound the memory. More steps leave fewer paths."""

UNEVEN = 1.2
"""The ratio of padded to real weight above which a step is uneven. Only uneven steps show whether an engine pads."""

PADS = 0.7
"""The ratio of the padded fit's error to the real fit's error, over uneven steps, below which an engine pads."""

HEAVY = 4.0
"""The ratio of a member's weight to the usual largest weight of requests, above which the member is heavy."""


@dataclass(frozen=True)
class StepCosts:
    """The steps of a trace by begin. The length of each in ns is divided into parts that add up to it.

    `load_ns` is the expected time without the unusually heavy member and without padding. `heavy_ns` is the time for
    that member, `padding_ns` the time to pad members to the heaviest one. `heavy` is the index of the unusually heavy
    member's request, `NONE` without one. `excess_ns` is the remaining time by step and path. `sites` has the site of
    each path, `NONE` for the path of all others. `is_first` is True for a step and path with the first call of its
    site. `is_fitted` is False for steps without an expected time, whose whole length is load.
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
    is_fitted: Bools
    step_of: Int64s
    """The index of each row's step, `NONE` outside of steps. The array ends with an additional `NONE`."""


def step_costs(trace: Columns, served: Served, requests: int) -> StepCosts:
    """Return the steps of a trace with the parts of their lengths."""
    is_batch = np.zeros(len(trace), dtype=np.bool_)
    is_batch[served.batch] = True
    rows = np.flatnonzero(is_batch & (nearest_above(trace.parent, is_batch) == NONE))
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    is_step = np.zeros(len(trace), dtype=np.bool_)
    is_step[rows] = True
    place = places_of(rows, len(trace))
    step_of = np.append(place[nearest(trace.parent, is_step)], NONE).astype(np.int64)
    spent_ns, first_cells, sites = _measure_paths(trace, rows, step_of)
    members, weight, largest, heaviest, heavy = _measure_loads(served, place, len(rows), requests)
    length_ns = (trace.end_ns - trace.start_ns)[rows].astype(np.float64)
    names = {name: number for number, name in enumerate(dict.fromkeys(site.name for site in trace.sites))}
    of_site = np.array([names[site.name] for site in trace.sites] or [0], dtype=np.int64)
    load_ns, heavy_ns, padding_ns = length_ns.copy(), np.zeros(len(rows)), np.zeros(len(rows))
    excess_ns = np.zeros(spent_ns.shape)
    is_fitted = np.zeros(len(rows), dtype=np.bool_)
    of_name = of_site[trace.site[rows]] if len(rows) else rows
    for name in distinct(of_name).tolist():
        steps = np.flatnonzero(of_name == name)
        loads = np.stack([np.ones(len(steps)), members[steps], weight[steps]])
        expected = _fit_expected(loads, spent_ns[steps], length_ns[steps])
        if expected is None:
            continue
        padded = np.maximum(members * largest, weight)[steps]
        of_padded = _fit_expected(np.stack([*loads[:2], padded]), spent_ns[steps], length_ns[steps])
        pads = of_padded is not None and _is_nearer(
            length_ns[steps], of_padded[0], expected[0], padded > UNEVEN * weight[steps]
        )
        per_path_ns, slope = of_padded if of_padded is not None and pads else expected
        summed = per_path_ns.sum(axis=1)
        heavy_ns[steps] = np.clip(slope * heaviest[steps], 0, summed)
        if pads:
            padding_ns[steps] = np.clip(slope * (padded - weight[steps]), 0, summed - heavy_ns[steps])
        load_ns[steps] = summed - heavy_ns[steps] - padding_ns[steps]
        excess_ns[steps] = spent_ns[steps] - per_path_ns
        is_fitted[steps] = True
    return StepCosts(
        rows, trace.start_ns[rows], trace.end_ns[rows], load_ns, heavy_ns, padding_ns, heavy, excess_ns,
        first_cells, sites, is_fitted, step_of,
    )  # fmt: skip


def _measure_paths(trace: Columns, rows: Int64s, step_of: Int64s) -> tuple[Floats, Bools, Int64s]:
    """Return the self time of each step by path, True for cells with the first call of their site, and the site of each
    path.

    Only rows on the step's thread count. The last path has the remaining time of the step.
    """
    inner = np.flatnonzero(step_of[:-1] != NONE)
    step_row = rows[step_of[inner]] if len(rows) else inner
    on_line = (trace.thread_id[inner] == trace.thread_id[step_row]) & (trace.task_id[inner] == trace.task_id[step_row])
    is_work = trace.of_sites([not is_interruption(site) for site in trace.sites])
    inner = inner[on_line & is_work[inner]]
    sums = np.bincount(trace.site[inner], trace.self_ns[inner], minlength=len(trace.sites))
    sites = np.argsort(-sums, kind="stable")[: min(PATHS, CELLS // max(len(rows), 1))]
    sites = sites[sums[sites] > 0]
    path_of = places_of(sites, len(trace.sites))[trace.site[inner]]
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
    """Return the members, the weight and the largest weight of each step, and its unusually heavy member.

    The last two results are that member's weight and the index of its request.
    """
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


def _fit_expected(all_loads: Floats, spent_ns: Floats, length_ns: Floats) -> tuple[Floats, float] | None:
    """Return the expected time of each step by path, and the time per unit of weight; None with too few steps."""
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


def _is_nearer(length_ns: Floats, first_ns: Floats, second_ns: Floats, is_uneven: Bools) -> bool:
    """Return True if the first expected times are clearly nearer to the lengths of uneven steps than the second
    ones."""
    if int(is_uneven.sum()) < LEAST_STEPS:
        return False
    lengths = length_ns[is_uneven]
    errors = [np.median(np.abs(by_path[is_uneven].sum(axis=1) / lengths - 1)) for by_path in (first_ns, second_ns)]
    return bool(errors[0] < PADS * errors[1])


def cells_of(costs: StepCosts, steps: Int64s, request: int) -> tuple[Floats, Floats]:
    """Return the load of some steps and the time of their heavy members, from one request's point of view.

    If the heavy member is the request itself, its time is load.
    """
    is_own = costs.heavy[steps] == request
    load_ns = costs.load_ns[steps] + np.where(is_own, costs.heavy_ns[steps], 0.0)
    return load_ns, np.where(is_own, 0.0, costs.heavy_ns[steps])
