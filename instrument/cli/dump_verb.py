"""`instrument dump`: save what the processes of a run have in memory, without asking them."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from instrument.agent import client
from instrument.cli.convert_verb import form_of, write
from instrument.cli.inputs import one_trace
from instrument.cli.option_values import Verbs, time_ns
from instrument.cli.ps_verb import RUN
from instrument.errors import InstrumentError, TraceError

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
    with client.asked(options.run, memory=True) as runs:
        run = client.only("dump", runs)
        now_ns = time.monotonic_ns()
        since_ns = 0 if options.last is None else max(now_ns - options.last, 0)
        read: list[Saved] = []
        ended = run.folded + sum(member.memory < 0 and not member.lives for member in run.members)
        for member in run.members:
            if member.memory < 0:
                if member.lives:
                    why = "nobody else can read its recording"
                    print(f"instrument: dump: process {member.pid}: {why}", file=sys.stderr)
                continue
            try:
                read.append(_saved(member.memory, since_ns, now_ns))
            except TraceError as problem:
                print(f"instrument: dump: process {member.pid}: {problem}", file=sys.stderr)
    if not read:
        why = run.none_joined or "none of its processes has a recording that can be read"
        raise InstrumentError(f"dump: {run.name}: {why}")
    saved = one_trace(read)
    path = Path(options.output or f"{run.name}-dump.npz")
    write(path, form_of(path), saved)
    without = f", without {ended} that ended before" if ended else ""
    print(f"{path}: {len(saved.columns)} spans of {len(read)} process{'es' * (len(read) != 1)}{without}")
    return 0


def _saved(memory: int, since_ns: int, end_ns: int) -> Saved:
    from instrument.recording.mapped import Mapped
    from instrument.trace.of_memory import saved_of

    mapped = Mapped(memory)
    try:
        return saved_of(mapped, since_ns, end_ns)
    finally:
        mapped.close()
