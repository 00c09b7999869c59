"""The accuracy and the time of `instrument explain`, over a simulated service with known delays.

    python tests/bench/explanations.py [--planted N] [--plain N] [--spans N]

Each planted run has one incident of a kind that `tests/simulated_engine.py` knows, of 30 to 140 ms, under another load
and with noise. The same run without it says by how much the incident delayed the request that is explained. A plain run
has noise alone, and its slowest request is explained. The first line is what the whole command takes for a recording of
that number of spans.

Targets: of 200 planted runs the right cause first in 180, a wrong one called with confidence in at most 4, and the time
within 10 % of the planted one. Of 50 plain runs at most 1 with a verdict other than typical or inconclusive. A million
spans within 2 s of processor and 500 MB.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from instrument.report.explanation import EXPLAINED, Explanation, RequestChoice, explain
from instrument.report.view import Options, Recording

sys.path.insert(0, str(Path(__file__).parents[1]))
from simulated_engine import INCIDENTS, Lives
from views import print_cost

RATES = (30.0, 60.0, 90.0)


def planted(number: int) -> tuple[str, Explanation, float]:
    """Explain the request that an incident delayed most. Returns the incident, and accounted over planted time."""
    incident, seed = INCIDENTS[number % len(INCIDENTS)], 100 + number // len(INCIDENTS)
    a_second = RATES[number // len(INCIDENTS) % len(RATES)]
    lives = Lives(seed, incident, size_ms=30 + number * 37 % 110, a_second=a_second, pads=incident == "padding")
    trace, key, delay_ns = lives.planted()
    explanation = explain(Recording.from_trace(trace), RequestChoice(request=key), Options())[0]
    accounted = sum(cause.accounted_ns for cause in explanation.causes if cause.name == incident)
    return incident, explanation, accounted / delay_ns


def plain(number: int) -> Explanation:
    trace, _ = Lives(5_000 + number, a_second=RATES[number % len(RATES)]).run()
    return explain(Recording.from_trace(trace), RequestChoice(), Options())[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planted", type=int, default=200)
    parser.add_argument("--plain", type=int, default=50)
    parser.add_argument("--spans", type=int, default=1_000_000)
    options = parser.parse_args()
    print_cost("explain", {"run.npz": 1}, options.spans)
    first = wrong = near = sure = 0
    for number in range(options.planted):
        incident, explanation, ratio = planted(number)
        lead = explanation.causes[0].name if explanation.causes else ""
        is_first, is_sure = lead == incident, explanation.verdict == EXPLAINED
        first, near, sure = first + is_first, near + (abs(ratio - 1) <= 0.1), sure + (is_first and is_sure)
        wrong += is_sure and not is_first
        if not (is_first and is_sure and abs(ratio - 1) <= 0.1):
            print(f"  {number} {incident}: {explanation.verdict} {lead}, time {ratio:.2f} of the planted", flush=True)
    print(
        f"planted: right cause first in {first} of {options.planted} runs, with confidence in {sure}, time within 10 % "
        f"in {near}; a wrong cause with confidence in {wrong}",
        flush=True,
    )
    verdicts = Counter(plain(number).verdict for number in range(options.plain))
    print(f"plain: {dict(verdicts)}", flush=True)


if __name__ == "__main__":
    main()
