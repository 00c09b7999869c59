"""`instrument ps`: the runs of this user and their processes."""

from __future__ import annotations

import argparse
import json
import sys

from instrument.agent import client
from instrument.cli.option_values import Verbs
from instrument.report.table import safe

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
        for line in screen.process_lines():
            print(line)
        if run.folded:
            print(f"and {run.folded} more that ended before")
        for problem in filter(None, [run.none_joined, run.unseen, *screen.problems]):
            print(safe(problem))
    return 0
