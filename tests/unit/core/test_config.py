"""Ranges of numbers, changes of a stored configuration, and the list of keys."""

from dataclasses import fields, make_dataclass
from pathlib import Path

import pytest

from metaseq_lm.core import loading
from metaseq_lm.core.config import GROUPS, EngineConfig, RunConfig, TrainerConfig, as_dict, flatten
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import describe, load_config
from metaseq_lm.core.registry import ALL, Entry
from metaseq_lm.core.stored import from_stored, override_config

# Between them these configurations have every kind of range.
CHOICES = [
    ["task=sentence_prediction", "criterion=sentence_prediction", "schedule=polynomial"],
    ["optimizer=sgd"],
    ["task=language_modeling", "criterion=language_modeling", "model=bilstm_lm"],
    ["task=electra", "model=electra", "criterion=electra_rtd"],
    ["task=cvt", "model=cnn_bilstm", "criterion=vat"],
]
BEYOND = {
    "at_least": (lambda bound: bound - 1, "at least"),
    "above": (lambda bound: bound, "above"),
    "at_most": (lambda bound: bound + 1, "at most"),
    "below": (lambda bound: bound, "below"),
}


def ranges() -> dict[tuple[str, str], tuple[list[str], float]]:
    """Return the bounds of all numbers of CHOICES: (key, kind of bound) to a choice
    and the bound.
    """
    found: dict[tuple[str, str], tuple[list[str], float]] = {}
    for choice in CHOICES:
        config = load_config(choice)
        schemas = {"trainer": TrainerConfig, "engine": EngineConfig}
        schemas |= {
            group: ALL[group].entry(getattr(config, group)._name).dataclass for group in GROUPS
        }
        for prefix, schema in schemas.items():
            for item in fields(schema):
                for kind in BEYOND.keys() & item.metadata.keys():
                    found.setdefault((f"{prefix}.{item.name}", kind), (choice, item.metadata[kind]))
    return found


def test_numbers_outside_their_range_are_refused() -> None:
    assert {kind for _, kind in ranges()} == set(BEYOND)
    for (key, kind), (choice, bound) in ranges().items():
        beyond, words = BEYOND[kind]
        value = beyond(bound)
        listed = isinstance(flatten(as_dict(load_config(choice)))[key], list)
        with pytest.raises(UsageError, match=f"{key} must be {words} {bound}, got "):
            load_config([*choice, f"{key}=[{value},{value}]" if listed else f"{key}={value}"])


def test_numbers_that_are_not_finite_or_too_long_are_refused() -> None:
    for value, words in (("nan", "task.epochs is nan"), ("inf", "task.epochs is inf")):
        with pytest.raises(UsageError, match=words):
            load_config([*CHOICES[0], f"task.epochs={value}"])
    with pytest.raises(UsageError, match="seed is 9223372036854775808"):
        load_config([f"seed={1 << 63}"])


@pytest.mark.parametrize("value", ["1e3", "1000.0", "1000"])
def test_whole_numbers_may_have_an_exponent(value: str, tmp_path: Path) -> None:
    words = ["trainer.max_update=" + value, "schedule.warmup_updates=" + value]
    by_file = tmp_path / "own.yaml"
    by_file.write_text(f"defaults: [base, _self_]\ntrainer: {{max_update: {value}}}\n")
    configs = [load_config(words), load_config([], str(tmp_path), "own")]
    assert [config.trainer.max_update for config in configs] == [1000, 1000]
    assert type(configs[0].schedule.warmup_updates) is int
    buckets = ["task=translation", "criterion=translation", "model=lstm_encoder_decoder"]
    assert load_config([*buckets, f"task.buckets=[{value}]"]).task.buckets == [1000]
    for wrong in ("1.5", "1e-3"):
        with pytest.raises(UsageError, match="max_update"):
            load_config([f"trainer.max_update={wrong}"])


def test_values_that_are_no_choice_are_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="engine.precision .*'bf61'.* 'bf16'.*fp64"):
        load_config(["engine.precision=bf61"])


def test_every_number_of_a_run_has_a_least_value() -> None:
    for schema in (TrainerConfig, EngineConfig):
        numbers = [f for f in fields(schema) if type(f.default) in (int, float)]
        assert numbers and not [f.name for f in numbers if "at_least" not in f.metadata]


