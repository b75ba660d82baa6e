"""Options of the cvt methods."""

from dataclasses import dataclass
from typing import Any

from metaseq_lm.config.criterions import TaggingConfig
from metaseq_lm.config.models import AveragingConfig
from metaseq_lm.config.tasks import (
    LONGEST,
    UNLABELLED,
    BatchConfig,
    ChannelsConfig,
    LabelledSetsConfig,
    ParserConfig,
    TranslationConfig,
    WordTaskConfig,
)
from metaseq_lm.core.options import option, with_default
from metaseq_lm.core.registry import CRITERIONS, TASKS

_ATTENTION, FUTURE, _FULL = "attention", "future", "full"
NONE, _RANDOM, ADVERSARIAL = "none", "random", "adversarial"
_PERTURBATIONS = (NONE, _RANDOM, ADVERSARIAL)
_TAGGING = ("full", "forwards", "backwards", "future", "past")
_PARSING = ("full", "fw_fw", "fw_bw", "bw_fw", "bw_bw")


@dataclass
class UnlabelledWeightConfig:
    """Weight of the loss on unlabelled batches (the paper: 1)."""

    unlabelled_weight: float = option(1.0, "weight of the loss on unlabelled batches", above=0)
    unlabelled_warmup: int = option(
        0, "updates after task.labelled_first over which this weight rises to its value", at_least=0
    )


def _student_dropout(default: float | None) -> Any:
    about = "dropout of the student on unlabelled batches (null = model.dropout)"
    return option(default, about, at_least=0, below=1)


@dataclass
class UnlabelledConfig(UnlabelledWeightConfig, TaggingConfig):
    """Options of all criterions on words: the teacher, and the student's dropout."""

    # Not 0.2 if the primary module is the student: it would recognise unlabelled text by its lower
    # dropout and collapse to one class for every word of it, as would the teacher.
    unlabelled_dropout: float | None = _student_dropout(None)
    mean_teacher: bool = option(False, "teach with the averaged weights, not the current ones")
    hard_targets: bool = option(False, "targets are the teacher's best classes")
    confidence: float = option(0.0, "least probability of a target", at_least=0, at_most=1)
    weigh_confidence: bool = option(False, "weight each word by the probability of its best class")
    all_sets: bool = option(True, "all sets learn from an unlabelled batch; false: a random set")


@dataclass
class CrossViewConfig(UnlabelledConfig):
    """Cross-View Training, and its ablations."""

    unlabelled_dropout: float | None = _student_dropout(0.2)
    tagging_auxiliaries: list[str] = option([*_TAGGING], "modules of tagged sets", choices=_TAGGING)
    parsing_auxiliaries: list[str] = option([*_PARSING], "modules of treebanks", choices=_PARSING)
    use_unlabelled: bool = option(True, "false: train on labelled sentences only")
    gold_auxiliaries: bool = option(False, "auxiliary modules learn from gold labels too")


@dataclass
class WordDropoutConfig(UnlabelledConfig):
    """Word dropout."""

    rate: float = option(0.1, "share of the student's words removed", at_least=0, at_most=1)


@dataclass
class VATConfig(UnlabelledConfig):
    """Virtual adversarial training (constants except norms are from memory of Miyato et al.)."""

    tagging_norm: float = option(0.5, "perturbation norm for tagged sets (CCG: 1.5)", at_least=0)
    parsing_norm: float = option(1.0, "perturbation norm of a sentence for treebanks", at_least=0)
    xi: float = option(0.1, "norm of the step to the adversarial direction", above=0)


def labelled_first() -> Any:
    """Return the option for the start of unlabelled updates."""
    return option(0, "updates before the first unlabelled one", at_least=0)


@dataclass
class CVTConfig(ParserConfig, WordTaskConfig, LabelledSetsConfig):
    """Labelled sets and unlabelled text."""

    labelled: list[str] = with_default(
        LabelledSetsConfig,
        "labelled",
        [],
        "tagged sets and treebanks in DATA; several are multi-task",
    )
    unlabelled: str = option("train", "split of the text in DATA to use as unlabelled sentences")
    labelled_first: int = labelled_first()
    unlabelled_longest: int = option(LONGEST, "leave out texts this long (0 = none)", at_least=0)


@dataclass
class SemiSupervisedConfig(UnlabelledWeightConfig):
    """Dropout and label smoothing."""

    # Not 0.2 if the primary head is the student, see the criterions on words.
    unlabelled_dropout: float | None = _student_dropout(None)
    label_smoothing: float = option(0.1, "label smoothing for translated text", at_least=0, below=1)


