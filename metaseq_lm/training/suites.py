"""Scores a restored run with a suite, and a finished run with `trainer.final_suites`."""

import contextlib
import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from metaseq_lm.config.entries import SuiteEntry, as_text, plain_text, read_entry
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import MetaseqError, UsageError, say
from metaseq_lm.core.files import check_folder, to_json
from metaseq_lm.data.storage.manifest import MANIFEST_FILE, Manifest, tokenizer_hash
from metaseq_lm.distributed import process_group
from metaseq_lm.evaluation.file_parts import is_apart
from metaseq_lm.evaluation.ngram_probabilities import NGRAM, ngrams_of
from metaseq_lm.evaluation.suites import (
    OVERALL,
    PREDICTIONS,
    SENTENCES,
    STATES,
    TUNING,
    WORD_TUNING,
    References,
    Results,
    Suite,
    build_suite,
)
from metaseq_lm.runs import manifests, suite_results
from metaseq_lm.runs.folder import code_hash
from metaseq_lm.runs.suite_results import SuiteResults
from metaseq_lm.tasks import Task
from metaseq_lm.tasks.protocols import comparison_scorer, encoder_of, task_read_as
from metaseq_lm.training.finetuning import FineTuner, Train, WordTuner
from metaseq_lm.training.parts import Parts
from metaseq_lm.training.restore import PRECISION, open_run, open_scored
from metaseq_lm.training.scoring import ORIGINAL, PLL_RULES, TOO_LONG, SentenceScorer
from metaseq_lm.training.states import EncoderStates

_OF_SENTENCES = {"too_long": TOO_LONG, "pll": PLL_RULES}  # the first of each is the default


@dataclass(frozen=True)
class SuiteRequest:
    """A request to score a checkpoint: a suite, the folder of its data, and options.

    Attributes:
        suite: The suite.
        folder: The folder, or file, with the data of the suite.
        name: Name of the results in reports.
        batch_tokens: Largest number of tokens in a forward pass.
        too_long: What to do with sentences that are longer than the run's rows.
        pll: Which tokens of a token's word a masked LM does not see, see `SentenceScorer`.
        is_optional: Whether to skip the suite for a run that does not give what it takes.
        overrides: key=value changes of the run's configuration.
    """

    suite: Suite[Any, Any]
    folder: Path
    name: str
    batch_tokens: int = 8192
    too_long: str = "fail"
    pll: str = ORIGINAL
    is_optional: bool = False
    overrides: tuple[str, ...] = ()

    @property
    def precision(self) -> str | None:
        """The precision that the overrides name, if any."""
        return dict(word.partition("=")[::2] for word in self.overrides).get(PRECISION)

    def options(self, precision: str) -> dict[str, Any]:
        """Return the options that the results depend on besides checkpoint and data."""
        options = asdict(self.suite.config) | {"precision": precision}
        if self.suite.takes == SENTENCES:
            options |= {name: getattr(self, name) for name in _OF_SENTENCES}
        # Device and batches of the scoring do not change the results.
        changes = [word for word in self.overrides if not word.startswith(("engine.", "data="))]
        if changes:
            options["overrides"] = sorted(changes)
        return options


def _read_items(suite: Suite[Any, Any], folder: Path) -> Any:
    """Return the items of a suite; UsageError with the suite's input format if invalid."""
    try:
        return suite.read(folder)
    except UsageError:
        raise
    except MetaseqError as error:
        # The user gave the folder, and can give another one.
        remedy = "" if str(error).endswith(".") else f"; is this the data of suite {suite.name}?"
        raise UsageError(f"{error}{remedy}") from error


def score_suite(
    request: SuiteRequest,
    checkpoint: Path,
    train: Train,
    user_dir: str | None = None,
    run: Parts | None = None,
) -> SuiteResults:
    """Return the results of a suite for a checkpoint.

    Args:
        request: The suite, its data and options.
        checkpoint: The folder of the checkpoint.
        train: Makes a training run, for suites that fine-tune.
        user_dir: The plug-in that the run or the suite needs.
        run: The result of `open_scored` for the checkpoint, if it is open already.

    Raises:
        UsageError: The data do not fit the suite, or the run does not give what it takes.
    """
    suite, started = request.suite, time.perf_counter()
    items = _read_items(suite, request.folder)
    manifest = manifests.read_manifest(checkpoint)
    facts: dict[str, Any] = {}
    if suite.takes == PREDICTIONS:
        _check_predicts(request, (manifest.get("config") or {}).get("task") or {}, checkpoint)
        folder = request.folder.resolve()
        labelled = [*request.overrides, f"task.labelled={folder.name}"]
        run = open_run(str(checkpoint), str(folder.parent), user_dir, labelled)
        _, rows = run.score(suite.config.split)
        results = _with_overall_first(suite, suite.score(items, suite.from_predictions(rows)))
    else:
        run = run or open_scored(str(checkpoint), None, user_dir, request.overrides)
        if suite.takes == TUNING:
            results, facts = _score_tuning(request, items, run, checkpoint, train)
        elif suite.takes == WORD_TUNING:
            results, facts = _score_word_tuning(request, items, run, checkpoint)
        else:
            of_items = _score_states if suite.takes == STATES else _score_sentences
            results, facts = of_items(request, items, run)
    return SuiteResults(
        name=request.name,
        suite=suite.name,
        update=manifest["update"],
        weights=manifests.hash_of_weights(manifest),
        data=suite.data_hash(request.folder),
        options=request.options(run.config.engine.precision),
        groups={name: group.record() for name, group in results.items()},
        facts={
            "folder": request.folder.name,
            "code": code_hash(user_dir),
            "seconds": round(time.perf_counter() - started, 3),
            **facts,
        },
        references=_flat_references(_references_of(request, items, run), results),
    )


