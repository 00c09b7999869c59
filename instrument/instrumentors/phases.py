"""Record the phases of a training loop with torch: forward, backward and optimizer, each a span of kind `phase`.

Forward is the outermost call of a module on a thread. Backward is a run of the autograd engine (`backward`, `grad`).
Optimizer is the `step` of any optimizer. A call inside a phase has no span, except in two cases. Forward and backward
inside an optimizer's closure (LBFGS, Lightning) are phases of their own. A module called inside backward recomputes
activations that a checkpoint did not store, so its span is `recompute`. Compiled models are recorded, too.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

from instrument.instrumentors.execution import exclude_from_compiler, get_compiling_test, get_evaluator_setter
from instrument.instrumentors.functions import Switch, replace
from instrument.instrumentors.lineages import subclasses
from instrument.instrumentors.targets import site_of
from instrument.instrumentors.verdict import Verdict
from instrument.instrumentors.work import CallWork
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.spans import Site
from instrument.runtime.cheap_start import replace as replace_fields
from instrument.runtime.faults import FAULTS

FORWARD, BACKWARD, OPTIMIZER, RECOMPUTE = "forward", "backward", "optimizer", "recompute"

PASSES: Mapping[str, frozenset[str]] = {
    FORWARD: frozenset({FORWARD, RECOMPUTE}),
    BACKWARD: frozenset({FORWARD, BACKWARD, RECOMPUTE}),
    OPTIMIZER: frozenset({FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER}),
}
"""The phases that suppress the span of a call if they are open on its thread, by the phase of the call."""

_WRAPPED_IN: Mapping[str, str] = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}
"""The attribute that holds the wrapped model, by the name of the wrapper's class."""

UNSEEN = "modules and optimizers within a function that torch.compile has compiled, and C++ code that calls the engine"


class _Inside(threading.local):
    """The phase that is open on each thread."""

    phase: str | None = None


