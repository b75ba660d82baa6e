"""Plans: what is refused, what the hash covers, and the one that ships."""

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from league_plans import LARGE, PLAN, SMALL, plan_with

from metaseq_lm.core.errors import UsageError
from metaseq_lm.league.assembly import read_archived
from metaseq_lm.league.folder import Contents
from metaseq_lm.league.plan import budget_text
from metaseq_lm.league.plan_files import (
    BALANCED,
    LAPTOP,
    OBJECTIVES,
    SHIPPED,
    archive_beside,
    named_plan,
    parse_plan,
    read_plan,
)
from metaseq_lm.reporting.archive import read_about

SIDES = "left", "right", "both"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no data": ({"data": None}, "^data: "),
    "no comparison": ({"comparison": None}, "^comparison: "),
    "an unknown key": ({"tuning__budget": [SMALL]}, "^tuning.budget: .*'budgets'"),
    "a key of no section": ({"sedes": [1]}, "^sedes: .*'seeds'"),
    "a section that is a list": ({"controls": [1]}, "^controls: "),
    "an objective that is a word": ({"objectives": {"masked": "mlm"}}, "^objectives.masked: "),
    "a seed that is a word": ({"seeds": ["one"]}, "^seeds: .*one"),
    "a bound that is a word": ({"comparison__bounds": {"a": "b"}}, "^comparison.bounds.a: "),
    "a bound without end": ({"comparison__bounds": {"a": float("inf")}}, "^comparison.bounds.a: "),
    "a missing key": ({"comparison__metric": None}, "^comparison.metric: "),
    "an interpolation": ({"comparison__level": "${name}"}, "^comparison.level: "),
    "an unknown baseline": ({"comparison__baseline": "rtd"}, "comparison.baseline.*'rtd'"),
    "an unknown control": (
        {"objectives": {"masked": {"control": "noise"}}},
        "objectives.masked.control.*'noise'",
    ),
    "an objective that controls itself": (
        {"objectives": {"masked": {"control": "masked"}}},
        "^objectives.masked.control: ",
    ),
    "names that are one folder": ({"objectives": {"masked": {}, "Masked": {}}}, "same name"),
    "a name that is no folder": ({"objectives": {"../masked": {}}}, "letters"),
    "seeds that tuned": ({"tuning__seeds": [2]}, "tuning.seeds: 2"),
    "a budget of zero": ({"budgets": [0]}, "positive"),
    "a usual budget of none": ({"usual_budgets": [1.0]}, "usual_budgets: 1 "),
    "shuffled at another budget": ({"controls__shuffled": [1.0]}, "controls.shuffled: 1 "),
    "no effect": ({"comparison__smallest_effect": 0}, "^comparison.smallest_effect "),
    "a level of one half": ({"comparison__level": 0.5}, "^comparison.level "),
    "a metric named twice": ({"comparison__secondary": ["valid.mlm"]}, "twice"),
    "the budget as an option": ({"options": ["trainer.max_flops=1e9"]}, "budgets"),
    "the seed as an option": ({"options": ["seed=3"]}, "seeds"),
    "shuffled tokens as an option": ({"options": ["task.shuffle_tokens=true"]}, "shuffled"),
    "the budget in a grid": ({"tuning__grid": {"trainer.max_flops": [1]}}, "budgets"),
    "an option of no grammar": ({"options": ["task.batch_size=(("]}, "^task.batch_size=.*grammar"),
    "a value twice": ({"tuning__grid": {"optimizer.lr": [1, 1]}}, "twice"),
    "no objective": ({"objectives": {}}, "there is none"),
    "an option that is tuned": (
        {"objectives": {"masked": {"options": ["optimizer.lr=0.1"]}}},
        "objectives.masked.*optimizer.lr is tuned",
    ),
    "a metric that tunes nothing": (
        {"objectives": {"masked": {"grid": {}, "metric": "valid.mlm"}}},
        "objectives.masked.metric",
    ),
    "a mean of itself": ({"comparison__means": {"m": ["m"]}}, "means.m: .*: m, m$"),
    "means in a circle": (
        {"comparison__means": {"m": ["a.accuracy", "n"], "n": ["o"], "o": ["a.accuracy", "n"]}},
        "means.m: .*: n, o, n$",
    ),
    "a mean of a mean of losses and a share": (
        {"comparison__means": {"m": ["n", "valid.accuracy"], "n": ["valid.loss"]}},
        "means.m.*smaller",
    ),
    "a mean of a loss and a share": (
        {"comparison__means": {"m": ["valid.loss", "valid.accuracy"]}},
        "means.m.*smaller",
    ),
    "an effect that is a word": (
        {"comparison__smallest_effect": "small"},
        "^comparison.smallest_effect: .*number",
    ),
    "two folders of one name": (
        {"data": {"world": "quad", "folders": ["a/blimp", "b/blimp"]}},
        "data.folders: two folders",
    ),
    "folders that are no list": ({"data": {"world": "quad", "folders": "blimp"}}, "give a list"),
    "benchmarks without folders": (
        {"data": {"world": "quad", "benchmarks": ["glue/CoLA"]}},
        "data.benchmarks.*mapping",
    ),
    "folders and no data": ({"data": {"folders": ["blimp"]}}, "give a folder, a text"),
    "a fraction of a step": ({"tuning__widen": 0.5}, "whole number"),
}


