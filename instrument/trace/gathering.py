"""Columns that grow while a file is read: attributes as the texts that they are, numbers put in order at the end."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import msgspec
import numpy as np
from numpy.typing import NDArray

from instrument.trace.columns import Int32s, Int64s
from instrument.trace.layout import PackedAttributes

MOST_KNOWN = 10_000
"""Texts of attributes that are looked for among those that there are: where they differ this much, none comes twice."""


def column(numbers: array[int]) -> Int64s:
    """The numbers of an array of 64 bits, which does not grow from here on."""
    return np.frombuffer(numbers, dtype=np.int64)


def rank_of(order: NDArray[np.int64]) -> Int32s:
    """Return the place of each row in an order."""
    rank = np.empty(len(order), dtype=np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    return rank


class GatheredAttributes:
    """The attributes of rows as JSON, equal texts once. `refuse` raises for a text that has none."""

    def __init__(self, refuse: Callable[[bytes], None] | None = None) -> None:
        self._refuse = refuse
        self._known: dict[bytes, int] = {}
        self._texts = bytearray()
        self._ends = array("q")
        self._rows = array("q")
        self._numbers = array("q")

    def add(self, row: int, text: bytes) -> None:
        """Add the attributes of a row that has none yet."""
        number = self._known.get(text)
        if number is None:
            if self._refuse is not None:
                self._refuse(text)
            number = len(self._ends)
            self._texts += text
            self._ends.append(len(self._texts))
            if number < MOST_KNOWN:
                self._known[text] = number
        self._rows.append(row)
        self._numbers.append(number)

    def add_all(self, rows: Sequence[int], texts: Sequence[bytes]) -> None:
        """Add the attributes of rows that have none yet: as they are, since such a text hardly comes twice."""
        number = len(self._ends)
        self._ends.extend(accumulate(map(len, texts), initial=len(self._texts)))
        del self._ends[number]  # where the first of them begins
        self._texts += b"".join(texts)
        self._rows.extend(rows)
        self._numbers.extend(range(number, number + len(rows)))

    def packed(self, rank: Int32s) -> PackedAttributes:
        """The attributes of the rows by their rank."""
        rows = rank[column(self._rows)]
        order = np.argsort(rows, kind="stable")
        numbers = column(self._numbers).astype(np.int32)[order]
        return PackedAttributes(len(rank), rows[order].astype(np.int64), numbers, column(self._ends), self._texts)


def written(attributes: Mapping[str, object]) -> bytes:
    """Attributes as the text in which they are kept, without escapes that `having` would not see."""
    try:
        text = msgspec.json.encode(attributes)
    except (ValueError, OverflowError):
        text = b"null"
    # Which would stand for numbers that JSON has not, such as those beyond all floats.
    if b"null" not in text:
        return text
    return json.dumps(attributes, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")
