"""The `sweep` command without a run: definition, names, refusals, dry run, and what
reaches sbatch.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outcomes import expect_facts
from submitit.slurm.slurm import _make_sbatch_string
from sweeping import SHORT, states_of, sweep

from metaseq_lm.cli import build_parser, main, overrides
from metaseq_lm.cli.train import _overrides_of
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.sweeps.definition import absolute_sources, normalise
from metaseq_lm.sweeps.expansion import NAME_LENGTH, PlannedRun, expand
from metaseq_lm.sweeps.folder import SweepFolder
from metaseq_lm.sweeps.options import (
    Launch,
    check_out,
    launch_from,
    log_parameters,
    slurm_parameters,
)

ROOT = Path(__file__).resolve().parents[3]
SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=-]*")


def runs_of(tmp_path: Path, **content: Any) -> list[PlannedRun]:
    return expand(normalise({"data": str(tmp_path), **content}), tmp_path / "out")


def files_below(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def refused(capsys: pytest.CaptureFixture, code: int, *words: str) -> None:
    """Check that a command ended as wrong usage, with one message that has all `words` in it."""
    text = capsys.readouterr().err
    message = [line for line in text.splitlines() if line.startswith("metaseq-lm: ")]
    assert code == 2 and "Traceback" not in text and len(message) == 1, text
    assert not [word for word in words if word not in message[0]], message[0]


# ---------------------------------------------------------------- definition


@pytest.mark.parametrize("name, task", [("causal_lm", "causal_lm"), ("electra_rtd", "electra")])
def test_an_objective_is_a_criterion_with_its_task(name: str, task: str) -> None:
    config = load_config([f"objective={name}", "data=d", "save_dir=s"])
    assert (config.task._name, config.criterion._name) == (task, name)
    for wrong in ("causel_lm", "bert_pretraining", "causal_lm,masked_lm"):
        with pytest.raises(UsageError, match=r"causal_lm|task=TASK|sweep"):
            load_config([f"objective={wrong}", "data=d", "save_dir=s"])


def test_objectives_are_an_axis(moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = [str(moons), "--out", str(tmp_path / "s"), "--dry-run"]
    both = "causal_lm,masked_lm"
    assert main(["sweep", *words, "--objective", both]) == 0
    assert capsys.readouterr().out.count("seed=1 objective=") == 2
    code = main(["sweep", *words, "--grid", f"task={both}", "--grid", f"criterion={both}"])
    refused(capsys, code, "--objective")


def test_grid_list_and_seeds(tmp_path: Path) -> None:
    runs = runs_of(
        tmp_path,
        grid={"optimizer.lr": [0.1, 0.2], "method": ["mlm", "hard"]},
        list=[{"n": 10, "b": 1}, {"n": 160, "b": 16}],
        seeds=[1, 2],
        stages=[
            {"name": "pre", "config_name": "{method}", "overrides": ["task.labelled=[moon_{n}]"]},
            {"name": "fine", "overrides": ["init_from={pre}/last", "task.batch_size={b}"]},
        ],
        overrides=["label={method}_{seed}", "task.x=${seed}"],
    )
    assert len(runs) == 16 and len({run.name for run in runs}) == 16
    assert runs[0].name == "lr=0.1-method=mlm-n=10-b=1-seed=1"
    assert [run.seed for run in runs] == [1] * 8 + [2] * 8
    last = runs[-1]
    pre, fine = last.stages
    assert (pre.folder, fine.folder) == (f"pre/{last.name}", f"fine/{last.name}")
    assert last.folder == fine.folder
    assert pre.arguments == (
        *(str(tmp_path), "--config-name", "hard"),
        *("--save-dir", f"{tmp_path}/out/pre/{last.name}", "seed=2"),
        *("label=hard_2", "task.x=${seed}", "task.labelled=[moon_160]", "optimizer.lr=0.2"),
    )
    assert f"init_from='{tmp_path}/out/pre/{last.name}/last'" in fine.arguments
    assert "task.batch_size=16" in fine.arguments and "--config-name" not in fine.arguments


def test_a_value_for_one_stage(tmp_path: Path) -> None:
    stages = [{"name": "a"}, {"name": "b"}]
    (run,) = runs_of(tmp_path, stages=stages, grid={"b:optimizer.lr": [1e-30]})
    assert run.name == "lr=1e-30-seed=1"
    assert "optimizer.lr=1e-30" not in run.stages[0].arguments
    assert "optimizer.lr=1e-30" in run.stages[1].arguments


def test_the_file_and_the_command_line(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Options win over the file; nothing is written by a dry run."""
    file = tmp_path / "s.yaml"
    file.write_text("seeds: [7]\ngrid: {optimizer.lr: [1e-3, 0.5]}\nlaunch: {mem: 4, time: 9}\n")
    more = ["--seeds", "1,2", "--grid", "optimizer.eps=1e-6,1e-7", "--label", "it's"]
    before = files_below(tmp_path)
    assert sweep(file, moons, "--out", tmp_path / "out", *more, *SHORT, "--dry-run") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("8 runs\n") and "sbatch" not in shown
    assert "lr=0.001-eps=1e-07-seed=2" in shown and "optimizer.lr=0.001" in shown
    slurm = ["--executor", "slurm", "--partition", "main,high"]
    assert sweep(file, "--out", tmp_path / "o", moons, *SHORT, "--dry-run", *slurm) == 0
    shown = capsys.readouterr().out
    assert "2 runs" in shown and "mem=4GB" in shown and "time=9 " in shown
    assert "partition=main,high" in shown and "seed=7" in shown
    assert files_below(tmp_path) == before


