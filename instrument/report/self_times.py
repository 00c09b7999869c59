"""The `classes`, `ops` and `instances` views: where the time went itself, in parts that add up to all of it.

They are the Class, Ops and Apply sections of Theano's profile. The nodes that Theano times lie in no other one; spans
do, so that a row's time here is self time: host time outside of the children on its thread and task. So the rows of a
function add up to 100 %, the function's own row with what no child did.

- `instances`: a site at one place of the call tree. `number` counts them by first call, from 0, as Theano counts nodes.
- `ops`: a site, at all of its places: a function, a layer by its path in the model, a kind of copy.
- `classes`: the type of a layer, the class that a method is of (of the kinds `op` and `comm`), the name of a copy or a
  loader, and for all else the kind in brackets.

Each function has a report: the topmost request of a call path or, outside of requests, its topmost span. Before them
comes the sum over functions, if there are several, in which a function inside of another one is not counted again.
Numbers are of the tally, so of all calls; threads are merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from instrument.report.table import (
    LINE,
    MISSING,
    in_unit,
    named_table,
    percent,
    safe,
    section_title,
    share,
    shorten,
    tenths,
    title,
)
from instrument.report.view import Options, Recording, SortKey
from instrument.spans import Site
from instrument.tally import Row, Totals

WORK = ("op", "layer", "comm", "copy")
"""Kinds of span that are work, in place of Theano's thunks."""

WITH_CLASS = ("op", "layer", "comm")
"""Kinds of span whose code tells their class; a scope's code is that of whoever opened it."""


@dataclass(frozen=True, slots=True)
class SelfRow:
    """One class, op or instance of a function. `time_ns` is self time, `running` adds up the ratios down to this row.

    `names` are those of the spans around an instance, inside of its function, and its own last; else the row's own.
    `where` it runs: `host`, `device` where every place of it has device time, or `both`. A `number` is only of an
    instance.
    """

    names: tuple[str, ...]
    time_ns: int
    ratio: float | None
    running: float | None
    where: str
    calls: int
    instances: int
    number: int | None

    @property
    def per_call_ns(self) -> float | None:
        """Self time of a call."""
        return share(self.time_ns, self.calls)


@dataclass(frozen=True, slots=True)
class Remaining:
    """What the rows that were left out add up to."""

    rows: int
    time_ns: int
    ratio: float | None
    calls: int
    instances: int


@dataclass(frozen=True, slots=True)
class FunctionTimes:
    """A function, or the sum over all where `name` is empty: its calls, what is in them, and its rows.

    `calls` took `outer_ns`. `inner_ns` of that was in spans inside, on its own thread and task. `work_ns` is the self
    time of operators, layers, copies and communication below it, on whatever thread. Ratios of rows are of `time_ns`,
    the self times of all of them.
    """

    name: str
    kind: str
    calls: int
    outer_ns: int
    inner_ns: int
    work_ns: int
    time_ns: int
    rows: tuple[SelfRow, ...]
    remaining: Remaining | None

    @property
    def inner_ratio(self) -> float | None:
        """Of the calls."""
        return share(self.inner_ns, self.outer_ns)

    @property
    def work_ratio(self) -> float | None:
        """Of the calls; more than 1 where work went on side by side."""
        return share(self.work_ns, self.outer_ns)


