"""The standings of a league: rows with scores, controls, findings of gates, and verdicts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from metaseq_lm.league.gate import lacked_by
from metaseq_lm.league.predictions import Outcome
from metaseq_lm.league.score_errors import Items, choice_error, item_errors
from metaseq_lm.league.standings import FLAG, REFUSE, VOID, GateFinding
from metaseq_lm.league.verdict import WORSE, Decision, DecisionRule, Gain, decide_all
from metaseq_lm.reporting.numbers import Metric, summarise
from metaseq_lm.reporting.stats import Errors

__all__ = ["Standings", "StandingsEntry"]

Scores = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class StandingsEntry:
    """A row of the standings: an objective at a budget.

    Attributes:
        objective: Its name.
        budget: The FLOPs of a run.
        scores: Scores of each metric, by seed.
        untrained: Scores of the model without training, in the same form.
        shuffled: Scores of the objective on shuffled rows, in the same form.
        findings: Findings of the gates.
        shipped: Whether its runs came with the plan.
        updates: Updates of a run, averaged over runs; None if unknown.
        decision: Verdict on the primary metric against the baseline at this budget; None if
            untested.
        gain_decision: Verdict on the gain over the untrained model against the baseline's gain;
            None if untested, or if either lacks untrained models.
        sds_of_choice: Sd of choice by metric, see `Row.sd_of_choice`; empty if nothing was chosen.
        items: Test items of the score by metric, see `items_of`; empty if they are unknown or the
            plan does not ask for their error.
        untrained_items: The same for the untrained model.
        ceilings: The highest reachable score by metric, where it is known.
        of_kinds: Verdicts on the means of kinds of labels by name, for those that were tested.
    """

    objective: str
    budget: float
    scores: Scores
    untrained: Scores = field(default_factory=dict)
    shuffled: Scores = field(default_factory=dict)
    findings: Sequence[GateFinding] = ()
    shipped: bool = False
    updates: float | None = None
    decision: Decision | None = None
    gain_decision: Decision | None = None
    sds_of_choice: Mapping[str, float] = field(default_factory=dict)
    items: Mapping[str, Sequence[Items]] = field(default_factory=dict)
    untrained_items: Mapping[str, Sequence[Items]] = field(default_factory=dict)
    ceilings: Mapping[str, float] = field(default_factory=dict)
    of_kinds: Mapping[str, Decision] = field(default_factory=dict)

    def about(self, metric: str, *actions: str) -> list[GateFinding]:
        """Return the findings about a metric with one of the given actions."""
        return [f for f in self.findings if f.action in actions and f.metric in ("", metric)]

    def is_ranked(self, metric: str) -> bool:
        """Return whether the row has scores of a metric and no finding excludes them."""
        return bool(self.scores.get(metric)) and not self.about(metric, VOID, REFUSE, FLAG)

    def is_tested(self, metric: str) -> bool:
        """Return whether the row is compared with the baseline, even if flagged for a lack."""
        bars = [f for f in self.about(metric, VOID, REFUSE, FLAG) if not lacked_by(f.gate)]
        return bool(self.scores.get(metric)) and not bars

    def gain(self, metric: str) -> Gain | None:
        """Return the gain of training in a metric; None without scores of both models."""
        scores, untrained = self.scores.get(metric), self.untrained.get(metric)
        if not (scores and untrained) or self.about(metric, VOID, REFUSE):
            return None
        return Gain(scores, untrained)

    def held(self, decision: Decision | None, metric: str) -> Decision | None:
        """Return a decision if it holds for the row; for an unranked row only "worse" does."""
        is_held = decision and (self.is_ranked(metric) or decision.verdict == WORSE)
        return decision if is_held else None


@dataclass(frozen=True)
class Standings:
    """The content of a page.

    Attributes:
        title: The name of the plan and its hash, as lists name the league.
        metrics: The metrics, the primary one first.
        baseline: The objective that all others are compared with.
        rule: The rule of the verdicts.
        entries: The rows, in the order of the plan.
        references: Scores that need no training, such as chance, by metric and name.
        notes: Sentences below the table, such as the cost of tuning.
        remarks: Sentences on parts of the plan without rows, also for a terminal.
        parts: The metrics that the primary one averages; () if it is not a mean.
        predictions: Predictions made before rows ran.
        tuning_seeds: The seeds of each trial.
        kinds: The means of kinds of labels, each with its own verdicts; () for most plans.
        plan: The name of the plan and its hash, apart.
        focus: The metric that a column is about; None for the primary one.
    """

    title: str
    metrics: Sequence[Metric]
    baseline: str
    rule: DecisionRule
    entries: Sequence[StandingsEntry]
    references: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    remarks: Sequence[str] = ()
    parts: Sequence[Metric] = ()
    predictions: Sequence[Outcome] = ()
    tuning_seeds: int = 1
    kinds: Sequence[Metric] = ()
    plan: tuple[str, str] = ("", "")
    focus: Metric | None = None

    @property
    def primary(self) -> Metric:
        """The metric that decides."""
        return self.metrics[0]

    @property
    def metric(self) -> Metric:
        """The metric that columns are about."""
        return self.focus or self.primary

    def about(self, metric: Metric | None) -> "Standings":
        """Return the same rows in their order for columns about another metric, if any is given."""
        if metric is None:
            return self
        return replace(self, focus=None if metric == self.primary else metric)

    def decision(self, entry: StandingsEntry) -> Decision | None:
        """Return the decision on a row by the metric in focus; None for an untested one."""
        return entry.of_kinds.get(self.focus.name) if self.focus else entry.decision

    def stated(self, entry: StandingsEntry) -> Decision | None:
        """Return the decision on a row by the metric in focus if it holds for the row."""
        return entry.held(self.decision(entry), self.metric.name)

    def stated_gain(self, entry: StandingsEntry) -> Decision | None:
        """Return the decision on the gain of a row if it holds for the row."""
        return entry.held(entry.gain_decision, self.primary.name)

    @property
    def budgets(self) -> list[float]:
        """The budgets of the rows, the smallest first."""
        return sorted({entry.budget for entry in self.entries})

    @property
    def ordered(self) -> list[StandingsEntry]:
        """The rows by budget, those of a budget as `at` has them."""
        return list(chain.from_iterable(map(self.at, self.budgets)))

    def at(self, budget: float) -> list[StandingsEntry]:
        """Return the rows of a budget: ranked from best to worst, then flagged, then others."""
        present = [entry for entry in self.entries if entry.budget == budget]
        return sorted(present, key=lambda entry: _rank_key(entry, self.primary))

    def best(self, budget: float) -> StandingsEntry | None:
        """Return the best row of a budget by the metric in focus; None if less than two rank."""
        present = [e for e in self.entries if e.budget == budget and e.is_ranked(self.metric.name)]
        best = min(present, key=lambda entry: _rank_key(entry, self.metric), default=None)
        return best if len(present) > 1 else None

    def decided(self) -> "Standings":
        """Return the standings with decisions on every tested row that has a ranked baseline.

        Decisions on gains are a family of their own, with the same comparisons and a separate
        correction. So are the decisions on each kind of labels; there the baseline need only be
        tested: at the level of untrained models it may not see what the labels describe.
        """
        name = self.primary.name
        pairs = self._pairs(name, StandingsEntry.is_ranked)
        decisions = self._decide(self.primary, pairs)
        gains, errors = {}, []
        for i, (entry, base) in pairs.items():
            gain, base_gain = entry.gain(name), base.gain(name)
            if gain and base_gain:
                gains[i] = gain.over(base_gain)
                errors.append(self.errors(name, entry, base, of_gains=True))
        on_gains = dict(zip(gains, decide_all(list(gains.values()), self.rule, errors)))
        by_kind = {}
        for kind in self.kinds:
            by_kind[kind.name] = self._decide(
                kind, self._pairs(kind.name, StandingsEntry.is_tested)
            )
        entries = []
        for i, entry in enumerate(self.entries):
            of_kinds = {kind: of[i] for kind, of in by_kind.items() if i in of}
            decision, gain_decision = decisions.get(i), on_gains.get(i)
            entries.append(
                replace(entry, decision=decision, gain_decision=gain_decision, of_kinds=of_kinds)
            )
        return replace(self, entries=entries)

    def _pairs(
        self, name: str, may_be_baseline: Callable[[StandingsEntry, str], bool]
    ) -> dict[int, tuple[StandingsEntry, StandingsEntry]]:
        """Return each tested row with the baseline of its budget, by the number of the row."""
        named = [entry for entry in self.entries if entry.objective == self.baseline]
        bases = {entry.budget: entry for entry in named if may_be_baseline(entry, name)}
        pairs = {}
        for i, entry in enumerate(self.entries):
            base = bases.get(entry.budget)
            if base and base is not entry and entry.is_tested(name):
                pairs[i] = entry, base
        return pairs

    def _decide(
        self, metric: Metric, pairs: Mapping[int, tuple[StandingsEntry, StandingsEntry]]
    ) -> dict[int, Decision]:
        name, rule = metric.name, self.rule
        if metric != self.primary:
            rule = replace(rule, lower_is_better=metric.lower_is_better)
        scores = [(entry.scores[name], base.scores[name]) for entry, base in pairs.values()]
        errors = [self.errors(name, *pair) for pair in pairs.values()]
        return dict(zip(pairs, decide_all(scores, rule, errors)))

    def errors(
        self, name: str, entry: StandingsEntry, base: StandingsEntry, of_gains: bool = False
    ) -> Errors:
        """Return the errors of the difference of two rows of a budget, other than seeds.

        They are the choice of settings, pooled over all tested rows of the budget, and the test
        items, see `score_errors`. With `of_gains` they are errors of the difference of gains.
        """
        others = [x for x in self.entries if x.budget == entry.budget and x.is_tested(name)]
        sds = [other.sds_of_choice[name] for other in others if name in other.sds_of_choice]
        tuned = sum(name in side.sds_of_choice for side in (entry, base))
        choices = [choice_error(sds, self.tuning_seeds, tuned)] if tuned else []
        sides = [(1, entry.items), (-1, base.items)]
        if of_gains:
            sides += [(-1, entry.untrained_items), (1, base.untrained_items)]
        return (*choices, *item_errors(*((sign, items.get(name, ())) for sign, items in sides)))

    @property
    def comparisons(self) -> int:
        """The number of verdicts that Holm's correction counts: planned ones, or more if made."""
        decided = sum(entry.decision is not None for entry in self.entries)
        return max(self.rule.comparisons, decided)

    @property
    def has_choices(self) -> bool:
        """Whether the choice of settings is part of the experiment."""
        return any(entry.sds_of_choice for entry in self.entries)

    @property
    def has_items(self) -> bool:
        """Whether the test items are part of the error."""
        return any(entry.items for entry in self.entries)

    @property
    def has_gains(self) -> bool:
        """Whether any row has a gain over untrained models."""
        return any(entry.gain(self.primary.name) for entry in self.entries)


def _rank_key(entry: StandingsEntry, metric: Metric) -> tuple[int, float]:
    summary = summarise(entry.scores.get(metric.name, ()))
    if entry.about(metric.name, VOID, REFUSE) or summary is None:
        return 2, 0.0
    centre = summary.centre if metric.lower_is_better else -summary.centre
    return int(not entry.is_ranked(metric.name)), centre
