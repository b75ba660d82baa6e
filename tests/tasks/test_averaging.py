"""The moving average of the weights goes along with steps, not with those that are refused."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from metaseq_lm.models.averaged import AveragedWeights
from metaseq_lm.tasks.averaging import moving


@pytest.mark.parametrize(
    ("policy", "wanted"), [("skip", [2.0, 2.0, 4.0]), ("stop", [2.0, 3.0, 4.5])]
)
def test_the_average_moves_before_the_step_and_is_put_back(
    policy: str, wanted: list[float]
) -> None:
    """The weight is 3, 4, 6 at three steps, of which the second is refused."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 1.0)
    average = AveragedWeights(net, 0.5)
    config = OmegaConf.create({"trainer": {"on_nonfinite": policy}})
    found = []
    for weight, refused in ((3.0, False), (4.0, True), (6.0, False)):
        engine = SimpleNamespace(nonfinite=[])
        with torch.no_grad():
            net.weight.fill_(weight)
        with moving(average, net, engine, config):  # type: ignore[arg-type]
            engine.nonfinite += ["main"] * refused
            with torch.no_grad():
                net.weight.fill_(99.0)  # what the step makes of it
        found.append(average.net.weight.item())
    assert found == wanted
    with moving(None, net, engine, config):  # type: ignore[arg-type]
        pass
