"""Find the path of each torch module in its model, and record compiled parts of models (regions).

A region is a module under `torch.compile`, a `ScriptModule` or a `GraphModule`. Only calls of the region are recorded.
Its layers cannot be recorded, because they run in C or in generated code.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

from instrument.instrumentors.function_patterns import matches_pattern
from instrument.instrumentors.profiled_functions import Undo, replace_attribute, replaces_attribute, undo_all
from instrument.instrumentors.torch_graphs import get_is_compiling
from instrument.instrumentors.verdict import Verdict
from instrument.instrumentors.work import ModuleWork, list_tensors
from instrument.profile.model import LayerRule
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.spans import Site
from instrument.runtime.faults import FAULTS
from instrument.runtime.lazy_imports import replace as replace_fields

DYNAMO = "torch._dynamo.eval_frame"
"""The module that defines the class of compiled models. Torch imports it at the first compilation."""

WRAPPING = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""The attributes that torch's wrappers add between a model and its layers. Paths omit them."""

_COMPILED = "inside a compiled region"
_SCRIPTED = "inside a ScriptModule"
_EXPORTED = "inside an exported graph"
_ATTENTION = "inside a MultiheadAttention, which computes with their weights and does not call them"
_ENCODER = "inside a TransformerEncoderLayer, which may run as one kernel in eval mode"
_OWN_FORWARD = "with a forward of the instance's own"
_UNREGISTERED = "put in place past torch's registration"

VAIN_WALKS = 3
WALK_SHARE = 100
"""The pause after a search of all objects in memory, as a multiple of the search's duration."""

_REPLICATING = frozenset({"DataParallel", "DistributedDataParallel"})
"""The wrapper classes of torch whose attribute `module` is omitted from paths."""


class Paths:
    """Stores the parent of each torch module or Keras layer, and the layer's name in the parent. References to parents
    are weak."""

    def __init__(self, module_type: type[Any], children: Callable[[Any], Iterable[tuple[str, Any]]]) -> None:
        self._module_type = module_type
        self._children = children
        self._places: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._parents: dict[int, weakref.ref[Any]] = {}
        self._vain_walks: Counter[type[Any]] = Counter()
        self._next_walk_ns = 0

    def add_child(self, parent: Any, name: str, child: Any) -> None:
        """Note that `parent.name` is `child`. A child keeps its first parent as long as that parent exists."""
        if id(parent) not in self._parents:
            key = id(parent)
            self._parents[key] = weakref.ref(parent, lambda _: self._parents.pop(key, None))
        child_key = id(child)
        entry = self._places.get(child_key)
        if entry is None:
            weakref.finalize(child, self._places.pop, child_key, None)
        if entry is None or entry[0]() is None:
            self._places[child_key] = (weakref.ref(parent), name)

    def path_of(self, module: Any) -> str | None:
        """Return a module's dotted path in its model. The path of the model itself is "", an unknown path is None."""
        if self._has_broken_path(module):
            cls = type(module)
            if self._vain_walks[cls] < VAIN_WALKS or self.may_search_memory():
                self.note_modules_in_memory()
                self._vain_walks[cls] += self._has_broken_path(module)
            elif id(module) not in self._parents:
                return None
        return self._path_from_root(id(module))

    def may_search_memory(self) -> bool:
        """Return True if enough time has passed since the last search of all objects in memory."""
        return time.monotonic_ns() >= self._next_walk_ns

    def _path_from_root(self, key: int) -> str:
        names: list[str] = []
        while (place := self._places.get(key)) is not None and len(names) < 100:
            if (parent := place[0]()) is None:
                break
            wraps = place[1] in WRAPPING or (place[1] == "module" and type(parent).__name__ in _REPLICATING)
            names += [] if wraps else [place[1]]
            key = id(parent)
        return ".".join(reversed(names))

    def parent_of(self, module: Any) -> Any:
        place = self._places.get(id(module))
        return None if place is None else place[0]()

    def known_paths(self) -> set[str]:
        return {self._path_from_root(key) for key in list(self._places)} - {""}

    def _has_broken_path(self, module: Any) -> bool:
        for depth in range(100):
            if (place := self._places.get(id(module))) is None:
                return depth == 0
            if (module := place[0]()) is None:
                return True
        return False

    def iterate_root_modules(self) -> Iterator[Any]:
        for key, reference in list(self._parents.items()):
            if key not in self._places and (module := reference()) is not None:
                yield module

    def note_modules_in_memory(self) -> Iterator[tuple[str, Any]]:
        """Note the child modules of all modules in memory. Return each child with its name. This takes tens of ms."""
        start_ns = time.monotonic_ns()
        # type() and not isinstance(): a proxy's __class__ may run foreign code or raise.
        modules = [thing for thing in gc.get_objects() if issubclass(type(thing), self._module_type)]
        pairs = [(parent, *pair) for parent in modules for pair in self._children(parent) if pair[1] is not None]
        for pair in pairs:
            self.add_child(*pair)
        end_ns = time.monotonic_ns()
        self._next_walk_ns = end_ns + WALK_SHARE * (end_ns - start_ns)
        return ((name, child) for _, name, child in pairs)


