"""Faces: old calls give what they gave, where that was right, over the same session."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trees import outline, tree_of

import instrument
from instrument import StateError, chrome, profiled, scope
from instrument.compat import fluid, minicaffe, paddle, singa, theano
from instrument.errors import ProfileError
from instrument.profile.keys import loads
from instrument.sessions import torch_profiler
from instrument.sessions.handlers import Window
from instrument.sessions.window import State

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each test works in a folder of its own; what a failing test left running is stopped."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("INSTRUMENT_PROFILE", raising=False)
    monkeypatch.setattr(torch_profiler, "is_torch_imported", lambda: False)  # another test may have imported torch
    yield
    fluid._run = None
    minicaffe._is_on, minicaffe._session, minicaffe._own_session = False, None, None
    minicaffe._close_scopes()
    instrument.stop()


@profiled("work")
def work() -> None: ...


def calls_of(text: str, name: str) -> int:
    """The calls in the first row of a report that has this name."""
    return next(int(line.split()[1]) for line in text.splitlines() if line.split()[:1] == [name])


class TestFluid:
    def test_the_report_and_the_timeline_are_of_what_ran_between(self, capsys: pytest.CaptureFixture[str]) -> None:
        fluid.start_profiler("All", "OpDetail")
        for _ in range(3):
            work()
        fluid.stop_profiler("total", "profile")
        text = capsys.readouterr().out
        assert "Profiling Report" in text
        assert "Sorted by total time in descending order" in text
        assert "Place: All" in text
        assert calls_of(text, "thread0::work") == 3
        assert chrome.load("profile")[1].calls == 3
        with pytest.raises(StateError, match="no session runs"):
            instrument.session()

    def test_two_threads_have_a_merged_report_and_then_their_own(self, capsys: pytest.CaptureFixture[str]) -> None:
        fluid.start_profiler("CPU")
        work()
        other = threading.Thread(target=work)
        other.start()
        other.join()
        fluid.stop_profiler(profile_path=None)
        text = capsys.readouterr().out
        assert text.index("This Report merge all thread info into one") < text.index("thread0::work")
        assert calls_of(text, "work") == 2
        assert (calls_of(text, "thread0::work"), calls_of(text, "thread1::work")) == (1, 1)

    def test_it_counts_every_call_when_the_rings_have_long_been_overwritten(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Path("small.yaml").write_text("limits: {ring: 64KiB}")
        monkeypatch.setenv("INSTRUMENT_PROFILE", "small.yaml")
        fluid.start_profiler("CPU")
        for _ in range(5_000):
            work()
        fluid.stop_profiler(profile_path=None)
        assert calls_of(capsys.readouterr().out, "thread0::work") == 5_000

    def test_start_while_it_runs_and_stop_while_it_does_not_are_nothing(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fluid.stop_profiler()
        fluid.reset_profiler()
        assert capsys.readouterr().out == ""
        fluid.start_profiler("CPU")
        work()
        fluid.start_profiler("All", "AllOpDetail")
        fluid.stop_profiler(profile_path=None)
        text = capsys.readouterr().out
        assert "Place: CPU" in text
        assert calls_of(text, "thread0::work") == 1

    def test_reset_drops_what_was_recorded_and_goes_on(self, capsys: pytest.CaptureFixture[str]) -> None:
        with fluid.profiler("CPU", "calls", "profile"):
            with scope("around"):
                work()
                fluid.reset_profiler()
                work()
            work()
        text = capsys.readouterr().out
        assert (calls_of(text, "thread0::around"), calls_of(text, "thread0::work")) == (1, 1)
        assert chrome.load("profile")[1].calls == 3

    def test_an_exception_ends_the_block_with_a_report(self, capsys: pytest.CaptureFixture[str]) -> None:
        def fail() -> None:
            with fluid.profiler("CPU", profile_path=None):
                work()
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert "Profiling Report" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: fluid.start_profiler("gpu"), "^start_profiler: state: found 'gpu'; allowed: CPU, GPU, All"),
            (lambda: fluid.start_profiler("All", "Full"), "tracer_option: found 'Full'; allowed: Default, OpDetail"),
            (lambda: fluid.stop_profiler("time"), "^stop_profiler: sorted_key: found 'time'; allowed: default, calls"),
            (lambda: fluid.profiler("gpu").__enter__(), "^profiler: state: found 'gpu'; allowed: CPU, GPU, All"),
        ],
    )
    def test_bad_arguments_are_value_errors(self, call: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            call()

    def test_a_session_that_runs_is_looked_at_and_goes_on(self, capsys: pytest.CaptureFixture[str]) -> None:
        session = instrument.start(loads("", environ={}))
        work()
        with fluid.profiler("CPU", profile_path=None):
            work()
        assert calls_of(capsys.readouterr().out, "thread0::work") == 1
        assert instrument.session() is session

    def test_the_lines_of_its_documentation_run(self, capsys: pytest.CaptureFixture[str]) -> None:
        lines = """
