"""Theano's flags that are about profiling: read from `THEANO_FLAGS`, or set as attributes of `theano.config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from instrument.errors import ProfileError
from instrument.runtime.faults import logger

_NO_GRAPH = "no graph is compiled here"

_REFUSED: Mapping[str, str] = {
    "profile_memory": "Profiler(torch={'profile_memory': True}) and the view memory tell what takes memory",
    "profile_optimizer": _NO_GRAPH,
    "print_global_stats": "the sum over all functions is printed at exit",
    "profiling.time_thunks": "every op that is recorded is timed",
    "profiling.output_line_width": "lines have 100 columns",
    "profiling.min_memory_size": "the view memory tells what takes memory",
    "profiling.min_peak_memory": _NO_GRAPH,
    "profiling.debugprint": _NO_GRAPH,
    "profiling.ignore_first_call": "the first call is counted; the view startup tells first calls apart",
}
"""Flags of profiling that are not honoured, and why."""

_AS_THEANO: Mapping[str, object] = {"profiling.time_thunks": True}
"""Values of them that ask for what is so anyway; of the others that is False."""

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


class _Flags:
    """Attributes that are flags, of which some are honoured: `_kinds` says of what type."""

    _prefix = ""
    _kinds: Mapping[str, type] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        flag = self._prefix + name
        if flag in _REFUSED:
            if value not in (_AS_THEANO.get(flag, False), str(_AS_THEANO.get(flag, False))):
                logger.warning("theano: %s: not honoured: %s", flag, _REFUSED[flag])
            return
        kind = self._kinds.get(name)
        if kind is None:
            if name != "profiling":
                logger.warning("theano: %s: not honoured: %s", flag, _NO_GRAPH)
                return
        elif type(value) is not kind or (isinstance(value, int) and kind is int and value < 1):
            allowed = {bool: "True or False", int: "a whole number from 1", str: "stderr, stdout or a path"}[kind]
            raise ProfileError([f"theano.config.{flag}: found {value!r}; allowed: {allowed}"])
        super().__setattr__(name, value)


class Profiling(_Flags):
    """``config.profiling``: how much is printed, and where."""

    _prefix = "profiling."
    _kinds: Mapping[str, type] = {"n_apply": int, "n_ops": int, "destination": str}

    n_apply: int
    n_ops: int
    destination: str

    def __init__(self) -> None:
        self.n_apply = self.n_ops = 20
        self.destination = "stderr"


class Config(_Flags):
    """Theano's `config`, as far as it is about profiling. Setting another flag is said in the log, and nothing else."""

    _kinds: Mapping[str, type] = {"profile": bool}

    profile: bool
    profiling: Profiling

    def __init__(self) -> None:
        self.profile = False
        self.profiling = Profiling()

    @classmethod
    def of(cls, flags: str) -> Config:
        """What a text such as ``profile=True,profiling.n_ops=10`` asks for; what is wrong in it is said in the log."""
        found = cls()
        for flag in filter(None, (part.strip() for part in flags.split(","))):
            name, _, text = flag.partition("=")
            owner: _Flags = found.profiling if name.startswith("profiling.") else found
            short = name.removeprefix("profiling.")
            try:
                setattr(owner, short, _value(text, owner._kinds.get(short)))
            except ProfileError as error:
                logger.warning("THEANO_FLAGS: %s", error)
        return found


def _value(text: str, kind: type | None) -> Any:
    """What a flag's text means; the text itself where it means nothing of that kind."""
    if kind is bool and text.lower() in (*_TRUE, *_FALSE):
        return text.lower() in _TRUE
    if kind is int and text.isdecimal():
        return int(text)
    return text
