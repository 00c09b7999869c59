"""The recorder: what a call records, under which parent, in bounded memory."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import copy
import functools
import gc
import inspect
import os
import pickle
import resource
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from readback import columns_in, read_rows, rows_in, spans_in
from tallies import Totals, of_all_threads, rows_of
from trees import outline, tree

from instrument.instrumentors.probe_cost import measure_cold_cache_ns, measure_costs, measure_muted_call_ns
from instrument.recorder import recorder as recorder_module
from instrument.recorder import wrapping
from instrument.recorder.core import calls_by_site
from instrument.recorder.recorder import MOST_DEVIATION_NS, Ticks
from instrument.recorder.wrapping import bare_function
from instrument.recording.distributions import bucket_of
from instrument.recording.paths import OVERFLOW
from instrument.recording.spans import ATTRIBUTE_LIMIT, Site
from instrument.recording.trace_context import REMOTE, RemoteParent, encode_parent
from instrument.trace.trace import make_spans

pytestmark = pytest.mark.usefixtures("small_heap")


def wrapped(recorder: Any, name: str = "", kind: str = "op") -> Any:
    """A decorator with a recorder of its own."""
    return lambda function: recorder.wrap(function, Site(name or function.__name__, kind))


def spans_by_name(recorder: Any) -> dict[str, Any]:
    return {span.site.name: span for span in spans_in(recorder)}


# -------------------------------------------------------------------- kinds of functions


def test_the_signature_of_a_scope_has_all_its_arguments(recorder: Any) -> None:
    told = inspect.signature(recorder.scope).parameters.values()
    taken = inspect.signature(recorder.make_scope).parameters.values()
    assert [(one.name, one.kind, one.default) for one in told] == [(one.name, one.kind, one.default) for one in taken]


def test_every_kind_of_function_keeps_its_kind_signature_and_names(recorder: Any) -> None:
    def call(a: int, *, b: str = "x") -> str:
        """Doc."""
        return b * a

    async def coroutine(a: int) -> int:
        return a

    def generator(a: int) -> Iterator[int]:
        yield a

    async def async_generator(a: int) -> AsyncIterator[int]:
        yield a

    call.extra = 5  # type: ignore[attr-defined]
    for function in (call, coroutine, generator, async_generator):
        made = recorder.wrap(function, Site("x"))
        for test in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
            assert test(made) == test(function)
        assert inspect.signature(made) == inspect.signature(function)
        assert (made.__name__, made.__qualname__, made.__doc__) == (
            function.__name__,
            function.__qualname__,
            function.__doc__,
        )
        assert made.__module__ == function.__module__
        assert bare_function(made) is function
        assert not hasattr(made, "__wrapped__")
        assert weakref.ref(made)() is made
    assert recorder.wrap(call, Site("x")).extra == 5
    assert recorder.wrap(call, Site("x"))(2, b="ab") == "abab"


PARAMETERS = [
    "",
    "a",
    "a, b=2",
    "a, /",
    "a, b=2, /, c=3",
    "*args",
    "*, k",
    "a, *rest, k=1, **others",
    "a, /, **a_",
    "**others",
    "self, recorder, function, site=1, *args, instrument_frame=5, **kwargs",
]
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((1,), {}),
    ((1, 2), {}),
    ((1, 2, 3, 4), {}),
    ((), {"a": 1}),
    ((1,), {"a": 1}),
    ((1,), {"k": 4}),
    ((), {"k": 4, "z": 5}),
    ((1, 2), {"instrument_frame": 6, "y": 7}),
]


@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize(
    ("head", "tail"),
    [("def", "return"), ("async def", "return"), ("def", "yield"), ("async def", "yield")],
    ids=["call", "coroutine", "generator", "async generator"],
)
@pytest.mark.parametrize("kind", ["op", "request"])
def test_a_call_takes_and_refuses_the_very_arguments_of_the_function(
    recorder: Any, parameters: str, head: str, tail: str, kind: str
) -> None:
    namespace: dict[str, Any] = {}
    exec(f"{head} subject({parameters}):\n    {tail} locals()", namespace)
    plain = namespace["subject"]
    made = recorder.wrap(plain, Site("subject", kind))

    def outcome(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            begun = function(*args, **kwargs)
        except TypeError as error:
            return str(error)  # at once, not when the body would begin
        if inspect.iscoroutine(begun):
            return asyncio.run(begun)
        if inspect.isasyncgen(begun):
            return asyncio.run(begun.__anext__())  # type: ignore[arg-type]
        return next(begun) if inspect.isgenerator(begun) else begun

    for args, kwargs in CALLS:
        assert outcome(made, args, kwargs) == outcome(plain, args, kwargs)
    if made.__code__.co_filename == "<instrument>":
        assert (made.__code__.co_argcount, made.__defaults__) == (plain.__code__.co_argcount, plain.__defaults__)
        assert (made.__kwdefaults__, made.__globals__) == (plain.__kwdefaults__, plain.__globals__)


def test_callables_that_are_no_python_functions_pass_all_arguments_on(recorder: Any) -> None:
    async def two(a: int, *, b: int) -> int:
        return a * b

    made = recorder.wrap(functools.partial(two, 3), Site("two"))
    assert asyncio.run(made(b=5)) == 15


@pytest.mark.parametrize("head", ["async def", "def"], ids=["coroutine", "generator"])
def test_an_argument_that_the_body_drops_is_freed_while_the_body_waits(recorder: Any, head: str) -> None:
    class Batch: ...

    namespace: dict[str, Any] = {"pause": Pause}
    wait = "await pause()" if head == "async def" else "yield"
    exec(f"{head} predict(batch, *rest, **named):\n    del batch, rest, named\n    {wait}", namespace)
    batches = [Batch(), Batch(), Batch()]
    freed = [weakref.ref(batch) for batch in batches]
    begun = recorder.wrap(namespace["predict"], Site("predict"))(batches.pop(), batches.pop(), x=batches.pop())
    begun.send(None)
    gc.collect()
    assert [reference() for reference in freed] == [None, None, None]
    begun.close()


class Pause:
    """An awaitable that suspends once."""

    def __await__(self) -> Iterator[None]:
        yield


def module_level(value: int) -> int:
    return value + 1


def test_a_wrapped_function_pickles_by_its_name(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recorder.wrap(module_level, Site("x"))
    monkeypatch.setattr(sys.modules[__name__], "module_level", made)
    assert pickle.loads(pickle.dumps(made)) is made


def test_calls_nest_and_self_times_add_up_to_the_root(recorder: Any) -> None:
    @wrapped(recorder)
    def leaf() -> None:
        time.sleep(0.002)

    @wrapped(recorder)
    def middle() -> None:
        leaf()
        leaf()

    @wrapped(recorder)
    def root() -> None:
        middle()
        leaf()

    root()
    assert tree(recorder) == outline(
        """
        root
          middle
            leaf
            leaf
          leaf
        """
    )
    spans = spans_in(recorder)
    assert sum(span.self_ns for span in spans) == spans_by_name(recorder)["root"].total_ns


@pytest.mark.parametrize("shape", ["call", "coroutine", "generator", "async generator", "request"])
def test_exceptions_pass_untouched_and_mark_the_span(recorder: Any, shape: str) -> None:
    error = KeyError("k")

    def call() -> None:
        raise error

    async def coroutine() -> None:
        await asyncio.sleep(0)
        raise error

    def generator() -> Iterator[int]:
        yield 1
        raise error

    async def async_generator() -> AsyncIterator[int]:
        yield 1
        raise error

    async def drain(make: Any) -> None:
        async for _ in make():
            pass

    site = Site(shape, "request" if shape == "request" else "op")
    run = {
        "call": lambda: recorder.wrap(call, site)(),
        "request": lambda: recorder.wrap(call, site)(),
        "coroutine": lambda: asyncio.run(recorder.wrap(coroutine, site)()),
        "generator": lambda: list(recorder.wrap(generator, site)()),
        "async generator": lambda: asyncio.run(drain(recorder.wrap(async_generator, site))),
    }[shape]
    with pytest.raises(KeyError) as caught:
        run()
    assert caught.value is error
    (span,) = spans_in(recorder)
    assert span.error == "KeyError"
    (row,) = recorder.tally().iterate_totals()
    assert row.totals.errors == 1
    assert recorder.current_span_id() == 0


def test_a_cancelled_coroutine_is_marked_and_leaves_no_current_span(recorder: Any) -> None:
    @wrapped(recorder)
    async def waits() -> None:
        await asyncio.sleep(60)

    async def main() -> None:
        task = asyncio.create_task(waits())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert tree(recorder) == "waits"
    assert spans_in(recorder)[0].attributes == {"instrument.outcome": "cancelled"}


# -------------------------------------------------------------------- generators


def test_a_generator_is_current_only_while_its_body_runs(recorder: Any) -> None:
    inside = wrapped(recorder, "inside")(lambda: None)
    outside = wrapped(recorder, "outside")(lambda: None)

    @wrapped(recorder)
    def numbers() -> Iterator[int]:
        inside()
        yield 1
        time.sleep(0.002)
        inside()
        yield 2

    @wrapped(recorder)
    def consumer() -> None:
        for _ in numbers():
            outside()
            time.sleep(0.005)

    consumer()
    assert tree(recorder) == outline(
        """
        consumer
          numbers
            inside
            inside
          outside
          outside
        """
    )
    spans = spans_by_name(recorder)
    generator, caller = spans["numbers"], spans["consumer"]
    assert 2_000_000 <= generator.active_ns < generator.total_ns - 5_000_000
    assert sum(span.self_ns for span in spans_in(recorder)) == caller.total_ns


def test_a_generator_behaves_as_without_us_when_sent_to_thrown_into_and_closed(recorder: Any) -> None:
    def plain() -> Any:
        log = []
        try:
            got = yield "first"
            log.append(got)
            try:
                yield "second"
            except ValueError as error:
                log.append(str(error))
            yield log
        finally:
            log.append("closed")
            events.append(list(log))
        return "result"

    def drive(make: Any) -> list[Any]:
        generator = make()
        seen = [next(generator), generator.send("sent"), generator.throw(ValueError("thrown"))]
        generator.close()
        generator.close()
        with pytest.raises(StopIteration):
            next(generator)
        full = make()
        results = []
        try:
            results.extend((next(full), full.send(1), next(full), next(full)))
        except StopIteration as done:
            results.append(done.value)
        return [seen, results]

    events: list[Any] = []
    expected = drive(plain), list(events)
    events.clear()
    assert (drive(recorder.wrap(plain, Site("g"))), events) == expected
    assert [span.error for span in spans_in(recorder)] == [None, None]


def test_what_is_thrown_into_a_body_that_has_not_begun_is_raised_and_records_nothing(recorder: Any) -> None:
    async def coroutine() -> None: ...

    def generator() -> Iterator[None]:
        yield

    for function in (coroutine, generator):
        body = wrapped(recorder)(function)()
        with pytest.raises(KeyError, match="thrown"):
            body.throw(KeyError("thrown"))
    assert spans_in(recorder) == []


def test_an_async_generator_behaves_as_without_us_when_sent_to_thrown_into_and_closed(recorder: Any) -> None:
    async def plain() -> Any:
        log = []
        try:
            log.append((yield "first"))
            await asyncio.sleep(0)
            try:
                yield "second"
            except ValueError as error:
                log.append(str(error))
            yield log
        finally:
            await asyncio.sleep(0)
            log.append("closed")
            events.append(list(log))

    async def drive(make: Any) -> list[Any]:
        generator = make()
        seen = [
            await generator.__anext__(),
            await generator.asend("sent"),
            await generator.athrow(ValueError("thrown")),
        ]
        await generator.aclose()
        await generator.aclose()
        return seen + [item async for item in make()]

    events: list[Any] = []
    expected = asyncio.run(drive(plain)), list(events)
    events.clear()
    assert (asyncio.run(drive(recorder.wrap(plain, Site("g")))), events) == expected
    assert [span.error for span in spans_in(recorder)] == [None, None]


async def _given_up(make: Any, box: list[Any]) -> None:
    generator = make(box)
    await generator.__anext__()
    del generator
    gc.collect()
    await asyncio.sleep(0.001)


async def _given_up_in_a_cycle(make: Any, box: list[Any]) -> None:
    own = [*box]
    generator = make(own)
    own.append(generator)
    await generator.__anext__()
    del generator, own
    gc.collect()
    await asyncio.sleep(0.001)


async def _held_until_the_loop_ends(make: Any, box: list[Any]) -> None:
    box.append(make(box))
    await box[-1].__anext__()


async def _left_by_break(make: Any, box: list[Any]) -> None:
    async for _ in make(box):
        break
    gc.collect()
    await asyncio.sleep(0.001)


async def _cancelled_in_a_step(make: Any, box: list[Any]) -> None:
    async def wait(generator: Any) -> None:
        box.extend([number async for number in generator])

    generator = make(box)
    task = asyncio.create_task(wait(generator))
    await asyncio.sleep(0.001)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    with contextlib.suppress(StopAsyncIteration):
        await generator.__anext__()


async def _closed_by_another_task_in_a_step(make: Any, box: list[Any]) -> None:
    generator = make(box)
    step = asyncio.create_task(generator.__anext__())
    await asyncio.sleep(0)
    await step
    step = asyncio.ensure_future(generator.asend(None))
    await asyncio.sleep(0)
    try:
        await generator.aclose()
    except RuntimeError as error:
        box.append(str(error))
    step.cancel()
    with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
        await step


async def _a_step_that_is_never_awaited(make: Any, box: list[Any]) -> None:
    generator = make(box)
    await generator.__anext__()
    generator.__anext__()
    await generator.aclose()


@pytest.mark.parametrize(
    "drive",
    [
        _given_up, _given_up_in_a_cycle, _held_until_the_loop_ends, _left_by_break, _cancelled_in_a_step,
        _closed_by_another_task_in_a_step, _a_step_that_is_never_awaited,
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:coroutine method 'asend':RuntimeWarning")
def test_an_async_generator_that_does_not_come_to_its_end_closes_as_without_us(
    recorder: Any, monkeypatch: pytest.MonkeyPatch, drive: Any
) -> None:
    events: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: events.append(repr(found.exc_value)))

    async def plain(box: list[Any]) -> Any:
        try:
            for number in range(5):
                yield number
                await asyncio.sleep(0.005)
        finally:
            events.append("closing")
            await asyncio.sleep(0)
            wrapped(recorder, "below")(lambda: None)()
            events.append("closed")

    def seen(make: Any) -> tuple[list[str], list[Any]]:
        events.clear()
        box: list[Any] = ["box"]
        asyncio.run(drive(make, box))
        gc.collect()
        return list(events), [item for item in box if isinstance(item, (int, str))]

    expected = seen(plain)
    assert expected[0] == ["closing", "closed"]
    recorder.reset()
    assert seen(recorder.wrap(plain, Site("g"))) == expected
    assert sorted(span.site.name for span in spans_in(recorder)) == ["below", "g"]
    assert recorder.open_rows() == []


def test_an_async_generator_without_an_event_loop_closes_as_without_us_when_it_is_given_up(recorder: Any) -> None:
    events: list[str] = []

    async def plain(box: list[Any]) -> Any:
        try:
            yield len(box)
            yield 2
        finally:
            events.append("closed")

    def drive(make: Any, in_a_cycle: bool) -> list[str]:
        events.clear()
        box: list[Any] = []
        generator = make(box)
        if in_a_cycle:
            box.append(generator)
        with pytest.raises(StopIteration):
            generator.__anext__().send(None)
        del generator, box
        gc.collect()
        return list(events)

    for in_a_cycle in (False, True):
        assert drive(plain, in_a_cycle) == drive(recorder.wrap(plain, Site("g")), in_a_cycle) == ["closed"]
    assert [span.site.name for span in spans_in(recorder)] == ["g", "g"]
    assert recorder.open_rows() == []


def test_a_generator_abandoned_in_the_middle_is_recorded_when_it_is_collected(recorder: Any) -> None:
    @wrapped(recorder)
    def numbers() -> Iterator[int]:
        yield 1
        yield 2

    @wrapped(recorder)
    def abandons() -> None:
        next(iter(numbers()))

    abandons()
    gc.collect()
    assert tree(recorder) == "abandons\n  numbers"
    assert recorder.open_rows() == []


def test_a_scope_that_is_entered_and_dropped_ends_then_and_one_begun_by_start_goes_on(recorder: Any) -> None:
    @wrapped(recorder)
    def forgets() -> None:
        recorder.scope("entered").__enter__()
        gc.collect()
        wrapped(recorder, "after")(lambda: None)()

    forgets()
    assert tree(recorder) == "forgets\n  entered\n  after"
    assert recorder.open_rows() == []
    recorder.scope("started").start()
    gc.collect()
    assert len(recorder.open_rows()) == 1
    recorder.end_manual(recorder.innermost_manual("started"))
    assert recorder.open_rows() == []


def test_scopes_of_one_name_are_distinct_if_nested_reused_muted_or_older_than_a_reset(recorder: Any) -> None:
    for _ in range(2):
        with recorder.scope("one") as outer, recorder.scope("one") as inner:
            assert outer is not inner
    outer.__exit__(None, None, None)  # has ended
    assert not callable(outer)
    with pytest.raises(TypeError):
        type(outer).__enter__(recorder)
    with recorder.scope("one") as crossed:
        assert crossed not in (outer, inner)
        crossed.annotate(tokens=3)
    assert tree(recorder) == "one\n  one\none\n  one\none"
    assert [span.attributes for span in spans_in(recorder)].count({"tokens": 3}) == 1
    assert sum(row.totals.calls for row in recorder.tally().iterate_totals()) == 5

    made = recorder.scope("one")
    recorder.mute(recorder.user_sites["one"])
    with made, recorder.scope("one"):
        assert recorder.open_rows() == []
    recorder.unmute(made._site)
    with recorder.scope("one"):
        assert len(recorder.open_rows()) == 1
        held = recorder.scope("one")
        recorder.reset()
    for _ in range(2):
        with held, recorder.scope("two"):
            pass
    assert tree(recorder) == "one\none\n  two\none\n  two"
    assert recorder.open_rows() == []


def test_requests_opened_as_scopes_end_each_with_a_frame_of_its_own(recorder: Any) -> None:
    opened = recorder.make_scope("request", kind="request")
    for _ in range(3):
        with opened, recorder.scope("inside"):
            pass
    assert tree(recorder) == "\n".join(["request\n  inside"] * 3)
    assert len({span.root_id for span in spans_in(recorder)}) == 3
    gc.collect()
    with opened, recorder.scope("inside"):
        assert len(recorder.open_rows()) == 2


def test_a_generator_moved_to_another_thread_leaves_both_threads_clean(recorder: Any) -> None:
    leaf = wrapped(recorder, "leaf")(lambda: None)

    @wrapped(recorder)
    def numbers() -> Iterator[int]:
        leaf()
        yield 1
        leaf()
        yield 2

    generator = numbers()
    next(generator)
    thread = threading.Thread(target=lambda: list(generator))
    thread.start()
    thread.join()
    assert tree(recorder) == "numbers\n  leaf\n  leaf"
    assert recorder.current_span_id() == 0


# -------------------------------------------------------------------- tasks, threads, executors


def test_tasks_of_a_request_are_its_children_and_do_not_shorten_its_self_time(recorder: Any) -> None:
    @wrapped(recorder)
    async def part(index: int) -> None:
        await asyncio.sleep(0.01)

    @wrapped(recorder, kind="request")
    async def request() -> None:
        await asyncio.gather(part(1), part(2))
        await part(3)

    async def main() -> None:
        await asyncio.gather(request(), request())

    asyncio.run(main())
    expected = "request\n  part\n  part\n  part"
    assert tree(recorder) == expected + "\n" + expected
    spans = spans_in(recorder)
    for root in (span for span in spans if span.site.name == "request"):
        parts = [span for span in spans if span.parent_id == root.span_id]
        assert {span.root_id for span in parts} == {root.span_id}
        own = [span for span in parts if span.task_id == root.task_id]
        assert len(own) == 1
        assert root.self_ns == root.total_ns - own[0].total_ns


def test_threads_have_trees_of_their_own_and_copied_contexts_carry_the_parent(recorder: Any) -> None:
    leaf = wrapped(recorder, "leaf")(lambda: None)

    @wrapped(recorder)
    def root() -> None:
        bare = threading.Thread(target=leaf)
        context = contextvars.copy_context()
        copied = threading.Thread(target=context.run, args=(leaf,))
        for thread in (bare, copied):
            thread.start()
            thread.join()

    root()
    assert tree(recorder) == outline(
        """
        root
          leaf
        leaf
        """
    )
    assert len(recorder.tally().threads) == 3
    (span,) = [span for span in spans_in(recorder) if span.site.name == "root"]
    assert span.self_ns == span.total_ns


def test_to_thread_carries_the_parent_and_an_executor_without_a_context_does_not(recorder: Any) -> None:
    leaf = wrapped(recorder, "leaf")(lambda: None)

    @wrapped(recorder)
    async def root() -> None:
        await asyncio.to_thread(leaf)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            await asyncio.get_running_loop().run_in_executor(pool, leaf)

    asyncio.run(root())
    assert tree(recorder) == "root\n  leaf\nleaf"


def test_a_scope_stays_current_across_an_await(recorder: Any) -> None:
    leaf = wrapped(recorder, "leaf")(lambda: None)

    @wrapped(recorder)
    async def other() -> None:
        for _ in range(3):
            await asyncio.sleep(0)
            leaf()

    async def main() -> None:
        rival = asyncio.create_task(other())
        frame = recorder.open(Site("scope"))
        for _ in range(3):
            await asyncio.sleep(0)
            leaf()
        recorder.close(frame)
        await rival

    asyncio.run(main())
    assert sorted(tree(recorder).split("\n")) == sorted(
        ["scope", "  leaf", "  leaf", "  leaf", "other", "  leaf", "  leaf", "  leaf"]
    )


def test_a_request_inside_other_work_is_the_root_of_its_own_tree(recorder: Any) -> None:
    leaf = wrapped(recorder, "leaf")(lambda: None)
    request = wrapped(recorder, "request", "request")(leaf)
    nested = wrapped(recorder, "nested", "request")(request)
    wrapped(recorder, "serve")(nested)()
    spans = spans_by_name(recorder)
    assert spans["nested"].root_id == spans["nested"].span_id
    assert spans["request"].root_id == spans["leaf"].root_id == spans["nested"].span_id
    assert spans["serve"].root_id == spans["serve"].span_id


def test_a_request_takes_the_current_span_of_another_tracer_as_its_parent(recorder: Any) -> None:
    remote = RemoteParent(trace_id=7, span_id=9)
    recorder.remote_parent = lambda: encode_parent(remote)
    wrapped(recorder, "request", "request")(wrapped(recorder, "leaf")(lambda: None))()
    spans = spans_by_name(recorder)
    assert spans["request"].remote == remote
    assert spans["request"].attributes == {}
    assert spans["leaf"].remote is None


def test_attributes_at_the_end_win_but_over_the_span_of_another_tracer(recorder: Any) -> None:
    remote = RemoteParent(trace_id=7, span_id=9)
    recorder.remote_parent = lambda: encode_parent(remote)
    facts: dict[str, Any] = {"begin": 1, REMOTE: b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    frame = recorder.open(Site("request", "request"), facts)
    recorder.annotate(frame, {"begin": 2, "service": 3})
    facts["end"] = 4
    recorder.close(frame, None, True, facts)
    (span,) = spans_in(recorder)
    assert (span.attributes, span.remote) == ({"begin": 1, "service": 3, "end": 4}, remote)


def test_attributes_that_were_set_before_the_end_fill_what_room_is_left(recorder: Any) -> None:
    frame = recorder.open(Site("request", "request"), {"begin": 1})
    recorder.annotate(frame, {f"service {number}": number for number in range(ATTRIBUTE_LIMIT - 1)})
    recorder.close(frame, None, True, {"begin": 1, "end": 2})
    (span,) = spans_in(recorder)
    assert (len(span.attributes), span.attributes["end"]) == (ATTRIBUTE_LIMIT, 2)
    assert recorder.count_unusual_events() == {"attributes beyond the limit of a span": 1}


def test_the_row_of_an_open_span_stays_what_it_was(recorder: Any) -> None:
    facts = {"begin": 1}
    frame = recorder.open(Site("request", "request"), facts)
    ((_, row),) = recorder.open_rows()
    facts["end"] = 2
    recorder.close(frame, None, True, facts)
    assert row[10] == {"begin": 1}


def test_open_requests_are_those_that_tasks_of_a_thread_have_begun(recorder: Any) -> None:
    def begun() -> tuple[int, int]:
        return recorder.open_requests(threading.get_native_id()), recorder.open_requests(0)

    async def request() -> tuple[int, int]:
        outer, inner = recorder.open(Site("x", "request")), recorder.open(Site("y", "request"))
        found = begun()
        recorder.close(inner)
        recorder.close(outer)
        return found

    frame = recorder.open(Site("x", "request"))
    assert begun() == (0, 0)
    recorder.close(frame)

    async def main() -> list[tuple[int, int]]:
        return await asyncio.gather(request(), request())

    assert asyncio.run(main()) == [(1, 0), (1, 0)]
    assert begun() == (0, 0)


@pytest.mark.parametrize(
    ("header", "length"),
    [(b"07", 7), ("7", 7), (b"", None), ("-1", None), (b"1_0", None), ("\xb2", None), ("9" * 19, None), (b" 7", None)],
)
def test_a_request_reports_its_caller_the_sizes_and_its_status(recorder: Any, header: Any, length: int | None) -> None:
    site = Site("request", "request")
    caller = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    for told in (caller, caller.encode(), None):
        facts: dict[str, Any] = {}
        recorder.close_request(recorder.open_request(site, facts, told, header), facts, 503, 2**40, None)
        assert facts.get("http.request.body.size") == length
    assert [span.remote is None for span in spans_in(recorder)] == [False, False, True]
    assert {(span.error, span.attributes["http.response.body.size"]) for span in spans_in(recorder)} == {("503", 2**40)}


def test_a_request_without_an_answer_reports_neither_status_nor_size(recorder: Any) -> None:
    facts: dict[str, Any] = {}
    frame = recorder.open_request(Site("request", "request"), facts, None, None)
    assert frame.start_ns <= recorder.now_ns()
    recorder.close_request(frame, facts, 0, 0, ValueError())
    recorder.close_request(None, {}, 200, 1, None)
    (span,) = spans_in(recorder)
    assert (span.error, span.attributes) == ("ValueError", {})


NAMES = st.sampled_from([b"host", b"traceparent", b"content-length", b"traceparenu", b"", "host"])


@given(st.lists(st.one_of(st.tuples(NAMES, st.binary(max_size=2)), st.tuples(NAMES, st.binary(max_size=2)).map(list))))
def test_values_of_headers_are_found_by_name_the_last_of_several(headers: list[Any]) -> None:
    found = dict(headers)
    expected = found.get(b"traceparent"), found.get(b"host")
    header_values = recorder_module.header_values
    assert header_values(headers, (b"traceparent", b"host")) == expected
    assert header_values(iter(headers), (b"traceparent", b"host")) == expected
    with pytest.raises((TypeError, ValueError)):
        header_values([*headers, (b"one",)], (b"traceparent",))


# -------------------------------------------------------------------- crossing


def nap() -> int:
    """Sleep for 2 ms; returns how long that took."""
    begun_ns = time.monotonic_ns()
    time.sleep(0.002)
    return time.monotonic_ns() - begun_ns


def test_crossed_scopes_are_recorded_counted_and_never_negative(recorder: Any) -> None:
    root = recorder.open(Site("root"))
    outer = recorder.open(Site("outer"))
    inner = recorder.open(Site("inner"))
    slept_ns = nap()
    recorder.close(outer)
    slept_ns += nap()
    recorder.close(inner)
    recorder.close(root)
    assert tree(recorder) == "root\n  outer\n    inner"
    assert recorder.count_unusual_events() == {"scope closed before a scope inside it": 1}
    spans = spans_by_name(recorder)
    assert spans["outer"].self_ns + spans["inner"].self_ns + spans["root"].self_ns >= spans["root"].total_ns
    # All that was slept was slept within the innermost.
    assert spans["outer"].self_ns + spans["root"].self_ns <= spans["root"].total_ns - slept_ns
    assert recorder.current_span_id() == 0


def test_closing_twice_and_in_another_context_is_counted(recorder: Any) -> None:
    frame = recorder.open(Site("x"))
    recorder.close(frame)
    recorder.close(frame)
    foreign = recorder.open(Site("y"))
    mine = contextvars.Context().run(lambda: recorder.open(Site("z")))
    recorder.close(mine)
    recorder.close(foreign)
    assert recorder.count_unusual_events() == {
        "scope ended twice": 1,
        "span ended outside the context that began it": 1,
    }
    assert sorted(span.site.name for span in spans_in(recorder)) == ["x", "y", "z"]


# -------------------------------------------------------------------- the ring and the tally


def test_the_tally_is_exact_when_the_ring_has_wrapped_many_times(make_recorder: Any) -> None:
    recorder = make_recorder(ring_bytes=1)
    function = wrapped(recorder, "f")(lambda: None)
    for _ in range(10_000):
        function()
    (row,) = recorder.tally().iterate_totals()
    assert row.totals.calls == sum(recorder.tally().histogram([row.totals.node]).values()) == 10_000
    assert len(spans_in(recorder)) == recorder.rings()[0].capacity
    assert recorder.losses() == {"spans overwritten by newer ones": 10_000 - recorder.rings()[0].capacity}
    newest = sorted(span.span_id for span in spans_in(recorder))
    with recorder.make_scope("after"):
        last_id = recorder.current_span_id() - 2
    assert newest == list(range(last_id - 2 * len(newest) + 2, last_id + 2, 2))


def test_a_cursor_reads_every_row_once_and_counts_what_came_too_late(make_recorder: Any) -> None:
    recorder = make_recorder(ring_bytes=1)
    function = wrapped(recorder, "f")(lambda: None)
    capacity = 64
    cursor = recorder.make_row_cursor()
    for _ in range(10):
        function()
    assert [len(ring.rows) for ring in cursor.read_new_rows()] == [10]
    assert read_rows(cursor) == []
    for _ in range(3 * capacity):
        function()
    assert [len(ring.rows) for ring in cursor.read_new_rows()] == [capacity]
    assert cursor.lost_rows == 2 * capacity


def test_rows_that_went_with_the_rings_of_ended_threads_count_as_lost(make_recorder: Any) -> None:
    recorder = make_recorder(ring_bytes=1 << 20)
    function = wrapped(recorder, "f")(lambda: None)
    cursor = recorder.make_row_cursor()
    for _ in range(1_100):
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()
    read = len(read_rows(cursor))
    assert 0 < read < 1_100
    assert read + cursor.lost_rows == 1_100


def test_rows_read_while_other_threads_write_are_whole_and_come_once(make_recorder: Any) -> None:
    recorder = make_recorder(ring_bytes=1 << 20)
    function = wrapped(recorder, "f")(lambda: None)
    calls = 20_000
    cursor = recorder.make_row_cursor()
    threads = [threading.Thread(target=lambda: [function() for _ in range(calls)]) for _ in range(4)]
    seen: list[int] = []

    def read() -> None:
        for row in read_rows(cursor):
            assert row["end_ns"] >= row["start_ns"] > 0
            seen.append(int(row["span_id"]))

    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        read()
        recorder.tally()
    read()
    assert len(seen) == len(set(seen))
    assert len(seen) + cursor.lost_rows == 4 * calls
    assert recorder.tally().calls == recorder.calls == 4 * calls


def test_many_threads_over_time_stay_within_the_budget_and_lose_no_call(make_recorder: Any) -> None:
    recorder = make_recorder(ring_bytes=1 << 20)
    function = wrapped(recorder, "f")(lambda: None)
    for _ in range(1_300):
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()
    gc.collect()
    assert recorder.tally().calls == recorder.calls == 1_300
    assert sum(ring.capacity for ring in recorder.rings()) <= (1 << 20) // 80 + 64 * 64


def test_the_rows_of_threads_that_have_ended_stay_while_there_is_room(make_recorder: Any) -> None:
    recorder = make_recorder(ring_bytes=1 << 22)
    function = wrapped(recorder, "f")(lambda: None)
    for _ in range(100):
        thread = threading.Thread(target=lambda: [function() for _ in range(20)])
        thread.start()
        thread.join()
    assert len(spans_in(recorder)) == 2_000
    assert recorder.losses() == {}


def test_memory_stays_bounded_when_recursion_and_names_do_not(recorder: Any) -> None:
    recorder.node_limit = 50
    recorder.scope_name_limit = 20
    sites = [Site(f"function {number}") for number in range(100)]

    def recurse(depth: int) -> None:
        if depth:
            recorder.wrap(recurse, sites[depth % 100])(depth - 1)

    recurse(200)
    for index in range(100):
        recorder.close(recorder.open(recorder.find_or_make_scope_site(f"name {index}", "user")))
    assert 50 < recorder.node_count <= 50 + 2 * (100 + 20)
    assert len(recorder._scope_sites) == 20
    tally = recorder.tally()
    assert tally.calls == 200 + 100
    assert sum(row.totals.calls for row in tally.iterate_totals() if row.path[0] is OVERFLOW) > 200


def test_open_spans_are_clipped_and_marked(recorder: Any) -> None:
    frame = recorder.open(Site("open"))
    wrapped(recorder, "done")(lambda: None)()
    shown = spans_by_name(recorder)
    assert shown["open"].clipped
    assert not shown["done"].clipped
    assert shown["open"].end_ns >= shown["done"].end_ns
    recorder.close(frame)
    assert not spans_by_name(recorder)["open"].clipped


def test_a_suspended_coroutine_is_shown_as_open(recorder: Any) -> None:
    @wrapped(recorder)
    async def waits() -> None:
        await asyncio.sleep(0.05)

    async def main() -> list[str]:
        task = asyncio.create_task(waits())
        await asyncio.sleep(0.01)
        shown = [f"{span.site.name} {span.clipped}" for span in spans_in(recorder)]
        await task
        return shown

    assert asyncio.run(main()) == ["waits True"]


def test_spans_at_the_edges_of_a_window_are_clipped(recorder: Any) -> None:
    function = wrapped(recorder, "f")(lambda: time.sleep(0.002))
    function()
    (whole,) = spans_in(recorder)
    middle = (whole.start_ns + whole.end_ns) // 2
    (first,) = make_spans(columns_in(recorder, 0, middle))
    (second,) = make_spans(columns_in(recorder, middle))
    assert (first.start_ns, first.end_ns, first.clipped) == (whole.start_ns, middle, True)
    assert (second.start_ns, second.end_ns, second.clipped) == (middle, whole.end_ns, True)
    assert len(columns_in(recorder, whole.end_ns + 1, whole.end_ns + 2)) == 0


def test_switching_off_in_the_middle_finishes_what_is_open_and_begins_nothing(recorder: Any) -> None:
    inner = wrapped(recorder, "inner")(lambda: None)

    @wrapped(recorder)
    def outer() -> None:
        recorder.on = False
        inner()

    outer()
    assert tree(recorder) == "outer"


def test_a_signal_handler_that_records_while_its_thread_folds_does_not_deadlock(recorder: Any) -> None:
    function = wrapped(recorder, "f")(lambda: None)
    function()
    ring = recorder.rings()[0]
    with getattr(ring, "lock", contextlib.nullcontext()):
        for _ in range(ring.capacity // 4):
            function()
    assert recorder.tally().calls == ring.capacity // 4 + 1


def test_the_cost_of_a_muted_call_is_measured_for_each_shape_of_probe() -> None:
    assert set(measure_muted_call_ns()) == set(measure_costs()) - {"request"}
    assert all(cost_ns < 1e6 for cost_ns in measure_muted_call_ns().values())


def test_the_cost_of_each_shape_of_probe_is_measured_without_a_trace_in_this_thread() -> None:
    costs = measure_costs()
    assert set(costs) == {"call", "coroutine", "generator", "method", "request", "scope", "step", "wrapper"}
    assert all(1 < cost.added_ns < 1e6 for cost in costs.values())
    assert all(0 <= cost.outside_ns <= cost.added_ns for cost in costs.values())


def test_the_cost_of_a_call_with_cold_caches_is_measured_and_leaves_no_row(
    recorder: Any,
) -> None:
    recorder.on = True
    with recorder.scope("around"):
        assert 1 < max(measure_cold_cache_ns() for _ in range(3)) < 1e6
    assert tree(recorder) == "around"


def test_frameworks_that_ask_for_a_function_get_one(recorder: Any) -> None:
    """Starlette calls an endpoint that is no function as an ASGI application."""
    pytest.importorskip("starlette")
    httpx = pytest.importorskip("httpx")
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    @wrapped(recorder)
    def home(request: Any) -> PlainTextResponse:
        return PlainTextResponse("hello")

    class Owner:
        method = home

    assert inspect.isfunction(home)
    assert inspect.getmembers(Owner, inspect.isfunction) == [("method", home)]
    assert inspect.ismethod(Owner().method)
    assert copy.deepcopy(home) is home
    assert inspect.getsource(home).lstrip().startswith("@wrapped")

    async def ask() -> str:
        transport = httpx.ASGITransport(app=Starlette(routes=[Route("/", home)]))
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            return str((await client.get("/")).text)

    assert asyncio.run(ask()) == "hello"
    assert tree(recorder) == "home"


def test_tasks_that_start_one_another_for_ever_hold_no_chain_of_the_past(recorder: Any) -> None:
    async def tick(left: int) -> None:
        if left:
            asyncio.get_running_loop().create_task(made(left - 1))
        else:
            done.set()

    made = recorder.wrap(tick, Site("tick"))

    async def main() -> int:
        nonlocal done
        done = asyncio.Event()
        before = len(gc.get_objects())
        await made(2_000)
        await done.wait()
        gc.collect()
        return len(gc.get_objects()) - before

    done: asyncio.Event
    assert asyncio.run(main()) < 2_500  # one for each row in the ring: where it came from
    assert recorder.node_count < 10
    assert recorder.tally().calls == 2_001


def test_a_scope_left_open_across_a_yield_is_not_current_outside_and_does_not_count_the_gap(recorder: Any) -> None:
    leaf = wrapped(recorder, "leaf")(lambda: None)

    @wrapped(recorder)
    def numbers() -> Iterator[int]:
        with recorder.make_scope("inside"):
            yield 1
            leaf()
            yield 2

    @wrapped(recorder)
    def consumer() -> None:
        for _ in numbers():
            leaf()
            time.sleep(0.003)

    consumer()
    assert tree(recorder) == outline(
        """
        consumer
          numbers
            inside
              leaf
          leaf
          leaf
        """
    )
    assert sum(span.self_ns for span in spans_in(recorder)) == spans_by_name(recorder)["consumer"].total_ns
    assert recorder.count_unusual_events() == {}


def test_deep_recursion_ends_as_without_us(recorder: Any) -> None:
    def recurse(depth: int) -> int:
        return 0 if not depth else 1 + made(depth - 1)

    made = recorder.wrap(recurse, Site("recurse"))
    assert made(200) == 200
    with pytest.raises(RecursionError):
        made(100_000)
    assert recorder.current_span_id() == 0
    assert made(200) == 200


def test_deep_recursion_of_coroutines_ends_where_the_stack_does(recorder: Any) -> None:
    stack_bytes, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if not 0 < stack_bytes <= 1 << 24:
        pytest.skip("the stack is too large to be used up")

    async def recurse(depth: int) -> int:
        return 0 if not depth else 1 + await made(depth - 1)

    made = recorder.wrap(recurse, Site("recurse"))

    def result(depth: int) -> int:
        with pytest.raises(StopIteration) as done:
            made(depth).send(None)
        return int(done.value.value)

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1_000_000)
    try:
        with pytest.raises(RecursionError):
            made(200_000).send(None)
    finally:
        sys.setrecursionlimit(limit)
    assert recorder.current_span_id() == 0
    assert result(200) == 200


def test_another_profiler_and_a_tracer_may_run_at_the_same_time(recorder: Any) -> None:
    events: list[str] = []
    function = recorder.wrap(lambda: None, Site("f"))
    sys.setprofile(lambda frame, event, arg: events.append(event))
    sys.settrace(lambda frame, event, arg: None)
    try:
        function()
    finally:
        sys.setprofile(None)
        sys.settrace(None)
    assert events
    assert tree(recorder) == "f"


def test_a_signal_handler_that_raises_in_the_middle_leaves_no_span_open(recorder: Any) -> None:
    import signal

    class Alarm(Exception):
        pass

    def ring(*_: object) -> None:
        raise Alarm

    inner = recorder.wrap(lambda: sum(range(200)), Site("inner"))

    def spin() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.002)
        while True:
            inner()

    made = recorder.wrap(spin, Site("outer"))
    before = signal.signal(signal.SIGALRM, ring)
    gc.disable()  # what is raised within a callback of the collector, hypothesis has one, is only complained about
    try:
        for _ in range(20):
            with pytest.raises(Alarm):
                made()
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.enable()
        signal.signal(signal.SIGALRM, before)
    assert recorder.open_rows() == []
    assert recorder.current_span_id() == 0
    assert recorder.tally().calls == recorder.calls > 20


def test_the_time_stamp_counter_agrees_with_the_monotonic_clock_or_says_why_it_is_not_used(recorder: Any) -> None:
    reason = Ticks(recorder).use_tick_counter(0)
    if reason:
        assert "processor" in reason or "kernel" in reason
        return
    function = wrapped(recorder, "f")(lambda: time.sleep(0.005))
    for _ in range(5):
        before = time.monotonic_ns()
        function()
        after = time.monotonic_ns()
        span = max(spans_in(recorder), key=lambda span: span.span_id)
        assert before - MOST_DEVIATION_NS < span.start_ns <= span.end_ns < after + MOST_DEVIATION_NS
        assert abs(recorder.check_ticks(50_000)) < 50_000


def test_a_time_stamp_counter_that_strays_is_given_up_and_counted(recorder: Any) -> None:
    if Ticks(recorder).use_tick_counter(0):
        pytest.skip("no sound time stamp counter")
    time.sleep(0.01)
    assert recorder.check_ticks(-1) is None
    assert recorder.check_ticks(50_000) is None
    assert list(recorder.count_unusual_events()) == [
        "time stamp counter no longer used: it differed from the monotonic clock"
    ]
    before = time.monotonic_ns()
    assert before <= recorder.now_ns() <= time.monotonic_ns()


def test_calls_that_the_counter_is_given_up_or_taken_up_in_are_recorded_and_never_negative(recorder: Any) -> None:
    stops = wrapped(recorder, "stops")(lambda: recorder.stop_ticks())
    starts = wrapped(recorder, "starts")(lambda: recorder.start_ticks())
    for _ in range(3):
        starts()
        stops()
    assert tree(recorder) == "starts\nstops\n" * 2 + "starts\nstops"
    assert all(span.end_ns >= span.start_ns for span in spans_in(recorder))
    assert all(row.totals.calls == 3 for row in recorder.tally().iterate_totals())


@pytest.mark.parametrize(
    ("flags", "source", "reason"),
    [
        ("fpu constant_tsc nonstop_tsc", "tsc", ""),
        ("fpu constant_tsc", "tsc", "does not claim nonstop_tsc"),
        ("fpu constant_tsc nonstop_tsc", "kvm-clock", "keeps its time by kvm-clock"),
        (None, "tsc", "does not say"),
    ],
)
def test_processor_and_kernel_must_both_call_the_counter_sound(
    monkeypatch: pytest.MonkeyPatch, flags: str | None, source: str, reason: str
) -> None:

    def read(path: Path, **_: object) -> str:
        if flags is None:
            raise FileNotFoundError(path)
        return f"model name: x\nflags\t\t: {flags}\nbugs: none\n" if path.name == "cpuinfo" else f"{source}\n"

    monkeypatch.setattr(Path, "read_text", read)
    found = recorder_module._explain_unreliable_counter()
    assert reason in found
    assert bool(found) == bool(reason)


# -------------------------------------------------------------------- contexts copied behind our back

UNSEEN_COPY = [contextvars.copy_context]
"""The original, where the recorder's watch does not find it, as code in C calls it."""


