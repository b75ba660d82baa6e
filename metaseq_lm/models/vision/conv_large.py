"""The CNN of Miyato et al. 2017 ("Conv-Large"): 9 convolutions, 2 poolings, for images of 32 x 32.

Shapes: B images, C channels, H height and W width of the images, n x n places of the features, D of
them at each place, K classes.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from metaseq_lm.core.config import option
from metaseq_lm.core.registry import register_model
from metaseq_lm.models.layers import Dropout, LayerNorm, Linear
from metaseq_lm.models.vision.wide_resnet import BatchNorm

SLOPE = 0.1  # of the leaky ReLUs
PRIMARY = "primary"
POSITIONAL, BATCH = "positional", "batch"


@dataclass
class ConvLargeConfig:
    """Sizes; the layers are those of the authors' program, from memory."""

    width: float = option(1.0, "factor of the channels 128, 256 and 512", above=0)
    channels: int = option(3, "channels of the images", at_least=1)
    dropout: float = option(0.5, "after each pooling", at_least=0, below=1)
    norm: str = option(
        POSITIONAL,
        "positional: over the channels of each place; batch: batch norm, which needs whole batches in one process",
        choices=(POSITIONAL, BATCH),
    )


class PositionalNorm(LayerNorm):
    """Normalises the channels of each place by themselves (Li et al. 2019; without its moments).

    Norms that average over an image, such as group norm, would show every place the whole of it.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return x (B, C, H, W) normalised over C."""
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Convolution(nn.Sequential):
    """Convolution, normalisation, leaky ReLU."""

    def __init__(
        self, config: ConvLargeConfig, inputs: int, outputs: int, size: int, padding: int
    ) -> None:
        norm = PositionalNorm if config.norm == POSITIONAL else BatchNorm
        super().__init__(
            nn.Conv2d(inputs, outputs, size, padding=padding, bias=False),
            norm(outputs),
            nn.LeakyReLU(SLOPE),
        )


@register_model("conv_large", dataclass=ConvLargeConfig)
class ConvLarge(nn.Module):
    """Three stages of three convolutions; poolings halve the places between them.

    The third stage begins without padding, so that 32 x 32 pixels become 6 x 6 places, of which the
    corners have seen 21 x 21 pixels and those in the middle 29 x 29 (Clark 2021, section 4.4); batch
    norm adds, in training, the mean and variance of each channel over the batch. The head "primary"
    is on the mean of all places; other heads may be added.
    """

    def __init__(self, config: ConvLargeConfig, classes: int) -> None:
        super().__init__()
        small, middle, large = (max(8, round(c * config.width) // 8 * 8) for c in (128, 256, 512))

        def three(inputs: int, outputs: int) -> list[nn.Module]:
            return [Convolution(config, n, outputs, 3, 1) for n in (inputs, outputs, outputs)]

        self.features = nn.Sequential(
            *three(config.channels, small),
            nn.MaxPool2d(2),
            Dropout(config.dropout),
            *three(small, middle),
            nn.MaxPool2d(2),
            Dropout(config.dropout),
            Convolution(config, middle, large, 3, 0),
            Convolution(config, large, middle, 1, 0),
            Convolution(config, middle, small, 1, 0),
        )
        self.outputs = small
        self.heads = nn.ModuleDict({PRIMARY: Linear(small, classes)})
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, a=SLOPE, nonlinearity="leaky_relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return the primary head's logits (B, K) of images (B, C, H, W)."""
        return self.primary(self.features(images))

    def primary(self, features: Tensor) -> Tensor:
        """Return the primary head's logits (B, K) of features (B, D, n, n)."""
        logits: Tensor = self.heads[PRIMARY](features.mean((2, 3)))
        return logits


def places(size: int) -> int:
    """Return n, the places of a side of the features of images of `size` x `size` pixels."""
    return size // 2 // 2 - 2
