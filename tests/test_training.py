"""A training loop of torch, as people write it, under `configs/training.yaml`: every view that has something to say."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from instrument import chrome
from instrument.profile.model import VIEWS

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

CONFIG = Path(__file__).parent.parent / "configs" / "training.yaml"

LOOP = """
import json
import torch
import torch.distributed as dist
from instrument import Profiler
from instrument.profile.model import VIEWS
from instrument.report.view import make_json_values

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(32, 32) for _ in range(3)])
        self.head = torch.nn.Linear(32, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).relu()
        return self.head(x)

def told(window):
    found = window.views(VIEWS)
    print(json.dumps({name: make_json_values(found[name]) for name in ("phases", "distribution")}))
    print(window.summary(views=VIEWS))

if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    data = torch.utils.data.TensorDataset(torch.randn(96, 32), torch.randn(96, 1))
    batches = torch.utils.data.DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork")
    model = Model()
    criterion = torch.nn.MSELoss()
    optimizer = torch.optim.AdamW(model.parameters())
    slow = torch.optim.SGD(model.head.parameters(), lr=0.01)
    with Profiler(schedule=(2, 10), on_trace_ready=told) as profiler:
        for inputs, wanted in batches:
            loss = criterion(model(inputs), wanted)
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            slow.step()
            optimizer.zero_grad()
            profiler.step(num_samples=len(inputs))
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_every_view_of_a_training_loop_with_workers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    command = [sys.executable, "-m", "instrument", "run", "--profile", str(CONFIG), "--", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    numbers, _, text = done.stdout.partition("\n")
    print(text)
    views = json.loads(numbers)

    rows = {row["name"]: row for row in views["phases"]["rows"]}
    assert list(rows) == ["step", "loader", "forward", "backward", "optimizer", "others"]
    calls = {name: row["calls"] for name, row in rows.items()}
    # The loss is a module of its own; what checkpoints compute again is a part of backward.
    assert calls == {"step": 8, "loader": 8, "forward": 16, "backward": 8, "optimizer": 16, "others": None}
    assert (
        sum(row["host"]["total_ns"] for name, row in rows.items() if name != "step")
        == (rows["step"]["host"]["total_ns"])
    )
    assert (views["phases"]["timed"], views["phases"]["skipped"], views["phases"]["cut"]) == (8, 2, 0)
    assert views["phases"]["outside"] == 0
    mean_ns = views["phases"]["mean_ns"]
    assert sum(mean_ns.values()) * 8 == pytest.approx(rows["step"]["host"]["total_ns"])

    assert views["distribution"]["of"] == "step"
    (operation,) = views["distribution"]["operations"]
    assert (operation["name"], operation["calls"]) == ("all_reduce (gloo default_pg)", 8 * 8)
    parameters = 4 * (3 * (32 * 32 + 32) + 32 + 1)
    assert operation["moved_bytes"] == 8 * parameters
    (host,) = views["distribution"]["places"]
    assert 0 < host["communication_ns"] < views["distribution"]["base_ns"]
    assert host["overlap_ns"] == 0  # one thread does one thing at a time
    assert host["computation_ns"] > 0

    for heading in ("Phases Report", "Distribution Report", "Operator Report", "Overview Report"):
        assert heading in text
    assert "Time Profiling: host time, averages of 8 iterations timed, 2 skipped" in text
    assert "fault of instrument" not in text
    assert "Phases Report" in done.stderr, "the summary of the whole run"
    assert "Steps: 12 whole" in done.stderr, "which has the steps of the Profiler, too"
    assert "12 steps timed, the first 0 skipped" in done.stderr
    assert "waiting" not in done.stderr.replace("from 65536 B: waiting", ""), "what has run is not told to be missing"
    assert set(VIEWS) >= {"phases", "distribution"}


@pytest.mark.slow
def test_the_whole_run_is_in_the_trace_file_and_reports_from_it_have_the_same_phases(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP.replace("told)", "lambda window: window.export('window.json.gz'))"))
    command = [sys.executable, "-m", "instrument", "run", "--profile", str(CONFIG), "--", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    trace, _ = chrome.load(tmp_path / "window.json.gz")
    steps = [span.attributes["step"] for span in trace.spans if span.site.kind == "step"]
    assert sorted(map(int, steps)) == list(range(2, 10))
    report = [sys.executable, "-m", "instrument", "report", "window.json.gz", "--view", "phases,distribution"]
    shown = subprocess.run(report, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert "Steps: 8 whole, 2 skipped before" in shown
    assert "  optimizer  16 " in shown
    assert "all_reduce (gloo default_pg)  64 " in shown
