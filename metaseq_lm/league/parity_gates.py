"""Gates on parity between rows: budget, data, suites, code, tuning, and distinct runs."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from metaseq_lm.core.config import GROUPS
from metaseq_lm.league.gate import RUNS, gate
from metaseq_lm.league.loss_gates import number
from metaseq_lm.league.standings import (
    FLAG,
    NOTE,
    REFUSE,
    VOID,
    Choice,
    Context,
    Finding,
    Row,
    finished,
)
from metaseq_lm.reporting.numbers import flops_text
from metaseq_lm.reporting.runs import Run, bare_key, identity, is_number
from metaseq_lm.reporting.settings import differing_suite_code, differing_suite_options, show

PARITY = 0.02  # largest difference of FLOPs from the budget, as a share of it
UPDATES = "trainer.max_update"
_SECTIONS = (*GROUPS, "trainer")  # sections of a configuration with options that change results


@gate(RUNS, {"missing": "runs without a score, or other seeds than the plan asks for"})
def missing(row: Row, context: Context) -> Iterator[Finding]:
    """Runs failed, have no score, or are not as many as the plan says, at a plausible setting."""
    for _, runs in row.settings:
        yield from _missing_of(runs, context)


def _missing_of(runs: Sequence[Run], context: Context) -> Iterator[Finding]:
    """Yield findings on the number of runs of one setting."""
    metric = context.primary
    reasons = [f"{run.name}: {reason}" for run in runs if (reason := run.why_unscored(metric))]
    seeds = Counter(run.seed for run in runs if run.why_unscored(metric) is None)
    of_runs = f"; {'; '.join(reasons)}" if reasons else ""
    if not seeds:
        yield Finding("missing", VOID, f"no run has a score of {metric}{of_runs}")
    elif len(seeds) < context.seeds:
        yield Finding("missing", FLAG, f"{len(seeds)} of {context.seeds} seeds{of_runs}")
    elif reasons:
        yield Finding("missing", FLAG, f"runs without a score{of_runs}")
    if len(seeds) > context.seeds:
        reason = f"{len(seeds)} seeds, where the plan has {context.seeds}"
        yield Finding("missing", FLAG, f"{reason}: none may be added after a look at the scores")
    if context.planned and (others := sorted(map(str, seeds.keys() - {*context.planned}))):
        reason = f"the seeds {', '.join(others)} are not those of the plan"
        yield Finding("missing", FLAG, f"{reason}: seeds may not be chosen")
    repeated = sorted(str(seed) for seed, count in seeds.items() if count > 1)
    if repeated:
        yield Finding("missing", FLAG, f"several runs of seed {', '.join(repeated)}")


@gate(RUNS, {"budget": "other FLOPs than the budget"})
def budget(row: Row, context: Context) -> Iterator[Finding]:
    """A run took other FLOPs than its budget, those of pre-training included."""
    wrong = [run for run in row.scored if _is_off(run, row.budget)]
    if wrong:
        spent = ", ".join(dict.fromkeys(flops_text(run.costs["flops"]) for run in wrong))
        yield Finding(
            "budget",
            REFUSE,
            f"{len(wrong)} of {len(row.scored)} runs took other FLOPs than the budget of "
            f"{flops_text(row.budget)}: {spent}",
        )


@gate(RUNS, {"data": "other data or another tokenizer than the baseline"})
def same_data(row: Row, context: Context) -> Iterator[Finding]:
    """Runs were trained on other data than those of the baseline, or with another tokenizer."""
    base = context.baseline_of(row) or row
    for key in sorted({k for run in row.scored for k in run.values if bare_key(k) == "data_hash"}):
        # A baseline without pre-training determines the data that others may be pre-trained on.
        expected = _data_hashes(base, key) or _data_hashes(base, "data_hash")
        hashes = list(dict.fromkeys([*expected, *_data_hashes(row, key)]))
        if len(hashes) > 1:
            corpora = _corpus_hashes(base), _corpus_hashes(row)
            if key == "data_hash" and corpora[0] and corpora[0] == corpora[1]:
                reason = "it is trained on the labelled sets that its options name, too"
                yield Finding("data", NOTE, f"{reason}, unlike the baseline")
                continue
            yield Finding("data", REFUSE, f"the data differ ({key} {', '.join(hashes)})")


def _data_hashes(row: Row, key: str) -> list[str]:
    """Return the distinct hashes of data that a row's runs record under a key."""
    return _known_values(run.values.get(key) for run in row.scored)


