"""Shows spans as NVTX ranges in an attached tool, such as Nsight Systems, under the names in our reports.

The variable NVTX_INJECTION64_PATH attaches a tool when a process starts. If it is not set, nothing is imported, called
or recorded. If it is set, each span opens a range in the domain `instrument`, in the category of its kind. A generator
has a range for each step. Copies have no range.
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
"""The maximum number of sites with an NVTX name of their own, because a tool never frees a name. Further sites share
one name per kind."""

Begin = Callable[[Any, Any, int], Any]
"""A function that begins to time a span: (site, attributes, span id) -> pair or None."""


class Ranges:
    """Opens NVTX ranges for one recorder's spans. It also calls the device timer, if there is one. `reason` is the
    reason why there are no ranges although a tool is attached, else ""."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._domain: Any = None
        self._events: dict[Site, Any] = {}
        self._timed: Begin | None = None
        self.forks = 0
        self.reason = ""

    def install(self) -> Callable[[], None]:
        """Open a range for each span from now on, if a tool is attached. Return a function that undoes this."""
        if not os.environ.get(VARIABLE):
            return _nothing
        try:
            import nvtx

            domain = nvtx.get_domain(DOMAIN)
        except Exception as error:
            self.reason = (
                f"no NVTX ranges, though {VARIABLE} names a tool: {type(error).__name__}: {error}; "
                "install instrument-sdk[nvtx]"
            )
            return _nothing
        if type(domain).__name__ == "DummyDomain":  # the tool could not be loaded
            return _nothing
        self._domain = domain
        self._timed = self._recorder.begin_device
        self._recorder.begin_device = self.begin
        self._recorder.watches_all = True
        return self.uninstall

    def uninstall(self) -> None:
        """Open no more ranges. Open ranges end with their spans. Idempotent."""
        if self._domain is not None:
            self._domain = None
            self._recorder.watches_all = False
            self._recorder.begin_device = self._timed

    def time_by(self, begin: Begin | None) -> None:
        """Set the function that times spans with device time, None for no device times."""
        self._timed = begin
        if self._domain is None:
            self._recorder.begin_device = begin

    def after_fork_in_child(self) -> None:
        """Leave open ranges to the parent."""
        self.forks += 1

    def begin(self, site: Site | None, attributes: Any, span_id: int) -> Any:
        """Begin a span's range, and its device time if the span asks for it. The recorder calls this method."""
        pair = None
        if self._timed is not None and (site is None or site.device):
            pair = self._timed(site, attributes, span_id)
        domain = self._domain
        if site is None or domain is None:
            return pair
        event = self._events.get(site)
        return Range(self, domain, event if event is not None else self._event_attributes(domain, site), pair)

    def _event_attributes(self, domain: Any, site: Site) -> Any:
        """Return the NVTX event attributes of a site, which are cached."""
        if len(self._events) >= KNOWN_SITES:
            return domain.get_event_attributes(f"(more sites of kind {site.kind})", category=site.kind)
        name = site.instance if site.kind == "layer" and site.instance else site.name
        clean = name.encode(errors="backslashreplace").decode()
        event = self._events[site] = domain.get_event_attributes(clean, category=site.kind)
        return event


class Range:
    """The range of one span, and its pair of events, if any. The recorder refers to it while the span is open."""

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
        """End the range when a generator's body yields."""
        self._end()
        if self._pair is not None:
            self._pair.pause()

    def resume(self) -> None:
        """Begin a range when the body continues."""
        if self._id is None and self._forks == self._ranges.forks:
            self._id = self._domain.start_range(self._event_attributes)
        if self._pair is not None:
            self._pair.resume()

    def end(self, ring: Any, index: int, span_id: int, start_ns: int, end_ns: int) -> None:
        """End the range of an ended span. `ring` has the span's row. `index` is the node of the span's call path in the
        tally."""
        self._end()
        if self._pair is not None:
            self._pair.end(ring, index, span_id, start_ns, end_ns)

    def cancel(self) -> None:
        """End the range of a span that is not recorded."""
        self._end()
        if self._pair is not None:
            self._pair.cancel()


def _nothing() -> None: ...
