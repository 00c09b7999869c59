"""torch: the methods of its tensors and storages that copy.

Models move by their tensors (`Module.to`), and so do loaded checkpoints and the batches that a `DataLoader` pins, so
each of those is the sum of such copies. Functions such as `torch.tensor` stay as they are: torch.compile knows them by
identity, keeps what it finds when it first looks, and would break the graph at what it does not know.

Where torch has no device at all nothing is replaced, unless a rule asks for copies from host to host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from instrument.instrumentors.compilers import compiling_test
from instrument.instrumentors.copies.transfers import (
    NOWHERE,
    Facts,
    Places,
    Room,
    Transfer,
    Transfers,
    argument,
    way_between,
)
from instrument.profile.model import DIRECTIONS
from instrument.recording.spans import Work

CONVERTING = ("to", "cuda", "xpu", "cpu", "type", "type_as")
READING = ("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__complex__", "__index__")


def why_absent(torch: Any) -> str:
    """Return why this torch can make no copy to or from a device; "" where it can. Does not touch the driver."""
    return "" if _devices(torch) else "this torch is built without a device: no copy to or from one can happen"


def attach(torch: Any, transfers: Transfers, *, initialised: Callable[[], bool] | None = None) -> Places:
    """Replace what copies.

    `initialised` is True once torch has begun to use its device; until then each method costs that one call more.
    Left out, torch is asked: `torch.cuda.is_initialized` (also for HIP) takes about 40 ns.
    """
    used = _is_used(torch, transfers) if initialised is None else initialised
    compiling = compiling_test(torch)

    def ready() -> bool:
        return not compiling() and used()

    tensor = torch.Tensor
    fake = getattr(getattr(torch, "_subclasses", None), "FakeTensor", ())
    private = _private_backend(torch)
    places = Places(transfers, "torch", ready, _where)
    places.methods(tensor, (*CONVERTING, *([private] if private else [])), _if_new(_converted, fake))
    places.methods(tensor, ("copy_",), _if_real(_copied, fake))
    places.methods(tensor, ("pin_memory",), _if_new(_pinned, fake), _nowhere)
    # Most of these are of tensors that are on the host already.
    places.methods(tensor, READING, _read, lambda args, kwargs: _where(args, kwargs) if args[0].is_cuda else NOWHERE)
    for storage in (torch.UntypedStorage, torch.TypedStorage):
        places.methods(storage, ("to", "cuda", "cpu"), _storage_moved)
        places.methods(storage, ("copy_",), _storage_copied)
        places.methods(storage, ("pin_memory",), _storage_pinned, _nowhere)
    return places


def _nowhere(args: Any, kwargs: Any) -> Any:
    return NOWHERE


def _where(args: Any, kwargs: Any) -> Any:
    """Return the device that a copy runs on: the source's, or the target's where the source is on the host.

    `tensor.to(...)` takes many things for its target; what is none of a device's leaves it the current one.
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


def direction(source: Any, target: Any) -> str | None:
    """Return the direction between two torch devices; None where one of them has no data."""
    if "meta" in (source.type, target.type):
        return None
    return way_between(*(None if device.type == "cpu" else device for device in (source, target)))


# ---------------------------------------------------------------- what a call has moved


def _converted(out: Any, args: Any, kwargs: Any) -> Transfer | None:
    """Return the copy of a method that gives a tensor, the very same where there was nothing to do."""
    if not hasattr(out, "device"):  # `type()` names the class
        return None
    return _between(args[0], out, out.device, _is_asynchronous(args[1:], kwargs))


def _copied(out: Any, args: Any, kwargs: Any) -> Transfer | None:
    """`target.copy_(source)`."""
    source = argument(args, kwargs, 1, "src", kwargs.get("other"))
    if not hasattr(source, "device") or source is out:
        return None
    return _between(source, out, out.device, _is_asynchronous(args[1:], kwargs), kept=True)


def _between(source: Any, out: Any, target: Any, asynchronous: bool, kept: bool = False) -> Transfer | None:
    way = direction(source.device, target)
    if way is None or (way == "h2h" and not kept and _shares(source, out)):
        return None
    pinned = None
    if way == "h2d":
        pinned = bool(source.is_pinned())
    elif way == "d2h":
        # What a call that waits makes on the host is pageable.
        pinned = bool(out.is_pinned()) if asynchronous or kept else False
    return Transfer(way, _nbytes(source), not asynchronous, pinned)