def test_a_task_made_before_its_loop_runs_is_recorded_whole_and_leaves_the_caller_current(recorder: Any) -> None:
    leaf = wrapped(recorder, "leaf")(lambda: None)

    @wrapped(recorder)
    async def job() -> None:
        leaf()
        await asyncio.sleep(0)
        leaf()

    @wrapped(recorder)
    def serve() -> None:
        loop = asyncio.new_event_loop()
        try:
            leaf()
            tasks = [loop.create_task(job()), loop.create_task(job())]
            loop.run_until_complete(asyncio.wait(tasks))
            leaf()
        finally:
            loop.close()
        leaf()

    serve()
    spans = {span.span_id: span for span in spans_in(recorder)}
    parents = [(span.site.name, spans[span.parent_id].site.name if span.parent_id else "") for span in spans.values()]
    assert parents.count(("leaf", "serve")) == 3
    assert parents.count(("leaf", "job")) == 4
    assert len(parents) == 10
    assert recorder.count_unusual_events() == {}
    assert recorder.open_rows() == []


def test_a_context_copied_unseen_records_on_another_thread_without_a_trace_in_this_one(recorder: Any) -> None:
    leaf = wrapped(recorder, "leaf")(lambda: None)
    other = wrapped(recorder, "other")(leaf)

    @wrapped(recorder)
    def root() -> None:
        context = UNSEEN_COPY[0]()
        thread = threading.Thread(target=context.run, args=(lambda: [other() for _ in range(200)],))
        thread.start()
        for _ in range(200):
            leaf()
        thread.join()

    root()
    spans = {span.span_id: span for span in spans_in(recorder)}
    assert len(spans) == 601
    below = [spans[span.parent_id].site.name for span in spans.values() if span.parent_id and span.site.name == "leaf"]
    assert sorted(below) == ["other"] * 200 + ["root"] * 200
    assert len({span.thread_id for span in spans.values()}) == 2
    assert recorder.count_unusual_events() == {}
    assert recorder.open_rows() == []


