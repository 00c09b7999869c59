"""numba.cuda: the three functions of its driver through which every copy of a device array goes.

The simulator (NUMBA_ENABLE_CUDASIM=1) has no driver; there the methods of its arrays stand for it.
"""

from __future__ import annotations

from typing import Any

from instrument.instrumentors.copies.transfers import Places, Transfer, Transfers, argument, is_pinned

FRAMEWORK = "numba"
MODULES = ("numba.cuda.cudadrv.driver", "numba.cuda.simulator")
WAYS = ("h2d", "d2h", "d2d", "p2p")
UNSEEN = "arrays in mapped or managed memory, which the device reads in place"


def attach(module: Any, transfers: Transfers) -> Places:
    """Replace what copies, in the driver or in the simulator."""
    if module.__name__ == "numba.cuda.simulator":
        places = Places(transfers, FRAMEWORK)
        _attach_simulator(module, places)
        return places
    places = Places(transfers, FRAMEWORK, stream=lambda args, kwargs: _arguments(args, kwargs)[3])

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
