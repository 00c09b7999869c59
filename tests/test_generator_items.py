"""Items of generators: how many a timed generator has yielded, and when, as attributes of its span."""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

import pytest
from readback import spans_in

from instrument.recording.spans import FIRST_ITEM, ITEMS, LAST_ITEM, LONGEST_GAP, Site, Span

FACTS = {ITEMS, FIRST_ITEM, LAST_ITEM, LONGEST_GAP}


def only_span(recorder: Any) -> Span:
    (span,) = spans_in(recorder)
    return span  # type: ignore[no-any-return]


def items_of(recorder: Any) -> Any:
    """Return the number of items that the only span reports, None without one. It has all facts or none."""
    span = only_span(recorder)
    count = span.attributes.get(ITEMS)
    expected = FACTS if count is not None and count > 1 else FACTS - {LONGEST_GAP} if count else set()
    assert {*span.attributes} & FACTS == expected
    return count


def wrapped(recorder: Any, function: Callable[..., Any]) -> Any:
    return recorder.wrap(function, Site("items", "op"))


def until(recorder: Any, after_ns: int) -> int:
    """Wait until so much time has gone by on the recorder's clock, and some more; the time then."""
    begun_ns = recorder.now_ns()
    while recorder.now_ns() - begun_ns < after_ns:
        pass
    return int(recorder.now_ns())


def test_the_span_of_a_generator_reports_when_its_items_came(recorder: Any) -> None:
    times = []

    def numbers() -> Iterator[int]:
        for number in range(3):
            until(recorder, 10_000)
            times.append(recorder.now_ns())
            yield number

    for number in wrapped(recorder, numbers)():
        times.append(recorder.now_ns())
        if number == 1:
            until(recorder, 2_000_000)
    span = only_span(recorder)
    facts = span.attributes
    first, last, gap = (int(facts[name]) for name in (FIRST_ITEM, LAST_ITEM, LONGEST_GAP))  # type: ignore[arg-type]
    assert facts[ITEMS] == 3
    assert times[0] <= span.start_ns + first <= times[1]
    assert times[4] <= span.start_ns + last <= times[5]
    assert max(times[2] - times[1], times[4] - times[3]) <= gap
    assert gap <= max(times[3] - times[0], times[5] - times[2])
    assert last <= span.total_ns


def test_the_span_of_an_async_generator_counts_items_and_no_awaits(recorder: Any) -> None:
    async def main() -> None:
        async def numbers() -> AsyncIterator[int]:
            for number in range(3):
                for _ in range(5):
                    await asyncio.sleep(0)
                until(recorder, 10_000)
                yield number

        assert [number async for number in wrapped(recorder, numbers)()] == [0, 1, 2]
        assert items_of(recorder) == 3
        facts = only_span(recorder).attributes
        first, last, gap = (int(facts[name]) for name in (FIRST_ITEM, LAST_ITEM, LONGEST_GAP))  # type: ignore[arg-type]
        assert 10_000 <= gap <= last - first <= 2 * gap
        assert 10_000 <= first < last

    asyncio.run(main())


def consume_all(generator: Any) -> None:
    list(generator)


def close_early(generator: Any) -> None:
    next(generator)
    next(generator)
    generator.close()


def drop_early(generator: Any) -> None:
    next(generator)


def close_twice(generator: Any) -> None:
    next(generator)
    generator.close()
    generator.close()


def send(generator: Any) -> None:
    next(generator)
    generator.send("sent")
    generator.throw(KeyError("answered by an item"))
    with pytest.raises(ValueError, match="thrown"):
        generator.throw(ValueError("thrown"))


@pytest.mark.parametrize(
    ("use", "count"), [(consume_all, 4), (close_early, 2), (drop_early, 1), (close_twice, 1), (send, 3)]
)
def test_only_what_came_is_counted_however_a_generator_ends(recorder: Any, use: Any, count: int) -> None:
    def numbers() -> Iterator[int]:
        for number in range(4):
            try:
                yield number
            except KeyError:
                yield -1

    use(wrapped(recorder, numbers)())
    assert items_of(recorder) == count


async def take_all(generator: Any) -> None:
    assert [item async for item in generator]


async def close_async(generator: Any) -> None:
    await generator.__anext__()
    await generator.__anext__()
    await generator.aclose()


async def send_async(generator: Any) -> None:
    await generator.__anext__()
    await generator.asend("sent")
    await generator.athrow(KeyError("answered by an item"))
    with pytest.raises(ValueError, match="thrown"):
        await generator.athrow(ValueError("thrown"))


async def break_off_async(generator: Any) -> None:
    await generator.__anext__()
    step = generator.__anext__().__await__()
    step.send(None)
    step.close()


@pytest.mark.parametrize(("use", "count"), [(take_all, 4), (close_async, 2), (send_async, 3), (break_off_async, 1)])
def test_only_what_came_is_counted_however_an_async_generator_ends(recorder: Any, use: Any, count: int) -> None:
    async def main() -> None:
        async def numbers() -> AsyncIterator[int]:
            for number in range(4):
                await asyncio.sleep(0)
                try:
                    yield number
                except KeyError:
                    yield -1

        generator = wrapped(recorder, numbers)()
        await use(generator)
        del generator

    asyncio.run(main())
    assert items_of(recorder) == count


def test_a_generator_that_fails_before_its_first_item_reports_none(recorder: Any) -> None:
    def numbers() -> Iterator[int]:
        if recorder is not None:
            raise ValueError("early")
        yield 1

    with pytest.raises(ValueError, match="early"):
        next(wrapped(recorder, numbers)())
    assert items_of(recorder) is None
    assert only_span(recorder).error == "ValueError"


def test_a_generator_without_items_reports_none(recorder: Any) -> None:
    assert list(wrapped(recorder, lambda: (yield from ()))()) == []
    assert items_of(recorder) is None


def test_values_that_an_awaitable_generator_yields_to_its_loop_are_no_items(recorder: Any) -> None:
    async def main() -> None:
        @types.coroutine
        def wait() -> Generator[None, None, int]:
            yield
            yield
            return 7

        assert await wrapped(recorder, wait)() == 7
        assert items_of(recorder) is None

    asyncio.run(main())


def test_attributes_that_the_service_has_set_by_the_same_names_stay(recorder: Any) -> None:
    def numbers() -> Iterator[int]:
        recorder.annotate_innermost(items=100, own="kept")
        yield 1
        yield 2

    list(wrapped(recorder, numbers)())
    attributes = only_span(recorder).attributes
    assert (attributes[ITEMS], attributes["own"]) == (100, "kept")
    assert {*attributes} >= FACTS
