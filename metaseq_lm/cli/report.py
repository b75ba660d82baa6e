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
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from metaseq_lm.core.documents import show_result
from metaseq_lm.core.errors import MetaseqError, UsageError, say
from metaseq_lm.core.files import to_json, write_atomic
from metaseq_lm.core.options import add_options, option, read_options
from metaseq_lm.core.output import clean, count_text, show
from metaseq_lm.core.secrets import masked
from metaseq_lm.reporting.folders import find_plan, find_runs, pick_stage
from metaseq_lm.reporting.formats import WRITERS, to_document
from metaseq_lm.reporting.numbers import Metric
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import Row, group, require_logged, runs_of, where
from metaseq_lm.reporting.significance import Significance, choose_test, compare
from metaseq_lm.reporting.stats import FEWEST, LEVEL, POWER, TESTS, Test
from metaseq_lm.reporting.table import Table, choose_metric, pair_table, pivot_table, setting_table

if TYPE_CHECKING:
    from metaseq_lm.reporting.page import Report

HELP = "compare runs: tables over seeds with significance, FLOPs and time, pictures"
_DRAWN = ("png", "html")
_FORMATS = (*WRITERS, *_DRAWN)
_RECORDS = ("eee", "hf")
_CONDITIONS: dict[str, Any] = {"nargs": "+", "repeated": True, "metavar": "KEY=VALUE"}


