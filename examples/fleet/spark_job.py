"""A Spark job over a dataset: SQL, and the functions of `instrument.fleet` by run.

`spark-submit spark_job.py dataset` prints the requests of all hosts joined by their keys, and the causes of the slowest
ones of each run. `spark_job.py dataset 1.9 1.10` also prints the call paths that a version changed.
"""

from __future__ import annotations

import sys
from typing import Any

import pyarrow
import pyarrow.compute
from pyspark.sql import SparkSession

from instrument import fleet


def joined_requests(spark: Any, folder: str) -> Any:
    """Return the requests of each run. Device times come from the table of intervals."""
    by_run = [spark.read.parquet(f"{folder}/{table}").groupBy("run") for table in ("spans", "intervals")]
    function = fleet.in_spark(fleet.requests, tables=2)
    return by_run[0].cogroup(by_run[1]).applyInArrow(function, fleet.spark_schema("requests"))


def explanations(spark: Any, folder: str) -> Any:
    """Return the causes of the slowest requests of each run."""
    spans = spark.read.parquet(f"{folder}/spans")
    return spans.groupBy("run").applyInArrow(fleet.in_spark(fleet.explanations), fleet.spark_schema("explanations"))


def changes(spark: Any, folder: str, before: str, after: str) -> Any:
    """Return the call paths of each service that a version changed. The runs of a version are its repetitions."""

    def of_service(old: pyarrow.Table, new: pyarrow.Table) -> pyarrow.Table:
        return fleet.changes(runs(old), runs(new))

    spans = [spark.read.parquet(f"{folder}/spans") for _ in range(2)]
    sides = [
        table.where(table.service_version == version).groupBy("service_name")
        for table, version in zip(spans, (before, after), strict=True)
    ]
    return sides[0].cogroup(sides[1]).applyInArrow(fleet.in_spark(of_service, tables=2), fleet.spark_schema("changes"))


def runs(spans: pyarrow.Table) -> list[pyarrow.Table]:
    """Return the spans of each run. Spark's table of a missing group has no columns."""
    names = spans.column("run") if spans.num_columns else pyarrow.chunked_array([[]])
    return [spans.filter(pyarrow.compute.equal(names, name)) for name in names.unique()]


if __name__ == "__main__":
    session = SparkSession.builder.getOrCreate()
    joined_requests(session, sys.argv[1]).select("run", "name", "key", "duration_ns", "queue_ns").show()
    explanations(session, sys.argv[1]).select("run", "sentence").show(truncate=False)
    if len(sys.argv) > 3:
        changes(session, *sys.argv[1:4]).where("verdict != 'no change'").show(truncate=False)
