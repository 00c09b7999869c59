"""The reader of YAML text that reports all problems at once, each with its line and column.

A `Document` parses the text into `YamlNode`s. A reader is a function that returns a node's value, or notes a problem
and refuses the node. One `ProfileError` has all problems of a text.

References to environment variables, ``${VAR}`` or ``${VAR:-default}``, are replaced in values, not in keys. A variable
may be secret, so messages show only OpenTelemetry's own variables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from instrument.errors import ProfileError
from instrument.runtime.lazy_imports import dataclass, field, late_pattern, replace

if TYPE_CHECKING:
    import yaml

FILE_BYTES = 2**20
"""The maximum size of a file in bytes."""
NODES = 10_000
"""The maximum number of values in a document. Each use of an alias counts the aliased values again."""
STANDARD = ("OTEL_", "INSTRUMENT_")
"""The prefixes of environment variables. An invalid value of such a variable causes a remark, not an error."""
DEPTH = 32
"""The maximum depth of nested lists and mappings."""


class _Refused(Exception):  # noqa: N818 - no error of the caller: the problems are noted, the reading continues
    """An exception that ends the reading of a node whose problems have been noted."""


def read_text(path: str | os.PathLike[str]) -> str:
    name = os.fspath(path)
    try:
        with Path(path).open("rb") as file:
            data = file.read(FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        problem = f"{getattr(error, 'strerror', None) or error}; give the path of a file that this process may read"
        if isinstance(error, FileNotFoundError):
            problem = f"no such file; create it or give another path (relative ones start at {Path.cwd()})"
        elif isinstance(error, IsADirectoryError):
            problem = "a directory; give the path of the file in it"
        raise _unreadable_error(name, problem) from error
    if len(data) > FILE_BYTES:
        raise _unreadable_error(name, _TOO_LARGE)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        problem = f"the byte 0x{data[error.start]:02x}, which is not UTF-8; allowed: text; save the file as UTF-8"
        raise ProfileError([f"{name}:{line}:{column}: encoding: found {problem}"]) from error


def _unreadable_error(name: str, problem: str) -> ProfileError:
    return ProfileError([f"{name}: the profile cannot be read: {problem}"])


_TOO_LARGE = "more than 1 MiB; is this the right file?"


class Document:
    """A YAML text, the environment variables to which it may refer, and its problems.

    `faults` counts problems, and attempts to read broken nodes. For each setting from a variable, `origins` has the
    variable's name, and `shown` the setting's text for messages.
    """

    def __init__(self, text: str, *, name: str, environ: Mapping[str, str]) -> None:
        if len(text) > FILE_BYTES:
            raise _unreadable_error(name, _TOO_LARGE)
        self.text = text
        self.name = name
        self.environ = environ
        self.origins: dict[str, str] = {}
        self.shown: dict[str, str] = {}
        self.faults = 0
        self.noted: list[tuple[int, int, str]] = []
        self.remarks: list[str] = []
        """Sentences on environment variables that are ignored."""

    def read_root(self, read: Read) -> Any:
        """Read the root node. Return None if the node was refused. An empty text is an empty mapping."""
        with suppress(_Refused):
            return _parse_root(self).attempt_read(read)
        return None

    @property
    def problems(self) -> list[str]:
        return list(dict.fromkeys(problem for _, _, problem in sorted(self.noted)))

    @contextmanager
    def refuse_incomplete_node(self) -> Iterator[None]:
        """Refuse the current node at the end of the context if a part of the node was refused."""
        faults = self.faults
        yield
        if self.faults > faults:
            raise _Refused


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A value of a document, with its path, line and column (from 1). The `kind` `broken` marks a value with problems.

    - `text`: a scalar's text, with references replaced by values
    - `written`: the text for messages, if `text` may have a secret; it keeps the references to secret variables
    - `plain`: True for text without quotes
    - `variable`: the variable that gives the whole text
    - `unset`: the value if that variable were not set; only for a variable of `STANDARD`
    - `items`, `pairs`: the items of a list, the keys and values of a mapping
    """

    document: Document = field(repr=False)
    key_path: str
    line: int
    column: int
    kind: str = "broken"
    text: str = ""
    plain: bool = False
    variable: str = ""
    written: str = ""
    unset: YamlNode | None = None
    items: tuple[YamlNode, ...] = ()
    pairs: Mapping[str, tuple[YamlNode, YamlNode]] = field(default_factory=dict)

    @property
    def message_text(self) -> str:
        text = clip_text(self.written or self.text)
        words = {"null": "nothing", "list": "a list", "mapping": "a mapping", "text": repr(text)}
        names = {"bool": "boolean", "date": "date"}
        return words.get(self.kind) or f"the {names.get(self.kind, 'number')} {text}"

    @property
    def public_text(self) -> str:
        return without_secrets(self.written or self.text)

    @property
    def location(self) -> str:
        return f"{self.document.name}:{self.line}:{self.column}"

    @property
    def is_off(self) -> bool:
        """True for the word `off`, which YAML 1.1 reads as false if it has no quotes."""
        if self.kind == "bool":
            return self.text.lower() in ("false", "no", "off")
        return self.kind == "text" and self.text == "off"

    def path_of_key(self, name: str) -> str:
        return f"{self.key_path}.{name}" if self.key_path else name

    def note_problem(self, allowed: str, *, actual: str = "", near: str = "") -> None:
        """Note a problem, with descriptions of the allowed and the actual value. `near` is the value that was probably
        meant."""
        document, path = self.document, self.key_path
        path = clip_text(path or "profile") if path.isprintable() else ascii(clip_text(path))
        suggestion = f"; did you mean '{clip_text(near)}'?" if near and not self.written else ""
        message = f"{path}: found {actual or self.message_text}; allowed: {allowed}{suggestion}"
        document.noted.append((self.line, self.column, f"{self.location}: {message}"))
        document.faults += 1

    def refuse(self, allowed: str, *, actual: str = "", near: str = "") -> NoReturn:
        self.note_problem(allowed, actual=actual, near=near)
        raise _Refused

    def is_readable(self, read: Read, instead: str) -> bool:
        """Return True if `read` accepts the node. Otherwise turn the node's problems into remarks that end with
        `instead`."""
        document, noted, faults = self.document, len(self.document.noted), self.document.faults
        self.attempt_read(read)
        if document.faults == faults:
            return True
        document.remarks += [
            f"{message.removeprefix(f'{self.location}: ')}; {instead}" for *_, message in document.noted[noted:]
        ]
        del document.noted[noted:]
        document.faults = faults
        return False

    def attempt_read(self, read: Read) -> Any:
        if self.kind == "broken":
            self.document.faults += 1
            return None
        with suppress(_Refused):
            if _UNSTORABLE.search(self.text):
                self.refuse("text that a file can hold", actual="a NUL or half of a surrogate pair")
            return read(self)
        return None


