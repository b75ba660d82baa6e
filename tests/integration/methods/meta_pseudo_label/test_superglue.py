"""Fine-tuning on SuperGLUE as text: windows, scores by naive definitions, the small
validation set.
"""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from meta_pseudo_bench import Bench
from sklearn.metrics import f1_score
from superglue_data import MAKERS

from metaseq_lm.core.batch import Layout
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.labelled.token_labels import TokenLabelBatch
from metaseq_lm.data.streams import Shard
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.engine.engine import Logs
from metaseq_lm.evaluation.squad import exact_match, token_f1
from metaseq_lm.methods.meta_pseudo_label.finetune import _best_runs
from metaseq_lm.training.run import TrainingRun

LONG = "task.tokens_per_sample=20"


@pytest.fixture(scope="module")
def data(superglue: Path) -> Path:
    return superglue


def bench_of(data: Path, task: str, *more: str) -> Bench:
    number = MAKERS[task][1]
    options = [f"task.labelled={task}", f"task.task_token={number}", "task.stride=5", LONG]
    return Bench(data, "finetune", *options, "task.valid_size=0", *more)


def scored(bench: Bench, split: str, micro_batch_size: int = 0) -> tuple[Logs, list[dict]]:
    """Return metrics and predictions of a split."""
    bench.model.eval()

    shard = Shard(0, 1, micro_batch_size)
    streams = bench.task.build_streams(split)
    passes = {name: stream.one_epoch(shard) for name, stream in streams.items()}
    metrics, rows = bench.task.evaluate(bench.engine, bench.model, passes)
    return metrics, list(rows())


@torch.no_grad()
def window_logits(bench: Bench, split: str) -> dict[int, list[torch.Tensor]]:
    """Return the logits (S, V) of each window of each sample, each computed alone."""
    rows = bench.task.labelled(split)
    found: dict[int, list[torch.Tensor]] = {}
    for window, sample in enumerate(rows.sample.tolist()):
        tokens, _, _ = rows.rows(np.array([window]))
        found.setdefault(sample, []).append(bench.model.eval()(torch.from_numpy(tokens))[0])
    return found


@pytest.mark.parametrize("task", ["MultiRC", "CB"])
def test_classes(data: Path, task: str) -> None:
    """Mean over windows of the mean raw logit, then the benchmark's metrics, written out."""
    bench = bench_of(data, task, "seed=3")
    metrics, rows = scored(bench, "valid")
    labels, tokens = bench.task.labelled("valid").labels, bench.task.labelled("valid").class_tokens
    predicted, several = [], 0
    for sample, windows in window_logits(bench, "valid").items():
        longest = max(len(w) for w in windows)
        several += len(windows) > 1
        means = [
            sum((w[:, token].sum() / longest).item() for w in windows) / len(windows)
            for token in tokens
        ]
        predicted.append(int(np.argmax(means)))
        assert rows[sample]["scores"] == pytest.approx(means, rel=1e-9, abs=1e-12)
    assert several > 5
    facts = bench.task.labelled("valid").data.rows
    if task == "CB":
        wanted = {
            "f1": f1_score(labels, predicted, average="macro", labels=[0, 1, 2], zero_division=0),
            "accuracy": float(np.mean(labels == np.array(predicted))),
        }
    else:
        questions: dict = {}
        for fact, gold, guess in zip(facts, labels, predicted):
            key = fact["passage"], fact["question"]
            questions[key] = questions.get(key, True) and gold == guess
        wanted = {
            "f1a": f1_score(labels, predicted, zero_division=0),
            "em": float(np.mean(list(questions.values()))),
        }
    for name, value in wanted.items():
        assert metrics[name] == pytest.approx(value)
    assert metrics["score"] == metrics["mean"] == pytest.approx(sum(wanted.values()) / 2)
    names = bench.task.labelled("valid").data.label_names
    assert [row["predicted"] for row in rows] == [names[p] for p in predicted]
    assert metrics["labels"] == metrics["loss"] > 0


def naive_answer(windows: list[torch.Tensor], sep: int) -> list[int]:
    """Return the tokens of the run of tokens other than [SEP] that holds the greatest
    probability.
    """
    best: tuple[float, list[int]] = (-np.inf, [])
    for logits in windows:
        log_p, ids = logits.log_softmax(-1).max(-1)
        runs: list[list[int]] = [[]]
        for at, token in enumerate(ids.tolist()):
            if token == sep:
                runs.append([])
            else:
                runs[-1].append(at)
        for run in filter(None, runs):
            top = max(log_p[at].item() for at in run)
            if top > best[0]:
                best = top, [int(ids[at]) for at in run]
    return best[1]