@dataclass(frozen=True, slots=True)
class SelfTimes:
    """The view: the sum over functions, if there are several, and each function that calls something, longest first.

    The `remaining` functions that have no report of their own have `remaining_ns` of self time.
    """

    of: str
    functions: tuple[FunctionTimes, ...]
    remaining: int
    remaining_ns: int
    corrected: bool
    _options: Options = field(repr=False)

    def lines(self) -> list[str]:
        """The text."""
        lines = title(f"{self.of.capitalize()} Report")
        if not self.functions:
            return [*lines, "No call was counted: name functions or layers in the profile, or open a scope."]
        less = ", less what the probes of the spans below cost" if self.corrected else ""
        lines += [
            f"Time unit: {self._options.unit}; times are self times{less}",
            "Time%: of the self times of all rows of the function, which add up to 100%",
            "",
        ]
        for function in self.functions:
            lines += self._function_lines(function)
        if self.remaining:
            time = in_unit(self.remaining_ns, self._options.unit)
            lines += [
                f"... (remaining {self.remaining} functions account for {time}; all of it is in the sum above)",
                "",
            ]
        if any(row.where != "host" for function in self.functions for row in function.rows):
            lines.append("On device: the host's part, in which work was launched that the device does on its own time.")
        return lines

    def _function_lines(self, function: FunctionTimes) -> list[str]:
        unit = self._options.unit
        name = safe(function.name) or ("(no name)" if function.kind else "")
        lines = section_title(shorten(name, 25) or "All functions")
        called = f" to {shorten(name, LINE // 2)} ({function.kind})" if function.kind else ""
        outer, inner, work = (in_unit(ns, unit) for ns in (function.outer_ns, function.inner_ns, function.work_ns))
        lines.append(f"Time in {function.calls} call{'s' * (function.calls != 1)}{called}: {outer}")
        if function.inner_ns or function.work_ns:
            lines += [
                f"Time in spans inside: {inner} ({percent(function.inner_ns, function.outer_ns)} of the calls)",
                f"Time in ops, layers, copies and communication: {work} "
                f"({percent(function.work_ns, function.outer_ns)} of the calls)",
            ]
        if function.work_ns > function.outer_ns:
            lines.append("(work on several threads is summed, so it may exceed the calls)")
        last = "Id" if self.of == "instances" else "Instances"
        header = [_SINGULAR[self.of].capitalize(), "Time%", "Sum%", "Time", "Per call", "On", "Calls", last]
        cells = [
            [
                " > ".join(row.names),
                tenths(row.ratio, 1),
                tenths(row.running, 1),
                in_unit(row.time_ns, unit),
                in_unit(row.per_call_ns, unit),
                row.where,
                str(row.calls),
                str(row.instances if row.number is None else row.number),
            ]
            for row in function.rows
        ]
        lines += ["", *named_table(header, cells, 7)]
        rest = function.remaining
        if rest is not None:
            ratio = MISSING if rest.ratio is None else f"{100 * rest.ratio:.2f}%"
            lines.append(
                f"... (remaining {rest.rows} {self.of} account for {ratio} ({in_unit(rest.time_ns, unit)}) of the time,"
                f" {rest.calls} calls)"
            )
        return [*lines, ""]


_SINGULAR = {"classes": "class", "ops": "op", "instances": "instance"}


def classes(recording: Recording, options: Options) -> SelfTimes:
    """Self times by type of layer, class of a method, or kind.

    `rows` bounds the functions and the rows of each. `sorted_by` takes calls and averages, else time. `tracer_option`,
    `state`, `threads` and `skip_first` mean nothing to it.
    """
    return _self_times("classes", recording, options)


def ops(recording: Recording, options: Options) -> SelfTimes:
    """Self times by site. Options as for `classes`."""
    return _self_times("ops", recording, options)


def instances(recording: Recording, options: Options) -> SelfTimes:
    """Self times by place in the call tree. Options as for `classes`."""
    return _self_times("instances", recording, options)


def class_of(site: Site) -> str:
    """The type of a layer, the class of a method, the name of a copy or loader, else the kind in brackets."""
    owner = site.qualname.rpartition(".")[0]
    if site.kind in WITH_CLASS and owner and not owner.endswith("<locals>"):
        return f"{site.module}.{owner}" if site.module else owner
    return site.name if site.kind in ("layer", "copy", "loader") or site.instance else f"({site.kind})"


Key = tuple[object, ...]


@dataclass(slots=True)
class _Place:
    """One place of the call tree over all threads: its path, also as the numbers of sites, and where in that the
    function is that it belongs to."""

    path: tuple[Site, ...]
    at: tuple[int, ...]
    function: int
    totals: Totals
    number: int = 0

    @property
    def is_function(self) -> bool:
        return self.function == len(self.path) - 1


def _self_times(of: str, recording: Recording, options: Options) -> SelfTimes:
    tally = recording.tally.corrected() if options.corrected else recording.merged
    places = _places(tally.rows())
    by_function: dict[Key, list[_Place]] = {}
    for place in places:
        by_function.setdefault(place.path[place.function].key, []).append(place)
    names = _names(site for place in places for site in place.path)
    ordered = sorted(by_function.values(), key=lambda its: -sum(place.totals.self_ns for place in its))
    shown = [its for its in ordered if len(its) > 1 or len(ordered) == 1][: options.rows]
    functions = [_function(its, of, names, options) for its in shown]
    if len(ordered) > 1:
        functions.insert(0, _function(places, of, names, options, together=True))
    shown_ids = set(map(id, shown))
    left = [place.totals.self_ns for its in ordered if id(its) not in shown_ids for place in its]
    return SelfTimes(of, tuple(functions), len(ordered) - len(shown), sum(left), options.corrected, options)