with profiler.profiler('All', 'total') as prof:
    work()
profiler.start_profiler(state='All', tracer_option='Default')
work()
profiler.stop_profiler(sorted_key='total', profile_path='tmp/profile')
"""
        exec(lines, {"profiler": fluid, "work": work})
        assert capsys.readouterr().out.count("Profiling Report") == 2
        assert chrome.load("tmp/profile")[1].calls == 1


class TestPaddle:
    def test_the_loop_of_its_documentation_runs(self, capsys: pytest.CaptureFixture[str]) -> None:
        with paddle.Profiler(
            targets=[paddle.ProfilerTarget.CPU],
            scheduler=paddle.make_scheduler(closed=1, ready=1, record=2, repeat=2),
            on_trace_ready=paddle.export_chrome_tracing("profiler_log"),
        ) as p:
            for _ in range(12):
                with paddle.RecordEvent("forward", event_type=paddle.TracerEventType.PythonUserDefined):
                    work()
                p.step(num_samples=4)
            line = p.step_info()
            assert line.startswith("batch_cost: ")
            assert line.endswith(" samples/s")
        assert p.summary(
            sorted_by=paddle.SortedKeys.CPUTotal, views=[paddle.SummaryView.OperatorView, paddle.SummaryView.UDFView]
        )
        text = capsys.readouterr().out
        assert calls_of(text, "work") == 2
        assert calls_of(text, "forward") == 2
        assert "2 steps timed, the first 10 skipped" in text
        names = sorted(path.name for path in Path("profiler_log").iterdir())
        assert len(names) == 2
        result = paddle.load_profiler_result(Path("profiler_log") / names[1])
        assert "work" in result.summary(op_detail=False, thread_sep=True, time_unit="us")
        assert [span.site.name for span in result.trace.spans].count("forward") == 2

    def test_a_range_of_steps_begins_at_0_where_it_begins_before(self) -> None:
        found: list[Window] = []
        with paddle.Profiler(scheduler=(-3, 2), on_trace_ready=lambda prof: found.append(prof.window)) as p:
            for _ in range(4):
                p.step()
        assert [(window.first_step, window.last_step) for window in found] == [(0, 1)]

    def test_a_scheduler_may_be_a_function_of_its_states(self) -> None:
        found: list[Window] = []

        def states(step: int) -> State:
            return paddle.ProfilerState.RECORD_AND_RETURN if step == 2 else paddle.ProfilerState.CLOSED

        with paddle.Profiler(scheduler=states, on_trace_ready=lambda prof: found.append(prof.window)) as p:
            for _ in range(4):
                p.step()
        assert [(window.first_step, window.last_step) for window in found] == [(2, 2)]

    def test_the_handler_of_its_documentation_exports_and_prints_each_window(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lines = """
def my_on_trace_ready(prof):
    callback = profiler.export_chrome_tracing('./profiler_demo')
    callback(prof)
    prof.summary()

prof = profiler.Profiler(
    targets=[ProfilerTarget.CPU, ProfilerTarget.GPU],
    scheduler=profiler.make_scheduler(closed=1, ready=1, record=4, repeat=3),
    on_trace_ready=my_on_trace_ready)
