"""Read saved traces in a notebook. `load` gives data frames, views and explanations, and `compare` compares traces."""

from __future__ import annotations

import importlib.util
import os
import warnings
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from instrument.cli.inputs import expand_paths, merge_saved_files, read_file
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
    """A saved trace, or a merge of several traces, with one tree per request.

    Data frames are made at the first access. They need `instrument-sdk[query]`, and pandas, polars or pyarrow.
    """

    def __init__(self, saved: Saved, frames: str | None = None) -> None:
        self.saved = saved
        self._frames = frames

    @cached_property
    def recording(self) -> Recording:
        from instrument.report.view import Recording

        return Recording.from_file(self.saved)

    def view(self, name: str, **options: Any) -> View:
        """Return a view of `instrument report`, such as `requests`. `options` are the options of
        `instrument.summary`."""
        from instrument.report.section import make_views
        from instrument.report.view import Options

        return make_views([name], self.recording, Options.from_mapping({"most": MOST, **options}))[name]

    def request(self, key: str, **options: Any) -> RequestLife:
        """Return the parts and the timeline of a request. `key` is the key of the request or the number of a span.
        `options` are the options of `instrument.summary`."""
        from instrument.report.request_life import make_request_life
        from instrument.report.view import Options

        return make_request_life(self.recording, key, Options.from_mapping(options))

    def explain(self, request: str | None = None, **choice: Any) -> Explanation:
        """Explain the time of a request, by default of the slowest request. `request` is the key of the request.

        `choice` limits the requests by `endpoint`, `since_ns` and `until_ns`. With `slowest=None`, all requests within
        these limits are explained together.
        """
        from instrument.report.explanation import RequestChoice, explain
        from instrument.report.view import Options

        return explain(self.recording, RequestChoice(request, **choice), Options(most=MOST))[0]

    def _repr_html_(self) -> str:
        return self.view("requests")._repr_html_()

    @cached_property
    def spans(self) -> Any:
        """A data frame of the spans. The columns are name, thread, times in nanoseconds, error, attributes and device
        intervals."""
        from instrument.trace import tables

        return self._make_frame(tables.make_span_frame(self.saved.trace))

    @cached_property
    def requests(self) -> Any:
        """A data frame of the requests, with the key and the parts of the time. Times are in nanoseconds."""
        from instrument.trace import tables

        return self._make_frame(tables.make_request_frame(self.saved.trace, *self._compute_joins_and_ledger()))

    @cached_property
    def batches(self) -> Any:
        """A data frame of the batches, with the keys, weights and times of the requests in each batch. Times are in
        nanoseconds."""
        from instrument.trace import tables

        return self._make_frame(tables.make_batch_frame(self.saved.trace, *self._compute_joins_and_ledger()))

    def _compute_joins_and_ledger(self) -> tuple[Any, Any]:
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
    """Read recordings and Chrome traces as a single trace, such as `instrument.load("traces").spans`.

    - `paths`: files or folders
    - `run`: the name of the run that is read in a folder. The default is the newest run
    - `all_runs`: True to read all files in a folder
    - `clock`: "monotonic", or "wall" to join files of several machines by the time of day
    - `frames`: the library of data frames: "pandas", "polars" or "pyarrow". The default is the first installed one

    Raises `TraceError` if a file cannot be read.
    """
    if not paths:
        raise InstrumentError("load: there is no path; give a file or a folder")
    names = [os.fspath(path) for path in paths]
    read = list(map(read_file, expand_paths(names, run, all_runs, lambda text: warnings.warn(text, stacklevel=4))))
    return LoadedTrace(merge_saved_files(read, clock), frames)


def compare(before: Source | Sources, after: Source | Sources, **options: Any) -> Comparison:
    """Compare recordings from before and after a change, as in `instrument.compare("before", "after")`.

    Each side is a path, a loaded trace, or a list of paths or traces. A list has an item per run. `options` are the
    options of `instrument.summary`. This function needs `instrument-sdk[compare]`.
    """
    from instrument.report import comparison
    from instrument.report.view import Options

    def load_side(side: Source | Sources) -> list[Recording]:
        sources = side if isinstance(side, (list, tuple)) else [side]
        return [(source if isinstance(source, LoadedTrace) else load(source)).recording for source in sources]

    return comparison.compare(load_side(before), load_side(after), Options.from_mapping({"most": MOST, **options}))
