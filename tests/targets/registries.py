"""Places where services keep functions besides a module's name for them."""

from __future__ import annotations

import enum
import functools
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

Function = Callable[..., Any]


class Verb(enum.Enum):
    GET = "get"


class Route(NamedTuple):
    path: str
    endpoint: Function


class Slotted:
    __slots__ = ("handler",)


class Frozen:
    __slots__ = ("handler",)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("frozen")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("code of the host")

    __hash__ = None  # type: ignore[assignment]


class Plain:
    def __init__(self, handler: Function) -> None:
        self.handler = handler

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("code of the host")


class Observed(list[Any]):
    def __setitem__(self, index: Any, value: Any) -> None:
        raise RuntimeError("code of the host")


class Service:
    def handle(self, value: int) -> int:
        return value + 1


class Hostile:
    """A key whose hash is made by the host."""

    def __hash__(self) -> int:
        return 1


TABLE: dict[Any, Any] = {}
NESTED: dict[str, Any] = {}
ORDERED: OrderedDict[str, Function] = OrderedDict()
BY_FUNCTION: dict[Any, str] = {}
LIST: list[Any] = []
OBSERVED = Observed()
QUEUE: deque[Function] = deque()
SET: set[Function] = set()
FROZEN_SET: frozenset[Function] = frozenset()
TUPLE: tuple[Any, ...] = ()
ROUTE: Any = None
PARTIAL: Any = None
SLOTTED = Slotted()
FROZEN = Frozen.__new__(Frozen)
PLAIN: Any = None
DEFAULT: Any = None
CLOSURE: Any = None
HOSTILE: dict[Any, Function] = {}
CACHED: Any = None


class Table:
    alias: Any = None


def fill(function: Function) -> None:
    """Keep the function in every place."""
    global FROZEN_SET, TUPLE, ROUTE, PARTIAL, PLAIN, DEFAULT, CLOSURE, CACHED
    TABLE.update({"before": 1, "f": function, Verb.GET: function, ("a", 1): function, "after": 2})
    NESTED["routes"] = {"/": [("GET", function), {"deep": (1, (2, function))}]}
    ORDERED["f"] = function
    BY_FUNCTION.update({len: "before", function: "f", print: "after"})
    LIST.extend([function, [function], (function, 1)])
    OBSERVED.append(function)
    QUEUE.append(function)
    SET.add(function)
    FROZEN_SET = frozenset([function, len])
    TUPLE = (1, (function, 2))
    ROUTE = Route("/", function)
    PARTIAL = functools.partial(function, 1)
    SLOTTED.handler = function
    object.__setattr__(FROZEN, "handler", function)
    PLAIN = Plain.__new__(Plain)
    object.__setattr__(PLAIN, "handler", function)
    Table.alias = function

    def default(handler: Function = function, *, other: Function = function) -> Any:
        return handler, other

    def closure() -> Function:
        return function

    DEFAULT, CLOSURE = default, closure


def held() -> dict[str, Any]:
    """Return the function that each place refers to."""
    return {
        "dict": TABLE["f"],
        "dict by enum": TABLE[Verb.GET],
        "dict by tuple": TABLE["a", 1],
        "nested": NESTED["routes"]["/"][0][1],
        "deep": NESTED["routes"]["/"][1]["deep"][1][1],
        "ordered": ORDERED["f"],
        "key": list(BY_FUNCTION)[1],
        "list": LIST[0],
        "list in list": LIST[1][0],
        "tuple in list": LIST[2][0],
        "list with a hook": OBSERVED[0],
        "deque": QUEUE[0],
        "set": next(iter(SET)),
        "frozenset": next(member for member in FROZEN_SET if member is not len),
        "tuple": TUPLE[1][0],
        "named tuple": ROUTE.endpoint,
        "partial": PARTIAL.func,
        "slot": SLOTTED.handler,
        "frozen slot": FROZEN.handler,
        "instance": object.__getattribute__(PLAIN, "handler"),
        "class": vars(Table)["alias"],
        "default": DEFAULT()[0],
        "keyword default": DEFAULT()[1],
        "closure": CLOSURE(),
    }


def containers() -> dict[str, Any]:
    """The containers themselves, which must be the very same after the way back."""
    return {
        "list": LIST[2],
        "nested": NESTED["routes"]["/"][0],
        "deep": NESTED["routes"]["/"][1]["deep"],
        "frozenset": FROZEN_SET,
        "tuple": TUPLE,
        "inner tuple": TUPLE[1],
        "named tuple": ROUTE,
        "partial": PARTIAL,
        "defaults": DEFAULT.__defaults__,
    }
