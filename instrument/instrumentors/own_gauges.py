"""Read the gauges of function rules: numbers in a call's arguments or result, such as the length of a queue.

A gauge is read at most once per interval. `instrument.recorder.own_numbers` stores the numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from instrument.instrumentors.arguments import LEFT_OUT, RETURN, Parameter, parameter_of, part_of
from instrument.profile.model import FunctionRule, OwnGauge
from instrument.recorder.own_numbers import number_of
from instrument.runtime.faults import FAULTS


class GaugeReader:
    """A reader of a rule's gauges. `of_call` reads a call's arguments, and `of_result` reads its result.

    Either is None if it has no gauge to read. `missing` has a message for each parameter that the function lacks.
    """

    def __init__(self, function: Callable[..., Any], rule: FunctionRule) -> None:
        self.missing: list[str] = []
        self._of_call: list[_GaugeRead] = []
        self._of_result: list[_GaugeRead] = []
        for gauge in rule.gauges:
            first, *steps = gauge.argument.split(".")
            parameter = None if first == RETURN else parameter_of(function, first)
            if isinstance(parameter, str):
                self.missing.append(parameter)
            elif parameter is None:
                self._of_result.append(_GaugeRead(gauge, parameter, steps, rule))
            else:
                self._of_call.append(_GaugeRead(gauge, parameter, steps, rule))
        self.of_call = self._read_call if self._of_call else None
        self.of_result = self._read_result if self._of_result else None

    def _read_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        now_ns = time.monotonic_ns()
        for read in self._of_call:
            if now_ns >= read.due_ns and read.parameter is not None:
                read.read_gauge(read.parameter.of(args, kwargs), now_ns)

    def _read_result(self, value: Any) -> None:
        now_ns = time.monotonic_ns()
        for read in self._of_result:
            if now_ns >= read.due_ns:
                read.read_gauge(value, now_ns)


class _GaugeRead:
    """The reading of one gauge: from a parameter, or from the result if `parameter` is None, along a path."""

    def __init__(self, gauge: OwnGauge, parameter: Parameter | None, steps: list[str], rule: FunctionRule) -> None:
        self.parameter, self._steps_below, self._is_size = parameter, steps, gauge.record == "size"
        self._place = f"{rule.place or rule.text}: gauge {gauge.name}"
        self._put = number_of(gauge.kind, gauge.name, gauge.unit, gauge.every_ns)
        self._every_ns = gauge.every_ns if gauge.kind == "gauge" else 0
        self.due_ns = 0

    def read_gauge(self, value: Any, now_ns: int) -> None:
        """Read the gauge from an argument or a result, and store it unless it is None. Never raises."""
        self.due_ns = now_ns + self._every_ns
        try:
            for step in self._steps_below:
                value = part_of(value, step)
            if value is not None and value is not LEFT_OUT:
                self._put(len(value) if self._is_size else value)
        except Exception as error:  # its text may contain values that no rule names
            FAULTS.note_of_rule(self._place, f"reading it raised {type(error).__name__} at a {type(value).__name__}")
