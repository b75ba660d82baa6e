"""Sentences on the standings: verdicts, how they came about, findings, references, origins."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from metaseq_lm.league.columns import (
    DOUBT,
    NOT_RANKED,
    interval_title,
    letters,
    short_name,
    value_of,
    why_hidden,
)
from metaseq_lm.league.differences import compare
from metaseq_lm.league.entries import Entry, Standings
from metaseq_lm.league.standings import FLAG, NOTE, REFUSE, VOID
from metaseq_lm.league.verdict import BETTER, EQUIVALENT, UNDECIDED, VERDICTS, WORSE
from metaseq_lm.reporting.numbers import Metric, flops_text

# With the baseline, and for further verdicts in the same sentence.
_PHRASES = {
    BETTER: ("better than {} in", "better in"),
    WORSE: ("worse than {} in", "worse in"),
    EQUIVALENT: ("equivalent to {} in", "equivalent in"),
    UNDECIDED: ("undecided beside {} in", "undecided in"),
    "": ("not ranked beside {} in", "not ranked in"),
}


def by_verdict(standings: Standings, budget: float) -> dict[str, list[Entry]]:
    """Return the rows of a budget by stated verdict; "not ranked" has those without a rank."""
    groups: dict[str, list[Entry]] = {verdict: [] for verdict in (*VERDICTS, NOT_RANKED[FLAG])}
    for entry in standings.at(budget):
        if decision := standings.stated(entry):
            groups[decision.verdict].append(entry)
        elif not entry.is_ranked(standings.metric.name):
            groups[NOT_RANKED[FLAG]].append(entry)
    return {verdict: entries for verdict, entries in groups.items() if entries}


def describe_verdicts(standings: Standings) -> list[str]:
    """Return a sentence with the verdicts for each budget."""
    lines = []
    for budget in standings.budgets:
        parts = [
            f"{verdict}: {', '.join(entry.objective for entry in entries)}"
            for verdict, entries in by_verdict(standings, budget).items()
        ]
        lines.append(
            f"{flops_text(budget)} FLOPs, beside {standings.baseline}: "
            f"{'; '.join(parts) or 'nothing was compared'}."
        )
    return lines


def listed(names: Sequence[str]) -> str:
    """Return names as "a", "a and b", "a, b and c"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def describe_kinds(standings: Standings, objective: str) -> str:
    """Return in which kinds an objective is better than the baseline, worse, and so on.

    The sentence is about the largest budget with a comparison; "" if there was none.
    """
    compared = [e for e in standings.entries if e.objective == objective and e.of_kinds]
    if not compared:
        return ""
    entry = max(compared, key=lambda entry: entry.budget)
    groups: dict[str, list[str]] = {verdict: [] for verdict in _PHRASES}
    for kind in standings.kinds:
        stated = standings.about(kind).stated(entry)
        groups[stated.verdict if stated else ""].append(short_name(kind))
    texts: list[str] = []
    for verdict, names in groups.items():
        if names:
            phrase = _PHRASES[verdict][bool(texts)].format(standings.baseline)
            texts.append(f"{phrase} {listed(names)}")
    at = f" at {flops_text(entry.budget)} FLOPs" * (len(standings.budgets) > 1)
    return f"{objective}{at}: {', '.join(texts)}"


# ---------------------------------------------------------------- the rule, findings, references


def describe_rule(standings: Standings) -> str:
    """Return how the verdicts came about."""
    rule, metric = standings.rule, standings.primary
    count = sum(entry.decision is not None for entry in standings.entries)
    choice = (
        " The score is that of all plausible settings; what tuning might have chosen otherwise, "
        f"pooled over the rows of a budget, is part of the error ({standings.tuning_seeds} tuning "
        "seeds)."
    )
    items = (
        " The error of the test items is part of it, too: paired where runs recorded in which "
        "blocks of items they are right, else binomial."
    )
    return (
        "Better, worse: a permutation test of means and Welch's t test, two-sided, below "
        f"{rule.level:g} after Holm's correction for {max(rule.comparisons, count)} comparisons. "
        "Equivalent: the "
        f"{interval_title(rule)} of the difference (Welch's) lies within ± "
        f"{metric.text(rule.smallest_effect)}, the smallest difference that matters."
        f"{choice * standings.has_choices}{items * standings.has_items}"
    )


