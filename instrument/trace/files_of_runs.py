"""The runs that the files of a folder are of: by the name of the run; without one, by the process and its time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from instrument.errors import TraceError
from instrument.trace.trace import Trace

RUNS_NAMED = 5
"""Runs of a folder that a message names."""


@dataclass
class FilesOfRun:
    """Files of one run, and the part of time that they are of, in ns since 1970."""

    name: str
    files: list[str]
    start_ns: int
    end_ns: int

    def __str__(self) -> str:
        return f"{self.name} ({len(self.files)} file{'s' * (len(self.files) != 1)})"


def runs_of(files: Mapping[str, Trace]) -> list[FilesOfRun]:
    """The runs of files by what is known of each, the newest last."""
    found: list[tuple[FilesOfRun, set[object]]] = []
    for path, facts in sorted(files.items(), key=lambda one: one[1].origin.realtime_of(one[1].start_ns)):
        newest = max([one.facts for one in facts.processes] or [facts], key=lambda one: one.end_ns)
        origin = newest.origin
        start_ns, end_ns = origin.realtime_of(newest.start_ns), origin.realtime_of(newest.end_ns)
        process = origin.host, origin.boot, origin.pid, origin.start_ticks
        for run, processes in found:
            is_same = start_ns <= run.end_ns or process in processes
            if run.name == origin.run if origin.run else is_same and run.name.startswith(UNNAMED):
                run.files.append(path)
                run.end_ns = max(run.end_ns, end_ns)
                processes.add(process)
                break
        else:
            began = time.strftime("%Y%m%dT%H%M%S", time.gmtime(start_ns // 10**9))
            name = origin.run or f"{UNNAMED}{began}-{origin.pid}"
            found.append((FilesOfRun(name, [path], start_ns, end_ns), {process}))
    return sorted((run for run, _ in found), key=lambda run: run.end_ns)


UNNAMED = "unnamed-"
"""The begin of the name of a run whose files have no name of it."""


def chosen(folder: str, runs: Sequence[FilesOfRun], asked: str | None) -> tuple[FilesOfRun, str]:
    """The run that is asked for, else the newest, and a sentence on the others, "" where there is none.

    Raises `TraceError` where the run is not there.
    """
    names = ", ".join(map(str, reversed(runs[-RUNS_NAMED:])))
    more = len(runs) - RUNS_NAMED
    names += f" and {more} more" if more > 0 else ""
    if asked is not None:
        for run in runs:
            if run.name == asked:
                return run, ""
        raise TraceError(f"asked for the run {asked}, found in the folder {folder}: {names}")
    newest = runs[-1]
    if len(runs) == 1:
        return newest, ""
    return newest, (
        f"the folder {folder} has files of {len(runs)} runs: {names}; this is the newest, {newest.name}; "
        "--run RUN takes another one, --all all of them"
    )
