"""Keeps the spans of one recording that still wait for a decision of tail sampling, as columns.

The rows of a request are removed once the request is decided. Rows with keys remain longer, because late rows may need
them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from instrument.recording.mapped import ROWS
from instrument.recording.mapped_facts import OpenSpan, RingRows
from instrument.recording.memory_layout import REQUEST_BIT
from instrument.recording.spans import BATCH_KEYS, KEY, Site
from instrument.recording.trace_context import RANDOM_BITS, RemoteParent, is_sampled, sampling_threshold
from instrument.trace.indices import rank_distinct
from instrument.trace.of_recording import RowDetail, have_details
from instrument.trace.tail_sampler import TailSampler

try:
    from isal import isal_zlib as zlib
except ImportError:
    import zlib  # type: ignore[no-redef]

MOST_ROWS = 200_000
"""The maximum number of waiting rows per recording. Above it, rows of the requests that began first are dropped."""

LEAST_PACKED, MOST_PACKED = 500, 3_000
"""The minimum and the maximum number of rows of a thread that are packed together."""

MOST_ROOTS = 10_000
"""The maximum number of requests whose decision is remembered. The oldest are forgotten first."""

EARLY_BYTES = 2
"""The maximum size of details that wait for their rows, as a multiple of `room_bytes` in `UnsettledRows.add`."""

BEYOND = "spans beyond spans_per_request"
TOO_LONG = "spans of requests that stayed open too long"

WAITING, SETTLED, PASSED, ADOPTED = 0, 1, 2, 3
"""The states of a row: undecided, decided, dropped unless needed later, and read by an earlier reader."""

_KEY, _BATCH_KEYS = KEY.encode(), BATCH_KEYS.encode()

Details = Mapping[int, tuple[int, bytes]]
"""A map from a span id to its active time in ns and its other encoded details."""


class ProcessIds(Protocol):
    """The trace ids and span ids under which a process's spans are exported."""

    run: str

    def span_id(self, number: int, /) -> int: ...

    def trace_id(self, number: int, /) -> int:
        """Return the 128-bit trace id of a tree, given by the number of its root."""

    def make_ids(self, numbers: NDArray[np.uint64], part: int, /) -> NDArray[np.uint64]:
        """Return 64-bit ids for numbers. With `part` 2, these are the lower halves of trace ids."""


Key = TypeVar("Key")
Value = TypeVar("Value")


