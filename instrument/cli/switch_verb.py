"""`instrument on` and `instrument off`: have the processes of a run record, or stop recording until `on`."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from instrument.agent import client
from instrument.cli.option_values import Verbs, seconds
from instrument.cli.ps_verb import RUN
from instrument.errors import InstrumentError
from instrument.report.table import safe
from instrument.sessions.control_client import WAIT_S, Request


def add(verbs: Verbs) -> None:
    for name, does, on in (("on", "record again", True), ("off", "stop recording", False)):
        parser = verbs.add_parser(name, help=f"have the processes of a run {does}; each answers")
        parser.add_argument("run", nargs="?", metavar="RUN|SERVICE|PID", help=f"{RUN} (default: the only one)")
        parser.add_argument("--all", action="store_true", help="all that are found, unasked")
        limit = f"the longest, for the answers (default: {WAIT_S:g})"
        parser.add_argument("--wait", type=seconds, default=WAIT_S, metavar="S", help=limit)
        parser.set_defaults(verb=functools.partial(switch, on=on))


def switch(options: argparse.Namespace, host: list[str], *, on: bool) -> int:
    """Ask the processes, and print what each answers. Returns the exit code: 1 where an answer is missing.

    Ask first where there are several runs. Refuse where there is no terminal to ask at.
    """
    missing = False
    with client.asked(options.run) as runs:
        several = [run for run in runs if run.living]
        if len(several) > 1 and not (options.all or _is_wanted(several, on=on)):
            return 2
        for run in runs:
            if run.problem:
                print(f"instrument: {run.name}: {run.problem}", file=sys.stderr)
                missing = True
                continue
            pids = [member.pid for member in run.living]
            if not pids:
                print(f"instrument: {run.name}: {run.none_joined or 'none of its processes lives'}", file=sys.stderr)
                missing = True
                continue
            answers = dict(client.tell(run, Request(records=on).asked(), pids, options.wait))
            for pid in pids:
                print(f"{pid}: {_word(answers.get(pid))}")
            missing = missing or any(pid not in answers for pid in pids)
    return int(missing)


def _is_wanted(runs: Sequence[client.Asked], *, on: bool) -> bool:
    """Return True where the user at a terminal means all of the runs. Raises `InstrumentError` without a terminal."""
    verb, names = "on" if on else "off", [run.described for run in runs]
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InstrumentError(
            f"{verb}: asked for one run, found several: {'; '.join(names)}; name one, its service or a process, or "
            "give --all"
        )
    print("\n".join(map(safe, names)), file=sys.stderr)
    print(f"instrument: {verb}: all {len(runs)} runs? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _word(answer: Mapping[str, Any] | None) -> str:
    if answer is None:
        return "no answer yet"
    if "records" in answer:
        return "records" if answer["records"] else "does not record"
    return str(answer.get("pending") or answer.get("error"))
