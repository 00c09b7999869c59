"""Record JAX, Keras 3 and scikit-learn, whose entry points are not plain methods of known classes.

- JAX: `jax.jit` returns a recording proxy of the jitted function. The span of a call covers the dispatch on the host
  and, at the first call, the compilation.
- Keras: layers are recorded, except in a model that JAX compiled, which runs as a whole.
- scikit-learn: `predict`, `predict_proba`, `decision_function` and `transform` of all estimators are recorded. If
  methods of one estimator call each other, only the outermost call is a span.
"""

from __future__ import annotations

import copy
import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from instrument.instrumentors.framework_calls import Observer
from instrument.instrumentors.function_patterns import make_site
from instrument.instrumentors.layer_selection import Paths
from instrument.instrumentors.layers import Layers
from instrument.instrumentors.lineages import all_subclasses, watch_subclasses
from instrument.instrumentors.loaders import StandIn
from instrument.instrumentors.profiled_functions import replace_attribute
from instrument.instrumentors.references import loaded_modules, module_namespace, rebind_objects
from instrument.instrumentors.torch_graphs import get_is_compiling
from instrument.instrumentors.verdict import Verdict
from instrument.profile.model import FrameworkRule
from instrument.recorder import wrapping
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.spans import Site
from instrument.runtime.faults import FAULTS

JAX_FUNCTIONS = ("device_put", "block_until_ready")
JAX_PACKAGES = frozenset({"jax", "jaxlib"})
"""The packages whose jitted functions are not replaced. JAX jits every function of `jax.numpy`."""


