"""Compare runs: a table of scores over seeds with their cost, and pictures.

Reads run folders (config.yaml, log.jsonl, results.json), groups the runs that differ in nothing
but their seed, and prints the table. Runs without a score, and runs of a sweep that never started,
are named below it, never dropped. A whole sweep, with tests against its baseline:

    metaseq-lm report SWEEP --baseline label=MLM --out DIR

Results kept without their folders, and later runs beside them in one table:

    metaseq-lm report SWEEP --archive measured.jsonl
    metaseq-lm report measured.jsonl MORE_RUNS --archive measured.jsonl

The page of a sweep while it runs; it reloads itself:

    metaseq-lm report SWEEP --out DIR --watch
"""

import argparse
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from metaseq_lm.core.documents import show_result
from metaseq_lm.core.errors import MetaseqError, UsageError, say
from metaseq_lm.core.files import write_atomic
from metaseq_lm.core.output import clean, show
from metaseq_lm.core.registry import nearest
from metaseq_lm.core.secrets import masked
from metaseq_lm.reporting import archive
from metaseq_lm.reporting.choice import chosen_values
from metaseq_lm.reporting.drawing import collect
from metaseq_lm.reporting.expected_best import draw_tuning, tuning_curves, tuning_table
from metaseq_lm.reporting.folders import find_plan, pick_stage, read_runs
from metaseq_lm.reporting.formats import WRITERS, to_document
from metaseq_lm.reporting.html import Report, samples_markdown, samples_of, title_of
from metaseq_lm.reporting.numbers import Metric
from metaseq_lm.reporting.page import render
from metaseq_lm.reporting.pairs import pair_table
from metaseq_lm.reporting.plots import (
    Pictures,
    draw_costs,
    draw_curves,
    draw_metrics,
    draw_scores,
    drawn_costs,
    is_pattern,
    require_logged,
)
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import Setting, describe, group, remedy, scored_functions, where
from metaseq_lm.reporting.significance import choose_test, compare
from metaseq_lm.reporting.stats import FEWEST, LEVEL, POWER, TESTS
from metaseq_lm.reporting.table import Table, choose_metric, pivot_table, setting_table
from metaseq_lm.reporting.watch import follow, runs_go_on

