"""Gates on validation losses: has a row learnt more than a uniform guess and word frequencies?

They read loss terms by their kinds (see `core.batch.Term`): cross-entropies over the vocabulary,
and the binary cross-entropy of discriminators together with the share of fakes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from metaseq_lm.config.entries import ObjectiveEntry, objective_entries
from metaseq_lm.core.files import is_number
from metaseq_lm.core.metric_names import CAUSAL_NLL, CLOZE_NLL, DETECTION, NLL
from metaseq_lm.league.gate import LEARNING, LOSSES, gate
from metaseq_lm.league.standings import FLAG, NOTE, VOID, Context, GateFinding
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import Row

_ENTROPIES = (CAUSAL_NLL, CLOZE_NLL, NLL)  # kinds of terms, in nats a token
_PLATEAU = 0.05  # nats
_USUAL_UNMASKED = 0.1  # task.leave_unmasked_prob by default
_DETECTED = 0.02  # share of the base rate's loss by which a discriminator has to beat it
_LOST = 0.25  # share of a run's gain: a run that loses more than this diverged,
_STEPS = 3  # if it also loses more than this multiple of the usual step between validations
_FEWEST = 4  # fewest validations for a slope of the last quarter


def number(value: float) -> str:
    """Return a number with three significant digits, for reasons."""
    return f"{value:.3g}"


def by_share(
    affected: Sequence[bool], gate: str, most: str, some: str, reason: str, metric: str = ""
) -> Iterator[GateFinding]:
    """Yield a finding if any runs are affected: an action if in most of them, another in some."""
    if any(affected):
        action = most if 2 * sum(affected) > len(affected) else some
        yield GateFinding(
            gate, action, f"{reason} ({sum(affected)} of {len(affected)} runs)", metric
        )


def lowest(run: Run, term: str) -> list[float]:
    """Return the smallest validation of a loss term, [] without validations of it."""
    return sorted(run.series(f"valid.{term}")[1])[:1]


def curve(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Return updates and values of the metric that chose the checkpoint; smaller is better."""
    metric = run.values.get("trainer.best_checkpoint_metric") or "loss"
    updates, values = run.series(f"valid.{metric}")
    sign = -1.0 if run.values.get("trainer.maximize_best_checkpoint_metric") else 1.0
    return np.array(updates), sign * np.array(values)


def scores_best(run: Run) -> bool:
    """Return whether the weights of the best validation are scored, in place of the last ones."""
    return bool(run.values.get("trainer.best_checkpoint_metric"))


def _entry_of(run: Run, term: str) -> ObjectiveEntry | None:
    """Return the objective of a mixture that owns a term OBJECTIVE.TERM, None for other terms."""
    return objective_entries(run.values).get(term.rpartition(".")[0])


def is_trained(run: Run, term: str) -> bool:
    """Return whether the objective of a term has a weight above 0 in a phase."""
    entry = _entry_of(run, term)
    return entry is None or any(entry.weight)


def unmasked_share(run: Run, term: str) -> float:
    """Return the share of a term's targets that masking leaves unchanged."""
    key = "task.leave_unmasked_prob"
    share = run.values.get(key)
    if entry := _entry_of(run, term):
        usual = _USUAL_UNMASKED * term.endswith(".mlm")
        share = entry.options.get(key, entry.options.get("leave_unmasked_prob", usual))
    return float(share or 0)


def _best_terms(row: Row) -> dict[str, list[float]]:
    terms: dict[str, list[float]] = {}
    for run in row.scored:
        for term, kind in sorted(run.terms.items()):
            if kind in _ENTROPIES and is_trained(run, term) and (best := lowest(run, term)):
                terms.setdefault(term, []).extend(best)
    return terms


def _at_best(term: str, losses: Sequence[float]) -> str:
    return f"valid.{term} is {number(float(np.mean(losses)))} nats at best"


