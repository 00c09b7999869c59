"""Jobs of queues are requests: named by their tasks, in their callers' traces, with their wait in the queue."""

from __future__ import annotations

import asyncio
import importlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from readback import rows_in

import instrument
from instrument.instrumentors.requests import queue_jobs
from instrument.profile.keys import loads
from instrument.recorder.recorder import RECORDER
from instrument.recorder.request_meter import Meter
from instrument.recording.metric_definitions import QUEUE_TIME
from instrument.recording.spans import TIME_IN_QUEUE, Span
from instrument.sessions.session import Session
from instrument.trace import file
from instrument.trace.trace import make_spans

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.fixture
def session() -> Iterator[Session]:
    running = instrument.start(loads("agent: off\nrequests: auto"))
    assert isinstance(running, Session)
    yield running
    instrument.stop()


def requests_of(session: Session, name: str) -> list[Span]:
    spans = [span for span in session.trace().spans if span.site.name.endswith(name)]
    assert {span.site.kind for span in spans} <= {"request"}
    return sorted(spans, key=lambda span: span.start_ns)


def trace_of(span: Span) -> str:
    return "" if span.remote is None else f"{span.remote.trace_id:032x}"


def test_a_task_of_celery_is_a_request(session: Session) -> None:
    celery = pytest.importorskip("celery")
    app = celery.Celery("shop", broker="memory://", backend="cache+memory://")

    @app.task(name="shop.resize")  # type: ignore[untyped-decorator]
    def resize(size: int) -> int:
        return 1 // size

    resize.apply(args=[1], headers={"traceparent": TRACEPARENT})
    resize.apply(args=[0])
    done, failed = requests_of(session, "shop.resize")
    assert (trace_of(done), done.error) == (TRACE, None)
    assert (trace_of(failed), failed.error) == ("", "ZeroDivisionError")
    assert dict(done.site.attributes)["messaging.system"] == "celery"


def test_attempts_of_a_task_of_celery_are_a_request_each_while_they_overlap(session: Session) -> None:
    """A retry has the id of the task. A pool of threads or greenlets may begin it before the first attempt ends."""
    celery = pytest.importorskip("celery")
    app = celery.Celery("shop", broker="memory://", backend="cache+memory://")
    has_begun, may_end = threading.Event(), threading.Event()

    @app.task(name="shop.slow")  # type: ignore[untyped-decorator]
    def slow(attempt: int) -> int:
        if attempt == 1:
            has_begun.set()
            assert may_end.wait(60)
        return 1 // (attempt - 1)

    first = threading.Thread(target=slow.apply, kwargs={"args": [1], "task_id": "one"})
    first.start()
    assert has_begun.wait(60)
    slow.apply(args=[2], task_id="one")
    may_end.set()
    first.join()
    attempts = requests_of(session, "shop.slow")
    assert [attempt.error for attempt in attempts] == ["ZeroDivisionError", None]
    assert attempts[0].end_ns > attempts[1].end_ns


def resize(size: int) -> int:
    return 1 // size


def test_a_job_of_rq_is_a_request(session: Session) -> None:
    rq, fakeredis = pytest.importorskip("rq"), pytest.importorskip("fakeredis")
    connection = fakeredis.FakeStrictRedis()
    queue = rq.Queue("images", connection=connection)
    queue.enqueue(resize, 1, meta={"traceparent": TRACEPARENT})
    queue.enqueue(resize, 0)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    rq.SimpleWorker([queue], connection=connection).work(burst=True)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    done, failed = requests_of(session, "resize")
    assert (trace_of(done), done.error, failed.error) == (TRACE, None, "ZeroDivisionError")
    assert 0 <= float(str(done.attributes[TIME_IN_QUEUE])) < 600
    assert dict(done.site.attributes)["messaging.destination.name"] == "images"
    meter = Meter(RECORDER, 0)
    meter.count_requests(rows_in())
    snapshot = meter.snapshot(requests=False, losses={}, costs_ns={}, queued={})
    (metric,) = (metric for metric in snapshot.metrics if metric.name == QUEUE_TIME.name)
    assert sorted(dict(labels).get("error.type", "") for labels in metric.series) == ["", "ZeroDivisionError"]


