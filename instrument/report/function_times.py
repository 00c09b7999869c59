"""The functions of a tally, with the sums of the calls inside them: the numbers behind the views of self times.

The function of a call path is its topmost request or, without a request, its topmost call. A function called inside
another function counts for both, and a recursive call counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.recording.spans import Site
from instrument.recording.tally import Records, Tally, Totals
from instrument.trace.columns import Bools, Int32s, Int64s
from instrument.trace.forest import NONE, nearest, nearest_above, topmost_rows
from instrument.trace.groups import by_first_sight, numbered

ORDERS = ("total", "calls", "ave")
"""The possible orders of a function's rows, the largest first: by self time, by calls, or by self time per call."""


def mask_topmost(tally: Tally, say: Callable[[Site], bool]) -> Bools:
    """Return an array over the tally's nodes: True for nodes that `say` accepts and that are below no such node."""
    marked = np.array([*tally.tree.by_site(say), False], dtype=np.bool_)[tally.site_of]
    return np.asarray(marked & (nearest_above(tally.parents, marked) == NONE))


def sum_topmost_by_name(tally: Tally, say: Callable[[Site], bool]) -> dict[str, Totals]:
    """Return, by name, the totals of the topmost nodes whose site `say` accepts."""
    numbers: dict[str, int] = {}
    of_site = [numbers.setdefault(site.name, len(numbers)) for site in tally.tree.sites]
    groups = np.where(mask_topmost(tally, say), np.array([*of_site, NONE], dtype=np.int32)[tally.site_of], NONE)
    sums = map(Totals._make, tally.by(groups, len(numbers)).tolist())
    return {name: totals for name, totals in zip(numbers, sums, strict=True) if totals.calls}


def sum_topmost(tally: Tally, say: Callable[[Site], bool]) -> Totals:
    """Return the total of the topmost nodes whose site `say` accepts."""
    groups = np.where(mask_topmost(tally, say), 0, NONE)
    totals = Totals._make(tally.by(groups, 1)[0].tolist())
    below_ns = sum(more_ns for node, more_ns in tally.device_below(None).items() if groups[node] == 0)
    return totals._replace(device_ns=totals.device_ns + below_ns)


class Group(NamedTuple):
    """A row of a function: the sums of `lines` tally lines. `first` is the number of the first line.

    Waiting time is a row of its own, in which `waiting` equals `lines`; in other rows it is 0. `number` is the index
    for `FunctionTable.lines`.
    """

    first: int
    lines: int
    time_ns: int
    calls: int
    on_device: int
    waiting: int
    number: int


class FunctionSums(NamedTuple):
    """The sums of one function. `node` is its topmost call node, `NONE` for the sum of all functions.

    `outer_ns` is the time of its `calls`, and `own_ns` the part of it outside of inner spans. `work_ns` is the self
    time of the work inside it, and `time_ns` the self time of all its lines. `first` and `rows` select its groups.
    """

    node: int
    lines: int
    calls: int
    outer_ns: int
    own_ns: int
    work_ns: int
    time_ns: int
    first: int
    rows: int


class FunctionTable:
    """The functions by number. Number 0 is the sum of all others, which are in the order of their first calls."""

    def __init__(self, functions: Int64s, groups: Int64s, of_group: Int64s, at: Int64s) -> None:
        self._functions, self._groups = functions, groups
        order = np.argsort(of_group, kind="stable")
        self._at, self._ends = at[order], np.cumsum(np.bincount(of_group, minlength=len(groups)))

    def __len__(self) -> int:
        return len(self._functions)

    def __getitem__(self, number: int) -> FunctionSums:
        return FunctionSums._make(self._functions[number].tolist())

    def column(self, field: str) -> list[int]:
        """Return one field of all functions."""
        values: list[int] = self._functions[:, FunctionSums._fields.index(field)].tolist()
        return values

    def groups(self, function: FunctionSums) -> Iterator[Group]:
        """Yield the rows of a function in their order."""
        for group in self._groups[function.first : function.first + function.rows]:
            yield Group._make(group.tolist())

    def lines(self, group: Group) -> Int64s:
        """Return the numbers of a row's tally lines."""
        begin = self._ends[group.number - 1] if group.number else 0
        return self._at[begin : self._ends[group.number]]

    def count_calls(self, function: FunctionSums) -> tuple[int, int]:
        """Return the calls and tally lines of a function. A line with running and waiting time counts twice."""
        groups = self._groups[function.first : function.first + function.rows]
        sums = Group._make(groups.sum(axis=0).tolist())
        return sums.calls, sums.lines


class SiteFacts(NamedTuple):
    """Arrays by the number of a site. `is_request` and `is_work` are True for requests and for work. `keys` numbers the
    keys of sites. `rows` is the number of the row that a site's tally lines share, `NONE` if each line has its own."""

    is_request: Bools
    is_work: Bools
    keys: Int64s
    rows: Int64s