@dataclass(frozen=True)
class _ReportOptions:
    """The options of `report`."""

    paths: tuple[str, ...] = option(
        (),
        "a run folder, a folder of runs, e.g. of a sweep, or a file that --archive wrote",
        positional=True,
        nargs="+",
        metavar="RUN_OR_FOLDER",
    )
    metric: str | None = option(
        None,
        "final metric to compare (default: test.accuracy, or the one that chose the best "
        "checkpoint)",
    )
    better: str | None = option(
        None,
        "whether higher or lower is better (default: by the metric's name, lower for a loss, or "
        "as the runs say)",
        choices=("higher", "lower"),
    )
    spread: str = option(
        "sd", "sd: mean ± sample sd; range: median [min, max]", choices=("sd", "range")
    )
    baseline: tuple[str, ...] = option(
        (),
        "test whether settings differ from the one with this label or config value, all other "
        "keys of the table being equal (default: no test)",
        **_CONDITIONS,
    )
    pairs: str | None = option(
        None,
        "instead of the table: two-sided tests of all pairs of settings that differ in this key "
        "alone (default: no test; KEY: label)",
        nargs="?",
        const="label",
        metavar="KEY",
    )
    test: str = option(
        TESTS[0],
        "test of means, or with --spread range of medians (except welch and t); permutation and "
        "welch: the larger p of the two, as in a league",
        choices=TESTS,
    )
    sides: int = option(
        2, '1: only "better than the baseline" was the question before the runs', choices=(1, 2)
    )
    detectable: bool = option(
        False,
        "with --baseline: columns with the difference from it, and with the true difference "
        f"that the test would detect (p below  {LEVEL}, before Holm) with a probability of "
        f"{POWER:.0%}, given these numbers of seeds and their scatter",
    )
    seeds: int | None = option(
        None,
        "with --detectable: what N seeds per setting would detect (default: as many as there are)",
    )
    rows: str | None = option(
        None, "config key for the rows of the table (default: one row a setting)", metavar="KEY"
    )
    columns: str | None = option(
        None,
        "config key for the columns of the table and the panels of pictures (default: none)",
        metavar="KEY",
    )
    mean: bool = option(
        False,
        "with --columns: a last column with the mean over the others, e.g. of a benchmark's tasks",
    )
    format: tuple[str, ...] = option(
        (),
        f"comma-separated from {', '.join(_FORMATS)} (default: all of these with --out, else "
        "text), eee (records of Every Eval Ever), hf (.eval_results of a Hub repository)",
        choices=(*_FORMATS, *_RECORDS),
        metavar="LIST",
    )
    out: Path | None = option(None, "write files into this folder (default: print)", metavar="DIR")
    model: str | None = option(
        None, "with --format eee: what the model is called, as on the Hub", metavar="ORG/NAME"
    )
    benchmark: tuple[str, ...] = option(
        (),
        "with --format hf: a metric, and the benchmark on the Hub and the task that it belongs to",
        nargs="+",
        repeated=True,
        metavar="METRIC=ORG/DATASET:TASK",
    )
    watch: bool = option(
        False,
        "with --out: write the files again whenever results change, until all runs are over; the "
        "page reloads itself (default: once)",
    )
    archive: Path | None = option(
        None,
        "keep the runs of this table in a file that report reads like their folders: settings, "
        "results, validation curves; no checkpoints, no training curves",
        metavar="FILE",
    )
    where: tuple[str, ...] = option(
        (),
        "only runs with this config value; two values of one key keep both (default: all)",
        **_CONDITIONS,
    )
    stage: str | None = option(
        None,
        "runs of this stage of a sweep (default: the last, which ends in the score)",
        metavar="NAME",
    )
    choose: str | None = option(
        None,
        "of runs that differ in this config key only (e.g. optimizer.lr), keep those with the "
        "value that is best by the validation metric that chose their checkpoints (default: all)",
        metavar="KEY",
    )
    choose_by: str | None = option(
        None,
        "with --choose: choose by the mean of this final metric, e.g. valid.accuracy (default: "
        "the one that chose the checkpoints)",
        metavar="METRIC",
    )
    control: tuple[str, ...] = option(
        (),
        "draw the scores of settings with this value as lines across the pictures of scores, e.g. "
        "label=untrained (default: none)",
        **_CONDITIONS,
    )
    expected_best: bool = option(
        False,
        "instead of the table: the best score of a search's trials against the FLOPs of tuning, "
        "and with --out a picture of it",
    )
    x: str | None = option(
        None, "draw the score against this config key (default: none)", metavar="KEY"
    )
    curve: tuple[str, ...] = option(
        (),
        "draw these logged metrics over updates, e.g. train.loss; a pattern such as "
        "'train.alpha_*' draws all it matches in one picture, a panel for each setting (default: "
        "the valid metric of the same name as --metric)",
        nargs="+",
        repeated=True,
        metavar="METRIC",
    )

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats of the output."""
        if self.out and not self.format:
            return _FORMATS
        return self.format or ("text",)

    def __post_init__(self) -> None:
        is_pivot = self.rows is not None or self.columns is not None
        is_drawn = self.curve or self.x or self.control or not {*_DRAWN}.isdisjoint(self.formats)
        is_record = not {*_RECORDS}.isdisjoint(self.formats)
        is_too_few = self.seeds is not None and self.seeds < FEWEST
        for is_mistake, message in (
            (self.watch and (not self.out or self.archive), "--watch: give --out, no --archive"),
            (
                is_record and (not self.out or self.watch),
                "--format eee, hf: give --out, no --watch",
            ),
            (
                bool(self.model) != ("eee" in self.formats),
                "--format eee and --model ORG/NAME belong together",
            ),
            (
                bool(self.benchmark) != ("hf" in self.formats),
                "--format hf and --benchmark METRIC=ORG/DATASET:TASK belong together",
            ),
            (not self.out and is_drawn, "pictures and pages are files: give --out DIR, too"),
            (self.baseline and is_pivot, "--baseline: leave --rows and --columns out"),
            (
                self.pairs and (self.baseline or is_pivot),
                "--pairs: leave --baseline, --rows and --columns out",
            ),
            (self.detectable and not self.baseline, "--detectable: give --baseline as well"),
            (
                self.sides == 1 and not (self.baseline or self.pairs),
                "--sides: give --baseline as well",
            ),
            (self.seeds and not self.detectable, "--seeds: give --detectable as well"),
            (is_too_few, f"--seeds {self.seeds}: a test needs {FEWEST} of each setting"),
            (self.mean and not self.columns, "--mean: give --columns KEY as well"),
            (self.choose_by and not self.choose, "--choose-by: give --choose KEY as well"),
        ):
            if is_mistake:
                raise UsageError(message)
        if self.model or self.benchmark:
            from metaseq_lm.reporting.exchange import check_model, parse_benchmark

            if self.model:
                check_model(self.model)
            for benchmark in self.benchmark:
                parse_benchmark(benchmark)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_options(parser, _ReportOptions)


def run(args: argparse.Namespace) -> int:
    """Print the table and write the files, with --watch whenever results change."""
    options = read_options(_ReportOptions, vars(args))
    if args.json and (options.out or options.format):
        raise UsageError("--json prints one document; leave --out and --format out")
    write = partial(report, options, args.argv, args.json)
    if options.watch:
        from metaseq_lm.reporting.watch import follow, runs_go_on

        paths = list(map(Path, options.paths))
        follow(write, paths, partial(runs_go_on, paths))
    else:
        write()
    return 0


def report(
    options: _ReportOptions, words: Sequence[str], as_json: bool = False, reload: int = 0
) -> None:
    """Print the table, for a terminal or as JSON, and write the files.

    The page names the `words` of the command line, and reloads itself after `reload` seconds, if
    any. Raises UsageError for a path that is not a run or archive.
    """
    runs = find_runs(options.paths)
    if options.expected_best:
        _report_tuning(where(runs, options.where), options)
        return
    runs, planned = _select_runs(runs, options)
    archived = runs
    if options.choose:
        from metaseq_lm.reporting.choice import chosen_values

        by = choose_metric(runs, options.choose_by) if options.choose_by else None
        runs, chosen = chosen_values(runs, options.choose, by)
        planned = [*chosen, *planned]
    metric = choose_metric(runs, options.metric, options.better)
    curves = _choose_curves(runs, options.curve, metric.name)
    keys = (options.x, options.columns, options.rows, options.pairs)
    settings = group(runs, [key for key in keys if key])
    test = choose_test(options.test, options.sides, options.spread)
    if options.pairs:
        table = pair_table(settings, metric, options.pairs, test)
        table = replace(table, notes=[*table.notes, *planned])
        _show_written(_write_table(table, "pairs", options))
        return
    controls = _choose_controls(settings, options.control)
    table, compared = _compared_table(settings, metric, test, options)
    table = replace(table, notes=[*table.notes, *planned])
    if options.archive:
        from metaseq_lm.reporting import archive

        archive.write(options.archive, archived)
    if as_json:
        show_result("report", to_document(table, metric, options.spread, compared))
        return
    paths = [options.archive] if options.archive else []
    paths += _write_table(table, "table", options)
    if options.out:
        from metaseq_lm.reporting.page import Report

        paths += _write_records(settings, options)
        command = masked(["metaseq-lm", *words])
        content = Report(table, settings, metric, options.spread, compared, controls, command)
        paths += _write_drawn(content, curves, options, reload)
    if options.out or options.formats == ("text",):
        _show_written(paths)


def _select_runs(runs: Sequence[Run], options: _ReportOptions) -> tuple[list[Run], list[str]]:
    """Return the runs to compare, and notes on others; raises MetaseqError if none has started."""
    compared, hidden = _without_trials(runs)
    plan = find_plan(options.paths)
    runs, notes = pick_stage(compared, plan, options.paths, options.stage)
    notes += hidden
    if not runs:
        raise MetaseqError(" ".join(["no run to compare has started yet.", *notes]))
    return where(runs, options.where), notes


def _compared_table(
    settings: Sequence[Row], metric: Metric, test: Test, options: _ReportOptions
) -> tuple[Table, Significance | None]:
    """Return the table that the options ask for, and the tests in it, if any."""
    spread = options.spread
    if options.rows or options.columns:
        rows = options.rows or "label"
        return pivot_table(settings, metric, rows, options.columns, spread, options.mean), None
    if not options.baseline:
        return setting_table(settings, metric, spread), None
    compared = compare(
        settings,
        metric,
        options.baseline,
        test,
        with_detectable=options.detectable,
        seeds=options.seeds,
    )
    return setting_table(settings, metric, spread, compared), compared


def _without_trials(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Return the runs without trials of searches (all runs if they are all trials), and a note."""
    others = [run for run in runs if not run.trial]
    count = len(runs) - len(others)
    if not others or not count:
        return list(runs), []
    of_search = f"{count_text(count, 'trial')} of a search"
    return others, [f"Not in the table: {of_search} (see --expected-best)."]


