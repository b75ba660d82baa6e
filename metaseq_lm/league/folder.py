"""The folder of a league: its plan, the objectives added to it, its data and its runs."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import (
    LARGEST_SWEEP,
    NAME,
    POSITIVE,
    is_altered,
    read_bounded,
    schema_error,
)
from metaseq_lm.league.expansion import PHASES
from metaseq_lm.league.plan import Objective, Plan
from metaseq_lm.league.plan_files import archive_beside, parse_objective, parse_plan, read_plan
from metaseq_lm.reporting.runs import Run, read_run, relative_to_cwd
from metaseq_lm.runs.records import PLAN_FILE, read_plan_hash, write_record
from metaseq_lm.sweeps.lock_file import locked

FILE = "league.json"
_VERSION = 1
PRICES = {"*": POSITIVE}  # FLOPs of an update, by objective
ADDED_SCHEMA = {"name": NAME, "content": {"options": [str, ...]}, "user_dir": (str, type(None))}
SCHEMA = {
    "version": int,
    "plan": dict,
    "hash": str,
    "archive": (str, type(None)),
    "added": [ADDED_SCHEMA, ...],
    "prices?": PRICES,
}


@dataclass(frozen=True)
class Added:
    """An objective that was added to a frozen plan.

    Attributes:
        name: Its name.
        content: The entry of an objective in a plan: options, grid, control, note, metric.
        user_dir: The plug-in that defines it; None without one.
    """

    name: str
    content: Mapping[str, Any]
    user_dir: str | None = None

    @property
    def options(self) -> list[str]:
        """Its options."""
        return list(self.content["options"])

    @property
    def words(self) -> list[str]:
        """The words of a command line that add it."""
        words = ["--with", *self.options, "--name", self.name]
        for key, values in self.content.get("grid", {}).items():
            words += ["--grid", f"{key}={','.join(map(str, values))}"]
        named = {"--control": self.content.get("control"), "--tune-by": self.content.get("metric")}
        for flag, value in {**named, "--user-dir": self.user_dir}.items():
            if value:
                words += [flag, value]
        return words

    @property
    def key(self) -> str:
        """The name in lower case for comparisons, because names are folder names."""
        return self.name.lower()

    @property
    def record(self) -> dict[str, Any]:
        """Its record in league.json and archives, in the form ADDED_SCHEMA."""
        return {"name": self.name, "content": dict(self.content), "user_dir": self.user_dir}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Added:
        """Return the objective of a record in the form ADDED_SCHEMA."""
        return cls(record["name"], record["content"], record["user_dir"])

    @property
    def portable(self) -> Added:
        """A copy for archives: a plug-in by its path below the working directory, or its name."""
        if self.user_dir is None or not Path(self.user_dir).is_absolute():
            return self
        relative = Path(relative_to_cwd(self.user_dir))
        return replace(self, user_dir=relative.name if relative.is_absolute() else str(relative))


@dataclass(frozen=True)
class Contents:
    """The definition of a league.

    Attributes:
        plan: The plan, without added objectives.
        content: The mapping that the plan was read from.
        added: The objectives added to it here.
        archive: A file with further runs of the plan; None for a plan of the package.
        prices: FLOPs of an update by objective, for objectives where they are known.
        archived: The added objectives with runs in the archive.
    """

    plan: Plan
    content: Mapping[str, Any]
    added: tuple[Added, ...] = ()
    archive: str | None = None
    prices: Mapping[str, float] = field(default_factory=dict)
    archived: tuple[Added, ...] = ()

    @classmethod
    def of_file(cls, file: Path, files: Mapping[str, Any] | None = None) -> Contents:
        """Return the league of a plan file and the archive beside it; errors as in `read_plan`."""
        plan, content = read_plan(file, files)
        archive = archive_beside(file)
        return cls(plan, content, archive=str(archive) if archive else None)

    @property
    def additions(self) -> tuple[Added, ...]:
        """The objectives added here or in the archive; the one added here if in both."""
        local = {item.key for item in self.added}
        return (*(item for item in self.archived if item.key not in local), *self.added)

    @property
    def extended(self) -> Plan:
        """The plan together with the added objectives; its hash differs from the plan's."""
        return _with_added(self.plan, self.additions)

    @property
    def title(self) -> str:
        """The name and the hash of the plan, and the added objectives."""
        further = "".join(f" + {item.name}" for item in self.additions)
        return f"{self.plan.name}, plan {self.plan.hash}{further}"


def data_folder(plan: Plan, folder: Path) -> Path:
    """Return the data folder of a plan: `folder`, unless the plan names one."""
    return Path(plan.data.get("folder", folder))


