"""Publishes this process's resource attributes in a named memory mapping, which profilers find in `/proc/PID/maps`.

OpenTelemetry's OTEP 4719 defines this process context. Only one SDK of a process may publish one.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instrument.runtime.lazy_imports import LazyModule
from instrument.runtime.unpatched import Lock

if TYPE_CHECKING:
    import ctypes
else:
    ctypes = LazyModule("ctypes")

NAME = b"OTEL_CTX"
VERSION = 2
HEADER = struct.Struct("<8sIIQQ")
"""The header's fields: name, version, payload length, time of publication, and payload address.

The name is written last. The time is on the boot-time clock, and 0 while the payload changes.
"""

PAYLOAD_LIMIT = 64 << 10
"""The maximum size in bytes of a payload that readers accept."""

_PUBLISHED_AT = 16
_PAGE_BYTES = 4096
_READ_WRITE, _PRIVATE, _ANONYMOUS, _DONTFORK = 3, 2, 0x20, 10
_SET_VMA, _ANON_NAME = 0x53564D41, 0
_NOEXEC_SEAL = 8
_MAP_FAILED = 2 * sys.maxsize + 1

_lock = Lock()


class _Published:
    """A published context: the address of its header, and the buffer with its payload."""

    def __init__(self, address: int) -> None:
        self.pid = os.getpid()
        self.address = address
        self.payload: Any = None


_published: _Published | None = None


def publish_context(payload: bytes) -> str:
    """Publish an encoded `ProcessContext` in place of this process's earlier context. Return "", or the reason for a
    failure. Does nothing if another SDK in the process has published a context."""
    global _published
    if len(payload) > PAYLOAD_LIMIT:
        return f"a process context of {len(payload)} bytes, of at most {PAYLOAD_LIMIT}"
    with _lock:
        try:
            libc = _load_libc()
            mapping = _published if _published is not None and _published.pid == os.getpid() else None
            if mapping is None:
                if _is_context_published():
                    return ""
                mapping = _published = _Published(_map_page(libc))
            _write_context(mapping, payload)
            # Some readers hook on the call: it is made also where a kernel names no memory.
            libc.prctl(_SET_VMA, _ANON_NAME, mapping.address, _PAGE_BYTES, NAME)
        except (OSError, AttributeError) as problem:
            return str(problem)
    return ""


def withdraw_context() -> None:
    global _published
    with _lock:
        context, _published = _published, None
        if context is not None and context.pid == os.getpid():
            with suppress(OSError, AttributeError):
                _load_libc().munmap(context.address, _PAGE_BYTES)


def after_fork_in_child() -> None:
    """Forget the parent's context, and replace the lock, which a thread of the parent may have locked."""
    global _lock, _published
    _lock, _published = Lock(), None


def _write_context(context: _Published, payload: bytes) -> None:
    """Write payload and header in an order that is safe for readers. At any time the context is complete, or marked as
    changing."""
    before, context.payload = context.payload, ctypes.create_string_buffer(payload, len(payload))
    address, at = ctypes.addressof(context.payload), context.address
    # A lock that is taken and released is a barrier between the writes before and after it.
    _write_memory(at + _PUBLISHED_AT, bytes(8))
    with Lock():
        header = HEADER.pack(NAME, VERSION, len(payload), 0, address)
        _write_memory(at + 8, header[8:_PUBLISHED_AT])
        _write_memory(at + 24, header[24:])
    with Lock():
        _write_memory(at + _PUBLISHED_AT, max(time.clock_gettime_ns(time.CLOCK_BOOTTIME), 1).to_bytes(8, "little"))
    if before is None:
        with Lock():
            _write_memory(at, NAME)


def _write_memory(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


def _map_page(libc: ctypes.CDLL) -> int:
    """Map a memory page for the header. Forked children do not inherit the page. Raises `OSError`."""
    try:
        fd = _create_memfd()
    except (OSError, AttributeError):
        fd = -1
    try:
        flags = _PRIVATE if fd >= 0 else _PRIVATE | _ANONYMOUS
        address = libc.mmap(None, _PAGE_BYTES, _READ_WRITE, flags, fd, 0)
    finally:
        if fd >= 0:
            os.close(fd)
    if address in (None, _MAP_FAILED):
        raise OSError(ctypes.get_errno(), "cannot map a page for the process context")
    if libc.madvise(address, _PAGE_BYTES, _DONTFORK):
        number = ctypes.get_errno()
        libc.munmap(address, _PAGE_BYTES)
        raise OSError(number, "cannot keep the process context from forked children")
    return int(address)


def _create_memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(NAME.decode(), flags | _NOEXEC_SEAL)
    except OSError:  # a kernel before 6.3
        fd = os.memfd_create(NAME.decode(), flags)
    try:
        os.ftruncate(fd, _PAGE_BYTES)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _is_context_published() -> bool:
    with suppress(OSError):
        return any(NAME in line for line in Path("/proc/self/maps").read_bytes().splitlines())
    return False


def _load_libc() -> ctypes.CDLL:
    """Load the C library, with the types of the needed functions. Raises `AttributeError` if a function is missing."""
    libc = ctypes.CDLL(None, use_errno=True)
    size, address, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = [address, size, number, number, number, ctypes.c_long], address
    libc.munmap.argtypes = [address, size]
    libc.madvise.argtypes = [address, size, number]
    libc.prctl.argtypes = [number, ctypes.c_ulong, address, size, ctypes.c_char_p]
    return libc
