"""What teachers say: equal to a plain pass, stored once, refused where it is not of these rows."""

import json
import shutil
from pathlib import Path

import bam_bench
import bam_data
import numpy as np
import pytest
import safetensors.numpy
import sentence_sets
import torch

from metaseq_lm.data.labelled import LabelledSet
from metaseq_lm.errors import MetaseqError
from metaseq_lm.methods.bam import teachers
from metaseq_lm.opened import open_run

NAMES = ("words", "few", "values")


def given(taught: list[Path]) -> str:
    return f"task.teachers=[{','.join(map(str, taught))}]"


def stored(taught: list[Path]) -> dict[str, Path]:
    files = [file for run in taught for file in run.glob("outputs/*/*")]
    return {file.name.partition(".")[0]: file for file in files}


@pytest.fixture(scope="module")
def student(
    bam_sets: Path, taught: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Path]]:
    """A student of copies of the teachers, and those copies with what they said."""
    place = tmp_path_factory.mktemp("student")
    copies = [Path(shutil.copytree(run, place / run.name, symlinks=True)) for run in taught]
    bam_bench.train(bam_sets, place / "run", given(copies), "trainer.max_update=2")
    return place / "run", copies


@pytest.mark.parametrize("rows", [1, 7])
def test_outputs_are_those_of_a_pass_without_dropout(
    rows: int, student: tuple[Path, list[Path]], bam_sets: Path
) -> None:
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
        some = np.arange(len(found))[:rows]
        batch = teacher.task.labelled(name, "train").batch(some, some)
        parts = [torch.from_numpy(batch[k]) for k in ("tokens", "segments")]
        padding = None if batch["padding"] is None else torch.from_numpy(batch["padding"])
        with torch.no_grad():
            wanted = teacher.model(parts[0], padding, parts[1])[name].numpy()
        assert np.abs(outputs[:rows] - wanted).max() < 1e-6


def test_batch_size_changes_nothing(taught: list[Path], bam_sets: Path) -> None:
    place = str(teachers.checkpoint.resolve(str(taught[0]), prefer="best"))
    found = []
    for more in (["task.batch_size=5"], ["task.batch_size=64", "engine.micro_batch_size=3"]):
        run = open_run(place, None, None, [*more, "engine.precision=fp64"])
        found.append(teachers.forward(run, "words")[1])
    assert np.abs(found[0] - found[1]).max() <= 1e-7 and np.ptp(found[0]) > 0


def test_each_row_meets_its_own_teacher(student: tuple[Path, list[Path]], bam_sets: Path) -> None:
    files = stored(student[1])
    tables = {n: safetensors.numpy.load_file(files[n])["outputs"] for n in NAMES}
    run = bam_bench.dry(bam_sets, given(student[1]))
    (batch,) = run.task.build_streams("train")["train"].micro_batches(3, run.trainer.shard)
    first = np.cumsum([0, *(len(tables[n]) for n in NAMES)])
    for sample, number, said in zip(*(batch[k].tolist() for k in ("samples", "set", "teacher"))):
        own = tables[NAMES[number]][sample - first[number]]
        assert said == pytest.approx([*own, 0][:2])


def test_what_is_stored_is_used_and_stays(
    student: tuple[Path, list[Path]], bam_sets: Path, tmp_path: Path
) -> None:
    """A second student computes nothing; a folder of outputs serves as well as the run."""
    before = {n: f.stat().st_mtime_ns for n, f in stored(student[1]).items()}
    first = bam_bench.dry(bam_sets, given(student[1]))
    folder = tmp_path / "said"
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
def test_other_rows_are_refused(
    rows: int, student: tuple[Path, list[Path]], bam_sets: Path, tmp_path: Path
) -> None:
    data = changed(bam_sets, tmp_path, "few", rows)
    with pytest.raises(MetaseqError, match=r"few.train.safetensors: .* other rows .*data: "):
        bam_bench.train(data, tmp_path / "run", given(student[1]))