@pytest.fixture
def stored() -> RunConfig:
    """The configuration of a run as its checkpoint holds it."""
    return from_stored(as_dict(load_config(["task=masked_lm"])))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.precision=fp16", "engine.precision is 'fp16'.*Choices: fp32, bf16, fp64"),
        ("engine.device=gpu", "engine.device is 'gpu'.*Choices: auto, cpu, cuda"),
        ("engine.threads=-1", "engine.threads .*at least 0, got -1"),
        ("task.batch_size=0", "task.batch_size .*at least 1, got 0"),
        ("task.batch_size=abc", "task.batch_size: Value 'abc'"),
        ("task.batch_size=", "task.batch_size: "),
        ("task.batch_size=1.5", "task.batch_size: Value '1.5'"),
        ("task.batch_sise=3", "'task.batch_sise' is no option of this run.*'task.batch_size'"),
        ("optimizer.betas=3", "optimizer.betas: "),
        ("task=electra", "'task' is no option of this run"),
        ("task._name=electra", "'task._name' is no option of this run"),
        ("engine=cpu", "'engine' is no option of this run"),
        ("label=${oc.env:HOME}", "asks for the environment variable HOME"),
        ("label=${nothing}", "nothing"),
        ("label=[", "is no YAML"),
        ("label=${", "is no YAML"),
        ("label=&x [*x]", "is no YAML"),
    ],
)
def test_wrong_changes_of_a_run(stored: RunConfig, override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        override_config(stored, [override])


def test_changes_of_a_run_get_their_type(stored: RunConfig) -> None:
    given = ["optimizer.lr=1", "label=12", "task.valid_size=${seed}", "seed=7"]
    changed = override_config(stored, [*given, "optimizer.betas=[0,0.5]", "engine.precision=fp64"])
    assert type(changed.optimizer.lr) is float and changed.optimizer.betas == [0.0, 0.5]
    assert (changed.label, changed.task.valid_size) == ("12", 7)
    assert changed.engine.precision == "fp64"
    assert stored == override_config(stored, []) and stored.optimizer.lr != 1


@pytest.mark.parametrize(
    "choice",
    [
        ["task=squad", "criterion=squad", "optimizer=sgd", "schedule=polynomial"],
        ["task=tagging", "criterion=tagging", "model=cnn_bilstm_small"],
        ["label='an (a) label'", "trainer.final_splits=[test,more]", "init_from=runs/x"],
    ],
)
def test_the_list_of_keys_can_be_given_back(choice: list[str]) -> None:
    """Each line begins with an override, in the spelling that makes the same configuration."""
    config = load_config(choice)
    lines = describe(config).splitlines()
    assert not [line for line in lines if "._name" in line]
    # At least two spaces stand before the help, and none of these values has two in a row.
    overrides = [line.strip().split("  ")[0] for line in lines]
    if "model=cnn_bilstm_small" in choice:
        assert "model=cnn_bilstm" in overrides
    assert load_config(overrides) == config


def test_the_list_of_keys_has_their_help() -> None:
    config = load_config(["task=squad", "criterion=squad"])
    for line in describe(config).splitlines():
        if not line.lstrip().startswith(("optimizer.", "schedule.")):
            assert len(line.strip().split("  ", 1)) == 2, line


BASED = "defaults: [base, _self_]\n"


LEVELS = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
BOMB = "\n".join(["a0: &a0 [x]", *LEVELS])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [", "mine.yaml: not .*line 2, column 1: did not find expected"),
        (f"{BASED}task:\n\tbatch_size: 3\n", "mine.yaml: not .*line 3, column 1: found character"),
        (f"{BASED}label: a\nlabel: b\n", "mine.yaml: not .*line 3, column 1: .*key label twice"),
        (f"{BASED}label: !!python/object/apply:os.system ['ls']\n", "mine.yaml: not .*line 2, col"),
        (f"{BASED}trainer: {{max_update: ???}}\n", "mine.yaml: not .*line 2, column 23: did not"),
        (BASED + BOMB, "mine.yaml: not .*line 6, column 5: its aliases"),
        ("5\n", "mine.yaml or .* is no YAML .*'key: value'"),
        ("label: \udcff\n", "mine.yaml: not .*0xff"),
        ("defaults: [mine]\n", "mine.yaml or .* names itself"),
        (f"{BASED}label: &x [*x]\n", "mine.yaml: not .*line 2, column 8: an alias"),
        ("", "mine.yaml lacks keys .*'defaults: \\[base, _self_\\]'"),
        ("task:\n  batch_size: 3\n", "mine.yaml lacks keys"),
        (f"{BASED}optimizer: {{lr: fast}}\n", "mine.yaml: optimizer.lr: Value 'fast'"),
        (f"{BASED}trainer: 5\n", "mine.yaml: trainer is 5"),
        (f"{BASED}trainr: {{x: 5}}\n", "mine.yaml: unknown option 'trainr'.*'trainer"),
        ("defaults: [base, override task: cvtt]\n", "mine.yaml or .*'cvtt'. Did you mean 'cvt'"),
        ("defaults: [base, override model: mine]\n", "mine.yaml: unknown option 'model.dropot'"),
    ],
)
def test_mistakes_in_a_config_of_ones_own(content: str, message: str, tmp_path: Path) -> None:
    """With and without key=value, one line names the file, the place and the remedy."""
    (tmp_path / "mine.yaml").write_text(content, errors="surrogateescape")
    (tmp_path / "model").mkdir()
    preset = "defaults: [transformer, _self_]\ndropot: 1\n"
    (tmp_path / "model" / "mine.yaml").write_text(preset)
    for overrides in ([], ["data=x"], ["seed=3", "trainer.max_update=1"]):
        with pytest.raises(UsageError, match=message) as raised:
            load_config(overrides, str(tmp_path), "mine")
        assert "\n" not in str(raised.value)


