"""Score minimal pairs and re-rank n-best lists with runs; archive the runs and the results.

    scores.py RUN_OR_FOLDER ... --pairs FILE ... --dev LISTS --test LISTS --out scores.jsonl
    metaseq-lm report scores.jsonl --metric pairs.accuracy --baseline schedule.total_updates=1

pairs.accuracy, pairs.FILE.accuracy: share of the pairs whose good sentence has the larger
  pseudo-log-likelihood, a tie counted as 1/2, overall and by file; pairs longer than a run's rows
  are left out
lists.wer, lists.one_best_wer, lists.oracle_wer: word error rates of the test lists, re-ranked with
the lambda
  of the dev lists, before it, and at best; of hypotheses longer than a run's rows the first tokens
  are scored
pairs.passes, lists.passes: how often each token of a sentence went through an encoder, with padding
pairs.sentences_per_second, lists.sentences_per_second: of one thread
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from metaseq_lm import plugins
from metaseq_lm.cli.rerank import NBestSet, parse_grid, rerank
from metaseq_lm.core.errors import run_script
from metaseq_lm.data.labelled.files import SourceSentence
from metaseq_lm.evaluation.minimal_pairs import MinimalPair, read_pairs
from metaseq_lm.evaluation.nbest import read_nbest
from metaseq_lm.evaluation.suites import OVERALL, build_suite
from metaseq_lm.reporting import archive
from metaseq_lm.reporting.folders import find_runs
from metaseq_lm.training.parts import Parts
from metaseq_lm.training.restore import open_scored
from metaseq_lm.training.scoring import SentenceScorer

LAMBDAS = parse_grid("0.05:1.0:0.05")


def costs(scorer: SentenceScorer) -> dict[str, float]:
    """Return what a scorer has cost so far, by token and by second."""
    cost = scorer.cost
    return {
        "passes": cost.forward_tokens / cost.row_tokens,
        "sentences_per_second": cost.sentences / cost.seconds,
    }


def score_pairs(run: Parts, pairs: list[MinimalPair]) -> dict[str, Any]:
    """Return accuracy and number of the pairs, overall and by file, and the costs."""
    scorer = SentenceScorer(run, too_long="skip")
    results = build_suite("pairs").score(pairs, scorer)
    by_file = {name: {**group.metrics, "pairs": group.n} for name, group in results.items()}
    return {**by_file.pop(OVERALL), **by_file, **costs(scorer)}


def score_lists(run: Parts, sets: dict[str, NBestSet]) -> dict[str, Any]:
    """Return lambda and the word error rates of the test lists, and the costs."""
    scorer = SentenceScorer(run, too_long="cut")
    texts = list(sets["dev"].texts | sets["test"].texts)
    scores = scorer.score([SourceSentence(text, "a hypothesis") for text in texts])
    plls = {text: score.pll for text, score in zip(texts, scores) if score}
    result = rerank(sets, plls, LAMBDAS, None)
    return {"lambda": result["lambda"], **result["test"], **costs(scorer)}


def main() -> None:
    """Score with each run, and write the archive after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN_OR_FOLDER")
    add("--pairs", nargs="+", required=True, type=Path, metavar="FILE", help="files of pairs")
    add("--first", type=int, metavar="N", help="pairs of each file (default: all)")
    add("--dev", required=True, type=Path, metavar="LISTS", help="lists that choose lambda")
    add("--test", required=True, type=Path, metavar="LISTS", help="lists to re-rank")
    add("--out", required=True, type=Path, metavar="FILE", help="archive to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    plugins.load_all()
    pairs = [pair for path in args.pairs for pair in read_pairs(str(path))[0][: args.first]]
    sets = {
        name: NBestSet(path, read_nbest(path), ".")
        for name, path in vars(args).items()
        if name in ("dev", "test")
    }
    scored = []
    for run in find_runs(args.runs):
        if run.why_unended():
            print(f"left out: {run.name}, {run.why_unended()}")
            continue
        parts = open_scored(str(run.path), overrides=["engine.device=cpu", "engine.threads=1"])
        scores = {"pairs": score_pairs(parts, pairs), "lists": score_lists(parts, sets)}
        metrics = {**run.results["metrics"], **scores}
        scored.append(replace(run, results={**run.results, "metrics": metrics}))
        archive.write(args.out, scored)
        print(
            f"{run.name}: {scores['pairs']['accuracy']:.4f} of {scores['pairs']['pairs']:,} pairs, "
            f"lists {scores['lists']['wer']:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    run_script(main)
