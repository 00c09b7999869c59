"""The items of a loop's source, the wait for each of which is told to whoever counts it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from instrument.instrumentors.loaders import Waiting


class LoaderItems(Iterator[Any]):
    """What `Profiler.loader` returns: as often to be iterated as its source is. Waits are told as `of` it."""

    def __init__(self, source: Any, of: object) -> None:
        self._source = source
        self._of = of
        self._begun: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        begun, self._begun = self._begun, None
        return self._read() if begun is None else begun

    def __next__(self) -> Any:
        if self._begun is None:
            self._begun = self._read()
        return next(self._begun)

    def _read(self) -> Iterator[Any]:
        waiting = Waiting(self._of)
        try:
            items = iter(self._source)
        finally:
            waiting.end()
        while True:
            waiting = Waiting(self._of)
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                waiting.end()
            yield item


class SizedLoaderItems(LoaderItems):
    """The same of a source that has a length."""

    def __len__(self) -> int:
        return len(self._source)
