"""The arguments of the slices that `dump` writes, for both the writing and the reading of Chrome traces."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from instrument.recording.trace_context import RemoteParent
from instrument.trace.text import INT64

Int64 = Annotated[int, msgspec.Meta(ge=-INT64, le=INT64 - 1)]

EXACT_US = 1 << 42
"""The time in microseconds above which a float cannot represent each nanosecond."""


class Remote(msgspec.Struct, omit_defaults=True):
    """A span's parent in another process, as the file stores it."""

    trace_id: str
    span_id: str
    flags: Int64
    is_local: bool = False
    in_server_span: bool = False

    @classmethod
    def make_remote(cls, parent: RemoteParent) -> Remote:
        ids = f"{parent.trace_id:032x}", f"{parent.span_id:016x}"
        return cls(*ids, parent.flags, parent.is_local, parent.is_local and parent.in_server_span)

    def make_parent(self) -> RemoteParent:
        ids = int(self.trace_id, 16), int(self.span_id, 16)
        return RemoteParent(*ids, self.flags, self.is_local, self.in_server_span)


Number = Int64 | UnsetType

UNTOLD = -INT64
"""The placeholder for a number that is missing in a slice's arguments."""


class Arguments(msgspec.Struct, gc=False, frozen=True, omit_defaults=True):
    """The arguments of a slice that `dump` writes. Numbers that readers can compute from other slices are left out.

    If there is an `owner`, the slice is a device interval of the span with that id. Any other slice is a span. A mark
    on the lane of a request has only a `batch`, the id of the batch that served the request.
    """

    thread: Number = UNTOLD
    lane: Number = UNTOLD
    kind: str | UnsetType = UNSET
    site: Number = UNTOLD
    code: str | UnsetType = UNSET
    id: Number = UNTOLD
    root: Number = UNTOLD
    parent: Number = UNTOLD
    own_id: Number = UNTOLD
    task: Number = UNTOLD
    self_ns: Number = UNTOLD
    active_ns: Number = UNTOLD
    total_ns: Number = UNTOLD
    error: str | UnsetType | None = UNSET
    clipped: bool | UnsetType = UNSET
    remote: Remote | UnsetType | None = UNSET
    attributes: msgspec.Raw | UnsetType = UNSET
    device: Number = UNTOLD
    stream: Number = UNTOLD
    enclosing_stream: Number = UNTOLD
    label: str | UnsetType = UNSET
    uncertainty_ns: Number = UNTOLD
    place: Number = UNTOLD
    owner: Number = UNTOLD
    batch: Number = UNTOLD
