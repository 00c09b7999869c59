"""Keras 3 models: the profile's layer rules record their layers with any backend, and all else is unchanged."""

from __future__ import annotations

import importlib.util
import inspect
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from readback import spans_in
from trees import outline, tree

if importlib.util.find_spec("keras") is None:
    pytest.skip("needs keras", allow_module_level=True)
os.environ.setdefault("KERAS_BACKEND", "jax" if importlib.util.find_spec("jax") else "torch")

from instrument.instrumentors.selection import Selection
from instrument.recorder.recorder import Recorder

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs

BACKEND = os.environ["KERAS_BACKEND"]
OTHER = {"jax": "torch", "torch": "jax"}[BACKEND]


@pytest.fixture(scope="module", autouse=True)
def late_imports() -> None:
    """Imported by the first test: this file is collected by every process of the tests and run by one."""
    global np, keras, keras_models, X, Block, Model
    np = pytest.importorskip("numpy")
    import keras
    import keras_models
    from keras_models import Block, Model

    X = np.ones((2, 4), np.float32)


def text(span: Any) -> str:
    return f"{span.site.name} {span.site.instance or '-'}" + (f" !{span.error}" if span.error else "")


def functional() -> Any:
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(3, name="hidden")(inputs)
    return keras.Model(inputs, keras.layers.Dense(1, name="out")(hidden), name="wired")


def values(tensor: Any) -> Any:
    return keras.ops.convert_to_numpy(tensor)


@pytest.mark.slow
def test_layers_record_by_path_and_type_under_the_names_that_lead_to_them(
    recorder: Recorder, select: Callable[[str], Selection]
) -> None:
    model = Model()
    expected = values(model(X))
    selection = select("{frameworks: [keras], layers: [{match: 'first.*'}, {type: Block, name: block}, {type: Model}]}")
    assert np.array_equal(values(model(X)), expected)
    assert tree(recorder, text) == outline(
        """
        Model -
          block first
            Dense first.up
            Dense first.down
          block second
        """
    )
    site = next(span.site for span in spans_in(recorder) if span.site.name == "block")
    assert (site.kind, site.qualname, site.file) == ("layer", "Block.call", keras_models.__file__)
    states = [str(verdict) for verdict in selection.verdicts()]
    assert {"first.*: first.up: attached", "first.*: first.down: attached"} <= set(states)
    assert {"type Block: first: attached", "type Block: second: attached"} <= set(states)


@pytest.mark.slow
@pytest.mark.parametrize("built", ["before", "after"])
def test_functional_and_sequential_models_show_their_layers_and_building_one_records_nothing(
    recorder: Recorder, select: Callable[[str], Selection], built: str
) -> None:
    def sequential() -> Any:
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="only")], name="row")

    made = [functional(), sequential()] if built == "before" else []
    select("{frameworks: [keras], layers: [{type: Dense}, {type: Functional}]}")
    made = made or [functional(), sequential()]
    assert spans_in(recorder) == []
    for model in made:
        model(X)
    assert tree(recorder, text).split("\n") == [
        "Functional -",
        "  Dense hidden",
        "  Dense out",
        "Dense only",
    ]


def test_predict_is_a_span_by_the_models_name_and_what_it_compiles_is_named(
    recorder: Recorder, select: Callable[[str], Selection]
) -> None:
    model = functional()
    expected = model.predict(X, verbose=0)
    selection = select("{frameworks: [keras], layers: [{match: hidden}]}")
    again = functional()
    again.set_weights(model.get_weights())
    assert np.allclose(again.predict(X, verbose=0), expected)
    assert np.allclose(again.predict_on_batch(X), expected)
    lines = tree(recorder, text).split("\n")
    assert [line for line in lines if not line.startswith(" ")] == [
        "keras.predict wired",
        "keras.predict_on_batch wired",
    ]
    hidden = [str(verdict) for verdict in selection.verdicts() if "traced by JAX" in str(verdict)]
    if BACKEND == "jax":
        assert lines == ["keras.predict wired", "keras.predict_on_batch wired"]
        assert hidden[0].startswith("keras: Layer.__call__: partly (")
    else:
        assert lines.count("  Dense hidden") == 2
        assert hidden == []


