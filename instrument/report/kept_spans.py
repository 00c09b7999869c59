"""The requests that an HTML page lists, and the spans that fit into the page.

Without requests, the outermost steps are listed. Without steps, the topmost spans are listed. First come the
spans of the request that the user chose, then those of each endpoint's median request, then those of the slowest
requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from instrument.errors import TraceError
from instrument.recording.spans import BATCH_KEYS, BATCH_WEIGHTS
from instrument.report.endpoint_statistics import IN_ORDER
from instrument.report.request_life import find_requests_by_key
from instrument.report.requests_view import SlowRequest, blame_text
from instrument.report.table import code_location_of, printable, shorten
from instrument.report.view import Options, Recording
from instrument.trace.columns import Int64s
from instrument.trace.indices import (
    NONE,
    Members,
    find_distinct,
    find_nearest_row,
    index_rows,
    make_mask,
    number_combinations,
)
from instrument.trace.ledger import SHARE, UNKNOWN


def successive_differences(numbers: Int64s) -> list[int]:
    """Return the differences between successive numbers. Small numbers make the JSON of a page shorter."""
    differences: list[int] = np.diff(numbers, prepend=np.int64(0)).tolist()
    return differences


MOST_LISTED = 10_000
"""The maximum number of requests that the page lists."""

MOST_SPANS = 200_000
"""The maximum number of spans in a page, about 1.5 MB."""

TURNS_OF_A_BATCH = 3
"""The number of spans that take as much space in the page as one batch of a request."""

TEXT_BYTES = 2_000_000
"""The maximum number of bytes for the attributes of all spans."""

VALUE = 200
"""The maximum width of an attribute's value, in columns."""

NAME = 160
"""The maximum width of the name of a site or thread, in columns."""

KEYS, KEY_COLUMNS = 2, 64
"""The maximum number of keys of a request, and the maximum width of a key in columns."""


