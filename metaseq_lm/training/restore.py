"""Opens the run of a checkpoint for evaluation or export, and starts a run from its weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metaseq_lm.core.config import RunConfig, effect, options_of
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import FUNCTION
from metaseq_lm.data.storage.manifest import labels_in, tokenizer_hash
from metaseq_lm.runs import checkpoint, lineage_cost, manifests
from metaseq_lm.runs.checkpoint import Checkpoint
from metaseq_lm.runs.facts import check_heads, labels_of
from metaseq_lm.runs.manifests import CheckpointError
from metaseq_lm.tasks.protocols import ChecksSource
from metaseq_lm.training.parts import Parts, build_parts

__all__ = ["open_run"]

PRECISION = "engine.precision"


def open_run(
    path: str, data: str | None = None, user_dir: str | None = None, overrides: Sequence[str] = ()
) -> Parts:
    """Return the run of a checkpoint, or of the best one in a run folder, with its weights loaded.

    Nothing is written. The classes that the run names must be registered: see
    `metaseq_lm.plugins.load_all`.

    Args:
        path: Checkpoint or run folder.
        data: Data folder to use instead of the run's.
        user_dir: Plug-in that the run needs, if it used one.
        overrides: key=value changes of its configuration.

    Raises:
        CheckpointError: The checkpoint cannot be used.
        UsageError: An override is wrong, or the run needs a plug-in that `user_dir` does not name.
    """
    folder = manifests.resolve(path, prefer="best")
    stored = checkpoint.open_lazily(folder)
    config = manifests.reopened_config(folder, stored.manifest, user_dir, overrides)
    config.data = data or config.data
    config.init_from = None
    check_tokenizer(stored, config.data)
    parts = build_parts(config, dry_run=True, empty=True)
    _check_labels(stored, parts, folder)
    checkpoint.read_weights(parts.model, stored)
    return parts


def open_scored(
    path: str, data: str | None = None, user_dir: str | None = None, overrides: Sequence[str] = ()
) -> Parts:
    """Return what `open_run` does, in float32 unless the overrides name a precision.

    Open a run with it to score sentences or states: in bfloat16, close scores become ties.
    """
    # If an option has two values, the later one counts.
    return open_run(path, data, user_dir, [f"{PRECISION}=fp32", *overrides])


def _check_labels(stored: Checkpoint, parts: Parts, folder: Path) -> None:
    """Raise an error unless the data have the same classes as the heads of a checkpoint."""
    facts = stored.manifest.get("facts") or {}
    if "labels" not in facts:
        return
    labels = labels_in(parts.config.data, options_of(parts.task.config))
    check_heads(folder, labels_of(facts, folder), labels)


def stored_config(stored: Checkpoint) -> RunConfig:
    """Return the configuration of a checkpoint; CheckpointError if it is invalid."""
    return manifests.config_of(stored.manifest, stored.path)


@dataclass(frozen=True)
class Initialisation:
    """The start of a run from another one.

    Attributes:
        message: Message for the log of the run.
        costs: The cost of its ancestors.
        weights: A hash of the weights that it started from.
        is_outdated: Whether init_from has other weights now.
    """

    message: str = ""
    costs: lineage_cost.Costs = field(default_factory=dict)
    weights: str = ""
    is_outdated: bool = False

    def record(self) -> dict[str, Any]:
        """Return its record in checkpoints, for JSON."""
        if not self.weights:
            return {}
        record: dict[str, Any] = {"weights": self.weights}
        if self.costs is not None:
            record["costs"] = self.costs
        return {"start": record}


def initialise_from(parts: Parts, source: str) -> Initialisation:
    """Load the weights that the task uses from the run or checkpoint `source`.

    A head (`Task.fresh`) that `source` lacks starts fresh, one that the task lacks is not used.
    Raises CheckpointError if there are no weights or they do not fit, UsageError if `source` has
    another tokenizer or other layers.
    """
    stored = checkpoint.load(manifests.resolve(source))
    _check_source(stored, parts.config)
    if isinstance(parts.task, ChecksSource):
        parts.task.check_facts(stored.manifest.get("facts") or {}, stored.path)
    chosen = parts.task.pretrained(stored.weights)
    if not chosen:
        raise CheckpointError(
            f"{stored.path} has no weights that task '{parts.config.task._name}' starts from; "
            f"it has {', '.join(sorted(stored.weights)[:3])}, ..."
        )
    current = parts.model.state_dict()
    fresh = _other_heads(current, chosen, parts.task.fresh)
    unused = _other_heads(chosen, current, parts.task.fresh)
    loaded = {name: weight for name, weight in chosen.items() if name not in unused}
    message = f"starts from {stored.path}: {len(loaded)} weights of it"
    loaded |= {name: current[name] for name in fresh}
    checkpoint.load_into(parts.model, loaded, stored.path)
    for kind, heads in (("fresh", fresh), ("not used", unused)):
        if heads:
            message += f"; {kind}: {', '.join(dict.fromkeys(heads.values()))}"
    weights = manifests.hash_of_weights(stored.manifest)
    return Initialisation(message, lineage_cost.cost_of_ancestors(source), weights)


def _other_heads(
    weights: Iterable[str], others: Iterable[str], prefixes: tuple[str, ...]
) -> dict[str, str]:
    """Return the head of each of the `weights` that belongs to a head absent from `others`.

    The name of a head is one of the `prefixes` and the next word. A head that `others` have in
    part is left out: it is damaged, or of another kind.
    """

    def head_of(name: str) -> str:
        for prefix in prefixes:
            if name.startswith(prefix):
                return prefix + name.removeprefix(prefix).partition(".")[0]
        return ""

    present = {"", *map(head_of, others)}
    return {name: head for name in weights if (head := head_of(name)) not in present}


def _check_source(stored: Checkpoint, config: RunConfig) -> None:
    """Raise UsageError if a checkpoint has another tokenizer or other layers than the run."""
    check_tokenizer(stored, config.data)
    model = (stored.manifest.get("config") or {}).get("model") or {}
    values = {"model._name": config.model._name}
    for key, current in options_of(config.model).items():
        is_function = effect(f"model.{key}", values) == FUNCTION
        if is_function and key in model and model[key] != current:
            raise UsageError(
                f"{stored.path} was trained with model.{key}={model[key]}, this run has "
                f"{current}; its weights would compute something else. --model inherit takes "
                "the architecture of init_from"
            )


def check_tokenizer(stored: Checkpoint, data: str) -> None:
    """Raise UsageError if a checkpoint was trained with another tokenizer than `data` has."""
    trained_with, current = stored.manifest.get("tokenizer"), tokenizer_hash(data)
    if trained_with and current and trained_with != current:
        raise UsageError(
            f"{stored.path} was trained with another tokenizer than {data} has ({trained_with} and "
            f"{current}); binarise the data with its tokenizer: preprocess --tokenizer-from FOLDER"
        )
