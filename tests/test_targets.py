"""Every shape of target: what a rule makes of it, that it behaves as before, and that the very same comes back."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import importlib
import inspect
import pickle
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from readback import spans_in, unreadable_counts
from trees import tree

from instrument import TargetError, profiled, scope
from instrument.instrumentors import references
from instrument.instrumentors.function_rules import Functions
from instrument.instrumentors.selection import Selection
from instrument.profile.keys import loads
from instrument.recorder.recorder import Recorder
from instrument.runtime.faults import FAULTS


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
        selection.detach_all()


@pytest.fixture
def heap(request: pytest.FixtureRequest) -> None:
    """A small one, where what holds the target is made by the test."""
    if request.node.callspec.params["case"].target != "root":  # which is of the module math
        request.getfixturevalue("small_heap")


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


BOUND = "a method in tests/targets/shapes.py:167 (bound)"
TWICE = "a partialmethod in tests/targets/shapes.py:157 (twice)"
CASES = [
    Case("function", lambda m: m.function(1), 2, "function", state="partly", why="(FROZEN)"),
    Case("lam", lambda m: m.lam(1), 3, "lam"),
    Case("coroutine", lambda m: asyncio.run(m.coroutine(1)), 2, "coroutine"),
    Case("generator", lambda m: list(m.generator(2)), [0, 1], "generator"),
    Case("async_generator", lambda m: asyncio.run(collected(m.async_generator(2))), [0, 1], "async_generator"),
    Case("dispatched", lambda m: (m.dispatched(""), m.dispatched(1)), ("object", "int"), "dispatched\ndispatched"),
    Case(
        "dispatched_int",
        lambda m: (m.dispatched(1), m.dispatched_int(1)),
        ("int", "int"),
        "dispatched_int",
        state="partly",
        why="also referenced by the function dispatched in ",
    ),
    Case("cached", cached_with_its_methods, ((2, 2), (1, 1), 8), "cached\ncached"),
    Case("managed", lambda m: inside(m.managed(1)), 2, "managed"),
    Case("async_managed", lambda m: asyncio.run(entered(m.async_managed(1))), 2, "async_managed"),
    Case("overloaded", lambda m: m.overloaded("a"), "a", "overloaded"),
    Case("decorated", lambda m: m.decorated(1), 2, "decorated"),
    Case("root", lambda m: m.root(4.0), 2.0, "sqrt"),
    Case("partial", lambda m: m.partial(), 5, "function", state="partly", why="(FROZEN)"),
    Case(
        "Engine.method", lambda m: m.Engine().method(1), 2, "Engine.method", state="partly", why=f"{BOUND} and {TWICE}"
    ),
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
    Case("Engine.twice", lambda m: m.Engine().twice(), 3, "Engine.method", state="partly", why=BOUND),
    Case("Derived.method", lambda m: m.Derived().method(1), 3, "Derived.method"),
    Case(
        "Derived.static_method",
        lambda m: (m.Engine.static_method(1), m.Derived.static_method(1)),
        (2, 2),
        "Engine.static_method",
    ),
    Case(
        "instance",
        lambda m: m.instance(1),
        2,
        "Engine.__call__",
        why="as Engine.__call__, for all objects of that class",
    ),
    Case(
        "instance.method",
        lambda m: m.instance.method(1),
        2,
        "Engine.method",
        state="partly",
        why=f"{BOUND} and {TWICE}",
    ),
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
    Case("missing", lambda m: None, None, state="not found", why="matched no function"),
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
@pytest.mark.usefixtures("heap")
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
    selection.detach_all()
    recorder.reset()
    assert case.call(shapes) == case.result
    assert tree(recorder) == ""


@pytest.mark.usefixtures("heap")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.target)
def test_the_very_same_objects_come_back(case: Case, shapes: ModuleType, select: Callable[..., Selection]) -> None:
    before = places(shapes)
    select(f"targets.shapes:{case.target}").detach_all()
    assert same(before, places(shapes)) == []


def test_a_wildcard_takes_what_is_defined_there_and_no_data(
    shapes: ModuleType, select: Callable[..., Selection]
) -> None:
    before = places(shapes)
    selection = select("targets.shapes:**")
    found = {verdict.target.partition(":")[2] for verdict in selection.verdicts()}
    assert found >= {"function", "lam", "cached", "managed", "Engine.encode", "Engine.encode[int]", "Meta.make"}
    assert not found & {"root", "partial", "Engine.size", "Engine.weights", "registries", "instance"}
    selection.detach_all()
    assert same(before, places(shapes)) == []


# -------------------------------------------------------------------- what else holds a function


def registries() -> Any:
    return sys.modules["targets.registries"]


WHERE = {
    "an OrderedDict": ("ORDERED", 66), "a dict": ("NESTED", 65), "a set": ("SET", 71), "a deque": ("QUEUE", 70),
    "an Observed": ("OBSERVED", 69), "a list": ("LIST", 68), "a frozenset": ("FROZEN_SET", 72),
    "a tuple": ("TUPLE", 73), "a Route": ("ROUTE", 74), "a partial": ("PARTIAL", 75), "a Slotted": ("SLOTTED", 76),
    "a Frozen": ("FROZEN", 77), "a Plain": ("PLAIN", 78), "the function fill.<locals>.default": ("", 110),
    "the function fill.<locals>.closure": ("", 113),
}  # fmt: skip
"""Kinds of objects in `targets.registries` that refer to the function, each with its name and line."""


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
@pytest.mark.parametrize("late", [False, True], ids=["before the import", "after the import"])
def test_names_in_modules_and_classes_record_and_every_other_reference_stays_and_is_named(
    late: bool,
    many: bool,
    shapes: ModuleType,
    select: Callable[..., Selection],
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others: list[str] = []
    monkeypatch.setattr(Functions, "_note_references", lambda _, __, ___, found: others.extend(found))
    if many:
        monkeypatch.setattr(references, "MANY", 0)
    if not late:
        del sys.modules["targets.shapes"], sys.modules["targets.registries"]
        select("targets.shapes:function")
        shapes = importlib.import_module("targets.shapes")
    elsewhere = ModuleType("elsewhere")
    elsewhere.taken = shapes.function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "elsewhere", elsewhere)
    selection = select("targets.shapes:function") if late else None
    found = {words.partition(" in ")[0]: words for words in others if "registries" in words}
    for kind, (name, line) in WHERE.items():
        assert found[kind] == f"{kind} in tests/targets/registries.py:{line}" + (f" ({name})" if name else "")
    bare = shapes.function.__instrument_function__
    assert shapes.function is elsewhere.taken is registries().held()["class"] is not bare  # type: ignore[attr-defined]
    assert {place for place, value in registries().held().items() if value is not bare} == {"class"}
    shapes.function(1)
    elsewhere.taken(1)  # type: ignore[attr-defined]
    registries().Table.alias(1)
    assert tree(recorder) == "function\nfunction\nfunction"
    if selection is not None:
        selection.detach_all()
        assert elsewhere.taken is shapes.function is bare  # type: ignore[attr-defined]
        assert {place for place, value in registries().held().items() if value is not bare} == set()


def test_a_reference_to_a_probe_of_before_is_named(shapes: ModuleType, select: Callable[..., Selection]) -> None:
    first = select("targets.shapes:lam")
    registries().TABLE["lam"] = shapes.lam
    first.detach_all()
    assert registries().TABLE["lam"](1) == 3
    assert registries().TABLE["lam"] is not shapes.lam
    (verdict,) = select("targets.shapes:lam").verdicts()
    assert verdict.state == "partly"
    assert verdict.why.startswith("also referenced by a dict in tests/targets/registries.py:64 (TABLE), and calls ")


def test_references_that_have_no_name_are_named_by_their_kind(
    shapes: ModuleType, select: Callable[..., Selection]
) -> None:
    def suspended() -> Iterator[Any]:
        handler = shapes.lam
        yield
        handler(1)

    running, mapped = suspended(), map(shapes.lam, [1])
    next(running)
    (verdict,) = select("targets.shapes:lam").verdicts()
    here = Path(__file__).relative_to(Path.cwd())
    line = suspended.__code__.co_firstlineno + 2
    assert f"also referenced by a call of suspended in {here}:{line} and a map, and calls through " in verdict.why
    del running, mapped


def test_a_reference_that_the_collector_does_not_show_is_reported(
    shapes: ModuleType, select: Callable[..., Selection]
) -> None:
    before = signal.signal(signal.SIGUSR2, shapes.lam)  # C code keeps it, where nothing can look
    try:
        (verdict,) = select("targets.shapes:lam").verdicts()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert verdict.state == "partly"
    assert "something that Python does not show" in verdict.why


def test_a_call_that_is_running_is_no_other_reference(shapes: ModuleType, select: Callable[..., Selection]) -> None:
    states = []

    class Calls:
        def __add__(self, other: int) -> int:
            states.extend(str(verdict) for verdict in select("targets.shapes:lam").verdicts())
            return other

    assert shapes.lam(Calls()) == 2
    assert states == ["targets.shapes:lam: attached"]
    running = shapes.generator(3)
    next(running)
    assert [verdict.state for verdict in select("targets.shapes:generator").verdicts()] == ["attached"]
    assert list(running) == [1, 2]


@pytest.mark.parametrize(
    ("target", "call", "result"),
    [
        ("function", lambda made: made(1), 2),
        ("coroutine", lambda made: asyncio.run(made(1)), 2),
        ("generator", lambda made: list(made(2)), [0, 1]),
        ("async_generator", lambda made: asyncio.run(collected(made(2))), [0, 1]),
    ],
)
def test_a_probe_that_others_took_over_is_the_bare_function_when_its_rule_is_gone(
    target: str,
    call: Callable[[Any], Any],
    result: Any,
    shapes: ModuleType,
    select: Callable[..., Selection],
    recorder: Recorder,
) -> None:
    selection = select(f"targets.shapes:{target}")
    registries().TABLE["taken"] = left = vars(shapes)[target]
    selection.detach_all()
    assert left is not vars(shapes)[target]
    assert call(left) == result
    assert (tree(recorder), recorder.muted_calls()) == ("", {})
    select(f"targets.shapes:{target}")
    assert call(vars(shapes)[target]) == result
    assert tree(recorder) == target


def test_a_call_that_is_under_way_when_its_probe_goes_ends_as_it_began(
    shapes: ModuleType, select: Callable[..., Selection], recorder: Recorder
) -> None:
    selection = select("targets.shapes:generator")
    running = shapes.generator(3)
    assert next(running) == 0
    selection.detach_all()
    assert list(running) == [1, 2]
    assert tree(recorder) == "generator"


def test_a_function_that_a_class_inherits_is_recorded_for_that_class_alone(
    shapes: ModuleType, select: Callable[..., Selection], recorder: Recorder
) -> None:
    select("targets.shapes:Derived.static_method")
    shapes.Engine.static_method(1)
    assert tree(recorder) == ""
    shapes.Derived.static_method(1)
    assert tree(recorder) == "Engine.static_method"


@pytest.mark.usefixtures("small_heap")
def test_a_second_name_for_the_same_function_is_recorded_once(
    shapes: ModuleType, select: Callable[..., Selection], recorder: Recorder
) -> None:
    shapes.renamed = shapes.lam  # type: ignore[attr-defined]
    selection = select("targets.shapes:lam", "targets.shapes:renamed")
    shapes.renamed(1)
    assert tree(recorder) == "lam"
    assert [verdict.why for verdict in selection.verdicts()] == [
        "",
        "it is the same function as targets.shapes:lam",
    ]
    selection.detach_all()
    assert shapes.renamed is shapes.lam


@pytest.mark.usefixtures("small_heap")
def test_a_second_name_in_a_module_imported_later_is_reported_as_such(
    shapes: ModuleType, select: Callable[..., Selection], recorder: Recorder
) -> None:
    selection = select("targets.shapes:lam", "targets.registries:handler")
    registries().handler = shapes.lam
    selection.attach_to(registries())
    assert [verdict.why for verdict in selection.verdicts()] == [
        "",
        "it is the same function as targets.shapes:lam",
    ]
    registries().handler(1)
    assert tree(recorder) == "lam"


def test_results_errors_signatures_and_pickles_are_as_before(
    shapes: ModuleType, select: Callable[..., Selection]
) -> None:
    def facts() -> list[Any]:
        thing = shapes.function
        return [
            inspect.signature(thing), thing.__name__, thing.__qualname__, thing.__doc__, thing.__module__,
            inspect.iscoroutinefunction(shapes.coroutine), inspect.isgeneratorfunction(shapes.generator),
            inspect.isasyncgenfunction(shapes.async_generator), pickle.dumps(thing), pickle.dumps(shapes.Engine.method),
            inspect.getsource(thing), shapes.Engine.size.__doc__, inspect.signature(shapes.Engine.method),
            inspect.signature(shapes.managed), sorted(shapes.cached.cache_parameters()),
            [inspect.isfunction(thing), callable(thing)],
        ]  # fmt: skip

    def error() -> str:
        with pytest.raises(TypeError) as caught:
            shapes.function("a")
        return str(caught.value)

    def unset() -> str:
        with pytest.raises(AttributeError) as caught:
            shapes.Engine().read_only = 1
        return str(caught.value)

    shapes.Engine.read_only = property(lambda self: 1)  # type: ignore[attr-defined]
    vars(shapes.Engine)["read_only"].__set_name__(shapes.Engine, "read_only")
    before = facts(), error(), unset()
    selection = select("targets.shapes:**", "targets.shapes:Engine.size", "targets.shapes:Engine.read_only")
    assert (facts(), error(), unset()) == before
    assert pickle.loads(pickle.dumps(shapes.function)) is shapes.function
    selection.detach_all()
    assert (facts(), error(), unset()) == before


def test_no_code_of_the_host_runs_to_find_a_name(shapes: ModuleType, select: Callable[..., Selection]) -> None:
    importlib.import_module("targets.lazy")
    selection = select("targets.lazy:present", "targets.lazy:absent")
    assert [str(verdict) for verdict in selection.verdicts()] == [
        "targets.lazy:present: attached",
        "targets.lazy:absent: unreachable (the module makes names when they are asked for (__getattr__); "
        "name the module that defines it)",
    ]


# -------------------------------------------------------------------- what a rule says of its spans


def rules(select_from: str, recorder: Recorder) -> Selection:
    selection = Selection(loads(select_from, environ={}), recorder)
    selection.attach()
    return selection


@pytest.fixture
def selected(recorder: Recorder) -> Iterator[Callable[[str], Selection]]:
    """A selection of one function rule, given as YAML; undone after the test."""
    made: list[Selection] = []

    def attach(rule: str) -> Selection:
        made.append(rules(f"functions: [{{{rule}}}]", recorder))
        return made[-1]

    yield attach
    for selection in made:
        selection.detach_all()


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize(
    ("name", "target", "shown"),
    [
        ("{class}.{function}", "Engine.method", "Engine.method"),
        ("{module}/{qualname}", "Engine.method", "targets.shapes/Engine.method"),
        ("a {pid} {x}", "Engine.method", "a {pid} {x}"),
        ("step", "Engine.method", "step"),
    ],
)
def test_a_name_may_say_where_the_target_is(
    name: str, target: str, shown: str, shapes: ModuleType, selected: Callable[[str], Selection], recorder: Recorder
) -> None:
    selected(f'match: "targets.shapes:{target}", name: "{name}"')
    shapes.Engine().method(1)
    assert tree(recorder) == shown


@pytest.mark.usefixtures("small_heap")
def test_a_rule_declares_a_phase_and_the_shortest_call_worth_a_span(
    shapes: ModuleType, selected: Callable[[str], Selection], recorder: Recorder
) -> None:
    selected('match: "targets.shapes:function", phase: compute, where: {min_duration: 50us}')
    shapes.function(1)
    site = shapes.function.__instrument__
    assert (site.kind, site.attributes, site.min_ns) == ("phase", (("phase", "compute"),), 50_000)


class Hostile:
    """An argument whose own code must not run unless a rule asks for it."""

    def __len__(self) -> int:
        raise RuntimeError("code of the host")

    __repr__ = __str__ = __len__  # type: ignore[assignment]


ATTRIBUTES = """attributes: [
    {argument: prompt}, {argument: prompt, record: type}, {argument: request.user, record: value, name: user},
    {argument: temperature, record: value}, {argument: extra, record: value}]"""


@pytest.mark.parametrize("kind", ["op", "request"])
@pytest.mark.parametrize("function", ["served", "served_in_a_task"])
def test_arguments_that_a_rule_names_are_attributes_of_the_span(
    kind: str, function: str, shapes: ModuleType, selected: Callable[[str], Selection], recorder: Recorder
) -> None:
    selected(f'match: "targets.shapes:{function}", kind: {kind}, {ATTRIBUTES}')
    request = types.SimpleNamespace(user="u" * 300)

    def call(*args: Any, **kwargs: Any) -> Any:
        made = getattr(shapes, function)(*args, **kwargs)
        return asyncio.run(made) if inspect.iscoroutine(made) else made

    assert call("hello", request, extra=2) == ("hello", 0.5)
    assert call(request=request, prompt=[1, 2], temperature=True) == ([1, 2], True)
    first, second = sorted(spans_in(recorder), key=lambda span: span.span_id)
    long = "u" * 253 + "..."
    assert first.attributes == {
        "prompt.size": 5, "prompt.type": "str", "user": long, "temperature": 0.5, "extra": 2
    }  # fmt: skip
    assert second.attributes == {"prompt.size": 2, "prompt.type": "list", "user": long, "temperature": True}


def test_no_code_of_an_argument_runs_that_no_rule_asks_for(
    shapes: ModuleType, selected: Callable[[str], Selection], recorder: Recorder
) -> None:
    selected('match: "targets.shapes:served", attributes: [{argument: prompt, record: type}]')
    shapes.served(Hostile(), None)
    assert [span.attributes for span in spans_in(recorder)] == [{"prompt.type": f"{__name__}.Hostile"}]


def test_a_path_below_a_mapping_means_its_key_and_else_its_attribute(
    shapes: ModuleType, selected: Callable[[str], Selection], recorder: Recorder
) -> None:
    starlette = pytest.importorskip("starlette.requests")
    selected(
        """match: "targets.shapes:served", attributes: [
        {argument: prompt.path, record: value}, {argument: prompt.state.user, record: value},
        {argument: request.method, record: value}, {argument: request.headers, record: type}]"""
    )
    scope = {"type": "http", "path": "/chat", "state": types.SimpleNamespace(user="u"), "headers": [], "method": "GET"}
    counted: Any = collections.defaultdict(list, path="/d", state=collections.UserDict(user=7))
    shapes.served(scope, starlette.Request(scope))
    shapes.served(counted, None)
    first, second = sorted(spans_in(recorder), key=lambda span: span.span_id)
    assert first.attributes == {
        "prompt.path": "/chat", "prompt.state.user": "u", "request.method": "GET", "request.headers.type": "list"
    }  # fmt: skip
    assert second.attributes == {"prompt.path": "/d", "prompt.state.user": 7}
    assert sorted(counted) == ["path", "state"]  # to ask a defaultdict for a key that it has not makes one
    FAULTS.clear()


def test_an_argument_that_cannot_be_read_is_named_with_the_place_of_its_rule_and_the_call_goes_on(
    shapes: ModuleType,
    selected: Callable[[str], Selection],
    recorder: Recorder,
    caplog: pytest.LogCaptureFixture,
) -> None:
    selected(f'match: "targets.shapes:served", {ATTRIBUTES}')
    hostile = Hostile()
    for _ in range(2):
        assert shapes.served(hostile, {"secret": 1}) == (hostile, 0.5)
    place = "<profile>:1:13: attribute"
    assert FAULTS.count_by_place() == {}
    assert unreadable_counts() == {f"{place} prompt": 2, f"{place} request.user": 2}
    FAULTS.clear()
    first, second = caplog.records
    assert first.getMessage().startswith(f"{place} prompt: reading that of a Hostile raised ")
    assert second.getMessage().startswith(f"{place} request.user: reading 'user' of a dict raised AttributeError; it")
    assert (first.exc_info, second.exc_info) == (None, None)
    for span in spans_in(recorder):
        assert span.attributes == {"prompt.type": f"{__name__}.Hostile", "temperature": 0.5}


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("match: 'targets.shapes:function', attributes: {argument: values}", "no argument values, found value"),
        (
            "match: 'targets.shapes:generator', key: return.id",
            "keys cannot be read from the value that a generator returns",
        ),
        ("match: 'targets.shapes:served', attributes: {argument: more}", "more takes many arguments"),
        ("match: 'targets.shapes:greatest', attributes: {argument: x}", "has no known parameters"),
    ],
)
def test_an_attribute_that_cannot_be_had_is_named(
    rule: str, why: str, shapes: ModuleType, selected: Callable[[str], Selection]
) -> None:
    (verdict,) = selected(rule).verdicts()
    assert verdict.state == "partly"
    assert why in verdict.why


def test_profiled_declares_a_phase_and_so_does_a_scope(recording: Recorder) -> None:
    @profiled(phase="prepare")
    def prepare() -> None:
        with scope("run", phase="compute"), scope("run"), scope("run", kind="user", phase="post"):
            pass

    prepare()
    assert [
        (span.site.name.rpartition(".")[2], span.site.kind, dict(span.site.attributes).get("phase"))
        for span in sorted(spans_in(recording), key=lambda span: span.span_id)
    ] == [
        ("prepare", "phase", "prepare"),
        ("run", "phase", "compute"),
        ("run", "user", None),
        ("run", "user", "post"),
    ]
    with pytest.raises(TargetError, match="is not a name; give one such as prepare, infer_shape, compute, post"):
        scope("x", phase="")
    with pytest.raises(TargetError, match="is not a name; give one such as prepare, infer_shape, compute, post"):
        profiled(phase=7)  # type: ignore[call-overload]
    with scope("x", phase="queue"):
        pass
    assert [dict(span.site.attributes) for span in spans_in(recording)][-1] == {"phase": "queue"}


def test_profiled_above_what_other_decorators_made(recording: Recorder) -> None:
    class Model:
        @profiled
        @property
        def size(self) -> int:
            return 1

        @profiled("weights")
        @functools.cached_property
        def loaded(self) -> int:
            return 2

        @profiled
        @functools.lru_cache(maxsize=2)  # noqa: B019
        def cached(self) -> int:
            return 3

        @profiled
        @functools.singledispatchmethod
        def encode(self, value: Any) -> str:
            return "object"

        @encode.register
        def _(self, value: int) -> str:
            return "int"

        @profiled("session")
        @contextlib.contextmanager
        def session(self) -> Iterator[int]:
            yield self.size

    model = Model()
    assert (model.size, model.loaded, model.loaded, model.cached(), model.cached()) == (1, 2, 2, 3, 3)
    assert Model.cached.cache_info().hits == 1
    assert (model.encode(""), model.encode(1)) == ("object", "int")
    with model.session() as size:
        assert size == 1
    names = [line.rpartition("Model.")[2] for line in tree(recording).split("\n")]
    assert names == ["size", "weights", "cached", "cached", "encode", "session", "size"]


@pytest.mark.slow
def test_attaching_and_undoing_while_threads_call_changes_no_result(
    shapes: ModuleType, select: Callable[..., Selection]
) -> None:
    done = threading.Event()
    wrong: list[Any] = []

    def call() -> None:
        engine = shapes.Engine()
        while not done.is_set():
            try:
                found = [function(1) for function in registries().held().values()]
                found += [registries().PARTIAL(), shapes.partial() - 3, engine.size + 1, list(shapes.generator(3))[-1]]
            except Exception as error:
                wrong.append(error)
                return
            if set(found) != {2}:
                wrong.append(found)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(15):
            names = ("function", "partial", "generator", "Engine.size")
            selection = select(*(f"targets.shapes:{name}" for name in names))
            time.sleep(0.005)
            selection.detach_all()
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert wrong == []
