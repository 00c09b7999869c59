"""Threads of ours go on in spite of all that the service throws at them or puts in the place of `threading`."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from otlp_collectors import collecting, take
from otlp_spans import ORIGIN, SECOND, THREADS, offer, tree

import instrument
from instrument.otlp.delivery import Exporter
from instrument.runtime.faults import FAULTS
from instrument.runtime.threads import Thread, own_thread_name
from instrument.runtime.unpatched import Event


def wait_until(holds: Callable[[], bool], limit_s: float = 240) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def as_in_a_service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Call it to have faults of ours counted and logged, and not raised. pytest sets its variable before each phase."""
    yield lambda: monkeypatch.delenv("PYTEST_CURRENT_TEST")
    FAULTS.clear()


def throw_into(name: str, kind: type[BaseException]) -> None:
    (ident,) = [thread.ident for thread in threading.enumerate() if thread.name == name]
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident or 0), ctypes.py_object(kind)) == 1


# -------------------------------------------------------------------- events


def test_an_event_lets_all_go_on_that_wait_and_none_when_it_is_cleared() -> None:
    event, found = Event(), []
    waiting = [threading.Thread(target=lambda: found.append(event.wait(240))) for _ in range(8)]
    for thread in waiting:
        thread.start()
    event.set()
    for thread in waiting:
        thread.join(240)
    assert found == [True] * 8
    assert event.wait()
    event.clear()
    assert not event.is_set()
    assert not event.wait(0.001)
    assert not event.wait(-1)


@pytest.mark.slow
def test_no_wait_misses_a_set_that_comes_just_then() -> None:
    for _ in range(2_000):
        event = Event()
        thread = threading.Thread(target=event.set)
        thread.start()
        assert event.wait(240)
        thread.join()


def test_a_signal_handler_may_set_what_its_thread_waits_for() -> None:
    event = Event()
    before = signal.signal(signal.SIGALRM, lambda *_: event.set())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert event.wait(240)
    finally:
        signal.signal(signal.SIGALRM, before)


