"""What somebody asks an agent: of the processes that it knows, or to have them do something."""

from __future__ import annotations

import os
import socket
from typing import Any

from instrument.agent import departure
from instrument.agent.loop import EventLoop
from instrument.agent.peer import Connection
from instrument.agent.processes import Process
from instrument.agent.runs import Runs
from instrument.runtime import packets

ASKED_S = 30.0
"""The longest that who asks something of the processes waits for their answers."""


class Questions:
    """Those that have not been answered yet by everybody who was asked."""

    def __init__(self, loop: EventLoop, runs: Runs) -> None:
        self._loop = loop
        self._runs = runs
        self._questions: dict[int, Question] = {}
        self._numbers = 0

    def forget(self, asker: Connection) -> None:
        """Who asked has gone."""
        for question in list(self._questions.values()):
            if question.asker is asker:
                del self._questions[question.number]

    def ask(self, connection: Connection, message: packets.Message) -> None:
        """Answer what is asked, or have the processes do so."""
        what = message["ask"]
        if what == "processes":
            for run in self._runs:
                for process in run.processes:
                    process.look()
                    memory = [process.memory] if message.get("memory") and process.memory >= 0 else []
                    self._loop.send(connection, {"process": departure.facts_of(process)}, memory)
            runs = [
                {
                    "run": run.name,
                    "first": run.first,
                    "lost": self._runs.exports.lost,
                    "folded": run.folded_ends.total(),
                }
                for run in self._runs
            ]
            facts = {"agent": os.getpid(), "runs": runs, "faults": self._loop.faults, "unseen": self._runs.unseen()}
            self._loop.send(connection, {"end": facts})
        elif what == "scrape":
            self._scrape(connection, str(message.get("run")))
        elif what == "do":
            self._ask_processes(connection, dict(message["do"]), [int(pid) for pid in message.get("pids") or ()])
        else:
            connection.is_broken = True

    def _scrape(self, connection: Connection, run: str) -> None:
        """Hand a connection to who answers a scrape of the run."""
        found = next((one for one in self._runs if one.name == run), None)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            if found is not None:
                self._runs.exports.scrape(found, theirs)
            self._loop.send(connection, {"end": {"agent": os.getpid()}}, [ours.fileno()])

    def _ask_processes(self, connection: Connection, wanted: dict[str, Any], pids: list[int]) -> None:
        self._numbers += 1
        question = Question(self._numbers, connection)
        for run in self._runs:
            for process in run.living():
                if pids and process.pid not in pids:
                    continue
                if process.connection is None:
                    answer = {"error": "it has closed its connection to the agent"}
                    self._loop.send(connection, {"pid": process.pid, "answer": answer})
                    continue
                self._loop.send(process.connection, {"do": wanted, "number": question.number})
                if process.hears:
                    question.waiting.add(process)
                else:
                    why = "it has recorded nothing yet; it will do so before it records anything"
                    self._loop.send(connection, {"pid": process.pid, "answer": {"pending": why}})
        self._questions[question.number] = question
        self._loop.after(ASKED_S, lambda: self._questions.pop(question.number, None))
        self._end_question(question)

    def answered(self, process: Process, number: int, answer: dict[str, Any]) -> None:
        """A process has answered; who asked is told."""
        question = self._questions.get(number)
        if question is None or process not in question.waiting:
            return
        question.waiting.discard(process)
        self._loop.send(question.asker, {"pid": process.pid, "answer": answer})
        self._end_question(question)

    def _end_question(self, question: Question) -> None:
        question.waiting = {one for one in question.waiting if one.lives}
        if not question.waiting and self._questions.pop(question.number, None) is not None:
            self._loop.send(question.asker, {"end": {"agent": os.getpid()}})


class Question:
    """What somebody asks the processes, and those that have not answered yet."""

    def __init__(self, number: int, asker: Connection) -> None:
        self.number = number
        self.asker = asker
        self.waiting: set[Process] = set()