def test_an_estimate_is_that_of_the_updates(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """FLOPs of every setting, once for all its seeds, and of all runs; a source that is missing is
    left out.
    """
    file = tmp_path / "s.yaml"
    small = ["model.encoder_layers=1", "model.encoder_embed_dim=8", "task.tokens_per_sample=34"]
    stages = [{"name": "a"}, {"name": "b", "overrides": ["init_from={a}"]}]
    content = {"stages": stages, "overrides": small, "seeds": [1, 2, 3]}
    file.write_text(json.dumps(content | {"grid": {"trainer.max_update": [10, 30]}}))
    before = files_below(tmp_path)
    assert sweep(file, moons, "--out", tmp_path / "out", "--dry-run", "--estimate") == 0
    lines = capsys.readouterr().out.splitlines()
    *settings, total = (line for line in lines if "FLOPs" in line)
    flops = [float(re.search(r"([\d.e+]+) FLOPs", line)[1]) for line in settings]
    assert [line.split(":")[0] for line in settings] == [
        *("max_update=10, a", "max_update=10, b", "max_update=30, a", "max_update=30, b")
    ]
    assert flops[0] == flops[1] and flops[2] == pytest.approx(3 * flops[0], rel=0.1)
    assert total.startswith("6 runs: ") and " hours " in total
    assert float(total.split()[2]) == pytest.approx(3 * sum(flops), rel=0.1)
    assert files_below(tmp_path) == before
    assert sweep(file, moons, "--out", tmp_path / "out", "--estimate") == 2


def test_an_estimate_from_a_part_of_each_batch(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Half of the rows cost half; hours follow from a rate; a part without a row is refused."""
    estimate = [moons, "--out", tmp_path / "out", "--dry-run", "--estimate", "--max-update", "100"]
    printed = []
    for options in ([], ["--divide", "2"], ["--divide", "2", "--rate", "1e6"]):
        assert sweep(*estimate, *SHORT, "task.batch_size=8", *options) == 0
        lines = capsys.readouterr().out.splitlines()
        printed.append([line for line in lines if "FLOPs" in line][-1])
    whole, *parts = (float(re.search(r"([\d.e+]+) FLOPs", line)[1]) for line in printed)
    assert parts == pytest.approx([whole] * 2, rel=0.1)
    hours = float(re.search(r"([\d.e+]+) hours .*1e\+06 FLOPs a second", printed[2])[1])
    assert hours == pytest.approx(whole / 1e6 / 3600, rel=0.1)
    assert sweep(*estimate, *SHORT, "task.batch_size=8", "--divide", "9") == 0
    expect_facts(capsys.readouterr().out, "'train'", "by 9")
    assert sweep(moons, "--out", tmp_path / "out", *SHORT, "--dry-run", "--rate", "1e6") == 2
    for wrong in ("--rate=-1e6", "--rate=nan", "--rate=0", "--divide=0", "--divide=1.5"):
        assert sweep(*estimate, *SHORT, wrong) == 2
        expect_facts(capsys.readouterr().err, wrong.partition("=")[0], "above 0")


def test_the_example(moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Which composes all its 36 configurations, whatever the data are."""
    file = ROOT / "examples/meta_pseudo_label/sweep.yaml"
    assert sweep(file, moons, "--out", tmp_path / "out", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert re.match("18 runs .*2 stages", shown) and shown.count("metaseq-lm train") == 36


@pytest.mark.parametrize(
    "content, words",
    [
        ({"gird": {}}, ("s.yaml:1: gird: ", "'grid'")),
        ({"grid": {"optimizer.lr": []}}, ("optimizer.lr", "empty")),
        ({"grid": {"optimizer.lr": 0.1}}, ("optimizer.lr", "give a list")),
        ({"grid": {"optimizer.lr": [0.1, 0.1]}}, ("0.1", "twice")),
        ({"grid": {"optimizer.lr": [{"a": 1}]}}, ("optimizer.lr", "not a number")),
        ({"grid": {"optimizer.lrr": [1]}}, ("optimizer.lrr", "'optimizer.lr'")),
        ({"grid": {"seed": [1]}}, ("seed", "--seeds")),
        ({"grid": {"save_dir": ["x"]}}, ("save_dir", "the sweep")),
        ({"grid": {"lr": [1]}, "list": [{"lr": 2}]}, ("lr", "grid and in list")),
        ({"grid": {"label": [False, True, False]}}, ("given twice", "quote words")),
        ({"list": [{"a": 1}, {"b": 2}]}, ("same keys",)),
        ({"list": [{"a": 1}, {"a": 1}]}, ("twice",)),
        ({"list": [{}]}, ("no keys",)),
        ({"seeds": [1, 1]}, ("seeds", "twice")),
        ({"seeds": []}, ("seeds", "empty")),
        ({"seeds": [-1]}, ("seeds", "-1")),
        ({"seeds": ["x"]}, ("seeds", "'x'")),
        ({"overrides": ["label={metod}"], "grid": {"method": ["a"]}}, ("{metod}", "'method'")),
        ({"overrides": ["lr"]}, ("'lr'", "key=value")),
        ({"overrides": ["+a=1"]}, ("+a=1", "not added")),
        ({"overrides": ["seed=1"]}, ("seed=1", "--seeds")),
        ({"overrides": ["optimizer.lr=x"]}, ("seed=1", "optimizer.lr")),
        ({"stages": []}, ("stages", "empty")),
        ({"stages": [{"name": "a"}, {"name": "a"}]}, ("same name",)),
        ({"stages": [{"name": "a", "confg_name": "b"}]}, ("confg_name", "'config_name'")),
        ({"stages": [{"name": "a"}], "config_name": "b"}, ("config_name", "each stage")),
        ({"stages": [{"name": "a", "overrides": ["init_from={a}"]}]}, ("{a}",)),
        ({"stages": [{"name": "a"}], "grid": {"b:optimizer.lr": [1]}}, ("b:optimizer.lr",)),
        ({"stages": [{"name": "a"}], "grid": {"a": [1]}}, ("'a'", "rename")),
        ({"config_dir": "nowhere"}, ("nowhere", "base.yaml")),
        ({"data": "nowhere"}, ("nowhere", "no such data folder")),
        ({"launch": {"executer": "local"}}, ("executer", "'executor'")),
        ({"launch": {"gpus": "two"}}, ("s.yaml:1: launch.gpus: ", "'two'")),
        ({"launch": "slurm"}, ("s.yaml:1: launch: ", "'slurm'")),
        ({"search": {"flop": 1}}, ("s.yaml:1: search.flop: ", "'flops'")),
        ({"search": {"space": {"a": "1..2"}, "flops": "many"}}, ("s.yaml:1: search.flops: ",)),
        ({"user_dir": "x"}, ("s.yaml:1: user_dir: ", "--user-dir")),
        ({"launch": {"cpus": 0}}, ("s.yaml:1: launch.cpus ", "at least 1")),
    ],
)
def test_wrong_definitions(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture, content: dict, words: tuple
) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(json.dumps({"data": str(moons), **content}))
    refused(capsys, sweep(file, "--out", tmp_path / "out"), *words)
    assert files_below(tmp_path) == {"s.yaml"}


def test_relative_paths_of_runs_become_absolute(
    moons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Those of a file start from the file, those of the command line from here, as DATA does."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    content = {
        "data": str(moons),
        "stages": [
            {"name": "one", "overrides": ["init_from='r/lr=1, a'"]},
            {"name": "two", "overrides": ["init_from={one}/checkpoints/last"]},
        ],
    }
    (tmp_path / "s.yaml").write_text(json.dumps(content))
    assert sweep(tmp_path / "s.yaml", "--out", tmp_path / "out", "--dry-run", *SHORT) == 0
    shown = capsys.readouterr().out
    assert f"init_from={tmp_path}/r/lr=1, a" in shown and "absolute" not in shown
    for way in (["init_from=r/lr=1"], ["--init-from", "r/lr=1"], ["--grid", "init_from='r/lr=1'"]):
        assert sweep(moons, "--out", tmp_path / "out", "--dry-run", *way, *SHORT) == 0
        assert f"{tmp_path}/here/r/lr=1" in capsys.readouterr().out
    teachers = absolute_sources({"overrides": ["task.teachers=[/a,c=1,{n}/x]"]}, tmp_path)
    assert teachers["overrides"] == [f"task.teachers=[/a,'{tmp_path}/c=1',{{n}}/x]"]
    quoted = absolute_sources({"overrides": ["task.teachers=['a,b',c]"]}, tmp_path)
    assert quoted["overrides"] == [f"task.teachers=['{tmp_path}/a,b',{tmp_path}/c]"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--grid", "optimizer.lr"], ("--grid", "KEY=VALUE")),
        (["--grid", "optimizer.lr=interval(0,1)"], ("--grid",)),
        (["--grid", "optimizer.lr=1,("], ("--grid",)),
        (["--max-paralel", "2"], ("--max-paralel", "--max-parallel")),
        (["--time", "soon"], ("--time", "'soon'")),
        (["--executor", "cloud"], ("'local', 'slurm'", "'cloud'")),
        (["--partition", "main"], ("--partition", "slurm")),
        (["--failed"], ("--failed", "resubmit")),
        (["another"], ("one DATA at most",)),
        (["a.yaml", "b.yaml"], ("one SWEEP.yaml",)),
        (["a.yaml"], ("a.yaml", "no such file")),
    ],
)
def test_wrong_arguments(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture, arguments: list, words: tuple
) -> None:
    refused(capsys, sweep(moons, "--out", tmp_path / "out", *arguments, *SHORT), *words)
    assert not files_below(tmp_path)


ELECTRA = ["task=electra", "model=electra", *SHORT[1:]]


@pytest.mark.parametrize("way", [["--dry-run"], [], ["--executor", "slurm"], ["resubmit"]])
def test_nothing_starts_if_one_of_three_objectives_is_for_another_task(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture, way: list
) -> None:
    names = ["electra_rtd", "replace_mlm", "masked_lm"]
    if way == ["resubmit"]:  # a sweep from before pairs were checked
        content = {"data": str(moons), "grid": {"criterion": names}, "overrides": ELECTRA}
        definition = normalise(content)
        SweepFolder(tmp_path).adopt(definition, expand(definition, tmp_path), {})
        code = sweep("resubmit", "--failed", tmp_path)
    else:
        grid = ["--grid", f"criterion={','.join(names)}"]
        code = sweep(moons, "--out", tmp_path / "out", *grid, *ELECTRA, *way)
    refused(capsys, code, "criterion=masked_lm-seed=1: task 'electra' needs", "electra_rtd or ")
    assert files_below(tmp_path) <= {"sweep.json"}


@pytest.mark.parametrize(
    "grid, words",
    [
        ("model=transformer,wide_resnet", "cannot train model wide_resnet"),
        ("task.tokens_per_sample=9,9999", "=9999-seed=1: task.tokens_per_sample is 9999"),
        ("optimizer=adamw,nope", "optimizer=nope-seed=1: unknown optimizer 'nope'"),
        ("optimizer.clip_norm=1,-1", "-seed=1: optimizer.clip_norm must be at least 0"),
    ],
)
def test_nothing_starts_if_one_run_could_not_be_built(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture, grid: str, words: str
) -> None:
    plain = [word for word in SHORT if not word.startswith(("model.", "task.tokens"))]
    refused(capsys, sweep(moons, "--out", tmp_path / "out", "--grid", grid, *plain), words)
    assert not files_below(tmp_path)


def test_each_stage_of_a_list_is_checked(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    start = ["task=sentence_prediction", "criterion={c}", "init_from={pre}/checkpoints/last"]
    stages = [{"name": "pre", "overrides": SHORT}, {"name": "fine", "overrides": start}]
    chosen = [{"c": "sentence_prediction"}, {"c": "tagging"}]
    content = {"data": str(moons), "stages": stages, "list": chosen}
    (tmp_path / "s.yaml").write_text(json.dumps(content))
    code = sweep(tmp_path / "s.yaml", "--out", tmp_path / "out")
    refused(capsys, code, "c=tagging-seed=1, fine: criterion tagging")


def test_wrong_verbs(moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    refused(capsys, sweep(moons), "no --out")
    refused(capsys, sweep("--out", tmp_path / "out"), "no DATA")
    refused(capsys, sweep("status", tmp_path), "no sweep here")
    refused(capsys, sweep("status"), "one sweep folder")
    refused(capsys, sweep("resubmit", tmp_path), "no sweep here")
    definition = normalise({"data": str(moons)})
    SweepFolder(tmp_path).adopt(definition, expand(definition, tmp_path), {})
    refused(capsys, sweep("resubmit", tmp_path), "--failed")
    refused(capsys, sweep("status", tmp_path, "--grid", "a=1"), "'grid'", "sweep status")
    for verb in ("status", "resubmit", "cancel"):
        assert sweep(verb, "--help") == 0
        shown = capsys.readouterr().out
        assert f"metaseq-lm sweep {verb}" in shown
        assert ("--partition" in shown) == (verb == "resubmit") and "--grid" not in shown


def test_slurm_sweep_without_slurm_is_refused(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code = sweep(moons, "--out", tmp_path / "out", "--executor", "slurm", *SHORT)
    refused(capsys, code, "srun", "--executor local")
    assert not files_below(tmp_path)


def test_sweep_in_the_folder_of_another_is_refused(
    tmp_path: Path, moons: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = SweepFolder(tmp_path)
    first = normalise({"data": str(moons), "grid": {"optimizer.lr": [1, 2]}})
    folder.adopt(first, expand(first, tmp_path), {})
    assert {state.state for state in states_of(tmp_path).values()} == {"waiting"}
    code = sweep(moons, "--out", tmp_path, "--grid", "optimizer.lr=1,3", "--seeds", "2")
    refused(
        capsys, code, "another sweep", "grid.optimizer.lr is [1, 2] there, [1, 3] here", "seeds"
    )


def test_a_sweep_of_a_data_folder_with_an_equals_sign_is_read_again(tmp_path: Path) -> None:
    data = tmp_path / "lr=1, [é] #50% it's"
    data.mkdir()
    definition = normalise({"data": str(data), "overrides": [f"init_from={data}/lr=1-seed=1"]})
    runs = expand(definition, tmp_path / "out=1")
    (tmp_path / "out=1").mkdir()
    folder = SweepFolder(tmp_path / "out=1")
    with folder.lock():
        folder.adopt(definition, runs, {})
    assert SweepFolder(tmp_path / "out=1").runs() == runs
    parser = build_parser("train")
    args, rest = parser.parse_known_args(["train", *runs[0].stages[0].arguments])
    args.overrides = overrides(args.parser, rest)
    config = load_config(_overrides_of(args))
    assert (config.data, config.init_from) == (str(data), f"{data}/lr=1-seed=1")


def test_jobs_are_remembered_in_spite_of_a_torn_line(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    about = {"executor": "slurm", "folder": "jobs/0001", "code": "c" * 16}
    folder.append("submit", run="a", job="1_0", **about)
    with open(tmp_path / "jobs.jsonl", "a") as file:
        file.write('{"kind": "submit", "run": "b", "jo')
    folder.append("submit", run="c", job="1_2", **about)
    folder.append("cancel", run="a", job="1_0", folder="jobs/0001")
    last = folder.submissions()
    assert set(last) == {"a", "c"} and last["a"].cancelled and not last["c"].cancelled
    folder.append("submit", run="a", job="2_0", **{**about, "folder": "jobs/0002"})
    assert not folder.submissions()["a"].cancelled


# ---------------------------------------------------------------- names (R19)

VALUES = st.one_of(
    st.text(st.characters(exclude_categories=["C", "Z"]), max_size=150),
    st.integers(),
    st.floats(allow_nan=False),
    st.booleans(),
    st.lists(st.text("ab./~é", max_size=5), max_size=3),
)


@given(st.lists(VALUES, min_size=1, max_size=6, unique_by=repr))
def test_names_are_safe_distinct_and_inside(values: list) -> None:
    content = {"data": "/", "grid": {"a.key": values, "b.key": ["x"]}, "seeds": [1, 2]}
    runs = expand(normalise(content), Path("/out"))
    names = [run.name for run in runs]
    assert len({name.lower() for name in names}) == len(names) == 2 * len(values)
    for name in names:
        assert SAFE.fullmatch(name) and len(name) <= NAME_LENGTH, name
        assert os.path.normpath(f"/out/{name}") == f"/out/{name}"


BAD_NAMES = [
    *("../x", "/etc/x", "a\0b", "a\nb", "x" * 300, "~", "~root/x", ".", "..", "-rf", "--help"),
    *("CON.", "a/b", "a\\b", " a", "a ", "аdmin", "ａ", "a\u202eb", ".hidden", "$HOME", "%j", "*"),
    *("`id`", "$(id)", "a;b", "a|b", "code", "jobs", "train", "", "a\rb", "a=b", "a:b", "{a}"),
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names_make_nothing_outside(
    moons: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture
) -> None:
    """As the name of a stage: refused. As a value that names a run: refused, or a safe name."""
    content = {"data": str(moons), "stages": [{"name": name}]}
    with pytest.raises(UsageError):
        normalise(content)
    file = tmp_path / "s.yaml"
    file.write_text(json.dumps(content))
    assert sweep(file, "--out", tmp_path / "out") == 2
    assert files_below(tmp_path) == {"s.yaml"}
    try:
        (run,) = expand(normalise({"data": str(moons), "grid": {"label": [name]}}), tmp_path)
    except UsageError:
        return
    assert SAFE.fullmatch(run.name) and (tmp_path / run.folder).resolve().parent == tmp_path


def test_a_linked_run_folder_is_refused(
    moons: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out, outside = tmp_path / "out", tmp_path / "outside"
    out.mkdir()
    outside.mkdir()
    (out / "seed=1").symlink_to(outside)
    refused(capsys, sweep(moons, "--out", out, *SHORT), "leads out of the sweep")
    assert not list(outside.iterdir())


# ---------------------------------------------------------------- payloads (R21)

PAYLOADS = [
    *(";touch canary", "$(touch canary)", "`touch canary`", "| touch canary", "&& touch canary"),
    *("& touch canary &", "x\ntouch canary", "x\n#SBATCH --output=canary", "x\rtouch canary"),
    *("x\0y", "'; touch canary; '", '"; touch canary; "', "\\", "\\'", "'", '"', "''", '""'),
    *("#SBATCH --wrap=x", "# x", "%j", "%A_%a", "*", "?", "[a-z]*", "{a,b}", "~", "~root", "-x"),
    *("--wrap=touch canary", "-", "--", "!", "!!", "$HOME", "${HOME:-x}", "$((1))", "> canary"),
    *(">>canary", "< /etc/passwd", "<(touch canary)", "x\ttouch", "x\vy", "x\fy", "x\x1by"),
    *("x\u2028touch canary", "x\u0085y", "a b", "é", "a\\\ntouch canary", "x;", "(touch canary)"),
    *("\x7f", "\u202e", "x" * 5000),
]
STRINGS = ["partition", "constraint", "account", "qos", "setup"]
FIXED = re.compile(
    r"|#!/bin/bash|# (Parameters|setup|command)|export SUBMITIT_EXECUTOR=slurm|srun --unbuffered .*"
    r"|#SBATCH --(cpus-per-task|job-name|nodes|ntasks-per-node|open-mode|output|error|signal|time"
    r"|wckey|partition|constraint|account|qos)=\S+"
)


def script_of(launch: Launch, out: Path) -> str:
    parameters = slurm_parameters(launch, out)
    return _make_sbatch_string(command="python job", folder=out / "jobs" / "0001", **parameters)


def test_payloads_are_more_than_fifty() -> None:
    assert len(set(BAD_NAMES)) >= 30 and len(set(PAYLOADS)) >= 50


@pytest.mark.parametrize("name", STRINGS)
def test_payloads_in_options_reach_no_shell(name: str, tmp_path: Path) -> None:
    """Each is refused, or the script has only the template's lines and runs nothing else."""
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    accepted = []
    for payload in PAYLOADS:
        value = [payload] if name == "setup" else payload
        try:
            text = script_of(launch_from({}, {"executor": "slurm", name: value}), tmp_path)
        except UsageError:
            continue
        accepted.append(payload)
        added = {payload} if name == "setup" else set()
        assert not [x for x in text.split("\n") if x not in added and not FIXED.fullmatch(x)]
        (tmp_path / "script.sh").write_text(text)
        assert subprocess.run(["bash", "-n", tmp_path / "script.sh"]).returncode == 0
        path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        run = ["bash", tmp_path / "script.sh"]
        subprocess.run(run, env=path, cwd=tmp_path, capture_output=True, timeout=20)
        assert not (tmp_path / "canary").exists(), payload
    # Slurm knows [a-z]* and * as constraints; a setup line may be any plain words.
    allowed = {"constraint": {"[a-z]*"}, "setup": {"%j", "%A_%a", "~", "~root", "-x", "a b"}}
    allowed["setup"] |= {"-", "--", "--wrap=touch canary"}
    assert set(accepted) <= allowed.get(name, set())


@pytest.mark.parametrize(
    "option, value",
    [
        ("partition", "main,high-mem"),
        ("constraint", "[a100|h100*2]&nvme"),
        ("account", "proj_1.x"),
        ("qos", "low@x"),
        ("setup", ["module load cuda/12.4", "source ~/env.sh", "export A=b:c,d"]),
    ],
)
def test_sound_options_are_taken(option: str, value: Any, tmp_path: Path) -> None:
    text = script_of(launch_from({}, {"executor": "slurm", option: value}), tmp_path)
    for line in value if option == "setup" else [value]:
        assert line in text


def test_out_may_have_quotes_on_this_machine(tmp_path: Path) -> None:
    for name in ("it's", 'a "b" \\c', "lr=1, [é] #50%"):
        check_out(tmp_path / name, "local")
    with pytest.raises(UsageError, match="cannot be printed"):
        check_out(tmp_path / "a\nb", "local")


def test_payloads_in_out_reach_no_shell(tmp_path: Path) -> None:
    """They stand in one word of the script, or are refused: what cannot be printed, and what Slurm
    expands.
    """
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$LOG"\n')
    (tmp_path / "srun").chmod(0o755)
    for payload in PAYLOADS:
        out = tmp_path / payload
        try:
            check_out(out, "slurm")
        except UsageError:
            assert not payload.isprintable() or "\\" in payload or "%" in payload or "\0" in payload
            continue
        (tmp_path / "script.sh").write_text(script_of(launch_from({}, {"executor": "slurm"}), out))
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "LOG": str(tmp_path / "log")}
        run = ["bash", tmp_path / "script.sh"]
        subprocess.run(run, env=environment, cwd=tmp_path, capture_output=True, timeout=20)
        assert not (tmp_path / "canary").exists(), payload
        assert f"{out}/jobs/0001/%j_%t_log.out" in (tmp_path / "log").read_text().splitlines()


def test_log_files_of_a_path_with_percent_signs(tmp_path: Path) -> None:
    launch = launch_from({}, {"executor": "slurm"})
    assert log_parameters(launch, tmp_path / "plain", True) == {}
    parameters = log_parameters(launch, Path("/data/50% off"), True)
    assert parameters["additional_parameters"]["output"] == "/data/50%% off/%A_%a_0_log.out"
    text = script_of(launch, tmp_path)
    assert parameters["srun_args"][:-2] == slurm_parameters(launch, tmp_path)["srun_args"]
    assert "--error=/data/50%% off/%A_%a_%t_log.err" in parameters["srun_args"] and text
    for name in ("%j", "x%A_%a", "a\\b"):
        with pytest.raises(UsageError, match="name for Slurm"):
            check_out(tmp_path / name, "slurm")


@pytest.mark.parametrize("way", ["file", "grid", "override"])
def test_payloads_arrive_as_they_are_or_are_refused(way: str, moons: Path, tmp_path: Path) -> None:
    """In the configuration that the job's arguments compose; and never in the script."""
    parser = build_parser("train")
    gone = set()
    for payload in PAYLOADS:
        content: dict[str, Any] = {"data": str(moons)}
        try:
            if way == "file":
                content["grid"] = {"label": [payload]}
            elif way == "grid":
                content["overrides"] = ["label={text}"]
                content["grid"] = {"text": [payload]}
            else:
                content["overrides"] = [f"label={payload}"]
            (run,) = expand(normalise(content), tmp_path)
            args, rest = parser.parse_known_args(["train", *run.stages[0].arguments])
            args.overrides = overrides(args.parser, rest)
            config = load_config(_overrides_of(args), args.config_dir, args.config_name)
        except UsageError:
            gone.add(payload)
            continue
        if way == "file" or payload[:1] not in "'\"":  # Hydra takes quotes for quotes there
            assert config.label == payload, payload
        assert "canary" not in run.name or SAFE.fullmatch(run.name)
    odd = {p for p in PAYLOADS if not p.isprintable() or "${" in p}  # OmegaConf's own ${...}
    assert gone == odd if way == "file" else odd <= gone < set(PAYLOADS)
