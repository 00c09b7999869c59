"""Every shape of target: what a rule makes of it, that it behaves as before, and that the very same comes back."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
from trees import outline, tree

from instrument.probes.selection import Selection
from instrument.profile import loads
from instrument.recorder import Recorder


@pytest.fixture
def shapes() -> Iterator[ModuleType]:
    """The modules of targets, imported anew."""
    yield importlib.import_module("targets.shapes")
    for name in [name for name in sys.modules if name.partition(".")[0] == "targets"]:
        del sys.modules[name]


@pytest.fixture
def select(recorder: Recorder) -> Iterator[Callable[[str], Selection]]:
    """A selection of function rules, attached; undone after the test."""
    made: list[Selection] = []

    def attach(*matches: str) -> Selection:
        rules = ", ".join(f'{{match: "{match}"}}' for match in matches)
        made.append(Selection(loads(f"functions: [{rules}]", environ={}), recorder))
        made[-1].attach()
        return made[-1]

    yield attach
    for selection in made:
        selection.undo()


@dataclass(frozen=True)
class Case:
    """A target, what it is called with, the result, what is recorded, and the verdict's words."""

    target: str
    call: Callable[[Any], Any]
    result: Any
    spans: str = ""
    state: str = "attached"
    why: str = ""


async def collected(source: Any) -> list[Any]:
    return [item async for item in source]


async def entered(manager: Any) -> Any:
    async with manager as value:
        return value


def inside(manager: Any) -> Any:
    with manager as value:
        return value


def set_and_deleted(engine: Any) -> list[int]:
    engine.size = 7
    found = [engine.size]
    del engine.size
    return [*found, engine.size]


def twice_from_the_cache(holder: Any) -> Any:
    return holder.weights, holder.weights


def cached_with_its_methods(shapes: Any) -> Any:
    shapes.cached.cache_clear()
    found = shapes.cached(1), shapes.cached(1)
    return found, tuple(shapes.cached.cache_info())[:2], shapes.cached.cache_parameters()["maxsize"]


CASES = [
    Case("function", lambda m: m.function(1), 2, "function"),
    Case("lam", lambda m: m.lam(1), 3, "lam"),
    Case("coroutine", lambda m: asyncio.run(m.coroutine(1)), 2, "coroutine"),
    Case("generator", lambda m: list(m.generator(2)), [0, 1], "generator"),
    Case("async_generator", lambda m: asyncio.run(collected(m.async_generator(2))), [0, 1], "async_generator"),
    Case("dispatched", lambda m: (m.dispatched(""), m.dispatched(1)), ("object", "int"), "dispatched\ndispatched"),
    Case("dispatched_int", lambda m: (m.dispatched(""), m.dispatched(1)), ("object", "int"), "dispatched_int"),
    Case("cached", cached_with_its_methods, ((2, 2), (1, 1), 8), "cached\ncached"),
    Case("managed", lambda m: inside(m.managed(1)), 2, "managed"),
    Case("async_managed", lambda m: asyncio.run(entered(m.async_managed(1))), 2, "async_managed"),
    Case("overloaded", lambda m: m.overloaded("a"), "a", "overloaded"),
    Case("decorated", lambda m: m.decorated(1), 2, "decorated"),
    Case("root", lambda m: m.root(4.0), 2.0, "sqrt"),
    Case("partial", lambda m: m.partial(), 5, "function"),
    Case("Engine.method", lambda m: m.Engine().method(1), 2, "Engine.method"),
    Case("Engine.class_method", lambda m: m.Derived.class_method(1), "Derived 1", "Engine.class_method"),
    Case("Engine.static_method", lambda m: m.Engine().static_method(1), 2, "Engine.static_method"),
    Case(
        "Engine.size",
        lambda m: set_and_deleted(m.Engine()),
        [7, 0],
        "Engine.size.setter\nEngine.size\nEngine.size.deleter\nEngine.size",
    ),
    Case("Engine.weights", lambda m: twice_from_the_cache(m.Engine()), (4, 4), "Engine.weights"),
    Case("Engine.__call__", lambda m: m.Engine()(1), 2, "Engine.__call__"),
    Case(
        "Engine.encode",
        lambda m: (m.Engine().encode(""), m.Engine().encode(1)),
        ("object", "int"),
        "Engine.encode\nEngine.encode[int]",
    ),
    Case("Engine.looked_up", lambda m: m.Engine().looked_up(1), 2, "Engine.looked_up"),
    Case("Engine.session", lambda m: inside(m.Engine().session(3)), 3, "Engine.session"),
    Case("Engine.twice", lambda m: m.Engine().twice(), 3, "Engine.method"),
    Case("Derived.method", lambda m: m.Derived().method(1), 3, "Derived.method"),
    Case("Derived.static_method", lambda m: (m.Engine.static_method(1), m.Derived.static_method(1)), (2, 2), "Engine.static_method"),
    Case("instance", lambda m: m.instance(1), 2, "Engine.__call__", why="as Engine.__call__, for all objects of that class"),
    Case("instance.method", lambda m: m.instance.method(1), 2, "Engine.method"),
    Case("Slotted.go", lambda m: m.Slotted().go(1), 2, "Slotted.go"),
    Case("Meta.make", lambda m: m.Made.make(1), "Made 1", "Meta.make"),
    Case("Data.doubled", lambda m: m.Data(2).doubled(), 4, "Data.doubled"),
    Case("SlottedData.doubled", lambda m: m.SlottedData(2).doubled(), 4, "SlottedData.doubled"),
    Case("Named.doubled", lambda m: m.Named(2).doubled(), 4, "Named.doubled"),
    Case("Colour.shade", lambda m: m.Colour.RED.shade(1), 2, "Colour.shade"),
    Case("Runs.run", lambda m: m.Runner().run(1), 2, "Runs.run"),
    Case("Base.must", lambda m: (m.Concrete().must(1), inspect.isabstract(m.Base)), (2, True), "Base.must"),
    Case("Text.doubled", lambda m: m.Text("a").doubled(), "aa", "Text.doubled"),
    Case(
        "Registering.__init_subclass__",
        lambda m: (type("Kind", (m.Registering,), {}), m.Registering.kinds[-1])[1],
        "Kind",
        "Registering.__init_subclass__",
    ),
    Case("outer.nested", lambda m: m.outer(), 1, state="unreachable", why="it is made anew at each call of outer"),
    Case("number", lambda m: m.number, 5, state="unreachable", why="it is a int, not a function"),
    Case("Text.upper", lambda m: m.Text("a").upper(), "A", state="unreachable", why="it is a method made in C"),
    Case("Engine.root", lambda m: m.Engine().root(4.0), 2.0, state="unreachable", why="it is a method made in C"),
    Case("missing", lambda m: None, None, state="nothing", why="matched no function"),
]


