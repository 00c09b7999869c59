"""What `instrument init` observes: each process of the service leaves its call tree, and the trees are put together."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from instrument.instrumentors.argument_watch import SeenPath
from instrument.instrumentors.requests.packages import imported_packages
from instrument.instrumentors.verdict import RECORDING, Verdict
from instrument.recording.spans import Site
from instrument.recording.tally import Tally
from instrument.runtime.environment import INIT_FOLDER

BEGAN, LEFT = ".began", ".json"


@dataclass(frozen=True, slots=True)
class Called:
    """What a call path's last step is: a function by its `label` (`module:qualname`), or a layer, request or copy.

    `instance` is a layer's path in its model, `shape` the kind of its probe (`call`, `coroutine`, `generator` ...), or
    `layer` for the function that a layer computes by.
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
    """A call path, over all processes and threads. Times in ns; `first_ns` is when its first call began, 0 for none."""

    called: Called
    parent: ObservedNode | None = None
    children: dict[Called, ObservedNode] = field(default_factory=dict)
    calls: int = 0
    errors: int = 0
    total_ns: int = 0
    self_ns: int = 0
    first_ns: int = 0
    processes: set[int] = field(default_factory=set)

    def walk(self) -> Iterator[ObservedNode]:
        """It and all below it, parents before their children."""
        yield self
        for child in list(self.children.values()):
            yield from child.walk()

    def above(self) -> Iterator[ObservedNode]:
        """What it is below, the nearest first."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent


@dataclass(slots=True)
class Observation:
    """What the processes of one command did. `seconds` is how long the longest of them was observed; `unseen` says what
    could not be, `silent` counts processes that ended without a word, `keys` is by label and path. `blockers` says by
    label how often a function has blocked an event loop, and for how many nanoseconds at most. `cost` is the part of a
    process's time that observing took, where that was largest."""

    roots: list[ObservedNode]
    packages: set[str] = field(default_factory=set)
    files: dict[str, str] = field(default_factory=dict)
    keys: dict[str, dict[str, SeenPath]] = field(default_factory=dict)
    unseen: dict[str, str] = field(default_factory=dict)
    blockers: dict[str, tuple[int, int]] = field(default_factory=dict)
    seconds: float = 0.0
    processes: int = 0
    silent: int = 0
    uses_cuda: bool = False
    cost: float = 0.0

    def nodes(self) -> Iterator[ObservedNode]:
        """All call paths, parents before their children."""
        for root in self.roots:
            yield from root.walk()


def begin(folder: str) -> None:
    """Leave word that this process has begun."""
    Path(folder, f"{os.getpid()}{BEGAN}").touch()


