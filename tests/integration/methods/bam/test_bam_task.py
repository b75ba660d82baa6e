"""BAM in whole runs: scores and files by set, epochs, what is taken over, resuming, mistakes."""

import json
import shutil
from pathlib import Path

import bam_bench
import battery
import numpy as np
import pytest
import sentence_sets
import torch
from scipy.stats import spearmanr

from metaseq_lm.cli import main
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.evaluation.classification import matthews
from metaseq_lm.methods.bam.task import _with_score
from metaseq_lm.runs import checkpoint, manifests

CUT = ["trainer.save_interval_updates=1", "criterion.total_updates=8"]


def rows_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_single_to_multi_on_two_sets(bam_sets, tmp_path):
    """Two teachers of one set each, then one student of both, as commands: it has learnt both."""
    common = [str(bam_sets), *bam_bench.OPTIONS, "optimizer.clip_norm=1"]
    common += ["task.epochs=12", "task.validate_epochs=3", "trainer.final_splits=[test]"]
    common += ["model.encoder_embed_dim=32"]
    for name in ("words", "values"):
        save = ["--save-dir", str(tmp_path / name), f"task.labelled=[{name}]"]
        assert main(["train", *common, *save]) == 0
    teaching = f"task.teachers=[{tmp_path / 'words'},{tmp_path / 'values'}]"
    both = ["task.labelled=[words,values]", "task.epochs=10", teaching]
    save = tmp_path / "student"
    assert main(["train", *common, *both, "--save-dir", str(save)]) == 0
    results = json.loads((save / "results.json").read_text())
    assert results["updates"] == 9 * 10
    test = results["metrics"]["test"]
    assert test["words_score"] == test["words_accuracy"] > 0.9
    assert test["values_score"] == test["values_spearman"] > 0.7
    assert test["score"] == pytest.approx((test["words_score"] + test["values_score"]) / 2)
    shares = [line["gold_share"] for line in bam_bench.logged(save)]
    assert shares == pytest.approx(np.arange(90) / 90) and shares[0] == 0
    best = max(line["score"] for line in bam_bench.logged(save, "valid"))
    assert manifests.read_manifest(manifests.resolve(str(save), "best"))["valid"]["score"] == best
    assert sorted(f.name for f in save.glob("predictions*")) == [
        "predictions.test.values.jsonl",
        "predictions.test.words.jsonl",
    ]
    rows = rows_of(save / "predictions.test.words.jsonl")
    assert [row["index"] for row in rows] == list(range(96)) and rows[0]["set"] == "words"
    assert np.mean([r["gold"] == r["predicted"] for r in rows]) == test["words_accuracy"]
    rows = rows_of(save / "predictions.test.values.jsonl")
    gold, predicted = ([r[k] for r in rows] for k in ("gold", "predicted"))
    assert spearmanr(gold, predicted).statistic == pytest.approx(test["values_score"])
    # Predictions are on the scale of the labels, losses on that of the head.
    errors = np.subtract(gold, predicted) / 4
    assert (errors**2).mean() == pytest.approx(test["values_loss"], rel=1e-4)
    out = ["--out", str(tmp_path / "again"), "--split", "test"]
    assert main(["evaluate", str(save), *out]) == 0
    file = "predictions.test.values.jsonl"
    assert (tmp_path / "again" / file).read_bytes() == (save / file).read_bytes()


