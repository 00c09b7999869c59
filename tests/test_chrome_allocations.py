"""Allocations in files: a million of them come back exactly, in little memory, and damage is refused."""

from __future__ import annotations

import base64
import copy
import json
import pickle
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrument import chrome
from instrument.errors import TraceError
from instrument.recording.spans import Origin, Site, Span
from instrument.trace import metadata
from instrument.trace.trace import Allocation, Allocations, Trace

INT64 = 1 << 63
BASE_NS = 1000


def trace_of(found: Any, name: str = "f") -> Trace:
    spans = [Span(Site(name), 1, 0, 1, 1, 0, BASE_NS, BASE_NS + 50, 50, 50)]
    return Trace(Origin(1, "shop", 0, 0), BASE_NS, BASE_NS + 100, spans, allocations=found, watched=(BASE_NS, 1090))


def some(count: int) -> list[Allocation]:
    return [Allocation(at % 3 - 1, BASE_NS + at, 1, at * (-1) ** at, at << 45, at * at) for at in range(count)]


def loaded(path: Path) -> Trace:
    return chrome.load(path)[0]


# ---------------------------------------------------------------- in memory

NUMBERS = st.integers(-INT64, INT64 - 1)
ANY = st.builds(Allocation, *[NUMBERS] * 7)


@given(st.lists(ANY, max_size=8), st.integers(-9, 9), st.integers(-9, 9), st.sampled_from([1, 2, -1, -3]))
def test_packed_allocations_are_a_sequence_as_a_list_of_them_is(
    found: list[Allocation], first: int, last: int, step: int
) -> None:
    packed = Allocations.from_objects(found)
    assert list(packed) == found
    assert packed == found
    assert found == packed
    assert (len(packed), bool(packed)) == (len(found), bool(found))
    assert packed[first:last:step] == found[first:last:step]
    assert list(reversed(packed)) == found[::-1]
    assert [packed[at] for at in range(-len(found), len(found))] == found * 2
    assert packed.sort_by_time() == sorted(found, key=lambda one: one.at_ns)
    moved = packed.shift_times(BASE_NS)
    assert [one.at_ns for one in moved] == [one.at_ns + BASE_NS for one in found]
    assert (moved == found) is (not found)
    assert moved[first:last].shift_times(-BASE_NS) == found[first:last]
    for same in (pickle.loads(pickle.dumps(moved)), copy.copy(moved), copy.deepcopy(moved)):
        assert same == moved


def test_packed_allocations_say_what_they_are_and_what_they_are_not() -> None:
    packed = Allocations.from_objects(some(2))
    assert repr(packed) == f"Allocations({some(2)!r})"
    assert packed != some(3)
    assert packed != "ab"
    assert Allocations() == ()
    for place in (2, -3):
        with pytest.raises(IndexError):
            packed[place]
    with pytest.raises(TypeError):
        hash(packed)
    with pytest.raises(OverflowError, match="64 bits"):
        Allocations.from_objects([Allocation(0, INT64, 1, 1, 1, 1)])


# ---------------------------------------------------------------- there and back


@given(st.lists(st.builds(Allocation, NUMBERS, st.integers(-(1 << 62), 1 << 62), *[NUMBERS] * 5)), st.booleans())
def test_every_allocation_comes_back(tmp_path: Path, found: list[Allocation], packed: bool) -> None:
    path = chrome.dump(tmp_path / "trace.json", trace_of(Allocations.from_objects(found) if packed else found))
    again = loaded(path)
    assert again.allocations == found
    assert isinstance(again.allocations, Allocations)
    text = path.read_bytes()
    assert chrome.dump(tmp_path / "again.json", again).read_bytes() == text


def test_the_order_of_keys_and_the_blanks_of_a_file_do_not_change_its_allocations(tmp_path: Path) -> None:
    path = chrome.dump(tmp_path / "trace.json", trace_of(some(5)))
    found = json.loads(path.read_text())
    for style in ({"sort_keys": True}, {"indent": 3}, {"separators": (" ,\n", "\t:\r ")}):
        path.write_text(json.dumps(found, **style))
        assert loaded(path).allocations == some(5)


