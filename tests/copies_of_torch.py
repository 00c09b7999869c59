"""Copies of torch: direction, bytes and what is no copy, on a device made in Python where there is no GPU.

`test_copies.py` runs this file in a process of its own, because torch cannot be rid of a device again.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from readback import spans_in

torch = pytest.importorskip("torch")

from fake_torch_device import NAME, use  # noqa: E402 - after the skip
from torch.utils._python_dispatch import _disable_current_modes  # noqa: E402

from instrument.instrumentors import array_copies  # noqa: E402
from instrument.instrumentors.copies import ADAPTERS, Copies, PatchedFunctions  # noqa: E402
from instrument.profile.model import DIRECTIONS, CopyRule  # noqa: E402
from instrument.recorder.recorder import Recorder  # noqa: E402
from instrument.recording.spans import Origin  # noqa: E402
from instrument.report.events_view import events  # noqa: E402
from instrument.report.view import Options, Recording  # noqa: E402
from instrument.runtime.faults import FAULTS  # noqa: E402
from instrument.trace.trace import Trace  # noqa: E402

SECOND = f"{NAME}:1"


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with use():
        yield


@pytest.fixture
def attached(recorder: Recorder) -> Iterator[Any]:
    undos: list[Any] = []

    def attach(*rules: CopyRule, ready: Any = None) -> Copies:
        patched = PatchedFunctions(Copies(rules, recorder), "torch")
        undos.append(patched.undo)
        array_copies.attach_torch(torch, patched, initialised=ready)
        return patched.copies

    yield attach
    for undo in undos:
        undo()


def shown(recorder: Recorder) -> list[str]:
    """Each copy as direction, bytes, what is not the usual, and the call that made it."""
    lines = []
    for span in sorted(spans_in(recorder), key=lambda span: span.span_id):
        facts = dict(span.site.attributes)
        assert span.site.name == f"memcpy {facts['direction']}"
        assert (span.site.kind, span.site.module) == ("copy", "torch")
        special = [word for word, there in (("async", not facts["sync"]), ("pinned", facts.get("pinned"))) if there]
        lines.append(" ".join([str(facts["direction"]), str(span.attributes["bytes"]), *special, span.site.qualname]))
    return lines


@pytest.mark.parametrize(
    ("source", "target", "way"),
    [
        ("cpu", "cpu", "h2h"),
        ("cpu", "cuda:0", "h2d"),
        ("cuda:0", "cpu", "d2h"),
        ("cuda:0", "cuda:0", "d2d"),
        ("cuda:0", "cuda:1", "p2p"),
        ("xpu:0", "cpu", "d2h"),
        ("mps", "cpu", "d2h"),
        ("cpu", "meta", None),
        ("meta", "cuda:0", None),
    ],
)
def test_direction_of_a_copy(source: str, target: str, way: str | None) -> None:
    assert array_copies.find_copy_direction(torch.device(source), torch.device(target)) == way


def test_every_way_of_moving_a_tensor_is_a_copy_with_its_bytes(recorder: Recorder, attached: Any) -> None:
    transfers = attached(CopyRule())
    x = torch.arange(32.0).reshape(4, 8)
    there = x.to(NAME)
    x.to(NAME, non_blocking=True)
    assert there.to(torch.device(NAME), torch.float16).dtype == torch.float16
    other = there.to(SECOND)
    assert torch.equal(other.cpu(), x)
    assert torch.equal(torch.empty_like(there).copy_(x).to("cpu"), x)
    x.clone().copy_(there, non_blocking=True)
    assert getattr(x[0], NAME)().cpu()[3] == 3.0
    assert x.type_as(there).device == there.device
    assert shown(recorder) == [
        "h2d 128 Tensor.to",
        "h2d 128 async Tensor.to",
        "d2d 128 Tensor.to",
        "p2p 128 Tensor.to",
        "d2h 128 Tensor.cpu",
        "h2d 128 Tensor.copy_",
        "d2h 128 Tensor.to",
        "d2h 128 async Tensor.copy_",
        f"h2d 32 Tensor.{NAME}",
        "d2h 32 Tensor.cpu",
        "h2d 128 Tensor.type_as",
    ]
    assert transfers.hits == [11]


def test_values_that_reach_python_are_copies_that_wait(recorder: Recorder, attached: Any) -> None:
    there = torch.tensor([1.5, 0.0, 3.0, 4.0]).to(NAME)
    attached(CopyRule())
    assert (there[0].item(), float(there[0]), int(there[2]), bool(there[1])) == (1.5, 1.5, 3, False)
    assert complex(there[2]) == 3
    assert shown(recorder) == [
        "d2h 4 Tensor.item",
        "d2h 4 Tensor.__float__",
        "d2h 4 Tensor.__int__",
        "d2h 4 Tensor.__bool__",
        "d2h 4 Tensor.__complex__",
    ]


def test_data_of_numpy_is_a_copy_once_it_moves(recorder: Recorder, attached: Any) -> None:
    attached(CopyRule())
    numpy = pytest.importorskip("numpy")
    torch.from_numpy(numpy.ones(5)).to(NAME)
    torch.zeros(4, device=NAME)
    assert shown(recorder) == ["h2d 40 Tensor.to"]


def test_a_model_is_the_sum_of_its_parameters_copies(recorder: Recorder, attached: Any) -> None:
    attached(CopyRule())
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2, affine=False))
    model.to("cpu")
    model.to(NAME)
    assert model[0].weight.device.type == NAME
    assert shown(recorder) == [f"h2d {nbytes} Tensor.to" for nbytes in (16, 8, 8, 8, 8)]


@pytest.mark.parametrize(
    ("args", "kwargs", "sync"),
    [
        ((NAME,), {}, True),
        ((NAME,), {"non_blocking": True}, False),
        ((torch.device("cpu"), torch.float16, True), {}, False),
        ((torch.device("cpu"), torch.float16, False, True), {}, True),
        ((torch.empty(0, dtype=torch.float16), True), {}, False),
        ((torch.empty(0, dtype=torch.float16),), {"copy": True}, True),
    ],
)
def test_non_blocking_is_understood_wherever_it_is(
    recorder: Recorder, attached: Any, args: Any, kwargs: Any, sync: bool
) -> None:
    attached(CopyRule(DIRECTIONS))
    torch.zeros(2).to(*args, **kwargs)
    assert [dict(span.site.attributes)["sync"] for span in spans_in(recorder)] == [sync]


def test_copies_of_one_call_that_wait_and_that_do_not_are_counted_apart(recorder: Recorder, attached: Any) -> None:
    attached(CopyRule(("h2d",)))
    x = torch.zeros(8)
    for wait in (True, True, False):
        x.to(NAME, non_blocking=not wait)
    view = events(Recording(recorder.tally, lambda: Trace(Origin(1, "", 0, 0), 0, 1, [])), Options())
    assert {one.label: one.calls for one in view.copies} == {"GpuMemcpy": 3, "GpuMemcpyAsync": 1, "GpuMemcpySync": 2}


def test_a_call_that_moves_no_data_is_no_copy(recorder: Recorder, attached: Any) -> None:
    x, there = torch.ones(3), torch.ones(3).to(NAME)
    attached(CopyRule())
    assert x.to("cpu") is x
    assert there.to(NAME) is there
    assert x.to(torch.float64).device.type == "cpu"
    assert (x.tolist(), x[0].item(), float(x[1]), bool(x[2])) == ([1.0] * 3, 1.0, 1.0, True)
    assert x.numpy().tolist() == [1.0] * 3
    torch.zeros(3).copy_(x)
    torch.empty(0).to(NAME)
    x.to("meta")
    torch.empty(3, device="meta").copy_(x)
    assert shown(recorder) == []


def test_a_rule_that_names_host_to_host_sees_what_the_host_copies_for_itself(recorder: Recorder, attached: Any) -> None:
    attached(CopyRule(("h2h",)))
    x = torch.ones(3)
    assert x.to("cpu") is x
    x.to(torch.float64)
    torch.zeros(3).copy_(x)
    x.to(NAME)
    assert shown(recorder) == ["h2h 12 Tensor.to", "h2h 12 Tensor.copy_"]


def test_a_copy_inside_of_a_copy_is_one(recorder: Recorder, attached: Any) -> None:
    attached(CopyRule())

    class Chatty(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__ == "to":
                return args[0].as_subclass(torch.Tensor).to(*args[1:])
            return super().__torch_function__(func, types, args, kwargs or {})

    assert torch.zeros(2).as_subclass(Chatty).to(NAME).device.type == NAME
    assert shown(recorder) == ["h2d 8 Tensor.to"]


def test_rules_choose_by_direction_size_and_framework(recorder: Recorder, attached: Any) -> None:
    transfers = attached(
        CopyRule(("h2d",), frameworks=("cupy",)), CopyRule(("h2d",), min_bytes=100), CopyRule(("p2p",))
    )
    torch.zeros(10).to(NAME)
    torch.zeros(30).to(NAME).to(SECOND)
    assert shown(recorder) == ["h2d 120 Tensor.to", "p2p 120 Tensor.to"]
    assert transfers.hits == [0, 1, 1]


def test_nothing_is_asked_before_the_framework_uses_its_device(recorder: Recorder, attached: Any) -> None:
    attached(CopyRule(), ready=lambda: False)
    torch.zeros(10).to(NAME)
    assert spans_in(recorder) == []


def test_batches_that_a_loader_pins_are_copies_of_the_thread_that_pins(
    recorder: Recorder, attached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.data._utils import pin_memory

    # Without a GPU torch has nothing to pin with.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, device=None: self.clone())
    attached(CopyRule(("h2h",)))
    batch = {"x": torch.ones(4), "y": [torch.ones(2), "label"]}
    thread = threading.Thread(target=pin_memory.pin_memory, args=(batch,))
    thread.start()
    thread.join()
    assert shown(recorder) == ["h2h 16 pinned Tensor.pin_memory", "h2h 8 pinned Tensor.pin_memory"]
    assert {span.thread_id for span in spans_in(recorder)} != {threading.get_native_id()}


def test_storages_and_what_is_loaded_from_files_are_copies(recorder: Recorder, attached: Any) -> None:
    storage = torch.arange(4.0).untyped_storage()
    attached(CopyRule(("h2h",)))
    torch.UntypedStorage(16).copy_(storage)
    assert storage.cpu() is storage
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    file.seek(0)
    assert torch.equal(torch.load(file), torch.ones(2))
    assert shown(recorder) == ["h2h 16 UntypedStorage.copy_"]


def test_a_failing_copy_raises_as_before(recorder: Recorder, attached: Any) -> None:
    attached(CopyRule())
    with pytest.raises(NotImplementedError):
        torch.zeros(2, device="meta").to("cpu")
    with pytest.raises(TypeError):
        torch.zeros(2).copy_()
    assert spans_in(recorder) == []


def test_stand_ins_that_torch_traces_with_are_no_copies(recorder: Recorder, attached: Any) -> None:
    attached(CopyRule(DIRECTIONS))
    with torch._subclasses.FakeTensorMode():
        torch.empty(4).to(torch.float64).copy_(torch.empty(4))
    assert shown(recorder) == []


def test_compiled_and_exported_code_moves_as_before(recorder: Recorder, attached: Any) -> None:
    attached(CopyRule(DIRECTIONS))
    torch._dynamo.reset()

    def move(x: Any) -> Any:
        return x.to(torch.float64).copy_(x) * torch.tensor([2.0, 2.0])

    class Moving(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return move(x)

    with _disable_current_modes():
        assert torch._dynamo.explain(move)(torch.ones(2)).graph_break_count == 0
        compiled = torch.compile(move, backend="eager", fullgraph=True)
        assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
        assert torch.export.export(Moving(), (torch.ones(2),)).module()(torch.ones(2)).tolist() == [2.0, 2.0]
    torch._dynamo.reset()


def test_undo_leaves_torch_as_it_was(recorder: Recorder) -> None:
    owners = [torch.Tensor, torch.UntypedStorage, torch.TypedStorage]
    before = [dict(vars(owner)) for owner in owners]
    patched = PatchedFunctions(Copies([CopyRule()], recorder), "torch")
    array_copies.attach_torch(torch, patched)
    assert "to" in vars(torch.Tensor)
    patched.undo()
    assert [dict(vars(owner)) for owner in owners] == before


class Driver:
    """The answers of torch about one kind of device."""

    def __init__(self) -> None:
        self.used = False

    def is_initialized(self) -> bool:
        return self.used

    is_available = is_initialized

    def is_built(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("version", "driver"),
    [
        ({"cuda": None}, ""),
        ({}, ""),
        ({"cuda": "13.0"}, "cuda"),
        ({"cuda": None, "hip": "6.2"}, "cuda"),
        ({"cuda": None, "xpu": "2025"}, "xpu"),
        ({"cuda": None}, "mps"),
        ({"cuda": None}, "npu"),
    ],
)
def test_each_kind_of_device_is_asked_whether_it_is_used_and_none_is_touched(version: Any, driver: str) -> None:
    kind = Driver()
    torch = SimpleNamespace(version=SimpleNamespace(**version))
    if driver == "mps":
        torch.backends = SimpleNamespace(mps=kind)
    elif driver:
        setattr(torch, driver, kind)
    if driver == "npu":
        torch._C = SimpleNamespace(_get_privateuse1_backend_name=lambda: "npu")
    assert bool(array_copies.explain_missing_device(torch)) is (driver == "")
    is_used = array_copies._make_device_use_test(torch, Copies([CopyRule()]))
    assert is_used() is False
    kind.used = True
    assert is_used() is (driver != "")


def test_a_torch_without_a_device_is_left_as_it_is_unless_host_copies_are_asked_for(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_copies, "_make_device_use_tests", lambda torch: [])
    for rule, state in (
        (CopyRule(), "h2d d2h: waiting (this torch is built without a device: no copy to or from one can happen)"),
        (CopyRule(("h2h",)), "h2d d2h: waiting (no such copy was made)"),
    ):
        copies = Copies([CopyRule(rule.directions, text="h2d d2h")], recorder)
        copies.attach_to(torch)
        assert str(copies.verdicts()[0]) == state
        copies.undo()


def test_unseen_copies_of_torch_are_named_once(recorder: Recorder) -> None:
    copies = Copies([CopyRule(text="first"), CopyRule(text="second")], recorder)
    copies.attach_to(torch)
    torch.ones(2).to(NAME)
    try:
        assert [str(verdict) for verdict in copies.verdicts()] == [
            "first: attached (1 copies)",
            "second: waiting (no such copy was made)",
            f"copies: torch: partly (not seen: {ADAPTERS[0].unseen})",
        ]
    finally:
        copies.undo()


def test_a_framework_of_another_version_is_left_as_it_was_and_named(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Array:
        def get(self) -> None: ...

    odd = ModuleType("cupy")
    odd.ndarray, odd.asarray = Array, len  # type: ignore[attr-defined]  # and nothing of CUDA
    before = dict(vars(Array)), dict(vars(odd))
    copies = Copies([CopyRule(frameworks=("cupy",), text="cupy")], recorder)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    copies.attach_to(odd)
    assert FAULTS.count_by_place() == {"copy probe of cupy": 1}
    FAULTS.clear()
    assert (dict(vars(Array)), dict(vars(odd))) == before
    why = "its copies cannot be observed: AttributeError: module 'cupy' has no attribute 'cuda'"
    assert [str(verdict) for verdict in copies.verdicts()] == [f"cupy: waiting ({why})"]
