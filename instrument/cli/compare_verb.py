"""`instrument compare`: show what a new version made slower, apart from effects of a different load. CI uses the exit
code."""

from __future__ import annotations

import argparse
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from instrument.cli import print_json, print_lines, print_remark
from instrument.cli.inputs import (
    FILES,
    add_merge_options,
    expand_paths,
    import_file_libraries,
    limit_memory,
    list_runs,
    merge_saved_files,
    read_file,
)
from instrument.cli.option_values import Verbs, add_table_options, read_count, read_table_options
from instrument.errors import InstrumentError

if TYPE_CHECKING:
    from instrument.report.comparison import Comparison
    from instrument.report.view import Recording

REGRESSION, INCONCLUSIVE = 1, 3
"""The exit codes after a slowdown beyond the limit, and after an unclear result. 0 is a pass."""

KEPT = 5
"""The default number of runs that a baseline keeps."""


def parse_share(text: str) -> float:
    """Parse a share, such as 3% or 0.03."""
    match = re.fullmatch(r"([0-9]{1,4}(?:\.[0-9]{1,6})?)(%?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 3%")
    return float(match[1]) / (100 if match[2] else 1)


def add_verbs(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "compare",
        help="show what a new version made slower or faster, apart from the effect of its load",
        usage="instrument compare BEFORE AFTER [options]\n       instrument compare --baseline FOLDER AFTER [options]",
        description="Compares like work: calls of the same path, size, batch and load. Exit code: 0; 1 if a call "
        "path got slower than --fail-over allows; 3 if the recordings are inconclusive. Needs "
        "instrument-sdk[compare].",
    )
    parser.add_argument("sides", nargs="+", metavar="FILE", help=f"BEFORE and AFTER, each {FILES}")
    parser.add_argument(
        "--all", action="store_true", help="compare all runs of each folder, run by run if there are 3 or more"
    )
    parser.add_argument(
        "--fail-over",
        type=parse_share,
        metavar="SHARE",
        help="exit with 1 if a call path gets slower by more than this share",
    )
    parser.add_argument("--by", metavar="NAME", help="attribute that groups the requests in tables (default: endpoint)")
    parser.add_argument(
        "--baseline", metavar="FOLDER", help="compare with the runs in this folder, and add AFTER if it passes"
    )
    parser.add_argument(
        "--keep",
        type=read_count,
        default=KEPT,
        metavar="N",
        help=f"number of runs that a baseline keeps (default: {KEPT})",
    )
    add_table_options(parser)
    parser.add_argument(
        "--html", metavar="PAGE", help="also write a page with the tables and a chart of the call paths"
    )
    parser.add_argument(
        "--markdown", metavar="PATH", help="also write the verdict and the changed call paths as Markdown"
    )
    parser.add_argument("--junit", metavar="PATH", help="also write a test case for each call path as JUnit XML")
    add_merge_options(parser)
    parser.set_defaults(verb=print_comparison)


def print_comparison(options: argparse.Namespace, host: list[str]) -> int:
    """Print the changes between two versions. Returns the exit code of the gate."""
    baseline = Path(options.baseline) if options.baseline else None
    if len(options.sides) != (1 if baseline else 2):
        names = "AFTER alone, with --baseline" if baseline else "BEFORE and AFTER"
        raise InstrumentError(f"compare: there are {len(options.sides)} files or folders; give {names}")
    if baseline is not None and not (runs := _list_baseline_runs(baseline)):
        _add_to_baseline(baseline, options.sides[0], options.keep)
        print(f"instrument: compare: the baseline {baseline} had no run; {options.sides[0]} is now its first one")
        return 0
    befores = list(map(str, runs)) if baseline is not None else options.sides[:1]
    import_file_libraries()
    from instrument.report import effects
    from instrument.report.comparison import compare as compare_runs
    from instrument.report.comparison import write_page
    from instrument.report.view import Options, make_json_values

    effects.import_scipy_special()  # before memory is bounded
    view_options = Options(**read_table_options(options), requests_by=options.by or "")
    paths = [Path(side) for side in (*befores, options.sides[-1])]
    files = [str(file) for path in paths for file in (path.rglob("*.*") if path.is_dir() else [path])]
    with limit_memory("compare", files, options.memory):
        before = [run for side in befores for run in _read_side(side, options)]
        comparison = compare_runs(before, _read_side(options.sides[-1], options), view_options)
    comparison = replace(comparison, limit=options.fail_over)
    code = _choose_exit_code(comparison, options.fail_over)
    if options.html:
        write_page(options.html, comparison)
    if options.markdown:
        Path(options.markdown).write_text(_format_markdown(comparison), "utf-8")
    if options.junit:
        ElementTree.ElementTree(_format_junit(comparison, options.fail_over)).write(
            options.junit, "utf-8", xml_declaration=True
        )
    if baseline is not None and code == 0:
        _add_to_baseline(baseline, options.sides[0], options.keep)
    if options.json:
        print_json({"exit_code": code, **make_json_values(comparison)})
    else:
        print_lines(comparison.lines())
    return code


