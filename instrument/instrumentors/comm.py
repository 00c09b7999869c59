"""Record communication between processes by torch.distributed. Each call is a span of kind `comm`.

A synchronous collective is one span, such as `all_reduce`. An asynchronous collective has two spans: `all_reduce` for
the call, and `all_reduce.wait` for the wait. Its attribute `in_flight_ns` is the time from the call to the end of the
wait. Sends and receives always have both spans, because a call does not show if it is asynchronous. Methods of process
groups are replaced. The functions of `torch.distributed` are not, because compilers and torch compare them by identity.

A span has attributes for the operation, bytes (the larger of this rank's input and output), backend, group, rank and
world size. Its device time is the time that the calling stream waits.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from instrument.errors import error_name
from instrument.instrumentors.execution import exclude_from_compiler, get_compiling_test
from instrument.instrumentors.functions import Switch, replace
from instrument.instrumentors.verdict import Verdict
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.spans import AttributeValue, Site
from instrument.runtime.faults import FAULTS

MODULE = "torch.distributed.distributed_c10d"

OPERATIONS: Mapping[str, str] = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
    "_end_coalescing": "coalesced",
}
"""The name in `torch.distributed` of the operation of each method of process groups, in all versions of torch."""

PEERS = frozenset({"send", "recv"})

UNSEEN = (
    "what C++ starts by itself: the all-reduce of DistributedDataParallel's reducer within backward, functional "
    "collectives (DTensor, compiled regions), and what NCCL does on its own streams while nobody waits for it"
)


@dataclass(slots=True)
class _Issued:
    """A communication that has begun. `waits` is True if one span covers call and wait: it is synchronous."""

    site: Site
    wait_site: Site
    attributes: dict[str, AttributeValue]
    waits: bool
    start_ns: int
    pair: Any
    wait_ns: int = 0

    def __del__(self) -> None:
        if self.pair is not None:
            self.pair.cancel()


class Comm(Switch):
    """The instrumentor of `comm: auto`. `hits` counts calls by operation."""

    key = "comm"
    module = MODULE

    def __init__(self, rules: Sequence[str] = ("auto",), recorder: Recorder = RECORDER) -> None:
        super().__init__(rules, recorder)
        self.hits: Counter[str] = Counter()
        self._sites: dict[tuple[str, int, bool], tuple[Site, Site]] = {}
        self._issued: weakref.WeakKeyDictionary[Any, _Issued] = weakref.WeakKeyDictionary()
        self._why = "torch.distributed not imported"

    def attach_to(self, module: Any) -> None:
        """Replace the methods of process groups and of `Work`, after the import of torch.distributed."""
        if self._attached:
            return
        group, work = getattr(module, "ProcessGroup", None), getattr(module, "Work", None)
        if group is None or work is None:
            self._why = "this torch.distributed has no process groups"
            return
        self._attach()
        self._is_compiling = get_compiling_test(module.torch)
        around = [
            (group, name, self._wrap(getattr(group, name), partial(self._begin_call, operation), self._end_call))
            for name, operation in OPERATIONS.items()
            if hasattr(group, name)
        ]
        around.append((work, "wait", self._wrap(work.wait, self._begin_wait, self._end_wait)))
        functions = (*vars(Comm).values(), *vars(_Issued).values(), _try_call, _group_attributes, _measure_largest)
        exclude_from_compiler(module.torch, (*functions, *(wrapper for _, _, wrapper in around)))
        self._undos += [replace(owner, method, wrapper) for owner, method, wrapper in around]

    def undo(self) -> None:
        super().undo()
        self._issued.clear()

    def verdicts(self) -> list[Verdict]:
        """Return the verdicts on the recorded operations and on those that cannot be recorded."""
        if not self._met:
            return [Verdict("comm", "waiting", why=self._why)]
        if not self.hits:
            return [Verdict("comm", "waiting", why="no process group has been used")]
        calls = ", ".join(f"{count} {operation}" for operation, count in sorted(self.hits.items()))
        return [Verdict("comm", "attached", why=calls), Verdict("comm", "partly", "torch", f"not seen: {UNSEEN}")]

    # ---------------------------------------------------------------- calls

    def _wrap(self, method: Callable[..., Any], begin: Callable[..., _Issued | None], end: Callable[..., Any]) -> Any:
        """Wrap a method so that `begin` is called before each call, and `end` after it."""
        recorder, is_compiling = self._recorder, self._is_compiling

        @functools.wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not recorder.on:
                return method(*args, **kwargs)
            issued = _try_call(begin, args, kwargs)
            try:
                out = method(*args, **kwargs)
            except BaseException as error:
                _try_call(end, issued, None, error)
                raise
            _try_call(end, issued, out, None)
            return out

        return wrapper

    def _begin_call(self, operation: str, args: Any, kwargs: Any) -> _Issued:
        """Begin the communication of a call, with its site and attributes."""
        waits = any(getattr(argument, "asyncOp", None) is False for argument in (*args, *kwargs.values()))
        moved_bytes, on_device = _measure_largest(args[1:])
        attributes: dict[str, AttributeValue] = {"bytes": moved_bytes} if moved_bytes else {}
        if operation in PEERS and len(args) > 2 and isinstance(args[2], int):
            attributes["peer"] = args[2]
        site, wait_site = self._find_sites(operation, args[0], on_device)
        self.hits[operation] += 1
        pair = self._start_timer(site) if waits else None
        return _Issued(site, wait_site, attributes, waits, time.monotonic_ns(), pair)

    def _end_call(self, issued: _Issued | None, work: Any, error: BaseException | None) -> None:
        """Record a call that has returned, unless its span ends with the wait."""
        if issued is None:
            return
        may_wait = error is None and hasattr(work, "wait")
        if not (may_wait and issued.waits):
            self._record_span(issued, issued.start_ns, issued.attributes, error)
        if may_wait:
            self._issued[work] = issued

    def _begin_wait(self, args: Any, kwargs: Any) -> _Issued | None:
        """Begin the wait for a communication, and return it, None if it is unknown."""
        issued = self._issued.pop(args[0], None)
        if issued is not None:
            if not issued.waits:
                issued.pair = self._start_timer(issued.site)
            issued.wait_ns = time.monotonic_ns()
        return issued

    def _end_wait(self, issued: _Issued | None, out: Any, error: BaseException | None) -> None:
        """Record a wait that has ended: in one span with a synchronous call, or as a span of its own."""
        if issued is None:
            return
        if issued.waits:
            self._record_span(issued, issued.start_ns, issued.attributes, error)
            return
        issued.site = issued.wait_site
        self._record_span(issued, issued.wait_ns, {"in_flight_ns": time.monotonic_ns() - issued.start_ns}, error)

    def _record_span(
        self, issued: _Issued, start_ns: int, attributes: dict[str, AttributeValue], error: BaseException | None
    ) -> None:
        if error is not None:
            attributes = {**attributes, "error": error_name(error)}
        pair, issued.pair = issued.pair, None
        self._recorder.record(issued.site, start_ns, attributes or None, pair)

    def _start_timer(self, site: Site) -> Any:
        """Start a device timer on the current stream, None if device time is off."""
        begin = self._recorder.begin_device
        return begin(None, None, 0) if site.device and begin is not None else None

    # ---------------------------------------------------------------- sites

    def _find_sites(self, operation: str, group: Any, on_device: bool) -> tuple[Site, Site]:
        """Return the sites of an operation in a process group: of its calls, and of its waits."""
        key = operation, id(group), on_device
        sites = self._sites.get(key)
        if sites is None:
            weakref.finalize(group, self._sites.pop, key, None)
            facts = _group_attributes(group)
            instance = " ".join(str(fact) for _, fact in facts[:2])
            call = Site(
                operation,
                "comm",
                "torch.distributed",
                operation,
                "",
                0,
                instance,
                on_device,
                (("op", operation), *facts),
            )
            wait = dataclasses.replace(call, name=f"{operation}.wait", qualname="Work.wait")
            # Two threads may be first: setdefault keeps one site per key, or the tally would split.
            sites = self._sites.setdefault(key, (call, wait))
        return sites


def _try_call(call: Callable[..., _Issued | None], *arguments: Any) -> _Issued | None:
    """Call a function of this module. If it raises, count the fault and return None."""
    try:
        return call(*arguments)
    except Exception as fault:
        FAULTS.note("communication probe", fault)
        return None


def _group_attributes(group: Any) -> tuple[tuple[str, AttributeValue], ...]:
    """Return the attributes of a process group's spans, without the addresses of its processes."""
    name = getattr(group, "group_desc", None) or getattr(group, "group_name", None)
    return (
        ("backend", str(group.name())),
        ("group", str(name or "group").replace("undefined", "group")),
        ("rank", int(group.rank())),
        ("world_size", int(group.size())),
    )


def _measure_largest(arguments: Sequence[Any]) -> tuple[int, bool]:
    """Return the bytes of the tensors in the largest argument, and True if any tensor is on a device."""
    most, on_device = 0, False
    for argument in arguments:
        size, waiting = 0, [argument]
        while waiting:
            thing = waiting.pop()
            if isinstance(thing, (list, tuple)):
                waiting.extend(thing)
            elif hasattr(thing, "element_size"):
                size += int(thing.numel() * thing.element_size())
                on_device = on_device or thing.device.type != "cpu"
        most = max(most, size)
    return most, on_device
