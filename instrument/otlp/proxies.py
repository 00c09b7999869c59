"""The proxy by which a collector is reached, as the environment names it for all HTTP clients."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from instrument.profile.document import without_secrets
from instrument.runtime.faults import logger


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy that speaks HTTP: `told` is its address without secrets, `variable` the variable that names it."""

    host: str
    port: int
    told: str
    variable: str
    authorization: str = field(default="", repr=False)
    """The value of the header `Proxy-Authorization`, "" for none."""


def proxy_for(endpoint: str) -> Proxy | None:
    """Return the proxy for a collector, None for none.

    `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY` mean what they mean to OpenTelemetry's SDK (`requests`).
    """
    url = urlsplit(endpoint)
    names = {name.lower(): name for name, value in os.environ.items() if name.lower().endswith("_proxy") and value}
    variable = names.get(f"{url.scheme}_proxy") or names.get("all_proxy")
    if variable is None:
        return None
    from urllib.request import getproxies, proxy_bypass  # 20 ms, for those that have a proxy

    found = getproxies()
    text = found.get(url.scheme) or found.get("all", "")
    host = url.hostname or ""
    if not text or proxy_bypass(url.netloc.rpartition("@")[2]) or _is_in_network(host, found.get("no", "")):
        return None
    proxy = urlsplit(text if "://" in text else f"http://{text}")
    try:
        port = proxy.port or 80
    except ValueError:
        port = 0
    if proxy.scheme != "http" or not proxy.hostname or not port:
        shown = without_secrets(text)
        logger.warning("%s: found %r; allowed: http://host:port; the collector is asked without it", variable, shown)
        return None
    authorization = ""
    if proxy.username is not None:
        from base64 import b64encode

        pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
        authorization = f"Basic {b64encode(pair.encode()).decode()}"
    return Proxy(proxy.hostname, port, f"http://{proxy.hostname}:{port}", variable, authorization)


def _is_in_network(host: str, unproxied: str) -> bool:
    """Return whether an address is in one of the networks that `NO_PROXY` lists, such as 10.0.0.0/8."""
    from ipaddress import ip_address, ip_network

    for one in unproxied.split(","):
        try:
            if "/" in one and ip_address(host) in ip_network(one.strip(), strict=False):
                return True
        except ValueError:
            continue  # a name, or no network
    return False