def _read_side(side: str, options: argparse.Namespace) -> list[Recording]:
    from instrument.report.view import Recording

    say = partial(print_remark, "compare")
    runs = list_runs(side) if options.all and Path(side).is_dir() else [expand_paths([side], None, False, say)]
    return [Recording.from_file(merge_saved_files(list(map(read_file, files)), options.clock)) for files in runs]


def _choose_exit_code(comparison: Comparison, limit: float | None) -> int:
    if limit is None:
        return 0
    is_assessed = any(change.ratio is not None for change in comparison.changes)
    if comparison.find_slowdowns(limit):
        return REGRESSION
    return INCONCLUSIVE if comparison.find_unclear_changes(limit) or not is_assessed else 0


def _list_baseline_runs(baseline: Path) -> list[Path]:
    return sorted(path for path in baseline.glob("run-" + "[0-9]" * 6) if path.is_dir())


def _add_to_baseline(baseline: Path, side: str, most: int) -> None:
    """Copy a run into the baseline. Remove the oldest runs if there are more than `most`."""
    runs = _list_baseline_runs(baseline)
    number = int(runs[-1].name.rpartition("-")[2]) + 1 if runs else 1
    target = baseline / f"run-{number:06d}"
    target.mkdir(parents=True)
    for file in expand_paths([side], None, False, lambda sentence: None):
        shutil.copy2(file, target)
    for old in [*runs, target][:-most]:
        shutil.rmtree(old)


def _format_markdown(comparison: Comparison) -> str:
    lines = ["## Comparison", "", *(f"- {sentence}" for sentence in comparison.sentences()), ""]
    changed = comparison.changed
    if changed:
        lines += ["| Call path | Verdict | Change | Between | Cost, ms |", "|---|---|--:|---|--:|"]
    lines += [
        f"| `{change.name.replace('|', chr(92) + '|')}` | {change.verdict} | {change.change_text()} | "
        f"{change.limits_text()} | {(change.cost_ns or 0) / 1e6:.4g} |"
        for change in changed
    ]
    return "\n".join([*lines, ""])


def _format_junit(comparison: Comparison, limit: float | None) -> ElementTree.Element:
    over = set(comparison.find_slowdowns(limit or 0.0))
    unsure = set(comparison.find_unclear_changes(limit or 0.0))
    counts = {"tests": len(comparison.changes), "failures": len(over), "skipped": len(unsure)}
    facts = {"name": "instrument compare", **{name: str(count) for name, count in counts.items()}}
    suite = ElementTree.Element("testsuite", facts)
    for change in comparison.changes:
        case = ElementTree.SubElement(suite, "testcase", classname="instrument.compare", name=" > ".join(change.path))
        if change in over:
            ElementTree.SubElement(case, "failure", message=f"{change.change_text()} ({change.limits_text()})")
        elif change in unsure:
            ElementTree.SubElement(case, "skipped", message=f"not ruled out: {change.limits_text()}")
    return suite
