"""The cost of `convert`, `merge` and `query` over a million spans, from a recording and from Chrome JSON.

    python tests/bench/conversions.py [--spans N] [--repeat N]

The trace is that of `views.py`: half of the spans have device time; what is merged are the spans of two processes. Each
line is a process of its own: seconds on the clock and of processor, start of Python included, its memory at most, and
what it wrote; the least of some runs. The target is 600 MB.

On two shared cores under Python 3.11 a recording became a recording within 1.8 s of processor and 350 MB, Chrome JSON
in 3.8 s and 350 MB, Parquet in 6.4 s and 520 MB, and OTLP in 2.2 s and 315 MB; a query took 0.6 s and 250 MB. From
Chrome JSON all took 2 to 3 s more, which is to read it, and up to 40 MB more. Two recordings of half a million each
became one in 1.9 s and 470 MB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import views

from instrument.cli.convert_merge_query_recover_verbs import FORMS

TARGET_MB = 600
SELECT = "select kind, count(*), sum(self_ns) from spans group by kind"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for suffix in (".npz", ".json.gz"):
            paths = [str(Path(folder, f"{name}{suffix}")) for name in ("trace", "half", "other")]
            sizes = options.spans, options.spans // 2, options.spans // 2
            for pid, (path, count) in enumerate(zip(paths, sizes, strict=True), start=1):
                made = ["--write", path, "--spans", str(count), "--pid", str(pid)]
                subprocess.run([sys.executable, views.__file__, *made], check=True)
            whole, *halves = paths
            out = Path(folder, "out")
            verbs = {f"convert --to {form}": ["convert", whole, "--to", form, "-o", str(out)] for form in FORMS}
            verbs["merge"] = ["merge", *halves, "-o", str(out), "--clock", "wall"]
            verbs["query"] = ["query", whole, SELECT]
            print(f"from {suffix:<20}{'seconds':>9}{'processor s':>13}{'MB':>7}{'MB written':>12}")
            for name, words in verbs.items():
                wall_s, processor_s, most_mb = views.taken([sys.executable, "-m", "instrument", *words], options.repeat)
                missed = "  over the target" if most_mb > TARGET_MB else ""
                written = f"{out.stat().st_size / 1e6:12.1f}" if out.exists() else f"{'-':>12}"
                print(f"{name:<25}{wall_s:9.2f}{processor_s:13.2f}{most_mb:7.0f}{written}{missed}", flush=True)
                out.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
