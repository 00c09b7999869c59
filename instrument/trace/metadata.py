"""Writes and reads the key `instrument` of a Chrome trace: the tally, and all facts of the trace except its events.

Viewers ignore the key. Each site is stored once, and events refer to sites by index.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from itertools import chain
from typing import Any

import numpy as np

from instrument.profile.model import KINDS
from instrument.recording.distributions import LAST_BUCKET
from instrument.recording.metric_definitions import GAUGES, add_gauges_of_file
from instrument.recording.paths import CallPath
from instrument.recording.spans import (
    FIRSTS,
    HOST,
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
    storable_fields,
)
from instrument.recording.tally import TOTALS, Tally, Totals, make_buckets
from instrument.trace.layout import (
    WIDTHS,
    Column,
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
    convert_to_tuples,
    encode,
    is_json_number,
    make_json_value,
    remove_surrogates,
)
from instrument.trace.trace import Allocation, Allocations, MergedProcess, Trace

FORMAT = 6
"""The version of the metadata."""

LIMIT_LINKS = 20_000_000
"""The maximum number of sites in all call paths of a file together. It bounds the memory for a hostile file."""

_SUMS = (
    "calls", "errors", "total_ns", "self_ns", "waiting_ns", "device_ns", "elapsed_ns", "min_ns", "max_ns",
    "moved_bytes", "first_ns", "probe_ns", "cancelled",
)  # fmt: skip

_JSON_TYPES = {"int": (int,), "str": (str,), "bool": (bool,), "float": (float, int)}


def _encode_dataclass(thing: Any) -> dict[str, Any]:
    """Return the fields of a flat dataclass as JSON values. Empty fields with their default value are left out."""
    values = {item.name: (getattr(thing, item.name), item.default) for item in storable_fields(type(thing))}
    return {name: make_json_value(value) for name, (value, default) in values.items() if value or value != default}


def read_dataclass(kind: type, facts: Mapping[str, Any], **more: Any) -> Any:
    """Return a flat dataclass made from JSON fields. Unknown fields are ignored. Raises `ValueError` for a wrong
    type."""
    items = [item for item in storable_fields(kind) if item.name in facts and item.name not in more]
    return kind(**{item.name: check_type(facts[item.name], *_JSON_TYPES[str(item.type)]) for item in items}, **more)


# Written


class Sites:
    """Assigns an index to each distinct site of a file, in the order of first use."""

    def __init__(self, sites: Iterable[Site]) -> None:
        self.entries: dict[str, int] = {}
        for site in sites:
            self.find_or_add_index(site)

    def find_or_add_index(self, site: Site) -> int:
        return self.entries.setdefault(encode(_encode_dataclass(site)), len(self.entries))


def encode_metadata(
    trace: Trace, base_ns: int, sites: Sites, tally: Tally | None, arrows_left_out: int
) -> Iterator[str]:
    """Yield the JSON text of the key `instrument` in pieces. Times in the text count from `base_ns`."""
    counted = "null" if tally is None else _pack_tally(tally, base_ns, sites)
    read = {sample.name for sample in trace.samples}
    packed, kernel_names = pack_kernels(trace.kernels, base_ns)
    packed |= pack_allocations(trace.allocations, base_ns)
    columns = {
        name: [column.dtype.str, base64.b64encode(zlib.compress(column.tobytes(), 1)).decode()]
        for name, column in packed.items()
    }
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
        "gpus": [_encode_dataclass(gpu) for gpu in trace.gpus],
        "not_told": [
            [remove_surrogates(sample.name), sample.device, sample.at_ns - base_ns]
            for sample in trace.samples
            if not is_json_number(sample.value)
        ],
        **({} if trace.watched is None else {"watched": [at_ns - base_ns for at_ns in trace.watched]}),
        **({"kernel_names": kernel_names, "columns": columns} if trace.kernels or trace.allocations else {}),
        "startup": trace.startup and _pack_startup(trace.startup, base_ns, sites),
        **({"flops": [[row.thread_id, row.at_ns - base_ns, row.flops] for row in trace.flops]} if trace.flops else {}),
    }
    yield _escape_del(encode(facts)[:-1])
    yield _escape_del(',"sites":[\n' + ",\n".join(sites.entries) + f'],\n"tally":{counted}}}')


def _pack_process(trace: Trace) -> dict[str, Any]:
    return {
        "origin": _encode_dataclass(trace.origin),
        "window": trace.window,
        "start_ns": trace.start_ns,
        "end_ns": trace.end_ns,
        "held_from_ns": trace.held_from_ns,
        "threads": make_json_value(list(trace.threads.items())),
        "losses": make_json_value(dict(trace.losses)),
        "notes": make_json_value(list(trace.notes)),
        **({"died": remove_surrogates(trace.died)} if trace.died else {}),
        **({"own_notes": make_json_value(asdict(trace.own_notes))} if trace.own_notes != OwnNotes() else {}),
        "cost": trace.cost and _encode_dataclass(trace.cost),
    }


NUMBERS_OF_PROCESS = ("threads", "devices", "streams", "absent")


def _pack_merged_process(process: MergedProcess) -> dict[str, Any]:
    more = {"windows": process.windows, "moved_ns": process.moved_ns, "is_watched": process.is_watched}
    numbers = {name: list(getattr(process, name).items()) for name in NUMBERS_OF_PROCESS}
    samples = [
        [remove_surrogates(sample.name), sample.at_ns, sample.value if is_json_number(sample.value) else None]
        for sample in process.facts.samples
    ]
    return {**_pack_process(process.facts), **more, "numbers": numbers, **({"samples": samples} if samples else {})}


def _escape_del(text: str) -> str:
    # JSON allows DEL as it is, but Perfetto 52 and 55 refuse a file that has it outside of the events.
    return text.replace("\x7f", "\\u007f")


def _pack_startup(startup: Startup, base_ns: int, sites: Sites) -> dict[str, Any]:
    process_ns, request = startup.process_ns, startup.request
    return {
        "session_ns": startup.session_ns - base_ns,
        "process_ns": None if process_ns is None else process_ns - base_ns,
        "imports": startup.imports and [make_json_value(astuple(entry)) for entry in startup.imports],
        "firsts": [_pack_first_call(call, base_ns, sites) for call in startup.firsts],
        **({"request": _pack_first_call(request, base_ns, sites), "why": startup.why} if request else {}),
    }


def _pack_first_call(call: FirstCall, base_ns: int, sites: Sites) -> list[int]:
    return [sites.find_or_add_index(call.site), call.start_ns - base_ns, call.total_ns]


def _pack_tally(tally: Tally, base_ns: int, sites: Sites) -> str:
    """Return the JSON of totals. A node is [parent or -1, site]. Times count from `base_ns`."""
    places = {site: sites.find_or_add_index(site) for site in tally.sites()}
    parents, site_of, sites_of_tree = tally.parents.tolist(), tally.site_of.tolist(), tally.tree.sites
    numbers: dict[int, int] = {-1: -1}
    nodes: list[tuple[int, int]] = []
    for node in np.unique(tally.lines["node"]).tolist():  # in their order, which calls that begin together follow
        path = []
        while node not in numbers:
            path.append(node)
            node = parents[node]
        for below in reversed(path):
            numbers[below] = len(nodes)
            nodes.append((numbers[parents[below]], places[sites_of_tree[site_of[below]]]))
    ends = np.cumsum(np.bincount(tally.buckets["line"], minlength=len(tally))).tolist()
    pairs = tally.buckets[["bucket", "times"]].tolist()
    lines, begin, rows = tally.lines.copy(), 0, []
    lines["first_ns"] -= base_ns
    for (node, thread_id, *sums), end in zip(lines[["node", "thread_id", *_SUMS]].tolist(), ends, strict=True):
        rows.append(encode([numbers[node], thread_id, *sums, [*chain.from_iterable(pairs[begin:end])]]))
        begin = end
    threads = encode(make_json_value(list(tally.threads.items())))
    return f'{{"threads":{threads},"nodes":{encode(nodes)},"rows":[\n' + ",\n".join(rows) + "]}"


# Read back


class Metadata:
    """Reads the metadata of a trace file, which is the value of the key `instrument`. Most facts are read on access."""

    def __init__(self, facts: dict[str, Any]) -> None:
        if facts["format"] != FORMAT:
            versions = f"its format is {facts['format']!r:.20}, and this version reads {FORMAT}"
            raise ValueError(f"{versions}; read it with the version of instrument that wrote it")
        self.base_ns: int = check_type(facts["base_ns"], int)
        self.sites = [read_site(entry) for entry in facts["sites"]]
        self._facts = facts
        add_gauges_of_file(check_type(facts.get("gauges", {}), dict))

    def make_trace(self, spans: Sequence[Span], samples: list[Sample]) -> Trace:
        """Return the trace with the given spans and samples. Adds a sample without a value for each unreported
        gauge."""
        facts = self._facts
        samples += [
            read_sample(self.base_ns, name, device, since_ns, None)
            for name, device, since_ns in facts.get("not_told", ())
        ]
        samples.sort(key=lambda s: (s.at_ns, s.device, s.name))
        kernels, allocations = self._read_torch_data()
        watched: Interval | None = None
        if "watched" in facts:
            first, last = (check_type(self.base_ns + check_type(at_ns, int), int) for at_ns in facts["watched"])
            watched = first, max(first, last)
        return replace(
            _read_process(facts),
            spans=spans,
            samples=tuple(samples),
            gpus=tuple(read_dataclass(Gpu, gpu) for gpu in facts.get("gpus", ())),
            kernels=kernels,
            allocations=allocations,
            watched=watched,
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
        if imports is not None:
            imports = tuple(ImportTime(check_type(package, str), *check_ints(sums)) for package, *sums in imports)
        if why not in FIRSTS:
            raise ValueError(f"it has {why!r:.40} for a reason, which does not exist; it is damaged")
        return Startup(
            session_ns=self.base_ns + check_type(facts["session_ns"], int),
            process_ns=None if process_ns is None else self.base_ns + check_type(process_ns, int),
            imports=imports,
            firsts=tuple(self._read_first_call(*first) for first in facts["firsts"]),
            request=self._read_first_call(*facts["request"]) if "request" in facts else None,
            why=why,
        )

    def _read_first_call(self, site: Any, since_ns: Any, total_ns: Any) -> FirstCall:
        return FirstCall(
            self.sites[check_index(site)], self.base_ns + check_type(since_ns, int), check_type(total_ns, int)
        )

    def _read_torch_data(self) -> tuple[Sequence[Kernel], Sequence[Allocation]]:
        texts = check_type(self._facts.pop("columns", {}), dict)
        if not texts:
            return (), Allocations.from_objects(())
        columns = {name: _read_column(*of_name) for name, of_name in texts.items()}
        names = [check_type(name, str) for name in self._facts["kernel_names"]]
        return unpack_kernels(columns, names, self.base_ns), unpack_allocations(columns, self.base_ns)

    def read_tally(self) -> Tally | None:
        saved = self._facts["tally"]
        if saved is None:
            return None
        paths: list[CallPath] = [()]
        links = 0
        for parent, site in saved["nodes"]:
            paths.append((*paths[_path_index_of_node(parent)], self.sites[check_index(site)]))
            links += len(paths[-1])
            if links > LIMIT_LINKS:
                raise ValueError("its call paths are too long; it is damaged")
        lines, of_line, buckets, times = list[Totals](), list[int](), list[int](), list[int]()
        for node, thread_id, *numbers, histogram in saved["rows"]:
            sums = dict(zip(_SUMS, check_ints(numbers), strict=True))
            sums["first_ns"] = check_type(sums["first_ns"] + self.base_ns, int)
            if sums["calls"] < 0:
                raise ValueError(f"a call path in it was called {sums['calls']} times; it is damaged")
            pairs = [*zip(map(check_index, histogram[::2]), map(check_index, histogram[1::2]), strict=True)]
            if any(bucket > LAST_BUCKET for bucket, _ in pairs):
                raise ValueError("a histogram in it has an unknown bucket; it is damaged")
            of_line += [len(lines)] * len(pairs)
            buckets += (bucket for bucket, _ in pairs)
            times += (calls for _, calls in pairs)
            lines.append(Totals(node=_path_index_of_node(node), thread_id=check_type(thread_id, int), **sums))
        histograms = make_buckets(*(np.array(column, np.int64) for column in (of_line, buckets, times)))
        return Tally.from_paths(paths, np.array(lines, TOTALS), histograms, _read_names(saved["threads"]))


def _path_index_of_node(node: Any) -> int:
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
        own_notes=read_own_notes(facts.get("own_notes", {})),
    )


def read_own_notes(facts: Mapping[str, Any]) -> OwnNotes:
    """Return a process's notes about rules that have no effect. Damaged facts raise an error."""
    waiting = tuple((check_type(mark, str), check_type(note, str)) for mark, note in facts.get("waiting", ()))
    at_work, uncalled = (
        tuple(check_type(text, str) for text in facts.get(name, ())) for name in ("at_work", "uncalled")
    )
    return OwnNotes(at_work, waiting, uncalled)