class Phases(Switch):
    """The instrumentor of `phases: auto`. `hits` maps each recorded phase to the names of its classes."""

    key = "phases"
    module = "torch"

    def __init__(self, rules: Sequence[str] = ("auto",), recorder: Recorder = RECORDER) -> None:
        super().__init__(rules, recorder)
        self.hits: dict[str, set[str]] = {}
        self._inside = _Inside()
        self._recordings: dict[tuple[str, int, int], Any] = {}
        self._sites: dict[tuple[str, str, str], Site] = {}
        self._lacking: list[str] = []
        self._has_device = False
        self._graph_task: Callable[[], int] = lambda: -1
        self._evaluate: Callable[[Any], Any] = lambda evaluate: None
        self._exclude_functions: Callable[[Iterable[Any]], None] = lambda functions: None

    def attach_to(self, torch: Any) -> None:
        """Wrap the calls of modules, of the autograd engine and of optimizers, after the import of torch."""
        if self._attached:
            return
        self._attach()
        version = getattr(torch, "version", None)
        self._has_device = bool(getattr(version, "cuda", None) or getattr(version, "hip", None))
        self._is_compiling = get_compiling_test(torch)
        self._graph_task = getattr(torch._C, "_current_graph_task_id", self._graph_task)
        self._evaluate = get_evaluator_setter(torch)
        self._exclude_functions = functools.partial(exclude_from_compiler, torch)
        self._exclude_functions((self._run_call, _unwrap_model))
        module_type = torch.nn.Module
        self._undos.append(replace(module_type, "__call__", self._wrap_call(module_type.__call__)))
        autograd = torch.autograd
        # Both backward() and grad() call it. Compilers know those two by identity, but not this one.
        engine = "_engine_run_backward" if hasattr(autograd, "_engine_run_backward") else "backward"
        self._undos.append(replace(autograd, engine, self._wrap_function(BACKWARD, getattr(autograd, engine))))
        self._watch_optimizers(torch.optim.Optimizer)

    def undo(self) -> None:
        super().undo()
        self._recordings.clear()

    def verdicts(self) -> list[Verdict]:
        """Return the verdicts on the recorded phases, and on calls that cannot be recorded."""
        if not self.hits:
            why = "no module, backward or optimizer has run" if self._met else "torch not imported"
            return [Verdict("phases", "waiting", why=why)]
        verdicts = [
            Verdict("phases", "attached", phase, ", ".join(sorted(filter(None, names))))
            for phase, names in sorted(self.hits.items())
        ]
        verdicts += [Verdict("phases", "unreachable", name, "its step is no function") for name in self._lacking]
        return [*verdicts, Verdict("phases", "partly", "torch", f"not seen: {UNSEEN}")]

    # ---------------------------------------------------------------- wrappers

    def _wrap_call(self, method: Callable[..., Any]) -> Any:
        """Return the wrapper of `Module.__call__`. No other function may use it.

        torch.profiler (`with_stack`) recognises calls of modules by the code of `Module.__call__`, now the wrapper's,
        and reads the module from its local `self`. Without such a local, or with an optimizer, the process would crash.
        """
        recorder, inside, run, passes = self._recorder, self._inside, self._run_call, PASSES[FORWARD]
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
        """Return the wrapper of an optimizer's `step`, or of the function that runs the autograd engine."""
        recorder, inside, run, passes = self._recorder, self._inside, self._run_call, PASSES[phase]
        is_compiling, of_object = self._is_compiling, phase == OPTIMIZER

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not recorder.on or inside.phase in passes:
                return function(*args, **kwargs)
            return run(phase, function, args[0] if of_object else None, args, kwargs)

        wrapper.__instrument_phase__ = phase  # type: ignore[attr-defined]
        self._exclude_functions((wrapper,))
        return wrapper

    def _run_call(self, phase: str, function: Callable[..., Any], thing: Any, args: Any, kwargs: Any) -> Any:
        """Run a call, and record it as a phase. A thread that runs a task of autograd is inside backward."""
        if not self._attached:  # a compiled model still calls its wrapper afterwards
            return function(*args, **kwargs)
        inside = self._inside
        before = inside.phase
        if before == BACKWARD or self._graph_task() != -1:
            if phase != FORWARD:
                return function(*args, **kwargs)
            phase = RECOMPUTE
        try:
            subject = None if thing is None else type(_unwrap_model(thing))
            recording = self._recordings.get((phase, id(subject), id(function)))
            if recording is None:
                evaluate = self._evaluate(None)
                try:
                    recording = self._make_recording(phase, function, subject)
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

    def _make_recording(self, phase: str, function: Callable[..., Any], subject: type[Any] | None) -> Any:
        """Make the function that records a phase for objects of a class, at their first call."""
        key = phase, id(subject), id(function)
        site = self._find_site(phase, function, subject)
        works = CallWork(self._recorder, is_method=False) if site.device else None
        is_first = key not in self._recordings
        recording = self._record_once(function, site, self._recordings, key, works)
        if is_first and subject is not None:
            weakref.finalize(subject, self._recordings.pop, key, None)
        self.hits.setdefault(phase, set()).add(site.instance)
        return recording

    def _find_site(self, phase: str, function: Callable[..., Any], subject: type[Any] | None) -> Site:
        owner, name = ("torch.autograd", "backward") if subject is None else (subject.__module__, subject.__qualname__)
        inner = inspect.unwrap(getattr(subject, "step" if phase == OPTIMIZER else "forward", function))
        kind, attributes = ("op", ()) if phase == RECOMPUTE else ("phase", (("phase", phase),))
        new = replace_fields(
            site_of(inner, name=phase, kind=kind, device=self._has_device),
            module=owner,
            qualname=name,
            instance="" if subject is None else subject.__name__,
            attributes=attributes,
            suspends=False,
        )
        return self._sites.setdefault((phase, owner, name), new)

    # ---------------------------------------------------------------- optimizers

    def _watch_optimizers(self, base: type[Any]) -> None:
        """Wrap the `step` of each optimizer class when its first object is made.

        torch itself wraps `step` at that moment. The wrapper here is around torch's, and is removed at the end.
        """
        patch = getattr(base, "_patch_step_function", None)
        if not isinstance(patch, FunctionType):
            self._lacking.append("Optimizer")
            return
        attach = self._attach_step

        @functools.wraps(patch)
        def _patch_step_function(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            out = patch(self, *args, **kwargs)
            try:
                attach(type(self))
            except Exception as fault:
                FAULTS.note("step of an optimizer", fault)
            return out

        self._undos.append(replace(base, "_patch_step_function", _patch_step_function))
        for cls in subclasses(base):
            if hasattr(vars(cls).get("step"), "hooked"):
                attach(cls)

    def _attach_step(self, cls: type[Any]) -> None:
        owner = next((base for base in cls.__mro__ if "step" in vars(base)), None)
        if owner is None or not self._attached:
            return
        step = vars(owner)["step"]
        if hasattr(step, "__instrument_phase__"):
            return
        if not isinstance(step, FunctionType):
            if cls.__qualname__ not in self._lacking:
                self._lacking.append(cls.__qualname__)
            return
        self._undos.append(replace(owner, "step", self._wrap_function(OPTIMIZER, step)))


def _unwrap_model(thing: Any) -> Any:
    """Return the model inside wrappers of torch.compile and of distributed training."""
    while (attribute := _WRAPPED_IN.get(type(thing).__name__)) is not None:
        inner = (vars(thing).get("_modules") or {}).get(attribute)
        if inner is None:
            break
        thing = inner
    return thing
