"""A session saves the recordings that its profile asks for, with Chrome traces or instead, whole or not at all."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import instrument
from instrument import chrome, scope
from instrument.profile.keys import loads
from instrument.sessions import window_files
from instrument.sessions.session import Session
from instrument.trace import file

BOTH = (
    "service: shop\nexport: {recording: {path: 'traces/{service}-{run}-{window}.npz'}, "
    "chrome: {path: 'traces/{service}-{run}-{window}.json'}}"
)
ALONE = "service: shop\nexport: {recording: {path: 'traces/{window}.npz'}}"


@pytest.fixture(autouse=True)
def in_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    instrument.stop()


def begin(text: str) -> Session:
    session = instrument.start(loads(text, environ={}))
    assert session is not None
    return session


def request(count: int = 1) -> None:
    for _ in range(count):
        with scope("request", kind="request"), scope("work"):
            pass


def python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=240, check=False
    )  # fmt: skip


def test_the_end_of_a_session_is_written_both_ways_and_both_say_the_same() -> None:
    begin(BOTH)
    request(3)
    instrument.stop()
    recording, trace = (next(Path("traces").glob(f"shop-*-0.{suffix}")) for suffix in ("npz", "json"))
    assert recording.stem == trace.stem
    assert stat.S_IMODE(recording.stat().st_mode) == 0o600
    saved, (expected, tally) = file.load(recording), chrome.load(trace)
    told = [(span.site.name, span.span_id, span.parent_id, span.start_ns, span.self_ns) for span in expected.spans]
    assert len(told) == 6
    assert [(s.site.name, s.span_id, s.parent_id, s.start_ns, s.self_ns) for s in saved.trace.spans] == told
    assert saved.read_or_count_totals().calls == tally.calls == 6
    assert saved.trace.origin == expected.origin
    assert len(saved.trace.origin.boot) == 36, "by which files of one machine are put on one clock"


def test_each_window_of_a_schedule_is_a_recording_while_the_service_runs() -> None:
    begin("schedule: {skip_first: 1, record: 2}\n" + ALONE)
    request(6)
    instrument.flush(100)
    assert {path.name for path in Path("traces").iterdir()} == {"0.npz", "1.npz"}
    names = [span.site.name for span in file.load("traces/1.npz").trace.spans if not span.clipped]
    assert names.count("request") == 2
    instrument.stop()


def test_the_summary_names_the_recording() -> None:
    begin("export: {recording: {path: a.npz}, summary: {to: ./said.txt}}")
    request()
    instrument.stop()
    assert f"Recording: {Path('a.npz')}" in Path("said.txt").read_text()


def test_recordings_count_for_the_disk_limit_with_what_is_written_next_to_them() -> None:
    Path("traces").mkdir()
    for age, name in enumerate(["20260101T000000-71-0.npz", "20260101T000000-72-3.json", "x-0.npz"]):
        Path("traces", f"shop-{name}").write_text("x" * 10_000)
        os.utime(Path("traces", f"shop-{name}"), (1_000_000 - age, 1_000_000 - age))
    begin("limits: {disk: 28kB}\n" + BOTH)
    request()
    instrument.stop()
    names = {path.name for path in Path("traces").iterdir()}
    assert "shop-x-0.npz" in names, "which is none of ours"
    assert "shop-20260101T000000-72-3.json" not in names
    assert len([name for name in names if name.endswith("-0.npz")]) == 3


def test_files_of_a_run_that_goes_on_are_known_by_the_process_that_began_it() -> None:
    path = Path(f"shop-20260101T000000-{os.getpid()}-0.npz")
    assert window_files._pids_by_file("{service}-{run}-{window}.npz", Path.cwd(), "shop") == {}
    path.touch()
    Path("shop-20260101T000000-1-0-77.npz").touch()
    found = window_files._pids_by_file("{service}-{run}-{window}.npz", Path.cwd(), "shop")
    assert found == {str(Path.cwd() / path): os.getpid(), str(Path.cwd() / "shop-20260101T000000-1-0-77.npz"): 77}


@pytest.mark.parametrize("why", ["the disk is full", "the folder may not be written to"])
def test_a_recording_that_cannot_be_written_is_reported_and_leaves_no_half_file_and_chrome_goes_on(why: str) -> None:
    session = begin("export: {recording: {path: /proc/nowhere/a.npz}, chrome: {path: ok/trace.json}}")
    if why == "the disk is full":
        instrument.stop()
        session = begin("export: {recording: {path: out/a.npz}}")
    request()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        if why == "the disk is full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
        instrument.stop()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert any("cannot write the recording" in note for note in session.notes())
    if why == "the disk is full":
        assert list(Path("out").iterdir()) == []
    else:
        assert len(chrome.load("ok/trace.json")[0].spans) == 2


def test_a_process_that_is_killed_while_it_writes_leaves_no_half_recording() -> None:
    program = (
        "import os, signal\n"
        "import instrument\nfrom instrument.profile.keys import loads\nfrom instrument.trace import file\n"
        "kept = file._END.pack\n"
        "class Killed:\n"
        "    size = file._END.size\n"
        "    def pack(self, *values): os.kill(os.getpid(), signal.SIGKILL)\n"
        "file._END = Killed()\n"
        "instrument.start(loads('export: {recording: {path: out/a.npz}}', environ={}))\n"
        "with instrument.scope('x'): pass\n"
        "instrument.stop()\n"
    )
    assert python(program).returncode == -signal.SIGKILL
    assert not Path("out/a.npz").exists()
    assert [path.suffix for path in Path("out").iterdir()] == [".part"]
    begin("export: {recording: {path: out/a.npz}}")
    request()
    instrument.stop()
    assert [path.name for path in Path("out").iterdir()] == ["a.npz"], "what the killed one left is removed"


PROGRAM = """
import sys
import instrument
from instrument.profile.keys import loads
session = instrument.start(loads(sys.argv[1], environ={}))
with instrument.scope("request", kind="request"): pass
instrument.stop()
print(*session.notes(), sep="\\n")
"""


def test_a_service_is_given_numpy_only_where_its_profile_asks_for_files() -> None:
    told = PROGRAM + 'print("numpy" in sys.modules)'
    assert python(told, "service: shop").stdout.split()[-1:] == ["False"]
    done = python(told, "export: {chrome: {path: a.json}}")
    assert (done.stdout.split(), done.stderr) == (["True"], "")
    done = python(told, ALONE)
    assert (done.stdout.split(), done.stderr) == (["True"], "")
    with np.load("traces/0.npz") as arrays:
        assert len(arrays["span_id_steps"]) == 1


@pytest.mark.parametrize(
    "export", ["recording: {path: a.npz}", pytest.param("chrome: {path: a.json}", marks=pytest.mark.slow)]
)
def test_a_host_that_is_interrupted_ends_by_the_signal_all_the_same(export: str) -> None:
    Path("service.py").write_text(
        "import os, signal, instrument\nwith instrument.scope('x'): pass\nos.kill(os.getpid(), signal.SIGINT)\n"
    )
    Path("profile.yaml").write_text(f"export: {{{export}}}")
    words = [sys.executable, "-m", "instrument", "run", "--profile", "profile.yaml", "--", "service.py"]
    done = subprocess.run(words, capture_output=True, timeout=240, check=False)
    assert done.returncode == -signal.SIGINT
    (path,) = Path.cwd().glob("a.*")
    assert len((file.load(path) if path.suffix == ".npz" else chrome.read(path)).trace.columns) == 1


RUN = """
import os, instrument
for _ in range(3):
    with instrument.scope("request", kind="request"): pass
children = []
for _ in range(2):
    child = os.fork()
    if not child:
        with instrument.scope("request", kind="request"): pass
        instrument.stop()
        os._exit(0)
    children.append(child)
for child in children: os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_all_processes_of_a_run_write_their_own_files_under_its_name() -> None:
    Path("service.py").write_text(RUN)
    Path("profile.yaml").write_text("service: shop\nexport: {recording: }")
    began = time.strftime("%Y%m%d", time.gmtime())
    subprocess.run(
        [sys.executable, "-m", "instrument", "run", "--profile", "profile.yaml", "--", "service.py"],
        check=True, timeout=240,
    )  # fmt: skip
    paths = sorted(Path("traces").iterdir(), key=lambda path: len(path.name))
    assert len(paths) == 3
    assert len({path.name.split("-0")[0] for path in paths}) == 1
    assert paths[0].name.startswith(f"shop-{began[:6]}")
    saved = [file.load(path) for path in paths]
    assert [len(one.trace.columns) for one in saved] == [3, 1, 1]
    assert [path.name.endswith(f"-{one.trace.origin.pid}.npz") for path, one in zip(paths, saved, strict=True)] == [
        False, True, True,
    ]  # fmt: skip