def _read_merged_process(facts: Any) -> MergedProcess:
    numbers = check_type(facts["numbers"], dict)
    moved_ns = check_type(facts["moved_ns"], int)
    windows = _read_pairs(facts["windows"])
    own_numbers: Any = {name: dict(_read_pairs(numbers[name])) for name in NUMBERS_OF_PROCESS}
    is_watched = check_type(facts["is_watched"], bool)
    samples = tuple(read_sample(0, name, HOST, at_ns, value) for name, at_ns, value in facts.get("samples", ()))
    if any(not -INT64 >> 2 < time_ns < INT64 >> 2 for time_ns in (moved_ns, *(sample.at_ns for sample in samples))):
        raise ValueError("it has a time out of range; it is damaged")
    of_process = replace(_read_process(facts), samples=samples)
    return MergedProcess(of_process, windows, **own_numbers, moved_ns=moved_ns, is_watched=is_watched)


def read_sample(base_ns: int, name: Any, device: Any, since_ns: Any, value: Any) -> Sample:
    """Return a gauge's sample at `since_ns` after `base_ns`. The value None means an unreported gauge."""
    value = None if value is None else check_type(value, float, int)
    return Sample(check_type(name, str), check_type(device, int), base_ns + check_type(since_ns, int), value)


def _read_pairs(rows: Any) -> list[tuple[int, int]]:
    return [(first, second) for first, second in map(check_ints, rows)]


def read_site(facts: dict[str, Any]) -> Site:
    pairs = tuple((check_type(key, str), convert_to_tuples(value)) for key, value in facts.get("attributes", ()))
    site: Site = read_dataclass(Site, facts, attributes=pairs)
    if site.kind not in KINDS:
        raise ValueError(f"a place in it is of the kind {site.kind!r:.40}, which does not exist; it is damaged")
    return site


def _read_names(pairs: Any) -> dict[int, str]:
    return {check_type(thread_id, int): check_type(name, str) for thread_id, name in pairs}
