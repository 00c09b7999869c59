"""Device times in a real server under its ready profile, on the fake driver in real time: LitServe, in its worker."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from driver import environment, why_not
from real_servers import CONFIGS, Answer, Served, ask, with_report
from server_programs import serving

from instrument.trace.device_ledger import device_ledger

pytestmark = pytest.mark.slow

MS = 10**6
ITEMS = 40
AT_ONCE = 4
WORK_MS = 6

TORCH = """
import os, sys
from driver import FakeDriver
from fake_torch_cuda import fake_torch

sys.modules["torch"] = fake_torch(FakeDriver(os.path.join(os.environ["LD_LIBRARY_PATH"], "libcuda.so.1")))
"""
MODEL = f"""
import torch

def compute(items):
    torch.work({WORK_MS * MS} * len(items))
    return [item.upper() for item in items]
"""
APP = f"""
import sys
import time
import litserve
import shop_model

class Shop(litserve.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return request["item"]

    def predict(self, items):
        answers = shop_model.compute(items)
        time.sleep({WORK_MS}e-3 * len(items) + 0.02)  # as who needs what the device made of it
        return answers

    def encode_response(self, answer):
        return {{"item": answer}}

if __name__ == "__main__":
    api = Shop(api_path="/predict", max_batch_size=4, batch_timeout=0.01)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False)
"""


@pytest.fixture
def service(tmp_path: Path) -> Callable[[bool], list[Answer]]:
    """What runs the service, alone or under its profile, and asks it."""
    pytest.importorskip("litserve")
    if why_not():
        pytest.skip(why_not())
    for name, text in (("torch", TORCH), ("shop_model", MODEL), ("app", APP)):
        (tmp_path / f"{name}.py").write_text(text)
    rule = 'functions: [{match: "shop_model:compute", phase: compute, device: true}]'
    (tmp_path / "profile.yaml").write_text(f"{(CONFIGS / 'litserve.yaml').read_text()}\n{rule}\n")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parent)])

    def run(ours: bool) -> list[Answer]:
        words = ["-m", "app", "{port}"]
        environ = {**environment(), "PYTHONPATH": path}
        with serving(words, tmp_path, environ, ours=ours) as (port, _), ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(lambda number: ask(port, "/predict", {"item": f"item {number}"}), range(ITEMS)))

    return run


def test_batches_of_a_worker_have_their_time_on_the_device_and_answers_stay_as_they_are(
    service: Callable[[bool], list[Answer]], tmp_path: Path
) -> None:
    expected, answers = service(False), service(True)
    assert {answer.status for answer in answers} == {200}
    assert answers == expected
    served = Served(tmp_path, with_report(tmp_path / "log"))
    trace = served.trace
    assert Counter(trace.device.labels[label] for label in trace.device.label) == {"exclusive": len(trace.device.row)}
    assert {trace.sites[trace.site[row]].name for row in trace.device.row} == {"compute"}
    # All but the very first: before it nothing of CUDA was begun in the worker's process.
    assert len(trace.device.row) == served.names()["compute"] - 1
    # A batch's time is given out to its requests in equal parts, of which each item took as much.
    times = device_ledger(trace, served.joined).shared_ns
    assert {round(time / MS) for time in times} == {0, WORK_MS}
    assert 1 <= (times == 0).sum() <= AT_ONCE
    assert "Device 0: busy" in served.output
