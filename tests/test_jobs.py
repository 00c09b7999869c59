"""Jobs of queues are requests: named by their tasks, in their callers' traces, with their wait in the queue."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

import instrument
from instrument.instrumentors.requests.queue_jobs import TIME_IN_QUEUE
from instrument.profile.keys import loads
from instrument.recording.spans import Span
from instrument.sessions.session import Session

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


def test_a_scope_goes_on_in_the_trace_of_a_carrier(session: Session) -> None:
    for carrier in ({"Traceparent": TRACEPARENT}, {"traceparent": "broken"}, None):
        with instrument.scope("shop.job", kind="request", carrier=carrier):
            pass
    assert list(map(trace_of, requests_of(session, "shop.job"))) == [TRACE, "", ""]
