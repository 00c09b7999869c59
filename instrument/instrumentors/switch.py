"""Switches: what a key of the profile turns on as a whole, `auto` or off, in one module that the host imports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

from instrument.instrumentors.functions import Undo, undo_all
from instrument.recorder.recorder import RECORDER, Recorder


class Switch(ABC):
    """One `key` of the profile at work: `rules` is empty where it is off.

    `_attached` while it is; `_met` tells, also afterwards, that the module was there.
    """

    key: ClassVar[str]
    module: ClassVar[str]
    """The name of the module that has what is to be recorded."""

    def __init__(self, rules: Sequence[str] = ("auto",), recorder: Recorder = RECORDER) -> None:
        self.rules = tuple(rules)
        self._recorder = recorder
        self._undos: list[Undo] = []
        self._attached = False
        self._met = False

    def change(self, rules: Sequence[str], modules: Iterable[ModuleType]) -> None:
        """Turn it on or off; `modules` are those that the host has imported."""
        self.rules = tuple(rules)
        if not rules:
            self.undo()
            return
        for module in modules:
            if self.wants(module.__name__):
                self.imported(module)

    def probed(self) -> Mapping[str, Any]:
        """The key, where it is at work."""
        return {self.key: True} if self._attached else {}

    def wants(self, module_name: str) -> bool:
        """Return True where that module is the one."""
        return module_name == self.module

    def _attach(self) -> None:
        self._attached = self._met = True

    @abstractmethod
    def imported(self, module: Any) -> bool:
        """Put the probes on, as the module is imported."""

    def undo(self) -> None:
        """Give everything its own functions back."""
        undo_all(self._undos)
        self._attached = False