def places(module: ModuleType) -> dict[str, Any]:
    """Everything that the module's names, its classes and their properties hold."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name.startswith("__"):
            continue
        found[name] = value
        if isinstance(value, type) and value.__module__ == module.__name__:
            for part, raw in vars(value).items():
                found[f"{name}.{part}"] = raw
                if isinstance(raw, property):
                    found |= {f"{name}.{part}.{side}": getattr(raw, side) for side in ("fget", "fset", "fdel")}
                elif isinstance(vars(raw).get("func") if hasattr(raw, "__dict__") else None, object):
                    found[f"{name}.{part}.func"] = vars(raw).get("func") if hasattr(raw, "__dict__") else None
    found["partial.func"] = vars(module)["partial"].func
    found["managed.func"] = inspect.getclosurevars(module.managed).nonlocals["func"]
    found["dispatched.registry"] = dict(module.dispatched.registry)
    found["encode.registry"] = dict(vars(module.Engine)["encode"].dispatcher.registry)
    return found


def same(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what is not the very same object."""
    plain = ("registry", "kinds")
    return [
        name
        for name in before.keys() | after.keys()
        if before.get(name) is not after.get(name)
        and not (name.rpartition(".")[2] in plain and before.get(name) == after.get(name))
    ]


@pytest.mark.parametrize("late", [False, True], ids=["before the import", "after the import"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.target)
def test_a_target_of_each_shape(
    case: Case, late: bool, shapes: ModuleType, select: Callable[..., Selection], recorder: Recorder
) -> None:
    if late:
        selection = select(f"targets.shapes:{case.target}")
    else:
        del sys.modules["targets.shapes"], sys.modules["targets.registries"]
        selection = select(f"targets.shapes:{case.target}")
        shapes = importlib.import_module("targets.shapes")
    verdicts = selection.verdicts()
    assert {verdict.state for verdict in verdicts} == {case.state}, [str(verdict) for verdict in verdicts]
    assert case.why in verdicts[0].why
    assert case.call(shapes) == case.result
    assert tree(recorder) == case.spans
    selection.undo()
    recorder.reset()
    assert case.call(shapes) == case.result
    assert tree(recorder) == ""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.target)
def test_the_very_same_objects_come_back(
    case: Case, shapes: ModuleType, select: Callable[..., Selection]
) -> None:
    before = places(shapes)
    select(f"targets.shapes:{case.target}").undo()
    assert same(before, places(shapes)) == []


def test_a_wildcard_takes_what_is_defined_there_and_no_data(
    shapes: ModuleType, select: Callable[..., Selection]
) -> None:
    before = places(shapes)
    selection = select("targets.shapes:**")
    found = {verdict.target.partition(":")[2] for verdict in selection.verdicts()}
    assert found >= {"function", "lam", "cached", "managed", "Engine.encode", "Engine.encode[int]", "Meta.make"}
    assert not found & {"root", "partial", "Engine.size", "Engine.weights", "registries", "instance"}
    selection.undo()
    assert same(before, places(shapes)) == []
