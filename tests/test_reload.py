"""Another profile while the service runs: what stays, what comes and goes, who follows, and what no caller can do."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import importlib.abc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from otlp_receiver import receiver
from readback import spans_in

import instrument
from instrument import ProfileError, StateError, chrome
from instrument.agent import client
from instrument.errors import InstrumentError
from instrument.instrumentors.selection import Selection
from instrument.profile.keys import loads
from instrument.recorder.recorder import RECORDER
from instrument.recorder.wrapping import bare_function
from instrument.sessions import profile_reload
from instrument.sessions.membership import Membership
from instrument.sessions.profile_reload import (
    FIXED_SETTINGS,
    MOST_NAMES,
    ControlThread,
    Reload,
    Request,
    keep_fixed_settings,
    refused_settings,
)
from instrument.sessions.session import Session

WORK = """
def first(x): return x + 1
def second(x): return x + 2

class Engine:
    def step(self, x): return first(x)
    def rest(self, x): return second(x)

def handle(x): return Engine().step(x)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a module; a session that a failing test left running is stopped."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("INSTRUMENT_PROFILE", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "reloaded.py").write_text(WORK)
    importlib.invalidate_caches()
    yield tmp_path
    instrument.stop()
    sys.modules.pop("reloaded", None)


def write(path: str | Path, text: str) -> Path:
    Path(path).write_text(textwrap.dedent(text))
    return Path(path)


def begin(text: str) -> Session:
    session = instrument.start(write("profile.yaml", text))
    assert session is not None
    return session


def work() -> Any:
    return importlib.import_module("reloaded")


def wait_for(condition: Callable[[], Any], limit_s: float = 120.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.002)


def calls(session: Session) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in session.tally().iterate_totals():
        name = row.path[-1].name
        counts[name] = counts.get(name, 0) + row.totals.calls
    return counts


# -------------------------------------------------------------------- rules


def test_new_rules_attach_gone_ones_are_undone_and_the_others_stay_the_very_same() -> None:
    module = work()
    originals = {"second": module.second, "step": vars(module.Engine)["step"], "handle": module.handle}
    session = begin('functions: [{match: "reloaded:first"}, {match: "reloaded:Engine.step"}]')
    first = module.first
    module.handle(1)
    done = session.reload(loads('functions: [{match: "reloaded:handle"}, {match: "reloaded:first"}]', environ={}))
    assert done.attached == ("reloaded:handle",)
    assert done.undone == ("reloaded:Engine.step",)
    assert (done.generation, done.refused) == (2, ())
    assert module.first is first
    assert vars(module.Engine)["step"] is originals["step"]
    assert module.second is originals["second"]
    module.handle(1)
    assert calls(session) == {"first": 2, "Engine.step": 1, "handle": 1}
    assert len({id(row.path[-1]) for row in session.tally().iterate_totals() if row.path[-1].name == "first"}) == 1
    instrument.stop()
    assert module.handle is originals["handle"]


def test_a_rule_that_asks_for_the_same_in_other_words_keeps_its_probe() -> None:
    module = work()
    session = begin('functions: [{match: "reloaded:*"}]')
    held = module.first, module.second, vars(module.Engine)["step"]
    done = session.reload(loads('functions: [{match: ["reloaded:*", "!reloaded:handle"]}]', environ={}))
    assert (done.attached, done.undone) == ((), ("reloaded:handle",))
    assert (module.first, module.second, vars(module.Engine)["step"]) == held


def test_a_function_that_somebody_has_wrapped_since_gets_no_second_probe() -> None:
    module = work()
    session = begin('functions: [{match: "reloaded:first"}]')
    probe = module.first
    module.first = functools.wraps(probe)(lambda *args: probe(*args))
    session.reload(loads('functions: [{match: ["reloaded:first", "reloaded:second"]}]', environ={}))
    module.first(1)
    assert calls(session) == {"first": 1}


def test_another_name_or_kind_makes_another_probe() -> None:
    module = work()
    original = module.first
    session = begin('functions: [{match: "reloaded:first"}]')
    done = session.reload(loads('functions: [{match: "reloaded:first", name: one, kind: phase}]', environ={}))
    assert done.attached == done.undone == ("reloaded:first",)
    module.first(1)
    assert calls(session) == {"one": 1}
    assert bare_function(module.first) is original


