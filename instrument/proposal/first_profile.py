"""The first profile of an observed service, and its text: short, with the reason of each rule above it."""

from __future__ import annotations

import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from instrument.instrumentors.requests import of_role, presets_for
from instrument.profile.keys import load
from instrument.profile.presets import path_of
from instrument.proposal.function_choice import (
    FunctionChoice,
    FunctionProposal,
    calls_text,
    choose_functions,
    count_text,
    is_probe,
    share_text,
    time_text,
)
from instrument.proposal.key_choice import choose_keys
from instrument.proposal.observation import Observation, ObservedNode

WIDTH = 118

_WORDS_OF_YAML = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")

PRESET_SAYS = {
    "serving": "requests by route, frameworks, loading, copies, gauges; a summary and a trace file at the end",
    "training": "forward, backward, optimizer, loaders, copies, gauges; a summary and a trace file at the end",
}

SHOWN = 6
"""The most items in a list of a comment."""

LEAST_OF_LAYERS, LEAST_OF_BLOCK = 0.05, 0.1
"""The least share of a proposed layer in all layers' time, and of a block's part in the block's time."""

LEAST_LAYER_NS = 20_000
"""The least ns per call of a proposed layer."""

LAYERS = 6
"""The most layer rules of a first profile."""


@dataclass(slots=True)
class LayerProposal:
    """A proposed rule of layers, by a path with `*` for numbers. `reasons` become its comment."""

    match: str
    device: bool = False
    reasons: list[str] = field(default_factory=list)


@dataclass(slots=True)
class FirstProfile:
    """A first profile: its rules, and comments at its `head`, on `requests` and on the functions `left_out`.

    `summary` describes the observation in one sentence.
    """

    service: str
    preset: str = "serving"
    summary: str = ""
    head: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    ignore: list[str] = field(default_factory=list)
    functions: list[FunctionProposal] = field(default_factory=list)
    layers: list[LayerProposal] = field(default_factory=list)
    capture: str = ""
    left_out: list[str] = field(default_factory=list)

    @property
    def rules(self) -> int:
        """The number of rules in the profile."""
        return len(self.functions) + len(self.layers)


def text_of(first: FirstProfile) -> str:
    """Return the YAML of a first profile."""
    return "\n".join(_lines(first)).rstrip() + "\n"


def _lines(first: FirstProfile) -> Iterator[str]:
    for paragraph in first.head:
        yield from wrap_comment(paragraph)
    if first.commands:
        yield "#"
        yield from (f"#   {_plain(command)}" for command in first.commands)
    yield ""
    yield f"service: ${{OTEL_SERVICE_NAME:-{first.service}}}"
    yield f"preset: {first.preset}  # {PRESET_SAYS[first.preset]}"
    if first.requests or first.ignore:
        yield ""
    for paragraph in first.requests:
        yield from wrap_comment(paragraph)
    if first.ignore:
        yield "requests:"
        paths = ", ".join(path if re.fullmatch(r"/[\w./-]*", path) else _quote(path) for path in first.ignore)
        yield from textwrap.wrap(f"  ignore: [{paths}]", WIDTH, subsequent_indent=" " * 11, break_on_hyphens=False)
    if first.functions:
        yield ""
        yield "functions:"
        for rule in first.functions:
            yield from wrap_comment("; ".join(rule.reasons), "  ")
            yield from _function_lines(rule)
    if first.layers:
        yield ""
        yield "layers:"
        for layer in first.layers:
            yield from wrap_comment("; ".join(layer.reasons), "  ")
            yield f"  - match: {_quote(layer.match)}"
            if layer.device:
                yield "    device: true"
    if first.capture:
        yield ""
        yield from wrap_comment(first.capture)
        yield "capture: {sample: 1.0, slow: p99*1.5, errors: true}"
    for paragraph in first.left_out:
        yield ""
        yield from wrap_comment(paragraph)


def _function_lines(rule: FunctionProposal) -> Iterator[str]:
    yield f"  - match: {_quote(rule.label)}"
    if rule.phase:
        yield f"    phase: {rule.phase}"
    elif rule.kind != "op":
        yield f"    kind: {rule.kind}"
    if rule.key:
        yield f"    key: {_quote(rule.key)}"
    if rule.batch and rule.weights:
        yield f"    batch: {{argument: {_quote(rule.batch)}, weights: {_quote(rule.weights)}}}"
    elif rule.batch:
        yield f"    batch: {_quote(rule.batch)}"
    if rule.device:
        yield "    device: true"


