"""Print the scores of runs on words by share of the labels, and which claims of the paper hold.

usage: python claims.py RUN_OR_FOLDER_OR_ARCHIVE ...

A claim says that one method is better than another. Runs of both on one set, with one share of the
labels and one seed have the same labelled sentences, so their difference is taken; a cell has the
mean over the seeds and the smallest and largest. p is of a one-sided sign test over the sets, each
with the sign of its mean: seeds of one set share its test sentences, and so are no further evidence
that a method is better on other sets. The sets of a model of several are no independent ones, and
fewer than three say nothing: "-". Holm-Bonferroni for all lines.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest

from metaseq_lm.core.errors import MetaseqError, run_script
from metaseq_lm.reporting.folders import find_plan, find_runs, pick_stage
from metaseq_lm.reporting.numbers import p_text, summarise
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.stats import FEWEST, holm

ALL = 1.0  # the share of all labels
SEVERAL = "3 sets"
# Table or section of the dissertation, the better method, the other one.
CLAIMS = [
    ("4.2", "CVT", "supervised"),
    ("4.2", "CVT", "word dropout"),
    ("4.2", "word dropout", "VAT"),
    ("4.2", "VAT", "supervised"),
    ("4.2", "ELMo", "supervised"),
    ("4.2", "ELMo", "CVT"),
    ("4.2", f"CVT, {SEVERAL}", "CVT"),
    ("-", f"CVT, {SEVERAL}", f"supervised, {SEVERAL}"),
    ("4.3", f"CVT, {SEVERAL}", f"CVT, one set at a time, {SEVERAL}"),
    ("4.4", "no-direction", "no-neighbour"),
    ("4.4", "no-neighbour", "CVT"),
    ("4.4", "no-direction", "CVT"),
    ("-", "no-full", "CVT"),
    ("section 4.5", "hard", "CVT"),
    ("section 4.5", "confident", "CVT"),
    ("section 4.5", "mean-teacher", "CVT"),
    ("section 4.5", "labels-only", "supervised"),
    ("4.5", "frozen encoder", "supervised"),
    ("-", "Transformer, CVT", "Transformer, supervised"),
]


@dataclass(frozen=True)
class Place:
    """What the runs of a pair have in common."""

    share: float
    set: str
    seed: int


# method -> place -> score in per cent
Scores = dict[str, dict[Place, float]]
# of averaged weights, of the weights themselves
AVERAGED = ("valid.score", "valid.raw_score")


def score_of(run: Run, name: str, sets: Sequence[str]) -> float | None:
    """Return a run's test score (%) on a set: span F1, labelled attachment, else accuracy."""
    if len(sets) == 1:
        value = run.metrics.get("test.score")
    else:
        named = (f"test.{name}_{score}" for score in ("f1", "las", "accuracy"))
        value = next((run.metrics[key] for key in named if key in run.metrics), None)
    return None if value is None else 100 * value


def collect(runs: Iterable[Run]) -> tuple[Scores, Scores, Scores]:
    """Return the test scores of the finished runs, and of runs of one set what they had in the end.

    That is the score of the last validation, of the averaged weights and of the weights themselves:
    no checkpoint was chosen by either. Raises MetaseqError for a score that there is twice.
    """
    scores: Scores = {}
    ends: tuple[Scores, Scores] = ({}, {})
    for run in runs:
        sets = run.values.get("task.labelled") or []
        if run.status != "finished" or run.seed is None:
            continue
        label = str(run.values["label"])
        method = label if len(sets) == 1 else f"{label}, {len(sets)} sets"
        for name in sets:
            place = Place(float(run.values.get("task.label_fraction", ALL)), name, run.seed)
            score = score_of(run, name, sets)
            if score is None:
                continue
            if place in scores.setdefault(method, {}):
                raise MetaseqError(
                    f"{method} has {name} with {100 * place.share:g} % of the labels twice for "
                    f"seed {run.seed} (again in {run.name}); name fewer folders"
                )
            scores[method][place] = score
            last = [run.series(metric)[1][-1:] for metric in AVERAGED]
            if len(sets) == 1 and all(last):
                for end, (value,) in zip(ends, last):
                    end.setdefault(method, {})[place] = 100 * value
    return scores, *ends


def table(scores: Scores, share: float) -> list[str]:
    """Return the lines of a table in Markdown: mean ± sd (seeds) by method and set."""
    sets = sorted({place.set for row in scores.values() for place in row if place.share == share})
    lines = [
        f"| {100 * share:g} % of the labels | {' | '.join(sets)} |",
        "|---" * (len(sets) + 1) + "|",
    ]
    for method, row in scores.items():
        cells = []
        for name in sets:
            values = [v for place, v in row.items() if (place.share, place.set) == (share, name)]
            found = summarise(values, "sd")
            spread = "" if found is None or found.n == 1 else f" ± {found.centre - found.low:.2f}"
            cells.append("-" if found is None else f"{found.centre:.2f}{spread} ({found.n})")
        if set(cells) != {"-"}:
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return [*lines, ""]


def differences(better: Mapping[Place, float], other: Mapping[Place, float]) -> dict[Place, float]:
    """Return what the first has more, of all places that both have."""
    return {place: better[place] - other[place] for place in better if place in other}


def by_share(scores: Scores, better: str, other: str) -> dict[float, dict[Place, float]]:
    """Return the differences of two methods for each share of the labels, ascending."""
    found: dict[float, dict[Place, float]] = {}
    for place, value in differences(scores.get(better, {}), scores.get(other, {})).items():
        found.setdefault(place.share, {})[place] = value
    return dict(sorted(found.items()))


