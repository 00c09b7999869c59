"""Which trees are kept: each request's spans are held until it ends, and its end decides.

A request is kept when it is sampled, slow, failed, or bears the attributes that are asked for. Trees without a request
(an engine's steps, background work) are kept by the sample alone, and at once, because such a root may stay open for
the life of the process. Of those that the sample leaves out `instrument.otlp.processor.keyed_trees` sends what bears
the key of a kept request, and the batches that served it.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from operator import ge, gt, le, lt
from typing import TYPE_CHECKING, Any, Protocol

from instrument.profile.model import Capture, Rate, Usual, Where
from instrument.recorder.shared_decisions import LINGER_NS, Decisions, Strays
from instrument.recorder.shelf import DECIDED_ROOTS, HELD_ROWS, Held, is_sampled
from instrument.recording.histogram import percentiles
from instrument.recording.lines import WIDTH, Lines
from instrument.recording.remote_parents import REMOTE, RemoteParent, remote_of
from instrument.recording.rows import (
    ATTRIBUTES,
    END_NS,
    ERROR,
    REQUEST_BIT,
    ROOT_ID,
    SPAN_ID,
    START_NS,
    Row,
    is_request_root,
)
from instrument.recording.spans import KEY, Site, Span

if TYPE_CHECKING:
    from instrument.recorder.recorder import Recorder

LEAST_CALLS = 100
"""Requests of an endpoint from which on it is told what is usual there: those before wait for that."""

LONGEST_NS = (1 << 63) - 1

USUAL_FOR_NS = 10**9
"""How long what is usual counts as known."""

_COMPARED: Mapping[str, Callable[[Any, Any], bool]] = {">=": ge, ">": gt, "<=": le, "<": lt}


class RowSource(Protocol):
    """Where rows come from, and what there is to know of them: a process's own recorder, or another's recording."""

    def shelf(self, sample: float, spans_per_request: int) -> Any:
        """Where rows of open requests are put aside."""

    def cursor(self, read_on: Callable[[Any, int], tuple[list[Row], int, int]]) -> Any:
        """What reads on in each ring, by `read_on` of a shelf."""

    def open_rows(self) -> list[tuple[int, Row]]:
        """The spans that are open now."""

    def span(self, row: Row, thread_id: int) -> Span:
        """The span that a row stands for."""

    def site_of(self, row: Row) -> Site:
        """The site of a row."""

    def lines(self, *, merged: bool = False) -> Lines:
        """All totals up to now."""


class Trees:
    """Groups rows by tree as they finish and hands the trees that are kept to `keep`. Used by one thread.

    `keep(spans)` gets the spans of one tree. Spans of a kept request that end after it are handed over as they come;
    they bear the `remote` of their root, so that they still find its trace. `note_ended(rows)` gets each request that
    has ended, kept or not. Where other processes serve the same requests they decide together by `decisions`;
    `trace_id` tells the trace of a root that nobody else has called. What others may keep in the tree of a request that
    is let go is handed to the `strays`.
    """

    def __init__(
        self,
        recorder: RowSource,
        capture: Capture,
        spans_per_request: int,
        keep: Callable[[list[Span]], None],
        note_ended: Callable[[Sequence[Row]], object] | None = None,
        decisions: Decisions | None = None,
        trace_id: Callable[[int], int] = lambda root_id: root_id,
        strays: Strays | None = None,
    ) -> None:
        self._recorder = recorder
        self._capture = capture
        self._keep = keep
        self._note_ended = note_ended
        self._decisions = decisions
        self._trace_id = trace_id
        self._strays = strays
        self._lingering: deque[tuple[int, int, set[str], list[Held]]] = deque()
        """Requests that others may keep: until when, of which trace, by which keys, and their rows."""
        self._lingering_rows = 0
        self._spans_per_request = spans_per_request
        self._shelf = recorder.shelf(capture.sample, spans_per_request)
        self._cursor = recorder.cursor(self._shelf.sort)
        self._lost_before = 0
        self._remotes: OrderedDict[int, RemoteParent | None] = OrderedDict()
        self._wanted: OrderedDict[int, None] = OrderedDict()
        self._recent: deque[tuple[int, list[Held]]] = deque()
        self._recent_rows = 0
        self._allowance = _Allowance(capture.limit)
        self._usual = _UsualTimes(recorder, capture.slow_over)
        self._early: OrderedDict[object, list[list[Held]]] = OrderedDict()
        """Requests, each with its rows, of endpoints of which too few have ended."""
        self._early_rows = 0
        self._counts: Counter[str] = Counter()

    @property
    def lost(self) -> int:
        """Rows that were overwritten before they were looked at."""
        lost: int = self._lost_before + self._cursor.lost
        return lost

    @property
    def taken(self) -> int:
        """Rows that were looked at since it began, skipped or went on."""
        taken: int = self._cursor.taken
        return taken

    def skip(self) -> None:
        """Leave what was recorded up to now unread."""
        self._lost_before = self.lost
        self._cursor = self._recorder.cursor(self._shelf.sort)

    @property
    def held(self) -> int:
        """Rows of requests that have not ended."""
        held: int = self._shelf.held
        return held

    @property
    def places(self) -> Mapping[int, int]:
        """The next row of each thread, by its native id."""
        places: Mapping[int, int] = self._cursor.places
        return places

    def go_on(self, places: Mapping[int, int], done: int | None = None) -> None:
        """Read on from these rows of each thread, with nothing put aside: what was read before is another's.

        `done` is the number of all rows that others have read, or missed.
        """
        self._counts.update(self._shelf.counts)
        self._shelf = self._recorder.shelf(self._capture.sample, self._spans_per_request)
        self._remotes.clear()
        self._recent.clear()
        self._early.clear()
        self._lingering.clear()
        self._recent_rows = self._early_rows = self._lingering_rows = 0
        self.skip()
        self._cursor.go_on(places, done)

    def change(self, capture: Capture, spans_per_request: int) -> None:
        """Decide by other settings from now on."""
        if capture.limit != self._capture.limit:
            self._allowance = _Allowance(capture.limit)
        if capture.slow_over != self._capture.slow_over:
            self._usual = _UsualTimes(self._recorder, capture.slow_over)
            self._early.clear()
            self._early_rows = 0
        self._capture, self._spans_per_request = capture, spans_per_request
        self._shelf.change(capture.sample, spans_per_request)

    def take(self, *, is_last: bool = False) -> list[tuple[int, int]]:
        """Sort new rows into their trees. Returns start and end of each request that ended, in the order of ends.

        The last time no request waits for what others keep.
        """
        loose: dict[int, list[Span]] = {}
        ended: list[Held] = []
        for thread_id, rows in self._cursor.read():
            for row in rows:
                if is_request_root(row):
                    ended.append((row, thread_id))
                else:
                    loose.setdefault(row[ROOT_ID], []).append(self._recorder.span(row, thread_id))
        # A request's children may lie in the ring of another thread, read after its own: decide when all are sorted.
        ended.sort(key=lambda held: held[0][END_NS])
        rows_ended = [row for row, _ in ended]
        if self._note_ended is not None:
            self._note_ended(rows_ended)
        self._usual.look(rows_ended)
        for row, thread_id in ended:
            self._end_request(row, thread_id)
        self._judge_early()
        self._judge_lingering(is_last=is_last)
        for root_id, spans in loose.items():
            if self._strays is not None and root_id & REQUEST_BIT and root_id not in self._remotes:
                self._strays.take(spans)
                continue
            remote = self._remotes.get(root_id)
            for span in spans:
                span.remote = remote or span.remote
            self._keep(spans)
        return [(row[START_NS], row[END_NS]) for row, _ in ended]

    def keep_open(self, root_ids: Set[int]) -> None:
        """Keep those of these requests that are open now, whatever their end is like."""
        for _, row in self._recorder.open_rows():
            if row[SPAN_ID] in root_ids and is_request_root(row):
                self._wanted[row[SPAN_ID]] = None
        while len(self._wanted) > DECIDED_ROOTS:
            self._wanted.popitem(last=False)

    def left_out(self, spans: Iterable[Span]) -> list[Span]:
        """Those spans that nobody is handed: of requests that were passed, and of other trees outside of the sample.

        What is left out here is never kept later.
        """
        spans = list(spans)
        requests = {span.span_id: span for span in spans if span.site.kind == "request"}
        passed: dict[int, bool] = {}
        for span in spans:
            if span.root_id not in passed:
                passed[span.root_id] = self._is_passed(span.root_id, requests.get(span.root_id))
        self._recent = deque((end_ns, held) for end_ns, held in self._recent if not passed.get(held[0][0][SPAN_ID]))
        self._recent_rows = sum(len(held) for _, held in self._recent)
        for endpoint, waiting in self._early.items():
            self._early[endpoint] = [held for held in waiting if not passed.get(held[0][0][SPAN_ID])]
        self._early_rows = sum(len(held) for waiting in self._early.values() for held in waiting)
        return [span for span in spans if passed[span.root_id]]

    def _is_passed(self, root_id: int, request: Span | None) -> bool:
        if root_id in self._remotes or root_id in self._wanted:
            return False
        if request is not None and request.remote is not None:
            return not request.remote.flags & 1
        return not is_sampled(root_id, self._capture.sample)

    def _end_request(self, row: Row, thread_id: int) -> None:
        self._counts["requests"] += 1
        remote = remote_of((row[ATTRIBUTES] or {}).get(REMOTE))
        root = (row, thread_id)
        is_shared = self._decisions is not None and self._decisions.are_shared
        if self._asked_for(row, remote) or (is_shared and self._is_kept_by_others(self._trace_of(row, remote))):
            self._hand_over(root, self._decide(row, keep=True), remote)
        elif self._stands_out(row):
            if self._allowance.take(row[END_NS]):
                self._keep_before(row[START_NS])
                self._hand_over(root, self._decide(row, keep=True), remote)
            else:
                self._let_go(root, self._decide(row, keep=False, wanted=self._may_have_strays(row)))
                self._counts["requests beyond the capture limit"] += 1
        else:
            is_early = self._usual.is_early(row)
            has_strays = self._may_have_strays(row)
            held = self._decide(row, keep=False, wanted=is_early or is_shared or has_strays)
            if is_early:
                self._wait(root, held)
            if is_shared and self._decisions is not None:
                both, until_ns = [root, *held], time.monotonic_ns() + LINGER_NS + self._decisions.lag_ns
                self._lingering.append((until_ns, self._trace_of(row, remote), _keys_of(both), both))
                self._lingering_rows += len(held) + 1
            elif has_strays:
                self._let_go(root, held)
            self._pass(root, held)

    def _may_have_strays(self, row: Row) -> bool:
        return self._strays is not None and self._strays.may_be_in(row[ROOT_ID])

    def _let_go(self, root: Held, held: Sequence[Held]) -> None:
        """Hand on what other requests may keep in the tree of one that is let go."""
        if self._strays is not None and len(_keys_of([root, *held])) > 1:
            self._strays.take([self._recorder.span(row, thread_id) for row, thread_id in (root, *held)])

    def _decide(self, row: Row, *, keep: bool, wanted: bool = False) -> list[Held]:
        held: list[Held] = self._shelf.decide(row[ROOT_ID], keep, keep or wanted or bool(self._capture.before_ns))
        return held

    def _wait(self, root: Held, held: list[Held]) -> None:
        """Hold a request until it is known what is usual for its endpoint."""
        self._early.setdefault(self._usual.endpoint(root[0]), []).append([root, *held])
        self._early_rows += len(held) + 1
        while self._early_rows > HELD_ROWS:
            _, waiting = self._early.popitem(last=False)
            self._early_rows -= sum(map(len, waiting))

    def _judge_early(self) -> None:
        """Keep the slow ones among the first requests of the endpoints of which enough have ended by now."""
        for endpoint in [known for known in self._early if self._usual.limit_ns(known) is not None]:
            for root, *held in self._early.pop(endpoint):
                row = root[0]
                self._early_rows -= len(held) + 1
                if row[ROOT_ID] in self._remotes or not self._usual.is_slow(row):
                    continue
                if self._allowance.take(row[END_NS]):
                    self._decide(row, keep=True)
                    self._hand_over(root, held, remote_of((row[ATTRIBUTES] or {}).get(REMOTE)))
                else:
                    self._counts["requests beyond the capture limit"] += 1

    def _trace_of(self, row: Row, remote: RemoteParent | None) -> int:
        return self._trace_id(row[ROOT_ID]) if remote is None else remote.trace_id

    def _is_kept_by_others(self, trace_id: int) -> bool:
        return self._decisions is not None and self._decisions.is_kept(trace_id)

    def _by_keys(self, keys: Iterable[str], at_ns: int) -> set[bool | None]:
        """What others have decided about the requests of these keys; None of what is open."""
        return set() if self._decisions is None else {self._decisions.by_key(key, at_ns) for key in keys}

    @property
    def lingers(self) -> bool:
        """Whether there are requests that others may still keep."""
        return bool(self._lingering)

    def _judge_lingering(self, *, is_last: bool) -> None:
        """Keep what others keep by now; what nobody has kept in time is let go."""
        now_ns, waiting = time.monotonic_ns(), self._lingering
        self._lingering = deque()
        for until_ns, trace_id, keys, (root, *held) in waiting:
            row = root[0]
            own_keys = keys if self._strays is None or len(keys) < 2 else keys - self._strays.keys(row[ROOT_ID])
            decided = self._by_keys(own_keys, row[START_NS])
            if row[ROOT_ID] in self._remotes:
                is_over = True
            elif self._is_kept_by_others(trace_id) or True in decided:
                is_over = True
                self._decide(row, keep=True)
                self._hand_over(root, held, remote_of((row[ATTRIBUTES] or {}).get(REMOTE)))
            else:
                is_over = (now_ns >= until_ns and None not in decided) or self._lingering_rows > HELD_ROWS or is_last
                if is_over:
                    self._let_go(root, held)
            if is_over:
                self._lingering_rows -= len(held) + 1
            else:
                self._lingering.append((until_ns, trace_id, keys, [root, *held]))

    def _asked_for(self, row: Row, remote: RemoteParent | None) -> bool:
        """A caller that traces has decided already; otherwise the sample does."""
        if row[ROOT_ID] in self._wanted:
            del self._wanted[row[ROOT_ID]]
            return True
        if remote is not None:
            return bool(remote.flags & 1) and not self._capture.is_off
        return is_sampled(row[ROOT_ID], self._capture.sample)

    def _stands_out(self, row: Row) -> bool:
        slow_ns, where = self._capture.slow_ns, self._capture.where
        return (
            (self._capture.errors and row[ERROR] is not None)
            or (slow_ns is not None and row[END_NS] - row[START_NS] >= slow_ns)
            or self._usual.is_slow(row)
            or (bool(where) and all(_holds(one, row, self._recorder.site_of(row)) for one in where))
        )

    def _hand_over(self, root: Held, held: list[Held], remote: RemoteParent | None) -> None:
        self._remotes[root[0][ROOT_ID]] = remote
        if self._decisions is not None:
            self._decisions.keep(self._trace_of(root[0], remote))
        if len(self._remotes) > DECIDED_ROOTS:
            self._remotes.popitem(last=False)
        self._counts["requests kept"] += 1
        # Root first, the rest in the order in which they ended.
        self._keep([self._recorder.span(row, thread_id) for row, thread_id in (root, *held)])

    def _pass(self, root: Held, held: list[Held]) -> None:
        """Leave a request to the ring, held a while longer where a later one may want what came before it."""
        if not self._capture.before_ns:
            return
        end_ns = root[0][END_NS]
        self._recent.append((end_ns, [root, *held]))
        self._recent_rows += len(held) + 1
        while self._recent and (self._recent[0][0] < end_ns - self._capture.before_ns or self._recent_rows > HELD_ROWS):
            self._recent_rows -= len(self._recent.popleft()[1])

    def _keep_before(self, start_ns: int) -> None:
        while self._recent:
            end_ns, (root, *held) = self._recent.popleft()
            self._recent_rows -= len(held) + 1
            if end_ns >= start_ns - self._capture.before_ns and root[0][ROOT_ID] not in self._remotes:
                self._decide(root[0], keep=True)
                self._hand_over(root, held, remote_of((root[0][ATTRIBUTES] or {}).get(REMOTE)))

    def counts(self) -> Mapping[str, Any]:
        """Requests seen and kept, and what was not kept, by reason."""
        return self._counts + Counter(self._shelf.counts)


class Ends:
    """When the spans of some sites have ended. Used by one thread; goes through every row, at 0.5 us each."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._cursor = recorder.cursor()

    @property
    def lost(self) -> int:
        """Rows that were overwritten before they were looked at."""
        return self._cursor.lost

    def take(self, sites: Container[Site]) -> list[int]:
        """The ends since the last time, in order."""
        site_of = self._recorder.site_of
        return sorted(row[END_NS] for _, rows in self._cursor.read() for row in rows if site_of(row) in sites)


