"""Writes the ended requests of running processes into files: all requests into Parquet files, and the requests kept by
tail sampling into recordings.

A Parquet file is written on this machine and closed after a while. For an object store, a thread then uploads it. If
this exporter is killed, the next exporter counts the rows in unfinished files as lost.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from instrument.errors import InstrumentError, TraceError
from instrument.otlp.span_queue import CLOCK_DRIFT_NS
from instrument.profile.model import Parquet
from instrument.recording.export_checkpoint import losses_by_name
from instrument.recording.memory_layout import OVERWRITTEN
from instrument.runtime import agent_socket, file_writing
from instrument.runtime.faults import logger
from instrument.trace import file as saved_file
from instrument.trace.dataset_files import DatasetWriter, Folder
from instrument.trace.dataset_sources import ProcessWindow, SettledRows, make_window_tables
from instrument.trace.dataset_tables import DatasetProcess, import_pyarrow
from instrument.trace.decisions import RememberedTraces
from instrument.trace.of_recording import read_origin
from instrument.trace.trace import Trace

if TYPE_CHECKING:
    from instrument.otlp.recording_export import RecordingExport
    from instrument.otlp.span_queue import Source
    from instrument.recording.spans import Span
    from instrument.trace.decisions import Decisions

GROUP_ROWS = 5_000
"""The number of rows per row group of a Parquet file. Rows are collected in memory, at 350 bytes each."""

JOURNAL = "journal.json"

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds before the first retry of an upload, and the maximum number of seconds before a later retry."""


def decode_dataset_settings(document: Mapping[str, Any]) -> Parquet:
    import msgspec

    return msgspec.convert(document, Parquet, strict=False)


def limit_pyarrow() -> None:
    """Limit pyarrow to one thread, and return freed memory to the system. The service's own processes do not call
    this."""
    arrow = import_pyarrow()
    arrow.set_cpu_count(1)
    arrow.set_memory_pool(arrow.system_memory_pool())


class _SpooledFile(NamedTuple):
    """A complete file that waits for its upload. `name` is its path in the dataset."""

    path: Path
    name: str
    rows: int
    size_bytes: int


