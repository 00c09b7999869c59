"""The end of a session has one time limit. Each wait leaves the rest of it to those after it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from otlp_collectors import Collector, collecting, swallow
from test_agent import agents, children_of, folder, until
from test_agent import begin as begin_run
from test_agent_export import SERVICE, profile
from test_handover import agent, begin, collector, listener, serve

from instrument import clock as clocks
from instrument.clock import LEAST_S, Deadline
from instrument.runtime import agent_socket
from instrument.sessions import leaving
from instrument.sessions.membership import ANSWER_LIMIT_S, Membership

__all__ = ["agent", "collector", "folder", "listener"]


def test_the_waits_of_an_end_take_no_longer_together_than_it_may(
    collector: Collector, agent: socket.socket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a clock that goes on by the whole of each wait that is begun, as where all that is waited for hangs."""
    clock, waits = SimpleNamespace(now=0.0), list[float]()
    left_s, last_s = Deadline.seconds_left, Deadline.seconds_for_last_wait

    def spend(wait_s: float) -> float:
        clock.now += wait_s
        waits.append(wait_s)
        return wait_s

    def spend_last(self: Deadline) -> float:
        wait_s = last_s(self)  # which spends what is left
        spend(wait_s - waits[-1])
        return wait_s

    def answer(_: Membership, name: str, wait_s: float) -> Mapping[str, Any]:
        return {name: {"wait": True} if wait_s == ANSWER_LIMIT_S and spend(wait_s) else {"report": "that of the run"}}

    monkeypatch.setenv("INSTRUMENT_RUN_PID", str(os.getpid()))
    monkeypatch.setattr(clocks, "time", SimpleNamespace(**{**vars(time), "monotonic": lambda: clock.now}))
    monkeypatch.setattr(leaving, "STALLED_AGENT_S", 0.01)
    monkeypatch.setattr(Membership, "await_message", answer)
    running = begin(collector, ", summary: {to: stderr}")
    serve(3)
    until(lambda: running.threads.have_begun)
    monkeypatch.setattr(Deadline, "seconds_left", lambda self, most_s=99.0: spend(left_s(self, most_s)))
    monkeypatch.setattr(Deadline, "seconds_for_last_wait", spend_last)
    running.stop()
    told = capsys.readouterr().err
    assert "that of the run" in told
    assert sum(waits) <= leaving.EXIT_LIMIT_NS / 1e9, waits


def test_a_wait_has_no_more_than_the_deadline_leaves_and_a_last_one_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(clocks, "time", SimpleNamespace(**{**vars(time), "monotonic": lambda: clock.now}))
    whole = Deadline(5.0)
    for_threads = whole.make_earlier_deadline(2.0)
    assert (whole.seconds_left(), for_threads.seconds_left(), for_threads.seconds_left(1.0)) == (5.0, 3.0, 1.0)
    clock.now += 4.0
    assert (whole.seconds_left(), for_threads.seconds_left(), for_threads.seconds_left(1.0)) == (1.0, 0.0, 0.0)
    clock.now += 4.0  # a large file
    assert (whole.seconds_left(), whole.seconds_for_last_wait()) == (0.0, LEAST_S)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_end_is_over_in_time_next_to_an_agent_and_a_collector_that_hang(
    folder: Path, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMPATIENT", "all")
    with collecting(swallow) as server:
        profile(server, more="  summary: {to: stderr}", timeout=", timeout: 1000s")
        service = begin_run(f"{SERVICE}\nfor x in range(100): serve(x)\nprint('ready', flush=True)\nsys.stdin.read()\n")
        assert service.stdout is not None
        service.stdout.readline()
        until(lambda: server.tries)  # by the agent
        ((own, *children),) = [[one, *children_of(one)] for one in agents()]
        for pid in (own, *(children if how == signal.SIGSTOP else [])):
            os.kill(pid, how)
        began = time.monotonic()
        service.terminate()
        _, errors = service.communicate(timeout=240)
        took_s = time.monotonic() - began
        if how == signal.SIGSTOP:
            for pid in (own, *children):
                os.kill(pid, signal.SIGCONT)
        else:  # nobody is left to remove it
            shutil.rmtree(agent_socket.list_runs()[0].parent)
    assert service.returncode == -signal.SIGTERM
    assert took_s < 100
    assert "Summary of shop" in errors
    assert "Not kept: 1010 " in errors
