"""The model of several labelled sets, and the range of the labels of those with real values."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from metaseq_lm.models.transformer.encoder import TransformerConfig
from metaseq_lm.models.transformer.labelled_sets import LabelledSetsModel, SetHeads, module_name

RANGES = "ranges."


class MultiTaskModel(LabelledSetsModel):
    """Outputs of every head for every row; a head of real values predicts (y - least) / scale.

    A head without rows in a batch has a gradient of zero, as in the authors' code, and AdamW still
    moves it by its momentum. `ranges` are (least, scale) of the training labels of each set with
    real values. They are buffers by set, so that they come with the weights of the head.
    """

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        padding_idx: int,
        heads: SetHeads,
        ranges: Mapping[str, tuple[float, float]],
    ) -> None:
        super().__init__(config, vocab_size, padding_idx, heads)
        self.ranges = nn.Module()
        for name, known in ranges.items():
            self.ranges.register_buffer(module_name(name), torch.tensor(known))

    def scaled(self, name: str, labels: Tensor) -> Tensor:
        """Return real-valued labels of the set `name` as its head predicts them."""
        least, scale = self.ranges.get_buffer(module_name(name))
        scaled: Tensor = (labels - least) / scale
        return scaled

    def unscaled(self, name: str, values: Tensor) -> Tensor:
        """Return what the head of the set `name` predicts, on the scale of the labels."""
        least, scale = self.ranges.get_buffer(module_name(name))
        unscaled: Tensor = values * scale + least
        return unscaled
