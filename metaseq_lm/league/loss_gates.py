"""Gates on validation losses: has a row learnt more than a uniform guess and word frequencies?

They read loss terms by their kinds (see `core.batch.Term`): cross-entropies over the vocabulary,
and the binary cross-entropy of discriminators together with the share of fakes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from metaseq_lm.config.entries import ObjectiveEntry, objective_entries
from metaseq_lm.core.metric_names import CAUSAL_NLL, CLOZE_NLL, DETECTION, NLL
from metaseq_lm.league.gate import LEARNING, LOSSES, gate
from metaseq_lm.league.standings import FLAG, NOTE, VOID, Context, Finding, Row
from metaseq_lm.reporting.runs import Run, is_number

_ENTROPIES = (CAUSAL_NLL, CLOZE_NLL, NLL)  # kinds of terms, in nats a token
_PLATEAU = 0.05  # nats
_USUAL_UNMASKED = 0.1  # task.leave_unmasked_prob by default
_FAKES = "fakes"  # the share of fakes, logged next to a discriminator's loss
_DETECTED = 0.02  # share of the base rate's loss by which a discriminator has to beat it
_LOST = 0.25  # share of a run's gain: a run that loses more than this diverged,
_STEPS = 3  # if it also loses more than this multiple of the usual step between validations
_FEWEST = 4  # fewest validations for a slope of the last quarter


def number(value: float) -> str:
    """Return a number with three significant digits, for reasons."""
    return f"{value:.3g}"


def by_share(
    gate: str, count: int, of: int, actions: tuple[str, str], reason: str
) -> Iterator[Finding]:
    """Yield a finding if any runs are affected: actions[0] if most are, else actions[1]."""
    if count:
        action = actions[0] if 2 * count > of else actions[1]
        yield Finding(gate, action, f"{reason} ({count} of {of} runs)")


def _best_terms(row: Row) -> dict[str, list[float]]:
    """Return the smallest validation of each run for each cross-entropy over the vocabulary.

    In a mixture a term is called OBJECTIVE.TERM; objectives that are only validated do not count.
    """
    terms: dict[str, list[float]] = {}
    for run in row.scored:
        for term in sorted(name for name, kind in run.terms.items() if kind in _ENTROPIES):
            values = run.series(f"valid.{term}")[1]
            if values and is_trained(run, term):
                terms.setdefault(term, []).append(min(values))
    return terms


def _entry_of(run: Run, term: str) -> ObjectiveEntry | None:
    """Return the objective of a mixture that owns a term OBJECTIVE.TERM, None for other terms."""
    return objective_entries(run.values).get(term.rpartition(".")[0])


def is_trained(run: Run, term: str) -> bool:
    """Return whether the objective of a term has a weight above 0 in a phase."""
    entry = _entry_of(run, term)
    return entry is None or any(entry.weight)


def unmasked_share(run: Run, term: str) -> float:
    """Return the share of a term's targets that masking leaves unchanged."""
    share = run.values.get("task.leave_unmasked_prob")
    if entry := _entry_of(run, term):
        usual = _USUAL_UNMASKED * term.endswith(".mlm")
        keys = ("task.leave_unmasked_prob", "leave_unmasked_prob")
        share = next((entry.options[key] for key in keys if key in entry.options), usual)
    return float(share or 0)


@gate(LOSSES, {"ceiling": "the loss is no better than that of a uniform guess"})
def ceiling(row: Row, context: Context) -> Iterator[Finding]:
    """The loss of a uniform guess, ln V, is not beaten: there is nothing to score.

    A model whose predictions collapse onto a few tokens is also above it.
    """
    if context.corpus is None:
        return
    limit = float(np.log(context.corpus.vocabulary))
    for term, values in _best_terms(row).items():
        reason = (
            f"valid.{term} is {number(float(np.mean(values)))} nats at best, no less than "
            f"{number(limit)}, the loss of a uniform guess among "
            f"{context.corpus.vocabulary:,} symbols"
        )
        count = sum(value >= limit for value in values)
        yield from by_share("ceiling", count, len(values), (VOID, FLAG), reason)


