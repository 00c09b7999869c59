"""The house: imports point down, names mean one thing, the public names are these, and importing starts nothing."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import tomllib

import instrument

ROOT = Path(instrument.__file__).parent
PROJECT = ROOT.parent

FLOORS: list[set[str]] = [
    {"docs", "native", "runtime"},
    {"profile", "recording"},
    {"recorder", "trace"},
    {"device", "instrumentors"},
    {"chrome", "otlp", "proposal", "report"},
    {"agent", "sessions"},
    {"cli", "compat", "fleet"},
]
"""The rooms, from the lowest floor up. A room that does not stand yet has its place all the same."""

BENEATH, ABOVE = {"errors", "clock"}, {"", "__main__"}
"""The modules of the root itself: all others may import the first two, and none imports the last two."""

MODULES = sorted(path.relative_to(ROOT).with_suffix("") for path in ROOT.rglob("*.py"))


def dotted(module: Path) -> str:
    """The name of a module below the package, "" for the package itself."""
    return ".".join(module.parts[:-1] if module.name == "__init__" else module.parts)


NAMES = {dotted(module): module for module in MODULES}


def room(name: str) -> str:
    return name.partition(".")[0]


def floor(name: str) -> int:
    """The floor of a room, or of a module of the root."""
    if name in BENEATH:
        return -1
    if name in ABOVE:
        return len(FLOORS)
    return next(index for index, rooms in enumerate(FLOORS) if name in rooms)


def imported(module: Path) -> set[str]:
    """The modules of the package that one imports, anywhere in it, also for types alone."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / module).with_suffix(".py").read_text("utf-8"))):
        if isinstance(node, ast.Import):
            told = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            told = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        for source, name in told:
            first, _, below = source.partition(".")
            if first != "instrument":
                continue
            inner = f"{below}.{name}" if below and name else below or name
            if inner in NAMES:
                found.add(inner)
            elif below == "native" and name.startswith("_"):
                continue  # built of C, and optional: it imports nothing
            elif below.startswith("native._"):
                continue
            else:
                assert below in NAMES, f"{module}: imports instrument.{below}, which is no module"
                found.add(below)
    return found - {dotted(module)}


IMPORTED = {name: imported(module) for name, module in NAMES.items()}


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name or "instrument")
def test_imports_point_strictly_down(name: str) -> None:
    for other in IMPORTED[name]:
        if room(other) != room(name):
            assert floor(room(other)) < floor(room(name)), f"{name} imports {other or 'instrument'}"


def test_no_module_of_the_house_imports_itself_by_way_of_others() -> None:
    left = {name: set(others) for name, others in IMPORTED.items()}
    while done := {name for name, others in left.items() if not others}:
        left = {name: others - done for name, others in left.items() if name not in done}
    in_circle = set(left)
    while outside := {name for name in in_circle if not any(name in left[other] for other in in_circle)}:
        in_circle -= outside  # they only use what lies in one
    assert in_circle == set()


def test_every_room_has_a_floor_and_the_root_holds_what_a_user_types() -> None:
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= set().union(*FLOORS)
    files = {path.name for path in ROOT.iterdir() if path.is_file()}
    assert files == {"__init__.py", "__main__.py", "errors.py", "clock.py", "py.typed"}


def test_no_two_modules_have_one_name() -> None:
    """A name in a traceback, a search or a comment is then one place."""
    named = defaultdict(list)
    for name in NAMES:
        named[name.rpartition(".")[2]].append(name)
    # What a room is named after may bear the room's name: recorder.recorder.
    twice = {base: names for base, names in named.items() if len(names) > 1 and set(names) != {base, f"{base}.{base}"}}
    assert twice == {}


def test_no_two_public_classes_have_one_name() -> None:
    """But for the older profilers, whose names those of `compat` are."""
    named: dict[str, set[str]] = defaultdict(set)
    for name, module in NAMES.items():
        text = (ROOT / module).with_suffix(".py").read_text("utf-8") if room(name) != "compat" else ""
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                named[node.name].add(name)
    assert {one: modules for one, modules in named.items() if len(modules) > 1} == {}


def test_no_room_or_module_of_the_root_bears_a_public_name() -> None:
    """Python puts a room into the package under its name as soon as it is imported, over what stood there."""
    assert {room(name) for name in NAMES} & set(instrument.__all__) == set()


def test_every_source_in_c_is_in_one_room() -> None:
    sources = [path for path in ROOT.rglob("*") if path.suffix in (".c", ".h")]
    assert sources
    assert {path.parent for path in sources} == {ROOT / "native"}


