"""ONNX Runtime: real sessions of tiny models, recorded and otherwise as they were."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from readback import spans_in
from trees import outline, tree

from instrument.instrumentors.framework_calls import ONNXRUNTIME as MODULE
from instrument.instrumentors.framework_calls import ONNXRUNTIME_METHODS as METHODS
from instrument.instrumentors.selection import Selection
from instrument.recorder.recorder import Recorder


@pytest.fixture(scope="module", autouse=True)
def late_imports() -> None:
    """Imported by the first test: this file is collected by every process of the tests and run by one."""
    global np, onnx, ort, Session, X
    np = pytest.importorskip("numpy")
    onnx = pytest.importorskip("onnx")
    ort = pytest.importorskip("onnxruntime")
    Session = ort.InferenceSession.__mro__[1]
    X = np.arange(4, dtype=np.float32).reshape(1, 4)


def model(path: Path | None = None) -> Any:
    """A model of three nodes, as bytes or in a file."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["y"], name="up"),
            helper.make_node("Relu", ["y"], ["z"], name="act"),
            helper.make_node("MatMul", ["z", "w"], ["o"], name="down"),
        ],
        "tiny",
        [helper.make_tensor_value_info("x", kind, ["n", 4])],
        [helper.make_tensor_value_info("o", kind, ["n", 4])],
        [helper.make_tensor("w", kind, [4, 4], np.eye(4, dtype=np.float32).ravel())],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    if path is None:
        return made.SerializeToString()
    onnx.save(made, path)
    return str(path)


def session(source: Any = None, **options: Any) -> Any:
    return ort.InferenceSession(source or model(), providers=["CPUExecutionProvider"], **options)


def text(span: Any) -> str:
    return f"{span.site.name} {span.site.instance}" + (f" !{span.error}" if span.error else "")


def test_each_way_to_run_a_session_is_a_span_named_by_the_models_file(
    recorder: Recorder, select: Callable[[str], Selection], tmp_path: Path
) -> None:
    ready = session()
    select("frameworks: [onnxruntime]")
    loaded = session(model(tmp_path / "tiny.onnx"))
    assert np.array_equal(ready.run(None, {"x": X})[0], X)
    value = ort.OrtValue.ortvalue_from_numpy(X)
    assert np.array_equal(loaded.run_with_ort_values(["o"], {"x": value})[0].numpy(), X)
    binding = loaded.io_binding()
    binding.bind_cpu_input("x", X)
    binding.bind_output("o")
    loaded.run_with_iobinding(binding)
    assert np.array_equal(binding.copy_outputs_to_cpu()[0], X)
    assert tree(recorder, text) == outline(
        """
        onnxruntime.run (bytes)
        onnxruntime.run_with_ort_values tiny.onnx
        onnxruntime.run_with_iobinding tiny.onnx
        """
    )
    site = spans_in(recorder)[0].site
    assert (site.kind, site.module, site.qualname) == ("op", MODULE, "Session.run")
    assert site.attributes == (("providers", ("CPUExecutionProvider",)),)


def test_an_asynchronous_run_is_the_span_of_its_call(recorder: Recorder, select: Callable[[str], Selection]) -> None:
    select("frameworks: [onnxruntime]")
    done, results = threading.Event(), []

    def callback(outputs: Any, given: Any, error: str) -> None:
        results.append((outputs[0], given, error))
        done.set()

    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    ready = session(sess_options=options)
    ready.run_async(None, {"x": X}, callback, "mine")
    assert done.wait(60)
    assert np.array_equal(results[0][0], X)
    assert results[0][1:] == ("mine", "")
    assert tree(recorder) == "onnxruntime.run_async"


def test_sessions_of_the_same_model_share_a_site(recorder: Recorder, select: Callable[[str], Selection]) -> None:
    select("frameworks: [onnxruntime]")
    for _ in range(3):
        session().run(None, {"x": X})
    assert len({span.site for span in spans_in(recorder)}) == 1


def test_an_error_passes_and_marks_the_span(recorder: Recorder, select: Callable[[str], Selection]) -> None:
    select("frameworks: [onnxruntime]")
    ready = session()
    with pytest.raises(ValueError, match="Required inputs"):
        ready.run(None, {})
    with pytest.raises(Exception, match="Got invalid dimensions") as caught:
        ready.run(None, {"x": np.zeros((1, 9), np.float32)})
    assert tree(recorder).split("\n") == ["onnxruntime.run !ValueError", f"onnxruntime.run !{caught.type.__name__}"]


def test_undo_restores_the_very_same_methods_and_signatures_never_change(select: Callable[[str], Selection]) -> None:
    before = {name: vars(Session)[name] for name in METHODS}
    signatures = {name: inspect.signature(method) for name, method in before.items()}
    selection = select("frameworks: auto")
    assert all(vars(Session)[name] is not method for name, method in before.items())
    assert {name: inspect.signature(vars(Session)[name]) for name in METHODS} == signatures
    selection.detach_all()
    assert {name: vars(Session)[name] for name in METHODS} == before


def test_a_method_that_this_version_lacks_is_named_and_the_others_are_attached(
    recorder: Recorder, select: Callable[[str], Selection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Session, "run_async")
    selection = select("frameworks: [onnxruntime]")
    session().run(None, {"x": X})
    assert tree(recorder) == "onnxruntime.run"
    (verdict,) = [verdict for verdict in selection.verdicts() if verdict.state != "attached"]
    assert str(verdict) == f"onnxruntime: Session.run_async: unreachable (onnxruntime {ort.__version__} has none)"


def test_a_session_switched_off_records_nothing(recorder: Recorder, select: Callable[[str], Selection]) -> None:
    select("frameworks: [onnxruntime]")
    recorder.on = False
    session().run(None, {"x": X})
    assert spans_in(recorder) == []
