"""Types of the native call tree. What it does stands beside its twin in `instrument.report.calls`."""

from collections.abc import Collection
from typing import Any

from instrument.recording.spans import Site

def places(
    spans: Any, kinds: Collection[str], first_ns: int, last_ns: int, untimed: frozenset[str], /
) -> (
    tuple[
        list[tuple[int, Site, int, bool, int, int, int, int, int, int, int, int, int]],
        list[tuple[int, int, int, int, int, int, int]],
    ]
    | None
): ...
