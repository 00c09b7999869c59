"""Work: the CUDA devices on which a layer or a call works, by the model that it runs or the tensors that it gets.

The current device says nothing: a model may be on another one, or on several. A layer works on the devices of its
parameters, and a method on those of its object, or of a model that the object has. A function works on those of a model
among its arguments or in its code. Without a model the tensors of the arguments count. All else works on the current
device.

A call is asked only while spans are timed on a device and torch uses one of several. Parameters are looked up once for
each object and kept while they live; where nothing is found they are looked up again, ever more seldom.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from types import FunctionType, ModuleType
from typing import Any

from instrument.instrumentors.references import own_names, type_namespace
from instrument.recorder.recorder import Recorder
from instrument.recording.rows import STREAM
from instrument.recording.spans import Work
from instrument.runtime.faults import FAULTS

DEPTH = 3
"""The depth below an object at which its model may be: itself, its attributes, or their attributes."""

THINGS = 1000
"""The most objects of one depth that are looked at."""

KEPT = 1024
"""The most objects that are known at a time."""

SELDOM = 1024
"""The most calls until a model that was not found is looked for again."""

HELD = 64
"""The most items of a container among the arguments that are looked at."""

_PLAIN = (str, bytes, int, float, type(None), FunctionType, ModuleType)
_CONTAINERS = (list, tuple, dict, UserDict)


class ModuleWork:
    """The CUDA devices of some tensors: those of a module, which may move or be on several.

    One tensor represents all on its device. Where none of them lives any more, the last devices count.
    """

    __slots__ = ("_devices", "_tensors")

    def __init__(self, tensors: Iterable[Any]) -> None:
        self._devices: tuple[int, ...] = ()
        self._tensors: list[weakref.ref[Any]] = []
        self.follow(tensors)

    def follow(self, tensors: Iterable[Any]) -> None:
        """Use other tensors from now on, unless those before are still there."""
        if self.now() is None:
            by_device = {tensor.device: tensor for tensor in tensors}
            self._tensors = [weakref.ref(tensor) for tensor in by_device.values()]

    def now(self) -> tuple[int, ...] | None:
        """Return the devices, None where no tensor is left."""
        tensors = self._tensors
        if len(tensors) == 1:  # as nearly always: a third of the time
            tensor = tensors[0]()
            if tensor is None:
                return None
            self._devices = (tensor.device.index,) if tensor.is_cuda else ()
            return self._devices
        there = [tensor for follow in tensors if (tensor := follow()) is not None]
        if not there:
            return None
        self._devices = tuple(sorted({tensor.device.index for tensor in there if tensor.is_cuda}))
        return self._devices

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices, the last ones where no tensor is left."""
        found = self.now()
        return self._devices if found is None else found

    def __call__(self) -> Work:
        return Work("torch", self.devices)


def tensors_of(module: Any) -> list[Any]:
    """Return the parameters of a module, and its buffers where no parameter is on a device."""
    parameters = list(module.parameters())
    return parameters if any(one.is_cuda for one in parameters) else [*parameters, *module.buffers()]


def tensors_near(module: Any, parent_of: Callable[[Any], Any], children: Callable[[Any], Iterable[Any]]) -> list[Any]:
    """Return a tensor with which a module that has none of its own works, by its neighbours; empty without one.

    The module before it hands it its input: the last tensor of the nearest neighbour before it, else the first one of
    those after it, else of the parent itself; else the same for the parent. One on a device comes before others.
    """
    others: list[Any] = []
    while (parent := parent_of(module)) is not None:
        around = [child for child in children(parent) if child is not None]
        place = next((index for index, child in enumerate(around) if child is module), len(around))
        for tensors in chain(
            (reversed(tensors_of(child)) for child in reversed(around[:place])),
            (tensors_of(child) for child in around[place + 1 :]),
            [[*parent.parameters(recurse=False), *parent.buffers(recurse=False)]],
        ):
            for tensor in tensors:
                if tensor.is_cuda:
                    return [tensor]
                others = others or [tensor]
        module = parent
    return others


