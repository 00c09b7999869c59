"""Files as torch.profiler writes them (Kineto, schema 1), for what this machine has no device to record.

Categories, names of arguments, units and lanes are those of real files: host lanes by process and thread, device lanes
by device and stream, `correlation` on the call that asks for work and on the work.
"""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

BASE_NS = 1_790_857_026_000_000_000
CALLS = {"kernel": "cudaLaunchKernel", "gpu_memcpy": "cudaMemcpyAsync", "gpu_memset": "cudaMemsetAsync"}


class Kineto:
    """A file in the making, of one process. Times are in ns since `BASE_NS`."""

    def __init__(self, pid: int = 4321) -> None:
        self.pid = pid
        self.events: list[dict[str, Any]] = []
        self._numbers = count(1)
        self._allocated: dict[int, int] = {}

    def op(
        self, name: str, start_ns: int, end_ns: int, thread: int = 0, category: str = "cpu_op", **more: Any
    ) -> None:  # fmt: skip
        """An operator or another slice of the host."""
        args = {"External id": next(self._numbers), "Ev Idx": len(self.events), **more}
        self._slice(category, name, self.pid, thread or self.pid, start_ns, end_ns, args)

    def launch(
        self, name: str, called_ns: int, start_ns: int, end_ns: int, *, thread: int | None = 0, stream: int = 7,
        device: int = 0, category: str = "kernel",
    ) -> None:  # fmt: skip
        """Work of a device, and the call of 5 us that asked for it; no call with `thread=None`."""
        args = {"correlation": next(self._numbers), "External id": 1}
        if thread is not None:
            call = (self.pid, thread or self.pid, called_ns, called_ns + 5_000)
            self._slice("cuda_runtime", CALLS[category], *call, {"cbid": 211, **args})
        place = {"device": device, "context": 1, "stream": stream}
        self._slice(category, name, device, stream, start_ns, end_ns, {**place, **args})

    def memory(self, at_ns: int, size_bytes: int, address: int, thread: int = 0, *, device: int = -1) -> None:
        """Memory taken, or given back where the size is below 0; on the host with device -1."""
        allocated = self._allocated[device] = self._allocated.get(device, 0) + size_bytes
        args = {
            "Total Reserved": 0 if device < 0 else 1 << 21, "Total Allocated": allocated, "Bytes": size_bytes,
            "Device Id": device, "Device Type": int(device >= 0), "Addr": address, "Ev Idx": len(self.events),
        }  # fmt: skip
        self.events.append(
            {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": self.pid,
             "tid": thread or self.pid, "ts": at_ns / 1000, "args": args}
        )  # fmt: skip

    def _slice(
        self, category: str, name: str, pid: int, tid: int, start_ns: int, end_ns: int, args: dict[str, Any]
    ) -> None:
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start_ns / 1000,
             "dur": (end_ns - start_ns) / 1000, "args": args}
        )  # fmt: skip

    def save(self, path: Path) -> Path:
        """Write the file."""
        document = {
            "schemaVersion": 1, "deviceProperties": [], "host_name": "node", "displayTimeUnit": "ms",
            "baseTimeNanoseconds": BASE_NS, "traceEvents": self.events, "traceName": str(path),
        }  # fmt: skip
        path.write_text(json.dumps(document))
        return path
