"""Record Keras 3: `predict` with the name of the model, and the layers that the profile's layer rules select.

A layer's path has the names of its parents, without the model's name. With the backend torch a layer is also a torch
module, but is recorded only here. Calls that build or compile a model are not recorded. A model that JAX compiled runs
as a whole, so its layers cannot be recorded. The verdict on the layers says how many of their calls JAX traced.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from instrument.instrumentors.compilers import get_compiling_test
from instrument.instrumentors.frameworks.entries import Entries, Entry, Facts, missing_verdict, recorded_verdict
from instrument.instrumentors.functions import Undo, replace, undo_all
from instrument.instrumentors.layers import Layers
from instrument.instrumentors.lineages import subclasses
from instrument.instrumentors.references import namespace
from instrument.instrumentors.regions import Paths
from instrument.instrumentors.verdict import Verdict
from instrument.profile.model import FrameworkRule
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.spans import Site
from instrument.runtime.faults import FAULTS

LAYER = "keras.src.layers.layer"
BACKENDS = ("jax", "torch", "numpy")
"""The backends with which layers are recorded. With other backends, traced calls would look like real ones."""

ENTRIES = [
    Entry(("keras.src.models.model",), "Model", method, f"keras.{method}") for method in ("predict", "predict_on_batch")
]

_NOT_SELECTED = Site("(not selected)")


def describe_model(model: Any) -> Facts:
    """Return the description of a model: its name."""
    return str(model.name), ()


class KerasLayers:
    """The instrumentor of a session's layer rules in Keras. `hidden` counts selected calls that JAX only traced."""

    def __init__(self, rule: FrameworkRule, layers: Layers, recorder: Recorder = RECORDER) -> None:
        self.rule = rule
        self.hidden = 0
        self._layers = layers
        self._recorder = recorder
        self._sites: dict[int, Site] = {}
        self._verdicts: list[Verdict] = []
        self._undos: list[Undo] = []
        layers.known["keras"] = None
        layers.left_out = _is_layer

    def may_match(self, module_name: str) -> bool:
        """Return True for the module with the base class of Keras's layers."""
        return module_name == LAYER

    def attach_to(self, module: ModuleType) -> bool:
        """Record the calls of layers, by the base class of all layers."""
        layer = namespace(module).get("Layer")
        call = vars(layer).get("__call__") if isinstance(layer, type) else None
        if (verdict := recorded_verdict(self.rule, "Layer.__call__", call)) is not None:
            self._verdicts.append(verdict)
            return False
        if not isinstance(layer, type) or not isinstance(call, FunctionType):
            self._verdicts.append(missing_verdict(self.rule, "Layer.__call__"))
            return False
        backend = str(_value_in("keras.src.backend.config", "backend", lambda: "unknown")())
        if backend not in BACKENDS:
            why = f"with the backend {backend} it is not known what runs and what is only traced"
            self._verdicts.append(Verdict(self.rule.text, "unreachable", "Layer.__call__", why))
            return False
        self._paths = Paths(layer, _list_children)
        self._symbolic_type = _value_in("keras.src.backend.common.keras_tensor", "KerasTensor", ())
        self._layers.known["keras"] = lambda: subclasses(layer)
        self._undos.append(replace(layer, "__call__", self._wrap_call(call)))
        return False

    def undo(self) -> None:
        """Restore `__call__` of the base class of all layers."""
        undo_all(self._undos)
        self._sites.clear()

    def verdicts(self) -> list[Verdict]:
        """Return the verdicts on layers that cannot be recorded. `Layers` returns the others."""
        if not self.hidden:
            return list(self._verdicts)
        why = f"{self.hidden} calls of selected layers were traced by JAX: what is compiled runs as one"
        return [*self._verdicts, Verdict(self.rule.text, "partly", "Layer.__call__", why)]

    def _wrap_call(self, call: FunctionType) -> Any:
        recorder, sites, decide, symbolic_type = self._recorder, self._sites, self._decide_site, self._symbolic_type
        span_of = recorder.span_of
        in_symbolic_scope = _value_in("keras.src.backend.common.symbolic_scope", "in_symbolic_scope", lambda: False)
        is_clean = _value_in("jax._src.core", "trace_state_clean", lambda: True)
        is_compiling = get_compiling_test(sys.modules.get("torch"))

        @functools.wraps(call)
        def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not recorder.on:
                return call(self, *args, **kwargs)
            if in_symbolic_scope() or _has_symbolic(symbolic_type, args, kwargs):
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
        """Return the site of a layer, or `_NOT_SELECTED`. The decision is stored once the path is known."""
        try:
            path = self._paths.path_of(layer)
            site = self._layers.select(type(layer), path or "", "call") or _NOT_SELECTED
            if path is None and site is _NOT_SELECTED:
                return site
        except Exception as fault:
            FAULTS.note("layer selection", fault)
            site = _NOT_SELECTED
        weakref.finalize(layer, self._sites.pop, id(layer), None)
        self._sites[id(layer)] = site
        return site


def _list_children(layer: Any) -> Iterable[tuple[str, Any]]:
    """Return the names and the layers directly inside a layer."""
    return [(child.name, child) for child in vars(layer).get("_layers") or ()]


def _is_layer(cls: type[Any]) -> bool:
    return any(base.__module__ == LAYER for base in cls.__mro__)


def _value_in(module_name: str, name: str, default: Any) -> Any:
    """Return the value of a name in a module, or the default if the module is not imported or lacks the name."""
    module = sys.modules.get(module_name)
    return default if module is None else namespace(module).get(name, default)


def _has_symbolic(symbolic_type: Any, args: Any, kwargs: Any) -> bool:
    """Return True if an argument, or an item of one, is a symbolic tensor: the model is only being built."""
    for argument in (*args, *kwargs.values()) if kwargs else args:
        parts: Callable[[], Iterator[Any]] | None = None
        if isinstance(argument, symbolic_type):
            return True
        if isinstance(argument, (list, tuple)):
            parts = argument.__iter__
        elif isinstance(argument, dict):
            parts = argument.values().__iter__
        if parts is not None and any(isinstance(part, symbolic_type) for part in parts()):
            return True
    return False


def probes(
    rule: FrameworkRule, layers: Layers | None, recorder: Recorder = RECORDER
) -> Iterator[Entries | KerasLayers]:
    """Yield the instrumentors for Keras: of `predict`, and of layers if the profile has layer rules."""
    yield Entries(rule, ENTRIES, describe_model, recorder=recorder)
    if layers is not None:
        yield KerasLayers(rule, layers, recorder)
