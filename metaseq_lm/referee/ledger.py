"""Ledgers: a git repository of submissions to one plan, with their standings.

LEDGER/ledger.json           the plan's hash, and the number that drew its seeds
LEDGER/plan.yaml             the plan
LEDGER/plan.jsonl.gz         the runs that the plan came with, if any
LEDGER/submissions/NAME/     the submissions, see `submission`
LEDGER/README.md             the standings
LEDGER/check                 checks and verifies a submission, also in LEDGER/.github/workflows
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from metaseq_lm import __version__
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import is_altered, read_json, schema_error, write_atomic
from metaseq_lm.core.output import present_time
from metaseq_lm.league.assembly import LeagueRuns, read_archived, read_league
from metaseq_lm.league.folder import Contents
from metaseq_lm.league.page import standings_table
from metaseq_lm.league.plan_files import archive_beside, parse_plan, read_plan
from metaseq_lm.referee import submission
from metaseq_lm.referee.merge import merge
from metaseq_lm.referee.submission import PLAN
from metaseq_lm.reporting.formats import to_markdown
from metaseq_lm.runs.records import write_record
from metaseq_lm.sweeps.definition import LARGEST_SEED

FILE, FORMAT, _SUBMISSIONS = "ledger.json", "metaseq-lm ledger 1", "submissions"
_FORM = {"format": str, "time": str, "registered": str, "number?": int, "plan": str}
_BEGIN, _END = "<!-- standings -->", "<!-- end of standings -->"
_CHECK = """#!/usr/bin/env bash
# Checks a submission, then trains drawn rows of it again: ./check submissions/NAME [ROWS]
# Its plug-in runs contained: without network, with a scratch folder as the only one to write.
set -euo pipefail
submission=${{1:?give submissions/NAME}}
cd "$(dirname "$0")"
metaseq-lm league submit "$submission"
shopt -s nullglob
plugin=("$submission"/plugin/*)
metaseq-lm league verify "$submission" --rows "${{2:-2}}" \\
    ${{plugin:+--user-dir "${{plugin[0]}}"}} --out "verified/$(basename "$submission")"
"""
_WORKFLOW = """name: verify
on:
  pull_request:
    paths: ["submissions/**"]
permissions:
  contents: read
jobs:
  verify:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
        with: {{fetch-depth: 0}}
      - uses: actions/setup-python@v5
        with: {{python-version: "3.11"}}
      - env: {{PIP_EXTRA_INDEX_URL: https://download.pytorch.org/whl/cpu}}
        run: pip install "metaseq-lm=={version}"
      - run: |
          git diff --name-only "origin/${{{{ github.base_ref }}}}" -- submissions |
            cut -d/ -f1-2 | sort -u | xargs -r -n 1 ./check
"""
_CITATION = """cff-version: 1.2.0
message: Cite the hash of the plan and the commit of this ledger.
title: "{name}, plan {plan}"
type: dataset
authors: []
"""
_README = """# {name}

Objectives compared by the plan `{plan}` ([plan.yaml](plan.yaml)) with metaseq-lm {version}. {seeds}

{begin}
{end}

## To submit

```bash
metaseq-lm league submit plan.yaml --with criterion=mine --user-dir my_plugin --name mine \\
    --out submissions/mine
metaseq-lm league plan.yaml --out L --with criterion=mine --user-dir my_plugin --name mine
metaseq-lm league submit L --name mine --out submissions/mine
./check submissions/mine
```

The first command registers the attempt: open a pull request with it, and another one when the
league is over. Every registered objective counts in Holm's correction, whether or not it has runs.
Cite the hash of the plan and the commit.
"""


def make_ledger(folder: Path, plan_file: Path) -> dict[str, Any]:
    """Make the skeleton of a ledger for a plan; return the content of ledger.json.

    A plan without archived runs gets seeds that nobody could choose: they follow from its hash and
    a number that is drawn now, after the plan is fixed. A plan with runs keeps its seeds and runs.

    Raises UsageError if the folder is not empty.
    """
    if folder.exists() and any(item.name != ".git" for item in folder.iterdir()):
        raise UsageError(f"{folder}: is not empty; a ledger needs a folder of its own")
    plan, content = read_plan(plan_file)
    archive = archive_beside(plan_file)
    record: dict[str, Any] = {"format": FORMAT, "time": present_time(), "registered": plan.hash}
    seeds = "Its seeds are those of the runs that it came with."
    if archive is None:
        # Any reader of JSON keeps whole numbers below 2^53.
        record["number"] = number = secrets.randbelow(1 << 53)
        content = _with_seeds(content, plan.hash, number)
        seeds = f"Its seeds follow from the plan `{plan.hash}` and the number {number}."
    record["plan"] = (plan := parse_plan(content)).hash
    (folder / _SUBMISSIONS).mkdir(parents=True, exist_ok=True)
    (folder / _SUBMISSIONS / ".gitkeep").touch()
    write_atomic(folder / PLAN, OmegaConf.to_yaml(content).encode())
    if archive is not None:
        shutil.copyfile(archive, folder / f"plan{''.join(archive.suffixes)}")
    facts = {"name": plan.name, "plan": plan.hash, "version": __version__, "seeds": seeds}
    facts |= {"begin": _BEGIN, "end": _END}
    texts = {"README.md": _README, "CITATION.cff": _CITATION, "check": _CHECK}
    texts[".github/workflows/verify.yml"] = _WORKFLOW
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.format(**facts))
    (folder / ".gitignore").write_text("verified/\nreport/\n")
    (folder / "check").chmod(0o755)
    write_record(folder / FILE, record, indent=1)
    return record


def _with_seeds(content: Mapping[str, Any], plan_hash: str, number: int) -> dict[str, Any]:
    """Return the content of a plan with distinct seeds that follow from its hash and a number."""
    plan = parse_plan(dict(content))
    kinds = {"final": plan.ladder.seeds, "tuning": plan.tuning.seeds}
    kinds["controls"] = plan.controls.seeds
    drawn: dict[str, list[int]] = {}
    known: set[int] = set()
    for kind, seeds in kinds.items():
        drawn[kind] = []
        i = 0
        while len(drawn[kind]) < len(seeds):
            digest = hashlib.sha256(f"{plan_hash} {number} {kind} {i}".encode()).digest()
            seed, i = int.from_bytes(digest[:8], "big") % (LARGEST_SEED + 1), i + 1
            if seed not in known:
                known.add(seed)
                drawn[kind].append(seed)
    tuning = {**content.get("tuning", {}), "seeds": drawn["tuning"]}
    controls = {**content.get("controls", {}), "seeds": drawn["controls"]}
    return {**content, "seeds": drawn["final"], "tuning": tuning, "controls": controls}


def _read_ledger(folder: Path) -> LeagueRuns:
    """Return the runs of all submissions of a ledger, and those that its plan came with.

    Raises:
        MetaseqError: A file is damaged, or the plan is not the registered one.
        UsageError: Submissions do not fit together, see `merge`.
    """
    file = folder / FILE
    try:
        record = read_json(file)
        problem = schema_error(record, _FORM) or ("changed" if is_altered(record) else "")
    except ValueError as error:
        problem = str(error)
    if problem:
        raise MetaseqError(f"{file}: damaged ({problem}); restore it from the repository")
    contents = Contents.of_file(folder / PLAN)
    plan, content = contents.plan, contents.content
    if plan.hash != record["plan"]:
        raise MetaseqError(
            f"{folder / PLAN}: its hash is {plan.hash}, the ledger's is {record['plan']}; a "
            "changed plan needs another ledger"
        )
    if "number" in record and content != _with_seeds(
        content, record["registered"], record["number"]
    ):
        raise MetaseqError(
            f"{folder / PLAN}: its seeds do not follow from the plan {record['registered']} and "
            f"the number {record['number']}"
        )
    leagues, names = [read_archived(contents)], [PLAN]
    for place in sorted((folder / _SUBMISSIONS).glob(f"*/{submission.FILE}")):
        leagues.append(submission.read(place.parent))
        names.append(str(place.parent.relative_to(folder)))
    return merge(leagues, names)


def read_place(place: Path) -> LeagueRuns:
    """Return the runs of a league's folder, of a plan with an archive, a submission or a ledger."""
    if (place / FILE).is_file():
        return _read_ledger(place)
    if (place / submission.FILE).is_file():
        return submission.read(place)
    return read_league(place)


def write_standings(folder: Path, league: LeagueRuns) -> None:
    """Write the standings into the README of a ledger, between its marks; nothing elsewhere."""
    if not (folder / FILE).is_file():
        return
    text = to_markdown(standings_table(league.standings()))
    file = folder / "README.md"
    before, _, rest = file.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    write_atomic(file, f"{before}{_BEGIN}\n{text}\n{_END}{after}".encode())
