"""Opening a run again from a checkpoint, to evaluate, score or export it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metaseq_lm.core import plugins
from metaseq_lm.core.checks import check_heads
from metaseq_lm.core.config import RunConfig, check_names, overridden, without_environment
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.storage.manifest import HERE, labels_in, sets_named
from metaseq_lm.distributed import process_group
from metaseq_lm.runs import checkpoint
from metaseq_lm.runs.checkpoint import Checkpoint, CheckpointError
from metaseq_lm.training.initialise import check_tokenizer
from metaseq_lm.training.parts import Parts, build_parts, check_scored, evaluate_split


class RestoredRun:
    """A run with the weights of a checkpoint; nothing is written."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.config = parts, parts.config
        self.task, self.model, self.engine = parts.task, parts.model, parts.engine

    def score(self, split: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return metrics on a split and, on the first replica, predictions; UsageError for "train"."""
        check_scored(split)
        _ = self.parts.data_fingerprint  # MetaseqError if a file is damaged
        metrics, rows = evaluate_split(self.parts, split)
        return metrics, [] if process_group.rank() else list(rows())


def open_run(
    path: str, data: str | None = None, user_dir: str | None = None, overrides: Sequence[str] = ()
) -> RestoredRun:
    """Return the run of a checkpoint, or of the best one in a run folder, with its weights loaded.

    Args:
        path: checkpoint or run folder.
        data: data folder to use instead of the run's.
        user_dir: plug-in that the run needs, if it used one.
        overrides: key=value changes of its configuration.

    Raises:
        CheckpointError: the checkpoint cannot be used.
        UsageError: an override is wrong, or the run needs a plug-in that `user_dir` does not name.
    """
    plugins.load_all(user_dir)
    place = checkpoint.resolve(path, prefer="best")
    stored = checkpoint.load(place)
    config = stored_config(stored)
    if config.user_dir and not user_dir:
        # Code is run only when the person in front of the screen names it, not because a file does.
        raise UsageError(
            f"this run used a plug-in; give --user-dir with its path from here, which was {config.user_dir}"
        )
    check_names(config)
    config = overridden(config, overrides)
    config.data = data or config.data
    config.init_from = None
    check_tokenizer(stored, config.data)
    parts = build_parts(config, dry_run=True)
    check_labels(stored, parts, place)
    checkpoint.load_into(parts.model, stored.weights, place)
    return RestoredRun(parts)


def check_labels(stored: Checkpoint, parts: Parts, place: Path) -> None:
    """Raise an error unless the data have the classes that the heads of a checkpoint are for."""
    facts = stored.manifest.get("facts") or {}
    if "labels" not in facts:
        return
    names = [HERE, *sets_named(parts.config.data, vars(parts.task.config))]
    check_heads(place, checkpoint.labels_of(facts, place), labels_in(parts.config.data, names))


def stored_config(stored: Checkpoint) -> DictConfig:
    """Return the configuration that a checkpoint was trained with; CheckpointError if it is none."""
    try:
        with without_environment():
            config: DictConfig = OmegaConf.structured(RunConfig)
            config.merge_with(stored.manifest.get("config"))
            OmegaConf.resolve(config)
    except (OmegaConfBaseException, ValueError, RecursionError) as error:
        reason = str(error).split("\n")[0]
        raise CheckpointError(f"{stored.path}: its config cannot be used: {reason}") from error
    OmegaConf.set_struct(config, True)
    return config
