"""Outputs of teachers: equal to a plain pass, stored once, refused where they are not of these
rows.
"""

import json
import shutil
import signal
from pathlib import Path

import bam_bench
import bam_data
import numpy as np
import pytest
import safetensors.numpy
import sentence_sets
import torch
from bam_bench import NAMES, copied, given, stored

from metaseq_lm.cli import main
from metaseq_lm.core.errors import Interrupted, MetaseqError, UsageError
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.distributed import signals
from metaseq_lm.methods.bam import teachers
from metaseq_lm.reporting.runs import read_run
from metaseq_lm.training.parts import prepare_config
from metaseq_lm.training.price import resolve_budget
from metaseq_lm.training.restore import open_run


@pytest.fixture(scope="module")
def student(
    bam_sets: Path, teacher_runs: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Path]]:
    """A student of copies of the teachers, and those copies with their outputs."""
    place = tmp_path_factory.mktemp("student")
    copies = copied(teacher_runs, place)
    bam_bench.train(bam_sets, place / "run", given(copies), "trainer.max_update=2")
    return place / "run", copies


@pytest.mark.parametrize("rows", [1, 7])
def test_outputs_are_those_of_a_pass_without_dropout(rows, student, bam_sets):
    """Row by row of the set, whatever was computed together; fp32."""
    files = stored(student[1])
    assert sorted(files) == sorted(NAMES)
    for name, file in files.items():
        outputs = safetensors.numpy.load_file(file)["outputs"]
        teacher = open_run(str(file.parents[2]))
        assert float(teacher.model.heads.dropout.p) == 0.1
        found = LabelledSet(bam_sets / name, "train")
        assert outputs.dtype == np.float32 and len(outputs) == len(found)
        teacher.model.eval()
        for some in np.split(np.arange(len(found)), range(rows, len(found), rows)):
            batch = teacher.task.labelled(name, "train").batch(some, some)
            with torch.no_grad():
                outputs_now = teacher.model(batch.tokens, batch.layout, batch.segments)
                wanted = outputs_now[name].numpy()
            if name == "values":  # on the scale of the labels, which are from -6 to 4
                wanted = wanted * 4 - 6
            assert np.abs(outputs[some] - wanted).max() < 4e-6


def test_batch_size_changes_nothing(teacher_runs, bam_sets):
    teacher, found = teachers.resolve(str(teacher_runs[0])), []
    for more in (["task.batch_size=5"], ["task.batch_size=64", "engine.micro_batch_size=3"]):
        run = open_run(str(teacher.checkpoint), None, None, [*more, "engine.precision=fp64"])
        found.append(teachers._compute_outputs(run, teacher, "words")[0])
    assert np.abs(found[0] - found[1]).max() <= 1e-7 and np.ptp(found[0]) > 0


def test_each_row_meets_its_own_teacher(student, bam_sets):
    files = stored(student[1])
    tables = {n: safetensors.numpy.load_file(files[n])["outputs"] for n in NAMES}
    run = bam_bench.dry(bam_sets, given(student[1]))
    (batch,) = run.task.build_streams("train")["train"].micro_batches(3, run.shard)
    first = np.cumsum([0, *(len(tables[n]) for n in NAMES)])
    for sample, number, output in zip(
        *(values.tolist() for values in (batch.samples, batch.sets, batch.teacher))
    ):
        own = tables[NAMES[number]][sample - first[number]]
        assert output == pytest.approx([*own, 0][:2])


def test_a_student_is_no_twin_of_its_teacher(student, bam_sets):
    """Of the same seed: other first weights, but for init_from, and other rows in a batch."""
    taught, again, plain = (
        bam_bench.dry(bam_sets, *more) for more in ([given(student[1])], [given(student[1])], [])
    )
    names = [name for name, weight in taught.model.heads.named_parameters() if weight.dim() > 1]
    assert len(names) == 1 + len(NAMES)  # the pooler too
    for name in (f"heads.{name}" for name in names):
        weight = taught.model.get_parameter(name)
        assert torch.equal(weight, again.model.get_parameter(name))
        assert not torch.equal(weight, plain.model.get_parameter(name))
    first, repeated, other = (
        run.task.build_streams("train")["train"].order.batch(0) for run in (taught, again, plain)
    )
    assert np.array_equal(first, repeated) and not np.array_equal(first, other)


