"""Copies through CUDA by cupy, numba.cuda and cuda-python.

Of cupy its arrays' `get` and `set` record, the functions that make arrays of the host's data, and the copies of its
CUDA runtime. Of numba.cuda the three functions of its driver record through which every copy of a device array goes;
the simulator (NUMBA_ENABLE_CUDASIM=1) has no driver, and there the methods of its arrays do.

Of cuda-python the copy functions of `cuda.bindings.driver` and `cuda.bindings.runtime` record, by name. The name, or
the kind that is passed, says the direction. Where only the driver knows it (unified addresses, batches), the call is no
span: asking the driver would cost as much as a small copy.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from instrument.instrumentors.copies.transfers import (
    Facts,
    Places,
    Room,
    Stream,
    Transfer,
    Transfers,
    argument,
    is_pinned,
)

MAKING = ("array", "asarray", "asanyarray", "ascontiguousarray", "asfortranarray")
READING = ("item", "tolist", "__bool__", "__int__", "__float__", "__complex__", "__index__")
_KINDS = {0: "h2h", 1: "h2d", 2: "d2h", 3: "d2d"}


def _attach_cupy(cupy: Any, transfers: Transfers) -> Places:
    """Replace what copies between host and device. `cupy.asnumpy` calls `get`."""
    array_type = cupy.ndarray

    def got(out: Any, args: Any, kwargs: Any) -> Transfer:
        # get(stream=None, order="C", out=None, blocking=True)
        return Transfer("d2h", args[0].nbytes, bool(argument(args, kwargs, 4, "blocking", True)), is_pinned(out))

    def put(out: Any, args: Any, kwargs: Any) -> Transfer:
        # set(arr, stream=None) uses the current stream where none is given.
        return Transfer("h2d", args[0].nbytes, False, is_pinned(argument(args, kwargs, 1, "arr")))

    def read(out: Any, args: Any, kwargs: Any) -> Transfer:
        return Transfer("d2h", args[0].nbytes, True)

    def made(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        source = argument(args, kwargs, 0, "obj", kwargs.get("a"))
        if isinstance(source, array_type):
            return None if out.data.ptr == source.data.ptr else _on_device(source, out)
        if not isinstance(out, array_type) or not _is_of_the_host(source, array_type):
            return None
        return Transfer("h2d", out.nbytes, bool(kwargs.get("blocking", False)), is_pinned(source))

    def copied(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        target, source = argument(args, kwargs, 0, "dst"), argument(args, kwargs, 1, "src")
        # Of the host it takes single values only, which fill.
        return _on_device(source, target) if isinstance(source, array_type) and source is not target else None

    places = Places(transfers, "cupy", stream=lambda args, kwargs: None)
    places.methods(array_type, ("get",), got, lambda args, kwargs: argument(args, kwargs, 1, "stream"))
    places.methods(array_type, ("set",), put, lambda args, kwargs: argument(args, kwargs, 2, "stream"))
    places.methods(array_type, READING, read)
    places.functions(cupy, MAKING, made)
    places.functions(cupy, ("copyto",), copied)
    runtime = cupy.cuda.runtime
    for name, facts in (("memcpy", _memcpy_by_kind), ("memcpyPeer", _memcpy_peer)):
        last = 4 if name == "memcpy" else 5
        places.functions(runtime, (name,), facts(True), lambda args, kwargs: 0)
        places.functions(runtime, (f"{name}Async",), facts(False), _argument(last, "stream"))
    return places


def _argument(index: int, name: str) -> Stream:
    return lambda args, kwargs: argument(args, kwargs, index, name)


def _on_device(source: Any, target: Any) -> Transfer:
    return Transfer("d2d" if source.device.id == target.device.id else "p2p", target.nbytes, False)


def _is_of_the_host(source: Any, array_type: Any) -> bool:
    """Return True where the data came from the host: a list of device arrays, or another framework's array, did not."""
    while isinstance(source, (list, tuple)) and source:
        source = source[0]
    return not isinstance(source, array_type) and not hasattr(source, "__cuda_array_interface__")


