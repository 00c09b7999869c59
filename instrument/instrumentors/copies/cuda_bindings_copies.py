"""cuda-python: the copy functions of `cuda.bindings.driver` and `cuda.bindings.runtime`, by name.

The name, or the kind that is passed, says the direction. Where only the driver could tell it (unified addresses,
batches), the call is no span: asking the driver would cost as much as a small copy.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from instrument.instrumentors.copies.transfers import Facts, Places, Stream, Transfer, Transfers, argument

FRAMEWORK = "cuda"
MODULES = ("cuda.bindings.driver", "cuda.bindings.runtime")
WAYS = ("h2d", "d2h", "d2d", "p2p", "h2h")
UNSEEN = (
    "calls whose direction only the driver knows (cuMemcpy, cudaMemcpyDefault, batches), "
    "3D copies of the runtime, and cuda.core, which calls the driver in C"
)

_TYPED = re.compile(r"cuMemcpy([HDA])to([HDA])(Async)?")
_SIDES = {"H": "h", "D": "d", "A": "d"}  # an array is a texture's memory on the device
_KINDS = {0: "h2h", 1: "h2d", 2: "d2h", 3: "d2d"}
_MEMORY_TYPES = {1: "h", 2: "d", 3: "d"}  # CUmemorytype: host, device, array; unified is none of them


def attach(module: Any, transfers: Transfers) -> Places:
    """Replace the copy functions of the driver's or the runtime's module."""
    places = Places(transfers, FRAMEWORK)
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
