"""Processor time of scoring a run with a suite: `python speed.py RUN SUITE FOLDER [option=value]`.

Prints the items, the sentences, how many tokens went through the encoder for each, and the seconds
of processor time in this process without reading the run, by both rules of pseudo-log-likelihoods.
"""

import sys
import time
from pathlib import Path

from metaseq_lm import plugins
from metaseq_lm.evaluation.suites import build_suite
from metaseq_lm.training.restore import open_scored
from metaseq_lm.training.scoring import PLL_RULES, SentenceScorer


def main() -> None:
    """Score and print a line for each rule."""
    run, name, folder, *options = sys.argv[1:]
    plugins.load_all(None)
    suite, parts = build_suite(name, options), open_scored(run)
    for pll in PLL_RULES:
        scorer = SentenceScorer(parts, too_long="skip", pll=pll)
        started = time.process_time()
        items = suite.read(Path(folder))
        suite.score(items, scorer)
        cost, seconds = scorer.cost, time.process_time() - started
        print(
            f"{Path(run).name} {name} {pll}: {len(items)} items, {cost.sentences} sentences"
            f", {cost.forward_tokens / cost.row_tokens:.1f} passes of each token, {seconds:.1f} s"
        )


if __name__ == "__main__":
    main()
