"""Saves for the report of a run what its ended processes left in memory. One child saves the recordings of many.

To begin a child, and what reads recordings in it, takes longer than to save what a worker of one job has left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from instrument.agent import departure
from instrument.agent.jobs import Answer, Jobs
from instrument.agent.processes import Process

AT_ONCE = 64
"""Processes at most whose recordings one child saves."""


class Saves:
    """The processes whose recordings are to be saved in `folder`, each as its `saved` says.

    `then` is called with each once that was done, or cannot be: its `saved` is "" then.
    """

    def __init__(self, jobs: Jobs, folder: Path, then: Callable[[Process], object]) -> None:
        self._jobs = jobs
        self._folder = folder
        self._then = then
        self._waiting: deque[Process] = deque()
        self._running = 0

    def add(self, process: Process) -> None:
        """Save what a process has left, at once or with others once a child has come to its end."""
        self._waiting.append(process)
        self._go_on()

    def _go_on(self) -> None:
        if not self._running and self._waiting:
            self._start([self._waiting.popleft() for _ in range(min(len(self._waiting), AT_ONCE))])

    def _start(self, batch: Sequence[Process]) -> None:
        self._running += 1
        self._jobs.start(departure.captures_of(batch, self._folder), partial(self._end, batch))

    def _end(self, batch: Sequence[Process], answer: Answer) -> None:
        self._running -= 1
        if "each" not in answer and len(batch) > 1:  # the recording of one has ended the child
            for process in batch:
                self._start([process])
            return
        for process, one in zip(batch, answer.get("each", [answer]), strict=True):
            process.saved, process.files = str(one.get("path", "")), tuple(map(str, one.get("copies", ())))
            self._then(process)
        self._go_on()
