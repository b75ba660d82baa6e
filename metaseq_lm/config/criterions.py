"""Options of the criterions."""

from dataclasses import dataclass

from metaseq_lm.core.options import WEIGHTS, option
from metaseq_lm.core.registry import CRITERIONS, NoOptions

__all__ = ["BatchSumConfig", "TokenLossConfig", "ZLossConfig"]

_BOTH, CAUSAL = "both", "causal"


@dataclass
class BatchSumConfig:
    """Reduction of the losses of a batch.

    The authors of ELECTRA clip the gradient of the sum over the batch to norm 1, so that nearly
    every step has that norm. Evaluations take the mean over samples.
    """

    batch_sum: bool = option(
        True,
        "clip (optimizer.clip_norm) and apply the gradient of the sum of a batch's losses; "
        "false: of their mean. Logs show the mean",
        affects=WEIGHTS,
    )


@dataclass
class ZLossConfig:
    """A term that keeps the normaliser of the softmax near 1 (Chowdhery et al. 2022, section 5)."""

    z_loss: float = option(
        0.0,
        "weight, in training, of the z-loss, the squared log of the softmax's normaliser "
        "averaged over targets, such as 1e-4 (0 = none)",
        at_least=0,
        affects=WEIGHTS,
    )


@dataclass
class _LabelSmoothingConfig:
    """Smoothing of the targets."""

    label_smoothing: float = option(
        0.0, "label smoothing in training", at_least=0, below=1, affects=WEIGHTS
    )


@dataclass
class TokenLossConfig(ZLossConfig, _LabelSmoothingConfig):
    """Parts of the training loss of every objective that predicts tokens; evaluations have none."""


@dataclass
class ReadConfig:
    """The objective that represents a mixture."""

    read: str = option(
        "",
        "name of the objective by which a run is scored, probed and exported ('' = the one with "
        "the largest weight in the last phase); score accepts it for a finished run",
    )


@dataclass
class PrefixLMConfig(TokenLossConfig):
    """The attention of frozen states; sentences have one score."""

    read: str = option(
        _BOTH,
        "attention when states are read (suite probe): both sides, as in a prefix, or causal",
        choices=(_BOTH, CAUSAL),
    )


@dataclass
class MaskedDiffusionConfig(TokenLossConfig):
    """Predictions, and the scores of sentences."""

    shifted: bool = option(
        False,
        "predict masked tokens from the state before them, as a causal LM does; false: from "
        "their own",
    )
    score_samples: int = option(
        16, "random maskings per sentence, from which its bound is estimated", at_least=1
    )
    score_seed: int = option(1, "seed of these maskings")


@dataclass
class TaggingConfig:
    """The target of a word."""

    label_smoothing: float = option(
        0.1, "label smoothing in training", at_least=0, below=1, affects=WEIGHTS
    )


CRITERIONS.declare("masked_lm", TokenLossConfig, "metaseq_lm.criterions.masked_lm.MaskedLM")
CRITERIONS.declare(
    "bert_pretraining", TokenLossConfig, "metaseq_lm.criterions.masked_lm.BertPretraining"
)
CRITERIONS.declare(
    "image_classification", NoOptions, "metaseq_lm.criterions.labelled.ImageClassification"
)
CRITERIONS.declare(
    "sentence_prediction", BatchSumConfig, "metaseq_lm.criterions.labelled.SentencePrediction"
)
CRITERIONS.declare(
    "token_classification", BatchSumConfig, "metaseq_lm.criterions.labelled.TokenClassification"
)
CRITERIONS.declare("cloze", BatchSumConfig, "metaseq_lm.criterions.labelled.Cloze")
CRITERIONS.declare("squad", BatchSumConfig, "metaseq_lm.criterions.labelled.SquadCriterion")
CRITERIONS.declare("causal_lm", TokenLossConfig, "metaseq_lm.criterions.language_modeling.CausalLM")
CRITERIONS.declare(
    "language_modeling", NoOptions, "metaseq_lm.criterions.language_modeling.LanguageModeling"
)
CRITERIONS.declare("mixture", ReadConfig, "metaseq_lm.criterions.mixture.Mixture")
CRITERIONS.declare("prefix_lm", PrefixLMConfig, "metaseq_lm.criterions.predictions.PrefixLM")
CRITERIONS.declare(
    "masked_next_token", TokenLossConfig, "metaseq_lm.criterions.predictions.MaskedNextToken"
)
CRITERIONS.declare(
    "masked_diffusion", MaskedDiffusionConfig, "metaseq_lm.criterions.predictions.MaskedDiffusion"
)
CRITERIONS.declare("tagging", TaggingConfig, "metaseq_lm.criterions.tagging.Tagging")
CRITERIONS.declare("parsing", NoOptions, "metaseq_lm.criterions.tagging.Parsing")
CRITERIONS.declare(
    "translation", _LabelSmoothingConfig, "metaseq_lm.criterions.translation.Translation"
)
