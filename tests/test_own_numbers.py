"""Numbers of the service's own: gauges, counters and histograms, set in code or read at calls by rules."""

from __future__ import annotations

import copy
import json
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from otlp_collectors import collecting, take
from otlp_receiver import free_port, read_until

import instrument
from instrument.instrumentors.request_keys import make_call_reader
from instrument.profile.keys import loads
from instrument.recorder import api as numbers
from instrument.recorder.recorder import RECORDER
from instrument.recording.distributions import bucket_middle
from instrument.recording.mapped import read_service_metrics
from instrument.recording.memory_layout import NUMBER
from instrument.recording.metric_definitions import LARGEST_MIDDLE, make_metrics, make_samples
from instrument.runtime.faults import FAULTS


@pytest.fixture
def session() -> Iterator[None]:
    """A session that records."""
    instrument.start(loads("agent: off"))
    yield
    instrument.stop()
    FAULTS.clear()


def newest() -> dict[str, float]:
    """The newest values by the names on timelines."""
    return {
        sample.name: sample.value
        for sample in make_samples(*read_service_metrics(RECORDER.make_reader()))
        if sample.value is not None
    }


def test_numbers_have_their_newest_value_and_begin_anew_with_a_session(session: None) -> None:
    usage, hits, sizes = instrument.gauge("t.usage"), instrument.counter("t.hits", "{hit}"), instrument.histogram("t.n")
    assert usage is instrument.gauge("t.usage")
    for value in (0.25, 0.5, 0.75):
        usage.set(value)
        hits.add(2)
        sizes.record(value * 100)
    assert newest() == {"t.usage": 0.75, "t.hits": 6, "t.n.sum": 150}
    counted, distribution = make_metrics(read_service_metrics(RECORDER.make_reader())[1])
    assert (counted.name, counted.unit, counted.kind, counted.series) == ("t.hits", "{hit}", "counter", {(): 6})
    (values,) = distribution.series.values()
    assert (values.count, values.sum_ns) == (3, 150 * 10**9)
    instrument.stop()
    usage.set(1)
    instrument.start(loads("agent: off"))
    assert newest() == {}
    hits.add()
    assert newest() == {"t.hits": 1}


class Broken:
    """An object that raises as it is converted."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __float__(self) -> float:
        raise self.error


def test_a_value_that_is_no_number_is_counted_and_harms_nothing(session: None) -> None:
    usage, hits, sizes = instrument.gauge("t.usage"), instrument.counter("t.hits"), instrument.histogram("t.n")
    refused: list[object] = ["full", None, float("nan"), float("inf"), 10**400, Broken(ValueError())]
    for value in refused:
        for put in (usage.set, hits.add, sizes.record):
            put(value)  # type: ignore[arg-type]
    hits.add(-1)
    hits.set(1)  # of a gauge
    instrument.gauge("t" * 200).set(1)
    assert newest() == {}
    assert RECORDER.count_unusual_events()[numbers.REFUSED] == 3 * len(refused) + 3
    with pytest.raises(KeyboardInterrupt):
        usage.set(Broken(KeyboardInterrupt()))
    usage.set(True)
    sizes.record(-2)
    hits.add(0)
    assert newest() == {"t.usage": 1, "t.n.sum": 0, "t.hits": 0}


@given(st.lists(st.floats(0, 1e300) | st.integers(-5, 10**9), min_size=1, max_size=30))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_histogram_has_each_value_within_an_eighth(session: None, values: list[float]) -> None:
    RECORDER.begin_recording(1 << 20, {})
    for value in values:
        instrument.histogram("t.n").record(value)
    (metric,) = make_metrics(read_service_metrics(RECORDER.make_reader())[1])
    (distribution,) = metric.series.values()
    middles = sorted(
        bucket_middle(bucket) / 10**9 for bucket, count in distribution.buckets.items() for _ in range(count)
    )
    expected = sorted(min(max(value, 0), LARGEST_MIDDLE) for value in values)
    assert middles == pytest.approx(expected, rel=0.14, abs=2e-9)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("--5", 1.0), ("99999999", 1.0), ("nothing", 1.0), ("5", -1.0), ("5", 1e300), ("sum", -1e308), ("counter", -1.0)],
)
def test_a_damaged_cell_is_left_out_and_the_others_are_reported(session: None, kind: str, value: float) -> None:
    instrument.histogram("t.n", "").record(3)
    instrument.gauge("t.x", "").set(1)
    fd = RECORDER.memory_fd
    at = os.pread(fd, os.fstat(fd).st_size, 0).rindex(b"t.x\n\ngauge")  # the newest values follow the timelines
    os.pwrite(fd, f"t.n\n\n{kind}".encode().ljust(32, b"\0"), at)
    os.pwrite(fd, struct.pack("d", value), at - NUMBER.fields["name"][0] + NUMBER.fields["value"][0])
    (metric,) = make_metrics(read_service_metrics(RECORDER.make_reader())[1])
    (values,) = metric.series.values()
    assert (metric.name, values.count, values.sum_ns) == ("t.n", 1, 3 * 10**9)


def test_numbers_beyond_the_room_are_counted_and_those_within_go_on(session: None) -> None:
    most = 1_024
    for number in range(most + 2):
        instrument.gauge(f"t.{number}").set(number)
    instrument.gauge("t.0").set(7)
    assert len(newest()) == most
    assert newest()["t.0"] == 7
    assert RECORDER.count_unusual_events()[numbers.REFUSED] == 2


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda number: pickle.loads(pickle.dumps(number))])
def test_a_copy_of_a_number_is_the_number(copied: Callable[[object], object]) -> None:
    for number in (instrument.gauge("a"), instrument.counter("a", "By"), instrument.histogram("a", "s")):
        assert copied(number) is number


def test_a_forked_child_counts_from_zero_in_its_own_recording(session: None) -> None:
    hits = instrument.counter("t.hits")
    hits.add(5)
    child = os.fork()
    if child == 0:
        hits.add(2)
        os._exit(newest() != {"t.hits": 2})
    hits.add(1)
    assert os.waitpid(child, 0)[1] == 0
    assert newest() == {"t.hits": 6}


def test_a_gauge_by_rule_is_read_at_most_once_in_its_interval(session: None) -> None:
    read = []

    class Cache:
        @property
        def usage(self) -> float:
            read.append(1)
            return 0.5

        def step(self, items: list[int]) -> SimpleNamespace:
            return SimpleNamespace(hits=len(items), stats=None)

    rule = "{argument: self.usage, name: r.usage, every: 1h}, {argument: items, record: size, name: r.items}"
    rule += ", {argument: return.hits, name: r.hits, kind: counter}, {argument: return.stats.n, name: r.none}"
    (parsed,) = loads(f'functions: [{{match: "m:f", gauges: [{rule}]}}]').functions
    reader = make_call_reader(Cache.step, parsed)
    assert reader.missing == []
    assert reader.of_call is not None
    assert reader.of_result is not None
    for _ in range(3):
        cache, items = Cache(), [1, 2]
        reader.of_call((cache, items), {})
        reader.of_result(cache.step(items))
    assert newest() == {"r.usage": 0.5, "r.items": 2, "r.hits": 6}
    assert len(read) == 1


SERVICE = """
import instrument, time, urllib.request

