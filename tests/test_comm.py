"""Communication of torch.distributed: two real processes over gloo, each with the spans of what it did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from readback import spans_in

from instrument.instrumentors.training import OPERATIONS, Comm
from instrument.recorder.recorder import Recorder
from instrument.runtime.faults import FAULTS


@pytest.fixture(scope="module", autouse=True)
def late_imports() -> None:
    """Imported by the first test: this file is collected by every process of the tests and run by one."""
    global torch, dist
    torch = pytest.importorskip("torch")
    dist = torch.distributed
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")


BOTH = """
import datetime, json, os, sys, time
import torch
import torch.distributed as dist
from instrument import chrome
import instrument

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
other = 1 - rank
told = {}

def ends(part):
    # what has been recorded since the part before
    spans = sorted(instrument.session().trace().spans, key=lambda span: span.span_id)
    before = sum(len(known["names"]) for known in told.values())
    comm = [span for span in spans if span.site.kind == "comm"][before:]
    told[part] = {
        "names": [span.site.name for span in comm],
        "attributes": [dict(span.attributes) for span in comm],
        "sites": [dict(span.site.attributes) for span in comm],
        "times": [[span.start_ns, span.end_ns] for span in comm],
        "verdicts": [str(verdict) for verdict in instrument.session().verdicts()],
        "notes": instrument.session().notes(),
    }

ones = torch.ones(1024)
dist.all_reduce(ones)
assert ones[0] == 2
dist.broadcast(ones, src=0)
dist.reduce(ones, dst=0)
parts = [torch.empty(1024) for _ in range(2)]
dist.all_gather(parts, ones)
dist.all_gather_into_tensor(torch.empty(2048), ones)
dist.reduce_scatter_tensor(torch.empty(512), ones)
dist.all_to_all_single(torch.empty(1024), ones)
dist.gather(ones, parts if rank == 0 else None, dst=0)
dist.scatter(ones, parts if rank == 0 else None, src=0)
dist.barrier()
ends("waiting")

ones = torch.ones(1024)
work = dist.all_reduce(ones, async_op=True)
time.sleep(0.02)
work.wait()
work.wait()
assert ones[0] == 2
dist.barrier()
ends("asynchronous")

box = torch.zeros(256)
if rank == 0:
    dist.send(torch.ones(256), dst=1)
    dist.irecv(box, src=1).wait()
else:
    dist.recv(box, src=0)
    dist.isend(torch.ones(256), dst=0).wait()
assert box[0] == 1
batch = [dist.P2POp(dist.isend, torch.ones(16), other), dist.P2POp(dist.irecv, torch.ones(16), other)]
for work in dist.batch_isend_irecv(batch):
    work.wait()
objects = [{"a": rank}]
dist.broadcast_object_list(objects, src=0)
assert objects == [{"a": 0}]
ends("sends")

half = dist.new_group([0, 1], group_desc="half")
dist.all_reduce(torch.ones(4), group=half)
torch.manual_seed(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
model(torch.ones(2, 4) * (rank + 1)).sum().backward()
gradient = model.module.weight.grad.clone()
assert torch.equal(gradient, torch.full((1, 4), 3.0)), gradient
from torch.distributed import _functional_collectives as functional
assert functional.all_reduce(torch.ones(3), "sum", half)[0] == 2
dist.barrier()
ends("groups")

if rank == 0:
    try:
        dist.monitored_barrier(timeout=datetime.timedelta(milliseconds=200))
        raise AssertionError("rank 1 was not waited for")
    except RuntimeError as error:
        assert "monitoredBarrier" in str(error)
    open(sys.argv[2] + ".failed", "w").close()
else:
    while not os.path.exists(sys.argv[2] + ".failed"):
        time.sleep(0.01)
ends("failing")

print(json.dumps(told))
sys.stdout.flush()
dist.destroy_process_group()
"""

Told = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Return the reports of two processes under `instrument run`, by the parts of their program."""
    folder = tmp_path_factory.mktemp("comm")
    (folder / "profile.yaml").write_text("comm: auto")
    (folder / "both.py").write_text(BOTH)
    command = [sys.executable, "-m", "instrument", "run", "--profile", "profile.yaml", "--", "both.py"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    running = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "store")],
            cwd=folder, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        written = [one.communicate(timeout=240) for one in running]
    finally:
        for one in running:
            one.kill()
    assert [one.returncode for one in running] == [0, 0], [errors for _, errors in written]
    assert str(folder) not in "".join(out for out, _ in written)
    return [json.loads(out.splitlines()[-1]) for out, _ in written]


