"""Taggers and parsers beside a frozen language model: who gets its states, who moves, what is
saved.
"""

import json
import shutil
from pathlib import Path

import battery
import pytest
import torch
import word_data
from torch import Tensor

from metaseq_lm.core.batch import Batch
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.core.loading import load_config
from metaseq_lm.data.streams import Shard
from metaseq_lm.runs import checkpoint, manifests
from metaseq_lm.runs.flops import FlopMeter
from metaseq_lm.training.restore import open_run
from metaseq_lm.training.run import TrainingRun

QUICK = """
    criterion=tagging optimizer.lr=0.05 schedule=constant trainer.max_update=4
    trainer.valid_split='' trainer.final_splits=[test] engine.tensorboard=false engine.threads=1
""".split()


@pytest.fixture(scope="module")
def reader(sentences: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model of the words of the data."""
    return word_data.language_model(sentences, tmp_path_factory.mktemp("reader"))


def build(data: Path, save: Path, reader: Path | str, *more: str) -> TrainingRun:
    places = [f"data={data}", f"save_dir={save}", f"task.elmo={reader}"]
    without = "model=no_encoder" in more
    options = [o for o in battery.CVT if not (without and o.startswith("model"))]
    return TrainingRun(load_config([*options, *QUICK, *places, *more]))


def batch_of(run: TrainingRun, name: str) -> Batch:
    micro = run.task.build_streams("train")[name].micro_batches(0, Shard())
    return run.engine.to_device(micro)[0]


def scores(run: TrainingRun, batch: Batch, name: str) -> Tensor:
    with torch.no_grad():
        return run.model.scores(run.model.views(batch), batch.scored, name, "primary")


def test_sets_share_the_weights_of_the_encoder_only(sentences, reader, tmp_path):
    """Those of a set's heads change its scores alone; dropout of the mixes is the option's."""
    run = build(sentences, tmp_path, reader, "task.elmo_dropout=0.25")
    model = run.model.eval()
    mixes = [model.encoder.embedding.mix, model.mixes["chunk"], model.mixes["dep"]]
    assert [mix.dropout.p for mix in mixes] == [0.25] * 3 and len(set(map(id, mixes))) == 3
    assert [tuple(mix.weights.shape) for mix in mixes] == [(3,)] * 3
    batch = batch_of(run, "dep")
    before = {name: scores(run, batch, name) for name in ("chunk", "dep")}
    for changed, mix in zip(({"chunk", "dep"}, {"chunk"}, {"dep"}), mixes):
        with torch.no_grad():
            mix.weights[0] += 2.0
        moved = {n for n in before if not torch.equal(scores(run, batch, n), before[n])}
        assert moved == changed
        with torch.no_grad():
            mix.weights[0] -= 2.0


def test_the_states_are_those_of_the_language_model(sentences, reader, tmp_path):
    """Without dropout even in training; both directions, all layers, the embeddings first."""
    run = build(sentences, tmp_path, reader, "engine.precision=fp64")
    saved = checkpoint.load(reader).weights
    own = run.model.language_model.state_dict()
    assert own.keys() == {n.removeprefix("encoder.") for n in saved if n.startswith("encoder.")}
    assert all(torch.equal(w, saved[f"encoder.{n}"].to(w)) for n, w in own.items())
    run.model.train()
    batch = batch_of(run, "chunk")
    views = run.model.views(batch)
    states = run.model.language_model.eval().states(batch.tokens, batch.layout)
    assert len(views.layers) == 3
    for found, ahead, back in zip(views.layers, *states):
        assert torch.equal(found, torch.cat([ahead, back], -1)) and not found.requires_grad
    assert torch.equal(views.layers[0][..., :3], views.layers[0][..., 3:])
    read = run.model.read(batch)
    assert run.model.read(read) is read


def test_the_language_model_stays_and_the_mixes_learn(sentences, reader, tmp_path):
    run = build(sentences, tmp_path, reader)
    before = {name: w.clone() for name, w in run.model.state_dict().items()}
    run.train()
    moved = {n for n, w in run.model.state_dict().items() if not torch.equal(w, before[n])}
    assert not any(name.startswith("language_model.") for name in moved)
    for mix in ("encoder.embedding.mix", "mixes.chunk", "mixes.dep"):
        assert {f"{mix}.weights", f"{mix}.scale"} <= moved
    assert "average.net.encoder.embedding.mix.weights" in moved
    assert not any("average" in name and "language_model" in name for name in before)
    assert not any(p.requires_grad for p in run.model.language_model.parameters())
    results = json.loads((tmp_path / "results.json").read_text())
    frozen = sum(p.numel() for p in run.model.language_model.parameters())
    average = sum(p.numel() for p in run.model.average.parameters())
    counts = results["parameters"]
    assert counts["all"] - counts["trained"] == frozen + average


@pytest.mark.parametrize("model", ["cnn_bilstm", "no_encoder"])
def test_a_checkpoint_stands_alone(model, sentences, tmp_path):
    """Scored without the language model's run; training it further needs that run, and says so."""
    reader = word_data.language_model(sentences, tmp_path / "reader")
    run = build(sentences, tmp_path / "run", reader, f"model={model}", "task.score_raw=true")
    assert list(run.config.task.elmo_sizes) == [len(run.task.vocabulary), 2, 3, 5]
    run.train()
    wanted = json.loads((tmp_path / "run" / "results.json").read_text())["metrics"]["test"]
    shutil.rmtree(tmp_path / "reader")
    again = open_run(str(tmp_path / "run"))
    assert again.score("test")[0] == wanted
    with pytest.raises(MetaseqError, match="no such checkpoint"):
        build(sentences, tmp_path / "run", reader, f"model={model}", "trainer.max_update=6")


def test_without_an_encoder_modules_read_the_language_model(sentences, reader, tmp_path):
    """Only they and their mixes are trained; a state is for its own word."""
    run = build(sentences, tmp_path, reader, "model=no_encoder", "engine.precision=fp64")
    model = run.model
    assert not any(name.startswith("encoder.") for name in model.state_dict())
    assert [layer.in_features for layer in model.heads["chunk"]["primary"].hidden.maps] == [6]
    before = {name: w.clone() for name, w in model.state_dict().items()}
    run.train()
    moved = {n for n, w in model.state_dict().items() if not torch.equal(w, before[n])}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name in before if name.startswith(("heads.", "mixes."))}
    assert trained <= moved and moved <= trained | {f"average.net.{name}" for name in trained}
    model.eval()
    batch = model.read(batch_of(run, "chunk"))
    once = scores(run, batch, "chunk")
    layers = [states.clone() for states in batch.layers]
    for states in layers:
        states[:, 3] += 1.0
    again = scores(run, batch.replace(layers=layers), "chunk")
    changed = (once != again).any(-1)
    assert changed[:, 3].all() and changed.sum() == len(changed)