@pytest.mark.parametrize("changes, message", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_plan_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_plan(plan_with(**changes))


@pytest.mark.parametrize(
    "changes, key, text",
    [
        ({"tuning__sedes": [1]}, "tuning.sedes", "  sedes:"),
        ({"tuning__grid": {"a.b": 0.1}}, "tuning.grid.a.b", "    a.b:"),
        ({"objectives": {"m": {"options": ["seed=1"]}}}, "objectives.m.options", "    options:"),
        ({"comparison__bounds": {"a.b": "low"}}, "comparison.bounds.a.b", "    a.b:"),
    ],
)
def test_a_message_names_the_line_of_the_key(
    changes: dict[str, Any], key: str, text: str, tmp_path: Path
) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(plan_with(**changes)))
    lines = file.read_text().splitlines()
    line = next(i for i, shown in enumerate(lines, 1) if shown.startswith(text))
    with pytest.raises(UsageError, match=f"^{file}:{line}: {key}: "):
        read_plan(file)


def test_old_words_of_a_plan_are_read() -> None:
    """An empty note and truth values are texts, which hashes of earlier versions have."""
    plan = parse_plan(plan_with(objectives={"masked": {"note": None}}, name=True))
    assert (plan.objectives[0].note, plan.name) == ("null", "true")
    suites = [{"suite": "blimp", "folder": "b", "first": 10}, "pairs pairs"]
    texts = parse_plan(plan_with(comparison__suites=suites)).comparison.suites
    assert texts == ("blimp b first=10", "pairs pairs")
    noise = {"tuning__plausible": 0.1, "tuning__seeds": [101, 102, 103]}
    hashes = {parse_plan(plan_with(**noise, tuning__noise=value)).hash for value in (1, 1.0)}
    assert len(hashes) == 2


def test_a_plan_has_its_values_in_order() -> None:
    plan = parse_plan(plan_with(budgets=[LARGE, SMALL], tuning__grid={"optimizer.lr": [2, 1e-3]}))
    assert plan.ladder.budgets == (SMALL, LARGE)
    assert plan.objective("dense").grid == {"optimizer.lr": [1e-3, 2]}
    assert plan.objective("dense").trials == 2
    assert plan.controls.shuffled == (SMALL,)
    assert parse_plan(plan_with(controls__shuffled=True)).controls.shuffled == (SMALL, LARGE)
    assert parse_plan(plan_with(controls__shuffled=False)).controls.shuffled == ()
    several = {"optimizer.lr": [1, 2, 3], "task.mask_prob": [0.1, 0.2]}
    objectives = {"masked": {"grid": several}, "dense": {"grid": {}}}
    plan = parse_plan(plan_with(objectives=objectives))
    assert [objective.trials for objective in plan.objectives] == [6, 0]


