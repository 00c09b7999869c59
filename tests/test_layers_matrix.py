"""Common changes to torch models: each kind is observed with the right tree, or named as not observable."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from readback import spans_in
from trees import outline, tree

from instrument.instrumentors.layers import Layers
from instrument.profile.model import LayerRule
from instrument.recorder.recorder import Recorder

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.usefixtures("small_heap"),  # without models of other tests
]


@pytest.fixture(scope="module", autouse=True)
def late_imports() -> None:
    """Imported by the first test: this file is collected by every process of the tests and run by one."""
    global torch, nn, X, MLP, Model
    torch = pytest.importorskip("torch")
    from torch import nn
    from torch_models import MLP, Model

    X = torch.ones(1, 4)


WHOLE = """
    Model
      MLP body
        Linear body.up
        Linear body.down
      Linear head
"""
BODY_ONE = """
    Model
      MLP body
      Linear head
"""

BY_TYPE = LayerRule(types=("Model", "MLP", "Linear"), text="by type")
BY_PATH = (LayerRule(match=("**",), text="by path"), LayerRule(types=("Model",), text="the model"))


def path(span: Any) -> str:
    return f"{span.site.name} {span.site.instance}".rstrip() + (f" !{span.error}" if span.error else "")


@pytest.fixture
def attach(recorder: Recorder) -> Iterator[Callable[..., Layers]]:
    """Attach layer rules; every one is taken off after the test."""
    import torch._dynamo  # or what is compiled first would be compiled before its region is watched

    made: list[Layers] = []

    def attach(*rules: LayerRule) -> Layers:
        made.append(Layers(rules or (BY_TYPE,), recorder))
        made[-1].attach_to(torch)
        return made[-1]

    torch._dynamo.reset()
    yield attach
    for layers in made:
        layers.undo()
    torch._dynamo.reset()


def unseen(layers: Layers) -> list[str]:
    layers._paths._next_walk_ns = 0
    return [str(verdict) for verdict in layers.verdicts() if verdict.state in ("unreachable", "compiled")]


def run(recorder: Recorder, *calls: Callable[[], Any]) -> str:
    """Return the tree that the calls record, without that of the making of the model."""
    recorder.reset()
    with torch.no_grad():
        for call in calls:
            call()
    return tree(recorder, path)


# ---------------------------------------------------------------- models that torch calls layer by layer


def weight_normed(model: Any) -> Any:
    nn.utils.parametrizations.weight_norm(model.head)
    return model


def old_weight_normed(model: Any) -> Any:
    nn.utils.weight_norm(model.head)
    return model


def functional(model: Any) -> Any:
    return lambda x: torch.func.functional_call(model, dict(model.named_parameters()), (x,))


def graded(model: Any) -> Any:
    return lambda x: torch.func.grad(lambda v: model(v).sum())(x)


def ensemble(model: Any) -> Any:
    parameters, buffers = torch.func.stack_module_state([model, copy.deepcopy(model)])
    base = copy.deepcopy(model).to("meta")
    call = lambda p, b, x: torch.func.functional_call(base, (p, b), (x,))  # noqa: E731 - vmap takes a function
    return lambda x: torch.func.vmap(call, in_dims=(0, 0, None))(parameters, buffers, x)


def replica(model: Any) -> Any:
    """One of the copies that DataParallel makes for its devices, made by torch's own function on the host."""
    module = sys.modules["torch.nn.parallel.replicate"]
    with pytest.MonkeyPatch.context() as patch:
        spread = lambda tensors, devices, detach=False: [[t.detach().clone() for t in tensors] for _ in devices]  # noqa: E731
        patch.setattr(module, "_broadcast_coalesced_reshape", spread)
        patch.setattr(module, "_get_device_index", lambda device, optional=False: device)
        made = module.replicate(model, [0, 1])[1]
    assert made is not model
    return made


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model,
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
        old_weight_normed,
        weight_normed,
        functional,
        graded,
        lambda model: torch.func.vmap(model),
        ensemble,
        lambda model: nn.DataParallel(model),
        replica,
    ],
    ids=[
        *("plain", "deepcopy", "pickled", "weight_norm", "parametrized", "functional_call", "grad", "vmap"),
        *("ensemble", "DataParallel", "replica"),
    ],
)
@pytest.mark.parametrize("built", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_a_changed_model_is_recorded_layer_by_layer(
    recorder: Recorder, attach: Callable[..., Layers], change: Any, built: str
) -> None:
    changed = change(Model()) if built == "before" else None
    layers = attach()
    changed = changed or change(Model())
    assert run(recorder, lambda: changed(X)) == outline(WHOLE)
    assert unseen(layers) == []


def test_a_parametrization_is_a_layer_of_its_own_by_path(recorder: Recorder, attach: Callable[..., Layers]) -> None:
    attach(*BY_PATH)
    model = weight_normed(Model())
    assert run(recorder, lambda: model.head(X)) == outline(
        """
        Linear head
          ParametrizationList head.parametrizations.weight
            _WeightNorm head.parametrizations.weight.0
        """
    )


def test_a_lazy_layer_keeps_its_place_when_it_becomes_another_class(
    recorder: Recorder, attach: Callable[..., Layers]
) -> None:
    attach(*BY_PATH)
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    assert run(recorder, lambda: model(X), lambda: model(X)) == "\n".join(["Linear 0", "ReLU 1"] * 2)


def test_wrappers_for_several_processes_and_for_checkpoints_are_no_part_of_a_path(
    recorder: Recorder, attach: Callable[..., Layers], tmp_path: Path
) -> None:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    attach()
    distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        ddp = nn.parallel.DistributedDataParallel(Model())
        assert run(recorder, lambda: ddp(X)) == outline(WHOLE)
        sharded = Model()
        fully_shard(sharded.body, mesh=init_device_mesh("cpu", (1,)))
        assert type(sharded.body).__name__ == "FSDPMLP"
        assert run(recorder, lambda: sharded(X)) == outline(WHOLE)
        wrapped = Model()
        wrapped.body = FullyShardedDataParallel(wrapped.body, device_id=torch.device("cpu"))
        assert run(recorder, lambda: wrapped(X)) == outline(WHOLE)
    finally:
        distributed.destroy_process_group()
    checkpointed = Model()
    checkpointed.body = checkpoint_wrapper(checkpointed.body)
    assert run(recorder, lambda: checkpointed(X)) == outline(WHOLE)


def test_hooks_run_in_the_same_order_and_outside_of_the_span(recorder: Recorder, attach: Callable[..., Layers]) -> None:
    def order(model: Any) -> list[str]:
        events: list[str] = []
        head = model.head
        head.register_forward_pre_hook(lambda *_: events.append(f"before {recorder.current_span_id() > 0}"))
        head.register_forward_hook(lambda *_: events.append(f"after {recorder.current_span_id() > 0}"))
        head.register_full_backward_pre_hook(lambda *_: events.append("back before"))
        head.register_full_backward_hook(lambda *_: events.append("back after"))
        x = X.clone().requires_grad_()
        x.register_hook(lambda _: events.append("gradient"))
        model(x).sum().backward()
        return events

    bare = order(Model())
    attach(LayerRule(types=("Linear",)))
    assert order(Model()) == bare == ["before False", "after False", "back before", "back after", "gradient"]


def test_a_layer_that_outlives_its_model_is_known_by_its_new_place(
    recorder: Recorder, attach: Callable[..., Layers]
) -> None:
    attach(*BY_PATH)
    taken = Model().head
    other = nn.ModuleDict({"classifier": taken})
    assert run(recorder, lambda: other["classifier"](X)) == "Linear classifier"


# ---------------------------------------------------------------- regions


def compiled(module: Any) -> Any:
    return torch.compile(module, backend="eager", fullgraph=True)


def compiled_in_place(module: Any) -> Any:
    module.compile(backend="eager", fullgraph=True)
    return module


REGIONS = {
    "compiled": (compiled, "inside a compiled region"),
    "compiled in place": (compiled_in_place, "inside a compiled region"),
    "scripted": (lambda module: torch.jit.script(module), "inside a ScriptModule"),
    "traced": (lambda module: torch.jit.trace(module, X), "inside a ScriptModule"),
}


@pytest.mark.parametrize("kind", REGIONS)
@pytest.mark.parametrize("built", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_a_region_is_one_span_and_the_layers_inside_are_named(
    recorder: Recorder, attach: Callable[..., Layers], kind: str, built: str
) -> None:
    make, why = REGIONS[kind]

    def build() -> tuple[Any, Any]:
        part = Model()
        part.body = make(part.body)
        whole = make(Model())
        whole(X)
        return part, whole

    made = build() if built == "before" else None
    layers = attach()
    part, whole = made or build()
    part(X)
    assert run(recorder, lambda: part(X)) == outline(BODY_ONE)
    assert run(recorder, lambda: whole(X)) == "Model"
    region = {span.site.attributes for span in spans_in(recorder)}
    assert region == {(("region", "scripted" if "Script" in why else "compiled"),)}
    # Two in the body of one; body, both of its own, and head in the other.
    state = "compiled" if why == "inside a compiled region" else "unreachable"
    assert unseen(layers) == [f"by type: 6 layers: {state} ({why}: not observable)"]


def test_a_compiled_model_breaks_no_graph_and_nests_as_before(
    recorder: Recorder, attach: Callable[..., Layers]
) -> None:
    attach()
    model = Model()
    model.body = compiled_in_place(model.body)
    model.head = compiled(model.head)
    with torch.no_grad():
        assert torch._dynamo.explain(model)(X).graph_break_count == 0
    torch._dynamo.reset()
    whole = compiled(model)
    whole(X)
    assert run(recorder, lambda: whole(X)) == "Model"
    assert torch.equal(whole(X), model(X))


def test_a_compiled_region_whose_graph_breaks_stays_one_span(recorder: Recorder, attach: Callable[..., Layers]) -> None:
    class Breaking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            y = self.inner(x)
            torch._dynamo.graph_break()
            return self.inner(y)

    attach(LayerRule(types=("Breaking", "Linear")))
    model = torch.compile(Breaking(), backend="eager")
    model(X)
    assert run(recorder, lambda: model(X)) == "Breaking"


def test_a_model_that_compiles_in_place_is_copied_pickled_and_given_back(
    recorder: Recorder, attach: Callable[..., Layers]
) -> None:
    early = compiled_in_place(MLP())
    call = early._compiled_call_impl
    layers = attach()
    late = compiled_in_place(MLP())
    assert "instrument" not in repr(vars(copy.deepcopy(late))) + repr(vars(pickle.loads(pickle.dumps(late))))
    holder = nn.Sequential(early, late)
    assert run(recorder, lambda: holder(X)) == "MLP 0\nMLP 1"
    layers.undo()
    assert early._compiled_call_impl is call
    assert not hasattr(late._compiled_call_impl, "__instrument_region__")
    assert torch.equal(late(X), MLP.forward(late, X))


def test_a_failing_region_raises_as_before_and_marks_its_span(
    recorder: Recorder, attach: Callable[..., Layers]
) -> None:
    attach()
    scripted = torch.jit.script(MLP())
    with pytest.raises(RuntimeError, match="shape"):
        scripted(torch.ones(1, 5))
    assert tree(recorder, path) == "MLP !RuntimeError"


def test_an_exported_program_is_a_graph_and_unflattened_it_is_a_model(
    recorder: Recorder, attach: Callable[..., Layers]
) -> None:
    layers = attach(*BY_PATH, LayerRule(types=("GraphModule",), text="graphs"))
    exported = torch.export.export(Model(), (X,))
    flat, deep = exported.module(), torch.export.unflatten(exported)
    assert run(recorder, lambda: flat(X)) == "GraphModule"
    assert run(recorder, lambda: deep(X)) == outline(
        """
        InterpreterModule body
          InterpreterModule body.up
          InterpreterModule body.down
        InterpreterModule head
        """
    )
    assert "by path: 3 layers: unreachable (inside an exported graph: not observable)" in unseen(layers)


def test_a_graph_of_torch_fx_calls_its_layers(recorder: Recorder, attach: Callable[..., Layers]) -> None:
    attach(BY_TYPE, LayerRule(types=("GraphModule",)))
    graph = torch.fx.symbolic_trace(Model())
    assert run(recorder, lambda: graph(X)) == outline(
        """
        GraphModule
          Linear body.up
          Linear body.down
          Linear head
        """
    )


def test_quantised_layers_are_seen_by_class_and_named_where_they_are_not(
    recorder: Recorder, attach: Callable[..., Layers]
) -> None:
    quantise = torch.ao.quantization.quantize_dynamic
    if not torch.backends.quantized.supported_engines:
        pytest.skip("this torch cannot quantise")
    layers = attach(BY_TYPE)
    model: Any = quantise(Model(), {nn.Linear}, dtype=torch.qint8)
    assert run(recorder, lambda: model(X)) == outline(WHOLE)
    layers.undo()
    layers = attach(LayerRule(match=("head",), text="head"))
    assert run(recorder, lambda: model(X)) == "Linear head"
    layers.undo()
    model = None
    gc.collect()
    layers = attach(LayerRule(match=("head",), text="head"))
    late = quantise(Model(), {nn.Linear}, dtype=torch.qint8)
    assert run(recorder, lambda: late(X)) == ""
    assert unseen(layers) == ["head: 1 layers: unreachable (put in place past torch's registration: not observable)"]


def test_attention_calls_none_of_its_layers_and_a_fast_encoder_none_at_all(
    recorder: Recorder, attach: Callable[..., Layers]
) -> None:
    layers = attach(LayerRule(types=("MultiheadAttention", "NonDynamicallyQuantizableLinear", "Linear"), text="rule"))
    attention: Any = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.ones(1, 3, 4)
    assert run(recorder, lambda: attention(x, x, x)) == "MultiheadAttention"
    why = "inside a MultiheadAttention, which computes with their weights and does not call them: not observable"
    assert unseen(layers) == [f"rule: 1 layers: unreachable ({why})"]
    attention = None
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1)
    assert run(recorder, lambda: encoder(x)) == outline(
        """
        MultiheadAttention layers.0.self_attn
        Linear layers.0.linear1
        Linear layers.0.linear2
        """
    )
    encoder.eval()
    assert run(recorder, lambda: encoder(x)) == ""
    why = "inside a TransformerEncoderLayer, which may run as one kernel in eval mode: not observable"
    assert unseen(layers) == [f"rule: 4 layers: unreachable ({why})"]


def test_a_forward_that_an_instance_has_to_itself_is_named(recorder: Recorder, attach: Callable[..., Layers]) -> None:
    layers = attach(LayerRule(types=("MLP", "Linear"), text="rule"))
    model = Model()
    model.body.forward = compiled(model.body.forward)
    model(X)
    # A compiler takes the code of what the native probe wraps, so that the probe stays around it.
    assert run(recorder, lambda: model(X)) == "MLP body\nLinear head"
    assert unseen(layers) == ["rule: 2 layers: compiled (inside a compiled region: not observable)"]


def test_undo_restores_the_very_same_calls(attach: Callable[..., Layers]) -> None:
    from torch._dynamo.eval_frame import OptimizedModule
    from torch.fx.graph_module import _WrappedCall

    owners = [nn.Module, OptimizedModule, _WrappedCall, torch.jit.RecursiveScriptModule, torch.jit.TopLevelTracedModule]
    owners += [nn.Linear, MLP, Model, nn.MultiheadAttention]
    before = [dict(vars(owner)) for owner in owners]
    layers = attach(*BY_PATH, BY_TYPE)
    Model()(X)
    assert [dict(vars(owner)) for owner in owners] != before
    layers.undo()
    after = [dict(vars(owner)) for owner in owners]
    for owner, was, now in zip(owners, before, after, strict=True):
        assert {name: now[name] for name in was} == was, owner
        assert set(now) == set(was), owner


PROGRAM = """
import sys
from instrument.instrumentors.selection import Selection
from instrument.profile.keys import loads
from instrument.recorder.core import calls_by_site
from instrument.recorder.recorder import RECORDER

selection = Selection(loads("layers: [{type: [Linear, Sequential]}]"))
selection.attach()
import torch
assert "torch._dynamo.eval_frame" not in sys.modules
model = torch.compile(torch.nn.Sequential(torch.nn.Linear(2, 2)), backend="eager")
model(torch.ones(1, 2))
RECORDER.begin_recording(1 << 24, {})
RECORDER.on = True
model(torch.ones(1, 2))
print([(site.name, site.instance, dict(site.attributes)) for site in calls_by_site(RECORDER)])
RECORDER.on = False
from torch._dynamo.eval_frame import OptimizedModule
assert hasattr(OptimizedModule.__call__, "__wrapped__")
selection.detach_all()
assert not hasattr(OptimizedModule.__call__, "__wrapped__")
"""


@pytest.mark.slow
def test_compilers_are_watched_from_their_late_import_on() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[('Sequential', '', {'region': 'compiled'})]\n"
