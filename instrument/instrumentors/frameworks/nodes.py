"""Nodes of ONNX models: what ONNX Runtime's own profile of a session tells, as children of the runs.

The profile can only be asked for when a session is made, ended once, and read when it has ended: at the end of the
first window, of our session, or after `RUNS_LIMIT` runs. It makes the runs of a small model five times slower, so it is
kept for hunting. Nodes stand in trace files alone, not in the summary's totals, for they are measured by another.

Its times are whole microseconds of the wall clock (ONNX Runtime calls it comparable to the monotonic one, which on
Linux it is not; found out for each profile). They are placed on ours by readings of both clocks around the session's
making and at the profile's end; each node bears how far off that may be.
"""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import tempfile
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import FunctionType, ModuleType
from typing import Any

from instrument import clock
from instrument.instrumentors.frameworks.entries import missing
from instrument.instrumentors.functions import Undo, replace, undo_all
from instrument.instrumentors.holders import namespace
from instrument.instrumentors.verdict import Verdict
from instrument.profile.model import FrameworkRule
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.spans import Interval, Site, Span, covered_ns
from instrument.runtime.faults import FAULTS
from instrument.runtime.threads import Thread
from instrument.runtime.unpatched import RLock

MODULE = "onnxruntime.capi.onnxruntime_inference_collection"
RUNS = ("run", "run_with_ort_values", "run_with_iobinding", "run_with_ortvaluevector")
"""The methods that run a model on the calling thread."""

RUNS_LIMIT = 100
"""Runs of a session after which its profile ends: one node takes some 1.7 kB of memory until then."""

NODES_LIMIT = 200_000
"""The most nodes that are kept."""

GRAIN_NS = 1_000
"""What times in whole microseconds leave open."""

_SUFFIX = "_kernel_time"
_FIRST_ID = 1 << 62
"""Ids of nodes begin where no recorder's ids come."""


def instance_of(session: Any) -> str:
    """The name of the file that a session's model was loaded from."""
    path = getattr(session, "_model_path", None)
    return PurePath(path).name if path else "(bytes)"


@dataclass(slots=True)
class _Profile:
    """The profile of one session: where it is written, and what both clocks read when it began."""

    session: weakref.ref[Any]
    instance: str
    prefix: Path
    start_ns: int
    before: tuple[int, int]
    after: tuple[int, int]
    runs: int = 0


@dataclass(slots=True)
class _Node:
    """One execution of a node on the monotonic clock."""

    site: Site
    span_id: int
    thread_id: int
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class _Run:
    """One run of a session as its profile tells it, and the nodes in it."""

    instance: str
    thread_id: int
    start_ns: int
    end_ns: int
    uncertainty_ns: int
    nodes: list[_Node] = field(default_factory=list)