class DatasetExport:
    """Writes the Parquet files of one exporter, on one thread. `key` names the run. `counts` has the numbers of
    `stored`, lost (`unstored`) and unwritten (`storing`) rows.

    Files that wait for their upload take at most `disk_bytes`; above that, the oldest are dropped. Raises
    `InstrumentError` if pyarrow is missing or the path cannot be used.
    """

    def __init__(self, settings: Parquet, key: str, disk_bytes: int) -> None:
        self._folder = Folder(settings.path)
        self._every_s = settings.every_ns / 1e9
        digest = blake2b(repr((key, settings.path)).encode(errors="surrogatepass"), digest_size=8).hexdigest()
        root = Path(tempfile.gettempdir()) / f"instrument-{os.geteuid()}-dataset"  # this user's
        root.mkdir(mode=0o700, exist_ok=True)
        agent_socket.refuse_shared_folder(root)
        self._spool = root / digest
        self.counts: Counter[str] = Counter()
        self._uploads = None if self._folder.is_local else _Uploads(self._folder, self._spool, disk_bytes, self.counts)
        self._local = self._folder if self._uploads is None else Folder(str(self._spool))
        self._name = f"{digest[:8]}{os.urandom(4).hex()}"
        self._waiting: dict[str, list[Any]] = {}
        self._rows = self._number = self._reported = 0
        self._writer: DatasetWriter | None = None
        self._due_at = 0.0
        self._problem = ""
        self._remembered = RememberedTraces()
        self.members: set[RecordingExport] = set()
        """The recordings whose settled requests are written."""
        self._windows: dict[RecordingExport, tuple[int, Counter[str]]] = {}
        """The end of each recording's last window in ns, and the losses until then."""
        self._whole_windows: dict[str, tuple[int, Counter[str]]] = {}
        """The last window in a complete file, by the key of the recording. The next exporter continues after this
        window."""
        self._resume_from_journal()

    def _resume_from_journal(self) -> None:
        """Upload the complete files of a killed exporter. The rows in its unfinished files are lost."""
        self._spool.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(OSError, ValueError, KeyError, TypeError):
            journal = json.loads((self._spool / JOURNAL).read_text("utf-8"))
            lost = int(journal["rows"])
            windows = dict(journal["windows"])
            self._whole_windows = {key: (int(end_ns), Counter(losses)) for key, (end_ns, losses) in windows.items()}
            for part in journal["parts"]:
                self._local.remove(str(part))
            self._count_lost_rows(lost, "its exporter was killed before it had closed the files")
        (self._spool / JOURNAL).unlink(missing_ok=True)
        if self._uploads is not None:
            for path in sorted(self._spool.rglob("*.parquet")):
                with suppress(OSError, ValueError):
                    self._uploads.add(path)

    def _count_lost_rows(self, rows: int, why: object) -> None:
        self.counts["unstored"] += rows
        if rows and str(why) != self._problem:
            self._problem = str(why)
            logger.warning("export.parquet: %d rows are lost, later ones without a word: %s", rows, why)

    def put_settled_requests(self, members: Sequence[RecordingExport], decisions: Decisions, now_ns: int) -> None:
        processes = [_describe_process(member) for member in members]
        intervals_of = [member.find_device_intervals for member in members]
        try:
            rows = SettledRows(decisions, processes, intervals_of, self._remembered, now_ns)
            self.buffer_rows(rows.make_tables(np.array([member in self.members for member in members], np.bool_)))
        except Exception as fault:  # what another process has recorded may be anything
            self._count_lost_rows(1, f"{type(fault).__name__}: {fault}")

    def put_window(self, member: RecordingExport) -> None:
        since = self._windows.get(member) or self._whole_windows.get(member.key)
        process, (since_ns, before) = _describe_process(member), since or (0, Counter[str]())
        facts, losses = process.facts, Counter({**member.mapped.losses(), **losses_by_name(member.fates)})
        del losses[OVERWRITTEN]  # the reader counts those that it has missed
        samples = [sample for sample in member.mapped.read_samples(since_ns) if since_ns < sample.at_ns <= facts.end_ns]
        window = replace(facts, start_ns=since_ns or facts.start_ns, losses=dict(losses - before), samples=samples)
        self._windows[member] = facts.end_ns, losses
        self.buffer_rows(make_window_tables([ProcessWindow(0, window, process.offset_ns)], [process]))

    def remove_recording(self, member: RecordingExport) -> None:
        if member.source is not None:
            self.put_window(member)
        self._windows.pop(member, None)
        self.members.discard(member)

    def buffer_rows(self, tables: Iterable[tuple[str, Any]]) -> None:
        for name, rows in tables:
            if not self._rows:
                self._due_at = time.monotonic() + self._every_s
            parts = self._waiting.setdefault(name, [])
            parts.append(rows)
            self._rows += len(rows)
            if sum(map(len, parts)) >= GROUP_ROWS:
                self._write_table(name)
        self._write_journal()

    def _write_table(self, name: str) -> None:
        parts = self._waiting.pop(name)
        if self._writer is None:
            self._writer = DatasetWriter(self._local, f"{self._name}-{self._number}", fills=not self._number)
        try:
            self._writer.write(name, import_pyarrow().concat_tables(parts).combine_chunks())
        except OSError as problem:
            self._discard_open_files(problem)

    def _report_outcome(self, *, is_written: bool) -> None:
        for member in self.members:
            count, member.unwritten = member.unwritten, 0
            member.count_written_spans(count, is_written=is_written)

    def _discard_open_files(self, problem: object) -> None:
        self._report_outcome(is_written=False)
        if self._writer is not None:
            self._writer.discard()
        self._count_lost_rows(self._rows, problem)
        self._writer, self._rows, self._waiting = None, 0, {}

    def _write_journal(self) -> None:
        self.counts["storing"] = self._rows + (0 if self._uploads is None else self._uploads.waiting_rows)
        parts = [] if self._writer is None else self._writer.part_names
        with suppress(OSError), file_writing.open_replacement(self._spool / JOURNAL) as file:
            file.write(json.dumps({"rows": self._rows, "parts": parts, "windows": self._whole_windows}).encode())

    def count_newly_lost_rows(self) -> int:
        before, self._reported = self._reported, self.counts["unstored"]
        return self._reported - before

    @property
    def is_due(self) -> bool:
        return bool(self._rows) and time.monotonic() >= self._due_at

    def close_files(self) -> None:
        while self._waiting:
            self._write_table(next(iter(self._waiting)))
        if self._writer is None:
            return
        try:
            names = self._writer.close()
        except OSError as problem:
            self._discard_open_files(problem)
        else:
            self._report_outcome(is_written=True)
            self._whole_windows = {member.key: window for member, window in self._windows.items()}
            rows, self._rows, self._writer = self._rows, 0, None
            self._number += 1
            if self._uploads is None:
                self.counts["stored"] += rows
            else:
                for name in names:
                    self._uploads.add(Path(name))
        self._write_journal()

    def end_dataset(self, until: float) -> None:
        """Close all files, and upload them until the monotonic time `until`."""
        self.close_files()
        if self._uploads is not None:
            self._uploads.end(until)
        self._write_journal()
        shutil.rmtree(self._spool, ignore_errors=True)


