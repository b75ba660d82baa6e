"""The budget of a league that fits into a time on this machine, and the plan of a text at it."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import nearest
from metaseq_lm.league.expansion import TUNE, UNTRAINED
from metaseq_lm.league.forecast import Update, measure_updates
from metaseq_lm.league.plan_files import BALANCED, TEXT_ARM, merge, read_plan
from metaseq_lm.league.runner import Runner
from metaseq_lm.reporting.stats import DEFAULT_TEST
from metaseq_lm.runs import suite_results
from metaseq_lm.sweeps.configs import composed
from metaseq_lm.sweeps.definition import read_mapping
from metaseq_lm.training.run import TrainingRun

# A smaller model, and smaller batches, than those of the text arm, for runs of seconds.
_OPTIONS = [
    "model.encoder_embed_dim=64",
    "model.encoder_ffn_embed_dim=96",
    "task.batch_size=8",
]
_VOCABULARY = 2048
_RATES = [2e-3, 4e-3, 8e-3]
_SMALLEST_EFFECT = 0.02
_MOST_CONTROLS = 3  # untrained models of an objective
_LEAST_UPDATES = 100  # of a run; fewer say nothing on an objective
_SPENT = 0.85  # share of the time that is planned: the machine may have other work, too
_SLOWER = 1.15  # seconds of updates in a run, with validations, by those measured alone
_MEASURED = 3.0  # seconds of updates of each objective
_AROUND = 20.0  # seconds until the first run starts, and for the report


@dataclass(frozen=True)
class Times:
    """What was measured: updates by objective, seconds of a run without them, and of its suites."""

    updates: Mapping[str, Update]
    start: float
    scoring: float

    def seconds(self, runner: Runner, budget: float) -> float:
        """Return how long a league of one budget takes, if all grids are widened."""
        plan, total = runner.plan, 0.0
        for objective in runner.request.objectives:
            for (phase, _), runs in runner.planned_of(objective).items():
                if phase == TUNE:
                    runs += plan.tuning.widen * len(plan.tuning.seeds)
                is_scored = phase != TUNE or plan.tuning_suites(objective)
                total += runs * (self.start + (self.scoring if is_scored else 0.0))
                if phase != UNTRAINED:
                    total += runs * budget * self.updates[objective.name].rate * _SLOWER
        return _AROUND + total / (runner.launch.max_parallel or 1)

    def fit(self, runner: Runner, minutes: float) -> float:
        """Return the FLOPs of a run, of two digits, with which a league takes some minutes.

        Raises UsageError, with the minutes that are needed, if runs would have too few updates.
        """
        least = _LEAST_UPDATES * max(update.estimate.flops for update in self.updates.values())
        fixed = self.seconds(runner, 0.0)
        slope = (self.seconds(runner, least) - fixed) / least
        budget = (60 * minutes * _SPENT - fixed) / slope
        if budget < least:
            needed = math.ceil((fixed + slope * least) / _SPENT / 60)
            raise UsageError(
                f"--minutes {minutes:g}: runs of {_LEAST_UPDATES} updates do not fit; give "
                f"--minutes {needed}, or fewer --objectives or --seeds"
            )
        digit = 10 ** (math.floor(math.log10(budget)) - 1)
        return float(int(budget) // digit * digit)


def measure_times(runner: Runner) -> Times:
    """Make updates of each objective, and score an untrained model of the first one, here."""
    updates = measure_updates(runner, _MEASURED)
    sweep = runner.sweep(runner.request.objectives[0], UNTRAINED, [])
    (_, _, config), *_ = composed(sweep.runs[:1], sweep.definition, runner.check)
    began = time.monotonic()
    with TemporaryDirectory(prefix="metaseq-lm-") as scratch:
        folder = Path(scratch) / "run"
        with redirect_stderr(io.StringIO()):
            TrainingRun(replace(config, save_dir=str(folder))).train()
        scoring = sum(result.facts["seconds"] for result in suite_results.read_all(folder)[0])
    return Times(updates, time.monotonic() - began - scoring, scoring)


def text_plan(
    data: Mapping[str, Any], names: Sequence[str], seeds: int, budget: float
) -> dict[str, Any]:
    """Return the content of a plan of a text: the text arm with few objectives, at one budget.

    Args:
        data: The files of the text by the keys plan.FILES, and options of its labelled file.
        names: The objectives, the baseline first.
        seeds: The number of seeds; 0 for the least with which a difference can be established.
        budget: FLOPs of a run.

    Raises:
        UsageError: An objective is unknown, or there are fewer than two.
    """
    content = read_mapping(TEXT_ARM)
    known = {**read_plan(BALANCED)[1]["objectives"], **content["objectives"]}
    if unknown := [name for name in names if name not in known]:
        raise UsageError(
            f"--objectives {unknown[0]}: not known.{nearest(unknown[0], known)} Known: "
            f"{', '.join(sorted(known))}. 'metaseq-lm league --out L --with' adds one of your own"
        )
    if len(set(names)) < 2:
        raise UsageError("--objectives: name two or more, the baseline first")
    seeds = seeds or _fewest_seeds(len(set(names)) - 1)
    objectives = {name: _objective(known[name], names) for name in dict.fromkeys(names)}
    changes: dict[str, Any] = {
        "name": "own text",
        "data": {**content["data"], "vocab_size": _VOCABULARY, **data},
        "options": _OPTIONS,
        "objectives": {**dict.fromkeys(content["objectives"]), **objectives},
        "budgets": [budget],
        "usual_budgets": None,
        "seeds": list(range(31, 31 + seeds)),
        "tuning": {"grid": {"optimizer.lr": _RATES}, "budgets": [budget], "widen": 1},
        "controls": {"shuffled": None, "seeds": list(range(51, 51 + min(_MOST_CONTROLS, seeds)))},
        "comparison": {
            "baseline": names[0],
            "smallest_effect": _SMALLEST_EFFECT,
            "items": True,
        },
    }
    return merge(content, changes)


def _objective(content: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return an objective as it is in a plan of a text, whose control may not be among `names`."""
    chosen = {key: content[key] for key in ("options", "note") if key in content}
    if content.get("control") in names:
        chosen["control"] = content["control"]
    if "metric" in content:
        chosen["metric"] = "frozen_valid"
    return chosen


def _fewest_seeds(comparisons: int) -> int:
    """Return the least number of seeds with which each of some differences can be established."""
    return next(n for n in count(2) if DEFAULT_TEST.smallest_p(n, n) < 0.05 / comparisons)
