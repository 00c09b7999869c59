"""The governor, which keeps the cost of recording within a share (budget) of each thread's time.

Once a second it estimates the cost of each site (an instrumented function) on each thread. On a thread over the budget,
it mutes sites with many short calls. The calls of a muted site are counted but not recorded. The site is recorded again
once the budget has room.

If merely counting calls exceeds the budget, the governor detaches the site's probe, and calls go to the bare function.
Requests and steps are never muted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import datetime

from instrument.recorder.recorder import STEP, Recorder
from instrument.recording.spans import Site
from instrument.runtime.lazy_imports import dataclass

STEP_NS = 10**9
"""The ns between two comparisons of recording's cost with the budget."""

UNMUTE_SHARE = 0.8
"""The maximum share of the budget that recording may use after sites are unmuted."""

BUSY_STEP_NS = 5 * 10**7
"""The ns between two comparisons while the budget is exceeded or the rings lose rows."""

DETACH_SHARE = 0.05
"""A muted site's probe remains attached if counting the calls costs less than this share of the budget."""

TRIAL_S = 0.02
"""The seconds for which a detached probe is attached again to measure the load."""

UNMUTABLE_KINDS = {
    "request": "requests are recorded all the same: captures and the view of requests are made of them",
    "step": "steps are recorded all the same: the schedule counts them",
}
"""The kinds of sites that are never muted, with the reasons that reports give."""

REMAINING_SHARE = 0.5
"""The share of the budget above which reports note the cost of an unmutable site."""

FIRST_WAIT_NS = 30 * 10**9
LAST_WAIT_NS = 3600 * 10**9
"""The longest time in ns before a detached probe is attached for another trial."""

WAIT_MULTIPLE = 10
"""A site that is muted again within this multiple of the last muted time remains muted twice as long."""

Detach = Callable[[Site], Callable[[], None] | None]
"""A function that detaches a site's probe. The result is a function that attaches the probe again, or None on
failure."""


@dataclass(slots=True)
class _Use:
    """The use of a site on one thread since the last step of the governor. `steps` counts the steps of generators."""

    calls: int = 0
    total_ns: int = 0
    steps: int = 0


@dataclass(slots=True)
class _Muted:
    """The state of a muted site.

    - `recorded_ns`: the cost of a recorded call
    - `counted_ns`: the cost of a call that is only counted
    - `shares`: the share of each thread in the cost of the site
    """

    since_ns: int
    wait_ns: int
    recorded_ns: float
    counted_ns: float
    shares: dict[int, float]


@dataclass(slots=True)
class _Off:
    """The state of a site whose probe is detached."""

    attach: Callable[[], None]
    off_ns: int
    since: datetime
    counted: int
    try_ns: int
    wait_ns: int


