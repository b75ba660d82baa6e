"""Pseudo-log-likelihoods: the sum over a sentence's tokens of ln p(token | the other tokens).

A causal LM gives ln p(token | the tokens before it) instead. A masked LM takes one pass a token,
other objectives one a sentence; see the last line on stderr.
Each sentence, one a line, gives a line of output in the same order, unless it is skipped:
    pll<TAB>tokens<TAB>text
pll is in nats, written so that it reads back as the same number; tokens is the number of scored
tokens (without [CLS] and [SEP]); both are 0 for a blank line. With --tokens a line is JSON instead:
    {"pll": p, "text": t, "tokens": [symbols], "log_probs": [one each]}

With --suite NAME --data FOLDER a suite of items is scored instead, such as minimal pairs: its table
is printed, and its metrics by group are kept in the run folder, where 'metaseq-lm report --metric
NAME.accuracy' finds them. name=value sets an option of the suite, key=value one of the run.
--pairs --input FILES is short for suite "pairs" on these files: its metrics are written as one JSON
object, per file and overall, and are not kept.

examples:
  metaseq-lm score runs/mlm --input sentences.txt --out plls.tsv
  metaseq-lm score runs/mlm --suite blimp --data blimp --too-long skip engine.device=cpu
  metaseq-lm score runs/mlm --suite pairs --data my_pairs --name agreement groups=[kind]
  metaseq-lm score runs/mlm --input blimp/*.jsonl --pairs
  metaseq-lm score runs/electra-tt --input sentences.txt criterion.pll_formula=dissertation
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metaseq_lm.core.documents import show_result
from metaseq_lm.core.errors import UsageError, say
from metaseq_lm.core.files import to_json
from metaseq_lm.core.options import add_options, option, read_options, read_words, with_default
from metaseq_lm.core.output import is_quiet, show
from metaseq_lm.core.registry import SUITES

if TYPE_CHECKING:
    from metaseq_lm.data.labelled.files import SourceSentence
    from metaseq_lm.evaluation.minimal_pairs import MinimalPair
    from metaseq_lm.evaluation.suites import Results
    from metaseq_lm.reporting.numbers import Metric
    from metaseq_lm.runs.suite_results import SuiteResults
    from metaseq_lm.training.scoring import SentenceScorer

PROGRESS = True
HELP = "score sentences by pseudo-log-likelihood, or a run with a suite such as BLiMP"
OVERRIDES = True


@dataclass(frozen=True)
class ScoringOptions:
    """The options of every command that scores sentences."""

    batch_tokens: int = option(
        8192, "most tokens in a pass; changes only speed and memory", metavar="N"
    )
    data: str | None = option(
        None, "folder with the tokenizer (default: the data the run was trained on)"
    )
    user_dir: str | None = option(None, "plug-in the run was trained with")
    pll: str = option(
        "original",
        "what is masked of a token's word: the token alone (original), or the tokens after it "
        "too (within_word_l2r)",
        choices=("original", "within_word_l2r"),
    )


@dataclass(frozen=True)
class _ScoreOptions(ScoringOptions):
    """The options of `score`."""

    run_path: str = option(
        "",
        "checkpoint, or run folder (its best one, else its last)",
        positional=True,
        metavar="RUN",
    )
    input: tuple[str, ...] | None = option(
        None, "text files; - is standard input", nargs="+", metavar="F"
    )
    suite: str | None = option(
        None, "the suite to score the run with; see 'list suite'", metavar="NAME"
    )
    name: str | None = option(
        None,
        "name of the results in reports (default: the suite, with - for / and .)",
        metavar="NAME",
    )
    out: str | None = option(None, "file for the output (default: standard output)", metavar="F")
    pairs: bool = option(False, "the input is minimal pairs")
    tokens: bool = option(False, "the log-probability of each token, as JSON lines")
    too_long: str = option(
        "fail",
        "sentences longer than the run's rows: fail, skip (a pair with its other sentence), or cut "
        "to the first tokens",
        choices=("fail", "skip", "cut"),
    )
    on_bad_utf8: str | None = option(
        None,
        "lines with invalid UTF-8: replace the bytes by U+FFFD, skip the line, or fail (default: "
        "replace; with --suite: fail)",
        choices=("replace", "skip", "fail"),
    )
    data: str | None = with_default(
        ScoringOptions,
        "data",
        None,
        "folder with the tokenizer (default: the data the run was trained on); with --suite: "
        "the folder or file of its items; data=FOLDER then names the folder with the tokenizer",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_options(parser, _ScoreOptions)


def run(args: argparse.Namespace) -> int:
    """Score the input, or the items of a suite, with the run and write the result."""
    options = read_options(_ScoreOptions, vars(args))
    if (options.input is None) == (options.suite is None):
        raise UsageError("give --input FILES with sentences, or --suite NAME with --data FOLDER")
    if options.suite is not None:
        return _run_suite(options, args.overrides)
    return _run_input(options, args.overrides, args.json)


def _run_input(options: _ScoreOptions, words: Sequence[str], is_json: bool) -> int:
    from metaseq_lm import plugins
    from metaseq_lm.core.loading import split_overrides
    from metaseq_lm.data.labelled.files import read_sentences
    from metaseq_lm.evaluation.minimal_pairs import read_pairs

    if options.pairs and options.tokens:
        raise UsageError("--tokens shows single sentences; leave it out with --pairs")
    if options.name is not None:
        raise UsageError("--name names the results of a --suite; those of --input are not kept")
    sources, overrides = split_overrides([*(options.input or ()), *words])
    if len(set(sources)) < len(sources):
        raise UsageError("--input names a file twice")
    if options.out and Path(options.out).is_dir():
        raise UsageError(f"--out {options.out} is a folder; give the name of a file")
    policy = options.on_bad_utf8 or "replace"
    items: list[Any] = []
    invalid = 0
    for source in sources:
        if options.pairs:
            in_file, bad = read_pairs(source, policy=policy, name=source)
            items += in_file
        else:
            lines, bad = read_sentences(source, policy)
            items += lines
        invalid += bad
    plugins.load_all(options.user_dir)
    plugins.check_runs([options.run_path], options.user_dir, overrides)
    from metaseq_lm.training.restore import open_scored
    from metaseq_lm.training.scoring import SentenceScorer

    opened = open_scored(options.run_path, options.data, options.user_dir, overrides)
    scorer = SentenceScorer(opened, options.batch_tokens, options.too_long, options.pll)
    if options.pairs:
        content, skipped = _score_pairs(scorer, items)
        output = f"{to_json(content, 1)}\n".encode()
    else:
        content, output = _score_sentences(scorer, items, options.tokens)
        skipped = len(items) - len(content["sentences"])
    if options.out or not is_json:
        _write_output(output, options.out)
    for count, reason in ((invalid, "invalid UTF-8"), (skipped, "too long")):
        if count:
            say(f"skipped for {reason}: {count:,}")
    if not is_quiet():
        say(str(scorer.cost))
    content |= {"invalid_utf8": invalid, "too_long": skipped, "cost": asdict(scorer.cost)}
    show_result("score-pairs" if options.pairs else "score", content)
    return 0


def _write_output(output: bytes, path: str | None) -> None:
    """Write `output` atomically to a file, or to standard output."""
    from metaseq_lm.core.files import write_atomic

    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(path), output)
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(output)  # UTF-8 as in a file, whatever the terminal's encoding
    sys.stdout.flush()


def _score_sentences(
    scorer: "SentenceScorer", sentences: Sequence["SourceSentence"], tokens: bool
) -> tuple[dict[str, Any], bytes]:
    """Return the scores of single sentences without skipped ones, and the output."""
    from metaseq_lm.evaluation.nbest import score_lines

    rows = [
        (score, sentence.text)
        for score, sentence in zip(scorer.score(sentences), sentences)
        if score is not None
    ]
    if not tokens:
        scores = [{"pll": s.pll, "text": text, "tokens": len(s.tokens)} for s, text in rows]
        return {"sentences": scores}, score_lines((s.pll, len(s.tokens), text) for s, text in rows)
    symbols, lines = scorer.vocabulary.symbols, []
    for score, text in rows:
        line = {"pll": score.pll, "text": text, "tokens": [symbols[i] for i in score.tokens]}
        lines.append({**line, "log_probs": score.log_probs.tolist()})
    return {"sentences": lines}, "".join(to_json(line) + "\n" for line in lines).encode()


def _score_pairs(
    scorer: "SentenceScorer", pairs: list["MinimalPair"]
) -> tuple[dict[str, Any], int]:
    from metaseq_lm.evaluation.suites import OVERALL, build_suite

    results: Results = build_suite("pairs").score(pairs, scorer)
    summary = {name: {**group.metrics, "pairs": group.n} for name, group in results.items()}
    overall = summary.pop(OVERALL)
    return {"overall": overall, "files": summary}, len(pairs) - results[OVERALL].n


def _run_suite(options: _ScoreOptions, words: Sequence[str]) -> int:
    """Score the run with a suite, print the table of its groups, and keep the results."""
    from metaseq_lm import plugins
    from metaseq_lm.core.config import TOP
    from metaseq_lm.core.loading import split_overrides
    from metaseq_lm.reporting.runs import relative_to_cwd
    from metaseq_lm.runs import manifests, suite_results

    suite = str(options.suite)
    if options.pairs or options.tokens:
        raise UsageError("--pairs and --tokens go with --input; leave them out with --suite")
    if options.data is None:
        raise UsageError(f"--suite {suite}: give --data FOLDER, the folder with its files")
    name = options.name or suite_results.default_name(suite)
    suite_results.check_name(name)
    names, keys = split_overrides(words)
    if names:
        raise UsageError(f"{names[0]}: give options as name=value; the files are --data FOLDER")
    is_key = [key.partition("=")[0] in TOP or "." in key.partition("=")[0] for key in keys]
    overrides = [key for key, of_run in zip(keys, is_key) if of_run]
    of_suite = [key for key, of_run in zip(keys, is_key) if not of_run]
    if options.on_bad_utf8 is not None:
        of_suite.append(f"on_bad_utf8={options.on_bad_utf8}")
    plugins.load_all(options.user_dir)
    read_words(SUITES.entry(suite).dataclass, of_suite, f"suite {suite}")  # before torch
    plugins.check_runs([options.run_path], options.user_dir, overrides)
    from metaseq_lm.evaluation.suites import build_suite
    from metaseq_lm.training.run import train_run
    from metaseq_lm.training.suites import SuiteRequest, score_suite, stored_results

    checkpoint = manifests.resolve(options.run_path, prefer="best")
    request = SuiteRequest(
        build_suite(suite, of_suite),
        Path(options.data),
        name,
        options.batch_tokens,
        options.too_long,
        options.pll,
        overrides=tuple(overrides),
    )
    stored = stored_results(request, checkpoint, options.user_dir)
    results = stored or score_suite(request, checkpoint, train_run, options.user_dir)
    show(_suite_table(results), end="")
    if options.out:
        content = to_json(results.record(), 1) + "\n"
        _write_output(content.encode(), options.out)
    run_folder = suite_results.run_folder_of(checkpoint)
    file: str | None = None
    if run_folder is None:
        say(f"{checkpoint} lies in no run folder, so the results are not kept; --out writes them")
    elif stored:
        file = relative_to_cwd(suite_results.file_of(run_folder, results))
        say(f"scored before, with the same data and options; to score again delete {file}")
    else:
        file = relative_to_cwd(suite_results.write(run_folder, results))
        say(f"written: {file}")
    show_result("score-suite", {**results.record(), "file": file})
    return 0


def _suite_table(results: "SuiteResults") -> str:
    from metaseq_lm.reporting.formats import WRITERS
    from metaseq_lm.reporting.numbers import Metric
    from metaseq_lm.reporting.table import Cell, Table

    by_name: dict[str, list[float]] = {}
    for group in results.groups.values():
        for name, value in group["metrics"].items():
            by_name.setdefault(name, []).append(value)
    columns = {name: Metric.of(name, values, "higher") for name, values in by_name.items()}
    compared = _reference_columns(results)
    rows = []
    for title, group in results.groups.items():
        cells = [Cell(title, number=False), Cell(f"{group['n']:,}")]
        for name, metric in columns.items():
            value = group["metrics"].get(name)
            cells.append(Cell("" if value is None else _number_text(metric, value)))
        for name, of_group in compared.values():
            value = of_group.get(title)
            cells.append(Cell("" if value is None else _number_text(columns[name], value)))
        rows.append(cells)
    head = ["group", "n", *(metric.title for metric in columns.values()), *compared]
    title = f"{results.name} at update {results.update}"
    return WRITERS["text"][1](Table(title, head, rows, []))


def _reference_columns(results: "SuiteResults") -> dict[str, tuple[str, dict[str, float]]]:
    """Return the columns of references of metrics, such as chance, by title.

    Each has a metric and the value by group. A reference that depends on the metric has a column
    for each metric.
    """
    from metaseq_lm.runs.suite_results import OVERALL

    columns: dict[str, tuple[str, dict[str, float]]] = {}
    for group, content in results.groups.items():
        prefix = "" if group == OVERALL else f"{group}."
        for metric in content["metrics"]:
            for reference, value in results.references.get(prefix + metric, {}).items():
                _, values = columns.setdefault(reference, (metric, {}))
                if not math.isclose(values.setdefault(group, value), value):
                    columns.setdefault(f"{reference} {metric}", (metric, {}))[1][group] = value
    return columns


def _number_text(metric: "Metric", value: float) -> str:
    """Return a value as text for a table of groups; a count has no decimals."""
    is_count = not metric.percent and float(value).is_integer()
    return f"{value:,.0f}" if is_count else metric.text(value)
