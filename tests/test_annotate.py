"""A service changes an open span: attributes, another name, its outcome."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import subprocess
import sys
import threading
import tracemalloc
import weakref
from collections import UserDict
from collections.abc import AsyncIterator, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy
import pytest
from otlp_spans import ORIGIN, messages_of
from readback import spans_in, unreadable_counts

import instrument
from instrument import chrome
from instrument.recorder import attribute_checks
from instrument.recorder.attribute_checks import MOST_NAMES_PER_SITE, rename_span_of_frame, set_status_of_frame
from instrument.recording.spans import (
    ATTRIBUTE_LIMIT,
    BATCH_KEYS,
    FIRST_ITEM,
    ITEMS,
    KEY,
    LAST_ITEM,
    LONGEST_GAP,
    STATUS_CODE,
    VALUE_LIMIT,
    Site,
    Span,
)
from instrument.runtime.faults import FAULTS
from instrument.trace.trace import Trace


def attributes(recorder: Any) -> dict[str, dict[str, object]]:
    """Return the attributes of each span, without the facts of a generator's items."""
    items = {ITEMS, FIRST_ITEM, LAST_ITEM, LONGEST_GAP}
    return {
        span.site.name: {name: value for name, value in span.attributes.items() if name not in items}
        for span in spans_in(recorder)
    }


def exported(spans: list[Span]) -> list[Any]:
    return messages_of(spans)


def said(message: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in message.attributes}


def test_attributes_are_set_on_the_innermost_open_span_of_every_kind(recorder: Any) -> None:
    annotate = recorder.annotate_innermost

    def bare(**given: Any) -> None:
        annotate(**given)

    def call() -> None:
        bare(of="call")

    async def coroutine() -> None:
        await asyncio.sleep(0)
        bare(of="coroutine")

    def generator() -> Iterator[int]:
        bare(of="generator")
        yield 1
        bare(last=True)

    async def async_generator() -> AsyncIterator[int]:
        yield 1
        bare(of="async generator")

    async def run() -> None:
        await wrapped["coroutine"]()
        async for _ in wrapped["async_generator"]():
            pass

    wrapped = {
        made.__name__: recorder.wrap(made, Site(made.__name__))
        for made in (call, coroutine, generator, async_generator)
    }
    with recorder.make_scope("request", kind="request"):
        wrapped["call"]()
        list(wrapped["generator"]())
        bare(of="request")
    asyncio.run(run())
    with recorder.make_scope("scope", attributes={"given": 1}) as span:
        span.annotate(of="scope")
        with recorder.make_scope("inner"):
            span.annotate({"of.dotted": 2.5}, more=True)
    assert attributes(recorder) == {
        "call": {"of": "call"},
        "coroutine": {"of": "coroutine"},
        "generator": {"of": "generator", "last": True},
        "async_generator": {"of": "async generator"},
        "request": {"of": "request"},
        "scope": {"given": 1, "of": "scope", "of.dotted": 2.5, "more": True},
        "inner": {},
    }
    assert recorder.count_unusual_events() == {}


def test_a_task_or_thread_that_continues_a_span_annotates_that(recorder: Any) -> None:
    async def main() -> None:
        async def task() -> None:
            recorder.annotate_innermost(task=1)

        with recorder.make_scope("outer"):
            await asyncio.create_task(task())
            await asyncio.to_thread(recorder.annotate_innermost, thread=2)

    asyncio.run(main())
    with recorder.make_scope("in a thread"):
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(lambda: recorder.annotate_innermost(thread=3),))
        thread.start()
        thread.join()
    assert attributes(recorder) == {"outer": {"task": 1, "thread": 2}, "in a thread": {"thread": 3}}


