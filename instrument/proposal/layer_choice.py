"""Which layers of a model a first profile names, chosen from what ran: its blocks and what takes their time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from instrument.proposal.observation import Observation
from instrument.proposal.wording import each_of, share_of

LEAST, LEAST_PART = 0.05, 0.1
"""The part of the layers' time in all that a layer must take, and that of its block."""

LEAST_NS = 20_000
"""Layers that take less a call are left out: there are many, and they are below others."""

PARTS = 6
"""The most layers that are named."""


@dataclass(slots=True)
class LayerProposal:
    """A layer rule that is proposed, by paths with `*` for numbers, or by classes where it `is_type`; `reasons` are
    what its comment says."""

    match: tuple[str, ...]
    device: bool = False
    is_type: bool = False
    reasons: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Layers:
    """The layers of one pattern: how often they ran in all, and how many places there are."""

    calls: int = 0
    total_ns: int = 0
    places: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)


def pattern_of(path: str) -> str:
    """A layer's path with `*` in place of numbers."""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def choose_layers(observation: Observation) -> list[LayerProposal]:
    """The layers that a first profile names."""
    found: dict[str, _Layers] = defaultdict(_Layers)
    whole_ns = 0
    for node in observation.nodes():
        if node.called.kind != "layer":
            continue
        if not any(above.called.kind == "layer" for above in node.above()):
            whole_ns += node.total_ns
        if node.called.instance:
            its = found[pattern_of(node.called.instance)]
            its.calls += node.calls
            its.total_ns += node.total_ns
            its.places.add(node.called.instance)
            its.classes.add(node.called.name)
    chosen = _chosen(found, whole_ns)
    rules = []
    for pattern in chosen[:PARTS]:
        its = found[pattern]
        classes = " or ".join(sorted(its.classes)[:3])
        places = f"{len(its.places)} of {classes}" if len(its.places) > 1 else classes
        share = share_of(its.total_ns / whole_ns)
        words = f"{places}: ran {each_of(its.calls, its.total_ns)}, {share} of the layers' time"
        rules.append(LayerProposal((pattern,), observation.uses_cuda, reasons=[words]))
    return rules


def _chosen(found: Mapping[str, _Layers], whole_ns: int) -> list[str]:
    """Blocks that are repeated and the parts of these, then what else is large and in none of them."""
    large = {
        pattern
        for pattern, its in found.items()
        if its.calls and its.total_ns >= LEAST * whole_ns and its.total_ns >= LEAST_NS * its.calls
    }
    blocks = sorted(
        (pattern for pattern in large if pattern.endswith("*") and len(found[pattern].places) > 1),
        key=lambda pattern: (pattern.count("."), -found[pattern].total_ns, pattern),
    )
    outermost: list[str] = []
    for block in blocks:
        if not any(block.startswith(f"{other}.") for other in outermost):
            outermost.append(block)
    chosen: list[str] = []
    for block in outermost:
        parts = [
            pattern
            for pattern in large
            if pattern.rpartition(".")[0] == block and found[pattern].total_ns >= LEAST_PART * found[block].total_ns
        ]
        chosen += [block, *sorted(parts, key=lambda pattern: (-found[pattern].total_ns, pattern))]
    alone = [
        pattern
        for pattern in large
        if not any(f"{block}.".startswith(f"{pattern}.") or pattern.startswith(f"{block}.") for block in outermost)
    ]
    topmost = [one for one in alone if not any(one.startswith(f"{other}.") for other in alone if other != one)]
    return chosen + sorted(topmost, key=lambda pattern: (-found[pattern].total_ns, pattern))
