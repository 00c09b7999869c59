"""Saved traces in a notebook: data frames, views, explanations and comparisons."""

from __future__ import annotations

import importlib.util
import os
import warnings
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from instrument.cli.inputs import files_in, one_trace, read_saved
from instrument.errors import InstrumentError

if TYPE_CHECKING:
    from instrument.report.comparison import Comparison
    from instrument.report.explanation import Explanation
    from instrument.report.request_life import RequestLife
    from instrument.report.section import View
    from instrument.report.view import Recording
    from instrument.trace.file import Saved

    Source: TypeAlias = "str | os.PathLike[str] | LoadedTrace"
    Sources: TypeAlias = list[Source] | tuple[Source, ...]

MOST = 15
"""The default number of rows of a table."""

FRAMES = ("pandas", "polars", "pyarrow")
"""The libraries of data frames. The first installed one is used."""


class LoadedTrace:
    """Saved traces as one, with one tree per request. `saved` has the columns for the frames.

    A frame is made on its first access. It needs `instrument-sdk[query]` and pandas, polars or pyarrow.
    """

    def __init__(self, saved: Saved, frames: str | None = None) -> None:
        self.saved = saved
        self._frames = frames

    @cached_property
    def recording(self) -> Recording:
        from instrument.report.view import Recording

        return Recording.of_saved(self.saved)

    def view(self, name: str, **options: Any) -> View:
        """Return a view of `instrument report`, such as `requests`. The options are those of `instrument.summary`."""
        from instrument.report.summary import make_views
        from instrument.report.view import Options

        return make_views([name], self.recording, Options.of({"most": MOST, **options}))[name]

    def request(self, key: str, **options: Any) -> RequestLife:
        """Return the life of a request by its key, or by the number of its span."""
        from instrument.report.request_life import request_life
        from instrument.report.view import Options

        return request_life(self.recording, key, Options.of(options))

    def explain(self, request: str | None = None, **choice: Any) -> Explanation:
        """Return the cause of a slow request by its key, of the slowest one without a key, or of a window.

        `choice` has `endpoint`, `since_ns` and `until_ns`. A window is explained by `slowest=None` with a time.
        """
        from instrument.report.explanation import RequestChoice, explain
        from instrument.report.view import Options

        return explain(self.recording, RequestChoice(request, **choice), Options(most=MOST))[0]

    def _repr_html_(self) -> str:
        return self.view("requests")._repr_html_()

    @cached_property
    def spans(self) -> Any:
        """The spans, a row each: name, thread, times in ns, error, attributes, intervals on devices."""
        from instrument.trace import tables

        return self._frame_of(tables.frame(self.saved.trace))

    @cached_property
    def requests(self) -> Any:
        """The requests, a row each, with its key, and with the parts of its wall time in ns, as in the report."""
        from instrument.report.request_groups import joined_requests, request_ledger
        from instrument.trace import tables

        joined, ledger = self.recording.once(joined_requests), self.recording.once(request_ledger)
        return self._frame_of(tables.frame_of_requests(self.saved.trace, joined, ledger))

    @cached_property
    def batches(self) -> Any:
        """The batches, a row each, with the keys, the weights and the shares in ns of its members."""
        from instrument.report.request_groups import joined_requests, request_ledger
        from instrument.trace import tables

        joined, ledger = self.recording.once(joined_requests), self.recording.once(request_ledger)
        return self._frame_of(tables.frame_of_batches(self.saved.trace, joined, ledger))

    def _frame_of(self, relation: Any) -> Any:
        from instrument.trace import tables

        kind = self._frames or next((name for name in FRAMES if importlib.util.find_spec(name)), None)
        if kind == "pandas":
            return tables.as_pandas(relation)
        if kind == "polars":
            return relation.pl()
        if kind == "pyarrow":
            return relation.to_arrow_table()
        state = "none of them is installed" if kind is None else f"{kind} is none of them"
        raise InstrumentError(f"load: data frames need one of {', '.join(FRAMES)}; {state}: pip install pandas")


def load(
    *paths: str | os.PathLike[str],
    run: str | None = None,
    all_runs: bool = False,
    clock: str = "monotonic",
    frames: str | None = None,
) -> LoadedTrace:
    """Read recordings and Chrome traces, or a folder of them, as one: `instrument.load("traces").spans`.

    A folder gives the files of one `run`, else of the newest run, or with `all_runs` all files. `clock` is as in
    `instrument report`. `frames` names the library of data frames, by default the first of `FRAMES` that is installed.
    Raises `TraceError` for unreadable files.
    """
    if not paths:
        raise InstrumentError("load: there is no path; give a file or a folder")
    names = [os.fspath(path) for path in paths]
    read = list(map(read_saved, files_in(names, run, all_runs, lambda sentence: warnings.warn(sentence, stacklevel=4))))
    return LoadedTrace(one_trace(read, clock), frames)


def compare(before: Source | Sources, after: Source | Sources, **options: Any) -> Comparison:
    """Compare two sides, each a path, a loaded trace or a list of runs:

    `instrument.compare("before", "after")`. The options are those of `instrument.summary`. It needs
    `instrument-sdk[compare]`.
    """
    from instrument.report import comparison
    from instrument.report.view import Options

    sides = [
        [
            (source if isinstance(source, LoadedTrace) else load(source)).recording
            for source in (side if isinstance(side, (list, tuple)) else [side])
        ]
        for side in (before, after)
    ]
    return comparison.compare(sides[0], sides[1], Options.of({"most": MOST, **options}))