@dataclass
class TranslationCrossViewConfig(SemiSupervisedConfig):
    """Auxiliary heads."""

    unlabelled_dropout: float | None = _student_dropout(0.2)
    auxiliary: list[str] = option(
        [_ATTENTION, FUTURE],
        "auxiliary heads: attention, future, full (sees everything, with dropout)",
        choices=(_ATTENTION, FUTURE, _FULL),
    )
    attention_dropout: float = option(0.5, "dropout in the head attention", at_least=0, below=1)


@dataclass
class TranslationWordDropoutConfig(SemiSupervisedConfig):
    """Word dropout."""

    rate: float = option(0.1, "share of the source words that become [MASK]", at_least=0, at_most=1)


@dataclass
class CVTTranslationConfig(AveragingConfig, TranslationConfig):
    """Unlabelled source text, and averaged weights."""

    unlabelled: str = option(UNLABELLED, "split of source text; rest: what labelled_share leaves")
    unlabelled_batch_size: int = option(
        0, "unlabelled sentences (0 = batch_size)", at_least=0, reset="data"
    )
    labelled_first: int = labelled_first()


@dataclass
class ConsistencyConfig:
    """The student's perturbation, and the teacher (constants of VAT are from memory)."""

    perturbation: str = option(
        ADVERSARIAL,
        "perturbation of the student's images: none, random or adversarial (VAT)",
        choices=_PERTURBATIONS,
    )
    radius: float = option(8.0, "norm of the perturbation of a normalised image", at_least=0)
    xi: float = option(0.1, "norm of the step to the adversarial direction", above=0)
    weight: float = option(1.0, "weight of the consistency loss")
    unlabelled_dropout: float | None = _student_dropout(None)
    mean_teacher: bool = option(False, "teach with the averaged weights, not the current ones")


@dataclass
class CVTVisionConfig(ConsistencyConfig):
    """Options of VAT, without perturbation by default."""

    perturbation: str = option(
        NONE,
        "perturbation of the student's images: none, random or adversarial (VAT)",
        choices=_PERTURBATIONS,
    )


@dataclass
class CVTVisionTaskConfig(ChannelsConfig, BatchConfig, AveragingConfig):
    """Labelled images, batches, augmentation (sizes of VAT are from memory), averaged weights."""

    labelled: int = option(4000, "labelled images, balanced over classes (0 = all)", at_least=0)
    labelled_share: float = option(
        0.0, "share of labelled images (0 = unused)", at_least=0, at_most=1
    )
    valid_count: int = option(1000, "training images held out as valid (0 = none)", at_least=0)
    split_seed: int = option(1, "seed of both choices; a smaller set is a subset of a larger one")
    batch_size: int = with_default(BatchConfig, "batch_size", 32, "labelled images of a batch")
    unlabelled_batch_size: int = option(
        128, "unlabelled images of a batch", at_least=1, reset="data"
    )
    joint: bool = option(False, "update on labelled and unlabelled batches together, not in turn")
    translate: int = option(0, "pixels to shift training images by (CIFAR-10+: 2)", at_least=0)


TASKS.declare(
    "cvt",
    CVTConfig,
    "metaseq_lm.methods.cvt.task.CVTTask",
    takes=("cvt_aux", "parsing", "tagging", "vat", "word_dropout"),
)
TASKS.declare(
    "cvt_translation",
    CVTTranslationConfig,
    "metaseq_lm.methods.cvt.translation.CVTTranslationTask",
    takes=("cvt_translation", "translation", "word_dropout_translation"),
)
TASKS.declare(
    "cvt_vision",
    CVTVisionTaskConfig,
    "metaseq_lm.methods.cvt.vision.CVTVisionTask",
    takes=("cvt_vision", "image_classification", "vat_vision"),
)
CRITERIONS.declare("cvt_aux", CrossViewConfig, "metaseq_lm.methods.cvt.criterion.CrossView")
CRITERIONS.declare(
    "word_dropout", WordDropoutConfig, "metaseq_lm.methods.cvt.criterion.WordDropout"
)
CRITERIONS.declare("vat", VATConfig, "metaseq_lm.methods.cvt.criterion.VirtualAdversarial")
CRITERIONS.declare(
    "cvt_translation",
    TranslationCrossViewConfig,
    "metaseq_lm.methods.cvt.translation.CVTTranslation",
)
CRITERIONS.declare(
    "word_dropout_translation",
    TranslationWordDropoutConfig,
    "metaseq_lm.methods.cvt.translation.WordDropoutTranslation",
)
CRITERIONS.declare("vat_vision", ConsistencyConfig, "metaseq_lm.methods.cvt.vision.VATVision")
CRITERIONS.declare("cvt_vision", CVTVisionConfig, "metaseq_lm.methods.cvt.vision.CVTVision")
