"""The sweeps of the example: folders of earlier stages in a list, the strategies' chains."""

from pathlib import Path

import pytest

from metaseq_lm.config import load_config
from metaseq_lm.sweeps.definition import normalise, read_file
from metaseq_lm.sweeps.expansion import expand, fill

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "bam"
SETS = ["CoLA", "SST_2", "MRPC", "STS_B", "RTE"]


def test_folders_of_stages_in_a_list_are_quoted_each() -> None:
    """A list stays a list; a comma or an equals sign in a folder's name is no end of its part."""
    paths = {"a": "/runs/x=1,y", "b": "/runs/b"}
    assert fill("task.teachers=[{a}, {b}/last]", {}, paths) == (
        "task.teachers=['/runs/x=1,y',/runs/b/last]"
    )
    assert fill("init_from={a}", {}, paths) == "init_from='/runs/x=1,y'"
    assert fill("task.labelled=[{set}]", {"set": "RTE"}, paths) == "task.labelled=[RTE]"


def stages(name: str, tmp_path: Path) -> dict[str, tuple[str, ...]]:
    content = read_file(EXAMPLES / f"{name}.yaml") | {"data": str(tmp_path), "seeds": [3]}
    content.pop("launch")
    run, *_ = expand(normalise(content), tmp_path / "out")
    return {stage.name: stage.arguments for stage in run.stages}


def teachers_of(arguments: tuple[str, ...]) -> list[str]:
    found = [a.partition("=")[2] for a in arguments if a.startswith("task.teachers=")]
    return found[-1].strip("[]").replace("'", "").split(",") if found else []


@pytest.mark.parametrize(
    "name, student, teaching",
    [
        ("single_single", "student", ["teacher"]),
        ("multi_multi", "student", ["teacher"]),
        ("single_multi", "multi", SETS),
        ("single_multi_finetuned", "multi", SETS),
        ("rounds", "second_RTE", ["multi"]),
        ("rounds", "second_multi", [f"second_{name}" for name in SETS]),
    ],
)
def test_who_teaches_whom(name: str, student: str, teaching: list[str], tmp_path: Path) -> None:
    every = stages(name, tmp_path)
    folders = {n: a[a.index("--save-dir") + 1] for n, a in every.items()}
    assert teachers_of(every[student]) == [folders[n] for n in teaching]
    untaught = [n for n in every if not n.startswith(("second_", "student", "multi"))]
    assert untaught and not any(teachers_of(every[n]) for n in untaught)


@pytest.mark.parametrize("name", ["ablations", "subsets"])
def test_the_paper_s_size_is_one_axis(name: str, tmp_path: Path) -> None:
    """The student's config and the folders of its teachers follow it together."""
    content = read_file(EXAMPLES / f"{name}.yaml") | {"data": str(tmp_path), "seeds": [3]}
    content.pop("launch")
    content["grid"] = {"size": ["paper"], "teachers": ["/runs"]}
    for run in expand(normalise(content), tmp_path / "out"):
        (arguments,) = [stage.arguments for stage in run.stages]
        chosen = arguments[arguments.index("--config-name") + 1]
        assert chosen in ("paper_single", "paper_multi")
        assert "/runs/RTE/size=paper-seed=3" in teachers_of(arguments)


def test_the_last_weights_count() -> None:
    """As in the authors' code, also for what starts from them."""
    for path in sorted((EXAMPLES / "config").glob("*.yaml")):
        assert load_config([], str(path.parent), path.stem).trainer.best_checkpoint_metric == ""
    starts = [line for p in EXAMPLES.glob("*.yaml") for line in p.read_text().splitlines()]
    starts = [line for line in starts if "init_from={" in line]
    assert starts and all("/checkpoints/last" in line for line in starts)
