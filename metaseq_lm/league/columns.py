"""The registry of columns: what standings say about a row, formatted alike by all back ends.

A column is a function of the standings and a row. Tables in files and on the page, csv and JSON
also have those of a plug-in, see docs/reference/columns.md:

    @column("loss", title="validation loss")
    def loss(standings: Standings, entry: Entry) -> Value: ...
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from operator import attrgetter
from string import ascii_lowercase
from typing import Any

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import Registry
from metaseq_lm.league.entries import Scores, Standings, StandingsEntry
from metaseq_lm.league.standings import FLAG, REFUSE, VOID
from metaseq_lm.league.verdict import BETTER, EQUIVALENT, WORSE, Decision, DecisionRule
from metaseq_lm.reporting.numbers import Metric, flops_text, p_text, summarise
from metaseq_lm.reporting.table import Cell, Table

__all__ = ["Value", "column"]

DOUBT = "?"  # suffix of a brief number that a gate flags
NONE = "-"
NOT_RANKED = {VOID: "void", REFUSE: "refused", FLAG: "not ranked"}
_SIGNS = {BETTER: "+", WORSE: "-", EQUIVALENT: "="}
_PLAIN = Metric("", percent=False, lower_is_better=False)
_LETTERS = [*ascii_lowercase, *map("".join, product(ascii_lowercase, repeat=2))]

# The columns of the tables in files and on the page, and of a terminal.
STANDINGS = (
    *("budget", "objective", "seeds", "updates", "score", "choice", "part", "untrained"),
    *("shuffled", "difference", "interval", "p", "verdict", "gain", "gain verdict"),
)
GAINS = (
    *("budget", "objective", "untrained", "gain", "gain interval", "gain difference"),
    *("gain difference interval", "gain p", "gain verdict"),
)
KINDS = ("budget", "objective", "labels", "score", "difference", "interval", "p", "verdict")
OTHERS = ("budget", "objective", "other")
OVERVIEW = ("objective", "budget", "score", "kind", "difference", "interval", "p", "verdict")
SCREEN = (
    *("objective", "seeds", "score", "choice", "part", "difference", "verdict"),
    *("gain", "gain verdict"),
)
# The columns of csv and JSON, whether or not a table shows them.
_RECORD = ("objective", "budget", "score", "untrained", "shuffled", "choice")
_DECISION = ("difference", "interval", "p", "verdict")
_FURTHER = ("updates", *GAINS[3:], "findings")


@dataclass(frozen=True)
class Value:
    """What a column says about a row.

    Attributes:
        record: Unrounded values by key, for csv and JSON. In tables of a plug-in's column it may be
            left out: then the name of the column has the number or the text.
        metric: The unit of the numbers.
        mean: The number, None without one.
        sd: Its sd.
        interval: The ends of its interval; alone if there is no number.
        is_signed: Whether numbers have a sign.
        text: A text in place of numbers.
        short: The text for a terminal, if it differs.
        word: The text for a terminal in a word.
        marks: The letters of gates that flag it.
        hidden: Why no number may be shown, such as "void"; "" if it may.
        verdict: The verdict on the number.
        is_number: Whether to align and sort it as a number, by default unless it is a text.
    """

    record: Mapping[str, Any] = field(default_factory=dict)
    metric: Metric = _PLAIN
    mean: float | None = None
    sd: float | None = None
    interval: tuple[float, float] | None = None
    is_signed: bool = False
    text: str | None = None
    short: str | None = None
    word: str = ""
    marks: Sequence[str] = ()
    hidden: str = ""
    verdict: str = ""
    is_number: bool | None = None

    @property
    def wide(self) -> str:
        """The text in a file: "70.65 ± 2.30 a", "void", "+6.26 to +13.83"."""
        if self.text is not None or self.hidden:
            return self.text or self.hidden
        mean, ends = self._texts()
        if self.mean is None and ends:
            return ends
        return " ".join([mean, *self.marks])

    @property
    def narrow(self) -> str:
        """The text on a terminal: "70.7 ± 2.3", "void", "-8.1 (-10.1 to -6.2)"."""
        if self.short is not None or self.text is not None or self.hidden:
            return self.short or self.text or self.hidden
        mean, ends = self._texts(1 if self.metric.percent else None)
        if self.mean is None and ends:
            return ends
        return f"{mean} ({ends})" if ends else mean

    @property
    def brief(self) -> str:
        """The mean with the mark of a gate: "63?"; "-" for a hidden one."""
        mean = replace(self, sd=None).brief_spread
        return mean + DOUBT * bool(self.marks and mean != NONE)

    @property
    def brief_spread(self) -> str:
        """Mean and sd: "61 ±3"; "-" for a hidden one."""
        if self.mean is None or self.hidden:
            return NONE
        digits = 0 if self.metric.percent else None
        mean = self.metric.text(self.mean, digits)
        return mean if self.sd is None else f"{mean} ±{self.metric.text(self.sd, digits)}"

    @property
    def sign(self) -> str:
        """The mark of the verdict, "+", "-", "=" or none, and that of a gate."""
        if self.hidden:
            return ""
        return _SIGNS.get(self.verdict, "") + DOUBT * bool(self.marks)

    def cell(self, is_best: bool = False) -> Cell:
        """Return the cell of a table."""
        is_number = self.text is None if self.is_number is None else self.is_number
        return Cell(self.wide, is_best, is_number)

    def _texts(self, digits: int | None = None) -> tuple[str, str]:
        """Return mean ± sd, "-" without a mean, and the ends of the interval, "" without one."""
        numbers = [x for x in (self.mean, self.sd, *(self.interval or ())) if x is not None]
        if digits is None and numbers:  # those of the largest number
            digits = self.metric.decimals(max(map(abs, numbers)))

        def signed(number: float) -> str:
            return "+" * (self.is_signed and number >= 0) + self.metric.text(number, digits)

        mean = NONE if self.mean is None else signed(self.mean)
        if self.mean is not None and self.sd is not None:
            mean += f" ± {self.metric.text(self.sd, digits)}"
        return mean, " to ".join(map(signed, self.interval or ()))


Show = Callable[[Standings, StandingsEntry], Value]
COLUMNS: Registry[Show] = Registry("column")


@dataclass(frozen=True)
class Column:
    """How a column is shown.

    Attributes:
        title: Its title. {metric} stands for the metric with its unit, {name} for its short name,
            {interval} for the title of intervals.
        applies: Whether the tables of some standings have it.
        over: The metrics of which each has a column; by default there is one column (None).
        on_screen: Its title on a terminal, if it differs.
        has_best: Whether the best of a budget is marked.
    """

    title: str
    applies: Callable[[Standings], bool] = lambda standings: True
    over: Callable[[Standings], Sequence[Metric | None]] = lambda standings: [None]
    on_screen: str = ""
    has_best: bool = False

    def title_in(self, standings: Standings, on_screen: bool = False) -> str:
        """Return the title in standings about a metric."""
        title, metric = self.on_screen * on_screen or self.title, standings.metric
        interval = interval_title(standings.rule)
        return title.format(metric=metric.title, name=short_name(metric), interval=interval)


_shown: dict[str, Column] = {}


def column(name: str, **options: Any) -> Callable[[Show], Show]:
    """Register a column; `options` are the attributes of `Column`, at least its title.

    Raises UsageError for options that `Column` does not have, for other names in braces, and if
    another module has registered the name.
    """
    try:
        shown = Column(**options)
        shown.title.format(metric="", name="", interval="")
    except (TypeError, LookupError, ValueError, AttributeError) as error:
        raise UsageError(f"column {name!r}: {error}; see docs/reference/columns.md") from error

    def register(show: Show) -> Show:
        COLUMNS.register(name)(show)
        _shown[name] = shown
        return show

    return register


def title_of(name: str) -> str:
    """Return the title of a column, with its names in braces."""
    return _shown[name].title


def value_of(name: str, standings: Standings, entry: StandingsEntry) -> Value:
    """Return what a column says about a row, by the metric of the standings.

    A column of a plug-in has no number of a void or refused row, either.
    """
    registered = COLUMNS.entries[name]
    value = registered.value(standings, entry)
    if not isinstance(value, Value):
        raise UsageError(f"column {name!r} of {registered.origin}: {value!r} is no Value")
    if registered.is_of_package or value.text is not None:
        return value
    if reason := why_hidden(standings, entry):
        return Value(dict.fromkeys(value.record), hidden=reason)
    return value


def shown_columns(
    standings: Standings, names: Sequence[str]
) -> list[tuple[str, Column, Metric | None]]:
    """Return name, look and metric of the columns that apply; None for the metric of the row."""
    columns: list[tuple[str, Column, Metric | None]] = []
    for name in names:
        shown = _shown[name]
        if shown.applies(standings):
            columns += [(name, shown, metric) for metric in shown.over(standings)]
    return columns


def column_table(
    standings: Standings,
    names: Sequence[str],
    title: str,
    notes: Sequence[str],
    rows: Sequence[tuple[Standings, StandingsEntry]] | None = None,
) -> Table:
    """Return a table of columns, by default of all rows in their order.

    `rows` may be about another metric each; then no best is marked.
    """
    columns = shown_columns(standings, names)
    head = [shown.title_in(standings.about(metric)) for _, shown, metric in columns]
    lines = []
    for about, entry in rows or [(standings, entry) for entry in standings.ordered]:
        line = []
        for name, shown, metric in columns:
            view = about.about(metric)
            value = value_of(name, view, entry)
            best = view.best(entry.budget) if shown.has_best and rows is None else None
            line.append(value.cell(bool(best and value.wide == value_of(name, view, best).wide)))
        lines.append(line)
    return Table(title, head, lines, list(notes))


def plugin_columns() -> list[str]:
    """Return the columns of plug-ins, in the order of their registration."""
    return [name for name, entry in COLUMNS.entries.items() if not entry.is_of_package]


def record(standings: Standings, entry: StandingsEntry) -> dict[str, Any]:
    """Return the unrounded numbers of a row, for csv and JSON."""
    line: dict[str, Any] = {}
    for name in (*_RECORD, *_DECISION, *_FURTHER):
        line |= value_of(name, standings, entry).record
    for kind in standings.kinds:
        for name in _DECISION:
            line |= value_of(name, standings.about(kind), entry).record
    for other in (*standings.metrics[1:], *standings.parts, *standings.kinds):
        line[other.name] = _score(standings.about(other), entry).mean
    for name, _, metric in shown_columns(standings, plugin_columns()):
        value = value_of(name, standings.about(metric), entry)
        key = f"{name} of {metric.name}" if metric else name
        line |= value.record or {key: value.mean if value.text is None else value.text}
    return line


def short_name(metric: Metric) -> str:
    """Return the name of a metric for the head of a narrow column, such as "head number"."""
    name = metric.name.removesuffix(".accuracy").removesuffix(".share")
    return name.replace(".", " ").replace("_", " ")


def interval_title(rule: DecisionRule) -> str:
    """Return the title of the column of intervals: 90 % interval."""
    return f"{100 * (1 - 2 * rule.level):g} % interval"


# ---------------------------------------------------------------- marks


def letters(standings: Standings) -> dict[str, str]:
    """Return the letter of each gate that flags a row, first those of rows with a number."""
    gates: dict[str, None] = {}
    name = standings.metric.name
    for entry in sorted(standings.ordered, key=lambda entry: bool(entry.about(name, VOID, REFUSE))):
        gates.update(dict.fromkeys(finding.gate for finding in entry.about(name, FLAG)))
    return dict(zip(gates, _LETTERS))


def marks(standings: Standings, entry: StandingsEntry) -> list[str]:
    """Return the letters of the gates that flag a row."""
    flags = entry.about(standings.metric.name, FLAG)
    by_gate = letters(standings) if flags else {}
    return sorted({by_gate[finding.gate] for finding in flags})


def why_hidden(standings: Standings, entry: StandingsEntry) -> str:
    """Return "void" or "refused" for a row without a number, "" for others."""
    for action in (VOID, REFUSE):
        if entry.about(standings.metric.name, action):
            return NOT_RANKED[action]
    return ""


# ---------------------------------------------------------------- the row and its scores


@column("budget", title="FLOPs")
def _budget(standings: Standings, entry: StandingsEntry) -> Value:
    """FLOPs of a run."""
    return Value({"flops": entry.budget}, text=flops_text(entry.budget), is_number=True)


@column("objective", title="objective")
def _objective(standings: Standings, entry: StandingsEntry) -> Value:
    """Name of the objective."""
    return Value({"objective": entry.objective}, text=entry.objective)


@column("labels", title="labels")
def _labels(standings: Standings, entry: StandingsEntry) -> Value:
    """Kind of labels that the other columns are about."""
    return Value(text=short_name(standings.metric))


@column("seeds", title="seeds")
def _seeds(standings: Standings, entry: StandingsEntry) -> Value:
    """Number of seeds with a score."""
    return Value(text=str(len(entry.scores.get(standings.metric.name, ()))), is_number=True)


@column("updates", title="updates", applies=lambda s: any(e.updates is not None for e in s.entries))
def _updates(standings: Standings, entry: StandingsEntry) -> Value:
    """Updates of a run, mean over runs."""
    text = NONE if entry.updates is None else f"{entry.updates:,.0f}"
    return Value({"updates": entry.updates}, text=text, is_number=True)


def _summary(scores: Scores, metric: Metric, prefix: str = "", hidden: str = "") -> Value:
    mean, sd, count = None, None, 0
    summary = summarise(scores.get(metric.name, ()))
    if summary and not hidden:
        mean, count = summary.centre, summary.n
        sd = summary.high - mean if count > 1 else None
    line = {f"{prefix}n": count, f"{prefix}mean": mean, f"{prefix}sd": sd}
    return Value(line, metric, mean, sd, hidden=hidden)


@column("score", title="{metric}", on_screen="mean ± sd", has_best=True)
def _score(standings: Standings, entry: StandingsEntry) -> Value:
    """Score, mean ± sample sd over seeds, with the letters of gates that flag it."""
    value = _summary(entry.scores, standings.metric, "", why_hidden(standings, entry))
    line = {"metric": standings.metric.name, **value.record}
    verdict = getattr(standings.stated(entry), "verdict", "")
    return replace(value, record=line, marks=marks(standings, entry), verdict=verdict)


@column("other", title="{metric}", over=lambda s: s.metrics[1:], has_best=True)
def _other(standings: Standings, entry: StandingsEntry) -> Value:
    """Score by each other metric, not tested."""
    return _score(standings, entry)


@column("part", title="{name}", over=attrgetter("parts"))
def _part(standings: Standings, entry: StandingsEntry) -> Value:
    """Mean of each part of a primary metric that is a mean."""
    is_hidden = why_hidden(standings.about(standings.primary), entry)
    return Value(text=NONE if is_hidden else _score(standings, entry).brief, is_number=True)


@column("kind", title="{name}", over=attrgetter("kinds"))
def _kind(standings: Standings, entry: StandingsEntry) -> Value:
    """Mean ± sd by each kind of labels, with the mark of its verdict."""
    value = _score(standings, entry)
    return Value(text=f"{value.brief_spread} {value.sign}".strip(), is_number=True)


@column("choice", title="sd of choice", applies=attrgetter("has_choices"))
def _choice(standings: Standings, entry: StandingsEntry) -> Value:
    """Sd of the score over the settings that tuning might have chosen."""
    sd = entry.sds_of_choice.get(standings.metric.name)
    if why_hidden(standings, entry):
        sd = None
    text = NONE if sd is None else standings.metric.text(sd)
    return Value({"sd_of_choice": sd} if standings.has_choices else {}, text=text, is_number=True)


@column("untrained", title="untrained")
def _untrained(standings: Standings, entry: StandingsEntry) -> Value:
    """Score of the model without training."""
    return _summary(entry.untrained, standings.metric, "untrained_")


@column("shuffled", title="shuffled", applies=lambda s: any(e.shuffled for e in s.entries))
def _shuffled(standings: Standings, entry: StandingsEntry) -> Value:
    """Score of the objective on shuffled text."""
    return _summary(entry.shuffled, standings.metric, "shuffled_")


@column("findings", title="findings")
def _findings(standings: Standings, entry: StandingsEntry) -> Value:
    """What gates say of the row."""
    text = "; ".join(f"{f.action} {f.gate}: {f.reason}" for f in entry.findings)
    return Value({"findings": text}, text=text)


# ---------------------------------------------------------------- verdicts


def _recorded(decision: Decision | None, **names: str) -> dict[str, Any]:
    """Return facts of a decision by key, each None without a decision."""
    return {key: getattr(decision, name, None) for key, name in names.items()}


def _difference_of(decision: Decision | None, metric: Metric, key: str) -> Value:
    line = _recorded(decision, **{f"{key}difference": "difference"})
    if decision is None:
        return Value(line, text="", is_number=True)
    return Value(line, metric, decision.difference, None, decision.interval, is_signed=True)


def _interval_of(
    ends: tuple[float, float] | None, metric: Metric, key: str, absent: str = NONE
) -> Value:
    low, high = ends or (None, None)
    line, text = {f"{key}low": low, f"{key}high": high}, absent if ends is None else None
    return Value(line, metric, interval=ends, is_signed=True, text=text, is_number=True)


def _p_of(decision: Decision | None, **names: str) -> Value:
    text = p_text(decision.corrected) if decision else ""
    return Value(_recorded(decision, **names), text=text, is_number=True)


def _key(standings: Standings) -> str:
    """Return the prefix of the keys of a record: the metric, if it is not the primary one."""
    return f"{standings.focus.name}_" if standings.focus else ""


@column("difference", title="difference")
def _difference(standings: Standings, entry: StandingsEntry) -> Value:
    """Difference from the baseline."""
    return _difference_of(standings.decision(entry), standings.metric, _key(standings))


@column("interval", title="{interval}")
def _interval(standings: Standings, entry: StandingsEntry) -> Value:
    """Interval of the difference."""
    decision, key = standings.decision(entry), _key(standings)
    ends, absent = (decision.interval, NONE) if decision else (None, "")
    return _interval_of(ends, standings.metric, key, absent)


@column("p", title="p (Holm)")
def _p(standings: Standings, entry: StandingsEntry) -> Value:
    """p of the difference, after Holm's correction."""
    names = {} if standings.focus else {"p": "p"}
    return _p_of(standings.decision(entry), **names, **{f"{_key(standings)}p_holm": "corrected"})


