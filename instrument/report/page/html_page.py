"""One HTML file of a report: what it shows as packed JSON, and the style and scripts that lie beside this module.

Nothing in the file asks for anything else: its content security policy allows the scripts and the style in it by their
digests, and nothing from any network. Names and values of the service stand in the JSON alone, as base64 of what zlib
made of it, which cannot end the element around it; the scripts make text of them, never markup.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from instrument.errors import TraceError
from instrument.report.page.page_document import page_document
from instrument.report.view import Options, Recording
from instrument.runtime import atomic

SCRIPTS = (
    "page_data.js", "page_parts.js", "page_tables.js", "lane_chart.js", "request_pages.js", "calls_icicle.js",
    "device_page.js", "page_main.js",
)  # fmt: skip
"""Those of ours, in the order in which they run, after d3."""

MOST_BYTES = 5_000_000
"""A page that would be larger has fewer spans."""

PARTS = (1, 2, 4, 16, 64)
"""Which part of the spans that there is mostly room for a page has: the first with which it is small enough."""

LEVEL = 6
"""Of zlib."""


def write_page(
    path: str | os.PathLike[str],
    recording: Recording,
    options: Options,
    *,
    request: str | None = None,
    header: str = "",
) -> Path:
    """Write the page of a recording; `request` is the one to begin with, `header` says of what files it is.

    The file appears complete and with mode 0600 or not at all. Raises `TraceError` where it cannot be written, or there
    is no such request.
    """
    for part in PARTS:
        text = html_page(page_document(recording, options, request, header, part))
        if len(text) <= MOST_BYTES:
            break
    target = Path(path)
    try:
        with atomic.replacing(target) as file:
            file.write(text.encode("utf-8"))
    except OSError as problem:
        raise TraceError(f"cannot write the page {target}: {problem.strerror or problem}") from problem
    return target


def html_page(document: Mapping[str, Any]) -> str:
    """The page that shows a document."""
    d3, style = _asset("d3.min.js"), _asset("page.css")
    script = "\n".join(map(_asset, SCRIPTS))
    service = str(document["about"]["service"])
    parts = {
        "policy": f"default-src 'none'; script-src {_digest(d3)} {_digest(script)}; style-src {_digest(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'",
        "title": escape(f"{service} · instrument report" if service else "instrument report"),
        "style": style,
        "d3": d3,
        "licence": escape(_asset("d3.md").partition("## Licence")[2].strip()),
        "data": packed_document(document),
        "script": script,
    }
    page = _asset("page.html")
    pieces = page.split("{{")
    return pieces[0] + "".join(parts[name] + rest for name, _, rest in (piece.partition("}}") for piece in pieces[1:]))


def packed_document(document: Any) -> str:
    """A document as JSON, deflated, in base64: letters, digits, `+`, `/` and `=`, whatever it says."""
    text = json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode("ascii"), LEVEL)).decode("ascii")


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    """How a policy names what it allows."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"
