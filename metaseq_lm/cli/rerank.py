"""Re-rank n-best lists by score + lambda * pseudo-log-likelihood; word error rates.

A list file is JSON: {utterance: {"ref": text, "hyp_1": {"score": number, "text": text}, ...}}.
Lambda is the value of the grid with the fewest word errors on --dev; ties go to the smallest. For
each set the output has the word error rates without re-ranking, of the oracle (the hypothesis with
the fewest errors in each list) and with re-ranking, and the 95 % bootstrap interval of the change
(1,000 resamplings of the utterances).
Standard output has one JSON line for each RUN and scores file, with rates as fractions; a table in
percent goes to stderr. --out DIR writes to DIR/1, DIR/2, ... for each RUN or scores file:
  plls.tsv             pll<TAB>tokens<TAB>text of every hypothesis (of a RUN), for --scores
  dev.json, test.json  the lists with their new scores, the best hypothesis first

examples:
  metaseq-lm rerank --dev dev.json --test test.json runs/mlm runs/electric --out reranked
  metaseq-lm rerank --dev dev.json --test test.json --scores reranked/1/plls.tsv --lambdas 0:2:0.01
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metaseq_lm.cli.score import ScoringOptions
from metaseq_lm.core.documents import show_result
from metaseq_lm.core.errors import MetaseqError, UsageError, say
from metaseq_lm.core.files import check_folder, to_json
from metaseq_lm.core.options import add_options, option, read_options
from metaseq_lm.core.output import escape_formula, is_quiet, show

if TYPE_CHECKING:
    from metaseq_lm.evaluation.nbest import NBest

PROGRESS = True
HELP = "re-rank n-best lists by pseudo-log-likelihood; word error rates"
OVERRIDES = True
WORDS = True
_MAX_LAMBDAS = 10_000
_PLLS_FILE = "plls.tsv"


@dataclass(frozen=True)
class _RerankOptions(ScoringOptions):
    """The options of `rerank`."""

    runs: tuple[str, ...] = option(
        (),
        "checkpoints or run folders to compare",
        positional=True,
        nargs="*",
        metavar="RUN",
    )
    dev: str = option("", "n-best lists on which lambda is chosen", required=True, metavar="F")
    test: str = option("", "n-best lists to re-rank with that lambda", required=True, metavar="F")
    scores: tuple[str, ...] = option(
        (),
        f"file of pseudo-log-likelihoods ({_PLLS_FILE} or the output of 'score'), used like a RUN; "
        "may be repeated",
        repeated=True,
        metavar="F",
    )
    lambdas: str = option(
        "0.05:1.0:0.05",
        "grid of lambdas, both ends included, or A,B,...",
        metavar="A:B:STEP",
    )
    append_period: bool = option(False, "append '.' to each hypothesis before scoring it")
    out: str | None = option(
        None, "folder for lists and scores (default: print only)", metavar="DIR"
    )
    too_long: str = option(
        "fail",
        "hypotheses longer than the run's rows: fail, or score their first tokens only",
        choices=("fail", "cut"),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_options(parser, _RerankOptions)


@dataclass(frozen=True)
class NBestSet:
    """The n-best lists of one set, their file, and the string appended to each text."""

    path: Path
    lists: "list[NBest]"
    append: str

    @property
    def texts(self) -> dict[str, str]:
        """Every text to score, with the position of an utterance that contains it."""
        texts: dict[str, str] = {}
        for nbest in self.lists:
            place = f"{self.path}: utterance {nbest.utterance!r}"
            texts |= dict.fromkeys((text + self.append for text in nbest.texts), place)
        return texts


def run(args: argparse.Namespace) -> int:
    """Re-rank with every run and scores file; print a JSON line for each and a table."""
    from metaseq_lm import plugins
    from metaseq_lm.core.loading import split_overrides
    from metaseq_lm.evaluation.nbest import read_nbest

    options = read_options(_RerankOptions, vars(args))
    runs, overrides = split_overrides([*options.runs, *args.overrides])
    sources = [(path, False) for path in runs] + [(path, True) for path in options.scores]
    if not sources:
        raise UsageError("give a RUN, or --scores FILE with saved pseudo-log-likelihoods")
    grid = parse_grid(options.lambdas)
    append = "." if options.append_period else ""
    sets = {
        name: NBestSet(Path(path), read_nbest(Path(path)), append)
        for name, path in (("dev", options.dev), ("test", options.test))
    }
    plugins.load_all(options.user_dir)
    plugins.check_runs(runs, options.user_dir, overrides)
    rows = []
    for number, (source, saved) in enumerate(sources, 1):
        folder = Path(options.out) / str(number) if options.out else None
        if folder is not None:
            check_folder(folder)
        if saved:
            plls = _read_saved(source, sets)
        else:
            plls = _score_run(options, source, overrides, sets, folder)
        rows.append({"source": source, **rerank(sets, plls, grid, folder)})
        show(to_json(rows[-1]))
    say(table(rows).rstrip("\n"))
    show_result("rerank", {"models": rows})
    return 0


def parse_grid(text: str) -> list[float]:
    """Return the values of "A:B:STEP" (both ends included) or "A,B,...", ascending."""
    try:
        if ":" in text:
            start, stop, step = map(float, text.split(":"))
            steps = math.floor((stop - start) / step + 1e-6)
            if not 0 <= steps < _MAX_LAMBDAS or step <= 0:
                raise ValueError
            # Repeated addition would accumulate rounding errors.
            grid = [round(start + number * step, 10) for number in range(steps + 1)]
        else:
            grid = sorted(set(map(float, text.split(","))))
        if not all(map(math.isfinite, grid)):
            raise ValueError
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise UsageError(
            f"--lambdas {text!r}: expected A:B:STEP, such as 0.05:1.0:0.05, or A,B,..."
        ) from error
    return grid


def _score_run(
    options: _RerankOptions,
    source: str,
    overrides: Sequence[str],
    sets: dict[str, NBestSet],
    folder: Path | None,
) -> dict[str, float]:
    """Return the PLL of every distinct text under one run; also write them to `folder`."""
    from metaseq_lm.core.files import write_atomic
    from metaseq_lm.data.labelled.files import SourceSentence
    from metaseq_lm.evaluation.nbest import score_lines
    from metaseq_lm.training.restore import open_scored
    from metaseq_lm.training.scoring import SentenceScorer

    opened = open_scored(source, options.data, options.user_dir, overrides)
    scorer = SentenceScorer(opened, options.batch_tokens, options.too_long, options.pll)
    texts = sets["dev"].texts | sets["test"].texts
    sentences = [SourceSentence(text, utterance) for text, utterance in texts.items()]
    scores = {text: score for text, score in zip(texts, scorer.score(sentences)) if score}
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        rows = ((score.pll, len(score.tokens), text) for text, score in scores.items())
        write_atomic(folder / _PLLS_FILE, score_lines(rows))
    if not is_quiet():
        say(f"{source}: {scorer.cost}")
    return {text: score.pll for text, score in scores.items()}


def _read_saved(source: str, sets: dict[str, NBestSet]) -> dict[str, float]:
    """Return saved PLLs; MetaseqError if a text has none."""
    from metaseq_lm.evaluation.nbest import read_plls

    stored, plls = read_plls(Path(source)), {}
    for part in sets.values():
        for text in part.texts:
            if escape_formula(text) not in stored:
                raise MetaseqError(
                    f"{source}: has no score of {text[:80]!r} in {part.path}; score these lists "
                    "with the same --append-period"
                )
            plls[text] = stored[escape_formula(text)]
    return plls


def rerank(
    sets: dict[str, NBestSet], plls: dict[str, float], grid: Sequence[float], folder: Path | None
) -> dict[str, Any]:
    """Choose lambda on the dev set; return it and the rates of all sets, and write the lists.

    `plls` maps each text, including its appended string, to its pseudo-log-likelihood.
    """
    import numpy as np

    from metaseq_lm.core.files import write_atomic
    from metaseq_lm.evaluation.nbest import choose_weight, combine_scores, split_rates, write_nbest

    scores_by_set: dict[str, list[Any]] = {name: [] for name in sets}
    for name, part in sets.items():
        for nbest in part.lists:
            scores_by_set[name].append(np.array([plls[text + part.append] for text in nbest.texts]))
    weight = choose_weight(sets["dev"].lists, scores_by_set["dev"], grid)
    results: dict[str, Any] = {"lambda": weight}
    for name, part in sets.items():
        results[name] = split_rates(part.lists, scores_by_set[name], weight)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            scores = combine_scores(part.lists, scores_by_set[name], weight)
            write_atomic(folder / f"{name}.json", write_nbest(part.lists, scores))
    return results


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of rates in per cent: without re-ranking, for each row, and the oracle."""
    from metaseq_lm.reporting.formats import WRITERS
    from metaseq_lm.reporting.table import Cell, Table

    def percent(value: float) -> Cell:
        return Cell(f"{100 * value:.2f}")

    def fixed_row(name: str, key: str) -> list[Cell]:
        dev, test = (percent(rows[0][split][key]) for split in ("dev", "test"))
        return [Cell(name, number=False), Cell(""), dev, Cell(""), test, Cell("")]

    lines = [fixed_row("no re-ranking", "one_best_wer")]
    for row in rows:
        line = [Cell(row["source"], number=False), Cell(f"{row['lambda']:g}")]
        for name in ("dev", "test"):
            low, high = row[name]["interval"]
            line += [percent(row[name]["wer"]), Cell(f"[{100 * low:+.2f}, {100 * high:+.2f}]")]
        lines.append(line)
    lines.append(fixed_row("oracle", "oracle_wer"))
    head = ["model", "lambda", "dev", "95 % of change", "test", "95 % of change"]
    return WRITERS["text"][1](Table("Word error rates in percent", head, lines, []))
