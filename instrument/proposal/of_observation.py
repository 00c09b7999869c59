"""The first profile of a service that was observed."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from instrument.instrumentors.requests.packages import of_role, presets_for
from instrument.profile.keys import load
from instrument.profile.presets import path_of
from instrument.proposal.first_profile import FirstProfile, command_of, list_of
from instrument.proposal.function_choice import FunctionChoice, choose_functions, is_probe
from instrument.proposal.key_choice import choose_keys
from instrument.proposal.layer_choice import choose_layers
from instrument.proposal.observation import Observation
from instrument.proposal.wording import each_of, number_of, share_of, time_of

SHOWN = 6
"""The most that a comment lists of one sort."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def first_profile_of(observation: Observation, words: Sequence[str], service: str, file: str) -> FirstProfile:
    """What is proposed for a service whose processes were observed, run by the words of a command."""
    choice = choose_functions(observation)
    choose_keys(observation, choice)
    command = command_of(words)
    first = FirstProfile(service, functions=choice.rules, layers=choose_layers(observation))
    count = sum(node.calls for node in choice.requests)
    processes = f"{observation.processes} process{'es' * (observation.processes != 1)}"
    what = f"{number_of(count)} request{'s' * (count != 1)}" if count else "no requests"
    first.seen = f"{what} in {time_of(observation.seconds * 1e9)}, {processes}"
    first.head = [
        f"A first profile, by `instrument init -- {command}`: {first.seen}. "
        "Each rule has its reason above it; the numbers are of that run, of which observing took "
        f"{share_of(observation.cost)}. Delete what tells you nothing."
    ]
    first.head += list(_packages_told(observation))
    first.commands = [
        f"instrument check {file} -- {command}",
        f"instrument run --profile {file} -- {command}",
    ]
    if not count and _trains(observation):
        first.preset = "training"
    else:
        _tell_requests(first, observation, choice)
    first.requests += list(_recorded_anyway(observation))
    if count:
        first.capture = (
            f"Each request is kept in full: {number_of(count / max(observation.seconds, 1e-3))} a second here. A busy "
            "service keeps a share, such as 0.01, and still all that are slow for their endpoint or that fail."
        )
    first.left_out = list(_left_out(observation, choice))
    return first


def _packages_told(observation: Observation) -> Iterator[str]:
    seen = of_role(observation.packages, "web", "server", "engine", "library")
    if seen:
        device = " CUDA was used, so rules over layers have `device: true`." if observation.uses_cuda else ""
        yield f"Imported: {', '.join(seen)}.{device}"
    for package, preset in presets_for(observation.packages):
        yield f"A preset that is made for {package}, by hand: `instrument check --preset {preset}` prints it."


def _tell_requests(first: FirstProfile, observation: Observation, choice: FunctionChoice) -> None:
    by_name: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for node in observation.nodes():
        if node.called.kind == "request":
            by_name[node.called.name][0] += node.calls
            by_name[node.called.name][1] += node.total_ns
    paths = {name.rpartition(" ")[2] for name in by_name}
    probes = {path for path in paths if is_probe(path)}
    if by_name:
        told = [
            f"{name} {each_of(calls, total_ns)}"
            for name, (calls, total_ns) in sorted(by_name.items(), key=lambda one: (-one[1][1], one[0]))
            if name.rpartition(" ")[2] not in probes
        ]
        first.requests = [f"Requests were met at the server, with no rule: {list_of(told, SHOWN)}."] if told else []
    ignored = [path for rule in load(path_of(first.preset)).requests for path in rule.ignore]
    if probes - set(ignored):
        first.requests.append("Probes, by their paths; the preset's are here, too.")
        first.ignore = [*ignored, *sorted(probes - set(ignored))]
    unmet = of_role(observation.packages, "unmet")
    if not by_name and unmet:
        first.requests.append(
            f"Requests of {', '.join(unmet)} are not met at the server: they are what the rule with `kind: request` "
            "names, so see that it is the right one."
        )
    elif not by_name and not choice.requests:
        first.requests.append(
            "No request was seen. Send the service some while `instrument init` runs, or give the function that "
            "answers one a rule with `kind: request`."
        )


