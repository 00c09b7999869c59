"""Packs the columns of a trace for a file, in the smallest types that fit. Only rows with rare values store them.

Ascending columns are stored as differences (`steps`) and ends as lengths, so most numbers take one or two bytes.
`numpy.cumsum` restores a column. The array `firsts` has the first span id and the first begin.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from struct import pack
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from instrument.errors import TraceError
from instrument.recording.remote_parents import RemoteParent
from instrument.recording.spans import AttributeValue, Site
from instrument.trace.columns import Columns, DeviceIntervals, Int32s, Int64s
from instrument.trace.forest import NONE, topmost_rows
from instrument.trace.groups import distinct, places_of, ranked
from instrument.trace.text import encode, encode_numbers, safe

Column = NDArray[Any]
Arrays = Mapping[str, Column]

WIDTHS = (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32)


def narrow(column: Column) -> Column:
    """Return the same integers in the narrowest type that fits all of them."""
    if not len(column):
        return column.astype(np.uint8)
    least, most = int(column.min()), int(column.max())
    for width in WIDTHS:
        limits = np.iinfo(width)
        if limits.min <= least and most <= limits.max:
            return column.astype(width)
    return column.astype(np.int64)


def steps(column: Column) -> Column:
    """Return the first number, followed by the difference of each number to the one before."""
    return narrow(np.diff(column.astype(np.int64), prepend=np.int64(0)))


def summed(column: Column) -> Int64s:
    """Return the numbers of which `steps` made these differences."""
    return np.asarray(np.cumsum(column, dtype=np.int64))


def in_order(trace: Columns) -> Int64s:
    """Return the rows by begin, the longer ones first, then by id, so that parents come before their children."""
    order = np.argsort(trace.start_ns, kind="stable")
    starts = trace.start_ns[order]
    same = np.concatenate([[False], starts[1:] == starts[:-1], [False]])
    tied = np.flatnonzero(same[1:] | same[:-1])  # only the few ties need the sort by three keys
    rows = order[tied]
    order[tied] = rows[np.lexsort((trace.span_id[rows], -trace.end_ns[rows], trace.start_ns[rows]))]
    return order


def pack_columns(trace: Columns) -> tuple[dict[str, Column], dict[str, Any]]:
    """Return the columns of a file by name, and the rest of the trace as metadata. Rows are in the order of
    `in_order`."""
    order = in_order(trace)
    rank = places_of(order, len(trace))
    parent = trace.parent[order]
    above = np.where(parent == NONE, np.arange(len(trace)), rank[parent]) if len(trace) else order
    span_id, start_ns = trace.span_id[order], trace.start_ns[order]
    total_ns = trace.end_ns[order] - start_ns
    self_ns, parent_id = trace.self_ns[order], trace.parent_id[order]
    threads, thread = ranked(trace.thread_id[order])
    tasks, of_rows = _rank_below_parents(trace, trace.task_id)
    task = of_rows[order]
    columns: dict[str, Column] = {
        "firsts": np.concatenate([span_id[:1], start_ns[:1]]),
        "span_id_steps": steps(span_id - span_id[:1].sum()),
        "rows_to_parent": narrow(np.arange(len(trace)) - above),
        "thread": narrow(thread),
        "thread_ids": threads,
        "task": narrow(task),
        "task_ids": tasks,
        "start_ns_steps": steps(start_ns - start_ns[:1].sum()),
        "total_ns": narrow(total_ns),
        "children_ns": narrow(total_ns - self_ns),
        "site": narrow(trace.site[order]),
    }
    own_parent = np.where(parent == NONE, 0, trace.span_id[parent]) if len(trace) else parent_id
    of_top = trace.span_id[topmost_rows(trace.parent)[order]] if len(trace) else span_id
    rare: tuple[tuple[str, Column, Column], ...] = (
        ("parent_id", parent_id, own_parent),
        ("root_id", trace.root_id[order], of_top),
        ("active_ns", trace.active_ns[order], total_ns),
        ("error", trace.error[order], np.full(len(trace), NONE)),
        ("clipped", trace.clipped[order], np.zeros(len(trace), dtype=np.bool_)),
        ("own_id", trace.own_id[order], span_id),
    )
    for name, column, usual in rare:
        rows = np.flatnonzero(column != usual)
        columns[f"{name}_row_steps"], columns[name] = steps(rows), narrow(column[rows].astype(np.int64))
    columns |= _pack_intervals(trace.device, rank, start_ns)
    columns |= _pack_attributes(trace, order)
    facts = {
        "errors": list(trace.errors),
        "labels": list(trace.device.labels),
        "remote": [
            [int(rank[row]), f"{it.trace_id:x}", f"{it.span_id:x}", it.flags, it.is_local, it.in_server_span]
            for row, it in trace.remote.items()
        ],
    }
    return columns, facts


def _rank_below_parents(trace: Columns, column: Int64s) -> tuple[Column, Int64s]:
    """Return the result of `ranked`, fast if most rows have the same value as their parents."""
    shares = trace.parent != NONE
    if len(trace):
        shares &= column == column[trace.parent]
    firsts = np.flatnonzero(~shares)
    values, places = ranked(column[firsts])
    place_of = np.zeros(len(trace), dtype=np.int64)
    place_of[firsts] = places
    return values, place_of[topmost_rows(np.where(shares, trace.parent, np.int32(NONE)).astype(np.int32))]


def _pack_intervals(device: DeviceIntervals, rank: Int64s, start_ns: Int64s) -> dict[str, Column]:
    order = np.argsort(rank[device.row], kind="stable")
    row, begin_ns = rank[device.row][order], device.start_ns[order]
    return {
        "device_row_steps": steps(row),
        "device": narrow(device.device[order]),
        "device_stream": narrow(device.stream[order]),
        "device_after_ns": narrow(begin_ns - start_ns[row]),
        "device_total_ns": narrow(device.end_ns[order] - begin_ns),
        "device_label": narrow(device.label[order]),
        "device_uncertainty_ns": narrow(device.uncertainty_ns[order]),
    }


def _pack_attributes(trace: Columns, order: Int64s) -> dict[str, Column]:
    has = np.zeros(len(trace), dtype=np.bool_)
    has[trace.attributes.rows()] = True
    rows = np.flatnonzero(has[order])
    table: dict[str, int] = {}
    numbers = [table.setdefault(text, len(table)) for text in encode_rows(trace, order[rows].tolist(), finite=False)]
    texts = [text.encode() for text in table]
    return {
        "attributes_row_steps": steps(rows),
        "attributes": narrow(np.array(numbers, dtype=np.int64)),
        "attributes_lengths": narrow(np.fromiter(map(len, texts), np.int64, len(texts))),
        "attributes_bytes": np.frombuffer(b"".join(texts), dtype=np.uint8),
    }


PLAIN = {str, int, bool}
"""The types of which equal values have equal JSON. Float is not among them, because 0.0 equals -0.0."""


def encode_rows(trace: Columns, rows: Iterable[int], *, finite: bool = True) -> Iterator[str]:
    """Yield the JSON of each row's attributes. Equal attributes are encoded once. With `finite`, infinities and NaN
    become texts, because viewers cannot read them."""
    text_by_key: dict[object, str] = {}
    for row in rows:
        attributes = trace.attributes[row]
        values = tuple(attributes.values())
        kinds = tuple(map(type, values))
        if not PLAIN.issuperset(kinds):
            yield encode_numbers(safe(dict(attributes), finite=finite))
            continue
        key = *attributes, values, kinds
        text = text_by_key.get(key)
        if text is None:
            text = text_by_key[key] = encode(safe(dict(attributes)))
        yield text


# Unpacked

BYTES_AT_ONCE = 1 << 22


class PackedAttributes:
    """The attributes of spans by row, stored as JSON and decoded on access."""

    def __init__(self, count: int, rows: Int64s, numbers: Column, ends: Int64s, texts: bytes | bytearray) -> None:
        self._rows, self._numbers, self._ends, self._texts = rows, numbers, ends, texts
        self._place = np.full(count, NONE, dtype=np.int32)
        self._place[rows] = np.arange(len(rows), dtype=np.int32)

    def __getitem__(self, row: int, /) -> Mapping[str, AttributeValue]:
        place = self._place[row]
        return {} if place < 0 else self._decode(int(self._numbers[place]))

    def _decode(self, number: int) -> dict[str, Any]:
        (attributes,) = decode_texts([self._text(number)])
        return attributes

    def _text(self, number: int) -> bytes:
        first = int(self._ends[number - 1]) if number else 0
        return bytes(self._texts[first : int(self._ends[number])])

    def rows(self) -> Int64s:
        return self._rows

    def having(self, name: str) -> Int64s:
        """Return the rows with an attribute of this name, in order. JSON without nested objects is not decoded, because
        each text before a colon is a name."""
        written, texts, ends = json.dumps(name, ensure_ascii=False).encode(), self._texts, self._ends
        at = np.fromiter((match.start() for match in re.finditer(re.escape(written) + rb"\s*:", texts)), np.int64)
        text_of_match = np.searchsorted(ends, at, side="right")
        numbers, braces = distinct(text_of_match), _find_byte(b"{", texts)
        firsts = np.where(numbers > 0, ends[numbers - 1], 0)
        are_flat = np.searchsorted(braces, ends[numbers]) - np.searchsorted(braces, firsts) == 1
        are_flat &= ~np.isin(numbers, text_of_match[np.frombuffer(texts, dtype=np.uint8)[at - 1] == ord("\\")])
        has = np.zeros(len(ends), dtype=np.bool_)
        has[numbers[are_flat]] = True
        for number in numbers[~are_flat].tolist():
            has[number] = name in self._decode(number)
        return self._rows[has[self._numbers]]

    def values(self, name: str, rows: Int64s) -> list[AttributeValue | None]:
        """Return the values of an attribute in some rows. JSON that rows share is decoded once."""
        places = self._place[rows]
        of_rows = np.full(len(rows), NONE, dtype=np.int64)
        of_rows[places >= 0] = self._numbers[places[places >= 0]]
        numbers = distinct(of_rows[of_rows != NONE])
        value_in, texts = _make_reader(name), self._texts
        firsts, ends = np.where(numbers > 0, self._ends[numbers - 1], 0), self._ends[numbers]
        values: dict[int, AttributeValue | None] = {NONE: None}
        for number, first, end in zip(numbers.tolist(), firsts.tolist(), ends.tolist(), strict=True):
            values[number] = value_in(bytes(texts[first:end]))
        return list(map(values.__getitem__, of_rows.tolist()))

    def distinct(self, rows: Int64s) -> tuple[Int64s, Sequence[Mapping[str, AttributeValue]]]:
        places = self._place[rows]
        with_attributes = np.flatnonzero(places >= 0)
        distinct_numbers, numbers = ranked(self._numbers[places[with_attributes]])
        set_of_row = np.full(len(rows), NONE, dtype=np.int64)
        set_of_row[with_attributes] = numbers
        return set_of_row, decode_texts(map(self._text, distinct_numbers.tolist()))


def _find_byte(byte: bytes, texts: bytes | bytearray) -> Int64s:
    """Return the indices of a byte in the texts. The search is done in chunks, to bound the memory."""
    every = np.frombuffer(texts, dtype=np.uint8)
    parts = [
        np.flatnonzero(every[first : first + BYTES_AT_ONCE] == ord(byte)) + first
        for first in range(0, len(every), BYTES_AT_ONCE)
    ]
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def decode_texts(texts: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the attributes in some JSON texts, with lists as tuples. Texts are decoded together, in half of the time.
    Raises `TraceError` if a text is no JSON object."""
    try:
        objects = json.loads(b"[%b]" % b",".join(texts))
    except ValueError as problem:
        raise TraceError(f"the attributes of its spans are damaged ({problem!s:.80}); record it again") from problem
    if not all(isinstance(attributes, dict) for attributes in objects):
        raise TraceError("its attributes are not valid; record it again")
    return [{key: convert_lists(value) for key, value in attributes.items()} for attributes in objects]


