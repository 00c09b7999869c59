"""Decorators, scopes and function rules: what is found, what is replaced, and that all of it goes back."""

from __future__ import annotations

import abc
import asyncio
import importlib.util
import inspect
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from readback import spans_in
from trees import outline, tree

from instrument import TargetError, profiled, scope, scope_end, scope_start
from instrument.instrumentors.function_patterns import Target, Unreachable, find_functions, make_site, matches_pattern
from instrument.instrumentors.profiled_functions import Probe, count_other_references
from instrument.instrumentors.references import loaded_modules, rebind_objects
from instrument.recorder.recorder import Recorder


def test_profiled_with_and_without_a_name_and_with_a_kind(recording: Recorder) -> None:
    @profiled("conv_layer")
    def named() -> None: ...

    @profiled
    def bare() -> None: ...

    @profiled(kind="phase")
    def compute() -> None: ...

    named()
    bare()
    compute()
    assert tree(recording, lambda span: f"{span.site.name} {span.site.kind}") == outline(
        """
        conv_layer op
        bare op
        compute phase
        """
    )
    site = spans_in(recording)[0].site
    assert (site.module, site.file, site.line > 0) == (__name__, __file__, True)
    assert site.qualname.endswith("named")


def test_profiled_on_every_kind_of_method(recording: Recorder) -> None:
    class Model:
        @profiled("method")
        def method(self) -> str:
            return "m"

        @profiled("above")
        @classmethod
        def above(cls) -> str:
            return cls.__name__

        @classmethod
        @profiled("below")
        def below(cls) -> str:
            return cls.__name__

        @profiled("static above")
        @staticmethod
        def static_above(value: int) -> int:
            return value

        @staticmethod
        @profiled("static below")
        def static_below(value: int) -> int:
            return value

    class Derived(Model):
        pass

    derived = Derived()
    assert (derived.method(), Derived.above(), derived.below()) == ("m", "Derived", "Derived")
    assert (derived.static_above(1), Derived.static_below(2)) == (1, 2)
    assert tree(recording).split("\n") == ["method", "above", "below", "static above", "static below"]


def test_profiled_on_a_class_takes_its_public_methods(recording: Recorder) -> None:
    @profiled("engine")
    class Engine:
        def __init__(self) -> None:
            self.value = 1

        def step(self) -> int:
            return self._private() + self.value

        def _private(self) -> int:
            return 1

        @staticmethod
        def fixed() -> int:
            return 7

        @property
        def size(self) -> int:
            return 3

        def __call__(self) -> int:
            return self.step()

        class Inner:
            pass

    engine = Engine()
    assert (engine(), Engine.fixed(), engine.size) == (2, 7, 3)
    assert isinstance(engine, Engine)
    assert tree(recording) == "engine.__call__\n  engine.step\nengine.fixed"


