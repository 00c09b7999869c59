"""Writes and reads the key `instrument` of a Chrome trace: the tally, and all facts of the trace except its events.

Viewers ignore the key. Each site is stored once, and events refer to sites by index.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from instrument.profile.model import KINDS
from instrument.recording.distributions import LAST_BUCKET
from instrument.recording.metric_definitions import GAUGES
from instrument.recording.numbers import learn_gauges
from instrument.recording.paths import CallPath
from instrument.recording.spans import (
    FIRSTS,
    HOST,
    WORK,
    Cost,
    FirstCall,
    Flops,
    Gpu,
    ImportTime,
    Interval,
    Kernel,
    Origin,
    OwnNotes,
    Sample,
    Site,
    Span,
    Startup,
    plain_fields,
)
from instrument.recording.tally import TOTALS, Tally, Totals, buckets_of
from instrument.trace.layout import (
    WIDTHS,
    Column,
    KernelColumns,
    pack_allocations,
    pack_kernels,
    unpack_allocations,
    unpack_kernels,
)
from instrument.trace.text import (
    INT64,
    LIMIT_SPANS,
    check_index,
    check_ints,
    check_type,
    convert_lists,
    encode,
    is_number,
    make_safe,
    remove_surrogates,
)
from instrument.trace.trace import ALLOCATION, Allocation, Allocations, MergedProcess, Trace

FORMAT = 6
"""The version of the metadata. Up to version 5, kernels and allocations were lists. In version 4, the tally had no
waiting times."""

READ = (4, 5, 6)
"""The versions of the metadata that `Metadata` can read."""

LIMIT_LINKS = 20_000_000
"""The maximum number of sites in all call paths of a file together. It bounds the memory for a hostile file."""

_SUMS = (
    "calls", "errors", "total_ns", "self_ns", "waiting_ns", "device_ns", "elapsed_ns", "min_ns", "max_ns",
    "moved_bytes", "first_ns", "probe_ns", "cancelled",
)  # fmt: skip

_JSON_TYPES = {"int": (int,), "str": (str,), "bool": (bool,), "float": (float, int)}


def _encode_facts(thing: Any) -> dict[str, Any]:
    """Return the fields of a flat dataclass as JSON values, without empty fields that have their default value."""
    values = {item.name: (getattr(thing, item.name), item.default) for item in plain_fields(type(thing))}
    return {name: make_safe(value) for name, (value, default) in values.items() if value or value != default}


def read_dataclass(kind: type, facts: Mapping[str, Any], **more: Any) -> Any:
    """Return a flat dataclass made from the facts. Unknown facts are ignored. Raises `ValueError` for a wrong type."""
    items = [item for item in plain_fields(kind) if item.name in facts and item.name not in more]
    return kind(**{item.name: check_type(facts[item.name], *_JSON_TYPES[str(item.type)]) for item in items}, **more)


# Written


class Sites:
    """Numbers the sites of a file in the order of first use, each once."""

    def __init__(self, sites: Iterable[Site]) -> None:
        self.entries: dict[str, int] = {}
        for site in sites:
            self.index_of(site)

    def index_of(self, site: Site) -> int:
        """Return the index of a site. A new site is added."""
        return self.entries.setdefault(encode(_encode_facts(site)), len(self.entries))


def encode_metadata(
    trace: Trace, base_ns: int, sites: Sites, tally: Tally | None, arrows_left_out: int
) -> Iterator[str]:
    """Yield the JSON text of the key `instrument` in pieces. Times in the text count from `base_ns`."""
    counted = "null" if tally is None else _pack_tally(tally, base_ns, sites)
    read = {sample.name for sample in trace.samples}
    facts = {
        "format": FORMAT,
        "about": "Times in ns. A device slice is the stretch of a stream between two events, not a kernel.",
        "base_ns": base_ns,
        "base_epoch_ns": trace.origin.realtime_of(base_ns),
        **_pack_process(trace),
        **({"apart_ns": trace.apart_ns} if trace.apart_ns else {}),
        **({"processes": list(map(_pack_merged_process, trace.processes))} if trace.processes else {}),
        "arrows_left_out": arrows_left_out,
        "gauges": {name: f"{GAUGES[name].unit} {GAUGES[name].about}" for name in GAUGES if name in read},
        "gpus": [_encode_facts(gpu) for gpu in trace.gpus],
        "not_told": [
            [remove_surrogates(sample.name), sample.device, sample.at_ns - base_ns]
            for sample in trace.samples
            if not is_number(sample.value)
        ],
        **({} if trace.watched is None else {"watched": [at_ns - base_ns for at_ns in trace.watched]}),
        **(_pack_work(trace, base_ns) if trace.kernels or trace.allocations else {}),
        "startup": trace.startup and _pack_startup(trace.startup, base_ns, sites),
        **({"flops": [[row.thread_id, row.at_ns - base_ns, row.flops] for row in trace.flops]} if trace.flops else {}),
    }
    yield _escape_del(encode(facts)[:-1])
    yield _escape_del(',"sites":[\n' + ",\n".join(sites.entries) + f'],\n"tally":{counted}}}')


def _pack_process(trace: Trace) -> dict[str, Any]:
    """Return the facts that traces of one process and merged traces share."""
    return {
        "origin": _encode_facts(trace.origin),
        "window": trace.window,
        "start_ns": trace.start_ns,
        "end_ns": trace.end_ns,
        "held_from_ns": trace.held_from_ns,
        "threads": make_safe(list(trace.threads.items())),
        "losses": make_safe(dict(trace.losses)),
        "notes": make_safe(list(trace.notes)),
        **({"died": remove_surrogates(trace.died)} if trace.died else {}),
        **({"own_notes": make_safe(asdict(trace.own_notes))} if trace.own_notes != OwnNotes() else {}),
        "cost": trace.cost and _encode_facts(trace.cost),
    }


NUMBERS_OF_PROCESS = ("threads", "devices", "streams", "absent")


def _pack_merged_process(process: MergedProcess) -> dict[str, Any]:
    more = {"windows": process.windows, "moved_ns": process.moved_ns, "is_watched": process.is_watched}
    numbers = {name: list(getattr(process, name).items()) for name in NUMBERS_OF_PROCESS}
    samples = [
        [remove_surrogates(sample.name), sample.at_ns, sample.value if is_number(sample.value) else None]
        for sample in process.facts.samples
    ]
    return {**_pack_process(process.facts), **more, "numbers": numbers, **({"samples": samples} if samples else {})}


def _escape_del(text: str) -> str:
    # JSON allows DEL as it is, but Perfetto 52 and 55 refuse a file that has it outside of the events.
    return text.replace("\x7f", "\\u007f")


def _pack_work(trace: Trace, base_ns: int) -> dict[str, Any]:
    """Return the kernels and allocations of torch.profiler's record, with columns as packed text."""
    columns, names = pack_kernels(trace.kernels, base_ns)
    columns |= pack_allocations(trace.allocations, base_ns)
    texts = {name: base64.b64encode(zlib.compress(column.tobytes(), 1)).decode() for name, column in columns.items()}
    return {"kernel_names": names, "columns": {name: [columns[name].dtype.str, texts[name]] for name in columns}}


