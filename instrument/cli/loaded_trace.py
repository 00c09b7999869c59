"""`instrument.load`: saved traces as data frames, for notebooks and scripts."""

from __future__ import annotations

import importlib.util
import os
import warnings
from functools import cached_property
from typing import TYPE_CHECKING, Any

from instrument.cli.inputs import files_in, one_trace, saved_in
from instrument.errors import InstrumentError

if TYPE_CHECKING:
    from instrument.trace.file import Saved

FRAMES = ("pandas", "polars", "pyarrow")
"""The libraries of data frames. The first that is installed makes the frames."""


class LoadedTrace:
    """Saved traces as one, with one tree per request. `saved` has the columns of which the frames are made.

    A frame is made on its first access. It needs `instrument-sdk[query]` and pandas, polars or pyarrow.
    """

    def __init__(self, saved: Saved, frames: str | None = None) -> None:
        self.saved = saved
        self._frames = frames

    @cached_property
    def spans(self) -> Any:
        """The spans, a row each: name, thread, times in ns, error, attributes, intervals on devices."""
        from instrument.trace import tables

        return self._frame_of(tables.frame(self.saved.trace))

    @cached_property
    def requests(self) -> Any:
        """The requests, a row each, with its key, and its wall by parts in ns, as the report has them."""
        from instrument.trace import tables
        from instrument.trace.joined import join
        from instrument.trace.ledger import ledger

        trace, facts = self.saved.trace.columns, self.saved.trace
        joined = join(trace, facts.apart_ns)
        return self._frame_of(tables.frame_of_requests(facts, joined, ledger(trace, joined)))

    def _frame_of(self, relation: Any) -> Any:
        from instrument.trace import tables

        kind = self._frames or next((name for name in FRAMES if importlib.util.find_spec(name)), None)
        if kind == "pandas":
            return tables.as_pandas(relation)
        if kind == "polars":
            return relation.pl()
        if kind == "pyarrow":
            return relation.to_arrow_table()
        asked = "none of them is installed" if kind is None else f"asked for {kind}"
        raise InstrumentError(f"load: data frames are of {', '.join(FRAMES)}; {asked}: pip install pandas")


def load(
    *paths: str | os.PathLike[str],
    run: str | None = None,
    all_runs: bool = False,
    clock: str = "monotonic",
    frames: str | None = None,
) -> LoadedTrace:
    """Read recordings and Chrome traces, or a folder of them, as one: `instrument.load("traces").spans`.

    Of a folder the files of one `run` are taken, else of the newest, or of `all_runs`. `clock` and files are as with
    `instrument report`. `frames` names the library of data frames: pandas where it is installed, else polars or
    pyarrow. Raises `TraceError` for what cannot be read.
    """
    if not paths:
        raise InstrumentError("load: found no path; give a file or a folder")
    names = [os.fspath(path) for path in paths]
    read = list(map(saved_in, files_in(names, run, all_runs, lambda others: warnings.warn(others, stacklevel=4))))
    return LoadedTrace(one_trace(read, clock), frames)
