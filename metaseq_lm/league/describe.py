"""Sentences on the standings: verdicts, how they came about, findings, references, origins."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from metaseq_lm.core.output import count_text
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
from metaseq_lm.league.entries import Standings, StandingsEntry
from metaseq_lm.league.ladder_tables import describe_crossovers, describe_decisions
from metaseq_lm.league.standings import ACTIONS, FLAG, NOTE
from metaseq_lm.league.verdict import BETTER, UNDECIDED, VERDICTS, WORSE
from metaseq_lm.reporting.numbers import flops_text


def describe_all(standings: Standings) -> list[str]:
    """Return what is said below the table of the standings."""
    lines = [*describe_verdicts(standings), *describe_parts(standings)]
    lines += [*describe_findings(standings), *_describe_references(standings)]
    lines += [_describe_rule(standings), *describe_origins(standings)]
    return [*lines, *standings.remarks, *standings.notes]


def _by_verdict(standings: Standings, budget: float) -> dict[str, list[StandingsEntry]]:
    """Return the rows of a budget by stated verdict; "not ranked" has those without a rank."""
    groups: dict[str, list[StandingsEntry]] = {}
    for entry in standings.at(budget):
        decision = standings.stated(entry)
        if decision or not entry.is_ranked(standings.metric.name):
            verdict = decision.verdict if decision else NOT_RANKED[FLAG]
            groups.setdefault(verdict, []).append(entry)
    return {name: groups[name] for name in (*VERDICTS, NOT_RANKED[FLAG]) if name in groups}


def describe_verdicts(standings: Standings) -> list[str]:
    """Return a sentence with the verdicts for each budget."""
    lines = []
    for budget in standings.budgets:
        parts = []
        for verdict, entries in _by_verdict(standings, budget).items():
            parts.append(f"{verdict}: {', '.join(entry.objective for entry in entries)}")
        text = "; ".join(parts) or "nothing was compared"
        lines.append(f"{flops_text(budget)} FLOPs, beside {standings.baseline}: {text}.")
    return lines


# ---------------------------------------------------------------- the rule, findings, references


def _describe_rule(standings: Standings) -> str:
    rule, metric = standings.rule, standings.primary
    choice = (
        " The score covers all plausible settings; its error includes what tuning might have "
        f"chosen otherwise, pooled over the rows of a budget ({standings.tuning_seeds} tuning "
        "seeds)."
    )
    items = (
        " The error of the test items is included, too: paired where runs recorded in which "
        "blocks of items they are right, else binomial."
    )
    return (
        "Better, worse: a permutation test of means and Welch's t test, two-sided, below "
        f"{rule.level:g} after Holm's correction for "
        f"{count_text(standings.comparisons, 'comparison')}. Equivalent: the "
        f"{interval_title(rule)} of the difference (Welch's) lies within ± "
        f"{metric.text(rule.smallest_effect)}, the smallest difference that matters."
        f"{choice * standings.has_choices}{items * standings.has_items}"
    )


def describe_gains(standings: Standings) -> str:
    """Return how the verdicts on gains came about."""
    rule = standings.rule
    count = sum(entry.gain_decision is not None for entry in standings.entries)
    return (
        "The plan decides by the score; the verdict on the gain is secondary, and tells a head "
        "start from what was learnt. The difference is between two gains, of the row and of "
        f"{standings.baseline}, each over its own untrained models: Welch's t test and interval "
        "of four means, and a permutation test of the scores less the means of the untrained "
        f"ones, corrected among themselves for "
        f"{count_text(max(rule.comparisons, count), 'comparison')}. Seeds "
        "that would decide are runs and untrained models of each."
    )


def describe_findings(standings: Standings, about_all: bool = True) -> list[str]:
    """Return reasons of gates, flags with their letters first; `about_all` includes whole rows."""
    by_gate = letters(standings)
    flagged: dict[str, list[str]] = {gate: [] for gate in by_gate}
    others = []
    for entry in standings.ordered:
        row = f"{entry.objective} at {flops_text(entry.budget)}"
        for finding in entry.about(standings.metric.name, *ACTIONS):
            if not (about_all or finding.metric):
                continue
            if finding.action == FLAG:
                flagged[finding.gate].append(f"{row}: {finding.reason}")
            else:
                title = f", {finding.action} ({finding.gate})" * (finding.action != NOTE)
                others.append(f"{row}{title}: {finding.reason}.")
    rows = {gate: "; ".join(texts) for gate, texts in flagged.items() if texts}
    return [*(f"{by_gate[gate]} ({gate}): {text}." for gate, text in rows.items()), *others]


def _describe_references(standings: Standings) -> list[str]:
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
        if names:
            trained.append(f"{', '.join(names)} at {flops_text(budget)}")
    if not trained:
        return ["All rows ship with the plan."]
    return [f"Run here: {'; '.join(trained)}; all other rows ship with the plan."]


# ---------------------------------------------------------------- parts of a mean


def describe_parts(standings: Standings) -> list[str]:
    """Return sentences on the mark of parts and on parts that do not tell rows apart."""
    texts, sentences, is_flagged = [], [], False
    for part in standings.parts:
        view, name = standings.about(part), short_name(part)
        equal, compared = [], 0  # budgets at which no two rows differ, and those with two rows
        for budget in standings.budgets:
            rows = []
            for entry in standings.at(budget):
                is_flagged |= value_of("part", view, entry).wide.endswith(DOUBT)
                hidden = why_hidden(standings, entry) or why_hidden(view, entry)
                if not hidden and len(scores := entry.scores.get(part.name, ())) > 1:
                    rows.append(scores)
            compared += len(rows) > 1
            results = [compare(one, other, False) for one, other in combinations(rows, 2)]
            if results and not any(result and result.sign for result in results):
                equal.append(budget)
        if equal and len(equal) == compared:
            texts.append(f"{name} tells the rows apart at none of the budgets")
        elif equal:
            at = ", ".join(map(flops_text, equal))
            texts.append(f"{name} does not tell the rows apart at {at} FLOPs")
    if texts:
        sentences.append(
            f"Of the parts of {standings.primary.name}, {'; '.join(texts)} (by Student's t, no two "
            "rows differ)."
        )
    return [*sentences, *[f"{DOUBT} behind a part: a gate flags it."] * is_flagged]


# ---------------------------------------------------------------- the answer


def describe_answer(standings: Standings, objective: str = "") -> str:
    """Return in a sentence who leads, by how much and how surely, overall and by kind of end task.

    It is about the largest budget at which rows, or only those of `objective`, were compared with
    the baseline.
    """
    base = standings.baseline
    if objective:
        names = (base, objective)
        rows = [entry for entry in standings.entries if entry.objective in names]
        standings = replace(standings, entries=rows)
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
        if (lead := _lead_of(view, budget)) is None:
            level.append(name)
            continue
        leader, nearest = lead
        if leader != base:
            difference = replace(value_of("difference", view, nearest), interval=None).narrow
            name += f" ({difference}, p {value_of('p', view, nearest).wide})"
        leads.setdefault(leader, []).append(name)
    clauses = [f"{leader} leads in {_listed(names)}" for leader, names in leads.items()]
    if level:
        clauses.append(f"none is shown to be better than {base} in {_listed(level)}")
    if clauses:
        text += f"; by kind of end task, {_listed(clauses)}"
    return f"{text}."


def _listed(names: Sequence[str]) -> str:
    """Return names as "a", "a and b", "a, b and c"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _describe_overall(standings: Standings, budget: float) -> str:
    """Return who leads by the primary metric, with difference, interval and p; or nobody."""
    base, name = standings.baseline, standings.primary.name
    groups, lead = _by_verdict(standings, budget), _lead_of(standings, budget)
    counts = ", ".join(f"{len(entries)} {verdict}" for verdict, entries in groups.items())
    if lead is None:
        outcome = "none is shown to be better than the baseline"
        if set(groups) <= {UNDECIDED, NOT_RANKED[FLAG]}:
            outcome = "nothing is decided"
        return f"{outcome} in {name} (baseline {base}: {counts})"
    leader, nearest = lead
    text = f"{leader} leads {base} in {name}, by"
    if leader == base:
        text = f"{base} leads in {name}; the nearest, {nearest.objective}, differs by"
    value, p = (value_of(key, standings, nearest) for key in ("difference", "p"))
    size = replace(value, interval=None).narrow + " points" * standings.metric.percent
    ends = f"{interval_title(standings.rule)} {replace(value, mean=None).narrow}, "
    return f"{text} {size} ({ends if value.interval else ''}p {p.wide}; {counts})"