class CallWork:
    """A reader of the devices of a call by its arguments, as an attribute that no reader sees; never raises.

    A copy of it goes with a function that is pickled by value, and goes by the arguments alone.
    """

    def __init__(self, recorder: Recorder, is_method: bool, function: FunctionType | None = None) -> None:
        self._recorder = recorder
        self._is_method = is_method
        # Not the function itself, or this would be a reference that is replaced by the one that records.
        self._globals = {} if function is None else function.__globals__
        self._names = () if function is None else function.__code__.co_names
        self._cells = () if function is None else function.__closure__ or ()
        self._kept: dict[int, _Found] = {}
        self._named = _Found(None)
        self._torch: Any = None

    @classmethod
    def of(cls, recorder: Recorder, function: Any) -> CallWork:
        """Make a reader for calls of a function."""
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
            if not self._has_several_devices():
                return None
            devices = self._devices(args, kwargs)
            return _attribute_of(devices) if devices else None
        except Exception as fault:
            FAULTS.note("device of a call", fault)
            return None

    def _has_several_devices(self) -> bool:
        """Return True where torch uses a device and has others: with one alone there is nothing to tell apart."""
        torch = sys.modules.get("torch")
        if torch is not self._torch:
            parts = (getattr(torch, name, None) for name in ("Tensor", "nn", "cuda"))
            if not all(parts) or not hasattr(torch.nn, "Module") or not torch.cuda.is_initialized():  # type: ignore[union-attr]
                return False
            self._torch = torch
            self._several = torch.cuda.device_count() > 1  # type: ignore[union-attr]
        return torch is not None and self._several

    def _devices(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the CUDA devices of a model, else of the tensors of a call."""
        module_type, tensor_type = self._torch.nn.Module, self._torch.Tensor
        tensors = []
        if self._is_method and args and (devices := self._devices_of(args[0])):
            return devices
        for thing in (*args, *kwargs.values()):
            kind = type(thing)
            if issubclass(kind, tensor_type):
                tensors.append(thing)
            elif issubclass(kind, module_type):
                if devices := self._devices_of(thing):
                    return devices
            elif issubclass(kind, _CONTAINERS):
                tensors += [part for part in islice(_parts(thing), HELD) if issubclass(type(part), tensor_type)]
        if (self._names or self._cells) and (devices := self._named.devices(self._models_named, None)):
            return devices
        return tuple(sorted({tensor.device.index for tensor in tensors if tensor.is_cuda}))

    def _devices_of(self, thing: Any) -> tuple[int, ...]:
        found = self._kept.get(id(thing))
        if found is None or found.owner() is not thing:
            found = _Found(thing)
            if len(self._kept) >= KEPT:
                self._kept.clear()
            self._kept[id(thing)] = found
        return found.devices(lambda thing: models_in([thing], self._torch.nn.Module), thing)

    def _models_named(self, _: None) -> Sequence[Any]:
        """Return the models that the function's code names: in its closure, and globals of its module."""
        held = [self._globals[name] for name in self._names if name in self._globals]
        for cell in self._cells:
            try:
                held.append(cell.cell_contents)
            except ValueError:  # not set yet
                continue
        return models_in(held, self._torch.nn.Module)


class _Found:
    """The models that were found of an object, and the call at which they are looked for again."""

    __slots__ = ("_calls", "_pause", "_work", "owner")

    def __init__(self, thing: Any) -> None:
        try:
            self.owner: Callable[[], Any] = weakref.ref(thing)
        except TypeError:
            self.owner = lambda: None
        self._work: ModuleWork | None = None
        self._calls, self._pause = 0, 1

    def devices(self, models: Callable[[Any], Sequence[Any]], thing: Any) -> tuple[int, ...]:
        """Return the devices of its models, by those that `models` finds in it."""
        there = None if self._work is None else self._work.now()
        if there is not None:
            return there
        if self._calls:
            self._calls -= 1
            return ()
        found = [tensor for model in models(thing) for tensor in tensors_of(model) if tensor.is_cuda]
        if not found:
            self._calls, self._pause = self._pause, min(2 * self._pause, SELDOM)
            return ()
        self._work = ModuleWork(found)
        return self._work.devices


def models_in(things: Iterable[Any], module_type: type[Any]) -> list[Any]:
    """Return the modules nearest below some things that have a tensor on a device. Runs no code of the host."""
    seen: set[int] = set()
    level = list(things)
    for _ in range(DEPTH):
        level = [thing for thing in level if not issubclass(type(thing), _PLAIN)]
        found = [thing for thing in level if issubclass(type(thing), module_type)]
        if any(tensor.is_cuda for model in found for tensor in tensors_of(model)):
            return found
        below: list[Any] = []
        for thing in level:
            for part in _parts(thing):
                if id(part) not in seen:
                    seen.add(id(part))
                    below.append(part)
            if len(below) > THINGS:
                break
        level = below
    return []


def _parts(thing: Any) -> Iterator[Any]:
    """Return the items of a container, or the attributes of an object."""
    kind = type(thing)
    if issubclass(kind, (list, tuple)):
        return iter(thing)
    if issubclass(kind, UserDict):  # as transformers hands on a batch
        thing, kind = thing.data, dict
    if issubclass(kind, dict):
        return iter(list(dict.values(thing)))
    if issubclass(kind, type):
        return iter(list(type_namespace(thing).values()))
    return iter(list((own_names(thing) or {}).values()))


@functools.lru_cache(maxsize=64)
def _attribute_of(devices: tuple[int, ...]) -> dict[Any, Any]:
    return {STREAM: Work("torch", devices)}
