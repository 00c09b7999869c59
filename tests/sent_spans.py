"""Spans as they are sent to a collector or, by `instrument convert`, to a file: whether each trace is one tree."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from otlp_collectors import Collector


class SentSpan(NamedTuple):
    """A span: the process that it is of, its trace, its id, that of its parent, its name, and how many links it has."""

    process: str
    trace: str
    span: str
    parent: str
    name: str
    links: int


def sent_to(collector: Collector) -> list[SentSpan]:
    """All spans that a collector has."""
    return [
        SentSpan(
            process, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.name, len(span.links)
        )
        for process, spans in collector.spans.items()
        for span in spans
    ]


def converted(folder: Path) -> list[SentSpan]:
    """Return the spans that `instrument convert` makes of the recordings in a folder."""
    path = folder.with_name("spans.jsonl")
    command = [sys.executable, "-m", "instrument", "convert", str(folder), "--to", "otlp", "-o", str(path)]
    subprocess.run(command, capture_output=True, timeout=240, check=True)
    found = []
    for line in path.read_text().splitlines():
        for of_resource in json.loads(line)["resourceSpans"]:
            told = {one["key"]: one["value"] for one in of_resource["resource"]["attributes"]}
            process = str(told["service.instance.id"]["stringValue"])
            spans = [span for of_scope in of_resource["scopeSpans"] for span in of_scope["spans"]]
            found += [
                SentSpan(
                    process, span["traceId"], span["spanId"], span.get("parentSpanId", ""), span["name"],
                    len(span.get("links", ())),
                )
                for span in spans
            ]  # fmt: skip
    return found


def trees(spans: Sequence[SentSpan], name: str) -> list[list[SentSpan]]:
    """The spans of each trace that has any whose name begins so: one tree. No span at all is there twice or below
    nothing.
    """
    ids = Counter((one.trace, one.span) for one in spans)
    assert not [one for one in spans if ids[one.trace, one.span] > 1]
    assert not [one for one in spans if one.parent and (one.trace, one.parent) not in ids]
    found: dict[str, list[SentSpan]] = {}
    for one in spans:
        found.setdefault(one.trace, []).append(one)
    named = [its for its in found.values() if any(one.name.startswith(name) for one in its)]
    assert {len([one for one in its if not one.parent]) for its in named} <= {1}
    return named
