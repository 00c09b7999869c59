"""onnxruntime: the methods of its values and bindings that take numpy arrays in or hand them out.

What `InferenceSession.run` copies it copies inside; bindings make those copies visible.
"""

from __future__ import annotations

from typing import Any

from instrument.instrumentors.copies.transfers import Places, Transfer, Transfers, argument, is_pinned

FRAMEWORK = "onnxruntime"
MODULES = ("onnxruntime.capi.onnxruntime_inference_collection",)
WAYS = ("h2d", "d2h", "d2d", "p2p", "h2h")
UNSEEN = "what InferenceSession.run copies by itself; use an IOBinding to see it"

_HOST = ("cpu", 0)


def attach(module: Any, transfers: Transfers) -> Places:
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
        way = _way(_where(source) if from_value else _HOST, _where(target))
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
        return Transfer(_way(_where(sources[0]), _where(targets[0])), moved_bytes, sync)

    places = Places(transfers, FRAMEWORK)
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


def _way(source: tuple[str, int], target: tuple[str, int]) -> str:
    if source != _HOST != target:
        return "d2d" if source == target else "p2p"
    return f"{'h' if source == _HOST else 'd'}2{'h' if target == _HOST else 'd'}"


def _input_is_on_host(binding: Any, name: str) -> bool:
    """Whether the session reads an input where the host put it."""
    session = binding._session
    if session.get_providers() == ["CPUExecutionProvider"]:
        return True
    try:
        names = [node.name for node in session.inputs_meta]
        return str(session.input_meminfos[names.index(name)].name).lower() == "cpu"
    except Exception:  # too old to tell; a session with another provider takes its inputs there, as a rule
        return False
