"""Frameworks whose own entry points record: one room each. None is ever imported by us, only met when the host has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from instrument.instrumentors.frameworks import jax, keras, onnxruntime, sentence_transformers, sklearn, transformers
from instrument.instrumentors.frameworks.entries import Entries
from instrument.instrumentors.layers import Layers
from instrument.instrumentors.verdict import Verdict
from instrument.profile.model import FrameworkRule
from instrument.recorder.recorder import RECORDER, Recorder

Room = Entries | jax.Jitted | keras.KerasLayers | sklearn.Estimators


def _none() -> None:
    return None


ROOMS: Mapping[str, Callable[[FrameworkRule, Recorder], Room]] = {
    "jax": jax.probes,
    "onnxruntime": onnxruntime.probes,
    "transformers": transformers.probes,
    "sentence_transformers": sentence_transformers.probes,
    "sklearn": sklearn.probes,
}


class Frameworks:
    """The framework rules of one session at work. `layers` gives the profile's layer rules, which Keras serves too."""

    def __init__(
        self, rules: Sequence[FrameworkRule], recorder: Recorder = RECORDER, layers: Callable[[], Layers | None] = _none
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
        """Whether a framework has an entry point in that module."""
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
        """What became of every rule up to now, in the order of the profile."""
        return [verdict for room in self.rooms for verdict in room.verdicts()]
