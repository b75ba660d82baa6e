"""Tagging and parsing as tasks of the core: scores, files, shares of the labels, a
frozen encoder.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from battery import WORDS

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.loading import load_config
from metaseq_lm.criterions.tagging import _targets_of
from metaseq_lm.data.words.sets import WordSet
from metaseq_lm.evaluation.chunks import conlleval_report, conlleval_spans, span_counts
from metaseq_lm.runs import checkpoint, manifests
from metaseq_lm.tasks.words import word_batch
from metaseq_lm.training.parts import Parts, build_parts
from metaseq_lm.training.restore import open_run
from metaseq_lm.training.run import TrainingRun

QUICK = """
    optimizer=sgd optimizer.lr=0.5 optimizer.momentum=0.9 optimizer.clip_norm=1
    schedule=damped_inverse_sqrt schedule.warmup_updates=3 trainer.max_update=6
    trainer.validate_interval_updates=3 trainer.final_splits=[test] engine.tensorboard=false
    engine.threads=1
""".split()
TAGGING = ["task=tagging", "criterion=tagging"]
PARSING = ["task=parsing", "criterion=parsing", "task.labelled=dep", "task.parser_dim=4"]


def start(data: Path, save: Path, *options: str) -> TrainingRun:
    places = [f"data={data}", f"save_dir={save}"]
    return TrainingRun(load_config([*places, *WORDS, *QUICK, *options]))


def built(data: Path, *options: str) -> Parts:
    """Return a run that writes nothing."""
    return build_parts(load_config([f"data={data}", *WORDS, *QUICK, *options]))


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())["metrics"]


def test_tagging_writes_scores_and_columns(sentences, tmp_path):
    """What the files say, read by the scorer, is the score; averaged and raw weights differ."""
    options = ("task.labelled=chunk", "task.score_raw=true", "task.average_decay=0.5")
    start(sentences, tmp_path, *TAGGING, *options).train()
    test = results(tmp_path)["test"]
    assert next(iter(test)) == "score" and test["score"] == test["f1"]
    assert {"accuracy", "conlleval_f1", "raw_f1", "raw_score", "loss"} <= set(test)
    blocks = (tmp_path / "chunk.test.conll").read_text().strip().split("\n\n")
    rows = [[line.split("\t") for line in block.split("\n")] for block in blocks]
    data = WordSet(sentences / "chunk", "test")
    assert [[row[0] for row in block] for block in rows] == data.surface(range(len(data)))
    gold, predicted = ([[row[i] for row in block] for block in rows] for i in (1, 2))
    assert {tag[:2] for row in (*gold, *predicted) for tag in row} == {"B-", "I-", "O"}
    assert span_counts(gold, predicted, conlleval_spans).scores.f1 == test["conlleval_f1"]
    lines = (tmp_path / "predictions.test.chunk.jsonl").read_text().splitlines()
    said = [json.loads(line) for line in lines]
    both = [[row[name] for row in said] for name in ("gold", "predicted")]
    assert span_counts(*both).scores.f1 == test["f1"]
    assert (tmp_path / "chunk.test.conlleval.txt").read_text() == conlleval_report(gold, predicted)
    weights = built(sentences, *TAGGING, *options).model.state_dict()
    assert "average.net.encoder.embedding.scale" in weights


def test_parsing_writes_scores_and_trees(sentences, tmp_path):
    start(sentences, tmp_path, *PARSING).train()
    test = results(tmp_path)["test"]
    assert test["score"] == test["las"] <= test["uas"] and "uas_all" in test
    rows = [line.split("\t") for line in (tmp_path / "dep.test.conllu").read_text().splitlines()]
    lines = (tmp_path / "predictions.test.dep.jsonl").read_text().splitlines()
    said = [json.loads(line) for line in lines]
    heads = [int(row[6]) for row in rows if len(row) > 1]
    assert heads == [head for row in said for head in row["predicted_heads"]]
    gold = [head for row in said for head in row["gold_heads"]]
    right = [a == b for a, b in zip(heads, gold)]
    assert np.mean(right) == pytest.approx(test["uas_all"])
    relations, gold = ([r for row in said for r in row[name]] for name in ("predicted", "gold"))
    assert relations == [row[7] for row in rows if len(row) > 1]
    right = [both and a == b for both, a, b in zip(right, relations, gold)]
    assert np.mean(right) == pytest.approx(test["las_all"])
    lengths = [len(row["words"]) for row in said for _ in row["words"]]
    assert all(0 <= head <= length for head, length in zip(heads, lengths))


def test_tags_of_words_are_scored_by_accuracy(sentences):
    """And a class that training lacks is never predicted."""
    run = built(sentences, *TAGGING, "task.labelled=pos", "task.valid_size=4")
    found, rows = run.score("valid")
    assert found["score"] == found["accuracy"] and len(rows) == 4 and "f1" not in found
    data = run.task.labelled("pos", "valid")
    data.unseen = data.label_names.index(rows[0]["predicted"][0])
    _, rows = run.score("valid")
    assert data.label_names[data.unseen] not in {tag for row in rows for tag in row["predicted"]}


def test_a_share_of_the_labels(sentences):
    """The same for all seeds of the run, smaller within larger, and no other sentence is seen."""

    def chosen(share: float, *more: str) -> set[int]:
        option = f"task.label_fraction={share}"
        run = built(sentences, *TAGGING, "task.labelled=chunk", option, *more)
        return set(run.task.chosen("chunk").tolist())

    small, large = chosen(0.1), chosen(0.5)
    assert len(small) == 4 and small < large and chosen(0.1, "seed=2") == small
    assert chosen(0.1, "task.fraction_seed=null", "seed=2") != small
    run = built(sentences, *TAGGING, "task.labelled=chunk", "task.label_fraction=0.1")
    stream = run.task.build_streams("train")["chunk"]
    assert {n for i in range(9) for n in stream.order.batch(i).tolist()} == small


def test_a_frozen_encoder_stays(sentences, tmp_path):
    """The probe: another set on a run's averaged encoder; only new heads move."""
    start(sentences, tmp_path / "a", *PARSING).train()
    options = ("task.labelled=pos", f"init_from={tmp_path / 'a'}", "task.freeze_encoder=true")
    run = start(sentences, tmp_path / "b", *TAGGING, *options)
    before = {name: w.clone() for name, w in run.model.state_dict().items()}
    saved = checkpoint.load(manifests.resolve(str(tmp_path / "a"))).weights
    for name, weight in run.model.encoder.state_dict().items():
        assert torch.equal(weight, saved[f"average.net.encoder.{name}"])
    run.train()
    moved = {n for n, w in run.model.state_dict().items() if not torch.equal(w, before[n])}
    assert moved and all("heads.pos." in name for name in moved)
    found, _ = open_run(str(tmp_path / "b")).score("test")
    assert found["score"] == results(tmp_path / "b")["test"]["score"]
    with pytest.raises(MetaseqError, match="needs init_from"):
        start(sentences, tmp_path / "c", *TAGGING, options[0], options[2])


