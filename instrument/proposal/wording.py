"""The numbers in a first profile: rounded, so that two runs that did the same have the same text."""

from __future__ import annotations

from instrument.profile.model import TIME_UNITS


def number_of(value: float) -> str:
    """Write a count: exact up to a thousand, then with three significant digits."""
    whole = round(value)
    if whole >= 1000:
        digits = len(str(whole)) - 3
        whole = round(whole, -digits)
    return f"{whole:,}"


def time_of(ns: float) -> str:
    """Write a time with two significant digits."""
    unit = next((unit for unit, size in TIME_UNITS.items() if ns >= size), "ns")
    value = ns / TIME_UNITS[unit]
    return f"{value:.2g} {unit}" if value < 10 else f"{value:.0f} {unit}"


def each_of(calls: int, total_ns: int) -> str:
    """Write a number of calls, and the mean time of a call."""
    if calls == 1:
        return f"once, {time_of(total_ns)}"
    each = f", {time_of(total_ns / calls)} each" if calls else ""
    return f"{calls:,} times{each}"


def share_of(share: float) -> str:
    """Write a share, in per cent."""
    return f"{min(share, 1.0) * 100:.2g} %" if share < 0.1 else f"{min(share, 1.0):.0%}".replace("%", " %")
