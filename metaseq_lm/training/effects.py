"""Checks that options which claim to leave results unchanged do, by trying other values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, replace
from typing import Any

from metaseq_lm.core.config import GROUPS, RunConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.interfaces import place_of
from metaseq_lm.core.options import NOTHING, SPEED, WEIGHTS, check_options
from metaseq_lm.core.registry import ALL
from metaseq_lm.tasks import with_updates
from metaseq_lm.tasks.protocols import kind_streams_of
from metaseq_lm.training.parts import build_parts, evaluate_split, prepare_config
from metaseq_lm.training.price import divisor_of_dry_run, updates_of_kinds

# Relative difference allowed for an option that affects speed, which may change rounding.
_TOLERANCE = 1e-3
# The results of `_measure` that an option with this effect must not change.
SAME = {NOTHING: ("valid", "train", "updated"), SPEED: ("valid", "train"), WEIGHTS: ("valid",)}
_Results = dict[str, Mapping[str, float]]


def check_effects(config: RunConfig, of_package: bool = False) -> list[str]:
    """Try another value of each plug-in option that claims to leave results unchanged.

    Options that affect NOTHING or SPEED must not change the losses of an update and of a validation
    batch; WEIGHTS in a criterion must not change the validation's. A collective call.

    Args:
        config: The configuration of a run.
        of_package: Whether to also try the options of the package.

    Returns:
        The options for which no other value could be tried.

    Raises:
        UsageError: Another value changes the results.
    """
    claims = list(_claims(config, of_package))
    if not claims:
        return []
    config = prepare_config(config)
    if not config.trainer.max_update:
        config = with_updates(config, 1)
    # What differs between two trials of the same options, such as a time, says nothing.
    usual, untried = _stable(_measure(config), _measure(config)), []
    for group, item in claims:
        key, options = f"{group}.{item.name}", getattr(config, group)
        for value in _other_values(item, getattr(options, item.name)):
            try:
                check_options(type(options), changed := replace(options, **{item.name: value}))
                results = _measure(replace(config, **{group: changed}))
            except Exception:  # the plug-in's own code may not take the value
                continue
            effect = item.metadata["affects"]
            if difference := _difference(usual, results, effect):
                raise UsageError(
                    f"{place_of(_owner(type(options), item.name))}: {key} says affects={effect}, "
                    f"but with {value} in place of {getattr(options, item.name)} {difference}; "
                    "declare what it affects (docs/how_to/plugins.md#options)"
                )
            break
        else:
            untried.append(key)
    return untried


def _claims(config: RunConfig, of_package: bool) -> Iterator[tuple[str, Field[Any]]]:
    """Yield the options that claim to leave results unchanged, with their groups."""
    for group in GROUPS:
        schema = ALL[group].entry(getattr(config, group)._name).dataclass
        for item in fields(schema):
            effect = item.metadata.get("affects")
            # Another batch size validates the same rows with other masks.
            if effect not in SAME or (effect == WEIGHTS and group != "criterion"):
                continue
            if of_package or not _owner(schema, item.name).__module__.startswith("metaseq_lm."):
                yield group, item


def _owner(schema: type, name: str) -> type:
    return next(c for c in schema.__mro__ if name in vars(c).get("__annotations__", ()))


def _other_values(item: Field[Any], value: Any) -> Iterator[Any]:
    """Yield other values of an option; some may be outside its range."""
    if "choices" in item.metadata:
        yield from (choice for choice in item.metadata["choices"] if choice != value)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        step = 1 if isinstance(value, int) else 0.1
        yield from (2 * value + step, value + step, value - step, value / 2 if step < 1 else 0)


def _measure(config: RunConfig) -> _Results:
    """Return the metrics of a validation batch, of a first update, and of a validation after it."""
    parts = build_parts(config, dry_run=True)
    split, streams = config.trainer.valid_split, kind_streams_of(parts.task)

    def validate() -> Mapping[str, float]:
        if not split:
            return {}
        return evaluate_split(parts, split, most=1).metrics

    valid = validate()
    train: dict[str, float] = {}
    divisor = divisor_of_dry_run(parts, streams)
    for number, batches in enumerate(updates_of_kinds(parts, streams, divisor)):
        logs = parts.task.update(parts.engine, parts.model, batches)
        train |= {f"{name} of update {number + 1}": float(value) for name, value in logs.items()}
    return {"valid": valid, "train": train, "updated": validate()}


def _stable(first: _Results, second: _Results) -> _Results:
    """Return the results that are the same in two trials: no times, and no sums in any order."""
    stable: _Results = {}
    for part, results in first.items():
        again = second[part]
        stable[part] = {name: x for name, x in results.items() if _is_same(x, again[name])}
    return stable


def _is_same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _difference(usual: _Results, results: _Results, effect: str) -> str:
    """Describe the first result that differs by more than an effect allows; "" if none does."""
    for part in SAME[effect]:
        for name, before in sorted(usual[part].items()):
            after = results[part].get(name, math.inf)
            is_near = effect == SPEED and math.isclose(before, after, rel_tol=_TOLERANCE)
            if not _is_same(before, after) and not is_near:
                return f"{name} ({part}) is {after:.6g}, not {before:.6g}"
    return ""
