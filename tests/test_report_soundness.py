"""A damaged file is refused by `instrument report` before any view is made of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from instrument import chrome
from instrument.errors import TraceError
from instrument.profile.model import VIEWS
from instrument.recording.spans import DeviceInterval, Origin, Site, Span
from instrument.report.view import Recording
from instrument.trace.trace import Trace

CIRCLE, TWICE, LATE = "a span in it is its own ancestor", "two spans in it have one id", "slices without a time"

UNSOUND = {
    "two that are in each other": ([(1, 2, 0), (2, 1, 0)], CIRCLE),
    "one in itself, below one that is sound": ([(1, 0, 0), (2, 2, 0)], CIRCLE),
    "a circle with a tree below it": ([(1, 2, 0), (2, 3, 0), (3, 1, 0), (4, 3, 0)], CIRCLE),
    "one id for two": ([(1, 0, 0), (2, 1, 0), (2, 1, 50)], TWICE),
    "a span of two hundred years hence": ([(1, 0, 0), (2, 0, 6 << 60)], LATE),
}
"""Spans as id, id of the parent and start."""


def written(path: Path, spans: list[tuple[int, int, int]]) -> Path:
    """A file as `instrument.dump` writes it, whose ids, parents and times were then changed to these."""
    site = Site("work", "op", device=True)
    made = [
        Span(
            site,
            100 + n,
            0,
            100 + n,
            n + 1,
            0,
            9 * n,
            9 * n + 9,
            9,
            9,
            device=(DeviceInterval(0, 7, 9 * n, 9 * n + 5),),
        )
        for n in range(len(spans))
    ]
    chrome.dump(path, Trace(Origin(1, "shop", 0, 0), 0, 100, made))
    head, *events = path.read_text().split("\n{")
    for n, (own, parent, at_ns) in enumerate(spans):
        for place, event in enumerate(events):
            if f'"id":{100 + n}' in event:
                event = re.sub(r'"ts":[0-9.]+', f'"ts":{at_ns // 1000}.{at_ns % 1000:03}', event)
                events[place] = event.replace(f'"id":{100 + n}', f'"id":{own},"parent":{parent}')
            elif f'"owner":{100 + n}' in event:
                events[place] = event.replace(f'"owner":{100 + n}', f'"owner":{own}')
    path.write_text("\n{".join([head, *events]))
    return path


@pytest.mark.parametrize("case", UNSOUND)
def test_a_file_that_is_not_sound_is_refused_before_any_view(case: str, tmp_path: Path) -> None:
    spans, says = UNSOUND[case]
    with pytest.raises(TraceError, match=f"cannot read the trace .*{says}.*; "):
        Recording.from_file(chrome.read(written(tmp_path / "trace.json", spans)))


@pytest.mark.parametrize("case", ["two that are in each other", pytest.param("one id for two", marks=pytest.mark.slow)])
def test_the_command_refuses_it_in_one_line_whichever_view_is_asked_for(case: str, tmp_path: Path) -> None:
    spans, says = UNSOUND[case]
    path = written(tmp_path / "trace.json", spans)
    program = (
        "import sys\nfrom instrument.cli import main\n"
        f"print({{main(['report', sys.argv[1], '--view', view]) for view in {tuple(VIEWS)!r}}})\n"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, timeout=240)
    assert done.stdout == "{2}\n"
    told = done.stderr.splitlines()
    assert len(told) == len(VIEWS)
    assert len(set(told)) == 1
    assert says in told[0]


def test_parents_that_are_missing_make_no_file_unsound(tmp_path: Path) -> None:
    """They may have been overwritten by newer spans, or lie before the window."""
    found = Recording.from_file(chrome.read(written(tmp_path / "trace.json", [(1, 77, 0), (2, 1, 4)])))
    assert found.columns.parent.tolist() == [-1, 0]
