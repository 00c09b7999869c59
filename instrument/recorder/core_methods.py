"""What a recorder asks of its core, in C or `instrument.recorder.pure.Core`: names and types alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from instrument.recording.spans import Site

if TYPE_CHECKING:
    from instrument.native._recorder import Core
else:
    Core = object


class CoreMethods(Core):
    """The core, as those see it that are made on it, with what each recorder makes of it."""

    native = False

    if TYPE_CHECKING:

        def make_function(self, function: Callable[..., Any], site: Site) -> Any: ...
        def make_method(
            self,
            function: Callable[..., Any],
            sites: dict[int, Site | None],
            decide: Callable[[Any], Site | None],
            is_traced: Callable[[], bool],
            evaluate: Callable[[Any], Any] | None,
        ) -> Any: ...
        def new_pass(self) -> Any: ...
        def stretch(self, site: Site, attributes: dict[Any, Any] | None = None) -> Any: ...
        def shelf(self, sample: float, spans_per_request: int) -> Any: ...
        def span_of(self, site: Site, attributes: dict[Any, Any] | None = None) -> Callable[[], Any]: ...
