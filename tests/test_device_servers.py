"""Device times in real servers under their ready profiles, on the fake driver in real time, in the servers' workers.

mosec's environment is made by `.ci/servers`.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from driver import environment, why_not
from real_servers import PRESETS, Answer, Served, ask, environment_of, with_report
from server_programs import answers as answers_at
from server_programs import serving

from instrument.trace.columns import Columns
from instrument.trace.ledger import compute_device_ledger

MS = 10**6
ITEMS = 40
AT_ONCE = 4
WORK_MS = 6
ROUNDING_NS = 10**4  # the driver tells times in milliseconds as float32

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
LITSERVE = f"""
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


MOSEC = f"""
import sys
import time
import mosec
import shop_model

class Predict(mosec.Worker):
    def forward(self, items):
        answers = shop_model.compute([item["item"] for item in items])
        time.sleep({WORK_MS}e-3 * len(items) + 0.02)
        return [{{"item": answer}} for answer in answers]

if __name__ == "__main__":
    sys.argv[1:] = ["--address", "127.0.0.1", "--port", sys.argv[1]]
    server = mosec.Server()
    server.append_worker(Predict, num=1, max_batch_size=4, max_wait_time=10)
    server.run()
"""


def served_by(
    server: str, app: str, path: str, ready: str, folder: Path, python: str = sys.executable
) -> tuple[list[Answer], list[Answer], Served]:
    """The answers of a server by itself, those under its profile with device times, and what came of it there."""
    if why_not():
        pytest.skip(why_not())
    for name, text in (("torch", TORCH), ("shop_model", MODEL), ("app", app)):
        (folder / f"{name}.py").write_text(text)
    profile = (PRESETS / f"{server}.yaml").read_text()
    rule = '  - {match: "shop_model:compute", phase: compute, device: true}\n'
    is_first = "\nfunctions:\n" not in profile
    profile = f"{profile}\nfunctions:\n{rule}" if is_first else profile.replace("functions:\n", f"functions:\n{rule}")
    (folder / "profile.yaml").write_text(profile)
    environ = {**environment(), "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parent)])}
    found = []
    for ours in (False, True):
        with (
            serving(["-m", "app", "{port}"], folder, environ, ours=ours, is_ready=answers_at(ready), python=python) as (
                port,
                _,
            ),
            ThreadPoolExecutor(AT_ONCE) as pool,
        ):
            asked = (pool.submit(ask, port, path, {"item": f"item {number}"}) for number in range(ITEMS))
            found.append([answer.result() for answer in list(asked)])
    return found[0], found[1], Served(folder, with_report(folder / "log"))


def assert_compute_is_timed(served: Served) -> Columns:
    """Each call of the model has its time on the device but the very first: before it nothing of CUDA was begun in the
    worker's process.
    """
    trace = served.trace
    # A call whose thread was late is launch-bound.
    assert {trace.device.labels[label] for label in trace.device.label} <= {"exclusive", "launch-bound"}
    assert {trace.sites[trace.site[row]].name for row in trace.device.row} == {"compute"}
    assert len(trace.device.row) == served.names()["compute"] - 1
    assert "Device 0: busy" in served.output
    return trace


@pytest.mark.slow
def test_batches_of_a_worker_have_their_time_on_the_device_and_answers_stay_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("litserve")
    expected, answers, served = served_by("litserve", LITSERVE, "/predict", "/health", tmp_path)
    assert {answer.status for answer in answers} == {200}
    assert answers == expected
    trace = assert_compute_is_timed(served)
    # A batch's time is given out to its requests in equal parts, of which each item took as much, and what the host
    # was late with between an event and the work after it, too.
    times = compute_device_ledger(trace, served.joined).shared_ns
    assert 1 <= (times == 0).sum() <= AT_ONCE
    assert times[times > 0].min() >= WORK_MS * MS - ROUNDING_NS
    assert round(float(np.median(times)) / MS) == WORK_MS
    assert times.sum() == trace.device.total_ns.sum()


@pytest.mark.servers
def test_batches_of_a_worker_of_mosec_have_as_much_time_on_the_device_as_their_items_take(tmp_path: Path) -> None:
    python = str(environment_of("mosec") / "bin" / "python")
    expected, answers, served = served_by("mosec", MOSEC, "/inference", "/metrics", tmp_path, python)
    assert {answer.status for answer in answers} == {200}
    assert answers == expected
    trace = assert_compute_is_timed(served)
    sizes = Counter(served.joined.served.batch.tolist())
    assert sum(sizes.values()) == ITEMS
    items = np.array([sizes[parent] for parent in trace.parent[trace.device.row].tolist()])
    times = trace.device.total_ns / items
    assert times.min() >= WORK_MS * MS - ROUNDING_NS
    assert round(float(np.median(times)) / MS) == WORK_MS
    (batches,) = served.document("--view", "batches")["views"]["batches"]["rows"]
    assert (batches["name"], batches["items"]) == ("mosec Predict_1", ITEMS)
