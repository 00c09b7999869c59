"""One tree for each request: what bears its key anywhere hangs below who handed it over, and nothing is there twice."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from otlp_spans import linked_requests, links_of, messages_of, spans_by_process
from test_ledger import (
    ACCEPT,
    API,
    CHAT,
    ENGINE,
    STEP,
    TOKENISE,
    WAIT,
    WORKER,
    engine,
    made,
    requests_of_one_loop,
    schedule,
)

from instrument.cli import main
from instrument.otlp.export_facts import Ids
from instrument.recording.spans import BATCH_KEYS, Origin, Span
from instrument.recording.trace_context import RemoteParent
from instrument.trace import file
from instrument.trace.columns import Columns
from instrument.trace.file import Saved
from instrument.trace.joined import join_requests
from instrument.trace.ledger import compute_ledger
from instrument.trace.merge import merge_recordings
from instrument.trace.request_trees import build_request_trees, join_request_trees, make_trace_id_of_key
from instrument.trace.stages import make_stage_spans
from instrument.trace.trace import Trace, columns_of_spans, make_spans


def trees(spans: list[Span], run: str = "") -> dict[int, tuple[int, int]]:
    """By the id of each span its parent and its root, once requests are one tree each."""
    trace = columns_of_spans(spans)
    found = build_request_trees(trace, join_requests(trace), run)
    return dict(
        zip(
            found.span_id.tolist(), zip(found.parent_id.tolist(), found.root_id.tolist(), strict=True), strict=True
        )
    )  # fmt: skip


def test_engine_work_of_a_request_is_below_the_span_that_waits_for_it() -> None:
    found = trees(engine())
    assert found[10] == (3, 1)  # accepted while `generate`, which bears the key, was open
    assert [found[number] for number in (1, 2, 3, 4)] == [(0, 1), (1, 1), (1, 1), (3, 1)]
    assert all(found[number] == (0, number) for number in (11, 12, 13, 14, 15)), "batches keep trees of their own"


def test_a_batch_that_a_loop_runs_in_the_tree_of_a_request_that_it_does_not_serve_is_a_root() -> None:
    spans = [
        made(1, CHAT, 0, 1000, key="a"),
        made(2, CHAT, 5, 900, key="b"),
        made(3, STEP, 10, 100, 1, batch=["a", "b"]),
        made(4, STEP, 200, 300, 1, batch=["b", "unknown"]),
        made(5, TOKENISE, 210, 220, 4),
        made(6, TOKENISE, 230, 240, 4, key="a"),
        made(7, STEP, 400, 500, 1, batch=["unknown"]),
    ]
    for span in spans[4:6]:
        span.root_id = 1
    found = trees(spans)
    assert [found[number] for number in (3, 7)] == [(1, 1), (1, 1)]
    assert [found[number] for number in (4, 5)] == [(0, 4), (4, 4)]
    assert found[6][1] == 1
    joined = join_requests(columns_of_spans(spans))
    assert {number: int(place) for number, place in enumerate(joined.of[2:], 3)} == {3: 0, 4: -1, 5: -1, 6: 0, 7: 0}


def test_handed_off_work_belongs_to_its_ended_origin_else_to_the_request() -> None:
    spans = [
        made(1, CHAT, 0, 1000, key="a"),
        made(2, TOKENISE, 10, 60, 1, key="a"),
        made(3, WAIT, 70, 80, 1, key="a"),
        made(4, ACCEPT, 90, 100, thread=ENGINE, key="a"),
        made(5, TOKENISE, 92, 95, 4, thread=ENGINE),
        made(6, WAIT, 110, 300, thread=ENGINE, key="a"),
        made(7, ACCEPT, 120, 130, thread=4, key="a"),
        made(8, ACCEPT, 5, 6, thread=4, key="a"),
    ]
    found = trees(spans)
    assert found[8] == (1, 1)
    assert (found[4], found[5]) == ((3, 1), (4, 1))  # the newest of those that had ended
    assert found[7] == (6, 1)  # handed on by the engine


def test_a_part_of_another_tree_that_is_done_for_a_request_leaves_it() -> None:
    spans = [
        made(1, CHAT, 0, 100, key="a"),
        made(2, STEP, 10, 90, thread=ENGINE),
        made(3, ACCEPT, 20, 30, 2, thread=ENGINE, key="a"),
        made(4, TOKENISE, 22, 25, 3, thread=ENGINE),
        made(5, TOKENISE, 40, 50, 2, thread=ENGINE),
    ]
    assert trees(spans) == {1: (0, 1), 2: (0, 2), 3: (1, 1), 4: (3, 1), 5: (2, 2)}


@pytest.mark.parametrize("ends_ns", [80, 150])
def test_work_for_a_request_in_another_ones_tree_moves_to_its_own(ends_ns: int) -> None:
    found = trees(requests_of_one_loop(ends_ns))
    assert [found[number] for number in (1, 2, 3, 6)] == [(0, 1), (0, 2), (2, 2), (1, 1)]
    assert [found[number] for number in (4, 5, 11)] == [(3, 2), (4, 2), (3, 2)]


def test_a_request_within_one_of_its_key_becomes_a_part_of_its_tree_without_a_trace_of_its_own() -> None:
    spans = [made(1, CHAT, 0, 100, key="a"), made(2, WORKER, 20, 80, thread=ENGINE, key="a")]
    spans[0].remote, spans[1].remote = RemoteParent(7, 8), RemoteParent(9, 10)
    trace = columns_of_spans(spans)
    found = build_request_trees(trace, join_requests(trace), "run")
    assert (found.parent_id.tolist(), found.root_id.tolist()) == ([0, 1], [1, 1])
    assert found.remote == {0: RemoteParent(7, 8)}


def test_keys_that_come_again_two_requests_at_once_and_spans_without_one() -> None:
    spans = [
        made(1, CHAT, 0, 100, key="a"),
        made(2, CHAT, 50, 150, thread=3, key="a"),
        made(3, CHAT, 200, 300, key="a"),
        *(made(10 + at, ACCEPT, at, at + 1, thread=ENGINE, key="a") for at in (20, 60, 170, 210)),
        made(900, ACCEPT, 20, 30, thread=ENGINE, key="nobody"),
    ]
    found = trees(spans)
    assert [found[10 + at][1] for at in (20, 60, 170, 210)] == [1, 2, 2, 3]
    assert found[900] == (0, 900)


def test_halves_of_a_request_have_one_trace_wherever_they_are_looked_at() -> None:
    api, core = engine()[:6], engine()[6:]
    whole, half = (
        build_request_trees(columns_of_spans(its), join_requests(columns_of_spans(its)), "run 1") for its in (api, core)
    )
    by_id = {int(whole.span_id[row]): one.trace_id for row, one in whole.remote.items()}
    assert by_id == {1: make_trace_id_of_key("run 1", "a"), 5: make_trace_id_of_key("run 1", "b")}
    assert {int(half.span_id[row]): one for row, one in half.remote.items()} == {
        10: RemoteParent(make_trace_id_of_key("run 1", "a"), 0)
    }
    assert make_trace_id_of_key("run 1", "a") != make_trace_id_of_key("run 2", "a")
    again = [made(1, CHAT, 0, 10, key="a"), made(2, CHAT, 20, 30, key="a")]
    assert (
        len(build_request_trees(columns_of_spans(again), join_requests(columns_of_spans(again)), "run 1").remote) == 1
    )


def test_parents_never_run_in_a_circle() -> None:
    """A request can lie within the span that bears its key, if clocks that differ make that span seem to be of it."""
    spans = [
        made(1, ACCEPT, 0, 100, thread=ENGINE, key="a"),
        made(2, CHAT, 10, 50, 1, thread=ENGINE, key="a"),
        made(3, ACCEPT, 5, 6, thread=4, key="a"),
    ]
    spans[1].root_id = 2
    trace = columns_of_spans(spans)
    found = build_request_trees(trace, join_requests(trace, apart_ns=50))
    assert found.parent_id.tolist() == [0, 1, 2]


def test_a_span_that_began_before_its_request_by_as_much_as_clocks_are_apart_is_of_it() -> None:
    spans = [made(1, CHAT, 100, 900, key="a"), made(2, ACCEPT, 60, 70, thread=ENGINE, key="a")]
    trace = columns_of_spans(spans)
    assert join_requests(trace, 39).of.tolist() == [0, -1]
    assert join_requests(trace, 40).of.tolist() == [0, 0]
    earlier = columns_of_spans([*spans, made(3, CHAT, 0, 65, key="a")])
    assert join_requests(earlier, 40).of.tolist() == [1, 0, 0], (
        "one that goes on comes before one that is about to begin"
    )


def saved(spans: list[Span], pid: int, boot: str, ahead_ns: int = 0) -> Saved:
    """Return the recording of one process of a run, on a host whose monotonic clock is ahead."""
    origin = Origin(pid, "shop", ahead_ns, 10**18, boot=boot, host=boot, wall_error_ns=500, run="20260101T000000-1")
    moved = [replace(span, start_ns=span.start_ns + ahead_ns, end_ns=span.end_ns + ahead_ns) for span in spans]
    for span, one in zip(moved, spans, strict=True):
        span.attributes = one.attributes
    return Saved(Trace(origin, ahead_ns, ahead_ns + 2000, moved), None)


def test_processes_of_several_hosts_are_one_tree_by_as_much_as_their_clocks_say() -> None:
    spans = engine()
    late = [replace(span, start_ns=span.start_ns - 700, end_ns=span.end_ns - 700) for span in spans[6:7]]
    late[0].attributes = spans[6].attributes
    merged = merge_recordings([saved(spans[:6], 1, "one"), saved(late, 2, "other", 10**9)])
    assert merged.saved.trace.apart_ns >= 1000
    found = join_request_trees(merged.saved).trace.columns
    accept = int(np.flatnonzero([found.sites[site].name == "accept" for site in found.site])[0])
    chat = int(found.span_id[join_requests(found).rows[0]])
    assert (int(found.parent_id[accept]), int(found.root_id[accept])) == (chat, chat)


def grafted_twice(spans: list[Span]) -> tuple[Columns, Columns]:
    """The trace of requests that are one tree each, and what becomes of it once they are made so again."""
    trace = columns_of_spans(spans)
    once = build_request_trees(trace, join_requests(trace), "run")
    return once, build_request_trees(once, join_requests(once), "run")


def test_a_key_that_another_open_request_was_known_by_first_names_that_one_until_a_later_one_bears_it() -> None:
    spans = [
        made(1, CHAT, 0, 50, key="a"),
        made(2, CHAT, 10, 100, key="b"),
        made(3, WAIT, 60, 90, 2, key="a"),
        made(4, ACCEPT, 20, 30, thread=ENGINE, key="a"),
        made(5, ACCEPT, 55, 58, thread=ENGINE, key="a"),
        made(6, ACCEPT, 70, 80, thread=ENGINE, key="a"),
    ]
    found = trees(spans)
    assert [found[number] for number in (3, 4, 5, 6)] == [(2, 2), (1, 1), (1, 1), (3, 2)]
    once, twice = grafted_twice(spans)
    assert once.parent_id.tolist() == twice.parent_id.tolist()


@pytest.mark.parametrize("is_grafted", [True, False])
def test_a_further_name_of_a_part_is_no_stray_because_of_who_ended_before_the_part_began(is_grafted: bool) -> None:
    spans = [
        made(1, CHAT, 0, 100, key="a"),
        made(2, CHAT, 5, 15, thread=3, key="b"),
        made(3, WORKER, 20, 90, 1 if is_grafted else 0, thread=ENGINE, key="a"),
        made(4, TOKENISE, 50, 60, 3, thread=ENGINE, key="b"),
    ]
    spans[3].root_id = 1 if is_grafted else 3
    assert trees(spans) == {1: (0, 1), 2: (1, 1), 3: (1, 1), 4: (3, 1)}


# Random engines.

ENGINES = st.integers(0, 2**64 - 1).map(lambda number: random.Random(number).sample(range(2**32), 10))
"""Some seeds at a time: one engine in hundreds is of the rare kinds."""


def busier(seed: int) -> list[Span]:
    """The same with requests of the engine's own, and with what bears keys below what bears others or none."""
    rng, spans = random.Random(seed), schedule(seed)
    for _ in range(rng.randrange(8)):
        above = rng.choice([None, *spans])
        start = rng.randrange(150) if above is None else rng.randint(above.start_ns, above.end_ns)
        site, thread = rng.choice([(WORKER, ENGINE), (WORKER, 5), (ACCEPT, ENGINE), (TOKENISE, 5), (STEP, ENGINE)])
        key = rng.choice(["", "r0", "r1", "r2", "s0", "s1"])
        one = made(len(spans) + 1, site, start, start + rng.randrange(50), thread=thread, key=key)
        if above is not None:
            one.parent_id = above.span_id
            one.root_id = one.span_id if site is WORKER else above.root_id
        spans.append(one)
    return spans


