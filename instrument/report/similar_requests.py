"""Choose the requests with which `explain` compares a request: those of the same endpoint with similar work."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from instrument.report.request_groups import (
    choose_places_evenly,
    find_size_attributes,
    mask_requests_by_name,
    read_sizes,
)
from instrument.report.view import Recording
from instrument.trace.columns import Int64s
from instrument.trace.indices import NONE
from instrument.trace.joined import THOUSANDTHS

NEAREST = 100
"""The maximum number of requests with which a request, or a window, is compared."""

TRIALS = 5
"""The number of most similar requests. Of them, the request with the median wall time is chosen."""

POOL = 5_000
"""The maximum number of requests outside of a window that are searched for similar ones."""

ENOUGH = 10
"""The minimum number of similar requests. If fewer exist, all requests of the endpoint are compared."""

LIKE = 0.5
"""The maximum difference between the base-2 logarithms of similar amounts of work. It means a factor of 1.4."""

CHANCE = 0.01
"""The expected number of typical requests per recording that count as slow."""


def find_similar_requests(recording: Recording, place: int) -> tuple[Int64s, bool]:
    """Return the indices of requests of the same endpoint with similar work, and True. If few requests are similar,
    return any requests of the endpoint, and False."""
    trace, joined = recording.columns, recording.joined
    is_same = (
        mask_requests_by_name(recording, trace.sites[trace.site[joined.rows[place]]].name) & ~trace.clipped[joined.rows]
    )
    is_same[place] = False
    places = np.flatnonzero(is_same)
    work = recording.compute_once(_measure_work)
    if len(work):
        distances = np.abs(work[:, places] - work[:, [place]]).max(axis=0)
        near = np.argsort(distances, kind="stable")[:NEAREST]
        near = near[distances[near] <= LIKE]
        if len(near) >= ENOUGH:
            return np.sort(places[near]), True
    return choose_places_evenly(places, NEAREST), not len(work)


def choose_median_requests(recording: Recording, targets: Int64s, outside: Int64s) -> Int64s:
    """Return a typical request from `outside` for each target. It has the median wall time among the `TRIALS` requests
    with the most similar work."""
    trace, joined = recording.columns, recording.joined
    walls, work = trace.total_ns[joined.rows], recording.compute_once(_measure_work)
    medians = []
    for target in targets.tolist() if len(outside) else ():
        distances = np.abs(work[:, outside] - work[:, [target]]).max(axis=0, initial=0.0)
        near = outside[np.argsort(distances, kind="stable")[:TRIALS]]
        medians.append(int(near[np.argsort(walls[near], kind="stable")[len(near) // 2]]))
    return np.array(medians, dtype=np.int64)


def _measure_work(recording: Recording) -> NDArray[np.float64]:
    trace, joined = recording.columns, recording.joined
    served, count = joined.served, len(joined.rows)
    columns = [read_sizes(trace, name, joined.rows)[joined.rows] for name in sorted(find_size_attributes(trace))]
    pairs = np.flatnonzero(served.request != NONE)
    if len(pairs):
        columns.append(np.bincount(served.request[pairs], minlength=count).astype(np.float64))
        weights = served.weight[pairs] / THOUSANDTHS
        columns.append(np.bincount(served.request[pairs], weights, minlength=count).astype(np.float64))
    used = [column for column in columns if column.any()]
    return np.log2(1 + np.maximum(np.array(used), 0)) if used else np.zeros((0, count))


def estimate_slow_threshold_ns(walls: Int64s, requests: int) -> float:
    """Return the wall time in ns above which a request is slow. Long wall times are taken to have an exponential
    distribution. Then `CHANCE` typical requests per recording are above the threshold."""
    middle, high = np.quantile(walls, [0.5, 0.75]).tolist()
    return float(middle + (high - middle) / math.log(2) * math.log(max(requests, 1) / CHANCE / 2))
