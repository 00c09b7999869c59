"""Runs with processes that come and go: the report covers many, and those that ended long ago are kept folded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from raw_spans import counted

from instrument.agent import end_reports
from instrument.agent.end_reports import ReportedProcess
from instrument.recording.spans import Cost, Origin, Sample, Site, Span
from instrument.trace import file, merge
from instrument.trace.trace import Trace

MS = 1_000_000

Fold = Callable[..., str]


def worker(pid: int, requests: int = 4, *, at_ms: int = 0, name: str = "GET /x", died: str = "") -> Trace:
    """A worker that has answered requests, one in four of them with an error, on a thread of its own."""
    spans, thread = [], 1000 + pid

    def add(site: Site, parent_id: int, first: int, start_ns: int, took_ns: int, error: str | None = None) -> None:
        times = (start_ns, start_ns + took_ns, took_ns, took_ns)
        spans.append(Span(site, first + (parent_id > 0), parent_id, first, thread, 0, *times, error=error))

    for number in range(requests):
        first, start_ns = 1 + 2 * number, (at_ms + 10 * number) * MS
        add(Site(name, "request"), 0, first, start_ns, 8 * MS, "ValueError" if number % 4 == 3 else None)
        add(Site("step", "phase"), first, first, start_ns + MS, 4 * MS)
    origin = Origin(pid, "shop", 0, 0, "native", boot="b")
    return Trace(
        origin, 0, (at_ms + 10 * requests) * MS, spans, threads={thread: "MainThread"}, died=died,
        samples=[Sample("system_cpu", -1, at_ms * MS + number, 1.0) for number in range(requests)],
    )  # fmt: skip


def saved(trace: Trace, path: Path) -> str:
    """The trace as the file that a process leaves for the report of its run."""
    file.dump(path, trace, counted(trace.spans, trace.threads))
    return str(path)


@pytest.fixture
def fold(tmp_path: Path) -> Fold:
    """Folds workers into what was folded before, as the agent does: the path of it now."""
    number = iter(range(1000))

    def folds(workers: list[Trace], before: str = "") -> str:
        paths = [saved(one, tmp_path / f"{one.origin.pid}-{next(number)}-left.npz") for one in workers]
        into = str(tmp_path / f"before-{next(number)}.npz")
        answer = end_reports.merge_files([*([before] if before else []), *paths], into)
        return str(answer["path"])

    return folds


def report(parts: list[ReportedProcess]) -> str:
    return end_reports.combined_report(parts, ["brief"], {})["report"]


def row(text: str, name: str) -> list[str]:
    """The words of a row behind its name."""
    tables = text.partition("\nWindow: ")[2]  # below the sentences
    line, *_ = [line for line in tables.splitlines() if line.startswith(f"{name} ")]
    return line.removeprefix(name).split()


def test_the_head_of_a_report_counts_all_requests_and_says_of_which_its_parts_are(
    fold: Fold, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "SPANS_KEPT", 8)
    before = fold([worker(pid, at_ms=100 * pid) for pid in range(1, 9)])
    newest = saved(worker(9, at_ms=900), tmp_path / "9.npz")
    text = report([ReportedProcess("that ended before", before, True, 8), ReportedProcess("9 (in order)", newest)])
    assert "requests: 36; 9 of them ended with an error; shown below: the newest 8" in text
    assert row(text, "GET /x")[:4] == ["8", "of", "36", "2"]
    assert row(text, "step")[2] == "36"
    assert "Processes: 9\n  8 that ended before\n  9 (in order)\n" in text


def test_nothing_is_missing_while_all_spans_of_ended_processes_are_kept(fold: Fold) -> None:
    before = fold([worker(pid, at_ms=100 * pid) for pid in range(1, 9)])
    text = report([ReportedProcess("that ended before", before, True, 8)])
    assert "requests: 32; 8 of them ended with an error\n" in text
    assert row(text, "GET /x")[:2] == ["32", "8"]
    assert "Not kept: nothing was lost." in text


def test_an_endpoint_of_which_no_span_is_kept_any_more_is_counted(fold: Fold, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "SPANS_KEPT", 4)
    before = fold([worker(1, name="GET /old"), worker(2, at_ms=100)])
    text = report([ReportedProcess("that ended before", before, True, 2)])
    assert "requests: 8; 2 of them ended with an error; shown below: the newest 2" in text


def test_repeated_folding_does_not_grow_the_file(fold: Fold, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("SPANS_KEPT", 8), ("SAMPLES_KEPT", 10), ("PATHS_KEPT", 6), ("NOTES_KEPT", 3)):
        monkeypatch.setattr(merge, name, most)
    before, sizes = "", []
    for turn in range(6):
        pids = range(10 * turn + 1, 10 * turn + 9)
        workers = [worker(pid, at_ms=100 * pid, name=f"GET /{pid}", died=f"Process {pid} ended.") for pid in pids]
        before = fold([replace(one, notes=[f"rule {one.origin.pid} matched nothing"]) for one in workers], before)
        found = file.load(before)
        assert (len(found.trace.columns), len(found.trace.samples), found.trace.died) == (8, 10, "")
        assert set(found.trace.threads.values()) <= {f"shop {pid} MainThread" for pid in pids}
        assert found.read_or_count_totals().threads == {0: "(ended threads)"}
        assert found.read_or_count_totals().calls == 64 * (turn + 1)
        assert len(found.trace.notes) == 4
        assert found.trace.notes[-1] == merge.MORE_NOTES
        sizes.append((len(found.read_or_count_totals()), len(found.trace.columns.sites)))
    assert sizes[1:] == sizes[1:2] * 5


def test_a_process_that_has_the_number_of_one_that_ended_long_ago_counts_too(fold: Fold, tmp_path: Path) -> None:
    before = fold([worker(1), worker(2, at_ms=100)])
    again = saved(worker(1, at_ms=40), tmp_path / "again.npz")
    text = report([ReportedProcess("that ended before", before, True, 2), ReportedProcess("1 (in order)", again)])
    assert "requests: 12;" in text
    assert row(text, "step")[2] == "12"


def test_a_recording_that_cannot_be_read_is_counted_and_the_others_stay(tmp_path: Path) -> None:
    whole, broken = saved(worker(1), tmp_path / "1.npz"), tmp_path / "2.npz"
    broken.write_bytes(Path(whole).read_bytes()[:100])
    answer = end_reports.merge_files([whole, str(broken)], str(tmp_path / "before.npz"))
    assert answer["unread"] == 1
    assert file.load(answer["path"]).read_or_count_totals().calls == 8


def test_a_report_of_many_processes_lists_abnormal_ends_first(tmp_path: Path) -> None:
    path = saved(worker(1), tmp_path / "1.npz")
    parts = [ReportedProcess(f"{pid} (in order)", path if pid == 1 else "") for pid in range(1, 30)]
    parts.append(ReportedProcess("30 (without a goodbye (SIGKILL))", "", is_notable=True))
    lines = report(parts).partition("Processes: 30\n")[2].splitlines()
    assert len(lines) == end_reports.MOST_NAMED_PROCESSES + 1
    assert lines[-2].strip().startswith("30 (without a goodbye (SIGKILL))")
    assert lines[-1].strip() == "and 18 more"


def test_a_report_of_many_dead_processes_has_their_number_and_no_list(tmp_path: Path) -> None:
    paths = [saved(worker(pid, died=f"Process {pid} was gone."), tmp_path / f"{pid}.npz") for pid in range(1, 16)]
    text = report([ReportedProcess("x", path) for path in paths])
    assert "Process 1 was gone. Process 2 was gone. 12 more ended without a goodbye. Process 15 was gone." in text


def test_a_note_of_many_processes_is_reported_once_even_if_a_dead_one_had_none(tmp_path: Path) -> None:
    note = "1 target was never called: engine:hang"
    workers = [worker(1, died="Process 1 was gone."), *(replace(worker(pid), notes=[note]) for pid in range(2, 7))]
    paths = [saved(one, tmp_path / f"{one.origin.pid}.npz") for one in workers]
    text = " ".join(report([ReportedProcess("x", path) for path in paths]).split())
    assert text.count(note) == 1
    assert f"Not observed: shop 2, shop 3 and 3 more: {note}" in text
    assert f"Not observed: shop 2: {note}" in report([ReportedProcess("x", path) for path in paths[:2]])


def test_the_cost_is_of_all_calls_even_of_processes_that_ended_before_they_reported_theirs(tmp_path: Path) -> None:
    told = saved(replace(worker(1), cost=Cost(8, 100.0, 1, 0, 200.0)), tmp_path / "1.npz")
    gone = saved(worker(2, died="Process 2 was gone."), tmp_path / "2.npz")
    text = report([ReportedProcess("1 (in order)", told), ReportedProcess("2 (without a goodbye)", gone)])
    assert "(16 calls x 100 ns" in text