def _references_of(request: SuiteRequest, items: Any, run: Parts) -> References:
    """Return the references that the metrics of a suite are compared with.

    In a suite of sentences, each metric with a reference also gets the score of the n-grams of the
    run's corpus, unless the suite brings its own n-grams, as the pairs of a world do.
    """
    suite, references = request.suite, request.suite.references(items, request.folder)
    levels_of_metrics = chain.from_iterable(group.values() for group in references.values())
    if suite.takes != SENTENCES or any(NGRAM in levels for levels in levels_of_metrics):
        return references
    for name, probabilities in ngrams_of(Path(run.config.data)).items():
        results = suite.score(items, probabilities)
        for group, levels in references.items():
            for metric, others in levels.items():
                value = results[group].metrics.get(metric, math.nan)
                if math.isfinite(value):
                    levels[metric] = {**others, name: value}
    return references


def stored_results(
    request: SuiteRequest, checkpoint: Path, user_dir: str | None = None
) -> SuiteResults | None:
    """Return the stored results of a request from the run folder.

    None unless this code, with this plug-in, has scored the checkpoint with the same data and
    options.
    """
    folder = suite_results.run_folder_of(checkpoint)
    manifest = manifests.read_manifest(checkpoint)
    known = (manifest["update"], manifests.hash_of_weights(manifest))
    precision = request.precision or "fp32"
    if request.suite.takes == PREDICTIONS and request.precision is None:
        precision = manifest["config"]["engine"]["precision"]
    if folder is None:
        return None
    for result in suite_results.read_all(folder)[0]:
        if (
            (result.name, result.update) == (request.name, known[0])
            and result.code == code_hash(user_dir)
            and result.options.get("precision") == precision
            and _is_answer(result, request, known)
        ):
            return result
    return None


def _score_sentences(
    request: SuiteRequest, items: Any, run: Parts
) -> tuple[Results, dict[str, Any]]:
    """Return the results of a suite that takes probabilities of sentences, and facts on them.

    The facts are which tokens a score depends on, and the cost.
    """
    scorer = SentenceScorer(run, request.batch_tokens, request.too_long, request.pll)
    results = _with_overall_first(request.suite, request.suite.score(items, scorer))
    cost = scorer.cost
    counts = {"sentences": cost.sentences, "tokens": cost.tokens}
    return results, {"reach": scorer.reach, **counts, "forward_tokens": cost.forward_tokens}


def _score_states(request: SuiteRequest, items: Any, run: Parts) -> tuple[Results, dict[str, Any]]:
    """Return the results of a suite of hidden states, and as facts their reach and the cost."""
    _check_made_for(request.folder, run)
    states = EncoderStates(run, request.batch_tokens)
    results = _with_overall_first(request.suite, request.suite.score(items, states))
    counts = {"rows": states.rows, "forward_tokens": states.forward_tokens}
    return results, {"reach": states.reach, **counts}


def _check_made_for(folder: Path, run: Parts) -> None:
    """Raise UsageError if a set was made with another tokenizer than the run's."""
    made_with, trained_with = _tokenizer_of(folder), tokenizer_hash(run.config.data)
    if made_with and trained_with and made_with != trained_with:
        raise UsageError(
            f"{folder}: made with another tokenizer than the run's ({made_with} and "
            f"{trained_with}); preprocess it with --tokenizer-from {run.config.data}"
        )


