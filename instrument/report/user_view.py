"""The `user` view: what the service's authors named themselves, on the host and on the device.

It is the UserDefined Summary of `paddle.profiler`: one row for each name of the spans of kind `user`, such as
``with scope("tokenize")``. Rows are sums over calls; a call inside another of the same name counts in the total and not
again in the ratio. Ratios are of the window, which work on several threads may exceed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from instrument.report.call_rows import (
    CallBlock,
    block_lines,
    block_section,
    blocks_of,
    by_name,
    call_rows,
    note_of_rest,
    sorting,
)
from instrument.report.calls import PlaceCalls, every_place, place_tree
from instrument.report.coverage import Coverage, none_held
from instrument.report.section import Section
from instrument.report.table import title
from instrument.report.view import Options, Recording


@dataclass(frozen=True, slots=True)
class User:
    """The view: a block of rows for all threads, or for each. The bases of all ratios are `window_ns`.

    That is the part of the window of which every span is held, and what of a call lies outside of it is not counted.
    """

    coverage: tuple[str, ...]
    window_ns: int
    blocks: tuple[CallBlock, ...]
    _complete: bool = field(repr=False)
    _options: Options = field(repr=False)

    def sections(self) -> list[Section]:
        return [*map(block_section, self.blocks)]

    def lines(self) -> list[str]:
        lines = [*title("User Report"), *self.coverage]
        if not self.blocks:
            otherwise = "No span of kind user was recorded: open one with scope(name), or give a rule that kind."
            return [*lines, "", *none_held("span of kind user", otherwise, complete=self._complete)]
        lines += [
            f"Time unit: {self._options.unit}; {sorting(self._options)}",
            "Ratio: of the window, as far as every span of it is held; work side by side counts for each.",
            *note_of_rest(self.blocks),
            "",
        ]
        return lines + block_lines(self.blocks, self._options, "Name")


def user(recording: Recording, options: Options) -> User:
    """The view of the spans that are held. `tracer_option`, `corrected` and `skip_first` mean nothing to it."""
    window = recording.facts.held
    window_ns = window[1] - window[0]

    def block(thread: int | None, name: str, places: Sequence[PlaceCalls], options: Options) -> CallBlock:
        rows = call_rows(by_name(places), 0, window_ns, window_ns, options)
        return CallBlock(thread, name, window_ns, window_ns, rows)

    root = place_tree(recording.columns, ("user",), window)
    places = [place for place in every_place(root) if place.site.kind == "user"]
    held = Coverage.of_recording(recording)
    blocks = blocks_of(places, recording.facts.threads, options, block)
    return User(tuple(held.lines()), window_ns, blocks, held.complete, options)
