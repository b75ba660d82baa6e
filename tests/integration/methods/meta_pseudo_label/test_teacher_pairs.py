"""The pairs that a teacher writes, in the log of a run."""

import json
from pathlib import Path

import pytest
import torch
from meta_pseudo_bench import Bench

from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.methods.meta_pseudo_label.task import _pair_of, _readable, _texts_of
from metaseq_lm.training.run import TrainingRun


def test_text_of_tokens(even: Path) -> None:
    tokenizer = load_tokenizer(even)
    (ids,) = tokenizer.encode_batch(["12 7 63"])
    assert _readable([3, *ids, 2, 0], tokenizer) == "[CLS0] 12 7 63 [SEP] [PAD]"
    assert _readable([1, ids[1], 1, 1], tokenizer) == "[MASK] 7 [MASK] [MASK]"
    assert _readable([], tokenizer) == ""


@pytest.mark.parametrize("name", ["hard", "soft", "soft_fixed_y"])
def test_pairs_of_a_teacher(ragged: Path, name: str) -> None:
    """Soft: the likeliest token of each head; fixed y: the text. Padding is not written."""
    bench = Bench(ragged, name)
    model = bench.model.eval()
    texts = bench.task.samples(bench.engine, model)
    again = bench.task.samples(bench.engine, model)
    assert texts == again and len(texts) == 3
    tokenizer = load_tokenizer(ragged)
    corpus = bench.task.corpus("valid")
    tokens, lengths = corpus.rows([0, 30, 59])
    for row, text in enumerate(texts):
        x, given, target = text.split("\n")
        original = tokens[row, : lengths[row]]
        assert x == f"x  {_readable(original.tolist(), tokenizer)}"
        if name == "hard":
            continue
        hidden = model["teacher"].encoder(torch.from_numpy(original)[None])
        for head, line in (("x", given), ("y", target)):
            wanted = model["teacher"].predict(hidden, head=head).argmax(-1)[0].tolist()
            if head == "y" and name == "soft_fixed_y":
                wanted = original.tolist()
            assert line[4:] == _readable(wanted, tokenizer)


def test_hard_pairs_are_samples(even: Path) -> None:
    bench = Bench(even, "hard")
    (batch,) = bench.engine.to_device([_texts_of(bench.task.corpus("valid"), 60)])
    x, y = bench.engine.map(
        lambda b: _pair_of(bench.task.criterion, bench.model["teacher"], b), [batch], rng_key=1
    )[0]
    assert x.shape == y.shape == batch.original.shape == (1, 60, 34)
    # An untrained teacher is close to uniform over 407 tokens.
    assert len(set(x.flatten().tolist())) > 300 and not torch.equal(x, y)


def test_pairs_of_the_teacher_are_logged(even: Path, tmp_path: Path) -> None:
    more = """
        trainer.max_update=4 trainer.validate_interval_updates=2 engine.tensorboard=false
    """.split()
    save = f"save_dir={tmp_path}/soft"
    TrainingRun(Bench(even, "soft", *more, "task.pairs=2", save).config).train()
    log = [json.loads(line) for line in (tmp_path / "soft/log.jsonl").read_text().splitlines()]
    found = [line for line in log if line["kind"] == "samples"]
    assert [line["update"] for line in found] == [2, 4]
    assert all(len(line["texts"]) == 2 for line in found)
    for name, option in (("mlm", "task.pairs=2"), ("soft", "task.pairs=0")):
        bench = Bench(even, name, option)
        assert bench.task.samples(bench.engine, bench.model) == []
