"""The windows of a profile's schedule, cut by the steps that end as the service runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from instrument.instrumentors.selection import Selection
from instrument.profile.model import Profile
from instrument.recorder.recorder import Recorder
from instrument.recording.rows import END_NS, is_request_root
from instrument.recording.spans import Origin
from instrument.sessions.window import Windows

Cut = tuple[int, int, int]
"""Index, start and end of a window."""


class WindowReader:
    """Counts the steps of a schedule in what a recorder records: requests, or the calls of the function that it names.

    Windows that have ended wait in `cut`, each with the origin, from `make_origin`, of its end. Used by one thread at
    a time. It goes through every row, at 0.5 us each, where there is a schedule, and through none else.
    """

    def __init__(self, recorder: Recorder, selection: Selection, make_origin: Callable[[], Origin]) -> None:
        self._recorder = recorder
        self._selection = selection
        self._make_origin = make_origin
        self.begin(Profile(), 0)

    def begin(self, profile: Profile, start_ns: int) -> None:
        """Begin anew, with nothing read and no window cut."""
        self.cut: deque[tuple[Cut, Origin]] = deque()
        self._schedule = profile.schedule
        self._windows = Windows(profile.schedule, start_ns)
        self._lost_before = 0
        self._cursor = None if profile.schedule is None else self._recorder.cursor()

    def look(self) -> None:
        """Cut the windows that end with the newest steps."""
        for end_ns in self._ends():
            self._cut_off(self._windows.step(end_ns))

    def _ends(self) -> list[int]:
        schedule, cursor = self._schedule, self._cursor
        if schedule is None or cursor is None:
            return []
        rows = [row for _, rows in cursor.read() for row in rows]
        if schedule.step is None:
            return sorted(row[END_NS] for row in rows if is_request_root(row))
        sites, site_of = self._selection.sites_of(schedule.step), self._recorder.site_of
        return sorted(row[END_NS] for row in rows if site_of(row) in sites)

    def _cut_off(self, window: Cut | None) -> None:
        if window is not None:
            self.cut.append((window, self._make_origin()))

    def change(self, profile: Profile, now_ns: int) -> None:
        """Follow another profile from now on. A window that is open ends with a change of the schedule."""
        if profile.schedule != self._schedule:
            self.look()
            self._schedule = profile.schedule
            self._cut_off(self._windows.change(profile.schedule, now_ns))
            self._lost_before = self.lost
            self._cursor = None if profile.schedule is None else self._recorder.cursor()

    def stop(self, end_ns: int) -> Cut | None:
        """Return the window that is open at the end; partial, but not empty."""
        return self._windows.stop(end_ns)

    @property
    def lost(self) -> int:
        """Rows that were overwritten before the steps among them were counted."""
        return self._lost_before + (0 if self._cursor is None else int(self._cursor.lost))
