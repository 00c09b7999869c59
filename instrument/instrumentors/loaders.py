"""Record the time that code waits for data: each `next` of a loader is a span of kind `loader`.

`loader(iterable)` wraps any iterable, iterator or generator. `loaders: auto` in a profile records every `DataLoader` of
torch without a change in the code.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any, TypeVar, cast

from instrument.errors import TargetError
from instrument.instrumentors.profiled_functions import Switch, replace_attribute
from instrument.instrumentors.verdict import Verdict
from instrument.native import OFF
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.spans import Site
from instrument.runtime.unpatched import Lock

T = TypeVar("T")

_TORCH = "torch.utils.data.dataloader"


def loader(iterable: T, name: str | None = None) -> T:
    """Record the time that each item of an iterable takes: ``for batch in loader(batches, "read"):``.

    `iterable` may be an iterator or a generator, and may be asynchronous. `name` is the name of the spans. The default
    is the name of the generator or class.

    Returns a proxy that behaves like the iterable, with its length, items, attributes and exceptions. Each `next` is a
    span of kind `loader`. The last `next`, which finds no item, is also a span.

    Returns the iterable itself when `INSTRUMENT=off`. Raises `TargetError` for an object that cannot be iterated.
    """
    if OFF:
        return iterable
    kind: Any = type(iterable)
    iterating = "__iter__", "__next__", "__getitem__", "__aiter__", "__anext__"
    if not any(_defines_method(kind, method) for method in iterating):
        raise TargetError(
            f"loader needs an iterable, not {iterable!r:.80} of type {kind.__name__}. Give the object of the for "
            "loop, or use profiled for a function."
        )
    if name is not None and (not isinstance(name, str) or not name):
        raise TargetError(f"loader: the name {name!r} is not a text; give a name of the data")
    title = getattr(iterable, "__name__", None)
    site = RECORDER.find_or_make_scope_site(
        name or (title if isinstance(title, str) and title else kind.__name__), "loader"
    )
    RECORDER.allow_muting(site, shape="wrapper")
    proxy: Any = _make_proxy_class(kind)(iterable, site)
    return cast("T", proxy)


class StandIn:
    """A proxy that behaves like its source. Subclasses add the special methods of the source's class."""

    __slots__ = ("__weakref__", "_instrument_site", "_instrument_source")

    _instrument_site: Site
    _instrument_source: Any

    def __init__(self, source: Any, site: Site) -> None:
        object.__setattr__(self, "_instrument_source", source)
        object.__setattr__(self, "_instrument_site", site)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._instrument_source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._instrument_source, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._instrument_source, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._instrument_source, name)

    def __dir__(self) -> list[str]:
        return dir(self._instrument_source)

    def __repr__(self) -> str:
        return repr(self._instrument_source)

    def __str__(self) -> str:
        return str(self._instrument_source)

    def __eq__(self, other: object) -> bool:
        return bool(self._instrument_source == getattr(other, "_instrument_source", other))

    def __hash__(self) -> int:
        return hash(self._instrument_source)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return loader, (self._instrument_source, self._instrument_site.name)


def _make_next_method(name: str) -> Callable[..., Any]:
    def record_next(self: Any, *args: Any) -> Any:
        method = getattr(self._instrument_source, name)
        if not RECORDER.on:
            return method(*args)
        with _NextItem(RECORDER, self._instrument_site):
            return method(*args)

    return record_next


def _make_async_method(name: str) -> Callable[..., Any]:
    async def record_async_next(self: Any, *args: Any) -> Any:
        method = getattr(self._instrument_source, name)
        if not RECORDER.on:
            return await method(*args)
        with _NextItem(RECORDER, self._instrument_site):
            return await method(*args)

    return record_async_next


class _NextItem:
    """A `with` block around the wait for the next item. It opens a span unless the site is muted."""

    __slots__ = ("_frame", "_recorder", "_site", "_waiting")

    def __init__(self, recorder: Recorder, site: Site) -> None:
        self._recorder, self._site = recorder, site

    def __enter__(self) -> None:
        self._waiting = Waiting() if _listeners else None
        passing = self._recorder.passes.get(self._site)
        if passing is not None:
            passing.count()
        self._frame = self._recorder.open(self._site) if passing is None else None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._frame is not None:
            is_end = kind is not None and issubclass(kind, (StopIteration, StopAsyncIteration))
            self._recorder.close(self._frame, None if is_end else error)
        if self._waiting is not None:
            self._waiting.end_waiting()


# -------------------------------------------------------------------- waits of a loop

Listener = Callable[[int, int, object], object]
"""A function that is called after a wait for data.

Its arguments are the native thread id, the ns of the wait, and the waiting object (None if unknown).
"""

_listeners: tuple[weakref.WeakMethod[Listener], ...] = ()
_listeners_lock = Lock()
_is_waiting: ContextVar[bool] = ContextVar("instrument_is_waiting", default=False)