def test_the_request_is_annotated_from_below_it_as_long_as_it_is_open(recorder: Any) -> None:
    async def main() -> None:
        async def app() -> None:
            with recorder.make_scope("work"):
                recorder.annotate_request(tenant="x")
                await ended.wait()
                recorder.annotate_request(tenant="y")

        ended = asyncio.Event()
        with recorder.make_scope("request", kind="request"):
            task = asyncio.create_task(app())
            await asyncio.sleep(0)
        ended.set()
        await task

    asyncio.run(main())
    with recorder.make_scope("no request"):
        recorder.annotate_request(tenant="z")
    assert attributes(recorder) == {"request": {"tenant": "x"}, "work": {}, "no request": {}}


def test_outside_of_a_span_and_while_nothing_is_recorded_it_does_nothing(recorder: Any) -> None:
    recorder.annotate_innermost(x=1)
    recorder.annotate_innermost(x=object())
    recorder.annotate_request(x=1)
    rename_span_of_frame(recorder, None, "x")
    set_status_of_frame(recorder, None, "ok", None, None)
    recorder.on = False
    with recorder.make_scope("off") as span:
        span.annotate(x=1)
        span.rename("y")
        span.set_status("error")
        recorder.annotate_innermost(x=1)
    assert spans_in(recorder) == []
    assert recorder.count_unusual_events() == {}


def test_spans_do_not_share_what_they_are_annotated_with(recorder: Any) -> None:
    scope = recorder.make_scope("scope", attributes={"given": 1})
    with scope:
        scope.annotate(first=1)
        ((_, before),) = recorder.open_rows()
        scope.annotate(second=2)
    with scope:
        pass
    scope.annotate(late=1)
    assert [dict(span.attributes) for span in spans_in(recorder)] == [
        {"given": 1, "first": 1, "second": 2},
        {"given": 1},
    ]
    assert before[10] == {"given": 1, "first": 1}


class Number(float):
    pass


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("text", "text"),
        (True, True),
        (-(2**63), -(2**63)),
        (1.5, 1.5),
        (Number(2.5), 2.5),
        ([1, 2], (1, 2)),
        ((1, 2.5), (1.0, 2.5)),
        (["a" * 300], ("a" * (VALUE_LIMIT - 3) + "...",)),
        ([], ()),
        ("a" * 300, "a" * (VALUE_LIMIT - 3) + "..."),
        (range(3), None),
        (2**63, None),
        (None, None),
        (object(), None),
        ([1, "a"], None),
        ([None], None),
        ({"a": 1}, None),
        (b"bytes", None),
        (numpy.bool_(True), True),
        (numpy.array(2.5), 2.5),
        (numpy.array(3), 3),
        (numpy.array(False), False),
        ([numpy.bool_(True), numpy.bool_(False)], (True, False)),
        ([numpy.int64(1), numpy.array(2)], (1, 2)),
        (numpy.array([1, 2]), None),
        (numpy.datetime64(5, "s"), None),
    ],
)
def test_values_that_opentelemetry_has_are_kept_and_others_are_counted(recorder: Any, given: Any, kept: Any) -> None:
    with recorder.make_scope("scope"):
        recorder.annotate_innermost(x=given, y=1)
    wanted = {"y": 1} if kept is None else {"x": kept, "y": 1}
    assert attributes(recorder) == {"scope": wanted}
    (span,) = spans_in(recorder)
    assert all(type(span.attributes[name]) is type(value) for name, value in wanted.items())
    assert recorder.count_unusual_events() == ({} if kept is not None else {"attributes of a kind that no span has": 1})
    assert (unreadable_counts() != {}) == (kept is None)


@pytest.mark.slow
def test_a_tensor_is_kept_where_it_is_one_number_of_the_host(recorder: Any) -> None:
    torch = pytest.importorskip("torch")
    with recorder.make_scope("scope"):
        recorder.annotate_innermost(whole=torch.tensor(7), part=torch.tensor(0.5, requires_grad=True))
        recorder.annotate_innermost(truth=torch.tensor(True), several=torch.tensor([1]))
        recorder.annotate_innermost(elsewhere=torch.empty((), device="meta"))
    (span,) = spans_in(recorder)
    assert span.attributes == {"whole": 7, "part": 0.5, "truth": True}
    assert recorder.count_unusual_events() == {"attributes of a kind that no span has": 2}


