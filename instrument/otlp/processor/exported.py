"""One recording as it is exported: read on, its requests decided about, the kept ones handed to an exporter.

What becomes of its rows is written into it, so that another one who exports it later goes on there: rows are noted as
read before any span of them is on its way, so none is sent twice, and what was on its way as an exporter was ended is
counted.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from instrument import clock
from instrument.otlp.export_facts import ExportFacts, facts_from
from instrument.otlp.exporter import Exporter
from instrument.otlp.exposition import Metered
from instrument.otlp.interval_join import SETTLE_NS, DeviceTimes
from instrument.otlp.processor.drain import Drain
from instrument.otlp.processor.kept_files import KeptFiles
from instrument.otlp.processor.keyed_requests import KeyedRequests
from instrument.otlp.processor.keyed_trees import KeyedTrees
from instrument.otlp.processor.metering import Metering
from instrument.otlp.processor.queue_times import LOOKS, QueueTimes
from instrument.otlp.processor.stray_spans import LetGo
from instrument.otlp.span_queue import Source
from instrument.recorder.shared_decisions import Decisions
from instrument.recorder.tail_sampler import Trees
from instrument.recording import export_place
from instrument.recording.distributions import Metric
from instrument.recording.export_place import (
    BATCHES_LEFT_OUT,
    DERIVED_LOST,
    METRICS_LOST,
    MISPLACED,
    SENT,
    UNLINKED,
    UNQUEUED,
    UNTOLD,
    ExportPlace,
    Progress,
    give_up,
)
from instrument.recording.interval_ring import NOTHING_TO_COME
from instrument.recording.mapped import Mapped
from instrument.recording.mapped_facts import Header
from instrument.recording.mapped_intervals import MappedIntervals
from instrument.recording.rows import REQUEST_BIT, Row
from instrument.recording.spans import Origin, Span
from instrument.runtime.unpatched import RLock
from instrument.trace.interruptions import Interruptions
from instrument.trace.of_memory import origin_of

FACTS_S = 1.0
"""How often it is looked what a process says of itself."""

OPENED_S = 0.5
"""How often it is looked which requests have begun where nothing has ended."""

WAITING_SPANS = 4_000
"""With so many spans on their way others wait in the recording: there they outlive who exports them, take no memory of
that one, and the newest are kept."""

LAST_METRICS_S = 5.0
"""How long the session after one waits to be exported for the last metrics of that one to be sent."""

CROWDED = 0.5
"""Rows of a ring that is so full wait no longer for their device times."""


class Exported:
    """The export of one generation of a recording. It closes the descriptor. Generation 0 is the present one.

    A generation ends as a later one begins. An earlier exporter may have read the first rows, and knew their requests
    with keys. With `knows_all` the first rows had none. Without `sends`, kept spans go to no exporter. `facts`
    replaces the facts for the export that are in the recording. Raises `TraceError` and `OSError`. One thread alone
    calls `look` and `finish`; another may call `note_settled` and `note_sent`.
    """

    def __init__(
        self,
        fd: int,
        exporter: Exporter,
        decisions: Decisions,
        requests: KeyedRequests,
        generation: int = 0,
        *,
        knows_all: bool = False,
        sends: bool = True,
        facts: Callable[[], Any] | None = None,
    ) -> None:
        self._knows_all = knows_all
        self._sends = sends
        self._told_facts = facts or (lambda: self._mapped.header.facts.get("export"))
        self._exporter = exporter
        self._decisions = decisions
        self._requests = requests
        self._lock = RLock()
        try:
            self._place = ExportPlace(fd)
            try:
                self._mapped = Mapped(fd)
            except BaseException:
                self._place.close()
                raise
        finally:
            os.close(fd)
        self._generation = generation or self._mapped.generation
        self._progress = Progress()
        self._told: Counter[str] = Counter()
        self._reading: _Reading | None = None
        self._facts: ExportFacts | None = None
        self._facts_at = self._opened_at = self._superseded_at = 0.0
        self._heads: dict[int, int] = {}
        self.is_ours = False
        self.is_behind = False
        """True where reading stopped for want of room in the exporter."""
        self.has_ended = False
        """True where the process of the recording has ended."""
        self.is_over = False
        """True where the process has ended, and all that it recorded has been read."""
        self.files: KeptFiles | None = None
        """The files for kept spans; None where kept spans are not written."""
        self.is_scraped = False
        """True where a scrape will ask for its counts after its end."""

    def close(self) -> None:
        """Let go of the recording, for another one to export it."""
        with closing(self._place), closing(self._mapped):
            try:
                if self._reading is not None and self.is_ours:
                    self._reading.metering.end()
            finally:
                with self._lock:
                    self.note_settled()
                    self.is_ours = False
                if self._reading is not None:
                    self._requests.leave(self._reading.source.ids)

    def after_fork_in_child(self) -> None:
        """In a child of the process that exports: let go of the parent's recording, which that one goes on with."""
        self._place.close()
        self._mapped.close()

    # ---------------------------------------------------------------- looking

    def look(self, *, is_last: bool = False, at_once: bool = False, meters: bool = False) -> bool:
        """Read what has been recorded since the last time, and offer what is kept; the last time, also what waits.

        What is to be sent `at_once` waits for open requests alone. Where it `meters`, and now and then, metrics are
        taken. Returns whether there is more.
        """
        ended = self.has_ended
        if self._reading is not None and self.is_ours:
            self._reading.metering.before_read(meters=meters or is_last)
        has_more = self._look(is_last=is_last, at_once=at_once)
        if self._reading is not None and self.is_ours:
            self._reading.metering.after_read(is_complete=not (has_more or self.is_behind))
        self.is_over = ended and not (has_more or self.is_behind)
        if self.is_over and self._reading is not None:
            self._requests.leave(self._reading.source.ids)
        return has_more

    def _look(self, *, is_last: bool, at_once: bool) -> bool:
        if not self.is_ours:
            self.is_ours = self._place.take()
            if not self.is_ours:
                return False  # the process does so itself, or another agent
            self._progress = self._place.read()
        if self._is_superseded():
            self.has_ended = True
            self.send_waiting()
            return False
        facts, reading = self._read_facts(), self._reading
        if facts is None:
            return False
        if reading is not None:
            reading.source.look_at_clock()
            reading.derived.look_at_clock()
        if not self._is_new():
            self._look_at_open()
            return False
        if reading is not None and self._exporter.waiting > WAITING_SPANS:
            self.is_behind = True
            self._heads = {}
            return False
        self.is_behind = False
        if reading is None:
            reading = self._begin(facts)
        drain = reading.drain
        is_crowded = drain.lag_ns > 0 and self._mapped.unread_share(drain.places) >= CROWDED
        waits = not (self.has_ended or is_crowded)
        kept = reading.take(is_last=is_last, at_once=at_once, waits=waits, is_sound=lambda: not self._is_superseded())
        if kept is None:
            return True  # another session has begun meanwhile
        self._note_read(reading, kept)
        self._offer(kept, reading)
        self._offer_derived(reading.keyed.stages.due(at_once=is_last or at_once), reading)
        at_once = is_last or at_once or self._requests.are_over
        reading.queues.due(at_once=at_once, may_be_kept=reading.may_be_kept)
        self.note_settled()
        return drain.has_more

    def _offer(self, kept: Sequence[Sequence[Span]], reading: _Reading) -> None:
        """Have what is kept sent, and written, as far as it is to be."""
        for spans in kept:
            if self._sends:
                self._exporter.offer(spans, reading.source)
            if self.files is not None:
                self.files.put(spans, reading.source)

    def write_kept(self, *, at_once: bool) -> None:
        """Write what is kept where it is time to, or `at_once`."""
        files, reading = self.files, self._reading
        if files is None or reading is None or not (at_once or files.is_due):
            return
        count, is_written = files.write()
        if not self._sends:
            reading.source.counts["exported" if is_written else "failed"] += count
            self.note_settled()

    def _offer_derived(self, trees: Iterable[Sequence[Span]], reading: _Reading) -> None:
        for spans in trees:
            if self._sends:
                self._exporter.offer(spans, reading.derived)

    def _is_superseded(self) -> bool:
        """Whether another session of the process has begun, and what this one is about has gone."""
        return self._mapped.generation_now() != self._generation

    def _is_new(self) -> bool:
        """Whether there is anything that has not been read."""
        heads = self._mapped.heads()
        has_more = self._reading is None or self._reading.is_behind or self._reading.lingers
        is_new = has_more or heads != self._heads
        self._heads = heads
        return is_new

    def _look_at_open(self) -> None:
        """Learn of requests that have begun, where nothing has ended."""
        now, reading = time.monotonic(), self._reading
        if reading is not None and now >= self._opened_at and self._mapped.generation == self._progress.generation:
            self._opened_at = now + OPENED_S
            reading.drain.look_at_open()
            reading.learn()

    def _read_facts(self) -> ExportFacts | None:
        now = time.monotonic()
        if now < self._facts_at:
            return self._facts
        self._facts_at = now + FACTS_S
        header = self._mapped.header
        facts = facts_from(self._told_facts())
        reading = self._reading
        if facts is None or header.generation != self._generation:
            return self._facts
        self._facts = facts
        if reading is not None:
            reading.change(facts)
        return facts

    def _begin(self, facts: ExportFacts) -> _Reading:
        """Go on where the one before has come to, or at the begin of a generation that nobody has looked at."""
        self._mapped.tree()
        if self._reading is not None:
            self._requests.leave(self._reading.source.ids)
        header, found = self._mapped.header, self._progress
        if found.generation != self._generation:
            found = Progress(self._generation, before=found.untold())
        elif found.is_told:
            self._told, found.is_told = Counter(found.fates), False
        unsettled, unanswered = found.unsettled, found.unanswered
        if self._reading is not None:
            self._reading.metering.end()
        start = partial(Metering, self._mapped, facts, self._exporter, self._place)
        reading = _Reading(self._mapped, found, facts, _origin_now(header), self._decisions, self._requests, start)
        with self._lock:
            self._progress, self._reading, self._heads = found, reading, {}
        if found.places and not self._knows_all:
            self._requests.known_since_ns = time.monotonic_ns()
        give_up(reading.base)
        if unsettled:  # what was on its way when the one before was ended may have come there: it is not sent again
            reading.base["kept"] = sum(found.fates[fate] for fate in SENT)
            reading.base["unanswered"] += unanswered
            reading.base["abandoned"] += max(unsettled - unanswered - reading.drain.adopt(), 0)
        self._note_read(reading, [])
        return reading

    # ---------------------------------------------------------------- the books

    def _note_read(self, reading: _Reading, kept: Sequence[Sequence[Span]]) -> None:
        drain, base = reading.drain, reading.base
        intervals = sum(len(span.device) for spans in kept for span in spans)
        with self._lock:
            base["intervals"] += intervals
            base["kept"] += sum(map(len, kept)) + intervals
            fates = self._progress.fates
            if not reading.is_spoilt:
                fates.update(seen=drain.seen, missed=drain.missed, beyond=base["beyond"] + drain.beyond)
                self._progress.places, self._progress.details = drain.places, drain.details_at
                reading.held = drain.held
            fates.update(kept=base["kept"], abandoned=base["abandoned"], intervals=base["intervals"])
            fates["unanswered"] = base["unanswered"]
            fates["untimed"] = base["untimed"] + reading.times.untimed
            known = sum(fates[fate] for fate in ("kept", "beyond", "unanswered", "abandoned"))
            left = fates["seen"] + fates["intervals"] - known - reading.held - reading.keyed.waiting
            fates["passed"] = max(left, 0)
            self.note_settled()

    def note_settled(self) -> None:
        """Write which spans are about to be sent, and what has become of those that were."""
        with self._lock:
            reading = self._reading
            if not self.is_ours or reading is None:
                return
            for fate in SENT:
                self._progress.fates[fate] = reading.base[fate] + reading.source.counts[fate]
            self._progress.fates["sending"] = reading.source.counts["sending"]
            self._progress.fates.update(reading.undecided_fates())
            self._place.write(self._progress)

    def note_sent(self) -> None:
        """Write what has become of spans and metrics that were sent."""
        self.note_settled()
        with self._lock:
            if self.is_ours and self._reading is not None:
                self._reading.metering.note_sent()

    def send_waiting(self) -> None:
        """Offer what waits for requests, without them."""
        reading = self._reading
        if reading is not None:
            kept = reading.keyed.take([], {}, 1.0, is_last=True)
            self._note_read(reading, kept)
            self._offer(kept, reading)
            for _ in range(2):  # the first time for those that have just come
                self._offer_derived(reading.keyed.stages.due(at_once=True), reading)
            reading.learn(at_once=True)
            for _ in range(LOOKS + 1):
                reading.queues.due(at_once=True)

    def note_work(self, *, at_once: bool) -> None:
        """Note what it did for requests of other processes."""
        if self._reading is not None:
            self._reading.keyed.note_work(at_once=at_once)

    def unsent(self, spans: Sequence[Span]) -> list[Span]:
        """Those of these spans that neither are sent nor will be, once all was read that had ended.

        A request of theirs that has not ended is kept.
        """
        return list(spans) if self._reading is None else self._reading.unsent(spans)

    def keep_open(self, spans: Sequence[Span]) -> None:
        """Keep those requests of these spans that are open now, whatever their end is like."""
        if self._reading is not None:
            self._reading.keep_open(spans)

    @property
    def fates(self) -> Mapping[str, int]:
        """What has become of its rows, as `instrument.recording.export_place` names it."""
        return self._progress.fates

    def joined(self) -> list[Metric]:
        """The metrics of requests and the batches that served them, as they are now."""
        return [] if self._reading is None else self._reading.metering.joined()

    @property
    def key(self) -> str:
        """The key of the recording, unique in its run."""
        return f"{origin_of(self._mapped.header).pid}-{self._generation}"

    def before_scrape(self) -> None:
        """Note what has ended, before it is read on for a scrape."""
        if self._reading is not None and self.is_ours:
            self._reading.metering.before_read(meters=False, scrapes=True)

    def metered(self) -> Metered | None:
        """Its metrics for a scrape, as it was read last; None where it has none."""
        return None if self._reading is None or not self.is_ours else self._reading.metering.metered()

    @property
    def lag_ns(self) -> int:
        """How far what was read of it lies behind what is there, for device times that are still to come."""
        return 0 if self._reading is None else self._reading.drain.lag_ns

    @property
    def undecided(self) -> int:
        """Kept requests that wait, for they may be parts of others."""
        return 0 if self._reading is None else self._reading.keyed.undecided

    @property
    def source(self) -> Source | None:
        """What the exporter knows it as."""
        return None if self._reading is None else self._reading.source

    def is_of(self, source: Source) -> bool:
        """Whether the exporter knows it as this, or what is derived from it."""
        return self._reading is not None and source in (self._reading.source, self._reading.derived)

    def is_settled(self) -> bool:
        """Whether nothing of it is on its way, or may still be kept; what is on its way is sent now.

        Of a process that has ended the last metrics are, too, once all was read.
        """
        if self._reading is None:
            return True
        if self.is_over and not len(self._reading.queues):
            self._reading.metering.take_last()
        if self._reading.source.counts["pending"] or self._reading.derived.counts["pending"]:
            self._exporter.hurry()
            return False
        if not self._is_superseded():
            return self._reading.metering.is_settled and not self._reading.lingers
        self._superseded_at = self._superseded_at or time.monotonic()
        return self._reading.metering.is_settled or time.monotonic() - self._superseded_at > LAST_METRICS_S

    def finish(self) -> Mapping[str, int]:
        """Its session has ended, and nothing is on its way: requests that never ended are given up.

        Tells all fates that nobody has told of.
        """
        with self._lock:
            reading, progress = self._reading, self._progress
            if reading is not None:
                reading.base["abandoned"] += reading.held + reading.keyed.waiting
                progress.fates["abandoned"] = reading.base["abandoned"]
                self.note_settled()
                give_up(progress.fates)
            found = Counter(progress.untold())
            found.subtract(self._told)
            if reading is not None:
                found[UNLINKED] += self._requests.forgotten()
                found[MISPLACED] += self._requests.misplaced()
                found[BATCHES_LEFT_OUT] += self._requests.left_out()
                found[METRICS_LOST] += reading.metering.lost_at_end()
            if self.is_ours and not self._is_superseded() and progress.generation == self._generation:
                found["unread"] += export_place.unread(self._place)  # nobody counts it once this is told
            progress.is_told, progress.before = True, Progress().before
            if self.is_ours:
                self._place.write(progress)
            return dict(found)


