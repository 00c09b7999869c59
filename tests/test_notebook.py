"""Recordings in a notebook: what a cell shows of each, and the example in `examples`, cell by cell."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from simulated_engine import Service
from test_report_page import hostile

import instrument
from instrument.cli.notebook import LoadedTrace
from instrument.profile.model import VIEWS
from instrument.recording.spans import BATCH_KEYS
from instrument.trace import file

EXAMPLE = Path(__file__).parents[1] / "examples" / "chat.ipynb"


class Markup(HTMLParser):
    """The tags and the texts of HTML. An end that does not fit its begin fails."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the recordings of two runs. DuckDB's relations take the place of data frames."""
    for name, service in (("before", Service(1, requests=150)), ("traces", Service(2, requests=150))):
        (tmp_path / name).mkdir()
        file.dump(tmp_path / name / "run.npz", service.run())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LoadedTrace, "_make_frame", lambda trace, relation: relation)
    return tmp_path


def shown(source: str, names: dict[str, Any]) -> Any:
    """Run a cell, and return the value of its last line."""
    *before, last = ast.parse(source).body
    exec(compile(ast.Module(before, []), "cell", "exec"), names)
    if not isinstance(last, ast.Expr):
        exec(compile(ast.Module([last], []), "cell", "exec"), names)
        return None
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def test_the_example_runs_cell_by_cell_and_shows_tables(folders: Path) -> None:
    names: dict[str, Any] = {}
    values = [
        shown("".join(cell["source"]), names)
        for cell in json.loads(EXAMPLE.read_text())["cells"]
        if cell["cell_type"] == "code"
    ]
    trace, explanation, life, neighbours, requests, batches, comparison = values
    for value, text in (
        (trace, "POST /generate"), (explanation, "POST /generate"), (life, "queue"), (neighbours, "POST /generate"),
        (comparison, "engine.step"),
    ):  # fmt: skip
        markup = Markup(value._repr_html_())
        assert any(text in part for part in markup.texts)
        assert "table" in markup.tags
    assert requests.aggregate("count(*)").fetchall() == [(150,)]
    sizes = batches.aggregate("sum(members), bool_and(list_sum(shares_ns) = total_ns), bool_and(len(keys) = members)")
    served = sum(len(span.attributes[BATCH_KEYS]) for span in trace.saved.trace.spans if BATCH_KEYS in span.attributes)
    assert sizes.fetchall() == [(served, True, True)]


KERNEL = """
import sys, types
sys.modules["IPython"] = types.ModuleType("IPython")
sys.modules["IPython"].get_ipython = lambda: types.SimpleNamespace(config={"IPKernelApp": {}})
import instrument
for frames in ("pyarrow", "pandas", "polars"):
    try:
        __import__(frames)
    except ImportError:
        continue
    trace = instrument.load("traces", frames=frames)
    print(frames, *trace.requests.shape, trace.batches.shape[1], trace.spans.shape[1])
"""


def test_data_frames_are_made_in_a_kernel_without_widgets(folders: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KERNEL], capture_output=True, text=True, timeout=240, check=False)
    assert (done.stderr, done.stdout.splitlines()[0]) == ("", "pyarrow 150 17 12 25")


def test_names_cannot_break_the_markup_of_a_cell() -> None:
    saved = file.Saved(hostile(), None)
    trace = LoadedTrace(saved)
    for name in VIEWS:
        assert Markup(trace.view(name)._repr_html_()).tags <= {
            "h4", "p", "br", "pre", "table", "caption", "thead", "tbody", "tr", "th", "td",
        }  # fmt: skip
    Markup(trace.request("1")._repr_html_())


def test_a_comparison_takes_paths_traces_and_lists_of_runs(folders: Path) -> None:
    by_path = instrument.compare("before", "traces")
    trace = instrument.load("traces")
    assert instrument.compare([instrument.load("before")], [trace]).changes == by_path.changes
    assert len(instrument.compare(["before"], trace, rows=2).sections()[0].rows) == 3
