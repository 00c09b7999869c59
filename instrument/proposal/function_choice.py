"""Choose the functions that the profile of `instrument init` records, from the observed call trees.

A function gets a rule if its self time is large, or if it calls two or more functions with a rule. Layers, copies, and
functions with too short or too frequent calls get no rule.

In a service without requests, the functions that `main` or a thread's body calls repeatedly are the units of work.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from instrument.profile.model import TIME_UNITS
from instrument.proposal.observation import Observation, ObservedNode


def count_text(value: float) -> str:
    """Format a count: exact below 1,000, otherwise with three significant digits."""
    whole = round(value)
    return f"{round(whole, min(3 - len(str(whole)), 0)):,}"


def time_text(ns: float) -> str:
    """Format a time with its unit and two significant digits."""
    unit = next((unit for unit, size in TIME_UNITS.items() if ns >= size), "ns")
    value = ns / TIME_UNITS[unit]
    return f"{value:.2g} {unit}" if value < 10 else f"{value:.0f} {unit}"


def calls_text(calls: int, total_ns: int) -> str:
    """Format a number of calls and their mean time, such as "12 times, 3.4 ms each"."""
    if calls == 1:
        return f"once, {time_text(total_ns)}"
    mean_text = f", {time_text(total_ns / calls)} each" if calls else ""
    return f"{calls:,} times{mean_text}"


def share_text(share: float) -> str:
    return f"{min(share, 1.0) * 100:.2g} %" if share < 0.1 else f"{min(share, 1.0):.0%}".replace("%", " %")


LEAST_OF_REQUEST, LEAST_OF_WORK, LEAST_OF_RUN = 0.02, 0.03, 0.05
"""The minimum self times for a rule, as shares of the time of requests, of work units, and of the run."""

LEAST_SPLIT = 0.1
"""The minimum share of the whole time for a rule on a function with several large callees."""

LEAST_PART = 0.02
"""The minimum share of a function's time for a callee to count as large."""

SHORT_NS = 5_000
"""The minimum mean time of a call in ns. A faster function gets no rule, because recording would distort its time."""

HOT = 10_000
"""The maximum calls per second. A function with more calls gets no rule."""

REPEATED = 3
"""The minimum number of calls in a process for a function that counts as repeated."""

LOADING_NS = 50_000_000
"""The minimum total time in ns per process for a rule on a loading function."""

REPEATS_REQUEST, REPEATS_OWN = 0.9, 0.2
"""The least total time and the largest self time by which a function counts as a wrapper of requests, as shares of the
requests' time."""

RULES = 12
"""The maximum number of rules for functions, except those for loading, requests, steps, keys and batches."""

_WAITING = re.compile(r"(^|_)(wait|sleep|idle|poll|listen|recv|receive|acquire|heartbeat|run_forever)(_|$)")
REQUEST = re.compile(
    r"(^|_)(handle|handler|process|serve|predict|infer|generate|answer|respond|request|query|classify|embed|transcribe|"
    r"translate|chat|complete|completion|on_message|consume|invoke|do_(get|post|put)|reply|ask|inference|execute)(_|$)"
)
STEP = re.compile(r"(^|_)(step|iteration|tick)(_|$)|^_?(run|process|forward|execute|handle|serve|infer|predict)_batch$")
_LOADING = re.compile(
    r"(^|_)(load|loads|build|make|create|init|setup|warm|warmup|warm_up|compile|download|prepare|from_pretrained)(_|$)"
)
_PHASES = {
    "prepare": re.compile(
        r"(^|_)(preprocess|pre_process|prepare|tokeni[sz]e|parse|read|validate|collate|featuri[sz]e|decode_request)(_|$)"
    ),
    "compute": re.compile(r"(^|_)(predict|forward|infer|inference|compute|run_model|prefill|decode_step)(_|$)"),
    "post": re.compile(
        r"(^|_)(postprocess|post_process|detokeni[sz]e|encode_response|serialize|format|render|decode_output)(_|$)"
    ),
}
_PROBE = re.compile(r"/(\w*health\w*|live\w*|ready\w*|alive|ping|status|metrics|favicon\.ico)$", re.IGNORECASE)
_MIDDLEWARE = re.compile(r"\.(__call__|dispatch)$")
_SPECIAL = re.compile(r"(^|\.)__(?!call__)\w+__$|<lambda>|\.(setter|deleter)$|\[")


