"""Distributions as OTLP's exponential histograms, of which a collector makes any percentile.

A bucket of scale `s` ends at a power of 2 ** (2 ** -s). The tally's buckets are put where their middles lie, so a value
within 0.78 % of where two buckets meet may count in the other one; at scale 5 a bucket is 2.2 % wide. Where more than
`MOST_BUCKETS` would be needed, as for times of which one is 32 times another, two are made one until they fit.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache

from instrument.otlp.packing import pack_field, varint
from instrument.recording.distributions import Distribution
from instrument.recording.histogram import bucket_middle

FINEST_SCALE = 5
MOST_BUCKETS = 160
"""As many as OpenTelemetry's SDKs use at most."""


@dataclass(frozen=True, slots=True)
class Exponential:
    """An exponential histogram of durations in s. `counts` begin with the bucket `offset`; the least and the most are
    None where they are not known."""

    count: int
    sum_s: float
    scale: int
    zero_count: int
    offset: int
    counts: tuple[int, ...]
    least_s: float | None = None
    most_s: float | None = None


def exponential(of: Distribution, *, has_extremes: bool) -> Exponential:
    """A distribution as such a histogram."""
    found: dict[int, int] = {}
    zero_count = 0
    for index, count in of.buckets.items():
        if index == 0:
            zero_count += count
        else:
            at = _finest_bucket(index)
            found[at] = found.get(at, 0) + count
    scale, first, last = FINEST_SCALE, min(found, default=0), max(found, default=-1)
    while last - first >= MOST_BUCKETS:
        scale, first, last = scale - 1, first >> 1, last >> 1
    counts = [0] * (last - first + 1)
    for at, count in found.items():
        counts[(at >> FINEST_SCALE - scale) - first] += count
    told = has_extremes and of.count > 0
    return Exponential(
        of.count,
        of.sum_ns / 1e9,
        scale,
        zero_count,
        first,
        tuple(counts),
        of.least_ns / 1e9 if told else None,
        of.most_ns / 1e9 if told else None,
    )


@lru_cache(maxsize=4096)
def _finest_bucket(index: int) -> int:
    """The bucket of the finest scale in which the middle of a bucket of the tally lies, in s."""
    return math.ceil(math.log2(bucket_middle(index) / 1e9) * (1 << FINEST_SCALE)) - 1


# ExponentialHistogramDataPoint {count 4, sum 5, scale 6, zero_count 7, positive 8, min 12, max 13}; its Buckets
# {offset 1, bucket_counts 2}.
_pack_fixed = struct.Struct("<BQ").pack
_pack_double = struct.Struct("<Bd").pack


def pack_exponential(of: Exponential) -> bytes:
    """The fields of a data point that hold the histogram."""
    counts = b"".join(map(varint, of.counts))
    return b"".join(
        (
            _pack_fixed(0x21, of.count),
            _pack_double(0x29, of.sum_s),
            b"\x30" + varint(_zigzag(of.scale)),
            _pack_fixed(0x39, of.zero_count),
            pack_field(b"\x42", b"\x08" + varint(_zigzag(of.offset)) + pack_field(b"\x12", counts)),
            b"" if of.least_s is None else _pack_double(0x61, of.least_s),
            b"" if of.most_s is None else _pack_double(0x69, of.most_s),
        )
    )


def _zigzag(number: int) -> int:
    return number << 1 if number >= 0 else (-number << 1) - 1
