"""The reader of the rings: as the service runs, it sorts finished spans into trees and cuts the profile's windows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from instrument.instrumentors.selection import Selection
from instrument.profile.model import Profile
from instrument.recorder.recorder import Recorder
from instrument.recorder.tail_sampler import Ends, Trees
from instrument.recording.rows import END_NS, Row
from instrument.recording.spans import Origin, Span
from instrument.runtime.threads import Pace
from instrument.sessions.window import Windows

Cut = tuple[int, int, int]
"""Index, start and end of a window."""


class Reader:
    """Reads what a recorder has recorded since `begin`, a piece at a time. Used by one thread at a time.

    `keep(spans)` gets what the profile's `capture` keeps, `note_ended(rows)` each request that has ended. The windows
    that its `schedule` has ended wait in `cut`, each with the origin, from `make_origin`, of its end.
    """

    def __init__(
        self,
        recorder: Recorder,
        selection: Selection,
        keep: Callable[[list[Span]], None],
        make_origin: Callable[[], Origin],
        note_ended: Callable[[Sequence[Row]], object] | None = None,
    ) -> None:
        self._recorder = recorder
        self._selection = selection
        self._keep = keep
        self._make_origin = make_origin
        self._note_ended = note_ended
        self._noted_until_ns = 0
        self._pace = Pace()
        self.begin(Profile(), 0)

    def begin(self, profile: Profile, start_ns: int) -> None:
        """Begin anew, with nothing read and no window cut."""
        self.cut: deque[tuple[Cut, Origin]] = deque()
        self._schedule = profile.schedule
        self._windows = Windows(profile.schedule, start_ns)
        self._count_steps()
        limit = profile.limits.spans_per_request
        self._noted_until_ns = 0
        self._trees = Trees(self._recorder, profile.capture, limit, self._keep_and_rest, self._note)

    def _keep_and_rest(self, spans: list[Span]) -> None:
        self._keep(spans)
        self._pace.rest()

    def _note(self, rows: Sequence[Row]) -> None:
        """Tell of requests that have ended, each once, also where it reads again what it has read."""
        if self._note_ended is not None:
            self._note_ended(
                [row for row in rows if row[END_NS] > self._noted_until_ns] if self._noted_until_ns else rows
            )

    def _count_steps(self) -> None:
        """From now on, the calls of the function that the schedule names, if it does."""
        named = self._schedule is not None and self._schedule.step is not None
        self._step_ends = Ends(self._recorder) if named else None

    def look(self) -> None:
        """Sort the newest spans into their trees, and cut the windows that end with them."""
        self._pace = Pace()
        ends = [end_ns for _, end_ns in self._trees.take() if end_ns > self._noted_until_ns]
        step = self._schedule.step if self._schedule is not None else None
        if self._step_ends is not None and step is not None:
            ends = self._step_ends.take(self._selection.sites_of(step))
        for end_ns in ends:
            self._cut_off(self._windows.step(end_ns))

    def _cut_off(self, window: Cut | None) -> None:
        if window is not None:
            self.cut.append((window, self._make_origin()))

    def change(self, profile: Profile, now_ns: int) -> None:
        """Follow another profile from now on. A window that is open ends with a change of the schedule."""
        if profile.schedule != self._schedule:
            self._schedule = profile.schedule
            self._cut_off(self._windows.change(profile.schedule, now_ns))
            self._count_steps()
        self._trees.change(profile.capture, profile.limits.spans_per_request)

    def skip(self) -> None:
        """Leave what was recorded up to now unread."""
        self._trees.skip()

    @property
    def places(self) -> Mapping[int, int]:
        """The next row of each thread, by its native id."""
        return self._trees.places

    def go_on(self, places: Mapping[int, int], noted_until_ns: int, done: int | None = None) -> None:
        """Read on from these rows of each thread; requests that had ended by a time are not noted again.

        `done` is the number of all rows that others have read, or missed.
        """
        self._noted_until_ns = noted_until_ns
        self._trees.go_on(places, done)

    @property
    def taken(self) -> int:
        """Rows that were read since it began, skipped or went on."""
        return self._trees.taken

    @property
    def held(self) -> int:
        """Rows of requests that have not ended."""
        return self._trees.held

    def stop(self, end_ns: int) -> Cut | None:
        """The window that is open at the end; partial, but not empty."""
        return self._windows.stop(end_ns)

    def unsent(self, spans: Sequence[Span]) -> list[Span]:
        """Those of these spans that `keep` neither has got nor will get.

        A request that has not ended is kept, for nobody else could tell what becomes of it.
        """
        self._trees.keep_open({span.root_id for span in spans})
        self.look()
        return self._trees.left_out(spans)

    @property
    def lost(self) -> int:
        """Rows that were overwritten before they were sorted into their trees."""
        return self._trees.lost

    @property
    def steps_lost(self) -> int:
        """Rows that were overwritten before the steps among them were counted."""
        return self._step_ends.lost if self._step_ends is not None else 0

    def losses(self) -> Mapping[str, int]:
        """What of the trees was not kept, by reason."""
        return {
            name: count for name, count in self._trees.counts().items() if name not in ("requests", "requests kept")
        }
