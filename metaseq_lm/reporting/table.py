"""Tables of scores over seeds: a row for each setting or pair, or one key against another."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations
from typing import Any

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.files import is_number
from metaseq_lm.core.output import seconds_text
from metaseq_lm.core.registry import abbreviated
from metaseq_lm.reporting.numbers import (
    SPREAD_TITLES,
    Metric,
    Summary,
    bytes_text,
    flops_text,
    p_text,
    summarise,
    words_text,
)
from metaseq_lm.reporting.runs import Run, identity
from metaseq_lm.reporting.settings import (
    Row,
    describe,
    differing_suite_code,
    distinct,
    group_by,
    hidden_keys,
    metric_of,
    remedy,
    repeated,
    runs_of,
    scored_functions,
    seed_means,
    show,
    suggestion,
    varies,
)
from metaseq_lm.reporting.significance import (
    DETECTABLE,
    UNIT,
    SettingComparison,
    Significance,
    compare_pair,
    describe_test,
)
from metaseq_lm.reporting.stats import FEWEST, LEVEL, Test, holm
from metaseq_lm.runs.conditions import KEY, count_conditions


@dataclass(frozen=True)
class Cell:
    """A cell: plain text, whether it is the best of its column, whether it is a number.

    A page sorts by `value`, or else by the number at the start of the text, or by the text.
    """

    text: str
    best: bool = False
    number: bool = True
    value: float | None = None

    @property
    def is_absent(self) -> bool:
        """Whether the text stands for no value."""
        return self.text in _ABSENT


@dataclass(frozen=True)
class Table:
    """A table for any writer of `formats`.

    Attributes:
        title: Its title, "" for none.
        head: The titles of the columns.
        rows: The cells.
        notes: Sentences below it.
        records: The raw values of each row, for csv and JSON.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    records: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of_texts(
        cls,
        head: Sequence[str],
        rows: Iterable[Sequence[str]],
        right: Sequence[str] = (),
        title: str = "",
    ) -> "Table":
        """Return a table of texts; `right` names the columns of numbers."""
        is_number = [name in right for name in head]
        return cls(title, head, [list(map(_text_cell, row, is_number)) for row in rows])

    @cached_property
    def right(self) -> list[bool]:
        """Which columns have only numbers, absent values aside, and are right-aligned."""
        numeric = []
        for j in range(len(self.head)):
            column = [row[j] for row in self.rows]
            present = [cell for cell in column if not cell.is_absent]
            numeric.append(all(cell.number for cell in present or column))
        return numeric

    @property
    def has_best(self) -> bool:
        """Whether any cell is marked as the best."""
        return any(cell.best for cell in chain.from_iterable(self.rows))


_ABSENT = ("", "-", show(None))
# Columns of costs: title and form of each of `Run.costs` that they show.
_COST_COLUMNS: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "flops": ("FLOPs", flops_text),
    "own_flops": ("own FLOPs", flops_text),
    "own_flops_by_rule": ("FLOPs by rule", flops_text),
    "words": ("words", words_text),
    "tuning_flops": ("tuning FLOPs", flops_text),
    "seconds": ("time", seconds_text),
    "peak_memory": ("memory", bytes_text),
}
# The costs of a record, in the order of its columns.
_COSTS = (
    *("flops", "own_flops", "seconds", "own_seconds", "own_flops_by_rule", "peak_memory"),
    *("words", "tuning_flops"),
)
_NAMED_METRICS = 40  # metrics in a message; a suite may have hundreds


def choose_metric(runs: Sequence[Run], name: str | None, better: str | None = None) -> Metric:
    """Return the metric called `name`.

    By default it is test.accuracy, the validation metric that chose the checkpoints, any other
    validation metric, or the first metric, in this order. Raises UsageError, naming the known
    metrics, if no finished run has it; any name is accepted while no run has finished.
    """
    known = list(dict.fromkeys(chain.from_iterable(run.metrics for run in runs)))
    if name is None:
        best = dict.fromkeys(run.values.get("trainer.best_checkpoint_metric") for run in runs)
        preferred = ["test.accuracy", *(f"valid.{metric}" for metric in best if metric)]
        candidates = [name for name in preferred if name in known]
        candidates += [name for name in known if name.startswith("valid.")]
        name = next(iter([*candidates, *known]), "test.accuracy")
    elif known and name not in known:
        raise UsageError(
            f"no run has the metric '{name}'.{suggestion(name, known)} Metrics: "
            f"{abbreviated(known, _NAMED_METRICS)}."
        )
    return metric_of(name, runs, better)