def _describe_process(member: RecordingExport) -> DatasetProcess:
    header, source = member.mapped.header, member.source
    origin = read_origin(header)
    offset_ns = origin.realtime_of(0)
    moved_ns = 0 if source is None else source.origin.realtime_of(0) - offset_ns
    if abs(moved_ns) > CLOCK_DRIFT_NS:
        offset_ns += moved_ns
    end_ns = max(header.begun_ns, member.ended_ns or time.monotonic_ns())
    facts = Trace(
        origin, header.begun_ns, end_ns, [], member.mapped.read_thread_names(), notes=header.notes, gpus=header.gpus
    )
    return DatasetProcess(facts, offset_ns, ids=member.ids)


class _Uploads:
    """Uploads complete files on a thread, the oldest first. Each upload is retried until it succeeds."""

    def __init__(self, folder: Folder, spool: Path, disk_bytes: int, counts: Counter[str]) -> None:
        self._folder, self._spool, self._disk_bytes, self._counts = folder, spool, disk_bytes, counts
        self._files: deque[_SpooledFile] = deque()
        self._changed = threading.Condition()
        self._ends = False
        self._problem = ""
        self._thread = threading.Thread(target=self._upload_all, name="instrument-parquet", daemon=True)
        self._thread.start()

    @property
    def waiting_rows(self) -> int:
        with self._changed:
            return sum(file.rows for file in self._files)

    def add(self, path: Path) -> None:
        from pyarrow import parquet

        rows, name = parquet.read_metadata(path).num_rows, str(path.relative_to(self._spool))
        with self._changed:
            self._files.append(_SpooledFile(path, name, rows, path.stat().st_size))
            over_bytes = sum(file.size_bytes for file in self._files) - self._disk_bytes
            while over_bytes > 0 and len(self._files) > 1:
                over_bytes -= self._files[0].size_bytes
                self._drop_file(self._files.popleft(), "those that wait for their upload exceed limits.disk")
            self._changed.notify()

    def _drop_file(self, file: _SpooledFile, why: str) -> None:
        file.path.unlink(missing_ok=True)
        self._counts["unstored"] += file.rows
        logger.warning("export.parquet: %s is lost, with %d rows: %s", file.name, file.rows, why)

    def _upload_all(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            with self._changed:
                while not (self._files or self._ends):
                    self._changed.wait()
                if not self._files:
                    return
                file = self._files[0]
            try:
                self._upload_file(file)
            except (OSError, InstrumentError) as problem:
                if str(problem) != self._problem:
                    self._problem = str(problem)
                    logger.warning("export.parquet: %s was not uploaded, and is tried again: %s", file.name, problem)
                with self._changed:
                    self._changed.wait_for(lambda: self._ends, pause_s)
                    if self._ends:
                        pause_s = FIRST_PAUSE_S / 4
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            pause_s = FIRST_PAUSE_S
            with self._changed:
                if self._files and self._files[0] is file:
                    self._files.popleft()
                    self._counts["stored"] += file.rows
                self._changed.notify_all()
            file.path.unlink(missing_ok=True)

    def _upload_file(self, file: _SpooledFile) -> None:
        directory, _, base = file.name.rpartition("/")
        part = f"{directory}/.{base}.part"
        with file.path.open("rb") as source, self._folder.create(part) as sink:
            while data := source.read(1 << 20):
                sink.write(data)
        if self._folder.size_bytes(part) != file.size_bytes:
            raise OSError("the store has another length of it")
        self._folder.rename(part, file.name)

    def end(self, until: float) -> None:
        with self._changed:
            self._ends = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._files, max(until - time.monotonic(), 0))
            while self._files:
                self._drop_file(self._files.popleft(), f"the run has ended, {self._problem or 'and time was up'}")


