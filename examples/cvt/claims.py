"""Print the scores of runs on words by share of the labels, and which of the paper's claims they bear out.

usage: python claims.py RUN_OR_FOLDER_OR_ARCHIVE ...

A claim says that one method is better than another. The runs of both on one set, with one share of the
labels and one seed are a pair: they have the same labelled sentences. A model of several sets makes one pair
for a seed, with the mean of its differences. p is of the sign test over all pairs of a share, one-sided, and
after Holm-Bonferroni for all lines. Pairs of one set share its test sentences, and sets may share sentences
(parts of speech and trees), so p is of these sets, not of others.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest

from metaseq_lm.core.errors import MetaseqError, run_script
from metaseq_lm.reporting.folders import find_plan, pick_stage, read_runs
from metaseq_lm.reporting.numbers import p_text, summarise
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.significance import holm

ALL = 1.0  # the share of all labels
SEVERAL = "3 sets"
FROZEN = "frozen encoder"
TREES = ("dep",)
# Table of the dissertation, the better method, the other one.
CLAIMS = [
    ("4.2", "CVT", "supervised"),
    ("4.2", "CVT", "word dropout"),
    ("4.2", "word dropout", "VAT"),
    ("4.2", "VAT", "supervised"),
    ("4.2", "ELMo", "supervised"),
    ("4.2", f"CVT, {SEVERAL}", "CVT"),
    ("-", f"CVT, {SEVERAL}", f"supervised, {SEVERAL}"),
    ("4.3", f"CVT, {SEVERAL}", f"CVT, one set at a time, {SEVERAL}"),
    ("4.4", "no-direction", "no-neighbour"),
    ("4.5", FROZEN, "supervised"),
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
                    f"{method} has {name} with {100 * place.share:g} % of the labels twice for seed "
                    f"{run.seed} (again in {run.name}); name fewer folders"
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


def pairs_of(scores: Scores, better: str, other: str) -> dict[float, list[float]]:
    """Return the differences of two methods by share; those of one model of several sets are one.

    Of frozen encoders without trees.
    """
    found: dict[tuple[float, str, int], list[float]] = {}
    for place, value in differences(scores.get(better, {}), scores.get(other, {})).items():
        if better == FROZEN and place.set in TREES:
            continue  # the dissertation claims it of tags; its trees lose
        name = "" if better.endswith(SEVERAL) else place.set
        found.setdefault((place.share, name, place.seed), []).append(value)
    by_share: dict[float, list[float]] = {}
    for (share, *_), values in sorted(found.items()):
        by_share.setdefault(share, []).append(float(np.mean(values)))
    return by_share


def at_all(scores: Scores, method: str, share: float) -> dict[Place, float]:
    """Return a method's scores with a share of the labels, in the places of all labels."""
    row = scores.get(method, {}).items()
    return {Place(ALL, p.set, p.seed): value for p, value in row if p.share == share}


def gains(scores: Scores, share: float) -> dict[Place, float]:
    """Return what CVT has more than supervised training with a share, in the places of all labels."""
    return differences(*(at_all(scores, method, share) for method in ("CVT", "supervised")))


def claims(scores: Scores) -> list[str]:
    """Return the lines of the table of claims, one for each claim and share that has pairs."""
    found = [
        (source, f"{better} > {other}", f"{100 * share:g} %", values)
        for source, better, other in CLAIMS
        for share, values in pairs_of(scores, better, other).items()
    ]
    quarter, whole = (at_all(scores, *of) for of in (("CVT", 0.25), ("supervised", ALL)))
    if values := list(differences(quarter, whole).values()):
        found.append(("fig. 4.5", "CVT with 25 % > supervised with all", "", values))
    most = gains(scores, ALL)
    for share in (0.05, 0.25):
        if values := list(differences(gains(scores, share), most).values()):
            text = f"CVT - supervised, with {100 * share:g} % > with all"
            found.append(("fig. 4.5", text, "", values))
    p = [sign_test(values) for *_, values in found]
    lines = [
        "| table | claim | labels | pairs | above | mean difference | p | p (Holm) |",
        "|---" * 8 + "|",
    ]
    for (source, text, share, values), raw_p, corrected in zip(found, p, holm(p)):
        above = sum(value > 0 for value in values)
        cells = [source, text, share, str(len(values)), str(above), f"{np.mean(values):+.2f}"]
        lines.append(f"| {' | '.join([*cells, p_text(raw_p), p_text(corrected)])} |")
    return [*lines, ""]


def sign_test(values: Sequence[float]) -> float:
    """Return p of so many positive differences or more; those that are 0 do not count."""
    signs = [value > 0 for value in values if value != 0]
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
        "scores of the last validation; sd: between the seeds of a set and share, each with labelled",
        "sentences of its own; root of the mean variance.",
        "",
    ]
    return lines


def within(row: Mapping[Place, float]) -> str:
    """Return the sample deviation between the seeds of a set and share, pooled over them, as text."""
    groups: dict[tuple[float, str], list[float]] = {}
    for place, value in row.items():
        groups.setdefault((place.share, place.set), []).append(value)
    variances = [np.var(values, ddof=1) for values in groups.values() if len(values) > 1]
    return f"{np.sqrt(np.mean(variances)):.2f}" if variances else "-"


def main(paths: Sequence[str]) -> None:
    """Print the tables, and name the runs that do not count."""
    # Of a sweep the runs of its last stage, as in `report`.
    runs, _ = pick_stage(read_runs(paths), find_plan(paths), paths, None)
    scores, averaged, raw = collect(runs)
    print(
        "test score (%): F1 of spans, labelled attachment of trees, else accuracy; mean ± sd (seeds)\n"
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
