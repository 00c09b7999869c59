"""The device profiling of SINGA: `SetVerbosity`, `SetSkipIteration`, `PrintTimeProfiling` of a device.

Verbosity 1 prints forward and backward, 2 one line for each operator in the order of execution, 3 those of
communication alone. Differences: nothing is synchronised; `EndIteration`, which SINGA has not, says where its graph has
run, and without it all is one iteration; averages divide by the iterations that were timed, and their number is
printed; Backward is what is declared so, the optimizer and gaps are not in it (the view `phases` has them), and what
there was none of is `-`. No device is made or moved to: whatever the device, its rules say what is timed. Where no
session runs, that of `INSTRUMENT_PROFILE` begins, else one with decorators and scopes alone.
"""

from __future__ import annotations

import time

from instrument.errors import ProfileError, StateError
from instrument.profiler import Session
from instrument.recorder import RECORDER, Scope
from instrument.report.operators import operators
from instrument.report.phases import phases
from instrument.report.table import number, safe
from instrument.report.view import Options, Recording
from instrument.steps import join, leave

SKIPPED_ITERATIONS = 5


class Device:
    """What SINGA's device offers to time its graph. `verbosity` 0 records nothing."""

    def __init__(self) -> None:
        self.verbosity = 0
        self.skip_iteration = SKIPPED_ITERATIONS
        self._session: Session | None = None
        self._since_ns = 0
        self._iteration: Scope | None = None
        self._ended = False

    def SetVerbosity(self, verbosity: int) -> None:  # noqa: N802 - the name that its users have
        """0 to 3; from 1 on the first iteration begins. Back to 0, recording ends and what was recorded is gone."""
        if verbosity not in (0, 1, 2, 3):
            raise ProfileError([f"SetVerbosity: found {verbosity!r}; allowed: 0, 1, 2, 3"])
        self.verbosity = verbosity
        if verbosity and self._session is None:
            self._session, self._ended = join(None), False
            self._since_ns = time.monotonic_ns()
            self._begin()
        elif not verbosity and self._session is not None:
            session, self._session = self._session, None
            self._end()
            leave(session)

    def SetSkipIteration(self, iterations: int) -> None:  # noqa: N802
        """How many first iterations are not timed."""
        if not isinstance(iterations, int) or isinstance(iterations, bool) or iterations < 0:
            raise ProfileError([f"SetSkipIteration: found {iterations!r}; allowed: a whole number from 0"])
        self.skip_iteration = iterations

    def EndIteration(self) -> None:  # noqa: N802
        """An iteration has ended and the next one begins."""
        if self._session is not None:
            self._ended = True
            self._end()
            self._begin()

    def PrintTimeProfiling(self) -> None:  # noqa: N802
        """Print the means of the iterations up to now; nothing is reset. Raises `StateError` for verbosity 0."""
        if not self.verbosity:
            raise StateError("asked to print the time profiling with verbosity 0; SetVerbosity(1) or more first")
        if self._session is not None:  # None: switched off by the environment
            print("\n".join(["", "Time Profiling:", *self._lines(self._session)]), flush=True)

    def _lines(self, session: Session) -> list[str]:
        options = Options(tracer_option="AllOpDetail", skip_first=self.skip_iteration)
        recording = Recording.of_trace(session.trace(self._since_ns))
        if self.verbosity == 1:
            found = phases(recording, options)
            lines = [
                f"{name.capitalize()} Propagation Time : {_seconds(found.mean_ns.get(name))} sec"
                for name in ("forward", "backward")
            ]
            return [*lines, self._timed(found.timed)]
        order = operators(recording, options).in_order
        lines = [
            f"OP_ID{one.number}. {safe(one.name)} : {number(one.mean_ns / 1e9)} sec"
            for one in (order.operators if order is not None else ())
            if one.total_ns and (self.verbosity == 2 or one.kind == "comm")
        ]
        return [*lines, self._timed(order.timed if order is not None else 0)]

    def _timed(self, count: int) -> str:
        why = "" if self._ended else f"; call EndIteration() after each, the first {self.skip_iteration} are skipped"
        return f"Timed iterations: {count}{why}"

    def _begin(self) -> None:
        self._iteration = RECORDER.make_scope("iteration", kind="step").start()

    def _end(self) -> None:
        opened, self._iteration = self._iteration, None
        if opened is not None:
            opened.end()


def create_cpu_device() -> Device:
    """What is looked at by a program that computes on the CPU."""
    return Device()


def create_cuda_gpu() -> Device:
    """What is looked at by a program that computes on a GPU."""
    return Device()


def create_cuda_gpu_on(device_id: int) -> Device:
    """As `create_cuda_gpu`, on whichever GPU."""
    return Device()


def _seconds(value_ns: float | None) -> str:
    return number(None if value_ns is None else value_ns / 1e9)
