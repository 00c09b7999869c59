"""The observation of `instrument init`: the service's own modules, and the merged call trees of its processes."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instrument.instrumentors.argument_watch import SeenPath
from instrument.instrumentors.requests import PACKAGES, imported_packages
from instrument.instrumentors.verdict import RECORDING, Verdict
from instrument.recording.spans import Site
from instrument.runtime.environment import INIT_FOLDER

if TYPE_CHECKING:
    from instrument.recording.tally import Tally

BEGAN, LEFT = ".began", ".json"

_PASSED_OVER = re.compile(
    r"\..*|__pycache__|__main__|tests?|testing|docs?|build|dist|node_modules|site-packages|.*\.egg-info|setup|conftest"
    r"|noxfile|test_.*|.*_test|instrument|migrations|venv|env"
)
"""The names of files and folders without code of a service."""

_INSTALLED = {"site-packages", "dist-packages"}

_SERVERS = {name.partition(".")[0] for names in PACKAGES.values() for name in names}


@dataclass(frozen=True, slots=True)
class Called:
    """The last call of a call path: a function by its `label` (`module:qualname`), or a layer, request or copy.

    `instance` is a layer's path in its model. `shape` is the kind of the probe (`call`, `coroutine`, `generator` ...),
    or `layer` for a layer's own function.
    """

    name: str
    kind: str
    label: str = ""
    instance: str = ""
    shape: str = ""
    file: str = ""
    line: int = 0


@dataclass(eq=False, slots=True)
class ObservedNode:
    """A call path of all processes and threads. `first_ns` is the begin of its first call, 0 without calls."""

    called: Called
    parent: ObservedNode | None = None
    children: dict[Called, ObservedNode] = field(default_factory=dict)
    calls: int = 0
    total_ns: int = 0
    self_ns: int = 0
    first_ns: int = 0
    processes: set[int] = field(default_factory=set)

    def walk(self) -> Iterator[ObservedNode]:
        """Yield the node and all nodes below it, parents before their children."""
        yield self
        for child in list(self.children.values()):
            yield from child.walk()

    def above(self) -> Iterator[ObservedNode]:
        """Yield the ancestors of the node, the nearest first."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent


@dataclass(slots=True)
class Observation:
    """The merged reports of a command's processes.

    `keys` are by label and path, `unseen` has reasons by target. `blockers` has the number of blocks of an event loop
    and the longest in ns, by the function's label. `seconds` is the longest time of a process, `cost` the largest share
    of a process's time for the observation. `silent` counts processes without a report.
    """

    roots: list[ObservedNode]
    packages: set[str] = field(default_factory=set)
    keys: dict[str, dict[str, SeenPath]] = field(default_factory=dict)
    unseen: dict[str, str] = field(default_factory=dict)
    blockers: dict[str, tuple[int, int]] = field(default_factory=dict)
    seconds: float = 0.0
    processes: int = 0
    silent: int = 0
    uses_cuda: bool = False
    cost: float = 0.0

    def nodes(self) -> Iterator[ObservedNode]:
        """Yield all call paths, parents before their children."""
        for root in self.roots:
            yield from root.walk()


def mark_begun(folder: str) -> None:
    """Mark this process as started, so that a missing report is noticed."""
    Path(folder, f"{os.getpid()}{BEGAN}").touch()


