"""Bounds: accuracies above exact readers, losses below entropies, and what the plan names."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import league_rows as make
import numpy as np
import pytest
from league_rows import BRACKETS, TOPIC

from metaseq_lm.cli import main
from metaseq_lm.league.bound_gates import _is_above, above_reader, below_entropy, beyond_plan
from metaseq_lm.league.corpus import CLOZE, TOKEN, CorpusFacts, Exact, from_about, read_corpus
from metaseq_lm.reporting.runs import Run
from metaseq_lm.reporting.settings import Row

EXACT = Exact(60.0, 2.0, 0.01, 1.0, 0.02, 1000, 40)
TERMS = {"next_token": TOKEN, "mlm": CLOZE}


def with_readers(reach: str | None, both: float, left: float) -> Callable[[Run], Run]:
    """Return an edit by which suites know exact readers, and say what the model sees."""

    def edit(run: Run) -> Run:
        run = make.with_references(bayes=both, bayes_left=left)(run)
        facts = {"reach": reach} if reach else {}
        return replace(run, suites=tuple(replace(suite, facts=facts) for suite in run.suites))

    return edit


@pytest.mark.parametrize(
    "reach, both, left, found",
    [
        ("causal", 0.95, 0.70, True),
        ("causal", 0.95, 0.80, False),
        ("both", 0.95, 0.70, False),
        (None, 0.95, 0.70, False),  # an archive that does not say it
        ("both", 0.70, 0.70, True),
        ("both", 0.79, 0.70, False),  # above it by less than 500 items scatter
    ],
)
def test_an_accuracy_above_the_reader_of_what_is_seen(reach, both, left, found) -> None:
    row = make.change(make.make_row("causal", 0.8), with_readers(reach, both, left))
    metrics = [finding.metric for finding in above_reader(row, make.make_context(row))]
    assert (BRACKETS in metrics) == found and TOPIC not in metrics


def test_one_seed_above_a_reader_is_named() -> None:
    row = make.change(make.make_row("a", 0.8), with_readers("both", 0.85, 0.85))
    row = make.change(row, make.with_suite("pairs", "brackets", accuracy=0.8), range(8))
    high = make.suite("pairs", "brackets", accuracy=0.93)
    high = replace(high, references={"brackets.accuracy": {"bayes": 0.85}})
    row = make.change(row, lambda run: replace(run, suites=(high, run.suites[1])), [2])
    (finding,) = above_reader(row, make.make_context(row))
    assert f"0.93 of seed {row.runs[2].seed}" in finding.reason and "mean" not in finding.reason


@pytest.mark.parametrize("accuracy, bound", [(0.5, 0.5), (0.52, 0.5), (1.0, 1.0), (0.2, 1.0)])
def test_items_scatter_and_one_is_the_most(accuracy: float, bound: float) -> None:
    assert not _is_above(accuracy, bound, 5000) and _is_above(1.05, 1.0, 5000)
    assert _is_above(0.94, 0.5, 20) and not _is_above(0.75, 0.5, 20)


def of_loss(value: float, **values: object) -> Row:
    """Return a row whose validations of both terms are `value` at best."""
    row = make.change(make.make_row("a", 0.8), make.with_logged(next_token=value, mlm=value))
    row = make.change(row, make.with_results(bounds=TERMS))
    return make.change(row, make.with_values(task__tokens_per_sample=64, **values))


@pytest.mark.parametrize(
    "loss, values, terms",
    [
        (2.0, {}, []),
        (1.9, {}, []),  # [SEP] costs less than a token: 60 / 31
        (1.8, {}, ["next_token"]),
        (1.8, {"task__valid_size": 200}, ["next_token"]),
        (1.8, {"task__valid_size": 50}, []),  # few documents scatter more
        (0.95, {}, ["next_token"]),
        (0.85, {}, ["next_token", "mlm"]),
        (0.85, {"task__leave_unmasked_prob": 0.1}, ["next_token"]),
    ],
)
def test_a_loss_below_the_entropy_of_the_world(loss, values, terms) -> None:
    row = of_loss(loss, **values)
    context = make.make_context(row, corpus=CorpusFacts(make.SYMBOLS, 4.0, exact=EXACT))
    reasons = [finding.reason for finding in below_entropy(row, context)]
    assert [reason.split()[0] for reason in reasons] == [f"valid.{term}" for term in terms]
    assert not list(below_entropy(row, make.make_context(row)))


def test_rows_shorter_than_documents_have_more_ends() -> None:
    assert EXACT.least(TOKEN, 20, 1000) < EXACT.least(TOKEN, 40, 1000) < 60 / 31


@pytest.mark.parametrize("bounds, found", [({TOPIC: 0.5}, 1), ({TOPIC: 0.7}, 0), ({}, 0)])
def test_the_bound_of_a_plan(bounds: dict[str, float], found: int) -> None:
    row = make.make_row("a", 0.8)
    context = make.make_context(row, bounds=bounds)
    assert len(list(beyond_plan(row, context))) == found
    loss = make.make_context(row, bounds={"valid.mlm": 2.5 if found else 2.3})
    assert len(list(beyond_plan(row, loss))) == found


def test_the_exact_losses_of_a_world_are_part_of_its_corpus(tmp_path: Path) -> None:
    sizes = ["--world-documents", "300", "--world-held-out", "100", "--world-labelled", "20"]
    words = ["preprocess", "--world", "quad", *sizes, "--world-pairs", "10"]
    assert main([*words, "--destdir", str(tmp_path / "quad")]) == 0
    corpus = read_corpus(tmp_path / "quad")
    exact = corpus.exact
    assert from_about(tmp_path, {"corpus": corpus.as_text()}) == corpus
    assert exact is not None and exact.documents == 100 and exact.cloze < exact.token
    tokens = exact.document / exact.token
    expected = exact.document / (tokens + 1)
    error = 3.09 * exact.token_error * np.sqrt(2)
    assert exact.least(TOKEN, exact.longest, 100) == pytest.approx(expected - error)
