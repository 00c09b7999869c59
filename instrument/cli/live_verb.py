"""`instrument live`: what a run is doing now, on a screen that is drawn anew every so often."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace

from instrument.agent import client
from instrument.cli.option_values import Verbs, seconds
from instrument.cli.ps_verb import RUN
from instrument.errors import InstrumentError

EVERY_S = 1.0


def add(verbs: Verbs) -> None:
    parser = verbs.add_parser("live", help="requests in flight, rates and hottest places of a run, as it is now")
    parser.add_argument("run", nargs="?", metavar="RUN|SERVICE|PID", help=f"{RUN} (default: the only one)")
    parser.add_argument("--every", type=seconds, default=EVERY_S, metavar="S", help=f"seconds (default: {EVERY_S:g})")
    parser.add_argument("--once", action="store_true", help="one look at all since the begin, as plain text")
    parser.add_argument("--json", action="store_true", help="each look as a line of JSON, times in ns")
    parser.set_defaults(verb=live)


def live(options: argparse.Namespace, host: list[str]) -> int:
    """Show the run until it is over or somebody presses Ctrl-C. Returns the exit code."""
    from instrument.agent.screen import Looker, Screen

    looker = Looker("")

    def look() -> Screen:
        nonlocal looker
        with client.asked(options.run, memory=True) as runs:
            run = client.only("live", runs)
            if not looker.is_of(run.name):
                looker = Looker(run.name)
            screen = looker.look(run.members, run.folded)
            return replace(screen, problems=(run.none_joined,)) if run.none_joined else screen

    screen = look()
    if options.once or options.json or not sys.stdout.isatty():
        while True:
            print(json.dumps(screen.document()) if options.json else "\n".join(screen.lines()), flush=True)
            if options.once:
                return 0
            time.sleep(options.every)
            try:
                screen = look()
            except InstrumentError:
                return 0  # it is over
    try:
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        raise InstrumentError(
            "live: the screen takes rich (pip install 'instrument-sdk[live]'); --once prints one look without it"
        ) from None
    try:
        with Live(Text("\n".join(screen.lines())), screen=True, auto_refresh=False) as shown:
            while True:
                time.sleep(options.every)
                try:
                    screen = look()
                except InstrumentError:
                    break  # it is over
                shown.update(Text("\n".join(screen.lines())), refresh=True)
    except KeyboardInterrupt:
        return 0
    print("\n".join(screen.lines()))
    return 0
