"""The configurations of a sweep's runs, composed and checked before anything is launched."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from metaseq_lm.core.config import RunConfig, as_dict, flatten
from metaseq_lm.core.errors import MissingError, UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.core.secrets import mask_options
from metaseq_lm.sweeps.definition import Definition
from metaseq_lm.sweeps.expansion import PlannedRun, StageRun

_NOT_BUILT_FROM = ("save_dir", "label", "seed", "optimizer")  # options of a run
Check = Callable[[RunConfig], None]


def compose_runs(
    runs: Sequence[PlannedRun], definition: Definition, check: Check | None = None
) -> Iterator[tuple[PlannedRun, StageRun, RunConfig]]:
    """Yield every run, its stages and their configuration; UsageError names the run.

    `check` may raise UsageError for a configuration.
    """
    folder, compositions = definition.config_dir, definition.compositions
    for run in runs:
        for stage in run.stages:
            try:
                config_name, overrides = stage.configuration()
                config = load_config(overrides, folder, config_name, compositions)
                _check_no_secret(config)
                if check is not None:
                    check(config)
            except UsageError as error:
                raise UsageError(f"{_name_of(run, stage)}: {error}") from error
            yield run, stage, config


def _name_of(run: PlannedRun, stage: StageRun) -> str:
    return f"{run.name}, {stage.name}" if stage.name else run.name


def _check_no_secret(config: RunConfig) -> None:
    """Raise UsageError for an option with a secret, which would end up in the sweep's files."""
    options = as_dict(config)
    shown = flatten(mask_options(options))
    for key, value in flatten(options).items():
        if value != shown[key]:
            raise UsageError(
                f"{key} looks like a secret, which a sweep would write into its folder for all to "
                "read; put it into a variable of the environment and let the plug-in read that"
            )


def check_each_value(
    runs: Sequence[PlannedRun], definition: Definition, check: Check | None = None
) -> None:
    """Compose runs until every value of every key has been used; UsageError names the run."""
    seen: set[tuple[str, str]] = set()
    fresh: list[PlannedRun] = []
    for run in runs:
        values = {(key, str(value)) for key, value in run.values.items()}
        if not fresh or values - seen:
            fresh.append(run)
            seen |= values
    list(compose_runs(fresh, definition, check))


def conditions_of_runs(runs: Sequence[PlannedRun], definition: Definition) -> list[dict[str, Any]]:
    """Return the conditions of the runs (see runs.conditions), which `check_configs` has passed.

    They are computed once for runs that differ only in seed and name. Runs have no conditions while
    their data or source do not exist yet.
    """
    from metaseq_lm.training.conditions import conditions_of
    from metaseq_lm.training.parts import check_parts

    known: dict[str, dict[str, Any]] = {}
    conditions = []
    for _, _, config in compose_runs(runs, definition):
        options = as_dict(config) | dict.fromkeys(("save_dir", "label", "seed"))
        content = json.dumps(options)
        if content not in known:
            known[content] = {}
            with contextlib.suppress(UsageError, MissingError):  # sets that do not exist yet
                if task := check_parts(config):
                    streams = task.build_streams("train")
                    known[content] = conditions_of(task.run_config, task, streams)
        conditions.append(known[content])
    return conditions


def check_configs(
    runs: Sequence[PlannedRun], definition: Definition, check: Check | None = None
) -> None:
    """Raise UsageError naming the first run that could not start; the plug-ins are loaded.

    Every configuration is composed. Only one is built among those that differ only in options from
    which neither task nor networks are built.
    """
    # These import torch, so other mistakes are reported first.
    from metaseq_lm.training.parts import check_parts
    from metaseq_lm.training.suites import check_final_suites

    checked = set()
    for run, stage, config in compose_runs(runs, definition, check):
        options = as_dict(config)
        content = json.dumps({key: options[key] for key in options if key not in _NOT_BUILT_FROM})
        if content in checked:
            continue
        checked.add(content)
        try:
            check_parts(config)
            check_final_suites(config)
        except UsageError as error:
            hint = ""
            if {"task", "criterion"} <= definition.grid.keys():
                hint = "; a grid combines all values, and --objective A,B each with its own task"
            raise UsageError(f"{_name_of(run, stage)}: {error}{hint}") from error
