"""Copies between host and device: torch's tensor methods, each as a copy span with direction and bytes.

A call that moves nothing (`out is self`, or both ends on the host) is not a copy and leaves no span. Where torch has
no device at all nothing is replaced. Times are host times of the call: what an asynchronous copy takes on the device
is the business of device intervals.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from instrument.errors import FAULTS
from instrument.probes.functions import Undo, replace, undo_all
from instrument.probes.verdict import Verdict
from instrument.profile import CopyRule
from instrument.recorder import RECORDER, Recorder
from instrument.spans import Site

CONVERTING = ("to", "cuda", "cpu", "type")
READING = ("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__")


def direction(source: Any, target: Any) -> str | None:
    """`h2d d2h d2d p2p` for two torch devices; None where both are the host's memory."""
    from_host, to_host = source.type == "cpu", target.type == "cpu"
    if from_host:
        return None if to_host else "h2d"
    if to_host:
        return "d2h"
    return "d2d" if source == target else "p2p"


def has_device(torch: Any) -> bool:
    """Whether this torch was built for a device. Does not touch the driver, which would spoil forked children."""
    version = getattr(torch, "version", None)
    return bool(getattr(version, "cuda", None) or getattr(version, "hip", None) or getattr(version, "xpu", None))


class Copies:
    """The copy rules of one session at work in torch. `hits` counts copies by rule."""

    def __init__(self, rules: Sequence[CopyRule], recorder: Recorder = RECORDER) -> None:
        self._at_work: tuple[tuple[CopyRule, ...], list[int]] = (tuple(rules), [0] * len(rules))
        self._recorder = recorder
        self._sites: dict[tuple[str, bool, bool], Site] = {}
        self._inside = threading.local()
        self._torch: ModuleType | None = None
        self._undos: list[Undo] = []

    @property
    def rules(self) -> tuple[CopyRule, ...]:
        return self._at_work[0]

    @property
    def hits(self) -> list[int]:
        return self._at_work[1]

    def change(self, rules: Sequence[CopyRule], modules: Iterable[ModuleType]) -> None:
        """Take on other rules; those that stay keep their count. Without rules torch has its own methods again."""
        before = dict(zip(*self._at_work, strict=True))
        self._at_work = (tuple(rules), [before.get(rule, 0) for rule in rules])
        if not rules:
            self.undo()
            self._torch = None
            return
        for module in modules:
            if self.wants(module.__name__):
                self.imported(module)

    def probed(self) -> Mapping[str, Any]:
        """The rules at work, by their text."""
        return {rule.text: rule for rule in self.rules} if self._undos else {}

    def wants(self, module_name: str) -> bool:
        """Whether copies are made by that module."""
        return module_name == "torch"

    def imported(self, module: ModuleType) -> bool:
        """torch has been imported: replace the methods that copy, unless it can have no device to copy to."""
        if self._torch is None:
            self._torch = module
            if has_device(module):
                self._undos.append(self.attach(module))
        return False

    def undo(self) -> None:
        """Give torch its own methods back."""
        undo_all(self._undos)

    def verdicts(self) -> list[Verdict]:
        """What became of every rule up to now, in the order of the profile."""
        if self._torch is None:
            return [Verdict(rule.text, "waiting", why="torch not imported") for rule in self.rules]
        if not has_device(self._torch):
            why = "this torch is built without a device: no copy to or from one can happen"
            return [Verdict(rule.text, "waiting", why=why) for rule in self.rules]
        return [
            Verdict(rule.text, "attached", why=f"{hits} copies")
            if hits
            else Verdict(rule.text, "waiting", why="no such copy was made")
            for rule, hits in zip(self.rules, self.hits, strict=True)
        ]

    def attach(self, torch: Any, *, initialised: Callable[[], bool] | None = None) -> Undo:
        """Replace the tensor methods; returns the way back.

        `initialised` tells whether the framework has begun to use its device (default `torch.cuda.is_initialized`,
        about 40 ns); until then each method costs that one call more.
        """
        ready = torch.cuda.is_initialized if initialised is None else initialised
        tensor = torch.Tensor
        compiling = getattr(getattr(torch, "compiler", None), "is_compiling", None) or (lambda: False)
        undos = [
            *self._replace(tensor, CONVERTING, lambda method: self._converting(method, ready, compiling)),
            *self._replace(tensor, READING, lambda method: self._reading(method, ready, compiling)),
            *self._replace(tensor, ("copy_",), lambda method: self._copying(method, ready, compiling)),
        ]

        return lambda: undo_all(undos)

    @staticmethod
    def _replace(tensor: Any, names: Iterable[str], wrap: Callable[[Any], Any]) -> list[Undo]:
        undos = []
        for name in names:
            method = getattr(tensor, name, None)
            if method is not None:
                undos.append(replace(tensor, name, functools.wraps(method)(wrap(method))))
        return undos

    def _converting(self, method: Any, ready: Callable[[], bool], compiling: Callable[[], bool]) -> Any:
        """For methods that return a tensor, the very same where there was nothing to do."""
        recorder = self._recorder

        def wrapper(self_: Any, *args: Any, **kwargs: Any) -> Any:
            if compiling() or not recorder.on or not ready():
                return method(self_, *args, **kwargs)
            out, start_ns = self._timed(method, self_, args, kwargs)
            if start_ns and out is not self_ and hasattr(out, "device"):
                self._note(self_, self_.device, out.device, start_ns, _is_asynchronous(args, kwargs))
            return out

        return wrapper

    def _reading(self, method: Any, ready: Callable[[], bool], compiling: Callable[[], bool]) -> Any:
        """For methods that bring values to Python: they wait for the device by themselves."""
        recorder = self._recorder

        def wrapper(self_: Any, *args: Any, **kwargs: Any) -> Any:
            if compiling() or not recorder.on or not ready() or self_.device.type == "cpu":
                return method(self_, *args, **kwargs)
            out, start_ns = self._timed(method, self_, args, kwargs)
            if start_ns:
                self._note(self_, self_.device, _HOST, start_ns, asynchronous=False)
            return out

        return wrapper

    def _copying(self, method: Any, ready: Callable[[], bool], compiling: Callable[[], bool]) -> Any:
        """For `target.copy_(source)`."""
        recorder = self._recorder

        def wrapper(self_: Any, *args: Any, **kwargs: Any) -> Any:
            source: Any = args[0] if args else kwargs.get("src", kwargs.get("other"))
            if compiling() or not recorder.on or not ready() or not hasattr(source, "device"):
                return method(self_, *args, **kwargs)
            out, start_ns = self._timed(method, self_, args, kwargs)
            if start_ns:
                self._note(source, source.device, self_.device, start_ns, _is_asynchronous(args, kwargs))
            return out

        return wrapper

    def _timed(self, method: Any, tensor: Any, args: Any, kwargs: Any) -> tuple[Any, int]:
        """The method's result and when it began; 0 inside another of these methods, which times the same copy.

        A tensor subclass's `__torch_function__` comes back to the methods of `torch.Tensor`.
        """
        if getattr(self._inside, "busy", False):
            return method(tensor, *args, **kwargs), 0
        self._inside.busy = True
        try:
            start_ns = time.monotonic_ns()
            return method(tensor, *args, **kwargs), start_ns
        finally:
            self._inside.busy = False

    def _note(self, moved: Any, source: Any, target: Any, start_ns: int, asynchronous: bool) -> None:
        """Record the copy that has just been made if a rule wants it."""
        try:
            way = direction(source, target)
            if way is None:
                return
            moved_bytes = moved.numel() * moved.element_size()
            rules, hits = self._at_work
            wanting = (i for i, rule in enumerate(rules) if way in rule.directions and moved_bytes >= rule.min_bytes)
            index = next(wanting, None)
            if index is None:
                return
            hits[index] += 1
            pinned = way == "h2d" and bool(moved.is_pinned())
            site = self._site(way, not asynchronous, pinned)
            self._recorder.record(site, start_ns, {"bytes": moved_bytes})
        except Exception as fault:
            FAULTS.note("copy probe", fault)

    def _site(self, way: str, sync: bool, pinned: bool) -> Site:
        key = (way, sync, pinned)
        site = self._sites.get(key)
        if site is None:
            facts = (("direction", way), ("sync", sync), ("pinned", pinned))
            # setdefault, because two threads may be first: one site for each key or the tally would split.
            site = self._sites.setdefault(key, Site(f"memcpy {way}", kind="copy", device=True, attributes=facts))
        return site


def _is_asynchronous(args: Any, kwargs: Any) -> bool:
    """Whether the call asked for `non_blocking`: by name, or as the first truth value, which comes before `copy`."""
    return bool(kwargs.get("non_blocking", next((argument for argument in args if isinstance(argument, bool)), False)))


class _Host:
    """Stands for the host's memory where torch does not hand a device over."""

    type = "cpu"


_HOST = _Host()