def _report_tuning(runs: Sequence[Run], options: _ReportOptions) -> None:
    from metaseq_lm.reporting.choice import draw_tuning, tuning_curves, tuning_table

    curves, name = tuning_curves(runs)
    lower = next(run.trial["lower_is_better"] for run in runs if run.trial)
    points = chain.from_iterable(curve.points for curve in curves)
    scores = [score for _, _, score in points]
    metric = Metric.of(name, scores, "lower" if lower else "higher")
    paths = _write_table(tuning_table(curves, metric), "expected_best", options)
    if options.out and "png" in options.formats and scores:
        paths.append(options.out / "expected_best.png")
        draw_tuning(curves, metric, paths[-1])
    _show_written(paths)


def _write_table(table: Table, name: str, options: _ReportOptions) -> list[Path]:
    """Print a table; write it under a name into the folder --out, if given; return its files."""
    # With --out, the other formats are files only.
    printed = ("text",) if options.out else options.formats
    for form in printed:
        show(WRITERS[form][1](table), end="")
        if form == "csv":  # it has no place for them
            for note in table.notes:
                say(clean(note))
    if name != "table":
        content = {"rows": table.records, "notes": table.notes}
        show_result(f"report-{name.replace('_', '-')}", content)
    if options.out is None:
        return []
    options.out.mkdir(parents=True, exist_ok=True)
    paths = []
    for form in [form for form in options.formats if form in WRITERS]:
        file, write = WRITERS[form]
        paths.append(options.out / f"{name}{Path(file).suffix}")
        write_atomic(paths[-1], write(table).encode())
    return paths