@pytest.mark.slow
def test_a_million_would_take_little_memory_to_write_and_56_bytes_each_to_read(tmp_path: Path) -> None:
    count = 20_000
    found = Allocations.from_objects([Allocation(0, at, 1, at % 999, at << 9, at) for at in range(count)])
    trace = trace_of(found)

    def peak_bytes(work: Any) -> int:
        tracemalloc.start()
        try:
            work()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    path = chrome.dump(tmp_path / "trace.json", trace_of([]))  # its modules are imported by then
    # 4096 as lists are 3 MiB, a block of text is 1 MiB; all are 1.1 MiB packed, and 8 MiB as lists.
    assert peak_bytes(lambda: chrome.dump(path, trace)) < 4 << 20
    held: list[Trace] = []
    assert peak_bytes(lambda: held.append(loaded(path))) < 5 << 20
    assert held[0].allocations.rows.nbytes == 56 * count  # type: ignore[attr-defined]


def test_a_file_that_torch_wrote_is_packed_and_in_order(tmp_path: Path) -> None:
    events = [
        {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": ts,
         "args": {"Bytes": 5, "Device Type": 1, "Device Id": 0, "Addr": ts}}
        for ts in (3, 1, 2)
    ]  # fmt: skip
    (tmp_path / "trace.json").write_text(json.dumps(events))
    again = loaded(tmp_path / "trace.json")
    assert isinstance(again.allocations, Allocations)
    assert [(one.at_ns, one.address) for one in again.allocations] == [(1000, 1), (2000, 2), (3000, 3)]
    assert again.watched == (1000, 3000)


# ---------------------------------------------------------------- damage

BAD_COLUMNS: list[Any] = [
    None, 5, "ab", [], {"allocation_device": 5}, {"allocation_device": ["|u1"]}, {"allocation_device": ["|O", "AAAA"]},
    {"allocation_device": [["|u1"], "AAAA"]}, {"allocation_device": ["|u1", 5]},
]  # fmt: skip


@pytest.mark.parametrize("value", BAD_COLUMNS, ids=repr)
def test_other_arrays_than_columns_are_refused(tmp_path: Path, value: Any) -> None:
    path = chrome.dump(tmp_path / "trace.json", trace_of(some(3)))
    document = json.loads(path.read_text())
    document["instrument"]["columns"] = value
    for sort_keys in (False, True):
        path.write_text(json.dumps(document, sort_keys=sort_keys))
        with pytest.raises(TraceError, match="cannot read the trace"):
            chrome.load(path)


def test_the_key_of_another_program_is_ignored_with_any_value(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for value in ({"allocations": [5, [1]]}, {"allocations": None}, {}, [], "ab", 5, {"Format": 3}):
        path.write_text(json.dumps({"instrument": value, "traceEvents": []}))
        assert loaded(path).spans == []


@pytest.mark.parametrize("text", ["AAAA", "not base64", base64.b64encode(zlib.compress(b"x" * 57)).decode(), "é"])
def test_text_that_is_no_column_is_refused(tmp_path: Path, text: str) -> None:
    path = chrome.dump(tmp_path / "trace.json", trace_of(some(3)))
    document = json.loads(path.read_text())
    for name in document["instrument"]["columns"]:
        damaged = copy.deepcopy(document)
        damaged["instrument"]["columns"][name][1] = text
        path.write_text(json.dumps(damaged))
        with pytest.raises(TraceError, match="cannot read the trace"):
            chrome.load(path)


def test_more_than_any_trace_has_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = chrome.dump(tmp_path / "trace.json", trace_of(some(5)))
    monkeypatch.setattr(metadata, "LIMIT_SPANS", 5)
    assert len(loaded(path).allocations) == 5
    monkeypatch.setattr(metadata, "LIMIT_SPANS", 4)
    with pytest.raises(TraceError, match="more than 4 kernels or allocations; record less"):
        chrome.load(path)
