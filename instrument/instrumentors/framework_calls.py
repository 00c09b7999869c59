"""Record the entry points of machine learning frameworks, such as Keras's `predict`.

The entry points are methods, which are replaced once their module is imported. If a method returns before its work is
done, such as ONNX Runtime's `run_async`, the span covers only the call.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import PurePath
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from instrument.instrumentors.function_patterns import make_site
from instrument.instrumentors.profiled_functions import Instrumentor, replace_attribute
from instrument.instrumentors.references import loaded_modules, module_namespace
from instrument.instrumentors.torch_graphs import get_is_compiling
from instrument.instrumentors.verdict import Verdict
from instrument.profile.model import FrameworkRule
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.spans import AttributeValue, Site
from instrument.runtime.faults import FAULTS
from instrument.runtime.lazy_imports import NamedTuple

if TYPE_CHECKING:
    from instrument.instrumentors.layers import Layers

Facts = tuple[str, tuple[tuple[str, AttributeValue], ...]]
"""The description of a called object: its `instance` and further attributes of the span."""


class Entry(NamedTuple):
    """An entry point of a framework, which is a method of the class `owner`. Its spans have the `name`.

    `modules` are the modules of the class in different versions of the framework.
    """

    modules: tuple[str, ...]
    owner: str
    method: str
    name: str

    @property
    def label(self) -> str:
        return f"{self.owner}.{self.method}"


ONNXRUNTIME = "onnxruntime.capi.onnxruntime_inference_collection"
ONNXRUNTIME_METHODS = ("run", "run_with_ort_values", "run_with_iobinding", "run_with_ortvaluevector", "run_async")
_KERAS_MODEL, _ST = "keras.src.models.model", "sentence_transformers.{}"
_ENCODERS = (
    (("sentence_transformer.model", "SentenceTransformer"), "SentenceTransformer", "encode"),
    (("sparse_encoder.model", "sparse_encoder.SparseEncoder"), "SparseEncoder", "encode"),
    (("cross_encoder.model", "cross_encoder.CrossEncoder"), "CrossEncoder", "predict"),
)
"""The recorded methods of sentence-transformers.

