"""The check of attributes, names and statuses that a service gives to open spans.

OpenTelemetry's types of attributes are allowed. Other values are left out, counted, and logged once. The check loads no
lazy object, such as Django's `request.user`.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, cast
from zlib import crc32

from instrument.recording.spans import (
    ATTRIBUTE_LIMIT,
    BATCH_KEYS,
    BATCH_LIMIT,
    BATCH_WEIGHTS,
    ERROR_TYPE,
    KEY,
    KEY_LIMIT,
    STATUS_CODE,
    STATUS_DESCRIPTION,
    VALUE_LIMIT,
    AttributeValue,
    Site,
)
from instrument.runtime.lazy_imports import replace

MOST_NAMES_PER_SITE = 256
"""The maximum number of new names for the spans of a site."""


def rename_span_of_frame(recorder: Any, frame: Any, name: object) -> None:
    """Rename the span of a frame. If `frame` is None, rename the innermost open span."""
    site = recorder.site_of_open(frame)
    text = check_span_name(name)
    if site is None:
        return
    if text is None:
        words = f"the name of a span must be a text, not {name!r:.60}"
        recorder.complain("span names that are no text", words)
    elif site.kind == "step":
        words = f"{site.name} is a step and cannot be renamed, because steps are counted by name"
        recorder.complain("steps not renamed", words)
    elif frame is None:
        recorder.rename_innermost(_find_or_make_renamed_site(recorder, site, text))
    else:
        recorder.rename(frame, _find_or_make_renamed_site(recorder, site, text))


def _find_or_make_renamed_site(recorder: Any, site: Site, name: str) -> Site:
    """Return a copy of a site with another name. Beyond a limit of names, count the refusal and return the site
    itself."""
    place: Site = recorder.place_of.get(site, site)
    if name == place.name:
        return place
    site_by_name: dict[str, Site] = recorder.renamed.setdefault(place, {})
    renamed = site_by_name.get(name)
    if renamed is None:
        if len(site_by_name) >= MOST_NAMES_PER_SITE or len(recorder.place_of) >= recorder.scope_name_limit:
            recorder.count("span names beyond the limit of their place, counted under the name that it has")
            return place
        renamed = site_by_name.setdefault(name, replace(place, name=name))
        recorder.place_of[renamed] = place
        recorder.note_shape(renamed, recorder.shapes.get(place, "scope"))
    return renamed


def set_status_of_frame(recorder: Any, frame: Any, code: object, description: object, error_type: object) -> None:
    """Set the status of a frame's span. If `frame` is None, set the status of the innermost open span."""
    status = make_status_attributes(code, description, error_type)
    if status is None:
        recorder.complain("states that no span has", f"there is no status {code!r:.60}; allowed: ok, error")
    elif frame is None:
        recorder.annotate_innermost(status)
    else:
        recorder.annotate(frame, status)


REFUSED = "attributes of a kind that no span has"
"""The name under which reports count refused values."""

ALLOWED_KEYS = "allowed: text, not empty, a whole number, a UUID, bytes, or an object of the service's own"
NO_WEIGHTS = "found values that are not finite 64-bit numbers of at least 0; all members get equal weights"

CHECKSUM_CHARACTERS = 4096
"""The number of characters at each end of a long key that enter the key's checksum."""


Complain = Callable[..., None]
"""A function of (name, sentence, kind of value) that counts and logs a refused value."""


