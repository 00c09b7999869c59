"""Propose a first profile for an observed service, and write it as YAML with a comment on the reason for each rule."""

from __future__ import annotations

import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from instrument.instrumentors.argument_watch import ID, SeenPath
from instrument.instrumentors.call_values import RETURN
from instrument.instrumentors.known_packages import filter_packages_by_role, find_presets
from instrument.profile.keys import load
from instrument.profile.presets import preset_path
from instrument.proposal.function_choice import (
    OF_REQUESTS,
    OUTSIDE,
    CallGroup,
    FunctionChoice,
    RuleProposal,
    calls_text,
    choose_functions,
    count_text,
    group_nodes_by_label,
    is_health_check_path,
    share_text,
    time_text,
)
from instrument.proposal.observation import Observation, ObservedNode

KEYS, BATCHES = 3, 3
"""The maximum numbers of rules with a key, and with a batch, for functions outside of requests."""

LOOKS = 3
"""The minimum number of observed values of a possible request key."""

DISTINCT = 0.8
"""The minimum share of distinct values for a possible request key."""

SHARED = 0.5
"""The minimum share of an argument's values that are request keys."""

LEAST_BATCH = 0.05
"""The minimum time of a batch function, as a share of the work outside of requests."""

PASSED = 0.95
"""The minimum number of calls of a candidate for the request key, relative to the most called candidate."""

COVERED = 0.8
"""The share of a batch function's time from which its callees are proposed instead of the function."""


@dataclass(frozen=True, slots=True)
class _Path:
    """A path to an argument of a function that may be the key of requests. The path with the lowest `rank` is the most
    likely key."""

    label: str
    path: str
    ids: SeenPath

    @property
    def rank(self) -> tuple[bool, bool, bool, int, str]:
        is_inside = self.path.startswith("self.")
        return bool(self.ids.of_class), is_inside, not ID.match(_last_name(self.path)), self.path.count("."), self.path


def choose_keys(observation: Observation, choice: FunctionChoice) -> None:
    """Add keys and batches to the proposed rules. A function without a rule gets a rule."""
    inside = _group_calls_below(choice.requests)
    key_path = _choose_key_path(observation, choice, inside)
    if key_path is None:
        return
    key_values = key_path.ids.digests
    outside = _group_calls_below(choice.units)
    shared = [
        _Path(label, path, ids)
        for label in outside.keys() - inside.keys()
        for path, ids in observation.keys.get(label, {}).items()
        if ids.digests and len(ids.digests & key_values) >= max(SHARED * len(ids.digests), 2)
    ]
    singles = _pick_best_paths([path for path in shared if not path.ids.many])
    # A function with one request as its argument serves that request, even if its object has others.
    many = [path for path in shared if path.ids.many and not (path.label in singles and path.path.startswith("self."))]
    least_ns = LEAST_BATCH * CallGroup(choice.units).total_ns
    batches = {
        label: candidate
        for label, candidate in _choose_batch_functions(many, singles, outside).items()
        if outside[label].total_ns >= least_ns
    }
    units = set(choice.units)
    batch_parents = {
        node.parent for label in batches for node in outside[label].nodes if units.intersection(node.iterate_callers())
    }
    added = 0
    for label, candidate in batches.items():
        rule = _get_or_add_rule(choice, label, outside[label])
        rule.batch = candidate.path
        rule.weights = candidate.ids.weights
        if rule.kind == "op" and any(unit.callee.label == label for unit in choice.units):
            rule.kind = "step"
        mean = candidate.ids.items / max(candidate.ids.looks, 1)
        rule.reasons.append(f"serves {mean:.1f} requests at a time, at most {candidate.ids.largest}")
    for label, candidate in sorted(singles.items(), key=lambda item: (outside[item[0]].first_ns, item[0])):
        paths = outside[label]
        if label in batches or _is_called_below(paths, {**batches, **singles}):
            continue
        if any(node.parent in batch_parents for node in paths.nodes):
            rule = _get_or_add_rule(choice, label, paths)
            rule.batch = candidate.path
            rule.reasons.append("serves one request at a time, besides the batches")
        elif added < KEYS and paths.calls <= 2 * len(candidate.ids.digests & key_values):
            added += 1
            rule = _get_or_add_rule(choice, label, paths)
            rule.key = candidate.path
            rule.reasons.append(f"{candidate.path} names the request here")
            if rule.kind == "op":
                rule.kind = "phase"  # between it and the request's own phases is transport
    if batches or added or not key_path.ids.of_class:
        rule = _get_or_add_rule(choice, key_path.label, inside[key_path.label])
        rule.key = key_path.path
        rule.reasons.append(f"{'the result' if key_path.path == RETURN else key_path.path} names the request")
    choice.rules.sort(key=lambda rule: rule.sort_key)


