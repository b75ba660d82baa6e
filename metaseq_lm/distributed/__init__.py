"""Processes, what they send each other, and where parameters rest."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(tensor: Any) -> TypeIs[DTensor]:
    """Return whether a tensor is a DTensor, without importing what defines it.

    That takes a second, and a run without shards needs none of it.
    """
    defined = sys.modules.get("torch.distributed.tensor")
    return defined is not None and isinstance(tensor, defined.DTensor)