def _pack_startup(startup: Startup, base_ns: int, sites: Sites) -> dict[str, Any]:
    imports, process_ns = startup.imports, startup.process_ns
    return {
        "session_ns": startup.session_ns - base_ns,
        "process_ns": None if process_ns is None else process_ns - base_ns,
        "imports": None
        if imports is None
        else [
            [
                remove_surrogates(entry.package),
                entry.entries,
                entry.total_ns,
                entry.self_ns,
                entry.in_spans_ns,
                entry.late_ns,
            ]
            for entry in imports
        ],
        "firsts": [_pack_first_call(call, base_ns, sites) for call in startup.firsts],
        **(
            {"request": _pack_first_call(startup.request, base_ns, sites), "why": startup.why}
            if startup.request
            else {}
        ),
    }


def _pack_first_call(call: FirstCall, base_ns: int, sites: Sites) -> list[int]:
    return [sites.index_of(call.site), call.start_ns - base_ns, call.total_ns]


def _pack_tally(tally: Tally, base_ns: int, sites: Sites) -> str:
    """Return the JSON of a tally: nodes as [parent or -1, site], and rows, with times from `base_ns`."""
    places = {site: sites.index_of(site) for site in tally.sites()}
    parents, site_of, sites_of_tree = tally.parents.tolist(), tally.site_of.tolist(), tally.tree.sites
    numbers: dict[int, int] = {-1: -1}
    nodes: list[tuple[int, int]] = []

    def number(node: int) -> int:
        missing = []
        while node not in numbers:
            missing.append(node)
            node = parents[node]
        for missing_node in reversed(missing):
            numbers[missing_node] = len(nodes)
            nodes.append((numbers[parents[missing_node]], places[sites_of_tree[site_of[missing_node]]]))
        return numbers[missing[0] if missing else node]

    for node in np.unique(tally.lines["node"]).tolist():  # in their order, which calls that begin together follow
        number(node)
    ends = np.cumsum(np.bincount(tally.buckets["line"], minlength=len(tally))).tolist()
    pairs = tally.buckets[["bucket", "times"]].tolist()
    lines, begin, rows = tally.lines.copy(), 0, []
    lines["first_ns"] -= base_ns
    for (node, thread_id, *sums), end in zip(lines[["node", "thread_id", *_SUMS]].tolist(), ends, strict=True):
        histogram = [number for bucket in pairs[begin:end] for number in bucket]
        rows.append(encode([number(node), thread_id, *sums, histogram]))
        begin = end
    threads = encode(make_safe(list(tally.threads.items())))
    return f'{{"threads":{threads},"nodes":{encode(nodes)},"rows":[\n' + ",\n".join(rows) + "]}"


