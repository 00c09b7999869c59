"""The overhead governor: keeps what the probes cost each thread within a share of its time.

Once a second it estimates the cost of every site on every thread, from the calls since the last time and the measured
cost of a call. Where a thread is over the budget, the sites that cost most and tell least are muted: those with many
calls that are short beside their own cost. They are counted while muted, named in every output, and come back when
there is room for them again.

To count a call costs some tens of ns, which of a function that takes as long and is called in a loop is half of the
time. Where the counting of muted sites is over the budget, the probe is taken off: the function itself is called, and
nobody counts. Such a site is named with the time and the count until then. Its probe is put on again for a moment now
and then, later each time, to see whether the load has fallen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from instrument.recorder import Recorder
from instrument.spans import Site

STEP_NS = 10**9
"""How often the cost of the probes is held against the budget."""

ROOM = 0.8
"""A muted site comes back only where the budget would then be used up to this share at most, or it would flap."""

SOON_NS = 5 * 10**7
"""How soon the governor looks again after it found too much, or where more was recorded than there can be room for."""

WORTH = 0.05
"""What part of the budget the counting of a site must cost for its probe to be taken off."""

SAMPLE_S = 0.02
"""For how long the probe of a site that was taken off is put on to see how often it is called."""

FIRST_WAIT_NS = 30 * 10**9
LAST_WAIT_NS = 3600 * 10**9
"""How long a probe stays off before it is tried: twice as long each time."""

Detach = Callable[[Site], Callable[[], None] | None]
"""Takes the probe of a site off; gives what puts it on again, None where there is none that can be taken off."""


@dataclass(slots=True)
class _Use:
    """What one site did on one thread since the last look: calls and their total time in ns."""

    calls: int = 0
    total_ns: int = 0


@dataclass(slots=True)
class _Off:
    """A site whose probe was taken off: what puts it on again, when it was taken off, and when it is tried next."""

    attach: Callable[[], None]
    since: datetime
    counted: int
    try_ns: int
    wait_ns: int


class Governor:
    """Holds a recorder within `budget`, the share of each thread's time that its probes may cost (0.01 is 1 %).

    `step` is called now and then by one thread. `costs_ns` is what a span adds, by the shape of its probe, `passed_ns`
    what the call of a muted site costs, for shapes that can be muted; `detach` takes probes off. `is_busy` tells that
    it should look again soon.
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
        self._passed_ns = passed_ns or {}
        self._detach = detach
        self._at_ns = now_ns
        self._calls = recorder.calls
        self._off: dict[Site, _Off] = {}
        self._fixed: set[Site] = set()  # whose probes cannot be taken off
        self.is_busy = True
        self._before: dict[tuple[int, Site], tuple[int, int]] = {}
        self._passed_before: dict[Site, int] = {}
        self.muted: dict[Site, int] = {}
        """When each muted site was muted, in the order of muting."""

    def step(self, now_ns: int) -> None:
        """Look at what happened since the last time; mute what is too much, bring back what there is room for."""
        elapsed_ns = now_ns - self._at_ns
        if elapsed_ns <= 0:
            return
        self._at_ns = now_ns
        self._calls = self._recorder.calls
        self.is_busy = False
        threads = self._uses()
        allowed_ns = self._budget * elapsed_ns
        heaviest_ns = 0.0
        for uses in threads.values():
            spent_ns = sum(self._cost_ns(site, use.calls) for site, use in uses.items())
            for site in self._by_burden(uses):
                if spent_ns <= allowed_ns:
                    break
                if self._recorder.mute(site):
                    self.muted[site] = now_ns
                    self.is_busy = True
                    spent_ns -= self._cost_ns(site, uses[site].calls)
            heaviest_ns = max(heaviest_ns, spent_ns)
        passed = self._recorder.muted_calls()
        calls = {site: passed.get(site, 0) - self._passed_before.get(site, 0) for site in self.muted}
        heaviest_ns += self._take_off(calls, heaviest_ns, allowed_ns, now_ns)
        self._bring_back(calls, heaviest_ns, allowed_ns, now_ns)
        self._passed_before = passed
        self._try_again(now_ns)

    def may_be_over(self, now_ns: int) -> bool:
        """Whether more has been recorded since the last look than there can be room for: cheap to ask."""
        spent_ns = (self._recorder.calls - self._calls) * min(self._costs_ns.values())
        return spent_ns > self._budget * (now_ns - self._at_ns)

    def _take_off(self, calls: Mapping[Site, int], spent_ns: float, allowed_ns: float, now_ns: int) -> float:
        """Take off those that cost too much when they are only counted; gives what to count the others costs, in ns."""
        own = {site: self._counting_ns(site, times) for site, times in calls.items()}
        counting_ns = sum(own.values())
        for site, own_ns in sorted(own.items(), key=lambda one: -one[1]):
            if spent_ns + counting_ns <= allowed_ns or own_ns < WORTH * allowed_ns:
                break
            if self._detached(site, now_ns, FIRST_WAIT_NS):
                counting_ns -= own_ns
        return counting_ns

    def _detached(self, site: Site, now_ns: int, wait_ns: int) -> bool:
        attach = None if self._detach is None or site in self._fixed else self._detach(site)
        if attach is None:
            self._fixed.add(site)
            return False
        before = self._off.get(site)
        since = datetime.now().astimezone() if before is None else before.since
        counted = self._recorder.muted_calls().get(site, 0)
        self._off[site] = _Off(attach, since, counted, now_ns + wait_ns, wait_ns)
        self.is_busy = True
        return True

    def _try_again(self, now_ns: int) -> None:
        """Put a probe on for a moment, muted, whose time to be tried has come; it stays where the load has fallen."""
        for site, off in self._off.items():
            if now_ns < off.try_ns:
                continue
            off.attach()
            before = self._recorder.muted_calls().get(site, 0)
            began_ns = time.perf_counter_ns()
            time.sleep(SAMPLE_S)
            calls = self._recorder.muted_calls().get(site, 0) - before
            lasted_ns = time.perf_counter_ns() - began_ns
            wait_ns = min(2 * off.wait_ns, LAST_WAIT_NS)
            is_over = self._counting_ns(site, calls) > ROOM * self._budget * lasted_ns
            if not is_over or not self._detached(site, now_ns, wait_ns):
                del self._off[site]
            self._passed_before = self._recorder.muted_calls()
            return  # one at a time

    def _uses(self) -> dict[int, dict[Site, _Use]]:
        """By thread and site, what was recorded since the last time."""
        threads: dict[int, dict[Site, _Use]] = {}
        seen: dict[tuple[int, Site], tuple[int, int]] = {}
        for thread_id, site, calls, total_ns in self._recorder.usage():
            key = (thread_id, site)
            known_calls, known_ns = seen.get(key, (0, 0))
            seen[key] = (known_calls + calls, known_ns + total_ns)
        for (thread_id, site), (calls, total_ns) in seen.items():
            calls_before, total_before = self._before.get((thread_id, site), (0, 0))
            if calls > calls_before:
                use = threads.setdefault(thread_id, {}).setdefault(site, _Use())
                use.calls, use.total_ns = calls - calls_before, total_ns - total_before
        self._before = seen
        return threads

    def _cost_ns(self, site: Site, calls: int) -> float:
        return calls * self._costs_ns[self._recorder.shapes.get(site, "scope")]

    def _counting_ns(self, site: Site, calls: int) -> float:
        return calls * self._passed_ns.get(self._recorder.shapes.get(site, ""), 0.0)

    def _by_burden(self, uses: Mapping[Site, _Use]) -> list[Site]:
        """Heaviest first: what muting a site spares, weighed by how little it tells (its cost over what it timed)."""

        def burden(site: Site) -> float:
            cost_ns = self._cost_ns(site, uses[site].calls)
            return cost_ns * cost_ns / (uses[site].total_ns + cost_ns)

        return sorted(uses, key=burden, reverse=True)

    def _bring_back(self, calls: Mapping[Site, int], spent_ns: float, allowed_ns: float, now_ns: int) -> None:
        for site, muted_ns in list(self.muted.items()):
            would_ns = self._cost_ns(site, calls[site])
            if site not in self._off and muted_ns < now_ns and spent_ns + would_ns <= ROOM * allowed_ns:
                self._recorder.unmute(site)
                del self.muted[site]
                spent_ns += would_ns

    def notes(self) -> list[str]:
        """A sentence for each site that was muted at any time: how many of its calls passed without a span."""
        return [
            f"{site.name} ({site.function or site.kind}): {calls} calls were not recorded, "
            f"to stay within the budget of {100 * self._budget:.3g} % of each thread's time"
            + ("" if site in self.muted else "; it is recorded again")
            for site, calls in self._recorder.muted_calls().items()
            if calls and site not in self._off
        ] + self.notes_off()

    def notes_off(self) -> list[str]:
        """A sentence for each site whose probe is taken off: since when, and how many calls were counted until then."""
        return [
            f"{site.name} ({site.function or site.kind}): its probe is off since {off.since:%Y-%m-%d %H:%M:%S}, "
            f"because counting alone was over the budget of {100 * self._budget:.3g} % of each thread's time; "
            f"{off.counted} calls were counted and not recorded until then, later ones are not known"
            for site, off in list(self._off.items())
        ]

    def release(self) -> None:
        """Bring every site back, at the end; `notes` still says what was muted until then."""
        for off in self._off.values():
            off.attach()
        for site in self.muted:
            self._recorder.unmute(site)


