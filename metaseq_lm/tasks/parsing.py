"""Dependency trees: the head of every word and its relation (Clark et al. 2018, supervised)."""

from __future__ import annotations

from dataclasses import dataclass

from metaseq_lm.core.config import option
from metaseq_lm.core.registry import register_task
from metaseq_lm.criterions.parsing import Parsing
from metaseq_lm.data.words.sets import TREES, WordSet
from metaseq_lm.tasks.tagging import of_form
from metaseq_lm.tasks.words import ParserConfig, WordTask, WordTaskConfig


@dataclass
class ParsingConfig(ParserConfig, WordTaskConfig):
    """Which treebank, batches, heads and averaged weights."""

    labelled: str = option("", "treebank in DATA (preprocess --treebank NAME)")


@register_task("parsing", dataclass=ParsingConfig)
class ParsingTask(WordTask):
    """An encoder of words and one treebank; scores are LAS and UAS without punctuation."""

    criterions = (Parsing,)

    @property
    def names(self) -> list[str]:
        return [self.config.labelled]

    def _labelled(self, name: str, split: str) -> WordSet:
        return of_form(super()._labelled(name, split), TREES, self.run_config)
