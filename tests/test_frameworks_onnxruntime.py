"""ONNX Runtime: real sessions of tiny models, recorded and otherwise as they were."""

from __future__ import annotations

import gc
import inspect
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trees import outline, tree, tree_of

import instrument
from instrument.instrumentors.frameworks import nodes as nodes_room
from instrument.instrumentors.frameworks.nodes import MODULE
from instrument.instrumentors.frameworks.onnxruntime import METHODS
from instrument.instrumentors.selection import Selection
from instrument.profile.keys import loads
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
    site = recorder.spans()[0].site
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
    assert len({span.site for span in recorder.spans()}) == 1


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
    selection.undo()
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
    assert recorder.spans() == []


# ---------------------------------------------------------------- nodes

NODES = "frameworks: [{name: onnxruntime, nodes: true}]"


def branching() -> Any:
    """A model whose first node runs one of two subgraphs."""
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT

    def branch(name: str, node: str) -> Any:
        out = helper.make_tensor_value_info(f"{name}_out", kind, None)
        return helper.make_graph([helper.make_node(node, ["x"], [f"{name}_out"], name=name)], name, [], [out])

    graph = helper.make_graph(
        [
            helper.make_node(
                "If", ["c"], ["y"], name="choice", then_branch=branch("yes", "Relu"), else_branch=branch("no", "Neg")
            )
        ],
        "branching",
        [
            helper.make_tensor_value_info("x", kind, ["n", 4]),
            helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", kind, ["n", 4])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


def test_nodes_stand_below_their_runs_once_the_profile_has_ended(
    recorder: Recorder, select: Callable[[str], Selection], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    selection = select(NODES)
    ready = session(model(tmp_path / "tiny.onnx"))
    for _ in range(2):
        assert np.array_equal(ready.run(None, {"x": X})[0], X)
    assert selection.nodes_within(recorder.spans()) == []
    assert "waiting (tiny.onnx: they come when the window or session ends)" in str(selection.verdicts()[-1])
    selection.finish_nodes()
    spans = recorder.spans()
    nodes = selection.nodes_within(spans)
    assert tree_of([*spans, *nodes], text) == outline(
        """
        onnxruntime.run tiny.onnx
          MatMul up
          Relu act
          MatMul down
        onnxruntime.run tiny.onnx
          MatMul up
          Relu act
          MatMul down
        """
    )
    assert nodes[0].site.attributes == (("provider", "CPUExecutionProvider"),)
    for run in spans:
        inside = [node for node in nodes if node.parent_id == run.span_id]
        assert all(run.start_ns <= node.start_ns <= node.end_ns <= run.end_ns for node in inside)
        assert all(0 < node.attributes["uncertainty_ns"] < 50_000_000 for node in inside)
        assert run.self_ns + sum(node.total_ns for node in inside) == run.total_ns
    ready.run(None, {"x": X})
    assert len(selection.nodes_within(recorder.spans())) == 6
    selection.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.onnx"]
    assert "6 executions timed" in str(selection.verdicts()[-1])


def test_nodes_of_a_subgraph_stand_below_the_node_that_runs_it(
    recorder: Recorder, select: Callable[[str], Selection]
) -> None:
    selection = select(NODES)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    ready = session(branching(), sess_options=options)
    big = np.ones((200_000, 4), np.float32)
    ready.run(None, {"x": big, "c": np.array(False)})
    selection.finish_nodes()
    spans = recorder.spans()
    nodes = selection.nodes_within(spans)
    assert tree_of([*spans, *nodes], text) == outline(
        """
        onnxruntime.run (bytes)
          If choice
            Neg no
        """
    )
    assert nodes[0].self_ns == nodes[0].total_ns - nodes[1].total_ns


def test_a_session_with_nodes_looks_to_its_service_as_one_without(
    recorder: Recorder, select: Callable[[str], Selection], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = session()
    before = inspect.signature(ort.InferenceSession), plain.end_profiling()
    selection = select(NODES)
    options = ort.SessionOptions()
    prefix = options.profile_file_prefix
    ready = session(sess_options=options)
    ready.run(None, {"x": X})
    assert (inspect.signature(ort.InferenceSession), ready.end_profiling()) == before
    assert (options.enable_profiling, options.profile_file_prefix) == (False, prefix)
    with pytest.raises(Exception, match="nowhere"):
        session(str(tmp_path / "nowhere.onnx"), sess_options=options)
    assert options.enable_profiling is False
    ready.set_providers(["CPUExecutionProvider"])
    assert np.array_equal(ready.run(None, {"x": X})[0], X)
    selection.undo()
    assert ready.end_profiling() == ""
    assert list(tmp_path.iterdir()) == []
    # Of a session that was made again its first profile has been written; the second run was not profiled.
    assert len(selection.nodes_within(recorder.spans())) == 3


def test_a_profile_of_the_service_itself_is_left_to_it(
    select: Callable[[str], Selection], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    selection = select(NODES)
    options = ort.SessionOptions()
    options.enable_profiling = True
    theirs = session(sess_options=options)
    theirs.run(None, {"x": X})
    assert Path(theirs.end_profiling()).exists()
    assert any("is profiled by the service itself" in str(verdict) for verdict in selection.verdicts())


def test_a_profile_ends_by_itself_after_so_many_runs(
    recorder: Recorder, select: Callable[[str], Selection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes_room, "RUNS_LIMIT", 3)
    selection = select(NODES)
    ready = session()
    for _ in range(5):
        ready.run(None, {"x": X})
        for thread in threading.enumerate():
            if thread.name == "instrument-onnxruntime":
                thread.join()
    selection.undo()
    spans = recorder.spans()
    parents = {node.parent_id for node in selection.nodes_within(spans)}
    assert parents == {span.span_id for span in sorted(spans, key=lambda span: span.start_ns)[:3]}


def test_a_session_that_is_gone_has_left_its_nodes(recorder: Recorder, select: Callable[[str], Selection]) -> None:
    selection = select(NODES)
    session().run(None, {"x": X})
    gc.collect()
    selection.finish_nodes()
    assert len(selection.nodes_within(recorder.spans())) == 3


@pytest.mark.parametrize(
    ("start_ns", "placed"),
    [
        (5_000_050, (5_000_050 - 4_999_000, 1_000 + 7)),  # on the wall clock, which has gained 7 ns since
        (1_050, (1_050, 1_000)),  # on the monotonic clock
        (77, None),
    ],
)
def test_the_clock_of_a_profile_is_found_out(start_ns: int, placed: tuple[int, int] | None) -> None:
    profile = nodes_room._Profile(
        lambda: None,
        "m",
        Path(),
        start_ns,
        (10_000 - 9_000, 4_999_000 + 1_000),
        (1_100, 5_000_100),  # type: ignore[arg-type]
    )
    assert nodes_room._place(profile, (9_000, 9_000 + 4_999_000 + 7)) == placed


def test_a_trace_file_of_a_session_holds_the_nodes(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    profile = f"{{{NODES}, export: {{chrome: {{path: {path}}}}}}}"
    instrument.start(loads(profile, environ={}))
    try:
        session().run(None, {"x": X})
    finally:
        instrument.stop()
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert sorted(names) == ["MatMul", "MatMul", "Relu", "onnxruntime.run"]
