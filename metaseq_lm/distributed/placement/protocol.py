"""What callers ask of the placement of a model's parameters; none tests which one it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from metaseq_lm.distributed.reduction import Gradients, Losses, Tensors

if TYPE_CHECKING:
    from metaseq_lm.distributed.gathering import ShardedWeights

T = TypeVar("T")


class Placement:
    """Where the parameters of a model are, and how passes get them.

    The defaults are for full parameters in every process. All methods are collective calls if the
    placement gathers.

    Attributes:
        gathers: Whether each process holds a part of the parameters, and passes gather them. All
            processes then run the same number of micro-batches.
        has_second_derivatives: Whether gradients can be differentiated.
        is_whole: Whether every process holds full parameters now.
    """

    gathers: bool = True
    has_second_derivatives: bool = True
    is_whole: bool = True

    def prepare(self) -> None:
        """Complete the placement once all parameters have memory."""

    def refresh(self, parameters: Iterable[Tensor]) -> None:
        """Copy changed parameters to the full ones, if inside `whole`."""

    def whole(self, write: bool = False) -> AbstractContextManager[None]:
        """Gather full parameters inside the context; `write` copies changes back."""
        return nullcontext()

    def in_pass(self) -> AbstractContextManager[ShardedWeights | None]:
        """Prepare passes that gather parameters where they are used.

        Yields the weights if the graph gathers them, and so has leaves of its own.
        """
        return nullcontext()

    def call(self, function: Callable[[], T]) -> T:
        """Return function(), which runs the model, inside `in_pass` or `whole`."""
        return function()

    def take_calls(self) -> list[int]:
        """Return the numbers of the blocks gathered since the last call, to be compared."""
        return []

    def differentiate(self, losses: Losses, leaves: Tensors, wrt: Tensors, low: bool) -> Gradients:
        """Run each loss forward and backward inside `in_pass`, and start to sum the gradients.

        Args:
            losses: This process's parts of a global loss.
            leaves: The leaves of their graphs.
            wrt: The parameters for these leaves.
            low: Whether gradients may be summed in bfloat16.
        """
        raise NotImplementedError

    def bind(self, module: nn.Module) -> Callable[..., Any]:
        """Return a differentiable call of a module with other values of its parameters.

        It takes the values of this process, in the order of `module.parameters()`, constants by
        name, a tuple of arguments and a dictionary of keywords.
        """
        raise NotImplementedError
