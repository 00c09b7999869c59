"""Types of the native loop over allocations. Its twin is in `instrument.report.allocation_sums`."""

from typing import Any

def memory(
    spans: Any,
    rows: bytes | bytearray,
    base_ns: int,
    first_ns: int,
    last_ns: int,
    known_since_ns: int,
    state: int,
    apart: bool,
    launches: bool,
    names: tuple[str, str, str],
    /,
) -> tuple[list[Any], list[Any], list[int], int] | None: ...
