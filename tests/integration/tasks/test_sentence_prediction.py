"""Fine-tuning on labelled sets: what is learnt, what is taken over, how long it runs, what it
writes.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import sentence_sets
import torch
from omegaconf import OmegaConf
from sentence_runs import ELECTRA, FORMS, SMALL, TASK, configure
from torch import Tensor

from metaseq_lm.cli import main
from metaseq_lm.config.transformer import TransformerConfig
from metaseq_lm.core.config import options_of, untyped_section
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.data.benchmarks import Benchmark
from metaseq_lm.data.streams import Shard
from metaseq_lm.evaluation.benchmarks import LabelledItems, labelled_results
from metaseq_lm.evaluation.suites import Results
from metaseq_lm.runs import checkpoint
from metaseq_lm.tasks import finetuning
from metaseq_lm.tasks.finetuning import encoder_sizes
from metaseq_lm.training.run import TrainingRun


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with one learnable set of each form, and the first of them without labels."""
    place = tmp_path_factory.mktemp("sentences")
    sentence_sets.write_corpus(place)
    for form in FORMS:
        sentence_sets.learnable(place / form, form)
    rows = sentence_sets.sentences(np.random.default_rng(1), 12)
    splits = {"train": ([rows], [0, 1] * 6), "valid": ([rows], [1, 0] * 6), "test": ([rows], None)}
    sentence_sets.write_set(place / "hidden", splits, ("no", "yes"))
    return place


def weights(run: TrainingRun) -> dict[str, Tensor]:
    return {name: w.clone() for name, w in run.model.state_dict().items()}


