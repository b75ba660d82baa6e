"""`metaseq-lm league verify`, `submit`, `merge`, `ledger`: a record that others can check."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from metaseq_lm import plugins
from metaseq_lm.core.documents import show_result
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.league.assembly import LeagueRuns, read_league, write_archive
from metaseq_lm.league.folder import Contents
from metaseq_lm.league.plan_files import named_plan
from metaseq_lm.referee import merge as merging
from metaseq_lm.referee import submission
from metaseq_lm.referee.audit import describe_complaints, missing_in
from metaseq_lm.referee.ledger import make_ledger, read_place
from metaseq_lm.referee.verify import describe, verify_league
from metaseq_lm.sweeps.definition import plugin_path
from metaseq_lm.tasks import check_pair

_ROWS = 2


def verify(
    word: str,
    out: str | None,
    rows: int | None,
    seed: int | None,
    user_dir: str | None,
    parallel: int | None,
    code: Path | None,
) -> int:
    """Verify a league; 1 if something did not come out."""
    if out is None:
        raise UsageError("no --out given; name the folder for the runs that are trained again")
    plugins.load_all()
    # By default nobody can foresee which rows are trained again.
    drawn = secrets.randbelow(1 << 31) if seed is None else seed
    plug_in = plugin_path(user_dir, Path.cwd()) if user_dir else None
    count = _ROWS if rows is None else rows
    league = read_place(named_plan(word))
    verification = verify_league(league, count, drawn, Path(out), plug_in, parallel or 1, code)
    show_result("verification", verification.record(), describe(verification))
    return 0 if verification.is_verified else 1


def submit(word: str, name: str, out: str | None) -> int:
    """Write the submission of an objective, or check one; 1 if something is missing.

    What gates say of honest runs is printed, and nothing that is missing.
    """
    path = Path(word)
    plugins.load_all()
    if (path / submission.FILE).is_file():
        folder, league = path, submission.read(path)
    else:
        if out is None:
            raise UsageError(
                f"{word}: not a submission; to submit an objective of a league, name it and the "
                "folder of the submission: --name NAME --out DIR"
            )
        folder = Path(out)
        league = submission.write_submission(read_league(path), path, name, folder)
    complaints = missing_in(league)
    text = describe_complaints(complaints) or f"{folder}: complete ({len(league.runs)} runs)"
    content = {"folder": str(folder), "runs": len(league.runs)}
    content["missing"] = [vars(item) for item in complaints]
    show_result("submission", content, text)
    return 0 if all(item.is_of_gate for item in complaints) else 1


def register(
    contents: Contents, plan: Path, name: str, out: str | None, user_dir: str | None
) -> int:
    """Write the submission of an objective that has no runs yet."""
    if out is None:
        raise UsageError("no --out given; name the folder of the submission")
    plugins.load_all(user_dir)
    objective = contents.extended.objective(name)
    try:
        check_pair(load_config([*contents.plan.options, *objective.options]))
    except UsageError as error:
        raise UsageError(f"objective {name}: {error}") from error
    submission.write_submission(LeagueRuns(contents, ()), plan, name, Path(out))
    text = f"{out}: {name} is registered; submit it again when its runs are over"
    content = {"folder": out, "runs": 0, "missing": []}
    show_result("submission", content, text)
    return 0


def merge(words: Sequence[str], archive: Path | None) -> int:
    """Merge leagues of one plan into an archive."""
    if archive is None or len(words) < 2:
        raise UsageError("give two leagues or more, and the file of the result: --archive FILE")
    places = list(map(named_plan, words))
    merged = merging.merge([read_place(place) for place in places], words)
    write_archive(archive, merged)
    added = [item.name for item in merged.contents.additions]
    content = {"archive": str(archive), "runs": len(merged.runs), "added": added}
    text = f"{archive}: {len(merged.runs)} runs; added objectives: {', '.join(added) or 'none'}"
    show_result("merged", content, text)
    return 0


def ledger(folder: str, plan: str) -> int:
    """Make the skeleton of a ledger."""
    record = make_ledger(Path(folder), named_plan(plan))
    text = f"{folder}: a ledger of plan {record['plan']}; commit it, and see its README.md"
    show_result("ledger", {"folder": folder, **record}, text)
    return 0