# Read back


class Metadata:
    """Reads the value of the key `instrument`. Facts other than the sites and the base of times are read on access."""

    def __init__(self, facts: dict[str, Any]) -> None:
        if facts["format"] not in READ:
            versions = f"its format is {facts['format']!r:.20}, and this version reads {READ[0]} to {FORMAT}"
            raise ValueError(f"{versions}; read it with the version of instrument that wrote it")
        self.base_ns: int = check_type(facts["base_ns"], int)
        self.sites = [read_site(entry) for entry in facts["sites"]]
        self._facts = facts
        learn_gauges(check_type(facts.get("gauges", {}), dict))

    def make_trace(self, spans: Sequence[Span], samples: list[Sample]) -> Trace:
        """Return the trace with the given spans and samples. Adds the samples without a value, which only the metadata
        has."""
        facts = self._facts
        samples += [
            Sample(check_type(name, str), check_type(device, int), self.base_ns + check_type(since_ns, int), None)
            for name, device, since_ns in facts.get("not_told", ())
        ]
        samples.sort(key=lambda s: (s.at_ns, s.device, s.name))
        kernels, allocations = self._read_work()
        return replace(
            _read_process(facts),
            spans=spans,
            samples=tuple(samples),
            gpus=tuple(read_dataclass(Gpu, gpu) for gpu in facts.get("gpus", ())),
            kernels=kernels,
            allocations=allocations,
            watched=self._read_watched(),
            startup=self._read_startup(),
            flops=tuple(
                Flops(thread_id, self.base_ns + since_ns, flops)
                for thread_id, since_ns, flops in map(check_ints, facts.get("flops", ()))
            ),
            apart_ns=min(max(check_type(facts.get("apart_ns", 0), int), 0), INT64 >> 2),
            processes=tuple(map(_read_merged_process, facts.get("processes", ()))),
        )

    def _read_startup(self) -> Startup | None:
        facts = self._facts.get("startup")
        if facts is None:
            return None
        imports, process_ns, why = facts["imports"], facts["process_ns"], facts.get("why", "")
        if why not in FIRSTS:
            raise ValueError(f"it has {why!r:.40} for a reason, which does not exist; it is damaged")
        return Startup(
            session_ns=self.base_ns + check_type(facts["session_ns"], int),
            process_ns=None if process_ns is None else self.base_ns + check_type(process_ns, int),
            imports=None
            if imports is None
            else tuple(
                ImportTime(check_type(package, str), *(check_type(time, int) for time in sums))
                for package, *sums in imports
            ),
            firsts=tuple(self._read_first_call(*first) for first in facts["firsts"]),
            request=self._read_first_call(*facts["request"]) if "request" in facts else None,
            why=why,
        )

    def _read_first_call(self, site: Any, since_ns: Any, total_ns: Any) -> FirstCall:
        return FirstCall(
            self.sites[check_index(site)], self.base_ns + check_type(since_ns, int), check_type(total_ns, int)
        )

    def _read_watched(self) -> Interval | None:
        if "watched" not in self._facts:
            return None
        first, last = (check_type(self.base_ns + check_type(at_ns, int), int) for at_ns in self._facts["watched"])
        return first, max(first, last)

    def _read_work(self) -> tuple[Sequence[Kernel], Sequence[Allocation]]:
        texts = check_type(self._facts.pop("columns", {}), dict)
        names = [check_type(name, str) for name in self._facts.get("kernel_names", ())]
        if not texts:
            return self._read_listed_kernels(names), self._read_listed_allocations()
        columns = {name: _read_column(*of_name) for name, of_name in texts.items()}
        kernels = unpack_kernels(columns, names, self.base_ns)
        return kernels, unpack_allocations(columns, self.base_ns)

    def _read_listed_kernels(self, names: Sequence[str]) -> Sequence[Kernel]:
        """Return the kernels from a file of an earlier version, a list of numbers per kernel with times relative to the
        base."""
        kernels = []
        for name, kind, *numbers in self._facts.get("kernels", ()):
            device, stream, start_ns, length_ns, thread_id, launched_ns = check_ints(numbers)
            start_ns, launched_ns = start_ns + self.base_ns, launched_ns + (self.base_ns if thread_id else 0)
            work = Kernel(
                names[check_index(name)], kind, device, stream, start_ns, start_ns + length_ns, thread_id, launched_ns
            )
            if kind not in WORK or length_ns < 0:
                raise ValueError("a kernel in it is not valid; it is damaged")
            kernels.append(work)
        return KernelColumns.of(kernels).move_times(0)

    def _read_listed_allocations(self) -> Allocations:
        """Return the allocations from a file of an earlier version: packed text, or a list of numbers per
        allocation."""
        allocations = self._facts.get("allocations", [])
        if isinstance(allocations, str):
            return Allocations(_read_column("<i8", allocations).view(ALLOCATION), self.base_ns)
        rows = [tuple(check_ints([*numbers, 0][:7])) for numbers in allocations]
        return Allocations(np.array(rows, ALLOCATION), self.base_ns)

    def read_tally(self) -> Tally | None:
        saved = self._facts["tally"]
        if saved is None:
            return None
        paths: list[CallPath] = [()]
        links = 0
        for parent, site in saved["nodes"]:
            paths.append((*paths[_read_place(parent)], self.sites[check_index(site)]))
            links += len(paths[-1])
            if links > LIMIT_LINKS:
                raise ValueError("its call paths are too long; it is damaged")
        lines, of_line, buckets, times = list[Totals](), list[int](), list[int](), list[int]()
        for node, thread_id, *numbers, histogram in saved["rows"]:
            if self._facts["format"] == READ[0]:  # it had no waiting times; a coroutine's self time counts as waiting
                path = paths[_read_place(node)]
                numbers.insert(_SUMS.index("waiting_ns"), numbers[3] if path and path[-1].suspends else 0)
            numbers += [0] * (len(numbers) == len(_SUMS) - 1)  # no count of cancelled requests
            sums = dict(zip(_SUMS, (check_type(number, int) for number in numbers), strict=True))
            sums["first_ns"] = check_type(sums["first_ns"] + self.base_ns, int)
            if sums["calls"] < 0:
                raise ValueError(f"a call path in it was called {sums['calls']} times; it is damaged")
            pairs = [*zip(map(_read_bucket, histogram[::2]), map(check_index, histogram[1::2]), strict=True)]
            of_line += [len(lines)] * len(pairs)
            buckets += (bucket for bucket, _ in pairs)
            times += (calls for _, calls in pairs)
            lines.append(Totals(node=_read_place(node), thread_id=check_type(thread_id, int), **sums))
        histograms = buckets_of(*(np.array(column, np.int64) for column in (of_line, buckets, times)))
        return Tally.of_paths(paths, np.array(lines, TOTALS), histograms, _read_names(saved["threads"]))


