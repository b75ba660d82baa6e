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
    check_regular,
    is_altered,
    read_bounded,
    schema_error,
    to_json,
    with_checksum,
    write_atomic,
)
from metaseq_lm.league.expansion import PHASES
from metaseq_lm.league.plan import Objective, Plan, parse_objective, parse_plan
from metaseq_lm.reporting.runs import Run, read_run
from metaseq_lm.runs.plan import PLAN_FILE, read_plan_hash

FILE = "league.json"
VERSION = 1
SCHEMA = {
    "version": int,
    "plan": dict,
    "hash": str,
    "archive": (str, type(None)),
    "added": list,
    "prices?": {"*": (float, int)},
}
ADDED_SCHEMA = {"name": str, "content": {"options": list}, "user_dir": (str, type(None))}


@dataclass(frozen=True)
class Added:
    """An objective that was added to a frozen plan.

    Attributes:
        name: Its name.
        content: What stands for an objective in a plan: options, grid, control, note, metric.
        user_dir: The plug-in that it needs; None without one.
    """

    name: str
    content: Mapping[str, Any]
    user_dir: str | None = None

    @property
    def options(self) -> list[str]:
        """Its options."""
        return list(self.content["options"])


@dataclass(frozen=True)
class Contents:
    """What defines a league.

    Attributes:
        plan: The plan, without what was added.
        content: The mapping that the plan was read from.
        added: The objectives added to it.
        archive: A file with further runs of the plan; None for that of a plan of the package.
        prices: FLOPs of an update by objective, as far as they are known.
    """

    plan: Plan
    content: Mapping[str, Any]
    added: tuple[Added, ...] = ()
    archive: str | None = None
    prices: Mapping[str, float] = field(default_factory=dict)

    @property
    def extended(self) -> Plan:
        """The plan with the objectives that were added to it; its hash is another one."""
        return with_added(self.plan, self.added)

    @property
    def title(self) -> str:
        """The name and the hash of the plan, and what was added to it."""
        further = "".join(f" + {item.name}" for item in self.added)
        return f"{self.plan.name}, plan {self.plan.hash}{further}"


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
        """Return what league.json says.

        Raises:
            UsageError: There is no league.
            MetaseqError: league.json is damaged or was changed.
        """
        try:
            content = json.loads(read_bounded(self.file, LARGEST_SWEEP))
            problem = schema_error(content, SCHEMA)
            for row in [] if problem else content["added"]:
                problem = problem or schema_error(row, ADDED_SCHEMA, "an added objective")
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
        added = [Added(row["name"], row["content"], row["user_dir"]) for row in content["added"]]
        prices = content.get("prices", {})
        return Contents(plan, content["plan"], tuple(added), content["archive"], prices)

    def write(self, contents: Contents) -> None:
        """Write league.json."""
        rows = [
            {"name": item.name, "content": dict(item.content), "user_dir": item.user_dir}
            for item in contents.added
        ]
        values = {
            "version": VERSION,
            "plan": dict(contents.content),
            "hash": contents.plan.hash,
            "archive": contents.archive,
            "added": rows,
            "prices": dict(contents.prices),
        }
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomic(self.file, (to_json(with_checksum(values), 1) + "\n").encode())

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock for running a league; MetaseqError if another command holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        check_regular(self.path / ".lock")
        with open(self.path / ".lock", "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise MetaseqError(
                    f"{self.path}: another 'league' command runs here; wait for it, or stop it and "
                    "give it again later: it goes on"
                ) from None
            yield

    def is_running(self) -> bool:
        """Return whether a command runs this league."""
        try:
            with open(self.path / ".lock", "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def runs(self) -> list[Run]:
        """Return all runs that have begun, of all phases."""
        folders = []
        for phase in PHASES:
            folders += sorted(file.parent for file in self.path.glob(f"{phase}/*/*/config.yaml"))
        return [read_run(folder) for folder in folders]

    def check_plans(self, plan_hash: str) -> None:
        """Raise UsageError for runs of another plan, see `check_plans`."""
        plans = {}
        for phase in PHASES:
            for file in sorted(self.path.glob(f"{phase}/*/*/{PLAN_FILE}")):
                plans[str(file.parent)] = read_plan_hash(file.parent)
        check_plans(plans, plan_hash)


def check_plans(plans: Mapping[str, str], plan_hash: str, kind: str = "run") -> None:
    """Raise UsageError for runs, or what `kind` says, of another plan.

    Args:
        plans: The hash of the plan that each run records, by its name; "" for one that was made
            before runs recorded it.
        plan_hash: The hash of their league's plan.
    """
    others = {name: other for name, other in plans.items() if other not in ("", plan_hash)}
    if others:
        name, other = next(iter(others.items()))
        further = f" So are {len(others) - 1} more." if len(others) > 1 else ""
        raise UsageError(
            f"{name}: a {kind} of another plan ({other}; that of this league is {plan_hash})."
            f"{further} A plan is fixed before its runs: move them away, or choose another --out"
        )


def with_added(plan: Plan, added: Sequence[Added]) -> Plan:
    """Return a plan with further objectives, which are tuned on its grid unless they have one.

    Raises UsageError for a wrong option, a name that is taken, and an unknown control.
    """
    objectives = list(plan.objectives)
    for item in added:
        objective = parse_objective(item.name, dict(item.content), plan.tuning.grid)
        names = [other.name for other in objectives]
        if objective.name.lower() in map(str.lower, names):
            raise UsageError(f"--name {objective.name}: the league has an objective of this name")
        if objective.control not in (None, *names):
            raise UsageError(
                f"--control {objective.control}: no such objective. Objectives: {', '.join(names)}"
            )
        objectives.append(objective)
    return replace(plan, objectives=tuple(objectives))


def objective_of(plan: Plan, name: str) -> Objective:
    """Return an objective of a plan; UsageError, which names them all, for an unknown one."""
    names = [objective.name for objective in plan.objectives]
    if name not in names:
        raise UsageError(f"there is no objective {name!r}. Objectives: {', '.join(names)}.")
    return plan.objective(name)