@pytest.mark.parametrize("trained", [0, 30])
def test_answers(data: Path, trained: int) -> None:
    """F1 and EM of the decoded run; before training and after some of it."""
    bench = bench_of(data, "ReCoRD", "seed=3", "optimizer.lr=0.3", "schedule.warmup_updates=3")
    for update in range(trained):
        bench.engine.begin(update)
        bench.model.train()
        batches = bench.task.build_streams("train")["train"].micro_batches(update, Shard())
        bench.task.update(bench.engine, bench.model, {"train": [bench.engine.to_device(batches)]})
    metrics, rows = scored(bench, "valid")
    data_set, tokenizer = bench.task.labelled("valid").data, load_tokenizer(data)
    f1s, ems = [], []
    for sample, windows in window_logits(bench, "valid").items():
        text = tokenizer.decode(naive_answer(windows, 2)).strip()
        gold = data_set.rows[sample]["answers"]
        assert rows[sample]["predicted"] == text and rows[sample]["gold"] == gold
        f1s.append(max(token_f1(answer, text) for answer in gold))
        ems.append(max(exact_match(answer, text) for answer in gold))
    assert metrics["f1"] == pytest.approx(np.mean(f1s)) and metrics["em"] == np.mean(ems)
    assert metrics["score"] == pytest.approx((np.mean(f1s) + np.mean(ems)) / 2)


def test_runs() -> None:
    """[SEP] everywhere: no answer. Else the run around the surest position, padding left out."""
    logits = torch.zeros(3, 6, 9, dtype=torch.float64)
    logits[..., 2] = 5.0
    logits[1, [1, 2, 4], [7, 8, 3]] = torch.tensor([6.0, 7.0, 9.0], dtype=torch.float64)
    logits[2, [1, 2, 4], [7, 8, 3]] = torch.tensor([6.0, 7.0, 9.0], dtype=torch.float64)
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[2, 3:] = True
    batch = TokenLabelBatch(
        tokens=torch.zeros(logits.shape[:2]),
        layout=Layout(padding),
        classes=torch.zeros(len(logits)),
        class_tokens=torch.tensor([2, 5]),
        token_level=True,
        longest=torch.zeros(len(logits)),
        windows=torch.zeros(len(logits)),
    )
    found = _best_runs(logits, batch)
    assert [tokens for _, tokens in found] == [[], [3], [7, 8]]
    assert found[0][0] == -np.inf
    assert found[2][0] == pytest.approx(logits[2, 2].log_softmax(-1)[8].item())


@pytest.mark.parametrize("task", MAKERS)
def test_the_batch_changes_nothing(data: Path, task: str) -> None:
    """Neither micro-batches nor how wide a row happens to be padded."""
    bench = bench_of(data, task)
    metrics, rows = scored(bench, "valid")
    others, again = scored(bench, "valid", 3)
    assert others == pytest.approx(metrics, rel=1e-9)
    for one, other in zip(rows, sorted(again, key=lambda row: row["index"])):
        assert one["predicted"] == other["predicted"]
        assert one.get("scores", [0]) == pytest.approx(other.get("scores", [0]), rel=1e-9)


def test_the_small_validation_set(data: Path) -> None:
    """ "mini" is a part of "valid" with all windows of its rows; "valid" is whole beside it."""
    more = ["trainer.valid_split=mini", "task.valid_size=10"]
    bench = bench_of(data, "CB", *more)
    order = list(range(30))
    random.Random(42).shuffle(order)
    rows = bench.task.labelled("valid")
    assert bench.task.labelled("mini") is rows
    predicted = [{"index": i, "scores": [0.2, 0.5, 0.3]} for i in range(3)]
    assert list(bench.task.submissions("test", predicted)) == ["CB.jsonl"]
    assert not bench.task.submissions("mini", predicted)  # not under the name of the test file
    for split, chosen in (("mini", order[:10]), ("valid", order)):
        (stream,) = bench.task.build_streams(split).values()
        windows = [w for b in stream.one_epoch(Shard()) for m in b for w in m.windows.tolist()]
        assert sorted(windows) == sorted(rows.windows_of(np.array(chosen)).tolist())


def test_training_draws_one_window(data: Path) -> None:
    """A row per sample, another window in another epoch; parts of a batch are rows of the whole."""
    bench = bench_of(data, "CB", "task.batch_size=30")
    stream = bench.task.build_streams("train")["train"]
    rows = bench.task.labelled("train")
    seen: dict[int, set[int]] = {}
    for update in range(150):
        (batch,) = stream.micro_batches(update, Shard())
        assert sorted(batch.samples.tolist()) == list(range(30))
        for sample, window in zip(batch.samples.tolist(), batch.windows.tolist()):
            assert rows.sample[window] == sample
            seen.setdefault(sample, set()).add(window)
    parts = stream.micro_batches(update, Shard(0, 1, 7))
    whole = torch.cat([part.tokens for part in parts])
    assert torch.equal(whole, batch.tokens)
    counts = rows.first[1:] - rows.first[:-1]
    assert [len(seen[i]) for i in range(30)] == counts.tolist() and counts.max() > 2