@pytest.fixture(scope="module")
def benchmarks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CoLA and STS-B in name, each with a test split without labels, and RTE without one."""
    place = tmp_path_factory.mktemp("benchmarks")
    sentence_sets.write_corpus(place)
    draw = np.random.default_rng(0)
    texts = {name: sentence_sets.sentences(draw, 20) for name in "abc"}
    classes, real = draw.integers(0, 2, 20).tolist(), draw.uniform(0, 5, 20).tolist()
    for name, columns, gold, labels in (
        ("CoLA", [texts["a"]], classes, ("0", "1")),
        ("STS-B", [texts["a"], texts["b"]], real, ()),
        ("RTE", [texts["b"], texts["c"]], classes, ("entailment", "not_entailment")),
    ):
        splits = {"train": (columns, gold), "valid": (columns, gold)}
        if name != "RTE":
            splits["test"] = (columns, None)
        form = "single" if len(columns) == 1 else "pair"
        about = {"form": form, "benchmark": f"glue/{name}"}
        sentence_sets.write_set(place / name, splits, labels, **about)
        manifest = Manifest.load(place / name)
        for split in splits:
            lines = "".join(json.dumps({"idx": number}) + "\n" for number in range(20))
            (place / name / f"{split}.rows.jsonl").write_text(lines)
            manifest.add_files(place / name, [f"{split}.rows.jsonl"])
        manifest.save(place / name)
    return place


GLUE = "task.labelled=[CoLA,STS-B,RTE]"


def test_benchmarks_have_their_scores_and_files(benchmarks, tmp_path):
    """Matthews, Spearman and accuracy, recomputed from the predictions; a leaderboard file each."""
    more = ["trainer.final_splits=[valid,test]"]
    bam_bench.train(benchmarks, tmp_path, GLUE, *more)
    valid = json.loads((tmp_path / "results.json").read_text())["metrics"]["valid"]
    rows = {n: rows_of(tmp_path / f"predictions.valid.{n}.jsonl") for n in ("CoLA", "STS-B", "RTE")}
    sides = {n: [[r[k] for r in own] for k in ("gold", "predicted")] for n, own in rows.items()}
    wanted = {
        "CoLA": matthews(*([int(x) for x in side] for side in sides["CoLA"])),
        "STS-B": spearmanr(*sides["STS-B"]).statistic,
        "RTE": np.mean([a == b for a, b in zip(*sides["RTE"])]),
    }
    for name, value in wanted.items():
        assert valid[f"{name}_score"] == pytest.approx(value, abs=1e-12)
    assert list(valid)[:2] == ["score", "loss"]
    assert valid["score"] == pytest.approx(np.mean(list(wanted.values())))
    names = {f.name for f in tmp_path.iterdir()}
    assert {"CoLA.tsv", "STS-B.tsv", "predictions.test.CoLA.jsonl"} <= names
    assert not names & {"RTE.tsv", "predictions.test.RTE.jsonl"}


def test_an_ensemble_is_one_of_each_set(benchmarks, tmp_path):
    for seed in (1, 2):
        bam_bench.train(benchmarks, tmp_path / str(seed), GLUE, f"seed={seed}")
    runs = [str(tmp_path / str(seed)) for seed in (1, 2)]
    out = tmp_path / "out"
    assert main(["evaluate", *runs, "--ensemble", "--split", "valid", "--out", str(out)]) == 0
    metrics = json.loads((out / "metrics.valid.json").read_text())
    one, other = (open_rows(run, "STS-B") for run in runs)
    mean = [(a["predicted"] + b["predicted"]) / 2 for a, b in zip(one, other)]
    rows = rows_of(out / "predictions.valid.STS-B.jsonl")
    assert [r["predicted"] for r in rows] == pytest.approx(mean)
    assert metrics["STS-B_score"] == pytest.approx(
        spearmanr(mean, [r["gold"] for r in rows]).statistic
    )
    assert metrics["score"] == pytest.approx(
        np.mean([metrics[f"{n}_score"] for n in ("CoLA", "STS-B", "RTE")])
    )


def open_rows(run: str, name: str) -> list[dict]:
    from metaseq_lm.training.restore import open_run

    rows = [row for row in open_run(run).score("valid")[1] if row["set"] == name]
    return sorted(rows, key=lambda row: row["index"])


# ---------------------------------------------------------------- mixing


@pytest.mark.parametrize(
    "more, rows, weights",
    [
        ([], 160, [1, 1, 1]),
        (["task.sampling=legacy_copies"], 96 + 24 + 40, [0.820, 1.160, 1.020]),  # |D|^-0.25
        (["task.sampling=legacy_copies", "task.exponent=0"], 96 + 4 * 24 + 2 * 40, None),
        (
            ["task.sampling=legacy_copies", "task.labelled=[few]", "task.copies_over=[words]"],
            24,
            [1],
        ),
    ],
)
def test_epochs_are_of_what_is_drawn(more, rows, weights, bam_sets):
    """Three epochs of all rows, or of all copies; a set alone has neither copies nor a weight."""
    run = bam_bench.dry(bam_sets, "task.epochs=3", "schedule=linear", *more)
    assert run.config.schedule.total_updates == run.config.criterion.total_updates
    assert run.config.criterion.total_updates == -(-rows // 16) * 3
    counts, found = run.task.mixing()
    assert sum(counts) == rows
    assert weights is None or list(found.values()) == pytest.approx(weights, abs=1e-3)


def test_copies_can_be_counted_over_more_sets(bam_sets):
    """A subset is weighed as in a run on all of them, if asked; the largest set is its anchor."""
    more = ["task.sampling=legacy_copies", "task.exponent=0", "task.labelled=[few,values]"]
    own = bam_bench.dry(bam_sets, *more).task.mixing()
    all_sets = bam_bench.dry(bam_sets, *more, "task.copies_over=[words]").task.mixing()
    assert own[0] == [48, 40] and all_sets[0] == [96, 80]
    three = bam_bench.dry(bam_sets, *more[:2]).task.mixing()
    assert {n: all_sets[1][n] for n in ("few", "values")} == pytest.approx(
        {n: three[1][n] for n in ("few", "values")}
    )


# ---------------------------------------------------------------- going on


def test_resumed_in_the_middle_the_share_goes_on(bam_sets, teacher_runs, tmp_path):
    """Bit for bit, with dropout; the share of the gold labels at every update, too."""
    given = f"task.teachers=[{','.join(map(str, teacher_runs))}]"
    straight = bam_bench.train(bam_sets, tmp_path / "a", given, *CUT, "trainer.max_update=8")
    for last in (3, 8):
        run = bam_bench.train(bam_sets, tmp_path / "b", given, *CUT, f"trainer.max_update={last}")
    assert bam_bench.difference(bam_bench.weights(straight), bam_bench.weights(run)) == 0
    for name in ("a", "b"):
        shares = [line["gold_share"] for line in bam_bench.logged(tmp_path / name)]
        assert shares == pytest.approx(np.arange(8) / 8)


def test_a_longer_annealing_is_another_run(bam_sets, teacher_runs, tmp_path):
    given = f"task.teachers=[{','.join(map(str, teacher_runs))}]"
    bam_bench.train(bam_sets, tmp_path, given, "trainer.max_update=2")
    with pytest.raises(UsageError, match="criterion.total_updates is 2.*6"):
        bam_bench.train(bam_sets, tmp_path, given, "trainer.max_update=6")


def test_a_finished_student_knows_its_teachers(bam_sets, teacher_runs, tmp_path, capsys):
    """Others are an error; wherever the teacher lies now, or if it is gone, the run is finished."""
    there = tmp_path / "there"
    shutil.copytree(teacher_runs[1], there, symlinks=True)

    def train(teacher: Path) -> None:
        given = [f"task.teachers=[{teacher}]", "task.labelled=[few]", "trainer.max_update=1"]
        bam_bench.train(bam_sets, tmp_path / "run", *given)

    train(there)
    capsys.readouterr()
    for teacher in (teacher_runs[1], there):
        train(teacher)
        assert "is finished already" in capsys.readouterr().out
    battery.shift_weights(there)
    with pytest.raises(MetaseqError, match="other teachers"):
        train(there)
    shutil.rmtree(there)
    train(there)


@pytest.mark.parametrize("kept", [False, True])
def test_single_task_fine_tuning_takes_over_encoder_and_head(
    kept, bam_sets, teacher_runs, tmp_path
):
    """The encoder and the pooler of a run on several sets; the set's head with keep_head."""
    start = [f"init_from={teacher_runs[0]}", "task.labelled=[values]", f"task.keep_head={kept}"]
    run = bam_bench.dry(bam_sets, *start)
    before = checkpoint.load(manifests.resolve(str(teacher_runs[0]))).weights
    own = run.model.state_dict()
    for name in own:
        if not name.startswith("ranges."):
            same = torch.equal(own[name], before[name])
            assert same == (kept or not name.startswith("heads.sets."))
    assert own["ranges.set_values"].tolist() == [-6.0, 4.0]


