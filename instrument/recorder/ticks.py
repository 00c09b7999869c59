"""The time stamp counter as the clock of spans: used where it is sound, and given up when it strays."""

from __future__ import annotations

from pathlib import Path

from instrument.recorder.recorder import Recorder

CHECK_NS = 10**9
LIMIT_NS = 50_000
"""The most that the time stamp counter may stray from the monotonic clock in a second."""


class Ticks:
    """The time stamp counter of a recorder: its use, and the checks of it."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._checked_ns: int | None = None

    def start(self, now_ns: int) -> str:
        """Time spans by the counter. Returns why it cannot, "" where it does. `Recorder.stop_ticks` undoes it."""
        unsound = _unsound_ticks() or ("" if self._recorder.start_ticks() else "the processor has none")
        self._checked_ns = None if unsound else now_ns
        return unsound

    @property
    def are_used(self) -> bool:
        """True while spans are timed by the counter, and `check` is needed."""
        return self._checked_ns is not None

    @property
    def clock(self) -> str:
        """The clock of spans, in words."""
        return "time stamp counter" if self.are_used else "CLOCK_MONOTONIC"

    def check(self, now_ns: int) -> None:
        """Compare the counter with the monotonic clock, once in `CHECK_NS`. The recorder counts where it strays."""
        if self._checked_ns is None or now_ns - self._checked_ns < CHECK_NS:
            return
        self._checked_ns = None if self._recorder.check_ticks(LIMIT_NS) is None else now_ns


def _unsound_ticks() -> str:
    """Return why the time stamp counter is not sound here, "" where processor and kernel report that it is."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").partition("flags")[2].split("\n")[0]
        source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text(encoding="ascii")
    except OSError as error:
        return f"the kernel does not say whether it is sound ({error})"
    missing = {"constant_tsc", "nonstop_tsc"}.difference(flags.split())
    if missing:
        return f"the processor does not claim {' and '.join(sorted(missing))}"
    if source.strip() != "tsc":
        return f"the kernel keeps its time by {source.strip()}, not by the counter"
    return ""
