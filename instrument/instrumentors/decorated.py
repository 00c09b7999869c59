"""Functions that `@profiled` has decorated, taken off their names for a while and put on again.

The names of the service are for the wrapper. While it is off they are for a twin of the bare function, which no other
name can be for, so that the way back finds all of them and no other. The twin has the wrapper's attributes: what is set
on one is set on the other.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

from instrument.instrumentors.namespaces import own_names, type_namespace
from instrument.instrumentors.references import rebind
from instrument.instrumentors.targets import parts_of
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


def detach(site: Site) -> Callable[[], object] | None:
    """Take the wrapper of a site off its names for a while; returns the way back.

    None where it has no name that can be changed, or where a function is not made in Python. Other references to it go
    on calling the wrapper.
    """
    wrapper = _decorated.get(site)
    bare = None if wrapper is None else bare_of(wrapper)
    if type(bare) is not FunctionType:
        return None
    twin = _twin(bare, wrapper)
    return partial(_rename, twin, wrapper) if _rename(wrapper, twin) else None


def _rename(first: Any, second: Any) -> bool:
    """Give all names of the first in modules, and its own in a class, to the second. Return True where it had one."""
    owner: Any = sys.modules.get(first.__module__)
    *path, last = first.__qualname__.split(".")
    for name in path:
        owner = (type_namespace(owner) if isinstance(owner, type) else own_names(owner) or {}).get(name)
    names = type_namespace(owner) if isinstance(owner, type) else own_names(owner) or {}
    part = next((part for part in parts_of(names.get(last)) if part.function is first), None)
    if part is not None and (made := part.put(second)) is not names[last]:
        setattr(owner, last, made)
    return rebind([(first, second)]) or part is not None


def _twin(bare: FunctionType, wrapper: Any) -> FunctionType:
    twin = FunctionType(bare.__code__, bare.__globals__, bare.__name__, bare.__defaults__, bare.__closure__)
    twin.__kwdefaults__ = bare.__kwdefaults__
    functools.update_wrapper(twin, bare)
    twin.__dict__ = vars(wrapper)
    return twin
