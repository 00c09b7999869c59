"""Classes that a decorator keeps in an object of its own, as Ray Serve's deployments and actors are kept."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trees import tree

from instrument.instrumentors.selection import Selection
from instrument.recorder.recorder import Recorder

SERVICE = """
class Config:
    def __init__(self, held):
        self.deployment_def = held

class Deployment:
    def __init__(self, held):
        self._config = Config(held)
    def bind(self, *args):
        return self._config.deployment_def(*args)

class Slotted:
    __slots__ = ("held",)
    def __init__(self, held): self.held = held
    def bind(self): return self.held()

def deployment(kind=Deployment):
    return kind

class Base:
    def inherited(self, x): return x

@deployment()
class Embedder(Base):
    def __init__(self): self.ready = True
    def embed(self, x): return self.scale(x) + 1
    async def later(self, x): return x
    def scale(self, x): return x * 2
    def _inner(self): return 0
    class Inner:
        def go(self): return 1

@deployment(Slotted)
class Small:
    def run(self, x): return x
"""


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """Imports the module with the classes."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "deployed.py").write_text(SERVICE)
    importlib.invalidate_caches()
    yield lambda: importlib.import_module("deployed")
    sys.modules.pop("deployed", None)


@pytest.mark.parametrize(
    ("match", "spans", "targets"),
    [
        ("deployed:Embedder.embed", "Embedder.embed", ["Embedder.embed"]),
        ("deployed:Embedder.inherited", "Embedder.inherited", ["Embedder.inherited"]),
        (
            "deployed:Embedder",
            "Embedder.embed\n  Embedder.scale",
            ["Embedder.embed", "Embedder.later", "Embedder.scale"],
        ),
        (
            "deployed:Embedder.**",
            "Embedder.__init__\nEmbedder.embed\n  Embedder.scale",
            [f"Embedder.{name}" for name in ("__init__", "embed", "later", "scale", "_inner", "Inner.go")],
        ),
    ],
)
@pytest.mark.parametrize("late", [False, True], ids=["before the import", "after it"])
def test_a_class_that_a_decorators_object_holds_is_reached_by_its_own_name(
    late: bool,
    match: str,
    spans: str,
    targets: list[str],
    service: Callable[[], Any],
    select: Callable[[str], Selection],
    recorder: Recorder,
) -> None:
    if late:
        service()
    selection = select(f'functions: [{{match: "{match}"}}]')
    embedder = service().Embedder.bind()
    assert embedder.embed(1) == 3
    embedder.inherited(1)
    assert [verdict.target for verdict in selection.verdicts()] == [f"deployed:{target}" for target in targets]
    for verdict in selection.verdicts():
        assert (verdict.state, verdict.why) == ("attached", "inside a deployed.Deployment")
    assert tree(recorder).startswith(spans.replace("Embedder.inherited", "Base.inherited"))
    held = type(embedder)
    selection.detach_all()
    assert "Embedder.embed" in repr(held.embed)
    assert not hasattr(held.embed, "__instrument__")
    assert "inherited" not in vars(held)


def test_a_holder_with_slots_is_seen_through_and_a_name_that_is_not_there_is_reported(
    service: Callable[[], Any], select: Callable[[str], Selection], recorder: Recorder
) -> None:
    selection = select('functions: [{match: "deployed:Small.run"}, {match: "deployed:Small.absent"}]')
    service().Small.bind().run(1)
    assert tree(recorder) == "Small.run"
    assert [verdict.state for verdict in selection.verdicts()] == ["attached", "not found"]


@pytest.mark.slow
def test_a_layer_class_of_a_package_that_is_not_imported_is_waited_for(tmp_path: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    profile = tmp_path / "p.yaml"
    profile.write_text("layers: [{type: [BertModel]}]")
    command = [sys.executable, "-m", "instrument", "check", str(profile)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    assert "type BertModel: waiting (no class of that name is defined yet: BertModel" in done.stdout
