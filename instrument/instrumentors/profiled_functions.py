"""Replace functions by probes (functions that record) for `@profiled` and the profile's function rules. Restore them.

Decorators such as `@app.get` pass a function to a framework before the module has a name for it. So
`intercept_registrations` replaces such handlers during their registration.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, singledispatchmethod
from pkgutil import resolve_name
from types import FunctionType, MethodType, ModuleType, NoneType
from typing import Any, ClassVar, TypeVar, overload

from instrument.errors import TargetError
from instrument.instrumentors.function_patterns import (
    Target,
    find_functions,
    is_public_method,
    iterate_decorated_parts,
    make_site,
    qualname_of,
)
from instrument.instrumentors.references import instance_dict, isinstance_of, module_namespace, type_namespace
from instrument.instrumentors.verdict import Verdict
from instrument.instrumentors.work import CallWork
from instrument.native import OFF
from instrument.profile.model import KINDS, PHASES
from instrument.recorder import wrapping
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recorder.wrapping import Attributes, Passes, Results
from instrument.recording.spans import Site
from instrument.runtime.faults import FAULTS

_IMMORTAL = 1 << 28
"""The lowest reference count of an immortal object (PEP 683)."""

_MISSING = object()

Undo = Callable[[], None]
T = TypeVar("T")


class Probe:
    """A probe on a target. It replaces the target's function by a recording function until `undo` is called."""

    __slots__ = ("_aliases", "_places", "is_set", "site", "target", "wrapped")

    def __init__(
        self,
        target: Target,
        site: Site,
        recorder: Recorder = RECORDER,
        attributes: Attributes | None = None,
        passes: Passes | None = None,
        results: Results | None = None,
    ) -> None:
        self.target, self.site, self.is_set = target, site, False
        works = CallWork.make_for_function(recorder, target.function) if site.device else None
        self.wrapped: Any = recorder.wrap(target.function, site, attributes, passes, works, results)
        self._aliases: list[tuple[type, str]] = []
        self._places: list[Undo] = []

    def attach(self) -> None:
        """Replace the target's function. Raises the error of a module or class that cannot be changed."""
        target = self.target
        self.is_set = True
        value = self._put_in_target(self.wrapped)
        if target.raw is not None and value is not target.raw:
            self._places.append(replace_attribute(target.owner, target.attribute, value))
        for owner, attribute in self._aliases:
            self._places.append(replace_attribute(owner, attribute, self.wrapped))

    def _put_in_target(self, function: Any) -> Any:
        """Put a function in place of the target's function. If the target is a property, also set the property's
        name."""
        value = self.target.put(function)
        if isinstance_of(self.target.raw, property):
            property.__set_name__(self.target.raw, self.target.owner, self.target.attribute)  # type: ignore[attr-defined]
        return value

    def attach_alias(self, owner: type, attribute: str) -> None:
        if type_namespace(owner).get(attribute) is self.target.function:
            self._aliases.append((owner, attribute))
            self._places.append(replace_attribute(owner, attribute, self.wrapped))

    def undo(self) -> None:
        if not self.is_set:
            return
        self.is_set = False
        self._put_in_target(self.target.function)
        while self._places:
            self._places.pop()()


def replace_attribute(owner: Any, attribute: str, new: Any) -> Undo:
    """Set an attribute of a module or class. Return a function that restores the earlier value, unless other code has
    changed it since."""

    def read_names() -> Any:
        return type_namespace(owner) if isinstance_of(owner, type) else vars(owner)

    def restore_attribute() -> None:
        if read_names().get(attribute) is not new:
            return
        if before is _MISSING:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, before)

    before = read_names().get(attribute, _MISSING)
    setattr(owner, attribute, new)
    return restore_attribute


def replaces_attribute(owner: Any, attribute: str) -> Callable[[Callable[..., Any]], Undo]:
    """Return a decorator that replaces `owner.attribute` by the decorated function. The decorator returns the function
    that restores the original."""
    original = getattr(owner, attribute)
    return lambda function: replace_attribute(owner, attribute, functools.wraps(original)(function))


def note_calls(owner: Any, attribute: str, note: Callable[..., object]) -> Undo:
    """Call `note` before each call of `owner.attribute`, with the same arguments. Return the function that undoes
    this."""
    original = getattr(owner, attribute)

    def note_and_call(*args: Any, **kwargs: Any) -> Any:
        try:
            note(*args, **kwargs)
        except Exception as fault:
            FAULTS.note(f"note of {attribute}", fault)
        return original(*args, **kwargs)

    return replace_attribute(owner, attribute, functools.wraps(original)(note_and_call))


def change_argument(
    owner: Any, attribute: str, position: int, change: Callable[[Any], Any], name: str | None = None
) -> Undo:
    """Replace one argument of each call of `owner.attribute` by `change(argument)`. Return the function that undoes
    this.

    The argument is the one at `position`, or the keyword argument `name`.
    """
    original = getattr(owner, attribute)

    def call_changed(*args: Any, **kwargs: Any) -> Any:
        with FAULTS.guard(f"argument of {attribute}"):
            if name in kwargs:
                kwargs[name] = change(kwargs[name])
            elif len(args) > position:
                args = (*args[:position], change(args[position]), *args[position + 1 :])
        return original(*args, **kwargs)

    return replace_attribute(owner, attribute, functools.wraps(original)(call_changed))