def sum_functions(
    nodes: Int64s, lines: Records, parents: Int32s, site_of: Int32s, sites: SiteFacts, order: str
) -> FunctionTable:
    """Return the functions of merged tally lines. `nodes` has the node of each line."""
    function_of, root_of = _find_functions(parents, sites.is_request[site_of])
    its_site, its_function, its_root = site_of[nodes], function_of[nodes], root_of[nodes]
    key_of_node = sites.keys[site_of]
    keys = key_of_node[its_function]
    own_row = sites.rows[its_site]
    rows = np.where(own_row == NONE, np.arange(len(nodes)), own_row)
    is_called = np.zeros(len(parents), dtype=np.bool_)
    is_called[nodes] = True
    is_around = (its_root != nodes) & is_called[its_root]
    in_same = is_around & (key_of_node[function_of[its_root]] == keys)
    # Each line counts in its function, and once more in number 0, all functions together.
    numbers, firsts = by_first_sight(keys)
    number = np.concatenate([numbers + 1, np.zeros(len(nodes), dtype=np.int64)])
    is_own = np.concatenate([(its_function == nodes) & ~in_same, (its_function == nodes) & ~is_around])
    is_work = np.concatenate([sites.is_work[its_site]] * 2) & ~is_own
    lines, at = np.concatenate([lines, lines]), np.concatenate([np.arange(len(nodes))] * 2)
    counted = np.stack([lines[name] for name in ("calls", "total_ns", "self_ns", "self_ns", "self_ns")], axis=1)
    counted[~is_own, :3] = 0
    counted[~is_work, 3] = 0
    ones = np.ones((len(lines), 1), dtype=np.int64)
    count = len(firsts) + 1
    sums = _sum_by_group(np.concatenate([ones, counted], axis=1), number, count)
    groups, of_groups, of_line, at = _group_lines(lines, number, np.concatenate([rows, rows]), at)
    in_order = _order_rows(groups, of_groups, order)
    sizes = np.bincount(of_groups, minlength=count)
    edges = np.stack([np.cumsum(sizes) - sizes, sizes], axis=1)
    node = np.concatenate([[NONE], its_function[firsts]])[:, None]
    return FunctionTable(np.concatenate([node, sums, edges], axis=1), groups[in_order], of_line, at)


def _group_lines(lines: Records, number: Int64s, rows: Int64s, at: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Return the rows of each function, with running and waiting time apart, and the number of each row's function.

    Also return, for each line with time, the number of its row and its own number.
    """
    waited, self_ns = lines["waiting_ns"], lines["self_ns"]
    runs, waits = np.flatnonzero((waited == 0) | (self_ns > waited)), np.flatnonzero(waited != 0)
    own_ns = np.concatenate([self_ns[runs] - waited[runs], waited[waits]])
    is_waiting = np.arange(len(own_ns)) >= len(runs)
    line_numbers = np.concatenate([runs, waits])
    of_group, firsts = numbered(number[line_numbers], rows[line_numbers], is_waiting.astype(np.int64))
    on_device = (lines["device_ns"][line_numbers] > 0) & ~is_waiting
    ones = np.ones(len(line_numbers), dtype=np.int64)
    parts = np.stack([ones, own_ns, lines["calls"][line_numbers], on_device, is_waiting], axis=1)
    first, numbers = at[line_numbers][firsts][:, None], np.arange(len(firsts))[:, None]
    rows_of_groups = np.concatenate([first, _sum_by_group(parts, of_group, len(firsts)), numbers], axis=1)
    return rows_of_groups, number[line_numbers][firsts], of_group, at[line_numbers]


def _find_functions(parents: Int32s, is_request: Bools) -> tuple[Int32s, Int32s]:
    """Return the node of each node's function, and the topmost node above each node."""
    root_of = topmost_rows(parents)
    topmost = is_request & (nearest_above(parents, is_request) == NONE)
    request = nearest(parents, topmost)
    return np.where(request == NONE, root_of, request).astype(np.int32), root_of


def _sum_by_group(columns: Int64s, groups: Int64s, count: int) -> Int64s:
    """Return the sums of columns for each group."""
    sums = np.zeros((count, columns.shape[1]), dtype=columns.dtype)
    if len(groups):
        order = np.argsort(groups, kind="stable")
        firsts = np.flatnonzero(np.diff(groups[order], prepend=NONE))
        sums[groups[order][firsts]] = np.add.reduceat(columns[order], firsts)
    return sums


def _order_rows(groups: Int64s, function: Int64s, order: str) -> NDArray[Any]:
    """Return the order of rows: by function, then the largest first. Of equal rows the latest comes first."""
    first, lines, time_ns, calls, *_ = groups.T
    weight = {"calls": calls, "ave": time_ns / calls}.get(order, time_ns)
    return np.lexsort((-first, -lines, -calls, -time_ns, -weight, function))
