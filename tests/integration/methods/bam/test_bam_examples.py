"""The sweep of the example: folders of earlier stages in a list, the strategies' chains."""

from pathlib import Path

from metaseq_lm.core.loading import load_config
from metaseq_lm.sweeps.definition import normalise, read_file
from metaseq_lm.sweeps.expansion import expand, fill

EXAMPLES = Path(__file__).resolve().parents[4] / "examples" / "bam"
SETS = ["CoLA", "SST-2", "MRPC", "STS-B", "MNLI", "RTE"]


def test_folders_of_stages_in_a_list_are_quoted_each() -> None:
    """A list stays a list; a comma or an equals sign in a folder's name is no end of its part."""
    paths = {"a": "/runs/x=1,y", "b": "/runs/b"}
    assert fill("task.teachers=[{a}, {b}/last]", {}, paths) == (
        "task.teachers=['/runs/x=1,y',/runs/b/last]"
    )
    assert fill("init_from={a}", {}, paths) == "init_from='/runs/x=1,y'"
    assert fill("task.labelled=[{set}]", {"set": "RTE"}, paths) == "task.labelled=[RTE]"


def stages(tmp_path: Path, size: str = "small") -> dict[str, tuple[str, ...]]:
    """Return the arguments of every stage by name."""
    content = read_file(EXAMPLES / "sweep.yaml") | {"data": str(tmp_path), "seeds": [3]}
    content.pop("launch")
    content["grid"] = {"size": [size]}
    run, *_ = expand(normalise(content), tmp_path / "out")
    return {stage.name: stage.arguments for stage in run.stages}


def listed(arguments: tuple[str, ...], key: str) -> list[str]:
    """Return the items of an argument KEY=[...], of the last one."""
    found = [a.partition("=")[2] for a in arguments if a.startswith(f"{key}=")]
    return found[-1].strip("[]").replace("'", "").split(",") if found else []


def test_sweep_gives_each_student_its_teachers(tmp_path: Path) -> None:
    """Each teacher's set is the student's, in its order; without one in the paper, none."""
    every = stages(tmp_path)
    folders = {n: a[a.index("--save-dir") + 1] for n, a in every.items()}
    teaching = {
        **{f"single_single-{name}": [f"single-{name}"] for name in SETS},
        **{f"second_single-{name}": ["single_multi"] for name in SETS},
        "multi_multi": ["multi"],
        "second_multi": [f"second_single-{name}" for name in SETS],
        **{f"weak_{way}": ["weak_teacher"] for way in ("annealing", "half", "alone")},
    }
    for name, arguments in every.items():
        sets = listed(arguments, "task.labelled")
        if name.startswith(("single_multi", "without_", "rte_")) and "tuned" not in name:
            assert sets == SETS or name.startswith("rte_")
            expected = [f"{'single' if one in SETS else 'further'}-{one}" for one in sets]
        else:
            expected = teaching.get(name, [])
        assert listed(arguments, "task.teachers") == [folders[n] for n in expected], name
    assert listed(every["rte_all"], "task.labelled")[-1] == "RTE" and len(every) == 47


def test_ablations_differ_from_single_multi_in_one_thing(tmp_path: Path) -> None:
    """The ablations differ from Single->Multi in what their names say, and in nothing else."""
    every = stages(tmp_path)
    told = {n: {a for a in every[n] if not a.startswith(("label=", "/"))} for n in every}
    changed = {n: told[n] - told["single_multi"] for n in told if n.startswith("without_")}
    assert all(told["single_multi"] < told[name] for name in changed)
    fixed = {"criterion.annealing=false"}
    assert changed == {
        "without_layer_rates": {"optimizer.layer_decay=1.0"},
        "without_task_sampling": {"task.exponent=1.0"},
        "without_annealing": {*fixed, "criterion.distill_weight=1.0"},
        "without_annealing_half": {*fixed, "criterion.distill_weight=0.5"},
    }


def test_fine_tuning_starts_from_the_student(tmp_path: Path) -> None:
    every = stages(tmp_path)
    for name in SETS:
        for stage, start in (("tuned", "multi"), ("single_multi_tuned", "single_multi")):
            arguments = every[f"{stage}-{name}"]
            source = every[start][every[start].index("--save-dir") + 1]
            assert f"init_from='{source}/checkpoints/last'" in arguments


def test_the_paper_s_size_is_one_axis(tmp_path: Path) -> None:
    """All configs follow it: of students, of teachers, of the fine-tuning."""
    for size in ("small", "paper"):
        every = stages(tmp_path, size).values()
        chosen = {arguments[arguments.index("--config-name") + 1] for arguments in every}
        assert chosen == {f"{size}_{kind}" for kind in ("single", "multi", "finetune")}


def test_the_last_weights_count() -> None:
    """As in the authors' code, also for what starts from them."""
    for path in sorted((EXAMPLES / "config").glob("*.yaml")):
        assert load_config([], str(path.parent), path.stem).trainer.best_checkpoint_metric == ""
    starts = [line for p in EXAMPLES.glob("*.yaml") for line in p.read_text().splitlines()]
    starts = [line for line in starts if "init_from={" in line]
    assert starts and all("/checkpoints/last" in line for line in starts)
