"""cupy: its arrays' `get` and `set`, what makes arrays of the host's data, and the copies of its CUDA runtime."""

from __future__ import annotations

from typing import Any

from instrument.instrumentors.copies.transfers import Facts, Places, Stream, Transfer, Transfers, argument, is_pinned

FRAMEWORK = "cupy"
MODULES = ("cupy",)
WAYS = ("h2d", "d2h", "d2d", "p2p", "h2h")
UNSEEN = "assignments to slices, copy() and astype(), memory pointers' own copies, and what cupy's C code copies"

MAKING = ("array", "asarray", "asanyarray", "ascontiguousarray", "asfortranarray")
READING = ("item", "tolist", "__bool__", "__int__", "__float__", "__complex__", "__index__")
_KINDS = {0: "h2h", 1: "h2d", 2: "d2h", 3: "d2d"}


def attach(cupy: Any, transfers: Transfers) -> Places:
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

    places = Places(transfers, FRAMEWORK, stream=lambda args, kwargs: None)
    places.methods(array_type, ("get",), got, lambda args, kwargs: argument(args, kwargs, 1, "stream"))
    places.methods(array_type, ("set",), put, lambda args, kwargs: argument(args, kwargs, 2, "stream"))
    places.methods(array_type, READING, read)
    places.functions(cupy, MAKING, made)
    places.functions(cupy, ("copyto",), copied)
    runtime = cupy.cuda.runtime
    for name, facts in (("memcpy", _by_kind), ("memcpyPeer", _peer)):
        last = 4 if name == "memcpy" else 5
        places.functions(runtime, (name,), facts(True), lambda args, kwargs: 0)
        places.functions(runtime, (f"{name}Async",), facts(False), _argument(last, "stream"))
    return places


def _argument(index: int, name: str) -> Stream:
    return lambda args, kwargs: argument(args, kwargs, index, name)


def _on_device(source: Any, target: Any) -> Transfer:
    return Transfer("d2d" if source.device.id == target.device.id else "p2p", target.nbytes, False)


def _is_of_the_host(source: Any, array_type: Any) -> bool:
    """Whether the data came from the host: a list of device arrays, or another framework's array, did not."""
    while isinstance(source, (list, tuple)) and source:
        source = source[0]
    return not isinstance(source, array_type) and not hasattr(source, "__cuda_array_interface__")


def _by_kind(sync: bool) -> Facts:
    def facts(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        # memcpy(dst, src, size, kind) and memcpyAsync(dst, src, size, kind, stream)
        way = _KINDS.get(int(argument(args, kwargs, 3, "kind")))
        return None if way is None else Transfer(way, int(argument(args, kwargs, 2, "size")), sync)

    return facts


def _peer(sync: bool) -> Facts:
    def facts(out: Any, args: Any, kwargs: Any) -> Transfer:
        # memcpyPeer(dst, dstDevice, src, srcDevice, size)
        same = int(argument(args, kwargs, 1, "dstDevice")) == int(argument(args, kwargs, 3, "srcDevice"))
        return Transfer("d2d" if same else "p2p", int(argument(args, kwargs, 4, "size")), sync)

    return facts