@pytest.mark.parametrize("form", FORMS)
def test_sentence_prediction_learns_an_easy_rule(form, data, tmp_path):
    """Over 95 % on rows not seen in training, for every form, with the recipe of ELECTRA's code."""
    more = ["task.epochs=10", "task.batch_size=16", "trainer.final_splits=[test]"]
    TrainingRun(configure(data, tmp_path, f"task.labelled={form}", *more)).train()
    results = json.loads((tmp_path / "results.json").read_text())
    metrics = results["metrics"]["test"]
    main = "pearson_spearman" if form == "regression" else "accuracy"
    assert list(metrics)[:2] == ["score", main] and metrics["score"] == metrics[main]
    assert metrics["pearson" if form == "regression" else "accuracy"] > 0.95
    rows = [json.loads(r) for r in (tmp_path / "predictions.test.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(256))
    if form == "regression":  # on the scale of the labels, 4 and -6, not on that of the head
        assert np.mean([abs(row["gold"] - row["predicted"]) for row in rows]) < 1
        assert all(row["predicted"] == row["scores"][0] for row in rows)
        return
    right = np.mean([row["gold"] == row["predicted"] for row in rows])
    assert right == metrics["accuracy"]
    assert all(sum(row["scores"]) == pytest.approx(1) for row in rows)


@pytest.mark.parametrize("form", ["choices", "spans", "regression"])
def test_micro_batches_change_nothing(form, data, tmp_path):
    """Dropout too falls on the same numbers, whichever rows of a batch are computed together."""
    more = ["engine.precision=fp64", "trainer.max_update=3", "task.batch_size=6"]
    more += ["optimizer.eps=1e-4", "optimizer.lr=0.002"]
    found = []
    for size in (0, 1, 4):
        options = [f"task.labelled={form}", f"engine.micro_batch_size={size}", *more]
        run = TrainingRun(configure(data, tmp_path / str(size), *options))
        run.train()
        found.append((weights(run), run.trainer.last_valid))
    for other, valid in found[1:]:
        assert max((other[n] - w).abs().max().item() for n, w in found[0][0].items()) <= 1e-11
        assert valid == pytest.approx(found[0][1], abs=1e-9)


# ---------------------------------------------------------------- starting from another run


def finetune(data: Path, save: Path, *more: str) -> TrainingRun:
    return TrainingRun(configure(data, save, "task.labelled=single", "trainer.max_update=2", *more))


def same(run: TrainingRun, others: dict[str, Tensor], beginning: str) -> list[bool]:
    """Return whether each weight with this beginning is the other one, bit for bit."""
    own = run.model.state_dict()
    return [torch.equal(own[n], others[n]) for n in own if n.startswith(beginning)]


@pytest.fixture(scope="module")
def other(data: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """A fine-tuned run on the pairs, with another seed."""
    save = tmp_path_factory.mktemp("other")
    run = TrainingRun(configure(data, save, "task.labelled=pair", "trainer.max_update=6", "seed=7"))
    run.train()
    return run


def test_an_intermediate_task_gives_its_encoder_only(data, other, tmp_path):
    before = finetune(data, tmp_path / "fresh")
    started = finetune(data, tmp_path / "started", f"init_from={other.config.save_dir}")
    trained = weights(other)
    assert all(same(started, trained, "encoder."))
    assert not any(same(before, trained, "encoder.embeddings.tokens"))
    # The head is that of a run that starts from nothing, not the trained one.
    assert all(same(started, weights(before), "heads."))
    assert not all(same(started, trained, "heads."))
    kept = finetune(
        data, tmp_path / "k", f"init_from={other.config.save_dir}", "task.keep_head=true"
    )
    assert all(same(kept, trained, ""))


def inherit(data: Path, save: Path, *more: str) -> TrainingRun:
    """Return a run that names no sizes of its own."""
    plain = [option for option in SMALL if not option.startswith("model.")]
    own = ["task.labelled=single", "trainer.max_update=2", "model=inherit"]
    return TrainingRun(
        load_config([*TASK, *plain, *ELECTRA, *own, f"data={data}", f"save_dir={save}", *more])
    )


def test_the_model_of_init_from_can_be_inherited(data, other, tmp_path):
    """With another dropout if asked; config.yaml has the sizes, so that none is needed later."""
    start = f"init_from={other.folder.path}"
    run = inherit(data, tmp_path / "a", start, "model.changes=['dropout=0.25']")
    before, after = vars(other.config.model), vars(run.config.model)
    assert after == before | {"dropout": 0.25} and before["dropout"] != 0.25
    assert OmegaConf.load(run.folder.path / "config.yaml").model == after
    assert all(same(run, weights(other), "encoder."))


@pytest.mark.parametrize(
    "options, words",
    [
        (["init_from=null"], "takes the model of init_from"),
        (["model.changes=['widht=3']"], "which has no such option"),
    ],
)
def test_inherit_refuses_wrong_options(options, words, data, other, tmp_path):
    with pytest.raises(UsageError, match=words):
        inherit(data, tmp_path, f"init_from={other.folder.path}", *options)


def pretrained_folder(place: Path, own: dict[str, Tensor]) -> str:
    return str(checkpoint.save(place, 1, own, {"update": 1}, {}))


def test_other_models_give_what_they_call_encoder(data, other, tmp_path):
    """An ELECTRA has a generator beside its encoder, and heads of other names; they are left."""
    trained = weights(other)
    more = {f"generator.{n}": w + 1 for n, w in trained.items()}
    lm = {"heads.lm.bias": torch.zeros(24)}
    encoder = {n: w for n, w in trained.items() if n.startswith("encoder.")}
    source = pretrained_folder(tmp_path / "electra", encoder | more | lm)
    assert all(same(finetune(data, tmp_path / "run", f"init_from={source}"), trained, "encoder."))


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda own: {f"student.{n}": w for n, w in own.items()}, "no weights that task"),
        (lambda own: {n: w for n, w in own.items() if "fc1.bias" not in n}, "missing: encoder"),
        (lambda own: {**own, "encoder.more": torch.ones(2)}, "unexpected"),
    ],
)
def test_sentence_prediction_refuses_options_that_do_not_fit(change, words, data, other, tmp_path):
    source = pretrained_folder(tmp_path / "there", change(weights(other)))  # type: ignore[operator]
    with pytest.raises(MetaseqError, match=words):
        finetune(data, tmp_path / "run", f"init_from={source}")


def test_a_kept_head_must_be_there_and_fit(data, other, tmp_path):
    own = weights(other)
    lacking = {n: w for n, w in own.items() if not n.startswith("heads.")}
    for name, changed in (("a", lacking), ("b", own | {"heads.sentence.out.bias": torch.ones(3)})):
        source = pretrained_folder(tmp_path / name, changed)
        with pytest.raises(MetaseqError, match="heads.sentence.out"):
            finetune(data, tmp_path / "run", f"init_from={source}", "task.keep_head=true")


# ---------------------------------------------------------------- epochs


@pytest.mark.parametrize(
    "options, updates",
    [
        (["task.epochs=3", "task.batch_size=32"], 24),
        (["task.epochs=3", "task.batch_size=100"], 9),  # 256 are padded up to 3 batches
        (["task.epochs=0.5", "task.batch_size=100"], 1),
        (["trainer.max_update=7"], 7),
    ],
)
def test_epochs_give_the_updates(options, updates, data, tmp_path):
    run = TrainingRun(configure(data, tmp_path, "task.labelled=pair", *options))
    stored = OmegaConf.load(tmp_path / "config.yaml")
    for config in (run.config, stored):
        assert config.trainer.max_update == config.schedule.total_updates == updates
    factor = run.engine.optimizers["main"].schedule
    assert factor(1) == 0 and factor(updates + 1) == 0 and (updates == 1 or factor(updates) > 0)


