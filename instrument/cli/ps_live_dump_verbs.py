"""The verbs on running services: `ps` lists them, `live` shows one, and `dump` saves its newest spans."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from instrument.agent import client
from instrument.cli import print_json, print_remark
from instrument.cli.convert_merge_query_recover_verbs import choose_format, write_trace
from instrument.cli.inputs import merge_saved_files
from instrument.cli.option_values import Verbs, add_run_argument, read_seconds, read_time_ns
from instrument.errors import InstrumentError, TraceError
from instrument.report.table import printable

if TYPE_CHECKING:
    from instrument.agent.live_view import Screen
    from instrument.trace.file import Saved


def add_verbs(verbs: Verbs) -> None:
    _add_ps(verbs)
    _add_live(verbs)
    _add_dump(verbs)


def _add_ps(verbs: Verbs) -> None:
    parser = verbs.add_parser("ps", help="list running services and their processes, with calls, cost and losses")
    add_run_argument(parser, "all")
    parser.add_argument("--json", action="store_true", help="print one JSON document, with times in ns")
    parser.set_defaults(verb=list_processes)


def list_processes(options: argparse.Namespace, host: list[str]) -> int:
    from instrument.agent.live_view import LiveSampler

    with client.find_runs(options.run, memory=True) as runs:
        screens = [(run, LiveSampler(run.name).make_screen(run.members, run.folded)) for run in runs]
    if options.json:
        documents = [
            {"run": run.name, "agent": run.agent, "problem": run.problem or run.empty_run_text, "unseen": run.unseen,
             **screen.make_document()}
            for run, screen in screens
        ]  # fmt: skip
        print_json({"runs": documents})
        return 0
    for run, screen in screens:
        agent = f"agent {run.agent}" if run.agent else run.problem
        print(f"Run {printable(run.name)}, {printable(agent)}")
        for line in screen.process_lines():
            print(line)
        if run.folded:
            print(f"and {run.folded} more that ended before")
        for problem in filter(None, [run.empty_run_text, run.unseen, *screen.problems]):
            print(printable(problem))
    return 0


EVERY_S = 1.0


def _add_live(verbs: Verbs) -> None:
    parser = verbs.add_parser("live", help="show the requests that are being served, and the functions with most time")
    add_run_argument(parser)
    about = f"seconds between two screens (default: {EVERY_S:g})"
    parser.add_argument("--every", type=read_seconds, default=EVERY_S, metavar="S", help=about)
    parser.add_argument(
        "--once", action="store_true", help="print one screen on the whole run up to now, as plain text"
    )
    parser.add_argument("--json", action="store_true", help="print each screen as a line of JSON, with times in ns")
    parser.set_defaults(verb=show_live)


def show_live(options: argparse.Namespace, host: list[str]) -> int:
    screens = _read_screens(options)
    screen = next(screens)
    if options.once or options.json or not sys.stdout.isatty():
        for shown_screen in chain([screen], screens):
            text = json.dumps(shown_screen.make_document()) if options.json else "\n".join(shown_screen.lines())
            print(text, flush=True)
            if options.once:
                break
        return 0
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
            for screen in screens:
                shown.update(Text("\n".join(screen.lines())), refresh=True)
    except KeyboardInterrupt:
        return 0
    print("\n".join(screen.lines()))
    return 0


def _read_screens(options: argparse.Namespace) -> Iterator[Screen]:
    from instrument.agent.live_view import LiveSampler

    sampler = LiveSampler("")
    for number in count():
        try:
            with client.find_runs(options.run, memory=True) as runs:
                run = client.require_single_run("live", runs)
                if not sampler.shows_run(run.name):
                    sampler = LiveSampler(run.name)
                screen = sampler.make_screen(run.members, run.folded)
        except InstrumentError:
            if not number:
                raise
            return  # it is over
        yield replace(screen, problems=(run.empty_run_text,)) if run.empty_run_text else screen
        time.sleep(options.every)


def _add_dump(verbs: Verbs) -> None:
    parser = verbs.add_parser("dump", help="save the newest spans of a running service")
    add_run_argument(parser)
    parser.add_argument(
        "--last", type=read_time_ns, metavar="T", help="save only spans that ended in this time, such as 10s"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="the file to write; its suffix decides the form, as for `instrument convert` (default: RUN-dump.npz)",
    )
    parser.set_defaults(verb=save_run)


def save_run(options: argparse.Namespace, host: list[str]) -> int:
    run = read_run("dump", options.run, options.last)
    saved = merge_saved_files(run.read)
    path = Path(options.output or f"{run.name}-dump.npz")
    write_trace(path, choose_format(path), saved)
    print(f"{path}: {len(saved.trace.columns)} spans of {run.processes_text}")
    return 0


class RunRead(NamedTuple):
    """A run whose recordings have been read.

    - `ended`: the number of ended processes without a recording
    - `is_going`: True if a process of the run is alive
    """

    name: str
    read: list[Saved]
    ended: int
    is_going: bool

    @property
    def processes_text(self) -> str:
        ended = f", without {self.ended} that ended before" if self.ended else ""
        return f"{len(self.read)} process{'es' * (len(self.read) != 1)}{ended}"

    @property
    def header_line(self) -> str:
        return f"Run {printable(self.name)} {'is still going' if self.is_going else 'has ended'}: {self.processes_text}"


def read_run(verb: str, name: str | None, last_ns: int | None = None) -> RunRead:
    with client.find_runs(name, memory=True) as runs:
        run = client.require_single_run(verb, runs)
        now_ns = time.monotonic_ns()
        since_ns = 0 if last_ns is None else max(now_ns - last_ns, 0)
        read: list[Saved] = []
        for member in (member for member in run.members if member.memory >= 0 or member.lives):
            try:
                read.append(_read_recording(member.memory, since_ns, now_ns))
            except TraceError as problem:
                print_remark(verb, f"process {member.pid}", problem)
        ended = run.folded + sum(member.memory < 0 and not member.lives for member in run.members)
    if not read:
        why = run.empty_run_text or "no recording of its processes can be read"
        raise InstrumentError(f"{verb}: {run.name}: {why}")
    return RunRead(run.name, read, ended, bool(run.living_processes))


def _read_recording(memory: int, since_ns: int, end_ns: int) -> Saved:
    from instrument.recording.mapped import Mapped
    from instrument.trace.of_recording import read_spans_and_tally

    if memory < 0:
        raise TraceError("its recording cannot be read by other processes")
    with closing(Mapped(memory)) as mapped:
        return read_spans_and_tally(mapped, since_ns, end_ns)
