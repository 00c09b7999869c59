"""Types of the native loops over stretches. What each does stands beside its twin in `instrument.report.stretches`."""

from collections.abc import Callable
from typing import Any

from instrument.recording.spans import Site, Span

def sites(spans: Any, /) -> list[Site] | None: ...
def placed(
    spans: Any,
    names: dict[tuple[int, int], int],
    by_root: bool,
    line_of: Callable[[Span], int | None],
    lines: tuple[tuple[int, bytes, bytes], ...],
    /,
) -> tuple[list[Span], bytes, bytes] | None: ...
def summed(
    spans: Any, wanted: tuple[tuple[bytes, bytes], ...], untimed: frozenset[str], /
) -> list[list[int | None]] | None: ...
