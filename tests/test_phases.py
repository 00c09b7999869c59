"""Phases of torch: forward, backward and optimizer of loops as people write them, without a change to their code."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from readback import spans_in
from trees import outline, tree

from instrument import scope
from instrument.instrumentors.selection import Selection
from instrument.instrumentors.training import Phases
from instrument.profile.keys import loads
from instrument.recorder.recorder import Recorder
from instrument.recording.spans import Span
from instrument.runtime.faults import FAULTS

ENGINE = "_engine_run_backward"


@pytest.fixture(scope="module", autouse=True)
def late_imports() -> None:
    """Imported by the first test: this file is collected by every process of the tests and run by one."""
    global torch, nn, X, torch_models, Nested
    torch = pytest.importorskip("torch")
    import torch_models
    from torch import nn
    from torch_models import Nested

    X = torch.ones(2, 4)


@pytest.fixture
def phases(recording: Recorder) -> Iterator[Phases]:
    """The rule at work in the process's recorder."""
    made = Phases(("auto",), recording)
    made.attach_to(torch)
    yield made
    made.undo()


def named(span: Span) -> str:
    return " ".join(filter(None, (span.site.name, span.site.instance)))


def train(model: Any, optimizer: Any, criterion: Any = None) -> None:
    out = model(X)
    loss = out.sum() if criterion is None else criterion(out, torch.zeros(2, 1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_step_is_the_outermost_forwards_one_backward_and_one_optimizer(phases: Phases, recording: Recorder) -> None:
    model = Nested()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss())
    assert tree(recording, named) == "forward Nested\nforward MSELoss\nbackward\noptimizer SGD"
    kinds = {(span.site.kind, dict(span.site.attributes)["phase"]) for span in spans_in(recording)}
    assert kinds == {("phase", "forward"), ("phase", "backward"), ("phase", "optimizer")}
    (forward, *_) = (span for span in spans_in(recording) if span.site.instance == "Nested")
    assert (forward.site.module, forward.site.qualname, forward.site.file) == (
        "torch_models",
        "Nested",
        torch_models.__file__,
    )
    assert forward.site.line == Nested.forward.__code__.co_firstlineno


def test_several_optimizers_are_each_a_phase_and_one_that_steps_others_is_one(
    phases: Phases, recording: Recorder
) -> None:
    class Both(torch.optim.Optimizer):  # type: ignore[misc]
        """Steps two others, as sharding and wrapping optimizers do."""

        def __init__(self, *others: Any) -> None:
            super().__init__([parameter for one in others for parameter in one.param_groups[0]["params"]], {})
            self.others = others

        def step(self, closure: Any = None) -> None:
            for one in self.others:
                one.step()

    model = Nested()
    first = torch.optim.SGD(model.body.parameters(), lr=0.1)
    second = torch.optim.AdamW(model.head.parameters())
    model(X).sum().backward()
    first.step()
    second.step()
    Both(first, second).step()
    assert tree(recording, named) == "forward Nested\nbackward\noptimizer SGD\noptimizer AdamW\noptimizer Both"


def test_the_closure_of_an_optimizer_has_phases_of_its_own(phases: Phases, recording: Recorder) -> None:
    model = Nested()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(X).sum() ** 2
        loss.backward()
        return loss

    optimizer.step(closure)
    assert tree(recording, named) == outline(
        """
        optimizer LBFGS
          forward Nested
          backward
        """
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_of_a_checkpoint_is_a_part_of_backward(
    phases: Phases, recording: Recorder, reentrant: bool
) -> None:
    model = Nested()
    x = X.clone().requires_grad_()
    out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
    out.sum().backward()
    assert tree(recording, named) == outline(
        """
        forward Nested
        backward
        """
    )


def test_gradients_within_forward_are_a_part_of_it_and_outside_a_backward(phases: Phases, recording: Recorder) -> None:
    class Forces(nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return torch.autograd.grad((x**2).sum(), x, create_graph=True)[0]

    x = X.clone().requires_grad_()
    torch.autograd.grad(Forces()(x).sum(), x)
    torch.autograd.backward([(x**3).sum()])
    assert tree(recording, named) == "forward Forces\nbackward\nbackward"


def test_an_optimizer_within_backward_is_a_part_of_it(phases: Phases, recording: Recorder) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    model(X).sum().backward()
    assert tree(recording, named) == "forward Linear\nbackward"


def test_threads_have_phases_of_their_own(phases: Phases, recording: Recorder) -> None:
    model = Nested()
    seen = []

    def forward(module: Any, args: Any, out: Any) -> None:
        beside = threading.Thread(target=lambda: seen.append(model.head(X)))
        beside.start()
        beside.join()

    model.body.register_forward_hook(forward)
    model(X)
    threads = {span.thread_id: span.site.instance for span in spans_in(recording)}
    assert sorted(threads.values()) == ["Linear", "Nested"]


def test_a_forward_that_raises_is_over_and_keeps_its_exception(phases: Phases, recording: Recorder) -> None:
    class Failing(nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            raise KeyError("no such token")

    with pytest.raises(KeyError, match="no such token"):
        nn.Sequential(Failing())(X)
    nn.ReLU()(X)
    assert tree(recording) == "forward !KeyError\nforward"


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: torch.compile(model, backend="eager", fullgraph=True),
        lambda model: (model.compile(backend="eager", fullgraph=True), model)[1],
        lambda model: nn.DataParallel(model),
    ],
    ids=["torch.compile", "Module.compile", "DataParallel"],
)
def test_a_compiled_or_distributed_model_is_one_forward_under_its_name(
    phases: Phases, recording: Recorder, wrap: Callable[[Any], Any]
) -> None:
    plain = Nested()
    wrapped = wrap(copy.deepcopy(plain))
    out = wrapped(X)
    out.sum().backward()
    wrapped(X)
    assert tree(recording, named) == "forward Nested\nbackward\nforward Nested"
    assert torch.equal(out, plain(X))
    torch._dynamo.reset()


def test_no_graph_breaks_and_what_is_compiled_stays_right_when_the_phases_go(
    phases: Phases, recording: Recorder
) -> None:
    class Whole(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Nested()

        def forward(self, x: Any) -> Any:
            return self.model(x) + self.model(x)

    torch._dynamo.reset()
    model = Whole()
    assert torch._dynamo.explain(lambda x: model(x))(X).graph_break_count == 0
    torch._dynamo.reset()
    recording.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        before = compiled(X)
        recording.on = False
        assert torch.equal(compiled(X), before)
        recording.on = True
        assert torch.equal(compiled(X), before)
        assert len(graphs) == 1
        phases.undo()
        assert torch.equal(compiled(X), before)
        assert torch.equal(model(X), before)
    assert tree(recording, named) == "forward Whole\nforward Whole"
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")  # of the compiler itself
@pytest.mark.slow
def test_a_compiled_optimizer_and_a_compiled_step_compute_the_same(phases: Phases, recording: Recorder) -> None:
    def trained(compiles: bool) -> Any:
        torch.manual_seed(1)
        model = Nested()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            train(model, optimizer)

        run = torch.compile(step, backend="eager") if compiles else step
        for _ in range(3):
            run()
        return model.head.weight.detach()

    wanted = trained(False)
    recording.reset()
    assert torch.equal(trained(True), wanted)
    assert [row.path[-1].name for row in recording.tally().iterate_totals()] == ["backward", "optimizer"]
    assert not FAULTS.count_by_place()
    torch._dynamo.reset()


def test_undo_gives_back_the_very_same_objects_also_of_optimizers_that_came_later(recording: Recorder) -> None:
    class Late(torch.optim.SGD):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = Nested()
    torch.optim.SGD(model.parameters(), lr=0.1)
    kept = {
        "call": nn.Module.__call__,
        "engine": getattr(torch.autograd, ENGINE),
        "patch": torch.optim.Optimizer._patch_step_function,
        "step": torch.optim.SGD.step,
    }
    made = Phases(("auto",), recording)
    made.attach_to(torch)
    late = Late(model.parameters(), lr=0.1)
    model(X).sum().backward()
    late.step()
    assert tree(recording, named) == "forward Nested\nbackward\noptimizer Late"
    assert inspect.signature(model) == inspect.signature(Nested())
    made.undo()
    assert kept == {
        "call": nn.Module.__call__,
        "engine": getattr(torch.autograd, ENGINE),
        "patch": torch.optim.Optimizer._patch_step_function,
        "step": torch.optim.SGD.step,
    }
    assert not hasattr(Late.step, "__instrument_phase__")
    late.step()
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(again(X), model(X))
    assert len(spans_in(recording)) == 3


def test_layers_and_scopes_lie_below_their_phase(recording: Recorder) -> None:
    selection = Selection(loads("phases: auto\nlayers: [{type: Linear}]", environ={}), recording)
    selection.attach()
    try:
        model = Nested()
        with scope("step"):
            train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert tree(recording) == outline(
            """
            step
              forward
                Linear
                Linear
              backward
              optimizer
            """
        )
        told = [str(verdict) for verdict in selection.verdicts() if verdict.rule == "phases"]
        assert told[:3] == [
            "phases: backward: attached",
            "phases: forward: attached (Nested)",
            "phases: optimizer: attached (SGD)",
        ]
        assert told[3].startswith(
            "phases: torch: partly (not seen: modules and optimizers within a function that torch"
        )
        selection.change(loads("layers: [{type: Linear}]", environ={}))
        model(X)
        assert len([span for span in spans_in(recording) if span.site.name == "forward"]) == 1
    finally:
        selection.detach_all()


def test_without_torch_or_before_it_has_run_the_verdict_says_what_is_waited_for(phases: Phases) -> None:
    assert [str(verdict) for verdict in Phases().verdicts()] == ["phases: waiting (torch not imported)"]
    assert [str(verdict) for verdict in phases.verdicts()] == [
        "phases: waiting (no module, backward or optimizer has run)"
    ]


@pytest.mark.slow  # test_presets has one that is not
def test_a_program_that_knows_nothing_of_us_has_its_phases_under_instrument_run(tmp_path: Path) -> None:
    (tmp_path / "profile.yaml").write_text(
        "phases: auto\ntracer_option: OpDetail\nexport: {summary: {to: stdout, views: [events]}}"
    )
    (tmp_path / "train.py").write_text(
        """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
    )
    command = [sys.executable, "-m", "instrument", "run", "--profile", "profile.yaml", "--", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    rows = {
        line.split()[0]: line.split()[1] for line in done.stdout.splitlines() if line[:1].isalpha() and "0." in line
    }
    assert {name: rows[name] for name in ("forward", "backward", "optimizer")} == {
        "forward": "3", "backward": "3", "optimizer": "3",
    }  # fmt: skip


@pytest.mark.slow
def test_torch_profiler_with_stacks_finds_the_modules_of_an_instrumented_loop(tmp_path: Path) -> None:
    """The profiler reads `self` in the caller of a module's call. Without one the process dies."""
    (tmp_path / "profile.yaml").write_text("phases: auto")
    (tmp_path / "train.py").write_text(
        """
import torch
from torch.profiler import ProfilerActivity, profile
from instrument import Profiler
model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.ReLU())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Profiler("profile.yaml") as p, profile(activities=[ProfilerActivity.CPU], with_stack=True) as theirs:
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        p.step()
theirs.export_chrome_trace("theirs.json")
print([span.site.name for span in p.window.trace.spans if span.site.kind == "phase"].count("forward"))
"""
    )
    done = subprocess.run(
        [sys.executable, "train.py"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout == "3\n"
    assert "nn.Module: Linear" in (tmp_path / "theirs.json").read_text()
