"""Tags of words: chunks, entities, parts of speech, supertags (Clark et al. 2018, supervised)."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig

from metaseq_lm.core.config import option
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import register_task
from metaseq_lm.criterions.tagging import Tagging
from metaseq_lm.data.words.sets import TAGS, WordSet
from metaseq_lm.tasks.words import WordTask, WordTaskConfig


@dataclass
class TaggingConfig(WordTaskConfig):
    """Which tagged set, batches, heads and averaged weights."""

    labelled: str = option("", "tagged set in DATA (preprocess --tagged NAME)")


@register_task("tagging", dataclass=TaggingConfig)
class TaggingTask(WordTask):
    """An encoder of words and one tagged set; scores are F1 of spans, or accuracy."""

    criterions = (Tagging,)

    @property
    def names(self) -> list[str]:
        return [self.config.labelled]

    def _labelled(self, name: str, split: str) -> WordSet:
        return of_form(super()._labelled(name, split), TAGS, self.run_config)


def of_form(data: WordSet, form: str, config: DictConfig) -> WordSet:
    """Return a set; UsageError if it is not of this form."""
    if data.form != form:
        raise UsageError(
            f"{data.folder} is a set of {data.form}, task '{config.task._name}' is for {form}; tagged "
            "sets are for task tagging, treebanks for parsing"
        )
    return data
