"""Every framework alike: met when the host imports it, in a process of its own, and never imported by us."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from readback import spans_in
from trees import tree

from instrument.instrumentors.selection import Selection
from instrument.profile.keys import loads
from instrument.profile.model import FRAMEWORKS
from instrument.recorder.recorder import Recorder
from instrument.sessions.process import check

PROGRAM = """
import json, sys, warnings
warnings.simplefilter("ignore")
import instrument
from instrument.profile.model import FRAMEWORKS
from instrument.profile.keys import loads

session = instrument.start(loads("{frameworks: auto, layers: [{type: Dense}]}"))
assert not set(FRAMEWORKS) & set(sys.modules), "imported by us"
quiet = [str(verdict) for verdict in session.selection.verdicts()]
%s
spans = sorted({f"{span.site.name} {span.site.instance}".strip() for span in session.trace().spans})
verdicts = [f"{verdict.rule} {verdict.state}" for verdict in session.selection.verdicts()]
instrument.stop()
print(json.dumps([quiet, spans, verdicts]))
"""

USES = {
    "onnxruntime": (
        """
import onnx, onnxruntime
from onnx import helper
x, y = (helper.make_tensor_value_info(name, 1, [1]) for name in "xy")
graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [x], [y])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
import numpy
onnxruntime.InferenceSession(model).run(None, {"x": numpy.ones(1, numpy.float32)})
""",
        ["onnxruntime.run (bytes)"],
    ),
    "keras": (
        """
import os
os.environ["KERAS_BACKEND"] = "jax"
import keras, numpy
keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="only")], name="row")(numpy.ones((1, 2)))
""",
        ["Dense only"],
    ),
    "jax": (
        """
from jax import jit, device_put
import jax.numpy
def double(x): return x * 2
jit(double)(device_put(jax.numpy.ones(3))).block_until_ready()
""",
        ["double", "jax.block_until_ready", "jax.device_put"],
    ),
    "transformers": (
        """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(vocab_size=6, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, pad_token_id=0, eos_token_id=None, **sizes))
model.generate(torch.tensor([[1]]), max_new_tokens=1)
""",
        ["transformers.generate LlamaForCausalLM"],
    ),
    "sentence_transformers": (
        """
import torch
from sentence_transformers import SentenceTransformer
class Lengths(torch.nn.Module):
    def tokenize(self, texts, **options): return {"lengths": torch.tensor([float(len(text)) for text in texts])}
    preprocess = tokenize
    def forward(self, features, **options): return {**features, "sentence_embedding": features["lengths"][:, None]}
SentenceTransformer(modules=[Lengths()], device="cpu").encode(["a", "bb"])
""",
        ["sentence_transformers.encode SentenceTransformer"],
    ),
    "sklearn": (
        """
from sklearn.linear_model import LinearRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
make_pipeline(StandardScaler(), LinearRegression()).fit([[0.0], [1.0]], [0, 1]).predict([[2.0]])
""",
        ["LinearRegression.predict", "Pipeline.predict", "StandardScaler.transform"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_framework_is_met_when_the_host_imports_it(framework: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"needs {framework}")
    program, spans = USES[framework]
    command = [sys.executable, "-c", PROGRAM % program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    quiet, found, verdicts = json.loads(done.stdout.splitlines()[-1])
    assert quiet == ["type Dense: waiting (torch and keras not imported)"]
    assert set(found) >= set(spans)
    assert f"{framework} attached" in verdicts or framework == "keras"


def test_a_framework_that_was_asked_for_by_name_and_not_imported_is_named(
    select: Callable[[str], Selection], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in FRAMEWORKS]:
        monkeypatch.delitem(sys.modules, name)
    names = sorted(FRAMEWORKS)
    texts = [str(verdict) for verdict in select(f"frameworks: [{', '.join(names)}]").verdicts()]
    assert texts == [f"{name}: waiting ({name} not imported)" for name in names]
    assert select("frameworks: auto").verdicts() == []


@pytest.mark.slow
def test_check_imports_the_frameworks_that_are_asked_for_by_name() -> None:
    pytest.importorskip("sklearn")
    verdicts, _ = check(loads("frameworks: [sklearn]", environ={}))
    assert [str(verdict) for verdict in verdicts] == ["sklearn: waiting (no estimator has run)"]


def test_a_method_that_a_function_rule_names_too_is_recorded_once(
    recorder: Recorder, select: Callable[[str], Selection]
) -> None:
    np = pytest.importorskip("numpy")
    linear = pytest.importorskip("sklearn.linear_model")
    model = linear.LinearRegression().fit([[0.0], [1.0]], [0, 1])
    before = vars(linear._base.LinearModel)["predict"]
    rule = "{match: 'sklearn.linear_model._base:LinearModel.predict', name: mine}"
    profile = f"{{functions: [{rule}], frameworks: [sklearn]}}"
    select(profile).detach_all()
    assert vars(linear._base.LinearModel)["predict"] is before
    verdicts = [str(verdict) for verdict in select(profile).verdicts()]
    assert np.allclose(model.predict([[2.0]]), 2)
    assert tree(recorder) == "LinearRegression.predict"
    assert verdicts[0] == "sklearn.linear_model._base:LinearModel.predict: attached (frameworks: sklearn has it)"


def test_threads_that_call_one_object_each_record_their_own_calls(
    recorder: Recorder, select: Callable[[str], Selection]
) -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    model = linear.LogisticRegression().fit([[0.0], [1.0]], [0, 1])
    select("frameworks: [sklearn]")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: model.predict_proba([[2.0]]), range(200)))
    spans = spans_in(recorder)
    assert len(spans) == 200
    assert {span.site.name for span in spans} == {"LogisticRegression.predict_proba"}
    assert len({span.site for span in spans}) == 1


def test_a_method_of_the_same_module_stays_with_the_function_rule(
    recorder: Recorder, select: Callable[[str], Selection]
) -> None:
    room = pytest.importorskip("onnxruntime.capi.onnxruntime_inference_collection")
    before = vars(room.Session)["end_profiling"], vars(room.Session)["run"]
    selection = select(
        f"{{functions: [{{match: '{room.__name__}:Session.run', name: mine}}], frameworks: [onnxruntime]}}"
    )
    texts = [str(verdict) for verdict in selection.verdicts()]
    assert "onnxruntime: Session.run: attached (it is recorded as 'mine' already)" in texts
    selection.detach_all()
    assert (vars(room.Session)["end_profiling"], vars(room.Session)["run"]) == before
