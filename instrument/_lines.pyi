"""Types of the native loops over lines. What each does stands beside its twin in `instrument.lines`."""

from collections.abc import Sequence

Numbers = Sequence[int]

def tree_of_names(
    parents: Numbers, site_of: Numbers, levels: Numbers, books: list[Numbers], /
) -> tuple[bytes, ...]: ...
def sums(
    books: list[Numbers], groups: Numbers, count: int, counted: Numbers = ..., parents: Numbers = ..., /
) -> bytes | None: ...
def together(sums: Numbers, rows: Numbers, /) -> bytes | None: ...
def values(
    parents: Numbers, sums: Numbers, field: int, per: int, negative: bool, least: bool, /
) -> list[float | None] | None: ...
def topmost(parents: Numbers, site_of: Numbers, marks: Numbers, /) -> bytes: ...
def functions(
    lines: Numbers, parents: Numbers, site_of: Numbers, marks: Numbers, keys: Numbers, rows: Numbers, order: int, /
) -> tuple[bytes, bytes] | None: ...