Each entry has the class's modules in newer and older versions, the class, and the method.
"""


def _describe_session(session: Any) -> Facts:
    path = getattr(session, "_model_path", None)
    return PurePath(path).name if path else "(bytes)", (("providers", tuple(session.get_providers())),)


def _describe_model(subject: Any) -> Facts:
    task = getattr(subject, "task", None)
    return task if isinstance(task, str) and task else type(subject).__name__, ()


ENTRIES: Mapping[str, tuple[Sequence[Entry], Callable[[Any], Facts]]] = {
    "onnxruntime": (
        [Entry((ONNXRUNTIME,), "Session", method, f"onnxruntime.{method}") for method in ONNXRUNTIME_METHODS],
        _describe_session,
    ),
    "keras": (
        [Entry((_KERAS_MODEL,), "Model", method, f"keras.{method}") for method in ("predict", "predict_on_batch")],
        lambda model: (str(model.name), ()),
    ),
    "transformers": (
        [
            Entry(("transformers.generation.utils",), "GenerationMixin", "generate", "transformers.generate"),
            Entry(("transformers.pipelines.base",), "Pipeline", "__call__", "transformers.pipeline"),
        ],
        _describe_model,
    ),
    "sentence_transformers": (
        [Entry(tuple(map(_ST.format, names)), cls, method, _ST.format(method)) for names, cls, method in _ENCODERS],
        _describe_model,
    ),
}
"""The entry points of each framework, and a function that describes the called object."""

OBSERVERS: Mapping[str, str] = {"jax": "JaxFunctions", "keras": "KerasLayers", "sklearn": "SklearnEstimators"}
"""The class in `jax_keras_sklearn` that instruments a framework beyond its `ENTRIES`."""


class Observer(Instrumentor):
    """The base class of instrumentors for one framework. It replaces methods, and has a verdict on each."""

    def __init__(self, rule: FrameworkRule, recorder: Recorder = RECORDER) -> None:
        super().__init__((rule,), recorder)
        self.rule = rule
        self._verdicts: dict[str, Verdict] = {}

    def verdicts(self) -> list[Verdict]:
        return list(self._verdicts.values())

    def _note_verdict_on_entry(self, state: str, label: str, why: str = "", *, key: str = "") -> None:
        """Note the verdict on an entry point. It replaces an earlier verdict with the same `key`, which is the label by
        default."""
        self._verdicts[key or label] = Verdict(self.rule.text, state, label, why)

    def _note_missing_entry(self, label: str) -> None:
        name = self.rule.name
        version = next(
            (module_namespace(module).get("__version__") for key, module in loaded_modules() if key == name), None
        )
        self._note_verdict_on_entry("unreachable", label, f"{name} {version or '(of unknown version)'} has none")

    def _note_not_a_function(self, label: str, value: Any) -> None:
        self._note_verdict_on_entry("unreachable", label, f"it is a {type(value).__name__}, not a function")

    def _note_if_already_recorded(self, label: str, function: Any) -> bool:
        site = getattr(function, "__instrument__", None)
        if isinstance(site, Site):
            self._note_verdict_on_entry("attached", label, f"it is recorded as {site.name!r} already")
        return isinstance(site, Site)

    def _replace_method(self, label: str, owner: Any, name: str, new: Any) -> None:
        try:
            self._undos.append(replace_attribute(owner, name, new))
        except Exception as error:  # a metaclass that refuses changes
            self._note_verdict_on_entry("unreachable", label, f"it cannot be replaced: {type(error).__name__}: {error}")
        else:
            self._note_verdict_on_entry("attached", label)


class Entries(Observer):
    def __init__(self, rule: FrameworkRule, recorder: Recorder = RECORDER) -> None:
        super().__init__(rule, recorder)
        self._entries, self._facts_of = ENTRIES[rule.name]
        self._modules = frozenset(name for entry in self._entries for name in entry.modules)
        self._shared: dict[tuple[str, Facts], Any] = {}

    def may_match(self, module_name: str) -> bool:
        return module_name in self._modules

    def attach_to(self, module: ModuleType) -> None:
        for entry in self._entries:
            if module.__name__ in entry.modules:
                self._attach_entry(entry, module_namespace(module).get(entry.owner))

    def undo(self) -> None:
        super().undo()
        self._shared.clear()

    def verdicts(self) -> list[Verdict]:
        verdicts = list(self._verdicts.values())
        waiting = {entry.modules for entry in self._entries if entry.label not in self._verdicts}
        if waiting and not self.rule.auto:
            ready = {name for name, _ in loaded_modules()}
            names = sorted(" or ".join(modules) for modules in waiting) if self.rule.name in ready else [self.rule.name]
            verdicts.append(Verdict(self.rule.text, "waiting", why=f"{', '.join(names)} not imported"))
        return verdicts

    def _attach_entry(self, entry: Entry, owner: Any) -> None:
        bases = owner.__mro__ if isinstance(owner, type) else ()
        owner = next((base for base in bases if entry.method in vars(base)), None)
        method = None if owner is None else vars(owner)[entry.method]
        if owner is None:
            self._note_missing_entry(entry.label)
        elif hasattr(method, "__instrument_framework__"):  # a second name of the same module
            self._note_verdict_on_entry("attached", entry.label)
        elif self._note_if_already_recorded(entry.label, method):
            return
        elif not isinstance(method, FunctionType):
            self._note_not_a_function(entry.label, method)
        else:
            self._replace_method(entry.label, owner, entry.method, self._wrap(entry, method))

    def _wrap(self, entry: Entry, method: FunctionType) -> Any:
        recorder, decide = self._recorder, self._make_recording_method
        is_compiling = get_is_compiling(sys.modules.get("torch"))
        recordings: dict[int, Any] = {}

        @functools.wraps(method)
        def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not recorder.on:
                return method(self, *args, **kwargs)
            recording = recordings.get(id(self)) or decide(entry, method, self, recordings)
            return recording(self, *args, **kwargs)

        wrapper.__instrument_framework__ = self.rule.name  # type: ignore[attr-defined]
        return wrapper

    def _make_recording_method(self, entry: Entry, method: FunctionType, thing: Any, recordings: dict[int, Any]) -> Any:
        """Return the recording method for an object. Objects with equal descriptions share a recording method."""
        try:
            facts = self._facts_of(thing)
        except Exception as fault:
            FAULTS.note(f"description of a call of {entry.label}", fault)
            facts = ("", ())
        recording = self._shared.get((entry.label, facts))
        if recording is None:
            site = dataclasses.replace(make_site(method, name=entry.name), instance=facts[0], attributes=facts[1])
            recording = self._make_shared_recording(method, site, self._shared, (entry.label, facts))
        weakref.finalize(thing, recordings.pop, id(thing), None)
        recordings[id(thing)] = recording
        return recording


class Frameworks(Instrumentor):
    """The instrumentor of a session's framework rules. Keras also needs the instrumentor of layer rules, from
    `layers()`."""

    def __init__(
        self,
        rules: Sequence[FrameworkRule],
        recorder: Recorder = RECORDER,
        layers: Callable[[], Layers | None] = lambda: None,
    ) -> None:
        super().__init__(rules, recorder)
        self.observers: list[Observer] = []
        """The instrumentors in the order of the profile, one per framework."""
        for rule in rules:
            if rule.name in ENTRIES:
                self.observers.append(Entries(rule, recorder))
            options = [layers()] if rule.name == "keras" else []
            if rule.name in OBSERVERS and None not in options:
                observer = getattr(import_module("instrument.instrumentors.jax_keras_sklearn"), OBSERVERS[rule.name])
                self.observers.append(observer(rule, recorder, *options))

    def may_match(self, module_name: str) -> bool:
        return any(observer.may_match(module_name) for observer in self.observers)

    def attach_to(self, module: ModuleType) -> bool:
        observers = [observer for observer in self.observers if observer.may_match(module.__name__)]
        copied = [observer.attach_to(module) for observer in observers]
        return any(copied)

    def undo(self) -> None:
        for observer in reversed(self.observers):
            observer.undo()

    def verdicts(self) -> list[Verdict]:
        return [verdict for observer in self.observers for verdict in observer.verdicts()]
