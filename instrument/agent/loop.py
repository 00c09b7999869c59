"""The event loop of the agent, which serves all connections, descriptors and timers on one thread.

Packets that cannot be sent at once wait in a queue per connection. The loop closes a connection whose queue overflows,
or that sends a malformed packet.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from instrument.runtime import agent_socket
from instrument.runtime.lazy_imports import dataclass

MOST_WAITING_PACKETS = 1024
"""The maximum number of unsent packets per connection. A connection with more is closed."""


class Connection:
    """The agent's end of the connection to a process."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setblocking(False)
        self.pid, self.uid = agent_socket.read_peer_ids(sock)
        self._waiting: deque[tuple[agent_socket.Message, list[int]]] = deque()
        self._is_deaf = self.is_broken = False

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def has_waiting_packets(self) -> bool:
        return bool(self._waiting)

    def send(self, message: agent_socket.Message, descriptors: Sequence[int] = ()) -> None:
        """Send a packet, or queue it while the socket is full. Raises nothing.

        The queue has copies of the descriptors. If the other end is closed, the packet is dropped.
        """
        if self._is_deaf:
            return
        if len(self._waiting) >= MOST_WAITING_PACKETS:
            self.is_broken = True
            return
        try:
            self._waiting.append((message, [os.dup(descriptor) for descriptor in descriptors]))
        except OSError:
            self.is_broken = True
        self.flush()

    def flush(self) -> None:
        while self._waiting and not self.is_broken:
            message, descriptors = self._waiting[0]
            try:
                agent_socket.send(self.sock, message, descriptors)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self._is_deaf = True
                while len(self._waiting) > 1:
                    self._drop_first_packet()
            except OSError:
                self.is_broken = True
            self._drop_first_packet()

    def _drop_first_packet(self) -> None:
        for descriptor in self._waiting.popleft()[1]:
            os.close(descriptor)

    def receive(self) -> tuple[agent_socket.Message | None, list[int]]:
        """Return the next packet, or None if the other end is closed. Raises `BlockingIOError` if no packet has
        arrived, and `PacketError` for an invalid packet."""
        while True:
            try:
                return agent_socket.receive(self.sock)
            except ConnectionResetError:
                continue  # it closed without having read all; what it said before that still waits
            except BlockingIOError:
                raise
            except OSError:
                return None, []

    def close(self) -> None:
        while self._waiting:
            self._drop_first_packet()
        self.sock.close()


MOST_CONNECTIONS = 2048
"""The maximum number of open connections of an agent. It closes further ones at once."""

MOST_PACKETS_PER_TURN = 64
"""The maximum number of packets read from one connection before the loop reads from other connections."""

ACCEPT_PAUSE_S = 0.2
"""Seconds for which the agent accepts no connection after it has run out of file descriptors."""

FAULT_PAUSE_S = 0.01
"""Seconds that the loop sleeps after a fault, so that a repeating fault does not use up a processor."""


