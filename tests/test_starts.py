"""The start of each process of a run: what it loads before it records, when it begins to, and who is not seen."""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import instrument
from instrument import native
from instrument.instrumentors import selection
from instrument.instrumentors.known_packages import FAMILIES, packages_to_await, selectable_packages
from instrument.profile import shared_profile
from instrument.profile.keys import load, loads
from instrument.runtime import lazy_imports
from instrument.sessions import autostart

SITECUSTOMIZE = Path(autostart.__file__).with_name("sitecustomize.py")
PROFILE = (
    "service: shop\nfunctions: [{match: 'engine:*'}]\n"
    "export: {recording: {path: 'traces/{pid}.npz'}, summary: {to: stderr}}\n"
)
MODULES = "import sys; print(*sys.modules)"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("INSTRUMENT")]:
        monkeypatch.delenv(name)
    Path("engine.py").write_text("def step(x): return x + 1\n")
    Path("profile.yaml").write_text(PROFILE)


def command(source: str, *options: str) -> list[str]:
    Path("main.py").write_text(textwrap.dedent(source))
    return [sys.executable, "-m", "instrument", "run", *options, "--", "main.py"]


def run(source: str, *options: str) -> subprocess.CompletedProcess[str]:
    words = command(source, *(options or ("--profile", "profile.yaml")))
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["", "serving", "training"])
def test_a_process_that_records_nothing_loads_the_import_hook_alone(preset: str) -> None:
    done = run(
        f"""
        import os, subprocess, sys
        for off in ("", "off", " FALSE"):
            environ = {{**os.environ, "INSTRUMENT": off}}
            subprocess.run([sys.executable, "-c", {MODULES!r}], env=environ)
        """,
        *(("--preset", preset) if preset else ()),
    )
    assert done.returncode == 0, done.stderr
    bare = subprocess.run([sys.executable, "-c", MODULES], capture_output=True, text=True, check=True).stdout.split()
    on, off, off_too = (set(line.split()) - {*bare} for line in done.stdout.splitlines())
    ours = {"instrument", "instrument.sessions", "instrument.sessions.autostart", autostart.__name__}
    assert on - {"__future__"} == {"sitecustomize", *ours}
    assert off | off_too <= {"sitecustomize"}


def test_a_namespace_package_is_loaded_once_a_module_of_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("space", "space/part"):
        (tmp_path / folder).mkdir()
    (tmp_path / "space" / "part" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    try:
        importlib.import_module("space")
        assert not autostart.is_package_loaded("space")
        importlib.import_module("space.part")
        assert autostart.is_package_loaded("space")
    finally:
        for name in ("space", "space.part"):
            sys.modules.pop(name, None)
    assert [autostart.is_package_loaded(name) for name in ("json", "time", "nowhere")] == [True, True, False]


@pytest.mark.slow
def test_a_process_that_records_loads_nothing_that_only_reads_writes_or_sends() -> None:
    done = run(f"""
        import subprocess, sys
        subprocess.run([sys.executable, "-c", "import engine; engine.step(1); " + {MODULES!r}])
    """)
    assert done.returncode == 0, done.stderr
    bare = subprocess.run([sys.executable, "-c", MODULES], capture_output=True, text=True, check=True).stdout.split()
    new = set(done.stdout.split()) - {*bare}
    heavy = {"numpy", "yaml", "msgspec", "opentelemetry", "asyncio", "ssl", "http", "email", "concurrent", "hypothesis"}
    assert {name.partition(".")[0] for name in new} & heavy == set()
    ours = [name for name in new if name.startswith("instrument.")]
    rooms = ("agent", "chrome.", "cli", "otlp", "proposal", "report", "instrumentors.requests", "instrumentors.copies")
    assert [name for name in ours if name.partition(".")[2].startswith(rooms)] == []
    assert len(ours) <= 130  # which only fall
    assert len(new) <= 260


@pytest.mark.slow
def test_a_later_process_takes_the_profile_and_the_costs_of_probes_from_the_first() -> None:
    """It reads YAML where the variables that the profile asked for are others here, or its file has changed."""
    Path("profile.yaml").write_text(PROFILE.replace("shop", "${SHOP_NAME:-shop}"))
    done = run("""
        import os, subprocess, sys
        code = (
            "import sys, engine; from instrument.sessions import process; "
            "session = process.session(); print(session.profile.service, 'yaml' in sys.modules, "
            "bool(session.account.costs.by_shape), session.recorded.digest)"
        )
        for more in ({}, {"SHOP_NAME": "mall"}, {}):
            print(subprocess.run([sys.executable, "-c", code], env={**os.environ, **more},
                                 capture_output=True, text=True).stdout, end="")
        file = os.environ["INSTRUMENT_PROFILE"]
        os.utime(file, (1, 1))
        print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout, end="")
    """)
    assert done.returncode == 0, done.stderr
    told = [line.split(" ", 3) for line in done.stdout.splitlines()]
    assert [line[:3] for line in told] == [
        ["shop", "False", "True"], ["mall", "True", "True"], ["shop", "False", "True"], ["shop", "True", "True"],
    ]  # fmt: skip
    assert told[0][3] == told[2][3] == told[3][3] != told[1][3]
    late = {"yaml", "instrument.instrumentors.function_rules", "instrument.instrumentors.requests.grpc"}
    code = f"import sys, fastapi, instrument; instrument.session(); print({late} & sys.modules.keys())"
    done = run(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])", "--preset", "serving")
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr


def test_a_profile_with_a_secret_is_not_handed_down_by_a_file(tmp_path: Path) -> None:
    secret = {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer x"}
    for text, environ, is_written in (
        ("service: a", {}, True),
        ("export: {otlp: }", {}, True),
        ("export: {otlp: }", secret, False),
    ):
        Path("one.yaml").write_text(text)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            consulted = shared_profile.Consulted()
            profile = load("one.yaml", environ=consulted)
            shared_profile.write_shared_profile(tmp_path / "handed", profile, consulted)
            assert shared_profile.read_shared_profile(tmp_path / "handed", "one.yaml") == (
                profile if is_written else None
            )
        (tmp_path / "handed").unlink(missing_ok=True)
    assert (
        shared_profile.read_shared_profile(tmp_path / "handed", "one.yaml")
        is shared_profile.read_shared_profile(None, "one.yaml")
        is None
    )


@pytest.mark.parametrize(
    "options", [{}, {"frozen": True}, {"slots": True}, {"frozen": True, "slots": True}, {"eq": False}]
)
def test_a_small_dataclass_is_as_one_of_the_standard_library(options: dict[str, bool]) -> None:
    def made(decorate: Any) -> Any:
        class Fact:
            name: str
            parts: list[int] = field(default_factory=list, compare=False)
            size: int = 3
            secret: str = field(default="x", repr=False)

            def __post_init__(self) -> None:
                object.__setattr__(self, "size", self.size + 1)

        Fact.__qualname__ = "Fact"
        return decorate(**options)(Fact)

    told = []
    for decorate in (lazy_imports.dataclass, dataclasses.dataclass):
        kind = made(decorate)
        firsts = [kind("a", size=1) for _ in range(lazy_imports.CALLS_BEFORE_COMPILING + 1)]
        one = firsts[0]
        assert {repr(first) for first in firsts} == {repr(one)}
        same, other = kind("a", [1], 1), dataclasses.replace(one, name="b")
        facts = [
            repr(one),
            one == same,
            one == other,
            one == 1,
            dataclasses.asdict(other),
            inspect.signature(kind).parameters.keys(),
        ]
        facts.append(hash(one) == hash(same) if kind.__hash__ else None)
        facts.append(copy.copy(one).parts == copy.deepcopy(one).parts == [])
        for attempt in (lambda one=one: setattr(one, "name", "c"), lambda one=one: delattr(one, "size"), kind):
            try:
                facts.append(attempt())
            except (dataclasses.FrozenInstanceError, TypeError) as error:
                facts.append((type(error), str(error).rpartition(".")[2]))
        told.append(facts)
    assert told[0] == told[1]


def test_a_cheap_named_tuple_is_as_one_of_the_standard_library() -> None:
    def facts_of(base: Any) -> list[Any]:
        class Part(base):  # type: ignore[misc]
            """A part."""

            name: str
            size: int = 3

            def twice(self) -> int:
                return int(self.size) * 2

        Part.__qualname__ = "Part"
        part = Part("a", size=1)
        facts = [
            part,
            repr(part),
            [Part(f"{number}") for number in range(lazy_imports.CALLS_BEFORE_COMPILING + 1)],
            Part._fields,
            Part.__match_args__,
            part._asdict(),
            part._replace(name="b").twice(),
            Part._make(["c", 4]),
            (copy.copy(part), copy.deepcopy(part)),
            hash(part),
            hasattr(part, "__dict__"),
        ]
        for attempt in (Part, lambda: Part("a", 1, 2), lambda: Part("a", name="b"), lambda: Part("a", other=1)):
            with pytest.raises(TypeError) as raised:
                attempt()
            facts.append(str(raised.value).rpartition("__new__()")[2])
        with pytest.raises((ValueError, TypeError)):
            part._replace(other=1)
        return facts

    assert facts_of(lazy_imports.NamedTuple) == facts_of(NamedTuple)


def test_every_profile_is_handed_down_whole(tmp_path: Path) -> None:
    for path in [*Path(__file__).parents[1].glob("configs/*.yaml"), Path("profile.yaml")]:
        consulted = shared_profile.Consulted()
        profile = load(path, environ=consulted)
        shared_profile.write_shared_profile(tmp_path / "handed", profile, consulted)
        read = shared_profile.read_shared_profile(tmp_path / "handed", str(path))
        assert read == profile, path
        assert repr(read) == repr(profile), path


def test_an_interrupt_ends_the_process_by_the_signal_although_the_end_imports() -> None:
    done = run(
        "import engine, os, signal; engine.step(1); os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(9)"
    )
    assert done.returncode == -signal.SIGINT
    assert list(Path("traces").glob("*.npz"))


def test_the_switch_off_is_known_before_any_import() -> None:
    off = next(
        node.value
        for node in ast.parse(SITECUSTOMIZE.read_text()).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "_OFF"  # type: ignore[attr-defined]
    )
    of_modules = next(
        node.value
        for node in ast.parse(Path(native.__file__).read_text()).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_IS_SWITCHED_OFF"
    )
    assert set(ast.literal_eval(off)) == set(ast.literal_eval(of_modules.comparators[0]))  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_session_begins_with_the_first_awaited_package_or_with_the_first_name_of_ours() -> None:
    done = run("""
        import os, subprocess, sys
        WAITS = "import sys; print('instrument.sessions.session' in sys.modules); "
        for code in ("import engine; print(engine.step(1))",
                     "import threading\\nt = threading.Thread(target=lambda: __import__('engine').step(1))\\n"
                     "t.start(); t.join()",
                     "from instrument import scope\\nwith scope('own'): pass"):
            subprocess.run([sys.executable, "-c", WAITS + "\\n" + code])
    """)
    assert (done.returncode, done.stdout) == (0, "False\n2\nFalse\nFalse\n"), done.stderr
    traces = [
        subprocess.run(
            [sys.executable, "-m", "instrument", "query", str(path), "select distinct name from spans"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for path in Path("traces").glob("*.npz")
    ]
    assert sorted(name for trace in traces for name in trace.split()[1:]) == ["own", "step", "step"]


def test_a_module_that_the_session_itself_loads_as_it_begins_is_loaded_once() -> None:
    Path("profile.yaml").write_text(PROFILE.replace("engine:*", "json:dumps"))
    done = run("""
        import subprocess, sys
        code = (
            "import json; from instrument.instrumentors import verdict; "
            "print(verdict.json is json, type(json.__spec__.loader).__name__, json.dumps.__module__)"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
    """)
    assert (done.returncode, done.stdout) == (0, "True SourceFileLoader json\n"), done.stderr


def test_a_profile_that_has_changed_since_is_not_waited_by() -> None:
    done = run("""
        import pathlib, subprocess, sys
        file = pathlib.Path("profile.yaml")
        file.write_text(file.read_text().replace("engine", "json"))
        code = "import sys; print('instrument.sessions.session' in sys.modules); import json; json.dumps(1)"
        subprocess.run([sys.executable, "-c", code])
    """)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_only_the_first_python_process_of_a_run_records() -> None:
    environ = {"INSTRUMENT_AGENT": "/nowhere/20261128T100000-7/agent.sock", "INSTRUMENT_RUN": "20261128T100000-7"}
    folder = Path("20261128T100000-7").absolute()
    folder.mkdir()
    environ["INSTRUMENT_AGENT"] = str(folder / "agent.sock")
    code = "from instrument.sessions import autostart; print(autostart._is_first_python_process())"
    told = [
        subprocess.run([sys.executable, "-c", code], env={**os.environ, **environ, "INSTRUMENT_RUN": name},
                       capture_output=True, text=True, check=True).stdout
        for name in (environ["INSTRUMENT_RUN"], environ["INSTRUMENT_RUN"], "another")
    ]  # fmt: skip
    assert told == ["True\n", "False\n", "False\n"]
    assert [path.name for path in folder.iterdir()] == [autostart.FIRST]


def test_every_package_in_which_a_rule_may_have_targets_is_awaited() -> None:
    """The table of packages is kept apart from the code of the families, which a waiting process does not load."""
    profile = loads(
        "functions: [{match: 'a.b:f'}, {match: ['c:*', 'd.e:**']}]\nrequests: auto\nlayers: [{match: '**'}]\n"
        "copies: [{directions: [h2d, d2h, d2d, p2p, h2h]}]\nloaders: auto\nphases: auto\ncomm: auto\nframeworks: auto\n"
        "startup: auto\n"
    )
    assert selectable_packages(profile, "functions") == {"a", "c", "d"}
    files = Path(selection.__file__).parent.rglob("*.py")
    named = {
        node.value
        for file in files
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    names = {
        text.partition(":")[0] for text in named if text.replace(".", "").replace(":", "").replace("_", "").isalnum()
    }
    at_work = selection.Selection(profile)
    for key in set(FAMILIES) - {"functions"}:
        family = at_work._load_family(key)
        wanted = {name.partition(".")[0] for name in names if family.may_match(name)}
        assert wanted, key
        left_out = sys.stdlib_module_names | {"opentelemetry", "uvloop"} - {"wsgiref"}
        assert wanted - left_out <= FAMILIES[key].packages, key
    for anywhere in ("**:*", "eng*:step", "__main__:main", "*.engine:f"):
        assert packages_to_await(loads(f"functions: [{{match: '{anywhere}'}}]")) is None, anywhere


def test_any_python_can_read_our_sitecustomize() -> None:
    text = SITECUSTOMIZE.read_text("ascii")
    tree = ast.parse(text, feature_version=(3, 4))
    newer = ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.Nonlocal, ast.AsyncFunctionDef, ast.Starred
    assert not [node for node in ast.walk(tree) if isinstance(node, newer)]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert not [one for one in functions if one.returns or any(argument.annotation for argument in one.args.args)]


def test_an_older_python_is_left_alone_counted_and_named() -> None:
    """A Python of today plays the older one. Others of this machine are asked, too, if there are any."""
    roots = Path.home() / ".pyenv/versions"
    olds = [str(path) for version in ("2.7", "3.6", "3.9") for path in roots.glob(f"{version}.*/bin/python")]
    old = "import runpy, sys; sys.version_info = (3, 8, 0, 'final', 0); " + f"runpy.run_path({str(SITECUSTOMIZE)!r})"
    Path("own").mkdir()
    Path("own/sitecustomize.py").write_text("print('own')\n")
    done = run(f"""
        import os, subprocess, sys
        environ = {{**os.environ, "PYTHONPATH": os.environ["PYTHONPATH"] + os.pathsep + "own"}}
        for python in {olds!r}:
            subprocess.run([python, "-c", "print('hello')"], env=environ)
        bare = {{**environ, "PYTHONPATH": "own"}}
        subprocess.run([sys.executable, "-S", "-c", {old!r}], env=bare)
        sys.path.append({str(SITECUSTOMIZE.parents[3])!r})
        from instrument import scope
        with scope("main"): pass
    """)
    assert done.returncode == 0
    assert "Error" not in done.stderr
    assert done.stdout == "own\nhello\n" * len(olds) + "own\n"
    assert "Python 3.8" in summary_of(done)
    assert [version for version in ("2.7", "3.6", "3.9") if f"Python {version}" not in summary_of(done)] == [
        version for version in ("2.7", "3.6", "3.9") if not list(roots.glob(f"{version}.*/bin/python"))
    ]


def summary_of(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join(done.stderr.split())


def test_processes_that_python_isolates_are_counted_and_named() -> None:
    """They live until the agent has seen them, as `instrument ps` says."""
    service = subprocess.Popen(
        command(
            """
            import os, subprocess, sys
            from instrument import scope
            with scope("main"): pass
            code = "input()"
            ways = (["-I"], None), (["-Es"], None), (["-X", "utf8", "-S"], None), ([], {"PATH": os.environ["PATH"]})
            off = [], {**os.environ, "INSTRUMENT": "off", "PYTHONPATH": ""}
            seen = ["-u", "-W", "ignore"], None
            installed = [], {**os.environ, "PYTHONPATH": "/elsewhere/instrument/sessions/autostart"}
            all = [subprocess.Popen([sys.executable, *flags, "-c", code], env=env, stdin=subprocess.PIPE)
                   for flags, env in (*ways, off, seen, installed)]
            input()
            for one in all: one.communicate(b"\\n")
            """,
            "--profile",
            "profile.yaml",
        ),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    told = "4 Python processes of this run were not seen: -E; -I; -S; its own environment"
    end = time.monotonic() + 120
    while time.monotonic() < end:
        words = [sys.executable, "-m", "instrument", "ps", str(service.pid), "--json"]
        asked = subprocess.run(words, capture_output=True, text=True, check=False)
        if asked.returncode == 0 and json.loads(asked.stdout)["runs"][0]["unseen"] == told:
            break
    _, errors = service.communicate("\n", timeout=240)
    assert told in " ".join(errors.split())


def test_the_names_of_the_package_are_loaded_as_they_are_asked_for() -> None:
    code = f"{MODULES.replace('sys.modules', 'sorted(sys.modules)')}; import instrument; {MODULES}"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    before, after = (set(line.split()) for line in done.stdout.splitlines())
    assert after - before <= {"__future__", "instrument"}
    from instrument.recorder import api as scopes

    assert instrument.scope is scopes.scope
