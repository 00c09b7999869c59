"""The slices of device intervals as text: complete events on the lanes of streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.chrome.lanes import Board
from instrument.chrome.ordered import OrderedIntervals, Spans
from instrument.trace.groups import by_first_sight
from instrument.trace.metadata import SiteText
from instrument.trace.text import MILLI, clean, encode


class IntervalEvents:
    """The events of device intervals, which are asked for by their places.

    `kind` numbers the lane and site of each, `addresses` are the texts of the lanes by that number. Only what encloses
    no other has the argument `stream`, because HolisticTraceAnalysis takes what has it for a kernel and adds all
    kernels up.
    """

    def __init__(self, spans: Spans, intervals: OrderedIntervals, board: Board, of_sites: Sequence[SiteText]) -> None:
        self._spans, self._intervals = spans, intervals
        its, row = spans.trace.device, intervals.row
        streams, number, _ = intervals.lanes(its)
        # What encloses another is followed on its stream by one that begins before it ends.
        order = np.argsort(streams, kind="stable")
        before, after = order[:-1], order[1:]
        overlaps = intervals.start_ns[after] < intervals.end_ns[before]
        self._encloses = np.zeros(len(row), dtype=np.bool_)
        self._encloses[before] = overlaps & (streams[after] == streams[before])
        self._labels = [encode(clean(label)) for label in its.labels]
        self.addresses: list[str] = []
        self._heads: list[str] = []
        site = spans.site[intervals.owner]
        self.kind, some = by_first_sight(streams, number, site)
        columns = (its.device[row[some]], its.stream[row[some]], number[some], site[some])
        for device, stream, its_number, its_site in zip(*(column.tolist() for column in columns), strict=True):
            lane = board.of_stream(device, stream, its_number)
            self.addresses.append(lane.address)
            head = f',\n{{"ph":"X"{lane.address}{of_sites[its_site].name},"cat":"device","args"'
            self._heads.append(f'{head}:{{{lane.mark}"device":{device},"')

    def text(self, first: int, end: int, ties: Mapping[int, str]) -> str:
        """The events of some intervals, each behind a comma; `ties` are what ties some of them to spans."""
        some, heads, labels, intervals = slice(first, end), self._heads, self._labels, self._intervals
        row, its = intervals.row[some], self._spans.trace.device
        keys = ["enclosing_stream" if encloses else "stream" for encloses in self._encloses[some].tolist()]
        places = [f',"place":{place}' if place else "" for place in intervals.number[some].tolist()]
        us, ns = np.divmod(intervals.start_ns[some], 1000)
        total_us, total_ns = np.divmod(intervals.end_ns[some] - intervals.start_ns[some], 1000)
        columns: tuple[NDArray[Any], ...] = (
            self.kind[some], its.stream[row], its.label[row], its.uncertainty_ns[row],
            self._spans.span_id[intervals.owner[some]], us, ns, total_us, total_ns,
        )  # fmt: skip
        texts = [
            f'{heads[kind]}{key}":{stream},"label":{labels[label]},"uncertainty_ns":{uncertainty_ns}{place}'
            f',"owner":{owner}}},"ts":{at_us}{MILLI[at_ns]},"dur":{dur_us}{MILLI[dur_ns]}{tie}}}'
            for kind, stream, label, uncertainty_ns, owner, at_us, at_ns, dur_us, dur_ns, key, place, tie in zip(
                *(column.tolist() for column in columns),
                keys,
                places,
                [ties.get(at, "") for at in range(first, end)],
                strict=True,
            )
        ]
        return "".join(texts)
