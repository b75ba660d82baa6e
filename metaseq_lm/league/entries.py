"""The standings of a league: rows with scores, controls, findings of gates, and verdicts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from metaseq_lm.league.choice import choice_error
from metaseq_lm.league.gate import lacked_by
from metaseq_lm.league.items import Items, item_errors
from metaseq_lm.league.predictions import Outcome
from metaseq_lm.league.standings import FLAG, REFUSE, VOID, Finding
from metaseq_lm.league.verdict import WORSE, Decision, Gain, Rule, decide_all
from metaseq_lm.reporting.numbers import Metric, summarise
from metaseq_lm.reporting.stats import Errors

NOT_RANKED = {VOID: "void", REFUSE: "refused", FLAG: "not ranked"}
Scores = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Entry:
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
    findings: Sequence[Finding] = ()
    shipped: bool = False
    updates: float | None = None
    decision: Decision | None = None
    gain_decision: Decision | None = None
    sds_of_choice: Mapping[str, float] = field(default_factory=dict)
    items: Mapping[str, Sequence[Items]] = field(default_factory=dict)
    untrained_items: Mapping[str, Sequence[Items]] = field(default_factory=dict)
    ceilings: Mapping[str, float] = field(default_factory=dict)
    of_kinds: Mapping[str, Decision] = field(default_factory=dict)

    def about(self, metric: str, *actions: str) -> list[Finding]:
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
        hidden = self.about(metric, VOID, REFUSE)
        return Gain(scores, untrained) if scores and untrained and not hidden else None

    def stated(self, metric: str) -> Decision | None:
        """Return the decision if it holds for the row; for an unranked row only "worse" does."""
        return self.decision if self.holds(self.decision, metric) else None

    def stated_gain(self, metric: str) -> Decision | None:
        """Return the decision on the gain if it holds for the row, see `stated`."""
        return self.gain_decision if self.holds(self.gain_decision, metric) else None

    def stated_of(self, kind: str) -> Decision | None:
        """Return the decision on a kind of labels if it holds for the row, see `stated`."""
        decision = self.of_kinds.get(kind)
        return decision if self.holds(decision, kind) else None

    def holds(self, decision: Decision | None, metric: str) -> bool:
        """Return whether a decision may be stated for the row."""
        return decision is not None and (self.is_ranked(metric) or decision.verdict == WORSE)


@dataclass(frozen=True)
class Standings:
    """The content of a page.

    Attributes:
        title: The name of the plan and its hash.
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
    """

    title: str
    metrics: Sequence[Metric]
    baseline: str
    rule: Rule
    entries: Sequence[Entry]
    references: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    remarks: Sequence[str] = ()
    parts: Sequence[Metric] = ()
    predictions: Sequence[Outcome] = ()
    tuning_seeds: int = 1
    kinds: Sequence[Metric] = ()

    @property
    def primary(self) -> Metric:
        """The metric that decides."""
        return self.metrics[0]

    @property
    def budgets(self) -> list[float]:
        """The budgets of the rows, the smallest first."""
        return sorted({entry.budget for entry in self.entries})

    def decided(self) -> "Standings":
        """Return the standings with decisions on every tested row that has a ranked baseline.

        Decisions on gains are a family of their own, with the same comparisons and a separate
        correction. So are the decisions on each kind of labels.
        """
        name, baselines = self.primary.name, {}
        for entry in self.entries:
            if entry.objective == self.baseline and entry.is_ranked(name):
                baselines[entry.budget] = entry
        scores, gains = {}, {}
        errors: dict[int, Errors] = {}
        of_gains: list[Errors] = []
        for i, entry in enumerate(self.entries):
            base = baselines.get(entry.budget)
            if base and base is not entry and entry.is_tested(name):
                scores[i] = entry.scores[name], base.scores[name]
                errors[i] = self.errors(name, entry, base)
                gain, base_gain = entry.gain(name), base.gain(name)
                if gain and base_gain:
                    gains[i] = gain.over(base_gain)
                    of_gains.append(self.errors(name, entry, base, of_gains=True))
        judged = decide_all(list(scores.values()), self.rule, list(errors.values()))
        decisions = dict(zip(scores, judged))
        on_gains = dict(zip(gains, decide_all(list(gains.values()), self.rule, of_gains)))
        by_kind = {kind.name: self._decide_kind(kind) for kind in self.kinds}
        entries = []
        for i, entry in enumerate(self.entries):
            of_kinds = {kind: of[i] for kind, of in by_kind.items() if i in of}
            entries.append(
                replace(
                    entry,
                    decision=decisions.get(i),
                    gain_decision=on_gains.get(i),
                    of_kinds=of_kinds,
                )
            )
        return replace(self, entries=entries)

    def errors(self, name: str, entry: Entry, base: Entry, of_gains: bool = False) -> Errors:
        """Return the errors of the difference of two rows of a budget, other than seeds.

        They are the choice of settings (see `choice`), pooled over all tested rows of the budget,
        and the test items. With `of_gains` they are errors of the difference of gains.
        """
        sds = [
            other.sds_of_choice[name]
            for other in self.entries
            if other.budget == entry.budget
            and other.is_tested(name)
            and name in other.sds_of_choice
        ]
        tuned = sum(name in side.sds_of_choice for side in (entry, base))
        choices = [choice_error(sds, self.tuning_seeds, tuned)] if tuned else []
        sides = [(1, entry.items), (-1, base.items)]
        if of_gains:
            sides += [(-1, entry.untrained_items), (1, base.untrained_items)]
        return (*choices, *item_errors(*((sign, items.get(name, ())) for sign, items in sides)))

    @property
    def has_choices(self) -> bool:
        """Whether the choice of settings is part of the experiment."""
        return any(entry.sds_of_choice for entry in self.entries)

    @property
    def has_items(self) -> bool:
        """Whether the test items are part of the error."""
        return any(entry.items for entry in self.entries)

    def _decide_kind(self, kind: Metric) -> dict[int, Decision]:
        """Return the decisions on a kind of labels, by the number of the row.

        A baseline at the level of untrained models still counts: it may not see what the labels
        describe.
        """
        name, pairs, errors = kind.name, {}, []
        tested = {i: entry for i, entry in enumerate(self.entries) if entry.is_tested(name)}
        bases = {e.budget: e for e in tested.values() if e.objective == self.baseline}
        for i, entry in tested.items():
            base = bases.get(entry.budget)
            if base and base is not entry:
                pairs[i] = entry.scores[name], base.scores[name]
                errors.append(self.errors(name, entry, base))
        rule = replace(self.rule, lower_is_better=kind.lower_is_better)
        return dict(zip(pairs, decide_all(list(pairs.values()), rule, errors)))

    @property
    def has_gains(self) -> bool:
        """Whether any row has a gain over untrained models."""
        return any(entry.gain(self.primary.name) for entry in self.entries)

    def at(self, budget: float, metric: Metric) -> list[Entry]:
        """Return the rows of a budget: ranked from best to worst, then flagged, then others."""
        present = [entry for entry in self.entries if entry.budget == budget]
        return sorted(present, key=lambda entry: _rank_key(entry, metric))

    def verdict_text(self, entry: Entry, kind: str = "") -> str:
        """Return the verdict on a row, or on a kind of labels, in words, or why there is none."""
        name = kind or self.primary.name
        decided, stated = entry.decision, entry.stated(name)
        if kind:
            decided, stated = entry.of_kinds.get(kind), entry.stated_of(kind)
        for action in (VOID, REFUSE, FLAG):
            if findings := entry.about(name, action):
                gates = ", ".join(dict.fromkeys(finding.gate for finding in findings))
                return f"{stated.text if stated else NOT_RANKED[action]}: {gates}"
        if not entry.scores.get(name):
            return "no scores"
        if entry.objective == self.baseline:
            return "baseline"
        return decided.text if decided else "no baseline to compare with"

    def marks(self, entry: Entry, metric: str) -> list[str]:
        """Return the letters of the gates that flag a metric of a row."""
        letters = self.letters(metric)
        return sorted({letters[finding.gate] for finding in entry.about(metric, FLAG)})

    def letters(self, metric: str) -> dict[str, str]:
        """Return the letter of each gate that flags a row, first those of rows with a number."""
        gates: dict[str, None] = {}
        entries = [entry for budget in self.budgets for entry in self.at(budget, self.primary)]
        entries.sort(key=lambda entry: bool(entry.about(metric, VOID, REFUSE)))
        for entry in entries:
            gates.update(dict.fromkeys(f.gate for f in entry.about(metric, FLAG)))
        return {gate: letter(i) for i, gate in enumerate(gates)}


def letter(i: int) -> str:
    """Return the i-th of a, b, ..., z, aa, ab, ..."""
    return (letter(i // 26 - 1) if i >= 26 else "") + chr(ord("a") + i % 26)


def _rank_key(entry: Entry, metric: Metric) -> tuple[int, float]:
    """Return the sort key of a row within its budget."""
    summary = summarise(entry.scores.get(metric.name, ()))
    centre = summary.centre if summary else float("-inf")
    if entry.about(metric.name, VOID, REFUSE) or summary is None:
        return 2, 0.0
    group = 0 if entry.is_ranked(metric.name) else 1
    return group, centre if metric.lower_is_better else -centre
