"""Reuses the model of the checkpoint that a run starts from, so that sizes need not be repeated."""

from pathlib import Path

from torch import nn

from metaseq_lm.core.config import RunConfig, as_dict
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import nearest
from metaseq_lm.core.stored import from_stored, override_config
from metaseq_lm.runs import manifests

INHERIT = "inherit"


class Inherit(nn.Module):
    """Use the architecture of the checkpoint named by init_from.

    `inherited` replaces this entry in the configuration before anything is built.
    """


def inherit_model(config: RunConfig) -> RunConfig:
    """Return `config`, which has model `inherit`, with the model that init_from was trained with.

    model.changes replaces options of the checkpoint's model. Raises UsageError without init_from,
    if the checkpoint does not name its model, or for a change that its model does not take.
    """
    if not config.init_from:
        raise UsageError(
            "model=inherit takes the model of init_from, which is not given; give init_from=RUN or "
            "another model"
        )
    source, checkpoints = config.init_from, Path(config.save_dir, "checkpoints")
    # A resumed run has the same model.
    if not Path(source).exists() and manifests.newest_manifest(checkpoints):
        source = config.save_dir
    path = manifests.resolve(source)
    stored = manifests.read_manifest(path).get("config")
    model = stored.get("model") if isinstance(stored, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("_name"), str):
        raise UsageError(f"{path} does not say what its model was; give --model")
    changes = config.model.changes
    try:
        config = from_stored({**as_dict(config), "model": model})
    except ValueError as error:
        raise UsageError(f"{path}: its config cannot be used: {error}") from error
    for change in changes:
        option, equals, _ = change.partition("=")
        if not (option and equals):
            raise UsageError(f"model.changes has '{change}'; write it as 'NAME=VALUE'")
        options = sorted(model.keys() - {"_name"})
        if option.split(".")[0] not in options:
            raise UsageError(
                f"model.changes has {option}; {path} was trained with model {model['_name']}, "
                f"which has no such option.{nearest(option, options)}"
            )
    try:
        return override_config(config, [f"model.{change}" for change in changes])
    except UsageError as error:
        raise UsageError(f"model.changes={changes}: {error}") from error
