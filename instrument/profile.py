"""Reads `profile.yaml`: which functions, layers and copies are instrumented, what is kept, and where it goes.

`load` and `loads` give a frozen `Profile` or raise one `ProfileError` that holds every mistake of the file, each as
``file:line:column: where: found ...; allowed: ...``. `configs/everything.yaml` shows and explains every key;
`profile.schema.json`, beside this file, lets editors complete them. `KEYS` is the table that drives the reading.

A key whose value is null counts as left out (for an export: on, with its defaults). Values may hold ``${VAR}``,
``${env:VAR}``, ``${VAR:-default}`` and ``$$``, as in OpenTelemetry's configuration files. What the profile leaves
out comes from the `OTEL_*` variable of `VARIABLES`, then from the default; `Profile.origins` says which it was.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn
from urllib.parse import unquote, urlsplit, urlunsplit

from instrument.errors import ProfileError
from instrument.spans import KINDS

if TYPE_CHECKING:
    import yaml

TRACER_OPTIONS: tuple[str, ...] = ("Default", "OpDetail", "AllOpDetail")
STATES: tuple[str, ...] = ("CPU", "GPU", "All")
DIRECTIONS: tuple[str, ...] = ("h2d", "d2h", "d2d", "p2p")
VIEWS: tuple[str, ...] = ("events",)
SORT_KEYS: tuple[str, ...] = ("default", "calls", "total", "max", "min", "ave")
PROTOCOLS: tuple[str, ...] = ("http/protobuf", "grpc")
COMPRESSIONS: tuple[str, ...] = ("gzip", "none")
DURATION_UNITS: Mapping[str, int] = {
    "ns": 1, "us": 1_000, "ms": 1_000_000, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9,
}  # fmt: skip
SIZE_UNITS: Mapping[str, int] = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
RATE_UNITS: Mapping[str, int] = {"s": 10**9, "min": 60 * 10**9, "h": 3600 * 10**9}

FILE_BYTES = 2**20
"""The largest file that is read."""
NODES = 10_000
"""The most values that one profile may hold, each alias counted as often as it is used."""
DEPTH = 32
"""The deepest nesting of lists and mappings that is read."""


@dataclass(frozen=True, slots=True)
class FunctionRule:
    """Functions to instrument: the `module:qualname` patterns that select and that exclude them.

    In a pattern `*` stands for any part of one dotted segment and `**`, a segment of its own, for any number of them.
    `name` replaces the function's own name; `device` asks for device time too. `text` is how messages call the rule,
    and `line` (from 1) is where it stands; the line is not compared, so a rule that only moved is the same rule.
    """

    match: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    name: str | None = None
    kind: str = "op"
    device: bool = False
    line: int = field(default=0, compare=False)
    text: str = ""


@dataclass(frozen=True, slots=True)
class LayerRule:
    """Layers of a model to instrument: by path in the module tree, by class name, or by both, which must both hold.

    An empty `match` means every path, an empty `types` every class. The rest is as in `FunctionRule`.
    """

    kind: ClassVar[str] = "layer"
    match: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    name: str | None = None
    device: bool = False
    line: int = field(default=0, compare=False)
    text: str = ""


@dataclass(frozen=True, slots=True)
class CopyRule:
    """Memory copies to instrument: those in one of `directions` that move at least `min_bytes`."""

    directions: tuple[str, ...] = DIRECTIONS
    min_bytes: int = 0
    line: int = field(default=0, compare=False)
    text: str = ""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which steps are recorded: `skip_first` once, then `closed`, `ready` and `record` steps, `repeat` times.

    `repeat` 0 means for ever. In a file ``[start, end]`` is short for skipping `start` steps and recording up to
    `end`, once.
    """

    record: int
    skip_first: int = 0
    closed: int = 0
    ready: int = 0
    repeat: int = 0


@dataclass(frozen=True, slots=True)
class Rate:
    """At most `count` in each `per_ns` nanoseconds."""

    count: int
    per_ns: int


@dataclass(frozen=True, slots=True)
class Capture:
    """Which requests are kept in full: a share of all, those slower than `slow_ns`, and those that failed.

    `limit` bounds how many are kept, `before_ns` adds what came before the request.
    """

    sample: float = 1.0
    slow_ns: int | None = None
    errors: bool = True
    limit: Rate | None = None
    before_ns: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """What the instrumentation may use at most: memory of the rings, spans of one request, disk of the captures."""

    ring_bytes: int = 64 * 2**20
    spans_per_request: int = 10_000
    disk_bytes: int = 2**30


@dataclass(frozen=True, slots=True)
class Device:
    """What is asked of the device: `cuda` is `auto` or `off`; NVML is read every `nvml_ns`, or never if None."""

    cuda: str = "auto"
    nvml_ns: int | None = 10**9