def wrap_comment(paragraph: str, indent: str = "") -> list[str]:
    """Wrap a paragraph into the lines of a comment."""
    lead = f"{indent}# "
    return textwrap.wrap(
        _plain(paragraph),
        WIDTH,
        initial_indent=lead,
        subsequent_indent=lead,
        break_on_hyphens=False,
        break_long_words=False,
    )


def list_text(items: Sequence[str]) -> str:
    """Return a text that lists the first items, and the number of further items."""
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more


def command_of(words: Sequence[str]) -> str:
    """Return the words of a command that a comment may show: the program, and files and modules of the folder.

    Other words may be secret, such as a key or an address with a password.
    """
    shown = list(words[:2] if words[:1] == ["-m"] else words[:1])
    words_left = list(words[len(shown) :])
    while words_left and _is_in_folder(words_left[0]):
        shown.append(words_left.pop(0))
    return " ".join([*shown, "..."] if words_left else shown)


def _is_in_folder(word: str) -> bool:
    """Return True for a file in the folder, or an object of a module there, as in `app.main:app`."""
    reference = re.fullmatch(r"([A-Za-z_]\w*)(?:\.\w+)*:[A-Za-z_]\w*", word)
    try:
        if reference is not None:
            return Path(f"{reference[1]}.py").is_file() or Path(reference[1]).is_dir()
        return re.fullmatch(r"[\w./][\w./-]*", word) is not None and Path(word).is_file()
    except OSError:  # a name that is too long, a folder that may not be read
        return False


def _quote(text: str) -> str:
    if re.fullmatch(r"[A-Za-z_][\w.]*", text) and text.lower() not in _WORDS_OF_YAML:
        return text
    return json.dumps(text, ensure_ascii=False).replace("$", "$$")


def _plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)


def first_profile_of(observation: Observation, words: Sequence[str], service: str, file: str) -> FirstProfile:
    """Propose a profile for an observed service. `words` are the command that runs it."""
    choice = choose_functions(observation)
    choose_keys(observation, choice)
    command = command_of(words)
    first = FirstProfile(service, functions=choice.rules, layers=choose_layers(observation))
    count = sum(node.calls for node in choice.requests)
    processes = f"{observation.processes} process{'es' * (observation.processes != 1)}"
    requests_text = f"{count_text(count)} request{'s' * (count != 1)}" if count else "no requests"
    first.summary = f"{requests_text} in {time_text(observation.seconds * 1e9)}, {processes}"
    first.head = [
        f"A first profile, by `instrument init -- {command}`: {first.summary}. "
        "Each rule has its reason above it; the numbers are of that run, of which observing took "
        f"{share_text(observation.cost)}. Delete what is of no use to you."
    ]
    first.head += list(_packages_seen(observation))
    first.commands = [
        f"instrument check {file} -- {command}",
        f"instrument run --profile {file} -- {command}",
    ]
    trains = any(node.called.kind == "phase" and node.called.name == "backward" for node in observation.nodes())
    if not count and trains:
        first.preset = "training"
    else:
        _describe_requests(first, observation, choice)
    first.requests += list(_preset_records(observation))
    if count:
        first.capture = (
            f"Each request is kept in full: {count_text(count / max(observation.seconds, 1e-3))} a second here. A busy "
            "service keeps a share, such as 0.01, and still all that are slow for their endpoint or that fail."
        )
    first.left_out = list(_left_out_remarks(observation, choice))
    return first


def _packages_seen(observation: Observation) -> Iterator[str]:
    packages = of_role(observation.packages, "web", "server", "engine", "library")
    if packages:
        device = " CUDA was used, so rules over layers have `device: true`." if observation.uses_cuda else ""
        yield f"Imported: {', '.join(packages)}.{device}"
    for package, preset in presets_for(observation.packages):
        yield f"A preset that is made for {package}, by hand: `instrument check --preset {preset}` prints it."


def _describe_requests(first: FirstProfile, observation: Observation, choice: FunctionChoice) -> None:
    met = [node for node in observation.nodes() if node.called.kind == "request"]
    paths = {node.called.name: node.called.name.rpartition(" ")[2] for node in met}
    probes = set(filter(is_probe, paths.values()))
    served = _call_sums(node for node in met if node.calls and paths[node.called.name] not in probes)
    if served:
        first.requests = [f"Requests were met at the server, with no rule: {served}."]
    ignored = [path for rule in load(path_of(first.preset)).requests for path in rule.ignore]
    if probes - set(ignored):
        first.requests.append("Probes, by their paths; the preset's are here, too.")
        first.ignore = [*ignored, *sorted(probes - set(ignored))]
    unmet = of_role(observation.packages, "unmet")
    if not met and unmet:
        first.requests.append(
            f"Requests of {', '.join(unmet)} are not met at the server: they are what the rule with `kind: request` "
            "names, so see that it is the right one."
        )
    elif not met and not choice.requests:
        first.requests.append(
            "No request was seen. Send the service some while `instrument init` runs, or give the function that "
            "answers one a rule with `kind: request`."
        )


