"""What torch's allocator holds of each device's memory, as torch counts it, and the most that it ever held.

Nothing is imported and nothing initialised: only devices are asked about that torch uses already. torch keeps the
interpreter's lock while it waits for its allocator, which another thread may hold for as long as the driver looks for
memory; so it is asked seldom, and misses nothing: it keeps the peaks itself.
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
"""Where each gauge stands in what `torch.cuda.memory_stats_as_nested_dict` tells."""


class TorchMemory:
    """Reads the counters of torch's allocator; `problem` says why it does not any more."""

    def __init__(self) -> None:
        self.problem = ""
        self._began = False

    def read(self, rarely: bool) -> list[tuple[int, Values]]:
        """Each device that torch uses, with its gauges: where `rarely` asks for it, and once torch has begun."""
        torch = sys.modules.get("torch")
        native: Any = getattr(torch, "_C", None)
        stats_of = getattr(native, "_cuda_memoryStats", None)
        is_initialized = getattr(getattr(torch, "cuda", None), "is_initialized", None)
        # torch lacks the one where it was built without CUDA, the other while it is being imported.
        if stats_of is None or is_initialized is None or not is_initialized() or (self._began and not rarely):
            return []
        self._began = True
        found = []
        try:
            for device in range(native._cuda_getDeviceCount()):
                if native._cuda_hasPrimaryContext(device):
                    stats = stats_of(device)
                    found.append((device, {name: stats[what]["all"][of] for name, (what, of) in GAUGE_OF.items()}))
        except Exception as error:  # an allocator of another make need not count
            first = str(error).partition("\n")[0]
            self.problem = f"torch's allocator is not read any more: {type(error).__name__}: {first}"
        return found
