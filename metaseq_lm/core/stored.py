"""Reads and changes the configuration that a run has stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metaseq_lm.core import mistakes
from metaseq_lm.core.config import RunConfig, as_dict, check_values, flatten
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import dotted_names, format_value, resolve_config, schema_of
from metaseq_lm.core.registry import nearest
from metaseq_lm.core.synonyms import suggest_option

# Engine options of earlier versions, with their current names and values.
_OLD_ENGINE = {"shard_optimizer": ("parallel", {False: "replicate", True: "shard"})}
# Tasks that earlier versions could mix with a causal LM, and their options on rows.
_OLD_MIXTURES = ("masked_next_token", "masked_diffusion")
_OLD_ROWS = (
    *("batch_size", "tokens_per_sample", "sample_break_mode", "shuffle_tokens", "valid_size"),
    *("batch_warmup_updates", "batch_warmup_ratio", "batch_start"),
    *("length_warmup_updates", "length_warmup_ratio", "length_start"),
    *("row_lengths", "length_phases", "length_updates", "length_keeps"),
)


def from_stored(values: Any) -> RunConfig:
    """Return a stored configuration, typed; options that it lacks have their defaults.

    Sections of unregistered classes keep their values unchanged. The file may be damaged: raises
    ValueError, which names the option, for an unknown option or a wrong type.
    """
    if not isinstance(values, Mapping):
        raise ValueError("it is no mapping of keys to values")
    values = with_current_names(dict(values))
    try:
        config = schema_of(values)
        config.merge_with(values)
        return resolve_config(config)
    except OmegaConfBaseException as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"{error.full_key}: {reason}" if error.full_key else reason) from error
    except UsageError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("it names itself") from error


def with_current_names(config: Any) -> Any:
    """Rename the options of a stored configuration to their current names, in place; return it."""
    if not isinstance(config, dict):
        return config
    engine, task, criterion = (config.get(group) for group in ("engine", "task", "criterion"))
    for old, (new, values) in _OLD_ENGINE.items():
        if isinstance(engine, dict) and isinstance(engine.get(old), bool):
            engine[new] = values[engine.pop(old)]
    names = [s.get("_name") if isinstance(s, dict) else None for s in (task, criterion)]
    if names[0] == names[1] and names[0] in _OLD_MIXTURES:
        config |= _without_causal_share(task, criterion)
    return config


def _without_causal_share(task: Any, criterion: Any) -> dict[str, Any]:
    """Return sections of a run that used the removed options for a share of causal rows.

    These are `causal_share` of the task and `read` of the criterion; a mixture replaces them.
    """
    name, share, read = task["_name"], task.get("causal_share"), criterion.get("read")
    task = {key: value for key, value in task.items() if key != "causal_share"}
    criterion = {key: value for key, value in criterion.items() if key != "read"}
    if not share or not isinstance(share, int | float):
        return {"task": task, "criterion": criterion}
    rows = {key: task.pop(key) for key in _OLD_ROWS if key in task}
    words = [name, f"weight={1 - share}"]
    for group, section in (("task", task), ("criterion", criterion)):
        options = {key: value for key, value in section.items() if key != "_name"}
        words += [f"{group}.{key}={format_value(value)}" for key, value in options.items()]
    objectives = [" ".join(words), f"causal_lm weight={share}"]
    return {
        "task": {"_name": "mixture", "objectives": objectives, **rows},
        "criterion": {"_name": "mixture", "read": "causal_lm" if read == "causal" else name},
    }


def override_config(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration of a run with key=value changes, checked as load_config does.

    Every name in `config` must be registered. Raises UsageError for an unknown key or wrong value.
    """
    try:
        changes = OmegaConf.from_dotlist(list(overrides))
    except mistakes.MISTAKES as error:
        raise UsageError(f"{' '.join(overrides)}: a value is no YAML; quote it") from error
    values = as_dict(config)
    known = [key for key in flatten(values) if not key.endswith("._name")]
    for key in dotted_names(changes):
        if key not in known:
            hint = suggest_option(key, flag_keys={}) or nearest(key, known)
            raise UsageError(f"'{key}' is no option of this run.{hint}")
    typed = schema_of(values)
    try:
        typed.merge_with(values, changes)
        changed = resolve_config(typed)
    except (OmegaConfBaseException, ValueError) as error:
        raise UsageError(mistakes.explain_value(error, known)) from error
    check_values(changed)
    return changed
