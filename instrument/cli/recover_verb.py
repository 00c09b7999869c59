"""`instrument recover`: save the recordings of killed processes in the files of `limits.ring_dir`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from instrument.cli.option_values import Verbs
from instrument.errors import InstrumentError, TraceError
from instrument.recording import memory

WHICH = "give the folder that limits.ring_dir of the profile names"


def add(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "recover",
        help="save what processes that were killed have left in the files of limits.ring_dir",
        description="Each file of a process that has gone without a goodbye becomes a recording (.npz) of its name "
        "beside it, which `instrument report` reads. Those of processes that run, or ended in order, are left alone.",
    )
    parser.add_argument("folder", metavar="DIR", help="the folder that limits.ring_dir names")
    parser.add_argument("--remove", action="store_true", help="then remove the files of all processes that are gone")
    parser.set_defaults(verb=recover)


def recover(options: argparse.Namespace, host: list[str]) -> int:
    """Save them, and print what became of each file. Returns the exit code: 2 where one could not be read."""
    try:
        files = sorted(path for path in Path(options.folder).iterdir() if path.suffix == memory.SUFFIX)
    except OSError as error:
        raise InstrumentError(f"recover: cannot read {options.folder}: {error.strerror}; {WHICH}") from error
    if not files:
        raise InstrumentError(f"recover: found no file in {options.folder} that ends in {memory.SUFFIX}; {WHICH}")
    failed = False
    for path in files:
        try:
            said, is_gone = _recovered(path)
            print(f"{path}: {said}")
            if is_gone and options.remove:
                path.unlink()
        except (TraceError, OSError) as problem:
            print(f"instrument: recover: {path}: {problem}", file=sys.stderr)
            failed = True
    return 2 if failed else 0


def _recovered(path: Path) -> tuple[str, bool]:
    """Save what one file has. Returns a sentence, and True where its process has gone. Raises `TraceError`."""
    from instrument.agent import crash_capture
    from instrument.recording.mapped import Mapped

    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mapped = Mapped(fd)
        try:
            header = mapped.header
        finally:
            mapped.close()
        if memory.is_alive(path):
            return f"process {header.pid} runs", False
        if header.state == "goodbye":
            return f"process {header.pid} has ended in order", True
        answer = crash_capture.capture(fd, str(path.with_suffix(".npz")), how="ended without a goodbye")
    finally:
        os.close(fd)
    return f"process {header.pid} {answer['died']}; saved as {answer['path']}", True
