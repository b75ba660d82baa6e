"""The example plug-in trains, and its masks are what it says."""

from pathlib import Path

import numpy as np
from battery import TINY

from metaseq_lm.cli import main
from metaseq_lm.randomness import key, row_keys

ROOT = Path(__file__).resolve().parent.parent


def test_the_example_learns(moons: Path, tmp_path: Path) -> None:
    choice = ["--user-dir", str(ROOT / "user_dir"), "--task", "span_masking"]
    options = ["--criterion", "span_weighted_lm", "--save-dir", str(tmp_path), *TINY]
    more = ["task.sample_break_mode=eos", "task.tokens_per_sample=34", "criterion.power=0.5"]
    steps = ["--max-update", "150", "--lr", "0.03", "--warmup-updates", "20"]
    assert main(["train", str(moons), *choice, *options, *more, *steps]) == 0
    import json

    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = [line["span"] for line in log if line["kind"] == "train"]
    assert losses[0] > 8 and np.mean(losses[-10:]) < 0.9 * losses[0]


def test_spans_have_their_rate_and_length() -> None:
    from user_dir.task import spans

    candidates = np.ones((4000, 100), bool)
    hidden, length = spans(candidates, 0.15, 3.0, row_keys(key("spans"), np.arange(4000)))
    # Spans that overlap or leave the row hide a little less than asked for.
    assert 0.12 < hidden.mean() < 0.15
    assert (length[hidden] >= 1).all() and not length[~hidden].any()
    runs = np.diff(np.pad(hidden, ((0, 0), (1, 1))).astype(int), axis=1)
    assert 2.5 < hidden.sum() / (runs == 1).sum() < 3.7
