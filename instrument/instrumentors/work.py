"""Find the CUDA devices on which a call works, so that its device time is measured there.

A layer works on the devices of its parameters. Any other call works on the devices of the torch model that it uses. The
model is looked up in the method's object, in the arguments, and under the names in the function's code. Without a
model, the devices of tensor arguments count, and without tensors the current device.

Calls are examined only if torch has several CUDA devices, and only while device time is recorded.
"""

from __future__ import annotations

import sys
import weakref
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain, islice
from types import FunctionType, ModuleType
from typing import Any

from instrument.instrumentors.references import instance_dict, type_namespace
from instrument.recorder.recorder import Recorder
from instrument.recording.memory_layout import STREAM
from instrument.recording.spans import Work
from instrument.runtime.faults import FAULTS

DEPTH = 3
"""The levels of the search for a model: the object, its attributes, and their attributes."""

THINGS = 1000
"""The maximum number of objects per level of the search for a model."""

KEPT = 1024
"""The maximum number of objects whose devices are cached. At the limit the cache is emptied."""

SELDOM = 1024
"""The maximum number of calls between two searches of an object. The number starts at 1, and doubles after a search
without a result."""

ITEMS = 64
"""The maximum number of items to examine per container in a call's arguments."""

_PLAIN = (str, bytes, int, float, type(None), FunctionType, ModuleType)
_CONTAINERS = (list, tuple, dict, UserDict)

_attribute_of: Callable[[tuple[int, ...]], dict[Any, Any]] = lru_cache(maxsize=64)(
    lambda devices: {STREAM: Work("torch", devices)}
)


class ModuleWork:
    """The current CUDA devices of a torch module. Only weak references to its tensors are kept."""

    __slots__ = ("_devices", "_tensors")

    def __init__(self, tensors: Iterable[Any]) -> None:
        self._devices: tuple[int, ...] = ()
        self._tensors: list[weakref.ref[Any]] = []
        self.watch_tensors(tensors)

    def watch_tensors(self, tensors: Iterable[Any]) -> None:
        if self.current_devices() is None:
            by_device = {tensor.device: tensor for tensor in tensors}
            self._tensors = [weakref.ref(tensor) for tensor in by_device.values()]

    def current_devices(self) -> tuple[int, ...] | None:
        tensors = self._tensors
        if len(tensors) == 1:  # the usual case, in a third of the time
            tensor = tensors[0]()
            if tensor is None:
                return None
            self._devices = (tensor.device.index,) if tensor.is_cuda else ()
            return self._devices
        alive = [tensor for follow in tensors if (tensor := follow()) is not None]
        if not alive:
            return None
        self._devices = tuple(sorted({tensor.device.index for tensor in alive if tensor.is_cuda}))
        return self._devices

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices of the module's tensors, or the last known devices if all tensors have been deleted."""
        devices = self.current_devices()
        return self._devices if devices is None else devices

    def __call__(self) -> Work:
        return Work("torch", self.devices)


def list_tensors(module: Any) -> list[Any]:
    """Return a module's parameters. Include the module's buffers if no parameter is on a device."""
    parameters = list(module.parameters())
    return parameters if any(parameter.is_cuda for parameter in parameters) else [*parameters, *module.buffers()]


def find_tensor_nearby(
    module: Any, parent_of: Callable[[Any], Any], children: Callable[[Any], Iterable[Any]]
) -> list[Any]:
    """Return a list with one tensor of a neighbouring module, preferably on a device. Return [] without such a tensor.
    Search the preceding modules first, because they make the module's input."""
    host_tensors: list[Any] = []
    while (parent := parent_of(module)) is not None:
        around = [child for child in children(parent) if child is not None]
        place = next((index for index, child in enumerate(around) if child is module), len(around))
        before = (tensor for child in reversed(around[:place]) for tensor in reversed(list_tensors(child)))
        after = (tensor for child in around[place + 1 :] for tensor in list_tensors(child))
        for tensor in chain(before, after, parent.parameters(recurse=False), parent.buffers(recurse=False)):
            if tensor.is_cuda:
                return [tensor]
            host_tensors = host_tensors or [tensor]
        module = parent
    return host_tensors


