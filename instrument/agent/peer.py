"""One connection to the agent: of a process that has joined, or of somebody who asks.

What is sent waits here while the other end does not take it; one that takes nothing for long loses its connection.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Sequence

from instrument.runtime import packets

WAITING_PACKETS = 1024
"""The most that wait for one connection."""

_JOIN = b'{"join":'
"""How such a packet begins."""


class Connection:
    """The agent's end."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setblocking(False)
        self.pid, self.uid = packets.peer_of(sock)
        self._waiting: deque[tuple[packets.Message, list[int]]] = deque()
        self._is_deaf = self.is_broken = False

    def fileno(self) -> int:
        """For selectors."""
        return self.sock.fileno()

    @property
    def is_trusted(self) -> bool:
        """Whether the other end is this user or root; the mode of a folder alone would leave it to the file system."""
        return self.uid in (os.geteuid(), 0)

    @property
    def has_waiting(self) -> bool:
        """Whether anything is still to be sent."""
        return bool(self._waiting)

    def send(self, message: packets.Message, descriptors: Sequence[int] = ()) -> None:
        """Send a packet now, or when there is room for it. Descriptors are copied; raises nothing.

        An end that has closed hears nothing more; what it said before that can still be received.
        """
        if self._is_deaf:
            return
        if len(self._waiting) >= WAITING_PACKETS:
            self.is_broken = True
            return
        try:
            self._waiting.append((message, [os.dup(descriptor) for descriptor in descriptors]))
        except OSError:
            self.is_broken = True
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as there is room."""
        while self._waiting and not self.is_broken:
            message, descriptors = self._waiting[0]
            try:
                packets.send(self.sock, message, descriptors)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self._is_deaf = True
                while len(self._waiting) > 1:
                    self._drop_first()
            except OSError:
                self.is_broken = True
            self._drop_first()

    def _drop_first(self) -> None:
        for descriptor in self._waiting.popleft()[1]:
            os.close(descriptor)

    def is_about_to_join(self) -> bool:
        """Whether the next packet is that of a process that joins."""
        try:
            return self.sock.recv(len(_JOIN), socket.MSG_PEEK) == _JOIN
        except OSError:
            return False

    def receive(self) -> tuple[packets.Message | None, list[int]]:
        """The next packet, None where the other end has closed. Raises `BlockingIOError` and `PacketError`."""
        while True:
            try:
                return packets.receive(self.sock)
            except ConnectionResetError:
                continue  # it closed without having read all; what it said before that still waits
            except BlockingIOError:
                raise
            except OSError:
                return None, []

    def close(self) -> None:
        """Close it, and what waits for it."""
        while self._waiting:
            self._drop_first()
        self.sock.close()