def _write_drawn(
    content: "Report", curves: Sequence[str], options: _ReportOptions, reload: int
) -> list[Path]:
    """Write samples, pictures and the page, as far as the formats ask for them; return the files.

    The page reloads itself after `reload` seconds, if any.
    """
    from metaseq_lm.reporting.canvas import collect
    from metaseq_lm.reporting.page import render, samples_markdown, title_of
    from metaseq_lm.reporting.plots import Pictures, draw_all

    assert options.out is not None
    paths = []
    if content.samples and "md" in options.formats:
        paths.append(options.out / "samples.md")
        write_atomic(paths[-1], samples_markdown(content.samples).encode())
    if {*_DRAWN}.isdisjoint(options.formats):
        return paths
    pictures = Pictures(
        content.settings, options.spread, options.columns, options.x, content.controls
    )
    with TemporaryDirectory() as spare:
        # The page has the drawings as SVG, but only drawing a picture makes them.
        folder = options.out if "png" in options.formats else Path(spare)
        with warnings.catch_warnings(record=True) as caught, collect() as drawings:
            drawn, notes = draw_all(pictures, content.metric, curves, folder)
        # matplotlib warns of characters that its font lacks.
        notes += dict.fromkeys(str(warning.message) for warning in caught)
    if notes:
        show("\n".join(["", *map(clean, notes)]))
    if "png" in options.formats:
        paths += drawn
    if "html" in options.formats:
        paths.append(options.out / "report.html")
        title = f"{title_of(options.paths)}: {content.table.title}"
        page = replace(content.page(title, drawings, notes), reload=reload)
        write_atomic(paths[-1], render(page).encode())
    return paths


def _write_records(settings: Sequence[Row], options: _ReportOptions) -> list[Path]:
    assert options.out is not None
    contents: dict[str, str] = {}
    if options.model:
        from metaseq_lm.reporting.exchange import eval_records

        records, omitted = eval_records(settings, options.model)
        contents |= {path: to_json(record, 1) + "\n" for path, record in records.items()}
        if omitted:
            say(f"not in the records, as nothing tells which end is better: {', '.join(omitted)}")
    if options.benchmark:
        from omegaconf import OmegaConf

        from metaseq_lm.reporting.exchange import hub_entries

        entries = hub_entries(settings, options.benchmark)
        contents[".eval_results/metaseq-lm.yaml"] = OmegaConf.to_yaml(OmegaConf.create(entries))
    for path, content in contents.items():
        (options.out / path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(options.out / path, content.encode())
    return [options.out / path for path in contents]


def _show_written(paths: Sequence[Path]) -> None:
    if paths:
        show("\n  ".join(["\nwritten:", *map(str, paths)]))


def _choose_controls(settings: Sequence[Row], conditions: Sequence[str]) -> list[Row]:
    """Return the settings that meet KEY=VALUE conditions; none without conditions.

    Raises UsageError for a key or value that no run has, or if no other setting is left.
    """
    if not conditions:
        return []
    picked = where(runs_of(settings), conditions, "--control")
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
    is_logged = any(valid_metric in run.logged for run in runs)
    return [valid_metric] * is_logged
