"""The documentation: its English, its links, its examples, and `instrument help`, which prints it.

`DOCS=write python -m pytest tests/test_docs.py -k "keys or metrics"` writes the lists of keys in `profile.md` and the
tables of metrics in `otlp.md` anew.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_english import MOST_WORDS, PRIVATE_WORD

import instrument
from instrument import cli
from instrument.cli.help_verb import FOLDER, find_topic_summary, find_topics
from instrument.profile.keys import KEYS, loads
from instrument.profile.model import VIEWS
from instrument.profile.values import VARIABLES
from instrument.recording.metric_definitions import DEFINITIONS, GAUGES

PROJECT = Path(__file__).parent.parent
README = PROJECT / "README.md"
PAGES = {"README.md": README, **{path.name: path for path in sorted(FOLDER.glob("*.md"))}}
TOPICS = set(find_topics())
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


EXAMPLES = sorted(
    [
        *(PROJECT / "configs").glob("*.yaml"),
        *(PROJECT / "examples").rglob("*.yaml"),
        *(FOLDER.parent / "profile" / "presets").glob("*.yaml"),
    ]
)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_no_comment_of_an_example_has_a_private_word(path: Path) -> None:
    comments = "\n".join(re.findall(r"(?m)#(.*)$", path.read_text("utf-8")))
    assert PRIVATE_WORD.findall(comments) == []


def test_the_readme_links_every_topic() -> None:
    text = README.read_text("utf-8")
    assert [path.name for path in find_topics().values() if f"(instrument/docs/{path.name})" not in text] == []


def test_the_readme_is_short() -> None:
    lines = README.read_text("utf-8").splitlines()
    assert len(lines) <= 200
    assert [line for line in lines if len(line) > 120] == []


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
        own, _ = cli._split_off_service_command([word for word in words if word != "..."])
        parser = cli._make_parsers(own[0])[1][own[0]]
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


@functools.cache
def texts_of_the_code() -> str:
    """Return all constant texts of the package, a line each."""
    trees = (ast.parse(path.read_text("utf-8")) for path in FOLDER.parent.rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    texts = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return "\n".join(" ".join(text.split()) for text in texts)


@pytest.mark.parametrize("page", ["reports.md", "troubleshooting.md"])
def test_the_headings_and_messages_of_a_page_are_those_of_the_code(page: str) -> None:
    """A message has `...` in place of the words that vary."""
    rows = re.findall(r"(?m)^\| (`.+?`) \|", PAGES[page].read_text("utf-8"))
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    parts = [part.strip(" ;:,.") for text in quoted for part in text.split("...")]
    code = texts_of_the_code()
    assert len(parts) > 20
    assert [part for part in parts if part not in code] == []


def test_reports_has_a_section_for_every_view() -> None:
    headings = re.findall(r"(?m)^## ([a-z]+)$", PAGES["reports.md"].read_text("utf-8"))
    assert set(headings) == set(VIEWS)


class Request:
    """A request as the examples in Python have it."""

    id = "r3"
    tokens = 5


def shape(text: str) -> str:
    """Return a text without its numbers and bars, each run of blanks as one."""
    text = re.sub(r"\|[# ]*\|", "|", text)
    return " ".join(re.sub(r"[-.,:TZ\d]*\d[-.,:TZ\d]*%?", "#", text).split())


COMPUTED = "POST /generate spends "
"""The begin of the sentences of a report. They depend on where the time went, and tests of their own hold them."""


def outputs(page: str) -> Iterator[str]:
    """Yield the shapes of the lines that a page shows as output, in pieces where it is cut."""
    texts = [block for block in blocks(page, "text") if not block.startswith(COMPUTED)]
    texts += [block.partition("\n...\n")[2] for block in blocks(page, "text") if block.startswith(COMPUTED)]
    lines = [line for block in texts for line in block.splitlines()]
    lines += [line for block in blocks(page, "console") for line in block.splitlines() if not line.startswith("$ ")]
    yield from filter(None, (shape(piece) for line in lines for piece in line.split("...")))


@pytest.mark.slow
def test_the_output_in_the_pages_is_what_the_commands_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("torch", "httpx", "starlette", "uvicorn"):
        pytest.importorskip(name)
    environ = {**os.environ, "PYTHONPATH": str(PROJECT / "examples")}
    ours = [sys.executable, "-m", "instrument"]
    command = [*ours, "run", "--profile", str(PROJECT / "configs" / "chat.yaml"), "--", "-m", "chat.server"]
    pipes: dict[str, Any] = {"cwd": tmp_path, "env": environ, "text": True}
    with subprocess.Popen(
        [*command, "--port", "0", "--engine-process"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **pipes
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().removeprefix("listening on ").strip()
        words = [sys.executable, "-m", "chat.load", "--url", url, "--requests", "2000", "--seconds", "240"]
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, **pipes) as load:
            live, wanted = "", [*outputs("operations.md")]
            while load.poll() is None and any(line not in shape(live) for line in wanted):
                live = subprocess.run([*ours, "live", "--once", str(server.pid)], capture_output=True, **pipes).stdout
            load.kill()
        server.terminate()
        printed = [live, server.communicate()[1]]
    shown = [
        words for page in PAGES for words in commands(page) if "traces" in words and "torch-trace.json" not in words
    ]
    here = {"r3": "chat-20", "tenant": "endpoint"}  # the demonstration has no tenants
    for words in dict.fromkeys(tuple(here.get(word, word) for word in words) for words in shown):
        code = cli.main(words)
        assert code == 0 or (words[0] == "explain" and code == 3), words  # of real times: may be inconclusive
    printed.append(capsys.readouterr().out)
    text = shape("\n".join(printed))
    for page in PAGES:
        assert [line for line in outputs(page) if line not in text] == [], page


# ---------------------------------------------------------------- the keys of a profile

SCHEMA = json.loads((FOLDER.parent / "profile" / "profile.schema.json").read_text("utf-8"))
WORDS = {
    "duration": "a duration", "size": "a size", "rate": "a rate", "usual": "a percentile and a factor",
    "function_pattern": "a pattern", "reference": "", "left_out": "",
}  # fmt: skip


def values_of(shape: Any) -> Iterator[str]:
    """Yield the values that a key takes, in words."""
    if "$ref" in shape:
        name = shape["$ref"].rpartition("/")[2]
        yield WORDS.get(name, "a mapping")
    for part in (*shape.get("anyOf", ()), *shape.get("allOf", ())):
        yield from values_of(part)
    if "enum" in shape:
        yield from (f"`{word}`" for word in shape["enum"] if word is not False)
    if shape.get("type") == "array":
        yield "a list"
    elif shape.get("type") == "boolean":
        yield from ("`true`", "`false`")
    elif shape.get("type") in ("integer", "number"):
        most = shape["maximum"]
        yield f"a number from {shape['minimum']}{f' to {most}' if most < 10**9 else ''}"
    elif shape.get("type") == "string":
        yield "text"
    elif shape.get("type") == "object":
        yield "a mapping"


def described_keys(section: str) -> str:
    """Return the list of a section's keys, as the page has it."""
    properties = (SCHEMA["$defs"][section] if section else SCHEMA)["properties"]
    lines = []
    for name in KEYS[section]:
        key = properties[name]
        facts = [", ".join(dict.fromkeys(filter(None, values_of({"anyOf": key["anyOf"]}))))]
        if KEYS[section][name].required:
            facts.append("required")
        default = key.get("default")
        if default is not None:
            text = default if isinstance(default, str) else yaml.safe_dump(default, default_flow_style=True, width=1000)
            facts.append(f"default `{text.splitlines()[0]}`")
        path = f"{section}.{name}" if section else name
        variables = [f"`{variable}`" for variable, _ in VARIABLES.get(path, ()) if variable.startswith("OTEL_")]
        text = f"- `{name}` ({'; '.join(facts)}). {key['description']}"
        if variables:
            text += f" Variable: {', '.join(variables)}."
        lines += textwrap.wrap(text, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


@pytest.mark.parametrize("section", KEYS, ids=lambda section: section or "top")
def test_the_lists_of_keys_are_those_of_the_definition(section: str) -> None:
    path = PAGES["profile.md"]
    head, tail = f"Keys of `{section}`:\n\n" if section else "Keys of a profile:\n\n", "\n\n"
    text = path.read_text("utf-8")
    before, found, rest = text.partition(head)
    assert found, f"profile.md has no line {head.strip()!r}"
    if os.environ.get("DOCS") == "write":
        path.write_text(before + head + described_keys(section) + tail + rest.partition(tail)[2])
        text = path.read_text("utf-8")
    assert head + described_keys(section) + tail in text


def described_metrics() -> dict[str, str]:
    """Return the tables of `otlp.md` by the lines in front of them."""
    totals = ["| metric | unit | measures | needs the key |", "|---|---|---|---|"]
    totals += [
        f"| `{one.name}` | `{one.unit}` | {one.description} | {one.needs and f'`{one.needs}`'} |"
        for one in DEFINITIONS.values()
    ]
    gauges = ["| metric | unit | gauge in reports |", "|---|---|---|"]
    for name, gauge in GAUGES.items():
        for metric in gauge.metrics:
            facts = "".join(f" `{key}={value}`" for key, value in metric.attributes)
            gauges.append(f"| `{metric.name}`{facts} | `{metric.unit}` | `{name}`: {gauge.unit} {gauge.about} |")
    heads = "Metrics that are counted:", "Gauges that are read at intervals, with `device:` in the profile:"
    return {head: "\n".join(lines) for head, lines in zip(heads, (totals, gauges), strict=True)}


@pytest.mark.parametrize("head", described_metrics())
def test_the_tables_of_metrics_are_those_of_the_definitions(head: str) -> None:
    path = PAGES["otlp.md"]
    before, found, rest = path.read_text("utf-8").partition(f"{head}\n\n")
    assert found, f"otlp.md has no line {head!r}"
    if os.environ.get("DOCS") == "write":
        path.write_text(before + found + described_metrics()[head] + "\n\n" + rest.partition("\n\n")[2])
        rest = path.read_text("utf-8").partition(found)[2]
    assert rest.startswith(described_metrics()[head] + "\n\n")


# ---------------------------------------------------------------- instrument help


def test_the_list_has_a_line_for_every_topic() -> None:
    assert set(find_topics()) == TOPICS
    done = run("help")
    assert (done.returncode, done.stderr) == (0, "")
    for name, path in find_topics().items():
        line = find_topic_summary(path.read_text("utf-8"))
        assert re.search(rf"(?m)^  {name} +{re.escape(line)}$", done.stdout)
        assert 20 < len(line) <= 100
        assert line.endswith(".")


def test_a_topic_is_printed_whole_where_there_is_no_terminal() -> None:
    assert run("help", "Files").stdout.rstrip("\n") == PAGES["files.md"].read_text("utf-8").rstrip("\n")


def test_an_unknown_topic_names_the_nearest() -> None:
    done = run("help", "glosary")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("instrument: help: there is no topic 'glosary'; allowed: ")
    assert done.stderr.endswith("; did you mean 'glossary'?\n")


def test_help_of_the_command_names_the_documentation() -> None:
    assert "`instrument help`" in " ".join(run("--help").stdout.split())


TITLES = {
    "Where the time went",
    "Where the time goes",
    "Event loops",
    "Muted",
    "Request in flight",
    "Step",
    "By ",
    "True",
}
TITLES |= {"Time of the device", "By name", "By request", "Without device time", "Call path"}
"""Headings of first columns that are titles, and what else the expression below finds."""


def test_every_heading_of_a_table_is_explained() -> None:
    """Headings are the capitalised words behind `field=` in the columns that the views declare."""
    sources = [*(FOLDER.parent / "report").glob("*.py"), FOLDER.parent / "agent" / "live_view.py"]
    columns = [
        part for path in sources for part in re.findall(r'(?<=["|+])[a-z_0-9.]+=([A-Z][^|"={]*)', path.read_text())
    ]
    headings = {re.split(r",|'| \(", column)[0] for column in columns}
    text = "".join(PAGES[page].read_text().replace("```", "") for page in ("reports.md", "compare.md", "explain.md"))
    assert len(headings) > 100
    assert sorted(headings - set(re.findall(r"`([^`\n]+)`", text)) - TITLES) == []
