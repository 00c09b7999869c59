"""The requests of a recorder that are kept, as the reader of its recording settles them."""

from __future__ import annotations

import time
from collections import Counter
from itertools import groupby
from operator import attrgetter
from typing import Any

from instrument.otlp.export_facts import ExportFacts, Ids, MeteredFacts
from instrument.otlp.recording_reader import RecordingReader
from instrument.profile.model import Capture
from instrument.recording.export_checkpoint import Progress
from instrument.recording.mapped import Mapped
from instrument.recording.spans import Span
from instrument.trace.settling import Settled, Settling
from instrument.trace.trace import make_spans


def sent_spans(settled: Settled) -> list[Span]:
    """Return the spans that are sent, each with the trace of its tree and with the requests that it serves."""
    trace = settled.trace
    if trace is None:
        return []
    remote = {int(trace.root_id[row]): one for row, one in trace.remote.items()}
    spans = make_spans(trace)
    for row, span in enumerate(spans):
        span.remote, span.links = remote.get(span.root_id), tuple(settled.links.get(row, ()))
    return spans


def trees_of(settled: Settled) -> list[list[Span]]:
    """Return the same, tree after tree."""
    return [list(its) for _, its in groupby(sent_spans(settled), attrgetter("root_id"))]


class Kept:
    """A reader of one recording or of several, each with a capture rule, from now on."""

    def __init__(self, recorder: Any, capture: Capture, spans_per_request: int = 100, *others: Any) -> None:
        self.readers = []
        self.trees: list[list[Span]] = []
        """All trees that `take` found."""
        self.settling = Settling()
        for number, one in enumerate((recorder, *others)):
            mapped = Mapped(one.memory_fd)
            facts = ExportFacts(Ids((number + 1,) * 3, str(number)), {}, capture, spans_per_request, MeteredFacts(0))
            reader = RecordingReader(mapped, Progress(), facts)
            reader.places = mapped.count_written_rows()
            self.readers.append(reader)
        self.settling.members = [reader.rows for reader in self.readers]

    @property
    def rows(self) -> Any:
        """The rows of the first recording that wait."""
        return self.readers[0].rows

    @property
    def counts(self) -> Counter[str]:
        """Return the losses of the first recording, by reason."""
        return Counter(self.rows.counts)

    def read_rows(self) -> None:
        """Read all new rows of the recordings."""
        for reader in self.readers:
            reader.read_new_rows()
            while reader.has_more:
                reader.ahead = 0
                reader.read_new_rows()
            reader.rows.read_ns = max([reader.rows.read_ns, *reader.rows.rows["end_ns"].tolist()])

    def settle(self, **how: Any) -> dict[int, list[list[Span]]]:
        """Read on and settle what has ended; return the trees that are kept, by the place of their recording."""
        self.read_rows()
        now_ns = max(time.monotonic_ns(), *(reader.rows.read_ns for reader in self.readers))
        found = self.settling.settle(now_ns, **{"at_once": True, **how})
        trees = {place: trees_of(its) for place, its in found.items()}
        while self.settling.has_more:
            for place, more in self.settling.settle(now_ns, **{"at_once": True, **how}).items():
                trees.setdefault(place, []).extend(trees_of(more))
        return trees

    def read(self, **how: Any) -> list[list[Span]]:
        """Return the trees of the first recording that were kept since the last time, in the order of their ends."""
        trees = self.settle(**how).get(0, [])
        return sorted(trees, key=lambda tree: tree[0].end_ns)

    def take(self) -> None:
        """Add what was kept since the last time to the trees."""
        self.trees += self.read()

    def change(self, capture: Capture, spans_per_request: int) -> None:
        """Go by another rule."""
        self.rows.sampler.change_settings(capture)
        self.rows.spans_per_request = spans_per_request
