"""Packages that a report or a first profile has something to say about: servers, frameworks, queues, engines."""

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

The requests of `web` are recorded, those of `unrouted` without their routes, those of `unmet` and the jobs of
`queue` not at all. A `server` has apps of others, an `engine` is a model server of its own.
"""

MADE_FOR: Mapping[str, str] = {"fastapi": "fastapi", **ENGINES, "transformers": "transformers"}
"""The presets that are made for packages."""

OF_ALL = frozenset({"http.server"})
"""Servers that many programs import and do not run."""

REMEDY = "give the function that handles one a rule of `kind: request`"


def imported_packages() -> list[str]:
    """Return the names of the known packages that this process has imported."""
    return of_role(sys.modules, *PACKAGES)


def of_role(names: Iterable[str], *roles: str) -> list[str]:
    """Return the packages among names that have one of the roles, in the order of `PACKAGES`."""
    found = set(names)
    return [name for role, packages in PACKAGES.items() if role in roles for name in packages if name in found]


def presets_for(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the packages among names that a preset is made for, with its name. A model server alone, if any."""
    found = set(of_role(names, "engine") or names)
    return [(name, preset) for name, preset in MADE_FOR.items() if name in found]
