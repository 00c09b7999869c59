"""Requests of the demonstration, 8 at a time, compared with the demonstration's own log: their trees, and their parts.

The engine is a thread of the server's process, or a process of its own.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from otlp_collectors import Collector, collecting, take
from real_servers import Served, await_agent, with_report
from sent_spans import SentSpan, converted, sent_to, trees
from server_programs import serving
from service_log import BATCHES, LoggedRequest, parts_of, read_log
from trees import queue_times

from instrument.recorder.recorder import MOST_DEVIATION_NS
from instrument.trace.columns import Columns
from instrument.trace.joined import Joined, join_requests
from instrument.trace.ledger import compute_ledger

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

REQUESTS, AT_ONCE, LIMIT_S = 80, 8, 200
TOLERANCE = 0.01
CLOCK_NS = MOST_DEVIATION_NS
"""The maximum number of ns that the recording's clock may be from that of the log: its time stamp counter is used."""

SPANS = {
    "read_body": ("read_body",),
    "read_ask": ("read_ask",),
    "accept": ("Engine.accept",),
    "stream_tokens": ("generate",),
    "wait_for_turn": ("queue",),
    "first_token": ("prefill",),
    "decode_text": ("decode", "decode_next"),
}
"""By its name in the log the spans of each phase."""

COMMAND = ["-m", "chat.server", "--port", "{port}"]
ENVIRON = {"PYTHONPATH": str(EXAMPLES)}

pytestmark = pytest.mark.slow


def ask_all(port: int) -> list[str]:
    """The answers to all requests, three of four of which are streamed."""
    for name in ("torch", "httpx", "starlette", "uvicorn"):
        pytest.importorskip(name)
    from chat.load import run

    answers = asyncio.run(run(f"http://127.0.0.1:{port}", REQUESTS, AT_ONCE, LIMIT_S))
    assert [answer.error for answer in answers] == [""] * REQUESTS
    return [answer.body for answer in answers]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The answers of the service by itself."""
    with serving(COMMAND, tmp_path_factory.mktemp("bare"), ENVIRON, ours=False) as (port, _):
        return ask_all(port)


def profile_of(collector: Collector, agent: str) -> str:
    """Return the demonstration's profile with recordings, and with an export of everything to a collector."""
    document = yaml.safe_load((EXAMPLES.parent / "configs" / "chat.yaml").read_text())
    document["agent"] = agent
    recording = {"path": "traces/{service}-{pid}-{window}.npz"}
    otlp = {"endpoint": f"http://127.0.0.1:{collector.server_port}"}
    document["export"] = {"recording": recording, "otlp": otlp, "summary": {"to": "stderr"}}
    return str(yaml.safe_dump(document))


def assert_one_tree_each(spans: Sequence[SentSpan], log: dict[str, LoggedRequest]) -> None:
    """Every request is a trace of one tree, no span is there twice or below nothing, and batches have their links."""
    requests = [
        Counter(one.name for one in its) for its in trees(spans, "") if "POST /generate" in {one.name for one in its}
    ]
    assert len(requests) == REQUESTS
    for its in requests:
        assert {its[name] for name in ("POST /generate", "Engine.accept", "generate")} == {1}
    batches = {id(batch): batch for one in log.values() for batch in one.batches}.values()
    for what in ("prefill", "decode"):
        of_batches = [one.links for one in spans if one.name == f"Engine.{what}"]
        assert sorted(of_batches) == sorted(len(batch.ids) for batch in batches if batch.what == what)


def assert_queues_told(collector: Collector, served: Served) -> None:
    """Assert that the metric of times in the queue has every request, with the time of the recordings."""
    told = [metric for metric in collector.metrics if metric.name == "instrument.request.queue.duration"]
    last = told[-1].exponential_histogram.data_points  # of all series together: of the process that takes requests
    found = queue_times(served.trace, served.joined)
    assert (sum(point.count for point in last), len(found)) == (REQUESTS, REQUESTS)
    assert sum(point.sum for point in last) == pytest.approx(sum(found.values()) / 1e9)