def _memcpy_by_kind(sync: bool) -> Facts:
    def facts(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        # memcpy(dst, src, size, kind) and memcpyAsync(dst, src, size, kind, stream)
        way = _KINDS.get(int(argument(args, kwargs, 3, "kind")))
        return None if way is None else Transfer(way, int(argument(args, kwargs, 2, "size")), sync)

    return facts


def _memcpy_peer(sync: bool) -> Facts:
    def facts(out: Any, args: Any, kwargs: Any) -> Transfer:
        # memcpyPeer(dst, dstDevice, src, srcDevice, size)
        same = int(argument(args, kwargs, 1, "dstDevice")) == int(argument(args, kwargs, 3, "srcDevice"))
        return Transfer("d2d" if same else "p2p", int(argument(args, kwargs, 4, "size")), sync)

    return facts


def _attach_numba(module: Any, transfers: Transfers) -> Places:
    """Replace what copies, in the driver or in the simulator."""
    if module.__name__ == "numba.cuda.simulator":
        places = Places(transfers, "numba")
        _attach_simulator(module, places)
        return places
    places = Places(transfers, "numba", stream=lambda args, kwargs: _arguments(args, kwargs)[3])

    def to_device(out: Any, args: Any, kwargs: Any) -> Transfer:
        _, source, size, stream = _arguments(args, kwargs)
        return Transfer("h2d", size, not stream, is_pinned(source))

    def to_host(out: Any, args: Any, kwargs: Any) -> Transfer:
        target, _, size, stream = _arguments(args, kwargs)
        return Transfer("d2h", size, not stream, is_pinned(target))

    def on_device(out: Any, args: Any, kwargs: Any) -> Transfer:
        target, source, size, stream = _arguments(args, kwargs)
        return Transfer("d2d" if _device(source) == _device(target) else "p2p", size, not stream)

    places.functions(module, ("host_to_device",), to_device)
    places.functions(module, ("device_to_host",), to_host)
    places.functions(module, ("device_to_device",), on_device)
    return places


def _arguments(args: Any, kwargs: Any) -> tuple[Any, Any, int, Any]:
    target, source = argument(args, kwargs, 0, "dst"), argument(args, kwargs, 1, "src")
    return target, source, int(argument(args, kwargs, 2, "size")), argument(args, kwargs, 3, "stream", 0)


def _device(array: Any) -> Any:
    """The number of the device whose memory it is, None where it does not tell."""
    context = getattr(getattr(array, "gpu_data", None), "context", None)
    return getattr(getattr(context, "device", None), "id", None)


def _attach_simulator(simulator: Any, places: Places) -> None:
    arrays = simulator.cudadrv.devicearray
    fake = arrays.FakeCUDAArray

    def filled(out: Any, args: Any, kwargs: Any) -> Transfer:
        source, stream = argument(args, kwargs, 1, "ary"), argument(args, kwargs, 2, "stream", 0)
        return Transfer("d2d" if isinstance(source, fake) else "h2d", args[0].nbytes, not stream)

    def read(out: Any, args: Any, kwargs: Any) -> Transfer:
        return Transfer("d2h", args[0].nbytes, not argument(args, kwargs, 2, "stream", 0), is_pinned(out))

    def moved(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        target = out if out is not None else argument(args, kwargs, 3, "to")
        source, stream = argument(args, kwargs, 0, "ary"), argument(args, kwargs, 1, "stream", 0)
        return Transfer("h2d", target.nbytes, not stream, is_pinned(source))

    places.methods(fake, ("copy_to_device",), filled)
    places.methods(fake, ("copy_to_host",), read)
    places.functions(arrays, ("to_device",), moved)


_TYPED = re.compile(r"cuMemcpy([HDA])to([HDA])(Async)?")
_SIDES = {"H": "h", "D": "d", "A": "d"}  # an array is a texture's memory on the device
_MEMORY_TYPES = {1: "h", 2: "d", 3: "d"}  # CUmemorytype: host, device, array; unified is none of them


def _attach_bindings(module: Any, transfers: Transfers) -> Places:
    """Replace the copy functions of the driver's or the runtime's module."""
    places = Places(transfers, "cuda")
    for name in sorted(vars(module)):
        function = getattr(module, name)
        if "emcpy" not in name or isinstance(function, type) or not callable(function):
            continue
        facts = _facts(name, function)
        if facts is not None:
            places.functions(module, (name,), _if_done(facts), _stream(function))
    return places


def _facts(name: str, function: Any) -> Facts | None:
    typed = _TYPED.fullmatch(name)
    if typed:
        way = f"{_SIDES[typed[1]]}2{_SIDES[typed[2]]}"
        amount, sync = _named(function, "ByteCount"), typed[3] is None
        return lambda out, args, kwargs: Transfer(way, int(amount(args, kwargs)), sync)
    sync = not name.endswith("Async")
    base = name.removesuffix("Async")
    if base in ("cuMemcpyPeer", "cudaMemcpyPeer"):
        return _peer(function, sync, "Context" if base.startswith("cuM") else "Device")
    if base == "cudaMemcpy":
        return _by_kind(function, ("count",), sync)
    if base in ("cudaMemcpy2D", "cudaMemcpy2DToArray", "cudaMemcpy2DFromArray"):
        return _by_kind(function, ("width", "height"), sync)
    if base in ("cuMemcpy2D", "cuMemcpy2DUnaligned", "cuMemcpy3D"):
        return _described(sync)
    return None


def _peer(function: Any, sync: bool, place: str) -> Facts:
    amount = _named(function, "ByteCount", "count")
    source, target = _named(function, f"src{place}"), _named(function, f"dst{place}")

    def facts(out: Any, args: Any, kwargs: Any) -> Transfer:
        same = int(source(args, kwargs)) == int(target(args, kwargs))
        return Transfer("d2d" if same else "p2p", int(amount(args, kwargs)), sync)

    return facts


def _by_kind(function: Any, factors: tuple[str, ...], sync: bool) -> Facts:
    kind, sizes = _named(function, "kind"), [_named(function, factor) for factor in factors]

    def facts(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        way = _KINDS.get(int(kind(args, kwargs)))
        if way is None:
            return None
        moved_bytes = 1
        for size in sizes:
            moved_bytes *= int(size(args, kwargs))
        return Transfer(way, moved_bytes, sync)

    return facts


def _described(sync: bool) -> Facts:
    def facts(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        copy = argument(args, kwargs, 0, "pCopy")
        source = _MEMORY_TYPES.get(int(copy.srcMemoryType))
        target = _MEMORY_TYPES.get(int(copy.dstMemoryType))
        if source is None or target is None:
            return None
        return Transfer(f"{source}2{target}", copy.WidthInBytes * copy.Height * getattr(copy, "Depth", 1), sync)

    return facts


def _named(function: Any, *names: str) -> Callable[[Any, Any], Any]:
    """Reads the argument of one of the names, wherever the function has it."""
    parameters = list(inspect.signature(function).parameters)
    name = next(name for name in names if name in parameters)
    index = parameters.index(name)
    return lambda args, kwargs: argument(args, kwargs, index, name)


def _stream(function: Any) -> Stream:
    """The stream is an argument of what is asynchronous; the rest uses the default one."""
    parameters = list(inspect.signature(function).parameters)
    name = next((name for name in ("hStream", "stream") if name in parameters), None)
    if name is None:
        return lambda args, kwargs: 0
    index = parameters.index(name)

    def stream(args: Any, kwargs: Any) -> Any:
        found = argument(args, kwargs, index, name)
        return 0 if found is None else int(found)

    return stream


def _if_done(facts: Facts) -> Facts:
    """A call that returned an error has moved nothing."""
    return lambda out, args, kwargs: facts(out, args, kwargs) if int(out[0]) == 0 else None


CUPY = Room(
    framework="cupy",
    modules=("cupy",),
    ways=("h2d", "d2h", "d2d", "p2p", "h2h"),
    unseen="assignments to slices, copy() and astype(), memory pointers' own copies, and what cupy's C code copies",
    attach=_attach_cupy,
)

NUMBA = Room(
    framework="numba",
    modules=("numba.cuda.cudadrv.driver", "numba.cuda.simulator"),
    ways=("h2d", "d2h", "d2d", "p2p"),
    unseen="arrays in mapped or managed memory, which the device reads in place",
    attach=_attach_numba,
)

CUDA = Room(
    framework="cuda",
    modules=("cuda.bindings.driver", "cuda.bindings.runtime"),
    ways=("h2d", "d2h", "d2d", "p2p", "h2h"),
    unseen=(
        "calls whose direction only the driver knows (cuMemcpy, cudaMemcpyDefault, batches), "
        "3D copies of the runtime, and cuda.core, which calls the driver in C"
    ),
    attach=_attach_bindings,
)
