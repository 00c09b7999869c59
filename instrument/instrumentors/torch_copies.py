"""Record the copies of torch: the methods of tensors and storages that copy.

Moving a model, loading a checkpoint or pinning a batch calls these methods for each tensor. Functions such as
`torch.tensor` are not replaced, because torch.compile compares them by identity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from instrument.instrumentors.copies import (
    NOWHERE,
    Copies,
    Facts,
    PatchedFunctions,
    Transfer,
    direction_between,
    read_argument,
)
from instrument.instrumentors.execution import get_compiling_test
from instrument.recording.spans import Work

CONVERTING = ("to", "cuda", "xpu", "cpu", "type", "type_as")
READING = ("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__complex__", "__index__")


def why_absent(torch: Any) -> str:
    """Return the reason why this build of torch has no device, "" if it has one. Does not call the driver."""
    return "" if _device_tests(torch) else "this torch is built without a device: no copy to or from one can happen"


def attach_torch(torch: Any, patched: PatchedFunctions, *, initialised: Callable[[], bool] | None = None) -> None:
    """Replace the methods that copy. They record nothing until `initialised()` is true, as torch uses no device
    before."""
    used = _make_used_test(torch, patched.copies) if initialised is None else initialised
    compiling = get_compiling_test(torch)

    def ready() -> bool:
        return not compiling() and used()

    def read_pinning(out: Any, args: Any, kwargs: Any) -> Transfer:
        return Transfer("h2h", _count_bytes(out), True, True)

    def read_storage_pin(out: Any, args: Any, kwargs: Any) -> Transfer | None:
        return None if out is args[0] else Transfer("h2h", out.nbytes(), True, True)

    tensor = torch.Tensor
    fake = getattr(getattr(torch, "_subclasses", None), "FakeTensor", ())
    private = _find_private_backend(torch)
    patched.ready, patched.stream = ready, _find_device
    patched.wrap_methods(tensor, (*CONVERTING, *([private] if private else [])), _skip_same(_read_conversion, fake))
    patched.wrap_methods(tensor, ("copy_",), _skip_fake(_read_copy, fake))
    patched.wrap_methods(
        tensor,
        ("pin_memory",),
        _skip_same(lambda out, *_: Transfer("h2h", _count_bytes(out), True, True), fake),
        _read_no_stream,
    )
    # Most calls read tensors that are on the host already.
    patched.wrap_methods(
        tensor, READING, _read_values, lambda args, kwargs: _find_device(args, kwargs) if args[0].is_cuda else NOWHERE
    )
    for storage in (torch.UntypedStorage, torch.TypedStorage):
        patched.wrap_methods(storage, ("to", "cuda", "cpu"), _read_storage_move)
        patched.wrap_methods(storage, ("copy_",), _read_storage_copy)
        patched.wrap_methods(storage, ("pin_memory",), read_storage_pin, _read_no_stream)


def _read_no_stream(args: Any, kwargs: Any) -> Any:
    return NOWHERE


def _find_device(args: Any, kwargs: Any) -> Any:
    """Return the device on which a method call such as `tensor.to` is timed, None for the current one.

    It is the source's device or, if the source is on the host, the target's.
    """
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


def device_direction(source: Any, target: Any) -> str | None:
    """Return the direction of a copy between two torch devices, None for `meta`, which has no data."""
    if "meta" in (source.type, target.type):
        return None
    return direction_between(*(None if device.type == "cpu" else device for device in (source, target)))


# ---------------------------------------------------------------- the bytes that a call has moved


def _read_conversion(out: Any, args: Any, kwargs: Any) -> Transfer | None:
    if not hasattr(out, "device"):  # `type()` names the class
        return None
    return _make_transfer(args[0], out, out.device, _is_asynchronous(args[1:], kwargs))


def _read_copy(out: Any, args: Any, kwargs: Any) -> Transfer | None:
    source = read_argument(args, kwargs, 1, "src", kwargs.get("other"))
    if not hasattr(source, "device") or source is out:
        return None
    return _make_transfer(source, out, out.device, _is_asynchronous(args[1:], kwargs), overwrites=True)


def _make_transfer(source: Any, out: Any, target: Any, asynchronous: bool, overwrites: bool = False) -> Transfer | None:
    direction = device_direction(source.device, target)
    if direction is None or (direction == "h2h" and not overwrites and _shares_memory(source, out)):
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


def _read_storage_move(out: Any, args: Any, kwargs: Any) -> Transfer | None:
    source = args[0]
    direction = device_direction(source.device, out.device)
    if out is source or direction in (None, "h2h"):
        return None
    return Transfer(direction or "", source.nbytes(), not _is_asynchronous(args[1:], kwargs))


def _read_storage_copy(out: Any, args: Any, kwargs: Any) -> Transfer | None:
    source = read_argument(args, kwargs, 1, "source")
    direction = device_direction(source.device, out.device)
    return None if direction is None else Transfer(direction, source.nbytes(), not _is_asynchronous(args[1:], kwargs))


def _skip_fake(facts: Facts, fake: Any) -> Facts:
    """Make a reader of transfers ignore calls with fake tensors, which torch uses to trace code."""
    return lambda out, args, kwargs: None if isinstance(out, fake) else facts(out, args, kwargs)


def _skip_same(facts: Facts, fake: Any) -> Facts:
    """Make a reader of transfers ignore calls that return their input tensor or a fake tensor."""
    return lambda out, args, kwargs: None if out is args[0] or isinstance(out, fake) else facts(out, args, kwargs)


def _count_bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _shares_memory(source: Any, out: Any) -> bool:
    try:
        return bool(source.device == out.device and source.data_ptr() == out.data_ptr())
    except RuntimeError:  # a tensor without memory of its own
        return True


def _is_asynchronous(args: Any, kwargs: Any) -> bool:
    """Return True if `non_blocking` is true in a call, by name or as the first boolean argument."""
    return bool(kwargs.get("non_blocking", next((argument for argument in args if isinstance(argument, bool)), False)))


# ---------------------------------------------------------------- the kinds of device


def _device_tests(torch: Any) -> list[Callable[[], bool]]:
    """Return a test for each kind of device of this torch build. A test returns True once the process uses such a
    device, for MPS if one exists.

    The tests call no driver, because that would break forked children.
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
    """Return the kind of device that another package has added to torch, such as `npu`, "" without one."""
    read_name = getattr(getattr(torch, "_C", None), "_get_privateuse1_backend_name", None)
    name = read_name() if read_name is not None else ""
    return name if name and hasattr(torch, name) else ""


def _make_used_test(torch: Any, copies: Copies) -> Callable[[], bool]:
    if copies.selects("torch", ("h2h",)):
        return lambda: True
    devices = _device_tests(torch)
    return devices[0] if len(devices) == 1 else lambda: any(is_used() for is_used in devices)