def included(source: Path) -> set[Path]:
    """The headers of ours that a source in C includes, and those that they include."""
    found = {source.parent / name for name in re.findall(r'(?m)^#include "(.+)"', source.read_text("utf-8"))}
    return found.union(*map(included, found))


def test_included_sources_of_an_extension_are_shipped_and_trigger_its_build() -> None:
    settings = tomllib.loads((PROJECT / "pyproject.toml").read_text("utf-8"))
    for extension in settings["tool"]["setuptools"]["ext-modules"]:
        wanted = set().union(*(included(PROJECT / source) for source in extension["sources"]))
        assert {PROJECT / header for header in extension.get("depends", ())} == wanted, extension["name"]


def test_every_folder_is_shipped() -> None:
    wanted = {".".join(["instrument", *module.parts[:-1]]) for module in MODULES}
    settings = tomllib.loads((PROJECT / "pyproject.toml").read_text("utf-8"))
    assert set(settings["tool"]["setuptools"]["packages"]) == wanted


def test_every_file_next_to_the_modules_is_shipped() -> None:
    data = tomllib.loads((PROJECT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["package-data"]
    for path in ROOT.rglob("*"):
        if path.is_dir() or path.suffix in (".py", ".pyc", ".so", ".c", ".h"):
            continue
        folders = ["instrument", *path.parent.relative_to(ROOT).parts]
        packages = [".".join(folders[:count]) for count in range(1, len(folders) + 1)]
        assert any(path.match(kind) for package in packages for kind in data.get(package, ())), path


CONTRIBUTING = PROJECT / ".github" / "CONTRIBUTING.md"


def test_files_named_for_contributors_exist() -> None:
    text = CONTRIBUTING.read_text("utf-8")
    told = set(re.findall(r"`((?:instrument|tests|configs|examples|\.ci|\.github)/[\w./*-]*)`", text))
    assert len(told) > 40
    assert [path for path in sorted(told) if not list(PROJECT.glob(path.rstrip("/")))] == []
    assert "(.github/CONTRIBUTING.md)" in (PROJECT / "README.md").read_text("utf-8")


def test_contributors_are_shown_every_room() -> None:
    text = CONTRIBUTING.read_text("utf-8")
    rooms = {room(name) for name in NAMES} - BENEATH - ABOVE
    drawn = re.findall(r"(?ms)^```text\n(.*?floor 7.*?)^```", text)
    assert len(drawn) == 1
    assert rooms <= set(re.findall(r"([a-z]+)/", drawn[0]))
    floors = [line for line in drawn[0].splitlines() if line.startswith("floor")]
    assert [set(re.findall(r"([a-z]+)/", line.partition("  #")[0])) for line in reversed(floors)] == FLOORS


def test_public_names_stay_what_they_are_after_all_modules_are_imported() -> None:
    program = (
        "import importlib, sys, instrument\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(*(name for name in instrument.__all__ if type(getattr(instrument, name)).__name__ == 'module'))"
    )
    rooms = [f"instrument.{name}" for name in NAMES if name and "." not in name and name != "__main__"]
    done = subprocess.run([sys.executable, "-c", program, *rooms], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")


def test_the_public_names_are_these() -> None:
    assert instrument.__all__ == [
        "ExportError",
        "InstrumentError",
        "LoadedTrace",
        "ProfileError",
        "Profiler",
        "Session",
        "StateError",
        "TargetError",
        "TraceError",
        "annotate",
        "annotate_request",
        "bind",
        "compare",
        "counter",
        "disable",
        "dump",
        "enable",
        "export_chrome",
        "export_otlp",
        "flush",
        "gauge",
        "histogram",
        "inject",
        "load",
        "loader",
        "print_summary",
        "profiled",
        "prometheus",
        "reload",
        "rename_span",
        "schedule",
        "scope",
        "scope_end",
        "scope_start",
        "session",
        "set_status",
        "start",
        "stop",
        "summary",
    ]
    for name in instrument.__all__:
        assert getattr(instrument, name).__doc__
        assert name in dir(instrument)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        instrument.nothing  # noqa: B018 - the access is the test


def test_help_of_names_in_c_says_what_their_fallback_says() -> None:
    names = "scope", "bind", "annotate", "annotate_request"
    source = f"import inspect, instrument; print([inspect.getdoc(getattr(instrument, name)) for name in {names}])"
    without = "import sys; sys.modules['instrument.native._recorder'] = None; " + source
    texts = [
        subprocess.run([sys.executable, "-c", each], check=True, capture_output=True, text=True).stdout
        for each in (source, without)
    ]
    assert texts[0] == texts[1]
    assert "tokenise" in texts[0]


PROBE = """
import sys, threading
before = set(sys.modules), list(sys.meta_path), threading.active_count()
{statement}
new = set(sys.modules) - before[0]
assert sys.meta_path == before[1], sys.meta_path
assert threading.active_count() == before[2]
print(*sorted({{name.partition(".")[0] for name in new}}))
"""


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        (
            "import instrument",
            {"torch", "numpy", "msgspec", "cuda", "pynvml", "opentelemetry", "yaml", "asyncio", "ssl", "http"},
        ),
        (
            "import instrument.sessions.process",
            {"torch", "numpy", "msgspec", "cuda", "pynvml", "opentelemetry", "grpc", "google"},
        ),
    ],
)
def test_importing_starts_nothing_and_pulls_in_nothing_heavy(statement: str, forbidden: set[str]) -> None:
    program = PROBE.format(statement=statement)
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) & forbidden == set()


