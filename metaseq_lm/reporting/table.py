"""Tables of scores over seeds: one row a setting, or one config key against another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.output import seconds_text
from metaseq_lm.core.registry import abbreviated
from metaseq_lm.reporting.numbers import (
    SPREAD_TITLES,
    Metric,
    Summary,
    bytes_text,
    flops_text,
    summarise,
)
from metaseq_lm.reporting.objectives import describe, remedy, scored_functions
from metaseq_lm.reporting.runs import Run, is_number
from metaseq_lm.reporting.settings import (
    Setting,
    distinct,
    group_by,
    hidden_keys,
    identity,
    repeated,
    show,
    suggestion,
)
from metaseq_lm.reporting.significance import DETECTABLE, Comparison, Significance


@dataclass(frozen=True)
class Cell:
    """One cell: plain text, whether it is the best of its column, whether it is a number."""

    text: str
    best: bool = False
    number: bool = True


@dataclass(frozen=True)
class Table:
    """A table for any writer: title, head, rows, notes below, and raw `records` for csv."""

    title: str
    head: list[str]
    rows: list[list[Cell]]
    notes: list[str]
    records: list[dict[str, Any]] = field(default_factory=list)


NAMED = 40  # metrics in a message; a suite may have hundreds
BEST = ("best_checkpoint_metric", "maximize_best_checkpoint_metric")


def choose_metric(runs: Sequence[Run], name: str | None, better: str | None = None) -> Metric:
    """Return the metric called `name`; by default test.accuracy, or the one of the best checkpoint.

    If its name does not say whether higher is better, the configs of the runs do. Raises UsageError
    naming the known metrics for one that no finished run has; while no run has finished, any name
    is accepted.
    """
    known = list(dict.fromkeys(metric for run in runs for metric in run.metrics))
    by_run = [[run.values.get(f"trainer.{key}") for key in BEST] for run in runs]
    chosen = {metric: up for metric, up in by_run if metric and isinstance(metric, str)}
    if name is None:
        valid = [metric for metric in known if metric.startswith("valid.")]
        first = [m for m in ("test.accuracy", *(f"valid.{m}" for m in chosen)) if m in known]
        name = next(iter(first + valid + known), "test.accuracy")
    elif known and name not in known:
        hint = suggestion(name, known)
        raise UsageError(
            f"no run has the metric '{name}'.{hint} Metrics: {abbreviated(known, NAMED)}."
        )
    values = [run.metrics[name] for run in runs if name in run.metrics]
    metric = Metric.of(name, values, better)
    bare_name = name.partition(".")[2]
    maximize = chosen.get(bare_name)
    if maximize is None and any(bare_name in run.losses for run in runs):
        maximize = False
    if metric.guessed and isinstance(maximize, bool):
        return Metric.of(name, values, "higher" if maximize else "lower")
    return metric


def setting_table(
    settings: Sequence[Setting],
    metric: Metric,
    spread: str = "sd",
    significance: Significance | None = None,
) -> Table:
    """Return a row for each setting: its shown keys, seeds, score, best seed, p-values, costs.

    Costs are centres over the scored runs, with pretraining; where any run was pretrained, a
    second column shows the run's own FLOPs, and where any has them one more its own FLOPs by the
    rules of flops_rules.py. With `significance`, the best is that of the settings that share a
    baseline, and differences and what could be detected are shown if it has the latter.
    """
    keys = list(settings[0].shown) if settings else ["label"]
    runs = [run for setting in settings for run in setting.runs]
    costs: list[tuple[str, str, bool, Callable[[float | None], str]]] = [
        ("FLOPs", "flops", False, flops_text),
        ("time", "seconds", False, seconds_text),
        ("memory", "peak_memory", True, bytes_text),
    ]
    if any(run.cost("flops_by_rule", own_only=True) is not None for run in runs):
        costs.insert(1, ("FLOPs by rule", "flops_by_rule", True, flops_text))
    if any(run.was_pretrained for run in runs):
        costs.insert(1, ("own FLOPs", "flops", True, flops_text))
    comparisons = significance.comparisons if significance else []
    shows_detectable = significance is not None and significance.with_detectable
    baselines = [c.baseline or c.setting for c in comparisons] or None
    summaries = [summarise(setting.scores(metric.name), spread) for setting in settings]
    marks = best_of(settings, summaries, metric, baselines)
    rows, records = [], []
    for i, (setting, summary) in enumerate(zip(settings, summaries)):
        values = [setting.values[key] for key in keys]
        top = best_seed(setting, metric)
        comparison = comparisons[i] if comparisons else None
        cost_texts = [
            write(cost_of(setting, metric, cost, own_only, spread))
            for _, cost, own_only, write in costs
        ]
        rows.append(
            [
                *(Cell(show(value), number=is_number(value)) for value in values),
                Cell(count_text(setting, metric)),
                Cell(summary.text(metric) if summary else "-", marks[i]),
                Cell("-" if top is None else metric.text(top)),
                *map(Cell, comparison.texts if comparison else ()),
                *map(
                    Cell,
                    comparison.detectable_texts(metric) if comparison and shows_detectable else (),
                ),
                *map(Cell, cost_texts),
            ]
        )
        line = record(setting, keys, metric, spread, comparison)
        records.append({**line, "is_best": marks[i]})
    p_titles = ["p", "p (Holm)"] if comparisons else []
    p_titles += ["difference", DETECTABLE] if shows_detectable else []
    below = significance.notes() if significance else []
    if hidden := ", ".join(hidden_keys(settings)):
        below.append(f"Within a label, along with the keys shown, these differ too: {hidden}.")
    return Table(
        f"{metric.title}: {SPREAD_TITLES[spread]}",
        [*keys, "seeds", metric.title, "best", *p_titles, *(title for title, *_ in costs)],
        rows,
        below + notes(settings, metric),
        records,
    )


def pivot_table(
    settings: Sequence[Setting],
    metric: Metric,
    rows: str,
    columns: str | None,
    spread: str = "sd",
    mean: bool = False,
) -> Table:
    """Return the score for each value of the config key `rows` (down) and `columns` (across).

    Without `columns` it is a setting table by that one key. A cell that mixes settings is noted.
    With `mean` the last column is the mean over the others, see `mean_over`.
    """
    keys = list(dict.fromkeys([rows, columns] if columns else [rows]))
    runs = [run for setting in settings for run in setting.runs]
    cells = group_by(runs, keys)
    mixed = [mixed_note(cell, settings) for cell in cells]
    below = [note for note in mixed if note] + notes(settings, metric)
    if columns is None or columns == rows:
        return replace(setting_table(cells, metric, spread), notes=below)
    by_position = {cell.identity(keys): cell for cell in cells}
    down, across = (distinct(cell.values[key] for cell in cells) for key in keys)
    grid = [[by_position.get((identity(x), identity(y))) for y in across] for x in down]
    body = [[Cell(show(value), number=False)] for value in down]
    for column in zip(*grid):
        summaries = [summarise(c.scores(metric.name), spread) if c else None for c in column]
        marks = best_of(column, summaries, metric)
        for row, cell, summary, is_best in zip(body, column, summaries, marks):
            text = summary.text(metric) if summary else "-"
            row.append(Cell(f"{text} ({count_text(cell, metric)})" if cell else "", is_best))
    if mean:
        means = [mean_over(line, metric, spread) for line in grid]
        is_one = not any(scored_functions(metric.name, column) for column in zip(*grid))
        marks = best_of([None] * len(means), means, metric) if is_one else [False] * len(means)
        for row, summary, is_best in zip(body, means, marks):
            row.append(Cell(f"{summary.text(metric)} ({summary.n})" if summary else "-", is_best))
        if None in means:
            below.append("There is no mean where a column has no score of the same seeds.")
    return Table(
        f"{metric.title}: {SPREAD_TITLES[spread]} (number of seeds)",
        [f"{rows} \\ {columns}", *map(show, across), *["mean"] * mean],
        body,
        below,
        [record(cell, keys, metric, spread) for cell in cells],
    )


def mean_over(cells: Sequence[Setting | None], metric: Metric, spread: str) -> Summary | None:
    """Return the summary over seeds of the mean over cells, of the seeds that all cells have.

    None if there are none. A seed that occurs several times in a cell counts with its mean.
    """
    by_seed: dict[Any, list[float]] = {}
    for cell in cells:
        for seed, score in (cell.seed_means(metric.name) if cell else {}).items():
            by_seed.setdefault(seed, []).append(score)
    complete = [scores for scores in by_seed.values() if len(scores) == len(cells)]
    return summarise([sum(scores) / len(scores) for scores in complete], spread)


def best_of(
    cells: Sequence[Setting | None],
    summaries: Sequence[Summary | None],
    metric: Metric,
    groups: Sequence[Any] | None = None,
) -> list[bool]:
    """Return for each summary whether it is the best of its group; equal printed values tie.

    `cells` are what they are of. Nothing is marked without a competitor, nor in a group whose cells
    have other functions of the metric.
    """
    groups = groups or [None] * len(summaries)
    marks = [False] * len(summaries)
    for members in {id(g): [i for i, h in enumerate(groups) if h is g] for g in groups}.values():
        known = [(i, s) for i in members if (s := summaries[i]) is not None]
        if len(known) < 2 or scored_functions(metric.name, [cells[i] for i in members]):
            continue
        top = (min if metric.lower_is_better else max)(s.centre for _, s in known)
        digits = metric.decimals(top)
        for i, summary in known:
            marks[i] = metric.text(summary.centre, digits) == metric.text(top, digits)
    return marks


def count_text(setting: Setting, metric: Metric) -> str:
    """Return the number of scored runs, and of all where some are missing: 3/4."""
    scored = len(setting.scored(metric.name))
    return str(scored) if scored == len(setting.runs) else f"{scored}/{len(setting.runs)}"


def best_seed(setting: Setting, metric: Metric) -> float | None:
    """Return the best score of a single seed, None if there is no score."""
    return (min if metric.lower_is_better else max)(setting.scores(metric.name), default=None)


def cost_of(
    setting: Setting, metric: Metric, cost: str, own_only: bool = False, spread: str = "sd"
) -> float | None:
    """Return the mean (median for "range") cost of the scored runs, None unless all recorded it."""
    values = [run.cost(cost, own_only) for run in setting.scored(metric.name)]
    known = [value for value in values if value is not None]
    summary = summarise(known, spread) if len(known) == len(values) else None
    return summary.centre if summary else None


def record(
    setting: Setting,
    keys: Sequence[str],
    metric: Metric,
    spread: str,
    compared: Comparison | None = None,
) -> dict[str, Any]:
    """Return the unrounded, unscaled numbers of a setting or cell, for csv."""
    summary = summarise(setting.scores(metric.name), spread)
    count = summary.n if summary else 0
    line: dict[str, Any] = {key: show(setting.values[key]) for key in keys}
    line |= {"metric": metric.name, "runs": len(setting.runs), "scored": count}
    if spread == "sd":
        line["mean"] = summary.centre if summary else None
        line["sd"] = summary.high - summary.centre if summary and count > 1 else None
    else:
        parts = (summary.centre, summary.low, summary.high) if summary else (None,) * 3
        line |= zip(("median", "min", "max"), parts)
    line["best"] = best_seed(setting, metric)
    if compared:
        base = compared.baseline
        line |= {"baseline": base.name if base else None, "p": compared.p, "p_holm": compared.holm}
        line |= {"difference": compared.difference, "detectable_80": compared.detectable}
    for cost in ("flops", "seconds"):
        line[cost] = cost_of(setting, metric, cost, False, spread)
        line[f"own_{cost}"] = cost_of(setting, metric, cost, True, spread)
    line["own_flops_by_rule"] = cost_of(setting, metric, "flops_by_rule", True, spread)
    line["peak_memory"] = cost_of(setting, metric, "peak_memory", True, spread)
    return line


def notes(settings: Sequence[Setting], metric: Metric) -> list[str]:
    """Return notes for the reader: runs left out, duplicate seeds, damaged files."""
    lines: list[str] = []
    if metric.guessed:
        lines.append(f"Higher {metric.name} counts as better; --better lower turns it round.")
    if differing := scored_functions(metric.name, settings):
        lines.append(
            f"{describe(metric.name, differing)}: no best is marked and nothing is tested between them; {remedy(differing)}."
        )
    for same in repeated(settings):
        *others, last = (setting.name for setting in same)
        lines.append(f"{', '.join(others)} and {last} are the same runs.")
    for setting in settings:
        for run in setting.runs:
            why = run.why_unscored(metric.name)
            if why:
                lines.append(f"Left out: {run.name} ({setting.name}, seed {run.seed}): {why}.")
        for seed, runs in setting.scored_by_seed(metric.name).items():
            if len(runs) > 1:
                count, names = len(runs), ", ".join(run.name for run in runs)
                lines.append(f"Warning: {setting.name}: seed {seed} counts {count} times: {names}.")
        for kind in ("data", "code"):
            hashes = {str((r.results or {}).get(kind)) for r in setting.scored(metric.name)}
            if len(hashes) > 1:
                lines.append(f"Warning: {setting.name}: its runs differ in the {kind} they used.")
    lines += [f"{run.name}: {note}." for s in settings for run in s.runs for note in run.notes]
    return lines


def mixed_note(cell: Setting, settings: Sequence[Setting]) -> str | None:
    """Return a warning if a pivot cell mixes runs of several settings."""
    inside = [s for s in settings if any(run in cell.runs for run in s.runs)]
    if len(inside) < 2:
        return None
    keys = [k for k in inside[0].values if len({identity(s.values[k]) for s in inside}) > 1]
    return (
        f"Warning: {cell.name} mixes {len(inside)} settings that differ in {', '.join(keys)}; "
        "pick one with --where."
    )
