"""Record training loops with torch: their phases, and the communication between their processes.

Each phase is a span of kind `phase`:
- `forward`: the outermost call of a module on a thread
- `backward`: a run of the autograd engine
- `optimizer`: the `step` of an optimizer

Each call of torch.distributed is a span of kind `comm`. An asynchronous collective has a second span for the wait, such
as `all_reduce.wait`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

from instrument.errors import error_name
from instrument.instrumentors.function_patterns import make_site
from instrument.instrumentors.lineages import all_subclasses
from instrument.instrumentors.profiled_functions import Switch, replace_attribute, replaces_attribute
from instrument.instrumentors.torch_graphs import exclude_from_compiler, get_evaluator_setter, get_is_compiling
from instrument.instrumentors.verdict import Verdict
from instrument.instrumentors.work import CallWork
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.spans import AttributeValue, Site
from instrument.runtime.faults import FAULTS

# phases

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"

PASSES: Mapping[str, frozenset[str]] = {
    FORWARD: frozenset({FORWARD, BACKWARD}),
    BACKWARD: frozenset({FORWARD, BACKWARD}),
    OPTIMIZER: frozenset({FORWARD, BACKWARD, OPTIMIZER}),
}
"""The outer phases inside which an inner phase is not recorded, by inner phase. Both run on one thread."""

_WRAPPED_IN: Mapping[str, str] = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}
"""The attribute that contains the wrapped model, by class of the wrapper."""

UNSEEN_PHASES = (
    "modules and optimizers within a function that torch.compile has compiled, and C++ code that calls the engine"
)


class _Inside(threading.local):
    """The phase that is open on the current thread."""

    phase: str | None = None


class Phases(Switch):
    """The instrumentor of `phases: auto`: forward, backward, optimizer. `hits` has the recorded classes by phase."""

    key = "phases"
    module = "torch"

    def __init__(self, rules: Sequence[str] = ("auto",), recorder: Recorder = RECORDER) -> None:
        super().__init__(rules, recorder)
        self.hits: dict[str, set[str]] = {}
        self._inside = _Inside()
        self._recordings: dict[tuple[str, int, int], Any] = {}
        self._sites: dict[tuple[str, str, str], Site] = {}
        self._has_device = False
        self._graph_task: Callable[[], int] = lambda: -1
        self._evaluate: Callable[[Any], Any] = lambda evaluate: None
        self._exclude_functions: Callable[[Iterable[Any]], None] = lambda functions: None

    def attach_to(self, torch: Any) -> None:
        if self._attached:
            return
        self._mark_attached()
        version = getattr(torch, "version", None)
        self._has_device = bool(getattr(version, "cuda", None) or getattr(version, "hip", None))
        self._is_compiling = get_is_compiling(torch)
        self._graph_task = getattr(torch._C, "_current_graph_task_id", self._graph_task)
        self._evaluate = get_evaluator_setter(torch)
        self._exclude_functions = functools.partial(exclude_from_compiler, torch)
        self._exclude_functions((self._run_as_phase, _unwrap_model))
        module_type = torch.nn.Module
        self._undos.append(replace_attribute(module_type, "__call__", self._wrap_call(module_type.__call__)))
        # Both backward() and grad() call it. Compilers know those two by identity, but not this one.
        backward = self._wrap_function(BACKWARD, torch.autograd._engine_run_backward)
        self._undos.append(replace_attribute(torch.autograd, "_engine_run_backward", backward))
        self._watch_optimizers(torch.optim.Optimizer)

    def undo(self) -> None:
        super().undo()
        self._recordings.clear()

    def verdicts(self) -> list[Verdict]:
        if not self.hits:
            why = "no module, backward or optimizer has run" if self._met else "torch not imported"
            return [Verdict("phases", "waiting", why=why)]
        labels = {phase: ", ".join(sorted(filter(None, names))) for phase, names in sorted(self.hits.items())}
        verdicts = [Verdict("phases", "attached", phase, label) for phase, label in labels.items()]
        return [*verdicts, Verdict("phases", "partly", "torch", f"not seen: {UNSEEN_PHASES}")]

    # ---------------------------------------------------------------- wrappers

    def _wrap_call(self, method: Callable[..., Any]) -> Any:
        """Return the wrapper of `Module.__call__`, which must not be used for other functions.

        torch.profiler (`with_stack`) recognises the wrapper by its code, and reads the module from its local variable
        `self`. Without a module in `self`, the process would crash.
        """
        recorder, inside, run, passes = self._recorder, self._inside, self._run_as_phase, PASSES[FORWARD]
        is_compiling = self._is_compiling

        @functools.wraps(method)
        def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            # A compiler evaluates this line alone, with a known result, and continues with the method.
            if is_compiling() or not recorder.on or inside.phase in passes:
                return method(self, *args, **kwargs)
            return run(FORWARD, method, self, (self, *args), kwargs)

        wrapper.__instrument_phase__ = FORWARD  # type: ignore[attr-defined]
        self._exclude_functions((wrapper,))
        return wrapper

    def _wrap_function(self, phase: str, function: Callable[..., Any]) -> Any:
        recorder, inside, run, passes = self._recorder, self._inside, self._run_as_phase, PASSES[phase]
        is_compiling, of_object = self._is_compiling, phase == OPTIMIZER

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not recorder.on or inside.phase in passes:
                return function(*args, **kwargs)
            return run(phase, function, args[0] if of_object else None, args, kwargs)

        wrapper.__instrument_phase__ = phase  # type: ignore[attr-defined]
        self._exclude_functions((wrapper,))
        return wrapper

    def _run_as_phase(self, phase: str, function: Callable[..., Any], thing: Any, args: Any, kwargs: Any) -> Any:
        """Run a call, and record it as a phase. Calls inside autograd's backward pass are not recorded."""
        if not self._attached or self._graph_task() != -1:  # a compiled model still calls its wrapper after `undo`
            return function(*args, **kwargs)
        inside = self._inside
        before = inside.phase
        try:
            subject = None if thing is None else type(_unwrap_model(thing))
            recording = self._recordings.get((phase, id(subject), id(function)))
            if recording is None:
                evaluate = self._evaluate(None)
                try:
                    recording = self._make_recording_function(phase, function, subject)
                finally:
                    self._evaluate(evaluate)
        except Exception as fault:
            FAULTS.note(f"phase {phase}", fault)
            return function(*args, **kwargs)
        inside.phase = phase
        try:
            return recording(*args, **kwargs)
        finally:
            inside.phase = before

    def _make_recording_function(self, phase: str, function: Callable[..., Any], subject: type[Any] | None) -> Any:
        key = phase, id(subject), id(function)
        site = self._find_site(phase, function, subject)
        works = CallWork(self._recorder, is_method=False) if site.device else None
        is_first = key not in self._recordings
        recording = self._make_shared_recording(function, site, self._recordings, key, works)
        if is_first and subject is not None:
            weakref.finalize(subject, self._recordings.pop, key, None)
        self.hits.setdefault(phase, set()).add(site.instance)
        return recording

    def _find_site(self, phase: str, function: Callable[..., Any], subject: type[Any] | None) -> Site:
        owner, name = ("torch.autograd", "backward") if subject is None else (subject.__module__, subject.__qualname__)
        inner = inspect.unwrap(getattr(subject, "step" if phase == OPTIMIZER else "forward", function))
        site = make_site(inner, name=phase, phase=phase, device=self._has_device)
        facts: Any = {"instance": "" if subject is None else subject.__name__, "suspends": False}
        new = dataclasses.replace(site, module=owner, qualname=name, **facts)
        return self._sites.setdefault((phase, owner, name), new)

    # ---------------------------------------------------------------- optimizers

    def _watch_optimizers(self, base: Any) -> None:
        """Wrap the `step` of each optimizer class when the first object of the class is made."""
        patch, attach = base._patch_step_function, self._wrap_optimizer_step

        @replaces_attribute(base, "_patch_step_function")
        def restore_step_patch(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            out = patch(self, *args, **kwargs)
            FAULTS.attempt("step of an optimizer", lambda: attach(type(self)))
            return out

        self._undos.append(restore_step_patch)
        for cls in all_subclasses(base):
            if hasattr(vars(cls).get("step"), "hooked"):
                attach(cls)

    def _wrap_optimizer_step(self, cls: type[Any]) -> None:
        owner = next((base for base in cls.__mro__ if "step" in vars(base)), None)
        step = None if owner is None or not self._attached else vars(owner)["step"]
        if isinstance(step, FunctionType) and not hasattr(step, "__instrument_phase__"):
            self._undos.append(replace_attribute(owner, "step", self._wrap_function(OPTIMIZER, step)))


def _unwrap_model(thing: Any) -> Any:
    while (attribute := _WRAPPED_IN.get(type(thing).__name__)) is not None:
        inner = (vars(thing).get("_modules") or {}).get(attribute)
        if inner is None:
            break
        thing = inner
    return thing


# communication

DISTRIBUTED = "torch.distributed.distributed_c10d"

_METHODS: Mapping[str, Sequence[str]] = {
    **{name: (name,) for name in ("broadcast", "reduce", "gather", "scatter", "barrier", "monitored_barrier", "send")},
    "all_reduce": ("allreduce", "allreduce_coalesced"),
    "all_gather": ("allgather", "allgather_coalesced"),
    "all_gather_into_tensor": (
        *("_allgather_base", "all_gather_single"),
        *("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    ),
    "reduce_scatter": ("reduce_scatter",),
    "reduce_scatter_tensor": (
        *("_reduce_scatter_base", "reduce_scatter_single"),
        *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    ),
    "all_to_all": ("alltoall",),
    "all_to_all_single": ("alltoall_base", "all_to_all_single"),
    "recv": ("recv", "recv_anysource"),
    "coalesced": ("_end_coalescing",),
}
OPERATIONS: Mapping[str, str] = {method: name for name, methods in _METHODS.items() for method in methods}
"""The operation of `torch.distributed`, by method of a process group, for all versions of torch."""

PEERS = frozenset({"send", "recv"})

UNSEEN_COMM = (
    "what C++ starts by itself: the all-reduce of DistributedDataParallel's reducer within backward, functional "
    "collectives (DTensor, compiled regions), and what NCCL does on its own streams while nobody waits for it"
)


@dataclass(slots=True)
class _Issued:
    """A communication that has begun. `waits` is True for a synchronous call, which is recorded as a single span."""

    site: Site
    wait_site: Site
    attributes: dict[str, AttributeValue]
    waits: bool
    start_ns: int
    pair: Any
    wait_ns: int = 0

    def __del__(self) -> None:
        if self.pair is not None:
            self.pair.cancel()


class Comm(Switch):
    """The instrumentor of `comm: auto`, for torch.distributed. `hits` counts calls by operation."""

    key = "comm"
    module = DISTRIBUTED

    def __init__(self, rules: Sequence[str] = ("auto",), recorder: Recorder = RECORDER) -> None:
        super().__init__(rules, recorder)
        self.hits: Counter[str] = Counter()
        self._sites: dict[tuple[str, int, bool], tuple[Site, Site]] = {}
        self._issued: weakref.WeakKeyDictionary[Any, _Issued] = weakref.WeakKeyDictionary()
        self._why = "torch.distributed not imported"

    def attach_to(self, module: Any) -> None:
        if self._attached:
            return
        group, work = getattr(module, "ProcessGroup", None), getattr(module, "Work", None)
        if group is None or work is None:
            self._why = "this torch.distributed has no process groups"
            return
        self._mark_attached()
        self._is_compiling = get_is_compiling(module.torch)
        wrappers: list[tuple[Any, str, Any]] = [(work, "wait", self._wrap(work.wait, self._begin_wait, self._end_wait))]
        for name, operation in OPERATIONS.items():
            if hasattr(group, name):
                begin = partial(self._begin_call, operation)
                wrappers.append((group, name, self._wrap(getattr(group, name), begin, self._end_call)))
        functions = (*vars(Comm).values(), *vars(_Issued).values(), _try_call, _measure_largest_argument)
        exclude_from_compiler(module.torch, (*functions, *(wrapper for _, _, wrapper in wrappers)))
        self._undos += [replace_attribute(owner, method, wrapper) for owner, method, wrapper in wrappers]

    def undo(self) -> None:
        super().undo()
        self._issued.clear()

    def verdicts(self) -> list[Verdict]:
        if not self._met:
            return [Verdict("comm", "waiting", why=self._why)]
        if not self.hits:
            return [Verdict("comm", "waiting", why="no process group has been used")]
        calls = ", ".join(f"{count} {operation}" for operation, count in sorted(self.hits.items()))
        return [Verdict("comm", "attached", why=calls), Verdict("comm", "partly", "torch", f"not seen: {UNSEEN_COMM}")]

    # ---------------------------------------------------------------- calls

    def _wrap(self, method: Callable[..., Any], begin: Callable[..., _Issued | None], end: Callable[..., Any]) -> Any:
        recorder, is_compiling = self._recorder, self._is_compiling

        @functools.wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not recorder.on:
                return method(*args, **kwargs)
            issued = _try_call(begin, args, kwargs)
            try:
                out = method(*args, **kwargs)
            except BaseException as error:
                _try_call(end, issued, None, error)
                raise
            _try_call(end, issued, out, None)
            return out

        return wrapper

    def _begin_call(self, operation: str, args: Any, kwargs: Any) -> _Issued:
        waits = any(getattr(argument, "asyncOp", None) is False for argument in (*args, *kwargs.values()))
        moved_bytes, on_device = _measure_largest_argument(args[1:])
        attributes: dict[str, AttributeValue] = {"bytes": moved_bytes} if moved_bytes else {}
        if operation in PEERS and len(args) > 2 and isinstance(args[2], int):
            attributes["peer"] = args[2]
        site, wait_site = self._find_sites(operation, args[0], on_device)
        self.hits[operation] += 1
        pair = self._start_timer(site) if waits else None
        return _Issued(site, wait_site, attributes, waits, time.monotonic_ns(), pair)

    def _end_call(self, issued: _Issued | None, work: Any, error: BaseException | None) -> None:
        if issued is None:
            return
        may_wait = error is None and hasattr(work, "wait")
        if not (may_wait and issued.waits):
            self._record_span(issued, issued.start_ns, issued.attributes, error)
        if may_wait:
            self._issued[work] = issued

    def _begin_wait(self, args: Any, kwargs: Any) -> _Issued | None:
        issued = self._issued.pop(args[0], None)
        if issued is not None:
            if not issued.waits:
                issued.pair = self._start_timer(issued.site)
            issued.wait_ns = time.monotonic_ns()
        return issued

    def _end_wait(self, issued: _Issued | None, out: Any, error: BaseException | None) -> None:
        """Record a wait that has ended. A synchronous call and its wait share one span."""
        if issued is None:
            return
        if issued.waits:
            self._record_span(issued, issued.start_ns, issued.attributes, error)
        else:
            issued.site = issued.wait_site
            self._record_span(issued, issued.wait_ns, {"in_flight_ns": time.monotonic_ns() - issued.start_ns}, error)

    def _record_span(
        self, issued: _Issued, start_ns: int, attributes: dict[str, AttributeValue], error: BaseException | None
    ) -> None:
        if error is not None:
            attributes = {**attributes, "error": error_name(error)}
        pair, issued.pair = issued.pair, None
        self._recorder.record(issued.site, start_ns, attributes or None, pair)

    def _start_timer(self, site: Site) -> Any:
        begin = self._recorder.begin_device
        return begin(None, None, 0) if site.device and begin is not None else None

    # ---------------------------------------------------------------- sites

    def _find_sites(self, operation: str, group: Any, on_device: bool) -> tuple[Site, Site]:
        key = operation, id(group), on_device
        sites = self._sites.get(key)
        if sites is None:
            weakref.finalize(group, self._sites.pop, key, None)
            group_name = getattr(group, "group_desc", None) or getattr(group, "group_name", None)
            # The attributes of a group, without the addresses of its processes.
            facts: tuple[tuple[str, AttributeValue], ...] = (
                ("op", operation),
                ("backend", str(group.name())),
                ("group", str(group_name or "group").replace("undefined", "group")),
                ("rank", int(group.rank())),
                ("world_size", int(group.size())),
            )
            place: Any = {"module": "torch.distributed", "instance": " ".join(str(fact) for _, fact in facts[1:3])}
            call = Site(operation, "comm", qualname=operation, device=on_device, attributes=facts, **place)
            wait = dataclasses.replace(call, name=f"{operation}.wait", qualname="Work.wait")
            # Two threads may be first: setdefault keeps one site per key, or the tally would split.
            sites = self._sites.setdefault(key, (call, wait))
        return sites


def _try_call(call: Callable[..., _Issued | None], *arguments: Any) -> _Issued | None:
    try:
        return call(*arguments)
    except Exception as fault:
        FAULTS.note("communication probe", fault)
        return None


def _measure_largest_argument(arguments: Sequence[Any]) -> tuple[int, bool]:
    """Return the size of the largest argument in bytes. The second result is True if any tensor is on a device."""
    most, on_device = 0, False
    for argument in arguments:
        size, waiting = 0, [argument]
        while waiting:
            thing = waiting.pop()
            if isinstance(thing, (list, tuple)):
                waiting.extend(thing)
            elif hasattr(thing, "element_size"):
                size += int(thing.numel() * thing.element_size())
                on_device = on_device or thing.device.type != "cpu"
        most = max(most, size)
    return most, on_device
