"""Running and waiting: the suspended time of a coroutine, measured around its steps and inside of its body.

The measurement around a step is within the recorder's time. The recorder's time is within the measurement inside the
body. Both measurements therefore bound the recorder's time, on a machine with any load.
"""

from __future__ import annotations

import asyncio
import sys
import time
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from readback import columns_in, rows_in, spans_in

from instrument import chrome
from instrument.instrumentors.requests import asgi_wsgi_apps
from instrument.instrumentors.requests.exchange import Exchange, Exchanges, SteppedItems
from instrument.profile.model import RequestsRule
from instrument.recording.mapped import Mapped
from instrument.recording.spans import Origin, Site, Span
from instrument.recording.tally import Tally
from instrument.trace import file
from instrument.trace.of_recording import read_spans_and_tally
from instrument.trace.self_times import waiting_times, were_suspended
from instrument.trace.trace import Trace, columns_of_spans

PAUSE_S = 0.001
SITE = Site("any")


class Pauses:
    """Awaitables that suspend once, and how long that was as they see it."""

    def __init__(self) -> None:
        self.inside_ns = self.around_ns = 0

    @types.coroutine
    def one(self) -> Generator[None, None, None]:
        since_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.inside_ns += time.monotonic_ns() - since_ns

    def drive(self, coroutine: Coroutine[Any, Any, Any], most: int | None = None) -> Any:
        """Step it to its end, or so often; between two steps it is suspended."""
        for _ in range(10 if most is None else most):
            try:
                coroutine.send(None)
            except StopIteration as done:
                return done.value
            self.rest()
        assert most is not None, "it goes on"
        return None

    def rest(self) -> None:
        since_ns = time.monotonic_ns()
        time.sleep(PAUSE_S)
        self.around_ns += time.monotonic_ns() - since_ns

    def bound(self, waited_ns: int) -> bool:
        return 0 < self.around_ns <= waited_ns <= self.inside_ns


def wrapped(recorder: Any, name: str = "") -> Callable[[Any], Any]:
    return lambda function: recorder.wrap(function, Site(name or function.__name__))


def by_name(recorder: Any) -> dict[str, Span]:
    return {span.site.name: span for span in spans_in(recorder)}


def waited(span: Span) -> int:
    return span.total_ns - span.active_ns


def waiting(recorder: Any) -> dict[str, int]:
    """Return the time that was waited itself, by name."""
    return lines_of(recorder.tally())


def lines_of(tally: Tally) -> dict[str, int]:
    return {row.path[-1].name: row.totals.waiting_ns for row in tally.iterate_totals()}


def test_a_coroutine_and_what_awaits_it_wait_while_it_is_suspended_and_the_innermost_waits_itself(
    recorder: Any,
) -> None:
    pauses = Pauses()

    @wrapped(recorder)
    async def inner() -> int:
        await pauses.one()
        await pauses.one()
        return 7

    @wrapped(recorder)
    async def outer() -> int:
        async with recorder.scope("scope"):
            return int(await inner())

    assert pauses.drive(outer()) == 7
    spans = by_name(recorder)
    assert all(pauses.bound(waited(span)) for span in spans.values())
    assert pauses.bound(waiting(recorder)["inner"])
    assert waiting(recorder)["outer"] == waiting(recorder)["scope"] == 0
    assert spans["inner"].self_ns == spans["inner"].total_ns, "its waiting is of its self time"
    assert sum(span.self_ns for span in spans.values()) == spans["outer"].total_ns
    trace = columns_of_spans(list(spans.values()))
    assert waiting_times(trace).sum() == waiting(recorder)["inner"]
    assert not were_suspended(trace).any()


def test_scopes_know_what_of_the_waiting_around_them_was_while_they_were_open(recorder: Any) -> None:
    before, during = Pauses(), Pauses()

    @wrapped(recorder)
    async def handle() -> None:
        await before.one()
        with recorder.scope("open"):
            await during.one()
        with recorder.scope("quick"):
            pass

    running = handle()
    before.drive(running, 1)
    during.drive(running)
    spans = by_name(recorder)
    assert during.bound(waited(spans["open"]))
    assert during.bound(waiting(recorder)["open"])
    assert waited(spans["quick"]) == 0
    assert before.around_ns + during.around_ns <= waited(spans["handle"]) <= before.inside_ns + during.inside_ns
    assert before.bound(waiting(recorder)["handle"])