def _corpus_hashes(row: Row) -> list[str]:
    """Return the distinct hashes of the corpora of a row, without labelled sets."""
    return _known_values((run.results or {}).get("corpus") for run in row.scored)


@gate(RUNS, {"suites": "other items or options of a suite than the baseline"})
def same_suites(row: Row, context: Context) -> Iterator[Finding]:
    """Runs were scored with other items or options of a suite than those of the baseline.

    Other code is only a note, since the scoring part of it may not have changed.
    """
    base = context.baseline_of(row) or row
    codes: dict[str, str] = {}
    for metric in context.metrics:
        runs = [*base.scored, *row.scored]
        differing = differing_suite_options(metric, runs)
        codes |= differing_suite_code(metric, runs)
        if differing:
            values = "; ".join(f"{key}: {value}" for key, value in differing.items())
            yield Finding("suites", REFUSE, f"{metric} is of other suites ({values})", metric)
    if codes:
        values = "; ".join(f"{key}: {value}" for key, value in codes.items())
        yield Finding("suites", NOTE, f"its suites were scored by other code ({values})")


@gate(RUNS, {"code": "other code than the baseline"})
def same_code(row: Row, context: Context) -> Iterator[Finding]:
    """Runs were trained with other code than the baseline.

    It is a note for an added objective, and between shipped rows and others, since these cannot
    have the code of the rows around them.
    """
    base = context.baseline_of(row) or row
    runs = [*base.scored, *row.scored]
    codes = _known_values((run.results or {}).get("code") for run in runs)
    if len(codes) > 1:
        reason = f"the hashes of the code differ ({', '.join(codes)})"
        is_expected = row.added or row.shipped != base.shipped
        yield Finding("code", NOTE if is_expected else REFUSE, reason)


@gate(RUNS, {"defaults": "other values of options that the plan leaves open than the baseline"})
def same_defaults(row: Row, context: Context) -> Iterator[Finding]:
    """An option that the plan leaves open has another value than in the runs of the baseline.

    A default or a preset changed between the code of the two. Only options of classes that both use
    are compared, without options that an objective sets itself, options that runs of earlier
    versions do not record, and options that follow from the number of updates, which a budget
    decides.
    """
    base = context.baseline_of(row)
    if base is None or not (row.scored and base.scored):
        return
    stated = context.options.get(row.objective, frozenset())
    stated |= context.options.get(base.objective, frozenset())
    changed = []
    for key in row.scored[0].compared_keys:
        group, _, name = key.partition(".")
        is_common = group in _SECTIONS and name not in ("", "_name") and not {key, group} & stated
        if not is_common or key == UPDATES or key not in base.scored[0].values:
            continue
        runs = [*base.scored, *row.scored]
        if len(_known_values(run.values.get(f"{group}._name") for run in runs)) > 1:
            continue
        values = _known_values(run.values.get(key) for run in runs)
        follows = all(run.values.get(key) == run.values.get(UPDATES) for run in runs)
        if len(values) > 1 and not follows:
            changed.append(f"{key} {', '.join(values)}")
    if changed:
        reason = f"options that the plan leaves open differ ({'; '.join(changed)})"
        yield Finding("defaults", REFUSE, f"{reason}: a default has changed with the code")


def _corpus_of(run: Run) -> str | None:
    """Return the hash of a run's corpus, or of all its data for runs of earlier versions."""
    return (run.results or {}).get("corpus") or run.values.get("data_hash")


