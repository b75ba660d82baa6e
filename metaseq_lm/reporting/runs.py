"""`Run`: the config, log and results of one run, as reports use them.

A run folder holds `config.yaml`, `log.jsonl` and, once the run has ended, `results.json`.
"""

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from metaseq_lm.core.config import (
    GROUPS,
    TOP,
    EngineConfig,
    TrainerConfig,
    declaration,
    effect,
    flatten,
)
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.files import COUNT, FINITE, as_numbers, is_number, schema_error
from metaseq_lm.core.journal import Journal
from metaseq_lm.core.metric_names import CAUSAL_NLL, DETECTION, NLL
from metaseq_lm.core.options import DATA, LOSS, NOTHING, SPEED
from metaseq_lm.runs import folder as run_folder
from metaseq_lm.runs import suite_results
from metaseq_lm.runs.records import (
    PLAN_FILE,
    TRIAL_FILE,
    TUNING_FILE,
    read_plan_hash,
    read_trial,
    read_tuning,
)
from metaseq_lm.runs.suite_results import SuiteResults

_PAUSED = "pause_flops"  # the limit at which a search stops its trials
_MAX_WORDS = "trainer.max_words"
# The number of updates, and options that follow from it.
UPDATES = ("schedule.total_updates", "criterion.total_updates", "trainer.max_update")
# The kinds of terms by name, for runs that recorded no kinds.
_EARLIER_TERMS = {
    **dict.fromkeys(("next_token", "forward"), CAUSAL_NLL),
    **dict.fromkeys(("mlm", "backward"), NLL),
    "discriminator": DETECTION,
}
_LOG_LINE = {"kind": str, "update": COUNT}
MEANS = {"*": [str]}  # the form of `Run.means`
# Forms of the config's values that reports compute with, see `schema_error`.
_TYPES: dict[Any, Any] = {
    "int": int,
    "float": FINITE,
    "bool": bool,
    "bool | None": bool,
    "str": str,
    "list[str]": [str, ...],
    "list[Any]": [(str, dict), ...],  # entries, such as objectives
}
VALUES = {
    **{f"trainer.{item.name}": _TYPES[item.type] for item in fields(TrainerConfig)},
    **{f"engine.{item.name}": _TYPES[item.type] for item in fields(EngineConfig)},
    "seed": int,
    "label": str,
    "data": str,
    "task.objectives": [(str, dict), ...],
    "schedule.total_updates": COUNT,
}
# Further records of a run: the file of each, and its reader.
_RECORDS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "plan": (PLAN_FILE, read_plan_hash),
    "tuning": (TUNING_FILE, read_tuning),
    "trial": (TRIAL_FILE, read_trial),
}
_TEXT_LINES = ("event", "samples")  # kinds of log lines whose values are texts
# Kinds of log lines that an archive stores: all lines, and only the last line.
_ALL_LINES, _LAST_LINES = ("valid",), ("train", "samples")


