"""Record copies of arrays by torch, numpy, JAX, onnxruntime, cupy, numba.cuda and cuda-python.

- torch: the methods of tensors and storages that copy, but not `torch.tensor`. torch.compile compares `torch.tensor` by
  identity, so it cannot be replaced.
- numpy: `numpy.copyto`, with which services fill batches.
- JAX: `jax.device_put`, and the first read of a device array on the host.
- onnxruntime: methods of `OrtValue` and `IOBinding` with numpy arrays, but not copies inside `InferenceSession.run`.
- cupy, numba.cuda and cuda-python: their copy functions. A call whose direction only the driver knows has no span.
"""

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
    NOWHERE,
    Copies,
    Facts,
    PatchedFunctions,
    Stream,
    Transfer,
    direction_between,
    is_pinned,
    read_argument,
)
from instrument.instrumentors.torch_graphs import get_is_compiling
from instrument.recording.spans import Work


def attach_numpy(numpy: Any, patched: PatchedFunctions) -> None:
    def read_copyto(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        target, source = read_argument(args, kwargs, 0, "dst"), read_argument(args, kwargs, 1, "src")
        # One value for all elements is a fill and no copy.
        if source is target or getattr(source, "size", 1) <= 1 < target.size:
            return None
        return Transfer("h2h", target.nbytes, True, is_pinned(target))

    patched.wrap_functions(numpy, ("copyto",), read_copyto)


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

    def read_new_value(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        is_on_host = _locate_value(out) is None  # the value has the array's own memory
        return None if is_on_host else Transfer("h2d", out.tensor_size_in_bytes(), True, is_pinned(args[1]))

    def read_values(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        value = args[0]
        if _locate_value(value) is not None:
            return Transfer("d2h", out.nbytes, True, False)
        return None if out.ctypes.data == value.data_ptr() else Transfer("h2h", out.nbytes, True, False)

    def read_update(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        target, source = args[0], read_argument(args, kwargs, 1, "data", kwargs.get("np_arr"))
        from_value = isinstance(source, value_type)
        moved_bytes = source.tensor_size_in_bytes() if from_value else source.nbytes
        direction = direction_between(_locate_value(source) if from_value else None, _locate_value(target))
        return Transfer(direction, moved_bytes, True, None if from_value else is_pinned(source))

    def read_bound_input(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        binding, name = args[0], read_argument(args, kwargs, 1, "name")
        array = read_argument(args, kwargs, 2, "arr_on_cpu")
        # On the host the input has the array's own memory.
        return None if _input_is_on_host(binding, name) else Transfer("h2d", array.nbytes, True, is_pinned(array))

    def read_fetched(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        values, sizes = args[0].get_outputs(), [getattr(array, "nbytes", 0) for array in out]
        from_device = sum(size for value, size in zip(values, sizes, strict=False) if _locate_value(value) is not None)
        return Transfer("d2h" if from_device else "h2h", from_device or sum(sizes), True, False)

    def read_sent_tensors(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        sources, targets = read_argument(args, kwargs, 0, "src"), read_argument(args, kwargs, 1, "dst")
        moved_bytes = sum(value.tensor_size_in_bytes() for value in sources)
        sync = read_argument(args, kwargs, 2, "stream") is None
        ends = [_locate_value(values[0]) for values in (sources, targets) if sources]
        return Transfer(direction_between(*ends), moved_bytes, sync) if ends else None

    patched.wrap_methods(value_type, ("ortvalue_from_numpy",), read_new_value)
    patched.wrap_methods(value_type, ("numpy",), read_values)
    patched.wrap_methods(value_type, ("update_inplace",), read_update)
    patched.wrap_methods(module.IOBinding, ("bind_cpu_input",), read_bound_input)
    patched.wrap_methods(module.IOBinding, ("copy_outputs_to_cpu",), read_fetched)
    patched.wrap_functions(module, ("copy_tensors",), read_sent_tensors)


def _locate_value(value: Any) -> tuple[str, int] | None:
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
READING = ("item", "tolist", "__bool__", "__int__", "__float__", "__complex__", "__index__")
_CUDA_KINDS = {0: "h2h", 1: "h2d", 2: "d2h", 3: "d2d"}


def attach_cupy(cupy: Any, patched: PatchedFunctions) -> None:
    array_type = cupy.ndarray

    def read_get(out: Any, args: Any, kwargs: Any) -> Transfer:
        # get(stream=None, order="C", out=None, blocking=True)
        return Transfer("d2h", args[0].nbytes, bool(read_argument(args, kwargs, 4, "blocking", True)), is_pinned(out))

    def read_put(out: Any, args: Any, kwargs: Any) -> Transfer:
        # set(arr, stream=None) uses the current stream where none is given.
        return Transfer("h2d", args[0].nbytes, False, is_pinned(read_argument(args, kwargs, 1, "arr")))

    def read_new_array(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        source = read_argument(args, kwargs, 0, "obj", kwargs.get("a"))
        if isinstance(source, array_type):
            return None if out.data.ptr == source.data.ptr else _make_transfer(source, out)
        first = source
        while isinstance(first, (list, tuple)) and first:
            first = first[0]
        is_on_device = isinstance(first, array_type) or hasattr(first, "__cuda_array_interface__")
        if not isinstance(out, array_type) or is_on_device:
            return None
        return Transfer("h2d", out.nbytes, bool(kwargs.get("blocking", False)), is_pinned(source))

    def read_copied(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        target, source = read_argument(args, kwargs, 0, "dst"), read_argument(args, kwargs, 1, "src")
        # A source on the host is a single value, and the call a fill.
        return _make_transfer(source, target) if isinstance(source, array_type) and source is not target else None

    patched.stream = lambda args, kwargs: None
    for name, facts, place in (("get", read_get, 1), ("set", read_put, 2)):
        patched.wrap_methods(array_type, (name,), facts, partial(read_argument, index=place, name="stream"))
    patched.wrap_methods(array_type, READING, lambda out, args, kwargs: Transfer("d2h", args[0].nbytes, True))
    patched.wrap_functions(cupy, CUPY_MAKING, read_new_array)
    patched.wrap_functions(cupy, ("copyto",), read_copied)
    runtime = cupy.cuda.runtime
    for name, names in (("memcpy", "dst src size kind"), ("memcpyPeer", "dst dstDevice src srcDevice size")):
        _wrap_cuda_function(patched, runtime, name, names.split())
        _wrap_cuda_function(patched, runtime, f"{name}Async", [*names.split(), "stream"])


def _make_transfer(source: Any, target: Any) -> Transfer:
    return Transfer(direction_between(source.device.id, target.device.id), target.nbytes, False)


def attach_numba(module: Any, patched: PatchedFunctions) -> None:
    names = ("dst", "src", "size", "stream")
    patched.stream = lambda args, kwargs: read_argument(args, kwargs, 3, "stream", 0)
    for name, direction in (("host_to_device", "h2d"), ("device_to_host", "d2h"), ("device_to_device", "")):

        def read_copy(out: Any, args: Any, kwargs: Any, direction: str = direction) -> Transfer:
            call = {"stream": 0, **dict(zip(names, args, strict=False)), **kwargs}
            host = {"h2d": call["src"], "d2h": call["dst"]}.get(direction)
            way = direction or direction_between(*map(_read_device, (call["src"], call["dst"])))
            return Transfer(way, int(call["size"]), not call["stream"], None if host is None else is_pinned(host))

        patched.wrap_functions(module, (name,), read_copy)


def _read_device(array: Any) -> tuple[Any]:
    """Return the number of an array's device in a tuple, because None instead of a tuple means the host. An unknown
    number is `(None,)`."""
    context = getattr(getattr(array, "gpu_data", None), "context", None)
    return (getattr(getattr(context, "device", None), "id", None),)


_TYPED = re.compile(r"cuMemcpy([HDA])to([HDA])")
_SIDES = {"H": "h", "D": "d", "A": "d"}  # an array is a texture's memory on the device
_SIZES = ("ByteCount", "count", "size", "width", "height")
_MEMORY_TYPES = {1: "h", 2: "d", 3: "d"}  # CUmemorytype: host, device, array; unified is none of them


def attach_cuda(module: Any, patched: PatchedFunctions) -> None:
    for name in sorted(vars(module)):
        function = getattr(module, name)
        if re.match("cu(da)?Memcpy", name) and callable(function) and not isinstance(function, type):
            _wrap_cuda_function(patched, module, name, list(inspect.signature(function).parameters))


def _wrap_cuda_function(patched: PatchedFunctions, module: Any, name: str, names: Sequence[str]) -> None:
    """Record the calls of CUDA's copy function `name`, which has the parameters `names`. Without a parameter for the
    direction of the copy, nothing is recorded."""
    typed = _TYPED.match(name)
    peer = next((place for place in ("Context", "Device") if f"src{place}" in names), None)
    is_described = "pCopy" in names and "Peer" not in name
    if not (typed or peer or is_described or "kind" in names):
        return
    sizes, sync = [size for size in _SIZES if size in names], not name.endswith("Async")
    stream_name = next((name for name in ("hStream", "stream") if name in names), None)

    def read_direction(call: dict[str, Any]) -> str | None:
        if typed:
            return f"{_SIDES[typed[1]]}2{_SIDES[typed[2]]}"
        if peer is not None:
            return direction_between(int(call[f"src{peer}"]), int(call[f"dst{peer}"]))
        if not is_described:
            return _CUDA_KINDS.get(int(call["kind"]))
        copy = call["pCopy"]
        ends = [_MEMORY_TYPES.get(int(end)) for end in (copy.srcMemoryType, copy.dstMemoryType)]
        return None if None in ends else f"{ends[0]}2{ends[1]}"

    def read_copy(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        if isinstance(out, tuple) and int(out[0]) != 0:  # an error code of cuda-python
            return None
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        direction = read_direction(call)
        if direction is None:
            return None
        if is_described:
            copy = call["pCopy"]
            return Transfer(direction, copy.WidthInBytes * copy.Height * getattr(copy, "Depth", 1), sync)
        return Transfer(direction, prod(int(call[size]) for size in sizes), sync)

    def read_stream(args: Any, kwargs: Any) -> int:
        stream = None if stream_name is None else read_argument(args, kwargs, names.index(stream_name), stream_name)
        return int(stream or 0)

    patched.wrap_functions(module, (name,), read_copy, read_stream)


CONVERTING = ("to", "cuda", "xpu", "cpu", "type", "type_as")


def explain_missing_device(torch: Any) -> str:
    """Return the reason why this build of torch has no device, or "". The driver is not called."""
    why = "this torch is built without a device: no copy to or from one can happen"
    return "" if _make_device_use_tests(torch) else why


def attach_torch(torch: Any, patched: PatchedFunctions, *, initialised: Callable[[], bool] | None = None) -> None:
    """Replace torch's methods that copy. They record nothing before `initialised()` is True, because torch uses no
    device until then."""
    used = _make_device_use_test(torch, patched.copies) if initialised is None else initialised
    compiling = get_is_compiling(torch)
    tensor = torch.Tensor
    fake = getattr(getattr(torch, "_subclasses", None), "FakeTensor", ())
    private = _find_private_backend(torch)
    patched.ready, patched.stream = lambda: not compiling() and used(), _find_device
    patched.wrap_methods(tensor, (*CONVERTING, *([private] if private else [])), _skip_same(_read_conversion, fake))
    patched.wrap_methods(
        tensor, ("copy_",), lambda out, *call: None if isinstance(out, fake) else _read_copy(out, *call)
    )
    pin = _skip_same(lambda out, *_: Transfer("h2h", _count_bytes(out), True, True), fake)
    patched.wrap_methods(tensor, ("pin_memory",), pin, lambda args, kwargs: NOWHERE)
    # Most calls read tensors that are on the host already.
    stream_of: Stream = lambda args, kwargs: _find_device(args, kwargs) if args[0].is_cuda else NOWHERE  # noqa: E731
    patched.wrap_methods(tensor, (*READING, "numpy", "__array__"), _read_values, stream_of)
    pin = _skip_same(lambda out, *_: Transfer("h2h", out.nbytes(), True, True), ())
    for storage in (torch.UntypedStorage, torch.TypedStorage):
        patched.wrap_methods(storage, ("to", "cuda", "cpu"), _skip_same(partial(_read_storage_copy, moves=True), ()))
        patched.wrap_methods(storage, ("copy_",), _read_storage_copy)
        patched.wrap_methods(storage, ("pin_memory",), pin, lambda args, kwargs: NOWHERE)


def _find_device(args: Any, kwargs: Any) -> Any:
    """Return the device on which a method call, such as `tensor.to`, is timed. None means the current device."""
    source = args[0]
    if source.is_cuda:
        return Work("torch", (source.device.index,))
    target = kwargs.get("device", args[1] if len(args) > 1 else None)
    if isinstance(target, int) and not isinstance(target, bool):
        return Work("torch", (target,))
    if isinstance(target, str):
        kind, _, index = target.partition(":")
        return Work("torch", (int(index),)) if kind in ("cuda", "hip") and index.isdigit() else None
    target = getattr(target, "device", target)  # of a tensor
    if getattr(target, "type", None) == "cuda" and target.index is not None:
        return Work("torch", (target.index,))
    return None


def find_copy_direction(source: Any, target: Any) -> str | None:
    """Return the direction of a copy between two torch devices, or None for the device `meta`, which has no data."""
    if "meta" in (source.type, target.type):
        return None
    return direction_between(*(None if device.type == "cpu" else device for device in (source, target)))


def _read_conversion(out: Any, args: Any, kwargs: Any) -> Transfer | None:
    if not hasattr(out, "device"):  # `type()` names the class
        return None
    return _make_tensor_transfer(args[0], out, out.device, _is_asynchronous(args[1:], kwargs))


def _read_copy(out: Any, args: Any, kwargs: Any) -> Transfer | None:
    source = read_argument(args, kwargs, 1, "src", kwargs.get("other"))
    if not hasattr(source, "device") or source is out:
        return None
    return _make_tensor_transfer(source, out, out.device, _is_asynchronous(args[1:], kwargs), overwrites=True)


def _make_tensor_transfer(
    source: Any, out: Any, target: Any, asynchronous: bool, overwrites: bool = False
) -> Transfer | None:
    direction = find_copy_direction(source.device, target)
    if direction is None:
        return None
    if direction == "h2h" and not overwrites:
        try:
            if source.device == out.device and source.data_ptr() == out.data_ptr():
                return None
        except RuntimeError:  # a tensor without memory of its own
            return None
    pinned = None
    if direction == "h2d":
        pinned = bool(source.is_pinned())
    elif direction == "d2h":
        # A call that waits makes pageable memory on the host.
        pinned = bool(out.is_pinned()) if asynchronous or overwrites else False
    return Transfer(direction, _count_bytes(source), not asynchronous, pinned)


def _read_values(out: Any, args: Any, kwargs: Any) -> Transfer | None:
    source = args[0]
    if source.device.type in ("cpu", "meta"):
        return None
    return Transfer("d2h", _count_bytes(source), True, False)


def _read_storage_copy(out: Any, args: Any, kwargs: Any, *, moves: bool = False) -> Transfer | None:
    """Read the transfer of a copy into a storage. If `moves` is True, the call moves a storage to another memory."""
    source = args[0] if moves else read_argument(args, kwargs, 1, "source")
    direction = find_copy_direction(source.device, out.device)
    if direction is None or (moves and direction == "h2h"):
        return None
    return Transfer(direction, source.nbytes(), not _is_asynchronous(args[1:], kwargs))


def _skip_same(facts: Facts, fake: Any) -> Facts:
    return lambda out, args, kwargs: None if out is args[0] or isinstance(out, fake) else facts(out, args, kwargs)


def _count_bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _is_asynchronous(args: Any, kwargs: Any) -> bool:
    return bool(kwargs.get("non_blocking", next((argument for argument in args if isinstance(argument, bool)), False)))


def _make_device_use_tests(torch: Any) -> list[Callable[[], bool]]:
    """Return a test for each kind of device in this build of torch. A test returns True if the process has used such a
    device.

    The tests do not call the driver, because a call would break forked children.
    """
    version = getattr(torch, "version", None)
    tests: list[Any] = []
    if getattr(version, "cuda", None) or getattr(version, "hip", None):
        tests.append(torch.cuda.is_initialized)
    if getattr(version, "xpu", None):
        tests.append(torch.xpu.is_initialized)
    mps = getattr(getattr(torch, "backends", None), "mps", None)
    if mps is not None and mps.is_built():
        tests.append(mps.is_available)
    private = _find_private_backend(torch)
    if private:
        tests.append(getattr(getattr(torch, private), "is_initialized", lambda: True))
    return tests


def _find_private_backend(torch: Any) -> str:
    """Return the kind of device that another package has added to torch, such as `npu`, or ""."""
    read_name = getattr(getattr(torch, "_C", None), "_get_privateuse1_backend_name", None)
    name = read_name() if read_name is not None else ""
    return name if name and hasattr(torch, name) else ""


def _make_device_use_test(torch: Any, copies: Copies) -> Callable[[], bool]:
    if copies.selects_copies("torch", ("h2h",)):
        return lambda: True
    devices = _make_device_use_tests(torch)
    return devices[0] if len(devices) == 1 else lambda: any(is_used() for is_used in devices)
