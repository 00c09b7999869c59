"""The resolver: the thread that takes in what has happened on the devices, and says what it means.

It asks for events instead of waiting for them, disturbs no capture of a graph, and sleeps while nothing is under way.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from operator import attrgetter
from threading import get_ident

from instrument.device import cuda
from instrument.device.anchors import FARTHEST_NS, RESOLUTION_NS
from instrument.device.pairs import Context, Driver, HeldTimes, Pair, Times
from instrument.device.placing import Answer, Placing
from instrument.device.streams import Stream
from instrument.recorder.recorder import Recorder
from instrument.recording.interval_ring import NOTHING_TO_COME, IntervalRing
from instrument.recording.rows import STREAM
from instrument.runtime.faults import FAULTS
from instrument.runtime.threads import Thread
from instrument.runtime.unpatched import Event, sleep

FIRST = 64
CHUNK = 256
"""Pairs that a pool begins with, and that are to be free: with fewer of them the resolver makes as many as there are
already, at least so many."""

LOW = 64
"""With so many that are left free the resolver is woken."""

POOL_LIMIT = 8_192
"""Pairs of a context: as many spans may wait for the device at a time. An event takes some hundred bytes of it."""

IDLE_S = 0.5
POLL_S = (0.05, 0.1)
"""The shortest and the longest time between two looks at events that have not happened.

Each look takes the lock of the interpreter from a busy service, for 20 us and 4 us a pair on an idle machine and for
half a millisecond and more on one whose cores have to be woken, so few looks at many pairs are better than many at few.
"""

ANCHOR_NS = 10**9
ANCHOR_PAUSE_NS = 10**7
"""The time between two anchors, and the first between two tries on a device that is too busy; then twice as long."""

WATCH_S = 5e-5
WATCHES = 300
"""How long a watch of the next end sleeps between two questions, and how often it asks: some 30 ms at most, in a second
in which the device has given no anchor."""

MEASURED_AT_ONCE = 1000
"""Pairs of a stream in one question to the driver: a millisecond of its time at most."""

STREAMS_KEPT = 256
"""Streams of a context of which is known what they have done. Those that nothing can be held against go before."""

HELD_LIMIT = 512
"""Stretches of a span on several streams that are held until it ends. Of a generator that runs for days as many at a
time are told of, each time by what these tell."""

INTERRUPTED = -2
"""In place of an error: a signal handler's exception came between, so that nothing is known of the event."""

ROW_NS = 10**7
"""How long a span's row may be there before its pair says that the span has ended."""

TELL_NS = 2 * 10**7
"""How often others are told up to when everything is resolved."""

STOP_NS = 10**9
STOP_POLL_S = 0.001
"""The longest that `stop` waits for the device, and how long between two looks."""


COST_ROUNDS, COST_PAIRS = 3, 16

_by_end = attrgetter("end_ns")


def _ended_at(pair: Pair) -> int:
    """When the span of a pair has ended on the host, or else the pair; 0 or less where nobody waits for either."""
    row = None if pair.whole is None else pair.whole.row
    return pair.end_ns if row is None else row[3]