@pytest.mark.skipif(BACKEND != "torch", reason="a Keras layer is a torch module with the backend torch alone")
def test_a_layer_that_is_a_torch_module_too_is_recorded_once(
    recorder: Recorder, select: Callable[[str], Selection]
) -> None:
    import torch

    class Mixed(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(4, name="dense")
            self.inner = torch.nn.Linear(4, 4)

        def call(self, x: Any) -> Any:
            return self.inner(self.dense(x))

    model = Mixed()
    model(X)  # builds it, which calls torch's modules too
    select("{frameworks: [keras], layers: [{type: [Dense, Linear]}]}")
    model(X)
    assert [line.split()[0] for line in tree(recorder, text).split("\n")] == ["Dense", "Linear"]


def test_an_exception_in_a_layer_passes_and_marks_it(recorder: Recorder, select: Callable[[str], Selection]) -> None:
    class Failing(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            raise LookupError("theirs")

    select("{frameworks: [keras], layers: [{type: Failing}]}")
    with pytest.raises(LookupError, match="theirs"):
        Failing()(X)
    assert tree(recorder, text) == "Failing - !LookupError"


def test_a_class_that_no_framework_defines_is_named_with_the_nearest(select: Callable[[str], Selection]) -> None:
    selection = select("{frameworks: [keras], layers: [{type: Densee}]}")
    assert "no class of that name is defined yet: Densee; nearest is Dense" in str(selection.verdicts()[0])


def test_saved_models_pickles_configurations_and_signatures_stay_as_they_were(
    select: Callable[[str], Selection], tmp_path: Path
) -> None:
    model = functional()
    before = inspect.signature(keras.Layer.__call__), model.to_json(), sorted(vars(model.layers[1]))
    select("{frameworks: [keras], layers: [{match: '**'}]}")
    expected = values(model(X))
    assert inspect.signature(keras.Layer.__call__) == before[0]
    assert (model.to_json(), sorted(vars(model.layers[1]))) == before[1:]
    model.save(tmp_path / "model.keras")
    assert np.array_equal(values(keras.saving.load_model(tmp_path / "model.keras")(X)), expected)
    assert np.array_equal(values(pickle.loads(pickle.dumps(model))(X)), expected)
    assert np.array_equal(values(keras.models.clone_model(model)(X)).shape, expected.shape)


def test_undo_restores_the_very_same_methods(recorder: Recorder, select: Callable[[str], Selection]) -> None:
    trainer = next(cls for cls in keras.Model.__mro__ if "predict" in vars(cls))
    before = vars(keras.Layer)["__call__"], vars(trainer)["predict"], vars(trainer)["predict_on_batch"]
    selection = select("{frameworks: auto, layers: [{match: '**'}]}")
    after = vars(keras.Layer)["__call__"], vars(trainer)["predict"], vars(trainer)["predict_on_batch"]
    assert not any(new is old for new, old in zip(after, before, strict=True))
    selection.detach_all()
    assert (vars(keras.Layer)["__call__"], vars(trainer)["predict"], vars(trainer)["predict_on_batch"]) == before
    functional()(X)
    assert spans_in(recorder) == []


@pytest.mark.slow
@pytest.mark.skipif("KERAS_TWIN" in os.environ, reason="this is the other one")
@pytest.mark.skipif(importlib.util.find_spec(OTHER) is None, reason=f"needs {OTHER}")
def test_all_of_this_holds_with_the_other_backend() -> None:
    environ = {**os.environ, "KERAS_BACKEND": OTHER, "KERAS_TWIN": "1"}
    environ.pop("PYTEST_CURRENT_TEST", None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "record or predict or undo",
        __file__,
    ]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