def write_report(
    folder: str,
    *,
    tally: Tally,
    verdicts: Sequence[Verdict],
    arguments: Mapping[str, Mapping[str, Any]],
    shapes: Mapping[Site, str],
    blockers: Mapping[Site, tuple[int, int]],
    lasted_ns: int,
    cost_ns: float,
) -> None:
    """Write this process's report for `instrument init`, the ancestor of this process."""
    labels = {
        verdict.site.key: verdict.target
        for verdict in verdicts
        if verdict.site is not None and ":" in verdict.target and verdict.site.kind != "layer"
    }
    shape_of = {site.key: shape for site, shape in shapes.items()}

    @cache
    def called_of(site: Site) -> Called:
        label = labels.get(site.key, "")
        shape = "layer" if _is_of_layer(label) else shape_of.get(site.key, "")
        return Called(site.name, site.kind, label, site.instance, shape, site.file, site.line)

    numbers: dict[Called, int] = {}
    lines = []
    for row in tally.rows():
        path = [numbers.setdefault(called_of(site), len(numbers)) for site in row.path]
        lines.append([path, row.totals.calls, row.totals.total_ns, row.totals.self_ns, row.totals.first_ns])
    cuda = sys.modules.get("torch.cuda")
    facts_left = {
        "pid": os.getpid(),
        "lasted_ns": lasted_ns,
        "cost": cost_ns / max(lasted_ns, 1),
        "called": [[getattr(step, name) for name in Called.__slots__] for step in numbers],
        "lines": lines,
        "arguments": arguments,
        "packages": sorted(imported_packages()),
        "unseen": {
            verdict.target: verdict.why for verdict in verdicts if verdict.target and verdict.state not in RECORDING
        },
        "blockers": {labels[site.key]: times for site, times in blockers.items() if site.key in labels},
        "uses_cuda": bool(cuda is not None and cuda.is_initialized()),
    }
    path_of_report = Path(folder, f"{os.getpid()}.{time.monotonic_ns()}")
    try:
        path_of_report.write_text(json.dumps(facts_left), encoding="utf-8")
        path_of_report.rename(path_of_report.with_name(path_of_report.name + LEFT))
    except FileNotFoundError:
        pass  # `init` has ended


def _is_of_layer(label: str) -> bool:
    """Return True for the `forward` of a torch layer, which layer rules record."""
    module, _, qualname = label.partition(":")
    owner, _, name = qualname.rpartition(".")
    torch = sys.modules.get("torch.nn")
    if name != "forward" or torch is None:
        return False
    thing: Any = sys.modules.get(module)
    for part in owner.split("."):
        thing = getattr(thing, part, None)
    return isinstance(thing, type) and issubclass(thing, torch.Module)


def await_reports(folder: str, longest_s: float, *, ends: bool) -> None:
    """Wait up to `longest_s` seconds for the reports of all processes of the command.

    `ends` sends SIGTERM to the processes that outlive the command.
    """
    signalled: set[int] = set()
    until = time.monotonic() + longest_s
    while time.monotonic() < until:
        running = _processes_of_command(folder) if ends else set()
        for pid in running - signalled:
            with suppress(OSError):
                os.kill(pid, signal.SIGTERM)
        signalled |= running
        if not running and not any(Path("/proc", pid).exists() for pid in _processes_without_report(folder)):
            return
        time.sleep(0.05)


def _processes_of_command(folder: str) -> set[int]:
    """Return the pids of the command's processes, found by our variable in their environment."""
    mark = f"{INIT_FOLDER}={folder}".encode()
    pids = set()
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with suppress(OSError):
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    pids.add(int(path.name))
    return pids


def _processes_without_report(folder: str) -> set[str]:
    """Return the pids of processes that have started but not reported."""
    began = {path.stem for path in Path(folder).glob(f"*{BEGAN}")}
    return began - {path.name.partition(".")[0] for path in Path(folder).glob(f"*{LEFT}")}


def merged_reports(folder: str) -> Observation:
    """Merge the reports of a command's processes in a folder."""
    whole = Observation([])
    top: dict[Called, ObservedNode] = {}
    for path in sorted(Path(folder).glob(f"*{LEFT}")):
        facts = json.loads(path.read_text("utf-8"))
        whole.processes += 1
        whole.cost = max(whole.cost, facts["cost"])
        whole.seconds = max(whole.seconds, facts["lasted_ns"] / 1e9)
        whole.packages.update(facts["packages"])
        whole.unseen.update(facts["unseen"])
        whole.uses_cuda = whole.uses_cuda or facts["uses_cuda"]
        for blocker, (stretches, longest_ns) in facts["blockers"].items():
            before = whole.blockers.get(blocker, (0, 0))
            whole.blockers[blocker] = before[0] + stretches, max(before[1], longest_ns)
        _add_keys(whole.keys, facts["arguments"])
        _add_tree(top, facts)
    whole.roots = list(top.values())
    whole.silent = len(_processes_without_report(folder))
    return whole


