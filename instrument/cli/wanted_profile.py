"""Which profile `run` and `check` take: the one that is named, else a preset."""

from __future__ import annotations

import argparse
import os
import sys

from instrument.errors import InstrumentError
from instrument.profile.presets import PRESETS, path_of

DEFAULT = f"default: the variable INSTRUMENT_PROFILE, else the preset {PRESETS[0]}"

WITHOUT_PROFILE = (
    f"no profile, so the preset {PRESETS[0]} (`instrument check --preset {PRESETS[0]}` prints it; "
    f"for training loops: --preset {PRESETS[1]})"
)


def wanted(options: argparse.Namespace) -> tuple[str, bool]:
    """The file of the profile that `run` or `check` is to take, and whether nobody has named one."""
    if options.profile and options.preset:
        raise InstrumentError(
            f"found both the profile {options.profile} and --preset {options.preset}; give one of them, or put the "
            f"line `preset: {options.preset}` into the profile"
        )
    of_variable = os.environ.get("INSTRUMENT_PROFILE", "")
    if of_variable and not (options.preset or options.profile or os.access(of_variable, os.R_OK)):
        print(f"instrument: INSTRUMENT_PROFILE: found {of_variable!r}, which cannot be read", file=sys.stderr)
        of_variable = ""
    named = path_of(options.preset) if options.preset else options.profile or of_variable
    return named or path_of(PRESETS[0]), not named