@dataclass(frozen=True, slots=True)
class Chrome:
    """Chrome traces, one file a window; `path` may hold the fields `{service}`, `{pid}` and `{window}`."""

    path: str = "traces/{service}-{pid}-{window}.json.gz"


@dataclass(frozen=True, slots=True)
class Otlp:
    """Spans to an OpenTelemetry collector; `endpoint` is the final URL, `headers` stay out of the repr."""

    endpoint: str = "http://localhost:4318/v1/traces"
    protocol: str = "http/protobuf"
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    timeout_ns: int = 10 * 10**9
    compression: str = "gzip"


@dataclass(frozen=True, slots=True)
class Summary:
    """Text reports to `stderr`, `stdout` or a file, whose path may hold `{service}` and `{pid}`.

    `rows` None means all rows.
    """

    to: str = "stderr"
    views: tuple[str, ...] = ("events",)
    sorted_by: str = "default"
    rows: int | None = None
    per_thread: bool = False


@dataclass(frozen=True, slots=True)
class Export:
    """The ways out; one that is None is off."""

    chrome: Chrome | None = None
    otlp: Otlp | None = None
    summary: Summary | None = None


@dataclass(frozen=True, slots=True)
class Profile:
    """One `profile.yaml`. `Profile()` is what an empty file gives; `schedule` None means always on.

    `source` is the file's path, or the name that `loads` was given. `origins` tells, for each setting that a variable
    can give, where its value came from: ``profile``, the variable's name, or ``default``. Two profiles are equal when
    they ask for the same, wherever they were written.
    """

    service: str = "unknown_service"
    tracer_option: str = "Default"
    state: str = "All"
    functions: tuple[FunctionRule, ...] = ()
    layers: tuple[LayerRule, ...] = ()
    copies: tuple[CopyRule, ...] = ()
    schedule: Schedule | None = None
    capture: Capture = field(default_factory=Capture)
    limits: Limits = field(default_factory=Limits)
    device: Device = field(default_factory=Device)
    export: Export = field(default_factory=Export)
    source: str = field(default="<profile>", compare=False)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)


def load(path: str | os.PathLike[str], *, environ: Mapping[str, str] | None = None) -> Profile:
    """Read a profile from a file. `environ` stands in for `os.environ`.

    Raises `ProfileError` with every mistake of the file, or with the reason why it cannot be read.
    """
    name = os.fspath(path)
    try:
        with Path(path).open("rb") as file:
            data = file.read(FILE_BYTES + 1)
    except FileNotFoundError as error:
        advice = f"create it or give another path (relative ones start at {Path.cwd()})"
        raise ProfileError([f"{name}: asked to read a profile, found no such file; {advice}"]) from error
    except IsADirectoryError as error:
        advice = "give the path of the file in it"
        raise ProfileError([f"{name}: asked to read a profile, found a directory; {advice}"]) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        advice = "give the path of a file that this process may read"
        raise ProfileError([f"{name}: asked to read a profile, found {reason}; {advice}"]) from error
    if len(data) > FILE_BYTES:
        raise _too_large(name)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        found = f"the byte 0x{data[error.start]:02x}, which is not UTF-8; allowed: text; save the file as UTF-8"
        raise ProfileError([f"{name}:{line}:{column}: encoding: found {found}"]) from error
    return loads(text, name=name, environ=environ)


def loads(text: str, *, name: str = "<profile>", environ: Mapping[str, str] | None = None) -> Profile:
    """Read a profile from text; `name` stands for the file in messages, `environ` stands in for `os.environ`.

    Raises `ProfileError` with every mistake of the text.
    """
    if len(text) > FILE_BYTES:
        raise _too_large(name)
    reading = _Reading(name, os.environ if environ is None else environ)
    values: dict[str, Any] = {}
    with suppress(_Refused):
        values = reading.attempt(_part("", dict), _compose(reading, text), "")
    if reading.problems:
        raise ProfileError(list(dict.fromkeys(problem for _, _, problem in sorted(reading.problems))))
    return Profile(**values, source=name, origins=reading.origins)


def _too_large(name: str) -> ProfileError:
    return ProfileError([f"{name}: asked to read a profile, found more than 1 MiB; is this the right file?"])


class _Refused(Exception):  # noqa: N818 - it is no error of the caller's: the problems are noted, the reading goes on
    """Ends the reading of one value whose problems have been noted."""


@dataclass(frozen=True, slots=True)
class _Node:
    """One value of the file. `kind` is null, bool, int, float, date, text, list, mapping, or broken (already noted)."""

    kind: str
    line: int
    column: int
    text: str = ""
    plain: bool = False
    variable: str = ""
    items: tuple[_Node, ...] = ()
    pairs: Mapping[str, tuple[_Node, _Node]] = field(default_factory=dict)


