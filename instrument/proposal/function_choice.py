"""The choice of functions for a first profile: those that take time themselves, and those that split a request's time.

A function gets a rule if it has enough time of its own, or divides the time of a request or a step between such
functions. The time of functions that are too short or too frequent to be recorded, of layers and of copies counts for
the function around them. The root of other work is a loop: a function that is called once or never ends, such as `main`
or the body of a thread. The functions that a loop calls again and again are the units of work.
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
    """Return the text of a count: exact up to a thousand, then with three significant digits."""
    whole = round(value)
    return f"{round(whole, min(3 - len(str(whole)), 0)):,}"


def time_text(ns: float) -> str:
    """Return the text of a time with two significant digits."""
    unit = next((unit for unit, size in TIME_UNITS.items() if ns >= size), "ns")
    value = ns / TIME_UNITS[unit]
    return f"{value:.2g} {unit}" if value < 10 else f"{value:.0f} {unit}"


def calls_text(calls: int, total_ns: int) -> str:
    """Return a text with a number of calls and the mean time of a call."""
    if calls == 1:
        return f"once, {time_text(total_ns)}"
    mean_text = f", {time_text(total_ns / calls)} each" if calls else ""
    return f"{calls:,} times{mean_text}"


def share_text(share: float) -> str:
    """Return the text of a share as a percentage."""
    return f"{min(share, 1.0) * 100:.2g} %" if share < 0.1 else f"{min(share, 1.0):.0%}".replace("%", " %")


LEAST_OF_REQUEST, LEAST_OF_WORK, LEAST_OF_RUN = 0.02, 0.03, 0.05
"""The least self time of a proposed function, as a share of requests' time, of other repeated work, or of the run. A
function with a leading underscore needs twice as much."""

LEAST_SPLIT = 0.1
"""The minimum share of time of a function that is proposed only because its parts split that time."""

LEAST_PART = 0.02
"""The minimum share of a part in the time of the function that it splits."""

SHORT_NS = 5_000
"""The least mean ns of a proposed function's calls."""

HOT = 10_000
"""The maximum number of calls per second of a proposed function."""

REPEATED = 3
"""The least calls per process of repeated work."""

LOADING_NS = 50_000_000
"""The minimum number of ns that a proposed loading function takes per process."""

REPEATS_REQUEST, REPEATS_OWN = 0.9, 0.2
"""The minimum share in its request's time, and the maximum share of self time, of a function that only
repeats its request and gets no rule."""

RULES = 12
"""The maximum number of functions of a first profile, besides those needed for requests, steps and keys."""

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
"""The groups of rules in the profile's order: loading, functions of requests, work outside of requests."""


@dataclass(slots=True)
class FunctionProposal:
    """A proposed rule of functions. `key` and `batch` are paths; `reasons` become its comment.

    The order is by `group`, then by first calls.
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
    def order(self) -> tuple[int, int, str]:
        """The sort key of the rule in the profile."""
        return self.group, self.first_ns, self.label


@dataclass(slots=True)
class FunctionChoice:
    """The chosen rules, and the functions left out: the `hot` by label with reasons, and labels of the `small`.

    A function that is left out may still get a rule for its key or batch.
    """

    rules: list[FunctionProposal]
    hot: dict[str, str]
    small: set[str]
    requests: list[ObservedNode]
    units: list[ObservedNode]


@dataclass(slots=True)
class _Paths:
    """The call paths of one function, within one kind of work."""

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


def function_name(label: str) -> str:
    """Return the last part of a label in lower case with underscores: `handleRequest` is `handle_request`."""
    name = label.rpartition(":")[2].rpartition(".")[2]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def is_probe(path: str) -> bool:
    """Return True for a path of HTTP that checks the service's health."""
    return path.startswith("/") and _PROBE.search(path) is not None


def phase_by_name(name: str) -> str:
    """Return the phase that a function's name implies, "" if it implies none."""
    return next((phase for phase, names in _PHASES.items() if names.search(name)), "")


def choose_functions(observation: Observation) -> FunctionChoice:
    """Choose the functions for a first profile."""
    return _Chooser(observation).choose()


