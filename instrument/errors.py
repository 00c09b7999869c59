"""The exceptions that `instrument` raises to its callers: from `start`, `stop`, commands, and readers of files."""

from __future__ import annotations

from collections.abc import Sequence

ERROR_NAME_LIMIT = 200
"""The maximum number of characters of the name of an exception's class."""

_name_of = type.__dict__["__name__"].__get__


def error_name(error: BaseException) -> str:
    """Return the name of an exception's class, cut to the limit. No code of the class runs."""
    return str.__getitem__(_name_of(type(error)), slice(ERROR_NAME_LIMIT))


class InstrumentError(Exception):
    """The base of every error that this package raises on purpose."""


class ProfileError(InstrumentError, ValueError):
    """A `profile.yaml` that cannot be used.

    `problems` holds every mistake of the file, each a line that starts with `file:line:column`.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems: tuple[str, ...] = tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ProfileError], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


class TraceError(InstrumentError, ValueError):
    """A trace file that cannot be read or written: what was asked, what was found, what to do."""


class StateError(InstrumentError, RuntimeError):
    """A call that the session's state does not allow, such as a second `start`."""


class TargetError(InstrumentError, TypeError):
    """An object that cannot be instrumented was passed to `profiled` or `scope`."""


class ExportError(InstrumentError, RuntimeError):
    """An explicitly requested export could not be delivered."""