class JaxFunctions(Observer):
    def __init__(self, rule: FrameworkRule, recorder: Recorder = RECORDER) -> None:
        super().__init__(rule, recorder)
        self._jax: ModuleType | None = None
        self._sites: dict[CodeType | str, Site] = {}
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()
        self._bound: list[tuple[Any, Any]] = []
        self._waiting = threading.local()
        self._at_work = False
        self._is_clean: Callable[[], bool] = lambda: True

    def may_match(self, module_name: str) -> bool:
        return module_name == "jax"

    def attach_to(self, module: ModuleType) -> bool:
        if self._jax is not None:
            return False
        self._jax, self._at_work = module, True
        core = sys.modules.get("jax._src.core")
        clean = module_namespace(core).get("trace_state_clean") if core is not None else None
        if clean is None:
            why = "it does not report when it traces: functions that it calls then are recorded, too, once"
            self._note_verdict_on_entry("partly", "jax.jit", why, key="traced")
        else:
            self._is_clean = clean
        self._attach_function("jit", self._wrap_jit)
        for name in JAX_FUNCTIONS:
            self._attach_function(name, functools.partial(self._wrap_call, name=f"jax.{name}"))
        name = "block_until_ready"
        array = getattr(sys.modules.get("jax._src.array"), "ArrayImpl", None)  # the class of arrays with values
        bases = array.__mro__ if isinstance(array, type) else ()
        concrete = next((cls for cls in bases if name in vars(cls)), None)
        if concrete is None:
            self._note_missing_entry(f"Array.{name}")
        else:
            wrapped = self._wrap_call(vars(concrete)[name], name=f"jax.{name}")
            self._replace_method(f"Array.{name}", concrete, name, wrapped)
        self._bound.extend(self._wrap_existing_functions(module_namespace(module).get("jit")))
        rebind_objects(self._bound, spared=JAX_PACKAGES)
        return True

    def undo(self) -> None:
        self._at_work = False
        super().undo()
        pairs = [(wrapped, wrapped._instrument_source) for wrapped in list(self._made)]
        rebind_objects([*((wrapped, original) for original, wrapped in self._bound), *pairs])
        self._bound.clear()
        self._made.clear()

    def verdicts(self) -> list[Verdict]:
        if self._jax is None and not self.rule.auto:
            return [Verdict(self.rule.text, "waiting", why="jax not imported")]
        return super().verdicts()

    def _attach_function(self, name: str, wrap: Callable[[Any], Any]) -> None:
        function = module_namespace(self._jax).get(name) if self._jax is not None else None
        label = f"jax.{name}"
        if self._note_if_already_recorded(label, function):
            return
        if not isinstance(function, FunctionType):
            self._note_missing_entry(label)
            return
        wrapped = wrap(function)
        wrapped.__instrument_framework__ = self.rule.name
        self._undos.append(replace_attribute(self._jax, name, wrapped))
        self._bound.append((function, wrapped))
        self._note_verdict_on_entry("attached", label)

    def _wrap_jit(self, jit: Any) -> Any:
        @functools.wraps(jit)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            jitted = jit(*args, **kwargs)
            if not self._at_work:
                return jitted
            if not args and "fun" not in kwargs:  # options alone: `jitted` is a decorator
                is_function = callable(jitted) and not isinstance(jitted, type)
                return (
                    functools.wraps(jitted)(lambda fun: self._wrap_if_possible(jitted(fun))) if is_function else jitted
                )
            return self._wrap_if_possible(jitted)

        return wrapper

    def _wrap_if_possible(self, jitted: Any) -> Any:
        with FAULTS.guard("jitted function"):
            return jitted if _is_of_jax(jitted) else self._wrap_jitted(jitted)
        return jitted

    def _wrap_jitted(self, jitted: Any) -> Any:
        names = f"{getattr(jitted, '__module__', '')}.{getattr(jitted, '__qualname__', '')}"
        key = getattr(getattr(jitted, "__wrapped__", jitted), "__code__", None) or names
        site = self._sites.get(key) or self._sites.setdefault(key, make_site(jitted))
        wrapped = _JittedFunction(jitted, self._make_recording_function(jitted, site), site)
        self._made.add(wrapped)
        return wrapped

    def _make_recording_function(self, function: Any, site: Site) -> Callable[..., Any]:
        recorder, is_clean = self._recorder, self._is_clean
        recording = wrapping.make_wrapper(recorder, function, site)
        recorder.allow_muting(site, recording)

        def record_call(*args: Any, **kwargs: Any) -> Any:
            if not recorder.on or not self._at_work or not is_clean():
                return function(*args, **kwargs)
            return recording(*args, **kwargs)

        return record_call

    def _wrap_call(self, function: Any, name: str) -> Any:
        """Wrap a function of JAX. During a call, other wrapped functions record no spans."""
        recording = self._make_recording_function(function, make_site(function, name=name))
        inside = self._waiting
        # A method made in C may have no qualified name.
        assigned = [name for name in functools.WRAPPER_ASSIGNMENTS if isinstance(getattr(function, name, None), str)]

        @functools.wraps(function, assigned=assigned)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if getattr(inside, "busy", False):
                return function(*args, **kwargs)
            inside.busy = True
            try:
                return recording(*args, **kwargs)
            finally:
                inside.busy = False

        return wrapper

    def _wrap_existing_functions(self, jit: Any) -> Iterator[tuple[Any, Any]]:
        """Yield each jitted function in the service's modules, with a proxy. Note a verdict on jitted functions
        elsewhere in memory."""
        jitted_type = type(jit.__wrapped__(lambda: None)) if hasattr(jit, "__wrapped__") else None
        if jitted_type is None or issubclass(jitted_type, FunctionType):
            return
        modules = [module for name, module in loaded_modules() if name.partition(".")[0] not in JAX_PACKAGES]
        values = [value for module in modules for value in list(module_namespace(module).values())]
        jitted_by_id = {id(value): value for value in values if type(value) is jitted_type and not _is_of_jax(value)}
        for value in jitted_by_id.values():
            yield value, self._wrap_jitted(value)
        missed = [
            f for f in gc.get_objects() if type(f) is jitted_type and id(f) not in jitted_by_id and not _is_of_jax(f)
        ]
        if missed:
            names = sorted({str(getattr(function, "__qualname__", "?")) for function in missed})
            why = f"{len(missed)} were created before, and no module has a name of them: {', '.join(names[:5])}"
            self._note_verdict_on_entry("partly", "jax.jit", why, key="missed")


class _JittedFunction(StandIn):
    # Not a Python function with the jitted one's attributes: `jax.jit` copies a function's namespace.
    __slots__ = ("instrument_call",)

    def __init__(self, jitted: Any, call: Callable[..., Any], site: Site) -> None:
        super().__init__(jitted, site)
        object.__setattr__(self, "instrument_call", call)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.instrument_call(*args, **kwargs)

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._instrument_source.__reduce_ex__(protocol)

    __module__ = property(lambda self: self._instrument_source.__module__)
    __doc__ = property(lambda self: self._instrument_source.__doc__)


def _is_of_jax(jitted: Any) -> bool:
    return str(getattr(jitted, "__module__", "")).partition(".")[0] in JAX_PACKAGES


# Keras

KERAS_LAYER = "keras.src.layers.layer"
KERAS_BACKENDS = ("jax", "torch", "numpy")
"""The Keras backends with which layers are recorded. With other backends, traced calls cannot be distinguished from
real calls."""

