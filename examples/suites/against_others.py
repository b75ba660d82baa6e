"""Scores of exported models by metaseq-lm, lm-eval, minicons and the BabyLM pipeline.

    python examples/suites/against_others.py --causal runs/causal --masked runs/mlm \
        --masked-next runs/mntp --suite blimp=blimp --suite comps=items/comps --first 100 \
        --pipeline evaluation-pipeline-2025

Needs `pip install 'metaseq-lm[compare]'` and a clone of github.com/babylm/evaluation-pipeline-2025,
whose own code loads and scores the exported models. lm-eval scores the causal one, on tasks made
of the same files, and minicons the sentences of minimal pairs by the masked one, with both rules of
pseudo-log-likelihoods. A line of the output says by how much the scores of texts differ at most, in
nats, and how many items are decided apart, where the first of equal scores is taken; the line below
it what the accuracies are: of metaseq-lm the one in which a tie counts 1/2 and the strict one, and
of the other program its own, in which a tie counts as right (of minicons, which has none, strict).
"""

import argparse
import json
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from metaseq_lm import plugins
from metaseq_lm.cli import main as metaseq_lm
from metaseq_lm.evaluation.completions import Completion, first_is_best
from metaseq_lm.evaluation.minimal_pairs import MinimalPair
from metaseq_lm.evaluation.suites import build_suite
from metaseq_lm.training.restore import open_scored
from metaseq_lm.training.scoring import PLL_RULES, SentenceScorer

SUITES = ("blimp", "comps", "ewok", "entity_tracking")
BACKENDS = {"causal": "causal", "masked": "mlm", "masked_next": "mntp"}


@dataclass(frozen=True)
class File:
    """A file of a suite: of each item the completions, the right one first."""

    path: Path
    suite: str
    items: list[tuple[Completion, ...]]

    @property
    def completions(self) -> list[Completion]:
        """Those of all items."""
        return [completion for item in self.items for completion in item]


def first_items(folder: Path, target: Path, first: int) -> Path:
    """Write the first lines of each file of a folder into a new one; return that."""
    target.mkdir()
    for file in sorted(folder.glob("*.jsonl")):
        lines = file.read_text(encoding="utf-8").splitlines()[:first]
        (target / file.name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return target


def read_files(suite: str, folder: Path) -> list[File]:
    """Return the items of each file: of EWoK the targets in context 1, as the pipelines."""

    def choice(item: Any) -> tuple[Completion, ...]:
        if isinstance(item, MinimalPair):
            return Completion(item.good, 0), Completion(item.bad, 0)
        return tuple(item.completions[: 2 if suite == "ewok" else None])

    built = build_suite(suite)
    return [
        File(file, suite, [choice(item) for item in built.read(file)])
        for file in sorted(folder.glob("*.jsonl"))
    ]


def package_scores(run: Path, completions: list[Completion], pll: str) -> np.ndarray:
    """Return metaseq-lm's scores of completions."""
    scorer = SentenceScorer(open_scored(str(run)), pll=pll)
    sentences = [completion.sentence for completion in completions]
    scores = scorer.score_parts(sentences, [completion.parts for completion in completions])
    return np.concatenate(scores)


def lm_eval_task(file: File, folder: Path) -> str:
    """Write a task of lm-eval with the items of a file; return its name.

    Texts are joined without the space that lm-eval puts before every completion, even one without
    any context: to byte-level BPE " The" is another token than "The".
    """
    contexts_differ = file.suite == "comps"  # as in Winogrande
    rows = []
    for item in file.items:
        contexts = [completion.sentence.text[: completion.first] for completion in item]
        rest = [completion.sentence.text[completion.first :] for completion in item]
        row: dict[str, Any] = {"answer": 0, "text": contexts[0], "choices": rest}
        rows.append(row | {"text": rest[0], "choices": contexts} if contexts_differ else row)
    name = f"local_{file.suite}_{file.path.stem}"
    data = folder / f"{name}.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)) + "\n")
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"train": str(data)}, "cache_dir": str(folder / "cache")},
        "output_type": "multiple_choice",
        "validation_split": "train",
        "doc_to_text": "answer" if contexts_differ else "text",
        "doc_to_target": "text" if contexts_differ else "answer",
        "doc_to_choice": "choices",
        "target_delimiter": "",
        "num_fewshot": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return name


def lm_eval_scores(model: Path, files: list[File], folder: Path) -> tuple[np.ndarray, float]:
    """Return lm-eval's scores of the completions of files, and the mean of its accuracies."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    names = [lm_eval_task(file, folder) for file in files]
    results = simple_evaluate(
        HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=32),
        tasks=names,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    scores = []
    for name in names:
        samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
        scores += [answer[0][0] for sample in samples for answer in sample["resps"]]
    accuracies = [results["results"][name]["acc,none"] for name in names]
    return np.array(scores, float), float(np.mean(accuracies))


def pipeline_scores(
    model: Path, files: list[File], backend: str, batch_size: int = 32
) -> tuple[np.ndarray, float]:
    """Return the BabyLM pipeline's scores of the completions of files, and its accuracy."""
    from evaluation_pipeline.sentence_zero_shot import compute_results, run
    from evaluation_pipeline.sentence_zero_shot.dataset import get_dataloader

    options = argparse.Namespace(
        model_path_or_name=str(model),
        backend=backend,
        data_path=files[0].path.parent,
        task=files[0].suite,
        batch_size=batch_size,
        non_causal_batch_size=batch_size,
        revision_name=None,
        image_template=None,
        images_path=None,
        full_sentence_scores=False,
        save_predictions=False,
    )
    score_of: dict[tuple[str, str], float] = {}
    rank = compute_results.rank_and_evaluate

    def recorded(options: Any, stats: Any, log_probs: Any, texts: Any, *more: Any) -> None:
        for item, scores in zip(texts, np.stack(log_probs[1.0], axis=1).tolist()):
            completions = map(str.strip, item["completions"])
            score_of.update(zip(zip(item["sentences"], completions), scores))
        rank(options, stats, log_probs, texts, *more)

    compute_results.rank_and_evaluate = recorded
    try:
        results, _ = compute_results.compute_results(
            options, run.get_model(options), get_dataloader(options), [1.0]
        )
    finally:
        compute_results.rank_and_evaluate = rank
    accuracy = run.process_results(options, results)[1][1.0] / 100
    texts = [completion for file in files for completion in file.completions]
    keys = [(text.sentence.text, text.sentence.text[text.first :].strip()) for text in texts]
    return np.array([score_of[key] for key in keys]), accuracy