# -------------------------------------------------------------------- threads that die


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, MemoryError, None])
def test_a_thread_that_ends_while_it_is_needed_is_said_once_and_begun_anew(
    kind: type[BaseException] | None, as_in_a_service: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    as_in_a_service()
    names: list[str | None] = []
    is_needed = True

    def run() -> None:
        names.append(own_thread_name())
        if kind is not None:
            raise kind

    thread = Thread(run, "instrument-test", lambda: is_needed)
    thread.start()
    wait_until(lambda: len(names) >= 3)
    assert thread.is_alive()
    is_needed = False
    thread.join(240)
    assert not thread.is_alive()
    assert set(names) == {"instrument-test"}
    assert own_thread_name() is None
    (record,) = caplog.records
    assert "a fault of instrument itself in the thread instrument-test" in record.getMessage()
    assert FAULTS.count_by_place()["thread instrument-test"] >= 2
    assert "instrument-test" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.slow
def test_spans_arrive_though_the_service_throws_system_exit_into_every_thread(
    as_in_a_service: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    as_in_a_service()
    with collecting(take) as server:
        exporter = Exporter(server.settings, ORIGIN, lambda: THREADS)
        exporter.start()
        for number in range(2):
            throw_into("instrument-otlp", SystemExit)
            wait_until(lambda: sum(FAULTS.count_by_place().values()) > number)  # noqa: B023 - called at once
            offer(exporter, tree(10, 100 * number))
            wait_until(lambda: exporter.count_fates()["pending"] == 0)
        assert exporter.flush(60 * SECOND).complete
        assert len(server.taken) == 20
        exporter.stop(0)
    messages = [record.getMessage() for record in caplog.records]
    assert messages
    assert len({*messages}) == len(messages)  # each place is named once, wherever the exception came


def test_a_flush_says_nothing_is_settled_while_the_thread_that_sends_is_gone() -> None:
    with collecting(take) as server:
        exporter = Exporter(server.settings, ORIGIN, lambda: THREADS)
        offer(exporter, tree(10))  # it has not been started
        delivery = exporter.flush(0)
        assert (delivery.settled, delivery.complete, delivery.pending) == (False, False, 10)
        exporter.start()
        assert exporter.flush(60 * SECOND).complete
        exporter.stop(0)


def test_a_forked_child_knows_that_threads_are_not_its_own() -> None:
    halt = Event()
    thread = Thread(halt.wait, "instrument-test", lambda: False)
    thread.start()
    pid = os.fork()
    if not pid:
        thread.join()
        os._exit(int(thread.is_alive()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert thread.is_alive()
    halt.set()
    thread.join(240)


# -------------------------------------------------------------------- gevent

SERVICE = """
import sys, time
when, profile = sys.argv[1:3]
import gevent.monkey
if when == "before":
    gevent.monkey.patch_all()
import gevent, instrument
session = instrument.start(profile)
if when == "after":
    gevent.monkey.patch_all()
import threading, ssl, urllib.request
context = ssl.create_default_context()
context.minimum_version = ssl.TLSVersion.TLSv1_2  # recurses for ever where somebody has spoilt `ssl`
from work import step
sent = 0
for _ in range(2):
    gevent.joinall([gevent.spawn(step, 1) for _ in range(100)])
    sent += 100
    end = time.monotonic() + 240
    while session.recorded.exporter.count_fates()["exported"] < sent and time.monotonic() < end:
        gevent.sleep(0.05)  # without being asked to
    assert session.recorded.exporter.count_fates()["exported"] == sent, session.recorded.exporter.count_fates()
gevent.joinall([gevent.spawn(step, 1) for _ in range(100)])
delivery = instrument.flush(60)
assert (delivery.settled, delivery.exported, delivery.pending) == (True, 300, 0), delivery
instrument.stop()
import os
end = time.monotonic() + 240  # who has been joined may not have left the kernel yet
while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < end:
    time.sleep(0.01)
assert len(os.listdir("/proc/self/task")) == 1, os.listdir("/proc/self/task")
assert [thread.name for thread in threading.enumerate()] == ["MainThread"], threading.enumerate()
"""


def run_gevent(folder: Path, when: str, endpoint: str, protocol: str = "http/protobuf", **environ: str) -> None:
    (folder / "work.py").write_text("import time\ndef step(x):\n    time.sleep(0.002)\n    return x + 1\n")
    (folder / "main.py").write_text(SERVICE)
    (folder / "profile.yaml").write_text(
        'functions: [{match: "work:step", kind: request}]\n'
        "control: {watch: true}\ndevice: {host: 100ms}\n"
        f"export: {{otlp: {{endpoint: '{endpoint}', protocol: {protocol}}}}}\n"
    )
    words = [sys.executable, "main.py", when, "profile.yaml"]
    done = subprocess.run(
        words, cwd=folder, env={**os.environ, **environ}, capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


needs_gevent = pytest.mark.skipif(importlib.util.find_spec("gevent") is None, reason="gevent is not installed")


@needs_gevent
@pytest.mark.parametrize(("when", "secure"), [("before", True), ("after", False)])
@pytest.mark.slow
def test_every_request_of_a_service_patched_by_gevent_reaches_the_collector(
    tmp_path: Path, when: str, secure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    environ = {}
    with collecting(take) as server:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        if secure:
            key, certificate = certified(tmp_path)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key)
            server.socket = context.wrap_socket(server.socket, server_side=True)
            endpoint = f"https://localhost:{server.server_port}"
            environ["OTEL_EXPORTER_OTLP_CERTIFICATE"] = str(certificate)
        run_gevent(tmp_path, when, endpoint, **environ)
    assert server.taken.count("step") == 300


def certified(folder: Path) -> tuple[Path, Path]:
    """A key and a certificate of its own for localhost."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    key, certificate = folder / "key.pem", folder / "cert.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    files = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*make.split(), *files], check=True, capture_output=True)
    return key, certificate


FORK = """
import os, sys, threading, time, warnings
from instrument.runtime import threads
threads._PYTHON_WARNS = True
def warn():  # as Python 3.12 does at a fork
    warnings.warn("This process (pid=1) is multi-threaded, use of fork() may lead", DeprecationWarning)
def warned(fork):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        threads.silence_fork_warning()
        fork()
        assert warnings.filters == before
        return len(found)
wait = threading.Event()
ours = threads.Thread(wait.wait, "instrument-test")
ours.start()
while len(os.listdir("/proc/self/task")) < 2: time.sleep(0.01)
print(warned(warn))
service = threading.Thread(target=wait.wait)
service.start()
print(warned(warn))
"""


def test_python_is_kept_from_warning_of_threads_at_a_fork_where_all_of_them_are_ours() -> None:
    done = subprocess.run([sys.executable, "-c", FORK + "wait.set()"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1"]


def test_no_thread_of_ours_begins_where_a_server_is_still_to_fork_its_workers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """uWSGI forks so without Python's lock: in a child nobody gets the lock that a thread of its parent had."""
    (tmp_path / "profile.yaml").write_text("budget: 1%\nfunctions: [{match: 'lacking:x'}]")

    def begun() -> bool:
        instrument.start(str(tmp_path / "profile.yaml"))
        try:
            return any(thread.name == "instrument" for thread in threading.enumerate())
        finally:
            instrument.stop()

    def is_begun_by(worker: int, master: int, workers: int) -> bool:
        uwsgi = SimpleNamespace(worker_id=lambda: worker, masterpid=lambda: master, numproc=workers)
        monkeypatch.setitem(sys.modules, "uwsgi", uwsgi)  # type: ignore[arg-type]
        return begun()

    assert begun()
    assert not is_begun_by(0, 7, 1)
    assert not is_begun_by(0, 0, 2)
    assert is_begun_by(0, 0, 1), "a server that serves in this very process"
    assert is_begun_by(1, 7, 2)
    monkeypatch.setitem(sys.modules, "uwsgi", SimpleNamespace())  # type: ignore[arg-type]
    assert begun(), "something else of that name"
