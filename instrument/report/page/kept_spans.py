"""The requests that a page lists, and the spans that it has of them: as many as fit, whole requests first.

A page lists requests, or the outermost steps where there are none, or else the topmost spans. It has the spans of one
that is asked for, then of the request in the middle of each endpoint, then of the slowest down: those of the request in
all processes, the batches that served it, and what is below these. Of one that alone has more than fit it has the
longest.

Columns of whole numbers are varints: few bytes for small numbers, whatever the greatest one is.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.errors import TraceError
from instrument.recording.spans import BATCH_KEYS, BATCH_WEIGHTS
from instrument.report.endpoint_times import IN_ORDER
from instrument.report.request_life import places_of_request
from instrument.report.requests_view import SlowRequest, blame_text, joined_requests, request_ledger
from instrument.report.table import safe, shorten, where_of
from instrument.report.view import Options, Recording
from instrument.trace.columns import Columns, Int64s
from instrument.trace.forest import NONE, nearest
from instrument.trace.groups import Members, places_of
from instrument.trace.joined import Served
from instrument.trace.ledger import SHARE, UNKNOWN, Ledger, turns_of

BITS = 7
"""Bits of a number per byte; the eighth says that more follow."""


def varints(numbers: NDArray[np.int64]) -> bytes:
    """The numbers one after the other, of each the lowest bits first, its sign in the lowest (LEB128, zigzag)."""
    signed = np.asarray(numbers, dtype=np.int64)
    left = ((signed << 1) ^ (signed >> 63)).view(np.uint64)
    lengths = np.ones(len(left), dtype=np.int64)
    for more in range(1, 10):
        lengths += left >= np.uint64(1 << (BITS * more))
    ends = np.cumsum(lengths)
    out = np.zeros(int(ends[-1]) if len(ends) else 0, dtype=np.uint8)
    begins = ends - lengths
    for place in range(int(lengths.max(initial=0))):
        at = np.flatnonzero(lengths > place)
        low = (left[at] >> np.uint64(BITS * place)) & np.uint64(0x7F)
        out[begins[at] + place] = low.astype(np.uint8) | ((lengths[at] > place + 1).astype(np.uint8) << BITS)
    return out.tobytes()


def column_text(numbers: NDArray[np.int64]) -> str:
    """A column as base64 of `varints`."""
    return base64.b64encode(varints(numbers)).decode("ascii")


def steps_text(numbers: Int64s) -> str:
    """A column by the differences of its numbers, which are small where they are in order."""
    return column_text(np.diff(numbers, prepend=np.int64(0)))


MOST_LISTED = 10_000
"""Requests in the list, at most."""

MOST_SPANS = 200_000
"""Spans in a page, at most: some 1.5 MB, and as much for the turns of requests."""

TURNS_OF_A_BATCH = 3
"""Room that a request's place in a batch takes of a page, in spans: a share, and a stall before it."""

TEXT_BYTES = 2_000_000
"""Bytes for attributes of spans, at most."""

VALUE = 200
"""Columns of the value of an attribute, at most."""

NAME = 160
"""Columns of the name of a site, and of a thread, at most."""

KEYS, KEY_COLUMNS = 2, 64
"""Keys of a request, at most, and the columns of each."""


@dataclass(frozen=True)
class Listed:
    """The list of a page: each is a row of the trace, in the order of their begins; `of` has the place of each span's.

    `what` they are is a request, a step or a span. Of requests there are `keys` by place, the `ledger`, and what is
    `served` in batches.
    """

    trace: Columns
    what: str
    rows: Int64s
    of: Int64s
    keys: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    ledger: Ledger | None = None
    served: Served | None = None

    @classmethod
    def of_recording(cls, recording: Recording) -> Listed:
        """The requests, or what a page lists where there are none."""
        trace, joined = recording.columns, recording.once(joined_requests)
        if len(joined.rows):
            found = recording.once(request_ledger)
            return cls(trace, "request", joined.rows, joined.of, joined.keys, found, joined.served)
        is_step = trace.of_kind("step")
        own = trace.owners(is_step if is_step.any() else trace.parent == NONE)
        rows = np.flatnonzero(own == np.arange(len(trace)))
        rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
        return cls(trace, "step" if is_step.any() else "span", rows, places_of(rows, len(trace))[own])

    @cached_property
    def slowest(self) -> Int64s:
        """All places, the longest first."""
        return np.lexsort((np.arange(len(self.rows)), -self.trace.total_ns[self.rows]))


