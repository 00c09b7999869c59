#!/usr/bin/env bash
# pyarrow leaves a valid Parquet file with part of the rows where its writer's block ends by an exception.
#
# Version: pyarrow 26.0.1, Python 3.11.
# Seen: `with ParquetWriter(path, schema)` closes the file properly whatever ended the block. The footer is
#   written, so that every reader takes the rows that came before the exception for all of them.
# Expected: an aborted write is no complete file.
# Whoever writes datasets gives the file its final name only after the block has ended without an exception.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q pyarrow==26.0.1
cd "$folder"
venv/bin/python - <<'PYTHON'
import pyarrow
import pyarrow.parquet

schema = pyarrow.schema([("span_id", pyarrow.int64())])


def batches():
    yield [1, 2, 3]
    raise OSError("the source of the spans has gone")


try:
    with pyarrow.parquet.ParquetWriter("spans.parquet", schema) as writer:
        for ids in batches():
            writer.write_table(pyarrow.table({"span_id": ids}, schema=schema))
except OSError as error:
    print("the writer's block ended by:", error)
rows = pyarrow.parquet.read_table("spans.parquet").num_rows
print("rows in the file all the same:", rows)
assert rows == 3
PYTHON
