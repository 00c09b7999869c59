"""The memory that torch's allocator has of each device, by torch's own counters, and its peak.

Only devices that torch uses already are read; nothing is imported or initialised. torch keeps the interpreter's lock
while it waits for its allocator's, which another thread may keep while the driver looks for memory. So it is read
seldom, and no peak is missed: torch keeps the peaks itself.
"""

from __future__ import annotations

import sys
from typing import Any

Values = dict[str, float | None]

GAUGE_OF = {
    "torch_allocated": ("allocated_bytes", "current"),
    "torch_allocated_peak": ("allocated_bytes", "peak"),
    "torch_reserved": ("reserved_bytes", "current"),
    "torch_reserved_peak": ("reserved_bytes", "peak"),
}
"""The place of each gauge in `torch.cuda.memory_stats_as_nested_dict()`."""


class TorchMemory:
    """Reads the counters of torch's allocator. `problem` is the reason for which it no longer does."""

    def __init__(self) -> None:
        self.problem = ""
        self._began = False

    def read(self, rarely: bool) -> list[tuple[int, Values]]:
        """Return the gauges of each device that torch uses: at the first call, and where `rarely` asks for it."""
        torch = sys.modules.get("torch")
        native: Any = getattr(torch, "_C", None)
        stats_of = getattr(native, "_cuda_memoryStats", None)
        is_initialized = getattr(getattr(torch, "cuda", None), "is_initialized", None)
        # torch lacks the one where it was built without CUDA, the other while it is being imported.
        if stats_of is None or is_initialized is None or not is_initialized() or (self._began and not rarely):
            return []
        self._began = True
        gauges = []
        try:
            for device in range(native._cuda_getDeviceCount()):
                if native._cuda_hasPrimaryContext(device):
                    stats = stats_of(device)
                    gauges.append((device, {name: stats[what]["all"][of] for name, (what, of) in GAUGE_OF.items()}))
        except Exception as error:  # an allocator of another make need not count
            first = str(error).partition("\n")[0]
            self.problem = f"torch's allocator is not read any more: {type(error).__name__}: {first}"
        return gauges
