"""Submissions: an objective with everything that others need to check it, in a folder.

DIR/submission.json    the plan's hash, the objective, hashes of all files
DIR/plan.yaml          the plan
DIR/plan.jsonl.gz      the runs of the objective, with their logs, and predictions
DIR/plugin/            the plug-in that they ran from, if any
DIR/versions.txt       the versions of all installed packages
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import check_folder, is_altered, read_json, schema_error, write_atomic
from metaseq_lm.core.output import present_time
from metaseq_lm.league.assembly import LeagueRuns, read_league, write_archive
from metaseq_lm.league.expansion import FINAL, PHASES, TUNE, UNTRAINED, label_of
from metaseq_lm.league.folder import ADDED_SCHEMA, Added
from metaseq_lm.runs.records import write_record
from metaseq_lm.sweeps.folder import SweepFolder

FILE = "submission.json"
FORMAT = "metaseq-lm submission 1"
PLAN, RUNS, VERSIONS, PLUGIN = "plan.yaml", "plan.jsonl.gz", "versions.txt", "plugin"
_FORM = {
    "format": str,
    "time": str,
    "plan": str,
    "objective": ADDED_SCHEMA,
    "runs": int,
    "files": {"*": str},
}


def write_submission(league: LeagueRuns, place: Path, name: str, out: Path) -> LeagueRuns:
    """Write the submission of an objective that was added to a league; return its league.

    An objective without runs may be submitted: it registers the attempt. Submitting it again adds
    its runs; with other options or another plug-in it would be another attempt.

    Args:
        league: The league.
        place: Its folder, or its plan.
        name: The name of the objective.
        out: The folder of the submission; one of the same objective is replaced.

    Raises:
        UsageError: No objective of this name was added, or `out` holds something else or another
            attempt.
    """
    added = next((x for x in league.contents.additions if x.name == name), None)
    if added is None:
        names = ", ".join(item.name for item in league.contents.additions) or "none"
        raise UsageError(f"{place}: no objective {name!r} was added to this league; added: {names}")
    source = _plugin_of(place, added)
    if source:
        added = replace(added, user_dir=f"{PLUGIN}/{source.name}")
    if out.exists() and any(out.iterdir()):
        _check_same_attempt(out, league, added, source)
    check_folder(out)
    if (out / PLUGIN).exists():
        shutil.rmtree(out / PLUGIN)
    out.mkdir(parents=True, exist_ok=True)
    if source:
        copy = out / PLUGIN / source.name
        copy.parent.mkdir()
        (shutil.copytree if source.is_dir() else shutil.copy)(source, copy)
    single = _only(league, added)
    plan = OmegaConf.to_yaml(dict(league.contents.content))
    write_atomic(out / PLAN, plan.encode())
    # An archive is not replaced by one that lacks some of its runs.
    (out / RUNS).unlink(missing_ok=True)
    write_archive(out / RUNS, single)
    packages = {f"{package.name}=={package.version}\n" for package in metadata.distributions()}
    write_atomic(out / VERSIONS, "".join(sorted(packages, key=str.lower)).encode())
    # Last, because it has the hashes of all other files.
    content = {
        "format": FORMAT,
        "time": present_time(),
        "plan": league.contents.plan.hash,
        "objective": added.record,
        "runs": len(single.runs),
        "files": _hashes(out, out),
    }
    write_record(out / FILE, content, indent=1)
    return single


def _check_same_attempt(out: Path, league: LeagueRuns, added: Added, source: Path | None) -> None:
    """Raise UsageError if a folder holds something else than an earlier state of a submission."""
    earlier = _read_submission(out)
    if (earlier["objective"]["name"], earlier["plan"]) != (added.name, league.contents.plan.hash):
        raise UsageError(f"{out}: holds another submission; choose another --out")
    plugin = _hashes(source, source.parent) if source else {}
    registered = _hashes(out / PLUGIN, out / PLUGIN)
    if earlier["objective"] != added.record or registered != plugin:
        raise UsageError(
            f"{out}: {added.name} was registered with other options or another plug-in; this is "
            "another attempt: give it another --name and --out"
        )


def _read_submission(folder: Path) -> dict[str, Any]:
    """Return the content of submission.json.

    Raises:
        UsageError: There is none.
        MetaseqError: It is damaged, or a file of the folder is not the one that it names.
    """
    file = folder / FILE
    try:
        content = read_json(file)
    except FileNotFoundError:
        raise UsageError(f"{folder}: no submission here (there is no {FILE})") from None
    except ValueError as error:
        raise MetaseqError(f"{file}: damaged ({error}); submit it again") from error
    problem = schema_error(content, _FORM)
    if not problem and content["format"] != FORMAT:
        problem = f"its format is {content['format']!r}"
    if problem or is_altered(content):
        raise MetaseqError(f"{file}: damaged ({problem or 'changed'}); submit it again")
    files = _hashes(folder, folder)
    for name in sorted(files.keys() | content["files"].keys()):
        if files.get(name) != content["files"].get(name):
            raise MetaseqError(f"{folder / name}: not as it was submitted; submit it again")
    return content


def read(folder: Path) -> LeagueRuns:
    """Return the league of a submission.

    Raises MetaseqError if a file is damaged, or its objective is another than it says.
    """
    content = _read_submission(folder)
    league = read_league(folder / PLAN)
    records = [item.record for item in league.contents.additions]
    if league.contents.plan.hash != content["plan"] or records != [content["objective"]]:
        raise MetaseqError(
            f"{folder}: plan and objective of {RUNS} are not those of {FILE}; submit it again"
        )
    return league


def _only(league: LeagueRuns, added: Added) -> LeagueRuns:
    labels = {label_of(phase, added.name) for phase in PHASES}
    runs = tuple(run for run in league.runs if run.values["label"] in labels)
    contents = replace(league.contents, added=(added,), archived=(), archive=None)
    prices = {name: x for name, x in contents.prices.items() if name == added.name}
    predictions = tuple(item for item in league.predictions if item.objective == added.name)
    contents = replace(contents, prices=prices)
    return replace(league, contents=contents, runs=runs, predictions=predictions)


def _plugin_of(place: Path, added: Added) -> Path | None:
    """Return the copy of the plug-in that the runs of an objective used, or else the plug-in."""
    if added.user_dir is None:
        return None
    for phase in (FINAL, TUNE, UNTRAINED):
        folder = SweepFolder(place / phase / added.name)
        last = folder.last_code() if folder.path.is_dir() else None
        if last:
            copy = folder.path / "code" / last / PLUGIN / Path(added.user_dir).name
            if copy.exists():
                return copy
    plugin = Path(added.user_dir)
    if not plugin.exists():
        raise UsageError(f"{plugin}: the plug-in of {added.name} is gone, and nothing ran from it")
    return plugin


def _hashes(place: Path, root: Path) -> dict[str, str]:
    """Return the SHA-256 of a file, or of all files of a folder, by their paths below a root."""
    hashes = {}
    for file in sorted([place, *place.rglob("*")]):
        name = str(file.relative_to(root))
        if file.is_symlink():
            raise MetaseqError(f"{file}: a link; a submission has files only")
        if file.is_file() and name != FILE and "__pycache__" not in file.parts:
            hashes[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return hashes
