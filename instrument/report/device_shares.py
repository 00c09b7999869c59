"""Device time of requests by endpoint: of their own work, and their shares of the batches that served them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from instrument.report.section import Section
from instrument.report.table import bounded, share
from instrument.report.view import Options
from instrument.trace.columns import Int64s
from instrument.trace.device_ledger import DeviceLedger

SHOWN = (
    "Device time of the requests' own work, and their shares of that of batches, each given out once, by",
    "weight. Of several devices it is the sum. Of all: of that of all requests.",
)


@dataclass(frozen=True, slots=True)
class EndpointShare:
    """The requests of a name, and the device time that they had. One with `remaining` stands for so many names."""

    name: str
    requests: int
    own_ns: int
    shared_ns: int
    ratio: float | None
    remaining: int = 0

    @property
    def device_ns(self) -> int:
        return self.own_ns + self.shared_ns

    def mean_ns(self) -> float:
        return self.device_ns / self.requests


def device_shares(found: DeviceLedger, by_name: Mapping[str, Int64s], options: Options) -> list[EndpointShare]:
    """By the places of the requests of each endpoint; nothing where no batch had device time."""
    if not found.given_ns.any():
        return []
    whole_ns = sum(int((found.own_ns + found.shared_ns)[places].sum()) for places in by_name.values())

    def of(name: str, places: Int64s, remaining: int = 0) -> EndpointShare:
        own_ns, shared_ns = (int(column[places].sum()) for column in (found.own_ns, found.shared_ns))
        return EndpointShare(name, len(places), own_ns, shared_ns, share(own_ns + shared_ns, whole_ns), remaining)

    def rest(others: Sequence[EndpointShare]) -> EndpointShare:
        return of("", np.concatenate([by_name[one.name] for one in others]), len(others))

    all_of_it = sorted((of(*one) for one in by_name.items()), key=lambda one: (-one.device_ns, one.name))
    return [*bounded(all_of_it, options, lambda one: one.device_ns, rest)]


def device_share_section(found: Sequence[EndpointShare]) -> Section:
    columns = "name=By request|requests=Requests|own_ns=Own|shared_ns=Of batches|mean_ns=Mean|ratio=Of all"
    return Section("Device time by requests", found, columns, SHOWN)
