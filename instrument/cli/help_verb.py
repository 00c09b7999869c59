"""`instrument help`: print a topic of the documentation."""

from __future__ import annotations

import argparse
import pydoc
from collections.abc import Mapping
from pathlib import Path

from instrument.cli.option_values import Verbs, suggest_name
from instrument.errors import InstrumentError

FOLDER = Path(__file__).parent.parent / "docs"


def add_verbs(verbs: Verbs) -> None:
    parser = verbs.add_parser("help", help="print a topic of the documentation, or the list of topics")
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help="the topic to print (default: list all)")
    parser.set_defaults(verb=show_topic)


def find_topics() -> Mapping[str, Path]:
    return {path.stem.lower(): path for path in sorted(FOLDER.glob("*.md"), key=lambda path: path.stem.lower())}


def show_topic(options: argparse.Namespace, host: list[str]) -> int:
    """Print a topic of the documentation. Returns the exit code. Raises `InstrumentError` for an unknown topic."""
    pages = find_topics()
    if options.topic is None:
        width = max(map(len, pages))
        print("Topics, for `instrument help TOPIC`:\n")
        for name, path in pages.items():
            print(f"  {name:{width}}  {find_topic_summary(path.read_text('utf-8'))}")
        print("\nThe options of a command: `instrument COMMAND --help`.")
        return 0
    name = options.topic.lower()
    if name not in pages:
        hint = suggest_name(name, pages)
        raise InstrumentError(f"help: there is no topic {options.topic!r}; allowed: {', '.join(pages)}{hint}")
    pydoc.pager(pages[name].read_text("utf-8"))
    return 0


def find_topic_summary(text: str) -> str:
    return text.split("\n", 3)[2]