def describe_gains(standings: Standings) -> str:
    """Return how the verdicts on gains came about."""
    rule = standings.rule
    count = sum(entry.gain_decision is not None for entry in standings.entries)
    return (
        f"The plan decides by the score; the verdict on the gain is secondary, and tells a head "
        "start from what was learnt. The difference is that of two gains, those of the row and of "
        f"{standings.baseline}, each over its own untrained models: Welch's t test and interval of "
        "four means, and a permutation test of the scores less the means of the untrained ones, "
        f"corrected among themselves for {max(rule.comparisons, count)} comparisons. Seeds that "
        "would decide are runs and untrained models of each."
    )


def describe_findings(standings: Standings, about_all: bool = True) -> list[str]:
    """Return reasons of gates, flags with their letters first; `about_all` includes whole rows."""
    by_gate = letters(standings)
    flagged: dict[str, list[str]] = {gate: [] for gate in by_gate}
    others = []
    for entry in standings.ordered:
        row = f"{entry.objective} at {flops_text(entry.budget)}"
        for finding in entry.about(standings.metric.name, VOID, REFUSE, FLAG, NOTE):
            if not (about_all or finding.metric):
                continue
            if finding.action == FLAG:
                flagged[finding.gate].append(f"{row}: {finding.reason}")
            else:
                title = f", {finding.action} ({finding.gate})" * (finding.action != NOTE)
                others.append(f"{row}{title}: {finding.reason}.")
    lines = [
        f"{by_gate[gate]} ({gate}): {'; '.join(rows)}." for gate, rows in flagged.items() if rows
    ]
    return lines + others


def describe_references(standings: Standings) -> list[str]:
    """Return a sentence for each metric on scores that need no training."""
    lines = []
    for metric in standings.metrics:
        if values := standings.references.get(metric.name):
            texts = [f"{name} {metric.text(value)}" for name, value in values.items()]
            lines.append(f"Without training, {metric.title}: {', '.join(texts)}.")
    return lines


def describe_origins(standings: Standings) -> list[str]:
    """Return which rows were run here and which shipped with the plan; [] if none shipped."""
    if not any(entry.shipped for entry in standings.entries):
        return []
    trained = []
    for budget in standings.budgets:
        names = [entry.objective for entry in standings.at(budget) if not entry.shipped]
        trained += [f"{', '.join(names)} at {flops_text(budget)}"] if names else []
    if not trained:
        return ["All rows ship with the plan."]
    return [f"Run here: {'; '.join(trained)}; all other rows ship with the plan."]


# ---------------------------------------------------------------- parts of a mean


def describe_parts(standings: Standings) -> list[str]:
    """Return sentences on the mark of parts and on parts that do not tell rows apart."""
    texts = [text for part in standings.parts if (text := _describe_part(standings, part))]
    sentences = []
    if texts:
        sentences.append(
            f"Of the parts of {standings.primary.name}, {'; '.join(texts)} (by Student's t, no two "
            "rows differ)."
        )
    views = [standings.about(part) for part in standings.parts]
    shown = (value_of("part", view, entry).wide for view in views for entry in standings.entries)
    if any(text.endswith(DOUBT) for text in shown):
        sentences.append(f"{DOUBT} behind a part: a gate flags it.")
    return sentences


def _describe_part(standings: Standings, part: Metric) -> str:
    """Return the budgets at which no two rows differ in a part, "" if there is none."""
    equal, known = [], 0
    for budget in standings.budgets:
        scores = [
            entry.scores[part.name]
            for entry in standings.at(budget)
            if len(entry.scores.get(part.name, ())) > 1
            and not why_hidden(standings, entry)
            and not why_hidden(standings.about(part), entry)
        ]
        known += len(scores) > 1
        results = [compare(one, other, False) for one, other in combinations(scores, 2)]
        if results and not any(result is not None and result.sign for result in results):
            equal.append(flops_text(budget))
    if not equal:
        return ""
    if len(equal) == known:
        return f"{short_name(part)} tells the rows apart at none of the budgets"
    return f"{short_name(part)} does not tell the rows apart at {', '.join(equal)} FLOPs"


# ---------------------------------------------------------------- the answer


