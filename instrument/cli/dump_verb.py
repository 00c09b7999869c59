"""`instrument dump`: save what the processes of a run have in memory, without asking them."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from instrument.agent import client
from instrument.cli.convert_verb import form_of, write
from instrument.cli.inputs import one_trace
from instrument.cli.option_values import Verbs, time_ns
from instrument.cli.ps_verb import RUN
from instrument.errors import InstrumentError, TraceError
from instrument.report.table import safe

if TYPE_CHECKING:
    from instrument.trace.file import Saved


def add(verbs: Verbs) -> None:
    parser = verbs.add_parser("dump", help="save what the processes of a run have recorded; they go on meanwhile")
    parser.add_argument("run", nargs="?", metavar="RUN|SERVICE|PID", help=f"{RUN} (default: the only one)")
    parser.add_argument("--last", type=time_ns, metavar="T", help="only what ended in this time, such as 10s")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="a file of a form that `convert` writes, by the end of its name (default: RUN-dump.npz)",
    )
    parser.set_defaults(verb=dump)


def dump(options: argparse.Namespace, host: list[str]) -> int:
    """Save all processes of a run as one trace. Returns the exit code."""
    run = read_run("dump", options.run, options.last)
    saved = one_trace(run.read)
    path = Path(options.output or f"{run.name}-dump.npz")
    write(path, form_of(path), saved)
    print(f"{path}: {len(saved.trace.columns)} spans of {run.processes}")
    return 0


class RunRead(NamedTuple):
    """A run, what its processes have recorded up to now, and the number of those that ended before."""

    name: str
    read: list[Saved]
    ended: int
    is_going: bool

    @property
    def processes(self) -> str:
        """The number of processes, and of those without a recording."""
        without = f", without {self.ended} that ended before" if self.ended else ""
        return f"{len(self.read)} process{'es' * (len(self.read) != 1)}{without}"

    @property
    def header(self) -> str:
        """The line above a report."""
        return f"Run {safe(self.name)} {'is still going' if self.is_going else 'has ended'}: {self.processes}"


def read_run(verb: str, name: str | None, last_ns: int | None = None) -> RunRead:
    """Read the memory of a run's processes. Raises `InstrumentError` where there is no such run or recording."""
    with client.asked(name, memory=True) as runs:
        run = client.only(verb, runs)
        now_ns = time.monotonic_ns()
        since_ns = 0 if last_ns is None else max(now_ns - last_ns, 0)
        read: list[Saved] = []
        for member in (member for member in run.members if member.memory >= 0 or member.lives):
            try:
                read.append(_saved(member.memory, since_ns, now_ns))
            except TraceError as problem:
                print(f"instrument: {verb}: process {member.pid}: {problem}", file=sys.stderr)
        ended = run.folded + sum(member.memory < 0 and not member.lives for member in run.members)
    if not read:
        why = run.none_joined or "none of its processes has a recording that can be read"
        raise InstrumentError(f"{verb}: {run.name}: {why}")
    return RunRead(run.name, read, ended, bool(run.living))


def _saved(memory: int, since_ns: int, end_ns: int) -> Saved:
    from instrument.recording.mapped import Mapped
    from instrument.trace.of_recording import saved_of

    if memory < 0:
        raise TraceError("nobody else can read its recording")
    mapped = Mapped(memory)
    try:
        return saved_of(mapped, since_ns, end_ns)
    finally:
        mapped.close()
