"""Options of the bam methods."""

from dataclasses import dataclass

from metaseq_lm.config.tasks import (
    BatchConfig,
    CutRowsConfig,
    EpochsConfig,
    EvaluationConfig,
    LabelledSetsConfig,
    LengthGroupsConfig,
    SentenceHeadConfig,
    ValidateEpochsConfig,
)
from metaseq_lm.core.options import option, with_default
from metaseq_lm.core.registry import CRITERIONS, TASKS


@dataclass
class BamDistillConfig:
    """The mixture of gold labels and teacher outputs."""

    annealing: bool = option(
        True, "teacher annealing: the weight of the gold label grows linearly from 0 to 1"
    )
    # 0 until the number of updates that trainer.max_flops pays for is known.
    total_updates: int = option(
        0,
        "updates until the weight is 1",
        at_least=0,
        follows="trainer.max_update",
        reset="schedule",
    )
    distill_weight: float = option(
        0.5, "weight of the teacher's output without annealing", at_least=0, at_most=1
    )
    temperature: float = option(1.0, "divides the teacher's logits", above=0)
    sigmoid: bool = option(
        False, "predict real values through a sigmoid (the dissertation; the code has none)"
    )


@dataclass
class BamConfig(
    EvaluationConfig,
    SentenceHeadConfig,
    LengthGroupsConfig,
    CutRowsConfig,
    ValidateEpochsConfig,
    EpochsConfig,
    BatchConfig,
    LabelledSetsConfig,
):
    """The labelled sets, their teachers, how sets are mixed, and the heads (Clark et al. 2019)."""

    # Movable: checkpoints record the identity of these teachers, wherever the folders are.
    teachers: list[str] = option(
        [],
        "runs of this task, or folders of their outputs; together they must teach every set",
        source="teachers",
        movable=True,
    )
    batch_size: int = with_default(
        BatchConfig, "batch_size", 32, "rows of a batch, from all sets together"
    )
    sampling: str = option(
        "sampler",
        "sampler: a fixed number of rows of each set in an epoch; legacy_copies: copies of small "
        "sets and loss weights (the authors' code)",
        choices=("sampler", "legacy_copies"),
    )
    exponent: float = option(
        0.75, "a set is seen in proportion to its size to this power", at_least=0, at_most=1
    )
    copies_over: list[str] = option(
        [], "with legacy_copies: further sets in DATA that count in copies and weights"
    )
    group_by_length: bool = with_default(
        LengthGroupsConfig,
        "group_by_length",
        False,
        "put rows of similar length into a training batch, which saves padding; sets with short "
        "rows and sets with long rows then rarely share a batch",
    )
    pooled: bool = with_default(
        SentenceHeadConfig, "pooled", True, "BERT's tanh layer on [CLS], shared by all heads"
    )


TASKS.declare("bam", BamConfig, "metaseq_lm.methods.bam.task.BamTask", takes=("bam_distill",))
CRITERIONS.declare("bam_distill", BamDistillConfig, "metaseq_lm.methods.bam.criterion.BamDistill")