@gate(LOSSES, {"ceiling": "the loss is no better than that of a uniform guess"})
def ceiling(row: Row, context: Context) -> Iterator[GateFinding]:
    """The loss of a uniform guess, ln V, is not beaten: there is nothing to score."""
    symbols = context.corpus.vocabulary if context.corpus else 0
    if not symbols:
        return
    for term, losses in _best_terms(row).items():
        affected = [loss >= math.log(symbols) for loss in losses]
        reason = f"{_at_best(term, losses)}, no less than {number(math.log(symbols))}, the loss of "
        reason += f"a uniform guess among {symbols:,} symbols"
        yield from by_share(affected, "ceiling", VOID, FLAG, reason)


@gate(
    LOSSES,
    {"plateau": "the loss could be that of word frequencies, or of the share of fakes"},
    LEARNING,
)
def plateau(row: Row, context: Context) -> Iterator[GateFinding]:
    """The loss could be that of word frequencies alone.

    If masking leaves a share of the targets unchanged, a model without context may copy these.
    """
    unigram = context.corpus.unigram if context.corpus else math.inf
    for term, losses in _best_terms(row).items():
        share = max(unmasked_share(run, term) for run in row.scored)
        level = (1 - share) * unigram
        copies = "and the copying of unmasked targets " if share else ""
        reason = f"{_at_best(term, losses)}; word frequencies {copies}reach {number(level)}"
        affected = [loss >= level - _PLATEAU for loss in losses]
        yield from by_share(affected, "plateau", FLAG, NOTE, reason)


@gate(LOSSES, {"trigrams": "the loss of a causal language model is not below that of trigrams"})
def trigrams(row: Row, context: Context) -> Iterator[GateFinding]:
    """The loss of a causal language model is not below that of trigrams of the same text.

    It is a note, because hidden states can serve scores before predictions beat counts. Unlike the
    trigrams' loss, that of a model may include [SEP], one easy target a row.
    """
    known = context.corpus.trigram if context.corpus else None
    level = math.inf if known is None else known
    for term, losses in _best_terms(row).items():
        if any(run.terms.get(term) == CAUSAL_NLL for run in row.scored):
            reason = f"{_at_best(term, losses)}; trigrams of the same text reach {number(level)}"
            affected = [loss >= level for loss in losses]
            yield from by_share(affected, "trigrams", NOTE, NOTE, reason)


@gate(LOSSES)
def undetected(row: Row, context: Context) -> Iterator[GateFinding]:
    """A discriminator is no better than one that knows only how many tokens are fake.

    Noise with other frequencies than the data, uniform or from a generator that has not learnt
    them, gives fakes away by frequency: there the base rate is too mild a level.
    """
    best = [at_best for run in row.scored if (at_best := _best_detection(run))]
    if best:
        terms, losses, levels = zip(*best)
        reason = f"{_at_best(terms[0], losses)}; the share of fakes alone reaches "
        reason += number(float(np.mean(levels)))
        affected = [loss >= (1 - _DETECTED) * level for _, loss, level in best]
        yield from by_share(affected, "plateau", FLAG, NOTE, reason)


def _best_detection(run: Run) -> tuple[str, float, float] | None:
    """Return the term of a discriminator, its loss and that of the base rate at their best."""
    detections = []
    for term in (term for term, kind in run.terms.items() if kind == DETECTION):
        for line in run.log:
            level = _base_rate(run, line) if line["kind"] == "valid" else 0.0
            if level > 0 and is_number(line.get(term)):
                detections.append((term, float(line[term]), level))
    # The smallest ratio of the two, since the share of fakes changes while a generator learns.
    return min(detections, key=lambda at: at[1] / at[2], default=None)


def _base_rate(run: Run, line: Mapping[str, Any]) -> float:
    """Return the loss, in nats, of a discriminator that only knows the share of fakes, or 0."""
    # Special tokens cost nothing. Logs of earlier versions have no share of `candidates`, which
    # counts as 1: the result is off by 3 to 5 % in rows of 25 tokens.
    candidates, fakes = line.get("candidates") or 1.0, line.get("fakes") or 0.0
    if run.values.get("criterion.disc_positions") == "masked":
        return _entropy(1 - float(line.get("sample_accuracy") or 0.0))
    # Only Electric has this option; other losses always include special tokens.
    includes_specials = run.values.get("criterion.legacy_specials", True)
    return (candidates if includes_specials else 1.0) * _entropy(fakes / candidates)