class _Chooser:
    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        met = [node for node in observation.nodes() if node.called.kind == "request"]
        self._requests = [node for node in met if not is_probe(node.called.name.rpartition(" ")[2])] or met
        self._hot = self._short_or_frequent()
        units = self._units_of_work()
        self._named_requests: list[ObservedNode] = []
        if not self._requests:
            self._named_requests = self._requests_among(units)
            self._requests = self._named_requests
        self._units = [unit for unit in units if unit not in self._named_requests]
        self._of_units = "the work outside of requests" if self._requests else "the work"

    def choose(self) -> FunctionChoice:
        rules: dict[str, FunctionProposal] = {}
        self._small: set[str] = set()
        roots = [] if self._requests or self._units else self._observation.roots
        for rule in chain(
            self._propose_requests(),
            self._propose_loading(),
            self._propose_below(self._requests, "the requests", LEAST_OF_REQUEST),
            self._propose_top_units(),
            self._propose_below(self._units, self._of_units, LEAST_OF_WORK),
            self._propose_below(roots, "the run", LEAST_OF_RUN),
            self._propose_blocking(rules),
        ):
            rules.setdefault(rule.label, rule)
        largest = self._largest(list(rules.values()))
        self._small.update(rules.keys() - {rule.label for rule in largest})
        self._small -= {rule.label for rule in largest} | self._hot.keys()
        rules_in_order = sorted(largest, key=lambda rule: rule.order)
        return FunctionChoice(rules_in_order, self._hot, self._small, self._requests, self._units)

    # ---------------------------------------------------------------- kinds of work

    def _units_of_work(self) -> list[ObservedNode]:
        """Return the functions that are repeatedly called outside of requests, at the root or by a loop."""
        units: list[ObservedNode] = []

        def look(nodes: Iterable[ObservedNode]) -> None:
            for node in nodes:
                if node.called.kind in ("request", "layer", "copy"):
                    continue
                is_once = node.calls < REPEATED * max(len(node.processes), 1)
                # A server's own call of the service is no unit, but may contain units.
                if is_once or not node.called.label:
                    look(node.children.values())
                elif not _WAITING.search(function_name(node.called.label)):
                    units.append(self._delegate_of(node))

        look(self._observation.roots)
        return units

    def _delegate_of(self, node: ObservedNode) -> ObservedNode:
        """Return the function to which a private function delegates its work, else the private function itself."""
        while function_name(node.called.label).startswith("_"):
            alike = [
                child
                for child in node.children.values()
                if child.called.label and child.calls == node.calls and child.total_ns >= 0.9 * node.total_ns
            ]
            if len(alike) != 1:
                break
            node = alike[0]
        return node

    def _requests_among(self, units: list[ObservedNode]) -> list[ObservedNode]:
        """Return the units of work that are most likely requests, for a service without a known server."""
        likely = [unit for unit in units if self._is_kept(unit) and REQUEST.search(function_name(unit.called.label))]
        likely = [unit for unit in likely if not STEP.search(function_name(unit.called.label))]
        if not likely:
            return []
        largest = max(likely, key=lambda unit: (unit.total_ns, unit.called.label)).called.label
        return [unit for unit in units if unit.called.label == largest]

    def _short_or_frequent(self) -> dict[str, str]:
        """Return the functions with calls too short or too frequent for spans, by label, the most frequent first."""
        by_label: dict[str, _Paths] = {}
        for node in self._observation.nodes():
            if node.called.label:
                by_label.setdefault(node.called.label, _Paths()).nodes.append(node)
        seconds = max(self._observation.seconds, 1e-3)
        hot = {}
        for label, paths in sorted(by_label.items(), key=lambda item: (-item[1].calls, item[0])):
            calls, total_ns = paths.calls, paths.total_ns
            if calls / seconds > HOT:
                hot[label] = f"{count_text(calls)} calls, {count_text(calls / seconds)} a second"
            elif calls >= REPEATED and 0 < total_ns < SHORT_NS * calls:
                hot[label] = calls_text(calls, total_ns)
        return hot

    def _is_kept(self, node: ObservedNode) -> bool:
        """Return True if a call path can have its own rule."""
        label = node.called.label
        if not label or node.called.kind in ("layer", "copy") or label in self._hot:
            return False
        qualname = label.rpartition(":")[2]
        return not _SPECIAL.search(qualname) and node.called.shape != "layer"

    # ---------------------------------------------------------------- proposals

    def _propose_requests(self) -> Iterator[FunctionProposal]:
        """Propose the functions that count as requests, as no server was observed."""
        for node in self._named_requests:
            words = f"ran {calls_text(node.calls, node.total_ns)}; no server was met, so this is taken for the request"
            yield FunctionProposal(
                node.called.label, "request", first_ns=node.first_ns, is_needed=True, group=OF_REQUESTS, reasons=[words]
            )

    def _propose_below(self, tops: list[ObservedNode], of: str, least: float) -> Iterator[FunctionProposal]:
        """Propose the functions below `tops` that have enough own time, or split their time into such functions."""
        base_ns = sum(top.total_ns for top in tops)
        if not base_ns:
            return
        by_label: dict[str, _Paths] = {}
        for top in tops:
            self._collect(top, by_label)
        holding = {
            label
            for label, paths in by_label.items()
            if paths.own_ns >= (2 * least if function_name(label).startswith("_") else least) * base_ns
            and not (self._repeats_requests(paths, tops, base_ns) and paths.own_ns < REPEATS_OWN * base_ns)
        }
        holding -= {label for label in holding if self._is_middleware(label, by_label[label], holding, tops, base_ns)}
        splitting = {
            label
            for label, paths in by_label.items()
            if label not in holding
            and paths.total_ns >= LEAST_SPLIT * base_ns
            and len(self._functions_that_split(paths, holding)) >= 2
            and not self._repeats_requests(paths, tops, base_ns)
        }
        for label, paths in by_label.items():
            if label in holding or label in splitting:
                yield self._proposal(label, paths, tops, of, is_split=label in splitting)
            else:
                self._small.add(label)

    def _collect(self, node: ObservedNode, by_label: dict[str, _Paths]) -> int:
        """Sum up the functions below a path. Return the path's own ns, including children without a rule."""
        own_ns = node.self_ns
        for child in node.children.values():
            inner_ns = self._collect(child, by_label)
            if self._is_kept(child):
                paths = by_label.setdefault(child.called.label, _Paths())
                paths.nodes.append(child)
                paths.own_ns += inner_ns
            elif child.called.kind != "request":
                own_ns += inner_ns
        return own_ns

    def _functions_that_split(self, paths: _Paths, holding: set[str]) -> set[str]:
        """Return the nearest functions below a function that split its time. `holding` are functions with own time."""
        parts: dict[str, int] = defaultdict(int)
        waiting = [child for node in paths.nodes for child in node.children.values()]
        for node in waiting:
            if node.called.label in holding:
                parts[node.called.label] += node.total_ns
            else:
                waiting += node.children.values()
        return {label for label, total_ns in parts.items() if total_ns >= LEAST_PART * paths.total_ns}

    def _repeats_requests(self, paths: _Paths, tops: list[ObservedNode], base_ns: int) -> bool:
        is_whole = paths.total_ns >= REPEATS_REQUEST * base_ns and paths.calls == sum(top.calls for top in tops)
        return tops is self._requests and is_whole

    def _is_middleware(
        self, label: str, paths: _Paths, holding: set[str], tops: list[ObservedNode], base_ns: int
    ) -> bool:
        """Return True for a middleware: a function around whole requests that calls the functions with the time.

        Its own time is the framework's, which the request's span includes.
        """
        if not self._repeats_requests(paths, tops, base_ns):
            return False
        return bool(_MIDDLEWARE.search(label) or self._functions_that_split(paths, holding))

    def _proposal(
        self, label: str, paths: _Paths, tops: list[ObservedNode], of: str, *, is_split: bool
    ) -> FunctionProposal:
        name, share = function_name(label), paths.total_ns / sum(top.total_ns for top in tops)
        count = sum(top.calls for top in tops)
        shapes = {node.called.shape for node in paths.nodes}
        reasons = [f"ran {calls_text(paths.calls, paths.total_ns)}, {share_text(share)} of {of}"]
        if is_split:
            reasons.append("parts it between what it calls")
        phase = phase_by_name(name)
        if phase == "compute" and shapes & {"coroutine", "generator"}:
            phase = ""  # it mostly waits for other functions
        if "generator" in shapes:
            reasons.append("a generator, up to its last item")
        elif "coroutine" in shapes and paths.own_ns > 0.5 * paths.total_ns:
            reasons.append("a coroutine that mostly waits")
        is_of_parts = is_split or paths.own_ns < 0.5 * paths.total_ns
        kind = "op" if (is_of_parts and of != "the requests") or paths.calls > 20 * max(count, 1) else "phase"
        if kind != "phase":
            phase = ""
        elif phase:
            reasons.append(f"{phase} by its name")
        group = OUTSIDE if tops is self._units else OF_REQUESTS
        return FunctionProposal(
            label, kind, phase, self._runs_on_device(paths.nodes), share=share, first_ns=paths.first_ns, group=group,
            reasons=reasons,
        )  # fmt: skip

    def _runs_on_device(self, nodes: Iterable[ObservedNode]) -> bool:
        """Return True if CUDA was used, and layers ran below the nodes."""
        below = (inner.called.kind for node in nodes for inner in node.walk())
        return self._observation.uses_cuda and "layer" in below

    def _propose_top_units(self) -> Iterator[FunctionProposal]:
        """Propose the units of work outside of requests."""
        base_ns = sum(unit.total_ns for unit in self._units)
        by_label: dict[str, _Paths] = {}
        for unit in self._units:
            if self._is_kept(unit):
                by_label.setdefault(unit.called.label, _Paths()).nodes.append(unit)
        for label, paths in by_label.items():
            share = paths.total_ns / base_ns if base_ns else 0.0
            if share < LEAST_OF_WORK:
                self._small.add(label)
                continue
            is_step = bool(STEP.search(function_name(label)))
            reasons = [f"ran {calls_text(paths.calls, paths.total_ns)}, {share_text(share)} of {self._of_units}"]
            if is_step:
                reasons.append("a loop calls it again and again, so it is a step")
            phase = phase_by_name(function_name(label))
            kind = "step" if is_step else "phase" if phase else "op"
            yield FunctionProposal(
                label,
                kind,
                "" if is_step else phase,
                self._runs_on_device(paths.nodes),
                group=OUTSIDE,
                share=share,
                first_ns=paths.first_ns,
                is_needed=is_step,
                reasons=reasons,
            )

    def _propose_loading(self) -> Iterator[FunctionProposal]:
        """Propose the outermost functions that load or build an object at the service's start."""
        firsts = [node.first_ns for node in (*self._requests, *self._units) if node.first_ns]
        until_ns = min(firsts, default=0)
        for node in self._observation.nodes():
            name = function_name(node.called.label) if node.called.label else ""
            label = node.called.label
            is_init = name == "__init__"
            if not (is_init or _LOADING.search(name)) or node.total_ns < LOADING_NS * max(len(node.processes), 1):
                continue
            if until_ns and not 0 < node.first_ns < until_ns:
                continue
            if node.calls >= REPEATED * max(len(node.processes), 1) or any(map(_is_loading, node.above())):
                continue
            words = f"ran {calls_text(node.calls, node.total_ns)}, before the first request"
            yield FunctionProposal(label, "phase", "load", first_ns=node.first_ns, is_needed=False, reasons=[words])

    def _propose_blocking(self, rules: Mapping[str, FunctionProposal]) -> Iterator[FunctionProposal]:
        """Propose the functions that have blocked an event loop, also those with little time."""
        for label, (stretches, longest_ns) in self._observation.blockers.items():
            nodes = [node for node in self._observation.nodes() if node.called.label == label and self._is_kept(node)]
            if not nodes:
                continue
            paths = _Paths(nodes)
            fresh = FunctionProposal(label, first_ns=paths.first_ns, group=OF_REQUESTS)
            fresh.reasons.append(f"ran {calls_text(paths.calls, paths.total_ns)}")
            rule = rules.get(label, fresh)
            many = "once" if stretches == 1 else f"{count_text(stretches)} times"
            rule.reasons.append(f"blocked an event loop {many}, for {time_text(longest_ns)} at most")
            rule.is_needed = True
            yield rule

    @staticmethod
    def _largest(rules: list[FunctionProposal]) -> list[FunctionProposal]:
        needed = [rule for rule in rules if rule.is_needed]
        optional = sorted((rule for rule in rules if not rule.is_needed), key=lambda rule: (-rule.share, rule.label))
        loading = [rule for rule in optional if rule.phase == "load"][:3]
        return needed + loading + [rule for rule in optional if rule.phase != "load"][:RULES]


def _is_loading(node: ObservedNode) -> bool:
    return bool(node.called.label) and bool(_LOADING.search(function_name(node.called.label)))
