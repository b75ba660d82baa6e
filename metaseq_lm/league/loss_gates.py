"""Gates on the losses of validations: has a row left the ceiling and the word frequencies?

They read terms of the loss that are cross-entropies over the vocabulary, by their names (TERMS); an
objective without one, such as replaced-token detection, has no ceiling and no plateau.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from metaseq_lm.league.standings import FLAG, NOTE, VOID, Context, Finding, Row
from metaseq_lm.reporting.runs import Run

# Terms that are the mean cross-entropy of a token over the vocabulary, in nats.
TERMS = ("mlm", "next_token", "forward", "backward")
PLATEAU = 0.05  # nats
FEWEST = 4  # validations, of which the last quarter has a slope


def number(value: float) -> str:
    """Return a number as reasons show it, with three significant digits."""
    return f"{value:.3g}"


def by_share(
    gate: str, count: int, of: int, actions: tuple[str, str], reason: str
) -> Iterator[Finding]:
    """Yield a finding if some runs are concerned: actions[0] if most are, else actions[1]."""
    if count:
        action = actions[0] if 2 * count > of else actions[1]
        yield Finding(gate, action, f"{reason} ({count} of {of} runs)")


def best_terms(row: Row) -> dict[str, list[float]]:
    """Return the smallest validation of each term of TERMS that the runs of a row have."""
    terms: dict[str, list[float]] = {}
    for run in row.scored:
        for term in TERMS:
            values = run.series(f"valid.{term}")[1]
            if values:
                terms.setdefault(term, []).append(min(values))
    return terms


def ceiling(row: Row, context: Context) -> Iterator[Finding]:
    """The loss of a uniform guess, ln V, is not beaten: there is nothing to score.

    A model whose predictions collapse onto a few tokens is above it, too.
    """
    if not context.vocabulary:
        return
    limit = float(np.log(context.vocabulary))
    for term, values in best_terms(row).items():
        reason = (
            f"valid.{term} is {number(float(np.mean(values)))} nats at best, no less than "
            f"{number(limit)}, the loss of a uniform guess among {context.vocabulary:,} symbols"
        )
        count = sum(value >= limit for value in values)
        yield from by_share("ceiling", count, len(values), (VOID, FLAG), reason)


def plateau(row: Row, context: Context) -> Iterator[Finding]:
    """The loss could be that of word frequencies alone.

    Where masking leaves a share of the targets as they are, a model without context may copy these:
    the level is (1 - share) times the unigram's cross-entropy.
    """
    if context.unigram is None:
        return
    for term, values in best_terms(row).items():
        share = max(float(run.values.get("task.leave_unmasked_prob") or 0) for run in row.scored)
        level = (1 - share) * context.unigram
        reason = (
            f"valid.{term} is {number(float(np.mean(values)))} nats at best; word frequencies "
            f"{'and the copying of unmasked targets ' if share else ''}reach {number(level)}"
        )
        count = sum(value >= level - PLATEAU for value in values)
        yield from by_share("plateau", count, len(values), (FLAG, NOTE), reason)


def curve(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Return updates and values of the metric that chose the checkpoint, smaller being better."""
    metric = run.values.get("trainer.best_checkpoint_metric") or "loss"
    updates, values = run.series(f"valid.{metric}")
    sign = -1.0 if run.values.get("trainer.maximize_best_checkpoint_metric") else 1.0
    return np.array(updates), sign * np.array(values)


def first_best(row: Row, context: Context) -> Iterator[Finding]:
    """The first validation is the best one: the run diverges, or hardly trained."""
    curves = [values for _, values in map(curve, row.scored) if len(values) > 1]
    if not curves:
        yield Finding(
            "validations",
            NOTE,
            "the runs have one validation or none, so that their course is not known; set "
            "trainer.validate_interval_updates",
        )
        return
    count = sum(int(np.argmin(values)) == 0 for values in curves)
    reason = "the first validation is the best one: undertrained, or diverging"
    yield from by_share("first best", count, len(curves), (FLAG, NOTE), reason)


def still_falling(row: Row, context: Context) -> Iterator[Finding]:
    """The loss falls in the last quarter by more than two standard deviations over seeds."""
    declines = last_quarters([curve(run) for run in row.scored])
    if len(declines) < 2:
        return
    mean, sd = float(np.mean(declines)), float(np.std(declines, ddof=1))
    if mean > 2 * sd and mean > 0:
        yield Finding(
            "still falling",
            NOTE,
            f"limited by the budget: the validation loss falls by {number(mean)} ± {number(sd)} in "
            "the last quarter of the updates",
        )


def last_quarters(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[float]:
    """Return by how much each curve (updates, values) falls in the last quarter of its updates."""
    declines = []
    for updates, values in curves:
        if len(values) >= FEWEST:
            before = np.interp(0.75 * updates[-1], updates, values)
            declines.append(float(before - values[-1]))
    return declines