def _read_place(node: Any) -> int:
    """Return the index of the call path of a node. Index 0 is the empty path, for node -1."""
    return 0 if node == -1 else check_index(node) + 1


def _read_column(kind: Any, text: Any) -> Column:
    if kind not in _KINDS_OF_COLUMNS:
        raise ValueError(f"it has {kind!r:.40} for the type of a column, which does not exist; it is damaged")
    most = LIMIT_SPANS * np.dtype(kind).itemsize
    numbers = zlib.decompressobj().decompress(base64.b64decode(check_type(text, str), validate=True), most + 1)
    if len(numbers) > most:
        raise ValueError(f"it has more than {LIMIT_SPANS} kernels or allocations; record less into one file")
    return np.frombuffer(numbers, kind)


_KINDS_OF_COLUMNS = {np.dtype(width).str for width in (*WIDTHS, np.int64)}


def _read_process(facts: Mapping[str, Any]) -> Trace:
    cost = None if facts["cost"] is None else read_dataclass(Cost, facts["cost"])
    if cost is not None and not np.isfinite(cost.per_call_ns):
        raise ValueError("the cost of a call in it is infinite; it is damaged")
    return Trace(
        origin=read_dataclass(Origin, facts["origin"]),
        start_ns=check_type(facts["start_ns"], int),
        end_ns=check_type(facts["end_ns"], int),
        spans=[],
        threads=_read_names(facts["threads"]),
        losses={reason: check_type(lost, int) for reason, lost in facts["losses"].items()},
        notes=tuple(check_type(note, str) for note in facts["notes"]),
        window=check_type(facts["window"], int),
        cost=cost,
        held_from_ns=check_type(facts.get("held_from_ns", 0), int),
        died=check_type(facts.get("died", ""), str),
        own_notes=own_notes_of(facts.get("own_notes", {})),
    )