@column("verdict", title="verdict")
def _verdict(standings: Standings, entry: StandingsEntry) -> Value:
    """Verdict beside the baseline, or why there is none."""
    decision, stated, key = standings.decision(entry), standings.stated(entry), _key(standings)
    line = _recorded(decision, **{f"{key}verdict": "verdict"})
    if standings.focus is None:
        line |= _recorded(decision, seeds_that_decide="seeds")
    text, is_hidden = verdict_text(standings, entry), why_hidden(standings, entry)
    if is_hidden:
        return Value(line, text=text, word=is_hidden)
    flags = " ".join(marks(standings, entry))
    short = word = NOT_RANKED[FLAG]
    if stated:
        short, word = stated.text, stated.verdict
    if flags:
        return Value(line, text=text, short=f"{short}: {flags}", word=f"{word}: {flags}")
    if not stated:
        word = "baseline" if entry.objective == standings.baseline else NONE
    return Value(line, text=text, word=word)


def verdict_text(standings: Standings, entry: StandingsEntry) -> str:
    """Return the verdict on a row in words, or why there is none."""
    name, stated = standings.metric.name, standings.stated(entry)
    for action in (VOID, REFUSE, FLAG):
        if findings := entry.about(name, action):
            gates = ", ".join(dict.fromkeys(finding.gate for finding in findings))
            return f"{stated.text if stated else NOT_RANKED[action]}: {gates}"
    if not entry.scores.get(name):
        return "no scores"
    if entry.objective == standings.baseline:
        return "baseline"
    decision = standings.decision(entry)
    return decision.text if decision else "no baseline to compare with"


