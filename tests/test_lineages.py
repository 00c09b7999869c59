"""A method and its overrides in subclasses: named where a rule misses them, recorded once where it takes them in."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from readback import spans_in
from trees import tree

from instrument.instrumentors.selection import Selection
from instrument.profile.keys import loads
from instrument.recorder.recorder import Recorder

BASE = """
class Route:
    def handle(self, x): return x
    async def serve(self, x): return x
    def items(self, x): yield x
    async def stream(self, x): yield x
    @classmethod
    def make(cls): return cls()
    @property
    def size(self): return 1
    @staticmethod
    def plain(x): return x
    def other(self): return 0

class Calling(Route):
    def handle(self, x): return super().handle(x) + 1
    async def serve(self, x): return await super().serve(x) + 1
    def items(self, x): yield from super().items(x)
    async def stream(self, x):
        async for item in super().stream(x):
            yield item
    @classmethod
    def make(cls): return super().make()
    @property
    def size(self): return super().size + 1

class Sometimes(Calling):
    def handle(self, x): return x if x > 10 else super().handle(x)
"""
LATER = """
from routes import Route, Sometimes

class Own(Route):
    def handle(self, x): return -x

class Deep(Sometimes):
    def handle(self, x): return super().handle(x)
"""


@pytest.fixture
def routes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports one of the two modules."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "routes.py").write_text(BASE)
    (tmp_path / "later.py").write_text(LATER)
    importlib.invalidate_caches()
    yield importlib.import_module
    for name in ("routes", "later"):
        sys.modules.pop(name, None)


def rules(*matches: str) -> str:
    return "functions: [" + ", ".join(f"{{match: {match}}}" for match in matches) + "]"


def verdicts(selection: Selection) -> dict[str, tuple[str, str]]:
    return {verdict.target: (verdict.state, verdict.why) for verdict in selection.verdicts()}


@pytest.mark.parametrize("late", [False, True], ids=["before the import", "after it"])
def test_overrides_are_recorded_once_for_any_caller_and_any_time_of_their_definition(
    late: bool, routes: Callable[[str], Any], select: Callable[[str], Selection], recorder: Recorder
) -> None:
    if late:
        routes("later")
    selection = select(rules('"routes:Route.handle+"'))
    module, later = routes("routes"), routes("later")
    kinds = [module.Route, module.Calling, module.Sometimes, later.Own, later.Deep]
    assert [kind().handle(1) for kind in kinds] == [1, 2, 2, -1, 2]
    assert (module.Sometimes().handle(11), later.Deep().handle(11)) == (11, 11)
    names = ["Route", "Calling", "Sometimes", "Own", "Deep", "Sometimes", "Deep"]
    assert tree(recorder) == "\n".join(f"{name}.handle" for name in names)
    assert {target: state for target, (state, _) in verdicts(selection).items()} == {
        "routes:Route.handle": "attached",
        "routes:Calling.handle": "attached",
        "routes:Sometimes.handle": "attached",
        "later:Own.handle": "attached",
        "later:Deep.handle": "attached",
    }


def test_methods_of_every_kind_are_recorded_once(
    routes: Callable[[str], Any], select: Callable[[str], Selection], recorder: Recorder
) -> None:
    select(rules(*(f'"routes:Route.{name}+"' for name in ("serve", "items", "stream", "make", "size", "plain"))))
    module = routes("routes")
    calling = module.Calling()

    async def collect() -> list[Any]:
        return [item async for item in calling.stream(1)]

    assert asyncio.run(calling.serve(1)) == 2
    assert (list(calling.items(1)), asyncio.run(collect()), calling.size, calling.plain(3)) == ([1], [1], 2, 3)
    assert type(module.Calling.make()) is module.Calling
    names = ["serve", "items", "stream", "size"]
    assert tree(recorder).splitlines() == [f"Calling.{name}" for name in names] + ["Route.plain", "Calling.make"]
    for name, holds in (
        ("serve", inspect.iscoroutinefunction),
        ("items", inspect.isgeneratorfunction),
        ("stream", inspect.isasyncgenfunction),
    ):
        assert holds(getattr(module.Calling, name))
        assert str(inspect.signature(getattr(module.Calling, name))) == "(self, x)"


def test_a_class_means_its_public_methods_and_their_overrides_and_one_may_be_taken_out(
    routes: Callable[[str], Any], select: Callable[[str], Selection], recorder: Recorder
) -> None:
    select(rules('["routes:Route+", "!later:Own.handle"]'))
    module, later = routes("routes"), routes("later")
    later.Own().handle(1)
    later.Deep().handle(1)
    module.Calling().other()
    assert tree(recorder) == "Deep.handle\nRoute.other"


def test_an_override_that_a_rule_on_the_method_alone_does_not_reach_is_named(
    routes: Callable[[str], Any], select: Callable[[str], Selection], recorder: Recorder
) -> None:
    selection = select(rules('"routes:Route.handle"'))
    routes("routes")
    state, why = verdicts(selection)["routes:Route.handle"]
    assert (state, why) == (
        "partly",
        "not seen: routes:Sometimes.handle, which overrides it; routes:Route.handle+ takes subclasses, too",
    )
    routes("later")
    state, why = verdicts(selection)["routes:Route.handle"]
    assert why.startswith(
        "not seen: later:Own.handle, routes:Sometimes.handle, which override it"
    )  # Deep goes to super


@pytest.mark.parametrize(
    "rule", ['["routes:Route.handle", "!*:Sometimes.*"]', '"routes:Route.handle", "routes:*.handle"']
)
def test_an_override_that_is_taken_out_or_has_a_rule_of_its_own_is_not_named(
    rule: str, routes: Callable[[str], Any], select: Callable[[str], Selection]
) -> None:
    selection = select(f"functions: [{{match: {rule}}}]" if "[" in rule else rules(*rule.split(", ")))
    routes("routes")
    assert {state for state, _ in verdicts(selection).values()} == {"attached"}


def test_everything_comes_back_and_later_classes_are_left_alone(
    routes: Callable[[str], Any], recorder: Recorder
) -> None:
    module = routes("routes")
    before = {name: dict(vars(kind)) for name, kind in vars(module).items() if isinstance(kind, type)}
    selection = Selection(loads(rules('"routes:Route.handle+"'), environ={}), recorder)
    selection.attach()
    assert "__init_subclass__" in vars(module.Route)
    selection.detach_all()
    assert {name: dict(vars(kind)) for name, kind in vars(module).items() if isinstance(kind, type)} == before
    assert routes("later").Own().handle(1) == -1
    assert spans_in(recorder) == []


def test_a_hook_of_the_class_itself_still_runs_and_a_subclass_that_hides_it_is_found_at_the_verdict(
    tmp_path: Path, routes: Callable[[str], Any], select: Callable[[str], Selection], recorder: Recorder
) -> None:
    (tmp_path / "routes.py").write_text(
        "SEEN = []\n"
        "class Route:\n"
        "    def __init_subclass__(cls, tag=None, **kwargs):\n"
        "        super().__init_subclass__(**kwargs)\n"
        "        SEEN.append((cls.__name__, tag))\n"
        "    def handle(self, x): return x\n"
        "class Hiding(Route, tag=1):\n"
        "    def __init_subclass__(cls): pass\n"
        "class Hidden(Hiding):\n"
        "    def handle(self, x): return -x\n"
    )
    selection = select(rules('"routes:Route.handle+"'))
    module = routes("routes")

    class Late(module.Route, tag=2):  # type: ignore[misc,name-defined]
        def handle(self, x: int) -> int:
            return x * 3

    class HiddenLate(module.Hiding):  # type: ignore[misc,name-defined]
        def handle(self, x: int) -> int:
            return x * 4

    assert module.SEEN == [("Hiding", 1), ("Late", 2)]
    assert "attached" in verdicts(selection)[f"{__name__}:{HiddenLate.__qualname__}.handle"]
    assert [kind().handle(1) for kind in (module.Hidden, Late, HiddenLate)] == [-1, 3, 4]
    assert tree(recorder) == "Hidden.handle\nLate.handle\nHiddenLate.handle"


def test_a_reload_takes_overrides_in_and_lets_go_of_them(
    routes: Callable[[str], Any], select: Callable[[str], Selection], recorder: Recorder
) -> None:
    selection = select(rules('"routes:Route.handle"'))
    module = routes("routes")
    module.Sometimes().handle(11)
    selection.change(loads(rules('"routes:Route.handle+"'), environ={}))
    module.Sometimes().handle(11)
    module.Calling().handle(1)
    selection.change(loads(rules('"routes:Route.handle"'), environ={}))
    module.Sometimes().handle(11)
    module.Route().handle(1)
    assert tree(recorder) == "Sometimes.handle\nCalling.handle\nRoute.handle"
    assert "__init_subclass__" not in vars(module.Route)


def test_each_request_of_a_fastapi_service_with_included_routes_is_recorded_once(
    select: Callable[[str], Selection], recorder: Recorder
) -> None:
    fastapi = pytest.importorskip("fastapi")
    testclient = pytest.importorskip("fastapi.testclient")
    select('functions: [{match: "starlette.routing:Route.handle+", kind: request, name: http.request}]')
    router = fastapi.APIRouter(prefix="/v1")
    app = fastapi.FastAPI()

    @router.get("/items")
    def items() -> list[int]:
        return [1]

    @app.get("/direct")
    async def direct() -> int:
        return 1

    app.include_router(router)
    with testclient.TestClient(app) as client:
        paths = ["/v1/items", "/direct", "/openapi.json", "/v1/items"]
        assert [client.get(path).status_code for path in paths] == [200] * 4
    assert tree(recorder) == "\n".join(["http.request"] * 4)


@pytest.mark.parametrize("text", ["a:B.*+", "a.*:B.c+", "!a:B.c+", "a:B.c++", "a:+"])
def test_a_plus_where_it_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: module:qualname"):
        loads(f'functions: [{{match: ["x:y", "{text}"]}}]', environ={})
