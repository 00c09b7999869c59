"""Loaders: each `next` is a span, and nothing else of what is wrapped changes."""

from __future__ import annotations

import asyncio
import collections.abc
import copy
import gc
import inspect
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

import pytest
from readback import spans_in
from trees import outline, tree

from instrument import TargetError, loader, scope
from instrument.instrumentors.loaders import Loaders
from instrument.instrumentors.selection import Selection
from instrument.profile.keys import loads
from instrument.recorder.recorder import Recorder


class Batches:
    """An iterable with a length, items, an attribute and a context, as data sets have them."""

    def __init__(self, values: list[int]) -> None:
        self.values = values
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> int:
        return self.values[index]

    def __iter__(self) -> Iterator[int]:
        for value in self.values:
            with scope("fetch"):
                pass
            yield value

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *error: object) -> None:
        self.values = []


def test_each_next_is_a_span_of_kind_loader_and_what_runs_inside_is_in_it(recording: Recorder) -> None:
    for value in loader(Batches([1, 2]), "read"):
        with scope(f"use {value}"):
            pass
    assert tree(recording) == outline(
        """
        read
          fetch
        use 1
        read
          fetch
        use 2
        read
        """
    )
    kinds = {span.site.kind for span in spans_in(recording) if span.site.name == "read"}
    assert kinds == {"loader"}


def count() -> Iterator[int]:
    yield 1


def test_without_a_name_it_is_that_of_the_generator_or_the_class(recording: Recorder) -> None:
    for source in (count(), [1], Batches([]), iter((1,)), map(str, [1])):
        next(iter(loader(source)), None)
    assert tree(recording).split() == ["count", "list", "Batches", "tuple_iterator", "map"]


def test_it_behaves_like_what_it_wraps() -> None:
    own = Batches([3, 4])
    batches: Any = loader(own)
    assert isinstance(batches, Batches)
    assert (len(batches), batches[1], 3 in batches, bool(batches)) == (2, 4, True, True)
    assert [list(batches), list(batches)] == [[3, 4], [3, 4]]
    batches.epoch = 7
    assert (own.epoch, repr(batches), batches == own, hash(batches) == hash(own)) == (7, repr(own), True, True)
    del batches.epoch
    assert not hasattr(own, "epoch")
    with pytest.raises(AttributeError, match="'Batches' object has no attribute 'missing'"):
        batches.missing  # noqa: B018 - the access is the test
    with batches as entered:
        assert entered is own
    assert (len(own), bool(batches)) == (0, False)


@pytest.mark.parametrize("source", [[1, 2], (1, 2), {"a": 1}, {1, 2}, range(3), "ab", b"ab", iter([1]), count()])
def test_it_can_do_no_more_than_what_it_wraps(source: Any) -> None:
    wrapped = loader(source)
    asked = ("Sized", "Iterable", "Iterator", "Reversible", "Generator", "Container", "AsyncIterable", "Callable")
    for name in asked:
        protocol = getattr(collections.abc, name)
        assert isinstance(wrapped, protocol) == isinstance(source, protocol), name
        assert issubclass(type(wrapped), protocol) <= isinstance(source, protocol), name
    assert inspect.isgenerator(wrapped) == inspect.isgenerator(source)


def test_an_old_sequence_that_has_only_items_is_iterated() -> None:
    class Old:
        def __getitem__(self, index: int) -> int:
            return [5, 6][index]

    assert list(loader(Old())) == [5, 6]  # type: ignore[call-overload]


def test_copies_and_pickles_are_loaders_too(recording: Recorder) -> None:
    batches = loader(Batches([1]), "read")
    for twin in (copy.copy(batches), copy.deepcopy(batches), pickle.loads(pickle.dumps(batches))):
        assert list(twin) == [1]
    assert tree(recording).count("read") == 6


def echo() -> Generator[Any, Any, str]:
    got: Any = "first"
    while got != "stop":
        try:
            got = yield got
        except KeyError as error:
            got = f"caught {error}"
    return "done"


def test_generators_are_sent_to_thrown_into_and_delegated_to(recording: Recorder) -> None:
    def outer() -> Generator[Any, Any, str]:
        return (yield from loader(echo()))

    running = outer()
    assert [next(running), running.send(2), running.throw(KeyError("k"))] == ["first", 2, "caught 'k'"]
    with pytest.raises(StopIteration) as ended:
        running.send("stop")
    assert ended.value.value == "done"
    assert tree(recording) == "\n".join(["echo"] * 4)


def test_a_failing_source_raises_as_before_and_marks_the_span(recording: Recorder) -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("broken file")

    with pytest.raises(ValueError, match="broken file") as caught:
        list(loader(failing()))
    assert caught.value.__context__ is None
    assert tree(recording) == "failing\nfailing !ValueError"


