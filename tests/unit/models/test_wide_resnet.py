"""Wide residual networks: sizes, start, normalisation."""

import pytest
import torch

from metaseq_lm.config.models import WideResNetConfig
from metaseq_lm.core.config import section
from metaseq_lm.core.errors import UsageError
from metaseq_lm.models.vision import WideResNet, frozen_statistics


def closed_form(depth: int, width: int, channels: int) -> int:
    """Return the parameters: convolutions without bias, two for each normalised channel."""
    blocks, total, inputs = (depth - 4) // 6, 9 * channels * 16, 16
    for outputs in (16 * width, 32 * width, 64 * width):
        for block in range(blocks):
            total += 9 * inputs * outputs + 9 * outputs**2 + 2 * inputs + 2 * outputs
            total += (
                inputs * outputs if inputs != outputs or (not block and outputs > 16 * width) else 0
            )
            inputs = outputs
    return total + 2 * inputs


@pytest.mark.parametrize("depth, width, channels", [(16, 2, 3), (10, 1, 1), (22, 4, 3), (16, 1, 3)])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_number_of_parameters(depth: int, width: int, channels: int, norm: str) -> None:
    net = WideResNet(WideResNetConfig(depth, width, channels, norm=norm))
    assert sum(p.numel() for p in net.parameters()) == closed_form(depth, width, channels)


def test_wrn_16_2_has_the_published_size() -> None:
    """0.7 M with a linear layer for 10 classes (Zagoruyko and Komodakis 2016)."""
    net = WideResNet(WideResNetConfig())
    assert sum(p.numel() for p in net.parameters()) + 128 * 10 + 10 == 691_674
    assert net.outputs == 128 and net(torch.zeros(2, 3, 32, 32)).shape == (2, 128)


def test_convolutions_start_by_their_outputs() -> None:
    torch.manual_seed(1)
    net = WideResNet(WideResNetConfig(width=8))
    weight = net.blocks[5].conv2.weight  # 512 x 512 x 3 x 3
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)


def test_frozen_statistics_are_not_changed_and_not_used() -> None:
    """Inside, training sees the batch's own statistics, as outside, but remembers nothing."""
    torch.manual_seed(1)
    net = WideResNet(WideResNetConfig(10, 1, dropout=0.0)).train()
    images = torch.randn(4, 3, 8, 8)
    start = {n: b.clone() for n, b in net.named_buffers()}
    with frozen_statistics(net):
        inside = net(images)
    assert all(torch.equal(b, start[n]) for n, b in net.named_buffers())
    assert torch.allclose(inside, net(images))
    assert not torch.equal(net.norm.running_mean, start["norm.running_mean"])


def test_group_norm_takes_each_image_by_itself() -> None:
    torch.manual_seed(1)
    net = WideResNet(WideResNetConfig(10, 1, dropout=0.0, norm="group")).double().train()
    images = torch.randn(6, 3, 8, 8, dtype=torch.float64)
    parts = torch.cat([net(part) for part in images.split(2)])
    assert (net(images) - parts).abs().max() < 1e-12


@pytest.mark.parametrize(
    "options", [{"depth": 15}, {"depth": 4}, {"norm": "layer"}, {"width": 0}, {"channels": 0}]
)
def test_wrong_options_are_refused(options: dict) -> None:
    with pytest.raises(UsageError, match="model."):
        WideResNet(section("model", **{"_name": "wide_resnet", **options}))
