"""BERT pre-training on a toy where next sentences can be told by rule, and its configuration."""

import random
from pathlib import Path

import battery
import pytest

from metaseq_lm.cli import main
from metaseq_lm.config import load_config
from metaseq_lm.errors import UsageError
from metaseq_lm.run import Run

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


def configure(data: Path, save: Path, *more: str):
    names = ["task=sentence_pairs", "criterion=bert_pretraining"]
    return load_config([*battery.TINY, *names, *SIZE, f"data={data}", f"save_dir={save}", *more])


def test_it_learns_which_sentence_follows(topics: Path, tmp_path: Path) -> None:
    import time

    t = time.process_time()
    size = ["model.encoder_embed_dim=32", "model.encoder_ffn_embed_dim=64", "optimizer.lr=0.003"]
    calm = ["trainer.log_interval=100", "schedule=constant", "model.dropout=0"]
    run = Run(configure(topics, tmp_path, "trainer.max_update=200", *size, *calm))
    run.train()
    metrics = run.trainer.last_valid
    print(metrics, time.process_time() - t)
    assert metrics["next_sentence_accuracy"] > 0.7
    assert 0


def test_names_of_the_parameters(topics: Path, tmp_path: Path) -> None:
    """Those of masked_lm's model, and the head."""
    pairs = Run(configure(topics, tmp_path, "trainer.max_update=0")).model.state_dict()
    names = {n for n in pairs if not n.startswith("heads.next_sentence.")}
    assert names == {n for n in pairs if n.startswith(("encoder.", "heads.lm."))}
    head = {n.removeprefix("heads.next_sentence.") for n in set(pairs) - names}
    assert head == {"pooler.weight", "pooler.bias", "out.weight", "out.bias"}
    assert pairs["heads.next_sentence.out.weight"].shape == (2, 8)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["task.sample_break_mode=eos"], "sample_break_mode=segments only"),
        (["task=masked_lm"], "for task sentence_pairs only"),
        (["model.segments=1"], "model.segments"),
    ],
)
def test_what_does_not_fit_is_refused(
    topics: Path, tmp_path: Path, more: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        battery.train(configure(topics, tmp_path, "trainer.max_update=1", *more))


def test_masked_lm_alone_trains_on_pairs(topics: Path, tmp_path: Path) -> None:
    weights = battery.train(
        configure(topics, tmp_path, "criterion=masked_lm", "trainer.max_update=2")
    )
    assert any(name.startswith("heads.next_sentence.") for name in weights)
