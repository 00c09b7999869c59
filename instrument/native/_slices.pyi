"""Types of the native writer. What it does stands beside its twin in `instrument.chrome.slices`."""

from collections.abc import Callable, Sequence
from typing import final

from instrument.chrome.lanes import Row
from instrument.recording.spans import Site, Span
from instrument.trace.metadata import SiteText

@final
class Slices:
    base_ns: int
    left_out: int
    sites: list[Site]
    def start(self, texts: list[SiteText], /) -> None: ...
    def next(self) -> bytes: ...
    def rows(self) -> list[Row]: ...

def slices(
    spans: Sequence[Span],
    since_ns: int,
    pid: int,
    batch: int,
    more_args: Callable[[Span, int], str],
    text_of: Callable[[str], str],
    /,
) -> Slices | None: ...
def allocations(rows: bytes | bytearray, moved_ns: int, /) -> bytes | None: ...
