"""Fine-tuning on questions: learning them by heart, predictions, the start from an encoder,
replicas.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import squad_data
import torch
from outcomes import expect_error

from metaseq_lm.cli import main
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.data.streams import Shard
from metaseq_lm.distributed import process_group
from metaseq_lm.evaluation.squad import _squad_v1, _squad_v2
from metaseq_lm.runs import checkpoint, manifests
from metaseq_lm.training.parts import Parts, build_parts, evaluate_split
from metaseq_lm.training.restore import initialise_from
from metaseq_lm.training.run import TrainingRun

SIZES = """
    model.encoder_layers=1 model.encoder_embed_dim=32 model.encoder_ffn_embed_dim=32
    model.encoder_attention_heads=2 model.dropout=0 model.attention_dropout=0 model.segments=2
    schedule.warmup_updates=1 engine.tensorboard=false engine.threads=1
    trainer.validate_interval_updates=0
""".split()
SHORT = ["task.tokens_per_sample=34", "task.doc_stride=12", "model.max_positions=34"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus of numbers, and questions of both versions; valid is train."""
    folder = tmp_path_factory.mktemp("questions")
    text = folder / "text.txt"
    text.write_text("".join(f"{n} {n * 7 % 900 + 100} after ?\n" for n in range(100, 1000)))
    data = folder / "data"
    corpus = ["--trainpref", str(text), "--validpref", str(text), "--tokenizer", "word"]
    assert main(["preprocess", *corpus, "--destdir", str(data)]) == 0
    for name, impossible in (("v1", False), ("v2", True)):
        same = {"train": 7, "valid": 7}
        squad_data.binarise(data, name, same, impossible=impossible, seed="same")
    return data


def configure(data: Path, save: Path, name: str, *more: str) -> Any:
    places = [f"data={data}", f"save_dir={save}", "task=squad", "criterion=squad"]
    return load_config([*places, f"task.labelled={name}", *SIZES, *SHORT, *more])


