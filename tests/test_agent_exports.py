"""The child that exports for an agent: what ends it, or keeps it from one recording, costs the others nothing."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from instrument.agent.exports import Exports
from instrument.agent.processes import Process, Run

SETTINGS = {"endpoint": "http://127.0.0.1:9", "protocol": "http/protobuf"}


class Table:
    """An agent's exports, with a loop around them that turns until something has come true."""

    def __init__(self, folder: Path) -> None:
        self.selector = selectors.DefaultSelector()
        self.said: list[str] = []
        self.exports = Exports(self.selector, lambda: None, self.said.append)
        self._folder = folder

    def add(self, settings: dict[str, Any] | None = None) -> Process:
        """A process whose recording is no recording: the exporter says so, and is done with it."""
        path = self._folder / f"{time.monotonic_ns()}"
        path.write_bytes(bytes(100))
        facts = {"export": settings or SETTINGS}
        memory = os.open(path, os.O_RDWR)
        process = Process(run=Run("one"), pid=1, started=1, facts=facts, joined_ns=0, memory=memory)
        self.exports.add(process)
        return process

    def until(self, is_true: Callable[[], Any]) -> None:
        end = time.monotonic() + 30
        while not is_true():
            assert time.monotonic() < end, "it did not come true"
            for key, _ in self.selector.select(0.05):
                key.data(key.fd)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    found = Table(tmp_path)
    yield found
    found.exports.stop()
    found.selector.close()


def exporters() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def test_an_exporter_that_hears_nothing_for_long_has_another_one_in_its_place(table: Table) -> None:
    before = set(exporters())
    process = table.add()
    (child,) = set(exporters()) - before
    os.kill(child, signal.SIGSTOP)
    for _ in range(3000):
        table.exports.note_ended(process)
    process.ended_ns = 1
    table.until(lambda: not table.exports.waits_for(process.run))
    assert set(exporters()) - before != {child}


def test_an_exporter_that_is_asked_to_send_without_an_end_stays(table: Table) -> None:
    before = set(exporters())
    process = table.add()
    (child,) = set(exporters()) - before
    os.kill(child, signal.SIGSTOP)
    for _ in range(3000):
        table.exports.flush(process)
    os.kill(child, signal.SIGCONT)
    later = table.add()
    later.ended_ns = 1
    table.until(lambda: not table.exports.waits_for(later.run))
    assert set(exporters()) - before == {child}