def test_a_budget_takes_the_values_of_the_tuned_one_that_is_nearest_by_ratio() -> None:
    tuning = parse_plan(plan_with(tuning__budgets=[1e10, 1e12])).tuning
    assert [tuning.nearest(b) for b in (1e9, 0.9e11, 1.1e11, 1e15)] == [1e10, 1e10, 1e12, 1e12]


CHANGES: list[dict[str, Any]] = [
    *({"seeds": [1, 3]}, {"budgets": [SMALL]}, {"usual_budgets": [LARGE]}, {"options": []}),
    *({"name": "other"}, {"data": {"world": "quad", "world_seed": 2}}, {"tuning__widen": 2}),
    *({"tuning__grid": {"optimizer.lr": [1e-4, 2e-3]}}, {"controls__untrained": False}),
    *({"comparison__level": 0.01}, {"comparison__smallest_effect": 0.06}),
    *({"comparison__metric": "valid.loss"}, {"comparison__suites": ["pairs pairs"]}),
    {"objectives": {"masked": {"options": ["task.mask_prob=0.2"]}}},
    {"objectives": {"masked": {"options": ["task.mask_prob=0.2"], "metric": "valid.mlm"}}},
]


def test_the_hash_covers_all_that_a_plan_says() -> None:
    hashes = {parse_plan(plan_with(**change)).hash for change in [{}, *CHANGES]}
    assert len(hashes) == 1 + len(CHANGES)
    assert all(len(digest) == 16 for digest in hashes)


def test_the_hash_of_a_plan_without_metrics_of_objectives_stays() -> None:
    """That of the same plan before objectives had one."""
    assert parse_plan(plan_with()).hash == "06c09dc1014b8b2c"


def test_trials_need_the_suites_of_their_metric() -> None:
    suites = ["pairs pairs compare=changed", "probe depth", "probe topic name=topic"]
    means = {"both": ["valid.accuracy", "nested"], "own": ["valid.loss"]}
    means["nested"] = ["topic.valid_accuracy", "valid.accuracy"]
    metrics = {"a": "both", "b": "probe.accuracy", "c": "own", "d": "pairs.brackets.accuracy"}
    plan = parse_plan(
        plan_with(
            objectives={**{name: {"metric": m} for name, m in metrics.items()}, "masked": {}},
            comparison__suites=suites,
            comparison__means=means,
        )
    )
    assert plan.comparison.parts_of("both") == ("valid.accuracy", "topic.valid_accuracy")
    needed = {objective.name: plan.tuning_suites(objective) for objective in plan.objectives}
    assert needed == {"a": suites[2:], "b": suites[1:2], "c": [], "d": suites[:1], "masked": []}
    assert plan.tuning_metric(plan.objective("masked")) == "valid.loss"


def test_a_stated_default_does_not_change_the_hash() -> None:
    stated = plan_with(comparison__means={}, comparison__level=0.05)
    assert parse_plan(stated).hash == parse_plan(plan_with()).hash


def test_what_a_plan_leaves_out_never_changes_its_meaning() -> None:
    """Defaults do not count in the hash, so a changed one would change plans and not their hash.

    A new behaviour takes a new key, whose default is the old one.
    """
    content = plan_with(tuning__widen=None, usual_budgets=None, controls={})
    plan = parse_plan(content)
    assert (plan.tuning.metric, plan.tuning.widen) == ("valid.loss", 2)
    assert (plan.tuning.plausible, plan.tuning.once, plan.tuning.noise) == (0, (), None)
    assert (plan.comparison.level, plan.comparison.solved) == (0.05, 0.9)
    assert plan.comparison.secondary == ()
    assert plan.comparison.means == plan.comparison.bounds == {}
    assert (plan.comparison.items, plan.comparison.attempts) == (False, None)
    controls = plan.controls
    assert (controls.untrained, controls.shuffled, controls.seeds) == (True, (), (1, 2))
    assert plan.ladder.usual == plan.ladder.budgets
    assert (plan.objectives[0].metric, plan.objectives[0].control) == (None, None)
    counted = {item.name for part in (plan, plan.ladder, controls) for item in fields(part)}
    uncounted = {
        item.name
        for part in (plan.objectives[0], plan.tuning, plan.comparison)
        for item in fields(part)
        if item.default is not MISSING or item.default_factory is not MISSING
    }
    # A further default belongs above.
    assert uncounted == {
        *("grid", "control", "note", "metric", "widen", "plausible", "once", "noise"),
        "level",
        "solved",
        *("means", "bounds", "items", "attempts"),
    }
    assert not counted & uncounted


