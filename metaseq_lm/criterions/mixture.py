"""The weighted sum of the losses of several objectives."""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from metaseq_lm.config.criterions import ReadConfig
from metaseq_lm.core.batch import Terms
from metaseq_lm.criterions import Criterion
from metaseq_lm.data.corpus.mixture import MixtureBatch


class Mixture(Criterion):
    """The weighted sum of the losses of objectives, each a mean over items of its own rows.

    Args:
        config: The options.
        parts: The criterions of the objectives by name.
    """

    general = False
    tasks = ("mixture",)
    config: ReadConfig

    def __init__(
        self, config: ReadConfig | None = None, parts: Mapping[str, Criterion] | None = None
    ) -> None:
        super().__init__(config or ReadConfig())
        self.parts = parts or {}

    def __call__(self, model: nn.Module, batch: MixtureBatch) -> Terms:
        """Return the terms of the batch's objective, called OBJECTIVE.TERM."""
        name = batch.objective
        terms: Terms = {}
        for key, term in self.parts[name](model, batch.batch).items():
            per = None if term.per is None else f"{name}.{term.per}"
            terms[f"{name}.{key}"] = replace(term, per=per, weight=term.weight * batch.weight)
        return terms