@pytest.mark.parametrize("kept, wanted", [(True, [-6.0, 4.0]), (False, [0.0, 5.0])])
def test_a_kept_head_keeps_its_range(kept, wanted, bam_sets, teacher_runs, tmp_path):
    """On rows with another range its outputs mean what they meant; a fresh one takes theirs."""
    data = Path(shutil.copytree(bam_sets, tmp_path / "data"))
    shutil.rmtree(data / "values")
    draw = np.random.default_rng(0)
    rows = ([sentence_sets.sentences(draw, 8)], [0.0, 5.0] * 4)
    splits = {"train": rows, "valid": rows}
    sentence_sets.write_set(data / "values", splits, (), form="single")
    start = [f"init_from={teacher_runs[0]}", "task.labelled=[values]", f"task.keep_head={kept}"]
    assert bam_bench.dry(data, *start).model.ranges.set_values.tolist() == wanted


def test_the_pooler_of_pre_training_is_taken(bam_sets, tmp_path):
    own = bam_bench.weights(bam_bench.dry(bam_sets))
    given = {n: w + 1 for n, w in own.items() if n.startswith("encoder.")}
    given |= {
        f"heads.next_sentence.pooler.{n}": own[f"heads.pooler.{n}"] + 1 for n in ("weight", "bias")
    }
    given["heads.lm.bias"] = torch.zeros(3)
    source = checkpoint.save(tmp_path, 1, given, {"update": 1}, {})
    run = bam_bench.dry(bam_sets, f"init_from={source}")
    found = run.model.state_dict()
    assert torch.equal(found["heads.pooler.weight"], own["heads.pooler.weight"] + 1)
    bare = bam_bench.dry(bam_sets, f"init_from={source}", "task.pooled=false")
    assert not [n for n in bare.model.state_dict() if "pooler" in n]


