"""Proxies of the environment, by which spans reach a collector as those of OpenTelemetry's SDK do."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from otlp_collectors import collecting, take
from otlp_spans import ORIGIN, SECOND, offer, tree
from requests.utils import get_environ_proxies, select_proxy

from instrument.otlp import senders
from instrument.otlp.delivery import Delivery, Exporter
from instrument.otlp.sockets import find_proxy
from instrument.profile.model import Otlp


@pytest.fixture(autouse=True)
def no_proxies_and_no_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(senders, "_FIRST_BACK_OFF_S", 3600)  # longer than the time of a request: it is tried once


def deliver(settings: Otlp) -> Delivery:
    exporter = Exporter(settings, ORIGIN, dict)
    exporter.start()
    try:
        offer(exporter, tree(2))
        return exporter.flush(60 * SECOND)
    finally:
        exporter.stop(SECOND)


BY = "http://proxy:3128"
CASES = {
    "none": {},
    "by scheme": {"HTTP_PROXY": BY},
    "in small letters": {"http_proxy": BY},
    "of the other scheme": {"HTTPS_PROXY": BY},
    "for all": {"ALL_PROXY": BY},
    "not for this host": {"HTTP_PROXY": BY, "NO_PROXY": "localhost, collector.corp"},
    "not for its domain": {"HTTP_PROXY": BY, "no_proxy": ".corp"},
    "not for its port": {"HTTP_PROXY": BY, "NO_PROXY": "collector.corp:4318"},
    "for another port": {"HTTP_PROXY": BY, "NO_PROXY": "collector.corp:1"},
    "for nobody": {"HTTP_PROXY": BY, "NO_PROXY": "*"},
    "not for a network": {"HTTP_PROXY": BY, "NO_PROXY": "10.0.0.0/8,192.168.1.2"},
}


@pytest.mark.parametrize("environ", CASES.values(), ids=CASES)
@pytest.mark.parametrize("host", ["collector.corp", "10.1.2.3", "192.168.1.2", "localhost"])
def test_a_collector_is_reached_by_the_proxy_by_which_requests_reaches_it(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], host: str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    url = f"http://{host}:4318/v1/traces"
    found = find_proxy(url)
    assert (None if found is None else found.address) == select_proxy(url, get_environ_proxies(url))


def test_spans_go_to_a_proxy_which_alone_looks_up_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting(take) as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://user:pass%40word@127.0.0.1:{proxy.server_port}")
        assert deliver(Otlp("http://collector.invalid:4318/v1/traces")).exported == 2
    assert proxy.headers[0]["Host"] == "collector.invalid:4318"
    assert proxy.headers[0]["Proxy-Authorization"] == "Basic dXNlcjpwYXNzQHdvcmQ="


def test_a_proxy_that_is_not_there_is_named_with_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "127.0.0.1:9")
    reason = deliver(Otlp("http://collector.invalid/v1/traces")).reason
    assert reason.endswith("Connection refused, by way of the proxy http://127.0.0.1:9")


@pytest.mark.parametrize("text", ["socks5://127.0.0.1:1", "http://127.0.0.1:port", "https://127.0.0.1:1"])
def test_a_proxy_of_another_form_is_named_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", text)
    with collecting(take) as collector:
        assert deliver(collector.settings).exported == 2
    assert f"HTTP_PROXY: found '{text}'" in caplog.text


@contextmanager
def tunnelling(port: int, answer: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """A proxy that opens tunnels to one port: its own port, and what it was asked."""
    asked: list[bytes] = []

    def splice(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):  # the other direction may have closed both
            while data := source.recv(1 << 16):
                target.sendall(data)
        target.close()

    def serve() -> None:
        client, _ = listener.accept()
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += client.recv(1)
        asked.append(head)
        client.sendall(answer + b"\r\nX: y\r\n\r\n")
        if b"200" not in answer:
            client.close()
            return
        server = socket.create_connection(("127.0.0.1", port))
        threading.Thread(target=splice, args=(server, client), daemon=True).start()
        splice(client, server)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1], asked


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which makes the certificate, is not installed")
def test_https_goes_through_a_tunnel_of_the_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=collector.invalid"
    files = ["-addext", "subjectAltName=DNS:collector.invalid", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*make.split(), *files], check=True, capture_output=True)
    settings = Otlp("https://collector.invalid/v1/traces", certificate=str(certificate), timeout_ns=30 * SECOND)
    with collecting(take) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        with tunnelling(server.server_port, b"HTTP/1.1 200 Connection established") as (port, asked):
            monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
            assert deliver(settings).exported == 2
        assert asked == [b"CONNECT collector.invalid:443 HTTP/1.1\r\nHost: collector.invalid:443\r\n\r\n"]
    with tunnelling(0, b"HTTP/1.0 407 Proxy Authentication Required") as (port, _):
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
        reason = deliver(settings).reason
    assert "407 Proxy Authentication Required, by way of the proxy" in reason