def _choose_key_path(observation: Observation, choice: FunctionChoice, inside: Mapping[str, CallGroup]) -> _Path | None:
    """Choose the argument that identifies requests best."""
    count = CallGroup(choice.requests).calls
    values_elsewhere = [
        set().union(*(ids.digests for ids in paths.values()))
        for label, paths in observation.keys.items()
        if label not in inside
    ]
    candidates: list[tuple[int, _Path]] = []
    for label, paths_of_label in inside.items():
        for path, ids in observation.keys.get(label, {}).items():
            is_distinct = len(ids.digests) >= max(DISTINCT * min(ids.looks, count), 2)
            if ids.many or ids.looks < LOOKS or not is_distinct or paths_of_label.calls > 1.5 * count:
                continue
            elsewhere = sum(len(ids.digests & values) >= LOOKS for values in values_elsewhere)
            if elsewhere or ID.match(_last_name(path)):
                candidates.append((elsewhere, _Path(label, path, ids)))
    # A function that only some requests call, such as streamed ones, would leave the others without a key.
    most_calls = max((inside[candidate.label].calls for _, candidate in candidates), default=0)
    return min(
        (item for item in candidates if inside[item[1].label].calls >= PASSED * most_calls),
        key=lambda item: (
            -item[0],
            *item[1].rank[:2],
            item[1].path != RETURN,
            _min_depth(inside[item[1].label]),
            item[1].rank,
            item[1].label,
        ),
        default=(0, None),
    )[1]


def _choose_batch_functions(
    paths: list[_Path], singles: Mapping[str, _Path], outside: Mapping[str, CallGroup]
) -> dict[str, _Path]:
    """Return the functions with calls that serve batches. Prefer callees that take most of a function's time."""
    best = _pick_best_paths(paths)
    chosen: dict[str, _Path] = {}
    for label in sorted(best, key=lambda label: (_min_depth(outside[label]), -outside[label].total_ns, label)):
        if _is_called_below(outside[label], chosen):
            continue
        below = [part for part in {**singles, **best} if part != label and _is_called_below(outside[part], [label])]
        parts = [part for part in below if not _is_called_below(outside[part], below)]
        has_batch = best[label].path.startswith("self.") and any(part in best for part in parts)
        if has_batch and sum(outside[part].total_ns for part in parts) >= COVERED * outside[label].total_ns:
            continue
        chosen[label] = best[label]
    return dict(list(chosen.items())[:BATCHES])


def _pick_best_paths(paths: Iterable[_Path]) -> dict[str, _Path]:
    return {path.label: path for path in sorted(paths, key=lambda path: path.rank, reverse=True)}


def _get_or_add_rule(choice: FunctionChoice, label: str, paths: CallGroup) -> RuleProposal:
    for rule in choice.rules:
        if rule.label == label:
            return rule
    requests = set(choice.requests)
    is_within = any(requests.intersection((node, *node.iterate_callers())) for node in paths.nodes)
    group = OF_REQUESTS if is_within else OUTSIDE
    choice.rules.append(RuleProposal(label, first_ns=paths.first_ns, is_needed=True, group=group, reasons=[str(paths)]))
    return choice.rules[-1]


def _group_calls_below(tops: Iterable[ObservedNode]) -> dict[str, CallGroup]:
    return group_nodes_by_label(dict.fromkeys(node for top in tops for node in top.iterate_call_paths() if node.calls))


def _is_called_below(paths: CallGroup, labels: Collection[str]) -> bool:
    return any(above.callee.label in labels for node in paths.nodes for above in node.iterate_callers())


def _min_depth(paths: CallGroup) -> int:
    return min(sum(1 for _ in node.iterate_callers()) for node in paths.nodes)


