"""The choice of argument paths that name one request (a key) or several (a batch), from observed calls.

A path names requests if its values differ between requests and occur elsewhere, too. The values occur in arguments or
the result of a function below the requests, and in arguments on another thread or in another process. A path with
several values per call is a batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from instrument.instrumentors.argument_watch import ID, SeenPath
from instrument.instrumentors.arguments import RETURN
from instrument.proposal.function_choice import OF_REQUESTS, OUTSIDE, FunctionChoice, FunctionProposal, calls_text
from instrument.proposal.observation import Observation, ObservedNode

KEYS, BATCHES = 3, 3
"""The most rules with a key for work outside of requests, and the most rules with a batch."""

LOOKS = 3
"""The least observed values of a path that may be a key, and the least values that it shares with a function."""

DISTINCT = 0.8
"""The least share of distinct values at a path that names requests."""

SHARED = 0.5
"""The least share of a path's values that also occur in requests."""

LEAST_BATCH = 0.05
"""The least share of a function with batches in the time of work outside of requests."""

PASSED = 0.95
"""The least calls of the function that names requests, as a share of the most calls of a candidate."""

COVERED = 0.8
"""The least share of a function's time that its parts must take to be the batches in its place."""


@dataclass(frozen=True, slots=True)
class _Path:
    """A path of a function that may name requests. The path with the least rank is the likeliest."""

    label: str
    path: str
    ids: SeenPath

    @property
    def rank(self) -> tuple[bool, bool, bool, int, str]:
        is_inside = self.path.startswith("self.")
        return bool(self.ids.of_class), is_inside, not ID.match(_last_name(self.path)), self.path.count("."), self.path


def choose_keys(observation: Observation, choice: FunctionChoice) -> None:
    """Add keys and batches to the chosen rules, and add rules for further keys and batches."""
    inside = _nodes_by_label(choice.requests)
    binder = _key_path(observation, choice, inside)
    if binder is None:
        return
    bound = binder.ids.digests
    outside = _nodes_by_label(choice.units)
    shared = [
        _Path(label, path, ids)
        for label in outside.keys() - inside.keys()
        for path, ids in observation.keys.get(label, {}).items()
        if _shares_values(ids, bound)
    ]
    singles = _best_by_label([path for path in shared if not path.ids.many])
    # A function with one request as its argument serves that request, even if its object has others.
    many = [path for path in shared if path.ids.many and not (path.label in singles and path.path.startswith("self."))]
    batches = _batches(many, singles, outside)
    base_ns = sum(node.total_ns for node in choice.units)
    batches = {
        label: candidate
        for label, candidate in batches.items()
        if sum(node.total_ns for node in outside[label]) >= LEAST_BATCH * base_ns
    }
    units = set(choice.units)
    batch_parents = {node.parent for label in batches for node in outside[label] if units.intersection(node.above())}
    added = 0
    for label, candidate in batches.items():
        rule = _rule_for(choice, label, outside[label])
        rule.batch = candidate.path
        rule.weights = candidate.ids.weights
        if rule.kind == "op" and any(unit.called.label == label for unit in choice.units):
            rule.kind = "step"
        mean = candidate.ids.items / max(candidate.ids.looks, 1)
        rule.reasons.append(f"serves {mean:.1f} requests at a time, at most {candidate.ids.largest}")
    for label, candidate in sorted(singles.items(), key=lambda item: (_first_ns(outside[item[0]]), item[0])):
        nodes = outside[label]
        if label in batches or _is_below(nodes, batches) or _is_below(nodes, singles):
            continue
        if any(node.parent in batch_parents for node in nodes):
            rule = _rule_for(choice, label, nodes)
            rule.batch = candidate.path
            rule.reasons.append("serves one request at a time, besides the batches")
        elif added < KEYS and _calls(nodes) <= 2 * len(candidate.ids.digests & bound):
            added += 1
            rule = _rule_for(choice, label, nodes)
            rule.key = candidate.path
            rule.reasons.append(f"{candidate.path} names the request here")
            if rule.kind == "op":
                rule.kind = "phase"  # between it and the request's own phases is transport
    if batches or added or not binder.ids.of_class:
        rule = _rule_for(choice, binder.label, inside[binder.label])
        rule.key = binder.path
        rule.reasons.append(f"{_path_text(binder.path)} names the request")
    choice.rules.sort(key=lambda rule: rule.order)