prof.start()
for i in range(20):
    with profiler.RecordEvent("DataPrepare"):
        work()
    prof.step()
prof.stop()
"""
        names: dict[str, Any] = {"profiler": paddle, "ProfilerTarget": paddle.ProfilerTarget, "work": work}
        exec(lines, names)
        text = capsys.readouterr().out
        assert names["prof"].failures == 0
        assert len([line for line in text.splitlines() if line.split()[:2] == ["DataPrepare", "4"]]) >= 3
        assert "10 steps timed, the first 10 skipped" in text.rpartition("DataPrepare")[2]
        traces = [chrome.load(path)[0] for path in Path("profiler_demo").iterdir()]
        assert [sum(span.site.name == "work" for span in trace.spans) for trace in traces] == [4, 4, 4]

    def test_a_handler_may_stop_the_profiler_and_the_loop_goes_on(self, capsys: pytest.CaptureFixture[str]) -> None:
        lines = """
def my_on_trace_ready(prof):
    callback = profiler.export_chrome_tracing('./profiler_demo')
    callback(prof)
    prof.stop()
    prof.summary(sorted_by=profiler.SortedKeys.GPUTotal)

p = profiler.Profiler(scheduler = [3,14], on_trace_ready=my_on_trace_ready)
p.start()
for batch_id in range(20):
    work()
    p.step()
p.stop()
"""
        names: dict[str, Any] = {"profiler": paddle, "work": work}
        exec(lines, names)
        text = capsys.readouterr().out
        assert names["p"].failures == 0
        assert calls_of(text, "work") == 11
        assert "4 steps timed, the first 10 skipped" in text
        (path,) = Path("profiler_demo").iterdir()
        assert sum(span.site.name == "work" for span in chrome.load(path)[0].spans) == 11
        with pytest.raises(StateError, match="no session runs"):
            instrument.session()

    def test_the_cost_of_the_steps_is_printed_when_a_loop_that_is_only_timed_stops(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        p = paddle.Profiler(timer_only=True)
        p.start()
        for _ in range(12):
            p.step(num_samples=4)
        assert capsys.readouterr().out == ""
        p.stop()
        p.stop()
        assert capsys.readouterr().out.count("2 steps timed, the first 10 skipped") == 1

    def test_a_forked_child_prints_nothing_of_its_parents_loop(self) -> None:
        program = """
import os
from instrument.compat import paddle
p = paddle.Profiler()
p.start()
for _ in range(12):
    p.step()
if os.fork():
    os.wait()
