"""Record the calls of entry points, by which a service uses machine learning frameworks, such as Keras's `predict`.

A framework is instrumented when the service imports it. The span of ONNX Runtime's `run_async` covers only the call,
which returns before the work is done. If a transformers pipeline gets a dataset, its span covers only the call, too,
because the pipeline works while its result is read. The pipeline's calls of `generate` and of layers are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from types import ModuleType
from typing import Any

from instrument.instrumentors.frameworks import jax, keras, sklearn
from instrument.instrumentors.frameworks.entries import Entries, Entry, Facts
from instrument.instrumentors.layers import Layers
from instrument.instrumentors.verdict import Verdict
from instrument.profile.model import FrameworkRule
from instrument.recorder.recorder import RECORDER, Recorder

Observer = Entries | jax.Jitted | keras.KerasLayers | sklearn.Estimators


ONNXRUNTIME = "onnxruntime.capi.onnxruntime_inference_collection"
ONNXRUNTIME_METHODS = ("run", "run_with_ort_values", "run_with_iobinding", "run_with_ortvaluevector", "run_async")
_ENCODERS = (
    ("sentence_transformer", "SentenceTransformer", "SentenceTransformer", "encode"),
    ("sparse_encoder", "sparse_encoder.SparseEncoder", "SparseEncoder", "encode"),
    ("cross_encoder", "cross_encoder.CrossEncoder", "CrossEncoder", "predict"),
)
"""The classes of sentence-transformers: subpackage, module in older versions, class and recorded method."""


def _describe_session(session: Any) -> Facts:
    """Return the file name of a session's model, and the session's providers as an attribute."""
    path = getattr(session, "_model_path", None)
    return PurePath(path).name if path else "(bytes)", (("providers", tuple(session.get_providers())),)


def _describe_model(subject: Any) -> Facts:
    """Return the task of a pipeline, or the class name of a model."""
    task = getattr(subject, "task", None)
    return task if isinstance(task, str) and task else type(subject).__name__, ()


def _make_entries(entries: Sequence[Entry], facts_of: Callable[[Any], Facts], by_class: bool) -> Callable[..., Entries]:
    return lambda rule, recorder: Entries(rule, entries, facts_of, by_class=by_class, recorder=recorder)


OBSERVERS: Mapping[str, Callable[[FrameworkRule, Recorder], Observer]] = {
    "jax": jax.Jitted,
    "onnxruntime": _make_entries(
        [Entry((ONNXRUNTIME,), "Session", method, f"onnxruntime.{method}") for method in ONNXRUNTIME_METHODS],
        _describe_session,
        by_class=False,
    ),
    "transformers": _make_entries(
        [
            Entry(("transformers.generation.utils",), "GenerationMixin", "generate", "transformers.generate"),
            Entry(("transformers.pipelines.base",), "Pipeline", "__call__", "transformers.pipeline"),
        ],
        _describe_model,
        by_class=False,
    ),
    "sentence_transformers": _make_entries(
        [
            Entry(
                (f"sentence_transformers.{package}.model", f"sentence_transformers.{older}"),
                owner,
                method,
                f"sentence_transformers.{method}",
            )
            for package, older, owner, method in _ENCODERS
        ],
        _describe_model,
        by_class=True,
    ),
    "sklearn": sklearn.Estimators,
}


class Frameworks:
    """The instrumentor of a session's rules for frameworks. `layers` returns that of its layer rules, for Keras."""

    def __init__(
        self,
        rules: Sequence[FrameworkRule],
        recorder: Recorder = RECORDER,
        layers: Callable[[], Layers | None] = lambda: None,
    ) -> None:
        self.rules = tuple(rules)
        self.observers: list[Observer] = []
        """The instrumentors of the single frameworks, in the order of the profile."""
        for rule in rules:
            if rule.name == "keras":
                self.observers += keras.probes(rule, layers(), recorder)
            else:
                self.observers.append(OBSERVERS[rule.name](rule, recorder))

    def may_match(self, module_name: str) -> bool:
        """Return True if a framework has an entry point in a module."""
        return any(observer.may_match(module_name) for observer in self.observers)

    def attach_to(self, module: ModuleType) -> bool:
        """Record the entry points of an imported module. Return True if functions were replaced."""
        copied = False
        for observer in self.observers:
            if observer.may_match(module.__name__):
                copied = observer.attach_to(module) or copied
        return copied

    def probes_by_name(self) -> Mapping[str, Any]:
        """Return the rules, by their text."""
        return {rule.text: rule for rule in self.rules}

    def undo(self) -> None:
        """Restore the entry points of all frameworks, the last first."""
        for observer in reversed(self.observers):
            observer.undo()

    def verdicts(self) -> list[Verdict]:
        """Return the verdicts on all rules, in the order of the profile."""
        return [verdict for observer in self.observers for verdict in observer.verdicts()]