def differing(trace: Columns, log: Mapping[str, LoggedRequest]) -> dict[str, str]:
    """Requests that were not what the log says, with what is wrong.

    The log has for each begin and each end a time before and one after it, mostly some microseconds apart, but
    milliseconds where the machine takes the processor away just there. Between these every time of the recording must
    lie; and with such times, all within what the log knows, the parts must be those that the log gives.
    """
    joined = join_requests(trace)
    found, differ = compute_ledger(trace, joined), {}
    for place, (name,) in joined.keys.items():
        logged, ours = log[name], found.times_of_request(place)
        its = [logged.whole, *logged.work, *logged.batches]
        spans = spans_of(trace, joined, place)
        if {what: len(rows) for what, rows in spans.items() if rows} != Counter(one.what for one in its):
            differ[name] = f"{ {what: len(rows) for what, rows in spans.items()} } spans"
            continue
        taken = {what: iter(rows) for what, rows in spans.items()}
        rows = [next(taken[one.what]) for one in its]
        times = [(int(trace.start_ns[row]), int(trace.end_ns[row])) for row in rows]
        apart = [one for one, its_time in zip(its, times, strict=True) if not one.can_be(*its_time, CLOCK_NS)]
        whole, *done = (one.at(*its_time) for one, its_time in zip(its, times, strict=True))
        timed = LoggedRequest(whole, done[: len(logged.work)], done[len(logged.work) :])
        if apart:
            differ[name] = f"not within the times of the log: {apart}"
        elif not is_near(ours, timed):
            differ[name] = f"{timed.wall} ns: {ours}, by the log {parts_of(timed)}"
    return differ


def is_near(ours: Mapping[str, int], logged: LoggedRequest) -> bool:
    """Return True if all parts are those of a logged request, within `TOLERANCE` of its wall."""
    theirs = parts_of(logged)
    return max(abs(ours.get(part, 0) - theirs[part]) for part in ours.keys() | theirs.keys()) <= TOLERANCE * logged.wall


def spans_of(trace: Columns, joined: Joined, place: int) -> dict[str, list[int]]:
    """The spans of a request that the log knows, by their names there and in the order of their begin."""
    rows = np.flatnonzero(joined.of == place)
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    by_name: dict[str, list[int]] = {}
    for row in rows.tolist():
        by_name.setdefault(trace.sites[trace.site[row]].name, []).append(row)
    served = np.unique(joined.served.batch[joined.served.request == place])
    for row in served[np.argsort(trace.start_ns[served], kind="stable")].tolist():
        by_name.setdefault(trace.sites[trace.site[row]].name, []).append(row)
    found = {what: [row for name in names for row in by_name.get(name, ())] for what, names in SPANS.items()}
    return found | {
        "/generate": [int(joined.rows[place])],
        **{what: by_name.get(f"Engine.{what}", []) for what in BATCHES},
    }


def with_fault(served: Served, log: Mapping[str, LoggedRequest], what: str) -> tuple[set[str], Columns]:
    """The trace with a fault: of what was done one ended later than the log's times allow. And the requests of it."""
    done = [done for one in log.values() for done in (one.whole, *one.work, *one.batches)]
    trace, joined = served.trace, served.joined
    ends = trace.end_ns.copy()
    place = 0
    row = spans_of(trace, joined, place)[what][0]
    ends[row] += max(last - first for first, last in (one.ended for one in done)) + 2 * CLOCK_NS
    its = {place, *joined.served.request[joined.served.batch == row].tolist()}
    return {name for one in its for name in joined.keys[one]}, replace(trace, end_ns=ends)


@pytest.mark.parametrize(
    ("engine", "agent"),
    [([], "auto"), (["--engine-process"], "auto"), ([], "off")],
    ids=["thread", "process", "thread without an agent"],
)
def test_each_request_is_one_tree_whose_parts_are_those_of_the_services_own_log(
    engine: list[str], agent: str, expected: list[str], tmp_path: Path
) -> None:
    with collecting(take) as collector:
        (tmp_path / "profile.yaml").write_text(profile_of(collector, agent))
        environ = {**ENVIRON, "CHAT_DEBUG_LOG": str(tmp_path / "service.log")}
        with serving([*COMMAND, *engine], tmp_path, environ, ours=True) as (port, _):
            assert ask_all(port) == expected
        served = Served(tmp_path, with_report(tmp_path / "log"))
        await_agent(tmp_path / "traces")
        log = read_log(tmp_path / "service.log")
        assert (len(log), len(served.joined.rows), served.joined.unbound) == (REQUESTS, REQUESTS, 0)
        assert_one_tree_each(sent_to(collector), log)
        assert_queues_told(collector, served)
    assert_one_tree_each(converted(tmp_path / "traces"), log)
    assert not differing(served.trace, log)
    for what in ("/generate", *SPANS, *BATCHES):
        names, fault = with_fault(served, log, what)
        assert set(differing(fault, log)) == names, what