def _score_tuning(
    request: SuiteRequest, items: Any, run: Parts, checkpoint: Path, train: Train
) -> tuple[Results, dict[str, int]]:
    """Return the results of a suite that fine-tunes a checkpoint, and its cost."""
    for folder in items:
        _check_made_for(folder, run)
    run_folder = suite_results.run_folder_of(checkpoint)
    with contextlib.ExitStack() as stack:
        if run_folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder = Path(process_group.from_first(str(folder)))
        else:
            # An interrupted call continues with these training runs, which stay until all of them
            # have ended.
            folder = run_folder / suite_results.FOLDER / request.name / "training"
            check_folder(folder, run_folder)
        weights = manifests.hash_of_weights(manifests.read_manifest(checkpoint))
        runs = folder / weights[:12]
        tuner = FineTuner(run, checkpoint, runs, train, request.batch_tokens)
        results = _with_overall_first(request.suite, request.suite.score(items, tuner))
    if process_group.rank() == 0 and folder.is_dir():
        shutil.rmtree(folder)
    return results, {"updates": tuner.updates, "flops": tuner.flops}


def _score_word_tuning(
    request: SuiteRequest, items: Any, run: Parts, checkpoint: Path
) -> tuple[Results, dict[str, int]]:
    _check_made_for(request.folder, run)
    tuner = WordTuner(run, checkpoint, request.batch_tokens)
    results = _with_overall_first(request.suite, request.suite.score(items, tuner))
    return results, {"updates": tuner.updates, "flops": tuner.flops}


def _tokenizer_of(folder: Path) -> str | None:
    """Return the hash of the tokenizer that a set was made with, None for other data."""
    if not (folder / MANIFEST_FILE).is_file():
        return None
    return Manifest.load(folder).tokenizer.get("hash")


def _flat_references(references: References, results: Results) -> dict[str, dict[str, float]]:
    """Return the references of the groups that were scored, by METRIC and GROUP.METRIC."""
    flat: dict[str, dict[str, float]] = {}
    for group, metrics in references.items():
        prefix = "" if group == OVERALL else f"{group}."
        if group in results:
            flat |= {f"{prefix}{metric}": values for metric, values in metrics.items()}
    return flat


def _check_predicts(request: SuiteRequest, task: Mapping[str, Any], source: object) -> None:
    """Raise UsageError if the options of a task give no predictions for a single labelled set.

    `source` names the run.
    """
    if not isinstance(task.get("labelled"), str):
        raise UsageError(
            f"suite {request.suite.name} takes predictions for a labelled set, and task "
            f"'{task.get('_name')}' of {source} makes none of a single set; give a run "
            "that was fine-tuned on one, as by 'train DATA --task sentence_prediction "
            "task.labelled=NAME --init-from RUN'"
        )


def _with_overall_first(suite: Suite[Any, Any], results: Results) -> Results:
    """Return the results with the group of all items first; UsageError for an empty group."""
    if OVERALL not in results:
        raise MetaseqError(f"suite {suite.name} returned no metrics of the group '{OVERALL}'")
    for name, group in results.items():
        if not group.n:
            raise UsageError(f"group '{name}' of suite {suite.name} is empty: it has no item")
    return {OVERALL: results[OVERALL], **results}


# ------------------------------------------------------------------------ trainer.final_suites


def final_suites(config: RunConfig) -> list[SuiteRequest]:
    """Return the requests in `trainer.final_suites`; UsageError names a wrong entry."""
    requests: dict[str, SuiteRequest] = {}
    for item in config.trainer.final_suites:
        try:
            request = request_of(item, Path(config.data))
            if request.name in requests:
                raise UsageError(
                    f"another entry is called {request.name}, too; give one of them a name"
                )
        except UsageError as error:
            raise UsageError(f"trainer.final_suites, entry '{as_text(item)}': {error}") from error
        requests[request.name] = request
    return list(requests.values())


def request_of(item: str | Mapping[str, Any], data: Path) -> SuiteRequest:
    """Return the request of an entry of `trainer.final_suites`.

    Args:
        item: The entry.
        data: The folder to which a relative folder of the entry refers.

    Raises:
        UsageError: The entry has another form, or the suite, an option or a value is unknown.
    """
    entry = read_entry(item, SuiteEntry)
    suite_results.check_name(name := entry.name or suite_results.default_name(entry.suite))
    of_sentences = {key: getattr(entry, key) or known[0] for key, known in _OF_SENTENCES.items()}
    for option, known in _OF_SENTENCES.items():
        if of_sentences[option] not in known:
            raise UsageError(f"{option}={of_sentences[option]}: choose one of {', '.join(known)}")
    words = [f"{key}={plain_text(value)}" for key, value in entry.options.items()]
    return SuiteRequest(
        build_suite(entry.suite, words),
        data / entry.folder,
        name,
        too_long=of_sentences["too_long"],
        pll=of_sentences["pll"],
        is_optional=entry.optional,
    )


