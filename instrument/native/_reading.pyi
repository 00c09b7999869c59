"""Types of the native reader. What it does stands beside its twin `_Own` in `instrument.chrome.reading`."""

from collections.abc import Callable, Sequence
from typing import Any, final

from instrument.recording.spans import Site, Span

@final
class Reader:
    served: int
    def __init__(
        self,
        spans: list[Span],
        intervals: dict[int, list[Any]],
        rows: dict[str, Any],
        make_row: Callable[..., Any],
        sites: Sequence[Site],
        base_ns: int,
        nests: bool,
        /,
    ) -> None: ...
    def around(self, tid: int, start_ns: int, /) -> tuple[int, int] | None: ...
    def open(self, tid: int, end_ns: int, span_id: int, root_id: int, /) -> None: ...
    def scan(self, text: str, at: int, /) -> int: ...

def allocations(text: str, at: int, rows: bytearray, /) -> int: ...
