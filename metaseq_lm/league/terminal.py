"""The standings on a screen: verdicts, scores, and findings as letters; reasons are in files."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import wrap

from metaseq_lm.core.output import clean
from metaseq_lm.league.by_kind import kind_mark, narrow_text
from metaseq_lm.league.cells import choice_text, gain_text, interval_title, signed_texts
from metaseq_lm.league.describe import describe_origins
from metaseq_lm.league.entries import NOT_RANKED, Entry, Scores, Standings
from metaseq_lm.league.gate import said_of
from metaseq_lm.league.ladder_tables import (
    describe_crossovers,
    describe_decisions,
    describe_predictions,
)
from metaseq_lm.league.page import summaries
from metaseq_lm.league.parts import (
    DOUBT,
    aligned,
    describe_parts,
    number_text,
    part_texts,
    short_name,
    short_text,
)
from metaseq_lm.league.standings import FLAG, NOTE, REFUSE, VOID
from metaseq_lm.reporting.numbers import Metric, flops_text, summarise

COLUMNS = 120  # width of a terminal; names and verdicts may be longer
SCREEN = (30, 100)  # lines and columns for the standings by kind of labels
_SHORTEST = 12  # shortest length to which names of objectives are cut
_GAP = "  "
_Lines = list[str]


def terminal_text(standings: Standings, paths: Sequence[Path] = ()) -> str:
    """Return standings as text for a terminal; `paths` are the files with all details."""
    if standings.kinds:
        return "\n".join(screen(standings, paths))
    of_ladders = [
        *describe_crossovers(standings),
        *describe_decisions(standings),
        *describe_predictions(standings),
    ]
    parts = [
        [clean(f"{standings.title}: {standings.primary.title}")],
        *_main_table(standings),
        [*findings(standings), *rule(standings), *levels(standings), *_about_parts(standings)],
        wrapped(" ".join(of_ladders)),
        wrapped(" ".join([*describe_origins(standings), *standings.remarks])),
        *_other_metrics(standings),
        where(paths),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def where(paths: Sequence[Path]) -> _Lines:
    """Return lines that name the files: texts with all reasons, and figures."""
    if not paths:
        return []
    names = ", ".join(path.name for path in paths)
    return [f"All reasons, notes and p, and what tuning cost, in {paths[0].parent}:", names]


def wrapped(sentence: str, columns: int = COLUMNS) -> _Lines:
    """Return a sentence as lines that fit."""
    return wrap(clean(sentence), columns)


def screen(standings: Standings, paths: Sequence[Path] = ()) -> _Lines:
    """Return standings by kind of labels as one screen, for all budgets or the largest one."""
    height, columns = SCREEN
    lines = [clean(f"{standings.title}: {standings.primary.title}"), *_kinds_rows(standings)]
    end = [*legend(standings), *wrapped(" ".join(standings.remarks), columns)]
    end += wrapped(elsewhere(paths), columns)
    if len(lines) + len(end) <= height or len(standings.budgets) == 1:
        return [*lines, *end]
    *others, largest = standings.budgets
    shown = [entry for entry in standings.entries if entry.budget == largest]
    rest = f"{', '.join(map(flops_text, others))} FLOPs: see the report, or --budgets."
    return [*screen(replace(standings, entries=shown), paths), *wrapped(rest, columns)]


def _kinds_rows(standings: Standings) -> Iterator[str]:
    """Yield the head and the rows by budget: means, means of kinds with marks, and verdicts."""
    metric, columns = standings.primary, SCREEN[1]
    entries = [e for budget in standings.budgets for e in standings.at(budget, metric)]
    cells = [_headed(short_name(metric), [narrow_text(entry, metric) for entry in entries])]
    for kind in standings.kinds:
        marks = [kind_mark(entry, kind) for entry in entries]
        width = max(map(len, marks))
        texts = [
            f"{narrow_text(entry, kind)} {text:<{width}}" for entry, text in zip(entries, marks)
        ]
        cells.append(_headed(short_name(kind), texts))
    verdicts = _headed("verdict", [_short_verdict(standings, e) for e in entries], is_right=False)
    while len(cells) > 1 and _line_width([*cells, verdicts]) + len(_GAP) + _SHORTEST > columns:
        cells.pop()
    room = max(_SHORTEST, columns - len(_GAP) - _line_width([*cells, verdicts]))
    names = [_shorten(entry.objective, room) for entry in entries]
    lines = _side_by_side([_headed("objective", names, is_right=False), *cells, verdicts])
    top = len(lines) - len(entries)
    yield from lines[:top]
    for i, entry in enumerate(entries):
        if i == 0 or entries[i - 1].budget != entry.budget:
            yield f"{flops_text(entry.budget)} FLOPs"
        yield lines[top + i]
    if left_out := standings.kinds[len(cells) - 1 :]:
        yield f"No room for {', '.join(map(short_name, left_out))}: see the report."


def _shorten(name: str, room: int) -> str:
    """Return a name that is cut to fit."""
    return name if len(name) <= room else f"{name[: room - 3]}..."


def _short_verdict(standings: Standings, entry: Entry) -> str:
    """Return the verdict of a row in a word, with the letters of gates that flag it."""
    metric = standings.primary
    if hidden := _hidden_text(entry, metric):
        return hidden
    marks = standings.marks(entry, metric.name)
    decision = entry.stated(metric.name)
    if decision:
        text = decision.verdict
    elif marks:
        text = NOT_RANKED[FLAG]
    else:
        text = "baseline" if entry.objective == standings.baseline else "-"
    return f"{text}: {' '.join(marks)}" if marks else text


def legend(standings: Standings) -> _Lines:
    """Return lines that explain marks and letters."""
    rule, columns = standings.rule, SCREEN[1]
    flagged = any(
        kind_mark(e, kind).endswith(DOUBT) for e in standings.entries for kind in standings.kinds
    )
    lines = wrapped(
        f"Mean ± sd over seeds. Beside {standings.baseline}: + better, - worse (p below "
        f"{rule.level:g} after correction in the column), = equivalent, none undecided"
        f"{f'; {DOUBT} a gate flags it' * flagged}.",
        columns,
    )
    barring = [f.gate for e in standings.entries for f in e.about(standings.primary.name, FLAG)]
    letters = standings.letters(standings.primary.name)
    texts = [f"{letter} {gate}" for gate, letter in letters.items() if gate in barring]
    return [*lines, *(wrapped(f"Flags: {', '.join(texts)}.", columns) if texts else [])]


def elsewhere(paths: Sequence[Path]) -> str:
    """Return where to find what does not fit on a screen."""
    content = "Intervals, p, gates, gains, references, tuning and other metrics"
    if not paths:
        return f"{content}: --out FOLDER writes them."
    return f"{content}: {paths[0].parent} ({', '.join(path.name for path in paths)})"


def _main_table(standings: Standings) -> Iterator[_Lines]:
    """Yield the head of the table, then each budget: its verdicts in a sentence, and its rows."""
    metric = standings.primary
    entries = [e for budget in standings.budgets for e in standings.at(budget, metric)]
    columns = [
        _headed("objective", [entry.objective for entry in entries], is_right=False),
        _headed("seeds", [str(len(entry.scores.get(metric.name, ()))) for entry in entries]),
        _headed("mean ± sd", [_score_column(entry, metric) for entry in entries]),
    ]
    if standings.has_choices:
        columns.append(_headed("sd of choice", [choice_text(entry, metric) for entry in entries]))
    if standings.parts:
        columns.append(_parts_column(standings, entries))
    columns.append(_headed("difference", [_difference_text(entry, metric) for entry in entries]))
    verdicts = [_verdict_text(standings, entry) for entry in entries]
    columns.append(_headed("verdict", verdicts, is_right=False))
    if standings.has_gains:
        columns += _gain_columns(entries, metric)
    lines = _side_by_side(columns)
    top = len(lines) - len(entries)
    yield lines[:top]
    lines = lines[top:]
    for budget, sentence in zip(standings.budgets, summaries(standings)):
        count = sum(entry.budget == budget for entry in entries)
        yield [*wrapped(sentence), *lines[:count]]
        lines = lines[count:]


def _gain_columns(entries: Sequence[Entry], metric: Metric) -> list[_Lines]:
    """Return the columns of gains over untrained models: mean ± sd, and the verdict."""
    name, digits = metric.name, 1 if metric.percent else None
    gains = [gain_text(entry.gain(name), metric, digits) for entry in entries]
    stated = [entry.stated_gain(name) for entry in entries]
    verdicts = [decision.verdict if decision else "" for decision in stated]
    return [_headed("gain ± sd", gains), _headed("on gain", verdicts, is_right=False)]


def _parts_column(standings: Standings, entries: Sequence[Entry]) -> _Lines:
    """Return the means of the parts of the main metric, such as "62 36? 63", names above them."""
    by_part = zip(*(part_texts(standings, entry) for entry in entries))
    texts = [" ".join(row) for row in zip(*map(aligned, by_part))]
    return _headed(", ".join(map(short_name, standings.parts)), texts)


def _side_by_side(columns: Sequence[_Lines]) -> _Lines:
    """Return columns side by side as lines, aligned at the bottom."""
    height = max(map(len, columns))
    padded = [[" " * len(c[0])] * (height - len(c)) + c for c in columns]
    return [_GAP.join(line).rstrip() for line in zip(*padded)]


def _score_column(entry: Entry, metric: Metric) -> str:
    """Return mean ± sd of the main metric, or why a row has no number."""
    hidden = _hidden_text(entry, metric)
    return hidden or _mean_text(entry.scores, metric)


def _hidden_text(entry: Entry, metric: Metric) -> str:
    """Return "void" or "refused" for a row without a number, "" for others."""
    hidden = [NOT_RANKED[action] for action in (VOID, REFUSE) if entry.about(metric.name, action)]
    return hidden[0] if hidden else ""


def _difference_text(entry: Entry, metric: Metric) -> str:
    """Return the difference from the baseline with its interval, "" for an untested row."""
    if (decision := entry.decision) is None:
        return ""
    digits = 1 if metric.percent else None
    difference, *ends = signed_texts(decision.difference, decision.interval, metric, digits)
    return f"{difference} ({' to '.join(ends)})" if ends else difference


def _verdict_text(standings: Standings, entry: Entry) -> str:
    """Return the verdict of a row with the letters of gates that flag it."""
    metric = standings.primary
    marks = standings.marks(entry, metric.name)
    if _hidden_text(entry, metric) or not marks:
        return standings.verdict_text(entry)
    decision = entry.stated(metric.name)
    return f"{decision.text if decision else NOT_RANKED[FLAG]}: {' '.join(marks)}"


def _mean_text(scores: Scores, metric: Metric) -> str:
    """Return mean ± sd of a metric, per cent with one decimal; "" without scores."""
    summary = summarise(scores.get(metric.name, ()))
    if summary is None:
        return ""
    digits = 1 if metric.percent else metric.decimals(summary.centre)
    mean, sd = (metric.text(x, digits) for x in (summary.centre, summary.high - summary.centre))
    return mean if summary.n < 2 else f"{mean} ± {sd}"


def findings(standings: Standings) -> _Lines:
    """Return a line on each letter or gate with its meaning, and the number of notes."""
    name = standings.primary.name
    letters = standings.letters(name)
    flags: dict[str, str] = {}
    others: dict[str, str] = {}
    notes: Counter[str] = Counter()
    for entry in standings.entries:
        hiding = entry.about(name, VOID, REFUSE)
        others |= {f.gate: NOT_RANKED[f.action] for f in hiding}
        flags |= {} if hiding else {f.gate: letters[f.gate] for f in entry.about(name, FLAG)}
        notes.update(finding.gate for finding in entry.findings if finding.action == NOTE)
    lines = []
    for gate, mark in [*sorted(flags.items(), key=lambda item: item[1]), *others.items()]:
        lines.append(f"{mark:<7} {gate}: {said_of(gate)}")
    if notes:
        texts = (f"{gate} {count}" for gate, count in notes.most_common())
        lines += wrapped(f"notes   {', '.join(texts)}")
    return lines


def rule(standings: Standings) -> _Lines:
    """Return lines that explain the verdicts."""
    rule, metric = standings.rule, standings.primary
    count = sum(entry.decision is not None for entry in standings.entries)
    effect = metric.text(rule.smallest_effect, 1 if metric.percent else None)
    gain = " Gain: over the untrained model; its verdict is secondary." * standings.has_gains
    return wrapped(
        f"Better, worse: p below {rule.level:g} after correction for "
        f"{max(rule.comparisons, count)} comparisons. Equivalent: the {interval_title(rule)}, in "
        f"brackets, lies within ± {effect}, the smallest difference that matters.{gain}"
    )


def levels(standings: Standings) -> _Lines:
    """Return the main metric without a model, and of a perfect model if that is known."""
    metric, digits = standings.primary, 1 if standings.primary.percent else None
    values = standings.references.get(metric.name, {})
    texts = [f"{name} {metric.text(value, digits)}" for name, value in values.items()]
    return wrapped(f"For comparison: {', '.join(texts)}.") if texts else []


def _about_parts(standings: Standings) -> _Lines:
    """Return remarks on the parts of the main metric."""
    return wrapped(" ".join(describe_parts(standings)))


def _other_metrics(standings: Standings) -> Iterator[_Lines]:
    """Yield tables of the other metrics, with means at each budget, in columns that fit."""
    metrics = standings.metrics[1:]
    if not metrics:
        return
    in_percent = all(metric.percent for metric in metrics)
    unit = "" if in_percent else " (%)"
    budgets = ", ".join(map(flops_text, standings.budgets))
    names = list(dict.fromkeys(entry.objective for entry in standings.entries))
    levels = _common_references(standings, metrics)
    label = _headed("objective", [*names, *levels], is_right=False)
    blocks: list[list[_Lines]] = []
    for metric in metrics:
        cells = [_means_text(standings, name, metric) for name in names]
        for values in levels.values():
            is_known = metric.name in values
            cells.append(number_text(metric, values[metric.name]) if is_known else "")
        column = _headed(short_name(metric) + unit * metric.percent, cells)
        if not blocks or _line_width([label, *blocks[-1], column]) > COLUMNS:
            blocks.append([])
        blocks[-1].append(column)
    title = f"Other metrics{' (%)' * in_percent}: means at {budgets} FLOPs; {DOUBT} flagged"
    for block in blocks:
        yield [title, *_side_by_side([label, *block])]
        title = f"Further metrics{' (%)' * in_percent}"


def _means_text(standings: Standings, objective: str, metric: Metric) -> str:
    """Return the means of an objective at all budgets, such as "54  80? 97"."""
    by_budget = {e.budget: e for e in standings.entries if e.objective == objective}
    return " ".join(aligned([short_text(by_budget.get(b), metric) for b in standings.budgets]))


def _headed(name: str, cells: Sequence[str], is_right: bool = True) -> _Lines:
    """Return a column with its name above it, on several lines if it has several words."""
    width = max(map(len, [*name.split(), *cells]))
    texts = [*wrap(name, width), *map(clean, cells)]
    return [text.rjust(width) if is_right else text.ljust(width) for text in texts]


def _line_width(columns: Sequence[_Lines]) -> int:
    """Return the width of a line of columns."""
    return sum(len(column[0]) for column in columns) + len(_GAP) * (len(columns) - 1)


def _common_references(
    standings: Standings, metrics: Sequence[Metric]
) -> dict[str, Mapping[str, float]]:
    """Return the references that most metrics have, by reference and metric.

    Usually all metrics share them; a suite of sentences and a labelled set have different ones. A
    mean of values that are not recorded for a whole suite, such as the last layers, has none.
    """
    known = {metric.name: standings.references.get(metric.name, {}) for metric in metrics}
    counts = Counter(name for levels in known.values() for name in levels)
    common: dict[str, Mapping[str, float]] = {}
    for name, count in counts.items():
        if count == max(counts.values()):
            common[name] = {m: levels[name] for m, levels in known.items() if name in levels}
    return common