def leave(
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
    """Leave what this process did to `instrument init`, which has started it or one above it."""
    labels = {
        verdict.site.key: verdict.target
        for verdict in verdicts
        if verdict.site is not None and ":" in verdict.target and verdict.site.kind != "layer"
    }
    shape_of = {site.key: shape for site, shape in shapes.items()}
    numbers: dict[tuple[object, ...], int] = {}
    called: list[Called] = []
    known: dict[tuple[int, ...], int] = {(): -1}
    lines: list[list[int]] = []
    for row in tally.rows():
        path: tuple[int, ...] = ()
        for site in row.path:
            if site.key not in numbers:
                numbers[site.key] = len(called)
                label = labels.get(site.key, "")
                shape = "layer" if _is_of_layer(label) else shape_of.get(site.key, "")
                called.append(Called(site.name, site.kind, label, site.instance, shape, site.file, site.line))
            upper, path = path, (*path, numbers[site.key])
            if path not in known:
                known[path] = len(lines)
                lines.append([path[-1], known[upper], 0, 0, 0, 0, 0])
        if path:
            line, its = lines[known[path]], row.totals
            firsts = [first for first in (line[6], its.first_ns) if first]
            sums = its.calls, its.errors, its.total_ns, its.self_ns
            line[2:] = [*(a + b for a, b in zip(line[2:6], sums, strict=True)), min(firsts, default=0)]
    cuda = sys.modules.get("torch.cuda")
    facts_left = {
        "pid": os.getpid(),
        "lasted_ns": lasted_ns,
        "cost": cost_ns / max(lasted_ns, 1),
        "called": [[getattr(one, name) for name in Called.__slots__] for one in called],
        "lines": lines,
        "arguments": arguments,
        "packages": sorted(imported_packages()),
        "files": _own_files(verdicts),
        "unseen": {one.target: one.why for one in verdicts if one.target and one.state not in RECORDING},
        "blockers": {labels[site.key]: its for site, its in blockers.items() if site.key in labels},
        "uses_cuda": bool(cuda is not None and cuda.is_initialized()),
    }
    path_of_report = Path(folder, f"{os.getpid()}.{time.monotonic_ns()}")
    try:
        path_of_report.write_text(json.dumps(facts_left), encoding="utf-8")
        path_of_report.rename(path_of_report.with_name(path_of_report.name + LEFT))
    except FileNotFoundError:
        pass  # nobody asks any more


def _is_of_layer(label: str) -> bool:
    """Whether a function is what a layer of torch computes, and has a rule of layers for it."""
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
    """Wait until no process of the command is still to leave what it did, at most so long.

    Where it `ends` the command, those that outlive it are asked to end, too, by SIGTERM.
    """
    asked: set[int] = set()
    until = time.monotonic() + longest_s
    while time.monotonic() < until:
        others = _others(folder) if ends else set()
        for pid in others - asked:
            with suppress(OSError):
                os.kill(pid, signal.SIGTERM)
        asked |= others
        if not others and not any(Path("/proc", pid).exists() for pid in _silent(folder)):
            return
        time.sleep(0.05)


def _others(folder: str) -> set[int]:
    """The processes that have our mark in their environment: those of the command."""
    mark = f"{INIT_FOLDER}={folder}".encode()
    found = set()
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with suppress(OSError):
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    found.add(int(path.name))
    return found


def _silent(folder: str) -> set[str]:
    """The processes that have begun and have left nothing, by their ids."""
    began = {path.stem for path in Path(folder).glob(f"*{BEGAN}")}
    return began - {path.name.partition(".")[0] for path in Path(folder).glob(f"*{LEFT}")}


def _own_files(verdicts: Iterable[Verdict]) -> dict[str, str]:
    """The files of the modules in which targets were found, by the names of these."""
    files = {}
    for verdict in verdicts:
        if verdict.site is not None and ":" in verdict.target:
            files[verdict.target.partition(":")[0]] = verdict.site.file
    return files


def observed(folder: str) -> Observation:
    """What the processes of a command have left in a folder."""
    found = Observation([])
    top: dict[Called, ObservedNode] = {}
    for path in sorted(Path(folder).glob(f"*{LEFT}")):
        facts = json.loads(path.read_text("utf-8"))
        found.processes += 1
        found.cost = max(found.cost, facts["cost"])
        found.seconds = max(found.seconds, facts["lasted_ns"] / 1e9)
        found.packages.update(facts["packages"])
        found.files.update(facts["files"])
        found.unseen.update(facts["unseen"])
        found.uses_cuda = found.uses_cuda or facts["uses_cuda"]
        for blocker, (stretches, longest_ns) in facts["blockers"].items():
            before = found.blockers.get(blocker, (0, 0))
            found.blockers[blocker] = before[0] + stretches, max(before[1], longest_ns)
        _add_keys(found.keys, facts["arguments"])
        _add_tree(top, facts)
    found.roots = list(top.values())
    found.silent = len(_silent(folder))
    return found


def _add_tree(top: dict[Called, ObservedNode], facts: Mapping[str, Any]) -> None:
    called = [Called(*fields) for fields in facts["called"]]
    nodes: list[ObservedNode] = []
    for number, parent, calls, errors, total_ns, self_ns, first_ns in facts["lines"]:
        upper = nodes[parent] if parent >= 0 else None
        siblings = top if upper is None else upper.children
        node = siblings.setdefault(called[number], ObservedNode(called[number], upper))
        nodes.append(node)
        node.calls += calls
        node.errors += errors
        node.total_ns += total_ns
        node.self_ns += self_ns
        node.first_ns = min(filter(None, (node.first_ns, first_ns)), default=0)
        node.processes.add(facts["pid"])


def _add_keys(keys: dict[str, dict[str, SeenPath]], arguments: Mapping[str, Mapping[str, Any]]) -> None:
    for label, paths in arguments.items():
        for path, seen in paths.items():
            mine = keys.setdefault(label, {}).setdefault(path, SeenPath(seen["many"]))
            mine.looks += seen["looks"]
            mine.items += seen["items"]
            mine.largest = max(mine.largest, seen["largest"])
            mine.weights = mine.weights or seen["weights"]
            mine.of_class = mine.of_class or seen["of_class"]
            mine.digests.update(seen["digests"])
