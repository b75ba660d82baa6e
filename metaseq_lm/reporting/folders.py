"""Finding run folders, and the plan of a sweep.

`metaseq-lm sweep` writes `sweep.json` into its folder: the runs, each with its stages in order and
their folders. The last stage has the score; its results include the cost of earlier stages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metaseq_lm.core.errors import MetaseqError, UsageError, say
from metaseq_lm.core.files import LARGEST_SWEEP, is_altered, read_bounded, schema_error
from metaseq_lm.core.output import count_text
from metaseq_lm.core.registry import nearest
from metaseq_lm.reporting.runs import MEANS, Run, natural, read_run
from metaseq_lm.runs import suite_results

if TYPE_CHECKING:
    from metaseq_lm.sweeps.states import State

# Folders below a run that can hold copies of its config, but never a run.
SKIPPED_FOLDERS = ("checkpoints", "tb", suite_results.FOLDER)
SNAPSHOT = "code"  # in a sweep's run: a link to the code that it ran with
_SWEEP_FILE = "sweep.json"
# What a report needs of a league's file.
_LEAGUE = {"hash": str, "plan": {"comparison": {"means?": MEANS}}}
_LEVELS_ABOVE = 2  # levels above a folder that are searched for its sweep


def find_runs(paths: Iterable[str | Path]) -> list[Run]:
    """Read every run at or below `paths`, each once: archives first, then folders in natural order.

    Raises UsageError for a path that does not exist or holds no run, other than a sweep that has no
    run yet, and MetaseqError for a run that cannot be read.
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
        is_sweep = (path / _SWEEP_FILE).is_file()
        for planned in _read_plan(path / _SWEEP_FILE) if is_sweep else ():
            inside += filter(_has_run, planned.stages.values())
        if not inside and not is_sweep:
            raise UsageError(
                f"{path}: no runs found. A run folder holds config.yaml and log.jsonl, as "
                "'metaseq-lm train ... --save-dir RUN' writes them."
            )
        folders.update(dict.fromkeys(inside))
    for link in links:
        say(
            f"metaseq-lm: warning: {link} leads to {os.path.realpath(link)}, outside of the "
            "folder, and is no run: it is not searched; name it as well to report its runs"
        )
    in_folders = _without_copies(_with_means([read_run(folder) for folder in folders]))
    if not archives:
        return in_folders
    from metaseq_lm.reporting import archive

    # A run counts once, even if it is in several archives, or in its folder and in archives.
    archived: dict[str, Run] = {}
    for path in archives:
        for run in archive.read(path):
            archived.setdefault(run.fingerprint, run)
    in_both = {run.fingerprint for run in in_folders}
    return [*(run for key, run in archived.items() if key not in in_both), *in_folders]


def _with_means(runs: Sequence[Run]) -> list[Run]:
    """Return runs, those in the folder of a league with the means of its plan."""
    known: dict[Path, tuple[str, Mapping[str, Any]]] = {}
    read = []
    for run in runs:
        if run.plan and len(run.path.parents) > 2:  # LEAGUE/PHASE/OBJECTIVE/RUN
            file = run.path.parents[2] / "league.json"
            if file not in known:
                known[file] = _read_means(file)
            plan, means = known[file]
            if plan == run.plan:
                run = replace(run, means=means)
        read.append(run)
    return read


def _read_means(file: Path) -> tuple[str, Mapping[str, Any]]:
    """Return the hash of a league's plan and its means; warn of a damaged file."""
    try:
        content = json.loads(read_bounded(file, LARGEST_SWEEP))
        problem = schema_error(content, _LEAGUE)
        if problem or is_altered(content):
            raise ValueError(problem or "changed after a league wrote it")
        return content["hash"], content["plan"]["comparison"].get("means") or {}
    except FileNotFoundError:
        pass
    except (ValueError, RecursionError, OSError) as error:
        say(f"{file}: warning: damaged ({error}), so the means of its plan are not known")
    return "", {}


