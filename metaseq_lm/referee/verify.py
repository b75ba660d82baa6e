"""Verification of a league: it is audited, and drawn runs are trained again and compared.

Each verification adds a line to OUT/verified.jsonl.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import read_json, schema_error, to_json, write_atomic
from metaseq_lm.core.journal import Journal
from metaseq_lm.core.loading import format_value
from metaseq_lm.core.output import present_time, show_progress
from metaseq_lm.league.assembly import LeagueRuns, archive_of
from metaseq_lm.league.data import make_data
from metaseq_lm.league.expansion import BUDGET, FINAL, DataSource
from metaseq_lm.league.plan import Objective
from metaseq_lm.referee import containment
from metaseq_lm.referee.audit import Complaint, audit, describe_complaints
from metaseq_lm.referee.comparison import CLOSE, DIFFERENT, EQUAL, MISSING, Repetition, compare
from metaseq_lm.referee.merge import name_in_league
from metaseq_lm.referee.repetition import EXAMINED, LOG, codes_of, draw, repeat, take_code
from metaseq_lm.reporting import archive
from metaseq_lm.reporting.numbers import flops_text
from metaseq_lm.reporting.runs import Run, read_run
from metaseq_lm.reporting.settings import finished
from metaseq_lm.runs import manifests
from metaseq_lm.runs.folder import code_hash

FILE = "verified.jsonl"
FORMAT = "metaseq-lm verification 1"
# One process trains all, because its start takes longer than an update.
_RESCORE = (
    "import json; from metaseq_lm.cli import main; "
    "[main(words) for words in json.load(open('commands.json'))]"
)


@dataclass(frozen=True)
class _Verification:
    """What a verification found.

    Attributes:
        plan: The hash of the plan.
        seed: The seed that drew the rows.
        rows: The drawn rows, such as "causal at 1e12".
        repetitions: Their runs.
        complaints: What does not fit together in the archive.
        host: Facts about this machine.
        code: Hashes of the code of the archive and of the repetitions.
    """

    plan: str
    seed: int
    rows: Sequence[str]
    repetitions: Sequence[Repetition]
    complaints: Sequence[Complaint]
    host: Mapping[str, Any]
    code: Mapping[str, Any]

    @property
    def is_verified(self) -> bool:
        """Whether all runs came out, and nothing but what the standings say is wrong."""
        outcomes = {item.outcome for item in self.repetitions}
        severe = [item for item in self.complaints if not item.is_of_gate]
        return not severe and outcomes <= {EQUAL, CLOSE}

    def record(self) -> dict[str, Any]:
        """Return the line of the record of verifications."""
        return {"format": FORMAT, "verified": self.is_verified, "time": present_time()} | asdict(
            self
        )


def verify_league(
    league: LeagueRuns,
    rows: int,
    seed: int,
    out: Path,
    user_dir: str | None = None,
    parallel: int = 1,
    code: Path | None = None,
) -> _Verification:
    """Verify a league, and add the result to the record in `out`.

    Args:
        league: Its plan and its runs.
        rows: The number of rows to draw; 0 trains nothing.
        seed: The seed that draws them.
        out: The folder of the repetitions; the same call goes on with it.
        user_dir: The plug-in of added objectives.
        parallel: The runs at a time.
        code: A checkout or a wheel of the code that trained the runs; today's by default.

    Raises:
        UsageError: There are no runs, a drawn row needs a plug-in that is not given, or the code is
            not that of the runs.
        MetaseqError: The archive is damaged, or the repetitions could not be started.
    """
    if not league.runs:
        raise UsageError(f"{league.contents.title}: there are no runs of this plan to verify")
    drawn = draw(league, rows, seed)
    data = make_data(league.contents.plan, out / "data")
    complaints = [*_altered(league), *audit(league, data)]
    repetitions: list[Repetition] = []
    if drawn:
        _check_plugins(league, drawn, user_dir)
        show_progress(f"training {len(drawn)} runs again; their output: {out / LOG}")
        source = DataSource(data, user_dir)
        copied = take_code(code, drawn, user_dir, out / "runs" / "code") if code else None
        folders = repeat(league, drawn, source, out, parallel, copied)
        repetitions = compare(league, folders)
        complaints += scored_by_plugin(league, folders, data, out)
        complaints += _refused_criterions(out / "runs" / EXAMINED)
    verification = _Verification(
        league.contents.plan.hash,
        seed,
        _rows_of(drawn),
        repetitions,
        complaints,
        _describe_host(),
        {"archive": codes_of(drawn), "here": codes_of(drawn)[0] if code else code_hash(user_dir)},
    )
    Journal(out / FILE).append([verification.record()])
    return verification


def _rows_of(drawn: Sequence[Run]) -> list[str]:
    finals = [run for run in drawn if run.path.parts[-3] == FINAL]
    names = (f"{x.values['label']} at {flops_text(float(x.values[BUDGET]))}" for x in finals)
    return list(dict.fromkeys(names))


def _refused_criterions(file: Path) -> Iterator[Complaint]:
    """Yield the criterions that failed their examination; MetaseqError for a damaged file."""
    try:
        refused = read_json(file)
        problem = schema_error(refused, {"*": str})
    except (OSError, ValueError) as error:
        problem = str(error)
    if problem:
        raise MetaseqError(f"{file}: damaged ({problem}): code that ran again has changed it")
    yield from (Complaint("criterion", name, reason) for name, reason in refused.items())


def _check_plugins(league: LeagueRuns, drawn: Sequence[Run], user_dir: str | None) -> None:
    names = {run.path.parts[-2] for run in drawn}
    for item in league.contents.additions:
        if item.name in names and item.user_dir and not user_dir:
            raise UsageError(
                f"objective {item.name} has the plug-in {item.user_dir!r}, whose code would run: "
                "look at it, and name it: --user-dir. It runs contained, without network, and "
                "with only a scratch folder to write"
            )


def _altered(league: LeagueRuns) -> Iterator[Complaint]:
    """Yield a complaint for an archive that was changed after it was written."""
    file = archive_of(league.contents)
    if file is None or not league.shipped:
        return
    sentences: list[str] = []
    archive.read(file, sentences.append)
    yield from (Complaint("archive", file.name, sentence) for sentence in sentences)


def scored_by_plugin(
    league: LeagueRuns, folders: Mapping[Run, Path], data: Path, out: Path
) -> Iterator[Complaint]:
    """Yield final runs of plug-ins whose weights have other scores without the plug-in.

    A plug-in could change how it is scored. So an objective of the plan starts from its weights,
    takes one update at a rate of zero, and is scored; each task of the plan is tried, because tasks
    differ in which tokens see each other.
    """
    plugged = {item.name for item in league.contents.additions if item.user_dir}
    plan, place = league.contents.plan, out / "rescored"
    tasks: dict[tuple[str, ...], Objective] = {}
    for objective in plan.objectives:
        tasks[tuple(x for x in objective.options if x.startswith("task="))] = objective
    finals = {
        run: folder
        for run, folder in folders.items()
        if run.path.parts[-3] == FINAL
        and run.path.parts[-2] in plugged
        and (folder / "results.json").is_file()
    }
    again: dict[Run, list[Path]] = {}
    commands = []
    for run, folder in finals.items():
        scored = manifests.resolve(str(folder.resolve()), prefer="best")
        for objective in tasks.values():
            target = place / f"{run.path.parts[-2]}-{run.seed}-{objective.name}"
            words = ["train", str(data.resolve()), "--save-dir", str(target.resolve())]
            words += [*plan.options, *objective.options, f"init_from={scored}"]
            words += ["trainer.max_update=1", "optimizer.lr=0", f"seed={run.seed}"]
            words.append(f"trainer.final_suites={format_value(list(plan.comparison.suites))}")
            again.setdefault(run, []).append(target)
            if not (target / "results.json").is_file():
                commands.append(words)
    if commands:
        place.mkdir(parents=True, exist_ok=True)
        write_atomic(place / "commands.json", to_json(commands).encode())
        containment.run(_RESCORE, [], place, [data, *finals.values()], out / LOG)
    for run, targets in again.items():
        ended = (read_run(path) for path in targets if (path / "results.json").is_file())
        others = [_scores_of(other) for other in finished(ended)]
        if _scores_of(read_run(finals[run])) not in others:
            reason = "its weights score differently without its plug-in"
            yield Complaint("plug-in", name_in_league(run), reason)


def _scores_of(run: Run) -> dict[str, float]:
    """Return the scores of suites, rounded as far as they agree between batches of scoring."""
    scores: dict[str, float] = {}
    for suite in run.suites:
        scores |= suite.metrics
    return {name: round(value, 5) for name, value in scores.items()}


def _describe_host() -> dict[str, Any]:
    """Return the facts about this machine on which bits of results depend."""
    processor, cpus = platform.processor(), Path("/proc/cpuinfo")
    if cpus.exists():
        for line in cpus.read_text().splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
    return {
        "machine": platform.machine(),
        "processor": processor,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def describe(verification: _Verification) -> str:
    """Return a verification as text: repeated runs, complaints, the answer."""
    lines = []
    for item in verification.repetitions:
        largest = ", ".join(
            f"{kind} ± {value:.2g}" for kind, value in item.largest.items() if value
        )
        reason = f": {item.reason}" * (item.outcome in (DIFFERENT, MISSING))
        lines.append(f"{item.outcome:<10}{item.run}{reason}{f' ({largest})' if largest else ''}")
    if verification.complaints:
        lines.append(describe_complaints(verification.complaints))
    outcomes = Counter(item.outcome for item in verification.repetitions)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    answer = "verified" if verification.is_verified else "NOT verified"
    codes = [*verification.code["archive"], verification.code["here"]]
    if len(set(codes)) > 1 and verification.repetitions:
        lines.append(
            f"code: the archive was trained with {', '.join(codes[:-1])}, here {codes[-1]}"
        )
    rows = f"rows drawn with seed {verification.seed}: {', '.join(verification.rows) or 'none'}"
    return "\n".join([*lines, f"{rows}; {counts or 'nothing was trained'}. {answer}."])
