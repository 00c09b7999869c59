"""Recordings of many processes that have ended, as one that grows no further: all of their totals, their newest spans.

A service whose workers are recycled for months has thousands of them. What each brings of its own is bounded here: its
threads, of which only those of the spans that are held keep a number and a name, its call paths, readings and notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from instrument.recording.spans import Site
from instrument.recording.tally import OVERFLOW, Tally
from instrument.trace.columns import Bools, Trace
from instrument.trace.file import Saved
from instrument.trace.merge import merge

SPANS_KEPT = 20_000
SAMPLES_KEPT = 20_000
"""So many readings of gauges, the newest."""

PATHS_KEPT = 16_384
"""Call paths that have a line of their own, as many as in one process; then each site has one."""

NOTES_KEPT = 100
MORE_NOTES = f"processes that ended long before the run did had more than {NOTES_KEPT} notes; the rest is not told"

LEFT_OUT = "spans of processes that ended long before the run did"

ENDED_THREADS = 0, "(ended threads)"
"""The number and name under which the calls of threads count that have ended, as recorders have it."""


def folded(files: Sequence[Saved]) -> Saved:
    """Recordings of processes that have ended, or what has been made of such before, as one. Raises `TraceError`."""
    saved = merge(files).saved
    facts = saved.facts
    columns, since_ns = _newest(saved.columns, SPANS_KEPT)
    losses, lost = dict(facts.losses), len(saved.columns) - len(columns)
    if lost:
        losses[LEFT_OUT] = losses.get(LEFT_OUT, 0) + lost
    samples = facts.samples[-SAMPLES_KEPT:]
    devices = {*columns.device.device.tolist(), *(sample.device for sample in samples)}
    threads = {*columns.thread_id.tolist(), *(one.thread_id for one in facts.flops)}
    facts = replace(
        facts,
        origin=replace(facts.origin, pid=0),  # of none: the number may be another process's by now
        threads={thread: name for thread, name in facts.threads.items() if thread in threads},
        losses=losses,
        # As they were said: named by process they would be more with each fold, and the names before them too.
        notes=_few(list(dict.fromkeys(note for one in files for note in one.facts.notes if note != MORE_NOTES))),
        held_from_ns=max(facts.held_from_ns, since_ns),
        samples=samples,
        gpus=[gpu for gpu in facts.gpus if gpu.device in devices],
        startup=None,
        processes=(),
        died="",  # each was said as it happened; the run's report counts them
    )
    return Saved(columns, facts, _of_ended_threads(saved.counted()))


def _few(notes: list[str]) -> list[str]:
    return notes if len(notes) <= NOTES_KEPT else [*notes[:NOTES_KEPT], MORE_NOTES]


def _newest(trace: Trace, count: int) -> tuple[Trace, int]:
    """The spans that ended last, with the sites and errors of these alone, and since when none is missing (0: ever)."""
    wanted, since_ns = np.ones(len(trace), dtype=np.bool_), 0
    if len(trace) > count:
        in_order = np.argsort(trace.end_ns, kind="stable")
        wanted[in_order[:-count]] = False
        since_ns = int(trace.end_ns[in_order[-count - 1]]) + 1
    return _only(trace, wanted), since_ns


def _only(trace: Trace, wanted: Bools) -> Trace:
    few = trace.with_attributes(wanted)
    sites, site = np.unique(few.site, return_inverse=True)
    known = np.unique(few.error[few.error >= 0])
    error = np.where(few.error >= 0, np.searchsorted(known, few.error), few.error)
    return replace(
        few,
        sites=tuple(trace.sites[place] for place in sites.tolist()),
        site=site.astype(np.int32),
        errors=tuple(trace.errors[place] for place in known.tolist()),
        error=error.astype(np.int32),
    )


def _of_ended_threads(tally: Tally) -> Tally:
    """The same totals without the threads, in as many call paths as one process may have."""
    thread, name = ENDED_THREADS
    found, known = Tally({thread: name}), set[tuple[Site, ...]]()
    for row in tally.rows():
        path = row.path
        if path not in known and len(known) >= PATHS_KEPT:
            path = (OVERFLOW, path[-1]) if path and len(known) < 2 * PATHS_KEPT else (OVERFLOW,)
        known.add(path)
        found.totals(path, thread).merge(row.totals)
    return found