def test_the_first_rule_still_has_a_target_when_a_reload_puts_another_before_it() -> None:
    module = work()
    session = begin('functions: [{match: "reloaded:first", name: late}]')
    done = session.reload(
        loads('functions: [{match: "reloaded:*", kind: phase}, {match: "reloaded:first", name: late}]', environ={})
    )
    assert "reloaded:first" in done.undone
    module.first(1)
    assert calls(session) == {"first": 1}
    assert [verdict.why for verdict in session.selection.verdicts() if verdict.rule == "reloaded:first"] == [
        "reloaded:* has it"
    ]


def test_a_module_that_is_imported_after_the_reload_is_attached_by_the_new_rules() -> None:
    session = begin('functions: [{match: "json.tool:main"}]')
    session.reload(loads('functions: [{match: "reloaded:first"}]', environ={}))
    work().first(1)
    assert calls(session) == {"first": 1}


def test_a_module_whose_import_a_reload_meets_half_way_is_attached_when_it_has_ended() -> None:
    session = begin("")
    going, go_on = threading.Event(), threading.Event()
    sys.modules["reload_gate"] = gate = type(sys)("reload_gate")
    vars(gate).update(going=going, go_on=go_on)
    write("half.py", "import reload_gate\nreload_gate.going.set()\nreload_gate.go_on.wait(240)\ndef late(): return 1\n")
    importing = threading.Thread(target=importlib.import_module, args=("half",))
    importing.start()
    try:
        assert going.wait(240)
        session.reload(loads('functions: [{match: "half:late"}]', environ={}))
        go_on.set()
        importing.join()
        assert [verdict.state for verdict in session.selection.verdicts()] == ["attached"]
        sys.modules["half"].late()
        assert calls(session) == {"late": 1}
    finally:
        go_on.set()
        importing.join()
        del sys.modules["reload_gate"], sys.modules["half"]


