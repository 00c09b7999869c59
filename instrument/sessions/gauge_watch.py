"""The choice of who reads a process's gauges: the agent of its run, or a thread of the process itself.

The agent cannot read torch's allocator from outside, so the control thread of the process sends the allocator's values.
The process reads all gauges itself if it has no agent, or if the agent refuses. A lock on the recording ensures that
only one reader writes gauges into it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from instrument.clock import Deadline
from instrument.device.gauges import RARELY_NS, Gauges
from instrument.device.nvml import ORDER, VARIABLE
from instrument.recorder.recorder import RECORDER
from instrument.recording.slot_ring import GaugePlace
from instrument.recording.spans import Gpu
from instrument.runtime.cheap_start import dataclass
from instrument.runtime.faults import FAULTS
from instrument.sessions.membership import Membership

LAST_READING_S = 0.5
"""The maximum number of seconds for which `stop` waits for the agent's last reading."""


@dataclass(eq=False)
class GaugeWatch:
    """A reader of a process's gauges, through the agent or on a thread of this process.

    `_changed()` is called when the set of read GPUs changes. Only one thread at a time may call `begin` and `stop`. The
    control thread calls `look` and `handle_message`.
    """

    _gauges: Gauges
    _membership: Membership
    _changed: Callable[[], object]

    def __post_init__(self) -> None:
        self._claim: GaugePlace | None = None
        self._reset()

    def _reset(self) -> None:
        self._has_begun = self._has_stopped = False
        self._sent_settings: Mapping[str, Any] | None = None
        self._torch_ns = 0

    def after_fork_in_child(self) -> None:
        """Stop reading in the child until `begin`. The parent goes on to read its own gauges."""
        self._close_claim()
        self._reset()

    def facts(self) -> Mapping[str, Any] | None:
        """Return the settings that the agent needs to read the gauges, None if the profile asks for no gauge."""
        if not self._gauges.are_wanted:
            return None
        settings = self._gauges.wanted()
        environ = {name: os.environ[name] for name in (VARIABLE, ORDER) if name in os.environ}
        self._sent_settings = {"nvml_ns": settings.nvml_ns, "host_ns": settings.host_ns, "environ": environ}
        return self._sent_settings

    # ---------------------------------------------------------------- who reads

    def begin(self) -> None:
        """Start a thread that reads the gauges, unless the agent of this process reads them."""
        self._has_begun = True
        if not (self._membership.has_agent() and RECORDER.memory_fd >= 0):
            self._start_own_thread()

    def _start_own_thread(self) -> None:
        """Start a thread that reads the gauges, unless another process already reads them."""
        if self._has_stopped or self._gauges.is_reading or not self._gauges.are_wanted:
            return
        if self._membership.path and RECORDER.memory_fd >= 0:
            with suppress(OSError):
                self._claim = GaugePlace(RECORDER.memory_fd)
                if not self._claim.take():
                    self._close_claim()
                    return
        self._gauges.begin()

    def _close_claim(self) -> None:
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.close()

    def look(self) -> None:
        """Send the agent torch's memory readings and changed GPUs. The control thread calls this regularly."""
        if not self._has_begun or self._has_stopped or not self._gauges.are_wanted or RECORDER.memory_fd < 0:
            return
        if not self._gauges.is_reading and self._membership.is_joined:
            self._send_changes()
            self._send_torch_memory()

    def handle_message(self, message: Any) -> None:
        """Handle a message of the agent: the GPUs that it reads, with notes, or its refusal to read the gauges."""
        if not isinstance(message, dict):
            return
        if "yours" in message:
            why = f"device: a thread of this process reads the gauges, not the agent: {message['yours']!s}"
            self._gauges.note_outside((), [why])
            if self._has_begun:
                self._start_own_thread()
        elif "gpus" in message:
            gpus = [Gpu(int(gpu["device"]), str(gpu["model"]), str(gpu["uuid"])) for gpu in message["gpus"]]
            self._gauges.note_outside(gpus, [str(note) for note in message["notes"]])
            self._changed()

    # ---------------------------------------------------------------- what the agent does not know

    def _send_changes(self) -> None:
        """Send the agent new settings if the service has changed which GPUs it may use."""
        before = self._sent_settings
        if self.facts() != before:
            self._membership.send({"gauges": self._sent_settings})

    def _send_torch_memory(self, *, is_last: bool = False) -> None:
        """Send the agent readings of torch's allocator, which only this process can take."""
        if self._gauges.wanted().host_ns is None:
            return
        now_ns = time.monotonic_ns()
        rarely = is_last or now_ns >= self._torch_ns
        readings = self._gauges.torch_memory(rarely=rarely)
        if rarely:
            self._torch_ns = now_ns + RARELY_NS
        rows = [[device, name, value] for device, values in readings for name, value in values.items()]
        if rows:
            self._membership.send({"readings": rows})

    # ---------------------------------------------------------------- the end

    def stop(self, deadline: Deadline) -> None:
        """Take a last reading of all gauges, or wait for the agent's, and stop reading."""
        self._has_stopped = True
        is_own = self._gauges.is_reading
        self._gauges.stop(deadline.left_s())
        self._close_claim()
        if is_own or not (self._has_begun and self._gauges.are_wanted and self._membership.is_joined):
            return
        FAULTS.attempt("last reading of torch", lambda: self._send_torch_memory(is_last=True))
        if self._membership.send({"gauges": None}):
            self._await_last(deadline.left_s(LAST_READING_S))

    def _await_last(self, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while (left_s := end - time.monotonic()) > 0:
            message = self._membership.await_message("gauges", left_s)
            if message is None:
                break
            self.handle_message(message["gauges"])
            if isinstance(message["gauges"], dict) and message["gauges"].keys() & {"ended", "yours"}:
                return
        self._gauges.note_outside(
            self._gauges.gpus(), [f"device: the agent had not read the gauges again {limit_s:.2g} s after the end"]
        )
