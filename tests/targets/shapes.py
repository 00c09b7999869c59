"""Functions and methods of all kinds, as services write them."""

# ruff: noqa: B019, RUF012
from __future__ import annotations

import abc
import contextlib
import dataclasses
import enum
import functools
import math
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple, Protocol, overload

import targets.registries as registries


def function(value: int) -> int:
    """Adds one."""
    return value + 1


lam = lambda value: value + 2  # noqa: E731


async def coroutine(value: int) -> int:
    return value + 1


def generator(count: int) -> Iterator[int]:
    yield from range(count)


async def async_generator(count: int) -> AsyncIterator[int]:
    for index in range(count):
        yield index


def outer() -> int:
    def nested() -> int:
        return 1

    return nested()


@functools.singledispatch
def dispatched(value: Any) -> str:
    return "object"


@dispatched.register
def dispatched_int(value: int) -> str:
    return "int"


@functools.lru_cache(maxsize=8)
def cached(value: int) -> int:
    return value * 2


@contextlib.contextmanager
def managed(value: int) -> Iterator[int]:
    yield value + 1


@contextlib.asynccontextmanager
async def async_managed(value: int) -> AsyncIterator[int]:
    yield value + 1


@overload
def overloaded(value: int) -> int: ...
@overload
def overloaded(value: str) -> str: ...
def overloaded(value: Any) -> Any:
    return value


def timed(wrapped: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(wrapped)
    def timing(*args: Any, **kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    return timing


@timed
def decorated(value: int) -> int:
    return value + 1


def served(prompt: Any, request: Any, temperature: float = 0.5, **more: Any) -> Any:
    return prompt, temperature


async def served_in_a_task(prompt: Any, request: Any, temperature: float = 0.5, **more: Any) -> Any:
    return prompt, temperature


root = math.sqrt
greatest = max
number = 5
partial = functools.partial(function, 4)


class Engine:
    def __init__(self) -> None:
        self.stored = 1

    def method(self, value: int) -> int:
        return value + 1

    @classmethod
    def class_method(cls, value: int) -> str:
        return f"{cls.__name__} {value}"

    @staticmethod
    def static_method(value: int) -> int:
        return value + 1

    @property
    def size(self) -> int:
        """The size."""
        return self.stored

    @size.setter
    def size(self, value: int) -> None:
        self.stored = value

    @size.deleter
    def size(self) -> None:
        self.stored = 0

    @functools.cached_property
    def weights(self) -> int:
        return 4

    def __call__(self, value: int) -> int:
        return value + 1

    @functools.singledispatchmethod
    def encode(self, value: Any) -> str:
        return "object"

    @encode.register
    def _(self, value: int) -> str:
        return "int"

    @functools.lru_cache(maxsize=8)
    def looked_up(self, value: int) -> int:
        return value + 1

    @contextlib.contextmanager
    def session(self, value: int) -> Iterator[int]:
        yield value

    twice = functools.partialmethod(method, 2)
    root = math.sqrt


class Derived(Engine):
    def method(self, value: int) -> int:
        return super().method(value) + 1


instance = Engine()
bound = instance.method


class Slotted:
    __slots__ = ("handler",)

    def go(self, value: int) -> int:
        return value + 1


class Meta(type):
    def make(cls, value: int) -> str:
        return f"{cls.__name__} {value}"


class Made(metaclass=Meta):
    pass


@dataclasses.dataclass(frozen=True)
class Data:
    value: int

    def doubled(self) -> int:
        return self.value * 2


@dataclasses.dataclass(slots=True)
class SlottedData:
    value: int

    def doubled(self) -> int:
        return self.value * 2


class Named(NamedTuple):
    value: int

    def doubled(self) -> int:
        return self.value * 2


class Colour(enum.Enum):
    RED = 1

    def shade(self, value: int) -> int:
        return self.value + value


class Runs(Protocol):
    def run(self, value: int) -> int:
        return value + 1


class Runner(Runs):
    pass


class Base(abc.ABC):
    @abc.abstractmethod
    def must(self, value: int) -> int:
        return value + 1


class Concrete(Base):
    def must(self, value: int) -> int:
        return super().must(value)


class Registering:
    kinds: list[str] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        Registering.kinds.append(cls.__name__)


class Text(str):
    """Its methods but this one are made in C."""

    def doubled(self) -> str:
        return self + self


registries.fill(function)
