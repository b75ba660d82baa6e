"""What torch's fully_shard does not do, each in a few lines: why second derivatives have gathers of
their own (metaseq_lm/distributed/gathering.py), and why passes run inside an outermost module.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tests/support/fully_shard_limits.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call


def net(mesh: DeviceMesh) -> nn.Sequential:
    """Return two sharded linear maps in a sharded module."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def rows() -> Tensor:
    """Return this process's rows."""
    return torch.arange(8.0, dtype=torch.float64).view(2, 4) * (1 + dist.get_rank())


def error_of(function: Callable[[], object]) -> str:
    """Return the first line of the error that a function raises, "no error" without one."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "no error"


def backward_inputs(mesh: DeviceMesh) -> str:
    """Gradients of `backward(inputs=parameters)`."""
    model = net(mesh)
    parameters = list(model.parameters())
    error = error_of(lambda: model(rows()).sum().backward(inputs=parameters))
    return f"{error}, {sum(p.grad is not None for p in parameters)} gradients"


def autograd_grad(mesh: DeviceMesh) -> str:
    """`autograd.grad` with respect to parameters."""
    model = net(mesh)
    return error_of(lambda: torch.autograd.grad(model(rows()).sum(), list(model.parameters())))


def second_derivatives(mesh: DeviceMesh) -> str:
    """The graph of gradients of `backward(create_graph=True)`."""
    model = net(mesh)
    error = error_of(lambda: model(rows()).square().sum().backward(create_graph=True))
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return f"{error}, {len(grads)} gradients, {sum(g.requires_grad for g in grads)} with a graph"


def other_weights(mesh: DeviceMesh) -> str:
    """`functional_call` with other weights, as virtual students need it."""
    model = net(mesh)
    weights = {name: torch.zeros(p.shape).double() for name, p in model.named_parameters()}
    return error_of(lambda: functional_call(model, weights, (rows(),)))


def part_first(mesh: DeviceMesh) -> str:
    """A call of a part before the first of the whole."""
    model = net(mesh)
    model[0](rows())
    return error_of(lambda: model(rows()))


def number(mesh: DeviceMesh) -> str:
    """A parameter without axes."""
    model = nn.Linear(4, 4)
    model.scale = nn.Parameter(torch.ones(()))
    return error_of(lambda: fully_shard(model, mesh=mesh))


def sum_of_root_only(mesh: DeviceMesh) -> str:
    """Sums in place of means, asked for of the outermost module only."""
    model = net(mesh)
    model.set_gradient_divide_factor(1.0)
    model(rows()).sum().backward()
    plain = net(mesh)
    for module in plain.modules():
        module.set_gradient_divide_factor(1.0)
    plain(rows()).sum().backward()
    ratio = model[0].bias.grad.full_tensor() / plain[0].bias.grad.full_tensor()
    return f"no error, gradients {ratio.mean():.2f} times the sum"


LIMITS = [
    *(backward_inputs, autograd_grad, second_derivatives, other_weights, part_first, number),
    sum_of_root_only,
]


def limits(mesh: DeviceMesh) -> dict[str, str]:
    """Return the outcome of each function."""
    return {function.__name__: function(mesh) for function in LIMITS}


def main() -> None:
    """Print the outcomes."""
    dist.init_process_group("gloo")
    found = limits(init_device_mesh("cpu", (dist.get_world_size(),)))
    if dist.get_rank() == 0:
        for function in LIMITS:
            assert function.__doc__ is not None
            print(f"{function.__doc__.rstrip('.')}: {found[function.__name__]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
