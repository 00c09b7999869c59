"""The time stamp counter as the clock of spans: taken up where it is sound, and given up when it strays."""

from __future__ import annotations

from pathlib import Path

from instrument.recorder.recorder import Recorder

CHECK_NS = 10**9
LIMIT_NS = 50_000
"""How far the time stamp counter may stray from the monotonic clock in a second before it is given up."""


class Ticks:
    """Whether a recorder times spans by the processor's time stamp counter, and how far it may be trusted."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._checked_ns: int | None = None

    def start(self, now_ns: int) -> str:
        """Time spans by it from now on. Returns why not, "" where it is so. `Recorder.stop_ticks` is the way back."""
        unsound = use_ticks(self._recorder)
        self._checked_ns = None if unsound else now_ns
        return unsound

    @property
    def are_used(self) -> bool:
        """Whether spans are timed by it, which `check` must look after."""
        return self._checked_ns is not None

    @property
    def clock(self) -> str:
        """What spans are timed by, in words."""
        return "time stamp counter" if self.are_used else "CLOCK_MONOTONIC"

    def check(self, now_ns: int) -> None:
        """Hold it against the monotonic clock, once in `CHECK_NS`. Given up, it is counted by the recorder."""
        if self._checked_ns is None or now_ns - self._checked_ns < CHECK_NS:
            return
        self._checked_ns = None if self._recorder.check_ticks(LIMIT_NS) is None else now_ns


def use_ticks(recorder: Recorder) -> str:
    """Time spans with the processor's time stamp counter from now on. Returns why not, "" where it is so."""
    unsound = _unsound_ticks()
    if not unsound and not recorder.start_ticks():
        unsound = "the processor has none"
    return unsound


def _unsound_ticks() -> str:
    """Why the time stamp counter cannot be trusted on this machine, "" where processor and kernel say it can."""
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
