"""Results of suites in a run folder: `suites/NAME/update_000000500.json`, a file per checkpoint.

A file names the checkpoint by its update and the hash of its weights, so that a reader can
distinguish the results of a run's last checkpoint from other results.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from metaseq_lm.config.entries import SuiteEntry, read_entry
from metaseq_lm.core import files
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import (
    NUMBER,
    as_numbers,
    check_folder,
    is_altered,
    read_json,
    schema_error,
)
from metaseq_lm.runs import manifests
from metaseq_lm.runs.records import write_record

FOLDER = "suites"
FORMAT = "metaseq-lm suite results 1"
OVERALL = "overall"
COUNT, HITS = "n", "hits"
LM_EVAL = "lm_eval"  # suites of lm-evaluation-harness are called lm_eval/TASK
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_SPLITS = ("train", "valid", "test")
# Content of a file, see `schema_error`.
_FORM = {
    "format": str,
    "suite": str,
    "name": str,
    "update": files.COUNT,
    "weights": str,
    "data": str,
    "options": dict,
    "groups": {"*": {COUNT: files.COUNT, "metrics": {"*": NUMBER}, f"{HITS}?": [files.COUNT]}},
    "references?": {"*": {"*": NUMBER}},
    "facts?": dict,
}


@dataclass(frozen=True)
class SuiteResults:
    """The results of a suite for one checkpoint.

    Attributes:
        name: Their name in reports: the name of the suite, unless the user gave another.
        suite: The name of the suite.
        update: The update of the checkpoint.
        weights: A hash of its weights, see `manifests.hash_of_weights`.
        data: A hash of the files that were read.
        options: What else the results depend on: the options of the suite, the precision, the
            treatment of sentences that were too long.
        groups: For each group of items (all of them are group OVERALL), their number "n", their
            "metrics" by name, and for an accuracy "hits", the right answers by block of items.
        facts: Further records, such as the cost of scoring.
        references: Values such as "chance" that metrics are compared with, by METRIC or
            GROUP.METRIC.
    """

    name: str
    suite: str
    update: int
    weights: str
    data: str
    options: Mapping[str, Any]
    groups: Mapping[str, Mapping[str, Any]]
    facts: Mapping[str, Any]
    references: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def code(self) -> str | None:
        """The hash of the code that scored the suite; None if it is not recorded."""
        code = self.facts.get("code")
        return code if isinstance(code, str) else None

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The metrics by their names in reports: `NAME.METRIC` (all items), `NAME.GROUP.METRIC`."""
        flat: dict[str, float] = {}
        for group, content in self.groups.items():
            prefix = self.name if group == OVERALL else f"{self.name}.{group}"
            for metric, value in content["metrics"].items():
                flat[f"{prefix}.{metric}"] = float(value)
            flat[f"{prefix}.{COUNT}"] = float(content[COUNT])
        return flat

    def record(self) -> dict[str, Any]:
        """Return the results as a JSON object; `parse` is the inverse."""
        return {"format": FORMAT, **{item.name: getattr(self, item.name) for item in fields(self)}}


def default_name(suite: str) -> str:
    """Return the name of the results of a suite, such as "glue-RTE" of glue/RTE."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", suite)


def entry_name(item: str | Mapping[str, Any]) -> str:
    """Return the name of the results of an entry of trainer.final_suites.

    "" for an entry of another form, which `training.suites.request_of` refuses.
    """
    try:
        entry = read_entry(item, SuiteEntry)
    except UsageError:
        return ""
    return entry.name or default_name(entry.suite)


def check_name(name: str) -> None:
    """Raise UsageError for a name that no file can have, or the name of a split."""
    if not NAME.fullmatch(name):
        raise UsageError(f"--name {name!r}: letters, digits, '_' and '-' only")
    if name in _SPLITS:
        raise UsageError(f"--name {name}: reports call the metrics of a split so; choose another")


def parse(record: dict[str, Any]) -> SuiteResults:
    """Return the results in a JSON object; ValueError if it is of another form."""
    if problem := schema_error(record, _FORM, "it"):
        raise ValueError(problem)
    if record["format"] != FORMAT:
        raise ValueError(f"its format is {record['format'][:40]!r}, not {FORMAT!r}")
    if not NAME.fullmatch(record["name"]):
        raise ValueError("its name is no name of results")
    return SuiteResults(
        record["name"],
        record["suite"],
        record["update"],
        record["weights"],
        record["data"],
        record["options"],
        record["groups"],
        record.get("facts") or {},
        record.get("references") or {},
    )


def run_folder_of(checkpoint: Path) -> Path | None:
    """Return the run folder that contains a checkpoint; None if there is none."""
    for folder in checkpoint.resolve().parents[:2]:
        if (folder / "config.yaml").is_file():
            return folder
    return None


def write(run: Path, results: SuiteResults) -> Path:
    """Write results into a run folder; they replace results of the same name and checkpoint.

    Returns:
        The path of the file.
    """
    file = file_of(run, results)
    check_folder(file.parent, run)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_record(file, results.record(), indent=1)
    return file


def file_of(run: Path, results: SuiteResults) -> Path:
    """Return the path of the file with results in a run folder."""
    folder = run / FOLDER / results.name
    return folder / f"{manifests.folder_of(folder, results.update).name}.json"


def read_all(run: Path) -> tuple[list[SuiteResults], list[str]]:
    """Return all results in a run folder by name and update, and notes on altered files.

    Raises:
        MetaseqError: A file is damaged.
    """
    results, notes = [], []
    for file in sorted((run / FOLDER).glob(f"*/{manifests.PREFIX}*.json")):
        try:
            record = read_json(file)
            if is_altered(record):
                notes.append(f"{file.relative_to(run)} was changed after it was written")
            numbers = as_numbers({key: record.get(key) for key in ("groups", "references")})
            results.append(parse(record | numbers))
        except (OSError, ValueError) as error:
            raise MetaseqError(
                f"{file}: not readable as results of a suite ({error}). Delete it and score the "
                "run again."
            ) from error
    return results, notes


def of_last_checkpoint(run: Path) -> tuple[list[SuiteResults], list[str]]:
    """Return the results for the checkpoint that `score RUN` would use, and notes.

    It uses the best checkpoint, else the last, as for the final metrics of a run. Results for other
    checkpoints are left out; a note names each suite that has only such results.
    """
    results, notes = read_all(run)
    current = current_checkpoint(run)
    chosen = []
    for name in dict.fromkeys(result.name for result in results):
        named = [result for result in results if result.name == name]
        updates = ", ".join(str(result.update) for result in named)
        if current is None:
            newest = max(named, key=lambda result: result.update)
            notes.append(
                f"{name} is of update {newest.update}; that this is the checkpoint the run ended "
                "with cannot be checked, because its checkpoints are gone"
            )
            chosen.append(newest)
            continue
        fitting = [result for result in named if (result.update, result.weights) == current]
        chosen += fitting
        if not fitting:
            notes.append(
                f"{name} was scored at update {updates}, not at the checkpoint that this report is "
                f"of (update {current[0]}), and is left out; score the run again"
            )
    return chosen, notes


def current_checkpoint(run: Path) -> tuple[int, str] | None:
    """Return update and hash of the best checkpoint of a run, else of the last; None if gone."""
    try:
        manifest = manifests.read_manifest(manifests.resolve(str(run), prefer="best"))
    except manifests.CheckpointError:
        return None
    return manifest["update"], manifests.hash_of_weights(manifest)
