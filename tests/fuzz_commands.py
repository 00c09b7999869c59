"""Gives damaged recordings to the commands that read them: `python tests/fuzz_commands.py [inputs] [seed]`.

An input is a recording or a Chrome trace of two merged processes with some values or bytes changed within its members,
so that most of them pass the checks of the archive. Each command must answer or refuse with a message, in bounded
memory and processor time. Exits with 1 and names the kept input and the command if one does not.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_traces import changed_bytes
from numpy.typing import NDArray
from simulated_engine import ENGINE_THREAD, Lives

from instrument import chrome
from instrument.cli import main as command
from instrument.trace import file
from instrument.trace.merge import merge_recordings

COMMANDS = (
    ("explain",),
    ("explain", "--since", "0s", "--until", "1s", "--json"),
    ("compare", "good.npz"),
    ("report", "--view", "neighbours,requests", "--by", "tenant"),
    ("query", "--json", "SELECT s.name, a.* FROM spans s JOIN attributes a USING (span_id) ORDER BY ALL LIMIT 3"),
    ("convert", "--to", "parquet", "-o", "dataset"),
)
SLOWEST_S = 20.0
"""The processor time that a command may take for an input."""

NUMBER = re.compile(rb"-?\d+(\.\d+)?")
JUNK = (
    b"-1", b"0", b"null", b"1e999", b"NaN", b"9223372036854775807", b"-9223372036854775808", b"4611686018427387903",
    b'"x"', b"[]", b"{}", b"1.5", b"99999999999999999999", b"true",
)  # fmt: skip


def changed_text(chance: random.Random, text: bytes) -> bytes:
    """Return a text with a number replaced, or with damaged bytes."""
    if chance.random() < 0.2:
        return changed_bytes(chance, text)
    number = NUMBER.search(text, chance.randrange(len(text)))
    return text if number is None else text[: number.start()] + chance.choice(JUNK) + text[number.end() :]


def changed_column(chance: random.Random, column: NDArray[Any]) -> NDArray[Any]:
    """Return a column with another value, of another length, or as it was."""
    if not len(column) or chance.random() < 0.1:
        return column[: chance.randrange(len(column) + 1)]
    changed, limits = column.copy(), np.iinfo(column.dtype)
    at = chance.randrange(len(column))
    near = min(max(int(column[at]) + chance.choice((-1, 1, 2)), limits.min), limits.max)
    changed[at] = chance.choice((near, near, int(chance.choice(column)), limits.min, limits.max))
    return changed


def damaged(chance: random.Random, folder: Path, members: Mapping[str, NDArray[Any]], text: bytes) -> Path:
    """Write a damaged file and return it."""
    if chance.random() < 0.3:
        path = folder / "damaged.json"
        path.write_bytes(changed_text(chance, text))
        return path
    path, changed = folder / "damaged.npz", dict(members)
    for name in chance.choices([*members, *["metadata", "attributes_bytes"] * 4], k=chance.randrange(1, 3)):
        if name == "metadata":
            changed[name] = np.frombuffer(changed_text(chance, changed[name].tobytes()), dtype=np.uint8)
        elif name == "attributes_bytes":
            lengths = changed["attributes_lengths"].astype(np.int64)
            number = chance.randrange(max(len(lengths), 1))
            texts = changed[name].tobytes()
            first, last = int(lengths[:number].sum()), int(lengths[: number + 1].sum())
            part = changed_text(chance, texts[first:last])
            changed[name] = np.frombuffer(texts[:first] + part + texts[last:], dtype=np.uint8)
            lengths[number : number + 1] = len(part)
            changed["attributes_lengths"] = lengths
        else:
            changed[name] = changed_column(chance, changed[name])
    np.savez(path, **changed)
    return path


def find_fault(given: list[str]) -> tuple[str, int]:
    """Run a command. Return the reason why it failed, "" for an answer or a refusal, and its exit code."""
    problems = io.StringIO()
    started_s, code = time.process_time(), 0
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(problems):
            code = command(given)
    except BaseException as problem:
        return f"{problem!r}", code
    spent_s = time.process_time() - started_s
    if code == 2 and not problems.getvalue().startswith("instrument: "):
        return f"no message: {problems.getvalue()!r}", code
    return f"{spent_s:.0f} s of processor" if spent_s > SLOWEST_S else "", code


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    chance = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    codes, faults = Counter[str](), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chdir(folder)
        trace, _ = Lives(3, "processor contention", requests=14).run()
        for part in (0, 1):
            spans = [span for span in trace.spans if (span.thread_id == ENGINE_THREAD) == part]
            file.dump(f"{part}.npz", replace(trace, origin=replace(trace.origin, pid=7 + part, boot="b"), spans=spans))
        merged = merge_recordings([file.load(f"{part}.npz") for part in (0, 1)]).saved
        file.dump("merged.npz", merged.trace, merged.tally)
        file.dump("good.npz", trace)
        text = chrome.dump("merged.json", merged.trace).read_bytes()
        with np.load("merged.npz") as archive:
            members = dict(archive)
        for number in range(count):
            path = damaged(chance, folder, members, text)
            for verb, *more in COMMANDS:
                given = [verb, str(path), *more]
                fault, code = find_fault(given)
                codes[f"{verb} {code}"] += 1
                if fault:
                    kept = Path(tempfile.gettempdir(), f"instrument-fuzz-{number}{path.suffix}")
                    kept.write_bytes(path.read_bytes())
                    print(f"input {number}, kept as {kept}: {' '.join(given)}: {fault}", file=sys.stderr)
                    faults += 1
                if verb == "explain" and code == 2 and not fault and not _is_read(path):
                    break
    print(f"{count} inputs; exit codes by command: {dict(sorted(codes.items()))}")
    sys.exit(faults > 0)


def _is_read(path: Path) -> bool:
    """Return True if a file can be read: then each command has its own answer."""
    from instrument.cli.inputs import read_file
    from instrument.errors import TraceError

    with contextlib.suppress(TraceError):
        read_file(str(path))
        return True
    return False


if __name__ == "__main__":
    main()
