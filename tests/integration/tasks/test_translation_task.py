"""Translation, supervised: it learns, its predictions and BLEU, and the share of labels."""

import json
from pathlib import Path

import image_data
import numpy as np
import parallel_data
import pytest

from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.evaluation import bleu
from metaseq_lm.tasks import translation
from metaseq_lm.training.parts import build_task
from metaseq_lm.training.run import TrainingRun

TINY = """
    task=translation criterion=translation model=lstm_encoder_decoder model.layers=1
    model.embed_dim=16 model.hidden_dim=32 model.output_dim=32 model.dropout=0 schedule=constant
    optimizer.lr=0.01 task.batch_size=16 task.beam_size=3 task.bleu=false trainer.log_interval=20
    engine.device=cpu engine.threads=1 engine.tensorboard=false
""".split()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pairs")
    return parallel_data.binarise(place / "text", place / "data")


def configure(data: Path, save: Path, *more: str) -> RunConfig:
    return load_config([*TINY, f"data={data}", f"save_dir={save}", *more])


def test_translation_learns_a_few_pairs(pairs, tmp_path, monkeypatch):
    """48 pairs by heart; translations are scored and written in the order of the source."""
    scored = []

    def share(references: list[str], hypotheses: list[str], tokenizer: str) -> float:
        scored.append((references, hypotheses, tokenizer))
        return 100 * float(np.mean([r == h for r, h in zip(references, hypotheses)]))

    monkeypatch.setattr(translation, "corpus_bleu", share)
    monkeypatch.setattr(translation, "check_bleu", lambda tokenizer: None)
    more = ["trainer.max_update=160", "trainer.valid_split=''", "task.bleu=true"]
    more += ["optimizer.lr=0.03", "task.batch_size=48"]
    run = TrainingRun(configure(pairs, tmp_path, *more))
    run.train()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line for line in lines if line["kind"] == "train"][-1]["accuracy"] > 0.95
    metrics, rows = run.parts.score("valid")
    assert metrics["bleu"] == 100 * float(np.mean([r["gold"] == r["predicted"] for r in rows]))
    assert metrics["perplexity"] == pytest.approx(np.exp(metrics["loss"])) and len(scored) == 1
    gold = (pairs.parent / "text" / "parallel" / "dev.vi").read_text().splitlines()
    assert scored[0][0] == gold == [row["gold"] for row in rows]
    files = run.task.submissions("valid", rows[::-1])
    lines = files["translations.valid.txt"].splitlines()
    assert lines == [row["predicted"] for row in rows] == scored[0][1]


def test_the_share_of_labels_is_nested_and_seeded(pairs, tmp_path):
    def chosen(*more: str) -> tuple[set, set]:
        task = build_task(configure(pairs, tmp_path, *more))
        used, others = task.labelled_pairs()
        assert len(used) + len(others) == 48 and not set(used) & set(others)
        return set(used), set(others)

    small, large = chosen("task.labelled_share=0.25")[0], chosen("task.labelled_share=0.5")[0]
    assert len(small) == 12 and small < large and not chosen()[1]
    assert small == chosen("task.labelled_share=0.25", "seed=7")[0]
    assert small != chosen("task.labelled_share=0.25", "task.share_seed=2")[0]


@pytest.mark.parametrize(
    "more, words",
    [
        (["model=bilstm_lm"], "needs --model lstm_encoder_decoder"),
        (["task.beam_size=0"], "task.beam_size .*at least 1"),
        (["task.labelled_share=0"], "task.labelled_share .*above 0"),
        (["task.max_length=-1"], "task.max_length .*at least 0"),
        (["criterion.label_smoothing=1.5"], "criterion.label_smoothing .*below 1"),
        (["task.bleu=true", "task.bleu_tokenizer=moses"], "one of none"),
        (["criterion=masked_lm"], "needs criterion=translation"),
    ],
)
def test_translation_refuses_options_that_do_not_fit(more, words, pairs, tmp_path):
    options = [o for o in TINY if "model" not in o] if more[0].startswith("model=") else TINY
    with pytest.raises(UsageError, match=words):
        build_task(load_config([*options, f"data={pairs}", f"save_dir={tmp_path}", *more]))


def test_data_of_another_kind(tmp_path):
    other = image_data.write(tmp_path / "images")
    with pytest.raises(MetaseqError, match="images.*parallel text"):
        build_task(configure(other, tmp_path))


def test_bleu_without_sacrebleu_is_said_at_once(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(bleu.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="task.bleu=false"):
        build_task(configure(pairs, tmp_path, "task.bleu=true"))
