"""Run folders, found and read.

A run folder holds `config.yaml`, `log.jsonl` and, once the run has ended, `results.json`. Nothing
that is found is dropped: a run without a score stays in the list and can say why it has none.
"""

import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from metaseq_lm.errors import MetaseqError, UsageError
from metaseq_lm.files import read_json
from metaseq_lm.run_folder import SOURCES

# Where a run is and what it started from by path say nothing about what it computed.
PATH_KEYS = ("save_dir", "user_dir", *SOURCES)
# The options that name a run whose config counts as well, and what stands before its keys.
BEHIND = {"init_from": "pretraining", "task.elmo": "language_model"}
# Nor does how it was looked at and kept.
BOOKKEEPING = tuple(
    f"trainer.{key}"
    for key in (
        "log_interval",
        "save_interval_updates",
        "keep_last",
        "on_save_error",
        "final_splits",
    )
)
# Folders below a run that can hold copies of its config, never a run.
SKIPPED_FOLDERS = ("checkpoints", "tb")


@dataclass(frozen=True, eq=False)
class Run:
    """One run folder: its resolved config, the lines of its log, its results if it has ended.

    `values` is the config with dotted keys, with `label` filled in and the config of the run it
    started from under `pretraining.`; `notes` says what had to be tolerated while reading.
    """

    path: Path
    values: dict[str, Any] = field(repr=False)
    log: list[dict[str, Any]] = field(repr=False)
    results: dict[str, Any] | None = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The folder as short as it can be written from here."""
        relative = os.path.relpath(self.path)
        return str(self.path) if relative.startswith("..") else relative

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
        """Final metrics by dotted name (`test.accuracy`); empty without results."""
        found = flatten((self.results or {}).get("metrics") or {})
        return {name: float(value) for name, value in found.items() if is_number(value)}

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

    def why_unended(self) -> str | None:
        """Return how this run ended if it did not finish, with the message it left, else None."""
        if self.results is None:
            total = self.values.get("trainer.max_update")
            goal = f" of {total}" if total is not None else ""
            return f"not finished (no results.json; last logged update {self.last_update}{goal})"
        if self.status == "finished":
            return None
        code = self.results.get("exit_code")
        exited = f" (exit code {code})" if code else ""
        message = str(self.results.get("message") or "").strip().partition("\n")[0]
        said = f": {shorten(message, 120).rstrip('.')}" if message else ""
        return f"{self.status} after {self.results.get('updates', '?')} updates{exited}{said}"

    def why_unscored(self, metric: str) -> str | None:
        """Return why this run does not count for `metric`, or None if it counts."""
        unended = self.why_unended()
        if unended:
            return unended
        if metric not in self.metrics:
            return f"results.json has no {metric}"
        value = self.metrics[metric]
        return None if math.isfinite(value) else f"{metric} is {value}"

    def cost(self, what: str, own: bool = False) -> float | None:
        """Return "flops", "seconds" or "peak_memory" (bytes), plus pretraining's unless `own`.

        None if the run did not record them; the pretraining's record is the sum of all before. It
        has no "flops_by_rule", which there is with `own` only.
        """
        results = self.results or {}
        parts: list[Any] = [results.get(what)]
        if not own and results.get("pretraining"):
            parts.append(results["pretraining"].get(what))
        known = [float(part) for part in parts if is_number(part)]
        return sum(known) if len(known) == len(parts) else None

    @property
    def was_pretrained(self) -> bool:
        """Whether another run's cost has to be added to this one's."""
        return bool((self.results or {}).get("pretraining"))


def is_number(value: Any) -> bool:
    """Return whether `value` is an int or a float; a bool is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def shorten(text: str, length: int) -> str:
    """Return a text of at most `length` characters, an ellipsis for what is cut off."""
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts under dotted keys; a list is a leaf."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def natural(text: str) -> list[tuple[int, Any]]:
    """Return a sort key by which `seed10` comes after `seed9`."""
    return [(1, int(p)) if p.isdecimal() else (0, p) for p in re.split(r"(\d+)", text) if p]


def find_runs(paths: Iterable[str | Path]) -> list[Run]:
    """Read every run at or below `paths`, each once, in natural order of the paths.

    Raises UsageError for a path that does not exist or holds no run, MetaseqError for a run that
    cannot be read.
    """
    folders: dict[Path, None] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise UsageError(f"{path}: no such folder. Give run folders or folders of runs.")
        found = sorted(run_folders(path), key=lambda folder: natural(str(folder)))
        if not found:
            raise UsageError(
                f"{path}: no runs found. A run folder holds config.yaml and log.jsonl, as "
                "'metaseq-lm train ... --save-dir RUN' writes them."
            )
        folders.update(dict.fromkeys(found))
    return [read_run(folder) for folder in folders]