def leaves_of(metric: str, means: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the non-mean metrics that a mean is computed from, each once; others themselves."""
    leaves, seen, ahead = [], set(), [metric]
    while ahead:
        name = ahead.pop()
        if name in means and name not in seen:
            ahead += reversed(means[name])
        elif name not in means:
            leaves.append(name)
        seen.add(name)
    return tuple(dict.fromkeys(leaves))


def _with_means(
    metrics: Mapping[str, float], means: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Return metrics with the means that have all of their parts, in the order of `means`."""
    values = {name: value for name, value in metrics.items() if name not in means}
    missing = dict(means)
    # A file may name a mean as a part of itself; that mean has no value.
    while ready := [name for name in missing if missing.keys().isdisjoint(missing[name])]:
        for name in ready:
            parts = [values[part] for part in missing.pop(name) if part in values]
            if len(parts) == len(means[name]):
                values[name] = math.fsum(parts) / len(parts)
    return {**metrics, **{name: values[name] for name in means if name in values}}


@dataclass(frozen=True, eq=False)
class Run:
    """A run folder: its resolved config, the lines of its log, and its results if it has ended.

    `values` is the config with dotted keys, with `label` filled in and the configs of runs that it
    names; the config of init_from is under `pretraining.`. `sources` are the keys that name such
    runs; `notes` lists the problems tolerated while reading. `state` describes an unfinished run of
    a sweep, "" if no sweep knows it. `suites` are the results of suites for the checkpoint that the
    run ended with. `means` are further metrics, each the mean of listed metrics, which may be means
    themselves. `plan` is the hash of the plan of the run's league, "" without a league. `tuning`
    describes how a search chose its options, `trial` which trial of a search it is; both are {} for
    other runs, see `runs.records`.
    """

    path: Path
    values: dict[str, Any] = field(repr=False)
    log: list[dict[str, Any]] = field(repr=False)
    results: dict[str, Any] | None = field(repr=False)
    notes: tuple[str, ...] = ()
    sources: frozenset[str] = frozenset()
    state: str = ""
    suites: tuple[SuiteResults, ...] = field(default=(), repr=False)
    means: Mapping[str, Sequence[str]] = field(default_factory=dict, repr=False)
    plan: str = ""
    tuning: Mapping[str, Any] = field(default_factory=dict, repr=False)
    trial: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """The run folder, relative to the working directory if it is inside it."""
        return relative_to_cwd(self.path)

    @property
    def seed(self) -> int | None:
        """The seed of the config."""
        return self.values.get("seed")

    @property
    def status(self) -> str:
        """finished, diverged, interrupted, failed, or unfinished without results.json."""
        return "unfinished" if self.results is None else str(self.results.get("status", "unknown"))

    @property
    def recorded(self) -> Mapping[str, Any]:
        """The content of results.json; {} without it."""
        return self.results or {}

    @property
    def last_update(self) -> int:
        """The last update in the log; 0 for an empty log."""
        return max((line.get("update", 0) for line in self.log), default=0)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Final metrics (`test.accuracy`), metrics of suites (`blimp.accuracy`), then `means`.

        Empty without results.
        """
        metrics = dict(self.final_metrics)
        for suite in self.suites if self.results is not None else ():
            for name, value in suite.metrics.items():
                metrics.setdefault(name, value)
        return _with_means(metrics, self.means)

    @cached_property
    def final_metrics(self) -> dict[str, float]:
        """The metrics in results.json by dotted name."""
        flat = flatten(self.recorded.get("metrics") or {})
        return {name: float(value) for name, value in flat.items() if is_number(value)}

    def parts_of(self, metric: str) -> Sequence[str]:
        """Return the metrics that one of `means` is computed from; any other metric itself."""
        return leaves_of(metric, self.means)

    def suite_of(self, metric: str) -> SuiteResults | None:
        """Return the results of the suite that has `metric`, None for a final metric."""
        if metric in self.final_metrics:
            return None
        return next((suite for suite in self.suites if metric in suite.metrics), None)

    @cached_property
    def losses(self) -> set[str]:
        """Names of the loss terms, without the split; empty for runs of early versions."""
        return {str(name) for name in self.recorded.get("losses") or []}

    @property
    def recorded_terms(self) -> Mapping[str, str]:
        """The recorded kinds of loss terms, see `core.batch.Term`."""
        return self.recorded.get("terms") or self.recorded.get("bounds") or {}

    @cached_property
    def terms(self) -> Mapping[str, str]:
        """The kinds of loss terms; runs of earlier versions have them by name."""
        if "terms" in self.recorded:
            return self.recorded_terms
        logged = set[str]().union(*(line for line in self.log if line["kind"] == "valid"))
        ends = {name: name.rpartition(".")[2] for name in logged}
        return {name: _EARLIER_TERMS[end] for name, end in ends.items() if end in _EARLIER_TERMS}

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
        """Return the updates, ascending, and the logged values of `metric`."""
        kind, _, key = metric.partition(".")
        points = []
        for line in self.log:
            if line["kind"] == kind and "update" in line and is_number(line.get(key)):
                points.append((line["update"], float(line[key])))
        points.sort()
        return [update for update, _ in points], [value for _, value in points]

    @property
    def samples(self) -> tuple[int, list[str]]:
        """The update and the texts of the last logged samples; (0, []) without samples."""
        for line in reversed(self.log):
            if line["kind"] == "samples" and isinstance(line.get("texts"), list):
                return line.get("update", 0), [x for x in line["texts"] if isinstance(x, str)]
        return 0, []

    @cached_property
    def identities(self) -> dict[str, tuple[str, Any]]:
        """The values of the config in a form for comparing and hashing, see `identity`.

        A number of updates that follows from a number of words, and so from the seed, is None.
        """
        values = dict(self.values)
        for key, words in self.values.items():
            prefix = key.removesuffix(_MAX_WORDS)
            updates = self.values.get(f"{prefix}trainer.max_update")
            for name in UPDATES if prefix != key and words else ():
                if values.get(prefix + name) == updates:
                    values[prefix + name] = None
        return {key: identity(value) for key, value in values.items()}

    def identity_of(self, key: str) -> tuple[str, Any]:
        """Return the value of a config key, as in `identities`, or its default."""
        if key not in self.identities:
            self.identities[key] = identity(self.value(key))
        return self.identities[key]

    @cached_property
    def compared_keys(self) -> list[str]:
        """The keys of the config by which settings may differ, in config order."""
        return [key for key in self.values if self.is_compared(key)]

    def is_compared(self, key: str) -> bool:
        """Return whether a key of the config affects results, and not only where or how."""
        is_left_out = key in self.sources or bare_key(key) in ("seed", "data_hash")
        return not is_left_out and self.effect(key) not in (SPEED, NOTHING)

    def effect(self, key: str) -> str:
        """Return what an option affects, see `core.options.option`."""
        bare = bare_key(key)
        prefix = key.removesuffix(bare)
        recorded = {} if prefix else self.recorded.get("effects")
        return effect(bare, self._class_names(prefix), recorded)

    def _class_names(self, prefix: str) -> dict[str, Any]:
        """Return the registered names, such as task._name, of the run or ancestor of a prefix."""
        keys = (f"{group}._name" for group in GROUPS)
        return {key: self.values.get(prefix + key) for key in keys}

    def determines_loss(self, key: str) -> bool:
        """Return whether a config key determines the function of the losses, or their rows."""
        is_known = key in self.values
        return key == "data_hash" or (is_known and self.effect(key) in (LOSS, DATA))

    @property
    def evaluates_as(self) -> str:
        """The criterion with the same function for evaluated losses, if declared, else its own."""
        named = self.recorded.get("evaluates_as")
        return str(named or self.values.get("criterion._name"))

    def value(self, key: str) -> Any:
        """Return the value of an option; its default if the run is older than the option."""
        if key in self.values:
            return self.values[key]
        bare = bare_key(key)
        prefix, section = key.removesuffix(bare), bare.rpartition(".")[0]
        item = declaration(bare, self._class_names(prefix))
        is_there = section and any(k.startswith(f"{prefix}{section}.") for k in self.values)
        if item is None or not is_there or "follows" in item.metadata:
            return None
        return item.default if item.default_factory is MISSING else item.default_factory()

    @cached_property
    def outcome(self) -> str:
        """The seed and the course: equal for runs with identical training."""
        return json.dumps([self.seed, self.course]) if self.results else str(self.path)

    @cached_property
    def course(self) -> str:
        """Updates, final metrics and validations without times; without results, the path."""
        if self.results is None:
            return str(self.path)
        # The seconds of a log differ from run to run on the same bits.
        validations = [dict(line) for line in self.log if line["kind"] == "valid"]
        for line in validations:
            line.pop("seconds", None)
        updates = self.results.get("updates")
        return json.dumps([updates, self.final_metrics, validations], sort_keys=True)

    def why_unended(self) -> str | None:
        """Return how this run ended, with its message, or None if it finished."""
        if self.state:
            return self.state
        if self.results is None:
            total = self.values.get("trainer.max_update")
            goal = f" of {total}" if total is not None else ""
            return f"not finished (no results.json; last logged update {self.last_update}{goal})"
        if self.status == "finished":
            updates, total = self.results.get("updates"), self.results.get("max_update")
            if self.results.get("stopped_by") != _PAUSED or updates == total:
                return None
            return f"stopped at a rung after {updates} of {total} updates"
        code = self.results.get("exit_code")
        exited = f" (exit code {code})" if code else ""
        message = str(self.results.get("message") or "").strip().partition("\n")[0]
        if len(message) > 120:
            message = message[:119].rstrip() + "…"
        detail = f": {message.rstrip('.')}" if message else ""
        return f"{self.status} after {self.results.get('updates', '?')} updates{exited}{detail}"

    def why_unscored(self, metric: str) -> str | None:
        """Return why this run has no score of `metric`, or None if it has one."""
        if unfinished := self.why_unended():
            return unfinished
        if metric not in self.metrics:
            return f"results.json has no {metric}"
        value = self.metrics[metric]
        return None if math.isfinite(value) else f"{metric} is {value}"

    @cached_property
    def costs(self) -> dict[str, float | None]:
        """Costs by name; None if no finite value is recorded.

        `flops`, `seconds` and `words` (of a corpus) include all ancestors. `own_flops`,
        `own_seconds`, `own_flops_by_rule` and `peak_memory` (bytes) exclude them; `tuning_flops` is
        the cost of the search for its options.
        """
        results = self.recorded
        costs = {
            "peak_memory": _finite_number(results.get("peak_memory")),
            "own_flops_by_rule": _finite_number(results.get("flops_by_rule")),
            "tuning_flops": _finite_number(self.tuning.get("flops")),
        }
        for name in ("flops", "seconds", "words"):
            total = _finite_number(results.get("words_seen" if name == "words" else name))
            if name != "words":
                costs[f"own_{name}"] = total
            if self.was_pretrained:
                before = _finite_number(results["pretraining"].get(name))
                total = None if total is None or before is None else total + before
            costs[name] = total
        return costs

    @property
    def was_pretrained(self) -> bool:
        """Whether the costs of other runs have to be added to this run's."""
        return bool(self.recorded.get("pretraining"))

    @cached_property
    def portable_values(self) -> dict[str, Any]:
        """The config without paths of the machine that trained the run."""
        config = {}
        for key, value in self.values.items():
            bare = bare_key(key)
            if key in self.sources or bare in ("save_dir", "user_dir"):
                continue
            if bare == "data" and value and Path(value).is_absolute():
                value = Path(value).name
            config[key] = value
        return config

    @property
    def portable_results(self) -> dict[str, Any] | None:
        """The results with the total cost of the ancestors, but not their paths."""
        ancestors = self.recorded.get("pretraining")
        if not self.results or not ancestors:
            return self.results
        costs = {key: value for key, value in ancestors.items() if key not in ("run", "runs")}
        return {**self.results, "pretraining": costs}

    @property
    def portable_log(self) -> list[dict[str, Any]]:
        """The logged validations, the last line of training and the last samples."""
        last = {line["kind"]: line for line in self.log if line["kind"] in _LAST_LINES}
        return [x for x in self.log if x["kind"] in _ALL_LINES or x is last.get(x["kind"])]

    @property
    def fingerprint(self) -> str:
        """A text that a run shares with its copies in archives."""
        values = {k: value for k, value in self.portable_values.items() if bare_key(k) != "data"}
        outcome = self.portable_results or self.portable_log
        return json.dumps([values, outcome], sort_keys=True)


# ---------------------------------------------------------------- reading


def read_run(folder: Path) -> Run:
    """Read a run folder; raises MetaseqError naming a damaged file (and line)."""
    notes: list[str] = []
    results = _read_results(folder / "results.json")
    values, sources = _read_values(folder, results, notes)
    log = _read_log(folder / "log.jsonl", notes)
    for name in run_folder.altered_files(folder):
        notes.append(f"{name} was changed after the results were written")
    # One listing in place of a look for each record, which most runs lack.
    names = set(os.listdir(folder))
    suites: list[SuiteResults] = []
    if suite_results.FOLDER in names:
        suites, remarks = suite_results.of_last_checkpoint(folder)
        notes += remarks
    return Run(
        folder,
        values,
        log,
        results,
        tuple(notes),
        frozenset(sources),
        suites=tuple(suites),
        **{key: read(folder) for key, (file, read) in _RECORDS.items() if file in names},
    )


def _read_values(
    folder: Path,
    results: dict[str, Any] | None,
    notes: list[str],
    descendants: tuple[Path, ...] = (),
) -> tuple[dict[str, Any], list[str]]:
    """Return the flat config of a run and its ancestors, and the keys that name the ancestors."""
    # config.yaml is written resolved. References are not followed, as they could reveal a secret.
    content: Any = run_folder.read_config(folder / "config.yaml")
    values = flatten(content)
    names = [str(values[key]) for key in ("task._name", "criterion._name") if values.get(key)]
    try:
        check_values(values)
    except ValueError as error:
        raise MetaseqError(f"{folder / 'config.yaml'}: not a readable config: {error}") from error
    label = str(values.pop("label", None) or "/".join(names) or folder.name)
    values = {"label": label, **run_folder.with_text_entries(values)}
    if values.get("data"):
        values["data"] = relative_to_cwd(str(values["data"]))
        values["data_hash"] = (results or {}).get("data")
    ancestor_names = run_folder.read_sources(folder)
    sources = [key for key in ancestor_names if key in values]
    # Settings differ by the number of runs in a list, not by their paths.
    lists = {key for key in ancestor_names if isinstance(values.get(key), list)}
    for key, name in ancestor_names.items():
        if key in lists:
            values[name] = len(values[key])
    for key, name in ancestor_names.items():
        start = values.get(key)
        if key in lists or not start:
            continue
        ancestor = _find_ancestor(folder, Path(str(start)))
        # Moved folders can form cycles of ancestors.
        if ancestor is None or ancestor in descendants:
            notes.append(
                f"{key} {start} is not found here, so its settings cannot be told from others"
            )
            values[f"{name}.label"] = "unknown"
            continue
        ancestor_results = _read_results(ancestor / "results.json")
        earlier, nested = _read_values(ancestor, ancestor_results, notes, (*descendants, folder))
        for ancestor_key, value in earlier.items():
            values[f"{name}.{ancestor_key}"] = value
        sources += [f"{name}.{ancestor_key}" for ancestor_key in nested]
    return values, sources


def _find_ancestor(folder: Path, start: Path) -> Path | None:
    """Return the run folder that `start` (a run, or a checkpoint in one) belongs to, or None."""
    # Training ran in some folder above the run, or else where this command runs.
    for base in [Path("/")] if start.is_absolute() else [*folder.parents, Path.cwd()]:
        path = (base / start).resolve()
        if not path.exists():
            continue
        for candidate in (path, *path.parents[:2]):
            if candidate != folder and (candidate / "config.yaml").is_file():
                return candidate
    return None


def _read_log(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return the lines of a log, only the later one if a kind and update occur twice.

    An incomplete last line, left by a killed process, is dropped and noted. Any other
    invalid line raises MetaseqError with file and line number. A missing log counts as empty.
    """
    if not os.path.lexists(path):
        notes.append("no log.jsonl: the run ended before its first update was logged")
        return []
    journal = Journal(path, log_problem, "Repair or delete that line")
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    try:
        for number, line in journal.rows():
            # It guards the line in the file, and is no logged value.
            line.pop("checksum", None)
            # Several events may happen at one update.
            place = number if line["kind"] == "event" else line.get("update", number)
            lines[line["kind"], place] = line
    except OSError as error:
        raise MetaseqError(f"{path}: not a log: {error}") from error
    if journal.torn:
        notes.append(
            f"log.jsonl:{journal.torn}: the last line is incomplete (run killed?) and was left out"
        )
    return with_numbers(list(lines.values()))


def with_numbers(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return log lines with strings such as "NaN" as numbers, except in lines of texts."""
    # 21, because the list is one level deeper than a line.
    numeric = iter(as_numbers([line for line in lines if line["kind"] not in _TEXT_LINES], 21))
    return [line if line["kind"] in _TEXT_LINES else next(numeric) for line in lines]


def _read_results(path: Path) -> dict[str, Any] | None:
    """Return results.json, None if it is missing; raises MetaseqError if it is damaged."""
    if not path.exists():
        return None
    try:
        return run_folder.parse_results(path)
    except ValueError as error:
        raise MetaseqError(
            f"{path}: not readable as results ({error}). Delete it and start the run again: it "
            "resumes and writes it anew."
        ) from error


def log_problem(line: Any, number: int = 0) -> str:
    """Return the problem of a log line, "" if there is none."""
    if isinstance(line, dict) and isinstance(line.get("kind"), str):
        update = line.get("update", 0)
        if type(update) is int and 0 <= update < 1 << 31:  # logs are long: most lines end here
            return ""
    return schema_error({"update": 0, **line} if isinstance(line, dict) else line, _LOG_LINE)


def check_values(values: Mapping[str, Any]) -> None:
    """Raise ValueError for a wrong type of a value that reports compute with.

    These values are options that every run has, and VALUES.
    """
    for key, value in values.items():
        bare = bare_key(key)
        is_checked = value is not None and bare in VALUES
        if is_checked and (problem := schema_error(value, VALUES[bare], key)):
            raise ValueError(problem)


# ---------------------------------------------------------------- keys and values of configs


def _finite_number(value: Any) -> float | None:
    """Return a finite number as a float, None for any other value."""
    return float(value) if is_number(value) and math.isfinite(value) else None


def identity(value: Any) -> tuple[str, Any]:
    """Return a hashable form of a config value for comparing: 1 equals 1.0, but not true."""
    if isinstance(value, str):
        return ("text", value)
    if is_number(value):
        return ("number", float(value))
    return ("other", json.dumps(value, sort_keys=True, default=str))


def bare_key(key: str) -> str:
    """Return a key without prefixes of ancestors, such as data for pretraining.data."""
    while "." in key and key.partition(".")[0] not in TOP:
        key = key.partition(".")[2]
    return key


def relative_to_cwd(path: str | Path) -> str:
    """Return a path relative to the working directory if it is inside it, else unchanged."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def natural(text: str) -> list[tuple[int, Any]]:
    """Return a sort key by which `seed10` comes after `seed9`."""
    parts = [part for part in re.split(r"(\d+)", text) if part]
    return [(1, int(part)) if part.isdecimal() else (0, part) for part in parts]