def chooses_by_reported(config: RunConfig, metric: str) -> bool:
    """Return whether a metric is computed on items of a final suite that reports also show.

    It is not if its suite scores only a part of the items and no other final suite has that part.
    """
    requests = {request.name: request for request in final_suites(config)}
    chosen = requests.pop(metric.partition(".")[0], None)
    if chosen is None:
        return False
    options, source = chosen.suite.config, (chosen.suite.name, chosen.folder)
    is_part = bool(getattr(options, "first", 0)) or getattr(options, "split", "test") == "valid"
    others = [r for r in requests.values() if (r.suite.name, r.folder) == source]
    return not is_part or not all(is_apart(options, other.suite.config) for other in others)


def check_final_suites(
    config: RunConfig, task: Task | None = None, model: nn.Module | None = None
) -> None:
    """Raise UsageError if the final suites of a run could not score it.

    Args:
        config: The configuration. If its data folder is empty, files are not checked.
        task: The task of the run, to check that its criterion scores sentences.
        model: Its networks, to check that they have the states that probes take.
    """
    for request in final_suites(config):
        try:
            if not request.is_optional:
                _check_gives(request, config, task, model)
            if any(Path(config.data).iterdir()):
                request.suite.check(request.folder)
        except UsageError as error:
            raise UsageError(f"trainer.final_suites, suite {request.name}: {error}") from error


def _check_gives(
    request: SuiteRequest, config: RunConfig, task: Task | None, model: nn.Module | None
) -> None:
    """Raise UsageError if a run does not give what a suite takes; without parts only by options."""
    if request.suite.takes == PREDICTIONS:
        _check_predicts(request, vars(config.task), "this run")
    elif task is not None and request.suite.takes == SENTENCES:
        comparison_scorer(task_read_as(task))
    elif task is not None and model is not None:
        encoder_of(task, model)


def missing_suites(config: RunConfig) -> list[SuiteRequest]:
    """Return the final suites without results for the last checkpoint in `config.save_dir`.

    Results of the same name do not count if they have other data or options.
    """
    answers = _final_answers(config)
    return [request for request in final_suites(config) if request.name not in answers]


def _final_answers(config: RunConfig) -> dict[str, SuiteResults]:
    """Return the results of final suites in a run folder, by name; see `missing_suites`."""
    run = Path(config.save_dir)
    current = suite_results.current_checkpoint(run)
    if current is None:
        return {}
    scored = {(result.name, result.update): result for result in suite_results.read_all(run)[0]}
    answers = {}
    for request in final_suites(config):
        result = scored.get((request.name, current[0]))
        if result and _is_answer(result, request, current):
            answers[request.name] = result
    return answers


def describe_other_code(config: RunConfig) -> str:
    """Return which final suites were scored by other code, and how to score them again; or ""."""
    code = code_hash(config.user_dir)
    others = [name for name, result in _final_answers(config).items() if result.code != code]
    if not others:
        return ""
    folders = " ".join(str(Path(config.save_dir) / suite_results.FOLDER / x) for x in others)
    return (
        f"scored by other code: {', '.join(others)}. The results stay; to score again delete "
        f"{folders} and give this command again"
    )


def _is_answer(
    result: SuiteResults, request: SuiteRequest, checkpoint: tuple[int, str] | None
) -> bool:
    """Return whether results answer a request for a checkpoint (update, hash of weights)."""
    precision = str(result.options.get("precision"))
    options = json.loads(to_json(request.options(precision)))
    # Results of earlier versions lack options that were added later.
    earlier = {"pll": ORIGINAL, **asdict(type(request.suite.config)())}
    recorded = {key: earlier[key] for key in options if key in earlier} | dict(result.options)
    return (
        (result.update, result.weights) == checkpoint
        and (result.suite, recorded) == (request.suite.name, options)
        and result.data == request.suite.data_hash(request.folder)
    )


def score_final_suites(config: RunConfig, train: Train) -> Iterator[SuiteResults]:
    """Yield the results of each final suite that is missing, scored as `metaseq-lm score` does.

    A collective call: each replica makes all passes. Raises Interrupted after a stop signal.
    """
    missing = process_group.from_first([request.name for request in missing_suites(config)])
    run: Parts | None = None
    for request in final_suites(config):
        if request.name not in missing:
            continue
        process_group.stop_if_signalled("before a suite")
        checkpoint = manifests.resolve(config.save_dir, prefer="best")
        if run is None and request.suite.takes != PREDICTIONS:
            run = open_scored(str(checkpoint), None, config.user_dir)
        if request.is_optional:
            try:
                # Without parts only by the options.
                task, model = (run.task, run.model) if run else (None, None)
                _check_gives(request, config, task, model)
            except UsageError as error:
                say(f"not scored with suite {request.name}: {error}")
                continue
        yield score_suite(request, checkpoint, train, config.user_dir, run=run)
