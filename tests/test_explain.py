"""The explanation of slow requests: the cause is named with its time, or the verdict is inconclusive."""

from __future__ import annotations

import gc
import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from readback import spans_in
from simulated_engine import ENGINE_THREAD, INCIDENTS, Lives, Service

import instrument
from instrument.cli import main
from instrument.profile.model import FunctionRule, Profile, RequestKeys
from instrument.recording.spans import BATCH_KEYS, HOST, KEY, Origin, Sample, Site, Span
from instrument.report.causes import CAUSES, CauseTimes, measure_resource_wait
from instrument.report.explanation import EXPLAINED, INCONCLUSIVE, TYPICAL, Explanation, RequestChoice, explain
from instrument.report.view import Options, Recording
from instrument.trace import file
from instrument.trace.merge import merge_recordings, split_by_process
from instrument.trace.request_trees import CACHED_TOKENS, PREEMPTIONS
from instrument.trace.trace import Trace

FEW = 170


def explained(trace: Trace, wanted: RequestChoice) -> Explanation:
    return explain(Recording.from_trace(trace), wanted, Options())[0]


@pytest.mark.parametrize("incident", INCIDENTS)
def test_the_cause_of_a_slow_request_is_named_with_its_time_and_its_rows(incident: str) -> None:
    trace, key, delay_ns = Lives(3, incident, size_ms=60, requests=FEW, pads=incident == "padding").planted()
    explanation = explained(trace, RequestChoice(request=key))
    lead = explanation.causes[0]
    assert (lead.name, explanation.verdict) == (incident, EXPLAINED)
    assert lead.accounted_ns == pytest.approx(delay_ns, rel=0.15)
    assert lead.proofs or incident in ("processor contention", "memory pressure")  # which gauges show
    accounted_ns = sum(cause.accounted_ns for cause in explanation.causes)
    assert accounted_ns + explanation.unexplained_ns == pytest.approx(explanation.excess_ns, abs=10)
    assert sum(part.excess_ns for part in explanation.parts) == pytest.approx(explanation.excess_ns, abs=10)
    assert incident in explanation.sentence().lower()
    notes = {
        "blocked event loop": "by render", "another request's prefill": "for r10000", "wait for a lock": "r10000 (span",
        "arrival burst": "of them of tenant noisy), where",
    }  # fmt: skip
    assert notes.get(incident, "") in lead.note
    assert {cause.name for cause in (*explanation.causes, *explanation.rivals)} <= set(CAUSES)
    assert min(cause.typical_ns for cause in (*explanation.causes, *explanation.rivals)) >= 0


@pytest.mark.parametrize(
    ("begin_s", "end_s", "wait_s"),
    [(4.0, 4.1, 0.0), (5.2, 5.9, 0.4), (5.2, 5.3, 0.1), (4.5, 6.5, 0.38), (5.5, 5.5, 0.0)],
    ids=["a usual reading", "half a reading", "a part of the wait", "parts of three readings", "no time"],
)
def test_waits_longer_than_usual_count_in_any_part_of_their_reading(
    begin_s: float, end_s: float, wait_s: float
) -> None:
    percents = [20.0] * 5 + [60.0, 16.0] + [20.0] * 3  # the sixth second has 0.4 s more than usual, the next 0.04 less
    readings = [Sample("cpu_wait", HOST, second * 10**9, value) for second, value in enumerate(percents, 1)]
    facts = Trace(Origin(1, "engine", 0, 0), 0, 10**10, [])
    interval = round(begin_s * 1e9), round(end_s * 1e9)
    wait_ns = measure_resource_wait([readings], "processor contention", facts, *interval)
    assert wait_ns == pytest.approx(wait_s * 1e9)


@pytest.mark.parametrize(
    ("incident", "note"),
    [
        ("preemption", "(the engine counted 2 preemptions, 0 of"),
        ("another request's prefill", "(for r10000, the engine counted 0 preemptions, 0 of"),
    ],
)
def test_preemptions_and_cached_prefixes_are_in_the_evidence_as_the_engine_counted_them(
    incident: str, note: str
) -> None:
    trace, key, _ = Lives(3, incident, size_ms=60, requests=FEW).planted()
    spans = [
        replace(
            span,
            attributes={**span.attributes, PREEMPTIONS: 2 * (span.attributes.get(KEY) == key), CACHED_TOKENS: 0},
        )
        if span.site.kind == "request"
        else span
        for span in trace.spans
    ]
    lead = explained(replace(trace, spans=spans), RequestChoice(request=key)).causes[0]
    assert lead.name == incident
    assert note in lead.note
    assert "prompt tokens were cached" in lead.note


def test_the_slowest_request_of_a_service_without_an_incident_is_typical() -> None:
    trace, _ = Lives(3, requests=FEW).run()
    explanation = explained(trace, RequestChoice())
    assert explanation.verdict == TYPICAL
    assert "within the usual spread" in explanation.sentence()