def _pinned(out: Any, args: Any, kwargs: Any) -> Transfer | None:
    return Transfer("h2h", _nbytes(out), True, True)


def _read(out: Any, args: Any, kwargs: Any) -> Transfer | None:
    """Return the copy of a method that brings values to Python, and waits for the device by itself."""
    source = args[0]
    if source.device.type in ("cpu", "meta"):
        return None
    return Transfer("d2h", _nbytes(source), True, False)


def _storage_moved(out: Any, args: Any, kwargs: Any) -> Transfer | None:
    source = args[0]
    way = direction(source.device, out.device)
    if out is source or way in (None, "h2h"):
        return None
    return Transfer(way or "", source.nbytes(), not _is_asynchronous(args[1:], kwargs))


def _storage_copied(out: Any, args: Any, kwargs: Any) -> Transfer | None:
    source = argument(args, kwargs, 1, "source")
    way = direction(source.device, out.device)
    return None if way is None else Transfer(way, source.nbytes(), not _is_asynchronous(args[1:], kwargs))


def _storage_pinned(out: Any, args: Any, kwargs: Any) -> Transfer | None:
    return None if out is args[0] else Transfer("h2h", out.nbytes(), True, True)


def _if_real(facts: Facts, fake: Any) -> Facts:
    """Return the facts of calls on real tensors, for those with which torch traces have no data."""
    return lambda out, args, kwargs: None if isinstance(out, fake) else facts(out, args, kwargs)


def _if_new(facts: Facts, fake: Any) -> Facts:
    """Do so for methods that return the very same tensor where there was nothing to do, at the least cost."""
    return lambda out, args, kwargs: None if out is args[0] or isinstance(out, fake) else facts(out, args, kwargs)


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _shares(source: Any, out: Any) -> bool:
    try:
        return bool(source.device == out.device and source.data_ptr() == out.data_ptr())
    except RuntimeError:  # a tensor without memory of its own
        return True


def _is_asynchronous(args: Any, kwargs: Any) -> bool:
    """Return True where the call asked for `non_blocking`, by name or as the first truth value, before `copy`."""
    return bool(kwargs.get("non_blocking", next((argument for argument in args if isinstance(argument, bool)), False)))


# ---------------------------------------------------------------- which devices there are


def _devices(torch: Any) -> list[Callable[[], bool]]:
    """Return, for each kind of device that this torch was built for, a test that is true once the process uses it.

    Does not touch a driver, which would spoil forked children. MPS has no such state: it is there or not.
    """
    version = getattr(torch, "version", None)
    found: list[Any] = []
    if getattr(version, "cuda", None) or getattr(version, "hip", None):
        found.append(torch.cuda.is_initialized)
    if getattr(version, "xpu", None):
        found.append(torch.xpu.is_initialized)
    mps = getattr(getattr(torch, "backends", None), "mps", None)
    if mps is not None and mps.is_built():
        found.append(mps.is_available)
    private = _private_backend(torch)
    if private:
        found.append(getattr(getattr(torch, private), "is_initialized", lambda: True))
    return found


def _private_backend(torch: Any) -> str:
    """Return the name of a device that another package has added to torch (`npu` and others), "" for none."""
    tell = getattr(getattr(torch, "_C", None), "_get_privateuse1_backend_name", None)
    name = tell() if tell is not None else ""
    return name if name and hasattr(torch, name) else ""


def _is_used(torch: Any, transfers: Transfers) -> Callable[[], bool]:
    if transfers.asks_for("torch", ("h2h",)):
        return lambda: True
    devices = _devices(torch)
    return devices[0] if len(devices) == 1 else lambda: any(is_used() for is_used in devices)


TORCH = Room(
    framework="torch",
    modules=("torch",),
    ways=DIRECTIONS,
    unseen="torch.tensor, as_tensor and asarray with a device, indexing and masks between host and device, clone() and "
    "contiguous(), scatter and gather between devices, and what compiled regions, CUDA graphs and C++ code copy",
    attach=attach,
)
