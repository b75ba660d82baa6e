"""The model of several labelled sets, and the ranges of real-valued labels."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from metaseq_lm.config.transformer import EncoderConfig
from metaseq_lm.models.transformer.classifiers import (
    LabelledSetsModel,
    SetHeads,
    module_name,
)


class MultiTaskModel(LabelledSetsModel):
    """A shared encoder and one head for each set, all of which see every row.

    A head without rows in a batch has a gradient of zero, as in the authors' code, so AdamW still
    moves it by its momentum. A real-valued head predicts (y - minimum) / scale; `ranges` has
    (minimum, scale) of the training labels as buffers, which are saved with the weights.
    """

    def __init__(
        self,
        config: EncoderConfig,
        vocab_size: int,
        padding_idx: int,
        heads: SetHeads,
        ranges: Mapping[str, tuple[float, float]],
    ) -> None:
        super().__init__(config, vocab_size, padding_idx, heads)
        self.ranges = nn.Module()
        for name, label_range in ranges.items():
            self.ranges.register_buffer(module_name(name), torch.tensor(label_range))

    def scaled(self, name: str, labels: Tensor) -> Tensor:
        """Return real-valued labels of the set `name` on the scale of its head."""
        minimum, scale = self.ranges.get_buffer(module_name(name)).unbind()
        return (labels - minimum) / scale

    def unscaled(self, name: str, values: Tensor) -> Tensor:
        """Return predictions of the head of the set `name` on the scale of the labels."""
        minimum, scale = self.ranges.get_buffer(module_name(name)).unbind()
        return values * scale + minimum
