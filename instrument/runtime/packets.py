"""The packets between the processes of a run: JSON objects with descriptors, over a Unix socket (`SOCK_SEQPACKET`).

A sender may send anything. The receiver refuses a packet that is not a JSON object of at most `PACKET_BYTES`, and
closes its descriptors.
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
"""The maximum size of a packet in bytes. The system allows slightly more."""

MOST_DESCRIPTORS = 2
"""The maximum number of descriptors in a packet."""

FAMILY, KIND = _socket.AF_UNIX, _socket.SOCK_SEQPACKET

Message = Mapping[str, Any]

_CREDENTIALS = struct.Struct("3i")


class PacketError(ValueError):
    """An error that says why received data is no valid packet."""


def send(connection: _socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send one complete packet. Raises `OSError`, in particular `BlockingIOError` if the socket is full."""
    data = json.dumps(message, separators=(",", ":")).encode()
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    connection.sendmsg([data], rights, _socket.MSG_NOSIGNAL)


def receive(connection: _socket.socket) -> tuple[Message | None, list[int]]:
    """Return the next message, None if the peer has closed, and its descriptors, which the caller must close.

    Raises `BlockingIOError` if no packet has arrived, another `OSError` for a broken connection, and `PacketError`.
    """
    room = _socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)
    data, rights, flags, _ = connection.recvmsg(PACKET_BYTES, room, _socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, value in rights:
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
            descriptors.frombytes(value[: len(value) - len(value) % descriptors.itemsize])
    try:
        if not data and not descriptors:
            return None, []
        return _parse(data, flags), descriptors.tolist()
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _parse(data: bytes, flags: int) -> Message:
    if flags & _socket.MSG_TRUNC:
        raise PacketError(f"a packet has more than {PACKET_BYTES} bytes")
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as problem:
        raise PacketError(f"a packet is not JSON: {problem!s:.80}") from None
    if not isinstance(message, dict):
        raise PacketError("a packet is not a JSON object")
    return message


def peer_of(connection: _socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the peer.

    The process id is 0 if it is of another namespace, the user id -1 if unknown.
    """
    try:
        credentials = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(credentials)
    except OSError:
        return 0, -1
    return pid, uid
