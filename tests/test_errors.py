"""Errors of ours: they pickle, and a fault is counted, logged once and never raised into the service."""

from __future__ import annotations

import logging
import pickle
import threading

import pytest

from instrument.errors import ProfileError
from instrument.runtime.faults import Faults


def test_a_profile_error_survives_pickling_with_all_its_problems() -> None:
    error = pickle.loads(pickle.dumps(ProfileError(["a.yaml:1:1: x", "a.yaml:2:1: y"])))
    assert (error.problems, str(error)) == (("a.yaml:1:1: x", "a.yaml:2:1: y"), "a.yaml:1:1: x\na.yaml:2:1: y")


def test_a_fault_is_counted_each_time_and_logged_the_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    faults = Faults()
    for _ in range(3):
        faults.note("import hook", ValueError("ours"))
    assert faults.count_by_place() == {"import hook": 3}
    (record,) = caplog.records
    assert "import hook" in record.getMessage()
    assert record.exc_info is not None


def test_under_pytest_a_fault_is_raised() -> None:
    with pytest.raises(ValueError, match="ours"):
        Faults().note("import hook", ValueError("ours"))


def test_a_log_handler_that_raises_does_not_carry_a_fault_into_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    class Raising(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("the service's own")

    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    handler, faults = Raising(), Faults()
    logging.getLogger("instrument").addHandler(handler)
    try:
        faults.note("exit", ValueError("ours"))
    finally:
        logging.getLogger("instrument").removeHandler(handler)
    assert faults.count_by_place() == {"exit": 1}


def test_a_fault_inside_the_count_of_another_on_the_same_thread_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector can run a finaliser that notes a fault while the count is locked."""
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    faults = Faults()

    def nested() -> None:
        with faults._lock:
            faults.note("finaliser", ValueError("ours"))

    thread = threading.Thread(target=nested, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
