"""Record a service's start: functions that load or compile a model, and the durations of imports.

`startup: auto` adds function rules for known frameworks, with the phase `load` or `compile`. To time imports, Python's
own import function is replaced. Each package has a self time, and a time that includes the packages that it imports.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from operator import add
from types import FrameType, FunctionType, ModuleType
from typing import Any

from instrument.instrumentors.profiled_functions import Instrumentor, Undo, replace_attribute
from instrument.instrumentors.verdict import Verdict
from instrument.profile.model import FunctionRule
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.spans import ImportTime, Site
from instrument.runtime.lazy_imports import dataclass, field, replace
from instrument.runtime.unpatched import Lock

_DYNAMO = "torch._dynamo.callback"

_HANDLER, _CALLBACKS = "CompilationCallbackHandler", "install_callbacks"
COMPILED = Site("torch.compile", "phase", _DYNAMO, f"{_HANDLER}.{_CALLBACKS}", attributes=(("phase", "compile"),))

LOADS = {
    "torch.serialization:load": "torch.load",
    "torch.jit._serialization:load": "torch.jit.load",
    "torch.export:load": "torch.export.load",
    "torch.nn.modules.module:Module.load_state_dict": "load_state_dict",
    "safetensors.torch:load_file": "safetensors.load_file",
    "safetensors.torch:load_model": "safetensors.load_model",
    "transformers.modeling_utils:PreTrainedModel.from_pretrained": "from_pretrained (model)",
    "transformers.tokenization_utils_base:PreTrainedTokenizerBase.from_pretrained": "from_pretrained (tokenizer)",
    "transformers.processing_utils:ProcessorMixin.from_pretrained": "from_pretrained (processor)",
    "onnxruntime.capi.onnxruntime_inference_collection:InferenceSession.__init__": "onnxruntime.InferenceSession",
    "keras.src.saving.saving_api:load_model": "keras.load_model",
    "joblib.numpy_pickle:load": "joblib.load",
}
COMPILES = {"torch.jit._freeze:freeze": "torch.jit.freeze", "torch.export:export": "torch.export.export"}
"""The name of the span of each compile function. `torch.jit.trace` and `script` are missing, because they read their
caller's frame."""


