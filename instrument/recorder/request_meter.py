"""The meter, which counts the metrics of a process from its recording, for OTLP and Prometheus.

Requests are counted by endpoint, status and error from their recorded spans, so the service's threads do nothing for
metrics. Requests with overwritten spans are counted from the recording's running totals, without a status.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import filterfalse
from typing import TYPE_CHECKING, Any, Protocol, cast

from instrument.recorder.wrapping import RPC_STATUS, STATUS
from instrument.recording.distributions import (
    ONE,
    OTHER,
    OVERFLOW,
    SERIES_LIMIT,
    Distribution,
    Exemplar,
    Histograms,
    Labels,
    Metric,
    Snapshot,
    bucket_of,
    bucket_start,
    group_name_of,
)
from instrument.recording.memory_layout import END_NS, ERROR, ROOT_ID, ROW_ATTRIBUTES, SPAN_ID, START_NS, Row
from instrument.recording.metric_definitions import (
    ACTIVE_REQUESTS,
    BATCH_SIZE,
    CALL_DURATION,
    COST,
    DEFINITIONS,
    FIRST_TOKEN,
    GENERATION,
    HTTP_DURATION,
    LOSSES,
    OUTPUT_TOKEN,
    QUEUE_TIME,
    QUEUED_TASKS,
    REQUEST_BATCH_SIZE,
    REQUEST_DURATION,
    RPC_DURATION,
    MetricDefinition,
    add_generation_labels,
    matches_route,
    read_generation_labels,
    token_times,
)
from instrument.recording.spans import BATCH_KEYS, FIRST_ITEM, OUTCOME, TIME_IN_QUEUE, Site, Span
from instrument.runtime.lazy_imports import dataclass, late_pattern

if TYPE_CHECKING:
    from instrument.recording.paths import CallTree
    from instrument.recording.tally import Tally

SCHEME = "url.scheme"

Ended = Mapping[str, tuple[Labels, Mapping[int, int]]]
"""The labels and the histogram of durations of ended requests, by span name."""


@dataclass(slots=True)
class _Counts:
    """The saved counts of a meter, from which the next meter continues."""

    start_ns: int
    histograms: Mapping[str, list[tuple[Labels, Distribution]]]
    met: Mapping[str, Mapping[int, int]]
    endpoints: list[Labels]
    marks: set[str]
    counters: list[tuple[tuple[str, str], float]]


class MeteredRows(Protocol):
    """The methods of a recording's reader that a `Meter` calls."""

    def open_rows(self) -> Iterable[tuple[int, Row]]: ...

    def find_site(self, row: Row) -> Site: ...

    def read_totals(
        self, *, merged: bool = False, is_counted: Callable[[CallTree], Sequence[bool]] | None = None
    ) -> Tally: ...


