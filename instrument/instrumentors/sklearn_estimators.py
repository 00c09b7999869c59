"""Record scikit-learn: `predict`, `predict_proba`, `decision_function` and `transform` of all estimator classes.

A method is replaced as soon as its class is defined, also in a class of the service or of another library. If methods
of one estimator call each other, only the outermost call is a span. So inside a pipeline's span are its steps.
"""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from types import FunctionType, ModuleType
from typing import Any

from instrument.instrumentors.frameworks import Observer
from instrument.instrumentors.lineages import subclasses, watch_subclasses
from instrument.instrumentors.references import namespace
from instrument.instrumentors.targets import site_of
from instrument.instrumentors.verdict import Verdict
from instrument.profile.model import FrameworkRule
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.spans import Site

METHODS = ("predict", "predict_proba", "decision_function", "transform")

BASE = ("sklearn.base", "BaseEstimator")
WRAPPING = "_SetOutputMixin"
"""The class of scikit-learn that wraps `transform` in each new subclass. Its `__init_subclass__` runs last."""


class Estimators(Observer):
    """The instrumentor of estimators for one session. `hits` counts the methods of classes that have run."""

    def __init__(self, rule: FrameworkRule, recorder: Recorder = RECORDER) -> None:
        super().__init__(rule, recorder)
        self.hits = 0
        self._inside = threading.local()
        """The ids of the estimators whose methods are running, per thread."""
        self._base: type[Any] | None = None
        self._wrapping: type[Any] | None = None

    def may_match(self, module_name: str) -> bool:
        return module_name == BASE[0]

    def attach_to(self, module: ModuleType) -> None:
        """Record the methods of all estimator classes, now and when a class is defined later."""
        base = namespace(module).get(BASE[1])
        if not isinstance(base, type):
            self._note_missing(".".join(BASE))
            return
        self._base = base
        bases = getattr(namespace(module).get("TransformerMixin"), "__mro__", ())
        self._wrapping = next((cls for cls in bases if cls.__name__ == WRAPPING), None)
        for watched in filter(None, (base, self._wrapping)):
            defined = functools.partial(self._attach_subclass, watched)
            self._undos.append(watch_subclasses(watched, defined, "an estimator class"))
        for cls in subclasses(base):
            self._attach_class(cls)

    def verdicts(self) -> list[Verdict]:
        """Return the verdict on the rule, and on methods that cannot be recorded."""
        unreachable = [verdict for verdict in super().verdicts() if verdict.state == "unreachable"]
        state, why = "attached", f"{self.hits} methods of estimators"
        if not self.hits:
            state, why = "waiting", "sklearn not imported" if self._base is None else "no estimator has run"
        is_left_out = not self.hits and (self.rule.auto or (self._base is None and unreachable))
        return [*([] if is_left_out else [Verdict(self.rule.text, state, why=why)]), *unreachable]

    def _attach_subclass(self, watched: type[Any], cls: type[Any]) -> None:
        """Record the methods of a new class, at the last report. `watched` is the base class that reports it."""
        last = next(base for base in cls.__mro__ if base in (self._base, self._wrapping))
        if last is watched and self._base in cls.__mro__:
            self._attach_class(cls)

    def _attach_class(self, cls: type[Any]) -> None:
        for name in METHODS:
            owner = next((base for base in cls.__mro__ if name in vars(base)), None)
            if owner is None:
                continue
            raw = vars(owner)[name]
            if isinstance(getattr(raw, "__instrument__", None), Site):  # a function rule has it
                continue
            # `available_if` makes a descriptor that contains the function, and may deny that there is one.
            function = raw if isinstance(raw, FunctionType) else getattr(raw, "fn", None)
            if not isinstance(function, FunctionType):
                if raw is not None:
                    self._note_no_function(f"{owner.__qualname__}.{name}", raw)
                continue
            if not hasattr(function, "__instrument_framework__"):
                self._attach_method(owner, name, raw, self._wrap_method(name, function))

    def _attach_method(self, owner: type[Any], name: str, raw: Any, wrapped: Any) -> None:
        new = wrapped
        if not isinstance(raw, FunctionType):
            new = copy.copy(raw)
            new.fn = wrapped
        self._replace_method(f"{owner.__qualname__}.{name}", owner, name, new)

    def _wrap_method(self, name: str, method: FunctionType) -> Any:
        recorder, decide, inside = self._recorder, self._make_recording, self._inside
        recordings: dict[int, Any] = {}

        @functools.wraps(method)
        def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not recorder.on:
                return method(self, *args, **kwargs)
            running, key = vars(inside).setdefault("estimators", set()), id(self)
            if key in running:
                return method(self, *args, **kwargs)
            cls = type(self)
            recording = recordings.get(id(cls)) or decide(name, method, cls, recordings)
            running.add(key)
            try:
                return recording(self, *args, **kwargs)
            finally:
                running.discard(key)

        wrapper.__instrument_framework__ = self.rule.name  # type: ignore[attr-defined]
        return wrapper

    def _make_recording(self, name: str, method: FunctionType, cls: type[Any], recordings: dict[int, Any]) -> Any:
        """Make the recording method for a class, at the first call on an object of the class."""
        site = site_of(method, name=f"{cls.__name__}.{name}")
        if id(cls) not in recordings:
            self.hits += 1
            weakref.finalize(cls, recordings.pop, id(cls), None)
        return self._record_once(method, site, recordings, id(cls))
