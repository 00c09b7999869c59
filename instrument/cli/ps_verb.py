"""`instrument ps`: the runs of this user and their processes."""

from __future__ import annotations

import argparse
import json
import sys

from instrument.agent import client
from instrument.agent.processes import GOODBYE
from instrument.cli.option_values import Verbs
from instrument.report.table import named_table, number, safe

RUN = (
    "a run, as far as it takes to tell it from others, a service, the number of a process, or the path of an agent's "
    "socket; INSTRUMENT_AGENT may hold that path"
)


def add(verbs: Verbs) -> None:
    parser = verbs.add_parser("ps", help="list the runs and their processes, with what each records, costs and loses")
    parser.add_argument("run", nargs="?", metavar="RUN|SERVICE|PID", help=f"{RUN} (default: all)")
    parser.add_argument("--json", action="store_true", help="the same as one JSON document, times in ns")
    parser.set_defaults(verb=ps)


def ps(options: argparse.Namespace, host: list[str]) -> int:
    """Print the runs. Returns the exit code."""
    from instrument.agent.screen import Looker

    with client.asked(options.run, memory=True) as runs:
        seen = [(run, Looker(run.name).look(run.members, run.folded)) for run in runs]
    if options.json:
        documents = [
            {"run": run.name, "agent": run.agent, "problem": run.problem or run.none_joined, "unseen": run.unseen,
             **screen.document()}
            for run, screen in seen
        ]  # fmt: skip
        json.dump({"runs": documents}, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return 0
    for run, screen in seen:
        agent = f"agent {run.agent}" if run.agent else run.problem
        print(f"Run {safe(run.name)}, {safe(agent)}")
        rows = [
            [process.service, str(process.pid), "ended" if process.state == GOODBYE else process.state,
             number(None if process.up_ns is None else process.up_ns / 1e9),
             f"{process.generation} ({process.digest})", _cell(process.calls),
             "-" if process.cost_ratio is None else f"{100 * process.cost_ratio:.2g}%", _cell(process.lost)]
            for process in screen.processes
        ]  # fmt: skip
        header = ["Service", "Process", "State", "For, s", "Profile", "Calls", "Cost", "Lost"]
        if rows:
            print("\n".join(named_table(header, rows, 0)))
        if run.folded:
            print(f"and {run.folded} more that ended before")
        for problem in filter(None, [run.none_joined, run.unseen, *screen.problems]):
            print(safe(problem))
    return 0


def _cell(count: int | None) -> str:
    return "-" if count is None else str(count)