def _without_copies(runs: Sequence[Run]) -> list[Run]:
    """Return the runs without copies of ended runs; the run that stays names these in a note."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        key = str(run.path) if run.results is None else run.fingerprint
        groups.setdefault(key, []).append(run)
    remaining = []
    for run, *copies in groups.values():
        if copies:
            names = ", ".join(copy.name for copy in copies)
            run = replace(run, notes=(*run.notes, f"counts once; a copy of it is {names}"))
        remaining.append(run)
    return remaining


def run_folders(root: Path, links: dict[str, None]) -> Iterable[Path]:
    """Yield the resolved run folders at or below `root`, each once.

    A link that leads out of `root` counts if it leads to a run; other such links are added to
    `links` and not followed, since one could lead to /.
    """
    seen: set[str] = set()
    top = Path(os.path.realpath(root))
    for folder, children, files in os.walk(root, onerror=_raise_error, followlinks=True):
        children[:] = [d for d in children if d not in SKIPPED_FOLDERS and not d.startswith(".")]
        real = os.path.realpath(folder)
        if real in seen:
            children.clear()
            continue
        seen.add(real)
        outside = not Path(real).is_relative_to(top)
        if outside:
            children.clear()
        if _is_run(files):
            children[:] = [d for d in children if d != SNAPSHOT]
            yield Path(real)
        elif {"results.json", "log.jsonl"} <= set(files):
            say(f"{folder}: warning: a run without config.yaml, left out of the table")
        elif outside:
            links[folder] = None


def _is_run(files: Iterable[str]) -> bool:
    """Return whether a folder with these files is the folder of a started run."""
    names = set(files)
    # With command.txt but no log, the run died before its first line; the report names it.
    return "config.yaml" in names and bool(names & {"log.jsonl", "command.txt"})


def _has_run(folder: Path) -> bool:
    return folder.is_dir() and _is_run(path.name for path in folder.iterdir())


def _raise_error(error: OSError) -> None:
    """Raise the error, because os.walk alone would skip an unreadable folder."""
    raise error


# ---------------------------------------------------------------- sweeps


@dataclass(frozen=True)
class _Planned:
    """A run of a sweep: its name and, in order, the names and run folders of its stages.

    `state` is its state in `sweep status`, None if the sweep's files do not tell.
    """

    name: str
    stages: dict[str, Path]
    state: State | None = None

    @property
    def open_stage(self) -> str:
        """The stage that the state is about, "" without a state or if the run is finished."""
        if self.state is None or self.state.state == "finished":
            return ""
        names = [n for n in self.stages if n == self.state.stage or len(self.stages) == 1]
        return names[0] if names else ""


def find_plan(paths: Iterable[str | Path]) -> list[_Planned]:
    """Return the planned runs of the sweeps at or above `paths`; none without a sweep.

    Archives have no plan.
    """
    plan: list[_Planned] = []
    for file in sweep_files(paths):
        # Reports of no sweep need not import what runs them.
        from metaseq_lm.sweeps.folder import SweepFolder
        from metaseq_lm.sweeps.states import read_states

        planned, known = _read_plan(file), {}
        try:
            known = {state.run: state for state in read_states(SweepFolder(file.parent))}
        except MetaseqError as error:
            lost = "the report says less of runs without a score"
            say(f"metaseq-lm: warning: {lost}, because {error}")
        plan += [replace(item, state=known.get(item.name)) for item in planned]
    return plan


def sweep_files(paths: Iterable[str | Path]) -> list[Path]:
    """Return the files sweep.json in folders and up to LEVELS_ABOVE levels above, each once."""
    files: dict[Path, None] = {}
    for path in (Path(path).resolve() for path in paths):
        above = (path, *path.parents[:_LEVELS_ABOVE]) if not path.is_file() else ()
        files |= dict.fromkeys(folder / _SWEEP_FILE for folder in above)
    return [file for file in files if file.is_file()]


def _read_plan(path: Path) -> list[_Planned]:
    """Return the planned runs of a sweep.json; MetaseqError if it is damaged."""
    try:
        sweep = json.loads(read_bounded(path, LARGEST_SWEEP))
    except (ValueError, RecursionError) as error:
        raise MetaseqError(
            f"{path}: not readable as JSON ({error}). Delete it and start the sweep again."
        ) from error
    plan = []
    for run in _mappings_in(isinstance(sweep, dict) and sweep.get("runs")):
        stages = {}
        for stage in _mappings_in(run.get("stages")):
            if stage.get("folder"):
                folder = _stage_folder(path, str(stage["folder"]))
                stages[str(stage.get("name") or folder.name)] = folder
        if stages:
            name = str(run.get("name") or run.get("folder") or next(iter(stages)))
            plan.append(_Planned(name, stages))
    return plan


def _stage_folder(sweep: Path, name: str) -> Path:
    """Return a run folder named in sweep.json; MetaseqError if it is outside of the sweep."""
    if "\0" in name:
        raise MetaseqError(f"{sweep}: the run folder {name!r} is no path")
    root = sweep.parent.resolve()
    folder = Path(os.path.normpath(root / name))
    if not folder.is_relative_to(root):
        raise MetaseqError(
            f"{sweep}: the run folder {name!r} leads out of the sweep; name the folders of the "
            "runs themselves"
        )
    return folder.resolve()


def _mappings_in(value: Any) -> list[dict[str, Any]]:
    """Return the mappings in a list; [] for another JSON value."""
    return [x for x in value if isinstance(x, dict)] if isinstance(value, list) else []


def pick_stage(
    runs: Sequence[Run], plan: Sequence[_Planned], paths: Sequence[str | Path], stage: str | None
) -> tuple[list[Run], list[str]]:
    """Return the runs of one stage and runs of no sweep, and notes on hidden and missing runs.

    `stage` is None for the last one. Raises UsageError for an unknown stage.
    """
    names = list(dict.fromkeys(chain.from_iterable(planned.stages for planned in plan)))
    if stage is not None and stage not in names:
        known = f"Stages: {', '.join(names)}." if names else f"There is no {_SWEEP_FILE}."
        raise UsageError(f"--stage: no stage '{stage}'.{nearest(stage, names)} {known}")
    selected: set[Path] = set()
    others: dict[Path, str] = {}
    open_states: dict[Path, str] = {}
    for planned in plan:
        shown = stage if stage is not None else list(planned.stages)[-1]
        for name, folder in planned.stages.items():
            if name == shown:
                selected.add(folder)
            else:
                others[folder] = name
        if planned.state and planned.open_stage:
            open_states[planned.stages[planned.open_stage]] = planned.state.text
    # All runs below a path without a run of the shown stage are shown. The folder of an earlier
    # stage is such a path, that of a sweep never is.
    above = set[Path]().union(*((folder, *folder.parents) for folder in selected))
    roots = {Path(path).resolve() for path in paths} - above
    roots = {root for root in roots if not (root / _SWEEP_FILE).is_file()}
    shown_runs, hidden = [], dict.fromkeys(names, 0)
    for run in runs:
        if run.path in open_states:
            run = replace(run, state=open_states[run.path])
        is_other = run.path in others and run.path not in selected
        if is_other and roots.isdisjoint((run.path, *run.path.parents)):
            hidden[others[run.path]] += 1
        else:
            shown_runs.append(run)
    notes = _missing_notes(plan, runs)
    for name, count in hidden.items():
        if count:
            runs_of = f"{count_text(count, 'run')} of the stage {name}"
            notes.append(f"Not in the table: {runs_of} (--stage {name}).")
    return shown_runs, notes


def _missing_notes(plan: Sequence[_Planned], runs: Sequence[Run]) -> list[str]:
    """Return a note, with the reason if known, on each planned run or stage without a folder."""
    known = {run.path: run for run in runs}
    lines = []
    for planned in plan:
        started = {name: folder for name, folder in planned.stages.items() if _has_run(folder)}
        never = [name for name in planned.stages if name not in started]
        if not never or (planned.state and planned.state.state == "finished"):
            continue  # a stage that no other stage needs any more may have been deleted
        reasons = ["never started"]
        if planned.open_stage in never:
            assert planned.state is not None
            reasons = [planned.state.text]
        elif planned.state and planned.open_stage:
            reasons.append(f"stage {planned.open_stage} {planned.state.text}")
        else:
            for name, folder in started.items():
                if why := (known.get(folder) or read_run(folder)).why_unended():
                    reasons.append(f"stage {name} {why}")
        of_stages = f", stage {', '.join(never)}" * bool(started)
        lines.append(f"Missing: {planned.name}{of_stages} ({'; '.join(reasons)}).")
    return lines
