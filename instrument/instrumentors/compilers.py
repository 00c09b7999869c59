"""Compilers: torch.compile is kept from looking into what runs around the calls of a service.

Where a compiled function falls back to Python in its middle, whatever is called there is compiled in turn, frame by
frame. Frames of torch's own are left out by their place; these here have to be named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any


def run_as_they_are(torch: Any, functions: Iterable[Any]) -> None:
    """Have Python run the frames of these functions, whoever compiles what they call. It holds for good."""
    evaluation = _eval_frame(torch)
    codes = [code for code in (getattr(one, "__code__", None) for one in functions) if isinstance(code, CodeType)]
    if hasattr(evaluation, "set_code_exec_strategy"):
        action = evaluation._FrameAction
        strategy = evaluation._FrameExecStrategy(action.SKIP, action.DEFAULT)
        for code in codes:
            evaluation.set_code_exec_strategy(code, strategy)
    elif hasattr(evaluation, "skip_code"):  # before torch 2.8
        for code in codes:
            evaluation.skip_code(code)


def compiling_test(torch: Any) -> Callable[[], bool]:
    """Return a test that is true while torch compiles the running code, where no probe may be."""
    found: Callable[[], bool] | None = getattr(getattr(torch, "compiler", None), "is_compiling", None)
    return found or (lambda: False)


def evaluator(torch: Any) -> Callable[[Any], Any]:
    """Sets what evaluates Python's frames on this thread, None for Python itself, and returns what did before."""
    found: Callable[[Any], Any] | None = getattr(_eval_frame(torch), "set_eval_frame", None)
    return found or (lambda evaluate: None)


def _eval_frame(torch: Any) -> Any:
    return getattr(getattr(getattr(torch, "_C", None), "_dynamo", None), "eval_frame", None)
