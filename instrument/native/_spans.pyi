"""Types of the native loops over spans. Their twins are in `instrument.recording.spans` and `tally`."""

from typing import Any

from instrument.recording.ring import Row
from instrument.recording.spans import DeviceInterval as DeviceInterval
from instrument.recording.spans import Site
from instrument.recording.spans import Span as Span

def adopt(span: type, interval: type, /) -> None: ...
def of_rows(
    rows: list[Row], thread_id: int, sites: list[Site], first_ns: int, last_ns: int, remote: Any, stream: Any, /
) -> list[Span]: ...