def _add_tree(top: dict[Called, ObservedNode], facts: Mapping[str, Any]) -> None:
    called = [Called(*fields) for fields in facts["called"]]
    for path, calls, total_ns, self_ns, first_ns in facts["lines"]:
        node, siblings = None, top
        for number in path:
            node = siblings.setdefault(called[number], ObservedNode(called[number], node))
            node.processes.add(facts["pid"])
            siblings = node.children
        if node is not None:
            node.calls += calls
            node.total_ns += total_ns
            node.self_ns += self_ns
            node.first_ns = min(filter(None, (node.first_ns, first_ns)), default=0)


def _add_keys(keys: dict[str, dict[str, SeenPath]], arguments: Mapping[str, Mapping[str, Any]]) -> None:
    for label, paths in arguments.items():
        for path, values in paths.items():
            sums = keys.setdefault(label, {}).setdefault(path, SeenPath(values["many"]))
            sums.looks += values["looks"]
            sums.items += values["items"]
            sums.largest = max(sums.largest, values["largest"])
            sums.weights = sums.weights or values["weights"]
            sums.of_class = sums.of_class or values["of_class"]
            sums.digests.update(values["digests"])


def roots_of(words: Sequence[str], folder: Path) -> list[Path]:
    """Return the folders of a command's modules: the current folder, its script's, and those of `PYTHONPATH`."""
    folders = [folder]
    if words and not words[0].startswith("-"):
        script = (folder / words[0]).resolve()
        if script.is_dir() or script.suffix == ".py":
            folders.append(script if script.is_dir() else script.parent)
    folders += [folder / entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    folders += [root / "src" for root in folders if (root / "src").is_dir() and not (root / "src/__init__.py").exists()]
    roots_found = [root.resolve() for root in folders if root.is_dir() and not _is_installed(root.resolve())]
    return list(dict.fromkeys(roots_found))


def own_names(words: Sequence[str], folder: Path) -> list[str]:
    """Return the top-level names of a command's own modules: those in its folders, and named installed ones."""
    roots = roots_of(words, folder)
    names = {name for root in roots for name in _top_level(root)}
    paths = [*map(str, roots), *sys.path]
    module_words = [word for before, word in zip(("", *words), words, strict=False) if before == "-m" or ":" in word]
    for word in module_words:
        match = re.match(r"([A-Za-z_]\w*)(?:\.\w+)*(?::|$)", word)
        name = match[1] if match else ""
        if name and name not in _SERVERS and name not in sys.stdlib_module_names and PathFinder.find_spec(name, paths):
            names.add(name)
    return sorted(names)


def patterns_of(names: Iterable[str]) -> list[str]:
    """Return patterns that match every function of modules and of the main program."""
    return [pattern for name in names for pattern in (f"{name}:**", f"{name}.**:**")] + ["__main__:**"]


def _top_level(root: Path) -> list[str]:
    """Return the modules and packages in a folder."""
    names = set()
    with os.scandir(root) as entries:
        for entry in entries:
            name = entry.name.removesuffix(".py")
            if not name.isidentifier() or _PASSED_OVER.fullmatch(name) or name in sys.stdlib_module_names:
                continue
            is_module = entry.is_file() and entry.name.endswith(".py")
            if is_module or (entry.is_dir() and not Path(entry, "pyvenv.cfg").exists() and _has_modules(Path(entry))):
                names.add(name)
    return sorted(names)


def _has_modules(folder: Path) -> bool:
    if (folder / "__init__.py").exists():
        return True
    return any(folder.glob("*.py")) or any(folder.glob("*/*.py"))


def _is_installed(folder: Path) -> bool:
    inside = folder.is_relative_to(Path(sys.prefix, "lib").resolve()) or folder == Path(sys.prefix, "bin").resolve()
    return inside or not _INSTALLED.isdisjoint(folder.parts)