class Nodes:
    """The profiles of ONNX Runtime's sessions of one session of ours, and the spans that come of them."""

    def __init__(self, rule: FrameworkRule, recorder: Recorder = RECORDER) -> None:
        self.rule = rule
        self._recorder = recorder
        self._profiles: dict[int, _Profile] = {}
        self._runs: list[_Run] = []
        self._kept = 0
        self._read = 0
        self._complaints: dict[str, Verdict] = {}
        self._sites: dict[tuple[str, str, str], Site] = {}
        self._ids = itertools.count(_FIRST_ID)
        self._folder: Path | None = None
        self._imported = False
        self._ending: list[Thread] = []
        self._lock = RLock()
        self._undos: list[Undo] = []
        self._end_profiling: Callable[[Any], str] | None = None

    def wants(self, module_name: str) -> bool:
        """Whether sessions are defined in that module."""
        return module_name == MODULE

    def imported(self, module: ModuleType) -> bool:
        """Profile the sessions that are made from now on."""
        self._imported = True
        session = namespace(module).get("InferenceSession")
        native: Any = namespace(module).get("C")
        options_type = getattr(native, "SessionOptions", None)
        bases = session.__mro__ if isinstance(session, type) else ()
        ending = next((base for base in bases if "end_profiling" in vars(base)), None)
        if ending is None or options_type is None or not isinstance(vars(session).get("__init__"), FunctionType):
            self._complain("Session.end_profiling", missing(self.rule, "Session.end_profiling").why)
            return False
        self._end_profiling = vars(ending)["end_profiling"]
        self._undos.append(replace(session, "__init__", self._wrap_init(vars(session)["__init__"], options_type)))
        self._undos.append(replace(ending, "end_profiling", self._wrap_end(vars(ending)["end_profiling"])))
        for name in RUNS:
            owner = next((base for base in bases if name in vars(base)), None)
            if owner is not None:
                self._undos.append(replace(owner, name, self._wrap_run(vars(owner)[name])))
        return False

    def undo(self) -> None:
        """End every profile, read it, and give ONNX Runtime its own methods back."""
        undo_all(self._undos)
        self.finish()
        for thread in self._ending:
            thread.join()
        self._ending.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def after_fork_in_child(self) -> None:
        """Forget the parent's profiles, which it goes on to write."""
        self._lock = RLock()
        self._profiles.clear()
        self._runs.clear()
        self._ending.clear()
        self._folder = None

    def verdicts(self) -> list[Verdict]:
        """How many nodes were timed, and what is in the way of others."""
        if not self._imported:
            return []  # the entry points say so
        with self._lock:
            verdicts = list(self._complaints.values())
            open_ = sorted({profile.instance for profile in self._profiles.values()})
            if self._read:
                verdicts.append(Verdict(self.rule.text, "attached", "nodes", f"{self._read} executions timed"))
            if open_:
                why = f"{', '.join(open_)}: they come when the window or session ends"
                verdicts.append(Verdict(self.rule.text, "waiting", "nodes", why))
            elif not self._read and not self._complaints:
                verdicts.append(Verdict(self.rule.text, "waiting", "nodes", "no session was made since the start"))
        return verdicts

    def _complain(self, target: str, why: str, state: str = "unreachable") -> None:
        self._complaints[f"{target} {why}"] = Verdict(self.rule.text, state, target, why)

    # ---------------------------------------------------------------- sessions

    def _wrap_init(self, init: FunctionType, options_type: Callable[[], Any]) -> Any:
        @functools.wraps(init)
        def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> None:
            # One at a time: several sessions may be made with the same options, which are changed meanwhile.
            with making:
                prepared = probe._prepare(args, kwargs, options_type)
                if prepared is None:
                    init(self, *args, **kwargs)
                    return
                args, kwargs, restore, prefix = prepared
                before = clock.pair()
                try:
                    init(self, *args, **kwargs)
                finally:
                    restore()
                probe._opened(self, prefix, before)

        probe, making = self, RLock()
        return wrapper

    def _prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], options_type: Callable[[], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Callable[[], None], Path] | None:
        """Arguments that ask for a profile, the way back for the host's own options, and where it will be written."""
        try:
            options = kwargs.get("sess_options", args[1] if len(args) > 1 else None)
            if not self._recorder.on:
                return None
            if options is None:
                options = options_type()
                if len(args) > 1:
                    args = (args[0], options, *args[2:])
                else:
                    kwargs = {**kwargs, "sess_options": options}
            elif options.enable_profiling:
                self._complain("nodes", "a session is profiled by the service itself: its nodes are in that file")
                return None
            prefix_before, prefix = options.profile_file_prefix, self._prefix()
            options.enable_profiling, options.profile_file_prefix = True, str(prefix)

            def restore() -> None:
                options.enable_profiling, options.profile_file_prefix = False, prefix_before

            return args, kwargs, restore, prefix
        except Exception as fault:
            FAULTS.note("profile of an ONNX session", fault)
            return None

    def _prefix(self) -> Path:
        with self._lock:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="instrument-onnx-"))
            return self._folder / f"{next(self._ids)}-"

    def _opened(self, session: Any, prefix: Path, before: tuple[int, int]) -> None:
        try:
            start_ns = int(session.get_profiling_start_time_ns())
            ref = weakref.ref(session)
            made = _Profile(ref, instance_of(session), prefix, start_ns, before, clock.pair())
            with self._lock:
                self._profiles[id(session)] = made
        except Exception as fault:
            FAULTS.note("profile of an ONNX session", fault)

    def _wrap_end(self, end_profiling: FunctionType) -> Any:
        @functools.wraps(end_profiling)
        def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            profile = profiles.get(id(self))
            if profile is not None and profile.session() is self:
                return ""  # as of a session without a profile, which it is for the host
            return end_profiling(self, *args, **kwargs)

        profiles = self._profiles
        return wrapper

    def _wrap_run(self, method: Any) -> Any:
        @functools.wraps(method)
        def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            finally:
                profile = profiles.get(id(self))
                if profile is not None:
                    profile.runs += 1
                    if profile.runs == RUNS_LIMIT:
                        probe._end_soon(id(self))

        profiles, probe = self._profiles, self
        return wrapper

    def _end_soon(self, key: int) -> None:
        """End a profile on a thread of ours: writing it takes 4 ms for a thousand nodes."""
        thread = Thread(lambda: self._finish_one(key), "instrument-onnxruntime")
        try:
            thread.start()
            self._ending.append(thread)
        except RuntimeError:
            pass  # the interpreter is ending, and with it the session

    # ---------------------------------------------------------------- reading

    def finish(self) -> None:
        """End every profile that is open, and read it."""
        for key in list(self._profiles):
            self._finish_one(key)

    def _finish_one(self, key: int) -> None:
        with self._lock:
            profile = self._profiles.pop(key, None)
            if profile is None:
                return
            try:
                session = profile.session()
                if session is not None and self._end_profiling is not None:
                    self._end_profiling(session)
                for path in profile.prefix.parent.glob(profile.prefix.name + "*"):
                    self._take(profile, _events(path))
                    path.unlink()
            except Exception as fault:
                FAULTS.note("profile of an ONNX session", fault)

    def _take(self, profile: _Profile, events: Iterable[dict[str, Any]]) -> None:
        placed = _place(profile, clock.pair())
        if placed is None:
            why = f"the profile of {profile.instance} began at a time that neither clock had then"
            self._complain("nodes", why)
            return
        zero_ns, uncertainty_ns = placed
        runs: list[_Run] = []
        nodes: list[_Node] = []
        for event in events:
            start_ns = zero_ns + int(event["ts"]) * 1_000
            end_ns = start_ns + int(event["dur"]) * 1_000
            if event["name"] == "model_run":
                runs.append(_Run(profile.instance, int(event["tid"]), start_ns, end_ns, uncertainty_ns))
            elif self._kept < NODES_LIMIT:
                self._kept += 1
                site = self._site(event)
                nodes.append(_Node(site, next(self._ids), int(event["tid"]), start_ns, end_ns))
            else:
                self._complain("nodes", f"those beyond {NODES_LIMIT} are not kept", "partly")
        self._read += len(nodes)
        lost = _distribute(nodes, runs)
        if lost:
            why = f"{lost} executions of {profile.instance} lie in no run, or in several at once"
            self._complain("nodes", why, "partly")
        self._runs.extend(runs)

    def _site(self, event: dict[str, Any]) -> Site:
        args = event.get("args") or {}
        name = str(event["name"]).removesuffix(_SUFFIX)
        key = (str(args.get("op_name") or name), name, str(args.get("provider") or ""))
        site = self._sites.get(key)
        if site is None:
            facts = (("provider", key[2]),) if key[2] else ()
            site = self._sites[key] = Site(key[0], kind="op", instance=key[1], attributes=facts)
        return site

    @property
    def has_runs(self) -> bool:
        """Whether there are nodes that may lie within spans."""
        return bool(self._runs)

    def within(self, spans: Sequence[Span]) -> list[Span]:
        """The nodes inside those of the spans that are runs, as their children; the runs' self times leave them out.

        A run that was not recorded, or is not among the spans, takes its nodes with it.
        """
        found: list[Span] = []
        parents: dict[tuple[int, str], list[Span]] = {}
        for span in sorted(spans, key=lambda span: span.start_ns):
            if span.site.module == MODULE and span.site.name.rpartition(".")[2] in RUNS:
                parents.setdefault((span.thread_id, span.site.instance), []).append(span)
        for run in list(self._runs):
            parent = _parent(parents.get((run.thread_id, run.instance), []), run)
            if parent is not None:
                found.extend(_children(parent, run))
        return found


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """The runs and nodes of a profile. Line by line, one event on each: reading it all at once would hold the GIL."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            text = line.strip().lstrip("[").rstrip(",]")
            if "model_run" in text or _SUFFIX in text:
                event = json.loads(text)
                if event.get("name") == "model_run" or str(event.get("name")).endswith(_SUFFIX):
                    yield event


def _place(profile: _Profile, now: tuple[int, int]) -> tuple[int, int] | None:
    """Where a profile's zero is on the monotonic clock, and how far off that may be; None where it cannot be told."""
    begun = [which for which in (0, 1) if profile.before[which] <= profile.start_ns <= profile.after[which]]
    if not begun:
        return None
    if begun == [0]:  # on the monotonic clock already
        return profile.start_ns, GRAIN_NS
    offset_ns = profile.after[0] - profile.after[1]
    drift_ns = abs((now[0] - now[1]) - offset_ns)  # the wall clock may have been set meanwhile
    return profile.start_ns + offset_ns, GRAIN_NS + drift_ns


