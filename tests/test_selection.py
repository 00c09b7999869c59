"""The rules of a profile at work: attached at import, attached late, and named where they miss."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trees import tree

from instrument.instrumentors.selection import Selection
from instrument.recorder.recorder import Recorder

SERVICE = """
from served_text import encode

class Engine:
    def step(self, text): return encode(text)
    def _inner(self): return 1

def handle(text): return Engine().step(text)

def outer():
    def nested(): return 1
    return nested()
"""
TEXT = """
def encode(text): return [ord(c) for c in text]
def _split(text): return text.split()
"""


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """Two modules on the path; calling the fixture imports them."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "served.py").write_text(SERVICE)
    (tmp_path / "served_text.py").write_text(TEXT)
    importlib.invalidate_caches()
    yield lambda: importlib.import_module("served")
    for name in ("served", "served_text"):
        sys.modules.pop(name, None)


PROFILE = """
functions:
  - {match: "served:handle", kind: request, name: handle it}
  - {match: "served:Engine.*"}
  - {match: ["served_text:*", "!served_text:_*"], kind: phase}
"""


def states(selection: Selection) -> list[str]:
    return [f"{verdict.target or '-'} {verdict.state}" for verdict in selection.verdicts()]


def test_rules_attach_as_their_modules_are_imported(
    service: Callable[[], Any], select: Callable[[str], Selection], recorder: Recorder
) -> None:
    selection = select(PROFILE)
    assert states(selection) == ["- waiting", "- waiting", "- waiting"]
    assert service().handle("ab") == [97, 98]
    assert tree(recorder) == "handle it\n  Engine.step\n    encode"
    assert states(selection) == [
        "served:handle attached",
        "served:Engine.step attached",
        "served:Engine._inner attached",
        "served_text:encode attached",
    ]
    assert selection.late == []


def test_late_start_attaches_and_names_the_modules_already_imported(
    service: Callable[[], Any], select: Callable[[str], Selection], recorder: Recorder
) -> None:
    module = service()
    selection = select(PROFILE)
    assert module.handle("a") == [97]
    assert tree(recorder) == "handle it\n  Engine.step\n    encode"
    assert selection.late == ["served", "served_text"] or selection.late == ["served_text", "served"]


def test_undo_leaves_every_module_as_it_was(service: Callable[[], Any], select: Callable[[str], Selection]) -> None:
    module = service()
    before = dict(vars(module)), dict(vars(module.Engine)), dict(vars(sys.modules["served_text"]))
    select(PROFILE).detach_all()
    assert (dict(vars(module)), dict(vars(module.Engine)), dict(vars(sys.modules["served_text"]))) == before


def test_undo_reaches_the_names_that_were_bound_while_the_probe_was_there(
    tmp_path: Path, service: Callable[[], Any], select: Callable[[str], Selection], recorder: Recorder
) -> None:
    selection = select('functions: [{match: "served_text:encode"}]')
    module = service()
    assert module.encode is sys.modules["served_text"].encode
    selection.detach_all()
    assert module.encode is sys.modules["served_text"].encode
    assert not hasattr(module.encode, "__instrument__")
    select('functions: [{match: "served_text:encode", name: again}]')
    module.handle("a")
    assert tree(recorder) == "again"


def test_names_bound_in_an_import_cycle_record_too(
    tmp_path: Path, service: Callable[[], Any], select: Callable[[str], Selection], recorder: Recorder
) -> None:
    (tmp_path / "served_text.py").write_text("def encode(t): return t\nalias = encode\nimport served_text_user")
    (tmp_path / "served_text_user.py").write_text("from served_text import encode as bound")
    selection = select('functions: [{match: "served_text:encode"}]')
    service()
    text, user = sys.modules["served_text"], sys.modules.pop("served_text_user")
    assert text.encode is text.alias is user.bound
    user.bound("a")
    assert tree(recorder) == "encode"
    selection.detach_all()
    assert text.encode is text.alias


def test_a_table_that_has_a_function_is_named_and_keeps_it(
    tmp_path: Path, service: Callable[[], Any], select: Callable[[str], Selection], recorder: Recorder
) -> None:
    (tmp_path / "served_text.py").write_text(
        "ROUTES = {}\n"
        "def route(f): ROUTES['/'] = f; return f\n"
        "@route\ndef encode(t): return t\n"
        "def other(t): return encode(t)\n"
    )
    selection = select('functions: [{match: "served_text:*"}]')
    service()
    text = sys.modules["served_text"]
    kept = text.ROUTES["/"]
    assert (kept("seen"), text.other("seen")) == ("seen", "seen")
    assert tree(recorder) == "other\n  encode"
    attached = ["served_text:route attached", "served_text:other attached"]
    assert states(selection) == [attached[0], "served_text:encode partly", attached[1]]
    assert [verdict.why for verdict in selection.verdicts()][1].startswith(
        f"also referenced by a dict in {tmp_path}/served_text.py:1 (ROUTES), and calls through it are not recorded"
    )
    selection.detach_all()
    assert text.ROUTES["/"] is text.encode is kept


