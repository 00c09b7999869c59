"""Pages of reports as tests read them: their document, their columns, and traces of an engine with keys and batches."""

from __future__ import annotations

import base64
import itertools
import json
import random
import zlib
from html.parser import HTMLParser
from typing import Any

from interval_lists import assign_self_times

from instrument.recording.spans import BATCH_KEYS, BATCH_WEIGHTS, KEY, DeviceInterval, Origin, Site, Span
from instrument.report.html_page import page_document, render_page
from instrument.report.view import Options, Recording
from instrument.trace.trace import Trace

US, MS = 1_000, 1_000_000


def page_of(trace: Trace, options: Options | None = None, request: str | None = None) -> str:
    return render_page(page_document(Recording.from_trace(trace), options or Options(), request))


class Elements(HTMLParser):
    """The elements of a page in order, and the text of each script and style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[tuple[str, str | None], ...]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(attrs)))
        if tag in ("script", "style"):
            self.texts.append((tag, ""))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem is not None:
            tag, text = self.texts[-1]
            self.texts[-1] = tag, text + data

    @property
    def document(self) -> dict[str, Any]:
        """Return the data of the page."""
        data = next(text for tag, text in self.texts if tag == "script")
        found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(data, validate=True)))
        return found


def document_of(trace: Trace, options: Options | None = None, request: str | None = None) -> dict[str, Any]:
    return Elements(page_of(trace, options, request)).document


def summed(steps: list[int]) -> list[int]:
    """The numbers of a column that was written by differences."""
    return list(itertools.accumulate(steps))


CHAT = Site("POST /v1/chat", "request", module="api.server", qualname="chat", suspends=True)
EMBED = Site("POST /v1/embed", "request", module="api.server", qualname="embed", suspends=True)
TOKENISE, GENERATE = Site("tokenise", "phase"), Site("generate", "phase", suspends=True)
ACCEPT, STEP = Site("accept", "phase"), Site("engine.step", "step", module="engine", qualname="Core.step", device=True)
LAYERS = [Site("Linear", "layer", instance=f"model.layers.{number}", device=True) for number in range(16)]


def engine_trace(count: int, layers: int = 4) -> Trace:
    """Return a trace of `count` requests of an API process.

    The batches of an engine with a device serve the requests, eight at a time.
    """
    spans: list[Span] = []
    pick = random.Random(7)

    def add(site: Site, start: int, end: int, parent: Span | None = None, thread: int = 1, task: int = 0) -> Span:
        root = parent.root_id if parent is not None else len(spans) + 1
        above = parent.span_id if parent is not None else 0
        span = Span(site, len(spans) + 1, above, root, thread, task, start, end, end - start, 0)
        spans.append(span)
        return span

    clock, waiting, live = 5 * MS, list(range(count)), dict[int, list[int]]()
    while waiting or live:
        while waiting and len(live) < 8:
            number = waiting.pop(0)
            add(ACCEPT, clock, clock + 15 * US, thread=2).attributes = {KEY: f"req-{number}"}
            live[number] = [pick.randrange(2, 9), clock]
            clock += 20 * US
        step = add(STEP, clock, clock, thread=2)
        step.attributes = {
            BATCH_KEYS: tuple(f"req-{number}" for number in live),
            BATCH_WEIGHTS: tuple(float(1 + number % 3) for number in live),
        }
        clock += 50 * US
        for site in LAYERS[:layers]:
            took = pick.randrange(30, 90) * US
            layer = add(site, clock, clock + took, step, 2)
            layer.device = (DeviceInterval(0, 7, clock + 10 * US, clock + 10 * US + took, "exclusive", 2000),)
            clock += took
        step.end_ns = clock = clock + 100 * US
        step.active_ns = step.end_ns - step.start_ns
        clock += pick.randrange(20, 200) * US
        for number in list(live):
            live[number][0] -= 1
            if not live[number][0]:
                begun = live.pop(number)[1] - pick.randrange(1, 4) * MS
                root = add(EMBED if number % 5 == 0 else CHAT, begun, clock + MS, None, 1, 100 + number)
                root.attributes = {KEY: f"req-{number}", "http.response.status_code": 200}
                if number % 50 == 49:
                    root.error = "TimeoutError"
                add(TOKENISE, begun + 10 * US, begun + 90 * US, root, 1, 100 + number)
                add(GENERATE, begun + 90 * US, clock + MS - 5 * US, root, 1, 100 + number)
    assign_self_times(spans)
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        span.active_ns = 0 if span.site.suspends else span.self_ns
    for span in reversed(spans):  # children come after their parents
        if span.parent_id:
            by_id[span.parent_id].active_ns += span.active_ns
    end_ns = max(span.end_ns for span in spans) + MS
    threads = {1: "api 4711: MainThread", 2: "engine 4712: engine"}
    return Trace(Origin(4711, "chat-7b", 0, 1_763_892_000 * 10**9, "native"), 0, end_ns, spans, threads)