_NOT_SELECTED = Site("(not selected)")


class KerasLayers(Observer):
    """The instrumentor of a session's layer rules in Keras. `hidden` counts layer calls that JAX traced instead of
    running them."""

    def __init__(self, rule: FrameworkRule, recorder: Recorder, layers: Layers) -> None:
        super().__init__(rule, recorder)
        self.hidden = 0
        self._layers = layers
        self._sites: dict[int, Site] = {}
        layers.known["keras"] = None
        layers.left_out = lambda cls: any(base.__module__ == KERAS_LAYER for base in cls.__mro__)

    def may_match(self, module_name: str) -> bool:
        return module_name == KERAS_LAYER

    def attach_to(self, module: ModuleType) -> None:
        layer = module_namespace(module).get("Layer")
        call = vars(layer).get("__call__") if isinstance(layer, type) else None
        if self._note_if_already_recorded("Layer.__call__", call):
            return
        if not isinstance(layer, type) or not isinstance(call, FunctionType):
            self._note_missing_entry("Layer.__call__")
            return
        backend = str(_module_value("keras.src.backend.config", "backend", lambda: "unknown")())
        if backend not in KERAS_BACKENDS:
            why = f"with the backend {backend} it is not known what runs and what is only traced"
            self._note_verdict_on_entry("unreachable", "Layer.__call__", why)
            return
        self._paths = Paths(layer, lambda parent: [(child.name, child) for child in vars(parent).get("_layers") or ()])
        self._symbolic_type = _module_value("keras.src.backend.common.keras_tensor", "KerasTensor", ())
        self._layers.known["keras"] = lambda: all_subclasses(layer)
        self._undos.append(replace_attribute(layer, "__call__", self._wrap_call(call)))

    def undo(self) -> None:
        super().undo()
        self._sites.clear()

    def verdicts(self) -> list[Verdict]:
        """Return the verdicts on layers that cannot be recorded. The verdicts on recorded layers come from `Layers`."""
        if self.hidden:
            why = f"{self.hidden} calls of selected layers were traced by JAX: what is compiled runs as one"
            self._note_verdict_on_entry("partly", "Layer.__call__", why, key="traced")
        return super().verdicts()

    def _wrap_call(self, call: FunctionType) -> Any:
        recorder, sites, decide, symbolic_type = self._recorder, self._sites, self._decide_site, self._symbolic_type
        span_of = recorder.make_span_factory
        in_symbolic_scope = _module_value("keras.src.backend.common.symbolic_scope", "in_symbolic_scope", lambda: False)
        is_clean = _module_value("jax._src.core", "trace_state_clean", lambda: True)
        is_compiling = get_is_compiling(sys.modules.get("torch"))

        @functools.wraps(call)
        def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not recorder.on:
                return call(self, *args, **kwargs)
            if in_symbolic_scope() or _has_symbolic_tensor(symbolic_type, args, kwargs):
                return call(self, *args, **kwargs)
            site = sites.get(id(self)) or decide(self)
            if site is _NOT_SELECTED:
                return call(self, *args, **kwargs)
            if not is_clean():
                probe.hidden += 1
                return call(self, *args, **kwargs)
            with span_of(site)():
                return call(self, *args, **kwargs)

        probe = self
        wrapper.__instrument_framework__ = self.rule.name  # type: ignore[attr-defined]
        return wrapper

    def _decide_site(self, layer: Any) -> Site:
        try:
            path = self._paths.path_of(layer)
            site = self._layers.find_or_make_site(type(layer), path or "", "call") or _NOT_SELECTED
            if path is None and site is _NOT_SELECTED:
                return site
        except Exception as fault:
            FAULTS.note("layer selection", fault)
            site = _NOT_SELECTED
        weakref.finalize(layer, self._sites.pop, id(layer), None)
        self._sites[id(layer)] = site
        return site


def _module_value(module_name: str, name: str, default: Any) -> Any:
    module = sys.modules.get(module_name)
    return default if module is None else module_namespace(module).get(name, default)


def _has_symbolic_tensor(symbolic_type: Any, args: Any, kwargs: Any) -> bool:
    for argument in (*args, *kwargs.values()) if kwargs else args:
        items: Any = argument.values() if isinstance(argument, dict) else argument
        if isinstance(argument, symbolic_type):
            return True
        if isinstance(argument, (list, tuple, dict)) and any(isinstance(item, symbolic_type) for item in items):
            return True
    return False


# scikit-learn

