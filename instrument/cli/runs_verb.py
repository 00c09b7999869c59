"""The verbs on running services: `ps` lists them, `live` shows one, and `dump` saves its newest spans. `recover` saves
the spans of killed processes."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from instrument.agent import client
from instrument.cli.convert_verb import form_of, write_trace
from instrument.cli.inputs import merge_saved
from instrument.cli.option_values import Verbs, read_seconds, time_ns
from instrument.errors import InstrumentError, TraceError
from instrument.recording import memory
from instrument.report.table import safe

if TYPE_CHECKING:
    from instrument.trace.file import Saved


def add(verbs: Verbs) -> None:
    _add_ps(verbs)
    _add_live(verbs)
    _add_dump(verbs)
    _add_recover(verbs)


RUN = (
    "a run (its first letters are enough), a service, a process id, or the path of an agent's socket, as in the "
    "variable INSTRUMENT_AGENT"
)


def _add_ps(verbs: Verbs) -> None:
    parser = verbs.add_parser("ps", help="list running services and their processes, with calls, cost and losses")
    parser.add_argument("run", nargs="?", metavar="RUN|SERVICE|PID", help=f"{RUN} (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON document, with times in ns")
    parser.set_defaults(verb=list_processes)


def list_processes(options: argparse.Namespace, host: list[str]) -> int:
    from instrument.agent.live_view import LiveSampler

    with client.find_runs(options.run, memory=True) as runs:
        screens = [(run, LiveSampler(run.name).make_screen(run.members, run.folded)) for run in runs]
    if options.json:
        documents = [
            {"run": run.name, "agent": run.agent, "problem": run.problem or run.none_joined, "unseen": run.unseen,
             **screen.document()}
            for run, screen in screens
        ]  # fmt: skip
        json.dump({"runs": documents}, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return 0
    for run, screen in screens:
        agent = f"agent {run.agent}" if run.agent else run.problem
        print(f"Run {safe(run.name)}, {safe(agent)}")
        for line in screen.process_lines():
            print(line)
        if run.folded:
            print(f"and {run.folded} more that ended before")
        for problem in filter(None, [run.none_joined, run.unseen, *screen.problems]):
            print(safe(problem))
    return 0


EVERY_S = 1.0


def _add_live(verbs: Verbs) -> None:
    parser = verbs.add_parser("live", help="show the requests that are being served, and the functions with most time")
    parser.add_argument("run", nargs="?", metavar="RUN|SERVICE|PID", help=f"{RUN} (default: the only one)")
    parser.add_argument(
        "--every",
        type=read_seconds,
        default=EVERY_S,
        metavar="S",
        help=f"seconds between two screens (default: {EVERY_S:g})",
    )
    parser.add_argument(
        "--once", action="store_true", help="print one screen on the whole run up to now, as plain text"
    )
    parser.add_argument("--json", action="store_true", help="print each screen as a line of JSON, with times in ns")
    parser.set_defaults(verb=show_live)


def show_live(options: argparse.Namespace, host: list[str]) -> int:
    """Show a run until its end or Ctrl-C. Returns the exit code."""
    from instrument.agent.live_view import LiveSampler, Screen

    sampler = LiveSampler("")

    def read_screen() -> Screen:
        nonlocal sampler
        with client.find_runs(options.run, memory=True) as runs:
            run = client.single_run("live", runs)
            if not sampler.shows(run.name):
                sampler = LiveSampler(run.name)
            screen = sampler.make_screen(run.members, run.folded)
            return replace(screen, problems=(run.none_joined,)) if run.none_joined else screen

    screen = read_screen()
    if options.once or options.json or not sys.stdout.isatty():
        while True:
            print(json.dumps(screen.document()) if options.json else "\n".join(screen.lines()), flush=True)
            if options.once:
                return 0
            time.sleep(options.every)
            try:
                screen = read_screen()
            except InstrumentError:
                return 0  # it is over
    try:
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        raise InstrumentError(
            "live: rich is not installed; install it with: pip install 'instrument-sdk[live]', or print one "
            "screen with --once"
        ) from None
    try:
        with Live(Text("\n".join(screen.lines())), screen=True, auto_refresh=False) as shown:
            while True:
                time.sleep(options.every)
                try:
                    screen = read_screen()
                except InstrumentError:
                    break  # it is over
                shown.update(Text("\n".join(screen.lines())), refresh=True)
    except KeyboardInterrupt:
        return 0
    print("\n".join(screen.lines()))
    return 0


def _add_dump(verbs: Verbs) -> None:
    parser = verbs.add_parser("dump", help="save the newest spans of a running service")
    parser.add_argument("run", nargs="?", metavar="RUN|SERVICE|PID", help=f"{RUN} (default: the only one)")
    parser.add_argument(
        "--last", type=time_ns, metavar="T", help="save only spans that ended in this time, such as 10s"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="the file to write; its suffix decides the form, as for `instrument convert` (default: RUN-dump.npz)",
    )
    parser.set_defaults(verb=save_run)


def save_run(options: argparse.Namespace, host: list[str]) -> int:
    """Save all processes of a run as one trace. Returns the exit code."""
    run = read_run("dump", options.run, options.last)
    saved = merge_saved(run.read)
    path = Path(options.output or f"{run.name}-dump.npz")
    write_trace(path, form_of(path), saved)
    print(f"{path}: {len(saved.trace.columns)} spans of {run.processes_text}")
    return 0


class RunRead(NamedTuple):
    """A run, the recordings of its processes up to now, and the number of ended processes without a recording."""

    name: str
    read: list[Saved]
    ended: int
    is_going: bool

    @property
    def processes_text(self) -> str:
        """A text on the number of processes, and on those that have ended without a recording."""
        ended = f", without {self.ended} that ended before" if self.ended else ""
        return f"{len(self.read)} process{'es' * (len(self.read) != 1)}{ended}"

    @property
    def header_line(self) -> str:
        return f"Run {safe(self.name)} {'is still going' if self.is_going else 'has ended'}: {self.processes_text}"


def read_run(verb: str, name: str | None, last_ns: int | None = None) -> RunRead:
    """Read the memory of a run's processes. Raises `InstrumentError` if there is no run, or nothing to read."""
    with client.find_runs(name, memory=True) as runs:
        run = client.single_run(verb, runs)
        now_ns = time.monotonic_ns()
        since_ns = 0 if last_ns is None else max(now_ns - last_ns, 0)
        read: list[Saved] = []
        for member in (member for member in run.members if member.memory >= 0 or member.lives):
            try:
                read.append(_read_memory(member.memory, since_ns, now_ns))
            except TraceError as problem:
                print(f"instrument: {verb}: process {member.pid}: {problem}", file=sys.stderr)
        ended = run.folded + sum(member.memory < 0 and not member.lives for member in run.members)
    if not read:
        why = run.none_joined or "no recording of its processes can be read"
        raise InstrumentError(f"{verb}: {run.name}: {why}")
    return RunRead(run.name, read, ended, bool(run.living))