def test_a_plan_says_what_its_base_does_not(tmp_path: Path) -> None:
    below = plan_with(data={"folder": "moons"}, controls__shifted_valid=True)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "plan.yaml").write_text(yaml.safe_dump(below))
    above = {
        "base": "below/plan.yaml",
        "name": "above",
        "objectives": {"dense": None, "sparse": {"options": ["task.mask_prob=0.05"]}},
        "options": ["schedule=wsd", "task.batch_size=2"],
        "usual_budgets": None,
        "seeds": [3],
        "controls": {"shifted_valid": None, "seeds": [9]},
        "comparison": {"level": 0.01},
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(above))
    plan, content = read_plan(tmp_path / "plan.yaml")
    changes = {"schedule": "schedule=wsd", "task.batch_size": "task.batch_size=2"}
    options = [changes.get(option.partition("=")[0], option) for option in PLAN["options"]]
    same = plan_with(
        options=options,
        data={"folder": str(tmp_path / "below" / "moons")},
        name="above",
        objectives={
            "masked": PLAN["objectives"]["masked"],
            "sparse": above["objectives"]["sparse"],
        },
        usual_budgets=None,
        seeds=[3],
        controls__seeds=[9],
        comparison__level=0.01,
    )
    assert plan.hash == parse_plan(same).hash and content == same
    # Data of a kind are not merged with those of another.
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({**above, "data": {"world": "quad"}}))
    assert read_plan(tmp_path / "plan.yaml")[0].data == {"world": "quad"}
    (tmp_path / "on.yaml").write_text("base: plan.yaml\ndata: {world_seed: 3}\n")
    assert read_plan(tmp_path / "on.yaml")[0].data == {"world": "quad", "world_seed": 3}


@pytest.mark.parametrize(
    "base, message",
    [
        ("plan.yaml", "plan.yaml is a base of itself"),
        ("round.yaml", "plan.yaml is a base of itself"),
        ("nothing.yaml", "nothing.yaml: there is no such file"),
        ("[balanced]", "base"),
        ("balanced", r"plan.yaml: objectives: .*|plan.yaml: comparison.baseline.*'causal'"),
    ],
)
def test_a_base_that_is_no_plan(base: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "round.yaml").write_text("base: plan.yaml\n")
    (tmp_path / "plan.yaml").write_text(f"base: {base}\nobjectives: {{causal: null}}\n")
    with pytest.raises(UsageError, match=message):
        read_plan(tmp_path / "plan.yaml")


def test_few_has_other_documents_and_the_metrics_of_balanced() -> None:
    whole, _ = read_plan(BALANCED)
    for name, documents in (("few", 100), ("few_300", 300), ("few_1000", 1000)):
        plan, _ = read_plan(named_plan(name))
        assert plan.data == {**whole.data, "world_documents": documents}
        assert (plan.comparison, plan.tuning, plan.options) == (
            *(whole.comparison, whole.tuning, whole.options),
        )
        names = [objective.name for objective in plan.objectives]
        assert names[:4] == [objective.name for objective in whole.objectives][:4]
        assert plan.objective("causal").options == whole.objective("causal").options
        assert {"causal_stopped", "causal_dropout", "diffusion"} == set(names[4:])


