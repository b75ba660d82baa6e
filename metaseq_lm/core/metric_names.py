"""The direction of a metric, and whether it is a fraction, by the words in its name."""

from __future__ import annotations

import re

__all__ = ["CAUSAL_NLL", "CLOZE_NLL", "DETECTION", "NLL"]

_LOWER_IS_BETTER = set("loss entropy ppl perplexity error wer cer nll mae mse rmse".split())
_HIGHER_IS_BETTER = set("score bleu matthews spearman pearson mcc correlation".split())
_FRACTIONS = set("accuracy acc f1 precision recall exact em uas las wer cer share".split())

# Kinds of terms of a loss, see `core.batch.Term`; the first two name the exact losses of a world.
CAUSAL_NLL, CLOZE_NLL, NLL, DETECTION = "token", "cloze", "nll", "detection"
KINDS = ("", CAUSAL_NLL, CLOZE_NLL, NLL, DETECTION)


_LOSSES = set("loss losses entropy ppl perplexity nll bits bpc bpb".split())


def is_loss(name: str) -> bool:
    """Return whether a metric's name is the name of a loss, or of a function of one."""
    return bool(_words_of(name) & _LOSSES)


def _words_of(name: str) -> set[str]:
    return set(re.split(r"[._/\-\s]+", name.lower()))


def is_fraction(name: str) -> bool:
    """Return whether a metric's name is the name of a fraction, which is shown in per cent."""
    return bool(_words_of(name) & _FRACTIONS)


def lower_is_better(name: str) -> bool | None:
    """Return whether smaller values of a metric are better; None if its name does not tell."""
    words = _words_of(name)
    if words & _LOWER_IS_BETTER:
        return True
    return False if words & (_HIGHER_IS_BETTER | _FRACTIONS) else None