def test_a_context_copied_unseen_and_run_here_nests_as_it_runs(recorder: Any) -> None:
    leaf = wrapped(recorder, "leaf")(lambda: None)
    inner = wrapped(recorder, "inner")(leaf)
    wrapped(recorder, "root")(lambda: [UNSEEN_COPY[0]().run(inner), leaf()])()
    spans = {span.span_id: span for span in spans_in(recorder)}
    assert sorted(spans[span.parent_id].site.name for span in spans.values() if span.site.name == "leaf") == [
        "inner",
        "root",
    ]
    assert recorder.count_unusual_events() == {}
    assert recorder.open_rows() == []
    assert recorder.current_span_id() == 0


def test_a_scope_begun_by_hand_outlives_its_function_and_is_found_by_another_thread(recorder: Any) -> None:
    leaf = wrapped(recorder, "leaf")(lambda: None)
    scope = recorder.make_scope("by hand")
    begin = wrapped(recorder, "begin")(lambda: [scope.start(), leaf()])
    context = contextvars.Context()
    context.run(begin)
    for part in (leaf, scope.end, leaf):
        thread = threading.Thread(target=context.run, args=(part,))
        thread.start()
        thread.join()
    assert sorted(tree(recorder).split("\n")) == sorted(["begin", "  by hand", "    leaf", "    leaf", "leaf"])
    assert recorder.count_unusual_events() == {"scope closed before a scope inside it": 1}
    assert recorder.open_rows() == []


