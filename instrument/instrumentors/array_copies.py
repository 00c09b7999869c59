"""Record the copies of arrays by numpy, JAX, onnxruntime, cupy, numba.cuda and cuda-python. The recorded calls are:

- numpy: `numpy.copyto`, with which services fill batches.
- JAX: `jax.device_put`, and the first read of a device array's values on the host. A call that moves several arrays is
  one span.
- onnxruntime: the methods of `OrtValue` and `IOBinding` that take or return numpy arrays, but not copies inside
  `InferenceSession.run`.
- cupy: `get` and `set` of arrays, functions that make arrays from data of the host, and the copies of its CUDA runtime.
- numba.cuda: the three functions of its driver that make all copies of device arrays.
- cuda-python: the copy functions of `cuda.bindings.driver` and `cuda.bindings.runtime`. A call has no span if only the
  driver knows its direction."""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

from instrument.instrumentors.copies import (
    Facts,
    PatchedFunctions,
    Stream,
    Transfer,
    direction_between,
    is_pinned,
    read_argument,
)

Reader = Callable[[Any, Any], Any]
"""A function that reads one argument from a call's `args` and `kwargs`."""


def attach_numpy(numpy: Any, patched: PatchedFunctions) -> None:
    def facts(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        target, source = read_argument(args, kwargs, 0, "dst"), read_argument(args, kwargs, 1, "src")
        # One value for all elements is a fill and no copy.
        if source is target or getattr(source, "size", 1) <= 1 < target.size:
            return None
        return Transfer("h2h", target.nbytes, True, is_pinned(target))

    patched.wrap_functions(numpy, ("copyto",), facts)


JAX_HOST_PLATFORMS = frozenset({"cpu"})
"""The platforms of JAX whose devices use the memory of the host."""


def attach_jax(jax: Any, patched: PatchedFunctions) -> None:
    array_type, leaves, tracer = jax.Array, jax.tree_util.tree_leaves, jax.core.Tracer
    array_class = getattr(sys.modules.get("jax._src.array"), "ArrayImpl", None)  # no subclass of `jax.Array`

    def read_put(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        directions: Counter[str] = Counter()
        pinned: set[bool | None] = set()
        for source, target in zip(leaves(read_argument(args, kwargs, 0, "x")), leaves(out), strict=False):
            if target is source or isinstance(target, tracer) or not isinstance(target, array_type):
                continue
            direction = _find_direction(source, target, array_type)
            if direction is not None:
                directions[direction] += target.nbytes
                pinned.add(None if isinstance(source, array_type) else is_pinned(source))
        if not directions:
            return None
        direction = directions.most_common(1)[0][0]
        return Transfer(direction, sum(directions.values()), False, pinned.pop() if len(pinned) == 1 else None)

    def read_values(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        array = args[0]
        if array._npy_value is None:  # handed out without a copy
            return None
        return Transfer("h2h" if _is_on_jax_host(array) else "d2h", array.nbytes, True, False)

    patched.wrap_functions(jax, ("device_put",), read_put)
    if array_class is not None and isinstance(vars(array_class).get("_value"), property):
        patched.wrap_property(array_class, "_value", read_values, lambda array: array._npy_value is None)


def _is_on_jax_host(array: Any) -> bool:
    return all(device.platform in JAX_HOST_PLATFORMS for device in array.devices())


def _find_direction(source: Any, target: Any, array_type: Any) -> str | None:
    read_on_device = isinstance(source, array_type) and not _is_on_jax_host(source)
    direction = direction_between(
        source.devices() if read_on_device else None, None if _is_on_jax_host(target) else target.devices()
    )
    return None if direction == "d2d" and _read_address(source) == _read_address(target) is not None else direction


def _read_address(array: Any) -> int | None:
    try:
        return int(array.unsafe_buffer_pointer())
    except Exception:  # spread over several devices, or given away
        return None


def attach_onnxruntime(module: Any, patched: PatchedFunctions) -> None:
    value_type = module.OrtValue

    def read_made(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        # On the host the value has the array's own memory.
        return (
            None
            if _locate_value(out) is None
            else Transfer("h2d", out.tensor_size_in_bytes(), True, is_pinned(args[1]))
        )

    def read_values(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        value = args[0]
        if _locate_value(value) is not None:
            return Transfer("d2h", out.nbytes, True, False)
        return None if out.ctypes.data == value.data_ptr() else Transfer("h2h", out.nbytes, True, False)

    def read_updated(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        target, source = args[0], read_argument(args, kwargs, 1, "data", kwargs.get("np_arr"))
        from_value = isinstance(source, value_type)
        moved_bytes = source.tensor_size_in_bytes() if from_value else source.nbytes
        direction = direction_between(_locate_value(source) if from_value else None, _locate_value(target))
        return Transfer(direction, moved_bytes, True, None if from_value else is_pinned(source))

    def read_bound(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        binding, name = args[0], read_argument(args, kwargs, 1, "name")
        array = read_argument(args, kwargs, 2, "arr_on_cpu")
        # On the host the input has the array's own memory.
        return None if _input_is_on_host(binding, name) else Transfer("h2d", array.nbytes, True, is_pinned(array))

    def read_fetched(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        read_on_device = [_locate_value(value) is not None for value in args[0].get_outputs()]
        arrays = [getattr(array, "nbytes", 0) for array in out]
        moved_bytes = sum(nbytes for nbytes, is_there in zip(arrays, read_on_device, strict=False) if is_there)
        if moved_bytes:
            return Transfer("d2h", moved_bytes, True, False)
        return Transfer("h2h", sum(arrays), True, False)

    def read_sent(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        sources, targets = read_argument(args, kwargs, 0, "src"), read_argument(args, kwargs, 1, "dst")
        if not sources:
            return None
        moved_bytes = sum(value.tensor_size_in_bytes() for value in sources)
        sync = read_argument(args, kwargs, 2, "stream") is None
        return Transfer(direction_between(_locate_value(sources[0]), _locate_value(targets[0])), moved_bytes, sync)

    patched.wrap_factory(value_type, "ortvalue_from_numpy", read_made)
    patched.wrap_methods(value_type, ("numpy",), read_values)
    patched.wrap_methods(value_type, ("update_inplace",), read_updated)
    patched.wrap_methods(module.IOBinding, ("bind_cpu_input",), read_bound)
    patched.wrap_methods(module.IOBinding, ("copy_outputs_to_cpu",), read_fetched)
    patched.wrap_functions(module, ("copy_tensors",), read_sent)


def _locate_value(value: Any) -> tuple[str, int] | None:
    """Return the name and number of the device that holds an `OrtValue`, None for the host."""
    name = value.device_name()
    if name == "cpu":
        return None
    try:
        return name, int(value.__dlpack_device__()[1])
    except Exception:  # too old, or memory that no other framework may see
        return name, 0


def _input_is_on_host(binding: Any, name: str) -> bool:
    session = binding._session
    if session.get_providers() == ["CPUExecutionProvider"]:
        return True
    try:
        names = [node.name for node in session.inputs_meta]
        return str(session.input_meminfos[names.index(name)].name).lower() == "cpu"
    except Exception:  # an old version does not say; sessions with another provider mostly read device memory
        return False


CUPY_MAKING = ("array", "asarray", "asanyarray", "ascontiguousarray", "asfortranarray")
CUPY_READING = ("item", "tolist", "__bool__", "__int__", "__float__", "__complex__", "__index__")
_CUDA_KINDS = {0: "h2h", 1: "h2d", 2: "d2h", 3: "d2d"}


def attach_cupy(cupy: Any, patched: PatchedFunctions) -> None:
    array_type = cupy.ndarray

    def read_get(out: Any, args: Any, kwargs: Any) -> Transfer:
        # get(stream=None, order="C", out=None, blocking=True)
        return Transfer("d2h", args[0].nbytes, bool(read_argument(args, kwargs, 4, "blocking", True)), is_pinned(out))

    def read_put(out: Any, args: Any, kwargs: Any) -> Transfer:
        # set(arr, stream=None) uses the current stream where none is given.
        return Transfer("h2d", args[0].nbytes, False, is_pinned(read_argument(args, kwargs, 1, "arr")))

    def read_values(out: Any, args: Any, kwargs: Any) -> Transfer:
        return Transfer("d2h", args[0].nbytes, True)

    def read_made(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        source = read_argument(args, kwargs, 0, "obj", kwargs.get("a"))
        if isinstance(source, array_type):
            return None if out.data.ptr == source.data.ptr else _make_transfer(source, out)
        if not isinstance(out, array_type) or not _is_host_data(source, array_type):
            return None
        return Transfer("h2d", out.nbytes, bool(kwargs.get("blocking", False)), is_pinned(source))

    def read_copied(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        target, source = read_argument(args, kwargs, 0, "dst"), read_argument(args, kwargs, 1, "src")
        # A source on the host is a single value, and the call a fill.
        return _make_transfer(source, target) if isinstance(source, array_type) and source is not target else None

    patched.stream = lambda args, kwargs: None
    patched.wrap_methods(array_type, ("get",), read_get, _arg_reader(1, "stream"))
    patched.wrap_methods(array_type, ("set",), read_put, _arg_reader(2, "stream"))
    patched.wrap_methods(array_type, CUPY_READING, read_values)
    patched.wrap_functions(cupy, CUPY_MAKING, read_made)
    patched.wrap_functions(cupy, ("copyto",), read_copied)
    runtime = cupy.cuda.runtime
    # memcpy(dst, src, size, kind) and memcpyPeer(dst, dstDevice, src, srcDevice, size); the others end with a stream.
    by_kind = partial(_kind_reader, _arg_reader(3, "kind"), (_arg_reader(2, "size"),))
    by_peer = partial(
        _peer_copy_reader, _arg_reader(3, "srcDevice"), _arg_reader(1, "dstDevice"), _arg_reader(4, "size")
    )
    for name, facts, last in (("memcpy", by_kind, 4), ("memcpyPeer", by_peer, 5)):
        patched.wrap_functions(runtime, (name,), facts(True), lambda args, kwargs: 0)
        patched.wrap_functions(runtime, (f"{name}Async",), facts(False), _arg_reader(last, "stream"))


def _arg_reader(index: int, name: str) -> Reader:
    return lambda args, kwargs: read_argument(args, kwargs, index, name)


def _make_transfer(source: Any, target: Any) -> Transfer:
    return Transfer(direction_between(source.device.id, target.device.id), target.nbytes, False)


def _is_host_data(source: Any, array_type: Any) -> bool:
    """Return True for data in the memory of the host: neither an array on a device nor a list of such arrays."""
    while isinstance(source, (list, tuple)) and source:
        source = source[0]
    return not isinstance(source, array_type) and not hasattr(source, "__cuda_array_interface__")


def attach_numba(module: Any, patched: PatchedFunctions) -> None:
    patched.stream = lambda args, kwargs: _read_arguments(args, kwargs)[3]

    def read_to_device(out: Any, args: Any, kwargs: Any) -> Transfer:
        _, source, size, stream = _read_arguments(args, kwargs)
        return Transfer("h2d", size, not stream, is_pinned(source))

    def read_to_host(out: Any, args: Any, kwargs: Any) -> Transfer:
        target, _, size, stream = _read_arguments(args, kwargs)
        return Transfer("d2h", size, not stream, is_pinned(target))

    def read_on_device(out: Any, args: Any, kwargs: Any) -> Transfer:
        target, source, size, stream = _read_arguments(args, kwargs)
        return Transfer(direction_between(_read_device(source), _read_device(target)), size, not stream)

    patched.wrap_functions(module, ("host_to_device",), read_to_device)
    patched.wrap_functions(module, ("device_to_host",), read_to_host)
    patched.wrap_functions(module, ("device_to_device",), read_on_device)


def _read_arguments(args: Any, kwargs: Any) -> tuple[Any, Any, int, Any]:
    target, source = read_argument(args, kwargs, 0, "dst"), read_argument(args, kwargs, 1, "src")
    return target, source, int(read_argument(args, kwargs, 2, "size")), read_argument(args, kwargs, 3, "stream", 0)


def _read_device(array: Any) -> tuple[Any]:
    """Return a one-item tuple with the number of an array's device, None if the array does not report it."""
    context = getattr(getattr(array, "gpu_data", None), "context", None)
    return (getattr(getattr(context, "device", None), "id", None),)


_TYPED = re.compile(r"cuMemcpy([HDA])to([HDA])(Async)?")
_SIDES = {"H": "h", "D": "d", "A": "d"}  # an array is a texture's memory on the device
_WITH_ROWS = ("cudaMemcpy2D", "cudaMemcpy2DToArray", "cudaMemcpy2DFromArray")
_MEMORY_TYPES = {1: "h", 2: "d", 3: "d"}  # CUmemorytype: host, device, array; unified is none of them


def attach_cuda(module: Any, patched: PatchedFunctions) -> None:
    """Record copies by the functions of a cuda-python module, for the driver or for the runtime."""
    for name in sorted(vars(module)):
        function = getattr(module, name)
        if "emcpy" not in name or isinstance(function, type) or not callable(function):
            continue
        facts = _choose_reader(name, function)
        if facts is not None:
            patched.wrap_functions(module, (name,), _skip_failures(facts), _stream_reader(function))


def _choose_reader(name: str, function: Any) -> Facts | None:
    typed = _TYPED.fullmatch(name)
    if typed:
        direction = f"{_SIDES[typed[1]]}2{_SIDES[typed[2]]}"
        amount, sync = _named_arg(function, "ByteCount"), typed[3] is None
        return lambda out, args, kwargs: Transfer(direction, int(amount(args, kwargs)), sync)
    sync = not name.endswith("Async")
    base = name.removesuffix("Async")
    if base in ("cuMemcpyPeer", "cudaMemcpyPeer"):
        place = "Context" if base.startswith("cuM") else "Device"
        ends = _named_arg(function, f"src{place}"), _named_arg(function, f"dst{place}")
        return _peer_copy_reader(*ends, _named_arg(function, "ByteCount", "count"), sync)
    factors = {"cudaMemcpy": ("count",), **dict.fromkeys(_WITH_ROWS, ("width", "height"))}.get(base)
    if factors is not None:
        return _kind_reader(_named_arg(function, "kind"), [_named_arg(function, factor) for factor in factors], sync)
    if base in ("cuMemcpy2D", "cuMemcpy2DUnaligned", "cuMemcpy3D"):
        return _descriptor_reader(sync)
    return None


def _peer_copy_reader(source: Reader, target: Reader, amount: Reader, sync: bool) -> Facts:
    def read_peer_copy(out: Any, args: Any, kwargs: Any) -> Transfer:
        direction = direction_between(int(source(args, kwargs)), int(target(args, kwargs)))
        return Transfer(direction, int(amount(args, kwargs)), sync)

    return read_peer_copy


def _kind_reader(kind: Reader, sizes: Sequence[Reader], sync: bool) -> Facts:
    def read_copy_by_kind(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        direction = _CUDA_KINDS.get(int(kind(args, kwargs)))
        return None if direction is None else Transfer(direction, prod(int(size(args, kwargs)) for size in sizes), sync)

    return read_copy_by_kind


def _descriptor_reader(sync: bool) -> Facts:
    def read_descriptor(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        copy = read_argument(args, kwargs, 0, "pCopy")
        source = _MEMORY_TYPES.get(int(copy.srcMemoryType))
        target = _MEMORY_TYPES.get(int(copy.dstMemoryType))
        if source is None or target is None:
            return None
        return Transfer(f"{source}2{target}", copy.WidthInBytes * copy.Height * getattr(copy, "Depth", 1), sync)

    return read_descriptor


def _named_arg(function: Any, *names: str) -> Reader:
    """Return a reader of one argument of a function. Its name is the first of `names` that the function has."""
    parameters = list(inspect.signature(function).parameters)
    name = next(name for name in names if name in parameters)
    return _arg_reader(parameters.index(name), name)


def _stream_reader(function: Any) -> Stream:
    """Return a reader of the stream argument of a call. For a function without this argument, the reader returns the
    default stream."""
    parameters = list(inspect.signature(function).parameters)
    name = next((name for name in ("hStream", "stream") if name in parameters), None)
    if name is None:
        return lambda args, kwargs: 0
    stream_of = _arg_reader(parameters.index(name), name)

    def read_stream(args: Any, kwargs: Any) -> Any:
        handle = stream_of(args, kwargs)
        return 0 if handle is None else int(handle)

    return read_stream


def _skip_failures(facts: Facts) -> Facts:
    """Wrap a reader of transfers so that a call that returns an error code counts as no transfer."""
    return lambda out, args, kwargs: facts(out, args, kwargs) if int(out[0]) == 0 else None