@pytest.mark.parametrize("thing", [5, property(), object()], ids=["int", "empty property", "object"])
def test_profiled_refuses_what_it_cannot_record(thing: Any) -> None:
    with pytest.raises(TargetError, match="needs a function, a method or a class"):
        profiled()(thing)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scope(""), "needs a name"),
        (lambda: scope(5), "needs a name"),  # type: ignore[arg-type]
        (lambda: scope("x", kind="nope"), "allowed: request"),
        (lambda: profiled("x", kind="nope"), "allowed: request"),
    ],
)
def test_bad_names_and_kinds_are_refused_with_what_is_allowed(call: Any, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        call()


def test_scopes_nest_with_functions_in_with_blocks_of_both_kinds(recording: Recorder) -> None:
    @profiled("work")
    def work() -> None: ...

    async def main() -> None:
        async with scope("request of this test", kind="request", attributes={"tokens": 3}):
            with scope("prepare", kind="phase"):
                work()
            await asyncio.sleep(0)
            with pytest.raises(ZeroDivisionError), scope("fails"):
                raise ZeroDivisionError

    asyncio.run(main())
    assert tree(recording) == outline(
        """
        request of this test
          prepare
            work
          fails !ZeroDivisionError
        """
    )
    (request,) = [span for span in spans_in(recording) if span.site.kind == "request"]
    assert request.attributes == {"tokens": 3}
    assert request.site.file == __file__


def test_scope_start_and_scope_end_by_handle_by_name_and_innermost(recording: Recorder) -> None:
    outer = scope_start("outer")
    scope_start("middle")
    scope_start("inner")
    scope_end()
    scope_end("middle")
    scope_end(outer)
    assert tree(recording) == "outer\n  middle\n    inner"
    assert recording.count_unusual_events() == {}


def test_scope_end_without_a_start_is_counted_and_not_raised(recording: Recorder) -> None:
    scope_end()
    scope_end("never opened")
    handle = scope_start("once")
    scope_end(handle)
    scope_end(handle)
    assert recording.count_unusual_events() == {"scope_end without an open scope": 2}


def test_scope_start_in_one_thread_and_scope_end_in_another_is_recorded(recording: Recorder) -> None:
    import threading

    handle = scope_start("handed over")
    thread = threading.Thread(target=scope_end, args=(handle,))
    thread.start()
    thread.join()
    assert [span.site.name for span in spans_in(recording) if not span.clipped] == ["handed over"]
    recording.forget_current()


def test_scope_starts_that_never_end_stop_growing(recording: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "open_scope_limit", 5)
    for _ in range(8):
        scope_start("leak")
    assert recording.count_unusual_events() == {"scopes not begun because too many are open": 3}
    for _ in range(5):
        scope_end()
    assert len(spans_in(recording)) == 5


def test_off_by_environment_returns_the_very_function_and_records_nothing() -> None:
    program = """
import instrument
def f(): return 1
class C:
    def m(self): pass
m = C.m
assert instrument.profiled("x")(f) is f and instrument.profiled(f) is f
assert instrument.profiled(C) is C and C.m is m
assert instrument.start() is None
with instrument.scope("x"): f()
instrument.scope_end(instrument.scope_start("y"))
assert "off" in instrument.summary()
instrument.stop()
from instrument.recorder.recorder import RECORDER
assert RECORDER.calls == 0
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env={"INSTRUMENT": "off", "PATH": ""}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


# -------------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.bc", False),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("*", "a.b", False),
        ("a*c", "abc", True),
        ("_*", "_private", True),
        ("a.*.c", "a.b.c", True),
        ("a.**", "a.b.c", True),
        ("a.**", "a", False),
        ("**", "a.b.c", True),
        ("**.mlp", "mlp", True),
        ("**.mlp", "model.layers.0.mlp", True),
        ("a.**.c", "a.c", True),
        ("a.**.c", "a.x.y.c", True),
        ("a+b", "a+b", True),
        ("a.b", "axb", False),
    ],
)
def test_patterns_stay_within_a_segment_or_cross_them(pattern: str, name: str, fits: bool) -> None:
    assert matches_pattern(pattern, name) is fits


# -------------------------------------------------------------------- targets in modules

SOURCE = """
import functools, abc
from json import dumps as borrowed

number = 5
def plain(x): return x
def _hidden(): return 0
async def coroutine(): return 1
def generator(): yield 1

class Engine:
    def step(self): return self._inner()
    def _inner(self): return 1
    @classmethod
    def make(cls): return cls()
    @staticmethod
    def fixed(): return 2
    @property
    def size(self): return 3
    @functools.cached_property
    def once(self): return 4
    class Part:
        def turn(self): return 5

class Fast(Engine):
    def step(self): return super().step() + 1

from textwrap import TextWrapper as Wrapper

class Slotted:
    __slots__ = ("x",)
    def go(self): return 6

class Called:
    def __init__(self): ...
    def __call__(self): ...
    def __del__(self): ...
    def __getattr__(self, name): raise AttributeError(name)
    def go(self): ...

class Base(abc.ABC):
    @abc.abstractmethod
    def must(self): ...

@functools.lru_cache
def cached(x): return x

def outer():
    def nested(): return 1
    return nested
"""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType("some_service")
    monkeypatch.setitem(sys.modules, "some_service", made)
    exec(compile(SOURCE, "some_service.py", "exec"), vars(made))
    return made


@pytest.mark.parametrize(
    ("match", "found"),
    [
        ("some_service:plain", ["plain"]),
        ("some_service:borrowed", ["borrowed"]),
        ("some_service:missing", []),
        ("some_service:Engine.missing", []),
        ("some_service:missing.step", []),
        ("some_service:Engine.step", ["Engine.step"]),
        ("some_service:Fast._inner", ["Fast._inner"]),
        ("some_service:*", ["plain", "_hidden", "coroutine", "generator", "cached", "outer"]),
        ("some_service:_*", ["_hidden"]),
        ("some_service:Engine", ["Engine.step", "Engine.make", "Engine.fixed"]),
        ("some_service:Engine.*", ["Engine.step", "Engine._inner", "Engine.make", "Engine.fixed"]),
        ("some_service:*.step", ["Engine.step", "Fast.step"]),
        ("some_service:Engine.**", ["Engine.step", "Engine._inner", "Engine.make", "Engine.fixed", "Engine.Part.turn"]),
        ("some_service:Engine.Part.turn", ["Engine.Part.turn"]),
        ("some_service:Called.*", ["Called.__init__", "Called.__call__", "Called.go"]),
        ("some_service:Called.__*", ["Called.__init__", "Called.__call__", "Called.__del__", "Called.__getattr__"]),
        ("some_service:Called.__del__", ["Called.__del__"]),
        ("some_service:Wrapper", ["Wrapper.wrap", "Wrapper.fill"]),
        ("some_service:Wrapper.*", []),
    ],
)
def test_a_rule_finds_its_targets(module: types.ModuleType, match: str, found: list[str]) -> None:
    targets = [target for target in find_functions(module, match) if isinstance(target, Target)]
    assert [target.qualname for target in targets] == found


@pytest.mark.parametrize(
    ("match", "why"),
    [
        ("some_service:number", "it is a int, not a function"),
        ("some_service:outer.nested", "it is made anew at each call of outer; use @profiled in the source"),
    ],
)
def test_targets_that_cannot_be_replaced_are_named_with_the_reason(
    module: types.ModuleType, match: str, why: str
) -> None:
    (found,) = find_functions(module, match)
    assert found == Unreachable(match, why)


def namespace(module: types.ModuleType) -> dict[str, Any]:
    found = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    for cls in ("Engine", "Fast", "Slotted"):
        found |= {f"{cls}.{name}": value for name, value in vars(getattr(module, cls)).items()}
    return found


def test_attaching_records_keeps_behaviour_and_goes_back_completely(
    module: types.ModuleType, recorder: Recorder
) -> None:
    before = namespace(module)
    targets = [
        target
        for match in ("some_service:**", "some_service:Fast._inner", "some_service:borrowed")
        for target in find_functions(module, match)
        if isinstance(target, Target)
    ]
    probes = [Probe(target, make_site(target.function), recorder) for target in targets]
    for probe in probes:
        probe.attach()
    assert module.Fast().step() == 2
    assert module.Fast.make().__class__ is module.Fast
    assert module.Engine.fixed() == module.Engine().fixed() == 2
    assert isinstance(inspect.getattr_static(module.Engine, "fixed"), staticmethod)
    assert isinstance(inspect.getattr_static(module.Engine, "make"), classmethod)
    assert module.Slotted().go() == 6
    assert module.borrowed([1]) == "[1]"
    assert inspect.isabstract(module.Base)
    assert asyncio.run(module.coroutine()) == 1
    assert tree(recorder) == outline(
        """
        Fast.step
          Engine.step
            Engine._inner
        Engine.make
        Engine.fixed
        Engine.fixed
        Slotted.go
        dumps
        coroutine
        """
    )
    for probe in reversed(probes):
        probe.undo()
    assert namespace(module) == before
    assert "_inner" not in vars(module.Fast)


def test_names_bound_by_from_import_are_rebound_in_one_pass(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    importer = types.ModuleType("importer")
    importer.renamed, importer.other = module.plain, module.generator  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "importer", importer)
    plain, generator, instead = module.plain, module.generator, object()
    rebind_objects([(plain, instead)])
    assert importer.renamed is module.plain is instead  # type: ignore[attr-defined]
    assert importer.other is module.generator is generator  # type: ignore[attr-defined]
    rebind_objects([(instead, plain)])
    assert importer.renamed is module.plain is plain  # type: ignore[attr-defined]


def test_looking_through_all_modules_wakes_none_and_survives_what_only_looks_like_one(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Proxy:
        @property
        def __class__(self) -> Any:
            raise RuntimeError("foreign code")

    (tmp_path / "asleep.py").write_text("raise RuntimeError('woken')")
    spec = importlib.util.spec_from_file_location("asleep", tmp_path / "asleep.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    asleep = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(asleep)
    nameless = types.ModuleType("nameless")
    del nameless.__name__
    for name, thing in {"asleep": asleep, "nameless": nameless, "proxy": Proxy(), "none": None}.items():
        monkeypatch.setitem(sys.modules, name, thing)
    rebind_objects([(module.plain, module.plain)])
    assert ("asleep", asleep) in loaded_modules()
    assert ("some_service", module) in loaded_modules()


def test_a_function_that_something_else_holds_is_reported_by_its_references(module: types.ModuleType) -> None:
    def held() -> list[str]:
        found = [thing for thing in find_functions(module, "some_service:*") if isinstance(thing, Target)]
        return [target.qualname for target in found if count_other_references(target) > 0]

    assert held() == []
    table = {"/": module.plain}
    assert held() == ["plain"]
    del table
    assert held() == []


def test_undo_leaves_alone_what_somebody_else_has_set_since(module: types.ModuleType, recorder: Recorder) -> None:
    (target,) = find_functions(module, "some_service:plain")
    assert isinstance(target, Target)
    probe = Probe(target, make_site(target.function), recorder)
    probe.attach()

    def other(value: int) -> int:
        return value

    module.plain = other  # type: ignore[attr-defined]
    probe.undo()
    assert module.plain is other


def test_abstract_methods_stay_abstract(recorder: Recorder) -> None:
    class Base(abc.ABC):
        @abc.abstractmethod
        def must(self) -> None: ...

    owner = sys.modules[__name__]
    target = Target(Base, "must", vars(Base)["must"], Base.must, owner.__name__, "Base.must")
    probe = Probe(target, make_site(Base.must), recorder)
    probe.attach()
    with pytest.raises(TypeError, match="abstract"):
        Base()  # type: ignore[abstract]
    probe.undo()


DECORATED = """
import os, sys
from instrument import profiled
@profiled
def f(): pass
@profiled
class Kind:
    def method(self): pass
f()
"""


@pytest.mark.parametrize(
    ("more", "environment", "said"),
    [
        ("", {}, "instrument: @profiled on 2 functions recorded no call"),
        ("sys.exit(0 if os.fork() else 3)", {}, "instrument: @profiled on 2 functions recorded no call"),
        ("import instrument; instrument.start('p.yaml')", {}, ""),
        ("sys.stderr.close()", {}, ""),
        ("", {"INSTRUMENT": "off"}, ""),
    ],
    ids=["alone", "forked", "session", "closed", "off"],
)
def test_a_program_without_a_session_says_once_how_to_see_what_is_decorated(
    more: str, environment: dict[str, str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "p.yaml").write_text("service: s\nexport: {recording: {path: r.npz}}\n")
    done = subprocess.run(
        [sys.executable, "-c", DECORATED + more],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    lines = [line for line in done.stderr.splitlines() if "@profiled" in line]
    assert (done.returncode, done.stdout, len(lines)) == (0, "", bool(said))
    assert all(line.startswith(said) and "instrument run -- " in line for line in lines)
