"""Sums divided by sizes: the one place where a term becomes a mean, or stays a sum."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from metaseq_lm.core.batch import Terms
from metaseq_lm.core.errors import MetaseqError

Logs = dict[str, Any]


def weighted_loss(terms: Terms, totals: dict[str, Any], logs: Logs) -> Tensor:
    """Return the weighted sum of the terms' means, and add its parts to `logs`."""
    total: Any = 0.0
    for name, term in terms.items():
        if term.per is None:
            mean = term.sum
        elif term.per in totals:
            size = totals[term.per]
            mean = term.sum / (size.clamp(min=1) if isinstance(size, Tensor) else max(size, 1))
        else:
            raise MetaseqError(
                f"the criterion's term '{name}' is per '{term.per}', but batch['sizes'] has "
                f"{', '.join(sorted(totals)) or 'nothing'}; name one of these in Term(sum, per), or let the "
                "task count that one"
            )
        logs[name] = logs.get(name, 0.0) + mean.detach().mean()
        if term.is_loss:
            total = total + (mean * term.weight).sum()
    total = torch.as_tensor(total)
    logs["loss"] = logs.get("loss", 0.0) + total.detach()
    return total


def to_python(value: Any) -> Any:
    """Return nested containers with each tensor as a float or a list of floats."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {k: to_python(v) for k, v in value.items()}
    return [to_python(v) for v in value] if isinstance(value, (list, tuple)) else value


def means(replicas: list) -> Logs:
    """Return the means of the terms that the replicas' `evaluate` summed, and the weighted "loss"."""
    sums: dict[str, Any] = {}
    sizes: dict[str, Any] = {}
    how: dict[str, tuple[Optional[str], Any]] = {}
    for parts, counts in replicas:
        for name, (total, per, weight) in parts.items():
            sums[name] = sums.get(name, 0.0) + torch.tensor(total, dtype=torch.float64)
            how[name] = (per, torch.tensor(weight, dtype=torch.float64))
        for name, count in counts.items():
            sizes[name] = sizes.get(name, 0.0) + torch.tensor(count, dtype=torch.float64)
    logs: Logs = {}
    loss = torch.zeros((), dtype=torch.float64)
    for name, total in sums.items():
        per, weight = how[name]
        mean = total if per is None else total / sizes[per].clamp(min=1)
        logs[name] = mean.mean().item()
        loss = loss + (mean * weight).sum()
    return logs | {"loss": loss.item()} if logs else {}