def test_no_encoder_needs_a_language_model(sentences, tmp_path):
    with pytest.raises(MetaseqError, match="predict from.*task.elmo=RUN"):
        build(sentences, tmp_path, "", "model=no_encoder")


@pytest.mark.parametrize("model", ["cnn_bilstm", "transformer_views"])
def test_another_run_takes_the_encoder_with_its_mix(model, sentences, reader, tmp_path):
    """The heads' mixes are fresh; on a frozen encoder they are trained, its own is not."""
    small = ["model.encoder_embed_dim=8", "model.encoder_ffn_embed_dim=8", "model.max_positions=30"]
    small = [*small, "model.encoder_attention_heads=2"] if model != "cnn_bilstm" else []
    options = [o for o in battery.CVT if not o.startswith("model") or model == "cnn_bilstm"]
    places = [f"data={sentences}", f"task.elmo={reader}", f"model={model}", *small]

    def start(save: str, *more: str) -> TrainingRun:
        return TrainingRun(
            load_config([*options, *QUICK, *places, f"save_dir={tmp_path / save}", *more])
        )

    start("a", "trainer.max_update=2", "trainer.final_splits=[]").train()
    first = [f"init_from={tmp_path / 'a'}", "task.freeze_encoder=true", "task.labelled=[pos]"]
    first = [*first, "trainer.final_splits=[]"]
    run = start("b", *first)
    saved = checkpoint.load(manifests.resolve(str(tmp_path / "a"))).weights
    own = run.model.encoder.state_dict()
    assert all(torch.equal(w, saved[f"average.net.encoder.{n}"]) for n, w in own.items())
    assert run.model.mixes["pos"].weights.tolist() == [0.0] * 3
    before = {name: w.clone() for name, w in run.model.state_dict().items()}
    run.train()
    moved = {n for n, w in run.model.state_dict().items() if not torch.equal(w, before[n])}
    assert "mixes.pos.weights" in moved and not any("encoder." in name for name in moved)


