"""One request's life: its ledger, what made it slow, and turn by turn what went on, as text with a bar for each.

Turns in batches one after another, and what is short between them, are one line where there are many: a request of a
thousand tokens is a thousand batches. What took much longer than its other batches, as where it was preempted, is not
among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np

from instrument.errors import TraceError
from instrument.profile.document import nearest
from instrument.recorder.span_attributes import key_text
from instrument.report.endpoint_times import outcome_told
from instrument.report.requests_view import ENOUGH, blame_text, joined_requests, request_device_ledger, request_ledger
from instrument.report.table import (
    LINE,
    in_unit,
    number,
    safe,
    section_title,
    share,
    shorten,
    tenths,
    title,
    wrapped,
)
from instrument.report.view import Options, Recording
from instrument.trace.blame import Blame, blame, typical_times
from instrument.trace.columns import Columns
from instrument.trace.forest import NONE
from instrument.trace.joined import Joined
from instrument.trace.ledger import SHARE, STALL, Ledger, Moment, timeline

FEW = 40
"""Turns that have a line each."""

SMALL = 200
"""The smallest part of the wall, by its divisor, that has a line of its own where there are many turns."""

OUTSTANDING = 4
"""The length of a batch in usual ones of its name, or of a stall in the longest of them, from which on it has a line of
its own where there are many turns, if its bar has more than a column."""

MOST_DIGITS = 19
"""A number of fewer digits is one of 64 bits."""

BAR = 32
"""Columns of a bar, which stand for the wall."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn from `begin_ns` after the request's begin: several `times` where it was routine.

    `name` is the span's, empty between spans. Of `in_batches_ns`, time in batches of up to `size` requests, the
    request's share is `own_ns`.
    """

    part: str
    name: str
    begin_ns: int
    length_ns: int
    times: int
    own_ns: int | None
    size: int | None
    in_batches_ns: int
    thread_id: int | None


@dataclass(frozen=True, slots=True)
class RequestLife:
    """A request by its `keys` and endpoint: `parts`, which add up to the wall, what made it slow, and its turns.

    `namesakes` are the spans of other requests of the key that was asked for. `device_own_ns` is the device time of its
    own work, `device_shared_ns` its shares of that of batches.
    """

    name: str
    keys: tuple[str, ...]
    namesakes: tuple[int, ...]
    span_id: int
    begin_ns: int
    wall_ns: int
    error: str
    outcome: str
    parts: Mapping[str, int]
    blame: Blame | None
    turns: tuple[Turn, ...]
    device_own_ns: int
    device_shared_ns: int
    _options: Options

    def lines(self) -> list[str]:
        unit = self._options.unit
        error = f", {safe(self.error or self.outcome)}" if self.error or self.outcome else ""
        keys = f", key {' '.join(map(safe, self.keys))}" if self.keys else ""
        name = shorten(safe(self.name) or "(no name)", LINE // 2)
        at = f"{number(self.begin_ns / 1e9)} s after the start of the trace, span {self.span_id}"
        lines = [*title("Request Report"), *wrapped(f"{name}: {in_unit(self.wall_ns, unit)} {unit}{error}{keys}")]
        lines.append(f"Began {at}")
        if self.namesakes:
            spans = ", ".join(map(str, self.namesakes[:FEW]))
            lines += wrapped(
                f"The longest of {len(self.namesakes) + 1} requests of that key; the others are spans {spans}"
            )
        lines += ["", *section_title("Where the time went")]
        width = max(map(len, self.parts), default=0) + 2
        for part, time_ns in sorted(self.parts.items(), key=lambda item: (-item[1], item[0])):
            ratio = share(time_ns, self.wall_ns)
            lines.append(f"{safe(part):<{width}}{in_unit(time_ns, unit):>10} {unit}{tenths(ratio, 1):>8}")
        if self.device_own_ns or self.device_shared_ns:
            own, of_batches = (in_unit(ns, unit) for ns in (self.device_own_ns, self.device_shared_ns))
            lines += ["", f"Device time: {own} {unit} of its own work, {of_batches} {unit} its shares of batches"]
        if self.blame is not None:
            told = blame_text(self.blame, unit)
            lines += ["", *wrapped(f"{told[0].upper()}{told[1:]}")]  # names and keys stay as they are
        lines += ["", *section_title("Turn by turn")]
        for one in self.turns:
            lines.append(self._bar(one, unit))
        return [*lines, "", "Each instant is the turn of what began last; a bar is the turn's place in the wall.", ""]

    def _bar(self, one: Turn, unit: str) -> str:
        scale = BAR / max(self.wall_ns, 1)
        first = min(int(one.begin_ns * scale), BAR - 1)
        length = max(1, min(BAR - first, round(one.length_ns * scale)))
        bar = (" " * first + "#" * length).ljust(BAR)
        many = f" x {one.times}" if one.times > 1 else ""
        said = one.part if not one.name or one.name == one.part else f"{one.part}: {one.name}"
        if one.own_ns is not None:
            said = f"{one.name}{many}, {tenths(share(one.own_ns, one.in_batches_ns), 1)} its own of {one.size}"
        room = LINE - BAR - 26
        times = f"{in_unit(one.begin_ns, unit):>10}{in_unit(one.length_ns, unit):>11}"
        return f"{times}  |{bar}| {shorten(safe(said), room)}".rstrip()


def request_life(recording: Recording, asked: str, options: Options) -> RequestLife:
    """The life of the request of a key, or of the span of that number; of several with one key, the longest.

    Raises `TraceError` where there is none.
    """
    trace, joined, found = recording.columns, recording.once(joined_requests), recording.once(request_ledger)
    place, *others = places_of_request(trace, joined, asked)
    row = int(joined.rows[place])
    begin_ns = int(trace.start_ns[row])
    site = trace.sites[trace.site[row]]
    is_alike = trace.of_sites([one.name == site.name for one in trace.sites])
    alike = np.flatnonzero(is_alike[joined.rows])
    told = blame(trace, joined, found, place, typical_times(found, alike)) if len(alike) >= ENOUGH else None
    moments = timeline(trace, joined, place)
    error, devices = int(trace.error[row]), recording.once(request_device_ledger)
    return RequestLife(
        name=site.name,
        keys=joined.keys.get(place, ()),
        namesakes=tuple(trace.span_id[joined.rows[others]].tolist()),
        span_id=int(trace.span_id[row]),
        begin_ns=begin_ns - recording.trace.start_ns,
        wall_ns=int(trace.total_ns[row]),
        error="" if error == NONE else trace.errors[error],
        outcome=outcome_told(trace, row),
        parts=found.parts_of(place),
        blame=told,
        turns=tuple(_turns(trace, joined, found, moments, begin_ns)),
        device_own_ns=int(devices.own_ns[place]),
        device_shared_ns=int(devices.shared_ns[place]),
        _options=options,
    )


def places_of_request(trace: Columns, joined: Joined, asked: str) -> list[int]:
    """The place of the request of a key, or of the span of that number; of several with one key, the longest first.

    Raises `TraceError` where there is none.
    """
    by_key = [place for place, keys in joined.keys.items() if asked in keys or key_text(asked) in keys]
    if not by_key and asked.isdecimal() and len(asked) < MOST_DIGITS:
        rows = np.flatnonzero(trace.span_id[joined.rows] == int(asked))
        by_key = rows.tolist()
    if by_key:
        return sorted(by_key, key=lambda place: -int(trace.total_ns[joined.rows[place]]))
    keys = [key for its in joined.keys.values() for key in its]
    near = nearest(asked, keys)
    hint = f"; nearest is {near!r}" if near else ""
    raise TraceError(
        f"asked for the request {asked!r:.80}, found {len(joined.rows)} requests, {len(keys)} keys, and none of them "
        f"that{hint}; give a key, or the number of a request's span as the view requests has it"
    )


def _turns(trace: Columns, joined: Joined, found: Ledger, moments: Sequence[Moment], begin_ns: int) -> Iterator[Turn]:
    served = joined.served

    def name_of(one: Moment) -> str:
        return "" if one.row == NONE else trace.sites[trace.site[one.row]].name

    wall_ns = moments[-1].end_ns - moments[0].start_ns if moments else 0

    lengths: dict[str, list[int]] = {}
    for moment in moments:
        if moment.part == SHARE:
            lengths.setdefault(name_of(moment), []).append(moment.end_ns - moment.start_ns)
    usual_ns = {name: sorted(its)[len(its) // 2] for name, its in lengths.items()}
    longest_ns = max(usual_ns.values(), default=0)

    def is_routine(one: Moment) -> bool:
        length_ns = one.end_ns - one.start_ns
        if one.part in (SHARE, STALL):
            usual = usual_ns[name_of(one)] if one.part == SHARE else longest_ns
            return length_ns * BAR < wall_ns or length_ns < OUTSTANDING * usual
        return length_ns * SMALL < wall_ns

    groups: list[list[Moment]] = []
    for together, run in groupby(moments, is_routine):
        its = list(run)
        groups += [its] if together and len(moments) > FEW else [[one] for one in its]
    own_ns = _own_shares(found, moments)
    for its in groups:
        in_batches = [one for one in its if one.pair != NONE]
        first = max(in_batches or its, key=lambda one: one.end_ns - one.start_ns)
        own = size = None
        if in_batches:
            own = sum(own_ns[one] for one in in_batches)
            batches = served.batch[[one.pair for one in in_batches]]
            size = int((np.searchsorted(served.batch, batches + 1) - np.searchsorted(served.batch, batches)).max())
        yield Turn(
            part=first.part,
            name=name_of(first),
            begin_ns=its[0].start_ns - begin_ns,
            length_ns=its[-1].end_ns - its[0].start_ns,
            times=max(1, len({one.pair for one in in_batches})),
            own_ns=own,
            size=size,
            in_batches_ns=sum(one.end_ns - one.start_ns for one in in_batches),
            thread_id=None if first.row == NONE else int(trace.thread_id[first.row]),
        )


def _own_shares(found: Ledger, moments: Sequence[Moment]) -> dict[Moment, int]:
    """Return the request's own share of each turn in a batch: the turns of one batch have equal parts of it."""
    of_pairs: dict[int, list[Moment]] = {}
    for one in moments:
        if one.pair != NONE:
            of_pairs.setdefault(one.pair, []).append(one)
    shares: dict[Moment, int] = {}
    for pair, its in of_pairs.items():
        until = list(accumulate((one.end_ns - one.start_ns for one in its), initial=0))
        own_ns = min(until[-1], int(found.given_ns[pair]))
        for one, before, after in zip(its, until, until[1:], strict=False):
            shares[one] = own_ns * after // until[-1] - own_ns * before // until[-1]
    return shares
