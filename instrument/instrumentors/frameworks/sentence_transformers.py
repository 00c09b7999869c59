"""sentence-transformers: `encode` of dense, sparse and multi-vector models and `predict` of cross encoders."""

from __future__ import annotations

from typing import Any

from instrument.instrumentors.frameworks.entries import Entries, Entry, Facts
from instrument.profile.model import FrameworkRule
from instrument.recorder.recorder import RECORDER, Recorder

ENTRIES = [
    Entry(
        # The second is where older versions define the class.
        (f"sentence_transformers.{package}.model", f"sentence_transformers.{before}"),
        owner,
        method,
        f"sentence_transformers.{method}",
    )
    for package, before, owner, method in (
        ("sentence_transformer", "SentenceTransformer", "SentenceTransformer", "encode"),
        ("sparse_encoder", "sparse_encoder.SparseEncoder", "SparseEncoder", "encode"),
        ("cross_encoder", "cross_encoder.CrossEncoder", "CrossEncoder", "predict"),
    )
]


def facts_of(model: Any) -> Facts:
    """The class of the model."""
    return type(model).__name__, ()


def probes(rule: FrameworkRule, recorder: Recorder = RECORDER) -> Entries:
    """The probes of the rule."""
    return Entries(rule, ENTRIES, facts_of, by_class=True, recorder=recorder)