SKLEARN_METHODS = ("predict", "predict_proba", "decision_function", "transform")

SKLEARN_BASE = ("sklearn.base", "BaseEstimator")
SKLEARN_WRAPPING = "_SetOutputMixin"
"""The class of scikit-learn that wraps `transform` in new subclasses."""


class SklearnEstimators(Observer):
    """The instrumentor of scikit-learn's estimators. `hits` counts the recorded methods, at most once per class."""

    def __init__(self, rule: FrameworkRule, recorder: Recorder = RECORDER) -> None:
        super().__init__(rule, recorder)
        self.hits = 0
        self._inside = threading.local()
        """The ids of the estimators whose methods are running, per thread."""
        self._base: type[Any] | None = None
        self._wrapping: type[Any] | None = None

    def may_match(self, module_name: str) -> bool:
        return module_name == SKLEARN_BASE[0]

    def attach_to(self, module: ModuleType) -> None:
        base = module_namespace(module).get(SKLEARN_BASE[1])
        if not isinstance(base, type):
            self._note_missing_entry(".".join(SKLEARN_BASE))
            return
        self._base = base
        bases = getattr(module_namespace(module).get("TransformerMixin"), "__mro__", ())
        self._wrapping = next((cls for cls in bases if cls.__name__ == SKLEARN_WRAPPING), None)
        for watched in filter(None, (base, self._wrapping)):
            defined = functools.partial(self._attach_overrides_of_class, watched)
            self._undos.append(watch_subclasses(watched, defined, "an estimator class"))
        for cls in all_subclasses(base):
            self._attach_class(cls)

    def verdicts(self) -> list[Verdict]:
        unreachable = [verdict for verdict in super().verdicts() if verdict.state == "unreachable"]
        state, why = "attached", f"{self.hits} methods of estimators"
        if not self.hits:
            state, why = "waiting", "sklearn not imported" if self._base is None else "no estimator has run"
        is_left_out = not self.hits and (self.rule.auto or (self._base is None and unreachable))
        return [*([] if is_left_out else [Verdict(self.rule.text, state, why=why)]), *unreachable]

    def _attach_overrides_of_class(self, watched: type[Any], cls: type[Any]) -> None:
        """Record the methods of `cls`, a new subclass of `watched`. A class with two watched bases is recorded once."""
        last = next(base for base in cls.__mro__ if base in (self._base, self._wrapping))
        if last is watched and self._base in cls.__mro__:
            self._attach_class(cls)

    def _attach_class(self, cls: type[Any]) -> None:
        for name in SKLEARN_METHODS:
            owner = next((base for base in cls.__mro__ if name in vars(base)), None)
            if owner is None:
                continue
            raw = vars(owner)[name]
            if isinstance(getattr(raw, "__instrument__", None), Site):  # a function rule has it
                continue
            # `available_if` makes a descriptor that contains the function, and may deny that there is one.
            function = raw if isinstance(raw, FunctionType) else getattr(raw, "fn", None)
            if not isinstance(function, FunctionType):
                if raw is not None:
                    self._note_not_a_function(f"{owner.__qualname__}.{name}", raw)
                continue
            if not hasattr(function, "__instrument_framework__"):
                new = wrapped = self._wrap_method(name, function)
                if function is not raw:
                    new = copy.copy(raw)
                    new.fn = wrapped
                self._replace_method(f"{owner.__qualname__}.{name}", owner, name, new)

    def _wrap_method(self, name: str, method: FunctionType) -> Any:
        recorder, decide, inside = self._recorder, self._make_recording_function, self._inside
        recordings: dict[int, Any] = {}

        @functools.wraps(method)
        def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not recorder.on:
                return method(self, *args, **kwargs)
            running, key = vars(inside).setdefault("estimators", set()), id(self)
            if key in running:
                return method(self, *args, **kwargs)
            cls = type(self)
            recording = recordings.get(id(cls)) or decide(name, method, cls, recordings)
            running.add(key)
            try:
                return recording(self, *args, **kwargs)
            finally:
                running.discard(key)

        wrapper.__instrument_framework__ = self.rule.name  # type: ignore[attr-defined]
        return wrapper

    def _make_recording_function(
        self, name: str, method: FunctionType, cls: type[Any], recordings: dict[int, Any]
    ) -> Any:
        site = make_site(method, name=f"{cls.__name__}.{name}")
        if id(cls) not in recordings:
            self.hits += 1
            weakref.finalize(cls, recordings.pop, id(cls), None)
        return self._make_shared_recording(method, site, recordings, id(cls))
