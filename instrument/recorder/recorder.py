"""The recorder of a process, `RECORDER`, which wraps functions and opens scopes so that their spans are recorded.

The hot path is in C (`native/_recorder.c`). Without the C module, nothing is recorded.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from instrument import native
from instrument.errors import TargetError
from instrument.profile.model import KINDS, PHASES, Limits
from instrument.recorder import attribute_checks, core, wrapping
from instrument.recorder.core import Readback
from instrument.recorder.wrapping import ANSWERS
from instrument.recording.memory_layout import GOODBYE, HEADER, OFF, RUNNING, STREAM
from instrument.recording.paths import OVERFLOW, CallTree
from instrument.recording.spans import KEY, KEY_LIMIT, AttributeValue, Site
from instrument.recording.trace_context import (
    REMOTE,
    encode_parent,
    find_trace_headers,
    make_link_attributes,
    parse_parent,
)
from instrument.runtime.faults import FAULTS
from instrument.runtime.lazy_imports import LazyModule
from instrument.runtime.threads import own_thread_name
from instrument.runtime.unpatched import RLock

if TYPE_CHECKING:
    from instrument.recording import memory
else:
    memory = LazyModule("instrument.recording.memory")

_awaited: Callable[[], object] | None = None


def call_at_first_span(action: Callable[[], object] | None) -> None:
    """Call `action` once, on the next thread that records its first span. None cancels the call. The action runs within
    a call of the service, perhaps under a lock, so it must not wait."""
    global _awaited
    _awaited = action


def thread_name() -> str:
    """Return the name of this thread. The recorder in C calls this at the first span of a thread."""
    global _awaited
    action, _awaited = _awaited, None
    if action is not None:
        FAULTS.attempt("first span", action)
    ours = own_thread_name()
    if ours is not None:
        return ours
    # Not current_thread(), which leaves a dummy behind for threads that Python did not start.
    thread = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
    native_id = threading.get_native_id()
    if thread is None and native_id == os.getpid():
        thread = threading.main_thread()  # a greenlet of it
    return thread.name if thread is not None else f"thread {native_id}"


_native: Any = native.MODULE


_running_loop: Callable[[], Any] | None = None
_current_task: Callable[[Any], Any] | None = None


def find_asyncio_functions() -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Return asyncio's functions for the running loop and the current task. Return None if asyncio is not imported
    yet."""
    global _running_loop, _current_task
    if _running_loop is None:
        asyncio = sys.modules.get("asyncio")  # never imported by us
        tasks, events = getattr(asyncio, "tasks", None), getattr(asyncio, "events", None)
        if tasks is None or events is None or not hasattr(tasks, "current_task"):
            return None  # asyncio is being imported right now
        # Up to 3.11 current_task is a Python function around this dict; reading the dict halves the cost.
        _current_task = tasks._current_tasks.get if sys.version_info < (3, 12) else tasks.current_task
        _running_loop = events._get_running_loop
    return _running_loop, _current_task  # type: ignore[return-value]


def header_values(headers: Iterable[tuple[bytes, bytes]], names: tuple[bytes, ...]) -> tuple[bytes | None, ...]:
    """Return the value of each header in `names`: None for a missing header, the last value of a repeated header."""
    values: tuple[bytes | None, ...] = _native.header_values(headers, names)
    return values


Function = TypeVar("Function", bound=Callable[..., Any])

SCOPE_NAME_LIMIT = 4_096
OPEN_SCOPE_LIMIT = 10_000
RING_BYTES = Limits().ring_bytes
LEAST_MEMORY_BYTES = 64 << 20
"""The minimum bytes of memory for all rings."""

MANUAL = 2
"""The core's flag for a span that only an explicit call may close."""

STEP = "step"
"""The kind of probe for the second and later steps of a generator."""

REQUEST = "request"
"""The kind of probe for an ASGI request."""


