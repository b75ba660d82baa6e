"""Opening a finished run again: its configuration and weights from a checkpoint, to score with."""

from collections.abc import Sequence

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metaseq_lm.core import plugins
from metaseq_lm.core.checks import check_heads
from metaseq_lm.core.config import RunConfig, check_names, overridden, without_environment
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.storage.manifest import HERE, labels_in
from metaseq_lm.runs import checkpoint
from metaseq_lm.runs.checkpoint import Checkpoint, CheckpointError
from metaseq_lm.training.run import Run, check_tokenizer


def open_run(
    path: str, data: str | None = None, user_dir: str | None = None, overrides: Sequence[str] = ()
) -> Run:
    """Return the run of a checkpoint, or of a run folder's best one, with its weights loaded.

    `data` replaces its data folder, `overrides` are key=value changes of its config. Nothing is
    written. Raises CheckpointError if it cannot be used, UsageError for a wrong override or a
    plug-in that the run needs and `user_dir` does not name.
    """
    plugins.load_all(user_dir)
    place = checkpoint.resolve(path, prefer="best")
    found = checkpoint.load(place)
    config = stored_config(found)
    if config.user_dir and not user_dir:
        # Code is run only when the person in front of the screen names it, not because a file does.
        raise UsageError(
            f"this run used a plug-in; give --user-dir with its path from here, which was {config.user_dir}"
        )
    check_names(config)
    config = overridden(config, overrides)
    config.data = data or config.data
    config.init_from = None
    check_tokenizer(found, config.data)
    run = Run(config, dry_run=True)
    if "labels" in (facts := found.manifest.get("facts") or {}):
        labelled = config.task.get("labelled") or []
        # cvt_vision has a number there.
        lists = labelled if isinstance(labelled, ListConfig) else []
        named = [labelled] if isinstance(labelled, str) else lists
        now = labels_in(config.data, [HERE, *(name for name in named if isinstance(name, str))])
        check_heads(place, checkpoint.labels_of(facts, place), now)
    checkpoint.load_into(run.model, found.weights, place)
    return run


def stored_config(found: Checkpoint) -> DictConfig:
    """Return the configuration that a checkpoint was trained with; CheckpointError if it is none."""
    try:
        with without_environment():
            config = OmegaConf.structured(RunConfig)
            config.merge_with(found.manifest.get("config"))
            OmegaConf.resolve(config)
    except (OmegaConfBaseException, ValueError, RecursionError) as error:
        reason = str(error).split("\n")[0]
        raise CheckpointError(f"{found.path}: its config cannot be used: {reason}") from error
    OmegaConf.set_struct(config, True)
    return config