@lru_cache(maxsize=64)
def _make_reader(name: str) -> Callable[[bytes], Any]:
    """Return a function that reads the value of one attribute from JSON, without making objects of other values."""

    def value_in(text: bytes) -> Any:
        try:
            return convert_lists(decode(text).value)
        except msgspec.MsgspecError:  # JSON has no infinity, and attributes may
            return decode_texts([text])[0].get(name)

    try:
        only_value = msgspec.defstruct("Attributes", [("value", Any, None)], rename={"value": name})
    except ValueError:  # a name with quotes
        return lambda text: decode_texts([text])[0].get(name)
    decode: Callable[[bytes], Any] = msgspec.json.Decoder(only_value).decode
    return value_in


def convert_lists(value: Any) -> Any:
    """Return an attribute's value with lists as tuples."""
    if not isinstance(value, list):
        return value
    return tuple([convert_lists(item) if isinstance(item, list) else item for item in value])


def unpack_columns(arrays: Arrays, facts: Mapping[str, Any], sites: Sequence[Site]) -> Columns:
    """Return the trace of a file's arrays. Raises `ValueError` and `LookupError` for damaged arrays."""
    span_id, start_ns = summed(arrays["span_id_steps"]), summed(arrays["start_ns_steps"])
    total_ns = arrays["total_ns"].astype(np.int64)
    if len(span_id):
        span_id, start_ns = span_id + arrays["firsts"][0], start_ns + arrays["firsts"][1]
    count = len(span_id)
    dense = ("rows_to_parent", "thread", "task", "start_ns_steps", "total_ns", "children_ns", "site")
    if {len(arrays[name]) for name in dense} != {count}:
        raise ValueError("its arrays are of different lengths; it is damaged")
    above = np.arange(count) - arrays["rows_to_parent"]
    _check_rows(above, count)
    _check_rows(arrays["thread"], len(arrays["thread_ids"]))
    _check_rows(arrays["task"], len(arrays["task_ids"]))
    is_top = arrays["rows_to_parent"] == 0
    errors, labels = _check_texts(facts["errors"]), _check_texts(facts["labels"])
    return Columns(
        sites=tuple(sites),
        errors=errors,
        span_id=span_id,
        parent_id=_fill_rare(arrays, "parent_id", np.where(is_top, 0, span_id[above])),
        root_id=_fill_rare(arrays, "root_id", span_id[topmost_rows(np.where(is_top, NONE, above).astype(np.int32))]),
        thread_id=arrays["thread_ids"].astype(np.int64)[arrays["thread"]],
        task_id=arrays["task_ids"].astype(np.int64)[arrays["task"]],
        start_ns=start_ns,
        end_ns=start_ns + total_ns,
        active_ns=_fill_rare(arrays, "active_ns", total_ns.copy()),
        self_ns=total_ns - arrays["children_ns"],
        site=arrays["site"].astype(np.int32),
        error=_fill_rare(arrays, "error", np.full(count, NONE, dtype=np.int64)).astype(np.int32),
        clipped=_fill_rare(arrays, "clipped", np.zeros(count, dtype=np.int64)).astype(np.bool_),
        device=_unpack_intervals(arrays, start_ns, labels),
        attributes=_unpack_attributes(arrays, count),
        remote={
            int(row): RemoteParent(
                int(trace_id, 16), int(span_id, 16), int(flags), bool(is_local), bool(in_server_span)
            )
            for row, trace_id, span_id, flags, is_local, in_server_span in facts["remote"]
        },
        own_id=_fill_rare(arrays, "own_id", span_id.copy()) if "own_id" in arrays else span_id,
    )


