"""Corpus BLEU (Papineni et al. 2002) by sacrebleu (Post 2018)."""

import importlib.util
from collections.abc import Sequence

from metaseq_lm.core.errors import MetaseqError, UsageError

# sacrebleu's tokenizers: "none" splits at white space, for tokenised text; "13a" is mteval's.
_TOKENIZERS = ("none", "13a", "intl", "char")


def check_bleu(tokenizer: str) -> None:
    """Raise UsageError for a tokenizer that is not one of TOKENIZERS or if sacrebleu is missing."""
    if tokenizer not in _TOKENIZERS:
        raise UsageError(
            f"task.bleu_tokenizer is '{tokenizer}'; one of {', '.join(_TOKENIZERS)} (none: the "
            "text is tokenised already)"
        )
    if importlib.util.find_spec("sacrebleu") is None:
        raise UsageError(
            "BLEU needs sacrebleu, which is not installed: pip install sacrebleu; or "
            "task.bleu=false, then nothing is translated"
        )


def corpus_bleu(
    references: Sequence[str], hypotheses: Sequence[str], tokenizer: str = "none"
) -> float:
    """Return the BLEU of one hypothesis for each reference, 0 to 100, cased, n-grams up to 4.

    Without smoothing: 0 if some n has no match, as in multi-bleu.perl. MetaseqError if there are
    none, or their numbers differ.
    """
    from sacrebleu.metrics import BLEU

    if len(references) != len(hypotheses) or not references:
        raise MetaseqError(f"{len(references)} references but {len(hypotheses)} translations")
    metric = BLEU(tokenize=tokenizer, smooth_method="none", force=True)
    return float(metric.corpus_score(list(hypotheses), [list(references)]).score)
