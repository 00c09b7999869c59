#!/usr/bin/env bash
# Polars reads the hive folders version=1.1 and version=1.10 of a Parquet dataset as one version, without a word.
#
# Versions: polars 2.1.0, beside pyarrow 26.0.1 and duckdb 2.0.1, Python 3.11.
# Seen: a folder value that looks like a number becomes one. Polars makes 1.1 and 1.10 the same double, so a
#   comparison of two releases sees one. pyarrow and DuckDB keep both as text.
#   DuckDB also keeps hour=07 as the text '07', where Polars and pyarrow read the number 7.
# Expected: distinct folders are distinct values, or the schema says which type the folder has.
# A dataset for all readers puts a letter in front of such values, or keeps them in the files alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q polars==2.1.0 pyarrow==26.0.1 duckdb==2.0.1
cd "$folder"
venv/bin/python - <<'PYTHON'
from pathlib import Path

import duckdb
import polars
import pyarrow
import pyarrow.dataset
import pyarrow.parquet

for name in "version=1.1", "version=1.10", "hour/hour=07":
    Path("data", name).mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.table({"duration_ns": [1]}), Path("data", name, "part.parquet"))


def by_duckdb(glob: str, column: str) -> list[object]:
    query = f"select {column} from read_parquet('{glob}', hive_partitioning = true)"
    return sorted(value for (value,) in duckdb.sql(query).fetchall())


def by_polars(glob: str, column: str) -> list[object]:
    return sorted(polars.scan_parquet(glob, hive_partitioning=True).collect()[column].to_list())


def by_pyarrow(folder: str, column: str) -> list[object]:
    table = pyarrow.dataset.dataset(folder, partitioning="hive", exclude_invalid_files=True).to_table()
    return sorted(value for value in table[column].to_pylist() if value is not None)


versions = {
    "duckdb": by_duckdb("data/version=*/*.parquet", "version"),
    "pyarrow": by_pyarrow("data", "version"),
    "polars": by_polars("data/version=*/*.parquet", "version"),
}
hours = {
    "duckdb": by_duckdb("data/hour/*/*.parquet", "hour"),
    "pyarrow": by_pyarrow("data/hour", "hour"),
    "polars": by_polars("data/hour/*/*.parquet", "hour"),
}
print(versions, hours)
assert versions == {"duckdb": ["1.1", "1.10"], "pyarrow": ["1.1", "1.10"], "polars": [1.1, 1.1]}
assert hours == {"duckdb": ["07"], "pyarrow": [7], "polars": [7]}
PYTHON
