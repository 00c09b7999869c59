"""The metrics of generative models under OpenTelemetry's names: request duration, time to first token, time per token.

Servers with batches get three more metrics of our own: time in the queue, batch size, and mean batch size per request.
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
    series_as_json,
    series_from_json,
)
from instrument.recording.spans import FIRST_ITEM, ITEMS, LAST_ITEM

NAMESPACE, OPERATION = "gen_ai.", "gen_ai.operation.name"

PROVIDER = "gen_ai.provider.name"
GENERATION = (OPERATION, PROVIDER, "gen_ai.request.model")
"""The attributes of a generation's span that become labels. A service may set them with `annotate_request`."""

REQUEST_DURATION, FIRST_TOKEN, OUTPUT_TOKEN = (
    f"gen_ai.server.{name}" for name in ("request.duration", "time_to_first_token", "time_per_output_token")
)
QUEUE_TIME = "instrument.request.queue.duration"
BATCH_SIZE, SERVING_BATCH_SIZE = "instrument.batch.size", "instrument.request.batch.size"

JOINED = (QUEUE_TIME, SERVING_BATCH_SIZE)
"""The metrics that can be counted only after requests of all processes are joined with their batches."""

ONE = 10**9
"""The value 1 in a distribution of counts, whose unit is 1e-9."""

DESCRIPTIONS = {
    REQUEST_DURATION: "Generative AI server request duration such as time-to-last byte or last output token.",
    FIRST_TOKEN: "Time to generate first token for successful responses.",
    OUTPUT_TOKEN: "Time per output token generated after the first token for successful responses.",
    QUEUE_TIME: "Time of a request in the queue, up to its first batch.",
    BATCH_SIZE: "Requests of a batch.",
    SERVING_BATCH_SIZE: "Requests of a batch, on average over those that served the request.",
}
"""The description of each metric, by its name."""


class GenerationTimes:
    """The distributions of a process's generations, by a metric's name and by labels, with exemplars."""

    def __init__(self) -> None:
        self._series: dict[str, dict[Labels, Distribution]] = {}
        self._exemplars: dict[str, dict[Labels, Exemplars]] = {}

    def add(self, name: str, labels: Labels, value: int) -> None:
        """Count one value: a time in ns, or a number in units of 1e-9."""
        series = self._series.setdefault(name, {})
        if labels not in series and len(series) >= SERIES_LIMIT:
            labels = OVERFLOW
        series.setdefault(labels, Distribution()).add(max(value, 0))

    def note(self, name: str, labels: Labels, exemplar: Exemplar) -> None:
        """Add an exemplar for a value that has been counted."""
        if labels in self._series.get(name, ()):
            self._exemplars.setdefault(name, {}).setdefault(labels, Exemplars()).add(exemplar)

    def state(self) -> dict[str, Any]:
        """Return all distributions as values for JSON, without exemplars."""
        return {name: series_as_json(series) for name, series in self._series.items()}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> GenerationTimes:
        """Return the distributions from the values of `state`. Raises `TypeError` or `ValueError` for anything else."""
        times = cls()
        times._series = {str(name): series_from_json(series) for name, series in state.items()}
        return times

    def metrics(self, *names: str) -> list[Metric]:
        """Return the named metrics, even those without a count."""
        return [
            Metric(
                name,
                "{request}" if name in (BATCH_SIZE, SERVING_BATCH_SIZE) else "s",
                HISTOGRAM,
                DESCRIPTIONS[name],
                {labels: value.copy() for labels, value in self._series.get(name, {}).items()},
                {labels: value.all() for labels, value in self._exemplars.get(name, {}).items()},
            )
            for name in names
        ]


def generation_labels(labels: Labels, attributes: Mapping[Any, Any]) -> Labels:
    """Return the labels of a generation: the given ones, and those from its span's attributes."""
    usual = operation_of(str(dict(labels).get("http.route", "")))
    return tuple({OPERATION: usual, **dict(labels), **dict(generation_facts(attributes))}.items())


def operation_of(route: str) -> str:
    """Return OpenTelemetry's name for the operation of an HTTP route that generates text, such as `chat`."""
    return "chat" if route.endswith("/chat/completions") else "text_completion"


def is_among(route: str, patterns: Sequence[str]) -> bool:
    """Return True if an HTTP route matches one of the patterns, which are exact or end in `*`."""
    return any(route.startswith(pattern[:-1]) if pattern.endswith("*") else route == pattern for pattern in patterns)


def has_generation_names(names: Iterable[object]) -> bool:
    """Return True if one of a span's attribute names marks it as a generation by a model."""
    return any(isinstance(name, str) and name.startswith(NAMESPACE) for name in names)


def generation_facts(attributes: Mapping[Any, Any]) -> Labels:
    """Return the attributes that describe a generation, as labels."""
    return tuple((name, value) for name in GENERATION if isinstance(value := attributes.get(name), str))


def token_times(attributes: Mapping[Any, Any]) -> tuple[int, int | None] | None:
    """Return the time to a stream's first item and the mean time per later item, in ns, None if it had no items."""
    first_ns, last_ns, items = (attributes.get(name) for name in (FIRST_ITEM, LAST_ITEM, ITEMS))
    if not (isinstance(first_ns, int) and isinstance(last_ns, int) and isinstance(items, int)):
        return None  # missing, or the service's own attributes of the same names
    each_ns = max(last_ns - first_ns, 0) // (items - 1) if items > 1 else None
    return max(first_ns, 0), each_ns
