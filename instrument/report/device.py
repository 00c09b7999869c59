"""The `device` view: what each device did with the window, by stream, by name and within requests.

The figures are those of `utilisation`; times are printed in ms. Shares of time are unions and name what they are a
share of, work by name is a sum.
"""

from __future__ import annotations

from collections import Counter

from instrument.report.device_summary import device_summary
from instrument.report.table import MISSING, ms, named_table, number, section_title, share, table, tenths, title
from instrument.report.utilisation import NO_EVENTS, UNTIMED, DeviceUse, NameUse, Unanswered, Utilisation, utilisation
from instrument.spans import Trace

REASONS = {
    "captured": "captured into a graph, so nothing ran",
    "dropped": "no event was free",
    NO_EVENTS: "no pair of events came back",
}

SHORT_NS = 10_000
"""Mean device time of a call below which a pair of events reads too long: published figures say six times."""

LABEL_WIDTH = 44
COLUMN_WIDTH = 10


def device(trace: Trace, *, rows: int | None = None) -> str:
    """The view as text. `rows` bounds each table of names to its largest rows; the rest is one row more."""
    use = utilisation(trace)
    lines = [*title("Device Report"), *coverage(trace), "Time unit: ms", ""]
    if trace.samples:
        lines += [*device_summary(trace.samples, trace.gpus).splitlines(), ""]
    if not use.devices:
        lines += [_nothing(use, trace), ""]
    for one in use.devices:
        lines += _device_lines(one, use, rows)
    lines += _unanswered_lines(use, rows)
    lines += _notes(use)
    return "\n".join(lines).rstrip("\n") + "\n"


def coverage(trace: Trace) -> list[str]:
    """Which spans a report is made from, and of what time it can tell shares."""
    first, last = trace.held
    since, until = (number((at_ns - trace.start_ns) / 1e9) for at_ns in (first, last))
    if first == trace.start_ns:
        return [f"Spans: all {len(trace.spans)} that were kept, from {since} s to {until} s"]
    return [
        f"Spans: the newest {len(trace.spans)} that the rings hold, none of them missing from {since} s to {until} s;",
        "older ones were overwritten",
    ]


def _nothing(use: Utilisation, trace: Trace) -> str:
    why = "no span asked for it"
    if use.asked:
        reasons = Counter[str]()
        for one in use.unanswered:
            reasons[one.reason] += one.spans
        parts = ", ".join(f"{spans} {reason}" for reason, spans in reasons.most_common())
        why = f"{use.asked} span{'s' * (use.asked > 1)} asked for it and got none ({parts})"
    elif trace.origin.recorder == "other":
        why = "kernels in a trace of another profiler are spans of their own, as in the events view"
    return f"No device time was recorded: {why}."


def _device_lines(one: DeviceUse, use: Utilisation, rows: int | None) -> list[str]:
    lines = section_title(f"Device {one.device}")
    parts = [
        ("Busy with compute", one.compute_ns),
        ("Busy with copies alone", one.copy_ns),
        ("Idle while a request was in flight (starved)", one.starved_ns),
        ("Idle while none was", one.unasked_ns),
        ("Window", one.window_ns),
    ]
    cells = [[label, ms(part_ns), tenths(part_ns, one.window_ns)] for label, part_ns in parts]
    lines += table(["Time of the device", "Time", "Of window"], cells, [LABEL_WIDTH, COLUMN_WIDTH, 0])
    copies_ns = one.copy_ns + one.hidden_copy_ns
    more = [
        ("Busy", one.busy_ns, one.window_ns, "window"),
        ("Two or more streams busy", one.overlap_ns, one.busy_ns, "busy"),
        ("Copies beside compute", one.hidden_copy_ns, copies_ns, "copies"),
        ("Starved, of the time with requests in flight", one.starved_ns, use.in_flight_ns, "in flight"),
    ]
    cells = [[label, ms(part_ns), tenths(part_ns, base_ns), base] for label, part_ns, base_ns, base in more]
    widths = [LABEL_WIDTH, COLUMN_WIDTH, COLUMN_WIDTH, 0]
    lines += ["", *table(["Unions of time", "Time", "Ratio", "Of"], cells, widths), ""]
    lines += [*_stream_lines(one), "", *_label_lines(one), "", *_name_lines(one, rows), ""]
    lines += [*_request_lines(one, use, rows), ""]
    if one.outside:
        are = "stretch lies outside of the window and is" if one.outside == 1 else "stretches lie outside of it and are"
        lines += [f"{one.outside} {are} not counted.", ""]
    return lines


def _stream_lines(one: DeviceUse) -> list[str]:
    header = ["Stream", "Stretches", "Busy", "Of window", "Sum"]
    cells = [
        [str(stream.stream), str(stream.intervals), ms(stream.busy_ns), tenths(stream.busy_ns, one.window_ns),
         ms(stream.summed_ns)]
        for stream in one.streams
    ]  # fmt: skip
    mean = MISSING if one.mean_streams is None else number(round(one.mean_streams, 3))
    return [
        *table(header, cells, [20, *[COLUMN_WIDTH] * 3, 0]),
        f"Streams busy at once, in the busy time: {mean} in the mean, {one.most_streams} at most",
    ]


