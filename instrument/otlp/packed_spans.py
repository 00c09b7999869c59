"""Encodes many spans at once, from columns, as OTLP protobuf or JSON (see `span_forms`).

An encoded span has two pieces. The head has the ids, the times and the measured numbers. The rest has the attributes
and rare fields, and is encoded once per distinct value. A device interval is encoded as a span of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.otlp.export_facts import Ids, mix_span_ids
from instrument.otlp.packing import (
    HAS_IS_REMOTE,
    IS_REMOTE,
    LINK_NAMES,
    find_cause_link,
    find_status,
    make_device_attributes,
    make_site_attributes,
    make_span_attributes,
    select_interruptions,
)
from instrument.otlp.span_forms import Form, Objects, PackedRows, RareMembers
from instrument.recording.spans import AttributeValue, Origin, Span
from instrument.recording.trace_context import OWN_TRACE_FLAGS, LinkedSpan, RemoteParent
from instrument.trace.columns import Bools, Columns, Int64s
from instrument.trace.indices import NONE, number_combinations, sort_stably
from instrument.trace.joined import Joined
from instrument.trace.request_trees import find_outer_spans
from instrument.trace.trace import MergedProcess

UInt64s = NDArray[np.uint64]

_MASK = (1 << 64) - 1

ROWS_AT_ONCE = 16_384
"""The number of rows that are packed together. Their columns fit into the processor's caches."""


class RowIds(NamedTuple):
    """The trace and span ids of rows, as columns. A trace id has two halves, `high` and `low`. `parent` is 0 for none.

    `is_server` is True if a request in this row is a server span. `remote` is the number of the tree's remote parent,
    or `NONE`.
    """

    high: UInt64s
    low: UInt64s
    own: UInt64s
    parent: UInt64s
    flags: NDArray[np.uint32]
    is_server: Bools
    remote: Int64s