def sums(trace: Columns) -> tuple[list[dict[str, int]], list[int]]:
    joined = join_requests(trace)
    told = compute_ledger(trace, joined)
    return [told.times_of_request(place) for place in range(len(joined.rows))], told.given_ns.tolist()


@example([1428890, 1214768711, 3367033384, 1147002149, 4165726059])  # who is known by a further name, or in parts
@example([891495403])  # a further key that becomes known earlier in a later round, and through a part
@given(ENGINES)
def test_each_request_of_a_random_engine_is_one_tree_and_its_ledger_the_same(seeds: list[int]) -> None:
    for seed in seeds:
        see_trees_of(busier(seed))


def see_trees_of(spans: list[Span]) -> None:
    trace = columns_of_spans(spans)
    joined = join_requests(trace)
    found = build_request_trees(trace, joined, "run")
    assert found.span_id.tolist() == trace.span_id.tolist()
    orphans = (found.parent_id != 0) & (found.parent == -1)
    assert not orphans.any()
    roots = found.span_id == found.root_id
    for place, row in enumerate(joined.rows.tolist()):
        its = np.flatnonzero(found.root_id == found.root_id[row])
        assert np.flatnonzero(roots[its]).tolist() == [its.tolist().index(row)], "one root, the request"
        assert set(its.tolist()) == set(np.flatnonzero(joined.of == place).tolist())
    ids = Counter(one.trace_id for one in found.remote.values())
    of_requests = {one.trace_id for row, one in found.remote.items() if row in joined.rows}
    assert all(ids[trace_id] == 1 for trace_id in of_requests)
    again = join_requests(found)
    assert (again.of.tolist(), again.rows.tolist()) == (joined.of.tolist(), joined.rows.tolist())
    assert sums(found) == sums(trace)
    twice = build_request_trees(found, again, "run")
    assert (twice.parent_id.tolist(), twice.root_id.tolist()) == (found.parent_id.tolist(), found.root_id.tolist())


