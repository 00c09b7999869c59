"""Record memory copies between host and device. Each call that copies is a span with the direction and the bytes.

When the service imports a framework, an adapter (`ADAPTERS`) replaces the framework's copy functions. If such calls are
nested, only the outermost is recorded.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from instrument.instrumentors.profiled_functions import Instrumentor, Undo, replace_attribute, undo_all
from instrument.instrumentors.references import rebind_objects
from instrument.instrumentors.verdict import Verdict
from instrument.profile.model import DEVICE_DIRECTIONS, DIRECTIONS, CopyRule
from instrument.recorder.recorder import RECORDER, Recorder, stream_handle
from instrument.recording.memory_layout import STREAM
from instrument.recording.spans import Site, Work
from instrument.runtime.faults import FAULTS
from instrument.runtime.lazy_imports import NamedTuple


class Transfer(NamedTuple):
    """The data that one call has copied. `direction` is `h2d`, `d2h`, `d2d`, `p2p` or `h2h`.

    `sync` is True if the call waits for the copy. `pinned` is True for page-locked memory of the host, or None if
    unknown.
    """

    direction: str
    moved_bytes: int
    sync: bool
    pinned: bool | None = None


Facts = Callable[[Any, Any, Any], Transfer | None]
"""A function of (result, `args`, `kwargs`) that returns the transfer of a call. It returns None if the call copies
nothing."""

NOWHERE = object()

Stream = Callable[[Any, Any], Any]
"""A function that returns the stream of a call, as an object or address, from `args` and `kwargs`. It can also return:

- None: the framework's current stream on the current device.
- `Work`: the current streams of the devices in the `Work`.
- `NOWHERE`: unknown before the call.
"""


class _ThreadState(threading.local):
    busy = False


_STATE = _ThreadState()


class FrameworkAdapter(NamedTuple):
    """A framework whose copies can be recorded.

    The import of a module in `modules` leads to a call of `attach_FRAMEWORK` in `array_copies`. `unseen` describes the
    copies that cannot be recorded.
    """

    framework: str
    modules: Sequence[str]
    directions: Sequence[str]
    unseen: str


ADAPTERS = (
    FrameworkAdapter(
        "torch", ("torch",), DIRECTIONS,
        "torch.tensor, as_tensor and asarray with a device, indexing and masks between host and device, clone() and "
        "contiguous(), scatter and gather between devices, and what compiled regions, CUDA graphs and C++ code copy",
    ),
    FrameworkAdapter(
        "cupy", ("cupy",), DIRECTIONS,
        "assignments to slices, copy() and astype(), memory pointers' own copies, and what cupy's C code copies",
    ),
    FrameworkAdapter(
        "numba", ("numba.cuda.cudadrv.driver",), DEVICE_DIRECTIONS,
        "arrays in mapped or managed memory, which the device reads in place",
    ),
    FrameworkAdapter(
        "cuda", ("cuda.bindings.driver", "cuda.bindings.runtime"), DIRECTIONS,
        "calls whose direction only the driver knows (cuMemcpy, cudaMemcpyDefault, batches), "
        "3D copies of the runtime, and cuda.core, which calls the driver in C",
    ),
    FrameworkAdapter(
        "onnxruntime", ("onnxruntime.capi.onnxruntime_inference_collection",), DIRECTIONS,
        "what InferenceSession.run copies by itself; use an IOBinding to see it",
    ),
    FrameworkAdapter(
        "jax", ("jax",), DIRECTIONS,
        "arguments of the host that a compiled function takes, and what happens inside of one",
    ),
    FrameworkAdapter(
        "numpy", ("numpy",), ("h2h",),
        "numpy.copy, which compilers know by identity, methods of arrays and assignments to slices",
    ),
)  # fmt: skip


class Copies(Instrumentor):
    """The instrumentor of a session's rules for copies. `hits` counts copies per rule."""

    def __init__(self, rules: Sequence[CopyRule], recorder: Recorder = RECORDER) -> None:
        super().__init__(rules, recorder)
        self.hits = [0] * len(rules)
        self._sites: dict[tuple[str, str, str, bool, bool | None], Site] = {}
        adapters = [adapter for adapter in ADAPTERS if self.selects_copies(adapter.framework, adapter.directions)]
        self._adapters = {name: adapter for adapter in adapters for name in adapter.modules}
        self._patched: dict[str, PatchedFunctions] = {}
        self._met: dict[str, FrameworkAdapter] = {}  # by module, also when its own functions are back
        self._absent: dict[str, str] = {}

    def selects_copies(self, framework: str, directions: Iterable[str]) -> bool:
        return any(framework in rule.frameworks and {*directions} & {*rule.directions} for rule in self.rules)

    def probes_by_name(self) -> Mapping[str, Any]:
        return super().probes_by_name() if self._patched else {}

    def may_match(self, module_name: str) -> bool:
        return module_name in self._adapters

    def attach_to(self, module: ModuleType) -> None:
        name = module.__name__
        if name in self._patched:
            return
        adapter = self._adapters[name]
        framework, home = adapter.framework, import_module("instrument.instrumentors.array_copies")
        why = home.explain_missing_device(module) if framework == "torch" else ""
        if why and not self.selects_copies(framework, ("h2h",)):
            self._absent[framework] = why
            return
        patched = PatchedFunctions(self, framework)
        try:
            getattr(home, f"attach_{framework}")(module, patched)
            patched.replace_in_all_modules()
            self._patched[name], self._met[name] = patched, adapter
        except Exception as fault:
            patched.undo()  # an unknown version of the framework
            self._absent[framework] = f"its copies cannot be observed: {type(fault).__name__}: {fault}"
            FAULTS.note(f"copy probe of {framework}", fault)

    def undo(self) -> None:
        while self._patched:
            self._patched.popitem()[1].undo()

    def find_site(self, framework: str, qualname: str, transfer: Transfer) -> Site | None:
        direction, moved_bytes, sync, pinned = transfer
        for index, rule in enumerate(self.rules if moved_bytes > 0 else ()):
            if direction in rule.directions and moved_bytes >= rule.min_bytes and framework in rule.frameworks:
                self.hits[index] += 1
                break
        else:
            return None
        key = (framework, qualname, direction, sync, pinned)
        site = self._sites.get(key)
        if site is None:
            facts: tuple[tuple[str, str | bool], ...] = (("direction", direction), ("sync", sync))
            facts += () if pinned is None else (("pinned", pinned),)
            # Copies of one call that wait and that do not have two sites, or the tally would add them up.
            modes = ["sync" if sync else "async", *([] if pinned is None else ["pinned" if pinned else "pageable"])]
            name, device = f"memcpy {direction}", direction != "h2h"
            new = Site(name, "copy", framework, qualname, instance=", ".join(modes), device=device, attributes=facts)
            # Two threads may be first: setdefault keeps one site per key, or the tally would split.
            site = self._sites.setdefault(key, new)
        return site

    def verdicts(self) -> list[Verdict]:
        met = {adapter.framework: adapter for adapter in self._met.values()}
        verdicts = [self._make_verdict(rule, hits, met) for rule, hits in zip(self.rules, self.hits, strict=True)]
        verdicts += [Verdict("copies", "partly", name, f"not seen: {adapter.unseen}") for name, adapter in met.items()]
        return verdicts

    def _make_verdict(self, rule: CopyRule, hits: int, met: dict[str, FrameworkAdapter]) -> Verdict:
        if hits:
            return Verdict(rule.text, "attached", why=f"{hits} copies")
        names = list(dict.fromkeys(adapter.framework for adapter in self._adapters.values()))
        names = [name for name in names if name in rule.frameworks]
        reasons = ["no such copy was made"] if any(name in met for name in names) else []
        reasons += dict.fromkeys(self._absent[name] for name in names if name in self._absent)
        if reasons:
            return Verdict(rule.text, "waiting", why="; ".join(reasons))
        if not names:
            return Verdict(rule.text, "not found", why=f"{', '.join(rule.frameworks)} makes no such copies")
        shown = names[0] if len(names) == 1 else f"none of {', '.join(names)}"
        return Verdict(rule.text, "waiting", why=f"{shown} {'not ' if len(names) == 1 else ''}imported")


