"""The CNN for images: what its places see, and how many weights it has."""

from typing import Any

import pytest
import torch

from metaseq_lm.config.models import ConvLargeConfig
from metaseq_lm.core.config import section
from metaseq_lm.core.errors import UsageError
from metaseq_lm.models.vision import ConvLarge, _PositionalNorm, feature_size


def net_of(**options: Any) -> ConvLarge:
    torch.manual_seed(1)
    return ConvLarge(ConvLargeConfig(width=1 / 16, dropout=0, **options), 10).double()


# The statistics of batch normalisation are of all places and images; with remembered ones it hides
# as much.
@pytest.mark.parametrize("net", [net_of().train(), net_of(norm="batch").eval()], ids=["", "batch"])
def test_places_see_21_to_29_pixels(net: ConvLarge) -> None:
    """Clark 2021, section 4.4: 6 x 6 places; a corner sees 21 x 21 pixels, the middle 29 x 29."""
    images = torch.randn(1, 3, 32, 32, dtype=torch.float64, requires_grad=True)
    features = net.features(images)
    assert features.shape[2:] == (6, 6) and feature_size(32) == 6
    seen = {}
    for place in ((0, 0), (2, 2), (3, 3), (5, 5), (0, 3)):
        out = (
            features[(0, slice(None), *place)] ** 2
        )  # the sum of normalised channels would not move
        (gradient,) = torch.autograd.grad(out.sum(), images, retain_graph=True)
        reached = gradient[0].abs().sum(0) > 0
        seen[place] = (int(reached.any(1).sum()), int(reached.any(0).sum()))
    assert seen == {
        (0, 0): (21, 21),
        (2, 2): (29, 29),
        (3, 3): (29, 29),
        (5, 5): (21, 21),
        (0, 3): (21, 29),
    }


def test_images_do_not_see_each_other() -> None:
    net, images = net_of().train(), torch.randn(4, 3, 16, 16, dtype=torch.float64)
    parts = torch.cat([net(part) for part in images.split(1)])
    assert (net(images) - parts).abs().max() < 1e-12
    batch = net_of(norm="batch").train()
    assert (batch(images)[:2] - batch(images[:2])).abs().max() > 1e-3


def test_channels_of_a_place_are_normalised() -> None:
    layer = _PositionalNorm(24).double()
    x = layer(torch.randn(2, 24, 5, 3, dtype=torch.float64) * 7 + 2)
    assert x.mean(1).abs().max() < 1e-12 and (x.var(1, correction=0) - 1).abs().max() < 1e-5


def test_layers_and_weights() -> None:
    """9 convolutions of 128, 256 and 512 channels, 2 poolings: 3.1 million weights."""
    net = ConvLarge(ConvLargeConfig(), 10)
    shapes = [m.weight.shape[:3] for m in net.modules() if isinstance(m, torch.nn.Conv2d)]
    assert [tuple(s) for s in shapes] == [
        *((128, 3, 3), (128, 128, 3), (128, 128, 3), (256, 128, 3), (256, 256, 3), (256, 256, 3)),
        *((512, 256, 3), (256, 512, 1), (128, 256, 1)),
    ]
    assert sum(isinstance(m, torch.nn.MaxPool2d) for m in net.modules()) == 2


def test_the_primary_head_is_on_the_mean() -> None:
    net = ConvLarge(ConvLargeConfig(width=1 / 16), 4).eval()
    images = torch.randn(2, 3, 16, 16)
    features = net.features(images)
    head = net.heads["primary"]
    wanted = features.flatten(2).mean(2) @ head.weight.T + head.bias
    torch.testing.assert_close(net(images), wanted)
    with pytest.raises(UsageError, match="model.norm.*'group'.*positional, batch"):
        section("model", _name="conv_large", norm="group")