def _key_path(
    observation: Observation, choice: FunctionChoice, inside: Mapping[str, list[ObservedNode]]
) -> _Path | None:
    """Return the path in requests' calls that names them best. Its values occur in the most other functions."""
    count = sum(node.calls for node in choice.requests)
    shared: dict[str, set[str]] = {}
    for label, paths in observation.keys.items():
        if label not in inside:
            shared[label] = set().union(*(ids.digests for ids in paths.values()))
    candidates = []
    for label in inside:
        for path, ids in observation.keys.get(label, {}).items():
            is_distinct = len(ids.digests) >= max(DISTINCT * min(ids.looks, count), 2)
            if ids.many or ids.looks < LOOKS or not is_distinct:
                continue
            if _calls(inside[label]) > 1.5 * count:
                continue
            elsewhere = sum(len(ids.digests & digests) >= LOOKS for digests in shared.values())
            if elsewhere or ID.match(_last_name(path)):  # an `id` that occurs once may be of any object
                candidates.append((_Path(label, path, ids), elsewhere))
    if not candidates:
        return None
    # A function that only some requests call, such as streamed ones, would leave the others without a key.
    passed = max(_calls(inside[candidate.label]) for candidate, _ in candidates)
    candidates = [
        (candidate, elsewhere)
        for candidate, elsewhere in candidates
        if _calls(inside[candidate.label]) >= PASSED * passed
    ]
    most = max(elsewhere for _, elsewhere in candidates)
    best = [candidate for candidate, elsewhere in candidates if elsewhere >= most]
    return min(
        best,
        key=lambda candidate: (
            *candidate.rank[:2],
            candidate.path != RETURN,
            _depth(inside[candidate.label]),
            candidate.rank,
            candidate.label,
        ),
    )


def _batches(
    paths: list[_Path], singles: Mapping[str, _Path], outside: Mapping[str, list[ObservedNode]]
) -> dict[str, _Path]:
    """Return the functions whose calls serve batches.

    The parts of a function replace the function if they, with parts in `singles`, take its time.
    """
    best = _best_by_label(paths)
    total = {label: sum(node.total_ns for node in outside[label]) for label in (*best, *singles)}
    chosen: dict[str, _Path] = {}
    for label in sorted(best, key=lambda label: (_depth(outside[label]), -total[label], label)):
        if _is_below(outside[label], chosen):
            continue
        below = [
            part
            for part in {**singles, **best}
            if part != label
            and any(node.called.label == label for candidate in outside[part] for node in candidate.above())
        ]
        parts = [part for part in below if not _is_below(outside[part], below)]
        has_batch = any(part in best for part in parts)
        names_it_itself = not best[label].path.startswith("self.")
        if has_batch and not names_it_itself and sum(total[part] for part in parts) >= COVERED * total[label]:
            continue
        chosen[label] = best[label]
    return dict(list(chosen.items())[:BATCHES])


def _best_by_label(paths: Iterable[_Path]) -> dict[str, _Path]:
    best: dict[str, _Path] = {}
    for candidate in paths:
        if candidate.label not in best or candidate.rank < best[candidate.label].rank:
            best[candidate.label] = candidate
    return best


def _shares_values(ids: SeenPath, bound: set[str]) -> bool:
    return bool(ids.digests) and len(ids.digests & bound) >= max(SHARED * len(ids.digests), 2)


def _rule_for(choice: FunctionChoice, label: str, nodes: list[ObservedNode]) -> FunctionProposal:
    """Return the choice's rule for a function. Add a rule if there is none."""
    for rule in choice.rules:
        if rule.label == label:
            return rule
    words = f"ran {calls_text(_calls(nodes), sum(node.total_ns for node in nodes))}"
    requests = set(choice.requests)
    is_within = any(requests.intersection((node, *node.above())) for node in nodes)
    group = OF_REQUESTS if is_within else OUTSIDE
    rule = FunctionProposal(label, first_ns=_first_ns(nodes), is_needed=True, group=group, reasons=[words])
    choice.rules.append(rule)
    return rule


def _nodes_by_label(tops: Iterable[ObservedNode]) -> dict[str, list[ObservedNode]]:
    nodes: dict[str, list[ObservedNode]] = {}
    for top in tops:
        for node in top.walk():
            if node.called.label and node.calls and node not in nodes.setdefault(node.called.label, []):
                nodes[node.called.label].append(node)
    return nodes


def _is_below(nodes: Iterable[ObservedNode], labels: Iterable[str]) -> bool:
    label_set = set(labels)
    return any(above.called.label in label_set for node in nodes for above in node.above())


def _depth(nodes: Iterable[ObservedNode]) -> int:
    return min(sum(1 for _ in node.above()) for node in nodes)


def _calls(nodes: Iterable[ObservedNode]) -> int:
    return sum(node.calls for node in nodes)


def _first_ns(nodes: Iterable[ObservedNode]) -> int:
    return min(filter(None, (node.first_ns for node in nodes)), default=0)


def _last_name(path: str) -> str:
    return re.split(r"[.\[\]]+", path)[-1]


def _path_text(path: str) -> str:
    return "the result" if path == RETURN else path
