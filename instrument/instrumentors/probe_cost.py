"""Measure the time that recording adds to a call on this machine. Reports show it, and the profile's `budget` limits
it.

The cost differs between functions, coroutines, layers, requests etc. A session measures each of them at its start.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from operator import sub
from typing import Any

from instrument.profile.model import RequestsRule
from instrument.recorder import wrapping
from instrument.recorder.recorder import REQUEST, STEP, Recorder
from instrument.recording.memory_layout import END_NS, START_NS, unpack_rows
from instrument.recording.spans import Site
from instrument.runtime import agent_socket, file_writing
from instrument.runtime.lazy_imports import NamedTuple

AMONG = 1.3
"""The assumed ratio of a span's cost in a service to the cost in a loop that contains nothing else."""

ROUNDS, CALLS, CALLS_PER_REQUEST = 5, 200, 10
"""A measurement has `ROUNDS` rounds. A round has `CALLS` calls per shape of probe, but only `CALLS //
CALLS_PER_REQUEST` requests."""


class ProbeCost(NamedTuple):
    """The cost of a span in ns. `added_ns` is the total, and `outside_ns` the part before and after the span.

    Both are the lowest measured values. `usual_ns` is the median, including cache misses and interrupts.
    """

    added_ns: float
    outside_ns: float
    usual_ns: float


def _make_recorder(with_ticks: bool) -> Recorder:
    recorder = Recorder(ring_bytes=1 << 20)
    if with_ticks:
        recorder.start_ticks()
    recorder.on = True
    return recorder


Run = Callable[[Any, int], None]

TRACEPARENT = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
HEADERS = [(b"host", b"localhost"), (b"accept", b"*/*"), (b"content-length", b"20"), (b"traceparent", TRACEPARENT)]
ADDRESS: dict[str, Any] = {"type": "http", "method": "GET", "path": "/", "scheme": "http", "server": ("127.0.0.1", 80)}
SCOPE = {**ADDRESS, "headers": HEADERS}
START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
BODY = {"type": "http.response.body", "body": b"{}"}
"""The ASGI message with the body of the test app's answer."""


Timed = tuple[float, float, float]
"""The shortest times of a call with and without a probe, and the median time that the probe adds, in ns."""