def test_the_times_of_causes_add_up_to_the_wall_of_each_request() -> None:
    recording = Recording.from_trace(Lives(4, "blocked event loop", requests=FEW).run()[0])
    rows = recording.joined.rows
    times = CauseTimes(recording, np.arange(len(rows)))
    for place in range(len(rows)):
        assert sum(times.times_by_cause(place).values()) == pytest.approx(int(recording.columns.total_ns[rows[place]]))
        assert sum(times.times_by_part(place).values()) == int(recording.columns.total_ns[rows[place]])


def test_a_slow_step_of_others_between_two_batches_is_slow_service_and_no_preemption() -> None:
    trace, key, delay_ns = Lives(3, "preemption", size_ms=60, requests=FEW).planted()
    root = next(span for span in trace.spans if span.attributes.get(KEY) == key and span.site.kind == "request")
    part = max(
        (span for span in trace.spans if span.site.name == "part 3" and root.start_ns < span.start_ns < root.end_ns),
        key=lambda span: span.start_ns - (span.start_ns > root.start_ns + 40_000_000) * 10**9,
    )

    def later(span: Span) -> Span:
        moved = 2 * delay_ns
        begins_later, ends_later = span.start_ns >= part.end_ns, span.end_ns >= part.end_ns
        spent = {"self_ns": span.self_ns + moved} if span is part else {}
        return replace(
            span, start_ns=span.start_ns + moved * begins_later, end_ns=span.end_ns + moved * ends_later,
            active_ns=span.active_ns + moved * (ends_later and not begins_later), device=(), **spent,
        )  # fmt: skip

    stopped = replace(trace, spans=list(map(later, trace.spans)), end_ns=trace.end_ns + 2 * delay_ns, samples=())
    causes = {cause.name: cause.accounted_ns for cause in explained(stopped, RequestChoice(request=key)).causes}
    assert causes["slow service"] == pytest.approx(2 * delay_ns, rel=0.1)
    assert causes["preemption"] == pytest.approx(delay_ns, rel=0.15)


@pytest.mark.parametrize("incident", ["processor contention", "waiting to fill a batch"])
def test_without_gauges_a_cause_that_contention_may_look_like_is_inconclusive(incident: str) -> None:
    trace, key, _ = Lives(3, incident, requests=FEW).planted()
    explanation = explained(replace(trace, samples=()), RequestChoice(request=key))
    assert explanation.verdict == INCONCLUSIVE
    assert "processor contention is not assessed" in explanation.doubt
    assert any(reason.startswith("processor contention") for reason in explanation.not_assessed)


def test_the_gauges_of_a_request_s_processes_show_contention_in_a_merged_run(tmp_path: Path) -> None:
    trace, key, _ = Lives(3, "processor contention", requests=FEW).planted()
    paths = [tmp_path / f"{name}.npz" for name in ("server", "engine", "other")]

    def explained_with_gauges_of(process: int) -> Explanation:
        for number, path in enumerate(paths):
            spans = [span for span in trace.spans if (span.thread_id == ENGINE_THREAD) == (number == 1)]
            part = replace(
                trace, origin=replace(trace.origin, pid=7 + number, boot="b"), spans=spans if number < 2 else spans[:1],
                samples=trace.samples if number == process else (),
            )  # fmt: skip
            file.dump(path, part)
        merged = merge_recordings([file.load(path) for path in paths]).saved
        assert [len(part.trace.samples) for part in split_by_process(merged)] == [
            len(trace.samples) * (number == process) for number in range(3)
        ]
        file.dump(tmp_path / "merged.npz", merged.trace)
        return explained(file.load(tmp_path / "merged.npz").trace, RequestChoice(request=key))

    of_engine = explained_with_gauges_of(1)
    assert (of_engine.verdict, of_engine.causes[0].name) == (EXPLAINED, "processor contention")
    of_other = explained_with_gauges_of(2)
    assert (of_other.verdict, "contention is not assessed" in of_other.doubt) == (INCONCLUSIVE, True)


def test_a_call_path_that_is_slow_while_the_gauges_show_contention_is_inconclusive() -> None:
    trace, key, _ = Lives(3, "slow service", requests=FEW).planted()
    samples = Lives(3, "processor contention", requests=FEW).run()[0].samples
    explanation = explained(replace(trace, samples=samples), RequestChoice(request=key))
    assert explanation.causes[0].name == "slow service"
    assert (explanation.verdict, "contention is as likely" in explanation.doubt) == (INCONCLUSIVE, True)


def test_a_request_with_more_work_than_all_has_more_work_as_its_cause() -> None:
    service = Service(1, requests=300)
    explanation = explained(service.run(), RequestChoice())
    assert not explanation.is_like
    assert explanation.causes[0].title().startswith("own work: more steps")


