"""The interpreter that the host is run by, and commands that are waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interpreter_flags() -> list[str]:
    """The options that this interpreter was started with and that matter to the host."""
    flags = [f"-W{option}" for option in sys.warnoptions]
    flags += [f"-X{name}" if value is True else f"-X{name}={value}" for name, value in sys._xoptions.items()]
    safe_path = getattr(sys.flags, "safe_path", False)
    for letter, value in (("B", sys.dont_write_bytecode), ("O", sys.flags.optimize), ("P", safe_path)):
        flags += [f"-{letter}"] * int(value)
    return flags


@contextmanager
def running(
    profile: str,
    host: list[str],
    environ: Mapping[str, str],
    hand_on: Callable[[subprocess.Popen[bytes], int], None],
    *,
    to_stderr: bool,
) -> Iterator[subprocess.Popen[bytes]]:
    """A command that runs under a profile, as by `instrument run`. Signals that would end us go to `hand_on`."""
    sys.stdout.flush()
    words = [sys.executable, *interpreter_flags(), "-m", "instrument", "run", "--profile", profile, "--", *host]
    child = subprocess.Popen(  # noqa: S603 - the user's own command
        words, env={**os.environ, **environ}, stdout=sys.stderr.fileno() if to_stderr else None
    )
    before = {number: signal.signal(number, lambda number, _: hand_on(child, number)) for number in ENDING}
    try:
        yield child
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
