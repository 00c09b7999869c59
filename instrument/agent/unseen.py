"""The Python processes of a run that record nothing because our `sitecustomize` cannot begin a session in them.

Those that run it without effect, of an older Python or without our package, note that themselves. Others never load it:
the agent finds them below the run's first process as long as they live.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from instrument.agent.processes import PROC
from instrument.runtime import run_folder

NOTES_SUFFIX = ".unseen"
"""The suffix that the file of their notes adds to the name of the agent's socket. `sitecustomize` has it, too."""

LOOK_S = 1.0
"""Seconds between two looks of the agent for them."""

_INTERPRETER = re.compile(r"(?:python|pypy)[\d.]*t?")
_OPTIONS = re.compile(rb"-([A-Za-z]*?)([WXmc]|$)(.*)")
_AUTOSTART = os.fsencode(Path(__file__).parents[1] / "sessions/autostart")
_ENTRY = os.fsencode(Path(__file__).with_name("entry.py"))
_OFF = (b"off", b"0", b"false", b"no")


class Unseen:
    """Counts them for the run whose first process is `first`, by why they are not seen."""

    def __init__(self, socket: Path, first: int) -> None:
        self._notes = Path(f"{socket}{NOTES_SUFFIX}")
        with suppress(OSError):
            self._notes.touch(0o600)
        self._known: set[int] = set()
        self._family: dict[int, tuple[bytes, str]] = {first: (b"", "")}
        """Living processes of the run: the command of each as it was last looked at, and why it is not seen."""
        self._gone: Counter[str] = Counter()

    def look(self, joined: Collection[int]) -> None:
        """Look at what has begun since the last time, and what runs another command now."""
        with suppress(OSError):
            living = {int(name) for name in os.listdir(PROC) if name.isdecimal()}  # noqa: PTH208 - only the names
            for pid in self._family.keys() - living:
                self._gone[self._family.pop(pid)[1]] += 1
            begun = {pid: parent for pid in living - self._known if (parent := _parent_of(pid))}
            self._known = living
            while below := [pid for pid, parent in begun.items() if parent in self._family]:
                self._family.update(dict.fromkeys(below, (b"", "")))
                for pid in below:
                    del begun[pid]
        for pid, (command, _) in self._family.items():
            with suppress(OSError):
                now = (PROC / str(pid) / "cmdline").read_bytes()
                if now and now != command:
                    why = "" if pid in joined else self._why(PROC / str(pid), now.split(b"\0"))
                    self._family[pid] = now, why

    def _why(self, process: Path, words: list[bytes]) -> str:
        """Return why a process is not seen. Return "" where it is seen, or is none of Python."""
        if not _INTERPRETER.fullmatch((process / "exe").readlink().name) or _ENTRY in words:
            return ""
        options = iter(words[1:])
        for word in options:
            found = _OPTIONS.fullmatch(word)
            if found is None:
                break
            letters, last, rest = found.groups()
            if isolating := set(letters) & set(b"IES"):
                return f"-{chr(min(isolating))}"
            if last in (b"m", b"c"):
                break
            if last and not rest:
                next(options, None)  # the value of -W or -X
        given = dict(line.partition(b"=")[::2] for line in (process / "environ").read_bytes().split(b"\0"))
        agent, paths = given.get(os.fsencode(run_folder.VARIABLE)), given.get(b"PYTHONPATH", b"").split(b":")
        is_off = given.get(b"INSTRUMENT", b"").strip().lower() in _OFF
        return "" if (agent and _AUTOSTART in paths) or is_off else "its own environment"

    def sentence(self) -> str:
        """The number of those that have been found so far, and why each is not seen; "" for none."""
        counts = self._gone + Counter(why for _, why in self._family.values())
        with suppress(OSError, UnicodeDecodeError):
            noted = dict(line.split(" ", 1) for line in self._notes.read_text("utf-8").splitlines() if " " in line)
            counts.update(noted.values())
        del counts[""]
        if not counts:
            return ""
        named = "; ".join(f"{why} ({count})" if count > 1 else why for why, count in sorted(counts.items()))
        many = f"{counts.total()} Python processes of this run were" if counts.total() > 1 else "1 Python process was"
        return f"{many} not seen: {named}"


def _parent_of(pid: int) -> int:
    """The number of a process's parent, 0 where it has ended."""
    try:
        return int((PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0