class PatchedFunctions:
    """The replaced functions of a framework. They record copies while `ready()` is True."""

    def __init__(self, copies: Copies, framework: str) -> None:
        self.copies = copies
        self.ready: Callable[[], bool] = lambda: True
        self.stream: Stream = lambda args, kwargs: NOWHERE
        self._framework = framework
        self._undos: list[Undo] = []
        self._bound: list[tuple[Any, Any]] = []

    def wrap_methods(self, owner: Any, names: Iterable[str], facts: Facts, stream: Stream | None = None) -> None:
        """Replace those methods in `names` that a class has. The first argument of a classmethod's call is the
        class."""
        for name in names:
            raw, method = vars(owner).get(name), getattr(owner, name, None)
            function = raw.__func__ if isinstance(raw, classmethod) else method
            if method is not None:
                watched = self._wrap_function(function, f"{owner.__name__}.{name}", facts, stream)
                new = classmethod(watched) if function is not method else watched
                self._undos.append(replace_attribute(owner, name, new))

    def wrap_property(self, owner: Any, name: str, facts: Facts, is_fresh: Callable[[Any], bool]) -> None:
        read = vars(owner)[name].fget
        watched = self._wrap_function(read, f"{owner.__name__}.{name}", facts)
        replacement = property(lambda obj: watched(obj) if is_fresh(obj) else read(obj), doc=vars(owner)[name].__doc__)
        self._undos.append(replace_attribute(owner, name, replacement))

    def wrap_functions(self, module: Any, names: Iterable[str], facts: Facts, stream: Stream | None = None) -> None:
        """Replace the functions `names` of a module, and skip missing functions.

        Later, `replace_in_all_modules` replaces the functions in other modules. Do not use this for functions that
        numba or torch.compile compares by identity.
        """
        for name in names:
            function = getattr(module, name, None)
            if callable(function):
                watched = self._wrap_function(function, name, facts, stream)
                self._undos.append(replace_attribute(module, name, watched))
                self._bound.append((function, watched))

    def replace_in_all_modules(self) -> None:
        rebind_objects(self._bound)

    def undo(self) -> None:
        undo_all(self._undos)
        rebind_objects((watched, function) for function, watched in self._bound)
        self._bound.clear()

    def _wrap_function(self, function: Any, qualname: str, facts: Facts, stream: Stream | None = None) -> Any:
        framework, recorder, inside, now = self._framework, self.copies._recorder, _STATE, time.monotonic_ns
        site_of, timed, ready, stream_of = self.copies.find_site, self._start_timer, self.ready, stream or self.stream

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not ready() or not recorder.on or inside.busy:
                return function(*args, **kwargs)
            inside.busy = True
            pair = None
            try:
                start_ns = now()
                if recorder.begin_device is not None:
                    pair = timed(stream_of, args, kwargs)
                out = function(*args, **kwargs)
            except BaseException:
                if pair is not None:
                    pair.cancel()
                raise
            finally:
                inside.busy = False
            try:
                transfer = facts(out, args, kwargs)
                site = None if transfer is None else site_of(framework, qualname, transfer)
                if transfer is not None and site is not None:
                    handed, pair = (pair, None) if site.device else (None, pair)
                    recorder.record(site, start_ns, {"bytes": transfer.moved_bytes}, handed)
            except Exception as fault:
                FAULTS.note("copy probe", fault)
            finally:
                if pair is not None:
                    pair.cancel()
            return out

        try:
            return functools.wraps(function)(wrapper)
        except (AttributeError, TypeError):  # a function made in C with odd attributes
            return wrapper

    def _start_timer(self, stream: Stream, args: Any, kwargs: Any) -> Any:
        begin = self.copies._recorder.begin_device
        try:
            stream_object = stream(args, kwargs)
            if begin is None or stream_object is NOWHERE:
                return None
            if stream_object is None or isinstance(stream_object, Work):
                return begin(None, {STREAM: stream_object or Work(self._framework)}, 0)
            return begin(None, {STREAM: stream_handle(stream_object)}, 0)
        except Exception as fault:
            FAULTS.note("copy probe", fault)
            return None


def direction_between(source: object, target: object) -> str:
    """Return the direction of a copy between two memories. None means the host. Any other object means a device."""
    if source is None or target is None:
        return f"{'h' if source is None else 'd'}2{'h' if target is None else 'd'}"
    return "d2d" if source == target else "p2p"


def read_argument(args: Any, kwargs: Any, index: int, name: str, default: Any = None) -> Any:
    return args[index] if len(args) > index else kwargs.get(name, default)


_PINNED_OWNERS = frozenset({"PinnedMemoryPointer", "PinnedMemory", "MappedMemory", "PinnedBuffer"})
"""The classes of cupy, numba and cuda.core that own the page-locked memory of a numpy array."""


def is_pinned(array: Any) -> bool | None:
    """Return True if a numpy array is in page-locked memory, or None if that is unknown."""
    owner = array
    for _ in range(11):
        below = getattr(owner, "base", None)
        if below is None:
            below = getattr(owner, "obj", None)  # a memoryview
        if below is None:
            return False if hasattr(owner, "base") else None
        if type(below).__name__ in _PINNED_OWNERS:
            return True
        owner = below
    return None
