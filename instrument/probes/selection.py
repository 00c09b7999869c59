"""The profile's rules at work in this process: what each has matched so far, and what it cannot reach.

Targets are found when their module is imported, before the importer can bind their names, or at once where the module
is there already. Each family of rules knows which modules it wants and what to do with them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

from instrument import imports
from instrument.probes import frameworks
from instrument.probes.copies import Copies
from instrument.probes.frameworks.nodes import Nodes
from instrument.probes.functions import Undo, loaded_modules
from instrument.probes.layers import Layers
from instrument.probes.rules import Functions
from instrument.probes.verdict import Verdict
from instrument.profile import Profile
from instrument.recorder import RECORDER, Recorder
from instrument.spans import Span


class Probes(Protocol):
    """One family of a profile's rules. All methods are called by one thread at a time."""

    def wants(self, module_name: str) -> bool:
        """Whether a rule could have a target in that module. Asked at each import, before the module is there."""

    def imported(self, module: ModuleType) -> bool:
        """A wanted module's code has run: attach. Whether copies of what was replaced may be held elsewhere."""

    def undo(self) -> None:
        """Take every probe off, last first."""

    def verdicts(self) -> list[Verdict]:
        """What became of every rule up to now, in the order of the profile."""


class Selection:
    """Attaches the probes of a profile and takes them off again. One for each session.

    `late` names the modules with targets that had been imported before.
    """

    def __init__(self, profile: Profile, recorder: Recorder = RECORDER) -> None:
        self.profile = profile
        self._lock = threading.RLock()
        self._undo_imports: Undo | None = None
        self._families: list[Probes] = []
        if profile.functions:
            self._families.append(Functions(profile.functions, recorder))
        layers = Layers(profile.layers, recorder) if profile.layers else None
        if layers is not None:
            self._families.append(layers)
        if profile.copies:
            self._families.append(Copies(profile.copies, recorder))
        self._families.extend(frameworks.probes(profile.frameworks, layers, recorder))
        self._nodes = [family for family in self._families if isinstance(family, Nodes)]
        self.late: list[str] = []

    def attach(self) -> Undo:
        """Attach to what is imported, watch for the rest; returns the way back."""
        loaded = [module for name, module in loaded_modules() if self.wants(name)]
        self._undo_imports = imports.install(self.wants, self.imported)
        for module in loaded:
            if self.imported(module):
                self.late.append(module.__name__)
        return self.undo

    def after_fork_in_child(self) -> None:
        """Replace a lock that another thread of the parent may have held."""
        self._lock = threading.RLock()
        for nodes in self._nodes:
            nodes.after_fork_in_child()

    def undo(self) -> None:
        """Take every probe off, last first."""
        with self._lock:
            if self._undo_imports is not None:
                self._undo_imports()
                self._undo_imports = None
            for family in reversed(self._families):
                family.undo()

    def wants(self, module_name: str) -> bool:
        """Whether a rule could have a target in that module."""
        return any(family.wants(module_name) for family in self._families)

    def imported(self, module: ModuleType) -> bool:
        """A module's code has run: attach what the rules name in it. Whether copies of it may be held elsewhere."""
        copied = False
        with self._lock:
            for family in self._families:
                if family.wants(module.__name__):
                    copied = family.imported(module) or copied
        return copied

    def verdicts(self) -> list[Verdict]:
        """What became of every rule up to now, in the order of the profile."""
        with self._lock:
            return [verdict for family in self._families for verdict in family.verdicts()]

    def finish_nodes(self) -> None:
        """A window has ended: read what ONNX Runtime has timed by itself until now."""
        with self._lock:
            for nodes in self._nodes:
                nodes.finish()

    def nodes_within(self, spans: Sequence[Span]) -> list[Span]:
        """What ONNX Runtime has timed by itself within these spans; their self times then leave it out."""
        with self._lock:
            return [span for nodes in self._nodes for span in nodes.within(spans)]
