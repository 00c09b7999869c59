"""JAX: calls of what `jax.jit` makes, `jax.device_put` and `block_until_ready`, as the host sees them.

JAX hands work to the device and returns: the span of a jitted call is that of its dispatch, and of its compilation the
first time; the wait for the result is in `block_until_ready`, or wherever the host reads an array.

The type of a jitted function is made in C and shared with the hundreds that JAX has for itself, so it is left alone:
`jax.jit` is replaced, and what it then returns stands for the jitted function and has its attributes. Of those made
before, the ones that a module of the host names are replaced there; others are not seen. What is called while JAX
traces records nothing, for it runs only once.
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

from instrument.instrumentors.frameworks.entries import missing, replaced, taken
from instrument.instrumentors.functions import Undo, replace, undo_all
from instrument.instrumentors.loaders import StandIn
from instrument.instrumentors.references import loaded_modules, namespace, rebind
from instrument.instrumentors.targets import site_of
from instrument.instrumentors.verdict import Verdict
from instrument.profile.model import FrameworkRule
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.spans import Site
from instrument.runtime.faults import FAULTS

FUNCTIONS = ("device_put", "block_until_ready")
OWN = frozenset({"jax", "jaxlib"})
"""Packages whose jitted functions and names are left as they are: every function of `jax.numpy` is jitted."""


class Jitted:
    """The calls of JAX of one session at work."""

    def __init__(self, rule: FrameworkRule, recorder: Recorder = RECORDER) -> None:
        self.rule = rule
        self._recorder = recorder
        self._jax: ModuleType | None = None
        self._verdicts: list[Verdict] = []
        self._sites: dict[CodeType | str, Site] = {}
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()
        self._bound: list[tuple[Any, Any]] = []
        self._undos: list[Undo] = []
        self._waiting = threading.local()
        self._at_work = False
        self._is_clean: Callable[[], bool] = lambda: True

    def wants(self, module_name: str) -> bool:
        """Return True where it is JAX's own front door."""
        return module_name == "jax"

    def imported(self, module: ModuleType) -> bool:
        """Attach to JAX. Return True where its functions were replaced."""
        if self._jax is not None:
            return False
        self._jax, self._at_work = module, True
        core = sys.modules.get("jax._src.core")
        clean = namespace(core).get("trace_state_clean") if core is not None else None
        if clean is None:
            why = "it does not tell when it traces: functions called while it does are recorded too, once"
            self._verdicts.append(Verdict(self.rule.text, "partly", "jax.jit", why))
        else:
            self._is_clean = clean
        self._attach("jit", self._wrap_jit)
        for name in FUNCTIONS:
            self._attach(name, functools.partial(self._wrap_call, name=f"jax.{name}"))
        array = getattr(sys.modules.get("jax._src.array"), "ArrayImpl", None)  # the arrays that have values
        bases = array.__mro__ if isinstance(array, type) else ()
        concrete = next((cls for cls in bases if "block_until_ready" in vars(cls)), None)
        if concrete is None:
            self._verdicts.append(missing(self.rule, "Array.block_until_ready"))
        else:
            self._attach_method(concrete)
        self._bound.extend(self._made_before(namespace(module).get("jit")))
        rebind(self._bound, spared=OWN)
        return True

    def undo(self) -> None:
        """Give JAX its own functions back, and the host's modules what `jax.jit` made for them."""
        self._at_work = False
        undo_all(self._undos)
        made = [(wrapped, wrapped._instrument_source) for wrapped in list(self._made)]
        rebind([*((wrapped, original) for original, wrapped in self._bound), *made])
        self._bound.clear()
        self._made.clear()

    def verdicts(self) -> list[Verdict]:
        """Return the verdict on each function of JAX."""
        if self._jax is None and not self.rule.auto:
            return [Verdict(self.rule.text, "waiting", why="jax not imported")]
        return list(self._verdicts)

    def _attach(self, name: str, wrap: Callable[[Any], Any]) -> None:
        function = namespace(self._jax).get(name) if self._jax is not None else None
        label = f"jax.{name}"
        if (verdict := taken(self.rule, label, function)) is not None:
            self._verdicts.append(verdict)
            return
        if not isinstance(function, FunctionType):
            self._verdicts.append(missing(self.rule, label))
            return
        wrapped = wrap(function)
        wrapped.__instrument_framework__ = self.rule.name
        self._undos.append(replace(self._jax, name, wrapped))
        self._bound.append((function, wrapped))
        self._verdicts.append(Verdict(self.rule.text, "attached", label))

    def _attach_method(self, cls: type[Any]) -> None:
        name = "block_until_ready"
        wrapped = self._wrap_call(vars(cls)[name], name=f"jax.{name}")
        self._verdicts.append(replaced(self.rule, f"Array.{name}", cls, name, wrapped, self._undos))

    def _wrap_jit(self, jit: Any) -> Any:
        @functools.wraps(jit)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            made = jit(*args, **kwargs)
            if not self._at_work:
                return made
            if not args and "fun" not in kwargs:  # options alone: what came back will make the function
                is_function = callable(made) and not isinstance(made, type)
                return functools.wraps(made)(lambda fun: self._jitted(made(fun))) if is_function else made
            return self._jitted(made)

        return wrapper

    def _jitted(self, made: Any) -> Any:
        if _is_own(made):
            return made
        try:
            return self._wrap_jitted(made)
        except Exception as fault:
            FAULTS.note("jitted function", fault)
            return made

    def _wrap_jitted(self, made: Any) -> Any:
        site = self._site(made)
        wrapped = _JittedFunction(made, self._recording(made, site), site)
        self._made.add(wrapped)
        return wrapped

    def _site(self, made: Any) -> Site:
        """The site of a jitted function, the same for all that are made of the same code."""
        inner = getattr(made, "__wrapped__", made)
        key = (
            getattr(inner, "__code__", None) or f"{getattr(made, '__module__', '')}.{getattr(made, '__qualname__', '')}"
        )
        return self._sites.get(key) or self._sites.setdefault(key, site_of(made))

    def _recording(self, function: Any, site: Site) -> Callable[..., Any]:
        recorder, is_clean = self._recorder, self._is_clean
        recording = recorder.make_function(function, site)
        recorder.may_mute(site, recording)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not recorder.on or not self._at_work or not is_clean():
                return function(*args, **kwargs)
            return recording(*args, **kwargs)

        return call

    def _wrap_call(self, function: Any, name: str) -> Any:
        """Record a function of JAX itself; calls that it makes of the others are part of it."""
        recording = self._recording(function, site_of(function, name=name))
        inside = self._waiting
        # A method made in C may have no qualified name.
        named = [name for name in functools.WRAPPER_ASSIGNMENTS if isinstance(getattr(function, name, None), str)]

        @functools.wraps(function, assigned=named)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if getattr(inside, "busy", False):
                return function(*args, **kwargs)
            inside.busy = True
            try:
                return recording(*args, **kwargs)
            finally:
                inside.busy = False

        return wrapper

    def _made_before(self, jit: Any) -> Iterator[tuple[Any, Any]]:
        """Jitted functions that modules of the host name, each with one that records; tells of those held elsewhere."""
        jitted_type = type(jit.__wrapped__(lambda: None)) if hasattr(jit, "__wrapped__") else None
        if jitted_type is None or issubclass(jitted_type, FunctionType):
            return
        seen: set[int] = set()
        for name, module in loaded_modules():
            if name.partition(".")[0] in OWN:
                continue
            for value in list(namespace(module).values()):
                if type(value) is jitted_type and id(value) not in seen and not _is_own(value):
                    seen.add(id(value))
                    yield value, self._wrap_jitted(value)
        missed = [f for f in gc.get_objects() if type(f) is jitted_type and id(f) not in seen and not _is_own(f)]
        if missed:
            names = sorted({str(getattr(function, "__qualname__", "?")) for function in missed})
            why = f"{len(missed)} were made before and are held where no module names them: {', '.join(names[:5])}"
            self._verdicts.append(Verdict(self.rule.text, "partly", "jax.jit", why))


class _JittedFunction(StandIn):
    # Not a Python function with the attributes of the jitted one: to jit a function copies its namespace.
    __slots__ = ("instrument_call",)

    def __init__(self, made: Any, call: Callable[..., Any], site: Site) -> None:
        super().__init__(made, site)
        object.__setattr__(self, "instrument_call", call)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.instrument_call(*args, **kwargs)

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._instrument_source.__reduce_ex__(protocol)

    __module__ = property(lambda self: self._instrument_source.__module__)
    __doc__ = property(lambda self: self._instrument_source.__doc__)


def _is_own(made: Any) -> bool:
    return str(getattr(made, "__module__", "")).partition(".")[0] in OWN