def test_a_scope_that_nobody_steps_waits_as_long_as_the_coroutines_in_it_and_else_runs(recorder: Any) -> None:
    own, inside = Pauses(), Pauses()

    @wrapped(recorder)
    async def inner() -> None:
        await inside.one()

    async def unseen() -> None:
        with recorder.scope("scope"):
            await own.one()
            await inner()

    running = unseen()
    own.drive(running, 1)
    inside.drive(running)
    assert inside.bound(waited(by_name(recorder)["scope"]))
    assert waiting(recorder)["scope"] == 0


def test_a_coroutine_that_is_never_suspended_says_nothing_more(recorder: Any) -> None:
    @wrapped(recorder)
    async def quick() -> None: ...

    with pytest.raises(StopIteration):
        quick().send(None)
    (row,) = rows_in(recorder)
    assert row[7:] == (0, -1, None, None)
    assert waiting(recorder) == {"quick": 0}


@pytest.mark.parametrize("how", ["close", "throw", "a caught throw"])
def test_a_coroutine_that_is_closed_or_thrown_into_while_it_is_suspended_has_waited_until_then(
    recorder: Any, how: str
) -> None:
    pauses, told = Pauses(), []

    async def body() -> str:
        try:
            await pauses.one()
        except ValueError:
            if how == "throw":
                raise
            return "caught"
        finally:
            told.append("left")
        return "ended"

    running = recorder.wrap(body, Site("body"))()
    pauses.drive(running, 1)
    if how == "close":
        running.close()
    elif how == "throw":
        with pytest.raises(ValueError, match="thrown"):
            running.throw(ValueError("thrown"))
    else:
        with pytest.raises(StopIteration) as done:
            running.throw(ValueError("thrown"))
        assert done.value.value == "caught"
    (span,) = spans_in(recorder)
    assert pauses.bound(waited(span))
    assert told == ["left"]
    assert span.error == {"close": None, "throw": "ValueError", "a caught throw": None}[how]
    assert (recorder.current_span_id(), recorder.open_rows()) == (0, [])


def test_tasks_wait_each_for_itself_also_when_they_are_cancelled(recorder: Any) -> None:
    @wrapped(recorder)
    async def waits(event: asyncio.Event) -> None:
        await event.wait()

    @wrapped(recorder)
    async def main() -> None:
        event = asyncio.Event()
        tasks = [asyncio.create_task(waits(event)) for _ in range(3)]
        await asyncio.sleep(PAUSE_S)
        tasks[0].cancel()
        event.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
    spans = [span for span in spans_in(recorder) if span.site.name == "waits"]
    assert [span.attributes.get("instrument.outcome") for span in spans].count("cancelled") == 1
    assert all(span.active_ns < span.total_ns == span.self_ns for span in spans)
    assert waiting(recorder)["waits"] == sum(map(waited, spans))
    (root,) = [span for span in spans_in(recorder) if span.site.name == "main"]
    assert waiting(recorder)["main"] == waited(root), "tasks are no part of it"


@pytest.mark.skipif(sys.version_info < (3, 12), reason="no eager tasks before Python 3.12")
def test_an_eager_task_does_not_wait_with_its_creator(recorder: Any) -> None:
    async def bare() -> None:
        with recorder.span_of(Site("in the task"))():
            await asyncio.sleep(0)
            time.sleep(0.002)

    async def create() -> None:
        await asyncio.create_task(bare())

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]
        await recorder.wrap(create, Site("creator"))()

    asyncio.run(main())
    spans = {span.site.name: span for span in spans_in(recorder)}
    creator, inner = spans["creator"], spans["in the task"]
    assert inner.active_ns in (None, inner.total_ns)
    assert (creator.active_ns or 0) < creator.total_ns - 2_000_000
    assert inner.parent_id == creator.span_id


