"""Requests of the demonstration, 8 at a time, held against what its own log says of each: their trees, and their parts.

The engine is a thread of the server's process, or a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from otlp_collectors import Collector, collecting, take
from real_servers import CONFIGS, Served, with_report
from server_programs import serving
from service_log import LoggedRequest, parts_of, read_log

from instrument.trace.columns import Int64s
from instrument.trace.ledger import ledger

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

REQUESTS, AT_ONCE, LIMIT_S = 200, 8, 200
TOLERANCE = 0.01
SPANS = {"accept": "Engine.accept", "stream_tokens": "generate", "wait_for_turn": "queue", "first_token": "prefill"}
"""By its name in the log each phase that a request has once, and its span."""

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


def profile_of(collector: Collector) -> str:
    """That of the demonstration, with recordings, and with everything sent to a collector."""
    document = yaml.safe_load((CONFIGS / "chat.yaml").read_text())
    recording = {"path": "traces/{service}-{pid}-{window}.npz"}
    otlp = {"endpoint": f"http://127.0.0.1:{collector.server_port}"}
    document["export"] = {"recording": recording, "otlp": otlp, "summary": {"to": "stderr"}}
    return str(yaml.safe_dump(document))


Sent = tuple[str, str, str, str, int]
"""Of a span at a collector its trace, its id, that of its parent, its name, and how many links it has."""


def sent_to(collector: Collector) -> list[Sent]:
    """All spans that a collector has."""
    return [
        (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.name, len(span.links))
        for spans in collector.spans.values()
        for span in spans
    ]


def converted(served: Served) -> list[Sent]:
    """What `instrument convert` makes of the recordings of all processes."""
    path = served.folder / "spans.jsonl"
    command = [sys.executable, "-m", "instrument", "convert", str(served.folder / "traces"), "--to", "otlp"]
    subprocess.run([*command, "-o", str(path)], capture_output=True, timeout=120, check=True)
    return [
        (span["traceId"], span["spanId"], span.get("parentSpanId", ""), span["name"], len(span.get("links", ())))
        for line in path.read_text().splitlines()
        for of_resource in json.loads(line)["resourceSpans"]
        for of_scope in of_resource["scopeSpans"]
        for span in of_scope["spans"]
    ]


def assert_one_tree_each(spans: Sequence[Sent], log: dict[str, LoggedRequest]) -> None:
    """Every request is a trace of one tree, no span is there twice or below nothing, and batches have their links."""
    ids = Counter((trace, span) for trace, span, *_ in spans)
    assert max(ids.values()) == 1
    assert not [one for one in spans if one[2] and (one[0], one[2]) not in ids]
    names: dict[str, Counter[str]] = {}
    roots = Counter[str]()
    for trace, _, parent, name, _ in spans:
        names.setdefault(trace, Counter())[name] += 1
        roots[trace] += not parent
    assert set(roots.values()) == {1}
    requests = [its for its in names.values() if "POST /generate" in its]
    assert len(requests) == REQUESTS
    for its in requests:
        assert {its[name] for name in ("POST /generate", "Engine.accept", "generate")} == {1}
    batches = {id(batch): batch for one in log.values() for batch in one.batches}.values()
    for what in ("prefill", "decode"):
        of_batches = [links for *_, name, links in spans if name == f"Engine.{what}"]
        assert sorted(of_batches) == sorted(len(batch.ids) for batch in batches if batch.what == what)


def differing(served: Served, log: dict[str, LoggedRequest]) -> dict[str, str]:
    """Requests of which parts are not, within `TOLERANCE` of its wall, what the log says; with what they are.

    The log and the recording read the clock some microseconds apart, before a call and after it. Just there the machine
    may take the processor away, or something else may begin. So where the log's own times say something else,
    the parts must be those that the recording's times of the same calls give.
    """
    found = ledger(served.trace, served.joined)
    differ, retimed = {}, []
    for place, (name,) in served.joined.keys.items():
        row = served.joined.rows[place]
        whole = replace(log[name].whole, begin=int(served.trace.start_ns[row]), end=int(served.trace.end_ns[row]))
        ours, wall = found.parts_of(place), whole.end - whole.begin
        if is_near(ours, log[name], wall):
            continue
        retimed.append(name)
        if not is_near(ours, with_times_of(served, place, replace(log[name], whole=whole)), wall):
            differ[name] = f"{wall} ns: {ours}, by the log {parts_of(log[name])}"
    print(f"{len(retimed)} of {len(log)} requests by the recording's times")
    assert len(retimed) < REQUESTS / 4
    return differ


def is_near(ours: Mapping[str, int], logged: LoggedRequest, wall_ns: int) -> bool:
    """Whether all parts are those of a logged request, and its wall is."""
    theirs = parts_of(logged)
    apart = [abs(ours.get(part, 0) - theirs[part]) for part in ours.keys() | theirs.keys()]
    return max(*apart, abs(wall_ns - logged.wall)) <= TOLERANCE * wall_ns


def with_times_of(served: Served, place: int, logged: LoggedRequest) -> LoggedRequest:
    """A logged request, with the times that its batches and its longer phases have in the recording."""
    trace, served_by = served.trace, served.joined.served

    def times(rows: Int64s) -> list[tuple[int, int]]:
        return sorted(zip(trace.start_ns[rows].tolist(), trace.end_ns[rows].tolist(), strict=True))

    its = np.flatnonzero(served.joined.of == place)
    by_name = {trace.sites[trace.site[row]].name: times(its[its == row])[0] for row in its.tolist()}
    batches = zip(logged.batches, times(served_by.batch[served_by.request == place]), strict=True)
    work = [(one, by_name[SPANS[one.what]] if one.what in SPANS else (one.begin, one.end)) for one in logged.work]
    return replace(
        logged,
        batches=[replace(batch, begin=begin, end=end) for batch, (begin, end) in batches],
        work=[replace(one, begin=begin, end=end) for one, (begin, end) in work],
    )


@pytest.mark.parametrize("engine", [[], ["--engine-process"]], ids=["thread", "process"])
def test_each_request_is_one_tree_whose_parts_are_those_of_the_services_own_log(
    engine: list[str], expected: list[str], tmp_path: Path
) -> None:
    with collecting(take) as collector:
        (tmp_path / "profile.yaml").write_text(profile_of(collector))
        environ = {**ENVIRON, "CHAT_DEBUG_LOG": str(tmp_path / "service.log")}
        with serving([*COMMAND, *engine], tmp_path, environ, ours=True) as (port, _):
            assert ask_all(port) == expected
        served = Served(tmp_path, with_report(tmp_path / "log"))
        log = read_log(tmp_path / "service.log")
        assert (len(log), len(served.joined.rows), served.joined.unbound) == (REQUESTS, REQUESTS, 0)
        assert_one_tree_each(sent_to(collector), log)
    assert_one_tree_each(converted(served), log)
    assert not differing(served, log)