def _holds(condition: Where, row: Row, site: Site) -> bool:
    """Whether a condition holds for what a span was given, or else for what its site was."""
    found = (row[ATTRIBUTES] or {}).get(condition.attribute)
    if found is None:
        found = dict(site.attributes).get(condition.attribute)
    values = found if isinstance(found, list | tuple) else (found,)
    return any(_fits(value, *comparison) for value in values for comparison in condition.any_of)


def _fits(found: object, how: str, wanted: str | bool | float) -> bool:
    if how == "=":
        return found == wanted and isinstance(found, bool) == isinstance(wanted, bool)
    return isinstance(found, int | float) and not isinstance(found, bool) and _COMPARED[how](found, wanted)


class _UsualTimes:
    """How long the requests of each endpoint may take before they are slow, by the tally's histograms.

    An endpoint is what the requests of one site are. The tally counts them since the session began.
    """

    def __init__(self, recorder: RowSource, usual: Usual | None) -> None:
        self._recorder = recorder
        self._usual = usual
        self._limits: dict[object, int] = {}
        self._at_ns = 0

    def endpoint(self, row: Row) -> object:
        """What requests are compared with each other."""
        return self._recorder.site_of(row).key

    def limit_ns(self, endpoint: object) -> int | None:
        """The longest time that is not slow there, None where too few have ended."""
        return self._limits.get(endpoint)

    def is_slow(self, row: Row) -> bool:
        if self._usual is None:
            return False
        limit_ns = self.limit_ns(self.endpoint(row))
        return limit_ns is not None and row[END_NS] - row[START_NS] > limit_ns

    def is_early(self, row: Row) -> bool:
        """Whether it cannot be told yet if a request was slow."""
        return self._usual is not None and self.limit_ns(self.endpoint(row)) is None

    def look(self, ended: Iterable[Row]) -> None:
        """Learn what is usual where these requests have ended, if that has not been known or for long."""
        usual = self._usual
        newest_ns = max((row[END_NS] for row in ended), default=0) if usual is not None else 0
        if usual is None or not newest_ns:
            return
        if newest_ns - self._at_ns < USUAL_FOR_NS and not any(map(self.is_early, ended)):
            return
        self._at_ns = newest_ns
        lines = self._recorder.lines(merged=True)
        endpoints = lines.tree.by_site(_endpoint)
        places: dict[object, list[int]] = {}
        for place in lines.merged()[::WIDTH]:
            endpoint = endpoints[lines.site_of[place]]
            if endpoint is not None:
                places.setdefault(endpoint, []).append(place)
        for endpoint, known in places.items():
            histogram = lines.histogram(known, None)
            calls = sum(histogram.values())
            (time_ns,) = percentiles(histogram, (usual.fraction,), calls, 0, LONGEST_NS)
            if calls >= LEAST_CALLS and time_ns is not None:
                self._limits[endpoint] = round(time_ns * usual.factor)


def _endpoint(site: Site) -> object:
    """What requests of a site are compared with each other by; None for what is no request."""
    return site.key if site.kind == "request" else None


def _keys_of(rows: Iterable[Held]) -> set[str]:
    told = (row[ATTRIBUTES] for row, _ in rows)
    return {key for one in told if one and isinstance(key := one.get(KEY), str)}


class _Allowance:
    """A token bucket: at most `count` in any `per_ns`, refilled evenly. None allows everything."""

    def __init__(self, rate: Rate | None) -> None:
        self._rate = rate
        self._tokens = float(rate.count) if rate is not None else 0.0
        self._at_ns = 0

    def take(self, now_ns: int) -> bool:
        if self._rate is None:
            return True
        if self._at_ns and now_ns > self._at_ns:
            refill = (now_ns - self._at_ns) * self._rate.count / self._rate.per_ns
            self._tokens = min(self._tokens + refill, float(self._rate.count))
        self._at_ns = max(now_ns, self._at_ns)  # those that were held come late, and no time refills twice
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
