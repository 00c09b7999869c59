"""Copies: direction, bytes and what is no copy. The meta device stands in for a GPU where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from instrument.probes.copies import Copies, direction, has_device  # noqa: E402 - after the skip
from instrument.profile import CopyRule  # noqa: E402
from instrument.recorder import Recorder  # noqa: E402


@pytest.fixture
def attached(recorder: Recorder) -> Iterator[Any]:
    undos: list[Any] = []

    def attach(*rules: CopyRule, ready: Any = lambda: True) -> Copies:
        copies = Copies(rules, recorder)
        undos.append(copies.attach(torch, initialised=ready))
        return copies

    yield attach
    for undo in undos:
        undo()


def shown(recorder: Recorder) -> list[tuple[Any, ...]]:
    return [
        (span.site.name, dict(span.site.attributes)["sync"], span.attributes["bytes"])
        for span in sorted(recorder.spans(), key=lambda span: span.span_id)
    ]


@pytest.mark.parametrize(
    ("source", "target", "way"),
    [
        ("cpu", "cpu", None),
        ("cpu", "cuda:0", "h2d"),
        ("cuda:0", "cpu", "d2h"),
        ("cuda:0", "cuda:0", "d2d"),
        ("cuda:0", "cuda:1", "p2p"),
        ("meta", "cpu", "d2h"),
    ],
)
def test_direction_of_a_copy(source: str, target: str, way: str | None) -> None:
    assert direction(torch.device(source), torch.device(target)) == way


def test_moves_to_a_device_are_copies_with_their_bytes(recorder: Recorder, attached: Any) -> None:
    copies = attached(CopyRule(("h2d", "d2d")))
    x = torch.zeros(4, 8)
    x.to("meta")
    x.to("meta", non_blocking=True)
    there = x.to(torch.device("meta"), torch.float16)
    there.to(torch.float32)
    torch.empty(4, 8, device="meta").copy_(x)
    assert shown(recorder) == [
        ("memcpy h2d", True, 128),
        ("memcpy h2d", False, 128),
        ("memcpy h2d", True, 128),
        ("memcpy d2d", True, 64),
        ("memcpy h2d", True, 128),
    ]
    assert copies.hits == [5]


@pytest.mark.parametrize(
    ("args", "kwargs", "sync"),
    [
        (("meta",), {}, True),
        (("meta",), {"non_blocking": True}, False),
        ((torch.device("meta"), torch.float16, True), {}, False),
        ((torch.device("meta"), torch.float16, False, True), {}, True),
        ((torch.empty(0, device="meta"), True), {}, False),
        ((torch.empty(0, device="meta"),), {"copy": True}, True),
    ],
)
def test_non_blocking_is_understood_wherever_it_stands(
    recorder: Recorder, attached: Any, args: Any, kwargs: Any, sync: bool
) -> None:
    attached(CopyRule(("h2d",)))
    torch.zeros(2).to(*args, **kwargs)
    assert [fact for _, fact, _ in shown(recorder)] == [sync]


def test_what_moves_nothing_is_no_copy(recorder: Recorder, attached: Any) -> None:
    attached(CopyRule())
    x = torch.ones(3)
    there = x.to("meta")
    before = len(recorder.spans())
    assert x.to("cpu") is x
    assert there.to("meta") is there
    assert x.to(torch.float64).device.type == "cpu"
    assert (x.tolist(), x[0].item(), float(x[1]), bool(x[2])) == ([1.0] * 3, 1.0, 1.0, True)
    assert x.numpy().tolist() == [1.0] * 3
    torch.zeros(3).copy_(x)
    assert len(recorder.spans()) == before == 1


def test_rules_choose_by_direction_and_size(recorder: Recorder, attached: Any) -> None:
    copies = attached(CopyRule(("h2d",), min_bytes=100), CopyRule(("d2d",)))
    torch.zeros(10).to("meta")
    torch.zeros(30).to("meta").to(torch.float16)
    assert shown(recorder) == [("memcpy h2d", True, 120), ("memcpy d2d", True, 120)]
    assert copies.hits == [1, 1]


def test_nothing_is_asked_before_the_framework_uses_its_device(recorder: Recorder, attached: Any) -> None:
    attached(CopyRule(), ready=lambda: False)
    torch.zeros(10).to("meta")
    assert recorder.spans() == []


def test_models_parameters_and_subclasses_are_seen_and_keep_their_types(recorder: Recorder, attached: Any) -> None:
    attached(CopyRule(("h2d",)))

    class Marked(torch.Tensor):
        pass

    torch.nn.Linear(2, 2).to("meta")
    assert type(torch.zeros(2).as_subclass(Marked).to("meta")) is Marked
    assert shown(recorder) == [("memcpy h2d", True, 16), ("memcpy h2d", True, 8), ("memcpy h2d", True, 8)]


def test_a_failing_copy_raises_as_before(recorder: Recorder, attached: Any) -> None:
    attached(CopyRule())
    there = torch.zeros(2).to("meta")
    with pytest.raises(NotImplementedError):
        there.to("cpu")
    with pytest.raises(TypeError):
        torch.zeros(2).copy_()
    assert len(recorder.spans()) == 1


def test_compiled_code_moves_without_a_graph_break(recorder: Recorder, attached: Any) -> None:
    attached(CopyRule())
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x.to(torch.float64).copy_(x) * 2, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    torch._dynamo.reset()


def test_undo_leaves_torch_as_it_was(recorder: Recorder) -> None:
    before = {name: getattr(torch.Tensor, name) for name in ("to", "cuda", "cpu", "item", "copy_", "__array__")}
    own = set(vars(torch.Tensor))
    Copies([CopyRule()], recorder).attach(torch)()
    assert {name: getattr(torch.Tensor, name) for name in before} == before
    assert set(vars(torch.Tensor)) == own


@pytest.mark.parametrize(
    ("version", "built_for_a_device"),
    [({"cuda": None}, False), ({"cuda": "13.0"}, True), ({"cuda": None, "hip": "6.2"}, True), ({}, False)],
)
def test_a_torch_without_a_device_is_told_without_asking_the_driver(version: Any, built_for_a_device: bool) -> None:
    assert has_device(SimpleNamespace(version=SimpleNamespace(**version))) is built_for_a_device


@pytest.mark.gpu
def test_copies_to_and_from_a_real_gpu(recorder: Recorder) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    undo = Copies([CopyRule()], recorder).attach(torch)
    try:
        torch.cuda.init()
        there = torch.zeros(1024).cuda()
        pinned = torch.zeros(1024).pin_memory().to("cuda", non_blocking=True)
        values = (there[0].item(), pinned.cpu().numel())
    finally:
        undo()
    assert values == (0.0, 1024)
    facts = [(span.site.name, dict(span.site.attributes)["pinned"]) for span in recorder.spans()]
    assert facts == [("memcpy h2d", False), ("memcpy h2d", True), ("memcpy d2h", False), ("memcpy d2h", False)]