class Governor:
    """A control that keeps the cost of recording below a share of each thread's time, the `budget` (0.01 is 1 %).

    - `costs_ns`: the cost of a span, by kind of probe
    - `passed_ns`: the cost of a call that is only counted, by kind of probe

    In both, the key `STEP` has the cost of each step of a generator after the first.

    One thread calls `enforce_budget` regularly, and sooner if `is_busy`.
    """

    def __init__(
        self,
        recorder: Recorder,
        budget: float,
        costs_ns: Mapping[str, float],
        now_ns: int,
        passed_ns: Mapping[str, float] | None = None,
        detach: Detach | None = None,
    ) -> None:
        self._recorder = recorder
        self._budget = budget
        self._costs_ns = costs_ns
        self._least_ns = min(cost_ns for shape, cost_ns in costs_ns.items() if shape != STEP)
        self._passed_ns = passed_ns or {}
        self._detach = detach
        self._at_ns = self._looked_ns = now_ns
        self._calls = recorder.calls
        self._off: dict[Site, _Off] = {}
        self._fixed: set[Site] = set()  # whose probes cannot be detached
        self.is_busy = True
        self._before: dict[tuple[int, Site], _Use] = {}
        self._passed: dict[Site, int] = {}  # at the last step
        self._looked: dict[Site, int] = {}  # at the last whole second
        self._returned: dict[Site, tuple[int, int]] = {}  # the time at which a muted site came back, and its wait
        self._stayed: dict[Site, tuple[int, int]] = {}  # the same of probes that were attached again
        self._kept_ns: dict[Site, float] = {}
        self._kept_shares: dict[Site, float] = {}
        self._counting_shares: dict[Site, float] = {}
        self.muted: dict[Site, _Muted] = {}
        """The muted sites, in the order of muting."""

    def enforce_budget(self, now_ns: int) -> None:
        """Compare the cost since the last step with the budget. Mute sites that cost too much, and unmute sites that
        fit."""
        elapsed_ns = now_ns - self._at_ns
        if elapsed_ns <= 0:
            return
        self._at_ns = now_ns
        self._calls = self._recorder.calls
        self.is_busy = False
        threads = self._use_by_thread()
        passed = self._recorder.muted_calls()
        calls = {site: passed.get(site, 0) - self._passed.get(site, 0) for site in self.muted}
        allowed_ns = self._budget * elapsed_ns
        spent_ns = {
            thread: sum(self._cost_ns(site, use) for site, use in uses.items()) for thread, uses in threads.items()
        }
        for thread in threads:
            self._mute_costly_sites(threads, thread, spent_ns, allowed_ns, now_ns)
        self._detach_costly_probes(calls, spent_ns, allowed_ns, now_ns)
        counting_ns = self._cost_of_counting_ns(calls)
        for thread in threads:
            left_ns = max(allowed_ns - counting_ns.get(thread, 0.0), REMAINING_SHARE * allowed_ns)
            self._mute_costly_sites(threads, thread, spent_ns, left_ns, now_ns)
            if spent_ns[thread] > left_ns:
                for site, use in threads[thread].items():  # those that are left cannot be muted
                    if site not in self.muted:
                        self._kept_ns[site] = self._kept_ns.get(site, 0.0) + self._cost_ns(site, use)
        self._passed = passed
        if now_ns - self._looked_ns >= STEP_NS:
            self._unmute_fitting_sites(passed, spent_ns, elapsed_ns, now_ns)
        self._retry_detached_probe(now_ns)

    def may_exceed_budget(self, now_ns: int) -> bool:
        return (self._recorder.calls - self._calls) * self._least_ns > self._budget * (now_ns - self._at_ns)

    # ---------------------------------------------------------------- what costs too much

    def _mute_costly_sites(
        self,
        threads: Mapping[int, Mapping[Site, _Use]],
        thread: int,
        spent_ns: dict[int, float],
        allowed_ns: float,
        now_ns: int,
    ) -> None:
        uses = threads[thread]
        for site in self._sort_sites_by_burden(uses) if spent_ns[thread] > allowed_ns else ():
            if spent_ns[thread] <= allowed_ns:
                return
            if site.kind in UNMUTABLE_KINDS or not self._recorder.mute(site):
                continue
            self.muted[site] = self._muted_state(site, threads, now_ns)
            self.is_busy = True
            for other_thread, of_other in threads.items():
                if site in of_other:
                    spent_ns[other_thread] -= self._cost_ns(site, of_other[site])

    def _muted_state(self, site: Site, threads: Mapping[int, Mapping[Site, _Use]], now_ns: int) -> _Muted:
        used = {thread: uses[site] for thread, uses in threads.items() if site in uses}
        cost_ns = {thread: self._cost_ns(site, use) for thread, use in used.items()}
        whole_ns = sum(cost_ns.values())
        calls = max(sum(use.calls for use in used.values()), 1)
        steps = sum(use.steps for use in used.values())
        passed_ns = self._passed_ns.get(self._recorder.shapes.get(site, ""), 0.0)
        return _Muted(
            since_ns=now_ns,
            wait_ns=_next_wait_ns(self._returned.pop(site, None), STEP_NS, now_ns),
            recorded_ns=whole_ns / calls,
            counted_ns=passed_ns + steps / calls * self._passed_ns.get(STEP, 0.0),
            shares={thread: ns / whole_ns if whole_ns else 1.0 for thread, ns in cost_ns.items()},
        )

    def _detach_costly_probes(
        self, calls: dict[Site, int], spent_ns: Mapping[int, float], allowed_ns: float, now_ns: int
    ) -> None:
        """Detach the probes of muted sites if counting the calls alone costs a thread too much."""
        own_ns = {site: count * self.muted[site].counted_ns for site, count in calls.items()}
        for site in sorted(own_ns, key=own_ns.__getitem__, reverse=True):
            counting_ns = self._cost_of_counting_ns(calls)
            is_over = any(
                spent_ns.get(thread, 0.0) + counting_ns[thread] > allowed_ns for thread in self.muted[site].shares
            )
            if own_ns[site] < DETACH_SHARE * allowed_ns:
                return
            if not is_over or site in self._off:
                continue
            wait_ns = _next_wait_ns(self._stayed.pop(site, None), FIRST_WAIT_NS, now_ns)
            if self._detach_probe(site, now_ns, wait_ns):
                calls[site] = 0

    def _detach_probe(self, site: Site, now_ns: int, wait_ns: int) -> bool:
        attach = None if self._detach is None or site in self._fixed else self._detach(site)
        if attach is None:
            self._fixed.add(site)
            return False
        before = self._off.get(site)
        since = datetime.now().astimezone() if before is None else before.since
        counted = self._recorder.muted_calls().get(site, 0)
        self._off[site] = _Off(attach, now_ns, since, counted, now_ns + wait_ns, wait_ns)
        self._counting_shares.pop(site, None)  # from now on it has the cost that remains
        self.is_busy = True
        return True

    def _cost_of_counting_ns(self, calls: Mapping[Site, int]) -> dict[int, float]:
        costs_ns: dict[int, float] = {}
        for site, count in calls.items():
            muted = self.muted[site]
            for thread, share in muted.shares.items():
                costs_ns[thread] = costs_ns.get(thread, 0.0) + count * muted.counted_ns * share
        return costs_ns

    # ---------------------------------------------------------------- what there is room for

    def _unmute_fitting_sites(
        self, passed: dict[Site, int], spent_ns: Mapping[int, float], elapsed_ns: int, now_ns: int
    ) -> None:
        """Unmute sites that fit into the budget again. The governor does this once a second."""
        window_ns = now_ns - self._looked_ns
        calls = {site: passed.get(site, 0) - self._looked.get(site, 0) for site in self.muted}
        self._looked, self._looked_ns = passed, now_ns
        for site, kept_ns in self._kept_ns.items():
            if kept_ns > REMAINING_SHARE * self._budget * window_ns:
                self._kept_shares[site] = max(kept_ns / window_ns, self._kept_shares.get(site, 0.0))
        self._kept_ns.clear()
        for site, count in calls.items():
            muted = self.muted[site]
            share = count * muted.counted_ns * max(muted.shares.values(), default=1.0) / window_ns
            off = self._off.get(site)
            is_whole = off is None or now_ns - off.off_ns > window_ns
            if share > DETACH_SHARE * self._budget and is_whole:
                self._counting_shares[site] = max(share, self._counting_shares.get(site, 0.0))
        counting_ns = self._cost_of_counting_ns(calls)
        room = {
            thread: UNMUTE_SHARE * self._budget
            - spent_ns.get(thread, 0.0) / elapsed_ns
            - counting_ns.get(thread, 0.0) / window_ns
            for thread in {*spent_ns, *counting_ns}
        }
        for site, muted in list(self.muted.items()):
            if site in self._off or now_ns - muted.since_ns < muted.wait_ns:
                continue
            more_ns = calls[site] * (muted.recorded_ns - muted.counted_ns)
            more = {thread: share * more_ns / window_ns for thread, share in muted.shares.items()}
            if all(more[thread] <= room.get(thread, UNMUTE_SHARE * self._budget) for thread in more):
                for thread in more:
                    room[thread] = room.get(thread, UNMUTE_SHARE * self._budget) - more[thread]
                self._recorder.unmute(site)
                self._returned[site] = now_ns, muted.wait_ns
                del self.muted[site]

    def _retry_detached_probe(self, now_ns: int) -> None:
        """Attach a detached probe for a trial. The probe remains attached if the load has fallen."""
        for site, off in self._off.items():
            if now_ns < off.try_ns:
                continue
            off.attach()
            before = self._recorder.muted_calls().get(site, 0)
            began_ns = time.perf_counter_ns()
            time.sleep(TRIAL_S)
            calls = self._recorder.muted_calls().get(site, 0) - before
            lasted_ns = time.perf_counter_ns() - began_ns
            wait_ns = min(2 * off.wait_ns, LAST_WAIT_NS)
            is_over = calls * self.muted[site].counted_ns > UNMUTE_SHARE * self._budget * lasted_ns
            if not is_over or not self._detach_probe(site, now_ns, wait_ns):
                self._stayed[site] = now_ns, off.wait_ns
                del self._off[site]
            self._passed = self._looked = self._recorder.muted_calls()
            self._looked_ns = now_ns
            return  # one at a time

    # ---------------------------------------------------------------- what was recorded

    def _use_by_thread(self) -> dict[int, dict[Site, _Use]]:
        threads: dict[int, dict[Site, _Use]] = {}
        uses: dict[tuple[int, Site], _Use] = {}
        for ring in self._recorder.rings():
            usage = ring.usage()  # of generators the steps after their first, also of open ones
            site_of = self._recorder.paths().site
            for node, calls, total_ns, steps in usage:
                use = uses.setdefault((ring.thread_id, site_of(node)), _Use())
                use.calls += calls
                use.total_ns += total_ns
                use.steps += steps
        nothing = _Use()
        for (thread_id, site), use in uses.items():
            before = self._before.get((thread_id, site), nothing)
            if use.calls > before.calls or use.steps > before.steps:
                threads.setdefault(thread_id, {})[site] = _Use(
                    use.calls - before.calls, use.total_ns - before.total_ns, use.steps - before.steps
                )
        self._before = uses
        return threads

    def _cost_ns(self, site: Site, use: _Use) -> float:
        own_ns = use.calls * self._costs_ns[self._recorder.shapes.get(site, "scope")]
        # The cost of a generator includes one step.
        return own_ns + max(use.steps - use.calls, 0) * self._costs_ns.get(STEP, 0.0)

    def _sort_sites_by_burden(self, uses: Mapping[Site, _Use]) -> list[Site]:
        def burden(site: Site) -> float:
            cost_ns = self._cost_ns(site, uses[site])
            return cost_ns * cost_ns / (uses[site].total_ns + cost_ns or 1.0)

        return sorted(uses, key=burden, reverse=True)

    # ---------------------------------------------------------------- in words

    def notes(self) -> list[str]:
        return [
            f"{_describe_site(site)}: {calls} calls were not recorded, to stay within {self._limit}"
            + ("" if site in self.muted else "; it is recorded again")
            for site, calls in self._recorder.muted_calls().items()
            if calls and site not in self._off
        ] + self.describe_unrecorded()

    @property
    def _limit(self) -> str:
        return f"the budget of {100 * self._budget:.3g} % of each thread's time"

    def describe_unrecorded(self) -> list[str]:
        return [
            *(
                f"{_describe_site(site)}: its probe is off since {off.since:%Y-%m-%d %H:%M:%S}, because counting alone "
                f"was over {self._limit}; {off.counted} calls were counted and not recorded until then, later ones are "
                "not known"
                for site, off in list(self._off.items())
            ),
            *(
                f"{_describe_site(site)}: {count} generators went on without their span, to stay within {self._limit}"
                for site, count in self._recorder.spans_cut_by_muting().items()
            ),
            *(
                f"{_describe_site(site)}: to count its calls alone cost {100 * share:.2g} % of a thread's time, of "
                f"{self._limit}; {self._explain_undetachable(site)}"
                for site, share in list(self._counting_shares.items())
                if share > REMAINING_SHARE * self._budget
            ),
            *(
                f"{_describe_site(site)}: its spans cost {100 * share:.2g} % of a thread's time, of {self._limit}; "
                + UNMUTABLE_KINDS.get(site.kind, "it cannot be muted")
                for site, share in list(self._kept_shares.items())
            ),
        ]

    def _explain_undetachable(self, site: Site) -> str:
        if site in self._off:
            return "its probe is off, but some references still call it, such as a local variable of a loop"
        if self._recorder.shapes.get(site) == "scope":
            return "a scope cannot be removed at run time: move it out of the loop, or delete it"
        return "its probe cannot be removed: record it by a rule instead, or not at all"

    def unmute_all_sites(self) -> None:
        """Unmute all sites, and attach their probes again. The notes on the sites remain."""
        for off in self._off.values():
            off.attach()
        for site in self.muted:
            self._recorder.unmute(site)


