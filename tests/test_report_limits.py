"""What a file that was made to fill the memory, or to take for ever, can ask of `instrument report`: little."""

from __future__ import annotations

import gzip
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import instrument
from instrument import chrome
from instrument.chrome import reading
from instrument.profile import VIEWS
from instrument.report.summary import summary
from instrument.report.view import Options, Recording
from instrument.schema import loads

BLOCK = 50_000

BOMBS = {
    "more than 100 times its size": (b'{"a":"', b"x" * 100, 1_000_000, b'","traceEvents":[]}'),
    "takes more than 500 MB": (b'{"a":[[]', b",[]", 20_000_000, b'],"traceEvents":[]}'),
    "more than 1000 keys": (b'{"a":0', b',"a":0', 10_000_000, b',"traceEvents":[]}'),
    "unpacks to": (b'{"traceEvents":[{}', b',{"ph":"X","ts":1,"dur":1,"pid":1,"tid":1}', 3_000_000, b"]}"),
}


def report(*arguments: str) -> tuple[int, str, int]:
    """The exit code of `instrument report`, what it printed, and the most memory that it took, in bytes."""
    program = (
        "import re, sys\nfrom instrument.cli import main\ncode = main(['report', *sys.argv[1:]])\n"
        # Not ru_maxrss, which begins with what the process held that started this one.
        "status = open('/proc/self/status').read()\n"
        "print('peak', re.search(r'VmHWM:\\s+(\\d+)', status)[1], file=sys.stderr)\nsys.exit(code)"
    )
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    text, _, peak = done.stderr.rpartition("peak ")
    return done.returncode, done.stdout + text, int(peak) * 1024


@pytest.mark.slow
@pytest.mark.parametrize("says", BOMBS)
def test_a_packed_bomb_is_refused_within_half_a_gigabyte(says: str, tmp_path: Path) -> None:
    head, unit, count, tail = BOMBS[says]
    path = tmp_path / "bomb.json.gz"
    with gzip.open(path, "wb", compresslevel=9) as file:
        file.write(head)
        for _ in range(count // BLOCK):
            file.write(unit * BLOCK)
        file.write(tail)
    code, text, peak_bytes = report(str(path))
    assert (code, says in text, text.count("\n")) == (2, True, 1)
    assert peak_bytes < 500_000_000


def test_a_large_file_may_be_given_more_memory_and_the_limit_is_put_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from instrument.cli import main

    path = tmp_path / "trace.json"
    slices = [f',{{"ph":"X","ts":{ts},"dur":1,"pid":1,"tid":1,"args":{{"a":"b"}}}}' for ts in range(100_000)]
    path.write_text('{"traceEvents":[{}' + "".join(slices) + "]}")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    code, text, _ = report(str(path), "--memory", "30MB")
    assert (code, "takes more than 30 MB of memory; if you trust it, give more with --memory" in text) == (2, True)
    assert report(str(path), "--memory", "1GiB")[0] == 0
    assert main(["report", str(path)]) == 0
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    with pytest.raises(SystemExit):
        main(["report", str(path), "--memory", "1 G"])
    assert "found '1 G'; allowed: a number and one of B kB" in capsys.readouterr().err


def test_events_that_say_nothing_end_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LIMIT_VOID", 100)
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents":[{}' + ",{}" * 200 + "]}")
    with pytest.raises(instrument.TraceError, match="say nothing of any call"):
        chrome.load(path)
    with_slices = ',{"ph":"X","ts":1,"dur":1,"pid":1,"tid":1},{},{},{}' * 100
    path.write_text('{"traceEvents":[{}' + with_slices + "]}")
    assert len(chrome.load(path)[0].spans) == 100


def test_no_text_of_a_file_makes_a_line_of_a_report_longer_than_a_screen(tmp_path: Path) -> None:
    instrument.start(loads("startup: auto\nfunctions: [{match: 'nowhere.x:y'}]", environ={}))
    for kind in ("request", "phase", "copy", "comm"):
        with instrument.scope(f"{kind} of it", kind=kind):
            pass
    instrument.session().count_loss("lost things", 3)
    path = instrument.dump(tmp_path / "trace.json")
    instrument.stop()
    document = path.read_text()
    for known in ("request of it", "lost things", "nowhere.x:y", "unknown_service", "MainThread"):
        path.write_text(document.replace(known, known + "xy" * 30_000))
        assert path.read_text() != document
        trace, make_tally = chrome.read(path)
        text = summary(VIEWS, Recording.of_trace(trace, make_tally), Options(tracer_option="AllOpDetail"))
        assert max(map(len, text.splitlines())) < 400
    facts = json.loads(document)
    facts["instrument"]["sites"][0]["kind"] = "x" * 60_000
    path.write_text(json.dumps(facts))
    with pytest.raises(instrument.TraceError, match="of the kind 'xxx") as raised:
        chrome.load(path)
    assert len(str(raised.value)) < 400