@dataclass(eq=False)
class EventLoop:
    """The event loop of an agent.

    - `_listener`: the socket at which processes connect
    - `_heard`: handles a packet. It returns the received descriptors that must remain open
    - `_dropped`: called with each connection that has ended
    - `_says`: called with a message on the first fault
    """

    _listener: socket.socket
    _heard: Callable[[Connection, agent_socket.Message, list[int]], list[int]]
    _dropped: Callable[[Connection], object]
    _says: Callable[[str], object] | None

    def __post_init__(self) -> None:
        self._path = Path(os.fsdecode(self._listener.getsockname()))
        self._identity = agent_socket.socket_identity(self._path)
        self.selector = selectors.DefaultSelector()
        self._connections: set[Connection] = set()
        self._silent: set[Connection] = set()
        """Connections that have not sent a packet yet."""
        self._timers: list[tuple[float, Callable[[], object]]] = []
        self.faults = self.refused = 0
        self.is_replaced = False
        """True once another agent's socket has this one's path, or the run's folder is gone. This agent then stops."""
        self._listen()

    def run_once(self) -> None:
        now = time.monotonic()
        due = [timer for timer in self._timers if timer[0] <= now]
        self._timers = [timer for timer in self._timers if timer[0] > now]
        for _, action in due:
            self.attempt(action)
        left_s = min((at for at, _ in self._timers), default=now + 3600.0) - now
        ready = self.selector.select(0.0 if due else max(left_s, 0.0))
        now_there = agent_socket.socket_identity(self._path)
        if now_there != self._identity and (now_there is not None or not self._path.parent.exists()):
            self.is_replaced = True
            return
        for key, events in ready:
            if isinstance(key.fileobj, Connection):
                self.attempt(partial(self._handle_events, key.fileobj, events))
            elif key.fd in self.selector.get_map():
                self.attempt(partial(key.data, key.fd))

    def attempt(self, action: Callable[[], object]) -> None:
        """Call an action. An exception is counted, and the first one is printed."""
        try:
            action()
        except Exception as fault:
            time.sleep(FAULT_PAUSE_S)
            self.faults += 1
            if self.faults == 1 and self._says is not None:
                self._says(f"instrument: a fault of the agent itself, later ones are only counted: {fault!r:.500}")

    def call_later(self, wait_s: float, action: Callable[[], object]) -> None:
        self._timers.append((time.monotonic() + wait_s, action))

    def drop_connections(self) -> None:
        for connection in list(self._connections):
            self.drop_connection(connection)

    def close(self) -> None:
        """Stop listening. The caller must close the connections first."""
        self.selector.close()
        self._listener.close()

    # ---------------------------------------------------------------- connections

    def is_open(self, connection: Connection) -> bool:
        return connection in self._connections

    def _listen(self) -> None:
        self.selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self, _: int) -> None:
        while True:
            try:
                sock, _address = self._listener.accept()
            except OSError as problem:  # there is no other one, or it went away again
                if problem.errno in (errno.EMFILE, errno.ENFILE) and self._listener in self.selector.get_map():
                    self.selector.unregister(self._listener)
                    self.call_later(ACCEPT_PAUSE_S, self._listen)
                return
            connection = Connection(sock)
            is_trusted = connection.uid in (os.geteuid(), 0)  # modes of folders depend on the file system
            if not is_trusted or len(self._connections) >= MOST_CONNECTIONS:
                connection.close()
                continue
            self._silent.add(connection)
            self.add_connection(connection)

    def add_connection(self, connection: Connection) -> None:
        """Serve a connection that the agent itself has made, such as the connection to a child."""
        self._connections.add(connection)
        self.selector.register(connection, selectors.EVENT_READ)

    def _handle_first_packets(self) -> None:
        """Handle the first packet of each new connection. A process joins by this packet, and later packets may refer
        to the process."""
        self._accept(0)
        for connection in list(self._silent):
            if connection in self._silent:
                self._handle_packet(connection)
                self.watch_connection(connection)

    def _handle_events(self, connection: Connection, events: int) -> None:
        if connection not in self._connections:
            return  # dropped in this very turn
        if events & selectors.EVENT_WRITE:
            connection.flush()
        if events & selectors.EVENT_READ:
            self.handle_packets(connection)
        self.watch_connection(connection)

    def handle_packets(self, connection: Connection, *, is_last: bool = False) -> None:
        """Handle the waiting packets of a connection. At most `MOST_PACKETS_PER_TURN` are handled unless `is_last`."""
        count = 0
        while (is_last or count < MOST_PACKETS_PER_TURN) and self._handle_packet(connection):
            count += 1

    def _handle_packet(self, connection: Connection) -> bool:
        try:
            message, descriptors = connection.receive()
        except BlockingIOError:
            return False
        except agent_socket.PacketError:
            self.drop_connection(connection)
            return False
        self._silent.discard(connection)
        if message is None:
            self.drop_connection(connection)
            return False
        if "join" not in message:
            self._handle_first_packets()
        try:
            kept_descriptors = self._heard(connection, message, descriptors)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, OSError) as problem:
            kept_descriptors = []
            connection.is_broken = True  # it is JSON, and says nothing that we know, or the fault is ours
            self.refused += 1
            if self.refused == 1 and self._says is not None:
                words = f"later ones are only counted: {type(problem).__name__}: {problem!s:.200}"
                self._says(f"instrument: the agent could not take a message of a process; {words}")
        for descriptor in descriptors:
            if descriptor not in kept_descriptors:
                os.close(descriptor)
        if connection.is_broken:
            self.drop_connection(connection)
        return not connection.is_broken

    def watch_connection(self, connection: Connection) -> None:
        """Watch a connection for packets. While the connection has queued packets, also watch for room in the socket.
        Drop a broken connection."""
        if connection not in self._connections:
            return
        if connection.is_broken:
            self.drop_connection(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_waiting_packets else 0)
        if self.selector.get_key(connection).events != events:
            self.selector.modify(connection, events)

    def send(self, connection: Connection, message: agent_socket.Message, descriptors: list[int] | None = None) -> None:
        if connection in self._connections:
            connection.send(message, descriptors or [])
            self.watch_connection(connection)

    def drop_connection(self, connection: Connection) -> None:
        if connection in self._connections:
            self._connections.discard(connection)
            self._silent.discard(connection)
            self.selector.unregister(connection)
            connection.close()
            self._dropped(connection)