@pytest.mark.parametrize(
    ("name", "options"), [("v2", []), ("v1", ["task.joint=false", "task.answerability=false"])]
)
def test_questions_learnt_by_heart(data, tmp_path, name, options, capsys):
    """EM 100 on the training questions; the files for the leaderboard say so too."""
    steps = ["trainer.max_update=250", "optimizer.lr=0.004", "task.batch_size=40"]
    final = ["trainer.final_splits=[valid]", "optimizer.clip_norm=1", *options]
    run = TrainingRun(configure(data, tmp_path / "run", name, *steps, *final))
    run.train()
    results = json.loads((tmp_path / "run" / "results.json").read_text())["metrics"]["valid"]
    assert results["exact"] == results["f1"] == results["score"] == 1 and results["missing"] == 0
    golds = run.task.windows("valid").data.golds()
    said = json.loads((tmp_path / "run" / "predictions.valid.json").read_text())
    nbest = json.loads((tmp_path / "run" / "nbest.valid.json").read_text())
    assert said.keys() == nbest.keys() == golds.keys()
    if name == "v1":
        assert not (tmp_path / "run" / "null_odds.valid.json").exists()
        assert _squad_v1(golds, said)["exact"] == 100
        assert all(texts[0]["text"] == said[q] for q, texts in nbest.items())
    else:
        assert results["best_exact"] == results["best_f1"] == results["HasAns_f1"] == 1
        assert results["total"] == 21
        odds = json.loads((tmp_path / "run" / "null_odds.valid.json").read_text())
        assert _squad_v2(golds, said, odds, 1e9)["exact"] == 100
        assert all((odds[q] > -2.75) == (said[q] == "") for q in golds)
    rows = (tmp_path / "run" / "predictions.valid.jsonl").read_text().splitlines()
    assert [json.loads(row)["index"] for row in rows] == list(range(21))
    capsys.readouterr()
    place = str(tmp_path / "out")
    assert main(["evaluate", str(tmp_path / "run"), "--split", "valid", "--out", place]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["exact"] == 1 and (printed.get("best_exact") == 1) == (name == "v2")
    for file in ("predictions.valid.json", "nbest.valid.json", "predictions.valid.jsonl"):
        assert (tmp_path / "out" / file).read_text() == (tmp_path / "run" / file).read_text()
    suite = {"v1": "squad/v1.1", "v2": "squad/v2.0"}[name]
    command = ["score", str(tmp_path / "run"), "--suite", suite, "--data", str(data / name)]
    assert main([*command, "--name", "questions"]) == 0
    (file,) = (tmp_path / "run" / "suites" / "questions").iterdir()
    groups = json.loads(file.read_text())["groups"]
    official = {key: printed[key] for key in groups["overall"]["metrics"]}
    assert groups["overall"] == {"n": 21, "metrics": official}
    counts = {group: content["n"] for group, content in groups.items()}
    assert counts == {"overall": 21} | ({"HasAns": 14, "NoAns": 7} if name == "v2" else {})
    assert all(content["metrics"]["f1"] == 1 for content in groups.values())
    capsys.readouterr()
    other = str(data / {"v1": "v2", "v2": "v1"}[name])
    expect_error(capsys, main([*command[:-1], other]), 2, "--suite squad/")


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Parts:
    """A run that is not trained yet."""
    return build_parts(configure(data, tmp_path / "run", "v2"))


def test_replicas_and_micro_batches(run, monkeypatch):
    """Windows of a question on two replicas, three rows at a time, give the same answers."""
    task, model = run.task, run.model.eval()
    engine = run.engine
    stream = task.build_streams("valid")["valid"]

    def answers(world: int) -> list[dict]:
        others: list[list] = [[], []]  # what the two calls of an evaluation gather: sums, answers
        for rank in reversed(range(world)):
            calls = iter(others)

            def gather(mine: Any) -> list:
                parts = next(calls)
                parts.append(mine)
                return parts

            monkeypatch.setattr(process_group, "gather_objects", gather)
            passes = {"valid": stream.one_epoch(Shard(rank, world, 3 if world > 1 else 0))}
            rows = task.evaluate(engine, model, passes).rows
        return list(rows())

    one, two = answers(1), answers(2)
    assert len(one) == len(two) == 21
    for a, b in zip(one, two):
        assert a["predicted"] == b["predicted"] and a["nbest"][0]["text"] == b["nbest"][0]["text"]
        assert a["null_odds"] == pytest.approx(b["null_odds"], abs=1e-5)


def test_the_gradient_of_a_batch_is_that_of_its_sum(data, tmp_path):
    """It is 16 times that of the mean of 16 rows, and is clipped; the log shows the mean."""
    grads = []
    for summed in (True, False):
        more = ["task.batch_size=16", f"criterion.batch_sum={summed}", "engine.precision=fp64"]
        run = build_parts(configure(data, tmp_path, "v2", *more))
        stream = run.task.build_streams("train")["train"]
        batch = run.engine.to_device(stream.micro_batches(0, Shard(0, 1, 5)))
        run.model.train()
        loss, engine = run.task.criterion, run.engine
        grad, logs = engine.gradients(
            lambda b: loss(run.model, b), batch, engine.parameters("main")
        )
        grads.append((torch.cat([g.flatten() for g in grad]), float(logs["loss"])))
    assert grads[0][1] == pytest.approx(grads[1][1], rel=1e-12)
    assert torch.allclose(grads[0][0], 16 * grads[1][0], rtol=1e-10, atol=1e-12)


def test_validation_is_the_mean_over_windows(run):
    metrics = evaluate_split(run, "valid").metrics
    wanted = {"span": 0.0, "answerability": 0.0}
    stream = run.task.build_streams("valid")["valid"]
    rows = 0
    for (batch,) in stream.one_epoch(Shard(0, 1, 0)):
        terms = run.task.criterion(run.model.eval(), batch)
        rows += batch.sizes["rows"]
        for name in wanted:
            wanted[name] += terms[name].sum.item()
    assert rows == len(run.task.windows("valid"))
    for name, total in wanted.items():
        assert metrics[name] == pytest.approx(total / rows, rel=1e-5)
    assert metrics["loss"] == pytest.approx(metrics["span"] + 0.5 * metrics["answerability"])
    assert metrics["total"] == 21 and metrics["HasAns_total"] == 14


@torch.no_grad()
def test_padding_changes_no_prediction(run):
    """Rows are sorted by length, so each is padded in another way than alone."""
    task, model = run.task, run.model.eval()
    windows = task.windows("valid")
    whole = {}
    for (batch,) in task.build_streams("valid")["valid"].one_epoch(Shard(0, 1, 0)):
        x = model(batch.tokens, batch.layout, batch.segments)
        whole |= {a.window: a for a in task._decode("valid", model, x, batch)}
    assert whole.keys() == set(range(len(windows)))
    for window in range(0, len(windows), 7):
        batch = windows.batch(np.array([window]))
        x = model(batch.tokens, batch.layout, batch.segments)
        (alone,) = task._decode("valid", model, x, batch)
        assert alone.null == pytest.approx(whole[window].null, abs=1e-5)
        assert [t for _, t in alone.texts[:3]] == [t for _, t in whole[window].texts[:3]]


def test_start_from_a_pretrained_encoder(data, tmp_path):
    """The encoder comes along, heads are fresh; longer positions are cut, short ones refused."""
    for room in (50, 34, 20):
        places = [f"data={data}", f"save_dir={tmp_path}/mlm{room}", "trainer.max_update=1"]
        task = ["task.tokens_per_sample=20", f"model.max_positions={room}"]
        TrainingRun(load_config([*places, *SIZES, *task])).train()
    for room in (50, 34):
        config = configure(data, tmp_path / "fine", "v2", f"init_from={tmp_path}/mlm{room}")
        run = build_parts(config)
        initialise_from(run, config.init_from)
        fresh = build_parts(
            configure(data, tmp_path / "fine", "v2"), dry_run=True
        ).model.state_dict()
        found = checkpoint.load(manifests.resolve(f"{tmp_path}/mlm{room}")).weights
        for name, value in run.model.state_dict().items():
            if name.startswith("heads."):
                assert torch.equal(value, fresh[name])
            else:
                assert torch.equal(value, found[name][: len(value)]), name
    shape = build_parts(configure(data, tmp_path / "x", "v2", "model.encoder_layers=2"))
    with pytest.raises(MetaseqError, match="missing: encoder.stack.layers.1"):
        initialise_from(shape, f"{tmp_path}/mlm34")
    run = build_parts(configure(data, tmp_path / "x", "v2"))
    with pytest.raises(UsageError, match="20 positions.*task.tokens_per_sample.*34"):
        initialise_from(run, f"{tmp_path}/mlm20")
    run = build_parts(configure(data, tmp_path / "x", "v2", "task.tokens_per_sample=20"))
    initialise_from(run, f"{tmp_path}/mlm20")
    table = run.model.state_dict()
    assert (table["encoder.embeddings.positions.weight"][20:] == 0).all()


def test_squad_task_refuses_unusable_options(data, tmp_path):
    rows = tmp_path / "rows.tsv"
    rows.write_text("text\tlabel\n101\tx\n")
    if not (data / "labels").exists():
        command = ["preprocess", "--labelled", "labels", "--trainpref", str(rows)]
        assert main([*command, "--destdir", str(data)]) == 0
    for number, (more, message) in enumerate(
        [
            (["task.labelled=''"], "give task.labelled=NAME"),
            (["criterion=masked_lm"], "task 'squad' needs criterion=squad, not 'masked_lm'"),
            (["model.max_positions=33"], "tokens_per_sample is 34 but model.max_positions is 33"),
            (["task.tokens_per_sample=5"], "room for a question"),
            (["task.labelled=no"], "no/manifest.json: no such file"),
            (["task.labelled=labels"], "labels: not a SQuAD set"),
        ]
    ):
        with pytest.raises(MetaseqError, match=message):
            TrainingRun(configure(data, tmp_path / str(number), "v2", *more)).train()
        assert number == 3 or not (tmp_path / str(number)).exists()


def test_epochs(data, tmp_path):
    """Updates follow from the number of training windows."""
    run = TrainingRun(
        configure(data, tmp_path / "run", "v2", "task.epochs=2", "task.batch_size=16")
    )
    windows = len(run.task.windows("train"))
    assert run.config.trainer.max_update == 2 * -(-windows // 16)
