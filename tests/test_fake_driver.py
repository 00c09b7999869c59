"""The fake CUDA driver by itself, through the real bindings: the facts that tests of device time rest on."""

from __future__ import annotations

import threading

import pytest
from driver import FakeDriver, value

cuda = pytest.importorskip("cuda.bindings.driver")
pytestmark = pytest.mark.fake_driver


def start(device: int = 0):
    value(cuda.cuInit(0))
    context = value(cuda.cuDevicePrimaryCtxRetain(device))
    value(cuda.cuCtxSetCurrent(context))
    return context


def test_event(fake_driver: FakeDriver) -> None:
    start()
    stream = value(cuda.cuStreamCreate(1))
    a, b = value(cuda.cuEventCreate(0)), value(cuda.cuEventCreate(0))
    value(cuda.cuEventRecord(a, stream))
    fake_driver.launch(stream, 100_000)
    value(cuda.cuEventRecord(b, stream))
    assert int(cuda.cuEventQuery(a)[0]) == 0
    assert int(cuda.cuEventQuery(b)[0]) == 600
    fake_driver.advance(100_000)
    assert value(cuda.cuEventElapsedTime(a, b)) == pytest.approx(0.1)
    print(fake_driver.called(), fake_driver.counts())