def at_all(scores: Scores, method: str, share: float) -> dict[Place, float]:
    """Return a method's scores with a share of the labels, in the places of all labels."""
    row = scores.get(method, {}).items()
    return {Place(ALL, p.set, p.seed): value for p, value in row if p.share == share}


def gains(scores: Scores, share: float) -> dict[Place, float]:
    """Return the gain of CVT over supervised training with a share, by set and seed."""
    return differences(*(at_all(scores, method, share) for method in ("CVT", "supervised")))


def claims(scores: Scores) -> list[str]:
    """Return the lines of the table of claims, one for each claim and share that has pairs."""
    found = [
        (source, f"{better} > {other}", f"{100 * share:g} %", values)
        for source, better, other in CLAIMS
        for share, values in by_share(scores, better, other).items()
    ]
    quarter, whole = (at_all(scores, *of) for of in (("CVT", 0.25), ("supervised", ALL)))
    found.append(
        ("fig. 4.5", "CVT with 25 % > supervised with all", "", differences(quarter, whole))
    )
    most = gains(scores, ALL)
    for share in (0.05, 0.25):
        text = f"CVT - supervised, with {100 * share:g} % > with all"
        found.append(("fig. 4.5", text, "", differences(gains(scores, share), most)))
    lines = [line for line in found if line[-1]]
    sets = sorted({place.set for *_, values in lines for place in values})
    p = {
        number: sign_test(means(values))
        for number, (_, text, _, values) in enumerate(lines)
        if SEVERAL not in text and len(means(values)) >= FEWEST
    }
    corrected = dict(zip(p, holm([*p.values()])))
    titles = ["table", "claim", "labels", *sets, "sets above", "p", "p (Holm)"]
    rows = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for number, (source, text, share, values) in enumerate(lines):
        average = means(values)
        above = f"{sum(value > 0 for value in average.values())} of {len(average)}"
        tests = [p_text(p.get(number)), p_text(corrected.get(number))]
        cells = [source, text, share, *(seeds_text(values, name) for name in sets), above, *tests]
        rows.append(f"| {' | '.join(cells)} |")
    most_sets = max((len(means(values)) for *_, values in lines), default=0)
    rows += [
        "",
        "differences in points, the mean over the seeds [smallest, largest]; p: sign "
        "test over the sets,",
        f"which with {most_sets} sets cannot fall below {p_text(0.5**most_sets)}, before "
        "Holm-Bonferroni.",
        "",
    ]
    return rows


def means(values: Mapping[Place, float]) -> dict[str, float]:
    """Return the mean over the seeds of each set."""
    sets = dict.fromkeys(place.set for place in values)
    return {name: float(np.mean([v for p, v in values.items() if p.set == name])) for name in sets}


def seeds_text(values: Mapping[Place, float], name: str) -> str:
    """Return the mean difference of a set, and its smallest and largest over seeds, as text."""
    found = [value for place, value in values.items() if place.set == name]
    if not found:
        return "-"
    return f"{np.mean(found):+.2f} [{min(found):+.2f}, {max(found):+.2f}]"


def sign_test(differences: Mapping[str, float]) -> float:
    """Return p of so many positive differences or more; those that are 0 do not count."""
    signs = [value > 0 for value in differences.values() if value != 0]
    return float(binomtest(sum(signs), len(signs), alternative="greater").pvalue) if signs else 1.0


def averaging(averaged: Scores, raw: Scores) -> list[str]:
    """Return the lines of a table: what averaged weights gain, and how far seeds lie apart."""
    lines = [
        "| averaged weights | runs | averaged - raw, mean | above | sd averaged | sd raw |",
        "|---" * 6 + "|",
    ]
    for method, row in raw.items():
        more = list(differences(averaged[method], row).values())
        above = sum(value > 0 for value in more)
        apart = [within(part) for part in (averaged[method], row)]
        cells = [method, str(len(more)), f"{np.mean(more):+.2f}", str(above), *apart]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "scores of the last validation; sd: between the seeds of a set and "
        "share, each with labelled",
        "sentences of its own; root of the mean variance.",
        "",
    ]
    return lines


def within(row: Mapping[Place, float]) -> str:
    """Return the sample deviation over seeds, pooled over sets and shares, as text."""
    groups: dict[tuple[float, str], list[float]] = {}
    for place, value in row.items():
        groups.setdefault((place.share, place.set), []).append(value)
    variances = [np.var(values, ddof=1) for values in groups.values() if len(values) > 1]
    return f"{np.sqrt(np.mean(variances)):.2f}" if variances else "-"


def main(paths: Sequence[str]) -> None:
    """Print the tables, and name the runs that do not count."""
    # Of a sweep the runs of its last stage, as in `report`.
    runs, _ = pick_stage(find_runs(paths), find_plan(paths), paths, None)
    scores, averaged, raw = collect(runs)
    print(
        "test score (%): F1 of spans, labelled attachment of trees, else accuracy; "
        "mean ± sd (seeds)\n"
    )
    for share in sorted({place.share for row in scores.values() for place in row}):
        print(*table(scores, share), sep="\n")
    print(*claims(scores), sep="\n")
    if raw:
        print(*averaging(averaged, raw), sep="\n")
    for run in runs:
        if run.why_unended():
            print(f"left out: {run.name}, {run.why_unended()}")


if __name__ == "__main__":
    run_script(lambda: main(sys.argv[1:]))
