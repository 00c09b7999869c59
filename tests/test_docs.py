"""The documentation: its English, its links, its examples, and `instrument help`, which prints it.

`DOCS=write python -m pytest tests/test_docs.py -k tables` writes the tables of keys in `profile.md` anew.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_english import MOST_WORDS, PRIVATE_WORD

import instrument
from instrument import cli
from instrument.cli.help_verb import FOLDER, summary, topics
from instrument.profile.keys import loads

PROJECT = Path(__file__).parent.parent
README = PROJECT / "README.md"
PAGES = {path.name: path for path in sorted(FOLDER.glob("*.md"))}
TOPICS = set(topics())
pages = pytest.mark.parametrize("page", PAGES)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "instrument", *words], capture_output=True, text=True, check=False)


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a language in a page."""
    return re.findall(rf"(?ms)^ *```{language}\n(.*?)^ *```$", PAGES[page].read_text("utf-8"))


# ---------------------------------------------------------------- English


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page: of paragraphs, items of lists, headings and cells of tables, without code."""
    text = re.sub(r"(?ms)^ *```.*?^ *```$", "", text)
    text = re.sub(r"<!--.*?-->", "", text)
    text = re.sub(r"`[^`]+`", "X", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for part in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) |\n(?=#)|(?<=\|)\n", text):
        for cell in part.split("|") if part.lstrip().startswith("|") else [part]:
            yield from re.split(r"(?<=[.!?:])\s+", " ".join(cell.split()))


@pages
def test_a_sentence_has_at_most_thirty_words(page: str) -> None:
    long = [each for each in sentences(PAGES[page].read_text("utf-8")) if len(each.split()) > MOST_WORDS]
    assert long == []


@pages
def test_no_page_has_a_private_word(page: str) -> None:
    text = "\n".join(sentences(PAGES[page].read_text("utf-8")))
    assert PRIVATE_WORD.findall(text) == []


# ---------------------------------------------------------------- links and examples


def anchors(text: str) -> set[str]:
    headings = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?ms)^```.*?^```$", "", text))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_every_link_leads_to_a_file_and_a_heading_of_it(page: str) -> None:
    path = PAGES[page]
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text("utf-8")):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked.read_text("utf-8")), target


@pages
def test_every_topic_that_a_page_names_exists(page: str) -> None:
    assert set(re.findall(r"`instrument help ([a-z-]+)`", PAGES[page].read_text("utf-8"))) <= TOPICS


@pages
def test_every_yaml_block_is_a_profile_or_a_part_of_the_file_that_it_names(page: str) -> None:
    for text in blocks(page, "yaml"):
        file = re.match(r"# from (\S+)\n", text)
        if file:
            assert text.partition("\n")[2] in (PROJECT / file[1]).read_text("utf-8")
        else:
            loads(text, name=page, environ={"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318", "TOKEN": "x"})


def commands(page: str) -> Iterator[list[str]]:
    """Yield the words of each command of ours, from console blocks and from code within the text."""
    text = PAGES[page].read_text("utf-8")
    lines = [line[2:] for block in blocks(page, "console") for line in block.splitlines() if line.startswith("$ ")]
    inline = re.findall(r"`((?:\w+=\S+ )*instrument [a-z]+(?: [^`\n]*)?)`", re.sub(r"(?ms)^ *```.*?^ *```$", "", text))
    for line in [*lines, *inline]:
        words = shlex.split(line.partition("  #")[0])
        while words and re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        if words[:1] == ["instrument"] and "COMMAND" not in words:
            yield words[1:]


@pages
def test_every_command_exists_and_has_the_options_that_are_named(page: str) -> None:
    for words in commands(page):
        own, _ = cli._split([word for word in words if word != "..."])
        parser = cli._parsers(own[0])[1][own[0]]
        options = {option for action in parser._actions for option in action.option_strings}
        named = {word.partition("=")[0] for word in own[1:] if word.startswith("-") and word != "-"}
        assert named <= options, words


@pages
def test_every_block_of_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profile.yaml").write_text("service: trainer\nagent: off\n")
    names = {"batches": [[1, 2]] * 12, "train": lambda batch: None, "work": lambda *_: [[1, 2]], "request": Request()}
    for text in blocks(page, "python"):
        try:
            exec(compile(text, page, "exec"), {"__name__": "example", **names})
        finally:
            instrument.stop()


class Request:
    """A request as the examples in Python have it."""

    id = "r3"
    tokens = 5


# ---------------------------------------------------------------- instrument help


def test_the_list_has_a_line_for_every_topic() -> None:
    assert set(topics()) == TOPICS
    done = run("help")
    assert (done.returncode, done.stderr) == (0, "")
    for name, path in topics().items():
        line = summary(path.read_text("utf-8"))
        assert re.search(rf"(?m)^  {name} +{re.escape(line)}$", done.stdout)
        assert 20 < len(line) <= 100
        assert line.endswith(".")


def test_a_topic_is_printed_whole_where_there_is_no_terminal() -> None:
    assert run("help", "Files").stdout.rstrip("\n") == PAGES["files.md"].read_text("utf-8").rstrip("\n")


def test_an_unknown_topic_names_the_nearest() -> None:
    done = run("help", "glosary")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("instrument: help: found the topic 'glosary'; allowed: ")
    assert done.stderr.endswith("; did you mean 'glossary'?\n")


def test_help_of_the_command_names_the_documentation() -> None:
    assert "`instrument help`" in " ".join(run("--help").stdout.split())
