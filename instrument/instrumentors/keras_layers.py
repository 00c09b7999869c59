"""Record the layers of Keras 3 that the profile's layer rules select. `frameworks` records `predict` of its models.

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

from instrument.instrumentors.execution import get_compiling_test
from instrument.instrumentors.frameworks import Observer
from instrument.instrumentors.functions import replace
from instrument.instrumentors.layers import Layers
from instrument.instrumentors.lineages import subclasses
from instrument.instrumentors.references import namespace
from instrument.instrumentors.regions import Paths
from instrument.instrumentors.verdict import Verdict
from instrument.profile.model import FrameworkRule
from instrument.recorder.recorder import Recorder
from instrument.recording.spans import Site
from instrument.runtime.faults import FAULTS

LAYER = "keras.src.layers.layer"
BACKENDS = ("jax", "torch", "numpy")
"""The backends with which layers are recorded. With other backends, traced calls would look like real ones."""

_NOT_SELECTED = Site("(not selected)")


class KerasLayers(Observer):
    """The instrumentor of a session's layer rules in Keras. `hidden` counts selected calls that JAX only traced."""

    def __init__(self, rule: FrameworkRule, recorder: Recorder, layers: Layers) -> None:
        super().__init__(rule, recorder)
        self.hidden = 0
        self._layers = layers
        self._sites: dict[int, Site] = {}
        layers.known["keras"] = None
        layers.left_out = _is_layer

    def may_match(self, module_name: str) -> bool:
        return module_name == LAYER

    def attach_to(self, module: ModuleType) -> None:
        """Record the calls of layers, by the base class of all layers."""
        layer = namespace(module).get("Layer")
        call = vars(layer).get("__call__") if isinstance(layer, type) else None
        if self._note_recorded("Layer.__call__", call):
            return
        if not isinstance(layer, type) or not isinstance(call, FunctionType):
            self._note_missing("Layer.__call__")
            return
        backend = str(_value_in("keras.src.backend.config", "backend", lambda: "unknown")())
        if backend not in BACKENDS:
            why = f"with the backend {backend} it is not known what runs and what is only traced"
            self._note("unreachable", "Layer.__call__", why)
            return
        self._paths = Paths(layer, _list_children)
        self._symbolic_type = _value_in("keras.src.backend.common.keras_tensor", "KerasTensor", ())
        self._layers.known["keras"] = lambda: subclasses(layer)
        self._undos.append(replace(layer, "__call__", self._wrap_call(call)))

    def undo(self) -> None:
        super().undo()
        self._sites.clear()

    def verdicts(self) -> list[Verdict]:
        """Return the verdicts on layers that cannot be recorded. `Layers` returns the others."""
        if self.hidden:
            why = f"{self.hidden} calls of selected layers were traced by JAX: what is compiled runs as one"
            self._note("partly", "Layer.__call__", why, key="traced")
        return super().verdicts()

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
