"""Files that processes of a service leave behind: whole, for their owner only, and within `limits.disk` together."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import instrument
from instrument import chrome
from instrument.errors import TraceError
from instrument.profile.keys import loads
from instrument.runtime import file_writing
from instrument.sessions import window_files

WORKER = """
import sys, time, logging
import instrument
from instrument.profile.keys import loads
from instrument import profiled, scope

@profiled("work")
def work(): pass

instrument.start(loads(sys.argv[1], name="p.yaml", environ={}))
sys.stdin.readline()
for window in range(6):
    with scope("request", kind="request"):
        for _ in range(300): work()
    instrument.flush(100)
print("written", flush=True)
sys.stdin.readline()
instrument.stop()
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    instrument.stop()


def size_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["{service}-{pid}-{window}.json", "{service}-{window}.json"])
def test_eight_processes_on_one_path_keep_within_the_disk_limit_and_each_keeps_its_newest(
    name: str, tmp_path: Path
) -> None:
    limit_bytes = 700_000
    profile = (
        f"service: shop\nlimits: {{disk: {limit_bytes}B}}\nschedule: {{record: 1}}\n"
        f"export: {{chrome: {{path: 'traces/{name}'}}}}"
    )
    environ = {**os.environ, "INSTRUMENT_RUN_PID": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, profile],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ,
        )
        for _ in range(8)
    ]  # fmt: skip
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "written\n"
    assert size_of(tmp_path / "traces") <= limit_bytes
    newest = {path.name for path in (tmp_path / "traces").iterdir()}
    for worker in workers:
        number = name.format(service="shop", pid=worker.pid, window=5)
        assert (number if "pid" in name else f"shop-5-{worker.pid}.json") in newest
    said = [worker.communicate("\n", timeout=240)[1] for worker in workers]
    assert said == [""] * 8
    assert size_of(tmp_path / "traces") <= limit_bytes


def test_files_of_a_killed_writer_are_removed_and_files_being_written_count(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom instrument.runtime import file_writing\n"
        "with file_writing.open_replacement(Path(sys.argv[1])) as file:\n"
        "    file.write(b'x' * 1000)\n    file.flush()\n    print('writing', flush=True)\n    sys.stdin.readline()\n"
    )
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / f"shop-{number}-0.json")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in (1, 2)
    ]  # fmt: skip
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.readline()
    writers[0].kill()
    writers[0].communicate(timeout=240)
    assert len(list(tmp_path.glob(".instrument-*.part"))) == 2
    (tmp_path / "shop-3-0.json").write_text("x" * 500)
    own = tmp_path / "shop-4-0.json"
    own.write_text("x" * 500)
    shop = window_files.Destination(tmp_path, "shop", "", is_first=True)
    assert shop.remove_oldest_files(["shop-{pid}-{window}.json"], [own], 2000) == 0
    assert len(list(tmp_path.glob(".instrument-*.part"))) == 1, "the dead one's alone is gone"
    assert shop.remove_oldest_files(["shop-{pid}-{window}.json"], [own], 1999) == 1
    writers[1].communicate("\n", timeout=240)
    assert {path.name for path in tmp_path.iterdir()} == {"shop-2-0.json", "shop-4-0.json"}


def test_a_file_that_another_process_removes_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        (tmp_path / f"shop-{number}-0.json").write_text("x" * 100)
    own = tmp_path / "shop-0-0.json"
    shop = window_files.Destination(tmp_path, "shop", "", is_first=True)
    monkeypatch.setattr(window_files.os, "lstat", lambda name: Path(name).unlink() or Path(name).stat())
    assert shop.remove_oldest_files(["shop-{pid}-{window}.json"], [own], 10) == 0


def test_summary_files_count_with_the_traces(tmp_path: Path) -> None:
    Path("out").mkdir()
    for number in range(5):
        Path("out", f"shop-{number}.txt").write_text("x" * 10_000)
        os.utime(Path("out", f"shop-{number}.txt"), (1000 + number, 1000 + number))
    profile = (
        "service: shop\nlimits: {disk: 30kB}\n"
        "export: {chrome: {path: 'out/{service}-{pid}-{window}.json'}, summary: {to: 'out/{service}-{pid}.txt'}}"
    )
    instrument.start(loads(profile, environ={}))
    with instrument.scope("request", kind="request"):
        pass
    instrument.stop()
    left = {path.name for path in Path("out").iterdir()}
    assert {f"shop-{os.getpid()}.txt", f"shop-{os.getpid()}-0.json", "shop-4.txt"} <= left
    assert "shop-0.txt" not in left
    assert size_of(Path("out")) <= 30_000