def test_each_class_of_what_is_left_out_is_named(recorder: Any, caplog: pytest.LogCaptureFixture) -> None:
    with recorder.make_scope("scope"):
        for given in (2**63, [1, "a"], numpy.array([1]), {}, {}, {}):
            recorder.annotate_innermost(x=given)
    (note,) = FAULTS.describe_unreadable_values()
    told = "dict 3, int of more than 64 bits 1, list of int and str 1, ndarray 1"
    assert note.startswith(f"annotate: not read: 6 times ({told}); the attribute x cannot be int")
    logged = [record.getMessage() for record in caplog.records]
    assert [text.partition("cannot be ")[2].partition(";")[0] for text in logged] == [
        "int of more than 64 bits", "list of int and str", "ndarray", "dict",
    ]  # fmt: skip


def test_names_that_are_none_and_mappings_that_raise_are_counted(recorder: Any) -> None:
    class Broken(UserDict[str, int]):
        def __getitem__(self, key: str) -> int:
            raise RuntimeError

    with recorder.make_scope("scope"):
        recorder.annotate_innermost({"": 1, 5: 2, "x" * 300: 3}, y=4)
        recorder.annotate_innermost(Broken(a=1), z=5)
        recorder.annotate_innermost("text")
    long = "x" * (VALUE_LIMIT - 3) + "..."
    assert attributes(recorder) == {"scope": {long: 3, "y": 4, "z": 5}}
    assert recorder.count_unusual_events() == {"attributes of a kind that no span has": 4}