class Recorder(Readback):
    """The recorder of one process. `ring_bytes` limits the memory of all rings together. While `on` is False, no spans
    begin. Open spans still end."""

    def __init__(self, ring_bytes: int = RING_BYTES) -> None:
        super().__init__(ring_bytes, OVERFLOW, REMOTE, make_link_attributes, find_asyncio_functions, thread_name)
        self.answers = ANSWERS
        self.scope_type = Scope
        self.scope_name_limit = SCOPE_NAME_LIMIT
        self.open_scope_limit = OPEN_SCOPE_LIMIT
        self._scope_sites: dict[tuple[str, str, bool, str | None], Site] = {}
        self.trace_of: Callable[[int, int, Any], tuple[int, int, int, str]] | None = None
        """A function that returns a span's trace id, span id, flags and state for propagation. None while off."""
        self.renamed: dict[Site, dict[str, Site]] = {}
        self.place_of: dict[Site, Site] = {}
        self._manual_open = 0
        self._paths = CallTree()
        self._reading = RLock()
        self.irregular = Counter()
        self._counters: dict[Site, Any] = {}  # of the calls of each site that is or was muted
        self._mutable: dict[
            Site, weakref.WeakSet[Any] | None
        ] = {}  # with the functions that have a switch of their own
        self.shapes: dict[Site, str] = {}
        """The shape of each site's probe, by the names of `measure_costs`; `scope` by default."""
        self.no_memory = "no session has begun"
        """The reason why no other process can read the recording, "" if one can."""
        self.memory_path = ""
        """The file of the recording, "" for one without a name."""
        self._memory_of: tuple[str, int] | None = None  # the directory, and the process that has a file there
        self._memory_bytes = self._disk_bytes = 0
        self.facts: Mapping[str, Any] = {}
        """The facts of the last session, as written into the memory."""
        self.session_ns = 0
        self._is_off = False

    def __reduce__(self) -> str:
        """Pickle the recorder by its name. A wrapper that is copied into another process records there."""
        return "RECORDER"

    # ---------------------------------------------------------------- functions and scopes

    wrap = wrapping.wrap

    def retire_wrapper(self, function: Any) -> None:
        """Stop recording the calls of a wrapped function. A call then costs one branch more than without the
        wrapper."""
        functions = self._mutable.get(getattr(function, "__instrument__", OVERFLOW))  # a retired one has none
        if functions is not None:
            functions.discard(function)
        wrapping.set_call_switch(function, False)

    def find_or_make_scope_site(self, name: str, kind: str, device: bool = False, phase: str | None = None) -> Site:
        """Return the site of a scope. The first use of a name makes the site, at the caller's place in the code."""
        site = self._scope_sites.get((name, kind, device, phase))
        if site is None:
            if len(self._scope_sites) >= self.scope_name_limit:
                self.count("scope names beyond the limit, counted together")
                return OVERFLOW
            module, qualname, file, line = _find_service_caller()
            # setdefault, because two threads may be first: one site for each name, or the tally would split.
            declared = (("phase", phase),) if phase else ()
            site = self._scope_sites.setdefault(
                (name, kind, device, phase), Site(name, kind, module, qualname, file, line, "", device, declared)
            )
            self.allow_muting(site, shape="scope")
        return site

    def make_scope(
        self,
        name: str,
        *,
        kind: str | None = None,
        device: bool = False,
        attributes: Mapping[str, AttributeValue] | None = None,
        phase: str | None = None,
        stream: Any = None,
        key: str | int | None = None,
        batch: Iterable[str | int] | Mapping[str | int, float] | None = None,
        carrier: Mapping[str, str] | None = None,
    ) -> Scope:
        """Time a block, as a span: ``with scope("tokenise"):``, also ``async with``.

            with scope("tokenise", attributes={"model": "7b"}):
                tokens = tokenizer(text)

        - `name`: the name that reports group by, of a small set; data belongs into `attributes`
        - `attributes`: facts of this span; `annotate` adds more from within
        - `kind`: the kind of work, "user" by default; the error for an unknown kind lists all kinds
        - `phase`: the part of the work, such as "prepare" or "post"; it makes the kind "phase"
        - `device`: also take the block's time on the current stream of torch, cupy or numba; `stream` names another
          stream, such as `torch.cuda.current_stream(1)`, or its address
        - `key`: the id of the request that the block works for; spans of other processes may have it, too
        - `batch`: the ids of all requests in a batch; a mapping from id to weight gives each a share of the time
        - `carrier`: headers with the `traceparent` of a caller; a request continues the trace of that caller

        Exceptions pass untouched and mark the span. While recording is off, a scope costs one branch. Raises
        `TargetError` for a bad name, kind, phase or stream.
        """
        if not isinstance(name, str) or not name:
            raise TargetError(f"a scope needs a name, not {name!r}")
        if phase is not None and (not isinstance(phase, str) or not phase):
            raise TargetError(
                f"scope {name!r}: the phase {phase!r} is not a name; give one such as {', '.join(PHASES)}"
            )
        if kind is None:
            kind = "phase" if phase else "user"
        elif kind not in KINDS:
            raise TargetError(f"scope {name!r}: there is no kind {kind!r}; allowed: {', '.join(KINDS)}")
        # A private copy of the attributes: the row keeps them, the caller may change its own.
        values: dict[Any, Any] | None = (
            attribute_checks.check_scope_attributes(attributes, self.complain) if attributes else None
        )
        if stream is not None:
            values = {**(values or {}), STREAM: stream_handle(stream)}
        if key is not None or batch is not None:
            is_plain = batch is None and type(key) is str and 0 < len(key) <= KEY_LIMIT
            keys = {KEY: key} if is_plain else attribute_checks.make_key_attributes(key, batch, self.complain)
            values = {**values, **keys} if values else keys
        if carrier is not None and (caller := encode_parent(parse_parent(find_trace_headers(carrier)))) is not None:
            values = {**(values or {}), REMOTE: caller}
        return self.new_scope(self.find_or_make_scope_site(name, kind, device or stream is not None, phase), values)

    def start_manual(self, site: Site, attributes: dict[Any, Any] | None) -> Any:
        """Open a span that `end_manual` closes. Return the frame of the span, or None if too many spans are open. The
        site can no longer be muted, because `scope_end` would close a wrong scope."""
        if self._mutable.pop(site, self) is not self:
            self.unmute(site)
        if self._manual_open >= self.open_scope_limit:
            self.count("scopes not begun because too many are open")
            return None
        frame = self.open(site, attributes, MANUAL)
        if frame is not None:  # None for want of memory, counted
            self._manual_open += 1
        return frame

    def end_manual(self, frame: Any, error: BaseException | None = None) -> None:
        """Close a span that `start_manual` opened. A call without a frame is only counted."""
        if frame is None:
            self.count("scope_end without an open scope")
            return
        self._manual_open -= 1
        self.close(frame, error)

    def make_span_factory(self, site: Site, attributes: dict[Any, Any] | None = None) -> Callable[[], Any]:
        if attributes is None:
            return functools.partial(self.new_span, site)
        return functools.partial(Scope, self, site, attributes)

    def new_scope(self, site: Site, attributes: dict[Any, Any] | None = None) -> Scope:
        if site.kind == "user" and not (site.device or site.attributes) and site is not OVERFLOW:
            if self.user_sites.get(site.name, site) is not site:
                self.forget_names()
            self.user_sites[site.name] = Scope(self, site) if site in self.passes else site
        return Scope(self, site, attributes)

    def _set_passing(self, site: Site, passing: Any) -> None:
        """Mute or unmute a site. All scopes of a muted site share one cheap `Scope`."""
        super()._set_passing(site, passing)
        current = self.user_sites.get(site.name)
        if passing is not None and current is site:
            self.user_sites[site.name] = Scope(self, site)
        elif passing is None and current is not site and isinstance(current, Scope) and current._site is site:
            self.user_sites[site.name] = site

    # ---------------------------------------------------------------- life

    def reset(self, ring_bytes: int | None = None) -> None:
        """Drop all rows, totals, call paths and scope names for a new session. Open spans are counted in the new
        session when they end."""
        with self._reading:
            self._reset(ring_bytes)
            self._paths = CallTree()
            self.irregular.clear()
        self.renamed.clear()
        self.place_of.clear()
        self._manual_open = 0
        for site in list(self.passes):
            self.unmute(site)
        self._counters.clear()
        self._scope_sites.clear()

    def begin_recording(
        self, ring_bytes: int, facts: Mapping[str, Any], directory: str = "", disk_bytes: int = 1 << 30
    ) -> None:
        """Start a recording in memory that other processes can read. If this fails, `no_memory` has the reason.

        - `directory`: the folder of a file that outlives the process; without it, the recording ends with the process
        - `disk_bytes`: the maximum size of the folder
        - `facts`: the description of the process and its session
        """
        room_bytes = ring_bytes if directory else max(ring_bytes, LEAST_MEMORY_BYTES)
        if self._memory_of != (directory, os.getpid()) or room_bytes > self._memory_bytes or self.memory is None:
            self._allocate_memory(room_bytes, directory, disk_bytes)
        self.reset(ring_bytes)
        self.session_ns, self._is_off = time.monotonic_ns(), False
        self.write_facts(facts)

    def _allocate_memory(self, room_bytes: int, directory: str, disk_bytes: int) -> None:
        """Allocate a new memory. The recorder writes into it from the next reset on."""
        try:
            new_memory = memory.make_memory(room_bytes, directory, disk_bytes)
            try:
                self.attach(new_memory.fd, bool(directory), None)
            except BaseException:
                os.close(new_memory.fd)
                raise
            self.no_memory, self.memory_path = "", new_memory.path
            self._memory_of, self._memory_bytes, self._disk_bytes = (directory, os.getpid()), room_bytes, disk_bytes
        except (OSError, ValueError) as problem:
            self.no_memory = str(problem)
            if self.memory is None or self.memory_fd >= 0 or room_bytes > self._memory_bytes:
                self.attach(-1, False, memory.make_private_header(room_bytes))
                self._memory_bytes = room_bytes

    def write_facts(self, facts: Mapping[str, Any]) -> None:
        if self.memory is not None:
            state = OFF if self._is_off else RUNNING
            memory.write_process_facts(self.memory, state, {**facts, "begun_ns": self.session_ns})
        self.facts = facts  # who reads them here knows that they outlive this process

    def switch_recording(self, *, on: bool) -> None:
        self.on, self._is_off = on, not on
        if self.memory is not None and HEADER.read(self.memory, "state")[0] in (RUNNING, OFF):
            HEADER.write(self.memory, state=RUNNING if on else OFF)

    def find_part_memory(self, name: str) -> memory.SlotRoom | None:
        """Return a part of the recording's memory that Python code writes. Return None without memory."""
        return None if self.memory is None else memory.SlotRoom.from_part(self.memory, name)

    def write_goodbye(self) -> None:
        """Write that the session has ended normally, and remove the file of the recording."""
        if self.memory is not None:
            HEADER.write(self.memory, state=GOODBYE)
        if self.memory_path:
            with contextlib.suppress(OSError):
                Path(self.memory_path).unlink()
            self.memory_path, self._memory_of = "", None

    def after_fork_in_child(self) -> None:
        """Begin a new recording in a forked child. The recording's spans never have a parent from before the fork."""
        self._reading = RLock()
        self.memory_path = ""  # the parent's
        (directory, _), self._memory_of = self._memory_of or ("", 0), None
        if not self.no_memory:
            self._allocate_memory(self._memory_bytes, directory, self._disk_bytes)
        self.reset()
        self.session_ns = time.monotonic_ns()
        self.write_facts(self.facts)
        self._forget_all()