def test_stored_outputs_are_reused_and_kept(student, bam_sets, tmp_path):
    """A second student computes nothing; a folder of outputs serves as well as the run."""
    before = {n: f.stat().st_mtime_ns for n, f in stored(student[1]).items()}
    first = bam_bench.dry(bam_sets, given(student[1]))
    folder = tmp_path / "stored"
    folder.mkdir()
    for file in stored(student[1]).values():
        shutil.copy(file, folder)
    other = bam_bench.dry(bam_sets, given([folder]))
    one, two = (r.task.build_streams("train")["train"].collate.__self__ for r in (first, other))
    assert np.array_equal(one.teachers, two.teachers)
    assert before == {n: f.stat().st_mtime_ns for n, f in stored(student[1]).items()}


def changed(data: Path, place: Path, name: str, rows: int) -> Path:
    """Return a copy of the data in which the set `name` is another one."""
    copy = Path(shutil.copytree(data, place / "data"))
    shutil.rmtree(copy / name)
    sentence_sets.learnable(copy / name, bam_bench.SETS[name][0], rows, seed=9)
    return copy


@pytest.mark.parametrize("rows", [24, 30])
def test_stored_outputs_of_other_rows_are_refused(rows, student, bam_sets, tmp_path):
    data = changed(bam_sets, tmp_path, "few", rows)
    with pytest.raises(MetaseqError, match="few.train.safetensors: .*rows.*data: "):
        bam_bench.train(data, tmp_path / "run", given(student[1]))


def test_stored_outputs_of_other_weights_are_refused(student, bam_sets, tmp_path):
    """A teacher trained anew under the same name is another teacher."""
    copy = Path(shutil.copytree(student[1][1], tmp_path / "t", symlinks=True))
    for part in ("checkpoints", "results.json", "config.yaml"):
        shutil.rmtree(copy / part) if (copy / part).is_dir() else (copy / part).unlink()
    place = stored(student[1])["few"].parent.name
    last = f"trainer.max_update={int(place.partition('_')[2])}"
    bam_bench.train(bam_sets, copy, "task.labelled=[few]", last, "seed=6")
    assert stored([copy])["few"].parent.name == place
    with pytest.raises(MetaseqError, match="weights: "):
        bam_bench.train(bam_sets, tmp_path / "run", "task.labelled=[few]", given([copy]))


@pytest.mark.parametrize("damage", ["cut", "flip", "text", "wide"])
def test_damage_is_found(damage, bam_sets, tmp_path):
    bam_data.write_outputs(bam_sets, tmp_path / "stored", NAMES)
    file = tmp_path / "stored" / "few.train.safetensors"
    content = bytearray(file.read_bytes())
    if damage == "wide":
        found = LabelledSet(bam_sets / "few", "train")
        about = teachers.describe(bam_sets / "few", found, None)
        file.unlink()
        teachers.store(file, np.zeros((len(found), 5)), about)
    else:
        content[-9] ^= 1
        file.write_bytes({"cut": content[:-8], "flip": content, "text": b"no tensor"}[damage])
    with pytest.raises(MetaseqError, match="few.train.safetensors: (not|.*other rows)"):
        bam_bench.train(bam_sets, tmp_path / "run", given([tmp_path / "stored"]))


def test_outputs_that_are_not_finite_are_refused(tmp_path):
    with pytest.raises(MetaseqError, match="not finite"):
        teachers.store(tmp_path / "x", np.array([[np.nan]]), {"set": "few"})
    assert not list(tmp_path.iterdir())


def test_a_set_has_exactly_one_teacher(teacher_runs, bam_sets, tmp_path):
    """Before anything is written; with the way out."""
    save = tmp_path / "run"
    for teaching, words in (
        (teacher_runs[:1], "none of .* teaches few"),
        ([*teacher_runs, teacher_runs[0]], "both .* teach words"),
        ([tmp_path], "no checkpoint"),
    ):
        with pytest.raises(MetaseqError, match=words):
            bam_bench.train(bam_sets, save, given(teaching))
    assert not save.exists()


