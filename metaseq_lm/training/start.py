"""The start of a run: from new weights, the weights of init_from, or its own checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.secrets import mask_options
from metaseq_lm.runs import lineage_cost, manifests
from metaseq_lm.runs.folder import has_started, read_config
from metaseq_lm.runs.manifests import CheckpointError
from metaseq_lm.training.parts import Parts
from metaseq_lm.training.restore import Initialisation, initialise_from


def initialise(parts: Parts) -> Initialisation:
    """Load the weights of init_from, unless the run has a checkpoint, or branches from one.

    With a checkpoint, init_from may be gone, or have moved with the same weights. Raises UsageError
    if it is not the one that the run started from, otherwise the errors of `initialise_from`.
    """
    folder, source = Path(parts.config.save_dir), parts.config.init_from
    stored = manifests.newest_manifest(folder / "checkpoints")
    if stored is None and parts.config.branch_from:
        stored = manifests.read_manifest(manifests.resolve(parts.config.branch_from))
    shown = mask_options({"init_from": source})["init_from"]
    first = source_of(folder, stored, shown)
    record = (stored or {}).get("start") or {}
    then, now = record.get("weights") or _weights_at(first), _weights_at(source)
    if first != shown and (now is None or now != then):
        raise UsageError(
            f"{folder} holds another run (init_from is {first!r} there, {shown!r} here, which has "
            "not the same weights); choose another --save-dir, or the same init_from to resume it. "
            f"A new run that starts from its weights is init_from={folder}"
        )
    if source is None:
        return Initialisation()
    if stored is None:
        return initialise_from(parts, source)
    message = ""
    if first != shown:
        message = f"init_from {first} -> {shown}, which has the same weights"
    elif now is None:
        message = f"init_from {shown} is not there any more; the run goes on with its own weights"
    elif then not in (None, now):
        message = f"init_from {shown} has other weights now; the run goes on with its own"
    costs = _costs_on_record(record, folder)
    if costs is None and now is not None:
        costs = lineage_cost.cost_of_ancestors(source)
    return Initialisation(message, costs, then or "", is_outdated=now not in (None, then))


def source_of(folder: Path, stored: dict[str, Any] | None, otherwise: str | None) -> str | None:
    """Return the init_from of the run in a folder; `otherwise` if nothing was trained there."""
    if stored is not None:
        source: str | None = (stored.get("config") or {}).get("init_from")
        return source
    file = folder / "config.yaml"
    if not file.is_file() or not has_started(folder):
        return otherwise
    return read_config(file).get("init_from")


def _weights_at(source: str | None) -> str | None:
    """Return the hash of the weights of a run or checkpoint; None if there is none."""
    try:
        return source and manifests.hash_of_weights(
            manifests.read_manifest(manifests.resolve(source))
        )
    except CheckpointError:
        return None


def _costs_on_record(record: dict[str, Any], folder: Path) -> lineage_cost.Costs:
    """Return the costs of the ancestors that a checkpoint records; None if it records none."""
    try:
        return lineage_cost.check_costs(record.get("costs"))
    except ValueError as error:
        raise CheckpointError(
            f"{folder}: a manifest of its checkpoints is damaged: {error}"
        ) from error
