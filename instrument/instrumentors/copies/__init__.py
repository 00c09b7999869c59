"""Record memory copies between host and device: each copying call of a framework is a span with direction and bytes.

When the service imports a framework, the framework's adapter replaces the functions that copy. A call that moves no
data has no span.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from instrument.instrumentors.copies.array_copies import CUDA, CUPY, JAX, NUMBA, NUMPY, ONNXRUNTIME
from instrument.instrumentors.copies.torch_copies import TORCH, why_absent
from instrument.instrumentors.copies.transfers import FrameworkAdapter, PatchedFunctions, Transfers
from instrument.instrumentors.verdict import Verdict
from instrument.profile.model import CopyRule
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.runtime.faults import FAULTS

ADAPTERS = (TORCH, CUPY, NUMBA, CUDA, ONNXRUNTIME, JAX, NUMPY)


class Copies(Transfers):
    """The instrumentor of a session's rules for copies."""

    def __init__(self, rules: Sequence[CopyRule], recorder: Recorder = RECORDER) -> None:
        super().__init__(rules, recorder)
        self._adapters = self._choose_adapters()
        self._attached: dict[str, PatchedFunctions] = {}
        self._met: dict[str, FrameworkAdapter] = {}  # by module, also when its own functions are back
        self._absent: dict[str, str] = {}

    def _choose_adapters(self) -> dict[str, FrameworkAdapter]:
        adapters = [adapter for adapter in ADAPTERS if self.selects(adapter.framework, adapter.directions)]
        return {name: adapter for adapter in adapters for name in adapter.modules}

    def probes_by_name(self) -> Mapping[str, Any]:
        """Return the rules by their text. There are none before a framework is imported."""
        return {rule.text: rule for rule in self.rules} if self._attached else {}

    def may_match(self, module_name: str) -> bool:
        """Return True if a rule selects copies of a framework that the module belongs to."""
        return module_name in self._adapters

    def attach_to(self, module: ModuleType) -> bool:
        """Replace the functions of an imported framework that copy."""
        name = module.__name__
        adapter = self._adapters[name]
        if name in self._attached:
            return False
        why = why_absent(module) if adapter.framework == "torch" else ""
        if why and not self.selects(adapter.framework, ("h2h",)):
            self._absent[adapter.framework] = why
            return False
        before = len(self.patched)
        try:
            patched = adapter.attach(module, self)
            patched.bind()
            self._attached[name], self._met[name] = patched, adapter
        except Exception as fault:
            # An unknown version of the framework: restore what was replaced.
            while len(self.patched) > before:
                self.patched.pop().undo()
            self._absent[adapter.framework] = f"its copies cannot be observed: {type(fault).__name__}: {fault}"
            FAULTS.note(f"copy probe of {adapter.framework}", fault)
        return False

    def undo(self) -> None:
        """Restore the functions of all frameworks."""
        while self.patched:
            self.patched.pop().undo()
        self._attached.clear()

    def verdicts(self) -> list[Verdict]:
        """Return the verdicts on all rules, then one per framework on copies that cannot be recorded."""
        met = {adapter.framework: adapter for adapter in self._met.values()}
        verdicts = [self._make_verdict(rule, hits, met) for rule, hits in zip(self.rules, self.hits, strict=True)]
        verdicts += [Verdict("copies", "partly", name, f"not seen: {adapter.unseen}") for name, adapter in met.items()]
        return verdicts

    def _make_verdict(self, rule: CopyRule, hits: int, met: dict[str, FrameworkAdapter]) -> Verdict:
        if hits:
            return Verdict(rule.text, "attached", why=f"{hits} copies")
        names = list(dict.fromkeys(adapter.framework for adapter in self._adapters.values()))
        names = [name for name in names if name in rule.frameworks]
        reasons = ["no such copy was made"] if any(name in met for name in names) else []
        reasons += dict.fromkeys(self._absent[name] for name in names if name in self._absent)
        if reasons:
            return Verdict(rule.text, "waiting", why="; ".join(reasons))
        if not names:
            return Verdict(rule.text, "not found", why=f"{', '.join(rule.frameworks)} makes no such copies")
        shown = names[0] if len(names) == 1 else f"none of {', '.join(names)}"
        return Verdict(rule.text, "waiting", why=f"{shown} {'not ' if len(names) == 1 else ''}imported")