def _distribute(nodes: Iterable[_Node], runs: Sequence[_Run]) -> int:
    """Give each node to the run that it lies in, on its own thread or, of a parallel executor, on another's.

    Returns how many have none, or more than one.
    """
    lost = 0
    ordered = sorted(runs, key=lambda run: run.start_ns)
    starts = [run.start_ns for run in ordered]
    longest_ns = max((run.end_ns - run.start_ns for run in runs), default=0)
    for node in nodes:
        holding = []
        index = bisect_right(starts, node.start_ns) - 1
        while index >= 0 and starts[index] >= node.start_ns - longest_ns - GRAIN_NS:
            if node.end_ns <= ordered[index].end_ns + GRAIN_NS:
                holding.append(ordered[index])
            index -= 1
        own = [run for run in holding if run.thread_id == node.thread_id] or holding
        if len(own) == 1:
            own[0].nodes.append(node)
        else:
            lost += 1
    return lost


def _parent(ordered: Sequence[Span], run: _Run) -> Span | None:
    """The span of a run: the one that was open in its middle or, cut by a window's edge, at one of its ends."""
    middle_ns = (run.start_ns + run.end_ns) // 2
    index = bisect_right(ordered, middle_ns, key=lambda span: span.start_ns)
    for span in ordered[max(index - 1, 0) : index + 1]:
        cut = span.clipped and span.start_ns < run.end_ns and run.start_ns < span.end_ns
        if cut or span.start_ns <= middle_ns <= span.end_ns:
            return span
    return None


