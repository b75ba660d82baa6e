"""BERT pre-training on a toy where next sentences can be told by rule, and its configuration."""

import random
from pathlib import Path

import battery
import pytest
import torch
from torch.nn import functional as F

from metaseq_lm.cli import main
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.data.streams import Shard
from metaseq_lm.models.transformer.flops_rules import Sizes
from metaseq_lm.training.run import TrainingRun

SIZE = ["task.tokens_per_sample=12", "task.batch_size=32", "model.segments=2"]


@pytest.fixture(scope="module")
def topics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two documents of other words, so that B continues A by rule and another text never does."""
    folder, draw = tmp_path_factory.mktemp("topics"), random.Random(0)
    for split, count in (("train", 600), ("valid", 150)):
        lines = []
        for words in ("abc", "xyz"):
            lines += [" ".join(draw.choices(words, k=3)) for _ in range(count)] + [""]
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    files = [f"--{split}pref={folder}/{split}.txt" for split in ("train", "valid")]
    options = ["--documents", "blank", "--tokenizer", "word", "--destdir", str(folder / "data")]
    assert main(["preprocess", *files, *options]) == 0
    return folder / "data"


def configure(data: Path, save: Path, *more: str) -> RunConfig:
    names = ["task=sentence_pairs", "criterion=bert_pretraining"]
    return load_config([*battery.TINY, *names, *SIZE, f"data={data}", f"save_dir={save}", *more])


def test_bert_pretraining_learns_which_sentence_follows(topics, tmp_path):
    size = ["model.encoder_embed_dim=32", "model.encoder_ffn_embed_dim=64", "optimizer.lr=0.003"]
    calm = ["trainer.log_interval=100", "schedule=constant", "model.dropout=0"]
    run = TrainingRun(configure(topics, tmp_path, "trainer.max_update=200", *size, *calm))
    run.train()
    assert run.trainer.last_valid["next_sentence_accuracy"] > 0.9


def test_the_loss_is_the_sum_of_two_means(topics, tmp_path):
    """Over masked tokens and over rows, computed with torch's own functions."""
    run = TrainingRun(configure(topics, tmp_path, "trainer.max_update=1", "model.dropout=0"))
    (batch,) = run.task.build_streams("train")["train"].micro_batches(0, Shard())
    model = run.model.eval()
    terms = run.task.criterion(model, batch)
    x = model.encoder(batch.tokens, batch.layout, batch.segments)
    logits = model(batch.tokens, batch.layout, segments=batch.segments)
    at = batch.targets >= 0
    rows = torch.arange(len(x))[:, None].expand_as(at)[at]
    wanted = F.cross_entropy(logits[rows, batch.positions[at]], batch.targets[at])
    sizes = batch.sizes
    assert terms["mlm"].per == "targets" and sizes["targets"] == int(at.sum())
    assert torch.allclose(terms["mlm"].sum / sizes["targets"], wanted)
    scores = model.heads["next_sentence"](x)
    assert terms["next_sentence"].per == "rows" and sizes["rows"] == 32
    wanted = F.cross_entropy(scores, batch.next_sentence)
    assert torch.allclose(terms["next_sentence"].sum / 32, wanted)
    right = (scores.argmax(-1) == batch.next_sentence).sum()
    assert terms["next_sentence_accuracy"].sum == right
    assert [t.weight for t in terms.values()] == [1.0, 0.0, 1.0, 0.0]


def test_validation_is_the_same_each_time(topics, tmp_path):
    stream = TrainingRun(configure(topics, tmp_path)).task.build_streams("valid")["valid"]
    passes = [list(stream.one_epoch(Shard())) for _ in range(2)]
    for (one,), (other,) in zip(*passes):
        for name in ("tokens", "next_sentence", "targets"):
            assert torch.equal(getattr(one, name), getattr(other, name))


def test_names_of_the_parameters(topics, tmp_path):
    """Those of masked_lm's model, and the head."""
    pairs = TrainingRun(configure(topics, tmp_path, "trainer.max_update=1")).model.state_dict()
    names = {n for n in pairs if not n.startswith("heads.next_sentence.")}
    assert names == {n for n in pairs if n.startswith(("encoder.", "heads.lm."))}
    head = {n.removeprefix("heads.next_sentence.") for n in set(pairs) - names}
    assert head == {"pooler.weight", "pooler.bias", "out.weight", "out.bias"}
    assert pairs["heads.next_sentence.out.weight"].shape == (2, 8)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["task.sample_break_mode=eos"], "sample_break_mode is 'eos'. Choices: segments"),
        (["task=masked_lm"], "for task sentence_pairs only"),
        (["model.segments=1"], "model.segments"),
    ],
)
def test_sentence_pairs_refuse_options_that_do_not_fit(topics, tmp_path, more, message):
    with pytest.raises(UsageError, match=message):
        battery.train(configure(topics, tmp_path, "trainer.max_update=1", *more))


def test_flops_by_rule_are_those_of_the_masked_lm(topics, tmp_path):
    """As the ELECTRA paper counts BERT: twice the forward pass, a softmax at 20 of 128 tokens."""
    run = TrainingRun(configure(topics, tmp_path))
    vocab = len(run.task.vocabulary)  # type: ignore[attr-defined]
    row = Sizes(layers=2, width=8, ffn=16, heads=2, embed=8, vocab=vocab, length=12)
    wanted = 2 * (row.blocks() + row.inputs() + row.softmax_head(20 / 128))
    assert run.task.flops_by_rule() == pytest.approx(32 * wanted, rel=1e-12)


def test_masked_lm_alone_trains_on_pairs(topics, tmp_path):
    weights = battery.train(
        configure(topics, tmp_path, "criterion=masked_lm", "trainer.max_update=2")
    )
    assert any(name.startswith("heads.next_sentence.") for name in weights)
