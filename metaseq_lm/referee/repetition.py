"""Runs of a league that are drawn at random and trained again, in a contained process.

They are ordinary sweeps in OUT/runs/PHASE/OBJECTIVE, trained from the plan, not from what the
archive says of them. OUT/league has what the process reads: the plan and the drawn runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import to_json, write_atomic
from metaseq_lm.league.assembly import LeagueRuns, read_league, write_archive
from metaseq_lm.league.expansion import (
    BUDGET,
    FINAL,
    PHASES,
    TUNE,
    UNTRAINED,
    DataSource,
    LeagueSweep,
    build_sweep,
)
from metaseq_lm.league.plan import FOLDERS, Objective, budget_text
from metaseq_lm.league.runner import LeagueRequest, Runner
from metaseq_lm.referee import containment
from metaseq_lm.reporting.runs import Run
from metaseq_lm.runs.folder import add_source
from metaseq_lm.sweeps.expansion import PlannedRun as Planned
from metaseq_lm.sweeps.folder import SweepFolder
from metaseq_lm.sweeps.job import Code
from metaseq_lm.sweeps.launching import OPEN, adopt, run_locally
from metaseq_lm.sweeps.options import Launch
from metaseq_lm.sweeps.submit import RunBatch
from metaseq_lm.sweeps.trials import Values

LOG, EXAMINED = "runs.log", "examined.json"
_PACKAGE, _PLAN = "metaseq_lm", "plan.yaml"
_FINALS = 2  # final runs of a drawn row; the other phases have one


def draw(league: LeagueRuns, rows: int, seed: int) -> list[Run]:
    """Return runs to train again: of each drawn row one of each phase, and two final ones.

    Runs that did not finish are left out.
    """
    rng, drawn = np.random.default_rng(seed), list[Run]()
    candidates = [row for row in league.rows() if row.scored]
    for i in rng.permutation(len(candidates))[:rows]:
        row = candidates[i]
        objective, tuned = league.plan.objective(row.objective), league.plan.tuning
        of_phase = {phase: league.of(objective, phase, row.budget) for phase in PHASES}
        of_phase[UNTRAINED] = league.of(objective, UNTRAINED)
        of_phase[TUNE] = league.of(objective, TUNE, tuned.nearest(row.budget))
        for phase in PHASES:
            runs = [run for run in of_phase[phase] if run.status == "finished"]
            count = min(len(runs), _FINALS if phase == FINAL else 1)
            drawn += [runs[j] for j in rng.choice(len(runs), count, replace=False)]
    return list(dict.fromkeys(drawn))


def repeat(
    league: LeagueRuns,
    drawn: Sequence[Run],
    source: DataSource,
    out: Path,
    parallel: int = 1,
    code: Path | None = None,
) -> dict[Run, Path]:
    """Train drawn runs again in a contained process; return their folders.

    The process can read the data, the plan, the drawn runs and the plug-in.

    Raises:
        MetaseqError: The process failed, or cannot be contained here.
    """
    folder, read = out / "runs", out / "league"
    for path in (folder, read):
        path.mkdir(parents=True, exist_ok=True)
    archive = read / Path(_PLAN).with_suffix(".jsonl.gz")
    archive.unlink(missing_ok=True)  # with the runs of another draw
    write_archive(archive, replace(league, runs=tuple(drawn)))
    content = dict(league.contents.content)
    write_atomic(read / _PLAN, OmegaConf.to_yaml(content).encode())
    request: dict[str, Any] = {"league": str((read / _PLAN).resolve())}
    request |= {"data": str(source.data.resolve())}
    request |= {"user_dir": source.user_dir, "parallel": parallel, "code": code and str(code)}
    file = folder / "request.json"
    write_atomic(file, to_json(request).encode())
    plug_in = [source.user_dir] if source.user_dir else []
    paths = [*league.contents.plan.data.get(FOLDERS, ()), *plug_in]
    start_code = "from metaseq_lm.cli.jobs import repeat; repeat(sys.argv[1])"
    # Earlier calls wrote into the same log.
    log = out / LOG
    start = log.stat().st_size if log.exists() else 0
    is_foreign = bool(source.user_dir or code)
    readable = [source.data, read, *map(Path, paths)]
    if containment.run(start_code, [str(file.resolve())], folder, readable, log, is_foreign):
        lines = log.read_bytes()[start:].decode(errors="replace").splitlines()
        reason = next((x for x in lines[::-1] if x.startswith("metaseq-lm: ")), "")
        raise MetaseqError(f"the runs were not trained again: see {log}. {reason}".strip())
    repeated = _plan(league, drawn, source, folder)
    return {run: sweep.folder / planned.folder for run, sweep, planned in repeated}


def take_code(source: Path, drawn: Sequence[Run], user_dir: str | None, out: Path) -> Path:
    """Copy the package from a checkout or a wheel; return the folder of the copy.

    Raises UsageError if it is not the code that trained the drawn runs.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    if source.is_file():
        with zipfile.ZipFile(source) as wheel:
            names = [name for name in wheel.namelist() if name.startswith(f"{_PACKAGE}/")]
            wheel.extractall(out, names)
    else:
        shutil.copytree(
            source / _PACKAGE, out / _PACKAGE, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
        )
    digest = hashlib.sha256()
    add_source(digest, out / _PACKAGE)
    if user_dir:
        add_source(digest, Path(user_dir))
    if codes_of(drawn) != [digest.hexdigest()[:16]]:
        raise UsageError(
            f"{source}: its code is {digest.hexdigest()[:16]}, that of the drawn runs "
            f"{', '.join(codes_of(drawn))}"
        )
    return out.resolve()