class Budget:
    """The `budget` of a profile, which a reload may change: a governor where there is one.

    `costs_ns` and `passed_ns` are called when there is to be one: see `Governor`. Used by one thread at a time.
    """

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
        """Hold the probes within another share of each thread's time from now on; None is without bound."""
        self.release()
        self._governor = None
        if share is not None:
            now_ns = time.monotonic_ns()
            self._governor = Governor(self._recorder, share, self._costs_ns(), now_ns, self._passed_ns(), self._detach)

    @property
    def is_busy(self) -> bool:
        """Whether `step` is to be called soon."""
        return self._governor is not None and self._governor.is_busy

    def step(self) -> None:
        """Let the governor look, once in `STEP_NS`; sooner where there is reason to."""
        now_ns, governor = time.monotonic_ns(), self._governor
        if governor is None:
            return
        since_ns = now_ns - self._stepped_ns
        if since_ns >= STEP_NS or (since_ns >= SOON_NS and (governor.is_busy or governor.may_be_over(now_ns))):
            self._stepped_ns = now_ns
            governor.step(now_ns)

    def release(self) -> None:
        """Bring every site back that is muted; `notes` still says what was."""
        if self._governor is not None:
            self._governor.release()

    def notes(self, *, with_muted: bool = True) -> list[str]:
        """A sentence for each site that was muted at any time, or only for those whose probe is off."""
        if self._governor is None:
            return []
        return self._governor.notes() if with_muted else self._governor.notes_off()
