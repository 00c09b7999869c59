"""Functions of the module that runs as `__main__`: reached under `instrument run`, and the program stays as it is."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest

from instrument.runtime.main_module import plan_report_lines

PROGRAM = '''\
"""What the program says of itself."""
from __future__ import annotations
import inspect, json, pickle, sys, traceback

TABLE = {}

def register(function):
    TABLE[function.__name__] = function
    return function

@register
def handle(x):
    return x * 2

def step(x):
    return handle(x) + 1

class Engine:
    def run(self, count):
        return [step(i) for i in range(count)]

def fail(x):
    raise ValueError(x)

def traced():
    monitoring = getattr(sys, "monitoring", None)
    return [sys.gettrace(), sys.getprofile(), monitoring and [monitoring.get_tool(tool) for tool in range(6)]]

if __name__ == "__main__":
    own = sys.modules["__main__"]
    print(Engine().run(3), own.__doc__, __name__, __file__, sys.argv, sys.path[0], own.__dict__ is globals())
    print(type(__loader__), __spec__ and (__spec__.name, type(__spec__.loader)), __package__, sorted(globals()))
    print(traced(), pickle.loads(pickle.dumps(step))(1), inspect.getsource(step), inspect.signature(step))
    traceback.print_stack(file=sys.stdout)
    fail("at the end")
'''
CALLS = {"register": 1, "handle": 4, "step": 4, "Engine.run": 1, "fail": 1, "traced": 1}
WAYS = {"script": ["script.py"], "module": ["-m", "pkg.tool"], "folder": ["folder"], "zip": ["packed.zip"]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the program in each of the ways in which Python takes one."""
    monkeypatch.chdir(tmp_path)
    for name in ("INSTRUMENT_PROFILE", "INSTRUMENT", "INSTRUMENT_RUN_PID", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    for name in ("script.py", "pkg/__init__.py", "pkg/tool.py", "folder/__main__.py"):
        write(name, PROGRAM if "__init__" not in name else "")
    with zipfile.ZipFile("packed.zip", "w") as packed:
        packed.write("folder/__main__.py", "__main__.py")
    return tmp_path


def write(name: str, text: str) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(textwrap.dedent(text))


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=240, check=False)


def checked(profile: str, *words: str) -> tuple[dict[str, int | None], dict[str, Any]]:
    """The calls by target of a program that ran under `instrument check`, and the whole document."""
    write("p.yaml", profile)
    done = run("-m", "instrument", "check", "--json", "p.yaml", "--", *words)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    targets = [target for rule in document["rules"] for target in rule["targets"]]
    return {target["target"]: target["calls"] for target in targets if target["target"]}, document


RULES = 'functions: [{{match: ["{0}:*", "{0}:Engine.*"]}}]\nexport: {{summary: {{to: ./s.txt}}}}'


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] * (way in ("folder", "zip"))) for way in WAYS]
)
def test_a_program_is_recorded_and_is_the_same_to_itself_and_in_its_tracebacks(way: str) -> None:
    plain = run(*WAYS[way])
    write("p.yaml", RULES.format("__main__"))
    done = run("-m", "instrument", "run", "--profile", "p.yaml", "--", *WAYS[way])
    assert "ValueError: at the end" in plain.stderr
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)
    assert done.stderr == plain.stderr
    calls, document = checked(RULES.format("__main__"), *WAYS[way])
    assert calls == {f"__main__:{name}": count for name, count in CALLS.items()}
    states = {target["target"]: target["state"] for rule in document["rules"] for target in rule["targets"]}
    assert states == {f"__main__:{name}": "partly" if name == "handle" else "attached" for name in CALLS}


@pytest.mark.slow
def test_a_module_that_is_run_by_its_name_is_reached_by_that_name_too() -> None:
    calls, _ = checked(RULES.format("pkg.tool"), *WAYS["module"])
    assert calls == {f"pkg.tool:{name}": count for name, count in CALLS.items()}
    plain = run(*WAYS["module"])
    done = run("-m", "instrument", "run", "--profile", "p.yaml", "--", *WAYS["module"])
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)


def test_a_function_of_the_program_that_is_not_there_is_named_next_to_those_that_are() -> None:
    write("p.yaml", "functions: [{match: ['__main__:step', '__main__:gone']}]")
    done = run("-m", "instrument", "check", "p.yaml", "--", *WAYS["script"])
    assert done.returncode == 2
    assert "__main__:gone: not found (matched no function" in done.stderr


