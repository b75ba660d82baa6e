"""The standings on a screen: verdicts, scores, and findings as letters; reasons are in files."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from textwrap import wrap

from metaseq_lm.core.output import clean, count_text
from metaseq_lm.league.columns import (
    DOUBT,
    NONE,
    NOT_RANKED,
    SCREEN,
    interval_title,
    letters,
    short_name,
    shown_columns,
    value_of,
)
from metaseq_lm.league.describe import describe_origins, describe_parts, describe_verdicts
from metaseq_lm.league.entries import Standings
from metaseq_lm.league.gate import said_of
from metaseq_lm.league.ladder_tables import (
    describe_crossovers,
    describe_decisions,
    describe_predictions,
)
from metaseq_lm.league.rungs import objectives_of
from metaseq_lm.league.standings import FLAG, NOTE, REFUSE, VOID
from metaseq_lm.reporting.numbers import flops_text

_COLUMNS = 120  # width of a terminal; names and verdicts may be longer
SIZE = (30, 100)  # lines and columns for the standings by kind of labels
_SHORTEST = 12  # shortest length to which names of objectives are cut
_GAP = "  "
_Lines = list[str]


def terminal_text(standings: Standings, paths: Sequence[Path] = ()) -> str:
    """Return standings as text for a terminal; `paths` are the files with all details."""
    title = clean(f"{standings.title}: {standings.primary.title}")
    if standings.kinds:
        return "\n".join([title, *_kinds_screen(standings, paths)])
    of_ladders = [*describe_crossovers(standings), *describe_decisions(standings)]
    of_ladders += describe_predictions(standings)
    parts = [
        [title],
        *_main_table(standings),
        [*_findings(standings), *_rule(standings), *_wrapped(describe_parts(standings))],
        _wrapped(of_ladders),
        _wrapped([*describe_origins(standings), *standings.remarks]),
        *_other_metrics(standings),
    ]
    if paths:
        names = ", ".join(path.name for path in paths)
        heading = f"All reasons, notes and p, and what tuning cost, in {paths[0].parent}:"
        parts.append([heading, names])
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _wrapped(sentences: Sequence[str], columns: int = _COLUMNS) -> _Lines:
    return wrap(clean(" ".join(sentences)), columns)


# ---------------------------------------------------------------- columns of text


def _headed(name: str, cells: Sequence[str], is_right: bool = True) -> _Lines:
    """Return a column with its name above it, on several lines if it has several words."""
    width = max(map(len, [*name.split(), *cells]))
    texts = [*wrap(name, width), *map(clean, cells)]
    return [text.rjust(width) if is_right else text.ljust(width) for text in texts]


def _side_by_side(columns: Sequence[_Lines], rows: int) -> tuple[_Lines, _Lines]:
    """Return the lines of the head and of the `rows` of columns, aligned at the bottom."""
    height = max(map(len, columns))
    padded = [[" " * len(c[0])] * (height - len(c)) + c for c in columns]
    lines = [_GAP.join(line).rstrip() for line in zip(*padded)]
    return lines[: height - rows], lines[height - rows :]


def _line_width(columns: Sequence[_Lines]) -> int:
    return sum(len(column[0]) for column in columns) + len(_GAP) * (len(columns) - 1)


def _aligned(texts: Sequence[str]) -> _Lines:
    """Return texts of numbers with aligned digits: each has room for the mark."""
    marked = [text if text.endswith(DOUBT) else f"{text} " for text in texts]
    longest = max(map(len, marked), default=0)
    return [text.rjust(longest) for text in marked]


# ---------------------------------------------------------------- one primary metric


def _main_table(standings: Standings) -> Iterator[_Lines]:
    entries, columns = standings.ordered, []
    for name, several in groupby(shown_columns(standings, SCREEN), lambda column: column[0]):
        titles, texts, is_right = [], [], True
        for _, shown, metric in several:
            view = standings.about(metric)
            values = [value_of(name, view, entry) for entry in entries]
            titles.append(shown.title_in(view, on_screen=True))
            texts.append([value.narrow for value in values])
            is_right = all(value.cell().number for value in values)
        lines = texts[0]
        if name == "part":  # all parts are one column: "62 36? 63"
            lines = [" ".join(row) for row in zip(*map(_aligned, texts))]
        columns.append(_headed(", ".join(titles), lines, is_right))
    head, rows = _side_by_side(columns, len(entries))
    yield head
    for budget, sentence in zip(standings.budgets, describe_verdicts(standings)):
        same = [row for entry, row in zip(entries, rows) if entry.budget == budget]
        yield [*_wrapped([sentence]), *same]


def _findings(standings: Standings) -> _Lines:
    name, by_gate = standings.primary.name, letters(standings)
    flags: dict[str, str] = {}
    others: dict[str, str] = {}
    notes: Counter[str] = Counter()
    for entry in standings.entries:
        hiding = entry.about(name, VOID, REFUSE)
        others |= {f.gate: NOT_RANKED[f.action] for f in hiding}
        if not hiding:
            flags |= {f.gate: by_gate[f.gate] for f in entry.about(name, FLAG)}
        notes.update(finding.gate for finding in entry.findings if finding.action == NOTE)
    marks = [*sorted(flags.items(), key=lambda item: item[1]), *others.items()]
    lines = [f"{mark:<7} {gate}: {said_of(gate)}" for gate, mark in marks]
    if notes:
        texts = [f"{gate} {count}" for gate, count in notes.most_common()]
        lines += _wrapped([f"notes   {', '.join(texts)}"])
    return lines


def _rule(standings: Standings) -> _Lines:
    rule, metric = standings.rule, standings.primary
    digits = 1 if metric.percent else None
    gain = " Gain: over the untrained model; its verdict is secondary." * standings.has_gains
    text = (
        f"Better, worse: p below {rule.level:g} after correction for "
        f"{count_text(standings.comparisons, 'comparison')}. Equivalent: the "
        f"{interval_title(rule)}, in brackets, lies within ± "
        f"{metric.text(rule.smallest_effect, digits)}, the smallest difference that matters.{gain}"
    )
    values = standings.references.get(metric.name, {})
    texts = [f"{name} {metric.text(value, digits)}" for name, value in values.items()]
    known = [f"For comparison: {', '.join(texts)}."] * bool(texts)
    return [*_wrapped([text]), *_wrapped(known)]


# ---------------------------------------------------------------- other metrics


def _other_metrics(standings: Standings) -> Iterator[_Lines]:
    metrics = standings.metrics[1:]
    if not metrics:
        return
    # References that most metrics have. A suite of sentences and a labelled set have different
    # ones, and a mean of values that are not recorded for a whole suite, such as the last layers,
    # has none.
    known = [standings.references.get(metric.name, {}) for metric in metrics]
    counts = Counter(chain.from_iterable(known))
    levels = [name for name, count in counts.items() if count == max(counts.values())]
    names, in_percent = objectives_of(standings), all(metric.percent for metric in metrics)
    label = _headed("objective", [*names, *levels], is_right=False)
    blocks = [[label]]
    for metric, values in zip(metrics, known):
        view, means = standings.about(metric), {name: dict[float, str]() for name in names}
        for entry in standings.entries:
            means[entry.objective][entry.budget] = value_of("score", view, entry).brief
        cells = []
        for texts in means.values():  # of all budgets: "54  80? 97"
            cells.append(" ".join(_aligned([texts.get(x, NONE) for x in standings.budgets])))
        digits = 0 if metric.percent else None
        cells += [metric.text(values[x], digits) if x in values else "" for x in levels]
        column = _headed(short_name(metric) + " (%)" * (metric.percent and not in_percent), cells)
        if len(blocks[-1]) > 1 and _line_width([*blocks[-1], column]) > _COLUMNS:
            blocks.append([label])
        blocks[-1].append(column)
    unit, budgets = " (%)" * in_percent, ", ".join(map(flops_text, standings.budgets))
    title = f"Other metrics{unit}: means at {budgets} FLOPs; {DOUBT} flagged"
    for block in blocks:
        head, rows = _side_by_side(block, len(names) + len(levels))
        yield [title, *head, *rows]
        title = f"Further metrics{unit}"


# ---------------------------------------------------------------- kinds of labels


def _kinds_screen(standings: Standings, paths: Sequence[Path]) -> _Lines:
    """Return standings by kind of labels as one screen, for all budgets or the largest one."""
    height, columns = SIZE
    files = f"{paths[0].parent} ({', '.join(path.name for path in paths)})" if paths else ""
    content = "Intervals, p, gates, gains, references, tuning and other metrics"
    lines = [*_kinds_rows(standings), *_legend(standings), *_wrapped(standings.remarks, columns)]
    lines += _wrapped([f"{content}: {files or '--out FOLDER writes them.'}"], columns)
    if len(lines) < height or len(standings.budgets) == 1:  # the title is another line
        return lines
    *others, largest = standings.budgets
    shown = [entry for entry in standings.entries if entry.budget == largest]
    rest = f"{', '.join(map(flops_text, others))} FLOPs: see the report, or --budgets."
    return [*_kinds_screen(replace(standings, entries=shown), paths), *_wrapped([rest], columns)]


def _kinds_rows(standings: Standings) -> Iterator[str]:
    """Yield the head and the rows by budget: means, means of kinds with marks, and verdicts."""
    entries, columns = standings.ordered, SIZE[1]
    scores = [value_of("score", standings, entry).brief_spread for entry in entries]
    cells = [_headed(short_name(standings.primary), scores)]
    for kind in standings.kinds:
        values = [value_of("score", standings.about(kind), entry) for entry in entries]
        width = max(len(value.sign) for value in values)
        texts = [f"{value.brief_spread} {value.sign:<{width}}" for value in values]
        cells.append(_headed(short_name(kind), texts))
    words = [value_of("verdict", standings, entry).word for entry in entries]
    verdicts = _headed("verdict", words, is_right=False)
    while len(cells) > 1 and _line_width([*cells, verdicts]) + len(_GAP) + _SHORTEST > columns:
        cells.pop()
    room = max(_SHORTEST, columns - len(_GAP) - _line_width([*cells, verdicts]))
    names = [entry.objective for entry in entries]
    names = [name if len(name) <= room else f"{name[: room - 3]}..." for name in names]
    label = _headed("objective", names, is_right=False)
    head, rows = _side_by_side([label, *cells, verdicts], len(entries))
    yield from head
    for budget, same in groupby(zip(entries, rows), lambda pair: pair[0].budget):
        yield f"{flops_text(budget)} FLOPs"
        yield from (row for _, row in same)
    if left_out := standings.kinds[len(cells) - 1 :]:
        yield f"No room for {', '.join(map(short_name, left_out))}: see the report."


def _legend(standings: Standings) -> _Lines:
    is_flagged = False
    for view in map(standings.about, standings.kinds):
        signs = [value_of("score", view, entry).sign for entry in standings.entries]
        is_flagged |= any(sign.endswith(DOUBT) for sign in signs)
    flagged = f"; {DOUBT} a gate flags it" * is_flagged
    text = (
        f"Mean ± sd over seeds. Beside {standings.baseline}: + better, - worse (p below "
        f"{standings.rule.level:g} after correction in the column), = equivalent, none undecided"
        f"{flagged}."
    )
    flags = (entry.about(standings.primary.name, FLAG) for entry in standings.entries)
    barring = {finding.gate for finding in chain.from_iterable(flags)}
    texts = [f"{mark} {gate}" for gate, mark in letters(standings).items() if gate in barring]
    gates = [f"Flags: {', '.join(texts)}."] * bool(texts)
    return [*_wrapped([text], SIZE[1]), *_wrapped(gates, SIZE[1])]