# The command.

SERVICE = """
import os, threading
from instrument import scope, stop
here, there = os.pipe()
child = os.fork()
if not child:
    for _ in range(3):
        key = os.read(here, 2).decode()
        with scope("accept", key=key), scope("look"): pass
        with scope("step", batch=[key]): pass
    stop()
    os._exit(0)
for key in ("r1", "r2", "r3"):
    with scope("request", kind="request"), scope("submit", key=key):
        os.write(there, key.encode())
os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recordings of a run of two processes, the requests of one of which the other serves."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "service.py").write_text(SERVICE)
    (folder / "profile.yaml").write_text("service: shop\nexport: {recording: }\nagent: off")
    words = [sys.executable, "-m", "instrument", "run", "--profile", "profile.yaml", "--", "service.py"]
    subprocess.run(words, cwd=folder, check=True, timeout=240)
    return folder / "traces"


def test_merge_and_convert_write_one_tree_for_each_request(run: Path, tmp_path: Path) -> None:
    assert main(["merge", str(run), "-o", str(tmp_path / "run.npz")]) == 0
    found = file.load(tmp_path / "run.npz").trace.columns
    names = [found.sites[site].name for site in found.site.tolist()]
    trees_of = {
        tuple(sorted(np.array(names)[found.root_id == root].tolist())) for root in set(found.root_id.tolist())
    }  # fmt: skip
    assert trees_of == {("accept", "look", "request", "submit"), ("step",)}
    assert len(set(found.root_id.tolist())) == 6
    assert main(["convert", str(run), "--to", "chrome", "-o", str(tmp_path / "run.json")]) == 0
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert sum(event.get("ph") in "bX" and event.get("name") == "accept" for event in events) == 3


def spans_in(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The spans of an OTLP file, each with its process."""
    found = []
    for line in path.read_text().splitlines():
        [resource] = json.loads(line)["resourceSpans"]
        told = {one["key"]: one["value"] for one in resource["resource"]["attributes"]}
        found += [(int(told["process.pid"]["intValue"]), span) for span in resource["scopeSpans"][0]["spans"]]
    return found


