"""Finds the functions of the module that runs as `__main__`, while its body runs. No import hook sees this module.

`sys.monitoring`, or before Python 3.12 `sys.settrace`, reports new functions before each statement that may call them.
The module `__mp_main__` of a child of multiprocessing is watched, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import PurePath
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from instrument.runtime.faults import FAULTS
from instrument.runtime.lazy_imports import LazyModule, NamedTuple

if TYPE_CHECKING:
    import ast
    import linecache
else:
    ast, linecache = LazyModule("ast"), LazyModule("linecache")

MAINS = ("__main__", "__mp_main__")
"""The `__name__` of a program's main module, and of a spawned multiprocessing child's main module."""

_WATCHED = ("<module>", "_bootstrap")
"""The names of the code objects in which a main module may start: a module body, or a spawned child's first
function."""


def list_names_of_module(module: ModuleType) -> tuple[str, ...]:
    """Return the names by which rules may refer to a module. A main module has the name `__main__`. With `python -m`,
    it also has its own name."""
    names = object.__getattribute__(module, "__dict__")
    name: str = names["__name__"]
    if name not in MAINS:
        return (name,)
    spec_name = getattr(names.get("__spec__"), "name", None)
    return (spec_name, MAINS[0]) if isinstance(spec_name, str) and spec_name not in MAINS else MAINS[:1]


def is_main_module(module: ModuleType) -> bool:
    return object.__getattribute__(module, "__dict__")["__name__"] in MAINS


def script_name() -> str:
    """Return the name of the main script without its suffix, "" without a script. `sys.argv` has the name even after
    the end of the script, when `__file__` is gone."""
    return PurePath(str(sys.argv[0])).stem if sys.argv else ""


class MainNames(ModuleType):
    """A module object for a namespace without a module, such as the namespace of a spawned child's functions."""

    def __init__(self, names: dict[str, Any]) -> None:
        super().__init__(MAINS[0])
        object.__setattr__(self, "_names", names)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        names: dict[str, Any] = object.__getattribute__(self, "_names")
        return names

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        del self.__dict__[name]


def find_spawned_namespace() -> MainNames | None:
    """Return the namespace of a spawned child's functions, None in any other process. The child's main module is only a
    copy of that namespace."""
    module = sys.modules.get(MAINS[1])
    if module is None:
        return None
    copied = object.__getattribute__(module, "__dict__")
    values = list(copied.values())
    methods = [method for kind in values if type(kind) is type for method in vars(kind).values()]
    for function in values + methods:
        is_function = type(function) is FunctionType or "__instrument_function__" in vars(type(function))  # or a probe
        names = function.__globals__ if is_function else copied
        if names is not copied and names.get("__name__") == MAINS[1]:
            return MainNames(names)
    return None


class Plan(NamedTuple):
    """The lines of a module before which new names are reported (`stops`), and the last line of the last definition
    (`last`)."""

    stops: frozenset[int]
    last: int


def plan_report_lines(body: ast.Module) -> Plan:
    stops: set[int] = set()
    names: set[str] = set()
    last = 0
    inert = ast.Import, ast.ImportFrom, ast.Pass, ast.Global  # cannot call a function of their module
    for statement, is_nested in _iterate_module_statements(body.body, nested=False):
        end = statement.end_lineno or statement.lineno
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = min([statement.lineno, *(decorator.lineno for decorator in statement.decorator_list)])
            if names.intersection(_find_used_names(statement)):
                stops.update(range(first, statement.lineno + 1))
            names.add(statement.name)
            last = max(last, end)
        elif blocks := _inner_blocks(statement):
            stops.update(range(statement.lineno, max(blocks[0][0].lineno, statement.lineno + 1)))
        elif not (isinstance(statement, inert) or isinstance(getattr(statement, "value", None), ast.Constant)):
            stops.update(range(statement.lineno, end + 1))
            value = getattr(statement, "value", None)
            if isinstance(statement, (ast.Assign, ast.AnnAssign)) and not is_nested and _makes_function(value, names):
                last = max(last, end)
    return Plan(frozenset(stops), last)


def _iterate_module_statements(block: list[ast.stmt], *, nested: bool) -> Iterator[tuple[ast.stmt, bool]]:
    for statement in block:
        yield statement, nested
        for inner in _inner_blocks(statement):
            yield from _iterate_module_statements(inner, nested=True)