def _places(rows: Iterable[Row]) -> list[_Place]:
    """Places with calls, threads merged, numbered by first call. Sites of several processes are the same by key."""
    known: dict[Key, int] = {}
    numbers: dict[Site, int] = {}
    found: dict[tuple[int, ...], _Place] = {}
    summed: set[tuple[int, ...]] = set()
    # Of each path the numbers of its sites, and where its request is, -1 for none.
    paths: dict[tuple[Site, ...], tuple[tuple[int, ...], int]] = {(): ((), -1)}
    for row in rows:
        path, totals = row.path, row.totals
        if not path or not totals.calls:
            continue
        if path not in paths:
            upper = path[:-1]
            while upper not in paths:
                upper = upper[:-1]
            at, request = paths[upper]
            for site in path[len(upper) :]:
                number = numbers.get(site)
                if number is None:
                    number = numbers[site] = known.setdefault(site.key, len(known))
                if request < 0 and site.kind == "request":
                    request = len(at)
                at = (*at, number)
            paths[path] = at, request
        at, request = paths[path]
        place = found.get(at)
        if place is None:
            found[at] = _Place(path, at, max(request, 0), totals)
            continue
        if at not in summed:
            summed.add(at)
            place.totals = place.totals.copy()
        place.totals.merge(totals)
    places = sorted(found.values(), key=lambda place: place.totals.first_ns)
    for number, place in enumerate(places):
        place.number = number
    return places


def _names(sites: Iterable[Site]) -> dict[Key, str]:
    """What to call each site: its name and instance, and where it is if another one is called the same."""
    names: dict[Key, str] = {}
    called: dict[str, list[Site]] = {}
    for site in {site.key: site for site in dict.fromkeys(sites)}.values():
        called.setdefault(f"{site.name} [{site.instance}]" if site.instance else site.name, []).append(site)
    for name, same in called.items():
        for site in same:
            place = site.function or (f"{site.file}:{site.line}" if site.file else site.kind)
            names[site.key] = name if len(same) == 1 else f"{name} ({place})"
    return names


def _function(
    places: Sequence[_Place], of: str, names: Mapping[Key, str], options: Options, *, together: bool = False
) -> FunctionTimes:
    counted = {place.at for place in places}
    own = [place for place in places if place.is_function and (len(place.at) == 1 or place.at[:1] not in counted)]
    outer_ns = sum(place.totals.total_ns for place in own)
    own_ids = set(map(id, own))
    site = places[0].path[places[0].function]
    time_ns = sum(place.totals.self_ns for place in places)
    rows, remaining = _rows(places, of, names, options, together=together)
    return FunctionTimes(
        name="" if together else names[site.key],
        kind="" if together else site.kind,
        calls=sum(place.totals.calls for place in own),
        outer_ns=outer_ns,
        inner_ns=outer_ns - sum(place.totals.self_ns for place in own),
        work_ns=sum(p.totals.self_ns for p in places if p.path[-1].kind in WORK and id(p) not in own_ids),
        time_ns=time_ns,
        rows=rows,
        remaining=remaining,
    )


def _rows(
    places: Sequence[_Place], of: str, names: Mapping[Key, str], options: Options, *, together: bool
) -> tuple[tuple[SelfRow, ...], Remaining | None]:
    """The rows in order, as many as are asked for, and what the others add up to if there are any."""
    column = SortKey.of(options).column
    base_ns = sum(place.totals.self_ns for place in places)
    groups: dict[Key, list[_Place]] = {}
    keys: dict[Site, Key] = {}
    for place in places:
        if of == "instances":
            groups[place.number,] = [place]
            continue
        site = place.path[-1]
        key = keys.get(site)
        if key is None:
            key = keys[site] = (class_of(site),) if of == "classes" else site.key
        groups.setdefault(key, []).append(place)
    found = []
    for group in groups.values():
        time_ns, calls = (sum(part) for part in zip(*((p.totals.self_ns, p.totals.calls) for p in group), strict=True))
        weight = {"calls": calls, "ave": share(time_ns, calls) or 0}.get(column, time_ns)
        order = (-weight, -time_ns, -calls, -len(group), -group[0].number)
        found.append((order, time_ns, calls, group))
    found.sort(key=itemgetter(0))
    shown: list[SelfRow] = []
    left: list[tuple[int, int, int]] = []
    sum_ns = 0
    for _, time_ns, calls, group in found:
        if time_ns < options.least_ns or len(shown) == options.rows:
            left.append((time_ns, calls, len(group)))
            continue
        sum_ns += time_ns
        path = group[0].path
        on_device = {place.totals.device_ns > 0 for place in group}
        inside = 0 if together else group[0].function + 1
        called = [names[site.key] for site in (path[inside:] if of == "instances" else ()) or path[-1:]]
        shown.append(
            SelfRow(
                names=(class_of(path[-1]),) if of == "classes" else tuple(called),
                time_ns=time_ns,
                ratio=share(time_ns, base_ns),
                running=share(sum_ns, base_ns),
                where="both" if len(on_device) > 1 else "device" if on_device == {True} else "host",
                calls=calls,
                instances=len(group),
                number=group[0].number if of == "instances" else None,
            )
        )
    if not left:
        return tuple(shown), None
    time_ns, calls, count = map(sum, zip(*left, strict=True))
    return tuple(shown), Remaining(len(left), time_ns, share(time_ns, base_ns), calls, count)
