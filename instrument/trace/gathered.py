"""The unsettled rows of all processes of a run as one trace, with ids that are unique among them.

All are of one machine, and so on one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.recording.mapped_facts import OpenSpan
from instrument.recording.remote_parents import RemoteParent
from instrument.recording.rows import REQUEST_BIT
from instrument.recording.spans import AttributeValue, Site
from instrument.trace.columns import AttributesOfRows, Bools, Columns, DeviceIntervals, Int32s, Int64s
from instrument.trace.forest import NONE, rows_of
from instrument.trace.groups import numbered
from instrument.trace.of_recording import numbers_in
from instrument.trace.unsettled import NO_DETAIL, UnsettledRows, detail_of_open

OPEN_NS = 1 << 61
"""The end of a span that is open, on the monotonic clock."""

OPEN = 255
"""The state of an open span, in addition to those of rows."""


class Gathered:
    """Rows of several recordings as one trace. Column `member` is the place of each row's recording.

    `place` is the row's place among those of its recording, `NONE` for a span that is open. `own` is its id there,
    `own_root` the id of its root.
    """

    def __init__(self, members: Sequence[UnsettledRows], horizon_ns: int) -> None:
        self.members = members
        self._sites: dict[Site, int] = {}
        self._errors: dict[str, int] = {}
        self._attributes: dict[int, Mapping[str, AttributeValue]] = {}
        self._remote: dict[int, RemoteParent] = {}
        self._active: list[tuple[int, int]] = []
        self._error_rows: list[tuple[int, int]] = []
        parts = [self._part(member, horizon_ns) for member in members]
        starts = np.cumsum([0, *(len(part["own"]) for part in parts)])
        for member, part, first in zip(members, parts, starts.tolist(), strict=False):
            self._add_details(member, part, first)
        count = int(starts[-1])
        self.member: Int32s = np.repeat(np.arange(len(members), dtype=np.int32), np.diff(starts))
        columns: dict[str, NDArray[Any]] = {
            name: np.concatenate([_NOTHING[name], *(part[name] for part in parts)]) for name in _NOTHING
        }
        self.own: Int64s = columns["own"]
        self.own_root: Int64s = columns["root"]
        self.own_parent: Int64s = columns["parent"]
        self.own_thread: Int64s = columns["thread"]
        self.place: Int64s = columns["place"]
        self.state: NDArray[np.uint8] = columns["state"]
        is_open = self.state == OPEN
        parent_id, root_id = self._ids_above(parts, starts)
        lengths = columns["end_ns"] - columns["start_ns"]
        active_ns = np.where(columns["active_ns"] < 0, lengths, np.minimum(columns["active_ns"], lengths))
        for row, own_ns in self._active:
            active_ns[row] = min(own_ns, int(active_ns[row]))
        error = np.full(count, NONE, np.int32)
        for row, number in self._error_rows:
            error[row] = number
        thread, _ = numbered(self.member.astype(np.int64), self.own_thread)
        self.trace = Columns(
            sites=tuple(self._sites),
            errors=tuple(self._errors),
            span_id=np.arange(1, count + 1),
            parent_id=parent_id,
            root_id=root_id,
            thread_id=thread.astype(np.int64) + 1,
            task_id=columns["task"],
            start_ns=columns["start_ns"],
            end_ns=columns["end_ns"],
            active_ns=active_ns,
            self_ns=np.clip(active_ns - columns["children_ns"], 0, lengths),
            site=columns["site"].astype(np.int32),
            error=error,
            clipped=is_open,
            device=DeviceIntervals.none(),
            attributes=AttributesOfRows(self._attributes),
            remote=self._remote,
        )

    def _part(self, member: UnsettledRows, horizon_ns: int) -> dict[str, NDArray[Any]]:
        """Return the columns of one recording: rows that may matter now, and open spans behind them."""
        place = np.flatnonzero(_matter(member, horizon_ns))
        rows = member.rows[place]
        ended = np.isin(np.fromiter(member.opened, np.int64, len(member.opened)), rows["span_id"].astype(np.int64))
        opened = [span for span, has_ended in zip(member.opened.values(), ended.tolist(), strict=True) if not has_ended]
        node = np.concatenate([rows["node"].astype(np.int64), _of(opened, "node")])
        nodes, inverse = np.unique(node, return_inverse=True)
        sites = [self._sites.setdefault(member.site_of(number), len(self._sites)) for number in nodes.tolist()]
        active_ns = np.full(len(node), -1, np.int64)
        places, numbers = numbers_in(rows)
        active_ns[places] = numbers
        none = np.full(len(opened), NONE, np.int64)
        return {
            "own": np.concatenate([rows["span_id"].astype(np.int64), _of(opened, "span_id")]),
            "parent": np.concatenate([rows["parent_id"].astype(np.int64), _of(opened, "parent_id")]),
            "root": np.concatenate([rows["root_id"].astype(np.int64), _of(opened, "root_id")]),
            "thread": np.concatenate([member.thread_id[place], _of(opened, "thread_id")]),
            "task": np.concatenate([rows["task"].astype(np.int64), _of(opened, "task_id")]),
            "start_ns": np.concatenate([rows["start_ns"].astype(np.int64), _of(opened, "start_ns")]),
            "end_ns": np.concatenate([rows["end_ns"].astype(np.int64), none - NONE + OPEN_NS]),
            "children_ns": np.concatenate([rows["children_ns"].astype(np.int64), _of(opened, "children_ns")]),
            "active_ns": active_ns,
            "site": np.array(sites, np.int64)[inverse.reshape(-1)],
            "place": np.concatenate([place, none]),
            "state": np.concatenate([member.state[place], np.full(len(opened), OPEN, np.uint8)]),
        }

    def _add_details(self, member: UnsettledRows, part: dict[str, NDArray[Any]], first: int) -> None:
        """Note the attributes, errors, active times and callers of a recording's rows."""
        place = part["place"]
        with_details = np.flatnonzero(np.append(member.with_details(), False)[place])
        for at in with_details.tolist():
            detail = member.details.get(int(part["own"][at]), NO_DETAIL)
            row = first + at
            if detail.attributes:
                self._attributes[row] = detail.attributes
            if detail.remote is not None:
                self._remote[row] = detail.remote
            if detail.error is not None:
                self._error_rows.append((row, self._errors.setdefault(detail.error, len(self._errors))))
            if detail.active_ns >= 0:
                self._active.append((row, detail.active_ns))
        for at in np.flatnonzero(place == NONE).tolist():
            detail = detail_of_open(member.opened[int(part["own"][at])])
            if detail.attributes:
                self._attributes[first + at] = detail.attributes
            if detail.remote is not None:
                self._remote[first + at] = detail.remote

    def _ids_above(self, parts: Sequence[dict[str, NDArray[Any]]], starts: Int64s) -> tuple[Int64s, Int64s]:
        """Return the ids of parents and of roots. Absent ones get ids that no row here has."""
        above = int(starts[-1]) + 1
        ids_by_name: dict[str, list[Int64s]] = {"parent": [np.zeros(0, np.int64)], "root": [np.zeros(0, np.int64)]}
        for part, first in zip(parts, starts.tolist(), strict=False):
            above_ids = np.concatenate([part["parent"], part["root"]])
            rows = rows_of(part["own"], above_ids).astype(np.int64)
            ids = np.where(rows == NONE, 0, rows + first + 1)
            absent = np.flatnonzero((rows == NONE) & (above_ids != 0))
            if len(absent):
                _, numbers = np.unique(above_ids[absent], return_inverse=True)
                ids[absent] = above + numbers.reshape(-1)
                above += int(numbers.max()) + 1
            ids_by_name["parent"].append(ids[: len(part["own"])])
            ids_by_name["root"].append(ids[len(part["own"]) :])
        return np.concatenate(ids_by_name["parent"]), np.concatenate(ids_by_name["root"])

    @property
    def is_request_root(self) -> Bools:
        """Mark the rows that are requests and the roots of their trees."""
        return np.asarray((self.own == self.own_root) & (self.own & REQUEST_BIT != 0))