def test_a_total_of_its_own_stays(data, tmp_path):
    more = ["task.labelled=pair", "task.epochs=1", "schedule.total_updates=50"]
    run = TrainingRun(configure(data, tmp_path, *more))
    assert (run.config.trainer.max_update, run.config.schedule.total_updates) == (8, 50)


def test_a_run_with_epochs_goes_on(data, tmp_path):
    """The same command again is the same run, and ends where the uninterrupted one does."""
    more = ["task.labelled=single", "task.epochs=1", "trainer.save_interval_updates=3"]
    straight = TrainingRun(configure(data, tmp_path / "straight", *more))
    straight.train()
    part = TrainingRun(configure(data, tmp_path / "cut", *more))
    part.trainer.options.max_update = 5  # as if it had been stopped there
    part.train()
    (tmp_path / "cut" / "results.json").unlink()
    resumed = TrainingRun(configure(data, tmp_path / "cut", *more))
    assert resumed.config.trainer.max_update == 8
    resumed.train()
    assert all(same(resumed, weights(straight), ""))


def test_too_few_epochs(data, tmp_path):
    for epochs, message in (("0.1", "less than one update"), ("-1", "at least 0")):
        with pytest.raises(UsageError, match=message):
            TrainingRun(configure(data, tmp_path, "task.labelled=single", f"task.epochs={epochs}"))


# ---------------------------------------------------------------- what is written


