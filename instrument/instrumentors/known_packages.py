"""List the packages that each key of a profile, such as `layers` or `requests`, can instrument.

The rules under one key are a family. A family's code is loaded only when the service imports a package of the family.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from instrument.profile.model import Profile
from instrument.profile.presets import ENGINES
from instrument.runtime.lazy_imports import NamedTuple, replace

_PACKAGES = {
    "web": "starlette litestar flask quart django falcon bottle blacksheep aiohttp.web tornado.web fastapi",
    "server": "uvicorn hypercorn daphne.server granian gunicorn waitress grpc grpclib.server gevent.pywsgi "
    "cheroot.wsgi bjoern",
    "unrouted": "pyramid.router cherrypy",
    "unmet": "robyn twisted.web.server",
    "queue": "huey.bin.huey_consumer",
    "engine": " ".join((*ENGINES, "bentoml")),
    "library": "numpy jax tensorflow keras onnxruntime cupy numba sklearn sentence_transformers torch transformers",
}
PACKAGES: Mapping[str, tuple[str, ...]] = {role: tuple(names.split()) for role, names in _PACKAGES.items()}
"""The import names of known packages, by role.

- `web`: web frameworks with routes
- `unrouted`: web frameworks without routes
- `server`: servers that run an app of another package
- `engine`: model servers
- `unmet`: servers that are not recorded
- `queue`: job queues that are not recorded
- `library`: machine learning packages
"""


class Family(NamedTuple):
    """The class that instruments one key of a profile, and the packages that the key's rules can select.

    Packages of the standard library are left out, because a service that uses them also imports other packages.
    """

    module: str
    name: str
    packages: frozenset[str]


_SERVED = [name for role in ("web", "server", "unrouted", "unmet", "queue") for name in PACKAGES[role]]
"""The known packages that serve requests or jobs."""

_FAMILIES = {
    "functions": ("function_rules", "Functions", ""),  # its rules name their packages
    # After functions: the span of a rule for a server's own function is within the request.
    "requests": (
        *("requests.servers_and_routers", "Requests"),
        "http.server socketserver wsgiref werkzeug channels sanic websockets ray litserve mosec bentoml gradio celery "
        f"rq dramatiq arq taskiq faststream {' '.join(name.partition('.')[0] for name in _SERVED)}",
    ),
    "layers": ("layers", "Layers", "torch"),
    "copies": ("copies", "Copies", "torch numpy cupy numba cuda jax onnxruntime"),
    "loaders": ("loaders", "Loaders", "torch"),
    "phases": ("training", "Phases", "torch"),
    "comm": ("training", "Comm", "torch"),
    "frameworks": ("framework_calls", "Frameworks", "jax keras onnxruntime sentence_transformers sklearn transformers"),
    "logs": ("requests.propagation", "LogRecords", "logging structlog"),
    "startup": ("startup", "StartupWatch", "torch safetensors transformers onnxruntime keras joblib"),
}
FAMILIES: Mapping[str, Family] = {
    key: Family(f"instrument.instrumentors.{module}", name, frozenset(packages.split()))
    for key, (module, name, packages) in _FAMILIES.items()
}
"""The class and the packages for each top-level key of a profile, in the order of attachment."""

KEEPING = ("functions", "requests", "layers")
"""The profile keys whose unchanged rules keep their probes when the profile changes."""


def selectable_packages(profile: Profile, key: str) -> frozenset[str] | None:
    if key == "functions":
        from instrument.runtime.main_module import MAINS

        texts = (text.lstrip("!") for rule in profile.functions for text in rule.match)
        package_names = {text.partition(":")[0].partition(".")[0] for text in texts}
        is_anywhere = any("*" in name for name in package_names) or package_names.intersection(MAINS)
        return None if is_anywhere else frozenset(package_names)
    packages = FAMILIES[key].packages
    if key == "copies" and not any("h2h" in rule.directions for rule in profile.copies):
        packages -= {"numpy"}
    return packages


def packages_to_await(profile: Profile) -> frozenset[str] | None:
    awaited_packages: set[str] = set()
    for key in FAMILIES.keys() - {"logs"}:  # which record nothing by themselves
        packages = selectable_packages(profile, key) if rules_under_key(profile, key) else frozenset()
        if packages is None:
            return None
        awaited_packages |= packages
    engines = ENGINES if profile.engines == "auto" else ()
    return frozenset(awaited_packages.union(name.partition(".")[0] for name in engines))


def rules_under_key(profile: Profile, key: str) -> tuple[Any, ...]:
    rules = getattr(profile, key)
    if key == "requests":
        return tuple(replace(rule, blocked_ns=profile.limits.blocked_ns) for rule in rules)
    return rules if isinstance(rules, tuple) else () if rules == "off" else (rules,)


MADE_FOR: Mapping[str, str] = {"fastapi": "fastapi", **ENGINES, "transformers": "transformers"}
"""The preset for each package that has one."""


def imported_packages() -> list[str]:
    return filter_packages_by_role(sys.modules, *PACKAGES)


def filter_packages_by_role(names: Iterable[str], *roles: str) -> list[str]:
    name_set = set(names)
    return [name for role, packages in PACKAGES.items() if role in roles for name in packages if name in name_set]


def find_presets(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return each package that has a preset, with the preset. If a model server is among the names, only model servers
    count."""
    served_packages = set(filter_packages_by_role(names, "engine") or names)
    return [(name, preset) for name, preset in MADE_FOR.items() if name in served_packages]