def _check_texts(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError("a table of names in it is not valid")
    return tuple(names)


def _check_rows(rows: Column, count: int) -> None:
    if len(rows) and not 0 <= rows.min() <= rows.max() < count:
        raise ValueError("it refers to a row that does not exist; it is damaged")


def _fill_rare(arrays: Arrays, name: str, usual: Int64s) -> Int64s:
    rows = summed(arrays[f"{name}_row_steps"])
    _check_rows(rows, len(usual))
    usual[rows] = arrays[name]
    return usual


def _unpack_intervals(arrays: Arrays, start_ns: Int64s, labels: tuple[str, ...]) -> DeviceIntervals:
    row = summed(arrays["device_row_steps"])
    _check_rows(row, len(start_ns))
    begin_ns = start_ns[row] + arrays["device_after_ns"]
    return DeviceIntervals(
        row=row.astype(np.int32),
        device=arrays["device"].astype(np.int64),
        stream=arrays["device_stream"].astype(np.int64),
        start_ns=begin_ns,
        end_ns=begin_ns + arrays["device_total_ns"],
        label=arrays["device_label"].astype(np.int32),
        uncertainty_ns=arrays["device_uncertainty_ns"].astype(np.int64),
        labels=labels,
    )


def _unpack_attributes(arrays: Arrays, count: int) -> PackedAttributes:
    rows, ends = summed(arrays["attributes_row_steps"]), summed(arrays["attributes_lengths"])
    numbers, texts = arrays["attributes"], arrays["attributes_bytes"].tobytes()
    _check_rows(rows, count)
    _check_rows(numbers, len(ends))
    if len(rows) != len(numbers) or (len(ends) and (ends[-1] != len(texts) or (np.diff(ends) < 0).any())):
        raise ValueError("its attributes are cut off; it is damaged")
    return PackedAttributes(count, rows, numbers, ends, texts)


# Columns that grow


MOST_KNOWN = 10_000
"""The maximum number of distinct attribute texts that rows share. Any further text is stored once per row."""


def column(numbers: array[int]) -> Int64s:
    """Return a view of an array's 64-bit numbers. The array must not grow while the view exists."""
    return np.frombuffer(numbers, dtype=np.int64)


def extend(column: array[int], numbers: Sequence[int]) -> None:
    """Append 64-bit numbers to a column. `array.extend` takes four times as long."""
    column.frombytes(pack(f"{len(numbers)}q", *numbers))


def rank_of(order: NDArray[np.int64]) -> Int32s:
    """Return the index of each row in an order."""
    rank = np.empty(len(order), dtype=np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    return rank


class GatheredAttributes:
    """Collects the attributes of rows as JSON, with equal texts stored once. `refuse` raises for an invalid text."""

    def __init__(self, refuse: Callable[[bytes], None] | None = None) -> None:
        self._refuse = refuse
        self._known: dict[bytes, int] = {}
        self._texts = bytearray()
        self._ends = array("q")
        self._rows = array("q")
        self._numbers = array("q")

    def add(self, row: int, text: bytes) -> None:
        """Add the attributes of a new row."""
        number = self._known.get(text)
        if number is None:
            if self._refuse is not None:
                self._refuse(text)
            number = len(self._ends)
            self._texts += text
            self._ends.append(len(self._texts))
            if number < MOST_KNOWN:
                self._known[text] = number
        self._rows.append(row)
        self._numbers.append(number)

    def add_all(self, rows: Sequence[int], texts: Sequence[bytes]) -> None:
        """Add the attributes of new rows. Equal texts are rare here, so each is stored on its own."""
        number = len(self._ends)
        extend(self._ends, [*accumulate(map(len, texts), initial=len(self._texts))][1:])
        self._texts += b"".join(texts)
        extend(self._rows, rows)
        extend(self._numbers, range(number, number + len(rows)))

    def packed(self, rank: Int32s) -> PackedAttributes:
        """Return the attributes of rows, which get the numbers in `rank`."""
        rows = rank[column(self._rows)]
        order = np.argsort(rows, kind="stable")
        numbers = column(self._numbers).astype(np.int32)[order]
        return PackedAttributes(len(rank), rows[order].astype(np.int64), numbers, column(self._ends), self._texts)


def to_json(attributes: Mapping[str, object]) -> bytes:
    """Return attributes as JSON. Names are not escaped, because `PackedAttributes.having` searches the text for
    them."""
    try:
        text = msgspec.json.encode(attributes)
    except (ValueError, OverflowError):
        text = b"null"
    # msgspec writes null for numbers that JSON does not have, such as infinity.
    if b"null" not in text:
        return text
    return json.dumps(attributes, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")
