"""A Ray job over a dataset: `python ray_job.py dataset` prints the causes of the slowest requests of each run."""

from __future__ import annotations

import sys
from typing import Any

import ray

from instrument import fleet


def by_run(folder: str) -> Any:
    """Return the spans of each run as a group."""
    return ray.data.read_parquet(f"{folder}/spans").groupby("run")


def requests(folder: str) -> Any:
    """Return the requests of each run, joined by their keys over all hosts."""
    return by_run(folder).map_groups(fleet.requests, batch_format="pyarrow")


def explanations(folder: str) -> Any:
    """Return the causes of the slowest requests of each run."""
    return by_run(folder).map_groups(fleet.explanations, batch_format="pyarrow")


if __name__ == "__main__":
    for row in explanations(sys.argv[1]).take_all():
        print(row["run"], row["sentence"])