p.stop()
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout.count("2 steps timed, the first 10 skipped") == 1

    def test_options_that_are_not_recorded_are_reported_once(
        self, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
    ) -> None:
        paddle._logged_notes.clear()
        session = instrument.start(loads("", environ={}))
        assert session is not None
        for _ in range(2):
            with paddle.Profiler(
                targets=[paddle.ProfilerTarget.CPU, paddle.ProfilerTarget.XPU],
                record_shapes=True,
                profile_memory=True,
                with_flops=True,
                emit_nvtx=True,
                custom_device_types=["npu"],
            ) as p:
                work()
                p.step()
        told = [record.getMessage() for record in caplog.records]
        assert [line.partition(": accepted, but not recorded; ")[0] for line in told] == [
            f"paddle.Profiler: {name}"
            for name in (
                "custom_device_types", "emit_nvtx", "profile_memory", "record_shapes", "targets: XPU", "with_flops",
            )
        ]  # fmt: skip
        assert [session.account.notes().count(line) for line in told] == [1] * 6

    def test_a_worker_names_its_files_and_the_newest_window_is_exported_as_json(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def both(prof: paddle.Profiler) -> None:
            prof.export("inside.json", format="json")

        with paddle.Profiler(
            scheduler=paddle.make_scheduler(closed=0, ready=0, record=1, repeat=2),
            on_trace_ready=[paddle.export_chrome_tracing("log", worker_name="worker0"), both],
        ) as p:
            for _ in range(2):
                work()
                p.step()
        names = [f"worker0-{os.getpid()}-{window}.json.gz" for window in range(2)]
        assert sorted(path.name for path in Path("log").iterdir()) == names
        p.export("after.json", format="json")
        for name in ("inside.json", "after.json", f"log/{names[1]}"):
            assert "work" in paddle.load_profiler_result(name).summary()
        with pytest.raises(ProfileError, match="format: found 'pb'; allowed: json, which load_profiler_result reads"):
            p.export("after.pb", format="pb")
        with pytest.raises(ProfileError, match="no protobuf is written; use export_chrome_tracing"):
            paddle.export_protobuf("log")

    def test_handlers_of_instrument_get_its_windows(self, capsys: pytest.CaptureFixture[str]) -> None:
        handlers = [instrument.print_summary(sorted_by="total"), instrument.export_chrome("log")]
        with paddle.Profiler(on_trace_ready=handlers) as p:
            work()
            p.step()
        text = capsys.readouterr().out
        assert p.failures == 0
        assert text.startswith("Window 0, steps 0 to 0")
        assert len(list(Path("log").iterdir())) == 1

    def test_targets_that_are_none_are_reported(self) -> None:
        for targets in ([], ["GPU"]):
            with pytest.raises(ProfileError, match=r"targets: found \[.*\]; allowed: a list of ProfilerTarget"):
                paddle.Profiler(targets=targets)  # type: ignore[arg-type]

    def test_a_range_is_a_context_a_decorator_and_a_pair(self) -> None:
        session = instrument.start(loads("", environ={}))
        assert session is not None
        event = paddle.RecordEvent("pair")
        event.end()
        event.begin()
        event.begin()
        event.end()
        event.end()

        @paddle.RecordEvent("decorated", paddle.TracerEventType.PythonOp)
        def add(a: int, b: int) -> int:
            return a + b

        assert add(1, b=2) == 3
        with paddle.RecordEvent("context", paddle.TracerEventType.Dataloader):
            pass
        with pytest.raises(KeyError), paddle.RecordEvent("failed"):
            raise KeyError
        spans = {span.site.name: span for span in session.trace().spans}
        assert {name: span.site.kind for name, span in spans.items()} == {
            "pair": "user", "decorated": "op", "context": "loader", "failed": "user",
        }  # fmt: skip
        assert spans["failed"].error == "KeyError"
        assert session.tally().calls == 4

    def test_ranges_that_cross_each_other_steps_and_tasks_are_neither_fatal_nor_lost(self) -> None:
        found: list[Window] = []
        a, b, c = (paddle.RecordEvent(name) for name in "abc")

        async def other() -> None:
            b.end()
            c.begin()

        with paddle.Profiler(on_trace_ready=lambda prof: found.append(prof.window)) as p:
            a.begin()
            b.begin()
            p.step()
            a.end()
            asyncio.run(other())
            p.step()
            c.end()
        names = sorted(span.site.name for span in found[0].trace.spans if span.site.kind != "step")
        assert (names, p.failures) == (["a", "b", "c"], 0)


class TestMiniCaffe:
    def test_its_states_have_the_original_messages(self) -> None:
        with pytest.raises(StateError, match="the profiler is off; call enable"):
            minicaffe.disable()
        minicaffe.open_scope("while off")
        minicaffe.close_scope()
        minicaffe.enable()
        with pytest.raises(StateError, match="the profiler is already on"):
            minicaffe.enable()
        with pytest.raises(StateError, match="this thread has no open scope to close"):
            minicaffe.close_scope()
        minicaffe.open_scope("outer")
        minicaffe.open_scope("inner")
        with pytest.raises(StateError, match="the profiler has 2 open scopes"):
            minicaffe.disable()
        minicaffe.close_scope()
        minicaffe.close_scope()
        minicaffe.disable()

    def test_the_golden_scopes_nest_as_they_did(self) -> None:
        events = json.loads((GOLDEN / "minicaffe_profile.json").read_text())["traceEvents"]
        # By time; at equal times an end comes before a begin, and inner ends before outer ones.
        events.sort(key=lambda event: (event["ts"], event["ph"] == "B", -len(event["name"])))
        minicaffe.enable()
        for event in events:
            if event["ph"] == "B":
                minicaffe.open_scope(event["name"].rpartition(":")[2])
            else:
                minicaffe.close_scope()
        minicaffe.disable()
        trace, _ = chrome.load(minicaffe.dump("profile.json"))
        assert tree_of(trace.spans) == outline(
            """
            req
              conv1
                im2col
              fc
            """
        )

    def test_a_dump_at_any_time_holds_all_windows_and_resets_nothing(self) -> None:
        minicaffe.enable()
        minicaffe.open_scope("first")
        while_open = chrome.load(minicaffe.dump("a.json"))[0]
        minicaffe.close_scope()
        minicaffe.disable()
        work()  # not recorded: the session is the profiler's own
        minicaffe.open_scope("never")
        minicaffe.enable()
        minicaffe.open_scope("second: a 'name' is \n data")
        minicaffe.close_scope()
        minicaffe.disable()
        names = {span.site.name for span in chrome.load(minicaffe.dump("b.json"))[0].spans}
        assert [(span.site.name, span.clipped) for span in while_open.spans] == [("first", True)]
        assert names == {"first", "second: a 'name' is \n data"}

    def test_a_session_that_runs_goes_on_when_the_profiler_is_off(self) -> None:
        session = instrument.start(loads("", environ={}))
        assert session is not None
        minicaffe.enable()
        minicaffe.open_scope("mine")
        minicaffe.close_scope()
        minicaffe.disable()
        minicaffe.open_scope("nothing")
        work()
        assert [row.path[-1].name for row in session.tally().iterate_totals()] == ["mine", "work"]

    def test_layers_are_recorded_by_default(self, torch: Any) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        minicaffe.enable()
        minicaffe.open_scope("forward")
        model(torch.zeros(1, 4))
        minicaffe.close_scope()
        minicaffe.disable()
        trace, _ = chrome.load(minicaffe.dump("layers.json"))
        assert tree_of(trace.spans) == outline(
            """
            forward
              Linear
              ReLU
            """
        )

    def test_a_scope_that_a_thread_left_open_at_its_end_keeps_nobody_from_switching_off(self) -> None:
        minicaffe.enable()
        thread = threading.Thread(target=minicaffe.open_scope, args=("left open",))
        thread.start()
        thread.join()
        minicaffe.disable()
        minicaffe.enable()
        with pytest.raises(StateError, match="this thread has no open scope"):
            minicaffe.close_scope()
        minicaffe.disable()

    @pytest.mark.parametrize("then", [[], [minicaffe.disable]])
    def test_the_end_of_the_session_switches_off_with_scopes_open(self, then: list[Any]) -> None:
        minicaffe.enable()
        minicaffe.open_scope("open at the end")
        instrument.stop()
        for verb in then:
            verb()
        minicaffe.enable()
        with pytest.raises(StateError, match="this thread has no open scope"):
            minicaffe.close_scope()
        minicaffe.open_scope("anew")
        minicaffe.close_scope()
        minicaffe.disable()
        names = [span.site.name for span in chrome.load(minicaffe.dump("anew.json"))[0].spans]
        assert names == ["anew"]

    def test_threads_have_scopes_of_their_own(self) -> None:
        minicaffe.enable()
        minicaffe.open_scope("here")
        told: list[str] = []

        def there() -> None:
            try:
                minicaffe.close_scope()
            except StateError as error:
                told.append(str(error))
            minicaffe.open_scope("there")
            minicaffe.close_scope()

        thread = threading.Thread(target=there)
        thread.start()
        thread.join()
        minicaffe.close_scope()
        minicaffe.disable()
        assert len(told) == 1
        assert instrument.session().tally().calls == 2
        before_ns = time.monotonic_ns()
        assert before_ns // 1000 <= minicaffe.now() <= time.monotonic_ns() // 1000


class TestSinga:
    def test_operators_are_printed_in_order_and_divide_by_the_iterations_that_were_timed(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        device = singa.Device()
        device.SetVerbosity(2)
        device.SetSkipIteration(2)
        for _ in range(5):
            with scope("conv", kind="op"):
                work()
            with scope("all_reduce", kind="comm"):
                pass
            device.EndIteration()
        device.PrintTimeProfiling()
        lines = capsys.readouterr().out.splitlines()
        assert lines[:2] == ["", "Time Profiling:"]
        assert [line.split(" : ")[0] for line in lines[2:-1]] == ["OP_ID0. conv", "OP_ID1. work", "OP_ID2. all_reduce"]
        assert all(line.endswith(" sec") for line in lines[2:-1])
        assert lines[-1] == "Timed iterations: 3"
        device.SetVerbosity(3)
        device.PrintTimeProfiling()
        assert [line.split(" : ")[0] for line in capsys.readouterr().out.splitlines()[2:-1]] == ["OP_ID2. all_reduce"]
        device.SetVerbosity(0)
        device.PrintTimeProfiling()
        assert capsys.readouterr().out == ""  # as SINGA prints it
        with pytest.raises(StateError, match="no session runs"):
            instrument.session()

    def test_verbosity_1_is_forward_and_backward_of_the_iterations_that_were_timed(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        device = singa.Device()
        device.SetVerbosity(1)
        device.SetSkipIteration(1)
        around_s = []
        for index in range(4):
            began_s = time.monotonic()
            with scope("forward", kind="phase"):
                time.sleep(0.5 if index == 0 else 0.01)
            around_s.append(time.monotonic() - began_s)
            with scope("backward", kind="phase"):
                time.sleep(0.02)
            device.EndIteration()
        device.PrintTimeProfiling()
        device.SetVerbosity(0)
        *_, forward, backward, timed = capsys.readouterr().out.splitlines()
        assert forward.startswith("Forward Propagation Time : ")
        assert backward.startswith("Backward Propagation Time : ")
        assert 0.01 <= float(forward.split()[-2]) < 1.01 * sum(around_s[1:]) / 3  # the one of 0.5 s is not timed
        assert float(backward.split()[-2]) >= 0.02
        assert timed == "Timed iterations: 3"

    @pytest.mark.parametrize("make", ["create_cuda_gpu()", "create_cuda_gpu_on(0)", "create_cpu_device()"])
    def test_the_lines_of_its_documentation_run_and_say_what_they_lack(
        self, make: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lines = f"""
dev = device.{make}
verbosity = 2
dev.SetVerbosity(verbosity)
dev.SetSkipIteration(5)
work()
dev.PrintTimeProfiling()
"""
        names: dict[str, Any] = {"device": singa, "work": work}
        exec(lines, names)
        assert capsys.readouterr().out.splitlines() == [
            "",
            "Time Profiling:",
            "Timed iterations: 0; call EndIteration() after each, or use torch; the first 5 are skipped",
        ]
        names["dev"].EndIteration()
        names["dev"].SetSkipIteration(0)
        names["dev"].PrintTimeProfiling()
        assert "OP_ID0. work : " in capsys.readouterr().out
        names["dev"].SetVerbosity(0)

    def test_a_phase_that_there_was_none_of_has_no_time(self, capsys: pytest.CaptureFixture[str]) -> None:
        device = singa.create_cuda_gpu()
        device.SetVerbosity(1)
        device.SetSkipIteration(0)
        with scope("forward", kind="phase"):
            pass
        device.EndIteration()
        device.PrintTimeProfiling()
        device.SetVerbosity(0)
        *_, forward, backward, timed = capsys.readouterr().out.splitlines()
        assert float(forward.split()[-2]) > 0
        assert (backward, timed) == ("Backward Propagation Time : - sec", "Timed iterations: 1")

    def test_next_to_a_session_that_runs_on_a_second_measurement_has_nothing_of_the_first(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        instrument.start(loads("", environ={}))
        device = singa.Device()
        device.SetSkipIteration(1)
        for name, iterations in (("first", 4), ("second", 3)):
            device.SetVerbosity(2)
            for _ in range(iterations):
                with scope(name, kind="op"):
                    pass
                device.EndIteration()
            device.PrintTimeProfiling()
            device.SetVerbosity(0)
            lines = capsys.readouterr().out.splitlines()
            assert [line.split(" : ")[0] for line in lines[2:-1]] == [f"OP_ID0. {name}"]
            assert lines[-1] == f"Timed iterations: {iterations - 1}"

    def test_bad_numbers_are_reported(self) -> None:
        with pytest.raises(ProfileError, match="SetVerbosity: found 4; allowed: 0, 1, 2, 3"):
            singa.Device().SetVerbosity(4)
        with pytest.raises(ProfileError, match="SetSkipIteration: found -1; allowed: a whole number from 0"):
            singa.Device().SetSkipIteration(-1)


class TestTheano:
    def test_a_function_has_a_profile_of_what_runs_within_its_calls(self) -> None:
        @theano.function(profile=True)
        def outer() -> None:
            work()
            work()

        outer()
        work()  # not within it
        assert (outer.profile.calls, outer.profile.call_ns > 0) == (1, True)
        lines = outer.profile.text().splitlines()
        assert lines[:2] == ["Function profiling", "=================="]
        assert re.fullmatch(r"  Message: test_compat\.py:\d+", lines[2])
        text = "\n".join(lines)
        for heading in ("Classes Report", "Ops Report", "Instances Report"):
            assert heading in text
        assert any(re.match(r"work .* 2 +1$", line) for line in lines)  # of the calls within it alone
        instrument.stop()

    def test_functions_that_share_an_object_have_one_profile_and_calls_of_one_another_count_once(self) -> None:
        both = theano.ProfileStats("both")

        @theano.function(profile=both)
        def inner() -> None:
            work()

        @theano.function(profile=both, name="other")
        def outer() -> None:
            inner()

        outer()
        inner()
        assert outer.profile is inner.profile is both
        assert both.calls == 2
        assert "  Message: both" in both.text()
        instrument.stop()

    def test_functions_that_one_place_makes_have_each_a_profile_of_its_own(self) -> None:
        def make(times: int) -> Any:
            @theano.function(profile=True)
            def step() -> None:
                for _ in range(times):
                    work()

            return step

        one, three = make(1), make(3)
        for _ in range(4):
            one()
        three()
        assert (one.profile.calls, three.profile.calls) == (4, 1)
        assert one.profile.call_ns + three.profile.call_ns == sum(
            row.totals.total_ns for row in instrument.session().tally().iterate_totals() if len(row.path) == 1
        )
        assert "step (2)" in three.profile.text()
        instrument.stop()

    def test_a_summary_is_printed_where_theano_printed_it_and_a_graph_is_refused(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        f = theano.function(profile=True)(lambda: work())
        f()
        f.profile.summary()
        assert capsys.readouterr().err == f.profile.text()
        with Path("profile.txt").open("w") as file:
            f.profile.summary(file, n_ops_to_print=1, n_apply_to_print=1)
        text = Path("profile.txt").read_text()
        assert text == f.profile.text(1, 1)
        assert text.count("(remaining 1 ") == 2  # ops and instances; the two are of one class
        assert "(remaining " not in f.profile.text()
        with pytest.raises(ProfileError, match="function: found inputs of a graph"):
            theano.function([], object(), profile=True)
        instrument.stop()

    def test_nothing_is_recorded_where_no_profile_is_asked_for_and_a_wrong_one_is_reported(self) -> None:
        assert theano.function(profile=False)(work) is work
        with pytest.raises(ProfileError, match="function: profile: found 7; allowed: True, False, a message, a Prof"):
            theano.function(profile=7)  # type: ignore[arg-type]

    def test_all_profiles_and_their_sum_are_printed_when_the_interpreter_exits(self) -> None:
        program = """
from instrument.compat import theano

@theano.function(profile="slow one")
def slow():
    sum(range(200_000))

@theano.function(profile="quick one")
def quick():
    slow()

@theano.function(profile="never called")
def never():
    pass

quick()
slow()
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stderr.index("Skipping empty Profile: never called") < done.stderr.index("Message: ")
        assert done.stderr.index("Message: slow one") < done.stderr.index("Message: quick one")
        (total,) = re.findall(r"Sum of all\(2\) printed profiles at exit", done.stderr)
        of_sum = done.stderr.partition(total)[2]
        assert "all functions" in of_sum
        assert done.stdout == ""


def migration_rows() -> list[tuple[str, list[tuple[str, str, bool]]]]:
    """The systems of the migration tables: the old line and ours of each row, and whether the old one runs."""
    tables = (Path(instrument.__file__).parent / "docs" / "migration.md").read_text()
    systems: list[tuple[str, list[tuple[str, str, bool]]]] = []
    for line in tables.partition("## From an older profiler")[2].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("|") or line.startswith("|---"):
            continue
        if not cells[0].startswith("`"):
            systems.append((cells[0], []))
            continue
        old, no = re.fullmatch(r"`([^`]+)`( \*no: [^*]+\*)?", cells[0]).groups()  # type: ignore[union-attr]
        systems[-1][1].append((old, cells[1].strip("`"), no is None))
    return systems


SYSTEMS = ["Paddle fluid", "Paddle", "SINGA", "Mini-Caffe", "Theano"]


def test_there_is_a_table_for_every_system_and_its_first_line_is_the_import() -> None:
    assert [name for name, _ in migration_rows()] == SYSTEMS
    for _, rows in migration_rows():
        assert len(rows) >= 4
        assert [index for index, (old, _, _) in enumerate(rows) if old.startswith(("from ", "import "))] == [0]


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_line_of_the_tables_runs_in_our_words(system: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"work": work, "y": work}
    for _, ours, _ in dict(migration_rows())[system]:
        exec(ours, names)
    capsys.readouterr()
    instrument.stop()


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_old_line_of_the_tables_runs_through_its_face_or_is_marked(
    system: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the face is taken of an import line. A marked line is refused, and ours replaces it."""
    names: dict[str, Any] = {"work": work, "x": object(), "y": work}
    (first, ours, _), *rows = dict(migration_rows())[system]
    face = ours.rpartition("; ")[2]
    assert face.startswith("from instrument.compat import ")
    assert first.split()[-1] == face.split()[-1]  # the same name, or the lines below would not be the old ones
    exec(face, names)
    for old, ours, runs in rows:
        if runs:
            exec(old, names)
            continue
        with pytest.raises(ProfileError):
            exec(old, names)
        exec("import instrument; from instrument import export_chrome", names)
        exec(ours, names)
    printed = capsys.readouterr()
    said = {"SINGA": "Timed iterations: 0; call EndIteration()", "Mini-Caffe": ""}.get(system, "work")
    assert said in printed.out + printed.err
    instrument.stop()


def test_switched_off_by_the_environment_the_old_calls_do_nothing_and_fail_at_nothing() -> None:
    program = """
from instrument.compat import fluid, minicaffe, paddle, singa, theano
with fluid.profiler("All", "total", "profile"):
    pass
with paddle.Profiler(scheduler=(0, 1)) as p, paddle.RecordEvent("x"):
    for _ in range(12):
        p.step()
minicaffe.enable(); minicaffe.open_scope("x"); minicaffe.close_scope(); minicaffe.disable()
assert str(minicaffe.dump("profile.json")) == "profile.json"
both = theano.ProfileStats("both")
for called in (theano.function(profile=both)(lambda: 3), theano.function(profile=both)("abc".index)):
    assert called.profile is both
assert called("c") == 2
text = both.text()
assert "Message: both" in text and "instrument is off (INSTRUMENT=off)" in text
assert both.summary(__import__("io").StringIO()) == text
assert (both.calls, both.call_ns, theano.report()) == (0, 0, "")
"""
    environ = {**os.environ, "INSTRUMENT": "off"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize("type_", ["Forward", "Backward", "Optimization"])
def test_a_phase_of_a_paddle_loop_is_a_phase_here(type_: str) -> None:
    with paddle.Profiler() as profiler, paddle.RecordEvent("part", getattr(paddle.TracerEventType, type_)):
        pass
    (span,) = (span for span in profiler.window.trace.spans if span.site.name == "part")
    assert span.site.kind == "phase"
