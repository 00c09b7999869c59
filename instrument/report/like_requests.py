"""Find requests with work similar to a slow request's, and compute the usual spread of their times."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from instrument.errors import TraceError
from instrument.profile.document import nearest
from instrument.report.comparison import size_names, size_numbers
from instrument.report.request_groups import joined_requests
from instrument.report.view import Recording
from instrument.trace.columns import Int64s
from instrument.trace.forest import NONE
from instrument.trace.joined import THOUSANDTHS
from instrument.trace.step_costs import Floats

NEAREST = 100
"""The maximum number of requests to compare a request with, and of a window's requests to compare."""

TRIALS = 5
"""The number of similar requests outside of a window. The one with the median wall time is used."""

POOL = 5_000
"""The maximum number of requests outside of a window that are searched for similar ones."""

ENOUGH = 10
"""The minimum number of similar requests. If fewer exist, all requests of the endpoint are compared."""

LIKE = 0.5
"""The exponent of two that limits how much the work of similar requests differs: 0.5 is a factor of 1.4."""

CHANCE = 0.01
"""The expected number of typical requests per recording that are called slow by chance."""


def similar_requests(recording: Recording, place: int) -> tuple[Int64s, bool]:
    """Return the indices of requests with similar work and True. If too few, return any of the endpoint and False."""
    trace, joined = recording.columns, recording.once(joined_requests)
    of_site = trace.site[joined.rows]
    name = trace.sites[of_site[place]].name
    is_same = np.array([site.name == name for site in trace.sites])[of_site] & ~trace.clipped[joined.rows]
    is_same[place] = False
    places = np.flatnonzero(is_same)
    work = recording.once(_measure_work)
    if len(work):
        distances = np.abs(work[:, places] - work[:, [place]]).max(axis=0)
        near = np.argsort(distances, kind="stable")[:NEAREST]
        near = near[distances[near] <= LIKE]
        if len(near) >= ENOUGH:
            return np.sort(places[near]), True
    return choose_evenly(places, NEAREST), not len(work)


def mask_endpoint(recording: Recording, name: str) -> NDArray[np.bool_]:
    """Return True for each request of an endpoint. Raises `TraceError` for an unknown endpoint."""
    trace, joined = recording.columns, recording.once(joined_requests)
    of_site = trace.site[joined.rows]
    names = sorted({trace.sites[site].name for site in set(of_site.tolist())})
    if name not in names:
        near = nearest(name, names)
        hint = f"; nearest is {near!r}" if near else ""
        raise TraceError(f"there is no endpoint {name!r:.80} among {len(names)} endpoints{hint}")
    is_named: NDArray[np.bool_] = np.array([site.name == name for site in trace.sites])[of_site]
    return is_named


def choose_evenly(places: Int64s, most: int) -> Int64s:
    """Return up to `most` of the given indices, evenly spread."""
    chosen = np.unique(np.linspace(0, max(len(places) - 1, 0), min(len(places), most)).astype(np.int64))
    return places[chosen]


def median_requests(recording: Recording, targets: Int64s, outside: Int64s) -> Int64s:
    """Return, for each target, the one with the median time of the `TRIALS` requests `outside` most similar to it."""
    trace, joined = recording.columns, recording.once(joined_requests)
    walls, work = trace.total_ns[joined.rows], recording.once(_measure_work)
    medians = []
    for target in targets.tolist() if len(outside) else ():
        distances = np.abs(work[:, outside] - work[:, [target]]).max(axis=0, initial=0.0)
        near = outside[np.argsort(distances, kind="stable")[:TRIALS]]
        medians.append(int(near[np.argsort(walls[near], kind="stable")[len(near) // 2]]))
    return np.array(medians, dtype=np.int64)


def _measure_work(recording: Recording) -> Floats:
    """Return the base-2 logarithm of each measure of work: a row for each measure, a column for each request."""
    trace, joined = recording.columns, recording.once(joined_requests)
    served, count = joined.served, len(joined.rows)
    columns = [size_numbers(trace, name, joined.rows)[joined.rows] for name in sorted(size_names(trace))]
    pairs = np.flatnonzero(served.request != NONE)
    if len(pairs):
        columns.append(np.bincount(served.request[pairs], minlength=count).astype(np.float64))
        weights = served.weight[pairs] / THOUSANDTHS
        columns.append(np.bincount(served.request[pairs], weights, minlength=count).astype(np.float64))
    used = [column for column in columns if column.any()]
    return np.log2(1 + np.maximum(np.array(used), 0)) if used else np.zeros((0, count))


def slow_from_ns(walls: Int64s, requests: int) -> float:
    """Return the wall time above which a request is slow. By chance, `CHANCE` of all typical requests exceed it.

    The distribution of long wall times is assumed to be exponential, as in a queue.
    """
    middle, high = np.quantile(walls, [0.5, 0.75]).tolist()
    return float(middle + (high - middle) / math.log(2) * math.log(max(requests, 1) / CHANCE / 2))
