"""Options of the suites."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

from metaseq_lm.config.tasks import NULL_THRESHOLD
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.options import option, with_default
from metaseq_lm.core.registry import SUITES

BAD_UTF8 = ("replace", "skip", "fail")
Item = TypeVar("Item")
HELD_OUT, _SCORED = "held_out", "scored"


@dataclass
class ProbeConfig:
    """Which items are read; a sentence of a tagged set is an item with all of its words."""

    split: str = option("test", "split that is scored")
    train: int = option(0, "only the first texts or sentences of train (0 = all)", at_least=0)
    test: int = option(
        0,
        "only the first texts or sentences of the split that is scored, and of the one that "
        "chooses the layer (0 = all)",
        at_least=0,
    )


@dataclass
class AdaptConfig(ProbeConfig):
    """Which sentences are read, and the recipe."""

    train: int = with_default(
        ProbeConfig, "train", 64, "only the first sentences of train (0 = all)"
    )
    updates: int = option(200, "updates of the encoder and the new layer", at_least=1)
    batch_size: int = option(16, "sentences of a batch", at_least=1)
    lr: tuple[float, ...] = option(
        (3e-4, 1e-3, 3e-3), "peak learning rates, from which the valid split chooses one"
    )
    seed: int = option(
        0, "seed of the new layer, the dropout and the batches (0 = that of the run)", at_least=0
    )


@dataclass
class _FilePart:
    """Which items of each file are scored: the `first` ones after `skip` items."""

    first: int = option(0, "only the first items of each file (0 = all)", at_least=0)
    skip: int = option(
        0,
        "items to leave out at the beginning of each file, such as those that a search has "
        "used; `first` counts from there",
        at_least=0,
    )

    def of(self, items: Iterable[Item], file: Path) -> Iterator[Item]:
        """Yield the items of a file that belong to the part; MetaseqError if there is none."""
        is_empty = True
        end = self.skip + self.first if self.first else None
        for item in islice(items, self.skip, end):
            is_empty = False
            yield item
        if is_empty and self.skip:
            raise MetaseqError(f"{file}: skip={self.skip} leaves none of its items.")


@dataclass
class CompletionsConfig(_FilePart):
    """Which items are scored."""

    on_bad_utf8: str = option("fail", "lines with invalid UTF-8", choices=BAD_UTF8)


@dataclass
class _FineTuneConfig:
    """The recipe; 0 stands for the challenge's own value."""

    sets: tuple[str, ...] = option(
        (), "sets in the folder (none = all with a train split and this split)"
    )
    split: str = option("valid", "split that is scored")
    choose: str = option(
        HELD_OUT,
        "what chooses the epoch: held_out, the last tenth of train, which is not trained on; or "
        "scored, the split that is scored, as in the challenge: such scores are too high",
        choices=(HELD_OUT, _SCORED),
    )
    lr: float = option(3e-5, "learning rate at its peak", above=0)
    lr_choices: tuple[float, ...] = option(
        (), ("rates to try instead of lr; for each encoder and seed, one is chosen as the epoch is")
    )
    batch_size: int = option(
        0, "rows of a batch (0 = 32, for babylm/BoolQ and babylm/MultiRC 16)", at_least=0
    )
    epochs: float = option(0.0, "training epochs (0 = 10, for babylm/WSC 30)", at_least=0)
    train: int = option(
        0,
        "only the first rows of train (0 = all, for babylm/MNLI and babylm/QQP 10,000)",
        at_least=0,
    )
    tokens: int = option(
        512, "longest row; longer ones, and those longer than the run's, are cut", at_least=8
    )
    seeds: tuple[int, ...] = option((42,), "seeds of heads and batches; scores are their means")
    frozen: bool = option(True, "also probe the frozen states, for sets that a probe can read")


@dataclass
class _PairsConfig(_FilePart):
    """How pairs are grouped."""

    groups: tuple[str, ...] = option(
        (), "fields of a pair by which results are grouped, the widest first; none: by file"
    )
    compare: str = option(
        "sentences",
        "the sum over all tokens, or over those in which the sentences of a pair differ",
        choices=("sentences", "changed"),
    )
    on_bad_utf8: str = option("fail", "lines with invalid UTF-8", choices=BAD_UTF8)


@dataclass
class BlimpConfig(_PairsConfig):
    """How pairs of BLiMP are grouped: by phenomenon, and within it by paradigm."""

    groups: tuple[str, ...] = option(
        ("linguistics_term", "UID"),
        "fields of a pair by which results are grouped, the widest first; with "
        "[field,linguistics_term,UID] also by field",
    )
    phenomena: str = option(
        "files",
        "the 13 linguistic terms of the files, or the 12 phenomena of the paper, which counts "
        "s-selection as argument structure",
        choices=("files", "paper"),
    )


@dataclass
class SplitConfig:
    """Which split of a labelled set is scored."""

    split: str = option("valid", "split of the set that is scored")


@dataclass
class SquadSuiteConfig(SplitConfig):
    """Which split is scored, and when a prediction counts as no answer."""

    null_threshold: float = option(
        NULL_THRESHOLD, "odds of no answer above which the prediction is empty (version 2.0)"
    )


@dataclass
class _SyntaxGymConfig(_FilePart):
    """Which items are scored."""

    equalities: bool = option(
        False,
        "whether predictions with '=' count, as in the official scores; a model that ignores the "
        "context satisfies them",
    )
    on_bad_utf8: str = option("fail", "lines with invalid UTF-8", choices=BAD_UTF8)


@dataclass
class _WugConfig:
    """Treatment of damaged lines."""

    on_bad_utf8: str = option("fail", "lines with invalid UTF-8", choices=BAD_UTF8)


for _name in ["squad/mrqa", "squad/v1.1", "squad/v2.0"]:
    SUITES.declare(_name, SquadSuiteConfig, "metaseq_lm.evaluation.squad.SquadSuite")
SUITES.declare("probe", ProbeConfig, "metaseq_lm.evaluation.probe.Probe")
SUITES.declare("finetune", _FineTuneConfig, "metaseq_lm.evaluation.finetune.FineTune")
SUITES.declare("adapt", AdaptConfig, "metaseq_lm.evaluation.adapt.Adapt")
for _name in ["blimp_supplement", "pairs"]:
    SUITES.declare(_name, _PairsConfig, "metaseq_lm.evaluation.minimal_pairs.MinimalPairs")
SUITES.declare("blimp", BlimpConfig, "metaseq_lm.evaluation.minimal_pairs.MinimalPairs")
SUITES.declare("comps", CompletionsConfig, "metaseq_lm.evaluation.completions.comps")
SUITES.declare("ewok", CompletionsConfig, "metaseq_lm.evaluation.completions.ewok")
SUITES.declare(
    "entity_tracking", CompletionsConfig, "metaseq_lm.evaluation.completions.entity_tracking"
)
SUITES.declare("syntaxgym", _SyntaxGymConfig, "metaseq_lm.evaluation.syntaxgym.SyntaxGym")
SUITES.declare("wug", _WugConfig, "metaseq_lm.evaluation.wug.Wug")
