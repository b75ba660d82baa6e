"""Compare objectives on your own text, by your own labels, in one command and a given time.

  metaseq-lm compare corpus.txt --task labels.csv
  metaseq-lm compare a.txt b.txt --task train.conllu --task-test test.conllu --minutes 30
  metaseq-lm compare corpus.txt --task labels.tsv --objectives causal,masked_40,diffusion

TEXT has a document a line, in a .jsonl file as the field text. The labelled data are a table (CSV,
TSV, JSON lines) with the columns text and label, words with tags in CoNLL columns (.conll, .bio,
.iob), or CoNLL-U (.conllu). Without --task-test every fifth row or sentence is held out for the
score.

The command measures what runs cost here, prints it, and chooses a budget per run so that the whole
league takes about --minutes. It tunes learning rates, trains models on several seeds, scores them
frozen and fine-tuned beside untrained ones, and writes a page that says which objective is better.
Give the same command again to continue. OUT is the folder of an ordinary league, with its plan in
OUT/plan.yaml:
'metaseq-lm league report OUT' prints it again, 'metaseq-lm league --out OUT --with ...' adds an
objective of your own.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from metaseq_lm.cli import league
from metaseq_lm.core.documents import show_result
from metaseq_lm.core.files import write_atomic
from metaseq_lm.core.options import add_options, option, read_options
from metaseq_lm.core.output import seconds_text, show_progress
from metaseq_lm.reporting.numbers import flops_text

if TYPE_CHECKING:
    from metaseq_lm.league.folder import Contents, LeagueFolder
    from metaseq_lm.league.plan import Plan
    from metaseq_lm.sweeps.options import Launch

PROGRESS = True
HELP = "compare objectives on your own text, by your own labels, in a given time"
_DRAFT = 1e12  # FLOPs of a run of the plan by which costs are measured
_MOST_PARALLEL = 8  # runs at a time, unless --max-parallel says more
_HEAD = "# The plan of this league, by metaseq-lm compare; docs/how_to/league.md has the keys.\n"


@dataclass(frozen=True)
class _CompareOptions:
    """What to compare, by what, and for how long."""

    task: str = option("", "labelled data to learn from", metavar="TABLE", required=True)
    task_test: str | None = option(
        None, "labelled data to score (default: a fifth of --task)", metavar="TABLE"
    )
    columns: tuple[str, ...] = option(
        (), "names of the columns, for a TABLE without a header row", metavar="A,B"
    )
    text_column: str | None = option(None, "column of the texts in TABLE (default: text)")
    label_column: str | None = option(None, "column of the labels (default: label)")
    tag_column: str | None = option(
        None, "column of the tags in .conll files, from 0 (default: -1, the last)"
    )
    objectives: tuple[str, ...] = option(
        ("causal", "masked_40"),
        "objectives, the baseline first (default: causal,masked_40)",
        metavar="A,B",
    )
    seeds: int | None = option(
        None, "seeds per objective (default: the fewest that can decide; 4 for two)", at_least=1
    )
    minutes: float = option(10.0, "how long everything may take here (default: 10)", above=0)
    out: str = option("compare", "folder of the league (default: compare)", metavar="OUT")
    dry_run: bool = option(False, "show the cost, and run nothing")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    from metaseq_lm.sweeps.options import Launch

    parser.add_argument("text", nargs="+", metavar="TEXT", help="text files, a document a line")
    add_options(parser, _CompareOptions)
    add_options(parser.add_argument_group("launch"), Launch)


def run(args: argparse.Namespace) -> int:
    """Choose a budget, show the costs, run the league and report."""
    from metaseq_lm.league.folder import Contents
    from metaseq_lm.league.forecast import text_plan
    from metaseq_lm.league.plan_files import plan_of

    options = read_options(_CompareOptions, vars(args))
    data = {
        "text": args.text,
        "text_column": "text" if all(name.endswith(".jsonl") for name in args.text) else None,
        "probe": options.task,
        "probe_test": options.task_test,
        "columns": list(options.columns) or None,
        "text_columns": [options.text_column] if options.text_column else None,
        "label_column": options.label_column,
        "tag_column": options.tag_column,
    }
    data = {key: value for key, value in data.items() if value is not None}

    def contents_at(budget: float) -> Contents:
        content = text_plan(data, options.objectives, options.seeds, budget)
        return Contents(*plan_of(content, Path.cwd()))

    league_options = league.LeagueOptions(out=options.out, dry_run=options.dry_run)
    folder, stored = league.open_folder(league_options)
    if args.max_parallel is None and args.executor != "slurm":
        args.max_parallel = _runs_at_a_time()
    launch = league.launch_of(args, folder.path, options.dry_run)
    if stored is not None:
        (budget,) = stored.plan.ladder.budgets[:1]
        league.check_same_plan(folder, stored, contents_at(budget).plan)
        show_progress(f"{folder.path}: goes on, with {flops_text(budget)} FLOPs a run")
        contents = stored
    else:
        contents = _fitted(contents_at, options, folder, launch)
        if options.dry_run:
            return 0
        plan = OmegaConf.to_yaml(dict(contents.content))
        write_atomic(folder.path / "plan.yaml", (_HEAD + plan).encode())
    # An option of `league` that `run_contents` reads: nothing is added here.
    args.added = []
    code = league.run_contents(args, league_options, launch, folder, contents, stored)
    if not options.dry_run:
        show_progress(
            "Where untrained, guessing or plateau is flagged, models have learnt too little to be "
            "told apart: give more --minutes, and another --out"
        )
    return code


def _fitted(
    contents_at: "Callable[[float], Contents]",
    options: _CompareOptions,
    folder: "LeagueFolder",
    launch: "Launch",
) -> "Contents":
    from metaseq_lm.league.expansion import DataSource
    from metaseq_lm.league.forecast import forecast, measure_times
    from metaseq_lm.league.runner import LeagueRequest, Runner

    contents = contents_at(_DRAFT)
    with league.data_of(contents.plan, folder, options.dry_run) as data:

        def runner_of(plan: "Plan") -> Runner:
            request = LeagueRequest(plan.objectives, plan.ladder.budgets, DataSource(data))
            return Runner(plan, request, folder.path, launch, plan.hash)

        runner = runner_of(contents.plan)
        runner.check_all()
        times = measure_times(runner)
        budget = times.fit(runner, options.minutes)
        contents = contents_at(budget)
        runner = runner_of(contents.plan)
        values, text = forecast(runner, contents, times.updates)
        seconds = times.seconds(runner, budget)
    chosen = (
        f"chosen: {flops_text(budget)} FLOPs a run; the whole league takes about "
        f"{seconds_text(seconds)} here, {launch.max_parallel or 1} runs at a time (--minutes "
        f"{options.minutes:g}); start, validation and scores take "
        f"{seconds_text(times.start + times.scoring)} of each run"
    )
    if options.dry_run:
        show_result("league-plan", values, f"{text}\n{chosen}")
    else:  # the standings are the result
        show_progress(f"{text}\n{chosen}")
    return replace(contents, prices=values["flops_per_update"])


def _runs_at_a_time() -> int:
    import torch

    from metaseq_lm.distributed.launcher import usable_cores

    if torch.cuda.is_available():
        return 1
    return min(usable_cores(), _MOST_PARALLEL)
