"""Scores of exported models by metaseq-lm, lm-eval and minicons, on the same sentences.

    python examples/suites/against_others.py --causal runs/causal --masked runs/mlm \
        --blimp blimp --first 100

Needs `pip install lm_eval minicons`. Both runs are exported; lm-eval scores the causal one on tasks
made of the local files, as its own tasks of BLiMP but for the path, and minicons the masked one by
both rules of pseudo-log-likelihoods. A line of the output says by how much the scores of sentences
differ at most, in nats, and what the accuracies are: of metaseq-lm the one in which a tie counts
1/2 and the strict one, and of lm-eval its own, in which it counts as right.
"""

import argparse
import json
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np

from metaseq_lm import plugins
from metaseq_lm.cli import main as metaseq_lm
from metaseq_lm.data.labelled.files import Sentence
from metaseq_lm.evaluation.minimal_pairs import MinimalPair, pair_metrics
from metaseq_lm.evaluation.suites import build_suite
from metaseq_lm.runs.manifests import resolve
from metaseq_lm.training.restore import open_scored
from metaseq_lm.training.scoring import PLL_RULES, SentenceScorer


def pairs_of(folder: Path, first: int) -> list[MinimalPair]:
    """Return the first pairs of each file of BLiMP."""
    pairs: list[MinimalPair] = build_suite("pairs", [f"first={first}"]).read(folder)
    return pairs


def package_scores(checkpoint: Path, pairs: list[MinimalPair], pll: str) -> np.ndarray:
    """Return metaseq-lm's scores of the sentences of pairs, (pairs, 2)."""
    scorer = SentenceScorer(open_scored(str(checkpoint)), pll=pll)
    sentences = [text for pair in pairs for text in (pair.good, pair.bad)]
    return np.array([score.pll for score in scorer.score(sentences)]).reshape(-1, 2)


def lm_eval_scores(
    model: Path, pairs: list[MinimalPair], tasks: Path
) -> tuple[np.ndarray, dict[str, float]]:
    """Return lm-eval's scores of the sentences of pairs, (pairs, 2), and its accuracy by file."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    by_file: dict[str, list[MinimalPair]] = {}
    for pair in pairs:
        by_file.setdefault(pair.groups[-1], []).append(pair)
    for name, members in by_file.items():
        rows = [{"sentence_good": p.good.text, "sentence_bad": p.bad.text} for p in members]
        data = tasks / f"{name}.jsonl"
        data.write_text("\n".join(map(json.dumps, rows)) + "\n")
        task = {
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"train": str(data)}},
            "output_type": "multiple_choice",
            "validation_split": "train",
            "doc_to_text": "",
            "doc_to_target": 0,
            "doc_to_choice": "{{[sentence_good, sentence_bad]}}",
            "num_fewshot": 0,
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
        (tasks / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    results = simple_evaluate(
        HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=32),
        tasks=[f"local_{name}" for name in by_file],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    scores = []
    for name in by_file:
        samples = sorted(results["samples"][f"local_{name}"], key=lambda sample: sample["doc_id"])
        scores += [[answer[0][0] for answer in sample["resps"]] for sample in samples]
    accuracies = {name: results["results"][f"local_{name}"]["acc,none"] for name in by_file}
    return np.array(scores, float), accuracies


def minicons_scores(model: Path, sentences: list[Sentence], pll: str) -> np.ndarray:
    """Return minicons' scores of the sentences of pairs, (pairs, 2)."""
    from minicons.scorer import MaskedLMScorer

    scorer = MaskedLMScorer(str(model), "cpu")
    # minicons 0.3.39 calls a method that transformers 5 has no longer.
    scorer.tokenizer.batch_encode_plus = scorer.tokenizer.__call__
    scores = []
    for start in range(0, len(sentences), 16):
        texts = [sentence.text for sentence in sentences[start : start + 16]]
        scores += scorer.sequence_score(
            texts, reduction=lambda values: values.sum(0).item(), PLL_metric=pll
        )
    return np.array(scores).reshape(-1, 2)


def compare(title: str, ours: np.ndarray, others: np.ndarray) -> None:
    """Print how scores (pairs, 2) of metaseq-lm and of another program differ."""
    margins = [scores[:, 0] - scores[:, 1] for scores in (ours, others)]
    metrics_of = [pair_metrics(margin) for margin in margins]
    turned = int((np.sign(margins[0]) != np.sign(margins[1])).sum())
    print(f"{title}: {ours.size} sentences, the scores differ by at most", end=" ")
    print(
        f"{np.abs(ours - others).max():.1e} nats; {turned} of {len(ours)} pairs are decided apart"
    )
    for name, metrics in zip(("metaseq-lm", "the other"), metrics_of):
        ties = f"{metrics['ties']:.0f} ties"
        values = [f"{name} {metrics[name]:.4f}" for name in ("accuracy", "strict_accuracy")]
        print(f"  {name:10}  {', '.join(values)}, {ties}")


def main() -> None:
    """Export, score and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--causal", type=Path, required=True, help="run of a causal LM")
    parser.add_argument("--masked", type=Path, required=True, help="run of a masked LM")
    parser.add_argument("--blimp", type=Path, required=True, help="folder with files of BLiMP")
    parser.add_argument("--first", type=int, default=100, help="pairs of each file")
    options = parser.parse_args()
    plugins.load_all(None)
    pairs = pairs_of(options.blimp, options.first)
    sentences = [text for pair in pairs for text in (pair.good, pair.bad)]
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        for run in (options.causal, options.masked):
            with redirect_stdout(sys.stderr):
                metaseq_lm(["export", str(run), "--out", str(work / run.name)])
        checkpoint = resolve(str(options.causal), prefer="best")
        (work / "tasks").mkdir()
        scores, accuracies = lm_eval_scores(work / options.causal.name, pairs, work / "tasks")
        compare("causal, lm-eval", package_scores(checkpoint, pairs, PLL_RULES[0]), scores)
        macro = sum(accuracies.values()) / len(accuracies)
        print(f"  lm-eval's own accuracy, a tie as right: {macro:.4f}")
        checkpoint = resolve(str(options.masked), prefer="best")
        rules = [package_scores(checkpoint, pairs, pll) for pll in PLL_RULES]
        changed = np.abs(rules[0] - rules[1])
        print(
            f"masked, the two rules: {(changed > 0).mean():.1%} of the sentences have other scores,"
            f" by {changed.max():.2f} nats at most"
        )
        for pll, ours in zip(PLL_RULES, rules):
            other = minicons_scores(work / options.masked.name, sentences, pll)
            compare(f"masked, minicons, {pll}", ours, other)


if __name__ == "__main__":
    main()
