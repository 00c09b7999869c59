"""Text summaries: each view is a function that reads a tally or a trace and returns text.

A view sees finished numbers only, so what was saved yesterday on a server reads on a laptop. Beside the text each
view offers its numbers as plain objects, from which the text is made.
"""

from instrument.report.copies import CopyUse, copies, copy_uses
from instrument.report.device import device
from instrument.report.device_summary import DeviceRow, device_rows, device_summary
from instrument.report.events import EventRow, events, events_rows
from instrument.report.summary import summary
from instrument.report.utilisation import DeviceUse, Utilisation, utilisation

__all__ = [
    "CopyUse",
    "DeviceRow",
    "DeviceUse",
    "EventRow",
    "Utilisation",
    "copies",
    "copy_uses",
    "device",
    "device_rows",
    "device_summary",
    "events",
    "events_rows",
    "summary",
    "utilisation",
]
