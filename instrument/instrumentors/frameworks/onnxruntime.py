"""ONNX Runtime: each run of a session, named by the model's file, with its providers as facts of the site.

The span of `run_async` is that of the call, which only hands the work over.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from instrument.instrumentors.frameworks.entries import Entries, Entry, Facts
from instrument.profile.model import FrameworkRule
from instrument.recorder.recorder import RECORDER, Recorder

MODULE = "onnxruntime.capi.onnxruntime_inference_collection"
METHODS = ("run", "run_with_ort_values", "run_with_iobinding", "run_with_ortvaluevector", "run_async")
ENTRIES = [Entry((MODULE,), "Session", method, f"onnxruntime.{method}") for method in METHODS]


def facts_of(session: Any) -> Facts:
    """Return the name of the file that the model was loaded from, and the providers that the session was given."""
    path = getattr(session, "_model_path", None)
    return PurePath(path).name if path else "(bytes)", (("providers", tuple(session.get_providers())),)


def probes(rule: FrameworkRule, recorder: Recorder = RECORDER) -> Entries:
    """Return the probes of the rule."""
    return Entries(rule, ENTRIES, facts_of, recorder=recorder)
