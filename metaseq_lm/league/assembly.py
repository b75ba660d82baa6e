"""The standings of a league from its runs: those in its folder and those in the plan's archive."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product, starmap
from pathlib import Path
from typing import TypeVar

from omegaconf import OmegaConf

from metaseq_lm.core.documents import show_result
from metaseq_lm.core.errors import MetaseqError, UsageError, say
from metaseq_lm.core.output import present_time
from metaseq_lm.core.secrets import masked
from metaseq_lm.league import entries
from metaseq_lm.league.control_gates import ceiling, references
from metaseq_lm.league.corpus import CorpusFacts, from_about, read_corpus
from metaseq_lm.league.describe import describe_answer
from metaseq_lm.league.expansion import (
    BUDGET,
    FINAL,
    PHASES,
    SHUFFLED,
    TUNE,
    UNTRAINED,
    describe_excluded,
    label_of,
    possible,
)
from metaseq_lm.league.folder import (
    ADDED_SCHEMA,
    PRICES,
    Added,
    Contents,
    LeagueFolder,
    check_plans,
    data_folder,
    objective_of,
)
from metaseq_lm.league.gates import examine
from metaseq_lm.league.page import REPEAT, standings_document, write_page
from metaseq_lm.league.plan import Objective, Plan
from metaseq_lm.league.plan_files import shipped_archive
from metaseq_lm.league.predictions import (
    FILE,
    Outcome,
    Prediction,
    as_lines,
    parse_lines,
    read_predictions,
)
from metaseq_lm.league.rungs import predict
from metaseq_lm.league.score_errors import Items, items_of
from metaseq_lm.league.standings import Context, Standing
from metaseq_lm.league.terminal import terminal_text
from metaseq_lm.league.tuning import describe_other_choices, trials_of, values_text
from metaseq_lm.league.verdict import DecisionRule
from metaseq_lm.reporting import archive
from metaseq_lm.reporting.numbers import Metric, flops_text
from metaseq_lm.reporting.page import Section
from metaseq_lm.reporting.provenance import describe_provenance
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import Row, TuningRecord, metric_of, seed_scores
from metaseq_lm.runs.folder import code_hash
from metaseq_lm.sweeps.trials import Trial, Trials

T = TypeVar("T")
_ADDED, PREDICTIONS = "added", "predictions"  # facts in an archive, in addition to its runs


@dataclass(frozen=True)
class LeagueRuns:
    """All runs of a league by objective, phase and budget.

    Attributes:
        contents: The plan and the added objectives.
        runs: The runs, including archived ones.
        corpus: Facts about the data; None if there are none.
        shipped: Label and budget of the runs that come from the archive.
        incomplete: Label and budget of archived runs that were also started here, but not with all
            seeds.
        predictions: Predictions for rows.
    """

    contents: Contents
    runs: tuple[Run, ...]
    corpus: CorpusFacts | None = None
    shipped: frozenset[tuple[str, float]] = frozenset()
    incomplete: frozenset[tuple[str, float]] = frozenset()
    predictions: tuple[Prediction, ...] = ()

    @cached_property
    def plan(self) -> Plan:
        """The plan together with the added objectives."""
        return self.contents.extended

    def of(self, objective: Objective, phase: str, budget: float | None = None) -> list[Run]:
        """Return the runs of an objective in a phase, at all budgets or at one."""
        label = label_of(phase, objective.name)
        chosen = [run for run in self.runs if run.values["label"] == label]
        return [run for run in chosen if budget in (None, _budget_of(run))]

    def rows(self) -> list[Row]:
        """Return the rows that have final runs, in the order of the plan.

        A row that serves as a control has no control itself: two objectives may control each other.
        """
        added = {item.name for item in self.contents.additions}
        rows: dict[tuple[str, float], Row] = {}
        for objective in self.plan.objectives:
            for budget in self.plan.ladder.budgets:
                if runs := self.of(objective, FINAL, budget):
                    rows[objective.name, budget] = Row(
                        runs,
                        {"label": objective.name},
                        budget=budget,
                        untrained=tuple(self.of(objective, UNTRAINED)),
                        shuffled=tuple(self.of(objective, SHUFFLED, budget)),
                        control_name=objective.control or "",
                        tuning=self.tuning(objective, budget, runs[0]),
                        added=objective.name in added,
                        shipped=_setting_of(runs[0]) in self.shipped,
                    )
        return [
            replace(row, control=rows.get((row.control_name, row.budget))) for row in rows.values()
        ]

    def tuning(self, objective: Objective, budget: float, run: Run) -> TuningRecord | None:
        """Return how the options of a run were chosen; None if there were no trials.

        If no trial has a score any more, the options of the run count as chosen.
        """
        least = self.plan.tuning.plausible
        by_budget = trials_of(self.plan, objective, self.of(objective, TUNE))
        trials = by_budget.get(self.plan.tuning.nearest(budget))
        if trials is None:
            return None
        chosen = {key: run.values.get(key) for key in objective.grid}
        shares = trials.plausible(least)
        if shares:
            chosen = dict(shares[0][0])
        if not least:
            shares = ()
        return TuningRecord(trials.grid, chosen, trials.runs, trials.budget, shares)

    def context(self) -> Context:
        """Return all rows with the facts that gates need to judge them."""
        comparison = self.plan.comparison
        return Context(
            tuple(self.rows()),
            comparison.baseline,
            self.judged,
            len(self.plan.ladder.seeds),
            self.corpus,
            comparison.solved,
            self.plan.controls.shuffled,
            {objective.name: objective.keys for objective in self.plan.objectives},
            comparison.bounds,
            self.plan.ladder.seeds,
        )

    def standings(self) -> entries.Standings:
        """Return the rows with findings and verdicts."""
        plan, comparison = self.plan, self.plan.comparison
        lower = self.metric(comparison.metric).lower_is_better
        return entries.Standings(
            self.contents.title,
            [self.metric(name) for name in plan.metrics],
            comparison.baseline,
            DecisionRule(comparison.smallest_effect, comparison.level, lower, plan.comparisons),
            [self.entry(standing) for standing in examine(self.context())],
            {name: references(self.runs, name) for name in plan.metrics},
            self.notes(),
            self.remarks(),
            [self.metric(name) for name in self.parts],
            self.outcomes(),
            len(plan.tuning.seeds),
            [self.metric(name) for name in comparison.kinds],
            (self.contents.plan.name, self.contents.plan.hash),
        ).decided()

    def of_rung(self, objective: Objective, budget: float) -> list[Run]:
        """Return all runs of an objective at a budget, including trials and shuffled ones."""
        phases = (TUNE, FINAL, SHUFFLED)
        return list(chain.from_iterable(self.of(objective, phase, budget) for phase in phases))

    def outcomes(self) -> list[Outcome]:
        """Return the predictions together with the state of their runs."""
        return [
            Outcome.of(item, self.of_rung(objective_of(self.plan, item.objective), item.budget))
            for item in self.predictions
        ]

    def remarks(self) -> list[str]:
        """Return sentences on parts of the plan that cannot have final runs, or have none yet."""
        plan, prices, rows = self.plan, self.contents.prices, self.rows()
        planned = plan.ladder.budgets
        objectives, budgets = {row.objective for row in rows}, {row.budget for row in rows}
        missing, begun = [], []
        for item in plan.objectives:
            if item.name not in objectives and possible(plan, item, prices, planned):
                missing.append(item.name)
            for budget in planned:
                if (label_of(FINAL, item.name), budget) in self.incomplete:
                    begun.append(f"{item.name} at {flops_text(budget)}")
        missing += [f"{flops_text(b)} FLOPs" for b in planned if b not in budgets]
        remarks = describe_excluded(plan, plan.objectives, prices, planned)
        if begun:
            remarks.append(
                f"Some seeds are unfinished here, so rows that ship stand: {', '.join(begun)}."
            )
        if missing:
            remarks.append(f"The plan has no runs yet of {', '.join(missing)}.")
        return remarks

    @property
    def judged(self) -> tuple[str, ...]:
        """The metrics that gates judge, primary first: with a verdict or only shown."""
        return tuple(dict.fromkeys((*self.plan.metrics, *self.plan.comparison.kinds)))

    @property
    def parts(self) -> tuple[str, ...]:
        """The metrics that the primary metric averages; () if it is not a mean."""
        comparison = self.plan.comparison
        return tuple(comparison.means.get(comparison.metric, ()))

    def metric(self, name: str) -> Metric:
        """Return a metric, with direction and unit."""
        return metric_of(name, self.runs)

    def entry(self, standing: Standing) -> entries.StandingsEntry:
        """Return a row as pages show it."""
        row, names = standing.row, (*self.judged, *self.parts)
        recorded = [run.results for run in row.scored if run.results]
        updates = [results["updates"] for results in recorded if "updates" in results]
        return entries.StandingsEntry(
            row.objective,
            row.budget,
            _known({name: row.scores(name) or None for name in names}),
            _known({name: seed_scores(row.untrained, name) or None for name in names}),
            _known({name: seed_scores(row.shuffled, name) or None for name in names}),
            standing.findings,
            row.shipped,
            math.fsum(updates) / len(updates) if updates else None,
            sds_of_choice=_known({name: row.sd_of_choice(name) for name in self.judged}),
            items=self.test_items(row.runs),
            untrained_items=self.test_items(row.untrained),
            ceilings=_known({name: ceiling(row.scored, name) for name in names}),
        )

    def rows_at(self, flops: str) -> dict[str, Row]:
        """Return the rows of a budget, given as on a command line, by objective.

        Raises UsageError if it is not a number or has no rows.
        """
        try:
            budget = flops_text(float(flops))
        except ValueError:
            raise UsageError(f"{flops!r} is no number of FLOPs, such as 1e12") from None
        rows = {row.objective: row for row in self.rows() if flops_text(row.budget) == budget}
        if not rows:
            raise UsageError(f"{self.contents.title} has no runs at {budget} FLOPs")
        return rows

    def test_items(self, runs: Sequence[Run]) -> dict[str, tuple[Items, ...]]:
        """Return known test items of metrics with verdicts, if the plan asks for their error."""
        comparison = self.plan.comparison
        if not comparison.items:
            return {}
        return _known(
            {name: items_of(runs, name) for name in (comparison.metric, *comparison.kinds)}
        )

    def notes(self) -> list[str]:
        """Return sentences on assumptions, omitted checks and tuning."""
        notes = []
        if guessed := [name for name in self.plan.metrics if self.metric(name).guessed]:
            notes.append(
                f"Of {', '.join(guessed)} the larger value counts as better, although the name "
                "does not say so."
            )
        if self.corpus is None:
            notes.append(
                "The word frequencies of the data are not known, so the gates ceiling and "
                "plateau judge nothing."
            )
        if self.plan.comparison.items:
            name = self.plan.comparison.metric
            missing = [row.objective for row in self.rows() if items_of(row.runs, name) is None]
            if missing:
                notes.append(
                    f"The number of items behind {name} is not known for "
                    f"{', '.join(dict.fromkeys(missing))}, so intervals leave it out."
                )
        return [*notes, *self.tuning_notes(), *self.choice_notes(), *self.provenance()]

    def choice_notes(self) -> list[str]:
        """Return a sentence on the plausible settings of each row; [] if only the best one runs."""
        texts = []
        for row in self.rows():
            if row.tuning and row.tuning.shares:
                settings = (f"{values_text(v)} ({100 * x:.0f} %)" for v, x in row.tuning.shares)
                texts.append(f"{row.objective} at {flops_text(row.budget)} {', '.join(settings)}")
        if not texts:
            return []
        share = f"{100 * self.plan.tuning.plausible:.0f} %"
        return [f"The best in {share} of draws of the tuning seeds or more: {'; '.join(texts)}."]

    def tuning_notes(self) -> list[str]:
        """Return sentences on tuning: trials, FLOPs, and the choices of other metrics."""
        metric, seeds = self.plan.tuning.metric, ", ".join(map(str, self.plan.tuning.seeds))
        parts, trials = [], list[Trials[Trial]]()
        for objective in self.plan.objectives:
            by_budget = trials_of(self.plan, objective, self.of(objective, TUNE))
            if not by_budget:
                continue
            trials += by_budget.values()
            count = sum(len(item.runs) for item in by_budget.values())
            flops = flops_text(sum(item.flops for item in by_budget.values()))
            excess = count - sum(self.plan.trials(objective, budget) for budget in by_budget)
            by = f", by {objective.metric}," * (objective.metric not in (None, metric))
            wider = f", {excess} of them beyond the first grid" * (excess > 0)
            parts.append(f"{objective.name}{by} {count} trials, {flops} FLOPs{wider}")
        if not parts:
            return []
        note = f"Tuned by {metric} on seed {seeds}: {'; '.join(parts)}."
        return [note, *describe_other_choices(self.plan, trials)]

    def provenance(self) -> list[str]:
        """Return a sentence on when the runs were made and with which code; [] without runs."""
        trials: list[Run] = []
        finals: list[Run] = []
        for objective in self.plan.objectives:
            trials += self.of(objective, TUNE)
            finals += self.of(objective, FINAL)
        return [describe_provenance(trials, finals, self.runs)] if self.runs else []


def predict_rungs(
    league: LeagueRuns, objectives: Sequence[str] = (), budgets: Sequence[float] = ()
) -> tuple[list[Prediction], list[str]]:
    """Return predictions of objectives at budgets, and the reasons for missing ones.

    By default, predict every objective at its first budget without runs.
    """
    plan, standings = league.plan, league.standings()
    predictions, reasons = [], []
    for name in dict.fromkeys(objectives or [objective.name for objective in plan.objectives]):
        objective = objective_of(plan, name)
        free = [b for b in plan.ladder.budgets if not league.of_rung(objective, b)]
        if not (budgets or free):
            reasons.append(f"{name}: all budgets of the plan have runs")
        for budget in dict.fromkeys(budgets or free[:1]):
            try:
                predictions.append(_predict_rung(league, standings, objective, budget))
            except UsageError as error:
                reasons.append(f"{name} at {flops_text(budget)}: {error}")
    return predictions, reasons


def _predict_rung(
    league: LeagueRuns, standings: entries.Standings, objective: Objective, budget: float
) -> Prediction:
    """Return the prediction of an objective at a budget; UsageError if none can be made."""
    if league.of_rung(objective, budget):
        raise UsageError("it has runs already")
    # The first one counts, whatever runs came since: a later one could know their scores.
    for earlier in league.predictions:
        if (earlier.objective, earlier.budget) == (objective.name, budget):
            value = standings.primary.text(earlier.value)
            raise UsageError(f"predicted already, {value} at {earlier.time}; the first one counts")
    prediction = predict(standings, objective.name, budget)
    plan = league.contents.plan.hash
    return replace(prediction, time=present_time(), plan=plan, code=code_hash(None))


def _known(values: Mapping[str, T | None]) -> dict[str, T]:
    return {name: value for name, value in values.items() if value is not None}


def _budget_of(run: Run) -> float:
    """Return the budget of a run, 0 without one."""
    return float(run.values.get(BUDGET) or 0)


def read_league_runs(folder: LeagueFolder, contents: Contents) -> LeagueRuns:
    """Return the runs of a league, and archived runs for settings that it has not completed.

    Predictions of both are included. Raises UsageError for a run or a prediction of another plan.
    """
    folder.check_plans(contents.plan.hash)
    predictions = read_predictions(folder.path)
    _check_predictions(predictions, FILE, contents.plan)
    runs = folder.runs()
    shipped = read_archived(contents)
    contents = replace(shipped.contents, prices={**shipped.contents.prices, **contents.prices})
    predictions += [item for item in shipped.predictions if item not in predictions]
    # A setting with some of its seeds still open here keeps its archived runs until they are over.
    local = {_setting_of(run) for run in runs}
    whole = complete_rows(runs, contents.extended)
    incomplete = (local - whole) & shipped.shipped
    runs = [run for run in runs if _setting_of(run) not in incomplete]
    archived = [run for run in shipped.runs if _setting_of(run) not in local - incomplete]
    corpus = shipped.corpus
    with suppress(MetaseqError, OSError):  # the data may not be there
        shifted = contents.plan.controls.shifted_valid
        corpus = read_corpus(data_folder(contents.plan, folder.data), shifted)
    return LeagueRuns(
        contents,
        _with_means(contents, [*archived, *runs]),
        corpus,
        frozenset(map(_setting_of, archived)),
        frozenset(incomplete),
        tuple(sorted(predictions, key=lambda item: item.time)),
    )


def _check_predictions(predictions: Sequence[Prediction], source: str, plan: Plan) -> None:
    """Raise UsageError, which names the source and the line, for a prediction of another plan."""
    plans = {f"{source}, line {i}": item.plan for i, item in enumerate(predictions, 1)}
    check_plans(plans, plan.hash, "prediction")


def complete_rows(runs: Iterable[Run], plan: Plan) -> set[tuple[str, float]]:
    """Return label and budget of settings whose planned runs (seeds or trials) have all ended."""
    # A diverged run is a result, and is not started again.
    over = Counter(_setting_of(run) for run in runs if run.status in ("finished", "diverged"))
    controls, finals = len(plan.controls.seeds), len(plan.ladder.seeds)
    seeds = {FINAL: finals, UNTRAINED: controls, SHUFFLED: controls}
    needed = {label_of(p, x.name): seeds[p] for p, x in product(seeds, plan.objectives)}
    tuned = {label_of(TUNE, objective.name): objective for objective in plan.objectives}
    whole = set()
    for (label, budget), count in over.items():
        trials = plan.trials(tuned[label], budget) if label in tuned else 0
        if count >= needed.get(label, trials):
            whole.add((label, budget))
    return whole


def read_league(place: Path) -> LeagueRuns:
    """Return the runs in a league's folder, or those in the archive next to a plan.

    Raises the errors of `read_league_runs` and `read_archived`.
    """
    if not place.is_file():
        folder = LeagueFolder(place)
        return read_league_runs(folder, folder.read())
    return read_archived(Contents.of_file(place))


def archive_of(contents: Contents) -> Path | None:
    """Return the archive of a plan, which may be gone; None if it never had one."""
    return Path(contents.archive) if contents.archive else shipped_archive(contents.plan)


def with_archived(contents: Contents) -> Contents:
    """Return contents together with the objectives added in the archive of the plan.

    Raises MetaseqError if the archive is damaged.
    """
    file = archive_of(contents)
    if file is None or not file.exists():
        return contents
    about = archive.read_about(file)
    if about.get("plan") != contents.plan.hash:
        return contents
    records = archive.read_fact(file, about, _ADDED, [ADDED_SCHEMA, ...], "[]")
    return replace(contents, archived=tuple(map(Added.of, records)))


def read_archived(contents: Contents) -> LeagueRuns:
    """Return the runs of the archive of a plan; none without an archive of this plan.

    An objective that was added in the archive is left out, with its predictions, if one of the same
    name was added here. Without facts about the corpus the gates on losses find nothing.

    Raises:
        UsageError: A run is of another plan.
        MetaseqError: The archive is damaged.
    """
    file = archive_of(contents)
    if file is None:
        return LeagueRuns(contents, ())
    about = archive.read_about(file) if file.exists() else {}
    if about.get("plan") != contents.plan.hash:
        reason = f"of another plan ({about.get('plan')})" if file.exists() else "gone"
        say(f"metaseq-lm: warning: {file} is {reason}, so its runs are left out")
        return LeagueRuns(contents, ())
    prices = archive.read_fact(file, about, "prices", PRICES, "{}")
    contents = with_archived(contents)
    runs = _with_means(contents, archive.read(file))
    check_plans({run.name: run.plan for run in runs}, contents.plan.hash)
    source = f"{file}, predictions"
    predictions = parse_lines(about.get(PREDICTIONS, ""), source)
    _check_predictions(predictions, source, contents.plan)
    local = {item.key for item in contents.added}
    hidden = [item.name for item in contents.archived if item.key in local]
    labels = _labels_of(hidden)
    runs = tuple(run for run in runs if run.values["label"] not in labels)
    return LeagueRuns(
        replace(contents, prices={k: float(x) for k, x in prices.items() if k not in hidden}),
        runs,
        from_about(file, about),
        frozenset(map(_setting_of, runs)),
        predictions=tuple(p for p in predictions if p.objective not in hidden),
    )


def _with_means(contents: Contents, runs: Iterable[Run]) -> tuple[Run, ...]:
    return tuple(replace(run, means=contents.plan.comparison.means) for run in runs)


def _setting_of(run: Run) -> tuple[str, float]:
    """Return label and budget, which runs of all seeds share."""
    return run.values["label"], _budget_of(run)


def write_archive(path: Path, league: LeagueRuns) -> None:
    """Write the runs, added objectives, facts about the data and predictions into an archive."""
    contents = league.contents
    names = [objective.name for objective in league.plan.objectives]
    labels = _labels_of(names)
    runs = [run for run in league.runs if run.values["label"] in labels]
    prices = {name: contents.prices[name] for name in names if name in contents.prices}
    about = {"plan": contents.plan.hash, "prices": json.dumps(prices)}
    if contents.additions:
        about[_ADDED] = json.dumps([item.portable.record for item in contents.additions])
    if league.corpus:
        about["corpus"] = league.corpus.as_text()
    predictions = [item for item in league.predictions if item.objective in names]
    if predictions:
        about[PREDICTIONS] = as_lines(predictions)
    archive.write(path, runs, about)


def _labels_of(names: Iterable[str]) -> set[str]:
    return set(starmap(label_of, product(PHASES, names)))


def _shown_standings(league: LeagueRuns, budgets: Sequence[float] = ()) -> entries.Standings:
    """Return the standings of `budgets` (default: all); UsageError without rows."""
    standings = league.standings()
    # Rows are left out after the tests, so that a choice of budgets changes no verdict.
    if budgets:
        shown = [entry for entry in standings.entries if entry.budget in budgets]
        predicted = [o for o in standings.predictions if o.prediction.budget in budgets]
        standings = replace(standings, entries=shown, predictions=predicted)
    if not standings.entries:
        raise UsageError(f"{league.contents.title}: there are no runs to compare yet")
    return standings


def show_report(
    league: LeagueRuns,
    folder: Path | None,
    budgets: Sequence[float] = (),
    command: str = "",
    reload: int = 0,
    about: Sequence[str] = (),
) -> None:
    """Print the standings, for a terminal or as JSON; write their page into `folder`, if given.

    All rows are tested, but only rows of `budgets` (default: all) are shown. The page names
    `command`, and reloads itself after `reload` seconds, 0 for never. For each objective in `about`
    a sentence names the kinds of labels in which it leads. Raises UsageError without rows.
    """
    standings = _shown_standings(league, budgets)
    paths: Sequence[Path] = ()
    if folder:
        paths = write_page(standings, folder, repeat(league, command), reload)
    sentences = [describe_answer(standings, name) for name in about if standings.kinds]
    text = "\n".join([terminal_text(standings, paths), *sentences])
    show_result("standings", standings_document(standings), text)


def repeat(league: LeagueRuns, command: str) -> Section:
    """Return the section on repeating a league: plan with hash, added objectives, commands."""
    contents = league.contents
    commands = ["metaseq-lm league plan.yaml --out L"]
    for item in contents.additions:
        commands.append(f"metaseq-lm league --out L {masked(item.words)}")
    further = f"; with what was added it is {league.plan.hash}" * bool(contents.additions)
    notes = [f"The hash of the plan is {contents.plan.hash}{further}."]
    plan = OmegaConf.to_yaml(dict(contents.content))
    texts = [("The league", "\n".join(commands)), ("plan.yaml", plan)]
    texts += [("This page", command)] * bool(command)
    return Section(REPEAT.title, notes, texts=texts)
