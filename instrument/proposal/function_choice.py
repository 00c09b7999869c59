"""Which functions a first profile names, chosen from what ran: where requests spend their time, and what splits it.

A function is worth a rule where it holds time of its own, or parts the time of a request or of a step between others
that do. Time in what is too short or too frequent to be recorded, in layers and in copies counts as that of the
function around it. What runs outside of requests is looked at below the loops: functions that were called once or never
end, such as `main` and the body of a thread; what these call again and again are the units of work.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from instrument.proposal.observation import Observation, ObservedNode
from instrument.proposal.wording import each_of, number_of, share_of, time_of

LEAST_OF_REQUEST, LEAST_OF_WORK, LEAST_OF_RUN = 0.02, 0.03, 0.05
"""The part of the requests' time, of the work outside of them, or of a run in which nothing was done again and again,
that a function holds that is worth a rule; of a private one, twice as much."""

LEAST_SPLIT = 0.1
"""The part that a function has in all where it is worth a rule for what it calls."""

LEAST_PART = 0.02
"""The part of a function's time that is worth telling apart from the rest."""

SHORT_NS = 5_000
"""Calls that take less on average tell nothing that is worth a span each."""

HOT = 10_000
"""Calls a second that are too many for a rule."""

REPEATED = 3
"""So many calls in a process are work that is done again and again."""

LOADING_NS = 50_000_000
"""What is loaded at the start is worth a rule from so long on."""

REPEATS_REQUEST, REPEATS_OWN = 0.9, 0.2
"""A function with this part of a request's time, and less than that of its own, says what the request says."""

RULES = 12
"""The most functions of a first profile, beside those that requests, steps and keys need."""

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
"""Groups of rules, in their order."""


@dataclass(slots=True)
class FunctionProposal:
    """A function rule that is proposed. `key` and `batch` are paths; `reasons` are what its comment says.

    They stand by `group` (what loads, what requests call, work outside of them), then in the order of first calls.
    `others` are further names of the same function: one of a module that may also run as `__main__`.
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
    others: tuple[str, ...] = ()
    reasons: list[str] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, int, str]:
        """Where it stands among others."""
        return self.group, self.first_ns, self.label


@dataclass(slots=True)
class FunctionChoice:
    """The functions of a first profile, and what was left out: by label why it was `hot`, and labels of the `small`.

    What is left out may become a rule for what it tells of requests.
    """

    rules: list[FunctionProposal]
    hot: dict[str, str]
    small: set[str]
    requests: list[ObservedNode]
    units: list[ObservedNode]


@dataclass(slots=True)
class _Of:
    """What was observed of one function in one realm."""

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
    """The last part of a label, in small letters with underscores: `handleRequest` is `handle_request`."""
    name = label.rpartition(":")[2].rpartition(".")[2]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def is_probe(path: str) -> bool:
    """Whether a path of HTTP is one by which somebody asks whether the service lives."""
    return path.startswith("/") and _PROBE.search(path) is not None


def phase_by_name(name: str) -> str:
    """The phase that a function's name tells; "" for none."""
    return next((phase for phase, names in _PHASES.items() if names.search(name)), "")


def choose_functions(observation: Observation) -> FunctionChoice:
    """The functions that a first profile names."""
    return _Chooser(observation).choose()


