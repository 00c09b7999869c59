"""A device for torch with two cards and memory of its own, in Python: what a GPU is to torch, without one.

Its tensors are torch's own kind of tensors on another device: torch computes with them, refuses to mix them with those
of the host, and every value crosses by a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "fakegpu"
aten = torch.ops.aten


class There(torch.Tensor):
    """A tensor on the device. `memory` is its content."""

    @staticmethod
    def __new__(cls, memory: Any, device: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, memory.size(), strides=memory.stride(), dtype=memory.dtype, device=device
        )

    def __init__(self, memory: Any, device: Any) -> None:
        self.memory = memory

    def __repr__(self) -> str:
        return f"There({self.memory}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operator: on the host's memory where no tensor of the device takes part."""
    there = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, There)]
    if func is aten.copy_.default:
        source = args[1].memory if isinstance(args[1], There) else args[1]
        func(args[0].memory if isinstance(args[0], There) else args[0], source)
        return args[0]
    if func is aten._local_scalar_dense.default:
        return func(_memory(args[0]))
    asked = kwargs.get("device")
    if asked is None and not there:
        return func(*args, **kwargs)
    target = torch.device(asked) if asked is not None else there[0].device
    if target.type == NAME and target.index is None:
        target = torch.device(NAME, 0)
    at_home = {**kwargs, "device": "cpu"} if "device" in kwargs and target.type == NAME else dict(kwargs)
    out = func(*tree_map(_memory, args), **tree_map(_memory, at_home))
    if target.type != NAME:
        return out
    return tree_map(lambda made: There(made, target) if isinstance(made, torch.Tensor) else made, out)


def _memory(value: Any) -> Any:
    return value.memory if isinstance(value, There) else value


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


@contextmanager
def use() -> Iterator[None]:
    """Tensors can move to `fakegpu:0` and `fakegpu:1` inside. The process has the device for ever after."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        _setup_privateuseone_for_python_backend(NAME)
    with _Mode():
        yield