def test_a_kept_head_must_be_there(bam_sets, teacher_runs):
    with pytest.raises(MetaseqError, match="for words; .*few"):
        start = [f"init_from={teacher_runs[1]}", "task.keep_head=true"]
        bam_bench.dry(bam_sets, *start, "task.labelled=[words]")


@pytest.mark.parametrize(
    "options, words",
    [
        (["task.labelled=[]"], "give task.labelled"),
        (["task.labelled=[few,few]"], "different labelled sets"),
        (["task.sampling=samplr"], "Did you mean 'sampler'"),
        (["task.exponent=1.5"], "task.exponent .*at most 1"),
        (["criterion=masked_lm"], "needs criterion=bam_distill"),
        (["task.labelled=[choices]"], "has the form choices"),
        (["task.batch_size=0"], "at least 1"),
        (["task.tokens_per_sample=64"], "max_positions is 32"),
        (["task.labelled=[words/few]"], "without dots and slashes"),
        (["task.copies_over=[few]", "task.labelled=[words]"], "legacy_copies only"),
        (["criterion.total_updates=-1"], "at least 0"),
        (["trainer.final_splits=[train]"], "'train' is endless"),
        (["trainer.valid_split=more"], "no split 'more'"),
        (["task.labelled=[values]", "criterion.sigmoid=true"], "labels from -[0-9.]+ on; divided"),
    ],
)
def test_mistakes(options, words, bam_sets, tmp_path):
    data = Path(shutil.copytree(bam_sets, tmp_path / "data"))
    sentence_sets.learnable(data / "choices", "choices", 8)
    with pytest.raises(MetaseqError, match=words):
        bam_bench.train(data, tmp_path / "run", *options)


def test_a_set_without_a_score_of_the_papers_has_its_official_one():
    """As MultiRC; elsewhere the paper's choice stays."""
    assert _with_score({"score": 0.3, "f1a": 0.3, "exact_match": 0.1})["score"] == 0.3
    assert _with_score({"score": 0.3, "f1": 0.3, "accuracy": 0.6})["score"] == 0.6


def test_totals_follow_only_where_that_is_their_default(bam_sets):
    """task.epochs moves trainer.max_update, and a total that was given stays."""
    more = ["task.epochs=2", "trainer.max_update=8", "schedule=polynomial"]
    free, fixed = (
        bam_bench.dry(bam_sets, *more, *given).config
        for given in ([], ["criterion.total_updates=9"])
    )
    assert free.criterion.total_updates == free.schedule.total_updates == 20
    assert (fixed.criterion.total_updates, fixed.schedule.total_updates) == (9, 20)


def test_a_split_that_nobody_has(bam_sets, teacher_runs):
    with pytest.raises(MetaseqError, match="words, values .*'more'"):
        main_or_raise(["evaluate", str(teacher_runs[0]), "--split", "more"])


def main_or_raise(words: list[str]) -> None:
    from metaseq_lm.training.restore import open_run

    open_run(words[1]).score(words[3])