def _last_name(path: str) -> str:
    return re.split(r"[.\[\]]+", path)[-1]


WIDTH = 118

_WORDS_OF_YAML = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")

PRESET_SAYS = {
    "serving": "requests by route, frameworks, loading, copies, gauges; a summary and a trace file at the end",
    "training": "forward, backward, optimizer, loaders, copies, gauges; a summary and a trace file at the end",
}

SHOWN = 6
"""The maximum number of items that a comment lists. Further items are only counted."""

LEAST_OF_LAYERS, LEAST_OF_BLOCK = 0.05, 0.1
"""The minimum share of a layer in the time of all layers, and in the time of the block around the layer."""

LEAST_LAYER_NS = 20_000
"""The minimum mean duration of a layer's call in ns. A faster layer gets no rule."""

LAYERS = 6


class FirstProfile(NamedTuple):
    """The text of a first profile, the number of its rules, and a sentence on the amount of observed calls."""

    text: str
    rules: int
    summary: str


def format_rules(key: str, rules: Sequence[RuleProposal]) -> list[str]:
    lines = [f"{key}:"] if rules else []
    for rule in rules:
        batch = rule.batch and _quote_yaml(rule.batch)
        if rule.batch and rule.weights:
            batch = f"{{argument: {batch}, weights: {_quote_yaml(rule.weights)}}}"
        values = {
            "phase": rule.phase,
            "kind": "" if rule.phase or rule.kind == "op" else rule.kind,
            "key": rule.key and _quote_yaml(rule.key),
            "batch": batch,
            "device": "true" * rule.device,
        }
        lines += [*wrap_comment("; ".join(rule.reasons), "  "), f"  - match: {_quote_yaml(rule.label)}"]
        lines += [f"    {name}: {value}" for name, value in values.items() if value]
    return lines


def wrap_comment(paragraph: str, indent: str = "") -> list[str]:
    lead = f"{indent}# "
    return textwrap.wrap(
        _replace_unprintable(paragraph),
        WIDTH,
        initial_indent=lead,
        subsequent_indent=lead,
        break_on_hyphens=False,
        break_long_words=False,
    )


def join_first_items(items: Sequence[str]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more


def remove_secret_words(words: Sequence[str]) -> str:
    """Return a command without words that may be secret, such as a key or an address with a password."""
    shown = list(words[:2] if words[:1] == ["-m"] else words[:1])
    words_left = list(words[len(shown) :])
    while words_left and _is_local_file_or_object(words_left[0]):
        shown.append(words_left.pop(0))
    return " ".join([*shown, "..."] if words_left else shown)


def _is_local_file_or_object(word: str) -> bool:
    """Return True for a file in the current folder, or an object of a module there, such as `app.main:app`."""
    reference = re.fullmatch(r"([A-Za-z_]\w*)(?:\.\w+)*:[A-Za-z_]\w*", word)
    try:
        if reference is not None:
            return Path(f"{reference[1]}.py").is_file() or Path(reference[1]).is_dir()
        return re.fullmatch(r"[\w./][\w./-]*", word) is not None and Path(word).is_file()
    except OSError:  # a name that is too long, a folder that may not be read
        return False


def _quote_yaml(text: str) -> str:
    if re.fullmatch(r"[A-Za-z_][\w.]*", text) and text.lower() not in _WORDS_OF_YAML:
        return text
    return json.dumps(text, ensure_ascii=False).replace("$", "$$")


def _replace_unprintable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)


