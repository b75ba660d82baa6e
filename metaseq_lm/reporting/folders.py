"""Finding and reading run folders, and the plan of a sweep.

A run folder holds `config.yaml`, `log.jsonl` and, once the run has ended, `results.json`. No run is
dropped: one without a score stays in the list and knows why it has none.

`metaseq-lm sweep` writes `sweep.json` into its folder: the runs, each with its stages in order and
their folders. The last stage has the score; the cost of earlier ones is part of its results.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from metaseq_lm.core.config import flatten
from metaseq_lm.core.errors import MetaseqError, UsageError, say
from metaseq_lm.core.files import (
    LARGEST_LOG,
    LARGEST_SWEEP,
    as_numbers,
    read_bounded,
)
from metaseq_lm.core.registry import nearest
from metaseq_lm.reporting import archive
from metaseq_lm.reporting.runs import Run, check_results, from_here, is_log_line, natural
from metaseq_lm.runs import folder as run_folder
from metaseq_lm.runs import suite_results

if TYPE_CHECKING:
    from metaseq_lm.sweeps.states import State

# Folders below a run that can hold copies of its config, never a run.
SKIPPED_FOLDERS = ("checkpoints", "tb", suite_results.FOLDER)
SNAPSHOT = "code"  # in a sweep's run: a link to the code that it ran with
SWEEP_FILE = "sweep.json"
TEXT_LINES = ("event", "samples")  # kinds of log lines whose values are texts
LEVELS_ABOVE = 2  # how far above a folder its sweep is looked for


def find_runs(paths: Iterable[str | Path]) -> list[Run]:
    """Read every run at or below `paths`, each once: archives first, then folders in natural order.

    Raises UsageError for a path that does not exist or holds no run, MetaseqError for a run that
    cannot be read.
    """
    folders: dict[Path, None] = {}
    links: dict[str, None] = {}
    archives: dict[Path, None] = {}
    for path in map(Path, paths):
        if path.is_file():
            archives[path.resolve()] = None
            continue
        if not path.is_dir():
            raise UsageError(
                f"{path}: no such folder. Give run folders, folders of runs, or archives of them."
            )
        inside = sorted(run_folders(path, links), key=lambda folder: natural(str(folder)))
        if not inside:
            raise UsageError(
                f"{path}: no runs found. A run folder holds config.yaml and log.jsonl, as "
                "'metaseq-lm train ... --save-dir RUN' writes them."
            )
        folders.update(dict.fromkeys(inside))
    for link in links:
        say(
            f"metaseq-lm: warning: {link} leads to {os.path.realpath(link)}, outside of the folder, and is no run: "
            "it is not searched; name it as well to report its runs"
        )
    # A run counts once even if it is in several folders, or in its folder and in archives.
    in_folders = once([read_run(folder) for folder in folders])
    seen = {archive.identity(run) for run in in_folders} if archives else set()
    archived: dict[str, Run] = {}
    for run in (run for path in archives for run in archive.read(path)):
        if (key := archive.identity(run)) not in seen:
            archived.setdefault(key, run)
    return [*archived.values(), *in_folders]


def once(runs: Sequence[Run]) -> list[Run]:
    """Return the runs without copies of ended ones, which the run that stays names in a note."""
    copies: dict[str, list[Run]] = {}
    for run in runs:
        is_ended = run.results is not None
        copies.setdefault(archive.identity(run) if is_ended else str(run.path), []).append(run)
    return [
        replace(run, notes=(*run.notes, f"counts once; a copy of it is {', '.join(names)}"))
        if (names := [copy.name for copy in others])
        else run
        for run, *others in copies.values()
    ]


def run_folders(root: Path, links: dict[str, None]) -> Iterable[Path]:
    """Yield the resolved run folders at or below `root`, each once.

    A link that leads out of `root` counts if it is one of a run; other such links are not followed
    (one could lead to /) and added to `links`.
    """
    seen: set[str] = set()
    top = Path(os.path.realpath(root))
    for folder, children, files in os.walk(root, onerror=raise_error, followlinks=True):
        children[:] = [d for d in children if d not in SKIPPED_FOLDERS and not d.startswith(".")]
        real = os.path.realpath(folder)
        if real in seen:
            children.clear()
            continue
        seen.add(real)
        outside = not Path(real).is_relative_to(top)
        if outside:
            children.clear()
        if is_run(files):
            children[:] = [d for d in children if d != SNAPSHOT]
            yield Path(real)
        elif {"results.json", "log.jsonl"} <= set(files):
            say(f"{folder}: warning: a run without config.yaml, left out of the table")
        elif outside:
            links[folder] = None


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
    log, results = read_log(folder / "log.jsonl", notes), read_results(folder / "results.json")
    for name in run_folder.altered_files(folder):
        notes.append(f"{name} was changed after the results were written")
    suites, remarks = suite_results.of_last_checkpoint(folder)
    notes += remarks
    return Run(folder, values, log, results, tuple(notes), frozenset(sources), suites=tuple(suites))


def read_values(
    folder: Path, notes: list[str], seen: tuple[Path, ...] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Return the flat config of a run with those of its ancestors, and the keys that name those.

    `seen` are the runs that led here: moved folders can name each other in a circle.
    """
    # Written resolved. References are not followed, since they could lead to a secret.
    content: Any = OmegaConf.to_container(run_folder.read_config(folder / "config.yaml"))
    values = flatten(content)
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


