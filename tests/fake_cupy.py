"""A cupy for services without a GPU: arrays in a memory of their own, on two cards, with streams.

Names, signatures and what calls what follow cupy 14: `asnumpy` calls `get`, `asarray` and its kin copy by themselves.
"""

from __future__ import annotations

import ctypes
import itertools
from types import SimpleNamespace
from typing import Any

import numpy

_addresses = itertools.count(1 << 20, 1 << 16)
_memory: dict[int, numpy.ndarray] = {}
_card = 0


class Device:
    def __init__(self, number: int) -> None:
        self.id = number

    def __enter__(self) -> Device:
        global _card
        self.before, _card = _card, self.id
        return self

    def __exit__(self, *error: object) -> None:
        global _card
        _card = self.before


class Stream:
    ptr = 7


class PinnedMemoryPointer:
    """Page-locked memory, as `cupy.cuda.alloc_pinned_memory` gives it."""

    def __init__(self, nbytes: int) -> None:
        self.memory = (ctypes.c_char * nbytes)()

    def array(self) -> numpy.ndarray:
        found = numpy.frombuffer(self.memory, dtype=numpy.float64)
        return _Pinned(found, self)


class _Pinned(numpy.ndarray):
    """A numpy array whose base is the pointer; in cupy the pointer itself has the buffer protocol."""

    def __new__(cls, array: Any, owner: Any) -> Any:
        made = array.view(cls)
        made.owner = owner
        return made

    @property
    def base(self) -> Any:
        return self.owner


class _Base:
    def __init__(self, values: numpy.ndarray) -> None:
        self.data = SimpleNamespace(ptr=next(_addresses))
        self.device = Device(_card)
        _memory[self.data.ptr] = values.copy()

    @property
    def values(self) -> numpy.ndarray:
        return _memory[self.data.ptr]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> numpy.ndarray:
        if out is None:
            return self.values.copy()
        out[...] = self.values
        return out

    def set(self, arr: numpy.ndarray, stream: Any = None) -> None:
        if arr.shape != self.values.shape:
            raise ValueError("Shape mismatch")
        self.values[...] = arr

    def item(self) -> Any:
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    def __bool__(self) -> bool:
        return bool(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __add__(self, other: Any) -> Any:
        return ndarray(self.values + (other.values if isinstance(other, ndarray) else other))


class ndarray(_Base):
    __slots__ = ("data", "device")
    __cuda_array_interface__ = {}  # noqa: RUF012


def array(obj: Any, dtype: Any = None, copy: bool = True, *, blocking: bool = False) -> ndarray:
    if isinstance(obj, ndarray):
        return obj if not copy and dtype is None else ndarray(obj.values.astype(dtype or obj.values.dtype))
    if isinstance(obj, (list, tuple)) and obj and isinstance(obj[0], ndarray):
        return ndarray(numpy.stack([one.values for one in obj]))
    return ndarray(numpy.asarray(obj, dtype))


def asarray(a: Any, dtype: Any = None, order: Any = None, *, copy: Any = None, blocking: bool = False) -> ndarray:
    return array(a, dtype, copy=bool(copy), blocking=blocking)


def asnumpy(a: Any, stream: Any = None, order: str = "C", out: Any = None, *, blocking: bool = True) -> numpy.ndarray:
    if isinstance(a, ndarray):
        return a.get(stream=stream, order=order, out=out, blocking=blocking)
    return numpy.asarray(a, order=order)


def copyto(dst: ndarray, src: Any) -> None:
    if isinstance(src, numpy.ndarray) and src.size != 1:
        raise ValueError("non-scalar numpy.ndarray cannot be used for copyto")
    dst.values[...] = src.values if isinstance(src, ndarray) else src


def empty(size: int) -> ndarray:
    return ndarray(numpy.empty(size))


def _memcpy(dst: int, src: int, size: int, kind: int) -> None:
    addresses = [_memory[at].ctypes.data if at in _memory else at for at in (dst, src)]
    ctypes.memmove(*addresses, size)


def _memcpy_async(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    _memcpy(dst, src, size, kind)


def _memcpy_peer(dstPtr: int, dstDevice: int, srcPtr: int, srcDevice: int, size: int) -> None:
    _memcpy(dstPtr, srcPtr, size, 3)


runtime = SimpleNamespace(memcpy=_memcpy, memcpyAsync=_memcpy_async, memcpyPeer=_memcpy_peer)
cuda = SimpleNamespace(runtime=runtime, Device=Device, Stream=Stream)
