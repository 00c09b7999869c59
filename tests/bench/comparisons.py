"""The accuracy and the time of `instrument compare`, over a simulated service with known costs.

    python tests/bench/comparisons.py [--pairs N] [--requests N] [--spans N]

The benchmark compares pairs of recordings of one service. The correlation of adjacent steps is 0.9. The first pairs are
of the same code, with twice the load, with prompts three times as long, or with both. The other pairs have one function
of ten that is slower by 3 %, under the same changes. The column `plain` is the result of a plain tool: Mann-Whitney's
test at 1 % on the same calls, unmatched. It counts the pairs in which the test calls a call path slower. The first line
is the time of the whole command for two recordings with `--spans` spans together.

Targets: of 60 pairs of the same code at most 1 with a regression. Of 60 pairs with a slower function at least 54 found,
and 52 by its call path. Two recordings of a million spans in all within 2 s and 500 MB.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from scipy import stats

from instrument.report.comparison import SLOWER, Comparison, _collect_calls, compare
from instrument.report.view import Options, Recording

sys.path.insert(0, str(Path(__file__).parents[1]))
from simulated_engine import PARTS, Service
from views import print_cost

SHIFTS: tuple[dict[str, float], ...] = ({"a_second": 80.0}, {"prompt": 600.0}, {"a_second": 80.0, "prompt": 600.0}, {})


def pair(seed: int, requests: int, **after: Any) -> tuple[Recording, Recording]:
    first = Service(2 * seed, requests=requests)
    second = Service(2 * seed + 1, **{"requests": requests, **after})
    return Recording.from_trace(first.run()), Recording.from_trace(second.run())


def slower_paths(found: Comparison) -> list[str]:
    return [change.path[-1] for change in found.changes if change.verdict == SLOWER]


def is_called_by_a_plain_test(before: Recording, after: Recording) -> bool:
    first, second = _collect_calls([before], []).work, _collect_calls([after], []).work
    return any(
        stats.mannwhitneyu(second[path].values_ns, first[path].values_ns, alternative="greater").pvalue < 0.01
        for path in first
        if path in second and path[-1] in {site.name for site in PARTS}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--requests", type=int, default=1_500)
    parser.add_argument("--spans", type=int, default=1_000_000)
    options = parser.parse_args()
    print_cost("compare", {"before.npz": 2, "after.npz": 3}, options.spans)
    alarms = plain = found = named = wrong = 0
    for seed in range(options.pairs):
        before, after = pair(seed, options.requests, **SHIFTS[seed % len(SHIFTS)])
        alarms += bool(slower_paths(compare([before], [after], Options())))
        plain += is_called_by_a_plain_test(before, after)
    print(f"same code: a regression in {alarms} of {options.pairs} pairs (plain {plain})", flush=True)
    for seed in range(1_000, 1_000 + options.pairs):
        name = PARTS[seed % len(PARTS)].name
        before, after = pair(seed, options.requests, slower={name: 1.03}, **SHIFTS[seed % len(SHIFTS)])
        paths = slower_paths(compare([before], [after], Options()))
        found, named, wrong = found + bool(paths), named + (name in paths), wrong + bool(set(paths) - {name})
    print(f"3 % slower: found in {found} of {options.pairs} pairs, named in {named}; another path named in {wrong}")


if __name__ == "__main__":
    main()
