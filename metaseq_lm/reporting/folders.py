"""Finding and reading run folders.

A run folder holds `config.yaml`, `log.jsonl` and, once the run has ended, `results.json`. No run is
dropped: one without a score stays in the list and knows why it has none.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from metaseq_lm.core.config import flatten
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import read_json
from metaseq_lm.reporting import archive
from metaseq_lm.reporting.runs import Run, check_results, from_here, is_log_line, natural
from metaseq_lm.runs import folder as run_folder

# Folders below a run that can hold copies of its config, never a run.
SKIPPED_FOLDERS = ("checkpoints", "tb")


def find_runs(paths: Iterable[str | Path]) -> list[Run]:
    """Read every run at or below `paths`, each once: archives first, then folders in natural order.

    Raises UsageError for a path that does not exist or holds no run, MetaseqError for a run that
    cannot be read.
    """
    folders: dict[Path, None] = {}
    archives: dict[Path, None] = {}
    for path in map(Path, paths):
        if path.is_file():
            archives[path.resolve()] = None
            continue
        if not path.is_dir():
            raise UsageError(
                f"{path}: no such folder. Give run folders, folders of runs, or archives of them."
            )
        below = sorted(run_folders(path), key=lambda folder: natural(str(folder)))
        if not below:
            raise UsageError(
                f"{path}: no runs found. A run folder holds config.yaml and log.jsonl, as "
                "'metaseq-lm train ... --save-dir RUN' writes them."
            )
        folders.update(dict.fromkeys(below))
    runs = [read_run(folder) for folder in folders]
    # A run counts once even if it is in its folder and in archives.
    seen = {archive.content(run) for run in runs} if archives else set()
    kept = []
    for run in (run for path in archives for run in archive.read(path)):
        if archive.content(run) not in seen:
            seen.add(archive.content(run))
            kept.append(run)
    return kept + runs


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

    With command.txt but no log, the run died before its first line; the report names it.
    """
    names = set(files)
    return "config.yaml" in names and bool(names & {"log.jsonl", "command.txt"})


def raise_error(error: OSError) -> None:
    """Raise: os.walk alone would skip a folder that it may not read."""
    raise error


def read_run(folder: Path) -> Run:
    """Read one run folder; raises MetaseqError naming the file (and line) that is damaged."""
    notes: list[str] = []
    values, sources = read_values(folder, notes)
    log = read_log(folder / "log.jsonl", notes)
    results = read_results(folder / "results.json")
    return Run(folder, values, log, results, tuple(notes), frozenset(sources))


def read_values(
    folder: Path, notes: list[str], seen: tuple[Path, ...] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Return the flat config of a run with those of its ancestors, and the keys that name those.

    `seen` are the runs that led here: moved folders can name each other in a circle.
    """
    values = flatten(read_config(folder / "config.yaml"))
    names = [str(values[k]) for k in ("task._name", "criterion._name") if values.get(k)]
    label = str(values.pop("label", None) or "/".join(names) or folder.name)
    values = {"label": label, **values}
    if values.get("data"):
        values["data"] = from_here(str(values["data"]))
        values["data_hash"] = (read_results(folder / "results.json") or {}).get("data")
    named = run_folder.read_sources(folder)
    # The paths of several runs make no setting, their number does.
    lists = {key: name for key, name in named.items() if isinstance(values.get(key), list)}
    values |= {name: len(values[key]) for key, name in lists.items()}
    sources = [key for key in named if key in values]
    for key, name in named.items():
        start = values.get(key)
        if key in lists or not start:
            continue
        ancestor = find_start(folder, Path(str(start)))
        if ancestor is None or ancestor in seen:
            notes.append(
                f"{key} {start} is not found here, so its settings cannot be told from others"
            )
            values[f"{name}.label"] = "unknown"
            continue
        earlier, nested = read_values(ancestor, notes, (*seen, folder))
        values |= {f"{name}.{key}": value for key, value in earlier.items()}
        sources += [f"{name}.{key}" for key in nested]
    return values, sources


def find_start(folder: Path, start: Path) -> Path | None:
    """Return the run folder that `start` (a run, or a checkpoint in one) belongs to, or None.

    A relative path is relative to the working directory in which the run was trained: some folder
    above the run, or else the present working directory.
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
    # Written resolved. References are not followed, since they could lead to a secret.
    content = OmegaConf.to_container(run_folder.read_config(path))
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def read_log(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return the lines of a log; of two lines of one kind and update the later one.

    An incomplete last line, left by a killed process, is dropped and noted. Any other bad line is a
    MetaseqError with file and line number. A missing log counts as empty.
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
    return line if is_log_line(line) else None


def read_results(path: Path) -> dict[str, Any] | None:
    """Return results.json, or None where there is none; raises MetaseqError if it is damaged."""
    if not path.exists():
        return None
    try:
        results = read_json(path)
        check_results(results)
        return results
    except ValueError as error:
        raise MetaseqError(
            f"{path}: not readable as results ({error}). Delete it and start the run again: it "
            "resumes and writes it anew."
        ) from error