def undo_all(undos: list[Undo]) -> None:
    """Call all functions of the list, the last one first, and empty the list. Failures are counted, not raised."""
    while undos:
        FAULTS.attempt("way back of a probe", undos.pop())


def count_other_references(target: Target) -> int:
    """Count the objects that refer to a target's function, except the module or class of the function.

    The number is 0 for an inherited method and for functions of a `singledispatchmethod`.
    """
    names = type_namespace(target.owner) if isinstance_of(target.owner, type) else instance_dict(target.owner)
    is_other = isinstance_of(target.raw, (NoneType, singledispatchmethod))
    is_inherited = (names or {}).get(target.attribute) is not target.raw
    return 0 if is_other or is_inherited else _count_references(target) - _count_references_of_unshared()


def _count_references(target: Target) -> int:
    count = sys.getrefcount(target.function) - (target.raw is target.function)
    return count if count < _IMMORTAL else 0


@lru_cache(maxsize=1)
def _count_references_of_unshared() -> int:
    module = ModuleType("usual")
    module_namespace(module)["usual"] = FunctionType((lambda: None).__code__, {"__name__": "usual"})
    (target,) = find_functions(module, "usual:usual")
    return _count_references(target) if isinstance(target, Target) else sys.maxsize


@overload
def profiled(
    name: str | None = None, *, kind: str | None = None, device: bool = False, phase: str | None = None
) -> Callable[[T], T]: ...


@overload
def profiled(name: T, *, kind: str | None = None, device: bool = False, phase: str | None = None) -> T: ...


def profiled(name: Any = None, *, kind: str | None = None, device: bool = False, phase: str | None = None) -> Any:
    """Record each call of a function, or each call of the public methods of a class. Works as `@profiled` and as
    `@profiled("conv_layer", phase="compute", device=True)`.

    - `name`: the name of the spans. The default is the function's name
    - `kind`: the kind of work, "op" by default. The error for an unknown kind lists all kinds
    - `phase`: the part of the work, such as "prepare" or "post"
    - `device`: also take the time on the current stream of torch, cupy or numba

    The function may be a coroutine function, a generator or a method. The decorator may be above or below other
    decorators, such as `classmethod`, `property`, `lru_cache` and `contextmanager`.

    Returns the object itself when `INSTRUMENT=off`. Raises `TargetError` for an object that cannot be recorded.
    """
    if kind is not None and kind not in KINDS:
        raise TargetError(f"profiled: there is no kind {kind!r}; allowed: {', '.join(KINDS)}")
    if phase is not None and (not isinstance(phase, str) or not phase):
        raise TargetError(f"profiled: the phase {phase!r} is not a name; give one such as {', '.join(PHASES)}")
    if name is None or isinstance(name, str):
        return lambda target: _profile_target(target, name, kind, device, phase)
    return _profile_target(name, None, kind, device, phase)


def _profile_target(target: Any, name: str | None, kind: str | None, device: bool, phase: str | None) -> Any:
    if OFF:
        return target
    if isinstance_of(target, type):
        for attribute, raw in list(vars(target).items()):
            function = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
            if is_public_method(attribute) and isinstance(function, FunctionType):
                label = f"{name}.{attribute}" if name else None
                setattr(target, attribute, _profile_target(raw, label, kind, device, phase))
        return target
    parts = list(iterate_decorated_parts(target))
    for suffix, function, put in parts:
        span_name = name + suffix if name else qualname_of(function) + suffix if suffix else None
        site = make_site(function, name=span_name, kind=kind, device=device, phase=phase)
        wrapped = RECORDER.wrap(
            function, site, works=CallWork.make_for_function(RECORDER, function) if device else None
        )
        _register_hint()
        _decorated.add(wrapped)
        if function is target:
            return wrapped
        target = put(wrapped)
    if not parts:
        raise TargetError(
            f"profiled needs a function, a method or a class, not {target!r} of type {type(target).__name__}. Put "
            "it below the decorator that returns such an object."
        )
    return target


_decorated: weakref.WeakSet[Any] = weakref.WeakSet()


@functools.cache
def _register_hint() -> None:
    atexit.register(_print_hint, os.getpid())


def _print_hint(pid: int) -> None:
    parent = getattr(sys.modules.get("multiprocessing.process"), "parent_process", lambda: None)()
    if _decorated and os.getpid() == pid and parent is None and sys.stderr is not None:
        functions = f"@profiled on {len(_decorated)} function{'s' * (len(_decorated) != 1)}"
        hint = "use `instrument run -- ...` or `instrument.start()`; INSTRUMENT=off hides this line"
        with contextlib.suppress(OSError, ValueError):  # closed by the program
            print(f"instrument: {functions} recorded no call, because no session was started: {hint}", file=sys.stderr)


