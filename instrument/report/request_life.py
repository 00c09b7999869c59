"""The report on one request: the parts of its time, the cause of its slowness, and its waits and batches in order.

Successive batches, and the short waits between them, are one line. Waits and batches much longer than usual have their
own lines.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

import numpy as np

from instrument.errors import TraceError
from instrument.profile.document import find_most_similar
from instrument.recorder.attribute_checks import encode_key
from instrument.report.endpoint_statistics import describe_failure
from instrument.report.request_groups import mask_requests_by_name
from instrument.report.requests_view import ENOUGH, blame_text
from instrument.report.table import (
    LINE,
    compute_share,
    format_percent,
    format_time,
    make_section_title_lines,
    make_title_lines,
    number_text,
    printable,
    shorten,
    wrap_text,
)
from instrument.report.view import Options, Recording
from instrument.trace.blame import Blame, find_blame, typical_times
from instrument.trace.columns import Columns
from instrument.trace.indices import NONE
from instrument.trace.joined import Joined
from instrument.trace.ledger import SHARE, STALL, Ledger, Moment, list_turns

FEW = 40
"""The maximum number of waits and batches that are listed on separate lines."""

SMALL = 200
"""In a long list, a wait has its own line if it exceeds 1/`SMALL` of the wall time."""

OUTSTANDING = 4
"""In a long list, a batch has its own line if it exceeds the median by this factor."""

MOST_DIGITS = 19
"""An integer with fewer digits than this always fits into 64 bits."""

BAR = 32
"""The width of the bar for a request's whole wall time, in columns."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A line of the report: one part of the request's time, or several short parts. `begin_ns` counts from the start of
    the request. `in_batches_ns` is the time in batches of up to `size` requests. `own_ns` is the request's share of
    that time."""

    part: str
    name: str
    begin_ns: int
    length_ns: int
    times: int
    own_ns: int | None
    size: int | None
    in_batches_ns: int
    thread_id: int | None


@dataclass(frozen=True, slots=True)
class RequestLife:
    """The life of one request, part by part. The times of `parts` add up to its wall time. `blame` is the cause of its
    slowness. `namesakes` are the span numbers of other requests with the same key. `device_shared_ns` is the request's
    share of the device time of batches."""

    name: str
    keys: tuple[str, ...]
    namesakes: tuple[int, ...]
    span_id: int
    begin_ns: int
    wall_ns: int
    error: str
    outcome: str
    parts: Mapping[str, int]
    blame: Blame | None
    turns: tuple[Turn, ...]
    device_own_ns: int
    device_shared_ns: int
    _options: Options

    def lines(self) -> list[str]:
        unit = self._options.unit
        error = f", {printable(self.error or self.outcome)}" if self.error or self.outcome else ""
        keys = f", key {' '.join(map(printable, self.keys))}" if self.keys else ""
        name = shorten(printable(self.name) or "(no name)", LINE // 2)
        at = f"{number_text(self.begin_ns / 1e9)} s after the start of the trace, span {self.span_id}"
        summary = wrap_text(f"{name}: {format_time(self.wall_ns, unit)} {unit}{error}{keys}")
        lines = [*make_title_lines("Request Report"), *summary, f"Began {at}"]
        if self.namesakes:
            spans = ", ".join(map(str, self.namesakes[:FEW]))
            lines += wrap_text(
                f"The longest of {len(self.namesakes) + 1} requests of that key; the others are spans {spans}"
            )
        lines += ["", *make_section_title_lines("Where the time went")]
        width = max(map(len, self.parts), default=0) + 2
        for part, time_ns in sorted(self.parts.items(), key=lambda item: (-item[1], item[0])):
            ratio = compute_share(time_ns, self.wall_ns)
            lines.append(
                f"{printable(part):<{width}}{format_time(time_ns, unit):>10} {unit}{format_percent(ratio, 1):>8}"
            )
        if self.device_own_ns or self.device_shared_ns:
            own_time, batch_time = (format_time(ns, unit) for ns in (self.device_own_ns, self.device_shared_ns))
            lines += ["", f"Device time: {own_time} {unit} of its own work, {batch_time} {unit} its shares of batches"]
        if self.blame is not None:
            text = blame_text(self.blame, unit)
            lines += ["", *wrap_text(f"{text[0].upper()}{text[1:]}")]  # names and keys stay as they are
        lines += ["", *make_section_title_lines("Turn by turn")]
        for turn in self.turns:
            lines.append(self._turn_line(turn, unit))
        return [*lines, "", "A bar is the part's place. 25% its own of 4: its share of batches of 4 requests.", ""]

    def _repr_html_(self) -> str:
        unit, wall_ns = self._options.unit, max(self.wall_ns, 1)
        title = f"{self.name}: {format_time(self.wall_ns, unit)} {unit} {' '.join(self.keys)}"
        rows = []
        for turn in self.turns:
            begin, width = (100 * time_ns / wall_ns for time_ns in (turn.begin_ns, turn.length_ns))
            bar = f"margin-left:{begin:.2f}%;width:{width:.2f}%;min-width:1px;height:.8em;background:#4f8fd9"
            label = printable(turn.part if turn.name in ("", turn.part) else f"{turn.part}: {turn.name}")
            rows.append(
                f'<tr><td style="text-align:left">{escape(label)}</td><td>{format_time(turn.length_ns, unit)}</td>'
                f'<td style="width:60%;padding:0"><div style="{bar}"></div></td></tr>'
            )
        return f'<h4>{escape(printable(title))}</h4><table style="width:100%"><tbody>{"".join(rows)}</tbody></table>'

    def _turn_line(self, turn: Turn, unit: str) -> str:
        scale = BAR / max(self.wall_ns, 1)
        first = min(int(turn.begin_ns * scale), BAR - 1)
        length = max(1, min(BAR - first, round(turn.length_ns * scale)))
        bar = (" " * first + "#" * length).ljust(BAR)
        many = f" x {turn.times}" if turn.times > 1 else ""
        label = turn.part if not turn.name or turn.name == turn.part else f"{turn.part}: {turn.name}"
        if turn.own_ns is not None:
            share = format_percent(compute_share(turn.own_ns, turn.in_batches_ns), 1)
            label = f"{turn.name}{many}, {share} its own of {turn.size}"
        room = LINE - BAR - 26
        times = f"{format_time(turn.begin_ns, unit):>10}{format_time(turn.length_ns, unit):>11}"
        return f"{times}  |{bar}| {shorten(printable(label), room)}".rstrip()


def make_request_life(recording: Recording, name: str, options: Options) -> RequestLife:
    """Return the life of the request whose key or span number is `name`. If several requests have the key, the longest
    one is chosen. Raises `TraceError` if no request matches."""
    trace, joined, ledger = (recording.columns, recording.joined, recording.ledger)
    place, *namesakes = find_requests_by_key(trace, joined, name)
    row = int(joined.rows[place])
    begin_ns = int(trace.start_ns[row])
    site = trace.sites[trace.site[row]]
    alike = np.flatnonzero(mask_requests_by_name(recording, site.name))
    cause = find_blame(trace, joined, ledger, place, typical_times(ledger, alike)) if len(alike) >= ENOUGH else None
    moments = list_turns(trace, joined, place)
    (error, outcome), devices = describe_failure(trace, row), recording.device_ledger
    return RequestLife(
        name=site.name,
        keys=joined.keys.get(place, ()),
        namesakes=tuple(trace.span_id[joined.rows[namesakes]].tolist()),
        span_id=int(trace.span_id[row]),
        begin_ns=begin_ns - recording.trace.start_ns,
        wall_ns=int(trace.total_ns[row]),
        error=error,
        outcome=outcome,
        parts=ledger.times_of_request(place),
        blame=cause,
        turns=tuple(_make_turns(trace, joined, ledger, moments, begin_ns)),
        device_own_ns=int(devices.own_ns[place]),
        device_shared_ns=int(devices.shared_ns[place]),
        _options=options,
    )


def find_requests_by_key(trace: Columns, joined: Joined, name: str) -> list[int]:
    """Return the indices of requests by key or span number, the longest first. Raises `TraceError` if no request
    matches."""
    by_key = [place for place, keys in joined.keys.items() if name in keys or encode_key(name) in keys]
    if not by_key and name.isdecimal() and len(name) < MOST_DIGITS:
        rows = np.flatnonzero(trace.span_id[joined.rows] == int(name))
        by_key = rows.tolist()
    if by_key:
        return sorted(by_key, key=lambda place: -int(trace.total_ns[joined.rows[place]]))
    keys = [key for request_keys in joined.keys.values() for key in request_keys]
    near = find_most_similar(name, keys)
    hint = f"; nearest is {near!r}" if near else ""
    raise TraceError(
        f"there is no request {name!r:.80} among {len(joined.rows)} requests with {len(keys)} keys{hint}; give a "
        "key, or the number of a request's span from the view requests"
    )


def _make_turns(
    trace: Columns, joined: Joined, ledger: Ledger, moments: Sequence[Moment], begin_ns: int
) -> Iterator[Turn]:
    served = joined.served

    def find_span_name(moment: Moment) -> str:
        return "" if moment.row == NONE else trace.sites[trace.site[moment.row]].name

    wall_ns = moments[-1].end_ns - moments[0].start_ns if moments else 0

    lengths: dict[str, list[int]] = defaultdict(list)
    for moment in moments:
        if moment.part == SHARE:
            lengths[find_span_name(moment)].append(moment.end_ns - moment.start_ns)
    usual_ns = {name: sorted(lengths_ns)[len(lengths_ns) // 2] for name, lengths_ns in lengths.items()}
    longest_ns = max(usual_ns.values(), default=0)

    def is_routine(moment: Moment) -> bool:
        length_ns = moment.end_ns - moment.start_ns
        if moment.part in (SHARE, STALL):
            usual = usual_ns[find_span_name(moment)] if moment.part == SHARE else longest_ns
            return length_ns * BAR < wall_ns or length_ns < OUTSTANDING * usual
        return length_ns * SMALL < wall_ns

    groups: list[list[Moment]] = []
    for is_routine_run, run in groupby(moments, is_routine):
        group = list(run)
        groups += [group] if is_routine_run and len(moments) > FEW else [[moment] for moment in group]
    own_ns, members_of = _divide_batch_shares_among_turns(ledger, moments), Counter(served.batch.tolist())
    for group in groups:
        in_batches = [moment for moment in group if moment.pair != NONE]
        first = max(in_batches or group, key=lambda moment: moment.end_ns - moment.start_ns)
        sizes = [members_of[served.batch[moment.pair]] for moment in in_batches]
        yield Turn(
            part=first.part,
            name=find_span_name(first),
            begin_ns=group[0].start_ns - begin_ns,
            length_ns=group[-1].end_ns - group[0].start_ns,
            times=max(1, len({moment.pair for moment in in_batches})),
            own_ns=sum(own_ns[moment] for moment in in_batches) if in_batches else None,
            size=max(sizes, default=None),
            in_batches_ns=sum(moment.end_ns - moment.start_ns for moment in in_batches),
            thread_id=None if first.row == NONE else int(trace.thread_id[first.row]),
        )


def _divide_batch_shares_among_turns(ledger: Ledger, moments: Sequence[Moment]) -> dict[Moment, int]:
    """Divide a request's share of each batch among the request's moments, by length. All times are in ns."""
    lengths, until = Counter[int](), Counter[int]()
    in_batches, shares = [moment for moment in moments if moment.pair != NONE], dict[Moment, int]()
    for moment in in_batches:
        lengths[moment.pair] += moment.end_ns - moment.start_ns
    for moment in in_batches:
        pair, before = moment.pair, until[moment.pair]
        until[pair] += moment.end_ns - moment.start_ns
        own_ns = min(lengths[pair], int(ledger.given_ns[pair]))
        shares[moment] = own_ns * until[pair] // lengths[pair] - own_ns * before // lengths[pair]
    return shares