def codes_of(runs: Sequence[Run]) -> list[str]:
    """Return the hashes of the code of runs."""
    return sorted({str(run.recorded.get("code")) for run in runs})


def _plan(
    league: LeagueRuns, drawn: Sequence[Run], source: DataSource, folder: Path
) -> list[tuple[Run, LeagueSweep, Planned]]:
    """Return drawn runs with the sweeps that repeat them, and the run there."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in drawn:
        phase, owner, _ = run.path.parts[-3:]
        groups.setdefault((phase, owner), []).append(run)
    repeated = []
    for (phase, owner), runs in groups.items():
        objective = league.plan.objective(owner)
        settings = [_setting_of(run, objective, phase) for run in runs]
        values = [] if phase == UNTRAINED else settings
        # Sweeps follow from the plan; only the values of tuned options are those of the runs.
        sweep = build_sweep(league.plan, objective, phase, values, source, folder)
        planned: dict[tuple[Any, ...], Planned] = {
            (item.seed, *item.values.items()): item for item in sweep.runs
        }
        for run, setting in zip(runs, settings):
            repeated.append((run, sweep, planned[(run.seed, *setting.items())]))
    return repeated


def _setting_of(run: Run, objective: Objective, phase: str) -> Values:
    """Return the values of the options that distinguish the runs of a sweep."""
    if phase == UNTRAINED:
        return {}
    tuned = {key: run.values[key] for key in objective.grid}
    return {BUDGET: budget_text(float(run.values[BUDGET])), **tuned}


def train_again(request: Mapping[str, Any], folder: Path) -> None:
    """Train the runs of a request of `repeat`; this runs in the contained process.

    Criterions are examined first; what is found against them goes into FOLDER/examined.json.
    """
    league = read_league(Path(request["league"]))
    drawn = league.runs
    source = DataSource(Path(request["data"]), request["user_dir"])
    launch = Launch(max_parallel=request["parallel"])
    refused: dict[str, str] = {}
    names = list(dict.fromkeys(run.path.parts[-2] for run in drawn))
    for objective in map(league.plan.objective, names):
        budgets = league.plan.ladder.budgets[:1]
        request_of_one = LeagueRequest((objective,), budgets, source)
        runner = Runner(league.plan, request_of_one, folder, launch, league.contents.plan.hash)
        try:
            runner.examine_all()
        except UsageError as error:
            refused[objective.name] = str(error)
    write_atomic(folder / EXAMINED, to_json(refused).encode())
    by_sweep: dict[Path, tuple[LeagueSweep, list[Planned]]] = {}
    for _, sweep, planned in _plan(league, drawn, source, folder):
        by_sweep.setdefault(sweep.folder, (sweep, []))[1].append(planned)
    with contextlib.ExitStack() as stack:
        batches = []
        code = request["code"] and Code(Path(request["code"]), request["user_dir"], None)
        for sweep, runs in by_sweep.values():
            sweep_folder = SweepFolder(sweep.folder)
            sweep_folder.path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(sweep_folder.lock())
            states = adopt(sweep_folder, sweep.definition, sweep.runs, launch)
            ready = {state.run for state in states if state.state in OPEN}
            todo = [run for run in runs if run.name in ready]
            if todo:
                batches.append(RunBatch(sweep_folder, todo, code or runner.code(sweep_folder)))
        run_locally(batches, launch, lambda folder, run: None)
