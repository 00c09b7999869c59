"""Computes the device intervals of spans on a thread of our own (the resolver).

The resolver polls CUDA events instead of waiting for them. It does not disturb the capture of a CUDA graph, and sleeps
while no pair of events is in flight.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from operator import attrgetter
from threading import get_ident

from instrument.device import cuda
from instrument.device.clock_anchors import ANCHOR_NS, ANCHOR_PAUSE_NS, FARTHEST_NS, RESOLUTION_NS
from instrument.device.cuda import Stream
from instrument.device.event_pairs import Answer, Context, DeferredTimes, Pair, Placing, Times
from instrument.device.torch_events import Driver
from instrument.recorder.recorder import Recorder
from instrument.recording.memory import NOTHING_TO_COME, IntervalRing
from instrument.recording.memory_layout import STREAM
from instrument.runtime.faults import FAULTS
from instrument.runtime.threads import Thread
from instrument.runtime.unpatched import Event, sleep

FIRST = 64
CHUNK = 256
"""The number of free event pairs below which a pool grows. A pool grows by at least this number."""

LOW = 64
"""The number of free event pairs at which the resolver is woken early."""

POOL_LIMIT = 8_192
"""The maximum number of event pairs per context. A span without a pair gets no device time."""

IDLE_S = 0.5
POLL_S = (0.05, 0.1)
"""The shortest and the longest pause in seconds between two polls for events."""

WATCH_S = 5e-5
WATCHES = 300
"""The maximum number of successive polls of a busy device while no pair ends."""

MEASURED_AT_ONCE = 1000
"""The maximum number of pairs to measure in one call of the driver. Such a call takes a millisecond."""

DEFERRED_LIMIT = 512
"""The maximum number of a span's device intervals that are kept until the span ends."""

INTERRUPTED = -2
"""The error code of an event pair that was interrupted. The state of its events is unknown."""

ROW_NS = 10**7
"""The maximum ns from a span's end until the span's second event is recorded."""

NOTE_NS = 2 * 10**7
"""The minimum ns between two calls that publish `settled_ns`."""

STOP_NS = 10**9
STOP_POLL_S = 0.001
"""The seconds between two polls while `stop` waits for the device."""


COST_ROUNDS, COST_PAIRS = 3, 16

_by_end = attrgetter("end_ns")


def _span_end_ns(pair: Pair) -> int:
    row = None if pair.whole is None else pair.whole.row
    return pair.end_ns if row is None else row[3]


