"""The interpreter that the host is run by."""

from __future__ import annotations

import sys


def interpreter_flags() -> list[str]:
    """The options that this interpreter was started with and that matter to the host."""
    flags = [f"-W{option}" for option in sys.warnoptions]
    flags += [f"-X{name}" if value is True else f"-X{name}={value}" for name, value in sys._xoptions.items()]
    safe_path = getattr(sys.flags, "safe_path", False)
    for letter, value in (("B", sys.dont_write_bytecode), ("O", sys.flags.optimize), ("P", safe_path)):
        flags += [f"-{letter}"] * int(value)
    return flags