def test_a_class_that_lets_nothing_be_set_is_named_and_the_others_are_attached(
    tmp_path: Path, service: Callable[[], Any], select: Callable[[str], Selection]
) -> None:
    (tmp_path / "served_text.py").write_text(
        "class Meta(type):\n    def __setattr__(cls, name, value): raise AttributeError('frozen')\n"
        "class Frozen(metaclass=Meta):\n    def go(self): return 1\n"
        "def encode(t): return t\n"
    )
    selection = select('functions: [{match: "served_text:Frozen.go"}, {match: "served_text:encode"}]')
    service()
    assert [str(verdict) for verdict in selection.verdicts()] == [
        "served_text:Frozen.go: unreachable (it cannot be replaced: AttributeError: frozen)",
        "served_text:encode: attached",
    ]


@pytest.mark.parametrize(
    ("rule", "verdict"),
    [
        ("served:handel", "not found (matched no function; nearest is served:handle)"),
        ("served:Engine.stp", "not found (matched no function; nearest is served:Engine.step)"),
        ("served:qqqqqqq", "not found (matched no function)"),
        ("nowhere_at_all:f", "waiting (nowhere_at_all not imported)"),
        ("served:Engine", "attached"),
    ],
)
def test_a_rule_that_misses_says_why_and_names_the_nearest(
    service: Callable[[], Any], select: Callable[[str], Selection], rule: str, verdict: str
) -> None:
    selection = select(f'functions: [{{match: "{rule}"}}]')
    service()
    assert str(selection.verdicts()[0]).endswith(verdict)


def test_the_first_rule_that_matches_has_the_target(
    service: Callable[[], Any], select: Callable[[str], Selection], recorder: Recorder
) -> None:
    selection = select('functions: [{match: "served_text:encode", name: first}, {match: "served_text:*", name: rest}]')
    service().handle("a")
    assert tree(recorder) == "first"
    assert [verdict.why for verdict in selection.verdicts()][1].endswith("has it")


def test_a_target_that_a_rule_names_twice_is_attached_once(
    service: Callable[[], Any], select: Callable[[str], Selection], recorder: Recorder
) -> None:
    selection = select('functions: [{match: ["served_text:encode", "served_text:*", "!**:_*"]}]')
    service().handle("a")
    assert tree(recorder) == "encode"
    assert states(selection) == ["served_text:encode attached"]


def test_a_decorated_function_keeps_its_own_span_and_is_recorded_once(
    tmp_path: Path, service: Callable[[], Any], select: Callable[[str], Selection], recording: Recorder
) -> None:
    (tmp_path / "served_text.py").write_text(
        "from instrument import profiled\n@profiled('own')\ndef encode(t): return t"
    )
    selection = select('functions: [{match: "served_text:encode", name: rule}]')
    service().handle("a")
    assert tree(recording) == "own"
    assert "its own decorator names it 'own'" in str(selection.verdicts()[0])


def test_a_reloaded_module_is_attached_again(
    service: Callable[[], Any], select: Callable[[str], Selection], recorder: Recorder
) -> None:
    select('functions: [{match: "served_text:encode"}]')
    service()
    importlib.reload(sys.modules["served_text"]).encode("a")
    assert tree(recorder) == "encode"


def test_a_module_that_runs_as_main_is_named_as_out_of_reach_where_nobody_saw_it_run(
    select: Callable[[str], Selection], monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.machinery import ModuleSpec

    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", ModuleSpec("service.main", None))
    selection = select('functions: [{match: "service.main:handle"}]')
    monkeypatch.setattr(main, "handle", lambda: 1, raising=False)
    (verdict,) = selection.verdicts()
    assert (verdict.state, "service.main runs as __main__" in verdict.why) == ("unreachable", True)


def test_layers_and_copies_wait_for_torch_and_say_what_became_of_them(
    select: Callable[[str], Selection], recorder: Recorder, torch: Any
) -> None:
    selection = select(
        """
        layers:
          - {type: Linear}
          - {type: Liner}
          - {match: "no.such.path"}
        copies: [{directions: [h2d]}]
        """
    )
    torch.nn.Linear(2, 2)(torch.zeros(2))
    texts: dict[str, list[str]] = {}
    for verdict in selection.verdicts():
        texts.setdefault(verdict.rule, []).append(str(verdict))
    linear, liner, path, copies = list(texts.values())[:4]
    assert "attached" in linear[0]
    assert liner == ["type Liner: waiting (no class of that name is defined yet: Liner; nearest is Linear)"]
    # Other tests may have left models behind, whose paths are known.
    assert len(path) == 1
    assert "no layer that it selects has run" in path[0] or "no layer has such a path" in path[0]
    if torch.version.cuda is None:
        assert "no copy to or from one can happen" in copies[0]