def test_a_module_that_was_asked_for_by_the_rules_before_a_reload_is_attached_soon_after() -> None:
    """The reload falls between the import system's question and the module's entry in `sys.modules`."""
    session = begin('functions: [{match: "reloaded:first"}]')
    write("asked.py", "def late(): return 1\n")

    class Between(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
            if fullname == "asked":
                session.reload(loads('functions: [{match: "asked:late"}]', environ={}))
                session.selection.attach_pending_modules()

    between = Between()
    sys.meta_path.insert(1, between)
    try:
        asked = importlib.import_module("asked")
        while session.selection.attach_pending_modules():
            pass
        asked.late()
        assert calls(session) == {"late": 1}
    finally:
        sys.meta_path.remove(between)
        sys.modules.pop("asked", None)


def test_a_sleeping_rule_wants_its_modules_at_every_moment_of_a_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import on another thread may ask between any two steps of the reload."""
    rules = 'functions: [{match: "asleep:first"}]\nlayers: [{type: Linear}]\n'
    selection = Selection(loads(rules, environ={}))
    answers = []
    lay_down = Selection._load_or_defer_family

    def ask_before(self: Selection, key: str) -> None:
        answers.append({"functions", "layers"} <= {*self._unloaded, *self._families})
        lay_down(self, key)

    monkeypatch.setattr(Selection, "_load_or_defer_family", ask_before)
    try:
        selection.change(loads(rules + "copies: [{directions: [h2d]}]", environ={}))
    finally:
        selection.detach_all()
    assert answers
    assert all(answers)


def test_names_in_other_modules_follow_attaching_and_detaching() -> None:
    module = work()
    original = module.first
    sys.modules["reload_user"] = user = type(sys)("reload_user")
    vars(user)["one"] = module.first
    try:
        session = begin("")
        session.reload(loads('functions: [{match: "reloaded:first"}]', environ={}))
        assert vars(user)["one"] is module.first is not original
        session.reload(loads("", environ={}))
        assert vars(user)["one"] is module.first is original
    finally:
        del sys.modules["reload_user"]


@pytest.mark.parametrize("what", ["first", "wait"])
def test_a_table_that_took_over_a_probe_calls_the_bare_function_when_the_rule_is_gone(what: str, folder: Path) -> None:
    with (folder / "reloaded.py").open("a") as file:
        file.write("\nasync def wait(arg): return arg\n")
    module = work()
    bare = getattr(module, what)
    session = begin(f'functions: [{{match: "reloaded:{what}"}}]')
    routes = [getattr(module, what)]
    assert routes[0] is not bare
    session.reload(loads("", environ={}))
    assert getattr(module, what) is bare
    made = routes[0](1)
    if what == "wait":
        assert asyncio.run(made) == 1
    assert calls(session) == {}


def test_layers_keep_their_sites_and_classes_get_their_own_forward_back(recorder: Any, torch: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    linear, relu = torch.nn.Linear.forward, torch.nn.ReLU.forward
    selection = Selection(loads("layers: [{type: Linear}]", environ={}), recorder)
    selection.attach()
    try:
        model(torch.zeros(2))
        (site,) = {row.path[-1] for row in recorder.tally().iterate_totals()}
        patched = torch.nn.Linear.forward
        attached, undone = selection.change(loads("layers: [{type: ReLU}, {type: Linear}]", environ={}))
        assert (attached, undone) == (["type ReLU"], [])
        assert torch.nn.Linear.forward is patched
        model(torch.zeros(2))
        counted = {row.path[-1].name: row.totals.calls for row in recorder.tally().iterate_totals()}
        assert counted == {"Linear": 2, "ReLU": 1}
        assert site in {row.path[-1] for row in recorder.tally().iterate_totals()}
        assert [verdict.target for verdict in selection.verdicts() if verdict.site] == ["1", "0"]
        attached, undone = selection.change(loads("layers: [{type: ReLU, name: act}]", environ={}))
        assert torch.nn.Linear.forward is linear
        model(torch.zeros(2))
        counted = {row.path[-1].name: row.totals.calls for row in recorder.tally().iterate_totals()}
        assert counted == {"Linear": 2, "ReLU": 1, "act": 1}
        selection.change(loads("", environ={}))
        assert torch.nn.ReLU.forward is relu
        assert "__init_subclass__" not in vars(torch.nn.Module)
        selection.change(loads("layers: [{type: ReLU}]", environ={}))
        model(torch.zeros(2))
        assert [verdict.target for verdict in selection.verdicts() if verdict.site] == ["1"]
    finally:
        selection.detach_all()


@pytest.mark.slow
def test_no_call_fails_and_none_loses_its_place_while_threads_call_and_profiles_change() -> None:
    module = work()
    session = begin('functions: [{match: "reloaded:handle", kind: request}, {match: "reloaded:first"}]')
    profiles = [
        'functions: [{match: "reloaded:handle", kind: request}, {match: "reloaded:first"}]',
        'functions: [{match: "reloaded:handle", kind: request}, {match: "reloaded:Engine.*"}]',
        'functions: [{match: "reloaded:handle", kind: request}]',
        'functions: [{match: "reloaded:handle", kind: request}, {match: "reloaded:first", name: one}]',
    ]
    wrong: list[object] = []
    made: list[int] = []
    enough = threading.Event()

    def call() -> None:
        number = 0
        while number < 25_000 or not enough.is_set():
            number += 1
            try:
                if module.handle(number) != number + 1:
                    wrong.append(number)
            except BaseException as error:
                wrong.append(error)
        made.append(number)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for reloads in range(1, 13):
        session.reload(loads(profiles[reloads % len(profiles)], environ={}))
    enough.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert sum(made) >= 100_000
    assert calls(session)["handle"] == sum(made)  # its rule never changed: every call is there
    by_id = {span.span_id: span for span in spans_in(RECORDER)}
    for span in by_id.values():
        above = by_id.get(span.parent_id)
        assert above is None or above.site.name in ("handle", "Engine.step", "Engine.rest")
    assert RECORDER.current_span_id() == 0


@pytest.mark.slow
def test_one_of_several_concurrent_reloads_applies_completely() -> None:
    module = work()
    session = begin("")
    profiles = [
        loads(f'functions: [{{match: "reloaded:{name}"}}]', environ={})
        for name in ("first", "second", "Engine.*", "*", "handle")
    ]

    def reload(turn: int) -> None:
        for number in range(20):
            session.reload(profiles[(turn * number + turn) % len(profiles)])

    threads = [threading.Thread(target=reload, args=(turn,)) for turn in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (rule,) = session.profile.functions
    functions = {"first": module.first, "second": module.second, "handle": module.handle}
    functions |= {f"Engine.{name}": vars(module.Engine)[name] for name in ("step", "rest")}
    recorded = {name for name, function in functions.items() if hasattr(function, "__instrument__")}
    assert recorded == {verdict.target.partition(":")[2] for verdict in session.selection.verdicts()}
    assert {verdict.rule for verdict in session.selection.verdicts()} == {rule.text}


# -------------------------------------------------------------------- settings


def test_settings_that_can_change_do_and_the_others_are_refused_with_the_reason() -> None:
    session = begin("limits: {ring: 1MiB}\nservice: shop")
    done = session.reload(
        loads(
            "service: market\nclock: tsc\nlimits: {ring: 2MiB, disk: 7B}\ncapture: {sample: 0.5}\nbudget: 1%\n"
            "device: {cuda: off}\ncontrol: {watch: true}\nexport: {otlp: {}, chrome: {}}\ntracer_option: OpDetail",
            environ={},
        )
    )
    assert [refusal.partition(" keeps")[0] for refusal in done.refused] == [
        "clock",
        "limits.ring",
        "device",
        "control",
        "export.otlp",
    ]
    now = session.profile
    assert (now.service, now.limits.disk_bytes, now.capture.sample, now.budget) == ("market", 7, 0.5, 0.01)
    assert (now.clock, now.limits.ring_bytes, now.export.otlp) == ("monotonic", 1 << 20, None)
    assert any("limits.ring keeps its value until a restart" in note for note in session.notes())
    session.reload(loads("limits: {ring: 1MiB}", environ={}))
    assert not any("keeps its value" in note for note in session.notes())


def test_a_profile_that_asks_for_the_same_changes_nothing() -> None:
    session = begin('functions: [{match: "reloaded:first"}]')
    wrapped = work().first
    done = session.reload()
    assert done == Reload(1, session.profile.digest)
    assert work().first is wrapped


@pytest.mark.parametrize("bad", ["servce: x", "functions: [", "functions: [{match: 'no colon'}]", "\x00"])
def test_a_bad_profile_leaves_the_old_one_running_and_is_noted(bad: str) -> None:
    session = begin('functions: [{match: "reloaded:first"}]')
    wrapped = work().first
    write("profile.yaml", bad)
    with pytest.raises(ProfileError):
        instrument.reload()
    assert work().first is wrapped
    assert (session.recorded.generation, "reloaded:first" in session.profile.functions[0].match) == (1, True)
    assert any("the profile of generation 1 stays in force: " in note for note in session.notes())
    write("profile.yaml", 'functions: [{match: "reloaded:second"}]')
    assert instrument.reload().attached == ("reloaded:second",)
    assert not any("stays in force" in note for note in session.notes())


def test_a_fault_while_rules_change_puts_the_old_ones_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from instrument.instrumentors.copies import Copies

    module = work()
    session = begin('functions: [{match: "reloaded:first"}]')
    wrapped, second = module.first, module.second

    def break_down(_: Any, name: str) -> bool:
        if name == "reloaded":
            raise RuntimeError("out of order")
        return False

    monkeypatch.setattr(Copies, "may_match", break_down)
    with pytest.raises(StateError, match=r"could not be applied: RuntimeError: out of order"):
        session.reload(loads('functions: [{match: "reloaded:*"}]\ncopies: [{}]', environ={}))
    monkeypatch.undo()
    assert module.first is wrapped
    assert module.second is second
    assert session.recorded.generation == 1


def test_reload_without_a_session_without_a_file_and_after_the_end_says_so() -> None:
    with pytest.raises(StateError, match="no session runs"):
        instrument.reload()
    session = instrument.start(loads("", environ={}))
    assert session is not None
    with pytest.raises(StateError, match="is no file"):
        session.reload()
    with pytest.raises(ProfileError, match="no such file"):
        session.reload("absent.yaml")
    instrument.stop()
    with pytest.raises(StateError, match="has been stopped"):
        session.reload(loads("service: x", environ={}))


def test_a_changed_schedule_ends_the_window_and_goes_on_counting_files() -> None:
    session = begin("export: {chrome: {path: 't-{window}.json'}}")
    with instrument.scope("request", kind="request"):
        pass
    session.reload(loads("schedule: {record: 1}\nexport: {chrome: {path: 't-{window}.json'}}", environ={}))
    for _ in range(2):
        with instrument.scope("request", kind="request"):
            pass
    session.flush(100)
    instrument.stop()
    traces = {path.name: chrome.load(path)[0] for path in Path().glob("t-*.json")}
    assert {name: trace.origin.generation for name, trace in traces.items()} == {
        "t-0.json": 1,
        "t-1.json": 2,
        "t-2.json": 2,
        "t-3.json": 2,
    }
    assert [len(traces[f"t-{index}.json"].spans) for index in range(3)] == [1, 1, 1]


def test_each_trace_and_what_is_sent_carry_the_generation_and_the_digest() -> None:
    with receiver() as collector:
        text = f"export: {{chrome: {{path: t.json}}, otlp: {{endpoint: 'http://127.0.0.1:{collector.http_port}'}}}}"
        session = begin(text)
        session.flush(100)  # the exporter has read the facts of the first generation
        digest = session.reload(loads(text + "\ncapture: {slow: 1s}", environ={})).digest
        with instrument.scope("request", kind="request"):
            pass
        instrument.stop()
        (span,) = collector.spans()
    origin = chrome.load("t.json")[0].origin
    assert (origin.generation, origin.digest) == (2, digest)
    assert span.resource["instrument.profile.generation"] == 2
    assert span.resource["instrument.profile.digest"] == digest


# -------------------------------------------------------------------- the file


WATCHED = "control: {watch: true}\n"


def test_a_file_that_is_replaced_or_written_in_place_is_followed() -> None:
    session = begin(WATCHED + 'functions: [{match: "reloaded:first"}]')
    module = work()
    original = module.second
    write("new.yaml", WATCHED + 'functions: [{match: "reloaded:second"}]').rename("profile.yaml")
    wait_for(lambda: session.recorded.generation == 2)
    assert module.second is not original
    write("profile.yaml", WATCHED)
    wait_for(lambda: session.recorded.generation == 3)
    assert module.second is original


def test_a_file_that_is_found_half_written_is_no_error_for_good(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_reload, "INVALID_FILE_S", 60)  # who writes may have to wait for a processor
    session = begin(WATCHED)
    whole = WATCHED + 'functions: [{match: "reloaded:first"}, {match: "reloaded:second"}]'
    with Path("profile.yaml").open("w") as file:
        for end in range(0, len(whole), 12):
            file.write(whole[end : end + 12])
            file.flush()
            time.sleep(0.06)  # longer than a change has to settle: what is there so far is read
    wait_for(lambda: len(session.profile.functions) == 2)
    assert not any("stays in force" in note for note in session.notes())
    assert "stays in force" not in caplog.text


@pytest.mark.slow
def test_a_file_that_stays_broken_is_noted_once_and_mended_by_the_next_good_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    session = begin(WATCHED + "service: a")
    write("profile.yaml", "servce: b")
    wait_for(lambda: any("did you mean 'service'" in note for note in session.notes()))
    assert caplog.text.count("did you mean 'service'") == 1
    assert session.profile.service == "a"
    Path("profile.yaml").unlink()
    wait_for(lambda: any("no such file" in note for note in session.notes()))
    write("profile.yaml", WATCHED + "service: c")
    wait_for(lambda: session.profile.service == "c")
    assert not any("stays in force" in note for note in session.notes())


def test_the_last_of_several_quick_changes_applies() -> None:
    session = begin(WATCHED + "service: s0")
    for number in range(1, 60):
        write("new.yaml", WATCHED + f"service: s{number}").rename("profile.yaml")
        time.sleep(0.005)
    wait_for(lambda: session.profile.service == "s59")
    # Same size, and perhaps the same tick of the clock that stamps files.
    for service in ("aa", "bb", "cc"):
        write("profile.yaml", WATCHED + f"service: {service}")
    wait_for(lambda: session.profile.service == "cc")


def test_nothing_watches_or_listens_unless_it_is_asked_to() -> None:
    before = {*threading.enumerate()}
    begin('functions: [{match: "reloaded:first"}]')
    assert {*threading.enumerate()} <= before
    instrument.stop()
    session = instrument.start(loads(WATCHED, environ={}))
    assert session is not None
    assert any("the profile has no file to watch" in note for note in session.notes())


# -------------------------------------------------------------------- what the agent asks for


def test_an_asker_is_answered_with_what_was_attached_undone_and_refused() -> None:
    session = begin('functions: [{match: "reloaded:first"}]')
    ask = session.generations.answer_request
    work()
    new = write("new.yaml", 'limits: {ring: 1MiB}\nfunctions: [{match: "reloaded:second"}]')
    answer = ask(Request(str(new.absolute()), switch=True))
    assert (answer["pid"], answer["attached"]) == (os.getpid(), ["reloaded:second"])
    assert answer["undone"] == ["reloaded:first"]
    assert [text.partition(" keeps")[0] for text in answer["refused"]] == ["limits.ring"]
    write("new.yaml", "servce: x")
    answer = ask(Request(str(new.absolute()), switch=True))
    assert "did you mean 'service'" in answer["error"]
    assert answer["generation"] == 2
    os.mkfifo("pipe")
    assert "found no regular file" in ask(Request(str(Path("pipe").absolute()), switch=True))["error"]
    assert "error" in ask(Request("a\0b"))


def test_stop_waits_for_the_reload_that_has_begun() -> None:
    begun, done = threading.Event(), threading.Event()

    def slow(asked: Request) -> dict[str, Any]:
        begun.set()
        time.sleep(0.2)
        done.set()
        return {}

    file = write("watched.yaml", "")
    membership = Membership(dict, lambda prepare: prepare())
    generations: Any = SimpleNamespace(
        prepare_to_watch=lambda: True, watched=file, answer_request=slow, settle=lambda: False, has_ended=lambda: False
    )
    exporting: Any = SimpleNamespace(publish_facts=lambda **_: None)
    thread = ControlThread(generations, membership, exporting, lambda: None)
    thread.watch_file()
    assert begun.wait(240)
    thread.stop(20)
    assert done.is_set()


def test_the_answer_to_a_caller_names_at_most_the_allowed_number_and_counts_the_rest() -> None:
    done = Reload(2, "0a", tuple(f"m:f{number}" for number in range(MOST_NAMES + 3)), ("m:g",), ("clock keeps its",))
    facts = done.facts()
    assert (len(facts["attached"]), facts["attached"][-1]) == (MOST_NAMES + 1, "and 3 more")
    assert (facts["undone"], facts["refused"]) == (["m:g"], ["clock keeps its"])


@pytest.mark.parametrize("name", FIXED_SETTINGS)
def test_a_reload_applies_all_of_a_profile_that_needs_no_start(name: str) -> None:
    now = loads("", environ={})
    other = {
        "clock": "tsc", "limits.ring": "{ring: 1MiB}", "limits.ring_dir": "{ring_dir: ./a}",
        "device": "{cuda: off}", "control": "{watch: true}", "agent": "off",
        "startup": "auto", "export.otlp": "{otlp: {}}",
    }[name]  # fmt: skip
    wanted = loads(f"service: other\n{name.partition('.')[0]}: {other}", environ={})
    kept = keep_fixed_settings(wanted, now)
    assert kept == replace(now, service="other")
    (refused,) = refused_settings(wanted, kept)
    assert refused.startswith(f"{name} keeps its value until a restart: ")


# -------------------------------------------------------------------- processes


def exit_code(child: int) -> int:
    """Return the exit code of a child. One that hangs is killed, and fails the test."""
    end = time.monotonic() + 240
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(ended[1])


@pytest.mark.slow
@pytest.mark.parametrize("wait_s", [20.0, 0.0], ids=["whole", "cut short"])
def test_children_forked_in_the_middle_of_reloads_are_whole_and_follow_by_themselves(
    wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("instrument.sessions.process.FORK_WAIT_S", wait_s)
    module = work()
    session = begin('functions: [{match: "reloaded:first"}]')
    profiles = [loads(f'functions: [{{match: "reloaded:{name}"}}]', environ={}) for name in ("*", "first", "Engine.*")]
    going = threading.Event()
    going.set()

    def reload() -> None:
        while going.is_set():
            for profile in profiles:
                session.reload(profile)
                time.sleep(0.002)  # or the fork, which waits for its turn, would hardly ever get it

    reloading = threading.Thread(target=reload)
    reloading.start()
    codes = []
    for _ in range(15):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                attached = {verdict.target for verdict in session.selection.verdicts()}
                session.reload(profiles[1])
                module.handle(1)
                whole = calls(session) == {"first": 1} and attached
                instrument.stop()
                bare = not hasattr(module.first, "__instrument__") and not hasattr(module.handle, "__instrument__")
                code = 0 if whole and bare else 2
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        codes.append(exit_code(child))
    going.clear()
    reloading.join()
    assert codes == [0] * 15
    instrument.stop()
    assert not hasattr(module.first, "__instrument__")


def tell(*arguments: str) -> tuple[int, dict[int, str], str]:
    """Return the exit code of `instrument reload`, its line for each process, and the rest of its output."""
    command = [sys.executable, "-m", "instrument", "reload", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = re.findall(r"(?m)^([0-9]+): (.*)$", done.stdout)
    return done.returncode, {int(pid): text for pid, text in lines}, done.stderr


RECORDING = """
import sys, time
import reloaded
reloaded.handle(1)
print("ready", flush=True)
sys.stdin.readline()
reloaded.handle(1)
"""


def does_hear(pid: int) -> bool:
    with contextlib.suppress(InstrumentError), client.find_runs(str(pid)) as runs:
        return any(member.facts["hears"] for run in runs for member in run.members)
    return False  # its agent has no time to answer


@contextlib.contextmanager
def recording(profile: str) -> Iterator[subprocess.Popen[str]]:
    """A program that waits for a line under `instrument run` with that profile, and then calls `handle`."""
    command = [sys.executable, "-m", "instrument", "run", "--profile", profile, "--", "-c", RECORDING]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."}
    ) as service:
        assert service.stdout is not None
        assert service.stdout.readline() == "ready\n"
        wait_for(lambda: does_hear(service.pid))
        try:
            yield service
        finally:
            service.communicate("\n", timeout=240)


def test_exit_codes_are_1_for_a_refused_setting_and_2_for_a_bad_profile_or_no_process() -> None:
    rule = 'functions: [{match: "reloaded:handle"}]\n'
    write("ring.yaml", rule)
    code, _, errors = tell("--pid", str(os.getpid()))
    assert (code, f"there is no process {os.getpid()} of a run" in errors) == (2, True)
    with recording("ring.yaml") as service:
        write("ring.yaml", rule + "limits: {ring: 1MiB}")
        code, lines, _ = tell("ring.yaml", "--wait", "60")
        assert (code, "limits.ring keeps its value until a restart" in lines[service.pid]) == (1, True)
        write("bad.yaml", "servce: x")
        code, lines, errors = tell("bad.yaml")
        assert (code, lines, "bad.yaml:1:1" in errors) == (2, {}, True)
        write("ring.yaml", "servce: x")
        code, lines, _ = tell("--wait", "60")
        assert (code, "stays in force" in lines[service.pid]) == (2, True)


@pytest.mark.slow
def test_a_reload_reaches_its_own_service_and_file_and_names_the_others() -> None:
    rules = 'functions: [{match: "reloaded:handle"}]\nexport: {summary: {to: "./{service}.txt"}}\n'
    write("a.yaml", "service: a\n" + rules)
    write("b.yaml", "service: b\n" + rules)
    write("c.yaml", "service: b\n" + 'functions: [{match: "reloaded:first"}]')
    with recording("a.yaml") as a, recording("b.yaml") as b:
        write("a.yaml", "service: a\n" + rules + "tracer_option: OpDetail")
        Path("link.yaml").symlink_to("a.yaml")
        code, lines, _ = tell("link.yaml", "--wait", "60")
        assert (code, set(lines)) == (0, {a.pid})
        assert "generation 2" in lines[a.pid]
        code, lines, errors = tell("c.yaml", "--wait", "60")
        assert (code, lines, "there is no process of a run" in errors) == (2, {}, True)
        code, lines, errors = tell("c.yaml", "--pid", str(a.pid), "--wait", "60")
        assert (code, lines[a.pid].startswith("not reloaded: it runs the service a")) == (2, True)
        code, lines, errors = tell("c.yaml", "--pid", str(b.pid), "--wait", "60")
        assert (code, "attached reloaded:first" in lines[b.pid]) == (0, True)
    assert "handle" in Path("a.txt").read_text()


def test_a_forked_child_follows_the_file_by_itself() -> None:
    session = begin(WATCHED)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            write("new.yaml", f"{WATCHED}service: child").rename("profile.yaml")
            wait_for(lambda: session.profile.service == "child")
            code = 0
        finally:
            os._exit(code)
    assert exit_code(child) == 0


@pytest.mark.slow
def test_the_variable_selects_one_of_two_services_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    write("both.yaml", 'functions: [{match: "reloaded:handle"}]')
    with contextlib.ExitStack() as stack:
        pids = {}
        for name in ("a", "b"):
            monkeypatch.setenv("OTEL_SERVICE_NAME", name)
            pids[name] = stack.enter_context(recording("both.yaml")).pid
        code, lines, _ = tell("both.yaml", "--wait", "60")
        assert (code, lines[pids["a"]].startswith("not reloaded: it runs the service a")) == (0, True)
        assert "generation 1" in lines[pids["b"]]
        monkeypatch.delenv("OTEL_SERVICE_NAME")
        code, lines, _ = tell("both.yaml", "--wait", "60")
        assert (code, [text.startswith("generation 1") for text in lines.values()]) == (0, [True, True])


@pytest.mark.slow
def test_every_worker_of_gunicorn_follows_a_reload() -> None:
    pytest.importorskip("gunicorn")
    write(
        "app.py",
        """
        import reloaded

        def app(environ, start):
            reloaded.handle(1)
            start('200 OK', [])
            return [b'ok']
        """,
    )
    traces = "export: {chrome: {path: 'traces/{pid}.json'}}\n"
    write("profile.yaml", traces + 'functions: [{match: "reloaded:handle"}]')
    command = [sys.executable, "-m", "instrument", "run", "--profile", "profile.yaml", "--", "-m", "gunicorn"]
    with Path("log").open("wb") as log:
        server = subprocess.Popen(
            [*command, "--workers", "3", "--bind", "127.0.0.1:0", "app:app"],
            env={**os.environ, "PYTHONPATH": "."},
            stdout=log,
            stderr=log,
        )
    try:
        wait_for(lambda: Path("log").read_text().count("Booting worker") == 3)
        address = re.search(r"Listening at: (http://\S+)", Path("log").read_text())
        assert address is not None
        write("profile.yaml", traces + 'functions: [{match: "reloaded:first"}]')

        def serve(requests: int) -> None:
            for _ in range(requests):
                assert urllib.request.urlopen(address[1], timeout=240).read() == b"ok"

        def does_every_worker_follow() -> bool:
            serve(10)  # a process answers once it has recorded
            return sum("generation 2" in line for line in tell("profile.yaml", "--wait", "60")[1].values()) == 3

        wait_for(does_every_worker_follow)
        serve(30)
        server.terminate()
        assert server.wait(timeout=240) == 0, Path("log").read_text()
    finally:
        server.kill()
        server.wait()
    spans = [span for path in Path("traces").iterdir() for span in chrome.load(path)[0].spans]
    assert [span.site.name for span in sorted(spans, key=lambda span: span.start_ns)][-30:] == ["first"] * 30
