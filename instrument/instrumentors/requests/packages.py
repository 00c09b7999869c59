"""Packages that a report or a first profile has something to say about: servers, frameworks, queues, engines."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Package:
    """A package by the name under which it is imported.

    `role` is `web` (its requests are met), `unrouted` (they are met, but not their routes), `server` (it serves apps of
    others), `unmet` (a server whose requests nobody meets), `queue` (a worker of a queue, likewise), `engine` (a model
    server of its own) or `library`. `profile` is the file in `configs/` that is made for it.
    """

    name: str
    role: str
    profile: str = ""


PACKAGES: tuple[Package, ...] = (
    *(
        Package(name, "web")
        for name in ("starlette", "litestar", "flask", "quart", "django", "falcon", "bottle", "aiohttp.web")
    ),
    Package("fastapi", "web", "fastapi.yaml"),
    *(Package(name, "server") for name in ("uvicorn", "hypercorn", "granian", "gunicorn", "waitress", "grpc")),
    *(Package(name, "server") for name in ("gevent.pywsgi", "cheroot.wsgi", "bjoern")),
    *(Package(name, "unrouted") for name in ("blacksheep", "pyramid.router", "cherrypy")),
    *(Package(name, "unmet") for name in ("sanic", "tornado.web", "robyn", "twisted.web.server", "http.server")),
    *(Package(name, "queue") for name in ("celery.worker", "rq.cli", "dramatiq.cli", "arq.worker", "huey.consumer")),
    *(Package(name, "engine", f"{name}.yaml") for name in ("litserve", "mosec", "mlserver", "vllm", "sglang")),
    Package("ray.serve", "engine", "ray-serve.yaml"),
    Package("bentoml", "engine"),
    *(Package(name, "library") for name in ("numpy", "jax", "tensorflow", "keras", "onnxruntime", "cupy", "numba")),
    *(Package(name, "library") for name in ("sklearn", "sentence_transformers", "torch")),
    Package("transformers", "library", "transformers.yaml"),
)


NOTED = frozenset(package.name for package in PACKAGES if package.role in ("unrouted", "unmet", "queue"))
"""Those whose requests are not recorded, or not by their routes."""


OF_ALL = frozenset({"http.server"})
"""Servers that many programs import and do not run."""

REMEDY = "give the function that handles one a rule of `kind: request`"


def imported_packages() -> list[str]:
    """Those that this process has imported."""
    return [package.name for package in PACKAGES if package.name in sys.modules]


def of_role(names: Iterable[str], *roles: str) -> list[str]:
    """The packages among these names that have one of the roles, in the order of `PACKAGES`."""
    found = set(names)
    return [package.name for package in PACKAGES if package.name in found and package.role in roles]


def ready_profiles(names: Iterable[str]) -> list[tuple[str, str]]:
    """Packages among these names for which `configs/` has a profile, with its file. Of a model server's alone, which is
    made of others."""
    found = set(of_role(names, "engine") or names)
    return [(package.name, package.profile) for package in PACKAGES if package.name in found and package.profile]
