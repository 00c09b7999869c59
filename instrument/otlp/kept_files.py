"""Writes the kept traces of a running process into files. `instrument report` reads a folder of such files."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from instrument.errors import TraceError
from instrument.otlp.span_queue import Source
from instrument.recording.spans import Span
from instrument.runtime import atomic
from instrument.runtime.faults import logger
from instrument.trace import file
from instrument.trace.trace import Trace

WRITE_S = 10.0
"""The maximum number of seconds for which kept spans wait in memory before they are written to a file."""

FILE_SPANS = 20_000
"""The number of waiting spans at which a file is written at once."""

REMOVED = "files of kept requests that were removed to keep within limits.disk"


class KeptFiles:
    """Writes one process's kept spans into a folder, as files named `SERVICE-RUN-PID-NUMBER-kept.npz`.

    All files with such names in the folder take at most `disk_bytes`. Above that, the oldest are removed, and the next
    file reports how many.
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
        """Add spans of a kept tree to the next file."""
        if not self._spans:
            self._due_at = time.monotonic() + WRITE_S
        self._spans += spans
        self._source = source

    @property
    def is_due(self) -> bool:
        """True if the kept spans have waited for `WRITE_S`, or number `FILE_SPANS`."""
        return bool(self._spans) and (time.monotonic() >= self._due_at or len(self._spans) >= FILE_SPANS)

    def write(self) -> tuple[int, bool]:
        """Write the kept spans. Return their number, and False if they are lost. The first failure is logged."""
        spans, self._spans = self._spans, []
        if not spans or self._source is None:
            return 0, True
        count = sum(1 + len(span.device) for span in spans)
        origin = replace(self._source.origin, run=self._source.origin.run or self._run)
        service = re.sub(r"[^\w.-]+", "_", origin.service)[:96].lstrip(".") or "service"
        while (path := self._path(service, origin.pid)).exists():  # another exporter has written it
            self._number += 1
        self._make_room(self._last_bytes)
        try:
            start_ns, end_ns = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
            losses = {REMOVED: self._removed} if self._removed else {}
            trace = Trace(origin, start_ns, end_ns, spans, dict(self._source.threads()), losses)
            file.dump(path, trace)
            self._last_bytes = path.stat().st_size
        except (TraceError, ValueError, OSError) as problem:
            if not self._problem:
                self._problem = str(problem)
                lost = f"{len(spans)} spans that are kept are lost, later ones without a word"
                logger.warning("capture.to: %s: %s", lost, problem)
            return count, False
        self._removed_before[path], self._removed = self._removed, 0
        self._make_room(0, path)
        return count, True

    def _path(self, service: str, pid: int) -> Path:
        return self._folder / f"{service}-{self._run}-{pid}-{self._number}-kept.npz"

    def _make_room(self, wanted_bytes: int, newest: Path | None = None) -> None:
        """Remove the oldest files until the others fit into the limit. Count them, and the removals that they
        reported."""
        files = []
        for path in self._folder.glob("*-kept.npz"):
            with suppress(OSError):
                facts = path.stat()
                files.append((facts.st_mtime_ns, facts.st_size, path))
        over_bytes = sum(size for _, size, _ in files) + wanted_bytes - self._disk_bytes
        oldest = ((path, size) for _, size, path in sorted(files) if path != newest)
        self._removed += sum(1 + self._removed_before.pop(path, 0) for path in atomic.remove_first(oldest, over_bytes))