def test_label_smoothing_is_for_training_only(sentences):
    """(1 - e) onehot + e / C on gold tags; trees and validation know none."""
    for options, smoothed in ((["task.labelled=chunk", *TAGGING], 0.1), (PARSING, 0.0)):
        run = built(sentences, *options, "model.dropout=0")
        name = run.task.names[0]
        data = run.task.labelled(name, "train")
        batch = run.task.build_streams("train")[name].micro_batches(0, run.shard)[0]
        scores = run.model.scores(run.model.views(batch), batch.scored, name, "primary")
        logs = scores.log_softmax(-1)
        gold = _targets_of(run.model, batch)
        picked = logs.gather(-1, gold.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        for training in (True, False):
            run.model.train(training)
            share = smoothed if training else 0.0
            each = -(1 - share) * picked - share * logs.mean(-1)
            term = run.task.criterion(run.model, batch)["primary"]
            assert term.sum.item() == pytest.approx(each[batch.scored].sum().item(), rel=1e-5)
        assert batch.sizes["pairs"] == batch.sizes["words"] - len(batch.lengths)
        assert word_batch(data, name, [0], [0]).set_name == name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([*TAGGING, "task.labelled=dep"], "treebanks for parsing"),
        ([*PARSING, "task.labelled=pos"], "tagged sets are for"),
        ([*TAGGING], "give task.labelled"),
        ([*TAGGING, "task.labelled=none"], "no such file"),
        ([*TAGGING, "task.labelled=pos", "task.average_decay=1"], "below 1"),
        ([*TAGGING, "task.labelled=pos", "criterion.label_smoothing=1"], "label_smoothing"),
        ([*TAGGING, "task.labelled=pos", "task.label_fraction=0"], "task.label_fraction must be"),
        ([*PARSING, "criterion=tagging"], "criterion tagging is for task"),
        ([*PARSING, "task.root=none"], "task.root"),
        ([*PARSING, "task.parser_dim=0"], "task.parser_dim .*at least 1, got 0"),
        ([*PARSING, "task.hidden_dim=0"], "task.hidden_dim .*at least 1, got 0"),
        ([*PARSING, "task.batch_size=0"], "task.batch_size .*at least 1, got 0"),
        ([*PARSING, "task.valid_size=-3"], "task.valid_size .*at least 0, got -3"),
        ([*PARSING, "model.char_widths=[30]"], "char_widths .*at most 24"),
        ([*PARSING, "trainer.valid_split=train"], "the best checkpoint"),
    ],
)
def test_mistakes_are_told(options, message, sentences, tmp_path):
    """Before anything is trained."""
    with pytest.raises(MetaseqError, match=message):
        start(sentences, tmp_path, *options, "trainer.max_update=1").train()
    assert not (tmp_path / "log.jsonl").exists()


def test_the_training_sentences_are_scored_that_are_used(sentences, tmp_path):
    """At the end of a run and by `evaluate` alike: the share of the labels, each sentence once."""
    options = ("task.labelled=chunk", "task.label_fraction=0.3", "trainer.final_splits=[train]")
    run = start(sentences, tmp_path, *TAGGING, *options)
    run.train()
    metrics, rows = open_run(str(tmp_path / "checkpoints" / "last")).score("train")
    assert sorted(row["index"] for row in rows) == sorted(run.task.chosen("chunk").tolist())
    assert 0 < len(rows) < len(WordSet(sentences / "chunk", "train", run.task.vocabulary))
    right = [p == g for row in rows for p, g in zip(row["predicted"], row["gold"])]
    assert metrics["accuracy"] == pytest.approx(np.mean(right), abs=1e-12)
    assert results(tmp_path)["train"].keys() == metrics.keys()
    assert (tmp_path / "chunk.train.conll").exists()


def test_another_kind_of_model_is_refused(sentences):
    places = [f"data={sentences}", "save_dir=none", "model=transformer"]
    with pytest.raises(MetaseqError, match="--model cnn_bilstm.*transformer_views"):
        TrainingRun(load_config([*places, *TAGGING, "task.labelled=pos"]))