def step(cache):
    instrument.counter("cache.hits", "{hit}").add(3)
    instrument.histogram("prompt.tokens").record(17)

for _ in range(5):
    step({"usage": 0.5})
text, end = b"", time.monotonic() + 240
while b"prompt_tokens_ratio_count 5.0" not in text and time.monotonic() < end:
    try:
        with urllib.request.urlopen("http://127.0.0.1:PORT/metrics") as answer:
            text = answer.read()
    except OSError:
        time.sleep(0.05)  # nobody listens yet
open("scraped", "wb").write(text)
"""

PROFILE = """
service: shop
functions:
  - {match: "__main__:step", kind: request, gauges: {argument: cache.usage, name: cache.usage}}
export:
  recording: {path: "traces/{service}.npz"}
  otlp: {endpoint: "http://127.0.0.1:%d"}
  prometheus: {listen: "127.0.0.1:%d"}
"""


def test_numbers_are_in_files_on_timelines_and_at_collectors(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "service.py").write_text(SERVICE.replace("PORT", str(port)))
    command = [sys.executable, "-m", "instrument"]
    with collecting(take) as collector:
        (tmp_path / "profile.yaml").write_text(PROFILE % (collector.server_port, port))
        run = [*command, "run", "--profile", "profile.yaml", "--", "service.py"]
        subprocess.run(run, cwd=tmp_path, check=True, timeout=240, capture_output=True)
        sent = read_until(
            lambda: {metric.name: metric for metric in collector.metrics},
            lambda sent: {"cache.usage", "cache.hits", "prompt.tokens"} <= sent.keys(),
        )
    assert [point.as_double for point in sent["cache.usage"].gauge.data_points] == [0.5]
    assert sent["cache.hits"].sum.data_points[-1].as_double == 15
    (tokens,) = sent["prompt.tokens"].exponential_histogram.data_points
    assert (tokens.count, tokens.sum) == (5, 85)
    scraped = (tmp_path / "scraped").read_text()
    assert "cache_hits_total 15.0" in scraped
    assert "prompt_tokens_ratio_count 5.0" in scraped
    assert "cache_usage_ratio" in scraped
    convert = [*command, "convert", "traces/shop.npz", "--to", "chrome", "-o", "trace.json"]
    subprocess.run(convert, cwd=tmp_path, check=True, timeout=240, capture_output=True)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {event["name"]: event["args"] for event in events if event["ph"] == "C"}
    assert any("cache.usage" in name for name in tracks)
    assert any("cache.hits" in name for name in tracks)