class Lazy:
    """An object like Django's `request.user`: who asks for its class, as `isinstance` does, has it loaded."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("loaded from the database")

    @__class__.setter
    def __class__(self, _: Any) -> None: ...

    @property
    def name(self) -> str:
        raise RuntimeError("loaded from the database")


class Torn(list[int]):
    """A list with code of its own."""

    def __getitem__(self, _: Any) -> Any:
        raise RuntimeError("torn")


def test_no_code_of_what_is_given_is_run(recorder: Any) -> None:
    with recorder.make_scope("scope"):
        recorder.annotate_innermost(user=Lazy(), users=[Lazy()], torn=Torn([1, 2]))
        recorder.annotate_innermost(Lazy())
    assert attribute_checks.check_span_name(Lazy()) is None
    assert attribute_checks.make_status_attributes(Lazy(), None, None) is None
    assert attribute_checks.make_status_attributes("error", Lazy(), Lazy()) == {STATUS_CODE: "ERROR"}
    assert attributes(recorder) == {"scope": {"torn": (1, 2)}}
    assert recorder.count_unusual_events() == {"attributes of a kind that no span has": 3}


def test_a_span_has_at_most_the_allowed_number_of_attributes(recorder: Any) -> None:
    with recorder.make_scope("scope"):
        for number in range(ATTRIBUTE_LIMIT + 5):
            recorder.annotate_innermost(**{f"a{number}": number})
        recorder.annotate_innermost(a0="changed")
    (span,) = spans_in(recorder)
    assert len(span.attributes) == ATTRIBUTE_LIMIT
    assert span.attributes["a0"] == "changed"
    assert recorder.count_unusual_events() == {"attributes beyond the limit of a span": 5}


def test_a_renamed_span_and_what_is_below_it_count_under_the_new_name(recorder: Any) -> None:
    def call() -> None:
        rename_span_of_frame(recorder, None, "call of a kind")
        with recorder.make_scope("below"):
            pass

    recorder.wrap(call, Site("call", "op", "service", "call", "file.py", 3))()
    with recorder.make_scope("scope") as span:
        span.rename("other")
        span.rename("scope")
        span.rename("last")
    found = {tuple(site.name for site in row.path): row.totals.calls for row in recorder.tally().iterate_totals()}
    assert found == {("call of a kind",): 1, ("call of a kind", "below"): 1, ("last",): 1}
    (site,) = [span.site for span in spans_in(recorder) if span.site.name == "call of a kind"]
    assert (site.kind, site.function, site.line) == ("op", "service.call", 3)
    assert recorder.count_unusual_events() == {}


def test_a_site_has_at_most_the_allowed_number_of_names(recorder: Any) -> None:
    for number in range(MOST_NAMES_PER_SITE + 3):
        with recorder.make_scope("scope") as span:
            span.rename("first")
            span.rename(f"name {number}")
    found = {row.path[-1].name: row.totals.calls for row in recorder.tally().iterate_totals()}
    assert len(found) == MOST_NAMES_PER_SITE
    assert found["scope"] == 4
    beyond = "span names beyond the limit of their place, counted under the name that it has"
    assert recorder.count_unusual_events() == {beyond: 4}


def test_a_name_that_is_none_is_counted_and_steps_keep_theirs(recorder: Any) -> None:
    with recorder.make_scope("scope") as span:
        span.rename(5)
        span.rename("")
    with recorder.make_scope("step", kind="step") as step:
        step.rename("other")
    assert {row.path[-1].name for row in recorder.tally().iterate_totals()} == {"scope", "step"}
    assert recorder.count_unusual_events() == {"span names that are no text": 2, "steps not renamed": 1}


class StatusCode(Enum):
    OK = 1


@pytest.mark.parametrize(
    ("status", "raised", "error"),
    [
        ({"code": "error"}, False, "_OTHER"),
        ({"code": "error"}, True, "ValueError"),
        ({"code": "ERROR", "error_type": "overloaded", "description": "no room"}, False, "overloaded"),
        ({"code": "error", "error_type": "overloaded"}, True, "overloaded"),
        ({"code": "ok"}, False, None),
        ({"code": StatusCode.OK}, True, None),
    ],
)
def test_a_status_says_whether_a_span_failed(
    recorder: Any, status: dict[str, Any], raised: bool, error: str | None
) -> None:
    code, description, error_type = (status.get(name) for name in ("code", "description", "error_type"))

    def call() -> None:
        set_status_of_frame(recorder, None, code, description, error_type)
        if raised:
            raise ValueError

    wrapped = recorder.wrap(call, Site("call"))
    for times in range(2):
        try:
            if times:
                with recorder.make_scope("scope") as span:
                    span.set_status(code, description, error_type=error_type)
                    if raised:
                        raise ValueError
            else:
                wrapped()
        except ValueError:
            assert raised
    spans = spans_in(recorder)
    assert [span.error for span in spans] == [error] * 2
    assert sum(row.totals.errors for row in recorder.tally().iterate_totals()) == (2 if error else 0)
    for message in exported(spans):
        assert message.status.code == (2 if error else 1)
        assert message.status.message == (description or error or "")
        assert said(message).get("error.type") == error
        assert not any(name.startswith("otel.") for name in said(message))


def test_a_status_that_is_none_is_counted(recorder: Any) -> None:
    with recorder.make_scope("scope") as span:
        span.set_status("fine")
        span.set_status(None)
    assert spans_in(recorder)[0].error is None
    assert recorder.count_unusual_events() == {"states that no span has": 2}


def test_attributes_of_a_frame_are_set_as_they_are_and_late_ones_are_counted(recorder: Any) -> None:
    frame = recorder.open(Site("request", "request"), {"given": 1})
    recorder.annotate(frame, {"http.response.status_code": 503})
    recorder.annotate(None, {"x": 1})
    recorder.close(frame)
    recorder.annotate(frame, {"late": 1})
    assert attributes(recorder) == {"request": {"given": 1, "http.response.status_code": 503}}
    assert recorder.count_unusual_events() == {"span annotated that is not open": 1}


def test_annotations_are_in_trace_files_and_at_the_collector(recording: Any, tmp_path: Path) -> None:
    with instrument.scope("request", kind="request") as request:
        with instrument.scope("work"):
            instrument.annotate(tokens=3, finish="stop", scores=[0.5, 1.0])
            instrument.annotate_request(tenant="x")
            instrument.set_status("error", "no room", error_type="overloaded")
            instrument.rename_span("work of a kind")
        request.annotate(streamed=True)
    spans = spans_in(recording)
    work, root = spans
    assert (work.site.name, work.error) == ("work of a kind", "overloaded")
    by_name = {message.name: said(message) for message in exported(spans)}
    assert by_name["work of a kind"]["tokens"] == 3
    assert [value.double_value for value in by_name["work of a kind"]["scores"].values] == [0.5, 1.0]
    assert by_name["request"]["tenant"] == "x"
    assert root.attributes["streamed"] is True
    path = chrome.dump(tmp_path / "trace.json", Trace(ORIGIN, 0, 2**62, spans))
    found = {span.site.name: span for span in chrome.read(path).trace.spans}
    assert found["request"].attributes == {"tenant": "x", "streamed": True}
    assert dict(found["work of a kind"].attributes) == work.attributes
    assert found["work of a kind"].error == "overloaded"


def test_switched_off_by_the_environment_it_does_nothing() -> None:
    program = """