def _next_wait_ns(returned: tuple[int, int] | None, first_ns: int, now_ns: int) -> int:
    """Return the time in ns for which a site remains muted."""
    at_ns, wait_ns = returned or (0, 0)
    return min(2 * wait_ns, LAST_WAIT_NS) if wait_ns and now_ns - at_ns < WAIT_MULTIPLE * wait_ns else first_ns


def _describe_site(site: Site) -> str:
    return f"{site.name} ({site.function or site.kind})"


class Budget:
    """The `budget` setting of the profile, and the governor that enforces it. Only one thread may use it at a time."""

    def __init__(
        self,
        recorder: Recorder,
        costs_ns: Callable[[], Mapping[str, float]],
        passed_ns: Callable[[], Mapping[str, float]] = dict,
        detach: Detach | None = None,
    ) -> None:
        self._recorder = recorder
        self._costs_ns = costs_ns
        self._passed_ns = passed_ns
        self._detach = detach
        self._governor: Governor | None = None
        self._stepped_ns = 0

    def change(self, share: float | None) -> None:
        """Set another budget, None for no limit."""
        self.unmute_all_sites()
        self._governor = None
        if share is not None:
            now_ns = time.monotonic_ns()
            self._governor = Governor(self._recorder, share, self._costs_ns(), now_ns, self._passed_ns(), self._detach)

    @property
    def is_busy(self) -> bool:
        return self._governor is not None and self._governor.is_busy

    def enforce_budget(self) -> None:
        now_ns, governor = time.monotonic_ns(), self._governor
        if governor is None:
            return
        since_ns = now_ns - self._stepped_ns
        if since_ns >= STEP_NS or (
            since_ns >= BUSY_STEP_NS and (governor.is_busy or governor.may_exceed_budget(now_ns))
        ):
            self._stepped_ns = now_ns
            governor.enforce_budget(now_ns)

    def unmute_all_sites(self) -> None:
        if self._governor is not None:
            self._governor.unmute_all_sites()

    def notes(self, *, with_muted: bool = True) -> list[str]:
        """Return the notes of the governor. `with_muted` adds a note on each muted site."""
        if self._governor is None:
            return []
        return self._governor.notes() if with_muted else self._governor.describe_unrecorded()