class Meter:
    """A counter for all metrics of one process, from `start_ns` on. Only the thread that reads the rings may use it.

    - `generations`: the HTTP routes for which a model generates the answers
    - `watches`: True if batches, and functions that generate answers, also have metrics
    - `by`, `at_most`: the attribute that groups requests, and the maximum number of groups
    - `groups`: the names of groups; meters share this set if their metrics are added up
    """

    def __init__(self, recorder: MeteredRows, start_ns: int) -> None:
        self._recorder = recorder
        self.generations: tuple[str, ...] = ()
        self.by, self.at_most = "", 0
        self.watches = self.has_ended = False
        self._start_ns = start_ns
        self._histograms = Histograms()
        self._met: dict[str, Counter[int]] = {}
        """The number of counted requests per histogram bucket, by span name."""
        self._endpoints: dict[Labels, None] = {}
        self._active: dict[Labels, int] = {}
        self.marks: set[str] = set()
        """The functions that have metrics, or had them before a reload."""
        self._counters: dict[tuple[str, str], float] = {}
        self.groups = set[str]()

    # ---------------------------------------------------------------- requests

    def count_requests(self, ended: Sequence[Row]) -> None:
        """Count ended requests, which takes 2 us per request."""
        site_of = self._recorder.find_site
        for row in ended:
            site, attributes = site_of(row), row[ROW_ATTRIBUTES] or {}
            if isinstance(queued_s := attributes.get(TIME_IN_QUEUE), float):
                labels = (*_call_labels(site), *_outcome_labels(attributes, row[ERROR]), *self._group_label(attributes))
                self._histograms.add(QUEUE_TIME.name, labels, round(queued_s * 1e9))
            endpoint = endpoint_labels(site)
            if not endpoint:
                continue
            duration_ns = row[END_NS] - row[START_NS]
            for name, labels, value_ns in self._request_values(site, endpoint, attributes, duration_ns, row[ERROR]):
                self._histograms.add(name, labels, value_ns)
            self._endpoints[endpoint] = None
            self._met.setdefault(site.name, Counter())[bucket_of(duration_ns)] += 1

    def add_exemplar(self, request: Span, trace_id: int, span_id: int) -> None:
        site, kept_ns = request.site, time.monotonic_ns()
        endpoint = endpoint_labels(site)
        values = self._request_values(site, endpoint, request.attributes, request.total_ns, request.error)
        for name, labels, value_ns in values if endpoint else ():
            exemplar = Exemplar(value_ns, request.end_ns, kept_ns, trace_id, span_id)
            if not self._histograms.add_exemplar(name, labels, exemplar):
                return

    def _request_values(
        self, site: Site, endpoint: Labels, attributes: Mapping[Any, Any], duration_ns: int, error: str | None
    ) -> Iterator[tuple[str, Labels, int]]:
        """Yield the name, labels and value of each metric of an ended request. The duration is first."""
        group = self._group_label(attributes)
        yield _duration_metric(endpoint).name, (*_request_labels(endpoint, attributes, error), *group), duration_ns
        if self._is_generation_route(endpoint):
            yield from _generation_values((*_generation_labels(site), *group), attributes, duration_ns, error)

    def _group_label(self, attributes: Mapping[Any, Any]) -> Labels:
        value = group_name_of(attributes.get(self.by)) if self.by else None
        if value is None:
            return ()
        if value not in self.groups:
            if len(self.groups) >= self.at_most:
                value = OTHER
            else:
                self.groups.add(value)
        return ((self.by, value),)

    def count_queue_and_batches(
        self, request: Span, queue_ns: int, batch_size: float, sampled_ids: tuple[int, int] | None
    ) -> None:
        """Count the time of a request in the queue, and the mean size of its batches (0 for none). `sampled_ids` are
        the trace id and the span id of a sampled request, which becomes an exemplar."""
        site, attributes, error = request.site, request.attributes, request.error
        endpoint = endpoint_labels(site)
        labels = _generation_labels(site) if endpoint else _call_labels(site)
        is_generation = self._is_generation_route(endpoint)
        labels = (
            add_generation_labels(labels, attributes)
            if is_generation
            else (*labels, *read_generation_labels(attributes))
        )
        labels = (*labels, *_outcome_labels(attributes, error), *self._group_label(attributes))
        values = {QUEUE_TIME: queue_ns, **({REQUEST_BATCH_SIZE: round(batch_size * ONE)} if batch_size else {})}
        for definition, value in values.items():
            self._histograms.add(definition.name, labels, value)
            if sampled_ids is not None:
                exemplar = Exemplar(value, request.end_ns, time.monotonic_ns(), *sampled_ids)
                self._histograms.add_exemplar(definition.name, labels, exemplar)

    def _is_generation_route(self, endpoint: Labels) -> bool:
        return matches_route(str(dict(endpoint).get("http.route", "")), self.generations)

    def count_items_and_batches(self, rows: Sequence[Row], marks: Collection[str]) -> None:
        streams = [row for row in rows if FIRST_ITEM in (row[ROW_ATTRIBUTES] or ())]
        counts = {site: make_site_id(site) in marks for site in map(self._recorder.find_site, streams)}
        for row in streams:
            site = self._recorder.find_site(row)
            attributes, duration_ns = row[ROW_ATTRIBUTES] or {}, row[END_NS] - row[START_NS]
            values = _generation_values(_call_labels(site), attributes, duration_ns, row[ERROR]) if counts[site] else ()
            for name, labels, value_ns in values:
                self._histograms.add(name, labels, value_ns)
        for row in rows:
            if isinstance(keys := (row[ROW_ATTRIBUTES] or {}).get(BATCH_KEYS), list | tuple):
                self._histograms.add(BATCH_SIZE.name, _call_labels(self._recorder.find_site(row)), len(keys) * ONE)

    def count_ended_requests(self) -> Ended:
        """Return the ended requests from the running totals, including requests with unread rows."""
        totals = self._read_metered_totals(())
        ended: dict[str, tuple[Labels, Counter[int]]] = {}
        endpoints = totals.tree.map_sites(
            lambda site: (site.name, *labels) if (labels := endpoint_labels(site)) else ()
        )
        for (name, *endpoint), lines in totals.lines_by_key(endpoints).items():
            buckets = ended.setdefault(name, (tuple(endpoint), Counter()))[1]
            buckets.update(totals.histogram(totals.nodes_of_lines(lines)))
        return ended

    def _read_metered_totals(self, marks: Collection[str]) -> Tally:
        def are_metered(tree: CallTree) -> Sequence[bool]:
            endpoints = tree.map_sites(endpoint_labels)
            site_marks = tree.map_sites(make_site_id) if marks else endpoints
            return [bool(endpoint) or mark in marks for endpoint, mark in zip(endpoints, site_marks, strict=True)]

        return self._recorder.read_totals(merged=True, is_counted=are_metered)

    def count_lost_requests(self, ended: Ended) -> None:
        for name, (endpoint, buckets) in ended.items():
            counter = self._met.setdefault(name, Counter())
            missed = {index: count - counter[index] for index, count in buckets.items() if count > counter[index]}
            if missed:
                self._endpoints[endpoint] = None
                self._histograms.distribution_of(_duration_metric(endpoint).name, endpoint).add_buckets(missed)
                counter.update(missed)

    def _active_requests_metric(self) -> Metric:
        now: Counter[Labels] = Counter(dict.fromkeys(map(_without_route, filterfalse(_is_rpc, self._endpoints)), 0))
        for _, row in () if self.has_ended else self._recorder.open_rows():
            labels = endpoint_labels(self._recorder.find_site(row))
            if labels and not _is_rpc(labels) and row[SPAN_ID] == row[ROOT_ID]:
                now[_without_route(labels)] += 1
        self._active = dict.fromkeys(self._active, 0)
        for labels, count in now.items():
            if labels in self._active or len(self._active) < SERIES_LIMIT:
                self._active[labels] = count
        return ACTIVE_REQUESTS.make_metric(dict(self._active))

    def _queued_tasks_metric(self, waiting: Mapping[str, int]) -> Metric:
        series: dict[Labels, float] = {}
        for name, count in waiting.items():
            labels: Labels = (("instrument.executor", name),)
            labels = labels if len(series) < SERIES_LIMIT else OVERFLOW
            series[labels] = series.get(labels, 0) + count
        return QUEUED_TASKS.make_metric(series)

    # ---------------------------------------------------------------- calls of functions

    def _count_calls(self) -> None:
        if not self.marks:
            return
        totals = self._read_metered_totals(self.marks)
        of_sites = zip(totals.tree.map_sites(_call_labels), totals.tree.map_sites(make_site_id), strict=True)
        of_labels = totals.lines_by_key([labels if mark in self.marks else () for labels, mark in of_sites])
        lines_by_place: dict[Labels, list[int]] = {}
        for labels, lines in of_labels.items():
            lines_by_place.setdefault(self._histograms.limit_series(CALL_DURATION.name, labels), []).extend(lines)
        for place, lines in lines_by_place.items():
            self._histograms.distribution_of(CALL_DURATION.name, place).add_later_calls(
                _make_call_distribution(totals, lines)
            )

    # ---------------------------------------------------------------- who goes on

    def state(self) -> dict[str, Any]:
        """Return all counts as values for JSON. Exemplars are left out."""
        import msgspec

        counts = _Counts(
            self._start_ns, self._histograms.state(), self._met, [*self._endpoints], self.marks,
            [*self._counters.items()],
        )  # fmt: skip
        return cast("dict[str, Any]", msgspec.to_builtins(counts, enc_hook=int))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from saved counts. Raises one of `export_checkpoint.DAMAGED` for invalid counts."""
        import msgspec

        counts = msgspec.convert(state, _Counts, strict=False)
        self._start_ns, self._histograms = counts.start_ns, Histograms.from_state(counts.histograms)
        self._met = {name: Counter(buckets) for name, buckets in counts.met.items()}
        self._endpoints = dict.fromkeys(counts.endpoints)
        self.marks |= counts.marks
        self._counters = dict(counts.counters)
        requests = [*self._histograms.series(HTTP_DURATION.name), *self._histograms.series(RPC_DURATION.name)]
        values = (value for labels in requests for name, value in labels if name == self.by)
        self.groups.update(str(value) for value in values if value != OTHER)

    # ---------------------------------------------------------------- all together

    def snapshot(
        self,
        *,
        requests: bool,
        losses: Mapping[str, int],
        costs_ns: Mapping[str, float],
        queued: Mapping[str, int],
    ) -> Snapshot:
        """Return all current metrics.

        - `requests`: True if requests are recorded
        - `losses`, `costs_ns`, `queued`: losses by reason, times by component, and tasks by executor
        """
        self._count_calls()
        always = [HTTP_DURATION] if requests else []
        always += [REQUEST_DURATION, FIRST_TOKEN, OUTPUT_TOKEN] if self.generations or self.watches else []
        metrics = [
            definition.make_metric(*self._histograms.copy_series(definition.name))
            for definition in DEFINITIONS.values()
            if definition in always or self._histograms.series(definition.name)
        ]
        if requests or self._histograms.series(HTTP_DURATION.name):
            metrics.append(self._active_requests_metric())
            if queued and not self.has_ended:
                metrics.append(self._queued_tasks_metric(queued))
        metrics.append(self._make_counter(LOSSES, "instrument.reason", losses))
        spent_s = {part: spent_ns / 1e9 for part, spent_ns in costs_ns.items()}
        metrics.append(self._make_counter(COST, "instrument.part", spent_s))
        return Snapshot(self._start_ns, time.monotonic_ns(), tuple(metrics))

    def _make_counter(self, definition: MetricDefinition, label: str, values: Mapping[str, float]) -> Metric:
        """Return a counter whose values never fall."""
        series: dict[Labels, float] = {
            ((label, key),): value for key, value in self.keep_highest_values(definition.name, values).items()
        }
        return definition.make_metric(series)

    def keep_highest_values(self, name: str, values: Mapping[str, float]) -> dict[str, float]:
        for key, value in values.items():
            self._counters[name, key] = max(value, self._counters.get((name, key), 0))
        return {key: value for (of, key), value in self._counters.items() if of == name}


def _make_call_distribution(totals: Tally, lines: Sequence[int]) -> Distribution:
    buckets, total = totals.histogram(totals.nodes_of_lines(lines)), totals.total_of_lines(lines)
    # The time of a call within a call of the same function counts in the outer one's alone, though both are calls: the
    # sum is that of the buckets then.
    least_ns = sum(bucket_start(index) * count for index, count in buckets.items())
    return Distribution(sum(buckets.values()), max(total.elapsed_ns, least_ns), total.min_ns, total.max_ns, buckets)


def count_queued_tasks() -> Mapping[str, int]:
    """Return the number of tasks in the queues of thread pools, by the name of the pool. These are pools of
    `concurrent.futures`, such as asyncio's default executor. Pools without a name are counted together."""
    queues = getattr(sys.modules.get("concurrent.futures.thread"), "_threads_queues", None)
    try:
        names = {id(queue): (thread.name, queue) for thread, queue in list((queues or {}).items())}
    except RuntimeError:  # a thread has begun meanwhile
        return {}
    waiting: Counter[str] = Counter()
    for name, queue in names.values():
        waiting[_POOL_NUMBER.sub("", name)] += queue.qsize()
    return dict(waiting)  # of a Counter `dataclasses.asdict` would count the pairs