def torch_children(module: Any) -> Iterable[tuple[str, Any]]:
    return (vars(module).get("_modules") or {}).items()


def _unwrap_compiled(module: Any) -> Any:
    inner = dict(torch_children(module)).get("_orig_mod")
    return module if inner is None else inner


def rule_selects_layer(rule: LayerRule, class_name: str, path: str) -> bool:
    if rule.types and class_name not in rule.types:
        return False
    if rule.match and not any(matches_pattern(text, path) for text in rule.match):
        return False
    return not any(matches_pattern(text, path) for text in rule.exclude)


def class_name_for_rules(cls: type[Any]) -> str:
    """Return the class name by which rules select a layer.

    torch generates subclasses of a layer's class, such as `FSDPLinear`. They have the name of the base class, `Linear`.
    """
    for prefix in ("Parametrized", "FSDP"):
        for base in cls.__mro__[1:]:
            if cls.__name__ == prefix + base.__name__:
                return class_name_for_rules(base)
    return cls.__name__


Selected = tuple[LayerRule, dict[Site, None]]
"""A rule, and a dict whose keys are the sites of the selected layers."""


class SharedSites:
    """The sites of layers or regions. Layers with equal rule, class, path and devices share a site."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._sites: dict[tuple[Any, ...], Site] = {}
        self.clear = self._sites.clear

    def find_or_make_site(
        self, entry: Selected, place: tuple[Any, ...], tensors: Sequence[Any], make: Callable[[], Site]
    ) -> Site:
        """Return the site of a rule for a class and path (`place`). At the first use, `make` makes the site.

        Layers with `tensors` on different devices have different sites.
        """
        rule, selected = entry
        work = ModuleWork(tensors) if tensors else None
        key = (rule.name, rule.device, *place, () if work is None else work.devices)
        site = self._sites.get(key)
        if site is None:
            site = self._sites.setdefault(key, replace_fields(make(), work=work))
            self._recorder.allow_muting(site)
        elif isinstance(site.work, ModuleWork):
            site.work.watch_tensors(tensors)
        selected[site] = None
        return site


class Regions:
    """The instrumentor of layer rules for compiled, scripted and exported modules (regions).

    `first` finds the first rule that selects a layer. `forget` is called with the id of each newly compiled module, so
    that the module is not also recorded as a layer.
    """

    def __init__(
        self,
        first: Callable[[str, str], Selected | None],
        forget: Callable[[int], object],
        recorder: Recorder = RECORDER,
    ) -> None:
        self._first = first
        self._forget = forget
        self.roots: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """The compiled regions that are recorded, by id."""
        self._recorder = recorder
        self.sites: dict[int, Site | None] = {}  # by identity of the module
        self._shared = SharedSites(recorder)
        self._undos: list[Undo] = []
        self._compiled: list[weakref.ref[Any]] = []  # modules whose compiled call is ours

    def attach(self, torch: Any, paths: Paths) -> None:
        self._torch, self._paths = torch, paths
        self._is_compiling = get_is_compiling(torch)
        scripted = getattr(sys.modules.get("torch.jit._script"), "RecursiveScriptModule", None)
        wrapped_call = getattr(sys.modules.get("torch.fx.graph_module"), "_WrappedCall", None)
        for cls in () if scripted is None else (scripted, torch.jit.TopLevelTracedModule):
            self.record_calls(cls)
        if wrapped_call is not None:
            self.record_calls(wrapped_call, place=1)
        self._wrap_compile(torch.nn.Module)
        if DYNAMO in sys.modules:
            self.record_calls(sys.modules[DYNAMO].OptimizedModule)

    def undo(self) -> None:
        undo_all(self._undos)
        for module in [module for reference in self._compiled if (module := reference()) is not None]:
            call = vars(module).get("_compiled_call_impl")
            if hasattr(call, "__instrument_region__"):
                module._compiled_call_impl = call.__wrapped__
        self._compiled.clear()
        self.sites.clear()
        self._shared.clear()

    # ---------------------------------------------------------------- calls

    def record_calls(self, cls: Any, place: int = 0) -> None:
        """Record the calls of a class's objects. `place` is the index of the argument that is the region."""
        self._undos.append(replace_attribute(cls, "__call__", self._wrap_call(cls.__call__, itemgetter(place))))

    def _wrap_call(self, call: Any, module_of: Callable[[tuple[Any, ...]], Any]) -> Any:
        @functools.wraps(call)
        def call_recorded(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not recorder.on:
                return call(*args, **kwargs)
            module = module_of(args)
            site = sites[id(module)] if id(module) in sites else decide(module)
            if site is None:
                return call(*args, **kwargs)
            with recorder.make_span_factory(site)():
                return call(*args, **kwargs)

        is_compiling, recorder, sites, decide = self._is_compiling, self._recorder, self.sites, self._decide_site
        return call_recorded

    def _wrap_compile(self, module_type: Any) -> None:
        """Wrap `Module.compile()`, which stores a compiled call in the instance."""
        compile_ = module_type.compile

        def wrap_compiled_call(module: Any) -> None:
            call = vars(module).get("_compiled_call_impl")
            if call is not None and not hasattr(call, "__instrument_region__"):
                reference = weakref.ref(module)
                module._compiled_call_impl = self._wrap_call(call, lambda args: reference())
                module._compiled_call_impl.__instrument_region__ = True
                self._compiled.append(reference)

        @replaces_attribute(module_type, "compile")
        def restore_compile(self_: Any, *args: Any, **kwargs: Any) -> Any:
            out = compile_(self_, *args, **kwargs)
            FAULTS.attempt("compiled call of a module", lambda: wrap_compiled_call(self_))
            return out

        self._undos.append(restore_compile)
        for module, _, _ in self._walk_models():
            wrap_compiled_call(module)

    def _decide_site(self, module: Any) -> Site | None:
        try:
            site = self._find_site(module, self._paths.path_of(module) or "")
        except Exception as fault:
            FAULTS.note("region selection", fault)
            site = None
        key = id(module)
        weakref.finalize(module, self.sites.pop, key, None)
        self.sites[key] = site
        if site is not None and self._describe_region(module)[1] == "compiled":
            root = _unwrap_compiled(module)
            self.roots[id(root)] = root
            self._forget(id(root))
        return site

    def _find_site(self, module: Any, path: str) -> Site | None:
        name, kind = self._describe_region(module)
        selection = self._first(name, path)
        if selection is None:
            return None
        rule = selection[0]
        facts: dict[str, Any] = {"instance": path, "device": rule.device, "attributes": (("region", kind),)}
        tensors = list_tensors(module) if rule.device else []
        make = functools.partial(Site, rule.name or name, "layer", **facts)
        return self._shared.find_or_make_site(selection, (name, kind, path), tensors, make)

    # ---------------------------------------------------------------- kinds of region

    def _describe_region(self, module: Any) -> tuple[str, str]:
        if isinstance(module, self._torch.jit.ScriptModule):
            return str(getattr(module, "original_name", type(module).__name__)), "scripted"
        if isinstance(module, self._torch.fx.GraphModule):
            return "GraphModule", "graph"
        return class_name_for_rules(type(_unwrap_compiled(module))), "compiled"

    def _explain_uncalled_children(self, module: Any) -> str:
        torch, kind = self._torch, type(module)
        if isinstance(module, torch.jit.ScriptModule):
            return _SCRIPTED
        compiled = getattr(sys.modules.get(DYNAMO), "OptimizedModule", ())
        own_forward = vars(module).get("forward")
        is_called = vars(module).get("_compiled_call_impl") is not None
        if is_called or isinstance(module, compiled) or hasattr(own_forward, "_torchdynamo_orig_callable"):
            return _COMPILED
        if kind is torch.nn.MultiheadAttention:
            return _ATTENTION
        return _ENCODER if kind is torch.nn.TransformerEncoderLayer and not module.training else ""

    def _walk_models(self) -> Iterator[tuple[Any, str, str]]:
        # Each entry has the module's own reason, and the reason that its children inherit.
        waiting = [(root, "", "", "") for root in self._paths.iterate_root_modules()]
        visited: set[int] = set()
        while waiting:
            module, path, reason, below = waiting.pop()
            if id(module) in visited:
                continue
            visited.add(id(module))
            children = vars(module).get("_modules") or {}
            if "_orig_mod" not in children:
                yield module, path, reason
            inside = below or self._explain_uncalled_children(module)
            for name, child in list(children.items()):
                if child is not None and name in WRAPPING:
                    waiting.append((child, path, reason, inside))
                elif child is not None:
                    waiting.append((child, f"{path}.{name}" if path else name, inside, inside))

    def explain_unseen_layers(self) -> list[Verdict]:
        if self._paths.may_search_memory():  # no hook has seen some modules
            self._paths.note_modules_in_memory()
        counts: Counter[tuple[str, str]] = Counter()
        for module, path, reason in self._walk_models():
            selection = self._first(self._describe_region(module)[0], path)
            if selection is not None:
                why = reason or self._explain_unrecorded(module)
                counts[selection[0].text, why] += bool(why)
        states = {_COMPILED: "compiled"}
        return [
            Verdict(rule, states.get(why, "unreachable"), f"{count} layers", f"{why}: not observable")
            for (rule, why), count in sorted(counts.items())
            if count
        ]

    def _explain_unrecorded(self, module: Any) -> str:
        torch, kind = self._torch, type(module)
        if isinstance(module, (torch.jit.ScriptModule, torch.fx.GraphModule)):
            return ""
        if (own_forward := vars(module).get("forward")) is not None:
            return "" if hasattr(own_forward, "_torchdynamo_orig_callable") else _OWN_FORWARD
        forward = getattr(kind, "forward", None)
        if forward is torch.nn.Module.forward:
            return _EXPORTED if kind is torch.nn.Module and vars(module).get("_parameters") else ""
        return "" if hasattr(forward, "__instrument_layers__") else _UNREGISTERED