class StartupWatch(Instrumentor):
    """The instrumentor of `startup: auto`, which records how models are loaded and compiled."""

    def __init__(self, rules: Sequence[str] = ("auto",), recorder: Recorder = RECORDER) -> None:
        super().__init__(rules, recorder)
        from instrument.instrumentors.function_rules import Functions  # each session times imports, few watch startup

        function_rules = [
            FunctionRule((target,), name=name, kind="phase", phase=phase, text="startup")
            for phase, names in (("load", LOADS), ("compile", COMPILES))
            for target, name in names.items()
        ]
        self._functions = Functions(function_rules, recorder)
        self._dynamo: Verdict | None = None

    def probes_by_name(self) -> Mapping[str, Any]:
        return self._functions.probes_by_name()

    def may_match(self, module_name: str) -> bool:
        return module_name == _DYNAMO or self._functions.has_module_pattern(module_name)

    def attach_to(self, module: ModuleType) -> bool:
        if module.__name__ == _DYNAMO:
            self._watch_compilations(module)
            return False
        return self._functions.attach_to(module)

    def undo(self) -> None:
        super().undo()
        self._dynamo = None
        self._functions.undo()

    def verdicts(self) -> list[Verdict]:
        verdicts = [verdict for verdict in self._functions.verdicts() if verdict.state not in ("waiting", "not found")]
        if self._dynamo is not None:
            verdicts.append(self._dynamo)
        # Without a site no verdict becomes `uncalled`: no service has to call all functions that load.
        return [replace(verdict, site=None) for verdict in verdicts]

    def _watch_compilations(self, module: ModuleType) -> None:
        if self._undos:
            return
        owner = getattr(module, _HANDLER, None)
        method = vars(owner).get(_CALLBACKS) if isinstance(owner, type) else None
        if not isinstance(method, FunctionType):
            why = "this version of torch does not report when it compiles"
            self._dynamo = Verdict("startup", "unreachable", "torch.compile", why)
            return
        recorder, span = self._recorder, self._recorder.make_span_factory(COMPILED)

        @contextmanager
        def install_callbacks(self: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
            with span() if recorder.on else nullcontext(), method(self, *args, **kwargs):
                yield

        self._undos.append(replace_attribute(owner, _CALLBACKS, install_callbacks))
        self._dynamo = Verdict("startup", "attached", "torch.compile")


# The durations of imports

LIMIT = 2_000
"""The maximum number of packages with their own entry. Further packages share an entry."""

OTHERS = "(other packages)"

NEWEST = 4_096
"""The maximum number of stored imports. Older imports do not count in the sums for imports after the first request."""

OWN = __name__.partition(".")[0]

_IMPORTERS = frozenset({"importlib", "_frozen_importlib"})
"""The packages of Python's import system. Their frames are skipped in the search for the importing code."""

_clock = time.monotonic_ns


@dataclass(slots=True, eq=False)
class _OpenImport:
    """A package that a thread is importing. `others_ns` is the time of nested imports of other packages."""

    package: str
    is_outermost: bool
    is_ours: bool
    others_ns: int = 0
    began_ns: int = field(default_factory=_clock)


class _Local(threading.local):
    def __init__(self) -> None:
        self.stack: list[_OpenImport] = []


class ImportTimes:
    """The times of imports by package. `is_inside()` returns True while the calling thread has an open span."""

    def __init__(self, is_inside: Callable[[], object]) -> None:
        self._is_inside = is_inside
        self.after_fork_in_child()
        self.why_not = ""

    def after_fork_in_child(self) -> None:
        self._local = _Local()
        self._lock = Lock()
        self._packages: dict[str, Any] = {}
        self._newest: deque[tuple[int, str, int]] = deque(maxlen=NEWEST)

    def install(self) -> Undo:
        """Time imports from now on. Return the function that undoes this. After a failure, `why_not` has the reason."""
        bootstrap: Any = sys.modules.get("_frozen_importlib")
        original = getattr(bootstrap, "_find_and_load", None)
        if not isinstance(original, FunctionType):
            self.why_not = "imports are not timed: this Python does not import by _find_and_load"
            return lambda: None
        watching = True
        end = self._end_import

        def _find_and_load(name: str, *import_arguments: Any) -> Any:
            stack = self._local.stack
            package = name.partition(".")[0]
            if (stack and stack[-1].package == package) or not watching:
                return original(name, *import_arguments)
            is_ours = (bool(stack) and stack[-1].is_ours) or _is_import_by_sdk(sys._getframe().f_back)
            importing = _OpenImport(package, all(above.package != package for above in stack), is_ours)
            stack.append(importing)
            try:
                return original(name, *import_arguments)
            finally:
                end(stack, importing)

        # Python omits frames of the import system from tracebacks, by this name of their file.
        _find_and_load.__code__ = _find_and_load.__code__.replace(co_filename=original.__code__.co_filename)
        functools.update_wrapper(_find_and_load, original)
        bootstrap._find_and_load = _find_and_load

        def stop_timing() -> None:
            nonlocal watching
            watching = False
            if bootstrap._find_and_load is _find_and_load:
                bootstrap._find_and_load = original

        return stop_timing

    def _end_import(self, stack: list[_OpenImport], importing: _OpenImport) -> None:
        took_ns = _clock() - importing.began_ns
        stack.remove(importing)
        if stack:
            stack[-1].others_ns += took_ns
        self_ns = max(took_ns - importing.others_ns, 0)
        inside_ns = self_ns if self._is_inside() else 0
        package = importing.package
        if importing.is_ours and package != OWN:
            package = f"{OWN} ({package})"
        with self._lock:
            if package not in self._packages and len(self._packages) >= LIMIT:
                package = OTHERS
            added = 1, took_ns if importing.is_outermost else 0, self_ns, inside_ns
            self._packages[package] = list(map(add, self._packages.get(package, (0, 0, 0, 0)), added))
            self._newest.append((importing.began_ns, package, self_ns - inside_ns))

    def times_by_package(self, request_ns: int | None = None) -> tuple[ImportTime, ...]:
        """Return the times of finished imports by package.

        `request_ns` is the start of the first request. Later imports also have a sum of their own, over the newest
        `NEWEST` imports.
        """
        late: Counter[str] = Counter()
        with self._lock:
            for began_ns, package, outside_ns in self._newest:
                if request_ns is not None and began_ns >= request_ns:
                    late[package] += outside_ns
            return tuple(ImportTime(package, *(*sums, late[package])) for package, sums in self._packages.items())


def _is_import_by_sdk(frame: FrameType | None) -> bool:
    """Return True if code of this package makes the import. Imports for `python -m` do not count."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in _IMPORTERS:
            return package == OWN
        frame = frame.f_back
    return False
