"""Options of the tartan methods."""

from dataclasses import dataclass

from metaseq_lm.config.tasks import (
    BatchConfig,
    ChannelsConfig,
    CutRowsConfig,
    EpochsConfig,
    EvaluationConfig,
    HeadConfig,
    LabelledSetConfig,
    MaskingConfig,
)
from metaseq_lm.core.options import option, with_default
from metaseq_lm.core.registry import CRITERIONS, TASKS

TAPT = "tapt"  # the auxiliary task on the end task's own texts


@dataclass
class MultiTaskConfig:
    """MT-TARTAN: fixed task weights."""

    weights: list[float] | None = option(None, "task weights, the end task's last (null = equal)")
    algorithm_1: bool = option(
        False,
        "follow algorithm 1 of the paper where its text and the authors' code differ: weights "
        "change before the step, heads get unweighted gradients, the meta head "
        "is kept between updates",
    )


@dataclass
class MetaConfig(MultiTaskConfig):
    """META-TARTAN: learns the task weights, a softmax, from the end task's development loss."""

    weight_lr: float = option(1e-2, "rate of the weights' logits (0 = MT-TARTAN)", at_least=0)
    similarity: str = option(
        "cosine",
        "similarity of two gradients: cosine (algorithm 1) or dot product (equation 7)",
        choices=("cosine", "dot"),
    )
    similarity_over: str = option(
        "encoder",
        "parameters it compares: encoder, or body, which adds the LM heads (the authors' code)",
        choices=("encoder", "body"),
    )
    same_head: bool = option(False, "use the end task's head as the meta head (section 5.4)")
    meta_head_split: str = option(
        "train",
        "rows that the meta head is trained on: train (paper) or dev (the authors' code)",
        choices=("train", "dev"),
    )
    meta_head_steps: int = option(10, "maximum training steps of the meta head", at_least=0)
    meta_head_tolerance: float = option(0.0, "stop when its loss changes by less (authors: 1e-3)")
    meta_head_lr: float = option(1e-3, "learning rate of the meta head", at_least=0)
    meta_head_weight_decay: float = option(0.1, "weight decay of the meta head", at_least=0)


@dataclass
class TartanConfig(
    EvaluationConfig,
    HeadConfig,
    MaskingConfig,
    CutRowsConfig,
    EpochsConfig,
    BatchConfig,
    LabelledSetConfig,
):
    """Tasks and batches, with the authors' defaults (accumulated batches of 2 x 64)."""

    labelled: str = with_default(
        LabelledSetConfig, "labelled", "", "labelled set in DATA, the end task"
    )
    auxiliary: list[str] = option(
        [TAPT], "masked-LM tasks: tapt (the labelled texts) or splits of DATA"
    )
    lines_per_example: int = option(0, "lines of each split per labelled row (0 = all)", at_least=0)
    lines_seed: int | None = option(None, "seed for drawing the lines (null = the run's seed)")
    fidelity: str = option(
        "paper",
        "paper: an LM head for each auxiliary task, padding hidden from attention; authors: as in "
        "their code, one LM head for all, padding visible",
        choices=("paper", "authors"),
    )
    batch_size: int = with_default(BatchConfig, "batch_size", 128, "rows of a batch of each task")
    dev_batch_size: int = option(
        0, "rows for the meta-objective (0 = batch_size)", at_least=0, reset="data"
    )
    meta_head_batch_size: int = option(
        32, "rows that the meta head is trained on", at_least=1, reset="data"
    )
    epochs: float = with_default(
        EpochsConfig, "epochs", 0.0, "epochs of the largest auxiliary task (0 = unused)"
    )
    head_lr: float = option(1e-3, "learning rate of the end task's head", at_least=0)
    head_weight_decay: float = option(0.1, "weight decay of the end task's head", at_least=0)


@dataclass
class TartanVisionConfig(ChannelsConfig, BatchConfig):
    """Classes, the split of the target images, and batches (the authors' values)."""

    target: list[str] = option([], "names of the classes of the end task")
    train_on: str = option(
        "both",
        "tasks to train: both, auxiliary (pre-training) or target (fine-tuning)",
        choices=("both", "auxiliary", "target"),
    )
    dev_share: float = option(0.2, "share of target images for development", at_least=0, at_most=1)
    dev_limit: int = option(65, "maximum development images (0 = all)", at_least=0)
    train_limit: int = option(200, "maximum training images of the target (0 = all)", at_least=0)
    test_limit: int = option(0, "first target images of a test split to use (0 = all)", at_least=0)
    split_seed: int = option(1, "seed of the split, the same for all runs")
    batch_size: int = with_default(BatchConfig, "batch_size", 64, "images of a batch of each task")
    dev_batch_size: int = option(
        16, "images of a batch of the meta-objective", at_least=1, reset="data"
    )
    meta_head_batch_size: int = option(
        16, "images that the meta head is trained on", at_least=1, reset="data"
    )
    head_lr: float | None = option(
        None, "rate of the end task's head (null = the run's)", at_least=0
    )
    head_weight_decay: float = option(0.0, "weight decay of the end task's head", at_least=0)


TASKS.declare(
    "tartan",
    TartanConfig,
    "metaseq_lm.methods.tartan.task.TartanTask",
    takes=("tartan_meta", "tartan_mt"),
)
TASKS.declare(
    "tartan_vision",
    TartanVisionConfig,
    "metaseq_lm.methods.tartan.vision.TartanVisionTask",
    takes=("tartan_meta", "tartan_mt"),
)
CRITERIONS.declare("tartan_mt", MultiTaskConfig, "metaseq_lm.methods.tartan.criterion.MultiTask")
CRITERIONS.declare("tartan_meta", MetaConfig, "metaseq_lm.methods.tartan.criterion.Meta")
