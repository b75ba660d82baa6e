"""Gates on parity between rows: budget, data, suites, code, tuning, and distinct runs."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from metaseq_lm.core.config import GROUPS
from metaseq_lm.league.gate import RUNS, gate
from metaseq_lm.league.loss_gates import number
from metaseq_lm.league.standings import FLAG, NOTE, REFUSE, VOID, Context, GateFinding
from metaseq_lm.reporting.numbers import flops_text
from metaseq_lm.reporting.runs import Run, bare_key, identity
from metaseq_lm.reporting.settings import (
    Row,
    differing_suite_code,
    differing_suite_options,
    finished,
    show,
)
from metaseq_lm.sweeps.search import Choice

PARITY = 0.02  # largest difference of FLOPs from the budget, as a share of it
_UPDATES = "trainer.max_update"
_SECTIONS = (*GROUPS, "trainer")  # sections of a configuration with options that change results


def _distinct(runs: Iterable[Run], key: str, part: str = "values") -> list[str]:
    """Return the values of a key, or of one of the `recorded` facts, except None, as texts."""
    values = [getattr(run, part).get(key) for run in runs]
    return list(dict.fromkeys(show(value) for value in values if value is not None))


def _listed(facts: Mapping[str, str]) -> str:
    return "; ".join(f"{key}: {value}" for key, value in facts.items())


def _is_off(flops: float | None, expected: float) -> bool:
    return flops is None or abs(flops / expected - 1) > PARITY


def _other_flops(runs: Sequence[Run], budget: float) -> list[str]:
    flops = [run.costs["flops"] for run in runs]
    return [flops_text(spent) for spent in flops if _is_off(spent, budget)]


@gate(RUNS, {"missing": "runs without a score, or other seeds than the plan asks for"})
def missing(row: Row, context: Context) -> Iterator[GateFinding]:
    """Runs failed, have no score, or are not as many as the plan says, at a plausible setting."""
    for _, runs in row.settings:
        of_runs, seeds = "", Counter[Any]()
        for run in runs:
            if reason := run.why_unscored(context.primary):
                of_runs += f"; {run.name}: {reason}"
            else:
                seeds[run.seed] += 1
        if not seeds:
            yield GateFinding("missing", VOID, f"no run has a score of {context.primary}{of_runs}")
        elif len(seeds) < context.seeds:
            yield GateFinding("missing", FLAG, f"{len(seeds)} of {context.seeds} seeds{of_runs}")
        elif of_runs:
            yield GateFinding("missing", FLAG, f"runs without a score{of_runs}")
        if len(seeds) > context.seeds:
            reason = f"{len(seeds)} seeds, where the plan has {context.seeds}"
            reason += ": none may be added after a look at the scores"
            yield GateFinding("missing", FLAG, reason)
        if context.planned and (others := sorted(map(str, seeds.keys() - {*context.planned}))):
            reason = f"the seeds {', '.join(others)} are not those of the plan"
            yield GateFinding("missing", FLAG, f"{reason}: seeds may not be chosen")
        if repeated := sorted(str(seed) for seed, count in seeds.items() if count > 1):
            yield GateFinding("missing", FLAG, f"several runs of seed {', '.join(repeated)}")


@gate(RUNS, {"budget": "other FLOPs than the budget"})
def budget(row: Row, context: Context) -> Iterator[GateFinding]:
    """A run took other FLOPs than its budget, those of pre-training included."""
    if wrong := _other_flops(row.scored, row.budget):
        reason = f"{len(wrong)} of {len(row.scored)} runs took other FLOPs than the budget of "
        reason += f"{flops_text(row.budget)}: {', '.join(dict.fromkeys(wrong))}"
        yield GateFinding("budget", REFUSE, reason)


@gate(RUNS, {"data": "other data or another tokenizer than the baseline"})
def same_data(row: Row, context: Context) -> Iterator[GateFinding]:
    """Runs were trained on other data than those of the baseline, or with another tokenizer."""
    base, runs = (context.baseline_of(row) or row).scored, row.scored
    keys = set[str]().union(*(run.values for run in runs))
    for key in sorted(key for key in keys if bare_key(key) == "data_hash"):
        # A baseline without pre-training determines the data that others may be pre-trained on.
        expected = _distinct(base, key) or _distinct(base, "data_hash")
        hashes = list(dict.fromkeys([*expected, *_distinct(runs, key)]))
        corpora = _distinct(base, "corpus", "recorded")
        if len(hashes) < 2:
            continue
        if key == "data_hash" and corpora and corpora == _distinct(runs, "corpus", "recorded"):
            reason = "it is trained on the labelled sets that its options name, too, unlike the "
            yield GateFinding("data", NOTE, f"{reason}baseline")
        else:
            yield GateFinding("data", REFUSE, f"the data differ ({key} {', '.join(hashes)})")


@gate(RUNS, {"suites": "other items or options of a suite than the baseline"})
def same_suites(row: Row, context: Context) -> Iterator[GateFinding]:
    """Runs were scored with other items or options of a suite than those of the baseline."""
    runs = [*(context.baseline_of(row) or row).scored, *row.scored]
    codes: dict[str, str] = {}
    for metric in context.metrics:
        codes |= differing_suite_code(metric, runs)
        if differing := differing_suite_options(metric, runs):
            reason = f"{metric} is of other suites ({_listed(differing)})"
            yield GateFinding("suites", REFUSE, reason, metric)
    if codes:
        reason = f"its suites were scored by other code ({_listed(codes)})"
        yield GateFinding("suites", NOTE, reason)


@gate(RUNS, {"code": "other code than the baseline"})
def same_code(row: Row, context: Context) -> Iterator[GateFinding]:
    """Runs were trained with other code than the baseline."""
    base = context.baseline_of(row) or row
    codes = _distinct([*base.scored, *row.scored], "code", "recorded")
    if len(codes) > 1:
        # Such rows cannot have the code of the rows around them.
        is_expected = row.added or row.shipped != base.shipped
        reason = f"the hashes of the code differ ({', '.join(codes)})"
        yield GateFinding("code", NOTE if is_expected else REFUSE, reason)


@gate(RUNS, {"defaults": "other values of options that the plan leaves open than the baseline"})
def same_defaults(row: Row, context: Context) -> Iterator[GateFinding]:
    """An option that the plan leaves open has another value than in the runs of the baseline.

    A default or a preset changed between the code of the two. Options do not count that an
    objective sets itself, that are of other classes or not recorded, or that follow from the number
    of updates, which a budget decides.
    """
    base = context.baseline_of(row)
    if base is None or not (row.scored and base.scored):
        return
    runs, changed = [*base.scored, *row.scored], []
    stated = {_UPDATES}.union(*(context.options.get(x.objective, ()) for x in (row, base)))
    for key in row.scored[0].compared_keys:
        group, _, name = key.partition(".")
        is_common = group in _SECTIONS and name not in ("", "_name") and not {key, group} & stated
        if not is_common or key not in base.scored[0].values:
            continue
        follows = all(run.values.get(key) == run.values.get(_UPDATES) for run in runs)
        values = _distinct(runs, key)
        if len(values) > 1 and not follows and len(_distinct(runs, f"{group}._name")) < 2:
            changed.append(f"{key} {', '.join(values)}")
    if changed:
        reason = f"options that the plan leaves open differ ({'; '.join(changed)})"
        yield GateFinding("defaults", REFUSE, f"{reason}: a default has changed with the code")


@gate(RUNS, {"controls": "a control of another size or with other FLOPs"})
def controls(row: Row, context: Context) -> Iterator[GateFinding]:
    """A control has another size, other data or other suites than the row, or other FLOPs."""
    sizes = _distinct(row.scored, "parameters", "recorded")
    for name, control in (("untrained", row.untrained), ("shuffled", row.shuffled)):
        runs = finished(control)
        others = _distinct(runs, "parameters", "recorded")
        if {*others} - {*sizes}:
            reason = f"the {name} control has other parameters ({', '.join([*sizes, *others])})"
            yield GateFinding("controls", FLAG, reason)
        if {*map(_corpus_of, runs)} - {*map(_corpus_of, row.scored)}:
            yield GateFinding("controls", FLAG, f"the {name} control has other data")
        for metric in context.metrics:
            if differing := differing_suite_options(metric, [*row.scored, *runs]):
                reason = f"the {name} control is scored by other suites ({_listed(differing)})"
                yield GateFinding("controls", FLAG, reason, metric)
    if wrong := _other_flops(finished(row.shuffled), row.budget):
        reason = f"the shuffled control took other FLOPs, such as {wrong[0]}"
        yield GateFinding("controls", FLAG, reason)


def _corpus_of(run: Run) -> str | None:
    # Runs of earlier versions have only a hash of all their data.
    return run.recorded.get("corpus") or run.values.get("data_hash")


@gate(RUNS, {"identical runs": "runs that should differ are the same"})
def identical_runs(row: Row, context: Context) -> Iterator[GateFinding]:
    """Runs of several seeds, or of several rows, are the same run.

    Training ignored the seed, or the option in which the rows differ. The first such row of the
    plan keeps its number, so that a comparison counts once.
    """
    courses = Counter(run.course for run in row.scored)
    seeds = {run.seed for run in row.scored if courses[run.course] > 1}
    if len(seeds) > 1:
        names = ", ".join(sorted(map(str, seeds)))
        reason = f"the runs of seeds {names} are identical: what trained them ignores the seed"
        yield GateFinding("identical runs", VOID, reason)
    earlier = takewhile(lambda other: other is not row, context.rows)
    others = {other.objective: other.scored for other in earlier if other.budget == row.budget}
    controls = {"its untrained control": row.untrained, "its shuffled control": row.shuffled}
    for name, runs in (others | controls).items():
        if same := courses.keys() & {run.course for run in runs}:
            reason = f"{len(same)} of its {len(row.scored)} runs are identical with those of {name}"
            yield GateFinding("identical runs", FLAG, reason)


@gate(RUNS, {"shared encoder": "seeds share a pre-trained encoder"})
def shared_encoder(row: Row, context: Context) -> Iterator[GateFinding]:
    """Seeds share a pre-trained encoder, so that they are not as many pre-trainings."""
    ancestors = {}
    for run in row.scored:
        if run.was_pretrained:
            # The seeds of the ancestors tell them apart, or their paths if these are unknown.
            keys = [key for key in run.values if key != "seed" and bare_key(key) == "seed"]
            keys = keys or [key for key in sorted(run.sources) if key in run.values]
            ancestors[run.seed] = tuple(identity(run.values[key]) for key in keys)
    distinct = len({*ancestors.values()})
    if distinct < len(ancestors):
        reason = f"{len(ancestors)} seeds start from {distinct} pre-trained encoder"
        reason += f"{'s' * (distinct > 1)}: the spread is not that of pre-trainings"
        yield GateFinding("shared encoder", FLAG, reason)


@gate(
    RUNS,
    {
        "tuning": "not tuned, or not as the others",
        "edge of the grid": "the chosen value is the least or the largest that was tried",
    },
)
def tuned(row: Row, context: Context) -> Iterator[GateFinding]:
    """Options were not tuned, or otherwise than those of the baseline, or at the edge of a grid."""
    tuning = row.tuning
    if tuning is None or not any(len({*map(show, tried)}) > 1 for tried in tuning.grid.values()):
        others = sum(other.tuning is not None for other in context.rows if other is not row)
        reason = "its options were not tuned" + (f", those of {others} rows were" if others else "")
        yield GateFinding("tuning", FLAG if others else NOTE, reason)
        return
    for key, value in tuning.chosen.items():
        chosen = [value]
        for values, _ in tuning.shares[1:]:
            if values[key] not in chosen:
                chosen.append(values[key])
        grid = Choice(tuple(tuning.grid.get(key, ())))
        for other in filter(grid.edge_of, chosen):
            tried = ", ".join(map(show, sorted(grid.values)))
            reason = f"{key}={show(other)} is at the edge of what was tried ({tried})"
            yield GateFinding("edge of the grid", FLAG if other == value else NOTE, reason)
        trained = _distinct(row.scored, key)
        if trained and {*trained} != {*map(show, chosen)}:
            reason = f"{key}={', '.join(map(show, chosen))} was chosen, but {', '.join(trained)} "
            yield GateFinding("tuning", FLAG, f"{reason}trained")
    # A diverged trial is a result, a failed one is not.
    failed = [run for run in tuning.runs if run.why_unended() and run.status != "diverged"]
    if failed:
        reason = f"{len(failed)} of {len(tuning.runs)} trials did not finish, such as "
        yield GateFinding("tuning", FLAG, f"{reason}{failed[0].name}: {failed[0].why_unended()}")
    if common := {run.seed for run in tuning.runs} & {run.seed for run in row.scored}:
        seeds = ", ".join(sorted(map(str, common)))
        reason = f"seed {seeds} tuned the options and is among the final ones"
        yield GateFinding("tuning", FLAG, reason)
    if tuning.budget and _is_off(tuning.budget, row.budget):
        reason = f"the options were tuned at {flops_text(tuning.budget)} FLOPs"
        yield GateFinding("tuning", NOTE, reason)
    baseline, flops = context.baseline_of(row), tuning.flops
    other = baseline.tuning.flops if baseline and baseline.tuning else 0.0
    if other and flops and _is_off(flops, other):
        reason = f"tuning took {flops_text(flops)} FLOPs, {number(flops / other)} times those of "
        yield GateFinding("tuning", NOTE, f"{reason}the baseline")