HELP = "compare runs: tables over seeds with significance, FLOPs and time, pictures"
_READABLE = 14  # readable number of series in a picture
_FORMATS = ("text", "md", "csv", "tex", "png", "html")
_DRAWN = ("png", "html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add(
        "paths",
        nargs="+",
        metavar="RUN_OR_FOLDER",
        help="a run folder, a folder of runs, e.g. of a sweep, or a file that --archive wrote",
    )
    metric = "(default: test.accuracy, or the one that chose the best checkpoint)"
    add("--metric", help=f"final metric to compare {metric}")
    add(
        "--better",
        choices=("higher", "lower"),
        help="which end of the metric is best (default: by its name, lower for a loss, or as the "
        "runs say)",
    )
    add(
        "--spread",
        choices=("sd", "range"),
        default="sd",
        help="sd: mean ± sample sd; range: median [min, max] (default: %(default)s)",
    )
    add(
        "--baseline",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="test whether settings differ from the one with this label or config value, "
        "all other keys of the table being equal (default: no test)",
    )
    add(
        "--pairs",
        nargs="?",
        const="label",
        metavar="KEY",
        help="in place of the table: all pairs of settings that differ in this key alone, tested "
        "two-sided (default: no test; KEY: label)",
    )
    add(
        "--test",
        choices=TESTS,
        default=TESTS[0],
        help="of means, with --spread range of medians but for welch and t; permutation and welch: "
        "the larger p of both, as in a league (default: %(default)s)",
    )
    add(
        "--sides",
        type=int,
        choices=(1, 2),
        default=2,
        help='1: only "better than the baseline" was asked before the runs (default: %(default)s)',
    )
    add(
        "--detectable",
        action="store_true",
        help="with --baseline: columns with the difference from it, and with the true one that the "
        f"test would find (p below {LEVEL}, before Holm) with a probability of "
        f"{POWER:.0%}%, with these numbers of seeds and their scatter",
    )
    add(
        "--seeds",
        type=int,
        metavar="N",
        help="with --detectable: what N seeds of each setting would find (default: as many as "
        "there are)",
    )
    add("--rows", metavar="KEY", help="config key down the table (default: one row a setting)")
    columns = "config key across the table and over the panels of pictures (default: none)"
    add("--columns", metavar="KEY", help=columns)
    add(
        "--mean",
        action="store_true",
        help="with --columns: a last column with the mean over the others, e.g. of a benchmark's "
        "tasks",
    )
    add(
        "--format",
        type=formats,
        metavar="LIST",
        help=f"comma-separated from {', '.join(_FORMATS)} (default: all with --out, else text)",
    )
    add("--out", type=Path, metavar="DIR", help="write files into this folder (default: print)")
    add(
        "--watch",
        action="store_true",
        help="with --out: write the files again whenever results change, until all runs are over; "
        "the page reloads itself (default: once)",
    )
    add(
        "--archive",
        type=Path,
        metavar="FILE",
        help="keep the runs of this table in a file that report reads like their folders: "
        "settings, results, validation curves; no checkpoints, no curves of training",
    )
    add(
        "--where",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="only runs with this config value; two values of one key keep both (default: all)",
    )
    stage = "runs of this stage of a sweep (default: the last, which ends in the score)"
    add("--stage", metavar="NAME", help=stage)
    add(
        "--choose",
        metavar="KEY",
        help="of runs that differ in this config key only (e.g. optimizer.lr), those of the value "
        "with the best validation metric, the one that chose their checkpoints (default: all)",
    )
    add(
        "--choose-by",
        metavar="METRIC",
        help="with --choose: the final metric whose mean is to be best, e.g. valid.accuracy "
        "(default: the one that chose the checkpoints)",
    )
    add(
        "--control",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="draw the scores of settings with this value as lines across the pictures of scores, "
        "e.g. label=untrained (default: none)",
    )
    add(
        "--expected-best",
        action="store_true",
        help="in place of the table: the best score of a search's trials against the FLOPs of "
        "tuning, and with --out a picture of it",
    )
    add("--x", metavar="KEY", help="draw the score against this config key (default: none)")
    add(
        "--curve",
        nargs="+",
        action="extend",
        default=[],
        metavar="METRIC",
        help="draw these logged metrics over updates, e.g. train.loss; a pattern such as "
        "'train.alpha_*' draws all it matches in one picture, a panel for each setting "
        "(default: the valid metric of the same name as --metric)",
    )


