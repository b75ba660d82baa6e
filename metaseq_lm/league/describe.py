"""Sentences on the standings: how verdicts came about, and where rows come from."""

from metaseq_lm.league.cells import interval_title
from metaseq_lm.league.entries import Standings
from metaseq_lm.reporting.numbers import flops_text


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


def describe_origins(standings: Standings) -> list[str]:
    """Return which rows were run here and which shipped with the plan; [] if none shipped."""
    if not any(entry.shipped for entry in standings.entries):
        return []
    trained = []
    for budget in standings.budgets:
        entries = standings.at(budget, standings.primary)
        names = [entry.objective for entry in entries if not entry.shipped]
        trained += [f"{', '.join(names)} at {flops_text(budget)}"] if names else []
    if not trained:
        return ["All rows ship with the plan."]
    return [f"Run here: {'; '.join(trained)}; all other rows ship with the plan."]
