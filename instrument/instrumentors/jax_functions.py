"""Record the calls of jitted functions, of `jax.device_put` and of `block_until_ready` on the host.

A jitted call returns before the device has finished. So its span covers only the dispatch, and at the first call also
the compilation. The host waits for the result in `block_until_ready`, or when it reads an array.

`jax.jit` is replaced by a function that returns a proxy of the jitted function. A function that was jitted before is
replaced only under its names in modules of the service. Calls by other references are not recorded. The type of jitted
functions is not changed, because it is made in C and JAX itself uses it. While JAX traces, no call is recorded.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from instrument.instrumentors.frameworks import Observer
from instrument.instrumentors.functions import replace
from instrument.instrumentors.loaders import StandIn
from instrument.instrumentors.references import loaded_modules, namespace, rebind
from instrument.instrumentors.targets import site_of
from instrument.instrumentors.verdict import Verdict
from instrument.profile.model import FrameworkRule
from instrument.recorder import wrapping
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.spans import Site
from instrument.runtime.faults import FAULTS

FUNCTIONS = ("device_put", "block_until_ready")
OWN = frozenset({"jax", "jaxlib"})
"""The packages whose jitted functions are not replaced: JAX itself jits every function of `jax.numpy`."""


class JaxFunctions(Observer):
    """The instrumentor of JAX for one session."""

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
        clean = namespace(core).get("trace_state_clean") if core is not None else None
        if clean is None:
            why = "it does not report when it traces: functions that it calls then are recorded, too, once"
            self._note("partly", "jax.jit", why, key="traced")
        else:
            self._is_clean = clean
        self._attach_function("jit", self._wrap_jit)
        for name in FUNCTIONS:
            self._attach_function(name, functools.partial(self._wrap_call, name=f"jax.{name}"))
        array = getattr(sys.modules.get("jax._src.array"), "ArrayImpl", None)  # the class of arrays with values
        bases = array.__mro__ if isinstance(array, type) else ()
        concrete = next((cls for cls in bases if "block_until_ready" in vars(cls)), None)
        if concrete is None:
            self._note_missing("Array.block_until_ready")
        else:
            name = "block_until_ready"
            wrapped = self._wrap_call(vars(concrete)[name], name=f"jax.{name}")
            self._replace_method(f"Array.{name}", concrete, name, wrapped)
        self._bound.extend(self._wrap_existing(namespace(module).get("jit")))
        rebind(self._bound, spared=OWN)
        return True

    def undo(self) -> None:
        """Restore the functions of JAX, and the jitted functions in the service's modules."""
        self._at_work = False
        super().undo()
        pairs = [(wrapped, wrapped._instrument_source) for wrapped in list(self._made)]
        rebind([*((wrapped, original) for original, wrapped in self._bound), *pairs])
        self._bound.clear()
        self._made.clear()

    def verdicts(self) -> list[Verdict]:
        if self._jax is None and not self.rule.auto:
            return [Verdict(self.rule.text, "waiting", why="jax not imported")]
        return super().verdicts()

    def _attach_function(self, name: str, wrap: Callable[[Any], Any]) -> None:
        function = namespace(self._jax).get(name) if self._jax is not None else None
        label = f"jax.{name}"
        if self._note_recorded(label, function):
            return
        if not isinstance(function, FunctionType):
            self._note_missing(label)
            return
        wrapped = wrap(function)
        wrapped.__instrument_framework__ = self.rule.name
        self._undos.append(replace(self._jax, name, wrapped))
        self._bound.append((function, wrapped))
        self._note("attached", label)

    def _wrap_jit(self, jit: Any) -> Any:
        @functools.wraps(jit)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            jitted = jit(*args, **kwargs)
            if not self._at_work:
                return jitted
            if not args and "fun" not in kwargs:  # options alone: `jitted` is a decorator
                is_function = callable(jitted) and not isinstance(jitted, type)
                return functools.wraps(jitted)(lambda fun: self._try_wrap(jitted(fun))) if is_function else jitted
            return self._try_wrap(jitted)

        return wrapper

    def _try_wrap(self, jitted: Any) -> Any:
        if _is_of_jax(jitted):
            return jitted
        try:
            return self._wrap_jitted(jitted)
        except Exception as fault:
            FAULTS.note("jitted function", fault)
            return jitted

    def _wrap_jitted(self, jitted: Any) -> Any:
        site = self._find_site(jitted)
        wrapped = _JittedFunction(jitted, self._make_recording(jitted, site), site)
        self._made.add(wrapped)
        return wrapped

    def _find_site(self, jitted: Any) -> Site:
        """Return the site of a jitted function. Functions with the same code share a site."""
        inner = getattr(jitted, "__wrapped__", jitted)
        key = (
            getattr(inner, "__code__", None)
            or f"{getattr(jitted, '__module__', '')}.{getattr(jitted, '__qualname__', '')}"
        )
        return self._sites.get(key) or self._sites.setdefault(key, site_of(jitted))

    def _make_recording(self, function: Any, site: Site) -> Callable[..., Any]:
        recorder, is_clean = self._recorder, self._is_clean
        recording = wrapping.make_function(recorder, function, site)
        recorder.allow_muting(site, recording)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not recorder.on or not self._at_work or not is_clean():
                return function(*args, **kwargs)
            return recording(*args, **kwargs)

        return call

    def _wrap_call(self, function: Any, name: str) -> Any:
        """Wrap a function of JAX. Calls of other wrapped functions inside it have no span."""
        recording = self._make_recording(function, site_of(function, name=name))
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

    def _wrap_existing(self, jit: Any) -> Iterator[tuple[Any, Any]]:
        """Yield each jitted function in modules of the service, with a proxy. Note a verdict on all others."""
        jitted_type = type(jit.__wrapped__(lambda: None)) if hasattr(jit, "__wrapped__") else None
        if jitted_type is None or issubclass(jitted_type, FunctionType):
            return
        visited: set[int] = set()
        for name, module in loaded_modules():
            if name.partition(".")[0] in OWN:
                continue
            for value in list(namespace(module).values()):
                if type(value) is jitted_type and id(value) not in visited and not _is_of_jax(value):
                    visited.add(id(value))
                    yield value, self._wrap_jitted(value)
        missed = [f for f in gc.get_objects() if type(f) is jitted_type and id(f) not in visited and not _is_of_jax(f)]
        if missed:
            names = sorted({str(getattr(function, "__qualname__", "?")) for function in missed})
            why = f"{len(missed)} were created before, and no module has a name of them: {', '.join(names[:5])}"
            self._note("partly", "jax.jit", why, key="missed")


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
    return str(getattr(jitted, "__module__", "")).partition(".")[0] in OWN