def test_a_service_without_batches_and_keys_is_explained_by_its_calls() -> None:
    request, query = Site("GET /", "request", "app", "get"), Site("query", "op", "app", "query")
    spans = []
    for number in range(40):
        begin_ns, took_ns = 10**9 + number * 10**7, 900_000 if number == 25 else 100_000 + number * 100
        first = 2 * number + 1
        spans.append(
            Span(query, first + 1, first, first, 1, 0, begin_ns + 10, begin_ns + 10 + took_ns, took_ns, took_ns)
        )
        spans.append(Span(request, first, 0, first, 1, 0, begin_ns, begin_ns + 20 + took_ns, took_ns + 20, 20))
    trace = Trace(Origin(1, "small", 0, 0), 10**9, spans[-1].end_ns, spans)
    explanation = explained(trace, RequestChoice())
    assert (explanation.verdict, explanation.causes[0].title()) == (EXPLAINED, "own work: query")
    assert any("no rule has `batch:`" in reason for reason in explanation.not_assessed)
    assert any(reason.startswith("wait for a lock (no rule has a function") for reason in explanation.not_assessed)
    assert "processor contention or garbage collection, not assessed, would look alike" in explanation.sentence()


def test_a_long_prompt_of_another_request_is_known_by_its_size_without_weights() -> None:
    request, prefill = Site("POST /", "request", "app", "post"), Site("prefill", "op", "engine", "prefill")
    size, spans, free_ns = "http.request.body.size", [], 0
    for number in range(80):
        begin_ns = 10**9 + number * 10**7 - (number == 41) * 9_000_000
        served_ns = max(begin_ns + 1_000, free_ns)
        free_ns = served_ns + 1_000_000 + (60_000_000 if number == 40 else number % 7 * 1_000)
        key, first = f"r{number}", 2 * number + 1
        facts = {KEY: key, size: 6_000 if number == 40 else 40 + number % 7}
        took_ns = free_ns - served_ns
        spans.append(Span(prefill, first + 1, 0, first + 1, 2, 0, served_ns, free_ns, took_ns, took_ns,
                          attributes={BATCH_KEYS: (key,)}))  # fmt: skip
        end_ns = free_ns + 2_000
        spans.append(Span(request, first, 0, first, 1, number + 1, begin_ns, end_ns, end_ns - begin_ns, 3_000,
                          attributes=facts))  # fmt: skip
    trace = Trace(Origin(1, "sized", 0, 0), 10**9, spans[-1].end_ns, spans)
    explanation = explained(trace, RequestChoice(request="r41"))
    lead = explanation.causes[0]
    assert (lead.name, "for r40" in lead.note) == ("another request's prefill", True)
    unsized = [
        replace(span, attributes={**span.attributes, size: 40}) if span.site is request else span for span in spans
    ]
    explanation = explained(replace(trace, spans=unsized), RequestChoice(request="r41"))
    assert any(reason.startswith("another request's prefill, padding (") for reason in explanation.not_assessed)


GATE = threading.BoundedSemaphore()


def answer(request_id: str) -> None:
    with GATE:
        while request_id == "first" and not GATE._cond._waiters:  # type: ignore[attr-defined]
            time.sleep(0.02)
        time.sleep(0.5 * (request_id == "first"))  # longer than the other one waits for a processor


