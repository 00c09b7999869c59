"""The comparison of recordings: a change of the code is named, a change of the load is none."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from noisy_tenants import KINDS, arrivals, recorded
from simulated_engine import Service

import instrument
from instrument import chrome
from instrument.cli import main
from instrument.recording.spans import KEY, Origin, Site, Span
from instrument.report.comparison import COLOURS, FASTER, GONE, INCONCLUSIVE, NEW, SAME, SLOWER, Comparison, compare
from instrument.report.effects import CallSample, estimate_p99_limits, measure_effect
from instrument.report.view import Options, Recording
from instrument.trace import file
from instrument.trace.trace import Trace

BEFORE = Service(1, requests=450)


def sample(seed: int, calls: int = 4_000, factor: float = 1.0, size: float = 100.0, alike: float = 0.0) -> CallSample:
    """Return calls whose time is linear in a size, times a factor; neighbours are alike as an AR(1) process."""
    rng = random.Random(seed)
    sizes, values, level = [], [], 0.0
    for _ in range(calls):
        level = alike * level + rng.gauss(0, 0.1 * math.sqrt(1 - alike * alike))
        sizes.append(size * math.exp(rng.gauss(0, 0.5)))
        values.append(factor * (5_000 + 100 * sizes[-1]) * math.exp(level))
    return CallSample(np.array(values), np.log1p([sizes]), np.zeros(calls, dtype=np.int64))


def compared(before: Service, after: Service) -> Comparison:
    sides = [[Recording.from_trace(service.run())] for service in (before, after)]
    return compare(sides[0], sides[1], Options())


def verdicts(found: Comparison) -> dict[str, str]:
    return {change.name: change.verdict for change in found.changes}


def test_an_effect_is_measured_on_matched_calls_of_different_sizes() -> None:
    for factor in (1.0, 1.05, 0.9):
        found = measure_effect(sample(1), sample(2, factor=factor, size=150))
        assert found is not None
        low, high = found.confidence_limits(0.001)
        assert low < factor - 1 < high
        assert high - low < 0.05
        assert 0 < found.matched_ratio < 1


def test_too_few_calls_that_are_alike_have_no_effect() -> None:
    assert measure_effect(sample(1, calls=100), sample(2, calls=100)) is None
    assert measure_effect(sample(1), sample(2, size=1e6)) is None


def test_three_runs_on_each_side_are_the_units() -> None:
    def side(first_seed: int, factors: list[float], calls: int = 1_000) -> CallSample:
        runs = [
            sample(first_seed + n, calls, factor)._replace(run=np.full(calls, n)) for n, factor in enumerate(factors)
        ]
        return CallSample(*(np.concatenate(columns, axis=-1) for columns in zip(*runs, strict=True)))

    assert measure_effect(sample(1, 60), sample(2, 60)) is None
    assert (
        measure_effect(*(side(first, [1.0, 1.0, 1.0], 60) for first in (1, 5))) is not None
    )  # no blocks, so few calls do
    found = measure_effect(side(1, [1, 1.2, 0.9]), side(5, [1.1, 0.95, 1.15]))  # runs differ more than calls within one
    assert found is not None
    low, high = found.confidence_limits(0.05)
    assert low < 0 < high
    assert found.freedom < 5


@pytest.mark.slow
def test_correlated_neighbours_raise_no_false_alarm() -> None:
    alarms = 0
    for seed in range(200):
        found = measure_effect(sample(2 * seed, 1_000, alike=0.9), sample(2 * seed + 1, 1_000, alike=0.9))
        assert found is not None
        low, high = found.confidence_limits(0.02)
        alarms += low > 0 or high < 0
    assert alarms <= 12  # of 200, where 4 are expected: more than that has a probability of 0.0003


@pytest.fixture(scope="module")
def slower() -> Comparison:
    return compared(BEFORE, Service(2, requests=450, a_second=60, slower={"part 3": 1.15}))


def test_a_slower_function_is_named_while_the_load_changes(slower: Comparison) -> None:
    assert [change.name for change in slower.changed] == ["part 3 in engine.step"]
    change = slower.changed[0]
    assert change.verdict == SLOWER
    assert change.path == ("engine.step", "part 3")
    assert (change.low_ratio or 0) < 0.15 < (change.high_ratio or 0)
    assert (change.cost_ns or 0) > 0
    assert slower.sentences()[0].startswith("part 3 in engine.step is ")


def test_a_faster_function_is_named() -> None:
    assert (
        verdicts(compared(BEFORE, replace(BEFORE, seed=3, slower={"part 6": 0.8})))["part 6 in engine.step"] == FASTER
    )


@pytest.mark.parametrize("load", [{"a_second": 70.0}, {"prompt": 400.0}], ids=["more requests", "longer prompts"])
def test_a_change_of_the_load_is_no_change_of_the_work(load: dict[str, float]) -> None:
    found = compared(BEFORE, replace(BEFORE, seed=4, **load))
    assert found.changed == ()
    assert SAME in verdicts(found).values()


def test_new_and_gone_call_paths_are_named() -> None:
    trace = BEFORE.run()
    columns = trace.columns
    wanted = columns.are_of_sites([site.name != "part 9" for site in columns.sites])
    without = Recording.from_trace(trace.with_columns(columns.select(wanted)))
    found = compare([Recording.from_trace(trace)], [without], Options())
    assert verdicts(found)["part 9 in engine.step"] == GONE
    assert any(sentence.startswith("Gone: 1 of 13 call paths, most of all part 9") for sentence in found.sentences())
    new = compare([without], [Recording.from_trace(trace)], Options())
    assert verdicts(new)["part 9 in engine.step"] == NEW
    assert [change.path[-1] for change in new.find_unclear_changes(0.5)] == ["part 9"]  # a gate says neither yes nor no
    empty = Recording.from_trace(trace.with_columns(columns.select(np.zeros(len(columns), dtype=np.bool_))))
    assert compare([empty], [without], Options()).sentences()[0].startswith("New: 12 of 12 call paths")


def test_a_path_and_an_endpoint_that_a_window_cuts_off_leave_the_names_of_the_others() -> None:
    trace = BEFORE.run()
    cut = [
        replace(span, site=replace(span.site, name=f"A {span.site.name}"), clipped=True)
        for span in trace.spans
        if span.attributes.get(KEY) == "r1" or (span.site.name == "part 0" and span.span_id < 40)
    ]
    ids = {span.span_id for span in cut}
    spans = [*cut, *(span for span in trace.spans if span.span_id not in ids)]
    after = Recording.from_trace(replace(trace, spans=spans))
    comparison = compare([Recording.from_trace(trace)], [after], Options())
    assert comparison.changed == ()
    assert set(verdicts(comparison)) == {*(f"part {n} in engine.step" for n in range(10)), "engine.step",
                                         "POST /generate", "parse in POST /generate"}  # fmt: skip
    assert [row.name for row in comparison.slowest] == ["POST /generate"]


def test_the_load_of_each_tenant_is_shown_before_and_after() -> None:
    few, many = (recorded(seed, arrivals(seed, KINDS[0], seconds)) for seed, seconds in ((1, 0.3), (2, 0.6)))
    comparison = compare([few], [many], Options(requests_by="tenant"))
    requests = {load.name: (load.requests_before, load.requests_after) for load in comparison.loads}
    tenants = {"a", "b", "noisy"}
    assert {slowest.name for slowest in comparison.slowest} == tenants == {name for name in requests if name[0] != " "}
    assert all(before < after for before, after in requests.values())


def test_short_recordings_are_inconclusive() -> None:
    found = compared(replace(BEFORE, requests=10), replace(BEFORE, seed=5, requests=10))
    assert set(verdicts(found).values()) == {INCONCLUSIVE}
    assert "Inconclusive" in found.sentences()[0]


def test_times_that_vary_by_more_than_twice_are_inconclusive_and_no_unchanged_work() -> None:
    site, sides = Site("work", "op", "app", "work"), []
    for seed in (1, 2):
        rng, spans = np.random.default_rng(seed), []
        for number, took_ns in enumerate(rng.lognormal(10, 4, 300).astype(int).tolist(), 1):
            spans.append(
                Span(site, number, 0, number, 1, 0, number * 10**9, number * 10**9 + took_ns, took_ns, took_ns)
            )
        sides.append(Recording.from_trace(Trace(Origin(seed, "noisy", 0, 0), 10**9, 400 * 10**9, spans)))
    comparison = replace(compare(sides[:1], sides[1:], Options()), limit=0.03)
    assert verdicts(comparison) == {"work": INCONCLUSIVE}
    assert comparison.sentences()[0] == "Inconclusive: 1 call path has times that vary too much to compare them."
    assert comparison.sentences()[1].startswith("A change beyond 3.0% is not ruled out for 1 of 1 call paths")


def test_an_empty_recording_compares_to_nothing() -> None:
    trace = BEFORE.run()
    empty = Recording.from_trace(trace.with_columns(trace.columns.select(np.zeros(len(trace.columns), dtype=np.bool_))))
    assert compare([empty], [empty], Options()).sentences() == [
        "Nothing to compare: no call path took a noteworthy time on either side."
    ]


# ---------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recordings: before, after a change of the load, and after a slower function."""
    path = tmp_path_factory.mktemp("compare")
    file.dump(path / "before.npz", BEFORE.run())
    chrome.dump(path / "load.json.gz", replace(BEFORE, seed=4, a_second=60.0).run())
    file.dump(path / "slower.npz", replace(BEFORE, seed=5, slower={"part 3": 1.2}).run())
    file.dump(path / "short.npz", replace(BEFORE, seed=6, requests=10).run())
    return path


