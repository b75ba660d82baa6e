"""The plan of a sweep: its runs that never started, and the stage that has the score.

`metaseq-lm sweep` writes `sweep.json` into its folder: the runs, each with its stages in order and
their folders. The last stage has the score; the cost of earlier ones is part of its results.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.registry import nearest
from metaseq_lm.reporting.folders import find_runs, is_run, read_run, run_folders
from metaseq_lm.reporting.runs import Run

FILE = "sweep.json"
LEVELS_ABOVE = 2  # how far above a folder its sweep is looked for


@dataclass(frozen=True)
class Planned:
    """A run of a sweep: its name and, in order, the names and run folders of its stages."""

    name: str
    stages: dict[str, Path]


def find_plan(paths: Iterable[str | Path]) -> list[Planned]:
    """Return the runs that the sweeps at or above `paths` planned; none where there is no sweep.

    Archives have no plan.
    """
    files: dict[Path, None] = {}
    for path in (Path(path).resolve() for path in paths):
        if path.is_file():
            continue
        folders = (path, *path.parents[:LEVELS_ABOVE])
        files.update({f / FILE: None for f in folders if (f / FILE).is_file()})
    return [planned for file in files for planned in read_plan(file)]


def read_plan(path: Path) -> list[Planned]:
    """Return the planned runs of a sweep.json; raises MetaseqError if it is damaged.

    Entries without stages or folders are left out.
    """
    try:
        sweep = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise MetaseqError(
            f"{path}: not readable as JSON ({error}). Delete it and start the sweep again."
        ) from error
    planned = []
    for run in dicts(sweep.get("runs") if isinstance(sweep, dict) else None):
        stages = {}
        for stage in dicts(run.get("stages")):
            if stage.get("folder"):
                folder = (path.parent / str(stage["folder"])).resolve()
                stages[str(stage.get("name") or folder.name)] = folder
        if stages:
            planned.append(
                Planned(str(run.get("name") or run.get("folder") or next(iter(stages))), stages)
            )
    return planned


def dicts(value: Any) -> list[dict[str, Any]]:
    """Return the dicts in a list, and none for another JSON value."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def read_runs(paths: Iterable[str | Path]) -> list[Run]:
    """Read the runs at or below `paths`, and those of a sweep wherever it put them.

    Raises as `find_runs` does, except that a sweep may have no run yet.
    """
    places: list[Path] = []
    for path in map(Path, paths):
        is_sweep = (path / FILE).is_file()
        if not is_sweep or any(run_folders(path)):
            places.append(path)
        if not is_sweep:
            continue
        planned = (folder for run in read_plan(path / FILE) for folder in run.stages.values())
        places += [folder for folder in planned if is_run(names_in(folder))]
    return find_runs(places)


def pick_stage(
    runs: Sequence[Run], plan: Sequence[Planned], paths: Sequence[str | Path], stage: str | None
) -> tuple[list[Run], list[str]]:
    """Return the runs of one stage and those of no sweep, and notes on hidden and missing runs.

    `stage` is None for the last one. Raises UsageError for an unknown stage.
    """
    names = list(dict.fromkeys(name for planned in plan for name in planned.stages))
    if stage is not None and stage not in names:
        known = f"Stages: {', '.join(names)}." if names else f"There is no {FILE}."
        raise UsageError(f"--stage: no stage '{stage}'.{nearest(stage, names)} {known}")
    wanted: set[Path] = set()
    others: dict[Path, str] = {}
    for planned in plan:
        shown = stage if stage is not None else list(planned.stages)[-1]
        wanted |= {folder for name, folder in planned.stages.items() if name == shown}
        others |= {folder: name for name, folder in planned.stages.items() if name != shown}
    # A path without a run of the stage below it, like the folder of an earlier stage, is taken as it is.
    meant = [
        root
        for root in (Path(path).resolve() for path in paths)
        if not (root / FILE).is_file() and not any(f.is_relative_to(root) for f in wanted)
    ]
    kept, hidden = [], dict.fromkeys(names, 0)
    for run in runs:
        is_other = run.path in others and run.path not in wanted
        if is_other and not any(run.path.is_relative_to(root) for root in meant):
            hidden[others[run.path]] += 1
        else:
            kept.append(run)
    notes = missing(plan, runs)
    for name, count in hidden.items():
        runs_of = f"{count} run{'s' * (count > 1)} of the stage {name}"
        notes += [f"Not in the table: {runs_of} (--stage {name})."] * (count > 0)
    return kept, notes


def missing(plan: Sequence[Planned], runs: Sequence[Run]) -> list[str]:
    """Return a note for each planned run or stage that never started, with the reason if known."""
    known = {run.path: run for run in runs}
    lines = []
    for planned in plan:
        started = {name: f for name, f in planned.stages.items() if is_run(names_in(f))}
        never = [name for name in planned.stages if name not in started]
        if not started:
            lines.append(f"Missing: {planned.name} (never started).")
        elif never:
            started_runs = {name: known.get(f) or read_run(f) for name, f in started.items()}
            ends = [
                f"stage {name} {why}"
                for name, r in started_runs.items()
                if (why := r.why_unended())
            ]
            reason = "; ".join(["never started", *ends])
            lines.append(f"Missing: {planned.name}, stage {', '.join(never)} ({reason}).")
    return lines


def names_in(folder: Path) -> list[str]:
    """Return the names of the files in a folder, none where there is no folder."""
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []
