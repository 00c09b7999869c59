"""Frameworks whose own entry points record. None is ever imported by us, only met when the host has.

Three have a table of entry points here. A span of ONNX Runtime's `run_async` is that of the call, which only hands the
work over. A pipeline of transformers that is called with a data set returns at once and works as its result is read:
its span is that of the call alone, while `generate` and layers record as they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from types import ModuleType
from typing import Any

from instrument.instrumentors.frameworks import jax, keras, sklearn
from instrument.instrumentors.frameworks.entries import Entries, Entry, Facts
from instrument.instrumentors.layers import Layers
from instrument.instrumentors.verdict import Verdict
from instrument.profile.model import FrameworkRule
from instrument.recorder.recorder import RECORDER, Recorder

Room = Entries | jax.Jitted | keras.KerasLayers | sklearn.Estimators


ONNXRUNTIME = "onnxruntime.capi.onnxruntime_inference_collection"
ONNXRUNTIME_METHODS = ("run", "run_with_ort_values", "run_with_iobinding", "run_with_ortvaluevector", "run_async")
_ENCODERS = (
    ("sentence_transformer", "SentenceTransformer", "SentenceTransformer", "encode"),
    ("sparse_encoder", "sparse_encoder.SparseEncoder", "SparseEncoder", "encode"),
    ("cross_encoder", "cross_encoder.CrossEncoder", "CrossEncoder", "predict"),
)
"""The package of a class of sentence-transformers, its module in older versions, its name and method."""


def _of_session(session: Any) -> Facts:
    """Return the name of the file that a model was loaded from, and the providers that its session was given."""
    path = getattr(session, "_model_path", None)
    return PurePath(path).name if path else "(bytes)", (("providers", tuple(session.get_providers())),)


def _of_model(subject: Any) -> Facts:
    """Return the task of a pipeline, the class of a model."""
    task = getattr(subject, "task", None)
    return task if isinstance(task, str) and task else type(subject).__name__, ()


def _entries(entries: Sequence[Entry], facts_of: Callable[[Any], Facts], by_class: bool) -> Callable[..., Entries]:
    return lambda rule, recorder: Entries(rule, entries, facts_of, by_class=by_class, recorder=recorder)


ROOMS: Mapping[str, Callable[[FrameworkRule, Recorder], Room]] = {
    "jax": jax.Jitted,
    "onnxruntime": _entries(
        [Entry((ONNXRUNTIME,), "Session", method, f"onnxruntime.{method}") for method in ONNXRUNTIME_METHODS],
        _of_session,
        by_class=False,
    ),
    "transformers": _entries(
        [
            Entry(("transformers.generation.utils",), "GenerationMixin", "generate", "transformers.generate"),
            Entry(("transformers.pipelines.base",), "Pipeline", "__call__", "transformers.pipeline"),
        ],
        _of_model,
        by_class=False,
    ),
    "sentence_transformers": _entries(
        [
            Entry(
                (f"sentence_transformers.{package}.model", f"sentence_transformers.{older}"),
                owner,
                method,
                f"sentence_transformers.{method}",
            )
            for package, older, owner, method in _ENCODERS
        ],
        _of_model,
        by_class=True,
    ),
    "sklearn": sklearn.Estimators,
}


class Frameworks:
    """The framework rules of one session at work. `layers` gives the profile's layer rules, which Keras serves too."""

    def __init__(
        self,
        rules: Sequence[FrameworkRule],
        recorder: Recorder = RECORDER,
        layers: Callable[[], Layers | None] = lambda: None,
    ) -> None:
        self._recorder = recorder
        self._layers = layers
        self._rooms: dict[FrameworkRule, list[Room]] = {}
        self.rules: tuple[FrameworkRule, ...] = ()
        self._take_on(rules)

    def _take_on(self, rules: Sequence[FrameworkRule]) -> None:
        self.rules = tuple(rules)
        for rule in rules:
            if rule not in self._rooms:
                self._rooms[rule] = list(self._made(rule))

    def _made(self, rule: FrameworkRule) -> Iterator[Room]:
        if rule.name == "keras":
            yield from keras.probes(rule, self._layers(), self._recorder)
        else:
            yield ROOMS[rule.name](rule, self._recorder)

    @property
    def rooms(self) -> list[Room]:
        """The rooms of all rules, in the order of the profile."""
        return [room for rule in self.rules for room in self._rooms[rule]]

    def wants(self, module_name: str) -> bool:
        """Return True where a framework has an entry point in that module."""
        return any(room.wants(module_name) for room in self.rooms)

    def imported(self, module: ModuleType) -> bool:
        """A module of a framework has been imported: attach to what it has."""
        copied = False
        for room in self.rooms:
            if room.wants(module.__name__):
                copied = room.imported(module) or copied
        return copied

    def change(self, rules: Sequence[FrameworkRule], modules: Iterable[ModuleType]) -> None:
        """Take on other rules: frameworks that both want stay as they are, but Keras, whose layers may have others."""
        for rule in [rule for rule in self._rooms if rule not in rules or rule.name == "keras"]:
            for room in reversed(self._rooms.pop(rule)):
                room.undo()
        before = {id(room) for rooms in self._rooms.values() for room in rooms}
        self._take_on(rules)
        for module in modules:
            for room in self.rooms:
                if id(room) not in before and room.wants(module.__name__):
                    room.imported(module)

    def probed(self) -> Mapping[str, Any]:
        """The rules at work, by their text."""
        return {rule.text: rule for rule in self.rules}

    def undo(self) -> None:
        """Take every probe off, last first."""
        for room in reversed(self.rooms):
            room.undo()

    def verdicts(self) -> list[Verdict]:
        """Return the verdict on every rule up to now, in the order of the profile."""
        return [verdict for room in self.rooms for verdict in room.verdicts()]