class CallWork:
    """A function that finds the devices of a call from its arguments. It never raises."""

    def __init__(self, recorder: Recorder, is_method: bool, function: FunctionType | None = None) -> None:
        self._recorder = recorder
        self._is_method = is_method
        # Not the function itself: a reference to it would be replaced by the probe.
        self._globals = {} if function is None else function.__globals__
        self._names = () if function is None else function.__code__.co_names
        self._cells = () if function is None else function.__closure__ or ()
        self._caches: dict[int, _DeviceCache] = {}
        self._named = _DeviceCache(None)
        self._torch: Any = None

    @classmethod
    def make_for_function(cls, recorder: Recorder, function: Any) -> CallWork:
        if type(function) is not FunctionType:
            return cls(recorder, False)
        in_class = "." in function.__qualname__.rpartition("<locals>.")[2]
        return cls(recorder, in_class and function.__code__.co_argcount > 0, function)

    def __reduce__(self) -> tuple[Any, ...]:
        return CallWork, (self._recorder, self._is_method)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any] | None:
        if self._recorder.begin_device is None:
            return None
        try:
            devices = self._find_call_devices(args, kwargs) if self._has_several_devices() else ()
            return _attribute_of(devices) if devices else None
        except Exception as fault:
            FAULTS.note("device of a call", fault)
            return None

    def _has_several_devices(self) -> bool:
        torch = sys.modules.get("torch")
        if torch is not self._torch:
            parts = (getattr(torch, name, None) for name in ("Tensor", "nn", "cuda"))
            if not all(parts) or not hasattr(torch.nn, "Module") or not torch.cuda.is_initialized():  # type: ignore[union-attr]
                return False
            self._torch = torch
            self._several = torch.cuda.device_count() > 1  # type: ignore[union-attr]
        return torch is not None and self._several

    def _find_call_devices(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
        module_type, tensor_type = self._torch.nn.Module, self._torch.Tensor
        tensors = []
        if self._is_method and args and (devices := self._cached_devices(args[0])):
            return devices
        for thing in (*args, *kwargs.values()):
            kind = type(thing)
            if issubclass(kind, tensor_type):
                tensors.append(thing)
            elif issubclass(kind, module_type):
                if devices := self._cached_devices(thing):
                    return devices
            elif issubclass(kind, _CONTAINERS):
                tensors += [part for part in islice(_list_parts(thing), ITEMS) if issubclass(type(part), tensor_type)]
        if (self._names or self._cells) and (devices := self._named.find_devices(self._find_named_models, None)):
            return devices
        return tuple(sorted({tensor.device.index for tensor in tensors if tensor.is_cuda}))

    def _cached_devices(self, thing: Any) -> tuple[int, ...]:
        entry = self._caches.get(id(thing))
        if entry is None or entry.owner() is not thing:
            entry = _DeviceCache(thing)
            if len(self._caches) >= KEPT:
                self._caches.clear()
            self._caches[id(thing)] = entry
        return entry.find_devices(lambda thing: find_models([thing], self._torch.nn.Module), thing)

    def _find_named_models(self, _: None) -> Sequence[Any]:
        values = [self._globals[name] for name in self._names if name in self._globals]
        for cell in self._cells:
            with suppress(ValueError):  # not set yet
                values.append(cell.cell_contents)
        return find_models(values, self._torch.nn.Module)


class _DeviceCache:
    """The cached devices of an object's models. An object without a model is searched again after some calls."""

    __slots__ = ("_calls", "_pause", "_work", "owner")

    def __init__(self, thing: Any) -> None:
        try:
            self.owner: Callable[[], Any] = weakref.ref(thing)
        except TypeError:
            self.owner = lambda: None
        self._work: ModuleWork | None = None
        self._calls, self._pause = 0, 1

    def find_devices(self, models: Callable[[Any], Sequence[Any]], thing: Any) -> tuple[int, ...]:
        devices = None if self._work is None else self._work.current_devices()
        if devices is not None:
            return devices
        if self._calls:
            self._calls -= 1
            return ()
        tensors = [tensor for model in models(thing) for tensor in list_tensors(model) if tensor.is_cuda]
        if not tensors:
            self._calls, self._pause = self._pause, min(2 * self._pause, SELDOM)
            return ()
        self._work = ModuleWork(tensors)
        return self._work.devices


def find_models(things: Iterable[Any], module_type: type[Any]) -> list[Any]:
    """Search objects and their attributes for torch modules, without running code of the service.

    Search level by level. Return the modules of the first level that has a module on a device.
    """
    visited: set[int] = set()
    level = list(things)
    for _ in range(DEPTH):
        level = [thing for thing in level if not issubclass(type(thing), _PLAIN)]
        modules = [thing for thing in level if issubclass(type(thing), module_type)]
        if any(tensor.is_cuda for model in modules for tensor in list_tensors(model)):
            return modules
        below: list[Any] = []
        for thing in level:
            for part in _list_parts(thing):
                if id(part) not in visited:
                    visited.add(id(part))
                    below.append(part)
            if len(below) > THINGS:
                break
        level = below
    return []


def _list_parts(thing: Any) -> Iterator[Any]:
    kind = type(thing)
    if issubclass(kind, (list, tuple)):
        return iter(thing)
    if issubclass(kind, UserDict):  # as transformers hands on a batch
        thing, kind = thing.data, dict
    if issubclass(kind, dict):
        return iter(list(dict.values(thing)))
    if issubclass(kind, type):
        return iter(list(type_namespace(thing).values()))
    return iter(list((instance_dict(thing) or {}).values()))