import instrument
with instrument.scope("x") as span:
    instrument.annotate(x=1)
    instrument.annotate_request(x=object())
    span.annotate(x=1)
    span.rename("y")
    instrument.rename_span("y")
    instrument.set_status("error")
"""
    environ = {**os.environ, "INSTRUMENT": "off"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_while_garbage_is_collected_at_every_step_attributes_are_kept(recorder: Any) -> None:
    """Finalisers that record and annotate come in wherever a dict is made."""

    class Node:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            recorder.annotate_innermost(from_finaliser=1)
            with recorder.make_scope("finaliser") as span:
                span.annotate(x=1)

    before = gc.get_threshold()
    try:
        with recorder.make_scope("outer"):
            gc.set_threshold(1)
            for number in range(200):
                Node()
                with recorder.make_scope("scope"):
                    recorder.annotate_innermost(number=number)
    finally:
        gc.set_threshold(*before)
    found = [span.attributes["number"] for span in spans_in(recorder) if span.site.name == "scope"]
    assert sorted(found) == list(range(200))


class Text(str):
    """A text with something behind it."""


class Behind:
    """Can be asked for whether it is there."""


@pytest.mark.slow
def test_nothing_large_that_a_service_gives_is_kept_alive_by_rows(recorder: Any) -> None:
    large = 5 * 10**6
    held: list[weakref.ref[Any]] = []

    def hostile() -> dict[str, Any]:
        text, lazy = Text("t" * large), Behind()
        text.behind = Behind()  # type: ignore[attr-defined]
        held.extend(map(weakref.ref, (text.behind, lazy)))  # type: ignore[attr-defined]
        return {"text": "x" * large, "n" * large: text, "l": ["y" * large] * 1000, "lazy": lazy, "whole": 1 << large}

    tracemalloc.start()
    try:
        for number in range(3):
            with recorder.make_scope("scope", attributes=hostile()):
                recorder.annotate_innermost(hostile())
            with recorder.make_scope("many", attributes={f"a{number} {at}": "z" * 100 for at in range(large // 1000)}):
                pass
            key, weight = "k" * large + str(number), 1 << large
            with recorder.make_scope("step", batch={key: weight, Text(key + "b"): weight}):
                recorder.bind_innermost("l" * large)
            del key, weight
        gc.collect()
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(spans_in(recorder)) == 9
    assert [one() for one in held] == [None] * len(held)
    assert kept_bytes < large // 5
    assert {name for name, kept in attributes(recorder)["scope"].items()} == {"text", "n" * 253 + "...", "l"}
    assert len(attributes(recorder)["many"]) == ATTRIBUTE_LIMIT
    assert set(attributes(recorder)["step"]) == {BATCH_KEYS, KEY}
