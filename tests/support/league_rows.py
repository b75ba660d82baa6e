"""Rows of a league with chosen numbers: runs in the form of reports, without training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from metaseq_lm.data.doctor.likeness import Likeness
from metaseq_lm.league.corpus import CorpusFacts
from metaseq_lm.league.standings import Context
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import Row, TuningRecord
from metaseq_lm.runs.suite_results import SuiteResults

BRACKETS, TOPIC = "pairs.brackets.accuracy", "topic.accuracy"
BUDGET, UNIGRAM, TRIGRAM, SYMBOLS = 6e10, 4.08, 2.6, 106
WORDS, ALIKE = 10**6, Likeness(0.02, 0.019, 0.004)  # words of train, and likeness of valid
RATES = (1e-3, 2e-3, 4e-3)
UPDATES = range(40, 281, 40)


def suite(name: str, group: str, data: str = "d1", n: int = 500, **metrics: float) -> SuiteResults:
    """Return results of a suite with one group."""
    groups = {"overall": {"n": n, "metrics": metrics}, group: {"n": n, "metrics": metrics}}
    references = {key: {"chance": 0.35} for key in ("accuracy", f"{group}.accuracy")}
    options = {"compare": "changed"}
    return SuiteResults(name, name, 280, "w", data, options, groups, {"code": "c1"}, references)


def make_run(
    seed: int, loss: Sequence[float], brackets: float = 0.9, topic: float = 0.6, **top: Any
) -> Run:
    """Return a finished run with the validation losses `loss` and two scores.

    `top` are values of the config with dots written as double underscores, or entries of `results`.
    """
    results = {
        "status": "finished",
        "updates": 280,
        "words_seen": 20_000,
        "flops": BUDGET,
        "parameters": {"all": 100},
        "metrics": {"valid": {"loss": loss[-1], "mlm": loss[-1]}},
        "losses": ["mlm"],
        "code": "c1",
        "corpus": "k1",
    }
    values = {"label": "row", "seed": seed, "data_hash": "h1", "optimizer.lr": 2e-3}
    values |= {"task.batch_size": 8}
    for key, value in top.items():
        if key in ("status", "flops", "code", "pretraining", "parameters", "updates"):
            results[key] = value
        else:
            values[key.replace("__", ".")] = value
    log = []
    for update, value in zip(UPDATES[-len(loss) :], loss):
        log.append({"kind": "valid", "update": update, "loss": value, "mlm": value})
    suites = (
        suite("pairs", "brackets", accuracy=brackets, soft_accuracy=0.3 + 0.6 * brackets, ties=0),
        suite("topic", "last", accuracy=topic),
    )
    return Run(Path(f"runs/{values['label']}/{seed}"), values, log, results, suites=suites)


def losses(seed: int, end: float = 2.4, start: float = 4.2) -> list[float]:
    """Return validation losses that fall from `start` to `end` and stay there."""
    noise = np.random.default_rng(seed).normal(0, 0.01, len(UPDATES))
    fall = [start, (start + end) / 2, *([end] * (len(UPDATES) - 2))]
    return list(np.array(fall) + noise)


def runs(count: int, mean: float, first: int = 1, end: float = 2.4, **top: Any) -> tuple[Run, ...]:
    """Return runs of several seeds with a score of brackets of about `mean`, sd .01."""
    made = []
    for seed in range(first, first + count):
        shift = 0.012 * (seed % 3 - 1)
        brackets, topic = mean + shift, top.get("topic", 0.6) + shift
        made.append(make_run(seed, losses(seed, end), brackets, **{**top, "topic": topic}))
    return tuple(made)


def trials(first: int = 101) -> tuple[Run, ...]:
    """Return the trials of a tuning."""
    return tuple(make_run(first + i, losses(i), optimizer__lr=rate) for i, rate in enumerate(RATES))


def make_row(name: str, mean: float, **changes: Any) -> Row:
    """Return a row without findings; `changes` are fields of it."""
    first = sum(map(ord, name)) % 90 * 1000  # other rows have other losses
    finals = tuple(
        replace(run, values={**run.values, "seed": run.values["seed"] - first, "label": name})
        for run in runs(8, mean, first + 1)
    )
    row = Row(
        finals,
        {"label": name},
        budget=BUDGET,
        untrained=runs(4, 0.5 + first / 1e9, 500, 4.6, topic=0.4, label="untrained", updates=1),
        shuffled=runs(4, 0.5, 600, topic=0.5, label="shuffled"),
        tuning=TuningRecord({"optimizer.lr": RATES}, {"optimizer.lr": 2e-3}, trials(), BUDGET),
    )
    return replace(row, **changes)


def make_context(*rows: Row, **changes: Any) -> Context:
    """Return the context of rows; the first one is the baseline."""
    corpus = CorpusFacts(SYMBOLS, UNIGRAM, TRIGRAM, WORDS, ALIKE)
    context = Context(rows, rows[0].objective, (BRACKETS, TOPIC), 8, corpus=corpus)
    return replace(context, **changes)


def change(row: Row, edit: Callable[[Run], Run], which: Sequence[int] = range(8)) -> Row:
    """Return a row with some of its final runs edited."""
    edited = [edit(run) if i in which else run for i, run in enumerate(row.runs)]
    return replace(row, runs=tuple(edited))


def with_values(**values: Any) -> Callable[[Run], Run]:
    """Return an edit of the config, with dots written as double underscores."""
    named = {key.replace("__", "."): value for key, value in values.items()}
    return lambda run: replace(run, values={**run.values, **named})


def with_results(**entries: Any) -> Callable[[Run], Run]:
    """Return an edit of results.json."""
    return lambda run: replace(run, results={**(run.results or {}), **entries})


def with_losses(of: Callable[[int], Sequence[float]]) -> Callable[[Run], Run]:
    """Return an edit of the validation losses, by seed."""

    def edit(run: Run) -> Run:
        log: list[Mapping[str, Any]] = []
        for line, value in zip(run.log, of(run.values["seed"])):
            log.append({**line, "loss": value, "mlm": value})
        return replace(run, log=log)

    return edit


def with_logged(**values: float) -> Callable[[Run], Run]:
    """Return an edit that adds values to all validations."""
    return lambda run: replace(run, log=[{**line, **values} for line in run.log])


def with_references(**levels: float) -> Callable[[Run], Run]:
    """Return an edit that replaces the references of all metrics."""

    def edit(run: Run) -> Run:
        suites = []
        for results in run.suites:
            references = dict.fromkeys(results.references, levels)
            suites.append(replace(results, references=references))
        return replace(run, suites=tuple(suites))

    return edit


def with_suite(name: str, group: str, **changes: Any) -> Callable[[Run], Run]:
    """Return an edit that replaces the results of a suite."""
    new = suite(name, group, **changes)

    def edit(run: Run) -> Run:
        others = tuple(results for results in run.suites if results.name != name)
        return replace(run, suites=(*others, new))

    return edit


def with_scoring_code(code: str) -> Callable[[Run], Run]:
    """Return an edit that replaces the scoring code of all suites."""
    return lambda run: replace(
        run, suites=tuple(replace(results, facts={"code": code}) for results in run.suites)
    )
