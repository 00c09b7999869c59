"""Packets between the processes of a run: JSON objects over a Unix socket that keeps them apart, descriptors with them.

Whoever is at the other end may send anything: what is no object of at most `PACKET_BYTES` is refused, and descriptors
that nobody asked for are closed.
"""

from __future__ import annotations

import _socket
import array
import json
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any

PACKET_BYTES = 128 << 10
"""The longest packet; the system's own limit is somewhat above it."""

DESCRIPTORS = 2
"""The most that come with one packet."""

FAMILY, KIND = _socket.AF_UNIX, _socket.SOCK_SEQPACKET

Message = Mapping[str, Any]

_CREDENTIALS = struct.Struct("3i")


class PacketError(ValueError):
    """What came is no packet of ours."""


def send(connection: _socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send one packet, whole. Raises `OSError`: `BlockingIOError` where there is no room for it now."""
    data = json.dumps(message, separators=(",", ":")).encode()
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    connection.sendmsg([data], rights, _socket.MSG_NOSIGNAL)


def receive(connection: _socket.socket) -> tuple[Message | None, list[int]]:
    """The next packet and its descriptors, which are the caller's to close; None where the other end has closed.

    Raises `BlockingIOError` where none has come, another `OSError` for a connection that is broken, and `PacketError`.
    """
    room = _socket.CMSG_SPACE(DESCRIPTORS * array.array("i").itemsize)
    data, rights, flags, _ = connection.recvmsg(PACKET_BYTES, room, _socket.MSG_CMSG_CLOEXEC)
    found = array.array("i")
    for level, kind, value in rights:
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
            found.frombytes(value[: len(value) - len(value) % found.itemsize])
    try:
        if not data and not found:
            return None, []
        return _parsed(data, flags), found.tolist()
    except BaseException:
        for descriptor in found:
            os.close(descriptor)
        raise


def _parsed(data: bytes, flags: int) -> Message:
    if flags & _socket.MSG_TRUNC:
        raise PacketError(f"found a packet of more than {PACKET_BYTES} bytes")
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as problem:
        raise PacketError(f"found a packet that is no JSON: {problem!s:.80}") from None
    if not isinstance(message, dict):
        raise PacketError("found a packet that is no JSON object")
    return message


def peer_of(connection: _socket.socket) -> tuple[int, int]:
    """Number and user of the other end: who connected, or who said last that it listens; -1 for a user not told.

    A number of 0 is one of another namespace.
    """
    try:
        found = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(found)
    except OSError:
        return 0, -1
    return pid, uid