def test_a_whole_run(data: Path, tmp_path: Path) -> None:
    """Best by the small set's score; the final metrics are those of the whole validation set."""
    more = ["trainer.valid_split=mini", "trainer.final_splits=[valid,test]", "task.epochs=2"]
    more += ["task.valid_size=10", "trainer.best_checkpoint_metric=score", "engine.precision=fp32"]
    bench = bench_of(data, "CB", *more, f"save_dir={tmp_path}", "engine.tensorboard=false")
    TrainingRun(bench.config).train()
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["updates"] == 16, "two epochs of 30 rows by 4"
    assert {"score", "f1", "accuracy"} <= results["metrics"]["valid"].keys()
    assert results["metrics"]["test"] == {}
    rows = (tmp_path / "predictions.valid.jsonl").read_text().splitlines()
    assert len(rows) == 30
    right = [json.loads(row)["gold"] == json.loads(row)["predicted"] for row in rows]
    assert results["metrics"]["valid"]["accuracy"] == pytest.approx(np.mean(right))
    answers = [json.loads(line) for line in (tmp_path / "CB.jsonl").read_text().splitlines()]
    assert [a["idx"] for a in answers] == list(range(30))


def test_file_of_answers(data: Path) -> None:
    """What the leaderboard takes for ReCoRD, and nothing for a validation split."""
    bench = bench_of(data, "ReCoRD")
    _, rows = scored(bench, "test")
    files = bench.task.submissions("test", rows)
    assert list(files) == ["ReCoRD.jsonl"]
    lines = [json.loads(line) for line in files["ReCoRD.jsonl"].splitlines()]
    assert lines == [{"idx": i, "label": rows[i]["predicted"]} for i in range(20)]
    assert bench.task.submissions("valid", rows) == {}


# ------------------------------------------------------------------------ pre-training


def test_labelled_windows_of_an_update(data: Path) -> None:
    """Support and query rows are windows of their set, targets those of the common format."""
    options = [
        "task.labelled=[MultiRC,CB,ReCoRD]",
        LONG,
        "task.stride=5",
        "task.samples_per_task=1",
    ]
    bench = Bench(data, "soft", *options, "task.include_mlm_task=false")
    sets = bench.task.build_streams("train")["support"].collate.func.sets
    known = []
    for data_set in sets:
        tokens, lengths, targets = data_set.rows(np.arange(len(data_set.sample)))
        known.append(
            {
                (tuple(t[:n]), tuple(y[:n]))
                for t, n, y in zip(tokens.tolist(), lengths, targets.tolist())
            }
        )
    seen: set[int] = set()
    for update in range(30):
        for name in ("support", "query"):
            (batch,) = bench.batches(update)[name][0]
            for c, b in np.ndindex(4, 4):
                length = int((batch.tokens[c, b] != 0).sum())
                row = tuple(batch.tokens[c, b, :length].tolist())
                targets = [-1] * length
                for p, t in zip(batch.positions[c, b].tolist(), batch.targets[c, b].tolist()):
                    if t >= 0:
                        targets[p] = t
                number = row[0] - 5
                seen.add(number)
                assert (row, tuple(targets)) in known[number]
    assert seen == {0, 1, 2}


def test_sets_keep_their_task_tokens(data: Path) -> None:
    """[CLS2], [CLS3] in the order of the list, or the numbers that they have beside other sets."""
    found = {}
    for numbers in ("[]", "[5,3]"):
        options = ["task.labelled=[MultiRC,CB]", LONG, f"task.task_tokens={numbers}"]
        bench = Bench(data, "hard", *options, "task.stride=5")
        sets = bench.task.build_streams("train")["support"].collate.func.sets
        ids = [[int(s.rows(np.arange(1))[0][0, 0]), int(s.class_tokens[1])] for s in sets]
        found[numbers] = ids
    cls = bench.task.vocabulary.cls
    assert found["[]"] == [[cls(2), cls(2)], [cls(3), cls(3)]]
    assert found["[5,3]"] == [[cls(5), cls(5)], [cls(3), cls(3)]]


@pytest.mark.parametrize(
    "option, words",
    [
        ("task_tokens=[2,3]", "task_tokens has 2 entries for 1 labelled sets"),
        ("task_tokens=[1]", "its own number"),
        ("task_tokens=[30]", "30 task tokens, \\[CLS30\\]"),
    ],
)
def test_wrong_tokens(option: str, words: str, data: Path) -> None:
    bench = Bench(data, "soft", "task.labelled=[CB]", LONG, f"task.{option}")
    with pytest.raises(MetaseqError, match=words):
        bench.task.build_streams("train")


def test_two_sets_with_one_task_token(data: Path) -> None:
    sets = ["task.labelled=[CB,ReCoRD]", "task.task_tokens=[3,3]"]
    bench = Bench(data, "soft", *sets, LONG, "task.stride=5")
    with pytest.raises(MetaseqError, match="its own number"):
        bench.task.build_streams("train")
