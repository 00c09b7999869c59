"""The traces of keys: where processes that are not read here share a run, they find a request's trace by its key alone.

A request has the trace of its first key in that run then, and so has what bears the key of a request which is not known
here, as a root of its own. What others know by its own trace already keeps that: it has a caller, or was handed on,
which its own rows tell. If that comes after a batch was sent, the batch is linked to a trace that is not there. Which
span a request of another process is nobody can tell, so no batch is linked to those.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from instrument.otlp.packing import Ids
from instrument.otlp.processor.known_request import OPEN_NS, KeyedRequest
from instrument.recording.remote_parents import RemoteParent
from instrument.recording.spans import KEY, Span
from instrument.trace.grafted import trace_id_of

NAMED = 20_000
"""Keys of which it is remembered whose trace they are."""


class KeyTraces:
    """Says which requests have the traces of their keys. Used by one thread."""

    def __init__(self) -> None:
        self._named: OrderedDict[str, int] = OrderedDict()
        """By keys the requests, by their own spans, that have the traces of these: those that come again have not."""

    def name(self, request: KeyedRequest) -> RemoteParent:
        """A request's own span, as something is about to be sent that tells of its trace: from now on it stays."""
        run, key, span_id = request.run, request.first_key, request.caller.span_id
        if run and key:
            request.run = ""
            if self._named.setdefault(key, span_id) == span_id:
                request.caller = replace(request.caller, trace_id=trace_id_of(run, key))
            if len(self._named) > NAMED:
                self._named.popitem(last=False)
        return request.caller

    def name_kept(self, spans: Sequence[Span], known: KeyedRequest | None, ids: Ids) -> RemoteParent | None:
        """Have the tree of a request that is about to be sent go by its trace, if that is another one than its own."""
        first = spans[0]
        if not ids.run or first.remote is not None:
            return None
        remote = next((span.remote for span in spans if span.remote is not None), None)
        if remote is not None and known is not None:
            known.run = ""
        if remote is None:
            if known is None:
                known = KeyedRequest(ids.instance, first.start_ns, OPEN_NS, RemoteParent(*ids.of(first)), run=ids.run)
                keyed = [span for span in spans if span.attributes.get(KEY)]
                known.first_key = str(min(keyed, key=lambda span: span.start_ns).attributes[KEY]) if keyed else ""
            remote = RemoteParent(self.name(known).trace_id, 0)
        for span in spans:
            span.remote = remote
        return remote


def name_unknown(spans: Sequence[Span], top_id: int, key: str, ids: Ids) -> None:
    """Have spans below one that bears the key of a request which is not known here go by its trace."""
    if ids.run and all(span.remote is None for span in spans):
        for span in spans:
            span.root_id, span.remote = top_id, RemoteParent(trace_id_of(ids.run, key), 0)
