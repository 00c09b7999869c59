"""Hugging Face transformers: `generate` by the class of the model, calls of pipelines by their task.

A pipeline that is called with a data set or a generator returns at once and works as its result is read: its span is
that of the call alone, while what it calls (`generate`, layers) records as it runs.
"""

from __future__ import annotations

from typing import Any

from instrument.instrumentors.frameworks.entries import Entries, Entry, Facts
from instrument.profile.model import FrameworkRule
from instrument.recorder.recorder import RECORDER, Recorder

ENTRIES = [
    Entry(("transformers.generation.utils",), "GenerationMixin", "generate", "transformers.generate"),
    Entry(("transformers.pipelines.base",), "Pipeline", "__call__", "transformers.pipeline"),
]


def facts_of(subject: Any) -> Facts:
    """The task of a pipeline, the class of a model."""
    task = getattr(subject, "task", None)
    return task if isinstance(task, str) and task else type(subject).__name__, ()


def probes(rule: FrameworkRule, recorder: Recorder = RECORDER) -> Entries:
    """The probes of the rule."""
    return Entries(rule, ENTRIES, facts_of, recorder=recorder)
