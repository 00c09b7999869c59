"""A file that was made to fill the memory, or to take for ever, costs `instrument report` little."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import instrument
from instrument import chrome
from instrument.chrome import slice_reading
from instrument.profile.keys import loads
from instrument.profile.model import VIEWS
from instrument.recording.spans import Origin
from instrument.report.section import format_summary
from instrument.report.view import Options, Recording
from instrument.trace import file
from instrument.trace.trace import Trace

BLOCK = 50_000

BOMBS = {
    "more than 100 times its size": (b'{"a":"', b"x" * 100, 1_000_000, b'","traceEvents":[]}'),
    "takes more than 500 MB": (b'{"a":[[]', b",[]", 20_000_000, b'],"traceEvents":[]}'),
    "more than 1000 keys": (b'{"a":0', b',"a":0', 10_000_000, b',"traceEvents":[]}'),
    "unpacks to": (b'{"traceEvents":[{}', b',{"ph":"X","ts":1,"dur":1,"pid":1,"tid":1}', 3_000_000, b"]}"),
}


class Report(NamedTuple):
    code: int
    text: str
    peak_bytes: int
    limits: list[str]
    """RLIMIT_DATA before and after."""


def report(*arguments: str) -> Report:
    """Return the outcome of `instrument report`."""
    return outcome("report", *arguments)


def outcome(*arguments: str) -> Report:
    """Return the outcome of a verb in a process of its own: the limit counts all memory of a process."""
    program = (
        "import re, resource, sys\nfrom instrument.cli import main\n"
        "before = resource.getrlimit(resource.RLIMIT_DATA)\n"
        "try:\n    code = main(sys.argv[1:])\nexcept SystemExit as error:\n    code = error.code\n"
        # Not ru_maxrss, which begins with what the process held that started this one.
        "peak_kb = re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]\n"
        "print('measured', peak_kb, *before, *resource.getrlimit(resource.RLIMIT_DATA), file=sys.stderr)\n"
        "sys.exit(code)"
    )
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    text, _, measured = done.stderr.rpartition("measured ")
    peak_kb, *limits = measured.split()
    return Report(done.returncode, done.stdout + text, int(peak_kb) * 1024, limits)


@pytest.mark.slow
@pytest.mark.parametrize("says", BOMBS)
def test_a_packed_bomb_is_refused_within_half_a_gigabyte(says: str, tmp_path: Path) -> None:
    head, unit, count, tail = BOMBS[says]
    path = tmp_path / "bomb.json.gz"
    with gzip.open(path, "wb", compresslevel=9) as packed:
        packed.write(head)
        for _ in range(count // BLOCK):
            packed.write(unit * BLOCK)
        packed.write(tail)
    done = report(str(path))
    assert (done.code, says in done.text, done.text.count("\n")) == (2, True, 1)
    assert done.peak_bytes < 500_000_000


@pytest.mark.slow
def test_a_large_file_may_be_given_more_memory_and_the_limit_is_put_back(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    its = [f',{{"ph":"X","ts":{ts},"dur":1,"pid":1,"tid":1,"args":{{"a":"b"}}}}' for ts in range(100_000)]
    path.write_text('{"traceEvents":[{}' + "".join(its) + "]}")
    refused = report(str(path), "--memory", "30MB")
    assert refused.code == 2
    assert "takes more than 30 MB of memory; if you trust the file, give more with --memory" in refused.text
    read = [report(str(path), "--memory", "1GiB"), report(str(path))]
    assert [done.code for done in read] == [0, 0]
    for done in [refused, *read]:
        assert done.limits[:2] == done.limits[2:]
    wrong = report(str(path), "--memory", "1 G")
    assert wrong.code == 2
    assert "found '1 G'; allowed: a number and one of B kB" in wrong.text


@pytest.mark.parametrize("words", [("convert", "--to", "recording"), ("merge",), ("query",)])
def test_every_verb_reads_files_within_the_memory_that_it_is_given(words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    its = [f',{{"ph":"X","ts":{ts},"dur":1,"pid":1,"tid":1}}' for ts in range(100_000)]
    path.write_text('{"traceEvents":[{}' + "".join(its) + "]}")
    verb, *more = words
    more += {"query": ["select 1"], "merge": ["-o", str(tmp_path / "all.npz")]}.get(verb, [])
    refused = outcome(verb, str(path), *more, "--memory", "30MB")
    assert refused.code == 2
    assert f"{verb}: {path} takes more than 30 MB of memory" in refused.text
    assert refused.limits[:2] == refused.limits[2:]


def test_more_events_than_the_limit_stop_the_reading_with_any_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_reading, "LIMIT_EVENTS", 400)
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents":[{}' + ",{}" * 400 + "]}")
    with pytest.raises(instrument.TraceError, match="more than 400 events"):
        chrome.load(path)
    with_slices = ',{"ph":"X","ts":1,"dur":1,"pid":1,"tid":1},{},{},{}' * 99
    path.write_text('{"traceEvents":[{}' + with_slices + "]}")
    assert len(chrome.load(path)[0].spans) == 99


def test_no_text_of_a_file_makes_a_line_of_a_report_longer_than_a_screen(tmp_path: Path) -> None:
    instrument.start(loads("startup: auto\nfunctions: [{match: 'nowhere.x:y'}]", environ={}))
    for kind in ("request", "phase", "copy", "comm"):
        with instrument.scope(f"{kind} of it", kind=kind):
            pass
    instrument.session().exporting.count_loss("lost things", 3)
    path = instrument.dump(tmp_path / "trace.json")
    instrument.stop()
    document = path.read_text()
    for known in ("request of it", "lost things", "nowhere.x:y", "unknown_service", "MainThread"):
        path.write_text(document.replace(known, known + "xy" * 30_000))
        assert path.read_text() != document
        text = format_summary(VIEWS, Recording.from_file(chrome.read(path)), Options(tracer_option="AllOpDetail"))
        assert max(map(len, text.splitlines())) < 400
    facts = json.loads(document)
    facts["instrument"]["sites"][0]["kind"] = "x" * 60_000
    path.write_text(json.dumps(facts))
    with pytest.raises(instrument.TraceError, match="of the kind 'xxx") as raised:
        chrome.load(path)
    assert len(str(raised.value)) < 400


def test_a_program_that_has_much_memory_itself_reads_a_file_all_the_same(tmp_path: Path) -> None:
    path = file.dump(tmp_path / "one.npz", Trace(Origin(1, "shop", 0, 0), 0, 100, [], {}))
    code = "import sys; large = bytearray(600_000_000); from instrument.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "report", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