LOADS, OF_REQUESTS, OUTSIDE = range(3)
"""The groups of rules in the order of the profile: at the service's start, below requests, and outside of requests."""


@dataclass(slots=True)
class RuleProposal:
    """A rule that `instrument init` proposes for a function, or for layers.

    - `reasons`: the comment above the rule in the profile
    - `label`: `module:qualname` of the function, or the path of layers with `*` for numbers
    - `key`, `batch`, `weights`: paths to argument values, in the syntax of a profile
    """

    label: str
    kind: str = "op"
    phase: str = ""
    device: bool = False
    key: str = ""
    batch: str = ""
    weights: str = ""
    share: float = 0.0
    first_ns: int = 0
    is_needed: bool = False
    group: int = LOADS
    reasons: list[str] = field(default_factory=list)

    @property
    def sort_key(self) -> tuple[int, int, str]:
        return self.group, self.first_ns, self.label


@dataclass(slots=True)
class FunctionChoice:
    """The functions that get a rule, and the functions that get none.

    - `hot`: the functions with too short or too frequent calls, with the reason for each
    - `small`: the functions with little time
    """

    rules: list[RuleProposal]
    hot: dict[str, str]
    small: set[str]
    requests: list[ObservedNode]
    units: list[ObservedNode]


@dataclass(slots=True)
class CallGroup:
    """The call paths of one function, or of layers whose paths differ only in numbers."""

    nodes: list[ObservedNode] = field(default_factory=list)
    own_ns: int = 0

    @property
    def calls(self) -> int:
        return sum(node.calls for node in self.nodes)

    @property
    def total_ns(self) -> int:
        return sum(node.total_ns for node in self.nodes)

    @property
    def first_ns(self) -> int:
        return min(filter(None, (node.first_ns for node in self.nodes)), default=0)

    def __str__(self) -> str:
        return f"ran {calls_text(self.calls, self.total_ns)}"


def group_nodes_by_label(nodes: Iterable[ObservedNode]) -> dict[str, CallGroup]:
    """Group call paths by the label of their function. Call paths without a label are left out."""
    groups: dict[str, CallGroup] = {}
    for node in nodes:
        if node.callee.label:
            groups.setdefault(node.callee.label, CallGroup()).nodes.append(node)
    return groups


def function_name(label: str) -> str:
    """Return a function's name in snake case: `handle_request` for the label `app:Server.handleRequest`."""
    name = label.rpartition(":")[2].rpartition(".")[2]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def is_health_check_path(path: str) -> bool:
    return path.startswith("/") and _PROBE.search(path) is not None


def suggest_phase(name: str) -> str:
    """Return the phase that the name of a function suggests, such as `prepare` for `tokenize`. Return "" for other
    names."""
    return next((phase for phase, names in _PHASES.items() if names.search(name)), "")


def choose_functions(observation: Observation) -> FunctionChoice:
    return _Chooser(observation).choose_rules()


