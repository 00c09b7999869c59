"""What `instrument check` prints: of the profile, the machine and each rule, as text or as one JSON document."""

from __future__ import annotations

import os
import platform
from collections import Counter
from typing import Any

from instrument.device import cuda
from instrument.instrumentors.verdict import Verdict
from instrument.otlp.proxies import proxy_for
from instrument.profile.keys import KEYS, setting
from instrument.profile.model import Profile
from instrument.profile.variables import BESIDE

ATTACHED_SHOWN = 20
"""The most targets of a rule that `check` shows line by line where all is well."""


def facts_document(profile: Profile, verdicts: list[Verdict], command: dict[str, Any] | None) -> dict[str, Any]:
    """What `check --json` prints. Keys may be added, never renamed or taken away while `format` stays."""
    rules = [(family, rule) for family in ("functions", "layers", "copies") for rule in getattr(profile, family)]
    targets: dict[str, list[dict[str, Any]]] = {}
    for verdict in verdicts:
        facts = verdict.facts()
        targets.setdefault(facts.pop("rule"), []).append(facts)
    return {
        "format": 1,
        "profile": {"source": profile.source, "service": _service_told(profile), "digest": profile.digest},
        "settings": [
            {"setting": name, "value": value, "from": origin} for name, value, origin in _settings_of(profile)
        ],
        "remarks": list(profile.remarks),
        "exports": [name for name in KEYS["export"] if getattr(profile.export, name) is not None],
        "recorder": {"kind": "native", "why_not_native": ""},
        "python": {"version": platform.python_version(), "implementation": platform.python_implementation()},
        "device": cuda.found() if _asks_for_device_time(profile) else None,
        "nvml": {"why_not_read": _why_no_gpu(profile)},
        "files": {"why_not_written": _why_no_files(profile)},
        "rules": [
            {"family": family, "rule": rule.text, "line": rule.line, "targets": targets.get(rule.text, [])}
            for family, rule in rules
        ],
        "command": command,
    }


def print_verdicts(profile: Profile, verdicts: list[Verdict], command: dict[str, Any] | None) -> None:
    """What `check` prints as text."""
    print(f"profile {profile.source}: service {_service_told(profile)}, digest {profile.digest}")
    if profile.leaves_nothing:
        from instrument.sessions.process import NO_EXPORT

        print(f"  {NO_EXPORT}")
    for remark in profile.remarks:
        print(f"  {remark}")
    for name, value, origin in _settings_of(profile):
        print(f"  {name} = {'not set' if value is None else value} (from {origin})")
    print(f"Python {platform.python_version()}")
    if _asks_for_device_time(profile):
        print(f"device: {_device_line(cuda.found())}")
    why = _why_no_gpu(profile)
    print(f"gauges of GPUs: {f'not read ({why})' if why else 'read'}")
    unwritten = _why_no_files(profile)
    if unwritten:
        print(f"export: {unwritten}")
    if command is not None:
        count = len(command["processes"])
        print(f"command: exit code {command['exit_code']}, {count} process{'es' * (count > 1)} reported")
    print(f"rules: {len(profile.functions)} functions, {len(profile.layers)} layers, {len(profile.copies)} copies")
    shown: Counter[tuple[str, str]] = Counter()
    for verdict in verdicts:
        shown[verdict.rule, verdict.state] += 1
        if verdict.state != "attached" or shown[verdict.rule, verdict.state] <= ATTACHED_SHOWN:
            print(f"  {verdict}")
    for (rule, state), count in shown.items():
        if state == "attached" and count > ATTACHED_SHOWN:
            print(f"  {rule}: attached ({count - ATTACHED_SHOWN} more; --json shows all)")


def _asks_for_device_time(profile: Profile) -> bool:
    if profile.device.cuda == "off" or profile.state == "CPU":
        return False
    asks = [rule.device for rule in profile.functions] + [rule.device for rule in profile.layers]
    return any(asks) or bool(profile.copies)


def _device_line(found: dict[str, str]) -> str:
    if found["rocm"]:
        return f"torch {found['rocm']}, timed by its own events"
    driver = f"driver for CUDA {found['driver']}" if found["driver"] else ""
    bindings = f"cuda-bindings {found['bindings']}" if driver and found["bindings"] else ""
    return "; ".join(filter(None, [", ".join(filter(None, [driver, bindings])), found["problem"]]))


def _why_no_gpu(profile: Profile) -> str:
    """Why the gauges of GPUs are not read on this machine, "" where they are."""
    from instrument.device import nvml

    return "device.nvml is off" if profile.device.nvml_ns is None else nvml.reason_against()


def _why_no_files(profile: Profile) -> str:
    """Why the traces that a profile asks for cannot be written here, "" where they can, or are not asked for."""
    from instrument.sessions import saving

    return saving.why_no_files() if saving.is_asked(profile.export) else ""


def _service_told(profile: Profile) -> str:
    return profile.told.get("service", profile.service)


def _settings_of(profile: Profile) -> list[tuple[str, Any, str]]:
    """Each setting that a variable can give, where it is on: its value, and who gave it. Headers by name alone."""
    found = []
    for name, origin in sorted(profile.origins.items()):
        value = setting(profile, name)
        if name.endswith(".headers"):
            value = [header for header, _ in value or ()]
        elif value is not None or origin == "preset":
            value = profile.told.get(name, value)
        if value is not None or origin != "default":
            found.append((name, value, origin))
    for variable, (name, _) in BESIDE.items():
        is_followed = profile.export.otlp is not None or (variable == "OTEL_PROPAGATORS" and profile.requests)
        if is_followed and (text := os.environ.get(variable)):
            # Of attributes by name alone, as of headers.
            names = [part.partition("=")[0].strip() for part in text.split(",")]
            found.append((name, ", ".join(filter(None, names)), variable))
    collector = profile.export.otlp
    if collector is not None and collector.protocol != "grpc" and (proxy := proxy_for(collector.endpoint)) is not None:
        found.append(("proxy", proxy.told, proxy.variable))
    return found