def test_otlp_has_one_trace_for_each_request_over_all_processes_with_links_from_batches(
    run: Path, tmp_path: Path
) -> None:
    target = tmp_path / "run.otlp.jsonl"
    assert main(["convert", str(run), "--to", "otlp", "-o", str(target)]) == 0
    found = spans_in(target)
    by_id = {(span["traceId"], span["spanId"]): span for _, span in found}
    assert len(by_id) == len(found) == 15
    parents = [by_id.get((span["traceId"], span.get("parentSpanId"))) for _, span in found]
    roots = [span for (_, span), parent in zip(found, parents, strict=True) if parent is None]
    assert Counter(root["name"] for root in roots) == {"request": 3, "step": 3}
    assert not any("parentSpanId" in root for root in roots), "no orphans"
    requests = {root["traceId"]: root["spanId"] for root in roots if root["name"] == "request"}
    for trace_id in requests:
        its = [(pid, span["name"]) for pid, span in found if span["traceId"] == trace_id]
        assert sorted(name for _, name in its) == ["accept", "look", "request", "submit"]
        assert len({pid for pid, _ in its}) == 2
    linked = [link for root in roots if root["name"] == "step" for link in root["links"]]
    assert {link["traceId"]: link["spanId"] for link in linked} == requests
    origin = file.load(next(run.iterdir())).trace.origin
    assert {int(trace_id, 16) for trace_id in requests} == {
        make_trace_id_of_key(origin.run, key) for key in ("r1", "r2", "r3")
    }  # fmt: skip