def own_notes_of(facts: Mapping[str, Any]) -> OwnNotes:
    """Return the notes on unmet rules of one process, from a file or its exit facts. Raises for damaged facts."""
    waiting = tuple((check_type(mark, str), check_type(note, str)) for mark, note in facts.get("waiting", ()))
    texts = (tuple(check_type(text, str) for text in facts.get(name, ())) for name in ("at_work", "uncalled"))
    at_work, uncalled = texts
    return OwnNotes(at_work, waiting, uncalled)


def _read_merged_process(facts: Any) -> MergedProcess:
    numbers = check_type(facts["numbers"], dict)
    moved_ns = check_type(facts["moved_ns"], int)
    windows = _read_pairs(facts["windows"])
    own_numbers: Any = {name: dict(_read_pairs(numbers[name])) for name in NUMBERS_OF_PROCESS}
    is_watched = check_type(facts["is_watched"], bool)
    samples = tuple(
        Sample(
            check_type(name, str),
            HOST,
            check_type(at_ns, int),
            None if value is None else check_type(value, float, int),
        )
        for name, at_ns, value in facts.get("samples", ())
    )
    if any(not -INT64 >> 2 < time_ns < INT64 >> 2 for time_ns in (moved_ns, *(sample.at_ns for sample in samples))):
        raise ValueError("it has a time out of range; it is damaged")
    of_process = replace(_read_process(facts), samples=samples)
    return MergedProcess(of_process, windows, **own_numbers, moved_ns=moved_ns, is_watched=is_watched)


def _read_pairs(rows: Any) -> list[tuple[int, int]]:
    return [(first, second) for first, second in map(check_ints, rows)]


def read_site(facts: dict[str, Any]) -> Site:
    """Return a site from its JSON. Raises `ValueError` for an invalid one."""
    pairs = tuple((check_type(key, str), convert_lists(value)) for key, value in facts.get("attributes", ()))
    site: Site = read_dataclass(Site, facts, attributes=pairs)
    if site.kind not in KINDS:
        raise ValueError(f"a place in it is of the kind {site.kind!r:.40}, which does not exist; it is damaged")
    return site


def _read_bucket(value: Any) -> int:
    if (bucket := check_index(value)) > LAST_BUCKET:
        raise ValueError("a histogram in it has an unknown bucket; it is damaged")
    return bucket


def _read_names(pairs: Any) -> dict[int, str]:
    return {check_type(thread_id, int): check_type(name, str) for thread_id, name in pairs}