def test_a_message_of_dramatiq_is_a_request(session: Session) -> None:
    dramatiq = pytest.importorskip("dramatiq")
    from dramatiq.brokers.stub import StubBroker

    broker = StubBroker(middleware=[])
    actor = dramatiq.actor(resize, actor_name="shop_resize", broker=broker, queue_name="images")
    broker.enqueue(actor.message_with_options(args=(1,), traceparent=TRACEPARENT))
    broker.enqueue(actor.message(0))
    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=1)
    worker.start()
    try:
        broker.join("images", fail_fast=False)
        worker.join()
    finally:
        worker.stop()
    done, failed = requests_of(session, "shop_resize")
    assert (trace_of(done), done.error, failed.error) == (TRACE, None, "ZeroDivisionError")
    assert 0 <= float(str(done.attributes[TIME_IN_QUEUE])) < 600


@pytest.fixture
def redis_port() -> Iterator[int]:
    fakeredis = pytest.importorskip("fakeredis")
    server = fakeredis.TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


async def resize_async(context: Any, size: int, traceparent: str = "") -> int:
    with instrument.scope("decode"):
        await asyncio.sleep(0)
    return 1 // size


def is_a_job(done: Span, failed: Span, *, system: str, queue: str, has_wait: bool = True) -> None:
    assert (trace_of(done), done.error, trace_of(failed), failed.error) == (TRACE, None, "", "ZeroDivisionError")
    facts = dict(done.site.attributes)
    assert (facts["messaging.system"], facts["messaging.destination.name"]) == (system, queue)
    assert (TIME_IN_QUEUE in done.attributes) is has_wait
    assert 0 <= float(str(done.attributes.get(TIME_IN_QUEUE, 0))) < 600


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # arq closes connections by an older name
def test_a_job_of_arq_is_a_request(session: Session, redis_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    worker_of_arq = pytest.importorskip("arq.worker")
    from arq import Retry, create_pool
    from arq.connections import RedisSettings

    async def log_nothing(*_: Any) -> None:
        """Replace a log of what the server is: the fake one does not know."""

    monkeypatch.setattr(worker_of_arq, "log_redis_info", log_nothing)

    async def try_again(context: Any) -> None:
        if context["job_try"] == 1:
            raise Retry

    async def run() -> None:
        settings = RedisSettings(port=redis_port)
        pool = await create_pool(settings, default_queue_name="images")
        await pool.enqueue_job("resize_async", 1, traceparent=TRACEPARENT)
        await pool.enqueue_job("resize_async", 0)
        await pool.enqueue_job("again")
        worker = worker_of_arq.Worker(
            [resize_async, worker_of_arq.func(try_again, name="again")],
            redis_settings=settings, queue_name="images", burst=True, poll_delay=0, handle_signals=False,
        )  # fmt: skip
        await worker.async_run()
        assert (worker.jobs_complete, worker.jobs_failed, worker.jobs_retried) == (2, 1, 1)
        await worker.close()
        await pool.aclose()

    asyncio.run(run())
    done, failed = requests_of(session, "resize_async")
    is_a_job(done, failed, system="arq", queue="images")
    assert [span.error for span in requests_of(session, "again")] == [None, None]
    (inner,) = [span for span in session.trace().spans if span.parent_id == done.span_id]
    assert inner.site.name == "decode"


@pytest.mark.parametrize("is_async", [True, False])
def test_a_task_of_taskiq_is_a_request(session: Session, is_async: bool) -> None:
    taskiq = pytest.importorskip("taskiq")
    broker = taskiq.InMemoryBroker(await_inplace=True)
    task = broker.register_task(resize_async if is_async else resize, task_name="shop:resize")

    async def run() -> None:
        arguments = (None,) if is_async else ()
        await broker.startup()
        await task.kicker().with_labels(traceparent=TRACEPARENT).kiq(*arguments, 1)
        await task.kiq(*arguments, 0)
        await broker.shutdown()

    asyncio.run(run())
    done, failed = requests_of(session, "shop:resize")
    is_a_job(done, failed, system="taskiq", queue="", has_wait=False)


def test_a_message_of_faststream_is_a_request(session: Session, redis_port: int) -> None:
    pytest.importorskip("faststream.redis")
    from faststream.exceptions import RejectMessage
    from faststream.redis import RedisBroker, StreamSub

    broker, ended = RedisBroker(f"redis://127.0.0.1:{redis_port}", logger=None), list[str]()
    is_over = asyncio.Event()

    @broker.subscriber(stream=StreamSub("images", last_id="0"))  # type: ignore[untyped-decorator]
    async def shop_resize(size: int) -> int:
        ended.append("resize")
        return 1 // size

    @broker.subscriber("words")  # type: ignore[untyped-decorator]
    async def refuse(word: str) -> None:
        is_over.set()
        raise RejectMessage

    async def run() -> None:
        await broker.connect()
        await broker.publish(1, stream="images", headers={"traceparent": TRACEPARENT})
        await broker.publish(0, stream="images")
        await broker.start()
        while len(ended) < 2:
            await asyncio.sleep(0.01)
        await broker.publish("no", "words")
        await is_over.wait()
        await broker.stop()

    asyncio.run(run())
    done, failed = requests_of(session, "shop_resize")
    is_a_job(done, failed, system="faststream", queue="images")
    (refused,) = requests_of(session, "refuse")
    assert refused.error is None


JANUARY_S = 1767225600.0
JANUARY = datetime.fromtimestamp(JANUARY_S, tz=timezone.utc)


@pytest.mark.parametrize(
    ("message", "place"),
    [
        (SimpleNamespace(topic="images", timestamp=1767225600000), "images"),  # of Kafka
        ((SimpleNamespace(topic="images", timestamp=1767225600000),), "images"),  # a batch
        (SimpleNamespace(topic=lambda: "images", timestamp=lambda: (1, 1767225600000)), "images"),  # of Confluent
        (SimpleNamespace(routing_key="images", timestamp=JANUARY), "images"),  # of RabbitMQ
        (SimpleNamespace(subject="images", metadata=SimpleNamespace(timestamp=JANUARY)), "images"),  # of NATS
        ({"channel": "images", "message_ids": [b"1767225600000-1"]}, "images"),  # of Redis
        (SimpleNamespace(routing_key="images", timestamp=None), "images"),
        ({"channel": "images"}, "images"),
        (b"", ""),
    ],
)
def test_brokers_of_faststream_report_place_and_time(message: Any, place: str) -> None:
    found, queued_s = queue_jobs._read_queue_and_time(message)
    assert found == place
    assert queued_s in (JANUARY_S, None)
    has_time = "17672256" in str(message) or "2026" in str(message) or "lambda" in str(message)
    assert (queued_s is not None) is has_time


SHOP = """
import os
from celery import Celery

folder = os.environ["SHOP"]
places = {"data_folder_in": folder, "data_folder_out": folder, "control_folder": folder}
app = Celery("shop", broker="filesystem://", broker_transport_options=places, result_backend="cache+memory://")
app.conf.update(task_acks_late=True, worker_enable_remote_control=False, task_default_queue="images")

def note_end(task):
    open(os.path.join(folder, task.request.id + ".ended"), "w").close()

@app.task(name="shop.resize", bind=True)
def resize(self, size):
    note_end(self)
    return 1 // size

@app.task(name="shop.again", bind=True)
def again(self):
    if self.request.retries == 0:
        raise self.retry(countdown=0)
    note_end(self)
"""


@pytest.mark.slow
@pytest.mark.parametrize("pool", [["prefork", "--max-tasks-per-child", "2"], ["threads"]])
def test_tasks_of_a_worker_of_celery_are_requests_in_their_callers_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: list[str]
) -> None:
    pytest.importorskip("celery")
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "profile.yaml").write_text(
        "requests: auto\ncapture: {sample: 1.0}\nexport: {recording: {path: 'traces/{pid}-{window}.npz'}}"
    )
    (tmp_path / "queue").mkdir()
    monkeypatch.setenv("SHOP", str(tmp_path / "queue"))
    monkeypatch.syspath_prepend(tmp_path)
    shop = importlib.import_module("shop")
    for size in (1, 1, 1, 1, 0):
        shop.resize.apply_async(args=[size], headers={"traceparent": TRACEPARENT})
    shop.again.apply_async(headers={"traceparent": TRACEPARENT})
    del sys.modules["shop"]
    command = [sys.executable, "-m", "instrument", "run", "--profile", "profile.yaml", "--", "-m", "celery"]
    command += ["-A", "shop", "worker", "-c", "2", "-P", *pool]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log) as worker,
    ):
        try:
            while len([*(tmp_path / "queue").glob("*.ended")]) < 6 and worker.poll() is None:
                time.sleep(0.05)
            worker.terminate()
            assert worker.wait(240) == 0
        finally:
            worker.kill()
    output = (tmp_path / "log").read_text()
    assert "exit code 155" not in output  # the end of a recycled child; a new one may be killed as the pool ends
    traces = [file.load(path).trace for path in sorted((tmp_path / "traces").glob("*.npz"))]
    jobs = [span for trace in traces for span in make_spans(trace.columns) if span.site.kind == "request"]
    assert {trace_of(span) for span in jobs} == {TRACE}
    errors = sorted((span.site.name, span.error or "") for span in jobs)
    assert errors == [
        ("shop.again", ""), ("shop.again", ""), *[("shop.resize", "")] * 4, ("shop.resize", "ZeroDivisionError"),
    ]  # fmt: skip
    if pool[0] == "prefork":
        assert len(traces) >= 3