def setting_table(
    settings: Sequence[Row],
    metric: Metric,
    spread: str = "sd",
    significance: Significance | None = None,
) -> Table:
    """Return a row for each setting: its shown keys, seeds, score, best seed, p-values, costs.

    Costs are centres over the scored runs and include pretraining. There are further columns if any
    run has a value: its own FLOPs if it was pretrained, its own FLOPs by the rules of
    flops_rules.py, the words of a corpus that were seen, and the cost of the search that chose its
    options. With `significance`, the best is marked among the settings that share a baseline, and
    differences and detectable differences are shown if it has the latter.
    """
    keys = list(settings[0].shown) if settings else ["label"]
    head, baselines, below = [*keys, "seeds", metric.title, "best"], None, []
    comparisons: Sequence[SettingComparison | None] = [None] * len(settings)
    if significance:
        comparisons, below = significance.comparisons, significance.notes()
        baselines = [c.baseline or c.setting for c in significance.comparisons]
        head += ["p", "p (Holm)", *["difference", DETECTABLE] * significance.with_detectable]
    runs = runs_of(settings)
    needs = {
        "own_flops": any(run.was_pretrained for run in runs),
        "own_flops_by_rule": any(run.costs["own_flops_by_rule"] is not None for run in runs),
        "words": any(run.costs["words"] for run in runs),
        "tuning_flops": any(run.costs["tuning_flops"] is not None for run in runs),
    }
    costs = {cost: form for cost, form in _COST_COLUMNS.items() if needs.get(cost, True)}
    head += [title for title, _ in costs.values()]
    summaries = [summarise(setting.run_scores(metric.name), spread) for setting in settings]
    marks = _best_of(settings, summaries, metric, baselines)
    rows, records = [], []
    for setting, summary, is_best, compared in zip(settings, summaries, marks, comparisons):
        line = _record(setting, keys, metric, spread, compared)
        row = [_config_cell(setting.values[key]) for key in keys]
        row.append(Cell(_count_text(setting, metric)))
        row.append(Cell(summary.text(metric) if summary else "-", is_best))
        row.append(Cell("-" if line["best"] is None else metric.text(line["best"])))
        if compared and significance:
            row += map(Cell, compared.texts)
            if significance.with_detectable:
                row += map(Cell, compared.detectable_texts(metric))
        row += [Cell(text_of(line[cost]), value=line[cost]) for cost, (_, text_of) in costs.items()]
        rows.append(row)
        records.append({**line, "is_best": is_best})
    if hidden := ", ".join(hidden_keys(settings)):
        below.append(f"Within a label, along with the keys shown, these differ too: {hidden}.")
    title = f"{metric.title}: {SPREAD_TITLES[spread]}"
    return Table(title, head, rows, below + notes(settings, metric), records)


def _text_cell(text: str, is_number: bool = False) -> Cell:
    return Cell(text, number=is_number)


def _config_cell(value: Any) -> Cell:
    number = float(value) if is_number(value) else None
    return Cell(show(value), number=number is not None, value=number)


def pivot_table(
    settings: Sequence[Row],
    metric: Metric,
    rows: str,
    columns: str | None,
    spread: str = "sd",
    mean: bool = False,
) -> Table:
    """Return the score for each value of the config key `rows` (down) and `columns` (across).

    Without `columns` it is a setting table by `rows` alone. Notes report cells that mix settings.
    With `mean` the last column is the mean over the others, see `_mean_over`.
    """
    keys = list(dict.fromkeys([rows, columns or rows]))
    cells, below = group_by(runs_of(settings), keys), []
    for cell in cells:
        inside = [setting for setting in settings if not set(cell.runs).isdisjoint(setting.runs)]
        if len(inside) > 1:
            mixed = ", ".join(key for key in inside[0].values if varies(key, inside))
            below.append(
                f"Warning: {cell.name} mixes {len(inside)} settings that differ in {mixed}; pick "
                "one with --where."
            )
    below += notes(settings, metric)
    if columns is None or columns == rows:
        return replace(setting_table(cells, metric, spread), notes=below)
    down = distinct(cell.values[rows] for cell in cells)
    across = distinct(cell.values[columns] for cell in cells)
    by_values = {cell.identity([rows, columns]): cell for cell in cells}
    grid = []
    for row_value in map(identity, down):
        grid.append([by_values.get((row_value, identity(value))) for value in across])
    body = [[replace(_config_cell(value), number=False)] for value in down]
    for column in zip(*grid):
        summaries = []
        for cell in column:
            summaries.append(summarise(cell.run_scores(metric.name), spread) if cell else None)
        marks = _best_of(column, summaries, metric)
        for row, cell, summary, is_best in zip(body, column, summaries, marks):
            text = summary.text(metric) if summary else "-"
            row.append(Cell(f"{text} ({_count_text(cell, metric)})" if cell else "", is_best))
    if mean:
        means = [_mean_over(line, metric, spread) for line in grid]
        marks = [False] * len(means)
        if not any(scored_functions(metric.name, column) for column in zip(*grid)):
            marks = _best_of([None] * len(means), means, metric)
        for row, summary, is_best in zip(body, means, marks):
            row.append(Cell(f"{summary.text(metric)} ({summary.n})" if summary else "-", is_best))
        if None in means:
            below.append("There is no mean where a column has no score of the same seeds.")
    records = [_record(cell, keys, metric, spread) for cell in cells]
    head = [f"{rows} \\ {columns}", *map(show, across), *["mean"] * mean]
    title = f"{metric.title}: {SPREAD_TITLES[spread]} (number of seeds)"
    return Table(title, head, body, below, records)