@gate(
    LOSSES,
    {"plateau": "the loss could be that of word frequencies, or of the share of fakes"},
    LEARNING,
)
def plateau(row: Row, context: Context) -> Iterator[Finding]:
    """The loss could be that of word frequencies alone.

    If masking leaves a share of the targets unchanged, a model without context may copy these: the
    level is (1 - share) times the unigram's cross-entropy.
    """
    if context.corpus is None:
        return
    for term, values in _best_terms(row).items():
        share = max(unmasked_share(run, term) for run in row.scored)
        level = (1 - share) * context.corpus.unigram
        reason = (
            f"valid.{term} is {number(float(np.mean(values)))} nats at best; word frequencies "
            f"{'and the copying of unmasked targets ' if share else ''}reach {number(level)}"
        )
        count = sum(value >= level - _PLATEAU for value in values)
        yield from by_share("plateau", count, len(values), (FLAG, NOTE), reason)


@gate(LOSSES, {"trigrams": "the loss of a causal language model is not below that of trigrams"})
def trigrams(row: Row, context: Context) -> Iterator[Finding]:
    """The loss of a causal language model is not below that of trigrams of the same text.

    The finding is a note, because scores are ranked and not losses, and hidden states can serve
    scores before next-token predictions beat counts. A model that predicts [SEP] has it in its
    loss, unlike the trigrams; in full rows it is one easy target a row.
    """
    level = context.corpus.trigram if context.corpus else None
    if level is None:
        return
    for term, values in _best_terms(row).items():
        is_causal = any(run.terms.get(term) == CAUSAL_NLL for run in row.scored)
        if is_causal and (count := sum(value >= level for value in values)):
            reason = f"valid.{term} is {number(float(np.mean(values)))} nats at best; trigrams of "
            reason += f"the same text reach {number(level)}"
            yield from by_share("trigrams", count, len(values), (NOTE, NOTE), reason)


@gate(LOSSES)
def undetected(row: Row, context: Context) -> Iterator[Finding]:
    """A discriminator is no better than one that knows only how many tokens are fake.

    The gate judges the validation with the smallest ratio of its loss to the base rate's, since the
    share of fakes changes while a generator learns. Against fixed noise with the frequencies of the
    data, word frequencies alone reach only the base rate: they tell Electric nothing, and lower the
    loss of replaced-token detection by about a thousandth. Noise with other frequencies, uniform or
    from a generator that has not learnt them, gives fakes away by frequency: there the base rate is
    too mild a level.
    """
    best = [level for run in row.scored if (level := best_detection(run))]
    losses = [loss for loss, _ in best]
    levels = [level for _, level in best]
    count = sum(loss >= (1 - _DETECTED) * level for loss, level in best)
    if count:
        reason = (
            f"valid.{_detector_of(row)} is {number(float(np.mean(losses)))} nats at best; the "
            f"share of fakes alone reaches {number(float(np.mean(levels)))}"
        )
        yield from by_share("plateau", count, len(best), (FLAG, NOTE), reason)


def _detector_of(row: Row) -> str:
    """Return the name of the discriminator's term in the runs of a row."""
    kinds = {name: kind for run in row.scored for name, kind in run.terms.items()}
    return next(name for name, kind in kinds.items() if kind == DETECTION)


def best_detection(run: Run) -> tuple[float, float] | None:
    """Return the loss of a discriminator and of the base rate at the best validation.

    None for a run without validations of a discriminator.
    """
    pairs = []
    detectors = [term for term, kind in run.terms.items() if kind == DETECTION]
    for line in run.log:
        for term in detectors if line["kind"] == "valid" else ():
            level = base_rate(run, line)
            if level > 0 and is_number(line.get(term)):
                pairs.append((float(line[term]), level))
    return min(pairs, key=lambda pair: pair[0] / pair[1]) if pairs else None


def base_rate(run: Run, line: Mapping[str, Any]) -> float:
    """Return the loss, in nats, of a discriminator that only knows the share of fake tokens.

    It is the entropy H(f) = -f ln f - (1 - f) ln(1 - f) of the share f of fakes among the tokens
    that may be replaced. Special tokens are never taken for fakes and cost nothing. Logs of earlier
    versions have no share of `candidates`, which then counts as 1: in rows of 25 tokens the result
    is 3 % too large for replaced-token detection and 5 % too small for Electric. Return 0 if no
    share of fakes is logged.
    """
    candidates, fakes = line.get("candidates") or 1.0, line.get(_FAKES) or 0.0
    if run.values.get("criterion.disc_positions") == "masked":
        return entropy(1 - float(line.get("sample_accuracy") or 0.0))
    # Only Electric has this option; other losses always include special tokens.
    includes_specials = run.values.get("criterion.legacy_specials", True)
    return (candidates if includes_specials else 1.0) * entropy(fakes / candidates)


