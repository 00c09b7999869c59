"""Copies between host and device, framework by framework, each as a copy span with direction and bytes.

A room has the functions of one framework that copy. It is used once the host has imported that framework, and never
imports it. A call that moves nothing is not a copy and leaves no span.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from instrument.instrumentors.copies.array_copies import CUDA, CUPY, JAX, NUMBA, NUMPY, ONNXRUNTIME
from instrument.instrumentors.copies.torch_copies import TORCH, why_absent
from instrument.instrumentors.copies.transfers import Places, Room, Transfers
from instrument.instrumentors.verdict import Verdict
from instrument.profile.model import CopyRule
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.runtime.faults import FAULTS

ROOMS = (TORCH, CUPY, NUMBA, CUDA, ONNXRUNTIME, JAX, NUMPY)


class Copies(Transfers):
    """The copy rules of one session at work."""

    def __init__(self, rules: Sequence[CopyRule], recorder: Recorder = RECORDER) -> None:
        super().__init__(rules, recorder)
        self._rooms = self._wanted()
        self._attached: dict[str, Places] = {}
        self._met: dict[str, Room] = {}  # by module, also when its own functions are back
        self._absent: dict[str, str] = {}

    def _wanted(self) -> dict[str, Room]:
        return {name: room for room in ROOMS if self.asks_for(room.framework, room.ways) for name in room.modules}

    def change(self, rules: Sequence[CopyRule], modules: Iterable[ModuleType]) -> None:
        """Take on other rules; those that stay keep their count, frameworks that none means their own functions."""
        self.take_on(rules)
        self._rooms = self._wanted()
        self._absent.clear()
        if not rules:
            self.undo()
            return
        for name in [name for name in self._attached if name not in self._rooms]:
            places = self._attached.pop(name)
            del self._met[name]
            self.places.remove(places)
            places.undo()
        for module in modules:
            if self.wants(module.__name__):
                self.imported(module)

    def probed(self) -> Mapping[str, Any]:
        """Return the rules at work, by their text."""
        return {rule.text: rule for rule in self.rules} if self._attached else {}

    def wants(self, module_name: str) -> bool:
        """Return True where copies that a rule asks for are made by that module."""
        return module_name in self._rooms

    def imported(self, module: ModuleType) -> bool:
        """Replace the functions of a framework that copy, as it has been imported."""
        name = module.__name__
        room = self._rooms[name]
        if name in self._attached:
            return False
        why = why_absent(module) if room.framework == "torch" else ""
        if why and not self.asks_for(room.framework, ("h2h",)):
            self._absent[room.framework] = why
            return False
        before = len(self.places)
        try:
            places = room.attach(module, self)
            places.bind()
            self._attached[name], self._met[name] = places, room
        except Exception as fault:
            # Another version of the framework than those we know.
            while len(self.places) > before:
                self.places.pop().undo()
            self._absent[room.framework] = f"its copies cannot be observed: {type(fault).__name__}: {fault}"
            FAULTS.note(f"copy probe of {room.framework}", fault)
        return False

    def undo(self) -> None:
        """Give every framework its own functions back."""
        while self.places:
            self.places.pop().undo()
        self._attached.clear()

    def verdicts(self) -> list[Verdict]:
        """Return the verdict on every rule up to now, then those on copies that cannot be seen."""
        met = {room.framework: room for room in self._met.values()}
        verdicts = [self._verdict(rule, hits, met) for rule, hits in zip(self.rules, self.hits, strict=True)]
        verdicts += [Verdict("copies", "partly", name, f"not seen: {room.unseen}") for name, room in met.items()]
        return verdicts

    def _verdict(self, rule: CopyRule, hits: int, met: dict[str, Room]) -> Verdict:
        if hits:
            return Verdict(rule.text, "attached", why=f"{hits} copies")
        rooms = [room for room in self._rooms.values() if room.framework in rule.frameworks]
        reasons = ["no such copy was made"] if any(room.framework in met for room in rooms) else []
        reasons += dict.fromkeys(self._absent[room.framework] for room in rooms if room.framework in self._absent)
        if reasons:
            return Verdict(rule.text, "waiting", why="; ".join(reasons))
        names = list(dict.fromkeys(room.framework for room in rooms))
        if not names:
            return Verdict(rule.text, "not found", why=f"{', '.join(rule.frameworks)} makes no such copies")
        shown = names[0] if len(names) == 1 else f"none of {', '.join(names)}"
        return Verdict(rule.text, "waiting", why=f"{shown} {'not ' if len(names) == 1 else ''}imported")