def test_a_coroutine_that_is_never_awaited_leaves_no_span_and_the_warning_of_python(recorder: Any) -> None:
    @wrapped(recorder)
    async def forgotten() -> None: ...

    with pytest.warns(RuntimeWarning, match="'.*forgotten' was never awaited"):
        forgotten()
    assert spans_in(recorder) == []


def test_an_async_generator_waits_where_its_body_awaits_and_not_between_its_items(recorder: Any) -> None:
    inside, beside = Pauses(), Pauses()

    @wrapped(recorder)
    async def numbers() -> AsyncIterator[int]:
        with recorder.scope("across"):
            for number in range(2):
                await inside.one()
                yield number

    @wrapped(recorder)
    async def consumer() -> None:
        async for _ in numbers():
            await beside.one()

    running = consumer()
    for pauses in (inside, beside, inside, beside):
        pauses.drive(running, 1)
    inside.drive(running)
    spans = by_name(recorder)
    trace = columns_of_spans(list(spans.values()))
    told = dict(zip((trace.sites[site].name for site in trace.site), waiting_times(trace).tolist(), strict=True))
    assert inside.bound(waiting(recorder)["across"])
    assert waiting(recorder)["numbers"] == 0
    assert beside.bound(waiting(recorder)["consumer"])
    assert inside.around_ns + beside.around_ns <= waited(spans["consumer"]) <= inside.inside_ns + beside.inside_ns
    assert waited(spans["numbers"]) >= inside.around_ns + beside.around_ns, "it stood still, too"
    assert told["consumer"] == waiting(recorder)["consumer"]


def test_a_scope_across_the_items_of_a_generator_does_not_wait_with_its_consumer(recorder: Any) -> None:
    pauses = Pauses()

    @wrapped(recorder)
    def numbers() -> Iterator[int]:
        with recorder.scope("across"):
            yield from range(2)

    @wrapped(recorder)
    async def consumer() -> None:
        for _ in numbers():
            await pauses.one()

    pauses.drive(consumer())
    assert waiting(recorder)["across"] == waiting(recorder)["numbers"] == 0
    assert pauses.bound(waiting(recorder)["consumer"])
    assert sum(span.self_ns for span in spans_in(recorder)) == by_name(recorder)["consumer"].total_ns


def test_open_spans_have_their_waiting_time_up_to_now(recorder: Any) -> None:
    pauses = Pauses()

    @wrapped(recorder)
    async def handle() -> None:
        with recorder.scope("inside"):
            await pauses.one()

    running = handle()
    before_ns = time.monotonic_ns()
    running.send(None)
    pauses.rest()
    for _, row in recorder.open_rows():
        assert pauses.around_ns <= row[6] - row[5] - row[8] <= time.monotonic_ns() - before_ns
        assert row[8] - row[7] >= 0
    assert len(recorder.open_rows()) == 2
    pauses.drive(running)


def test_memory_files_and_traces_say_what_was_waited(recorder: Any, tmp_path: Path) -> None:
    pauses = Pauses()

    @wrapped(recorder)
    async def inner() -> None:
        await pauses.one()
        recorder.annotate_innermost(tokens=3)

    @wrapped(recorder)
    async def outer() -> None:
        await inner()

    def numbers_of(trace: Any) -> list[tuple[int, ...]]:
        its = trace.span_id, trace.start_ns, trace.end_ns, trace.active_ns, trace.self_ns
        return sorted(zip(*(column.tolist() for column in its), strict=True))

    pauses.drive(outer())
    end_ns = time.monotonic_ns()
    expected = numbers_of(columns_of_spans(spans_in(recorder)))
    assert all(active_ns < end_ns - start_ns for _, start_ns, end_ns, active_ns, _ in expected)
    assert numbers_of(columns_in(recorder, 0, end_ns)) == expected
    if recorder.memory_fd >= 0:
        saved = read_spans_and_tally(Mapped(recorder.memory_fd))
        assert numbers_of(saved.trace.columns) == expected
        assert lines_of(saved.read_or_count_totals()) == waiting(recorder)
    trace = Trace(Origin(1, "shop", 0, 0), 0, end_ns, spans_in(recorder), {1: "main"})
    read, tally = chrome.load(chrome.dump(tmp_path / "trace.json", trace, recorder.tally()))
    assert numbers_of(columns_of_spans(read.spans)) == expected
    assert tally is not None
    assert lines_of(tally) == waiting(recorder)
    saved = file.load(file.dump(tmp_path / "trace.npz", trace, recorder.tally()))
    assert numbers_of(saved.trace.columns) == expected
    assert lines_of(saved.read_or_count_totals()) == waiting(recorder)


