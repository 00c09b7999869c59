"""Layers of real torch models: which record, under which path, and that torch notices nothing."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from readback import spans_in
from trees import outline, tree

import instrument
from instrument.instrumentors.layer_selection import VAIN_WALKS
from instrument.instrumentors.layers import Layers
from instrument.instrumentors.work import ModuleWork
from instrument.profile.keys import loads
from instrument.profile.model import LayerRule
from instrument.recorder.recorder import Recorder
from instrument.recording.spans import Work
from instrument.runtime.faults import FAULTS

pytestmark = pytest.mark.usefixtures("small_heap")  # without models of other tests


@pytest.fixture(scope="module", autouse=True)
def late_imports() -> None:
    """Imported by the first test: this file is collected by every process of the tests and run by one."""
    global torch, nn, torch_models, MLP, Stack
    torch = pytest.importorskip("torch")
    import torch_models
    from torch import nn
    from torch_models import MLP, Stack


def path(span: Any) -> str:
    return f"{span.site.name} {span.site.instance}"


@pytest.fixture
def attached(recorder: Recorder) -> Iterator[Any]:
    """Attach layer rules; every one is taken off after the test."""
    made: list[Layers] = []

    def attach(*rules: LayerRule) -> Layers:
        layers = Layers(rules, recorder)
        made.append(layers)
        layers.attach(torch)
        return layers

    yield attach
    for layers in made:
        layers.undo()


def test_layers_by_path_record_with_class_and_path(recorder: Recorder, attached: Any) -> None:
    layers = attached(LayerRule(match=("layers.*",), text="layers[0]"))
    model = Stack()
    model(torch.zeros(1, 4))
    assert tree(recorder, path) == "MLP layers.0\nMLP layers.1"
    assert [len(selected) for _, selected in layers._at_work] == [2]
    site = spans_in(recorder)[0].site
    assert (site.kind, site.qualname, site.file) == ("layer", "MLP.forward", torch_models.__file__)


@pytest.mark.parametrize("built", ["before", "after"])
def test_layers_by_type_and_by_both_whether_built_before_or_after(
    recorder: Recorder, attached: Any, built: str
) -> None:
    rules = (
        LayerRule(match=("**.up",), types=("Linear",)),
        LayerRule(types=("MLP",), name="mlp"),
        LayerRule(match=("head",)),
    )
    model = Stack(1) if built == "before" else None
    attached(*rules)
    model = model or Stack(1)
    model(torch.zeros(1, 4))
    assert tree(recorder, path) == outline(
        """
        mlp layers.0
          Linear layers.0.up
        Linear head
        """
    )


def test_excluded_paths_do_not_record(recorder: Recorder, attached: Any) -> None:
    attached(LayerRule(match=("**",), exclude=("layers.*.**",), types=("Linear",)))
    Stack()(torch.zeros(1, 4))
    assert tree(recorder, path) == "Linear head"


def test_a_model_without_children_defined_later_is_seen_by_type(recorder: Recorder, attached: Any) -> None:
    attached(LayerRule(types=("Alone",)))

    class Alone(nn.Module):
        def forward(self, x: Any) -> Any:
            return x + 1

    class Derived(Alone):
        pass

    Alone()(torch.zeros(1))
    Derived()(torch.zeros(1))
    assert tree(recorder, path) == "Alone "


def test_a_class_that_inherits_its_forward_is_seen_by_its_own_name(recorder: Recorder, attached: Any) -> None:
    class Inheriting(MLP):
        pass

    attached(LayerRule(types=("Inheriting",)))
    Inheriting()(torch.zeros(1, 4))
    MLP()(torch.zeros(1, 4))
    assert tree(recorder, path) == "Inheriting "


def test_copies_and_pickles_of_a_model_run_their_own_weights_and_record(recorder: Recorder, attached: Any) -> None:
    attached(LayerRule(match=("layers.*",)))
    model = Stack(1)
    with torch.no_grad():
        model(torch.zeros(1, 4))
        twin = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
        for parameter in twin.parameters():
            parameter.zero_()
        assert torch.equal(twin(torch.ones(1, 4)), torch.zeros(1, 2))
        assert torch.equal(loaded(torch.ones(1, 4)), model(torch.ones(1, 4)))
    assert tree(recorder, path) == "\n".join(["MLP layers.0"] * 4)
    assert "instrument" not in repr(vars(model)) + repr(vars(twin))


def test_nothing_of_ours_is_in_a_saved_model(attached: Any) -> None:
    untouched = sorted(vars(Stack(1).layers[0]))
    attached(LayerRule(match=("**",)))
    model = Stack(1)
    model(torch.zeros(1, 4))
    assert sorted(vars(model.layers[0])) == untouched
    assert b"instrument" not in pickle.dumps(model)


def test_torch_compile_keeps_one_full_graph_and_a_compiled_region_records_nothing_inside(
    recorder: Recorder, attached: Any
) -> None:
    attached(LayerRule(types=("Linear",)))
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = Stack(1)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.ones(1, 4)
    for _ in range(3):
        assert torch.allclose(compiled(x), model(x))
    assert len(graphs) == 1
    assert tree(recorder, path).split("\n") == ["Linear layers.0.up", "Linear layers.0.down", "Linear head"] * 3
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_scripted_traced_and_exported_modules_work_as_before(attached: Any) -> None:
    attached(LayerRule(types=("Linear", "Scriptable")))

    class Scriptable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.inner(x)).clamp(max=3.0)

    model, x = Scriptable(), torch.ones(1, 4)
    expected = model(x)
    scripted = torch.jit.script(model)
    assert torch.equal(scripted(x), expected)
    assert torch.equal(torch.jit.trace(model, x)(x), expected)
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)


def test_an_exception_in_a_layer_passes_and_marks_it(recorder: Recorder, attached: Any) -> None:
    attached(LayerRule(types=("MLP", "Linear")))
    with pytest.raises(RuntimeError, match="shape"):
        MLP()(torch.zeros(1, 5))
    assert tree(recorder) == "MLP !RuntimeError\n  Linear !RuntimeError"


def test_undo_restores_every_class_and_models_built_before_stay_usable(recorder: Recorder, attached: Any) -> None:
    before = nn.Linear.forward, MLP.forward, Stack.forward
    layers = attached(LayerRule(match=("**",)))
    model = Stack()
    assert nn.Linear.forward is not before[0]
    layers.undo()
    assert (nn.Linear.forward, MLP.forward, Stack.forward) == before
    model(torch.zeros(1, 4))
    assert spans_in(recorder) == []


def test_a_module_that_has_gone_gives_its_identity_back(recorder: Recorder, attached: Any) -> None:
    layers = attached(LayerRule(types=("Linear",)))
    others = set(layers._paths._places)
    for _ in range(50):
        nn.Sequential(nn.Linear(1, 1))(torch.zeros(1))
    gc.collect()
    assert not layers._sites
    assert set(layers._paths._places) <= others
    assert len(spans_in(recorder)) == 50


def test_layers_made_anew_in_every_call_share_a_site_and_do_not_walk_the_heap_each_time(
    recorder: Recorder, attached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = attached(LayerRule(types=("Softmax",)), LayerRule(match=("no.such.*",), types=("ReLU",)))
    walks: list[None] = []
    walk = layers._paths.note_modules_in_memory
    monkeypatch.setattr(layers._paths, "note_modules_in_memory", lambda: (walks.append(None), walk())[1])
    for _ in range(200):
        nn.Softmax(dim=0)(torch.zeros(2))
        nn.ReLU()(torch.zeros(2))
    assert 2 * VAIN_WALKS <= len(walks) < 20
    assert [len(selected) for _, selected in layers._at_work] == [1, 0]
    assert len({span.site for span in spans_in(recorder)}) == 1
    assert len(spans_in(recorder)) == 200


def test_a_fault_of_ours_does_not_reach_the_definition_of_a_class(
    attached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(cls: type[Any]) -> None:
        raise RuntimeError("ours")

    layers = attached(LayerRule(types=("Odd",)))
    monkeypatch.setattr(layers, "_patch_class", fail)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")

    class Odd(nn.Module):
        pass

    assert FAULTS.count_by_place() == {"definition of a layer class": 1}
    FAULTS.clear()


def test_switched_off_layers_record_nothing(recorder: Recorder, attached: Any) -> None:
    attached(LayerRule(types=("Linear",)))
    recorder.on = False
    Stack()(torch.zeros(1, 4))
    assert spans_in(recorder) == []


def test_layers_that_were_recorded_are_not_called_unreachable_after_the_end() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    session = instrument.start(loads("layers: [{type: [Linear, ReLU]}]", environ={}))
    assert session is not None
    model(torch.zeros(1, 2))
    ours = {"0", "1"}
    before = [(v.target, v.state) for v in session.verdicts() if v.target in ours]
    told = session.notes()
    instrument.stop()
    assert [(v.target, v.state) for v in session.verdicts() if v.target in ours] == before
    assert session.notes() == told


class Device(NamedTuple):
    type: str
    index: int | None


class Parameter:
    """The part of a torch parameter that says on which device it is."""

    def __init__(self, kind: str, index: int | None = None) -> None:
        self.device = Device(kind, index)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"


def test_a_layer_reports_the_current_devices_of_its_parameters() -> None:
    parameters = [Parameter("cuda", 1), Parameter("cpu"), Parameter("cuda", 1)]
    work = ModuleWork(parameters)
    assert work() == Work("torch", (1,))
    parameters[1].device = Device("cuda", 0)
    assert work() == Work("torch", (0, 1))
    parameters.clear()
    assert work() == Work("torch", (0, 1))  # what it was last