def test_a_scope_goes_on_in_the_trace_of_a_carrier(session: Session) -> None:
    for carrier in ({"Traceparent": TRACEPARENT}, {"traceparent": "broken"}, None):
        with instrument.scope("shop.job", kind="request", carrier=carrier):
            pass
    assert list(map(trace_of, requests_of(session, "shop.job"))) == [TRACE, "", ""]


def test_carriers_of_tasks_and_threads_at_once_stay_apart(session: Session) -> None:
    def carrier(number: int) -> dict[str, str]:
        return {"traceparent": f"00-{number:032x}-00f067aa0ba902b7-01"}

    async def serve(number: int) -> None:
        with instrument.scope("shop.task", kind="request", carrier=carrier(number)):
            await asyncio.sleep(0)
            assert trace_now() == number

    def trace_now() -> int:
        headers: dict[str, str] = {}
        instrument.inject(headers)
        return int(headers["traceparent"].split("-")[1], 16)

    async def serve_all() -> None:
        with instrument.scope("shop.outer"):
            await asyncio.gather(*(asyncio.create_task(serve(number)) for number in (1, 2, 3)))

    def in_thread(number: int) -> None:
        with instrument.scope("shop.thread", kind="request", carrier=carrier(number)):
            assert trace_now() == number

    asyncio.run(serve_all())
    threads = [threading.Thread(target=in_thread, args=(number,)) for number in (4, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    traces = {trace_of(span) for name in ("task", "thread") for span in requests_of(session, f"shop.{name}")}
    assert traces == {f"{number:032x}" for number in (1, 2, 3, 4, 5)}
