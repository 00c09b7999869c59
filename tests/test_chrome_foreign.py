"""Other profilers' traces: slices of any kind, in blocks of any size, with the attributes and trees that they have."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import tracemalloc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fuzz_traces import facts
from hypothesis import given
from hypothesis import strategies as st

from instrument import chrome
from instrument.chrome import event_reading, slice_reading
from instrument.chrome.slice_reading import Slices
from instrument.errors import TraceError
from instrument.recording.spans import Span, read_flops

TIMES = st.one_of(
    st.integers(-50, 50), st.integers(0, 1 << 54), st.floats(0, 50), st.floats(-1e16, 1e16),
    st.integers(0, 9 * 10**12).map(lambda number: number / 1000), st.sampled_from([0.0005, 0.0015, -0.0, 1e3]),
)  # fmt: skip
NAMES = st.sampled_from(
    ["aten::mm", "f", "caf\u00e9", 'a"b', "", "ProfilerStep#3", "ProfileStep#2[1.5 ms]", "\U0001f600", "memcpy[1.2 us]"]
)
CATEGORIES = st.sampled_from(
    [
        "cpu_op",
        "kernel",
        "gpu_memcpy",
        "cuda_runtime",
        "gpu_user_annotation",
        "layer",
        "",
        "Kernel",
        "CudaRuntime",
        "UserDefined",
        "Forward",
        "Memset",
    ]
)
VALUES = st.one_of(
    st.integers(-3, 3), st.integers(-(1 << 70), 1 << 70), st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(), st.none(), st.sampled_from(["", "text", "a\\b", "caf\u00e9"]), st.just({"x": [1, {}]}),
    st.lists(st.integers(0, 3), max_size=2),
)  # fmt: skip
KEYS = st.sampled_from(
    [
        "correlation",
        "correlation id",
        "start_time",
        "device",
        "stream",
        "External id",
        "bytes",
        "caf\u00e9",
        "",
        'a"b',
        "shape",
    ]
)


@st.composite
def events(draw: st.DrawFn) -> str:
    """An event as text: any keys, some twice, in any order, with blanks or without."""
    parts: list[tuple[str, Any]] = [
        ("ph", draw(st.sampled_from("XXXXXXBEbesfC"))),
        ("cat", draw(CATEGORIES)),
        ("name", draw(NAMES)),
        ("pid", draw(st.sampled_from([0, 9, 9, 9, "nine"]))),
        ("tid", draw(st.sampled_from([1, 7, 7, 7, "seven", "7(Python)"]))),
        ("ts", draw(TIMES)),
        ("dur", draw(st.one_of(st.integers(0, 9), st.floats(0, 1e9), TIMES))),
    ]
    args = draw(st.lists(st.tuples(KEYS, VALUES), max_size=4))
    if draw(st.integers(0, 9)) == 0:
        args += [("Input Dims", [[3, 4], [4, 5]])]
    parts = [part for part in parts if draw(st.integers(0, 19))]
    parts += [("id", draw(st.sampled_from([1, "0x5"])))] * draw(st.booleans())
    parts += draw(st.lists(st.sampled_from([("ts", 5), ("other", [1, {}]), ("name", "again")]), max_size=1))
    blank = draw(st.sampled_from(["", " ", "\n "]))
    is_ascii = draw(st.booleans())

    def text_of(pairs: list[tuple[str, str]]) -> str:
        return "{" + ",".join(f"{json.dumps(key, ensure_ascii=is_ascii)}:{blank}{value}" for key, value in pairs) + "}"

    written = [(key, json.dumps(value, ensure_ascii=is_ascii)) for key, value in parts]
    its = text_of([(key, json.dumps(value, ensure_ascii=is_ascii)) for key, value in args])
    return text_of([*written, ("args", its)] if draw(st.integers(0, 9)) else written)


def outcome(path: Path) -> tuple[str, Any]:
    try:
        return "loaded", facts(chrome.load(path))
    except TraceError as error:
        return "refused", str(error)


@given(st.lists(events(), max_size=8))
def test_random_events_are_read_alike_in_blocks_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, found: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "drawn.json"
    path.write_text('{"traceEvents": [' + ", ".join(found) + "]}", encoding="utf-8")
    ours = outcome(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_reading, "BLOCK_BYTES", 7)
        again = outcome(path)
    assert ours[0] == again[0]
    if ours[0] == "loaded":
        assert ours == again


@pytest.mark.parametrize(
    ("args", "attributes"),
    [
        ('{"stream": 0, "stream": []}', {}),
        ('{"stream": [], "stream": 0}', {"stream": 0}),
        ('{"a": 1, "stream": [], "stream": 0}', {"a": 1, "stream": 0}),
        ('{"a": "stream", "stream": [1]}', {"a": "stream"}),
        ('{"stream": 0, "stream": null}', {}),
        ('{"stream": 0, "stream": 1}', {"stream": 1}),
        (json.dumps({"stream": 0, **{f"list {number}": [number] for number in range(99)}}), {"stream": 0}),
    ],
)
def test_the_last_value_of_a_repeated_argument_counts(tmp_path: Path, args: str, attributes: dict[str, Any]) -> None:
    path = tmp_path / "repeated.json"
    path.write_text(f'{{"traceEvents": [{{"ph": "X", "ts": 1, "dur": 0, "args": {args}}}]}}')
    assert chrome.load(path)[0].spans[0].attributes == attributes


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30), st.integers(1, 2)), max_size=40))
def test_a_slice_is_in_the_newest_slice_around_it(tmp_path: Path, slices: list[tuple[int, int, int]]) -> None:
    """The rule also holds for slices that cross each other, and in a copy of the file that we write."""
    path = tmp_path / "drawn.json"
    found = [{"ph": "X", "name": "f", "pid": 9, "tid": tid, "ts": at, "dur": dur} for at, dur, tid in slices]
    path.write_text(json.dumps(found))
    spans = chrome.load(path)[0].spans
    for index, span in enumerate(spans):
        holding = [
            one.span_id
            for one in spans[:index]
            if one.thread_id == span.thread_id and one.start_ns <= span.start_ns and span.end_ns <= one.end_ns
        ]
        assert span.parent_id == (holding[-1] if holding else 0)


def test_the_ranges_of_a_trace_with_stacks_hold_what_ran_in_them(tmp_path: Path) -> None:
    """torch.profiler begins a range within the Python frame of `__enter__` and ends it within that of `__exit__`."""
    slices = [
        ("python_function", "main", 0, 100), ("python_function", "__enter__", 10, 5),
        ("user_annotation", "mine", 12, 70), ("python_function", "forward", 20, 50), ("cpu_op", "aten::mm", 30, 30),
        ("python_function", "__exit__", 80, 10),
    ]  # fmt: skip
    path = tmp_path / "torch.json"
    path.write_text(
        json.dumps([{"ph": "X", "pid": 9, "tid": 7, "cat": c, "name": n, "ts": t, "dur": d} for c, n, t, d in slices])
    )
    trace, _ = chrome.load(path)
    names = {span.span_id: span.site.name for span in trace.spans}
    assert {span.site.name: (names.get(span.parent_id), span.self_ns // 1000) for span in trace.spans} == {
        "main": (None, 20), "__enter__": ("main", 5), "mine": ("main", 20), "forward": ("mine", 20),
        "aten::mm": ("forward", 30), "__exit__": ("main", 10),
    }  # fmt: skip
    again, _ = chrome.load(chrome.dump(tmp_path / "again.json", trace))
    written = [(one.parent_id, one.self_ns) for one in again.spans]
    assert written == [(one.parent_id, one.self_ns) for one in trace.spans]


@pytest.mark.parametrize("ts", ["999999999999999999", "-999999999999999999", "9007199254740992", "1.5", None])
@pytest.mark.parametrize("dur", ["999999999999999999", "9007199254740990", "0.5", None])
def test_slices_beyond_all_times_and_those_without_one_are_left_out(
    tmp_path: Path, ts: str | None, dur: str | None
) -> None:
    path = tmp_path / "torch.json"
    when = "".join(f',"{key}":{value}' for key, value in (("ts", ts), ("dur", dur)) if value)
    lane = '{"ph":"X","name":"f","pid":9,"tid":7'
    path.write_text(f'[{lane},"ts":5.5,"dur":1}},{lane}{when}}}]')
    trace, _ = chrome.load(path)
    is_sound = (ts, dur) == ("1.5", "0.5")
    assert len(trace.spans) == 1 + is_sound
    assert [(count, what.partition(", the first at ")[2]) for what, count in trace.losses.items()] == [
        (1, "event 2")
    ] * (not is_sound)


def event_text(**changes: Any) -> str:
    facts = {"ph": "X", "cat": "cpu_op", "name": "g", "pid": 9, "tid": 7, "ts": 2, "dur": 1.5, **changes}
    return json.dumps({key: value for key, value in facts.items() if value is not ...}, ensure_ascii=False)


FIRST = event_text(name="f", ts=1, dur=5)
LATE = event_text(ts=1615207264505000, dur=6)
IN = [("f", 1000, 5000, None), ("g", 2000, 1500, "f")]
ONE = IN[:1]

BOTH = f"{FIRST},{event_text()}"


def second(**changes: Any) -> str:
    """A file of two events, of which the second is changed."""
    return f"[{FIRST},{event_text(**changes)}]"


def inner(name: str) -> list[Any]:
    return [*ONE, (name, 2000, 1500, "f")]


NAMES_LEFT_OUT = "names of threads and processes that are no text"
UNSOUND: dict[str, tuple[str | bytes, list[Any], dict[str, int]]] = {
    "a line end in a text": (f"[{BOTH}]".replace('"g"', '"g\n(1)"'), inner("g\n(1)"), {}),
    "a tab in a text": (f"[{BOTH}]".replace('"g"', '"g\th"'), inner("g\th"), {}),
    "backslashes that escape nothing": (
        f"[{BOTH}]".replace('"g"', '"a\\cuda\\__init__.py \\"x\\" \\u12"'), inner('a\\cuda\\__init__.py "x" \\u12'), {},
    ),
    "half of a character": (f"[{BOTH}]".replace('"g"', '"a\\ud83d"'), inner("a\ufffd"), {}),
    "latin 1": (second(name="fée").encode("latin-1"), inner("f\ufffde"), {"characters that are no UTF-8": 1}),
    "a comma behind the last event": (f"[{BOTH},\n]", IN, {}),
    "a comma behind the last key": (f'{{"traceEvents":[{BOTH}],}}', IN, {}),
    "no commas": (f"[{FIRST}\n{event_text()}]", IN, {}),
    "no bracket at the end": (f"[{BOTH}", IN, {"closing brackets that are missing": 1}),
    "no brackets at the end": (f'{{"traceEvents":[{BOTH}', IN, {"closing brackets that are missing": 2}),
    "an event that is cut off": (
        f"[{BOTH[:-20]}", ONE, {"events that are cut off @ event 2": 1, "closing brackets that are missing": 1}
    ),
    "another document behind it": (f"[{BOTH}]\n[{BOTH}]", IN, {"what follows its end": 1}),
    "no length": (second(dur=...), ONE, {"slices of no length @ event 2": 1}),
    "a negative length": (f"[{event_text(dur=-1)},{FIRST}]", ONE, {"slices of a negative length @ event 1": 1}),
    "an endless length": (second(dur=1.8e16), ONE, {"slices of no length @ event 2": 1}),
    "no time": (second(ts=...), ONE, {"slices without a time @ event 2": 1}),
    "times as texts": (second(ts="2", dur="1.5"), IN, {}),
    "a word for a time": (second(ts="soon"), ONE, {"slices without a time @ event 2": 1}),
    "a number for a phase": (second(ph=5), ONE, {"events without a phase @ event 2": 1}),
    "a thread as a float": (second(tid=7.0), IN, {}),
    "a list as a thread": (second(tid=[7]), [*ONE, ("g", 2000, 1500, None)], {}),
    "a number as a name": (second(name=5), inner("5"), {}),
    "a number as a category": (second(cat=5), IN, {}),
    "a text for arguments": (second(args="x"), IN, {"arguments of events that are no object @ event 2": 1}),
    "no arguments": (second(args=None), IN, {}),
    "NaN in arguments": (second(args={"x": float("nan")}), IN, {}),
    "NaN for a device": (second(cat="kernel", args={"device": float("nan"), "stream": 7}), IN, {}),
    "a number for an event": (f"[{FIRST},5,{event_text()},null]", IN, {"events that are no object @ event 2": 2}),
    "a thread's name that is missing": (
        f'[{FIRST},{{"ph":"M","name":"thread_name","pid":9,"tid":7}},{event_text()}]', IN,
        {f"{NAMES_LEFT_OUT} @ event 2": 1},
    ),
    "a number for a thread's name": (
        f'[{BOTH},{{"ph":"M","name":"thread_name","pid":9,"tid":7,"args":{{"name":100}}}}]', IN,
        {f"{NAMES_LEFT_OUT} @ event 3": 1},
    ),
    "a text for the time of day": (f'{{"baseTimeNanoseconds":"1778650000000000000","traceEvents":[{BOTH}]}}', IN, {}),
    "no number for the time of day": (
        f'{{"baseTimeNanoseconds":[],"traceEvents":[{BOTH}]}}', IN,
        {"times of day that are no number @ the key 'baseTimeNanoseconds'": 1},
    ),
    "an allocation without a time": (
        f'[{BOTH},{{"ph":"i","name":"[memory]","pid":9,"tid":7,"args":{{"Bytes":5}}}}]', IN,
        {"allocations that say no time or size @ event 3": 1},
    ),
    "time 0 among absolute times": (
        f"[{event_text(ts=0)},{LATE},{event_text(ts=0)}]", [("g", 1615207264505000000, 6000, None)],
        {"slices at time 0 among absolute times @ event 1": 2},
    ),
}  # fmt: skip
"""Files by what is wrong with them: the slices with their parents, and what is left out, with its place."""


@pytest.mark.parametrize("name", UNSOUND)
@pytest.mark.parametrize("block_bytes", [1 << 17, 7])
def test_the_sound_part_of_a_damaged_file_is_read_and_the_rest_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, block_bytes: int
) -> None:
    monkeypatch.setattr(event_reading, "BLOCK_BYTES", block_bytes)
    content, slices, left_out = UNSOUND[name]
    path = tmp_path / "other.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    trace, _ = chrome.load(path)
    names = {span.span_id: span.site.name for span in trace.spans}
    found = [(one.site.name, one.start_ns, one.total_ns, names.get(one.parent_id)) for one in trace.spans]
    assert found == slices
    assert trace.end_ns - trace.start_ns < 10**9
    told = {what.replace(", the first at ", " @ "): count for what, count in trace.losses.items()}
    assert {what.partition(" @ byte ")[0]: count for what, count in told.items()} == left_out


@pytest.mark.parametrize("block_bytes", [1 << 17, 7])
def test_the_first_byte_that_is_no_text_is_named_by_its_place_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(event_reading, "BLOCK_BYTES", block_bytes)
    path = tmp_path / "other.json"
    content = second(name="größe").encode().replace("ß".encode(), b"\xdf")
    path.write_bytes(content)
    (what,) = chrome.load(path)[0].losses
    assert what.endswith(f"byte {content.index(0xDF)}"), what


@pytest.mark.parametrize("base", ["0", "1778650000123456", "4398046511103", "4398046511105"])
def test_a_slice_is_as_long_as_it_says_wherever_it_is(tmp_path: Path, base: str) -> None:
    """A float has no nanoseconds of the time since 1970: a sum of two would be off by a quarter of a microsecond."""
    path = tmp_path / "other.json"
    texts = [
        f'{{"ph":"X","name":"f","pid":9,"tid":7,"ts":{base}.{at:03},"dur":0.{length:03}}}'
        for at, length in ((1, 997), (2, 13), (15, 400), (415, 583))
    ]
    path.write_text(f"[{','.join(texts)}]")
    spans = chrome.load(path)[0].spans
    assert [(one.start_ns - int(base) * 1000, one.total_ns) for one in spans] == [
        (1, 997),
        (2, 13),
        (15, 400),
        (415, 583),
    ]
    assert [one.parent_id for one in spans] == [0, 1, 1, 1]


@given(st.lists(st.tuples(st.integers(0, 40_000), st.integers(1, 20_000)), min_size=1, max_size=20))
def test_slices_with_parts_of_a_nanosecond_lie_in_what_holds_them(
    tmp_path: Path, slices: list[tuple[int, int]]
) -> None:
    """Begin and length are rounded each, by which one may end a nanosecond behind what holds it."""
    path = tmp_path / "drawn.json"
    outer = {"ph": "X", "name": "outer", "pid": 9, "tid": 7, "ts": 0.0004, "dur": 60.0004}
    inner = [{**outer, "name": "f", "ts": (at + 5) / 10_000, "dur": length / 10_000} for at, length in slices]
    last = {**outer, "name": "last", "ts": 59.9, "dur": 0.1008}
    path.write_text(json.dumps([outer, *inner, last]))
    spans = chrome.load(path)[0].spans
    assert all(one.parent_id for one in spans[1:])
    assert [one.total_ns for one in spans if one.site.name == "outer"] == [60_000]


def torch_like(**more: Any) -> list[dict[str, Any]]:
    """An operator, the call that launches its kernel, the kernel, and an arrow between them."""
    on_host = {"ph": "X", "pid": 9, "tid": 7}
    return [
        {**on_host, "cat": "cpu_op", "name": "aten::mm", "ts": 100.5, "dur": 20.25,
         "args": {"External id": 5, "Input Dims": [[3, 4], [4, 5]], "Concrete Inputs": ["", ""], **more}},
        {**on_host, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 105.125, "dur": 4,
         "args": {"correlation": 3}},
        {"ph": "s", "id": 3, "pid": 9, "tid": 7, "ts": 105.125, "cat": "ac2g", "name": "ac2g"},
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 21, "ts": 112, "dur": 25.5,
         "args": {"device": 1, "stream": 21, "correlation": 3, "grid": [1, 1, 1]}},
    ]  # fmt: skip


def loaded(path: Path, args: str) -> Span:
    """The span of an event with these arguments, as the text of JSON."""
    path.write_text(f'[{{"ph":"X","pid":9,"tid":7,"ts":1,"dur":2,"name":"f","args":{args}}}]', encoding="utf-8")
    (span,) = chrome.load(path)[0].spans
    return span


ARGUMENTS: list[tuple[str, dict[str, Any]]] = [
    ("{}", {}),
    ('{ "External id" : 7, "on": true, "rate": 1e99 }', {"External id": 7, "on": True, "rate": 1e99}),
    ('{"stack": "a \\"quoted\\" line, \\u00e9\\ud83d\\ude00", "é": "ü"}', {"stack": 'a "quoted" line, é😀', "é": "ü"}),
    ('{"flops": [1], "grid": {"flops": 3, "correlation": 5}, "none": null}', {}),
    ('{"flops": 1, "x": "flops", "flops": null}', {"x": "flops"}),
    ('{"flops": {"a": 1}, "x": 1, "flops": 5}', {"flops": 5, "x": 1}),
    ('{"x": [1], "flops": 7, "y": {"é": 2}}', {"flops": 7}),
    ('{"a \\"flops" : 1, "x": "\\"flops\\": 5"}', {'a "flops': 1, "x": '"flops": 5'}),
    ('{"x": "{", "flops" : 5}', {"x": "{", "flops": 5}),
]


@pytest.mark.parametrize(("args", "expected"), ARGUMENTS)
def test_arguments_are_attributes_if_they_are_numbers_texts_or_truths(
    tmp_path: Path, args: str, expected: dict[str, Any]
) -> None:
    path = tmp_path / "other.json"
    for name in ("flops", "correlation", "x", "é", "stack"):
        assert (name in loaded(path, args).attributes) == (name in expected)
        assert len(chrome.read(path).trace.columns.attributes.rows_with_attribute(name)) == (name in expected)
    assert copy.deepcopy(loaded(path, args)).attributes == expected
    assert pickle.loads(pickle.dumps(loaded(path, args))).attributes == expected
    span = loaded(path, args)
    assert span == replace(span)
    assert list(span.attributes.items()) == list(expected.items())
    assert span.attributes is span.attributes
    (again,) = chrome.load(chrome.dump(tmp_path / "again.json", chrome.load(path)[0]))[0].spans
    assert again.attributes == expected


def test_the_text_of_attributes_goes_with_the_last_span_that_needs_it(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    event = {"ph": "X", "pid": 9, "tid": 7, "dur": 1, "name": "f"}
    path.write_text(json.dumps([{**event, "ts": at, "args": {"note": f"{at} {'x' * 1000}"}} for at in range(2000)]))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        spans = chrome.load(path)[0].spans
        assert tracemalloc.get_traced_memory()[0] - before > 2_000_000
        assert [span.attributes["note"].split()[0] for span in spans[::1000]] == ["0", "1000"]
        spans[0].attributes = {"mine": 1}
        assert spans[0].attributes == {"mine": 1}
        del spans
        assert tracemalloc.get_traced_memory()[0] - before < 200_000
    finally:
        tracemalloc.stop()


def test_lists_that_are_no_attributes_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    event = {"ph": "X", "pid": 9, "tid": 7, "dur": 1, "name": "f"}
    args = {"Input Dims": [list(range(500))] * 2, "name": "x", "shapes": {"a": [1] * 500}}
    path.write_text(json.dumps([{**event, "ts": at, "args": {**args, "at": at}} for at in range(500)]))
    chrome.load(path)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        spans = chrome.load(path)[0].spans
        assert tracemalloc.get_traced_memory()[0] - before < 500 * 500
    finally:
        tracemalloc.stop()
    assert spans[7].attributes == {"name": "x", "at": 7}


def test_attributes_may_be_read_while_they_are_read(tmp_path: Path) -> None:
    """To read them makes a dict, at which the collector of cycles may run code that reads them too."""
    path = tmp_path / "other.json"
    expected = {f"key {number}": "v" * 20 for number in range(40)}
    span = loaded(path, json.dumps(expected))
    found: list[Any] = []

    def read_too(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and not found:
            found.append(None)
            found[0] = span.attributes

    threshold = gc.get_threshold()
    spare = [{} for _ in range(200)]  # type: ignore[var-annotated]
    gc.callbacks.append(read_too)
    gc.set_threshold(1)
    try:
        assert span.attributes == expected
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(read_too)
    assert all(one == expected for one in found)
    assert len(spare) == 200


@pytest.mark.parametrize(
    ("outer", "inner", "told"),
    [
        (("outer", {"flops": 1000}), ("aten::mm", "dims"), [1000, 0]),
        (("aten::mm", "dims"), ("inner", {"flops": 1000}), [48, 0]),
        (("aten::mm", "dims"), ("inner", {"flops": "many"}), [48, 0]),
        (("outer", {"flops": "many"}), ("aten::mm", "dims"), [0, 48]),
        (("outer", {"flops": 1000}), ("inner", {"flops": 7}), [1000, 7]),
    ],
)
def test_operations_count_for_the_outermost_that_reports_them(
    tmp_path: Path, outer: Any, inner: Any, told: list[int]
) -> None:
    """It holds where torch reports shapes. A file in which only arguments report some is taken as it is."""
    path = tmp_path / "torch.json"
    events = [
        {"ph": "X", "cat": "cpu_op", "pid": 9, "tid": 7, "ts": at, "dur": 10 - 2 * at, "name": name,
         "args": {"Input Dims": [[2, 3], [3, 4]]} if args == "dims" else args}
        for at, (name, args) in enumerate((outer, inner))
    ]  # fmt: skip
    path.write_text(json.dumps(events))
    spans = chrome.load(path)[0].spans
    assert [read_flops(span.attributes) for span in spans] == told
    assert ("flops" in spans[1].attributes) == (told[1] > 0)


def test_more_slices_than_may_be_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "torch.json"
    path.write_text(json.dumps(torch_like()))
    monkeypatch.setattr(slice_reading, "LIMIT_SPANS", 2)
    with pytest.raises(TraceError, match="more than 2 slices"):
        chrome.load(path)


@pytest.mark.parametrize("events", [torch_like(), [*torch_like(), 5]], ids=["read", "refused"])
def test_a_reader_goes_when_it_has_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Any]) -> None:
    """The scanner's callbacks would keep the reader for ever if the reader kept the scanner."""
    path = tmp_path / "torch.json"
    path.write_text(json.dumps(events))
    readers: list[weakref.ref[Slices]] = []
    make = Slices.__init__
    monkeypatch.setattr(
        Slices, "__init__", lambda self, *more: (readers.append(weakref.ref(self)), make(self, *more))[1]
    )
    outcome(path)
    gc.collect()
    assert [reader() for reader in readers] == [None]