def test_nothing_watches_a_program_that_no_rule_means() -> None:
    source = (
        "import sys\nprint(sys.gettrace(), hasattr(sys, 'monitoring') and sys.monitoring.get_tool(4))\ndef f(): pass"
    )
    write("early.py", source)
    write("p.yaml", 'functions: [{match: "json:dumps"}]')
    done = run("-m", "instrument", "run", "--profile", "p.yaml", "--", "early.py")
    assert done.stdout == run("early.py").stdout
    write("p.yaml", 'functions: [{match: "__main__:f"}]')
    watched = run("-m", "instrument", "run", "--profile", "p.yaml", "--", "early.py")
    assert watched.stdout != done.stdout  # so the test would see it


def test_no_trace_function_slows_what_the_program_imports_and_all_its_functions_are_recorded() -> None:
    write("slow_import.py", "import sys, colorsys\nTRACES = [sys.gettrace(), colorsys.__spec__.loader.__class__]\n")
    write("broken.py", "import sys\nTRACES = sys.gettrace()\nraise ImportError(repr(TRACES))\n")
    source = """
    import slow_import
    def early(): return 1
    early()
    try:
        import broken
    except ImportError as error:
        why = str(error)
    def late(): return 2
    late()
    print(slow_import.TRACES, why, slow_import.__spec__.loader.__class__, slow_import.__loader__.__class__)
    """
    write("importing.py", source)
    plain = run("importing.py")
    write("p.yaml", RULES.format("__main__"))
    done = run("-m", "instrument", "run", "--profile", "p.yaml", "--", "importing.py")
    assert (done.stdout, done.returncode) == (plain.stdout, 0)
    assert checked(RULES.format("__main__"), "importing.py")[0] == {"__main__:early": 1, "__main__:late": 1}


