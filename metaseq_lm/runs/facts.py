"""Compares facts of the data that a checkpoint stores, such as classes, with the current ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import UsageError
from metaseq_lm.runs.manifests import CheckpointError


def labels_of(facts: dict[str, Any] | None, source: object) -> dict[str, list[str]]:
    """Return the classes of each set from a checkpoint's facts; CheckpointError without any."""
    labels = (facts or {}).get("labels")
    every = chain.from_iterable((labels or {}).values())
    if labels is None or not all(isinstance(label, str) for label in every):
        raise CheckpointError(
            f"{source} does not say which classes its heads are for; train it anew with this "
            "version"
        )
    return dict(labels)


def check_classes(source: object, name: str, then: Sequence[str], now: Sequence[str]) -> None:
    """Raise UsageError if `source` was trained on other or differently ordered classes of a set."""
    if list(then) != list(now):
        trained, current = (", ".join(labels) or "real values" for labels in (then, now))
        raise UsageError(
            f"{source} was trained on {name} with the classes {trained}, but DATA has {current}; "
            "their order is that of the outputs. Preprocess the set again with --labels-from the "
            "set of then, or with --labels in its order"
        )


def check_heads(
    source: object, then: Mapping[str, Sequence[str]], now: Mapping[str, Sequence[str]]
) -> None:
    """Raise UsageError if a set of `now` has other classes than its head was trained on.

    `then` are the classes of the sets that `source` was trained on. If it is a single set, its head
    is compared with every set of `now`.
    """
    for name, labels in now.items():
        only = next(iter(then.values())) if len(then) == 1 else labels
        check_classes(source, name, then.get(name, only), labels)


def check_facts(stored: Any, current: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError if a checkpoint's facts differ from the facts of the run to resume.

    Facts that the checkpoint lacks are not compared.
    """
    stored = stored if isinstance(stored, dict) else {}
    differing = [key for key in current if key in stored and stored[key] != current[key]]
    if differing:
        key = differing[0]
        raise CheckpointError(
            f"{path} was trained with other {key} than there are now ({str(stored[key])[:200]} "
            f"then, {str(current[key])[:200]} now); choose another --save-dir"
        )
