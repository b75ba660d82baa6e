"""Networks for small images: wide residual networks (Zagoruyko and Komodakis 2016), and a CNN.

The CNN is "Conv-Large" of Miyato et al. 2017: 9 convolutions, 2 poolings, for images of 32 x 32.
Shapes: B batch, C channels, H height and W width of the images, K classes.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metaseq_lm.config.models import POSITIONAL, ConvLargeConfig, WideResNetConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.distributed import process_group
from metaseq_lm.models.layers import Dropout, Heads, LayerNorm, Linear

_GROUPS = 8  # groups of channels, with norm=group


class _BatchNorm(nn.BatchNorm2d):
    """Batch normalisation whose running statistics can be frozen temporarily.

    While `frozen`, training still normalises with batch statistics, but does not update running
    statistics.
    """

    frozen = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.frozen:
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        return super().forward(x)


@contextlib.contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Freeze all running statistics of `model` inside the context."""
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    for layer in layers:
        layer.frozen = True
    try:
        yield
    finally:
        for layer in layers:
            layer.frozen = False


def _norm_of(config: WideResNetConfig, channels: int) -> nn.Module:
    if config.norm == "group":  # every layer has a multiple of 16 channels
        return nn.GroupNorm(_GROUPS, channels)
    return _BatchNorm(channels)


def check_whole_batches(
    norm: str, largest: int, micro_batch_size: int, other: str = "group"
) -> None:
    """Raise UsageError if batch norm would get only part of a batch of `largest` rows.

    `other` is the value of model.norm that the message suggests.
    """
    if norm == "batch" and (0 < micro_batch_size < largest or process_group.world_size() > 1):
        raise UsageError(
            "batch normalisation takes its statistics from a whole batch, so micro-batches and "
            "several processes would change the results; use one process with "
            f"engine.micro_batch_size=0, or model.norm={other}"
        )


class _VisionBlock(nn.Module):
    """Pre-activation residual block: twice norm, ReLU and convolution, with dropout between."""

    is_gathered_alone = True  # of a sharded model

    def __init__(self, config: WideResNetConfig, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = _norm_of(config, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = _norm_of(config, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.dropout = Dropout(config.dropout)
        changes_shape = inputs != outputs or stride > 1
        self.project = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes_shape else None

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.norm1(x))
        # A projection shortcut takes the normalised input, an identity shortcut the raw one.
        shortcut = x if self.project is None else self.project(first)
        second = F.relu(self.norm2(self.conv1(first)))
        summed: Tensor = shortcut + self.conv2(self.dropout(second))
        return summed


class WideResNet(nn.Module):
    """Three groups of (depth - 4) / 6 blocks, then the mean over all positions.

    Convolutions are initialised as in He et al. 2015, with mode fan_out. Raises UsageError unless
    the depth is 6 n + 4.
    """

    def __init__(self, config: WideResNetConfig) -> None:
        super().__init__()
        blocks, rest = divmod(config.depth - 4, 6)
        if rest or blocks < 1:
            raise UsageError(f"model.depth is {config.depth}; it must be 10, 16, 22, ... (6 n + 4)")
        self.stem = nn.Conv2d(config.channels, 16, 3, padding=1, bias=False)
        layers, inputs = [], 16
        for group, outputs in enumerate(16 * config.width * 2**i for i in range(3)):
            for block in range(blocks):
                stride = 2 if group and not block else 1
                layers.append(_VisionBlock(config, inputs, outputs, stride))
                inputs = outputs
        self.blocks = nn.Sequential(*layers)
        self.norm = _norm_of(config, inputs)
        self.outputs = inputs
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return features (B, 64 * width) of images (B, C, H, W)."""
        x = F.relu(self.norm(self.blocks(self.stem(images))))
        return torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)


_SLOPE = 0.1  # slope of the leaky ReLUs
_PRIMARY = "primary"


class _PositionalNorm(LayerNorm):
    """Normalises over the channels at each position (Li et al. 2019, without their moments)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x (B, C, H, W) normalised over C."""
        # Norms that average over an image, such as group norm, would make the features at each
        # position depend on the whole image.
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class _Convolution(nn.Sequential):
    """Convolution, normalisation, leaky ReLU."""

    is_gathered_alone = True  # of a sharded model

    def __init__(
        self, config: ConvLargeConfig, inputs: int, outputs: int, size: int, padding: int
    ) -> None:
        norm = _PositionalNorm if config.norm == POSITIONAL else _BatchNorm
        super().__init__(
            nn.Conv2d(inputs, outputs, size, padding=padding, bias=False),
            norm(outputs),
            nn.LeakyReLU(_SLOPE),
        )


class ConvLarge(nn.Module):
    """Three stages of three convolutions, with max pooling between them.

    The third stage begins with a convolution without padding, so that 32 x 32 pixels become 6 x 6
    positions, with receptive fields of 21 x 21 pixels in the corners and 29 x 29 in the middle
    (Clark 2021, section 4.4). In training, batch norm also makes them depend on the whole batch.
    The head "primary" takes the mean over all positions; other heads may be added.
    """

    def __init__(self, config: ConvLargeConfig, classes: int) -> None:
        super().__init__()
        small, middle, large = (max(8, round(c * config.width) // 8 * 8) for c in (128, 256, 512))

        def stage(inputs: int, outputs: int) -> list[nn.Module]:
            return [_Convolution(config, n, outputs, 3, 1) for n in (inputs, outputs, outputs)]

        self.features = nn.Sequential(
            *stage(config.channels, small),
            nn.MaxPool2d(2),
            Dropout(config.dropout),
            *stage(small, middle),
            nn.MaxPool2d(2),
            Dropout(config.dropout),
            _Convolution(config, middle, large, 3, 0),
            _Convolution(config, large, middle, 1, 0),
            _Convolution(config, middle, small, 1, 0),
        )
        self.outputs = small
        self.heads = Heads({_PRIMARY: Linear(small, classes)})
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, a=_SLOPE, nonlinearity="leaky_relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return the primary head's logits (B, K) of images (B, C, H, W)."""
        logits: Tensor = self.heads[_PRIMARY](self.features(images).mean((2, 3)))
        return logits


def feature_size(size: int) -> int:
    """Return the side length of ConvLarge's feature maps for images of `size` x `size` pixels."""
    return size // 2 // 2 - 2
