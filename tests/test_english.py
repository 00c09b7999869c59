"""The English of the sources, as far as a machine can count it: per folder counts that only fall."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "instrument"
SOURCES = {".py", ".c", ".h", ".js", ".css", ".html"}
CLAUSE = re.compile(r"(?:What|Which|How|Who|Whose|Whether|Where|When|Why|Of|So|As|That|Those|Such|For|If)\b")
PRIVATE_WORD = re.compile(
    r"\b(?:told|tell|tells|telling|beside|stands|lies|held|whoever|whatever|so many|of these|of those)\b", re.IGNORECASE
)
VAGUE_NAME = re.compile(
    r"(?:found|one|its|told|beside|itself|others|other|those|these|that|this"
    r"|them|each|both|rest|given|known|taken|kept|seen|left|held|begun|gone"
    r"|done|sent|made|said|meant|asked|wanted|named|whose|who|which|what"
    r"|where|when|how|there|here|then|so|own|apart|within|without|besides)"
)
MOST_WORDS = 30
COUNTS = ("clauses", "private words", "vague names", "long sentences")
MOST = {
    "": (0, 0, 0, 0),
    "agent": (0, 0, 0, 0),
    "chrome": (0, 0, 0, 0),
    "cli": (0, 0, 0, 0),
    "compat": (0, 0, 0, 0),
    "device": (0, 0, 0, 0),
    "docs": (0, 0, 0, 0),
    "fleet": (0, 0, 0, 0),
    "instrumentors": (0, 0, 1, 0),
    "native": (0, 0, 0, 0),
    "otlp": (0, 0, 2, 0),
    "profile": (0, 0, 1, 0),
    "proposal": (0, 0, 0, 0),
    "recorder": (0, 1, 0, 0),
    "recording": (0, 3, 2, 0),
    "report": (0, 1, 6, 0),
    "runtime": (0, 0, 1, 0),
    "sessions": (0, 0, 0, 0),
    "trace": (0, 2, 2, 0),
}
"""The largest counts of each folder: docstrings that begin with a subordinate clause, words of no glossary, variables
named by a pronoun, an adverb or a participle, and sentences of a docstring over 30 words. A change lowers these."""


@cache
def parsed(path: Path) -> ast.Module:
    """Return the tree of a module, parsed once for all tests."""
    return ast.parse(path.read_text("utf-8"))


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of a module, of its classes and functions, and of its constants."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value.strip()


def variables(tree: ast.Module) -> Iterator[str]:
    """Yield the name of each variable that is assigned to, and of each argument."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def sentences(text: str) -> list[str]:
    """Return the sentences of a docstring. A paragraph and an item of a list each end one."""
    whole = re.sub(r"\s+", " ", re.sub(r"\n\s*\n|\n\s*-", ". ", text))
    return re.split(r"(?<=[.!?:])\s+", whole)


def english(folder: str) -> tuple[int, int, int, int]:
    """Return the counts of a folder and its subfolders, in the order of `COUNTS`; "" is the root folder alone."""
    paths = (ROOT / folder).rglob("*") if folder else ROOT.glob("*")
    clauses = words = names = long_sentences = 0
    for path in paths:
        if path.suffix not in SOURCES or path.name.startswith("d3"):
            continue
        words += len(PRIVATE_WORD.findall(path.read_text("utf-8")))
        if path.suffix == ".py":
            tree = parsed(path)
            names += sum(VAGUE_NAME.fullmatch(name) is not None for name in variables(tree))
            for docstring in docstrings(tree):
                clauses += CLAUSE.match(docstring) is not None
                long_sentences += sum(len(sentence.split()) > MOST_WORDS for sentence in sentences(docstring))
    return clauses, words, names, long_sentences


@pytest.mark.parametrize("folder", MOST)
def test_the_english_of_a_folder_gets_no_worse(folder: str) -> None:
    counts = dict(zip(COUNTS, english(folder), strict=True))
    most = dict(zip(COUNTS, MOST[folder], strict=True))
    assert all(counts[name] <= most[name] for name in COUNTS), (counts, most)


def test_the_english_of_every_folder_has_a_bound() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders | {""} == MOST.keys()


def texts(tree: ast.Module) -> Iterator[str]:
    """Yield the texts of a module other than docstrings: messages, help, headings and notes."""
    descriptions = set(docstrings(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.strip() not in descriptions:
            yield node.value


def test_no_message_has_a_private_word_and_no_public_name_is_vague() -> None:
    trees = {path: parsed(path) for path in ROOT.rglob("*.py")}
    assert [
        (path.name, text) for path in trees for text in texts(trees[path]) if PRIVATE_WORD.search(text) and " " in text
    ] == []
    names = import_module("instrument").__all__
    assert [name for name in names if VAGUE_NAME.fullmatch(name) or PRIVATE_WORD.search(name)] == []
