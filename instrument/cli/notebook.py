"""Read saved traces in a notebook: `load` gives data frames, views and explanations, and `compare` a comparison."""

from __future__ import annotations

import importlib.util
import os
import warnings
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from instrument.cli.inputs import expand_paths, merge_saved, read_saved
from instrument.cli.option_values import MOST
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

FRAMES = ("pandas", "polars", "pyarrow")
"""The supported libraries of data frames. The first one that is installed is used."""


class LoadedTrace:
    """Saved traces, merged into one with one tree for each request. Data frames are made when they are first read, and
    need `instrument-sdk[query]` and pandas, polars or pyarrow."""

    def __init__(self, saved: Saved, frames: str | None = None) -> None:
        self.saved = saved
        self._frames = frames

    @cached_property
    def recording(self) -> Recording:
        from instrument.report.view import Recording

        return Recording.of_saved(self.saved)

    def view(self, name: str, **options: Any) -> View:
        """Return a view of `instrument report`, such as `requests`. The options are those of `instrument.summary`."""
        from instrument.report.section import make_views
        from instrument.report.view import Options

        return make_views([name], self.recording, Options.of({"most": MOST, **options}))[name]

    def request(self, key: str, **options: Any) -> RequestLife:
        """Return the life of the request with a key or a span number."""
        from instrument.report.request_life import request_life
        from instrument.report.view import Options

        return request_life(self.recording, key, Options.of(options))

    def explain(self, request: str | None = None, **choice: Any) -> Explanation:
        """Explain the time of one request: the one with the key `request`, else the slowest. `choice` may have
        `endpoint`, `since_ns` and `until_ns`. With `slowest=None`, all requests between these times are explained
        together."""
        from instrument.report.explanation import RequestChoice, explain
        from instrument.report.view import Options

        return explain(self.recording, RequestChoice(request, **choice), Options(most=MOST))[0]

    def _repr_html_(self) -> str:
        return self.view("requests")._repr_html_()

    @cached_property
    def spans(self) -> Any:
        """The spans, one in each row: name, thread, times in ns, error, attributes, device intervals."""
        from instrument.trace import tables

        return self._make_frame(tables.make_span_frame(self.saved.trace))

    @cached_property
    def requests(self) -> Any:
        """The requests, one in each row, with the key, and the parts of the wall time in ns as in the report."""
        from instrument.trace import tables

        return self._make_frame(tables.make_request_frame(self.saved.trace, *self._joined_and_ledger()))

    @cached_property
    def batches(self) -> Any:
        """The batches, one in each row, with the keys of their requests, and the requests' weights and shares in ns."""
        from instrument.trace import tables

        return self._make_frame(tables.make_batch_frame(self.saved.trace, *self._joined_and_ledger()))

    def _joined_and_ledger(self) -> tuple[Any, Any]:

        return self.recording.joined, self.recording.ledger

    def _make_frame(self, relation: Any) -> Any:
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
    """Read recordings and Chrome traces, or a folder of them, as one trace: `instrument.load("traces").spans`.

    In a folder, only the files of `run` are read, by default of its newest run. With `all_runs`, all files are read.
    `clock` is as in `instrument report`. `frames` names the library of data frames, by default the first of `FRAMES`
    that is installed. Raises `TraceError` for unreadable files.
    """
    if not paths:
        raise InstrumentError("load: there is no path; give a file or a folder")
    names = [os.fspath(path) for path in paths]
    read = list(map(read_saved, expand_paths(names, run, all_runs, lambda text: warnings.warn(text, stacklevel=4))))
    return LoadedTrace(merge_saved(read, clock), frames)


def compare(before: Source | Sources, after: Source | Sources, **options: Any) -> Comparison:
    """Compare recordings before and after a change, such as `instrument.compare("before", "after")`. Each argument is a
    path, a trace, or a list of runs.

    The options are those of `instrument.summary`. It needs `instrument-sdk[compare]`.
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
