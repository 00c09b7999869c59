"""`capture: {to: FOLDER}`: what is kept is in files while the service runs, without a collector, within a limit."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from otlp_spans import ORIGIN
from test_agent import agents, begin, children_of, folder, until

from instrument.agent.exporter_process import EXPORTER_NAME
from instrument.otlp import file_exports
from instrument.otlp.export_facts import Ids
from instrument.otlp.file_exports import REMOVED, KeptFiles
from instrument.otlp.span_queue import Source
from instrument.recording.spans import Site, Span
from instrument.runtime import agent_socket
from instrument.trace import file

__all__ = ["folder"]

SERVICE = """
import os, sys, time
import instrument

def ask(name, fails=False):
    try:
        with instrument.scope(name, kind="request"):
            with instrument.scope("part"):
                if fails:
                    raise ValueError
    except ValueError:
        pass

for line in sys.stdin:
    word = line.strip()
    if word == "ask":
        for _ in range(50):
            ask("quick")
        ask("broken", fails=True)
    elif word == "child":
        if os.fork() == 0:
            ask("child", fails=True)
            sys.exit(0)
        os.wait()
    print(word, flush=True)
"""


def kept() -> Counter[str]:
    """The requests that files have by now, each with its part."""
    found: Counter[str] = Counter()
    for path in Path("captures").glob("shop-*-kept.npz"):
        spans = file.load(path).trace.spans
        ids = {span.span_id for span in spans}
        assert all(span.parent_id in ids for span in spans if span.site.name == "part")
        found.update(span.site.name for span in spans if span.site.kind == "request")
    return found


@pytest.mark.slow
def test_kept_requests_are_in_files_while_the_service_runs_and_after_a_kill_of_the_exporter() -> None:
    Path("profile.yaml").write_text("service: shop\ncapture: {sample: 0, errors: true, to: captures/}\n")
    service = begin(SERVICE)
    assert service.stdin is not None
    assert service.stdout is not None

    def do(word: str) -> None:
        assert service.stdin is not None
        assert service.stdout is not None
        service.stdin.write(f"{word}\n")
        service.stdin.flush()
        assert service.stdout.readline() == f"{word}\n", service.communicate()

    do("ask")
    do("child")
    until(lambda: kept() == {"broken": 1, "child": 1})
    (agent,) = agents()
    (exporter,) = children_of(agent, EXPORTER_NAME)
    os.kill(exporter, signal.SIGKILL)
    do("ask")
    _, errors = service.communicate(timeout=240)
    until(lambda: not agent_socket.list_runs())
    assert kept() == {"broken": 2, "child": 1}
    told = [line for line in errors.splitlines() if "kept requests are written into captures/" in line]
    assert len(told) == 1
    assert "`instrument live` shows" in errors
    assert "lost" not in errors
    assert {path.stat().st_mode & 0o777 for path in Path("captures").iterdir()} == {0o600}


def tree(number: int) -> list[Span]:
    site = Site("ask", "request")
    return [Span(site, number, 0, number, 1, 0, number * 1000, number * 1000 + 500, 500, 500)]


def test_files_keep_within_the_limit_and_the_newest_one_reports_how_many_went(
    tmp_path: Path,
) -> None:
    home = tmp_path / "captures"
    source = Source(Ids(), ORIGIN, dict, dict)
    files = KeptFiles(home, "20261123T160205-2", 25_000)
    for number in range(1, 11):
        files.add_spans(tree(number), source)
        files.write_spans()
    left = sorted(home.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert sum(path.stat().st_size for path in left) <= 25_000
    traces = [file.load(path) for path in left]
    told = sum(found.trace.losses.get(REMOVED, 0) for found in traces)
    assert 0 < len(left) < 10
    assert told + len(left) == 10
    assert traces[-1].trace.spans[0].start_ns == 10_000


def test_a_failed_write_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "captures").write_text("a file")
    files = KeptFiles(tmp_path / "captures", "20261123T160205-2", 1 << 20)
    for number in (1, 2):
        files.add_spans(tree(number), Source(Ids(), ORIGIN, dict, dict))
        files.write_spans()
    (message,) = caplog.messages
    assert message.startswith("capture.to: 1 spans that are kept are lost")


def test_much_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_exports, "FILE_SPANS", 2)
    files = KeptFiles(tmp_path / "captures", "20261123T160205-2", 1 << 20)
    for number in (1, 2):
        files.add_spans(tree(number), Source(Ids(), ORIGIN, dict, dict))
        if files.is_due:
            files.write_spans()
    (path,) = (tmp_path / "captures").iterdir()
    assert len(file.load(path).trace.spans) == 2