def _read_memory(memory: int, since_ns: int, end_ns: int) -> Saved:
    from instrument.recording.mapped import Mapped
    from instrument.trace.of_recording import read_saved

    if memory < 0:
        raise TraceError("its recording cannot be read by other processes")
    with closing(Mapped(memory)) as mapped:
        return read_saved(mapped, since_ns, end_ns)


WHICH = "give the folder of limits.ring_dir in the profile"


def _add_recover(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "recover",
        help="make recordings from the files of killed processes in limits.ring_dir",
        description="Writes a recording (.npz) next to each file of a process that was killed, for `instrument "
        "report`. Files of processes that run, or that ended in order, remain as they are.",
    )
    parser.add_argument("folder", metavar="DIR", help="the folder that limits.ring_dir names")
    parser.add_argument(
        "--remove", action="store_true", help="afterwards remove the files of all processes that have ended"
    )
    parser.set_defaults(verb=recover_files)


def recover_files(options: argparse.Namespace, host: list[str]) -> int:
    """Save the recordings of ring files and print the outcomes. Returns the exit code, 2 if a file cannot be read."""
    try:
        files = sorted(path for path in Path(options.folder).iterdir() if path.suffix == memory.SUFFIX)
    except OSError as error:
        raise InstrumentError(f"recover: cannot read {options.folder}: {error.strerror}; {WHICH}") from error
    if not files:
        raise InstrumentError(f"recover: the folder {options.folder} has no file *{memory.SUFFIX}; {WHICH}")
    failed = False
    for path in files:
        try:
            outcome, is_gone = _recover_file(path)
            print(f"{path}: {outcome}")
            if is_gone and options.remove:
                path.unlink()
        except (TraceError, OSError) as problem:
            print(f"instrument: recover: {path}: {problem}", file=sys.stderr)
            failed = True
    return 2 if failed else 0


def _recover_file(path: Path) -> tuple[str, bool]:
    """Save the recording of a ring file. Return a sentence, and True if its process has ended. Raises `TraceError`."""
    from instrument.agent import crash_capture
    from instrument.recording.mapped import Mapped

    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        with closing(Mapped(fd)) as mapped:
            header = mapped.header
        if memory.is_alive(path):
            return f"process {header.pid} runs", False
        if header.state == "goodbye":
            return f"process {header.pid} has ended in order", True
        answer = crash_capture.save_recording(fd, str(path.with_suffix(".npz")), end_kind="ended without a goodbye")
    finally:
        os.close(fd)
    return f"process {header.pid} {answer['died']}; saved as {answer['path']}", True
