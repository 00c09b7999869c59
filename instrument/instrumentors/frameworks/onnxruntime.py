"""ONNX Runtime: each run of a session, named by the model's file, with its providers as facts of the site.

The span of `run_async` is that of the call, which only hands the work over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from instrument.instrumentors.frameworks.entries import Entries, Entry, Facts
from instrument.instrumentors.frameworks.nodes import MODULE, RUNS, Nodes, instance_of
from instrument.profile.model import FrameworkRule
from instrument.recorder.recorder import RECORDER, Recorder

METHODS = (*RUNS, "run_async")
ENTRIES = [Entry((MODULE,), "Session", method, f"onnxruntime.{method}") for method in METHODS]


def facts_of(session: Any) -> Facts:
    """The file that the model was loaded from, and the providers that the session was given."""
    return instance_of(session), (("providers", tuple(session.get_providers())),)


def probes(rule: FrameworkRule, recorder: Recorder = RECORDER) -> Iterator[Entries | Nodes]:
    """The probes of the rule, with those of nodes where it asks for them."""
    yield Entries(rule, ENTRIES, facts_of, recorder=recorder)
    if rule.nodes:
        yield Nodes(rule, recorder)