def _inner_blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """Return the blocks in a statement such as `if`. A definition has none, because its body runs in its own frame."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return []
    blocks = [getattr(statement, name, None) for name in ("body", "orelse", "finalbody")]
    parts = [*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]
    return [block for block in [*blocks, *(part.body for part in parts)] if block]


def _find_used_names(statement: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[str]:
    parts: list[ast.AST] = list(statement.decorator_list)
    if isinstance(statement, ast.ClassDef):
        parts += [*statement.bases, *statement.keywords, *statement.body]
    else:
        parts.append(statement.args)
    for part in parts:
        for node in ast.walk(part):
            if isinstance(node, ast.Name):
                yield node.id


def _makes_function(value: ast.expr | None, names: set[str]) -> bool:
    if isinstance(value, ast.Lambda):
        return True
    return isinstance(value, ast.Call) and any(
        isinstance(node, ast.Lambda) or (isinstance(node, ast.Name) and node.id in names) for node in ast.walk(value)
    )


def _plan_source_lines(code: CodeType, names: dict[str, Any]) -> Plan | None:
    try:
        source = "".join(linecache.getlines(code.co_filename, names))
        return plan_report_lines(ast.parse(source)) if source else None
    except (SyntaxError, ValueError, RecursionError):
        return None


class Watch:
    """Watches the main module's body, and reports new names until the last definition. `wants(name)` returns True for a
    module to report. `defined(module)` is called on the thread that runs the body."""

    def __init__(self, wants: Callable[[str], bool], defined: Callable[[ModuleType], object]) -> None:
        self._wants = wants
        self._defined = defined
        self._plan = Plan(frozenset(), 0)
        self._names: dict[str, Any] = {}
        self._seen: dict[str, int] = {}
        self._mains: tuple[str, ...] = MAINS
        self._is_next = False
        self._means: _Monitoring | _Tracing | None = None

    def begin(self) -> None:
        """Watch the main module's body from now on, or from the start of the body."""
        frames: list[FrameType] = []
        caller: FrameType | None = sys._getframe(1)
        while caller is not None:
            frames.append(caller)
            caller = caller.f_back
        for frame in frames:
            if self._is_main(frame.f_code, frame.f_globals):
                self._seen = _identities_by_name(frame.f_globals)  # the caller has looked at these
                self._plan, self._names = (
                    _plan_source_lines(frame.f_code, frame.f_globals) or self._plan,
                    frame.f_globals,
                )
                if self._plan.last > frame.f_lineno and (means := self._acquire_hook()) is not None:
                    means.watch_code(frame.f_code, frame)
                return
        first_argument, *_ = sys.argv or [""]  # as it is before the main module runs
        # A child of multiprocessing runs a command that runs the main module of its parent.
        is_child = first_argument == "-c" and any("multiprocessing" in word for word in sys.orig_argv)
        is_starting = any(frame.f_globals.get("__name__") == "site" for frame in frames)
        if is_starting and self._wants(MAINS[0]) and (is_child or first_argument not in ("", "-", "-c")):
            self._mains = MAINS[1:] if is_child else MAINS
            self._listen_for_body()

    def await_body(self) -> None:
        """Prepare to watch the module body that `runpy` runs next on this thread."""
        self._is_next = True
        self._listen_for_body()

    def _listen_for_body(self) -> None:
        if self._means is None and (means := self._acquire_hook()) is not None:
            means.listen_for_body()

    def end(self) -> None:
        means, self._means = self._means, None
        if means is not None:
            means.release_hook()

    def is_trace_set(self) -> bool:
        return type(self._means) is _Tracing and self._means.is_trace_set()

    def pause_tracing(self) -> Callable[[], object]:
        """Remove this thread's trace function during an import. Return the function that sets it again."""
        means = self._means
        if not isinstance(means, _Tracing) or not means.is_trace_set():
            return bool
        sys.settrace(None)
        return means.resume_tracing

    def _acquire_hook(self) -> _Monitoring | _Tracing | None:
        means = _Monitoring(self) if sys.version_info >= (3, 12) else _Tracing(self)
        self._means = means if means.acquire_hook() else None
        return self._means

    def _is_main(self, code: CodeType, names: dict[str, Any]) -> bool:
        if code.co_name != "<module>" or names.get("__name__") not in self._mains:
            return False
        module = _find_module(names)
        return module is not None and any(map(self._wants, list_names_of_module(module)))

    def is_body_to_watch(self, code: CodeType, names: dict[str, Any]) -> bool:
        """Return True if `code` is the main module's body, which is about to run. The watch ends if the body's source
        is not readable."""
        if self._names:
            return False  # it has been found
        if self._is_main(code, names):
            plan = _plan_source_lines(code, names)
            if plan is None:
                self.end()
                return False
            self._plan, self._names = plan, names
            return True
        if self._is_next or (code.co_name == "_bootstrap" and names.get("__name__") == "multiprocessing.process"):
            self.end()
        return False

    def report_before_line(self, line: int) -> None:
        is_past = line > self._plan.last
        if is_past or line in self._plan.stops:
            self.report_names()
        if is_past:
            self.end()

    def report_names_and_end(self) -> None:
        self.report_names()
        self.end()

    def report_names(self) -> None:
        """Report the module if its names have changed since the last report."""
        module = _find_module(self._names)
        if module is None or _identities_by_name(self._names) == self._seen:
            return
        FAULTS.attempt("watch of __main__", lambda: self._defined(module))
        self._seen = _identities_by_name(self._names)


