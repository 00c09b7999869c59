"""The text of every view of every trace, under every option, compared with the recorded answers.

    python tests/oracle/compare.py [--trace NAME] [--view V] [--through recording] [--spans N] [--update]

The answers are in `answers.json` as digests. Each trace and view has the digest of the answer without options, and the
digests of options that change the answer. `answers.xz` has the texts of most answers with all options or none, to show
a change. The program exits with 1 and prints the first difference of each view if there is a difference. The option
`--update` records the current answers, for a change on purpose: the commit gives the reason. With `--spans 1000000` the
program uses the trace of `tests/bench/views.py` of that size. It compares the ways of reading that trace with one
another, in place of digests.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import lzma
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from oracle.recordings import ALL, Made, bench

from instrument import chrome
from instrument.errors import TraceError
from instrument.profile.model import SORT_KEYS, STATES, TRACER_OPTIONS, VIEWS
from instrument.report.section import format_summary, summary_document
from instrument.report.view import Options, Recording
from instrument.trace import file

DIGESTS = Path(__file__).with_name("answers.json")
TEXTS = Path(__file__).with_name("answers.xz")
PLAIN = "no options"

OPTIONS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "text": {},
    **{word: {"tracer_option": word} for word in TRACER_OPTIONS[1:]},
    **{f"state {word}": {"state": word} for word in STATES if word != "All"},
    **{f"by {word}": {"sorted_by": word} for word in SORT_KEYS if word != "default"},
    **{f"threads {word}": {"threads": word} for word in ("merged", "apart")},
    "rows": {"rows": 3},
    "corrected": {"corrected": True},
    "least": {"least_ns": 20_000},
    "skip first": {"skip_first": 2},
    "full on devices": {
        "tracer_option": "AllOpDetail",
        "state": "GPU",
        "sorted_by": "gpu_max",
        "threads": "apart",
        "rows": 5,
    },
    "full on the host": {"tracer_option": "AllOpDetail", "state": "CPU", "sorted_by": "ave", "least_ns": 1_000},
}
"""Every option by a name; `text` is the answer as text."""

FEW = (PLAIN, "text", "OpDetail", "state GPU", "full on devices", "full on the host", "corrected")
"""The options of large traces."""

SHOWN, SHOWN_CHARACTERS = (PLAIN, "full on devices", "full on the host"), 60_000
"""The options whose texts are kept, and the longest of those texts."""


def through_recording(path: Path) -> Recording:
    """The trace as a recording has it that was saved of it; one that is not sound as it is, for none has that."""
    saved = chrome.read(path)
    tally = None if saved.trace.origin.recorder == "other" else saved.read_or_count_totals()
    with tempfile.TemporaryDirectory() as folder:
        try:
            return Recording.from_file(file.load(file.dump(Path(folder, "recording.npz"), saved.trace, tally)))
        except TraceError:
            return Recording.from_file(saved)


WAYS: dict[str, Callable[[Path], Recording]] = {
    "chrome": lambda path: Recording.from_file(chrome.read(path)),
    "recording": through_recording,
}
"""The ways in which a trace comes into a report."""


def written(name: str, made: Made, folder: Path) -> Path:
    """The file of a trace."""
    if made.file is not None:
        return made.file
    path = folder / f"{name}.json"
    if made.write is not None:
        made.write(path)
    else:
        assert made.make is not None
        chrome.dump(path, made.make())
    return path


def answer(recording: Recording, view: str, option: str) -> str:
    """Return the answer of a view as text, or the error that it raises."""
    options = Options.from_mapping(OPTIONS[option])
    try:
        if option == "text":
            return format_summary([view], recording, options)
        document = summary_document([view], recording, options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    del document["options"]
    return json.dumps(document, indent=1)


def answers(
    folder: Path, names: Sequence[str], views: Sequence[str], way: str, few: bool = False
) -> Iterator[tuple[str, str, str, str]]:
    """Trace, view, option and the answer of each."""
    for name in names:
        made = ALL[name]
        recording = WAYS[way](written(name, made, folder))
        for view in views:
            for option in FEW if few or made.large else OPTIONS:
                yield name, view, option, answer(recording, view, option)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def expected(kept: dict[str, dict[str, str]], name: str, view: str, option: str) -> str | None:
    """The digest of an answer, None where none is kept."""
    of_view = kept.get(f"{name}: {view}", {})
    return of_view.get(option, of_view.get(PLAIN) if option != "text" else None)


def kept_texts() -> dict[str, str]:
    """The texts of answers by their digests."""
    found: dict[str, str] = json.loads(lzma.decompress(TEXTS.read_bytes())) if TEXTS.exists() else {}
    return found


def difference(before: str | None, now: str) -> str:
    """The first lines that differ."""
    if before is None:
        return "(the answer of before is not kept: make it with a checkout of before)\n" + now[:2_000]
    lines = difflib.unified_diff(before.splitlines(), now.splitlines(), "before", "now", "", "", 4, "")
    return "\n".join(line for line, _ in zip(lines, range(40), strict=False))


def differences(
    folder: Path, names: Sequence[str], views: Sequence[str] = tuple(VIEWS), way: str = "chrome", few: bool = False
) -> list[tuple[str, str, str, str]]:
    """Return trace, view, option and new answer of each answer that has changed."""
    kept = json.loads(DIGESTS.read_text())
    return [
        (name, view, option, text)
        for name, view, option, text in answers(folder, names, views, way, few)
        if digest(text) != expected(kept, name, view, option)
    ]


def update(folder: Path) -> None:
    """Keep what is said now."""
    digests: dict[str, dict[str, str]] = {}
    texts: dict[str, str] = {}
    for name, view, option, text in answers(folder, list(ALL), list(VIEWS), "chrome"):
        of_view = digests.setdefault(f"{name}: {view}", {})
        if option == PLAIN or digest(text) != of_view[PLAIN]:
            of_view[option] = digest(text)
        if option in SHOWN and len(text) <= SHOWN_CHARACTERS:
            texts[digest(text)] = text
    DIGESTS.write_text(json.dumps(digests, indent=1) + "\n")
    TEXTS.write_bytes(lzma.compress(json.dumps(texts).encode(), preset=9 | lzma.PRESET_EXTREME))


def by_every_way(folder: Path, count: int) -> int:
    """Return the number of answers that differ between the ways in which a trace of that size is read."""
    path = folder / "bench.json.gz"
    chrome.dump(path, bench(count))
    found: dict[tuple[str, str], set[str]] = {}
    for open_with in WAYS.values():
        recording = open_with(path)
        for view in VIEWS:
            for option in FEW:
                found.setdefault((view, option), set()).add(digest(answer(recording, view, option)))
    for (view, option), its in found.items():
        print(f"{view}, {option}: {', '.join(sorted(its))}")
    return sum(len(its) > 1 for its in found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", choices=list(ALL), action="append", help="this one alone; may be given again")
    parser.add_argument("--view", choices=list(VIEWS), action="append", help="this one alone; may be given again")
    parser.add_argument("--through", choices=list(WAYS), default="chrome")
    parser.add_argument("--spans", type=int)
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.spans:
            return int(by_every_way(folder, options.spans) > 0)
        if options.update:
            update(folder)
            return 0
        found = differences(folder, options.trace or list(ALL), options.view or list(VIEWS), options.through)
    kept, digests, shown = kept_texts(), json.loads(DIGESTS.read_text()), set[str]()
    for name, view, option, text in found:
        if view not in shown:
            shown.add(view)
            before = kept.get(expected(digests, name, view, option) or "")
            print(f"--- {view} of {name!r}, {option}:\n{difference(before, text)}\n")
    print(f"{len(found)} answers differ" + (f", of the views {', '.join(sorted(shown))}" if found else ""))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