class _Chooser:
    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        met = [node for node in observation.nodes() if node.called.kind == "request"]
        self._requests = [node for node in met if not is_probe(node.called.name.rpartition(" ")[2])] or met
        self._hot, self._short = self._too_frequent(), self._too_short()
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
        for node in self._named_requests:
            words = f"ran {each_of(node.calls, node.total_ns)}; no server was met, so this is taken for the request"
            first = FunctionProposal(node.called.label, "request", first_ns=node.first_ns, group=OF_REQUESTS)
            first.is_needed, first.reasons = True, [words]
            rules.setdefault(first.label, first)
        for rule in self._loading():
            rules.setdefault(rule.label, rule)
        for rule in self._within(self._requests, "the requests", LEAST_OF_REQUEST):
            rules.setdefault(rule.label, rule)
        for unit in self._top_units():
            rules.setdefault(unit.label, unit)
        for rule in self._within(self._units, self._of_units, LEAST_OF_WORK):
            rules.setdefault(rule.label, rule)
        if not self._requests and not self._units:
            for rule in self._within(self._observation.roots, "the run", LEAST_OF_RUN):
                rules.setdefault(rule.label, rule)
        for rule in self._blocking(rules):
            rules.setdefault(rule.label, rule)
        kept = self._largest(list(rules.values()))
        self._small.update(rules.keys() - {rule.label for rule in kept})
        self._small -= {rule.label for rule in kept} | self._hot.keys() | self._short.keys()
        hot = dict(sorted({**self._short, **self._hot}.items(), key=self._by_calls))
        return FunctionChoice(
            sorted(kept, key=lambda rule: rule.order),
            hot,
            self._small,
            self._requests,
            self._units,
        )

    def _by_calls(self, one: tuple[str, str]) -> tuple[int, str]:
        return -self._calls[one[0]], one[0]

    # ---------------------------------------------------------------- what is what

    def _units_of_work(self) -> list[ObservedNode]:
        """What is called again and again outside of requests, by nothing or by what was called once or never ends."""
        units: list[ObservedNode] = []

        def look(nodes: Iterable[ObservedNode]) -> None:
            for node in nodes:
                if node.called.kind == "request":
                    continue
                is_once = node.calls < REPEATED * max(len(node.processes), 1)
                if node.called.kind in ("layer", "copy"):
                    continue
                if (
                    is_once or not node.called.label
                ):  # a server's own call of the service is no unit, what is in it may be
                    look(node.children.values())
                elif not _WAITING.search(function_name(node.called.label)):
                    units.append(self._lowest_alike(node))

        look(self._observation.roots)
        return units

    def _lowest_alike(self, node: ObservedNode) -> ObservedNode:
        """What a private unit hands its work to, where that is one function."""
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
        """The units that are most likely what the service is asked for, where no server was met."""
        named = [unit for unit in units if self._is_kept(unit) and REQUEST.search(function_name(unit.called.label))]
        named = [unit for unit in named if not STEP.search(function_name(unit.called.label))]
        if not named:
            return []
        largest = max(named, key=lambda unit: (unit.total_ns, unit.called.label)).called.label
        return [unit for unit in units if unit.called.label == largest]

    def _too_frequent(self) -> dict[str, str]:
        calls: dict[str, int] = defaultdict(int)
        for node in self._observation.nodes():
            if node.called.label:
                calls[node.called.label] += node.calls
        self._calls = calls
        seconds = max(self._observation.seconds, 1e-3)
        return {
            label: f"{number_of(count)} calls, {number_of(count / seconds)} a second"
            for label, count in calls.items()
            if count / seconds > HOT
        }

    def _too_short(self) -> dict[str, str]:
        total_ns: dict[str, int] = defaultdict(int)
        for node in self._observation.nodes():
            total_ns[node.called.label] += node.total_ns
        short = {}
        for label, count in self._calls.items():
            if count >= REPEATED and total_ns[label] < SHORT_NS * count and total_ns[label] > 0:
                short[label] = each_of(count, total_ns[label])
        return short

    def _is_kept(self, node: ObservedNode) -> bool:
        """Whether a call path could have a rule of its own."""
        label = node.called.label
        if not label or node.called.kind in ("layer", "copy") or label in self._hot or label in self._short:
            return False
        qualname = label.rpartition(":")[2]
        return not _SPECIAL.search(qualname) and node.called.shape != "layer"

    # ---------------------------------------------------------------- what is worth a rule

    def _within(self, tops: list[ObservedNode], of: str, least: float) -> Iterator[FunctionProposal]:
        """Functions below these that hold part of their time, or split it."""
        base_ns = sum(top.total_ns for top in tops)
        if not base_ns:
            return
        found: dict[str, _Of] = {}
        for top in tops:
            self._collect(top, found)
        holding = {
            label
            for label, its in found.items()
            if its.own_ns >= (2 * least if function_name(label).startswith("_") else least) * base_ns
            and not (self._repeats(its, tops, base_ns) and its.own_ns < REPEATS_OWN * base_ns)
        }
        holding -= {label for label in holding if self._is_middleware(label, found[label], holding, tops, base_ns)}
        splitting = {
            label
            for label, its in found.items()
            if label not in holding
            and its.total_ns >= LEAST_SPLIT * base_ns
            and len(self._parts_of(its, holding)) >= 2
            and not self._repeats(its, tops, base_ns)
        }
        for label, its in found.items():
            if label in holding or label in splitting:
                yield self._proposal(label, its, tops, of, is_split=label in splitting)
            else:
                self._small.add(label)

    def _collect(self, node: ObservedNode, found: dict[str, _Of]) -> int:
        """Sum up functions below a path; the time that the path holds itself, with that of what has no rule."""
        own_ns = node.self_ns
        for child in node.children.values():
            inner_ns = self._collect(child, found)
            if self._is_kept(child):
                its = found.setdefault(child.called.label, _Of())
                its.nodes.append(child)
                its.own_ns += inner_ns
            elif child.called.kind != "request":
                own_ns += inner_ns
        return own_ns

    def _parts_of(self, its: _Of, holding: set[str]) -> set[str]:
        """The functions that hold time between which a function parts its own, the nearest below it."""
        parts: dict[str, int] = defaultdict(int)
        waiting = [child for node in its.nodes for child in node.children.values()]
        for node in waiting:
            if node.called.label in holding:
                parts[node.called.label] += node.total_ns
            else:
                waiting += node.children.values()
        return {label for label, total_ns in parts.items() if total_ns >= LEAST_PART * its.total_ns}

    def _repeats(self, its: _Of, tops: list[ObservedNode], base_ns: int) -> bool:
        is_of_request = tops is self._requests
        return is_of_request and its.total_ns >= REPEATS_REQUEST * base_ns and its.calls == sum(t.calls for t in tops)

    def _is_middleware(self, label: str, its: _Of, holding: set[str], tops: list[ObservedNode], base_ns: int) -> bool:
        """Whether it is about every request from begin to end, and what holds the time is called by it.

        Its own time is that of the framework between the two, which is told of the request without it.
        """
        if not self._repeats(its, tops, base_ns):
            return False
        return bool(_MIDDLEWARE.search(label) or self._parts_of(its, holding))

    def _proposal(self, label: str, its: _Of, tops: list[ObservedNode], of: str, *, is_split: bool) -> FunctionProposal:
        name, share = function_name(label), its.total_ns / sum(top.total_ns for top in tops)
        count = sum(top.calls for top in tops)
        shapes = {node.called.shape for node in its.nodes}
        reasons = [f"ran {each_of(its.calls, its.total_ns)}, {share_of(share)} of {of}"]
        if is_split:
            reasons.append("parts it between what it calls")
        phase = phase_by_name(name)
        if phase == "compute" and shapes & {"coroutine", "generator"}:
            phase = ""  # it waits for others most of the time
        if "generator" in shapes:
            reasons.append("a generator, up to its last item")
        elif "coroutine" in shapes and its.own_ns > 0.5 * its.total_ns:
            reasons.append("a coroutine that mostly waits")
        is_of_parts = is_split or its.own_ns < 0.5 * its.total_ns
        kind = "op" if (is_of_parts and of != "the requests") or its.calls > 20 * max(count, 1) else "phase"
        if kind != "phase":
            phase = ""
        elif phase:
            reasons.append(f"{phase} by its name")
        group = OUTSIDE if tops is self._units else OF_REQUESTS
        return FunctionProposal(
            label, kind, phase, self._runs_on_device(its.nodes), share=share, first_ns=its.first_ns, group=group,
            reasons=reasons,
        )  # fmt: skip

    def _runs_on_device(self, nodes: Iterable[ObservedNode]) -> bool:
        """Whether layers ran below these where CUDA was used."""
        below = (one.called.kind for node in nodes for one in node.walk())
        return self._observation.uses_cuda and "layer" in below

    def _top_units(self) -> Iterator[FunctionProposal]:
        """The units of work outside of requests."""
        base_ns = sum(unit.total_ns for unit in self._units)
        by_label: dict[str, _Of] = {}
        for unit in self._units:
            if self._is_kept(unit):
                by_label.setdefault(unit.called.label, _Of()).nodes.append(unit)
        for label, its in by_label.items():
            share = its.total_ns / base_ns if base_ns else 0.0
            if share < LEAST_OF_WORK:
                self._small.add(label)
                continue
            is_step = bool(STEP.search(function_name(label)))
            reasons = [f"ran {each_of(its.calls, its.total_ns)}, {share_of(share)} of {self._of_units}"]
            if is_step:
                reasons.append("a loop calls it again and again, so it is a step")
            phase = phase_by_name(function_name(label))
            kind = "step" if is_step else "phase" if phase else "op"
            yield FunctionProposal(
                label,
                kind,
                "" if is_step else phase,
                self._runs_on_device(its.nodes),
                group=OUTSIDE,
                share=share,
                first_ns=its.first_ns,
                is_needed=is_step,
                reasons=reasons,
            )

    def _loading(self) -> Iterator[FunctionProposal]:
        """What loads or builds something at the start, the outermost of each."""
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
            if node.calls >= REPEATED * max(len(node.processes), 1) or any(_is_loading(one) for one in node.above()):
                continue
            words = f"ran {each_of(node.calls, node.total_ns)}, before the first request"
            yield FunctionProposal(label, "phase", "load", first_ns=node.first_ns, is_needed=False, reasons=[words])

    def _blocking(self, rules: Mapping[str, FunctionProposal]) -> Iterator[FunctionProposal]:
        """Functions that have blocked an event loop, whatever part of the time they hold."""
        for label, (stretches, longest_ns) in self._observation.blockers.items():
            nodes = [node for node in self._observation.nodes() if node.called.label == label and self._is_kept(node)]
            if not nodes:
                continue
            its = _Of(nodes)
            fresh = FunctionProposal(label, first_ns=its.first_ns, group=OF_REQUESTS)
            fresh.reasons.append(f"ran {each_of(its.calls, its.total_ns)}")
            rule = rules.get(label, fresh)
            many = "once" if stretches == 1 else f"{number_of(stretches)} times"
            rule.reasons.append(f"blocked an event loop {many}, for {time_of(longest_ns)} at most")
            rule.is_needed = True
            yield rule

    @staticmethod
    def _largest(rules: list[FunctionProposal]) -> list[FunctionProposal]:
        needed = [rule for rule in rules if rule.is_needed]
        others = sorted((rule for rule in rules if not rule.is_needed), key=lambda rule: (-rule.share, rule.label))
        loading = [rule for rule in others if rule.phase == "load"][:3]
        return needed + loading + [rule for rule in others if rule.phase != "load"][:RULES]


def _is_loading(node: ObservedNode) -> bool:
    return bool(node.called.label) and bool(_LOADING.search(function_name(node.called.label)))