def check_attributes(attributes: object, more: Mapping[str, object], complain: Complain) -> dict[str, AttributeValue]:
    result: dict[str, AttributeValue] = {}
    if attributes is not None and not issubclass(type(attributes), Mapping):
        complain(REFUSED, f"attributes must be a mapping, or name=value, not {_class_name(attributes)}")
        attributes = None
    try:
        values = {**(attributes or {}), **more}  # type: ignore[dict-item]
    except Exception as error:  # a mapping of the service's own
        complain(REFUSED, f"the attributes cannot be read: {_class_name(error)}")
        values = dict(more)
    for name, value in values.items():
        if type(name) is not str or not name:
            complain(REFUSED, f"the name of an attribute must be a text, not {_class_name(name)}")
            continue
        checked_value = _check_value(value, BATCH_LIMIT if name in (BATCH_KEYS, BATCH_WEIGHTS) else ATTRIBUTE_LIMIT)
        if checked_value is None:
            allowed = "text, a bool, a number of 64 bits, or a list of one kind of them"
            kind = _class_and_item_names(value)
            complain(REFUSED, f"the attribute {name:.60} cannot be {kind}; allowed: {allowed}", kind)
        else:
            result[_cut_text(name)] = checked_value
    return result


def check_scope_attributes(attributes: Mapping[str, object], complain: Complain) -> dict[str, AttributeValue]:
    """Check the attributes of a scope. A dict of plain values is only copied, because this is faster."""
    if type(attributes) is dict and len(attributes) <= ATTRIBUTE_LIMIT:
        for name, value in attributes.items():
            kind = type(value)
            if type(name) is not str or not 0 < len(name) <= VALUE_LIMIT:
                break
            if kind is str and len(cast(str, value)) <= VALUE_LIMIT:
                continue
            if kind is int and -(2**63) <= cast(int, value) < 2**63:
                continue
            if kind is not float and kind is not bool:
                break
        else:
            return cast("dict[str, AttributeValue]", dict(attributes))
    result = check_attributes(attributes, {}, complain)
    for name in list(result)[ATTRIBUTE_LIMIT:]:
        complain(
            "attributes beyond the limit of a span",
            (f"the attribute {name:.60} is one too many; a span has at most {ATTRIBUTE_LIMIT}"),
        )
        del result[name]
    return result


def encode_key(value: object) -> str:
    """Return the key of a request as text, "" for a value that cannot be a key.

    A key is a text, a whole number, a UUID, bytes, or an array on the host with one whole number. An object of the
    service's own class is a key within one process.
    """
    kind: Any = type(value)
    if kind is int:
        whole = cast(int, value)
        return str(whole) if whole.bit_length() <= 256 else ""
    text = _convert_to_text(value)
    if text is not None:
        return text if len(text) <= KEY_LIMIT else _shorten_key(text)
    if kind is bytes:
        data = cast(bytes, value)[:CHECKSUM_CHARACTERS]
        return encode_key(data.decode() if data.isascii() and data.decode().isprintable() else data.hex())
    if kind.__module__ == "builtins":
        return ""
    try:
        if _is_uuid_class(kind):
            return str(value)[:KEY_LIMIT]
        if issubclass(kind, numbers.Integral):
            return encode_key(int(cast(Any, value)))
        if _is_array_class(kind):
            return encode_key(_read_single_number(value))
    except Exception:  # of a number of the service's own
        return ""
    if _is_value_class(kind):
        return ""
    return f"{kind.__name__[: KEY_LIMIT // 2]}-{os.getpid()}-{id(value):x}"


def _shorten_key(key: str) -> str:
    """Shorten a long key to its first characters and a checksum. Keys that begin alike remain different."""
    parts = f"{len(key)} {key[:CHECKSUM_CHARACTERS]}{key[-CHECKSUM_CHARACTERS:]}"
    return f"{key[: KEY_LIMIT - 9]}~{crc32(parts.encode('utf-8', 'surrogatepass')):08x}"


@lru_cache(maxsize=256)
def _is_uuid_class(kind: Any) -> bool:
    """Return True for `uuid.UUID` and its subclasses. Does not import `uuid`."""
    return any((base.__module__, base.__qualname__) == ("uuid", "UUID") for base in kind.__mro__)


_OF_ARRAYS = ("__array__", "__array_interface__", "__cuda_array_interface__", "__dlpack__")


@lru_cache(maxsize=256)
def _is_array_class(kind: Any, *, on_device: bool = False) -> bool:
    """Return True for a class of arrays. With `on_device`, return True only for arrays that can be on a device."""
    return any(name in vars(base) for base in kind.__mro__ for name in _OF_ARRAYS[2 * on_device :])