def _label_lines(one: DeviceUse) -> list[str]:
    cells = [[label.label, str(label.intervals), ms(label.summed_ns)] for label in one.labels]
    lines = named_table(["Label", "Stretches", "Sum"], cells, COLUMN_WIDTH)
    if one.uncertainty_ns is not None:
        least, greatest = (number(value_ns / 1e3) for value_ns in one.uncertainty_ns)
        spread = least if least == greatest else f"{least} to {greatest}"
        lines.append(f"Place on the host's clock: known within {spread} us")
    return lines


def _name_lines(one: DeviceUse, rows: int | None) -> list[str]:
    shown, rest = one.names[:rows], one.names[len(one.names[:rows]) :]
    kinds = Counter(use.name for use in one.names)
    cells = [_name_cells(use, one, with_kind=kinds[use.name] > 1) for use in shown]
    if rest:
        calls, summed_ns = sum(use.calls for use in rest), sum(use.summed_ns for use in rest)
        mean = ms(share(summed_ns, calls))
        cells.append([f"(remaining {len(rest)})", str(calls), ms(summed_ns), mean, *[MISSING] * 4])
    header = ["By name", "Calls", "Sum", "Mean", "p50", "p99", "Busy", "Of busy"]
    return named_table(header, cells, COLUMN_WIDTH)


def _name_cells(use: NameUse, one: DeviceUse, *, with_kind: bool) -> list[str]:
    return [
        f"{use.name} ({use.kind})" if with_kind else use.name,
        str(use.calls),
        ms(use.summed_ns),
        ms(share(use.summed_ns, use.calls)),
        ms(use.p50_ns),
        ms(use.p99_ns),
        ms(use.busy_ns),
        tenths(use.busy_ns, one.busy_ns),
    ]


def _request_lines(one: DeviceUse, use: Utilisation, rows: int | None) -> list[str]:
    endpoints = one.endpoints
    lines: list[str] = []
    if endpoints:
        cells = []
        for endpoint in endpoints[:rows]:
            count, wall_ns = endpoint.requests, endpoint.wall_ns
            parts = [endpoint.own_ns, endpoint.others_ns, endpoint.starved_ns]
            shares = [cell for part in parts for cell in (ms(part / count), tenths(part, wall_ns))]
            cells.append([endpoint.name, str(count), ms(wall_ns / count), *shares])
        if len(endpoints) > len(cells):
            requests = sum(endpoint.requests for endpoint in endpoints[len(cells) :])
            cells.append([f"(remaining {len(endpoints) - len(cells)})", str(requests), *[MISSING] * 7])
        header = ["By request", "Requests", "Wall", "Own", "", "Others", "", "Starved", ""]
        lines += named_table(header, cells, 0)
    left_out = [(use.requests_cut, "at an edge of the window"), (use.requests_without, "without any device time")]
    told = ", ".join(f"{count} {why}" for count, why in left_out if count)
    lines += [f"Requests left out: {told}"] if told else []
    return lines or ["No request was in flight."]


def _unanswered_lines(use: Utilisation, rows: int | None) -> list[str]:
    """The spans without device time, by name, where there is more to say of them than how many they are."""
    if not use.devices and not any(one.reason in UNTIMED for one in use.unanswered):
        return []
    missing = sum(one.spans for one in use.unanswered)
    lines = section_title("Device time asked for")
    lines.append(f"Spans that asked for device time: {use.asked}; that got none: {missing}")
    if missing:
        shown = use.unanswered[:rows]
        cells = [[one.name, one.kind, str(one.spans), _reason(one)] for one in shown]
        rest = use.unanswered[len(shown) :]
        if rest:
            cells.append([f"(remaining {len(rest)})", MISSING, str(sum(one.spans for one in rest)), MISSING])
        lines += ["", *named_table(["Without device time", "Kind", "Spans", "Why"], cells, COLUMN_WIDTH)]
    return [*lines, ""]


def _reason(one: Unanswered) -> str:
    return REASONS.get(one.reason, one.reason)


def _notes(use: Utilisation) -> list[str]:
    """What a reader has to know to read the figures right, where it applies."""
    if not use.devices:
        return []
    names = [name for one in use.devices for name in one.names]
    lines = [
        "A stretch is the time of a stream between two events, not a kernel: gaps between kernels, and what",
        "the device put in between, are part of it.",
        "Idle: no instrumented device work. What no instrumented span timed is not seen.",
        "Sum: over calls, so that work side by side counts for each. Busy: the union of the same calls. An",
        "outer call's stretch holds those of the calls below it: shares of busy may exceed 100% together.",
    ]
    if any(one.requests for one in use.devices):
        lines += [
            "Wall, own, others, starved: means. Within a request's host time the device was busy with its own",
            "spans, with others alone, or idle; ratios are of wall.",
        ]
    if any(label.label == "stale" for one in use.devices for label in one.labels):
        lines.append("Stale stretches have the right length and an uncertain place: sums hold, unions may not.")
    if any(name.summed_ns < SHORT_NS * name.calls for name in names):
        lines.append("Stretches below 0.01 ms may read several times too long: events take time themselves.")
    return lines