@pytest.mark.parametrize(("after", "code"), [("load.json.gz", 0), ("slower.npz", 1), ("short.npz", 3)])
def test_the_gate_has_an_exit_code_for_each_verdict(
    folder: Path, capsys: pytest.CaptureFixture[str], after: str, code: int
) -> None:
    given = ["compare", str(folder / "before.npz"), str(folder / after)]
    assert main(given) == 0  # no gate was asked for
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert main([*given, "--fail-over", "10%", "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == code
    assert {change["verdict"] for change in document["changes"]} >= ({"slower"} if code == 1 else set())


def test_markdown_and_junit_name_the_regression(folder: Path, tmp_path: Path) -> None:
    markdown, junit = tmp_path / "comparison.md", tmp_path / "comparison.xml"
    given = ["compare", str(folder / "before.npz"), str(folder / "slower.npz"), "--fail-over", "10%"]
    assert main([*given, "--markdown", str(markdown), "--junit", str(junit)]) == 1
    assert "| `part 3 in engine.step` | slower | +" in markdown.read_text("utf-8")
    failed = [
        case.get("name") for case in ElementTree.parse(junit).iter("testcase") if case.find("failure") is not None
    ]
    assert failed == ["engine.step > part 3"]


def test_a_page_has_an_icicle_of_the_changes(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "comparison.html"
    assert main(["compare", str(folder / "before.npz"), str(folder / "slower.npz"), "--html", str(page)]) == 0
    html = page.read_text("utf-8")
    boxes = re.findall(r'style="width:([0-9.]+)%"><div class="label" style="background:(#\w+)" title="([^"]*)"', html)
    outer = next(float(width) for width, _, title in boxes if title.startswith("engine.step"))
    inner = {title.partition(":")[0]: (float(width), colour) for width, colour, title in boxes if "part" in title}
    assert inner["part 3"][1] == COLOURS[SLOWER] != inner["part 4"][1]
    assert sum(width for width, _ in inner.values()) <= 100.01
    assert outer > 90


def test_the_99th_percentile_is_between_two_requests_where_there_are_enough() -> None:
    for count in (10, 367, 368, 2_000):
        low, high = estimate_p99_limits(np.arange(1, count + 1))
        assert (high is None) == (count < 368)
        assert low is None or low <= 0.99 * count < (high or count + 1)
    assert estimate_p99_limits(np.zeros(0, dtype=np.int64)) == (None, None)
    inside = 0
    rng = np.random.default_rng(1)
    for _ in range(400):
        low, high = estimate_p99_limits(np.round(1e6 * rng.lognormal(size=1_000)).astype(np.int64))
        inside += (low or 0) <= 1e6 * math.exp(2.326348) <= (high or math.inf)
    assert inside >= 372  # 380 are expected, and the limits are ordered values, so cautious


def test_the_slowest_requests_have_their_limits(slower: Comparison) -> None:
    (row,) = slower.slowest
    assert (row.requests_before, row.requests_after) == (450, 450)
    assert None not in (*row.limits_before_ns, *row.limits_after_ns)
    assert "Slowest requests" in "\n".join(slower.lines())
    (few,) = compared(replace(BEFORE, requests=60), replace(BEFORE, seed=5, requests=60)).slowest
    assert (few.limits_after_ns[1], few.differs) == (None, False)


@pytest.mark.slow
def test_a_slower_function_of_the_demonstration_is_named_and_an_equal_one_is_not(tmp_path: Path) -> None:
    """It takes five times as long: the machine may be busy with other things in one of the runs."""
    pytest.importorskip("torch")
    examples = Path(__file__).parents[1] / "examples"
    profile = (examples.parent / "configs" / "chat.yaml").read_text("utf-8")
    profile = re.sub(r"\n  chrome:\n    path: .*", "\n  recording: {path: traces/run.npz}", profile)
    plant = '        host = scores.to("cpu")\n'
    for name in ("before", "same", "slower"):
        folder = tmp_path / name
        shutil.copytree(examples / "chat", folder / "chat")
        (folder / "profile.yaml").write_text(profile, "utf-8")
        engine = folder / "chat" / "engine.py"
        source = engine.read_text("utf-8")
        assert plant in source
        if name == "slower":
            spin = "        for _ in range(60): scores.to('cpu').sum()\n"
            engine.write_text(source.replace(plant, spin + plant), "utf-8")
        server = [sys.executable, "-m", "instrument", "run", "--profile", "profile.yaml", "--", "-m", "chat.server"]
        command = [sys.executable, "-m", "chat.demo", "--requests", "230", "--", *server, "--port", "0"]
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    sides = {name: [instrument.load(tmp_path / name / "traces").recording] for name in ("before", "same", "slower")}
    planted = compare(sides["before"], sides["slower"], Options())
    assert [change.path[-1] for change in planted.find_slowdowns(1.0)][:1] == ["sample"], planted.sentences()
    assert "sample" not in [
        change.path[-1] for change in compare(sides["before"], sides["same"], Options()).find_slowdowns(1.0)
    ]


def test_a_baseline_keeps_the_last_runs_that_passed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["compare", "--baseline", str(tmp_path / "good"), "--keep", "2", "--fail-over", "10%"]
    (tmp_path / "good" / "archive").mkdir(parents=True)  # of somebody else
    assert main([*given, str(folder / "before.npz")]) == 0
    assert "first one" in capsys.readouterr().out
    assert main([*given, str(folder / "slower.npz")]) == 1
    assert main([*given, str(folder / "load.json.gz")]) == 0
    assert main([*given, str(folder / "load.json.gz")]) == 0
    kept = sorted(path.relative_to(tmp_path / "good").as_posix() for path in (tmp_path / "good").rglob("*.*"))
    assert (tmp_path / "good" / "archive").is_dir()
    assert kept == ["run-000002/load.json.gz", "run-000003/load.json.gz"]


def test_a_comparison_without_two_sides_says_what_to_give(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(folder / "before.npz")]) == 2
    assert "give BEFORE and AFTER" in capsys.readouterr().err


def test_a_comparison_without_scipy_says_what_to_install(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert main(["compare", str(folder / "before.npz"), str(folder / "load.json.gz")]) == 2
    assert "pip install 'instrument-sdk[compare]'" in capsys.readouterr().err
