"""How right the neighbours' bill is, on a simulated engine whose costs are known, and what it takes.

    python tests/bench/neighbours.py [--workloads N] [--spans N]

Three tenants share an engine; one is noisy in one of six ways: many requests, bursts, long prompts, huge prompts, long
answers, or a blocked event loop. Each workload runs with it, and its arrivals run again without it. The bill must be
conserved, and the predicted fall of the queue time of the others, in the mean and at p99, within 15 % of the measured.
Then a placebo: the requests of one tenant get one of three names by chance, two of them for A/A. A request of the
placebo must inflict on others what requests of the other two do, but for twice the difference of these.

Targets: suffered equals inflicted in 30 of 30, predictions right in 27 of 30, placebos within noise in 27 of 30. A
recording of a million spans within 2 s.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from noisy_tenants import KINDS, arrivals, bill_of, is_conserved, is_placebo_free, recorded, workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=int, default=30)
    parser.add_argument("--spans", type=int, default=1_000_000)
    options = parser.parse_args()
    conserved = right = free = 0
    for seed in range(options.workloads):
        bill, is_predicted = workload(seed)
        conserved, right, free = conserved + is_conserved(bill), right + is_predicted, free + is_placebo_free(seed)
    print(
        f"suffered equals inflicted in {conserved} of {options.workloads}, the fall of others' queues is right in "
        f"{right}, a placebo within noise in {free}",
        flush=True,
    )
    recording = recorded(1, arrivals(0, KINDS[0], options.spans / 12_500))
    started = time.process_time()
    bill_of(recording)
    most_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    took_s = time.process_time() - started
    print(f"{len(recording.columns)} spans: {took_s:.2f} s of processor, {most_mb:.0f} MB with the simulation")


if __name__ == "__main__":
    main()
