"""Group the requests of a recording by endpoint or by an attribute, and read attributes that are numbers. Choose the
requests with which `explain` compares a request: requests of the same endpoint with similar work."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.errors import InstrumentError, TraceError
from instrument.profile.document import find_most_similar
from instrument.recording.distributions import OTHER, group_name_of
from instrument.report.section import Section
from instrument.report.table import compute_share, limit_rows, make_row_summer, printable
from instrument.report.view import Options, Recording
from instrument.trace.columns import Attributes, Bools, Columns, Int64s
from instrument.trace.indices import NONE, Groups, find_distinct
from instrument.trace.joined import THOUSANDTHS
from instrument.trace.request_trees import INPUT_TOKENS, OUTPUT_TOKENS

ENDPOINT = "endpoint"
"""The value of `requests_by` that groups requests by endpoint."""

NEAREST = 100
"""The maximum number of requests in a comparison."""

TRIALS = 5
"""The number of most similar requests from which the median request is chosen."""

POOL = 5_000
"""The maximum number of requests outside of a window to search for similar requests."""

ENOUGH = 10
"""The minimum number of similar requests. If fewer exist, all requests of the endpoint are compared."""

LIKE = 0.5
"""The maximum difference between the base-2 logarithms of similar amounts of work, a factor of 1.4."""

CHANCE = 0.01
"""The expected number of typical requests per recording that count as slow."""


class RequestGroups(NamedTuple):
    """The groups of all requests. `group` has an index into `names` for each request."""

    names: tuple[str, ...]
    group: Int64s


def request_groups(recording: Recording, options: Options) -> RequestGroups:
    """Group all requests by the option `requests_by`. Requests without the attribute are in the last group."""
    trace, rows = recording.columns, recording.joined.rows
    if options.requests_by in ("", ENDPOINT):
        names, of_site = trace.describe_sites(attrgetter("name"))
        used, group = np.unique(of_site[trace.site[rows]], return_inverse=True)
        return RequestGroups(tuple(names[number] for number in used.tolist()), group.astype(np.int64))
    names_of_values, group = group_attribute_values(attribute_values(trace, rows, options.requests_by), options.at_most)
    has_none = bool((group == NONE).any())
    names = [*names_of_values, *[f"(no {options.requests_by})"] * has_none]
    return RequestGroups(tuple(names), np.where(group == NONE, len(names_of_values), group))


def attribute_values(trace: Columns, rows: Int64s, attribute: str) -> list[str | None]:
    """Return an attribute of each request. `attribute` may be the last part of a name: `tenant` also means the header
    `x-tenant`."""
    if not len(trace.attributes.rows_with_attribute(attribute)):
        ends = tuple(f"{mark}{attribute}" for mark in ".-_")
        attribute = next((name for name in _attribute_names(trace, rows) if name.endswith(ends)), attribute)
    return list(map(group_name_of, trace.attributes.values(attribute, rows)))


def _attribute_names(trace: Columns, rows: Int64s) -> Iterable[str]:
    return dict.fromkeys(name for row in rows[:ROWS_WITH_NAMES].tolist() for name in trace.attributes[row])


def refuse_unknown_group(recording: Recording, options: Options) -> None:
    trace, rows, attribute = recording.columns, recording.joined.rows, options.requests_by
    if attribute in ("", ENDPOINT) or not len(rows) or any(attribute_values(trace, rows, attribute)):
        return
    names = [printable(name) for name in _attribute_names(trace, rows) if not name.startswith("instrument.")]
    raise InstrumentError(
        f"report: asked for groups by {attribute!r}, found no request with that attribute; allowed: "
        f"{', '.join([ENDPOINT, *sorted(names)[:MOST_NAMES]])}"
    )


MOST_NAMES = 20
"""The maximum number of attributes that the error message for an unknown attribute lists."""

ROWS_WITH_NAMES = 1_000
"""The maximum number of requests from which attribute names are collected."""


def group_attribute_values(values: Sequence[str | None], at_most: int) -> tuple[list[str], Int64s]:
    """Return the names of groups, and the group of each value. The `at_most` most frequent values have their own
    groups. All other values share one group. The group of None is `NONE`."""
    counts = Counter(value for value in values if value is not None)
    largest = [value for value, _ in counts.most_common(at_most)]
    number = {value: place for place, value in enumerate(largest)}
    group = [NONE if value is None else number.get(value, len(largest)) for value in values]
    return [*largest, *[OTHER] * (len(counts) > len(largest))], np.array(group, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class GroupShare:
    """The requests of one group, and their shares of batch time and device time. Tokens are None if they were not
    recorded."""

    name: str
    requests: int
    batches_ns: int
    batches_ratio: float | None
    device_ns: int
    device_ratio: float | None
    input_tokens: int | None
    output_tokens: int | None
    remaining: int = 0


def group_shares(recording: Recording, options: Options) -> tuple[GroupShare, ...]:
    if not options.requests_by:
        return ()
    trace, joined = recording.columns, recording.joined
    groups, (whole, _) = request_groups(recording, options), recording.complete_requests
    places = joined.of[whole]
    count, of_places = len(groups.names), Groups(groups.group[places], len(groups.names))
    given_ns = recording.ledger.given_ns
    pairs = np.flatnonzero(joined.served.request != NONE)
    in_batches = Groups(joined.served.request[pairs], len(joined.rows)).sum_by_group(given_ns[pairs])
    on_device = np.zeros(len(joined.rows), dtype=np.int64)
    if len(trace.device):
        times = recording.device_ledger
        on_device = times.own_ns + times.shared_ns
    batches_ns, device_ns = of_places.sum_by_group(in_batches[places]), of_places.sum_by_group(on_device[places])
    columns = [of_places.count_members(), batches_ns, device_ns]
    for name in (INPUT_TOKENS, OUTPUT_TOKENS):
        tokens = read_integer_attribute(trace.attributes, name, whole, 1 << 62).clip(0)
        has_tokens = len(trace.attributes.rows_with_attribute(name)) > 0
        columns.append(of_places.sum_by_group(tokens) if has_tokens else np.full(count, None))
    rows = [
        GroupShare(name, size, of_batches, None, on_device, None, *tokens)
        for name, size, of_batches, on_device, *tokens in zip(
            groups.names, *(column.tolist() for column in columns), strict=True
        )
        if size
    ]
    rows.sort(key=lambda row: (-row.batches_ns, -row.device_ns, -row.requests, row.name))
    shown = limit_rows(rows, options, attrgetter("batches_ns"), make_row_summer("requests", "batches_ns", "device_ns"))
    all_batches, all_devices = sum(batches_ns.tolist()), sum(device_ns.tolist())
    return tuple(
        replace(
            row,
            batches_ratio=compute_share(row.batches_ns, all_batches),
            device_ratio=compute_share(row.device_ns, all_devices),
        )
        for row in shown
    )


def make_shares_table(shares: Sequence[GroupShare], options: Options) -> Section:
    columns = ["name=Value", "requests=Requests"]
    for name, heading in (("batches", "Batches"), ("device", "Device")):
        if any(getattr(row, f"{name}_ns") for row in shares):
            columns += [f"{name}_ns={heading}", f"{name}_ratio=Of all"]
    for name, heading in (("input_tokens", "Tokens in"), ("output_tokens", "Tokens out")):
        if any(getattr(row, name) for row in shares):
            columns.append(f"{name}={heading}")
    notes = ("The shares of batches and of device time that the requests got, by their weights.",)
    return Section(f"Shares by {options.requests_by}", shares, "|".join(columns), notes)


SIZE = re.compile(r"(?:^|[._])(?:size|tokens|bytes|length|count|items|rows|samples|batch_size)$")
"""The pattern of attribute names whose values measure an amount of work."""

SEARCHED_ROWS = 2_000
"""The maximum number of rows to search for attributes that measure work."""


def mask_requests_by_name(recording: Recording, name: str) -> Bools:
    trace = recording.columns
    return trace.are_of_sites([site.name == name for site in trace.sites])[recording.joined.rows]


def mask_known_endpoint(recording: Recording, name: str) -> Bools:
    is_named = mask_requests_by_name(recording, name)
    if not is_named.any():
        trace, rows = recording.columns, recording.joined.rows
        names = sorted({trace.sites[site].name for site in find_distinct(trace.site[rows]).tolist()})
        near = find_most_similar(name, names)
        hint = f"; nearest is {near!r}" if near else ""
        raise TraceError(f"there is no endpoint {name!r:.80} among {len(names)} endpoints{hint}")
    return is_named


def choose_places_evenly(places: Int64s, most: int) -> Int64s:
    chosen = np.unique(np.linspace(0, max(len(places) - 1, 0), min(len(places), most)).astype(np.int64))
    return places[chosen]


def find_size_attributes(trace: Columns) -> set[str]:
    rows = trace.attributes.rows()
    names = set(chain.from_iterable(trace.attributes.distinct_sets(choose_places_evenly(rows, SEARCHED_ROWS))[1]))
    return {name for name in names if SIZE.search(name)}


def read_integer_attribute(attributes: Attributes, name: str, rows: Int64s, limit: int = 1 << 63) -> Int64s:
    """Return an attribute of each row. Return `NONE` for values that are not integers in `range(limit)`."""
    numbers = np.full(len(rows), NONE, dtype=np.int64)
    places = np.flatnonzero(np.isin(rows, attributes.rows_with_attribute(name)))
    for place, value in zip(places.tolist(), attributes.values(name, rows[places]), strict=True):
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit:
            numbers[place] = value
    return numbers


def read_sizes(trace: Columns, name: str, among: Int64s | None = None) -> NDArray[np.float64]:
    rows = trace.attributes.rows_with_attribute(name)
    rows = rows if among is None else rows[np.isin(rows, among)]
    numbers = np.zeros(len(trace))
    numbers[rows] = [
        value if isinstance(value, (int, float)) and not isinstance(value, bool) and value < 1e18 else 0
        for value in trace.attributes.values(name, rows)
    ]
    return np.nan_to_num(numbers)


def find_similar_requests(recording: Recording, place: int) -> tuple[Int64s, bool]:
    """Return the indices of requests of the same endpoint, and a flag. The flag is False if the work of the requests is
    not similar."""
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
    """Return one request from `outside` for each target: the median, by wall time, of the `TRIALS` most similar
    requests."""
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
    """Return the wall time in ns above which a request is slow. The threshold assumes that long wall times have an
    exponential distribution. About `CHANCE` typical requests per recording exceed the threshold."""
    middle, high = np.quantile(walls, [0.5, 0.75]).tolist()
    return float(middle + (high - middle) / math.log(2) * math.log(max(requests, 1) / CHANCE / 2))