def test_the_cost_is_counted(sentences, tmp_path):
    """Each pass of the language model by formula, and the run it was trained in."""
    names = [*battery.WORD_LM, *QUICK, "criterion=language_modeling", "trainer.final_splits=[]"]
    TrainingRun(load_config([*names, f"data={sentences}", f"save_dir={tmp_path / 'lm'}"])).train()
    earlier = json.loads((tmp_path / "lm" / "results.json").read_text())
    run = build(sentences, tmp_path / "run", tmp_path / "lm")
    costs = run.task.further_costs()
    assert costs and [cost["flops"] for cost in costs.values()] == [earlier["flops"]]
    assert earlier["flops"] > 0
    batch = batch_of(run, "chunk")
    meter = FlopMeter()
    with meter.count(batch):
        run.model.read(batch)
    words, width, cells = batch.tokens.numel(), 8, 12
    each = 2 * words * (4 * cells * 2 * width + cells * width)
    assert meter.total == pytest.approx(4 * each, rel=1e-12)


def test_another_vocabulary_is_refused(sentences, reader, tmp_path):
    (tmp_path / "text.txt").write_text("a cat sees a cat\n" * 3)
    data = tmp_path / "data"
    words = ["preprocess", "--words", "--trainpref", f"{tmp_path}/text.txt"]
    assert word_data.main([*words, "--destdir", str(data)]) == 0
    other = word_data.language_model(data, tmp_path / "other")
    with pytest.raises(MetaseqError, match="vocabulary.*--tokenizer-from"):
        build(sentences, tmp_path / "run", other)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("criterion", ["cvt_aux", "word_dropout", "vat"])
def test_cross_view_training_is_refused(criterion, sentences, reader, tmp_path):
    """Its auxiliary modules must not know what the language model has read."""
    more = [f"criterion={criterion}", "model.normalize_words=true"]
    with pytest.raises(MetaseqError, match="supervised training"):
        build(sentences, tmp_path, reader, *more)


def test_elmo_refuses_runs_without_a_language_model(sentences, reader, tmp_path):
    build(sentences, tmp_path / "a", reader, "trainer.max_update=1").train()
    with pytest.raises(MetaseqError, match="has model cnn_bilstm"):
        build(sentences, tmp_path / "b", tmp_path / "a")
    with pytest.raises(MetaseqError, match="no such checkpoint"):
        build(sentences, tmp_path / "b", tmp_path / "nowhere")


def test_a_finished_run_knows_its_language_model(sentences, reader, tmp_path):
    """One with other weights in its place is an error."""
    there = tmp_path / reader.name
    shutil.copytree(reader, there, symlinks=True)
    build(sentences, tmp_path / "run", there).train()
    battery.shift_weights(there)
    again = build(sentences, tmp_path / "run", there)
    with pytest.raises(MetaseqError, match="other language_model"):
        again.train()
