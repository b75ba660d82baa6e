"""Scoring of a restored run with a suite."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.evaluation.suites import OVERALL, PREDICTIONS, Results, Suite
from metaseq_lm.runs import manifests
from metaseq_lm.runs.folder import code_hash
from metaseq_lm.runs.suite_results import SuiteResults
from metaseq_lm.training.parts import Parts
from metaseq_lm.training.restore import open_run
from metaseq_lm.training.scoring import SentenceScorer

PRECISION = "engine.precision"


@dataclass(frozen=True)
class SuiteRequest:
    """A scoring job: a checkpoint, a suite, the folder of its data, and options.

    Attributes:
        checkpoint: The folder of the checkpoint.
        suite: The suite.
        folder: The folder, or file, with the data of the suite.
        name: What reports call the results.
        user_dir: The plug-in that the run or the suite needs.
        overrides: key=value changes of the run's configuration.
        batch_tokens: Largest number of tokens in a forward pass.
        too_long: What to do with sentences that are longer than the run's rows.
    """

    checkpoint: Path
    suite: Suite[Any, Any]
    folder: Path
    name: str
    user_dir: str | None = None
    overrides: Sequence[str] = ()
    batch_tokens: int = 8192
    too_long: str = "fail"


def read_items(suite: Suite[Any, Any], folder: Path) -> Any:
    """Return the items of a suite; UsageError with the suite's input format if invalid."""
    try:
        return suite.read(folder)
    except UsageError:
        raise
    except MetaseqError as error:
        # The folder was typed, and another one is the remedy.
        remedy = "" if str(error).endswith(".") else f"; is this the data of suite {suite.name}?"
        raise UsageError(f"{error}{remedy}") from error


def score_suite(request: SuiteRequest) -> SuiteResults:
    """Return the results of a suite for a checkpoint.

    Raises:
        UsageError: The data are not those of the suite, or the run does not give what it needs.
    """
    suite, started = request.suite, time.perf_counter()
    items = read_items(suite, request.folder)
    manifest = manifests.read_manifest(request.checkpoint)
    options = asdict(suite.config)
    cost: dict[str, int] = {}
    if suite.takes == PREDICTIONS:
        run, results = score_predictions(request, items, manifest)
    else:
        run, results, cost = score_sentences(request, items)
        options |= {"too_long": request.too_long}
    return SuiteResults(
        name=request.name,
        suite=suite.name,
        update=manifest["update"],
        weights=manifests.hash_of_weights(manifest),
        data=suite.data_hash(request.folder),
        options=options | {"precision": run.config.engine.precision},
        groups={name: asdict(group) for name, group in results.items()},
        facts={
            "folder": request.folder.name,
            "code": code_hash(request.user_dir),
            "seconds": round(time.perf_counter() - started, 3),
            **cost,
        },
    )


def score_sentences(request: SuiteRequest, items: Any) -> tuple[Parts, Results, dict[str, int]]:
    """Return the run, the results of a suite that takes probabilities of sentences, and its cost.

    They are computed in float32 unless the user names a precision: in bfloat16 close scores become
    ties.
    """
    overrides = list(request.overrides)
    if not any(word.partition("=")[0] == PRECISION for word in overrides):
        overrides.append(f"{PRECISION}=fp32")
    run = open_run(str(request.checkpoint), None, request.user_dir, overrides)
    scorer = SentenceScorer(run, request.batch_tokens, request.too_long)
    results = checked(request.suite, request.suite.score(items, scorer))
    cost = scorer.cost
    counts = {"sentences": cost.sentences, "tokens": cost.tokens}
    return run, results, {**counts, "forward_tokens": cost.forward_tokens}


def score_predictions(
    request: SuiteRequest, items: Any, manifest: dict[str, Any]
) -> tuple[Parts, Results]:
    """Return the run and the results of a suite that takes predictions for a labelled set."""
    suite, folder = request.suite, request.folder.resolve()
    config = manifest.get("config") or {}
    task = config.get("task") or {}
    if not isinstance(task.get("labelled"), str):
        raise UsageError(
            f"suite {suite.name} takes predictions for a labelled set, and task "
            f"'{task.get('_name')}' of {request.checkpoint} makes none of a single set; give a run "
            "that was fine-tuned on one, as by 'train DATA --task sentence_prediction "
            "task.labelled=NAME --init-from RUN'"
        )
    overrides = [*request.overrides, f"task.labelled={folder.name}"]
    run = open_run(str(request.checkpoint), str(folder.parent), request.user_dir, overrides)
    _, rows = run.score(suite.config.split)
    return run, checked(suite, suite.score(items, suite.from_predictions(rows)))


def checked(suite: Suite[Any, Any], results: Results) -> Results:
    """Return the results with those of all items first; UsageError if a group has no item."""
    if OVERALL not in results:
        raise MetaseqError(f"suite {suite.name} returned no metrics of the group '{OVERALL}'")
    for name, group in results.items():
        if not group.n:
            raise UsageError(f"group '{name}' of suite {suite.name} is empty: it has no item")
    return {OVERALL: results[OVERALL], **results}