def propose_first_profile(observation: Observation, words: Sequence[str], service: str, file: str) -> FirstProfile:
    choice = choose_functions(observation)
    choose_keys(observation, choice)
    layers, command = choose_layers(observation), remove_secret_words(words)
    count = sum(node.calls for node in choice.requests)
    processes = f"{observation.processes} process{'es' * (observation.processes != 1)}"
    requests_text = f"{count_text(count)} request{'s' * (count != 1)}" if count else "no requests"
    summary = f"{requests_text} in {time_text(observation.seconds * 1e9)}, {processes}"
    head = (
        f"A first profile, by `instrument init -- {command}`: {summary}. "
        "Each rule has its reason above it; the numbers are of that run, of which observing took "
        f"{share_text(observation.cost)}. Delete what is of no use to you."
    )
    commands = (f"instrument check {file} -- {command}", f"instrument run --profile {file} -- {command}")
    trains = any(node.callee.kind == "phase" and node.callee.name == "backward" for node in observation.nodes())
    preset = "training" if trains and not count else "serving"
    ignored = _find_ignored_paths(observation, preset)
    requests = [*_describe_requests(observation, choice, ignored)] if preset == "serving" else []
    capture = (
        f"Each request is kept in full: {count_text(count / max(observation.seconds, 1e-3))} a second here. A busy "
        "service keeps a share, such as 0.01, and still all that are slow for their endpoint or that fail."
    )
    blocks = [
        [
            *_comment_lines([head, *_describe_packages(observation)]), "#",
            *(f"#   {_replace_unprintable(line)}" for line in commands),
        ],
        [f"service: ${{OTEL_SERVICE_NAME:-{service}}}", f"preset: {preset}  # {PRESET_SAYS[preset]}"],
        [*_comment_lines([*requests, *_describe_preset_calls(observation)]), *_format_ignored_paths(ignored)],
        format_rules("functions", choice.rules),
        format_rules("layers", layers),
        [*wrap_comment(capture), "capture: {sample: 1.0, slow: p99*1.5, errors: true}"] if count else [],
        *map(wrap_comment, _describe_left_out(observation, choice)),
    ]  # fmt: skip
    text = "\n\n".join("\n".join(lines) for lines in blocks if lines)
    return FirstProfile(f"{text}\n", len(choice.rules) + len(layers), summary)


def _comment_lines(paragraphs: Iterable[str]) -> list[str]:
    return [line for paragraph in paragraphs for line in wrap_comment(paragraph)]


def _find_ignored_paths(observation: Observation, preset: str) -> list[str]:
    """Return the paths of the preset and of observed health checks. Return [] if the preset has all health checks."""
    ignored = [path for rule in load(preset_path(preset)).requests for path in rule.ignore]
    probes = {path for node in observation.nodes() if is_health_check_path(path := _request_path(node))}
    return [*ignored, *sorted(probes - set(ignored))] if preset == "serving" and probes - set(ignored) else []


def _request_path(node: ObservedNode) -> str:
    return node.callee.name.rpartition(" ")[2] if node.callee.kind == "request" else ""


def _format_ignored_paths(paths: Sequence[str]) -> list[str]:
    text = ", ".join(path if re.fullmatch(r"/[\w./-]*", path) else _quote_yaml(path) for path in paths)
    lines = textwrap.wrap(f"  ignore: [{text}]", WIDTH, subsequent_indent=" " * 11, break_on_hyphens=False)
    return ["requests:", *lines] if paths else []


def _describe_packages(observation: Observation) -> Iterator[str]:
    packages = filter_packages_by_role(observation.packages, "web", "server", "engine", "library")
    if packages:
        device = " CUDA was used, so rules over layers have `device: true`." if observation.uses_cuda else ""
        yield f"Imported: {', '.join(packages)}.{device}"
    for package, preset in find_presets(observation.packages):
        yield f"A preset that is made for {package}, by hand: `instrument check --preset {preset}` prints it."


def _describe_requests(observation: Observation, choice: FunctionChoice, ignored: Sequence[str]) -> Iterator[str]:
    request_nodes = [node for node in observation.nodes() if node.callee.kind == "request"]
    served = _format_call_sums(
        node for node in request_nodes if node.calls and not is_health_check_path(_request_path(node))
    )
    if served:
        yield f"Requests were met at the server, with no rule: {served}."
    if ignored:
        yield "Probes, by their paths; the preset's are here, too."
    unmet = filter_packages_by_role(observation.packages, "unmet")
    if not request_nodes and unmet:
        yield (
            f"Requests of {', '.join(unmet)} are not met at the server: they are what the rule with `kind: request` "
            "names, so see that it is the right one."
        )
    elif not request_nodes and not choice.requests:
        yield (
            "No request was seen. Send the service some while `instrument init` runs, or give the function that "
            "answers one a rule with `kind: request`."
        )


