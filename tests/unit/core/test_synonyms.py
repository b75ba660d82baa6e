"""The words of other tools: each is answered with an option of ours that exists."""

from dataclasses import fields

import pytest

from metaseq_lm.cli import COMMANDS, build_parser
from metaseq_lm.cli.train import FLAGS
from metaseq_lm.core.config import GROUPS, as_dict, flatten
from metaseq_lm.core.loading import common_config
from metaseq_lm.core.mistakes import _unknown_option
from metaseq_lm.core.registry import ALL
from metaseq_lm.core.synonyms import TABLE, _Synonyms, suggest_option

FLAG_KEYS = {f"--{flag}": key for flag, key in FLAGS.items()}


def flags() -> set[str]:
    """Return the flags of all commands."""
    actions = build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    assert set(actions) == set(COMMANDS)
    return {o for sub in actions.values() for a in sub._actions for o in a.option_strings}


def keys() -> set[str]:
    """Return the keys that a run can have."""
    registered = {
        f"{group}.{item.name}"
        for group in GROUPS
        for entry in ALL[group].entries.values()
        for item in fields(entry.dataclass)
    }
    return {*registered, *GROUPS, *flatten(as_dict(common_config()))}


def test_answers_name_options_that_exist() -> None:
    ours = {*flags(), *keys()}
    assert [row.option for row in TABLE if row.option not in ours] == []


def test_no_word_of_the_table_is_an_option_of_train() -> None:
    ours = {flag.removeprefix("--") for flag in FLAG_KEYS}
    rows = [row for row in TABLE if not row.option.startswith("--")]
    assert not [word for row in rows for word in row.words.split() if word in ours]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.option)
def test_every_word_is_answered_in_either_spelling(row: _Synonyms) -> None:
    own = [row.option] if row.option.startswith("--") else []
    for word in row.words.split():
        for spelling in (f"--{word}", f"--{word.replace('-', '_')}"):
            assert "Here it is" in suggest_option(spelling, own, None if own else FLAG_KEYS)


@pytest.mark.parametrize(
    "word, ours",
    [
        ("--learning-rate", "--lr."),
        ("--max_steps", "--max-update."),
        ("--max_update", "--max-update."),
        ("--output_dir", "--save-dir"),
        ("--fp16", "--precision"),
        ("--gradient-accumulation-steps", "engine.micro_batch_size=VALUE: task.batch_size"),
        ("--total-num-update", "schedule.total_updates=VALUE"),
        ("--arch", "--model."),
        ("--betas", "optimizer.betas=VALUE"),
    ],
)
def test_answers_of_train(word: str, ours: str) -> None:
    assert f"Here it is {ours}" in suggest_option(word, [*FLAG_KEYS], FLAG_KEYS)


@pytest.mark.parametrize(
    "key, ours",
    [
        ("learning_rate", "optimizer.lr"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("trainer.max_steps", "trainer.max_update"),
        ("trainer.batch_size", "task.batch_size"),
        ("optimizer.LR", "optimizer.lr"),
        ("engine.precisiun", "engine.precision"),
        ("schedule.total_updates", "polynomial"),
        ("schedule.decay_ratio", "wsd"),
    ],
)
def test_answers_for_keys(key: str, ours: str) -> None:
    known = ["optimizer.lr", "trainer.max_update", "task.batch_size", "engine.precision"]
    assert ours in _unknown_option(key, known)


def test_nothing_is_suggested_where_nothing_is_near() -> None:
    assert "Did you mean" not in _unknown_option("task.foo", ["task.root", "task.elmo"])
