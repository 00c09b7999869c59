"""Spans of all processes that bear keys, as they are read: those that may have handed requests over.

What is in the tree of another request is sent once that one has ended, and what waits for its request may be sent
later than what it handed over. Both are known here by then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from instrument.otlp.packing import Ids
from instrument.otlp.processor.key_facts import KeyedSpan
from instrument.otlp.processor.known_request import OPEN_NS, KeyedRequest
from instrument.recording.rows import REQUEST_BIT

UNDER_ONE_KEY = 2_048
"""Spans that are remembered of one key."""

FORGOTTEN_NS = 3 * 10**10
"""So long after spans with a key were read they are forgotten, where no open request is known by it."""


class SpanWithKey(NamedTuple):
    """One of these, by its id at the collector. It lies in the tree of the request `around` it, if there is one."""

    start_ns: int
    end_ns: int
    span_id: int
    around: KeyedRequest | None


@dataclass(slots=True)
class _OfKey:
    noted_ns: int
    spans: dict[int, SpanWithKey] = field(default_factory=dict)


class SpansWithKeys:
    """The newest ones of each key, of the keys that were noted last."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, _OfKey] = OrderedDict()

    def __len__(self) -> int:
        """How many keys there are."""
        return len(self._of)

    def note(
        self,
        ids: Ids,
        spans: Iterable[KeyedSpan],
        known: Mapping[tuple[tuple[int, ...], int], KeyedRequest],
        now_ns: int,
        most: int,
    ) -> None:
        """Spans of a process have begun, or ended, in trees of requests that are `known` by their roots, or others."""
        for one in spans:
            of_key = self._of.setdefault(one.key, _OfKey(now_ns))
            of_key.noted_ns = now_ns
            self._of.move_to_end(one.key)
            end_ns, span_id = OPEN_NS if one.end_ns is None else one.end_ns, ids.span_id(one.span_id)
            before, around = of_key.spans.get(span_id), known.get((ids.seeds, one.root_id))
            around = before.around if around is None and before is not None else around
            if around is not None or not one.root_id & REQUEST_BIT:
                of_key.spans[span_id] = SpanWithKey(one.start_ns, end_ns, span_id, around)
            if len(of_key.spans) > UNDER_ONE_KEY:
                del of_key.spans[next(iter(of_key.spans))]
        while len(self._of) > most:
            self._of.popitem(last=False)

    def forget_old(self, now_ns: int, is_open: Callable[[str], bool]) -> None:
        """Forget those of keys of which nothing was read for long, and by which no open request is known."""
        while self._of:
            key, of_key = next(iter(self._of.items()))
            if of_key.noted_ns > now_ns - FORGOTTEN_NS:
                break
            if is_open(key):
                of_key.noted_ns = now_ns
                self._of.move_to_end(key)
            else:
                del self._of[key]

    def forget(self, key: str, around: KeyedRequest) -> None:
        """Those of a request's tree were sent with that, though their key is of another request."""
        of_key = self._of.get(key)
        if of_key is not None:
            of_key.spans = {span_id: one for span_id, one in of_key.spans.items() if one.around is not around}

    def of(self, key: str) -> Iterable[SpanWithKey]:
        """Those of a key."""
        of_key = self._of.get(key)
        return () if of_key is None else of_key.spans.values()
