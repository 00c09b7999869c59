"""The rows of the `events` view, computed from a tally: the calls of each thread by name, and the sums of copies.

The Total time is split into computation and framework, and for a service a third part, waiting. A service spends most
of its time waiting: in queues, for I/O, and for its turn on the event loop. So the time in which coroutines are
suspended is waiting, not overhead.

The three parts add up to the Total time. The time of a call is divided among the calls below it, on any thread or task,
and the remaining time is the call's own. If the calls below took longer, their times are scaled down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from instrument.recording.distributions import percentiles
from instrument.recording.paths import KIND
from instrument.recording.spans import Site, is_interruption, is_operator
from instrument.recording.tally import Records, Tally, Totals, total_of
from instrument.report.function_times import sum_topmost
from instrument.report.table import Ratio, share
from instrument.report.tree import ROOT, TIMES, NameTree, ShownEntries
from instrument.report.view import Options

_COMPUTING = frozenset({"compute", "forward", "backward", "optimizer"})
_WAITING = frozenset({"queue", "wait"})
"""The phases that count as waiting, and the names of spans that count as waiting if they declare no phase."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """The Total time of all threads, split into computation and framework, and for a service also into waiting.

    Computation is the time of topmost layers, of spans named `compute`, and of phases declared as `compute`, `forward`,
    `backward` or `optimizer`. If torch.profiler recorded torch's operators, it is their time instead. `computation_ns`
    and `framework_ns` are None if no such span exists. `waiting_ns` is None without a service. Parallel computation may
    exceed the Total time. `framework_ns` is None then, except in a service, where computation is scaled down to fit.
    """

    total_ns: int
    computation_ns: int | None
    waiting_ns: int | None = None

    computation_ratio = Ratio("computation_ns", of="total_ns")
    waiting_ratio = Ratio("waiting_ns", of="total_ns")

    @property
    def framework_ns(self) -> int | None:
        """The Total time that is neither computation nor waiting, None if unknown."""
        if self.computation_ns is None or self.computation_ns > self.total_ns:
            return None
        return self.total_ns - self.computation_ns - (self.waiting_ns or 0)

    framework_ratio = Ratio("framework_ns", of="total_ns")


def split_overhead(tally: Tally, total_ns: int, state: str) -> Overhead:
    """Return the split of a state's Total time. Programs with requests or coroutines also wait."""
    kinds = tally.tree.by_site(KIND)
    # Most processes have no such site. Then no site is checked.
    may_compute = any(site.attributes for site in tally.tree.sites) or "layer" in kinds or "phase" in kinds
    has_operators = "op" in kinds and any(tally.tree.by_site(is_operator))
    computes = _is_operation if has_operators else _is_computation
    is_known = has_operators or (may_compute and any(tally.tree.by_site(computes)))
    is_service = "request" in kinds or tally.has("waiting_ns") or any(site.suspends for site in tally.tree.sites)
    if state == "GPU" or not is_service:
        return Overhead(total_ns, getattr(sum_topmost(tally, computes), TIMES[state]) if is_known else None)
    whole_ns, computation_ns, waiting_ns = _split_service_time(tally, state, computes)
    if whole_ns != total_ns:  # a row of several paths has calls in some of them alone
        computation_ns, waiting_ns = (
            part_ns * total_ns // whole_ns if whole_ns else 0 for part_ns in (computation_ns, waiting_ns)
        )
    return Overhead(total_ns, computation_ns if is_known else None, waiting_ns)


def _split_service_time(tally: Tally, state: str, computes: Callable[[Site], bool]) -> tuple[int, int, int]:
    """Return the total time of the topmost calls, and the computation and the waiting time within it."""
    count = len(tally.parents)
    sums = tally.by(np.arange(count), count)
    calls, times, waited = (sums[name].tolist() for name in ("calls", TIMES[state], "waiting_ns"))
    sites, site_of, parents = tally.tree.sites, tally.site_of.tolist(), tally.parents.tolist()
    # The time, computation and waiting of each node's children; the last place has those of the topmost nodes.
    below = [[0, 0, 0] for _ in range(count + 1)]
    for node in reversed(range(count)):  # a parent comes before its children
        site, time_ns = sites[site_of[node]], times[node]
        of_children_ns, computation_ns, waiting_ns = below[node]
        if is_interruption(site):
            continue  # its time is a part of the interrupted span
        if calls[node]:
            if computes(site):
                computation_ns, waiting_ns = time_ns, 0
            elif _is_waiting(site):
                computation_ns, waiting_ns = 0, time_ns
            else:
                if of_children_ns > time_ns:
                    computation_ns = computation_ns * time_ns // of_children_ns
                    waiting_ns = waiting_ns * time_ns // of_children_ns
                waiting_ns += min(waited[node], max(time_ns - of_children_ns, 0))
            of_children_ns = time_ns
        into = below[parents[node] if parents[node] >= 0 else count]
        for part, part_ns in enumerate((of_children_ns, computation_ns, waiting_ns)):
            into[part] += part_ns
    whole_ns, computation_ns, waiting_ns = below[count]
    return whole_ns, computation_ns, waiting_ns