class Newest(OrderedDict[Key, Value]):
    """A mapping of bounded size, which forgets its oldest entries."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        if len(self) > self._most:
            self.popitem(last=False)


class Decided(NamedTuple):
    """The decision about a request, with the root and the caller for spans that come later."""

    is_kept: bool
    root_id: int
    remote: RemoteParent | None


class _PackedRows(NamedTuple):
    data: bytes
    size: int
    thread_id: int
    first_ns: int

    @classmethod
    def from_rows(cls, rows: NDArray[np.void], thread_id: int) -> _PackedRows:
        """Pack rows as the differences between consecutive rows, field by field. Such differences compress well."""
        fields = rows.view(np.uint64).reshape(len(rows), -1).T
        differences = np.empty(fields.shape, np.uint64)
        differences[:, 0] = fields[:, 0]
        np.subtract(fields[:, 1:], fields[:, :-1], out=differences[:, 1:])
        return cls(zlib.compress(differences.data, 1), len(rows), thread_id, int(rows["end_ns"].min()))

    def rows(self) -> NDArray[np.void]:
        differences = np.frombuffer(zlib.decompress(self.data), np.uint64).reshape(-1, self.size)
        fields = np.empty((self.size, len(differences)), np.uint64)
        np.add.accumulate(differences, axis=1, out=fields.T)
        return fields.view(ROWS).reshape(-1)


class UnsettledRows:
    """The rows of one recording about which tail sampling has not decided. Only one thread may use them.

    `site_of` returns the site of a call path, given by its number.
    """

    def __init__(
        self, ids: ProcessIds, site_of: Callable[[int], Site], sampler: TailSampler, spans_per_request: int
    ) -> None:
        self.ids = ids
        self.site_of = site_of
        self.sampler = sampler
        self.spans_per_request = spans_per_request
        self.rows: NDArray[np.void] = np.zeros(0, ROWS)
        self.thread_id = np.zeros(0, np.int64)
        self.state = np.zeros(0, np.uint8)
        self._packed: list[_PackedRows] = []
        self.details: dict[int, RowDetail] = {}
        self.opened: Mapping[int, OpenSpan] = {}
        """The spans that were open when rows were last read, by id."""
        self.decided = Newest[int, Decided](MOST_ROOTS)
        self.traces = Newest[int, int](MOST_ROOTS)
        """The trace id with which each tree was sent, by root, if it is a trace id of another process."""
        self.sent_apart = Newest[int, None](MOST_ROWS)
        """The spans that were sent because of requests they served, although their tree is not in the random sample."""
        self.read_ns = 0
        """The time up to which the recording has been read."""
        self.is_over = False
        """True if the process has ended and everything was read."""
        self.counts: Counter[str] = Counter()
        self.passed = 0
        """The number of rows that were dropped because no decision kept them."""
        self.early: set[int] = set()
        """The roots of requests whose decision waits until the usual time of their endpoint is known."""
        self.has_keys = False
        self.lingers = False
        """True if undecided rows are waiting."""
        self.adopted = 0
        """The number of rows that an earlier reader had read but not settled."""
        self.adopted_until_ns = 0
        """The time in ns up to which the earlier reader had settled requests."""
        self.caller: RemoteParent | None = None
        """The remote parent of trees that began before the process served requests, or None."""
        self.served_from_ns = 1 << 62
        """The time in ns from which the process serves requests, if there is a `caller`: its first request or first
        span with a key."""
        self.unmatched: OrderedDict[int, tuple[int, bytes]] = OrderedDict()
        """Details whose rows are not read yet."""
        self._early_bytes = 0
        self._sizes = Newest[int, int](MOST_ROOTS)

    def drop_requests(self, root_ids: set[int]) -> None:
        """Drop the waiting rows of the requests with the roots `root_ids`. The caller sends these rows."""
        self.unpack()
        theirs = np.isin(self.rows["root_id"], np.fromiter(root_ids, np.uint64, len(root_ids)))
        theirs &= self.state != SETTLED
        self.passed += int(np.count_nonzero(theirs & (self.state != PASSED)))
        self.state[theirs] = SETTLED

    def is_row_waiting(self, span_id: int) -> bool:
        self.unpack()
        return bool(((self.rows["span_id"] == span_id) & (self.state == WAITING)).any())

    @property
    def undecided_count(self) -> int:
        return int(np.count_nonzero(self.state != SETTLED)) + self.packed_count

    @property
    def packed_count(self) -> int:
        return sum(piece.size for piece in self._packed)

    # ---------------------------------------------------------------- reading

    def add(
        self, rings: Sequence[RingRows], opened: Mapping[int, OpenSpan], details: Details, room_bytes: int = 1 << 30
    ) -> None:
        """Add rows that were read. `opened` has the spans that were open before the read.

        Details, such as attributes, arrive before their rows. Up to twice `room_bytes` of details are kept until their
        rows arrive.
        """
        self.opened = opened
        self._keep_unmatched_details(details, room_bytes)
        self.has_keys = (
            self.has_keys
            or any(_KEY in text or _BATCH_KEYS in text for _, text in details.values())
            or any(KEY in span.attributes or BATCH_KEYS in span.attributes for span in opened.values())
        )
        if self.has_keys:
            self.unpack()
        self._note_begin_of_service(rings, details)
        pieces: list[tuple[NDArray[np.void], int]] = []
        for ring in rings:
            is_kept = self._are_kept_rows(ring.rows)
            rows = ring.rows[is_kept]
            with_details = np.flatnonzero(have_details(ring.rows)) if self.unmatched else np.zeros(0, np.int64)
            span_ids = ring.rows["span_id"][with_details].tolist()
            for span_id, has_row in zip(span_ids, is_kept[with_details].tolist(), strict=True):
                if (detail := self.unmatched.pop(span_id, None)) is not None:
                    self._early_bytes -= len(detail[1])
                    if has_row:
                        self.details[span_id] = RowDetail.from_recorded(*detail)
            if not self.has_keys and len(rows) >= LEAST_PACKED:
                rows = self._pack_rows(rows, ring.thread_id)
            pieces.append((rows, ring.thread_id))
        self._append_rows(pieces)
        if len(self.rows) + self.packed_count > MOST_ROWS:
            self.unpack()
            self._drop_oldest()

    def _note_begin_of_service(self, rings: Sequence[RingRows], details: Details) -> None:
        if self.caller is None:
            return
        keyed = [span_id for span_id, (_, text) in details.items() if _KEY in text or _BATCH_KEYS in text]
        begins = [
            span.start_ns
            for span in self.opened.values()
            if span.root_id & REQUEST_BIT or KEY in span.attributes or BATCH_KEYS in span.attributes
        ]
        for ring in rings:
            serves = (ring.rows["root_id"] & np.uint64(REQUEST_BIT) != 0) | np.isin(ring.rows["span_id"], keyed)
            begins += ring.rows["start_ns"][serves].tolist()
        self.served_from_ns = min([self.served_from_ns, *begins])

    def are_sampled(self, root_ids: NDArray[np.uint64], start_ns: NDArray[Any]) -> NDArray[np.bool_]:
        capture, caller = self.sampler.capture, self.caller
        random = self.ids.make_ids(root_ids, 2) & np.uint64((1 << RANDOM_BITS) - 1)
        are_of_share: NDArray[np.bool_] = random >= np.uint64(sampling_threshold(capture.sample))
        if caller is not None:
            is_kept = is_sampled(caller.trace_id, capture.sample) or (caller.flags & 1 and not capture.is_off)
            are_of_share[start_ns < self.served_from_ns] = is_kept
        return are_of_share

    def _append_rows(self, pieces: Sequence[tuple[NDArray[np.void], int]]) -> None:
        count = sum(len(rows) for rows, _ in pieces)
        if count:
            self.lingers = True
            threads = (np.full(len(rows), thread_id, np.int64) for rows, thread_id in pieces)
            self.rows = np.concatenate([self.rows, *(rows for rows, _ in pieces)])
            self.thread_id = np.concatenate([self.thread_id, *threads])
            self.state = np.append(self.state, np.full(count, WAITING, np.uint8))

    def _pack_rows(self, rows: NDArray[np.void], thread_id: int) -> NDArray[np.void]:
        """Compress the rows that are not needed before a decision. Return the others: roots of requests, and rows with
        details."""
        is_root = (rows["span_id"] == rows["root_id"]) & (rows["root_id"] & np.uint64(REQUEST_BIT) != 0)
        is_plain = ~(is_root | have_details(rows))
        if np.count_nonzero(is_plain) < LEAST_PACKED:
            return rows
        self.lingers = True
        plain = rows[is_plain]
        for first in range(0, len(plain), MOST_PACKED):
            self._packed.append(_PackedRows.from_rows(plain[first : first + MOST_PACKED], thread_id))
        return np.asarray(rows[~is_plain])

    def unpack(self, horizon_ns: int = 1 << 62, most: int = 1 << 62) -> int:
        """Unpack rows that had ended by `horizon_ns`, up to about `most` rows. Return the time up to which all rows are
        unpacked."""
        packed = sorted(self._packed, key=attrgetter("first_ns"))
        count = end = 0
        while end < len(packed) and packed[end].first_ns <= horizon_ns and count < most:
            count, end = count + packed[end].size, end + 1
        self._append_rows([(piece.rows(), piece.thread_id) for piece in packed[:end]])
        self._packed = packed[end:]
        return min([horizon_ns, *(piece.first_ns - 1 for piece in self._packed[:1])])

    def adopt_rows(
        self,
        rings: Sequence[RingRows],
        opened: Mapping[int, OpenSpan],
        details: Details,
        undecided: NDArray[np.uint64],
        settled_ns: int,
    ) -> None:
        """Add rows from an earlier reader. That reader decided about requests until `settled_ns`. `undecided` has the
        roots of requests without a decision."""
        self.opened, self.adopted_until_ns = opened, settled_ns
        self._note_begin_of_service(rings, details)
        self.has_keys = self.has_keys or any(_KEY in text or _BATCH_KEYS in text for _, text in details.values())
        for ring in rings:
            rows = ring.rows
            is_request = rows["root_id"] & np.uint64(REQUEST_BIT) != 0
            is_root = is_request & (rows["span_id"] == rows["root_id"])
            is_undecided = is_request & np.isin(rows["root_id"], undecided)
            has_detail = np.isin(rows["span_id"], np.fromiter(details, np.uint64, len(details)))
            state = np.where(is_undecided, WAITING, np.where(is_request, SETTLED, ADOPTED)).astype(np.uint8)
            is_late = rows["end_ns"] > settled_ns
            is_kept = is_undecided | (is_request & (is_root | has_detail)) | (~is_request & (is_late | self.has_keys))
            for span_id in rows["span_id"][is_kept & has_detail].tolist():
                self.details[span_id] = RowDetail.from_recorded(*details[span_id])
            for root_id in rows["root_id"][is_root & ~is_undecided].tolist():
                self.decided[root_id] = Decided(False, root_id, None)
            self.rows = np.concatenate([self.rows, rows[is_kept]])
            self.thread_id = np.append(self.thread_id, np.full(int(is_kept.sum()), ring.thread_id, np.int64))
            self.state = np.append(self.state, state[is_kept])
            self.adopted += int(np.count_nonzero(is_undecided))
            self.lingers = bool((self.state != SETTLED).any())

    def _are_kept_rows(self, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        roots = rows["root_id"]
        is_request = roots & np.uint64(REQUEST_BIT) != 0
        is_kept = is_request.copy()
        if self.has_keys:
            is_kept[:] = True
        else:
            is_kept |= self.are_sampled(roots, rows["start_ns"])
            self.passed += int(np.count_nonzero(~is_kept))
        below = np.flatnonzero(is_request & (rows["span_id"] != roots))
        if len(below):
            root_ids, root_places = rank_distinct(roots[below])
            counts = np.bincount(root_places)
            for at, (root_id, count) in enumerate(zip(root_ids.tolist(), counts.tolist(), strict=True)):
                size = self._sizes.get(root_id, 0)
                room = max(self.spans_per_request - size, 0)
                self._sizes[root_id] = size + min(count, room)
                if count > room:
                    is_kept[below[root_places == at][room:]] = False
                    self.counts[BEYOND] += count - room
        return np.asarray(is_kept)

    def _keep_unmatched_details(self, details: Details, room_bytes: int) -> None:
        early = self.unmatched
        for span_id, detail in details.items():
            before = early.pop(span_id, None)
            self._early_bytes += len(detail[1]) - (len(before[1]) if before is not None else 0)
            early[span_id] = detail
        while self._early_bytes > EARLY_BYTES * room_bytes:
            _, (_, text) = early.popitem(last=False)
            self._early_bytes -= len(text)

    def _drop_oldest(self) -> None:
        """Drop rows of the oldest open requests, then other old rows, until three quarters of `MOST_ROWS` remain."""
        roots = self.rows["root_id"]
        open_roots = np.array(
            [root for root in dict.fromkeys(span.root_id for span in self.opened.values()) if root & REQUEST_BIT],
            np.uint64,
        )
        has_detail = np.isin(self.rows["span_id"], np.fromiter(self.details, np.uint64, len(self.details)))
        excess = len(self.rows) - MOST_ROWS * 3 // 4
        drop = np.zeros(len(self.rows), np.bool_)
        for root in open_roots:
            if excess <= 0:
                break
            is_droppable = (roots == root) & ~has_detail & (self.state == WAITING)
            excess -= int(np.count_nonzero(is_droppable))
            drop |= is_droppable
        if excess > 0:
            remaining = np.flatnonzero(~drop)
            drop[remaining[np.argsort(self.rows["end_ns"][remaining], kind="stable")[:excess]]] = True
        self.counts[TOO_LONG] += int(np.count_nonzero(drop & (self.state != SETTLED)))
        self.keep_rows(~drop)

    # ---------------------------------------------------------------- settling

    def keep_rows(self, is_kept: NDArray[np.bool_]) -> None:
        if is_kept.all():
            return
        for span_id in self.rows["span_id"][~is_kept & (self.rows["rare"] != 0)].tolist():
            self.details.pop(span_id, None)
        self.rows, self.thread_id, self.state = self.rows[is_kept], self.thread_id[is_kept], self.state[is_kept]
