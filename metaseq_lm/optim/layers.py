"""Rates that fall from the heads of a model down to its embeddings."""

import re
from collections.abc import Sequence

from metaseq_lm.core.errors import UsageError

LAYER = re.compile(r"encoder\.stack\.layers\.(\d+)\.")


def layer_multipliers(names: Sequence[str], decay: float, legacy: bool) -> dict[str, float]:
    """Return the factor of the rate of each parameter: 1 for heads, decay^(L + 1) for embeddings.

    With L layers the embeddings (and their projection) have depth 0, layer i depth i + 1, and all
    that is not part of `encoder` depth L + 1: the top layer gets decay^1. With `legacy` the heads
    have depth L + 2, as in the code of ELECTRA and BAM: the top layer gets decay^2, the embeddings
    decay^(L + 2), and decay^1 is BERT's tanh pooler, if there is one. Raises UsageError for a
    model without such layers.
    """
    numbers = [int(found[1]) for found in map(LAYER.match, names) if found]
    if not numbers:
        raise UsageError(
            f"optimizer.layer_decay is {decay}, but no trained parameter of the model is called "
            "encoder.stack.layers.N; it must be 1 for this task"
        )
    top = max(numbers) + 1
    heads = top + 2 if legacy else top + 1

    def depth(name: str) -> int:
        found = LAYER.match(name)
        if found:
            return int(found[1]) + 1
        if name.startswith("encoder.stack.norm."):
            return top  # the last norm of a pre-LN stack belongs to its top layer
        if name.startswith("encoder."):
            return 0
        return top + 1 if legacy and ".pooler." in name else heads

    return {name: decay ** (heads - depth(name)) for name in names}
