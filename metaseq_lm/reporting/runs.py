"""One run as reports see it: config, log, and results or the reason why there are none."""

import json
import math
import os
import re
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from metaseq_lm.core.config import TOP, flatten
from metaseq_lm.runs.suite_results import SuiteResults

# Options that make no setting: where a run is, and how it was logged and saved.
PATH_KEYS = ("save_dir", "user_dir")
LOGGING_OPTIONS = "log_interval save_interval_updates keep_last on_save_error final_splits"
BOOKKEEPING = tuple(f"trainer.{key}" for key in LOGGING_OPTIONS.split())


@dataclass(frozen=True, eq=False)
class Run:
    """One run folder: its resolved config, the lines of its log, its results if it has ended.

    `values` is the config with dotted keys, with `label` filled in and the configs of the runs that
    it names, such as that of init_from under `pretraining.`. `sources` are the keys that name them;
    `notes` says what had to be tolerated while reading. `state` is how a run of a sweep fares that
    has not finished, in words, "" if no sweep knows. `suites` are the results of suites for the
    checkpoint that the run ended with.
    """

    path: Path
    values: dict[str, Any] = field(repr=False)
    log: list[dict[str, Any]] = field(repr=False)
    results: dict[str, Any] | None = field(repr=False)
    notes: tuple[str, ...] = ()
    sources: frozenset[str] = frozenset()
    state: str = ""
    suites: tuple[SuiteResults, ...] = field(default=(), repr=False)

    @property
    def name(self) -> str:
        """The folder, relative to the working directory if it is below it."""
        return from_here(self.path)

    @property
    def seed(self) -> int | None:
        """The seed of the config."""
        return self.values.get("seed")

    @property
    def status(self) -> str:
        """finished, diverged, interrupted, failed, or unfinished if there is no results.json."""
        return "unfinished" if self.results is None else str(self.results.get("status", "unknown"))

    @property
    def last_update(self) -> int:
        """The last update that the log mentions; 0 for an empty log."""
        return max((line.get("update", 0) for line in self.log), default=0)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Final metrics by dotted name (`test.accuracy`), then those of suites (`blimp.accuracy`).

        Empty without results.
        """
        metrics = dict(self.final_metrics)
        for suite in self.suites if self.results is not None else ():
            for name, value in suite.metrics.items():
                metrics.setdefault(name, value)
        return metrics

    @cached_property
    def final_metrics(self) -> dict[str, float]:
        """The metrics of results.json by dotted name."""
        flat = flatten((self.results or {}).get("metrics") or {})
        return {name: float(value) for name, value in flat.items() if is_number(value)}

    def suite_of(self, metric: str) -> SuiteResults | None:
        """Return the results of the suite that a metric is of, None for a final metric."""
        if metric in self.final_metrics:
            return None
        return next((suite for suite in self.suites if metric in suite.metrics), None)

    @cached_property
    def losses(self) -> set[str]:
        """Names of terms of a loss, without the split; empty for a run from before they were kept."""
        return {str(name) for name in (self.results or {}).get("losses") or []}

    @cached_property
    def logged(self) -> list[str]:
        """Names of the numbers in the log (`train.loss`), in order of appearance."""
        names: dict[str, None] = {}
        for line in self.log:
            for key, value in line.items():
                if key != "update" and is_number(value):
                    names[f"{line['kind']}.{key}"] = None
        return list(names)

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """Return the updates, ascending, and the values that the log holds for `metric`."""
        kind, _, key = metric.partition(".")
        points = sorted(
            (line["update"], float(line[key]))
            for line in self.log
            if line["kind"] == kind and "update" in line and is_number(line.get(key))
        )
        return [update for update, _ in points], [value for _, value in points]

    @cached_property
    def outcome(self) -> str:
        """All final metrics and validations, but no times: equal where training computed the same."""
        if self.results is None:
            return str(self.path)
        validations = [
            {key: value for key, value in line.items() if key != "seconds"}
            for line in self.log
            if line["kind"] == "valid"
        ]
        updates = self.results.get("updates")
        return json.dumps([self.seed, updates, self.final_metrics, validations], sort_keys=True)

    def why_unended(self) -> str | None:
        """Return how this run ended, with its message, or None if it finished."""
        if self.state:
            return self.state
        if self.results is None:
            total = self.values.get("trainer.max_update")
            goal = f" of {total}" if total is not None else ""
            return f"not finished (no results.json; last logged update {self.last_update}{goal})"
        if self.status == "finished":
            return None
        code = self.results.get("exit_code")
        exited = f" (exit code {code})" if code else ""
        message = str(self.results.get("message") or "").strip().partition("\n")[0]
        detail = f": {shorten(message, 120).rstrip('.')}" if message else ""
        return f"{self.status} after {self.results.get('updates', '?')} updates{exited}{detail}"

    def why_unscored(self, metric: str) -> str | None:
        """Return why this run has no score of `metric`, or None if it has one."""
        unended = self.why_unended()
        if unended:
            return unended
        if metric not in self.metrics:
            return f"results.json has no {metric}"
        value = self.metrics[metric]
        return None if math.isfinite(value) else f"{metric} is {value}"

    def cost(self, name: str, own_only: bool = False) -> float | None:
        """Return the cost called `name`: with that of all ancestors, or the run's own.

        Args:
            name: "flops", "seconds", "peak_memory" (bytes) or "flops_by_rule".
            own_only: leave the ancestors out; "flops_by_rule" is known for the run itself only.

        Returns:
            The cost, None if a finite one is not on record.
        """
        results = self.results or {}
        parts: list[Any] = [results.get(name)]
        if not own_only and results.get("pretraining"):
            parts.append(results["pretraining"].get(name))
        known = [float(part) for part in parts if is_number(part) and math.isfinite(part)]
        return sum(known) if len(known) == len(parts) else None

    @property
    def was_pretrained(self) -> bool:
        """Whether another run's cost has to be added to this one's."""
        return bool((self.results or {}).get("pretraining"))


def is_number(value: Any) -> bool:
    """Return whether `value` is a float or an int that fits in one; a bool is not."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return isinstance(value, float)


def check_results(results: dict[str, Any]) -> None:
    """Raise ValueError unless the parts of results.json that are mappings or lists are."""
    for part, kind in (("metrics", dict), ("pretraining", dict), ("losses", list)):
        if not isinstance(results.get(part) or kind(), kind):
            raise ValueError(f"{part} is no {'mapping' if kind is dict else 'list'}")


def is_log_line(line: Any) -> bool:
    """Return whether `line` is one of a log: a mapping with a kind, and an update if it has one."""
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return False
    return isinstance(line.get("update", 0), int)


def bare_key(key: str) -> str:
    """Return a config key of an ancestor as that run had it: pretraining.data is data."""
    while "." in key and key.partition(".")[0] not in TOP:
        key = key.partition(".")[2]
    return key


def from_here(path: str | Path) -> str:
    """Return a path relative to the working directory if it is below it, else as it is."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def shorten(text: str, length: int) -> str:
    """Return a text of at most `length` characters, an ellipsis for what is cut off."""
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def natural(text: str) -> list[tuple[int, Any]]:
    """Return a sort key by which `seed10` comes after `seed9`."""
    return [(1, int(p)) if p.isdecimal() else (0, p) for p in re.split(r"(\d+)", text) if p]
