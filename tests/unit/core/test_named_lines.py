"""Errors on plans and sweep files name the file, the line and the key."""

from pathlib import Path

import pytest

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.plain_yaml import naming_place

FILE = """\
# A plan.
tuning:
  seeds: [1]
grid:
  optimizer.lr: [1, 2]
  optimizer: {eps: 1}
stages:
- name: a
- {name: b,
   each: {x: 1}}
"""


@pytest.mark.parametrize(
    "message, line",
    [
        ("tuning.seeds: too few", 3),
        ("tuning.noise: not there, its mapping is", 2),
        ("grid.optimizer.lr: the key that has a dot", 5),
        ("grid.optimizer.eps: the key inside", 6),
        ("grid of a thing", 4),
        ("stages[0].name: x", 8),
        ("stages[1].each.x: x", 10),
        ("stages[2]: not there, the list is", 7),
        ("seeds: of nothing here", None),
        ("comparison has no metric", None),
    ],
)
@pytest.mark.parametrize("always", [True, False])
def test_an_error_names_the_line(
    tmp_path: Path, message: str, line: int | None, always: bool
) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(FILE)
    with pytest.raises(UsageError) as error, naming_place(file, always):
        raise UsageError(message)
    prefix = f"{file}:{line}: " if line else f"{file}: " if always else ""
    assert str(error.value) == prefix + message


def test_without_a_file_the_error_stays() -> None:
    with pytest.raises(UsageError, match=r"^tuning.seeds: x$"), naming_place(None, True):
        raise UsageError("tuning.seeds: x")
