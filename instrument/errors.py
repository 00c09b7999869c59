"""The exceptions that `instrument` raises. Callers of the package and the commands catch `InstrumentError`."""

from __future__ import annotations

from collections.abc import Sequence

ERROR_NAME_LIMIT = 200
"""The maximum length of an exception's class name in characters. A longer name is cut."""

_name_of = type.__dict__["__name__"].__get__


def error_name(error: BaseException) -> str:
    """Return the class name of an exception, cut to `ERROR_NAME_LIMIT`, without running code of the class."""
    return str.__getitem__(_name_of(type(error)), slice(ERROR_NAME_LIMIT))


class InstrumentError(Exception):
    """The base class of all exceptions that this package raises on purpose."""


class ProfileError(InstrumentError, ValueError):
    """A `profile.yaml` or an argument has mistakes.

    `problems` lists all mistakes. Those of a file start with `file:line:column`.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems: tuple[str, ...] = tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ProfileError], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


class TraceError(InstrumentError, ValueError):
    """A trace file cannot be read or written. The message names the file, the problem and a remedy."""


class StateError(InstrumentError, RuntimeError):
    """The session's state does not allow a call, such as a second `start`."""


class TargetError(InstrumentError, TypeError):
    """The argument of `profiled` or `scope` cannot be instrumented."""


class ExportError(InstrumentError, RuntimeError):
    """An export that the caller requested failed."""