class Resolver:
    """Reads the times of ended event pairs on its own thread, and writes the device intervals of spans.

    One thread of the service calls `start` and `stop`. `counts` counts intervals by label, and errors by device and
    name. `faults` has the reason for each abandoned device.
    """

    def __init__(
        self, timer: Times, driver: Driver, intervals: IntervalRing, recorder: Recorder, now: Callable[[], int]
    ) -> None:
        self._timer = timer
        self._driver = driver
        self._intervals = intervals
        self._recorder = recorder
        self._now = now
        self.contexts: dict[int, Context] = {}
        self.counts: Counter[str] = Counter()
        self.faults: dict[int, str] = {}
        self.untimed: deque[tuple[int, Stream, int, str]] = deque(maxlen=8 * POOL_LIMIT)
        self.finished: deque[Pair] = deque()
        self.asleep = False
        self.pairs = 0
        """The number of pairs that have been resolved, with or without a time."""
        self.pair_ns = 0.0
        """The time in ns that a pair takes on a thread of the service, measured on this device."""
        self.thread_ns = 0
        """Processor time of the resolver's thread, in ns."""
        self._placing = Placing(driver, now)
        self._ready: list[tuple[int, int, int, int, int, str, int]] = []
        """The intervals that the resolver writes into the recording next."""
        self._settled_noted_ns = 0
        self._bound: tuple[int, int] | None = None
        self._waking = Event()
        self.stopping = Event()
        self._thread: Thread | None = None

    def start(self) -> None:
        if self._thread is None and not self.stopping.is_set():
            self._intervals.publish_settled_time(self._now() - ROW_NS)
            self._thread = Thread(self._resolve_until_stopped, "instrument-device", lambda: not self.stopping.is_set())
            self._thread.start()

    def stop(self, limit_s: float = math.inf) -> None:
        """Wait up to `limit_s` seconds for the pairs in flight and the end of the thread. The thread releases all
        events."""
        self.stopping.set()
        self._waking.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(min(limit_s, 2 * STOP_NS / 1e9))
            self._intervals.publish_settled_time(NOTHING_TO_COME)

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    def abandon_parent_contexts(self) -> None:
        self.asleep = False
        for context in self.contexts.values():
            context.alive = False

    def settled_ns(self) -> int:
        """Return the time in ns up to which all ended spans have their device times."""
        now_ns = self._now()
        waiting = [
            end_ns
            for context in list(self.contexts.values())
            for pair in [*context.begun, *(pair for pairs in list(context.under_way.values()) for pair in list(pairs))]
            if (end_ns := _span_end_ns(pair)) > 0
        ]
        waiting += [at_ns for _, _, at_ns, _ in list(self.untimed)]
        waiting += map(_span_end_ns, list(self.finished))
        return min([now_ns - ROW_NS, *(end_ns - 1 for end_ns in waiting)])

    def wake(self) -> None:
        self.asleep = False
        self._waking.set()

    def count_error(self, context: Context, error: int) -> None:
        driver = self._driver
        name = driver.error_name(error)
        self.counts[f"device {context.device}: {name}"] += 1
        if error in cuda.FATAL and context.alive:
            context.alive = False
            self.faults[context.device] = f"device {context.device} is no longer timed: the driver reports {name}"

    def choose_failure_label(self, context: Context, error: int) -> str:
        if error == self._driver.CAPTURING or error in cuda.CAPTURE_ERRORS:
            return "captured"
        if error == INTERRUPTED:
            return "dropped"
        self.count_error(context, error)
        return "dropped" if context.alive else ""

    def _resolve_until_stopped(self) -> None:
        stopping, waking = self.stopping, self._waking
        pause_s = POLL_S[0]
        while True:
            waking.clear()
            if stopping.is_set():  # read after `clear`, since `stop` sets it before `waking`
                break
            try:
                moved, waits = self.resolve_ended_pairs()
                if waits and self.watch_busy_devices():
                    continue
            except Exception as fault:
                FAULTS.note("device thread", fault)
                moved, waits = False, True
            self.thread_ns = time.thread_time_ns()
            if (now_ns := self._now()) - self._settled_noted_ns >= NOTE_NS:
                self._settled_noted_ns = now_ns
                self._intervals.publish_settled_time(self.settled_ns())
            if waits:
                is_quiet = not moved and pause_s >= POLL_S[1]
                pause_s = POLL_S[0] if moved else min(2 * pause_s, POLL_S[1])
                if not is_quiet or self._has_ended_pairs():
                    waking.wait(pause_s)
                    continue
            # Only open spans are in flight, if any: the end of one wakes this thread.
            self.asleep = True
            # This finds a span that began or ended before `asleep` was set.
            if (
                any(context.begun for context in self.contexts.values())
                or self.untimed
                or self.finished
                or (waits and self._has_ended_pairs())
            ):
                self.asleep = False
                waking.wait(POLL_S[0])
                continue
            if waking.wait(IDLE_S) and not self._is_short_of_pairs():
                waking.clear()
                if not stopping.is_set():  # more spans usually end soon, and one poll can resolve all of them
                    waking.wait(POLL_S[0])
        end_ns = time.monotonic_ns() + STOP_NS
        try:
            while (
                self.resolve_ended_pairs(growing=False)[1] and time.monotonic_ns() < end_ns and self._has_ended_pairs()
            ):
                sleep(STOP_POLL_S)
            self._drop_ended_pairs()
            self._release_all_events()
        except Exception as fault:
            FAULTS.note("device thread", fault)

    def resolve_ended_pairs(self, *, growing: bool = True) -> tuple[bool, bool]:
        """Read the times of ended pairs. Return two flags: a pair had ended, and pairs are still in flight."""
        moved, driver = self._store_untimed_spans(), self._driver
        while self.finished:
            self._count_completed_span(self.finished.popleft())
        self._write_intervals()
        waits = False
        for context in list(self.contexts.values()):
            if not context.alive:
                context.drop_all_pairs()
                continue
            if error := self._bind_context(context):
                self.count_error(context, error)
                waits = True  # or the next poll would come at once, again and again
                continue
            while context.begun:
                pair = context.begun[0]
                context.under_way.setdefault(pair.stream, []).append(pair)
                context.begun.popleft()  # last, as `settled_ns` must find it in one of the two
            if any(context.under_way.values()):
                self._take_anchor_if_due(context)
            if growing and len(context.free) < CHUNK and context.made < POOL_LIMIT:
                error = context.add_pairs(self._timer, driver, min(max(context.made, CHUNK), POOL_LIMIT - context.made))
                if error:
                    self.count_error(context, error)
            if not self.pair_ns and context.anchors.newest_event is not None:
                self.pair_ns = self._measure_pair_cost_ns(context)
            moved = self._resolve_context(context) or moved
            waits = waits or any(context.under_way.values())
            context.forget_idle_streams(self._now())
        return moved, waits

    def _bind_context(self, context: Context) -> int:
        bound = get_ident(), context.handle
        error = 0 if bound == self._bound else self._driver.bind_context(context.handle)
        self._bound = None if error else bound
        return error

    def _is_short_of_pairs(self) -> bool:
        return any(
            len(context.free) < CHUNK and context.made < POOL_LIMIT and context.alive
            for context in list(self.contexts.values())
        )

    def _store_untimed_spans(self) -> bool:
        noted = list(self.untimed)
        for span_id, (device, stream), at_ns, label in noted:
            context = self.contexts.get(device)
            number = stream if context is None else context.numbers.get(stream, stream)
            self._store_interval(span_id, device, number, at_ns, at_ns, label, 0)
        self._write_intervals()
        for span in noted:  # last, as `settled_ns` must find them here or in the recording
            if self.untimed[0] is span:  # a newer one has not displaced it
                self.untimed.popleft()
        return bool(noted)

    def _take_anchor_if_due(self, context: Context) -> None:
        anchors, now_ns = context.anchors, self._now()
        newest_ns = anchors.newest_ns
        if now_ns < context.next_anchor_ns or (newest_ns is not None and now_ns - newest_ns < ANCHOR_NS):
            return
        error = anchors.take_anchor()
        if anchors.newest_ns == newest_ns:  # too busy: more queries would make it busier
            context.anchor_pause_ns = min(max(2 * context.anchor_pause_ns, ANCHOR_PAUSE_NS), ANCHOR_NS)
            context.next_anchor_ns = self._now() + context.anchor_pause_ns
        else:
            context.anchor_pause_ns = 0
            if not error and not context.shortest_ns:
                error, context.shortest_ns = context.anchors.measure_shortest_interval()
        if error:
            self.count_error(context, error)

    def watch_busy_devices(self) -> bool:
        """Poll busy devices until a pair ends. Return False if no pair ends in time.

        The observed end serves as an anchor, which is an event with a known host time.
        """
        watched = [self._watch_context(context) for context in list(self.contexts.values()) if context.alive]
        return any(watched)

    def _watch_context(self, context: Context) -> bool:
        newest_ns, now_ns = context.anchors.newest_ns, self._now()
        is_fresh = newest_ns is not None and now_ns - newest_ns < ANCHOR_NS and not context.anchors.needs_anchor_soon
        if is_fresh or not context.anchor_pause_ns or now_ns < context.next_watch_ns:
            return False
        context.next_watch_ns = now_ns + ANCHOR_NS
        query, not_ready = self._driver.query_event, self._driver.NOT_READY
        next_ends = [
            (stream, min(waiting, key=_by_end).end_event)
            for stream, pairs in context.under_way.items()
            if (waiting := [pair for pair in pairs if pair.end_ns and pair.whole is not None and not pair.error])
        ]
        if self._bind_context(context):
            return False
        next_ends = [(stream, event) for stream, event in next_ends if query(event) == not_ready]
        for _ in range(WATCHES if next_ends else 0):
            for stream, event in next_ends:
                asked_ns = self._now()
                if query(event) != not_ready:
                    context.watched = stream
                    return True
                context.pending[stream] = asked_ns
            if self.stopping.is_set():
                break
            sleep(WATCH_S)
        return False

    def _measure_pair_cost_ns(self, context: Context) -> float:
        stream, best_ns = {STREAM: context.anchors.stream}, 0.0
        for _ in range(COST_ROUNDS):
            pairs: list[Pair] = []
            begin_ns = time.thread_time_ns()
            for _ in range(COST_PAIRS):
                pair = self._timer.begin(None, stream, 0)
                if not isinstance(pair, Pair):
                    break
                self._timer.end_pair(pair)
                pairs.append(pair)
            spent_ns = (time.thread_time_ns() - begin_ns) / max(len(pairs), 1)
            for pair in pairs:
                context.begun.remove(pair)
                self._return_pair_to_pool(pair)
            if len(pairs) >= COST_PAIRS // 4:  # else the pool is nearly empty, and the next poll measures
                best_ns = min(best_ns or spent_ns, spent_ns)
        return best_ns

    def _resolve_context(self, context: Context) -> bool:
        moved = False
        watched, context.watched = context.watched, None
        # The watched stream comes first, as its end was seen just now.
        for stream, pairs in sorted(context.under_way.items(), key=lambda item: item[0] != watched):
            ended = [pair for pair in pairs if pair.end_ns]
            if not ended:
                continue
            finished = [pair for pair in ended if pair.whole is None or pair.error]
            waiting = [pair for pair in ended if pair.whole is not None and not pair.error]
            try:
                for pair in finished:
                    self._resolve_untimed(context, stream, pair, pair.error)
                waiting.sort(key=_by_end)
                del waiting[MEASURED_AT_ONCE:]
                asked_ns = self._now()
                events = [(pair.begin, pair.end_event) for pair in waiting]
                answers: list[Answer] = [*self._driver.measure_pairs(context.anchors.newest_event, events)]
                newest_ns = context.anchors.newest_ns
                lacks_anchor = newest_ns is None or self._now() - newest_ns > FARTHEST_NS
                if answers and (stream == watched or lacks_anchor):
                    answers = self._use_end_as_anchor(context, stream, waiting, answers)
                if len(answers) < len(waiting):
                    context.pending[stream] = asked_ns
                answered = list(zip(waiting, answers, strict=False))
                self._placing.compute_host_begins(context, stream, pairs, answered)
                is_alone = all(other_stream == stream for other_stream in (*context.recent, *context.under_way))
                for pair, (error, device_ns, _) in answered:
                    finished.append(pair)
                    self._store_ended_pair(context, stream, pair, error, device_ns, is_alone)
            finally:  # after a fault, too: a pair must not return to the pool twice
                self._write_intervals()
                if finished:
                    moved = True
                    finished_ids = set(map(id, finished))
                    pairs[:] = [pair for pair in pairs if id(pair) not in finished_ids]
            if not context.alive:
                break
        return moved

    def _use_end_as_anchor(
        self, context: Context, stream: int, waiting: list[Pair], answers: list[Answer]
    ) -> list[Answer]:
        """Use the newest end of a pair as an anchor. Offsets from an older anchor are removed from the answers."""
        last = max((index for index, (error, _, _) in enumerate(answers) if not error), default=None)
        if last is None:
            return answers
        pair, anchors, pending_ns = waiting[last], context.anchors, context.pending.get(stream, 0)
        error, event = anchors.take_spare_event()
        if not error:
            error = anchors.adopt_event_as_anchor(pair.end_event, max(pair.end_ns, pending_ns), self._now())
            pair.end_event, pair.end_key = event, self._driver.read_handle(event)
        if error:
            self.count_error(context, error)
            return answers
        return [(error, device_ns, None) for error, device_ns, _ in answers]

    def _store_ended_pair(
        self, context: Context, stream: int, pair: Pair, error: int, device_ns: int, is_alone: bool
    ) -> None:
        whole, place = pair.whole or pair, pair.place
        if error or place is None:
            self._resolve_untimed(context, stream, pair, error)
            return
        start_ns, end_ns, label = self._placing.label_interval(context, stream, pair, place, device_ns, is_alone)
        self.pairs += 1
        if whole.deferred is None:
            self._add_interval(whole, context, stream, start_ns, end_ns, label, place.uncertainty_ns)
        else:
            times = DeferredTimes(context, stream, start_ns, end_ns, label, place.uncertainty_ns, pair.is_side)
            whole.deferred.append(times)
            if len(whole.deferred) >= DEFERRED_LIMIT:
                self._add_deferred_intervals(whole)
                whole.deferred.clear()
        self._count_pair(whole, pair)

    def _count_pair(self, whole: Pair, pair: Pair) -> None:
        whole.taken += 1
        if pair is not whole:
            self._return_pair_to_pool(pair)
        self._count_completed_span(whole)

    def _add_interval(
        self, whole: Pair, context: Context, stream: int, start_ns: int, end_ns: int, label: str, uncertainty_ns: int
    ) -> None:
        whole.add_interval(start_ns, end_ns)
        self._placing.add_recent_interval(context, stream, start_ns, end_ns)
        self._store_interval(whole.span_id, context.device, stream, start_ns, end_ns, label, uncertainty_ns)

    def _add_deferred_intervals(self, whole: Pair) -> None:
        """Add a span's intervals on several streams. Launch-bound intervals are left out if other intervals remain."""
        deferred = whole.deferred or []
        worked = [times for times in deferred if times.label != "launch-bound"]
        worked = worked or [times for times in deferred if not times.is_side] or deferred
        for times in sorted(worked, key=attrgetter("start_ns")):
            overlaps = (
                peer
                for peer in worked
                if peer.context is times.context and peer.stream != times.stream
                if peer.start_ns < times.end_ns - RESOLUTION_NS and times.start_ns < peer.end_ns - RESOLUTION_NS
            )
            context, stream, start_ns, end_ns, label, uncertainty_ns, _ = times
            label = "overlapped" if label != "stale" and any(overlaps) else label
            self._add_interval(whole, context, stream, start_ns, end_ns, label, uncertainty_ns)

    def _resolve_untimed(self, context: Context, stream: int, pair: Pair, error: int) -> None:
        whole = pair.whole
        if whole is None:
            self._return_pair_to_pool(pair)
            return
        self.pairs += 1
        label = self.choose_failure_label(context, error) or "dropped"
        self._store_interval(whole.span_id, context.device, stream, pair.begin_ns, pair.begin_ns, label, 0)
        self._count_pair(whole, pair)

    def _return_pair_to_pool(self, pair: Pair) -> None:
        pair.clear()
        if pair.context.alive:
            pair.context.free.append(pair)

    def _count_completed_span(self, whole: Pair) -> None:
        if whole.row is None or whole.taken < whole.begun:
            return
        ring, index, start_ns, end_ns = whole.row
        try:
            if whole.deferred is not None:
                self._add_deferred_intervals(whole)
            if whole.device_ns and index >= 0:
                host_ns = end_ns - start_ns
                if not self._recorder.count_device(ring, index, host_ns, whole.device_ns, host_ns + whole.beyond_ns):
                    self.counts["device times whose thread's totals had been merged away"] += 1
        finally:
            self._return_pair_to_pool(whole)

    def _store_interval(
        self, span_id: int, device: int, stream: int, start_ns: int, end_ns: int, label: str, uncertainty_ns: int
    ) -> None:
        self._ready.append((span_id, device, stream, start_ns, end_ns, label, uncertainty_ns))
        self.counts[label] += 1

    def _write_intervals(self) -> None:
        intervals, self._ready = self._ready, []
        if intervals:
            self._intervals.add_all(intervals)

    def _has_ended_pairs(self) -> bool:
        return any(
            pair.end_ns for context in self.contexts.values() for pairs in context.under_way.values() for pair in pairs
        )

    def _drop_ended_pairs(self) -> None:
        for context in self.contexts.values():
            for stream, pairs in context.under_way.items() if context.alive else ():
                for pair in [pair for pair in pairs if pair.end_ns]:
                    self._resolve_untimed(context, stream, pair, INTERRUPTED)
                    pairs.remove(pair)
        self._write_intervals()

    def _release_all_events(self) -> None:
        driver = self._driver
        for context in list(self.contexts.values()):
            if not context.alive or driver.bind_context(context.handle):
                continue
            context.alive = False
            # One by one: a thread of the service that begins a span may take a pair meanwhile, and owns it.
            while context.free:
                pair = context.free.pop()
                driver.destroy_event(pair.begin)
                driver.destroy_event(pair.end_event)
            context.anchors.close()
