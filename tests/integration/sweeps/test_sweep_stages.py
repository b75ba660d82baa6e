"""Stages of a sweep: repeated for each value, chosen by name, added later; and seeds
added later. Runs are trained in the process of the test.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
from outcomes import expect_facts
from sweeping import SHORT, states_of, submitted, sweep, train_in_process

from metaseq_lm.core.errors import UsageError
from metaseq_lm.sweeps.definition import normalise
from metaseq_lm.sweeps.expansion import PlannedRun, expand

SETS = {"set": ["CoLA", "SST-2"]}
STAGES: list[dict[str, Any]] = [
    {"name": "single-{set}", "each": SETS, "overrides": ["task.labelled=[{set}]", "a={b}${set}"]},
    {"name": "taught-{set}", "each": SETS, "overrides": ["task.teachers=[{single-{set}}]"]},
    {"name": "multi", "overrides": ["task.teachers=[{single-CoLA},{single-SST-2}]"]},
    {"name": "tuned", "overrides": ["init_from={multi}/checkpoints/last"]},
]


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training starts no process."""
    train_in_process(monkeypatch)


def run_of(tmp_path: Path, wanted: tuple[str, ...] = (), **content: Any) -> PlannedRun:
    content = {"data": str(tmp_path), "stages": STAGES, "grid": {"b": [7]}} | content
    (run,) = expand(normalise(content, wanted), tmp_path / "out")
    return run


