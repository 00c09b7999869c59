"""Layers of torch models: selected by path in the module tree or by class, recorded around `forward`.

The class's `forward` is replaced, never an instance's: a closure on an instance would follow `copy.deepcopy` with the
original's weights and break `pickle`. Which instances record is decided once for each, at its first call, and kept
beside the module and not in it. A compiled region runs our wrapper's first line only, so graphs do not break.

Paths come from torch's own module registration hook, which costs nothing when a model runs. Modules that no hook
saw (built before the session started, or made by `copy.deepcopy` or `pickle`) are found by a walk of the heap. A model
may make a new layer in every call, which sits nowhere: for such a class walks take at most a hundredth of the time.
"""

from __future__ import annotations

import difflib
import functools
import gc
import inspect
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any

from instrument.errors import FAULTS
from instrument.probes.functions import Undo, matches, replace, undo_all
from instrument.probes.verdict import Verdict
from instrument.profile import LayerRule
from instrument.recorder import RECORDER, Recorder
from instrument.spans import Site

_NOT_SELECTED = Site("(not selected)")

VAIN_WALKS = 3
WALK_SHARE = 100
"""After so many walks that did not find where a layer of a class sits, each is followed by so many times its own time
without one for this class."""

_WRAPPING = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Names under which torch.compile, FSDP and checkpointing put the module that they wrap: no part of a path."""

_REPLICATING = frozenset({"DataParallel", "DistributedDataParallel"})
"""Classes that put the module that they wrap under the name `module`."""


class Paths:
    """Where each module sits: its parent and its name there, held weakly. `children` are a module's, by name."""

    def __init__(self, module_type: type[Any], children: Callable[[Any], Iterable[tuple[str, Any]]]) -> None:
        self._module_type = module_type
        self._children = children
        self._places: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._parents: dict[int, weakref.ref[Any]] = {}
        self._vain_walks: Counter[type[Any]] = Counter()
        self._next_walk_ns = 0

    def place(self, parent: Any, name: str, child: Any) -> None:
        """Note that `parent.name` is `child`; the first place counts."""
        if id(parent) not in self._parents:
            key = id(parent)
            self._parents[key] = weakref.ref(parent, lambda _: self._parents.pop(key, None))
        child_key = id(child)
        if child_key not in self._places:
            weakref.finalize(child, self._places.pop, child_key, None)
            self._places[child_key] = (weakref.ref(parent), name)

    def of(self, module: Any) -> str | None:
        """The dotted path from the module's root; "" for a root, None where that is not known yet."""
        if id(module) not in self._places and id(module) not in self._parents:
            cls = type(module)
            if self._vain_walks[cls] >= VAIN_WALKS and time.monotonic_ns() < self._next_walk_ns:
                return None
            self.walk_heap()
            self._vain_walks[cls] += id(module) not in self._places and id(module) not in self._parents
        names: list[str] = []
        while (place := self._places.get(id(module))) is not None and len(names) < 100:
            parent = place[0]()
            if parent is None:
                break
            wraps = place[1] in _WRAPPING or (place[1] == "module" and type(parent).__name__ in _REPLICATING)
            names.extend([] if wraps else [place[1]])
            module = parent
        return ".".join(reversed(names))

    def walk_heap(self) -> Iterator[tuple[str, Any]]:
        """Place every module that is alive now; tells each name and child. Tens of milliseconds on a large heap."""
        start_ns = time.monotonic_ns()
        modules = [thing for thing in gc.get_objects() if _is_instance(thing, self._module_type)]
        edges = []
        for parent in modules:
            for name, child in self._children(parent):
                if child is not None:
                    self.place(parent, name, child)
                    edges.append((name, child))
        end_ns = time.monotonic_ns()
        self._next_walk_ns = end_ns + WALK_SHARE * (end_ns - start_ns)
        return iter(edges)


def _is_instance(thing: Any, module_type: type[Any]) -> bool:
    # type() and not isinstance(): a proxy's __class__ may run foreign code or raise.
    return issubclass(type(thing), module_type)


def _torch_children(module: Any) -> Iterable[tuple[str, Any]]:
    return (vars(module).get("_modules") or {}).items()


