"""The house: imports point down, the public names are these, and importing the package starts nothing."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

import instrument

ROOT = Path(instrument.__file__).parent

FLOORS: list[list[str]] = [
    [
        "unpatched", "errors", "threads", "termination", "atomic", "board", "clock", "compression", "http_status",
        "document", "native", "spans", "tally", "paths", "lines", "ring", "rows", "environment", "hello",
        "memory_limit", "annotation", "metrics", "faults", "kinds", "control_groups",
    ],
    ["profile", "presets", "pure", "wrapping", "shelf", "recorder", "imports", "main_module", "import_times", "device"],
    [
        "schema", "probe_cost", "probes", "capture", "governor", "window", "step_spans", "control", "chrome", "otlp",
        "report", "stretch", "lock", "ticks", "meter", "trace",
    ],
    [
        "process", "profiler", "account", "first_request", "generation", "reader", "outbox", "files", "handlers",
        "steps", "operator_spans", "torch_profiler", "sharing", "exposition",
    ],
    ["", "__main__", "cli", "autostart", "faces"],
]  # fmt: skip

WITHIN = {
    "errors": {"faults"},
    "faults": {"unpatched"},
    "threads": {"errors", "unpatched"},
    "memory_limit": {"errors"},
    "metrics": {"tally"},
    "spans": {"kinds", "native"},
    "annotation": {"spans"},
    "tally": {"native", "spans"},
    "paths": {"native", "spans"},
    "lines": {"native", "paths", "spans", "tally"},
    "ring": {"spans", "tally", "unpatched"},
    "rows": {"native", "paths", "ring", "spans"},
    "recorder": {"pure", "shelf", "wrapping"},
    "device": {"imports", "profile", "recorder"},
    "probe_cost": {"probes"},
    "trace": {"chrome"},  # the metadata, which is no more Chrome's than ours
    "report": {"trace"},
    "process": {"profiler", "generation"},
    "profiler": {"account", "exposition", "first_request", "files", "generation", "outbox", "reader"},
    "account": {"reader"},
    "generation": {"files"},
    "handlers": {"profiler", "files", "torch_profiler"},
    "sharing": {"process", "profiler", "torch_profiler"},
    "steps": {"process", "profiler", "handlers", "sharing", "torch_profiler"},
    "torch_profiler": {"operator_spans"},
    "cli": {"autostart"},
    "__main__": {"cli"},
}
"""What may be imported on a room's own floor."""

MODULES = sorted(path.relative_to(ROOT).with_suffix("") for path in ROOT.rglob("*.py"))


def room(module: Path) -> str:
    """The room of a module: its first name below the package, "" for the package itself."""
    return "" if module.parts == ("__init__",) else module.parts[0]


def floor(name: str) -> int:
    return next(index for index, rooms in enumerate(FLOORS) if name in rooms)


def imported_rooms(module: Path) -> set[str]:
    tree = ast.parse((ROOT / module).with_suffix(".py").read_text())
    rooms = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[:2] == ["instrument", "_recorder"]:
                continue  # native, and optional: it imports nothing
            if parts[0] == "instrument" and len(parts) > 1:
                known = (ROOT / parts[1]).is_dir() or (ROOT / f"{parts[1]}.py").exists()
                rooms.add(parts[1] if known else "")
    return rooms


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_point_strictly_down(module: Path) -> None:
    own = room(module)
    for other in imported_rooms(module) - {own}:
        assert floor(other) < floor(own) or other in WITHIN.get(own, set()), f"{module} imports {other or 'instrument'}"


def test_every_room_has_a_floor_and_every_floor_its_rooms() -> None:
    assert {room(module) for module in MODULES} == {name for names in FLOORS for name in names}


def test_every_folder_is_shipped() -> None:
    wanted = {".".join(["instrument", *module.parts[:-1]]) for module in MODULES}
    settings = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
    assert set(settings["tool"]["setuptools"]["packages"]) == wanted


def test_the_public_names_are_these() -> None:
    assert instrument.__all__ == [
        "ExportError",
        "InstrumentError",
        "ProfileError",
        "Profiler",
        "Session",
        "StateError",
        "TargetError",
        "TraceError",
        "annotate",
        "annotate_request",
        "disable",
        "dump",
        "enable",
        "export_chrome",
        "export_otlp",
        "flush",
        "inject",
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
        ("import instrument", {"torch", "numpy", "cuda", "pynvml", "opentelemetry", "yaml", "asyncio", "ssl", "http"}),
        ("import instrument.process", {"torch", "numpy", "cuda", "pynvml", "opentelemetry", "grpc", "google"}),
    ],
)
def test_importing_starts_nothing_and_pulls_in_nothing_heavy(statement: str, forbidden: set[str]) -> None:
    program = PROBE.format(statement=statement)
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) & forbidden == set()


def test_the_package_depends_on_four_distributions_at_run_time() -> None:
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    assert [need.partition(">")[0] for need in project["dependencies"]] == [
        "pyyaml",
        "opentelemetry-sdk",
        "numpy",
        "isal",
    ]
    assert project["version"] == instrument.__version__


@pytest.mark.skipif(shutil.which("gcc") is None or "INSTRUMENT_PURE" in os.environ, reason="nothing to build with")
def test_every_extension_is_built_where_there_is_a_compiler() -> None:
    """They are optional, so one that does not compile is left out without a word."""
    settings = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
    for extension in settings["tool"]["setuptools"]["ext-modules"]:
        assert importlib.util.find_spec(extension["name"]) is not None, extension["name"]