def test_a_wait_for_a_semaphore_of_threads_names_the_request_that_had_it() -> None:
    gc.unfreeze()  # the class has `acquire` as `__enter__`, too, which a search of the heap finds
    instrument.start(
        Profile(
            functions=(
                FunctionRule((f"{__name__}:answer",), kind="request", key=RequestKeys("request_id")),
                FunctionRule(("threading:Semaphore.acquire", "threading:Condition.wait")),
            )
        )
    )
    for number in range(20):
        answer(f"r{number}")
    threads = [threading.Thread(target=answer, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
        while GATE._value:  # type: ignore[attr-defined]
            time.sleep(0.001)
    for thread in threads:
        thread.join()
    spans = spans_in()
    instrument.stop()
    trace = Trace(Origin(1, "locks", 0, 0), spans[0].start_ns, spans[-1].end_ns, spans)
    explanation = explained(trace, RequestChoice(request="second"))
    lead = explanation.causes[0]
    assert lead.title() == "wait for a lock: Semaphore.acquire"
    assert lead.time_ns == max(span.total_ns for span in spans if span.site.name == "Semaphore.acquire")
    assert lead.note.startswith("a call waited for a lock, a semaphore or a place in a pool (first (span")


def test_requests_that_took_no_time_are_explained_as_those_of_their_endpoint() -> None:
    work, request = Site("work", "op", "app", "work"), Site("GET /", "request", "app", "get")
    spans = [Span(work, 1, 0, 1, 1, 0, 10**9, 10**9 + 5, 5, 5)]
    spans += [Span(request, 2 + i, 0, 2 + i, 1, 0, 10**9 + i, 10**9 + i, 0, 0) for i in range(20)]
    trace = Trace(Origin(1, "instant", 0, 0), 10**9, 10**9 + 100, spans)
    window = explained(trace, RequestChoice(since_ns=0, until_ns=50))
    assert (window.name, window.wall_ns, window.requests) == ("GET /", 0, 20)


def test_a_request_without_others_to_compare_with_is_inconclusive() -> None:
    explanation = explained(Lives(3, requests=5).run()[0], RequestChoice())
    assert explanation.verdict == INCONCLUSIVE
    assert "10 are needed" in explanation.sentence()


@pytest.mark.slow
def test_a_slow_window_is_explained_as_a_whole() -> None:
    lives = Lives(3, "slow service", size_ms=400, requests=500)
    trace, key, _ = lives.planted()
    slowest = explained(trace, RequestChoice(request=key))
    window = RequestChoice(since_ns=slowest.begin_ns - 50_000_000, until_ns=slowest.begin_ns + 350_000_000)
    explanation = explained(trace, window)
    assert explanation.requests > 10
    assert (explanation.verdict, explanation.causes[0].name) == (EXPLAINED, "slow service")
    calm = explained(trace, RequestChoice(since_ns=0, until_ns=slowest.begin_ns - 1_000_000_000))
    assert calm.verdict != EXPLAINED


@pytest.mark.slow
@pytest.mark.parametrize("incident", ["slow service", "processor contention"])
def test_a_window_within_a_long_incident_is_explained_by_it(incident: str) -> None:
    trace, key, _ = Lives(501, incident, size_ms=2500, a_second=60.0, requests=800).planted()
    begin_ns = explained(trace, RequestChoice(request=key)).begin_ns
    for first_ns, length_ns in ((0, 600_000_000), (500_000_000, 600_000_000), (0, 200_000_000)):
        window = RequestChoice(since_ns=begin_ns + first_ns, until_ns=begin_ns + first_ns + length_ns)
        explanation = explained(trace, window)
        assert (explanation.verdict, explanation.causes[0].name) == (EXPLAINED, incident)


@pytest.mark.slow
def test_explanations_are_right_on_many_services() -> None:
    first = wrong = 0
    for number in range(2 * len(INCIDENTS)):
        incident = INCIDENTS[number % len(INCIDENTS)]
        lives = Lives(300 + number, incident, size_ms=40 + number * 29 % 100, requests=300, pads=incident == "padding")
        trace, key, _ = lives.planted()
        explanation = explained(trace, RequestChoice(request=key))
        is_first = bool(explanation.causes) and explanation.causes[0].name == incident
        first, wrong = first + is_first, wrong + (explanation.verdict == EXPLAINED and not is_first)
    assert first >= 1.8 * len(INCIDENTS)
    assert wrong <= 1
    verdicts = [explained(Lives(400 + seed, requests=300).run()[0], RequestChoice()).verdict for seed in range(10)]
    assert verdicts.count(EXPLAINED) <= 1


# ---------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    trace, key, _ = Lives(3, "garbage collection", requests=FEW).planted()
    path = tmp_path_factory.mktemp("explain") / "slow.npz"
    file.dump(path, trace)
    return path, key


def test_the_command_prints_the_verdict_and_its_evidence(
    saved: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    path, key = saved
    assert main(["explain", str(path)]) == 0
    text = capsys.readouterr().out
    assert "Garbage collection accounts for" in text
    assert "Not assessed:" not in text
    assert max(map(len, text.splitlines())) <= 100
    assert main(["explain", str(path), "--request", key, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == 0
    assert document["explanations"][0]["causes"][0]["name"] == "garbage collection"
    assert main(["explain", str(path), "--endpoint", "POST /generate", "--slowest", "3", "--unit", "us"]) == 0
    assert capsys.readouterr().out.count("Explanation Report") == 3


def test_an_inconclusive_explanation_has_an_exit_code_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "short.npz"
    file.dump(path, Lives(3, requests=5).run()[0])
    assert main(["explain", str(path)]) == 3
    assert "Inconclusive" in capsys.readouterr().out


def test_a_request_or_an_endpoint_that_is_not_there_is_an_error(
    saved: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(saved[0])
    for given, message in (
        (["--request", "r999999"], "there is no request"),
        (["--endpoint", "POST /generat"], "nearest is 'POST /generate'"),
        (["--since", "900s"], "found no whole request"),
    ):
        assert main(["explain", path, *given]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "none.json").write_text('{"traceEvents": []}')
    assert main(["explain", str(tmp_path / "none.json")]) == 2
    assert "found no request. A request is" in capsys.readouterr().err