def run_folders(root: Path) -> Iterable[Path]:
    """Yield the resolved run folders at or below `root`, behind links too, each once."""
    seen: set[str] = set()
    for folder, below, files in os.walk(root, onerror=raise_error, followlinks=True):
        below[:] = [d for d in below if d not in SKIPPED_FOLDERS and not d.startswith(".")]
        real = os.path.realpath(folder)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        if is_run(files):
            yield Path(folder).resolve()


def is_run(files: Iterable[str]) -> bool:
    """Return whether a folder with these files is that of a run that was started.

    command.txt without a log: the run died before its first line, and is named as such.
    """
    names = set(files)
    return "config.yaml" in names and bool(names & {"log.jsonl", "command.txt"})


def raise_error(error: OSError) -> None:
    """Raise; os.walk would pass over a folder that it may not read."""
    raise error


def read_run(folder: Path) -> Run:
    """Read one run folder; raises MetaseqError naming the file (and line) that is damaged."""
    notes: list[str] = []
    values = read_values(folder, notes)
    log = read_log(folder / "log.jsonl", notes)
    return Run(folder, values, log, read_results(folder / "results.json"), tuple(notes))


def read_values(folder: Path, notes: list[str], seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the flat config of a run, with its label and the configs of the runs behind it.

    `seen` are the runs that led here: folders that were moved about can name each other.
    """
    values = flatten(read_config(folder / "config.yaml"))
    names = [str(values[k]) for k in ("task._name", "criterion._name") if values.get(k)]
    label = str(values.pop("label", None) or "/".join(names) or folder.name)
    values = {"label": label, **values}
    if "task.teachers" in values:
        # Where they are does not count, but whether there are any does.
        values["teachers"] = len(values["task.teachers"] or [])
    for option, prefix in BEHIND.items():
        start = values.get(option)
        if not start:
            continue
        before = find_start(folder, Path(str(start)))
        if before is None or before in seen:
            notes.append(
                f"{option} {start} is not found here, so its settings cannot be told from others"
            )
            values[f"{prefix}.label"] = "unknown"
            continue
        earlier = read_values(before, notes, (*seen, folder))
        values |= {f"{prefix}.{key}": value for key, value in earlier.items()}
    return values


def find_start(folder: Path, start: Path) -> Path | None:
    """Return the run that `start` (a run, or a checkpoint in one) belongs to, or None.

    A relative path is meant from the working directory of the run: a folder above that of the run,
    wherever the tree is now, or else this working directory.
    """
    bases = [*folder.parents, Path.cwd()] if not start.is_absolute() else [Path("/")]
    for base in bases:
        place = (base / start).resolve()
        if not place.exists():
            continue
        for candidate in (place, *place.parents[:2]):
            if candidate != folder and (candidate / "config.yaml").is_file():
                return candidate
    return None


def read_config(path: Path) -> dict[str, Any]:
    """Return config.yaml as nested dicts; raises MetaseqError if it is not a YAML mapping."""
    from omegaconf import OmegaConf

    from metaseq_lm import run_folder

    # A run writes it resolved; a reference in it is not followed, it could lead to a secret.
    return OmegaConf.to_container(run_folder.read_config(path))  # type: ignore[return-value]


def read_log(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return the lines of a log; of two lines of one kind and update the later counts.

    A last line that a killed process left torn is dropped and noted; any other bad line is a
    MetaseqError with file and line number. A missing log is an empty one.
    """
    if not path.exists():
        notes.append("no log.jsonl: the run ended before its first update was logged")
        return []
    rows = path.read_bytes().splitlines()
    while rows and not rows[-1].strip():
        rows.pop()
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, row in enumerate(rows, start=1):
        line = parse_line(row)
        if line is not None:
            is_event = line["kind"] == "event"
            key = (line["kind"], number) if is_event else (line["kind"], line.get("update", number))
            kept[key] = line
        elif number == len(rows):
            notes.append(f"log.jsonl:{number}: the last line is torn (killed?) and was left out")
        elif row.strip():
            raise MetaseqError(
                f"{path}:{number}: not a JSON object with a 'kind': {row[:60]!r}. "
                "Mend or delete that line."
            )
    return list(kept.values())


def parse_line(row: bytes) -> dict[str, Any] | None:
    """Return one line of a log, or None if it is no JSON object with a kind (and update)."""
    try:
        line = json.loads(row)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return None
    return line if isinstance(line.get("update", 0), int) else None


def read_results(path: Path) -> dict[str, Any] | None:
    """Return results.json, or None where there is none; raises MetaseqError if it is damaged."""
    if not path.exists():
        return None
    try:
        results = read_json(path)
        for part in ("metrics", "pretraining"):
            if not isinstance(results.get(part) or {}, dict):
                raise ValueError(f"{part} is no mapping")
        return results
    except ValueError as error:
        raise MetaseqError(
            f"{path}: not readable as results ({error}). Delete it and start the run again: it "
            "resumes and writes it anew."
        ) from error
