"""NVTX ranges: a tool in C that is attached to a service hears of its spans from the real `nvtx`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest

import instrument

SOURCE = Path(__file__).with_name("fake_nvtx_tool.c")
ROOT = Path(instrument.__file__).parent.parent

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("gcc") is None, reason="no gcc to build a tool with"),
]

PROGRAM = """
import asyncio, sys, threading
import instrument
from instrument import profiled, scope
from instrument.sessions.process import start

session = start({profile!r})
{body}
instrument.stop()
"""


class Call(NamedTuple):
    pid: int
    name: str
    number: int
    domain: str
    category: int
    message: str


class Heard(NamedTuple):
    """The calls that a tool has heard of from a program."""

    calls: list[Call]
    output: str

    def of(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]

    def tree(self) -> str:
        """The ranges of the process that has any first, in the order of their starts, each below those then open."""
        lines, open_ranges = [], []
        pid = next(call.pid for call in self.calls if call.name == "start")
        for call in self.calls:
            if call.pid != pid:
                continue
            if call.name == "start":
                lines.append(f"{'  ' * len(open_ranges)}{call.message}")
                open_ranges.append(call.number)
            elif call.name == "end":
                open_ranges.remove(call.number)
        assert not open_ranges, "a range was not ended"
        return "\n".join(lines)


@pytest.fixture(scope="session")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("tool") / "libtool.so"
    command = ["gcc", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", target, SOURCE]
    subprocess.run(command, check=True)
    return target


Hear = Callable[..., Heard]


@pytest.fixture
def hear(tool: Path, tmp_path: Path) -> Hear:
    """Runs a program under a profile with the tool attached; what it has heard."""

    def run(body: str, profile: str = "functions: []", **environ: str | None) -> Heard:
        path = tmp_path / "profile.yaml"
        path.write_text(profile)
        text = PROGRAM.format(profile=str(path), body=dedent(body))
        told = tmp_path / "told"
        wanted: dict[str, str | None] = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "NVTX_INJECTION64_PATH": str(tool),
            "FAKE_NVTX_TOOL": str(told),
            **environ,
        }
        done = subprocess.run(
            [sys.executable, "-c", text],
            env={name: value for name, value in wanted.items() if value is not None},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        calls = []
        for line in told.read_text().splitlines() if told.exists() else []:
            pid, name, number, domain, category, message = line.split("\t")
            calls.append(Call(int(pid), name, int(number), domain, int(category), message))
        return Heard([call for call in calls if call.domain == "instrument"], done.stdout)

    pytest.importorskip("nvtx")
    return run


def test_spans_are_ranges_in_the_category_of_their_kind(hear: Hear) -> None:
    heard = hear(
        """
        @profiled("embed", kind="op")
        def embed(): pass

        for _ in range(3):
            with scope("request", kind="request"):
                embed()
                with scope("decode", phase="compute"):
                    embed()
        """
    )
    assert heard.tree() == "\n".join(3 * ["request", "  embed", "  decode", "    embed"])
    categories = {call.category: call.message for call in heard.of("category")}
    assert [categories[call.category] for call in heard.of("start")[:4]] == ["request", "op", "phase", "op"]
    assert Counter(call.message for call in heard.of("string")) == {"request": 1, "embed": 1, "decode": 1}
    assert not heard.of("push")


def test_ranges_do_not_need_device_time(hear: Hear) -> None:
    heard = hear("with scope('work', device=True): pass", "state: CPU\ndevice: {cuda: off}\n")
    assert heard.tree() == "work"


def test_ranges_end_with_calls_that_raise(hear: Hear) -> None:
    heard = hear(
        """
        @profiled("fails")
        def fails():
            with scope("inner"):
                raise ValueError

        for error in (ValueError, KeyError):
            try:
                with scope("outer"):
                    fails()
            except ValueError:
                pass
        """
    )
    assert heard.tree() == "\n".join(2 * ["outer", "  fails", "    inner"])


def test_a_generator_has_a_range_for_each_step(hear: Hear) -> None:
    heard = hear(
        """
        @profiled("tokens")
        def tokens():
            for number in range(2):
                with scope("decode"):
                    pass
                yield number

        for token in tokens():
            with scope("send"):
                pass
        """
    )
    assert heard.tree() == "\n".join(["tokens", "  decode", "send", "tokens", "  decode", "send", "tokens"])


def test_a_generator_that_is_left_behind_leaves_no_range(hear: Hear) -> None:
    heard = hear(
        """
        @profiled("tokens")
        def tokens():
            yield 1
            yield 2

        for token in tokens():
            break
        """
    )
    assert heard.tree().splitlines()[0] == "tokens"


def test_an_async_generator_has_a_range_for_each_step(hear: Hear) -> None:
    heard = hear(
        """
        @profiled("stream")
        async def stream():
            for number in range(2):
                yield number

        async def main():
            async for _ in stream():
                with scope("send"):
                    await asyncio.sleep(0)

        asyncio.run(main())
        """
    )
    assert heard.tree() == "\n".join(["stream", "send", "stream", "send", "stream"])


def test_ranges_of_tasks_and_threads_cross_each_other(hear: Hear) -> None:
    """Ranges by push and pop may not cross, and the tool refuses them."""
    heard = hear(
        """
        @profiled("serve")
        async def serve(turns):
            for _ in range(turns):
                await asyncio.sleep(0)

        async def main():
            await asyncio.gather(*(serve(turns) for turns in (1, 2, 3)))

        asyncio.run(main())
        instrument.scope_start("handed over")
        with scope("meanwhile"):
            thread = threading.Thread(target=lambda: profiled("work")(lambda: None)())
            thread.start()
            thread.join()
        instrument.scope_end("handed over")
        """
    )
    tree = ["serve", "  serve", "    serve", "handed over", "  meanwhile", "    work"]
    assert heard.tree() == "\n".join(tree)
    started = [call.number for call in heard.of("start") if call.message == "serve"]
    ended = [call.number for call in heard.of("end") if call.number in started]
    assert ended == started, "the first to begin was the first to end"


@pytest.mark.slow
def test_a_layer_has_its_path_and_torch_needs_no_device(hear: Hear) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    heard = hear(
        """
        import torch

        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        model(torch.zeros(1, 2))
        """,
        "layers:\n  - type: [Linear, ReLU]\n    device: true\n",
    )
    assert heard.tree() == "0\n1"


def test_device_timing_continues_for_spans_that_ask_for_it(hear: Hear) -> None:
    heard = hear(
        """
        told = []

        class Pair:
            def __init__(self, site): self.site = site
            def pause(self): told.append(f"{self.site.name} pauses")
            def resume(self): told.append(f"{self.site.name} resumes")
            def end(self, ring, index, span_id, start_ns, end_ns): told.append(f"{self.site.name} ends")

        session.recorded.timing._ranges.set_device_timer(
            lambda site, attributes, span_id: told.append(site.name) or Pair(site)
        )

        @profiled("tokens", device=True)
        def tokens():
            yield 1

        with scope("host alone"), scope("forward", device=True):
            list(tokens())
        print(*told, sep=", ")
        """
    )
    assert heard.output == "forward, tokens, tokens pauses, tokens resumes, tokens pauses, tokens ends, forward ends\n"
    assert heard.tree() == "\n".join(["host alone", "  forward", "    tokens", "    tokens"])


def test_a_name_is_data(hear: Hear) -> None:
    heard = hear(
        r"""
        for name in ("größe", "a/b%s", "half \ud800"):
            with scope(name):
                pass
        """
    )
    assert heard.tree() == "größe\na/b%s\nhalf \\ud800"


def test_a_tool_keeps_a_bounded_number_of_names(hear: Hear) -> None:
    heard = hear(
        """
        import instrument.device.timing

        instrument.device.timing.KNOWN_SITES = 3
        for number in range(10):
            with scope(f"scope {number}", kind="op"):
                pass
        """
    )
    assert heard.tree().splitlines() == [*(f"scope {number}" for number in range(3)), *7 * ["(more sites of kind op)"]]
    assert len(heard.of("string")) == 4


def test_stopping_gives_the_recorder_back_as_it_was(hear: Hear) -> None:
    heard = hear(
        """
        from instrument.recorder.recorder import RECORDER

        print(RECORDER.watches_all)
        held = scope("open at the stop")
        held.__enter__()
        instrument.stop()
        print(RECORDER.watches_all, RECORDER.begin_device)
        held.__exit__(None, None, None)
        with scope("after"):
            pass
        """
    )
    assert heard.output == "True\nFalse None\n"
    assert heard.tree() == "open at the stop"


def test_a_second_session_has_its_ranges(hear: Hear) -> None:
    heard = hear(
        """
        with scope("first"):
            pass
        instrument.stop()
        start(session.profile)
        with scope("second"):
            pass
        """
    )
    assert heard.tree() == "first\nsecond"


def test_a_forked_child_ends_its_own_ranges_alone(hear: Hear) -> None:
    heard = hear(
        """
        import os

        with scope("parent"):
            pid = os.fork()
            if pid == 0:
                with scope("child"):
                    pass
        if pid == 0:
            instrument.stop()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        """
    )
    assert heard.tree() == "parent"
    (child,) = {call.pid for call in heard.calls} - {heard.of("domain")[0].pid}
    assert [(call.name, call.message) for call in heard.calls if call.pid == child and call.name != "string"] == [
        ("start", "child"),
        ("end", ""),
    ]


ASK = """
from instrument.recorder.recorder import RECORDER

with scope("work"):
    pass
print("nvtx" in sys.modules, RECORDER.watches_all, RECORDER.begin_device)
print([note for note in session.notes() if "NVTX" in note])
"""


@pytest.mark.parametrize("path", [None, ""], ids=["unset", "empty"])
def test_without_a_tool_nothing_is_imported_and_nothing_recorded(hear: Hear, path: str | None) -> None:
    heard = hear(ASK, NVTX_INJECTION64_PATH=path)
    assert heard.output == "False False None\n[]\n"
    assert not heard.calls


def test_a_tool_that_cannot_be_loaded_costs_no_ranges(hear: Hear) -> None:
    heard = hear(ASK, NVTX_INJECTION64_PATH="/nowhere/tool.so")
    assert heard.output == "True False None\n[]\n"
    assert not heard.calls


def test_without_the_package_a_note_says_what_to_install(hear: Hear, tmp_path: Path) -> None:
    (tmp_path / "nvtx.py").write_text("raise ModuleNotFoundError(\"No module named 'nvtx'\", name='nvtx')")
    heard = hear(ASK, PYTHONPATH=f"{tmp_path}:{ROOT}")
    flags, notes = heard.output.splitlines()
    assert flags == "False False None"
    assert notes == repr(
        [
            "no NVTX ranges, though NVTX_INJECTION64_PATH names a tool: ModuleNotFoundError: No module named 'nvtx'; "
            "install instrument-sdk[nvtx]"
        ]
    )
