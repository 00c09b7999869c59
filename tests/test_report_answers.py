"""What the view `requests` says of answers: statuses by class, rates, streamed items."""

from __future__ import annotations

import pytest

from instrument.report.answers import Answers, Streams


def attributes(**given: object) -> dict[str, object]:
    return {name.replace("__", "."): value for name, value in given.items()}


def test_answers_are_counted_by_the_class_of_their_status() -> None:
    answers = Answers()
    for status in (200, 204, 301, 404, 499, 503):
        answers.add(attributes(http__response__status_code=status))
    assert answers.statuses() == {"2xx": 2, "3xx": 1, "4xx": 2, "5xx": 1}
    assert answers.streams() is None


def test_the_time_of_an_item_is_shared_by_those_after_the_first() -> None:
    answers = Answers()
    answers.add(attributes(first_item_ns=100, last_item_ns=400, items=4, longest_gap_ns=250))
    answers.add(attributes(first_item_ns=300, last_item_ns=300, items=1))
    assert answers.streams() == Streams(2, 5, 100, 300, 100, 100, 250)


def test_endpoints_together_have_the_answers_of_each() -> None:
    first, second = Answers(), Answers()
    first.add(attributes(http__response__status_code=200, first_item_ns=1, last_item_ns=3, items=3, longest_gap_ns=2))
    second.add(attributes(http__response__status_code=500, first_item_ns=2, last_item_ns=2, items=1))
    first.merge(second)
    assert first.statuses() == {"2xx": 1, "5xx": 1}
    assert first.streams() == Streams(2, 4, 1, 2, 1, 1, 2)


@pytest.mark.parametrize("found", ["200", None, True, -1, 99, 600, 10**30, [200], 200.0])
def test_a_status_that_is_none_is_not_counted(found: object) -> None:
    answers = Answers()
    answers.add(attributes(http__response__status_code=found, first_item_ns=found, items=found))
    assert answers.statuses() == {}