_POOL_NUMBER = late_pattern(r"(?<=ThreadPoolExecutor)-\d+_\d+$|_\d+$")
"""A pattern of the numbers after a pool's name in the name of a thread."""


def _request_labels(endpoint: Labels, attributes: Mapping[Any, Any], error: str | None) -> Labels:
    if isinstance(scheme := attributes.get(SCHEME), str):
        endpoint += ((SCHEME, scheme),)
    if isinstance(status := attributes.get(STATUS), int) and 100 <= status < 1000:
        endpoint += ((STATUS, status),)
    if _is_rpc(endpoint) and isinstance(name := attributes.get(RPC_STATUS), str):
        endpoint += ((RPC_STATUS, name),)
    return (*endpoint, *_outcome_labels(attributes, error))


def _outcome_labels(attributes: Mapping[Any, Any], error: str | None) -> Labels:
    if error is not None:
        return (("error.type", error),)
    return ((OUTCOME, outcome),) if isinstance(outcome := attributes.get(OUTCOME), str) else ()


def _generation_values(
    call_labels: Labels, attributes: Mapping[Any, Any], duration_ns: int, error: str | None
) -> Iterator[tuple[str, Labels, int]]:
    labels = add_generation_labels(call_labels, attributes)
    yield REQUEST_DURATION.name, (*labels, *_outcome_labels(attributes, error)), duration_ns
    if error is None and (times := token_times(attributes)) is not None:
        yield FIRST_TOKEN.name, labels, times[0]
        if times[1] is not None:
            yield OUTPUT_TOKEN.name, labels, times[1]


