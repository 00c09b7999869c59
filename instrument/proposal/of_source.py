"""The first profile of a service that has not run: by names, parameters and classes alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from instrument.errors import InstrumentError
from instrument.instrumentors.argument_watch import ID
from instrument.proposal.first_profile import FirstProfile, list_of
from instrument.proposal.function_choice import REQUEST, STEP, FunctionProposal, function_name, phase_by_name
from instrument.proposal.layer_choice import LayerProposal
from instrument.proposal.packages import of_role, ready_profiles
from instrument.proposal.service_source import SourceFunction, SourceModule, known_packages, read_source

RULES, OF_A_SORT, LAYERS = 12, 4, 6
"""The most functions, functions of one sort, and classes of layers that are named."""

SHOWN = 6

LEAST_STATEMENTS = 2
"""What is shorter is not worth a phase of its own."""

_LOADING = re.compile(
    r"^(?:load|warm\w*|compile|download|build)(?:_(?!app$|router|request|response|parser)\w+)?$|^setup$"
)
_LIST = re.compile(r"(?:^|\.)(?:list|List|Sequence|Iterable|tuple|Tuple|deque|set|Collection)\[['\"]?([\w.]+)")


def first_profile_of_source(root: Path, service: str, file: str) -> FirstProfile:
    """What is proposed for the service whose source lies in a folder. Raises `InstrumentError` where there is none."""
    modules = read_source(root)
    if not modules:
        raise InstrumentError(f"init: found no source of Python below {root}; give a command to run after --")
    packages = known_packages(modules)
    first = FirstProfile(service)
    first.head = [
        f"A first profile, by `instrument init`, of the source alone: {len(modules)} file{'s' * (len(modules) != 1)} "
        "below this folder, and nothing has run. Rules are by names and parameters; each has its reason above it. "
        "`instrument init -- script.py` goes by where the time is."
    ]
    seen = of_role(packages, "web", "server", "engine", "library")
    if seen:
        first.head.append(f"Imported: {', '.join(seen)}.")
    first.head += [
        f"A profile that is made for {package}, by hand: configs/{profile} in the repository."
        for package, profile in ready_profiles(packages)
    ]
    command = _command(modules, packages)
    first.commands = [f"instrument check {file}", f"instrument run --profile {file} -- {command}"]
    is_web = bool(of_role(packages, "web", "server", "engine"))
    routes = sorted({route for module in modules for route in module.routes})
    if routes:
        first.requests = [f"Requests are met at the server, with no rule: {list_of(routes, SHOWN)}."]
    elif unmet := of_role(packages, "unmet"):
        first.requests = [
            f"Requests of {', '.join(unmet)} are not met at the server: a rule of `kind: request` names them."
        ]
    if any(module.trains for module in modules) and not is_web:
        first.preset = "training"
    usable = [module for module in modules if not module.missing]
    first.functions = _functions(usable, takes_requests=is_web or first.preset == "training")
    layers = dict([layer for module in usable for layer in module.layers][:LAYERS])
    if layers:
        first.layers = [LayerProposal(tuple(layers), is_type=True, reasons=["layers of your own", *layers.values()])]
    for module in modules:
        if module.missing:
            what = list_of(sorted(module.missing), 3)
            first.left_out.append(f"Left out: {module.name}, for it cannot be imported here: {what} not found.")
    return first


def _command(modules: Sequence[SourceModule], packages: set[str]) -> str:
    """How the service is most likely started."""
    for module in modules:
        for app in module.apps:
            server = next(iter(of_role(packages, "server")), "gunicorn" if "flask" in packages else "uvicorn")
            if not module.is_script:
                return f"-m {server} {module.name}:{app}"
    for module in modules:
        if module.is_script:
            return f"-m {module.name}" if "." in module.name else f"{module.name}.py"
    return "script.py"


def _functions(modules: Sequence[SourceModule], *, takes_requests: bool) -> list[FunctionProposal]:
    fields = {name: held for module in modules for name, held in module.fields.items()}
    sorts: dict[str, list[FunctionProposal]] = {}
    for module in modules:
        for function in module.functions:
            if _is_passed_over(function):
                continue
            sort, rule = _proposal(function, fields, takes_requests=takes_requests)
            if rule is None:
                continue
            _name_main(rule, module)
            sorts.setdefault(sort, []).append(rule)
    order = ("request", "batch", "key", "step", "prepare", "compute", "post", "load")
    most = {"request": 1}
    chosen = [rule for sort in order for rule in sorts.get(sort, [])[: most.get(sort, OF_A_SORT)]]
    return chosen[:RULES]


def _name_main(rule: FunctionProposal, module: SourceModule) -> None:
    """Name a function of a script as it is where the script runs."""
    if module.is_script and "." not in module.name:
        in_main = f"__main__:{rule.label.partition(':')[2]}"
        if module.runs:  # to import it is to run it
            rule.label = in_main
        else:
            rule.others = (in_main,)


def _is_passed_over(function: SourceFunction) -> bool:
    name = function_name(f":{function.qualname}")
    is_layer = any(base.endswith("Module") for base in function.owner_bases)
    is_abstract = "Protocol" in function.owner_bases or "ABC" in function.owner_bases
    return name.startswith("_") or is_layer or is_abstract or not function.statements


def _proposal(
    function: SourceFunction, fields: dict[str, list[str]], *, takes_requests: bool
) -> tuple[str, FunctionProposal | None]:
    """The sort of a function and the rule that is proposed for it, None where there is nothing to say of it."""
    name = function_name(f":{function.qualname}")
    rule = FunctionProposal(f"{function.module}:{function.qualname}", reasons=[function.place])
    phase = phase_by_name(name)
    if phase == "compute" and function.suspends:
        phase = ""
    batch, key = next(_batches(function, fields), ""), next(_keys(function, fields), "")
    is_step = bool(STEP.search(name)) and "self" in function.parameters
    if batch:
        rule.batch, rule.kind = batch, "step" if is_step else "op"
        rule.reasons.append(f"takes many requests at a time: {batch} are their names")
        return "batch", rule
    if not takes_requests and REQUEST.search(name) and not is_step:
        rule.kind, rule.key = "request", key
        rule.reasons.append("a request by its name: there is no server whose requests are met")
        return "request", rule
    if key:
        rule.key, rule.kind, rule.phase = key, "phase" if phase else "op", phase
        rule.reasons.append(f"{key} names the request")
        return "key", rule
    if is_step:
        rule.kind = "step"
        rule.reasons.append("a step of a loop by its name")
        return "step", rule
    if not phase and _LOADING.search(name):
        phase = "load"
    if not phase or function.statements < LEAST_STATEMENTS:
        return "", None
    rule.kind, rule.phase = "phase", phase
    rule.reasons.append(f"{phase} by its name")
    return phase, rule


def _keys(function: SourceFunction, fields: dict[str, list[str]]) -> Iterator[str]:
    """Paths of parameters that name one request."""
    yield from (name for name in function.parameters if ID.match(name) and not name.endswith("s"))
    yield from (f"{name}.{part}" for name, part in function.parts if ID.match(part) and not part.endswith("s"))
    for name, annotation in function.annotations:
        held = fields.get(annotation.strip("'\"").rpartition(".")[2], [])
        yield from (f"{name}.{one}" for one in held if ID.match(one) and not one.endswith("s"))


def _batches(function: SourceFunction, fields: dict[str, list[str]]) -> Iterator[str]:
    """Paths of parameters that name many."""
    yield from (name for name in function.parameters if ID.match(name) and name.endswith("ids"))
    for name, annotation in function.annotations:
        of = _LIST.search(annotation)
        held = fields.get(of[1].rpartition(".")[2], []) if of else []
        yield from (f"{name}[].{one}" for one in held if ID.match(one) and not one.endswith("s"))
