"""Opens TCP and TLS connections to a collector, also through a proxy, on sockets that gevent and eventlet do not patch.

TLS encrypts in memory (`ssl.SSLObject`), because `ssl.SSLSocket` does not work on our threads in a patched service.
"""

from __future__ import annotations

import io
import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from instrument.profile.document import without_secrets
from instrument.runtime.faults import logger
from instrument.runtime.lazy_imports import dataclass, field
from instrument.runtime.unpatched import connect

if TYPE_CHECKING:
    import ssl

_CHUNK = 1 << 16


class TcpConnection:
    """A TCP connection for many requests, through the proxy `tunnel` if there is one. One thread uses the connection;
    any thread may call `abort`."""

    def __init__(self, host: str, port: int, left_s: Callable[[], float], tunnel: Proxy | None = None) -> None:
        first = (host, port) if tunnel is None else (tunnel.host, tunnel.port)
        self._sock = connect(*first, require_time_left(left_s()))
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tunnel is not None:
                self._open_tunnel(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", tunnel, left_s)
        except BaseException:
            self.close()
            raise

    def _open_tunnel(self, place: str, proxy: Proxy, left_s: Callable[[], float]) -> None:
        lines = [f"CONNECT {place} HTTP/1.1", f"Host: {place}"]
        lines += [f"Proxy-Authorization: {proxy.authorization}"] * bool(proxy.authorization)
        TcpConnection.send(self, "\r\n".join([*lines, "", ""]).encode(), left_s)
        answer, byte = b"", bytearray(1)  # what follows the answer is the collector's
        while not answer.endswith(b"\r\n\r\n"):
            if len(answer) > _CHUNK or not TcpConnection.receive_into(self, byte, left_s):
                raise ConnectionError("no answer of HTTP")
            answer += byte
        line = answer.partition(b"\r\n")[0].decode("latin-1")
        if not re.match(r"HTTP/1\.\d 2\d\d", line):
            raise ConnectionError(line[:100])

    def send(self, data: bytes, left_s: Callable[[], float]) -> None:
        """Send all of the data. Raises `OSError`, or `TimeoutError` when no time is left."""
        self._sock.settimeout(require_time_left(left_s()))
        self._sock.sendall(data)

    def receive_into(self, buffer: Any, left_s: Callable[[], float]) -> int:
        """Receive at least one byte into a buffer. Return the number of bytes, 0 at the end of the data."""
        self._sock.settimeout(require_time_left(left_s()))
        return self._sock.recv_into(buffer)

    def abort(self) -> None:
        """Wake the thread that waits on the connection. Another thread calls this."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was quicker

    def close(self) -> None:
        self._sock.close()


class TlsConnection(TcpConnection):
    """A `TcpConnection` encrypted by TLS with the settings in `context`."""

    def __init__(
        self, host: str, port: int, left_s: Callable[[], float], context: ssl.SSLContext, tunnel: Proxy | None = None
    ) -> None:
        import ssl

        super().__init__(host, port, left_s, tunnel)
        self._want_read = ssl.SSLWantReadError
        self._end = ssl.SSLZeroReturnError, ssl.SSLEOFError
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        try:
            self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
            self._retry_tls_call(self._tls.do_handshake, left_s)
        except BaseException:
            self.close()
            raise

    def _retry_tls_call(self, step: Callable[[], Any], left_s: Callable[[], float]) -> Any:
        while True:
            try:
                result = step()
            except self._want_read:
                self._send_pending_bytes(left_s)
                data = bytearray(_CHUNK)
                size = super().receive_into(data, left_s)
                if size:
                    self._incoming.write(memoryview(data)[:size])
                else:
                    self._incoming.write_eof()
            except OSError:
                with suppress(OSError):
                    self._send_pending_bytes(left_s)  # the alert: or the other side would wait for more
                raise
            else:
                self._send_pending_bytes(left_s)
                return result

    def _send_pending_bytes(self, left_s: Callable[[], float]) -> None:
        if self._outgoing.pending:
            super().send(self._outgoing.read(), left_s)

    def send(self, data: bytes, left_s: Callable[[], float]) -> None:
        while data:
            data = data[self._retry_tls_call(partial(self._tls.write, data[:_CHUNK]), left_s) :]

    def receive_into(self, buffer: Any, left_s: Callable[[], float]) -> int:
        try:
            return int(self._retry_tls_call(partial(self._tls.read, len(buffer), buffer), left_s))
        except self._end:
            return 0


class Timed(io.RawIOBase):
    """Reads a connection as a file, within one time limit for all data. A socket's own time-out starts again with every
    byte."""

    def __init__(self, connection: TcpConnection, left_s: Callable[[], float]) -> None:
        self._connection = connection
        self._left_s = left_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._connection.receive_into(buffer, self._left_s)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)


def require_time_left(seconds: float) -> float:
    if seconds <= 0:
        raise TimeoutError("no answer in time")
    return seconds


def tls_context(trusted: str | None, certificate: str | None, key: str | None) -> ssl.SSLContext:
    """Return a TLS context that trusts the system's certificates, or those in the file `trusted`. `certificate` and
    `key` are files that identify this process to the collector."""
    import ssl

    # The class that `ssl` defines, also where a library has replaced `ssl.SSLContext`. Made for a client, it checks
    # certificates and names. Its properties look up the replaced name, so none of them is used.
    plain = next(base for base in ssl.SSLContext.__mro__ if base.__module__ == "ssl")
    tls: ssl.SSLContext = plain(ssl.PROTOCOL_TLS_CLIENT)
    if trusted is None:
        tls.load_default_certs()
    else:
        tls.load_verify_locations(trusted)
    if certificate is not None:
        tls.load_cert_chain(certificate, key)
    return tls


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy. `address` is the URL without its password, and `variable` the environment variable that has the
    URL."""

    host: str
    port: int
    address: str
    variable: str
    authorization: str = field(default="", repr=False)
    """The value of the header `Proxy-Authorization`, "" for none."""


def find_proxy(endpoint: str) -> Proxy | None:
    """Return the proxy for a collector, or None. The environment variables are those of the package `requests`."""
    url = urlsplit(endpoint)
    names = {name.lower(): name for name, value in os.environ.items() if name.lower().endswith("_proxy") and value}
    variable = names.get(f"{url.scheme}_proxy") or names.get("all_proxy")
    if variable is None:
        return None
    from urllib.request import getproxies, proxy_bypass  # 20 ms, for those that have a proxy

    proxies = getproxies()
    text = proxies.get(url.scheme) or proxies.get("all", "")
    host = url.hostname or ""
    if not text or proxy_bypass(url.netloc.rpartition("@")[2]) or _is_in_network(host, proxies.get("no", "")):
        return None
    proxy = urlsplit(text if "://" in text else f"http://{text}")
    try:
        port = proxy.port or 80
    except ValueError:
        port = 0
    if proxy.scheme != "http" or not proxy.hostname or not port:
        shown = without_secrets(text)
        logger.warning("%s: found %r; allowed: http://host:port; spans are sent without the proxy", variable, shown)
        return None
    authorization = ""
    if proxy.username is not None:
        from base64 import b64encode

        pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
        authorization = f"Basic {b64encode(pair.encode()).decode()}"
    return Proxy(proxy.hostname, port, f"http://{proxy.hostname}:{port}", variable, authorization)


def _is_in_network(host: str, unproxied: str) -> bool:
    """Return True if an address is in one of the networks that `NO_PROXY` lists, such as 10.0.0.0/8."""
    from ipaddress import ip_address, ip_network

    for network in unproxied.split(","):
        try:
            if "/" in network and ip_address(host) in ip_network(network.strip(), strict=False):
                return True
        except ValueError:
            continue  # a name, or no network
    return False