@pytest.mark.parametrize("leave", ["close", "break"])
def test_leaving_early_closes_the_generator_at_once(leave: str) -> None:
    closed = []

    def reading() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.append(True)

    batches: Any = loader(reading())
    for _ in batches:
        break
    if leave == "close":
        batches.close()
    del batches
    gc.collect()
    assert closed == [True]


def test_async_iterables_and_generators(recording: Recorder) -> None:
    async def reading() -> AsyncIterator[int]:
        for value in (1, 2):
            await asyncio.sleep(0)
            with scope("fetch"):
                pass
            yield value

    class Source:
        def __aiter__(self) -> AsyncIterator[int]:
            return reading()

    async def main() -> list[int]:
        got = [value async for value in loader(Source(), "source")]
        generator: Any = loader(reading(), "generator")
        got.append(await anext(generator))
        got.append(await generator.asend(None))
        await generator.aclose()
        return got

    assert asyncio.run(main()) == [1, 2, 1, 2]
    assert tree(recording) == outline(
        """
        source
          fetch
        source
          fetch
        source
        generator
          fetch
        generator
          fetch
        """
    )


def test_off_it_records_nothing_and_hands_everything_on() -> None:
    assert list(loader(count())) == [1]


def test_off_by_environment_it_is_the_very_same_object() -> None:
    program = "import instrument; x = [1]; assert instrument.loader(x) is x"
    subprocess.run([sys.executable, "-c", program], check=True, env={"INSTRUMENT": "off", "PATH": ""} | _path())


def _path() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(path for path in sys.path if path)}


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (7, None, "loader needs an iterable, not 7 of type int. Give the object of the for loop"),
        (count, None, "loader needs an iterable, not <function count"),
        ([], "", "loader: the name '' is not a text; give a name of the data"),
        ([], 5, "loader: the name 5"),
    ],
)
def test_objects_without_iteration_are_refused(source: Any, name: Any, message: str) -> None:
    with pytest.raises(TargetError) as caught:
        loader(source, name)
    assert str(caught.value).startswith(message)


# ---------------------------------------------------------------- torch's own loaders


@pytest.fixture
def select(recorder: Recorder) -> Iterator[Callable[[], Selection]]:
    made: list[Selection] = []

    def attach() -> Selection:
        made.append(Selection(loads("loaders: auto"), recorder))
        made[-1].attach()
        return made[-1]

    yield attach
    for selection in made:
        selection.detach_all()


def test_every_dataloader_of_torch_records_by_the_class_of_its_data(
    recorder: Recorder, select: Callable[[], Selection], torch: Any
) -> None:
    data = torch.utils.data

    class Numbers(data.Dataset):  # type: ignore[misc, name-defined]
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            return index

    class Stream(data.IterableDataset):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Iterator[int]:
            yield 1

    selection = select()
    assert [str(verdict) for verdict in selection.verdicts()] == ["loaders: waiting (no DataLoader has run)"]
    numbers = data.DataLoader(Numbers(), batch_size=2)
    assert [len(numbers), *(batch.tolist() for batch in numbers)] == [2, [0, 1], [2, 3]]
    assert len(list(data.DataLoader(Stream()))) == 1
    workers = data.DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context="fork")
    assert len(list(workers)) == 2
    assert tree(recorder, lambda span: f"{span.site.kind} {span.site.name} {span.site.instance}").split("\n") == [
        *["loader DataLoader Numbers"] * 3,
        *["loader DataLoader Stream"] * 2,
        *["loader DataLoader Numbers"] * 3,
    ]
    assert [str(verdict) for verdict in selection.verdicts()] == ["loaders: Numbers, Stream: attached"]


def test_a_failing_dataset_raises_as_before_and_marks_the_span(
    recorder: Recorder, select: Callable[[], Selection], torch: Any
) -> None:
    data = torch.utils.data
    select()
    with pytest.raises(IndexError):
        list(data.DataLoader([1, 2], sampler=[0, 5]))
    assert tree(recorder) == "DataLoader\nDataLoader !IndexError"


def test_undo_gives_torch_its_own_method_back(recorder: Recorder, torch: Any) -> None:
    module = torch.utils.data.dataloader
    before = module._BaseDataLoaderIter.__next__
    loaders = Loaders(recorder=recorder)
    assert str(loaders.verdicts()[0]) == "loaders: waiting (torch.utils.data not imported)"
    loaders.attach_to(module)
    assert module._BaseDataLoaderIter.__next__ is not before
    loaders.undo()
    assert module._BaseDataLoaderIter.__next__ is before