def test_the_package_depends_on_five_distributions_at_run_time() -> None:
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    assert [need.partition(">")[0] for need in project["dependencies"]] == [
        "pyyaml",
        "opentelemetry-sdk",
        "numpy",
        "msgspec",
        "isal",
    ]
    assert project["version"] == instrument.__version__


@pytest.mark.skipif(shutil.which("gcc") is None, reason="nothing to build with")
def test_every_extension_is_built_where_there_is_a_compiler() -> None:
    """They are optional, so one that does not compile is left out without a word."""
    settings = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
    for extension in settings["tool"]["setuptools"]["ext-modules"]:
        assert importlib.util.find_spec(extension["name"]) is not None, extension["name"]


MOST_METHODS = 40


def test_a_class_has_at_most_forty_methods_with_those_that_it_inherits() -> None:
    methods: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    for module in MODULES:
        for node in ast.walk(ast.parse((ROOT / module).with_suffix(".py").read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                methods[node.name] = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]

    def all_of(name: str) -> set[str]:
        return methods.get(name, set()).union(*map(all_of, bases.get(name, ())))

    assert not {name for name in methods if len(all_of(name)) > MOST_METHODS}
    assert len(all_of("Session")) < 25


# -------------------------------------------------------------------- bounds that only fall

SOURCES = {".py", ".pyi", ".c", ".h", ".js", ".css", ".html"}
LINES_AND_FILES = {
    "": (321, 4),
    "agent": (4_205, 16),
    "chrome": (3_414, 10),
    "cli": (2_893, 15),
    "compat": (1_187, 6),
    "device": (3_427, 10),
    "docs": (0, 0),
    "fleet": (147, 1),
    "instrumentors": (11_219, 38),
    "native": (8_548, 27),
    "otlp": (5_095, 18),
    "profile": (2_537, 8),
    "proposal": (1_244, 4),
    "recorder": (2_490, 9),
    "recording": (3_735, 13),
    "report": (13_009, 37),
    "runtime": (2_648, 13),
    "sessions": (6_024, 19),
    "trace": (9_587, 28),
}
"""The most lines and files of sources in each folder. A change lowers these, or its commit names what its lines buy."""


def sources(folder: str) -> list[Path]:
    """Return the sources in a folder of the package and below it; "" is the package's root alone."""
    paths = (ROOT / folder).rglob("*") if folder else ROOT.glob("*")
    return [path for path in paths if path.suffix in SOURCES and not path.name.startswith("d3")]


@pytest.mark.parametrize("folder", LINES_AND_FILES)
def test_a_folder_has_no_more_lines_and_files_than_its_bound(folder: str) -> None:
    paths = sources(folder)
    lines, files = sum(path.read_bytes().count(b"\n") for path in paths), len(paths)
    most_lines, most_files = LINES_AND_FILES[folder]
    assert lines <= most_lines, "make the folder smaller, or say in the commit which capability the lines buy"
    assert files <= most_files, "join modules, or say in the commit which capability the file buys"


def test_every_folder_has_a_bound() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders | {""} == LINES_AND_FILES.keys()


def test_no_module_assigns_a_constant_twice() -> None:
    # Two modules that were joined had a constant of the same name each: the second one replaced the first.
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        targets = [
            target.id
            for node in ast.parse(path.read_text()).body
            if isinstance(node, (ast.Assign, ast.AnnAssign))
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        ]
        found += [f"{path.name}: {name}" for name in sorted(set(targets)) if targets.count(name) > 1]
    assert found == []