CHILDREN = """
import multiprocessing, sys

def handle(x): return x + 1

class Worker:
    def work(self, queue): queue.put(handle(41))

def child(queue): Worker().work(queue)

def main():
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    assert queue.get() == 42
    process.join()

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("fork", ["many.py"]),
        pytest.param("spawn", ["many.py"], marks=pytest.mark.slow),
        ("spawn", ["-m", "pkg.many"]),
        ("forkserver", ["many.py"]),
    ],
)
def test_children_that_multiprocessing_starts_are_reached_by_the_same_rule(method: str, words: list[str]) -> None:
    write("many.py", CHILDREN)
    write("pkg/many.py", CHILDREN)
    calls, _ = checked('functions: [{match: ["__main__:*", "__main__:Worker.*"]}]', *words, method)
    assert calls == {f"__main__:{name}": 1 for name in ("handle", "child", "main", "Worker.work")}


@pytest.mark.slow
def test_a_spawned_child_that_starts_a_session_late_records_by_the_names_of_its_main_module() -> None:
    """Its functions look names up in the globals that `runpy` gave them; the module has a copy."""
    write("engine.py", "def serve(): pass")
    write("own.yaml", "functions: [{match: ['engine:*', '__main__:*']}]")
    write(
        "late.py",
        """
        import instrument, multiprocessing
        from engine import serve
        def child(queue):
            session = instrument.start("own.yaml")
            serve()
            helper()
            queue.put(sorted(row.path[-1].name for row in session.tally().iterate_totals()))
        def helper(): serve()
        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            print(queue.get(timeout=240))
            process.join()
        """,
    )
    done = run("late.py")
    assert done.stdout == "['helper', 'serve', 'serve']\n", done.stderr


def test_a_session_that_the_program_starts_itself_reaches_what_it_defines_later() -> None:
    write(
        "own.py",
        """
        import instrument
        def before(): pass
        instrument.start("own.yaml")
        def after(): return before()
        class Late:
            def method(self): return after()
        before(); after(); Late().method()
        instrument.stop()
        """,
    )
    write(
        "own.yaml",
        'functions: [{match: ["__main__:*", "__main__:Late.*"]}]\nexport: {summary: {to: ./s.txt, views: [events]}}',
    )
    done = run("own.py")
    assert done.returncode == 0, done.stderr
    report = Path("s.txt").read_text()
    for name, calls in (("before", 3), ("after", 2), ("Late.method", 1)):
        rows = [line.split() for line in report.splitlines() if line.split()[:1] == [name]]
        assert sum(int(row[1]) for row in rows) == calls, report


def test_functions_found_too_late_are_out_of_reach_and_the_verdict_has_the_remedy() -> None:
    write("p.yaml", 'functions: [{match: "__main__:f"}]')
    done = run("-m", "instrument", "check", "p.yaml", "--", "-c", "def f(): pass\nf()")
    assert "__main__:f: unreachable (__main__ defined it where nobody looked" in done.stdout
    assert "@profiled" in done.stdout


def test_a_misspelt_function_of_the_program_names_the_nearest() -> None:
    write("p.yaml", 'functions: [{match: "__main__:stpe"}]')
    done = run("-m", "instrument", "check", "p.yaml", "--", *WAYS["script"])
    assert done.returncode == 2
    assert "nearest is __main__:step" in done.stderr


def test_check_without_a_command_says_how_the_program_is_checked() -> None:
    write("p.yaml", 'functions: [{match: "__main__:main"}]')  # `instrument check` has a function of that name itself
    done = run("-m", "instrument", "check", "p.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert "__main__:main: waiting (__main__ is the program that runs; instrument check P -- script.py" in done.stdout


@pytest.mark.parametrize(
    ("source", "stops", "last"),
    [
        ("import os\nX = 1\ndef f():\n    pass\nf()\n", {5}, 4),
        ("def f(): pass\n@f\ndef g(): pass\n", {2, 3}, 3),
        ("@app.get\ndef g(): pass\n", set(), 2),
        ("def f(): pass\nclass A:\n    x = f()\n", {2}, 3),
        ("def f(): pass\ndef g(x=f()): pass\n", {2}, 2),
        ("def f(): pass\nif X:\n    def g(): pass\n    g()\nelse:\n    f(\n      1)\n", {2, 4, 6, 7}, 3),
        ("def f(): pass\nf2 = jit(f)\nloss = f2()\n", {2, 3}, 2),
        ("f = lambda: 1\ntry:\n    f()\nexcept E:\n    g()\nfinally:\n    h()\n", {1, 2, 3, 5, 7}, 1),
        ("def f(): pass\nfor x in y:\n    f()\n", {2, 3}, 1),
    ],
)
def test_new_names_are_reported_right_before_what_may_call_them(source: str, stops: set[int], last: int) -> None:
    plan = plan_report_lines(ast.parse(source))
    assert (set(plan.stops), plan.last) == (stops, last)


BY_VALUE = """
import asyncio, sys
import cloudpickle

def handle(x): return x + 1
async def wait(x): return x + 1
def items(x): yield handle(x)
async def stream(x): yield x + 1

class Model:
    def run(self, x): return handle(x)

async def collect(source): return [item async for item in source]

def main():
    things = [handle, wait, items, stream, Model]
    with open("things.pickle", "wb") as file:
        file.write(cloudpickle.dumps(things))

if __name__ == "__main__":
    main()
"""
LOADED = """
import asyncio, pickle, sys
handle, wait, items, stream, Model = pickle.load(open("things.pickle", "rb"))
async def collect(source): return [item async for item in source]
print(handle(1), asyncio.run(wait(1)), list(items(1)), asyncio.run(collect(stream(1))), Model().run(1))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        "",
        ", attributes: {argument: x, record: value}",
        ", key: {argument: x, cut: '-[0-9]$'}",
        ", batch: {argument: 'x[]', cut: '-[0-9]$'}",
    ],
)
def test_functions_that_are_pickled_by_value_go_to_another_process_as_they_would(more: str) -> None:
    pytest.importorskip("cloudpickle")
    write("value.py", BY_VALUE)
    write("other.py", LOADED)
    match = [f"__main__:{name}" for name in ("handle", "wait", "items", "stream", "Model.run")]
    rules = f"functions: [{{match: {match}{more}}}]"
    write("p.yaml", f"{rules}\nexport: {{summary: {{to: ./s.txt}}}}")
    done = run("-m", "instrument", "run", "--profile", "p.yaml", "--", "value.py")
    assert (done.returncode, done.stderr) == (0, "")
    done = run("other.py")
    assert (done.stdout, done.stderr) == ("2 2 [2] [2] 2\n", "")
