"""Packages that reports and first profiles name: servers, web frameworks, queues, engines and libraries."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from instrument.profile.presets import ENGINES

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "web": ("starlette", "litestar", "flask", "quart", "django", "falcon", "bottle", "aiohttp.web", "fastapi"),
    "server": (
        *("uvicorn", "hypercorn", "granian", "gunicorn", "waitress", "grpc"),
        *("gevent.pywsgi", "cheroot.wsgi", "bjoern"),
    ),
    "unrouted": ("blacksheep", "pyramid.router", "cherrypy"),
    "unmet": ("sanic", "tornado.web", "robyn", "twisted.web.server", "http.server"),
    "queue": ("celery.apps.worker", "rq.cli", "dramatiq.cli", "arq.cli", "huey.bin.huey_consumer"),
    "engine": (*ENGINES, "bentoml"),
    "library": (
        *("numpy", "jax", "tensorflow", "keras", "onnxruntime", "cupy", "numba"),
        *("sklearn", "sentence_transformers", "torch", "transformers"),
    ),
}
"""The packages of each role, by the names under which they are imported.

The requests of `web` are recorded, those of `unrouted` without their routes. Requests of `unmet` and jobs of `queue`
are not recorded. A `server` serves other packages' apps, an `engine` is a complete model server.
"""

MADE_FOR: Mapping[str, str] = {"fastapi": "fastapi", **ENGINES, "transformers": "transformers"}
"""The preset for each package that has one."""

OF_ALL = frozenset({"http.server"})
"""Servers that many programs import without running them."""

REMEDY = "give the function that handles one a rule of `kind: request`"


def imported_packages() -> list[str]:
    """Return the names of the known packages that this process has imported."""
    return of_role(sys.modules, *PACKAGES)


def of_role(names: Iterable[str], *roles: str) -> list[str]:
    """Return the names that are packages of one of the roles, in the order of `PACKAGES`."""
    name_set = set(names)
    return [name for role, packages in PACKAGES.items() if role in roles for name in packages if name in name_set]


def presets_for(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the names that are packages with a preset, and the preset. If one is a model server, return it alone."""
    served_packages = set(of_role(names, "engine") or names)
    return [(name, preset) for name, preset in MADE_FOR.items() if name in served_packages]
