"""The processes of a trace as viewers show them: the number and the name of each, and those of its threads."""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

import numpy as np

from instrument.recording.spans import MergedProcess, Trace
from instrument.trace.columns import Int64s
from instrument.trace.groups import ranked

SPARE_PIDS = 1 << 22
"""No process of Linux has a number from here on (man 5 proc, pid_max)."""


class ShownProcess(NamedTuple):
    """A process with the number under which it is shown, which no other one has; `label` is where it ran, if needed."""

    pid: int
    name: str
    label: str
    facts: Trace


class ShownProcesses:
    """The processes of a trace, the first of them also for threads that are of none. `limit` is no process's number."""

    def __init__(self, facts: Trace, limit: int) -> None:
        self._merged = list[MergedProcess](facts.processes)
        its = [one.facts for one in self._merged] or [facts]
        are_of_hosts = len({one.origin.host for one in its}) > 1
        spare, taken = count(SPARE_PIDS), set[int]()
        self.all: list[ShownProcess] = []
        for one in its:
            own, host = one.origin.pid, one.origin.host
            pid = own if 0 <= own < limit else 0
            if pid in taken or (not pid and self._merged):
                pid = next(number for number in spare if number not in taken)
            taken.add(pid)
            is_made_up = pid != own and own > 0
            label = " ".join([f"pid {own}"] * is_made_up + [f"host {host}"] * (are_of_hosts and bool(host)))
            self.all.append(ShownProcess(pid, one.origin.service or f"process {own}", label, one))
        self._number = {thread: number for number, one in enumerate(self._merged) for thread in one.threads}

    @property
    def first(self) -> ShownProcess:
        """The process of all that has no thread."""
        return self.all[0]

    def number_of(self, thread_id: int) -> int:
        """The place of the process of a thread."""
        return self._number.get(thread_id, 0)

    def of_thread(self, thread_id: int) -> ShownProcess:
        """The process of a thread."""
        return self.all[self.number_of(thread_id)]

    def own_thread(self, thread_id: int) -> int:
        """The number that its process gave a thread."""
        return self._merged[self.number_of(thread_id)].threads.get(thread_id, thread_id) if self._merged else thread_id

    def thread_name(self, thread_id: int) -> str:
        """The name of a thread in its process."""
        own = self.own_thread(thread_id)
        return self.of_thread(thread_id).facts.threads.get(own) or f"thread {own}"

    def numbers_of(self, thread_ids: Int64s) -> Int64s:
        """The places of the processes of threads."""
        known, places = ranked(thread_ids)
        return np.array(list(map(self.number_of, known.tolist())), dtype=np.int64)[places]