Read = Callable[[YamlNode], Any]
"""A function that returns the value of a node, or refuses the node."""

_UNSTORABLE = late_pattern("[\0\ud800-\udfff]")


def without_secrets(text: str) -> str:
    """Remove the credentials and the query from a text that is a URL."""
    before, at, after = text.rpartition("@")
    if at and "//" in before:
        text = f"{before.partition('//')[0]}//***@{after}"
    path, question, query = text.partition("?")
    return f"{path}?***" if question and ("/" in path or "=" in query) else text


def clip_text(text: str) -> str:
    text = without_secrets(text)
    return text if len(text) <= 80 else text[:77] + "..."


def find_most_similar(word: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    from difflib import get_close_matches

    folded = {name.lower(): name for name in names}
    close = get_close_matches(word[:80].lower(), folded, n=1, cutoff=cutoff)
    return folded[close[0]] if close else ""


# ---------------------------------------------------------------- conversion of YAML's nodes


def _parse_root(document: Document) -> YamlNode:
    import yaml

    # The loader in pure Python: it fails on deep nesting, where libyaml's would exhaust the C stack.
    class Loader(yaml.SafeLoader):
        nodes = depth = 0

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            self.nodes += 1
            self.depth += 1
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            _check_size(document, mark, self.nodes, self.depth)
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def check_printable(self, data: str) -> None:
            if not data.replace("\n", "").isprintable():  # else its pattern takes 5 ms to compile
                super().check_printable(data)

    text = document.text
    try:
        loader = Loader(text)
        root = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        at = YamlNode(document, "YAML", before.count("\n") + 1, error.position - before.rfind("\n"))
        at.refuse("printable text", actual=f"the character {text[error.position]!a}")
    except yaml.MarkedYAMLError as error:
        at = _make_node_at(document, "YAML", error.problem_mark or error.context_mark)
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        line = text.splitlines()[at.line - 1 : at.line]
        hint = " (inside [] and {} a ${...} needs quotes)" if "${" in "".join(line) else ""
        hint = " (a pattern that begins with ! needs quotes)" if _EXCLUDING.search("".join(line)) else hint
        at.refuse(f"one document of valid YAML{hint}", actual=f"broken YAML ({problem})")
    node = _Tree(document, loader.resolve).make_node(root, "") if root else None
    return YamlNode(document, "", 1, 1, "mapping") if node is None or node.kind == "null" else node


def _make_node_at(document: Document, path: str, mark: Any) -> YamlNode:
    return YamlNode(document, path, mark.line + 1, mark.column + 1) if mark else YamlNode(document, path, 1, 1)


def _check_size(document: Document, mark: Any, nodes: int, depth: int) -> None:
    if nodes > NODES:
        problem = f"more than {NODES} values, aliases counted"
        _make_node_at(document, "YAML", mark).refuse(f"at most {NODES}", actual=problem)
    if depth > DEPTH:
        _make_node_at(document, "YAML", mark).refuse(f"at most {DEPTH}", actual=f"nesting deeper than {DEPTH}")


_TAG = "tag:yaml.org,2002:"
_PATTERN = late_pattern(r"![^!].*")
_EXCLUDING = late_pattern(r"(?:^|[\[,:-])\s*![^\s\"']")
"""A pattern of unquoted text that begins with `!`, which YAML reads as a tag."""
_KINDS = {"str": "text", "value": "text", "merge": "text", "timestamp": "date", "seq": "list", "map": "mapping"}
_SCALARS = ("null", "bool", "int", "float", "text", "date")
_SHAPES = {"scalar": _SCALARS, "sequence": ("list",), "mapping": ("mapping",)}
_REFERENCE = late_pattern(
    r"\$(?:(?P<escape>\$)|\{(?:env:)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}\n]*))?\}|(?P<broken>\{[^}\n]*\}?))"
)


def _kind_of_tag(tag: str) -> str:
    return _KINDS.get(tag.removeprefix(_TAG), tag.removeprefix(_TAG))


class _Tree:
    """Converts YAML's nodes. It expands aliases, merges merge keys and replaces references.

    YAML's nodes are typed `Any`, because PyYAML's stubs lack their `id`. `resolve` is PyYAML's function for the tag of
    a plain scalar.
    """

    def __init__(self, document: Document, resolve: Callable[[type[Any], str, tuple[bool, bool]], str]) -> None:
        self.document = document
        self.resolve = resolve
        self.nodes = 0
        self.open: list[int] = []

    def make_node(self, source: Any, path: str) -> YamlNode:
        at = _make_node_at(self.document, path, source.start_mark)
        self.nodes += 1
        _check_size(self.document, source.start_mark, self.nodes, len(self.open))
        if id(source) in self.open:
            at.refuse("aliases to other values", actual="an alias to a value that it is part of")
        kind = _kind_of_tag(source.tag)
        if kind not in _SHAPES[source.id]:
            near = f'"{clip_text(source.tag)}"' if _PATTERN.fullmatch(source.tag) else ""
            hint = "; a pattern that begins with ! needs quotes" if near else ""
            at.note_problem(f"values without tags{hint}", actual=f"the tag {clip_text(source.tag)!r}", near=near)
            return at
        if source.id == "scalar":
            return self.make_scalar(source, kind, at)
        self.open.append(id(source))
        try:
            if kind == "mapping":
                return replace(at, kind=kind, pairs=self.make_pairs(source, at))
            items = (self.make_node(item, f"{path}[{index}]") for index, item in enumerate(source.value))
            return replace(at, kind=kind, items=tuple(items))
        finally:
            self.open.pop()

    def make_pairs(self, source: Any, mapping: YamlNode) -> Mapping[str, tuple[YamlNode, YamlNode]]:
        pairs_of_mapping: dict[str, tuple[YamlNode, YamlNode]] = {}
        merged: dict[str, tuple[YamlNode, YamlNode]] = {}
        for key, value in source.value:
            at = _make_node_at(self.document, mapping.key_path, key.start_mark)
            if key.tag == _TAG + "merge":
                for name, pair in self.read_merged_pairs(value, mapping):
                    merged.setdefault(name, pair)
            elif key.id != "scalar":
                at.note_problem("words as keys", actual="a list or mapping as a key")
            elif key.value in pairs_of_mapping:
                first = pairs_of_mapping[key.value][0].line
                at.note_problem(f"once (first in line {first})", actual=f"the key {clip_text(key.value)!r} twice")
            else:
                pairs_of_mapping[key.value] = (at, self.make_node(value, mapping.path_of_key(key.value)))
        return {**merged, **pairs_of_mapping}

    def read_merged_pairs(self, value: Any, mapping: YamlNode) -> Iterator[tuple[str, tuple[YamlNode, YamlNode]]]:
        for part in value.value if value.id == "sequence" else (value,):
            node = self.make_node(part, mapping.key_path)
            if node.kind != "mapping":
                replace(node, key_path=mapping.path_of_key("<<")).note_problem(
                    "an alias of a mapping, or a list of them"
                )
            yield from node.pairs.items()

    def make_scalar(self, source: Any, kind: str, at: YamlNode) -> YamlNode:
        plain = source.style is None
        text, variable, unset, written = source.value, "", None, ""
        references = list(_REFERENCE.finditer(text))
        if any(map(self.is_secret_variable, references)):
            written = _REFERENCE.sub(
                lambda part: part[0] if self.is_secret_variable(part) else self.resolve_reference(part), text
            )
        for reference in references:
            if broken := reference["broken"]:
                forms = "${VAR}, ${env:VAR}, ${VAR:-default}, and $$ for a dollar sign"
                at.note_problem(forms, actual=f"the malformed reference {clip_text('$' + broken)!r}")
                return at
        if (only := _REFERENCE.fullmatch(text)) and only["name"]:
            variable = only["name"] if self.document.environ.get(only["name"]) else ""
            if variable.startswith(STANDARD):
                default = only["default"] or ""
                unset = replace(at, kind=self.kind_of_text(source, default, kind), text=default, plain=plain)
            text = self.resolve_reference(only)
            kind = self.kind_of_text(source, text, kind)
        else:
            text = _REFERENCE.sub(self.resolve_reference, text)
        return replace(at, kind=kind, text=text, plain=plain, variable=variable, written=written, unset=unset)

    def kind_of_text(self, source: Any, text: str, quoted: str) -> str:
        return _kind_of_tag(self.resolve(type(source), text, (True, False))) if source.style is None else quoted

    def resolve_reference(self, reference: re.Match[str]) -> str:
        if reference["escape"]:
            return "$"
        return self.document.environ.get(reference["name"]) or reference["default"] or ""

    def is_secret_variable(self, reference: re.Match[str]) -> bool:
        """Return True for a variable that messages must not show. Only OTEL_* variables except headers are shown."""
        name = reference["name"] or ""
        is_open = name.startswith("OTEL_") and not name.endswith("_HEADERS")
        return bool(self.document.environ.get(name)) and not is_open


# ---------------------------------------------------------------- readers of plain values


Shape = Mapping[str, Any]

SHAPES: dict[Read, Shape] = {}
"""The JSON Schema of the values that each reader accepts."""

REFERENCE: Shape = {"$ref": "#/$defs/reference"}

MOST_WHOLE = 10**18 - 1

Reading = TypeVar("Reading", bound=Callable[..., Any])


def with_schema(shape: Shape) -> Callable[[Reading], Reading]:
    """Return a decorator that registers the JSON Schema of a reader."""

    def register_reader(read: Reading) -> Reading:
        SHAPES[read] = shape
        return read

    return register_reader


def make_text_schema(syntax: str) -> Shape:
    return {"type": "string", "pattern": f"^(?:{syntax})$"}


@with_schema({"type": "string", "minLength": 1})
def read_string(node: YamlNode) -> str:
    if node.kind != "text":
        node.refuse("text", near=f'"{clip_text(node.text)}"' if node.text else "")
    if not node.text:
        node.refuse("text (or leave the key out)", actual="an empty text")
    return node.text


@with_schema({"type": "boolean"})
def read_flag(node: YamlNode) -> bool:
    if node.kind != "bool":
        node.refuse("true, false", near=find_most_similar(node.text, ("true", "false")))
    return node.text.lower() in ("true", "yes", "on")


def make_choice_reader(*words: str) -> Read:
    @with_schema({"enum": [*words, *([False] if "off" in words else [])]})
    def read(node: YamlNode) -> str:
        text = "off" if node.is_off else node.text
        if node.kind not in ("text", "bool") or text not in words:
            node.refuse(", ".join(words), near=find_most_similar(node.text, words))
        return text

    return read


_WHOLE = late_pattern(r"[+-]?(?:0|[1-9][0-9]{0,17})")


def make_whole_number_reader(least: int) -> Read:
    @with_schema({"type": "integer", "minimum": least, "maximum": MOST_WHOLE})
    def read(node: YamlNode) -> int:
        # The text is read here because YAML 1.1 takes 010 for eight and 1:30 for ninety.
        if node.kind != "int" or not _WHOLE.fullmatch(node.text) or int(node.text) < least:
            node.refuse(f"a whole number from {least}, in decimal")
        return int(node.text)

    return read


def text_reader(syntax: str, allowed: str, suggest: Callable[[str], str] = lambda text: "") -> Read:
    """Return a reader of text that matches `syntax`. `suggest` returns the probable meaning of an invalid text."""

    @with_schema(make_text_schema(syntax))
    def read(node: YamlNode) -> str:
        text = read_string(node)
        if not re.fullmatch(syntax, text):
            near = suggest(text)
            node.refuse(allowed, near=near if re.fullmatch(syntax, near) else "")
        return text

    return read


def reader_or_off(read: Read) -> Read:
    """Return a reader that returns None for the word `off`, and otherwise calls `read`."""

    @with_schema({"anyOf": [SHAPES[read], {"enum": ["off", False]}]})
    def read_or_off(node: YamlNode) -> Any:
        return None if node.is_off else read(node)

    return read_or_off


def list_reader(read_item: Read, allowed: str) -> Read:
    @with_schema({"type": "array", "items": SHAPES[read_item]})
    def read(node: YamlNode) -> tuple[Any, ...]:
        if node.kind != "list":
            node.refuse(allowed)
        with node.document.refuse_incomplete_node():
            return tuple(item.attempt_read(read_item) for item in node.items)

    return read


def list_or_item(read_item: Read) -> Read:
    """Return a reader of an item or of a list of items. The reader drops duplicates."""
    read_list = list_reader(read_item, "a list")
    some = {"type": "array", "minItems": 1, "items": {"anyOf": [SHAPES[read_item], REFERENCE]}}

    @with_schema({"anyOf": [SHAPES[read_item], some]})
    def read(node: YamlNode) -> tuple[Any, ...]:
        if node.kind != "list":
            return (read_item(node),)
        if not node.items:
            node.refuse("at least one (or leave the key out)", actual="an empty list")
        return tuple(dict.fromkeys(read_list(node)))

    return read