def formats(text: str) -> list[str]:
    """Return the formats of a comma-separated list; raises UsageError for an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in _FORMATS:
            raise UsageError(
                f"--format: unknown format '{name}'.{nearest(name, list(_FORMATS))} "
                f"Formats: {', '.join(_FORMATS)}."
            )
    return names


def run(args: argparse.Namespace) -> int:
    """Print the table and write the files, with --watch whenever results change."""
    if args.json and (args.out or args.format):
        raise UsageError("--json prints one document; leave --out and --format out")
    if args.watch and (args.out is None or args.archive):
        raise UsageError("--watch writes a page again and again: give --out DIR, and no --archive.")
    if not args.watch:
        return report(args)
    paths = [Path(path) for path in args.paths]
    follow(lambda reload: report(args, reload), paths, partial(runs_go_on, paths))
    return 0


def report(args: argparse.Namespace, reload: int = 0) -> int:
    """Print the table and write the files; the page reloads itself after `reload` seconds, if any.

    Raises UsageError for a path that is not a run or archive, and for options that exclude each
    other.
    """
    output_formats = args.format or (list(_FORMATS) if args.out else ["text"])
    draws = not {*_DRAWN}.isdisjoint(output_formats)
    if args.out is None and (draws or args.curve or args.x or args.control):
        raise UsageError("pictures and pages are files: say with --out DIR where to write them.")
    if args.baseline and (args.rows or args.columns):
        raise UsageError(
            "--baseline compares the settings of the plain table: leave --rows and --columns out."
        )
    if args.pairs and (args.baseline or args.rows or args.columns):
        raise UsageError(
            "--pairs is a table of its own: leave --baseline, --rows and --columns out."
        )
    if args.detectable and not args.baseline:
        raise UsageError("--detectable is a difference from a baseline: give --baseline as well.")
    if args.seeds is not None and not args.detectable:
        raise UsageError("--seeds is how many --detectable asks for: give --detectable as well.")
    if args.seeds is not None and args.seeds < FEWEST:
        raise UsageError(f"--seeds {args.seeds}: a test needs {FEWEST} of each setting.")
    all_runs = read_runs(args.paths)
    if args.expected_best:
        return _report_tuning(where(all_runs, args.where), args.out, output_formats)
    compared_runs, hidden = _without_trials(all_runs)
    runs, planned = pick_stage(compared_runs, find_plan(args.paths), args.paths, args.stage)
    planned += hidden
    if not runs:
        raise MetaseqError(" ".join(["no run to compare has started yet.", *planned]))
    archived = runs = where(runs, args.where)
    if args.mean and not args.columns:
        raise UsageError("--mean is over the columns of a table: give --columns KEY as well.")
    if args.choose_by and not args.choose:
        raise UsageError("--choose-by is how --choose picks values: give --choose KEY as well.")
    if args.choose:
        by = choose_metric(runs, args.choose_by) if args.choose_by else None
        runs, chosen = chosen_values(runs, args.choose, by)
        planned = [*chosen, *planned]
    metric = choose_metric(runs, args.metric, args.better)
    curves = _choose_curves(runs, args.curve, metric.name)
    settings = group(runs, [key for key in (args.x, args.columns, args.rows, args.pairs) if key])
    test = choose_test(args.test, args.sides, args.spread)
    if args.pairs:
        table = pair_table(settings, metric, args.pairs, test)
        table = replace(table, notes=[*table.notes, *planned])
        return _write_table(table, "pairs", args.out, output_formats)
    controls = _choose_controls(settings, args.control)
    compared = None
    if args.rows or args.columns:
        rows = args.rows or "label"
        table = pivot_table(settings, metric, rows, args.columns, args.spread, args.mean)
    else:
        if args.baseline:
            compared = compare(
                settings,
                metric,
                args.baseline,
                test,
                with_detectable=args.detectable,
                seeds=args.seeds,
            )
        table = setting_table(settings, metric, args.spread, compared)
    table = replace(table, notes=[*table.notes, *planned])
    if args.archive:
        archive.write(args.archive, archived)
    if args.json:
        show_result("report", to_document(table, metric, args.spread, compared))
        return 0
    paths = [args.archive] if args.archive else []
    for name in ["text"] if args.out else output_formats:
        show(WRITERS[name][1](table), end="")
        for note in table.notes if name == "csv" else ():  # csv has no place for them
            say(clean(note))
    if args.out is None:
        if paths and output_formats == ["text"]:
            show(_written_list(paths))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    for name in [name for name in output_formats if name in WRITERS]:
        file, write = WRITERS[name]
        paths.append(args.out / file)
        write_atomic(paths[-1], write(table).encode())
    samples = samples_of(settings)
    if samples and "md" in output_formats:
        paths.append(args.out / "samples.md")
        write_atomic(paths[-1], samples_markdown(samples).encode())
    if draws:
        pictures = Pictures(settings, args.spread, args.columns, args.x, controls)
        with TemporaryDirectory() as spare:
            folder = args.out if "png" in output_formats else Path(spare)
            with warnings.catch_warnings(record=True) as caught, collect() as drawings:
                drawn, notes = draw(pictures, metric, curves, folder)
            # matplotlib warns of characters that its font lacks.
            notes += dict.fromkeys(str(warning.message) for warning in caught)
        if notes:
            show("\n".join(["", *map(clean, notes)]))
        if "png" in output_formats:
            paths += drawn
        if "html" in output_formats:
            paths.append(args.out / "report.html")
            command = masked(["metaseq-lm", *args.argv])
            content = Report(
                table, settings, metric, args.spread, compared, controls, samples, command
            )
            title = f"{title_of(args.paths)}: {table.title}"
            page = replace(content.page(title, drawings, notes), reload=reload)
            write_atomic(paths[-1], render(page).encode())
    show(_written_list(paths))
    return 0


def _without_trials(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Return the runs without trials of searches (all runs if they are all trials), and a note."""
    others = [run for run in runs if not run.trial]
    count = len(runs) - len(others)
    if not others or not count:
        return list(runs), []
    of_search = f"{count} trial{'s' * (count > 1)} of a search"
    return others, [f"Not in the table: {of_search} (see --expected-best)."]