def _matter(member: UnsettledRows, horizon_ns: int) -> Bools:
    """Mark the rows that may be settled now, or say whose other rows are.

    Of requests that are not due those without keys matter only as the ancestors of others.
    """
    rows = member.rows
    root_id = rows["root_id"]
    is_request = root_id & np.uint64(REQUEST_BIT) != 0
    is_root = is_request & (rows["span_id"] == root_id)
    undue = root_id[is_root & (rows["end_ns"] > horizon_ns)]
    opened = np.fromiter((span_id for span_id in member.opened if span_id & REQUEST_BIT), np.uint64)
    is_undue = is_request & np.isin(root_id, np.concatenate([undue, opened]))
    matter = ~is_undue | is_root | member.with_details()
    missing = np.setdiff1d(rows["parent_id"][matter], rows["span_id"][matter])
    while len(missing):
        more = ~matter & np.isin(rows["span_id"], missing)
        if not more.any():
            break
        matter |= more
        missing = np.setdiff1d(rows["parent_id"][more], rows["span_id"][matter])
    return np.asarray(matter)


def _of(opened: Sequence[OpenSpan], name: str) -> Int64s:
    return np.array([getattr(span, name) for span in opened], np.int64)


_NOTHING: dict[str, NDArray[Any]] = {
    **{
        name: np.zeros(0, np.int64)
        for name in (
            "own", "parent", "root", "thread", "task", "start_ns", "end_ns", "children_ns", "active_ns", "site",
            "place",
        )
    },
    "state": np.zeros(0, np.uint8),
}  # fmt: skip