class Resolver:
    """Resolves the pairs of all contexts. `start` and `stop` are called by one thread, `look` by its own or a test's.

    `counts` tells how many intervals of each label there were and which errors; `faults` why a device is given up.
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
        """How many pairs have been taken in, timed or not."""
        self.pair_ns = 0.0
        """What a pair costs the thread of the service, measured on this device."""
        self.thread_ns = 0
        """Processor time of the resolver's thread."""
        self._placing = Placing(driver, now)
        self._told: list[tuple[int, int, int, int, int, str, int]] = []
        """Intervals that others are about to be told of, all at once."""
        self._told_ns = 0
        self._bound: tuple[int, int] | None = None
        self._waking = Event()
        self._stopping = Event()
        self._thread: Thread | None = None

    def start(self) -> None:
        """Begin to look, on a thread of its own."""
        if self._thread is None and not self._stopping.is_set():
            self._intervals.tell_settled(self._now() - ROW_NS)
            self._thread = Thread(self._look_until_stopped, "instrument-device", lambda: not self._stopping.is_set())
            self._thread.start()

    def stop(self, limit_s: float = math.inf) -> None:
        """Wait a moment for what is under way, give everything back to the driver, end. Idempotent."""
        self._stopping.set()
        self._waking.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(min(limit_s, 2 * STOP_NS / 1e9))
            self._intervals.tell_settled(NOTHING_TO_COME)

    @property
    def is_running(self) -> bool:
        """Whether there is a thread that looks."""
        return self._thread is not None

    @property
    def is_stopping(self) -> bool:
        """Whether nothing new is to be begun."""
        return self._stopping.is_set()

    def disown(self) -> None:
        """In a forked child: what is open here is the parent's, and so is the thread that somebody would wake."""
        self.asleep = False
        for context in self.contexts.values():
            context.alive = False

    def settled_ns(self) -> int:
        """Up to when everything is resolved that had ended on the host by then."""
        now_ns = self._now()
        waiting = [
            end_ns
            for context in list(self.contexts.values())
            for pair in [*context.begun, *(pair for pairs in list(context.under_way.values()) for pair in list(pairs))]
            if (end_ns := _ended_at(pair)) > 0
        ]
        waiting += [at_ns for _, _, at_ns, _ in list(self.untimed)]
        waiting += map(_ended_at, list(self.finished))
        return min([now_ns - ROW_NS, *(end_ns - 1 for end_ns in waiting)])

    def _tell_settled(self) -> None:
        now_ns = self._now()
        if now_ns - self._told_ns >= TELL_NS:
            self._told_ns = now_ns
            self._intervals.tell_settled(self.settled_ns())

    def wake(self) -> None:
        """Look now, not when it is time to."""
        self.asleep = False
        self._waking.set()

    def grow(self, context: Context, pairs: int) -> int:
        """More events for the pool of the context that is current here."""
        driver = self._driver
        for _ in range(pairs):
            error, begin = driver.new_event()
            if not error:
                error, end = driver.new_event()
                if error:
                    driver.destroy_event(begin)
            if error:
                return error
            context.free.append(Pair(self._timer, context, begin, end, driver.handle(begin), driver.handle(end)))
            context.made += 1
        return 0

    def fail(self, context: Context, error: int) -> None:
        """Count an error of the driver; give the device up after one that says that nothing else will come."""
        driver = self._driver
        name = driver.name(error)
        self.counts[f"device {context.device}: {name}"] += 1
        if error in cuda.FATAL and context.alive:
            context.alive = False
            self.faults[context.device] = f"device {context.device} is given up: the driver says {name}"

    def refused(self, context: Context, error: int) -> str:
        """The label of a span whose event was not taken."""
        if error == self._driver.CAPTURING or error in cuda.CAPTURE_ERRORS:
            return "captured"
        if error == INTERRUPTED:
            return "dropped"
        self.fail(context, error)
        return "dropped" if context.alive else ""

    def _look_until_stopped(self) -> None:
        stopping, waking = self._stopping, self._waking
        pause_s = POLL_S[0]
        while True:
            waking.clear()
            if stopping.is_set():  # asked after the other, for `stop` sets it before
                break
            try:
                moved, waits = self.look()
                if waits and self.watch():
                    continue
            except Exception as fault:
                FAULTS.note("device thread", fault)
                moved, waits = False, True
            self.thread_ns = time.thread_time_ns()
            self._tell_settled()
            if waits:
                is_quiet = not moved and pause_s >= POLL_S[1]
                pause_s = POLL_S[0] if moved else min(2 * pause_s, POLL_S[1])
                if not is_quiet or self._has_ended_pairs():
                    waking.wait(pause_s)
                    continue
            # All that is under way is open spans, if any: who ends one wakes us.
            self.asleep = True
            # Whoever began or ended a span before it saw us asleep is found here.
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
                if not stopping.is_set():  # where one span has ended others do soon, and one look takes in all of them
                    waking.wait(POLL_S[0])
        end_ns = time.monotonic_ns() + STOP_NS
        try:
            while self.look(growing=False)[1] and time.monotonic_ns() < end_ns and self._has_ended_pairs():
                sleep(STOP_POLL_S)
            self._drop_ended_pairs()
            self._close()
        except Exception as fault:
            FAULTS.note("device thread", fault)

    def look(self, *, growing: bool = True) -> tuple[bool, bool]:
        """Take in every event that has happened. Whether any had, and whether some are still waited for."""
        moved = self._note_untimed()
        while self.finished:
            self._count_if_done(self.finished.popleft())
        self._tell_intervals()
        waits = False
        for context in list(self.contexts.values()):
            if not context.alive:
                self._give_up(context)
                continue
            error = self._bind(context)
            if error:
                self.fail(context, error)
                waits = True  # or the next look would come at once, again and again
                continue
            while context.begun:
                pair = context.begun[0]
                context.under_way.setdefault(pair.stream, []).append(pair)
                context.begun.popleft()  # last, for `settled_ns` must find it on one of the two
            if any(context.under_way.values()):
                self._anchor_if_due(context)
            if growing and len(context.free) < CHUNK and context.made < POOL_LIMIT:
                error = self.grow(context, min(max(context.made, CHUNK), POOL_LIMIT - context.made))
                if error:
                    self.fail(context, error)
            if not self.pair_ns and context.anchors.newest_event is not None:
                self.pair_ns = self._measured_cost(context)
            moved = self._resolve(context) or moved
            waits = waits or any(context.under_way.values())
            self._forget_streams(context)
        return moved, waits

    def _bind(self, context: Context) -> int:
        """Make a context current on this thread, which it stays: each call of the driver is a hand-over of the lock."""
        bound = get_ident(), context.handle
        error = 0 if bound == self._bound else self._driver.bind(context.handle)
        self._bound = None if error else bound
        return error

    def _is_short_of_pairs(self) -> bool:
        return any(
            len(context.free) < CHUNK and context.made < POOL_LIMIT and context.alive
            for context in list(self.contexts.values())
        )

    def _forget_streams(self, context: Context) -> None:
        """Streams come and go with requests: what has become of those that are idle is not kept for ever.

        What ended before the oldest open pair began overlaps nothing to come, and moves nothing to come.
        """
        under_way, recent, floors = context.under_way, context.recent, context.floors
        for stream in [stream for stream, pairs in under_way.items() if not pairs]:
            del under_way[stream]
            context.pending.pop(stream, None)
        if len(recent) > 1:
            horizon_ns = min((pair.begin_ns for pairs in under_way.values() for pair in pairs), default=None)
            if horizon_ns is None:
                horizon_ns = min((pair.begin_ns for pair in list(context.begun)), default=self._now())
            idle = [stream for stream, stretches in recent.items() if stretches[-1][1] <= horizon_ns]
            beyond = len(recent) - len(idle) - STREAMS_KEPT
            if beyond > 0:
                idle += [stream for stream in recent if stream not in under_way][:beyond]
            for stream in idle:
                recent.pop(stream, None)
                if stream not in under_way:
                    floors.pop(stream, None)

    def _note_untimed(self) -> bool:
        noted = list(self.untimed)
        for span_id, (device, stream), at_ns, label in noted:
            context = self.contexts.get(device)
            number = stream if context is None else context.numbers.get(stream, stream)
            self._keep(span_id, device, number, at_ns, at_ns, label, 0)
        self._tell_intervals()
        for one in noted:  # last, for `settled_ns` must find them here or told
            if self.untimed[0] is one:  # not pushed out meanwhile
                self.untimed.popleft()
        return bool(noted)

    def _anchor_if_due(self, context: Context) -> None:
        anchors, now_ns = context.anchors, self._now()
        newest_ns = anchors.newest_ns
        if now_ns < context.next_anchor_ns or (newest_ns is not None and now_ns - newest_ns < ANCHOR_NS):
            return
        error = anchors.renew()
        if anchors.newest_ns == newest_ns:  # too busy: whoever asks again and again makes it busier
            context.anchor_pause_ns = min(max(2 * context.anchor_pause_ns, ANCHOR_PAUSE_NS), ANCHOR_NS)
            context.next_anchor_ns = self._now() + context.anchor_pause_ns
        else:
            context.anchor_pause_ns = 0
            if not error and not context.shortest_ns:
                error, context.shortest_ns = context.anchors.least_ns()
        if error:
            self.fail(context, error)

    def watch(self) -> bool:
        """Stay close to the next ends on devices that are too busy to be read: an end that is seen to happen tells as
        much as an anchor. Whether one was, which is to be looked at now."""
        watched = [self._watch(context) for context in list(self.contexts.values()) if context.alive]
        return any(watched)

    def _watch(self, context: Context) -> bool:
        newest_ns, now_ns = context.anchors.newest_ns, self._now()
        is_fresh = newest_ns is not None and now_ns - newest_ns < ANCHOR_NS and not context.anchors.is_loose
        if is_fresh or not context.anchor_pause_ns or now_ns < context.next_watch_ns:
            return False
        context.next_watch_ns = now_ns + ANCHOR_NS
        query, not_ready = self._driver.query, self._driver.NOT_READY
        next_ends = [
            (stream, min(waiting, key=_by_end).end_event)
            for stream, pairs in context.under_way.items()
            if (waiting := [pair for pair in pairs if pair.end_ns and pair.whole is not None and not pair.error])
        ]
        if self._bind(context):
            return False
        next_ends = [(stream, event) for stream, event in next_ends if query(event) == not_ready]
        for _ in range(WATCHES if next_ends else 0):
            for stream, event in next_ends:
                asked_ns = self._now()
                if query(event) != not_ready:
                    context.watched = stream
                    return True
                context.pending[stream] = asked_ns
            if self._stopping.is_set():
                break
            sleep(WATCH_S)
        return False

    def _measured_cost(self, context: Context) -> float:
        """What `begin` and `end` of a pair take on a stream of ours, the best of some rounds; 0 where none succeeds.

        Processor time: to have waited for the interpreter's lock says nothing of the thread of the service.
        """
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
                self._give_back(pair)
            if len(pairs) >= COST_PAIRS // 4:  # a pool that is nearly empty tells the next time
                best_ns = min(best_ns or spent_ns, spent_ns)
        return best_ns

    def _resolve(self, context: Context) -> bool:
        """Take in what has happened on each stream, in the order of its ends."""
        moved = False
        watched, context.watched = context.watched, None
        # The one that was watched comes first: what is known of its end holds for this moment.
        for stream, pairs in sorted(context.under_way.items(), key=lambda item: item[0] != watched):
            ended = [pair for pair in pairs if pair.end_ns]
            if not ended:
                continue
            done = [pair for pair in ended if pair.whole is None or pair.error]
            waiting = [pair for pair in ended if pair.whole is not None and not pair.error]
            try:
                for pair in done:
                    self._lose(context, stream, pair, pair.error)
                waiting.sort(key=_by_end)
                del waiting[MEASURED_AT_ONCE:]
                asked_ns = self._now()
                events = [(pair.begin, pair.end_event) for pair in waiting]
                answers: list[Answer] = [*self._driver.measure(context.anchors.newest_event, events)]
                if answers and (stream == watched or self._lacks_anchor(context)):
                    answers = self._anchor_by_end(context, stream, waiting, answers)
                if len(answers) < len(waiting):
                    context.pending[stream] = asked_ns
                answered = list(zip(waiting, answers, strict=False))
                self._placing.put_in_order(context, stream, pairs, answered)
                is_alone = all(other == stream for other in (*context.recent, *context.under_way))
                for pair, (error, device_ns, _) in answered:
                    done.append(pair)
                    self._take(context, stream, pair, error, device_ns, is_alone)
            finally:  # after a fault, too: a pair that lies in the pool again must not be taken twice
                self._tell_intervals()
                if done:
                    moved = True
                    gone = set(map(id, done))
                    pairs[:] = [pair for pair in pairs if id(pair) not in gone]
            if not context.alive:
                break
        return moved

    def _lacks_anchor(self, context: Context) -> bool:
        newest_ns = context.anchors.newest_ns
        return newest_ns is None or self._now() - newest_ns > FARTHEST_NS

    def _anchor_by_end(self, context: Context, stream: int, waiting: list[Pair], answers: list[Answer]) -> list[Answer]:
        """On a device that is too busy to be read: the last end that has just been seen stands for an anchor.

        It happened after it was recorded, after the last look at which the stream had not come to it, and before now.
        Returns the answers without the places that an anchor before told, if any.
        """
        last = max((index for index, (error, _, _) in enumerate(answers) if not error), default=None)
        if last is None:
            return answers
        pair, anchors = waiting[last], context.anchors
        pending_ns = context.pending.get(stream, 0)
        error, event = anchors.exchange()
        if not error:
            error = anchors.adopt(pair.end_event, max(pair.end_ns, pending_ns), self._now())
            pair.end_event, pair.end_key = event, self._driver.handle(event)
        if error:
            self.fail(context, error)
            return answers
        return [(error, device_ns, None) for error, device_ns, _ in answers]

    def _take(self, context: Context, stream: int, pair: Pair, error: int, device_ns: int, is_alone: bool) -> None:
        """One stretch is over: its label, its span."""
        whole, place = pair.whole or pair, pair.place
        if error or place is None:
            self._lose(context, stream, pair, error)
            return
        start_ns, end_ns, label = self._placing.labelled(context, stream, pair, place, device_ns, is_alone)
        self.pairs += 1
        if whole.held is None:
            self._tell(whole, context, stream, start_ns, end_ns, label, place.uncertainty_ns)
        else:
            told = HeldTimes(context, stream, start_ns, end_ns, label, place.uncertainty_ns, pair.is_beside)
            whole.held.append(told)
            if len(whole.held) >= HELD_LIMIT:
                self._tell_held(whole)
                whole.held.clear()
        whole.taken += 1
        if pair is not whole:
            self._give_back(pair)
        self._count_if_done(whole)

    def _tell(
        self, whole: Pair, context: Context, stream: int, start_ns: int, end_ns: int, label: str, uncertainty_ns: int
    ) -> None:
        whole.add(start_ns, end_ns)
        self._placing.remember(context, stream, start_ns, end_ns)
        self._keep(whole.span_id, context.device, stream, start_ns, end_ns, label, uncertainty_ns)

    def _tell_held(self, whole: Pair) -> None:
        """Of a span that was timed on several streams: those on which it worked, as far as they can be told.

        A stream that had run dry when the span ended may have had nothing to do. Where all had, the first one is told.
        """
        held = whole.held or []
        worked = [told for told in held if told.label != "launch-bound"]
        worked = worked or [told for told in held if not told.is_beside] or held
        for told in sorted(worked, key=attrgetter("start_ns")):
            others = (
                other
                for other in worked
                if other.context is told.context and other.stream != told.stream
                if other.start_ns < told.end_ns - RESOLUTION_NS and told.start_ns < other.end_ns - RESOLUTION_NS
            )
            context, stream, start_ns, end_ns, label, uncertainty_ns, _ = told
            label = "overlapped" if label != "stale" and any(others) else label
            self._tell(whole, context, stream, start_ns, end_ns, label, uncertainty_ns)

    def _lose(self, context: Context, stream: int, pair: Pair, error: int) -> None:
        """A stretch that was not timed, or belongs to no span after all."""
        whole = pair.whole
        if whole is None:
            self._give_back(pair)
            return
        self.pairs += 1
        label = self.refused(context, error) or "dropped"
        self._keep(whole.span_id, context.device, stream, pair.begin_ns, pair.begin_ns, label, 0)
        whole.taken += 1
        if pair is not whole:
            self._give_back(pair)
        self._count_if_done(whole)

    def _give_back(self, pair: Pair) -> None:
        pair.clear()
        if pair.context.alive:
            pair.context.free.append(pair)

    def _count_if_done(self, whole: Pair) -> None:
        if whole.row is None or whole.taken < whole.begun:
            return
        ring, index, start_ns, end_ns = whole.row
        try:
            if whole.held is not None:
                self._tell_held(whole)
            if whole.device_ns and index >= 0:
                host_ns = end_ns - start_ns
                if not self._recorder.count_device(ring, index, host_ns, whole.device_ns, host_ns + whole.beyond_ns):
                    self.counts["device times whose thread's totals had been merged away"] += 1
        finally:
            self._give_back(whole)

    def _keep(
        self, span_id: int, device: int, stream: int, start_ns: int, end_ns: int, label: str, uncertainty_ns: int
    ) -> None:
        self._told.append((span_id, device, stream, start_ns, end_ns, label, uncertainty_ns))
        self.counts[label] += 1

    def _tell_intervals(self) -> None:
        told, self._told = self._told, []
        if told:
            self._intervals.add_all(told)

    def _give_up(self, context: Context) -> None:
        """Nothing will come from this device any more."""
        for pair in [*context.begun, *(pair for pairs in context.under_way.values() for pair in pairs)]:
            pair.whole = None
        context.recent.clear()
        context.floors.clear()
        context.begun.clear()
        context.under_way.clear()
        context.pending.clear()
        context.free.clear()

    def _has_ended_pairs(self) -> bool:
        return any(
            pair.end_ns for context in self.contexts.values() for pairs in context.under_way.values() for pair in pairs
        )

    def _drop_ended_pairs(self) -> None:
        """Nobody waits any longer for what the device has not come to."""
        for context in self.contexts.values():
            for stream, pairs in context.under_way.items() if context.alive else ():
                for pair in [pair for pair in pairs if pair.end_ns]:
                    self._lose(context, stream, pair, INTERRUPTED)
                    pairs.remove(pair)
        self._tell_intervals()

    def _close(self) -> None:
        """Give everything back to the driver."""
        driver = self._driver
        for context in list(self.contexts.values()):
            if not context.alive or driver.bind(context.handle):
                continue
            context.alive = False
            # One by one: a thread of the service that is just beginning a span may take one meanwhile, and owns it.
            while context.free:
                pair = context.free.pop()
                driver.destroy_event(pair.begin)
                driver.destroy_event(pair.end_event)
            context.anchors.close()