@pytest.mark.parametrize(
    "name, labels",
    [
        ("garden", {side: {f"sense_{side}", f"attachment_{side}"} for side in SIDES}),
        (
            "recall",
            {
                "left": {"colour_before", "pair_before"},
                "right": {"colour_after", "pair_after"},
                "both": {"pair_across", "match_across"},
            },
        ),
    ],
)
def test_a_plan_asks_every_label_of_its_world_in_each_reading(
    name: str, labels: dict[str, set[str]]
) -> None:
    plan, _ = read_plan(named_plan(name))
    sets = set.union(*labels.values())
    either = {part.partition(".")[0] for part in plan.comparison.means.get("either", ())}
    assert either == ({"fact"} if name == "recall" else set())
    suites = [suite.split()[:2] for suite in plan.comparison.suites]
    assert sorted(of for kind, of in suites if kind == "probe") == sorted(
        [*sets, *either, *(f"{of}_end" for of in sets)]
    )
    assert {of for kind, of in suites if kind == "adapt"} == sets | either
    for side in SIDES:
        assert set(plan.comparison.means[side]) == {f"{of}.share" for of in labels[side]}
    # The means that tune read the valid splits of the same sets.
    parts = plan.comparison.parts_of("balanced")
    tuned = plan.comparison.parts_of("balanced_valid")
    assert [part.replace(".share", ".valid_share") for part in parts] == list(tuned)
    assert plan.tuning_metric(plan.objective("rtd")) == "balanced_valid"
    assert len(set(parts)) == 12


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda file: file.stem)
def test_a_plan_that_ships_has_the_hash_of_its_archive(shipped: Path) -> None:
    plan, content = read_plan(shipped)
    file = archive_beside(shipped)
    assert file is not None and read_about(file)["plan"] == plan.hash
    runs = read_archived(Contents(plan, content)).runs
    assert runs and {run.plan for run in runs} <= {"", plan.hash}


def test_a_plan_that_ships_is_named_unless_a_file_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert named_plan("objectives") == OBJECTIVES and named_plan("balanced") == BALANCED
    assert named_plan("other.yaml") == Path("other.yaml")
    with pytest.raises(UsageError, match="'balanced'"):
        named_plan("balancd")
    Path("objectives").mkdir()
    assert named_plan("objectives") == Path("objectives")


def test_the_hash_does_not_depend_on_the_folder_above_the_data() -> None:
    plans = [parse_plan(plan_with(data={"folder": f})) for f in ("/a/moons", "/b/moons", "/a/x")]
    assert plans[0].hash == plans[1].hash != plans[2].hash


def test_a_relative_data_folder_is_that_beside_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(LAPTOP.read_text().replace("{world: quad,", "{folder: moons} #"))
    plan, content = read_plan(file)
    assert plan.data["folder"] == content["data"]["folder"] == str(tmp_path / "moons")


def test_folders_of_the_user_are_beside_the_plan_and_count_by_name(tmp_path: Path) -> None:
    named = "{folders: [suites/blimp], benchmarks: {glue/CoLA: sets/cola},"
    plans = []
    for base in ("a", "b"):
        (tmp_path / base).mkdir()
        file = tmp_path / base / "plan.yaml"
        file.write_text(LAPTOP.read_text().replace("{world:", f"{named} world:"))
        plans.append(read_plan(file)[0])
        assert plans[-1].data["folders"] == [str(tmp_path / base / "suites" / "blimp")]
        assert plans[-1].data["benchmarks"] == {"glue/CoLA": str(tmp_path / base / "sets" / "cola")}
    others = []
    for name, other in (("blimp", "blimp_2"), ("glue/CoLA", "glue/RTE"), ("cola", "cola_2")):
        file.write_text(
            LAPTOP.read_text().replace("{world:", named.replace(name, other) + " world:")
        )
        others.append(read_plan(file)[0].hash)
    hashes = {read_plan(LAPTOP)[0].hash, plans[0].hash, *others}
    assert plans[0].hash == plans[1].hash and len(hashes) == 5


def test_the_division_that_ships_is_a_plan() -> None:
    plan, content = read_plan(LAPTOP)
    assert parse_plan(content) == plan
    assert len(plan.ladder.seeds) == 8 and len(plan.ladder.usual) == 3
    assert all(objective.trials >= 4 for objective in plan.objectives)


@pytest.mark.parametrize(
    "budget, text", [(6e10, "6e10"), (2.5e11, "2.5e11"), (2e9, "2e9"), (1.0, "1e0")]
)
def test_budgets_are_short_texts(budget: float, text: str) -> None:
    assert budget_text(budget) == text
    assert float(budget_text(budget * 1.2345678901)) == budget * 1.2345678901
