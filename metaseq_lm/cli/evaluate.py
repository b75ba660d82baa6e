"""Score a checkpoint on splits of its data set, and write its predictions.

examples:
  metaseq-lm evaluate runs/finetuned --split test
  metaseq-lm evaluate runs/mlm/checkpoints/last --split valid --data other/data engine.device=cpu
  metaseq-lm evaluate runs/rte/* --split test --ensemble --best 10 --out ensembles/rte

An ensemble averages the predictions of several runs of one task: class probabilities, real values,
or, for SQuAD, the probabilities of each answer in the n-best lists and of no answer. --best selects
runs by the validation metric of the checkpoint that is used.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metaseq_lm.core.documents import show_result
from metaseq_lm.core.errors import UsageError, say
from metaseq_lm.core.options import add_options, option, read_options
from metaseq_lm.core.output import show

if TYPE_CHECKING:
    from metaseq_lm.training.parts import Parts

HELP = "score a checkpoint, or several as an ensemble, on a split; writes predictions"
OVERRIDES = True


@dataclass(frozen=True)
class _EvaluateOptions:
    """The options of `evaluate`."""

    checkpoint: tuple[str, ...] = option(
        (),
        "checkpoint, or run folder (its best checkpoint, else its last); several with --ensemble",
        positional=True,
        nargs="+",
    )
    split: tuple[str, ...] = option(
        ("test",), "splits to score (default: test)", nargs="+", metavar="S"
    )
    data: str | None = option(None, "data folder (default: the one it was trained on)")
    out: str | None = option(None, "folder for predictions and metrics (default: print only)")
    user_dir: str | None = option(None, "plug-in the run was trained with")
    ensemble: bool = option(False, "score the checkpoints as one ensemble")
    best: int | None = option(None, "use only the N best runs of the ensemble (default: all)")
    metric: str | None = option(
        None, "validation metric for --best (default: the first one; see log.jsonl)", metavar="M"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_options(parser, _EvaluateOptions)


def run(args: argparse.Namespace) -> int:
    """Score each split with the checkpoint or the ensemble; print a JSON line per split."""
    from metaseq_lm import plugins
    from metaseq_lm.core.loading import split_overrides
    from metaseq_lm.data.storage.manifest import FILE_NAME
    from metaseq_lm.runs import manifests

    options = read_options(_EvaluateOptions, vars(args))
    splits, more_overrides = split_overrides(options.split)
    names, overrides = split_overrides([*options.checkpoint, *args.overrides])
    overrides += more_overrides
    if not splits:
        raise UsageError("--split names no split")
    for split in splits:
        if not FILE_NAME.fullmatch(split):
            raise UsageError(f"--split {split!r}: not a name of letters, digits, '_', '-' and '.'")
    if not names:
        raise UsageError("no checkpoint or run folder given")
    if len(names) > 1 and not options.ensemble:
        raise UsageError(
            f"{len(names)} checkpoints: give one, or --ensemble to score them together"
        )
    if not options.ensemble and (options.best is not None or options.metric is not None):
        raise UsageError("--best and --metric choose the runs of an ensemble; give --ensemble too")
    options = replace(options, split=tuple(splits))
    paths = [manifests.resolve(name, prefer="best") for name in names]
    plugins.load_all(options.user_dir)
    plugins.check_runs(names, options.user_dir, overrides)
    if options.ensemble:
        return _run_ensemble(options, paths, overrides)
    from metaseq_lm.training.restore import open_run

    scorer = open_run(str(paths[0]), options.data, options.user_dir, overrides)
    report(options, scorer, paths, ((split, *scorer.score(split)) for split in splits))
    return 0


def report(
    options: _EvaluateOptions,
    scorer: "Parts",
    paths: Sequence[Path],
    results: Iterable[tuple[str, dict[str, float], Sequence[dict[str, Any]]]],
) -> None:
    """Print the metrics of splits; with --out, also write metrics, predictions and submissions.

    `results` are the names of splits with their metrics and predictions.
    """
    from metaseq_lm.core.files import to_json, write_atomic
    from metaseq_lm.evaluation.predictions import write_predictions
    from metaseq_lm.tasks.protocols import submissions_of

    names = [str(path) for path in paths]
    source = {"checkpoints": names} if options.ensemble else {"checkpoint": names[0]}
    splits = {}
    for split, metrics, rows in results:
        splits[split] = metrics
        show(to_json({"split": split, **source, **metrics}))
        if not metrics:
            say(f"metaseq-lm: {split} has no targets, so no score")
        if options.out:
            folder = Path(options.out)
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / f"metrics.{split}.json", (to_json(metrics) + "\n").encode())
            if rows:
                write_predictions(folder, split, rows, submissions_of(scorer.task, split, rows))
    content = {"checkpoints": names, "ensemble": options.ensemble, "out": options.out}
    show_result("evaluate", {**content, "splits": splits})


def _run_ensemble(
    options: _EvaluateOptions, paths: Sequence[Path], overrides: Sequence[str]
) -> int:
    from metaseq_lm.distributed import process_group
    from metaseq_lm.tasks.protocols import Ensembles
    from metaseq_lm.training.restore import open_run

    if options.best is not None:
        paths = _best_of(paths, options.best, options.metric)
    members: dict[str, list[Sequence[dict[str, Any]]]] = {split: [] for split in options.split}
    tasks = []
    for path in paths:
        scorer = open_run(str(path), options.data, options.user_dir, overrides)
        task = scorer.config.task
        if not isinstance(scorer.task, Ensembles):
            raise UsageError(f"task '{task._name}' cannot put predictions of runs together")
        tasks.append(f"{task._name} {getattr(task, 'labelled', '')}".strip())
        if tasks[-1] != tasks[0]:
            raise UsageError(
                f"{path} was trained on {tasks[-1]}, but {paths[0]} on {tasks[0]}; give "
                "runs of one task"
            )
        for split in options.split:
            members[split].append(scorer.score(split)[1])
    if process_group.rank():
        return 0  # rank 0 has all rows
    assert isinstance(scorer.task, Ensembles), "checked above"
    ensemble = scorer.task.ensemble
    report(options, scorer, paths, ((s, *ensemble(s, members[s])) for s in options.split))
    return 0


def _best_of(paths: Sequence[Path], count: int, metric: str | None) -> list[Path]:
    """Return the `count` checkpoints with the best validation metric, in the order given.

    `metric` defaults to the first validation metric. Whether higher is better is taken from the
    trainer's options if it chose the best checkpoint by this metric, otherwise from its name.
    """
    from metaseq_lm.core.config import flatten
    from metaseq_lm.evaluation.predictions import best_indices
    from metaseq_lm.reporting.numbers import Metric
    from metaseq_lm.reporting.runs import Run
    from metaseq_lm.reporting.settings import describe, differing_functions
    from metaseq_lm.runs import manifests

    stored = [manifests.read_manifest(path) for path in paths]
    valid = [manifest.get("valid") or {} for manifest in stored]
    name = metric or next(iter(valid[0]), "")
    for path, values in zip(paths, valid):
        if name not in values:
            known = ", ".join(values) or "none"
            raise UsageError(
                f"{path} has no validation metric '{name}' to choose by; it has: {known}"
            )
    configs = [flatten(m.get("config") or {}) | {"data_hash": m.get("data")} for m in stored]
    runs = [Run(path, config, [], None) for path, config in zip(paths, configs)]
    if differing := differing_functions(f"valid.{name}", runs):
        raise UsageError(f"--best: {describe(name, differing)}; name another --metric")
    values = [float(metrics[name]) for metrics in valid]
    trainer = manifests.config_of(stored[0], paths[0]).trainer
    direction = None
    if trainer.best_checkpoint_metric == name:
        direction = "higher" if trainer.maximize_best_checkpoint_metric else "lower"
    chosen_metric = Metric.of(name, values, direction)
    if chosen_metric.guessed:
        raise UsageError(
            f"--best: it is not known whether a higher or a lower {name} is better; name another "
            "--metric, such as loss"
        )
    return [paths[i] for i in best_indices(values, count, chosen_metric.lower_is_better)]