class LeagueFolder:
    """L: league.json, data, report, and the sweeps PHASE/OBJECTIVE."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.file = self.path / FILE

    @property
    def data(self) -> Path:
        """The data folder that the league makes."""
        return self.path / "data"

    def exists(self) -> bool:
        """Return whether there is a league."""
        return self.file.exists()

    def read(self) -> Contents:
        """Return the content of league.json.

        Raises UsageError if there is no league, MetaseqError if the file is damaged or was changed.
        """
        try:
            content = json.loads(read_bounded(self.file, LARGEST_SWEEP))
            problem = schema_error(content, SCHEMA)
        except FileNotFoundError:
            raise UsageError(f"{self.path}: no league here (there is no {FILE})") from None
        except (ValueError, RecursionError) as error:
            content, problem = None, f"not readable as JSON: {error}"
        if problem or is_altered(content):
            reason = problem or "changed after a league wrote it"
            raise MetaseqError(
                f"{self.file}: damaged ({reason}). Restore it, or delete it and give the command "
                "that wrote it again: it goes on with the runs"
            )
        plan = parse_plan(content["plan"])
        if plan.hash != content["hash"]:
            raise MetaseqError(
                f"{self.file}: written by another version of metaseq-lm, in which the plan had the "
                f"hash {content['hash']}, not {plan.hash}; use that one, or choose another --out"
            )
        prices = content.get("prices") or {}
        added = tuple(map(Added.of, content["added"]))
        return Contents(plan, content["plan"], added, content["archive"], prices)

    def write(self, contents: Contents) -> None:
        """Write league.json."""
        values = {
            "version": _VERSION,
            "plan": dict(contents.content),
            "hash": contents.plan.hash,
            "archive": contents.archive,
            "added": [item.record for item in contents.added],
            "prices": dict(contents.prices),
        }
        self.path.mkdir(parents=True, exist_ok=True)
        write_record(self.file, values, indent=1)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock for running a league; MetaseqError if another command holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        busy = (
            f"{self.path}: another 'league' command is running here; wait for it, or stop it and "
            "give it again later: it goes on"
        )
        with locked(self.path / ".lock", busy):
            yield

    def is_running(self) -> bool:
        """Return whether a command runs this league."""
        try:
            with open(self.path / ".lock", "rb") as file:
                # Shared, so that two that ask at once do not take each other for the command.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError) as error:
            return isinstance(error, BlockingIOError)
        return False

    def runs(self) -> list[Run]:
        """Return all started runs of all phases."""
        return [read_run(folder) for folder in self._folders_with("config.yaml")]

    def _folders_with(self, name: str) -> Iterator[Path]:
        for phase in PHASES:
            yield from sorted(file.parent for file in self.path.glob(f"{phase}/*/*/{name}"))

    def check_plans(self, plan_hash: str) -> None:
        """Raise UsageError for a run of another plan, see the function `check_plans`."""
        folders = self._folders_with(PLAN_FILE)
        check_plans({str(folder): read_plan_hash(folder) for folder in folders}, plan_hash)


def check_plans(plans: Mapping[str, str], plan_hash: str, kind: str = "run") -> None:
    """Raise UsageError for runs (or whatever `kind` names) of another plan than `plan_hash`.

    `plans` are the hashes that they record, by name; "" if made before hashes were recorded.
    """
    others = {name: other for name, other in plans.items() if other not in ("", plan_hash)}
    if others:
        name, other = next(iter(others.items()))
        further = f" So are {len(others) - 1} more." * (len(others) > 1)
        raise UsageError(
            f"{name}: a {kind} of another plan ({other}; that of this league is {plan_hash})."
            f"{further} A plan is fixed before its runs: move them away, or choose another --out"
        )


def _with_added(plan: Plan, added: Sequence[Added]) -> Plan:
    """Return a plan with added objectives, tuned on its grid unless they have their own."""
    objectives, most = list(plan.objectives), plan.comparison.attempts
    if most is not None and len(added) > most:
        listed = ", ".join(item.name for item in added)
        raise UsageError(f"the plan allows {most} added objectives; there are more: {listed}")
    for item in added:
        objective = parse_objective(item.name, dict(item.content), plan.tuning.grid)
        # Names are folder names, which some file systems do not tell apart by case.
        if objective.name.lower() in [other.name.lower() for other in objectives]:
            raise UsageError(f"--name {objective.name}: the league has an objective of this name")
        objectives.append(objective)
    for objective in objectives[len(plan.objectives) :]:
        names = [other.name for other in objectives if other is not objective]
        if objective.control not in (None, *names):
            raise UsageError(
                f"{objective.name} has --control {objective.control}: the league has no such "
                f"objective (any more). Objectives: {', '.join(names)}"
            )
    return replace(plan, objectives=tuple(objectives))


def objective_of(plan: Plan, name: str) -> Objective:
    """Return an objective of a plan; raises UsageError, listing all, for an unknown one."""
    names = [objective.name for objective in plan.objectives]
    if name not in names:
        raise UsageError(f"there is no objective {name!r}. Objectives: {', '.join(names)}.")
    return plan.objective(name)