def _lead_of(standings: Standings, budget: float) -> tuple[str, StandingsEntry] | None:
    """Return who leads: the best of the better rows, or the baseline with the nearest row."""
    groups = _by_verdict(standings, budget)
    if better := groups.get(BETTER):
        best = replace(standings, entries=better, metrics=[standings.metric]).ordered[0]
        return best.objective, best
    if WORSE in groups and groups.keys() <= {WORSE, NOT_RANKED[FLAG]}:
        return standings.baseline, groups[WORSE][0]
    return None


def describe_certainty(standings: Standings) -> list[str]:
    """Return the seeds of rows, the rule, what would decide undecided rows, parts, ladders."""
    name, lines = standings.primary.name, []
    counts = sorted({len(entry.scores.get(name, ())) for entry in standings.entries})
    if counts:
        ends = dict.fromkeys(map(str, (counts[0], counts[-1])))
        lines.append(f"Seeds of a row: {' to '.join(ends)}.")
    for budget in standings.budgets[::-1]:
        rows = _by_verdict(standings, budget).get(UNDECIDED, [])
        texts = [f"{entry.objective} ({entry.decision.remedy})" for entry in rows if entry.decision]
        if texts:
            lines.append(f"Undecided at {flops_text(budget)} FLOPs: {', '.join(texts)}.")
    lines += [_describe_rule(standings), *describe_parts(standings)]
    lines += [*describe_crossovers(standings), *describe_decisions(standings)]
    return [*lines, *describe_origins(standings)]