class SpanPacker:
    """Encodes one process's rows of a trace as spans.

    `threads` has the names of threads by native id. `part` has the process's own numbers of threads, devices and
    streams; it is None in a trace of one process. `links` and `interruptions` have row numbers as keys.
    """

    def __init__(
        self,
        form: Form,
        trace: Columns,
        ids: SpanIds,
        origin: Origin,
        threads: Mapping[int, str],
        *,
        part: MergedProcess | None = None,
        links: Mapping[int, Sequence[LinkedSpan]] | None = None,
        interruptions: Mapping[int, Sequence[Span]] | None = None,
    ) -> None:
        self._form, self._trace, self._ids, self._threads = form, trace, ids, threads
        self._offset_ns = origin.realtime_ns - origin.monotonic_ns
        self._part = part
        self._links, self._interruptions = links or {}, interruptions or {}
        self._with_more = np.array(sorted({*self._links, *self._interruptions}), dtype=np.int64)
        self._is_request = np.array([site.kind == "request" for site in trace.sites], dtype=np.bool_)
        self._facts: dict[tuple[int, ...], bytes] = {}

    def pack(self, rows: Int64s) -> Iterator[PackedRows]:
        for at in range(0, len(rows), ROWS_AT_ONCE):
            yield self._pack_block(rows[at : at + ROWS_AT_ONCE])

    def _pack_block(self, rows: Int64s) -> PackedRows:
        trace, count = self._trace, len(rows)
        ids, (number, sets) = self._ids.ids_of_rows(rows), trace.attributes.distinct_sets(rows)
        rests, sizes = self._make_pieces_without_heads(rows, ids, number, sets)
        starts, ends = trace.start_ns[rows], trace.end_ns[rows]
        task, active = trace.task_id[rows], trace.active_ns[rows]
        numbers = {
            "instrument.self_ns": (trace.self_ns[rows], None),
            "instrument.active_ns": (active, active != ends - starts),
            "instrument.task_id": (task, task != 0),
        }
        pieces, sizes = self._add_heads(rests, sizes, ids, starts, ends, numbers)
        devices = self._pack_intervals(rows, ids, number, sets)
        if devices is None:
            return PackedRows(pieces, sizes, np.arange(1, count + 1))
        of, its_pieces, its_sizes = devices
        order = np.argsort(np.concatenate([np.arange(count), of]), kind="stable")
        ends = np.arange(1, count + 1) + np.searchsorted(of, np.arange(count), side="right")
        return PackedRows(np.concatenate([pieces, its_pieces])[order], np.concatenate([sizes, its_sizes])[order], ends)

    def _make_pieces_without_heads(
        self, rows: Int64s, ids: RowIds, number: Int64s, sets: Sequence[Mapping[str, AttributeValue]]
    ) -> tuple[Objects, Int64s]:
        trace = self._trace
        site, thread, error, clipped = (
            column[rows] for column in (trace.site, trace.thread_id, trace.error, trace.clipped)
        )
        is_server = ids.is_server & self._is_request[site]
        more = np.zeros(len(rows), dtype=np.int64)
        if len(self._with_more):
            place = np.searchsorted(self._with_more, rows).clip(max=len(self._with_more) - 1)
            more = np.where(self._with_more[place] == rows, place + 1, 0)
        shared: list[NDArray[Any]] = [site, is_server, thread, self._ids.state_of[ids.remote]]
        pieces, sizes = _make_pieces_by_row(lambda *key: self._pack_shared_piece(*key) + self._form.end, *shared)
        rare = np.flatnonzero((number != NONE) | (error != NONE) | clipped | (more > 0))
        if len(rare):
            shared = [column[rare] for column in shared]
            group, firsts = number_combinations(number[rare] + 1, error[rare] + 1, clipped[rare], more[rare], *shared)
            keys = zip(*(column[firsts].tolist() for column in shared), strict=True)
            rare_pieces, rare_sizes = _measure_pieces(
                [
                    self._make_rare_piece(
                        int(rows[at]), {} if number[at] == NONE else sets[int(number[at])], bool(more[at]), key
                    )
                    for at, key in zip(rare[firsts].tolist(), keys, strict=True)
                ]
            )
            pieces[rare], sizes[rare] = rare_pieces[group], rare_sizes[group]
        return pieces, sizes

    def _pack_shared_piece(self, *key: int, hidden: frozenset[str] = frozenset()) -> bytes:
        site, is_server, thread, state = key
        packed = None if hidden else self._facts.get(key)
        if packed is None:
            place = self._trace.sites[site]
            native_id = thread if self._part is None else self._part.threads.get(thread, thread)
            attributes = {name: value for name, value in make_site_attributes(place).items() if name not in hidden}
            attributes["thread.id"] = native_id
            if (thread_name := self._threads.get(native_id)) is not None:
                attributes["thread.name"] = thread_name
            packed = self._form.encode_shared_facts(place.name, bool(is_server), attributes) + self._pack_state(state)
            if not hidden:
                self._facts[key] = packed
        return packed

    def _pack_state(self, state: int) -> bytes:
        return self._form.encode_tracestate(self._ids.states[state]) if state else b""

    def _make_rare_piece(
        self, row: int, values: Mapping[str, AttributeValue], has_more: bool, key: Sequence[int]
    ) -> bytes:
        trace = self._trace
        site, error = trace.sites[int(trace.site[row])], int(trace.error[row])
        failed = None if error == NONE else trace.errors[error]
        attributes = make_span_attributes(site, values, failed, bool(trace.clipped[row]))
        links = list(self._links.get(row, ())) if has_more else []
        cause = (
            find_cause_link(values, lambda *ids: self._ids.make_links([ids], row)[0])
            if LINK_NAMES & values.keys()
            else None
        )
        if cause is not None:
            links.insert(0, cause)
        interruptions = self._interruptions.get(row, ()) if has_more else ()
        events, dropped = select_interruptions(interruptions)
        placed = [(at_ns + self._offset_ns, name, facts) for at_ns, name, facts in events]
        members = RareMembers(find_status(failed, values), links, placed, dropped)
        hidden = frozenset(frozenset(attributes) & make_site_attributes(site).keys() if values else ())
        return b"".join(
            (
                self._form.attributes(attributes),
                self._pack_shared_piece(*key, hidden=hidden),
                self._form.encode_rare_members(members),
            )
        )

    def _pack_intervals(
        self, rows: Int64s, ids: RowIds, number: Int64s, sets: Sequence[Mapping[str, AttributeValue]]
    ) -> tuple[Int64s, Objects, Int64s] | None:
        trace, work, form = self._trace, self._trace.device, self._form
        firsts, lasts = np.searchsorted(work.row, rows), np.searchsorted(work.row, rows, side="right")
        counts = lasts - firsts
        of = np.repeat(np.arange(len(rows)), counts)
        if not len(of):
            return None
        at = np.arange(len(of)) + (firsts - np.cumsum(counts) + counts)[of]

        def pack_interval_piece(site: int, of_set: int, device: int, stream: int, label: int, state: int) -> bytes:
            if self._part is not None:
                device, stream = self._part.devices.get(device, device), self._part.streams.get(stream, stream)
            place = trace.sites[site]
            facts = make_device_attributes(
                place, sets[of_set - 1] if of_set else {}, device, stream, work.labels[label]
            )
            packed = form.encode_shared_facts(f"{place.name} (device)", False, facts)
            return packed + self._pack_state(state) + form.end

        states = self._ids.state_of[ids.remote[of]]
        pieces, sizes = _make_pieces_by_row(
            pack_interval_piece,
            *(trace.site[rows][of], number[of] + 1, work.device[at], work.stream[at], work.label[at], states),
        )
        new_ids = self._ids.make_device_ids(len(of), int(rows[0]))
        flags = ids.flags[of] & ~np.uint32(IS_REMOTE)
        of_devices = RowIds(ids.high[of], ids.low[of], new_ids, ids.own[of], flags, ids.is_server[of], ids.remote[of])
        numbers = {"instrument.device.uncertainty_ns": (work.uncertainty_ns[at], None)}
        return of, *self._add_heads(pieces, sizes, of_devices, work.start_ns[at], work.end_ns[at], numbers)

    def _add_heads(
        self, rests: Objects, size: Int64s, ids: RowIds, starts: Int64s, ends: Int64s, numbers: Mapping[str, Number]
    ) -> tuple[Objects, Int64s]:
        """Add the head to the rest of each span. Return the spans and the sizes of the spans."""
        form = self._form
        pieces = np.empty((len(rests), 2), dtype=object)
        pieces[:, 1] = rests
        columns: dict[str, NDArray[Any]] = {
            "high": ids.high,
            "low": ids.low,
            "own": ids.own,
            "parent": ids.parent,
            "flags": ids.flags,
            "start": np.maximum(starts + self._offset_ns, 0),
            "end": np.maximum(ends + self._offset_ns, 0),
        }
        widths: dict[str, Int64s] = {
            "parent": (ids.parent != 0).astype(np.int64),
            **{name: form.measure_widths(name, columns[name]) for name in ("flags", "start", "end")},
        }
        for name, (values, is_there) in numbers.items():
            columns[name], width = values, form.measure_widths(name, values)
            widths[name] = width if is_there is None else width * is_there
        kind, firsts = number_combinations(*widths.values())
        layouts = [{name: int(width[first]) for name, width in widths.items()} for first in firsts.tolist()]
        heads = [form.list_head_parts({**layout, "length": 0}) for layout in layouts]
        bare = np.array([sum(part if isinstance(part, int) else len(part) for _, part in head) for head in heads])
        columns["length"] = bare[kind] + size - form.around
        length_widths = form.length_widths(columns["length"])
        groups, firsts = number_combinations(kind, length_widths)
        order = sort_stably(groups, len(firsts))
        bounds = np.searchsorted(groups[order], np.arange(len(firsts) + 1)).tolist()
        for group, first in enumerate(firsts.tolist()):
            some = order[bounds[group] : bounds[group + 1]]
            layout = {**layouts[int(kind[first])], "length": int(length_widths[first])}
            pieces[some, 0] = _make_heads(form, layout, {name: column[some] for name, column in columns.items()})
        return pieces, np.asarray(bare[kind] + length_widths + size)