def describe_question(standings: Standings) -> str:
    """Return the question that the standings answer."""
    by = "for which kind of end task" if standings.kinds else f"by {standings.primary.name}"
    return f"Which objective is best {by}, at equal compute, beside {standings.baseline}?"


def describe_answer(standings: Standings) -> str:
    """Return in a sentence who leads, by how much and how surely, overall and by kind of end task.

    It is about the largest budget at which rows were compared with the baseline.
    """
    base = standings.baseline
    compared = [entry.budget for entry in standings.entries if entry.decision or entry.of_kinds]
    if not compared:
        return f"Nothing is decided: no row was compared with the baseline {base}."
    budget, count = max(compared), len(standings.budgets)
    which = f", the largest of {count} budgets" * (count > 1 and budget == standings.budgets[-1])
    text = f"At {flops_text(budget)} FLOPs a run{which}, {_describe_overall(standings, budget)}"
    leads: dict[str, list[str]] = {}
    level = []
    for kind in standings.kinds:
        view, name = standings.about(kind), short_name(kind)
        if leader := _leader(view, budget):
            difference = replace(value_of("difference", view, leader), interval=None).narrow
            lead = f"{name} ({difference}, p {value_of('p', view, leader).wide})"
            leads.setdefault(leader.objective, []).append(lead)
        elif _is_ahead(view, budget):
            leads.setdefault(base, []).append(name)
        else:
            level.append(name)
    clauses = [f"{leader} leads in {listed(names)}" for leader, names in leads.items()]
    clauses += [f"none is shown to be better than {base} in {listed(level)}"] if level else []
    return f"{text}{'; by kind of end task, ' * bool(clauses)}{listed(clauses or [''])}."


def _describe_overall(standings: Standings, budget: float) -> str:
    """Return who leads by the primary metric, with difference, interval and p; or nobody."""
    base, name = standings.baseline, standings.primary.name
    groups, leader = by_verdict(standings, budget), _leader(standings, budget)
    counts = ", ".join(f"{len(entries)} {verdict}" for verdict, entries in groups.items())
    is_ahead = _is_ahead(standings, budget)
    if leader is None and not is_ahead:
        is_open = set(groups) <= {UNDECIDED, NOT_RANKED[FLAG]}
        outcome = (
            "nothing is decided" if is_open else "none is shown to be better than the baseline"
        )
        return f"{outcome} in {name} (baseline {base}: {counts})"
    nearest = leader or groups[WORSE][0]
    text = f"{nearest.objective} leads in {name} beside {base}, by"
    if is_ahead:
        text = f"{base} leads in {name} and the nearest, {nearest.objective}, differs by"
    value, p = (value_of(key, standings, nearest) for key in ("difference", "p"))
    size = replace(value, interval=None).narrow + " points" * standings.metric.percent
    ends = f"{interval_title(standings.rule)} {replace(value, mean=None).narrow}, "
    return f"{text} {size} ({ends if value.interval else ''}p {p.wide}; {counts})"


def _is_ahead(standings: Standings, budget: float) -> bool:
    """Return whether all compared rows are worse than the baseline."""
    verdicts = set(by_verdict(standings, budget))
    return WORSE in verdicts and verdicts <= {WORSE, NOT_RANKED[FLAG]}


def _leader(standings: Standings, budget: float) -> Entry | None:
    """Return the best of the rows that are better than the baseline by the metric in focus."""
    better = by_verdict(standings, budget).get(BETTER, [])
    ranked = replace(standings, entries=better, metrics=[standings.metric]).ordered
    return ranked[0] if ranked else None


def describe_certainty(standings: Standings) -> list[str]:
    """Return the seeds of rows, the rule, what would decide undecided rows, and parts in doubt."""
    name, lines = standings.primary.name, []
    counts = sorted({len(entry.scores.get(name, ())) for entry in standings.entries})
    if counts:
        lines.append(
            f"Seeds of a row: {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))}."
        )
    for budget in standings.budgets[::-1]:
        rows = by_verdict(standings, budget).get(UNDECIDED, [])
        texts = [f"{entry.objective} ({entry.decision.remedy})" for entry in rows if entry.decision]
        if texts:
            lines.append(f"Undecided at {flops_text(budget)} FLOPs: {', '.join(texts)}.")
    return [*lines, describe_rule(standings), *describe_parts(standings)]
