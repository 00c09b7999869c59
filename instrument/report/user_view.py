"""The `user` view: what the service's authors named themselves, on the host and on the device.

It is the UserDefined Summary of `paddle.profiler`: one row for each name of the spans of kind `user`, such as
``with scope("tokenize")``. Rows are sums over calls; a call inside another of the same name counts in the total and not
again in the ratio. Ratios are of the window, which work on several threads may exceed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from instrument.report.call_rows import CallBlock, block_section, blocks_of, by_name, call_rows, note_of_rest, sorting
from instrument.report.calls import PlaceCalls, every_place, place_tree
from instrument.report.coverage import Coverage
from instrument.report.section import Section, View
from instrument.report.view import Options, Recording

NO_SPAN = "No span of kind user was recorded: open one with scope(name), or give a rule that kind."


@dataclass(frozen=True, slots=True)
class User(View):
    """The view: a block of rows for all threads, or for each. The bases of all ratios are `window_ns`.

    That is the part of the window of which every span is held, and what of a call lies outside of it is not counted.
    """

    coverage: Coverage
    window_ns: int
    blocks: tuple[CallBlock, ...]
    _options: Options = field(repr=False)

    TITLE = "User"

    def head(self) -> list[str]:
        return [
            *self.coverage.lines(),
            f"Time unit: {self._options.unit}; {sorting(self._options)}",
            "Ratio: of the window, as far as every span of it is held; work side by side counts for each.",
            *note_of_rest(self.blocks),
        ]

    def nothing(self) -> list[str]:
        return [] if self.blocks else self.coverage.none_held("span of kind user", NO_SPAN)

    def sections(self) -> list[Section]:
        return [block_section(block, self._options, "Name") for block in self.blocks]


def user(recording: Recording, options: Options) -> User:
    """The view of the spans that are held. `tracer_option`, `corrected` and `skip_first` mean nothing to it."""
    window = recording.facts.held
    window_ns = window[1] - window[0]

    def block(thread: int | None, name: str, places: Sequence[PlaceCalls], options: Options) -> CallBlock:
        rows = call_rows(by_name(places), 0, window_ns, window_ns, options)
        return CallBlock(thread, name, window_ns, window_ns, rows)

    root = place_tree(recording.columns, ("user",), window)
    places = [place for place in every_place(root) if place.site.kind == "user"]
    blocks = blocks_of(places, recording.facts.threads, options, block)
    return User(Coverage.of_recording(recording), window_ns, blocks, options)
