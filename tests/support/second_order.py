"""First and second derivatives of outputs, for tests of double differentiability."""

import torch
from torch import Tensor, nn

from metaseq_lm.forward.passes import ForwardContext


def double_backward() -> ForwardContext:
    """Return the context of a pass with a gradient to differentiate."""
    return ForwardContext(None, double_backward=True)


def stacked(module: nn.Module, copies: int) -> dict[str, Tensor]:
    """Return random parameters of a module with a leading axis of copies."""
    return {
        name: torch.randn(copies, *p.shape, dtype=torch.float64).requires_grad_()
        for name, p in module.named_parameters()
    }


def derivatives(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return the output, its gradient g along a fixed vector, and the gradient of |g|^2."""
    generator = torch.Generator().manual_seed(5)
    along = torch.randn(output.shape, generator=generator, dtype=output.dtype)
    first = torch.autograd.grad((output * along).sum(), inputs, create_graph=True)
    size = sum(g.square().sum() for g in first)
    assert isinstance(size, Tensor)
    second = torch.autograd.grad(size, inputs, allow_unused=True)
    zeros = [torch.zeros_like(i) if g is None else g for g, i in zip(second, inputs)]
    return [output, *first, *zeros]
