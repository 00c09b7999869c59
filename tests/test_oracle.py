"""Views say what they said before: the answers that `tests/oracle/compare.py` holds, which shows what differs."""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle.compare import WAYS, differences
from oracle.recordings import ALL

SOME = ("program 2", "any parents 1", "demo", "kineto", "damaged 1", "deep", "program without facts")


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("name", SOME)
def test_views_say_of_some_traces_what_they_said_before(name: str, way: str, tmp_path: Path) -> None:
    assert [found[:3] for found in differences(tmp_path, [name], way=way, few=True)] == []


@pytest.mark.slow
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("name", list(ALL))
def test_views_say_of_every_trace_what_they_said_before(name: str, way: str, tmp_path: Path) -> None:
    assert [found[:3] for found in differences(tmp_path, [name], way=way)] == []
