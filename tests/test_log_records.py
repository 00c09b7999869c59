"""Trace and span ids in log records: those that a collector gets, and none outside of spans."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

import instrument
from instrument.profile.keys import loads


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    instrument.stop()


def started() -> instrument.Session:
    session = instrument.start(loads("logs: auto\nagent: off", environ={}))
    assert session is not None
    return session


def test_a_record_has_the_ids_of_its_span_and_an_own_id_wins() -> None:
    make_record = logging.Logger.makeRecord
    session = started()
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s|%(trace_id)s|%(span_id)s|%(funcName)s"))
    logger = logging.getLogger("test_log_records")
    logger.propagate, logger.handlers = False, [handler]
    with instrument.scope("request", kind="request"):
        headers: dict[str, str] = {}
        instrument.inject(headers)
        logger.warning("inside")
        logger.warning("named", extra={"trace_id": "mine"})
    logger.warning("outside")
    _, trace_id, span_id, _ = headers["traceparent"].split("-")
    name = "test_a_record_has_the_ids_of_its_span_and_an_own_id_wins"
    assert stream.getvalue().splitlines() == [
        f"inside|{trace_id}|{span_id}|{name}", f"named|mine|{span_id}|{name}", f"outside|||{name}",
    ]  # fmt: skip
    assert [verdict.state for verdict in session.verdicts() if verdict.rule == "logs"] == ["attached"]
    instrument.stop()
    assert logging.Logger.makeRecord is make_record


def test_an_event_of_structlog_has_both_keys_within_a_span_alone() -> None:
    structlog = pytest.importorskip("structlog")
    started()
    stream = io.StringIO()
    factory = structlog.PrintLoggerFactory(stream)
    logger = structlog.wrap_logger(factory(), processors=[structlog.processors.JSONRenderer()])
    with instrument.scope("request", kind="request"):
        headers: dict[str, str] = {}
        instrument.inject(headers)
        logger.info("inside", user="u")
    logger.info("outside")
    _, trace_id, span_id, _ = headers["traceparent"].split("-")
    inside, outside = map(json.loads, stream.getvalue().splitlines())
    assert inside == {"event": "inside", "user": "u", "trace_id": trace_id, "span_id": span_id}
    assert outside == {"event": "outside"}
