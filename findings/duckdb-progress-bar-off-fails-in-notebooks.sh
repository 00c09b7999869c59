#!/usr/bin/env bash
# DuckDB cannot switch its progress bar off in a Jupyter kernel without ipywidgets, where it is off already.
#
# Versions: duckdb 2.0.1, ipykernel 7.4.0, nbclient 0.11.0, nbformat 5.11.1, Python 3.11.
# Seen: `set enable_progress_bar = false` and `pragma disable_progress_bar` raise InvalidInputException, "required
#   package 'ipywidgets' is missing, which is needed to render progress bars in Jupyter". current_setting() is False
#   before. The same statement works in a script, and in a kernel with ipywidgets, where the bar is on.
# Expected: to ask for no bar needs no package that renders one.
# A user sees libraries that query by DuckDB, and want no bar in their output, fail in notebooks alone. A library has to
# read the setting first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q duckdb==2.0.1 ipykernel==7.4.0 nbclient==0.11.0 nbformat==5.11.1
cat > "$folder/cells.py" <<'END'
import nbformat
from nbclient import NotebookClient

CELLS = [
    "import duckdb; connection = duckdb.connect()",
    "print(connection.execute(\"select current_setting('enable_progress_bar')\").fetchone()[0])",
    "try:\n    connection.execute('set enable_progress_bar = false')\nexcept duckdb.Error as error:\n    print(error)",
]
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
NotebookClient(notebook, kernel_name="python3").execute()
print("".join(output["text"] for cell in notebook.cells for output in cell.outputs))
END
seen=$("$folder/env/bin/python" "$folder/cells.py" 2> "$folder/log") || { cat "$folder/log"; exit 1; }
echo "$seen"
"$folder/env/bin/python" -c "import duckdb; duckdb.connect().execute('set enable_progress_bar = false')"
[[ $seen == False*"'ipywidgets' is missing"* ]] || { echo "the bar can be switched off in a kernel without ipywidgets"; exit 1; }