def _recorded_anyway(observation: Observation) -> Iterator[str]:
    """Copies and calls of frameworks, which the preset records."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for node in observation.nodes():
        if node.calls and not node.called.label and node.called.kind not in ("request", "layer"):
            sums[node.called.name][0] += node.calls
            sums[node.called.name][1] += node.total_ns
    told = [
        f"{name} {each_of(calls, total_ns)}"
        for name, (calls, total_ns) in sorted(sums.items(), key=lambda one: (-one[1][1], one[0]))
    ]
    if told:
        yield f"The preset records these, too: {list_of(told, SHOWN)}."


def _left_out(observation: Observation, choice: FunctionChoice) -> Iterator[str]:
    named = {rule.label for rule in choice.rules}
    hot = [f"{label}: {words}" for label, words in choice.hot.items() if label not in named]
    if hot:
        yield f"Left out, too short or too frequent to be worth a span each: {list_of(hot, SHOWN)}."
    small = len(choice.small - named)
    if small:
        yield f"Left out, too little of the time: {small} function{'s' * (small != 1)} of your own that ran."
    early = sorted(_called_at_import(observation))
    if early:
        yield (
            f"Not observed, because their own module calls them while it is imported: {list_of(early, SHOWN)}. The "
            "report's view `startup` has the time of the import."
        )
    inner = sorted(_nested_in(observation))
    if inner:
        yield (
            f"Not observed, because they are made inside functions: {list_of(inner, SHOWN)}. Where one matters, "
            '@profiled("name") in the code records it.'
        )
    if observation.unseen:
        told = [f"{label} ({why})" if why else label for label, why in sorted(observation.unseen.items())]
        yield f"Not observed: {list_of(told, SHOWN)}."
    if observation.silent:
        count = observation.silent
        yield (
            f"Not observed: {count} process{'es' * (count != 1)} that ended without a goodbye (SIGKILL, os._exit) or "
            "had not ended yet."
        )


def _nested_in(observation: Observation) -> Iterator[str]:
    """Functions of the service's own that are made inside functions and handed to a decorator, such as a route's."""
    for module, tree in _trees(observation):
        for outer in ast.walk(tree):
            if not isinstance(outer, FUNCTIONS):
                continue
            for node in ast.walk(outer):
                if node is not outer and isinstance(node, FUNCTIONS) and any(map(_is_route, node.decorator_list)):
                    yield f"{module}:{outer.name}.{node.name}"


def _called_at_import(observation: Observation) -> Iterator[str]:
    """Functions of the service's own that their modules call in their body, and nobody else was seen to."""
    ran = {node.called.label for node in observation.nodes() if node.calls}
    for module, tree in _trees(observation):
        own = {one.name for one in tree.body if isinstance(one, FUNCTIONS)}
        for statement in tree.body:
            if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr)):
                for node in ast.walk(statement):
                    name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
                    if name in own and f"{module}:{name}" not in ran:
                        yield f"{module}:{name}"


def _trees(observation: Observation) -> Iterator[tuple[str, ast.Module]]:
    """The parsed files of the service's own modules."""
    for module, name in sorted(observation.files.items()):
        try:
            yield module, ast.parse(Path(name).read_text("utf-8"))
        except (OSError, SyntaxError, ValueError, RecursionError):
            pass  # a file that has gone, or one of another kind


def _is_route(decorator: ast.expr) -> bool:
    """Whether a decorator is a call of something's method, as those of routes and tasks are."""
    return isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Attribute)


def _trains(observation: Observation) -> bool:
    for name in observation.files.values():
        try:
            if ".backward(" in Path(name).read_text("utf-8"):
                return True
        except (OSError, ValueError):
            pass
    return False