def withdraw_hint() -> None:
    """Cancel the hint that is printed at the program's exit, because a session has started."""
    _register_hint()  # or a later decorator would register it
    atexit.unregister(_print_hint)


class Instrumentor(ABC):
    """The base class of the instrumentors. Each attaches the rules of one key of a profile, in their order.

    Only one thread at a time may call the methods.
    """

    def __init__(self, rules: Sequence[Any], recorder: Recorder = RECORDER) -> None:
        self.rules: tuple[Any, ...] = tuple(rules)
        self._recorder = recorder
        self._undos: list[Undo] = []

    @abstractmethod
    def may_match(self, module_name: str) -> bool:
        """Return True if a rule may select something in a module. Called before each import."""

    @abstractmethod
    def attach_to(self, module: Any) -> bool | None:
        """Attach the probes in an imported module. Return True if its functions were replaced."""

    def probes_by_name(self) -> Mapping[str, Any]:
        """Return a value for each attached probe, by name. A reload compares the values to find changed probes."""
        return {rule.text: rule for rule in self.rules}

    def undo(self) -> None:
        undo_all(self._undos)

    @abstractmethod
    def verdicts(self) -> list[Verdict]: ...

    def _make_shared_recording(
        self, function: Any, site: Site, recordings: dict[Any, Any], key: Any, works: CallWork | None = None
    ) -> Any:
        new_recording = wrapping.make_wrapper(self._recorder, function, site, works)
        recording = recordings.setdefault(key, new_recording)
        if recording is new_recording:
            self._recorder.allow_muting(site, new_recording)
        return recording


class Switch(Instrumentor):
    """The base class of instrumentors that a profile sets to `auto` or `off`. For `off`, `rules` is empty."""

    key: ClassVar[str]
    module: ClassVar[str]
    """The module whose functions are recorded."""

    def __init__(self, rules: Sequence[str] = ("auto",), recorder: Recorder = RECORDER) -> None:
        super().__init__(rules, recorder)
        self._attached = False
        self._met = False

    def probes_by_name(self) -> Mapping[str, Any]:
        return {self.key: True} if self._attached else {}

    def may_match(self, module_name: str) -> bool:
        return module_name == self.module

    def _mark_attached(self) -> None:
        self._attached = self._met = True

    def undo(self) -> None:
        super().undo()
        self._attached = False


SEAMS: Mapping[str, tuple[tuple[str, str, str, int], ...]] = {
    "starlette.routing": (("Route", "__init__", "endpoint", 2), ("WebSocketRoute", "__init__", "endpoint", 2)),
    "fastapi.routing": (("APIRoute", "__init__", "endpoint", 2), ("APIWebSocketRoute", "__init__", "endpoint", 2)),
    "fastapi.params": (("Depends", "__init__", "dependency", 1),),
    "flask.sansio.app": (("App", "add_url_rule", "view_func", 3),),  # of Quart, too
    "flask.sansio.blueprints": (("Blueprint", "add_url_rule", "view_func", 3),),
    "aiohttp.web_routedef": (("RouteDef", "__init__", "handler", 3),),
    "aiohttp.web_urldispatcher": (("AbstractRoute", "__init__", "handler", 2),),
    "django.urls.resolvers": (("URLPattern", "__init__", "callback", 2),),
    "litestar.handlers.base": (("BaseRouteHandler", "__call__", "fn", 1),),
    "bottle": (("Route", "__init__", "callback", 4),),
    "celery.app.base": (("Celery", "_task_from_fun", "fun", 1),),  # at the first use of a task, long after
}
"""The methods that register handlers, by framework module.

Each entry has the class, the method, and the name and position of the argument with the handler.
"""


def intercept_registrations(module: Any, registered: Callable[[FunctionType], Any]) -> list[Undo]:
    """Make a framework register `registered(handler)` in place of each handler. Return the functions that undo this."""

    def probe_handler(handler: Any) -> Any:
        if type(handler) is MethodType and type(handler.__func__) is FunctionType:
            probe = registered(handler.__func__)
            return handler if probe is handler.__func__ else MethodType(probe, handler.__self__)
        return registered(handler) if type(handler) is FunctionType else handler

    return [
        change_argument(getattr(module, class_name), method, position, probe_handler, argument)
        for class_name, method, argument, position in SEAMS[module.__name__]
        if isinstance(getattr(getattr(module, class_name, None), method, None), FunctionType)
    ]


def keep_functions_picklable() -> Undo:
    """Make process pools pickle a replaced function by its name, although the name now refers to the probe."""
    from multiprocessing.reduction import ForkingPickler

    if hasattr(ForkingPickler, "reducer_override"):
        return lambda: None

    def reduce_function(_: Any, thing: Any) -> Any:
        if isinstance(thing, FunctionType):
            value: Any = sys.modules.get(thing.__module__)
            path: str = thing.__qualname__
            for name in path.split("."):
                value = getattr(value, name, None)
            if getattr(value, "__instrument_function__", None) is thing:
                return resolve_name, (f"{thing.__module__}:{path}",)
        return NotImplemented

    return replace_attribute(ForkingPickler, "reducer_override", reduce_function)
