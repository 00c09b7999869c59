"""What the figures of the `device` view cost: `python tests/bench/utilisation.py [--spans N]`.

A trace of a million spans by default, half of them with device time: requests of twenty spans on eight threads that
overlap, on two devices with four streams each. Prints how long the figures and the two views take.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

from instrument.report.copies import copies
from instrument.report.device import device
from instrument.report.utilisation import utilisation
from instrument.spans import DeviceInterval, Origin, Site, Span, Trace

REQUEST = Site("request", "request")
OPS = [Site(f"op{number}", "op", device=True) for number in range(8)]
COPY = Site("memcpy h2d", "copy", "torch", "Tensor.to", device=True, attributes=(("direction", "h2d"), ("sync", True)))
HOST = Site("prepare", "phase")
IN_A_REQUEST = 20


def made(count: int) -> Trace:
    """A trace of so many spans, the same at each run."""
    chance = random.Random(7)
    spans: list[Span] = []
    while len(spans) < count:
        root_id = len(spans) + 1
        start_ns = root_id * 1_000 + chance.randrange(10_000)
        thread_id = root_id // IN_A_REQUEST % 8
        number, stream = chance.randrange(2), chance.randrange(4)
        spans.append(Span(REQUEST, root_id, 0, root_id, thread_id, 0, start_ns, start_ns + 100_000, 100_000, 0))
        for place in range(1, IN_A_REQUEST):
            at_ns = start_ns + place * 4_000
            site = HOST if place % 2 else COPY if place % 5 == 0 else OPS[place % 8]
            span = Span(site, root_id + place, root_id, root_id, thread_id, 0, at_ns, at_ns + 3_000, 3_000, 3_000)
            if site is not HOST:
                begin_ns = at_ns + chance.randrange(20_000)
                span.device = (DeviceInterval(number, stream, begin_ns, begin_ns + chance.randrange(1, 12_000)),)
            if site is COPY:
                span.attributes = {"bytes": 65_536}
            spans.append(span)
    return Trace(Origin(1, "bench", 0, 0), 0, max(span.end_ns for span in spans), spans)


def timed(name: str, action: Callable[[], object]) -> None:
    start = time.perf_counter()
    action()
    print(f"{name:<14}{time.perf_counter() - start:8.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spans", type=int, default=1_000_000)
    trace = made(parser.parse_args().spans)
    with_device = sum(bool(span.device) for span in trace.spans)
    print(f"{len(trace.spans)} spans, {with_device} with device time")
    timed("utilisation", lambda: utilisation(trace))
    timed("device view", lambda: device(trace))
    timed("copies view", lambda: copies(trace))


if __name__ == "__main__":
    main()