def _entropy(share: float) -> float:
    """Return the entropy of a share in nats, 0 for a share that is not between 0 and 1."""
    others = 1 - share
    return -share * math.log(share) - others * math.log(others) if 0 < share < 1 else 0.0


@gate(LOSSES, {"first best": "the first validation is the best one"})
def first_best(row: Row, context: Context) -> Iterator[GateFinding]:
    """The first validation is the best one: the run diverges, or hardly trained."""
    curves = [values for _, values in map(curve, row.scored) if len(values) > 1]
    if not curves:
        reason = "the runs have one validation or none, so their course is not known; set "
        yield GateFinding("validations", NOTE, f"{reason}trainer.validate_interval_updates")
    affected = [values[0] == values.min() for values in curves]
    reason = "the first validation is the best one: undertrained, or diverging"
    yield from by_share(affected, "first best", FLAG, NOTE, reason)


@gate(LOSSES, {"diverged": "the last validation is much worse than the best one"})
def diverged(row: Row, context: Context) -> Iterator[GateFinding]:
    """The last validation is worse than the best one by more than noise: the run diverged.

    It has to be worse by more than a share of the gain since the first validation, which alone is
    noise if the loss hardly falls, and by more than some steps from one validation to the next,
    which alone a noisy loss exceeds that has fallen. Weights of the best validation do not diverge.
    """
    affected, lost = [], []
    for run in row.scored:
        values = curve(run)[1]
        if scores_best(run) or len(values) < 3:
            continue
        loss, step = float(values[-1] - values.min()), np.median(np.abs(np.diff(values)))
        affected.append(bool(loss > max(_LOST * (values[0] - values.min()), _STEPS * step)))
        lost += [loss] * affected[-1]
    most = f"{number(max(lost, default=0.0))}{' at most' * (len(lost) > 1)}"
    reason = f"the last validation is worse than the best one by {most}"
    yield from by_share(affected, "diverged", FLAG, NOTE, reason)


@gate(LOSSES)
def still_falling(row: Row, context: Context) -> Iterator[GateFinding]:
    """The loss falls in the last quarter by more than two standard deviations over seeds.

    A loss always falls while the schedule decays the rate to its end. Such a run is judged by its
    earlier validations if there are at least FEWEST, else not at all.
    """
    starts = list(map(_decay_start, row.scored))
    falls = []
    for (updates, values), start in zip(map(curve, row.scored), starts):
        count = int(np.sum(updates <= start))
        if count >= _FEWEST:
            before = np.interp(0.75 * updates[count - 1], updates[:count], values[:count])
            falls.append(float(before - values[count - 1]))
    if len(falls) < 2:
        return
    mean, sd = float(np.mean(falls)), float(np.std(falls, ddof=1))
    if mean > max(2 * sd, 0):
        reason = f"limited by the budget: the validation loss falls by {number(mean)} ± "
        reason += f"{number(sd)} in the last quarter of the updates"
        decays = any(0 < start < math.inf for start in starts)
        yield GateFinding("still falling", NOTE, reason + " before the rate decays" * decays)


def _decay_start(run: Run) -> float:
    """Return the update at which the schedule starts to decay the rate to its end, or infinity."""
    values = run.values
    name, total = values.get("schedule._name"), values.get("schedule.total_updates")
    if values.get("schedule.end") == 1 or values.get("schedule.power") == 0:
        return math.inf  # the rate stays constant
    if name in ("linear", "polynomial"):
        return 0.0
    # Schedules without an end, such as `inverse_sqrt`, and those of plug-ins never do.
    share = values.get("schedule.decay_ratio") if name == "wsd" else None
    return (1 - float(share)) * float(total) if share and total else math.inf