def _mean_over(cells: Sequence[Row | None], metric: Metric, spread: str) -> Summary | None:
    """Return the summary over seeds, of which all cells have a score, of the mean over cells."""
    by_cell = [seed_means(cell.runs if cell else (), metric.name) for cell in cells]
    means = []
    for seed in by_cell[0]:
        values = [means_of[seed] for means_of in by_cell if seed in means_of]
        if len(values) == len(cells):
            means.append(sum(values) / len(cells))
    return summarise(means, spread)


def _best_of(
    cells: Sequence[Row | None],
    summaries: Sequence[Summary | None],
    metric: Metric,
    baselines: Sequence[Row] | None = None,
) -> list[bool]:
    """Return for each summary whether it is the best; equal printed values tie."""
    groups: dict[int, dict[int, float]] = {}
    for i, summary in enumerate(summaries):
        if summary is not None:
            # Cells compete only if they share a baseline.
            groups.setdefault(id(baselines[i]) if baselines else 0, {})[i] = summary.centre
    marks = [False] * len(summaries)
    for centres in groups.values():
        if len(centres) > 1 and not scored_functions(metric.name, [cells[i] for i in centres]):
            top = metric.best(centres.values())
            digits = metric.decimals(top)
            for i, centre in centres.items():
                marks[i] = metric.text(centre, digits) == metric.text(top, digits)
    return marks


def _count_text(setting: Row, metric: Metric) -> str:
    """Return the number of scored runs, or 3/4 if some of all runs are missing."""
    scored, count = len(setting.scored_by(metric.name)), len(setting.runs)
    return f"{scored}/{count}" if scored < count else str(scored)


def cost_of(setting: Row, metric: Metric, cost: str, spread: str = "sd") -> float | None:
    """Return the mean (median for "range") cost of the scored runs, None unless all recorded it.

    `cost` is one of `Run.costs`.
    """
    costs = [run.costs[cost] for run in setting.scored_by(metric.name)]
    known = [value for value in costs if value is not None]
    summary = summarise(known, spread) if len(known) == len(costs) else None
    return summary.centre if summary else None


def _record(
    setting: Row,
    keys: Sequence[str],
    metric: Metric,
    spread: str,
    compared: SettingComparison | None = None,
) -> dict[str, Any]:
    """Return the unrounded, unscaled numbers of a setting or cell, for csv."""
    scores = setting.run_scores(metric.name)
    line: dict[str, Any] = {key: show(setting.values[key]) for key in keys}
    line |= {"metric": metric.name, "runs": len(setting.runs), "scored": len(scores)}
    line |= dict.fromkeys(("mean", "sd") if spread == "sd" else ("median", "min", "max"))
    if (summary := summarise(scores, spread)) and spread == "sd":
        line["mean"] = summary.centre
        line["sd"] = summary.high - summary.centre if len(scores) > 1 else None
    elif summary:
        line |= {"median": summary.centre, "min": summary.low, "max": summary.high}
    line["best"] = metric.best(scores, default=None)
    if compared:
        base = compared.baseline
        line |= {"baseline": base.name if base else None, "p": compared.p, "p_holm": compared.holm}
        line |= {"difference": compared.difference, "detectable_80": compared.detectable}
    for cost in _COSTS:
        line[cost] = cost_of(setting, metric, cost, spread)
    return line


