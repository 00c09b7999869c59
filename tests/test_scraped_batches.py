"""`instrument.prometheus()` has time in the queue and sizes of batches as a collector gets them."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from otlp_collectors import collecting, take
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import instrument
from instrument.profile.keys import loads
from instrument.trace import settling

IN_QUEUE, OF_REQUESTS, OF_BATCHES = (
    "instrument_request_queue_duration_seconds", "instrument_request_batch_size", "instrument_batch_size",
)  # fmt: skip
PROFILE = """
functions: [{match: "nowhere:step", batch: ids}]
"""


@pytest.fixture(autouse=True)
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(settling, "DECISION_WAIT_NS", 0)
    yield
    instrument.stop()


def serve(pairs: int) -> None:
    """Requests of two models, one of each in every batch."""

    def chat(key: str, model: str, asked: threading.Barrier, done: threading.Event) -> None:
        with instrument.scope("chat", kind="request"):
            instrument.annotate_request({"gen_ai.request.model": model})
            with instrument.scope("submit", key=key):  # only the spans of the request say so
                pass
            asked.wait(60)
            done.wait(60)

    with ThreadPoolExecutor(2) as pool:
        for pair in range(pairs):
            keys = [f"{pair}-{model}" for model in ("small", "large")]
            asked, done = threading.Barrier(3), threading.Event()
            for key in keys:
                pool.submit(chat, key, key.partition("-")[2], asked, done)
            asked.wait(60)
            time.sleep(0.002)
            with instrument.scope("step", batch=keys):
                time.sleep(0.001)
            done.set()


def counts(samples: list[Any]) -> dict[str, float]:
    return {sample.labels["gen_ai_request_model"]: sample.value for sample in samples}


def scraped(ending: str) -> dict[str, list[Any]]:
    """The samples whose names end so, by what comes before."""
    found = defaultdict(list)
    for family in text_string_to_metric_families(instrument.prometheus(openmetrics=True)):
        for sample in family.samples:
            if sample.name.endswith(ending):
                found[sample.name.removesuffix(ending)].append(sample)
    return found


def awaited(requests: int) -> dict[str, list[Any]]:
    """Return the samples of a scrape once it counts that number of requests."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = scraped("_count")
        if sum(sample.value for sample in found[IN_QUEUE]) >= requests:
            return found
        time.sleep(0.05)
    raise AssertionError(found)


def test_a_scrape_of_a_service_that_exports_nothing_reports_time_in_the_queue_and_sizes_of_batches() -> None:
    instrument.start(loads(PROFILE, environ={}))
    serve(2)
    found = awaited(4)
    assert counts(found[IN_QUEUE]) == counts(found[OF_REQUESTS]) == {"small": 2, "large": 2}
    assert sum(sample.value for sample in found[OF_BATCHES]) == 2
    assert sum(sample.value for sample in scraped("_sum")[OF_REQUESTS]) == 8
    waited_s = sum(sample.value for sample in scraped("_sum")[IN_QUEUE])
    assert 4 * 0.002 <= waited_s < 60
    serve(3)
    assert counts(awaited(10)[IN_QUEUE]) == {"small": 5, "large": 5}
    assert "span_id" not in instrument.prometheus(openmetrics=True)  # of traces that go nowhere


def test_a_scrape_reports_the_same_as_the_collector_gets_with_exemplars_of_what_is_kept() -> None:
    with collecting(take) as server:
        instrument.start(
            loads(PROFILE + f"export: {{otlp: {{endpoint: 'http://127.0.0.1:{server.server_port}'}}}}", environ={})
        )
        serve(2)
        found = awaited(4)
        assert instrument.flush(60).settled
        for told, name in (
            (IN_QUEUE, "instrument.request.queue.duration"),
            (OF_REQUESTS, "instrument.request.batch.size"),
        ):
            (*_, metric) = [one for one in server.metrics if one.name == name]
            points = metric.exponential_histogram.data_points
            sent = {
                attribute.value.string_value: point.count
                for point in points
                for attribute in point.attributes
                if attribute.key == "gen_ai.request.model"
            }
            assert counts(found[told]) == sent == {"small": 2, "large": 2}
            sums = sum(sample.value for sample in scraped("_sum")[told])
            assert sums == pytest.approx(sum(point.sum for point in points), abs=1e-8)
        exemplars = [sample.exemplar for sample in scraped("_bucket")[IN_QUEUE] if sample.exemplar]
        kept = {span.span_id.hex() for its in server.spans.values() for span in its}
        assert exemplars
        assert {one.labels["span_id"] for one in exemplars} <= kept
        instrument.stop()
