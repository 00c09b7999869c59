"""The time of requests of the demonstration by its own log alone (`chat.debug_log`), instant by instant.

The log has each call twice: from its caller and from inside the call. The begin and the end of the call are between the
two entries.

The module uses nothing of `instrument`, so the tests can compare the results of `instrument` with it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

PHASES = {
    "read_body": "prepare",
    "read_ask": "prepare",
    "accept": "accept",
    "stream_tokens": "generate",
    "wait_for_turn": "queue",
    "first_token": "prefill",
    "decode_text": "post",
}
BATCHES = ("prefill", "decode")

Thread = tuple[str, str]
"""A process and one of its threads."""


@dataclass(frozen=True)
class Done:
    """Something that was done for requests, from when to when and where.

    `begun` and `ended` are the times between which it began, and ended.
    """

    what: str
    ids: tuple[str, ...]
    begin: int
    end: int
    thread: Thread
    begun: tuple[int, int]
    ended: tuple[int, int]

    def at(self, begin: int, end: int) -> Done:
        """The same, from when to when it is known to have been done."""
        return replace(self, begin=begin, end=end)

    def can_be(self, begin: int, end: int, slack: int) -> bool:
        """Return True if it can have lasted from `begin` to `end` by a clock that differs by `slack`."""
        times = ((begin, self.begun), (end, self.ended))
        return all(first - slack <= at <= last + slack for at, (first, last) in times)


@dataclass
class LoggedRequest:
    """The log's entries of one request: its whole time, the work for it, and the batches that served it."""

    whole: Done
    work: list[Done] = field(default_factory=list)
    batches: list[Done] = field(default_factory=list)

    @property
    def wall(self) -> int:
        """The length of the request."""
        return self.whole.end - self.whole.begin


def read_log(path: Path) -> dict[str, LoggedRequest]:
    """The requests to `/generate` of a log, by their ids."""
    done: list[Done] = []
    begun: dict[tuple[str, ...], list[int]] = {}
    last: dict[tuple[str, ...], tuple[str, ...]] = {}
    for line in path.read_text().splitlines():
        at, process, thread, edge, what, *ids = line.split()
        # Inside of what awaits nothing there are no ids: it is what its thread has begun last.
        key = last[process, thread, what] = (process, thread, what, *ids) if ids else last[process, thread, what]
        times = begun.setdefault(key, [])
        assert edge == ("begin" if len(times) < 2 else "end"), f"{what} is not logged around a call and inside of it"
        times.append(int(at))
        if len(times) == 4:
            around, inside, inside_end, around_end = begun.pop(key)
            its_ids, of_thread = key[3:], (process, thread)
            begin, end = (around + inside) // 2, (inside_end + around_end) // 2
            done.append(Done(what, its_ids, begin, end, of_thread, (around, inside), (inside_end, around_end)))
    assert not begun, "the log has no end of something that began"
    requests = {one.ids[0]: LoggedRequest(one) for one in done if one.what == "/generate"}
    for one in sorted(done, key=lambda one: one.begin):
        for request in (requests[name] for name in one.ids if name in requests):
            if one.what in PHASES:
                request.work.append(one)
            elif one.what in BATCHES:
                request.batches.append(one)
    return requests


def parts_of(request: LoggedRequest) -> Counter[str]:
    """Return the parts of a request's wall time in ns: each instant counts for the newest part under way."""
    first, last = request.whole.begin, request.whole.end
    spans = [(one.begin, one.end, PHASES[one.what], None) for one in request.work]
    spans += [(one.begin, one.end, "", one) for one in request.batches]
    spans += [(*one, None) for one in between(request)]
    # What began at the same time as another, and ends before it, is within it.
    spans.sort(key=lambda span: (span[0], -span[1]))
    edges = sorted({min(max(edge, first), last) for span in spans for edge in span[:2]} | {first, last})
    parts: Counter[str] = Counter()
    in_batch: Counter[Done] = Counter()
    for begin, end in pairwise(edges):
        going_on = [span for span in spans if span[0] <= begin and end <= span[1]]
        if not going_on:
            parts["unknown"] += end - begin
        elif going_on[-1][3] is None:
            parts[going_on[-1][2]] += end - begin
        else:
            in_batch[going_on[-1][3]] += end - begin
    for batch, spent in in_batch.items():
        its_own = min(spent, (batch.end - batch.begin) // len(batch.ids))
        parts["share of batches"] += its_own
        parts["waiting in batches"] += spent - its_own
    assert parts.total() == request.wall
    return parts


def between(request: LoggedRequest) -> list[tuple[int, int, str]]:
    """Return the times from the hand-over to the first batch, between batches, and from one thread to another."""
    batches, of_batches = request.batches, {batch.thread for batch in request.batches}
    own = [one for one in request.work if one.thread not in of_batches]
    accepted = [one.begin for one in request.work if one.thread in of_batches]
    first = batches[0].begin
    handed = [one.end if one.end <= first else one.begin for one in request.work if one.what == "accept"]
    before = [edge for one in request.work for edge in (one.begin, one.end) if edge <= first]
    found = [(max([edge for edge in handed if edge <= first] or before), first, "queue")]
    found += [(batch.end, after.begin, "stall") for batch, after in pairwise(batches)]
    for batch, until in zip(batches, [*(after.begin for after in batches[1:]), request.whole.end], strict=True):
        back = min((one.begin for one in own if one.begin >= batch.end), default=until + 1)
        if back <= until:
            found.append((batch.end, back, "transport"))
    if accepted:
        sent = [one.end for one in own if one.end <= accepted[0]]
        found.append((max(sent), accepted[0], "transport"))
    return found