def test_a_run_of_another_task_is_no_teacher(bam_sets, tmp_path):
    more = ["task=sentence_prediction", "criterion=sentence_prediction", "task.labelled=words"]
    options = [o for o in bam_bench.OPTIONS if not o.startswith(("task=", "criterion="))]
    config = bam_bench.load_config(
        [*more, *options, f"data={bam_sets}", f"save_dir={tmp_path / 'a'}"]
    )
    bam_bench.TrainingRun(config).train()
    with pytest.raises(MetaseqError, match="task sentence_prediction"):
        bam_bench.train(bam_sets, tmp_path / "b", given([tmp_path / "a"]))


@pytest.mark.parametrize("use", ["teacher", "keep_head"])
def test_classes_in_another_order_are_refused(use, teacher_runs, bam_sets, tmp_path):
    """Rows and number of classes are the same, but every output means the other one."""
    data = Path(shutil.copytree(bam_sets, tmp_path / "data"))
    manifest = Manifest.load(data / "words")
    manifest.details["labels"].reverse()
    manifest.save(data / "words")
    more = [given(teacher_runs[:1])]
    if use == "keep_head":
        more = [f"init_from={teacher_runs[0]}", "task.keep_head=true"]
    with pytest.raises(MetaseqError, match="words with.*classes.*--labels"):
        bam_bench.train(data, tmp_path / "run", "task.labelled=[words]", *more)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_cost_of_a_student_includes_its_teachers(bam_sets, tmp_path):
    """All runs behind it and its teachers' passes, their encoder once; unknown stays unknown."""
    bam_bench.train(bam_sets, tmp_path / "encoder", "task.labelled=[words]")
    start = f"init_from={tmp_path / 'encoder'}"
    teaching = [bam_bench.teacher(tmp_path, bam_sets, name, more=[start]) for name in NAMES[:2]]
    both = ["task.labelled=[words,few]", given(teaching), start]
    for name in ("one", "two"):
        bam_bench.train(bam_sets, tmp_path / name, *both, "trainer.max_update=1")
    runs = [tmp_path / "encoder", *teaching]
    results = {run: json.loads((run / "results.json").read_text()) for run in runs}
    one, two = (json.loads((tmp_path / n / "results.json").read_text()) for n in ("one", "two"))
    before = one["pretraining"]
    files = {str(file.resolve()) for file in stored(teaching).values()}
    assert before["runs"].keys() == {str(run.resolve()) for run in runs} | files
    assert before["updates"] == sum(found["updates"] for found in results.values()) == 8
    passes = sum(before["runs"][file]["flops"] for file in files)
    assert before["flops"] == sum(found["flops"] for found in results.values()) + passes
    # An update has three times the products of a pass; rows are padded to their batch.
    update = results[teaching[0]]["flops"] / (2 * 16)
    words = before["runs"][str(stored(teaching)["words"].resolve())]["flops"]
    assert 0.2 < words / 96 / update < 0.5
    assert two["pretraining"] == before
    run = read_run(tmp_path / "one")
    assert run.costs["flops"] == before["flops"] + one["flops"]
    assert run.costs["own_flops"] == one["flops"]
    (teaching[0] / "results.json").unlink()
    stored(teaching)["words"].unlink()
    with pytest.raises(UsageError, match="teacher_words is not"):
        bam_bench.train(bam_sets, tmp_path / "three", *both, "trainer.max_update=1")
    named = given([teaching[0] / "checkpoints" / "best", teaching[1]])
    bam_bench.train(bam_sets, tmp_path / "three", *both, named, "trainer.max_update=1")
    run = read_run(tmp_path / "three")
    assert run.results["pretraining"]["runs"] is None and run.was_pretrained
    assert run.costs["flops"] is None and run.costs["own_flops"] is not None


def test_a_trial_writes_no_outputs(teacher_runs, bam_sets, tmp_path):
    """--dry-run, and the update that trainer.max_flops makes for its price."""
    copies = copied(teacher_runs, tmp_path)
    command = ["train", str(bam_sets), *bam_bench.OPTIONS, bam_bench.ALL, given(copies)]
    assert main([*command, "--dry-run"]) == 0
    more = [given(copies), "trainer.max_update=0", "trainer.max_flops=1e9"]
    config = resolve_budget(prepare_config(bam_bench.configure(bam_sets, tmp_path / "run", *more)))
    assert config.trainer.max_update > 1
    assert config.criterion.total_updates == config.trainer.max_update
    assert not stored(copies)


