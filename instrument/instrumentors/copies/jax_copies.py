"""JAX: `jax.device_put`, and the property through which every array's values reach the host.

Values that an array has fetched before, and those of the host's own devices that are handed out without a copy, are no
copies. A call that moves several arrays is one span with the sum of their bytes, in the direction of the larger part.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from instrument.instrumentors.copies.transfers import Places, Transfer, Transfers, argument, is_pinned

FRAMEWORK = "jax"
MODULES = ("jax",)
WAYS = ("h2d", "d2h", "d2d", "p2p", "h2h")
UNSEEN = "arguments of the host that a compiled function takes, and what happens inside of one"

HOST_PLATFORMS = frozenset({"cpu"})
"""Platforms whose devices compute in the host's memory."""


def attach(jax: Any, transfers: Transfers) -> Places:
    """Replace `jax.device_put` and the reading of arrays' values."""
    places = Places(transfers, FRAMEWORK)
    array_type, leaves, tracer = jax.Array, jax.tree_util.tree_leaves, jax.core.Tracer
    kept = [cls for cls in _implementations() if isinstance(vars(cls).get("_value"), property)]

    def put(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        ways: Counter[str] = Counter()
        pinned: set[bool | None] = set()
        for source, target in zip(leaves(argument(args, kwargs, 0, "x")), leaves(out), strict=False):
            if target is source or isinstance(target, tracer) or not isinstance(target, array_type):
                continue
            way = _way(source, target, array_type)
            if way is not None:
                ways[way] += target.nbytes
                pinned.add(None if isinstance(source, array_type) else is_pinned(source))
        if not ways:
            return None
        way = ways.most_common(1)[0][0]
        return Transfer(way, sum(ways.values()), False, pinned.pop() if len(pinned) == 1 else None)

    def read(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        array = args[0]
        if array._npy_value is None:  # handed out without a copy
            return None
        return Transfer("h2h" if _is_host(array) else "d2h", array.nbytes, True, False)

    places.functions(jax, ("device_put",), put)
    for cls in kept:
        places.value(cls, "_value", read, lambda array: array._npy_value is None)
    return places


def _implementations() -> list[Any]:
    """The class of concrete arrays, which is only registered below `jax.Array` and no subclass of it."""
    import sys

    found = getattr(sys.modules.get("jax._src.array"), "ArrayImpl", None)
    return [] if found is None else [found]


def _is_host(array: Any) -> bool:
    return all(device.platform in HOST_PLATFORMS for device in array.devices())


def _way(source: Any, target: Any, array_type: Any) -> str | None:
    to_host = _is_host(target)
    if not isinstance(source, array_type):
        return "h2h" if to_host else "h2d"
    if _is_host(source):
        return "h2h" if to_host else "h2d"
    if to_host:
        return "d2h"
    if source.devices() != target.devices():
        return "p2p"
    return None if _address(source) == _address(target) is not None else "d2d"


def _address(array: Any) -> int | None:
    try:
        return int(array.unsafe_buffer_pointer())
    except Exception:  # spread over several devices, or given away
        return None