class KeptSpans:
    """The requests and spans of a recording that a page has. `rows` are those of the spans, by begin."""

    def __init__(
        self, recording: Recording, options: Options, wanted: str | None = None, most_spans: int = MOST_SPANS
    ) -> None:
        self._recording, self._options, self._most_spans = recording, options, most_spans
        self.listed = Listed.of_recording(recording)
        self._trace = self.listed.trace
        self.first = self._found(wanted)
        asked_for = np.array([] if self.first is None else [self.first], dtype=np.int64)
        self.shown = np.union1d(self.listed.slowest[:MOST_LISTED], asked_for)
        self._whole = np.zeros(len(self.listed.rows), dtype=np.bool_)
        kept = self._kept()
        trace = self._trace
        order = np.lexsort((trace.span_id[kept], -trace.end_ns[kept], trace.start_ns[kept]))
        self.rows: Int64s = kept[order]
        self.number_of = places_of(self.rows, len(trace))
        """The place in the page of the span in each row of the trace; the last one is for `NONE`."""

    def _found(self, wanted: str | None) -> int | None:
        if wanted is None:
            return None
        if self.listed.what != "request":
            raise TraceError(
                f"asked for the request {wanted!r:.80}, found no request in the trace; leave --request out"
            )
        return places_of_request(self._trace, self._recording.once(joined_requests), wanted)[0]

    # Which spans

    def _order(self) -> Iterator[int]:
        """Places, those first whose spans are wanted most; some come twice."""
        listed = self.listed
        if self.first is not None:
            yield self.first
        names: dict[str, list[int]] = {}
        for place in listed.slowest.tolist():
            names.setdefault(self._trace.sites[self._trace.site[listed.rows[place]]].name, []).append(place)
        yield from (places[len(places) // 2] for places in names.values())
        yield from listed.slowest[:MOST_LISTED].tolist()

    def _kept(self) -> Int64s:
        """The rows of the spans, and in `_whole` which requests have theirs."""
        trace, listed = self._trace, self.listed
        by_place = Members(listed.of, len(listed.rows))
        batches, below = self._batches()
        taken = np.zeros(len(trace), dtype=np.bool_)
        left, room = self._most_spans, 2 * self._most_spans
        for place in self._order():
            if self._whole[place]:
                continue
            own = [by_place[place], *(below[batch] for batch in batches[place].tolist())]
            rows = np.unique(np.concatenate(own))
            rows = rows[~taken[rows]]
            takes = len(rows) + TURNS_OF_A_BATCH * len(batches[place])
            if len(rows) > left or takes > room:
                if left < self._most_spans:
                    continue
                longest = np.lexsort((trace.level[rows], -trace.total_ns[rows]))
                rows = rows[longest[:left]]
            taken[rows], self._whole[place] = True, True
            left, room = left - len(rows), room - takes
            if left <= 0 or room <= 0:
                break
        return np.flatnonzero(taken)

    def _batches(self) -> tuple[Members, Members]:
        """Return the batches of each place by number, and the rows of each number: the batch and below."""
        served, trace = self.listed.served, self._trace
        if served is None or not len(served.batch):
            nothing = np.zeros(0, dtype=np.int64)
            return Members(nothing, len(self.listed.rows)), Members(nothing, 0)
        rows, number = np.unique(served.batch, return_inverse=True)
        is_batch = np.zeros(len(trace), dtype=np.bool_)
        is_batch[rows] = True
        below = Members(places_of(rows, len(trace))[nearest(trace.parent, is_batch)], len(rows))
        return Members(served.request, len(self.listed.rows), number), below

    # What the page is told

    def document(self, slowest: Sequence[SlowRequest] = ()) -> dict[str, Any]:
        """The list and the spans as columns; of the `slowest` the view `requests` says what made them slow."""
        return {
            "what": self.listed.what,
            "listed": self._list(slowest),
            "spans": self._spans(),
            "sites": self._told_sites(),
            "errors": [
                "" if error == NONE else shorten(safe(self._trace.errors[error]), NAME) for error in self._errors
            ],
            "turns": self._turns(),
            "pairs": self._pairs(),
            "attributes": self._attributes(),
            "lanes": self._lanes(),
        }

    def left_out(self) -> list[str]:
        """Sentences on what of the recording the page does not have."""
        listed, what = self.listed, self.listed.what
        said = []
        if len(self.shown) < len(listed.rows):
            said.append(f"Of {len(listed.rows):,} {what}s the {len(self.shown):,} longest are listed.")
        without = len(self.shown) - int(self._whole[self.shown].sum())
        if without:
            said.append(
                f"{without:,} of the listed {what}s have no spans here, for a page has room for some "
                f"{self._most_spans:,}: those in the middle of each endpoint and the slowest have them, the others "
                "their numbers alone."
            )
        others = len(self._trace) - len(self.rows)
        if others:
            said.append(
                f"{others:,} of {len(self._trace):,} spans are in no picture: they belong to {what}s whose spans are "
                "left out, or to none. Tables and the call tree count all calls."
            )
        if self._attributes_left:
            said.append(f"The attributes of {self._attributes_left:,} spans are left out.")
        return said

    def _list(self, slowest: Sequence[SlowRequest]) -> dict[str, Any]:
        trace, shown, listed = self._trace, self.shown, self.listed
        rows = listed.rows[shown]
        of_shown = list(map(listed.ledger.parts_of, shown.tolist())) if listed.ledger else []
        names = in_their_order({name for its in of_shown for name in its})
        number_of = {name: number for number, name in enumerate(names)}
        counts: list[int] = []
        parts: list[int] = []
        times: list[int] = []
        for its in of_shown:
            counts.append(len(its))
            parts += map(number_of.__getitem__, its)
            times += its.values()
        number = {place: at for at, place in enumerate(shown.tolist())}
        return {
            "site": column_text(self._site_of(rows)),
            "start": steps_text(trace.start_ns[rows] - self._recording.trace.start_ns),
            "wall": column_text(trace.total_ns[rows]),
            "error": self._errors_of(rows),
            "ids": list(map(str, trace.span_id[rows].tolist())),
            "keys": {
                at: [shorten(safe(key), KEY_COLUMNS) for key in listed.keys[place][:KEYS]]
                for at, place in enumerate(shown.tolist())
                if place in listed.keys
            },
            "traces": {
                at: f"{trace.remote[row].trace_id:032x}" for at, row in enumerate(rows.tolist()) if row in trace.remote
            },
            "span": column_text(self.number_of[rows]),
            "has_spans": column_text(self._whole[shown].astype(np.int64)),
            "first": number.get(NONE if self.first is None else self.first, NONE),
            "part_names": list(map(safe, names)),
            "part_count": column_text(np.array(counts, dtype=np.int64)),
            "part": column_text(np.array(parts, dtype=np.int64)),
            "part_ns": column_text(np.array(times, dtype=np.int64)),
            "blame": self._blame(rows, slowest),
        }

    def _blame(self, rows: Int64s, slowest: Sequence[SlowRequest]) -> dict[int, str]:
        """Return the causes of slow requests by their place in the list, in the words of the view."""
        told = {one.span_id: one.blame for one in slowest if one.blame is not None}
        ids = self._trace.span_id[rows].tolist()
        return {at: blame_text(told[its], self._options.unit) for at, its in enumerate(ids) if its in told}

    def _spans(self) -> dict[str, Any]:
        trace, rows = self._trace, self.rows
        number_of_place = places_of(self.shown, len(self.listed.rows))
        parent = self.number_of[trace.parent[rows]]
        own = np.arange(len(rows))
        return {
            "start": steps_text(trace.start_ns[rows] - self._recording.trace.start_ns),
            "length": column_text(trace.total_ns[rows]),
            "children": column_text(trace.total_ns[rows] - trace.self_ns[rows]),
            "site": column_text(self._site_of(rows)),
            "parent": column_text(np.where(parent == NONE, 0, own - parent)),  # how many spans before, 0 for none
            "request": column_text(number_of_place[self.listed.of[rows]]),
            "error": self._errors_of(rows),
            "lane": column_text(self._lanes_and_spans[1]),
        }

    @cached_property
    def _sites(self) -> Int64s:
        """The sites that the page has spans or requests of."""
        rows = np.concatenate([self.rows, self.listed.rows[self.shown]])
        return np.unique(self._trace.site[rows]).astype(np.int64)

    def _site_of(self, rows: Int64s) -> Int64s:
        return np.searchsorted(self._sites, self._trace.site[rows]).astype(np.int64)

    @cached_property
    def _errors(self) -> list[int]:
        """The errors that these ended with."""
        rows = np.concatenate([self.rows, self.listed.rows[self.shown]])
        found: list[int] = np.unique(self._trace.error[rows]).tolist()
        return found

    def _errors_of(self, rows: Int64s) -> dict[int, int]:
        """Return the place of the error of each row that ended with one, by the row's place."""
        errors = self._trace.error[rows]
        told = np.flatnonzero(errors != NONE)
        return dict(zip(told.tolist(), np.searchsorted(self._errors, errors[told]).tolist(), strict=True))

    def _told_sites(self) -> list[list[str]]:
        """Return name, kind, instance and place in the code of each site."""
        told = []
        for site in map(self._trace.sites.__getitem__, self._sites.tolist()):
            name, instance, where = (shorten(safe(text), NAME) for text in (site.name, site.instance, where_of(site)))
            told.append([name or "(no name)", site.kind, instance, where])
        return told

    @cached_property
    def _lanes_and_spans(self) -> tuple[list[tuple[int, int]], Int64s]:
        """The lines that spans ran on, as thread and task, and of each span the place of its own."""
        if not len(self.rows):
            return [], np.zeros(0, dtype=np.int64)
        lines = np.stack([self._trace.thread_id[self.rows], self._trace.task_id[self.rows]])
        found, number, sizes = np.unique(lines, axis=1, return_inverse=True, return_counts=True)
        order = np.argsort(-sizes, kind="stable")  # so that most have a small number
        places = places_of(order, len(order))[number.reshape(-1)]
        return [(int(thread), int(task)) for thread, task in found.T[order]], places

    def _lanes(self) -> dict[str, Any]:
        """The names of threads, and of each lane its thread and the number of its task there, 0 for none."""
        names, tasks = self._recording.trace.threads, dict[int, dict[int, int]]()
        threads: dict[int, int] = {}
        lanes = []
        for thread, task in self._lanes_and_spans[0]:
            its = tasks.setdefault(thread, {})
            lanes.append((threads.setdefault(thread, len(threads)), its.setdefault(task, len(its) + 1) if task else 0))
        table = np.array(lanes, dtype=np.int64).reshape(-1, 2)
        told = [shorten(safe(names.get(thread, "")), NAME) or f"thread {thread}" for thread in threads]
        return {"threads": told, "thread": column_text(table[:, 0]), "task": column_text(table[:, 1])}

    def _turns(self) -> dict[str, Any]:
        """Turn by turn what went on in the requests that have their spans; between turns it is unknown."""
        listed = self.listed
        if listed.ledger is None or not self._whole.any():
            return {}
        found = turns_of(self._trace, self._recording.once(joined_requests))
        wanted = np.flatnonzero(self._whole[found.request])
        order = wanted[np.lexsort((found.start_ns[wanted], found.request[wanted]))]
        counts = np.bincount(found.request[order], minlength=len(listed.rows))[self.shown]
        begins = self._trace.start_ns[listed.rows[found.request[order]]]
        starts, lengths = found.start_ns[order] - begins, found.length_ns[order]
        is_first = np.diff(found.request[order], prepend=NONE) != 0
        ends_before = np.where(is_first, 0, np.concatenate([[0], (starts + lengths)[:-1]])[: len(order)])
        return {
            "names": list(map(safe, found.names)),
            "count": column_text(counts.astype(np.int64)),
            "part": column_text(found.part[order]),
            "span": column_text(np.where(found.row[order] == NONE, NONE, self.number_of[found.row[order]])),
            "after": column_text(starts - ends_before),
            "length": column_text(lengths),
        }

    def _pairs(self) -> dict[str, Any]:
        """The batches of each request that has its spans, how many it shared them with, and its share."""
        served = self.listed.served
        if served is None or not self._whole.any():
            return {}
        given = self._recording.once(request_ledger).given_ns
        own = served.request != NONE
        wanted = np.flatnonzero(own & self._whole[np.where(own, served.request, 0)])
        wanted = wanted[np.lexsort((self._trace.start_ns[served.batch[wanted]], served.request[wanted]))]
        batches = served.batch[wanted]
        sizes = np.searchsorted(served.batch, batches + 1) - np.searchsorted(served.batch, batches)
        return {
            "count": column_text(np.bincount(served.request[wanted], minlength=len(self.listed.rows))[self.shown]),
            "span": steps_text(self.number_of[batches]),
            "given": column_text(given[wanted]),
            "size": column_text(sizes),
        }

    def _attributes(self) -> dict[int, dict[str, str]]:
        """Return the attributes of spans while there is room for their text: of requests first."""
        trace, found, room = self._trace, dict[int, dict[str, str]](), TEXT_BYTES
        is_listed = np.zeros(len(trace), dtype=np.bool_)
        is_listed[self.listed.rows] = True
        having = trace.attributes.rows()
        having = having[self.number_of[having] != NONE]
        self._attributes_left = 0
        for place, row in enumerate(having[np.argsort(~is_listed[having], kind="stable")].tolist()):
            told = {
                shorten(safe(str(name)), VALUE): shorten(safe(_text(value)), VALUE)
                for name, value in trace.attributes[row].items()
                if name not in (BATCH_KEYS, BATCH_WEIGHTS)
            }
            room -= sum(len(name) + len(value) + 6 for name, value in told.items())
            if room < 0:
                self._attributes_left = len(having) - place
                break
            if told:
                found[int(self.number_of[row])] = told
        return found

    _attributes_left = 0


def in_their_order(parts: Iterable[str]) -> list[str]:
    """Parts of requests as they mostly follow each other, and what is unknown at last."""
    known = {name: place for place, name in enumerate(IN_ORDER)}
    return sorted(parts, key=lambda name: (name == UNKNOWN, known.get(name, known[SHARE]), name))


def _text(value: object) -> str:
    """A value of an attribute, of which no more is made into text than is shown."""
    return str(value[:VALUE]) if isinstance(value, (str, tuple, list)) else str(value)