class Scope(core.Scope):
    """A scope that `instrument.scope` returns. ``with scope("x"):`` or ``async with scope("x"):`` records a span. A
    scope can be used again after its end. `start` and `end` are for handlers that cannot use ``with``."""

    __slots__ = ()

    async def __aenter__(self) -> Scope:
        self.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)

    def rename(self, name: str) -> None:
        """Rename the span of this scope. Use few different names; see `instrument.rename_span`."""
        if self._frame is not None:
            attribute_checks.rename_span_of_frame(self._recorder, self._frame, name)

    def set_status(self, code: str, description: str | None = None, *, error_type: str | None = None) -> None:
        """Set the status of the span; see `instrument.set_status`."""
        if self._frame is not None:
            attribute_checks.set_status_of_frame(self._recorder, self._frame, code, description, error_type)

    def start(self) -> Scope:
        """Begin the span. `end` closes it."""
        # A scope without a site is one without memory.
        if self._frame is None and self._site is not None and self._recorder.on:
            self._frame = self._recorder.start_manual(self._site, self._attributes)
        return self

    def end(self, error: BaseException | None = None) -> None:
        """Close the span, in the same or in another function. `error` is the exception with which the span failed. Does
        nothing if recording was off at `start`."""
        frame, self._frame = self._frame, None
        if frame is not None:
            self._recorder.end_manual(frame, error)