def minicons_scores(model: Path, completions: list[Completion], pll: str) -> np.ndarray:
    """Return minicons' scores of whole sentences."""
    from minicons.scorer import MaskedLMScorer

    scorer = MaskedLMScorer(str(model), "cpu")
    # minicons 0.3.39 calls a method that transformers 5 has no longer.
    scorer.tokenizer.batch_encode_plus = scorer.tokenizer.__call__
    scores: list[float] = []
    for start in range(0, len(completions), 16):
        texts = [completion.sentence.text for completion in completions[start : start + 16]]
        scores += scorer.sequence_score(
            texts, reduction=lambda values: values.sum(0).item(), PLL_metric=pll
        )
    return np.array(scores)


def split(files: list[File], scores: np.ndarray) -> list[list[np.ndarray]]:
    """Return the scores of the completions of each item of each file."""
    rest = iter(scores)
    return [[np.array([next(rest) for _ in item]) for item in file.items] for file in files]


def metrics_of(files: list[File], scores: np.ndarray) -> dict[str, float]:
    """Return the means over files of the metrics of items, ties as a share."""
    in_files = [[first_is_best(item) for item in items] for items in split(files, scores)]
    return {
        name: float(np.mean([np.mean([item[name] for item in items]) for items in in_files]))
        for name in in_files[0][0]
    }


def compare(
    title: str, files: list[File], ours: np.ndarray, others: np.ndarray, accuracy: float
) -> None:
    """Print how the scores of metaseq-lm and of another program, and its accuracy, differ."""
    first, second = (
        [int(item.argmax()) for items in split(files, scores) for item in items]
        for scores in (ours, others)
    )
    apart = sum(a != b for a, b in zip(first, second))
    print(
        f"{title}: {len(ours)} texts, the scores differ by at most "
        f"{np.abs(ours - others).max():.1e} nats; {apart} of {len(first)} items are decided apart"
    )
    metrics = metrics_of(files, ours)
    print(
        f"  metaseq-lm: accuracy {metrics['accuracy']:.4f}, strict {metrics['strict_accuracy']:.4f}"
        f", ties {metrics['ties']:.4f}; the other: {accuracy:.4f}"
    )


def compare_suite(options: argparse.Namespace, files: list[File], work: Path) -> None:
    """Print how the scores of each run differ from those of each program that has a rule for it."""
    suite = files[0].suite
    completions = [completion for file in files for completion in file.completions]
    for kind, backend in BACKENDS.items():
        run = getattr(options, kind)
        if run is None:
            continue
        model, name = work / kind, kind.replace("_", " ")
        ours = package_scores(run, completions, PLL_RULES[0])
        others, accuracy = pipeline_scores(model, files, backend)
        compare(f"{name}, BabyLM pipeline, {suite}", files, ours, others, accuracy)
        if kind == "causal":
            tasks = work / suite / "tasks"
            tasks.mkdir()
            compare(f"{name}, lm-eval, {suite}", files, ours, *lm_eval_scores(model, files, tasks))
        if kind == "masked" and suite == "blimp":
            for pll in PLL_RULES:
                ours = package_scores(run, completions, pll)
                others = minicons_scores(model, completions, pll)
                accuracy = metrics_of(files, others)["strict_accuracy"]
                compare(f"{name}, minicons, {suite}, {pll}", files, ours, others, accuracy)


def main() -> None:
    """Export, score and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--causal", type=Path, help="run of a causal LM")
    parser.add_argument("--masked", type=Path, help="run of a masked LM")
    parser.add_argument("--masked-next", type=Path, help="run of criterion masked_next_token")
    parser.add_argument(
        "--suite", action="append", required=True, help=f"NAME=FOLDER of {', '.join(SUITES)}"
    )
    parser.add_argument("--first", type=int, default=100, help="items of each file")
    parser.add_argument("--pipeline", type=Path, required=True, help="clone of the BabyLM pipeline")
    options = parser.parse_args()
    needed = ["transformers", *(["lm_eval"] * bool(options.causal))]
    needed += ["minicons"] * bool(options.masked)
    if missing := [name for name in needed if find_spec(name) is None]:
        parser.error(f"{', '.join(missing)} not installed: pip install 'metaseq-lm[compare]'")
    plugins.load_all(None)
    sys.path.insert(0, str(options.pipeline))
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        for kind in BACKENDS:
            if run := getattr(options, kind):
                with redirect_stdout(sys.stderr):
                    metaseq_lm(["export", str(run), "--out", str(work / kind)])
        for word in options.suite:
            suite, _, folder = word.partition("=")
            if suite not in SUITES:
                parser.error(f"--suite {word}: NAME=FOLDER, where NAME is of {', '.join(SUITES)}")
            items = first_items(Path(folder), work / suite, options.first)
            compare_suite(options, read_files(suite, items), work)


if __name__ == "__main__":
    main()
