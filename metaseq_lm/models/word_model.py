"""An encoder of words with the heads of one or several labelled sets, and their moving averages.

Shapes: B rows, S positions, C classes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from metaseq_lm.models.averaged import AveragedWeights
from metaseq_lm.models.layers import Dropout
from metaseq_lm.models.views import Views, ViewsEncoder


class WordNet(nn.Module):
    """`encoder`, and `heads` by the name of the set, each of them modules by name."""

    def __init__(self, encoder: ViewsEncoder, heads: Mapping[str, nn.ModuleDict]) -> None:
        super().__init__()
        self.encoder = encoder
        self.heads = nn.ModuleDict(heads)

    def views(self, batch: dict, shift: Tensor | None = None) -> Views:
        """Return the views of the rows of a batch; `shift` is added to the embeddings of words."""
        encoder: ViewsEncoder = self.encoder  # type: ignore[assignment]
        return encoder(batch["tokens"], batch["characters"], batch["padding"], shift)

    def scores(self, views: Views, scored: Tensor, name: str, module: str) -> Tensor:
        """Return the scores (B, S, C) of a module of the set `name`."""
        return self.module(name, module)(views, scored)

    def module(self, name: str, module: str) -> nn.Module:
        """Return a module of the set `name`."""
        return cast(nn.ModuleDict, self.heads[name])[module]

    def modules_of(self, name: str) -> list[str]:
        """Return the names of the auxiliary modules of a set."""
        return list(cast(nn.ModuleDict, self.heads[name]))[1:]

    def label(self, name: str, what: str) -> str:
        """Return what something of a set is called in the log: with the set's name if there are more."""
        return what if len(self.heads) == 1 else f"{name}_{what}"

    def shift_of(self, name: str, module: str) -> int:
        """Return whose class a module predicts at t: that of t + shift."""
        return getattr(self.module(name, module), "shift")


class WordModel(WordNet):
    """A WordNet, and with a `decay` above 0 the moving average of its weights, `average`."""

    def __init__(
        self, encoder: ViewsEncoder, heads: Mapping[str, nn.ModuleDict], decay: float = 0.0
    ) -> None:
        super().__init__(encoder, heads)
        self.average = None
        if decay:
            self.average = AveragedWeights(WordNet(encoder, heads), decay)

    @property
    def averaged(self) -> WordNet:
        """The net of averaged weights, or this one if there are none."""
        if self.average is None:
            return self
        return self.average.net  # type: ignore[return-value]

    def step_with_average(self, step: Callable[[], bool], undo: bool = False) -> bool:
        """Take the weights into the average, then do `step`, and return what it returns.

        With `undo` a step that returns False leaves the average as it was; that costs a copy of it.
        """
        if self.average is None:
            return step()
        before = [p.clone() for p in self.average.parameters()] if undo else []
        self.average.move(self)
        done = step()
        if undo and not done:
            torch._foreach_copy_(list(self.average.parameters()), before)
        return done


@contextlib.contextmanager
def dropout_at(net: nn.Module, rate: float | None) -> Iterator[None]:
    """Give every dropout of `net` this rate inside the block; 0 is none, None changes nothing."""
    layers = [m for m in net.modules() if isinstance(m, Dropout)] if rate is not None else []
    before = [layer.p for layer in layers]
    for layer in layers:
        layer.p = rate  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer, p in zip(layers, before):
            layer.p = p
