"""A module that makes its names when they are asked for."""

from typing import Any


def present(value: int) -> int:
    return value + 1


def __getattr__(name: str) -> Any:
    raise AttributeError(f"code of the host ran for {name}")
