"""Metrics of what models generate, by OpenTelemetry's names: whole requests, first tokens, and each one after them.

Beside those, of what serves requests in batches: how long these were in the queue, which has no name there yet, and is
called here as vLLM and SGLang call it on spans; how many there are in a batch; and in those that served a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from instrument.recording.distributions import (
    HISTOGRAM,
    OVERFLOW,
    SERIES_LIMIT,
    Distribution,
    Exemplar,
    Exemplars,
    Labels,
    Metric,
    series_told,
    told_series,
)
from instrument.recording.spans import FIRST_ITEM, ITEMS, LAST_ITEM

NAMESPACE, OPERATION = "gen_ai.", "gen_ai.operation.name"

GENERATION = (OPERATION, "gen_ai.provider.name", "gen_ai.request.model")
"""The facts of a generation that a service may give to `annotate_request`."""

REQUEST_DURATION, FIRST_TOKEN, OUTPUT_TOKEN = (
    f"gen_ai.server.{name}" for name in ("request.duration", "time_to_first_token", "time_per_output_token")
)
QUEUE_TIME, OTHER_QUEUE_TIME = "gen_ai.server.time_in_queue", "instrument.request.time_in_queue"
"""The times in queue of requests that a model generates an answer for, and of others."""
BATCH_SIZE, SERVING_BATCH_SIZE = "instrument.batch.size", "instrument.request.batch.size"

JOINED = (QUEUE_TIME, OTHER_QUEUE_TIME, SERVING_BATCH_SIZE)
"""Those that are told once the requests of all processes that are read are joined with their batches."""

ONE = 10**9
"""What stands for one in a distribution of what is no time: these count in parts of 1e9."""

TOLD = {
    REQUEST_DURATION: "Generative AI server request duration such as time-to-last byte or last output token.",
    FIRST_TOKEN: "Time to generate first token for successful responses.",
    OUTPUT_TOKEN: "Time per output token generated after the first token for successful responses.",
    QUEUE_TIME: "Time of a generation in the queue, up to its first batch.",
    OTHER_QUEUE_TIME: "Time of a request in the queue, up to its first batch.",
    BATCH_SIZE: "Requests of a batch.",
    SERVING_BATCH_SIZE: "Requests of a batch, on average over those that served the request.",
}
"""The metrics, and what each is."""


class GenerationTimes:
    """Distributions by the names of `TOLD` and their labels, with exemplars."""

    def __init__(self) -> None:
        self._series: dict[str, dict[Labels, Distribution]] = {}
        self._exemplars: dict[str, dict[Labels, Exemplars]] = {}

    def add(self, name: str, labels: Labels, value: int) -> None:
        """Count one value, in ns, or in parts of 1e9 of what is no time."""
        series = self._series.setdefault(name, {})
        if labels not in series and len(series) >= SERIES_LIMIT:
            labels = OVERFLOW
        series.setdefault(labels, Distribution()).add(max(value, 0))

    def note(self, name: str, labels: Labels, one: Exemplar) -> None:
        """An exemplar of a value that has been counted."""
        if labels in self._series.get(name, ()):
            self._exemplars.setdefault(name, {}).setdefault(labels, Exemplars()).add(one)

    def state(self) -> dict[str, Any]:
        """All that has been counted, as JSON has it, but for exemplars."""
        return {name: told_series(series) for name, series in self._series.items()}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> GenerationTimes:
        """Return the counts of another one. Raises `TypeError` or `ValueError` for what is none."""
        found = cls()
        found._series = {str(name): series_told(series) for name, series in state.items()}
        return found

    def metrics(self, *names: str) -> list[Metric]:
        """These metrics, also those that nothing has been counted of."""
        return [
            Metric(
                name,
                "{request}" if name in (BATCH_SIZE, SERVING_BATCH_SIZE) else "s",
                HISTOGRAM,
                TOLD[name],
                {labels: one.copy() for labels, one in self._series.get(name, {}).items()},
                {labels: one.all() for labels, one in self._exemplars.get(name, {}).items()},
            )
            for name in names
        ]


def generation_labels(known: Labels, told: Mapping[Any, Any]) -> Labels:
    """What tells generations from others: what is known beforehand, and what a span says of it."""
    usual = operation_of(str(dict(known).get("http.route", "")))
    return tuple({OPERATION: usual, **dict(known), **dict(said_of_generation(told))}.items())


def operation_of(route: str) -> str:
    """The operation of what is generated at a route, by OpenTelemetry's names."""
    return "chat" if route.endswith("/chat/completions") else "text_completion"


def is_among(route: str, patterns: Sequence[str]) -> bool:
    """Return True where a route matches one of the patterns, each exact or with a `*` at its end."""
    return any(route.startswith(one[:-1]) if one.endswith("*") else route == one for one in patterns)


def says_generation(names: Iterable[object]) -> bool:
    """Return True where names of attributes say that a model generates something."""
    return any(isinstance(name, str) and name.startswith(NAMESPACE) for name in names)


def said_of_generation(told: Mapping[Any, Any]) -> Labels:
    """Return the facts of a generation that a span has."""
    return tuple((name, value) for name in GENERATION if isinstance(value := told.get(name), str))


def token_times(told: Mapping[Any, Any]) -> tuple[int, int | None] | None:
    """The time to the first item of a stream, and that of each after it; None of what is no stream."""
    first_ns, last_ns, items = (told.get(name) for name in (FIRST_ITEM, LAST_ITEM, ITEMS))
    if not (isinstance(first_ns, int) and isinstance(last_ns, int) and isinstance(items, int)):
        return None  # not there, or the service's own attributes of these names
    each_ns = max(last_ns - first_ns, 0) // (items - 1) if items > 1 else None
    return max(first_ns, 0), each_ns