def notes(settings: Sequence[Row], metric: Metric) -> list[str]:
    """Return notes for the reader: runs left out, duplicate seeds, damaged files."""
    lines: list[str] = []
    if metric.guessed:
        lines.append(f"Higher {metric.name} counts as better; --better lower turns it round.")
    if differing := scored_functions(metric.name, settings):
        lines.append(
            f"{describe(metric.name, differing)}: no best is marked and nothing is tested between "
            f"them; {remedy(differing)}."
        )
    scored = chain.from_iterable(setting.scored_by(metric.name) for setting in settings)
    if differing := differing_suite_code(metric.name, list(scored)):
        codes = "; ".join(f"{key}: {values}" for key, values in differing.items())
        lines.append(
            f"{metric.name} was scored by other code in some of these ({codes}); 'metaseq-lm "
            "score' scores again what other code has scored."
        )
    for same in repeated(settings):
        *others, last = (setting.name for setting in same)
        lines.append(f"{', '.join(others)} and {last} are the same runs.")
    for setting in settings:
        for run, reason in setting.unscored(metric.name):
            lines.append(f"Left out: {run.name} ({setting.name}, seed {run.seed}): {reason}.")
        for seed, runs in setting.repeated_seeds(metric.name).items():
            count, names = len(runs), ", ".join(run.name for run in runs)
            lines.append(f"Warning: {setting.name}: seed {seed} counts {count} times: {names}.")
        for kind in ("data", "code"):
            hashes = {str(run.recorded.get(kind)) for run in setting.scored_by(metric.name)}
            if len(hashes) > 1:
                lines.append(f"Warning: {setting.name}: its runs differ in the {kind} they used.")
    for setting in settings:
        for key, end in (setting.runs[0].tuning.get("edges") or {}).items():
            lines.append(
                f"Warning: {setting.name}: {key} was chosen at the {end} end of the range that was "
                "searched; the best value may be outside, so this is no verdict on the setting."
            )
        for run in setting.runs:
            lines += [f"{run.name}: {note}." for note in run.notes]
        conditions = [run.recorded.get(KEY) for run in setting.runs]
        lines += [f"{setting.name}: {text}." for text in count_conditions(conditions)]
    return lines


def pair_table(settings: Sequence[Row], metric: Metric, key: str, test: Test) -> Table:
    """Return a row for each pair of settings that differ only in `key` among the shown keys.

    p is corrected for all pairs; the smallest comes first. Raises UsageError for a one-sided test,
    and if no pair has FEWEST scored seeds on both sides.
    """
    if test.sides == 1:
        raise UsageError("--pairs asks which of two settings is ahead: leave --sides 1 out")
    tested = []
    for one, other in combinations(settings, 2):
        others = [name for name in one.shown if name != key]
        # The same runs under two labels are one setting.
        if one.identity(others) == other.identity(others) and one.content != other.content:
            comparison = compare_pair(one, other, metric, test)
            if comparison.p is not None:
                tested.append((comparison.p, comparison))
    pairs = sorted(tested, key=lambda pair: pair[0])
    if not pairs:
        raise UsageError(
            f"--pairs {key}: no two settings differ in '{key}' alone and have {FEWEST} scored "
            "seeds each"
        )
    rows, records, significant = [], [], 0
    for (p, pair), corrected in zip(pairs, holm([p for p, _ in pairs])):
        assert pair.baseline is not None and pair.difference is not None
        significant += corrected < LEVEL
        names, gap = [pair.setting.name, pair.baseline.name], abs(pair.difference)
        if not pair.is_ahead:
            names.reverse()
        texts = [metric.text(gap, metric.decimals(gap)), p_text(p), p_text(corrected)]
        rows.append([*map(_text_cell, names), *map(Cell, texts)])
        line: dict[str, Any] = dict(zip(("setting", "ahead_of"), names))
        line |= {"difference": gap, "p": p, "p_holm": corrected}
        records.append({"metric": metric.name, **line})
    note = (
        f"p: {describe_test(test)}; the unit is {UNIT}; p (Holm): corrected for the {len(pairs)} "
        f"pairs, of which {significant} are significant at {LEVEL}."
    )
    head = ["setting", "ahead of", "by", "p", "p (Holm)"]
    title = f"{metric.title}: differences of {test.centre}s"
    return Table(title, head, rows, [note, *notes(settings, metric)], records)
