"""The verbs that change running services: `on` and `off` switch recording, and `reload` applies a changed profile."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from instrument.agent import client
from instrument.cli import print_remark
from instrument.cli.option_values import PROCESSES, RUN, Verbs, add_run_argument, add_wait_option, read_count
from instrument.errors import InstrumentError
from instrument.profile.keys import load
from instrument.profile.model import Profile
from instrument.report.table import printable
from instrument.sessions.profile_reload import Answer, Request


def add_verbs(verbs: Verbs) -> None:
    _add_on_off(verbs)
    _add_reload(verbs)


def _add_on_off(verbs: Verbs) -> None:
    for name, does, on in (("on", "resume recording", True), ("off", "pause recording", False)):
        parser = verbs.add_parser(name, help=f"{does} in a running service, and print the answer of each process")
        add_run_argument(parser)
        parser.add_argument("--all", action="store_true", help="take all runs, without asking")
        add_wait_option(parser)
        parser.set_defaults(verb=functools.partial(switch_recording, on=on))


def switch_recording(options: argparse.Namespace, host: list[str], *, on: bool) -> int:
    """Switch recording on or off in processes, and print their answers. Returns the exit code.

    The exit code is 1 if a process does not answer. A change of several runs must be confirmed at a terminal.
    """
    missing = False
    with client.find_runs(options.run) as runs:
        several = [run for run in runs if run.living_processes]
        if len(several) > 1 and not (options.all or _confirm_change_of_all_runs(several, on=on)):
            return 2
        for run in runs:
            pids = [] if run.problem else [member.pid for member in run.living_processes]
            if not pids:
                print_remark(run.name, run.problem or run.empty_run_text or "none of its processes lives")
            answers = dict(client.send_request(run, Request(records=on)._asdict(), pids, options.wait)) if pids else {}
            for pid in pids:
                print(f"{pid}: {_describe_answer(answers.get(pid))}")
            missing = missing or not pids or any(pid not in answers for pid in pids)
    return int(missing)


def _confirm_change_of_all_runs(runs: Sequence[client.Asked], *, on: bool) -> bool:
    verb, names = "on" if on else "off", [run.description for run in runs]
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InstrumentError(
            f"{verb}: there are several runs: {'; '.join(names)}; name one of them, its service or a process "
            "id, or add --all"
        )
    print("\n".join(map(printable, names)), file=sys.stderr)
    print(f"instrument: {verb}: all {len(runs)} runs? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _describe_answer(answer: Mapping[str, Any] | None) -> str:
    if answer is None:
        return "no answer yet"
    if "records" in answer:
        return "records" if answer["records"] else "does not record"
    return str(answer.get("pending") or answer.get("error"))


def _add_reload(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "reload",
        help="apply a changed profile to a running service, without a restart",
        description="Each process of the run applies its changed profile, and prints an answer. With P, only processes "
        "with that profile do so. Exit code 0: all applied it; 1: a process did not answer in time, or needs a "
        "restart for a key; 2: the profile was refused, or there is no such process.",
    )
    parser.add_argument(
        "profile", nargs="?", metavar="P", help="the changed profile.yaml (default: that of each process)"
    )
    parser.add_argument(
        "--pid", type=read_count, metavar="N", help="only this process; P may be another profile of the same service"
    )
    parser.add_argument("--run", metavar=PROCESSES, help=f"only the processes of this run: {RUN}")
    add_wait_option(parser)
    parser.set_defaults(verb=reload_profile)


def reload_profile(options: argparse.Namespace, host: list[str]) -> int:
    path_of_profile = options.profile or os.environ.get("INSTRUMENT_PROFILE")
    profile = load(path_of_profile) if path_of_profile else Profile()  # a broken profile ends here, not in the service
    request = Request()
    if options.profile:
        # A process may have the service's name of a variable of its own; the variable here says which is meant.
        service = profile.service if profile.origins.get("service") == "OTEL_SERVICE_NAME" else None
        request = Request(str(Path(options.profile).absolute()), service, switch=options.pid is not None)
    answers = _request_reload(request, options)
    other_by_pid = {pid: str(answer["other"]) for pid, answer in answers.items() if answer and answer.get("other")}
    for pid, profile_there in other_by_pid.items():
        hint = "" if request.switch else f"; --pid {pid} gives it another file of its service"
        print(f"{pid}: not reloaded: {profile_there}{hint}")
        del answers[pid]
    if not answers:
        target = "process" if options.pid is None else f"process {options.pid}"
        if other_by_pid:
            raise InstrumentError(f"reload: no {target} has the profile {options.profile}; leave P out to reload all")
        raise InstrumentError(
            f"reload: there is no {target} of a run with an agent; a process without an agent needs `control: "
            "{watch: true}` in its profile, or instrument.reload() in its code"
        )
    for pid, answer in answers.items():
        print(f"{pid}: {_describe_reload(answer, options.wait)}")
    if any(answer and answer.get("error") for answer in answers.values()):
        return 2
    return int(any(answer is None or bool(answer.get("refused")) for answer in answers.values()))


def _request_reload(request: Request, options: argparse.Namespace) -> dict[str, Answer | None]:
    answers: dict[str, Answer | None] = {}
    try:
        with client.find_runs(options.run if options.pid is None else str(options.pid)) as runs:
            for run in runs:
                pids = [member.pid for member in run.members if member.lives and _is_selected_process(member, options)]
                if run.problem or not pids:
                    continue
                incoming = client.send_request(run, request._asdict(), pids, options.wait)
                answers |= {str(pid): None for pid in pids} | {str(pid): answer for pid, answer in incoming}
    except InstrumentError:
        if options.run is not None:
            raise
        # there is no run; processes may listen by themselves
    return answers


def _is_selected_process(member: client.Member, options: argparse.Namespace) -> bool:
    if not options.profile or options.pid is not None:
        return True
    try:
        return Path(str(member.facts["folder"]), str(member.facts["profile"])).samefile(options.profile)
    except OSError:
        return False


def _describe_reload(answer: Answer | None, waited_s: float) -> str:
    if answer is None:
        return f"no answer after {waited_s:g} s (--wait S gives more time); it follows when it reads the request"
    if answer.get("pending"):
        return str(answer["pending"])
    state = f"generation {answer.get('generation')} ({answer.get('digest')})"
    if answer.get("error"):
        return f"{state} stays in force: {answer['error']}"
    parts = [f"{word} {', '.join(map(str, answer[word]))}" for word in ("attached", "undone") if answer.get(word)]
    return "; ".join([state, *(parts or ["no probe changed"]), *map(str, answer.get("refused", ()))])