def _preset_records(observation: Observation) -> Iterator[str]:
    """Yield sentences on copies and framework calls, which the preset records."""
    recorded = _call_sums(
        node
        for node in observation.nodes()
        if node.calls and not node.called.label and node.called.kind not in ("request", "layer")
    )
    if recorded:
        yield f"The preset records these, too: {recorded}."


def _call_sums(nodes: Iterable[ObservedNode]) -> str:
    """Return a text that lists the calls and times of nodes by name, the longest first."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for node in nodes:
        sums[node.called.name][0] += node.calls
        sums[node.called.name][1] += node.total_ns
    by_time = sorted(sums.items(), key=lambda item: (-item[1][1], item[0]))
    return list_text([f"{name} {calls_text(calls, total_ns)}" for name, (calls, total_ns) in by_time])


def _left_out_remarks(observation: Observation, choice: FunctionChoice) -> Iterator[str]:
    labels = {rule.label for rule in choice.rules}
    hot = [f"{label}: {words}" for label, words in choice.hot.items() if label not in labels]
    if hot:
        yield f"Left out, too short or too frequent to be worth a span each: {list_text(hot)}."
    small = len(choice.small - labels)
    if small:
        yield f"Left out, too little of the time: {small} function{'s' * (small != 1)} of your own that ran."
    if observation.unseen:
        unseen = [f"{label} ({why})" if why else label for label, why in sorted(observation.unseen.items())]
        yield f"Not observed: {list_text(unseen)}."
    if observation.silent:
        count = observation.silent
        yield (
            f"Not observed: {count} process{'es' * (count != 1)} that ended without a goodbye (SIGKILL, os._exit) or "
            "had not ended yet."
        )


@dataclass(slots=True)
class _Layers:
    """The layers of one pattern: sums of their calls and times, their paths and their classes."""

    calls: int = 0
    total_ns: int = 0
    places: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)


def pattern_of(path: str) -> str:
    """Return a layer's path with `*` in place of numbers."""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def choose_layers(observation: Observation) -> list[LayerProposal]:
    """Choose the layers for a first profile."""
    by_pattern: dict[str, _Layers] = defaultdict(_Layers)
    whole_ns = 0
    for node in observation.nodes():
        if node.called.kind != "layer":
            continue
        if not any(above.called.kind == "layer" for above in node.above()):
            whole_ns += node.total_ns
        if node.called.instance:
            layers = by_pattern[pattern_of(node.called.instance)]
            layers.calls += node.calls
            layers.total_ns += node.total_ns
            layers.places.add(node.called.instance)
            layers.classes.add(node.called.name)
    rules = []
    for pattern in _choose_patterns(by_pattern, whole_ns)[:LAYERS]:
        layers = by_pattern[pattern]
        classes = " or ".join(sorted(layers.classes)[:3])
        places = f"{len(layers.places)} of {classes}" if len(layers.places) > 1 else classes
        share = share_text(layers.total_ns / whole_ns)
        words = f"{places}: ran {calls_text(layers.calls, layers.total_ns)}, {share} of the layers' time"
        rules.append(LayerProposal(pattern, observation.uses_cuda, [words]))
    return rules


def _choose_patterns(by_pattern: Mapping[str, _Layers], whole_ns: int) -> list[str]:
    """Choose repeated blocks and their parts, then layers with much time outside of blocks."""
    total_ns = {pattern: layers.total_ns for pattern, layers in by_pattern.items()}
    large = sorted(
        (
            pattern
            for pattern, layers in by_pattern.items()
            if layers.calls and layers.total_ns >= max(LEAST_OF_LAYERS * whole_ns, LEAST_LAYER_NS * layers.calls)
        ),
        key=lambda pattern: (-total_ns[pattern], pattern),
    )
    blocks = [pattern for pattern in large if pattern.endswith("*") and len(by_pattern[pattern].places) > 1]
    outermost = sorted(_outside_of_others(blocks), key=lambda pattern: pattern.count("."))
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
    return chosen + _outside_of_others(alone)


def _outside_of_others(patterns: list[str]) -> list[str]:
    """Return the outermost patterns, which are below no other pattern."""
    return [pattern for pattern in patterns if not any(pattern.startswith(f"{prefix}.") for prefix in patterns)]