def listen_to_waits(listener: Listener) -> Callable[[], None]:
    """Call a bound method after each wait for data. Return the function that undoes this.

    The method's object is only weakly referenced.
    """
    global _listeners
    reference = weakref.WeakMethod(listener)
    with _listeners_lock:
        _listeners = (*(other_reference for other_reference in _listeners if other_reference() is not None), reference)

    def stop_listening() -> None:
        global _listeners
        with _listeners_lock:
            _listeners = tuple(other_reference for other_reference in _listeners if other_reference is not reference)

    return stop_listening


class Waiting:
    """A wait for data on the current thread. The listeners are called at the end, but not for a wait inside another
    wait."""

    def __init__(self, of: object = None) -> None:
        self._of = of
        self._token = None if _is_waiting.get() else _is_waiting.set(True)
        self._start_ns = time.monotonic_ns()

    def end_waiting(self) -> None:
        if self._token is not None:
            try:
                _is_waiting.reset(self._token)
            except ValueError:
                return  # in another context, such as the close of an abandoned coroutine
            waited_ns, thread_id = time.monotonic_ns() - self._start_ns, threading.get_native_id()
            for reference in _listeners:
                listener = reference()
                if listener is not None:
                    listener(thread_id, waited_ns, self._of)


_FORWARDED = (
    "__len__", "__length_hint__", "__getitem__", "__setitem__", "__delitem__", "__contains__", "__reversed__",
    "__bool__", "__call__", "__enter__", "__exit__", "__aenter__", "__aexit__",
)  # fmt: skip
"""The special methods that a proxy forwards. Python looks them up only in the class."""


def _make_forwarder(name: str) -> Callable[..., Any]:
    def call_source(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._instrument_source, name)(*args, **kwargs)

    call_source.__name__ = name
    return call_source


def _defines_method(kind: Any, method: str) -> bool:
    return any(vars(base).get(method) is not None for base in kind.__mro__)


@functools.lru_cache(maxsize=256)
def _make_proxy_class(kind: Any) -> type[StandIn]:
    has = functools.partial(_defines_method, kind)
    methods: dict[str, Any] = {name: _make_forwarder(name) for name in _FORWARDED if has(name)}
    for begin, resuming, make, iterate in (
        ("__iter__", ("__next__", "send", "throw"), _make_next_method, iter),
        ("__aiter__", ("__anext__", "asend", "athrow"), _make_async_method, aiter),
    ):
        if has(resuming[0]):
            methods[begin] = lambda self: self
            methods |= {name: make(name) for name in resuming if has(name)}
        elif has(begin) or (begin == "__iter__" and has("__getitem__") and not has("__aiter__")):
            methods[begin] = functools.partialmethod(_make_iterator_proxy, iterate)
    return type(kind.__name__, (StandIn,), {"__slots__": (), **methods})


def _make_iterator_proxy(self: Any, iterate: Callable[[Any], Any]) -> Any:
    iterator = iterate(self._instrument_source)
    kind: Any = type(iterator)
    return _make_proxy_class(kind)(iterator, self._instrument_site)


class Loaders(Switch):
    """The instrumentor of `loaders: auto`, which records torch's `DataLoader`, with a site per class of dataset."""

    key = "loaders"
    module = _TORCH

    def __init__(self, rules: Sequence[str] = ("auto",), recorder: Recorder = RECORDER) -> None:
        super().__init__(rules, recorder)
        self._sites: dict[type[Any], Site] = {}

    def attach_to(self, module: ModuleType) -> None:
        iterator: Any = getattr(module, "_BaseDataLoaderIter", None)
        if iterator is not None and not self._attached:
            self._mark_attached()
            self._undos.append(replace_attribute(iterator, "__next__", self._wrap_next(iterator.__next__)))

    def _wrap_next(self, method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        recorder, sites = self._recorder, self._sites

        @functools.wraps(method)
        def __next__(self: Any) -> Any:  # noqa: N807 - it is one
            if not recorder.on:
                return method(self)
            dataset = type(getattr(self, "_dataset", None))
            with _NextItem(recorder, sites.get(dataset) or make_site(dataset)):
                return method(self)

        def make_site(dataset: type[Any]) -> Site:
            new = Site("DataLoader", "loader", _TORCH, "_BaseDataLoaderIter.__next__", instance=dataset.__name__)
            # Two threads may be first: setdefault keeps one site per class, or the tally would split.
            site = sites.setdefault(dataset, new)
            recorder.allow_muting(site, shape="wrapper")
            return site

        return __next__

    def verdicts(self) -> list[Verdict]:
        if not self._met:
            return [Verdict("loaders", "waiting", why="torch.utils.data not imported")]
        if not self._sites:
            return [Verdict("loaders", "waiting", why="no DataLoader has run")]
        return [Verdict("loaders", "attached", ", ".join(sorted(site.instance for site in self._sites.values())))]