def _declared_phase(site: Site) -> object:
    return dict(site.attributes).get("phase") if site.attributes else None


def _is_computation(site: Site) -> bool:
    declared = _declared_phase(site)
    return declared in _COMPUTING or (
        declared is None and (site.kind == "layer" or (site.kind == "phase" and site.name == "compute"))
    )


def _is_operation(site: Site) -> bool:
    return is_operator(site) or (_declared_phase(site) or (site.name if site.kind == "phase" else None)) == "compute"


def _is_waiting(site: Site) -> bool:
    declared = _declared_phase(site)
    return declared in _WAITING or (declared is None and site.name in _WAITING)


@dataclass(frozen=True, slots=True)
class EventRow:
    """One row of the view. Times are in ns and are sums over the row's calls.

    `name` is complete and unescaped. `depth` is 0 for topmost rows. `thread` is the thread's id, None for all threads
    merged. `total_ns` is `elapsed_ns`, `host_ns` or `device_ns`, depending on the state, and `ratio` is its share of
    the block's Total time. Extremes and percentiles are of `elapsed` times, and None if the total is another time or if
    `remaining` is above 0. `instance` is, with `AllOpDetail`, the path of a layer or else the place in the code.
    `self_ns` is host time outside the row's children. It includes the self time of hidden phases and, in the row of a
    type, of its instances. `waiting_ns` is the part of it in suspended calls. A row with `remaining` replaces that many
    rows of its level.
    """

    name: str
    depth: int
    thread: int | None
    kind: str
    instance: str
    calls: int
    errors: int
    total_ns: int
    host_ns: int
    device_ns: int
    elapsed_ns: int
    self_ns: int
    waiting_ns: int
    min_ns: int | None
    max_ns: int | None
    p50_ns: int | None
    p99_ns: int | None
    ratio: float | None
    remaining: int = 0

    ave_ns = Ratio("total_ns", of="calls")
    host_ratio = Ratio("host_ns", of="elapsed_ns")
    device_ratio = Ratio("device_ns", of="elapsed_ns")


@dataclass(frozen=True, slots=True)
class EventsBlock:
    """The rows of one thread, or of all threads merged if `thread` is None.

    `total_ns` is the Total time, the base of the rows' ratios. `number` counts the threads from 0, by their first call.
    """

    thread: int | None
    number: int | None
    name: str
    total_ns: int
    rows: tuple[EventRow, ...]


@dataclass(frozen=True, slots=True)
class CopySum:
    """The sum of the copies between devices and host at any depth: of all, of asynchronous or of synchronous copies.

    `ratio` is their share of the Total time of all threads.
    """

    label: str
    calls: int
    total_ns: int
    ratio: float | None


def event_blocks(tally: Tally, options: Options) -> tuple[EventsBlock, ...]:
    """Return a block of all threads, if the options ask for it, then a block for each thread, the newest first."""
    by_thread: list[int | None] = [thread for thread in reversed(tally.threads) if tally.of(thread)["calls"].any()]
    shown: list[int | None] = []
    if options.threads == "merged" or (options.threads == "both" and len(by_thread) > 1):
        shown = [None] if by_thread else []
    if options.threads != "merged":
        shown += by_thread
    if not shown:
        return ()
    tree = NameTree(tally, options.tracer_option)
    full = tree if options.tracer_option == "OpDetail" else None
    numbers = {thread: number for number, thread in enumerate(tally.threads)}
    blocks = []
    for thread in shown:
        total_ns = tree.total_ns(thread, options.state)
        if total_ns is None:
            full = full or NameTree(tally, "OpDetail")
            total_ns = full.total_below_ns(thread, options.state)
            full.drop_sums(thread)
        number, name = (None, "") if thread is None else (numbers[thread], tally.threads[thread])
        blocks.append(EventsBlock(thread, number, name, total_ns, _event_rows(tree, thread, total_ns, options)))
        tree.drop_sums(thread)
    return tuple(blocks)