def _is_array_on_host(array: Any) -> bool:
    """Return True for an array of numpy, or a tensor of torch on the CPU. Reading any other array would wait for the
    device."""
    kind = type(array).__module__, type(array).__name__
    return kind == ("numpy", "ndarray") or (kind == ("torch", "Tensor") and array.device.type == "cpu")


def _read_single_number(array: Any) -> object:
    return array.item() if _is_array_on_host(array) and array.ndim == 0 else None


def read_first_items(values: Any, most: int) -> list[Any]:
    """Return up to `most` items of an iterable. Raises `UnreadError` for a tensor on a device or with several
    dimensions."""
    kind: Any = type(values)
    if not _is_array_class(kind, on_device=True):
        return list(islice(values, most))
    if not _is_array_on_host(values) or values.ndim != 1:
        raise UnreadError(f"{_class_name(values)} that is on a device or has not one dimension, and is not read")
    items: list[Any] = values[:most].tolist()
    return items


class UnreadError(TypeError):
    """The keys of a batch cannot be read, for example from a tensor on a device."""


_VALUES = (str, bytes, bytearray, float, complex, tuple, list, dict, set, frozenset, numbers.Number)


@lru_cache(maxsize=256)
def _is_value_class(kind: Any) -> bool:
    """Return True for a class whose objects cannot identify a request, such as numbers, dates and lists."""
    return issubclass(kind, _VALUES) or any(base.__module__ == "datetime" for base in kind.__mro__)


def find_refused_key_class(keys: Sequence[object], texts: Sequence[str]) -> str:
    """Return the class name of the first refused key, "" for none. None and "" are missing keys, which are not
    refused."""
    if "" not in texts:
        return ""
    empty = (key for key, text in zip(keys, texts, strict=False) if not text)
    refused = (key for key in empty if key is not None and _convert_to_text(key) != "" and not encode_key(key))
    return next(map(_class_name, refused), "")


def contains_number(values: Sequence[object]) -> bool:
    return any(issubclass(kind, numbers.Number) for kind in set(map(type, values)))


def check_weights(values: Sequence[object]) -> tuple[int | float, ...] | None:
    """Return weights as numbers of Python. Return None if a weight is negative, not finite, or has more than 64
    bits."""
    kinds = set(map(type, values))
    if bool in kinds or not all(issubclass(kind, numbers.Number) for kind in kinds):
        return None
    try:
        weights = tuple(
            int(value) if issubclass(type(value), numbers.Integral) else float(value)
            for value in cast("Sequence[Any]", values)
        )
    except Exception:  # of a number of the service's own
        return None
    return weights if all(0 <= weight < (math.inf if type(weight) is float else 2**63) for weight in weights) else None


def make_key_attributes(key: object, batch: object, complain: Complain) -> dict[str, AttributeValue]:
    """Return the attributes of a span for its key and its batch. If `batch` is a mapping, its values are weights."""
    attributes: dict[str, AttributeValue] = {}
    if key is not None and (text := encode_key(key)):
        attributes[KEY] = text
    elif key is not None:
        complain(REFUSED, f"a key cannot be {_class_name(key)}; {ALLOWED_KEYS}")
    if batch is None:
        return attributes
    try:
        is_one = issubclass(type(batch), (str, bytes))
        keys = [batch] if is_one else read_first_items(batch, BATCH_LIMIT + 1)
        is_mapping = issubclass(type(batch), Mapping)
        weights = list(islice(cast("Mapping[Any, Any]", batch).values(), BATCH_LIMIT)) if is_mapping else None
    except Exception as error:  # of a class of the service's own
        problem = error if type(error) is UnreadError else f"{_class_name(batch)}, {_class_name(error)} when reading it"
        complain(REFUSED, f"the batch cannot be read: {problem}")
        return attributes
    if len(keys) > BATCH_LIMIT:
        complain(REFUSED, f"a batch has more than {BATCH_LIMIT} keys; the others are left out")
        del keys[BATCH_LIMIT:]
    attributes[BATCH_KEYS] = texts = tuple(map(encode_key, keys))
    if refused := find_refused_key_class(keys, texts):
        complain(REFUSED, f"{refused} cannot be a key of a batch; {ALLOWED_KEYS}")
    if weights is not None and len(weights) == len(keys) and (amounts := check_weights(weights)) is not None:
        attributes[BATCH_WEIGHTS] = amounts
    elif weights is not None and contains_number(weights):
        complain(REFUSED, f"{len(keys)} keys need as many weights, {NO_WEIGHTS}")
    return attributes


