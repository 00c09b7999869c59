"""The observation for `instrument init`: the processes of a service report their call trees, and `init` merges these
trees."""

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
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from instrument.instrumentors.argument_watch import SeenPath
from instrument.instrumentors.known_packages import PACKAGES, imported_packages
from instrument.instrumentors.verdict import RECORDING, Verdict, publish_report
from instrument.recording.spans import Site
from instrument.runtime.environment import INIT_FOLDER

if TYPE_CHECKING:
    from instrument.recording.tally import Tally

STARTED_SUFFIX, REPORT_SUFFIX = ".began", ".json"

_IGNORED_NAMES = re.compile(
    r"\..*|__pycache__|__main__|tests?|testing|docs?|build|dist|node_modules|site-packages|.*\.egg-info|setup|conftest"
    r"|noxfile|test_.*|.*_test|instrument|migrations|venv|env"
)
"""The names of files and folders that are not observed, because they contain no code of a service."""

_INSTALLED = {"site-packages", "dist-packages"}

_SERVERS = {name.partition(".")[0] for names in PACKAGES.values() for name in names}


class Callee(NamedTuple):
    """The last element of a call path: a function, layer, request or copy.

    - `label`: `module:qualname` of a function
    - `instance`: the path of a layer in its model
    - `shape`: the form of a function, such as `call` or `coroutine`, or `layer` for the `forward` of a layer
    """

    name: str
    kind: str
    label: str = ""
    instance: str = ""
    shape: str = ""


@dataclass(eq=False, slots=True)
class ObservedNode:
    """A call path with its totals over all processes and threads. `first_ns` is the start time of its first call, 0 if
    unknown."""

    callee: Callee
    parent: ObservedNode | None = None
    children: dict[Callee, ObservedNode] = field(default_factory=dict)
    calls: int = 0
    total_ns: int = 0
    self_ns: int = 0
    first_ns: int = 0
    processes: set[int] = field(default_factory=set)

    def iterate_call_paths(self) -> Iterator[ObservedNode]:
        """Yield this call path and all below it, parents before their children."""
        yield self
        for child in list(self.children.values()):
            yield from child.iterate_call_paths()

    def iterate_callers(self) -> Iterator[ObservedNode]:
        node = self.parent
        while node is not None:
            yield node
            node = node.parent


@dataclass(slots=True)
class Observation:
    """The reports of all processes of an observed command, merged into one.

    - `keys`: the observed argument values, by label and argument path
    - `unseen`: the targets that were not observed, with the reason for each
    - `blockers`: the functions that blocked an event loop, with the number of blocks and the longest block in ns
    - `silent`: the number of processes without a report
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
        for root in self.roots:
            yield from root.iterate_call_paths()


def mark_process_started(folder: str) -> None:
    """Write a file that marks this process as started, so that `init` notices a missing report."""
    Path(folder, f"{os.getpid()}{STARTED_SUFFIX}").touch()


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
    labels = {
        verdict.site.key: verdict.target
        for verdict in verdicts
        if verdict.site is not None and ":" in verdict.target and verdict.site.kind != "layer"
    }
    shape_of = {site.key: shape for site, shape in shapes.items()}

    @cache
    def find_callee(site: Site) -> Callee:
        label = labels.get(site.key, "")
        shape = "layer" if _is_layer_forward(label) else shape_of.get(site.key, "")
        return Callee(site.name, site.kind, label, site.instance, shape)

    callee_numbers: dict[Callee, int] = {}
    lines = []
    for row in tally.iterate_totals():
        path = [callee_numbers.setdefault(find_callee(site), len(callee_numbers)) for site in row.path]
        lines.append([path, row.totals.calls, row.totals.total_ns, row.totals.self_ns, row.totals.first_ns])
    cuda = sys.modules.get("torch.cuda")
    report = {
        "pid": os.getpid(),
        "lasted_ns": lasted_ns,
        "cost": cost_ns / max(lasted_ns, 1),
        "called": list(callee_numbers),
        "lines": lines,
        "arguments": arguments,
        "packages": sorted(imported_packages()),
        "unseen": {
            verdict.target: verdict.why for verdict in verdicts if verdict.target and verdict.state not in RECORDING
        },
        "blockers": {labels[site.key]: times for site, times in blockers.items() if site.key in labels},
        "uses_cuda": bool(cuda is not None and cuda.is_initialized()),
    }
    publish_report(Path(folder, f"{os.getpid()}.{time.monotonic_ns()}{REPORT_SUFFIX}"), report)


def _is_layer_forward(label: str) -> bool:
    """Return True for the `forward` method of a torch layer, which rules for layers record."""
    module, _, qualname = label.partition(":")
    owner, _, name = qualname.rpartition(".")
    torch = sys.modules.get("torch.nn")
    if name != "forward" or torch is None:
        return False
    owner_class: Any = sys.modules.get(module)
    for part in owner.split("."):
        owner_class = getattr(owner_class, part, None)
    return isinstance(owner_class, type) and issubclass(owner_class, torch.Module)


def await_reports(folder: str, longest_s: float, *, ends: bool) -> None:
    """Wait up to `longest_s` seconds for the reports of all processes. If `ends` is True, processes that outlive the
    command get SIGTERM."""
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
    """Return the ids of the command's running processes. A variable in their environment identifies them."""
    mark = f"{INIT_FOLDER}={folder}".encode()
    pids = set()
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with suppress(OSError):
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    pids.add(int(path.name))
    return pids