def _known_values(values: Iterable[Any]) -> list[str]:
    """Return the distinct values except None as texts, in order."""
    return list(dict.fromkeys(show(value) for value in values if value is not None))


@gate(RUNS, {"controls": "a control of another size or with other FLOPs"})
def controls(row: Row, context: Context) -> Iterator[Finding]:
    """A control has another size, other data or other suites than the row, or other FLOPs."""
    sizes = _known_values((run.results or {}).get("parameters") for run in row.scored)
    for name, runs in (("untrained", row.untrained), ("shuffled", row.shuffled)):
        others = _known_values((run.results or {}).get("parameters") for run in finished(runs))
        if set(others) - set(sizes):
            reason = f"the {name} control has other parameters ({', '.join([*sizes, *others])})"
            yield Finding("controls", FLAG, reason)
        if set(map(_corpus_of, finished(runs))) - set(map(_corpus_of, row.scored)):
            yield Finding("controls", FLAG, f"the {name} control has other data")
        for metric in context.metrics:
            if differing := differing_suite_options(metric, [*row.scored, *finished(runs)]):
                values = "; ".join(f"{key}: {value}" for key, value in differing.items())
                reason = f"the {name} control is scored by other suites ({values})"
                yield Finding("controls", FLAG, reason, metric)
    wrong = [run.costs["flops"] for run in finished(row.shuffled) if _is_off(run, row.budget)]
    if wrong:
        reason = f"the shuffled control took other FLOPs, such as {flops_text(wrong[0])}"
        yield Finding("controls", FLAG, reason)


def _is_off(run: Run, budget: float) -> bool:
    """Return whether a run's FLOPs differ from a budget or are not recorded."""
    flops = run.costs["flops"]
    return flops is None or abs(flops / budget - 1) > PARITY


@gate(RUNS, {"identical runs": "runs that should differ are the same"})
def identical_runs(row: Row, context: Context) -> Iterator[Finding]:
    """Runs of several seeds, or of several rows, are the same run.

    Training ignored the seed, or the option in which the rows differ. The first such row of the
    plan keeps its number, so that a comparison counts once.
    """
    courses = Counter(run.course for run in row.scored)
    seeds = {run.seed for run in row.scored if courses[run.course] > 1}
    if len(seeds) > 1:
        names = ", ".join(sorted(map(str, seeds)))
        reason = f"the runs of seeds {names} are identical: what trained them ignores the seed"
        yield Finding("identical runs", VOID, reason)
    for other, runs in _others_of(row, context).items():
        same = courses.keys() & {run.course for run in runs}
        if same:
            yield Finding(
                "identical runs",
                FLAG,
                f"{len(same)} of its {len(row.scored)} runs are identical with those of {other}",
            )


def _others_of(row: Row, context: Context) -> Mapping[str, Sequence[Run]]:
    """Return the runs, by name, that may not be identical to any run of a row."""
    others: dict[str, Sequence[Run]] = {}
    for other in context.rows:
        if other is row:
            break
        if other.budget == row.budget:
            others[other.objective] = other.scored
    return {**others, "its untrained control": row.untrained, "its shuffled control": row.shuffled}


@gate(RUNS, {"shared encoder": "seeds share a pre-trained encoder"})
def shared_encoder(row: Row, context: Context) -> Iterator[Finding]:
    """Seeds share a pre-trained encoder, so that they are not as many pre-trainings."""
    ancestors = {run.seed: _ancestor_of(run) for run in row.scored if run.was_pretrained}
    distinct = len(set(ancestors.values()))
    if distinct < len(ancestors):
        yield Finding(
            "shared encoder",
            FLAG,
            f"{len(ancestors)} seeds start from {distinct} pre-trained "
            f"encoder{'s' * (distinct > 1)}: the spread is not that of pre-trainings",
        )