def test_a_stage_for_each_value(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    names = ["single-CoLA", "single-SST-2", "taught-CoLA", "taught-SST-2", "multi", "tuned"]
    assert [stage.name for stage in run.stages] == names
    single, taught = run.stages[1], run.stages[3]
    assert {"task.labelled=[SST-2]", "a=7${set}"} < set(single.arguments)
    assert f"task.teachers=['{tmp_path}/out/{single.folder}']" in taught.arguments


def test_two_keys_of_each_are_combined(tmp_path: Path) -> None:
    stages = [{"name": "s-{x}-{y}", "each": {"x": [1, 2], "y": ["a", "b"]}, "overrides": ["x={x}"]}]
    run = run_of(tmp_path, stages=stages, grid={})
    assert [stage.name for stage in run.stages] == ["s-1-a", "s-1-b", "s-2-a", "s-2-b"]
    assert "x=2" in run.stages[2].arguments


@pytest.mark.parametrize(
    "wanted, names",
    [
        (["tuned"], ["single-CoLA", "single-SST-2", "multi", "tuned"]),
        (["taught-*"], ["single-CoLA", "single-SST-2", "taught-CoLA", "taught-SST-2"]),
        (["taught-CoLA", "single-SST-2"], ["single-CoLA", "single-SST-2", "taught-CoLA"]),
        (["*-SST-2"], ["single-SST-2", "taught-SST-2"]),
    ],
)
def test_chosen_stages_bring_what_they_start_from(
    wanted: list[str], names: list[str], tmp_path: Path
) -> None:
    run = run_of(tmp_path, tuple(wanted))
    assert [stage.name for stage in run.stages] == names
    whole = {stage.name: stage for stage in run_of(tmp_path).stages}
    assert all(stage == whole[stage.name] for stage in run.stages)


@pytest.mark.parametrize(
    "stages, wanted, words",
    [
        (STAGES, ("tunde",), ("tunde", "tuned", "single-CoLA")),
        (None, ("tuned",), ("--stages tuned", "the sweep has no stages", "leave --stages out")),
        ([{"name": "a", "each": {"x": [1, 2]}}], (), ("same name",)),
        ([{"name": "a-{x}", "each": {"x": 1}}], (), ("stages[0].each.x: ", "give a list")),
        ([{"name": "a-{x}", "each": [1]}], (), ("stages[0].each: ", "give a mapping")),
        ([{"name": "a-{x}", "each": {"x": ["b/c"]}}], (), ("a-b/c", "names a folder")),
        ([{"name": "a-{x}", "each": {"x": ["b\n"]}}], (), ("cannot be printed",)),
    ],
)
def test_wrong_stages_are_named(
    stages: list[Any] | None, wanted: tuple[str, ...], words: tuple[str, ...], tmp_path: Path
) -> None:
    content = {"data": str(tmp_path)} | ({"stages": stages} if stages else {})
    with pytest.raises(UsageError) as error:
        normalise(content, wanted)
    assert all(word in str(error.value) for word in words), error.value


def test_a_stage_before_a_finished_one(moons: Path, tmp_path: Path) -> None:
    """It is trained, though the last stage is finished already."""
    file, out = tmp_path / "sweep.yaml", tmp_path / "out"
    command = [file, moons, "--out", out, "--max-parallel", "1", *SHORT]
    for stages in (["one", "three"], ["one", "two", "three"], ["zero", "one", "two", "three"]):
        file.write_text("stages: [" + ", ".join(f"{{name: {stage}}}" for stage in stages) + "]\n")
        assert sweep(*command) == 0
        assert {out / stage / "seed=1" / "results.json" for stage in stages} == set(
            out.glob("*/*/results.json")
        )
    assert submitted(out) == ["seed=1"] * 3


def test_stage_that_no_run_needs_may_be_deleted(moons: Path, tmp_path: Path) -> None:
    """The folder of a stage, where what started from it is finished; else it is trained again."""
    file, out = tmp_path / "sweep.yaml", tmp_path / "out"
    start = "overrides: ['init_from={%s}/checkpoints/last']"
    file.write_text(
        f"stages: [{{name: a}}, {{name: b, {start % 'a'}}}, {{name: c, {start % 'b'}}}]\n"
    )
    command = [file, moons, "--out", out, "--max-parallel", "1", *SHORT]
    assert sweep(*command) == 0
    for stage in "ab":
        shutil.rmtree(out / stage)
    assert states_of(out)["seed=1"].state == "finished"
    assert sweep(*command) == 0
    assert submitted(out) == ["seed=1"]
    shutil.rmtree(out / "c")
    assert (states_of(out)["seed=1"].stage, states_of(out)["seed=1"].state) == ("a", "lost")
    assert sweep(*command) == 0
    assert all((out / stage / "seed=1" / "results.json").exists() for stage in "abc")


def test_a_sweep_grows(moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a stage and by a seed: what is finished stays, what is new is trained."""
    file, out = tmp_path / "sweep.yaml", tmp_path / "out"
    file.write_text(
        "stages:\n- {name: one}\n- {name: two, overrides: ['init_from={one}/checkpoints/last']}\n"
    )
    command = [file, moons, "--out", out, "--max-parallel", "1", *SHORT]
    assert sweep(*command, "--stages", "one") == 0
    first = (out / "one" / "seed=1" / "results.json").read_bytes()
    assert not (out / "two").exists() and states_of(out)["seed=1"].state == "finished"
    assert sweep(*command, "--seeds", "1,2", "--dry-run") == 0
    assert sweep(*command, "--seeds", "1,2") == 0
    expect_facts(capsys.readouterr().out, "2 runs:", "2 waiting")
    assert {run: s.state for run, s in states_of(out).items()} == {
        "seed=1": "finished",
        "seed=2": "finished",
    }
    assert (out / "one" / "seed=1" / "results.json").read_bytes() == first
    assert submitted(out) == ["seed=1", "seed=1", "seed=2"]
    # Neither fewer runs nor other options are the same sweep.
    assert sweep(*command, "--stages", "one") == 2
    problem = capsys.readouterr().err
    expect_facts(problem, "stage two only", "seeds is [1, 2]", "[1] here")
    assert sweep(*command, "--seeds", "1,2", "optimizer.lr=0.5") == 2
    expect_facts(capsys.readouterr().err, "another sweep", "(overrides is [")