class _Chooser:
    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        served = [node for node in observation.nodes() if node.callee.kind == "request"]
        self._requests = [
            node for node in served if not is_health_check_path(node.callee.name.rpartition(" ")[2])
        ] or served
        self._hot = self._find_hot_functions()
        units = self._find_work_units()
        self._named_requests: list[ObservedNode] = []
        if not self._requests:
            self._named_requests = self._choose_requests(units)
            self._requests = self._named_requests
        self._units = [unit for unit in units if unit not in self._named_requests]
        self._name_of_units = "the work outside of requests" if self._requests else "the work"

    def choose_rules(self) -> FunctionChoice:
        rules: dict[str, RuleProposal] = {}
        self._small: set[str] = set()
        roots = [] if self._requests or self._units else self._observation.roots
        for rule in chain(
            self._propose_requests(),
            self._propose_loading_functions(),
            self._propose_functions_below(self._requests, "the requests", LEAST_OF_REQUEST),
            self._propose_top_units(),
            self._propose_functions_below(self._units, self._name_of_units, LEAST_OF_WORK),
            self._propose_functions_below(roots, "the run", LEAST_OF_RUN),
            self._propose_blocking_functions(rules),
        ):
            rules.setdefault(rule.label, rule)
        largest = self._keep_largest_rules(list(rules.values()))
        self._small.update(rules.keys() - {rule.label for rule in largest})
        self._small -= {rule.label for rule in largest} | self._hot.keys()
        rules_in_order = sorted(largest, key=lambda rule: rule.sort_key)
        return FunctionChoice(rules_in_order, self._hot, self._small, self._requests, self._units)

    # ---------------------------------------------------------------- kinds of work

    def _find_work_units(self) -> list[ObservedNode]:
        """Find the units of work: functions outside of requests that are called repeatedly."""
        units: list[ObservedNode] = []

        def collect_units(nodes: Iterable[ObservedNode]) -> None:
            for node in nodes:
                if node.callee.kind in ("request", "layer", "copy"):
                    continue
                is_once = node.calls < REPEATED * max(len(node.processes), 1)
                # A call without a label is the server's own: it is no unit of work, but units may be below it.
                if is_once or not node.callee.label:
                    collect_units(node.children.values())
                elif not _WAITING.search(function_name(node.callee.label)):
                    units.append(self._find_delegate(node))

        collect_units(self._observation.roots)
        return units

    def _find_delegate(self, node: ObservedNode) -> ObservedNode:
        while function_name(node.callee.label).startswith("_"):
            delegates = [
                child
                for child in node.children.values()
                if child.callee.label and child.calls == node.calls and child.total_ns >= 0.9 * node.total_ns
            ]
            if len(delegates) != 1:
                break
            node = delegates[0]
        return node

    def _choose_requests(self, units: list[ObservedNode]) -> list[ObservedNode]:
        """Choose the units of work that are most likely requests, for a service without a known server."""
        names = [(unit, function_name(unit.callee.label)) for unit in units if self._may_get_rule(unit)]
        likely = [unit for unit, name in names if REQUEST.search(name) and not STEP.search(name)]
        largest = max(likely, key=lambda unit: (unit.total_ns, unit.callee.label), default=None)
        return [unit for unit in units if largest is not None and unit.callee.label == largest.callee.label]

    def _find_hot_functions(self) -> dict[str, str]:
        """Return the functions whose calls are too short or too frequent, with the reason for each."""
        seconds = max(self._observation.seconds, 1e-3)
        hot = {}
        by_label = group_nodes_by_label(self._observation.nodes())
        for label, paths in sorted(by_label.items(), key=lambda item: (-item[1].calls, item[0])):
            calls, total_ns = paths.calls, paths.total_ns
            if calls / seconds > HOT:
                hot[label] = f"{count_text(calls)} calls, {count_text(calls / seconds)} a second"
            elif calls >= REPEATED and 0 < total_ns < SHORT_NS * calls:
                hot[label] = calls_text(calls, total_ns)
        return hot

    def _may_get_rule(self, node: ObservedNode) -> bool:
        label = node.callee.label
        if not label or node.callee.kind in ("layer", "copy") or label in self._hot:
            return False
        qualname = label.rpartition(":")[2]
        return not _SPECIAL.search(qualname) and node.callee.shape != "layer"

    # ---------------------------------------------------------------- proposals

    def _propose_requests(self) -> Iterator[RuleProposal]:
        for node in self._named_requests:
            text = f"{CallGroup([node])}; no server was met, so this is taken for the request"
            yield RuleProposal(
                node.callee.label, "request", first_ns=node.first_ns, is_needed=True, group=OF_REQUESTS, reasons=[text]
            )

    def _propose_functions_below(self, tops: list[ObservedNode], of: str, least: float) -> Iterator[RuleProposal]:
        """Propose rules for functions below the call paths `tops`. `least` is the minimum self time, as a share of the
        time of `tops`. A caller of several such functions also gets a rule."""
        base_ns = sum(top.total_ns for top in tops)
        if not base_ns:
            return
        by_label: dict[str, CallGroup] = {}
        for top in tops:
            self._add_functions_below(top, by_label)
        large = {
            label
            for label, paths in by_label.items()
            if paths.own_ns >= (2 * least if function_name(label).startswith("_") else least) * base_ns
            and not (self._covers_whole_requests(paths, tops, base_ns) and paths.own_ns < REPEATS_OWN * base_ns)
        }
        # A middleware spans whole requests, and its self time is spent in the framework.
        large -= {
            label
            for label in large
            if self._covers_whole_requests(by_label[label], tops, base_ns)
            and (_MIDDLEWARE.search(label) or self._find_large_callees(by_label[label], large))
        }
        dividing = {
            label
            for label, paths in by_label.items()
            if label not in large
            and paths.total_ns >= LEAST_SPLIT * base_ns
            and len(self._find_large_callees(paths, large)) >= 2
            and not self._covers_whole_requests(paths, tops, base_ns)
        }
        for label, paths in by_label.items():
            if label in large or label in dividing:
                yield self._make_rule(label, paths, tops, of, divides=label in dividing)
            else:
                self._small.add(label)

    def _add_functions_below(self, node: ObservedNode, by_label: dict[str, CallGroup]) -> int:
        own_ns = node.self_ns
        for child in node.children.values():
            child_ns = self._add_functions_below(child, by_label)
            if self._may_get_rule(child):
                paths = by_label.setdefault(child.callee.label, CallGroup())
                paths.nodes.append(child)
                paths.own_ns += child_ns
            elif child.callee.kind != "request":
                own_ns += child_ns
        return own_ns

    def _find_large_callees(self, paths: CallGroup, large: set[str]) -> set[str]:
        parts: dict[str, int] = defaultdict(int)
        nodes_left = [child for node in paths.nodes for child in node.children.values()]
        for node in nodes_left:
            if node.callee.label in large:
                parts[node.callee.label] += node.total_ns
            else:
                nodes_left += node.children.values()
        return {label for label, total_ns in parts.items() if total_ns >= LEAST_PART * paths.total_ns}

    def _covers_whole_requests(self, paths: CallGroup, tops: list[ObservedNode], base_ns: int) -> bool:
        is_whole = paths.total_ns >= REPEATS_REQUEST * base_ns and paths.calls == sum(top.calls for top in tops)
        return tops is self._requests and is_whole

    def _make_rule(
        self, label: str, paths: CallGroup, tops: list[ObservedNode], of: str, *, divides: bool
    ) -> RuleProposal:
        share = paths.total_ns / sum(top.total_ns for top in tops)
        count = sum(top.calls for top in tops)
        shapes = {node.callee.shape for node in paths.nodes}
        reasons = [f"{paths}, {share_text(share)} of {of}"]
        if divides:
            reasons.append("parts it between what it calls")
        phase = suggest_phase(function_name(label))
        if phase == "compute" and shapes & {"coroutine", "generator"}:
            phase = ""  # it mostly waits for other functions
        if "generator" in shapes:
            reasons.append("a generator, up to its last item")
        elif "coroutine" in shapes and paths.own_ns > 0.5 * paths.total_ns:
            reasons.append("a coroutine that mostly waits")
        mostly_calls_others = divides or paths.own_ns < 0.5 * paths.total_ns
        kind = "op" if (mostly_calls_others and of != "the requests") or paths.calls > 20 * max(count, 1) else "phase"
        if kind != "phase":
            phase = ""
        elif phase:
            reasons.append(f"{phase} by its name")
        group = OUTSIDE if tops is self._units else OF_REQUESTS
        return RuleProposal(
            label, kind, phase, self._has_device_layers(paths.nodes), share=share, first_ns=paths.first_ns, group=group,
            reasons=reasons,
        )  # fmt: skip

    def _has_device_layers(self, nodes: Iterable[ObservedNode]) -> bool:
        below = (inner.callee.kind for node in nodes for inner in node.iterate_call_paths())
        return self._observation.uses_cuda and "layer" in below

    def _propose_top_units(self) -> Iterator[RuleProposal]:
        """Propose the units of work outside of requests, such as an engine's step."""
        base_ns = sum(unit.total_ns for unit in self._units)
        for label, paths in group_nodes_by_label(filter(self._may_get_rule, self._units)).items():
            share = paths.total_ns / base_ns if base_ns else 0.0
            if share < LEAST_OF_WORK:
                self._small.add(label)
                continue
            is_step = bool(STEP.search(function_name(label)))
            phase = "" if is_step else suggest_phase(function_name(label))
            kind = "step" if is_step else "phase" if phase else "op"
            rule = RuleProposal(label, kind, phase, self._has_device_layers(paths.nodes), share=share, group=OUTSIDE)
            rule.first_ns, rule.is_needed = paths.first_ns, is_step
            rule.reasons.append(f"{paths}, {share_text(share)} of {self._name_of_units}")
            if is_step:
                rule.reasons.append("a loop calls it again and again, so it is a step")
            yield rule

    def _propose_loading_functions(self) -> Iterator[RuleProposal]:
        until_ns = CallGroup([*self._requests, *self._units]).first_ns
        for node in self._observation.nodes():
            count, label = max(len(node.processes), 1), node.callee.label
            if (
                not (_has_loading_name(node) or function_name(label) == "__init__")
                or node.total_ns < LOADING_NS * count
            ):
                continue
            if until_ns and not 0 < node.first_ns < until_ns:
                continue
            if node.calls >= REPEATED * count or any(map(_has_loading_name, node.iterate_callers())):
                continue
            text = f"{CallGroup([node])}, before the first request"
            yield RuleProposal(label, "phase", "load", first_ns=node.first_ns, reasons=[text])

    def _propose_blocking_functions(self, rules: Mapping[str, RuleProposal]) -> Iterator[RuleProposal]:
        by_label = group_nodes_by_label(filter(self._may_get_rule, self._observation.nodes()))
        for label, (stretches, longest_ns) in self._observation.blockers.items():
            if label not in by_label:
                continue
            paths = by_label[label]
            fresh = RuleProposal(label, first_ns=paths.first_ns, group=OF_REQUESTS, reasons=[str(paths)])
            rule = rules.get(label, fresh)
            many = "once" if stretches == 1 else f"{count_text(stretches)} times"
            rule.reasons.append(f"blocked an event loop {many}, for {time_text(longest_ns)} at most")
            rule.is_needed = True
            yield rule

    @staticmethod
    def _keep_largest_rules(rules: list[RuleProposal]) -> list[RuleProposal]:
        needed = [rule for rule in rules if rule.is_needed]
        optional = sorted((rule for rule in rules if not rule.is_needed), key=lambda rule: (-rule.share, rule.label))
        loading = [rule for rule in optional if rule.phase == "load"][:3]
        return needed + loading + [rule for rule in optional if rule.phase != "load"][:RULES]


def _has_loading_name(node: ObservedNode) -> bool:
    return _LOADING.search(function_name(node.callee.label)) is not None