@pytest.fixture(scope="module")
def hidden(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a set whose test split has no labels."""
    save = tmp_path_factory.mktemp("hidden")
    more = ["task.labelled=hidden", "trainer.max_update=2", "trainer.final_splits=[valid,test]"]
    TrainingRun(configure(data, save, *more)).train()
    return save


def test_a_split_without_labels_is_only_predicted(hidden, tmp_path):
    assert json.loads((hidden / "results.json").read_text())["metrics"]["test"] == {}
    rows = [json.loads(r) for r in (hidden / "predictions.test.jsonl").read_text().splitlines()]
    assert len(rows) == 12 and {row["gold"] for row in rows} == {None}
    assert {row["predicted"] for row in rows} <= {"no", "yes"}
    place = ["evaluate", str(hidden), "--split", "test", "--out", str(tmp_path)]
    assert main(place) == 0
    assert (tmp_path / "predictions.test.jsonl").read_text() == (
        hidden / "predictions.test.jsonl"
    ).read_text()


def test_training_on_it_is_a_mistake(data, tmp_path):
    rows = sentence_sets.sentences(np.random.default_rng(1), 4)
    sentence_sets.write_set(tmp_path / "data" / "s", {"train": ([rows], None)}, ("no", "yes"))
    sentence_sets.write_corpus(tmp_path / "data")
    more = ["task.labelled=s", "trainer.valid_split=''"]
    run = TrainingRun(configure(tmp_path / "data", tmp_path / "run", *more))
    with pytest.raises(MetaseqError, match="no labels to"):
        run.train()


def test_a_benchmark_scores_and_writes_its_file(data, tmp_path, monkeypatch):
    """Official metrics instead of the plain ones, and a leaderboard file for what has no labels."""
    scored = []

    def spied_results(items: LabelledItems, scores: np.ndarray) -> Results:
        scored.append((items.benchmark.name, items.gold.tolist(), scores.shape, items.names))
        return labelled_results(items, scores)

    def submission(benchmark: Benchmark, split: str, scores: np.ndarray, *more: object) -> tuple:
        return "CoLA.tsv", f"{benchmark.name} {split} {scores.shape} {more}"

    monkeypatch.setattr(finetuning, "labelled_results", spied_results)
    monkeypatch.setattr(finetuning, "format_submission", submission)
    rows = sentence_sets.sentences(np.random.default_rng(1), 6)
    gold = [0, 1, 1, 0, 0, 1]
    splits = {"train": ([rows], gold), "valid": ([rows], gold), "test": ([rows], None)}
    sentence_sets.write_corpus(tmp_path / "data")
    place = tmp_path / "data" / "s"
    sentence_sets.write_set(place, splits, ("0", "1"), form="single", benchmark="glue/CoLA")
    more = ["task.labelled=s", "trainer.max_update=2", "trainer.final_splits=[valid,test]"]
    TrainingRun(configure(tmp_path / "data", tmp_path / "run", *more)).train()
    assert scored[-1] == ("glue/CoLA", gold, (6, 2), ["0", "1"])
    valid = json.loads((tmp_path / "run" / "results.json").read_text())["metrics"]["valid"]
    assert list(valid) == ["score", "matthews", "cross_entropy", "accuracy", "loss"]
    written = (tmp_path / "run" / "CoLA.tsv").read_text()
    assert written == "glue/CoLA test (6, 2) (None, ['0', '1'])"


def test_real_values_without_the_training_split(data, tmp_path):
    """The range of the training labels comes with the weights, so other data need not hold it."""
    run = TrainingRun(
        configure(data, tmp_path / "run", "task.labelled=regression", "trainer.max_update=2")
    )
    run.train()
    metrics, rows = run.parts.score("valid")
    sentence_sets.write_corpus(tmp_path / "other")
    found = run.task.labelled("valid").data  # type: ignore[attr-defined]
    texts = [[column[i].tolist() for i in range(len(found))] for column in found.inputs]
    split = {"valid": (texts, found.labels.tolist())}
    sentence_sets.write_set(tmp_path / "other" / "regression", split, form="single")
    place = ["evaluate", str(tmp_path / "run"), "--split", "valid", "--out", str(tmp_path / "out")]
    assert main([*place, "--data", str(tmp_path / "other")]) == 0
    again = (tmp_path / "out" / "predictions.valid.jsonl").read_text().splitlines()
    assert [json.loads(row) for row in again] == sorted(rows, key=lambda row: row["index"])


def test_batches_of_rows_of_one_length(data, tmp_path):
    """With task.group_by_length the same rows make batches with less padding."""
    places = {}
    for grouped in (False, True):
        words = ("task.labelled=single", f"task.group_by_length={grouped}")
        run = TrainingRun(configure(data, tmp_path / str(grouped), *words))
        stream = run.task.build_streams("train")["train"]
        epoch = [stream.micro_batches(i, Shard())[0] for i in range(stream.order.per_epoch)]  # type: ignore[attr-defined]
        samples = [sample for batch in epoch for sample in batch.samples.tolist()]
        assert sorted(samples) == list(range(len(samples)))
        places[grouped] = sum(batch.tokens.numel() for batch in epoch)
    tokens = int(stream.lengths.sum())
    assert places[True] - tokens < (places[False] - tokens) / 2


def test_valid_size_is_of_validation_only(data, tmp_path):
    task = TrainingRun(configure(data, tmp_path, "task.labelled=single", "task.valid_size=40")).task
    lengths = {s: len(task.build_streams(s)[s].order) for s in ("valid", "test")}  # type: ignore[arg-type]
    assert lengths == {"valid": 2, "test": 8}


@pytest.mark.parametrize(
    "options, words",
    [
        (["criterion=masked_lm", "task.labelled=single"], "needs criterion=sentence_prediction"),
        ([], "give task.labelled=NAME"),
        (["task.labelled=single", "task.tokens_per_sample=64"], "max_positions is 32"),
    ],
)
def test_mistakes(options, words, data, tmp_path):
    with pytest.raises(MetaseqError, match=words):
        TrainingRun(configure(data, tmp_path, *options)).train()


def test_models_with_more_options_have_the_same_encoder(data, tmp_path):
    """Of an ELECTRA's options those of its encoder count; a model without them is refused."""
    config = configure(data, tmp_path, "task.labelled=single")
    sizes = options_of(config.model)
    config.model = untyped_section({**sizes, "_name": "x", "generator_size": 0.25})
    assert encoder_sizes(config) == TransformerConfig(**sizes)
    config.model = untyped_section({"_name": "recurrent", "layers": 2})
    with pytest.raises(UsageError, match="'recurrent'.*encoder_layers"):
        encoder_sizes(config)


@pytest.mark.parametrize("form", FORMS)
def test_low_precision(form, data, tmp_path):
    """bfloat16 changes numbers a little, nothing else: losses and scores stay in full precision."""
    more = [f"task.labelled={form}", "engine.precision=bf16", "trainer.max_update=3"]
    run = TrainingRun(configure(data, tmp_path, *more))
    run.train()
    _, rows = run.parts.score("valid")
    if form != "regression":
        assert all(sum(row["scores"]) == pytest.approx(1, abs=1e-9) for row in rows)