def _describe_preset_calls(observation: Observation) -> Iterator[str]:
    recorded = _format_call_sums(
        node
        for node in observation.nodes()
        if node.calls and not node.callee.label and node.callee.kind not in ("request", "layer")
    )
    if recorded:
        yield f"The preset records these, too: {recorded}."


def _format_call_sums(nodes: Iterable[ObservedNode]) -> str:
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for node in nodes:
        sums[node.callee.name][0] += node.calls
        sums[node.callee.name][1] += node.total_ns
    by_time = sorted(sums.items(), key=lambda item: (-item[1][1], item[0]))
    return join_first_items([f"{name} {calls_text(calls, total_ns)}" for name, (calls, total_ns) in by_time])


def _describe_left_out(observation: Observation, choice: FunctionChoice) -> Iterator[str]:
    labels = {rule.label for rule in choice.rules}
    hot = [f"{label}: {words}" for label, words in choice.hot.items() if label not in labels]
    if hot:
        yield f"Left out, too short or too frequent to be worth a span each: {join_first_items(hot)}."
    small = len(choice.small - labels)
    if small:
        yield f"Left out, too little of the time: {small} function{'s' * (small != 1)} of your own that ran."
    if observation.unseen:
        unseen = [f"{label} ({why})" if why else label for label, why in sorted(observation.unseen.items())]
        yield f"Not observed: {join_first_items(unseen)}."
    if observation.silent:
        count = observation.silent
        yield (
            f"Not observed: {count} process{'es' * (count != 1)} that ended without a goodbye (SIGKILL, os._exit) or "
            "had not ended yet."
        )


def make_layer_pattern(path: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def choose_layers(observation: Observation) -> list[RuleProposal]:
    by_pattern: dict[str, CallGroup] = defaultdict(CallGroup)
    whole_ns = 0
    for node in observation.nodes():
        if node.callee.kind != "layer":
            continue
        if not any(above.callee.kind == "layer" for above in node.iterate_callers()):
            whole_ns += node.total_ns
        if node.callee.instance:
            by_pattern[make_layer_pattern(node.callee.instance)].nodes.append(node)
    rules = []
    for pattern in _choose_patterns(by_pattern, whole_ns)[:LAYERS]:
        layers, count = by_pattern[pattern], _count_layers(by_pattern[pattern])
        classes = " or ".join(sorted({node.callee.name for node in layers.nodes})[:3])
        share = share_text(layers.total_ns / whole_ns)
        words = f"{f'{count} of ' if count > 1 else ''}{classes}: {layers}, {share} of the layers' time"
        rules.append(RuleProposal(pattern, device=observation.uses_cuda, reasons=[words]))
    return rules


def _count_layers(layers: CallGroup) -> int:
    return len({node.callee.instance for node in layers.nodes})


def _choose_patterns(by_pattern: Mapping[str, CallGroup], whole_ns: int) -> list[str]:
    """Choose patterns for a model's layers: repeated blocks, the layers directly in them, and other large layers."""
    total_ns = {pattern: layers.total_ns for pattern, layers in by_pattern.items()}
    large = sorted(
        (
            pattern
            for pattern, layers in by_pattern.items()
            if layers.calls and layers.total_ns >= max(LEAST_OF_LAYERS * whole_ns, LEAST_LAYER_NS * layers.calls)
        ),
        key=lambda pattern: (-total_ns[pattern], pattern),
    )
    blocks = [pattern for pattern in large if pattern.endswith("*") and _count_layers(by_pattern[pattern]) > 1]
    outermost = sorted(_keep_outer_patterns(blocks), key=lambda pattern: pattern.count("."))
    chosen: list[str] = []
    for block in outermost:
        least_ns = LEAST_OF_BLOCK * total_ns[block]
        parts = [part for part in large if part.rpartition(".")[0] == block and total_ns[part] >= least_ns]
        chosen += [block, *parts]
    alone = [
        pattern
        for pattern in large
        if not any(f"{block}.".startswith(f"{pattern}.") or pattern.startswith(f"{block}.") for block in outermost)
    ]
    return chosen + _keep_outer_patterns(alone)


def _keep_outer_patterns(patterns: list[str]) -> list[str]:
    return [pattern for pattern in patterns if not any(pattern.startswith(f"{prefix}.") for prefix in patterns)]
