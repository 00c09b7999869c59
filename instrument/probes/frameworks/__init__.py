"""Frameworks whose own entry points record: one room each. None is ever imported by us, only met when the host has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from instrument.probes.frameworks import jax, keras, onnxruntime, sentence_transformers, sklearn, transformers
from instrument.probes.frameworks.entries import Entries
from instrument.probes.frameworks.nodes import Nodes
from instrument.probes.layers import Layers
from instrument.profile import FrameworkRule
from instrument.recorder import RECORDER, Recorder

Room = Entries | Nodes | jax.Jitted | keras.KerasLayers | sklearn.Estimators

ROOMS: Mapping[str, Callable[[FrameworkRule, Recorder], Room]] = {
    "jax": jax.probes,
    "transformers": transformers.probes,
    "sentence_transformers": sentence_transformers.probes,
    "sklearn": sklearn.probes,
}


def probes(
    rules: Iterable[FrameworkRule], layers: Layers | None = None, recorder: Recorder = RECORDER
) -> Iterator[Room]:
    """The probes of each framework that the profile takes. `layers` are the profile's layer rules, for Keras."""
    for rule in rules:
        if rule.name == "keras":
            yield from keras.probes(rule, layers, recorder)
        elif rule.name == "onnxruntime":
            yield from onnxruntime.probes(rule, recorder)
        else:
            yield ROOMS[rule.name](rule, recorder)