def test_a_signal_is_heard_while_outputs_are_computed(
    teacher_runs, bam_sets, tmp_path, monkeypatch, capsys
):
    copies = copied(teacher_runs, tmp_path)
    monkeypatch.setattr(signals, "last_signal", lambda: signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM while.*outputs") as found:
        # No metric, for which a validation at the start would be the first to hear it.
        more = "trainer.best_checkpoint_metric=''"
        bam_bench.train(bam_sets, tmp_path / "run", given(copies), more)
    assert found.value.signal == signal.SIGTERM and not stored(copies)
    monkeypatch.undo()
    bam_bench.train(bam_sets, tmp_path / "run", given(copies), more)
    assert "few: 0 of" in capsys.readouterr().out


def test_a_teacher_is_asked_in_full_precision(bam_sets, tmp_path):
    low = bam_bench.teacher(tmp_path, bam_sets, "few", more=["engine.precision=bf16"])
    for own, wanted in (("bf16", "fp32"), ("fp32", "fp32"), ("fp64", "fp64")):
        config = bam_bench.configure(bam_sets, tmp_path / "run", f"engine.precision={own}")
        run = teachers._open_teacher(config, teachers.resolve(str(low)))
        assert run.engine.precision == wanted


def test_the_data_must_have_all_sets_of_a_teacher(teacher_runs, bam_sets, tmp_path):
    data = Path(shutil.copytree(bam_sets, tmp_path / "data"))
    shutil.rmtree(data / "values")
    more = ["task.labelled=[words]", given(copied(teacher_runs[:1], tmp_path))]
    with pytest.raises(MetaseqError, match="teacher_words_values has.*values"):
        bam_bench.train(data, tmp_path / "run", *more)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"config": []}, "damaged: config is no mapping"),
        ({"config": {"task": "bam"}}, "damaged: task is no mapping"),
        ({"facts": {}}, "does not say which classes"),
        ({"facts": {"labels": {"few": None}}}, "damaged: few is no list"),
    ],
)
def test_a_damaged_manifest_ends_in_a_message(change, words, teacher_runs, bam_sets, tmp_path):
    (copy,) = copied(teacher_runs[1:], tmp_path)
    file = teachers.resolve(str(copy)).checkpoint / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(MetaseqError, match=words):
        bam_bench.dry(bam_sets, "task.labelled=[few]", given([copy]))


def test_the_way_to_a_teacher(teacher_runs, bam_sets, tmp_path, monkeypatch):
    """It is stored in full; a run that is finished needs none."""
    (copy,) = copied(teacher_runs[1:], tmp_path)
    monkeypatch.chdir(tmp_path)
    few = ["task.labelled=[few]", given([Path(copy.name)])]
    run = bam_bench.train(bam_sets, tmp_path / "run", *few)
    assert run.config.task.teachers == [str(copy)]
    shutil.rmtree(copy)
    bam_bench.train(bam_sets, tmp_path / "run", *few)
    with pytest.raises(MetaseqError, match="no such checkpoint"):
        bam_bench.train(bam_sets, tmp_path / "other", *few)


def test_student_on_two_processes_equals_one(teacher_runs, bam_sets, tmp_path):
    """Teachers asked by two processes and by one: the same words, the same student."""
    more = ["trainer.max_update=3", "model.dropout=0", "model.attention_dropout=0"]
    more += ["task.head_dropout=0", *bam_bench.CALM]
    found = {}
    for number in (1, 2):
        place = tmp_path / str(number)
        copies = copied(teacher_runs, place)
        if number == 1:
            run = bam_bench.train(bam_sets, place / "run", given(copies), *more)
            found[1] = (bam_bench.weights(run), copies)
            continue
        loaded = bam_bench.on_two_processes(bam_sets, place, given(copies), *more)
        assert bam_bench.difference(*loaded) == 0
        found[2] = (loaded[0], copies)
    assert bam_bench.difference(found[1][0], found[2][0]) <= 1e-7
    tables = [
        {n: safetensors.numpy.load_file(f)["outputs"] for n, f in stored(copies).items()}
        for _, copies in found.values()
    ]
    assert all(np.abs(tables[0][n] - tables[1][n]).max() < 1e-6 for n in NAMES)
    about = json.loads((tmp_path / "2" / "run" / "results.json").read_text())
    assert about["replicas"] == 2