def entropy(share: float) -> float:
    """Return the entropy of a share in nats, 0 for a share that is not between 0 and 1."""
    if not 0 < share < 1:
        return 0.0
    return float(-share * np.log(share) - (1 - share) * np.log1p(-share))


def curve(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Return updates and values of the metric that chose the checkpoint; smaller is better."""
    metric = run.values.get("trainer.best_checkpoint_metric") or "loss"
    updates, values = run.series(f"valid.{metric}")
    sign = -1.0 if run.values.get("trainer.maximize_best_checkpoint_metric") else 1.0
    return np.array(updates), sign * np.array(values)


@gate(LOSSES, {"first best": "the first validation is the best one"})
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


@gate(LOSSES, {"diverged": "the last validation is much worse than the best one"})
def diverged(row: Row, context: Context) -> Iterator[Finding]:
    """The last validation is worse than the best one by more than noise: the run diverged.

    It has to be worse by more than the share LOST of the gain since the first validation, and by
    more than STEPS times the median step from one validation to the next. Neither alone is enough:
    a quarter of the gain is noise if the loss hardly falls, and a noisy loss that ends high has
    still fallen.
    """
    curves = [values for _, values in map(curve, row.scored) if len(values) > 2]
    lost = [float(values[-1] - values.min()) for values in curves if _has_diverged(values)]
    if lost:
        reason = (
            "the last validation is worse than the best one by "
            f"{number(max(lost))}{' at most' * (len(lost) > 1)}"
        )
        yield from by_share("diverged", len(lost), len(curves), (FLAG, NOTE), reason)


def _has_diverged(values: np.ndarray) -> bool:
    """Return whether the validations of a run, three or more, end worse than noise explains."""
    lost, gained = values[-1] - values.min(), values[0] - values.min()
    step = np.median(np.abs(np.diff(values)))
    return bool(lost > _LOST * gained and lost > _STEPS * step)


@gate(LOSSES)
def still_falling(row: Row, context: Context) -> Iterator[Finding]:
    """The loss falls in the last quarter by more than two standard deviations over seeds.

    A loss always falls while the schedule decays the rate to its end. Such a run is judged by its
    earlier validations if there are at least FEWEST, else not at all.
    """
    starts = [_decay_start(run) for run in row.scored]
    curves = []
    for (updates, values), start in zip(map(curve, row.scored), starts):
        is_judged = updates <= (math.inf if start is None else start)
        curves.append((updates[is_judged], values[is_judged]))
    declines = _last_quarters(curves)
    if len(declines) < 2:
        return
    mean, sd = float(np.mean(declines)), float(np.std(declines, ddof=1))
    if mean > 2 * sd and mean > 0:
        before = " before the rate decays" if any(starts) else ""
        yield Finding(
            "still falling",
            NOTE,
            f"limited by the budget: the validation loss falls by {number(mean)} ± {number(sd)} in "
            f"the last quarter of the updates{before}",
        )


def _decay_start(run: Run) -> float | None:
    """Return the update at which the schedule starts to decay the rate to its end, or None.

    `linear` and `polynomial` decay from update 0. Schedules without an end (`constant`,
    `inverse_sqrt`, `damped_inverse_sqrt`) and unknown ones, such as a plug-in's, give None.
    """
    values = run.values
    name, total = values.get("schedule._name"), values.get("schedule.total_updates")
    if values.get("schedule.end") == 1 or values.get("schedule.power") == 0:
        return None  # the rate stays constant
    if name in ("linear", "polynomial"):
        return 0.0
    share = values.get("schedule.decay_ratio") if name == "wsd" else None
    return (1 - float(share)) * float(total) if share and total else None


def _last_quarters(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[float]:
    """Return the fall of each curve (updates, values) in the last quarter of its updates."""
    declines = []
    for updates, values in curves:
        if len(values) >= _FEWEST:
            before = np.interp(0.75 * updates[-1], updates, values)
            declines.append(float(before - values[-1]))
    return declines