def _identities_by_name(names: dict[str, Any]) -> dict[str, int]:
    return {name: id(value) for name, value in list(names.items())}


def _find_module(names: dict[str, Any]) -> ModuleType | None:
    module = sys.modules.get(names.get("__name__", ""))
    is_it = issubclass(type(module), ModuleType) and object.__getattribute__(module, "__dict__") is names
    return module if is_it else None


class _Tracing:
    """A hook by `sys.settrace`, up to Python 3.11. It slows down all calls until the last definition has run."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def acquire_hook(self) -> bool:
        return sys.gettrace() is None  # else a debugger's or a coverage tool's, which comes first

    def listen_for_body(self) -> None:
        sys.settrace(self._handle_call_event)

    def watch_code(self, code: CodeType, frame: FrameType) -> None:
        frame.f_trace = self._handle_line_event
        sys.settrace(self._handle_call_event)

    def release_hook(self) -> None:
        if self.is_trace_set():
            sys.settrace(None)

    def is_trace_set(self) -> bool:
        return sys.gettrace() == self._handle_call_event

    def resume_tracing(self) -> None:
        """Set the trace function after a pause, unless another one was set or the watch has ended."""
        if self._watch._means is self and sys.gettrace() is None:
            sys.settrace(self._handle_call_event)

    def _is_over(self) -> bool:
        """Return True if the watch has ended, and remove the trace function. Only the thread itself can remove it."""
        if self._watch._means is self:
            return False
        self.release_hook()
        return True

    def _handle_call_event(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_name not in _WATCHED:
            return None  # as nearly all are
        if not self._is_over() and self._watch.is_body_to_watch(frame.f_code, frame.f_globals):
            return self._handle_line_event
        return None

    def _handle_line_event(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not self._is_over():
            if event == "line":
                self._watch.report_before_line(frame.f_lineno)
            elif event == "return":
                self._watch.report_names_and_end()
        if self._is_over():
            del frame.f_trace
            return None
        return self._handle_line_event


if sys.version_info >= (3, 12):

    class _Monitoring:
        """A hook by `sys.monitoring`, from Python 3.12 on. It slows down only the watched code."""

        def __init__(self, watch: Watch) -> None:
            self._watch = watch
            self._tool = -1
            self._code: CodeType | None = None

        def acquire_hook(self) -> bool:
            monitoring = sys.monitoring
            for tool in (4, 3, monitoring.PROFILER_ID):  # the first two belong to nobody
                if monitoring.get_tool(tool) is None:
                    monitoring.use_tool_id(tool, "instrument")
                    self._tool = tool
                    return True
            return False

        def listen_for_body(self) -> None:
            events = sys.monitoring.events
            sys.monitoring.register_callback(self._tool, events.PY_START, self._handle_start)
            sys.monitoring.set_events(self._tool, events.PY_START)

        def watch_code(self, code: CodeType, frame: FrameType | None) -> None:
            self._code = code
            events = sys.monitoring.events
            sys.monitoring.register_callback(self._tool, events.LINE, self._handle_line)
            sys.monitoring.register_callback(self._tool, events.PY_RETURN, self._handle_return)
            sys.monitoring.set_local_events(self._tool, code, events.LINE | events.PY_RETURN)

        def release_hook(self) -> None:
            monitoring, events = sys.monitoring, sys.monitoring.events
            monitoring.set_events(self._tool, events.NO_EVENTS)
            if self._code is not None:
                monitoring.set_local_events(self._tool, self._code, events.NO_EVENTS)
            for event in (events.PY_START, events.LINE, events.PY_RETURN):
                monitoring.register_callback(self._tool, event, None)
            monitoring.free_tool_id(self._tool)

        def _handle_start(self, code: CodeType, offset: int) -> Any:
            if code.co_name not in _WATCHED:
                return sys.monitoring.DISABLE
            if self._watch.is_body_to_watch(code, sys._getframe(1).f_globals):
                sys.monitoring.set_events(self._tool, sys.monitoring.events.NO_EVENTS)
                self.watch_code(code, None)
            return None

        def _handle_line(self, code: CodeType, line: int) -> Any:
            if code is self._code and self._watch._means is self:
                self._watch.report_before_line(line)

        def _handle_return(self, code: CodeType, offset: int, value: object) -> Any:
            if code is self._code and self._watch._means is self:
                self._watch.report_names_and_end()

else:
    _Monitoring = _Tracing