def test_groups_of_a_config_without_base(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("seed: 3\n")
    with pytest.raises(UsageError, match="mine.yaml lacks keys"):
        load_config(["task=cvt"], str(tmp_path), "mine")


def test_folders_beside_a_config_are_no_groups(tmp_path: Path) -> None:
    """`--config-dir .` where data/ and label/ lie too."""
    (tmp_path / "mine.yaml").write_text("defaults: [base, _self_]\n")
    for name in ("data", "label", "seed"):
        (tmp_path / name).mkdir()
    overrides = [f"data={tmp_path / 'data'}", "label=a b", "seed=7", "trainer.max_update=3"]
    config = load_config(overrides, str(tmp_path), "mine")
    assert (config.data, config.label) == (str(tmp_path / "data"), "a b")
    assert (config.seed, config.trainer.max_update) == (7, 3)
    with pytest.raises(UsageError, match="seed"):
        load_config(["seed=many"], str(tmp_path), "mine")


@pytest.mark.parametrize("value", ["=A(1)", "key=b", "it's"])
def test_values_outside_hydras_grammar_are_shown_quoted(value: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_config([f"label={value}"])
    quoted = str(caught.value).split('"')[1]
    assert load_config([quoted]).label == value


def test_hints_know_what_a_config_chooses(tmp_path: Path) -> None:
    choice = "override task: cvt, override criterion: vat, override model: inherit"
    (tmp_path / "mine.yaml").write_text(f"defaults: [base, {choice}]\n")
    for override, message in {
        "task.labeled=[chunk]": "'task.labeled'. Did you mean 'task.labelled'",
        "model.dropout=0.2": r"model=inherit it is \"model.changes=\['dropout=VALUE'\]\"",
        "criterion.parsing_nrm=1": "Did you mean 'criterion.parsing_norm'",
        "model=cnn_bilstm_tinny": "Did you mean 'cnn_bilstm_tiny'",
    }.items():
        with pytest.raises(UsageError, match=message):
            load_config([override], str(tmp_path), "mine")
    # A group given as key=value counts, too, and so does the model that a preset stands for.
    with pytest.raises(UsageError, match="mean 'model.char_widths'"):
        load_config(["model=cnn_bilstm_tiny", "model.char_width=1"], str(tmp_path), "mine")


def test_remembered_compositions_give_what_composing_each_time_gives(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [base, {override /task: sentence_pairs}, _self_]\n"
    )
    compositions: dict = {}
    for config in ((None, None), (str(tmp_path), "mine")):
        for rate in ("0.1", "5e-4"):
            words = [f"optimizer.lr={rate}", "label='a, b'", "data=x/lr=1", "trainer.max_update=7"]
            remembered = load_config(words, *config, compositions)
            loading.compose_packaged.cache_clear()
            assert remembered == load_config(words, *config)
    assert len(compositions) == 2


def test_a_class_that_takes_a_name_later_is_composed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        options = make_dataclass(name.title(), [(name, int, 1)])
        entry = Entry("mine", options, "here.Mine", object)
        monkeypatch.setitem(ALL["criterion"].entries, "mine", entry)
        config = load_config(["criterion=mine", f"criterion.{name}=2"])
        assert as_dict(config)["criterion"] == {"_name": "mine", name: 2}


def test_sections_are_the_dataclasses_of_their_classes() -> None:
    config = load_config([*CHOICES[3], "optimizer.lr=1", "optimizer.betas=[0,0.5]"])
    for group in GROUPS:
        options = getattr(config, group)
        assert isinstance(options, ALL[group].entry(options._name).dataclass)
    assert type(config.optimizer.lr) is float and type(config.optimizer.betas) is list
    text = str(as_dict(config))
    assert "${" not in text


def test_names_of_a_section_are_chosen_not_set() -> None:
    with pytest.raises(UsageError, match="task=NAME"):
        load_config(["task._name=electra"])


def test_hydras_own_choices_are_there_for_who_asks(tmp_path: Path) -> None:
    """They are left out of a composition of the package's configs, which takes half of its time."""
    (tmp_path / "mine.yaml").write_text(
        "defaults: [base, _self_, override hydra/job_logging: disabled]\nseed: 4\n"
    )
    assert load_config([], str(tmp_path), "mine").seed == 4
    assert load_config(["hydra/job_logging=disabled", "hydra.run.dir=x", "seed=5"]).seed == 5