def test_code_of_the_loop_itself_runs_in_the_callers_context_and_finds_its_span(recorder: Any) -> None:
    leaf = wrapped(recorder, "leaf")(lambda: None)

    @wrapped(recorder)
    def serve() -> None:
        loop = asyncio.new_event_loop()
        try:
            asyncio._set_running_loop(loop)
            leaf()
            asyncio._set_running_loop(None)
            leaf()
        finally:
            loop.close()

    serve()
    leaf()
    assert tree(recorder) == "serve\n  leaf\n  leaf\nleaf"
    assert recorder.count_unusual_events() == {}
    assert recorder.current_span_id() == 0


def test_a_span_shorter_than_its_site_asks_is_counted_and_not_kept(recorder: Any) -> None:
    def site(name: str) -> Site:
        return Site(name, min_ns=200_000_000)  # longer than what does nothing waits for a processor

    quick = wrapped(recorder, "quick")(lambda: None)
    passed = recorder.wrap(lambda: None, site("passed"))
    slow = recorder.wrap(lambda: time.sleep(0.25), site("slow"))
    around = recorder.wrap(lambda: quick(), site("around"))

    def fail() -> None:
        raise ValueError

    failing = recorder.wrap(fail, site("failing"))
    for _ in range(5):
        passed()
    slow()
    around()
    with pytest.raises(ValueError):
        failing()
    with recorder.new_scope(site("scope"), None):
        pass
    assert tree(recorder) == outline(
        """
        slow
        around
          quick
        failing !ValueError
        """
    )
    assert {row.path[-1].name: row.totals.calls for row in recorder.tally().iterate_totals()} == {
        "passed": 5,
        "slow": 1,
        "around": 1,
        "quick": 1,
        "failing": 1,
        "scope": 1,
    }
    assert recorder.losses() == {"spans shorter than their rule asks": 6}
    assert recorder.calls == 10
    recorder.reset()
    assert recorder.losses() == {}


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 10**7)), max_size=8), st.data())
def test_device_time_that_comes_later_counts_as_if_it_had_been_known(
    make_recorder: Any, times: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    recorder = make_recorder()
    recorder.on = True
    site, expected = Site("kernel", device=True), Totals()
    for _ in times:
        recorder.record(site, recorder.now_ns(), None)
    for ring in recorder.rings():
        rows = rows_in(recorder)
        for row, (device_ns, beyond_ns, _) in zip(rows, data.draw(st.permutations(times)), strict=True):
            host_ns = row[6] - row[5]
            assert recorder.count_device(ring, row[0], host_ns, device_ns, host_ns + beyond_ns)
            elapsed_ns = host_ns + beyond_ns
            expected.merge(
                Totals(
                    calls=1,
                    total_ns=host_ns,
                    self_ns=host_ns,
                    device_ns=device_ns,
                    elapsed_ns=elapsed_ns,
                    min_ns=elapsed_ns,
                    max_ns=elapsed_ns,
                    first_ns=row[5],
                    histogram={bucket_of(elapsed_ns): 1},
                )
            )
        assert not recorder.count_device(ring, row[0], 1 << 40, 1, 1 << 41)
        assert not recorder.count_device(ring, row[0], -1, 1, 1)
    found = next((totals for _, _, totals in rows_of(recorder.tally())), Totals())
    assert expected.min_ns * 63 / 64 <= found.min_ns <= expected.min_ns
    found.min_ns = expected.min_ns
    assert found == expected


class Part:
    """A class with a method whose instances are recorded one by one."""

    def work(self, x: int = 1) -> int:
        if x < 0:
            raise ValueError(x)
        return x + 1


@pytest.fixture
def choice(recorder: Any) -> Iterator[dict[int, Site | None]]:
    """`Part.work` recorded by instance; the choice is the dict of sites. What is not in it is asked for by `decide`."""
    sites: dict[int, Site | None] = {}

    def decide(part: Part) -> Site | None:
        if getattr(part, "interrupt", False):
            raise KeyboardInterrupt
        sites[id(part)] = Site("part", "layer", instance=str(len(sites))) if hasattr(part, "selected") else None
        return sites[id(part)]

    own = vars(Part)["work"]
    Part.work = wrapping.wrap_method(recorder, own, sites, decide)  # type: ignore[method-assign]
    yield sites
    Part.work = own  # type: ignore[method-assign]


def test_a_method_records_the_instances_that_are_chosen_each_decided_once(
    recorder: Any, choice: dict[int, Site | None]
) -> None:
    chosen, other = Part(), Part()
    chosen.selected = True  # type: ignore[attr-defined]
    for _ in range(3):
        assert (chosen.work(2), other.work(x=3), Part.work(chosen, 4)) == (3, 4, 5)
    with pytest.raises(ValueError):
        chosen.work(-1)
    with pytest.raises(TypeError):
        Part.work()  # type: ignore[call-arg]
    site = choice[id(chosen)]
    assert choice == {id(chosen): site, id(other): None}
    (row,) = recorder.tally().iterate_totals()
    assert (row.path, row.totals.calls, row.totals.errors) == ((site,), 7, 1)
    assert str(inspect.signature(Part.work)) == "(self, x: 'int' = 1) -> 'int'"


def test_a_method_follows_each_change_of_the_choice_at_its_next_call(
    recorder: Any, choice: dict[int, Site | None]
) -> None:
    def recorded() -> list[str]:
        cursor = recorder.make_row_cursor()
        part.work()
        return [recorder.paths().site(int(row["node"])).name for row in read_rows(cursor)]

    part, other = Part(), Part()
    part.selected = other.selected = True  # type: ignore[attr-defined]
    changes: list[tuple[Callable[[], object], list[str]]] = [
        (lambda: None, ["part"]),
        (other.work, ["part"]),
        (lambda: choice.update({id(part): None}), []),
        (lambda: choice.update({id(part): Site("anew", "layer")}), ["anew"]),
        (lambda: choice.pop(id(part)), ["part"]),
        (lambda: choice.update({id(other): None}), ["part"]),
        (choice.clear, ["part"]),
    ]
    for change, expected in changes:
        change()
        assert [recorded() for _ in range(3)] == [expected] * 3


def test_each_of_thousands_of_instances_is_counted_under_its_own_site_and_parent(
    recorder: Any, choice: dict[int, Site | None]
) -> None:
    parts = [Part() for _ in range(5_000)]
    choice.update({id(part): Site(f"part {number}", "layer") for number, part in enumerate(parts) if number % 2})
    recorder.node_limit = 1 << 15

    def work(number: int) -> None:
        for part in parts[: number * 1_000]:
            part.work()

    parents = [recorder.wrap(functools.partial(work, number), Site(f"parent {number}")) for number in (5, 4, 3)]
    for parent in [*parents, *parents]:
        parent()
    expected = {
        (f"parent {count}", f"part {number}"): 2 for count in (5, 4, 3) for number in range(1, count * 1_000, 2)
    }
    expected.update({(f"parent {count}",): 2 for count in (5, 4, 3)})
    assert {tuple(s.name for s in row.path): row.totals.calls for row in recorder.tally().iterate_totals()} == expected


def test_percentiles_count_every_call_at_any_time(recorder: Any) -> None:
    site = Site("f")
    function = recorder.wrap(lambda: None, site)
    for number in range(1, 40):
        function()
        (row,) = recorder.tally().iterate_totals()
        assert sum(recorder.tally().histogram([row.totals.node]).values()) == row.totals.calls == number


def test_a_method_passes_muted_instances_and_what_nobody_could_decide(
    recorder: Any, choice: dict[int, Site | None]
) -> None:
    part = Part()
    part.selected = True  # type: ignore[attr-defined]
    part.work()
    site = choice[id(part)]
    recorder.allow_muting(site)
    assert recorder.mute(site)
    part.work()
    assert recorder.muted_calls() == {site: 1}
    recorder.unmute(site)
    interrupted = Part()
    interrupted.interrupt = True  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        interrupted.work()
    recorder.on = False
    assert interrupted.work() == 2
    recorder.on = True
    assert recorder.tally().calls == 1
    assert recorder.current_span_id() == 0


@pytest.mark.slow
def test_the_tally_of_all_threads_together_is_the_sum_of_the_tallies_of_each_thread(make_recorder: Any) -> None:
    """Threads that have ended and whose rings were given up too, and sites that mean the same place."""
    recorder = make_recorder()
    sites = [Site("f", "op"), Site("f", "op"), Site("g", "layer"), Site("h", "copy")]

    def work(turn: int) -> None:
        for outer in sites[: 1 + turn % 3]:
            frame = recorder.open(outer)
            for inner in sites[turn % 2 :]:
                recorder.close(recorder.open(inner, {"bytes": turn}), KeyError() if turn == 3 else None)
            recorder.close(frame)

    for turn in range(1_100):
        thread = threading.Thread(target=work, args=(turn,))
        thread.start()
        thread.join()
    assert recorder.ended_rows
    expected = of_all_threads(recorder.tally())
    for merged in (recorder.tally().merge_threads(), recorder.tally().merge_threads()):
        assert of_all_threads(merged) == expected
        assert merged.threads == {0: "(all threads)"}
        firsts = merged.lines["first_ns"].tolist()
        assert firsts == sorted(firsts)
    calls = Counter[object]()
    for path, totals in expected.items():
        calls[path[-1]] += totals.calls
    found = Counter[object]()
    for site, called in calls_by_site(recorder).items():
        found[site.key] += called
    assert found == calls


@pytest.mark.parametrize("shape", ["call", "scope", "request", "coroutine", "generator", "async generator"])
def test_an_error_keeps_its_name_cut_and_no_code_of_its_class_is_run(recorder: Any, shape: str) -> None:
    class Meta(type):
        @property
        def __name__(cls) -> str:  # type: ignore[override]
            raise SystemError("a name that nobody can ask for")

    class Nameless(Exception, metaclass=Meta):
        pass

    long = type("L" * 5_000, (Exception,), {})

    def call(error: type[Exception]) -> None:
        raise error

    async def coroutine(error: type[Exception]) -> None:
        raise error

    def generator(error: type[Exception]) -> Iterator[int]:
        yield 1
        raise error

    async def async_generator(error: type[Exception]) -> AsyncIterator[int]:
        yield 1
        raise error

    async def drain(items: Any) -> None:
        async for _ in items:
            pass

    def scope(error: type[Exception]) -> None:
        with recorder.scope("x"):
            raise error

    made = {
        "call": wrapped(recorder)(call),
        "scope": scope,
        "request": wrapped(recorder, kind="request")(call),
        "coroutine": lambda error: asyncio.run(wrapped(recorder)(coroutine)(error)),
        "generator": lambda error: list(wrapped(recorder)(generator)(error)),
        "async generator": lambda error: asyncio.run(drain(wrapped(recorder)(async_generator)(error))),
    }[shape]
    for error in (Nameless, long):
        with pytest.raises(error):
            made(error)
    assert [span.error for span in sorted(spans_in(recorder), key=lambda span: span.start_ns)] == [
        "Nameless",
        "L" * 200,
    ]


OTHER_CLOCK = """
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now)
{
    long failed = syscall(SYS_clock_gettime, clock, now);
    now->tv_sec += 2000000000;
    return failed;
}
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc to make a library with a clock of its own")
@pytest.mark.parametrize("is_replaced", [False, True])
def test_spans_have_the_clock_of_the_process_also_where_a_library_replaces_it(
    tmp_path: Path, is_replaced: bool
) -> None:
    source, library = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(OTHER_CLOCK)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    program = (
        "import time; from instrument.recorder.recorder import RECORDER\n"
        "print(time.monotonic_ns(), RECORDER.now_ns(), time.monotonic_ns())"
    )
    environment = {**os.environ, **({"LD_PRELOAD": str(library)} if is_replaced else {})}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    before_ns, now_ns, after_ns = map(int, done.stdout.split())
    assert before_ns <= now_ns <= after_ns
    assert (now_ns > 10**18) == is_replaced