def _generation_labels(site: Site) -> Labels:
    facts = dict(site.attributes)
    names = ("http.route", RPC_METHOD, *GENERATION)
    return tuple((name, value) for name in names if isinstance(value := facts.get(name), str))


def endpoint_labels(site: Site) -> Labels:
    if site.kind != "request":
        return ()
    facts = dict(site.attributes)
    if "http.request.method" not in facts and RPC_METHOD not in facts:
        return ()
    return tuple((name, value) for name in _ENDPOINT if isinstance(value := facts.get(name), str))


RPC_METHOD = "rpc.method"
_ENDPOINT = ("http.request.method", "http.route", "network.protocol.name", SCHEME, "rpc.system.name", RPC_METHOD)


def _is_rpc(endpoint: Labels) -> bool:
    return any(name == RPC_METHOD for name, _ in endpoint)


def _duration_metric(endpoint: Labels) -> MetricDefinition:
    return RPC_DURATION if _is_rpc(endpoint) else HTTP_DURATION


def _without_route(endpoint: Labels) -> Labels:
    return tuple(label for label in endpoint if label[0] != "http.route")


def make_site_id(site: Site) -> str:
    """Return a short id of a site. It is the same in all processes, and remains the same if the site is renamed."""
    return blake2b(repr(site.key[1:]).encode("utf-8", "replace"), digest_size=6).hexdigest()


def _call_labels(site: Site) -> Labels:
    labels = (("instrument.span.name", site.name), ("code.function.name", site.function))
    return tuple(label for label in labels if label[1])
