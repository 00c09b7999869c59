"""`instrument agent`: start an agent by hand, for processes that join at a given socket, or for a run that has lost its
agent."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path

from instrument.agent.agent import serve_on_socket
from instrument.agent.processes import Run
from instrument.cli.option_values import Verbs
from instrument.errors import InstrumentError
from instrument.runtime import agent_socket


def add_verbs(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "agent",
        help="start an agent by hand, such as in a container of its own",
        description="With --socket the agent serves processes until SIGTERM: those that start with "
        f"{agent_socket.VARIABLE}=PATH in their environment. With --run it serves that run until its end.",
    )
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument(
        "--socket", metavar="PATH", help="the path of the socket, in a folder that only this user may enter"
    )
    place.add_argument("--run", metavar="RUN", help="the run that lost its agent")
    parser.add_argument(
        "--captures", metavar="DIR", help="the folder for captures (default: that of each service's files)"
    )
    parser.set_defaults(verb=run_agent)


def run_agent(options: argparse.Namespace, host: list[str]) -> int:
    run = None
    try:
        if options.socket:
            path = Path(options.socket).absolute()
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        else:
            folder_by_run = {folder.name: folder for folder in agent_socket.list_runs()}
            if options.run not in folder_by_run:
                runs = ", ".join(folder_by_run) or "none"
                raise InstrumentError(
                    f"agent: there is no run {options.run}; the runs are: {runs}; `instrument ps` lists their processes"
                )
            path = folder_by_run[options.run] / agent_socket.SOCKET
            run = Run(options.run, agent_socket.parse_first_pid(options.run))
        agent_socket.refuse_shared_folder(path.parent)
        listener = agent_socket.listen_on_socket(path)
    except OSError as error:
        raise InstrumentError(f"agent: it cannot listen: {error}; choose another --socket") from error
    captures = Path(options.captures).absolute() if options.captures else None
    print(f"instrument: the agent listens at {path}", file=sys.stderr)
    is_ours = True
    try:
        with agent_socket.register_socket(path) if run is None else nullcontext():
            is_ours = serve_on_socket(listener, path.parent, run, captures=captures, says=True)
    finally:
        if is_ours:
            path.unlink(missing_ok=True)
        if is_ours and run is not None:
            agent_socket.remove_run_folder(path.parent)
    return 0