class _Reading:
    """How one generation of a recording is read: from where it stood, with the fates that were known by then."""

    def __init__(
        self,
        mapped: Mapped,
        progress: Progress,
        facts: ExportFacts,
        origin: Origin,
        decisions: Decisions,
        requests: KeyedRequests,
        metering: Callable[[Drain, Source], Metering],
    ) -> None:
        self._mapped = mapped
        self._facts = facts
        self._threads: Mapping[int, str] = {}
        self._kept: list[list[Span]] = []
        self.base = Counter(progress.fates)
        self.held = 0
        """Rows that are put aside, when that was noted last."""
        self.is_spoilt = False
        """Whether what was read last may be another session's."""
        self.drain = Drain(mapped, progress)
        self.times = DeviceTimes(lambda: MappedIntervals(mapped))
        self._requests = requests
        self.keyed = KeyedTrees(requests, facts.ids)
        self._interruptions = Interruptions()
        self._let_go = LetGo(self.drain.keys, requests, facts.ids)
        self.source = Source(facts.ids, origin, lambda: self._threads, lambda: self._facts.resource)
        self.derived = replace(self.source, counts=Counter())
        """The same process, for spans that it has not recorded."""
        self.metering = metering(self.drain, self.source)
        self.queues = QueueTimes(requests, facts.ids, self.metering.count_served)
        self._trees = Trees(
            self.drain,
            facts.capture,
            facts.spans_per_request,
            self._kept.append,
            self._note_ended,
            decisions,
            facts.ids.trace_id,
            self._let_go,
        )

    def _note_ended(self, rows: Sequence[Row]) -> None:
        self.metering.count(rows)
        if self._asks_queue_times:
            self.queues.note_ended(rows)

    @property
    def _asks_queue_times(self) -> bool:
        return self._facts.metered.asks

    def change(self, facts: ExportFacts) -> None:
        """Go by what the process says of itself now."""
        before, self._facts = self._facts, facts
        self.metering.change(facts)
        if (before.capture, before.spans_per_request) != (facts.capture, facts.spans_per_request):
            self._trees.change(facts.capture, facts.spans_per_request)

    @property
    def may_be_kept(self) -> bool:
        """True where other processes may still keep requests. Spans of several requests may not be separated yet."""
        return self._trees.lingers

    @property
    def lingers(self) -> bool:
        """Whether there are requests that other processes may still keep, or spans that wait for theirs."""
        return self._trees.lingers or self.keyed.waiting > 0 or len(self.keyed.stages) > 0 or len(self.queues) > 0

    def undecided_fates(self) -> Mapping[str, int]:
        """What has become of stages and of times in the queue, and of how many that is still to come."""
        base, stages, counts = self.base, self.keyed.stages, self.derived.counts
        return {
            UNTOLD: base[UNTOLD] + stages.untold,
            "to tell": len(stages) + self.keyed.undecided,
            DERIVED_LOST: base[DERIVED_LOST] + sum(counts[fate] for fate in SENT if fate != "exported"),
            "deriving": counts["pending"],
            UNQUEUED: base[UNQUEUED] + self.queues.left_out,
            "queueing": self.queues.waiting + self.metering.unsaved,
        }

    def learn(self, *, at_once: bool = False) -> None:
        """Note what the rows that were read tell of keys."""
        facts = self.drain.keys.taken()
        self._requests.learn(self._facts.ids, facts, self._facts.capture.sample)
        self.queues.learn(facts, at_once=at_once)

    def keep_open(self, spans: Sequence[Span]) -> None:
        """Keep those requests of these spans that are open now."""
        self._trees.keep_open({span.root_id for span in spans})

    def unsent(self, spans: Sequence[Span]) -> list[Span]:
        """Those of these spans that neither are sent nor will be."""
        return [span for span in self._trees.left_out(spans) if not self.keyed.is_sent_elsewhere(span)]

    @property
    def is_behind(self) -> bool:
        """Whether there are rows that were not read."""
        return self.drain.has_more or self.drain.lag_ns > 0

    def take(
        self, *, is_last: bool, at_once: bool, waits: bool, is_sound: Callable[[], bool]
    ) -> list[list[Span]] | None:
        """Read on; returns the trees that can be sent, or parts of such, None where what was read is not `is_sound`.

        Where a device is timed it `waits` with rows whose device times may still come.
        """
        self.times.look()
        settled_ns, now_ns = self._mapped.settled_ns(), time.monotonic_ns()
        until_ns = max(settled_ns, now_ns - SETTLE_NS)
        self.drain.left = (until_ns, now_ns) if settled_ns and waits and until_ns < now_ns else (0, 0)
        self._trees.take(is_last=is_last or self._requests.are_over)
        if not is_sound():
            self.is_spoilt = True
            return None
        self.learn(at_once=is_last or at_once or self._requests.are_over)
        let_go = self._let_go.taken()
        its_spans = [span for spans in (*self._kept, *let_go) for span in spans]
        self.times.join(its_spans, settled_ns or NOTHING_TO_COME)
        self._threads = self._mapped.threads()
        opened = self.drain.opened
        if any(not spans[0].root_id & REQUEST_BIT for spans in self._kept):  # which may lie below what began meanwhile
            opened = {**opened, **{span.span_id: span for span in self._mapped.open_spans()}}
        sample = self._facts.capture.sample
        kept = self.keyed.take(self._kept, opened, sample, let_go=let_go, is_last=is_last, at_once=at_once)
        nested, self.keyed.nested = self.keyed.nested, []
        if self._asks_queue_times:
            self.queues.note_nested(nested)
        else:
            for request, _ in nested:
                self._requests.settle_nested(request)
        self._kept.clear()
        kept = self._interruptions.attach(kept)
        for spans in kept:
            self.metering.note_kept(spans)
        return kept


def _origin_now(header: Header) -> Origin:
    """Which process it is, with a fresh pair of both clocks, which are the machine's."""
    monotonic_ns, realtime_ns = clock.pair()
    return replace(origin_of(header), monotonic_ns=monotonic_ns, realtime_ns=realtime_ns)
