"""A service of two processes: a front that is asked, and an engine of its own that a queue leads to and one from."""

from __future__ import annotations

import textwrap

PROGRAM = """
import multiprocessing
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import core
import front
import instrument

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    asked, done = context.SimpleQueue(), context.SimpleQueue()
    engine = context.Process(target=core.loop, args=(asked, done))
    engine.start()
    done.get()
%s
    asked.put(None)
    engine.join()
    done.put(None)
"""


def beside_engine(front: str) -> str:
    """The program of a service whose front does that with `asked` and `done`, while `core.loop` serves these."""
    return PROGRAM % textwrap.indent(textwrap.dedent(front).strip(), "    ")
