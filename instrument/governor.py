"""The overhead governor: keeps what the probes cost each thread within a share of its time.

Once a second it estimates the cost of every site on every thread, from the calls since the last time and the measured
cost of a call. Where a thread is over the budget, the sites that cost most and tell least are muted: those with many
calls that are short beside their own cost. They are counted while muted, named in every output, and come back when
there is room for them again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from instrument.recorder import Recorder
from instrument.spans import Site

STEP_NS = 10**9
"""How often the cost of the probes is held against the budget."""

ROOM = 0.8
"""A muted site comes back only where the budget would then be used up to this share at most, or it would flap."""


@dataclass(slots=True)
class _Use:
    """What one site did on one thread since the last look: calls and their total time in ns."""

    calls: int = 0
    total_ns: int = 0


class Governor:
    """Holds a recorder within `budget`, the share of each thread's time that its probes may cost (0.01 is 1 %).

    `step` is called now and then by one thread. `costs_ns` is what a span adds, by the shape of its probe.
    """

    def __init__(self, recorder: Recorder, budget: float, costs_ns: Mapping[str, float], now_ns: int) -> None:
        self._recorder = recorder
        self._budget = budget
        self._costs_ns = costs_ns
        self._at_ns = now_ns
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
                    spent_ns -= self._cost_ns(site, uses[site].calls)
            heaviest_ns = max(heaviest_ns, spent_ns)
        self._bring_back(heaviest_ns, allowed_ns, now_ns)

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

    def _by_burden(self, uses: Mapping[Site, _Use]) -> list[Site]:
        """Heaviest first: what muting a site spares, weighed by how little it tells (its cost over what it timed)."""

        def burden(site: Site) -> float:
            cost_ns = self._cost_ns(site, uses[site].calls)
            return cost_ns * cost_ns / (uses[site].total_ns + cost_ns)

        return sorted(uses, key=burden, reverse=True)

    def _bring_back(self, spent_ns: float, allowed_ns: float, now_ns: int) -> None:
        passed = self._recorder.muted_calls()
        for site, muted_ns in list(self.muted.items()):
            would_ns = self._cost_ns(site, passed.get(site, 0) - self._passed_before.get(site, 0))
            if muted_ns < now_ns and spent_ns + would_ns <= ROOM * allowed_ns:
                self._recorder.unmute(site)
                del self.muted[site]
                spent_ns += would_ns
        self._passed_before = passed

    def notes(self) -> list[str]:
        """A sentence for each site that was muted at any time: how many of its calls passed without a span."""
        passed: Mapping[Site, int] = self._recorder.muted_calls()
        return [
            f"{site.name} ({site.function or site.kind}): {calls} calls were not recorded, "
            f"to stay within the budget of {self._budget:.3g} of each thread's time"
            + ("" if site in self.muted else "; it is recorded again")
            for site, calls in passed.items()
            if calls
        ]

    def release(self) -> None:
        """Bring every site back, at the end; `notes` still says what was muted until then."""
        for site in self.muted:
            self._recorder.unmute(site)


class Budget:
    """The `budget` of a profile, which a reload may change: a governor where there is one.

    `costs_ns` is called when there is to be one. Used by one thread at a time.
    """

    def __init__(self, recorder: Recorder, costs_ns: Callable[[], Mapping[str, float]]) -> None:
        self._recorder = recorder
        self._costs_ns = costs_ns
        self._governor: Governor | None = None
        self._stepped_ns = 0

    def change(self, share: float | None) -> None:
        """Hold the probes within another share of each thread's time from now on; None is without bound."""
        self.release()
        self._governor = None
        if share is not None:
            self._governor = Governor(self._recorder, share, self._costs_ns(), time.monotonic_ns())

    def step(self) -> None:
        """Let the governor look, once in `STEP_NS`."""
        now_ns = time.monotonic_ns()
        if self._governor is not None and now_ns - self._stepped_ns >= STEP_NS:
            self._stepped_ns = now_ns
            self._governor.step(now_ns)

    def release(self) -> None:
        """Bring every site back that is muted; `notes` still says what was."""
        if self._governor is not None:
            self._governor.release()

    def notes(self) -> list[str]:
        """A sentence for each site that was muted at any time."""
        return [] if self._governor is None else self._governor.notes()