def _event_rows(tree: NameTree, thread: int | None, base_ns: int, options: Options) -> tuple[EventRow, ...]:
    selection, sums = ShownEntries(tree, thread, options), tree.sums(thread)
    rows: list[EventRow] = []
    # Pairs of a depth and an entry, or the omitted entries of a level.
    pending: list[tuple[int, int | list[int]]] = [(-1, ROOT)]
    while pending:
        depth, item = pending.pop()
        if item != ROOT:
            rows.append(_event_row(tree, item, depth, thread, sums, base_ns, options.state))
        if isinstance(item, int):
            children, left_out = selection.below(item)
            if left_out:
                pending.append((depth + 1, left_out))
            pending += [(depth + 1, child) for child in reversed(children)]
    return tuple(rows)


def _event_row(
    tree: NameTree, item: int | list[int], depth: int, thread: int | None, sums: Records, base_ns: int, state: str
) -> EventRow:
    """Return the row of an entry of the tree, or one row that adds up a list of omitted entries."""
    totals = Totals._make(sums[item].tolist()) if isinstance(item, int) else total_of(sums[item])
    called, total_ns = totals.calls > 0, getattr(totals, TIMES[state])
    # No call's time of a state exceeds its elapsed time, so with equal sums each is the same.
    exact = called and total_ns == totals.elapsed_ns
    exact = exact and (state != "GPU" or tree.is_own_device([item] if isinstance(item, int) else item, thread))
    p50_ns = p99_ns = None
    # Percentiles over many functions have no meaning, and cost a third of the time of a summary of thousands.
    if exact and isinstance(item, int):
        histogram = tree.histogram([item], thread)
        p50_ns, p99_ns = percentiles(histogram, (0.5, 0.99), totals.calls, totals.min_ns, totals.max_ns)
    return EventRow(
        name=tree.label(item) if isinstance(item, int) else f"(remaining {len(item)})",
        depth=depth,
        thread=thread,
        kind=tree.site(item).kind if isinstance(item, int) else "",
        instance=tree.detail(item) if isinstance(item, int) else "",
        calls=totals.calls,
        errors=totals.errors,
        total_ns=total_ns,
        host_ns=totals.total_ns,
        device_ns=totals.device_ns,
        elapsed_ns=totals.elapsed_ns,
        self_ns=totals.self_ns,
        waiting_ns=totals.waiting_ns,
        min_ns=totals.min_ns if exact else None,
        max_ns=totals.max_ns if exact else None,
        p50_ns=p50_ns,
        p99_ns=p99_ns,
        ratio=share(total_ns, base_ns) if called else None,
        remaining=0 if isinstance(item, int) else len(item),
    )


def copy_sums(tally: Tally, total_ns: int, state: str) -> tuple[CopySum, ...]:
    """Return the sum of all copies except those within the host, then those of asynchronous and synchronous copies."""
    copies: list[tuple[object, Totals]] = []
    if "copy" in tally.tree.by_site(KIND):
        ways, by_site = tally.tree.by_site(_sync_of_copy), tally.by_site()
        of_ways = zip(ways, map(Totals._make, by_site.tolist()), strict=False)
        copies = [(way[0], totals) for way, totals in of_ways if way is not None]
    sums = []
    for label, sync in (("GpuMemcpy", None), ("GpuMemcpyAsync", False), ("GpuMemcpySync", True)):
        chosen = [totals for way, totals in copies if sync is None or way is sync]
        calls = sum(totals.calls for totals in chosen)
        if calls or sync is None:
            copied_ns = sum(getattr(totals, TIMES[state]) for totals in chosen)
            sums.append(CopySum(label, calls, copied_ns, share(copied_ns, total_ns)))
    return tuple(sums)


def _sync_of_copy(site: Site) -> tuple[object] | None:
    """Return whether a site's copies are synchronous, in a tuple; None unless it copies to, from or within devices."""
    if site.kind != "copy":
        return None
    attributes = dict(site.attributes)
    return (attributes.get("sync"),) if attributes.get("direction") != "h2h" else None
