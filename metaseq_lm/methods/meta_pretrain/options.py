"""Options of the meta_pretrain methods."""

from dataclasses import dataclass

from metaseq_lm.config.tasks import (
    BatchConfig,
    CutRowsConfig,
    EvaluationConfig,
    LabelledSetsConfig,
    LanguageModelingConfig,
    SentencePairsConfig,
)
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import option, with_default
from metaseq_lm.core.registry import CRITERIONS, TASKS, NoOptions


@dataclass
class MetaOptions:
    """Options of the inner steps."""

    inner_steps: int = option(1, "inner steps k; an update uses k + 1 batches", at_least=0)
    inner_optim: str = option(
        "adam",
        "adam: steps of the run's optimizer (its moments, rate and clip_norm), undone after the "
        "update; sgd: plain steps of inner_lr, not clipped",
        choices=("adam", "sgd"),
    )
    inner_lr: float | None = option(None, "learning rate of inner_optim=sgd", at_least=0)
    second_order: str = option(
        "none",
        "none: use the gradient at theta_k; exact: differentiate through the "
        "inner steps (sgd only)",
        choices=("none", "exact"),
    )

    def check(self) -> None:
        """Raise UsageError for options that contradict each other."""
        if (self.inner_lr is None) != (self.inner_optim == "adam"):
            raise UsageError(
                "task.inner_lr is the rate of task.inner_optim=sgd, which needs one; inner steps "
                "of adam have the rate of the optimizer"
            )
        if self.inner_optim == "adam" and self.second_order == "exact":
            raise UsageError("task.second_order=exact needs task.inner_optim=sgd")


@dataclass
class _MetaPretrainConfig(MetaOptions, SentencePairsConfig):
    """The options of sentence_pairs and of the inner steps."""


@dataclass
class _MetaPretrainLSTMConfig(MetaOptions, LanguageModelingConfig):
    """The options of language_modeling and of the inner steps."""


@dataclass
class MetaPretrainPairsConfig(
    EvaluationConfig, CutRowsConfig, BatchConfig, LabelledSetsConfig, MetaOptions
):
    """Options of the labelled sets, their batches, and the inner steps."""

    batch_size: int = with_default(
        BatchConfig, "batch_size", 32, "rows of a batch, the same number from each set"
    )


TASKS.declare(
    "meta_pretrain", _MetaPretrainConfig, "metaseq_lm.methods.meta_pretrain.task.MetaPretrainTask"
)
TASKS.declare(
    "meta_pretrain_lstm",
    _MetaPretrainLSTMConfig,
    "metaseq_lm.methods.meta_pretrain.task.MetaPretrainLSTMTask",
)
TASKS.declare(
    "meta_pretrain_pairs",
    MetaPretrainPairsConfig,
    "metaseq_lm.methods.meta_pretrain.task.MetaPretrainPairsTask",
    takes=("meta_pretrain_pairs",),
)
CRITERIONS.declare(
    "meta_pretrain_pairs", NoOptions, "metaseq_lm.methods.meta_pretrain.criterion.LabelledSets"
)
