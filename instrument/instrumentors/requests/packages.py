"""Packages that a report or a first profile has something to say about: servers, frameworks, queues, engines."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from instrument.profile.presets import ENGINES
from instrument.runtime.cheap_start import dataclass


@dataclass(frozen=True, slots=True)
class Package:
    """A package by the name under which it is imported.

    The `role` is `web` (its requests are recorded), `unrouted` (its requests are recorded without their routes),
    `server` (it serves apps of others), `unmet` (a server whose requests are not recorded), `queue` (a worker of a
    queue, without records too), `engine` (a model server of its own) or `library`. The `preset` is made for it.
    """

    name: str
    role: str
    preset: str = ""


PACKAGES: tuple[Package, ...] = (
    *(
        Package(name, "web")
        for name in ("starlette", "litestar", "flask", "quart", "django", "falcon", "bottle", "aiohttp.web")
    ),
    Package("fastapi", "web", "fastapi"),
    *(Package(name, "server") for name in ("uvicorn", "hypercorn", "granian", "gunicorn", "waitress", "grpc")),
    *(Package(name, "server") for name in ("gevent.pywsgi", "cheroot.wsgi", "bjoern")),
    *(Package(name, "unrouted") for name in ("blacksheep", "pyramid.router", "cherrypy")),
    *(Package(name, "unmet") for name in ("sanic", "tornado.web", "robyn", "twisted.web.server", "http.server")),
    *(
        Package(name, "queue")
        for name in ("celery.apps.worker", "rq.cli", "dramatiq.cli", "arq.cli", "huey.bin.huey_consumer")
    ),
    *(Package(name, "engine", preset) for name, preset in ENGINES.items()),
    Package("bentoml", "engine"),
    *(Package(name, "library") for name in ("numpy", "jax", "tensorflow", "keras", "onnxruntime", "cupy", "numba")),
    *(Package(name, "library") for name in ("sklearn", "sentence_transformers", "torch")),
    Package("transformers", "library", "transformers"),
)


OF_ALL = frozenset({"http.server"})
"""Servers that many programs import and do not run."""

REMEDY = "give the function that handles one a rule of `kind: request`"


def imported_packages() -> list[str]:
    """Return the names of the known packages that this process has imported."""
    return [package.name for package in PACKAGES if package.name in sys.modules]


def of_role(names: Iterable[str], *roles: str) -> list[str]:
    """The packages among these names that have one of the roles, in the order of `PACKAGES`."""
    found = set(names)
    return [package.name for package in PACKAGES if package.name in found and package.role in roles]


def presets_for(names: Iterable[str]) -> list[tuple[str, str]]:
    """Packages among these names that a preset is made for, with its name. Of a model server's alone, which is made of
    others."""
    found = set(of_role(names, "engine") or names)
    return [(package.name, package.preset) for package in PACKAGES if package.name in found and package.preset]