class _Reading:
    """One reading of one text: what it is called, where variables come from, and what has been found so far."""

    def __init__(self, name: str, environ: Mapping[str, str]) -> None:
        self.name = name
        self.environ = environ
        self.problems: list[tuple[int, int, str]] = []
        self.faults = 0
        self.origins: dict[str, str] = {}

    def note(self, at: _Node, where: str, found: str, allowed: str, near: str = "") -> None:
        """Note one problem; `near` is what was perhaps meant."""
        self.faults += 1
        where = _clip(where or "profile") if where.isprintable() else ascii(_clip(where))
        place = f"{self.name}:{at.line}:{at.column}: {where}"
        meant = f"; did you mean '{near}'?" if near else ""
        self.problems.append((at.line, at.column, f"{place}: found {found}; allowed: {allowed}{meant}"))

    def refuse(self, at: _Node, where: str, found: str, allowed: str, near: str = "") -> NoReturn:
        """Note one problem and end the reading of this value."""
        self.note(at, where, found, allowed, near)
        raise _Refused

    def attempt(self, read: Read, node: _Node, where: str) -> Any:
        """What `read` makes of the node, or None once its problems are noted."""
        if node.kind == "broken":
            self.faults += 1
            return None
        with suppress(_Refused):
            if _UNSTORABLE.search(node.text):
                self.refuse(node, where, "a NUL or half of a surrogate pair", "text that a file can hold")
            return read(self, node, where)
        return None


Read = Callable[[_Reading, _Node, str], Any]

_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_REFERENCE = re.compile(
    r"\$(?:(?P<escape>\$)|\{(?:env:)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}\n]*))?\}|(?P<broken>\{[^}\n]*\}?))"
)
_TAG = "tag:yaml.org,2002:"
_KINDS = {"str": "text", "value": "text", "merge": "text", "timestamp": "date"}
_SCALARS = ("null", "bool", "int", "float", "text", "date")


def _compose(reading: _Reading, text: str) -> _Node:
    """The text's one document as nodes; an empty text is an empty mapping."""
    import yaml

    # The pure loader on purpose: it fails on deep nesting where libyaml's would exhaust the C stack.
    class Loader(yaml.SafeLoader):
        nodes = depth = 0

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            self.nodes += 1
            self.depth += 1
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            _check_size(reading, _place(mark), self.nodes, self.depth)
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    try:
        loader = Loader(text)
        root = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        at = _Node("broken", before.count("\n") + 1, error.position - before.rfind("\n"))
        reading.refuse(at, "YAML", f"the character {text[error.position]!a}", "printable text")
    except yaml.MarkedYAMLError as error:
        at = _place(error.problem_mark or error.context_mark)
        found = ", ".join(part for part in (error.context, error.problem) if part)
        line = text.splitlines()[at.line - 1 : at.line]
        hint = " (inside [] and {} a ${...} needs quotes)" if "${" in "".join(line) else ""
        reading.refuse(at, "YAML", f"broken YAML ({found})", f"one document of valid YAML{hint}")
    node = _Tree(reading, loader.resolve).node(root, "") if root else None
    return _Node("mapping", 1, 1) if node is None or node.kind == "null" else node


def _place(mark: Any) -> _Node:
    return _Node("broken", mark.line + 1, mark.column + 1) if mark else _Node("broken", 1, 1)


def _check_size(reading: _Reading, at: _Node, nodes: int, depth: int) -> None:
    if nodes > NODES:
        reading.refuse(at, "YAML", f"more than {NODES} values, aliases counted", f"at most {NODES}")
    if depth > DEPTH:
        reading.refuse(at, "YAML", f"nesting deeper than {DEPTH}", f"at most {DEPTH}")