def test_links_of_a_batch_are_what_a_collector_reads() -> None:
    trace = columns_of_spans(engine())
    joined = join_requests(trace)
    spans, ids = make_spans(build_request_trees(trace, joined)), Ids()
    for row, its in linked_requests(trace, joined, ids).items():
        spans[row].links = its
    packed = messages_of(spans, ids, Origin(1, "", 0, 10**18))
    step = packed[8]
    assert [(link.trace_id, link.span_id) for link in step.links] == [
        (ids.trace_id(number).to_bytes(16, "big"), ids.span_id(number).to_bytes(8, "big")) for number in (1, 5)
    ]
    assert [len(one.links) for one in packed[7:]] == [1, 2, 1, 2, 1]


@given(st.integers(0, 2**32))
def test_the_processes_of_a_random_engine_have_each_span_once_in_one_tree_for_each_request(seed: int) -> None:
    spans = busier(seed)
    by_id = {span.span_id: span for span in spans}
    parts: dict[int, list[Span]] = {API: [], ENGINE: []}
    for span in spans:
        top = span
        while top.parent_id:
            top = by_id[top.parent_id]
        parts[ENGINE if top.thread_id in (ENGINE, 4) else API].append(span)
    merged = merge_recordings([saved(its, pid, "one") for pid, its in parts.items() if its])
    columns = merged.saved.trace.columns
    joined = join_requests(columns)
    below = make_stage_spans(columns, joined)
    found = [
        span
        for _, its in spans_by_process(merged, build_request_trees(columns, joined, "run"), joined, below)
        for span in its
    ]  # fmt: skip
    assert len({span.span_id for span in found}) == len(found) == len(spans) + sum(map(len, below.values()))
    told = {span.span_id: span for span in found}
    ids = Ids()
    traces: dict[int, set[int]] = {}
    for span in found:
        assert not span.parent_id or span.parent_id in told, "no orphans"
        traces.setdefault(ids.make_root_ids(replace(span, span_id=span.root_id))[0], set()).add(span.root_id)
    requests = {int(columns.span_id[row]) for row in joined.rows}
    assert all(len(roots) == 1 for roots in traces.values() if roots & requests), "a trace for each request"
    for span in found:
        links = {link.span_id for link in span.links}
        assert links <= requests
        assert bool(span.attributes.get(BATCH_KEYS)) or not links


def test_a_request_within_another_one_is_linked_to_where_it_began() -> None:
    spans = [made(1, CHAT, 0, 100), made(2, TOKENISE, 10, 90, 1), made(3, WORKER, 20, 60, 2, key="b")]
    spans[2].root_id = 3
    merged = merge_recordings([saved(spans, 1, "one")])
    joined = join_requests(merged.saved.trace.columns)
    columns = build_request_trees(merged.saved.trace.columns, joined, "run")
    [(_, its)] = spans_by_process(merged, columns, joined)
    found = {span.site.name: span for span in its}
    ids = Ids()
    [link] = links_of(found["worker.handle"], ids)
    assert link[:2] == (ids.make_root_ids(found["tokenise"])[0], ids.span_id(found["tokenise"].span_id))
    assert links_of(found["POST /chat"], ids) == []