def check_span_name(name: object) -> str | None:
    text = _convert_to_text(name)
    return _cut_text(text) if text else None


def make_status_attributes(code: object, description: object, error_type: object) -> dict[str, AttributeValue] | None:
    """Return the attributes for a status. Return None for an invalid code. `code` is `ok` or `error`, in upper or lower
    case, or a member of OpenTelemetry's `StatusCode`."""
    try:
        word = _convert_to_text(code) or _convert_to_text(getattr(code, "name", None)) or ""
    except Exception:  # of an object of the service's own
        return None
    word = word.upper()
    if word not in ("OK", "ERROR"):
        return None
    status: dict[str, AttributeValue] = {STATUS_CODE: word}
    if word == "ERROR" and (text := _convert_to_text(description)):
        status[STATUS_DESCRIPTION] = _cut_text(text)
    if word == "ERROR" and (text := _convert_to_text(error_type)):
        status[ERROR_TYPE] = _cut_text(text)
    return status


def _check_value(value: object, most: int) -> AttributeValue | None:
    values_read = _read_list_items(value, most)
    if values_read is None:
        return _check_scalar(value)
    items = [_check_scalar(item) for item in values_read]
    kinds = {type(item) for item in items}
    if kinds == {int, float}:
        return tuple(float(item) for item in items if item is not None)
    values: Any = tuple(items)
    return None if len(kinds) > 1 or type(None) in kinds else values


def _read_list_items(value: object, most: int) -> list[Any] | None:
    if issubclass(type(value), list):
        return list.__getitem__(cast("list[Any]", value), slice(most))
    if issubclass(type(value), tuple):
        return list(tuple.__getitem__(cast("tuple[Any, ...]", value), slice(most)))
    return None


def _check_scalar(value: object) -> str | bool | int | float | None:
    text = _convert_to_text(value)
    if text is not None:
        return _cut_text(text)
    if value is True or value is False:
        return value
    number: Any = value
    kind: Any = type(value)
    try:
        if issubclass(kind, numbers.Integral):
            whole = int(number)
            return whole if -(2**63) <= whole < 2**63 else None
        if issubclass(kind, numbers.Real):
            return float(number)
        if (kind.__module__, kind.__name__) in _BOOLS:
            return bool(number)
        item = _read_single_number(number) if _is_array_class(kind) else None
        return _check_scalar(item) if type(item) in _ITEMS else None
    except Exception:  # of a number of the service's own
        return None


_BOOLS = (("numpy", "bool_"), ("numpy", "bool"))
_ITEMS = (bool, int, float, str)
"""The allowed classes of the value in an array without dimensions."""


def _convert_to_text(value: object) -> str | None:
    return str.__str__(cast(str, value)) if issubclass(type(value), str) else None


def _cut_text(text: str) -> str:
    return text if len(text) <= VALUE_LIMIT else text[: VALUE_LIMIT - 3] + "..."


def _class_name(value: object) -> str:
    return type(value).__name__


def _class_and_item_names(value: object) -> str:
    items = _read_list_items(value, ATTRIBUTE_LIMIT)
    if items is None:
        return "int of more than 64 bits" if type(value) is int else _class_name(value)
    return f"{_class_name(value)} of {' and '.join(dict.fromkeys(map(_class_name, items)))}"