@pytest.mark.slow
def test_collectives_that_wait_are_one_span_each_with_bytes_and_group(told: Told) -> None:
    first, second = (one["waiting"] for one in told)
    names = [
        "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor",
        "all_to_all_single", "gather", "scatter", "barrier",
    ]  # fmt: skip
    assert first["names"] == second["names"] == names
    sizes = [4096, 4096, 4096, 8192, 8192, 4096, 4096, 8192, 8192, None]
    assert [attributes.get("bytes") for attributes in first["attributes"]] == sizes
    assert first["sites"][0] == {
        "op": "all_reduce", "backend": "gloo", "group": "default_pg", "rank": 0, "world_size": 2,
    }  # fmt: skip
    assert {site["rank"] for site in second["sites"]} == {1}
    told = [verdict for verdict in first["verdicts"] if verdict.startswith("comm")]
    assert told[0].startswith("comm: attached (1 all_gather, 1 all_gather_into_tensor, 1 all_reduce")
    assert told[1].startswith("comm: torch: partly (not seen: what C++ starts by itself: the all-reduce of Distributed")


@pytest.mark.slow
def test_an_asynchronous_one_is_its_call_and_its_wait_with_the_time_in_flight(told: Told) -> None:
    first, _ = (one["asynchronous"] for one in told)
    assert first["names"] == ["all_reduce", "all_reduce.wait", "barrier"]
    call, wait, _ = first["attributes"]
    (start_ns, end_ns), (wait_ns, waited_ns), _ = first["times"]
    assert call == {"bytes": 4096}
    assert list(wait) == ["in_flight_ns"]
    assert wait["in_flight_ns"] > 20_000_000
    assert start_ns < end_ns <= wait_ns <= start_ns + wait["in_flight_ns"] <= waited_ns


@pytest.mark.slow
def test_sends_and_receives_say_with_whom_and_batches_of_them_are_seen(told: Told) -> None:
    first, second = (one["sends"] for one in told)
    batch = ["send", "recv", "send.wait", "recv.wait"]
    objects = ["broadcast", "broadcast"]
    assert first["names"] == ["send", "send.wait", "recv", "recv.wait", *batch, *objects]
    assert second["names"] == ["recv", "recv.wait", "send", "send.wait", *batch, *objects]
    assert first["attributes"][0] == {"bytes": 1024, "peer": 1}
    assert second["attributes"][0] == {"bytes": 1024, "peer": 0}


@pytest.mark.slow
def test_groups_ddp_and_functional_collectives_work_as_before(told: Told) -> None:
    first, _ = (one["groups"] for one in told)
    assert first["sites"][first["names"].index("all_reduce")]["group"] == "half"
    assert first["names"][-1] == "barrier"
    assert not any("fault" in note for note in first["notes"])


@pytest.mark.slow
def test_one_that_fails_raises_what_it_raises_and_its_span_says_so(told: Told) -> None:
    first, _ = (one["failing"] for one in told)
    assert first["names"] == ["monitored_barrier"]
    assert first["attributes"] == [{"error": "RuntimeError"}]


@pytest.fixture
def alone(recording: Recorder) -> Iterator[Comm]:
    """The rule at work in this process, which is a group by itself."""
    made = Comm(("auto",), recording)
    made.attach_to(dist.distributed_c10d)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield made
    dist.destroy_process_group()
    made.undo()


def test_undo_gives_back_the_very_same_methods_and_work_that_is_under_way_ends(
    alone: Comm, recording: Recorder
) -> None:
    alone.undo()
    group, work = dist.distributed_c10d.ProcessGroup, dist.distributed_c10d.Work
    before = {name: vars(group)[name] for name in OPERATIONS if name in vars(group)} | {"wait": vars(work)["wait"]}
    made = Comm(("auto",), recording)
    made.attach_to(dist.distributed_c10d)
    pending = dist.all_reduce(torch.ones(1), async_op=True)
    made.undo()
    assert before == {name: vars(group)[name] for name in OPERATIONS if name in vars(group)} | {
        "wait": vars(work)["wait"]
    }
    assert pending.wait()
    assert [span.site.name for span in spans_in(recording)] == ["all_reduce"]


def test_traced_code_and_switched_off_code_leave_no_span_and_no_fault(alone: Comm, recording: Recorder) -> None:
    @torch.compile(backend="eager")
    def reduced(x: Any) -> Any:
        dist.all_reduce(x)
        return x + 1

    x = torch.ones(3)
    assert torch.equal(reduced(x), torch.full((3,), 2.0))
    recording.reset()
    recording.on = False
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    assert spans_in(recording) == []
    assert not FAULTS.count_by_place()
    torch._dynamo.reset()


def test_work_that_nobody_waits_for_is_the_call_alone_and_is_not_kept(alone: Comm, recording: Recorder) -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(1), async_op=True)
    assert [span.site.name for span in spans_in(recording)] == ["all_reduce"] * 3
    assert not alone._issued


def test_without_torch_distributed_or_before_it_is_used_the_verdict_says_so(recording: Recorder) -> None:
    made = Comm(("auto",), recording)
    assert [str(verdict) for verdict in made.verdicts()] == ["comm: waiting (torch.distributed not imported)"]
    made.attach_to(dist.distributed_c10d)
    assert [str(verdict) for verdict in made.verdicts()] == ["comm: waiting (no process group has been used)"]
    made.undo()