def test_chains_of_awaiting_coroutines_have_the_same_frames_as_without_us(recorder: Any) -> None:
    pauses = Pauses()

    async def inner() -> None:
        await pauses.one()

    def frames(coroutine: Any) -> list[str]:
        found = []
        while hasattr(coroutine, "cr_await"):
            found.append(coroutine.cr_code.co_name)
            coroutine = coroutine.cr_await
        return found

    async def outer(called: Any) -> None:
        await called()

    running = outer(wrapped(recorder)(inner))
    running.send(None)
    assert [name for name in frames(running) if name != "wrapper"] == ["outer", "inner"]
    pauses.drive(running)


def test_results_of_a_coroutine_are_read_before_its_span_ends_and_attributes_at_the_call(
    recorder: Any,
) -> None:
    told: list[tuple[object, bool]] = []

    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    made = recorder.wrap(
        double,
        Site("double"),
        attributes=lambda args, kwargs: {"number": args[0]},
        results=lambda result: told.append((result, recorder.current_span_id() != 0)),
    )
    assert asyncio.run(made(4)) == 8
    assert told == [(8, True)]
    (span,) = spans_in(recorder)
    assert span.attributes == {"number": 4}
    assert span.active_ns < span.total_ns


def begun(recorder: Any) -> Exchange:
    """A request that has just arrived."""
    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    exchange = asgi_wsgi_apps.get_arrivals(Exchanges(RequestsRule(), recorder))["http"].begin_exchange(scope)
    assert exchange is not None
    return exchange


def test_a_request_waits_while_its_generator_is_suspended_by_what_it_awaits_and_by_who_takes_its_items(
    recorder: Any,
) -> None:
    awaited, handed_over = Pauses(), Pauses()

    async def work() -> AsyncIterator[int]:
        for number in range(3):
            await awaited.one()
            since_ns = time.monotonic_ns()
            yield number
            handed_over.inside_ns += time.monotonic_ns() - since_ns

    async def serve() -> list[int]:
        exchange, taken = begun(recorder), []
        async for item in SteppedItems(exchange, work()):
            handed_over.rest()
            taken.append(item)
        exchange.end()
        return taken

    assert awaited.drive(serve()) == [0, 1, 2]
    (span,) = spans_in(recorder)
    assert awaited.around_ns + handed_over.around_ns <= waited(span) <= awaited.inside_ns + handed_over.inside_ns
    assert waiting(recorder) == {span.site.name: waited(span)}


@pytest.mark.parametrize("end", ["closed", "thrown", "failed", "closed as it awaits"])
def test_a_generator_that_serves_a_request_ends_as_it_would_without_us(recorder: Any, end: str) -> None:
    pauses = Pauses()

    async def work(seen: list[object]) -> AsyncIterator[int]:
        try:
            yield 0
            await pauses.one()
            if end == "failed":
                raise ValueError("its own")
            yield 1
        except BaseException as error:
            seen.append(repr(error))
            raise
        finally:
            if end != "closed as it awaits":
                await pauses.one()
            seen.append("last")

    def seen_of(stands_in: Callable[[Any], Any]) -> list[object]:
        seen: list[object] = []
        items = stands_in(work(seen))

        async def take() -> None:
            async for _ in items:
                if end == "closed":
                    await items.aclose()
                    return

        taking = take()
        taking.send(None)
        try:
            if end == "thrown":
                taking.throw(KeyError("thrown"))
            if end == "closed as it awaits":
                taking.close()
            else:
                pauses.drive(taking)
        except BaseException as error:
            seen.append(repr(error))
        return seen

    exchange = begun(recorder)
    found = seen_of(lambda items: SteppedItems(exchange, items))
    exchange.end()
    assert found == seen_of(lambda items: items)
    assert "last" in found
    assert len(spans_in(recorder)) == 1