def _processes_without_report(folder: str) -> set[str]:
    started = {path.stem for path in Path(folder).glob(f"*{STARTED_SUFFIX}")}
    return started - {path.name.partition(".")[0] for path in Path(folder).glob(f"*{REPORT_SUFFIX}")}


def merge_reports(folder: str) -> Observation:
    observation = Observation([])
    roots: dict[Callee, ObservedNode] = {}
    for path in sorted(Path(folder).glob(f"*{REPORT_SUFFIX}")):
        report = json.loads(path.read_text("utf-8"))
        observation.processes += 1
        observation.cost = max(observation.cost, report["cost"])
        observation.seconds = max(observation.seconds, report["lasted_ns"] / 1e9)
        observation.packages.update(report["packages"])
        observation.unseen.update(report["unseen"])
        observation.uses_cuda = observation.uses_cuda or report["uses_cuda"]
        for blocker, (stretches, longest_ns) in report["blockers"].items():
            before = observation.blockers.get(blocker, (0, 0))
            observation.blockers[blocker] = before[0] + stretches, max(before[1], longest_ns)
        _add_argument_values(observation.keys, report["arguments"])
        _add_call_tree(roots, report)
    observation.roots = list(roots.values())
    observation.silent = len(_processes_without_report(folder))
    return observation


def _add_call_tree(roots: dict[Callee, ObservedNode], report: Mapping[str, Any]) -> None:
    callee = [Callee(*fields) for fields in report["called"]]
    for path, calls, total_ns, self_ns, first_ns in report["lines"]:
        node, siblings = None, roots
        for number in path:
            node = siblings.setdefault(callee[number], ObservedNode(callee[number], node))
            node.processes.add(report["pid"])
            siblings = node.children
        if node is not None:
            node.calls += calls
            node.total_ns += total_ns
            node.self_ns += self_ns
            node.first_ns = min(filter(None, (node.first_ns, first_ns)), default=0)


def _add_argument_values(keys: dict[str, dict[str, SeenPath]], arguments: Mapping[str, Mapping[str, Any]]) -> None:
    for label, paths in arguments.items():
        for path, values in paths.items():
            sums = keys.setdefault(label, {}).setdefault(path, SeenPath(values["many"]))
            sums.looks += values["looks"]
            sums.items += values["items"]
            sums.largest = max(sums.largest, values["largest"])
            sums.weights = sums.weights or values["weights"]
            sums.of_class = sums.of_class or values["of_class"]
            sums.digests.update(values["digests"])


def find_module_folders(words: Sequence[str], folder: Path) -> list[Path]:
    """Return the folders of a service's modules: the current folder, the script's folder, and `PYTHONPATH`."""
    folders = [folder]
    if words and not words[0].startswith("-"):
        script = (folder / words[0]).resolve()
        if script.is_dir() or script.suffix == ".py":
            folders.append(script if script.is_dir() else script.parent)
    folders += [folder / entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    folders += [root / "src" for root in folders if (root / "src").is_dir() and not (root / "src/__init__.py").exists()]
    existing_folders = [
        root.resolve() for root in folders if root.is_dir() and not _is_installation_folder(root.resolve())
    ]
    return list(dict.fromkeys(existing_folders))


def find_service_modules(words: Sequence[str], folder: Path) -> list[str]:
    """Return the names of the top-level modules in the service's folders or on the command line."""
    roots = find_module_folders(words, folder)
    names = {name for root in roots for name in _list_modules(root)}
    paths = [*map(str, roots), *sys.path]
    module_words = [word for before, word in zip(("", *words), words, strict=False) if before == "-m" or ":" in word]
    for word in module_words:
        match = re.match(r"([A-Za-z_]\w*)(?:\.\w+)*(?::|$)", word)
        name = match[1] if match else ""
        if name and name not in _SERVERS and name not in sys.stdlib_module_names and PathFinder.find_spec(name, paths):
            names.add(name)
    return sorted(names)


def patterns_of_all_functions(names: Iterable[str]) -> list[str]:
    return [pattern for name in names for pattern in (f"{name}:**", f"{name}.**:**")] + ["__main__:**"]


def _list_modules(root: Path) -> Iterator[str]:
    """Yield the names of the modules and packages in a folder. Names without code of a service, such as `tests`, are
    left out."""
    for entry in root.iterdir():
        name = entry.name.removesuffix(".py")
        if not name.isidentifier() or _IGNORED_NAMES.fullmatch(name) or name in sys.stdlib_module_names:
            continue
        is_package = entry.is_dir() and not (entry / "pyvenv.cfg").exists()
        modules = chain(entry.glob("*.py"), entry.glob("*/*.py")) if is_package else ()
        if any(modules) or (entry.suffix == ".py" and entry.is_file()):
            yield name


def _is_installation_folder(folder: Path) -> bool:
    inside = folder.is_relative_to(Path(sys.prefix, "lib").resolve()) or folder == Path(sys.prefix, "bin").resolve()
    return inside or not _INSTALLED.isdisjoint(folder.parts)