def _children(parent: Span, run: _Run) -> list[Span]:
    """The nodes of a run as spans below its own; those of a subgraph below the node that runs it."""
    made: list[Span] = []
    below: dict[int, list[Interval]] = {}  # of a span's own thread, by its id
    open_: dict[int, list[Span]] = {}
    for node in sorted(run.nodes, key=lambda node: (node.start_ns, -node.end_ns)):
        if parent.clipped and (node.end_ns <= parent.start_ns or node.start_ns >= parent.end_ns):
            continue
        start_ns = min(max(node.start_ns, parent.start_ns), parent.end_ns)
        end_ns = min(max(node.end_ns, start_ns), parent.end_ns)
        above = open_.setdefault(node.thread_id, [])
        while above and above[-1].end_ns < end_ns:
            above.pop()
        span = Span(
            site=node.site,
            span_id=node.span_id,
            parent_id=above[-1].span_id if above else parent.span_id,
            root_id=parent.root_id,
            thread_id=node.thread_id,
            task_id=parent.task_id if node.thread_id == parent.thread_id else 0,
            start_ns=start_ns,
            end_ns=end_ns,
            active_ns=end_ns - start_ns,
            self_ns=end_ns - start_ns,
            attributes={"uncertainty_ns": run.uncertainty_ns},
            clipped=parent.clipped,
        )
        if above or node.thread_id == parent.thread_id:
            below.setdefault(span.parent_id, []).append((start_ns, end_ns))
        above.append(span)
        made.append(span)
    for span in (*made, parent):
        span.self_ns = max(span.self_ns - covered_ns(below.get(span.span_id, ())), 0)
    return made
