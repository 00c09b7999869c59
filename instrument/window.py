"""Windows: which stretches of time become trace files."""

from __future__ import annotations

from instrument.profile import Schedule


class Windows:
    """Which stretches of time become trace files: the whole session, or what the schedule says, a request a step."""

    def __init__(self, schedule: Schedule | None, start_ns: int) -> None:
        self._schedule = schedule
        self._steps = 0
        self._index = 0
        self._opened_ns: int | None = start_ns if self._records(0) else None

    def _records(self, step: int) -> bool:
        schedule = self._schedule
        if schedule is None:
            return True
        cycle = schedule.closed + schedule.ready + schedule.record
        count, within = divmod(step - schedule.skip_first, cycle)
        if step < schedule.skip_first or (schedule.repeat and count >= schedule.repeat):
            return False
        return within >= schedule.closed + schedule.ready

    def _is_last(self, step: int) -> bool:
        schedule = self._schedule
        if schedule is None:
            return False
        cycle = schedule.closed + schedule.ready + schedule.record
        return self._records(step) and (step - schedule.skip_first) % cycle == cycle - 1

    def step(self, end_ns: int) -> tuple[int, int, int] | None:
        """One step has ended. Returns index, start and end of the window that ended with it."""
        step, self._steps = self._steps, self._steps + 1
        window = None
        if self._opened_ns is not None and self._is_last(step):
            window = (self._index, self._opened_ns, end_ns)
            self._index += 1
            self._opened_ns = None
        if self._opened_ns is None and self._records(self._steps):
            self._opened_ns = end_ns
        return window

    def change(self, schedule: Schedule | None, now_ns: int) -> tuple[int, int, int] | None:
        """Follow another schedule from now on, its steps counted from 0. Returns the window that ends with this."""
        window = self.stop(now_ns)
        self._index += window is not None
        self._schedule, self._steps = schedule, 0
        self._opened_ns = now_ns if self._records(0) else None
        return window

    def stop(self, end_ns: int) -> tuple[int, int, int] | None:
        """The window that is open at the end; partial, but not empty."""
        if self._opened_ns is None or end_ns <= self._opened_ns:
            return None
        window, self._opened_ns = (self._index, self._opened_ns, end_ns), None
        return window