def _make_heads(form: Form, layout: Mapping[str, int], columns: Mapping[str, NDArray[Any]]) -> Objects:
    """Return the head of each span: its encoded fields of fixed width, such as ids and times. All spans have the same
    `layout`."""
    parts = form.list_head_parts(layout)
    widths = [part if isinstance(part, int) else len(part) for _, part in parts]
    shared = b"".join(bytes(part) for _, part in parts)
    places = [(*part, end - width) for part, width, end in zip(parts, widths, accumulate(widths), strict=True)]
    fields = [(name, width, at) for name, width, at in places if isinstance(width, int)]
    types = np.dtype(
        {
            "names": [name for name, _, _ in fields],
            "formats": [form.types.get(name) or f"V{width}" for name, width, _ in fields],
            "offsets": [at for _, _, at in fields],
            "itemsize": len(shared),
        }
    )
    table = np.empty(len(columns["own"]), types)
    table.view(np.uint8).reshape(-1, len(shared))[:] = np.frombuffer(shared, dtype=np.uint8)
    for name, width, _ in fields:
        table[name] = form.encode_values(name, columns[name], width)
    return table.view(f"V{len(shared)}").astype(object)


def _measure_pieces(values: Sequence[bytes]) -> tuple[Objects, Int64s]:
    pieces = np.empty(len(values), dtype=object)
    pieces[:] = values
    return pieces, np.array(list(map(len, values)), dtype=np.int64)