class _Tree:
    """Makes plain nodes of YAML's: aliases expanded, merge keys merged, references replaced by their variables.

    YAML's nodes are typed `Any`, because PyYAML's stubs lack their `id`; `resolve` tells a plain scalar's tag.
    """

    def __init__(self, reading: _Reading, resolve: Callable[[type[Any], str, tuple[bool, bool]], str]) -> None:
        self.reading = reading
        self.resolve = resolve
        self.nodes = 0
        self.open: list[int] = []

    def node(self, source: Any, where: str) -> _Node:
        at = _place(source.start_mark)
        self.nodes += 1
        _check_size(self.reading, at, self.nodes, len(self.open))
        if id(source) in self.open:
            self.reading.refuse(at, where, "an alias to a value that it is part of", "aliases to other values")
        kind = source.tag.removeprefix(_TAG)
        kind = {"seq": "list", "map": "mapping"}.get(kind, _KINDS.get(kind, kind))
        if kind not in {"scalar": _SCALARS, "sequence": ("list",), "mapping": ("mapping",)}[source.id]:
            self.reading.note(at, where, f"the tag {_clip(source.tag)!r}", "values without tags")
            return at
        self.open.append(id(source))
        try:
            if kind == "list":
                items = tuple(self.node(item, f"{where}[{index}]") for index, item in enumerate(source.value))
                return _Node(kind, at.line, at.column, items=items)
            if kind == "mapping":
                return _Node(kind, at.line, at.column, pairs=self.pairs(source, where))
            return self.scalar(source, kind, at, where)
        finally:
            self.open.pop()

    def pairs(self, source: Any, where: str) -> Mapping[str, tuple[_Node, _Node]]:
        own: dict[str, tuple[_Node, _Node]] = {}
        merged: dict[str, tuple[_Node, _Node]] = {}
        for key, value in source.value:
            at = _place(key.start_mark)
            if key.tag == _TAG + "merge":
                for name, pair in self.merged(value, where):
                    merged.setdefault(name, pair)
            elif key.id != "scalar":
                self.reading.note(at, where, "a list or mapping as a key", "words as keys")
            elif key.value in own:
                first = own[key.value][0].line
                self.reading.note(at, where, f"the key {_clip(key.value)!r} twice", f"once (first in line {first})")
            else:
                own[key.value] = (at, self.node(value, _join(where, key.value)))
        return {**merged, **own}

    def merged(self, value: Any, where: str) -> Iterable[tuple[str, tuple[_Node, _Node]]]:
        for part in value.value if value.id == "sequence" else (value,):
            node = self.node(part, where)
            if node.kind != "mapping":
                self.reading.note(node, _join(where, "<<"), _show(node), "an alias of a mapping, or a list of them")
            yield from node.pairs.items()

    def scalar(self, source: Any, kind: str, at: _Node, where: str) -> _Node:
        plain = source.style is None
        text, variable = source.value, ""
        for reference in _REFERENCE.finditer(text):
            if broken := reference["broken"]:
                forms = "${VAR}, ${env:VAR}, ${VAR:-default}, and $$ for a dollar sign"
                self.reading.note(at, where, f"the malformed reference {_clip('$' + broken)!r}", forms)
                return at
        if (only := _REFERENCE.fullmatch(text)) and only["name"]:
            variable = only["name"] if self.reading.environ.get(only["name"]) else ""
            text = self.value(only)
            if plain:
                tag = self.resolve(type(source), text, (True, False)).removeprefix(_TAG)
                kind = _KINDS.get(tag, tag)
        else:
            text = _REFERENCE.sub(self.value, text)
        return _Node(kind, at.line, at.column, text, plain, variable)

    def value(self, reference: re.Match[str]) -> str:
        if reference["escape"]:
            return "$"
        return self.reading.environ.get(reference["name"]) or reference["default"] or ""


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _clip(text: str) -> str:
    """Text fit for a message: short, and without the credentials of a URL."""
    before, at, after = text.rpartition("@")
    if at and "//" in before:
        text = f"{before.partition('//')[0]}//***@{after}"
    return text if len(text) <= 80 else text[:77] + "..."


def _show(node: _Node) -> str:
    words = {"null": "nothing", "list": "a list", "mapping": "a mapping", "text": repr(_clip(node.text))}
    names = {"bool": "boolean", "date": "date"}
    return words.get(node.kind) or f"the {names.get(node.kind, 'number')} {_clip(node.text)}"


def _nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    from difflib import get_close_matches

    folded = {name.lower(): name for name in known}
    close = get_close_matches(word[:80].lower(), folded, n=1, cutoff=cutoff)
    return folded[close[0]] if close else ""


def _text(reading: _Reading, node: _Node, where: str) -> str:
    if node.kind != "text":
        near = f'"{_clip(node.text)}"' if node.text else ""
        reading.refuse(node, where, _show(node), "text", near)
    if not node.text:
        reading.refuse(node, where, "an empty text", "text (or leave the key out)")
    return node.text


def _flag(reading: _Reading, node: _Node, where: str) -> bool:
    if node.kind != "bool":
        reading.refuse(node, where, _show(node), "true, false", _nearest(node.text, ("true", "false")))
    return node.text.lower() in ("true", "yes", "on")


def _is_off(node: _Node) -> bool:
    """Whether the value is the word `off`, which YAML 1.1 reads as the boolean false unless it is quoted."""
    if node.kind == "bool":
        return node.text.lower() in ("false", "no", "off")
    return node.kind == "text" and node.text == "off"


def _one_of(*words: str) -> Read:
    def read(reading: _Reading, node: _Node, where: str) -> str:
        text = "off" if _is_off(node) else node.text
        if node.kind not in ("text", "bool") or text not in words:
            reading.refuse(node, where, _show(node), ", ".join(words), _nearest(node.text, words))
        return text

    return read


_INTEGER = re.compile(r"[+-]?(?:0|[1-9][0-9]{0,17})")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def _whole(least: int) -> Read:
    def read(reading: _Reading, node: _Node, where: str) -> int:
        # The text is read here because YAML 1.1 takes 010 for eight and 1:30 for ninety.
        if node.kind != "int" or not _INTEGER.fullmatch(node.text) or int(node.text) < least:
            reading.refuse(node, where, _show(node), f"a whole number from {least}, in decimal")
        return int(node.text)

    return read


