"""Functions that `@profiled` has decorated, taken off for a while and put on again wherever they are held.

What the service's module holds is the wrapper. While it is off its holders have a twin of the bare function in its
place, which nobody else can have taken, so that the way back finds all of them and nothing besides. The twin has the
wrapper's attributes: what is set on one is set on the other.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

from instrument.instrumentors import holders
from instrument.recorder.wrapping import bare_of
from instrument.recording.spans import Site

_decorated: weakref.WeakValueDictionary[Site, Any] = weakref.WeakValueDictionary()


def note(site: Site, wrapper: Any) -> None:
    """A function has been decorated."""
    _promise_hint()
    _decorated[site] = wrapper


@functools.cache
def _promise_hint() -> None:
    atexit.register(_say_hint, os.getpid())


def _say_hint(pid: int) -> None:
    """Say at a program's exit, once, how to see its decorated functions; not in what it has forked or spawned."""
    parent = getattr(sys.modules.get("multiprocessing.process"), "parent_process", lambda: None)()
    if _decorated and os.getpid() == pid and parent is None and sys.stderr is not None:
        functions = f"@profiled on {len(_decorated)} function{'s' * (len(_decorated) != 1)}"
        hint = "use `instrument run -- ...` or `instrument.start()`; INSTRUMENT=off hides this line"
        with contextlib.suppress(OSError, ValueError):  # closed by the program
            print(f"instrument: {functions} recorded nothing, for there was no session: {hint}", file=sys.stderr)


def withdraw_hint() -> None:
    """Say nothing at the exit: there is a session."""
    _promise_hint()  # or a later decorator would
    atexit.unregister(_say_hint)


def detach(site: Site) -> Callable[[], None] | None:
    """Take the wrapper of a site off for a while; gives what puts it on again.

    None where there is none that can be taken off: where a function is not made in Python, or nothing that can be
    changed holds its wrapper. A holder that cannot be changed, such as a local variable of a call that runs, goes on
    calling the wrapper.
    """
    wrapper = _decorated.get(site)
    bare = None if wrapper is None else bare_of(wrapper)
    if type(bare) is not FunctionType:
        return None
    taken = _TakenOff(wrapper, _twin(bare, wrapper))
    return taken.attach if _swapped(taken.wrapper, taken.twin) else None


class _TakenOff:
    """A wrapper and its twin, where a look for their holders passes over them."""

    __slots__ = ("twin", "wrapper")

    def __init__(self, wrapper: Any, twin: Any) -> None:
        self.wrapper = wrapper
        self.twin = twin

    def attach(self) -> None:
        """Put the wrapper on again."""
        _swapped(self.twin, self.wrapper)


def _twin(bare: FunctionType, wrapper: Any) -> FunctionType:
    twin = FunctionType(bare.__code__, bare.__globals__, bare.__name__, bare.__defaults__, bare.__closure__)
    twin.__kwdefaults__ = bare.__kwdefaults__
    functools.update_wrapper(twin, bare)
    twin.__dict__ = vars(wrapper)
    return twin


def _swapped(first: Any, second: Any) -> bool:
    """Put the second in the place of the first wherever that is held. Whether it was anywhere.

    Most functions are held where their names say; only for others is the heap worth a look, at 70 ns an object.
    """
    owner: Any = sys.modules.get(first.__module__)
    *path, last = first.__qualname__.split(".")
    for name in path:
        owner = (holders.type_namespace(owner) if isinstance(owner, type) else holders.own_names(owner) or {}).get(name)
    names = holders.type_namespace(owner) if isinstance(owner, type) else holders.own_names(owner) or {}
    is_found = names.get(last) is first
    if is_found:
        setattr(owner, last, second)
    if sys.getrefcount(first) > _references_left():
        swap = holders.Swap(holders.Kept([first]))
        is_found |= swap.has_found
        swap.to(holders.Kept([second]))
    return is_found


@functools.lru_cache(maxsize=1)
def _references_left() -> int:
    """References to a twin that nobody but we hold, as `_swapped` meets it."""
    taken = _TakenOff(None, FunctionType((lambda: None).__code__, {}))
    return _references(taken.twin, None)


def _references(first: Any, _: Any) -> int:
    return sys.getrefcount(first)
