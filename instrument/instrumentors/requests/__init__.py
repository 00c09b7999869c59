"""Requests without a rule: what servers hand to the apps that they serve is recorded by endpoint.

Each server is met at the place where it calls the app, each web framework where it has found the route. Nothing is ever
imported by us, only met when the host has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from instrument.instrumentors.functions import Undo, undo_all
from instrument.instrumentors.requests import (
    aiohttp,
    blocked,
    garbage,
    grpc,
    litserve,
    mosec,
    propagation,
    ray_serve,
    routes,
    servers,
    triton,
)
from instrument.instrumentors.requests.exchange import Exchanges
from instrument.instrumentors.verdict import Verdict
from instrument.profile.model import RequestsRule
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.runtime.faults import FAULTS

SERVERS: Mapping[str, Mapping[str, servers.Attach]] = {
    "asgi": servers.ASGI,
    "wsgi": servers.WSGI,
    "aiohttp": aiohttp.AIOHTTP,
    "grpc": grpc.GRPC,
    "ray_serve": ray_serve.RAY_SERVE,
    "litserve": litserve.LITSERVE,
    "mosec": mosec.MOSEC,
    "triton": {},  # whose seam is in modules of any name that `triton.MODULE` fits
}
"""By what the profile calls them, the modules that have the seams of servers."""

STALLS: Mapping[str, Callable[[ModuleType, int, Recorder], list[Undo]]] = {
    blocked.MODULE: blocked.attach,
    blocked.UVLOOP: blocked.attach_uvloop,
    garbage.MODULE: garbage.attach,
}
"""The modules at which is met what keeps requests from going on for longer than `limits.blocked`."""


class Requests:
    """The request rule of one session at work: at most one."""

    def __init__(self, rules: Sequence[RequestsRule], recorder: Recorder = RECORDER) -> None:
        self._recorder = recorder
        self._undos: list[Undo] = []
        self._met: dict[str, str] = {}
        self._begin(rules)

    def _begin(self, rules: Sequence[RequestsRule]) -> None:
        self.rules = tuple(rules)
        self._blocked_ns = rules[0].blocked_ns if rules else None
        self._exchanges = [Exchanges(rule, self._recorder) for rule in rules]
        self._seams = {
            module: (kind, attach)
            for rule in rules
            for kind in rule.servers
            for module, attach in SERVERS.get(kind, {}).items()
        }

    def wants(self, module_name: str) -> bool:
        """Whether that module has a seam."""
        is_known = module_name in routes.ROUTERS or module_name == propagation.MODULE
        if module_name in STALLS:
            is_known = self._blocked_ns is not None
        return self._seam(module_name) is not None or (bool(self.rules) and is_known)

    def _seam(self, module_name: str) -> tuple[str, servers.Attach] | None:
        """The kind of server that has its seam in a module, and what attaches there."""
        if triton.MODULE.fullmatch(module_name) and any("triton" in rule.servers for rule in self.rules):
            return "triton", triton.attach
        return self._seams.get(module_name)

    def imported(self, module: ModuleType) -> bool:
        """A module with a seam is imported: attach. A version that has another seam is named in the verdicts."""
        name = module.__name__
        if name in self._met:
            return False
        try:
            self._met[name] = ""
            seam = self._seam(name)
            if seam is not None:
                kind, attach = seam
                undos = attach(module, self._exchanges[0])
                self._undos += undos
                self._met[name] = kind if undos else ""
            if name == propagation.MODULE:
                self._undos += propagation.attach(module, self._recorder)
            if name in STALLS and self._blocked_ns is not None:
                self._undos += STALLS[name](module, self._blocked_ns, self._recorder)
            if name in routes.ROUTERS:
                self._undos += routes.ROUTERS[name](module)
        except (AttributeError, TypeError) as missing:
            self._met[name] = f"{name} {getattr(module, '__version__', '')} has no place where it can be met: {missing}"
        except Exception as fault:
            FAULTS.note(f"requests of {name}", fault)
        return False

    def change(self, rules: Sequence[RequestsRule], modules: Iterable[ModuleType]) -> None:
        """Take on another rule; requests that are open end as they began."""
        self.undo()
        self._met.clear()
        before = self._exchanges
        self._begin(rules)
        for one in before:
            one.next = self._exchanges[0] if self._exchanges else None
        for module in modules:
            if self.wants(module.__name__):
                self.imported(module)

    def probed(self) -> Mapping[str, Any]:
        """The rule at work."""
        return {f"requests {rule.text}": rule for rule in self.rules}

    def undo(self) -> None:
        """Give servers and routers their own functions back; the verdicts still tell what was met."""
        for exchanges in self._exchanges:
            exchanges.is_on = False
        undo_all(self._undos)

    def verdicts(self) -> list[Verdict]:
        """What became of the rule: which servers it has met, and what it has recorded."""
        return [self._verdict(rule) for rule in self.rules]

    def _verdict(self, rule: RequestsRule) -> Verdict:
        met = [name for name, kind in self._met.items() if kind in SERVERS]
        lacking = [text for text in self._met.values() if " " in text]
        if lacking:
            return Verdict(rule.text, "unreachable", why="; ".join(lacking))
        if not met:
            return Verdict(rule.text, "waiting", why=f"no server of {', '.join(rule.servers)} is imported")
        why = f"at {', '.join(sorted(met))}"
        if "mosec" in self._met.values():
            why += "; mosec's requests are not seen, but its workers' batches"
        return Verdict(rule.text, "attached", why=why)
