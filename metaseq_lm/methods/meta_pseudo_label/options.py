"""Options of the meta_pseudo_label methods."""

from dataclasses import dataclass

from metaseq_lm.config.tasks import (
    STRIDE,
    BatchConfig,
    BreakModeConfig,
    EvaluationConfig,
    LabelledSetsConfig,
    MaskingConfig,
    OneSetConfig,
    RowsConfig,
)
from metaseq_lm.core.options import option, with_default
from metaseq_lm.core.registry import CRITERIONS, TASKS, NoOptions


@dataclass
class HardConfig:
    """Sampled pairs; the teacher is trained by REINFORCE."""

    reward: str = option(
        "cosine",
        "cosine or dot product of the step and the query gradient, or neg_loss: "
        "minus the query loss",
        choices=("cosine", "dot", "neg_loss"),
    )
    inner_steps: int = option(
        1, "virtual fine-tuning steps before the query loss (0 or 1)", choices=(0, 1)
    )
    inner_lr: float = option(0.1, "learning rate of the virtual SGD step", at_least=0)
    inner_clip_norm: float = option(
        5.0, "norm to which support and query gradients are clipped", at_least=0
    )
    meta_weight: float = option(1.0, "weight of the REINFORCE loss beside the auxiliary losses")
    fidelity: str = option(
        "authors",
        "authors: the student takes a step after each micro-step, and the reward is that of the "
        "whole step; paper: it takes one step per update, on the mean gradient, and the reward of "
        "a micro-step is that of the step that would follow from its "
        "gradient alone, without weight decay",
        choices=("authors", "paper"),
    )


@dataclass
class SoftConfig:
    """Pairs as probabilities; the teacher is trained by the derivative of the query loss."""

    fixed_y: bool = option(False, "use the unlabelled text itself as target (denoising)")
    targets: str = option(
        "learned",
        "what the student is taught: learned, the teacher's probabilities; or a control with less "
        "in them: flat, its likeliest tokens that hold criterion.support of the probability, each "
        "as likely as another; shifted, its probabilities half a row further on; unigram, "
        "the frequencies of the corpus; uniform",
        choices=("learned", "flat", "shifted", "unigram", "uniform"),
    )
    support: float = option(
        0.9, "probability mass that the tokens of flat targets cover", above=0, at_most=1
    )
    inner_steps: int = option(
        1, "virtual fine-tuning steps before the query loss (0 or 1)", choices=(0, 1)
    )
    inner_lr: float = option(0.1, "learning rate of virtual SGD steps", at_least=0)
    pretrain_step: str = option(
        "adamw", "virtual pre-training step: adamw (the student's) or sgd", choices=("adamw", "sgd")
    )
    finetune_step: str = option(
        "sgd",
        "virtual fine-tuning step: sgd, or adamw with the moments after the pre-training step",
        choices=("sgd", "adamw"),
    )
    meta_weight: float = option(100.0, "weight of the meta loss beside the auxiliary losses")
    hypergradient: str = option(
        "exact", "exact or finite_difference", choices=("exact", "finite_difference")
    )
    difference_step: float = option(1e-5, "relative displacement of finite differences", above=0)
    fidelity: str = option(
        "authors",
        "authors: a virtual pre-training step uses the gradient of a micro-step divided by the "
        "number of micro-steps; paper: not divided (equation 1)",
        choices=("authors", "paper"),
    )


@dataclass
class MetaPseudoLabelConfig(
    EvaluationConfig, MaskingConfig, BreakModeConfig, RowsConfig, BatchConfig, LabelledSetsConfig
):
    """Data of the meta-learned objectives; defaults of Two Moons (paper, tables 4 and 5)."""

    labelled: list[str] = with_default(
        LabelledSetsConfig,
        "labelled",
        [],
        "labelled sets in DATA; set i has task token [CLS2+i], see task_tokens",
    )
    task_tokens: list[int] = option(
        [],
        "n of the task token [CLSn] of each set (default: 2, 3, ...); give it to keep the "
        "numbers of the other sets when you leave one out",
    )
    include_mlm_task: bool | None = option(
        None,
        "use masked text as one more labelled task (null = with soft labels only, as in the paper)",
    )
    batch_size: int = with_default(BatchConfig, "batch_size", 4, "samples of a micro-step")
    batches_per_update: int = option(4, "micro-steps of an update", at_least=1, reset="data")
    copies_at_once: int = option(
        0,
        "soft labels: micro-steps that are computed at once (0 = all; 1 needs least memory)",
        at_least=0,
    )
    samples_per_task: int = option(
        4, "number of samples in a row that come from one labelled task", at_least=1
    )
    tokens_per_sample: int = with_default(RowsConfig, "tokens_per_sample", 34)
    stride: int = option(STRIDE, "overlap of the windows of a long labelled row, in tokens")
    sample_break_mode: str = with_default(
        BreakModeConfig,
        "sample_break_mode",
        "eos",
        "eos: a line is a row; none: windows of the stream, across documents",
        choices=("eos", "none"),
    )
    mlm_label_mask: str = option(
        "y",
        "positions of masked text with a loss, y: the masked ones; x: all (authors' code)",
        choices=("y", "x"),
    )
    valid_size: int = with_default(EvaluationConfig, "valid_size", 128)
    pairs: int = option(
        3, "texts whose pairs are logged after each validation (0 = none)", at_least=0
    )
    reward_interval: int = option(
        1000, "samples between logged rewards of masked_lm (0 = never)", at_least=0
    )


@dataclass
class TokenLabelsConfig(EvaluationConfig, RowsConfig, OneSetConfig):
    """The labelled set and its batches (paper table 6)."""

    task_token: int = option(2, "n of the task token [CLSn]; as in pre-training")
    batch_size: int = with_default(BatchConfig, "batch_size", 4)
    tokens_per_sample: int = with_default(
        RowsConfig,
        "tokens_per_sample",
        34,
        "longest row, with its special tokens; longer rows are cut into windows",
    )
    stride: int = option(STRIDE, "overlap of the windows of a long row, in tokens")
    valid_size: int = with_default(
        EvaluationConfig,
        "valid_size",
        128,
        "rows of the validation split to use (0 = all); with trainer.valid_split=mini they are "
        "the split 'mini', and all rows of 'valid' are used",
    )
    shuffle: bool = option(
        True, "shuffle the training rows in every epoch; the authors' code does not"
    )


TASKS.declare(
    "token_labels",
    TokenLabelsConfig,
    "metaseq_lm.methods.meta_pseudo_label.finetune.TokenLabelsTask",
)
TASKS.declare(
    "meta_pseudo_label",
    MetaPseudoLabelConfig,
    "metaseq_lm.methods.meta_pseudo_label.task.MetaPseudoLabelTask",
)
CRITERIONS.declare(
    "token_labels", NoOptions, "metaseq_lm.methods.meta_pseudo_label.finetune.TokenLabelCriterion"
)
CRITERIONS.declare(
    "meta_pseudo_label_hard",
    HardConfig,
    "metaseq_lm.methods.meta_pseudo_label.criterion.HardLabels",
)
CRITERIONS.declare(
    "meta_pseudo_label_soft",
    SoftConfig,
    "metaseq_lm.methods.meta_pseudo_label.criterion.SoftLabels",
)