# ---------------------------------------------------------------- gains


_has_gains = attrgetter("has_gains")


@column("gain", title="gain", applies=_has_gains, on_screen="gain ± sd")
def _gain(standings: Standings, entry: StandingsEntry) -> Value:
    """Gain over the untrained model, with the sd of a run less an untrained one."""
    if (gain := entry.gain(standings.metric.name)) is None:
        return Value({"gain": None, "gain_sd": None}, text="", is_number=True)
    line = {"gain": gain.mean, "gain_sd": gain.sd}
    return Value(line, standings.metric, gain.mean, gain.sd, is_signed=True)


@column("gain interval", title="{interval}", applies=_has_gains)
def _gain_interval(standings: Standings, entry: StandingsEntry) -> Value:
    """Interval of the gain."""
    gain = entry.gain(standings.metric.name)
    ends = gain.interval(standings.rule.level) if gain else None
    return _interval_of(ends, standings.metric, "gain_")


@column("gain difference", title="difference", applies=_has_gains)
def _gain_difference(standings: Standings, entry: StandingsEntry) -> Value:
    """Difference from the gain of the baseline."""
    return _difference_of(entry.gain_decision, standings.metric, "gain_")


@column("gain difference interval", title="{interval}", applies=_has_gains)
def _gain_difference_interval(standings: Standings, entry: StandingsEntry) -> Value:
    """Interval of the difference of gains."""
    decision = entry.gain_decision
    ends, absent = (decision.interval, NONE) if decision else (None, "")
    return _interval_of(ends, standings.metric, "gain_difference_", absent)


@column("gain p", title="p (Holm)", applies=_has_gains)
def _gain_p(standings: Standings, entry: StandingsEntry) -> Value:
    """p of the difference of gains, after Holm's correction among the gains."""
    return _p_of(entry.gain_decision, gain_p="p", gain_p_holm="corrected")


@column("gain verdict", title="verdict on the gain", applies=_has_gains, on_screen="on gain")
def _gain_verdict(standings: Standings, entry: StandingsEntry) -> Value:
    """Verdict on the gain beside the baseline's, secondary to that on the score."""
    line = _recorded(entry.gain_decision, gain_verdict="verdict", gain_seeds_that_decide="seeds")
    if (stated := standings.stated_gain(entry)) is None:
        return Value(line, text="", short="")
    return Value(line, text=stated.text, short=stated.verdict)