def _ancestor_of(run: Run) -> tuple[Any, ...]:
    """Return a key that tells apart the ancestors of runs of one setting.

    It is the seeds of the ancestors, or their paths if the seeds are unknown.
    """
    seeds = [run.values[key] for key in run.values if key != "seed" and bare_key(key) == "seed"]
    paths = [str(run.values[key]) for key in sorted(run.sources) if key in run.values]
    return tuple(map(identity, seeds or paths))


@gate(
    RUNS,
    {
        "tuning": "not tuned, or not as the others",
        "edge of the grid": "the chosen value is the least or the largest that was tried",
    },
)
def tuned(row: Row, context: Context) -> Iterator[Finding]:
    """Options were not tuned, or otherwise than those of the baseline, or at the edge of a grid."""
    tuning = row.tuning
    if tuning is None or not any(len(set(map(show, v))) > 1 for v in tuning.grid.values()):
        others = sum(other.tuning is not None for other in context.rows if other is not row)
        reason = "its options were not tuned" + (f", those of {others} rows were" if others else "")
        yield Finding("tuning", FLAG if others else NOTE, reason)
        return
    plausible = [values for values, _ in tuning.shares[1:]]
    for key, value in tuning.chosen.items():
        yield from _edge_of_grid(key, value, tuning, FLAG)
        further = dict.fromkeys(values[key] for values in plausible if values[key] != value)
        for other in further:
            yield from _edge_of_grid(key, other, tuning, NOTE)
        chosen = [show(value), *map(show, further)]
        trained = _known_values(run.values.get(key) for run in row.scored)
        if trained and set(trained) != set(chosen):
            reason = f"{key}={', '.join(chosen)} was chosen, but {', '.join(trained)} trained"
            yield Finding("tuning", FLAG, reason)
    # A diverged trial is a result, a failed one is not.
    failed = [run for run in tuning.runs if run.why_unended() and run.status != "diverged"]
    if failed:
        reason = f"{len(failed)} of {len(tuning.runs)} trials did not finish"
        first = f"{failed[0].name}: {failed[0].why_unended()}"
        yield Finding("tuning", FLAG, f"{reason}, such as {first}")
    yield from _tuned_elsewhere(row, tuning, context.baseline_of(row))


def _edge_of_grid(key: str, value: Any, tuning: Choice, action: str) -> Iterator[Finding]:
    """Yield a finding on a chosen value that is the smallest or largest value tried."""
    if _is_at_edge(value, tuning.grid.get(key, ())):
        tried = ", ".join(show(v) for v in sorted(tuning.grid[key]))
        reason = f"{key}={show(value)} is at the edge of what was tried ({tried})"
        yield Finding("edge of the grid", action, reason)


def _is_at_edge(value: Any, grid: Sequence[Any]) -> bool:
    """Return whether a number is the smallest or largest of several values tried."""
    if not is_number(value) or not all(map(is_number, grid)) or len(set(grid)) < 2:
        return False
    return bool(value <= min(grid) or value >= max(grid))


def _tuned_elsewhere(row: Row, tuning: Choice, baseline: Row | None) -> Iterator[Finding]:
    """Yield findings on seeds, budget and cost of a tuning."""
    common = {run.seed for run in tuning.runs} & {run.seed for run in row.scored}
    if common:
        seeds = ", ".join(sorted(map(str, common)))
        reason = f"seed {seeds} tuned the options and is among the final ones"
        yield Finding("tuning", FLAG, reason)
    if tuning.budget and abs(tuning.budget / row.budget - 1) > PARITY:
        reason = f"the options were tuned at {flops_text(tuning.budget)} FLOPs"
        yield Finding("tuning", NOTE, reason)
    other = baseline.tuning if baseline else None
    if other is None or not other.flops or not tuning.flops:
        return
    if abs(tuning.flops / other.flops - 1) > PARITY:
        yield Finding(
            "tuning",
            NOTE,
            f"tuning took {flops_text(tuning.flops)} FLOPs, {number(tuning.flops / other.flops)} "
            "times those of the baseline",
        )