def read_log(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return the lines of a log; of two lines of one kind and update the later one.

    An incomplete last line, left by a killed process, is dropped and noted. Any other bad line is a
    MetaseqError with file and line number. A missing log counts as empty.
    """
    if not os.path.lexists(path):
        notes.append("no log.jsonl: the run ended before its first update was logged")
        return []
    try:
        rows = read_bounded(path, LARGEST_LOG).splitlines()
    except (OSError, ValueError) as error:
        raise MetaseqError(f"{path}: not a log: {error}") from error
    while rows and not rows[-1].strip():
        rows.pop()
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, row in enumerate(rows, start=1):
        try:
            line = json.loads(row)
        except (ValueError, RecursionError):
            line = None
        if is_log_line(line):
            is_event = line["kind"] == "event"
            key = (line["kind"], number) if is_event else (line["kind"], line.get("update", number))
            lines[key] = as_numbers(line) if line["kind"] not in TEXT_LINES else line
        elif number == len(rows):
            notes.append(f"log.jsonl:{number}: the last line is torn (killed?) and was left out")
        elif row.strip():
            raise MetaseqError(
                f"{path}:{number}: not a JSON object with a 'kind': {row[:60]!r}. "
                "Mend or delete that line."
            )
    return list(lines.values())


def read_results(path: Path) -> dict[str, Any] | None:
    """Return results.json, or None where there is none; raises MetaseqError if it is damaged."""
    if not path.exists():
        return None
    try:
        results = run_folder.parse_results(path)
        check_results(results)
        return results
    except ValueError as error:
        raise MetaseqError(
            f"{path}: not readable as results ({error}). Delete it and start the run again: it "
            "resumes and writes it anew."
        ) from error


# ---------------------------------------------------------------- sweeps


@dataclass(frozen=True)
class Planned:
    """A run of a sweep: its name and, in order, the names and run folders of its stages.

    `state` is what `sweep status` shows of it, None where the sweep's files do not tell.
    """

    name: str
    stages: dict[str, Path]
    state: State | None = None

    @property
    def open_stage(self) -> str:
        """The stage that the state is of, "" if there is none or the run is finished."""
        if self.state is None or self.state.state == "finished":
            return ""
        names = [n for n in self.stages if n == self.state.stage or len(self.stages) == 1]
        return names[0] if names else ""


def find_plan(paths: Iterable[str | Path]) -> list[Planned]:
    """Return the runs that the sweeps at or above `paths` planned; none where there is no sweep.

    Archives have no plan.
    """
    files: dict[Path, None] = {}
    for path in (Path(path).resolve() for path in paths):
        if path.is_file():
            continue
        folders = (path, *path.parents[:LEVELS_ABOVE])
        files.update({f / SWEEP_FILE: None for f in folders if (f / SWEEP_FILE).is_file()})
    return [planned for file in files for planned in with_states(file.parent, read_plan(file))]


def with_states(folder: Path, plan: list[Planned]) -> list[Planned]:
    """Return the planned runs of a sweep, each with the state that `sweep status` shows."""
    from metaseq_lm.sweeps.folder import SweepFolder
    from metaseq_lm.sweeps.states import states

    try:
        known = {state.run: state for state in states(SweepFolder(folder))}
    except MetaseqError as error:
        say(f"metaseq-lm: warning: the report says less of runs without a score, because {error}")
        return plan
    return [replace(planned, state=known.get(planned.name)) for planned in plan]


def read_plan(path: Path) -> list[Planned]:
    """Return the planned runs of a sweep.json; raises MetaseqError if it is damaged.

    Entries without stages or folders are left out.
    """
    try:
        sweep = json.loads(read_bounded(path, LARGEST_SWEEP))
    except (ValueError, RecursionError) as error:
        raise MetaseqError(
            f"{path}: not readable as JSON ({error}). Delete it and start the sweep again."
        ) from error
    planned = []
    for run in dicts(sweep.get("runs") if isinstance(sweep, dict) else None):
        stages = {}
        for stage in dicts(run.get("stages")):
            if stage.get("folder"):
                place = os.path.normpath(path.parent.resolve() / str(stage["folder"]))
                if not Path(place).is_relative_to(path.parent.resolve()):
                    raise MetaseqError(
                        f"{path}: the run folder {stage['folder']!r} leads out of the sweep; name the folders "
                        "of the runs themselves"
                    )
                folder = Path(place).resolve()
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
    """Read the runs at or below `paths`, and those of a sweep wherever they are.

    Raises as `find_runs` does, except that a sweep may have no run yet.
    """
    places: list[Path] = []
    for path in map(Path, paths):
        is_sweep = (path / SWEEP_FILE).is_file()
        if not is_sweep or any(run_folders(path, {})):
            places.append(path)
        if not is_sweep:
            continue
        planned = (folder for run in read_plan(path / SWEEP_FILE) for folder in run.stages.values())
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
        known = f"Stages: {', '.join(names)}." if names else f"There is no {SWEEP_FILE}."
        raise UsageError(f"--stage: no stage '{stage}'.{nearest(stage, names)} {known}")
    selected: set[Path] = set()
    others: dict[Path, str] = {}
    for planned in plan:
        shown = stage if stage is not None else list(planned.stages)[-1]
        selected |= {folder for name, folder in planned.stages.items() if name == shown}
        others |= {folder: name for name, folder in planned.stages.items() if name != shown}
    # A path without a run of the stage below it, like the folder of an earlier stage, is taken as it is.
    roots = [
        root
        for root in (Path(path).resolve() for path in paths)
        if not (root / SWEEP_FILE).is_file() and not any(f.is_relative_to(root) for f in selected)
    ]
    shown_runs, hidden = [], dict.fromkeys(names, 0)
    unended = {p.stages[p.open_stage]: p.state.text for p in plan if p.state and p.open_stage}
    for run in runs:
        run = replace(run, state=unended.get(run.path, ""))
        is_other = run.path in others and run.path not in selected
        if is_other and not any(run.path.is_relative_to(root) for root in roots):
            hidden[others[run.path]] += 1
        else:
            shown_runs.append(run)
    notes = missing(plan, runs)
    for name, count in hidden.items():
        runs_of = f"{count} run{'s' * (count > 1)} of the stage {name}"
        notes += [f"Not in the table: {runs_of} (--stage {name})."] * (count > 0)
    return shown_runs, notes


def missing(plan: Sequence[Planned], runs: Sequence[Run]) -> list[str]:
    """Return a note for each planned run or stage without a run folder, with the reason if known."""
    known = {run.path: run for run in runs}
    lines = []
    for planned in plan:
        started = {name: f for name, f in planned.stages.items() if is_run(names_in(f))}
        never = [name for name in planned.stages if name not in started]
        if not never or (planned.state and planned.state.state == "finished"):
            continue  # a stage that no other needs any more may have been deleted
        reasons = ["never started"]
        if planned.open_stage in never:
            assert planned.state is not None
            reasons = [planned.state.text]
        elif planned.state and planned.open_stage:
            reasons.append(f"stage {planned.open_stage} {planned.state.text}")
        else:
            ends = {n: (known.get(f) or read_run(f)).why_unended() for n, f in started.items()}
            reasons += [f"stage {name} {why}" for name, why in ends.items() if why]
        of_stages = f", stage {', '.join(never)}" * bool(started)
        lines.append(f"Missing: {planned.name}{of_stages} ({'; '.join(reasons)}).")
    return lines


def names_in(folder: Path) -> list[str]:
    """Return the names of the files in a folder, none where there is no folder."""
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []
