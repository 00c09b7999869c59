"""Shows spans as NVTX ranges in an attached tool, such as Nsight Systems, under the names in our reports.

The variable NVTX_INJECTION64_PATH attaches a tool when a process starts. Each span then opens a range in the domain
`instrument`, in the category of its kind. A generator has a range for each step. Copies have no range.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from instrument.recorder.recorder import Recorder
from instrument.recording.spans import Site

DOMAIN = "instrument"
VARIABLE = "NVTX_INJECTION64_PATH"

KNOWN_SITES = 4_096
"""The maximum number of sites with an NVTX name of their own. Tools never free names, so further sites share one per
kind."""

Begin = Callable[[Any, Any, int], Any]
"""A function of (site, attributes, span id) that begins to time a span. It returns a pair or None."""


class Ranges:
    """Opens NVTX ranges for a recorder's spans, and calls the device timer, if any.

    `reason` is the reason for missing ranges although a tool is attached, else "".
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._domain: Any = None
        self._events: dict[Site, Any] = {}
        self._timed: Begin | None = None
        self.forks = 0
        self.reason = ""

    def install(self) -> Callable[[], None]:
        """Open a range for each span from now on, if a tool is attached. Return the function that undoes this."""
        if not os.environ.get(VARIABLE):
            return _do_nothing
        try:
            import nvtx

            domain = nvtx.get_domain(DOMAIN)
        except Exception as error:
            self.reason = (
                f"no NVTX ranges, though {VARIABLE} names a tool: {type(error).__name__}: {error}; "
                "install instrument-sdk[nvtx]"
            )
            return _do_nothing
        if type(domain).__name__ == "DummyDomain":  # the tool could not be loaded
            return _do_nothing
        self._domain = domain
        self._timed = self._recorder.begin_device
        self._recorder.begin_device = self.begin
        self._recorder.watches_all = True
        return self.uninstall

    def uninstall(self) -> None:
        """Open no more ranges. Open ones end with their spans. Idempotent."""
        if self._domain is not None:
            self._domain = None
            self._recorder.watches_all = False
            self._recorder.begin_device = self._timed

    def set_device_timer(self, begin: Begin | None) -> None:
        """Set the function that times spans on devices, None for no device times."""
        self._timed = begin
        if self._domain is None:
            self._recorder.begin_device = begin

    def after_fork_in_child(self) -> None:
        self.forks += 1

    def begin(self, site: Site | None, attributes: Any, span_id: int) -> Any:
        """Begin a span's range and, if the span asks for it, its device time. The recorder calls this."""
        pair = None
        if self._timed is not None and (site is None or site.device):
            pair = self._timed(site, attributes, span_id)
        domain = self._domain
        if site is None or domain is None:
            return pair
        event = self._events.get(site)
        return Range(self, domain, event if event is not None else self._event_attributes(domain, site), pair)

    def _event_attributes(self, domain: Any, site: Site) -> Any:
        if len(self._events) >= KNOWN_SITES:
            return domain.get_event_attributes(f"(more sites of kind {site.kind})", category=site.kind)
        name = site.instance if site.kind == "layer" and site.instance else site.name
        clean = name.encode(errors="backslashreplace").decode()
        event = self._events[site] = domain.get_event_attributes(clean, category=site.kind)
        return event


class Range:
    """The range of one open span, and its pair of events, if any."""

    __slots__ = ("_domain", "_event_attributes", "_forks", "_id", "_pair", "_ranges")

    def __init__(self, ranges: Ranges, domain: Any, event: Any, pair: Any) -> None:
        self._ranges = ranges
        self._forks = ranges.forks
        self._domain = domain
        self._event_attributes = event
        self._pair = pair
        self._id: int | None = domain.start_range(event)

    def _end(self) -> None:
        number, self._id = self._id, None
        if number is not None and self._forks == self._ranges.forks:
            self._domain.end_range(number)

    def pause(self) -> None:
        self._end()
        if self._pair is not None:
            self._pair.pause()

    def resume(self) -> None:
        if self._id is None and self._forks == self._ranges.forks:
            self._id = self._domain.start_range(self._event_attributes)
        if self._pair is not None:
            self._pair.resume()

    def end(self, ring: Any, index: int, span_id: int, start_ns: int, end_ns: int) -> None:
        """End the range of an ended span. `ring` has the span's row, and `index` is the node of its call path."""
        self._end()
        if self._pair is not None:
            self._pair.end(ring, index, span_id, start_ns, end_ns)

    def cancel(self) -> None:
        self._end()
        if self._pair is not None:
            self._pair.cancel()


def _do_nothing() -> None: ...