def write_summary(to: str) -> None:
    instrument.start(loads(f"export: {{summary: {{to: '{to}'}}}}", environ={}))
    instrument.stop()


def test_a_summary_file_is_its_owners_and_replaces_a_link_without_following_it(tmp_path: Path) -> None:
    victim = tmp_path / "victim.txt"
    victim.write_text("precious")
    Path("report.txt").symlink_to(victim)
    write_summary("./report.txt")
    assert victim.read_text() == "precious"
    assert not Path("report.txt").is_symlink()
    assert Path("report.txt").stat().st_mode & 0o777 == 0o600
    assert "Event Summary" in Path("report.txt").read_text() or "Process:" in Path("report.txt").read_text()


@pytest.mark.parametrize("what", ["trace", "summary"])
def test_a_full_disk_leaves_the_older_file_and_nothing_else(what: str, caplog: pytest.LogCaptureFixture) -> None:
    path = Path("old.json" if what == "trace" else "old.txt")
    path.write_text("older")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        if what == "trace":
            instrument.start(loads("", environ={}))
            with pytest.raises(instrument.TraceError, match="make room"):
                instrument.dump(path)
        else:
            write_summary("./old.txt")
            assert "could not be written" in caplog.text
    finally:
        instrument.stop()
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert [entry.name for entry in Path().iterdir()] == [path.name]
    assert path.read_text() == "older"


def test_the_standard_streams_of_the_system_are_never_replaced_by_a_file(tmp_path: Path) -> None:
    with (tmp_path / "redirected").open("w") as file:
        code = (
            "from instrument.runtime import file_writing\nwith file_writing.open_replacement(Path('/dev/stdout')): pass"
        )
        code = f"from pathlib import Path\n{code}"
        done = subprocess.run([sys.executable, "-c", code], stdout=file, stderr=subprocess.PIPE, text=True, check=False)
    assert "this path exists, and is not a regular file" in done.stderr
    assert Path("/dev/stdout").readlink() == Path("/proc/self/fd/1")


def test_text_is_added_whole_or_not_at_all_and_never_through_a_link(tmp_path: Path) -> None:
    path = tmp_path / "windows.txt"
    file_writing.append_text(path, "one\n")
    file_writing.append_text(path, "two\n")
    assert path.read_text() == "one\ntwo\n"
    assert path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "link.txt").symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        file_writing.append_text(tmp_path / "link.txt", "three\n")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError):
        file_writing.append_text(tmp_path / "pipe", "four\n")
    assert path.read_text() == "one\ntwo\n"


def test_a_trace_is_read_back_from_the_file_that_replaced_a_link(tmp_path: Path) -> None:
    Path("trace.json").symlink_to(tmp_path / "nowhere.json")
    instrument.start(loads("", environ={}))
    instrument.dump("trace.json")
    instrument.stop()
    assert not Path("trace.json").is_symlink()
    assert not (tmp_path / "nowhere.json").exists()
    assert "traceEvents" in json.loads(Path("trace.json").read_text())
    chrome.load("trace.json")


@pytest.mark.parametrize(
    ("template", "service", "expected"),
    [
        ("traces/{service}-{pid}-{window}.json.gz", "chat-7b", "traces/chat-7b-42-3.json.gz"),
        ("{service}.json", "../../etc/passwd", "_.._etc_passwd.json"),
        ("{service}.json", "..", "service.json"),
        ("{service}.json", "", "service.json"),
        ("{service}/t.json", "a/b\\c\0d e\n", "a_b_c_d_e_/t.json"),
        ("{service}.json", "模型" * 60, "模型" * 16 + ".json"),
        ("{service}.json", "{pid}", "_pid_.json"),
        ("{service}.json", "\udc80x", "_x.json"),
        ("plain.json", "x", "plain.json"),
    ],
)
def test_the_service_becomes_a_safe_part_of_a_file_name(template: str, service: str, expected: str) -> None:
    assert window_files.fill_template(template, service=service, pid=42, window=3) == expected


@pytest.mark.parametrize("template", ["{host}.json", "{pid!r}", "{}", "{service.x}"])
def test_an_unknown_name_in_a_path_is_a_trace_error(template: str) -> None:
    with pytest.raises(TraceError, match=r"allowed: \{service\}, \{run\}, \{pid\}, \{window\}"):
        window_files.fill_template(template, service="x", pid=1, window=0)