def _share(reading: _Reading, node: _Node, where: str) -> float:
    # Plain text too: YAML 1.1 takes 1e-3 for text.
    number = node.kind in ("int", "float") or (node.kind == "text" and node.plain)
    if not number or not _DECIMAL.fullmatch(node.text) or not 0 <= float(node.text) <= 1:
        reading.refuse(node, where, _show(node), "a number from 0 to 1")
    return float(node.text)


_QUANTITY = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,18}))?([A-Za-z]+)")
_MEASURED = re.compile(r"\s*([0-9.]+)\s*([^\W\d]*)\s*")


def _amount(text: str, units: Mapping[str, int]) -> int | None:
    """A number with one of the units in the smallest one, rounded down."""
    parts = _QUANTITY.fullmatch(text)
    if not parts or parts[3] not in units:
        return None
    fraction = parts[2] or ""
    return int(parts[1] + fraction) * units[parts[3]] // int("1" + "0" * len(fraction))


def _quantity(units: Mapping[str, int], example: str, least: str) -> Read:
    """Reads a duration in nanoseconds or a size in bytes; a bare 0 needs no unit."""
    bound = f", from {least}" if least else ""
    allowed = f"a number with a unit ({' '.join(units)}), such as {example}{bound}"
    floor = _amount(least, units) or 0
    unit = "B" if "B" in units else example.lstrip("0123456789")

    def meant(text: str) -> str:
        parts = _MEASURED.fullmatch(text)
        if not parts:
            return ""
        near = parts[1] + (_nearest(parts[2], units, 0.5) if parts[2] else unit)
        return near if _amount(near, units) and near != text else ""

    def read(reading: _Reading, node: _Node, where: str) -> int:
        bare_zero = node.kind == "int" and node.text == "0"
        value = 0 if bare_zero else _amount(node.text, units) if node.kind == "text" else None
        if value is None or not floor <= value < 2**63:
            reading.refuse(node, where, _show(node), allowed, meant(node.text))
        return value

    return read


def _duration(example: str, least: str = "") -> Read:
    return _quantity(DURATION_UNITS, example, least)


def _size(example: str, least: str = "") -> Read:
    return _quantity(SIZE_UNITS, example, least)


def _duration_or_off(example: str, least: str) -> Read:
    read_duration = _duration(example, least)

    def read(reading: _Reading, node: _Node, where: str) -> Any:
        return None if _is_off(node) else read_duration(reading, node, where)

    return read


def _rate(reading: _Reading, node: _Node, where: str) -> Rate:
    parts = re.fullmatch(RATE_SYNTAX, node.text) if node.kind == "text" else None
    if not parts:
        near = f"{node.text}/min" if node.kind == "int" and _INTEGER.fullmatch(node.text) else ""
        reading.refuse(node, where, _show(node), "a count a second, minute or hour, such as 5/s, 30/min, 100/h", near)
    return Rate(int(parts[1]), RATE_UNITS[parts[2]])


def _spelled(syntax: str, allowed: str, suggest: Callable[[str], str] = lambda text: "") -> Read:
    """Reads text of one syntax; `suggest` makes what was perhaps meant of text that does not follow it."""

    def read(reading: _Reading, node: _Node, where: str) -> str:
        text = _text(reading, node, where)
        if not re.fullmatch(syntax, text):
            near = suggest(text)
            near = near if re.fullmatch(syntax, near) else ""
            reading.refuse(node, where, _show(node), allowed, near)
        return text

    return read


def _with_colon(text: str) -> str:
    """`chat.engine.Engine.step` as `chat.engine:Engine.step`; a class starts with a capital, as a rule."""
    segments = text.split(".")
    split = next((index for index, segment in enumerate(segments) if segment[:1].isupper()), len(segments) - 1)
    return ".".join(segments[:split]) + ":" + ".".join(segments[split:])


def _with_fields(text: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda part: "{" + _nearest(part[1], ("service", "pid", "window")) + "}", text)


def _without_module(text: str) -> str:
    return text.rpartition(".")[2]


def _stream(text: str) -> str:
    return _nearest(text, ("stderr", "stdout"))


