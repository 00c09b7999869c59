"""The core of the recorder: the one in C, or where that is missing, one that records and raises nothing."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from instrument import native

if TYPE_CHECKING:
    from instrument.native._recorder import Core as Core
    from instrument.native._recorder import Scope as Scope
elif native.MODULE is not None:
    Core, Scope = native.MODULE.Core, native.MODULE.Scope
else:

    class Core:
        """A core that is never on."""

        on = False
        _memory_head = None
        ended_rows = ended_too_short = node_count = 0

        def __init__(self, *_: Any) -> None:
            self.passes, self.irregular, self.user_sites = {}, Counter(), {}

        def count(self, what: str) -> None:
            """Count an irregular event."""
            self.irregular[what] += 1

        def rings(self) -> list[Any]:
            """Return no rings."""
            return []

        def nodes_from(self, first: int) -> tuple[list[Any], bytes]:
            """Return no call paths."""
            return [], b""

        def current_id(self) -> int:
            """Return 0, the id of no span."""
            return 0

        def _nothing(self, *_: Any, **__: Any) -> None: ...

        annotate_innermost = annotate_request = bind = innermost_manual = site_of_open = _reset = _nothing

    class Scope:
        """A scope that times nothing."""

        __slots__ = ("_attributes", "_frame", "_recorder", "_site")

        def __init__(self, recorder: Any, site: Any, attributes: dict[Any, Any] | None = None) -> None:
            self._recorder, self._site, self._attributes, self._frame = recorder, site, attributes, None

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

        def annotate(self, attributes: Any = None, /, **more: Any) -> None:
            """Do nothing."""
