"""Models that a checkpoint fills in: parameters without memory at first, real buffers."""

from typing import Any

import pytest
import torch
from torch import nn

from metaseq_lm.training.parts import _allocate, _build_on_meta


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 5)
        self.out.weight = self.embed.weight
        self.lstm = nn.LSTM(4, 4)
        self.register_buffer("positions", torch.arange(3.0), persistent=False)


class WithValue(Tied):
    """Computes with its first weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = float(self.out.weight.detach().std())


class WithBuffer(Tied):
    """Keeps its first weights where no checkpoint does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", self.out.weight.detach().clone(), persistent=False)


class WithTensor(Tied):
    """Keeps its first weights in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.out.weight.detach().clone()


class Builder:
    """The part of a task that builds a model."""

    def __init__(self, build_model: Any) -> None:
        self.build_model = build_model


def test_parameters_get_memory_later() -> None:
    state = torch.get_rng_state()
    model = _build_on_meta(Builder(Tied))  # type: ignore[arg-type]
    assert model is not None and all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.positions, torch.arange(3.0))
    _allocate(model, "cpu")
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert model.out.weight is model.embed.weight
    built = Tied()
    model.load_state_dict(built.state_dict())
    inputs = torch.randn(2, 1, 4)
    assert torch.equal(model.lstm(inputs)[0], built.lstm(inputs)[0])


@pytest.mark.parametrize("kind", [WithValue, WithBuffer, WithTensor])
def test_models_that_need_their_first_values(kind: type) -> None:
    assert _build_on_meta(Builder(kind)) is None  # type: ignore[arg-type]
    assert not any(parameter.is_meta for parameter in kind().parameters())
