"""Fine-tuning in the common labelled format: targets, mini-validation, class scores, order."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from meta_pseudo_bench import Bench

from metaseq_lm.core.batch import ALL_VISIBLE, Layout
from metaseq_lm.data.labelled.token_labels import TokenLabelBatch, TokenLabels
from metaseq_lm.data.streams import Shard
from metaseq_lm.methods.meta_pseudo_label.finetune import _class_scores

FULL = Shard(0, 1, 0)


def samples_of(bench: Bench, split: str) -> list[int]:
    """Return the rows of a split that one pass looks at."""
    (stream,) = bench.task.build_streams(split).values()
    batches = [micro for batch in stream.one_epoch(FULL) for micro in batch]
    return [int(s) for batch in batches for s in batch.samples]


def test_mini_validation(even: Path) -> None:
    """128 rows of 160: shuffled by Python's generator with seed 42, then cut."""
    bench = Bench(even, "finetune", "task.labelled=which_moon_160", "seed=5")
    wanted = list(range(160))
    random.Random(42).shuffle(wanted)
    assert samples_of(bench, "valid") == wanted[:128]
    assert samples_of(bench, "test") == list(range(160))
    small = Bench(even, "finetune", "task.labelled=which_moon_10")
    assert samples_of(small, "valid") == list(range(10))


@pytest.mark.parametrize("shuffle", [True, False])
def test_order_of_training(even: Path, shuffle: bool) -> None:
    bench = Bench(even, "finetune", "task.labelled=which_moon_10", f"task.shuffle={shuffle}")
    stream = bench.task.build_streams("train")["train"]
    epochs = [
        [int(s) for n in range(3) for s in stream.micro_batches(3 * e + n, FULL)[0].samples]
        for e in range(4)
    ]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    if shuffle:
        assert len({tuple(epoch) for epoch in epochs}) == 4
    else:
        assert all(epoch == list(range(10)) for epoch in epochs)


def test_format_of_a_point(even: Path) -> None:
    """`[CLS2] x y [SEP]`; class 0 is [SEP], class 1 is [CLS2], at every position."""
    bench = Bench(even, "finetune", "task.labelled=which_moon_160")
    data = bench.task.labelled("train")
    symbols = bench.task.vocabulary.symbols
    batch = data.batch(np.arange(160), np.zeros(160, np.uint64))
    assert batch.tokens.shape == (160, 4)
    assert [symbols[i] for i in (0, 1, 2, 3, 5)] == ["[PAD]", "[MASK]", "[SEP]", "[CLS0]", "[CLS2]"]
    assert (batch.tokens[:, 0] == 5).all() and (batch.tokens[:, 3] == 2).all()
    for row in range(160):
        first, second = (symbols[i] for i in batch.tokens[row, 1:3])
        assert first.isdigit() and second[0] == "Ġ" and second[1:].isdigit()
        assert batch.targets[row].tolist() == [5 if batch.classes[row] else 2] * 4
    assert set(batch.classes.tolist()) == {0, 1}
    assert batch.padding is None


def test_format_of_pairs(ragged: Path) -> None:
    """`[CLS4] A [SEP] B [SEP]` padded; classes are [SEP], [CLS4], [MASK]."""
    bench = Bench(ragged, "finetune", "task.labelled=pairs")
    vocabulary = bench.task.vocabulary
    data = TokenLabels(ragged / "pairs", "train", vocabulary, 4, 34)
    batch = data.batch(np.arange(12), np.zeros(12, np.uint64))
    first, second = data.data.inputs
    lengths = []
    for row in range(12):
        a, b = first[row].tolist(), second[row].tolist()
        wanted = [7, *a, 2, *b, 2]
        padded = batch.tokens.shape[1] - len(wanted)
        lengths.append(len(wanted))
        assert batch.tokens[row].tolist() == wanted + [0] * padded
        label = [2, 7, 1][batch.classes[row]]
        assert batch.targets[row].tolist() == [label] * len(wanted) + [-1] * padded
        assert batch.padding[row].tolist() == [False] * len(wanted) + [True] * padded
    assert batch.tokens.shape[1] == max(lengths) > min(lengths)
    assert batch.sizes == {"targets": sum(lengths), "rows": 12}


def test_class_scores(ragged: Path) -> None:
    """Raw logits of the class tokens, 0 at padding, mean over the longest window of the sample."""
    logits = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(1))
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    batch = TokenLabelBatch(
        tokens=torch.zeros(2, 4),
        layout=Layout(padding),
        classes=torch.tensor([0, 1]),
        class_tokens=torch.tensor([2, 5]),
        token_level=False,
        longest=torch.tensor([4, 3]),
        windows=torch.tensor([0, 1]),
    )
    found = _class_scores(logits, batch)
    for row, (length, longest) in enumerate(((4, 4), (2, 3))):
        for k, token in enumerate((2, 5)):
            wanted = sum(logits[row, at, token].item() for at in range(length)) / longest
            assert found[row, k].item() == pytest.approx(wanted, abs=1e-6)
    first = batch.replace(longest=batch.longest[:1], layout=Layout(padding[:1]))
    whole = _class_scores(logits[:1], first.replace(layout=ALL_VISIBLE))
    assert torch.equal(whole, _class_scores(logits[:1], first))


def test_gradient_and_accuracy(ragged: Path) -> None:
    """The loss is the mean over all tokens of the batch; accuracy that of the class scores."""
    bench = Bench(ragged, "finetune", "task.labelled=pairs", "task.batch_size=5", "model.dropout=0")
    model = bench.model.eval()
    stream = bench.task.build_streams("train")["train"]
    (batch,) = stream.micro_batches(0, FULL)
    terms = bench.task.criterion(model, batch)
    logits = model(batch.tokens, Layout(batch.tokens == 0))
    total, right = 0.0, 0
    for row in range(5):
        length = int((batch.tokens[row] != 0).sum())
        for at in range(length):
            total -= logits[row, at].log_softmax(-1)[batch.targets[row, at]].item()
        means = [logits[row, :length, k].sum().item() for k in (2, 5, 1)]
        right += int(np.argmax(means) == batch.classes[row])
    assert terms["labels"].sum.item() == pytest.approx(total, rel=1e-10)
    assert terms["accuracy"].sum.item() == right and terms["accuracy"].weight == 0
    assert batch.sizes["targets"] == int((batch.tokens != 0).sum())


def test_the_student_of_a_pair_is_taken(even: Path) -> None:
    pair = Bench(even, "soft").model
    bench = Bench(even, "finetune", "task.labelled=which_moon_10")
    chosen = bench.task.pretrained(pair.state_dict())
    bench.model.load_state_dict(chosen)
    for name, parameter in bench.model.named_parameters():
        assert torch.equal(parameter, pair["student"].get_parameter(name))
