"""The parts of a primary metric that is a mean, which its verdicts rest on."""

from collections.abc import Sequence
from itertools import combinations

from metaseq_lm.league.differences import compare
from metaseq_lm.league.entries import Entry, Standings
from metaseq_lm.league.standings import FLAG, REFUSE, VOID
from metaseq_lm.reporting.numbers import Metric, flops_text, summarise

DOUBT = "?"  # suffix of a number that a gate flags
NONE = "-"


def short_name(metric: Metric) -> str:
    """Return the name of a metric for the head of a narrow column, such as "head number"."""
    name = metric.name.removesuffix(".accuracy").removesuffix(".share")
    return name.replace(".", " ").replace("_", " ")


def short_text(entry: Entry | None, metric: Metric) -> str:
    """Return the mean of a row in a narrow column, such as "63", or "63?" if a gate flags it."""
    summary = summarise(entry.scores.get(metric.name, ())) if entry else None
    if entry is None or summary is None or entry.about(metric.name, VOID, REFUSE):
        return NONE
    return number_text(metric, summary.centre) + DOUBT * bool(entry.about(metric.name, FLAG))


def number_text(metric: Metric, value: float) -> str:
    """Return a number for a narrow column: per cent without decimals."""
    return metric.text(value, 0 if metric.percent else None)


def part_texts(standings: Standings, entry: Entry) -> list[str]:
    """Return the means of the parts of a row, "-" for a void or refused row."""
    if entry.about(standings.primary.name, VOID, REFUSE):
        return [NONE] * len(standings.parts)
    return [short_text(entry, part) for part in standings.parts]


def aligned(texts: Sequence[str]) -> list[str]:
    """Return texts of numbers with aligned digits: each has room for the mark."""
    marked = [text if text.endswith(DOUBT) else f"{text} " for text in texts]
    longest = max(map(len, marked), default=0)
    return [text.rjust(longest) for text in marked]


def describe_parts(standings: Standings) -> list[str]:
    """Return sentences on the mark of parts and on parts that do not tell rows apart."""
    texts = [text for part in standings.parts if (text := _describe_part(standings, part))]
    sentences = []
    if texts:
        sentences.append(
            f"Of the parts of {standings.primary.name}, {'; '.join(texts)} (by Student's t, no two "
            "rows differ)."
        )
    marked = (text for entry in standings.entries for text in part_texts(standings, entry))
    if any(text.endswith(DOUBT) for text in marked):
        sentences.append(f"{DOUBT} behind a part: a gate flags it.")
    return sentences


def _describe_part(standings: Standings, part: Metric) -> str:
    """Return the budgets at which a part does not tell rows apart, "" if it always does."""
    known = {budget: samples(standings, budget, part) for budget in standings.budgets}
    known = {budget: scores for budget, scores in known.items() if len(scores) > 1}
    equal = [flops_text(budget) for budget, scores in known.items() if not differ(scores)]
    if not equal:
        return ""
    if len(equal) == len(known):
        return f"{short_name(part)} tells the rows apart at none of the budgets"
    return f"{short_name(part)} does not tell the rows apart at {', '.join(equal)} FLOPs"


def samples(standings: Standings, budget: float, part: Metric) -> list[Sequence[float]]:
    """Return the scores by seed of a budget's rows that have a number and a spread."""
    rows = []
    for entry in standings.at(budget, standings.primary):
        names = (standings.primary.name, part.name)
        scores = entry.scores.get(part.name, ())
        if len(scores) > 1 and not any(entry.about(name, VOID, REFUSE) for name in names):
            rows.append(scores)
    return rows


def differ(scores: Sequence[Sequence[float]]) -> bool:
    """Return whether any two of the rows differ, see `differences`."""
    results = (compare(one, other, False) for one, other in combinations(scores, 2))
    return any(result is not None and result.sign for result in results)
