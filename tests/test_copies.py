"""Copies of torch: on a device made in Python in a process of its own, and on a real GPU where there is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from readback import spans_in

from instrument.instrumentors import array_copies
from instrument.instrumentors.copies import Copies, PatchedFunctions
from instrument.profile.model import DIRECTIONS, CopyRule
from instrument.recorder.recorder import Recorder
from instrument.recording.spans import Work


@pytest.fixture(scope="module", autouse=True)
def late_imports() -> None:
    """Imported by the first test: this file is collected by every process of the tests and run by one."""
    global torch
    torch = pytest.importorskip("torch")


@pytest.mark.slow
def test_copies_of_torch_on_a_device_made_in_python() -> None:
    tests = Path(__file__).with_name("copies_of_torch.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.gpu
def test_copies_to_and_from_a_real_gpu(recorder: Recorder) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    torch.cuda.init()
    patched = PatchedFunctions(Copies([CopyRule(DIRECTIONS)], recorder), "torch")
    array_copies.attach_torch(torch, patched)
    try:
        there = torch.zeros(1024).cuda()
        pinned = torch.zeros(1024).pin_memory()
        back = pinned.to("cuda", non_blocking=True).to("cpu", non_blocking=True)
        values = (there[0].item(), there[:2].tolist(), back.numel())
    finally:
        patched.undo()
    assert values == (0.0, [0.0, 0.0], 1024)
    spans = sorted(spans_in(recorder), key=lambda span: span.span_id)
    facts = [dict(span.site.attributes) for span in spans]
    assert [
        (fact["direction"], span.attributes["bytes"], fact["sync"], fact.get("pinned"))
        for fact, span in zip(facts, spans, strict=True)
    ] == [
        ("h2d", 4096, True, False),
        ("h2h", 4096, True, True),
        ("h2d", 4096, False, True),
        ("d2h", 4096, False, True),
        ("d2h", 4, True, False),
        ("d2h", 8, True, False),
    ]


class Tensor(NamedTuple):
    """The part of a torch tensor that says on which device it is."""

    device: Any

    @property
    def is_cuda(self) -> bool:
        return str(self.device.type) == "cuda"


@pytest.mark.parametrize(
    ("source", "args", "kwargs", "devices"),
    [
        ("cuda:1", ("cpu",), {}, (1,)),
        ("cuda:1", ("cuda:0",), {}, (1,)),
        ("cpu", ("cuda:1",), {}, (1,)),
        ("cpu", (1,), {}, (1,)),
        ("cpu", (), {"device": "cuda:1"}, (1,)),
        ("cpu", (lambda: torch.device("cuda:1"),), {}, (1,)),
        ("cpu", (lambda: Tensor(torch.device("cuda:1")),), {}, (1,)),
        ("cpu", ("cuda",), {}, None),
        ("cpu", (), {}, None),
        ("cpu", (lambda: torch.float32,), {}, None),
        ("cpu", (True,), {}, None),
    ],
)
def test_a_copy_runs_on_the_device_that_it_comes_from_or_goes_to(
    source: str, args: Any, kwargs: Any, devices: tuple[int, ...] | None
) -> None:
    made = [arg() if callable(arg) else arg for arg in args]
    work = array_copies._find_device((Tensor(torch.device(source)), *made), kwargs)
    assert work == (None if devices is None else Work("torch", devices))
