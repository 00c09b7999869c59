"""Types of the native scanner. What it does stands beside its twin `Foreign` in `instrument.chrome.foreign`."""

from collections.abc import Callable, Sequence
from typing import Any, final

from instrument.recording.spans import Site, Span

@final
class Scanner:
    def __init__(
        self,
        facts_of: Callable[[str, str | None], tuple[Site, int | None, str | None, bool, bool]],
        thread_id_of: Callable[[tuple[Any, ...]], int],
        flops_of: Callable[[Site, str], int | None],
        spans: list[Span],
        telling: list[Span],
        work: list[Any],
        launches: dict[int, Span],
        device_rows: set[tuple[Any, ...]],
        /,
    ) -> None: ...
    def scan(self, text: str, at: int, /) -> int: ...

def nest(spans: Sequence[Span], /) -> bool: ...