def _make_pieces_by_row(make: Callable[..., bytes], *columns: NDArray[Any]) -> tuple[Objects, Int64s]:
    group, firsts = number_combinations(*columns)
    pieces, lengths = _measure_pieces(list(map(make, *(column[firsts].tolist() for column in columns))))
    return pieces[group], lengths[group]


Number = tuple[Int64s, Bools | None]
"""A measured number: its values by row, and a mask of the rows with a value (None for all rows)."""


# ---------------------------------------------------------------- ids


class SpanIds:
    """The ids that a collector gets for the rows of a trace. `ids` has one entry per process. If there are several,
    `process` has the index of each row's process.

    `trace.own_id` has the number of each span in its process. `absent` has the numbers of parents and roots without a
    row.
    """

    def __init__(
        self,
        trace: Columns,
        ids: Ids | Sequence[Ids],
        process: Int64s | None = None,
        absent: Mapping[int, int] | None = None,
    ) -> None:
        self._trace, self._process, self._absent = trace, process, absent or {}
        self._ids = [ids] if isinstance(ids, Ids) else list(ids)
        self._order = np.argsort(trace.span_id) if process is not None and len(trace) else None
        self._seeds: UInt64s = np.array([remote.seeds for remote in self._ids], dtype=np.uint64)
        remotes = {int(trace.root_id[row]): remote for row, remote in trace.remote.items()}
        roots = sorted(remotes)
        self._remotes: list[RemoteParent] = list(map(remotes.__getitem__, roots))
        self._roots = np.array(roots, dtype=np.int64)
        remote_ids = [
            (remote.trace_id >> 64, remote.trace_id & _MASK, remote.span_id, HAS_IS_REMOTE | remote.flags & 0xFF)
            for remote in self._remotes
        ]
        self._of_remotes: UInt64s = np.array(remote_ids, dtype=np.uint64).reshape(-1, 4)
        numbers = {"": 0}
        states = [numbers.setdefault(remote.state, len(numbers)) for remote in self._remotes]
        self.states, self.state_of = list(numbers), np.array([*states, 0], dtype=np.int64)
        """The distinct values of `tracestate`, and the number of each remote parent's value. The last number is that of
        no remote parent."""
        self._serving = np.array([remote.in_server_span for remote in self._remotes], dtype=np.bool_)
        self._local = np.array([remote.is_local for remote in self._remotes], dtype=np.bool_)

    def ids_of_rows(self, rows: Int64s) -> RowIds:
        trace = self._trace
        span, parent, root = trace.span_id[rows], trace.parent_id[rows], trace.root_id[rows]
        is_root = span == root
        is_top = is_root | (parent == 0)
        span_ids, above = self._convert_numbers_to_ids(span, rows, 0), self._convert_numbers_to_ids(parent, rows, 0)
        high, low = self._convert_numbers_to_ids(root, rows, 1), self._convert_numbers_to_ids(root, rows, 2)
        above[is_top] = 0
        flags = np.full(len(rows), HAS_IS_REMOTE | OWN_TRACE_FLAGS, dtype=np.uint32)
        remote = np.full(len(rows), NONE, dtype=np.int64)
        if len(self._roots):
            place = np.searchsorted(self._roots, root).clip(max=len(self._roots) - 1)
            with_remote = np.flatnonzero(self._roots[place] == root)
            place = remote[with_remote] = place[with_remote]
            high[with_remote], low[with_remote], parents, flags[with_remote] = self._of_remotes[place].T
            is_root[with_remote] &= ~self._serving[place]
            tops = is_top[with_remote]
            above[with_remote[tops]] = parents[tops]
            flags[with_remote[tops & (parents != 0) & ~self._local[place]]] |= IS_REMOTE
        return RowIds(high, low, span_ids, above, flags, is_root, remote)

    def make_links(self, spans: Sequence[tuple[int, int]], row: int) -> list[LinkedSpan]:
        """Return links to spans. Each pair in `spans` has the number of a span and the number of its root."""
        span_ids, root_ids = np.array(spans, dtype=np.int64).reshape(-1, 2).T
        rows = np.full(len(spans), row)
        requests = ((span_ids, 0), (root_ids, 1), (root_ids, 2))
        own_ids, high, low = (self._convert_numbers_to_ids(numbers, rows, part).tolist() for numbers, part in requests)
        linked = [
            LinkedSpan(upper << 64 | lower, span_id) for span_id, upper, lower in zip(own_ids, high, low, strict=True)
        ]
        if len(self._roots):
            place = np.searchsorted(self._roots, root_ids).clip(max=len(self._roots) - 1)
            for at in np.flatnonzero(self._roots[place] == root_ids).tolist():
                remote = self._remotes[int(place[at])]
                linked[at] = LinkedSpan(remote.trace_id, own_ids[at], remote.state)
        return linked

    def make_links_by_row(self, joined: Joined) -> Mapping[int, list[LinkedSpan]]:
        """Return links by row: from a batch to the requests that it serves, from a nested request to the outer span."""
        trace, served = self._trace, joined.served
        pairs = {row: [began] for row, began in find_outer_spans(trace, joined).items()}
        known_requests = np.flatnonzero(served.request != NONE)
        rows = joined.rows[served.request[known_requests]]
        request_pairs = zip(trace.span_id[rows].tolist(), trace.root_id[rows].tolist(), strict=True)
        for batch, pair in dict.fromkeys(zip(served.batch[known_requests].tolist(), request_pairs, strict=True)):
            pairs.setdefault(batch, []).append(pair)
        links = iter(self.make_links([*chain.from_iterable(pairs.values())], 0))
        return {row: list(islice(links, len(request_pairs))) for row, request_pairs in pairs.items()}

    def make_device_ids(self, count: int, row: int) -> UInt64s:
        number = 0 if self._process is None else int(self._process[row])
        first = self._ids[number].reserve_numbers(count)
        return mix_span_ids(self._seeds[number, 0], np.arange(count, dtype=np.uint64) + np.uint64(first))

    def _convert_numbers_to_ids(self, numbers: Int64s, rows: Int64s, part: int) -> UInt64s:
        process, trace = self._process, self._trace
        if process is None or self._order is None:
            return mix_span_ids(self._seeds[0, part], numbers.astype(np.uint64))
        at = self._order[np.searchsorted(trace.span_id, numbers, sorter=self._order).clip(max=len(trace) - 1)]
        is_known = trace.span_id[at] == numbers
        own_numbers = np.where(is_known, trace.own_id[at], numbers)
        for place in np.flatnonzero(~is_known).tolist():
            own_numbers[place] = self._absent.get(int(numbers[place]), int(numbers[place]))
        of_process = np.where(is_known, process[at], process[rows])
        return mix_span_ids(self._seeds[of_process, part], own_numbers.astype(np.uint64))
