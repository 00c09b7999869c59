"""A first profile and its text: short, with the reason of each rule above it."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from instrument.proposal.function_choice import FunctionProposal
from instrument.proposal.layer_choice import LayerProposal

WIDTH = 118

_WORDS_OF_YAML = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")

PRESET_SAYS = {
    "serving": "requests by route, frameworks, loading, copies, gauges; a summary and a trace file at the end",
    "training": "forward, backward, optimizer, loaders, copies, gauges; a summary and a trace file at the end",
}


@dataclass(slots=True)
class FirstProfile:
    """What is written: paragraphs of comments at the `head`, on `requests`, on the rules, and what was `left_out`.

    `seen` is what it is made from, in words.
    """

    service: str
    preset: str = "serving"
    seen: str = ""
    head: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    ignore: list[str] = field(default_factory=list)
    functions: list[FunctionProposal] = field(default_factory=list)
    layers: list[LayerProposal] = field(default_factory=list)
    capture: str = ""
    left_out: list[str] = field(default_factory=list)

    @property
    def rules(self) -> int:
        """How many rules it has."""
        return len(self.functions) + len(self.layers)


def text_of(first: FirstProfile) -> str:
    """The YAML of a first profile."""
    return "\n".join(_lines(first)).rstrip() + "\n"


def _lines(first: FirstProfile) -> Iterator[str]:
    for paragraph in first.head:
        yield from comment(paragraph)
    if first.commands:
        yield "#"
        yield from (f"#   {_plain(command)}" for command in first.commands)
    yield ""
    yield f"service: ${{OTEL_SERVICE_NAME:-{first.service}}}"
    yield f"preset: {first.preset}  # {PRESET_SAYS[first.preset]}"
    if first.requests or first.ignore:
        yield ""
    for paragraph in first.requests:
        yield from comment(paragraph)
    if first.ignore:
        yield "requests:"
        paths = ", ".join(path if re.fullmatch(r"/[\w./-]*", path) else _quoted(path) for path in first.ignore)
        yield from textwrap.wrap(f"  ignore: [{paths}]", WIDTH, subsequent_indent=" " * 11, break_on_hyphens=False)
    if first.functions:
        yield ""
        yield "functions:"
        for rule in first.functions:
            yield from comment("; ".join(rule.reasons), "  ")
            yield from _function(rule)
    if first.layers:
        yield ""
        yield "layers:"
        for layer in first.layers:
            yield from comment("; ".join(layer.reasons), "  ")
            yield f"  - {'type' if layer.is_type else 'match'}: {_one_or_list(layer.match)}"
            if layer.device:
                yield "    device: true"
    if first.capture:
        yield ""
        yield from comment(first.capture)
        yield "capture: {sample: 1.0, slow: p99*1.5, errors: true}"
    for paragraph in first.left_out:
        yield ""
        yield from comment(paragraph)


def _function(rule: FunctionProposal) -> Iterator[str]:
    yield f"  - match: {_one_or_list([rule.label, *rule.others])}"
    if rule.phase:
        yield f"    phase: {rule.phase}"
    elif rule.kind != "op":
        yield f"    kind: {rule.kind}"
    if rule.key:
        yield f"    key: {_quoted(rule.key)}"
    if rule.batch and rule.weights:
        yield f"    batch: {{argument: {_quoted(rule.batch)}, weights: {_quoted(rule.weights)}}}"
    elif rule.batch:
        yield f"    batch: {_quoted(rule.batch)}"
    if rule.device:
        yield "    device: true"


def comment(paragraph: str, indent: str = "") -> list[str]:
    """Lines of a comment."""
    lead = f"{indent}# "
    return textwrap.wrap(
        _plain(paragraph),
        WIDTH,
        initial_indent=lead,
        subsequent_indent=lead,
        break_on_hyphens=False,
        break_long_words=False,
    )


def list_of(things: Iterable[str], most: int) -> str:
    """The first of them, and how many more there are."""
    found = list(things)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def command_of(words: Sequence[str]) -> str:
    """A command as a comment may show it: the program, and the files and modules beside the service that follow it.

    All else may be secret, such as a key or an address with a password in it.
    """
    shown = list(words[:2] if words[:1] == ["-m"] else words[:1])
    rest = list(words[len(shown) :])
    while rest and _is_beside(rest[0]):
        shown.append(rest.pop(0))
    return " ".join([*shown, "..."] if rest else shown)


def _is_beside(word: str) -> bool:
    """Whether a word names a file in the folder, or what is in a module there, as in `app.main:app`."""
    named = re.fullmatch(r"([A-Za-z_]\w*)(?:\.\w+)*:[A-Za-z_]\w*", word)
    try:
        if named is not None:
            return Path(f"{named[1]}.py").is_file() or Path(named[1]).is_dir()
        return re.fullmatch(r"[\w./][\w./-]*", word) is not None and Path(word).is_file()
    except OSError:  # a name that is too long, a folder that may not be read
        return False


def _one_or_list(texts: Sequence[str]) -> str:
    told = ", ".join(map(_quoted, texts))
    return told if len(texts) == 1 else f"[{told}]"


def _quoted(text: str) -> str:
    if re.fullmatch(r"[A-Za-z_][\w.]*", text) and text.lower() not in _WORDS_OF_YAML:
        return text
    return json.dumps(text, ensure_ascii=False).replace("$", "$$")


def _plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)
