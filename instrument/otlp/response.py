"""What a collector answered to one request, by HTTP or gRPC."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Response:
    """What became of one request: whether it was taken, how many of its spans were rejected all the same, and why.

    `refused` says that the collector has no place for such requests at all, `wait_s` that it takes none for so long.
    """

    taken: bool
    rejected: int = 0
    too_large: bool = False
    refused: bool = False
    wait_s: float = 0.0
    reason: str = ""