class KeptSpans:
    """The requests and spans of a recording that fit into a page. `what` is the noun for a listed row: request, step or
    span. `rows` has the trace rows of the kept spans, sorted by start time."""

    def __init__(
        self, recording: Recording, options: Options, request: str | None = None, most_spans: int = MOST_SPANS
    ) -> None:
        self._recording, self._options, self._most_spans = recording, options, most_spans
        self._trace = trace = recording.columns
        self.what, self.listed, self.first = "request", recording.joined, NONE
        if not len(self.listed.rows):
            if request is not None:
                raise TraceError(f"the trace has no request, so not {request!r:.80} either; leave --request out")
            is_step = trace.are_of_kind("step")
            self.what = "step" if is_step.any() else "span"
            owner = trace.find_topmost_wanted_rows(is_step if is_step.any() else trace.parent == NONE)
            rows = np.flatnonzero(owner == np.arange(len(trace)))
            rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
            self.listed = replace(self.listed, rows=rows, of=index_rows(rows, len(trace))[owner])
        elif request is not None:
            self.first = find_requests_by_key(trace, self.listed, request)[0]
        self._slowest = np.argsort(-trace.total_ns[self.listed.rows], kind="stable")
        shown = find_distinct(np.append(self._slowest[:MOST_LISTED], self.first))
        self.shown = shown[shown != NONE]
        self._whole = np.zeros(len(self.listed.rows), dtype=np.bool_)
        kept_rows = self._choose_span_rows()
        order = np.lexsort((trace.span_id[kept_rows], -trace.end_ns[kept_rows], trace.start_ns[kept_rows]))
        self.rows: Int64s = kept_rows[order]
        self.number_of = index_rows(self.rows, len(trace))
        """The number in the page of each row's span. The last entry is for `NONE`."""
        named_rows = np.concatenate([self.rows, self.listed.rows[self.shown]])
        self._sites, self._errors = find_distinct(trace.site[named_rows]), find_distinct(trace.error[named_rows])
        """The sites and the errors of the page, in the order of their numbers in the page."""

    def _iterate_requests_by_importance(self) -> Iterator[int]:
        """Yield the indices of requests, the most important first. Indices may repeat."""
        if self.first != NONE:
            yield self.first
        names: dict[str, list[int]] = {}
        for place in self._slowest.tolist():
            names.setdefault(self._trace.sites[self._trace.site[self.listed.rows[place]]].name, []).append(place)
        yield from (places[len(places) // 2] for places in names.values())
        yield from self._slowest[:MOST_LISTED].tolist()

    def _choose_span_rows(self) -> Int64s:
        trace, listed = self._trace, self.listed
        by_place = Members(listed.of, len(listed.rows))
        served = listed.served
        batch_rows, number = np.unique(served.batch, return_inverse=True)
        batch_of = index_rows(batch_rows, len(trace))[find_nearest_row(trace.parent, make_mask(batch_rows, len(trace)))]
        batches, below = Members(served.request, len(listed.rows), number), Members(batch_of, len(batch_rows))
        is_taken = np.zeros(len(trace), dtype=np.bool_)
        spans_left, room = self._most_spans, 2 * self._most_spans
        for place in self._iterate_requests_by_importance():
            if self._whole[place]:
                continue
            pieces = [by_place[place], *(below[batch] for batch in batches[place].tolist())]
            rows = np.unique(np.concatenate(pieces))
            rows = rows[~is_taken[rows]]
            takes = len(rows) + TURNS_OF_A_BATCH * len(batches[place])
            if len(rows) > spans_left or takes > room:
                if spans_left < self._most_spans:
                    continue
                longest = np.lexsort((trace.level[rows], -trace.total_ns[rows]))
                rows = rows[longest[:spans_left]]
            is_taken[rows], self._whole[place] = True, True
            spans_left, room = spans_left - len(rows), room - takes
            if spans_left <= 0 or room <= 0:
                break
        return np.flatnonzero(is_taken)

    def make_document(self, slowest: Sequence[SlowRequest] = ()) -> dict[str, Any]:
        trace, rows = self._trace, self.rows
        parent = self.number_of[trace.parent[rows]]
        lane, firsts = number_combinations(trace.thread_id[rows], trace.task_id[rows])
        by_use = np.argsort(-np.bincount(lane), kind="stable")  # so that most have a small number
        lanes = rows[firsts[by_use]]
        sites = [trace.sites[site] for site in self._sites.tolist()]
        texts = [(site.name or "(no name)", site.kind, site.instance, code_location_of(site)) for site in sites]
        return {
            "what": self.what,
            "listed": self._encode_requests(slowest),
            "spans": {
                "start": successive_differences(trace.start_ns[rows] - self._recording.trace.start_ns),
                "length": trace.total_ns[rows].tolist(),
                "children": (trace.total_ns[rows] - trace.self_ns[rows]).tolist(),
                "site": self._number_sites(rows).tolist(),
                # The number of spans back to the parent, 0 without one.
                "parent": np.where(parent == NONE, 0, np.arange(len(rows)) - parent).tolist(),
                "request": index_rows(self.shown, len(self.listed.rows))[self.listed.of[rows]].tolist(),
                "error": self._number_errors(rows),
                "lane": index_rows(by_use, len(by_use))[lane].tolist(),
            },
            "sites": [[shorten(printable(text), NAME) for text in of_site] for of_site in texts],
            "errors": [
                shorten(printable(self._trace.errors[error]), NAME) if error != NONE else ""
                for error in self._errors.tolist()
            ],
            "turns": self._turn_columns(),
            "pairs": self._batch_columns(),
            "attributes": self._attribute_texts(),
            "lanes": self._encode_lanes(
                list(zip(trace.thread_id[lanes].tolist(), trace.task_id[lanes].tolist(), strict=True))
            ),
        }

    def describe_omitted(self) -> list[str]:
        listed, noun = self.listed, self.what
        sentences = []
        if len(self.shown) < len(listed.rows):
            sentences.append(f"Of {len(listed.rows):,} {noun}s the {len(self.shown):,} longest are listed.")
        without_spans = len(self.shown) - int(self._whole[self.shown].sum())
        if without_spans:
            sentences.append(
                f"{without_spans:,} of the listed {noun}s have no spans here, for a page has room for some "
                f"{self._most_spans:,}: those in the middle of each endpoint and the slowest have them, the others "
                "their numbers alone."
            )
        unlisted = len(self._trace) - len(self.rows)
        if unlisted:
            sentences.append(
                f"{unlisted:,} of {len(self._trace):,} spans are in no picture: they belong to {noun}s whose spans are "
                "left out, or to none. Tables and the call tree count all calls."
            )
        if self._attributes_left:
            sentences.append(f"The attributes of {self._attributes_left:,} spans are left out.")
        return sentences

    def _encode_requests(self, slowest: Sequence[SlowRequest]) -> dict[str, Any]:
        trace, shown, listed = self._trace, self.shown, self.listed
        rows, of_shown = listed.rows[shown], list[dict[str, int]]()
        if self.what == "request":
            of_shown = list(map(self._recording.ledger.times_of_request, shown.tolist()))
        places = {name: place for place, name in enumerate(IN_ORDER)}
        names = sorted(
            {name for parts in of_shown for name in parts},
            key=lambda name: (name == UNKNOWN, places.get(name, places[SHARE]), name),
        )
        blames = {request.span_id: request.blame for request in slowest if request.blame is not None}
        ids = trace.span_id[rows].tolist()
        return {
            "site": self._number_sites(rows).tolist(),
            "start": successive_differences(trace.start_ns[rows] - self._recording.trace.start_ns),
            "wall": trace.total_ns[rows].tolist(),
            "error": self._number_errors(rows),
            "ids": list(map(str, ids)),
            "keys": {
                at: [shorten(printable(key), KEY_COLUMNS) for key in listed.keys[place][:KEYS]]
                for at, place in enumerate(shown.tolist())
                if place in listed.keys
            },
            "traces": {
                at: f"{trace.remote[row].trace_id:032x}" for at, row in enumerate(rows.tolist()) if row in trace.remote
            },
            "span": self.number_of[rows].tolist(),
            "has_spans": self._whole[shown].tolist(),
            "first": int(index_rows(shown, len(listed.rows))[self.first]),
            "part_names": list(map(printable, names)),
            "part_count": list(map(len, of_shown)),
            "part": [names.index(name) for parts in of_shown for name in parts],
            "part_ns": [part_ns for parts in of_shown for part_ns in parts.values()],
            "blame": {at: blame_text(blames[key], self._options.unit) for at, key in enumerate(ids) if key in blames},
        }

    def _number_sites(self, rows: Int64s) -> Int64s:
        return np.searchsorted(self._sites, self._trace.site[rows]).astype(np.int64)

    def _number_errors(self, rows: Int64s) -> dict[int, int]:
        errors = self._trace.error[rows]
        failed = np.flatnonzero(errors != NONE)
        return dict(zip(failed.tolist(), np.searchsorted(self._errors, errors[failed]).tolist(), strict=True))

    def _encode_lanes(self, pairs: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Return the threads and tasks of the page's lanes. A task number of 0 means no task."""
        names, tasks, threads = self._recording.trace.threads, Counter[int](), dict[int, int]()
        lanes: dict[str, list[int]] = {"thread": [], "task": []}
        for thread, task in pairs:
            tasks[thread] += task != 0
            lanes["thread"].append(threads.setdefault(thread, len(threads)))
            lanes["task"].append(tasks[thread] if task else 0)
        thread_names = [shorten(printable(names.get(thread, "")), NAME) or f"thread {thread}" for thread in threads]
        return {"threads": thread_names, **lanes}

    def _turn_columns(self) -> dict[str, Any]:
        listed = self.listed
        if self.what != "request" or not self._whole.any():
            return {}
        turns = self._recording.turns
        whole = np.flatnonzero(self._whole[turns.request])
        order = whole[np.lexsort((turns.start_ns[whole], turns.request[whole]))]
        counts = np.bincount(turns.request[order], minlength=len(listed.rows))[self.shown]
        begins = self._trace.start_ns[listed.rows[turns.request[order]]]
        starts, lengths = turns.start_ns[order] - begins, turns.length_ns[order]
        is_first = np.diff(turns.request[order], prepend=NONE) != 0
        ends_before = np.where(is_first, 0, np.concatenate([[0], (starts + lengths)[:-1]])[: len(order)])
        return {
            "names": list(map(printable, turns.names)),
            "count": counts.tolist(),
            "part": turns.part[order].tolist(),
            "span": np.where(turns.row[order] == NONE, NONE, self.number_of[turns.row[order]]).tolist(),
            "after": (starts - ends_before).tolist(),
            "length": lengths.tolist(),
        }

    def _batch_columns(self) -> dict[str, Any]:
        served = self.listed.served
        if self.what != "request" or not self._whole.any():
            return {}
        given_ns = self._recording.ledger.given_ns
        pairs = np.flatnonzero(np.append(self._whole, False)[served.request])
        pairs = pairs[np.lexsort((self._trace.start_ns[served.batch[pairs]], served.request[pairs]))]
        batches = served.batch[pairs]
        sizes = np.searchsorted(served.batch, batches + 1) - np.searchsorted(served.batch, batches)
        return {
            "count": np.bincount(served.request[pairs], minlength=len(self.listed.rows))[self.shown].tolist(),
            "span": successive_differences(self.number_of[batches]),
            "given": given_ns[pairs].tolist(),
            "size": sizes.tolist(),
        }

    def _attribute_texts(self) -> dict[int, dict[str, str]]:
        """Return the attributes of the page's spans by their numbers, up to `TEXT_BYTES` in all, those of requests
        first."""
        trace, texts_by_span, room = self._trace, dict[int, dict[str, str]](), TEXT_BYTES
        is_listed = make_mask(self.listed.rows, len(trace))
        having = trace.attributes.rows()
        having = having[self.number_of[having] != NONE]
        self._attributes_left = 0
        for place, row in enumerate(having[np.argsort(~is_listed[having], kind="stable")].tolist()):
            texts = {
                shorten(printable(str(name)), VALUE): shorten(
                    printable(str(value[:VALUE] if isinstance(value, (str, tuple, list)) else value)), VALUE
                )
                for name, value in trace.attributes[row].items()
                if name not in (BATCH_KEYS, BATCH_WEIGHTS)
            }
            room -= sum(len(name) + len(value) + 6 for name, value in texts.items())
            if room < 0:
                self._attributes_left = len(having) - place
                break
            if texts:
                texts_by_span[int(self.number_of[row])] = texts
        return texts_by_span

    _attributes_left = 0
