"""Copies of numpy, JAX and onnxruntime, whose arrays may be on a device or on the host.

Of numpy a rule has to ask for them. `numpy.copyto` alone records, with which services stage their batches: numba and
torch.compile know `numpy.copy` by its identity, and methods of arrays are made in C.

Of JAX `jax.device_put` records, and the property through which every array's values reach the host. Values that an
array has fetched before, and those of the host's own devices that are handed out without a copy, are no copies. A call
that moves several arrays is one span with the sum of their bytes, in the direction of the larger part.

Of onnxruntime the methods of values and bindings record that take numpy arrays in or hand them out. Copies within
`InferenceSession.run` are its own; bindings make those copies visible.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from instrument.instrumentors.copies.transfers import Places, Room, Transfer, Transfers, argument, is_pinned


def _attach_numpy(numpy: Any, transfers: Transfers) -> Places:
    """Replace `numpy.copyto`."""

    def facts(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        target, source = argument(args, kwargs, 0, "dst"), argument(args, kwargs, 1, "src")
        # One value for all places is a fill and no copy.
        if source is target or getattr(source, "size", 1) <= 1 < target.size:
            return None
        return Transfer("h2h", target.nbytes, True, is_pinned(target))

    places = Places(transfers, "numpy")
    places.functions(numpy, ("copyto",), facts)
    return places


HOST_PLATFORMS = frozenset({"cpu"})
"""Platforms whose devices compute in the host's memory."""


def _attach_jax(jax: Any, transfers: Transfers) -> Places:
    """Replace `jax.device_put` and the reading of arrays' values."""
    places = Places(transfers, "jax")
    array_type, leaves, tracer = jax.Array, jax.tree_util.tree_leaves, jax.core.Tracer
    kept = [cls for cls in _implementations() if isinstance(vars(cls).get("_value"), property)]

    def put(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        ways: Counter[str] = Counter()
        pinned: set[bool | None] = set()
        for source, target in zip(leaves(argument(args, kwargs, 0, "x")), leaves(out), strict=False):
            if target is source or isinstance(target, tracer) or not isinstance(target, array_type):
                continue
            way = _way_of_jax(source, target, array_type)
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
    found = getattr(sys.modules.get("jax._src.array"), "ArrayImpl", None)
    return [] if found is None else [found]


def _is_host(array: Any) -> bool:
    return all(device.platform in HOST_PLATFORMS for device in array.devices())


def _way_of_jax(source: Any, target: Any, array_type: Any) -> str | None:
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


_HOST = ("cpu", 0)


def _attach_onnxruntime(module: Any, transfers: Transfers) -> Places:
    """Replace the methods of `OrtValue` and `IOBinding` that copy, and `copy_tensors`."""
    value_type = module.OrtValue

    def made(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        # On the host the value lies on the array's own memory.
        where = _where(out)
        return None if where == _HOST else Transfer("h2d", out.tensor_size_in_bytes(), True, is_pinned(args[1]))

    def read(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        value = args[0]
        if _where(value) != _HOST:
            return Transfer("d2h", out.nbytes, True, False)
        return None if out.ctypes.data == value.data_ptr() else Transfer("h2h", out.nbytes, True, False)

    def updated(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        target, source = args[0], argument(args, kwargs, 1, "data", kwargs.get("np_arr"))
        from_value = isinstance(source, value_type)
        moved_bytes = source.tensor_size_in_bytes() if from_value else source.nbytes
        way = _way_of_values(_where(source) if from_value else _HOST, _where(target))
        return Transfer(way, moved_bytes, True, None if from_value else is_pinned(source))

    def bound(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        binding, name = args[0], argument(args, kwargs, 1, "name")
        array = argument(args, kwargs, 2, "arr_on_cpu")
        # On the host the input lies on the array's own memory.
        return None if _input_is_on_host(binding, name) else Transfer("h2d", array.nbytes, True, is_pinned(array))

    def fetched(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        there = [_where(value) != _HOST for value in args[0].get_outputs()]
        arrays = [getattr(array, "nbytes", 0) for array in out]
        moved_bytes = sum(nbytes for nbytes, is_there in zip(arrays, there, strict=False) if is_there)
        if moved_bytes:
            return Transfer("d2h", moved_bytes, True, False)
        return Transfer("h2h", sum(arrays), True, False)

    def sent(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        sources, targets = argument(args, kwargs, 0, "src"), argument(args, kwargs, 1, "dst")
        if not sources:
            return None
        moved_bytes = sum(value.tensor_size_in_bytes() for value in sources)
        sync = argument(args, kwargs, 2, "stream") is None
        return Transfer(_way_of_values(_where(sources[0]), _where(targets[0])), moved_bytes, sync)

    places = Places(transfers, "onnxruntime")
    places.factory(value_type, "ortvalue_from_numpy", made)
    places.methods(value_type, ("numpy",), read)
    places.methods(value_type, ("update_inplace",), updated)
    places.methods(module.IOBinding, ("bind_cpu_input",), bound)
    places.methods(module.IOBinding, ("copy_outputs_to_cpu",), fetched)
    places.functions(module, ("copy_tensors",), sent)
    return places


def _where(value: Any) -> tuple[str, int]:
    """The device of a value's memory: name and number."""
    name = value.device_name()
    if name == "cpu":
        return _HOST
    try:
        return name, int(value.__dlpack_device__()[1])
    except Exception:  # too old, or memory that no other framework may see
        return name, 0


def _way_of_values(source: tuple[str, int], target: tuple[str, int]) -> str:
    if source != _HOST != target:
        return "d2d" if source == target else "p2p"
    return f"{'h' if source == _HOST else 'd'}2{'h' if target == _HOST else 'd'}"


def _input_is_on_host(binding: Any, name: str) -> bool:
    """Return True where the session reads an input where the host put it."""
    session = binding._session
    if session.get_providers() == ["CPUExecutionProvider"]:
        return True
    try:
        names = [node.name for node in session.inputs_meta]
        return str(session.input_meminfos[names.index(name)].name).lower() == "cpu"
    except Exception:  # too old to tell; a session with another provider takes its inputs there, as a rule
        return False


NUMPY = Room(
    framework="numpy",
    modules=("numpy",),
    ways=("h2h",),
    unseen="numpy.copy, which compilers know by identity, methods of arrays and assignments to slices",
    attach=_attach_numpy,
)

JAX = Room(
    framework="jax",
    modules=("jax",),
    ways=("h2d", "d2h", "d2d", "p2p", "h2h"),
    unseen="arguments of the host that a compiled function takes, and what happens inside of one",
    attach=_attach_jax,
)

ONNXRUNTIME = Room(
    framework="onnxruntime",
    modules=("onnxruntime.capi.onnxruntime_inference_collection",),
    ways=("h2d", "d2h", "d2d", "p2p", "h2h"),
    unseen="what InferenceSession.run copies by itself; use an IOBinding to see it",
    attach=_attach_onnxruntime,
)
