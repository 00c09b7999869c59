"""The variables of OpenTelemetry that a profile follows, and remarks on those that it does not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from instrument.profile.document import Document, Read, one_of, string
from instrument.profile.model import COMPRESSIONS, PROTOCOLS, Capture, Profile
from instrument.profile.values import header_list, readable_file, seconds, url


def _otlp_variables(setting: str, read: Read) -> tuple[tuple[str, Read], ...]:
    return tuple((f"OTEL_EXPORTER_OTLP_{signal}{setting}", read) for signal in ("TRACES_", ""))


SERVICE = "INSTRUMENT_SERVICE"
"""The variable by which `instrument run` names a service that has no other name."""

VARIABLES: Mapping[str, tuple[tuple[str, Read], ...]] = {
    "service": (("OTEL_SERVICE_NAME", string), (SERVICE, string)),
    "export.otlp.endpoint": _otlp_variables("ENDPOINT", url),
    "export.otlp.protocol": _otlp_variables("PROTOCOL", one_of(*PROTOCOLS)),
    "export.otlp.headers": _otlp_variables("HEADERS", header_list),
    "export.otlp.timeout": _otlp_variables("TIMEOUT", seconds),
    "export.otlp.compression": _otlp_variables("COMPRESSION", one_of(*COMPRESSIONS)),
    "export.otlp.certificate": _otlp_variables("CERTIFICATE", readable_file),
    "export.otlp.client_certificate": _otlp_variables("CLIENT_CERTIFICATE", readable_file),
    "export.otlp.client_key": _otlp_variables("CLIENT_KEY", readable_file),
}
"""The variables of settings that the profile leaves out. The first that is set and understood counts."""

BESIDE: Mapping[str, tuple[str, str]] = {
    "OTEL_SDK_DISABLED": ("OpenTelemetry disabled", "true|false"),
    "OTEL_TRACES_EXPORTER": ("traces exporter", "otlp|none"),
    "OTEL_TRACES_SAMPLER": ("traces sampler", "always_off"),
    "OTEL_METRICS_EXPORTER": ("metrics exporter", "otlp|none"),
    "OTEL_LOGS_EXPORTER": ("logs exporter", "none"),
    "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": ("metrics temporality", "cumulative|delta|lowmemory"),
    "OTEL_RESOURCE_ATTRIBUTES": ("resource attributes", r"(?:\s*[^=,\s][^=,]*=[^,]*(?:,|$))*"),
    "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS": ("resource detectors", ".*"),
    "OTEL_PROPAGATORS": ("propagators", ".*"),
}
"""The other variables for the data sent to a collector: the name of each setting, and the values followed.

`none` for an exporter means that nothing of that signal is sent. The propagators are those of a caller's trace. These
and `VARIABLES` are all of OpenTelemetry's variables that are honoured.
"""

_OF_ITS_SDK = "OTEL_PYTHON_"
"""The prefix of variables for OpenTelemetry's own SDK and instrumentations."""


_DISABLED = ("OTEL_SDK_DISABLED", "true")
_SWITCHES = {
    "traces": (("OTEL_TRACES_SAMPLER", "always_off"), ("OTEL_TRACES_EXPORTER", "none"), _DISABLED),
    "metrics": (("OTEL_METRICS_EXPORTER", "none"), _DISABLED),
}
"""The variables that switch a signal off, each with the value that does so."""


def _unsent(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the signals that are switched off, each with its switch."""
    return {
        signal: f"{name}={value}"
        for signal, switches in _SWITCHES.items()
        for name, value in switches
        if environ.get(name, "").strip().lower() == value
    }


def switched(profile: Profile, document: Document) -> Profile:
    """Return a profile without the signals that variables switch off, with the remarks on all variables."""
    remarks, environ = document.remarks, document.environ
    if profile.export.otlp is not None:
        remarks = [*remarks, *_remarks_on(environ)]
        off = _unsent(environ)
        if len(off) == len(_SWITCHES):
            profile = replace(profile, export=replace(profile.export, otlp=None))
        elif "traces" in off:
            profile = replace(profile, capture=Capture(sample=0.0, errors=False, is_off=True))
    return replace(profile, remarks=tuple(dict.fromkeys(remarks)))


def _remarks_on(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield sentences on the variables that are set and change what is sent, or should and do not."""
    for signal, switch in _unsent(environ).items():
        yield f"no {signal} are sent to a collector: {switch}"
    known = {name for names in VARIABLES.values() for name, _ in names}
    missed = [
        name
        for name, value in sorted(environ.items())
        if name.startswith("OTEL_") and value and name not in known and not _is_followed(name, value.strip().lower())
    ]
    if missed:
        yield f"set and not followed: {', '.join(missed)}"


def _is_followed(name: str, value: str) -> bool:
    _, followed = BESIDE.get(name, ("", "(?!)"))
    return name.startswith(_OF_ITS_SDK) or re.fullmatch(followed, value) is not None
