"""Moves facts (the values that rules read at calls) to the requests that the calls serve.

The span of a call has facts as attributes, and their names in `FACTS`. The request may be in another process.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from instrument.recording.spans import ATTRIBUTE_LIMIT, FACT_KEYS, FACTS, AttributeValue
from instrument.trace.columns import Columns, Int64s, override_rows
from instrument.trace.forest import NONE

INPUT_TOKENS, OUTPUT_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
CACHED_TOKENS, PREEMPTIONS = "gen_ai.usage.cache_read.input_tokens", "engine.preemptions"
"""The names of the facts that views show. The presets for engines record them."""


def with_facts(trace: Columns, requests: Int64s, of: Int64s, keys_of: Mapping[int, Sequence[str]]) -> Columns:
    """Return the trace with facts moved from spans to their requests. Facts of unknown requests are not moved.

    `requests` are rows ordered by begin, `of` is the index of each row's request among them, and `keys_of` has the keys
    of requests by index.
    """
    rows = trace.attributes.having(FACTS)
    if not len(rows):
        return trace
    places_of: dict[str, list[int]] = {}
    for place, keys in sorted(keys_of.items()):
        for key in keys:
            places_of.setdefault(key, []).append(place)
    starts = trace.start_ns[requests].tolist()
    facts_by_request: dict[int, dict[str, Any]] = {}
    attributes_by_row: dict[int, dict[str, AttributeValue]] = {}
    for row in rows[np.argsort(trace.end_ns[rows], kind="stable")].tolist():
        attributes = dict(trace.attributes[row])
        at_ns, is_known = int(trace.end_ns[row]), True
        for keep, name, key_of_value, value in _parse_facts(attributes):
            place = int(of[row])
            if key_of_value is not None:
                places = places_of.get(key_of_value, [])
                began = bisect_right(places, at_ns, key=starts.__getitem__)
                place = places[began - 1] if began else NONE
            is_known &= place != NONE
            if place != NONE:
                facts = facts_by_request.setdefault(int(requests[place]), {})
                with suppress(TypeError):  # of values that cannot be added or compared, the first stays
                    facts[name] = _update_fact(keep, facts.get(name), value)
        if is_known:
            attributes_by_row[row] = _drop_fact_lists(attributes)
    for row, facts in facts_by_request.items():
        attributes_by_row[row] = {**attributes_by_row.get(row, trace.attributes[row]), **facts}
    return replace(trace, attributes=override_rows(trace.attributes, len(trace), attributes_by_row))


def _parse_facts(attributes: Mapping[str, Any]) -> Iterator[tuple[str, str, str | None, Any]]:
    """Yield the parts of each fact: its word of `KEEPS`, name, key of the request (None for the span's own one), and
    value."""
    for text in _list_fact_texts(attributes):
        keep, _, name = text.partition(" ")
        value, keys = attributes.get(name), attributes.get(name + FACT_KEYS)
        if isinstance(keys, (list, tuple)) and isinstance(value, (list, tuple)):
            yield from ((keep, name, key, part) for key, part in zip(keys, value, strict=False) if isinstance(key, str))
        elif value is not None:
            yield keep, name, None, value


def _list_fact_texts(attributes: Mapping[str, Any]) -> list[str]:
    listed = attributes.get(FACTS)
    return [text for text in listed if isinstance(text, str)] if isinstance(listed, (list, tuple)) else []


def _drop_fact_lists(attributes: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
    """Return a span's attributes without the lists of facts, which are now attributes of requests."""
    names = [text.partition(" ")[2] for text in _list_fact_texts(attributes)]
    lists = [name for name in names if name + FACT_KEYS in attributes]
    read_names = {FACTS, *lists, *(name + FACT_KEYS for name in lists)}
    return {name: value for name, value in attributes.items() if name not in read_names}


def _update_fact(keep: str, before: Any, value: Any) -> Any:
    """Combine the value of a fact with a later one: to the last, the largest, the sum or a list, as `keep` requires."""
    if keep == "list":
        return (*(before or ()), value)[:ATTRIBUTE_LIMIT]
    if before is None or keep == "last":
        return value
    return before + value if keep == "sum" else max(before, value)