def _report_tuning(runs: Sequence[Run], out: Path | None, output_formats: Sequence[str]) -> int:
    """Print the best scores by FLOPs of tuning; write them with a picture into `out`, if any."""
    curves, name = tuning_curves(runs)
    lower = next(run.trial["lower_is_better"] for run in runs if run.trial)
    scores = [score for curve in curves for score in curve.scores]
    metric = Metric.of(name, scores, "lower" if lower else "higher")
    table = tuning_table(curves, metric)
    drawn = partial(draw_tuning, curves, metric) if scores else None
    return _write_table(table, "expected_best", out, output_formats, drawn)


def _write_table(
    table: Table,
    name: str,
    out: Path | None,
    output_formats: Sequence[str],
    draw_picture: Callable[[Path], None] | None = None,
) -> int:
    """Print a table; write it under a name, with its picture if any, into `out` if given."""
    for form in ["text"] if out else output_formats:
        show(WRITERS[form][1](table), end="")
    show_result(f"report-{name.replace('_', '-')}", {"rows": table.records, "notes": table.notes})
    if out is None:
        return 0
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for form in [form for form in output_formats if form in WRITERS]:
        file, write = WRITERS[form]
        paths.append(out / f"{name}{Path(file).suffix}")
        write_atomic(paths[-1], write(table).encode())
    if "png" in output_formats and draw_picture:
        paths.append(out / f"{name}.png")
        draw_picture(paths[-1])
    show(_written_list(paths))
    return 0


def _written_list(paths: Sequence[Path]) -> str:
    """Return a message on the written files."""
    return "\n  ".join(["\nwritten:", *map(str, paths)])


def _choose_controls(settings: Sequence[Setting], conditions: Sequence[str]) -> list[Setting]:
    """Return the settings that meet KEY=VALUE conditions; none without conditions.

    Raises UsageError for a key or value that no run has, or if no other setting is left.
    """
    if not conditions:
        return []
    runs = []
    for setting in settings:
        runs += setting.runs
    picked = where(runs, conditions, "--control")
    controls = [setting for setting in settings if setting.runs[0] in picked]
    if len(controls) == len(settings):
        raise UsageError(
            f"--control {' '.join(conditions)} picks all settings; there is none left to compare."
        )
    return controls


def _choose_curves(runs: Sequence[Run], names: Sequence[str], metric: str) -> list[str]:
    """Return the logged metrics to draw: `names`, or the validation metric behind `metric`.

    Raises UsageError for a name that no log has.
    """
    for name in names:
        require_logged(runs, name)
    if names:
        return list(dict.fromkeys(names))
    valid_metric = f"valid.{metric.partition('.')[2]}"
    return [valid_metric] if any(valid_metric in run.logged for run in runs) else []


def draw(
    pictures: Pictures, metric: Metric, curves: Sequence[str], out: Path
) -> tuple[list[Path], list[str]]:
    """Write the pictures into `out`; return their paths and notes on missing contents."""
    paths: list[Path] = []
    notes: list[str] = []
    count = len(pictures.styles())
    if count > _READABLE:
        notes.append(
            f"{count} series in one picture are hard to tell apart; use --where, --columns."
        )
    for curve in curves:
        paths.append(out / _file_name("curves", curve))
        drawn = draw_metrics if is_pattern(curve) else draw_curves
        notes += drawn(pictures, curve, paths[-1])
    if differing := scored_functions(metric.name, pictures.settings):
        notes.append(
            f"No picture of scores: {describe(metric.name, differing)}; {remedy(differing)}."
        )
        return paths, notes
    if not any(setting.scored(metric.name) for setting in pictures.settings):
        notes.append("No picture of scores: no run has one.")
    elif pictures.along:
        paths.append(out / _file_name("score_by", pictures.along))
        notes += draw_scores(pictures, metric, paths[-1])
    for cost in drawn_costs(pictures.settings, metric):
        paths.append(out / f"score_by_{cost}.png")
        notes += draw_costs(pictures, metric, paths[-1], cost)
    return paths, notes


def _file_name(kind: str, name: str) -> str:
    """Return the file name of a picture, such as curves_valid.accuracy.png."""
    return f"{kind}_{re.sub(r'[^A-Za-z0-9_.-]+', '_', name)}.png"
