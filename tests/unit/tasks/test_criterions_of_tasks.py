"""Which tasks a criterion is for."""

import pytest

from metaseq_lm import plugins
from metaseq_lm.core.registry import CRITERIONS, TASKS, is_compatible, tasks_for


@pytest.fixture(autouse=True)
def every_name() -> None:
    plugins.load_all(None)


@pytest.mark.parametrize(
    ("criterion", "tasks"),
    [
        ("masked_lm", []),
        ("tagging", ["cvt", "tagging"]),
        ("parsing", ["cvt", "parsing"]),
        ("translation", ["cvt_translation", "translation"]),
        ("image_classification", ["cvt_vision"]),
        ("cvt_aux", ["cvt"]),
        ("word_dropout_translation", ["cvt_translation"]),
        ("vat_vision", ["cvt_vision"]),
        ("tartan_meta", ["tartan", "tartan_vision"]),
    ],
)
def test_tasks_for_names_those_that_fit(criterion: str, tasks: list[str]) -> None:
    assert tasks_for(CRITERIONS.entry(criterion).value) == tasks


@pytest.mark.parametrize("criterion", ["tagging", "image_classification", "translation"])
def test_a_task_for_any_criterion_takes_none_that_needs_other_batches(criterion: str) -> None:
    assert not is_compatible(
        "masked_lm", TASKS.entry("masked_lm").value, CRITERIONS.entry(criterion).value
    )
