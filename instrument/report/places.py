"""The place of an event: the innermost span that was open on its thread at the time, by its site."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from instrument.report.table import name_of_site
from instrument.report.view import Recording
from instrument.trace.columns import Bools, Int64s
from instrument.trace.forest import NONE
from instrument.trace.innermost import innermost

UNKNOWN = "(not known)"
"""The place of what cannot be told from the file: no call of the host is known."""

NOWHERE = "(no span was open)"
"""The place of what happened on a thread without an open span."""

SHARED = "(several tasks were open)"
"""The place of what happened while several tasks had spans open on the thread."""

NOT_TOLD = 0
"""The number of `UNKNOWN` among places, which those of the others follow."""


class NumberedPlaces(NamedTuple):
    """The places of many events: `number` is a place in `names`, each the name of a site and its kind."""

    number: Int64s
    names: tuple[tuple[str, str], ...]


def rows_open(recording: Recording, thread_ids: Int64s, times_ns: Int64s, wanted: Bools | None = None) -> Int64s:
    """The row of the innermost of the wanted spans, as `innermost` finds it. Of another profiler's trace the calls that
    ask a device for work are no places."""
    trace = recording.columns
    wanted = np.ones(len(trace), dtype=np.bool_) if wanted is None else wanted.copy()
    if recording.facts.origin.recorder == "other":
        wanted[trace.attributes.having("correlation")] = False
    return innermost(trace, wanted, thread_ids, times_ns)


def places(recording: Recording, thread_ids: Int64s, times_ns: Int64s, wanted: Bools | None = None) -> NumberedPlaces:
    """The places of what happened on threads at times, in any order."""
    trace = recording.columns
    names = {(UNKNOWN, ""): NOT_TOLD, (NOWHERE, ""): 1, (SHARED, ""): 2}
    of_site = [names.setdefault((name_of_site(site), site.kind), len(names)) for site in trace.sites]
    rows = rows_open(recording, thread_ids, times_ns, wanted)
    told = np.array([*of_site, NONE])[trace.site[rows]] if len(trace) else rows
    number = np.where(rows < 0, -rows, told)
    number[times_ns < recording.facts.held[0]] = NOT_TOLD
    return NumberedPlaces(number, tuple(names))