class Layers:
    """The layer rules of one session at work in torch. `hits` counts the layers that each rule selected.

    Another framework's layers may be selected by the same rules: it makes itself known in `known`, which holds for each
    framework that the rules mean its layer classes, or None while it is not imported, and `select`s. Classes that are
    layers of both are `left_out` here.
    """

    def __init__(self, rules: Sequence[LayerRule], recorder: Recorder = RECORDER) -> None:
        self.rules = tuple(rules)
        self.hits = [0] * len(self.rules)
        self._recorder = recorder
        self._sites: dict[int, Site] = {}  # by identity of the module
        self._shared: dict[tuple[int, type[Any], str], Site] = {}  # by rule, class and path
        self._torch: ModuleType | None = None
        self.known: dict[str, Callable[[], Iterable[type[Any]]] | None] = {"torch": None}
        self.left_out: Callable[[type[Any]], bool] = lambda cls: False
        self._undos: list[Undo] = []
        self._patched: set[type[Any]] = set()
        self._types = frozenset(name for rule in self.rules for name in rule.types)
        self._last_segments = {text.rpartition(".")[2] for rule in self.rules for text in rule.match if not rule.types}

    def wants(self, module_name: str) -> bool:
        """Whether layers come from that module."""
        return module_name == "torch"

    def imported(self, module: ModuleType) -> bool:
        """Begin to observe: torch has been imported."""
        if self._torch is None:
            self._torch = module
            self.attach(module)
        return False

    def attach(self, torch: Any) -> Undo:
        """Begin to observe; `torch` has been imported. Returns the way back."""
        module_type = torch.nn.Module
        self._module_type = module_type
        self.known["torch"] = lambda: subclasses(module_type)
        self._is_compiling = _compiling_test(torch)
        self._paths = Paths(module_type, _torch_children)
        handle = torch.nn.modules.module.register_module_module_registration_hook(self._registered)
        self._undos.append(handle.remove)
        self._undos.append(self._watch_subclasses(module_type))
        for cls in subclasses(module_type):
            self._defined(cls)
        for name, child in self._paths.walk_heap():
            self._placed(name, child)
        return self.undo

    def undo(self) -> None:
        """Give every class its own `forward` back and stop watching."""
        undo_all(self._undos)
        self._patched.clear()
        self._sites.clear()
        self._shared.clear()

    def _watch_subclasses(self, module_type: type[Any]) -> Undo:
        """See each class as it is defined: a model without children is never registered anywhere."""
        layers = self

        def __init_subclass__(cls: type[Any], /, **kwargs: Any) -> None:  # noqa: N807 - it is one
            super(module_type, cls).__init_subclass__(**kwargs)
            try:
                layers._defined(cls)
            except Exception as fault:
                FAULTS.note("definition of a layer class", fault)

        return replace(module_type, "__init_subclass__", classmethod(__init_subclass__))

    def _defined(self, cls: type[Any]) -> None:
        if cls.__name__ in self._types:
            self._patch(cls)

    def _registered(self, parent: Any, name: str, child: Any) -> None:
        """torch's registration hook. Returns None, which leaves the child as it is."""
        try:
            if child is not None:
                self._paths.place(parent, name, child)
                self._placed(name, child)
        except Exception as fault:
            FAULTS.note("module registration hook", fault)

    def _placed(self, name: str, child: Any) -> None:
        """Patch the class of a module whose last name a path rule could mean; paths are complete only later."""
        if type(child) not in self._patched and any(
            "*" in last or last == name for last in self._last_segments if last in ("*", "**") or matches(last, name)
        ):
            self._patch(type(child))

    def _patch(self, cls: type[Any]) -> None:
        """Replace `forward` in the class that defines it for `cls`."""
        if self.left_out(cls):
            return
        self._patched.add(cls)
        owner = next((base for base in cls.__mro__ if "forward" in vars(base)), None)
        if owner is None or owner is self._module_type or (owner in self._patched and owner is not cls):
            return
        forward = vars(owner)["forward"]
        if not isinstance(forward, FunctionType) or hasattr(forward, "__instrument_layers__"):
            return
        self._patched.add(owner)
        self._undos.append(replace(owner, "forward", self._wrap(forward)))

    def _wrap(self, forward: FunctionType) -> FunctionType:
        recorder, sites, decide = self._recorder, self._sites, self._decide
        open_, close, is_compiling = recorder.open, recorder.close, self._is_compiling
        not_selected, muted, pass_muted = _NOT_SELECTED, recorder.muted, recorder.pass_muted

        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not recorder.on:
                return forward(self, *args, **kwargs)
            site = sites.get(id(self)) or decide(self)
            if site is not_selected:
                return forward(self, *args, **kwargs)
            if site in muted:
                pass_muted(site)
                return forward(self, *args, **kwargs)
            frame = open_(site)
            try:
                result = forward(self, *args, **kwargs)
            except BaseException as error:
                close(frame, error)
                raise
            close(frame)
            return result

        # With the globals of the original (the body needs none of ours), torch.jit.script resolves names as before.
        same = FunctionType(wrapper.__code__, forward.__globals__, forward.__name__, None, wrapper.__closure__)
        functools.update_wrapper(same, forward)
        same.__instrument_layers__ = True  # type: ignore[attr-defined]
        return same

    def _decide(self, module: Any) -> Site:
        """Whether a layer records, and as what: once for each instance, as soon as its path is known."""
        try:
            path = self._paths.of(module)
            site = self.select(type(module), path or "") or _NOT_SELECTED
            if path is None and site is _NOT_SELECTED:
                return site
        except Exception as fault:
            FAULTS.note("layer selection", fault)
            site = _NOT_SELECTED
        key = id(module)
        weakref.finalize(module, self._sites.pop, key, None)
        self._sites[key] = site
        return site

    def select(self, cls: type[Any], path: str, method: str = "forward") -> Site | None:
        """The site of a layer that a rule selects, None where none does. `method` does the work of the class."""
        for index, rule in enumerate(self.rules):
            if rule.types and cls.__name__ not in rule.types:
                continue
            if rule.match and not any(matches(text, path) for text in rule.match):
                continue
            if any(matches(text, path) for text in rule.exclude):
                continue
            site = self._shared.get((index, cls, path))
            if site is None:
                site = self._shared.setdefault((index, cls, path), self._site(rule, cls, path, method))
                self.hits[index] += 1
                self._recorder.may_mute(site)
            return site
        return None

    @staticmethod
    def _site(rule: LayerRule, cls: type[Any], path: str, method: str) -> Site:
        code = inspect.unwrap(getattr(cls, method)).__code__
        return Site(
            name=rule.name or cls.__name__,
            kind="layer",
            module=cls.__module__,
            qualname=f"{cls.__qualname__}.{method}",
            file=code.co_filename,
            line=code.co_firstlineno,
            instance=path,
            device=rule.device,
        )

    def verdicts(self) -> list[Verdict]:
        """What became of every rule up to now, in the order of the profile."""
        imported = [classes for classes in self.known.values() if classes is not None]
        if not imported:
            why = f"{' and '.join(self.known)} not imported"
            return [Verdict(rule.text, "waiting", why=why) for rule in self.rules]
        known = sorted({cls.__name__ for classes in imported for cls in classes()})
        return [self._verdict(rule, hits, known) for rule, hits in zip(self.rules, self.hits, strict=True)]

    @staticmethod
    def _verdict(rule: LayerRule, hits: int, known: Sequence[str]) -> Verdict:
        unknown = [name for name in rule.types if name not in known]
        if hits:
            return Verdict(rule.text, "attached", f"{hits} layers")
        if rule.types and len(unknown) == len(rule.types):
            close = difflib.get_close_matches(unknown[0], known, n=1)
            why = f"no class of that name is defined: {', '.join(unknown)}"
            return Verdict(rule.text, "nothing", why=why + (f"; nearest is {close[0]}" if close else ""))
        return Verdict(rule.text, "waiting", why="no layer that it selects has run")


def _compiling_test(torch: Any) -> Callable[[], bool]:
    compiler = getattr(torch, "compiler", None)
    found = getattr(compiler, "is_compiling", None)
    return found if found is not None else lambda: False


def subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    """Every class below `cls`, each once."""
    seen: set[type[Any]] = set()
    waiting = [cls]
    while waiting:
        for below in type.__subclasses__(waiting.pop()):
            if below not in seen:
                seen.add(below)
                waiting.append(below)
                yield below