def stream_handle(stream: Any) -> int:
    """Return the address of a CUDA stream of torch, cupy, numba, cuda.core or cuda-python. An address is returned
    unchanged. Raises `TargetError` for any other object."""
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if callable(protocol):
        _, handle = protocol()
        return int(handle)
    for attribute in ("cuda_stream", "ptr", "handle"):  # torch, cupy and numba before they had the protocol
        handle = getattr(stream, attribute, None)
        handle = getattr(handle, "value", handle)
        if isinstance(handle, int):
            return handle
    raise TargetError(
        f"stream= needs a CUDA stream: an object with __cuda_stream__, or the address as an int, not {stream!r}"
    )


def _find_service_caller() -> tuple[str, str, str, int]:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "instrument":
        frame = frame.f_back
    code = frame.f_code
    qualname = getattr(code, "co_qualname", code.co_name)
    return frame.f_globals.get("__name__", ""), qualname, code.co_filename, frame.f_lineno


RECORDER = Recorder()


CHECK_NS = 10**9
MOST_DEVIATION_NS = 50_000
"""The maximum deviation of the time stamp counter from the monotonic clock, in ns per second."""


class Ticks:
    """The choice of a recorder's clock: the processor's time stamp counter while it is exact, else the monotonic
    clock."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._checked_ns: int | None = None

    def use_tick_counter(self, now_ns: int) -> str:
        """Use the time stamp counter as clock. Return "" on success, else the reason for the failure."""
        unsound = _explain_unreliable_counter() or ("" if self._recorder.start_ticks() else "the processor has none")
        self._checked_ns = None if unsound else now_ns
        return unsound

    @property
    def is_counter_used(self) -> bool:
        return self._checked_ns is not None

    @property
    def clock(self) -> str:
        return "time stamp counter" if self.is_counter_used else "CLOCK_MONOTONIC"

    def check_counter(self, now_ns: int) -> None:
        """Compare the time stamp counter with the monotonic clock. If they differ, use the monotonic clock again."""
        if self._checked_ns is None or now_ns - self._checked_ns < CHECK_NS:
            return
        self._checked_ns = None if self._recorder.check_ticks(MOST_DEVIATION_NS) is None else now_ns


def _explain_unreliable_counter() -> str:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").partition("flags")[2].split("\n")[0]
        source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text(encoding="ascii")
    except OSError as error:
        return f"the kernel does not say whether it is sound ({error})"
    missing = {"constant_tsc", "nonstop_tsc"}.difference(flags.split())
    if missing:
        return f"the processor does not claim {' and '.join(sorted(missing))}"
    if source.strip() != "tsc":
        return f"the kernel keeps its time by {source.strip()}, not by the counter"
    return ""