def test_other_weights_are_refused(
    student: tuple[Path, list[Path]], bam_sets: Path, tmp_path: Path
) -> None:
    """A teacher trained anew under the same name is another teacher."""
    copy = Path(shutil.copytree(student[1][1], tmp_path / "t", symlinks=True))
    for part in ("checkpoints", "results.json", "config.yaml"):
        shutil.rmtree(copy / part) if (copy / part).is_dir() else (copy / part).unlink()
    place = stored(student[1])["few"].parent.name
    last = f"trainer.max_update={int(place.partition('_')[2])}"
    bam_bench.train(bam_sets, copy, "task.labelled=[few]", last, "seed=6")
    assert stored([copy])["few"].parent.name == place
    with pytest.raises(MetaseqError, match="rows or weights .*weights: "):
        bam_bench.train(bam_sets, tmp_path / "run", "task.labelled=[few]", given([copy]))


@pytest.mark.parametrize("damage", ["cut", "flip", "text", "wide"])
def test_damage_is_found(damage: str, bam_sets: Path, tmp_path: Path) -> None:
    bam_data.write_outputs(bam_sets, tmp_path / "said", NAMES)
    file = tmp_path / "said" / "few.train.safetensors"
    content = bytearray(file.read_bytes())
    if damage == "wide":
        found = LabelledSet(bam_sets / "few", "train")
        about = teachers.describe(bam_sets / "few", found, None)
        file.unlink()
        teachers.store(file, np.zeros((len(found), 5)), about)
    else:
        content[-9] ^= 1
        file.write_bytes({"cut": content[:-8], "flip": content, "text": b"no tensor"}[damage])
    with pytest.raises(MetaseqError, match="few.train.safetensors: (not readable|.* other rows)"):
        bam_bench.train(bam_sets, tmp_path / "run", given([tmp_path / "said"]))


def test_a_teacher_that_says_nothing_finite(tmp_path: Path) -> None:
    with pytest.raises(MetaseqError, match="not finite"):
        teachers.store(tmp_path / "x", np.array([[np.nan]]), {"set": "few"})
    assert not list(tmp_path.iterdir())


def test_a_set_has_exactly_one_teacher(taught: list[Path], bam_sets: Path, tmp_path: Path) -> None:
    """Before anything is written; with the way out."""
    save = tmp_path / "run"
    for teaching, words in (
        (taught[:1], "none of .* teaches few"),
        ([*taught, taught[0]], "both .* teach words"),
        ([tmp_path], "no checkpoint"),
    ):
        with pytest.raises(MetaseqError, match=words):
            bam_bench.train(bam_sets, save, given(teaching))
    assert not save.exists()


def test_a_run_of_another_task_is_no_teacher(bam_sets: Path, tmp_path: Path) -> None:
    more = ["task=sentence_prediction", "criterion=sentence_prediction", "task.labelled=words"]
    options = [o for o in bam_bench.OPTIONS if not o.startswith(("task=", "criterion="))]
    config = bam_bench.load_config(
        [*more, *options, f"data={bam_sets}", f"save_dir={tmp_path / 'a'}"]
    )
    bam_bench.Run(config).train()
    with pytest.raises(MetaseqError, match="is a run of task sentence_prediction"):
        bam_bench.train(bam_sets, tmp_path / "b", given([tmp_path / "a"]))


def test_two_processes_do_as_one(taught: list[Path], bam_sets: Path, tmp_path: Path) -> None:
    """Teachers asked by two processes and by one: the same words, the same student."""
    more = ["trainer.max_update=3", "model.dropout=0", "model.attention_dropout=0"]
    more += ["task.head_dropout=0", *bam_bench.CALM]
    found = {}
    for number in (1, 2):
        place = tmp_path / str(number)
        copies = [Path(shutil.copytree(t, place / t.name, symlinks=True)) for t in taught]
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