_SEGMENT = r"(?:\*\*?|\*?\w+(?:\*\w+)*\*?)"
_LAYER_SEGMENT = _SEGMENT.replace(r"\w", r"[\w-]")
FUNCTION_SYNTAX = rf"!?{_SEGMENT}(?:\.{_SEGMENT})*:{_SEGMENT}(?:\.{_SEGMENT})*"
LAYER_SYNTAX = rf"!?{_LAYER_SEGMENT}(?:\.{_LAYER_SEGMENT})*"
CLASS_SYNTAX = r"[^\W\d]\w*"
CHROME_SYNTAX = r"(?:[^{}]|\{(?:service|pid|window)\})+"
SUMMARY_SYNTAX = rf"stderr|stdout|(?=[\s\S]*[./\\]){CHROME_SYNTAX}"
URL_SYNTAX = r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:[/?][^\s#]*)?"
RATE_SYNTAX = r"([1-9][0-9]{0,8})/(s|min|h)"
HEADER_NAME_SYNTAX = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"
HEADER_VALUE_SYNTAX = r"[\t -~]*"

_WILDCARDS = "no empty segment; * stands for any part of a segment, ** alone for any number of segments"
_function_pattern = _spelled(FUNCTION_SYNTAX, f"module:qualname with one ':' and {_WILDCARDS}", _with_colon)
_layer_pattern = _spelled(LAYER_SYNTAX, f"a dotted path such as model.layers.*.mlp, {_WILDCARDS}")
_class_name = _spelled(CLASS_SYNTAX, "a class name without its module, such as Linear", _without_module)
_chrome_path = _spelled(CHROME_SYNTAX, "a path, in braces only {service}, {pid} and {window}", _with_fields)
_summary_target = _spelled(SUMMARY_SYNTAX, "stderr, stdout, or a path as for chrome, with a '/' or '.' in it", _stream)


def _url(reading: _Reading, node: _Node, where: str) -> str:
    """A collector's URL, or empty text for none, which a quoted reference to an unset variable gives."""
    if node.kind == "text" and not node.text:
        return ""
    text = _text(reading, node, where)
    allowed = "http://host:port or https://host:port, with or without a path, credentials only in headers"
    if not re.fullmatch(URL_SYNTAX, text):
        near = f"http://{text}"
        reading.refuse(node, where, _show(node), allowed, near if re.fullmatch(URL_SYNTAX, near) else "")
    try:
        _ = urlsplit(text).port
    except ValueError as error:
        reading.refuse(node, where, f"{_show(node)} ({error})", allowed)
    return text


def _seconds(reading: _Reading, node: _Node, where: str) -> int:
    """A timeout variable in seconds, as OpenTelemetry's Python SDK takes it, in nanoseconds."""
    if not _DECIMAL.fullmatch(node.text) or not 0.001 <= float(node.text) < 2**33:
        reading.refuse(node, where, _show(node), "a number of seconds, from 0.001")
    return int(float(node.text) * 10**9)


def _headers(reading: _Reading, node: _Node, where: str) -> tuple[tuple[str, str], ...]:
    if node.kind != "mapping":
        reading.refuse(node, where, "no mapping (not shown)", "a mapping of header names to texts")
    headers = []
    faults = reading.faults
    for name, (key, value) in node.pairs.items():
        if not re.fullmatch(HEADER_NAME_SYNTAX, name):
            reading.note(key, where, f"the header name {_clip(name)!r}", "letters, digits and !#$%&'*+.^_`|~-")
        elif value.kind != "null":
            headers.append((name, reading.attempt(_header_value, value, _join(where, name))))
    if reading.faults > faults:
        raise _Refused
    return tuple(headers)


def _header_value(reading: _Reading, node: _Node, where: str) -> str:
    # Header values are secrets as a rule: no message shows one.
    if node.kind != "text":
        reading.refuse(node, where, "a value that is no text (not shown)", "text; put the value in quotes")
    if not re.fullmatch(HEADER_VALUE_SYNTAX, node.text):
        reading.refuse(node, where, "a character that no header may hold", "printable ASCII on one line")
    return node.text


def _header_list(reading: _Reading, node: _Node, where: str) -> tuple[tuple[str, str], ...]:
    """A headers variable: `name=value,name=value`, URL-encoded."""
    headers = []
    for part in filter(None, (part.strip() for part in node.text.split(","))):
        name, equals, value = (unquote(piece.strip()) for piece in part.partition("="))
        if not equals or not re.fullmatch(HEADER_NAME_SYNTAX, name) or not re.fullmatch(HEADER_VALUE_SYNTAX, value):
            reading.refuse(node, where, "a list of another form (not shown)", "name=value,name=value, URL-encoded")
        headers.append((name, value))
    return tuple(headers)


def _each(read_item: Read, allowed: str) -> Read:
    def read(reading: _Reading, node: _Node, where: str) -> tuple[Any, ...]:
        if node.kind != "list":
            reading.refuse(node, where, _show(node), allowed)
        faults = reading.faults
        values = tuple(reading.attempt(read_item, item, f"{where}[{index}]") for index, item in enumerate(node.items))
        if reading.faults > faults:
            raise _Refused
        return values

    return read


def _one_or_more(read_item: Read) -> Read:
    """Reads a list of at least one, or the one by itself."""
    read_list = _each(read_item, "a list")

    def read(reading: _Reading, node: _Node, where: str) -> tuple[Any, ...]:
        if node.kind != "list":
            return (read_item(reading, node, where),)
        if not node.items:
            reading.refuse(node, where, "an empty list", "at least one (or leave the key out)")
        return tuple(dict.fromkeys(read_list(reading, node, where)))

    return read


def _fields(reading: _Reading, node: _Node, where: str, section: str) -> dict[str, Any]:
    """The fields that one mapping gives to its type, once all its keys are read and none was refused."""
    keys = KEYS[section]
    if node.kind != "mapping":
        reading.refuse(node, where, _show(node), f"a mapping of {', '.join(keys)}")
    faults = reading.faults
    for name, (place, _) in node.pairs.items():
        if name not in keys:
            reading.note(place, where, f"the unknown key {_clip(name)!r}", ", ".join(keys), _nearest(name, keys))
    values = {}
    for name, key in keys.items():
        path = _join(where, name)
        source, child = "profile", node.pairs[name][1] if name in node.pairs else None
        read, label = key.read, path
        if child and child.kind == "null" and key.blank:
            child = _Node("mapping", child.line, child.column)
        elif child is None or child.kind == "null":
            source, read, child = _variable(reading, path, node)
            label = f"{path} (from {source})"
        if path in VARIABLES:
            reading.origins[path] = source
        if child:
            values[key.field] = reading.attempt(read, child, label)
        elif key.required:
            reading.note(node, path, "nothing", key.required)
    if reading.faults > faults:
        raise _Refused
    return values


def _variable(reading: _Reading, path: str, at: _Node) -> tuple[str, Read, _Node | None]:
    """The variable that gives a setting which the profile leaves out, how to read it, and its value."""
    for variable, read in VARIABLES.get(path, ()):
        if text := reading.environ.get(variable):
            return variable, read, _Node("text", at.line, at.column, text)
    return "default", _text, None


def _part(section: str, build: Callable[..., Any]) -> Read:
    return lambda reading, node, where: build(**_fields(reading, node, where, section))


def _function_rule(reading: _Reading, node: _Node, where: str) -> FunctionRule:
    values = _fields(reading, node, where, "functions")
    written = values.pop("match")
    match, exclude = _included(written), _excluded(written)
    if not match:
        at = node.pairs["match"][1]
        reading.refuse(at, _join(where, "match"), "only patterns with '!'", "at least one pattern without '!'")
    return FunctionRule(match, exclude, line=node.line, text=", ".join(written), **values)


def _layer_rule(reading: _Reading, node: _Node, where: str) -> LayerRule:
    values = _fields(reading, node, where, "layers")
    written, types = values.pop("match", ()), values.get("types", ())
    match, exclude = _included(written), _excluded(written)
    if not match and not types:
        found = "only patterns with '!' and no type" if written else "neither match nor type"
        reading.refuse(node, where, found, "a match, a type, or both")
    text = ", ".join(written + (f"type {' '.join(types)}",) * bool(types))
    return LayerRule(match, exclude, line=node.line, text=text, **values)


def _included(patterns: Iterable[str]) -> tuple[str, ...]:
    return tuple(pattern for pattern in patterns if not pattern.startswith("!"))


def _excluded(patterns: Iterable[str]) -> tuple[str, ...]:
    return tuple(pattern[1:] for pattern in patterns if pattern.startswith("!"))


def _copy_rule(reading: _Reading, node: _Node, where: str) -> CopyRule:
    rule = CopyRule(**_fields(reading, node, where, "copies"))
    text = f"{' '.join(rule.directions)} from {rule.min_bytes} B"
    return CopyRule(rule.directions, rule.min_bytes, node.line, text)


def _schedule(reading: _Reading, node: _Node, where: str) -> Schedule:
    if node.kind != "list":
        return Schedule(**_fields(reading, node, where, "schedule"))
    steps = _each(_whole(0), "")(reading, node, where)
    if len(steps) != 2 or steps[0] >= steps[1]:
        found = f"[{', '.join(map(str, steps[:5]))}{', ...' * (len(steps) > 5)}]"
        reading.refuse(node, where, found, "[start, end] with 0 <= start < end, or a mapping")
    return Schedule(record=steps[1] - steps[0], skip_first=steps[0], repeat=1)


_BASE_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"


def _otlp(reading: _Reading, node: _Node, where: str) -> Otlp | None:
    values = _fields(reading, node, where, "export.otlp")
    origin = reading.origins[_join(where, "endpoint")]
    http = values.get("protocol") != "grpc"
    endpoint = values.pop("endpoint", "http://localhost:4318" if http else "http://localhost:4317")
    if not endpoint:
        return None
    # A profile that only hands on the base variable means what the variable means: its path is a prefix.
    handed_on = origin == "profile" and node.pairs["endpoint"][1].variable == _BASE_VARIABLE
    if http and origin != "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT":
        endpoint = _traces_url(endpoint, prefix=handed_on or origin == _BASE_VARIABLE)
    return Otlp(endpoint, **values)


def _traces_url(endpoint: str, *, prefix: bool) -> str:
    parts = urlsplit(endpoint)
    if parts.path.strip("/") and not prefix:
        return endpoint
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") + "/v1/traces"))


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the file: the field that it fills, how it is read, and what a missing one should have been.

    With `blank`, a null value is not the same as leaving the key out.
    """

    field: str
    read: Read
    required: str = ""
    blank: bool = False


_RULES = "a list of rules, each with a '-' of its own"

KEYS: Mapping[str, Mapping[str, Key]] = {
    "": {
        "service": Key("service", _text),
        "tracer_option": Key("tracer_option", _one_of(*TRACER_OPTIONS)),
        "state": Key("state", _one_of(*STATES)),
        "functions": Key("functions", _each(_function_rule, _RULES)),
        "layers": Key("layers", _each(_layer_rule, _RULES)),
        "copies": Key("copies", _each(_copy_rule, _RULES)),
        "schedule": Key("schedule", _schedule),
        "capture": Key("capture", _part("capture", Capture)),
        "limits": Key("limits", _part("limits", Limits)),
        "device": Key("device", _part("device", Device)),
        "export": Key("export", _part("export", Export)),
    },
    "functions": {
        "match": Key("match", _one_or_more(_function_pattern), required="module:qualname, or a list of such patterns"),
        "name": Key("name", _text),
        "kind": Key("kind", _one_of(*KINDS)),
        "device": Key("device", _flag),
    },
    "layers": {
        "match": Key("match", _one_or_more(_layer_pattern)),
        "type": Key("types", _one_or_more(_class_name)),
        "name": Key("name", _text),
        "device": Key("device", _flag),
    },
    "copies": {
        "directions": Key("directions", _one_or_more(_one_of(*DIRECTIONS))),
        "min_bytes": Key("min_bytes", _size("64KiB")),
    },
    "schedule": {
        "skip_first": Key("skip_first", _whole(0)),
        "closed": Key("closed", _whole(0)),
        "ready": Key("ready", _whole(0)),
        "record": Key("record", _whole(1), required="how many steps to record, from 1"),
        "repeat": Key("repeat", _whole(0)),
    },
    "capture": {
        "sample": Key("sample", _share),
        "slow": Key("slow_ns", _duration("250ms")),
        "errors": Key("errors", _flag),
        "limit": Key("limit", _rate),
        "before": Key("before_ns", _duration("2s")),
    },
    "limits": {
        "ring": Key("ring_bytes", _size("64MiB", least="64KiB")),
        "spans_per_request": Key("spans_per_request", _whole(1)),
        "disk": Key("disk_bytes", _size("1GiB")),
    },
    "device": {
        "cuda": Key("cuda", _one_of("auto", "off")),
        "nvml": Key("nvml_ns", _duration_or_off("1s", least="10ms")),
    },
    "export": {
        "chrome": Key("chrome", _part("export.chrome", Chrome), blank=True),
        "otlp": Key("otlp", _otlp, blank=True),
        "summary": Key("summary", _part("export.summary", Summary), blank=True),
    },
    "export.chrome": {
        "path": Key("path", _chrome_path),
    },
    "export.otlp": {
        "endpoint": Key("endpoint", _url),
        "protocol": Key("protocol", _one_of(*PROTOCOLS)),
        "headers": Key("headers", _headers),
        "timeout": Key("timeout_ns", _duration("10s", least="1ms")),
        "compression": Key("compression", _one_of(*COMPRESSIONS)),
    },
    "export.summary": {
        "to": Key("to", _summary_target),
        "views": Key("views", _one_or_more(_one_of(*VIEWS))),
        "sorted_by": Key("sorted_by", _one_of(*SORT_KEYS)),
        "rows": Key("rows", _whole(1)),
        "per_thread": Key("per_thread", _flag),
    },
}
"""Every key that a profile may hold, by section."""


def _otlp_variables(setting: str, read: Read) -> tuple[tuple[str, Read], ...]:
    return tuple((f"OTEL_EXPORTER_OTLP_{signal}{setting}", read) for signal in ("TRACES_", ""))


VARIABLES: Mapping[str, tuple[tuple[str, Read], ...]] = {
    "service": (("OTEL_SERVICE_NAME", _text),),
    "export.otlp.endpoint": _otlp_variables("ENDPOINT", _url),
    "export.otlp.protocol": _otlp_variables("PROTOCOL", _one_of(*PROTOCOLS)),
    "export.otlp.headers": _otlp_variables("HEADERS", _header_list),
    "export.otlp.timeout": _otlp_variables("TIMEOUT", _seconds),
    "export.otlp.compression": _otlp_variables("COMPRESSION", _one_of(*COMPRESSIONS)),
}
"""The variables that give a setting which the profile leaves out, the first that is set and not empty."""