# ---------------------------------------------------------------- files of kept requests

WRITE_S = 10.0
"""The maximum seconds for which kept spans wait in memory before they are written to a file."""

FILE_SPANS = 20_000
"""The number of waiting spans at which a file is written at once."""

REMOVED = "files of kept requests that were removed to keep within limits.disk"


class KeptFiles:
    """Writes the spans kept by tail sampling into files of a folder, named `SERVICE-RUN-PID-NUMBER-kept.npz`.

    All such files take at most `disk_bytes`. The oldest files are removed, and the next file reports the number of
    removed files.
    """

    def __init__(self, folder: Path, run: str, disk_bytes: int) -> None:
        self._folder = folder
        self._run = run
        self._disk_bytes = disk_bytes
        self._spans: list[Span] = []
        self._source: Source | None = None
        self._due_at = 0.0
        self._number = 0
        self._last_bytes = self._removed = 0
        self._removed_before: dict[Path, int] = {}
        """The number of removed files that each remaining file reports."""
        self._problem = ""

    def add_spans(self, spans: Sequence[Span], source: Source) -> None:
        if not self._spans:
            self._due_at = time.monotonic() + WRITE_S
        self._spans += spans
        self._source = source

    @property
    def is_due(self) -> bool:
        return bool(self._spans) and (time.monotonic() >= self._due_at or len(self._spans) >= FILE_SPANS)

    def write_spans(self) -> tuple[int, bool]:
        """Write the kept spans. Return their number, and True unless they are lost. The first failure is logged."""
        spans, self._spans = self._spans, []
        if not spans or self._source is None:
            return 0, True
        count = sum(1 + len(span.device) for span in spans)
        origin = replace(self._source.origin, run=self._source.origin.run or self._run)
        service = re.sub(r"[^\w.-]+", "_", origin.service)[:96].lstrip(".") or "service"
        while (path := self._next_file_path(service, origin.pid)).exists():  # another exporter has written it
            self._number += 1
        self._remove_oldest_files(self._last_bytes)
        try:
            start_ns, end_ns = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
            losses = {REMOVED: self._removed} if self._removed else {}
            trace = Trace(origin, start_ns, end_ns, spans, dict(self._source.threads()), losses)
            saved_file.dump(path, trace)
            self._last_bytes = path.stat().st_size
        except (TraceError, ValueError, OSError) as problem:
            if not self._problem:
                self._problem = str(problem)
                lost = f"{len(spans)} spans that are kept are lost, later ones without a word"
                logger.warning("capture.to: %s: %s", lost, problem)
            return count, False
        self._removed_before[path], self._removed = self._removed, 0
        self._remove_oldest_files(0, path)
        return count, True

    def _next_file_path(self, service: str, pid: int) -> Path:
        return self._folder / f"{service}-{self._run}-{pid}-{self._number}-kept.npz"

    def _remove_oldest_files(self, wanted_bytes: int, newest: Path | None = None) -> None:
        files = []
        for path in self._folder.glob("*-kept.npz"):
            with suppress(OSError):
                facts = path.stat()
                files.append((facts.st_mtime_ns, facts.st_size, path))
        over_bytes = sum(size for _, size, _ in files) + wanted_bytes - self._disk_bytes
        oldest = ((path, size) for _, size, path in sorted(files) if path != newest)
        removed = file_writing.remove_files_until_freed(oldest, over_bytes)
        self._removed += sum(1 + self._removed_before.pop(path, 0) for path in removed)
