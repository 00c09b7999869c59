"""The view `requests` reports answers: statuses by class, rates, streamed items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from instrument.recording.spans import Site, Span
from instrument.report.endpoint_statistics import Answers, StreamedAnswers
from instrument.trace.trace import columns_of_spans

CHAT = Site("POST /chat", "request")


def attributes(**given: object) -> dict[str, object]:
    return {name.replace("__", "."): value for name, value in given.items()}


def answers_of(*told: Mapping[str, Any]) -> Answers:
    spans = [Span(CHAT, number + 1, 0, number + 1, 1, 0, 0, 10, 10, 0) for number in range(len(told))]
    for span, its in zip(spans, told, strict=True):
        span.attributes = its
    return Answers.read_answers(columns_of_spans(spans).attributes, np.arange(len(spans)))


def test_answers_are_counted_by_the_class_of_their_status() -> None:
    statuses = (200, 204, 301, 404, 499, 503)
    answers = answers_of(*(attributes(http__response__status_code=status) for status in statuses))
    assert answers.count_statuses() == {"2xx": 2, "3xx": 1, "4xx": 2, "5xx": 1}
    assert answers.summarise_streamed_answers() is None


def test_the_time_of_an_item_is_shared_by_those_after_the_first() -> None:
    answers = answers_of(
        attributes(first_item_ns=100, last_item_ns=400, items=4, longest_gap_ns=250),
        attributes(first_item_ns=300, last_item_ns=300, items=1),
    )
    assert answers.summarise_streamed_answers() == StreamedAnswers(2, 5, 100, 300, 100, 100, 250)


def test_some_requests_report_only_their_answers() -> None:
    answers = answers_of(
        attributes(http__response__status_code=200, first_item_ns=1, last_item_ns=3, items=3, longest_gap_ns=2),
        {},
        attributes(http__response__status_code=500, first_item_ns=2, last_item_ns=2, items=1),
    )
    assert answers.summarise_streamed_answers() == StreamedAnswers(2, 4, 1, 2, 1, 1, 2)
    last = answers.select_answers(np.array([2]))
    assert last.count_statuses() == {"5xx": 1}
    assert last.summarise_streamed_answers() == StreamedAnswers(1, 1, 2, 2, None, None, None)


@pytest.mark.parametrize("found", ["200", None, True, -1, 99, 600, 10**30, [200], 200.0])
def test_a_status_that_is_none_is_not_counted(found: object) -> None:
    answers = answers_of(attributes(http__response__status_code=found, first_item_ns=found, items=found))
    assert answers.count_statuses() == {}