def _make_calls(recorder: Recorder) -> tuple[list[Site], dict[str, tuple[Run, Any, Run, Any]]]:
    """Return sites, and two calls per shape of probe: a call with a probe and a call without a probe."""
    from instrument.instrumentors.requests import asgi_wsgi_apps
    from instrument.instrumentors.requests.exchange import Exchanges

    def do_nothing() -> None:
        pass

    def do_nothing_to(_: object) -> None:
        pass

    async def do_nothing_async(_: object = None) -> None:
        pass

    async def answer(_: object, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        await receive()
        await send(START)
        await send(BODY)

    def generator(steps: int = 1) -> Iterator[None]:
        for _ in range(steps):
            yield

    def call_repeatedly(function: Callable[[], Any], count: int) -> None:
        for _ in range(count):
            function()

    def run_coroutines(function: Callable[[], Any], count: int) -> None:
        for _ in range(count):
            try:
                function().send(None)
            except StopIteration:
                pass

    def read_generators(function: Callable[[], Any], count: int) -> None:
        for _ in range(count):
            for _ in function():
                pass

    def open_scopes(function: Callable[[], Any], count: int) -> None:
        for _ in range(count):
            with recorder.scope("scope"):
                function()

    def read_steps(function: Callable[[int], Any], count: int) -> None:
        for _ in function(count):
            pass

    sites = [recorder.find_or_make_scope_site("scope", "user"), Site("method")]
    calls: dict[str, tuple[Run, Any, Run, Any]] = {}
    for shape, run, function in (
        ("call", call_repeatedly, do_nothing),
        ("coroutine", run_coroutines, do_nothing_async),
        ("generator", read_generators, generator),
        ("wrapper", call_repeatedly, do_nothing),
        (STEP, read_steps, generator),
    ):
        sites.append(Site(shape, "request" if shape == "wrapper" else "op"))
        calls[shape] = run, recorder.wrap(function, sites[-1]), run, function
    layer, method_site = object(), sites[1]
    method = wrapping.wrap_method(recorder, do_nothing_to, {id(layer): method_site}, lambda _: method_site)
    recorder.allow_muting(method_site)
    app = asgi_wsgi_apps.AsgiApp(answer, Exchanges(RequestsRule(name=REQUEST), recorder))
    messages: Any = (SCOPE, do_nothing_async, do_nothing_async)
    return sites, calls | {
        "scope": (open_scopes, do_nothing, call_repeatedly, do_nothing),
        "method": (call_repeatedly, lambda: method(layer), call_repeatedly, lambda: do_nothing_to(layer)),
        REQUEST: (run_coroutines, partial(app, *messages), run_coroutines, partial(answer, *messages)),
    }


def _time_calls(calls: Mapping[str, tuple[Run, Any, Run, Any]]) -> dict[str, Timed]:
    spent: dict[str, list[tuple[float, float]]] = {shape: [] for shape in calls}
    for _ in range(ROUNDS):
        for shape, (run, recorded, run_bare, bare) in calls.items():
            count = CALLS // CALLS_PER_REQUEST if shape == REQUEST else CALLS
            began_ns = time.perf_counter_ns()
            run(recorded, count)
            between_ns = time.perf_counter_ns()
            run_bare(bare, count)
            ended_ns = time.perf_counter_ns()
            spent[shape].append(((between_ns - began_ns) / count, (ended_ns - between_ns) / count))
    timed: dict[str, Timed] = {}
    for shape, pairs in spent.items():
        recorded_ns, bare_ns = zip(*pairs, strict=True)
        added_ns = sorted(map(sub, recorded_ns, bare_ns))[ROUNDS // 2]
        timed[shape] = min(recorded_ns), min(bare_ns), max(added_ns, 0.0)
    return timed


def measure_costs(*, with_ticks: bool = False) -> dict[str, ProbeCost]:
    """Measure the cost of a span for each shape of probe, in 4 ms. `with_ticks` times spans by the processor's time
    stamp counter.

    - `call`, `coroutine`, `generator`: kinds of functions
    - `scope`: a `with` block
    - `method`: a call of a layer
    - `wrapper`: a function that is recorded as a request
    - `request`: a request over ASGI
    - `step`: an item of a generator after the first item
    """
    recorder = _make_recorder(with_ticks)
    timed = _time_calls(_make_calls(recorder)[1])
    # The part inside of a span is the length of an empty span; a step has no span of its own.
    lengths: dict[str, list[int]] = {}
    for ring in recorder.rings():
        for row in unpack_rows(ring.copied(0)):
            lengths.setdefault(recorder.find_site(row).name, []).append(row[END_NS] - row[START_NS])
    inside_ns = {name: sorted(times_ns)[(len(times_ns) - 1) // 2] for name, times_ns in lengths.items()}
    costs = {}
    for shape, (recorded_ns, bare_ns, usual_ns) in timed.items():
        added_ns = max(recorded_ns - bare_ns, 0.0)
        outside_ns = added_ns if shape == STEP else added_ns - max(inside_ns[shape] - bare_ns, 0.0)
        costs[shape] = ProbeCost(added_ns, max(outside_ns, 0.0), max(usual_ns, added_ns) * AMONG)
    return costs


def measure_muted_call_ns() -> dict[str, float]:
    """Measure the median cost of a muted call for each shape of probe, in 2 ms. Requests are never muted."""
    recorder = _make_recorder(False)
    sites, calls = _make_calls(recorder)
    for site in sites:
        recorder.mute(site)
    del calls[REQUEST]
    return {shape: usual_ns for shape, (_, _, usual_ns) in _time_calls(calls).items()}


SWEPT_BYTES = 2 << 20
"""The bytes to read and write in order to evict the recorder's data from the L1 and L2 caches."""


def measure_cold_cache_ns(*, with_ticks: bool = False) -> float:
    """Measure the cost of a layer's span in ns after other work has evicted the recorder's data from the caches.

    The result may be wrong by a third. The measurement takes 8 ms and 6 MiB.
    """
    clock = time.perf_counter_ns
    memory, into = memoryview(bytes(2 * SWEPT_BYTES)), bytearray(SWEPT_BYTES)
    parts = itertools.cycle(memory[at : at + SWEPT_BYTES] for at in range(0, len(memory), SWEPT_BYTES))
    inside_ns = 0

    def evict_caches(_: object) -> None:
        nonlocal inside_ns
        began_ns = clock()
        into[:] = next(parts)
        inside_ns = clock() - began_ns

    recorder = _make_recorder(with_ticks)
    layers = [object() for _ in range(16)]
    sites: dict[int, Site | None] = {id(layer): Site(f"layer {place}", "layer") for place, layer in enumerate(layers)}
    method = wrapping.wrap_method(recorder, evict_caches, sites, lambda _: None)
    outside_ns: dict[bool, list[int]] = {True: [], False: []}
    for layer in layers:
        method(layer)  # the first call of a site costs more
    for layer in layers:
        for recorder.on in (True, False):
            into[:] = next(parts)
            began_ns = clock()
            method(layer)
            outside_ns[recorder.on].append(clock() - began_ns - inside_ns)
    on_ns, off_ns = (sorted(outside_ns[on])[len(outside_ns[on]) // 2] for on in (True, False))
    return float(max(on_ns - off_ns, 0))


class Costs:
    """The measured costs of a recorder's probes, empty before `measure`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.by_shape: dict[str, ProbeCost] = {}
        """The cost of a span for each shape of probe."""
        self.passed_ns: dict[str, float] = {}
        """The cost of a muted call in ns for each shape of probe."""
        self._with_ticks = False
        self._cold_ns: float | None = None

    def measure(self, *, with_ticks: bool = False) -> None:
        """Measure the costs, which takes 6 ms, or read them if another process of the run has measured them."""
        self._with_ticks, self._cold_ns = with_ticks, None
        measure = lambda: (measure_costs(with_ticks=with_ticks), measure_muted_call_ns())  # noqa: E731
        costs, self.passed_ns = self._load_or_measure("costs", measure)
        self.by_shape = {shape: ProbeCost(*cost) for shape, cost in costs.items()}
        if agent_socket.find_shared_file("cold") is None:
            self._cold_ns = self.cold_cost_ns

    @property
    def cold_cost_ns(self) -> float:
        """The additional cost in ns of a call with cold caches. It is measured once per run, which takes 8 ms."""
        if self._cold_ns is None:
            among_ns = self._load_or_measure("cold", lambda: measure_cold_cache_ns(with_ticks=self._with_ticks))
            self._cold_ns = max(among_ns - self.by_shape["method"].added_ns, 0.0)
        return self._cold_ns

    def _load_or_measure(self, name: str, measure: Callable[[], Any]) -> Any:
        path = agent_socket.find_shared_file(f"{name}{'-ticks' * self._with_ticks}")
        with suppress(OSError, ValueError):
            return json.loads(b"" if path is None else path.read_bytes())
        measured = copy_context().run(measure)
        if path is not None:
            with suppress(OSError), file_writing.open_replacement(path) as file:
                file.write(json.dumps(measured).encode())
        return measured

    def median_ns_by_shape(self) -> dict[str, float]:
        return {shape: cost.usual_ns for shape, cost in self.by_shape.items()}

    def find_site_cost(self, site: Site) -> ProbeCost:
        return self.by_shape[self._recorder.shapes.get(site, "scope")]

    def sum_cost_ns(self, calls: Mapping[Site, int]) -> float:
        return sum(count * self.find_site_cost(site).added_ns for site, count in calls.items())
